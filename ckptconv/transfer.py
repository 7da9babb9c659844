"""Move the bytes of pieces into a file: the only place where bytes move.

The measure is ``cp``: the kernel copies from file to file in large steps, and writing to disk begins while copying goes on. Where the filesystem can share
blocks, ``copy_file_range`` does, if both offsets agree modulo a block. Checksums are computed in threads beside it; what depends on them is written last.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from types import TracebackType

from ckptconv import linux, ranges
from ckptconv.checksums import Sums
from ckptconv.errors import OutputError
from ckptconv.model import BLOCK, Gather, Inflate, Late, OutFile, Part, Piece, Progress, Span
from ckptconv.sources import Readable

__all__ = ["Transfer"]

_COPY = 64 << 20  # bytes for each copy_file_range: large enough to be fast, small enough for progress and Ctrl-C
_BEHIND = 8 << 20  # bytes after which writing to disk is started: a call for each small tensor costs more than it gives
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class Transfer:
    """The bytes of FILE, on their way. A context manager: leaving it ends the threads and forgets what was inflated."""

    def __init__(self, file: OutFile) -> None:
        self.file = file
        self.gather = _gather() if any(isinstance(piece, Gather) for piece in file.pieces) else None
        self.sums = Sums(file.sums)
        self.inflated: dict[int, Span] = {}

    def __enter__(self) -> Transfer:
        self.sums.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sums.__exit__(kind, error, trace)
        for span in self.inflated.values():
            os.close(span.source.fd)

    @property
    def inflated_bytes(self) -> int:
        """What has to be inflated into a file of its own, because parts of it are needed."""
        needed = {
            id(p.of): p.of.length
            for p in self.file.pieces
            if isinstance(p, (Part, Gather)) and isinstance(p.of, Inflate)
        }
        return sum(needed.values())

    def fill(self, fd: int, progress: Progress | None) -> None:
        """Write everything to FD. Raises OSError, OutputError, and what reading raises."""
        at = begun = 0
        late: list[tuple[int, Late]] = []
        for piece in self.file.pieces:
            if isinstance(piece, Late):
                late.append((at, piece))
                at += piece.length
                continue
            for length in self._move(fd, at, piece):
                at += length
                if at - begun >= _BEHIND:
                    linux.start_writeback(fd, begun, at - begun)
                    begun = at
                if progress:
                    progress(length)
            self.sums.check()
        self._check_plan(at, self.file.size)
        sums = self.sums.results()
        for start, piece in late:
            data = piece.make(sums)
            self._check_plan(len(data), piece.length)
            _write_all(fd, start, data)
            if progress:
                progress(len(data))

    def _check_plan(self, length: int, planned: int) -> None:
        if length != planned:
            raise OutputError(
                "the plan and the file disagree: a bug in ckptconv", where=self.file.path, expected=planned, got=length
            )  # fmt: skip

    def compare(self, fd: int) -> None:
        """Read everything back, from the disk where the kernel can be asked to forget it, and compare it with what it was to be."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        for piece in self.file.pieces:
            for chunk in self._chunks(piece):
                back = os.pread(fd, len(chunk), at)
                if back != chunk:
                    raise OutputError(
                        "what was written reads back differently",
                        where=f"{self.file.path} at byte {at}",
                        hint="the disk may be failing",
                    )
                at += len(chunk)

    def _move(self, fd: int, at: int, piece: Piece) -> Iterator[int]:
        """Write PIECE at AT; the lengths written, one after another."""
        if isinstance(piece, Part):
            piece = self._part(piece)
        if isinstance(piece, Span):
            yield from _copy(fd, at, piece)
            return
        for chunk in self._chunks(piece):
            _write_all(fd, at, chunk)
            at += len(chunk)
            yield len(chunk)

    def _chunks(self, piece: Piece) -> Iterator[bytes | memoryview]:
        """The bytes of PIECE, a buffer at a time, each good until the next is asked for."""
        if isinstance(piece, bytes):
            yield piece
        elif isinstance(piece, Span):
            yield from ranges.read(piece)
        elif isinstance(piece, Inflate):
            yield from ranges.inflated(piece)
        elif isinstance(piece, Part):
            yield from ranges.read(self._part(piece))
        elif isinstance(piece, Gather):
            assert self.gather is not None
            yield from self.gather(piece, self._whole(piece.of))
        else:
            yield piece.make(self.sums.results())

    def _part(self, part: Part) -> Span:
        whole = self._whole(part.of)
        return Span(whole.source, whole.offset + part.offset, part.length)

    def _whole(self, data: Span | Inflate) -> Span:
        """DATA where it can be read at any place: what is deflated is inflated once, into a file without a name beside the target."""
        if isinstance(data, Span):
            return data
        if id(data) not in self.inflated:
            import tempfile  # which costs every other conversion a megabyte

            spool = Readable()
            spool.path = data.of.source.path
            with tempfile.TemporaryFile(dir=self.file.path.parent) as file:
                spool.fd = os.dup(file.fileno())
            self.inflated[id(data)] = Span(spool, 0, data.length)
            at = 0
            for chunk in ranges.inflated(data):
                _write_all(spool.fd, at, chunk)
                at += len(chunk)
        return self.inflated[id(data)]


def _gather() -> Callable[[Gather, Span], Iterator[memoryview]]:
    """What writes views out, with torch imported for it: while there is no output yet, and Ctrl-C waiting, which torch does not stand there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        from ckptconv.tensors.gathering import gather
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return gather


def _copy(fd: int, at: int, span: Span) -> Iterator[int]:
    """Let the kernel copy SPAN to AT: up to the next block, then whole blocks, which it may share, then the rest."""
    offset, left = span.offset, span.length
    by_kernel = hasattr(os, "copy_file_range")
    while left:
        until_block = -offset % BLOCK
        length = min(left, until_block or _COPY)
        if length > BLOCK:
            length -= length % BLOCK
        if by_kernel:
            try:
                done = os.copy_file_range(span.source.fd, fd, length, offset, at)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
                done = 0
            if not done:  # or the file became shorter, which reading it will tell
                by_kernel = False
                continue
        else:
            done = min(length, ranges.BUFFER)
            _write_all(fd, at, span.source.read(offset, done))
        offset, at, left = offset + done, at + done, left - done
        yield done


def _write_all(fd: int, at: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        at += done
        view = view[done:]
