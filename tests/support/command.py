"""``ckptconv`` as its users type it, in this process: its exit status, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from ckptconv.cli.main import main
from tests.support.schemas import check

__all__ = ["Command", "Said", "in_one_line"]


class Said(NamedTuple):
    """What a command wrote to its standard output and to its standard error."""

    out: str
    err: str


class Command:
    """Runs command lines that begin with the same words. The fixture `command` is one, of none."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: str) -> None:
        self._capsys = capsys
        self._first = first

    def of(self, *first: str) -> Command:
        """The command that begins with these words."""
        return Command(self._capsys, *first)

    def __call__(
        self, *words: object, status: int = 0, out: str | tuple[str, ...] = (), err: str | tuple[str, ...] = ()
    ) -> Said:
        """Type `words`; what it wrote.

        It must end with `status`, and have `out` and `err`, a text or several, in its standard output and error. `err`
        may be that of an error in one line, as ``str(error)`` has it.
        """
        self._capsys.readouterr()
        ended = main([*self._first, *map(str, words)])
        said = Said(*self._capsys.readouterr())
        assert ended == status, (words, ended, said.err)
        for stream, texts in ((said.out, out), (said.err, err)):
            for text in (texts,) if isinstance(texts, str) else texts:
                assert text in stream or text in in_one_line(stream), (words, text, stream)
        typed = [*self._first, *map(str, words)]
        if "--json" in typed and status != 2:
            for line in said.out.splitlines():
                check(typed[0], json.loads(line))
        return said

    def json(self, *words: object, status: int = 0) -> Any:
        """Type `words` and ``--json``; what it prints, parsed. ``NaN`` and ``Infinity`` are no JSON."""
        return json.loads(self(*words, "--json", status=status).out, parse_constant=_no_json)


def in_one_line(err: str) -> str:
    """Errors as ``str(error)`` has them, of the lines that a command printed: each hint after its verdict."""
    return re.sub(r"\n {2,}", "; ", re.sub(r":\n {4,}", ": ", err))


def _no_json(literal: str) -> None:
    raise AssertionError(literal)
