"""ZeRO checkpoints that DeepSpeed writes in one to four processes, judged by DeepSpeed's own programs.

It needs DeepSpeed, which only ``.ci/zero`` installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.zero_folders import Saved, write_zero
from tests.support.zero_runs import CASES, Net, groups_of, loss_of

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.filterwarnings("ignore")

_RUNS = Path(__file__).parents[1] / "support" / "zero_runs.py"
_SMALL = [case for case in CASES if not case.startswith("large")]
_NO_REFERENCE = ("bf16-optimizer",)  # zero_to_fp32 reads no files of this optimizer
#: ``ds_to_universal`` ends with an error for elastic checkpoints, and its own fp32 weights are not those of
#: ``zero_to_fp32`` after round robin: ``param_slice_mappings`` do not follow it. Both are judged by training on.
_NOT_UNIVERSAL = ("sgd", "elastic", "roundrobin")


def environment() -> dict[str, str]:
    """The environment of a process that has no accelerator."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all cases, written by so many processes, with the universal form of each."""
    if given := os.environ.get("ZERO_RUNS"):
        return Path(given) / f"r{request.param}"
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    launch = ["-m", "torch.distributed.run", "--master_port", f"2{request.param}517", "--nproc_per_node"]
    subprocess.run(
        [sys.executable, *launch, str(request.param), str(_RUNS), str(folder)], env=environment(), check=True
    )
    return folder


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's zero_to_fp32 makes of `folder`."""
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return weights


def universal(folder: Path, target: Path) -> Path:
    """The folder of parameters in the universal form of the checkpoint in `folder`."""
    program = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--keep_temp_folder"]
    paths = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(target)]
    subprocess.run([sys.executable, *program, *paths], env=environment(), check=True, capture_output=True)
    return target / "zero"


def of_universal(path: Path, shape: torch.Size) -> torch.Tensor:
    """The tensor in a file of the universal form."""
    loaded = torch.load(path, weights_only=False)
    tensor: torch.Tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    return tensor.reshape(-1)[: shape.numel()].reshape(shape)


def loaded(folder: Path, target: Path, **options: Any) -> dict[str, Any]:
    """What torch loads of the file that `folder` becomes."""
    ckptconv.convert(folder, target, **options)
    checkpoint: dict[str, Any] = torch.load(target, weights_only=True)
    return checkpoint


@pytest.mark.parametrize("case", [case for case in _SMALL if case not in _NO_REFERENCE])
def test_weights_are_those_of_zero_to_fp32(case: str, runs: Path, tmp_path: Path) -> None:
    """Bit for bit, in each name. Buffers keep their dtype, and the weights that the reference leaves out are there."""
    expected = reference(runs / case)
    ours = loaded(runs / case, tmp_path / "out.pt")["module"]
    saved = Net().state_dict()
    assert ours.keys() == saved.keys()
    for name, tensor in ours.items():
        assert tensor.shape == saved[name].shape
        if name in expected:
            assert torch.equal(tensor.float(), expected[name].float()), name
            assert tensor.dtype == (saved[name].dtype if name in ("mask", "shift") else expected[name].dtype)
    assert ours.keys() - expected.keys() <= ({"up.weight", "down.weight"} if case == "stage1-frozen" else set())
    assert ours["head.weight"].data_ptr() == ours["embed.weight"].data_ptr()


@pytest.mark.parametrize("case", [case for case in _SMALL if not case.endswith(_NOT_UNIVERSAL)])
def test_moments_are_those_of_the_universal_form(case: str, runs: Path, tmp_path: Path) -> None:
    """Bit for bit, by name; the fp32 weights too."""
    folder = universal(runs / case, tmp_path / "universal")
    ours = loaded(runs / case, tmp_path / "out.pt")
    state = ours["optimizer"]["state"]
    for name, values in state.items():
        shape = ours["module"][name].shape
        assert values["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values[key], of_universal(folder / name / f"{key}.pt", shape)), (name, key)
        assert torch.equal(ours["module"][name], of_universal(folder / name / "fp32.pt", shape)), name
    trained = {name for each in ours["optimizer"]["param_groups"] for name in each["params"]}
    assert state.keys() == trained


@pytest.mark.parametrize("case", [case for case in _SMALL if "fp32" in case])
def test_training_goes_on(case: str, runs: Path, tmp_path: Path) -> None:
    """The losses of the next steps are those of the run that was not interrupted."""
    ours = loaded(runs / case, tmp_path / "out.pt")
    net = Net()
    net.load_state_dict(ours["module"])
    optimizer = torch.optim.AdamW(groups_of(net, CASES[case].get("run", {})))
    fresh = optimizer.state_dict()["param_groups"]
    names = [name for group in ours["optimizer"]["param_groups"] for name in group["params"]]
    state = {i: ours["optimizer"]["state"][name] for i, name in enumerate(names)}
    saved = ours["optimizer"]["param_groups"]
    groups = [{**new, **old, "params": new["params"]} for new, old in zip(fresh, saved, strict=True)]
    for group, scheduled in zip(groups, ours["lr_scheduler"]["_last_lr"], strict=True):
        group["lr"] = scheduled  # which an elastic checkpoint has nowhere else
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    losses = []
    for step in range(3, 5):
        loss = loss_of(net, step)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == pytest.approx(torch.load(runs / f"{case}.losses.pt"), rel=1e-6)


@pytest.mark.parametrize("case", ["stage2", "stage2-roundrobin", "stage2-aligned", "stage3", "stage3-subgroups"])
def test_the_small_folders_of_other_tests_are_like_these(case: str, runs: Path, tmp_path: Path) -> None:
    """``tests/support/zero_folders.py`` makes the flat tensors, paddings and shapes that DeepSpeed makes."""
    ours = loaded(runs / case, tmp_path / "out.pt")
    state, groups = ours["optimizer"]["state"], [group["params"] for group in ours["optimizer"]["param_groups"]]
    weights = {name: ours["module"][name] for name in state}
    moments = {key: {name: values[key] for name, values in state.items()} for key in ("exp_avg", "exp_avg_sq")}
    buffers = {name: ours["module"][name] for name in ("mask", "shift")}
    run = Saved(weights, moments, groups, buffers, {"head.weight": "embed.weight"}, {})
    zero = CASES[case]["zero"]
    ranks = len(list((runs / case / "global_step3").glob("*optim_states.pt")))
    kind = {"stage": zero["stage"], "ranks": ranks, "sub_group": zero.get("sub_group_size", 1 << 30)}
    kind |= {"aligned": "parameter_alignment" in zero, "round_robin": "round_robin_gradients" in zero}
    made = write_zero(tmp_path / "made", run, **kind)
    for rank in range(ranks):
        name = f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        theirs, like = (torch.load(each / name, weights_only=False) for each in (runs / case, made))
        facts = [_facts(each["optimizer_state_dict"], stage=zero["stage"]) for each in (like, theirs)]
        assert facts[0] == {path: facts[1][path] for path in facts[0]}
    model = "zero_pp_rank_0_" if zero["stage"] == 3 else ""
    name = f"global_step3/{model}mp_rank_00_model_states.pt"
    theirs, like = (torch.load(each / name, weights_only=False) for each in (runs / case, made))
    shapes = [{n: s for group in each["param_shapes"] for n, s in group.items()} for each in (theirs, like)]
    assert shapes[0] == shapes[1]  # with sub-groups, DeepSpeed has a dict for each of them
    for key in ("shared_params", "buffer_names", "mp_world_size", "dp_world_size"):
        assert theirs[key] == like[key], key


def _facts(value: Any, path: str = "", *, stage: int) -> dict[str, Any]:
    """The numbers and tensors in nested dicts and lists, by their paths; names of parameters apart.

    At stage 3 the padding, which is between the weights, has any values, so that only the sizes count.
    """
    if isinstance(value, dict) and "slice_mappings" not in path:
        return {k: v for key, each in value.items() for k, v in _facts(each, f"{path}/{key}", stage=stage).items()}
    if isinstance(value, list):
        return {k: v for i, each in enumerate(value) for k, v in _facts(each, f"{path}/{i}", stage=stage).items()}
    if isinstance(value, torch.Tensor):
        return {path: list(value.shape) if stage == 3 else value.tolist()}
    return {path: value} if isinstance(value, int) and "lr" not in path and "overflow" not in path else {}


@pytest.mark.parametrize("case", _SMALL)
def test_groups_are_those_of_the_run(case: str, runs: Path, tmp_path: Path) -> None:
    """Each group has its parameters in the order in which the run gave them, also after a deal to ranks."""
    ours = loaded(runs / case, tmp_path / "out.pt")
    net = Net()
    names = {id(each): name for name, each in net.named_parameters()}
    expected = [[names[id(each)] for each in group["params"]] for group in groups_of(net, CASES[case].get("run", {}))]
    groups = ours["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == expected
    assert all(group.keys() == {"params"} or group["lr"] in (3e-3, 1e-3) for group in groups)
    assert ours["epoch"] == 3
    assert ours["sampler"] == {"seed": 7}
    assert ours["lr_scheduler"]["last_epoch"] == 3
