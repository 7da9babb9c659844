"""The store of local files. It uses :mod:`ckptconv.output`, which is imported when something is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.byteranges.sources import Readable, Source, list_local
from ckptconv.errors import CkptconvError
from ckptconv.stores.base import NO_OLD_SET, OldSet, Placement, Store

if TYPE_CHECKING:
    from ckptconv.byteranges.spans import Overflow, Progress
    from ckptconv.output.files import Steps
    from ckptconv.output.folders import NewFolder, OtherFile


class PosixStore(Store):
    """The store of local files."""

    has_folders = True

    def open(self, path: Path) -> Readable:
        """Open the file `path`. Raises InputError."""
        return Source(path)

    def exists(self, path: Path, *, is_folder: bool) -> bool:
        """Return whether there is anything at `path`. If `is_folder` is true, an empty folder does not count."""
        return any(list_local(path)) if is_folder and path.is_dir() else os.path.lexists(path)

    def check_target(self, path: Path, *, replace: bool) -> None:
        """Raise an error if a file cannot be written to `path`. See :func:`ckptconv.output.files.check_target`."""
        from ckptconv.output.files import check_target

        check_target(path, replace=replace)

    def scratch(self, path: Path) -> Path:
        """Return the folder of `path`, or `path` itself if it is a folder."""
        return path if path.is_dir() else path.parent

    def others_in(
        self, folder: Path, target: Path, taken: Collection[str], *, deep: bool
    ) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
        """Return the other files in `folder`, and those that cannot be copied.

        A link that leads out of the folder cannot be copied. See :meth:`Store.others_in`.
        """
        from ckptconv.output.folders import others_in

        return others_in(folder, target, taken, deep=deep, has_links=store_of(target).has_folders)

    def place(self, new: NewFolder, *, replace: bool, verify: bool) -> Placement:  # noqa: ARG002 - as elsewhere
        """Plan the writing of `new`, including which files bypass the page cache."""
        from ckptconv.output.direct_writes import planned_directly

        work = sum(each.size for each in new.entries)
        return Placement(planned_directly(tuple(new.files), new.target), work)

    def writing(
        self,
        new: NewFolder,
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        jobs: int = 1,
        progress: Progress | None = None,
        old: OldSet = NO_OLD_SET,  # noqa: ARG002 - an old folder is replaced at once
    ) -> Steps[Overflow]:
        """Write a file or a folder, completely or not at all. See :meth:`Store.writing`."""
        from ckptconv.output.files import writing
        from ckptconv.output.folders import write_folder

        if new.is_folder:
            return write_folder(new, source, replace=replace, verify=verify, jobs=jobs, progress=progress)
        return (yield from writing(new.files[0], source, replace=replace, verify=verify, progress=progress))


POSIX = PosixStore()


def store_of(path: Path, *, writing: bool = False) -> Store:
    """Return the store of `path`, a result of :func:`ckptconv.stores.locate`.

    Raises UsageError if a package that the store needs is not installed. With `writing`, the error says that the
    package is needed for writing.
    """
    find: Callable[[bool], Store] | None = getattr(path, "find_store", None)
    return find(writing) if find else POSIX
