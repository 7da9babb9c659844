"""Commands and keywords that errors and notes suggest, quoted for a shell or for Python."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ckptconv.errors import CkptconvError, printable

__all__ = ["edit_flag", "for_python", "in_python", "literal", "saved_by_torch", "shell", "shell_escape"]

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


def shell(*words: str | os.PathLike[str]) -> str:
    """A command of these WORDS.

    A path that starts with a dash gets a folder, so that no program takes it for an option.
    """
    return " ".join(_quoted(word if isinstance(word, str) else _no_option(os.fspath(word))) for word in words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """A command that saves what the Python EXPRESSION gives, which needs MODULES beside torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return f"python -c {shlex.quote(program)}"


def literal(path: str | os.PathLike[str]) -> str:
    """PATH as Python writes it, in the quotation marks that leave a shell's alone."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def edit_flag(field: str, value: object) -> str:
    """The flag that says VALUE in a FIELD of :class:`~ckptconv.edits.options.Edits`."""
    flag = "dtype" if field == "dtypes" else field.replace("_", "-")
    words = value if isinstance(value, tuple) else (value,)
    return f"--{flag} {shell(*map(str, words))}"


def _no_option(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path


def _quoted(word: str) -> str:
    """WORD for a shell; with what cannot be shown in the shell's own escapes, for a message would show it in others."""
    return shlex.quote(word) if printable(word) == word else f"$'{''.join(map(shell_escape, word))}'"


def shell_escape(character: str, *, ascii_only: bool = False) -> str:
    """CHARACTER as it stands between ``$'`` and ``'`` in a shell."""
    if printable(character) == character and character not in "\\'" and (character.isascii() or not ascii_only):
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


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
