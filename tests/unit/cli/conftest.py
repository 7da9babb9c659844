"""Fixtures for the tests of commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def ddp(tmp_path: Path, fixtures: Path) -> Path:
    """Return the path of a copy of the DataParallel fixture."""
    return Path(shutil.copy(fixtures / "dataparallel.pt", tmp_path / "ddp.pt"))
