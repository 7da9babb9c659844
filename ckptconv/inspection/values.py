"""Read the values of tensors, in threads and in bounded memory: how many are NaN, their extremes, mean and spread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ckptconv.byteranges import reading
from ckptconv.byteranges.materialise import Pieces, fillings
from ckptconv.byteranges.spans import Gather, Meter, Piece, Progress
from ckptconv.byteranges.threads import Threads
from ckptconv.checkpoint.tensor_info import TensorInfo, piece_of
from ckptconv.dtypes import get_dtype
from ckptconv.errors import LimitError
from ckptconv.hints import Placeholder, option
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

if TYPE_CHECKING:
    from ckptconv.byteranges.kernels.summing import Statistics

BLOCK = 1 << 15  # elements that are computed with at once: as few as torch gives to one thread
_READ_THROUGH = 16  # bytes between elements that are read as quickly as one is computed with
_WHOLE_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_ROOM = 1 << 20  # bytes that a thread holds
_SEGMENT = 16 << 20  # bytes that a thread takes at once
_MOST_TENSORS = 64  # that these bytes may belong to
_MOST_THREADS = 4

#: Parts of pieces: the number of the tensor, the offset, and the length.
_Batch = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Histogram:
    """How many finite numbers are between each of `edges` and the next one; half of the bins are for negative ones.

    From the largest magnitude down each bin is half as wide as the one before it, but for the two around 0. A bin has
    its edge on the side of 0, and zeros are on the positive side.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TensorValues:
    """What the elements of a tensor are: how many are NaN, an infinity of either sign, or 0, and of all that are finite
    the extremes, mean, standard deviation (torch's) and norm.

    Counts and the extremes of whole numbers are exact. None stands where there is no such number: no element is finite,
    or there is one alone and no deviation. Complex numbers count by their magnitude, quantized ones by the whole
    numbers that are stored.
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
    """The values of `tensors`, whose numbers stand in `byteorder`; what shows no numbers of its own has none.

    Raises:
        MissingTorchError: torch is not installed.
        LimitError: Views repeat what storages hold more often than anybody can wait for.
    """
    from ckptconv.byteranges.kernels.summing import is_number

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
    """Reads the elements of `infos`, each view of which is another."""

    def __init__(self, infos: Sequence[TensorInfo], byteorder: str, *, histogram: bool) -> None:
        budget = Budget(infos, "read a part: ")
        self.histogram = histogram
        self.dtypes = [info.dtype for info in infos]
        self.pieces: list[Piece] = []
        self.repeats: list[int] = []
        for info in infos:
            (once,) = without_repeats(info) if info.nbytes else (info,)
            check_repeats(once)
            piece = piece_of(once, byteorder)
            budget.spend(cost(once, piece), f"the tensors up to {info.path}")
            self.pieces.append(piece)
            self.repeats.append(prod(info.shape) // max(prod(once.shape), 1))

    def run(self, progress: Meter | None) -> list[TensorValues]:
        """The values of each."""
        found: list[TensorValues | None] = [None] * len(self.pieces)
        plain, others = [
            [i for i, piece in enumerate(self.pieces) if bool(piece.ranges()) == is_plain] for is_plain in (True, False)
        ]
        with progress(sum(piece.length for piece in self.pieces)) if progress else nullcontext() as tick:
            for i, statistics in self.in_threads(plain, tick):
                found[i] = self.result(i, statistics)
            with Pieces([self.pieces[i] for i in others]) as reader:
                reader.check_space()
                for i in others:
                    found[i] = self.result(i, self.in_stream(reader, i))
                    if tick:
                        tick(self.pieces[i].length)
        return [
            each or self.result(i, self.statistics(i)) for i, each in enumerate(found)
        ]  # those without elements too

    def in_threads(self, numbers: Sequence[int], tick: Progress | None) -> Iterator[tuple[int, Statistics]]:
        """The statistics of the tensors with these `numbers`, whose bytes stand in files as they are."""
        whole: Statistics | None = None
        before = -1
        with Threads(min(_MOST_THREADS, os.cpu_count() or 1), "ckptconv-values") as threads:
            tasks = deque(threads.submit(self.read, batch) for batch in self.batches(numbers))
            while tasks:
                batch, parts = tasks.popleft().result()  # in order, so that sums do not depend on the threads
                for (i, _, _), part in zip(batch, parts, strict=True):
                    if whole is None or i != before:
                        if whole is not None:
                            yield before, whole
                        before, whole = i, part
                    else:
                        whole.merge(part)
                if tick:
                    tick(sum(length for _, _, length in batch))
        if whole is not None:
            yield before, whole

    def batches(self, numbers: Sequence[int]) -> Iterator[_Batch]:
        """The tensors with these `numbers` in parts of some megabytes."""
        batch: _Batch = []
        size = 0
        for i in numbers:
            length = self.pieces[i].length
            for offset in range(0, length, _SEGMENT):
                part = min(_SEGMENT, length - offset)
                if batch and (size + part > _SEGMENT or len(batch) == _MOST_TENSORS):
                    yield batch
                    batch, size = [], 0
                batch.append((i, offset, part))
                size += part
        if batch:
            yield batch

    def read(self, batch: _Batch) -> tuple[_Batch, list[Statistics]]:
        """The statistics of each part."""
        room = memoryview(bytearray(_ROOM))
        found = []
        for i, offset, length in batch:
            statistics = self.statistics(i)
            for at in range(0, length, _ROOM):
                data = room[: min(_ROOM, length - at)]
                reading.read_into(self.pieces[i], offset + at, data)
                statistics.add(data)
            found.append(statistics)
        return batch, found

    def in_stream(self, reader: Pieces, i: int) -> Statistics:
        """The statistics of a tensor whose bytes have to be inflated, gathered, put together or turned round."""
        statistics = self.statistics(i)
        room = memoryview(bytearray(BLOCK * get_dtype(self.dtypes[i]).itemsize))
        for filled in fillings(reader.chunks(self.pieces[i]), room):
            statistics.add(room[:filled])
        return statistics

    def statistics(self, i: int) -> Statistics:
        from ckptconv.byteranges.kernels.summing import Statistics

        return Statistics(self.dtypes[i], histogram=self.histogram)

    def result(self, i: int, found: Statistics) -> TensorValues:
        from ckptconv.byteranges.kernels.summing import bins_of

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


# Elements


class Budget:
    """How many bytes may be read of `infos`, whose storages count once each."""

    def __init__(self, infos: Iterable[TensorInfo], hint: str) -> None:
        held = sum({id(info.storage): info.storage.nbytes for info in infos if info.storage}.values())
        self._room = LIMITS.written(held)
        self._hint = hint

    def spend(self, nbytes: int, what: str) -> None:
        """Count `nbytes` that are read for `what`.

        Raises LimitError where all views together repeat what storages hold more often than anybody can wait for.
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


def in_numbers(info: TensorInfo) -> TensorInfo:
    """`info`, a tensor with a storage, where it is quantized as its whole numbers.

    Where several are packed in a byte, and all bytes are its own, as bytes.
    """
    dtype = get_dtype(info.dtype)
    if dtype.name in _WHOLE_NUMBERS:
        return replace(info, dtype=_WHOLE_NUMBERS[dtype.name], kind="strided")
    if dtype.packed == 1 or not info.contiguous or info.offset or prod(info.shape) % dtype.packed:
        return info
    return replace(info, dtype="uint8", kind="strided", shape=(info.nbytes,), stride=(1,))


def without_repeats(*infos: TensorInfo) -> list[TensorInfo]:
    """`infos`, of one shape, with one element in each dimension along which all of them repeat theirs."""
    shape = infos[0].shape
    strides = zip(*(info.stride for info in infos), strict=True)
    kept = tuple(n if any(steps) else min(n, 1) for n, steps in zip(shape, strides, strict=True))
    if kept == shape:
        return [*infos]
    return [replace(info, shape=kept, nbytes=prod(kept) * get_dtype(info.dtype).itemsize) for info in infos]


def check_repeats(info: TensorInfo) -> None:
    """Raise LimitError where one view repeats its elements too often."""
    most = LIMITS.gathered(info.storage.nbytes if info.storage else 0)
    if info.nbytes > most:
        raise LimitError(
            f"{info.path} has too many elements for its storage",
            expected=f"at most {most:,} bytes",
            got=f"{info.nbytes:,}",
        )


def cost(info: TensorInfo, piece: Piece) -> int:
    """The bytes to read, or as much as takes as long: what lies between the elements of a view has to be read too."""
    of = piece.uncast()
    if not isinstance(of, Gather):
        return info.nbytes
    reach = 1 + sum((n - 1) * step for n, step in zip(of.shape, of.stride, strict=True))
    return max(info.nbytes, reach * of.itemsize // _READ_THROUGH)
