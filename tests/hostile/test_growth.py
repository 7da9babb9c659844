"""What commands do grows with the pickle, whatever its nodes share: each question is asked of a node once, not once for
each path to it. Calls are counted, not seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptconv
from ckptconv.checkpoint import dangerous_calls
from ckptconv.errors import CkptconvError
from ckptconv.inspection.comparison import sides
from ckptconv.pickles.machine import PickleMachine
from tests.fuzz.budgets import SHAPES, file_of

OPCODES = 1000, 4000
#: Something that many nodes have.
SHARED = [shape for shape in SHAPES if shape.startswith("a ") and "wide" not in shape]


def diff_with_copy(path: Path) -> object:
    copy = path.with_name("copy.pt")
    copy.write_bytes(path.read_bytes())
    return ckptconv.diff(path, copy)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "inspect": ckptconv.inspect,
    "verify": ckptconv.verify,
    "diff": diff_with_copy,
}


def calls_of(run: Callable[[Path], object], path: Path) -> int:
    """How many functions `run` calls, those in C among them, and how often generators go on."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run(path)
    except CkptconvError:
        pass
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("shape", "command"),
    [
        *((shape, command) for shape in SHARED for command in ("inspect", "diff")),
        *((shape, "verify") for shape in ("calls of calls", "getattr as an argument")),
    ],
)
def test_work_grows_with_the_pickle(shape: str, command: str, tmp_path: Path) -> None:
    """Four times as much of a shape takes at most six times as many calls; what is quadratic takes sixteen."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of("None", 10)[0])
    calls_of(COMMANDS[command], path)  # what is imported when it is first needed
    calls = []
    for opcodes in OPCODES:
        path.write_bytes(file_of(shape, opcodes)[0])
        calls.append(calls_of(COMMANDS[command], path))
    assert calls[1] < 6 * calls[0]


def test_integers_of_one_hash() -> None:
    """Multiples of 2^61 - 1 have one hash: as slots of the memo, and as keys that are paired, they get others."""
    numbers = [i * ((1 << 61) - 1) for i in range(1, 100)]
    machine = PickleMachine.__new__(PickleMachine)
    machine.memo, machine.stack = {}, [None]
    for number in numbers:
        machine.put(number)
    assert len({hash(slot) for slot in machine.memo}) == len({hash(sides._atom(number)) for number in numbers}) == 99


def test_a_chain_of_attributes() -> None:
    """The name of what is fetched from what is fetched, and so on, is no longer than its bound."""
    meaning: dangerous_calls._Meaning = dangerous_calls._Ref("m", "f")
    for _ in range(50):
        meaning = dangerous_calls._attribute(meaning, "a" * 900)
    assert isinstance(meaning, dangerous_calls._Ref) and len(meaning.name) < 2000


def test_a_getter_is_nothing_else() -> None:
    """What is known of values is compared by value: what looks ``m.f`` up must not stand for what calling it gives."""
    function = dangerous_calls._Ref("m", "f")
    made = [dangerous_calls._Made(function, of_class) for of_class in (False, True)]
    assert not {function, *made} & {dangerous_calls._Getter(calls, ("m", "f")) for calls in (False, True)}
