"""Errors name flags, because most people meet them on the command line. Whoever calls from Python reads keywords instead."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptconv.errors import CkptconvError

__all__ = ["for_python", "in_python"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WORD = r"((?:'[^']*'|\"[^\"]*\"|\\.|[^\s;,)'\"\\])+)"
_SWITCHES = (
    "force",
    "state-dict",
    "allow-unsafe",
    "copy-tied",
    "copy-others",
    "skip-existing",
    "verify",
    "dry-run",
    "unwrap",
)
_VALUES = ("select", "include", "exclude", "strip-prefix", "add-prefix", "format")


def for_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """FUNCTION, whose errors speak of keywords."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except CkptconvError as error:
            error.what = in_python(error.what)
            error.hint = error.hint and in_python(error.hint)
            raise

    return called


def in_python(text: str) -> str:
    """TEXT with keywords of :func:`ckptconv.convert` in place of flags."""
    text = re.sub(rf"--({'|'.join(_SWITCHES)})(?![\w-])", lambda m: f"{_keyword(m[1])}=True", text)
    text = re.sub(rf"--({'|'.join(_VALUES)}) {_WORD}(?: --\1 {_WORD})*", _with_values, text)
    text = re.sub(r"--max-shard-size (\d\w*)", r"max_shard_size='\1'", text).replace(
        "--max-shard-size", "max_shard_size"
    )
    text = re.sub(rf"--rename {_WORD} {_WORD}", lambda m: f"rename=[({_literal(m[1])}, {_literal(m[2])})]", text)
    return re.sub(rf"--to {_WORD}", lambda m: f"map_location={_literal(m[1])}", text)


def _with_values(match: re.Match[str]) -> str:
    """One flag with its value, or the same flag several times."""
    values = [_literal(word) for word in re.findall(f"--{match[1]} {_WORD}", match[0])]
    return f"{_keyword(match[1])}={values[0] if len(values) == 1 else '[' + ', '.join(values) + ']'}"


def _keyword(flag: str) -> str:
    return flag.replace("-", "_")


def _literal(word: str) -> str:
    """WORD, quoted for a shell, as Python quotes it; a placeholder in capitals as it is."""
    if re.fullmatch("[A-Z]+", word):
        return word
    return repr("".join(shlex.split(word)))
