"""Read back what has appeared in a store, and compare it with what was sent there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from ckptconv.byteranges import reading
from ckptconv.byteranges.spans import ByteRange, Progress
from ckptconv.errors import InputError, OutputError
from ckptconv.hints import command, option
from ckptconv.stores.paths import far_path
from ckptconv.stores.remote import FarSource

#: A part of an uploaded file: the length and digest of bytes that were sent, or the range that the store copied.
Sent: TypeAlias = "tuple[int, bytes] | ByteRange"


def hint_if_replaced() -> str:
    """Return what to do about an output that is in its place and may be wrong."""
    return "it is there for everybody to see: " + option("force") + " writes it again"


def digest(chunks: Iterable[bytes | memoryview]) -> bytes:
    """The MD5 of bytes that were sent. It finds faults; it does not protect against people who forge files."""
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        md5.update(chunk)
    return md5.digest()


def read_back(path: Path, parts: Sequence[Sent], etag: str | None, progress: Progress | None) -> None:
    """Compare the object at `path`, whose ETag was `etag`, with the `parts` that it was made of.

    Several ranges are read at once, of the object and of what the store copied.

    Raises OutputError if the object differs, is another one, or cannot be read.
    """
    copied = [part for part in parts if isinstance(part, ByteRange)]
    lengths = [part.length if isinstance(part, ByteRange) else part[0] for part in parts]
    try:
        with FarSource(far_path(path)) as back:
            version = back.requests.version
            if etag and version and version.etag != etag:
                what = "the object there is not the one that was written: somebody has replaced it"
                hint = command("inspect", path) + " says what it is"
                raise OutputError(what, where=path, expected=etag, got=version.etag, hint=hint)
            if back.size != sum(lengths):
                raise _differs(f"{path}", sum(lengths), back.size)
            reading.announce([ByteRange(back, 0, back.size), *copied])
            at = 0
            for part, length in zip(parts, lengths, strict=True):
                sent = digest(reading.read(part)) if isinstance(part, ByteRange) else part[1]
                if digest(reading.read(ByteRange(back, at, length))) != sent:
                    raise _differs(f"{path} at bytes {at}-{at + length - 1}")
                at += length
                if progress:
                    progress(length)
    except InputError as error:
        hint = command("verify", path) + " tries again to read it"
        raise OutputError(f"the output is there, but could not be read back: {error}", where=path, hint=hint) from error


def _differs(where: str, expected: int | None = None, got: int | None = None) -> OutputError:
    said = [None if nbytes is None else f"{nbytes:,} bytes" for nbytes in (expected, got)]
    return OutputError("what was written reads back differently", where=where, expected=said[0], got=said[1])
