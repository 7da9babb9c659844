"""Tests of the conversion of many checkpoints. Jobs do not affect each other, whatever executor runs them and whenever
a process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv import Job, Outcome, convert_many, jobs_in
from ckptconv.cli import convert as convert_module
from ckptconv.conversion import jobs
from ckptconv.conversion.batches import processes, run_jobs
from ckptconv.conversion.targets import Request
from ckptconv.errors import TargetExistsError
from tests.support.command import Command, in_one_line
from tests.support.deadly_maps import die, stall
from tests.support.reduced import Reduced
from tests.support.waiting import wait_for
from tests.support.worker_processes import our_workers, processes_with

LARGE = 12 << 20  # bytes: a file of this size takes a while to convert


def state(prefix: str = "module.", n: int = 4) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}.weight": torch.arange(float(n)) + i for i, name in enumerate(("a", "b"))}


@pytest.fixture
def run_folder(here: Path) -> Path:
    """Create the folder ``run`` with models, optimizers without parameter names and a text file. Return its path."""
    run = here / "run"
    for i in range(4):
        folder = run / f"step-{i}"
        folder.mkdir(parents=True)
        torch.save(state(n=4 + i), folder / "model.pt")
        torch.save(
            {"state": {0: {"exp_avg": torch.ones(2) * i}}, "param_groups": [{"params": [0]}]}, folder / "optim.pt"
        )
    (run / "config.json").write_text("{}")
    return run


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def convert(command: Command) -> Command:
    """Return a function that runs ``ckptconv convert`` with the given arguments."""
    return command.of("convert")


# Output


def test_each_file_is_converted_as_if_alone(run_folder: Path, convert: Command) -> None:
    """A batch keeps the tree of folders. Each output equals the output of a single conversion, with one process or two.
    The report has a line for each file, a summary, and the names of files that are not converted.
    """
    said = convert("run", "one", "--to", "cuda:1")
    assert said.out == ""
    assert [line.split(":")[0] for line in said.err.splitlines()[:8]] == [
        f"one/{name}" for name in files_in(Path("one"))
    ]
    assert said.err.splitlines()[8].startswith("8 items: 8 converted, ")
    assert "1 other file: config.json; --copy-others copies it" in said.err.splitlines()[9]
    assert convert("run", "two", "--to", "cuda:1", "-j", "2", "-q") == ("", "")
    assert files_in(Path("one")) == files_in(Path("two"))
    assert len(files_in(Path("one"))) == 8
    for path in run_folder.rglob("*.pt"):
        ckptconv.convert(path, "alone.pt", map_location="cuda:1", force=True)
        assert Path("alone.pt").read_bytes() == ("one" / path.relative_to(run_folder)).read_bytes()


def test_several_inputs(run_folder: Path, convert: Command) -> None:
    """Several inputs are written to the output folder under their own names, with the suffix of the format."""
    convert("run/step-0", "run/step-1/model.pt", "new", "--format", "safetensors", "--include", "*", "-q", status=3)
    assert sorted(files_in(Path("new"))) == ["model.safetensors", "step-0/model.safetensors"]
    convert("run/step-0/model.pt", "run/step-1/optim.pt", "two", "-q")
    assert sorted(files_in(Path("two"))) == ["model.pt", "optim.pt"]


def test_copy_others(run_folder: Path, convert: Command) -> None:
    """``--copy-others`` copies files that are not checkpoints. An existing copy is replaced only with ``--force``."""
    said = convert("run", "new", "--copy-others", err=("8 converted", "1 copied"))
    assert "other file" not in said.err
    assert Path("new/config.json").read_text() == "{}"
    convert("run", "again", "--copy-others", "-v", err="again/config.json: 2 B, copied\n")
    planned = convert("run", "no", "--copy-others", "-n", out="no/config.json: 2 B, would be copied\n")
    assert "-v shows" not in planned.out
    assert convert.json("run", "json", "--copy-others")["items"][0] == {
        "schema_version": 1,
        "src": "run/config.json",
        "dst": "json/config.json",
        "size": 2,
        "written": True,
        "seconds": 0.0,
        "copied": True,
    }
    Path("run/config.json").write_text("[]")
    convert("run", "new", "--copy-others", status=1)
    convert("run", "new", "--copy-others", "--force", "--verify", "-q")
    assert Path("new/config.json").read_text() == "[]"


def test_a_link_out_of_the_folder_is_not_followed(run_folder: Path, convert: Command) -> None:
    """``--copy-others`` does not copy a link that leads out of the folder, but a checkpoint may be a link to any file.
    New folders have the modes of the input folders.
    """
    Path("secret").write_text("secret")
    shutil.copy("run/step-0/model.pt", "best.pt")
    Path("run/step-1/best.pt").symlink_to("../../best.pt")
    Path("run/step-0/notes.txt").symlink_to("../config.json")
    Path("run/step-0/key.txt").symlink_to("../../secret")
    Path("run/step-1").chmod(0o700)
    Path("run").chmod(0o750)
    convert("run", "new", "--copy-others", status=3, err="run/step-0/key.txt: a link that leads out of the folder")
    assert sorted(path.name for path in Path("new/step-0").iterdir()) == ["model.pt", "notes.txt", "optim.pt"]
    assert Path("new/step-0/notes.txt").read_text() == "{}"
    assert Path("new/step-1/best.pt").read_bytes() == Path("new/step-0/model.pt").read_bytes()
    modes = [oct(Path(name).stat().st_mode & 0o777) for name in ("new", "new/step-0", "new/step-1")]
    assert modes == ["0o750", "0o755", "0o700"]


def test_in_place(run_folder: Path, convert: Command) -> None:
    """A folder is converted onto itself only with ``--force``."""
    convert("run", "run", "--strip-prefix", "module.", "-q", status=1)
    assert list(torch.load("run/step-0/model.pt")) == list(state())
    convert("run", "run", "--strip-prefix", "module.", "--force", "-q", "-j", "2")
    for i in range(4):
        assert list(torch.load(f"run/step-{i}/model.pt")) == list(state(""))


def test_each_becomes_a_folder_of_shards(run_folder: Path, convert: Command) -> None:
    """With ``--max-shard-size``, each file becomes a folder of shards with its stem as the name. ``--skip-existing``
    skips the complete folder. A file without tensor names fails.
    """
    pytest.importorskip("huggingface_hub")
    words = "run", "new", "--max-shard-size", "28", "--format", "safetensors"
    shards = "new/step-3/model: sharded safetensors, 3 files"
    failed = "run/step-0/optim.pt, run/step-1/optim.pt, run/step-2/optim.pt and 1 more"
    said = convert(*words, "-v", status=3, err=(shards, failed)).err
    assert said.count("ckptconv: run/step-") == 1
    assert "-v shows" not in said
    assert len(files_in(Path("new"))) == 12
    said = convert(*words, "--skip-existing", status=3).err
    assert said.count(": exists, skipped") == 4
    ckptconv.convert("new/step-3/model", "one.pt")
    assert all(torch.equal(torch.load("one.pt")[name], value) for name, value in state(n=7).items())


@pytest.fixture
def sets(run_folder: Path) -> Path:
    """Create a tree with a file and a folder. The folder contains a set of shards, a damaged and a sound checkpoint,
    and a text file. Return its path.
    """
    pytest.importorskip("huggingface_hub")
    torch.save(state(), "whole.pt")
    Path("tree").mkdir()
    ckptconv.convert("whole.pt", "tree/set", max_shard_size=16, format="safetensors")
    Path("tree/set/bad.pt").touch()
    Path("tree/set/config.json").write_text("{}")
    shutil.copy("run/step-0/optim.pt", "tree/set")
    shutil.copy("whole.pt", "tree")
    return Path("tree/set")


def test_failures_next_to_a_set(sets: Path, convert: Command) -> None:
    """If a checkpoint next to a set fails, the set is still converted. The summary counts and names the failed
    checkpoint, and ``--skip-existing`` then skips the set.
    """
    lines = convert("tree", "new", status=3).err.splitlines()
    (sum_,) = (line for line in lines if line.startswith("2 items: 2 converted, "))
    assert sum_.endswith(", 1 other files failed")
    assert any(re.match("  failed .*: tree/set/bad.pt$", line) for line in lines)
    convert("tree", "new", "--skip-existing", err="new/set: exists, skipped\n")


def test_an_incomplete_set_fails(sets: Path, convert: Command) -> None:
    """An incomplete set fails, with or without an index, as a single input or in a tree. Its shards are not converted
    one by one. A DCP folder without its files also fails.
    """
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "bad.pt", "optim.pt"):
        (sets / name).unlink()
    Path("tree/dcp").mkdir()
    Path("tree/dcp/.metadata").write_bytes(b"\x80\x02}q\0.")
    words = "tree/set: 1 of 2 shards is missing: model-00001-of-00002.safetensors"
    convert("tree/set", "alone", status=1, err=words)
    convert("tree", "new", status=3, err=(words, "3 items: 1 converted, ", "tree/dcp"))
    assert list(files_in(Path("new"))) == ["whole.pt"]


def test_a_merged_file_names_what_it_leaves(sets: Path, convert: Command) -> None:
    """If a set is merged into one file, the report names the other files of the folder that are left."""
    note = "3 other files left: bad.pt, config.json, optim.pt; to a folder, --copy-others copies them"
    convert(sets, "one.pt", err=note)
    said = convert(sets, "dealt", "--max-shard-size", "32", "-v", status=3).err
    assert "  files         model-00001-of-00001.safetensors (" not in said
    assert re.search(r"^  files         model\.safetensors \([0-9]+ B\), optim\.pt \(", said, re.MULTILINE)
    assert note in convert.json(sets, "two.pt")["notes"]
    note = note.replace("--copy-others", "copy_others=True")
    assert note in ckptconv.convert(sets, "three.pt").notes
    (outcome,) = convert_many([Job(sets, "four.pt")], ThreadPoolExecutor(1))
    assert outcome.report and note in outcome.report.notes
    (outcome,) = convert_many([Job("whole.pt", "five.pt", {"copy_others": True})], ThreadPoolExecutor(1))
    assert isinstance(outcome.error, ckptconv.UsageError)
    words = "2 shards without an index; to convert the set: ckptconv convert tree/set OUT_FOLDER"
    convert(*sorted(sets.glob("*.safetensors")), "shards", err=words)


def test_existing_outputs_are_reported_once(run_folder: Path, convert: Command) -> None:
    """Several existing outputs give one error that names the inputs and suggests both options. Outputs that are the
    inputs also give one error.
    """
    convert("run", "new", "-q")
    for dst, words in (
        ("new", "the output exists; --force replaces it, --skip-existing keeps the existing output"),
        ("run", "the output is the same file as the input"),
    ):
        names = "run/step-0/model.pt, run/step-0/optim.pt, run/step-1/model.pt and 5 more"
        said = convert("run", dst, status=1, err=(words, names)).err
        assert said.count("ckptconv: ") == 1


def test_a_dry_run_makes_nothing(run_folder: Path, convert: Command) -> None:
    """A dry run prints the plan of each file and the summary on standard output, and creates no folder."""
    before = files_in(Path("."))
    plan = "new/deep/step-0/model.pt: torch zip", "8 items: 8 would be converted, "
    printed = convert("run", "new/deep", "--to", "cuda:1", "-n", out=plan).out
    assert convert("run", "new/deep", "--to", "cuda:1", "-n", "-q").out == printed
    assert printed.count("would write") == 8
    assert files_in(Path(".")) == before
    assert not Path("new").exists()


def test_json_has_all_of_them(run_folder: Path, convert: Command) -> None:
    """The JSON output of a batch contains a report, an error or a skipped item for each file in order, and the files
    that are left.
    """
    Path("run/bad.pt").write_bytes(b"")
    Path("new/step-1").mkdir(parents=True)
    shutil.copy("run/step-1/model.pt", "new/step-1")
    captured = convert("run", "new", "--to", "cuda:1", "--skip-existing", "--json", status=3)
    said = json.loads(captured.out)
    assert said["schema_version"] == 1
    assert said["left"] == ["run/config.json"]
    assert said["unentered"] == []
    assert [item["dst"] for item in said["items"]] == [
        "new/bad.pt",
        *(f"new/step-{i}/{name}" for i in range(4) for name in ("model.pt", "optim.pt")),
    ]
    assert said["items"][0]["error"]["type"] == "UnsupportedError"
    assert "run/bad.pt" in said["items"][0]["error"]["text"]
    assert said["items"][3]["skipped"] is True
    assert [item["written"] for item in said["items"] if "written" in item] == [True] * 7
    assert in_one_line(captured.err) == f"ckptconv: {said['items'][0]['error']['text']}\n"


def test_two_inputs_with_the_same_output_are_refused(run_folder: Path, convert: Command) -> None:
    """If two files would become the same output, the batch is refused before anything is written."""
    shutil.copy("run/step-0/model.pt", "run/step-0/model.bin")
    words = "run/step-0/model.bin and run/step-0/model.pt would both be written to this path"
    convert("run", "new", "--format", "safetensors", status=1, err=words)
    assert not Path("new").exists()


def test_a_folder_without_checkpoints(tmp_path: Path, convert: Command) -> None:
    """An error for a folder without checkpoints names the kind of the folder."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "saved_model.pb").touch()
    convert(tmp_path / "in", tmp_path / "out", status=1, err="TensorFlow SavedModel")
    assert not (tmp_path / "out").exists()


# Errors of single files


def break_some(folder: Path) -> dict[str, str]:
    """Create one bad file of each kind in `folder`. Return a pattern of the error for each name."""
    good = (folder / "step-0" / "model.pt").read_bytes()
    (folder / "empty.pt").touch()
    (folder / "cut.pt").write_bytes(good[: len(good) // 2])
    (folder / "text.ckpt").write_text("not a checkpoint at all\n")
    (folder / "lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (folder / "short.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    torch.save({"w": torch.ones(1), "x": Reduced(os.getpid, ())}, folder / "dangerous.pt")
    os.symlink("nowhere", folder / "gone.pt")
    os.mkfifo(folder / "pipe.pt")
    (folder / "dcp").mkdir()
    (folder / "dcp" / "__0_0.distcp").write_bytes(good)
    return {
        "empty.pt": "empty",
        "cut.pt": "cut|truncated|missing",
        "text.ckpt": "text file",
        "lfs.bin": "LFS",
        "short.safetensors": "",
        "dangerous.pt": "no checkpoint needs",
        "gone.pt": "No such file",
        "pipe.pt": "FIFO",
        "dcp": "",
    }


@pytest.mark.parametrize("jobs", [1, 2])
def test_bad_files_do_not_stop_others(run_folder: Path, jobs: int, convert: Command) -> None:
    """Every bad file has an error of its own, the other files are converted, and the exit status is 3. If all files
    fail, the status is 1.
    """
    bad = break_some(run_folder)
    lines = convert("run", "new", "--to", "cuda:1", "-j", jobs, status=3).err.splitlines()
    errors = [line for line in lines if line.startswith("ckptconv: ")]
    assert len(errors) == len(bad)
    (sum_,) = (i for i, line in enumerate(lines) if re.match("[0-9]+ items: ", line))
    # The errors are repeated after the summary, so that the user sees them.
    assert len([line for line in lines[sum_:] if line.startswith("  failed ")]) == len(bad)
    for name, words in bad.items():
        (at,) = (i for i, line in enumerate(lines) if line.startswith(f"ckptconv: run/{name}"))
        assert re.search(words, "; ".join(lines[at : at + 2])), lines[at]
    assert re.fullmatch(r"17 items: 8 converted, [^,]*, 9 failed", lines[sum_])
    assert len(files_in(Path("new"))) == 8
    Path("bad").mkdir()
    for name in bad:
        Path("run", name).rename(Path("bad", name))
    convert("bad", "none", "-j", jobs, "-q", status=1)
    assert not Path("none").exists()


def test_a_bug_is_an_outcome(run_folder: Path, monkeypatch: pytest.MonkeyPatch, convert: Command) -> None:
    """An unexpected exception fails only its own job. The error names the input, and ``--debug`` shows the
    traceback.
    """

    def fail(request: Request, *args: Any) -> Any:
        if "step-1/model" in str(request.src):
            raise ZeroDivisionError("oh")
        return running(request, *args)

    running = jobs.running
    monkeypatch.setattr(jobs, "running", fail)
    line = "ckptconv: run/step-1/model.pt: a bug in ckptconv: ZeroDivisionError: oh"
    convert("run", "new", "--debug", status=3, err=(line, "Traceback"))
    assert len(files_in(Path("new"))) == 7


# Edits that do not match in every file


def test_edits_that_match_only_in_some_files(run_folder: Path) -> None:
    """Each file gets the edits that match in it, although no file matches all of them. The outcomes and reports name
    the edits without a match.
    """
    torch.save({"net.c": torch.ones(3)}, "run/net.pt")
    jobs = jobs_in(
        "run", "new", strip_prefix=["module.", "net."], rename=[("^a", "x")], exclude="module.b*", dtype="c=bf16"
    )
    outcomes = convert_many(jobs, ThreadPoolExecutor(1))
    assert [outcome.error for outcome in outcomes] == [None] * 9
    assert list(torch.load("new/step-0/model.pt")) == ["x.weight"]
    assert torch.load("new/net.pt")["c"].dtype == torch.bfloat16
    assert torch.load("new/step-0/optim.pt")["state"][0]["exp_avg"].dtype == torch.float32
    of_net, of_optimizer = outcomes[0], outcomes[2]
    assert of_net.unmatched == (("exclude", "module.b*"), ("strip_prefix", "module."), ("rename", ("^a", "x")))
    assert of_net.report is not None
    assert "strip_prefix='module.' matches nothing in this file" in of_net.report.notes
    assert len(of_optimizer.unmatched) == 5


@pytest.mark.parametrize(
    "flags", [["--strip-prefix", "module."], ["--rename", "^module[.]", ""]], ids=["strip", "rename"]
)
def test_repeated_edits_that_match_once(tmp_path: Path, flags: list[str], convert: Command) -> None:
    """A prefix that is given twice is removed once from files that have it only once."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("module.module.w", "module.w", "w"):
        torch.save({name: torch.ones(1)}, run / f"{name}.pt")
    convert(run, tmp_path / "out", *flags, *flags)
    assert [[*torch.load(path)] for path in (tmp_path / "out").iterdir()] == [["w"]] * 3


def test_edits_that_match_in_existing_outputs(run_folder: Path, convert: Command) -> None:
    """If a batch is resumed, an edit without a match in the remaining files is not an error if it matches in existing
    outputs.
    """
    convert("run", "new", "--strip-prefix", "module.", "-q")
    before = files_in(Path("new"))
    Path("new/step-1/optim.pt").unlink()
    convert("run", "new", "--strip-prefix", "modul", "--skip-existing", "-q", status=3)
    assert not Path("new/step-1/optim.pt").exists()
    convert("run", "new", "--strip-prefix", "module.", "--skip-existing", "-q")
    assert files_in(Path("new")) == before


@pytest.mark.parametrize(
    "flags", [["--strip-prefix", "modul"], ["--rename", "zzz", ""], ["--exclude", "zzz"], ["--dtype", "zzz=bf16"]]
)
def test_an_edit_that_matches_nowhere_is_an_error(run_folder: Path, flags: list[str], convert: Command) -> None:
    """An edit that matches in no file is an error with status 1, also if another edit matches. Nothing is written. One
    error names all files, or with ``-q`` each file has its own.
    """
    lines = convert("run", "new", *flags, "--strip-prefix", "module.", status=1).err.splitlines()
    said = [line for line in lines if line.startswith("ckptconv: run/step-0/")]
    assert len(said) == len([line for line in lines if line.startswith(("ckptconv: ", "  failed"))]) / 2 <= 2
    assert any("8 failed" in line for line in lines)
    said = convert("run", "new", *flags, "--strip-prefix", "module.", "-q", status=1).err
    assert said.count("ckptconv: run/step-") == 8
    assert not Path("new").exists()


def test_a_file_without_the_selected_part_fails(run_folder: Path, convert: Command) -> None:
    """A file without a match for ``--select`` or ``--include`` fails and is not copied completely."""
    torch.save({"ema": state(), "x": 1}, "run/train.pt")
    convert("run", "new", "--select", "ema", "-q", status=3)
    assert sorted(files_in(Path("new"))) == ["train.pt"]
    torch.save({"net.c": torch.ones(3)}, "run/net.pt")
    convert("run", "included", "--include", "module.a*", "-q", status=3)
    assert list(torch.load("included/step-0/model.pt")) == ["module.a.weight"]
    assert not Path("included/step-0/optim.pt").exists()
    assert not Path("included/net.pt").exists()


# Killed and resumed batches


@pytest.fixture
def large(here: Path) -> Path:
    """Create a folder with eight files that take a while to convert. Return the folder of the test."""
    (here / "in").mkdir()
    for i in range(8):
        torch.save({"w": torch.full((LARGE // 4,), float(i))}, here / "in" / f"{i}.pt")
    return here


@contextlib.contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``ckptconv convert`` with `args` in a session of its own, and yield its process after the first output
    exists.
    """
    mark = f"CKPTCONV_TEST={os.urandom(8).hex()}"
    name, value = mark.split("=")
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptconv", "convert", *args],
        env={**os.environ, name: value},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: process.poll() is not None or any(Path("out").glob("*.pt")))
        assert process.poll() is None
        yield process
        process.communicate(timeout=30)
        wait_for(lambda: not processes_with(mark))
    finally:
        process.kill()
        process.communicate()


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")


def assert_whole_or_absent(temporaries: bool) -> set[str]:
    """Assert that every output is complete, and return the names of the outputs. If `temporaries` is true, temporary
    files with the usual names may exist.
    """
    whole = set()
    for path in Path("out").iterdir():
        if path.name.startswith("."):
            assert temporaries
            assert ".ckptconv-" in path.name
        else:
            assert torch.equal(torch.load(path)["w"], torch.full((LARGE // 4,), float(path.stem)))
            whole.add(path.name)
    return whole


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_killed_and_begun_again(large: Path, jobs: str, convert: Command) -> None:
    """After SIGKILL, every output is complete and no process is left. Temporary files may remain. ``--skip-existing``
    converts the rest and does not touch the existing outputs.
    """
    with started("in", "out", "--verify", "-j", jobs) as process:
        process.kill()
    before = {name: os.stat(Path("out") / name).st_ino for name in assert_whole_or_absent(temporaries=True)}
    assert 0 < len(before) < 8
    convert("in", "out", "-q", "-j", jobs, status=3)
    for path in Path("out").glob("*.pt"):
        if path.name not in before:
            path.unlink()
    convert("in", "out", "-q", "--skip-existing", "--force", "-j", jobs)
    assert assert_whole_or_absent(temporaries=True) == {f"{i}.pt" for i in range(8)}
    assert {name: os.stat(Path("out") / name).st_ino for name in before} == before
    assert not any(name.startswith(".") for name in os.listdir("in"))


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(large: Path, jobs: str, number: signal.Signals) -> None:
    """After SIGINT to all processes, or SIGTERM to the first, no incomplete output, temporary file or process is left.
    The command prints how many files are done and how to continue.
    """
    with started("in", "out", "--verify", "-j", jobs) as process:
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else 143), said
    lines = [line for line in said.splitlines() if line and not line.startswith("out/")]
    how_far = r"ckptconv: [0-7] of 8 are done; to continue, repeat the command with --skip-existing"
    last = r"\nckptconv: interrupted" if number == signal.SIGINT else ""
    assert re.fullmatch(how_far + last, "\n".join(lines)), said
    assert 0 < len(assert_whole_or_absent(temporaries=False)) < 8


def test_interrupted_in_place(run_folder: Path, monkeypatch: pytest.MonkeyPatch, convert: Command) -> None:
    """An interrupted batch in place prints how many files are done. It does not suggest ``--skip-existing``, which
    would skip every file.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "run_jobs", interrupt)
    assert convert("run", "run", "--force", status=130).err == "ckptconv: 0 of 8 are done\n\nckptconv: interrupted\n"


@needs_proc
def test_a_killed_worker(run_folder: Path) -> None:
    """If a worker process is killed, its job is repeated. A job that kills its process three times fails, and the other
    jobs succeed.
    """
    jobs = jobs_in("run", "new", map_location="cuda:1")
    jobs.insert(3, Job("run/step-0/model.pt", "new/never.pt", {"map_location": die}))
    killed = []

    def kill_one(outcome: Outcome) -> Outcome:
        if not killed:
            killed.append(our_workers()[0])
            os.kill(killed[0], signal.SIGKILL)
        return outcome

    outcomes = run_jobs(jobs, processes(2), kill_one)
    assert killed
    assert [outcome.job for outcome in outcomes] == jobs
    error = outcomes.pop(3).error
    assert isinstance(error, ckptconv.OutputError)
    assert "its process ended too early, 3 times" in str(error)
    assert all(outcome.report and outcome.report.written for outcome in outcomes)
    assert sum(not Path(name).name.startswith(".") for name in files_in(Path("new"))) == 8
    assert not our_workers()


# Executors


class Losing(Executor):
    """An executor that runs every job twice and loses the first outcome, like a machine that fails after its work."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def submit(self, function: Any, /, *args: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        outcome = function(*args, **keywords)
        if (src := str(outcome.job.src)) in self.seen:
            future.set_result(outcome)
        else:
            self.seen.add(src)
            future.set_exception(ConnectionError("gone"))
        return future


def test_lost_outcomes(run_folder: Path) -> None:
    """If an outcome is lost, its output counts as written if it is new and has the planned size. An output that existed
    before the batch is an error.
    """
    Path("new/step-3").mkdir(parents=True)
    shutil.copy("run/step-3/model.pt", "new/step-3/model.pt")
    outcomes = convert_many(jobs_in("run", "new", map_location="cuda:1"), Losing())
    errors = [outcome.error for outcome in outcomes]
    assert isinstance(errors.pop(6), ckptconv.TargetExistsError)
    assert errors == [None] * 7
    reports = [outcome.report for outcome in outcomes if outcome.report]
    assert all(report.written and report.dst.startswith("new/step-") for report in reports)


def test_lost_outcomes_in_place(run_folder: Path) -> None:
    """If the outcome of a conversion in place is lost, the job fails and the file is not converted again. A second
    conversion would change the names twice.
    """
    outcomes = convert_many(jobs_in("run", "run", rename=[("^", "x.")], force=True), Losing())
    for outcome in outcomes:
        if "model" in str(outcome.job.src):
            assert isinstance(outcome.error, ckptconv.InputChangedError)
            assert list(torch.load(outcome.job.dst)) == [f"x.{name}" for name in state()]


def test_an_index_of_a_missing_folder(tmp_path: Path) -> None:
    """`write_index` fails for a folder that does not exist."""
    with pytest.raises(ckptconv.InputError, match="there is no such folder"):
        ckptconv.write_index(tmp_path / "nowhere")


def test_any_executor_does(run_folder: Path) -> None:
    """Any executor can be used, and it is not shut down. If it accepts no work, every job fails with an error."""
    heard: list[Outcome] = []
    with ThreadPoolExecutor(2) as threads:
        outcomes = convert_many(jobs_in("run", "new", map_location=lambda tag: "cuda:1"), threads, done=heard.append)
        assert threads.submit(int, "7").result() == 7
    assert all(outcome.report for outcome in outcomes)
    assert sorted(str(outcome.job.dst) for outcome in heard) == [str(outcome.job.dst) for outcome in outcomes]
    for outcome in convert_many(jobs_in("run", "no"), threads):  # it is shut down now
        assert "cannot schedule new futures" in str(outcome.error)
    assert not Path("no").exists()


def test_processes_of_our_own(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an executor, `convert_many` starts its own processes. Its errors suggest keywords. A function that cannot
    be sent to another process is refused.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    jobs = jobs_in("run", "new", map_location={"cpu": "cuda:1"})
    assert all(outcome.report for outcome in convert_many(jobs))
    assert files_in(Path("new"))
    for outcome in convert_many(jobs):
        assert outcome.error is not None
        assert outcome.error.hint == "force=True replaces it, skip_existing=True keeps the existing output"
    for outcome in convert_many(jobs_in("run", "other", map_location=lambda tag: "cpu")):
        assert "cannot be sent to another process" in str(outcome.error)
    assert convert_many([]) == []


@needs_proc
def test_a_callback_that_fails_ends_it(run_folder: Path) -> None:
    """If the callback raises an exception, `run_jobs` raises it without waiting for slow jobs, and ends all
    processes.
    """

    def fail(outcome: Outcome) -> Outcome:
        raise LookupError("enough")

    started = time.monotonic()
    with pytest.raises(LookupError, match="enough"):
        run_jobs(
            [Job("run/step-0/model.pt", "slow.pt", {"map_location": stall}), *jobs_in("run", "new")], processes(2), fail
        )
    assert time.monotonic() - started < 30
    assert not our_workers()


def test_a_job_is_checked_when_it_is_made() -> None:
    """The options of a job are checked when it is created. Jobs, outcomes and errors can be pickled."""
    with pytest.raises(TypeError, match=r"keyword argument .mao_location.; did you mean: map_location=.cpu.$"):
        Job("a.pt", "b.pt", {"mao_location": "cpu"})
    with pytest.raises(ckptconv.UsageError, match="not a device"):
        Job("a.pt", "b.pt", {"map_location": "cpuu"})
    job = Job("missing.pt", Path("b.pt"), {"map_location": "cpu", "rename": [("a", "b")]})
    assert pickle.loads(pickle.dumps(job)) == job
    (outcome,) = convert_many([job], ThreadPoolExecutor(1))
    again = pickle.loads(pickle.dumps(outcome))
    assert again.job == job
    assert (type(again.error), str(again.error)) == (ckptconv.MissingInputError, str(outcome.error))
    error = ckptconv.NoMatchError("no name", where="a.pt", hint="look", unmatched=("strip_prefix", "x"))
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_parent_folders_of_outputs(run_folder: Path) -> None:
    """Missing parent folders of an output are created, and are removed if the job fails. A folder without a set cannot
    be converted to one file.
    """
    outcomes = convert_many(
        [Job("run/step-0/model.pt", "a/b/c.pt"), Job("nothing.pt", "d/e/f.pt"), Job("run", "g.pt")],
        ThreadPoolExecutor(1),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        type(None),
        ckptconv.MissingInputError,
        ckptconv.UnsupportedError,
    ]
    assert Path("a/b/c.pt").exists()
    assert not Path("d").exists()


# On a terminal


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_bar_for_all(run_folder: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, convert: Command) -> None:
    """A batch on a terminal has one progress bar, which ends at the size of all outputs. Other lines fit in 80 columns.
    Dry runs and ``-q`` have no bar.
    """

    def forget(task: object) -> None:
        raise AssertionError("the bar begins anew")

    monkeypatch.setattr("rich.progress.Task._reset", forget)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    deep = Path("run") / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    shutil.copy("run/step-0/model.pt", deep)
    monkeypatch.setattr(convert_module, "PROGRESS_FROM", 1)
    said = convert("run", "new", "--to", "cuda:1", "-j", jobs).err
    total = sum(len(data) for data in files_in(Path("new")).values())
    assert f"{total / 1000:.1f}/{total / 1000:.1f} kB" in said
    assert max(len(line) for line in said.split("\n") if "kB/" not in line and "\r" not in line) <= 80
    assert "yyy/model.pt: " in said
    assert "cpu → cuda:1" in said
    for flag in ("-n", "-q") if jobs == 1 else ():
        assert "/s" not in convert("run", "new", "--force", flag).err


def test_skipping_one_file(run_folder: Path, convert: Command) -> None:
    """``--skip-existing`` keeps a single existing output, also with ``--force``, and the exit status is 0."""
    Path("old.pt").write_bytes(b"old")
    assert convert("run/step-0/model.pt", "old.pt", "--skip-existing", "--force").err == "old.pt: exists, skipped\n"
    assert convert.json("run/step-0/model.pt", "old.pt", "--skip-existing")["skipped"] is True
    assert Path("old.pt").read_bytes() == b"old"


@pytest.mark.parametrize("workers", [0, 2])
def test_two_jobs_with_the_same_output(tmp_path: Path, workers: int) -> None:
    """Of two jobs with the same output and the same size, one succeeds and the other fails, because the output is not
    its own.
    """
    for name, fill in (("a", 1.0), ("b", 2.0)):
        torch.save({"w": torch.full((100,), fill)}, tmp_path / f"{name}.pt")
    jobs = [ckptconv.Job(tmp_path / f"{name}.pt", tmp_path / "out.pt") for name in "ab"]
    executor = ThreadPoolExecutor(workers) if workers else None
    outcomes = ckptconv.convert_many(jobs, executor)
    written = [i for i, outcome in enumerate(outcomes) if outcome.report]
    assert len(written) == 1
    assert torch.load(tmp_path / "out.pt")["w"][0] == written[0] + 1
    assert isinstance(outcomes[1 - written[0]].error, TargetExistsError)
