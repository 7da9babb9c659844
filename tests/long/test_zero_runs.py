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
