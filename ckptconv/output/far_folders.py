"""A far folder to which a set goes: what of an older one is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ckptconv.byteranges.sources import list_folder
from ckptconv.byteranges.spans import OutFile
from ckptconv.errors import MissingInputError, TargetExistsError, some
from ckptconv.hints import option

__all__ = ["REPLACES", "old_files"]

REPLACES = option("force") + " replaces it"


def old_files(files: Sequence[OutFile], may_go: Callable[[str], bool] | None, *, replace: bool) -> dict[str, Path]:
    """What goes from the folder where `files` are a set, by its name: what has a name of theirs, and what `may_go`.

    Without `may_go` they are no set. Raises TargetExistsError where there is something and they do not `replace` it.
    """
    folder, names = files[-1].path.parent, {file.path.name for file in files}
    if may_go is None:
        return {}
    try:
        there = list_folder(folder)[1]
    except MissingInputError:
        return {}
    old = {name: folder / name for name in there if name in names or may_go(name)}
    if old and not replace:
        raise TargetExistsError(f"the output exists: {some(sorted(old))}", where=folder, hint=REPLACES)
    return old
