"""Compare the values of paired tensors: as bytes first, and as numbers if the bytes differ.

torch is imported only if bytes differ, or are not stored in the order of the elements. A storage that has the same
known checksum on both sides is read only with ``full``.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial, reduce
from itertools import chain, pairwise, starmap
from math import inf, prod
from operator import or_
from typing import TYPE_CHECKING

from ckptconv.byteranges import reading
from ckptconv.byteranges.materialise import Pieces, fillings
from ckptconv.byteranges.spans import ByteRange, Cast, Gather, Inflate, Meter, Piece, Scaled, joined
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo, piece_of
from ckptconv.dtypes import get_dtype
from ckptconv.inspection.comparison.differences import ValueDifference
from ckptconv.inspection.comparison.options import Compared
from ckptconv.inspection.values import (
    BLOCK,
    Batch,
    Budget,
    Histogram,
    batches,
    in_numbers,
    in_threads,
    without_repeats,
)

if TYPE_CHECKING:
    from ckptconv.byteranges.kernels.comparing import Comparer

_BUFFER = 1 << 20  # bytes of each side that a thread keeps in memory

#: A range in a pair of ranges: the offset in both, and the length.
Unequal = tuple[int, int]
#: The views of a pair of tensors.
Key = int
#: The codes with which :mod:`struct` reads dtypes.
_STRUCT_CODES = {
    **dict(zip(("float16", "bfloat16", "float32", "float64"), "effd", strict=True)),
    **dict(zip(("int8", "int16", "int32", "int64"), "bhiq", strict=True)),
    **dict(zip(("uint8", "uint16", "uint32", "uint64"), "BHIQ", strict=True)),
}
_LOOKED_AT = 1 << 20  # bytes of a differing range that are read with struct; a multiple of each item size


def _unequal_in(pairs: Sequence[tuple[ByteRange, ByteRange]], batch: Batch) -> list[tuple[int, Unequal]]:
    """Return the ranges in `batch` in which `pairs` differ, each with the index of its pair.

    A range begins with the first buffer that differs. The two ranges of a pair have the same length.
    """
    if len(batch) > 1 and sum(pairs[i][0].length for i, *_ in batch) <= _BUFFER:  # small tensors: read all at once
        sides = zip(*(pairs[i] for i, *_ in batch), strict=True)
        spans = ([span for piece in joined(side) for span in piece.ranges()] for side in sides)
        a, b = (b"".join(span.source.read(span.offset, span.length) for span in side) for side in spans)
        if a == b:
            return []
    buffers = bytearray(_BUFFER), bytearray(_BUFFER)
    unequal = []
    for i, offset, length in batch:
        for at in range(offset, offset + length, _BUFFER):
            n = min(_BUFFER, offset + length - at)
            left, right = buffers if n == _BUFFER else (bytearray(n), bytearray(n))
            for span, buffer in zip(pairs[i], (left, right), strict=True):
                span.source.read_into(span.offset + at, memoryview(buffer))
            if left != right:  # bytearrays: views would be compared number by number
                unequal.append((i, (at, offset + length - at)))
                break
    return unequal


class DifferenceFound(Exception):
    """Values differ. Raised if the caller only needs to know whether they do."""


class Values:
    """The comparison of the values of paired tensors of `a` and `b`. Each pair of views is compared once.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        compared: The tolerances, whether to read storages with equal checksums, and whether to make histograms of the
            differences.
    """

    #: Whether to raise :class:`DifferenceFound` at the first difference.
    stops = False

    def __init__(self, a: Checkpoint, b: Checkpoint, compared: Compared) -> None:
        self.orders = a.byteorder, b.byteorder
        self.options = compared
        self._keys: dict[tuple[object, object], Key] = {}
        #: The results. None if bytes differ, but it is not known whether they belong to the tensors.
        self.found: dict[Key, ValueDifference | None] = {}
        self.near: dict[Key, float] = {}
        self.steps: dict[Key, float] = {}
        self.wanted: dict[Key, tuple[TensorInfo, TensorInfo]] = {}
        self._repeats: dict[Key, int] = {}
        self._packed: dict[Key, int] = {}
        self._believed: set[tuple[int, int]] = set()
        self._budget = Budget((), "")
        self._rest = 2 * (a.source.size + b.source.size)  # bytes that may be read only to find the largest element of B

    def want(self, a: TensorInfo, b: TensorInfo) -> Key:
        """Queue the comparison of `a` and `b`, which have the same shape. Return the key of the result in `found`.

        The result is entered at once if the tensors are empty or known to be equal.
        """
        a, b = in_numbers(a), in_numbers(b)
        key = self._keys.setdefault((a.view, b.view), len(self._keys))
        if key not in self.found and key not in self.wanted:
            if not a.nbytes or (not self.options.full and self.known_equal(a, b)):
                self.found[key] = _equal(prod(a.shape))
                if a.nbytes:
                    self.believe([a], [b])
            elif get_dtype(a.dtype).packed != 1 or get_dtype(b.dtype).packed != 1:
                self.want_storages(key, a, b)
            else:
                left, right = without_repeats(a, b)
                self.wanted[key] = left, right
                self._repeats[key] = prod(a.shape) // prod(self.wanted[key][0].shape)
        return key

    def want_storages(self, key: Key, a: TensorInfo, b: TensorInfo) -> None:
        """Queue the comparison of the complete storages of `a` and `b`, whose elements are smaller than a byte.

        The result is "equal" if the storages are equal, and None (not known) otherwise.
        """
        assert a.storage and b.storage
        if a.view[1:] != b.view[1:] or a.storage.nbytes != b.storage.nbytes:
            self.found[key] = None
            return
        self.wanted[key] = bytes_of(a.storage), bytes_of(b.storage)
        self._repeats[key] = 1
        self._packed[key] = prod(a.shape)

    @property
    def unread(self) -> int:
        """The number of pairs of storages that were not read, because their checksums are equal."""
        return len(self._believed.difference(_storages(a, b) for a, b in self.wanted.values()))

    def known_equal(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Return whether `a` and `b` are the same view of storages for which both files declare the same checksum."""
        return have_equal_sums(a.storage, b.storage) and self.is_same_view(a, b)

    def believe(self, a: Iterable[TensorInfo], b: Iterable[TensorInfo]) -> None:
        """Record that the storages of the pairs of `a` and `b` were not read because of their checksums."""
        self._believed.update(map(_storages, a, b))

    def is_same_view(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Return whether `a` and `b` have the same offset, shape, stride and byte order in their storages."""
        return a.view[1:] == b.view[1:] and self.orders[0] == self.orders[1]

    def run(self, progress: Meter | None) -> None:
        """Compare all queued pairs: as bytes if possible, and as numbers if the bytes differ.

        `progress` gets the bytes to read.
        """
        self._budget = Budget(chain.from_iterable(self.wanted.values()), "compare a part: ")
        as_bytes = {key: spans for key, (a, b) in self.wanted.items() if (spans := self.spans(a, b))}
        pairs, homes = _merged(as_bytes)
        nbytes = sum(a.length for a, _ in pairs)
        self._budget.spend(2 * nbytes, "the tensors")
        reading.announce(span for pair in pairs for span in pair)
        keys_at: dict[int, list[Key]] = {}
        for key, home in homes.items():
            keys_at.setdefault(home, []).append(key)
        unequal: dict[int, list[Unequal]] = {}
        todo = batches((i, a.length) for i, (a, _) in enumerate(pairs))
        with progress(nbytes) if progress else nullcontext() as tick:
            for batch, parts in in_threads(partial(_unequal_in, pairs), todo):
                for i, part in parts:
                    uses = ((key, pairs[i][0], as_bytes[key], part) for key in keys_at[i])
                    if not self.stops or any(starmap(self.is_undecided, uses)):
                        unequal.setdefault(i, []).append(part)
                if tick:
                    tick(sum(length for _, _, length in batch))
        slow: list[tuple[Key, Piece, Piece]] = []
        views: dict[tuple[int, str, int], list[Key]] = {}
        for key, (a, b) in self.wanted.items():
            spans = as_bytes.get(key)
            if spans and not _shared(unequal.get(homes[key], []), pairs[homes[key]][0], spans[0], a):
                self.equal(key)
                continue
            pieces = self.elements((a, b))
            if spans and pieces == spans:
                start = (spans[0].offset - pairs[homes[key]][0].offset) % get_dtype(a.dtype).itemsize
                views.setdefault((homes[key], a.dtype, start), []).append(key)
            else:
                slow.append((key, *pieces))
        for (home, *_), keys in views.items():
            self.compare_views(keys, as_bytes, pairs[home], unequal[home])
        self.compare_streams(self.without_equal_storages(slow))
        for key, elements in self._packed.items():
            values = self.found[key]
            self.found[key] = None if values is None or values.differing else ValueDifference(elements, 0)

    def is_undecided(self, key: Key, home: ByteRange, spans: tuple[ByteRange, ByteRange], part: Unequal) -> bool:
        """Return whether the range `part` of `home`, whose bytes differ, has to be compared again for `key`.

        `spans` are the ranges of both tensors. Raises DifferenceFound if their numbers in `part` differ.
        """
        infos = self.wanted[key]
        shared = _shared([part], home, spans[0], infos[0])
        if shared and self.elements(infos) == spans:
            if self.surely_differ(infos[0].dtype, spans, shared[0]) or self.compared(infos, spans, shared).differing:
                raise DifferenceFound
            return False
        return bool(shared)

    def surely_differ(self, dtype: str, spans: tuple[ByteRange, ByteRange], part: Unequal) -> bool:
        """Return True if numbers at the start of the range `part` of `spans` differ, as far as Python can tell without
        torch.

        False means that the answer is not known.
        """
        offset, length = part[0], min(part[1], _LOOKED_AT)
        code = _STRUCT_CODES.get(dtype)
        if code is None or self.options.rtol or self.options.atol or self.orders[0] != "little":
            return False
        read = [each.source.read(each.offset + offset, length) for each in spans]
        a, b = (struct.iter_unpack("<" + code, _widened(data) if dtype == "bfloat16" else data) for data in read)
        return any(x != y and (x == x or y == y) for (x,), (y,) in zip(a, b, strict=True))  # NaN is equal to NaN

    def elements(self, infos: tuple[TensorInfo, TensorInfo]) -> tuple[Piece, Piece]:
        """Return pieces with the elements of both tensors in row-major order."""
        return piece_of(infos[0], self.orders[0]), piece_of(infos[1], self.orders[1])

    def equal(self, key: Key) -> None:
        """Record that the values of `key` are equal."""
        self.found[key] = _equal(prod(self.wanted[key][0].shape) * self._repeats[key])

    def spans(self, a: TensorInfo, b: TensorInfo) -> tuple[ByteRange, ByteRange] | None:
        """Return a pair of ranges of the files. If the bytes in them are equal, then `a` and `b` are equal.

        The ranges contain the elements, or the complete storages if both tensors are the same view. Return None if
        there are no such ranges, for example because dtypes differ or storages are deflated.
        """
        if a.dtype != b.dtype or (a.conj, a.neg) != (b.conj, b.neg) or self.orders[0] != self.orders[1]:
            return None
        assert a.storage and b.storage
        pieces: list[Piece]
        if a.contiguous and b.contiguous:
            pieces = [piece_of(info, order).uncast() for info, order in zip((a, b), self.orders, strict=True)]
        elif self.is_same_view(a, b):
            pieces = [a.storage.data, b.storage.data]
        else:
            return None
        left, right = pieces
        return (
            (left, right)
            if isinstance(left, ByteRange) and isinstance(right, ByteRange) and left.length == right.length
            else None
        )

    def compare_views(
        self,
        keys: Sequence[Key],
        spans: dict[Key, tuple[ByteRange, ByteRange]],
        home: tuple[ByteRange, ByteRange],
        unequal: Sequence[Unequal],
    ) -> None:
        """Compare views as numbers whose bytes differ.

        The views `keys` have one dtype and may overlap in `home`. So each range between two of their ends is compared
        once, and the results are combined for each view.
        """
        infos = self.wanted[keys[0]]
        starts = {key: spans[key][0].offset - home[0].offset for key in keys}
        stops = {key: starts[key] + spans[key][0].length for key in keys}
        ends = sorted({*starts.values(), *stops.values()})
        between = [
            [ByteRange(span.source, span.offset + start, stop - start) for span in home]
            for start, stop in pairwise(ends)
        ]
        parts = [_shared(unequal, home[0], a, infos[0]) for a, _ in between]
        comparers = [self.compared(infos, each, part) for each, part in zip(between, parts, strict=True)]
        if not self.stops and any(each.largest for each in comparers):
            for comparer, (_, b), part in zip(comparers, between, parts, strict=True):
                self.see_rest(comparer, infos[1], b, part)
        together = _Together(comparers)
        at = {end: i for i, end in enumerate(ends)}
        for key in keys:
            self.conclude(key, together.of(at[starts[key]], at[stops[key]]))

    def see_rest(self, comparer: Comparer, b: TensorInfo, span: ByteRange, parts: Sequence[Unequal]) -> None:
        """Pass `comparer` the elements of `b`, stored in `span`, outside of `parts`, because the largest element may be
        there.

        The total amount read in this way is limited to the size of the files. After that the largest element is not
        known.
        """
        ends = [(0, 0), *parts, (span.length, 0)]
        gaps = [(at + length, stop) for (at, length), (stop, _) in pairwise(ends) if at + length < stop]
        self._rest -= sum(stop - start for start, stop in gaps)
        if self._rest < 0:
            comparer.largest_of_b = None
            return
        size = BLOCK * get_dtype(b.dtype).itemsize
        for start, stop in gaps:
            for at in range(start, stop, size):
                buffer = memoryview(bytearray(min(size, stop - at)))
                span.source.read_into(span.offset + at, buffer)
                comparer.see(buffer)

    def compared(
        self, infos: tuple[TensorInfo, TensorInfo], spans: Sequence[ByteRange], parts: Sequence[Unequal]
    ) -> Comparer:
        """Return a comparer that has compared the ranges `parts` of `spans`, which contain the elements of `infos`, as
        numbers.
        """
        for info in infos:
            self._budget.spend(sum(length for _, length in parts), f"the tensors up to {info.path}")
        comparer = self.comparer(*infos)
        size = BLOCK * get_dtype(infos[0].dtype).itemsize
        for offset, length in parts:
            for at in range(0, length, size):
                filled = [bytearray(min(size, length - at)) for _ in spans]
                for span, buffer in zip(spans, filled, strict=True):
                    span.source.read_into(span.offset + offset + at, memoryview(buffer))
                if filled[0] != filled[1]:  # parts of several megabytes can differ in one element
                    comparer.add(memoryview(filled[0]), memoryview(filled[1]))
                elif not self.stops:
                    comparer.see(memoryview(filled[1]))
        return comparer

    def without_equal_storages(self, slow: list[tuple[Key, Piece, Piece]]) -> list[tuple[Key, Piece, Piece]]:
        """Return `slow` without the pairs that are the same view of equal deflated storages.

        They are recorded as equal.

        Two deflated storages are compared once, even if they have many views.
        """
        same: dict[tuple[int, int], bool] = {}
        left = []
        for key, *pieces in slow:
            a, b = self.wanted[key]
            assert a.storage and b.storage
            pair, data = _storages(a, b), (a.storage.data, b.storage.data)
            if (
                self.is_same_view(a, b)
                and data[0].length == data[1].length
                and any(isinstance(each, Inflate) for each in data)
                and all(each.is_record for each in data)
            ):
                if pair not in same:
                    same[pair] = reading.same_streams(reading.read(data[0]), reading.read(data[1]))
                if same[pair]:
                    self.equal(key)
                    continue
            left.append((key, pieces[0], pieces[1]))
        return left

    def compare_streams(self, slow: list[tuple[Key, Piece, Piece]]) -> None:
        """Compare pairs that have to be inflated, gathered, byte-swapped or cast before they can be compared."""
        for key, *pieces in slow:
            for info, piece in zip(self.wanted[key], pieces, strict=True):
                self._budget.spend_on(info, piece)
        with Pieces(piece for _, *pieces in slow for piece in pieces) as reader:
            reader.check_space()
            for key, a, b in slow:
                infos = self.wanted[key]
                stored = not any(isinstance(piece, (Gather, Cast)) for piece in (a, b))
                if (
                    stored
                    and infos[0].dtype == infos[1].dtype
                    and reading.same_streams(reader.chunks(a), reader.chunks(b))
                ):
                    self.equal(key)
                    continue
                comparer = self.comparer(*infos)
                sizes = [BLOCK * get_dtype(info.dtype).itemsize for info in infos]
                rooms = [memoryview(bytearray(size)) for size in sizes]
                both = zip(fillings(reader.chunks(a), rooms[0]), fillings(reader.chunks(b), rooms[1]), strict=True)
                at = 0
                for left, right in both:
                    parts = rooms[0][:left], rooms[1][:right]
                    comparer.add(*parts)
                    self.see_steps(key, (a, b), at, parts)
                    at += BLOCK
                self.conclude(key, comparer)

    def see_steps(self, key: Key, pieces: tuple[Piece, Piece], first: int, parts: tuple[memoryview, ...]) -> None:
        """Update ``steps`` with the elements in `parts`, from `first` on, if one of `pieces` is quantized."""
        for i, piece in enumerate(pieces):
            dtype = self.wanted[key][1 - i].dtype
            if isinstance(piece, Scaled) and dtype in ("float32", "bfloat16", "float16"):
                from ckptconv.byteranges.scaling import steps_between

                steps = steps_between(piece, 4 * first, parts[i], parts[1 - i], dtype)
                self.steps[key] = max(self.steps.get(key, 0.0), steps)

    def comparer(self, a: TensorInfo, b: TensorInfo) -> Comparer:
        """Return a comparer for the dtypes of `a` and `b`."""
        from ckptconv.byteranges.kernels.comparing import Comparer

        options = self.options
        return Comparer(a.dtype, b.dtype, options.rtol, options.atol, histogram=options.histogram)

    def conclude(self, key: Key, comparer: Comparer) -> None:
        """Record the result of `comparer` for `key`.

        Raises DifferenceFound if values differ and ``stops`` is set.
        """
        if comparer.differing and self.stops:
            raise DifferenceFound
        from ckptconv.byteranges.histograms import bins_of

        largest, of_b, relative = comparer.largest, comparer.largest_of_b, None
        if largest is not None and of_b is not None:
            relative = float(largest) / of_b if of_b else inf if largest else 0.0
        times = self._repeats[key]
        exponents = Counter({word: n * times for word, n in comparer.exponents.items()})
        self.found[key] = ValueDifference(
            prod(self.wanted[key][0].shape) * times,
            comparer.differing * times,
            largest,
            comparer.largest_relative,
            comparer.not_finite * times,
            Histogram(*bins_of(exponents)) if exponents else None,
            relative,
            (comparer.not_finite_in[0] * times, comparer.not_finite_in[1] * times),
        )
        if comparer.is_near:
            self.near[key] = float(largest or 0)


class _Together:
    """A segment tree of the results of `comparers`, which compared adjacent ranges.

    Combines any consecutive results quickly.
    """

    def __init__(self, comparers: Sequence[Comparer]) -> None:
        self.n = len(comparers)
        self.nodes = [*comparers, *comparers]  # the node at i combines those at 2 i and 2 i + 1
        for i in range(self.n - 1, 0, -1):
            self.nodes[i] = self.nodes[2 * i] | self.nodes[2 * i + 1]

    def of(self, first: int, stop: int) -> Comparer:
        """Return the combined result of the comparers from `first` to `stop` (exclusive)."""
        nodes, first, stop = [], first + self.n, stop + self.n
        while first < stop:
            nodes += self.nodes[first : first + (first & 1)] + self.nodes[stop - (stop & 1) : stop]
            first, stop = (first + 1) // 2, stop // 2
        return reduce(or_, nodes)


def _widened(data: bytes) -> bytes:
    """Return `data`, numbers in bfloat16, as float32."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return bytes(wide)


def bytes_of(storage: Storage) -> TensorInfo:
    """Return a tensor of dtype uint8 with all bytes of `storage`."""
    return TensorInfo(
        "",
        None,
        "strided",
        "uint8",
        (storage.nbytes,),
        (1,),
        0,
        None,
        storage.nbytes,
        storage,
        False,
        False,
        True,
    )


@lru_cache(maxsize=64)  # many tensors have the same number of elements
def _equal(elements: int) -> ValueDifference:
    """Return the result for equal tensors with this number of `elements`."""
    return ValueDifference(elements, 0)


def have_equal_sums(a: Storage | None, b: Storage | None) -> bool:
    """Return whether both files declare the same size and checksum for `a` and `b`."""
    if not a or not b or a.nbytes != b.nbytes or not (a.data.is_record and b.data.is_record):
        return False
    crc32 = a.data.crc32_known()
    return crc32 is not None and crc32 == b.data.crc32_known()


def _storages(a: TensorInfo, b: TensorInfo) -> tuple[int, int]:
    """Return the ids of the storages of `a` and `b`."""
    return id(a.storage), id(b.storage)


def _merged(spans: dict[Key, tuple[ByteRange, ByteRange]]) -> tuple[list[tuple[ByteRange, ByteRange]], dict[Key, int]]:
    """Return `spans` with overlapping pairs merged, so that nothing is read twice.

    Return also the index of the merged pair for each key.
    """
    numbers: dict[int, int] = {}  # of the sources, in the order of their first tensors

    def place(key: Key) -> tuple[int, ...]:
        a, b = spans[key]
        files = (numbers.setdefault(id(span.source), len(numbers)) for span in (a, b))
        return *files, b.offset - a.offset, a.offset, key

    merged: list[tuple[ByteRange, ByteRange]] = []
    homes: dict[Key, int] = {}
    last: list[int] = []  # the numbers of both sources, and the distance of the offsets
    end = 0
    for *apart, start, key in sorted(map(place, spans)):
        a, b = spans[key]
        if apart == last and start < end:
            end = max(end, start + a.length)
            left, right = merged[-1]
            length = end - left.offset
            merged[-1] = ByteRange(left.source, left.offset, length), ByteRange(right.source, right.offset, length)
        else:
            last, end = apart, start + a.length
            merged.append((a, b))
        homes[key] = len(merged) - 1
    return merged, homes


def _shared(parts: Sequence[Unequal], home: ByteRange, span: ByteRange, info: TensorInfo) -> list[Unequal]:
    """Return the intersections of `parts` of `home` with `span`, relative to `span`, extended to complete elements of
    `info`.
    """
    itemsize, before = get_dtype(info.dtype).itemsize, span.offset - home.offset
    shared = []
    for offset, length in parts:
        start = max(offset - before, 0) // itemsize * itemsize
        stop = min(-((before - offset - length) // itemsize) * itemsize, span.length)
        if start < stop:
            shared.append((start, stop - start))
    return shared
