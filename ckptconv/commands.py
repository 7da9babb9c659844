"""The commands that errors tell people to type, quoted for a shell."""

from __future__ import annotations

import json
import os
import shlex

__all__ = ["literal", "saved_by_torch", "shell"]


def shell(*words: str | os.PathLike[str]) -> str:
    """A command of these WORDS. A path that starts with a dash gets a folder, so that no program takes it for an option."""
    return " ".join(shlex.quote(word if isinstance(word, str) else _no_option(os.fspath(word))) for word in words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """A command that saves what the Python EXPRESSION gives, which needs MODULES beside torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return f"python -c {shlex.quote(program)}"


def literal(path: str | os.PathLike[str]) -> str:
    """PATH as Python writes it, in the quotation marks that leave a shell's alone."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def _no_option(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path
