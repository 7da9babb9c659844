"""Faults of each kind during a conversion, in separate processes. ``tests/long/test_faults.py`` is the complete form,
with a fault at every call.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptconv import convert
from ckptconv.conversion.targets import find_request
from tests.support.injection import OLD, OLD_SET, Conversion
from tests.support.limited import ckptconv_with_small_files
from tests.support.writers import sharded

#: Drops the capability that lets root write everywhere (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE: linux/prctl.h,
#: linux/capability.h), and then executes the command.
_LIKE_OTHERS = """
import ctypes, os, sys
if os.geteuid() == 0:
    ctypes.CDLL(None).prctl(24, 1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")


def ckptconv(*args: str | Path, **options: object) -> subprocess.CompletedProcess[bytes]:
    """Run ``ckptconv ARGS`` and return the process. Its output is captured unless `options` redirect it."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [sys.executable, "-m", "ckptconv", *map(str, args)]
    return subprocess.run(command, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def src(tmp_path: Path, fixtures: Path) -> Path:
    return Path(shutil.copy(fixtures / "training.pt", tmp_path / "src.pt"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return the folder of a model in two shards."""
    return sharded(tmp_path / "shards", {"w1": torch.randn(3000)}, {"w2": torch.randn(3000)})


# Failing calls and killed processes


def chosen(conversion: Conversion, *names: str) -> None:
    """Restrict the faults of `conversion` to the first and the last of its calls of each of these `names`."""
    numbers = {name: [number for call, number in conversion.calls if call == name] for name in names}
    conversion.calls = sorted({(name, all_[i]) for name, all_ in numbers.items() for i in (0, -1)})


@needs_strace
def test_faults_where_a_file_is_replaced(src: Path, tmp_path: Path) -> None:
    """After a disk error or a kill at any chosen call, the target is the complete old or new file. Exit status 0 means
    the new file, an error is one line, and only a killed process leaves a temporary file.
    """
    conversion = Conversion("file", tmp_path / "runs", [src], ["dst.pt"], OLD, ("--to", "cpu"))
    chosen(conversion, "pwrite64", "copy_file_range", "fsync", "close", "rename")
    points = conversion.points(["error=EIO", "signal=SIGKILL"])
    assert len(points) == 18
    in_place = [point for point in points if "in place" in point.line]
    assert {point.call for point in in_place} == {"fsync"}  # fsync of the folder
    assert {point.outcome for point in points} == {("old",), ("new",)}


@needs_strace
def test_faults_where_a_folder_is_replaced(shards: Path, tmp_path: Path) -> None:
    """After a fault at any chosen call, a target folder is the complete old or new folder."""
    conversion = Conversion("folder", tmp_path / "runs", [shards], ["dst"], OLD_SET, ("--to", "cpu"))
    chosen(conversion, "copy_file_range", "fsync", "renameat2", "rmdir")
    points = conversion.points(["error=ENOSPC", "signal=SIGKILL"])
    assert len(points) == 12
    assert {point.outcome for point in points} == {("old",), ("new",)}


@needs_strace
@pytest.mark.parametrize("kind", ["file", "folder", "batch in a new folder"])
def test_output_is_synced_before_it_is_named(src: Path, shards: Path, tmp_path: Path, kind: str) -> None:
    """The output is synced before it gets its name, and the folder that contains the name is synced before the process
    ends. The same holds for folders that a batch creates.
    """
    other = Path(shutil.copy(src, tmp_path / "other.pt"))
    srcs, targets, before, dst = {
        "file": ([src], ["dst.pt"], None, None),
        "folder": ([shards], ["dst"], OLD_SET, None),
        "batch in a new folder": ([src, other], ["new/deep/src.pt", "new/deep/other.pt"], None, "new/deep/"),
    }[kind]
    flags = ("--to", "cpu", "-j", "1")
    conversion = Conversion(kind, tmp_path / "runs", srcs, targets, before, flags, dst=dst, calls=[("fsync", 1)])
    assert conversion.undurable() == []


def test_output_over_the_file_size_limit(src: Path, tmp_path: Path) -> None:
    """An output that exceeds the limit on file sizes (EFBIG) fails with one line. The old output is intact, and no
    other file is left.
    """
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "dst.pt"
    target.write_bytes(OLD)
    done = ckptconv_with_small_files(4000, "convert", src, target, "--to", "cpu", "--force")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ckptconv: {target}: ") and "File too large" in line
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == [target.name]


# Obstacles at the target


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("thing.pt", lambda path, listener: listener.bind(str(path))),
        ("thing.pt", lambda path, listener: os.mkfifo(path)),
        ("/dev/full", lambda path, listener: None),
        ("folder", lambda path, listener: (path / "src.pt").mkdir(parents=True)),
    ],
    ids=["socket", "FIFO", "device", "folder with a checkpoint of that name"],
)
def test_targets_that_are_not_files(
    src: Path, here: Path, name: str, make: Callable[[Path, socket.socket], None]
) -> None:
    """A target that is a socket, a FIFO or a device is not replaced, and a file does not replace a folder. The command
    fails with one line, and the target is still there.
    """
    target = Path(name)  # the path of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        make(target, listener)
        before = os.lstat(target).st_ino
        done = ckptconv("convert", "-f", "--to", "cpu", src, target)
        assert (done.returncode, done.stderr.count(b"ckptconv: ")) == (1, 1)
        assert b"is not a regular file" in done.stderr
        assert os.lstat(target).st_ino == before
        assert [name for name in os.listdir(here) if "ckptconv" in name] == []


@pytest.mark.parametrize("kind", ["file", "folder", "batch", "batch in a new folder"])
def test_folders_without_write_permission(src: Path, shards: Path, tmp_path: Path, kind: str) -> None:
    """A conversion into a folder without write permission reports one line with the reason for each output. The line
    does not mention a bug.
    """
    inputs = [shards] if kind == "folder" else [src]
    if "batch" in kind:
        inputs.append(Path(shutil.copy(src, tmp_path / "b.pt")))
    out = tmp_path / "out"
    out.mkdir(0o555)
    target = {"file": out / "dst.pt", "folder": out / "dst", "batch": out}.get(kind, out / "new")
    command = ["-m", "ckptconv", "convert", "--to", "cpu", "-q", "-j", "1", *inputs, target]
    done = subprocess.run([sys.executable, "-c", _LIKE_OTHERS, *command], capture_output=True)
    lines = done.stderr.decode().splitlines()
    assert (done.returncode, len(lines)) == (1, len(inputs)), done
    assert all("Permission denied" in line and "bug" not in line for line in lines)
    assert os.listdir(out) == []


def test_a_folder_for_a_batch_that_cannot_be_made(src: Path, tmp_path: Path) -> None:
    """If a file occupies the place of the output folder, each conversion of a batch fails with one line."""
    other = shutil.copy(src, tmp_path / "other.pt")
    done = ckptconv("convert", "--to", "cpu", "-q", "-j", "1", src, other, tmp_path / "src.pt" / "new")
    assert done.returncode == 1
    assert done.stderr.count(b"Not a directory") == done.stderr.count(b"\n") == 2
    assert b"bug" not in done.stderr


@pytest.mark.parametrize("first", ["isdir", "lexists"])
def test_a_folder_that_appears_while_it_is_looked_for(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A set is written to a folder even if another process creates that folder between two checks. The target path is
    then the folder itself.
    """
    target = tmp_path / "dst"
    real = getattr(os.path, first)

    def look(path: str | os.PathLike[str]) -> bool:
        found = bool(real(path))
        if os.fspath(path) == str(target):
            target.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(os.path, first, look)
    item = find_request(shards, target)
    assert item.is_folder
    assert item.dst == target


# Streams, terminals, locales


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_streams_that_are_closed(src: Path, tmp_path: Path, closed: str) -> None:
    """A conversion with closed standard streams writes the same output, without messages in it. Some daemons close the
    standard streams.
    """
    convert(src, tmp_path / "expected.pt", map_location="cuda:1")
    closing = " ".join(f"{number}>&-" for number in closed)
    shell = ["bash", "-c", f'exec "$@" {closing}', "bash", sys.executable, "-m", "ckptconv"]
    for words, status in (
        (["convert", "-v", "--to", "cuda:1", src, tmp_path / "dst.pt"], 0),
        (["inspect", "missing.pt"], 1),
    ):
        done = subprocess.run([*shell, *words], capture_output=True)
        assert done.returncode == status
        assert b"Traceback" not in done.stderr
    assert (tmp_path / "dst.pt").read_bytes() == (tmp_path / "expected.pt").read_bytes()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_without_a_reader(src: Path, tmp_path: Path, stream: str) -> None:
    """If nobody reads stdout or stderr, the output is still complete, and there is no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = ckptconv("convert", "--json", "-v", "--to", "cuda:1", src, tmp_path / "dst.pt", **{stream: pipe})
    convert(src, tmp_path / "expected.pt", map_location="cuda:1")
    assert (tmp_path / "dst.pt").read_bytes() == (tmp_path / "expected.pt").read_bytes()
    assert b"Traceback" not in (done.stderr or b"")
    assert sorted(os.listdir(tmp_path)) == ["dst.pt", "expected.pt", "src.pt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "xx_XX.no-such"},
        {"PYTHONIOENCODING": "cp037"},
        {"TERM": "dumb", "COLUMNS": "0", "LINES": "no"},
        {},
    ],
    ids=lambda each: " ".join(f"{name}={value}" for name, value in each.items()) or "none",
)
def test_odd_locales_and_terminals(tmp_path: Path, fixtures: Path, environment: dict[str, str]) -> None:
    """Names that the locale or the terminal cannot show are converted and inspected. Odd locales, encodings, terminal
    sizes and an empty environment cause no traceback.
    """
    names = {"gewicht.ü": torch.ones(2), "重み": torch.ones(3)}
    torch.save(names, tmp_path / "größe.pt")
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    options = {"env": {**kept, **environment}, "cwd": tmp_path, "start_new_session": True, "stdin": subprocess.DEVNULL}
    done = ckptconv(
        "convert", "größe.pt", "重み.pt", "--to", "cuda:0", "-v", "--rename", "gewicht", "weight", **options
    )
    assert done.returncode == 0, done.stderr
    assert list(torch.load(tmp_path / "重み.pt", map_location="cpu")) == ["weight.ü", "重み"]
    shown = ckptconv("inspect", "größe.pt", **options)
    missing = ckptconv("inspect", "grö.pt", **options)
    assert (shown.returncode, missing.returncode) == (0, 1)
    for each in (done, shown, missing):
        assert b"Traceback" not in each.stderr
        assert b"bug" not in each.stderr
