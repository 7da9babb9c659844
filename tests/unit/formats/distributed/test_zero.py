"""Folders of DeepSpeed ZeRO that are merged into one checkpoint. ``tests/long/test_zero_runs.py`` tests folders that
DeepSpeed itself wrote.
"""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptconv
from ckptconv.errors import CkptconvError, LimitError, MalformedError, UnsupportedError
from ckptconv.limits import LIMITS, Limits
from tests.support import fake_s3
from tests.support.command import Command
from tests.support.zero_folders import TAG, Files, Saved, a_run, deepspeed_modules, quantized, write_zero

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch about its own code

#: Kinds of runs, which can have any number of ranks.
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "round robin": {"stage": 2, "round_robin": True},
    "aligned": {"stage": 2, "aligned": True},
    "elastic": {"stage": 2, "elastic": True},
    "BF16 optimizer": {"stage": 1, "bf16_optimizer": True},
    "stage 3": {"stage": 3},
    "sub-groups": {"stage": 3, "sub_group": 4},
}


def assert_whole(out: dict[str, Any], run: Saved, *, elastic: bool = False, **_: Any) -> None:
    """Check that `out` equals the state of `run`."""
    module = out["module"]
    expected = {**run.weights, **run.frozen, **run.buffers}
    assert module.keys() == {*expected, *run.shared}
    for name, tensor in expected.items():
        assert module[name].dtype == tensor.dtype
        assert torch.equal(module[name], tensor), name
    for name, holder in run.shared.items():
        assert module[name].data_ptr() == module[holder].data_ptr()
    state, groups = out["optimizer"]["state"], out["optimizer"]["param_groups"]
    assert state.keys() == run.weights.keys()
    for name, values in state.items():
        assert values["step"] == 3
        for key, moments in run.moments.items():
            assert torch.equal(values[key], moments[name]), (name, key)
    steps = {values["step"].data_ptr() for values in state.values()}
    assert len(steps) == len(state)  # optimizers increment the steps in place
    assert [group["params"] for group in groups] == run.groups
    assert all(group.keys() == {"params"} if elastic else group["lr"] == 1e-3 for group in groups)
    assert (out["lr_scheduler"], out["global_steps"], out["epoch"]) == ({"last_epoch": 3}, 3, 7)
    assert not {"param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"} & out.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "groups", "frozen"), [(1, 1, False), (2, 2, False), (3, 1, True), (11, 2, True)])
def test_complete_folder(kind: str, ranks: int, groups: int, frozen: bool, tmp_path: Path) -> None:
    """The weights, the moments and all other values of each kind of run are merged. The ranks are in the order of their
    numbers.
    """
    run = a_run(groups=groups, frozen=frozen)
    folder = write_zero(tmp_path / "run", run, ranks=ranks, client={"epoch": 7}, **KINDS[kind])
    ckptconv.convert(folder, tmp_path / "out.pt")
    assert_whole(torch.load(tmp_path / "out.pt", weights_only=True), run, **KINDS[kind])


@pytest.mark.parametrize("stage", [2, 3])
def test_targets(stage: int, tmp_path: Path, command: Command) -> None:
    """The folder of the run and the folder of its tag are converted to a file, to shards, with a cast, and to the
    weights only.
    """
    run = a_run()
    folder = write_zero(tmp_path / "checkpoint-3", run, stage=stage)
    command("convert", folder / TAG, tmp_path / "out.safetensors")
    weights = load_file(tmp_path / "out.safetensors")
    for name, tensor in {**run.weights, **run.buffers}.items():
        assert torch.equal(weights[name], tensor)
    command("convert", folder, tmp_path / "half.pt", "--state-dict", "--dtype", "bf16")
    half = torch.load(tmp_path / "half.pt", weights_only=True)
    assert torch.equal(half["up.weight"], run.weights["up.weight"].bfloat16())
    command("convert", folder, tmp_path / "set", "--max-shard-size", "300", "--format", "safetensors")
    assert len(list((tmp_path / "set").glob("*.safetensors"))) > 1
    command("diff", folder, tmp_path / "out.safetensors", "--state-dict")


def test_inspect(tmp_path: Path, command: Command) -> None:
    """``inspect`` shows the stage, the ranks, the tag, the parameters and the optimizer. For a folder with several
    checkpoints, it prints one line for each.
    """
    for step in (1, 2):
        write_zero(tmp_path / f"checkpoint-{step}", tag=f"global_step{step}", ranks=3)
    shown = command("inspect", tmp_path / "checkpoint-2").out
    assert "put together from 3 ranks of DeepSpeed 0.19.8 (stage 2, tag global_step2): 5 parameters in fp32" in shown
    assert "optimizer     optimizer: 15 tensors" in shown
    listed = command("inspect", tmp_path).out
    assert [line.split("\t")[1] for line in listed.splitlines() if "\t" in line] == ["DeepSpeed ZeRO"] * 2


def test_parts_that_are_left_behind(tmp_path: Path, command: Command) -> None:
    """The report names the 16-bit weights, the objects of DeepSpeed, and other files as left behind."""
    folder = write_zero(tmp_path / "run")
    torch.save({"seed": 1}, folder / "rng_state_0.pth")
    shown = command("convert", folder, tmp_path / "out.pt").err
    assert f"{TAG}/mp_rank_00_model_states.pt/module (266 B)" in shown
    assert "loss_scaler" in shown
    assert "1 other file left: rng_state_0.pth" in shown


def test_a_weight_that_no_file_contains_is_named(tmp_path: Path) -> None:
    """Stage 3 saves a weight without elements if the weight is trained, but not by the optimizer. No file contains such
    a weight, so it is left behind, and the report names it.
    """
    folder = write_zero(
        tmp_path / "run", stage=3, change=lambda f: [each["module"].update(lost=torch.empty(0)) for each in f.models]
    )
    report = ckptconv.convert(folder, tmp_path / "out.pt")
    assert [part.path for part in report.left_behind if "no file contains" in part.why] == [
        f"{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt/module/lost"
    ]
    assert "lost" not in torch.load(tmp_path / "out.pt")["module"]


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_weights_without_elements_are_not_a_state_dict(out: str, tmp_path: Path, command: Command) -> None:
    """A single file of stage 3 contains weights without elements, so it is refused, and the hint contains a command. A
    file of stage 2 contains the weights.
    """
    for stage, name in ((3, "zero_pp_rank_0_mp_rank_00_model_states.pt"), (2, "mp_rank_00_model_states.pt")):
        folder = write_zero(tmp_path / str(stage), stage=stage)
        ran = command("convert", folder / TAG / name, tmp_path / out, "--state-dict", status=1 if stage == 3 else 0)
        assert ("has no elements, which are in the files of all ranks of DeepSpeed ZeRO" in ran.err) == (stage == 3)
        assert ("ckptconv convert" in ran.err) == (stage == 3)
        assert (tmp_path / out).exists() == (stage == 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_torch_loads_the_optimizer_by_numbers(stage: int, tmp_path: Path) -> None:
    """``load_state_dict`` loads the optimizer by numbers, in the order of the groups of the run. Each parameter has its
    own step.
    """
    run = a_run(groups=2)
    folder = write_zero(tmp_path / "run", run, stage=stage, round_robin=stage == 2)
    ckptconv.convert(folder, tmp_path / "out.pt", optimizer="numbers")
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    parameters = {name: torch.nn.Parameter(out["module"][name]) for name in run.weights}
    groups = [{"params": [parameters[name] for name in names]} for names in run.groups]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(out["optimizer"])
    for name, parameter in parameters.items():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], run.moments["exp_avg"][name])
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def test_in_a_store(tmp_path: Path) -> None:
    """A folder in S3 is merged."""
    run = a_run()
    folder = write_zero(tmp_path / "run", run)
    with fake_s3.running_fake(tmp_path) as store:
        for path in folder.rglob("*"):
            if path.is_file():
                url = store.put(f"run/{path.relative_to(folder)}", path.read_bytes())
        url = url[: url.index("/run/")] + "/run/"
        ckptconv.convert(url, tmp_path / "out.pt")
    module = torch.load(tmp_path / "out.pt", weights_only=True)["module"]
    assert all(torch.equal(module[name], tensor) for name, tensor in run.weights.items())


def test_lightning(tmp_path: Path) -> None:
    """In a checkpoint of Lightning, the client state is at the root, the names have no prefix of the wrapper, and the
    optimizers are in a list.
    """
    run = a_run()

    def wrapped(files: Files) -> None:
        for model in files.models:
            model["module"] = {f"_forward_module.{name}": value for name, value in model["module"].items()}
            model["param_shapes"] = [{f"_forward_module.{n}": s for n, s in g.items()} for g in model["param_shapes"]]
            model["shared_params"] = {f"_forward_module.{a}": f"_forward_module.{b}" for a, b in run.shared.items()}

    client = {"pytorch-lightning_version": "2.0.0", "epoch": 4, "hyper_parameters": {"lr": 1.0}}
    folder = write_zero(tmp_path / "a.ckpt", run, client=client, change=wrapped, tag="checkpoint")
    (folder / "latest").unlink()
    ckptconv.convert(folder, tmp_path / "out.ckpt")
    out = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert out.keys() == {*client, "state_dict", "optimizer_states"}
    assert out["state_dict"].keys() == {*run.weights, *run.buffers, *run.shared}
    assert torch.equal(out["state_dict"]["up.weight"], run.weights["up.weight"])
    (optimizer,) = out["optimizer_states"]
    assert torch.equal(optimizer["state"]["scale"]["exp_avg"], run.moments["exp_avg"]["scale"])
    assert optimizer["param_groups"][0]["params"] == run.groups[0]


def test_tags_of_devices(tmp_path: Path) -> None:
    """A merged tensor is on the device of the rank that has its first part."""
    folder = write_zero(tmp_path / "run", ranks=2)
    for rank in range(2):
        path = folder / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        ckptconv.convert(path, path, map_location=f"cuda:{rank}", force=True)
    summary = ckptconv.inspect(folder)
    assert summary.devices.keys() == {"cpu", "cuda:0", "cuda:1"}
    ckptconv.convert(folder, tmp_path / "out.pt", map_location="cpu")
    assert {*ckptconv.inspect(tmp_path / "out.pt").devices} == {"cpu"}


def test_shards_in_the_same_folder(tmp_path: Path) -> None:
    """A folder with a sharded set next to the folder of the tag is read as the sharded set."""
    folder = write_zero(tmp_path / "checkpoint-3")
    for i in (1, 2):
        torch.save({f"w{i}": torch.ones(i)}, folder / f"pytorch_model-0000{i}-of-00002.bin")
    assert ckptconv.inspect(folder).format.startswith("sharded")
    assert ckptconv.inspect(folder / TAG).format == "DeepSpeed ZeRO"


def test_no_optimizer_state(tmp_path: Path) -> None:
    """After a run without steps, the state of the optimizer is empty. If a script has removed the state, the output
    contains no optimizer, and a note reports it.
    """
    folder = write_zero(tmp_path / "empty", change=lambda files: [_empty(each) for each in files.optims] and None)
    ckptconv.convert(folder, tmp_path / "empty.pt")
    out = torch.load(tmp_path / "empty.pt", weights_only=True)
    assert out["optimizer"]["state"] == {}
    folder = write_zero(
        tmp_path / "gone", stage=3, change=lambda files: [_gone(each) for each in files.optims] and None
    )
    ckptconv.convert(folder, tmp_path / "gone.pt")
    assert "optimizer" not in torch.load(tmp_path / "gone.pt", weights_only=True)
    assert any("no state of the optimizer" in note for note in ckptconv.inspect(folder).notes)


def _empty(optim: dict[str, Any]) -> None:
    optim["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}


def _gone(optim: dict[str, Any]) -> None:
    del optim["optimizer_state_dict"]["optimizer_state_dict"]


def test_damage_is_found(tmp_path: Path) -> None:
    """A damaged record is reported by its checksum, and nothing is written."""
    folder = write_zero(tmp_path / "run")
    path = folder / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    with deepspeed_modules():
        flat = torch.load(path, weights_only=False)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    at = data.index(flat.numpy().tobytes())
    data[at + 8] ^= 1
    path.write_bytes(data)
    for name in ("out.pt", "out.safetensors"):
        with pytest.raises(MalformedError, match="checksum"):
            ckptconv.convert(folder, tmp_path / name)
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("stage", [2, 3])
def test_verify(stage: int, tmp_path: Path, command: Command) -> None:
    """``verify`` checks the files of all ranks as one checkpoint, compares each record once, and names the code that
    loading would run. Truncated and missing files are reported.
    """
    folder = write_zero(tmp_path / "run", stage=stage)
    shown = command("verify", tmp_path).out
    records = 13 + 10 * 2 if stage == 2 else 13 * 2 + 10 * 2
    assert f"ok: {folder / TAG}: DeepSpeed ZeRO, {records} checksums right" in shown
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert f"fp16.loss_scaler.LossScaler (2 times) at {name}: optimizer_state_dict/loss_scaler" in shown
    command("verify", folder, "--strict", status=1)
    last = folder / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = last.read_bytes()
    last.write_bytes(data[:-100])
    assert "truncated" in command("verify", folder, status=1).out
    last.unlink()
    assert "1 file of 2 ranks is missing" in command("verify", folder, status=1).out


def test_verify_compares_the_ranks(tmp_path: Path, command: Command) -> None:
    """``verify`` reports two files that are valid alone but belong to different runs."""
    folder = write_zero(tmp_path / "run", change=lambda files: _step(inner(files, 1)))
    for path in (folder / TAG).iterdir():
        command("verify", path)
    assert "are from different runs or steps" in command("verify", folder, status=1).out


@pytest.mark.parametrize("rank", [0, 1])
def test_danger_is_found_in_each_file(rank: int, tmp_path: Path, command: Command) -> None:
    """A dangerous call is found in each file, also in an object that no output contains, and in another member of the
    archive.
    """
    marker = tmp_path / "marker"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(marker), "w")

    folder = write_zero(tmp_path / "run", change=lambda files: inner(files, rank).update(overflow=Attack()))
    assert "dangerous: " in command("verify", folder, status=1).out
    assert ckptconv.inspect(folder).safety == "dangerous"
    for name in ("mp_rank_00_model_states.pt", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"):
        folder = write_zero(tmp_path / name)
        with zipfile.ZipFile(folder / TAG / name, "a") as archive:
            archive.writestr(f"{archive.namelist()[0].split('/')[0]}/more.pkl", pickle.dumps(Attack()))
        assert "more.pkl" in command("verify", folder, status=1).out
    assert not marker.exists()


# Contradictory folders


def inner(files: Files, rank: int = 0) -> dict[str, Any]:
    """Return the dict of the optimizer of `rank`."""
    found: dict[str, Any] = files.optims[rank]["optimizer_state_dict"]
    return found


def flats(files: Files, rank: int = 0) -> list[Any]:
    """Return the flat fp32 tensors of `rank`."""
    found: list[Any] = inner(files, rank)["single_partition_of_fp32_groups"]
    return found


def shapes(files: Files, rank: int = 0) -> dict[str, Any]:
    """Return the shapes in the model states of `rank`."""
    found: dict[str, Any] = files.models[rank]["param_shapes"][0]
    return found


def _step(optim: dict[str, Any]) -> None:
    optim["base_optimizer_state"]["state"][0]["step"] = torch.tensor(4.0)


def _lies() -> dict[str, tuple[int, Callable[[Files], object], str]]:
    """Return the stage, the change and a part of the error for each contradiction."""
    size = torch.Size
    return {
        "a shape that is too large": (2, lambda f: shapes(f).update(scale=size([99])), "does not fit|different shapes"),
        "a huge shape": (3, lambda f: [shapes(f, i).update(scale=size([1 << 61, 3])) for i in (0, 1)], "does not fit"),
        "a shape that is too small": (
            3,
            lambda f: [shapes(f, i).update({"up.bias": size([2])}) for i in (0, 1)],
            "disagree",
        ),
        "a shape in another order": (2, lambda f: shapes(f).update({"up.weight": size([5, 7])}), "different shapes"),
        "a tie of two parameters": (2, lambda f: f.models[0]["shared_params"].update(scale="up.bias"), "twice in"),
        "a frozen parameter that is trained": (
            3,
            lambda f: [
                each.update(frozen_param_shapes={"scale": size([1])}, frozen_param_fragments={"scale": torch.ones(1)})
                for each in f.models
            ],
            r"twice in .*scale",
        ),
        "shapes of one rank": (3, lambda f: shapes(f, 1).update(scale=size([2])), "different runs"),
        "a shape that is none": (2, lambda f: shapes(f).update(scale="x"), "not a new name and a shape"),
        "no groups": (2, lambda f: f.models[0]["param_shapes"].clear(), "disagree"),
        "no shapes": (2, lambda f: f.models[0].update(param_shapes=None), "no module and param_shapes"),
        "another world": (2, lambda f: inner(f, 0).update(partition_count=[3]), "missing"),
        "a smaller world": (2, lambda f: inner(f, 0).update(partition_count=[1]), "more files than ranks"),
        "ranks of two runs": (
            2,
            lambda f: _step(inner(f, 1)),
            "different runs",
        ),
        "model states of two steps": (3, lambda f: f.models[1].update(global_steps=4), "different runs"),
        "other groups in one rank": (
            2,
            lambda f: flats(f, 1).append(torch.ones(2)),
            "number of flat tensors|different",
        ),
        "flat data of two dtypes": (2, lambda f: flats(f, 1).append(flats(f, 1).pop().double()), "dtypes"),
        "flat data with two dimensions": (2, lambda f: flats(f).__setitem__(0, torch.ones(2, 2)), "one dimension"),
        "flat data that is none": (2, lambda f: flats(f).__setitem__(0, 3), "not a plain tensor"),
        "an unknown stage": (2, lambda f: inner(f).update(zero_stage=7), "zero_stage"),
        "gaps that are too long": (2, lambda f: inner(f).update(param_alignment_paddings=[[1000] * 5]), "does not fit"),
        "too few gaps": (2, lambda f: inner(f).update(param_alignment_paddings=[[0]]), "disagree"),
        "groups that nobody has": (2, lambda f: inner(f)["base_optimizer_state"].update(param_groups=3), "not a list"),
        "experts": (2, lambda f: [inner(f, i).update(partition_count=[2, 1]) for i in (0, 1)], "experts"),
        "tensor parallelism": (2, lambda f: f.models[0].update(mp_world_size=2), "tensor parallelism"),
    }


LIES = _lies()


@pytest.mark.parametrize("lie", LIES)
def test_false_metadata_is_a_typed_error(lie: str, tmp_path: Path) -> None:
    """``convert`` and ``inspect`` refuse a folder with a contradiction, and nothing is written."""
    stage, change, words = LIES[lie]
    folder = write_zero(tmp_path / "run", stage=stage, change=change)
    with pytest.raises((MalformedError, UnsupportedError), match=words):
        ckptconv.convert(folder, tmp_path / "out.pt")
    with pytest.raises((MalformedError, UnsupportedError), match=words):
        ckptconv.inspect(folder)
    assert not (tmp_path / "out.pt").exists()


def test_an_error_about_a_part_names_the_file(tmp_path: Path) -> None:
    """The error about a value contains the path of the checkpoint, even if the value is read without its file."""
    folder = write_zero(tmp_path / "run", change=lambda f: shapes(f).update(scale=torch.Size([1] * 65)))
    with pytest.raises(LimitError, match=r"run.*too many dimensions"):
        ckptconv.inspect(folder)


def test_quantized_optimizers(tmp_path: Path, command: Command) -> None:
    """Quantized optimizers are refused. At stage 2, the hint names the file with the 16-bit weights, which can be
    converted. At stage 3, no file contains these weights, so there is no hint.
    """
    folder = write_zero(tmp_path / "two", change=quantized)
    with pytest.raises(UnsupportedError, match="absmax1 does not have one number for each weight") as caught:
        ckptconv.convert(folder, tmp_path / "out.pt")
    assert "mp_rank_00_model_states.pt" in str(caught.value.hint)
    command("convert", folder / TAG / "mp_rank_00_model_states.pt", tmp_path / "half.pt", "--state-dict")
    assert torch.load(tmp_path / "half.pt")["scale"].dtype == torch.bfloat16
    folder = write_zero(tmp_path / "three", stage=3, change=quantized)
    with pytest.raises(UnsupportedError, match="absmax1") as caught:
        ckptconv.convert(folder, tmp_path / "out.pt")
    assert caught.value.hint is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "a pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
    ],
)
def test_other_runs(name: str, words: str, tmp_path: Path) -> None:
    """Runs that divide more than the data are recognized by the names of their files and refused. The hint names
    DeepSpeed's own script.
    """
    folder = write_zero(tmp_path / "run")
    shutil.copy(folder / TAG / "mp_rank_00_model_states.pt", folder / TAG / name)
    with pytest.raises(UnsupportedError, match=words) as caught:
        ckptconv.convert(folder, tmp_path / "out.pt")
    assert "deepspeed.checkpoint.ds_to_universal" in str(caught.value.hint)


@pytest.mark.parametrize("stage", [2, 3])
def test_missing_files(stage: int, tmp_path: Path) -> None:
    """A missing file is named in the error. Truncated files and two files of the same rank are refused."""
    whole = write_zero(tmp_path / "run", stage=stage, ranks=3)
    for path in sorted((whole / TAG).iterdir()):
        folder = Path(shutil.copytree(whole, tmp_path / f"without {path.name}"))
        (folder / TAG / path.name).unlink()
        with pytest.raises(MalformedError, match="missing") as caught:
            ckptconv.inspect(folder)
        assert path.name.removeprefix("bf16_") in str(caught.value)
        (folder / TAG / path.name).write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CkptconvError):
            ckptconv.inspect(folder)
    twice = whole / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(whole / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", twice)
    with pytest.raises(MalformedError, match="more files than ranks"):
        ckptconv.inspect(whole)


@pytest.mark.parametrize("names", [(1, 0), (1, 1)])
def test_files_of_other_ranks(names: tuple[int, int], tmp_path: Path) -> None:
    """Files with exchanged names are refused, and so is the last file under two names, because its padding comes before
    data.
    """
    folder = write_zero(tmp_path / "run") / TAG
    path = str(folder / "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt")
    data = [Path(path.format(rank)).read_bytes() for rank in names]
    for rank in (0, 1):
        Path(path.format(rank)).write_bytes(data[rank])
    for step in (ckptconv.inspect, lambda given: ckptconv.convert(given, tmp_path / "out.pt")):
        with pytest.raises(MalformedError, match="another order than their names say"):
            step(folder)


def test_tags_that_lead_elsewhere(tmp_path: Path) -> None:
    """``latest`` is read only as the name of a folder below its own."""
    write_zero(tmp_path / "run")
    (tmp_path / "other").mkdir()
    for tag in ("../run/" + TAG, str(tmp_path / "run" / TAG), "", "\0", "x" * 5000, "gone"):
        (tmp_path / "other" / "latest").write_text(tag)
        with pytest.raises(UnsupportedError):
            ckptconv.inspect(tmp_path / "other")
    nested = write_zero(tmp_path / "nested", tag="a/b")
    assert ckptconv.inspect(nested).format == "DeepSpeed ZeRO"


@pytest.mark.untraced
def test_many_groups(tmp_path: Path) -> None:
    """A folder with many empty groups is merged. Such groups cost no more than their entries in the files."""

    def many(files: Files) -> None:
        files.models[0]["param_shapes"] += [{}] * 20_000
        for rank in range(2):
            optim = inner(files, rank)
            flats(files, rank).extend([torch.zeros(0)] * 20_000)
            optim["group_paddings"] += [0] * 20_000
            del optim["param_alignment_paddings"]

    folder = write_zero(tmp_path / "run", change=many)
    run = a_run()
    ckptconv.convert(folder, tmp_path / "out.pt")
    module = torch.load(tmp_path / "out.pt", weights_only=True)["module"]
    assert all(torch.equal(module[name], tensor) for name, tensor in run.weights.items())


def test_too_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pieces that parameters are cut into is bounded."""
    folder = write_zero(tmp_path / "run", stage=3)
    monkeypatch.setattr("ckptconv.formats.distributed.zero_flat.LIMITS", dataclasses.replace(LIMITS, zero_cuts=9))
    with pytest.raises(LimitError, match="too many pieces"):
        ckptconv.inspect(folder)


def test_pieces_of_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value in the state of a parameter consists of as many pieces as the parameter, and these pieces are counted
    as work.
    """
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=100_000))
    ranks, flat = 8, torch.zeros(100, dtype=torch.uint8)
    shapes = {f"w{i}": torch.Size([ranks]) for i in range(len(flat))}
    states = {"state": {0: {f"moment {i}": flat for i in range(60)}}, "param_groups": [{"params": [0]}]}
    optim = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [flat], "optimizer_state_dict": states}
    for rank in range(ranks):
        name = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"module": {}, "param_shapes": [shapes]}, f"{name}_model_states.pt")
        torch.save({"optimizer_state_dict": optim}, f"{name}_optim_states.pt")
    with pytest.raises(LimitError, match="take too much work"):
        ckptconv.inspect(tmp_path)


def test_a_huge_version_number(tmp_path: Path) -> None:
    def change(files: Files) -> None:
        files.models[0]["ds_version"] = 1 << 20_000

    folder = write_zero(tmp_path / "run", change=change)
    assert "of DeepSpeed of an unknown version" in str(ckptconv.inspect(folder))
