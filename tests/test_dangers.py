"""What no checkpoint needs is found wherever a pickle names it, under Python 2's names too, and nothing else is called dangerous."""

from __future__ import annotations

import functools
import os
import pickle

import pytest

from ckptconv.dangers import dangerous_globals
from ckptconv.pickles import parse


def dangers(data: bytes) -> list[str]:
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    return sorted(dangerous_globals(graph))


class Runs:
    """Reduces to a call of whatever it is given."""

    def __init__(self, function: object) -> None:
        self.function = function

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.function, ("x",)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (eval, "builtins.eval"), (exec, "builtins.exec")]
)
def test_calls_are_found_in_every_protocol(protocol: int, function: object, name: str) -> None:
    """GLOBAL and STACK_GLOBAL, with names as Python 2 or 3 has them."""
    assert dangers(pickle.dumps([1, Runs(function)], protocol)) == [name]


def test_popped_calls_are_found() -> None:
    """A call whose result is thrown away is a call."""
    assert dangers(b"cos\nsystem\n(X\x01\x00\x00\x00xtR0N.") == ["os.system"]


def test_python_2_names_are_mapped() -> None:
    """Below protocol 3, commands is subprocess and __builtin__ is builtins; from 3 on they are what they say."""
    assert dangers(b"\x80\x02c__builtin__\neval\n.") == ["builtins.eval"]
    assert dangers(b"\x80\x04c__builtin__\neval\n.") == []


def test_names_by_computed_strings_are_found() -> None:
    """STACK_GLOBAL takes its names from the stack, whatever put them there."""
    assert dangers(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93N0.") == ["os.system"]
    assert dangers(b"\x80\x04(\x8c\x06system\x94\x8c\x02os\x94lh\x01h\x00\x93\x86.") == ["os.system"]


def test_dotted_names_are_found() -> None:
    """A qualified name leads through a dangerous module or function all the same."""
    assert dangers(b"\x80\x04\x8c\x02io\x8c\x0bopen.__call\x93.") == ["io.open.__call"]


def test_a_module_of_the_user_is_not_dangerous_for_its_name() -> None:
    """A package called code or trace can be anybody's; what attacks use of those of the standard library is named exactly."""
    assert dangers(b"\x80\x02ccode.models\nNet\n.") == []
    assert dangers(b"\x80\x02ccode\ninteract\n.") == ["code.interact"]


def test_what_pickle_itself_writes_is_not_dangerous() -> None:
    """getattr and functools.partial are how pickle writes bound methods and keyword arguments."""
    assert dangers(pickle.dumps([functools.partial(int, base=2), [].append], 2)) == []
