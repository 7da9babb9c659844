"""A planned conversion as new bytes and ranges of the source, from which another program can write the output."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.byteranges.checksums import check_crc32, checksum
from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.reading import announce, located
from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, Deferred, Literal, OutFile, Piece, Progress
from ckptconv.conversion.folder_plans import plan_source
from ckptconv.conversion.options import PlanOptions, parse_options, takes
from ckptconv.conversion.plan import Report, read_and_plan, report_of
from ckptconv.conversion.targets import Request, format_of
from ckptconv.formats.opening import open_input
from ckptconv.hints import for_python
from ckptconv.pickles.graph import gc_paused
from ckptconv.stores.memory import Input

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FilePart(NamedTuple):
    """`length` bytes at `offset` of the file `path`, which is the source or one of its files."""

    offset: int
    length: int
    path: Path


class PlannedFile:
    """A file that a conversion would write, as a sequence of parts. :func:`ckptconv.plan` returns it.

    A context manager. Leaving it closes the source, unless that is a file object.

    Attributes:
        path: The path of the file.
        report: The report about the conversion. After all parts were yielded, it contains the numbers of overflows.
    """

    report: Report

    def __init__(self, source: Readable, file: OutFile, report: Report, opened: ExitStack) -> None:
        """Create the planned `file` of a plan for `source`. Closing `opened` closes the source."""
        self.path, self.report = file.path, report
        self._source, self._file, self._opened = source, file, opened
        self._stored = {id(each) for each in _files_of(source)}

    def __enter__(self) -> PlannedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return self._file.size

    @property
    def nbytes_read(self) -> int:
        """The number of bytes that :meth:`parts` reads or computes itself.

        These are the bytes whose checksum has to be computed or compared, that are inflated, or that torch computes.
        """
        return sum(piece.length for piece in (*self._file.sums, *filter(self._is_made, self._file.pieces)))

    def parts(self, progress: Progress | None = None) -> Iterator[bytes | FilePart]:
        """Yield the parts of the file in order.

        Args:
            progress: Called with the number of bytes read since its last call.

        Yields:
            Bytes, or a :class:`FilePart`, which is a range of the source.

        Raises:
            CkptconvError: One of its subclasses. A wrong checksum is raised before the first part is yielded, and a
                change of the source after the last one.
        """
        announce(self._file.pieces)
        tick = progress or (lambda nbytes: None)
        with Pieces((*self._file.pieces, *self._file.sums)) as reader:
            sums = [_sum(reader, piece, tick) for piece in self._file.sums]
            reader.overflowed.clear()  # pieces with a checksum are computed twice
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
        """Return whether the bytes of `piece` have to be computed or inflated, because they are not stored unchanged in
        the source.
        """
        if isinstance(piece, (Literal, Deferred)):
            return False
        return not piece.ranges() or any(id(located(span)[0]) not in self._stored for span in piece.ranges())


def _files_of(source: Readable) -> Iterator[Readable]:
    """Yield the files that `source` consists of."""
    if isinstance(source, SourceFolder):
        for part in source.parts:
            yield from _files_of(part)
    else:
        yield source


def plan_files(src: Input, request: Request) -> tuple[PlannedFile, ...]:
    """Plan the conversion `request` of `src`. Return the files that it would write, an index last.

    All files have the same report. Closing one of them closes the source. Raises the errors of :func:`plan`.
    """
    started = time.monotonic()
    with ExitStack() as opened:
        source = opened.enter_context(open_input(src, download=request.output.download))
        with gc_paused():
            planned = plan_source(source, request, opened) if request.is_folder else read_and_plan(source, request)
        seconds = time.monotonic() - started
        report = report_of(planned, source, seconds=seconds, written=False, notes=request.notes)
        kept = opened.pop_all()
    return tuple(PlannedFile(source, file, report, kept) for file in planned.files)


@for_python
@takes(PlanOptions)
def plan(
    src: Input, dst: str | os.PathLike[str], *, download: bool = False, **options: Unpack[PlanOptions]
) -> PlannedFile:
    """Plan the output that :func:`ckptconv.convert` would write to `dst`, as bytes and ranges of `src`.

    Nothing is written, so the output can be written elsewhere: in a browser, in a store that copies ranges, in an HTTP
    response.

    Args:
        src: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`ckptconv.open`.
        dst: The path of the file. Its suffix determines its format.
        download: For a URL, as for :func:`ckptconv.convert`.
        **options: The keys of :class:`~ckptconv.conversion.options.PlanOptions`.

    Returns:
        The planned file, a context manager with ``report``, ``size`` and ``parts()``.

    Raises:
        CkptconvError: One of its subclasses.
        ArgumentTypeError: An option has a wrong type, or no option has that name.
    """
    edits, output = parse_options({**options, "download": download})
    format_of(Path(dst), output.format)  # raises an error if the suffix contradicts it
    (planned,) = plan_files(src, Request(Path(), Path(dst), "file", edits, output))
    return planned


def _sum(reader: Pieces, piece: Piece, tick: Progress) -> int:
    """Return the checksum of `piece`. Raise MalformedError if the source declares another one."""
    crc32 = 0
    for chunk in reader.chunks(piece):
        crc32 = checksum(chunk, crc32)
        tick(len(chunk))
    if isinstance(piece, ByteRange):
        check_crc32(piece.crc32, crc32, piece.where)
    return crc32
