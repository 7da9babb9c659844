"""The command ``ckptconv``, run in this process, with its exit status and its output."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from ckptconv.cli.main import main
from tests.support.schemas import check

__all__ = ["Command", "Said", "in_one_line"]


class Said(NamedTuple):
    """The standard output and the standard error of a command."""

    out: str
    err: str


class Command:
    """A runner of command lines that begin with the same words. The fixture `command` is one without such words."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: str) -> None:
        self._capsys = capsys
        self._first = first

    def of(self, *first: str) -> Command:
        """Return a `Command` whose lines begin with these words."""
        return Command(self._capsys, *first)

    def __call__(
        self, *words: object, status: int = 0, out: str | tuple[str, ...] = (), err: str | tuple[str, ...] = ()
    ) -> Said:
        """Run the command with `words` and return its output.

        Fail unless it ends with `status`, and its standard output and error contain `out` and `err`, each a text or
        several. `err` may also be the error in one line, like ``str(error)``.
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
        """Run the command with `words` and ``--json``, and return the parsed output. ``NaN`` and ``Infinity`` are not
        valid JSON.
        """
        return json.loads(self(*words, "--json", status=status).out, parse_constant=_no_json)


def in_one_line(err: str) -> str:
    """Return the printed errors in the form of ``str(error)``, with each hint after its verdict."""
    return re.sub(r"\n {2,}", "; ", re.sub(r":\n {4,}", ": ", err))


def _no_json(literal: str) -> None:
    raise AssertionError(literal)
