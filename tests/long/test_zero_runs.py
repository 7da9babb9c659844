"""ZeRO checkpoints that DeepSpeed writes in one to four processes, compared with DeepSpeed's own programs.

The tests need DeepSpeed, which only ``.ci/zero`` installs.
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
#: ``ds_to_universal`` fails for elastic checkpoints. After round robin its fp32 weights differ from those of
#: ``zero_to_fp32``, because ``param_slice_mappings`` ignore it. Both cases are tested by further training.
_NOT_UNIVERSAL = ("sgd", "elastic", "roundrobin")


def environment() -> dict[str, str]:
    """Return the environment of a process without an accelerator."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all cases, written by one to four processes."""
    if given := os.environ.get("ZERO_RUNS"):
        return Path(given) / f"r{request.param}"
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    launch = ["-m", "torch.distributed.run", "--master_port", f"2{request.param}517", "--nproc_per_node"]
    subprocess.run(
        [sys.executable, *launch, str(request.param), str(_RUNS), str(folder)], env=environment(), check=True
    )
    return folder


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that DeepSpeed's zero_to_fp32 makes of `folder`."""
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return weights


def universal(folder: Path, target: Path) -> Path:
    """Convert the checkpoint in `folder` to the universal form, and return the folder of its parameters."""
    program = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--keep_temp_folder"]
    paths = ["--input_folder", str(folder / "global_step3"), "--output_folder", str(target)]
    subprocess.run([sys.executable, *program, *paths], env=environment(), check=True, capture_output=True)
    return target / "zero"


def of_universal(path: Path, shape: torch.Size) -> torch.Tensor:
    """Return the tensor in a file of the universal form."""
    loaded = torch.load(path, weights_only=False)
    tensor: torch.Tensor = loaded["param"] if isinstance(loaded, dict) else loaded
    return tensor.reshape(-1)[: shape.numel()].reshape(shape)


def loaded(folder: Path, target: Path, **options: Any) -> dict[str, Any]:
    """Convert `folder` to the file `target`, and return the object that torch loads from it."""
    ckptconv.convert(folder, target, **options)
    checkpoint: dict[str, Any] = torch.load(target, weights_only=True)
    return checkpoint


@pytest.mark.parametrize("case", [case for case in _SMALL if case not in _NO_REFERENCE])
def test_weights_are_those_of_zero_to_fp32(case: str, runs: Path, tmp_path: Path) -> None:
    """The weights equal those of ``zero_to_fp32`` bit for bit. Buffers keep their dtype, and frozen weights that
    ``zero_to_fp32`` leaves out are included.
    """
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
    """The moments and the fp32 weights equal those of the universal form bit for bit, by name."""
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
    """Further training with torch has the losses of the run without interruption."""
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
        group["lr"] = scheduled  # an elastic checkpoint stores it only there
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
def test_small_folders_are_like_those_of_deepspeed(case: str, runs: Path, tmp_path: Path) -> None:
    """``tests/support/zero_folders.py`` makes the same flat tensors, paddings and shapes as DeepSpeed."""
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
    """Return the numbers and tensors in nested dicts and lists by their paths.

    At stage 3 only the sizes of tensors are returned, because the padding between the weights contains arbitrary
    values.
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
    """Each group contains its parameters in the order of the run, also after a round-robin distribution to ranks. The
    epoch, the sampler and the scheduler are preserved.
    """
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
