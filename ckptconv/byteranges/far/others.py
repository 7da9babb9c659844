"""Ranges of what fsspec knows beside HTTP and S3: tried as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec

from ckptconv.byteranges.far.requests import Answer, Entry, Transient, Version
from ckptconv.byteranges.far.urls import Url
from ckptconv.errors import CkptconvError, InputError, MissingInputError, UnsupportedError, UsageError

__all__ = ["FsspecTransport", "entries"]


def entries(url: Url, shown: object) -> Iterator[Entry]:
    """The files in the folder `url` and in those below it. Raises InputError."""
    return FsspecTransport(url, shown).entries(url)


class FsspecTransport:
    """The file at `url` of a filesystem of fsspec's."""

    def __init__(self, url: Url, shown: object) -> None:
        self._where, self._secrets = shown, [each for each in (url.userinfo, url.query) if each]
        who = f"{url.userinfo}@" if url.userinfo else ""
        text = f"{url.scheme}://{who}{url.shown.partition('://')[2]}" + (f"?{url.query}" if url.query else "")
        with self._as_error(url):
            self._files, self._path = fsspec.core.url_to_fs(text)
            if not url.says_folder:
                self._asked()

    @contextlib.contextmanager
    def _as_error(self, url: Url) -> Iterator[None]:
        """Raise in our words what a filesystem raises meanwhile that nobody here knows."""
        try:
            yield
        except ImportError as error:
            raise UsageError(f"{url.scheme} needs a package: {self._said(error)}", where=self._where) from error
        except FileNotFoundError as error:
            raise MissingInputError("cannot be read: there is no such file", where=self._where) from error
        except CkptconvError:
            raise
        except Exception as error:
            kind = UsageError if "rotocol" in str(error) else InputError
            raise kind(f"cannot be read: {self._said(error)}", where=self._where) from error

    def entries(self, url: Url) -> Iterator[Entry]:
        """The files below the path, which is a folder's. Raises InputError."""
        with self._as_error(url):
            self._files.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._files.find(self._path, detail=True)
        root = self._path.rstrip("/") + "/"
        for path, said in found.items():
            if path.startswith(root):
                yield Entry(path[len(root) :], said.get("size") or 0)

    def _asked(self) -> Version:
        said: dict[str, Any] = self._files.info(self._path)
        if said.get("type") == "directory":
            raise MissingInputError("cannot be read: there is no such file", where=self._where)
        if not isinstance(said.get("size"), int):
            raise UnsupportedError("no file whose size the store says", where=self._where)
        modified = next((str(said[key]) for key in ("LastModified", "last_modified", "mtime") if key in said), None)
        return Version(said["size"], said.get("ETag") or said.get("etag"), modified)

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:  # noqa: ARG002
        """As :class:`~ckptconv.byteranges.far.requests.Transport` has it; fsspec knows no deadline."""
        try:
            version = self._asked()
            stop = min(stop, version.size)
            data = bytes(self._files.cat_file(self._path, start=start, end=stop)) if start < stop else b""
        except CkptconvError:
            raise
        except Exception as error:  # of a filesystem that nobody here knows
            raise Transient(self._said(error)) from error
        if len(data) != stop - start:
            raise Transient(f"the store sent {len(data):,} of {stop - start:,} bytes")
        return Answer(data, version)

    def _said(self, error: Exception) -> str:
        """What `error` says, which can repeat the URL, without the secrets in that."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def close(self) -> None:
        """Nothing is open."""
