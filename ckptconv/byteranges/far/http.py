"""Ranges over HTTP (RFC 9110), and files on the Hub, which are such: urllib3 carries the requests.

Redirects are followed, but never from https to http nor to another scheme, and credentials stay with the host that they
are for. Each answer must be of the version that the first one was.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import json
import netrc
import os
import re
import time
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import urllib3

from ckptconv.byteranges.far.planning import KIB, POLICY
from ckptconv.byteranges.far.requests import Answer, Entry, Transient, Version, check_range, paged, received
from ckptconv.byteranges.far.urls import HTTP, Url, parse
from ckptconv.errors import (
    InputChangedError,
    InputError,
    MissingInputError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ckptconv.hints import option

__all__ = ["HttpTransport", "hub_entries", "hub_transport"]

_CHUNK = 256 * KIB
_GZIP = 16 + zlib.MAX_WBITS  # with gzip's header and its checksum
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_HUB = "https://huggingface.co"
_PAGE = 16 << 20  # bytes of a page of a list: the Hub's have 1,000 entries
_DOWNLOADS = option("download") + " downloads all of it first"
_LONGEST_WAIT = 3600.0  # seconds that a server can ask for; more is a lie, and no deadline is that long


class HttpTransport:
    """The file at `url`. `token` is sent to its host as a bearer's."""

    def __init__(self, url: Url, shown: object, token: str | None = None) -> None:
        self._start, self._shown = url, shown
        self._at = url.full  # where redirects have led
        self._authorization = f"Bearer {token}" if token else _basic(url)
        self._pools: dict[str | None, urllib3.PoolManager] = {}  # by the proxy

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """As :class:`~ckptconv.byteranges.far.requests.Transport` has it."""
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "ckptconv"}
        if expected and expected.strong_etag:
            headers |= {"If-Match": expected.strong_etag, "If-Range": expected.strong_etag}
        elif expected and expected.modified:
            headers |= {"If-Unmodified-Since": expected.modified}
        with self._as_error(), self._followed(headers) as response:
            return self._answer(response, start, stop, expected, deadline)

    @contextlib.contextmanager
    def whole(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        """How many bytes the server says that it will send, or 0, and all bytes of the file, a piece at a time.

        Raises Transient, InputError, also where pieces are asked for.
        """
        with self._as_error(), self._followed({"Accept-Encoding": "identity", "User-Agent": "ckptconv"}) as response:
            if response.status != 200:
                raise self._refused(response, 0, None)
            chunks = iter(lambda: response.read1(_CHUNK), b"")
            if (coding := _coding(response)) == "gzip":
                chunks = self._unzipped(chunks)
            elif coding != "identity":
                what, hint = "the server compresses what it sends, unasked", "download the file first"
                raise UnsupportedError(what, where=self._shown, expected="none, or gzip", got=coding, hint=hint)
            length = response.headers.get("Content-Length", "")
            yield int(length) if length.isascii() and length.isdigit() else 0, chunks

    def _unzipped(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """What the gzip'd `chunks` are of, in pieces no larger than a chunk. Raises TransferError."""
        decoder = zlib.decompressobj(_GZIP)
        try:
            for chunk in chunks:
                piece = decoder.decompress(chunk, _CHUNK)
                yield piece
                while not decoder.eof and (decoder.unconsumed_tail or len(piece) == _CHUNK):
                    piece = decoder.decompress(decoder.unconsumed_tail, _CHUNK)
                    yield piece
                if decoder.unused_data:
                    raise TransferError("the server sends more behind what it compressed", where=self._shown)
        except zlib.error as error:
            raise TransferError(f"what the server compressed is damaged: {error}", where=self._shown) from error
        if not decoder.eof:
            raise Transient("the connection was cut, or what the server compressed has no end")

    def page(self, deadline: float) -> tuple[list[dict[str, Any]], str | None]:
        """A page of the Hub's lists, and where the next one is.

        Raises Transient, InputError.
        """
        with self._as_error(), self._followed({"Accept-Encoding": "identity", "User-Agent": "ckptconv"}) as response:
            if response.status != 200:
                raise self._refused(response, 0, None)
            chunks = iter(lambda: response.read1(_CHUNK), b"")
            found = _parsed(received(chunks, None, deadline, most=_PAGE), self._shown)
            return found, self._next_page(response.headers.get("Link", ""))

    def _next_page(self, link: str) -> str | None:
        """The path of the page that a Link calls the next one, which must be the same server's (RFC 8288)."""
        found = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', link)
        if not found:
            return None
        before, after = urlsplit(self._start.full), urlsplit(urljoin(self._start.full, str(found[1])))
        if (before.scheme, before.netloc) != (after.scheme, after.netloc):
            raise TransferError("the list goes on at another server", where=self._shown, got=after.netloc)
        base = urlsplit(os.environ.get("HF_ENDPOINT", _HUB)).path.rstrip("/")
        return f"{after.path[len(base) :].lstrip('/')}?{after.query}"

    def close(self) -> None:
        """Let connections go."""
        for pool in self._pools.values():
            pool.clear()

    @contextlib.contextmanager
    def _as_error(self) -> Iterator[None]:
        """Raise in our words what urllib3 raises meanwhile."""
        try:
            yield
        except urllib3.exceptions.SSLError as error:
            hint = "if you trust the server, SSL_CERT_FILE names the file that its certificate is in"
            raise TransferError(f"no secure connection: {error}", where=self._shown, hint=hint) from error
        except (urllib3.exceptions.LocationValueError, UnicodeError) as error:
            raise UsageError(f"no URL: {error}", where=self._shown) from error
        except urllib3.exceptions.HTTPError as error:
            raise Transient(_reason(error)) from error

    @contextlib.contextmanager
    def _followed(self, headers: dict[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        """The answer behind all redirects. Where the place that they led to is closed by now, they are followed anew:
        the Hub's are signed for an hour.
        """
        response = self._request(self._at, headers)
        if response.status in (401, 403) and self._at != self._start.full:
            response.close()
            self._at = self._start.full
            response = self._request(self._at, headers)
        at = self._at
        for _ in range(POLICY.redirects):
            if response.status not in _REDIRECTS:
                break
            response.close()  # its body can be endless
            at = self._checked(at, urljoin(at, response.headers.get("Location", "")))
            response = self._request(at, headers)
        try:
            if response.status in _REDIRECTS:
                what = f"more than {POLICY.redirects} redirects"
                raise TransferError(what, where=self._shown, hint="the server sends its visitors round in a circle")
            self._at = at
            yield response
        except BaseException:
            response.close()  # what is left of it is not wanted
            raise
        response.release_conn()

    def _request(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        if self._authorization and urlsplit(url).netloc == urlsplit(self._start.full).netloc:
            headers = {**headers, "Authorization": self._authorization}
        proxy = _proxy(url)  # which a redirect can change
        pool = self._pools.get(proxy) or self._pools.setdefault(proxy, _pool(proxy))
        return pool.request("GET", url, headers=headers, redirect=False, preload_content=False, decode_content=False)

    def _checked(self, before: str, after: str) -> str:
        """`after`, to which a server leads from `before`. Raises TransferError where nobody should follow."""
        old, new = urlsplit(before).scheme.lower(), urlsplit(after).scheme.lower()
        if new not in HTTP or (old == "https" and new == "http"):
            raise TransferError(
                "the server leads to a place that is not followed", where=self._shown, expected=old, got=f"{new}://…"
            )
        return after

    def _answer(
        self, response: urllib3.BaseHTTPResponse, start: int, stop: int, expected: Version | None, deadline: float
    ) -> Answer:
        said = response.headers
        etag, modified = said.get("ETag"), said.get("Last-Modified")
        if response.status == 416 and start == 0 and said.get("Content-Range", "").endswith("*/0"):
            return Answer(b"", Version(0, etag, modified))
        if response.status != 206:
            raise self._refused(response, start, expected)
        if (coding := _coding(response)) != "identity":
            what, hint = "the server compresses what it sends, unasked", None if expected else _DOWNLOADS
            raise UnsupportedError(what, where=self._shown, got=coding, hint=hint)
        end, size = check_range(said.get("Content-Range"), start, stop, self._shown)
        length = said.get("Content-Length")
        if length is not None and length != str(end - start):
            raise TransferError(
                "the server says two lengths", where=self._shown, expected=f"{end - start} bytes", got=length
            )
        return Answer(
            received(iter(lambda: response.read1(_CHUNK), b""), end - start, deadline), Version(size, etag, modified)
        )

    def _refused(self, response: urllib3.BaseHTTPResponse, start: int, expected: Version | None) -> Exception:
        """Why an answer without the bytes has none."""
        status, where = response.status, self._shown
        got = f"{status} {response.reason or ''}".strip()
        if status == 200 and expected is None:
            what = "the server sends whole files alone, and no ranges of them"
            return UnsupportedError(what, where=where, hint=_DOWNLOADS)
        if status in (200, 412, 416):  # 200 because of If-Range
            return InputChangedError("the file changed while it was read", where=f"{where} at byte {start}", got=got)
        if status in (404, 410):
            return MissingInputError("cannot be read: the server has no such file", where=where, got=got)
        if status == 407:
            hint = "they belong in the proxy's URL, in HTTPS_PROXY or HTTP_PROXY"
            what = "cannot be read: the proxy asks for a name and a password"
            return InputError(what, where=where, got=got, hint=hint)
        if status in (401, 403):
            hint = "log in as for other programs: ~/.netrc, for the Hub HF_TOKEN or hf auth login"
            return InputError("cannot be read: the server does not let us", where=where, got=got, hint=hint)
        if status in _AGAIN:
            return Transient(f"the server answers {got}", _seconds(response.headers.get("Retry-After")))
        return TransferError("cannot be read: the server refuses", where=where, got=got)


def hub_transport(url: Url, shown: object) -> HttpTransport:
    """The file ``hf://[datasets/|spaces/]OWNER/REPO[@REVISION]/PATH``, by the Hub's own URLs and with its token."""
    kind, repo, revision, path = url.on_hub
    folder = "" if kind == "models" else f"{kind}/"
    return _on_hub(f"{folder}{repo}/resolve/{revision}/{path}", shown)


def hub_entries(url: Url, shown: object) -> Iterator[Entry]:
    """The files in the folder `url` of a repository, as the Hub's tree API lists them.

    Raises InputError.
    """
    kind, repo, revision, path = url.on_hub
    root = f"{path}/" if path else ""

    def ask(at: str, deadline: float) -> tuple[list[Entry], str | None]:
        with contextlib.closing(_on_hub(at, shown)) as transport:
            page, after = transport.page(deadline)
        files = [each for each in page if each.get("type") == "file" and str(each.get("path")).startswith(root)]
        sizes = [size if isinstance(size := each.get("size"), int) else 0 for each in files]
        return [Entry(str(each["path"])[len(root) :], size) for each, size in zip(files, sizes, strict=True)], after

    first = f"api/{kind}/{repo}/tree/{revision}{f'/{quote(path)}' if path else ''}?recursive=true"
    return paged(ask, first, shown)


def _on_hub(path: str, shown: object) -> HttpTransport:
    endpoint = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    return HttpTransport(parse(f"{endpoint}/{path}"), shown, _hub_token())


def _parsed(data: bytes, where: object) -> list[dict[str, Any]]:
    """The JSON of a list. Raises TransferError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise TransferError("the server sends no list of files", where=where)
    return found


def _coding(response: urllib3.BaseHTTPResponse) -> str:
    """How what a server sends is compressed, by its name today."""
    return str(response.headers.get("Content-Encoding", "identity")).lower().removeprefix("x-")


def _hub_token() -> str | None:
    """The token that the Hub's own tools would send."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return os.environ.get("HF_TOKEN")
    return get_token()


def _basic(url: Url) -> str | None:
    """What the URL, or ~/.netrc, says who we are."""
    if url.userinfo:
        return "Basic " + base64.b64encode(unquote(url.userinfo).encode()).decode()
    try:
        found = netrc.netrc().authenticators(urlsplit(url.full).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return "Basic " + base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode() if found else None


def _proxy(url: str) -> str | None:
    """The proxy for `url`, by the variables that all programs read."""
    at = urlsplit(url)
    if urllib.request.proxy_bypass(at.netloc.rpartition("@")[2]):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(at.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _pool(proxy: str | None) -> urllib3.PoolManager:
    """What keeps connections, by way of `proxy` if there is one, whose URL can say who we are there."""
    timeout = urllib3.Timeout(connect=POLICY.silence, read=POLICY.silence)
    kept: dict[str, Any] = {"maxsize": POLICY.concurrency, "timeout": timeout, "retries": False}
    if proxy is None:
        return urllib3.PoolManager(**kept)
    who = urllib3.util.parse_url(proxy).auth
    return urllib3.ProxyManager(
        proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=unquote(who)) if who else None, **kept
    )


def _reason(error: Exception) -> str:
    """What is wrong, without the URL, which can be signed."""
    words = {
        urllib3.exceptions.ReadTimeoutError: f"the server sent nothing for {POLICY.silence:g} s",
        urllib3.exceptions.ConnectTimeoutError: f"no connection within {POLICY.silence:g} s",
        urllib3.exceptions.NewConnectionError: "no connection to the server",
        urllib3.exceptions.NameResolutionError: "there is no such host",
        urllib3.exceptions.ProxyError: "no connection through the proxy that HTTPS_PROXY or HTTP_PROXY names",
        urllib3.exceptions.ProtocolError: "the connection was cut, or what came is no HTTP",
    }
    known = next((text for kind, text in reversed(words.items()) if isinstance(error, kind)), None)
    return known or f"the connection failed: {type(error).__name__}"


def _seconds(after: str | None) -> float | None:
    """What a Retry-After says, which is a number of seconds or a date."""
    if after is None:
        return None
    if after.strip().isdigit():
        return min(float(after), _LONGEST_WAIT)
    try:
        return email.utils.parsedate_to_datetime(after).timestamp() - time.time()
    except ValueError:
        return None
