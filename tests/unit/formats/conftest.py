"""Fixtures for the tests of formats: the paths of a checkpoint and of its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Return the path of the checkpoint that a test saves."""
    return tmp_path / "src.pt"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    """Return the path of the output."""
    return tmp_path / "dst.pt"


@pytest.fixture
def safe(tmp_path: Path) -> Path:
    """Return the path of an output in safetensors."""
    return tmp_path / "dst.safetensors"
