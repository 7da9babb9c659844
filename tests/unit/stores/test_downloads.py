"""Servers that send only complete files, or compress them. With ``download``, a file is fetched once and then read
here.
"""

from __future__ import annotations

import gzip
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.conversion.convert import run
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.targets import find_request
from ckptconv.edits.options import Edits
from ckptconv.errors import (
    InputChangedError,
    InputError,
    OutputError,
    TargetExistsError,
    TransferError,
    UnsupportedError,
)
from ckptconv.inspection.comparison.diff import compare
from ckptconv.inspection.comparison.options import Compared
from ckptconv.inspection.summary import summary_of
from ckptconv.inspection.verification import verdict_on
from ckptconv.stores.requests import POLICY
from tests.support.command import Command
from tests.support.hostile_bytes import saved
from tests.support.http_server import Exchange, FileServer, serving
from tests.support.meter import Counted

pytest.importorskip("urllib3", reason="the extra remote is not installed")


def whole(it: Exchange) -> None:
    """Send the complete file, as a server without ranges does. An example is ``python -m http.server``."""
    it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data)


def zipped(
    it: Exchange, status: int = 200, body: Callable[[bytes], bytes] = gzip.compress, coding: str = "gzip"
) -> None:
    """Send the complete file, compressed, for any request. The file ends with the connection."""
    it.handler.close_connection = True
    it.send(status, it.headers(Content_Encoding=coding, Content_Range="", Content_Length=""), body(it.data))


def zipped_ranges(it: Exchange) -> None:
    """Send ranges as compressed data, or the complete file if no range is requested."""
    it.send(206, it.headers(Content_Encoding="gzip"), it.part) if it.is_range else zipped(it)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry once, without a delay."""
    for name, value in {"backoff": 0.01, "attempts": 2}.items():
        monkeypatch.setattr(POLICY, name, value)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Return a state dict with more bytes than a window. Most of them are zeros, which compress a thousandfold."""
    return {"module.a": torch.zeros(400_000), "module.b": torch.arange(50_000.0)}


@pytest.fixture
def server(state: dict[str, torch.Tensor]) -> Iterator[FileServer]:
    """Serve a.pt."""
    with serving({"a.pt": saved(state)}, lie=whole) as server:
        yield server


def left_in(folder: Path) -> list[str]:
    """Return the files in `folder`, and the files without a name in it that this process has open."""
    fds = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    nameless = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return [*os.listdir(folder), *(each for each in nameless if each.startswith(str(folder)))]


@pytest.mark.parametrize("lie", [whole, zipped, zipped_ranges])
def test_the_error_names_the_missing_option(
    lie: Callable[[Exchange], None], server: FileServer, tmp_path: Path, command: Command
) -> None:
    """The hint of the error is ``--download``. With this option, every command that takes a URL succeeds, and a note
    tells that the server does not support range requests.
    """
    server.lie = lie
    url, out = server.url("a.pt"), tmp_path / "a.pt"
    for words in (["inspect", url], ["verify", url], ["diff", url, url], ["convert", url, out, "--unwrap"]):
        said = command(*words, status=2 if words[0] == "diff" else 1).err
        hint = shlex.split(said.splitlines()[-1])[0]
        assert hint == "--download"
        command(*words, hint)
    assert left_in(tmp_path) == ["a.pt"]
    assert [*ckptconv.load(out)] == ["a", "b"]
    assert any(
        note.startswith("the server does not support range requests")
        for note in ckptconv.inspect(url, download=True).notes
    )


def test_functions_take_download(server: FileServer, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Every function that takes a URL has the parameter ``download``, and the error names it."""
    url = server.url("a.pt")
    with pytest.raises(UnsupportedError, match="download=True"):
        ckptconv.load(url)
    assert torch.equal(ckptconv.load(url, download=True)["module.b"], state["module.b"])
    with ckptconv.open(url, download=True) as file:
        assert torch.equal(file.load("module.b"), state["module.b"])
    assert ckptconv.diff(url, url, download=True).same and ckptconv.verify(url, download=True).ok
    with ckptconv.plan(url, "b.pt", download=True) as planned:
        assert planned.size >= len(server.files["a.pt"]) - POLICY.window
    (outcome,) = ckptconv.convert_many([ckptconv.Job(url, str(tmp_path / "b.pt"), {"download": True})])
    assert outcome.report and ckptconv.verify(tmp_path / "b.pt").ok


def test_progress_of_uploads(server: FileServer, tmp_path: Path) -> None:
    """The progress begins with the size of the download. All promised bytes are reported as done."""
    size = len(server.files["a.pt"])
    for inspected in (
        lambda meter: summary_of(server.url("a.pt"), download=True, progress=meter),
        lambda meter: verdict_on(server.url("a.pt"), download=True, progress=meter),
        lambda meter: compare(server.url("a.pt"), server.url("a.pt"), Edits(), Compared(download=True), progress=meter),
        lambda meter: run(
            find_request(server.url("a.pt"), tmp_path / "b.pt", Edits(), OutputOptions(download=True)), meter
        ),
    ):
        meter = Counted()
        inspected(meter)
        assert meter.promised[0] == size
        assert meter.promised == meter.done


def test_a_file_is_downloaded_once(server: FileServer, tmp_path: Path) -> None:
    """A file is downloaded once, even if its bytes are read several times. It is not downloaded if the output cannot be
    written.
    """
    ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", verify=True, dtype="bf16", download=True)
    assert len(server.seen) == 2  # the first request was for a range
    with pytest.raises(TargetExistsError):
        ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    assert len(server.seen) == 2


def test_a_server_with_ranges_is_asked_for_ranges(server: FileServer) -> None:
    """A server that supports ranges is asked only for ranges, even with ``download``."""
    server.lie = None
    ckptconv.inspect(server.url("a.pt"), download=True)
    assert {each.status for each in server.seen} == {206}


def test_a_set(server: FileServer, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The index of a set and all its shards are downloaded."""
    ckptconv.save(state, tmp_path / "s.safetensors")
    ckptconv.convert(tmp_path / "s.safetensors", tmp_path / "set/", max_shard_size="1MB")
    server.files |= {each.name: each.read_bytes() for each in (tmp_path / "set").iterdir()}
    (index,) = [name for name in server.files if name.endswith(".json")]
    with pytest.raises(UnsupportedError, match="does not support range requests"):
        ckptconv.inspect(server.url(index))
    (tmp_path / "out").mkdir()
    ckptconv.convert(server.url(index), tmp_path / "out" / "s.safetensors", download=True)
    assert left_in(tmp_path / "out") == ["s.safetensors"]
    assert ckptconv.diff(tmp_path / "out" / "s.safetensors", tmp_path / "s.safetensors").same


def cut(it: Exchange) -> None:
    it.handler.close_connection = True
    it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data[:-9])


def slow(it: Exchange) -> None:
    it.handler.close_connection = True
    it.send(200, it.headers(Content_Range="", Content_Length=""), b"")
    for byte in it.data[:40]:
        it.handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("lie", "kind", "says"),
    [
        (cut, TransferError, "cut"),
        (slow, TransferError, "too slow: "),
        (lambda it: zipped(it, body=lambda data: gzip.compress(data)[:-9]), TransferError, "is incomplete"),
        (lambda it: zipped(it, body=lambda data: gzip.compress(data) + b"x"), TransferError, "sends more data after"),
        (lambda it: zipped(it, body=lambda data: data), TransferError, "compressed data from the server is damaged"),
        (lambda it: zipped(it, coding="br"), UnsupportedError, "expected none, or gzip, got br"),
        (lambda it: whole(it) if it.is_range else it.send(403, {"Content-Length": "0"}, b""), InputError, "refuses"),
    ],
    ids=["cut", "slow", "gzip, cut", "gzip and more", "no gzip", "brotli", "403"],
)  # fmt: skip
def test_false_statements(
    lie: Callable[[Exchange], None],
    kind: type[Exception],
    says: str,
    server: FileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong answer of the server leads to one error of a known type, and leaves no file."""
    server.lie = lie
    if lie is slow:
        monkeypatch.setattr(POLICY, "deadline", 0.3)
    with pytest.raises(kind, match=says):
        ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    assert left_in(tmp_path) == []


def test_data_that_inflates_beyond_the_free_space(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed download ends before a part of 8 MiB would exceed the free space. Here, 40 kB become 40 MiB."""
    asked: list[int] = []

    def free_space(_: Path, fd: int) -> int:
        asked.append(os.fstat(fd).st_size)
        return (20 << 20) - asked[-1]

    monkeypatch.setattr("ckptconv.system.calls.free_space", free_space)
    server.lie = lambda it: zipped(it, body=lambda _: gzip.compress(bytes(40 << 20)))
    with pytest.raises(OutputError, match=r"not enough free space for the download \(expected 8,388,608 bytes"):
        ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    assert left_in(tmp_path) == [] and 0 < max(asked) <= 20 << 20


def test_a_cut_download_is_repeated(server: FileServer, tmp_path: Path) -> None:
    """A download that was cut off is repeated, and the output contains nothing of the first attempt."""
    server.lie = lambda it: cut(it) if it.number == 1 else whole(it)
    ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    assert ckptconv.verify(tmp_path / "a.pt").ok


@pytest.mark.parametrize("first", [whole, Exchange.answer], ids=["before the download", "after a range"])
def test_a_change_in_between(first: Callable[[Exchange], None], server: FileServer, tmp_path: Path) -> None:
    """A downloaded file has the version of the answer that contains it. If the file changes after a range was read, the
    conversion fails.
    """
    new = saved({"b": torch.zeros(10_000)})

    def lie(it: Exchange) -> None:
        if it.number == 0:
            server.files["a.pt"] = new
            first(it)
        else:
            whole(it)

    server.lie = lie
    if first is whole:
        assert [*ckptconv.load(server.url("a.pt"), download=True)] == ["b"]
        return
    with pytest.raises(InputChangedError):
        ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    assert left_in(tmp_path) == []


def test_compressed_from_the_second_answer_on(server: FileServer) -> None:
    """If the server compresses only later answers, the error has no hint, because ``download`` would not help."""
    server.lie = lambda it: zipped_ranges(it) if it.number else it.answer()
    with pytest.raises(UnsupportedError, match="compressed data") as caught:
        ckptconv.load(server.url("a.pt"), download=True)
    assert caught.value.hint is None


def test_download_without_enough_space(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download fails before its first byte if its size is known and exceeds the free space. It also fails if there is
    no folder for it.
    """

    class Full:
        f_bavail, f_frsize = 1, 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstatvfs", lambda fd: Full)
        with pytest.raises(OutputError, match=r"not enough free space for the download .*expected 1,\d+,\d+ bytes"):
            ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(OutputError, match="the download cannot be kept there: No such file"):
        ckptconv.inspect(server.url("a.pt"), download=True)
    assert left_in(tmp_path) == []


def test_ctrl_c(server: FileServer, tmp_path: Path) -> None:
    """Ctrl-C during a download leaves no file."""
    gone = threading.Event()

    def lie(it: Exchange) -> None:
        if it.is_range:
            whole(it)
            return
        it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data[:-9])
        it.handler.wfile.flush()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        gone.wait(5)

    server.lie = lie
    with pytest.raises(KeyboardInterrupt):
        ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
    gone.set()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_several(jobs: str, server: FileServer, tmp_path: Path, command: Command) -> None:
    """Several files are downloaded and converted, in one process or in two."""
    server.files["b.pt"] = server.files["a.pt"]
    (tmp_path / "out").mkdir()
    command("convert", server.url("a.pt"), server.url("b.pt"), f"{tmp_path}/out/", "--download", "-j", jobs)
    assert sorted(left_in(tmp_path / "out")) == ["a.pt", "b.pt"]
