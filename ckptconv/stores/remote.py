"""Remote files: their paths, reading them by ranges, downloads, folders of files, and the base class of remote stores.

No byte is requested twice while it is in memory. Ranges that are close to each other are requested together, and
several requests run at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import OpenFile, Readable, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.threads import Cancelled, Task, Threads
from ckptconv.errors import (
    CkptconvError,
    InputError,
    LimitError,
    MissingInputError,
    OutputError,
    RefusedError,
    TransferError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    count,
    size,
)
from ckptconv.limits import LIMITS
from ckptconv.stores.base import Store
from ckptconv.stores.requests import (
    POLICY,
    Deadline,
    Entry,
    Extents,
    Range,
    Requests,
    Transient,
    Transport,
    enlarged,
    in_parts,
    merged,
    retried,
)
from ckptconv.stores.urls import Url, parse
from ckptconv.system import calls
from ckptconv.system.names import stays_inside


class Listing:
    """The files in a remote folder and in its subfolders, by their relative paths.

    Attributes:
        files: The entries of all files.
        folders: For each folder, the names of its subfolders and of its files. The folder itself is ``""``.
    """

    def __init__(self, entries: Iterable[Entry], where: object) -> None:
        """Sort `entries`, which were listed in the folder `where`, into folders.

        Raises InputError if an entry's path has an empty segment, ``.``, ``..`` or a NUL character, and LimitError if
        it is too long or the paths of all folders are.
        """
        self._characters, self._where = 0, where  # in the paths of all folders
        self.files: dict[str, Entry] = {}
        self.folders: dict[str, tuple[set[str], list[str]]] = {"": (set(), [])}
        for entry in entries:
            place = entry.place
            if len(place) > LIMITS.far_name:
                self._refuse(f"a name of {len(place):,} characters", LIMITS.far_name)
            segments = place.split("/")
            if not {"", ".", ".."}.isdisjoint(segments) or "\0" in place:
                raise InputError(
                    "the store lists a name that is not a path", where=where, got=repr(place), hint="give a file in it"
                )
            self.files[place] = entry
            self._add(segments)

    def _refuse(self, what: str, most: int) -> NoReturn:
        raise LimitError(f"the store lists {what}", where=self._where, expected=f"at most {most:,}")

    def _add(self, segments: list[str]) -> None:
        *above, name = segments
        here = ""
        for each in above:
            self.folders[here][0].add(each)
            here = f"{here}/{each}" if here else each
            if here not in self.folders:
                self.folders[here] = (set(), [])
                self._characters += len(here)
        if self._characters > LIMITS.path_characters_unpickled:
            self._refuse("folders whose paths are too long together", LIMITS.path_characters_unpickled)
        self.folders[here][1].append(name)


if TYPE_CHECKING:
    from ckptconv.output.folders import OtherFile

_ONE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


#: The modules of the stores, by the schemes of their URLs. All other schemes are fsspec's.
_MODULES = {"http": "http", "https": "http", "hf": "http", "s3": "s3"}
_PACKAGES = {"http": "urllib3", "s3": "botocore", "fsspec": "fsspec"}


class FarPath(type(Path())):  # type: ignore[misc]  # the class of a path depends on the system
    """A URL as a ``pathlib.Path``. Paths that are derived from it are FarPaths too.

    Its text lacks the secrets of the URL, which are kept in `url`. A URL that ends in a slash is a folder. A URL
    without a suffix is a folder if the server lists files below it.
    """

    _url: Url | None = None
    _listing: Listing | None = None
    _place = ""  # the path relative to the folder that was listed

    @property
    def url(self) -> Url:
        """The URL of this path, with its secrets."""
        if self._url is None:
            self._url = parse(self._text())
        return self._url

    @property
    def can_write(self) -> bool:
        """Whether files can be written to this URL. They cannot if its scheme is http, https or hf."""
        return _MODULES.get(self.url.scheme) != "http"

    def find_store(self, writing: bool = False) -> RemoteStore:
        """Return the store of this URL.

        Raises UsageError if a package that the store needs is not installed. With `writing`, the error says that the
        package is needed for writing.
        """
        module = _MODULES.get(self.url.scheme, "fsspec")
        try:
            store: RemoteStore = importlib.import_module(f"ckptconv.stores.{module}").STORE
        except ImportError as error:
            what = f"{'writing' if writing else 'reading'} it needs {_PACKAGES[module]}, which is not installed"
            raise UsageError(what, where=self, hint='pip install "ckptconv[remote]"') from error
        return store

    def _text(self) -> str:
        text: str = super().__str__()
        return text.replace(os.sep, "/")

    def __str__(self) -> str:
        text = _ONE_SLASH.sub(r"\1://", self._text(), count=1)
        return f"{text}/" if self._url and self._url.says_folder else text

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[object, ...]:
        return far_path, (self.url,)

    def __eq__(self, other: object) -> bool:  # a slash at the end makes no difference
        return isinstance(other, Path) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def place_below(self, folder: Path, target: Path) -> Path:
        """Return this path relative to `folder`, to be appended to the folder `target`.

        Raises RefusedError if `target` is local and the path would lead out of it on some system.
        """
        place: Path = self.relative_to(folder)
        name = "/".join(place.parts)
        if name and not isinstance(target, FarPath) and not stays_inside(name, folders=True):
            what, hint = "the store lists a name that leads elsewhere on some systems", "convert that file by itself"
            raise RefusedError(what, where=folder, got=repr(name), hint=hint)
        return place

    def __truediv__(self, name: str | os.PathLike[str]) -> FarPath:
        below = os.fspath(name)
        if below in ("", "."):
            return self
        place = f"{self._place}/{below}" if self._place else below
        is_folder = self._listing is not None and place in self._listing.folders
        url = self.url.below(below)
        path = far_path(url.as_folder if is_folder else url)
        path._listing, path._place = self._listing, place
        return path

    @property
    def parent(self) -> FarPath:
        """The folder that contains this path, as a FarPath."""
        above = far_path(self.url.parent)
        if self._place:
            above._listing, above._place = self._listing, self._place.rpartition("/")[0]
        return above

    @property
    def parents(self) -> Iterator[FarPath]:
        """The folders that contain this path, the nearest first."""
        path = self
        while path.url.path.strip("/"):
            path = path.parent
            yield path

    def with_name(self, name: str) -> Path:
        """Return the path of `name` in the same folder."""
        return self.parent / name

    def relative_to(self, *other: str | os.PathLike[str]) -> Path:
        """Return this path relative to the folder `other`, as a local path."""
        return Path(*super().relative_to(*other).parts)

    def listed(self) -> tuple[dict[str, bool], list[str]]:
        """Return the names of the subfolders and of the files in this folder, both sorted.

        The subfolders are the keys of a dict whose values are False: none of them is a link. The folder is listed once.
        Raises InputError if it cannot be listed or is empty.
        """
        if self._listing is None:
            self._listing = Listing(self.find_store().entries(self), self)
        if self._place not in self._listing.folders or not self._listing.files:
            raise MissingInputError("there is no such folder, or nothing in it", where=self)
        folders, files = self._listing.folders[self._place]
        return dict.fromkeys(sorted(folders), False), sorted(files)

    def below(self) -> dict[str, Entry]:
        """Return the entries of all files in this folder and its subfolders, by their relative paths.

        Raises InputError.
        """
        self.listed()
        assert self._listing is not None
        root = f"{self._place}/" if self._place else ""
        files = self._listing.files.items()
        return {place[len(root) :]: entry for place, entry in files if place.startswith(root)}

    def is_file(self) -> bool:
        """Return whether this path is not a folder. The file itself may be missing: opening it raises the error."""
        return not self.is_dir()

    def is_dir(self) -> bool:
        """Return whether this path is a folder: listed as one, or with a slash at its end.

        A URL without a suffix is listed to find out, unless its scheme is http or https. Return False if that fails.
        """
        if self._listing is not None:
            return self._place in self._listing.folders and bool(self._listing.files)
        if self.url.says_folder:
            return True
        if self.suffix or self.url.is_http:
            return False
        try:
            return bool(self.listed())
        except CkptconvError:  # opening it as a file raises the error
            self._listing = None
            return False

    def holds(self, name: str) -> bool | None:
        """Return whether this folder contains a file or folder `name`, or None if the folder has not been listed."""
        if self._listing is None:
            return None
        place = f"{self._place}/{name}" if self._place else name
        return place in self._listing.files or place in self._listing.folders

    def first_bytes(self, most: int) -> bytes:
        """Return the first bytes of the file, at most `most`.

        Return no bytes if the file is missing, its server supports no ranges, or a package is not installed. Raises
        InputError if the request fails in another way.
        """
        if self._listing is not None and self._place not in self._listing.files:
            return b""
        try:
            with contextlib.closing(Requests(self.find_store().transport(self), self)) as requests:
                return requests.get(0, most)
        except (MissingInputError, UnsupportedError, UsageError):
            return b""


def far_path(given: str | os.PathLike[str] | Url) -> FarPath:
    """Return the path of the URL `given`. Its text lacks the secrets of the URL, but :attr:`FarPath.url` has them."""
    if isinstance(given, FarPath):
        return given
    text = given if isinstance(given, (str, Url)) else os.fsdecode(given).replace(os.sep, "/")
    url = text if isinstance(text, Url) else parse(text)
    path = FarPath(replace(url, path=unquote(url.path)).shown if url.is_http else url.shown)
    path._url = url
    return path


class RemoteStore(Store):
    """The base class of stores of URLs. All paths are of the class :class:`FarPath`."""

    def transport(self, path: FarPath) -> Transport:
        """Return an object that reads ranges of the file `path`."""
        raise NotImplementedError

    def entries(self, folder: FarPath) -> Iterator[Entry]:
        """Yield the files in `folder` and in its subfolders. Raises InputError if they cannot be listed."""
        raise NotImplementedError

    def open(self, path: Path) -> Readable:
        """Open the file `path` for reading. Raises InputError."""
        assert isinstance(path, FarPath)
        return FarSource(path)

    def others_in(
        self, folder: Path, target: Path, taken: Collection[str], *, deep: bool
    ) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
        """Return the other files in `folder` to copy to `target`, and those that cannot be copied, each with its error.

        A file cannot be copied if its name leads out of a local `target`. The names in `taken` and own temporary files
        are left out. Files in subfolders are included only if `deep` is true.
        """
        from ckptconv.output.files import is_own_file
        from ckptconv.output.folders import OtherFile

        assert isinstance(folder, FarPath)
        found: list[OtherFile] = []
        left: list[tuple[Path, CkptconvError]] = []
        for name, entry in sorted(folder.below().items()):
            if (deep or "/" not in name) and name not in taken and not is_own_file(name.rpartition("/")[2]):
                try:
                    place = (folder / name).place_below(folder, target)
                except RefusedError as error:
                    left.append((folder / name, error))
                else:
                    found.append(OtherFile(target / place, folder / name, "file", entry.size, self.open))
        return found, left


_GRACE = 2.0  # seconds for a request to notice the deadline itself, because its error is more precise


class FarSource(Readable):
    """The remote file at `path`, read by ranges. Its first bytes are requested when it is opened.

    If `skims` is true, :meth:`spares` allows readers to skip bytes that only verify the file. :meth:`about` reports
    them.
    """

    is_far = is_concurrent = True

    def __init__(self, path: FarPath, faults: FaultSink = RAISED, *, skims: bool = False) -> None:
        """Open `path`, and request its first bytes, which also tell its size.

        Raises InputError if that fails, and UsageError if a package is not installed.
        """
        self.url, self.path, self.faults = path.url, path, faults
        self.skims = skims
        self._skipped: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        self._known = Extents(POLICY.held)
        self._deliveries: list[_Delivery] = []
        self.requests = Requests(path.find_store().transport(path), path)
        self._threads = Threads(POLICY.concurrency, "ckptconv-far")
        try:
            head = self.answer(self.ask((0, POLICY.window)), 0)
        except BaseException:
            self.close()
            raise
        version = self.requests.version
        assert version is not None
        self.size = version.size
        self._has_validator = bool(version.strong_etag or version.modified)
        self._known.put(0, head)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`, from memory or by requests. Raises InputError."""
        stop = offset + length
        if stop > self.size:
            raise self._too_short(stop)
        for delivery in self._deliveries:
            if (data := delivery.read(offset, stop)) is not None:
                return data
        while (data := self._held(offset, stop)) is None:
            if length > POLICY.held // 2:  # too much to remember
                return b"".join(part for _, part in self._requested(in_parts([(offset, stop)], POLICY.part)))
            with self._lock:
                gaps = self._known.missing(offset, stop)
            wanted = [enlarged(gap, self.size, POLICY.window) for gap in merged(gaps, POLICY.gap)]
            self._fetch(merged(wanted, POLICY.gap))
        return data

    def _held(self, start: int, stop: int) -> bytes | None:
        with self._lock:
            return self._known.get(start, stop)

    def _fetch(self, ranges: list[Range]) -> None:
        """Request the bytes of `ranges` that are not in memory, and keep them there."""
        with self._lock:
            ranges = [gap for each in in_parts(ranges, POLICY.part) for gap in self._known.missing(*each)]
        parts = self._requested(ranges)
        with self._lock:
            for start, data in parts:
                self._known.put(start, data)

    def _requested(self, ranges: list[Range]) -> list[tuple[int, bytes]]:
        """Request all `ranges` at once. Return their bytes, each with its offset."""
        tasks = [(each[0], self.ask(each)) for each in ranges]
        return [(start, self.answer(task, start)) for start, task in tasks]

    def ask(self, wanted: Range) -> Task[bytes]:
        """Start a request for the range `wanted` in a thread, and return the task.

        If the file cannot be read, the fault sink is told before the task raises the error.
        """

        def get() -> bytes:
            try:
                return self.requests.get(*wanted)
            except UnreadableError as error:
                self.faults.unreachable(error)
                raise

        return self._threads.submit(get)

    def answer(self, task: Task[bytes], start: int) -> bytes:
        """Wait for the request `task`, and return its bytes, which begin at `start`.

        Raises the error of the request, and TransferError if it does not end by the deadline.
        """
        where, most = f"{self.path} at byte {start}", POLICY.deadline + _GRACE
        while not task.wait(min(1.0, most)):
            if task.started is not None and time.monotonic() - task.started > most:
                raise TransferError(f"no answer within {POLICY.deadline:g} s", where=where, hint="try again later")
        try:
            return task.result()
        except Cancelled:
            raise TransferError("the file was closed while it was read", where=where) from None

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Request all `ranges` at once, and wait until their bytes are in memory. The caller reads them next."""
        inside = [(max(start, 0), min(stop, self.size)) for start, stop in ranges]
        self._fetch(merged(inside, POLICY.gap))

    def announce(self, ranges: Iterable[Range], *, keep: Path | None = None) -> None:
        """Declare that `ranges` will be read next, in this order, so that they are requested ahead of the reader.

        Each range can be read once. If `keep` is a folder, the bytes are stored in a file there and can be read again
        until this source is closed.
        """
        ranges = [*ranges]
        for delivery in self._deliveries:
            if delivery.is_kept:
                ranges = [each for each in ranges if not delivery.has(*each)]
        self._deliveries = [each for each in self._deliveries if each.is_kept or not each.is_done]
        if ranges:
            self._deliveries.append(_Delivery(self, ranges, keep))

    def spares(self, offset: int, length: int, what: str) -> bool:
        """Return whether the caller should skip these bytes, which are needed only to check `what`.

        True if the source was opened with `skims` and the bytes are not in memory. A skipped check is reported by
        :meth:`about`.
        """
        if not self.skims or self._held(offset, offset + length) is not None:
            return False
        self._skipped.setdefault(what, set()).add(offset)
        return True

    def about(self) -> list[str]:
        """Return notes for the report: the skipped checks, and whether a change of the file could go unnoticed."""
        found = [count(len(places), what) for what, places in self._skipped.items()]
        notes = [f"not read, to save requests: {', '.join(found)}; verify and convert read them"] if found else []
        if not self._has_validator:
            notes.append(
                "the server sends no ETag and no time of change, so only a change of the size would be noticed"
            )
        return notes

    def close(self) -> None:
        """Close all connections, cancel requests, and drop the bytes in memory."""
        self.requests.close()
        self._threads.shutdown(wait=False)
        for delivery in self._deliveries:
            delivery.close()
        self._deliveries = []


class _Part:
    """A range that is requested at once. Counts how many of its bytes will be read, and have been."""

    def __init__(self, start: int, stop: int) -> None:
        self.range = self.start, self.stop = start, stop
        self.needed = self.read = self.place = 0
        self.task: Task[bytes] | None = None
        self.is_stored = False

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the start and the stop of the bytes between `start` and `stop`."""
        return max(start, self.start), min(stop, self.stop)


class _Delivery:
    """Announced ranges, requested in the order in which they will be read, some of them ahead of the reader.

    Attributes:
        is_kept: Whether the ranges can be read more than once.
    """

    def __init__(self, source: FarSource, ranges: list[Range], keep: Path | None) -> None:
        self._source = source
        self._parts = [_Part(*each) for each in in_parts(merged(ranges, POLICY.gap), POLICY.part)]
        self._starts = [part.start for part in self._parts]
        self._order = [*dict.fromkeys(part for each in ranges for part in self._among(*each))]
        for place, part in enumerate(self._order):
            part.place = place
        for each in merged(ranges, 0):
            for part in self._among(*each):
                first, last = part.within(*each)
                part.needed += last - first
        self._lock = threading.Lock()
        self._folder, self._file, self.is_kept = keep, -1, keep is not None

    @property
    def is_done(self) -> bool:
        """Whether all ranges have been read."""
        return all(part.read >= part.needed for part in self._parts)

    def has(self, start: int, stop: int) -> bool:
        """Return whether the announced ranges contain all bytes from `start` to `stop`."""
        among = [part.within(start, stop) for part in self._among(start, stop)]
        return sum(last - first for first, last in among) == stop - start

    def _among(self, start: int, stop: int) -> list[_Part]:
        """Return the parts that contain bytes between `start` and `stop`."""
        first, last = max(bisect_right(self._starts, start) - 1, 0), bisect_left(self._starts, stop)
        return [part for part in self._parts[first:last] if part.stop > start]

    def read(self, start: int, stop: int) -> bytes | None:
        """Return the bytes from `start` to `stop`, or None if they were not announced or have been read already."""
        if not self.has(start, stop):
            return None
        parts = []
        for part in self._among(start, stop):
            data = self._read(part, *part.within(start, stop))
            if data is None:
                return None
            parts.append(data)
        return b"".join(parts)

    def _read(self, part: _Part, first: int, last: int) -> bytes | None:
        with self._lock:
            if part.is_stored:
                return calls.pread(self._file, last - first, first)
            if part.read >= part.needed:
                return None
            for ahead in self._order[part.place : part.place + POLICY.concurrency]:
                if not (ahead.task or ahead.read or ahead.is_stored):
                    ahead.task = self._source.ask(ahead.range)
            task = part.task
        assert task is not None
        data = self._source.answer(task, part.start)
        with self._lock:
            part.read += last - first
            if self.is_kept and not part.is_stored:
                self._store(part, data)
            if self.is_kept or part.read >= part.needed:
                part.task = None
        return data[first - part.start : last - part.start]

    def _store(self, part: _Part, data: bytes) -> None:
        """Write `data`, the bytes of `part`, to an unnamed temporary file. Raises OutputError if that fails."""
        try:
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
            done = calls.pwrite(self._file, data, part.start)
            if done < len(data):  # raises the error of the system
                calls.pwrite(self._file, data[done:], part.start + done)
        except OSError as error:
            what = f"data that is read twice cannot be cached there: {error.strerror or error}"
            raise OutputError(what, where=self._folder, expected=f"{len(data):,} bytes more") from error
        part.is_stored = True

    def close(self) -> None:
        """Cancel all requests, and delete the temporary file."""
        for part in self._parts:
            if part.task:
                part.task.cancel()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_far(
    path: FarPath,
    faults: FaultSink = RAISED,
    *,
    skims: bool = False,
    download: bool | Path = False,
    progress: Meter | None = None,
) -> Readable:
    """Open the remote file at `path` for reading by ranges, or download it if the server supports no ranges.

    Args:
        path: The file.
        faults: The fault sink.
        skims: Whether to skip checks that cost a request, see :class:`FarSource`.
        download: Whether a download is allowed. A path is the folder for the temporary file.
        progress: A function that takes the size of the download, and returns a context for its progress.

    Raises InputError, UsageError if a package is not installed, and OutputError if there is not enough space.
    """
    try:
        return FarSource(path, faults, skims=skims)
    except UnsupportedError:
        if not download or path.can_write:  # a web server, or the Hub
            raise
    return _Downloaded(path, faults, download if isinstance(download, Path) else Path(tempfile.gettempdir()), progress)


class _Downloaded(OpenFile):
    """A copy of the remote file at `path` in an unnamed temporary file in `folder`, which is deleted on closing."""

    def __init__(self, path: FarPath, faults: FaultSink, folder: Path, progress: Meter | None) -> None:
        self.path, self.url, self.faults, self._folder = path, path.url, faults, folder
        self._progress = progress or (lambda _: contextlib.nullcontext())
        with self._as_error():
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with this
        self.fd = self._file.fileno()
        try:
            self.size = retried(self._received, path)
        except BaseException:
            self.close()
            raise

    def _received(self, deadline: float) -> int:
        """Download the file before `deadline`, and return its size.

        Every ``POLICY.part`` bytes must arrive within ``POLICY.deadline`` seconds. Raises Transient if the download may
        succeed when it is repeated, InputError if not, and OutputError if there is not enough space.
        """
        done = due = 0
        limit = Deadline(deadline)
        transport: Any = far_path(self.path).find_store().transport(far_path(self.path))
        with contextlib.closing(transport), self._as_error(), transport.whole(limit) as (length, chunks):
            self._check_room(length)
            self._file.seek(0)
            with self._progress(length) as tick:
                for chunk in chunks:
                    if done >= due:
                        if done:  # what is compressed can be a thousand times as large as what is announced
                            self._check_room(length - done if length > done else POLICY.part)
                        due, limit.at = done + POLICY.part, time.monotonic() + POLICY.deadline
                    if time.monotonic() > limit.at:
                        raise Transient(f"the server is too slow: {done:,} bytes came")
                    done += self._file.write(chunk)
                    if tick:
                        tick(len(chunk))
            self._file.flush()
        return done

    def _check_room(self, length: int) -> None:
        free = calls.free_space(self._folder, self.fd)
        if length > free:
            what, expected = "not enough free space for the download", f"{length:,} bytes temporarily"
            raise OutputError(what, where=self._folder, expected=expected, got=f"{free:,} bytes")

    @contextlib.contextmanager
    def _as_error(self) -> Iterator[None]:
        """Turn an OSError of the local file into an OutputError."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CkptconvError):
                raise
            what = f"the download cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder) from error

    def about(self) -> list[str]:
        """Return the note that the complete file was downloaded, because the server supports no ranges."""
        return [f"the server does not support range requests, so all {size(self.size)} were downloaded first"]

    def close(self) -> None:
        """Close the temporary file, which deletes it."""
        self._file.close()


class FarFolder(SourceFolder):
    """The remote set of files in the folder `path`, or with the index `path`. Only files in that folder are read."""

    is_far = True
    is_stored = False

    def __init__(self, path: FarPath, faults: FaultSink, check: Callable[[Readable], Readable], **how: Any) -> None:
        """Prepare the folder, without a request.

        `check` is called with each file that is opened. It returns the source to use, or raises an error if the file is
        wrong. `how` are the keywords of :func:`open_far`.
        """

        def open_file(path: Path, faults: FaultSink, **more: Any) -> Readable:
            assert isinstance(path, FarPath)
            return check(open_far(path, faults, **{**how, **more}))

        super().__init__(path, faults, open_file)
        self.mode = 0o666

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that do not exist in the folder. Open the others, several at once.

        Raises InputError if a file can be neither opened nor reported as missing.
        """
        assert isinstance(self.folder, FarPath)
        unknown = [name for name in names if name not in self._open]
        absent = {name for name in unknown if self.folder.holds(name) is False}

        def opened(name: str) -> Readable | None:
            try:
                return self._open_file(self.folder / name, self.faults, download=False)
            except MissingInputError:
                return None

        with Threads(POLICY.concurrency, "ckptconv-far") as threads:
            tasks = [(name, threads.submit(opened, name)) for name in unknown if name not in absent]
            for _, task in tasks:
                task.wait()
                if task.error and not isinstance(task.error, UnsupportedError):
                    break  # do not ask for the others: any number of files could fail as slowly
        found = {name: task.result() for name, task in tasks if task.error is None}
        for name, source in found.items():
            if source:
                self._open[name] = source
                self.add(source)
        for name, task in tasks:
            if isinstance(task.error, UnsupportedError):
                self.open(name)  # a download, in this thread so that Ctrl-C ends it
            else:
                task.result()  # raises the error
        return absent | {name for name, source in found.items() if source is None}

    def names(self) -> list[str]:
        """Return the names of the subfolders and files, or an empty list if the set was given by its index."""
        if not self.is_whole:
            return []
        assert isinstance(self.folder, FarPath)
        folders, files = self.folder.listed()
        return [*folders, *files]
