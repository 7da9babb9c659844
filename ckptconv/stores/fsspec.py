"""Read and write files on the filesystems of fsspec, except HTTP and S3.

A file is first written to a temporary file on this machine, and sent when it is complete. The filesystem must support
a move or a transaction, so that a file appears completely or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptconv.byteranges import reading
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.errors import (
    CkptconvError,
    MissingInputError,
    OutputError,
    TransferError,
    UnsupportedError,
    UsageError,
    size,
)
from ckptconv.stores.base import NO_OLD_SET, OldSet
from ckptconv.stores.remote import FarPath, far_path
from ckptconv.stores.requests import Answer, Entry, Transient, Version
from ckptconv.stores.uploads import WritableStore, digest, hint_if_replaced, read_back, written_here
from ckptconv.stores.urls import Secrets


class Location:
    """A file on a filesystem of fsspec: the filesystem `files`, and the `path` there."""

    def __init__(self, path: Path) -> None:
        """Find the filesystem of the URL `path`.

        Raises UsageError if fsspec does not know the scheme, or if a package is not installed.
        """
        url = far_path(path).url
        if url.scheme not in (*fsspec.registry, *fsspec.available_protocols()):
            raise UsageError(f"cannot be read: neither ckptconv nor fsspec knows {url.scheme}://", where=path)
        self.shown, self.secrets, self._scheme = path, Secrets(url), url.scheme
        who = f"{url.userinfo}@" if url.userinfo else ""
        text = f"{url.scheme}://{who}{url.shown.partition('://')[2]}" + (f"?{url.query}" if url.query else "")
        with self.as_error():
            self.files, self.path = fsspec.core.url_to_fs(text)

    def said(self, error: Exception) -> str:
        """Return the class and the text of `error`, with secrets hidden."""
        return self.secrets.hidden(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def as_error(self) -> Iterator[None]:
        """Turn every error of the filesystem into a CkptconvError without secrets."""
        with self.secrets.kept():
            try:
                yield
            except ImportError as error:
                raise UsageError(f"{self._scheme} needs a package: {self.said(error)}", where=self.shown) from error
            except FileNotFoundError as error:
                raise MissingInputError("cannot be read: no such file", where=self.shown) from error
            except CkptconvError:
                raise
            except Exception as error:
                raise TransferError(f"cannot be read: {self.said(error)}", where=self.shown) from error


class FsspecTransport(Location):
    """A reader of ranges of the file at a URL."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self.as_error():
            self._asked()

    def _asked(self) -> Version:
        said: dict[str, Any] = self.files.info(self.path)
        if said.get("type") == "directory":
            raise MissingInputError("cannot be read: no such file", where=self.shown)
        if not isinstance(said.get("size"), int):
            raise UnsupportedError("not a file with a known size", where=self.shown)
        modified = next((str(said[key]) for key in ("LastModified", "last_modified", "mtime") if key in said), None)
        etag = said.get("ETag") or said.get("etag")
        return Version(said["size"], str(etag) if etag else None, modified)

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:  # noqa: ARG002
        """Return the bytes from `start` to `stop`, as :class:`~ckptconv.stores.requests.Transport` describes it.

        The version is read from the filesystem before the bytes, and the caller compares it. `deadline` is ignored.
        """
        try:
            version = self._asked()
            stop = min(stop, version.size)
            data = bytes(self.files.cat_file(self.path, start=start, end=stop)) if start < stop else b""
        except CkptconvError:
            raise
        except Exception as error:  # any error of an unknown filesystem
            raise Transient(self.said(error)) from error
        if len(data) != stop - start:
            raise Transient(f"the store sent {len(data):,} of {stop - start:,} bytes")
        return Answer(data, version)

    def close(self) -> None:
        """Do nothing: no connection is open."""


_CHUNK = 8 << 20


_Send = Callable[[Path, Location], None]


@contextlib.contextmanager
def _appearing(at: Location) -> Iterator[_Send]:
    """Yield a function that sends a local file to the filesystem of `at`.

    The files appear when the ``with`` block ends. If the block raises an error, no file appears. Raises
    UnsupportedError if the filesystem has neither a move nor a transaction.
    """
    files = at.files
    if type(files).mv is not AbstractFileSystem.mv:  # the default copies, which others could see half
        with _moved(at) as send:
            yield send
        return
    if not _has_commit(at):
        what = "this filesystem has no move and no transaction, so an incomplete file could be visible"
        raise UnsupportedError(what, where=at.shown, hint="write a file here, and copy it there")
    with _as_output_error(at), files.transaction:

        def send(here: Path, there: Location) -> None:
            with open(here, "rb") as data, files.open(there.path, "wb") as out:
                shutil.copyfileobj(data, out, _CHUNK)

        yield send


def _has_commit(at: Location) -> bool:
    """Return whether the filesystem of `at` has transactions, so that a file appears only when a transaction ends.

    To find out, a temporary file is opened and discarded: its class must define ``commit``.
    """
    probe = _beside(at)
    with _as_output_error(at):
        at.files.transaction.start()
        try:
            with at.files.open(probe, "wb") as file:
                kind = type(file)
        finally:
            with contextlib.suppress(Exception):  # a filesystem that cannot roll back
                at.files.transaction.complete(commit=False)
            with contextlib.suppress(Exception):  # it may not exist
                at.files.rm_file(probe)
    return getattr(kind, "commit", AbstractBufferedFile.commit) is not AbstractBufferedFile.commit


@contextlib.contextmanager
def _moved(at: Location) -> Iterator[_Send]:
    """Yield a function that sends a local file under a temporary name.

    The files are renamed when the ``with`` block ends. After an error, temporary files are deleted.
    """
    sent: list[tuple[str, str]] = []

    def send(here: Path, there: Location) -> None:
        sent.append((_beside(there), there.path))
        at.files.makedirs(str(PurePosixPath(there.path).parent), exist_ok=True)
        at.files.put_file(str(here), sent[-1][0])

    try:
        with _as_output_error(at):
            yield send
            while sent:
                at.files.mv(*sent[0])
                del sent[0]
    finally:
        for temporary, _ in sent:
            with contextlib.suppress(Exception):  # any error of an unknown filesystem
                at.files.rm_file(temporary)


def _beside(at: Location) -> str:
    from ckptconv.output.files import temporary_beside

    return str(temporary_beside(Path(at.path)))


@contextlib.contextmanager
def _as_output_error(at: Location) -> Iterator[None]:
    """Turn every error of the filesystem of `at` into an OutputError without secrets."""
    with at.secrets.kept():
        try:
            yield
        except CkptconvError:
            raise
        except Exception as error:
            raise OutputError(f"could not be written: {at.said(error)}", where=at.shown) from error


class FsspecStore(WritableStore):
    """The store of files on the filesystems of fsspec."""

    def transport(self, path: FarPath) -> FsspecTransport:
        """Return a reader of ranges of the file `path`."""
        return FsspecTransport(path)

    def entries(self, folder: FarPath) -> Iterator[Entry]:
        """Yield the files in `folder` and in its subfolders. Raises InputError."""
        at = Location(folder)
        with at.as_error():
            at.files.invalidate_cache()
            root = at.path.rstrip("/") + "/"
            found = at.files.find(at.path, detail=True).items()
            mine = [(path[len(root) :], said.get("size") or 0) for path, said in found if path.startswith(root)]
        yield from (Entry(*each) for each in mine)

    def has_object(self, path: Path) -> bool:
        """Return whether there is a file at `path`. Raises OutputError."""
        at = Location(path)
        with _as_output_error(at):
            return bool(at.files.exists(at.path))

    def version(self, path: Path) -> object:
        """Return fsspec's description of the file at `path`, a dict.

        Raises OutputError, also if the file does not exist.
        """
        at = Location(path)
        with _as_output_error(at):
            at.files.invalidate_cache()
            return at.files.info(at.path)

    def cost_of(self, files: Sequence[OutFile], *, verify: bool) -> tuple[int, list[str]]:
        """Return the bytes of temporary files and those read back, and notes on guarantees that are missing."""
        nbytes = sum(file.size for file in files)
        notes = [
            "written to a temporary file here first, and then sent; fsspec does not say what happens when two write to"
            " one place, and of its filesystems only those in memory and of local folders are tested",
        ]
        notes += [f"the output is read back ({size(nbytes)}) after it is visible"] if verify else []
        return nbytes * (1 + verify), notes

    def upload(
        self,
        files: Sequence[OutFile],
        source: Readable,
        *,
        replace: bool,
        verify: bool,
        old: OldSet = NO_OLD_SET,
        progress: Progress | None = None,
    ) -> Overflow:
        """Write `files` by way of temporary files. Return the numbers that overflowed in casts, by tensor.

        The arguments are those of :meth:`WritableStore.upload`. Raises OutputError, TargetExistsError, and
        UnsupportedError if readers could see an incomplete file on this filesystem.
        """
        overflowed: Counter[tuple[str, ...]] = Counter()
        sent: list[tuple[Path, int, bytes]] = []

        def refuse() -> None:
            for file in files:
                self.check_target(file.path, replace=replace)

        refuse()
        at = Location(files[0].path)
        with old.leaving(self.delete) as leave, _appearing(at) as send:
            for file in files:
                with written_here(file, source, overflowed, verify=verify, progress=progress) as whole:
                    sent += [(file.path, file.size, digest(reading.read(whole)))] if verify else []
                    send(whole.source.path, Location(file.path))
            refuse()
            leave()
        for path, length, md5 in sent:
            read_back(path, [(length, md5)], None, progress, hint_if_replaced())
        old.leave_last(self.delete)
        return dict(overflowed)

    def delete(self, path: Path, etag: str | None = None) -> bool:  # noqa: ARG002 - fsspec lists none
        """Delete the file at `path`, and return True. `etag` is ignored, because fsspec lists none.

        Raises OutputError.
        """
        at = Location(path)
        with _as_output_error(at):
            at.files.rm_file(at.path)
        return True


STORE = FsspecStore()
