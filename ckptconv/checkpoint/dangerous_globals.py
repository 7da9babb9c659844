"""Dangerous globals: names that attacks use and that no checkpoint needs.

There are two sources of names:

- The lists in this module: complete modules, functions written in C, and names in other packages.
- The table ``dangerous_globals.txt`` next to this module: harmful functions and methods in Python, torch and the
  packages that torch needs. ``tools/danger_table/make.py`` in the repository generates it from their source code. The
  table is read at the first lookup of a global that torch's safe loader does not accept. The line of a module is parsed
  at the first lookup in this module.

Neither contains a name that an honest checkpoint uses. Calls and their arguments are judged in
:mod:`ckptconv.checkpoint.dangerous_calls`.

``getattr``, ``operator.attrgetter`` and ``functools.partial`` are in neither: pickle itself writes the first for bound
methods and the last for ``__getnewargs_ex__``. ``reduce_graph_module`` of torch.fx is listed although every saved
GraphModule names it, because it runs source text from the pickle. A name in neither source is not safe, but unknown.
The allowlist in :mod:`ckptconv.checkpoint.safe_globals` decides which globals load.

Source of the lists: advisories for pickle scanners, each of which was missed by a scanner
(https://github.com/mmaitre314/picklescan/security/advisories).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ckptconv.pickles.graph import Global, imported_as
from ckptconv.work import work

_TABLE = Path(__file__).with_name("dangerous_globals.txt")
_MOST_WORDS = 20  # parts of a dotted name
_LONGEST_NAME = 6  # parts of a name in the table
_MOST_OTHERS = 100  # other names and bases that are followed from one name

#: The kind of an entry. ``name``: dangerous if it is named. ``class``: a class that is dangerous if it is called.
#: ``new``: a class of which making an instance in any way is dangerous. ``table``: a table that other code relies on.
Entry: TypeAlias = Literal["name", "class", "new", "table"]

_WORST: tuple[Entry, ...] = ("name", "table", "new", "class")


class _Table(NamedTuple):
    """The content of ``dangerous_globals.txt``. The lines of modules are not parsed yet."""

    packages: frozenset[str]
    modules: dict[str, tuple[str, ...]]  # modules by the names that other modules have for them
    lines: dict[str, str]
    methods: frozenset[str]
    methods_in_c: frozenset[str]


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Return the table. It is read at the first call."""
    packages: frozenset[str] = frozenset()
    modules: dict[str, tuple[str, ...]] = {}
    lines: dict[str, str] = {}
    methods = in_c = frozenset[str]()
    loader: Any = __spec__.loader
    for line in loader.get_data(str(_TABLE)).decode().splitlines():  # the package can be in an archive
        head, _, rest = line.partition(" ")
        if head == "packages:":
            packages = frozenset(rest.split())
        elif head == "methods:":
            methods = frozenset(rest.split())
        elif head == "in-c:":
            in_c = frozenset(rest.split())
        elif head.endswith(":") and head != "pythons:":
            modules[head[:-1]] = tuple(rest.split())
        elif head != "#":
            lines[head] = rest
    return _Table(packages, modules, lines, methods, in_c)


@lru_cache(maxsize=1024)
def _names(module: str) -> dict[str, Entry | tuple[str, ...]]:
    """Return the entries in the line of `module`.

    ``name`` and ``name()`` have the kind of the entry. ``=name`` has the other names of the same object, and
    ``<name`` the bases of the class. The dict is empty if the table does not contain the module.
    """
    found: dict[str, Entry | tuple[str, ...]] = {}
    others: dict[str, list[str]] = {}
    for word in _table().lines.get(module, "").split():
        if word.endswith(("()", "(new)")):
            found[word.partition("(")[0] + "()"] = "new" if word.endswith("(new)") else "class"
        elif word.endswith("[]"):
            found[word[:-2]] = "table"
        elif "=" in word or "<" in word:
            name, _, other = word.replace("<", "=").partition("=")
            others.setdefault(f"={name}" if "=" in word else f"<{name}", []).append(other)
        else:
            found[word] = found[word.rstrip("?")] = "name"
    return found | {name: tuple(each) for name, each in others.items()}


def is_known_package(module: str) -> bool:
    """Return whether the table covers the package of `module`: Python, torch, or a package that torch needs."""
    return module.partition(".")[0] in _table().packages


def is_method(name: str, *, of_known_class: bool = False) -> bool:
    """Return whether a method with this `name` does harm in any class of the packages in the table.

    If `of_known_class` is True, only methods written in C count, because the table lists all others by class.
    """
    table = _table()
    return name in table.methods_in_c or (not of_known_class and name in table.methods)


def modules_called(word: str) -> tuple[str, ...]:
    """Return the modules that some module of a known package has imported under the name `word`."""
    return _table().modules.get(word, ())


@lru_cache(maxsize=1024)
def _mentioned(module: str) -> frozenset[str]:
    """Return the first component of each name in the line of `module`."""
    return frozenset(key.lstrip("=<").partition(".")[0].partition("(")[0] for key in _names(module))


def is_mentioned(module: str, name: str) -> bool:
    """Return whether the table may contain `name` of `module` or one of its methods. This is faster than a lookup."""
    return "." in name or name in _mentioned(module)


def only_looks_up(module: str, name: str) -> bool:
    """Return whether the method `name` in `module` only looks up an attribute whose name is its argument."""
    return listed(module, f"{name}?") is not None


@lru_cache(maxsize=4096)
def listed(module: str, name: str) -> Entry | None:
    """Return the entry of `name` in `module`, or None if there is none.

    Each component of a dotted name can be a class, a module or another name of one; all are tried, and the worst
    entry is returned. A name of more than 20 components is dangerous.
    """
    words = name.split(".")
    if len(words) > _MOST_WORDS:
        return "name"
    starts = [(module, 0)]
    for i, word in enumerate(words[:-1]):
        starts += ((of, i + 1) for of in (*modules_called(word), word))
        starts.append((f"{module}.{'.'.join(words[: i + 1])}", i + 1))
    found = [_in_module(of, words[at:]) for of, at in starts]
    return next((entry for entry in _WORST if entry in found), None)


def _in_module(module: str, words: list[str]) -> Entry | None:
    """Return the entry of the dotted name `words` in `module`, or None. The first words can name a class."""
    if module not in _table().lines:
        return None
    for end in range(1, min(len(words), _LONGEST_NAME) + 1):
        for of, name, is_base in _others(module, ".".join(words[:end])):
            names = _names(of)
            known = names.get(name)
            if not is_base and (known == "name" or known == "table"):
                return known
            if end < len(words) and names.get(f"{name}.{words[end]}") == "name":
                return "name"
            made = names.get(name + "()")
            if end == len(words) and not is_base and made in ("class", "new"):
                return "new" if made == "new" else "class"
    return None


@lru_cache(maxsize=4096)
def _others(module: str, name: str) -> tuple[tuple[str, str, bool], ...]:
    """Return all objects that `name` in `module` can be.

    These are the object of this name, the same object under other names, and the bases of a class. Each element is a
    module, a name in it, and whether the object is a base.
    """
    found = {(module, name, False): None}
    todo = [*found]
    while todo and len(found) < _MOST_OTHERS:
        of, what, is_base = todo.pop()
        names = _names(of)
        for mark in "=<":
            others = names.get(mark + what)
            for other in others if isinstance(others, tuple) else ():
                each = (*_module_of(other), is_base or mark == "<")
                if each not in found:
                    found[each] = None
                    todo.append(each)
    return tuple(found)


def _module_of(full: str) -> tuple[str, str]:
    """Return the module and the name in it of the full name `full`.

    The module is empty if the table does not contain it.
    """
    parts = full.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in _table().lines:
            return module, ".".join(parts[end:])
    return "", full


#: Modules in which all names are dangerous, with all modules below them.
DANGEROUS_MODULES = frozenset(
    [
        # processes, the system
        "asyncio", "commands", "multiprocessing", "nt", "os", "pexpect", "posix", "psutil", "pty", "shutil",
        "subprocess", "sys", "_aix_support", "_asyncio", "_osx_support", "_posixsubprocess", "_pyrepl", "_thread",
        "_winapi", "_multiprocessing", "_overlapped", "_signal", "fcntl", "msvcrt", "termios", "winreg",
        # the network
        "aiohttp", "ftplib", "httplib", "imaplib", "nntplib", "paramiko", "poplib", "requests", "smtplib", "socket",
        "socketserver", "ssl", "telnetlib", "urllib", "urllib2", "urllib3", "webbrowser", "xmlrpc", "_socket", "_ssl",
        # code, and everything that finds or runs code
        "antigravity", "bdb", "cProfile", "cffi", "codeop", "compileall", "ctypes", "distutils", "doctest",
        "ensurepip", "gc", "idlelib", "imp", "importlib", "lib2to3", "marshal", "modulefinder", "pdb", "pip",
        "pkgutil", "py_compile", "pkg_resources", "pydoc", "rlcompleter", "runpy", "setuptools", "timeit", "tkinter",
        "turtledemo", "unittest", "venv", "zipapp", "zipimport", "_cffi_backend", "_ctypes", "_distutils_hack",
        "_frozen_importlib", "_frozen_importlib_external", "_imp", "_interpreters", "_lsprof", "_remote_debugging",
        "_testcapi", "_testinternalcapi", "_tkinter", "_xxsubinterpreters",
        # files
        "asynchat", "asyncore", "dbm", "filelock", "fileinput", "mailbox", "mailcap", "shelve", "smtpd", "sqlite3",
        "tarfile", "zipfile", "_dbm", "_gdbm", "_posixshmem", "_pyio", "_sqlite3",
        # this package: its functions write files, and none of its classes is pickled
        "ckptconv",
    ]
)  # a table  # fmt: skip

#: Functions and classes in other modules, with all names below them. A module is listed by its full name if the last
#: part of its name is common.
DANGEROUS_NAMES = frozenset(
    [
        "__builtin__.apply",
        *(
            f"builtins.{name}" for name in (
                "__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile", "exit",
                "globals", "help", "input", "locals", "open", "quit", "raw_input", "reload", "setattr", "vars",
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
        *(f"readline.{name}_history_file" for name in ("append", "read", "write")), "readline.read_init_file",
        "profile.Profile", "profile.run", "profile.runctx", "signal.pthread_kill", "signal.raise_signal",
        "signal.signal",
        "site.addsitedir", "site.main", "tempfile.TemporaryDirectory",
        "tempfile._TemporaryFileWrapper", "ossaudiodev.open", "ossaudiodev.openmixer",
        *(f"test.{name}" for name in ("__main__", "autotest", "libregrtest", "regrtest", "support")),
        "tokenize._builtin_open",
        "trace.Trace", "types.CodeType", "turtle.TK", "turtle.simpledialog", "types.FunctionType", "types.LambdaType",
        "unittest.mock._dot_lookup", "unittest.mock._get_target", "unittest.mock._importer",
        "uuid._get_command_stdout", "uuid._popen",
        # files
        *(f"{module}.open" for module in ("_io", "bz2", "codecs", "gzip", "io", "lzma")), "io.FileIO", "_io.FileIO",
        # readers that run pickles or code in files
        *(
            f"{module}.{name}" for module in ("_pickle", "cPickle", "dill", "dill._dill", "pickle") for name in (
                "Unpickler", "load", "loads",
            )
        ),
        *(f"cloudpickle.{name}" for name in ("load", "loads", "cloudpickle.load", "cloudpickle.loads")),
        "dill._dill._create_code", "dill._dill._import_module", "dill.load_module", "dill.load_module_asdict",
        "dill.load_session", "dill.session", "pickle._Unpickler", "pickle._load",
        "pickle._loads", "joblib.load", "joblib.numpy_pickle.load",
        "pandas.eval", "pandas.io.pickle.read_pickle", "pandas.read_pickle", "yaml.full_load", "yaml.load",
        "yaml.unsafe_load", "numpy.ctypeslib", "numpy.distutils", "numpy.f2py", "numpy.lib._datasource",
        "numpy.lib._npyio_impl", "numpy.lib.npyio",
        *(
            f"numpy.{name}" for name in (
                "load", "ndarray.dump", "ndarray.tofile", "save", "savetxt", "savez", "savez_compressed",
            )
        ),
        "numpy.testing._private", "torch._dynamo.guards.GuardBuilder.get", "torch._inductor",
        "torch._dynamo.convert_frame.original_forward_from_src",
        "torch._vendor", "torch.classes.load_library", "torch.testing._internal",
        "torch._functorch._aot_autograd.aot_autograd_result", "torch._functorch._aot_autograd.autograd_cache",
        "torch._C._aoti", "torch._C._distributed_rpc", "torch._C._profiler",
        "torch.cuda.amp.common.find_spec", "torch.cuda.tunable.mp",
        "torch.distributed.distributed_c10d._unpickler", "torch.distributed.rpc.internal._unpickler",
        "torch.from_file",
        *(f"torch.fx.graph_module.{name}" for name in ("_exec_with_source", "_forward_from_src", "_method_from_src")),
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression", "torch.hub",
        "torch.jit._serialization", "torch.jit.load", "torch.jit.save", "torch.jit.unsupported_tensor_ops",
        "torch.load",
        *(
            f"torch.multiprocessing.{name}" for name in (
                "Manager", "Pool", "Process", "ProcessContext", "SpawnContext", "get_context", "pool", "reducer",
                "reductions.reduction", "reductions.register_after_fork", "set_executable", "set_forkserver_preload",
                "spawn",
            )
        ),
        "torch.ops.load_library", "torch.package", "torch.save", "torch.serialization.load",
        "torch.serialization.save",
        # calls torch.load on bytes; plain pickles need it, and are read here without it
        "torch.storage._load_from_bytes",
        "torch.utils._osp", "torch.utils._config_module.ConfigModule.load_config", "torch.utils.bottleneck",
        "torch.utils.collect_env", "torch.utils.cpp_extension", "torch.utils.data.dataloader.python_multiprocessing",
        "torch.utils.data.datapipes.iter.routeddecoder.decoder_basichandlers",
        "torch.utils.data.datapipes.utils.decoder.basichandlers",
        *(f"torch.xpu.{name}" for name in ("byref", "cast", "pointer")),
    ]
)  # a table  # fmt: skip
_MOST_PARTS = max(name.count(".") for name in DANGEROUS_NAMES) + 1

#: Attributes of any module that are dangerous functions and modules of other modules.
_LENT = frozenset([
    "bltns", "builtins", "cPickle", "ntpath", "pickle", "posixpath", "CodeType", "ForkingPickler", "FunctionType",
    "LambdaType", "fromfile", "import_dotted_name", "import_module", "start_joinable_thread", "start_new_thread",
])  # a table  # fmt: skip

#: Exceptions: plain values in listed modules, and harmless functions with the name of a listed one.
_HARMLESS = frozenset(
    [
        *(
            f"{module}.{name}"
            for module in ("nt", "os", "posix")
            for name in ("PathLike", "stat_result", "terminal_size")
        ),
        "torch.distributed.distributed_c10d.reduce",
        "torch.distributed.reduce",
        # judged by their arguments
        *(f"numpy.{core}._ufunc_reconstruct" for core in ("core", "_core")),
        *(
            f"torch.{where}.ProfilerActivity"
            for where in ("_C._autograd", "_C._profiler", "autograd", "autograd.profiler", "profiler")
        ),
        # subclasses of tensors in listed modules
        "torch._inductor.freezing.ErasedTensor",
        *(
            f"torch.testing._internal.{name}"
            for name in (
                "common_subclass.DiagTensorBelow", "common_subclass.NonWrapperTensor",
                "common_subclass.RedispatchTensor", "common_subclass.SparseTensor",
                "common_subclass.SubclassWithTensorFactory", "common_subclass.WrapperTensor",
                "common_subclass.WrapperTensorWithCustomSizes", "common_subclass.WrapperTensorWithCustomStrides",
                "custom_tensor.ConstantExtraMetadataTensor", "custom_tensor.CustomTensorPlainOut",
                "logging_tensor.LoggingTensor", "logging_tensor.LoggingTensorReentrant",
                "subclasses.WrapperSubclass", "two_tensor.TwoTensor",
            )
        ),
    ]
)  # a table  # fmt: skip

#: Methods of torch's storages that read and write files.
_STORAGES_OF_FILES = frozenset(["from_file", "write_file"])
#: Attributes that lead from any object to every other: to its module, to all classes, to functions that run code.
INNARDS = frozenset([
    "__base__", "__bases__", "__builtins__", "__closure__", "__code__", "__dict__", "__getattribute__",
    "__globals__", "__import__", "__loader__", "__mro__", "__reduce__", "__reduce_ex__", "__self__", "__setattr__",
    "__getattr__", "__spec__", "__subclasses__", "ag_frame", "cr_frame", "f_back", "f_builtins", "f_globals",
    "f_locals", "func_code", "func_globals", "gi_code", "gi_frame", "mro", "tb_frame",
])  # a table  # fmt: skip


def is_dangerous(node: Global) -> bool:
    """Return whether `node` is a dangerous global, as it is spelled or under Python 3's name for a name of Python 2.

    torch's safe loader maps these names under every protocol.
    """
    module, name = imported_as(node, 2)
    if leads_to_danger(module, name):
        return True
    return (module, name) != (node.module, node.name) and leads_to_danger(node.module, node.name)


def leads_to_danger(module: str, name: str) -> bool:
    """Return whether `name` in `module` is dangerous, by the lists, the table or an internal attribute in the name.

    A dotted `name` goes through attributes: ``torch.serialization`` has ``os.system``, and ``random`` has it as
    ``_os.system``.
    """
    work().charge((len(module) + len(name)) // 10)  # a long name can be fetched from again and again
    package, attributes = module.split("."), name.split(".")
    if f"{module}.{name}" in _HARMLESS:
        return False
    if not INNARDS.isdisjoint(attributes):
        return True
    if is_on_lists(module, name):
        return True
    return is_known_package(package[0]) and _is_lent(module, package, name, attributes)


def is_on_lists(module: str, name: str) -> bool:
    """Return whether `name` in `module`, or an attribute in it, is on the lists in this module.

    The table is not used.
    """
    package, attributes = module.split("."), name.split(".")
    bare = [word.lstrip("_") for word in attributes]
    if not _LENT.isdisjoint(bare):
        return True
    spellings = [attributes] if bare == attributes else [attributes, bare]
    return any(_is_listed(package + words, len(package)) for words in spellings)


def _is_lent(module: str, package: list[str], name: str, attributes: list[str]) -> bool:
    """Return whether `name` in `module` does harm by the table or by a rule of this function.

    `module` belongs to a known package. `package` and `attributes` are the components of `module` and `name`. The
    rules cover cases that are not in the table: ``reduce`` with a function, storages in files, pytest with options,
    modules that are programs or tests.
    """
    if attributes[-1] == "reduce" or (package[0] == "numpy" and name == "test"):
        return True
    if package[0] == "torch" and not _STORAGES_OF_FILES.isdisjoint(word.lstrip("_") for word in attributes):
        return True
    if package[1:] and (package[-1] == "__main__" or "tests" in package):
        return True
    rest = ((word, ".".join(attributes[i:])) for i, word in enumerate(attributes[:-1][:_MOST_PARTS], 1))
    if listed(module, name) in ("name", "table") or any(
        is_on_lists(other, words) for alias, words in rest for other in modules_called(alias)
    ):
        return True
    return len(attributes) > 1 and not attributes[-2].lstrip("_")[:1].isupper() and is_method(attributes[-1])


def _is_listed(words: list[str], package: int) -> bool:
    """Return whether the dotted name `words`, or a dotted name inside it, is on the lists.

    The first `package` words are the module.
    """
    work().charge(len(words))  # a pickle can name a thousand components with two opcodes
    starts = (0, *range(package, len(words)))
    return any(
        words[i] in DANGEROUS_MODULES or (words[i] in _first_words() and _starts_listed(words, i)) for i in starts
    )


@cache
def _first_words() -> frozenset[str]:
    """Return the first words of the dangerous names."""
    return frozenset(name.partition(".")[0] for name in DANGEROUS_NAMES)


def _starts_listed(words: list[str], start: int) -> bool:
    """Return whether at least two of `words`, from the position `start` on, form a name in DANGEROUS_NAMES."""
    work().charge(_MOST_PARTS)
    ends = range(start + 2, min(start + _MOST_PARTS, len(words)) + 1)
    return any(".".join(words[start:end]) in DANGEROUS_NAMES for end in ends)


def is_way_out(words: Iterable[str]) -> bool:
    """Return whether an attribute in `words` leads from any object to all others, or to a dangerous module."""
    return any(word in INNARDS or word.lstrip("_") in DANGEROUS_MODULES or word.lstrip("_") in _LENT for word in words)
