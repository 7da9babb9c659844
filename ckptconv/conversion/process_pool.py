"""Worker processes that ignore SIGINT and end with their parent.

:mod:`multiprocessing` starts its processes as ``python -c``, with the current folder first on ``sys.path``. So a file
``signal.py`` in a folder of checkpoints would be run. These workers get the ``sys.path`` of this process before they
import anything, and need no helper process of multiprocessing.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Pipe
from multiprocessing.spawn import get_executable, get_preparation_data
from multiprocessing.util import _args_from_interpreter_flags  # type: ignore[attr-defined]
from typing import Any

from ckptconv.byteranges.threads import Threads
from ckptconv.conversion.jobs import JobExecutor, Outcome, Task
from ckptconv.conversion.worker import in_worker
from ckptconv.errors import UsageError
from ckptconv.system import calls

_PATIENCE = 10.0  # seconds that a process has to delete its temporary file
#: ``-P``, which Python has from 3.11 on, keeps the current folder off ``sys.path``. 3.13 imports modules before it
#: begins the program; 3.10 does not, and the module ``sys`` is part of the interpreter.
_FLAGS = ["-P"] if sys.version_info >= (3, 11) else []
#: Variables with paths. Relative ones would lead elsewhere after this process has changed its folder, and Python looks
#: there before it starts the program.
_PATHS = {"PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE"}
_PROGRAM = "import sys; sys.path[:] = {path}; from ckptconv.conversion.worker import main; main({connection})"


class _Process:
    """A worker process, and this side of the connection to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = calls.start_worker(_command_line, theirs, _environment())

    def end(self) -> int:
        """Close the connection, wait for the end of the worker, and return its exit status."""
        self.connection.close()
        return self.process.wait()


class Processes(JobExecutor):
    """An executor with this number of `workers`: processes, each with a thread that communicates with it.

    A process that was killed is replaced by a new one.
    """

    alone = True

    def __init__(self, workers: int) -> None:
        if in_worker():
            what = "a worker process cannot start processes of its own"
            raise UsageError(what, hint='guard the main program by if __name__ == "__main__"')
        self.most = 2 * workers  # twice as many, so that no worker waits for its next task
        self._threads = Threads(workers, "ckptconv-worker")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._written = 0
        self._closed = False

    def submit(self, task: Task) -> Future[Outcome]:
        """Send `task` to an idle process. A process is started if there is none."""
        future: Future[Outcome] = Future()
        try:
            message = _message(task)
        except Exception as error:
            future.set_result(_not_sent(task, error))
            return future
        self._threads.submit(self._run, task, message, future)
        return future

    def _run(self, task: Task, message: bytes, future: Future[Outcome]) -> None:
        """Let a worker run `task`. If the worker ends before the task is done, `future` gets a ChildProcessError."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._outcome(task, message))
        except BaseException as error:
            future.set_exception(error)

    def _outcome(self, task: Task, message: bytes) -> Outcome:
        with self._lock:
            if self._closed:
                raise ChildProcessError("the batch has ended")
            process = self._idle.pop() if self._idle else _Process()
            self._all.add(process)
        outcome = error = None
        try:
            process.connection.send_bytes(message)
            while outcome is None and error is None:
                nbytes, outcome, error = process.connection.recv()
                with self._lock:
                    self._written += nbytes
        except (EOFError, OSError):
            raise ChildProcessError(f"exit status {process.end()}") from None
        with self._lock:
            self._idle.append(process)
        return outcome or _not_sent(task, error)

    def written(self) -> int:
        """Return how many bytes all processes have written."""
        return self._written

    def close(self, *, failed: bool) -> None:
        """Wait until the processes have ended. With `failed`, end them at once."""
        with self._lock:
            self._closed = True
        if failed:
            self._kill()
        self._threads.shutdown()
        for process in self._all:
            process.end()

    def _kill(self) -> None:
        """Ask all processes to end, and kill those that do not end in time."""
        try:
            for process in self._all:
                calls.end_worker(process.process)
            for process in self._all:
                with suppress(subprocess.TimeoutExpired):
                    process.process.wait(_PATIENCE)
        finally:
            for process in self._all:
                process.process.kill()


def _command_line(connection: int) -> list[str]:
    path = [each for each in sys.path if isinstance(each, str)]
    program = _PROGRAM.format(path=ascii(path), connection=connection)
    return [os.fsdecode(get_executable()), *_args_from_interpreter_flags(), *_FLAGS, "-c", program]


def _environment() -> dict[str, str]:
    """Return the environment of a worker. Relative folders are removed from variables with folders of modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
    for name in _PATHS & environment.keys():
        environment[name] = os.pathsep.join(filter(os.path.isabs, environment[name].split(os.pathsep)))
    return environment


def _message(task: Task) -> bytes:
    """Return `task` as a message for a worker, with the location of the main module of this program if the task needs
    it.
    """
    pickled = pickle.dumps(task)
    main: dict[str, Any] = {}
    if b"__main__" in pickled:
        main = {name: value for name, value in get_preparation_data("").items() if name.startswith("init_main")}
    return pickle.dumps((main, pickled))


def _not_sent(task: Task, why: object) -> Outcome:
    return Outcome(task.job, error=UsageError(f"it cannot be sent to another process: {why}", where=task.job.src))
