"""A folder in place of a file is said to be what it is, and the message says what to type."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptconv import folders, formats
from ckptconv.cli import main
from ckptconv.errors import InputError, UnsupportedError
from ckptconv.sources import Source

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty one; its name needs quotation marks."""
    path = tmp_path / "my folder"
    path.mkdir()
    return path


def fill(folder: Path, *names: str) -> None:
    """Make empty files in FOLDER, and empty folders where a name ends in a slash."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()


def error_of(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        Source(path)
    assert "a folder and not a file" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def words_of(error: InputError) -> list[str]:
    """The command in the hint, as a shell reads it."""
    return shlex.split(str(error.hint).split(": ", 1)[-1])


def run(error: InputError, folder: Path) -> None:
    """Type the command in the hint."""
    words = words_of(error)
    assert words[0] == "python"
    subprocess.run([sys.executable, "-W", "ignore", *words[1:]], check=True, cwd=folder, capture_output=True)


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

#: By what it is: names, what the message says, the words of the command.
FOLDERS: dict[str, tuple[list[str], str, list[str]]] = {
    "Hugging Face": (
        ["config.json", "pytorch_model.bin", "model.safetensors", "tokenizer.json"], "the checkpoint in it is model.safetensors",
        ["ckptconv", "inspect", "{}/model.safetensors"],
    ),
    "older Hugging Face": (["config.json", "pytorch_model.bin"], "it is pytorch_model.bin", ["ckptconv", "inspect", "{}/pytorch_model.bin"]),
    "PEFT": (["adapter_config.json", "adapter_model.safetensors"], "it is adapter_model.safetensors", ["ckptconv", "inspect", "{}/adapter_model.safetensors"]),
    "Trainer": (
        ["model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"], "it is model.safetensors",
        ["ckptconv", "inspect", "{}/model.safetensors"],
    ),
    "shards": (
        ["config.json", "model.safetensors.index.json", *SHARDS], "a checkpoint in 3 shards, which this version does not read as one",
        ["ckptconv", "convert", f"{{}}/{SHARDS[0]}", "OUT"],
    ),
    "two formats of shards": (
        ["pytorch_model-00001-of-00009.bin", *SHARDS], "a checkpoint in 3 shards", ["ckptconv", "convert", f"{{}}/{SHARDS[0]}", "OUT"],
    ),
    "shards, some missing": (SHARDS[1:2], "in 3 shards, .*; 2 of them are missing", ["ckptconv", "convert", f"{{}}/{SHARDS[1]}", "OUT"]),
    "DCP": (
        [".metadata", "__0_0.distcp", "__1_0.distcp"], "a checkpoint of torch.distributed.checkpoint",
        ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", "{}", "out.pt"],
    ),
    "DeepSpeed": (
        ["latest", "zero_to_fp32.py", "global_step9/"], "a DeepSpeed ZeRO checkpoint",
        ["python", "-m", "deepspeed.utils.zero_to_fp32", "{}", "OUT_FOLDER"],
    ),
    "inside DeepSpeed's": (
        ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"], "a DeepSpeed ZeRO checkpoint",
        ["python", "-m", "deepspeed.utils.zero_to_fp32", "{}/..", "OUT_FOLDER", "--tag", "my folder"],
    ),
    "SavedModel": (["saved_model.pb", "variables/"], "a TensorFlow SavedModel", []),
    "TensorFlow": (["checkpoint", "m.index", "m.data-00000-of-00001"], "a TensorFlow checkpoint", []),
    "Orbax": (["_CHECKPOINT_METADATA", "params/"], r"an Orbax checkpoint \(JAX\)", []),
    "Orbax, newer": (["orbax.checkpoint", "pytree/"], r"an Orbax checkpoint \(JAX\)", []),
    "Orbax, one item": (["manifest.ocdbt", "_METADATA", "d/"], r"an Orbax checkpoint \(JAX\)", []),
    "Keras": (["config.json", "metadata.json", "model.weights.h5"], "a Keras model", []),
    "checkpoints": (
        ["b.pt", "a.ckpt", "c.pth", "d.safetensors", "notes.txt"], "the checkpoints in it are a.ckpt, b.pt, c.pth and 1 more",
        ["ckptconv", "inspect", "{}/a.ckpt"],
    ),
    "checkpoints further down": (["unet/x.safetensors", "vae/y.bin", "z/"], "unet/x.safetensors, vae/y.bin", ["ckptconv", "inspect", "{}/unet/x.safetensors"]),
    "steps of Orbax": (["100/_METADATA", "200/_METADATA"], "the checkpoints in it are 100, 200", ["ckptconv", "inspect", "{}/100"]),
    "accelerate's FSDP": (
        ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "scheduler.txt"], "the checkpoints in it are pytorch_model_fsdp_0",
        ["ckptconv", "inspect", "{}/pytorch_model_fsdp_0"],
    ),
    "something else": (["a.txt", "b/", "c", "d", "e"], "no checkpoint is in it, but a.txt, b/, c and 2 more", []),
    "nothing": ([], "it is empty", []),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_each_kind_of_folder_is_named_with_its_next_step(folder: Path, kind: str) -> None:
    """By the names in it; every path in the command is whole and quoted."""
    names, what, command = FOLDERS[kind]
    fill(folder, *names)
    error = error_of(folder)
    assert isinstance(error, UnsupportedError)
    with pytest.raises(UnsupportedError, match=what):
        raise error
    if command:
        expected = [str(Path(os.path.normpath(w.format(folder)))) if "{}" in w else w for w in command]
        assert words_of(error) == expected


def test_a_git_clone_with_pointers_is_named(folder: Path) -> None:
    """Where every checkpoint in it is a pointer; else the one that is none is named."""
    fill(folder, "config.json", ".git/")
    (folder / "model.safetensors").write_bytes(LFS)
    error = error_of(folder)
    assert "a git clone in which the checkpoints are Git LFS pointers" in str(error)
    assert words_of(error) == ["git", "-C", str(folder), "lfs", "pull"]
    (folder / "pytorch_model.bin").write_bytes(b"PK" * 2000)  # this one was fetched
    assert words_of(error_of(folder)) == ["ckptconv", "inspect", str(folder / "pytorch_model.bin")]


def test_looking_for_pointers_waits_for_nobody(folder: Path) -> None:
    """A FIFO that is called a checkpoint, and a link to nowhere, are not opened."""
    os.mkfifo(folder / "a.pt")
    (folder / "b.pt").symlink_to("nowhere")
    assert "the checkpoints in it are a.pt, b.pt" in str(error_of(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_command_for_a_distributed_checkpoint_works(folder: Path) -> None:
    """torch makes one file of it, which is read here."""
    dcp.save({"w": torch.arange(5.0)}, checkpoint_id=folder, no_dist=True)
    error = error_of(folder)
    assert "torch.distributed.checkpoint" in str(error)
    run(error, folder.parent)
    with Source(folder.parent / "out.pt") as source:
        assert list(formats.read(source).tensors) == ["w"]


def test_the_command_for_an_unpacked_checkpoint_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zipped again, torch and ckptconv read it, from within the folder too."""
    file = io.BytesIO()
    torch.save({"w": torch.arange(5.0), "e": torch.zeros(0)}, file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    inside = folder / "archive"
    monkeypatch.chdir(inside)
    for path in (inside, Path(".")):
        error = error_of(path)
        assert "the records of a torch checkpoint that was unpacked" in str(error)
        run(error, folder)
        assert torch.equal(torch.load(folder / "out.pt")["w"], torch.arange(5.0))
        assert main(["convert", str(folder / "out.pt"), str(folder / "again.pt"), "--to", "cpu", "--force", "-q"]) == 0
        assert torch.equal(torch.load(folder / "again.pt", mmap=True)["w"], torch.arange(5.0))


def test_a_bounded_number_of_names_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of millions costs no more than one of thousands."""
    monkeypatch.setattr(folders, "_MOST", 10)
    fill(folder, *(f"{i}.txt" for i in range(30)))
    assert "and 7 more" in str(error_of(folder))


def test_a_folder_that_cannot_be_listed_is_an_input_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root lists everything, so the refusal is played."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    assert "a folder and not a file, which cannot be listed: Permission denied" in str(error_of(folder))


def test_names_do_not_reach_the_terminal_as_they_are(folder: Path) -> None:
    """An escape sequence, a newline, bytes that are no text, a dash in front."""
    fill(folder, "\x1b[31m.pt", "a\nb.pt", os.fsdecode(b"\xff.pt"))
    error = error_of(folder)
    assert str(error).isprintable()


def test_a_path_with_a_dash_in_front_is_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's program would take it for one."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, "-x/model.safetensors")
    assert words_of(error_of(Path("-x"))) == ["ckptconv", "inspect", "./-x/model.safetensors"]


def test_both_commands_say_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """inspect and convert end in the same line, and nothing is written."""
    fill(folder, "model.safetensors")
    assert main(["inspect", str(folder)]) == 1
    first = capsys.readouterr().err
    assert main(["convert", str(folder), str(folder / "out.pt"), "--to", "cpu"]) == 1
    assert capsys.readouterr().err == first
    assert os.listdir(folder) == ["model.safetensors"]


# What is not there


def test_a_missing_file_gets_a_near_name(folder: Path) -> None:
    """A typo, another suffix; nothing where no name is near, and for folders that are not there."""
    fill(folder, "model_best.pth", "other")
    for name in ("model_bset.pth", "model_best.pt"):
        with pytest.raises(InputError, match="No such file") as caught:
            Source(folder / name)
        assert caught.value.hint == f"is it {shlex.quote(str(folder / 'model_best.pth'))}?"
    for path in (folder / "nothing like it", folder / "no folder" / "model_best.pth"):
        with pytest.raises(InputError, match="No such file") as caught:
            Source(path)
        assert caught.value.hint is None
