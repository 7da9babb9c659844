"""Servers, stores and disks that fail during ``verify``. The status of the file is 'not checked', and the file is never
called damaged.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.conversion.in_place import open_locked
from ckptconv.errors import CkptconvError
from ckptconv.inspection.verification import status_of
from ckptconv.stores.requests import POLICY
from tests.support import fake_s3
from tests.support.command import Command
from tests.support.conversions import saved_in_each_format
from tests.support.http_server import Exchange, serving
from tests.support.sampled import sampled
from tests.support.writers import distributed

pytest.importorskip("urllib3", reason="the extra remote is not installed")

DAMAGE = b"\xff" * 8


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one small request at a time, and two attempts."""
    for name, value in {"backoff": 0.001, "attempts": 2, "window": 4096, "concurrency": 1, "part": 50_000}.items():
        monkeypatch.setattr(POLICY, name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state dict in each format, and as a set of shards."""
    state = {f"layer.{i}": torch.arange(20_000.0) + i for i in range(3)}
    return saved_in_each_format(tmp_path_factory.mktemp("far"), state, "100KB")


def cut(it: Exchange) -> None:
    """Drop the connection before the last byte of a response."""
    it.handler.close_connection = True
    it.send(206, it.headers(), it.part[:-1])


FAULTS: dict[str, Callable[[Exchange], None]] = {
    "cut": cut,
    "503": lambda it: it.send(503, {"Retry-After": "0", "Content-Length": "0"}, b""),
    "412": lambda it: it.send(412, {"Content-Length": "0"}, b""),
    "403": lambda it: it.send(403, {"Content-Length": "0"}, b""),
}


def verdict(url: object) -> tuple[str, set[str]]:
    """Verify `url`. Return the status and the levels of the findings, without notes."""
    try:
        found = ckptconv.verify(str(url))
    except CkptconvError as error:
        return status_of(error), set()
    return found.status, {each.level for each in found.findings} - {"note"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "s.safetensors", "set"])
def test_at_each_request(fault: str, name: str, folder: Path) -> None:
    """If a request and all requests after it fail, the status is 'not checked', and the findings have no other
    level.
    """
    files = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    place = next((each for each in files if each.startswith(name) and each.endswith("index.json")), name)
    with serving(files) as server:
        assert verdict(server.url(place)) == ("ok", set())
        requests = len(server.seen)
        server.lie = FAULTS[fault]
        for honest in sampled(range(requests), 4):
            server.seen.clear()
            server.honest = honest
            status, levels = verdict(server.url(place))
            assert (status, levels - {"not checked"}) == ("not checked", set()), honest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("name", ["zip.pt", "dcp/"])
def test_in_a_store(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If requests to S3 fail, the status of an object and of a folder of torch.distributed.checkpoint is 'not checked'.
    The folder is listed first.
    """
    with fake_s3.running_fake(tmp_path) as store:
        store.put("zip.pt", (folder / "zip.pt").read_bytes())
        url = store.put("dcp/.metadata", b"").removesuffix("dcp/.metadata") + name
        if name == "dcp/":
            state = {"a": torch.arange(40_000.0), "b": torch.ones(9)}
            distributed(state, tmp_path / "dcp")
            for each in (tmp_path / "dcp").iterdir():
                store.put(f"dcp/{each.name}", each.read_bytes())
        answered, honest, whole = 0, 10**9, fake_s3._Handler._answer

        def answer(handler: fake_s3._Handler) -> None:
            nonlocal answered
            answered += 1
            if answered <= honest:
                whole(handler)
                return
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        monkeypatch.setattr(fake_s3._Handler, "_answer", answer)
        assert verdict(url) == ("ok", set())
        for honest in sampled(range(answered), 4):
            answered = 0
            status, levels = verdict(url)
            assert (status, levels - {"not checked"}) == ("not checked", set()), honest


def test_the_command(folder: Path, tmp_path: Path, command: Command) -> None:
    """``verify`` ends with exit status 4 if a checkpoint is not checked. Its lines and its JSON contain that level. If
    another checkpoint is damaged, the exit status is 1.
    """
    whole = (folder / "zip.pt").read_bytes()
    at = whole.index(b"data/1") + 500
    (tmp_path / "bad.pt").write_bytes(whole[:at] + DAMAGE + whole[at + 8 :])
    with serving({"a.pt": whole}, lie=FAULTS["503"], honest=2) as server:
        url = server.url("a.pt")
        said = command("verify", url, status=4, out=("not checked: ", f"not checked: {url}: "))
        assert "damaged" not in said.out and "failed" not in said.out
        server.seen.clear()
        found = command.json("verify", url, status=4)
        assert (found["ok"], found["status"]) == (False, "not checked")
        assert {each["level"] for each in found["findings"]} - {"note"} == {"not checked"}
        server.seen.clear()
        command("verify", url, folder / "zip.pt", status=4, out="2 checkpoints: 1 ok, 0 failed, 1 not checked")
        server.seen.clear()
        command("verify", url, tmp_path / "bad.pt", status=1, out="2 checkpoints: 0 ok, 1 failed, 1 not checked")
        server.honest = 0
        assert command.json("verify", url, status=4)["status"] == "not checked"
    assert command.json("verify", tmp_path / "bad.pt", status=1)["status"] == "failed"
    assert command.json("verify", folder / "zip.pt")["status"] == "ok"
    command("verify", tmp_path / "none.pt", status=1)
    command("verify", folder / "zip.pt", "--expect-sha256", "0" * 64, status=1, out="damaged: ")


def test_damage_stays_damage(folder: Path, tmp_path: Path) -> None:
    """A record with a wrong checksum makes the status 'failed', even if other records cannot be read."""
    whole = (folder / "zip.pt").read_bytes()
    at = whole.index(b"data/0") + 500
    with serving({"a.pt": whole[:at] + DAMAGE + whole[at + 8 :]}) as server:
        ckptconv.verify(server.url("a.pt"))
        requests = len(server.seen)
        server.lie, server.honest = FAULTS["503"], requests - 1
        server.seen.clear()
        status, levels = verdict(server.url("a.pt"))
    assert (status, levels) == ("failed", {"damaged", "not checked"})


def test_a_disk_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a read of a local file or a file object and all reads after it fail, the status is 'not checked'."""
    pread, done, honest = os.pread, 0, 10**9

    def failing(fd: int, length: int, offset: int) -> bytes:
        nonlocal done
        done += 1
        if done > honest:
            raise OSError(5, "Input/output error")
        return pread(fd, length, offset)

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return failing_read(super().read, size)

    def failing_read(read: Callable[[int | None], bytes], size: int | None) -> bytes:
        nonlocal done
        done += 1
        if done > honest:
            raise OSError(5, "Input/output error")
        return read(size)

    def levels_of(given: Path | Failing) -> set[str]:
        try:
            found = ckptconv.verify(given)
        except CkptconvError as error:
            return {status_of(error)}
        return {found.status, *(each.level for each in found.findings)} - {"note"}

    monkeypatch.setattr(os, "pread", failing)
    monkeypatch.delattr(os, "preadv", raising=False)
    for make in (lambda: folder / "zip.pt", lambda: Failing((folder / "zip.pt").read_bytes())):
        done, honest = 0, 10**9
        assert levels_of(make()) == {"ok"}
        for honest in range(2, done):
            done = 0
            levels = levels_of(make())
            # Threads that read the records divide them differently in each run, so a run may need fewer reads.
            assert levels == ({"not checked"} if done > honest else {"ok"}), honest


def test_a_file_that_is_being_changed(folder: Path) -> None:
    """A file that another process changes in place is not checked, as a single file and as a shard of a set."""
    shard = next(folder.glob("set/*-00002-*"))
    for path, given in ((folder / "zip.pt", folder / "zip.pt"), (shard, shard.parent)):
        with open_locked(path):
            status, levels = verdict(str(given))
        assert status == "not checked" and levels <= {"not checked"}


def test_json_is_the_libraries(folder: Path, command: Command) -> None:
    """The JSON of the command and the library's ``as_dict`` are equal, including ``status``."""
    assert json.loads(json.dumps(ckptconv.verify(folder / "zip.pt").as_dict())) == command.json(
        "verify", folder / "zip.pt"
    )
