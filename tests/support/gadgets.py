"""Pickles that do harm with functions of Python, torch and the packages that torch needs.

Each pickle writes ``marker`` into the folder in which it is loaded, reads ``marker.txt`` there, or fetches a function
that would do harm. Most of them were reported to scanners of pickles or found by walking the libraries. None of them
names ``os.system``.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from tests.support.hostile_bytes import integer, text

__all__ = ["GADGETS", "SETUP", "Gadget"]

MARKER = text("marker")
CODE = text("open('marker', 'w').close()")
NONE = b"N"


@dataclass(frozen=True)
class Gadget:
    """A harmful pickle: `code` contains the opcodes that push its result.

    `effect` is ``marker`` if the pickle writes that file, ``read`` if it reads ``marker.txt``, and ``fetched`` if it
    only fetches a harmful function. `needs` names the packages that the pickle requires. A `malformed` pickle changes a
    global, which no checkpoint does.
    """

    code: bytes
    effect: str = "marker"
    needs: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 99)  # the last version of Python in which the pickle works
    malformed: bool = False

    @property
    def pickle(self) -> bytes:
        return b"\x80\x04" + self.code + b"."


def of(name: str) -> bytes:
    """Return opcodes that push the global `name`, in the form ``module:name``."""
    module, _, attribute = name.partition(":")
    return text(module) + text(attribute) + b"\x93"


def call(function: bytes | str, *args: bytes) -> bytes:
    function = of(function) if isinstance(function, str) else function
    return function + b"(" + b"".join(args) + b"tR"


def get(value: bytes | str, name: str) -> bytes:
    """Return opcodes that call ``getattr`` with `value` and `name`."""
    return call("builtins:getattr", of(value) if isinstance(value, str) else value, text(name))


def new(cls: str, state: bytes = b"") -> bytes:
    """Return opcodes that push an instance of `cls` with `state`, created without a call of ``__init__``."""
    return of(cls) + b")\x81" + (state + b"b" if state else b"")


def mapping(*items: bytes) -> bytes:
    return b"}(" + b"".join(items) + b"u"


def sequence(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def data(value: bytes) -> bytes:
    return b"B" + len(value).to_bytes(4, "little") + value


def with_keywords(function: bytes | str, **keywords: bytes) -> bytes:
    """Return opcodes that call `function` with `keywords`, by means of a pickled partial function."""
    function = of(function) if isinstance(function, str) else function
    named = mapping(*(part for name, value in keywords.items() for part in (text(name), value)))
    partial = call("functools:partial", function) + tuple_of(function, b")", named, NONE) + b"b"
    return call(partial)


PATH = call("pathlib:PosixPath", MARKER)
EMPTY = mapping
INNER = data(pickle.dumps(None)[:2] + b"cposix\nmkdir\n(X\x06\x00\x00\x00markertR.")
FIRST = call("operator:itemgetter", integer(0))
ARRAY = call(
    "numpy._core.multiarray:_reconstruct", of("numpy:ndarray"), tuple_of(integer(1)), data(b"b")
)  # an array with one number
ELEMENT = call("xml.etree.ElementTree:Element", text("a"))
SYMBOL = call("sympy:Symbol", text("x"))
MKDIR = call("operator:methodcaller", text("mkdir"))

#: Files in the folder before the pickle is loaded.
SETUP = {"marker.txt": "text", "import.pth": "import os; os.mkdir('marker')\n"}

GADGETS: dict[str, Gadget] = {
    # methods of the results of calls
    "Path.mkdir by getattr": Gadget(call(get(PATH, "mkdir"))),
    "Path.touch by getattr": Gadget(call(get(PATH, "touch"))),
    "Path.write_text by getattr": Gadget(call(get(PATH, "write_text"), text("x"))),
    "Path.unlink by getattr": Gadget(get(call("pathlib:PosixPath", MARKER), "unlink"), "fetched"),
    "Path.mkdir by methodcaller": Gadget(call(call("operator:methodcaller", text("mkdir")), PATH)),
    "Path.mkdir by attrgetter": Gadget(call(call(call("operator:attrgetter", text("mkdir")), PATH))),
    "Path.mkdir of an instance with a state": Gadget(call(get(PATH + NONE + b"0", "mkdir"))),
    "Path.mkdir as a function": Gadget(call("pathlib:Path.mkdir", PATH)),
    "Path.touch of a subclass": Gadget(call("pathlib:PosixPath.touch", PATH)),
    "Path.rmdir by getattr of the class": Gadget(get("pathlib:Path", "rmdir"), "fetched"),
    "Path.mkdir of a partial function": Gadget(call(call("functools:partial", get(PATH, "mkdir")))),
    "Path.mkdir of what a method gives": Gadget(
        call(get(call(get(call("pathlib:PosixPath", text("a")), "with_name"), MARKER), "mkdir"))
    ),
    "Path.mkdir of Path.cwd": Gadget(
        call(get(call(get(call("pathlib:Path.cwd"), "joinpath"), MARKER), "mkdir"))
    ),
    "Path.mkdir by numpy": Gadget(call("numpy._core.fromnumeric:_wrapfunc", PATH, text("mkdir")), needs=("numpy",)),
    "ElementTree.write": Gadget(call(get(call("xml.etree.ElementTree:ElementTree", ELEMENT), "write"), MARKER)),
    "Snapshot.dump of tracemalloc": Gadget(
        call(get(call("tracemalloc:Snapshot", b")", integer(1)), "dump"), MARKER)
    ),
    "ndarray.tofile": Gadget(call(get(ARRAY, "tofile"), MARKER), needs=("numpy",)),
    "ndarray.dump": Gadget(call(get(ARRAY, "dump"), MARKER), needs=("numpy",)),
    "Template.copy of pipes": Gadget(
        call("pipes:Template") + b"q\x050" + call(get(b"h\x05", "append"), text("mkdir marker"), text("--")) + b"0"
        + call(get(b"h\x05", "copy"), text("/dev/null"), text("/dev/null")),
        python=(3, 12),
    ),
    "ArgumentParser.parse_args of a file": Gadget(
        call(
            get(with_keywords("argparse:ArgumentParser", fromfile_prefix_chars=text("@")), "parse_known_args"),
            sequence(text("@marker.txt")),
        ),
        "read",
    ),
    "FileType.__call__ of argparse": Gadget(call(call("argparse:FileType", text("w")), MARKER)),
    "mbox of mailbox": Gadget(call("mailbox:mbox", MARKER)),
    "Maildir of mailbox": Gadget(call("mailbox:Maildir", MARKER)),
    "LWPCookieJar.save": Gadget(call(get(call("http.cookiejar:LWPCookieJar", MARKER), "save"))),
    "Stats.dump_stats": Gadget(call(get(call("pstats:Stats"), "dump_stats"), MARKER), needs=("pstats",)),
    "ConfigParser.read": Gadget(call(get(call("configparser:ConfigParser"), "read"), text("import.pth")), "fetched"),
    # functions that look up names
    "getmodule of inspect": Gadget(call(get(call("inspect:getmodule", of("os:PathLike")), "mkdir"), MARKER)),
    "getattr_static of inspect": Gadget(
        call(call("inspect:getattr_static", call("inspect:getmodule", of("os:PathLike")), text("mkdir")), MARKER)
    ),
    "Formatter.get_field": Gadget(
        call(
            call(
                FIRST,
                call(
                    get(call("string:Formatter"), "get_field"),
                    text("0.__init__.__globals__[_os].mkdir"), tuple_of(of("random:Random")), EMPTY(),
                ),
            ),
            MARKER,
        )
    ),
    "_importer of unittest.mock": Gadget(
        call(get(call("unittest.mock:_importer", text("os")), "mkdir"), MARKER), python=(3, 10)
    ),
    "patch of unittest.mock": Gadget(
        call(call(FIRST, call(get(call("unittest.mock:patch", text("os.mkdir")), "get_original"))), MARKER)
    ),
    "_getattribute of pickle": Gadget(
        call(
            call(
                FIRST, call("pickle:_getattribute", call("inspect:getmodule", of("random:Random")), text("_os.mkdir"))
            ),
            MARKER,
        ),
        python=(3, 12),
    ),
    "_ufunc_reconstruct of numpy": Gadget(
        call(call("numpy.core:_ufunc_reconstruct", text("os"), text("mkdir")), MARKER), needs=("numpy",)
    ),
    "loadTestsFromName": Gadget(
        call(get(call("unittest.loader:TestLoader"), "loadTestsFromName"), text("os.getcwd")), "fetched"
    ),
    "import_string of jinja2": Gadget(
        call(call("jinja2.utils:import_string", text("os:mkdir")), MARKER), needs=("jinja2",)
    ),
    "try_import of torch": Gadget(
        call(get(call("torch._utils:try_import", text("os")), "mkdir"), MARKER), needs=("torch",)
    ),
    "get_device_module of torch": Gadget(
        call(call("torch:__getattr__", text("_meta_registrations")) + NONE + b"0"), "fetched", needs=("torch",)
    ),
    "_resolve of logging.config": Gadget(call(call("logging.config:_resolve", text("os.mkdir")), MARKER)),
    "EvalEnv of torch.jit": Gadget(
        call(get(call("torch.jit.annotations:EvalEnv", EMPTY()), "__getitem__"), text("open")),
        "fetched", needs=("torch",),
    ),
    "a registry of extension codes": Gadget(
        of("copyreg:_inverted_registry") + integer(7) + tuple_of(text("os"), text("mkdir")) + b"s0"
        + b"\x82\x07(" + MARKER + b"tR",
        malformed=True,
    ),
    "a table that copyreg keeps": Gadget(
        call("operator:setitem", of("copyreg:dispatch_table"), of("builtins:int"), of("builtins:len")), "fetched"
    ),
    # functions that evaluate code
    "ForwardRef": Gadget(
        call(get(call("typing:ForwardRef", CODE), "_evaluate"), EMPTY(), EMPTY(), call("builtins:frozenset")),
        python=(3, 12),
    ),
    "_eval_type of typing": Gadget(
        call("typing:_eval_type", call("typing:ForwardRef", CODE), EMPTY(), EMPTY()), python=(3, 13)
    ),
    "_create_fn of dataclasses": Gadget(
        call("dataclasses:_create_fn", text("f"), sequence(text("a=open('marker', 'w')")), sequence(text("pass"))),
        python=(3, 12),
    ),
    "findmatch of mailcap": Gadget(
        call(
            "mailcap:findmatch",
            mapping(text("a/b"), sequence(mapping(text("view"), text(""), text("test"), text("mkdir marker")))),
            text("a/b"),
        ),
        python=(3, 12),
    ),
    "addpackage of site": Gadget(call("site:addpackage", text("."), text("import.pth"), call("builtins:set"))),
    "Timer of torch.utils.benchmark": Gadget(
        call(get(call("torch.utils.benchmark.utils.timer:Timer", CODE), "timeit"), integer(1)), needs=("torch",)
    ),
    "unpickled by a data pipe": Gadget(
        new("torch.utils.data.datapipes.datapipe:_IterDataPipeSerializationWrapper", tuple_of(INNER, b"\x89")),
        needs=("torch",),
    ),
    "_tensor_to_object of torch.distributed": Gadget(
        call("torch.distributed.distributed_c10d:_tensor_to_object", NONE, integer(1), NONE), "fetched",
        needs=("torch",),
    ),
    "from_string of jinja2": Gadget(
        call(
            get(
                call(
                    get(call("jinja2.environment:Environment"), "from_string"),
                    text("{{ cycler.__init__.__globals__.os.mkdir('marker') }}"),
                ),
                "render",
            )
        ),
        needs=("jinja2",),
    ),
    "sympify": Gadget(call("sympy:sympify", CODE), needs=("sympy",)),
    "a function of sympy": Gadget(call("sympy:sin", CODE), needs=("sympy",)),
    "a function of sympy of a text that is computed": Gadget(
        call("sympy:sin", call("operator:concat", text("open('marker'"), text(", 'w')"))), needs=("sympy",)
    ),
    "a function of sympy of a symbol's text": Gadget(
        call("sympy:sin", call("sympy:sstr", call("sympy:Symbol", CODE))), needs=("sympy",)
    ),
    "a method of a symbol": Gadget(call(get(SYMBOL, "subs"), text("x"), CODE), needs=("sympy",)),
    "a method of what a symbol's method gives": Gadget(
        call(get(call(get(SYMBOL, "expand")), "subs"), text("x"), CODE), needs=("sympy",)
    ),
    "map of a methodcaller of a symbol": Gadget(
        call(
            "builtins:list", call("builtins:map", call("operator:methodcaller", text("diff"), CODE), sequence(SYMBOL))
        ),
        needs=("sympy",),
    ),
    "an undefined function of sympy": Gadget(
        call(call("sympy.core.function:_rebuild_undef", text("f"), EMPTY()), CODE), needs=("sympy",)
    ),
    "a class of torch's that is sympy's": Gadget(
        call("torch.utils._sympy.functions:FloorDiv", CODE, integer(2)), needs=("torch", "sympy")
    ),
    "map of a function of sympy": Gadget(
        call("builtins:list", call("builtins:map", of("sympy:cos"), sequence(CODE))), needs=("sympy",)
    ),
    "lambdify of sympy": Gadget(call("sympy:lambdify", b")", text("__import__('os')")), "fetched", needs=("sympy",)),
    # functions that call their arguments, and methods that Python calls implicitly
    "map of a methodcaller": Gadget(call("builtins:list", call("builtins:map", MKDIR, sequence(PATH)))),
    "starmap of a methodcaller": Gadget(
        call("builtins:list", call("itertools:starmap", MKDIR, sequence(tuple_of(PATH))))
    ),
    "a partial methodcaller": Gadget(call(call("functools:partial", MKDIR, PATH))),
    "key of sorted": Gadget(
        call(call("functools:partial", of("builtins:sorted")) + tuple_of(
            of("builtins:sorted"), tuple_of(sequence(PATH)), mapping(text("key"), MKDIR), NONE
        ) + b"b")
    ),
    "run of a thread": Gadget(
        call(get(
            new("threading:Thread", mapping(
                text("_target"), MKDIR, text("_args"), tuple_of(PATH), text("_kwargs"), mapping()
            )),
            "run",
        ))
    ),
    "submit of an executor": Gadget(
        call(get(call("concurrent.futures:ThreadPoolExecutor"), "submit"), MKDIR, PATH)
    ),
    "__get__ of a property": Gadget(call(get(call("builtins:property", MKDIR), "__get__"), PATH)),
    "tree_map of torch": Gadget(call("torch.utils._pytree:tree_map", MKDIR, PATH), needs=("torch",)),
    "map of a FileType": Gadget(
        call("builtins:list", call("builtins:map", call("argparse:FileType", text("w")), sequence(MARKER)))
    ),
    "enter_context of chdir": Gadget(
        call(get(call("contextlib:ExitStack"), "enter_context"), new("contextlib:chdir", mapping(
            text("path"), text("."), text("_old_cwd"), sequence()
        ))),
        "fetched",
    ),
    "a list of a FileOpener of torch": Gadget(
        call("builtins:list", call("torch.utils.data.datapipes.iter:FileOpener", sequence(MARKER))), "fetched",
        needs=("torch",),
    ),
    # effects without a call
    "an item of os.environ": Gadget(of("os:environ") + text("a") + text("b") + b"s", "fetched", malformed=True),
    "an item of os.environ under another name": Gadget(
        of("random:_os.environ") + b"(" + text("a") + text("b") + b"u", "fetched", malformed=True
    ),
    "a state of os.environ": Gadget(
        of("os:environ") + mapping(text("encodekey"), of("builtins:len")) + b"b", "fetched", malformed=True
    ),
    "an item by a function": Gadget(
        call("operator:setitem", of("os:environ"), text("a"), text("b")), "fetched"
    ),
    "a folder in sys.path": Gadget(of("sys:path") + text(".") + b"a", "fetched", malformed=True),
    "folders in sys.path": Gadget(of("sys:path") + b"(" + text(".") + b"e", "fetched", malformed=True),
    "a module in sys.modules": Gadget(
        of("torch.hub:sys.modules") + text("a") + of("math:sin") + b"s", "fetched", malformed=True, needs=("torch",)
    ),
    "a member of what torch calls safe": Gadget(
        of("torch._weights_only_unpickler:_marked_safe_globals_set") + b"(" + of("math:sin") + b"\x90", "fetched",
        malformed=True, needs=("torch",),
    ),
    "a state of a logger": Gadget(
        of("logging:root") + mapping(text("disabled"), b"\x88") + b"b", "fetched", malformed=True
    ),
    "a method of torch.nn.Linear": Gadget(
        of("torch.nn:Linear") + tuple_of(NONE, mapping(text("forward"), of("torch:relu"))) + b"b", "fetched",
        malformed=True, needs=("torch",),
    ),
    # classes and functions that create files
    "GzipFile": Gadget(call("gzip:GzipFile", MARKER, text("wb"))),
    "BZ2File": Gadget(call("bz2:BZ2File", MARKER, text("wb"))),
    "LZMAFile": Gadget(call("lzma:LZMAFile", MARKER, text("wb"))),
    "FileHandler": Gadget(call("logging:FileHandler", MARKER)),
    "basicConfig of logging": Gadget(with_keywords("logging:basicConfig", filename=MARKER)),
    "wave.open": Gadget(call("wave:open", MARKER, text("wb"))),
    "Wave_write of wave": Gadget(call("wave:Wave_write", MARKER)),
    "sunau.open": Gadget(call("sunau:open", MARKER, text("wb")), python=(3, 12)),
    "aifc.open": Gadget(call("aifc:open", MARKER, text("wb")), python=(3, 12)),
    "mkdtemp": Gadget(call("tempfile:mkdtemp", text(""), MARKER, text("."))),
    "NamedTemporaryFile": Gadget(
        call("tempfile:NamedTemporaryFile", text("w"), integer(-1), NONE, NONE, text(""), MARKER, text("."), b"\x89"),
    ),
    "TemporaryDirectory": Gadget(call("tempfile:TemporaryDirectory", text(""), MARKER, text(".")), "fetched"),
    "open_memmap of numpy": Gadget(
        call("numpy.lib.format:open_memmap", MARKER, text("w+"), text("u1"), tuple_of(integer(4))), needs=("numpy",)
    ),
    "_dump of numpy": Gadget(call("numpy._core._methods:_dump", integer(1), MARKER), needs=("numpy",)),
    "_open_file of torch": Gadget(call("torch.serialization:_open_file", MARKER, text("w")), needs=("torch",)),
    "_open_zipfile_writer_file of torch": Gadget(
        call(get(call("torch.serialization:_open_zipfile_writer_file", MARKER), "__exit__"), NONE, NONE, NONE),
        needs=("torch",),
    ),
    "FileBaton of torch": Gadget(
        call(get(call("torch.utils.file_baton:FileBaton", MARKER), "try_acquire")), needs=("torch",)
    ),
    "FileSystem.mkdir of torch.distributed": Gadget(
        call(get(call("torch.distributed.checkpoint.filesystem:FileSystem"), "mkdir"), PATH), needs=("torch",)
    ),
    "a frozen FileSystem of torch": Gadget(
        call(get(new("torch.distributed.checkpoint.filesystem:FileSystem"), "mkdir"), PATH), needs=("torch",)
    ),
    "LocalFileSystem.mkdir of fsspec": Gadget(
        call(get(call("fsspec.implementations.local:LocalFileSystem"), "mkdir"), MARKER), needs=("fsspec",)
    ),
    "FileLock": Gadget(call(get(call("filelock:FileLock", MARKER), "acquire")), needs=("filelock",)),
    "open_file of click": Gadget(call("click:open_file", MARKER, text("w")), needs=("click",)),
    "save_file of safetensors": Gadget(call("safetensors.torch:save_file", EMPTY(), MARKER), needs=("safetensors",)),
    "write_adjlist of networkx": Gadget(
        call("networkx:write_adjlist", call("networkx:Graph"), MARKER), needs=("networkx",)
    ),
    "write_file of setuptools": Gadget(
        call("setuptools._distutils.file_util:write_file", MARKER, sequence(text("x"))), needs=("setuptools",)
    ),
    "save of this package": Gadget(call("ckptconv:save", EMPTY(), MARKER), needs=("torch",)),
    "_TemporaryFileWrapper of tempfile": Gadget(
        call("tempfile:_TemporaryFileWrapper", call("io:StringIO"), MARKER), "fetched"
    ),
    "an item that is deleted from a mailbox": Gadget(
        call("operator:delitem", new("mailbox:MH", mapping(text("_path"), text("."))), MARKER), "fetched"
    ),
    "a Process of torch.multiprocessing": Gadget(
        with_keywords("torch.multiprocessing:Process", target=MKDIR, args=tuple_of(PATH)), "fetched", needs=("torch",)
    ),
    "a Pool of torch.multiprocessing": Gadget(
        call("torch.multiprocessing:Pool", integer(1), MKDIR, tuple_of(PATH)), "fetched", needs=("torch",)
    ),
    "the executable of torch.multiprocessing": Gadget(
        call("torch.multiprocessing:set_executable", MARKER), "fetched", needs=("torch",)
    ),
    "write_atomic of torch under another name": Gadget(
        call("torch._functorch._aot_autograd.autograd_cache:write_atomic", MARKER, text("x")), needs=("torch",)
    ),
    "numpy.test": Gadget(
        call("numpy:test", text("fast"), integer(1), sequence(text("--junitxml=marker"))), "fetched", needs=("numpy",)
    ),
    "a GraphModule of torch.fx": Gadget(
        call(
            "torch.fx.graph_module:reduce_graph_module",
            mapping(text("_code"), text("open('marker', 'w')\ndef forward(self): pass")), text(""),
        ),
        needs=("torch",),
    ),
    # functions and classes that read files
    "ProcessFailure of torch": Gadget(
        call("torch.distributed.elastic.multiprocessing:ProcessFailure", integer(0), integer(0), integer(1), MARKER),
        "fetched", needs=("torch",),
    ),
    "getlines of linecache": Gadget(call("linecache:getlines", text("marker.txt")), "read"),
    "genfromtxt of numpy": Gadget(
        call("numpy:genfromtxt", text("marker.txt"), of("builtins:str")), "read", needs=("numpy",)
    ),
    "parse of minidom": Gadget(call("xml.dom.minidom:parse", text("marker.txt")), "fetched"),
    "parse of sax": Gadget(call("xml.sax:parse", text("marker.txt"), NONE), "fetched"),
    "netrc": Gadget(call("netrc:netrc", text("marker.txt")), "fetched"),
    # aliases
    "os under another name": Gadget(call("random:_os.mkdir", MARKER)),
    "an alias in torch": Gadget(call("torch.utils._config_module:inspect.getmodule", of("os:PathLike")), "fetched"),
    "the network": Gadget(call("wsgiref.simple_server:make_server", text(""), integer(0), NONE), "fetched"),
}  # fmt: skip
