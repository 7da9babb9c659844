"""Folders in the place of a file. The error describes the folder and suggests a command."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from ckptconv import inspect
from ckptconv.cli.main import main
from ckptconv.errors import InputError, UnsupportedError
from ckptconv.formats import opening
from ckptconv.formats.foreign import paths as foreign_folders
from ckptconv.formats.foreign.paths import folder_error
from ckptconv.formats.opening import open_input
from ckptconv.inspection.summary import summary_of
from ckptconv.limits import Limits
from tests.support.conversions import read
from tests.support.hostile_bytes import saved
from tests.support.paths import fill
from tests.support.writers import distributed

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder whose name needs quotation marks."""
    path = tmp_path / "my folder"
    path.mkdir()
    return path


def error_of(path: Path, words: str = "") -> InputError:
    """Return the error for the folder at `path`, which is one line that contains `words`."""
    error = folder_error(path)
    assert "a folder, not a file" in str(error)
    assert "\n" not in str(error)
    assert words in str(error)
    return error


def words_of(error: InputError) -> list[str]:
    """Return the words of the command in the hint, as a shell reads them."""
    return shlex.split(str(error.hint).split(": ", 1)[-1].split("; or convert all of them: ")[0])


def run(error: InputError, folder: Path) -> None:
    """Run the command in the hint of `error` in `folder`."""
    words = words_of(error)
    program = {"python": ["-W", "ignore"], "ckptconv": ["-m", "ckptconv"]}[words[0]]
    subprocess.run([sys.executable, *program, *words[1:]], check=True, cwd=folder, capture_output=True)


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]

#: For each kind of folder in FOLDERS: the names in it, a pattern of the error, and the words of the command.


def megatron(run: str) -> list[str]:
    """Return the command that merges the checkpoint of Megatron-LM in the folder `run`."""
    sizes = ["--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1"]
    script = ["python", "/PATH/TO/Megatron-LM/tools/checkpoint/convert.py", "--model-type", "GPT"]
    return [*script, "--load-dir", run, "--save-dir", "OUT_FOLDER", *sizes]


FOLDERS: dict[str, tuple[list[str], str, list[str]]] = {
    "Hugging Face": (
        ["config.json", "pytorch_model.bin", "model.safetensors", "tokenizer.json"],
        "the checkpoint in it is model.safetensors",
        ["{}/model.safetensors"],
    ),
    "older Hugging Face": (["config.json", "pytorch_model.bin"], "it is pytorch_model.bin", ["{}/pytorch_model.bin"]),
    "PEFT": (
        ["adapter_config.json", "adapter_model.safetensors"],
        "it is adapter_model.safetensors",
        ["{}/adapter_model.safetensors"],
    ),
    "Trainer": (
        [
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
            "trainer_state.json",
            "training_args.bin",
        ],
        "the model in it is model.safetensors, next to optimizer.pt, rng_state.pth, scheduler.pt and 1 more",
        ["{}/model.safetensors"],
    ),
    "DCP": (
        [".metadata", "__0_0.distcp", "__1_0.distcp"],
        "a checkpoint of torch.distributed.checkpoint",
        ["ckptconv", "convert", "{}", "out.pt"],
    ),
    "DeepSpeed": (
        ["latest", "zero_to_fp32.py", "global_step9/"],
        "a DeepSpeed ZeRO checkpoint without the files of its ranks",
        [],
    ),
    "Megatron": (
        ["latest_checkpointed_iteration.txt", "iter_0000005/mp_rank_00/a", "iter_0000005/mp_rank_01/a"],
        "a checkpoint of Megatron-LM",
        megatron("{}"),
    ),
    "inside Megatron's": (["mp_rank_00_000/a", "mp_rank_00_001/a"], "a checkpoint of Megatron-LM", megatron("{}/..")),
    "SavedModel": (["saved_model.pb", "variables/"], "a TensorFlow SavedModel", []),
    "TensorFlow": (["checkpoint", "m.index", "m.data-00000-of-00001"], "a TensorFlow checkpoint", []),
    "Orbax": (["_CHECKPOINT_METADATA", "params/"], r"an Orbax checkpoint \(JAX\)", []),
    "Orbax, newer": (["orbax.checkpoint", "pytree/"], r"an Orbax checkpoint \(JAX\)", []),
    "Orbax, one item": (["manifest.ocdbt", "_METADATA", "d/"], r"an Orbax checkpoint \(JAX\)", []),
    "Keras": (["config.json", "metadata.json", "model.weights.h5"], "a Keras model", []),
    "checkpoints": (
        ["b.pt", "a.ckpt", "c.pth", "d.safetensors", "notes.txt"],
        "the checkpoints in it are a.ckpt, b.pt, c.pth and 1 more",
        ["{}/a.ckpt"],
    ),
    "checkpoints further down": (
        ["unet/x.safetensors", "vae/y.bin", "z/"],
        "unet/x.safetensors, vae/y.bin",
        ["{}/unet/x.safetensors"],
    ),
    "the Hub's cache": (
        [
            "models--a--b/blobs/0a1b",
            "models--a--b/refs/main",
            *(f"models--a--b/snapshots/abc/{name}" for name in SHARDS),
        ],
        "the checkpoint in it is models--a--b/snapshots/abc;",
        ["{}/models--a--b/snapshots/abc"],
    ),
    "accelerate's random states": (
        ["a/b/random_states_0.pkl"],
        "it is a/b/random_states_0.pkl",
        ["{}/a/b/random_states_0.pkl"],
    ),
    "steps of Orbax": (["100/_METADATA", "200/_METADATA"], "the checkpoints in it are 100, 200", ["{}/100"]),
    "accelerate's FSDP": (
        ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "scheduler.txt"],
        "the checkpoint in it is pytorch_model_fsdp_0",
        ["{}/pytorch_model_fsdp_0"],
    ),
    "shards, none of them": (
        ["x-00000-of-00000.bin"],
        "the checkpoint in it is x-00000-of-00000.bin",
        ["{}/x-00000-of-00000.bin"],
    ),
    "something else": (["a.txt", "b/", "c", "d", "e"], "it contains no checkpoint, only a.txt, b/, c and 2 more", []),
    "nothing": ([], "it is empty", []),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_each_kind_of_folder_is_named_with_its_next_step(folder: Path, kind: str) -> None:
    """Each kind of folder is recognized by the names in it. Every path in the command is complete and quoted."""
    names, what, command = FOLDERS[kind]
    fill(folder, *names)
    error = error_of(folder)
    assert isinstance(error, UnsupportedError)
    with pytest.raises(UnsupportedError, match=what):
        raise error
    if command:
        expected = [str(Path(os.path.normpath(w.format(folder)))) if "{}" in w else w for w in command]
        assert words_of(error) == expected


def test_all_checkpoints_of_a_folder_can_be_converted(folder: Path) -> None:
    """For several checkpoints at any depth, the hint also contains a command for the complete folder, and this command
    works. It ignores links and hidden folders. The hint does not contain this command if one of the checkpoints cannot
    be converted.
    """
    for name in ("run/a.pt", "run/step-1/b.PT", "run/.old/c.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.ones(1)}, folder / name)
    (folder / "run" / "link").symlink_to("step-1")
    error = error_of(folder / "run", "the checkpoints in it are a.pt, step-1/b.PT; give one")
    command = str(error.hint).split("; or convert all of them: ")[1]
    subprocess.run(
        ["bash", "-c", command.replace("ckptconv", f"{sys.executable} -m ckptconv", 1)],
        check=True,
        cwd=folder,
        capture_output=True,
    )
    assert sorted(str(path.relative_to(folder / "OUT_FOLDER")) for path in (folder / "OUT_FOLDER").rglob("*.*")) == [
        "a.pt",
        "step-1/b.PT",
    ]
    fill(folder / "run", "orbax/_METADATA")
    assert "convert all" not in str(error_of(folder / "run").hint)


def test_a_git_clone_with_pointers_is_named(folder: Path) -> None:
    """A folder is described as a git clone with pointers if each checkpoint in it is a Git LFS pointer. Otherwise the
    error names the checkpoint that is not a pointer.
    """
    fill(folder, "config.json", ".git/")
    (folder / "model.safetensors").write_bytes(LFS)
    error = error_of(folder, "a git clone in which the checkpoints are Git LFS pointers")
    assert "fetch it with Git LFS in your own clone" in str(error.hint)
    (folder / "pytorch_model.bin").write_bytes(b"PK" * 2000)  # this one was fetched
    assert words_of(error_of(folder)) == [str(folder / "pytorch_model.bin")]


def test_search_for_pointers_does_not_block(folder: Path) -> None:
    """A FIFO or a broken link with the name of a checkpoint is not opened. A link to a file counts as a checkpoint."""
    os.mkfifo(folder / "a.pt")
    (folder / "b.pt").symlink_to("nowhere")
    os.mkfifo(folder / "model.safetensors")
    error_of(folder, "it contains no checkpoint, only a.pt, b.pt, model.safetensors;")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "x").touch()
    (folder / "pytorch_model.bin").symlink_to("elsewhere/x")
    error_of(folder, "the checkpoint in it is pytorch_model.bin")


def test_a_link_to_itself_is_a_name_like_others(folder: Path) -> None:
    """The system cannot determine the type of a link to itself. The link is only listed, and the other names
    are used.
    """
    fill(folder, "model.pt")
    (folder / "x").symlink_to("x")
    assert words_of(error_of(folder)) == [str(folder / "model.pt")]
    (folder / "model.pt").unlink()
    error_of(folder, "it contains no checkpoint, only x;")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_command_for_a_distributed_checkpoint_works(folder: Path) -> None:
    """The suggested command converts a distributed checkpoint to one file."""
    distributed({"w": torch.arange(5.0)}, folder)
    run(error_of(folder, "torch.distributed.checkpoint"), folder.parent)
    assert list(read(folder.parent / "out.pt").tensors) == ["w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_parts_of_a_distributed_checkpoint_get_the_folders_command(folder: Path) -> None:
    """The error for a part of a distributed checkpoint suggests the command for its folder. A part without the others
    is recognized by its content.
    """
    distributed({"w": torch.arange(5.0)}, folder)
    expected = words_of(error_of(folder))
    parts = sorted(os.listdir(folder))
    assert parts == [".metadata", "__0_0.distcp"]
    for name in parts:
        with pytest.raises(UnsupportedError, match=r"a part of a checkpoint of torch\.distributed") as caught:
            summary_of(folder / name)
        assert words_of(caught.value) == expected
    (folder / ".metadata").rename(folder.parent / ".metadata")
    assert inspect(folder / "__0_0.distcp").devices == {"cpu": mock.ANY}  # a file of one tensor is a checkpoint
    with pytest.raises(UnsupportedError, match=r"a pickle"):
        inspect(folder.parent / ".metadata")


def test_the_command_for_an_unpacked_checkpoint_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suggested command zips the records of an unpacked checkpoint again, also from inside their folder. Torch and
    ckptconv read the result.
    """
    with zipfile.ZipFile(io.BytesIO(saved({"w": torch.arange(5.0), "e": torch.zeros(0)}))) as archive:
        archive.extractall(folder)
    inside = folder / "archive"
    monkeypatch.chdir(inside)
    for path in (inside, Path(".")):
        run(error_of(path, "the records of a torch checkpoint that was unpacked"), folder)
        assert torch.equal(torch.load(folder / "out.pt")["w"], torch.arange(5.0))
        assert main(["convert", str(folder / "out.pt"), str(folder / "again.pt"), "--to", "cpu", "--force", "-q"]) == 0
        assert torch.equal(torch.load(folder / "again.pt", mmap=True)["w"], torch.arange(5.0))


def test_a_bounded_number_of_names_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of names that are read from a folder is bounded."""
    monkeypatch.setattr(foreign_folders, "LIMITS", Limits(folder_names=10))
    fill(folder, *(f"{i}.txt" for i in range(30)))
    error = error_of(folder, "there is no checkpoint among the first 10 names in it, only")
    assert "and 7 more" in str(error)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["model.safetensors"], "the checkpoint in it is model.safetensors"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        (["data.pkl", "data/"], "the records of a torch checkpoint"),
        (["zero_to_fp32.py", "latest"], "DeepSpeed"),
        (["saved_model.pb"], "SavedModel"),
        (["_CHECKPOINT_METADATA"], "Orbax"),
        (["model.weights.h5"], "Keras"),
        (["a.pt"], "there is no checkpoint among the first 10 names in it"),
    ],
)
def test_well_known_names_are_found_in_a_listing_that_was_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], what: str
) -> None:
    """Well-known names are found, even if the listing ends before them. The error claims nothing about other names."""
    fill(folder, *(f"{i}.txt" for i in range(10)))
    first_come_first(monkeypatch)
    fill(folder, *names)
    error_of(folder, what)


def test_error_for_a_listing_that_was_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a complete listing, the only checkpoint is named. If the listing was cut, the error contains the number of
    names that were read.
    """
    fill(folder, "0.pt", *(f"{i}.txt" for i in range(10)))
    monkeypatch.setattr(foreign_folders, "LIMITS", Limits(folder_names=11))
    error_of(folder, "the checkpoint in it is 0.pt; use its path:")
    fill(folder, *(f"{i}.pt" for i in range(1, 11)))
    error_of(folder, "among the first 11 names in it")


def first_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make folders list text files first, and limit a listing to ten names."""
    scandir = os.scandir

    @contextlib.contextmanager
    def ordered(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(path) as entries:
            yield iter(sorted(entries, key=lambda entry: not entry.name.endswith(".txt")))

    monkeypatch.setattr(foreign_folders, "LIMITS", Limits(folder_names=10))
    monkeypatch.setattr(os, "scandir", ordered)


def test_a_folder_that_cannot_be_listed_is_an_input_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed raises an InputError. The system's refusal is simulated, because root can list
    every folder.
    """
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    error_of(folder, "a folder, not a file, which cannot be listed: Permission denied")


def test_names_are_printable_in_the_error(folder: Path) -> None:
    """The error contains no escape sequences, newlines or bytes that are not text."""
    fill(folder, "\x1b[31m.pt", "a\nb.pt", os.fsdecode(b"\xff.pt"))
    assert str(error_of(folder)).isprintable()


def test_a_path_with_a_leading_dash_is_not_an_option(here: Path) -> None:
    """In the command, a path with a leading dash begins with ``./``, because the program would take it for an
    option.
    """
    fill(here, "-x/model.safetensors")
    assert words_of(error_of(Path("-x"))) == ["./-x/model.safetensors"]


def test_both_commands_print_the_same_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``inspect`` and ``convert`` print the same line, and nothing is written."""
    fill(folder, "config.json")
    assert main(["inspect", str(folder)]) == 1
    first = capsys.readouterr().err
    assert main(["convert", str(folder), str(folder / "out.pt"), "--to", "cpu"]) == 1
    assert capsys.readouterr().err == first
    assert os.listdir(folder) == ["config.json"]


# Missing files


def hint_for(path: Path) -> str | None:
    """Return the hint for `path`, which does not exist."""
    with pytest.raises(InputError, match="No such file") as caught, open_input(path) as source:
        opening.read(source)
    return caught.value.hint


def is_it(path: Path) -> str:
    """Return the hint that suggests `path`, quoted for a shell."""
    return f"is it {shlex.quote(str(path))}?"


def test_a_missing_file_gets_a_near_name(folder: Path) -> None:
    """The hint for a missing file suggests a similar name, which can have another suffix. There is no hint if no name
    is similar, or if the folder is missing. The hint for the name of an index is the same as for any file.
    """
    fill(folder, "model_best.pth", "other", "model.safetensors.index.json")
    for name in ("model_bset.pth", "model_best.pt"):
        assert hint_for(folder / name) == is_it(folder / "model_best.pth")
    assert hint_for(folder / "model.safetensor.index.json") == is_it(folder / "model.safetensors.index.json")
    for path in (folder / "nothing like it", folder / "no folder" / "model_best.pth"):
        assert hint_for(path) is None


def test_a_folder_with_the_name_of_a_shard_is_reported(folder: Path) -> None:
    """A folder with the name of a shard is reported as a folder, with its contents."""
    fill(folder, "model-00001-of-00001.safetensors/")
    with open_input(folder) as source, pytest.raises(InputError, match="a folder, not a file: it is empty"):
        opening.read(source)


def test_a_near_name_is_found_in_a_listing_that_was_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well-known names, and the same name with another suffix, are suggested even if the listing ends before them."""
    fill(folder, *(f"{i}.txt" for i in range(10)))
    first_come_first(monkeypatch)
    fill(folder, "model.safetensors", "epoch_12.ckpt")
    assert hint_for(folder / "model.safetensor") == is_it(folder / "model.safetensors")
    assert hint_for(folder / "epoch_12.pt") == is_it(folder / "epoch_12.ckpt")


def test_an_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty path, for example from an unset variable, is reported and does not mean the current folder."""
    for arguments in (["inspect", ""], ["convert", "", "out.pt", "--to", "cpu"]):
        assert main(arguments) == 1
        assert "no path given" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["two\nlines's", os.fsdecode(b"\xff\xfe\\x"), "\x1b[31m ä", "\u202e'$(x)'", "plain", "a 'b'"]
)
def test_a_shell_reads_the_path_in_the_message(folder: Path, name: str) -> None:
    """A shell that reads the path in the message finds the same file. The names contain newlines, bytes that are not
    UTF-8, and characters that reverse the direction of text.
    """
    fill(folder, f"{name}/model.safetensors")
    command = str(error_of(folder / name)).rsplit("give that file: ", 1)[1]
    found = subprocess.run(["bash", "-c", f"stat -c %i -- {command}"], check=True, capture_output=True).stdout
    assert int(found) == (folder / name / "model.safetensors").stat().st_ino


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"],
            "a checkpoint of Megatron-LM; if you trust who made it, for it can run code, let Megatron",
        ),
        (
            ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"],
            "a DeepSpeed ZeRO checkpoint; make it one file: ckptconv.convert(",
        ),
    ],
)
def test_a_single_part(names: list[str], words: str, tmp_path: Path) -> None:
    """``inspect`` describes a file of one rank as a part and suggests a command that merges all parts. The name of such
    a file alone does not make it a part.
    """
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    assert any(f"one rank's part of {words}" in note for note in inspect(tmp_path / names[0]).notes)
    torch.save({"w": torch.ones(2)}, tmp_path / "model_optim_rng.pt")
    assert not inspect(tmp_path / "model_optim_rng.pt").notes
