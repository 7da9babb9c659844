"""Write planned files to filesystems of fsspec that can make a file appear whole, by a move or by a transaction.

Each file is made here first, and sent when it is whole.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path, PurePosixPath

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import OutFile, Overflow, Progress
from ckptconv.errors import CkptconvError, OutputError, UnsupportedError, size
from ckptconv.output.far_folders import NO_OLD_SET, OldSet, refuse_existing
from ckptconv.output.files import fill, temporary_beside
from ckptconv.output.read_back import digest, hint_if_replaced, read_back
from ckptconv.stores.fsspec import Location
from ckptconv.stores.paths import far_path

_CHUNK = 8 << 20


def exists(path: Path) -> bool:
    """Whether there is a file at `path`. Raises OutputError."""
    at = Location(far_path(path).url, path)
    with _as_output_error(at):
        return bool(at.files.exists(at.path))


def version(path: Path) -> object:
    """What tells the file at `path` from another one there, as far as its filesystem says. Raises OutputError."""
    at = Location(far_path(path).url, path)
    with _as_output_error(at):
        at.files.invalidate_cache()
        return at.files.info(at.path)


def about_upload(files: Sequence[OutFile], *, verify: bool) -> tuple[str, ...]:
    """Notes on what writing `files` takes, and on what is not promised."""
    back = f"the output is read back ({size(sum(file.size for file in files))}) when everybody can see it"
    return (
        "written to a temporary file here first, and then sent; fsspec does not say what happens when two write to one"
        " place, and of its filesystems only those in memory and of local folders are tested",
        *([back] if verify else []),
    )


def work_of(files: Sequence[OutFile], *, verify: bool) -> int:
    """The length of a progress bar: bytes that are made here first, and read back."""
    return sum(file.size for file in files) * (1 + verify)


def upload(
    files: Sequence[OutFile],
    source: Readable,
    *,
    replace: bool,
    verify: bool,
    old: OldSet = NO_OLD_SET,
    progress: Progress | None = None,
) -> Overflow:
    """Write `files`, whose paths are URLs and whose ranges come from `source`; give what overflowed.

    The last of several files is the index, which appears last. The files of an `old` set that are deleted first are
    deleted before any new file appears. With `verify` all are read back when all are there. `progress` is called with
    as many bytes in all as :func:`work_of` says.

    Raises OutputError, UnsupportedError where the filesystem could show half a file, and TargetExistsError.
    """
    overflowed: Counter[tuple[str, ...]] = Counter()
    sent: list[tuple[Path, int, bytes]] = []

    def refuse() -> None:
        for file in files:
            refuse_existing(file.path, exists, replace=replace)

    refuse()
    at = Location(far_path(files[0].path).url, files[0].path)
    with old.leaving(delete) as leave, _appearing(at) as send:
        for file in files:
            with tempfile.TemporaryDirectory(prefix="ckptconv-") as folder:
                here = Path(folder) / file.path.name
                overflowed.update(fill(here, changed(file, path=here), source, verify=verify, progress=progress))
                source.check_unchanged()
                with open(here, "rb") as data:
                    chunks = iter(lambda: data.read(_CHUNK), b"")
                    sent += [(file.path, file.size, digest(chunks))] if verify else []
                send(here, Location(far_path(file.path).url, file.path))
        refuse()
        leave()
    for path, length, md5 in sent:
        try:
            read_back(path, [(length, md5)], None, progress)
        except OutputError as error:
            error.hint = error.hint or hint_if_replaced()
            raise
    old.leave_last(delete)
    return dict(overflowed)


def delete(path: Path, etag: str | None = None) -> bool:  # noqa: ARG001 - fsspec's listings have none
    """Delete the file at `path`; True. Raises OutputError."""
    at = Location(far_path(path).url, path)
    with _as_output_error(at):
        at.files.rm_file(at.path)
    return True


_Send = Callable[[Path, Location], None]


@contextlib.contextmanager
def _appearing(at: Location) -> Iterator[_Send]:
    """Give a function that sends files to the filesystem of `at`. They appear when the ``with`` ends, or never.

    Raises UnsupportedError.
    """
    files = at.files
    if type(files).mv is not AbstractFileSystem.mv:  # else it copies, which others could see half
        with _moved(at) as send:
            yield send
        return
    if not _has_commit(at):
        what = "this filesystem has no move and no transaction, so a file there could be seen half"
        raise UnsupportedError(what, where=at.shown, hint="write a file here, and copy it there")
    with _as_output_error(at), files.transaction:

        def send(here: Path, there: Location) -> None:
            with open(here, "rb") as data, files.open(there.path, "wb") as out:
                shutil.copyfileobj(data, out, _CHUNK)

        yield send


def _has_commit(at: Location) -> bool:
    """Whether a file there appears only when a transaction ends: a file is opened, and its class has ``commit``."""
    probe = _beside(at)
    with _as_output_error(at):
        at.files.transaction.start()
        try:
            with at.files.open(probe, "wb") as file:
                kind = type(file)
        finally:
            with contextlib.suppress(Exception):  # of what cannot take it back
                at.files.transaction.complete(commit=False)
            with contextlib.suppress(Exception):  # of what is not there
                at.files.rm_file(probe)
    return getattr(kind, "commit", AbstractBufferedFile.commit) is not AbstractBufferedFile.commit


@contextlib.contextmanager
def _moved(at: Location) -> Iterator[_Send]:
    """As :func:`_appearing`, by moves: files have temporary names until all are there."""
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
            with contextlib.suppress(Exception):  # of a filesystem that nobody here knows
                at.files.rm_file(temporary)


def _beside(at: Location) -> str:
    return str(temporary_beside(Path(at.path)))


@contextlib.contextmanager
def _as_output_error(at: Location) -> Iterator[None]:
    """Raise whatever a filesystem raises as an OutputError."""
    with at.secrets.kept():
        try:
            yield
        except CkptconvError:
            raise
        except Exception as error:
            raise OutputError(f"could not be written: {at.said(error)}", where=at.shown) from error
