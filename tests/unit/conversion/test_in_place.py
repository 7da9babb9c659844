"""Tests of changes in place. torch loads the same objects from the changed file as from a converted copy, `undo`
restores the old bytes, and no incomplete state of the file is accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import pickle
import random
import shlex
import shutil
import stat
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.byteranges import undo_journal
from ckptconv.byteranges.undo_journal import DONE, HOT, Journal, Patch, journal_path, read_journal, state_of
from ckptconv.conversion import in_place
from ckptconv.limits import LIMITS
from ckptconv.output import files as output_files
from ckptconv.output import in_place as writing
from ckptconv.work import work
from tests.support.archives import without_crc32
from tests.support.command import Command
from tests.support.conversions import not_undone, refused, refused_in_place, saved_at
from tests.support.judge import assert_same
from tests.support.reduced import Reduced
from tests.support.torn_writes import loads, operations_of, torn_states

LONG = [("^", "a.name.that.is.much.longer.than.it.was.")]
EDITS: dict[str, dict[str, Any]] = {
    "to": {"map_location": "cuda:1"},
    "map": {"map_location": {"cpu": "mps"}},
    "add": {"add_prefix": "module."},
    "long": {"rename": LONG},
}


@pytest.fixture(params=["zip", "legacy", "zip without checksums", "pickle"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the path of a state dict with 20 names, so that a part of a change can reach the disk without the rest."""
    state = {f"layer{i}.weight": torch.arange(4.0) + i for i in range(20)}
    if request.param == "pickle":
        (tmp_path / "model.pkl").write_bytes(pickle.dumps(state, 4))
        return tmp_path / "model.pkl"
    path = tmp_path / "model.pt"
    with without_crc32() if request.param == "zip without checksums" else contextlib.nullcontext():
        torch.save(state, path, _use_new_zipfile_serialization=request.param != "legacy")
    return path


def load_storage(data: bytes) -> Any:
    """Return the storage that torch loads from the bytes in a plain pickle, on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def is_zip(path: Path) -> bool:
    return path.read_bytes()[:2] == b"PK"


def load(path: Path) -> Any:
    if path.suffix == ".pkl":
        with mock.patch("torch.storage._load_from_bytes", load_storage):
            return pickle.loads(path.read_bytes())
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_change_and_undo(checkpoint: Path, edits: dict[str, Any]) -> None:
    before = checkpoint.read_bytes()
    converted = checkpoint.with_name("converted.pt")
    ckptconv.convert(checkpoint, converted, **edits)
    if "rename" in edits and not is_zip(checkpoint):
        pytest.skip("a stream cannot grow")
    report = ckptconv.convert(checkpoint, in_place=True, **edits)
    assert report.in_place is not None
    assert report.in_place.way == ("appended" if "rename" in edits else "same size")
    assert_same(load(checkpoint), load(converted))
    assert ckptconv.diff(checkpoint, converted).same
    assert ckptconv.verify(checkpoint).ok
    ckptconv.undo(checkpoint)
    assert checkpoint.read_bytes() == before
    assert not journal_path(checkpoint).exists()


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_no_torn_write_is_read_as_complete(
    checkpoint: Path, edits: dict[str, Any], back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may fail at any write of a change or of its undo. The file is then the old one, the new one, or one that
    torch and ckptconv refuse. Its journal restores the old one.
    """
    if "rename" in edits and not is_zip(checkpoint):
        pytest.skip("a stream cannot grow")
    old = checkpoint.read_bytes()
    ckptconv.convert(checkpoint, in_place=True, **edits)
    new = checkpoint.read_bytes()
    journal, state = read_journal(checkpoint, os.getuid())
    assert state == DONE
    function = writing.restore if back else writing.apply
    checkpoint.write_bytes(new if back else old)
    operations = operations_of(lambda fd: function(fd, journal), checkpoint)
    assert checkpoint.read_bytes() == (old if back else new)
    torn = set(torn_states(new if back else old, operations, random.Random(1), 8)) - {old, new}
    assert torn or journal.fits_a_sector
    writing.mark_journal(checkpoint, HOT)
    for content in torn:
        checkpoint.write_bytes(content)
        with pytest.raises(Exception):  # noqa: B017, PT011 - torch has no type for it
            load(checkpoint)
        with pytest.raises(ckptconv.InputError, match=r"restore the old bytes: ckptconv\.undo\("):
            ckptconv.inspect(checkpoint)
        with open(checkpoint, "r+b") as file:
            writing.check_restorable(file.fileno(), journal, checkpoint, done=False)
            writing.restore(file.fileno(), journal)
        assert checkpoint.read_bytes() == old


def test_without_the_poison_torn_states_load(tmp_path: Path) -> None:
    """Without the poison bytes, torch loads some torn states. This control test shows that the poison is necessary."""
    path = tmp_path / "model.pt"
    with without_crc32():
        torch.save({f"layer{i}.weight": torch.arange(4.0) for i in range(200)}, path)
    old = path.read_bytes()
    ckptconv.convert(path, in_place=True, rename=[("layer", "LAYER")])
    new = path.read_bytes()
    journal, _ = read_journal(path, os.getuid())
    bare = Journal(journal.inode, journal.old_size, journal.new_size, journal.patches, ())
    path.write_bytes(old)
    operations = operations_of(lambda fd: writing.apply(fd, bare), path)
    loaded = 0
    for content in set(torn_states(old, operations, random.Random(1), 8)) - {old, new}:
        path.write_bytes(content)
        try:
            load(path)
            loaded += 1
        except Exception:
            continue
    assert loaded


def test_a_stream_cannot_grow(tmp_path: Path) -> None:
    path = saved_at(tmp_path / "model.pt", {"a": torch.ones(1)}, _use_new_zipfile_serialization=False)
    refused_in_place(
        ckptconv.RefusedError,
        r"does not fit into the space of the old one; write a new file, with the same edits: ckptconv\.convert",
        path,
        rename=LONG,
    )
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.untraced
@pytest.mark.parametrize("protocol", range(6))
def test_plain_pickles(tmp_path: Path, protocol: int) -> None:
    """A plain pickle is changed in place, also twice, if its protocol has opcodes for bytes. Before protocol 3 it is
    refused.
    """
    path = tmp_path / "model.pkl"
    state = {f"module.layer{i}.weight": torch.arange(float(i)) for i in range(300)}
    path.write_bytes(pickle.dumps({"model": state, "same": state, "text": "x" * 70_000}, protocol))
    edits: dict[str, Any] = {"map_location": "cuda:1", "strip_prefix": "module.", "add_prefix": "a."}
    if protocol < 3:
        refused_in_place(
            ckptconv.RefusedError,
            r"does not fit into the space of the old one; write a new file, with the same edits: ckptconv\.convert",
            path,
            **edits,
        )
        return
    for _ in range(2):  # the padding of the first change is padded again
        ckptconv.convert(path, in_place=True, **edits)
        ckptconv.convert(path, in_place=True, no_undo=True, map_location="cpu")
        changed = pickle.loads(path.read_bytes())
        assert_same(changed, pickle._loads(path.read_bytes()))  # by Python's unpickler as by that in C
        assert [*changed["model"]] == [name.replace("module.", "a.") for name in state]
        assert changed["model"] is changed["same"] and changed["text"] == "x" * 70_000
        assert_same([*changed["model"].values()], [*state.values()])
        assert {each.device for each in ckptconv.inspect(path).tensors} == {"cpu"}
        edits = {"map_location": "mps", "rename": [("^a[.]", "a.")]}


def test_a_storage_whose_file_is_a_zip(tmp_path: Path) -> None:
    """A storage that is pickled as a zip archive, as a few versions of torch do, cannot be changed in place."""
    path = tmp_path / "model.pkl"
    save = torch.save
    with mock.patch("torch.save", lambda obj, file, **_: save(obj, file)):
        path.write_bytes(pickle.dumps({"module.a": torch.ones(3)}))
    assert b"PK\3\4" in path.read_bytes()
    for edits in ({"map_location": "cuda:0"}, {"strip_prefix": "module."}):
        refused_in_place(ckptconv.RefusedError, "does not fit", path, **edits)


def test_dangerous_calls(checkpoint: Path) -> None:
    """A file with a dangerous call is refused unless ``allow_unsafe`` is given. The call is never executed."""
    marker = checkpoint.with_name("marker")
    state = {"a.b": torch.ones(2), "x": Reduced(os.system, (f"touch {marker}",))}
    if checkpoint.suffix == ".pkl":
        checkpoint.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, checkpoint, _use_new_zipfile_serialization=is_zip(checkpoint))
    refused_in_place(ckptconv.DangerousError, "allow_unsafe", checkpoint, map_location="cuda")
    assert ckptconv.convert(checkpoint, in_place=True, map_location="cuda", allow_unsafe=True).in_place.nbytes
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    """A TorchScript archive is refused, and the error suggests the command that writes a new file."""
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    refused_in_place(
        ckptconv.UnsupportedError, r"cannot be changed in place.*ckptconv\.convert\(.*OUT\)", path, map_location="cuda"
    )


def test_safetensors(tmp_path: Path) -> None:
    """In a safetensors file, names change within the space of the header. Longer names are refused, and a change of
    devices changes nothing.
    """
    path = tmp_path / "model.safetensors"
    save_file({"module.weight": torch.ones(3), "module.bias": torch.zeros(2)}, path)
    before = path.read_bytes()
    assert ckptconv.convert(path, in_place=True, map_location="cuda:0").in_place.way == "nothing"
    assert path.read_bytes() == before
    ckptconv.convert(path, in_place=True, strip_prefix="module.")
    assert sorted(ckptconv.load(path)) == ["bias", "weight"]
    assert path.stat().st_size == len(before)
    ckptconv.undo(path)
    assert path.read_bytes() == before
    refused_in_place(ckptconv.RefusedError, "does not fit", path, rename=LONG)


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bf16"}, {"compact": True}, {"state_dict": True}, {"include": "a"}, {"format": "pt"}, {"select": "a"}],
    ids=str,
)
def test_options_that_move_tensor_bytes_are_refused(checkpoint: Path, options: dict[str, Any]) -> None:
    refused_in_place(ckptconv.UsageError, "rewrites tensor data", checkpoint, map_location="cuda", **options)


def test_nothing_to_change_and_no_output(checkpoint: Path) -> None:
    refused_in_place(ckptconv.UsageError, "needs a change", checkpoint)
    with pytest.raises(ckptconv.UsageError, match="has no output"):
        ckptconv.convert(checkpoint, "out.pt", in_place=True, map_location="cpu")
    with pytest.raises(TypeError, match="needs dst"):
        ckptconv.convert(checkpoint, map_location="cpu")


def test_a_dry_run_changes_nothing(checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    report = ckptconv.convert(checkpoint, in_place=True, dry_run=True, map_location="cuda")
    assert report.in_place.way == "same size"
    assert 0 < report.in_place.nbytes < len(before)
    assert checkpoint.read_bytes() == before
    assert not journal_path(checkpoint).exists()


def test_no_undo(checkpoint: Path) -> None:
    report = ckptconv.convert(checkpoint, in_place=True, no_undo=True, map_location="cuda")
    assert report.in_place.journal is None
    assert not journal_path(checkpoint).exists()
    not_undone(ckptconv.InputError, "there is no undo journal", checkpoint)


def test_mode_inode_and_time(checkpoint: Path) -> None:
    """A change in place keeps the mode and the inode of the file, and sets a new modification time."""
    checkpoint.chmod(0o640)
    os.utime(checkpoint, (1, 1))
    before = checkpoint.stat()
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda")
    after = checkpoint.stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert after.st_mtime > 1


def test_links(checkpoint: Path, tmp_path: Path) -> None:
    """A change in place follows a link and reports its target. A file with hard links needs ``force``. A blob in a
    cache of the Hub is refused.
    """
    link = tmp_path / "latest.pt"
    link.symlink_to(checkpoint)
    report = ckptconv.convert(link, in_place=True, map_location="cuda:1")
    assert link.is_symlink()
    assert f"{link} is a link: {checkpoint} was changed" in report.notes
    ckptconv.undo(link)
    os.link(checkpoint, tmp_path / "second.pt")
    refused_in_place(ckptconv.RefusedError, "2 names", checkpoint, map_location="cuda:1")
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1", force=True)
    cache = tmp_path / "models--x--y"
    for folder in ("blobs", "snapshots/main"):
        (cache / folder).mkdir(parents=True)
    shutil.copy(checkpoint, cache / "blobs/0123")
    (cache / "snapshots/main/model.pt").symlink_to("../../blobs/0123")
    for path in (cache / "snapshots/main/model.pt", cache / "blobs/0123"):
        refused_in_place(ckptconv.RefusedError, "Hub's cache", path, map_location="cpu")


@contextlib.contextmanager
def as_nobody(folder: Path) -> Iterator[Path]:
    """Yield `folder`, or as root a copy of it, with the permissions of a user who is not root."""
    if os.geteuid():
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        theirs = shutil.copytree(folder, Path(name) / "theirs")
        for path in (Path(name), theirs, *theirs.iterdir()):
            os.chown(path, 65534, -1)
        os.seteuid(65534)
        try:
            yield theirs
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("what", ["file", "folder", "somebody else's folder"])
def test_files_without_write_permission(checkpoint: Path, what: str) -> None:
    """A file or folder that is not writable is refused before anything changes. The hint suggests chmod, or another
    output if the folder belongs to another user.
    """
    with as_nobody(checkpoint.parent) as folder:
        path = folder / checkpoint.name
        closed = path if what == "file" else folder
        before, mode = path.read_bytes(), closed.stat().st_mode
        closed.chmod(mode & ~0o222)
        if what == "somebody else's folder":
            if os.getuid():
                pytest.skip("needs root")
            os.seteuid(0)
            os.chown(folder, 0, 0)
            closed.chmod(0o755)
            os.seteuid(65534)
        error = refused_in_place(ckptconv.OutputError, "Permission denied", path, map_location="cuda:1")
        assert error.hint == (f"chmod u+w {closed}" if "else" not in what else "convert it to another file")
        assert ("nothing was changed" in error.what) == (what != "file")
        assert path.read_bytes() == before and os.listdir(folder) == [path.name]
        if "else" not in what:
            subprocess.run(shlex.split(error.hint), check=True)
            ckptconv.convert(path, in_place=True, map_location="cuda:1")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_immutable_files(checkpoint: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An immutable file or folder is refused before anything changes. The test uses the immutable flag if it can be
    set, and otherwise simulates its error.
    """
    closed = checkpoint if what == "file" else checkpoint.parent
    before, open_ = checkpoint.read_bytes(), os.open
    is_set = not subprocess.run(["chattr", "+i", closed], capture_output=True, check=False).returncode

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if path == checkpoint if what == "file" else flags & os.O_CREAT:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return open_(path, flags, *mode)

    if not is_set:
        monkeypatch.setattr(os, "open", refusing)
    try:
        error = refused_in_place(ckptconv.OutputError, "Operation not permitted", checkpoint, map_location="cuda:1")
    finally:
        if is_set:
            subprocess.run(["chattr", "-i", closed], check=True)
    monkeypatch.undo()
    assert error.hint == f"lsattr -d {closed} shows whether it is immutable; chattr -i {closed} changes that"
    assert checkpoint.read_bytes() == before and os.listdir(checkpoint.parent) == [checkpoint.name]
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_no_room_for_the_journal(checkpoint: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, done = checkpoint.read_bytes(), getattr(os, call)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if call != "open" or args[1] & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return done(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    error = refused_in_place(
        ckptconv.OutputError,
        "journal cannot be written, so nothing was changed: No space left",
        checkpoint,
        map_location="cuda:1",
    )
    monkeypatch.undo()
    assert error.hint == "free some space, or convert it to another file"
    assert checkpoint.read_bytes() == before and os.listdir(checkpoint.parent) == [checkpoint.name]


def test_a_journal_that_another_process_replaces(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process replaces the journal while it is written, nothing is changed."""
    before = checkpoint.read_bytes()
    real = os.replace

    def late(temporary: Path, path: Path) -> None:
        data = temporary.read_bytes()
        temporary.unlink()
        temporary.write_bytes(data)
        real(temporary, path)

    monkeypatch.setattr(os, "replace", late)
    refused_in_place(
        ckptconv.OutputError,
        "nothing was changed: another process has replaced it",
        checkpoint,
        map_location="cuda:1",
    )
    assert checkpoint.read_bytes() == before


def test_a_rewritten_file_is_not_restored(checkpoint: Path) -> None:
    """torch.save over a changed file keeps its inode, and often its size. `undo` does not restore bytes in the new
    file.
    """
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    size = checkpoint.stat().st_size
    state = {name: value + 1 for name, value in load(checkpoint).items()}
    torch.save(state, checkpoint, _use_new_zipfile_serialization=is_zip(checkpoint))
    now = checkpoint.read_bytes()
    assert len(now) == size or not is_zip(checkpoint)
    not_undone(ckptconv.RefusedError, "written again", checkpoint)
    writing.mark_journal(checkpoint, HOT)
    with contextlib.suppress(ckptconv.RefusedError):  # or there is nothing to restore, because the bytes are the same
        ckptconv.undo(checkpoint)
    assert checkpoint.read_bytes() == now


def test_every_damaged_byte_of_a_journal_is_seen(checkpoint: Path) -> None:
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    path, now = journal_path(checkpoint), checkpoint.read_bytes()
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        with pytest.raises(ckptconv.MalformedError, match="undo journal is damaged"):
            undo_journal._parsed(path, damaged)
        if at % 97 == 0:
            path.write_bytes(damaged)
            not_undone(ckptconv.MalformedError, "undo journal is damaged", checkpoint)
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        not_undone(ckptconv.MalformedError, "damaged", checkpoint)
    assert checkpoint.read_bytes() == now


def test_a_journal_of_another_user(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`undo` refuses a journal that another user may have written, and a journal that is a link or has hard links."""
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    path = journal_path(checkpoint)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = path.read_bytes()

    def distrusted(why: str) -> None:
        not_undone(ckptconv.CkptconvError, why, checkpoint)

    path.chmod(0o620)
    distrusted("other users can write to it")
    path.chmod(0o600)
    os.link(path, tmp_path / "second")
    distrusted("hard links")
    (tmp_path / "second").unlink()
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
        distrusted("its owner is not the owner of the file")
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    distrusted("a link has the name of the undo journal")


PLANTED: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "FIFO": lambda path: os.mkfifo(path),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", PLANTED)
def test_files_that_are_not_journals(checkpoint: Path, kind: str) -> None:
    """If a link, FIFO or folder has the name of the journal, a change in place and `undo` are refused. All other
    functions ignore it, and none removes it.
    """
    PLANTED[kind](path := journal_path(checkpoint))
    planted = path.lstat()
    what = f"a {kind} has the name of the undo journal, and was not made by ckptconv"
    refused_in_place(ckptconv.RefusedError, what, checkpoint, map_location="cuda:1")
    not_undone(ckptconv.RefusedError, what, checkpoint)
    not_undone(ckptconv.InputError, "there is no undo journal", checkpoint.parent)
    copy = checkpoint.with_name("copy.pt")
    assert "interrupted" not in str(ckptconv.convert(checkpoint, copy, map_location="cuda:1").notes)
    assert ckptconv.inspect(checkpoint).journals == ()
    assert ckptconv.verify(checkpoint).ok
    ckptconv.convert(copy, checkpoint, map_location="cuda:1", force=True)
    assert os.path.samestat(path.lstat(), planted)


def test_a_plain_file_with_the_name_of_a_journal(checkpoint: Path) -> None:
    """A plain file with the name of the journal may be a damaged journal. The error of `undo` says when it can be
    removed.
    """
    journal_path(checkpoint).write_text("hello")
    error = not_undone(ckptconv.MalformedError, "damaged, or not from ckptconv", checkpoint)
    assert error.hint == "look at it, and remove it if the file next to it is complete"
    journal_path(checkpoint).unlink()
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_files_that_are_not_journals_in_a_replaced_folder(sharded: Path, tmp_path: Path, kind: str) -> None:
    """A folder with a link or FIFO that has the name of a journal is not replaced, because the link or FIFO would be
    deleted.
    """
    other = tmp_path / "other"
    shutil.copytree(sharded, other)
    PLANTED[kind](journal_path(other / "model.safetensors"))
    refused(ckptconv.RefusedError, r"would be deleted: \.model", sharded, other, add_prefix="m.", force=True)


def test_a_journal_of_another_file(checkpoint: Path) -> None:
    """A journal that was copied from another file is refused, because it does not fit the inode or the bytes."""
    other = checkpoint.with_name("other" + checkpoint.suffix)
    shutil.copy(checkpoint, other)
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    for state in (DONE, HOT):
        writing.mark_journal(checkpoint, state)
        shutil.copy(journal_path(checkpoint), journal_path(other))
        not_undone(ckptconv.RefusedError, "written again", other)


@pytest.mark.parametrize("state", [DONE, HOT])
@pytest.mark.parametrize("kind", ["safetensors", "legacy"])
def test_a_journal_of_an_earlier_change_under_another_name(tmp_path: Path, kind: str, state: bytes) -> None:
    """If a file was renamed and changed again after a change, `undo` refuses the first journal. It would restore only a
    part of the old bytes.
    """
    names = [f"{letter}.weight_{i:04}" for letter in "ab" for i in range(60)]
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    if kind == "legacy":
        torch.save({name: torch.ones(2) for name in names}, path, _use_new_zipfile_serialization=False)
        ckptconv.convert(path, in_place=True, no_undo=True, rename=[("^a", "A")])  # now in ckptconv's opcodes
    else:
        path = path.with_suffix(".safetensors")
        save_file({name: torch.ones(2) for name in names}, path)
    ckptconv.convert(path, in_place=True, rename=[("(a|A).weight_0000", "x.weight_0000")])
    writing.mark_journal(path, state)
    path.rename(other)
    ckptconv.convert(other, in_place=True, rename=[("b.weight_0059", "y.weight_0059")])
    other.rename(path)
    not_undone(ckptconv.RefusedError, "written again", path)


def test_another_file_in_place_of_a_journal_is_not_marked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another file replaces the journal during the change, the change fails and does not mark this file as a
    journal.
    """
    other = checkpoint.with_name("other")
    other.write_bytes(bytes(100))
    apply = writing.apply

    def swapped(fd: int, journal: Journal) -> int:
        other.rename(journal_path(checkpoint))
        return apply(fd, journal)

    monkeypatch.setattr(writing, "apply", swapped)
    with pytest.raises(ckptconv.OutputError, match="another file has replaced"):
        ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    assert journal_path(checkpoint).read_bytes() == bytes(100)


def forged(target: Path, *patches: Patch) -> None:
    """Write a journal with the patches `patches` for the file `target`."""
    size = target.stat().st_size
    writing.write_journal(target, Journal(target.stat().st_ino, size, size, patches))
    writing.mark_journal(target, DONE)


def test_a_journal_may_not_change_tensors(checkpoint: Path) -> None:
    now = checkpoint.read_bytes()
    at = now.index(torch.arange(4.0).numpy().tobytes())
    forged(checkpoint, Patch(at, bytes(16), now[at : at + 16]))
    not_undone(ckptconv.RefusedError, "the bytes of a tensor", checkpoint)
    forged(checkpoint, Patch(0, bytes(8), now[:8]))
    not_undone(ckptconv.RefusedError, "not a checkpoint", checkpoint)


def test_a_journal_may_not_change_deflated_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(100.0)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        at = new.getinfo("stored/data/0").header_offset + 30 + len("stored/data/0")
    now = path.read_bytes()
    forged(path, Patch(at, bytes(4), now[at : at + 4]))
    not_undone(ckptconv.RefusedError, "the bytes of a tensor", path)


def test_a_journal_restores_no_json_except_an_index(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"auto_map": {}}')
    now = path.read_bytes()
    forged(path, Patch(2, b"AUTO", now[2:6]))
    not_undone(ckptconv.RefusedError, "not a checkpoint", path)


@pytest.mark.parametrize(
    "header",
    [
        {"old_size": -1},
        {"inode": 1.5},
        {"version": 2},
        {"patches": []},
        {"patches": [[0, 1, 2]]},
        {"patches": [[0, -1, -1]]},
        {"patches": [[0, 0, 0], [0, 1, 1]]},
        {"patches": [["a", 1, 1]]},
        {"patches": {}},
        {"poison": [[0, 999]]},
        {"poison": [[10**6, 1]]},
        {"leader": "../x"},
        {"members": ["a/b"]},
        {"members": [1]},
        {"members": ["."]},
        {"members": [".."]},
        {"members": ["\ud800"]},
        {"leader": ".."},
        {"leader": ["a"]},
        {"poison": [[0, 1]] * 3},
    ],
    ids=str,
)
def test_invalid_headers_of_journals(checkpoint: Path, header: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal with an invalid header is reported as damaged, although its checksum is correct, as in a forged
    journal.
    """
    real = json.dumps
    journal = Journal(checkpoint.stat().st_ino, 10, 10, (Patch(0, b"a", b"b"),))
    monkeypatch.setattr(json, "dumps", lambda said: real({**said, **header}))
    writing.write_journal(checkpoint, journal)
    monkeypatch.undo()
    not_undone(ckptconv.MalformedError, "undo journal is damaged", checkpoint)


def test_a_hot_journal(checkpoint: Path) -> None:
    """An interrupted change is not undone automatically. Another change or replacement of the file is refused, and
    every reader suggests `undo`.
    """
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    writing.mark_journal(checkpoint, HOT)
    assert state_of(checkpoint) == HOT
    now = checkpoint.read_bytes()
    refused_in_place(ckptconv.RefusedError, r"was interrupted; ckptconv\.undo", checkpoint, map_location="cpu")
    said = f"was interrupted; to restore the old bytes: ckptconv.undo('{checkpoint}')"
    link, copy = checkpoint.with_name("link.pt"), checkpoint.with_name("copy.pt")
    link.symlink_to(checkpoint)
    assert any(said in note for note in ckptconv.convert(checkpoint, copy, map_location="cpu").notes)
    for each in (checkpoint, link):
        assert any(said in note for note in ckptconv.inspect(each).notes)
        assert any(said in note.what for note in ckptconv.verify(each).findings)
        assert any(said in note for note in ckptconv.diff(copy, each).notes)
        with pytest.warns(UserWarning, match=r"was interrupted; to restore the old bytes: ckptconv\.undo"):
            ckptconv.load(each, map_location="cpu")
        with (
            pytest.warns(UserWarning, match=r"was interrupted; to restore the old bytes: ckptconv\.undo"),
            ckptconv.open(each),
        ):
            pass
    assert checkpoint.read_bytes() == now


def test_inspect_lists_journals_and_replaced_pickles(checkpoint: Path, command: Command) -> None:
    """`inspect` lists the journal, whether its change is complete, and the size of the replaced pickle that is still in
    the file.
    """
    assert (ckptconv.inspect(checkpoint).journals, ckptconv.inspect(checkpoint).superseded) == ((), ())
    grows = is_zip(checkpoint)
    ckptconv.convert(checkpoint, in_place=True, rename=LONG if grows else [("layer", "LAYER")])
    path = journal_path(checkpoint)
    said = command.json("inspect", checkpoint)
    journal = {"path": str(path), "nbytes": path.stat().st_size, "hot": False}
    assert said["journals"] == [journal]
    takes_back = f"ckptconv undo {checkpoint} reverts the last change"
    shown = command("inspect", checkpoint, out=(str(path), takes_back)).out
    if grows:
        replaced = {each["name"]: each["nbytes"] for each in said["superseded"]}
        with zipfile.ZipFile(checkpoint) as archive:
            sizes = {each.filename.partition("/")[2]: each.file_size for each in archive.infolist()}
        assert replaced.keys() == {"data.000", ".format_ver.000", ".storage_align.000"} & sizes.keys()
        assert replaced == {name: sizes[name] for name in replaced}
        assert "data.000" in shown and "a conversion drops it" in shown
    else:
        assert said["superseded"] == []
    writing.mark_journal(checkpoint, HOT)
    assert command.json("inspect", checkpoint)["journals"] == [{**journal, "hot": True}]
    command("inspect", checkpoint, out=f"was interrupted; to restore the old bytes: ckptconv undo {checkpoint}")


def test_a_reader_and_a_writer_at_once(checkpoint: Path) -> None:
    """A change in place is refused while a reader uses the file, and a reader is refused while the file is changed."""
    with ckptconv.open(checkpoint), pytest.raises(ckptconv.RefusedError, match="another process is using"):
        ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    with (
        in_place.open_locked(checkpoint),
        pytest.raises(ckptconv.InputError, match="another process is changing the file"),
    ):
        ckptconv.inspect(checkpoint)


def test_repeated_changes_that_append(tmp_path: Path) -> None:
    """Each change that appends keeps the previous pickle as a record. `convert` drops these records."""
    path = saved_at(tmp_path / "model.pt", {"a": torch.ones(2)})
    names = [f"{'very.' * 40 * i}long." for i in (1, 2, 3)]
    for name in names:
        assert ckptconv.convert(path, in_place=True, rename=[("^", name)]).in_place.way == "appended"
    assert [*load(path)] == ["".join(reversed(names)) + "a"]
    assert ckptconv.verify(path).ok
    ckptconv.convert(path, tmp_path / "out.pt")
    data = (tmp_path / "out.pt").read_bytes()
    assert b"data.000" not in data and b"data.pkl" in data
    buffer = io.BytesIO(path.read_bytes())
    assert_same(torch.load(buffer, weights_only=True), torch.load(path, mmap=True, weights_only=True))


@pytest.fixture(params=["safetensors", "bin"])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with three shards and their index."""
    source = tmp_path / ("source.safetensors" if request.param == "safetensors" else "source.pt")
    state = {f"module.layer{i}.weight": torch.arange(300.0) + i for i in range(6)}
    if request.param == "safetensors":
        save_file(state, source)
    else:
        torch.save(state, source)
    ckptconv.convert(
        source, tmp_path / "set", max_shard_size=2500, format="safetensors" if request.param != "bin" else "pt"
    )
    return tmp_path / "set"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_sharded_set_changes_as_one(sharded: Path) -> None:
    """A sharded set and its index are changed together. `undo` of one of the files restores all of them."""
    before = contents(sharded)
    assert len(before) == 4
    report = ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    assert len(report.changes.names) == 6
    assert ckptconv.verify(sharded).ok
    assert sorted(ckptconv.load(sharded)) == [f"layer{i}.weight" for i in range(6)]
    changed = [name for name in contents(sharded) if name in before and contents(sharded)[name] != before[name]]
    assert len(changed) == 4
    ckptconv.undo(sharded / changed[1])
    assert contents(sharded) == before


def test_an_interrupted_undo_of_a_set(sharded: Path) -> None:
    """If an undo of a set was interrupted after some files were restored, another undo restores the rest."""
    before = contents(sharded)
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    changed = [path for path in sorted(sharded.iterdir()) if path.name in before]
    (leader,) = [path for path in changed if read_journal(path, os.getuid())[0].members]
    for path in changed:
        writing.mark_journal(path, HOT)
    member = next(path for path in changed if path != leader)
    journal, _ = read_journal(member, os.getuid())
    with open(member, "r+b") as file:
        writing.restore(file.fileno(), journal)
    journal_path(member).unlink()
    refused_in_place(ckptconv.RefusedError, "was interrupted", sharded, rename=[("layer", "l")])
    ckptconv.undo(leader)
    assert contents(sharded) == before


def test_an_undo_of_a_set_has_one_budget(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a set share one limit of work for an undo, so many small files cannot exceed it."""
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    check, budgets = in_place._check_whole, []

    def checked(path: Path, fd: int, journal: Journal) -> None:
        budgets.append(work())
        check(path, fd, journal)

    monkeypatch.setattr(in_place, "_check_whole", checked)
    ckptconv.undo(sharded)
    assert len(budgets) == 4 and all(each is budgets[0] for each in budgets)


def test_journals_of_a_set_that_contradict_each_other(sharded: Path) -> None:
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    now = checkpoint_files(sharded)
    names = [*now]
    journal, _ = read_journal(sharded / names[1], os.getuid())
    for leader in (names[2], names[1]):
        writing.write_journal(sharded / names[1], dataclasses.replace(journal, leader=leader, members=()))
        not_undone(ckptconv.RefusedError, "contradict each other", sharded / names[1])
    assert checkpoint_files(sharded) == now


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("number", range(4))
def test_a_journal_of_an_earlier_change_does_not_count(
    sharded: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a second change of a set is killed before the journal of a file is written, `undo` restores the state before
    the second change. It ignores the journals of the first change.
    """
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    before = checkpoint_files(sharded)
    write, count = writing.write_journal, itertools.count()

    def killed(target: Path, journal: Journal) -> None:
        if next(count) == number:
            raise KeyboardInterrupt
        write(target, journal)

    monkeypatch.setattr(writing, "write_journal", killed)
    with pytest.raises(KeyboardInterrupt):
        ckptconv.convert(sharded, in_place=True, rename=[("layer", "LAYER")])
    monkeypatch.undo()
    with contextlib.nullcontext() if number else pytest.raises(ckptconv.InputError, match="no undo journal"):
        ckptconv.undo(sharded)
    assert contents(sharded) == before


@pytest.mark.parametrize("undone", [False, True], ids=["removed", "undone by itself"])
def test_a_set_with_a_missing_journal(sharded: Path, *, undone: bool) -> None:
    """If a journal of a set is missing, `undo` of the set is refused, because it would restore only some of the
    files.
    """
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    (shard,) = sharded.glob("[!.]*-00002-of-*")
    if undone:
        ckptconv.convert(shard, in_place=True, rename=[("layer", "LAYER")])
        ckptconv.undo(shard)
    else:
        journal_path(shard).unlink()
    before = contents(sharded)
    error = not_undone(ckptconv.RefusedError, "separately since then", sharded)
    assert shard.name in str(error)
    assert contents(sharded) == before


def test_a_prefix_that_some_shards_lack(sharded: Path) -> None:
    """An edit that matches in one shard is accepted. An edit that matches in none is an error."""
    before = contents(sharded)
    ckptconv.convert(sharded, in_place=True, rename=[("^module.layer0", "module.first")])
    assert "module.first.weight" in ckptconv.load(sharded)
    ckptconv.undo(next(path for path in sharded.iterdir() if path.suffix == ".json"))
    assert contents(sharded) == before
    refused_in_place(ckptconv.NoMatchError, None, sharded, strip_prefix="model.")


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_a_shard_that_lacks_one_edit_gets_the_others(tmp_path: Path, format: str) -> None:
    """An edit applies to the shards in which it matches. An edit that matches in no shard is refused."""
    source, shards, whole = tmp_path / "source.pt", tmp_path / "set", tmp_path / "whole.pt"
    torch.save({name: torch.full((300,), len(name)) for name in ("module.a", "module.bias", "model.c")}, source)
    ckptconv.convert(source, shards, max_shard_size=2500, format=format)
    edits = {"strip_prefix": "module.", "rename": [("bias", "b"), ("^model", "m")], "add_prefix": "x."}
    ckptconv.convert(source, whole, **edits)
    refused_in_place(ckptconv.NoMatchError, "no name starts with 'net", shards, **{**edits, "strip_prefix": "net."})
    ckptconv.convert(shards, in_place=True, **edits)
    assert sorted(ckptconv.load(shards)) == ["x.a", "x.b", "x.m.c"]
    assert ckptconv.diff(shards, whole, state_dict=True).same
    assert ckptconv.verify(shards).ok


def test_a_shard_in_which_a_repeated_edit_matches_once(tmp_path: Path) -> None:
    """Prefixes that are given twice are removed as often as each shard has them."""
    source, shards = tmp_path / "source.pt", tmp_path / "set"
    torch.save({name: torch.ones(300) for name in ("module.module.a", "module.b", "c")}, source)
    ckptconv.convert(source, shards, max_shard_size=1300, format="pt")
    refused_in_place(ckptconv.NoMatchError, None, shards, strip_prefix=["module."] * 3)
    ckptconv.convert(shards, in_place=True, strip_prefix=["module."] * 2)
    assert sorted(ckptconv.load(shards)) == ["a", "b", "c"]


@pytest.mark.parametrize("others", ["_orig_mod.module.", "_orig_mod.", ""])
def test_unwrapping_a_set(tmp_path: Path, others: str) -> None:
    """``unwrap`` removes the prefixes that all names have. It is refused if only some shards have names that begin with
    ``module.``.
    """
    source, shards = tmp_path / "source.pt", tmp_path / "set"
    names = [*(f"module._orig_mod.layer{i}.weight" for i in range(3)), *(f"{others}head{i}.weight" for i in range(3))]
    torch.save({name: torch.arange(300.0) for name in names}, source)
    ckptconv.convert(source, shards, max_shard_size=3700, format="pt")
    before = contents(shards)
    whole = tmp_path / "whole.pt"
    ckptconv.convert(source, whole, unwrap=True)
    if others != "_orig_mod.module.":
        refused_in_place(
            ckptconv.RefusedError, r"in some shards but not in others.* strip_prefix='module\.'", shards, unwrap=True
        )
        return
    report = ckptconv.convert(shards, in_place=True, unwrap=True, map_location={"mps": "cuda"})
    assert ckptconv.diff(shards, whole).same
    assert [note for note in report.notes if "changed nothing" in note] == [
        "no tensor is on 'mps', so mapping it changed nothing"
    ]
    ckptconv.undo(shards)
    assert contents(shards) == before


def test_journals_of_a_set_that_were_planted(sharded: Path) -> None:
    """The journals of a set must name each other. If they contradict each other, as forged ones may, no file is
    restored.
    """
    victim = sharded / "victim.safetensors"
    save_file({"module.a": torch.ones(3)}, victim)
    ckptconv.convert(victim, in_place=True, strip_prefix="module.")
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    leader, member, *_ = (path for path in sorted(sharded.iterdir()) if journal_path(path).exists() and path != victim)
    now = contents(sharded)
    found = {path: read_journal(path, os.getuid())[0] for path in (leader, member)}

    def planted(path: Path, **said: Any) -> None:
        for each, journal in found.items():
            writing.write_journal(each, dataclasses.replace(journal, **(said if each == path else {})))
            writing.mark_journal(each, DONE)
        not_undone(ckptconv.CkptconvError, r"contradict each other|no undo journal|no such file", path)
        assert {name: data for name, data in contents(sharded).items() if name[0] != "."} == {
            name: data for name, data in now.items() if name[0] != "."
        }

    planted(leader, members=(leader.name, member.name, victim.name))
    planted(leader, members=(member.name,))
    planted(leader, members=(), leader=victim.name)
    planted(member, leader=victim.name)
    planted(member, leader=member.name)
    planted(member, leader="config.json")


def test_a_hot_journal_in_a_set(sharded: Path) -> None:
    """If the change of one file of a set was interrupted, every reader of the set names the file. `undo` of the folder
    restores the set.
    """
    before = contents(sharded)
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    torn = [path for path in sorted(sharded.iterdir()) if journal_path(path).exists()][1]
    writing.mark_journal(torn, HOT)
    said = f"an in-place change of {torn} was interrupted; to restore the old bytes: ckptconv.undo('{torn}')"
    found = ckptconv.inspect(sharded)
    assert any(said in note for note in found.notes)
    assert [each.hot for each in found.journals] == [False, True, False, False]
    torn.write_bytes(b"\xff" + torn.read_bytes()[1:])
    with pytest.raises(ckptconv.InputError, match=r"was interrupted; to restore the old bytes: ckptconv\.undo"):
        ckptconv.inspect(sharded)
    torn.write_bytes(before[torn.name])
    ckptconv.undo(sharded)
    assert contents(sharded) == before


@pytest.mark.parametrize("prefix", ["", "m."])
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_an_index_that_becomes_shorter_or_longer(sharded: Path, prefix: str, *, back: bool) -> None:
    """If an index becomes shorter or longer, every torn state of it is refused, and its journal restores the
    old index.
    """
    (index,) = sharded.glob("[!.]*.json")
    if prefix:
        ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    old = index.read_bytes()
    ckptconv.convert(sharded, in_place=True, rename=[("^module." if not prefix else "^", prefix)])
    new = index.read_bytes()
    assert len(new) != len(old)
    journal, _ = read_journal(index, os.getuid())
    function = writing.restore if back else writing.apply
    index.write_bytes(new if back else old)
    operations = operations_of(lambda fd: function(fd, journal), index)
    for content in set(torn_states(new if back else old, operations, random.Random(1), 20)) - {old, new}:
        index.write_bytes(content)
        assert not loads(index)
        with open(index, "r+b") as file:
            writing.check_restorable(file.fileno(), journal, index, done=False)
            writing.restore(file.fileno(), journal)
        assert index.read_bytes() == old


@pytest.mark.parametrize("undoes", [False, True])
def test_a_set_of_old_and_new_files_is_refused(sharded: Path, monkeypatch: pytest.MonkeyPatch, *, undoes: bool) -> None:
    """If a change or an undo of a set is killed before one of its files is written, its index cannot be read. `undo`
    then restores the old set.
    """
    before = checkpoint_files(sharded)
    for number in range(4):
        if undoes:
            ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
        calls = itertools.count()
        real = writing.restore if undoes else writing.apply

        def killed(
            fd: int,
            journal: Journal,
            real: Callable[[int, Journal], int] = real,
            calls: Iterator[int] = calls,
            number: int = number,
        ) -> int:
            if next(calls) == number:
                raise KeyboardInterrupt
            return real(fd, journal)

        monkeypatch.setattr(*((writing, "restore") if undoes else (writing, "apply")), killed)
        with pytest.raises(KeyboardInterrupt):
            ckptconv.undo(sharded) if undoes else ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
        monkeypatch.undo()
        (index,) = sharded.glob("[!.]*.json")
        assert not loads(index)
        with pytest.raises(ckptconv.InputError, match="was interrupted"):
            ckptconv.inspect(sharded)
        ckptconv.undo(sharded)
        assert contents(sharded) == before


@pytest.mark.parametrize("fault", range(4))
def test_a_fault_in_a_set_restores_all_files(sharded: Path, fault: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, apply = itertools.count(), writing.apply

    def failing(fd: int, journal: Journal) -> int:
        if next(calls) == fault:
            raise OSError(errno.EIO, "Input/output error")
        return apply(fd, journal)

    monkeypatch.setattr(writing, "apply", failing)
    refused_in_place(ckptconv.OutputError, "nothing was changed", sharded, strip_prefix="module.")


@pytest.mark.parametrize("has_index", [True, False])
def test_names_that_would_become_equal_in_two_shards(tmp_path: Path, *, has_index: bool) -> None:
    """If an edit would give two shards the same name, the change is refused, also if one of the names does not
    change.
    """
    source, shards = tmp_path / "source.pt", tmp_path / "set"
    torch.save({"module.a": torch.arange(300.0), "a": torch.arange(300.0)}, source)
    ckptconv.convert(source, shards, max_shard_size=1300, format="safetensors")
    if not has_index:
        next(shards.glob("*.json")).unlink()
    refused_in_place(ckptconv.CollisionError, "two shards would have the name 'a'", shards, strip_prefix="module.")


@pytest.mark.parametrize("then", ["other shards", "no index", "another file"])
def test_an_index_that_is_written_again_meanwhile(sharded: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    (index,) = sharded.glob("*.json")

    def change(*_: object, **__: object) -> None:
        if then == "another file":
            shutil.copy(index, index.with_name("new"))
            index.with_name("new").replace(index)
        else:
            index.write_text('{"weight_map": {"w": "other.safetensors"}}' if then == "other shards" else "[]")

    monkeypatch.setattr(in_place, "_plan_file" if then == "another file" else "_check_file", change)
    with pytest.raises(ckptconv.CkptconvError, match=r"written again|another file|of another format|not a JSON object"):
        ckptconv.convert(sharded, in_place=True, strip_prefix="module.")


def test_links_in_a_set(sharded: Path, tmp_path: Path) -> None:
    """A set with a link out of its folder is refused, because the journal would be in another folder. A link within the
    folder is followed.
    """
    (shard,) = sharded.glob("[!.]*-00002-of-*")
    shutil.move(shard, tmp_path / shard.name)
    shard.symlink_to(tmp_path / shard.name)
    before = contents(sharded)
    for path in (sharded, next(sharded.glob("*.json"))):
        refused_in_place(ckptconv.RefusedError, "leads out of the folder", path, strip_prefix="module.")
    assert contents(sharded) == before
    shard.unlink()
    shutil.move(tmp_path / shard.name, sharded / "elsewhere")
    shard.symlink_to("elsewhere")
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    ckptconv.undo(sharded)
    assert {**contents(sharded), "elsewhere": b""} == {**before, "elsewhere": b""}


def test_undo_of_a_folder_with_several_checkpoints(sharded: Path) -> None:
    other = saved_at(sharded / "other.pt", {"module.a": torch.ones(1)})
    ckptconv.convert(other, in_place=True, strip_prefix="module.")
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    not_undone(ckptconv.UsageError, "several checkpoints in the folder were changed", sharded)
    ckptconv.undo(other)
    ckptconv.undo(sharded)
    not_undone(ckptconv.InputError, "no undo journal", sharded)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a folder with three checkpoint files, a set of shards and a text file."""
    folder = tmp_path / "run"
    (folder / "epochs").mkdir(parents=True)
    for number in range(3):
        state = {f"module.layer{i}.weight": torch.arange(4.0) + number for i in range(20)}
        torch.save(state, folder / "epochs" / f"{number}.pt")
    ckptconv.convert(folder / "epochs" / "0.pt", folder / "set", max_shard_size=150, format="pt")
    (folder / "config.json").write_text("{}")
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files in `folder` and below it, without journals."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("where", [".", "deep"])
def test_a_folder_with_one_checkpoint(where: str, tmp_path: Path, command: Command) -> None:
    """The command changes the only checkpoint of a folder in place. The function requires the path of the file."""
    folder = tmp_path / "run"
    path = folder / where / "model.safetensors"
    path.parent.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, path)
    refused_in_place(ckptconv.InputError, r"model\.safetensors", folder, add_prefix="x.")
    command("convert", folder, "--in-place", "--add-prefix", "x.", err="a → x.a")
    assert [*ckptconv.inspect(path).state_dicts[0].prefixes] == ["x."]


def test_a_folder_of_checkpoints(run_folder: Path, command: Command) -> None:
    """The checkpoints of a folder are changed one after the other. An edit that does not match in one of them is left
    out there. `undo` restores each of them.
    """
    ckptconv.convert(run_folder / "epochs/1.pt", in_place=True, no_undo=True, strip_prefix="module.")
    before = everything(run_folder)
    edits = ("--in-place", "--strip-prefix", "module.", "--to", "cuda:1")
    planned = command.json("convert", run_folder, *edits, "--dry-run")
    assert everything(run_folder) == before
    said = command.json("convert", run_folder, *edits)
    assert [each["src"] for each in said["items"]] == [each["src"] for each in planned["items"]]
    assert [os.path.relpath(each["src"], run_folder) for each in said["items"]] == [
        *(f"epochs/{i}.pt" for i in range(3)),
        "set/pytorch_model.bin.index.json",
    ]
    for each in said["items"]:
        assert each["in_place"]["way"] == "same size" and each["in_place"]["nbytes"] < each["size"]
        assert {tensor.device for tensor in ckptconv.inspect(each["src"]).tensors} == {"cuda:1"}
        assert all(tensor.path.startswith("layer") for tensor in ckptconv.inspect(each["src"]).tensors)
    command("undo", *(each["src"] for each in said["items"]))
    assert everything(run_folder) == before
    command(
        "convert", run_folder, *edits, err=("epochs/0.pt: ", "in place, cpu → cuda:1, 20 names", "4 items: 4 converted")
    )
    command("convert", run_folder, "--in-place", "--strip-prefix", "nothing.", status=1, err="4 failed")
    empty = run_folder / "empty"
    empty.mkdir()
    command("convert", empty, "--in-place", "--to", "cpu", status=1, err="a folder, not a file")
    command("convert", run_folder, "--in-place", status=2, err="needs a change")


@pytest.mark.parametrize("fault", ["cannot be written", "cannot be taken back"])
def test_a_fault_in_the_middle_of_a_folder(
    run_folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """If a write fails in a file of a folder, the other files are changed. The failed file is restored, or the error
    suggests `undo`.
    """
    before = everything(run_folder)
    pwrite, calls = os.pwrite, []

    def failing(fd: int, data: bytes, offset: int) -> int:
        calls.append(os.readlink(f"/proc/self/fd/{fd}"))
        at = calls.count(str(run_folder / "epochs/1.pt"))
        if calls[-1].endswith("1.pt") and (at == 3 or (at > 3 and fault == "cannot be taken back")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    said = command.json("convert", run_folder, "--in-place", "--strip-prefix", "module.", status=3)
    monkeypatch.undo()
    failed = [each["src"] for each in said["items"] if "error" in each]
    assert failed == [str(run_folder / "epochs/1.pt")]
    error = next(each["error"] for each in said["items"] if "error" in each)
    now = everything(run_folder)
    assert [name for name in before if now[name] == before[name]] == [
        "config.json",
        *(["epochs/1.pt"] if fault == "cannot be written" else []),
    ]
    if fault == "cannot be written":
        assert error["hint"] == "nothing was changed"
        assert not journal_path(run_folder / "epochs/1.pt").exists()
    else:
        assert error["hint"] == f"ckptconv undo {failed[0]}"
        command("inspect", failed[0], status=1, err=f"to restore the old bytes: ckptconv undo {failed[0]}")
        command("undo", failed[0])
        assert everything(run_folder)["epochs/1.pt"] == before["epochs/1.pt"]


def test_a_set_whose_journals_have_no_room(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a journal of a set cannot be written, nothing is changed. An earlier journal is kept."""
    shard = sorted(sharded.iterdir())[1]
    before = contents(sharded)
    write = writing.write_journal

    def failing(target: Path, journal: Journal) -> None:
        if target == shard:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(target, journal)

    monkeypatch.setattr(writing, "write_journal", failing)
    refused_in_place(ckptconv.OutputError, "No space left", sharded, strip_prefix="module.")
    monkeypatch.undo()
    assert contents(sharded) == before
    ckptconv.convert(shard, in_place=True, strip_prefix="module.")
    earlier = journal_path(shard).read_bytes()
    monkeypatch.setattr(writing, "write_journal", failing)
    refused_in_place(ckptconv.OutputError, "No space left", shard, add_prefix="module.")
    assert journal_path(shard).read_bytes() == earlier


def test_a_copied_folder_contains_no_journals(run_folder: Path, tmp_path: Path, command: Command) -> None:
    """Copying a folder does not copy journals, also not of an interrupted change. The report of the affected file
    contains a note.
    """
    command("convert", run_folder, "--in-place", "--strip-prefix", "module.")
    writing.mark_journal(run_folder / "epochs/0.pt", HOT)
    said = command.json("convert", run_folder, tmp_path / "out", "--copy-others", "--to", "cuda:1")
    assert sorted(everything(tmp_path / "out")) == sorted(everything(run_folder))
    assert not list((tmp_path / "out").rglob(".*"))
    notes = {os.path.relpath(each["src"], run_folder): each.get("notes", []) for each in said["items"]}
    assert any("was interrupted" in note for note in notes["epochs/0.pt"])
    assert not any("was interrupted" in note for note in notes["epochs/1.pt"])


def test_a_name_that_is_too_long_for_a_journal(checkpoint: Path) -> None:
    """A file whose name is too long for a journal is refused in place. `inspect` does not report an interrupted
    change.
    """
    path = checkpoint.rename(checkpoint.with_name("a" * 241))
    refused_in_place(ckptconv.OutputError, "the undo journal cannot be written", path, map_location="cuda:1")
    assert "interrupted" not in str(ckptconv.inspect(path).notes)


def test_a_path_that_is_missing(checkpoint: Path, command: Command) -> None:
    """If a path is missing, it may be meant as an output, so the other files are not changed."""
    before = checkpoint.read_bytes()
    missing = checkpoint.with_name("out.pt")
    command("convert", checkpoint, missing, "--to", "cuda:1", "--in-place", status=1, err="so nothing was changed")
    assert checkpoint.read_bytes() == before


def test_jobs_in_place(run_folder: Path) -> None:
    """Jobs can change files in place. Their output must be the input."""
    jobs = ckptconv.jobs_in(run_folder, str(run_folder), in_place=True, strip_prefix="module.")
    assert len(jobs) == 4
    assert all(outcome.report and outcome.report.in_place for outcome in ckptconv.convert_many(jobs[:1]))
    with pytest.raises(ckptconv.UsageError, match="has no output"):
        ckptconv.jobs_in(run_folder, "elsewhere", in_place=True, strip_prefix="module.")
    with pytest.raises(ckptconv.UsageError, match="has no output"):
        ckptconv.Job("a.pt", "b.pt", {"in_place": True})


def test_a_copied_set_contains_no_journals(sharded: Path, tmp_path: Path) -> None:
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    ckptconv.convert(sharded, tmp_path / "copy", copy_others=True)
    assert not [path for path in (tmp_path / "copy").iterdir() if path.name.startswith(".")]


def test_a_file_that_is_replaced_loses_its_journal(checkpoint: Path) -> None:
    """If a file is replaced, its journal is removed. If its change was interrupted, replacing it is refused."""
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    other = checkpoint.with_name("other.pt")
    shutil.copy(checkpoint, other)
    writing.mark_journal(checkpoint, HOT)
    with pytest.raises(ckptconv.RefusedError, match=r"was interrupted; ckptconv\.undo"):
        ckptconv.convert(other, checkpoint, map_location="cpu", force=True)
    with pytest.raises(ckptconv.RefusedError, match=r"was interrupted; ckptconv\.undo"):
        ckptconv.save({"a": torch.ones(1)}, checkpoint)
    writing.mark_journal(checkpoint, DONE)
    ckptconv.convert(other, checkpoint, map_location="cpu", force=True)
    assert not journal_path(checkpoint).exists()


def test_a_journal_of_a_file_that_was_moved_away_is_kept(checkpoint: Path) -> None:
    """If a file with an interrupted change was moved away, no new file is written under its name. Otherwise the journal
    with the old bytes would be lost.
    """
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    writing.mark_journal(checkpoint, HOT)
    aside = checkpoint.with_name("aside.pt")
    checkpoint.rename(aside)
    with pytest.raises(ckptconv.RefusedError, match="was interrupted; the file is gone"):
        ckptconv.convert(aside, checkpoint, map_location="cpu", format="pt")
    with pytest.raises(ckptconv.RefusedError, match="was interrupted; the file is gone"):
        ckptconv.save({"a": torch.ones(1)}, checkpoint, format="pt")
    assert state_of(checkpoint) == HOT


def test_a_file_that_is_replaced_cannot_be_changed_meanwhile(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot be changed in place while it is replaced, because the journal of the change would be removed."""
    other = checkpoint.with_name("other" + checkpoint.suffix)
    shutil.copy(checkpoint, other)
    real, refused = os.replace, []

    def replace(old: Path, new: Path) -> None:
        for when in ("before", "after"):
            if when == "after":
                real(old, new)
            try:
                ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
            except ckptconv.RefusedError as error:
                refused.append(f"{when}: {error.what}")

    monkeypatch.setattr(output_files.os, "replace", replace)
    ckptconv.convert(other, checkpoint, map_location="cpu", force=True)
    said = "another process is using the file"
    assert refused == [f"before: {said}", f"after: {said}"]


def test_a_hot_journal_below_a_folder_that_is_replaced(sharded: Path, tmp_path: Path) -> None:
    below = sharded / "below"
    below.mkdir()
    torch.save({"a": torch.ones(1)}, below / "model.pt")
    ckptconv.convert(sharded, tmp_path / "out", map_location="cpu")
    for folder in (tmp_path / "out", sharded):
        ckptconv.convert(folder / "below/model.pt", in_place=True, map_location="cuda:1")
        writing.mark_journal(folder / "below/model.pt", HOT)
        with pytest.raises(ckptconv.RefusedError, match=r"was interrupted; ckptconv\.undo"):
            ckptconv.convert(sharded, folder, map_location="cpu", force=True)
        assert state_of(folder / "below/model.pt") == HOT


def test_a_set_that_is_replaced_loses_its_journals(sharded: Path) -> None:
    """If a set is replaced, its journals are removed. If a change of it was interrupted, replacing is refused. A file
    that is not converted keeps its journal.
    """
    torn = sharded / "below" / "torn.pt"
    torn.parent.mkdir()
    torch.save({"module.a": torch.ones(1)}, torn)
    whole = torn.read_bytes()
    ckptconv.convert(torn, in_place=True, add_prefix="b.")
    writing.mark_journal(torn, HOT)
    torn.write_bytes(whole[:-22] + b"\xff" + whole[-21:])
    ckptconv.convert(sharded, in_place=True, strip_prefix="module.")
    changed = [path for path in sorted(sharded.iterdir()) if journal_path(path).exists()]
    writing.mark_journal(changed[1], HOT)
    with pytest.raises(ckptconv.RefusedError, match=r"was interrupted; ckptconv\.undo") as caught:
        ckptconv.convert(sharded, sharded, add_prefix="a.", force=True)
    assert str(changed[1]) in str(caught.value)
    writing.mark_journal(changed[1], DONE)
    report = ckptconv.convert(sharded, sharded, add_prefix="a.", force=True)
    assert [path for path, _ in report.failed] == [str(torn)]
    assert list(sharded.rglob(".*")) == [journal_path(torn)]
    torn.write_bytes(whole)
    ckptconv.undo(torn)
    assert torn.read_bytes() == whole


def test_a_journal_that_is_too_large(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptconv.convert(checkpoint, in_place=True, map_location="cuda:1")
    data = journal_path(checkpoint).read_bytes()
    size, header = len(data), int.from_bytes(data[20:24], "little")
    for name, bound, is_refused in (
        ("undo_journal", size, False),
        ("undo_journal", size - 1, True),
        ("undo_header", header, False),
        ("undo_header", header - 1, True),
    ):
        monkeypatch.setattr(undo_journal, "LIMITS", dataclasses.replace(LIMITS, **{name: bound}))
        if is_refused:
            not_undone(ckptconv.LimitError, "too large", checkpoint)
        else:
            read_journal(checkpoint, os.getuid())


def test_flags_are_the_keywords(checkpoint: Path, command: Command) -> None:
    """The command has the same options for changes in place as the function, and accepts several files. If one of them
    fails, the others are changed.
    """
    other, before = checkpoint.with_name("other.pt"), checkpoint.read_bytes()
    shutil.copy(checkpoint, other)
    ckptconv.convert(other, in_place=True, map_location="cuda:1", add_prefix="module.")
    flags = ("--in-place", "--to", "cuda:1", "--add-prefix", "module.")
    checkpoint.with_name("text.pt").write_text("junk")
    command("convert", checkpoint, checkpoint.with_name("text.pt"), *flags, status=3, err="text.pt: a text file")
    assert checkpoint.read_bytes() == other.read_bytes() != before
    said = command.json("convert", other, "--in-place", "--no-undo", "--to", "cpu", "--dry-run")
    assert (said["in_place"]["way"], said["in_place"]["journal"]) == ("same size", None)
    command("undo", checkpoint, other, err="restored")
    assert checkpoint.read_bytes() == other.read_bytes() == before
    command("undo", checkpoint, status=1, err="there is no undo journal")
    command("convert", checkpoint, "out.pt", "--no-undo", status=2, err="--no-undo needs --in-place")


def test_a_system_without_owners(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system without owners of files, such as Windows, changes in place and undo are refused, because no journal
    can be trusted. The error suggests `convert`.
    """
    before = checkpoint.read_bytes()
    monkeypatch.setattr("ckptconv.system.calls.HAS_OWNERS", False)
    for change in (
        lambda: ckptconv.convert(checkpoint, in_place=True, map_location="cpu"),
        lambda: ckptconv.undo(checkpoint),
    ):
        with pytest.raises(ckptconv.UnsupportedError, match=r"on this system yet.*ckptconv\.convert\("):
            change()
    assert checkpoint.read_bytes() == before
