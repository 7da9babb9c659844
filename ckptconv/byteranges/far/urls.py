"""URLs of files and folders: taken apart, and shown without what is secret in them."""

from __future__ import annotations

import re
from dataclasses import field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from ckptconv.errors import UsageError
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

_URL = regex(r"([a-z][a-z0-9+.-]+):/+([^/?#]*)/*([^?#]*)(?:\?([^#]*))?", re.IGNORECASE | re.DOTALL)
_KEYED = regex(r"(s3|hf):/+([^/]*)/*(.*)", re.IGNORECASE | re.DOTALL)  # in a key, ? and # are letters
_CHAINED = regex(r"::[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
_HUB_KINDS = ("datasets", "spaces", "models")
HTTP = ("http", "https")


@dataclass(frozen=True)
class Url:
    """A URL of a file or a folder.

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
        return f"{self.scheme}://{self.host}" + (f"/{self.path.lstrip('/')}" if self.path else "")

    @property
    def full(self) -> str:
        """For requests, without name and password, which are sent in a header."""
        return self.shown + (f"?{self.query}" if self.query else "")

    @property
    def is_http(self) -> bool:
        """Whether its path is one of HTTP, where letters can be percent-encoded."""
        return self.scheme in HTTP

    @property
    def says_folder(self) -> bool:
        """Whether it means a folder by itself: it ends in a slash, or is a bucket or all of a repository."""
        is_whole = (self.scheme == "s3" and not self.path) or (self.scheme == "hf" and not self.on_hub[3])
        return is_whole or self.path.endswith("/")

    @property
    def on_hub(self) -> tuple[str, str, str, str]:
        """What it names on the Hub: the kind of repository, which one, the revision as one segment, and the path."""
        kind, owner, *rest = [self.host, *self.path.strip("/").split("/")]
        if kind not in _HUB_KINDS:
            kind, owner, rest = "models", kind, [owner, *rest]
        repo, _, revision = (rest[0] if rest else "").partition("@")
        return kind, f"{owner}/{repo}" if repo else "", quote(unquote(revision), safe="") or "main", "/".join(rest[1:])

    def below(self, name: str) -> Url:
        """That of `name` in this folder. What was signed was another URL."""
        folder = f"{self.path.rstrip('/')}/" if self.path.strip("/") else ""
        return replace(self, path=folder + (quote(name) if self.is_http else name), query="")

    @property
    def parent(self) -> Url:
        """That of the folder that it stands in."""
        folder, slash, _ = self.path.rstrip("/").rpartition("/")
        return replace(self, path=folder + slash, query="")


def parse(text: str) -> Url:
    """Return `text` as a URL; pathlib may have made one slash of two.

    Raises UsageError for a URL that names nothing, is chained, or has a host part that programs read in several ways.
    """
    keyed = _KEYED.fullmatch(text)
    if not keyed and _CHAINED.search(text):
        raise UsageError("a chained URL, which ckptconv does not read", where=text, hint="copy the file here first")
    found = keyed or _URL.match(text)
    if found is None:
        raise UsageError("no URL", where=text, expected="SCHEME://HOST/PATH")
    scheme, host, path, *query = found.groups()
    if not keyed and scheme.lower() != "file" and not is_readable_host(host):
        hint = "in a name or password, write / as %2F, ? as %3F, @ as %40 and \\ as %5C"
        raise UsageError("a URL without a valid host", where=text, expected="SCHEME://HOST[:PORT]/PATH", hint=hint)
    userinfo, _, host = host.rpartition("@")
    url = Url(scheme.lower(), host, path, (query[0] if query else None) or "", userinfo)
    has_path = url.on_hub[1] if url.scheme == "hf" else path or not url.is_http
    if not (host and has_path) and url.scheme != "file":
        expected = "hf://OWNER/REPO/PATH" if url.scheme == "hf" else "SCHEME://HOST/PATH"
        raise UsageError("a URL that names no file", where=f"{url.scheme}://{url.host}/{url.path}", expected=expected)
    return url


def is_readable_host(netloc: str) -> bool:
    r"""Return whether all programs read the same host and port in `netloc`: there is no backslash (browsers see the
    host before it, and urllib3 the one after the ``@``), no space, and a port is a number.
    """
    try:
        return "\\" not in netloc and netloc.isprintable() and " " not in netloc and urlsplit(f"//{netloc}").port != -1
    except ValueError:
        return False


def local_path(url: Url) -> Path | None:
    """The path that a URL of the scheme ``file`` means; None for other schemes."""
    if url.scheme != "file":
        return None
    folder = "" if url.host in ("localhost", "") else f"/{url.host}"  # file:/tmp/x has one slash
    return Path(unquote(f"{folder}/{url.path}"))
