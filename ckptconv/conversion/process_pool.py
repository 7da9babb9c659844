"""Worker processes that ignore SIGINT and exit with their parent.

A module of its own because what it imports costs every start of the command, and most commands need no second process.

:mod:`multiprocessing` starts its processes as ``python -c``, with the current folder first on ``sys.path``: a file
``signal.py`` in a folder of checkpoints would run. Workers get the ``sys.path`` of this process before they import
anything, and need no process of multiprocessing's own.
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

_PATIENCE = 10.0  # seconds that a process has for putting its temporary file away
#: ``-P``, which Python has from 3.11 on, keeps the current folder off ``sys.path``. 3.13 imports modules before it
#: begins the program; 3.10 does not, and the module ``sys`` is part of the interpreter.
_FLAGS = ["-P"] if sys.version_info >= (3, 11) else []
#: In these, a path that is relative leads elsewhere once this process has changed its folder, and Python looks there
#: before it begins the program.
_PATHS = {"PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE"}
_PROGRAM = "import sys; sys.path[:] = {path}; from ckptconv.conversion.worker import main; main({connection})"


class _Process:
    """A worker process, and our end of the socket to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process = calls.start_worker(_command_line, theirs, _environment())

    def end(self) -> int:
        """Wait for the end of the worker, which is idle, and return its exit status."""
        self.connection.close()
        return self.process.wait()


class Processes(JobExecutor):
    """An executor with so many `workers`, each a process with a thread that talks to it.

    A new process replaces one that was killed.
    """

    alone = True

    def __init__(self, workers: int) -> None:
        if in_worker():
            what = "a worker process cannot start processes of its own"
            raise UsageError(what, hint='guard the main program by if __name__ == "__main__"')
        self.most = 2 * workers  # so that none of them waits for work
        self._threads = Threads(workers, "ckptconv-worker")
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._written = 0
        self._closed = False

    def submit(self, task: Task) -> Future[Outcome]:
        """Hand `task` to a process, which is started if it is needed."""
        future: Future[Outcome] = Future()
        try:
            message = _message(task)
        except Exception as error:
            future.set_result(_not_sent(task, error))
            return future
        self._threads.submit(self._run, task, message, future)
        return future

    def _run(self, task: Task, message: bytes, future: Future[Outcome]) -> None:
        """Let a worker do `task`. If the worker ends before it is done, `future` gets a ChildProcessError."""
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
        """Let the processes end. If something `failed`, end them now."""
        with self._lock:
            self._closed = True
        if failed:
            self._kill()
        self._threads.shutdown()
        for process in self._all:
            process.end()

    def _kill(self) -> None:
        """End all processes, and kill those that do not end in time."""
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
    """Return the environment of a worker. Paths in which Python looks for modules are only the absolute ones."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
    for name in _PATHS & environment.keys():
        environment[name] = os.pathsep.join(filter(os.path.isabs, environment[name].split(os.pathsep)))
    return environment


def _message(task: Task) -> bytes:
    """Return `task` for a worker, with the main module of this program if the task needs it."""
    pickled = pickle.dumps(task)
    main: dict[str, Any] = {}
    if b"__main__" in pickled:
        main = {name: value for name, value in get_preparation_data("").items() if name.startswith("init_main")}
    return pickle.dumps((main, pickled))


def _not_sent(task: Task, why: object) -> Outcome:
    return Outcome(task.job, error=UsageError(f"it cannot be handed to another process: {why}", where=task.job.src))
