"""Where the tests of formats save a checkpoint, and what they convert it to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """The path of a checkpoint that a test saves."""
    return tmp_path / "src.pt"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """The path of what it is converted to."""
    return tmp_path / "dst.pt"


@pytest.fixture
def safe(tmp_path: Path) -> Path:
    """The path of a safetensors file that it is converted to."""
    return tmp_path / "dst.safetensors"
