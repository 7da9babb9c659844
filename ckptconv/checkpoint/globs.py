"""Globs on the names and paths of tensors: ``--include``, ``--exclude``, ``--dtype GLOB=D``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ckptconv.errors import printable


def matches(glob: str, path: str, name: str | None) -> bool:
    """Whether `glob` means the tensor at `path`: by its path if `glob` has a slash or the tensor no `name`, else by its
    name.

    ``./w`` is the path of what stands at the root. ``*`` crosses dots and slashes.
    """
    if "/" in glob or name is None:
        return fnmatchcase(path, glob) or fnmatchcase("./" + path, glob)
    return fnmatchcase(name, glob)


def glob_of(path: str, name: str | None) -> str:
    """The glob that means the tensor at `path` and, as far as globs can tell, no other."""
    literal = path if "/" in path or name is None else name
    return "".join(f"[{c}]" if c in "*?[" else c if c == printable(c) else "?" for c in literal)
