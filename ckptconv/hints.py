"""The commands that errors tell people to type, quoted for a shell."""

from __future__ import annotations

import json
import os
import shlex

from ckptconv.errors import printable

__all__ = ["edit_flag", "escaped", "literal", "saved_by_torch", "shell"]


def shell(*words: str | os.PathLike[str]) -> str:
    """A command of these WORDS. A path that starts with a dash gets a folder, so that no program takes it for an option."""
    return " ".join(_quoted(word if isinstance(word, str) else _no_option(os.fspath(word))) for word in words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """A command that saves what the Python EXPRESSION gives, which needs MODULES beside torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return f"python -c {shlex.quote(program)}"


def literal(path: str | os.PathLike[str]) -> str:
    """PATH as Python writes it, in the quotation marks that leave a shell's alone."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def edit_flag(field: str, value: object) -> str:
    """The flag that says VALUE in a FIELD of :class:`~ckptconv.checkpoint.model.Edits`."""
    flag = "dtype" if field == "dtypes" else field.replace("_", "-")
    words = value if isinstance(value, tuple) else (value,)
    return f"--{flag} {shell(*map(str, words))}"


def _no_option(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path


def _quoted(word: str) -> str:
    """WORD for a shell; with what cannot be shown in the shell's own escapes, for a message would show it in others."""
    return shlex.quote(word) if printable(word) == word else f"$'{''.join(map(escaped, word))}'"


def escaped(character: str, *, ascii_only: bool = False) -> str:
    """CHARACTER as it stands between ``$'`` and ``'`` in a shell."""
    if printable(character) == character and character not in "\\'" and (character.isascii() or not ascii_only):
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
