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


#: The message and the hint of the error if another process writes to the same folder.
ANOTHER = "another process has written to this folder meanwhile"
AGAIN = "convert it again when no other process writes there"

#: Deletes the file at a path if it has this ETag or the ETag is None. Returns whether it was deleted.
_Delete: TypeAlias = Callable[[Path, "str | None"], bool]


def hint_to_replace() -> str:
    """Return the hint for an output that exists: ``--force`` replaces it."""
    return option("force") + " replaces it"


@dataclass(frozen=True)
class OldSet:
    """The files of an old sharded set that are deleted when a new set is written to its remote folder.

    At no time may an index refer to shards of two sets. If a new shard has the name of an old shard, the old index is
    deleted first. Otherwise the old index stays until the new index replaces it, and the old shards are deleted
    afterwards.

    Attributes:
        first: The files to delete before any new file appears.
        last: The files to delete after all new files have appeared.
        etags: The ETags of all files to delete or replace, as they were listed before anything was written. None if the
            store lists no ETags. A file with another ETag was written by another process, and is not deleted.
    """

    first: tuple[Path, ...] = ()
    last: tuple[Path, ...] = ()
    etags: Mapping[Path, str | None] = field(default_factory=dict)

    @property
    def about(self) -> tuple[str, ...]:
        """Notes on the states of the folder that other readers can see while it is written."""
        if not self.first:
            return ()
        return (
            "new shards have the names of old ones, so the old index is deleted before they appear and the new index"
            " appears last; in between the folder has no index, and the old set cannot be restored",
        )

    @contextlib.contextmanager
    def leaving(self, delete: _Delete) -> Iterator[Callable[[], None]]:
        """Yield a function that deletes the files in `first`.

        It raises OutputError if a file is not the one that was listed. If the ``with`` block raises an OutputError
        after deletions, the hint of the error says that the old index is gone. `delete` deletes one file.
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
        """Delete the files in `last` that are still those that were listed. `delete` deletes one file.

        Raises OutputError, which says that the new set is complete.
        """
        try:
            for path in self.last:
                delete(path, self.etags[path])
        except OutputError as error:
            what = f"the new set is there, but not all of the old one could be deleted: {error}"
            raise OutputError(what, where=path) from error


NO_OLD_SET = OldSet()


class Placement(NamedTuple):
    """The plan for writing files to their store.

    Attributes:
        files: The files, as they will be written.
        work: The total of a progress bar: the bytes that are written, and those that are read back from the store.
        notes: Notes on the cost of writing.
        old: The files of an old set in a remote folder that are deleted.
    """

    files: tuple[OutFile, ...]
    work: int
    notes: tuple[str, ...] = ()
    old: OldSet = NO_OLD_SET


class Store:
    """The interface of a place where files are read and written. All paths are paths in this store.

    Attributes:
        has_folders: Whether folders must be created, and files can have modes and links.
    """

    has_folders = False

    def open(self, path: Path) -> Readable:
        """Open the file `path` for reading, without a lock and without a check of its format. Raises InputError."""
        raise NotImplementedError

    def exists(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether there is a file at `path`.

        If `is_folder` is true, return whether there is a folder that is not empty.
        """
        raise NotImplementedError

    def check_target(self, path: Path, *, replace: bool) -> None:
        """Raise TargetExistsError, or another CkptconvError, unless a file can be written to `path`.

        Args:
            path: The path of the file.
            replace: Whether an existing file may be replaced.
        """
        raise NotImplementedError

    def scratch(self, path: Path) -> Path:
        """Return a local folder for the temporary files that are needed while `path` is written."""
        raise NotImplementedError

    def others_in(
        self, folder: Path, target: Path, taken: Collection[str], *, deep: bool
    ) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
        """Return the files in `folder` that are not in `taken`, and those that cannot be copied, with the errors.

        Args:
            folder: The folder.
            target: The folder to which the files are copied, in any store.
            taken: Paths relative to `folder`.
            deep: Whether to include subfolders.
        """
        raise NotImplementedError

    def place(self, new: NewFolder, *, replace: bool, verify: bool) -> Placement:
        """Plan how `new` is written. Nothing is changed.

        Args:
            new: The planned files.
            replace: Whether existing files may be replaced. If not, TargetExistsError is raised for remote files.
            verify: Whether the output will be read back.
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
        """Write `new`, whose ranges come from `source`, in steps.

        Return the numbers that overflowed in casts, by tensor. Every file becomes visible completely or not at all. The
        same is true of a set of files.

        Args:
            new: The planned files.
            source: The source. An error is raised if it changes meanwhile.
            replace: Whether existing files may be replaced.
            verify: Whether to read all files back and compare them.
            jobs: The number of threads that write files.
            progress: A function that is called with numbers of bytes written.
            old: The old set that :meth:`place` returned.
        """
        raise NotImplementedError
