"""The worst shapes of pickles, a million opcodes each: what the graph of one takes in memory is bounded, and what we
refuse we refuse with an error of ours; and what whole commands take grows no faster than the pickle.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.budgets import COMMANDS, EACH, FLOOR, SHAPES, file_of, measured, opcodes_for

OPCODES = 1_000_000
#: What a command may take for a file of so many bytes, or ``diff`` for two. The most that was measured, on a busy
#: machine, was 23 s and 802 MB.
NBYTES, SECONDS, MEMORY = 1_800_000, 30.0, 1_000_000_000


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_a_graph(shape: str, tmp_path: Path) -> None:
    """A process that parses it grows by at most 64 MB and 300 bytes for each opcode."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, OPCODES)[0])
    cost = measured("parse", path)
    assert cost.came == "done" and cost.memory < FLOOR + EACH * OPCODES


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_growth(shape: str, command: str, tmp_path: Path) -> None:
    """Eight times as much of it takes at most sixteen times as long: no command is quadratic in any shape."""
    seconds = []
    for opcodes in (25_000, 200_000):
        path = tmp_path / f"{opcodes}" / "a.pt"
        path.parent.mkdir()
        path.write_bytes(file_of(shape, opcodes)[0])
        seconds.append(measured(command, path).seconds)
    assert seconds[1] < 16 * max(seconds[0], 0.05)


@pytest.mark.parametrize("command", COMMANDS[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_small_file_can_cost(shape: str, command: str, tmp_path: Path) -> None:
    """A file of 1.8 MB is done or refused within the bound that its size gives."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, opcodes_for(shape, NBYTES))[0])
    cost = measured(command, path)
    assert cost.seconds < SECONDS and cost.memory < MEMORY
