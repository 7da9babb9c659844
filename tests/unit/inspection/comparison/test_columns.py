"""A comparison of rows finds the same as a comparison in which every tensor is a node and every pickle is read."""

from __future__ import annotations

import io
import os
from collections import Counter, OrderedDict
from math import prod
from random import Random
from typing import Any

import pytest
import torch

from ckptconv.edits.options import Edits
from ckptconv.errors import CkptconvError
from ckptconv.formats import torch_zip
from ckptconv.inspection.comparison import diff
from ckptconv.inspection.comparison.differences import Difference
from ckptconv.inspection.comparison.options import Compared
from ckptconv.pickles import parser
from ckptconv.pickles.machine import PickleMachine

_COUNT = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 150
_SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2), (2, 2), (0, 2))


def _tensor(random: Random) -> torch.Tensor:
    """Return a small tensor, sometimes a parameter, a view, or a tensor with an attribute."""
    dtype = random.choice((torch.float32, torch.float32, torch.float16, torch.int64))
    shape = random.choice(_SHAPES)
    tensor = (torch.arange(prod(shape)) + random.randrange(3)).reshape(shape).to(dtype)
    kind = random.randrange(12)
    if kind < 3 and dtype.is_floating_point:
        tensor = torch.nn.Parameter(tensor, requires_grad=kind < 2)
    elif kind == 3 and tensor.dim() == 2:
        tensor = tensor.t()
    elif kind == 4:
        tensor.note = 5  # type: ignore[attr-defined]
    return tensor


def _mapping(random: Random) -> dict[Any, Any]:
    """Return a state dict, sometimes with ties, other keys, and values that are not tensors."""
    n = random.choice((3, 12, 12, 12, 40))
    made: dict[Any, Any] = OrderedDict() if random.random() < 0.3 else {}
    for i in range(n):
        usual = random.choice((torch.full((3,), float(i)), torch.arange(4.0).reshape(2, 2) + i))
        made[f"{i}.weight"] = usual if random.random() < 0.8 else _tensor(random)
    if random.random() < 0.1:
        made["tied"] = made["0.weight"]
    if random.random() < 0.05:
        made["part"] = made["1.weight"].reshape(-1)[1:]
    if random.random() < 0.1:
        made[random.choice(("step", 7, ".x", "a/b"))] = random.choice((5, None, [torch.ones(3)], torch.ones(3)))
    if random.random() < 0.1:
        of = random.choice((torch.ones(3), made["2.weight"]))
        made["storage"] = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=of.untyped_storage(), dtype=of.dtype, device=None, _internal=True
        )
    return made


def _changed(made: dict[Any, Any], random: Random) -> dict[Any, Any]:
    """Return a copy of `made`, sometimes with other values, names, ties or order, or with all tensors of
    another kind.
    """
    other = type(made)(made)
    if random.random() < 0.2:
        kind = random.choice((torch.nn.Parameter, lambda same: same.mT if same.dim() == 2 else same[None]))
        floats = [key for key, value in other.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        other.update((key, kind(other[key].detach().clone())) for key in floats)
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        key = random.choice([*other])
        value = other[key]
        match random.choice((0, 1, 2, 3, 4, 5, 5, 6, 6, 6)):
            case 0 if isinstance(value, torch.Tensor):
                other[key] = torch.full_like(value, 9, requires_grad=False)
            case 6 if isinstance(value, torch.Tensor) and value.is_floating_point():
                same = value.detach().clone()
                as_other = torch.nn.Parameter(same), same.mT if same.dim() == 2 else same[None], same
                other[key] = random.choice(as_other).requires_grad_(random.random() < 0.3)
            case 1:
                other[key] = _tensor(random)
            case 2 if len(other) > 3:
                del other[key]
            case 3:
                other[f"{key}.more"] = torch.ones(3)
            case 4:
                other[key] = other[random.choice([*other])]
            case 5:
                items = [*other.items()]
                random.shuffle(items)
                other = type(other)(items)
    return other


def _saved(made: object, tag: str, *, protocol: int, sums: bool, monkeypatch: pytest.MonkeyPatch) -> bytes:
    stream = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: tag if storage.nbytes() > 8 else "cpu")
        torch.serialization.set_crc32_options(sums)
        try:
            torch.save(made, stream, pickle_protocol=protocol)
        finally:
            torch.serialization.set_crc32_options(True)
    return stream.getvalue()


def _pair(random: Random, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    made = _mapping(random)
    other = _changed(made, random)
    if random.random() < 0.3:
        made, other = ({"model": each, "more": each if random.random() < 0.2 else 1} for each in (made, other))
    tags = random.choice((("cpu", "cpu"), ("cpu", "cpu"), ("cuda:0", "cpu"), ("cuda:0", "cuda:0")))
    sums = random.choice((*[(True, True)] * 8, (True, False), (False, False)))
    protocol = random.choice((2, 4, 4, 4, 4))
    first, second = (
        _saved(each, tag, protocol=protocol, sums=summed, monkeypatch=monkeypatch)
        for each, tag, summed in zip((made, other), tags, sums, strict=True)
    )
    return first, second


def _found(ask: Any, pair: tuple[bytes, bytes], edits: Edits, compared: Compared) -> Difference | bool | str:
    try:
        found: Difference | bool = ask(*map(io.BytesIO, pair), edits, compared)
    except CkptconvError as error:
        return f"{type(error).__name__}: {error}"
    return found


@pytest.mark.untraced
def test_columns_find_what_nodes_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random pairs of checkpoints give the same result with rows and skipped pickles as without them. The checkpoints
    contain ties, views, attributes, devices, missing checksums and other objects.
    """
    met: Counter[str] = Counter()
    rows, has_pickle = diff._Comparison.equal_rows, torch_zip._has_pickle

    def equal_rows(self: diff._Comparison, pairs: Any) -> Any:
        equal = rows(self, pairs)
        met["equal rows"] += bool(equal[0])
        return equal

    def has_same(*args: Any) -> bool:
        met["same pickle"] += (answer := has_pickle(*args))
        return answer

    for seed in range(_COUNT):
        random = Random(seed)
        pair = _pair(random, monkeypatch)
        edits = random.choice((Edits(), Edits(), Edits(), Edits(include=("*weight",)), Edits(add_prefix=("x.",))))
        compared = random.choice((*[Compared()] * 8, Compared(full=True), Compared(names_only=True)))
        ask = random.choice((diff.compare, diff.compare, diff.are_same))
        with monkeypatch.context() as patch:
            patch.setattr(diff._Comparison, "equal_rows", equal_rows)
            patch.setattr(torch_zip, "_has_pickle", has_same)
            found = _found(ask, pair, edits, compared)
        with monkeypatch.context() as patch:
            patch.setattr(parser, "RowMachine", PickleMachine)
            patch.setattr(torch_zip, "_has_pickle", lambda *_: False)
            patch.setattr(diff._Comparison, "are_unshared", lambda _: False)
            assert found == _found(ask, pair, edits, compared), seed
        met["refused"] += isinstance(found, str)
        met["the same" if found is True or (isinstance(found, Difference) and found.same) else "different"] += 1
        met["tied"] += isinstance(found, Difference) and any("tied only" in note for note in found.notes)
    assert min(met[each] for each in ("equal rows", "same pickle", "the same", "different")) > _COUNT / 20, met
    assert met["tied"] > _COUNT / 200, met
