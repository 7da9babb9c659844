"""Compute statistics of tensors, in threads and in bounded memory: counts of NaN, extremes, mean and deviation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ckptconv.byteranges import reading
from ckptconv.byteranges.materialise import Pieces, fillings
from ckptconv.byteranges.spans import Gather, Meter, Piece, Progress
from ckptconv.byteranges.threads import Threads, processors
from ckptconv.checkpoint.tensor_info import TensorInfo, piece_of
from ckptconv.dtypes import get_dtype
from ckptconv.errors import LimitError
from ckptconv.hints import Placeholder, option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

if TYPE_CHECKING:
    from ckptconv.byteranges.summing import Statistics

BLOCK = 1 << 15  # elements of one computation: as few as torch gives to one thread
_READ_THROUGH = 16  # bytes between elements: to read them takes as long as to compute with one element
_WHOLE_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_ROOM = 1 << 20  # bytes that a thread keeps in memory
_SEGMENT = 16 << 20  # bytes that a thread takes in one step
_MOST_TENSORS = 64  # to which these bytes may belong
_MOST_THREADS = 4

#: Slices of pieces: the index of the piece, the offset, and the length.
Batch: TypeAlias = "list[tuple[int, int, int]]"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Histogram:
    """The number of finite elements between each two adjacent `edges`.

    Half of the bins are for negative numbers. Starting at the largest magnitude, each bin is half as wide as the
    previous one, except for the two bins next to 0. A bin includes its edge on the side of 0. Zeros count as positive.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TensorValues:
    """Statistics of the elements of a tensor.

    Complex numbers count by their magnitude, and quantized ones by the integers that are stored. Counts, and the
    extremes of integers, are exact.

    Attributes:
        nan: The number of NaNs.
        inf: The number of infinities of either sign.
        zeros: The number of zeros.
        min: The smallest finite element, or None if no element is finite.
        max: The largest finite element, or None.
        mean: The mean of the finite elements, or None.
        std: Their standard deviation, as torch computes it, or None if there are fewer than two.
        norm: Their Euclidean norm.
        histogram: Their histogram, if it was requested, else None.
    """

    nan: int
    inf: int
    zeros: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    norm: float
    histogram: Histogram | None = None


def values_of(
    tensors: Mapping[str, TensorInfo], byteorder: str, *, histogram: bool = False, progress: Meter | None = None
) -> dict[str, TensorValues]:
    """Return the statistics of `tensors` by path. Tensors whose elements are not numbers are left out.

    Args:
        tensors: The tensors by path.
        byteorder: The byte order of their storages.
        histogram: Whether to make histograms.
        progress: Called with the number of bytes to read. It returns a context manager for a function that is called
            with the number of bytes read since its last call.

    Raises:
        MissingTorchError: torch is not installed.
        LimitError: Views repeat the bytes of storages too often.
    """
    from ckptconv.byteranges.summing import is_number

    homes: dict[str, tuple[object, ...]] = {}
    wanted: dict[tuple[object, ...], TensorInfo] = {}
    for path, info in tensors.items():
        if info.storage is None or info.kind not in ("strided", "quantized"):
            continue
        number = in_numbers(info)
        if get_dtype(info.dtype).packed == 1 and is_number(number.dtype):
            homes[path] = number.view
            wanted.setdefault(number.view, number)
    found = dict(zip(wanted, _Reader([*wanted.values()], byteorder, histogram=histogram).run(progress), strict=True))
    return {path: found[view] for path, view in homes.items()}


class _Reader:
    """A reader for the elements of tensors with distinct views."""

    def __init__(self, infos: Sequence[TensorInfo], byteorder: str, *, histogram: bool) -> None:
        budget = Budget(infos, "read a part: ")
        self.histogram = histogram
        self.dtypes = [info.dtype for info in infos]
        self.pieces: list[Piece] = []
        self.repeats: list[int] = []
        for info in infos:
            (once,) = without_repeats(info) if info.nbytes else (info,)
            piece = piece_of(once, byteorder)
            budget.spend_on(once, piece)
            self.pieces.append(piece)
            self.repeats.append(prod(info.shape) // max(prod(once.shape), 1))

    def run(self, progress: Meter | None) -> list[TensorValues]:
        """Return the statistics of all tensors, in order."""
        found: list[TensorValues | None] = [None] * len(self.pieces)
        plain, others = [
            [i for i, piece in enumerate(self.pieces) if bool(piece.ranges()) == is_plain] for is_plain in (True, False)
        ]
        with progress(sum(piece.length for piece in self.pieces)) if progress else nullcontext() as tick:
            for i, statistics in self.of_ranges(plain, tick):
                found[i] = self.result(i, statistics)
            with Pieces([self.pieces[i] for i in others]) as reader:
                reader.check_space()
                for i in others:
                    found[i] = self.result(i, self.in_stream(reader, i))
                    if tick:
                        tick(self.pieces[i].length)
        # a tensor without elements has no result yet
        return [values or self.result(i, self.statistics(i)) for i, values in enumerate(found)]

    def of_ranges(self, numbers: Sequence[int], tick: Progress | None) -> Iterator[tuple[int, Statistics]]:
        """Yield the index and statistics of the tensors with the indices `numbers`, whose bytes are ranges of files."""
        merged: Statistics | None = None
        before = -1
        lengths = ((i, self.pieces[i].length) for i in numbers)
        for batch, parts in in_threads(self.read, batches(lengths)):  # in order, so sums do not depend on the threads
            for (i, _, _), part in zip(batch, parts, strict=True):
                if merged is None or i != before:
                    if merged is not None:
                        yield before, merged
                    before, merged = i, part
                else:
                    merged.merge(part)
            if tick:
                tick(sum(length for _, _, length in batch))
        if merged is not None:
            yield before, merged

    def read(self, batch: Batch) -> list[Statistics]:
        """Return the statistics of each slice in `batch`."""
        room = memoryview(bytearray(_ROOM))
        found = []
        for i, offset, length in batch:
            statistics = self.statistics(i)
            for at in range(0, length, _ROOM):
                data = room[: min(_ROOM, length - at)]
                reading.read_into(self.pieces[i], offset + at, data)
                statistics.add(data)
            found.append(statistics)
        return found

    def in_stream(self, reader: Pieces, i: int) -> Statistics:
        """Return the statistics of tensor `i`, whose bytes have to be inflated, gathered, joined or byte-swapped."""
        statistics = self.statistics(i)
        room = memoryview(bytearray(BLOCK * get_dtype(self.dtypes[i]).itemsize))
        for filled in fillings(reader.chunks(self.pieces[i]), room):
            statistics.add(room[:filled])
        return statistics

    def statistics(self, i: int) -> Statistics:
        """Return empty statistics for tensor `i`."""
        from ckptconv.byteranges.summing import Statistics

        return Statistics(self.dtypes[i], histogram=self.histogram)

    def result(self, i: int, found: Statistics) -> TensorValues:
        """Return the statistics of tensor `i` as a result.

        Elements that its view repeats were read once and count fully.
        """
        from ckptconv.byteranges.histograms import bins_of

        found.repeat(self.repeats[i])
        return TensorValues(
            nan=found.nan,
            inf=found.inf,
            zeros=found.zeros,
            min=found.low,
            max=found.high,
            mean=found.mean if found.finite else None,
            std=found.std,
            norm=found.norm,
            histogram=Histogram(*bins_of(found.exponents)) if self.histogram else None,
        )


# Threads


def batches(lengths: Iterable[tuple[int, int]]) -> Iterator[Batch]:
    """Yield slices of pieces in batches of a few megabytes. `lengths` contains the index and length of each piece."""
    batch: Batch = []
    size = 0
    for i, length in lengths:
        for offset in range(0, length, _SEGMENT):
            part = min(_SEGMENT, length - offset)
            if batch and (size + part > _SEGMENT or len(batch) == _MOST_TENSORS):
                yield batch
                batch, size = [], 0
            batch.append((i, offset, part))
            size += part
    if batch:
        yield batch


def in_threads(call: Callable[[Batch], _T], todo: Iterator[Batch]) -> Iterator[tuple[Batch, _T]]:
    """Yield each batch of `todo` with the result of `call` for it, in order. The calls run in threads."""
    most = min(_MOST_THREADS, processors())
    with Threads(most, "ckptconv-values") as threads:
        tasks = deque((batch, threads.submit(call, batch)) for batch in islice(todo, 2 * most + 1))
        while tasks:
            batch, task = tasks.popleft()
            yield batch, task.result()
            tasks += ((after, threads.submit(call, after)) for after in islice(todo, 1))


# Elements


class Budget:
    """A limit on the number of bytes that are read of some tensors, relative to the size of their storages."""

    def __init__(self, infos: Iterable[TensorInfo], hint: str) -> None:
        held = sum({id(info.storage): info.storage.nbytes for info in infos if info.storage}.values())
        self._room = LIMITS.written(held)
        self._hint = hint

    def spend(self, nbytes: int, what: str) -> None:
        """Subtract `nbytes`, which are read for `what` (for the error).

        Raises LimitError if all views together repeat the bytes of the storages too often.
        """
        self._room -= nbytes
        if self._room < 0:
            raise LimitError(
                f"{what} have too many elements for their storages",
                expected=(
                    f"at most {LIMITS.gathered_ratio} times what the storages hold, or {LIMITS.gathered_bytes:,} bytes"
                    " more"
                ),
                hint=self._hint + option("include", Placeholder("GLOB")),
            )

    def spend_on(self, info: TensorInfo, piece: Piece) -> None:
        """Subtract the bytes that are read for the view `info`, whose elements are `piece`.

        Of a strided view, some bytes between its elements count too. Raises LimitError also if this view alone repeats
        the elements of its storage too often.
        """
        most = LIMITS.gathered(info.storage.nbytes if info.storage else 0)
        if info.nbytes > most:
            raise LimitError(
                f"{info.path} has too many elements for its storage",
                expected=f"at most {most:,} bytes",
                got=f"{info.nbytes:,}",
            )
        source, nbytes = piece.uncast(), info.nbytes
        if isinstance(source, Gather):
            reach = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride, strict=True))
            nbytes = max(nbytes, reach * source.itemsize // _READ_THROUGH)
        self.spend(nbytes, f"the tensors up to {info.path}")


def in_numbers(info: TensorInfo) -> TensorInfo:
    """Return `info`, a tensor with a storage, as a tensor of readable numbers.

    A quantized tensor becomes its integers. A tensor with several elements in a byte becomes uint8, if it does not
    share a byte with other data. Otherwise it is returned unchanged.
    """
    dtype = get_dtype(info.dtype)
    if dtype.name in _WHOLE_NUMBERS:
        return replace(info, dtype=_WHOLE_NUMBERS[dtype.name], kind="strided")
    if dtype.packed == 1 or not info.contiguous or info.offset or prod(info.shape) % dtype.packed:
        return info
    return replace(info, dtype="uint8", kind="strided", shape=(info.nbytes,), stride=(1,))


def without_repeats(*infos: TensorInfo) -> list[TensorInfo]:
    """Return `infos`, tensors of one shape, with size 1 in each dimension in which all of them have stride 0."""
    shape = infos[0].shape
    strides = zip(*(info.stride for info in infos), strict=True)
    kept = tuple(n if any(steps) else min(n, 1) for n, steps in zip(shape, strides, strict=True))
    if kept == shape:
        return [*infos]
    return [replace(info, shape=kept, nbytes=prod(kept) * get_dtype(info.dtype).itemsize) for info in infos]
