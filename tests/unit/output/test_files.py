"""The writer: the target is always the complete old file or the complete new file, and its bytes are those of the plan,
no matter how they are copied.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.byteranges import reading
from ckptconv.byteranges.record_checks import Sums
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange, Inflate, Literal, OutFile
from ckptconv.errors import (
    InputChangedError,
    InputError,
    MalformedError,
    OutputError,
    RefusedError,
    TargetExistsError,
    UsageError,
)
from ckptconv.output import files as output_files
from ckptconv.system import filesystem
from tests.support.conversions import Error, converted, refused
from tests.support.judge import assert_same
from tests.support.no_files import NO_FILES

OLD = b"the old output"
FAULTS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, errno.EACCES]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the path of an old output, the only file in its folder."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "dst").write_bytes(OLD)
    return folder / "dst"


def plan(source: Source, target: Path) -> tuple[OutFile, bytes]:
    """Return a plan with literals and ranges, and the bytes that it describes. The blocks of one range are aligned in
    the target as in the source, those of the other are not.
    """
    data = source.path.read_bytes()
    pieces = (
        Literal(data[:100]),
        ByteRange(source, 100, 15_000),
        Literal(b"between"),
        ByteRange(source, 4096, 8192),
        Literal(b"end"),
    )
    written = data[:15_100] + b"between" + data[4096:12_288] + b"end"
    return OutFile(target, pieces, len(written)), written


def write(source: Source, target: Path, **options: Any) -> bytes:
    """Write the plan, and return the bytes that the target should contain."""
    file, written = plan(source, target)
    output_files.write(file, source, **{"replace": True, "verify": False, **options})
    return written


def failure(
    kind: type[Error],
    words: str | None,
    source: Source,
    target: Path,
    patched: pytest.MonkeyPatch | None = None,
    **options: Any,
) -> Error:
    """Return the error of the class `kind` that writing the plan raises. Its one-line message matches `words`.

    The changes of `patched` are undone.
    """
    with pytest.raises(kind, match=words) as caught:
        write(source, target, **options)
    if patched:
        patched.undo()
    assert str(caught.value).isprintable()
    return caught.value


def assert_alone(target: Path, data: bytes | None) -> None:
    """Check that `target` contains `data`, or does not exist if `data` is None, and that its folder contains nothing
    else.
    """
    assert os.listdir(target.parent) == [target.name] * (data is not None)
    assert data is None or target.read_bytes() == data


# Existing targets


@pytest.mark.parametrize("replace", [True, False])
def test_pieces_become_the_file(source: Source, target: Path, replace: bool) -> None:
    """The file consists of its pieces, the progress is its size, and no other file is left in the folder."""
    target.unlink()
    counts: list[int] = []
    written = write(source, target, replace=replace, progress=counts.append)
    assert_alone(target, written)
    assert sum(counts) == len(written)


def test_existing_target_stays(source: Source, target: Path) -> None:
    """An existing file is not changed without permission to replace it."""
    failure(TargetExistsError, "--force", source, target, replace=False)
    assert_alone(target, OLD)


def test_target_that_appears_meanwhile_stays(source: Source, target: Path) -> None:
    """A file that another process creates at the target during the write is kept."""
    target.unlink()
    failure(
        TargetExistsError, "another process", source, target, replace=False, progress=lambda _: target.write_bytes(OLD)
    )
    assert_alone(target, OLD)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_without_hard_links(source: Source, target: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the filesystem has no hard links, the output is renamed only if the target does not exist."""
    target.unlink()
    monkeypatch.setattr(os, "link", failing(code))
    monkeypatch.setattr(filesystem, "rename_if_absent", rename_if_absent)
    failure(TargetExistsError, None, source, target, replace=False, progress=lambda _: target.write_bytes(OLD))
    assert_alone(target, OLD)
    target.unlink()
    assert write(source, target, replace=False) == target.read_bytes()


def rename_if_absent(old: str, new: str) -> bool:
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)
    return True


def test_a_system_without_a_safe_replacement(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no system call can create the target without the risk of replacing a file, the write is refused. The error
    names --force.
    """
    target.unlink()
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(filesystem, "rename_if_absent", lambda old, new: False)
    failure(RefusedError, "--force", source, target, replace=False)
    assert_alone(target, None)


@pytest.mark.parametrize("dangling", [True, False])
def test_symlink_is_replaced_and_not_followed(source: Source, target: Path, dangling: bool) -> None:
    """A symbolic link at the target is refused without permission to replace it. With permission, the link is replaced,
    and the file that it points to is not written.
    """
    link = target.with_name("link")
    link.symlink_to("nowhere" if dangling else target.name)
    target.chmod(0o604)
    fresh = source.path.with_name("fresh")
    fresh.touch()
    failure(TargetExistsError, "exists; --force", source, link, replace=False)
    assert write(source, link) == link.read_bytes()
    assert not link.is_symlink()
    assert link.stat().st_mode == fresh.stat().st_mode
    assert target.read_bytes() == OLD
    assert sorted(os.listdir(target.parent)) == ["dst", "link"]


def test_symlink_to_a_folder_is_the_folder(tmp_path: Path, fixtures: Path) -> None:
    """If the target is a link to a folder, the output is written to the folder under the name of the source."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to("folder")
    assert convert(fixtures / "cuda0.pt", link, map_location="cpu").dst == str(link / "cuda0.pt")
    assert link.is_symlink()
    assert (folder / "cuda0.pt").is_file()


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link to a device"])
def test_other_things_are_refused(source: Source, target: Path, kind: str) -> None:
    """A folder, a FIFO or a link to a device is never replaced, even with permission."""
    target.unlink()
    NO_FILES[kind](target)
    failure(RefusedError, "not a regular file", source, target)
    assert os.listdir(target.parent) == [target.name]


def test_a_device_is_refused(source: Source, tmp_path: Path) -> None:
    """A device is never replaced."""
    failure(RefusedError, "not a regular file", source, Path("/dev/null"))
    assert os.listdir(tmp_path) == ["src"]


def test_impossible_places(source: Source, target: Path) -> None:
    """A missing folder is a usage error. A file in place of a folder is an error of the system."""
    failure(UsageError, "folder does not exist", source, target.parent / "nowhere" / "dst")
    failure(OutputError, "Not a directory", source, target / "dst")


# The input as the output


@pytest.fixture
def checkpoint(tmp_path: Path, fixtures: Path) -> Path:
    """Return a copy of a fixture that was saved on a GPU."""
    return Path(shutil.copy(fixtures / "cuda0.pt", tmp_path / "model.pt"))


#: Functions that return another name of a file.
NAMES_OF_ONE: dict[str, Callable[[Path], Path]] = {
    "same path": lambda path: path,
    "other spelling": lambda path: path.parent / "." / ".." / path.parent.name / path.name,
    "symlink": lambda path: linked(path, Path.symlink_to),
    "hard link": lambda path: linked(path, Path.hardlink_to),
}


def linked(path: Path, link: Callable[[Path, Path], None]) -> Path:
    other = path.with_name("other.pt")
    link(other, path)
    return other


@pytest.mark.parametrize("how", NAMES_OF_ONE)
def test_input_as_output_needs_force(checkpoint: Path, how: str) -> None:
    """If SRC and DST are the same file, under any name, the conversion is refused without force. With force, DST is
    converted, and a SRC with another name is kept.
    """
    dst = NAMES_OF_ONE[how](checkpoint)
    before = checkpoint.read_bytes()
    expected = torch.load(checkpoint, map_location="cpu")
    refused(RefusedError, "force=True", checkpoint, dst, map_location="cpu")
    assert checkpoint.read_bytes() == before
    assert_same(converted(checkpoint, dst, map_location="cpu"), expected)
    assert (checkpoint.read_bytes() == before) == (how in ("symlink", "hard link"))
    assert not dst.is_symlink()


# Modes


@pytest.mark.parametrize("replace", [True, False])
def test_a_new_file_follows_the_umask(source: Source, target: Path, replace: bool) -> None:
    """A new file has the mode that the umask gives, not the mode of the temporary file."""
    target.unlink()
    before = os.umask(0o027)
    try:
        write(source, target, replace=replace)
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("old", "mode", "final"),
    [(0o604, 0o666, 0o604), (0o600, 0o777, 0o600), (0o666, 0o600, 0o666), (None, 0o440, 0o640), (None, 0o777, 0o755)],
)
def test_the_temporary_is_never_more_open_than_the_file(
    source: Source, target: Path, monkeypatch: pytest.MonkeyPatch, old: int | None, mode: int, final: int
) -> None:
    """A replaced file keeps its mode. A new file has the planned mode without the bits of the umask, and its owner may
    write it. The temporary file is never more open than the final file.
    """
    seen = []

    def watched(path: Any, *args: Any) -> int:
        fd = open_file(path, *args)
        if output_files.is_temporary(os.path.basename(os.fsdecode(path))):
            seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    open_file = os.open
    if old is None:
        target.unlink()
    else:
        target.chmod(old)
    monkeypatch.setattr(os, "open", watched)
    output_files.write(replace(plan(source, target)[0], mode=mode), source, replace=True, verify=False)
    assert stat.S_IMODE(target.stat().st_mode) == final
    assert seen and not any(each & ~final for each in seen)


def test_a_long_name_leaves_room_for_the_temporary(source: Source, target: Path) -> None:
    """A file with a name of 255 bytes, the longest possible, can be written."""
    path = target.with_name("ü" * 127 + "x")
    assert write(source, path, replace=False) == path.read_bytes()


# Attacks by other users of the folder


def swapped(temporary: Path, kind: str) -> None:
    """Replace the `temporary` by a file or a link of another user, according to `kind`."""
    other = temporary.with_name("of somebody else")
    temporary.rename(temporary.with_name("moved away"))
    if kind == "link":
        other.write_bytes(b"theirs")
        temporary.symlink_to(other.name)
    else:
        temporary.write_bytes(b"theirs")


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_temporary_file_that_another_process_replaces(
    source: Source, target: Path, kind: str, replace: bool, verify: bool
) -> None:
    """If another user replaces the temporary file during the write, this is found before the file gets the name of the
    target. The old output is kept.
    """
    if not replace:
        target.unlink()

    def tick(_: int) -> None:
        if not target.with_name("moved away").exists():
            (temporary,) = (each for each in target.parent.iterdir() if is_temporary(each))
            swapped(temporary, kind)

    failure(OutputError, "replaced the output", source, target, replace=replace, verify=verify, progress=tick)
    assert target.read_bytes() == OLD if replace else not os.path.lexists(target)


@pytest.mark.parametrize("kind", ["link", "file"])
@pytest.mark.parametrize("call", ["replace", "link"])
def test_a_temporary_file_that_is_replaced_at_the_last_moment(
    source: Source, target: Path, kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the rename, the file at the target is compared with the one that was written. If another user has replaced
    it, this is an error.
    """
    if call == "link":
        target.unlink()
    real = getattr(os, call)

    def late(temporary: Path, target: Path) -> None:
        swapped(temporary, kind)
        real(temporary, target)

    monkeypatch.setattr(os, call, late)
    failure(OutputError, "replaced the output", source, target, monkeypatch, replace=call == "replace")
    assert target.read_bytes() == b"theirs"


# Failures


def failing(code: int, when: Any = lambda *args: True, real: Any = None) -> Any:
    """Return a replacement for a system call that fails with `code` if `when` is true for its arguments, and otherwise
    calls `real`.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


def is_temporary(path: object, *_: object) -> bool:
    return ".ckptconv-" in str(path)


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "call", ["open", "chmod", "fallocate", "pwrite", "copy_file_range", "fsync", "close", "replace", "link"]
)
def test_a_failing_call_costs_nothing(
    source: Source, target: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If any system call fails with any error, the message contains the error, the old output is unchanged, and the
    temporary file is removed.
    """
    if call == "link":
        target.unlink()
    if call == "fallocate":
        monkeypatch.setattr(filesystem, "fallocate", failing(code))
    elif call == "open":
        monkeypatch.setattr(os, "open", failing(code, is_temporary, os.open))
    else:
        monkeypatch.setattr(os, call, failing(code), raising=False)
    error = failure(OutputError, None, source, target, monkeypatch, replace=call != "link")
    if (call, code) == ("fallocate", errno.ENOSPC):
        assert "not enough free space" in str(error)
    else:
        assert error.got == errno.errorcode[code]
        assert os.strerror(code) in str(error)
    assert_alone(target, None if call == "link" else OLD)


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_cannot_be_synced(
    source: Source, target: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the sync of the folder fails, the error says that the new file is in place."""

    def is_folder(file: int | Path, *_: object) -> bool:
        return stat.S_ISDIR(os.stat(file).st_mode) if isinstance(file, int) or file.exists() else False

    monkeypatch.setattr(os, call, failing(errno.EIO, is_folder, getattr(os, call)))
    failure(OutputError, "is in place", source, target, monkeypatch)
    assert_alone(target, plan(source, target)[1])


def test_the_first_error_is_the_one_that_is_told(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the temporary file cannot be removed after an error, the message is still about the first error."""
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    monkeypatch.setattr(os, "unlink", failing(errno.EROFS))
    failure(OutputError, "No space", source, target, monkeypatch)
    assert target.read_bytes() == OLD


@pytest.mark.parametrize("how", ["fallocate fails", "fallocate is not offered"])
def test_too_little_space_is_reported_before_the_first_byte(
    source: Source, target: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space is reserved, or compared with the necessary size, before the first byte is written. The error contains
    both numbers.
    """
    counts: list[int] = []
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=2, f_frsize=4096))
    if how == "fallocate fails":
        monkeypatch.setattr(filesystem, "fallocate", failing(errno.ENOSPC))
    else:
        monkeypatch.setattr(filesystem, "fallocate", lambda fd, size: False)
    error = failure(OutputError, "not enough free space", source, target, monkeypatch, progress=counts.append)
    assert (error.expected, error.got) == ("23,302 bytes", "8,192 bytes")
    assert counts == []
    assert_alone(target, OLD)


def test_enough_space_where_it_cannot_be_reserved(
    source: Source, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without fallocate can write if there is enough space."""
    monkeypatch.setattr(filesystem, "fallocate", lambda fd, size: False)
    assert write(source, target) == target.read_bytes()


@pytest.mark.parametrize("verify", [True, False])
def test_ctrl_c(source: Source, target: Path, verify: bool) -> None:
    """Ctrl-C during a write leaves the old output and no other file."""

    with pytest.raises(KeyboardInterrupt):
        write(source, target, verify=verify, progress=mock.Mock(side_effect=KeyboardInterrupt))
    assert_alone(target, OLD)


KILLED = """
import os, signal, sys
from contextlib import nullcontext
from ckptconv.conversion.convert import run
from ckptconv.conversion.targets import find_request
from ckptconv.conversion.options import OutputOptions
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits
kill = lambda written: os.kill(os.getpid(), signal.SIGKILL)
edits, output = Edits(to_devices("cpu")), OutputOptions(force=True)
run(find_request(*sys.argv[1:], edits, output), progress=lambda size: nullcontext(kill))
"""


def test_kill_9(target: Path, fixtures: Path) -> None:
    """A process that is killed during a write leaves the old output, and a temporary file with a recognizable name."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(fixtures / "cuda0.pt"), str(target)])
    assert done.returncode == -signal.SIGKILL
    assert target.read_bytes() == OLD
    (temporary,) = set(os.listdir(target.parent)) - {target.name}
    assert re.fullmatch(r"\.dst\.ckptconv-[0-9a-f]{6}\.tmp", temporary)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "change",
    [lambda path: os.utime(path, ns=(1, 1)), lengthen, lambda path: os.truncate(path, 5000)],
    ids=["touched", "longer", "shorter"],
)
def test_an_input_that_changes_meanwhile(source: Source, target: Path, change: Callable[[Path], None]) -> None:
    """If the input changes while it is read, no output appears."""
    failure(InputChangedError, None, source, target, progress=lambda _: change(source.path))
    assert_alone(target, OLD)


# Copying


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, None])
def test_fallback_if_the_kernel_cannot_copy(
    source: Source, target: Path, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If copy_file_range is missing, fails, or copies nothing, the file is read and written with the same result, also
    in small buffers.
    """
    monkeypatch.setattr(reading, "BUFFER", 1000)
    monkeypatch.setattr(os, "copy_file_range", failing(code) if code else lambda *args: 0, raising=False)
    assert write(source, target) == target.read_bytes()
    monkeypatch.delattr(os, "copy_file_range")
    assert write(source, target) == target.read_bytes()


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="this system has no copy_file_range")
def test_short_copies_and_failure_in_the_middle(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel copies less than requested and then fails, no byte is lost."""
    real = os.copy_file_range
    calls: list[int] = []

    def copy(src: int, dst: int, count: int, *offsets: int) -> int:
        calls.append(count)
        if len(calls) > 5:
            raise OSError(errno.EXDEV, "no more")
        return real(src, dst, min(count, 700), *offsets)

    monkeypatch.setattr(os, "copy_file_range", copy)
    assert write(source, target) == target.read_bytes()
    assert len(calls) == 7  # five for the first range, one failure, and one failure for the second range


def test_complete_blocks_are_copied(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is split at its block boundaries, so that a filesystem can share complete blocks."""
    calls: list[tuple[int, int]] = []

    def copy(src: int, dst: int, count: int, offset: int, at: int) -> int:
        calls.append((offset, count))
        return os.pwrite(dst, os.pread(src, count, offset), at)

    monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    assert write(source, target) == target.read_bytes()
    assert calls == [(100, 3996), (4096, 8192), (12_288, 2812), (4096, 8192)]


def test_short_writes(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each write stores only seven bytes, no byte is lost."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:7], at))
    assert write(source, target) == target.read_bytes()


def test_shared_blocks_are_not_reserved(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If blocks are shared, no space is reserved, and the block that the probe has shared is overwritten."""

    def share(src: int, dst: int, block: int) -> bool:
        return os.pwrite(dst, os.pread(src, block, 0), 0) == block

    monkeypatch.setattr(filesystem, "share_block", share)
    monkeypatch.setattr(filesystem, "fallocate", failing(errno.ENOSPC))
    assert write(source, target) == target.read_bytes()
    monkeypatch.undo()
    monkeypatch.setattr(filesystem, "share_block", share)
    output_files.write(OutFile(target, (Literal(b"short"),), 5), source, replace=True, verify=False)
    assert target.read_bytes() == b"short"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no posix_fadvise")
def test_only_the_cache_of_a_replaced_file_is_released(
    source: Source, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a replaced file is released, but not that of the input."""
    forgotten: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: forgotten.append(os.fstat(fd).st_ino))
    replaced = target.stat().st_ino
    write(source, target)
    assert forgotten == [replaced]
    write(source, source.path)
    assert forgotten == [replaced]


def test_a_plan_that_does_not_add_up(source: Source, target: Path) -> None:
    """A plan whose pieces do not add up to its size is reported as a bug, and the old output is kept."""
    with pytest.raises(OutputError, match="bug in ckptconv"):
        output_files.write(OutFile(target, (Literal(b"1234"),), 5), source, replace=True, verify=False)
    assert_alone(target, OLD)


@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="this system has no copy_file_range")
def test_small_tensors_are_moved_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 tensors of 32 bytes between two of 1 MB need few system calls, and keep their values."""
    calls = {name: mock.Mock(wraps=getattr(os, name)) for name in ("pread", "preadv", "pwrite", "copy_file_range")}
    large = torch.arange(1 << 18, dtype=torch.float32)
    state = {"a": large, **{f"b{i:04}": torch.full((8,), float(i)) for i in range(2000)}, "c": large + 1}
    torch.save(state, tmp_path / "src.pt")
    for name, call in calls.items():
        monkeypatch.setattr(os, name, call)
    convert(tmp_path / "src.pt", tmp_path / "dst.safetensors")
    assert sum(call.call_count for call in calls.values()) < 300
    monkeypatch.undo()
    assert_same(load_file(tmp_path / "dst.safetensors"), state)


@pytest.mark.parametrize("call", ["pwrite", "copy_file_range"])
def test_verify_finds_a_wrong_byte(source: Source, target: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``verify``, a wrong byte on the disk is found before the target appears. The error contains its position."""
    assert write(source, target, verify=True) == target.read_bytes()
    target.write_bytes(OLD)
    real = os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        return real(fd, bytes(data[:-1]) + bytes([data[-1] ^ 1]), at)

    def copy(src: int, dst: int, count: int, offset: int, at: int) -> int:
        return pwrite(dst, os.pread(src, count, offset), at)

    monkeypatch.setattr(os, call, pwrite if call == "pwrite" else copy, raising=False)
    error = failure(OutputError, "differs when it is read back", source, target, monkeypatch, verify=True)
    assert f"at byte {0 if call == 'pwrite' else 100}" in str(error)
    assert_alone(target, OLD)


# Inflating


def test_a_lock_that_is_let_go_with_an_error(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error when a lock is released does not fail the write, because the output already has its name."""
    file, data = plan(source, target)
    lock, close, locked = output_files.lock_shared, os.close, []

    def note(fd: int, path: Path) -> None:
        locked.append(fd)
        lock(fd, path)

    def fail(fd: int) -> None:
        close(fd)
        if fd in locked:
            locked.remove(fd)
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))

    monkeypatch.setattr(output_files, "lock_shared", note)
    monkeypatch.setattr(os, "close", fail)
    output_files.write(file, source, replace=True, verify=False)
    assert target.read_bytes() == data
    assert not locked


def deflated(source: Source, data: bytes, end: int = zlib.Z_FINISH) -> Inflate:
    """Write `data`, deflated, to `source` from byte 10 on, and return the piece that inflates it."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = deflater.compress(data) + deflater.flush(end)
    with source.path.open("r+b") as file:
        file.write(bytes(10) + stream)
    source._held = None  # the buffer contains the old file
    return Inflate(ByteRange(source, 10, len(stream)), len(data), zlib.crc32(data))


def write_inflated(source: Source, target: Path, piece: Inflate, **options: Any) -> None:
    with Source(source.path) as now:
        file = OutFile(target, (Literal(b"head"), piece, Literal(b"end")), piece.length + 7)
        output_files.write(file, now, replace=True, verify=True, **options)


def test_deflated_records_of_every_size(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is inflated correctly with every position of the buffer boundaries, also if the inflater has consumed
    its input and still has output.
    """
    monkeypatch.setattr(reading, "BUFFER", 1000)
    noise = source.path.read_bytes()
    for size in range(1, 6000, 7):
        for data in (bytes(size), noise[:size]):
            assert b"".join(reading.inflated(deflated(source, data))) == data


def test_an_inflated_piece_is_written(source: Source, target: Path) -> None:
    """A deflated record is written inflated, and verified."""
    data = source.path.read_bytes() * 3
    write_inflated(source, target, deflated(source, data))
    assert target.read_bytes() == b"head" + data + b"end"


@pytest.mark.parametrize("wrong", ["longer", "shorter", "checksum", "truncated", "trailing", "trailing far", "damaged"])
def test_damaged_deflated_records(source: Source, target: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deflated record that does not match its size, checksum or stream is refused, and no output appears."""
    monkeypatch.setattr(reading, "BUFFER", 1000)
    data = bytes(5000)
    good = deflated(source, data)
    span, size = good.of, good.of.length
    pieces = {
        "longer": Inflate(span, 4999, None),
        "shorter": Inflate(span, 5001, None),
        "checksum": Inflate(span, 5000, zlib.crc32(data) ^ 1),
        "truncated": Inflate(ByteRange(source, 10, size - 3), 5000, None),
        "trailing": Inflate(ByteRange(source, 10, size + 1), 5000, None),
        "trailing far": Inflate(ByteRange(source, 10, 3000), 5000, None),
        "damaged": Inflate(ByteRange(source, 9, size), 5000, None),
    }
    counts: list[int] = []
    with pytest.raises(MalformedError) as caught:
        write_inflated(source, target, pieces[wrong], progress=counts.append)
    assert sum(counts) <= len(b"head") + pieces[wrong].length  # a bomb is found before it is written
    assert "at byte" in str(caught.value)
    assert str(caught.value).isprintable()
    assert_alone(target, OLD)


def test_a_deflated_record_without_an_end(source: Source, target: Path) -> None:
    """A record with all its bytes but without the end of its stream is damaged."""
    with pytest.raises(MalformedError, match="another size"):
        write_inflated(source, target, deflated(source, bytes(5000), end=zlib.Z_SYNC_FLUSH))
    assert_alone(target, OLD)


def test_an_input_that_cannot_be_read(source: Source, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is reported for the input, with its position. The old output is unchanged."""
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    monkeypatch.setattr(os, "pread", failing(errno.EIO))
    failure(InputError, "src at byte 100: cannot be read", source, target, monkeypatch)
    assert_alone(target, OLD)


def test_checksums_are_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums of the pieces are combined once, not for each header that contains them. With 60,000 headers, this
    took minutes.
    """
    calls: list[int] = []
    original = Sums.results

    def counted(self: Sums) -> Any:
        results = original(self)
        calls.append(len(results))
        return results

    monkeypatch.setattr(Sums, "results", counted)
    save_file({f"w{i}": torch.full((3,), float(i)) for i in range(40)}, tmp_path / "src.safetensors")
    convert(tmp_path / "src.safetensors", tmp_path / "dst.pt", dtype="w7=fp16", verify=True)
    assert calls == [39]  # the checksum of the cast tensor is computed while it is written
