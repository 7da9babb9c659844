"""What stores with several writers share: the parts of an upload, reading back, and replacing an old set.

Rules of S3: at most 10,000 parts, each but the last of 5 MiB to 5 GiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ckptconv.byteranges import reading
from ckptconv.byteranges.sources import Readable
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
    """`length` bytes of a file, in `pieces`. If `copied`, they are one range that the store itself copies."""

    pieces: tuple[Piece, ...]
    length: int
    copied: bool


def is_streamed(file: OutFile) -> bool:
    """Return whether all bytes of `file` are known, or are in sources, before any is written."""
    return all(piece.is_at_hand() for piece in file.pieces)


def parts_of(file: OutFile, copies: Callable[[ByteSource], bool]) -> list[Part]:
    """Return the parts of `file`, which is streamed.

    Ranges of sources that the store `copies` are not sent, except for bytes that make the part before them long enough.
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
    """Yield `pieces` in groups of `most` bytes. The last group may have fewer."""
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


#: A part of an uploaded file: the length and digest of bytes that were sent, or the range that the store copied.
Sent: TypeAlias = "tuple[int, bytes] | ByteRange"


def hint_if_replaced() -> str:
    """Return what to do about an output that is in its place and may be wrong."""
    return "the new object is visible: " + option("force") + " writes it again"


def digest(chunks: Iterable[bytes | memoryview]) -> bytes:
    """Return the MD5 of bytes that were sent. It finds errors, and does not protect against forgery."""
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
                what = "another process has replaced the object that was written"
                hint = "to see the new object: " + command("inspect", path)
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
        hint = "to read it again: " + command("verify", path)
        raise OutputError(f"the output is there, but could not be read back: {error}", where=path, hint=hint) from error


def _differs(where: str, expected: int | None = None, got: int | None = None) -> OutputError:
    said = [None if nbytes is None else f"{nbytes:,} bytes" for nbytes in (expected, got)]
    return OutputError("what was written reads back differently", where=where, expected=said[0], got=said[1])


def old_set(new: NewFolder, *, replace: bool) -> OldSet:
    """Return the old set in the remote folder that `new` goes to: its shards and indexes that no new file replaces.

    Raises TargetExistsError if something is in the way, unless it may be replaced.
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
    """A remote store that files are written to."""

    def has_object(self, path: Path) -> bool:
        """Return whether there is a file at `path`. Raises OutputError."""
        raise NotImplementedError

    def version(self, path: Path) -> object:
        """Return a value that differs for every other file at `path`, if the store has one. Raises OutputError."""
        raise NotImplementedError

    def delete(self, path: Path, etag: str | None = None) -> bool:
        """Delete the file at `path` if its ETag is `etag`, or if that is None. Return whether it was deleted.

        Raises OutputError.
        """
        raise NotImplementedError

    def cost_of(self, files: Sequence[OutFile], *, verify: bool) -> tuple[int, list[str]]:
        """Return the bytes of writing `files`, and notes on what it takes and does not guarantee.

        The bytes are those that are made here first, sent or copied, and with `verify` read back.
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
        """Write `files`, whose ranges come from `source`. Return what overflowed.

        The last of several files is the index, which appears last. The files of the `old` set that are deleted first
        are deleted before any new file appears. With `verify` all are read back. `progress` is called with as many
        bytes in all as :meth:`cost_of` says.

        Raises OutputError, TargetExistsError, and what reading raises.
        """
        raise NotImplementedError

    def exists(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether there is a file at `path`, or if `is_folder` a folder with something in it."""
        if not is_folder:
            return self.has_object(path)
        try:
            return any(cast("FarPath", path).listed())
        except MissingInputError:
            return False

    def check_target(self, path: Path, *, replace: bool) -> None:
        """Raise TargetExistsError if there is a file at `path`, unless it may be replaced."""
        if not replace and self.has_object(path):
            raise TargetExistsError("the output exists", where=path, hint=hint_to_replace())

    def scratch(self, path: Path) -> Path:  # noqa: ARG002 - remote folders have no temporary files
        """Return the folder for temporary files."""
        return Path(tempfile.gettempdir())

    def place(self, new: NewFolder, *, replace: bool, verify: bool) -> Placement:
        """Plan the requests, and what of an old set is deleted."""
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
        """Write files; the other files are written first."""
        yield from ()  # no wait for a disk
        how: dict[str, Any] = {"replace": replace, "verify": verify, "progress": progress}
        with self.others_uploaded(new.others, **how):
            return self.upload(new.files, source, old=old, **how)

    @contextlib.contextmanager
    def others_uploaded(self, others: Iterable[OtherFile], *, replace: bool, **how: Any) -> Iterator[None]:
        """Upload `others` one after another before the body of the ``with``.

        If either fails, those that replaced nothing are deleted again, unless somebody has replaced them meanwhile.
        A link to a file is uploaded as that file. A link to a folder is left out, because the files in that folder are
        among the others. `how` and the errors are as for :meth:`upload`.
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
