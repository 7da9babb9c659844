"""Ranges of files over HTTP (RFC 9110), with urllib3, and files on the Hub.

Redirects are followed, but never from https to http or to another scheme. Credentials are sent only to the host that
they are for. All answers for a file must be of the same version.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import io
import json
import logging
import math
import netrc
import os
import re
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import urllib3

from ckptconv.errors import (
    CkptconvError,
    InputChangedError,
    MissingInputError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ckptconv.hints import option
from ckptconv.stores.remote import FarPath, RemoteStore
from ckptconv.stores.requests import (
    KIB,
    POLICY,
    Answer,
    Deadline,
    Entry,
    Transient,
    Version,
    check_range,
    number,
    paged,
    received,
)
from ckptconv.stores.urls import HTTP, Secrets, Url, is_readable_host, parse

_CURRENT = threading.local()


def _is_of_others(record: logging.LogRecord) -> bool:  # noqa: ARG001 - what these log can have the secrets of a request
    return _deadline() is None


def _deadline() -> Deadline | None:
    return getattr(_CURRENT, "deadline", None)


def silence(library: str) -> None:
    """Drop what the loggers of the imported `library` log about requests of this module, in all threads."""
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith(f"{library}."):
            logging.getLogger(name).addFilter(_is_of_others)


silence("urllib3")


@contextlib.contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Set the `deadline` for all answers that this thread begins to read inside the ``with`` block."""
    before, _CURRENT.deadline = _deadline(), deadline
    try:
        yield
    finally:
        _CURRENT.deadline = before


class _Reader(io.RawIOBase):
    """The bytes that arrive at `socket`. Reading after the deadline of :func:`until`, or more, raises Transient."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._received = socket, 0
        self._deadline = _deadline() or Deadline(math.inf)
        self._raw = socket.makefile("rb", buffering=0)  # keeps the socket open until it is closed itself

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline.at - time.monotonic()
        if left > 0:
            self._socket.settimeout(min(POLICY.silence, left))
            try:
                count: int | None = self._raw.readinto(buffer)
            except TimeoutError:
                if left > POLICY.silence:
                    raise
            else:
                self._received += count or 0
                if self._received > self._deadline.most:
                    raise Transient(f"the server sent more than {self._deadline.most:,} bytes")
                return count
        raise Transient(f"the server is too slow: {self._received:,} bytes came")

    def close(self) -> None:
        self._raw.close()
        super().close()


class BoundedSocket:
    """A socket. The answers that are read from it end by the deadline of :func:`until`."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def makefile(self, _: str, buffering: int = -1) -> io.BufferedIOBase | io.RawIOBase:
        """Return a file to read an answer from. Without `buffering`, it reads no byte ahead."""
        reader = _Reader(self._socket)
        return io.BufferedReader(reader) if buffering else reader


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **how: Any) -> None:
        super().__init__(BoundedSocket(sock), *args, **how)  # type: ignore[arg-type]


class _Connection(urllib3.connection.HTTPConnection):  # type: ignore[misc]
    response_class = _Response


class _SecureConnection(urllib3.connection.HTTPSConnection):  # type: ignore[misc]
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _SecureConnection


def proxy_for(url: str) -> str | None:
    """Return the proxy for `url`, or None. The environment variables are those that all programs read.

    Raises UsageError if the proxy's URL cannot be used.
    """
    at = urlsplit(url)
    if urllib.request.proxy_bypass(at.netloc.rpartition("@")[2]):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(at.scheme) or proxies.get("all")
    if proxy is None:
        return None
    scheme, slashes, rest = proxy.rpartition("://")
    if (scheme.lower() or "http") not in HTTP or not is_readable_host(rest.partition("/")[0]):
        what = "ckptconv cannot use the proxy in HTTPS_PROXY or HTTP_PROXY"
        raise UsageError(what, expected="http://HOST:PORT or https://HOST:PORT")
    return proxy if slashes else f"http://{rest}"


def pool(proxy: str | None) -> urllib3.PoolManager:
    """Return a pool of connections.

    They go through the URL `proxy`, which can contain a name and a password, unless it is None.
    """
    timeout = urllib3.Timeout(connect=POLICY.silence, read=POLICY.silence)
    kept: dict[str, Any] = {"maxsize": POLICY.concurrency, "timeout": timeout, "retries": False}
    if proxy is None:
        manager = urllib3.PoolManager(**kept)
    else:
        who = urllib3.util.parse_url(proxy).auth
        headers = urllib3.make_headers(proxy_basic_auth=unquote(who)) if who else None
        manager = urllib3.ProxyManager(proxy, proxy_headers=headers, **kept)
    manager.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
    return manager


_CHUNK = 256 * KIB
_GZIP = 16 + zlib.MAX_WBITS  # with gzip's header and its checksum
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_HUB = "https://huggingface.co"
PAGE = 16 << 20  # bytes of a page of a list: the Hub's and S3's have 1,000 entries
_PLAINLY = {"Accept-Encoding": "identity", "User-Agent": "ckptconv"}
_LONGEST_WAIT = 3600.0  # seconds that a server can ask for; more is a lie, and no deadline is that long


def _hint_to_download() -> str:
    return option("download") + " downloads the whole file first"


class HttpTransport:
    """A reader of ranges of the file at `url`.

    Messages call the file `shown`. `token` is sent to the host of `url` as a bearer token. Without it, the name and the
    password of the URL or of ``~/.netrc`` are sent.
    """

    def __init__(self, url: Url, shown: object, token: str | None = None) -> None:
        self._start, self._shown = url, shown
        self._at = url.full  # the last URL of the redirects
        who = _who(url)
        self._authorization = f"Bearer {token}" if token else who and f"Basic {base64.b64encode(who.encode()).decode()}"
        self.secrets = Secrets(url, token or "", who or "")
        self._pools: dict[str | None, urllib3.PoolManager] = {}  # by the proxy

    def get(self, start: int, stop: int, expected: Version | None, deadline: float) -> Answer:
        """Return the bytes from `start` to `stop`, as :class:`~ckptconv.stores.requests.Transport` describes it.

        With `expected`, the server is asked for this version only.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}", **_PLAINLY}
        if expected and expected.strong_etag:
            headers |= {"If-Match": expected.strong_etag, "If-Range": expected.strong_etag}
        elif expected and expected.modified:
            headers |= {"If-Unmodified-Since": expected.modified}
        with self._as_error(), until(Deadline(deadline)), self._followed(headers) as response:
            return self._answer(response, start, stop, expected, deadline)

    @contextlib.contextmanager
    def whole(self, deadline: Deadline) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield the number of bytes that the server announces, or 0, and an iterator over all bytes of the file.

        An answer that is compressed with gzip is inflated. Raises Transient, InputError, also while the iterator is
        read, and after `deadline`.
        """
        with contextlib.ExitStack() as stack:
            with self._as_error(), until(deadline):
                response = stack.enter_context(self._followed(_PLAINLY))
                if response.status != 200:
                    raise self._refused(response, 0, None)
                chunks = self._chunks(response)
                if (coding := _coding(response)) == "gzip":
                    chunks = self._unzipped(chunks)
                elif coding != "identity":
                    what, hint = "the server sends compressed data that was not requested", "download the file first"
                    raise UnsupportedError(what, where=self._shown, expected="none, or gzip", got=coding, hint=hint)
            yield number(response.headers.get("Content-Length")) or 0, chunks

    def _chunks(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        """Yield the bytes of `response` in chunks. Raises Transient, TransferError."""
        while True:
            with self._as_error():
                if not (chunk := response.read1(_CHUNK)):
                    return
            yield chunk

    def _unzipped(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the inflated content of `chunks`, in pieces of at most 256 KiB.

        Raises Transient if the data ends early, and TransferError if it is damaged.
        """
        decoder = zlib.decompressobj(_GZIP)
        try:
            for chunk in chunks:
                piece = decoder.decompress(chunk, _CHUNK)
                yield piece
                while not decoder.eof and (decoder.unconsumed_tail or len(piece) == _CHUNK):
                    piece = decoder.decompress(decoder.unconsumed_tail, _CHUNK)
                    yield piece
                if decoder.unused_data:
                    raise TransferError("the server sends more data after the compressed data", where=self._shown)
        except zlib.error as error:
            raise TransferError(
                f"the compressed data from the server is damaged: {error}", where=self._shown
            ) from error
        if not decoder.eof:
            raise Transient("the connection was cut, or the compressed data is incomplete")

    def page(self, deadline: float) -> tuple[list[dict[str, Any]], str | None]:
        """Return the entries of a page of the Hub's file list, and the path of the next page or None.

        Raises Transient, InputError.
        """
        with self._as_error(), until(Deadline(deadline)), self._followed(_PLAINLY) as response:
            if response.status != 200:
                raise self._refused(response, 0, None)
            found = _parsed(received(self._chunks(response), None, deadline, most=PAGE), self._shown)
            return found, self._next_page(response.headers.get("Link", ""))

    def _next_page(self, link: str) -> str | None:
        """Return the path of the next page of a listing, or None if there is no next page.

        `link` is the value of the header Link (RFC 8288). Raises TransferError if the page is on another server.
        """
        found = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', link)
        if not found:
            return None
        before, after = urlsplit(self._start.full), urlsplit(self._joined(self._start.full, str(found[1])))
        if (before.scheme, before.netloc) != (after.scheme, after.netloc):
            raise TransferError("the rest of the list is on another server", where=self._shown, got=after.hostname)
        base = urlsplit(os.environ.get("HF_ENDPOINT", _HUB)).path.rstrip("/")
        return f"{after.path[len(base) :].lstrip('/')}?{after.query}"

    def close(self) -> None:
        """Close all connections."""
        for each in self._pools.values():
            each.clear()

    @contextlib.contextmanager
    def _as_error(self) -> Iterator[None]:
        """Turn errors of urllib3 and of Python's HTTP parser into a CkptconvError, or into Transient.

        Transient is for errors that may not occur again.
        """
        with self.secrets.kept():
            try:
                yield
            except CkptconvError:
                raise
            except urllib3.exceptions.SSLError as error:
                hint = "if you trust the server, set SSL_CERT_FILE to the file with its certificate"
                what = f"no secure connection: {self.secrets.hidden(str(error))}"
                raise TransferError(what, where=self._shown, hint=hint) from error
            except urllib3.exceptions.LocationValueError as error:
                raise TransferError("the server sent an invalid URL", where=self._shown) from error
            except urllib3.exceptions.HTTPError as error:
                raise Transient(_reason(error)) from error
            except (ValueError, OverflowError, http.client.HTTPException) as error:
                raise TransferError("the server sent an invalid answer", where=self._shown) from error

    @contextlib.contextmanager
    def _followed(self, headers: dict[str, str]) -> Iterator[urllib3.BaseHTTPResponse]:
        """Yield the answer to a GET request with `headers`, after all redirects.

        The last URL is remembered for later requests. If it refuses a request (401, 403), the redirects are followed
        from the start again, because those of the Hub are signed for an hour only.
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
            response.close()  # its body may never end
            at = self._checked(at, self._joined(at, response.headers.get("Location", "")))
            response = self._request(at, headers)
        try:
            if response.status in _REDIRECTS:
                what = f"more than {POLICY.redirects} redirects"
                raise TransferError(what, where=self._shown, hint="the server redirects in a circle")
            self._at = at
            yield response
        except BaseException:
            response.close()  # the rest is not needed
            raise
        response.release_conn()

    def _request(self, url: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        if self._authorization and urlsplit(url).netloc == urlsplit(self._start.full).netloc:
            headers = {**headers, "Authorization": self._authorization}
        proxy = proxy_for(url)  # a redirect can change it
        manager = self._pools.get(proxy) or self._pools.setdefault(proxy, pool(proxy))
        return manager.request("GET", url, headers=headers, redirect=False, preload_content=False, decode_content=False)

    def _joined(self, base: str, place: str) -> str:
        """Return the URL `place`, from a header, made absolute with `base`.

        Raises TransferError if it is not a valid URL.
        """
        with contextlib.suppress(ValueError):
            joined = urljoin(base, place)
            if is_readable_host(urlsplit(joined).netloc):
                return joined
        raise TransferError("the server sent an invalid URL", where=self._shown)

    def _checked(self, before: str, after: str) -> str:
        """Return the URL `after`, to which the server at `before` redirects.

        Raises TransferError if its scheme is not HTTP, or if the redirect leads from https to http.
        """
        old, new = urlsplit(before).scheme.lower(), urlsplit(after).scheme.lower()
        if new not in HTTP or (old == "https" and new == "http"):
            raise TransferError(
                "the server redirects to a URL that is not allowed", where=self._shown, expected=old, got=f"{new}://…"
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
            what, hint = (
                "the server sends compressed data that was not requested",
                None if expected else _hint_to_download(),
            )
            raise UnsupportedError(what, where=self._shown, got=coding, hint=hint)
        end, size = check_range(said.get("Content-Range"), start, stop, self._shown)
        length = said.get("Content-Length")
        if length is not None and number(length) != end - start:
            raise TransferError(
                "the server sends two different lengths", where=self._shown, expected=f"{end - start} bytes", got=length
            )
        return Answer(received(self._chunks(response), end - start, deadline), Version(size, etag, modified))

    def _refused(self, response: urllib3.BaseHTTPResponse, start: int, expected: Version | None) -> Exception:
        """Return the exception for `response`, an answer without the requested bytes, which begin at `start`.

        It is UnsupportedError, InputChangedError, MissingInputError, Transient or TransferError. `expected` is the
        version of the first answer, or None for the first request.
        """
        status, where = response.status, self._shown
        got = f"{status} {response.reason or ''}".strip()
        if status == 200 and expected is None:
            what = "the server does not support range requests"
            return UnsupportedError(what, where=where, hint=_hint_to_download())
        if status == 200 and _is_same(response.headers, expected):
            return Transient("the server sends the whole file instead of a range")
        if status in (200, 412, 416):  # 200 because of If-Range
            return InputChangedError("the file changed while it was read", where=f"{where} at byte {start}", got=got)
        if status in (404, 410):
            return MissingInputError("cannot be read: the server has no such file", where=where, got=got)
        if status == 407:
            hint = "they belong in the proxy's URL, in HTTPS_PROXY or HTTP_PROXY"
            what = "cannot be read: the proxy asks for a name and a password"
            return TransferError(what, where=where, got=got, hint=hint)
        if status in (401, 403):
            hint = "log in as for other programs: ~/.netrc, for the Hub HF_TOKEN or hf auth login"
            return TransferError("cannot be read: the server refuses", where=where, got=got, hint=hint)
        if status in _AGAIN:
            return Transient(f"the server answers {got}", _seconds(response.headers.get("Retry-After")))
        return TransferError("cannot be read: the server refuses", where=where, got=got)


class HttpStore(RemoteStore):
    """The read-only store of web servers and the Hub."""

    def transport(self, path: FarPath) -> HttpTransport:
        """Return a reader of ranges of the file `path`, which is on a web server or on the Hub.

        A file on the Hub is read with the user's token.
        """
        if path.url.is_http:
            return HttpTransport(path.url, path)
        kind, repo, revision, name = path.url.on_hub
        return _on_hub(f"{'' if kind == 'models' else f'{kind}/'}{repo}/resolve/{revision}/{quote(name)}", path)

    def entries(self, folder: FarPath) -> Iterator[Entry]:
        """Return the files in `folder` of a repository on the Hub and in its subfolders.

        Raises InputError if they cannot be listed, and UnsupportedError for a web server, which lists no files.
        """
        if folder.url.is_http:
            raise UnsupportedError(
                "web servers do not list the files in a folder",
                where=folder,
                hint="give the URL of a file in it; for a sharded set, of its index (model.safetensors.index.json)",
            )
        return _hub_entries(folder)


STORE = HttpStore()


def _hub_entries(folder: FarPath) -> Iterator[Entry]:
    """Yield the files in `folder` of a repository and in its subfolders, from the Hub's tree API.

    Raises InputError.
    """
    kind, repo, revision, path = folder.url.on_hub
    root = f"{path}/" if path else ""

    def ask(at: str, deadline: float) -> tuple[list[Entry], str | None]:
        with contextlib.closing(_on_hub(at, folder)) as transport:
            page, after = transport.page(deadline)
        files = [each for each in page if each.get("type") == "file" and each["path"].startswith(root)]
        sizes = [number(str(each.get("size"))) or 0 for each in files]
        return [Entry(each["path"][len(root) :], size) for each, size in zip(files, sizes, strict=True)], after

    first = f"api/{kind}/{repo}/tree/{revision}{f'/{quote(path)}' if path else ''}?recursive=true"
    return paged(ask, first, folder)


def _on_hub(path: str, shown: object) -> HttpTransport:
    endpoint = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    return HttpTransport(parse(f"{endpoint}/{path}"), shown, _hub_token())


def _is_same(headers: Any, version: Version | None) -> bool:
    """Return whether an answer with `headers`, which contains the complete file, is of `version`.

    False if the headers have neither an ETag nor a date.
    """
    said = headers.get("ETag"), headers.get("Last-Modified")
    if version is None or said != (version.etag, version.modified) or said == (None, None):
        return False
    return number(headers.get("Content-Length")) in (None, version.size)


def _parsed(data: bytes, where: object) -> list[dict[str, Any]]:
    """Return the entries in `data`, a JSON list of files. Raises TransferError if it is anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(each) is dict and type(each.get("path")) is str for each in found):
        raise TransferError("the server sends no list of files", where=where)
    return found


def _coding(response: urllib3.BaseHTTPResponse) -> str:
    """Return the compression of `response`: ``gzip``, ``identity`` or another name.

    The old name ``x-gzip`` becomes ``gzip``.
    """
    return str(response.headers.get("Content-Encoding", "identity")).lower().removeprefix("x-")


def _hub_token() -> str | None:
    """Return the user's token for the Hub, as the Hub's own tools find it, or None."""
    try:
        from huggingface_hub import get_token
    except ImportError:
        return os.environ.get("HF_TOKEN")
    return get_token()


def _who(url: Url) -> str | None:
    """Return ``NAME:PASSWORD`` for `url`: from the URL itself, or from ~/.netrc for its host.

    None if there is neither.
    """
    if url.userinfo:
        return unquote(url.userinfo)
    try:
        found = netrc.netrc().authenticators(urlsplit(url.full).hostname or "")
    except (OSError, UnicodeError, netrc.NetrcParseError):
        return None
    return f"{found[0]}:{found[2]}" if found else None


def _reason(error: Exception) -> str:
    """Return a description of `error` of urllib3. It omits the URL, which can be signed."""
    words = {
        urllib3.exceptions.ReadTimeoutError: f"the server sent nothing for {POLICY.silence:g} s",
        urllib3.exceptions.ConnectTimeoutError: f"no connection within {POLICY.silence:g} s",
        urllib3.exceptions.NewConnectionError: "no connection to the server",
        urllib3.exceptions.NameResolutionError: "there is no such host",
        urllib3.exceptions.ProxyError: "no connection through the proxy that HTTPS_PROXY or HTTP_PROXY names",
        urllib3.exceptions.ProtocolError: "the connection was cut, or the answer is not HTTP",
    }
    known = next((text for kind, text in reversed(words.items()) if isinstance(error, kind)), None)
    return known or f"the connection failed: {type(error).__name__}"


def _seconds(after: str | None) -> float | None:
    """Return the seconds to wait by `after`, the value of a Retry-After header: a number or a date.

    None if it is neither. The result is at most an hour.
    """
    seconds: float | None = number(after)
    if seconds is None and after:
        with contextlib.suppress(ValueError, OverflowError, TypeError, OSError):  # a year out of range
            seconds = email.utils.parsedate_to_datetime(after).timestamp() - time.time()
    return None if seconds is None else min(seconds, _LONGEST_WAIT)
