"""Servers that lie, each in one way: one typed error, nothing written, and an end in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import errors
from ckptconv.stores.requests import POLICY
from tests.support.hostile_bytes import saved
from tests.support.http_server import LIES, SLOW_DOWNLOADS, Exchange, serving

pytest.importorskip("urllib3", reason="the extra remote is not installed")

_DEADLINE, _MORE = 0.6, 6.0  # seconds; the latter for a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for minutes; what is sent in one part has several."""
    for name, value in {"deadline": _DEADLINE, "silence": 0.3, "backoff": 0.01, "attempts": 3}.items():
        monkeypatch.setattr(POLICY, name, value)
    monkeypatch.setattr("ckptconv.stores.requests._GRACE", 0.2)
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
