"""Tensors that are distributed over several processes, of which each file contains only a part.

The parts are shown and retagged. They are never written as if they were complete tensors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # registers the classes that loading DTensors needs

import ckptconv
from ckptconv.errors import LimitError, RefusedError
from tests.support import zoo
from tests.support.conversions import read, refused
from tests.support.judge import assert_same, tags_of
from tests.support.paths import ROOT
from tests.support.reduced import Reduced
from tests.support.two_ranks import parts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two processes that save tensors, retag and reload them, and return their folder. The processes compare the
    tensors.
    """
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.two_ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in (0, 1)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)
    return folder


def kinds(path: Path) -> dict[str, tuple[str, list[int], int]]:
    return {t.path: (t.kind, t.shape, t.nbytes) for t in ckptconv.inspect(path).tensors}


# Partial tensors of the installed torch


@pytest.mark.slow
def test_dtensors_need_only_an_import(run: Path) -> None:
    """DTensors load after the import of one torch module. ``inspect`` and ``load`` name this module."""
    (finding,) = [each for each in ckptconv.inspect(run / "dtensor0.pt").findings if each.kind == "import"]
    assert finding.text.endswith("only after `import torch.distributed.tensor`")
    program = (
        "import sys, ckptconv\n"
        "try:\n    ckptconv.load(sys.argv[1])\n"
        "except ckptconv.UnsupportedError as error:\n    print(error)\n"
        "import torch.distributed.tensor\n"
        "print(type(ckptconv.load(sys.argv[1])['model']['net.weight']))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(run / "dtensor0.pt")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    assert said[0].endswith("import torch.distributed.tensor first")
    assert said[1] == "<class 'torch.distributed.tensor.DTensor'>"


def test_partial_tensors_are_shown(run: Path) -> None:
    """``inspect`` shows the shape of the complete tensor, and the local part below it. A note lists the partial
    tensors. A replicated tensor is treated in the same way.
    """
    found = kinds(run / "dtensor1.pt")
    assert found["model/net.weight"] == ("partial", (5, 3), 0)
    assert found["model/net.weight/.__state__[1]/_local_tensor"] == ("strided", (2, 3), 24)
    assert found["model/net.bias"][:2] == ("partial", (3,))
    assert found["model/steps"][0] == "strided"
    assert [path for path, (kind, _, _) in found.items() if kind == "partial"] == [
        "model/net.weight",
        "model/net.bias",
        "model/net.head",
        "optimizer/state[0]/exp_avg",
    ]
    (note,) = ckptconv.inspect(run / "dtensor1.pt").notes
    assert note.startswith(
        "partial: model/net.weight, model/net.bias, model/net.head and 1 more; the file contains one process's part"
    )


def test_sharded_tensors_are_shown(run: Path) -> None:
    found = kinds(run / "sharded0.pt")
    assert found["weight"] == ("partial", (5, 3), 0)
    assert [value for path, value in found.items() if path != "weight"] == [("strided", (3, 3), 36)]


def test_a_state_dict_with_partial_tensors_is_extracted(run: Path, tmp_path: Path) -> None:
    """A state dict with partial tensors is extracted and renamed. A torch file keeps their parts unchanged."""
    ckptconv.convert(run / "dtensor0.pt", tmp_path / "out.pt", state_dict=True, strip_prefix="net.")
    model = torch.load(run / "dtensor0.pt", weights_only=False)["model"]
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(parts(ours), {key.removeprefix("net."): value for key, value in parts(model).items()})


@pytest.mark.parametrize("format", ["pt", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["dtensor0.pt", "sharded0.pt"])
def test_torch_formats_keep_partial_tensors(run: Path, tmp_path: Path, name: str, format: Any) -> None:
    """Every torch format keeps partial tensors, which are still recognized after a conversion back to the zip
    format.
    """
    ckptconv.convert(run / name, tmp_path / "out.pkl", format=format)
    ckptconv.convert(tmp_path / "out.pkl", tmp_path / "back.pt")
    assert kinds(tmp_path / "out.pkl") == kinds(tmp_path / "back.pt") == kinds(run / name)
    if name == "dtensor0.pt":  # the other file loads only in its own run
        back = torch.load(tmp_path / "back.pt", weights_only=True)
        assert_same(parts(back), parts(torch.load(run / name, weights_only=True)))


def test_every_device_is_retagged(run: Path, tmp_path: Path) -> None:
    """Storages and the devices of tensors are retagged. The device of the mesh stays, as in
    ``torch.load(map_location=...)`` and ``DTensor.cpu()``.
    """
    ckptconv.convert(run / "dtensor0.pt", tmp_path / "gpu.pt", map_location="cuda:1")
    checkpoint = read(tmp_path / "gpu.pt")
    assert {storage.device for storage in checkpoint.storages.values()} == {"cuda:1"}
    assert [argument.device for argument in checkpoint.index.device_arguments] == ["cuda:1"] * 4
    ((path, device),) = ckptconv.inspect(tmp_path / "gpu.pt").user_devices.items()
    assert path.endswith(".mesh/._device_type") and device == "cuda"


@pytest.mark.parametrize("edits", [{"state_dict": True}, {"select": "model"}, {}])
def test_safetensors_refuses_partial_tensors(run: Path, tmp_path: Path, edits: dict[str, Any]) -> None:
    """A conversion to safetensors refuses partial tensors by name, with advice. With these tensors excluded, it
    works.
    """
    error = refused(RefusedError, None, run / "dtensor0.pt", tmp_path / "out.safetensors", **edits)
    message = str(error)
    for name in ("net.weight", "net.bias", "net.head"):
        assert f"{name} (one process's part of it)" in message
    assert "steps" not in message and "full_tensor()" in message and "dcp_to_torch_save" in message
    assert "exclude=['model/net.weight', 'model/net.bias', 'model/net.head']" in message
    assert not (tmp_path / "out.safetensors").exists()
    ckptconv.convert(run / "dtensor0.pt", tmp_path / "out.safetensors", exclude="net.*", **edits)
    assert [t.path for t in ckptconv.inspect(tmp_path / "out.safetensors").tensors] == ["steps"]


PART = r"\(one process's part of it\); save the whole tensor"


@pytest.mark.parametrize(
    ("name", "edits", "said"),
    [("sharded1.pt", {}, f"weight {PART}"), ("module0.pt", {"state_dict": True}, rf"0\.weight {PART}")],
    ids=["a sharded tensor", "a pickled module's weights"],
)
def test_other_kinds_are_refused(run: Path, tmp_path: Path, name: str, edits: dict[str, Any], said: str) -> None:
    """A conversion to safetensors also refuses sharded tensors, and partial tensors in a pickled module."""
    refused(RefusedError, said, run / name, tmp_path / "out.safetensors", **edits)


def test_partial_tensors_of_a_pickled_module_are_extracted(run: Path, tmp_path: Path) -> None:
    """The partial weights of a pickled module are extracted to a torch file."""
    ckptconv.convert(run / "module0.pt", tmp_path / "out.pt", state_dict=True)
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(parts(ours), parts(dict(torch.load(run / "module0.pt", weights_only=False).state_dict(keep_vars=True))))


def test_save_refuses_partial_tensors(run: Path, tmp_path: Path) -> None:
    """``save`` also refuses to write partial tensors to safetensors."""
    model = torch.load(run / "dtensor0.pt", weights_only=True)["model"]
    with pytest.raises(RefusedError, match=r"net\.weight \(one process's part of it\)"):
        ckptconv.save(model, tmp_path / "out.safetensors")


# Partial tensors of older versions of torch, whose ShardedTensor was not a tensor


class Stated:
    """An object whose pickled state is a tuple."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __getstate__(self) -> tuple[Any, ...]:
        return self.state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class Described:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ = attributes


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the old module of ShardedTensor, with classes that are pickled in the same way."""
    name = "torch.distributed._sharded_tensor"
    module = ModuleType(f"{name}.api")
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for word, base in [
        ("ShardedTensor", Stated),
        ("Shard", Stated),
        ("Metadata", Stated),
        ("NewerMetadata", Described),
    ]:
        setattr(module, word, type(word, (base,), {"__module__": module.__name__}))
    return module


def sharded_object(old: ModuleType, metadata: Any) -> Any:
    """Return the ShardedTensor of rank 0 with two of four rows."""
    shard = old.Shard(None, {"tensor": torch.arange(6.0).reshape(2, 3), "metadata": "rank:0/cuda:0"})
    return old.ShardedTensor([shard], metadata, "process group", "sharding", False)


@pytest.mark.parametrize("newer", [False, True])
def test_an_old_sharded_tensor(old: ModuleType, tmp_path: Path, newer: bool) -> None:
    """An old ShardedTensor is shown as partial, with the shape in its metadata. Its name and location tag can be
    changed, and safetensors refuses it.
    """
    size = torch.Size((4, 3))
    metadata = old.NewerMetadata(shards_metadata=[], size=size) if newer else old.Metadata([], size, torch.float32)
    obj = {"net.weight": sharded_object(old, metadata), "net.bias": torch.ones(3)}
    zoo.save(obj, tmp_path / "src.pt", ("cuda:0",))
    found = kinds(tmp_path / "src.pt")
    assert found.pop("net.weight") == ("partial", (4, 3), 0)
    assert found.pop("net.bias") == ("strided", (3,), 12)
    assert list(found.values()) == [("strided", (2, 3), 24)]
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "out.pt", map_location="cpu", strip_prefix="net.")
    out, tags = tags_of(tmp_path / "out.pt")
    assert tags == ["cpu", "cpu"] and list(out) == ["weight", "bias"]
    assert_same(list(out.values()), list(tags_of(tmp_path / "src.pt")[0].values()))
    refused(
        RefusedError, r"net\.weight \(one process's part of it\)", tmp_path / "src.pt", tmp_path / "out.safetensors"
    )


@pytest.mark.parametrize("state", [(), ([], None), ([1], [2]), ([], torch.Size((4, 3))), ("x", "y"), (None, None)])
def test_an_old_sharded_tensor_with_an_unknown_state(old: ModuleType, tmp_path: Path, state: tuple[Any, ...]) -> None:
    """An old ShardedTensor with an unknown state is treated as a user's object: a torch file keeps it, and a
    safetensors file leaves it out.
    """
    zoo.save({"model": {"w": torch.ones(3)}, "x": old.ShardedTensor(*state)}, tmp_path / "src.pt", ("cuda:0",))
    assert list(kinds(tmp_path / "src.pt")) == ["model/w"]
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "out.pt", map_location="cpu")
    assert_same(tags_of(tmp_path / "out.pt")[0], tags_of(tmp_path / "src.pt")[0])
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "out.safetensors")
    assert [left.path for left in report.left_behind] == ["x"]


class DTensor(zoo.WrapperTensor):
    """A user's class named DTensor."""


def test_a_class_named_dtensor_in_another_module(tmp_path: Path) -> None:
    """A class named DTensor in another module is not a partial tensor."""
    torch.save({"w": DTensor(torch.ones(2), "cpu")}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"][0] == "wrapper"


def test_an_old_sharded_tensor_with_too_many_dimensions(old: ModuleType, tmp_path: Path) -> None:
    """The size of an old ShardedTensor has at most 64 dimensions, the limit of torch."""
    torch.save(sharded_object(old, old.Metadata([], torch.Size([1] * 65))), tmp_path / "x.pt")
    with pytest.raises(LimitError, match=r"too many dimensions \(expected at most 64, got 65\)"):
        ckptconv.inspect(tmp_path / "x.pt")


# Nested calls


def around(inner: Any, depth: int, args: Callable[[Any], tuple[Any, ...]]) -> Any:
    """Return `inner` in `depth` nested calls. `args` returns the function and the arguments of each call."""
    for _ in range(depth):
        inner = Reduced(*args(inner))
    return inner


def test_nested_calls(tmp_path: Path) -> None:
    """Twenty nested calls are read. A hundred are refused, which is more than torch writes, before Python's stack
    overflows.
    """

    def parameter(inner: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (inner, True, None)

    torch.save({"w": around(torch.ones(2), 20, parameter)}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"] == ("strided", (2,), 8)
    torch.save({"w": around(torch.ones(2), 100, parameter)}, tmp_path / "x.pt")
    with pytest.raises(LimitError, match=r"at w: .*nested too deeply"):
        ckptconv.inspect(tmp_path / "x.pt")


def test_a_tensor_in_many_calls(tmp_path: Path) -> None:
    """A tensor in nested calls is read only once. Otherwise, forty calls with two references each would take
    exponential time.
    """

    def sparse(inner: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (inner, inner, torch.Size((2,))))

    torch.save({"w": around(torch.ones(2), 40, sparse)}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"] == ("sparse", (2,), 8 << 40)
