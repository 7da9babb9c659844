"""What already stands where a far output goes: a file in the way, or an old set, and the order of its deletion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from ckptconv.byteranges.spans import OutFile
from ckptconv.errors import MissingInputError, OutputError, TargetExistsError, some
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.output.folders import OtherFile

if TYPE_CHECKING:
    from ckptconv.stores.paths import FarPath

#: What is wrong where two write to one folder, and what to do.
ANOTHER = "somebody else has written to this folder meanwhile"
AGAIN = "when nobody else writes there, convert it again"

#: Deletes the file at a path if it has this ETag, or whatever is there where that is None; says whether it had.
_Delete: TypeAlias = Callable[[Path, "str | None"], bool]


def hint_to_replace() -> str:
    """Return what to do about an output that exists."""
    return option("force") + " replaces it"


def refuse_existing(path: Path, exists: Callable[[Path], bool], *, replace: bool) -> None:
    """Raise TargetExistsError where a file `exists` at `path`, unless it may be replaced."""
    if not replace and exists(path):
        raise TargetExistsError("the output exists", where=path, hint=hint_to_replace())


@dataclass(frozen=True)
class OldSet:
    """The files of an old set that are deleted when a new set appears in its far folder.

    `first` are deleted before any new file appears, `last` when all have appeared. `etags` are those of all that is
    deleted or replaced, as they were listed before anything was written; None where the store lists none. What has
    another one by then is somebody else's, and is not deleted.

    No index may name files of two sets. So the old index is deleted first if a new shard has the name of an old shard.
    Otherwise it stays until the new index replaces it, and the old shards are deleted afterwards.
    """

    first: tuple[Path, ...] = ()
    last: tuple[Path, ...] = ()
    etags: Mapping[Path, str | None] = field(default_factory=dict)

    @property
    def about(self) -> tuple[str, ...]:
        """Notes on what a reader can see meanwhile."""
        if not self.first:
            return ()
        return (
            "new shards have the names of old ones, so the old index is deleted before they appear and the new index"
            " appears last; in between the folder has no index, and the old set cannot be restored",
        )

    @contextlib.contextmanager
    def leaving(self, delete: _Delete) -> Iterator[Callable[[], None]]:
        """Give a function that deletes the `first`; it raises OutputError where one is not what was listed. An
        OutputError after its call says that they are gone.
        """
        gone: list[Path] = []

        def leave() -> None:
            for path in self.first:
                if not delete(path, self.etags[path]):
                    raise OutputError(ANOTHER, where=path, hint=AGAIN)
                gone.append(path)

        try:
            yield leave
        except OutputError as error:
            if gone:
                error.hint = "the old index is gone, and shards of both sets may be there: " + hint_to_replace()
            raise

    def leave_last(self, delete: _Delete) -> None:
        """Delete the `last`, as far as they are what was listed. Raises OutputError, which says that the new set is
        there.
        """
        try:
            for path in self.last:
                delete(path, self.etags[path])
        except OutputError as error:
            what = f"the new set is there, but not all of the old one could be deleted: {error}"
            raise OutputError(what, where=path) from error


NO_OLD_SET = OldSet()


def old_set(
    folder: Path, files: Sequence[OutFile | OtherFile], may_go: Callable[[str], bool], *, replace: bool
) -> OldSet:
    """The old set in `folder`, where `files` will stand: its shards and indexes, except those that new files replace.

    `may_go` says of a path from the folder whether it is one of them.

    Raises TargetExistsError where something is in the way and may not be replaced (`replace`).
    """
    try:
        there = cast("FarPath", folder).below()
    except MissingInputError:
        return NO_OLD_SET
    new = {str(file.path.relative_to(folder)) for file in files}
    old = {name for name in there if may_go(name)}
    taken = new & there.keys()
    if not replace and (old or taken):
        raise TargetExistsError(f"the output exists: {some(sorted(old | taken))}", where=folder, hint=hint_to_replace())
    indexes = {name for name in old if name.endswith(".json")}
    first = indexes if (old - indexes) & new else set()
    last = [*sorted(indexes - first - new), *sorted(old - indexes - new)]
    paths = {name: folder / name for name in old | taken}
    return OldSet(
        tuple(paths[name] for name in sorted(first)),
        tuple(paths[name] for name in last),
        {path: there[name].etag for name, path in paths.items()},
    )
