"""Globals that no checkpoint needs and that attacks are made of: processes, files, sockets, code. A narrow list, to be sure of each.

``getattr``, ``operator.attrgetter`` and ``functools.partial`` are not on it: pickle itself writes the first for bound methods, the last for ``__getnewargs_ex__``. But what
``getattr`` is asked for must be said, and lead to no innards (``__globals__``). What is not on the list is not safe: it is unknown. What loads is decided by an allowlist, :mod:`ckptconv.safe_loader`.

Sources: the advisories for pickle scanners, each of which was missed by one (https://github.com/mmaitre314/picklescan/security/advisories).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.graph import Call, Global, Graph, Node, args_of, children, walk
from ckptconv.old_spellings import text_of
from ckptconv.pickles.imports import imported_as, imported_name

__all__ = ["dangerous_globals", "is_dangerous", "reaches"]

_LONGEST_SHOWN = 40  # characters of an attribute's name

#: Nothing in these, nor below them, belongs into a checkpoint.
_MODULES = frozenset(
    [
        # processes, the system
        "asyncio", "commands", "multiprocessing", "nt", "os", "pexpect", "posix", "psutil", "pty", "shutil", "subprocess", "sys",
        "_aix_support", "_asyncio", "_osx_support", "_posixsubprocess", "_pyrepl", "_thread", "_winapi",
        # the network
        "aiohttp", "ftplib", "httplib", "imaplib", "nntplib", "paramiko", "poplib", "requests", "smtplib", "socket", "socketserver", "ssl",
        "telnetlib", "urllib", "urllib2", "urllib3", "webbrowser", "xmlrpc", "_socket", "_ssl",
        # code, and what finds or runs it
        "bdb", "cProfile", "cffi", "codeop", "compileall", "ctypes", "distutils", "doctest", "ensurepip", "gc", "idlelib", "imp", "importlib",
        "lib2to3", "marshal", "modulefinder", "pdb", "pip", "pkgutil", "py_compile", "pydoc", "rlcompleter", "runpy", "timeit", "tkinter",
        "venv", "zipapp", "zipimport",
        "_cffi_backend", "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_imp", "_interpreters", "_lsprof", "_testcapi",
        "_testinternalcapi", "_tkinter", "_xxsubinterpreters",
        # files
        "dbm", "fileinput", "shelve", "sqlite3", "tarfile", "zipfile", "_pyio",
    ]
)  # fmt: skip

#: Functions and classes elsewhere, and all below them. Modules stand here in full where their name alone can be anybody's.
_NAMES = frozenset(
    [
        "__builtin__.apply",
        *(f"builtins.{name}" for name in (
            "__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile", "globals", "help", "input", "locals", "open", "reload", "setattr", "vars",
        )),
        "atexit.register",
        "code.InteractiveConsole",
        "code.InteractiveInterpreter",
        "code.compile_command",
        "code.interact",
        "copyreg.add_extension",
        "copyreg.pickle",
        "functools.reduce",
        "http.client",
        "http.server",
        "_functools.reduce",
        "logging.FileHandler",
        "logging.config",
        "operator.call",
        "_operator.call",
        "platform.popen",
        "platform._syscmd_file",
        "platform._syscmd_ver",
        *(f"pathlib.{kind}.{name}" for kind in ("Path", "PosixPath", "WindowsPath") for name in (
            "chmod", "hardlink_to", "mkdir", "open", "rename", "replace", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text",
        )),
        "profile.Profile",
        "profile.run",
        "profile.runctx",
        "signal.pthread_kill",
        "signal.raise_signal",
        "signal.signal",
        "site.addsitedir",
        "site.main",
        "test.support",
        "trace.Trace",
        "types.CodeType",
        "types.FunctionType",
        "uuid._get_command_stdout",
        "uuid._popen",
        # files
        *(f"{module}.open" for module in ("_io", "bz2", "codecs", "gzip", "io", "lzma")),
        "io.FileIO",
        "_io.FileIO",
        # pickles, and files with pickles or code in them, read by readers that run them
        *(f"{module}.{name}" for module in ("_pickle", "cPickle", "dill", "dill._dill", "pickle") for name in (
            "Unpickler", "load", "loads",
        )),
        "pickle._Unpickler",
        "pickle._load",
        "pickle._loads",
        "joblib.load",
        "joblib.numpy_pickle.load",
        "pandas.eval",
        "pandas.io.pickle.read_pickle",
        "pandas.read_pickle",
        "yaml.full_load",
        "yaml.load",
        "yaml.unsafe_load",
        "numpy.ctypeslib",
        "numpy.distutils",
        "numpy.f2py",
        "numpy.fromfile",
        "numpy.lib._npyio_impl",
        "numpy.lib.npyio",
        "numpy.load",
        "numpy.testing._private",
        "torch._dynamo.guards.GuardBuilder.get",
        "torch._inductor.codecache",
        "torch.classes.load_library",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
        "torch.hub",
        "torch.jit.load",
        "torch.jit.unsupported_tensor_ops",
        "torch.load",
        "torch.multiprocessing.spawn",
        "torch.ops.load_library",
        "torch.package",
        "torch.serialization.load",
        "torch.storage._load_from_bytes",  # a torch.load of bytes that no safe loader sees; plain pickles need it, and are read without it
        "torch.utils._config_module.ConfigModule.load_config",
        "torch.utils.bottleneck",
        "torch.utils.collect_env",
        "torch.utils.cpp_extension",
        "torch.utils.data.datapipes.utils.decoder.basichandlers",
    ]
)  # fmt: skip
_MOST_PARTS = max(name.count(".") for name in _NAMES) + 1

#: Attributes that lead from anything to everything: to the module that something was made in, to all classes, to what runs code.
_INNARDS = frozenset(
    ["__base__", "__bases__", "__builtins__", "__closure__", "__code__", "__dict__", "__getattribute__", "__globals__", "__import__", "__loader__", "__mro__", "__reduce__", "__reduce_ex__", "__self__", "__setattr__", "__spec__", "__subclasses__", "ag_frame", "cr_frame", "f_back", "f_builtins", "f_globals", "f_locals", "func_code", "func_globals", "gi_code", "gi_frame", "mro", "tb_frame"]
)  # fmt: skip

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


def dangerous_globals(graph: Graph) -> Iterator[str]:
    """The dangerous globals that GRAPH names, each once, as the reading Python would look them up."""
    named = (imported_name(node, graph.protocol) for node in graph.globals if is_dangerous(node))
    yield from dict.fromkeys([*named, *(what for what, _ in reaches(graph))])


def is_dangerous(node: Global) -> bool:
    """Whether NODE is a dangerous global, as it is spelled or as Python 2's name: torch's safe loader maps those under every protocol."""
    module, name = imported_as(node, 2)
    if _leads_to_danger(module, name):
        return True
    return (module, name) != (node.module, node.name) and _leads_to_danger(node.module, node.name)


def _leads_to_danger(module: str, name: str) -> bool:
    """A name with dots goes through attributes: ``torch.serialization`` has ``os.system``."""
    package, attributes = module.split("."), name.split(".")
    words = package + attributes
    if not _INNARDS.isdisjoint(attributes):
        return True
    starts = (0, *range(len(package), len(words)))
    return any(
        words[i] in _MODULES
        or any(".".join(words[i:end]) in _NAMES for end in range(i + 2, min(i + _MOST_PARTS, len(words)) + 1))
        for i in starts
    )


def reaches(graph: Graph) -> Iterator[tuple[str, Node]]:
    """What GRAPH does with ``getattr`` and its like that nobody needs, and where: innards looked up, names that are computed, the function itself handed on."""
    functions = {id(node) for node in graph.globals if imported_name(node, 2) in _LOOK_UP}
    if not functions:
        return
    for node in walk([graph.root, *graph.discarded]):
        called = node.callable if isinstance(node, Call) and node.kind != "NEWOBJ" else None
        if isinstance(called, Global) and id(called) in functions and isinstance(node, Call):
            yield from ((f"{imported_name(called, 2)} of {what}", node) for what in _looked_up(node, called))
        for child in children(node):
            if isinstance(child, Global) and child is not called and id(child) in functions:
                yield f"{imported_name(child, 2)}, not called", child


def _looked_up(call: Call, function: Global) -> Iterator[str]:
    """Names that CALL of FUNCTION looks up and no checkpoint needs."""
    args = args_of(call)
    name = imported_name(function, 2)
    names = args[1:2] if "getattr" in name else args if "attrgetter" in name else args[:1]
    if not names:
        yield "what is computed"
    for each in names:
        text = text_of(each)
        if text is None:
            yield "what is computed"
        elif _is_way_out(text.split(".")):
            yield repr(text[:_LONGEST_SHOWN])


def _is_way_out(words: Iterable[str]) -> bool:
    return any(word in _INNARDS or word in _MODULES for word in words)
