"""A folder of files as a target: the old one or the new one, whole, whatever happens and wherever the process ends."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Literal, OutFile
from ckptconv.errors import InputChangedError, OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.output import folders as output_folders
from ckptconv.output import linux
from ckptconv.output.folders import NewFolder, write_folder

OLD = {"model.safetensors": b"old model", "config.json": b"old config", "inner/old.bin": b"old inner"}
#: All by which the state of a disk changes.
CALLS = {
    os: (
        "mkdir",
        "open",
        "pwrite",
        "copy_file_range",
        "fsync",
        "fchmod",
        "chmod",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    ),
    linux: ("exchange", "fallocate"),
    shutil: ("rmtree",),
}
FAULTS = (errno.ENOSPC, errno.EACCES)


def may_go(name: str) -> bool:
    """What an old folder may lose."""
    return name in OLD


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """Bytes, no two blocks alike."""
    path = tmp_path / "src"
    path.write_bytes(b"".join(i.to_bytes(3, "big") for i in range(7000)))
    with Source(path) as source:
        yield source


def files_for(target: Path, source: Source) -> tuple[list[OutFile], dict[str, bytes]]:
    """Three files, one of them in a folder, and what will be in them."""
    data = source.path.read_bytes()
    files = [
        OutFile(target / "a", (ByteRange(source, 0, 9000),), 9000),
        OutFile(target / "b", (Literal(b"head"), ByteRange(source, 5, 7)), 11),
        OutFile(target / "inner" / "c", (Literal(b"index"),), 5),
    ]
    return files, {"a": data[:9000], "b": b"head" + data[5:12], "inner/c": b"index"}


def fill(target: Path, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)


def tree(folder: Path) -> dict[str, bytes]:
    """The files below FOLDER."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert_to(
    target: Path, source: Source, may_go: Callable[[str], bool] = may_go, **options: Any
) -> dict[str, bytes]:
    files, new = files_for(target, source)
    write_folder(NewFolder(target, files, may_go=may_go), source, **{"replace": True, "verify": True, **options})
    return new


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("before", ["absent", "empty", "full"])
def test_a_folder_is_written(tmp_path: Path, source: Source, before: str, jobs: int) -> None:
    """A new folder, one in the place of an empty one, and one in that of an old one hold the files
    and no more; beside them nothing is left.
    """
    target = tmp_path / "out" / "model"
    (target if before == "empty" else target.parent).mkdir(parents=True)
    if before == "full":
        fill(target, OLD)
    new = convert_to(target, source, jobs=jobs, replace=before == "full")
    assert tree(target) == new
    assert os.listdir(target.parent) == ["model"]


def test_an_old_folder_keeps_its_mode(tmp_path: Path, source: Source) -> None:
    """The new folder, and a file that was there before, have the modes of the old ones; others follow the umask."""
    target = tmp_path / "model"
    fill(target, {"a": b"old"})
    target.chmod(0o750)
    (target / "a").chmod(0o600)
    convert_to(target, source, may_go=lambda name: False)
    assert [oct(path.stat().st_mode & 0o777) for path in (target, target / "a")] == ["0o750", "0o600"]


class Dead(BaseException):
    """The process is no more."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Counts the calls that change a disk; ``fault``, called with their number and name, may raise.

    ``rmtree`` is one call, as are the names that it takes.
    """
    state: dict[str, Any] = {"number": 0, "fault": lambda number, name: None}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            state["number"] += 1
            state["fault"](state["number"], name)
            return real(*args, **options)

        return call

    for module, names in CALLS.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return state


def counts(tmp_path: Path, source: Source, calls: dict[str, Any]) -> int:
    """How many calls one conversion takes."""
    target = tmp_path / "once"
    fill(target, OLD)
    calls["number"] = 0
    convert_to(target, source)
    return int(calls["number"])


def test_a_process_that_ends_anywhere_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, source: Source, calls: dict[str, Any]
) -> None:
    """Nothing can be done to the disk any more from the N-th call on, for every N: as after a kill.

    The target is the old folder or the new one, whole.
    """
    ends: list[bool] = []
    for last in range(1, counts(tmp_path, source, calls) + 1):
        target = tmp_path / f"dead{last}" / "model"
        calls["fault"] = lambda number, name: None
        fill(target, OLD)

        def die(number: int, name: str, last: int = last) -> None:
            if number >= last:
                raise Dead

        calls["number"], calls["fault"] = 0, die
        _, new = files_for(target, source)
        with pytest.raises(Dead):
            convert_to(target, source)
        assert tree(target) in (OLD, new), last
        ends.append(tree(target) == new)
        left = [name for name in os.listdir(target.parent) if name != "model"]
        assert all(re.fullmatch(r"\.model\.ckptconv-[0-9a-f]{6}\.tmp", name) for name in left)
    assert ends == sorted(ends)
    assert 0 < sum(ends) < len(ends)


@pytest.mark.parametrize("code", FAULTS)
def test_a_call_that_fails_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, source: Source, calls: dict[str, Any], code: int
) -> None:
    """Whichever call fails: the old folder and nothing beside it, or the new one;
    and success is never claimed for less.
    """
    for nth in range(1, counts(tmp_path, source, calls) + 1):
        target = tmp_path / f"fault{nth}" / "model"
        failed: list[str] = []
        calls["fault"] = lambda number, name: None
        fill(target, OLD)

        def fail(number: int, name: str, nth: int = nth, failed: list[str] = failed) -> None:
            if number == nth and name != "rmtree":  # it ignores what it cannot remove
                failed.append(name)
                raise OSError(code, os.strerror(code))

        calls["number"], calls["fault"] = 0, fail
        _, new = files_for(target, source)
        try:
            convert_to(target, source)
        except OutputError as error:
            in_place = "in place" in str(error)
            assert tree(target) == (new if in_place else OLD), (nth, failed)
        else:
            assert tree(target) == new, (nth, failed)
        if failed not in (["unlink"], ["rmdir"]):
            assert os.listdir(target.parent) == ["model"], (nth, failed)


def test_without_the_exchange_the_old_folder_is_moved_aside_and_back(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system cannot exchange two names, the new folder takes the old one's place in two steps; where the
    second fails, the old one comes back.
    """
    monkeypatch.setattr(linux, "exchange", lambda a, b: False)
    target = tmp_path / "out" / "model"
    fill(target, OLD)
    assert tree(target) != convert_to(target, source) or tree(target)
    _, new = files_for(target, source)
    assert tree(target) == new
    assert os.listdir(target.parent) == ["model"]
    shutil.rmtree(target)
    fill(target, OLD)
    real, seen = os.rename, []

    def second_fails(a: Any, b: Any) -> None:
        seen.append(b)
        if len(seen) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(a, b)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OutputError):
        convert_to(target, source)
    assert tree(target) == OLD
    assert os.listdir(target.parent) == ["model"]


def test_what_would_be_lost_is_refused(tmp_path: Path, source: Source) -> None:
    """A folder that is not empty is replaced with ``replace`` alone, and even then not if
    it has what the new one would not have.
    """
    target = tmp_path / "model"
    fill(target, {"a": b"old", "notes.txt": b"mine", "deep/er/x": b"mine"})
    with pytest.raises(TargetExistsError, match="--force replaces"):
        convert_to(target, source, replace=False)
    with pytest.raises(RefusedError, match=r"would not have: deep/er/x, notes\.txt"):
        convert_to(target, source)
    assert tree(target) == {"a": b"old", "notes.txt": b"mine", "deep/er/x": b"mine"}


@pytest.mark.parametrize("kind", ["empty folder", "link to a folder", "link to nowhere"])
def test_folders_and_links_in_an_old_folder_are_something_too(tmp_path: Path, source: Source, kind: str) -> None:
    """An empty folder and a link in the old folder are not thrown away in silence."""
    target = tmp_path / "model"
    fill(target, {"a": b"old"})
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, {"x": b"precious"})
    if kind == "empty folder":
        (target / "logs").mkdir()
    else:
        (target / "logs").symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nowhere")
    with pytest.raises(RefusedError, match="logs"):
        convert_to(target, source)
    convert_to(target, source, may_go=lambda name: name == "logs")
    assert tree(elsewhere) == {"x": b"precious"}


def test_what_appears_meanwhile_is_not_lost(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody puts into the old folder at the last moment stays: the two folders change names again."""
    target = tmp_path / "out" / "model"
    fill(target, OLD)
    real = linux.exchange

    def late(a: str, b: str) -> bool:
        monkeypatch.setattr(linux, "exchange", real)
        (target / "late").write_bytes(b"mine")
        return real(a, b)

    monkeypatch.setattr(linux, "exchange", late)
    with pytest.raises(RefusedError, match="late"):
        convert_to(target, source)
    assert tree(target) == {**OLD, "late": b"mine"}
    assert os.listdir(target.parent) == ["model"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another was faster, its folder stays."""
    target = tmp_path / "out" / "model"
    target.parent.mkdir()
    real = output_folders.sync_folder

    def late(folder: Path) -> None:
        if not target.exists():
            fill(target, {"theirs": b"theirs"})
        real(folder)

    monkeypatch.setattr(output_folders, "sync_folder", late)
    with pytest.raises(TargetExistsError):
        convert_to(target, source, replace=False)
    assert tree(target) == {"theirs": b"theirs"}
    assert os.listdir(target.parent) == ["model"]


def test_an_input_that_changes_leaves_the_old_folder(tmp_path: Path, source: Source) -> None:
    """The folder appears only if the source is still what it was."""
    target = tmp_path / "out" / "model"
    fill(target, OLD)
    os.utime(source.path, ns=(1, 1))
    with pytest.raises(InputChangedError):
        convert_to(target, source)
    assert tree(target) == OLD
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("kind", ["file", "FIFO", "link to a file", "no parent"])
def test_what_cannot_be_a_folder(tmp_path: Path, source: Source, kind: str) -> None:
    """A file, a FIFO or a link to a file is never replaced by a folder, and the folder
    that it is to stand in must be there.
    """
    target = tmp_path / "model"
    if kind == "file":
        target.write_bytes(b"mine")
    elif kind == "FIFO":
        os.mkfifo(target)
    elif kind == "link to a file":
        (tmp_path / "mine").write_bytes(b"mine")
        target.symlink_to(tmp_path / "mine")
    else:
        target = tmp_path / "no" / "model"
    with pytest.raises(UsageError if kind == "no parent" else RefusedError):
        convert_to(target, source)


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files together are compared with what is free, where blocks are not shared."""
    target = tmp_path / "out" / "model"
    target.parent.mkdir()
    filled: list[Path] = []
    monkeypatch.setattr(output_folders, "shares_blocks", lambda fd, file: False)
    monkeypatch.setattr(output_folders, "fill", lambda path, *args, **options: filled.append(path))
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:4], 2, *real[5:])))
    with pytest.raises(OutputError, match="too little free space"):
        convert_to(target, source)
    assert filled == []
    assert os.listdir(target.parent) == []


def test_the_first_failure_ends_the_others(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several threads that write, those that go on after one has failed end at their next step;
    the error is that of the one that failed.
    """
    target = tmp_path / "model"
    ended: list[str] = []

    def fill_one(path: Path, file: OutFile, *args: Any, progress: Callable[[int], None], **options: Any) -> Any:
        if path.name == "a":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        try:
            for _ in range(10_000):
                progress(1)
                time.sleep(0.001)
        except BaseException:
            ended.append(path.name)
            raise

    monkeypatch.setattr(output_folders, "fill", fill_one)
    with pytest.raises(OutputError, match="EIO"):
        convert_to(target, source, jobs=2)
    assert "b" in ended  # and perhaps the last, if it had begun
    assert not target.exists()


def test_ctrl_c_while_the_old_folder_is_deleted(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C that comes as a folder in it is closed, which the library then closes once more, is told as Ctrl-C; the
    old folder is gone all the same.
    """
    target = tmp_path / "out" / "model"
    fill(target, OLD)
    real = shutil.rmtree

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        try:
            raise KeyboardInterrupt
        finally:
            os.close(-1)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_to(target, source)
    assert tree(target) == files_for(target, source)[1]
    assert os.listdir(target.parent) == ["model"]
