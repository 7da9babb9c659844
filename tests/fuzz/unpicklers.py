"""What CPython's two unpicklers reach in a pickle, and whether the lenient reader lists all of it.

Both run in this process, in C (``_pickle``) and in Python (``pickle._Unpickler``), on a class that does nothing: each
global, persistent id and buffer is that class, and so is what any call gives. So nothing is imported and nothing is
run, and nothing that a pickle does to an object fails, but what every object refuses.

C's memo is an array: a slot of 2^28 makes it take four gigabytes. So this is for processes that are started for it and
have a bound on their address space.
"""

from __future__ import annotations

import _pickle
import contextlib
import copyreg
import functools
import io
import itertools
import mmap
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.pickles.lenient import scan_lenient

__all__ = ["CODES", "READERS", "Compared", "Reached", "Way", "bounded", "compared", "reached"]

#: Extension codes that have a global; a pickle names no other one, because there is none in Python itself.
CODES = {code: ("extension", f"e{code}") for code in (1, 2, 130, 255, 256, 513, 65535, 65536, (1 << 31) - 1)}
#: The text that calls give where they give texts, and how the lenient reader says that it cannot know one.
_MADE, _ANY = "made", "builtins.__import__"
_ENCODINGS = ("latin-1", "latin-1", "utf-8", "ASCII", "bytes")
_FRAME = b"\x95"
_MOST = 1 << 16  # opcodes
_MORE = 32 << 20  # bytes


class Reached(NamedTuple):
    """What an unpickler did: the globals that it looked up, and whether it `used` one of them."""

    by: str
    globals: list[tuple[str, str]]
    used: bool


class Compared(NamedTuple):
    """How many globals were `reached`, and what the lenient reader `missed` of them.

    `doubtful`: it says itself that it cannot tell, so the pickle is never called harmless.
    """

    reached: int
    doubtful: bool
    missed: str | None


class Way(NamedTuple):
    """How a pickle is loaded: the encoding of Python 2's strings, which its loader says; whether calls give texts, or
    what is looked up is one.
    """

    encoding: str
    calls_give_texts: bool
    names_give_texts: bool


class _Kind(type):
    """What can be done to an object: by calling it, by its methods, as a sequence of arguments."""

    used = False

    def _use(cls, *operands: Any, **named: Any) -> Any:
        _Kind.used = True
        return cls.result

    __call__ = __setstate__ = __setitem__ = append = extend = add = _use
    result: Any = None

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Inert(metaclass=_Kind):
    """A global, and what is made of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _Kind.used = True
        return cls.result


class _Quiet(type):
    """What can be done to an object, where that is not the pickle's doing."""

    def _ignore(cls, *operands: Any, **named: Any) -> Any:
        return _Inert.result

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Loaded(metaclass=_Quiet):
    """What a persistent id stands for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Inert.result


def _unpickler(base: Any) -> Any:
    """The class `base`, with nothing behind its names."""

    class Inert(base):  # type: ignore[misc]
        found: list[tuple[str, str]]
        names: Any = _Inert

        def find_class(self, module: str, name: str) -> Any:
            self.found.append((module, name))
            return self.names

        def persistent_load(self, pid: Any) -> Any:
            return _MADE if self.names is _MADE else _Loaded

    return Inert


#: By name: what unpickles, and what it reads. A file that can be peeked into is read ahead, as it is in C alone.
READERS: tuple[tuple[str, Any, Callable[[bytes], Any]], ...] = (
    ("C's unpickler", _unpickler(_pickle.Unpickler), io.BytesIO),
    ("Python's unpickler", _unpickler(pickle._Unpickler), io.BytesIO),
    (
        "C's unpickler, reading ahead,",
        _unpickler(_pickle.Unpickler),
        lambda data: io.BufferedReader(io.BytesIO(data), 16),
    ),
)


@functools.cache
def _register_codes() -> None:
    """Give the extension codes names, for this process."""
    for code, (module, name) in CODES.items():
        copyreg.add_extension(module, name, code)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Meanwhile, this process takes little more memory than it has; where there is no Unix, nothing holds it."""
    try:
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + _MORE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def reached(data: bytes, way: Way | None = None) -> list[Reached]:
    """What each of the readers reaches in `data`, loaded in `way`, or in one that depends on `data` alone."""
    _register_codes()
    way = way or _way(data)
    found = []
    for by, unpickler, opened in READERS if _FRAME in data else READERS[:2]:  # without frames C reads in one way
        copyreg.clear_extension_cache()
        _Kind.used = False
        _Inert.result = _MADE if way.calls_give_texts else _Inert
        machine = unpickler(opened(data), encoding=way.encoding, buffers=itertools.repeat(b""))
        machine.found = []
        machine.names = _MADE if way.names_give_texts else _Inert
        with contextlib.suppress(Exception):  # what a pickle of nonsense raises says nothing
            machine.load()
        found.append(Reached(by, machine.found, _Kind.used))
    return found


def _way(data: bytes) -> Way:
    """A way to load `data`, always the same one."""
    number = zlib.crc32(data)
    return Way(_ENCODINGS[number % len(_ENCODINGS)], number % 7 == 0, number % 11 == 0)


def compared(data: bytes) -> Compared:
    """What the unpicklers reach in `data`, beside what the lenient reader lists."""
    seen = scan_lenient(lambda offset, length: data[offset : offset + length], 0, len(data), most=_MOST)
    listed = {(node.module, node.name) for node in seen.graph.globals}
    listed |= {CODES[node.code] for node in seen.graph.extensions if node.code in CODES}
    number, missed = 0, None
    for each in reached(data):
        number += len(each.globals)
        unlisted = {tuple(_ANY if part == _MADE else part for part in pair) for pair in each.globals} - listed
        if unlisted:
            missed = f"{each.by} reaches {', '.join(map('.'.join, unlisted))}"
        elif each.used and not seen.graph.calls:
            missed = f"{each.by} uses a global, and no call is listed"
    return Compared(number, bool(seen.doubt), None if seen.doubt else missed)
