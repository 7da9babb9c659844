"""Behavior that only real machines show: open files, Ctrl-Break, scanners and filesystems of Windows and macOS."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[3] / "fixtures" / "cuda0.pt"
#: A program that prints a line and then waits for the disk, in steps that a signal can interrupt.
SLOW = """
import sys, time
from ckptconv.cli.main import main
from ckptconv.system import calls
calls.sync = lambda fd: print("waiting", flush=True) or [time.sleep(0.1) for _ in range(600)]
sys.argv[0] = "ckptconv"
main()
"""

on_windows = pytest.mark.skipif(sys.platform != "win32", reason="only on Windows")
on_macos = pytest.mark.skipif(sys.platform != "darwin", reason="only on macOS")


def is_wine() -> bool:
    """Return whether this Windows Python runs in Wine."""
    return sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


def run(*words: str | Path, status: int = 0) -> str:
    """Run a command, and return its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptconv", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stderr


@pytest.fixture
def converted(tmp_path: Path) -> bytes:
    """Return the bytes of the fixture, converted for the CPU."""
    run("convert", FIXTURE, tmp_path / "expected.pt", "--to", "cpu")
    return (tmp_path / "expected.pt").read_bytes()


@on_windows
@pytest.mark.parametrize("opened", ["open(sys.argv[1])", "calls.open_to_read(sys.argv[1])"])
def test_a_target_that_another_program_has_open(opened: str, tmp_path: Path, converted: bytes) -> None:
    """A target that another program has open is replaced completely or not at all. After the other program has closed
    it, it is replaced.
    """
    target = tmp_path / "out.pt"
    target.write_bytes(b"old")
    program = f"""
import sys
from ckptconv.system import calls
kept = {opened}
print("open", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == b"open"
        words = (sys.executable, "-m", "ckptconv", "convert", str(FIXTURE), str(target), "--to", "cpu", "--force")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, target.read_bytes()) in [(0, converted), (1, b"old")], done.stderr
        assert done.returncode == 0 or "out.pt" in done.stderr
        other.communicate()
    run("convert", FIXTURE, target, "--to", "cpu", "--force")
    assert target.read_bytes() == converted and sorted(os.listdir(tmp_path)) == ["expected.pt", "out.pt"]


def test_ctrl_break(tmp_path: Path) -> None:
    """A command that Ctrl-Break ends, or SIGTERM on other systems, leaves no file."""
    if is_wine():
        pytest.skip("Wine sends no Ctrl-Break without a console")
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, "convert", str(FIXTURE), str(tmp_path / "out.pt"), "--to", "cpu"],
        stdout=subprocess.PIPE,
        creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0,
    ) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == b"waiting"
        assert os.listdir(tmp_path) != []
        process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGTERM)
        assert process.wait(60) != 0
    assert os.listdir(tmp_path) == []


@on_windows
def test_many_new_files_next_to_a_scanner(tmp_path: Path, converted: bytes) -> None:
    """A virus scanner opens each new file. No output fails because of that."""
    (tmp_path / "in").mkdir()
    for i in range(100):
        (tmp_path / "in" / f"{i}.pt").write_bytes(FIXTURE.read_bytes())
    run("convert", tmp_path / "in", tmp_path / "out", "--to", "cpu", "-q")
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [converted] * 100


# Filesystems


def diskpart(*lines: str) -> None:
    """Run a script of commands for disks, which needs an administrator."""
    subprocess.run(["diskpart"], input="\n".join((*lines, "exit")), text=True, check=True, capture_output=True)


@pytest.fixture
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the root of a new, empty volume with the filesystem that the test names."""
    image, root = tmp_path / "image", tmp_path / "volume"
    root.mkdir()
    if sys.platform == "win32":
        if is_wine() or not ctypes.windll.shell32.IsUserAnAdmin():
            pytest.skip("a volume needs diskpart and an administrator")
        select = f'select vdisk file="{image}.vhd"'
        make = (f'create vdisk file="{image}.vhd" maximum=64', select, "attach vdisk", "create partition primary")
        diskpart(*make, f"format fs={request.param} quick", f'assign mount="{root}"')
        yield root
        diskpart(select, "detach vdisk")
    else:
        hdiutil("create", "-size", "64m", "-fs", request.param, "-volname", "ckptconv", f"{image}.dmg")
        hdiutil("attach", f"{image}.dmg", "-mountpoint", str(root))
        yield root
        hdiutil("detach", str(root), "-force")


def hdiutil(*words: str) -> None:
    """Run the program of macOS for images of disks."""
    subprocess.run(["hdiutil", *words], check=True, capture_output=True)


def check_volume(volume: Path, converted: bytes, names: Sequence[str]) -> None:
    """Write, replace and refuse files and folders on `volume`, which may ignore the case of letters.

    `names` are the hidden names that the system itself creates there.
    """
    run("convert", FIXTURE, volume / "out.pt", "--to", "cpu")
    assert "the output exists" in run("convert", FIXTURE, volume / "out.pt", "--to", "cpu", status=1)
    run("convert", FIXTURE, volume / "out.pt", "--to", "cpu", "--force", "--verify")
    assert (volume / "out.pt").read_bytes() == converted
    for force in ([], ["--force"]):
        run("convert", FIXTURE, volume / "set", "--state-dict", "--max-shard-size", "100", *force)
    run("verify", volume / "set")
    assert {path.name for path in volume.iterdir()} - set(names) == {"out.pt", "set"}


def check_case(volume: Path, tmp_path: Path, converted: bytes) -> None:
    """Convert two files whose names differ in the case of a letter, from a folder and to `volume`.

    Either `volume` has both, or the conversion is refused, and nothing is replaced.
    """
    ignores = (volume / "OUT.PT").exists()
    for name in ("one/a.pt", "two/A.pt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(FIXTURE.read_bytes())
    words = ("convert", tmp_path / "one/a.pt", tmp_path / "two/A.pt", f"{volume / 'both'}{os.sep}", "--to", "cpu")
    error = run(*words, status=1 if ignores else 0)
    assert ("both be written to this path" in error) == ignores
    assert [path.read_bytes() for path in volume.glob("both/*")] == [converted] * (0 if ignores else 2)


def test_the_filesystem_of_temporary_files(tmp_path: Path, converted: bytes) -> None:
    """The filesystem of temporary files passes the checks for volumes."""
    (tmp_path / "volume").mkdir()
    check_volume(tmp_path / "volume", converted, [])
    check_case(tmp_path / "volume", tmp_path, converted)


@on_windows
@pytest.mark.parametrize("volume", ["exfat", "fat32", "ntfs"], indirect=True)
def test_filesystems_of_windows(volume: Path, tmp_path: Path, converted: bytes) -> None:
    """Outputs on each filesystem have the same bytes."""
    check_volume(volume, converted, ["System Volume Information", "$RECYCLE.BIN"])
    check_case(volume, tmp_path, converted)


@on_macos
@pytest.mark.parametrize("volume", ["ExFAT", "HFS+", "APFS", "Case-sensitive APFS"], indirect=True)
def test_filesystems_of_macos(volume: Path, tmp_path: Path, converted: bytes) -> None:
    """Outputs on each filesystem have the same bytes. A change in place is undone."""
    check_volume(volume, converted, [".fseventsd", ".Trashes", ".DS_Store", ".Spotlight-V100"])
    check_case(volume, tmp_path, converted)
    (volume / "in.pt").write_bytes(FIXTURE.read_bytes())
    run("convert", volume / "in.pt", "--in-place", "--to", "cpu")
    run("undo", volume / "in.pt")
    assert (volume / "in.pt").read_bytes() == FIXTURE.read_bytes()
