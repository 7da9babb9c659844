"""Code that all writable remote stores share: cutting a file into parts, reading it back, and replacing an old set.

Rules of S3: at most 10,000 parts. Each part except the last has 5 MiB to 5 GiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ckptconv.byteranges import reading
from ckptconv.byteranges.sources import Readable, Source
from ckptconv.byteranges.spans import ByteRange, ByteSource, OutFile, Overflow, Piece, Progress, joined
from ckptconv.errors import InputError, MissingInputError, OutputError, TargetExistsError, count, size, some
from ckptconv.hints import command, option
from ckptconv.light_dataclass import dataclass
from ckptconv.stores.base import NO_OLD_SET, OldSet, Placement, hint_to_replace
from ckptconv.stores.remote import FarSource, RemoteStore, far_path

if TYPE_CHECKING:
    from ckptconv.output.files import Steps
    from ckptconv.output.folders import NewFolder, OtherFile
    from ckptconv.stores.remote import FarPath

MIB = 1 << 20
LEAST = 5 * MIB
_SENT = 8 * MIB  # bytes of a part that is sent; all that are sent at once are in memory
_COPIED = 256 * MIB  # bytes of a part that the store copies; several are copied at once
_MOST = 9_000  # parts of a very large file, whose parts are larger: below 10,000, because some are cut in addition


@dataclass(frozen=True)
class Part:
    """A part of an upload: `length` bytes of a file, in `pieces`.

    If `copied`, it is one range that the store itself copies.
    """

    pieces: tuple[Piece, ...]
    length: int
    copied: bool


def is_streamed(file: OutFile) -> bool:
    """Return whether the bytes of `file` can be sent in order, because all are known or in sources from the start.

    This is false if some bytes are computed while others are written.
    """
    return all(piece.is_at_hand() for piece in file.pieces)


def parts_of(file: OutFile, copies: Callable[[ByteSource], bool]) -> list[Part]:
    """Return the parts of `file`, all of whose bytes are known or in sources.

    `copies` returns whether the store itself can copy ranges of a source. These ranges are not sent, except for a few
    bytes that fill the part before them to the smallest allowed size.
    """
    sent = max(_SENT, -(-file.size // _MOST))
    copied = max(_COPIED, -(-file.size // _MOST))
    parts: list[Part] = []
    waiting: list[Piece] = []  # to be sent

    def send() -> None:
        length = _length(waiting)
        number = max(1, length // sent)
        for piece in _cut(waiting, -(-length // number)) if length else ():
            parts.append(Part(tuple(piece), _length(piece), copied=False))
        waiting.clear()

    for piece in joined(file.pieces):
        lacking = max(0, LEAST - _length(waiting)) if waiting else 0
        if not (isinstance(piece, ByteRange) and copies(piece.source) and piece.length - lacking >= LEAST):
            waiting.append(piece)
            continue
        if lacking:
            waiting.append(piece.slice(0, lacking))
        rest = piece.length - lacking
        send()
        step = -(-rest // -(-rest // copied))
        for at in range(0, rest, step):
            length = min(step, rest - at)
            parts.append(Part((piece.slice(lacking + at, length),), length, copied=True))
    send()
    return parts


def _cut(pieces: Sequence[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield `pieces` in groups of exactly `most` bytes, by cutting some of them.

    The last group may have fewer bytes.
    """
    group: list[Piece] = []
    room = most
    for piece in pieces:
        at = 0
        while at < piece.length:
            length = min(piece.length - at, room)
            group.append(piece.slice(at, length))
            at, room = at + length, room - length
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _length(pieces: Sequence[Piece]) -> int:
    return sum(piece.length for piece in pieces)


#: The check of an uploaded part: the length and digest of the sent bytes, or the range that the store copied.
Sent: TypeAlias = "tuple[int, bytes] | ByteRange"


def hint_if_replaced() -> str:
    """Return the hint for an output that is visible and may be wrong: ``--force`` writes it again."""
    return "the new object is visible: " + option("force") + " writes it again"


@contextlib.contextmanager
def written_here(
    file: OutFile, source: Readable, overflowed: Counter[tuple[str, ...]], **how: Any
) -> Iterator[ByteRange]:
    """Write `file` to a temporary file on this machine, and yield its bytes as a range.

    The numbers that overflowed in casts are added to `overflowed`. The other arguments are those of
    :func:`ckptconv.output.files.fill`. Raises its errors, and those of :meth:`Readable.check_unchanged` of `source`.
    """
    from ckptconv.output.files import fill

    with tempfile.TemporaryDirectory(prefix="ckptconv-") as folder:
        here = Path(folder) / file.path.name
        overflowed.update(fill(here, replace(file, path=here), source, **how))
        source.check_unchanged()
        with Source(here) as whole:
            yield ByteRange(whole, 0, whole.size)


def digest(chunks: Iterable[bytes | memoryview]) -> bytes:
    """Return the MD5 of `chunks`. It detects transfer errors, and does not protect against forgery."""
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        md5.update(chunk)
    return md5.digest()


def read_back(
    path: Path, parts: Sequence[Sent], etag: str | None, progress: Progress | None, hint: str | None = None
) -> None:
    """Compare the object at `path`, whose ETag was `etag`, with the `parts` that it was made of.

    Ranges that the store copied are compared with their source. Several ranges are read at once. `progress` is called
    with the length of each part.

    Raises OutputError if the object differs (with `hint`), has another ETag, or cannot be read.
    """

    def differs(where: str, *lengths: int) -> OutputError:
        expected, got = [f"{nbytes:,} bytes" for nbytes in lengths] or (None, None)
        what = "the output differs when it is read back"
        return OutputError(what, where=where, expected=expected, got=got, hint=hint)

    copied = [part for part in parts if isinstance(part, ByteRange)]
    lengths = [part.length if isinstance(part, ByteRange) else part[0] for part in parts]
    try:
        with FarSource(far_path(path)) as back:
            version = back.requests.version
            if etag and version and version.etag != etag:
                what = "another process has replaced the object that was written"
                see = "to see the new object: " + command("inspect", path)
                raise OutputError(what, where=path, expected=etag, got=version.etag, hint=see)
            if back.size != sum(lengths):
                raise differs(f"{path}", sum(lengths), back.size)
            reading.announce([ByteRange(back, 0, back.size), *copied])
            at = 0
            for part, length in zip(parts, lengths, strict=True):
                sent = digest(reading.read(part)) if isinstance(part, ByteRange) else part[1]
                if digest(reading.read(ByteRange(back, at, length))) != sent:
                    raise differs(f"{path} at bytes {at}-{at + length - 1}")
                at += length
                if progress:
                    progress(length)
    except InputError as error:
        what, again = f"the output is there, but could not be read back: {error}", command("verify", path)
        raise OutputError(what, where=path, hint="to read it again: " + again) from error


def old_set(new: NewFolder, *, replace: bool) -> OldSet:
    """Return the old files in the remote folder of `new`: those of an old set, and those that new files replace.

    Raises TargetExistsError if there are such files and `replace` is False.
    """
    folder = new.target
    try:
        there = cast("FarPath", folder).below()
    except MissingInputError:
        return NO_OLD_SET
    old = {name for name in there if new.may_go(name)}
    taken = new.names & there.keys()
    if not replace and (old or taken):
        raise TargetExistsError(f"the output exists: {some(sorted(old | taken))}", where=folder, hint=hint_to_replace())
    indexes = {name for name in old if name.endswith((".json", ".metadata"))}
    first = indexes if (old - indexes) & new.names else set()
    last = [*sorted(indexes - first - new.names), *sorted(old - indexes - new.names)]
    paths = {name: folder / name for name in old | taken}
    return OldSet(
        tuple(paths[name] for name in sorted(first)),
        tuple(paths[name] for name in last),
        {path: there[name].etag for name, path in paths.items()},
    )


class WritableStore(RemoteStore):
    """The base class of remote stores to which files can be written."""

    def has_object(self, path: Path) -> bool:
        """Return whether there is a file at `path`. Raises OutputError."""
        raise NotImplementedError

    def version(self, path: Path) -> object:
        """Return a value that identifies the file at `path`, such as its ETag. It changes when the file is replaced.

        Raises OutputError.
        """
        raise NotImplementedError

    def delete(self, path: Path, etag: str | None = None) -> bool:
        """Delete the file at `path`, and return whether it was deleted.

        With `etag`, a file with another ETag is not deleted. Raises OutputError.
        """
        raise NotImplementedError

    def cost_of(self, files: Sequence[OutFile], *, verify: bool) -> tuple[int, list[str]]:
        """Return the number of bytes to move for `files`, and notes on the cost and on guarantees that are missing.

        The bytes are those of temporary files, those sent or copied, and with `verify` those read back.
        """
        raise NotImplementedError

    def upload(
        self,
        files: Sequence[OutFile],
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        old: OldSet = NO_OLD_SET,
        progress: Progress | None = None,
    ) -> Overflow:
        """Write `files`, whose ranges come from `source`. Return the numbers that overflowed in casts, by tensor.

        The last file, the index of a set, becomes visible last. The files in ``old.first`` are deleted before any new
        file becomes visible. With `verify`, all files are read back. `progress` is called with numbers of bytes, as
        many in all as :meth:`cost_of` returns.

        Raises OutputError, TargetExistsError, and the errors of reading the sources.
        """
        raise NotImplementedError

    def exists(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether there is a file at `path`.

        If `is_folder` is true, return whether there is a folder that is not empty.
        """
        if not is_folder:
            return self.has_object(path)
        try:
            return any(cast("FarPath", path).listed())
        except MissingInputError:
            return False

    def check_target(self, path: Path, *, replace: bool) -> None:
        """Raise TargetExistsError if there is a file at `path` and `replace` is False."""
        if not replace and self.has_object(path):
            raise TargetExistsError("the output exists", where=path, hint=hint_to_replace())

    def scratch(self, path: Path) -> Path:  # noqa: ARG002 - remote folders have no temporary files
        """Return the system's folder for temporary files."""
        return Path(tempfile.gettempdir())

    def place(self, new: NewFolder, *, replace: bool, verify: bool) -> Placement:
        """Plan the writing of `new`: the bytes to move, notes, and the old files to delete."""
        notes: list[str] = []
        old = old_set(new, replace=replace) if new.is_folder else NO_OLD_SET
        if others := [other for other in new.others if other.kind != "folder"]:
            nbytes = size(sum(other.size for other in others))
            notes.append(f"{count(len(others), 'other file')} ({nbytes}) copied first, one after another")
        work, about = self.cost_of(new.files, verify=verify)
        work += sum(other.size for other in new.others) * (1 + verify)
        return Placement(tuple(new.files), work, (*notes, *about, *old.about), old)

    def writing(
        self,
        new: NewFolder,
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        jobs: int = 1,  # noqa: ARG002 - each upload has threads of its own
        progress: Progress | None = None,
        old: OldSet = NO_OLD_SET,
    ) -> Steps[Overflow]:
        """Upload the other files of `new`, then its planned files.

        Return the numbers that overflowed in casts, by tensor. The arguments are those of :meth:`Store.writing`. `jobs`
        is ignored, because each upload has its own threads.
        """
        yield from ()  # no wait for a disk
        how: dict[str, Any] = {"replace": replace, "verify": verify, "progress": progress}
        with self.others_uploaded(new.others, **how):
            return self.upload(new.files, source, old=old, **how)

    @contextlib.contextmanager
    def others_uploaded(self, others: Iterable[OtherFile], *, replace: bool, **how: Any) -> Iterator[None]:
        """Upload `others` one after another, then run the ``with`` block.

        If an error occurs, the uploaded files are deleted again, except those that replaced a file and those that
        another process has replaced meanwhile. A link to a file is uploaded as that file. A link to a folder is
        skipped, because the files in that folder are among `others`. `how` and the errors are those of :meth:`upload`.
        """
        done: list[tuple[Path, object]] = []
        try:
            for other in others:
                if other.kind != "folder" and other.source.is_file():
                    with other.open(other.source) as source:
                        self.upload([OutFile.copy_of(source, other.path)], source, replace=replace, **how)
                    if not replace:
                        done.append((other.path, self.version(other.path)))
            yield
        except BaseException:
            for path, version in done:
                with contextlib.suppress(OutputError):  # the first error matters more
                    if self.version(path) == version:
                        self.delete(path)
            raise
