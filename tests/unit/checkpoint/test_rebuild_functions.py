"""Tests of tensors that torch's rebuild functions create."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.load accepts jagged tensors only after this import

import ckptconv
from ckptconv.errors import RefusedError, UnsupportedError
from tests.support import torch_facts
from tests.support.conversions import refused, saved_at
from tests.support.judge import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture
def jagged(tmp_path: Path) -> Path:
    """Return the path of a checkpoint with a jagged tensor, whose elements are also stored under a name of
    their own.
    """
    values = torch.arange(18.0).view(6, 3)
    parts = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]), min_seqlen=2, max_seqlen=4)
    return saved_at(tmp_path / "in.pt", {"values": values, "j": parts, "w": torch.ones(2)})


def test_a_jagged_tensor_is_one_tensor(jagged: Path) -> None:
    """A jagged tensor is listed as one tensor. Its parts are neither listed as tensors nor recognized as a
    state dict.
    """
    found = ckptconv.inspect(jagged)
    kinds = {each.path: (each.kind, tuple(each.shape), each.tied_to) for each in found.tensors}
    assert kinds == {
        "values": ("strided", (6, 3), None),
        "j": ("jagged", (6, 3), None),
        "w": ("strided", (2,), None),
    }
    assert [each.path for each in found.state_dicts] == ["."]


def test_safetensors_cannot_hold_a_jagged_tensor(jagged: Path, tmp_path: Path) -> None:
    """safetensors refuses a jagged tensor with its name. If it is excluded, the other tensors are written."""
    refused(RefusedError, r"cannot store j \(jagged\).*exclude='j'", jagged, tmp_path / "out.safetensors")
    ckptconv.convert(jagged, tmp_path / "out.safetensors", exclude="j")
    assert [*ckptconv.load(tmp_path / "out.safetensors")] == ["values", "w"]


@pytest.mark.parametrize(
    "options", [{"map_location": "cpu"}, {"compact": True}, {"format": "legacy"}, {"dtype": "bf16"}], ids=str
)
def test_a_jagged_tensor_is_not_changed(jagged: Path, tmp_path: Path, options: Any) -> None:
    """A conversion does not change a jagged tensor. Its elements are not cast, even if they have a name of
    their own.
    """
    report = ckptconv.convert(jagged, tmp_path / "out.pt", **options)
    if "dtype" in options:
        assert report.changes.not_cast == {"part of a jagged tensor": ["values"], "jagged": ["j"]}
    old, new = (torch.load(each, weights_only=False)["j"] for each in (jagged, tmp_path / "out.pt"))
    assert new.layout == torch.jagged
    assert_same([*new.unbind()], [*old.unbind()])
    assert ckptconv.diff(jagged, jagged).same
    if torch_facts.version() < (2, 15):
        assert_same([*ckptconv.load(jagged)["j"].unbind()], [*old.unbind()])
    else:
        with pytest.raises(UnsupportedError, match="safe loader refuses"):
            ckptconv.load(jagged)


def test_a_change_of_a_jagged_tensor_is_found(jagged: Path, tmp_path: Path) -> None:
    """`diff` finds a change in the offsets of a jagged tensor."""
    changed = torch.load(jagged, weights_only=False)
    changed["j"]._offsets[1] = 3
    torch.save(changed, tmp_path / "other.pt")
    assert [each.path for each in ckptconv.diff(jagged, tmp_path / "other.pt").differing] == ["j"]


def test_a_bad_tensor_does_not_change_what_is_found_in_the_next(tmp_path: Path) -> None:
    """`verify` finds the same fault in each of 60 tensors. This is more than the limit of nested calls."""
    torch.save({f"w{i}": torch.ones(3) for i in range(60)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
        for name in good.namelist():
            data = good.read(name)
            bad.writestr(name, data.replace(b"K\x03\x85", b"K\x09\x85") if name.endswith("data.pkl") else data)
    assert str(ckptconv.verify(tmp_path / "bad.pt")).count("a tensor reaches outside its storage") == 60
