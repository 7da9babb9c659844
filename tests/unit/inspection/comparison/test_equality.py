"""``ckptconv diff`` reports two tensors as the same exactly if torch finds them equal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptconv
from tests.support.archives import without_crc32

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.unit")

#: Bits of floating-point numbers by dtype: zeros, ones, infinities, and NaNs with several payloads and signs.
BITS = {
    torch.float16: (0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01),
    torch.bfloat16: (0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81),
    torch.float32: (0, 1 << 31, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001),
    torch.float64: tuple(
        bits << 48 | low
        for bits, low in (
            *((0, 0), (0x8000, 0), (0x3FF0, 0), (0xBFF0, 0), (0x7FF0, 0), (0xFFF0, 0)),
            *((0x7FF8, 0), (0xFFF8, 1), (0x7FF0, 1)),
        )
    ),
    **{dtype: tuple(range(256)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)},
}
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
#: Functions that return the same values in another layout, or with lazy operations.
LAYOUTS = {
    "as it is": lambda x: x,
    "copied": lambda x: x.contiguous().clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: torch.stack((x, x), -1).flatten()[::2].view(x.shape),
    "in a larger one": lambda x: torch.cat((x, x))[len(x) :],
    "negated twice": lambda x: torch._neg_view(-x) if x.is_floating_point() or x.is_complex() else x,
    "conjugated twice": lambda x: x.conj_physical().conj() if x.is_complex() else x,
    "resolved": lambda x: x.resolve_conj().resolve_neg(),
}
CONTAINERS = ("zip", "zip without checksums", "legacy", "safetensors")


def of_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with two rows of numbers that have these `bits`."""
    size = 8 * dtype.itemsize
    whole = [each - (1 << size) if size > 8 and each >> (size - 1) else each for each in bits]
    return torch.tensor(whole, dtype=WHOLE[dtype.itemsize]).view(dtype).view(2, -1)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of one dtype and shape in random layouts. Most of their numbers have the same bits."""
    dtype = draw(st.sampled_from([*BITS]))
    number = st.sampled_from(BITS[dtype])
    first = draw(st.lists(number, min_size=4, max_size=4))
    second = [draw(number) if draw(st.integers(0, 5)) == 0 else each for each in first]
    tensors = [of_bits(bits, dtype) for bits in (first, second)]
    if dtype in COMPLEX and draw(st.booleans()):
        tensors = [each.view(COMPLEX[dtype]) for each in tensors]
        if draw(st.booleans()):
            tensors = [each.conj() for each in tensors]
    if dtype.itemsize == 1 and draw(st.booleans()):
        tensors = [each.view(torch.uint8).clamp(max=1).view(torch.bool) for each in tensors]
    names = st.sampled_from([*LAYOUTS] if tensors[0].dtype.itemsize > 1 else ["as it is", "copied", "transposed"])
    a, b = (LAYOUTS[draw(names)](each) for each in tensors)
    return a, b


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether torch finds `a` and `b` equal. NaN equals NaN."""
    if a.dtype.itemsize == 1 and a.is_floating_point():
        a, b = a.float(), b.float()
    elif a.dtype == torch.complex32:
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def saved(path: Path, tensor: torch.Tensor, container: str) -> Path:
    """Save `tensor` at `path` in this `container`, and return `path`."""
    if container == "safetensors":
        save_file({"w": tensor.resolve_conj().resolve_neg().contiguous()}, path)
    elif container == "zip without checksums":
        with without_crc32():
            torch.save({"w": tensor}, path)
    else:
        torch.save({"w": tensor}, path, _use_new_zipfile_serialization=container == "zip")
    return path


@given(pairs(), st.sampled_from(CONTAINERS), st.sampled_from(CONTAINERS))
def test_values_that_are_equal_in_torch_are_the_same(
    pair: tuple[torch.Tensor, torch.Tensor], one: str, other: str
) -> None:
    """Signs of zeros, signs and payloads of NaNs, layouts, lazy conjugation and negation, and containers make no
    difference. Every other difference counts.
    """
    if pair[0].dtype in (torch.complex32, torch.complex128):  # safetensors does not have these dtypes
        one, other = (container.replace("safetensors", "legacy") for container in (one, other))
    with tempfile.TemporaryDirectory() as folder:
        a, b = (
            saved(Path(folder) / name, tensor, container)
            for name, tensor, container in zip("ab", pair, (one, other), strict=True)
        )
        assert ckptconv.diff(a, b).same == are_equal(*pair)
        assert ckptconv.diff(a, a).same
