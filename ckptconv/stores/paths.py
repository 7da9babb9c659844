"""URLs as paths: for messages and names, and for what looks into a folder, which asks its server once."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from ckptconv.errors import CkptconvError, InputError, MissingInputError, UnsupportedError, UsageError
from ckptconv.stores.requests import Entry, Requests
from ckptconv.stores.transports import entries_of, transport_for
from ckptconv.stores.urls import Url, parse


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


_ONE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)


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
            self._listing = Listing(entries_of(folder, self), self)
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
            with contextlib.closing(Requests(transport_for(self.url, self), self)) as requests:
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
