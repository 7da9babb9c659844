"""Folders of trainers, converted as a batch. Checkpoints are retagged, and all other files stay the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptconv
from ckptconv.cli.main import main
from tests.support.command import Command
from tests.support.judge import assert_same, tags_of
from tests.support.writers import distributed
from tests.support.zero_folders import TAG, a_run, deepspeed_modules, write_zero

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the libraries


def assert_retagged(before: Path, gpu: Path, cpu: Path) -> None:
    """Fail unless `gpu` is a copy of the folder `before` on a GPU, and `cpu` a copy with the original tags.

    All tensors are compared bit for bit, and other files byte for byte.
    """
    names = sorted(str(path.relative_to(before)) for path in before.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(cpu)) for path in cpu.rglob("*") if path.is_file())
    for name in names:
        if name.endswith((".pt", ".pth", ".bin", ".pkl")):
            (original, tags), (there, there_tags), (again, again_tags) = (
                tags_of(folder / name) for folder in (before, gpu, cpu)
            )
            assert set(there_tags) <= {"cpu", "cuda:0"}
            assert_same(there, original)
            assert_same(again, original)
            assert set(tags) == set(again_tags) <= {"cpu"}
        elif not name.endswith(".safetensors"):
            assert (cpu / name).read_bytes() == (before / name).read_bytes()


def there_and_back(before: Path) -> tuple[Path, Path]:
    """Convert the folder `before` to a GPU and back to the CPU, and return both folders. Fail if a file differs."""
    gpu, cpu = before.with_name("gpu"), before.with_name("again")
    assert main(["convert", str(before), str(gpu), "--to", "cuda:0", "--copy-others", "-q"]) == 0
    assert main(["convert", str(gpu), str(cpu), "--to", "cpu", "--copy-others", "-q"]) == 0
    assert_retagged(before, gpu, cpu)
    return gpu, cpu


class Texts(torch.utils.data.Dataset[Any]):
    """A dataset of four short texts."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(5) + i
        return {"input_ids": ids, "labels": ids}


def test_a_trainers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of transformers' Trainer is moved to a GPU and back, with optimizer, scheduler, generator states and
    arguments. The training resumes from the result.
    """
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        )
        return transformers.Trainer(model, arguments, train_dataset=Texts())

    trainer(2).train()
    before = tmp_path / "run" / "checkpoint-2"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "model.safetensors"} <= {
        *os.listdir(before)
    }
    gpu, cpu = there_and_back(before)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(gpu / "optimizer.pt")
    assert tags_of(gpu / "rng_state.pth")[1] == ["cpu"] * len(tags_of(gpu / "rng_state.pth")[1])
    assert trainer(4).train(resume_from_checkpoint=str(cpu)).global_step == 4


def test_accelerates_folder(tmp_path: Path) -> None:
    """A folder of accelerate's ``save_state`` is moved to a GPU and back, and ``load_state`` reads the result."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path / "before"), safe_serialization=False)
    names = {*os.listdir(tmp_path / "before")}
    assert {"pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"} <= names
    gpu, cpu = there_and_back(tmp_path / "before")
    assert set(tags_of(gpu / "optimizer.bin")[1]) == {"cuda:0"}
    assert set(tags_of(gpu / "random_states_0.pkl")[1]) == {"cpu"}
    expected = [value.clone() for value in model.parameters()]
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(str(cpu))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_deepspeeds_ranks(tmp_path: Path, command: Command) -> None:
    """The files of DeepSpeed ranks are retagged separately. The folders before and after are still one checkpoint."""
    run = a_run()
    folder = write_zero(tmp_path / "run", run)
    (folder / "zero_to_fp32.py").touch()
    with deepspeed_modules():
        _, cpu = there_and_back(folder)
    assert (cpu / "latest").read_text() == TAG
    assert len(list((cpu / TAG).iterdir())) == 3
    for path in (folder, folder / TAG, cpu):
        command("convert", path, tmp_path / "one.pt", "--to", "cpu", "--force")
        weights = torch.load(tmp_path / "one.pt", weights_only=True)["module"]
        assert all(torch.equal(weights[name], tensor) for name, tensor in run.weights.items())


def test_lightnings_fsdp_folder(tmp_path: Path) -> None:
    """A DCP folder with an additional file becomes one file, and the additional file is converted separately."""
    folder = distributed({"model": {"w": torch.arange(5.0)}}, tmp_path / "run" / "epoch=1.ckpt")
    torch.save({"epoch": 1}, folder / "meta.pt")
    outcomes = ckptconv.convert_many(ckptconv.jobs_in(tmp_path / "run", tmp_path / "new"))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert torch.equal(torch.load(tmp_path / "new" / "epoch=1.ckpt.pt")["model"]["w"], torch.arange(5.0))
    assert torch.load(tmp_path / "new" / "epoch=1.ckpt" / "meta.pt") == {"epoch": 1}
