"""A process in which an audit hook watches the effects of reading hostile files. ``python audited.py JOBS`` prints the
events as JSON.

JOBS is a JSON file. ``warm`` and ``hostile`` are lists of paths, and files may be made only in the folder ``out``. All
operations run on the warm files first, which differ from the hostile files only in the names that they contain, so that
imports of ckptconv itself are not recorded. At the end the pickles ``control`` are loaded unsafely in ``control
folder``. Audit hooks cannot be removed, so they need a separate process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptconv
from ckptconv.cli.main import main

#: Events of https://docs.python.org/3/library/audit_events.html that no operation may cause. A name that ends with a
#: dot stands for all events below it.
FORBIDDEN = (
    "import", "exec", "compile", "marshal.", "pickle.find_class", "code.__new__", "function.__new__",
    "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.kill", "pty.spawn", "socket.", "ctypes.", "urllib.", "http.", "ftplib.", "smtplib.",
    "webbrowser.", "shutil.", "tempfile.", "sys.addaudithook", "sys.setprofile", "sys.settrace", "cpython.run_",
    "object.__setattr__", "builtins.breakpoint", "builtins.input",
)  # a table  # fmt: skip
#: Events that change files, and the number of leading arguments that are paths.
CHANGING = {
    "os.remove": 1, "os.rename": 2, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1, "os.setxattr": 1,
}  # a table  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Watch:
    """The hook. It only records events, because an exception could be mistaken for an error about the file."""

    def __init__(self, out: str) -> None:
        self.out = os.path.realpath(out) + os.sep
        self.on = False
        self.seen: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False  # the checks below cause events themselves
        try:
            if any(event == word or (word[-1] in "._" and event.startswith(word)) for word in FORBIDDEN):
                self.seen.append(f"{event} {args[:1]!r}"[:200])
            elif event == "open" and (args[2] or 0) & WRITING and not self.is_inside(args[0]):
                self.seen.append(f"open {args[0]!r} for writing")
            elif event in CHANGING and not all(map(self.is_inside, args[: CHANGING[event]])):
                self.seen.append(f"{event} {args!r}"[:200])
        finally:
            self.on = True

    def is_inside(self, path: Any) -> bool:
        if isinstance(path, int) or path is None:  # a descriptor of a file that was opened before
            return True
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(self.out)


def operations(path: str, out: Path, twin: str) -> dict[str, Callable[[], object]]:
    """Return all operations on `path`. Their outputs are in `out`."""
    done: dict[str, Callable[[], object]] = {
        "inspect": lambda: main(["inspect", path]),
        "verify": lambda: main(["verify", path, "--json"]),
        "diff": lambda: main(["diff", path, twin]),
        "open": lambda: _opened(path),
        "dry run": lambda: main(["convert", path, str(out / "dry.pt"), "--dry-run", "--json"]),
    }
    for name, options in {"m.pt": {}, "m.pkl": {}, "m.safetensors": {}, "l.pt": {"format": "legacy"}}.items():
        for unsafe in (False, True):
            done[f"convert to {name}{' unsafe' if unsafe else ''}"] = _converting(path, out / name, unsafe, options)
    return done


def _converting(path: str, out: Path, unsafe: bool, options: dict[str, Any]) -> Callable[[], object]:
    return lambda: ckptconv.convert(path, out, force=True, map_location="cpu", allow_unsafe=unsafe, **options)


def _opened(path: str) -> None:
    with ckptconv.open(path) as file:
        for each in list(file.tensors):
            file.load(each)


def attempt(operation: Callable[[], object]) -> str:
    """Run `operation` and return its outcome: ``done``, the exit status, or the class of the error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = operation()
    except ckptconv.CkptconvError as error:
        return type(error).__name__
    except Exception as error:
        return f"UNTYPED {type(error).__name__}: {error}"
    return f"exit {status}" if isinstance(status, int) else "done"


def run() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    out = Path(jobs["out"])
    warnings.simplefilter("ignore")
    torch.save({"w": torch.ones(4)}, out / "twin.pt")
    watch = Watch(str(out))
    sys.addaudithook(watch)
    for path in jobs["warm"]:
        for operation in operations(path, out, str(out / "twin.pt")).values():
            attempt(operation)
    results: dict[str, dict[str, Any]] = {}
    for path in jobs["hostile"]:
        results[path] = {}
        for name, operation in operations(path, out, str(out / "twin.pt")).items():
            watch.seen = []
            watch.on = True
            outcome = attempt(operation)
            watch.on = False
            results[path][name] = [outcome, watch.seen]
    os.chdir(jobs["control folder"])
    control: dict[str, list[str]] = {}
    for path in jobs["control"]:
        watch.seen = []
        watch.on = True
        attempt(lambda path=path: pickle.loads(Path(path).read_bytes()))  # type: ignore[misc]
        watch.on = False
        control[path] = watch.seen
    print(json.dumps({"results": results, "control": control}))


if __name__ == "__main__":
    run()
