"""The summary of ``inspect``, compared with the objects that torch loads."""

from __future__ import annotations

import argparse
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckptconv.inspection.summary import Part, inspect
from tests.support.conversions import saved_at
from tests.support.hostile_bytes import torch_zip_of
from tests.support.judge import refusal
from tests.support.reduced import Reduced


def test_tensors_are_those_that_torch_loads(fixtures: Path) -> None:
    """Every tensor of the summary has the dtype, shape, stride, offset, size and requires_grad of the loaded tensor."""
    for name in ("cpu.pt", "tied.pt", "resnet18.pt", "dataparallel.pt"):
        found = inspect(fixtures / name)
        loaded = torch.load(fixtures / name, map_location="cpu")
        state = (
            loaded
            if isinstance(loaded, OrderedDict)
            else next(v for v in loaded.values() if isinstance(v, OrderedDict))
        )
        rows = {row.name: row for row in found.tensors}
        assert list(rows) == list(state)
        for key, tensor in state.items():
            row = rows[key]
            assert row.dtype == str(tensor.dtype).removeprefix("torch.")
            assert (row.shape, row.stride, row.offset) == (
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset(),
            )
            assert row.nbytes == tensor.numel() * tensor.element_size()
            assert row.storage_nbytes == tensor.untyped_storage().nbytes()
            assert row.requires_grad == tensor.requires_grad


def test_training_checkpoint(fixtures: Path) -> None:
    """The summary of a training checkpoint contains its state dict, the tensors by device, the states of random
    generators, and the other values.
    """
    found = inspect(fixtures / "training.pt")
    assert len(found.state_dicts) == 1
    assert found.rng_states
    assert "cuda:0" in found.devices
    assert "epoch" in found.others
    assert found.as_dict()["schema_version"] == 1
    assert found.size == (fixtures / "training.pt").stat().st_size
    assert sum(share.tensors for share in found.devices.values()) == len(found.tensors)


def test_ties_and_views(tmp_path: Path) -> None:
    """A tensor with two names is a tie. A part of a storage and a transposed tensor are views. Tied bytes count once in
    the stored size.
    """
    base = torch.arange(12.0).reshape(3, 4)
    found = inspect(
        saved_at(tmp_path / "x.pt", {"a": base, "b": base, "c": base[1], "d": torch.ones(2, 3).T, "e": torch.ones(4)})
    )
    assert found.ties == (("a", "b"),)
    assert found.views == ("c", "d")
    assert found.nbytes == 48 + 16 + 24 + 16
    assert found.stored_nbytes == 48 + 24 + 16
    assert found.storages == 3


@pytest.mark.parametrize(
    ("obj", "protocol", "reason"),
    [
        ({"a": torch.ones(2)}, 2, ""),
        ({"a": argparse.Namespace(x=1)}, 2, "argparse.Namespace"),
        ({"a": torch.ones(2)}, 4, "opcode MEMOIZE"),
        ({"a": frozenset({1})}, 2, "__builtin__.frozenset"),
    ],
    ids=["weights", "a class", "an opcode", "a call"],
)
def test_weights_only_agrees_with_torch(tmp_path: Path, obj: object, protocol: int, reason: str) -> None:
    """The verdict agrees with torch's safe loader. The obstacles name the global or opcode that it refuses."""
    path = saved_at(tmp_path / "x.pt", obj, pickle_protocol=protocol)
    found = inspect(path)
    assert found.weights_only == (refusal(path) is None) == (not reason)
    assert reason in " ".join(found.obstacles)


def test_devices_that_are_data(tmp_path: Path) -> None:
    """torch.device objects and strings like 'cuda:0' are listed as the user's data. Other strings are not."""
    obj = {"a": torch.device("cuda:3"), "b": {"device": "cuda:0"}, "c": "cupboard", "d": torch.ones(1)}
    assert inspect(saved_at(tmp_path / "x.pt", obj)).user_devices == {"a": "cuda:3", "b/device": "cuda:0"}


#: The expected descriptions of values, by their paths.
SHORT = {
    "text": "str of 70,000 bytes",
    "list": "[0, 1, 2, 3, 4, 5, 6, 7, …] 1,000 items",
    "tuple": "(1, 'a', None)",
    "one": "(1,)",
    "empty": "{}",
    "set": "{3}",
    "no set": "set()",
    "frozen": "{'a'}",
    "namespace": "object of argparse.Namespace",
    "namespace/.lr": "0.1",
    "size": "torch.Size((2, 3))",
    "epoch": "7 (numpy int64)",
    "loss": "0.5 (numpy float32)",
    "name": "'é' (numpy <U1)",
    "class": "collections.OrderedDict",
    "storage": "storage",
}


@pytest.mark.parametrize("protocol", [2, 3])
def test_bytes_are_shown_as_bytes(protocol: int, tmp_path: Path) -> None:
    """Bytes are shown as bytes in every protocol, also if the pickle stores them as the encoding of a text. Long bytes
    are truncated.
    """
    obj = {"short": b"a\xe9", "long": b"\x00" * 200}
    values = inspect(saved_at(tmp_path / "x.pt", obj, pickle_protocol=protocol)).others
    assert values["short"] == r"b'a\xe9'"
    assert values["long"].startswith(r"b'\x00\x00") and values["long"].endswith("…") and len(values["long"]) == 60


def test_values_are_short(tmp_path: Path) -> None:
    """A value that is not a tensor is shown in a short line, whatever its type and length."""
    obj = {
        "text": "x" * 70_000,
        "bytes": b"y" * 500,
        "list": list(range(1000)),
        "tuple": (1, "a", None),
        "empty": {},
        "epoch": numpy.int64(7),
        "loss": numpy.float32(0.5),
        "name": numpy.str_("é"),
        "set": {3},
        "one": (1,),
        "no set": set(),
        "frozen": frozenset({"a"}),
        "large set": set(range(100)),
        "int": 1 << 3000,
        "namespace": argparse.Namespace(lr=0.1, w=torch.ones(1)),
        "size": torch.Size([2, 3]),
        "class": OrderedDict,
        "storage": torch.ones(2).untyped_storage(),
        "complex": 1j,
    }
    for protocol in (2, 3, 4):
        others = inspect(saved_at(tmp_path / "x.pt", obj, pickle_protocol=protocol)).others
        assert {path: others[path] for path in SHORT} == SHORT
        assert others["large set"].startswith("{0, 1, 2, 3, 4, 5, 6, 7, …}")
        assert not any("set/" in path for path in others)
        assert all(len(value) <= 90 for value in others.values())


def test_members_of_sets_and_deep_sizes(tmp_path: Path) -> None:
    """A set of pairs is named, and its members are listed separately. A torch.Size of deeply nested tuples is only
    named.
    """
    deep: Any = ()
    for _ in range(50):
        deep = (deep, deep)
    obj = {"pairs": {(1, 2)}, "size": Reduced(torch.Size, (deep,))}
    (tmp_path / "x.pt").write_bytes(torch_zip_of(pickle.dumps(obj, 2), {}))
    others = inspect(tmp_path / "x.pt").others
    assert others["pairs"] == "object of __builtin__.set"
    assert others["pairs/(0)[0]"] == "(1, 2)"
    assert others["size"] == "object of torch.Size"


def test_metadata_is_not_listed(fixtures: Path) -> None:
    """The entries of ``_metadata``, one for each module, are not listed."""
    assert not any("_metadata" in path for path in inspect(fixtures / "dataparallel.pt").others)


def test_a_device_with_an_absurd_index_is_an_object(tmp_path: Path) -> None:
    """A device with an index of 9,000 digits is shown as an object, without its index."""
    obj = {"d": Reduced(torch.device, ("cuda", 1 << 30_000)), "t": 1}
    (tmp_path / "x.pt").write_bytes(torch_zip_of(pickle.dumps(obj, 2), {}))
    found = inspect(tmp_path / "x.pt")
    assert found.user_devices == {}
    assert found.others["d"] == "object of torch.device"


def test_parts_are_what_people_call_them(tmp_path: Path) -> None:
    """The parts are the state dicts, their averages, the optimizers and the states of generators, each with its tensors
    and bytes. Every tensor is in a part, and tied tensors count once in each part.
    """
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    whole = {
        "optimizers": [optimizer.state_dict()],
        "net": {**state, "tied": state["0.weight"]},
        "net_ema": {name: tensor.clone() for name, tensor in state.items()},
        "schema": {"weight": torch.ones(1)},
        "rng": torch.get_rng_state(),
        "losses": [torch.ones(3), torch.ones(2)],
    }
    found = inspect(saved_at(tmp_path / "x.pt", whole))
    moments = sum(tensor.nbytes for each in optimizer.state_dict()["state"].values() for tensor in each.values())
    assert found.parts == (
        Part("model", "net", 5, 52),
        Part("model", "schema", 1, 4),
        Part("EMA", "net_ema", 4, 52),
        Part("optimizer", "optimizers[0]", 12, moments),
        Part("RNG states", "", 1, 5056),
        Part("other", "", 2, 20),
    )
    assert sum(part.tensors for part in found.parts) == len(found.tensors)
    assert inspect(saved_at(tmp_path / "m.pt", model)).parts == (Part("model", ".", 4, 52),)
    assert inspect(saved_at(tmp_path / "o.pt", optimizer.state_dict())).parts == (Part("optimizer", ".", 12, moments),)
    assert "parts" not in found.as_dict()


def test_an_optimizer_is_matched_with_its_weights(tmp_path: Path) -> None:
    """An optimizer is matched with its weights by parameter names, or only by shapes. The text distinguishes the two,
    and reports whether the shapes agree.
    """
    shapes = {"a": (2, 3), "b": (3,)}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}

    def state(keys: Sequence[Any], *, turned: bool = False, **group: Any) -> dict[str, Any]:
        sizes = [shape[::-1] if turned else shape for shape in shapes.values()]
        entries = {key: {"exp_avg": torch.ones(size)} for key, size in zip(keys, sizes, strict=False)}
        return {"state": entries, "param_groups": [{"params": [*keys], **group}]}

    cases: list[tuple[Any, str]] = [
        ({"model": model, "opt": state("ab")}, "2 parameters by names; of model, whose shapes agree"),
        ({"model": model, "opt": state([0, 1])}, "2 parameters by number; its shapes fit model"),
        ({"model": {**model, "c": torch.ones(1)}, "opt": state([0, 1, 2])}, "number, 2 with a state; its shapes fit"),
        ({"model": model, "opt": state([0, 1], param_names=["a", "b"])}, "by number, with names; of model, whose"),
        ({"model": model, "opt": state("ab", turned=True)}, "by names; its shapes are not those of model"),
        ({"model": model, "opt": state([0, 1], turned=True)}, "by number; its shapes are not those of the weights"),
        ({"gen": model, "disc": dict(model), "opt": state([0, 1])}, "by number; its shapes fit gen or disc"),
        ({"opt": state([0, 1])}, "; 2 parameters by number"),
        ({"opt": state([0, 0])}, "its groups list a parameter twice"),
    ]
    for obj, text in cases:
        torch.save(obj, tmp_path / "a.pt")
        summary = inspect(tmp_path / "a.pt")
        line = next(line for line in str(summary).splitlines() if line.startswith("  optimizer "))
        assert text in line
    (found,) = inspect(tmp_path / "a.pt").optimizers
    assert (found.path, found.trouble) == ("opt", "its groups list a parameter twice")
