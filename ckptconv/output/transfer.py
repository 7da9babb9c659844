"""Write the bytes of pieces to a file, or into a reader's buffers. No other module writes tensor bytes.

Copying is meant to be as fast as ``cp``: the kernel copies from file to file in large steps, and writing to the disk
begins during the copy. ``copy_file_range`` shares blocks if the filesystem can do that and both offsets agree modulo a
block. Threads compute checksums and casts at the same time. Pieces that contain checksums are written last.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Generator, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from ckptconv.byteranges import reading
from ckptconv.byteranges.checksums import check_crc32, checksum, combined
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.reading import AHEAD, Window
from ckptconv.byteranges.record_checks import Sums
from ckptconv.byteranges.spans import (
    FILESYSTEM_BLOCK,
    ByteRange,
    ByteSource,
    Cast,
    Deferred,
    OutFile,
    Overflow,
    Piece,
    Progress,
    Scaled,
)
from ckptconv.byteranges.threads import Task, Threads, processors
from ckptconv.dtypes import BY_NAME
from ckptconv.errors import OutputError
from ckptconv.output.direct_writes import WINDOW, DirectDestination

if TYPE_CHECKING:
    from ckptconv.byteranges.kernels.casting import CastBuffer
    from ckptconv.byteranges.rounding import RoundingBuffer
    from ckptconv.output.direct_writes import Destination

_COPY = 64 << 20  # bytes for each copy_file_range: large enough to be fast, small enough for progress and Ctrl-C
_BEHIND = 8 << 20  # bytes after which writing to the disk is started: a call for each small tensor would cost too much
_GATHERED = 256 << 10  # bytes of small pieces in one write: a system call for each small tensor would cost too much
_WORTH_A_THREAD = 64 << 10  # bytes: smaller casts are faster in this thread
_WORTH_SHARING = 4 << 20  # bytes: a second thread helps to read as many or more
_SHARE = 1 << 20  # bytes that each of the two threads reads at once
_CAST_BLOCK = 16 << 20  # bytes of the source or of the result that a thread casts in one task
_CAST_WINDOW = 2 << 20  # bytes that it reads, casts and writes at once: they fit into caches
_MOST_THREADS = 4
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)


class Transfer:
    """The writing of one planned file.

    A context manager: leaving it ends the threads and removes the temporary files with inflated bytes.

    Attributes:
        beside: The number of bytes that temporary files need while the file is written.
        overflowed: After :meth:`fill`, the numbers of elements that were too large for their new dtype.
    """

    def __init__(self, file: OutFile, folder: Path, *, compared: bool = False) -> None:
        """Prepare to write `file`, with temporary files in `folder`.

        `compared` tells that :meth:`compare` will be called.
        """
        self._file = file
        self._pieces = Pieces(file.pieces, folder)
        is_read_again = compared or bool(file.sums) or any(piece.is_computed for piece in file.pieces)
        starts = accumulate((piece.length for piece in file.pieces), initial=0)
        # pieces and their offsets, in the order of writing: first those that are copied
        self._placed = sorted(zip(starts, file.pieces, strict=False), key=lambda placed: placed[1].is_computed)
        kept = reading.announce((piece for _, piece in self._placed), keep=folder if is_read_again else None)
        self.beside = self._pieces.spooled_bytes + kept
        self._sums = Sums([piece for piece in file.sums if piece.is_at_hand()])
        self._awaited = {id(piece) for piece in file.sums if not piece.is_at_hand()}  # summed while they are written
        self._computed_sums: dict[int, int] = {}  # by the id of the piece
        self._all_sums: Sequence[int] = ()  # of `file.sums`, when all are known
        self._window: Window[ByteSource] | None = None  # over the source of the last small piece
        self.overflowed: Overflow = {}

    def __enter__(self) -> Transfer:
        self._sums.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._sums.__exit__()
        self._pieces.__exit__()

    def fill(self, out: Destination, progress: Progress | None) -> None:
        """Write all pieces to `out`. Raises OSError, OutputError, and the errors of reading."""
        late: list[tuple[int, Deferred]] = []
        begun = end = 0
        small = _GatheredWrites(out)
        with CastThreads(self._pieces, out, self._awaited) as casts:
            for start, piece in self._placed:
                at, begun = start, begun if start == end else start
                end = start + piece.length
                if isinstance(piece, Deferred):
                    late.append((at, piece))
                elif _is_for_threads(piece):
                    casts.begin(piece, at)
                    begun = end
                else:
                    for length in self._move(out, small, at, piece):
                        at += length
                        if at - begun >= _BEHIND:
                            small.flush()
                            out.start_writeback(begun, at - begun)
                            begun = at
                        if progress:
                            progress(length)
                    self._check_plan(at, end)
                self._sums.check()
            small.flush()
            self._check_plan(sum(piece.length for piece in self._file.pieces), self._file.size)
            self._computed_sums |= casts.finish(progress)
        self.overflowed = dict(self._pieces.overflowed)
        others = iter(self._sums.results())
        self._all_sums = [
            next(others) if piece.is_at_hand() else self._computed_sums[id(piece)] for piece in self._file.sums
        ]
        for start, piece in late:
            data = piece.make(self._all_sums)
            self._check_plan(len(data), piece.length)
            out.write(start, data)
            if progress:
                progress(len(data))

    def _check_plan(self, length: int, planned: int) -> None:
        if length != planned:
            raise OutputError(
                "the plan does not match the file: a bug in ckptconv",
                where=self._file.path,
                expected=planned,
                got=length,
            )

    def compare(self, out: Destination) -> None:
        """Read `out` back, and raise OutputError if it differs from the planned bytes.

        The bytes come from the disk if the kernel can drop them from its cache.
        """
        if out.fd >= 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(out.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        for piece in self._file.pieces:
            for chunk in self._pieces.chunks(piece.resolved(self._all_sums)):
                if out.read(at, len(chunk)) != chunk:
                    raise OutputError(
                        "the output differs when it is read back",
                        where=f"{self._file.path} at byte {at}",
                        hint="the disk may be failing",
                    )
                at += len(chunk)

    def _move(self, out: Destination, small: _GatheredWrites, at: int, piece: Piece) -> Iterator[int]:
        """Write `piece` at the offset `at` of `out`, of which `small` gathers small writes. Yield each length."""
        planned, piece = piece, self._pieces.located(piece)
        is_awaited = id(planned) in self._awaited
        if isinstance(piece, ByteRange) and not is_awaited:
            if piece.length > AHEAD:
                small.flush()  # so that a file object is written from its start to its end
                yield from _copy(out, at, piece)
                return
            source, offset = reading.located(piece)
            if self._window is None or self._window.source is not source:
                self._window = Window(source)
            small.write(at, self._window.read(offset, piece.length))
            yield piece.length
            return
        crc32 = 0
        for chunk in self._pieces.chunks(piece):
            small.write(at, chunk)
            at += len(chunk)
            if is_awaited:
                crc32 = checksum(chunk, crc32)
            yield len(chunk)
        if is_awaited:
            self._computed_sums[id(planned)] = crc32


class _GatheredWrites:
    """Writes to `out`. Consecutive small ones are made together, at the latest by :meth:`flush`."""

    def __init__(self, out: Destination) -> None:
        self._out = out
        self._at = 0
        self._data = bytearray()

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write `data` at the offset `at`. Raises OSError, also of an earlier write."""
        is_small = len(data) <= AHEAD
        if not is_small or at != self._at + len(self._data) or len(self._data) + len(data) > _GATHERED:
            self.flush()
            self._at = at
        if is_small:
            self._data += data
        else:
            self._out.write(at, data)

    def flush(self) -> None:
        """Write what was gathered. Raises OSError."""
        data, self._data = self._data, bytearray()
        if data:
            self._out.write(self._at, memoryview(data))


def _copy(out: Destination, at: int, span: ByteRange) -> Iterator[int]:
    """Copy `span` to the offset `at`, by the kernel if possible. Yield the length of each step.

    The first step ends at the border of a block, and the next ones are complete blocks, so that the filesystem can
    share them.
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
            if not done:  # or the file became shorter: then reading raises an error
                by_kernel = False
                continue
        else:
            done = min(length, reading.BUFFER)
            out.write(at, span.source.read(offset, done))
        offset, at, left = offset + done, at + done, left - done
        yield done


def _is_for_threads(piece: Piece) -> TypeGuard[Cast]:
    """Return whether `piece` is a cast of bytes that can be read at any offset, and is large enough for threads."""
    if not isinstance(piece, Cast) or piece.length < _WORTH_A_THREAD:
        return False
    return bool(piece.of.ranges()) or isinstance(piece.of, Scaled)


class _Block(NamedTuple):
    """The result of casting a block: the sizes and CRC-32 of the bytes read and written, and the overflows."""

    read: int
    crc32_read: int
    written: int
    crc32_written: int
    overflowed: int


class CastThreads:
    """Threads that read, cast and write the blocks of pieces.

    They compute the checksums of the results of pieces whose ids are in `awaited`. A context manager: leaving it ends
    the threads, even if they have not finished.
    """

    def __init__(self, pieces: Pieces, out: Destination, awaited: Container[int]) -> None:
        self._pieces, self._out, self._awaited = pieces, out, awaited
        self._own = threading.local()  # objects that a thread uses for all blocks
        self._begun: list[tuple[Cast, list[Task[_Block]]]] = []
        self._threads = Threads(min(_MOST_THREADS, processors()), "ckptconv-cast")

    def __enter__(self) -> CastThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def begin(self, piece: Cast, at: int) -> None:
        """Start to write `piece`, a cast of bytes that can be read at any offset, at the offset `at`."""
        old, new = BY_NAME[piece.old].itemsize, BY_NAME[piece.new].itemsize
        elements = piece.length // new
        step = _CAST_BLOCK // max(old, new)
        blocks = [(start, min(step, elements - start)) for start in range(0, elements, step)]
        submit = self._threads.submit
        tasks = [submit(self._cast, piece, start * old, n * old, at + start * new) for start, n in blocks]
        self._begun.append((piece, tasks))

    def finish(self, progress: Progress | None) -> dict[int, int]:
        """Wait until everything is written. Return the CRC-32 of the written bytes by the id of each awaited piece.

        Raises the errors of the threads, and MalformedError if a range has a wrong checksum.
        """
        sums = {}
        for piece, tasks in self._begun:
            crc32_read = crc32_written = overflowed = 0
            for task in tasks:
                block = task.result()
                crc32_read = combined(crc32_read, block.crc32_read, block.read)
                crc32_written = combined(crc32_written, block.crc32_written, block.written)
                overflowed += block.overflowed
                if progress:
                    progress(block.written)
            if span := piece.checked_range():
                check_crc32(span.crc32, crc32_read, span.where)
            if id(piece) in self._awaited:
                sums[id(piece)] = crc32_written
            self._pieces.count_overflow(piece, overflowed)
        return sums

    def _cast(self, piece: Cast, offset: int, length: int, at: int) -> _Block:
        """Cast `length` bytes at `offset` of the piece inside `piece`, and write the result at `at`."""
        buffer, is_checked, is_awaited = self._buffer(piece), bool(piece.checked_range()), id(piece) in self._awaited
        crc32_read = crc32_written = written = overflowed = 0
        for start in range(offset, offset + length, len(buffer.room)):
            data = buffer.room[: offset + length - start]
            self._pieces.read_into(piece.of, start, data)
            crc32_read = checksum(data, crc32_read) if is_checked else 0
            result, too_large = buffer.cast(len(data), start, piece.shown)
            self._out.write(at + written, result)
            crc32_written = checksum(result, crc32_written) if is_awaited else 0
            written += len(result)
            overflowed += too_large
        self._out.start_writeback(at, written)
        return _Block(length, crc32_read, written, crc32_written, overflowed)

    def _buffer(self, piece: Cast) -> CastBuffer | RoundingBuffer:
        """Return this thread's buffer for `piece`.

        A buffer is reused for pieces with the same dtypes, because memory that was just allocated is slow.
        """
        key = (piece.old, piece.new, piece.conj, piece.neg, piece.swapped_in, piece.swapped_out)
        if getattr(self._own, "key", None) != key:
            self._own.key = key
            self._own.buffer = self._pieces.buffer_for(piece, _CAST_WINDOW)
        buffer: CastBuffer | RoundingBuffer = self._own.buffer
        return buffer


class _SharedReading:
    """Reading of large buffers together with a thread: the kernel copies the bytes, and clears new memory before."""

    def __init__(self) -> None:
        self._threads = Threads(1, "ckptconv-load")

    def is_for(self, piece: Piece, length: int) -> bool:
        """Return whether a thread helps with `length` bytes of `piece`, which is at hand: they are in local files."""
        if length < _WORTH_SHARING or processors() < 2:
            return False
        sources = [reading.shared_source(span) for span in piece.ranges()]
        return bool(sources) and all(source is not None and not source.is_far for source in sources)

    def read_into(self, piece: Piece, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes at `offset` of `piece`. Raises what :func:`reading.read_into` raises.

        The thread does not write to `buffer` after this call, because the memory may be freed.
        """
        starts = iter(range(0, len(buffer), _SHARE))  # each of the two threads takes the next one
        writing = threading.Lock()  # held while the helping thread writes
        errors: list[Exception] = []  # of the helping thread

        def read_next() -> bool:
            at = next(starts, None)
            if at is not None:
                reading.read_into(piece, offset + at, buffer[at : at + _SHARE])
            return at is not None

        def help_reading() -> None:
            more = True
            while more and not errors:
                with writing:
                    try:
                        more = read_next()
                    except Exception as error:  # raised below, by the thread that called
                        errors.append(error)

        try:
            self._threads.submit(help_reading)
            while not errors and read_next():
                pass
        finally:
            deque(starts, maxlen=0)  # after an error, nothing is left for the helping thread
            _wait_for(writing)
        if errors:
            raise errors[0]

    def shutdown(self) -> None:
        """End the thread."""
        self._threads.shutdown()


def _wait_for(lock: threading.Lock) -> None:
    """Wait until `lock` is free. If a signal handler raises an exception meanwhile, raise it afterwards."""
    try:
        with lock:
            pass
    except BaseException:
        _wait_for(lock)
        raise


class VirtualFile(io.RawIOBase):
    """A read-only, seekable view of a planned file, which torch's loader accepts instead of a path.

    Checksums that are known only after writing are zero in the view. Reading raises the errors of reading the sources.

    Attributes:
        name: The path of the planned file.
        failure: The exception that a read raised, or None. torch's reader drops such exceptions, even Ctrl-C.
    """

    def __init__(self, file: OutFile) -> None:
        super().__init__()
        self.name = str(file.path)
        self.failure: BaseException | None = None
        self._reader = Pieces(())
        self._shared = _SharedReading()
        self._size = file.size
        self._pieces = [piece.resolved([0] * len(file.sums)) for piece in file.pieces]
        reading.announce(self._pieces)
        self._starts = [*accumulate((piece.length for piece in self._pieces), initial=0)][:-1]
        self._at = 0
        # the piece that is read as a stream, the offset of the current buffer in it, that buffer, and the next ones
        self._stream: tuple[Piece | None, int, bytes | memoryview, Iterator[bytes | memoryview]]
        self._stream = None, 0, b"", iter(())
        filling = self._filling()
        next(filling)
        self.readinto = filling.send  # type: ignore[method-assign, assignment]

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the current position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position to `offset`, relative to the start, the position or the end. Return the new position."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def close(self) -> None:
        """Forbid further reads, and remove the temporary files with inflated bytes."""
        super().close()
        self._reader.__exit__()
        self._shared.shutdown()
        self.readinto = self._refuse  # type: ignore[method-assign]

    def _filling(self) -> Generator[int, memoryview, None]:
        """Receive buffers, and fill them from the file. Yield the number of bytes in each.

        Its ``send`` is the method readinto.

        A function can be interrupted by a signal before its ``try`` block begins, and torch ignores errors of
        ``readinto`` (it calls ``read`` instead). A generator that has begun is always inside its ``try`` block, so no
        error is lost.
        """
        try:
            length = 0
            while True:
                length = self._fill((yield length))
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                self.failure = error
            self.readinto = self._refuse  # type: ignore[method-assign]
            raise

    def _refuse(self, *_: object) -> int:
        raise self.failure or ValueError("the file is closed")

    def _fill(self, buffer: memoryview) -> int:
        left = memoryview(buffer).cast("B")
        length = min(len(left), max(self._size - self._at, 0))
        left = left[:length]
        i = bisect_right(self._starts, self._at) - 1
        while left:
            while self._at >= self._starts[i] + self._pieces[i].length:
                i += 1
            done = self._read_piece(self._pieces[i], self._at - self._starts[i], left)
            self._at += done
            left = left[done:]
        return length

    def _read_piece(self, piece: Piece, offset: int, buffer: memoryview) -> int:
        """Read bytes of `piece` from `offset` into `buffer`. Return how many were read.

        Pieces that cannot be read at any offset are read as a stream, because torch reads storages from start to end.
        The stream starts again if `offset` is before its current buffer.
        """
        if piece.is_at_hand():
            length = min(piece.length - offset, len(buffer))
            read_into = self._shared.read_into if self._shared.is_for(piece, length) else reading.read_into
            read_into(piece, offset, buffer[:length])
            return length
        current, start, chunk, chunks = self._stream
        if current is not piece or offset < start:
            start, chunk, chunks = 0, b"", self._reader.chunks(piece)
        while offset >= start + len(chunk):
            start += len(chunk)
            chunk = next(chunks)
        self._stream = piece, start, chunk, chunks
        data = chunk[offset - start : offset - start + len(buffer)]
        buffer[: len(data)] = data
        if start + len(chunk) == piece.length:
            next(chunks, None)  # the end of the generator checks the inflated bytes
        return len(data)
