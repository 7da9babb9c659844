"""Move the bytes of pieces into a file. No other module writes tensor bytes.

The measure is ``cp``: the kernel copies from file to file in large steps, and writing to disk begins while copying goes
on. Where the filesystem can share blocks, ``copy_file_range`` does, if both offsets agree modulo a block. Checksums are
computed in threads beside it; what depends on them is written last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeGuard

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import checksum
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.record_checks import Sums
from ckptconv.byteranges.spans import (
    FILESYSTEM_BLOCK,
    ByteRange,
    Cast,
    Deferred,
    OutFile,
    Overflow,
    Piece,
    Progress,
)
from ckptconv.errors import OutputError
from ckptconv.output.direct_writes import WINDOW, DirectDestination

if TYPE_CHECKING:
    from ckptconv.output.cast_threads import CastThreads
    from ckptconv.output.destinations import Destination

_COPY = 64 << 20  # bytes for each copy_file_range: large enough to be fast, small enough for progress and Ctrl-C
_BEHIND = 8 << 20  # bytes after which writing to disk is started: a call for each small tensor costs more than it gives
_WORTH_A_THREAD = 64 << 10  # bytes: less is cast sooner than handed over
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class Transfer:
    """The bytes of `file`, on their way.

    A context manager: leaving it ends the threads and forgets what was inflated.
    """

    def __init__(self, file: OutFile, folder: Path, *, compared: bool = False) -> None:
        """`folder`: where something can be kept for a while; `compared`: what is written will be compared with its
        sources.
        """
        self.file = file
        self.pieces = Pieces(file.pieces, folder)
        is_read_again = compared or bool(file.sums) or any(piece.is_computed for piece in file.pieces)
        starts = accumulate((piece.length for piece in file.pieces), initial=0)
        #: The pieces and where they begin, in the order of writing: first those that do not need torch.
        self._placed = sorted(zip(starts, file.pieces, strict=False), key=lambda placed: placed[1].is_computed)
        kept = reading.announce((piece for _, piece in self._placed), keep=folder if is_read_again else None)
        #: Bytes that are needed beside the file for a while.
        self.beside = self.pieces.spooled_bytes + kept
        self.sums = Sums([each for each in file.sums if not each.is_computed])
        self.awaited = {id(each) for each in file.sums if each.is_computed}  # whose checksums come as it is written
        self.computed_sums: dict[int, int] = {}  # by the id of the piece
        self.all_sums: Sequence[int] = ()  # those of the file's ``sums``, when all are known
        #: What was too large for the dtype that it was cast to.
        self.overflowed: Overflow = {}

    def __enter__(self) -> Transfer:
        self.sums.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sums.__exit__(kind, error, trace)
        self.pieces.__exit__(kind, error, trace)

    def fill(self, out: Destination, progress: Progress | None) -> None:
        """Write everything to `out`. Raises OSError, OutputError, and what reading raises."""
        late: list[tuple[int, Deferred]] = []
        begun = end = 0
        with self._workers(out) as workers:
            for start, piece in self._placed:
                at, begun = start, begun if start == end else start
                end = start + piece.length
                if isinstance(piece, Deferred):
                    late.append((at, piece))
                elif workers and _is_for_workers(piece):
                    workers.begin(piece, at)
                    begun = end
                else:
                    for length in self._move(out, at, piece):
                        at += length
                        if at - begun >= _BEHIND:
                            out.start_writeback(begun, at - begun)
                            begun = at
                        if progress:
                            progress(length)
                    self._check_plan(at, end)
                self.sums.check()
            self._check_plan(sum(piece.length for piece in self.file.pieces), self.file.size)
            if workers:
                workers.finish(progress)
                self.computed_sums |= workers.sums
        self.overflowed = dict(self.pieces.overflowed)
        self.all_sums = self._sums()
        for start, piece in late:
            data = piece.make(self.all_sums)
            self._check_plan(len(data), piece.length)
            out.write(start, data)
            if progress:
                progress(len(data))

    def _workers(self, out: Destination) -> AbstractContextManager[CastThreads | None]:
        """The threads that cast, if there is something for them."""
        if not any(map(_is_for_workers, self.file.pieces)):
            return nullcontext()

        from ckptconv.output.cast_threads import CastThreads  # which costs every other conversion some milliseconds

        def write(at: int, data: memoryview) -> None:
            out.write(at, data)
            out.start_writeback(at, len(data))

        return CastThreads(self.pieces, write)

    def _sums(self) -> Sequence[int]:
        """The checksums of the file's ``sums``."""
        others = iter(self.sums.results())
        return [self.computed_sums[id(each)] if each.is_computed else next(others) for each in self.file.sums]

    def _check_plan(self, length: int, planned: int) -> None:
        if length != planned:
            raise OutputError(
                "the plan and the file disagree: a bug in ckptconv", where=self.file.path, expected=planned, got=length
            )

    def compare(self, out: Destination) -> None:
        """Read everything back, from the disk where the kernel can be asked to forget it,
        and compare it with what it was to be.
        """
        if out.fd >= 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(out.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        for piece in self.file.pieces:
            for chunk in self._chunks(piece):
                back = out.read(at, len(chunk))
                if back != chunk:
                    raise OutputError(
                        "what was written reads back differently",
                        where=f"{self.file.path} at byte {at}",
                        hint="the disk may be failing",
                    )
                at += len(chunk)

    def _move(self, out: Destination, at: int, piece: Piece) -> Iterator[int]:
        """Write `piece` at `at`; the lengths written, one after another."""
        piece = self.pieces.located(piece)
        if isinstance(piece, ByteRange):
            yield from _copy(out, at, piece)
            return
        crc32, awaited = 0, id(piece) in self.awaited
        for chunk in self._chunks(piece):
            out.write(at, chunk)
            at += len(chunk)
            if awaited:
                crc32 = checksum(chunk, crc32)
            yield len(chunk)
        if awaited:
            self.computed_sums[id(piece)] = crc32

    def _chunks(self, piece: Piece) -> Iterator[bytes | memoryview]:
        """The bytes of `piece`, a buffer at a time, each good until the next is asked for."""
        yield from self.pieces.chunks(piece.resolved(self.all_sums))


def _is_for_workers(piece: Piece) -> TypeGuard[Cast]:
    """Whether `piece` is cast from what stands in the source as it is, and is large enough to be worth a
    thread's time.
    """
    return isinstance(piece, Cast) and bool(piece.of.ranges()) and piece.length >= _WORTH_A_THREAD


def _copy(out: Destination, at: int, span: ByteRange) -> Iterator[int]:
    """Let the kernel copy `span` to `at`: up to the next block, then whole blocks, which it may share,
    then the rest.
    """
    offset, left = span.offset, span.length
    direct = out if isinstance(out, DirectDestination) and span.source.fd >= 0 else None
    by_kernel = out.fd >= 0 and span.source.fd >= 0 and hasattr(os, "copy_file_range")
    while left:
        until_block = -offset % FILESYSTEM_BLOCK
        length = min(left, until_block or _COPY)
        if length > FILESYSTEM_BLOCK:
            length -= length % FILESYSTEM_BLOCK
        if direct and length >= WINDOW and not (offset | at) % FILESYSTEM_BLOCK:
            done = WINDOW
            direct.copy(at, ByteRange(span.source, offset, done))
        elif by_kernel:
            try:
                done = os.copy_file_range(span.source.fd, out.fd, length, offset, at)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
                done = 0
            if not done:  # or the file became shorter, which reading it will tell
                by_kernel = False
                continue
        else:
            done = min(length, reading.BUFFER)
            out.write(at, span.source.read(offset, done))
        offset, at, left = offset + done, at + done, left - done
        yield done
