"""Tensors that are spread over many processes: each file has a part, is shown so, retagged, kept,
and never written as if it were the whole.
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
import torch.distributed.tensor  # DTensors are loaded here

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
    """The folder of a run of two processes, which find for themselves that what they
    load after a retag is what they saved.
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


# Made by torch


@pytest.mark.slow
def test_torch_needs_an_import_alone(run: Path) -> None:
    """Of torch's own: ``inspect`` and ``load`` say which module that is, and it is all that it takes."""
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


def test_they_are_shown(run: Path) -> None:
    """The shape is the whole's, the part stands below it with its own; a note says which they are.

    A replicated one is no exception.
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


def test_the_state_dict_is_one(run: Path, tmp_path: Path) -> None:
    """Names of partial tensors are names, and a part of the checkpoint is a torch file with them as they were."""
    ckptconv.convert(run / "dtensor0.pt", tmp_path / "out.pt", state_dict=True, strip_prefix="net.")
    model = torch.load(run / "dtensor0.pt", weights_only=False)["model"]
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(parts(ours), {key.removeprefix("net."): value for key, value in parts(model).items()})


@pytest.mark.parametrize("format", ["pt", "legacy", "pickle"])
@pytest.mark.parametrize("name", ["dtensor0.pt", "sharded0.pt"])
def test_torch_formats_keep_them(run: Path, tmp_path: Path, name: str, format: Any) -> None:
    """Through each of them and back to a zip, everything is there, and still known to be partial."""
    ckptconv.convert(run / name, tmp_path / "out.pkl", format=format)
    ckptconv.convert(tmp_path / "out.pkl", tmp_path / "back.pt")
    assert kinds(tmp_path / "out.pkl") == kinds(tmp_path / "back.pt") == kinds(run / name)
    if name == "dtensor0.pt":  # the other one loads in its run alone
        back = torch.load(tmp_path / "back.pt", weights_only=True)
        assert_same(parts(back), parts(torch.load(run / name, weights_only=True)))


def test_every_device_is_retagged(run: Path, tmp_path: Path) -> None:
    """Storages and the tensors' own devices are; that of the mesh stays, as it does in
    ``torch.load(map_location=...)`` and ``DTensor.cpu()``.
    """
    ckptconv.convert(run / "dtensor0.pt", tmp_path / "gpu.pt", map_location="cuda:1")
    checkpoint = read(tmp_path / "gpu.pt")
    assert {storage.device for storage in checkpoint.storages.values()} == {"cuda:1"}
    assert [argument.device for argument in checkpoint.index.device_arguments] == ["cuda:1"] * 4
    ((path, device),) = ckptconv.inspect(tmp_path / "gpu.pt").user_devices.items()
    assert path.endswith(".mesh/._device_type") and device == "cuda"


@pytest.mark.parametrize("edits", [{"state_dict": True}, {"select": "model"}, {}])
def test_never_as_if_whole(run: Path, tmp_path: Path, edits: dict[str, Any]) -> None:
    """safetensors refuses each by its name, and says what to do; without them, the rest is taken."""
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
def test_others_are_no_wholes_either(run: Path, tmp_path: Path, name: str, edits: dict[str, Any], said: str) -> None:
    """They are refused as those of a state dict are."""
    refused(RefusedError, said, run / name, tmp_path / "out.safetensors", **edits)


def test_a_pickled_module_has_parts_too(run: Path, tmp_path: Path) -> None:
    """A torch file takes its weights."""
    ckptconv.convert(run / "module0.pt", tmp_path / "out.pt", state_dict=True)
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(parts(ours), parts(dict(torch.load(run / "module0.pt", weights_only=False).state_dict(keep_vars=True))))


def test_nor_are_they_saved(run: Path, tmp_path: Path) -> None:
    """``save`` refuses what ``convert`` refuses."""
    model = torch.load(run / "dtensor0.pt", weights_only=True)["model"]
    with pytest.raises(RefusedError, match=r"net\.weight \(one process's part of it\)"):
        ckptconv.save(model, tmp_path / "out.safetensors")


# Made by torch's older versions, whose ShardedTensor was no tensor


class Stated:
    """An object with a state that is no dict."""

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
    """The module that had it, with classes that are pickled as its were."""
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
    """Rank 0's part, two of four rows."""
    shard = old.Shard(None, {"tensor": torch.arange(6.0).reshape(2, 3), "metadata": "rank:0/cuda:0"})
    return old.ShardedTensor([shard], metadata, "process group", "sharding", False)


@pytest.mark.parametrize("newer", [False, True])
def test_an_object_of_parts(old: ModuleType, tmp_path: Path, newer: bool) -> None:
    """It is partial, its shape that of the metadata; the names it stands under are names; retagged as torch does;
    refused by safetensors.
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
def test_an_object_of_unknown_parts(old: ModuleType, tmp_path: Path, state: tuple[Any, ...]) -> None:
    """A state that is not understood is the user's data: carried over, and in no safetensors file."""
    zoo.save({"model": {"w": torch.ones(3)}, "x": old.ShardedTensor(*state)}, tmp_path / "src.pt", ("cuda:0",))
    assert list(kinds(tmp_path / "src.pt")) == ["model/w"]
    ckptconv.convert(tmp_path / "src.pt", tmp_path / "out.pt", map_location="cpu")
    assert_same(tags_of(tmp_path / "out.pt")[0], tags_of(tmp_path / "src.pt")[0])
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / "out.safetensors")
    assert [left.path for left in report.left_behind] == ["x"]


class DTensor(zoo.WrapperTensor):
    """A user's."""


def test_a_class_of_that_name_elsewhere(tmp_path: Path) -> None:
    """It is torch's module that makes a DTensor one."""
    torch.save({"w": DTensor(torch.ones(2), "cpu")}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"][0] == "wrapper"


def test_an_object_of_too_many_dimensions(old: ModuleType, tmp_path: Path) -> None:
    """Its size is a tensor's, so torch's bound is its too."""
    torch.save(sharded_object(old, old.Metadata([], torch.Size([1] * 65))), tmp_path / "x.pt")
    with pytest.raises(LimitError, match=r"too many dimensions \(expected at most 64, got 65\)"):
        ckptconv.inspect(tmp_path / "x.pt")


# Calls in calls


def around(inner: Any, depth: int, args: Callable[[Any], tuple[Any, ...]]) -> Any:
    """`inner` with so many calls around it, each of which has `args` of the one before."""
    for _ in range(depth):
        inner = Reduced(*args(inner))
    return inner


def test_calls_around_calls(tmp_path: Path) -> None:
    """Some are read; more than torch ever writes are refused, before Python's stack ends."""

    def parameter(inner: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (inner, True, None)

    torch.save({"w": around(torch.ones(2), 20, parameter)}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"] == ("strided", (2,), 8)
    torch.save({"w": around(torch.ones(2), 100, parameter)}, tmp_path / "x.pt")
    with pytest.raises(LimitError, match=r"at w: .*nested too deeply"):
        ckptconv.inspect(tmp_path / "x.pt")


def test_a_tensor_in_many_calls(tmp_path: Path) -> None:
    """It is read once: forty calls, each with the one before it twice, would take forever."""

    def sparse(inner: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (inner, inner, torch.Size((2,))))

    torch.save({"w": around(torch.ones(2), 40, sparse)}, tmp_path / "x.pt")
    assert kinds(tmp_path / "x.pt")["w"] == ("sparse", (2,), 8 << 40)
