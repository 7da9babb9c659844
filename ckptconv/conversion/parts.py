"""A conversion as a plan, for who puts the output together elsewhere: bytes of our own, and parts of the source."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.reading import announce, located
from ckptconv.byteranges.sources import Input, Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, Deferred, Literal, Piece, Progress
from ckptconv.conversion.options import USUAL, OutputOptions, PlanOptions, takes
from ckptconv.conversion.plan import Report, read_and_plan, report_of
from ckptconv.conversion.targets import format_of
from ckptconv.edits.options import Edits, edits_from
from ckptconv.formats.opening import open_input
from ckptconv.hints import for_python, in_python
from ckptconv.pickles.graph import gc_paused

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FilePart", "PlannedFile", "plan"]


class FilePart(NamedTuple):
    """`length` bytes at `offset` of the source; `path` says of which file, where the source has several."""

    offset: int
    length: int
    path: Path


class PlannedFile:
    """One file that a conversion would write, as its parts; what :func:`ckptconv.plan` returns.

    A context manager: leaving it closes the source, unless that is a file object.

    Attributes:
        report: What the conversion would do; what overflowed is in it when all parts were given.
    """

    report: Report

    def __init__(
        self, src: Input, path: Path, edits: Edits, output: OutputOptions = USUAL, *, download: bool = False
    ) -> None:
        """:func:`plan` with its options as data."""
        started = time.monotonic()
        output = replace(output, format=format_of(path, output.format))
        with ExitStack() as opened:
            self._source = opened.enter_context(open_input(src, download=download))
            with gc_paused():
                plan = read_and_plan(self._source, path, edits, output)
            seconds = time.monotonic() - started
            self.report = report_of(plan, self._source, seconds=seconds, written=False, overflowed={})
            self._opened = opened.pop_all()
        (self._file,) = plan.files

    def __enter__(self) -> PlannedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return self._file.size

    @property
    def nbytes_read(self) -> int:
        """How many bytes :meth:`parts` makes or reads itself: what checksums are still owed for or compared with, what
        has to be inflated, and what torch computes. All else stays where it is.
        """
        return sum(piece.length for piece in (*self._file.sums, *filter(self._is_made, self._file.pieces)))

    def parts(self, progress: Progress | None = None) -> Iterator[bytes | FilePart]:
        """What the file is made of, one behind another.

        Args:
            progress: Called with each number of those bytes that are read.

        Yields:
            Bytes, or where they stand in the source.

        Raises:
            CkptconvError: One of its subclasses. A checksum that is wrong is found before the first part is given, a
                source that has changed behind the last one.
        """
        announce(self._file.pieces)
        tick = progress or (lambda nbytes: None)
        with Pieces((*self._file.pieces, *self._file.sums)) as reader:
            sums = [_sum(reader, piece, tick) for piece in self._file.sums]
            reader.overflowed.clear()  # what is summed is computed twice
            for piece in (each.resolved(sums) for each in self._file.pieces):
                if self._is_made(piece):
                    for chunk in reader.chunks(piece):
                        tick(len(chunk))
                        yield bytes(chunk)
                elif isinstance(piece, Literal):
                    yield piece.data
                else:
                    for span in piece.ranges():
                        source, offset = located(span)
                        yield FilePart(offset, span.length, source.path)
            self.report = replace(self.report, overflowed=dict(reader.overflowed))
        self._source.check_unchanged()

    def _is_made(self, piece: Piece) -> bool:
        """Whether the bytes of `piece` are neither known nor in the source as they are."""
        if isinstance(piece, (Literal, Deferred)):
            return False
        files: list[Readable] = self._source.parts if isinstance(self._source, SourceFolder) else [self._source]
        return not piece.ranges() or any(located(span)[0] not in files for span in piece.ranges())


@for_python
@takes(PlanOptions)
def plan(
    src: Input, dst: str | os.PathLike[str], *, download: bool = False, **options: Unpack[PlanOptions]
) -> PlannedFile:
    """What :func:`ckptconv.convert` would write to the file `dst`, as bytes and parts of `src`.

    Nothing is written, so that it can be put together elsewhere: in a browser, in a store that copies ranges, in an
    HTTP response.

    Args:
        src: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`ckptconv.open`.
        dst: What the file is to be called; its suffix says its format.
        download: Of a URL, as for :func:`ckptconv.convert`.
        **options: The keys of :class:`~ckptconv.conversion.options.PlanOptions`.

    Returns:
        The planned file, a context manager: ``.report``, ``.size``, ``.parts()``.

    Raises:
        CkptconvError: One of its subclasses.
        ArgumentTypeError: An option has a wrong type, or there is none of that name.
    """
    planned = PlannedFile(src, Path(dst), edits_from(**options), OutputOptions.of(options), download=download)
    planned.report = in_python(planned.report)
    return planned


def _sum(reader: Pieces, piece: Piece, tick: Progress) -> int:
    """The checksum of `piece`, compared where its source says it."""
    crc32 = 0
    for chunk in reader.chunks(piece):
        crc32 = checksum(chunk, crc32)
        tick(len(chunk))
    if isinstance(piece, ByteRange):
        check_crc32(piece.crc32, crc32, piece.where)
    return crc32
