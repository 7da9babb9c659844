"""A small HTTP proxy on the loopback interface that records its requests, and a certificate for servers there."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.http_server import in_background

__all__ = ["Proxy", "certificate", "proxying"]


@dataclass
class Proxy:
    """The state of a proxy. `seen` contains the method, the target and the credentials of each request.

    If `who` is given, a request with other credentials is answered with status 407.
    """

    port: int = 0
    who: str | None = None
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each body waits about 40 ms for the acknowledgment of its header
    proxy: Proxy

    def _is_let_in(self) -> bool:
        who = self.headers.get("Proxy-Authorization")
        self.proxy.seen.append((self.command, self.path, who))
        if self.proxy.who in (None, who):
            return True
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_CONNECT(self) -> None:
        """Open a tunnel, and relay its bytes in both directions."""
        if not self._is_let_in():
            return
        host, _, port = self.path.partition(":")
        self.close_connection = True
        with socket.create_connection((host, int(port))) as there, contextlib.suppress(OSError):
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pump, args=(there, self.connection), daemon=True)
            back.start()
            _pump(self.connection, there)
            back.join()

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        at = urlsplit(self.path)
        with contextlib.closing(http.client.HTTPConnection(at.netloc)) as there:
            there.request("GET", at.path, headers=dict(self.headers.items()))
            answer = there.getresponse()
            data = answer.read()
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Discard the message."""


def _pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def proxying(who: str | None = None) -> Iterator[Proxy]:
    """Run a proxy, and yield it. If `who` is given, the proxy accepts only requests with these credentials."""
    proxy = Proxy(who=who)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        proxy.port = server.server_address[1]
        with in_background(server):
            yield proxy


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Return the path of a self-signed certificate for 127.0.0.1, and the context of a server that uses it."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, cert = folder / "key.pem", folder / "cert.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost -addext"
    made = [program, *words.split(), "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
