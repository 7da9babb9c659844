"""Errors: one printable line with what, where, expected, got and a hint. Their tree is the one in the docstring of the
module.
"""

from __future__ import annotations

import errno
import pickle
import re

import pytest

from ckptconv import errors
from ckptconv.errors import CkptconvError, printable


def test_one_line_contains_every_part_of_the_error() -> None:
    """The line contains what, where, expected, got and the hint. They are also attributes."""
    error = CkptconvError("it broke", where="a.pt", expected=1, got=2, hint="try b.pt")
    assert str(error) == "a.pt: it broke (expected 1, got 2); try b.pt"
    assert (error.what, error.where, error.expected, error.got, error.hint) == ("it broke", "a.pt", 1, 2, "try b.pt")
    assert str(CkptconvError("it broke")) == "it broke"


def test_line_is_printable() -> None:
    """Control characters, direction marks and unpaired surrogates are escaped. Letters of other scripts are kept."""
    assert printable("a\n\x1b[0m\u202e\ud800é漢") == "a\\n\\x1b[0m\\u202e\\ud800é漢"
    assert "\n" not in str(CkptconvError("a\nb", where="c\rd"))


def test_tree_is_the_one_in_the_docstring() -> None:
    """The drawing in the docstring contains all error classes, each one below its base."""
    above: dict[int, str] = {}
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│ ├└─]*)(\w+Error|DeviceUnavailable)\b", line)
        if match:
            depth = len(match[1]) // 4
            above[depth] = match[2]
            drawn[match[2]] = above[depth - 1] if depth else "Exception"
    defined = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and not name.startswith("_")}
    classes = {name: cls for name, cls in defined.items() if issubclass(cls, Exception)}
    assert drawn == {name: cls.__bases__[0].__name__ for name, cls in classes.items()}


def test_facts_are_short() -> None:
    """A long text is shortened. An integer with more digits than Python prints is described by its number of bits."""
    assert len(str(CkptconvError("it broke", got="x" * 70_000))) < 500
    assert str(CkptconvError("it broke", got=1 << 30_000)) == "it broke (got an integer of 30,001 bits)"


@pytest.mark.parametrize(
    ("kind", "python", "number"),
    [
        (errors.MissingInputError, FileNotFoundError, errno.ENOENT),
        (errors.TargetExistsError, FileExistsError, errno.EEXIST),
        (errors.ArgumentTypeError, TypeError, None),
        (errors.UsageError, ValueError, None),
    ],
)
def test_some_errors_are_also_errors_of_python(kind: type[CkptconvError], python: type, number: int | None) -> None:
    """Some errors are also errors of Python, with its number and path. They can be pickled for another process."""
    error = pickle.loads(pickle.dumps(kind("it broke", where="a.pt", hint="try b.pt")))
    assert type(error) is kind and isinstance(error, python)
    assert str(error) == "a.pt: it broke; try b.pt"
    assert (getattr(error, "errno", None), getattr(error, "filename", None)) == (number, number and "a.pt")
    if number:
        setattr(error, "filename", "b.pt")  # noqa: B010 - as what pickles errors with their tracebacks does
        assert str(error) == "b.pt: it broke; try b.pt"
