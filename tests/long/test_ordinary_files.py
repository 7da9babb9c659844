"""Ordinary safetensors files are never refused. 100,000 generated files have one reading."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from ckptconv.byteranges.sources import BytesSource
from ckptconv.errors import MalformedError
from ckptconv.formats import safetensors
from ckptconv.formats.two_readings import refuse_two_readings
from tests.support.polyglots import ordinary_safetensors

_COUNT = int(os.environ.get("CKPTCONV_ORDINARY", 100_000))


def test_ordinary_safetensors_have_one_reading() -> None:
    """No generated safetensors file is refused for a second reading."""
    random = Random(20)
    refused = []
    for i in range(_COUNT):
        data = ordinary_safetensors(random)
        try:
            refuse_two_readings(BytesSource(data, Path(f"file {i}")), safetensors.NAME)
        except MalformedError as error:
            refused.append((str(error), data[:200]))
    assert not refused
