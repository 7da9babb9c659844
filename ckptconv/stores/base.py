"""The interface of a store: checking, planning and writing outputs, and opening files as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import CkptconvError, OutputError
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass

if TYPE_CHECKING:
    from ckptconv.byteranges.spans import OutFile, Overflow, Progress
    from ckptconv.output.files import Steps
    from ckptconv.output.folders import NewFolder, OtherFile


#: What is wrong where two write to one folder, and what to do.
ANOTHER = "another process has written to this folder meanwhile"
AGAIN = "convert it again when no other process writes there"

#: Deletes the file at a path if it has this ETag, or whatever is there where that is None; says whether it had.
_Delete: TypeAlias = Callable[[Path, "str | None"], bool]


def hint_to_replace() -> str:
    """Return what to do about an output that exists."""
    return option("force") + " replaces it"


@dataclass(frozen=True)
class OldSet:
    """The files of an old set that are deleted when a new set appears in its remote folder.

    No index may name files of two sets. So the old index is deleted first if a new shard has the name of an old shard.
    Otherwise it stays until the new index replaces it, and the old shards are deleted afterwards.

    Attributes:
        first: The files that are deleted before any new file appears.
        last: The files that are deleted after all new files have appeared.
        etags: The ETags of all files that are deleted or replaced, as they were listed before anything was written;
            None if the store lists none. A file with another ETag is somebody else's, and is not deleted.
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
        """Yield a function that deletes the `first`, and raises OutputError if a file is not the one that was listed.

        An OutputError that leaves the ``with`` after that says that they are gone.
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
        """Delete the `last` that are the files that were listed.

        Raises OutputError, which says that the new set is there.
        """
        try:
            for path in self.last:
                delete(path, self.etags[path])
        except OutputError as error:
            what = f"the new set is there, but not all of the old one could be deleted: {error}"
            raise OutputError(what, where=path) from error


NO_OLD_SET = OldSet()


class Placement(NamedTuple):
    """How planned files get to their store.

    Attributes:
        files: The files, as they will be written.
        work: The length of a progress bar: bytes that are written, and read back from the store.
        notes: Notes on what writing takes.
        old: The files of an old set in a remote folder that are deleted.
    """

    files: tuple[OutFile, ...]
    work: int
    notes: tuple[str, ...] = ()
    old: OldSet = NO_OLD_SET


class Store:
    """A place that files are read from and written to. All paths are paths in this store.

    Attributes:
        has_folders: Whether files are in folders, which have to be made, and which can have modes and links.
        can_write: Whether files can be written.
    """

    has_folders = False
    can_write = True

    def open(self, path: Path) -> Readable:
        """Open the file `path`, without a lock and whatever it is. Raises InputError."""
        raise NotImplementedError

    def exists(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether there is a file at `path`, or if `is_folder` a folder that is not empty."""
        raise NotImplementedError

    def check_target(self, path: Path, *, replace: bool) -> None:
        """Raise TargetExistsError, or another CkptconvError, unless a file can be written to `path`.

        Args:
            path: The path of the file.
            replace: Whether an existing file may be replaced.
        """
        raise NotImplementedError

    def scratch(self, path: Path) -> Path:
        """Return a local folder for temporary files while `path` is written."""
        raise NotImplementedError

    def others_in(
        self, folder: Path, target: Path, taken: Collection[str], *, deep: bool
    ) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
        """Return what is in `folder` besides the files `taken`, and what of that cannot be copied, with the reasons.

        Args:
            folder: The folder.
            target: The folder that the files are copied to, in any store.
            taken: Paths from `folder`.
            deep: Whether to include the folders below.
        """
        raise NotImplementedError

    def place(self, new: NewFolder, *, replace: bool, verify: bool) -> Placement:
        """Plan how `new` is written. Nothing is changed.

        Raises TargetExistsError if remote files are in the way and `replace` is False.
        """
        raise NotImplementedError

    def writing(
        self,
        new: NewFolder,
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        jobs: int = 1,
        progress: Progress | None = None,
        old: OldSet = NO_OLD_SET,
    ) -> Steps[Overflow]:
        """Write `new`, whose ranges come from `source`, in steps. Return what overflowed.

        A file appears whole or not at all, and so do the files of a set.

        Args:
            new: The planned files.
            source: The source. An error is raised if it changes meanwhile.
            replace: Whether existing files may be replaced.
            verify: Whether to read all files back and compare them.
            jobs: The number of threads that write files.
            progress: Is called with each number of bytes written.
            old: As :meth:`place` has returned it.
        """
        raise NotImplementedError
