"""A fixture that returns the detected contents of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.state_dicts import Detected
from ckptconv.formats import opening


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return a function that saves an object with torch and returns its detected contents."""

    def detected_in(obj: object) -> Detected:
        torch.save(obj, tmp_path / "x.pt")
        with Source(tmp_path / "x.pt") as source:
            return opening.read(source).detected

    return detected_in
