"""What stands where far outputs go: a file in the way, and an older set, with the order in which that leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckptconv.byteranges.sources import list_folder
from ckptconv.byteranges.spans import OutFile
from ckptconv.errors import MissingInputError, OutputError, TargetExistsError, some
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass

__all__ = ["NO_OLD_SET", "REPLACES", "OldSet", "old_set", "refuse_existing"]

REPLACES = option("force") + " replaces it"


def refuse_existing(path: Path, exists: Callable[[Path], bool], *, replace: bool) -> None:
    """Raise TargetExistsError where a file `exists` at `path`, unless it may be replaced."""
    if not replace and exists(path):
        raise TargetExistsError("the output exists", where=path, hint=REPLACES)


@dataclass(frozen=True)
class OldSet:
    """What leaves a far folder where a new set appears: `first`, before any new file does, and `last`, when all have.

    No index may name files of two sets. So the old one leaves first where a new shard has the name of an old shard.
    Elsewhere it stays until the new one takes its place, and the old shards leave behind it.
    """

    first: tuple[Path, ...] = ()
    last: tuple[Path, ...] = ()

    @property
    def about(self) -> tuple[str, ...]:
        """What a reader can see meanwhile."""
        if not self.first:
            return ()
        return (
            "new shards have names of old ones, so the old index goes before they appear; until the new one does, as"
            " the last, the folder has none, and there is no way back",
        )

    def tell(self, error: OutputError) -> None:
        """Have `error`, which came up after the first had left, say so."""
        if self.first:
            error.hint = "the old index is gone, and shards of both sets may be there: " + REPLACES


NO_OLD_SET = OldSet()


def old_set(folder: Path, files: Sequence[OutFile], may_go: Callable[[str], bool], *, replace: bool) -> OldSet:
    """What leaves `folder`, in which `files` will stand: the shards and indexes there that `may_go`, by their paths
    from the folder, but for those that the new ones replace.

    Raises TargetExistsError where there is something in the way and they do not `replace` it.
    """
    try:
        there = [*_below(folder)]
    except MissingInputError:
        return NO_OLD_SET
    new = {str(file.path.relative_to(folder)) for file in files}
    old = {name for name in there if may_go(name)}
    if not replace and (taken := sorted(old.union(new.intersection(there)))):
        raise TargetExistsError(f"the output exists: {some(taken)}", where=folder, hint=REPLACES)
    indexes = {name for name in old if name.endswith(".json")}
    first = indexes if (old - indexes) & new else set()
    last = [*sorted(indexes - first - new), *sorted(old - indexes - new)]
    return OldSet(tuple(folder / name for name in sorted(first)), tuple(folder / name for name in last))


def _below(folder: Path) -> Iterator[str]:
    """The files in `folder` and below, as paths from there."""
    folders, files = list_folder(folder)
    yield from files
    for name in folders:
        yield from (f"{name}/{below}" for below in _below(folder / name))
