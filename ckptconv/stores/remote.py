"""Remote files: their paths, reading them by ranges, downloads, sets of files, and the base of their stores.

Each byte is requested once, neighbours are requested together, and several ranges at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import tempfile
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.threads import Task, Threads
from ckptconv.errors import (
    CkptconvError,
    InputError,
    MissingInputError,
    OutputError,
    RefusedError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    count,
    size,
)
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
    answer_of,
    enlarged,
    in_parts,
    merged,
    retried,
)
from ckptconv.stores.urls import HTTP, Url, parse
from ckptconv.system import calls
from ckptconv.system.names import stays_inside

if TYPE_CHECKING:
    from collections.abc import Callable


class Listing:
    """The files in a remote folder and in the folders below it, by their relative paths."""

    def __init__(self, entries: Iterable[Entry], where: object) -> None:
        """Take the `entries` of the folder `where`. Raises InputError for a name that is not a path."""
        self.files: dict[str, Entry] = {}
        self.folders: dict[str, tuple[set[str], list[str]]] = {"": (set(), [])}
        for entry in entries:
            place = entry.place
            segments = place.split("/")
            if not {"", ".", ".."}.isdisjoint(segments) or "\0" in place:
                raise InputError(
                    "the store lists a name that is no path", where=where, got=repr(place), hint="give a file in it"
                )
            self.files[place] = entry
            self._add(segments)

    def _add(self, segments: list[str]) -> None:
        *above, name = segments
        here = ""
        for each in above:
            self.folders[here][0].add(each)
            here = f"{here}/{each}" if here else each
            self.folders.setdefault(here, (set(), []))
        self.folders[here][1].append(name)


if TYPE_CHECKING:
    from ckptconv.output.folders import OtherFile

_ONE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


#: The modules of the stores, by the schemes of their URLs. All other schemes are fsspec's.
_MODULES = {"http": "http", "https": "http", "hf": "http", "s3": "s3"}
_PACKAGES = {"http": "urllib3", "s3": "botocore", "fsspec": "fsspec"}


class FarPath(type(Path())):  # type: ignore[misc]  # the class of a path depends on the system
    """A URL as a path. Paths derived from it are remote paths too, without the secrets of the URL.

    A URL is a folder if it ends in a slash. A URL without a suffix is a folder if the server lists something in it.
    """

    _url: Url | None = None
    _listing: Listing | None = None
    _place = ""  # the path relative to the folder that was listed

    @property
    def url(self) -> Url:
        """The URL of this path."""
        if self._url is None:
            self._url = parse(self._text())
        return self._url

    @property
    def can_write(self) -> bool:
        """Whether files can be written to the store of this URL."""
        return self.url.scheme not in ("http", "https", "hf")

    def find_store(self, writing: bool = False) -> RemoteStore:
        """Return the store of this URL. Raises UsageError if a package that it needs is not installed."""
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
        """Return this path relative to `folder`, as it will be below the folder `target`.

        Raises RefusedError if its name leads elsewhere on some system, and `target` is a local folder.
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
        path = far_path(replace(url, path=f"{url.path}/") if is_folder else url)
        path._listing, path._place = self._listing, place
        return path

    @property
    def parent(self) -> FarPath:
        """The folder that contains it."""
        above = far_path(self.url.parent)
        if self._place:
            above._listing, above._place = self._listing, self._place.rpartition("/")[0]
        return above

    @property
    def parents(self) -> Iterator[FarPath]:
        """The folders that contain it, the nearest first."""
        path = self
        while path.url.path.strip("/"):
            path = path.parent
            yield path

    def with_name(self, name: str) -> Path:
        """Return the path of `name` in the same folder."""
        return self.parent / name

    def relative_to(self, *other: str | os.PathLike[str]) -> Path:
        """Return the path relative to a folder above, as a local path."""
        return Path(*super().relative_to(*other).parts)

    def listed(self) -> tuple[dict[str, bool], list[str]]:
        """Return the sorted names of the folders, none of which is a link, and of the files in it.

        Raises InputError.
        """
        if self._listing is None:
            folder = self.url if self.url.says_folder else replace(self.url, path=f"{self.url.path}/")
            self._listing = Listing(self.find_store().entries(folder, self), self)
        if self._place not in self._listing.folders or not self._listing.files:
            raise MissingInputError("there is no such folder, or nothing in it", where=self)
        folders, files = self._listing.folders[self._place]
        return dict.fromkeys(sorted(folders), False), sorted(files)

    def below(self) -> dict[str, Entry]:
        """Return the listed files in it and in the folders below, by their relative paths. Raises InputError."""
        self.listed()
        assert self._listing is not None
        root = f"{self._place}/" if self._place else ""
        files = self._listing.files.items()
        return {place[len(root) :]: entry for place, entry in files if place.startswith(root)}

    def is_file(self) -> bool:
        """Return whether this is not a folder. Whether there is a file, its reader says."""
        return not self.is_dir()

    def is_dir(self) -> bool:
        """Return whether it is a folder. If a URL without a suffix cannot be listed, it is not one."""
        if self._listing is not None:
            return self._place in self._listing.folders and bool(self._listing.files)
        if self.url.says_folder:
            return True
        if self.suffix or self.url.is_http:
            return False
        try:
            return bool(self.listed())
        except CkptconvError:  # opening it as a file says why
            self._listing = None
            return False

    def holds(self, name: str) -> bool | None:
        """Return whether it contains a file or folder `name`, or None if it has not been listed."""
        if self._listing is None:
            return None
        place = f"{self._place}/{name}" if self._place else name
        return place in self._listing.files or place in self._listing.folders

    def first_bytes(self, most: int) -> bytes:
        """Return at most `most` first bytes of the file; none if it is missing or its server sends no ranges.

        Raises InputError if the bytes do not arrive: the kind of a file is never guessed.
        """
        if self._listing is not None and self._place not in self._listing.files:
            return b""
        try:
            with contextlib.closing(Requests(self.find_store().transport(self.url, self), self)) as requests:
                return requests.get(0, most)
        except (MissingInputError, UnsupportedError, UsageError):
            return b""


def far_path(given: str | os.PathLike[str] | Url) -> FarPath:
    """Return the path of the URL `given`, with its secrets."""
    if isinstance(given, FarPath):
        return given
    text = given if isinstance(given, (str, Url)) else os.fsdecode(given).replace(os.sep, "/")
    url = text if isinstance(text, Url) else parse(text)
    path = FarPath(replace(url, path=unquote(url.path)).shown if url.is_http else url.shown)
    path._url = url
    return path


class RemoteStore(Store):
    """A store behind URLs. All its paths are of the class :class:`FarPath`."""

    def transport(self, url: Url, shown: object) -> Transport:
        """Return what reads ranges of the file `url`, which is called `shown` in messages."""
        raise NotImplementedError

    def entries(self, url: Url, shown: object) -> Iterator[Entry]:
        """Return the files in the folder `url` and in the folders below it.

        Raises InputError if they cannot be listed.
        """
        raise NotImplementedError

    def open(self, path: Path) -> Readable:
        """Open the file `path`. Raises InputError."""
        assert isinstance(path, FarPath)
        return FarSource(path)

    def others_in(
        self, folder: Path, target: Path, taken: Collection[str], *, deep: bool
    ) -> tuple[list[OtherFile], list[tuple[Path, CkptconvError]]]:
        """Return the other files in `folder`, and those whose names cannot be copied."""
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


class FarSource(Readable):
    """The remote file at `path`.

    With `skims`, bytes that only prove the file to be sound are not read if they would cost a request. :meth:`about`
    says so.
    """

    is_far = True

    def __init__(self, path: FarPath, faults: FaultSink = RAISED, *, skims: bool = False) -> None:
        """Open `path`, and request its first bytes.

        Raises InputError, and UsageError if a package that is needed is missing.
        """
        self.url, self.path, self.fd, self.faults = path.url, path, -1, faults
        self._skims = skims
        self._skipped: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        self._known = Extents(POLICY.held)
        self._deliveries: list[_Delivery] = []
        self.requests = Requests(path.find_store().transport(path.url, path), path)
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
        """Exactly `length` bytes at `offset`. Raises InputError."""
        stop = offset + length
        if stop > self.size:
            raise self._too_short(stop)
        for delivery in self._deliveries:
            if (data := delivery.read(offset, stop)) is not None:
                return data
        while (data := self._held(offset, stop)) is None:
            with self._lock:
                gaps = self._known.missing(offset, stop)
            wanted = [enlarged(gap, self.size, POLICY.window) for gap in merged(gaps, POLICY.gap)]
            parts = self._fetch(in_parts(merged(wanted, POLICY.gap), POLICY.part))
            if length > POLICY.held // 2:  # too much to remember
                return _cut(parts, offset, stop)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises InputError."""
        buffer[:] = self.read(offset, len(buffer))

    def _held(self, start: int, stop: int) -> bytes | None:
        with self._lock:
            return self._known.get(start, stop)

    def _fetch(self, ranges: list[Range]) -> list[tuple[int, bytes]]:
        """Return the bytes of `ranges` with their offsets, and remember them."""
        with self._lock:
            ranges = [gap for each in ranges for gap in self._known.missing(*each)]
        tasks = [(each[0], self.ask(each)) for each in ranges]
        parts = [(start, self.answer(task, start)) for start, task in tasks]
        with self._lock:
            for start, data in parts:
                self._known.put(start, data)
        return parts

    def ask(self, wanted: Range) -> Task[bytes]:
        """Have a thread request the range `wanted`."""

        def get() -> bytes:
            try:
                return self.requests.get(*wanted)
            except UnreadableError as error:
                self.faults.unreachable(error)
                raise

        return self._threads.submit(get)

    def answer(self, task: Task[bytes], start: int) -> bytes:
        """Return the answer to the request `task` for the bytes from `start` on. Raises InputError."""
        return answer_of(task, f"{self.path} at byte {start}")

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Request `ranges`, which are read next, all at once."""
        cut = [(max(start, 0), min(stop, self.size)) for start, stop in ranges]
        self._fetch(in_parts(merged(cut, POLICY.gap), POLICY.part))

    def announce(self, ranges: Iterable[Range], *, keep: Path | None = None) -> None:
        """Request `ranges`, which are read next in this order, ahead of the reader.

        Each can be read once. If `keep` is a folder, they are kept there until the file is closed.
        """
        ranges = [*ranges]
        for delivery in self._deliveries:
            if delivery.is_kept:
                ranges = [each for each in ranges if not delivery.has(*each)]
        self._deliveries = [each for each in self._deliveries if each.is_kept or not each.is_done]
        if ranges:
            self._deliveries.append(_Delivery(self, ranges, keep))

    def spares(self, offset: int, length: int, what: str) -> bool:
        """Return whether to skip these bytes, which only `what` needs: with `skims`, if they would cost a request."""
        if not self._skims or self._held(offset, offset + length) is not None:
            return False
        self._skipped.setdefault(what, set()).add(offset)
        return True

    def about(self) -> list[str]:
        """Return notes on what was not read, and on changes that would not be noticed."""
        found = [count(len(places), what) for what, places in self._skipped.items()]
        notes = [f"not read, to save requests: {', '.join(found)}; verify and convert read them"] if found else []
        if not self._has_validator:
            notes.append(
                "the server says no ETag and no time of change: a change meanwhile would show in the size alone"
            )
        return notes

    def close(self) -> None:
        """Close all connections, and forget all bytes."""
        self.requests.close()
        self._threads.shutdown(wait=False)
        for delivery in self._deliveries:
            delivery.close()
        self._deliveries = []


def _cut(parts: list[tuple[int, bytes]], start: int, stop: int) -> bytes:
    """Return the bytes from `start` to `stop`, all of which are in `parts`, in ascending order."""
    return b"".join(data[max(start - at, 0) : max(stop - at, 0)] for at, data in parts)


class _Delivery:
    """Ranges that are requested in the order in which they will be read, some of them ahead of the reader."""

    def __init__(self, source: FarSource, ranges: list[Range], keep: Path | None) -> None:
        self._source = source
        self._parts = in_parts(merged(ranges, POLICY.gap), POLICY.part)
        self._starts = [start for start, _ in self._parts]
        self._order = [*dict.fromkeys(i for each in ranges for i in self._among(*each))]
        self._needed = [0] * len(self._parts)  # bytes of each part that will be read
        for start, stop in merged(ranges, 0):
            for i in self._among(start, stop):
                self._needed[i] += min(stop, self._parts[i][1]) - max(start, self._parts[i][0])
        self._place = {part: place for place, part in enumerate(self._order)}
        self._tasks: dict[int, Task[bytes]] = {}
        self._read: Counter[int] = Counter()  # bytes of each part that have been read
        self._lock = threading.Lock()
        self._folder, self._file, self._stored = keep, -1, set[int]()

    @property
    def is_kept(self) -> bool:
        """Whether the ranges can be read more than once."""
        return self._folder is not None

    @property
    def is_done(self) -> bool:
        """Whether all ranges have been read."""
        return all(self._read[i] >= needed for i, needed in enumerate(self._needed))

    def has(self, start: int, stop: int) -> bool:
        """Return whether the ranges include the bytes from `start` to `stop`."""
        among = [self._parts[i] for i in self._among(start, stop)]
        return sum(min(stop, end) - max(start, at) for at, end in among) == stop - start

    def _among(self, start: int, stop: int) -> range:
        """Return the numbers of the parts that have bytes from `start` to `stop`."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        while first < len(self._parts) and self._parts[first][1] <= start:
            first += 1
        last = first
        while last < len(self._parts) and self._parts[last][0] < stop:
            last += 1
        return range(first, last)

    def read(self, start: int, stop: int) -> bytes | None:
        """Return the bytes from `start` to `stop`, or None if they are not included or have been read already."""
        if not self.has(start, stop):
            return None
        parts = []
        for i in self._among(start, stop):
            at, end = self._parts[i]
            first, last = max(start, at), min(stop, end)
            data = self._part(i, first, last)
            if data is None:
                return None
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, i: int, first: int, last: int) -> bytes | None:
        with self._lock:
            if i in self._stored:
                return calls.pread(self._file, last - first, first)
            if self._read[i] >= self._needed[i]:
                return None
            place = self._place[i]
            for ahead in self._order[place : place + POLICY.concurrency]:
                if ahead not in self._tasks and not self._read[ahead] and ahead not in self._stored:
                    self._tasks[ahead] = self._source.ask(self._parts[ahead])
            task = self._tasks[i]
        at = self._starts[i]
        data = self._source.answer(task, at)
        with self._lock:
            self._read[i] += last - first
            if self._folder is not None and i not in self._stored:
                self._store(i, data)
            if self._folder is not None or self._read[i] >= self._needed[i]:
                self._tasks.pop(i, None)
        return data[first - at : last - at]

    def _store(self, i: int, data: bytes) -> None:
        """Keep part `i` in a file without a name. Raises OutputError if it cannot be written."""
        try:
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
            done = calls.pwrite(self._file, data, self._parts[i][0])
            if done < len(data):  # raises an error that says why
                calls.pwrite(self._file, data[done:], self._parts[i][0] + done)
        except OSError as error:
            what = f"what is read twice cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder, expected=f"{len(data):,} bytes more") from error
        self._stored.add(i)

    def close(self) -> None:
        """Cancel all requests, and forget all bytes."""
        for task in self._tasks.values():
            task.cancel()
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
    """Open the remote file at `path`. With `download` it is downloaded if its server sends no ranges.

    `download` can be the folder to use. `progress` is called with the number of bytes that are downloaded.

    Raises InputError, UsageError if a package that is needed is missing, and OutputError if there is no space.
    """
    try:
        return FarSource(path, faults, skims=skims)
    except UnsupportedError:
        if not download or path.url.scheme not in (*HTTP, "hf"):
            raise
    return _Downloaded(path, faults, download if isinstance(download, Path) else Path(tempfile.gettempdir()), progress)


class _Downloaded(Readable):
    """A copy of the remote file at `path`, in a file without a name in `folder`, which is gone when it is closed."""

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
        """Download the file, and return the number of its bytes. Raises Transient, InputError, OutputError.

        Every ``POLICY.part`` bytes must arrive within ``POLICY.deadline`` seconds.
        """
        done = due = 0
        limit = Deadline(deadline)
        transport: Any = far_path(self.path).find_store().transport(self.url, self.path)
        with contextlib.closing(transport), self._as_error(), transport.whole(limit) as (length, chunks):
            self._check_room(length)
            self._file.seek(0)
            with self._progress(length) as tick:
                for chunk in chunks:
                    if done >= due:
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
        """Raise the errors of the local file as OutputErrors."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CkptconvError):
                raise
            what = f"the download cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder) from error

    def about(self) -> list[str]:
        """Return a note that the file was downloaded."""
        return [f"the server does not support range requests, so all {size(self.size)} were downloaded first"]

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()


class FarFolder(SourceFolder):
    """The remote set in the folder `path`, or with the index `path`. Only files in that folder are read."""

    is_far = True
    is_stored = False

    def __init__(
        self,
        path: FarPath,
        faults: FaultSink = RAISED,
        check: Callable[[Readable], Readable] = lambda source: source,
        *,
        skims: bool = False,
        download: bool | Path = False,
        progress: Meter | None = None,
    ) -> None:
        """Take `path`. `check` is called with each file that is opened, and raises an error if the file is wrong."""

        def open_ranges(path: Path) -> Readable:
            assert isinstance(path, FarPath)
            return check(FarSource(path, faults, skims=skims))

        def open_file(path: Path, faults: FaultSink) -> Readable:
            assert isinstance(path, FarPath)
            return check(open_far(path, faults, skims=skims, download=download, progress=progress))

        super().__init__(path, faults, open_file)
        self._open_ranges = open_ranges
        self.mode = 0o666

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return those of `names` that are missing. The others are opened, several at once."""
        assert isinstance(self.folder, FarPath)
        unknown = [name for name in names if name not in self._open]
        absent = {name for name in unknown if self.folder.holds(name) is False}

        def opened(name: str) -> Readable | None:
            try:
                return self._open_ranges(self.folder / name)
            except MissingInputError:
                return None

        with Threads(POLICY.concurrency, "ckptconv-far") as threads:
            tasks = [(name, threads.submit(opened, name)) for name in unknown if name not in absent]
            for _, task in tasks:
                task.wait()
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
        """Return the names in the folder, or nothing if the set was given by its index."""
        if not self.is_whole:
            return []
        assert isinstance(self.folder, FarPath)
        folders, files = self.folder.listed()
        return [*folders, *files]
