"""A replaced file keeps its owner, group, permissions, access control list and extended attributes. Nobody gets more
access.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptconv import convert
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import Literal, OutFile
from ckptconv.errors import RefusedError
from ckptconv.output import files as output_files
from ckptconv.output.folders import NewFolder, write_folder
from tests.support.conversions import refused

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
NOBODY = 65534


def acl(nobody: int, mask: int = 7) -> bytes:
    """Return an access control list of mode 0644 in which the user nobody has the permissions `nobody`."""
    entries = [(1, 6, -1), (2, nobody, NOBODY), (4, 4, -1), (16, mask, -1), (32, 4, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


def attributes(path: Path) -> dict[str, bytes]:
    """Return all extended attributes of `path`."""
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


@pytest.fixture(autouse=True)
def _need_lists(tmp_path: Path) -> None:
    """Skip the test if the filesystem has no access control lists or extended attributes."""
    try:
        os.setxattr(tmp_path, "user.test", b"")
        os.setxattr(tmp_path, ACCESS, acl(7))
    except (AttributeError, OSError):
        pytest.skip("this filesystem has no access control lists")
    os.removexattr(tmp_path, ACCESS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder in which the user nobody has access to new files."""
    (tmp_path / "out").mkdir()
    os.setxattr(tmp_path / "out", DEFAULT, acl(7))
    return tmp_path / "out"


def old_file(path: Path, mode: int = 0o640, **given: bytes) -> Path:
    """Write a file to `path` with the attributes `given` and without those from the default of its folder. Return
    `path`.
    """
    path.write_bytes(b"old")
    for name in os.listxattr(path):
        os.removexattr(path, name)
    path.chmod(mode)
    for name, value in given.items():
        os.setxattr(path, name, value)
    return path


def test_a_replaced_file_keeps_its_list_and_attributes(out: Path, fixtures: Path) -> None:
    """A replaced file keeps its access control list, extended attributes and mode. The temporary file has them too
    while it is written, so an excluded user never has access.
    """
    target = old_file(out / "a.pt", **{ACCESS: acl(0), "user.note": b"mine"})
    before = attributes(target), target.stat().st_mode
    seen = []

    def watched(nbytes: int) -> None:
        (temporary,) = (each for each in out.iterdir() if output_files.is_temporary(each.name))
        seen.append((attributes(temporary), temporary.stat().st_mode))

    with Source(fixtures / "cuda0.pt") as source:
        output_files.write(OutFile.copy_of(source, target), source, replace=True, verify=False, progress=watched)
    assert set(before[0]) == {ACCESS, "user.note"}
    assert [(attributes(target), target.stat().st_mode), *seen] == [before] * (1 + len(seen))
    assert seen


def test_a_replaced_file_inherits_no_access_list(out: Path, fixtures: Path) -> None:
    """A file without an access control list has none after it is replaced, although the folder has a default list."""
    target = old_file(out / "a.pt")
    convert(fixtures / "cuda0.pt", target, map_location="cpu", force=True)
    assert (attributes(target), stat.S_IMODE(target.stat().st_mode)) == ({}, 0o640)


@pytest.mark.skipif(not shutil.which("cp"), reason="there is no cp")
@pytest.mark.parametrize("folder", ["out", "."])
def test_a_new_file_is_as_open_as_that_of_cp(tmp_path: Path, out: Path, fixtures: Path, folder: str) -> None:
    """A new file has the permissions and the list that ``cp`` gives it: the default list of the folder, and nothing
    from the source.
    """
    src = Path(shutil.copy(fixtures / "cuda0.pt", tmp_path / "src.pt"))
    os.setxattr(src, ACCESS, acl(0))
    os.setxattr(src, "user.note", b"mine")
    ours, theirs = (out.parent / folder / name for name in ("ours.pt", "theirs.pt"))
    convert(src, ours, map_location="cpu")
    subprocess.run(["cp", str(src), str(theirs)], check=True)
    assert attributes(ours) == attributes(theirs)
    assert ours.stat().st_mode == theirs.stat().st_mode
    assert (ACCESS in attributes(ours)) == (folder == "out")


def test_a_replaced_folder_keeps_its_lists(out: Path, source: Source) -> None:
    """A replaced folder and the folders in it keep their lists and modes. New files in them get the default list of
    their folder.
    """
    target = out / "model"
    (target / "inner").mkdir(parents=True)
    kept = old_file(target / "inner" / "kept", **{ACCESS: acl(0)})
    for folder in (target, target / "inner"):
        os.setxattr(folder, ACCESS, acl(0))
        os.setxattr(folder, DEFAULT, acl(0))
        folder.chmod(0o754)
    (target / "inner" / "as new").touch()
    paths = (target, target / "inner", kept, target / "inner" / "as new")
    before = [(attributes(path), path.stat().st_mode) for path in paths]
    files = [OutFile(target / "inner" / name, (Literal(b"new"),), 3) for name in ("kept", "as new", "new")]
    (target / "inner" / "as new").unlink()
    write_folder(NewFolder(target, files), source, replace=True, verify=False)
    assert kept.read_bytes() == b"new"
    assert [(attributes(path), path.stat().st_mode) for path in paths] == before
    assert attributes(target / "inner" / "new") == before[-1][0]


@pytest.mark.parametrize("name", [ACCESS, "user.note"])
@pytest.mark.parametrize("call", ["setxattr", "removexattr", "getxattr"])
def test_lost_attributes_are_reported_before_anything_is_written(
    out: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, call: str, name: str
) -> None:
    """If the list or an attribute cannot be kept, the error names it. Nothing is written, and the old file keeps its
    content and attributes.
    """
    target = old_file(out / "a.pt", **{name: acl(0)} if call != "removexattr" else {})
    before = attributes(target)
    real = getattr(os, call)

    def failing(path: Any, called: str, *value: bytes) -> Any:
        if called == name or call == "removexattr":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return real(path, called, *value)

    monkeypatch.setattr(os, call, failing)
    what = "access control list" if "acl" in name or call == "removexattr" else name
    error = refused(RefusedError, what, fixtures / "cuda0.pt", target, map_location="cpu", force=True)
    monkeypatch.undo()
    assert str(error).startswith(f"{target}: the ")
    assert attributes(target) == before
    assert target.read_bytes() == b"old"
    assert os.listdir(out) == ["a.pt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_replaced_file_keeps_its_owner(out: Path, source: Source) -> None:
    """A file that root replaces keeps its owner, group and mode."""
    target = old_file(out / "a.pt")
    os.chown(target, NOBODY, NOBODY)
    target.chmod(0o640)
    output_files.write(OutFile.copy_of(source, target), source, replace=True, verify=False)
    info = target.stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (NOBODY, NOBODY, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("mode", "kept"), [(0o660, 0o600), (0o664, 0o644), (0o644, 0o644), (0o2670, 0o600)])
def test_another_group_gets_the_permissions_of_others(
    out: Path, source: Source, monkeypatch: pytest.MonkeyPatch, mode: int, kept: int
) -> None:
    """If the group cannot be kept, the new group gets no more permissions than all other users."""
    target = old_file(out / "a.pt")
    os.chown(target, NOBODY, NOBODY)
    target.chmod(mode)
    monkeypatch.setattr(os, "chown", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no")))
    output_files.write(OutFile.copy_of(source, target), source, replace=True, verify=False)
    assert target.stat().st_gid == os.getegid()
    assert stat.S_IMODE(target.stat().st_mode) == kept


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_access_list_is_not_copied_to_another_group(
    out: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the group cannot be kept, a file with an access control list that depends on it is refused. The list is never
    set.
    """
    target = old_file(out / "a.pt", **{ACCESS: acl(0)})
    os.chown(target, NOBODY, NOBODY)
    monkeypatch.setattr(os, "chown", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no")))
    written = []
    monkeypatch.setattr(os, "setxattr", lambda *given: written.append(given))
    with pytest.raises(RefusedError, match="its group cannot be kept"):
        output_files.write(OutFile.copy_of(source, target), source, replace=True, verify=False)
    assert not written and target.read_bytes() == b"old"
