"""Globals that no checkpoint needs and that attacks are made of: processes, files, sockets, code. A narrow list, to be sure of each.

``getattr`` and ``functools.partial`` are not on it: pickle itself writes them for bound methods and ``__getnewargs_ex__``. What is not on it is
not safe: it is unknown. What loads is decided by an allowlist, :mod:`ckptconv.safe_loader`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.graph import Graph
from ckptconv.pickles.imports import imported_name

__all__ = ["dangerous_globals"]

_MODULES = frozenset(
    [
        "asyncio",
        "bdb",
        "cProfile",
        "codeop",
        "commands",
        "ctypes",
        "distutils",
        "ensurepip",
        "ftplib",
        "httplib",
        "imaplib",
        "importlib",
        "marshal",
        "multiprocessing",
        "nt",
        "os",
        "pdb",
        "pip",
        "pkgutil",
        "poplib",
        "posix",
        "pty",
        "pydoc",
        "requests",
        "runpy",
        "shutil",
        "smtplib",
        "socket",
        "socketserver",
        "subprocess",
        "sys",
        "telnetlib",
        "timeit",
        "urllib",
        "urllib2",
        "venv",
        "webbrowser",
        "xmlrpc",
        "zipimport",
        "_ctypes",
        "_posixsubprocess",
        "_thread",
        "_winapi",
    ]
)
_NAMES = frozenset(
    [
        "code.InteractiveInterpreter",
        "code.interact",
        "platform.popen",
        "profile.run",
        "site.main",
        "trace.Trace",
        "builtins.__import__",
        "builtins.breakpoint",
        "builtins.compile",
        "builtins.eval",
        "builtins.exec",
        "builtins.execfile",
        "builtins.input",
        "builtins.open",
        "io.open",
        "io.FileIO",
        "_io.open",
        "_io.FileIO",
        "pickle.load",
        "pickle.loads",
        "_pickle.load",
        "_pickle.loads",
        "dill.load",
        "dill.loads",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "torch.serialization.load",
        "torch.storage._load_from_bytes",  # a torch.load of bytes that no safe loader sees; plain pickles need it, and are read without it
        "joblib.load",
        "numpy.load",
        "numpy.fromfile",
        "types.CodeType",
        "types.FunctionType",
    ]
)


def dangerous_globals(graph: Graph) -> Iterator[str]:
    """The dangerous globals that GRAPH names, each once, as the reading Python would look them up."""
    seen: set[str] = set()
    for node in graph.globals:
        name = imported_name(node, graph.protocol)
        if name not in seen and _is_dangerous(name):
            yield name
        seen.add(name)


def _is_dangerous(name: str) -> bool:
    return name.split(".")[0] in _MODULES or any(name == bad or name.startswith(bad + ".") for bad in _NAMES)
