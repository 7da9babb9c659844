"""What is in a far folder and below it, asked for once: names, sizes and ETags, and no name can lead out of it."""

from __future__ import annotations

from collections.abc import Iterable

from ckptconv.byteranges.far.requests import Entry
from ckptconv.errors import InputError


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
