"""Rank files that are merged into one checkpoint. The processes of a real run saved them, and torch computes the
expected result.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import ckptconv
from ckptconv.errors import InputError, MalformedError, RefusedError, UnsupportedError
from ckptconv.formats import opening
from ckptconv.formats.distributed import rank_parts
from ckptconv.limits import LIMITS
from tests.support import torch_facts
from tests.support.command import Command
from tests.support.conversions import converted, read, refused, run_without_torch
from tests.support.rank_runs import MODELS, RANKS, WHOLE, assert_merged, assert_merged_optimizer, bits, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch about its own code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the runs of four processes."""
    torch.zeros(0)  # skips the test if torch is not installed
    if torch_facts.version() < (2, 7):
        pytest.skip("torch 2.6 distributes no tensors without sending them")
    return run_ranks(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spread", "sharded"])
def test_complete_folder(name: str, runs: Path, tmp_path: Path) -> None:
    """Tensors of all dtypes, sizes and placements become the complete tensors, bit for bit."""
    ckptconv.convert(runs / name, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert bits(loaded) == bits(torch.load(runs / f"{name}.{WHOLE}", weights_only=True))


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, runs: Path, tmp_path: Path) -> None:
    """The files of each kind of run become the full state dict, bit for bit, and the plain model loads it."""
    assert_merged(runs / name, tmp_path / "out.pt")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """The files of only two processes are merged too."""
    torch.zeros(0)  # skips the test if torch is not installed
    runs = run_ranks(tmp_path, 2)
    for name in MODELS:
        assert_merged(runs / name, tmp_path / f"{name}.pt")


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "tp"])
def test_optimizer(name: str, runs: Path, tmp_path: Path) -> None:
    """The files of the optimizer are next to those of the model, and a pattern selects them."""
    assert_merged_optimizer(runs / name, RANKS, tmp_path / "out.pt")


def test_folder_files_and_pattern_give_the_same_result(runs: Path, tmp_path: Path) -> None:
    """A folder, all of its files, and their pattern give the same result, also as shards. In a target folder, the
    output has the name of the model. A conversion that only moves bytes does not import torch.
    """
    folder, whole = runs / "fsdp2", tmp_path / "whole.safetensors"
    files = sorted(folder.glob("model_*"))
    program = "from ckptconv.cli.main import main; assert not main(sys.argv[1:])"
    run_without_torch(program, "convert", "-q", *files, whole)
    expected = bits(load_file(whole))
    pattern = folder / "model_world_size_4_rank_*.pt"
    for n, src in enumerate((folder, pattern)):
        ckptconv.convert(src, tmp_path / f"{n}.safetensors")
        assert bits(load_file(tmp_path / f"{n}.safetensors")) == expected
        ckptconv.convert(src, tmp_path / f"shards{n}", max_shard_size=500_000, format="safetensors")
        assert bits(load_file(tmp_path / f"shards{n}" / "model.safetensors")) == expected
    (tmp_path / "target").mkdir()
    ckptconv.convert(pattern, tmp_path / "target")
    assert bits(torch.load(tmp_path / "target" / "model.pt")) == bits(torch.load(runs / f"fsdp2.{WHOLE}"))
    assert bits(ckptconv.load(pattern)) == bits(torch.load(runs / f"fsdp2.{WHOLE}"))


def test_choice_of_a_set(runs: Path, tmp_path: Path, command: Command) -> None:
    """In a folder with several sets, the set of the model is read, and a note names the others. A listing contains each
    set once. Two sets of models are refused.
    """
    listed = command("inspect", runs / "fsdp2").out
    assert all(listed.count(name) == 1 for name in ("extra_state_", "model_", "optim_")), listed
    assert command.json("inspect", runs / "fsdp1")["format"] == "rank files"
    summary = ckptconv.inspect(runs / "fsdp2")
    assert summary.format == "rank files" and "optim_world_size_4_rank_*.pt" in " ".join(summary.notes)
    shutil.copytree(runs / "fsdp1", tmp_path / "two")
    for path in sorted((tmp_path / "two").iterdir()):
        path.with_name(path.name.replace("model", "ema")).write_bytes(path.read_bytes())
    refused(UnsupportedError, "the rank files of 2 checkpoints", tmp_path / "two", tmp_path / "out.pt")


def test_missing_and_additional_ranks(runs: Path, tmp_path: Path, command: Command) -> None:
    """An error names a rank that is missing or not in the command. A rank that the run did not have, and two files of
    the same rank, are refused.
    """
    src = shutil.copytree(runs / "fsdp1", tmp_path / "src")
    files = sorted(src.iterdir())
    command("convert", *files[:3], tmp_path / "out.pt", status=2, err=("rank_3.pt", "rank_*.pt"))
    (src / "model_world_size_4_rank_04.pt").write_bytes(files[0].read_bytes())
    refused(MalformedError, "a rank that the run did not have", src, tmp_path / "out.pt")
    (src / "model_world_size_4_rank_04.pt").rename(src / "model_world_size_4_rank_03.pt")
    refused(MalformedError, "two files belong to the same rank", src, tmp_path / "out.pt")
    (src / "model_world_size_4_rank_03.pt").unlink()
    files[2].unlink()
    refused(MalformedError, "1 rank of 4 are missing.*no model_world_size_4_rank_2.pt", src, tmp_path / "out.pt")


#: Changes of the sorted files of four ranks, and a part of the error of all three commands.
SETS: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "one is missing": (lambda files: files[2].unlink(), "the files of 1 rank of 4 are missing"),
    "one stands there twice": (lambda files: shutil.copy(files[0], files[1]), "differs from the rank in its name"),
    "two are swapped": (lambda files: swap(files[0], files[1]), "differs from the rank in its name"),
    "of a larger run": (lambda files: renamed(files, "size_8"), "the files of 4 ranks of 8 are missing"),
    "of a smaller run": (lambda files: renamed(files, "size_2"), "a rank that the run did not have"),
    "two names of one rank": (
        lambda files: shutil.copy(files[0], files[0].with_name("model_world_size_4_rank_00.pt")),
        "two files belong to the same rank",
    ),
}


def swap(a: Path, b: Path) -> None:
    ours, theirs = a.read_bytes(), b.read_bytes()
    a.write_bytes(theirs)
    b.write_bytes(ours)


def renamed(files: list[Path], size: str) -> None:
    for path in files:
        path.rename(path.with_name(path.name.replace("size_4", size)))


@pytest.mark.untraced
@pytest.mark.parametrize("case", SETS)
def test_one_verdict_on_a_set(case: str, runs: Path, tmp_path: Path, command: Command) -> None:
    """``inspect``, ``verify`` and ``convert`` refuse a folder for the same reason. ``verify`` also reports this reason
    for a list of the files.
    """
    change, words = SETS[case]
    src = shutil.copytree(runs / "spread", tmp_path / "src")
    assert command("verify", src).out.count("\n") == 1
    change(sorted(src.iterdir()))
    command("inspect", src, status=1, err=words)
    command("convert", src, tmp_path / "out.pt", status=1, err=words)
    command("verify", src, status=1, out=("damaged: ", words))
    command("verify", *sorted(src.iterdir()), status=1, out=("damaged: ", words))
    command("verify", sorted(src.iterdir())[0], status=0)


def test_a_single_rank_file(runs: Path, tmp_path: Path) -> None:
    """The file of one rank can be converted to torch's format. Other formats refuse the file, and the hint contains the
    pattern of all files.
    """
    src = shutil.copytree(runs / "fsdp1", tmp_path / "src")
    (src / "model_world_size_4_rank_3.pt").unlink()
    alone = src / "model_world_size_4_rank_1.pt"
    pattern = str(src / "model_world_size_4_rank_*.pt")
    notes = " ".join(ckptconv.inspect(alone).notes)
    assert "1 of 4 are missing here: model_world_size_4_rank_3.pt" in notes and pattern in notes
    error = refused(RefusedError, "one process's part", alone, tmp_path / "out.safetensors")
    assert pattern in str(error.hint)
    error = refused(RefusedError, "one process's part", alone, tmp_path / "out", max_shard_size="1GB")
    assert pattern in str(error.hint)
    ckptconv.convert(alone, tmp_path / "rank.pt")
    assert any(info.kind == "partial" for info in read(tmp_path / "rank.pt").tensors.values())


def edited(src: Path, folder: Path, change: Callable[[dict[str, Any], int], object]) -> Path:
    """Copy the rank files in `src` to `folder` with a `change` of each state, and return `folder`."""
    folder.mkdir()
    for rank in range(RANKS):
        name = f"model_world_size_{RANKS}_rank_{rank}.pt"
        state = torch.load(src / name, weights_only=False)
        change(state, rank)
        torch.save(state, folder / name)
    return folder


def test_different_values_are_refused_until_they_are_left_out(runs: Path, tmp_path: Path) -> None:
    """Plain and replicated tensors, numbers and texts are refused if they differ between the files, even with
    ``force``. The options in the hint leave out exactly these values.
    """

    def change(state: dict[str, Any], rank: int) -> None:
        state["plain"][0, 0] = rank
        state["everywhere"]._local_tensor[1, 1] += rank == 2
        state["columns"]._local_tensor[1, 1] += rank == 3
        state["epoch"] = rank // 3
        state["same"] = {"text": "x" * 100_000, "nan": float("nan"), "list": [1, (2, b"3")]}
        if rank == 0:
            state["only in the first"] = torch.ones(1)

    src = edited(runs / "spread", tmp_path / "src", change)
    out = tmp_path / "out.pt"
    error = refused(RefusedError, "the files contain different copies of the same value", src, out, force=True)
    dropped = ast.literal_eval(str(error.hint).partition("drop=")[2])
    assert set(dropped) == {"plain", "everywhere", "columns", "epoch", "only in the first"}
    loaded = converted(src, out, drop=dropped)
    whole = torch.load(runs / f"spread.{WHOLE}")
    expected = {name: value for name, value in whole.items() if name not in dropped}
    assert bits(expected) == bits({name: loaded[name] for name in expected})
    assert list(loaded["same"]) == ["text", "nan", "list"]


def test_extra_state(runs: Path, tmp_path: Path) -> None:
    """States that are different in each rank cannot be merged. The hint suggests converting the file of one rank, and
    no options that would leave out everything.
    """
    pattern = runs / "fsdp2" / "extra_state_world_size_4_rank_*.pt"
    error = refused(RefusedError, "rng/cpu", pattern, tmp_path / "o.pt", force=True)
    typed = re.search(r"ckptconv\.convert\('(.*)', OUT\)", str(error.hint))
    assert typed and "drop" not in str(error.hint)
    first = Path(typed[1])
    assert first == pattern.with_name("extra_state_world_size_4_rank_0.pt")
    assert bits(converted(first, tmp_path / "o.pt")) == bits(torch.load(first))


def test_buffers_and_scalars(runs: Path, tmp_path: Path) -> None:
    """A buffer that each process has is taken once and is neither summed nor joined. A scalar remains a scalar."""
    for name in ("fsdp2", "tp", "fsdp1 of DTensors"):
        one = torch.load(runs / name / "model_world_size_4_rank_0.pt", weights_only=False)
        whole = converted(runs / name, tmp_path / f"{name}.pt")
        for buffer in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            assert bits(whole[buffer]) == bits(one[buffer])
        assert whole["norm.num_batches_tracked"].shape == ()
    assert bits(converted(runs / "spread", tmp_path / "out.pt")["scalar"]) == bits(torch.tensor(2.5))
    optimizer = converted(runs / "fsdp2" / "optim_world_size_4_rank_*.pt", tmp_path / "optim.pt")
    assert all(state["step"].shape == () for state in optimizer["state"].values())


def only_columns(state: dict[str, Any]) -> dict[str, Any]:
    for name in [name for name in state if name != "columns"]:
        del state[name]
    return state


def spec_of(state: dict[str, Any], name: str = "columns") -> Any:
    return state[name]._spec


def larger(state: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Set the shape of the complete tensor to `shape`, and leave its part as it is."""
    spec = spec_of(state)
    spec.tensor_meta = TensorMeta(torch.Size(shape), (1,) * len(shape), torch.float32)
    state["columns"] = DTensor(state["columns"]._local_tensor, spec, requires_grad=False)


LIES: dict[str, tuple[str, Callable[[dict[str, Any], int], object]]] = {
    "a dimension that is not there": (
        "cuts a dimension that the tensor does not",
        lambda state, _: setattr(spec_of(state), "placements", (Replicate(), Shard(2))),
    ),
    "Partial": ("Partial", lambda state, _: setattr(spec_of(state), "placements", (Replicate(), Partial()))),
    "a split factor": (
        "split_factor",
        lambda state, _: setattr(spec_of(state), "placements", (Replicate(), _StridedShard(1, split_factor=10**9))),
    ),
    "too few placements": (
        "one placement for each dimension",
        lambda state, _: setattr(spec_of(state), "placements", (Shard(1),)),
    ),
    "a rank": ("differs from the rank in its name", lambda state, _: setattr(spec_of(state).mesh, "_rank", 0)),
    "a coordinate": (
        "not in its mesh",
        lambda state, _: setattr(spec_of(state).mesh, "_coordinate_on_dim", (0, 7)),
    ),
    "two ranks at one place": (
        "leave holes",
        lambda state, _: setattr(spec_of(only_columns(state)).mesh, "_coordinate_on_dim", (0, 0)),
    ),
    "ranks of another run": (
        "not from this run",
        lambda state, _: setattr(spec_of(state).mesh, "_flatten_rank_map", (0, 1, 2, 3, 7)),
    ),
    "a shape that lies": ("does not match its placements", lambda state, _: larger(state, (5, 80))),
    "a shape beyond all memory": ("does not match its placements", lambda state, _: larger(state, (2**40, 8))),
    "a shape of more dimensions": ("does not match its placements", lambda state, _: larger(state, (5, 8, 1))),
    "a part that is too small": (
        "does not match its placements",
        lambda state, _: setattr(state["columns"], "_local_tensor", torch.ones(5, 3)),
    ),
    "a part that repeats": (
        "repeated",
        lambda state, _: setattr(state["columns"], "_local_tensor", torch.ones(5, 1).expand(5, 4)),
    ),
    "a part of another dtype": (
        "a different dtype from the whole",
        lambda state, _: setattr(state["columns"], "_local_tensor", torch.ones(5, 4).half()),
    ),
    "placements of one rank": (
        "from the same run",
        lambda state, rank: rank == 3 and setattr(spec_of(state), "placements", (Shard(1), Replicate())),
    ),
    "a name of one rank": ("from the same run", lambda state, rank: rank == 3 and state.update(more=torch.ones(1))),
}


@pytest.mark.parametrize("lie", LIES)
def test_false_statements(lie: str, runs: Path, tmp_path: Path) -> None:
    """A contradiction in the files is reported with its position, before anything is written."""
    words, change = LIES[lie]
    src = edited(runs / "spread", tmp_path / "src", change)
    assert not ckptconv.verify(src).ok
    error = refused(InputError, words, src, tmp_path / "out.pt")
    assert "rank_" in str(error.where) or lie == "two ranks at one place"


def test_two_files_claim_one_shard(runs: Path, tmp_path: Path) -> None:
    """A ShardedTensor does not record its rank. If two files contain the same shards, the error reports the resulting
    holes.
    """
    src = shutil.copytree(runs / "sharded", tmp_path / "src")
    shutil.copy(src / "model_world_size_4_rank_0.pt", src / "model_world_size_4_rank_1.pt")
    refused(MalformedError, "leave holes", src, tmp_path / "out.pt")


def as_tensor(mesh: Any) -> dict[str, Any]:
    """Return the state of `mesh` before torch 2.9, with the ranks in a tensor."""
    ranks = torch.arange(RANKS).reshape([axis.shape[0] for axis in mesh._layout.axes])
    old = {"device_type": "cpu", "mesh": ranks, "mesh_dim_names": mesh._mesh_dim_names}
    return old | {"_flatten_mesh_list": (*range(RANKS),), "_coordinate_on_dim": list(mesh._coordinate_on_dim)}


def as_shape(mesh: Any) -> dict[str, Any]:
    """Return the state of `mesh` before torch 2.13. Its layout has a shape and strides, which are numbers if there is
    only one dimension.
    """
    axes, layout = mesh._layout.axes, object.__new__(type(mesh._layout))
    shape, stride = (tuple(getattr(axis, name)[0] for axis in axes) for name in ("shape", "stride"))
    vars(layout).update({"shape": shape, "stride": stride} if len(axes) > 1 else {"shape": shape[0], "stride": 1})
    return {**vars(mesh), "_layout": layout}


@pytest.mark.parametrize("state_of", [as_tensor, as_shape])
def test_older_meshes(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_of: Callable[[Any], dict[str, Any]]
) -> None:
    """Meshes as older versions pickle them, and classes with their names from before torch 2.5, are read like those of
    today. The states are imitated, because no file of such a version was available.
    """
    seen: dict[int, Any] = {}

    def change(state: dict[str, Any], rank: int) -> None:
        for tensor in state.values():
            mesh = getattr(tensor, "_spec", None) and tensor._spec.mesh
            if mesh is not None and id(mesh) not in seen:
                seen[id(mesh)] = mesh
                old = state_of(mesh)
                vars(mesh).clear()
                vars(mesh).update(old)

    if state_of is as_tensor:
        for module, *classes in (
            ("torch.distributed._tensor.api", DTensor),
            ("torch.distributed._tensor.placement_types", DTensorSpec, TensorMeta, Shard, Replicate, _StridedShard),
        ):
            made = types.ModuleType(module)
            monkeypatch.setitem(sys.modules, module, made)
            for cls in classes:
                setattr(made, cls.__name__, cls)
                monkeypatch.setattr(cls, "__module__", module)
    src = edited(runs / "spread", tmp_path / "src", change)
    pickled = zipfile.ZipFile(src / "model_world_size_4_rank_0.pt").read("model_world_size_4_rank_0/data.pkl")
    assert (b"torch.distributed._tensor.api" in pickled) == (state_of is as_tensor)
    assert b"axes" not in pickled and b"_FlatLayout" not in pickled
    assert bits(converted(src, tmp_path / "out.pt")) == bits(torch.load(runs / f"spread.{WHOLE}"))


def test_flat_parameters(runs: Path, tmp_path: Path) -> None:
    """The flat parameters of ``LOCAL_STATE_DICT`` are refused, and the hint names the type that is needed."""
    error = refused(UnsupportedError, "flat parameter", runs / "flat", tmp_path / "out.pt")
    assert "SHARDED_STATE_DICT" in str(error.hint)


def test_ties_and_devices_stay(runs: Path, tmp_path: Path) -> None:
    """Names that are tied in each rank are tied in the output. The tensors are on the device of the first rank."""
    src = edited(runs / "spread", tmp_path / "src", lambda state, rank: None)
    for rank, path in enumerate(sorted(src.iterdir())):
        ckptconv.convert(path, path, map_location=f"cuda:{rank}", force=True)
    with opening.open_input(src) as source:
        tensors = opening.read(source).tensors
    assert tensors["tied"].tied_to == "model.embed.weight"
    assert {info.device for info in tensors.values()} == {"cuda:0"}
    model = converted(runs / "fsdp2", tmp_path / "out.pt")
    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()


@pytest.mark.parametrize(
    ("bound", "most", "words"),
    [
        ("strips", 3, "cut into too many strips"),
        ("ranks", 4, "not from this run"),
        ("spread_steps", 1, "too many pieces for a file of this size"),
    ],
)
def test_bounds(bound: str, most: int, words: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of strips of a tensor, the number of ranks of a mesh, and the steps for each opcode of a file are
    bounded.
    """
    monkeypatch.setattr(rank_parts, "LIMITS", dataclasses.replace(LIMITS, **{bound: most}))
    ckptconv.convert(runs / "spread", tmp_path / "out.pt")
    monkeypatch.setattr(rank_parts, "LIMITS", dataclasses.replace(LIMITS, **{bound: most - 1}))
    refused(InputError, words, runs / "spread", tmp_path / "less.pt")


def test_the_long_name_of_a_mesh(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a mesh is counted as work for each layout that contains it. Many tensors can share a mesh, each with
    its own placements.
    """
    charged: list[int] = []
    monkeypatch.setattr(rank_parts, "work", lambda: SimpleNamespace(charge=charged.append))

    def change(state: dict[str, Any], rank: int) -> None:
        mesh = spec_of(state).mesh
        mesh._mesh_dim_names = ("m" * 60_000,) * mesh.ndim

    ckptconv.inspect(edited(runs / "spread", tmp_path / "long", change))
    assert sum(charged) > 60_000 // 30
