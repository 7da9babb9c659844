"""A small HTTP server on the loopback interface for files in memory. It counts the bytes that it sends, and can answer
falsely in many ways.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from itertools import count as count_from
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from zlib import crc32

__all__ = ["LIES", "SLOW_DOWNLOADS", "Exchange", "FileServer", "Seen", "in_background", "serving"]

_ENDS = 1 << 16  # the ETag covers this many bytes at each end, because files can be gigabytes long
_TREE = re.compile(r"/api/(models|datasets|spaces)/([^/]+/[^/]+)/tree/([^/]+)(/.*)?")
_MODIFIED = "Mon, 02 Nov 2026 10:00:00 GMT"


class Seen(NamedTuple):
    """A request, and the number of bytes of a file that were sent for it."""

    path: str
    headers: dict[str, str]
    status: int
    sent: int


@dataclass
class FileServer:
    """A server of `files`, given by path.

    From the request number `honest` on, the server answers with `lie`. Each answer is delayed by `latency` seconds.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    lie: Callable[[Exchange], None] | None = None
    honest: int = 0
    latency: float = 0.0
    etags: bool = True
    page: int = 1000  # entries in one page of a list
    lists: Callable[..., None] | None = None  # replaces the true list of files
    seen: list[Seen] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None

    def url(self, name: str) -> str:
        """Return the URL of the file `name`."""
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/{name}"

    @property
    def sent(self) -> int:
        """The total number of bytes of files that were sent."""
        return sum(each.sent for each in self.seen)


class Exchange:
    """The request number `number`, for the range from `start` to `stop` of `data`, and ways to answer it."""

    def __init__(self, handler: _Handler, data: bytes, number: int) -> None:
        self.handler, self.data, self.number = handler, data, number
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        self.start = int(found[1]) if found else 0
        self.stop = min(int(found[2]) + 1, len(data)) if found else len(data)
        self.is_range = bool(found)

    @property
    def part(self) -> bytes:
        """The requested bytes."""
        return self.data[self.start : self.stop]

    def headers(self, **more: str) -> dict[str, str]:
        """Return the headers of a correct answer, changed by `more`. An empty text removes a header."""
        said = {
            "Content-Range": f"bytes {self.start}-{self.stop - 1}/{len(self.data)}",
            "Content-Length": str(self.stop - self.start),
            "Last-Modified": _MODIFIED,
        }
        if self.handler.files.etags:
            said["ETag"] = f'"{len(self.data)}-{crc32(self.data[:_ENDS] + self.data[-_ENDS:]):08x}"'
        said |= {name.replace("_", "-"): text for name, text in more.items()}
        return {name: text for name, text in said.items() if text}

    def list(self, files: dict[str, bytes], *, most: int) -> None:
        """Answer like the Hub's tree API: with a page of the `files` of a repository, and a link to the next page."""
        at = urlsplit(self.handler.path)
        kind, repo, revision, folder = _TREE.fullmatch(at.path).groups()  # type: ignore[union-attr]
        root = f"{'' if kind == 'models' else f'{kind}/'}{repo}/resolve/{unquote(revision)}/"
        mine = {name[len(root) :]: len(data) for name, data in files.items() if name.startswith(root)}
        found = {name: size for name, size in mine.items() if name.startswith(unquote(folder or "").strip("/"))}
        after = int(parse_qs(at.query).get("cursor", ["0"])[0])
        page = [{"type": "file", "path": name, "size": size} for name, size in [*found.items()][after : after + most]]
        page += [{"type": "directory", "path": name} for name in {name.rpartition("/")[0] for name in found}]
        link = f'<http://127.0.0.1:{self.handler.files.port}{at.path}?recursive=true&cursor={after + most}>; rel="next"'
        body = json.dumps(page).encode()
        more = {"Link": link} if after + most < len(found) else {}
        self.send(200 if found else 404, {"Content-Length": str(len(body)), **more}, body)

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Send an answer with `status`, `headers` and `body`, and record the request."""
        handler = self.handler
        handler.files.seen.append(Seen(handler.path, dict(handler.headers.items()), status, len(body)))
        handler.send_response(status)
        for name, text in headers.items():
            handler.send_header(name, text)
        handler.end_headers()
        handler.wfile.write(body)

    def answer(self) -> None:
        """Answer as RFC 9110 requires."""
        wanted = self.handler.headers
        honest = self.headers()
        if wanted.get("If-Match", honest.get("ETag")) != honest.get("ETag"):
            self.send(412, {"Content-Length": "0"}, b"")
        elif not self.is_range:
            self.send(200, self.headers(Content_Range=""), self.data)
        elif self.start >= len(self.data):
            self.send(416, {"Content-Range": f"bytes */{len(self.data)}", "Content-Length": "0"}, b"")
        else:
            self.send(206, honest, self.part)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits about 40 ms for the acknowledgment of its header
    files: FileServer

    def do_GET(self) -> None:
        files = self.files
        number = len(files.seen)
        time.sleep(files.latency)
        if _TREE.fullmatch(urlsplit(self.path).path):
            (files.lists or Exchange.list)(Exchange(self, b"", number), files.files, most=files.page)
            return
        data = files.files.get(unquote(urlsplit(self.path).path).lstrip("/"))
        if data is None:
            Exchange(self, b"", number).send(404, {"Content-Length": "9"}, b"not found")
            return
        exchange = Exchange(self, data, number)
        if files.lie and number >= files.honest:
            with contextlib.suppress(OSError):  # the client may hang up after a false answer
                files.lie(exchange)
            return
        exchange.answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the message."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client may hang up after a false answer."""


@contextlib.contextmanager
def serving(files: dict[str, bytes] | None = None, **how: Any) -> Iterator[FileServer]:
    """Run a server of `files` with the fields `how` of :class:`FileServer`, and yield it."""
    server = FileServer(files or {}, **how)
    handler = type("Handler", (_Handler,), {"files": server})
    with _Server(("127.0.0.1", 0), handler) as running:
        server.port = running.server_address[1]
        if server.tls:
            running.socket = server.tls.wrap_socket(running.socket, server_side=True)
        with in_background(running):
            yield server


@contextlib.contextmanager
def in_background(server: ThreadingHTTPServer) -> Iterator[None]:
    """Run `server` in a separate thread during this context."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


# Lies: false answers of the server


def _dribble(it: Exchange, head: bytes, body: bytes) -> None:
    """Send `head` at once, and then `body` one byte at a time."""
    it.handler.files.seen.append(Seen(it.handler.path, {}, 206, len(body)))
    it.handler.close_connection = True
    it.handler.wfile.write(head)
    for i in range(len(body)):
        it.handler.wfile.write(body[i : i + 1])
        it.handler.wfile.flush()
        time.sleep(0.05)


def _reset(it: Exchange) -> None:
    it.send(206, it.headers(), it.part[: len(it.part) // 2])
    it.handler.wfile.flush()
    it.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    it.handler.close_connection = True


def _cut(it: Exchange) -> None:
    it.send(206, it.headers(), it.part[:-1])
    it.handler.close_connection = True


def _unmeasured(it: Exchange) -> None:
    it.handler.close_connection = True
    it.send(206, it.headers(Content_Length=""), it.part + b"more")


def _silent(it: Exchange) -> None:
    it.handler.files.seen.append(Seen(it.handler.path, {}, 0, 0))
    time.sleep(1.5)
    it.handler.close_connection = True


def _range(it: Exchange, text: str) -> None:
    it.send(206, it.headers(Content_Range=text), it.part)


def _length(it: Exchange, text: str) -> None:
    it.handler.close_connection = True
    it.send(206, it.headers(Content_Length=text), it.part)


def _again(it: Exchange, after: str) -> None:
    it.send(503, {"Retry-After": after, "Content-Length": "0"}, b"")


def _chunked(it: Exchange, chunks: Iterator[bytes]) -> None:
    """Send the complete file in `chunks`. Stop after 20 seconds."""
    it.handler.files.seen.append(Seen(it.handler.path, {}, 200, 0))
    it.handler.close_connection = True
    said = it.headers(Content_Range="", Content_Length="", Transfer_Encoding="chunked")
    head = "".join(f"{name}: {text}\r\n" for name, text in said.items())
    it.handler.wfile.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
    ends = time.monotonic() + 20
    for chunk in chunks:
        it.handler.wfile.write(chunk)
        it.handler.wfile.flush()
        if time.monotonic() > ends:
            return


def _slowly(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of `data` one at a time, with pauses, endlessly."""
    for i in count_from():
        time.sleep(0.05)
        yield data[i % len(data) :][:1]


def _endless_trailers(it: Exchange) -> None:
    body = b"%x\r\n%s\r\n0\r\n" % (len(it.data), it.data)
    _chunked(it, chain([body], repeat(b"X: y\r\n" * 100)))


def _redirect(it: Exchange, place: str) -> None:
    it.send(302, {"Location": place, "Content-Length": "0"}, b"")


def _changes(it: Exchange, **how: str) -> None:
    """Answer as if each request found another version of the file. Conditions of the request are ignored."""
    more = {name: text.replace("#", str(it.number)) for name, text in how.items()}
    it.send(206, it.headers(**more), it.part)


#: Wrong responses of a server, and the error that each of them causes.
LIES: dict[str, tuple[Callable[[Exchange], None], str]] = {
    "no ranges": (
        lambda it: it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data),
        "UnsupportedError",
    ),
    "other bytes": (lambda it: _range(it, f"bytes {it.start + 1}-{it.stop}/{len(it.data)}"), "TransferError"),
    "fewer bytes": (lambda it: _range(it, f"bytes {it.start}-{it.stop - 2}/{len(it.data)}"), "TransferError"),
    "no Content-Range": (lambda it: _range(it, ""), "TransferError"),
    "garbage in Content-Range": (lambda it: _range(it, "bytes -5-x/٣"), "TransferError"),
    "a size of 5,000 digits": (lambda it: _range(it, f"bytes {it.start}-{it.stop - 1}/{'9' * 5000}"), "TransferError"),
    "a superscript in Content-Range": (lambda it: _range(it, "bytes 0-\u00b2/9"), "TransferError"),
    "a Content-Range that breaks off": (lambda it: _range(it, f"bytes {it.start}-{it.stop - 1}/"), "TransferError"),
    "a length of 5,000 digits": (lambda it: _length(it, "9" * 5000), "TransferError"),
    "a length that is none": (lambda it: _length(it, "\u00b2"), "TransferError"),
    "a chunk of 2^999 bytes": (
        lambda it: it.send(
            206, it.headers(Content_Length="", Transfer_Encoding="chunked"), b"8" + b"0" * 250 + b"\r\nx"
        ),
        "TransferError",
    ),
    "Retry-After: a superscript": (lambda it: _again(it, "\u00b2"), "TransferError"),
    "Retry-After: 5,000 digits": (lambda it: _again(it, "9" * 5000), "TransferError"),
    "Retry-After: a far year": (
        lambda it: _again(it, "Mon, 02 Nov 99999999999999999999 10:00:00 GMT"),
        "TransferError",
    ),
    "Retry-After: the year 1": (lambda it: _again(it, "Mon, 01 Jan 0001 00:00:00 -0000"), "TransferError"),
    "redirect to half an address": (lambda it: _redirect(it, "http://["), "TransferError"),
    "redirect to a port that is none": (lambda it: _redirect(it, "http://127.0.0.1:99999/"), "TransferError"),
    "redirect with a backslash": (lambda it: _redirect(it, "http://127.0.0.1:1\\@127.0.0.1:2/"), "TransferError"),
    "redirect to no port": (lambda it: _redirect(it, "http://127.0.0.1:\u00b2/"), "TransferError"),
    "no size": (lambda it: _range(it, f"bytes {it.start}-{it.stop - 1}/*"), "TransferError"),
    "another size each time": (
        lambda it: _range(it, f"bytes {it.start}-{it.stop - 1}/{len(it.data) + it.number}"),
        "InputChangedError",
    ),
    "cut": (_cut, "TransferError"),
    "reset": (_reset, "TransferError"),
    "longer than the range": (
        lambda it: it.send(206, it.headers(Content_Length=str(len(it.part) + 4)), it.part + b"more"),
        "TransferError",
    ),
    "longer, without a length": (_unmeasured, "TransferError"),
    "206 with all of the file": (
        lambda it: it.send(206, it.headers(Content_Length=str(len(it.data) + 1)), it.data + b"x"),
        "TransferError",
    ),
    "slow body": (lambda it: _dribble(it, _head(it), it.part), "TransferError"),
    "slow head": (lambda it: _dribble(it, b"HTTP/1.1 206 Partial Content\r\n", _head(it) * 9), "TransferError"),
    "silence": (_silent, "TransferError"),
    "no HTTP": (lambda it: _dribble(it, b"SSH-2.0-OpenSSH_9.9\r\n\r\n", b""), "TransferError"),
    "redirects in a circle": (lambda it: _redirect(it, it.handler.path), "TransferError"),
    "redirect to a file": (lambda it: _redirect(it, "file:///etc/passwd"), "TransferError"),
    "gzip": (lambda it: it.send(206, it.headers(Content_Encoding="gzip"), it.part), "UnsupportedError"),
    "several ranges": (
        lambda it: it.send(206, it.headers(Content_Range="", Content_Type="multipart/byteranges; boundary=x"), it.part),
        "TransferError",
    ),
    "another ETag each time": (lambda it: _changes(it, ETag='"#"'), "InputChangedError"),
    "another weak ETag each time": (lambda it: _changes(it, ETag='W/"#"'), "InputChangedError"),
    "another time each time": (
        lambda it: _changes(it, ETag="", Last_Modified="Mon, 02 Nov 2026 10:00:0# GMT"),
        "InputChangedError",
    ),
    "429, for an hour": (lambda it: it.send(429, {"Retry-After": "3600", "Content-Length": "0"}, b""), "TransferError"),
    "503, each time": (lambda it: it.send(503, {"Retry-After": "0", "Content-Length": "0"}, b""), "TransferError"),
    "not let in": (lambda it: it.send(403, {"Content-Length": "0"}, b""), "InputError"),
    "gone": (lambda it: it.send(410, {"Content-Length": "0"}, b""), "MissingInputError"),
    "a size of exabytes": (lambda it: _range(it, f"bytes {it.start}-{it.stop - 1}/{1 << 60}"), "InputError"),
}


#: Responses that never end, for a server that is asked for a complete file.
SLOW_DOWNLOADS: dict[str, Callable[[Exchange], None]] = {
    "head": lambda it: _dribble(it, b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 90),
    "length of a chunk": lambda it: _chunked(it, _slowly(b"0")),
    "extension of a chunk": lambda it: _chunked(it, chain([b"5;"], _slowly(b"x"))),
    "body": lambda it: _chunked(it, chain([b"%x\r\n" % len(it.data)], _slowly(it.data))),
    "end of a chunk": lambda it: _chunked(it, chain([b"1\r\nx"], _slowly(b"\r"))),
    "trailers without an end": _endless_trailers,
    "trailers, slowly": lambda it: _chunked(it, chain([b"1\r\nx\r\n0\r\n"], _slowly(b"X: y\r\n"))),
}


def _head(it: Exchange) -> bytes:
    said = "".join(f"{name}: {text}\r\n" for name, text in it.headers().items())
    return f"HTTP/1.1 206 Partial Content\r\n{said}\r\n".encode()
