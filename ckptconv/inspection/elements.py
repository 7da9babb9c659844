"""The elements of tensors as numbers to be read, and how many bytes may be read for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from ckptconv.byteranges.spans import Gather, Piece
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.dtypes import get_dtype
from ckptconv.errors import LimitError
from ckptconv.hints import Placeholder, option
from ckptconv.limits import LIMITS

BLOCK = 1 << 15  # elements that are computed with at once: as few as torch gives to one thread
_READ_THROUGH = 16  # bytes between elements that are read as quickly as one is computed with
_WHOLE_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


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
