"""URLs of files and folders, printed without their secrets, and a way to hide these secrets in all messages."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from ckptconv.errors import CkptconvError, UsageError, redacted
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
        scheme: The scheme in lower case.
        host: The host with its port, the bucket, or the owner on the Hub.
        path: The path as it was typed, without the first slash.
        query: The text after the question mark, which can contain a signature.
        userinfo: The name and the password, as in ``NAME:PASSWORD``, or an empty string.
    """

    scheme: str
    host: str
    path: str
    query: str = field(default="", repr=False)
    userinfo: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The URL for messages: without name, password and query."""
        return f"{self.scheme}://{self.host}" + (f"/{self.path.lstrip('/')}" if self.path else "")

    @property
    def full(self) -> str:
        """The URL for requests: with the query, but without name and password, which are sent in a header."""
        return self.shown + (f"?{self.query}" if self.query else "")

    @property
    def is_http(self) -> bool:
        """Whether the scheme is http or https. The path is then percent-encoded."""
        return self.scheme in HTTP

    @property
    def says_folder(self) -> bool:
        """Whether the text of the URL means a folder: it ends in a slash, or is a bucket or a repository."""
        is_whole = (self.scheme == "s3" and not self.path) or (self.scheme == "hf" and not self.on_hub[3])
        return is_whole or self.path.endswith("/")

    @property
    def as_folder(self) -> Url:
        """The URL as that of a folder, which ends in a slash."""
        return self if self.says_folder else replace(self, path=f"{self.path}/")

    @property
    def on_hub(self) -> tuple[str, str, str, str]:
        """The kind of repository on the Hub, its name, the revision (encoded as one segment), and the path in it."""
        kind, owner, *rest = [self.host, *self.path.strip("/").split("/")]
        if kind not in _HUB_KINDS:
            kind, owner, rest = "models", kind, [owner, *rest]
        repo, _, revision = (rest[0] if rest else "").partition("@")
        return kind, f"{owner}/{repo}" if repo else "", quote(unquote(revision), safe="") or "main", "/".join(rest[1:])

    def below(self, name: str) -> Url:
        """Return the URL of `name` in this folder, without the query, which is a signature of this URL only."""
        folder = f"{self.path.rstrip('/')}/" if self.path.strip("/") else ""
        return replace(self, path=folder + (quote(name) if self.is_http else name), query="")

    @property
    def parent(self) -> Url:
        """The URL of the folder that contains this URL, without the query."""
        folder, slash, _ = self.path.rstrip("/").rpartition("/")
        return replace(self, path=folder + slash, query="")


def parse(text: str) -> Url:
    """Return `text` as a URL. One slash after the scheme is accepted, because pathlib merges two slashes.

    Raises UsageError if the URL names no file, is chained (``zip::s3://…``), or has a host that programs read
    differently.
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
    if scheme.lower() != "file" and not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise UsageError("a URL with bytes that are not UTF-8", where=text, hint="write them as %XX")
    userinfo, _, host = host.rpartition("@")
    url = Url(scheme.lower(), host, path, (query[0] if query else None) or "", userinfo)
    has_path = url.on_hub[1] if url.scheme == "hf" else path or not url.is_http
    if not (host and has_path) and url.scheme != "file":
        expected = "hf://OWNER/REPO/PATH" if url.scheme == "hf" else "SCHEME://HOST/PATH"
        raise UsageError("a URL that names no file", where=f"{url.scheme}://{url.host}/{url.path}", expected=expected)
    return url


def is_readable_host(netloc: str) -> bool:
    r"""Return whether all programs read the same host and port in `netloc`.

    It must have no backslash and no space, and the port must be a number. With a backslash, browsers use the host
    before it, and urllib3 the host after the ``@``.
    """
    try:
        return "\\" not in netloc and netloc.isprintable() and " " not in netloc and urlsplit(f"//{netloc}").port != -1
    except ValueError:
        return False


def local_path(url: Url) -> Path | None:
    """Return the local path of a URL of the scheme ``file``, or None for other schemes."""
    if url.scheme != "file":
        return None
    folder = "" if url.host in ("localhost", "") else f"/{url.host}"  # file:/tmp/x has one slash
    return Path(unquote(f"{folder}/{url.path}"))


_SECRET_WORDS = ("TOKEN", "SECRET", "PASSW", "SIGNATURE", "API_KEY")  # in the names of variables
_LEAST = 3  # characters: shorter secrets would also match ordinary words


class ForeignError(Exception):
    """A replacement for an error of another library whose text contained secrets. Its text has them hidden."""


class Secrets:
    """The secrets in requests for `url`: those of the URL, the `others` in headers, and those in the environment."""

    def __init__(self, url: Url, *others: str) -> None:
        self._url, self._others = url, others

    def hidden(self, text: str) -> str:
        """Return `text` with an ellipsis in place of each secret."""
        text = redacted(text)
        for secret in sorted(self._known(), key=len, reverse=True):
            text = text.replace(secret, "…") if secret in text else text
        return text

    def _known(self) -> set[str]:
        """Return all secrets, in all spellings: plain, percent-encoded, and base64 as in the Basic scheme.

        Secrets shorter than three characters are left out.
        """
        query = self._url.query
        found = {query, *(each.partition("=")[2] for each in query.split("&"))}
        for who in (self._url.userinfo, *self._others):
            found |= {who, *who.split(":", 1)}
        for name, value in os.environ.items():
            if name.upper().endswith("_PROXY") and "@" in value:
                who = value.rpartition("@")[0].rpartition("/")[2]
                found |= {who, who.partition(":")[2]}
            elif any(word in name.upper() for word in _SECRET_WORDS):
                found.add(value)
        found |= {way(each) for each in found for way in (unquote, lambda text: quote(text, safe=""))}
        found |= {base64.b64encode(each.encode()).decode() for each in found if ":" in each}
        return {each for each in found if len(each) >= _LEAST}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Hide the secrets in an error that leaves the ``with`` block, and in the error that caused it."""
        try:
            yield
        except Exception as error:
            for name in ("what", "where", "expected", "got", "hint") if isinstance(error, CkptconvError) else ():
                if isinstance(text := getattr(error, name), str) and (hidden := self.hidden(text)) != text:
                    setattr(error, name, hidden)
            error.args = tuple(self.hidden(each) if isinstance(each, str) else each for each in error.args)
            if (cause := error.__cause__ or error.__context__) and self._are_in(cause):
                told = ForeignError(self.hidden(f"{type(cause).__name__}: {cause}"))
                error.__cause__ = told.with_traceback(cause.__traceback__)
            raise

    def _are_in(self, error: BaseException) -> bool:
        """Return whether the traceback text of `error`, with the errors that caused it, contains a secret."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return self.hidden(text) != text
