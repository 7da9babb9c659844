"""The worst shapes of pickles, a million opcodes each: what the graph of one takes in memory is bounded, and what we
refuse we refuse with an error of ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.budgets import EACH, FLOOR, SHAPES, file_of, measured

OPCODES = 1_000_000


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_a_graph(shape: str, tmp_path: Path) -> None:
    """A process that parses it grows by at most 64 MB and 300 bytes for each opcode."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, OPCODES)[0])
    cost = measured("parse", path)
    assert cost.came == "done" and cost.memory < FLOOR + EACH * OPCODES
