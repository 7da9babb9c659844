"""The globals that CPython's two unpicklers reach in a pickle, compared with those that the lenient reader lists.

Both unpicklers run in this process, in C (``_pickle``) and in Python (``pickle._Unpickler``). Every global, persistent
id, buffer and result of a call is an inert class. Therefore nothing is imported or run, and an operation of a pickle
fails only if every object refuses it.

C's memo is an array: slot 2^28 makes it allocate four gigabytes. Use this module only in separate processes with a
limited address space.
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

#: Extension codes with a global. Other codes have none, because Python itself registers none.
CODES = {code: ("extension", f"e{code}") for code in (1, 2, 130, 255, 256, 513, 65535, 65536, (1 << 31) - 1)}
#: The text that calls and names return if the way gives texts, and the text that the lenient reader uses for an unknown
#: text.
_MADE, _ANY = "made", "builtins.__import__"
_ENCODINGS = ("latin-1", "latin-1", "utf-8", "ASCII", "bytes")
_FRAME = b"\x95"
_MOST = 1 << 16  # opcodes
_MORE = 32 << 20  # additional bytes


class Reached(NamedTuple):
    """The result of an unpickler: the globals that it looked up, and whether it `used` one of them."""

    by: str
    globals: list[tuple[str, str]]
    used: bool


class Compared(NamedTuple):
    """The number of globals that were `reached`, and a description of those that the lenient reader `missed`.

    If `doubtful` is true, the lenient reader reports that it is not certain, so the pickle is never called harmless.
    """

    reached: int
    doubtful: bool
    missed: str | None


class Way(NamedTuple):
    """A way to load a pickle: the encoding of Python 2 strings, and whether calls or names return texts."""

    encoding: str
    calls_give_texts: bool
    names_give_texts: bool


class _Kind(type):
    """The operations on an inert object: calls, methods, and iteration as arguments. All of them are recorded."""

    used = False

    def _use(cls, *operands: Any, **named: Any) -> Any:
        _Kind.used = True
        return cls.result

    __call__ = __setstate__ = __setitem__ = append = extend = add = _use
    result: Any = None

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Inert(metaclass=_Kind):
    """An inert global, or an object that is made from it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _Kind.used = True
        return cls.result


class _Quiet(type):
    """The operations on an object that do not count as uses of a global."""

    def _ignore(cls, *operands: Any, **named: Any) -> Any:
        return _Inert.result

    __call__ = __setstate__ = __setitem__ = append = extend = add = _ignore

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Loaded(metaclass=_Quiet):
    """The object that a persistent id stands for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Inert.result


def _unpickler(base: Any) -> Any:
    """Return a subclass of the unpickler `base` that looks up no real names."""

    class Inert(base):  # type: ignore[misc]
        found: list[tuple[str, str]]
        names: Any = _Inert

        def find_class(self, module: str, name: str) -> Any:
            self.found.append((module, name))
            return self.names

        def persistent_load(self, pid: Any) -> Any:
            return _MADE if self.names is _MADE else _Loaded

    return Inert


#: The name of each reader, its unpickler, and the type of the file that it reads. If the file can be peeked into, C's
#: unpickler reads ahead. Python's unpickler never does.
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
    """Register names for the extension codes in this process."""
    for code, (module, name) in CODES.items():
        copyreg.add_extension(module, name, code)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the memory of this process to little more than its current size. Systems other than Unix have no limit."""
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
    """Return the globals that each reader reaches in `data`. The default for `way` depends only on `data`."""
    _register_codes()
    way = way or _way(data)
    found = []
    for by, unpickler, opened in READERS if _FRAME in data else READERS[:2]:  # without frames, C reads in only one way
        copyreg.clear_extension_cache()
        _Kind.used = False
        _Inert.result = _MADE if way.calls_give_texts else _Inert
        machine = unpickler(opened(data), encoding=way.encoding, buffers=itertools.repeat(b""))
        machine.found = []
        machine.names = _MADE if way.names_give_texts else _Inert
        with contextlib.suppress(Exception):  # exceptions of invalid pickles are irrelevant
            machine.load()
        found.append(Reached(by, machine.found, _Kind.used))
    return found


def _way(data: bytes) -> Way:
    """Return a way to load `data`, always the same one for the same bytes."""
    number = zlib.crc32(data)
    return Way(_ENCODINGS[number % len(_ENCODINGS)], number % 7 == 0, number % 11 == 0)


def compared(data: bytes) -> Compared:
    """Compare the globals that the unpicklers reach in `data` with those that the lenient reader lists."""
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
