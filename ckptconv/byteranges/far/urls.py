"""URLs of files: taken apart, shown without what is secret in them, and as paths for messages and names."""

from __future__ import annotations

import os
import re
from dataclasses import field, replace
from pathlib import Path
from urllib.parse import quote, unquote

from ckptconv.errors import UsageError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

__all__ = ["FarPath", "Url", "far_path", "local_path", "parse"]

_URL = regex(r"([a-z][a-z0-9+.-]+):/+([^/?#]*)/*([^?#]*)(?:\?([^#]*))?", re.IGNORECASE | re.DOTALL)
_KEYED = regex(r"(s3|hf):/+([^/]*)/*(.*)", re.IGNORECASE | re.DOTALL)  # in a key, ? and # are letters
_ONE_SLASH = regex(r"^([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
HTTP = ("http", "https")


@dataclass(frozen=True)
class Url:
    """A URL of a file.

    Attributes:
        scheme: In small letters.
        host: And its port; the bucket, or the owner on the Hub.
        path: Without the slash before it, as it was typed.
        query: What stands behind a question mark, which can be a signature.
        userinfo: Name and password.
    """

    scheme: str
    host: str
    path: str
    query: str = field(default="", repr=False)
    userinfo: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """For messages: nothing that is secret."""
        return f"{self.scheme}://{self.host}/{self.path}"

    @property
    def full(self) -> str:
        """For requests, without name and password, which are sent in a header."""
        return self.shown + (f"?{self.query}" if self.query else "")

    @property
    def is_http(self) -> bool:
        """Whether its path is one of HTTP, where letters can be percent-encoded."""
        return self.scheme in HTTP

    def beside(self, name: str) -> Url:
        """That of the file `name` in the same folder. What was signed was another URL."""
        folder, slash, _ = self.path.rpartition("/")
        return replace(self, path=folder + slash + (quote(name) if self.is_http else name), query="")


def parse(text: str) -> Url:
    """`text` as a URL; pathlib may have made one slash of two. Raises UsageError where it names no file."""
    found = _KEYED.fullmatch(text) or _URL.match(text)
    if found is None:
        raise UsageError("no URL", where=text, expected="SCHEME://HOST/PATH")
    scheme, host, path, *query = found.groups()
    userinfo, _, host = host.rpartition("@")
    url = Url(scheme.lower(), host, path, (query[0] if query else None) or "", userinfo)
    if not (host and path) and url.scheme != "file":
        raise UsageError("a URL that names no file", where=url.shown, expected="SCHEME://HOST/PATH")
    return url


class FarPath(type(Path())):  # type: ignore[misc]  # which class a path has, the system says
    """A URL as a path, for messages and for names. What stands beside it is one too, but for the secrets."""

    url: Url | None = None

    def __str__(self) -> str:
        return _ONE_SLASH.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[object, ...]:
        return far_path, (self.url or str(self),)


def far_path(given: str | os.PathLike[str] | Url) -> FarPath:
    """The path that the URL `given` is, which remembers all of it."""
    url = given if isinstance(given, Url) else getattr(given, "url", None) or parse(os.fsdecode(given))
    path = FarPath(replace(url, path=unquote(url.path)).shown if url.is_http else url.shown)
    path.url = url
    return path


def local_path(url: Url) -> Path | None:
    """The path that a URL of the scheme ``file`` means; None for other schemes."""
    if url.scheme != "file":
        return None
    folder = "" if url.host in ("localhost", "") else f"/{url.host}"  # file:/tmp/x has one slash
    return Path(unquote(f"{folder}/{url.path}"))
