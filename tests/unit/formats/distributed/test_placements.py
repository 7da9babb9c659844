"""The elements of each process, as torch's placements cut them one after another."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random

import pytest
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from ckptconv.formats.distributed.chunks import Chunk, Cut, check_cover, held_sizes, strips_of
from tests.support import torch_facts


def cut_by_torch(whole: torch.Tensor, mesh: tuple[int, ...], at: tuple[int, ...], how: list[Placement]) -> torch.Tensor:
    """Return the part of `whole` that the process `at` of `mesh` has under the placements `how`."""
    for parts, index, placement in zip(mesh, at, how, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = placement._split_tensor(whole, parts, with_padding=False)[0][index]
    return whole


@pytest.mark.parametrize("seed", range(60))
def test_cuts_equal_those_of_torch(seed: int) -> None:
    """On meshes of one to three dimensions, with uneven and empty parts, each strip is at the same position as in
    torch. The strips of all processes cover the tensor once.
    """
    random = Random(seed)
    shape = tuple(random.randrange(0 if seed % 5 == 0 else 1, 12) for _ in range(random.randrange(1, 4)))
    mesh = tuple(random.randrange(1, 4) for _ in range(random.randrange(1, 4)))
    how: list[Placement] = []
    for _ in mesh:
        dim = random.randrange(len(shape))
        split = random.randrange(1, 5)
        how.append(random.choice([Replicate(), Shard(dim), Shard(dim), _StridedShard(dim, split_factor=split)]))
    if torch_facts.version() < (2, 7) and any(isinstance(each, _StridedShard) for each in how):
        pytest.skip("torch 2.6 only cuts strips of equal sizes")
    whole = torch.arange(prod(shape)).reshape(shape)
    every = set()
    for at in product(*map(range, mesh)):
        cuts = [
            Cut(parts, index, each.dim, getattr(each, "split_factor", 1))
            for parts, index, each in zip(mesh, at, how, strict=True)
            if isinstance(each, (Shard, _StridedShard))
        ]
        held = held_sizes(shape, cuts)
        local = cut_by_torch(whole, mesh, at, how)
        assert tuple(sum(count for _, count in each) for each in held) == local.shape
        for (offsets, sizes), start in strips_of(held) if local.numel() else ():
            there = whole[tuple(map(slice, offsets, map(sum, zip(offsets, sizes, strict=True))))]
            assert torch.equal(local[tuple(map(slice, start, map(sum, zip(start, sizes, strict=True))))], there)
            every.add((offsets, sizes))
    check_cover("here", "it", shape, [Chunk(*each) for each in every])


def test_a_plain_cut_is_one_strip() -> None:
    """Adjacent strips are merged, so a part that ``Shard`` cuts is copied in one piece."""
    held = held_sizes((12, 3), [Cut(2, 1, 0, 3), Cut(1, 0, 0)])
    assert held[0] == [(2, 2), (6, 2), (10, 2)]
    assert held_sizes((12, 3), [Cut(2, 1, 0), Cut(3, 2, 0)]) == [[(10, 2)], [(0, 3)]]
