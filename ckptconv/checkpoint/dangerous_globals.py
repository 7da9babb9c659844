"""Dangerous globals: functions that no checkpoint needs and that attacks are made of.

The list is narrow, to be sure of each.

``getattr``, ``operator.attrgetter`` and ``functools.partial`` are not on it: pickle itself writes the first for bound
methods, the last for ``__getnewargs_ex__``. But what ``getattr`` is asked for must be said, and lead to no innards
(``__globals__``), and nothing is called with ``getattr`` itself, nor with an ``attrgetter`` of ``sys``.
``reduce_graph_module`` of torch.fx runs source text, and every saved GraphModule names it: so it is unknown. What is
not on the list is not safe: it is unknown. What loads is decided by an allowlist,
:mod:`ckptconv.checkpoint.safe_globals`.

Sources: the advisories for pickle scanners, each of which was missed by one
(https://github.com/mmaitre314/picklescan/security/advisories).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.pickles.graph import Call, Global, Graph, Node, Value, args_of, children, walk
from ckptconv.pickles.python2_names import imported_as, imported_name

__all__ = ["DANGEROUS_MODULES", "DANGEROUS_NAMES", "dangerous_globals", "is_dangerous", "reaches"]

_LONGEST_SHOWN = 40  # characters of an attribute's name
_DEEPEST = 20  # attributes of attributes

#: Nothing in these, nor below them, belongs into a checkpoint.
DANGEROUS_MODULES = frozenset(
    [
        # processes, the system
        "asyncio", "commands", "multiprocessing", "nt", "os", "pexpect", "posix", "psutil", "pty", "shutil",
        "subprocess", "sys", "_aix_support", "_asyncio", "_osx_support", "_posixsubprocess", "_pyrepl", "_thread",
        "_winapi",
        # the network
        "aiohttp", "ftplib", "httplib", "imaplib", "nntplib", "paramiko", "poplib", "requests", "smtplib", "socket",
        "socketserver", "ssl", "telnetlib", "urllib", "urllib2", "urllib3", "webbrowser", "xmlrpc", "_socket", "_ssl",
        # code, and what finds or runs it
        "bdb", "cProfile", "cffi", "codeop", "compileall", "ctypes", "distutils", "doctest", "ensurepip", "gc",
        "idlelib", "imp", "importlib", "lib2to3", "marshal", "modulefinder", "pdb", "pip", "pkgutil", "py_compile",
        "pydoc", "rlcompleter", "runpy", "timeit", "tkinter", "venv", "zipapp", "zipimport", "_cffi_backend",
        "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_imp", "_interpreters", "_lsprof", "_testcapi",
        "_testinternalcapi", "_tkinter", "_xxsubinterpreters",
        # files
        "dbm", "fileinput", "shelve", "sqlite3", "tarfile", "zipfile", "_pyio",
    ]
)  # a table  # fmt: skip

#: Functions and classes elsewhere, and all below them. Modules stand here in full where
#: their name alone can be anybody's.
DANGEROUS_NAMES = frozenset(
    [
        "__builtin__.apply",
        *(
            f"builtins.{name}" for name in (
                "__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile", "globals",
                "help", "input", "locals", "open", "reload", "setattr", "vars",
            )
        ),
        "atexit.register", "bz2._builtin_open", "code.InteractiveConsole", "code.InteractiveInterpreter",
        "code.compile_command", "code.interact", "copyreg.add_extension", "copyreg.pickle", "functools.reduce",
        "http.client", "http.server", "_functools.reduce", "logging.FileHandler", "logging.config",
        "logging.handlers", "operator.__call__", "operator.call", "_operator.call", "platform.popen",
        "platform._syscmd_file", "platform._syscmd_ver",
        *(
            f"pathlib.{kind}.{name}" for kind in ("Path", "PosixPath", "WindowsPath") for name in (
                "chmod", "hardlink_to", "mkdir", "open", "rename", "replace", "rmdir", "symlink_to", "touch", "unlink",
                "write_bytes", "write_text",
            )
        ),
        "profile.Profile", "profile.run", "profile.runctx", "signal.pthread_kill", "signal.raise_signal",
        "signal.signal", *(f"_signal.{name}" for name in ("pthread_kill", "raise_signal", "signal")),
        "site.addsitedir", "site.main", "tempfile.TemporaryDirectory", "test.support", "tokenize._builtin_open",
        "trace.Trace", "types.CodeType", "turtle.TK", "turtle.simpledialog", "types.FunctionType", "types.LambdaType",
        "unittest.mock._dot_lookup", "unittest.mock._get_target", "unittest.mock._importer",
        "uuid._get_command_stdout", "uuid._popen",
        # files
        *(f"{module}.open" for module in ("_io", "bz2", "codecs", "gzip", "io", "lzma")), "io.FileIO", "_io.FileIO",
        # pickles, and files with pickles or code in them, read by readers that run them
        *(
            f"{module}.{name}" for module in ("_pickle", "cPickle", "dill", "dill._dill", "pickle") for name in (
                "Unpickler", "load", "loads",
            )
        ),
        "pickle._Unpickler", "pickle._load", "pickle._loads", "joblib.load", "joblib.numpy_pickle.load",
        "pandas.eval", "pandas.io.pickle.read_pickle", "pandas.read_pickle", "yaml.full_load", "yaml.load",
        "yaml.unsafe_load", "numpy.ctypeslib", "numpy.distutils", "numpy.f2py", "numpy.lib._datasource",
        "numpy.lib._npyio_impl", "numpy.lib.npyio",
        *(
            f"numpy.{name}" for name in (
                "load", "ndarray.dump", "ndarray.tofile", "save", "savetxt", "savez", "savez_compressed",
            )
        ),
        "numpy.testing._private", "torch._dynamo.guards.GuardBuilder.get", "torch._inductor.codecache",
        "torch._inductor.cpp_builder", "torch._dynamo.convert_frame.original_forward_from_src",
        "torch.classes.load_library", "torch.cuda.amp.common.find_spec", "torch.cuda.tunable.mp",
        "torch.distributed.distributed_c10d._unpickler", "torch.distributed.rpc.internal._unpickler",
        "torch.from_file",
        *(f"torch.fx.graph_module.{name}" for name in ("_exec_with_source", "_forward_from_src", "_method_from_src")),
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression", "torch.hub",
        "torch.jit._serialization", "torch.jit.load", "torch.jit.save", "torch.jit.unsupported_tensor_ops",
        "torch.load",
        *(
            f"torch.multiprocessing.{name}" for name in (
                "reducer", "reductions.reduction", "reductions.register_after_fork", "spawn",
            )
        ),
        "torch.ops.load_library", "torch.package", "torch.save", "torch.serialization.load",
        "torch.serialization.save",
        # a torch.load of bytes that no safe loader sees; plain pickles need it, and are read without it
        "torch.storage._load_from_bytes",
        "torch.utils._osp", "torch.utils._config_module.ConfigModule.load_config", "torch.utils.bottleneck",
        "torch.utils.collect_env", "torch.utils.cpp_extension", "torch.utils.data.dataloader.python_multiprocessing",
        "torch.utils.data.datapipes.iter.routeddecoder.decoder_basichandlers",
        "torch.utils.data.datapipes.utils.decoder.basichandlers",
        *(f"torch.xpu.{name}" for name in ("byref", "cast", "pointer")),
    ]
)  # a table  # fmt: skip
#: Whose modules lend what they import.
_LENDERS = sys.stdlib_module_names | {"numpy", "torch"}
_MOST_PARTS = max(name.count(".") for name in DANGEROUS_NAMES) + 1

#: Attributes under which modules lend others' functions and modules, whatever the module: what they are called there,
#: or are elsewhere.
_LENT = frozenset([
    "bltns", "builtins", "cPickle", "ntpath", "pickle", "posixpath", "CodeType", "ForkingPickler", "FunctionType",
    "LambdaType", "fromfile", "import_dotted_name", "import_module", "start_new_thread",
])  # a table  # fmt: skip

#: Plain values of modules on the list, and what is called like a function on it.
_HARMLESS = frozenset(
    [
        *(
            f"{module}.{name}"
            for module in ("nt", "os", "posix")
            for name in ("PathLike", "stat_result", "terminal_size")
        ),
        "torch.distributed.distributed_c10d.reduce",
        "torch.distributed.reduce",
    ]
)

#: Classes of arrays that open the file that they are called with. numpy names them to rebuild what was one.
_MAPPED = frozenset(["numpy.memmap", "numpy._core.memmap.memmap", "numpy.core.memmap.memmap"])
_REBUILDERS = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in ("_core", "core"))

#: Attributes that lead from anything to everything: to the module that something was made
#: in, to all classes, to what runs code.
_INNARDS = frozenset([
    "__base__", "__bases__", "__builtins__", "__closure__", "__code__", "__dict__", "__getattribute__",
    "__globals__", "__import__", "__loader__", "__mro__", "__reduce__", "__reduce_ex__", "__self__", "__setattr__",
    "__spec__", "__subclasses__", "ag_frame", "cr_frame", "f_back", "f_builtins", "f_globals", "f_locals",
    "func_code", "func_globals", "gi_code", "gi_frame", "mro", "tb_frame",
])  # a table  # fmt: skip

#: What looks attributes up by names that it is given.
_LOOK_UP = frozenset(
    [
        "builtins.getattr",
        "inspect.getattr_static",
        "operator.attrgetter",
        "operator.methodcaller",
        "_operator.attrgetter",
        "_operator.methodcaller",
    ]
)
_GETATTRS = ("builtins.getattr", "inspect.getattr_static")


def dangerous_globals(graph: Graph) -> Iterator[str]:
    """The dangerous globals that `graph` names, each once, as the reading Python would look them up."""
    named = (imported_name(node, graph.protocol) for node in graph.globals if is_dangerous(node))
    yield from dict.fromkeys([*named, *(what for what, _ in reaches(graph))])


def is_dangerous(node: Global) -> bool:
    """Whether `node` is a dangerous global, as it is spelled or as Python 2's name: torch's safe
    loader maps those under every protocol.
    """
    module, name = imported_as(node, 2)
    if _leads_to_danger(module, name):
        return True
    return (module, name) != (node.module, node.name) and _leads_to_danger(node.module, node.name)


def _leads_to_danger(module: str, name: str) -> bool:
    """A name with dots goes through attributes: ``torch.serialization`` has
    ``os.system``, ``random`` has it as ``_os.system``.
    """
    package, attributes = module.split("."), name.split(".")
    if f"{module}.{name}" in _HARMLESS:
        return False
    if not _INNARDS.isdisjoint(attributes):
        return True
    bare = [word.lstrip("_") for word in attributes]
    if not _LENT.isdisjoint(bare) or (
        package[0] in _LENDERS and (attributes[-1] == "reduce" or _is_file(package, bare))
    ):
        return True
    return any(_is_listed(package + words, len(package)) for words in (attributes, bare))


def _is_file(package: list[str], attributes: list[str]) -> bool:
    """Whether they name a storage of torch's that is made of a file, or written to one."""
    return package[0] == "torch" and attributes[-1] in ("from_file", "write_file")


def _is_listed(words: list[str], package: int) -> bool:
    """Whether `words`, of which `package` are the module's, name something on the lists, as a whole or
    behind an attribute.
    """
    starts = (0, *range(package, len(words)))
    return any(
        words[i] in DANGEROUS_MODULES
        or any(".".join(words[i:end]) in DANGEROUS_NAMES for end in range(i + 2, min(i + _MOST_PARTS, len(words)) + 1))
        for i in starts
    )


def reaches(graph: Graph) -> Iterator[tuple[str, Node]]:
    """What `graph` does that nobody needs with ``getattr`` and its like, and where: innards looked up, names that are
    computed, the function itself handed on. And with arrays in files: make one.
    """
    functions = {id(node) for node in graph.globals if imported_name(node, 2) in _LOOK_UP}
    mapped = {id(node) for node in graph.globals if imported_name(node, 2) in _MAPPED}
    if not functions and not mapped:
        return
    nodes = [*walk([graph.root, *graph.discarded])]
    rebuilds = [node for node in nodes if isinstance(node, Call) and _name_of(node.callable) in _REBUILDERS]
    alone = {id(node) for node in rebuilds}
    rebuilt = {id(node.args) for node in rebuilds}
    rebuilt -= {id(child) for node in nodes if id(node) not in alone for child in children(node)}
    used = {id(each) for each in walk([child for node in nodes if isinstance(node, Call) for child in children(node)])}
    for node in nodes:
        called = node.callable if isinstance(node, Call) and node.kind != "NEWOBJ" else None
        if isinstance(called, Global) and id(called) in functions and isinstance(node, Call):
            found = _looked_up(node, called, is_used=id(node) in used)
            yield from ((f"{imported_name(called, 2)} of {what}", node) for what in found)
        for child in children(node):
            if not isinstance(child, Global) or not (isinstance(node, Call) or id(node) in used):
                continue
            if id(child) in functions and child is not called:
                yield f"{imported_name(child, 2)}, not called", child
            elif id(child) in mapped and id(node) not in rebuilt:
                yield imported_name(child, 2), child


def _looked_up(call: Call, function: Global, *, is_used: bool) -> Iterator[str]:
    """Names that `call` of `function` looks up and no checkpoint needs.

    `is_used`: something is called with what it gives.
    """
    args = args_of(call)
    name = imported_name(function, 2)
    is_getattr = "getattr" in name
    names = args[1:2] if is_getattr else args if "attrgetter" in name else args[:1]
    if not names:
        yield "what is computed"
    base = _base_of(args[0]) if is_getattr and names else None
    for each in names:
        text = text_of(each)
        words = text.split(".") if text is not None else []
        if text is None:
            yield "what is computed"
        elif not (is_getattr or is_used) and _INNARDS.isdisjoint(words):
            continue
        elif _is_way_out(words) or (base and _leads_to_danger(base[0], f"{base[1]}.{text}")):
            yield repr(text[:_LONGEST_SHOWN])


def _base_of(value: Value) -> tuple[str, str] | None:
    """Module and name of what `value` is: a global, or what ``getattr`` gives of one."""
    names: list[str] = []
    while isinstance(value, Call) and (_name_of(value.callable) or "").endswith(_GETATTRS):
        args = args_of(value)
        text = text_of(args[1]) if len(args) > 1 else None
        if text is None:
            return None
        names.append(text)
        if len(names) == _DEEPEST:
            return "", ".".join(reversed(names))
        value = args[0]
    if not isinstance(value, Global):
        return None
    module, name = imported_as(value, 2)
    return module, ".".join([name, *reversed(names)])


def _name_of(value: Value) -> str | None:
    return imported_name(value, 2) if isinstance(value, Global) else None


def _is_way_out(words: Iterable[str]) -> bool:
    return any(word in _INNARDS or word.lstrip("_") in DANGEROUS_MODULES or word.lstrip("_") in _LENT for word in words)
