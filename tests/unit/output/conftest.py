"""A source for the tests of writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptconv.byteranges.sources import Source


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """Yield a source of slightly more than five blocks, all different."""
    path = tmp_path / "src"
    path.write_bytes(b"".join(i.to_bytes(3, "big") for i in range(7000)))
    with Source(path) as source:
        yield source
