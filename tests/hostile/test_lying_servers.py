"""Servers that lie, each in one way. A command ends in time with one typed error and writes nothing."""

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

_DEADLINE, _MORE = 0.6, 6.0  # seconds; the second is a margin for a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set short timeouts, and a small window so that a file takes several requests."""
    for name, value in {"deadline": _DEADLINE, "silence": 0.3, "backoff": 0.01, "attempts": 3}.items():
        monkeypatch.setattr(POLICY, name, value)
    monkeypatch.setattr("ckptconv.stores.remote._GRACE", 0.2)
    monkeypatch.setattr(POLICY, "window", 4096)


@pytest.fixture(scope="module")
def data() -> bytes:
    """Return a checkpoint of four storages that are larger than the window, so that it takes several requests."""
    return saved({f"layer.{i}": torch.arange(6000.0) for i in range(4)})


@pytest.mark.slow
@pytest.mark.parametrize("honest", [0, 1], ids=["at once", "after the first answer"])
@pytest.mark.parametrize("lie", LIES)
def test_false_metadata_is_a_typed_error(lie: str, honest: int, data: bytes, tmp_path: Path) -> None:
    """A lie in the first or in a later response raises the typed error that describes the lie. The error names the URL,
    and no file is left.
    """
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
    """A download ends by its deadline even if the server sends a few bytes now and then, in any part of the
    response.
    """

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
    """Listing a repository of the Hub ends by its deadline if the server sends its headers slowly."""

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
        with contextlib.suppress(OSError):  # the client may close the connection
            say(handler)

    return answer


def _sent(head: str, unit: bytes, pause: float = 0.0) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return a function that sends `head`, and then `unit` again and again for some seconds."""

    def say(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(f"HTTP/1.1 {head}".encode())
        ends = time.monotonic() + 2 * _MORE
        while unit and time.monotonic() < ends:
            handler.wfile.write(unit)
            time.sleep(pause)

    return say


#: False responses of a store to any request.
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
def test_a_store_with_false_answers(lie: str, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a file, listing a folder and writing a file each end in time with one typed error."""
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
    """A URL without a valid host is a UsageError. Examples are half an address, an invalid port, a backslash and a
    space.
    """
    with pytest.raises(errors.UsageError, match="without a valid host"):
        ckptconv.inspect(url)
