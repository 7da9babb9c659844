"""The values of two checkpoints, pair of tensors by pair: as bytes where they can be, as numbers where those differ.

torch is not imported unless bytes differ, or do not stand in the order of their tensors. A storage whose checksum is known on both sides, and equal, is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ckptconv.comparison.differences import ValueDifference
from ckptconv.comparison.same_bytes import Unequal, same_streams, unequal_parts
from ckptconv.dtypes import dtype_called
from ckptconv.elements import piece_of
from ckptconv.errors import LimitError
from ckptconv.limits import LIMITS
from ckptconv.model import Cast, Checkpoint, Gather, Inflate, Late, Piece, Progress, Span, Storage, TensorInfo
from ckptconv.pieces import Pieces, fillings

if TYPE_CHECKING:
    from ckptconv.tensors.comparing import Comparer

__all__ = ["Key", "Meter", "Values", "bytes_of"]

_BLOCK = 1 << 15  # elements that are compared at once where bytes differ: as few as torch gives to one thread
_WHOLE_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}

#: The views of a pair of tensors.
Key = tuple[tuple[object, ...], tuple[object, ...]]
#: Called with the bytes to compare, for what is called with each number of bytes compared.
Meter = Callable[[int], AbstractContextManager[Progress | None]]


class Values:
    """Compares the values of pairs of tensors of A and B, each pair of views once."""

    def __init__(self, a: Checkpoint, b: Checkpoint, rtol: float, atol: float) -> None:
        self.orders = a.byteorder, b.byteorder
        self.rtol, self.atol = rtol, atol
        self.found: dict[Key, ValueDifference] = {}
        self.near: dict[Key, float] = {}
        self.wanted: dict[Key, tuple[TensorInfo, TensorInfo]] = {}

    def want(self, a: TensorInfo, b: TensorInfo) -> Key:
        """Have A and B, of one shape, compared; where the result will be found."""
        a, b = _in_numbers(a), _in_numbers(b)
        key = a.view, b.view
        if key not in self.found and key not in self.wanted:
            if not a.nbytes or self.known_equal(a, b):
                self.found[key] = ValueDifference(prod(a.shape), 0)
            else:
                self.wanted[key] = a, b
        return key

    def known_equal(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Whether A and B are the same view of storages that have the same checksum, by what their files say."""
        if not a.storage or not b.storage or a.view[1:] != b.view[1:] or self.orders[0] != self.orders[1]:
            return False
        sums = [each.storage.data.crc32 for each in (a, b) if each.storage and isinstance(each.storage.data, (Span, Inflate))]  # fmt: skip
        return a.storage.nbytes == b.storage.nbytes and len(sums) == 2 and sums[0] is not None and sums[0] == sums[1]

    def run(self, progress: Meter | None) -> None:
        """Compare what is wanted: as bytes where they can be, and as numbers where they differ."""
        as_bytes = {key: spans for key, (a, b) in self.wanted.items() if (spans := self.spans(a, b))}
        places = {_place(spans): spans for spans in as_bytes.values()}  # views can have one storage
        nbytes = sum(spans[0].length for spans in places.values())
        with progress(nbytes) if progress else nullcontext() as tick:
            unequal = unequal_parts(list(places.values()), tick)
        parts = {place: unequal.get(i) for i, place in enumerate(places)}
        slow: list[tuple[Key, Piece, Piece]] = []
        for key, (a, b) in self.wanted.items():
            spans = as_bytes.get(key)
            found = parts[_place(spans)] if spans else None
            if spans and not found:
                self.found[key] = ValueDifference(prod(a.shape), 0)
                continue
            pieces = piece_of(a, self.orders[0]), piece_of(b, self.orders[1])
            if found and pieces == spans:
                self.compare_parts(key, (a, b), spans, found)
            else:
                slow.append((key, *pieces))
        self.compare_streams(slow)

    def spans(self, a: TensorInfo, b: TensorInfo) -> tuple[Span, Span] | None:
        """Ranges of the files which, if they are the same, say that A and B are: the elements, or the whole storages of the same view."""
        if a.dtype != b.dtype or (a.conj, a.neg) != (b.conj, b.neg) or self.orders[0] != self.orders[1]:
            return None
        assert a.storage and b.storage
        found: list[Piece]
        if a.contiguous and b.contiguous:
            found = [piece.of if isinstance(piece, Cast) else piece for piece in (piece_of(a, self.orders[0]), piece_of(b, self.orders[1]))]  # fmt: skip
        elif a.view[1:] == b.view[1:]:
            found = [a.storage.data, b.storage.data]
        else:
            return None
        left, right = found
        return (left, right) if isinstance(left, Span) and isinstance(right, Span) and left.length == right.length else None  # fmt: skip

    def compare_parts(
        self, key: Key, infos: tuple[TensorInfo, TensorInfo], spans: tuple[Span, Span], parts: Sequence[Unequal]
    ) -> None:
        """Compare as numbers what differs as bytes."""
        comparer = self.comparer(*infos)
        size = _BLOCK * dtype_called(infos[0].dtype).itemsize
        for offset, length in parts:
            buffers = [memoryview(bytearray(min(size, length))) for _ in spans]
            for at in range(0, length, size):
                filled = [buffer[: min(size, length - at)] for buffer in buffers]
                for span, buffer in zip(spans, filled, strict=True):
                    span.source.read_into(span.offset + offset + at, buffer)
                comparer.add(*filled)
        self.conclude(key, comparer)

    def compare_streams(self, slow: list[tuple[Key, Piece, Piece]]) -> None:
        """Compare what has to be inflated, gathered, turned round or widened."""
        for key, *pieces in slow:
            for info, piece in zip(self.wanted[key], pieces, strict=True):
                _check_gathered(info, piece)
        with Pieces(piece for _, *pieces in slow for piece in pieces) as reader:
            for key, a, b in slow:
                infos = self.wanted[key]
                assert not isinstance(a, (bytes, Late)) and not isinstance(b, (bytes, Late))
                stored = not isinstance(a, (Gather, Cast)) and not isinstance(b, (Gather, Cast))
                if stored and infos[0].dtype == infos[1].dtype and same_streams(reader.chunks(a), reader.chunks(b)):
                    self.found[key] = ValueDifference(prod(infos[0].shape), 0)
                    continue
                comparer = self.comparer(*infos)
                sizes = [_BLOCK * dtype_called(info.dtype).itemsize for info in infos]
                rooms = [memoryview(bytearray(size)) for size in sizes]
                both = zip(fillings(reader.chunks(a), rooms[0]), fillings(reader.chunks(b), rooms[1]), strict=True)
                for left, right in both:
                    comparer.add(rooms[0][:left], rooms[1][:right])
                self.conclude(key, comparer)

    def comparer(self, a: TensorInfo, b: TensorInfo) -> Comparer:
        from ckptconv.tensors.comparing import Comparer

        return Comparer(a.dtype, b.dtype, self.rtol, self.atol)

    def conclude(self, key: Key, comparer: Comparer) -> None:
        self.found[key] = ValueDifference(
            prod(self.wanted[key][0].shape), comparer.differing, comparer.largest, comparer.largest_relative, comparer.not_finite
        )  # fmt: skip
        if comparer.is_near:
            self.near[key] = float(comparer.largest or 0)


def bytes_of(storage: Storage) -> TensorInfo:
    """All bytes of STORAGE as a tensor of them."""
    return TensorInfo(
        "", None, "strided", "uint8", (storage.nbytes,), (1,), 0, storage.device, storage.nbytes, storage, False, False, True
    )  # fmt: skip


def _in_numbers(info: TensorInfo) -> TensorInfo:
    """INFO, a tensor with a storage, where it is quantized as its whole numbers; where several are packed in a byte as bytes."""
    dtype = dtype_called(info.dtype)
    if dtype.name in _WHOLE_NUMBERS:
        return replace(info, dtype=_WHOLE_NUMBERS[dtype.name], kind="strided")
    if dtype.packed == 1:
        return info
    if not info.contiguous:
        assert info.storage
        return bytes_of(info.storage)
    offset = info.offset // dtype.packed * dtype.itemsize
    return replace(info, dtype="uint8", kind="strided", shape=(info.nbytes,), stride=(1,), offset=offset)


def _place(spans: tuple[Span, Span]) -> tuple[int, int, int]:
    return spans[0].offset, spans[1].offset, spans[0].length


def _check_gathered(info: TensorInfo, piece: Piece) -> None:
    """Raise LimitError where a view repeats its elements more often than anybody can wait for."""
    most = max(LIMITS.gathered_ratio * (info.storage.nbytes if info.storage else 0), LIMITS.gathered_bytes)
    if isinstance(piece, (Gather, Cast)) and info.nbytes > most:
        raise LimitError(
            f"{info.path} has too many elements for its storage", expected=f"at most {most:,} bytes", got=f"{info.nbytes:,}"
        )  # fmt: skip
