"""A folder as the target: it is always the complete old folder or the complete new one, even if the process ends at any
time.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ckptconv.byteranges.sources import Source, list_local
from ckptconv.byteranges.spans import ByteRange, Literal, OutFile
from ckptconv.errors import InputChangedError, OutputError, RefusedError, TargetExistsError, UsageError
from ckptconv.output import folders as output_folders
from ckptconv.output.folders import NewFolder, write_folder
from ckptconv.system import filesystem
from tests.support.conversions import Error

OLD = {"model.safetensors": b"old model", "config.json": b"old config", "inner/old.bin": b"old inner"}
#: All calls that change the state of a disk.
CALLS = {
    os: (
        "mkdir",
        "open",
        "pwrite",
        "copy_file_range",
        "fsync",
        "chmod",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    ),
    filesystem: ("exchange", "fallocate"),
    shutil: ("rmtree",),
}
FAULTS = (errno.ENOSPC, errno.EACCES)


def may_go(name: str) -> bool:
    """Return whether the file `name` of the old folder may be deleted."""
    return name in OLD


def files_for(target: Path, source: Source) -> tuple[list[OutFile], dict[str, bytes]]:
    """Return three planned files, one of them in a subfolder, and their contents."""
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
    """Return the contents of the files below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def convert_to(
    target: Path, source: Source, may_go: Callable[[str], bool] = may_go, **options: Any
) -> dict[str, bytes]:
    files, new = files_for(target, source)
    write_folder(NewFolder(target, files, may_go=may_go), source, **{"replace": True, "verify": True, **options})
    return new


def failure(kind: type[Error], words: str | None, target: Path, source: Source, **options: Any) -> Error:
    """Return the error of the class `kind` that writing the folder `target` raises. Its message matches `words`."""
    with pytest.raises(kind, match=words) as caught:
        convert_to(target, source, **options)
    return caught.value


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the path of the target, in a folder of its own."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


@pytest.fixture
def old(target: Path) -> Path:
    """Return the target with the files of an old folder."""
    fill(target, OLD)
    return target


def assert_alone(target: Path, content: dict[str, bytes]) -> None:
    """Check that the folder `target` has this `content`, and that there is nothing next to it."""
    assert tree(target) == content
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("before", ["absent", "empty", "full"])
def test_a_folder_is_written(target: Path, source: Source, before: str, jobs: int) -> None:
    """A new folder, one in place of an empty folder, and one in place of an old folder contain exactly the planned
    files. Nothing else is left next to them.
    """
    if before == "empty":
        target.mkdir()
    elif before == "full":
        fill(target, OLD)
    assert_alone(target, convert_to(target, source, jobs=jobs, replace=before == "full"))


def test_an_old_folder_keeps_its_mode(target: Path, source: Source) -> None:
    """The new folder, and each file that existed before, keep the modes of the old ones."""
    fill(target, {"a": b"old"})
    target.chmod(0o750)
    (target / "a").chmod(0o600)
    convert_to(target, source, may_go=lambda name: False)
    assert [oct(path.stat().st_mode & 0o777) for path in (target, target / "a")] == ["0o750", "0o600"]


@pytest.mark.parametrize("kept", [True, False])
def test_the_temporary_is_never_more_open_than_the_folder(
    target: Path, source: Source, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """A folder that replaces a private one, or that is created like one, is private while it is written. So are its
    subfolders.
    """
    private = target if kept else target.with_name("like")
    fill(private, {"inner/old.bin": b"old"})
    for folder in (private / "inner", private):
        folder.chmod(0o700 if kept else 0o500)
    made = []
    make = os.mkdir

    def watched(path: Any, mode: int = 0o777) -> None:
        make(path, mode)
        made.append(oct(os.stat(path).st_mode & 0o777))

    monkeypatch.setattr(os, "mkdir", watched)
    files, _ = files_for(target, source)
    write_folder(NewFolder(target, files, like=private, may_go=may_go), source, replace=True, verify=False)
    assert made == ["0o700", "0o700"]
    assert {oct(each.stat().st_mode & 0o077) for each in (target, target / "inner")} == {"0o0"}


def swapped(temporary: Path) -> None:
    """Replace the `temporary` by a folder of another user."""
    temporary.rename(temporary.with_name("moved away"))
    fill(temporary, {"theirs": b"theirs"})


def test_a_temporary_file_that_another_process_replaces(
    old: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user of the parent folder replaces the temporary folder. The old folder is kept, and the other user's
    folder is not deleted.
    """
    sync = output_folders.calls.sync_folder

    def sync_and_swap(path: Path) -> None:
        sync(path)
        if not old.with_name("moved away").exists() and path.parent == old.parent:
            swapped(path)

    monkeypatch.setattr(output_folders.calls, "sync_folder", sync_and_swap)
    with pytest.raises(OutputError, match="replaced the output"):
        convert_to(old, source)
    assert tree(old) == OLD
    (left,) = (path for path in old.parent.iterdir() if path.name not in ("model", "moved away"))
    assert tree(left) == {"theirs": b"theirs"}


@pytest.mark.parametrize("before", ["old", "absent"])
def test_a_temporary_file_that_is_replaced_at_the_last_moment(
    target: Path, source: Source, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another user's folder is at the target after the rename, this is an error. The message contains the path of
    the old folder.
    """
    if before == "old":
        fill(target, OLD)
    rename, exchange = os.rename, filesystem.exchange

    def late(old: Any, new: Any) -> None:
        monkeypatch.undo()
        swapped(Path(old))
        (exchange if before == "old" else rename)(old, new)

    def late_exchange(old: str, new: str) -> bool:
        late(old, new)
        return True

    monkeypatch.setattr(os, "rename", late)
    monkeypatch.setattr(filesystem, "exchange", late_exchange)
    with pytest.raises(OutputError, match="replaced the output") as caught:
        convert_to(target, source)
    assert tree(target) == {"theirs": b"theirs"}
    others = {path for path in target.parent.iterdir() if path.name not in ("model", "moved away")}
    assert [tree(path) for path in others] == ([OLD] if before == "old" else [])
    assert all(str(path) in str(caught.value) for path in others)


class Dead(BaseException):
    """The exception that stands for the end of the process."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Count the calls that change a disk, and return the state with their number. The function ``fault`` in the state
    is called with the number and the name of each call, and may raise.

    ``rmtree`` counts as one call, and the calls in it count too.
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
        for name in filter(partial(hasattr, module), names):
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return state


def counts(tmp_path: Path, source: Source, calls: dict[str, Any]) -> int:
    """Return the number of calls in one conversion."""
    target = tmp_path / "once"
    fill(target, OLD)
    calls["number"] = 0
    convert_to(target, source)
    return int(calls["number"])


def test_a_process_that_ends_anywhere_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, source: Source, calls: dict[str, Any]
) -> None:
    """For every N, all calls from the N-th on fail, as if the process were killed.

    The target is then the complete old folder or the complete new one.
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
    """If any call fails, the target is the old folder, or the new one if the error says that it is in place. Without an
    error, the target is the new folder.
    """
    for nth in range(1, counts(tmp_path, source, calls) + 1):
        target = tmp_path / f"fault{nth}" / "model"
        failed: list[str] = []
        calls["fault"] = lambda number, name: None
        fill(target, OLD)

        def fail(number: int, name: str, nth: int = nth, failed: list[str] = failed) -> None:
            if number == nth and name != "rmtree":  # rmtree ignores what it cannot remove
                failed.append(name)
                raise OSError(code, os.strerror(code))

        calls["number"], calls["fault"] = 0, fail
        _, new = files_for(target, source)
        try:
            convert_to(target, source)
        except OutputError as error:
            in_place = "is in place" in str(error)
            assert tree(target) == (new if in_place else OLD), (nth, failed)
        else:
            assert tree(target) == new, (nth, failed)
        if failed not in (["unlink"], ["rmdir"]):
            assert os.listdir(target.parent) == ["model"], (nth, failed)


def test_without_the_exchange_the_old_folder_is_moved_aside_and_back(
    old: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system cannot exchange two names, the old folder is moved away before the new one is renamed. If the
    second rename fails, the old folder is moved back.
    """
    monkeypatch.setattr(filesystem, "exchange", lambda a, b: False)
    assert_alone(old, convert_to(old, source))
    shutil.rmtree(old)
    fill(old, OLD)
    real, seen = os.rename, []

    def second_fails(a: Any, b: Any) -> None:
        seen.append(b)
        if len(seen) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(a, b)

    monkeypatch.setattr(os, "rename", second_fails)
    failure(OutputError, None, old, source)
    assert_alone(old, OLD)


def test_a_replacement_that_would_lose_files_is_refused(target: Path, source: Source) -> None:
    """A folder that is not empty is replaced only with ``replace``, and only if no other files in it would be lost."""
    mine = {"a": b"old", "notes.txt": b"mine", "deep/er/x": b"mine"}
    fill(target, mine)
    failure(TargetExistsError, "--force replaces", target, source, replace=False)
    failure(RefusedError, r"would be deleted: deep/er/x, notes\.txt", target, source)
    assert tree(target) == mine


@pytest.mark.parametrize("kind", ["empty folder", "link to a folder", "link to nowhere"])
def test_folders_and_links_in_an_old_folder_are_something_too(
    target: Path, tmp_path: Path, source: Source, kind: str
) -> None:
    """An empty folder and a link in the old folder are not deleted without permission."""
    fill(target, {"a": b"old"})
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere, {"x": b"precious"})
    if kind == "empty folder":
        (target / "logs").mkdir()
    else:
        (target / "logs").symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nowhere")
    failure(RefusedError, "logs", target, source)
    convert_to(target, source, may_go=lambda name: name == "logs")
    assert tree(elsewhere) == {"x": b"precious"}


def test_a_file_that_appears_meanwhile_is_not_lost(old: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process puts a file into the old folder at the last moment, the two folders are exchanged again, and
    the file is kept.
    """
    real = filesystem.exchange

    def late(a: str, b: str) -> bool:
        monkeypatch.setattr(filesystem, "exchange", real)
        (old / "late").write_bytes(b"mine")
        return real(a, b)

    monkeypatch.setattr(filesystem, "exchange", late)
    failure(RefusedError, "late", old, source)
    assert_alone(old, {**OLD, "late": b"mine"})


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    target: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that another process creates at the target during the write is kept."""
    real = output_folders.calls.sync_folder

    def late(folder: Path) -> None:
        if not target.exists():
            fill(target, {"theirs": b"theirs"})
        real(folder)

    monkeypatch.setattr(output_folders.calls, "sync_folder", late)
    failure(TargetExistsError, None, target, source, replace=False)
    assert_alone(target, {"theirs": b"theirs"})


def test_an_input_that_changes_leaves_the_old_folder(old: Path, source: Source) -> None:
    """If the source has changed, the old folder is kept."""
    os.utime(source.path, ns=(1, 1))
    failure(InputChangedError, None, old, source)
    assert_alone(old, OLD)


def link_to_a_file(path: Path) -> None:
    path.with_name("mine").touch()
    path.symlink_to("mine")


@pytest.mark.parametrize("put", [Path.touch, os.mkfifo, link_to_a_file], ids=["file", "FIFO", "link to a file"])
def test_files_are_not_replaced_by_a_folder(target: Path, source: Source, put: Callable[[Path], object]) -> None:
    """A file, a FIFO or a link to a file is never replaced by a folder. The parent folder must exist."""
    put(target)
    failure(RefusedError, None, target, source)
    failure(UsageError, None, target.parent / "no" / "model", source)


def test_too_little_space_is_reported_before_anything_is_written(
    target: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total size of all files is compared with the free space before anything is written, unless blocks are
    shared.
    """
    fill_one = mock.Mock()
    monkeypatch.setattr(output_folders, "shares_blocks", lambda fd, file: False)
    monkeypatch.setattr(output_folders, "fill", fill_one)
    real = os.statvfs(target.parent)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:4], 2, *real[5:])))
    failure(OutputError, "not enough free space", target, source)
    assert not fill_one.called
    assert os.listdir(target.parent) == []


def test_the_first_failure_ends_the_others(target: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one thread has failed, the other threads stop at their next progress report. The error is that of the first
    failure.
    """
    ended: list[str] = []
    begun = threading.Event()

    def fill_one(path: Path, file: OutFile, *args: Any, progress: Callable[[int], None], **options: Any) -> Any:
        if path.name == "a":
            begun.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        begun.set()
        try:
            for _ in range(10_000):
                progress(1)
                time.sleep(0.001)
        except BaseException:
            ended.append(path.name)
            raise

    monkeypatch.setattr(output_folders, "fill", fill_one)
    failure(OutputError, "EIO", target, source, jobs=2)
    assert ended == ["b"]  # the next file is not started
    assert not target.exists()


def test_ctrl_c_while_the_old_folder_is_deleted(old: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the old folder is deleted is raised as KeyboardInterrupt, although another error follows when rmtree
    closes a descriptor again. The old folder is deleted.
    """
    real = shutil.rmtree

    def interrupted(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        try:
            raise KeyboardInterrupt
        finally:
            os.close(-1)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_to(old, source)
    assert_alone(old, files_for(old, source)[1])


def test_a_junction_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A junction on Windows, which every user can create, is not followed. Nothing in it is copied, and it is
    listed.
    """
    for name in ("src/junction", "src/folder"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "secret.txt").write_text("x")
    junction = os.lstat(tmp_path / "src" / "junction").st_ino
    monkeypatch.setattr(output_folders.calls, "is_junction", lambda status: status.st_ino == junction)
    found, left = output_folders.others_in(tmp_path / "src", tmp_path / "dst", (), deep=True, has_links=True)
    assert [(each.path.relative_to(tmp_path / "dst").as_posix(), each.kind) for each in found] == [
        ("folder", "folder"),
        ("folder/secret.txt", "file"),
    ]
    assert [path.name for path, _ in left] == ["junction"]
    assert list_local(tmp_path / "src") == ({"folder": False, "junction": True}, [])
