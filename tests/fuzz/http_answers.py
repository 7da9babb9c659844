"""The answers of a web server as one byte string, and the code that reads them: ranges of files, downloads and
lists.

No socket is opened and no real time passes. Answers come from memory, and a pause moves a separate clock, so a server
that is silent for minutes takes microseconds.

The first byte selects the request: ``d`` is a file that can be downloaded completely, ``l`` is a list of the Hub, and
any other byte is a file that is read by ranges. The answers follow. Each ends with two NUL bytes, and the last answer
is repeated. In an answer, a NUL and another byte N are a pause of N seconds. A NUL and 0xFF repeat the following bytes
without end, once a second. `FIRST`, `LAST`, `SIZE` and `BODY` are replaced by correct values: the requested range and
its bytes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ckptconv.stores import remote, requests
from ckptconv.stores.remote import far_path
from ckptconv.stores.requests import POLICY

__all__ = ["BODY", "END", "FILE", "FIRST", "LAST", "ON", "SIZE", "read"]

END, ON = b"\0\0", b"\0\xff"
FIRST, LAST, SIZE, BODY = b"\x01", b"\x02", b"\x03", b"\x04"
FILE = b"0123456789abcdef" * 12
_OP = re.compile(rb"\0(.)", re.DOTALL)
_RANGE = re.compile(rb"\r\nRange: bytes=([0-9]+)-([0-9]+)\r\n")
_SECRET = "S3CRET"
_URL = f"http://user:{_SECRET}@files/a/x.pt?Signature={_SECRET}"
_INFLATED = 1032  # the largest ratio of deflate
_PIECES = 6  # the most windows of a file that are read
_ENTRIES = 30  # the most entries of a list
_POLICY = {"window": 64, "gap": 0, "concurrency": 1}  # a file of FILE's size needs several requests


class _Clock:
    """A clock that moves only when a caller waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_800_000_000 + self.now

    def sleep(self, seconds: float | None = None) -> None:
        self.now += max(seconds or 0.0, 0.0)


class _Server:
    """A server that gives one of `answers` to each request."""

    def __init__(self, answers: bytes, clock: _Clock) -> None:
        *self._answers, rest = answers.split(END)
        if rest or not self._answers:
            self._answers.append(rest)
        self.clock, self.asked = clock, 0

    def answer(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of the answer to `request`, each with the seconds of the pause before it."""
        self.asked += 1
        said = self._answers[min(self.asked, len(self._answers)) - 1]
        first, last = 0, len(FILE) - 1
        if found := _RANGE.search(request):
            first, last = int(found[1]), min(int(found[2]), last)
        for mark, right in ((FIRST, first), (LAST, last), (SIZE, len(FILE))):
            said = said.replace(mark, b"%d" % right)
        once, on, again = said.replace(BODY, FILE[first : last + 1]).partition(ON)
        parts = _OP.split(once)
        yield 0, parts[0]
        for i in range(1, len(parts), 2):
            yield ord(parts[i]), parts[i + 1]
        while on:
            yield 1, again


class _Socket:
    """The part of a socket's interface that urllib3 needs."""

    def __init__(self, server: _Server, idle: int) -> None:
        self._server, self._idle = server, idle
        self.answer: Iterator[tuple[int, bytes]] = iter(())
        self.timeout: float | None = None

    def sendall(self, request: bytes) -> None:
        self.answer = self._server.answer(request)

    def makefile(self, mode: str, buffering: int) -> _Stream:
        assert (mode, buffering) == ("rb", 0)
        return _Stream(self, self._server.clock)

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds

    def fileno(self) -> int:  # a pipe without data: the server has not closed the connection
        return self._idle

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Stream(io.RawIOBase):
    def __init__(self, socket: _Socket, clock: _Clock) -> None:
        self._socket, self._clock = socket, clock
        self._pause, self._data = 0.0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        patience = self._socket.timeout
        assert patience is not None, "somebody would wait for ever"
        while self._pause or not self._data:
            waits = min(self._pause, patience)
            self._clock.sleep(waits)
            patience, self._pause = patience - waits, self._pause - waits
            if self._pause or (waits and not patience):
                raise TimeoutError("timed out")
            if not self._data:
                piece = next(self._socket.answer, None)
                if piece is None:
                    return 0
                self._pause, self._data = piece
        count = min(len(buffer), len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count


class _Logged(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(f"a library says on its own: {record.getMessage()}")


@contextlib.contextmanager
def _instead(server: _Server) -> Iterator[None]:
    """Send all web requests to `server` and use its clock while the context is active."""
    import urllib3  # an extra
    from urllib3.connection import HTTPConnection, HTTPSConnection

    from ckptconv.stores import http

    clock = server.clock
    idle, other = os.pipe()

    def connect(connection: Any) -> None:
        if not connection.host.isascii() or connection.host.startswith("no"):
            raise urllib3.exceptions.NameResolutionError(connection.host, connection, OSError("no such host"))
        connection.sock = _Socket(server, idle)
        connection.is_verified = True

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.sleep(timeout)
            return self.is_set()

    handler = _Logged(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            for module in (http, remote, requests):
                if hasattr(module, "time"):
                    enter(mock.patch.object(module, "time", clock))
            enter(
                mock.patch.object(
                    requests, "threading", SimpleNamespace(Event=Event, Lock=threading.Lock, Thread=threading.Thread)
                )
            )
            enter(mock.patch.object(requests.retried, "__defaults__", (clock.sleep,)))
            enter(mock.patch.object(HTTPConnection, "connect", connect))
            enter(mock.patch.object(HTTPSConnection, "connect", connect))
            enter(mock.patch.dict(os.environ, {"HF_ENDPOINT": "http://hub/", "HF_TOKEN": _SECRET, "NO_PROXY": "*"}))
            for name, value in _POLICY.items():
                enter(mock.patch.object(POLICY, name, value))
            yield
    finally:
        logging.getLogger().removeHandler(handler)
        os.close(idle)
        os.close(other)


def read(data: bytes, folder: Path) -> bool:
    """Read all that the answers in `data` offer, and return True. A download is written to `folder`.

    The function raises CkptconvError, or AssertionError if a guarantee is violated: each step ends before its deadline,
    a read returns the requested number of bytes, and no error contains a secret.
    """
    clock = _Clock()
    server = _Server(data[1:], clock)
    with _instead(server):
        try:
            if data[:1] == b"l":
                _list(server)
            elif data[:1] == b"d":
                # One deadline is for the range, one for the complete file before its first byte, and one for each part
                # of the file.
                _file(server, folder, deadlines=3 + len(data) * _INFLATED // POLICY.part)
            else:
                _file(server, None, deadlines=1)
        except Exception as error:
            if _SECRET in str(error):
                raise AssertionError("an error has a secret") from error
            raise
    return True


def _list(server: _Server) -> None:
    found = far_path("hf://owner/repo/").find_store().entries(far_path("hf://owner/repo/"))
    for _ in range(_ENTRIES):

        def requests(before: int = server.asked) -> int:  # a page without entries is one request, with its own deadline
            return server.asked - before

        if _timed(server, lambda: next(found, None), requests) is None:
            return


def _file(server: _Server, folder: Path | None, deadlines: int) -> None:
    path = far_path(_URL)
    with _timed(server, lambda: remote.open_far(path, download=folder or False), lambda: deadlines) as source:
        for at in islice(range(0, source.size, POLICY.window), _PIECES):
            length = min(POLICY.window, source.size - at)
            assert len(_timed(server, partial(source.read, at, length))) == length
        source.about()


def _timed(server: _Server, step: Callable[[], Any], deadlines: Callable[[], int] = lambda: 1) -> Any:
    """Return the result of `step`. Fail if it takes longer than the given number of deadlines."""
    started = server.clock.now
    try:
        return step()
    finally:
        spent = server.clock.now - started
        assert spent <= deadlines() * POLICY.deadline + 0.001, "a step runs past its deadline"
