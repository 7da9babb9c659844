"""Tests of the conversion of a folder that contains a sharded set. The other checkpoints of the folder are converted
too, and the complete output folder appears at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import Report
from ckptconv.conversion.targets import list_requests
from ckptconv.errors import CkptconvError, NoMatchError, RefusedError
from ckptconv.output import folders
from tests.support import dcp_ranks
from tests.support.command import Command

SET = [
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model.safetensors.index.json",
]


def weights(prefix: str = "module.") -> dict[str, torch.Tensor]:
    return {f"{prefix}{i}.weight": torch.arange(100.0) + i for i in range(6)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a training output: a folder with a model in three shards, its optimizer, a single-file model and text
    files.
    """
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    save_torch_state_dict(weights(), folder, max_shard_size=850)
    step = {0: {"exp_avg": torch.ones(3), "step": torch.tensor(2.0)}}
    torch.save({"state": step, "param_groups": [{"params": [0]}]}, folder / "optimizer.pt")
    torch.save({"module.w": torch.zeros(2)}, folder / "inner" / "ema.pt")
    (folder / "config.json").write_text("{}")
    (folder / "inner" / "vocab.txt").write_text("a b")
    return folder


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def has_note(report: Report, words: str) -> bool:
    return any(words in note for note in report.notes)


def load_set(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the set in `folder`, by its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: load_file(folder / shard)[name] for name, shard in index["weight_map"].items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [*found] == [*expected]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoints_next_to_a_set_are_converted(model: Path, tmp_path: Path) -> None:
    """The set keeps its shards, and checkpoints next to it and below it are converted. The report names other files as
    left.
    """
    out = tmp_path / "out"
    report = convert(model, out, strip_prefix="module.", map_location="cuda:1")
    assert tree(out) == sorted([*SET, "optimizer.pt", "inner/ema.pt"])
    assert_equal(load_set(out), weights(""))
    assert [*torch.load(out / "inner" / "ema.pt", map_location="cpu")] == ["w"]
    optimizer = torch.load(out / "optimizer.pt", map_location=lambda storage, tag: storage)
    assert torch.equal(optimizer["state"][0]["exp_avg"], torch.ones(3))
    assert report.changes.devices == {("cpu", "cuda:1"): (3, 24)}
    assert [*report.files] == [(str(p), (out / p).stat().st_size) for p, _ in report.files]
    assert report.size == sum(size for _, size in report.files)
    assert has_note(report, "2 other files left: config.json, inner/vocab.txt")
    assert "optimizer.pt: strip_prefix='module.' matches nothing there" in report.notes
    assert any(note.startswith("model.safetensors.index.json: no device was changed") for note in report.notes)
    assert report.formats == ("sharded safetensors and torch zip",) * 2


def test_others_are_copied_when_asked(model: Path, tmp_path: Path) -> None:
    """``copy_others`` copies all files byte for byte, and the report names no file as left."""
    report = convert(model, tmp_path / "out", copy_others=True)
    assert tree(tmp_path / "out") == tree(model)
    assert (tmp_path / "out" / "inner" / "vocab.txt").read_text() == "a b"
    assert not has_note(report, "left")


def test_an_index_as_input_converts_only_the_set(model: Path, tmp_path: Path) -> None:
    """If the input is the index of a set, only the set is converted. ``copy_others`` then copies only files that are
    not checkpoints.
    """
    index = model / "model.safetensors.index.json"
    convert(index, tmp_path / "out")
    assert tree(tmp_path / "out") == SET
    convert(index, tmp_path / "more", copy_others=True)
    assert tree(tmp_path / "more") == sorted([*SET, "config.json"])


def test_in_place(model: Path) -> None:
    """A folder can be converted onto itself with ``force``. Other files, hidden folders, links, empty folders and modes
    are not changed.
    """
    (model / ".cache" / "hub").mkdir(parents=True)
    (model / ".cache" / "hub" / "lock").write_text("x")
    (model / "empty").mkdir(mode=0o700)
    (model / "link").symlink_to("../elsewhere")
    os.mkfifo(model / "fifo")
    (model / "config.json").chmod(0o600)
    (model / "inner").chmod(0o700)
    with pytest.raises(CkptconvError, match="force=True"):
        convert(model, model, strip_prefix="module.")
    before, stat = tree(model), (model / "config.json").stat()
    convert(model, model, strip_prefix="module.", force=True)
    assert tree(model) == before
    assert_equal(load_set(model), weights(""))
    after = (model / "config.json").stat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (stat.st_ino, stat.st_mode, stat.st_mtime_ns)
    assert [oct((model / name).stat().st_mode & 0o777) for name in ("empty", "inner")] == ["0o700", "0o700"]
    assert (os.readlink(model / "link"), (model / "fifo").is_fifo()) == ("../elsewhere", True)
    assert os.listdir(model.parent) == ["model"]


def test_in_place_with_other_shards(model: Path) -> None:
    """In a conversion in place, a different number of shards replaces the old shards."""
    convert(model, model, max_shard_size="1700", force=True, copy_others=True)
    assert tree(model) == sorted(
        [
            "config.json",
            "inner/ema.pt",
            "inner/vocab.txt",
            "optimizer.pt",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
    )
    assert_equal(load_set(model), weights())


def test_an_older_model_is_replaced_and_other_files_are_not(model: Path, tmp_path: Path) -> None:
    """With ``force``, an existing set under the Hub's names is replaced, whatever its number of shards. An output
    folder with other files is refused.
    """
    out = tmp_path / "out"
    convert(model, out, max_shard_size="450")
    assert len(tree(out)) == 9
    convert(model, out, force=True)
    assert tree(out) == sorted([*SET, "optimizer.pt", "inner/ema.pt"])
    (out / "results.csv").write_text("mine")
    with pytest.raises(RefusedError, match=r"results\.csv"):
        convert(model, out, force=True)
    assert (out / "results.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"strip_prefix": "modul."}, "modul"),
        ({"rename": [("^modul_", "")]}, "modul_"),
        ({"exclude": "*.bias"}, "bias"),
        ({"dtype": {"*.bias": "bf16"}}, "bias"),
    ],
    ids=["strip", "rename", "exclude", "dtype"],
)
def test_an_edit_that_matches_nowhere_is_an_error(model: Path, tmp_path: Path, edit: dict[str, Any], said: str) -> None:
    """An edit that matches in no checkpoint of the folder is an error. The error is about the edit, although one
    checkpoint cannot be read.
    """
    (model / "bad.pt").write_bytes((model / "optimizer.pt").read_bytes()[:-50])
    with pytest.raises(NoMatchError, match=said):
        convert(model, tmp_path / "out", **edit)
    assert not (tmp_path / "out").exists()


def test_an_edit_may_match_in_only_one_checkpoint(model: Path, tmp_path: Path) -> None:
    """An edit may match in only one checkpoint of the folder."""
    torch.save({"module.w": torch.zeros(2), "bias": torch.ones(1)}, model / "inner" / "ema.pt")
    report = convert(model, tmp_path / "out", exclude="bias")
    assert report.failed == ()
    assert [*torch.load(tmp_path / "out" / "inner" / "ema.pt")] == ["module.w"]
    assert_equal(load_set(tmp_path / "out"), weights())


def test_a_damaged_checkpoint_next_to_a_set(model: Path, tmp_path: Path, command: Command) -> None:
    """A damaged checkpoint next to the set is left out and reported, and the command exits with status 3."""
    (model / "bad.pt").write_bytes((model / "optimizer.pt").read_bytes()[:-50])
    report = convert(model, tmp_path / "out", copy_others=True)
    assert [Path(path).name for path, _ in report.failed] == ["bad.pt"]
    assert "bad.pt" not in tree(tmp_path / "out")
    assert tree(tmp_path / "out") == sorted(set(tree(model)) - {"bad.pt"})
    command("convert", model, tmp_path / "again", status=3, err="bad.pt")
    (model / "bad.pt").unlink()
    command("convert", model, tmp_path / "more")


def test_a_damaged_checkpoint_is_kept_in_place(model: Path) -> None:
    """In a conversion in place, a checkpoint that cannot be converted is kept and reported."""
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02 not a pickle")
    report = convert(model, model, strip_prefix="module.", force=True)
    assert [Path(path).name for path, _ in report.failed] == ["pytorch_model.bin"]
    assert (model / "pytorch_model.bin").read_bytes() == b"\x80\x02 not a pickle"
    assert_equal(load_set(model), weights(""))


def test_a_set_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    """If a shard is missing, the complete conversion fails and writes nothing. An output without its model would look
    complete.
    """
    (model / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CkptconvError, match="model-00002-of-00003"):
        convert(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_sets_in_one_folder(tmp_path: Path) -> None:
    """A folder with a model in both formats of the Hub becomes a folder with both."""
    folder = tmp_path / "model"
    for safe in (True, False):
        (tmp_path / str(safe)).mkdir()
        save_torch_state_dict(weights(), tmp_path / str(safe), max_shard_size=850, safe_serialization=safe)
        shutil.copytree(tmp_path / str(safe), folder, dirs_exist_ok=True)
    convert(folder, tmp_path / "out", strip_prefix="module.")
    assert tree(tmp_path / "out") == tree(folder)
    assert_equal(load_set(tmp_path / "out"), weights(""))
    assert [*torch.load(tmp_path / "out" / "pytorch_model-00001-of-00003.bin")] == ["0.weight", "1.weight"]


def test_threads_write_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """The output does not depend on the number of threads."""
    for jobs in (1, 3):
        convert(model, tmp_path / str(jobs), map_location="cpu", copy_others=True, jobs=jobs)
    files = tree(tmp_path / "1")
    assert tree(tmp_path / "3") == files
    assert all((tmp_path / "1" / path).read_bytes() == (tmp_path / "3" / path).read_bytes() for path in files)


def test_a_dry_run_writes_nothing_and_reports_the_same(model: Path, tmp_path: Path) -> None:
    """A dry run gives the report of the conversion and writes nothing."""
    planned = convert(model, tmp_path / "out", strip_prefix="module.", dry_run=True)
    assert not (tmp_path / "out").exists()
    done = convert(model, tmp_path / "out", strip_prefix="module.")

    def said(report: Report) -> tuple[object, ...]:
        return report.files, report.size, report.changes, report.notes, report.left_behind, report.formats

    assert said(planned) == said(done)


def test_an_output_of_links_is_followed_to_its_folder(model: Path, tmp_path: Path) -> None:
    """If the output is a link to a folder, the link is kept and the folder that it leads to is replaced."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert set(SET) <= {*tree(tmp_path / "real")}


def test_the_working_directory_as_input_and_output(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory ``.`` can be input and output."""
    monkeypatch.chdir(model)
    convert(".", ".", strip_prefix="module.", force=True)
    monkeypatch.chdir(model.parent)
    assert_equal(load_set(model), weights(""))
    assert os.listdir(model.parent) == ["model"]


def test_changed_sources_are_detected(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkpoint next to the set changes during the conversion, there is no output."""
    real: Callable[..., Any] = folders.fill

    def touch(path: Path, *args: Any, **options: Any) -> Any:
        os.utime(model / "optimizer.pt", ns=(1, 1))
        return real(path, *args, **options)

    monkeypatch.setattr(folders, "fill", touch)
    with pytest.raises(CkptconvError, match="changed while it was read"):
        convert(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_older_model_of_another_name_or_place_is_not_replaced(model: Path, tmp_path: Path) -> None:
    """``force`` does not replace another variant, an adapter or a model in a subfolder. The conversion is refused."""
    for name in ("backup/model.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"):
        out = tmp_path / name.replace("/", "-").removesuffix(".safetensors")
        convert(model, out)
        (out / name).parent.mkdir(exist_ok=True)
        save_file(weights(), out / name)
        with pytest.raises(RefusedError, match=name):
            convert(model, out, force=True)
        assert (out / name).exists()


def test_removed_files_are_reported(model: Path, tmp_path: Path) -> None:
    """The report of a dry run names the files of the old folder that will be removed."""
    convert(model, tmp_path / "out", max_shard_size="450")
    report = convert(model, tmp_path / "out", force=True, dry_run=True)
    assert has_note(report, "6 files of the old folder go: model-00001-of-00006")


@pytest.mark.parametrize("kind", ["two formats", "two suffixes"])
def test_two_files_of_one_name_are_refused_before_anything_is_written(model: Path, tmp_path: Path, kind: str) -> None:
    """If two checkpoints of the folder would become the same file, a dry run is refused too."""
    if kind == "two formats":
        convert(model / "model.safetensors.index.json", tmp_path / "bin", format="pt")
        for path in (tmp_path / "bin").iterdir():
            path.rename(model / path.name)
    else:
        torch.save({"w": torch.ones(1)}, model / "x.pt")
        torch.save({"w": torch.ones(1)}, model / "x.pth")
        (model / "optimizer.pt").unlink()
    with pytest.raises(RefusedError, match="would both be written to this path"):
        convert(model, tmp_path / "out", format="safetensors", dry_run=True)


def test_links_modes_and_special_files(model: Path, tmp_path: Path) -> None:
    """Copies keep their modes. Links within the folder stay links, or become files if their path leaves the folder.
    Hidden and empty folders are copied. Links out of the folder and special files are left out and reported.
    """
    (tmp_path / "private").write_text("private")
    (model / "tokenizer.json").symlink_to(tmp_path / "private")
    (model / "vocab.json").symlink_to("../private")
    (model / "twice").symlink_to("vocab.json")
    (model / "around.json").symlink_to("../model/inner/vocab.txt")
    (model / "whole.json").symlink_to(model / "inner" / "vocab.txt")
    (model / "alias.json").symlink_to("inner/vocab.txt")
    (model / "nowhere").symlink_to("../../nothing")
    (model / "root").symlink_to("/")
    (model / ".hidden").mkdir(mode=0o700)
    (model / ".hidden" / "x").write_text("x")
    (model / "empty").mkdir()
    (model / "config.json").chmod(0o600)
    os.mkfifo(model / "fifo")
    out = tmp_path / "out"
    report = convert(model, out, copy_others=True)
    assert os.readlink(out / "alias.json") == "inner/vocab.txt"
    for name in ("around.json", "whole.json"):
        assert not (out / name).is_symlink() and (out / name).read_text() == "a b"
    assert (out / ".hidden" / "x").read_text() == "x" and (out / "empty").is_dir()
    assert [oct((out / name).stat().st_mode & 0o777) for name in ("config.json", ".hidden")] == ["0o600", "0o700"]
    left = {Path(path).name: str(error) for path, error in report.failed}
    assert sorted(left) == ["fifo", "nowhere", "root", "tokenizer.json", "vocab.json"]
    assert "neither a file nor a folder: left" in left.pop("fifo")
    assert all("a link that leads out of the folder is not followed: left" in said for said in left.values())
    assert not any(os.path.lexists(out / name) for name in ("fifo", *left))
    assert not (out / "twice").exists()


def test_a_snapshot_of_the_hubs_cache_comes_with_its_blobs(model: Path, tmp_path: Path, command: Command) -> None:
    """A snapshot in a cache of the Hub contains links to blobs. Links to its own blobs are followed, other links out of
    the folder are not.
    """
    cache, snapshot = tmp_path / "cache" / "models--a--b", tmp_path / "cache" / "models--a--b" / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    shutil.copytree(model, snapshot)
    for n, name in enumerate(tree(snapshot)):
        os.rename(snapshot / name, cache / "blobs" / f"{n}")
        (snapshot / name).symlink_to(os.path.relpath(cache / "blobs" / f"{n}", (snapshot / name).parent))
    command("convert", snapshot, tmp_path / "out", "--copy-others")
    assert tree(tmp_path / "out") == tree(model)
    assert (tmp_path / "out" / "inner" / "vocab.txt").read_text() == "a b"
    (tmp_path / "cache" / "token").write_text("secret")
    (snapshot / "stolen.txt").symlink_to("../../../token")
    said = command("convert", snapshot, tmp_path / "again", "--copy-others", status=3)
    assert "stolen.txt: a link that leads out of the folder is not followed: left" in said.err
    assert tree(tmp_path / "again") == tree(model)


def test_modes_are_those_that_cp_would_give(model: Path, tmp_path: Path) -> None:
    """The output of a set has the mode of its most private file. Other checkpoints and folders keep their modes, but
    the owner can write the output of a read-only file.
    """
    (model / SET[1]).chmod(0o600)
    (model / "optimizer.pt").chmod(0o440)
    model.chmod(0o710)
    convert(model, tmp_path / "out")
    convert(model, tmp_path / "merged.pt")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in [*tmp_path.rglob("out"), *tmp_path.rglob("out/*")]}
    assert modes == {**dict.fromkeys(SET, "0o600"), "out": "0o710", "optimizer.pt": "0o640", "inner": "0o755"}
    assert oct((tmp_path / "merged.pt").stat().st_mode & 0o777) == "0o600"


def test_folders_that_are_not_entered_are_reported(model: Path, tmp_path: Path) -> None:
    """The report names hidden folders and links to folders as left if they are not empty."""
    (model / ".cache").mkdir()
    (model / ".cache" / "x").write_text("x")
    (model / "link").symlink_to("inner")
    report = convert(model, tmp_path / "out")
    assert has_note(report, "2 hidden or linked folders left: .cache, link")


def test_a_configuration_with_another_dtype_is_named(model: Path, tmp_path: Path) -> None:
    """The report contains a note if ``config.json`` has another dtype than the output, because transformers casts to
    that dtype.
    """
    (model / "config.json").write_text('{"dtype": "float32"}')
    said = "config.json has dtype float32"
    assert has_note(convert(model, tmp_path / "half", dtype="bf16", copy_others=True), said)
    assert not has_note(convert(model, tmp_path / "same"), said)
    (model / "config.json").write_text('{"dtype": "bfloat16"}')
    assert not has_note(convert(model, tmp_path / "right", dtype="bf16"), said)


def test_a_configuration_next_to_one_file(tmp_path: Path) -> None:
    """The note about ``config.json`` is also given for a model in a single file."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.bin")
    for key in ("dtype", "torch_dtype"):
        (tmp_path / "config.json").write_text(json.dumps({key: "float32"}))
        report = convert(tmp_path / "model.bin", tmp_path / "half.bin", dtype="bf16", force=True)
        assert has_note(report, "config.json has dtype float32")
    assert not has_note(convert(tmp_path / "model.bin", tmp_path / "same.bin"), "config.json")


def test_many_checkpoints_next_to_a_set(model: Path, tmp_path: Path) -> None:
    """A folder with more checkpoints than the soft limit of open files is converted: the limit is raised. Copied files
    are opened one at a time.
    """
    for i in range(150):
        torch.save({f"module.{i}": torch.ones(1)}, model / f"{i:03}.pt")
        (model / f"{i:03}.txt").write_text("x")
    program = (
        "import resource, sys, ckptconv\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 230))\n"
        "ckptconv.convert(sys.argv[1], sys.argv[2], copy_others=True)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(model), str(tmp_path / "out")], check=True)
    assert tree(tmp_path / "out") == tree(model)


def test_one_safetensors_file_is_not_a_set(tmp_path: Path) -> None:
    """A file that fits in one shard becomes a single file under the Hub's name, without an index."""
    save_file(weights(""), tmp_path / "weights.safetensors")
    report = convert(tmp_path / "weights.safetensors", tmp_path / "out", max_shard_size="5GB")
    assert tree(tmp_path / "out") == ["model.safetensors"]
    assert report.formats == ("safetensors", "safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, "pt", "safetensors"])
def test_the_name_of_a_dcp_folder_with_and_without_a_set(
    model: Path, ranks: Path, tmp_path: Path, format: str | None
) -> None:
    """The output name of a DCP folder does not depend on whether a set is next to it."""
    alone = tmp_path / "alone"
    for name in ("mesh", "hf") if dcp_ranks.HAS_HF else ("mesh",):
        for folder in (model, alone):
            shutil.copytree(ranks / name, folder / name)
    report = convert(model, tmp_path / "out", format=format, dry_run=True)  # type: ignore[arg-type]
    beside = {name for name, _ in report.files if name.split(".")[0] in ("mesh", "hf")}
    listing = list_requests([alone], tmp_path / "out", output=OutputOptions(format=format))
    assert beside == {item.dst.name for item in listing.requests}
    assert len(beside) == 2
