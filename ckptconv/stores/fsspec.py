"""Ranges of what fsspec knows beside HTTP and S3: tried as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec

from ckptconv.errors import CkptconvError, MissingInputError, TransferError, UnsupportedError, UsageError
from ckptconv.stores.requests import Answer, Entry, Transient, Version
from ckptconv.stores.urls import Secrets, Url


class Location:
    """What is, or will be, at `url`: the filesystem of fsspec's, as `files`, and the `path` there."""

    def __init__(self, url: Url, shown: object) -> None:
        """Raises UsageError where there is no such filesystem, or a package for it is missing."""
        if url.scheme not in (*fsspec.registry, *fsspec.available_protocols()):
            raise UsageError(f"cannot be read: neither ckptconv nor fsspec knows {url.scheme}://", where=shown)
        self.shown, self.secrets = shown, Secrets(url)
        who = f"{url.userinfo}@" if url.userinfo else ""
        text = f"{url.scheme}://{who}{url.shown.partition('://')[2]}" + (f"?{url.query}" if url.query else "")
        with self.as_error(url):
            self.files, self.path = fsspec.core.url_to_fs(text)

    def said(self, error: Exception) -> str:
        """Return what `error` is and says, without secrets."""
        return self.secrets.hidden(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def as_error(self, url: Url) -> Iterator[None]:
        """Raise in our words what a filesystem raises meanwhile that nobody here knows."""
        with self.secrets.kept():
            try:
                yield
            except ImportError as error:
                raise UsageError(f"{url.scheme} needs a package: {self.said(error)}", where=self.shown) from error
            except FileNotFoundError as error:
                raise MissingInputError("cannot be read: there is no such file", where=self.shown) from error
            except CkptconvError:
                raise
            except Exception as error:
                raise TransferError(f"cannot be read: {self.said(error)}", where=self.shown) from error


class FsspecTransport(Location):
    """The file at `url` of a filesystem of fsspec's."""

    def __init__(self, url: Url, shown: object) -> None:
        super().__init__(url, shown)
        with self.as_error(url):
            self._asked()

    def _asked(self) -> Version:
        said: dict[str, Any] = self.files.info(self.path)
        if said.get("type") == "directory":
            raise MissingInputError("cannot be read: there is no such file", where=self.shown)
        if not isinstance(said.get("size"), int):
            raise UnsupportedError("no file whose size the store says", where=self.shown)
        modified = next((str(said[key]) for key in ("LastModified", "last_modified", "mtime") if key in said), None)
        return Version(said["size"], said.get("ETag") or said.get("etag"), modified)

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:  # noqa: ARG002
        """As :class:`~ckptconv.stores.requests.Transport` has it; fsspec knows no deadline."""
        try:
            version = self._asked()
            stop = min(stop, version.size)
            data = bytes(self.files.cat_file(self.path, start=start, end=stop)) if start < stop else b""
        except CkptconvError:
            raise
        except Exception as error:  # of a filesystem that nobody here knows
            raise Transient(self.said(error)) from error
        if len(data) != stop - start:
            raise Transient(f"the store sent {len(data):,} of {stop - start:,} bytes")
        return Answer(data, version)

    def close(self) -> None:
        """Nothing is open."""


def entries(url: Url, shown: object) -> Iterator[Entry]:
    """The files in the folder `url` and in those below it. Raises InputError."""
    at = Location(url, shown)
    with at.as_error(url):
        at.files.invalidate_cache()
        found: dict[str, dict[str, Any]] = at.files.find(at.path, detail=True)
    root = at.path.rstrip("/") + "/"
    for path, said in found.items():
        if path.startswith(root):
            yield Entry(path[len(root) :], said.get("size") or 0)
