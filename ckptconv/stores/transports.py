"""Who asks which server: by the scheme of a URL, for ranges of a file and for what is in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.stores.requests import Entry, Transport
from ckptconv.stores.urls import Url


def transport_for(url: Url, shown: object) -> Transport:
    """How the ranges of `url` come. Raises UsageError where the package for that is not installed."""
    with _installed(url, shown):
        if url.is_http:
            from ckptconv.stores.http import HttpTransport

            return HttpTransport(url, shown)
        if url.scheme == "hf":
            from ckptconv.stores.http import hub_transport

            return hub_transport(url, shown)
        if url.scheme == "s3":
            from ckptconv.stores.s3 import S3Transport

            return S3Transport(url, shown)
        from ckptconv.stores.fsspec import FsspecTransport

        return FsspecTransport(url, shown)


def entries_of(url: Url, shown: object) -> Iterator[Entry]:
    """The files in the folder `url` and in those below it.

    Raises InputError where they cannot be listed, UsageError where the package for that is not installed.
    """
    with _installed(url, shown):
        if url.is_http:
            raise UnsupportedError(
                "a folder, and web servers list none",
                where=shown,
                hint="give the URL of a file in it; of a sharded set that of its index, …/model.safetensors.index.json",
            )
        if url.scheme == "hf":
            from ckptconv.stores.http import hub_entries

            return hub_entries(url, shown)
        if url.scheme == "s3":
            from ckptconv.stores.s3 import entries

            return entries(url, shown)
        from ckptconv.stores.fsspec import entries

        return entries(url, shown)


@contextlib.contextmanager
def _installed(url: Url, shown: object) -> Iterator[None]:
    """Raise UsageError where a package is missing that reads `url`."""
    package = {"http": "urllib3", "https": "urllib3", "hf": "urllib3", "s3": "botocore"}.get(url.scheme, "fsspec")
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"reading it needs {package}, which is not installed", where=shown, hint="pip install 'ckptconv[remote]'"
        ) from error
