"""Servers that lie, each in one way: one typed error, nothing written, and an end in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import errors
from ckptconv.stores.requests import POLICY
from tests.support import fake_s3
from tests.support.hostile_bytes import saved
from tests.support.http_server import LIES, SLOW_DOWNLOADS, Exchange, serving
from tests.support.seaweed import BUCKET

pytest.importorskip("urllib3", reason="the extra remote is not installed")

_DEADLINE, _MORE = 0.6, 6.0  # seconds; the latter for a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for minutes; what is sent in one part has several."""
    for name, value in {"deadline": _DEADLINE, "silence": 0.3, "backoff": 0.01, "attempts": 3}.items():
        monkeypatch.setattr(POLICY, name, value)
    monkeypatch.setattr("ckptconv.stores.remote._GRACE", 0.2)
    monkeypatch.setattr(POLICY, "window", 4096)


@pytest.fixture(scope="module")
def data() -> bytes:
    """A checkpoint that takes several requests: of four storages, and larger than their window."""
    return saved({f"layer.{i}": torch.arange(6000.0) for i in range(4)})


@pytest.mark.slow
@pytest.mark.parametrize("honest", [0, 1], ids=["at once", "after the first answer"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_a_typed_error(lie: str, honest: int, data: bytes, tmp_path: Path) -> None:
    """From the first answer on, or from the second: of the class that says what it is, and nothing is left behind."""
    tell, kind = LIES[lie]
    out = tmp_path / "out"
    out.mkdir()
    with serving({"a.pt": data}, lie=tell, honest=honest) as server:
        started = time.monotonic()
        with pytest.raises(ckptconv.errors.InputError) as caught:
            ckptconv.convert(server.url("a.pt"), out / "a.pt", map_location="cpu")
        seconds = time.monotonic() - started
    later = (errors.InputChangedError, errors.TransferError) if honest else ()
    assert isinstance(caught.value, (getattr(errors, kind), *later))
    assert server.url("a.pt") in str(caught.value)
    assert not [*out.iterdir()]
    assert seconds < _DEADLINE + _MORE


@pytest.mark.parametrize("lie", SLOW_DOWNLOADS)
def test_a_download_ends_in_time(lie: str, data: bytes, tmp_path: Path) -> None:
    """Wherever the server lets us wait: bytes that come now and then put no deadline off."""

    def answer(it: Exchange) -> None:
        if it.is_range:
            it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data)
        else:
            SLOW_DOWNLOADS[lie](it)

    with serving({"a.pt": data}, lie=answer) as server:
        started = time.monotonic()
        with pytest.raises(errors.TransferError, match=r"too slow|cut"):
            ckptconv.convert(server.url("a.pt"), tmp_path / "a.pt", download=True)
        assert time.monotonic() - started < _DEADLINE + _MORE
    assert not [*tmp_path.iterdir()]


def test_a_list_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's lists are asked for by whoever waits for them, without a thread that could be left."""

    def slowly(it: Exchange, files: dict[str, bytes], *, most: int) -> None:
        SLOW_DOWNLOADS["head"](it)

    with serving({}, lists=slowly) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
        started = time.monotonic()
        with pytest.raises(errors.TransferError, match="too slow"):
            ckptconv.inspect("hf://me/model/")
        assert time.monotonic() - started < _DEADLINE + _MORE


def _store(say: Callable[[BaseHTTPRequestHandler], None]) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        with contextlib.suppress(OSError):  # who is lied to may hang up
            say(handler)

    return answer


def _sent(head: str, unit: bytes, pause: float = 0.0) -> Callable[[BaseHTTPRequestHandler], None]:
    """Send `head`, and `unit` after it for some seconds."""

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 {head}".encode())
        ends = time.monotonic() + 2 * _MORE
        while unit and time.monotonic() < ends:
            handler.wfile.write(unit)
            time.sleep(pause)

    return say


#: What a store can answer to any request: the error in reading contains the text, unless an S3 client sees no body.
STORE_LIES = {
    "a body without an end": _sent("200 OK\r\n\r\n<ListBucketResult>", b" " * (1 << 20)),
    "an error without an end": _sent("403 no\r\n\r\n<Error>", b" " * (1 << 20)),
    "a slow body": _sent("200 OK\r\n\r\n<ListBucketResult>", b" ", 0.05),
    "a slow head": _sent("200 OK\r\n", b"X: y\r\n", 0.05),
    "one interim answer after another": _sent("100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "a redirect to itself": _sent("307 x\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", b""),
    "no fields": _sent("200 OK\r\nContent-Length: 4\r\n\r\n<X/>", b""),
    "a time that is none": _sent("200 OK\r\nLast-Modified: soon\r\nContent-Length: 0\r\n\r\n", b""),
}


@pytest.mark.parametrize("lie", STORE_LIES)
def test_a_store_that_lies(lie: str, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file, listing a folder and writing a file end in time with one typed error, and hold few bytes."""
    monkeypatch.setattr(POLICY, "patience", _DEADLINE)
    monkeypatch.setattr("ckptconv.stores.s3.PAGE", 4 << 20)
    monkeypatch.setattr(fake_s3._Handler, "_answer", _store(STORE_LIES[lie]))
    (tmp_path / "a.pt").write_bytes(data)
    steps: list[Callable[[], object]] = [
        lambda: ckptconv.inspect(f"s3://{BUCKET}/a.pt"),
        lambda: ckptconv.inspect(f"s3://{BUCKET}/run/"),
        lambda: ckptconv.convert(tmp_path / "a.pt", f"s3://{BUCKET}/b.pt", map_location="cpu"),
    ]
    with fake_s3.running_fake(tmp_path):
        for step in steps:
            started = time.monotonic()
            with pytest.raises((errors.InputError, errors.OutputError, errors.TargetExistsError)):
                step()
            assert time.monotonic() - started < 2 * _DEADLINE + _MORE


@pytest.mark.parametrize(
    "url",
    [
        "http://[/x.pt",
        "http://127.0.0.1:99999/x.pt",
        "http://127.0.0.1:\u00b2/x.pt",
        "http://127.0.0.1:1\\@127.0.0.1/x.pt",
        "https://127.0.0.1\\x.pt/",
        "http://127.0.0.1:80x/x.pt",
        "http://a b/x.pt",
        "http://a\nb/x.pt",
        "sftp://u:p/q@h/x.pt",
        "http://\u2100/x.pt",
    ],
)
def test_a_url_that_programs_read_differently(url: str) -> None:
    """A UsageError, before anybody is asked: for half an address, a port that is none, a backslash, a space."""
    with pytest.raises(errors.UsageError, match="without a valid host"):
        ckptconv.inspect(url)
