"""A far file as a source: read by position, each byte asked for once, neighbours together, several ranges at once."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.errors import (
    CkptconvError,
    InputError,
    MissingInputError,
    OutputError,
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
    Task,
    Transient,
    Transport,
    Workers,
    enlarged,
    in_parts,
    merged,
    retried,
)
from ckptconv.stores.urls import HTTP, Url, parse

if TYPE_CHECKING:
    from collections.abc import Callable


class Listing:
    """The files in a folder and in those below it, by their paths from there."""

    def __init__(self, entries: Iterable[Entry], where: object) -> None:
        """Raises InputError for a name that is no path."""
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


class FarPath(type(Path())):  # type: ignore[misc]  # which class a path has, the system says
    """A URL as a path. What stands in it and above it is one too, but for the secrets.

    A URL is a folder if it ends in a slash; one without a suffix is one if the server lists something there.
    """

    _url: Url | None = None
    _listing: Listing | None = None
    _place = ""  # from the folder of the listing

    @property
    def url(self) -> Url:
        """What it is the path of."""
        if self._url is None:
            self._url = parse(super().__str__())
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
            raise UsageError(what, where=self, hint="pip install 'ckptconv[remote]'") from error
        return store

    def __str__(self) -> str:
        text = _ONE_SLASH.sub(r"\1://", super().__str__(), count=1)
        return f"{text}/" if self._url and self._url.says_folder else text

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[object, ...]:
        return far_path, (self.url,)

    def __eq__(self, other: object) -> bool:  # which the slash behind a folder does not change
        return isinstance(other, Path) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
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
        """The folder that it stands in."""
        above = far_path(self.url.parent)
        if self._place:
            above._listing, above._place = self._listing, self._place.rpartition("/")[0]
        return above

    @property
    def parents(self) -> Iterator[FarPath]:
        """The folders that it stands in, the next one first."""
        path = self
        while path.url.path.strip("/"):
            path = path.parent
            yield path

    def with_name(self, name: str) -> Path:
        """That of `name` in the same folder."""
        return self.parent / name

    def relative_to(self, *other: str | os.PathLike[str]) -> Path:
        """The path from a folder above, which is no URL."""
        return Path(*super().relative_to(*other).parts)

    def listed(self) -> tuple[dict[str, bool], list[str]]:
        """The names of folders in it, none of which is a link, and of files, sorted. Raises InputError."""
        if self._listing is None:
            folder = self.url if self.url.says_folder else replace(self.url, path=f"{self.url.path}/")
            self._listing = Listing(self.find_store().entries(folder, self), self)
        if self._place not in self._listing.folders or not self._listing.files:
            raise MissingInputError("there is no such folder, or nothing in it", where=self)
        folders, files = self._listing.folders[self._place]
        return dict.fromkeys(sorted(folders), False), sorted(files)

    def below(self) -> dict[str, Entry]:
        """What is listed of the files in it and in folders below, by their paths from here. Raises InputError."""
        self.listed()
        assert self._listing is not None
        root = f"{self._place}/" if self._place else ""
        files = self._listing.files.items()
        return {place[len(root) :]: entry for place, entry in files if place.startswith(root)}

    def is_file(self) -> bool:
        """Return whether this is not a folder. Whether there is a file, its reader says."""
        return not self.is_dir()

    def is_dir(self) -> bool:
        """Whether it is a folder; what cannot be listed is not."""
        if self._listing is not None:
            return self._place in self._listing.folders and bool(self._listing.files)
        if self.url.says_folder:
            return True
        if self.suffix or self.url.is_http:
            return False
        try:
            return bool(self.listed())
        except CkptconvError:  # which who opens it as a file says
            self._listing = None
            return False

    def holds(self, name: str) -> bool | None:
        """Whether a file or folder `name` stands in it; None where nobody has asked."""
        if self._listing is None:
            return None
        place = f"{self._place}/{name}" if self._place else name
        return place in self._listing.files or place in self._listing.folders

    def first_bytes(self, most: int) -> bytes:
        """The first bytes of the file, at most so many; none where it is not there, or nobody sends ranges of it.

        Raises InputError where they did not come: nobody should guess what the file is.
        """
        if self._listing is not None and self._place not in self._listing.files:
            return b""
        try:
            with contextlib.closing(Requests(self.find_store().transport(self.url, self), self)) as requests:
                return requests.get(0, most)
        except (MissingInputError, UnsupportedError, UsageError):
            return b""


def far_path(given: str | os.PathLike[str] | Url) -> FarPath:
    """The path that the URL `given` is, which remembers all of it."""
    if isinstance(given, FarPath):
        return given
    url = given if isinstance(given, Url) else parse(os.fsdecode(given))
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
        """Return the other files in `folder`, all of which can be copied."""
        from ckptconv.output.files import is_own_file
        from ckptconv.output.folders import OtherFile

        assert isinstance(folder, FarPath)
        found = [
            OtherFile(target / name, folder / name, "file", entry.size, self.open)
            for name, entry in sorted(folder.below().items())
            if (deep or "/" not in name) and name not in taken and not is_own_file(name.rpartition("/")[2])
        ]
        return found, []


class FarSource(Readable):
    """The far file at `path`.

    `skims`: who opened it wants to know what is in it, and no more: what only proves that the file is sound, and would
    cost a request of its own, is left out and said in :meth:`about`.
    """

    is_far = True

    def __init__(self, path: FarPath, faults: FaultSink = RAISED, *, skims: bool = False) -> None:
        """Raises InputError, and UsageError where no package can reach it."""
        self.url, self.path, self.fd, self.faults = path.url, path, -1, faults
        self._skims = skims
        self._skipped: dict[str, set[int]] = {}
        self._lock = threading.Lock()
        self._known = Extents(POLICY.held)
        self._deliveries: list[_Delivery] = []
        self.requests = Requests(path.find_store().transport(path.url, path), path)
        self._workers = Workers()
        try:
            head = self._ask((0, POLICY.window)).wait()
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
            if length > POLICY.held // 2:  # more than is worth holding
                return _cut(parts, offset, stop)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`. Raises InputError."""
        buffer[:] = self.read(offset, len(buffer))

    def _held(self, start: int, stop: int) -> bytes | None:
        with self._lock:
            return self._known.get(start, stop)

    def _fetch(self, ranges: list[Range]) -> list[tuple[int, bytes]]:
        """The bytes of `ranges`, with where they start, known from now on."""
        with self._lock:
            ranges = [gap for each in ranges for gap in self._known.missing(*each)]
        tasks = [(each[0], self._ask(each)) for each in ranges]
        parts = [(start, task.wait()) for start, task in tasks]
        with self._lock:
            for start, data in parts:
                self._known.put(start, data)
        return parts

    def _ask(self, wanted: Range) -> Task:
        def get() -> bytes:
            try:
                return self.requests.get(*wanted)
            except UnreadableError as error:
                self.faults.unreachable(error)
                raise

        return self._workers.submit(get, f"{self.path} at byte {wanted[0]}")

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Ask for `ranges`, which are about to be read, at once."""
        cut = [(max(start, 0), min(stop, self.size)) for start, stop in ranges]
        self._fetch(in_parts(merged(cut, POLICY.gap), POLICY.part))

    def announce(self, ranges: Iterable[Range], *, keep: Path | None = None) -> None:
        """Have `ranges`, which are about to be read in this order, fetched ahead. Each is there once, unless a folder
        is given to `keep` them in until the file is closed.
        """
        ranges = [*ranges]
        for delivery in self._deliveries:
            if delivery.is_kept:
                ranges = [each for each in ranges if not delivery.has(*each)]
        self._deliveries = [each for each in self._deliveries if each.is_kept or not each.is_done]
        if ranges:
            self._deliveries.append(_Delivery(self._ask, ranges, keep))

    def spares(self, offset: int, length: int, what: str) -> bool:
        """Whether what stands there is not to be read: nobody needs it who skims, and it would cost a request."""
        if not self._skims or self._held(offset, offset + length) is not None:
            return False
        self._skipped.setdefault(what, set()).add(offset)
        return True

    def about(self) -> list[str]:
        """What else to say of it: what was not read, and what could go unseen."""
        found = [count(len(places), what) for what, places in self._skipped.items()]
        notes = [f"not read, to save requests: {', '.join(found)}; verify and convert read them"] if found else []
        if not self._has_validator:
            notes.append(
                "the server says no ETag and no time of change: a change meanwhile would show in the size alone"
            )
        return notes

    def close(self) -> None:
        """Let connections go, and forget what is known."""
        self.requests.close()
        self._workers.close()
        for delivery in self._deliveries:
            delivery.close()
        self._deliveries = []


def _cut(parts: list[tuple[int, bytes]], start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop`, all of which are in `parts`, in ascending order."""
    return b"".join(data[max(start - at, 0) : max(stop - at, 0)] for at, data in parts)


class _Delivery:
    """Ranges on their way, in the order in which they will be read, some ahead of who reads."""

    def __init__(self, ask: Callable[[Range], Task], ranges: list[Range], keep: Path | None) -> None:
        self._ask = ask
        self._parts = in_parts(merged(ranges, POLICY.gap), POLICY.part)
        self._starts = [start for start, _ in self._parts]
        self._order = [*dict.fromkeys(i for each in ranges for i in self._among(*each))]
        self._needed = [0] * len(self._parts)  # bytes of each part that will be read
        for start, stop in merged(ranges, 0):
            for i in self._among(start, stop):
                self._needed[i] += min(stop, self._parts[i][1]) - max(start, self._parts[i][0])
        self._place = {part: place for place, part in enumerate(self._order)}
        self._tasks: dict[int, Task] = {}
        self._read: Counter[int] = Counter()  # bytes of each part that have been read
        self._lock = threading.Lock()
        self._folder, self._file, self._stored = keep, -1, set[int]()

    @property
    def is_kept(self) -> bool:
        """Whether it can be read more than once."""
        return self._folder is not None

    @property
    def is_done(self) -> bool:
        """Whether all of it has been read."""
        return all(self._read[i] >= needed for i, needed in enumerate(self._needed))

    def has(self, start: int, stop: int) -> bool:
        """Whether the bytes from `start` to `stop` are in it."""
        among = [self._parts[i] for i in self._among(start, stop)]
        return sum(min(stop, end) - max(start, at) for at, end in among) == stop - start

    def _among(self, start: int, stop: int) -> range:
        """The parts that have bytes from `start` to `stop`."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        while first < len(self._parts) and self._parts[first][1] <= start:
            first += 1
        last = first
        while last < len(self._parts) and self._parts[last][0] < stop:
            last += 1
        return range(first, last)

    def read(self, start: int, stop: int) -> bytes | None:
        """The bytes from `start` to `stop`; None where they are not in it, or not any more."""
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
                return os.pread(self._file, last - first, first)
            if self._read[i] >= self._needed[i]:
                return None
            place = self._place[i]
            for ahead in self._order[place : place + POLICY.concurrency]:
                if ahead not in self._tasks and not self._read[ahead] and ahead not in self._stored:
                    self._tasks[ahead] = self._ask(self._parts[ahead])
            task = self._tasks[i]
        data = task.wait()
        at = self._starts[i]
        with self._lock:
            self._read[i] += last - first
            if self._folder is not None and i not in self._stored:
                self._store(i, data)
            if self._folder is not None or self._read[i] >= self._needed[i]:
                self._tasks.pop(i, None)
        return data[first - at : last - at]

    def _store(self, i: int, data: bytes) -> None:
        """Keep the part in a file without a name."""
        try:
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._folder) as file:
                    self._file = os.dup(file.fileno())
            done = os.pwrite(self._file, data, self._parts[i][0])
            if done < len(data):  # which says why
                os.pwrite(self._file, data[done:], self._parts[i][0] + done)
        except OSError as error:
            what = f"what is read twice cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder, expected=f"{len(data):,} bytes more") from error
        self._stored.add(i)

    def close(self) -> None:
        """Forget all of it."""
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
    """The far file at `path`, read by ranges. With `download` it is downloaded if the server sends no ranges.

    `download` can be the folder to use. `progress` is called with the bytes that are downloaded.

    Raises InputError, UsageError where no package can reach it, OutputError where there is no room for it.
    """
    try:
        return FarSource(path, faults, skims=skims)
    except UnsupportedError:
        if not download or path.url.scheme not in (*HTTP, "hf"):
            raise
    return _Downloaded(path, faults, download if isinstance(download, Path) else Path(tempfile.gettempdir()), progress)


class _Downloaded(Readable):
    """All of the far file at `path`, in a file without a name in `folder`, which goes when it is closed."""

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
        """How many bytes came, all of which are in our file now. Raises Transient, InputError, OutputError.

        Every ``POLICY.part`` bytes must come within ``POLICY.deadline`` seconds.
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
        space = os.fstatvfs(self.fd)
        free = space.f_bavail * space.f_frsize
        if length > free:
            what, expected = "too little free space for the download", f"{length:,} bytes for a while"
            raise OutputError(what, where=self._folder, expected=expected, got=f"{free:,} bytes")

    @contextlib.contextmanager
    def _as_error(self) -> Iterator[None]:
        """Raise in our words what the system says meanwhile of our file."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CkptconvError):
                raise
            what = f"the download cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder) from error

    def about(self) -> list[str]:
        """A note that it was downloaded."""
        return [f"the server sends no ranges of it: all {size(self.size)} were downloaded first"]

    def close(self) -> None:
        """Close the file, which has no name, so that its space is free again."""
        self._file.close()


class FarFolder(SourceFolder):
    """The far set in the folder `path`, or whose index is there. Nothing is read but what stands in that folder."""

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
        """`check` is called with each file that is opened, and raises what is wrong with it."""

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
        """Those of `names` that are not there. The others are opened, several at once."""
        assert isinstance(self.folder, FarPath)
        unknown = [name for name in names if name not in self._open]
        absent = {name for name in unknown if self.folder.holds(name) is False}

        def opened(name: str) -> Readable | None:
            try:
                return self._open_ranges(self.folder / name)
            except MissingInputError:
                return None

        with ThreadPoolExecutor(POLICY.concurrency) as pool:
            tasks = [(name, pool.submit(opened, name)) for name in unknown if name not in absent]
        found = {name: task.result() for name, task in tasks if task.exception() is None}
        for name, source in found.items():
            if source:
                self._open[name] = source
                self.add(source)
        for name, task in tasks:
            if isinstance(task.exception(), UnsupportedError):
                self.open(name)  # which can download it: here, where Ctrl-C ends that
            else:
                task.result()  # which raises
        return absent | {name for name, source in found.items() if source is None}

    def names(self) -> list[str]:
        """What is in the folder; of an index beside which nobody has looked, nothing."""
        if not self.is_whole:
            return []
        assert isinstance(self.folder, FarPath)
        folders, files = self.folder.listed()
        return [*folders, *files]
