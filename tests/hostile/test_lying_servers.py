"""Servers that lie, each in one way: one typed error, nothing written, and an end in time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import errors
from ckptconv.byteranges.far.planning import POLICY
from tests.support.hostile_bytes import saved
from tests.support.http_server import LIES, serving

pytest.importorskip("urllib3", reason="the extra remote is not installed")

_DEADLINE, _MORE = 0.6, 6.0  # seconds; the latter for a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for minutes; what is sent in one part has several."""
    for name, value in {"deadline": _DEADLINE, "silence": 0.3, "backoff": 0.01, "attempts": 3}.items():
        monkeypatch.setattr(POLICY, name, value)
    monkeypatch.setattr("ckptconv.byteranges.far.workers._GRACE", 0.2)
    monkeypatch.setattr(POLICY, "window", 4096)


@pytest.fixture(scope="module")
def data() -> bytes:
    """A checkpoint that takes several requests: of four storages, and larger than their window."""
    return saved({f"layer.{i}": torch.arange(6000.0) for i in range(4)})


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
    changed = (errors.InputChangedError,) if honest else ()
    assert isinstance(caught.value, (getattr(errors, kind), *changed))
    assert server.url("a.pt") in str(caught.value)
    assert not [*out.iterdir()]
    assert seconds < _DEADLINE + _MORE
