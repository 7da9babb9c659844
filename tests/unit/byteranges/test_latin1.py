"""Tests of bytes that are stored as a text with one character for each byte, and that are read by position."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ckptconv.byteranges import reading
from ckptconv.byteranges.reading import Latin1Text
from ckptconv.byteranges.sources import BytesSource
from ckptconv.byteranges.spans import ByteRange
from ckptconv.errors import MalformedError


def said(text: bytes, before: bytes = b"") -> Latin1Text:
    """Return the bytes that `text` represents, in a file in which `before` precedes it."""
    return Latin1Text(ByteRange(BytesSource(before + text, Path("a.pt")), len(before), len(text)))


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64])
def test_all_ranges_can_be_read(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Each range of the bytes can be read, also if a step ends within a character."""
    monkeypatch.setattr(reading, "_STEP", step)
    chance = random.Random(step)
    data = bytes(chance.choice((chance.randrange(128), chance.randrange(256))) for _ in range(200))
    text = said(data.decode("latin-1").encode(), os.urandom(5))
    assert text.size == 200
    for _ in range(300):
        start, stop = sorted(chance.choices(range(201), k=2))
        assert text.read(start, stop - start) == data[start:stop]
        buffer = bytearray(stop - start)
        text.read_into(start, memoryview(buffer))
        assert buffer == data[start:stop]


@pytest.mark.parametrize("text", ["aĀ".encode(), "\U0001f600".encode(), b"a\xff", b"\x80", b"a\xc3"])
def test_text_that_represents_no_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Characters above 255 and invalid UTF-8 are refused, for all sizes of steps."""
    for step in (1, 2, 100):
        monkeypatch.setattr(reading, "_STEP", step)
        with pytest.raises(MalformedError, match=r"^a\.pt: a text that encodes bytes has characters"):
            said(text)


def test_empty_text() -> None:
    """An empty text represents no bytes."""
    assert said(b"").size == 0
    assert said(b"").read(0, 0) == b""
