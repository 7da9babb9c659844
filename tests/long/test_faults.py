"""Real faults at every system call of a conversion, injected by strace; real full disks; real limits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ckptconv import convert
from ckptconv.conversion import run
from ckptconv.errors import OutputError
from ckptconv.locations import to_devices
from ckptconv.model import Edits

OLD = b"the old output"
OLD_SET = {"pytorch_model-00001-of-00001.bin": b"old", "pytorch_model.bin.index.json": b"{}", "optimizer.pt": b"old"}
WRITE_SIDE = (
    "openat", "ioctl", "fchmod", "fadvise64", "fallocate", "pwrite64", "copy_file_range", "sync_file_range", "fsync",
    "close", "rename", "link", "unlink", "mkdir", "chmod", "renameat2", "unlinkat", "rmdir",
)  # fmt: skip
FAULTS = ("error=ENOSPC", "error=EIO", "error=EINTR", "signal=SIGINT", "signal=SIGTERM", "signal=SIGKILL")
TO_CPU = Edits(to_devices("cpu"))


#: What is in a file, or in the files of a folder.
Content = bytes | dict[str, bytes]


def content_of(path: Path) -> Content | None:
    """What stands at PATH, if anything does."""
    if path.is_dir():
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if not file.is_dir()}
    return path.read_bytes() if path.exists() else None


class Conversion:
    """A conversion in a process under strace, its SRC, its DST in a folder of its own, and what DST may be: before, or new.

    CASTS: numbers are rounded too, by threads, which write them.
    """

    def __init__(self, src: Path, folder: Path, name: str, before: Content | None, *, casts: bool = False) -> None:
        self.src, self.folder, self.before, self.casts = src, folder, before, casts
        self.target, self.log = folder / "out" / name, folder / "strace.log"
        self.target.parent.mkdir()
        convert(src, self.target, map_location="cpu", dtype="bf16" if casts else None)
        self.new = content_of(self.target)
        self.trace()  # the interpreter's own calls are the same in each later run: its modules are compiled now
        self.calls = self.write_side(self.trace()[1])

    def trace(self, *options: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Convert from a fresh start; the process, and the lines of strace."""
        shutil.rmtree(self.target.parent, ignore_errors=True)
        self.target.parent.mkdir()
        if isinstance(self.before, bytes):
            self.target.write_bytes(self.before)
        elif self.before is not None:
            self.target.mkdir()
            for name, data in self.before.items():
                (self.target / name).write_bytes(data)
        command = [sys.executable, "-m", "ckptconv", "convert", "-q", str(self.src), str(self.target), "--to", "cpu"]
        command += ["--force"] if self.before is not None else []
        command += ["--dtype", "bf16"] if self.casts else []
        done = subprocess.run(
            ["strace", *(["-f"] if self.casts else []), "-y", "-o", str(self.log), "-e", f"trace={','.join(WRITE_SIDE)}", *options, *command],
            capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        )  # fmt: skip
        return done, self.log.read_text().splitlines()

    def of_main_thread(self, lines: list[str]) -> list[str]:
        """Those of LINES that are the first thread's, without its number."""
        if not self.casts:
            return lines
        number = lines[0].split()[0]
        own = [line.removeprefix(number).lstrip() for line in lines if line.startswith(number)]
        return [
            line for line in own if not line.startswith("<...")
        ]  # the end of a call that another thread's cut in two

    def write_side(self, lines: list[str]) -> list[tuple[str, int]]:
        """(call, its number among the calls of that name): from the opening of the temporary to the closing of the folder."""
        calls: list[tuple[str, int]] = []
        seen: dict[str, int] = {}
        for line in self.of_main_thread(lines):
            name = line.split("(")[0]
            seen[name] = seen.get(name, 0) + 1
            if calls or ".ckptconv-" in line:
                calls.append((name, seen[name]))
            if line.startswith("close(") and f"<{self.target.parent}>" in line:
                return calls
        raise AssertionError("the folder is never closed: " + "\n".join(lines[-20:]))

    def check(self, fault: str, call: str, number: int) -> None:
        """Inject FAULT and see that nothing is lost and nothing is claimed that is not so."""
        done, lines = self.trace("-e", f"inject={call}:{fault}:when={number}")
        what = f"{fault} at {call} {number}: exit {done.returncode}, {done.stderr!r}\n" + "\n".join(lines[-15:])
        assert any("INJECTED" in line or "--- SIG" in line or "+++ killed" in line for line in lines), what
        found = content_of(self.target)
        assert found in (self.before, self.new), what
        assert done.returncode != 0 or found == self.new, what
        left = sorted(set(os.listdir(self.target.parent)) - {self.target.name})
        if fault == "signal=SIGKILL":
            assert done.returncode == -signal.SIGKILL, what
            temporary = rf"\.{re.escape(self.target.name)}\.ckptconv-[0-9a-f]{{6}}\.tmp"
            assert all(re.fullmatch(temporary, name) for name in left), what
            return
        cannot_be_removed = call in ("unlink", "unlinkat", "rmdir") and fault.startswith("error")
        assert not left or cannot_be_removed, what
        assert "Traceback" not in done.stderr, what
        if done.returncode in (0, 143):
            assert done.stderr == "", what
        else:
            assert done.returncode == (130 if fault == "signal=SIGINT" else 1), what
            assert done.stderr.strip().count("\n") == 0 and done.stderr.strip(), what  # click ends the ^C line


def a_set(folder: Path) -> Path:
    """A model in two shards, and its optimizer."""
    import torch

    src = folder / "src"
    src.mkdir()
    for i in (1, 2):
        torch.save({f"w{i}": torch.randn(5000)}, src / f"pytorch_model-0000{i}-of-00002.bin")
    torch.save({"state": {}, "param_groups": []}, src / "optimizer.pt")
    return src


@pytest.fixture(
    scope="module", params=["replace", "create", "to safetensors", "from safetensors", "cast", "new folder", "old folder"]
)  # fmt: skip
def conversion(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fixtures: Path) -> Conversion:
    """One that replaces a file, and others that make new ones: with threads beside the copy, and with pieces that are written last."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("faults")
    src = fixtures / "training.pt"
    if request.param.endswith("folder"):
        return Conversion(a_set(folder), folder, "dst", OLD_SET if request.param == "old folder" else None)
    if request.param == "cast":
        import torch

        src = folder / "src.pt"
        torch.save({f"w{i}": torch.randn(70_000) for i in range(3)} | {"n": torch.arange(9)}, src)
    if request.param == "from safetensors":
        convert(src, folder / "src.safetensors")
        src = folder / "src.safetensors"
    name = "dst.safetensors" if request.param == "to safetensors" else "dst.pt"
    return Conversion(
        src, folder, name, OLD if request.param == "replace" else None, casts=request.param == "cast"
    )  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_at_every_call(conversion: Conversion, fault: str) -> None:
    """Whichever write-side call fails or is the last: old output or new, exit 0 only with the new one, no temporary, one line."""
    calls = conversion.calls
    if conversion.casts and fault not in ("error=EIO", "signal=SIGINT", "signal=SIGKILL"):
        pytest.skip("a run takes seconds here, and the other conversions have this fault")
    if (
        conversion.casts
    ):  # a thread's calls are counted by themselves; how many files torch's import opens differs from run to run
        calls = [(call, number) for call, number in calls if call not in ("openat", "ioctl", "close")]
        calls = list(dict.fromkeys([*calls, ("pwrite64", 1), ("sync_file_range", 1)]))
    for call, number in calls:
        conversion.check(fault, call, number)


def test_the_order_of_calls(conversion: Conversion) -> None:
    """Bytes, their fsync, the name, the fsync of the folder: after a loss of power the name has whole bytes behind it. Of a folder, all files and the names in it are synced before it gets its name."""
    done, lines = conversion.trace()
    assert done.returncode == 0
    if isinstance(conversion.new, dict):
        synced = [match[1] for line in lines if (match := re.match(r"fsync\(\d+<([^>]*)>", line))]
        temporary = [re.sub(r".*/\.dst\.ckptconv-[0-9a-f]{6}\.tmp", "T", path) for path in synced]
        assert sorted(temporary[:-2]) == sorted(f"T/{name}" for name in conversion.new)
        assert temporary[-2:] == ["T", str(conversion.target.parent)]
        named = next(i for i, line in enumerate(lines) if line.startswith(("rename(", "renameat2(")))
        assert sum(line.startswith("fsync(") for line in lines[:named]) == len(synced) - 1
        assert lines[named].startswith("renameat2(") == (conversion.before is not None)
        return
    steps = []
    for line in lines:
        line = re.sub(r"^\d+ +", "", line)
        name = line.split("(")[0]
        if name in ("pwrite64", "copy_file_range") and ".ckptconv-" in line:
            steps.append("write")
        elif name == "fsync":
            steps.append("fsync file" if ".ckptconv-" in line else "fsync folder")
        elif name in ("rename", "link") and ".ckptconv-" in line:
            steps.append("name")
    assert steps == ["write"] * (len(steps) - 3) + ["fsync file", "name", "fsync folder"]
    assert len(steps) > 3


@pytest.fixture
def tmpfs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of as many bytes as the test's parameter says."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A checkpoint of a million bytes."""
    import torch

    torch.save({"w": torch.arange(250_000)}, tmp_path / "big.pt")
    return tmp_path / "big.pt"


@pytest.mark.parametrize("tmpfs", [4 << 10, 64 << 10, 1 << 20, 1_996_000], indirect=True)
def test_a_disk_that_is_too_small(tmpfs: Path, big: Path) -> None:
    """That the disk is too small is said before the first byte, and the old output is intact."""
    target = tmpfs / "dst.pt"
    target.write_bytes(OLD)
    counts: list[int] = []
    with pytest.raises(OutputError, match="too little free space"):
        run(big, target, TO_CPU, force=True, progress=lambda size: nullcontext(counts.append))
    assert counts == []
    assert target.read_bytes() == OLD
    assert os.listdir(tmpfs) == ["dst.pt"]


@pytest.mark.parametrize("tmpfs", [4 << 20], indirect=True)
def test_a_disk_that_is_large_enough(tmpfs: Path, big: Path) -> None:
    """From disk to tmpfs, where the kernel may not copy between files, comes the same as on the disk."""
    convert(big, tmpfs / "dst.pt", map_location="cuda:1")
    convert(big, big.with_name("here.pt"), map_location="cuda:1")
    assert (tmpfs / "dst.pt").read_bytes() == big.with_name("here.pt").read_bytes()


def test_a_limit_on_the_size_of_files(big: Path) -> None:
    """A process that may write no more than 512 KB says so in one line and leaves nothing."""
    target = big.with_name("dst.pt")
    target.write_bytes(OLD)
    command = 'ulimit -f 512; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "ckptconv", "convert", "-f", "--to", "cpu", big, target],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "File too large" in done.stderr
    assert target.read_bytes() == OLD
    assert sorted(os.listdir(big.parent)) == ["big.pt", "dst.pt"]
