"""The main loop of a worker process, which :mod:`ckptconv.conversion.process_pool` starts.

It imports little, so that a worker can notice the end of its parent soon after its own start.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue

from ckptconv.output.signals import handled_by
from ckptconv.system import calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ckptconv.conversion.jobs import Outcome

_TELL = 0.1  # seconds between two messages about bytes written

_worker: _Worker | None = None


class _Worker:
    """A process that runs one task after another, and reports the bytes written to its parent through `connection`.

    A message of the parent is a pair of the location of its main module (None if the task does not need it) and the
    pickled task. The connection is closed when the parent ends.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.messages: SimpleQueue[bytes | None] = SimpleQueue()
        self.busy = False  # from the arrival of a message to the answer
        self._works = False
        self._written, self._told = 0, 0.0

    def receive(self) -> None:
        """Queue the messages of the parent. When the parent ends, end this process."""
        try:
            while True:
                message = self.connection.recv_bytes()
                self.busy = True
                self.messages.put(message)
        except (EOFError, OSError):
            self.messages.put(None)
            if self.busy:
                calls.end_main_thread()

    def serve(self) -> None:
        """Run the tasks.

        After each one, send (bytes written, outcome or None, reason why there is no outcome or None).
        """
        threading.Thread(target=self.receive, daemon=True).start()
        while message := self.messages.get():
            outcome, error = self._do(message)
            written, self._written, self.busy = self._written, 0, False
            self.connection.send((written, outcome, error))

    def _do(self, message: bytes) -> tuple[Outcome | None, str | None]:
        from ckptconv.conversion.jobs import work

        try:
            main_module, pickled = ForkingPickler.loads(message)  # of the parent, never of a file
            if main_module:
                from multiprocessing.spawn import prepare

                prepare(main_module)
            task = ForkingPickler.loads(pickled)
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"
        self._works = True
        try:
            return work(task, self._tick), None
        finally:
            self._works = False

    def _tick(self, nbytes: int) -> None:
        self._written += nbytes
        if (now := time.monotonic()) - self._told > _TELL:
            self.connection.send((self._written, None, None))
            self._written, self._told = 0, now

    def end(self, *_: object) -> None:
        """End this process on a signal. A running task deletes its temporary file first."""
        if self._works:  # an import cannot pass on every exception, and has nothing to delete
            for name in calls.ENDING:  # a second signal would interrupt the clean-up
                signal.signal(getattr(signal, name), signal.SIG_IGN)
            raise KeyboardInterrupt
        os._exit(1)


def main(connection: int) -> None:
    """Serve the parent at the other end of `connection` until it ends. Ctrl-C does not reach this process."""
    global _worker
    _worker = _Worker(calls.connected(connection))
    if not sys.warnoptions:  # as in the command line
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
    try:
        with handled_by(_worker.end):
            _worker.serve()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def in_worker() -> bool:
    """Return whether this process is a worker."""
    return _worker is not None
