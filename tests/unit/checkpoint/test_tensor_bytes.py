"""Tests of the pieces that contain the elements of a tensor: they equal the bytes that torch writes, for every kind of
storage data.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import Data
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo, piece_of
from tests.support.pieces import KINDS, RAW, bytes_of, every_data, numbers_in


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """Yield a file with seven bytes, the test numbers, and the same numbers deflated."""
    with Source(numbers_in(tmp_path_factory.mktemp("elements") / "numbers")) as source:
        yield source


def info_of(
    data: Data, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, **bits: bool
) -> TensorInfo:
    nbytes = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
    contiguous = torch.empty(200, device="meta").as_strided(shape, stride).is_contiguous()
    return TensorInfo(
        "",
        None,
        "strided",
        dtype,
        shape,
        stride,
        offset,
        None,
        nbytes,
        Storage("0", "cpu", data.length, data),
        False,
        False,
        contiguous,
        None,
        **bits,
    )


@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        ((4, 5), (5, 1), 41),
        ((5, 4), (1, 5), 42),
        ((3,), (0,), 40),
        ((), (), 77),
        ((3, 3), (1, 2), 44),
        ((30,), (1,), 43),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_elements_in_row_major_order(
    source: Source, kind: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, neg: bool
) -> None:
    """The piece of a view contains its elements in row-major order, for every kind of storage data. In a chain, a view
    lies within one part.
    """
    data, raw = every_data(source)[kind]
    dtype = "float64" if kind.startswith("cast") else "float32"
    info = info_of(data, dtype, shape, stride, offset, neg=neg)
    wanted = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).as_strided(shape, stride, offset)
    piece = piece_of(info, "little")
    assert bytes_of(piece) == (-wanted if neg else wanted).contiguous().numpy().tobytes()


@pytest.mark.parametrize("kind", ["span", "cast span"])
def test_big_endian_numbers(source: Source, kind: str) -> None:
    """Big-endian numbers are byte-swapped before they are cast, and the output is little-endian."""
    data, _ = every_data(source)[kind]
    dtype = "float64" if kind.startswith("cast") else "float32"
    turned = torch.frombuffer(
        bytearray(b"".join(RAW[i : i + 4][::-1] for i in range(0, len(RAW), 4))), dtype=torch.float32
    )
    wanted = turned.to(getattr(torch, dtype)).as_strided((5, 2), (2, 3), 9).contiguous()
    piece = piece_of(info_of(data, dtype, (5, 2), (2, 3), 9), "big")
    assert bytes_of(piece) == wanted.numpy().tobytes()
