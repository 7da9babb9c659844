"""A relay on the loopback interface that counts requests and the bytes in each direction, and can delay requests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Relay", "relaying"]


@dataclass
class Relay:
    """The counts of a relay: the bytes `sent` to the server and `received` from it, and the `turns`.

    A turn is the start of a request: the client sends after the server has sent, or for the first time. Each turn is
    delayed by `latency` seconds.
    """

    port: int
    latency: float = 0.0
    turns: int = 0
    sent: int = 0
    received: int = 0


@contextlib.contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """Run a relay to the server at `port`, and yield it."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        relay = Relay(listener.getsockname()[1])

        def pump(source: socket.socket, to: socket.socket, name: str, last: list[str]) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    if last[0] != name == "sent":
                        relay.turns += 1
                        time.sleep(relay.latency)
                    last[0] = name
                    to.sendall(data)
                    setattr(relay, name, getattr(relay, name) + len(data))  # one thread at a time updates a counter
                to.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    ours, _ = listener.accept()
                    theirs = socket.create_connection(("127.0.0.1", port))
                    for each in (ours, theirs):
                        opened.callback(each.close)
                    last = [""]
                    for words in ((ours, theirs, "sent", last), (theirs, ours, "received", last)):
                        threading.Thread(target=pump, args=words, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        opened.callback(listener.close)
        yield relay
