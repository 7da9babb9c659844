"""The worst shapes of pickles, with a million opcodes each. The memory for a graph is bounded, and the time of a
command grows no faster than the pickle.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.budgets import COMMANDS, EACH, FLOOR, SHAPES, file_of, measured, opcodes_for

OPCODES = 1_000_000
#: The bounds of a command for a file of this size, or of ``diff`` for two such files. The measured maximum, on a busy
#: machine, was 23 s and 802 MB.
NBYTES, SECONDS, MEMORY = 1_800_000, 30.0, 1_000_000_000


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_a_graph(shape: str, tmp_path: Path) -> None:
    """A process that parses a shape grows by less than 64 MB and 300 bytes for each opcode."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, OPCODES)[0])
    cost = measured("parse", path)
    assert cost.came == "done" and cost.memory < FLOOR + EACH * OPCODES


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_growth(shape: str, command: str, tmp_path: Path) -> None:
    """A shape of eight times the size takes less than sixteen times as long, so no command is quadratic in any
    shape.
    """
    seconds = []
    for opcodes in (25_000, 200_000):
        path = tmp_path / f"{opcodes}" / "a.pt"
        path.parent.mkdir()
        path.write_bytes(file_of(shape, opcodes)[0])
        seconds.append(measured(command, path).seconds)
    assert seconds[1] < 16 * max(seconds[0], 0.05)


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_cost_of_a_small_file(shape: str, command: str, tmp_path: Path) -> None:
    """A file of 1.8 MB is processed or refused within the bounds for its size."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, opcodes_for(shape, NBYTES))[0])
    cost = measured(command, path)
    assert cost.seconds < SECONDS and cost.memory < MEMORY
