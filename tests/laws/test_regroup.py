"""A ``regroup`` rule applied in reverse undoes the rule, bit for bit, for all shapes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptconv

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Draw a rule, complete tensors, and their parts as torch's reshape and split make them."""
    stack = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    groups = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0 if len(shape) > 1 else 1, 3), min_size=2, max_size=4).filter(sum))
    shape[dim] = groups * sum(sizes)
    dtype = draw(st.sampled_from(DTYPES))
    numbers = "".join(f".{{s{i}}}" for i in range(len(stack)))
    at = f"@{dim + len(stack)}" + (f"/{groups}" if groups > 1 else "")
    parts = ", ".join(f"{{l}}.p{'abcd'[i]}{numbers}[{size * groups}]" for i, size in enumerate(sizes) if size)
    kept = [size for size in sizes if size]
    wholes, pieces = {}, {}
    for layer in range(draw(st.integers(1, 2))):
        whole = torch.randint(0, 100, (*stack, *shape)).to(dtype)
        if draw(st.booleans()):
            whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
        wholes[f"{layer}.w"] = whole
        d = dim + len(stack)
        view = whole.reshape(*whole.shape[:d], groups, sum(sizes), *whole.shape[d + 1 :])
        for name, part in zip(
            [f"p{'abcd'[i]}" for i, size in enumerate(sizes) if size], view.split(kept, d + 1), strict=True
        ):
            flat = part.reshape(*whole.shape[:d], -1, *whole.shape[d + 1 :])
            indices = (
                torch.cartesian_prod(*map(torch.arange, stack)).reshape(-1, len(stack)).tolist() if stack else [[]]
            )
            for index in indices:
                key = ".".join([str(layer), name, *map(str, index)])
                pieces[key] = flat[tuple(index)]
    return f"{{l}}.w {at} = {parts}" if len(kept) > 1 else f"{{l}}.w = {parts.split('[')[0]}", wholes, pieces


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(["pt", "safetensors"]))
def test_a_rule_and_its_reverse(
    case: tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]], suffix: str
) -> None:
    """A split gives the same parts as torch's reshape and split. The reverse rule restores the complete tensors."""
    rule, wholes, pieces = case
    if not pieces or (rule.count("{s") == 0 and "," not in rule):
        return  # the rule only renames
    with tempfile.TemporaryDirectory() as folder:
        source, out, back = Path(folder, "a.pt"), Path(folder, f"b.{suffix}"), Path(folder, "c.pt")
        torch.save(wholes, source)
        ckptconv.convert(source, out, regroup=rule)
        got = ckptconv.load(out)
        assert got.keys() == pieces.keys()
        for name, piece in pieces.items():
            assert torch.equal(got[name], piece), (rule, name)
        ckptconv.convert(out, back, regroup=rule, reverse=True)
        again = torch.load(back)
        assert again.keys() == wholes.keys()
        assert all(torch.equal(again[name], wholes[name]) for name in wholes), rule
