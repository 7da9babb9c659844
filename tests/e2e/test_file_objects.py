"""File objects instead of paths: they give the same results, and unsuitable objects are refused with advice."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptconv
from ckptconv.errors import ArgumentTypeError, InputChangedError, OutputError, UnsupportedError, UsageError
from tests.support import zoo
from tests.support.judge import assert_same
from tests.support.paths import FIXTURES
from tests.support.writers import distributed, scripted

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")


class Named(io.BytesIO):
    """A file in memory with a name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.read_bytes())
        self.name = str(path)


class Plain:
    """A minimal file object, which reads and writes at most 1,000 bytes at a time."""

    def __init__(self, data: bytes = b"") -> None:
        self._file = io.BytesIO(data)
        self.tell, self.data = self._file.tell, self._file.getvalue

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = self._file.seek(offset, whence)
        time.sleep(0)  # let another thread run
        return at

    def read(self, size: int, /) -> bytes:
        return self._file.read(min(size, 1000))

    def write(self, data: memoryview, /) -> int:
        return self._file.write(data[:1000])


def safetensors_file(path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2), "b": torch.zeros(0, 3)}, path, {"format": "pt", "c": "a"})


def plain_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(zoo.state_dict()))


#: Objects that torch's older format cannot store, or that torch reads incorrectly from this format.
NOT_IN_LEGACY = ("dtypes", "two_dtypes", "storages", "nested")
SAVED: dict[str, Callable[[Path], object]] = {
    **{f"{name}.pt": lambda path, make=make: zoo.save(make(), path) for name, make in zoo.ZOO.items()},
    **{
        f"{name}_legacy.pt": lambda path, make=make: zoo.save(make(), path, _use_new_zipfile_serialization=False)
        for name, make in zoo.ZOO.items()
        if name not in (*zoo.NEEDS_PROTOCOL, *NOT_IN_LEGACY)
    },
    "a.safetensors": safetensors_file,
    "a.pkl": plain_pickle,
    "script.pt": lambda path: path.write_bytes(scripted(torch.nn.Linear(2, 1))),
}
for _name in zoo.NEEDS_PROTOCOL:
    SAVED[f"{_name}.pt"] = lambda path, make=zoo.ZOO[_name]: zoo.save(make(), path, pickle_protocol=4)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or its error as a text."""
    try:
        return call()
    except ckptconv.CkptconvError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", SAVED)
def test_file_objects_give_the_same_results_as_paths(name: str, tmp_path: Path) -> None:
    """A file in memory gives the same summary, verdict, tensors and errors as its path. torch loads the same tensors
    from memory.
    """
    path = tmp_path / name
    SAVED[name](path)
    file = Named(path)
    file.seek(5)
    assert outcome(lambda: ckptconv.inspect(file)) == outcome(lambda: ckptconv.inspect(path))
    assert outcome(lambda: ckptconv.verify(file)) == outcome(lambda: ckptconv.verify(path))
    found, expected = (outcome(lambda given=given: ckptconv.load(given, "cpu")) for given in (file, path))
    assert_same(found, expected)
    if not isinstance(found, str) and path.suffix == ".pt":
        assert_same(found, torch.load(io.BytesIO(path.read_bytes()), "cpu", weights_only=True))
    assert file.tell() == 5 and not file.closed


def test_any_object_that_reads_and_seeks_is_accepted() -> None:
    """Any object that reads and seeks is accepted: open and temporary files, and objects without a name or with short
    reads.
    """
    path = FIXTURES / "training.pt"
    expected = ckptconv.load(path, "cpu", state_dict=True)
    with path.open("rb") as file, path.open("rb", buffering=0) as raw, tempfile.TemporaryFile() as temporary:
        temporary.write(path.read_bytes())
        for given in (file, raw, temporary, Plain(path.read_bytes()), io.BytesIO(path.read_bytes())):
            assert_same(ckptconv.load(given, "cpu", state_dict=True), expected)
            assert ckptconv.verify(given).ok
        assert temporary.tell() == temporary.seek(0, os.SEEK_END)


def test_threads_take_turns() -> None:
    """Several threads read the tensors of one open file object at the same time, and get the correct tensors."""
    path = FIXTURES / "resnet18.pt"
    with ckptconv.open(path) as one, ckptconv.open(Plain(path.read_bytes())) as other:
        names = [*one.tensors] * 4
        with ThreadPoolExecutor(8) as threads:
            for name, found in zip(names, threads.map(other.load, names), strict=True):
                assert_same(found, one.load(name))


def test_undo_journals_are_not_looked_up_by_name(tmp_path: Path) -> None:
    """A file object does not use the undo journal of a file with the same name."""
    path = tmp_path / "a.pt"
    ckptconv.save({"a": torch.ones(3)}, path)
    ckptconv.convert(path, in_place=True, map_location="cuda:0")
    journal = next(tmp_path.glob(".*undo"))
    journal.write_bytes(b"odd")
    assert "interrupted" in str(ckptconv.inspect(path).notes)
    found = ckptconv.inspect(Named(path))
    assert not found.journals and "interrupted" not in str(found.notes)


class Forward(io.BytesIO):
    """A stream that cannot seek, as from a network."""

    def seekable(self) -> bool:
        return False


def test_commands_for_a_file_object_contain_a_placeholder() -> None:
    """The path of a file object in memory is "<file object>". Its commands contain the placeholder FILE."""
    found = ckptconv.inspect(io.BytesIO((FIXTURES / "dataparallel.pt").read_bytes()))
    assert found.path == "<file object>"
    commands = [advice.command or "" for advice in found.findings]
    assert any(line.startswith("ckptconv convert FILE ") for line in commands) and "file object" not in str(commands)


class Unreadable(io.BytesIO):
    """A file that is open only for writing."""

    name = "out.pt"

    def read(self, size: int | None = -1, /) -> bytes:
        raise io.UnsupportedOperation("read")


class Unwritable(io.BytesIO):
    """A file that is open only for reading."""

    def write(self, data: Any, /) -> int:
        raise io.UnsupportedOperation("write")


def closed() -> io.BytesIO:
    file = io.BytesIO()
    file.close()
    return file


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (lambda: io.StringIO("text"), ArgumentTypeError, "open as text; open it with mode 'rb'"),
        (lambda: Forward(b"data"), UsageError, r"cannot seek; io.BytesIO\(f.read\(\)\) can"),
        (closed, UsageError, "cannot be read: .*closed file"),
        (Unreadable, UsageError, "out.pt: .*cannot be read: it is not open for that"),
    ],
    ids=["text", "cannot seek", "closed", "for writing"],
)
@pytest.mark.parametrize("function", [ckptconv.open, ckptconv.load, ckptconv.inspect, ckptconv.verify])
def test_objects_that_cannot_be_read(
    function: Callable[..., object], given: Callable[[], Any], kind: type[ckptconv.CkptconvError], words: str
) -> None:
    """An object that cannot be read is refused with the reason, and with advice if there is any."""
    with pytest.raises(kind, match=words):
        function(given())


def test_objects_that_change_while_they_are_read() -> None:
    """A file object that became shorter or longer since it was opened is refused."""
    data = (FIXTURES / "cpu.pt").read_bytes()
    for change in (lambda file: file.truncate(100), lambda file: (file.seek(0, 2), file.write(b"more"))):
        file = io.BytesIO(data)
        with ckptconv.open(file) as opened:
            change(file)
            with pytest.raises(InputChangedError):
                opened.load(next(iter(opened.tensors)))


def test_checkpoints_in_several_files_need_a_path(tmp_path: Path) -> None:
    """An index of shards, the metadata of torch.distributed.checkpoint and one part of a distributed tensor are
    refused. The error asks for the path of the index or folder.
    """
    index = json.dumps({"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    with pytest.raises(UnsupportedError, match=r"index of a checkpoint in 2 shards.*; give the path of the index$"):
        ckptconv.inspect(io.BytesIO(index.encode()))
    metadata = (distributed({"a": torch.ones(2)}, tmp_path / "dcp") / ".metadata").read_bytes()
    with pytest.raises(
        UnsupportedError, match=r"only the metadata of torch.distributed.checkpoint.*; use the path of the folder$"
    ):
        ckptconv.load(io.BytesIO(metadata))
    part = safetensors.torch.save({"a": torch.ones(2)}, {"DCP_SHARDING_INFO": '{"a":{"saved_offsets":[2]}}'})
    with pytest.raises(UnsupportedError, match=r"one part .*give the folder with all of them, by its path$"):
        ckptconv.load(io.BytesIO(part))


# Saving to file objects


@pytest.mark.parametrize("new", [io.BytesIO, Plain], ids=["BytesIO", "least"])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_an_object_is_saved_to_memory(new: Callable[[bytes], Any], verify: bool) -> None:
    """An object is saved from the current position of the file object, which is then at the end of the output."""
    obj = {"model": zoo.state_dict(), "epoch": 3}
    file = new(b"before")
    file.seek(6)
    report = ckptconv.save(obj, file, verify=verify)
    data = (file.getvalue if isinstance(file, io.BytesIO) else file.data)()
    assert data[:6] == b"before" and file.tell() == len(data) == 6 + report.size
    assert_same(torch.load(io.BytesIO(data[6:]), weights_only=True), obj)
    assert report.dst == "<file object>" and bool(report.verified) is verify


def test_the_name_of_a_file_object_selects_the_format(tmp_path: Path) -> None:
    """The suffix of the name selects the format. `format` selects it without a name, and must not contradict the
    suffix.
    """
    state = {"a": torch.ones(3)}
    with (tmp_path / "a.safetensors").open("w+b") as file:
        ckptconv.save(state, file)
        assert not file.closed
    assert_same(safetensors.torch.load_file(tmp_path / "a.safetensors"), state)
    memory = io.BytesIO()
    ckptconv.save(state, memory, format="safetensors")
    assert memory.getvalue() == (tmp_path / "a.safetensors").read_bytes()
    with (tmp_path / "a.safetensors").open("w+b") as file, pytest.raises(UsageError, match="the suffix means"):
        ckptconv.save(state, file, format="pt")


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(28, "No space left on device")
        return super().write(data)


class Appending(io.BytesIO):
    """A file that appends all writes to its end."""

    def write(self, data: Any, /) -> int:
        self.seek(0, os.SEEK_END)
        return super().write(data)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (io.StringIO, ArgumentTypeError, "open as text; open it with mode 'wb'"),
        (Forward, UsageError, r"cannot seek; save to an io.BytesIO\(\)"),
        (closed, UsageError, "cannot be written: .*closed file"),
        (Unwritable, UsageError, "cannot be written: it is not open for that"),
        (Full, OutputError, "could not be written: No space left on device"),
    ],
    ids=["text", "cannot seek", "closed", "for reading", "full"],
)
def test_objects_that_cannot_be_written(
    given: Callable[[], Any], kind: type[ckptconv.CkptconvError], words: str
) -> None:
    """An object that cannot be written is refused with the reason, and with advice if there is any."""
    with pytest.raises(kind, match=words):
        ckptconv.save({"a": torch.ones(1000)}, given())


def test_objects_that_are_open_for_appending() -> None:
    """A file object that is open for appending is refused."""
    file = Appending(b"before")
    with pytest.raises(OutputError, match="open for appending"):
        ckptconv.save({"a": torch.ones(3)}, file)


def test_objects_that_can_only_be_written_sequentially(tmp_path: Path) -> None:
    """Small tensors between large ones are written in order to a file that can only be written sequentially."""
    state = {"a": torch.ones(100_000), "b": torch.ones(3), "c": torch.zeros(50_000)}
    with gzip.open(tmp_path / "a.safetensors.gz", "wb") as file:
        ckptconv.save(state, file, format="safetensors")
    found = safetensors.torch.load(gzip.decompress((tmp_path / "a.safetensors.gz").read_bytes()))
    assert_same({name: found[name] for name in state}, state)


# os.PathLike


class At:
    """An object that implements only ``__fspath__``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_paths_of_any_kind(tmp_path: Path) -> None:
    """Public functions that take a path accept objects with ``__fspath__``."""
    src, out, folder = At(FIXTURES / "two_gpus.pt"), At(tmp_path / "out.pt"), At(tmp_path / "folder")
    ckptconv.convert(src, out, map_location="cpu")
    ckptconv.convert(out, in_place=True, map_location="cuda:1")
    ckptconv.undo(out)
    assert ckptconv.diff(src, out).same is False
    assert ckptconv.inspect(out).tensors and ckptconv.verify(out).ok
    with ckptconv.open(out) as opened:
        assert opened.tensors
    ckptconv.save(ckptconv.load(out), At(tmp_path / "again.pt"))
    for jobs in (ckptconv.jobs_in(src, folder), [ckptconv.Job(src, At(tmp_path / "of_a_job.pt"), {})]):
        (done,) = ckptconv.convert_many(jobs, ThreadPoolExecutor(1))
        assert done.error is None and done.report and Path(done.report.dst).exists()
    for i in (1, 2):
        ckptconv.save({f"{i}.a": torch.ones(1)}, At(tmp_path / f"model-0000{i}-of-00002.safetensors"))
    assert ckptconv.write_index(At(tmp_path)).name == "model.safetensors.index.json"
