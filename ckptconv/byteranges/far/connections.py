"""Connections of urllib3 that read nothing after a deadline: heads of answers, lengths of chunks and trailers included.

urllib3 alone bounds the time between two bytes, and a server can send one byte at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3

from ckptconv.byteranges.far.planning import POLICY
from ckptconv.byteranges.far.requests import Deadline, Transient
from ckptconv.byteranges.far.urls import HTTP, is_readable_host
from ckptconv.errors import UsageError

_CURRENT = threading.local()


def _is_of_others(record: logging.LogRecord) -> bool:  # noqa: ARG001 - what urllib3 logs can have the secrets of a URL
    return not hasattr(_CURRENT, "deadline")


for _name in ("connection", "connectionpool", "response"):
    logging.getLogger(f"urllib3.{_name}").addFilter(_is_of_others)


@contextlib.contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Let each answer that this thread begins to read in the body of the ``with`` end at `deadline`."""
    _CURRENT.deadline = deadline
    try:
        yield
    finally:
        del _CURRENT.deadline


class _Reader(io.RawIOBase):
    """What comes by `socket`. A read raises Transient after the deadline of :func:`until`."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._deadline, self._received = socket, _CURRENT.deadline, 0
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
                return count
        raise Transient(f"the server is too slow: {self._received:,} bytes came")

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Socket:
    """As much of a socket as ``http.client`` needs to read an answer."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._socket))


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **how: Any) -> None:
        super().__init__(_Socket(sock), *args, **how)  # type: ignore[arg-type]


class _Connection(urllib3.connection.HTTPConnection):  # type: ignore[misc]
    response_class = _Response


class _SecureConnection(urllib3.connection.HTTPSConnection):  # type: ignore[misc]
    response_class = _Response


class _Pool(urllib3.HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _SecureConnection


def proxy_for(url: str) -> str | None:
    """Return the proxy for `url`, by the variables that all programs read. Raises UsageError."""
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
    """Return what keeps connections, by way of `proxy` if there is one, whose URL can say who we are there."""
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
