"""Conversions in separate processes with a fault at one of their system calls, which strace injects, and the conditions
that must hold afterward.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ckptconv.inspection.verification import checkpoints_in, verify
from ckptconv.output.files import is_temporary

#: The content of a file, or of the files of a folder. None if the path does not exist.
Content = bytes | dict[str, bytes] | None

#: The old content of a target: of a file, or of a folder with a model in one shard.
OLD = b"the old output"
OLD_SET: Content = {"pytorch_model-00001-of-00001.bin": b"old", "pytorch_model.bin.index.json": b"{}"}

#: Calls that change the state of a disk, or whose results decide about a change.
WRITE_SIDE = (
    "openat",
    "ioctl",
    "fchmod",
    "fadvise64",
    "fallocate",
    "fstatfs",
    "statfs",
    "pwrite64",
    "copy_file_range",
    "sync_file_range",
    "fsync",
    "close",
    "rename",
    "link",
    "linkat",
    "symlink",
    "unlink",
    "mkdir",
    "chmod",
    "fchmodat",
    "renameat2",
    "unlinkat",
    "rmdir",
)
_NAMING = ("rename", "link", "renameat2")
_WRITING = ("pwrite64", "copy_file_range", "fallocate")
_REMOVING = ("unlink", "unlinkat", "rmdir")
#: Calls that the import of torch makes thousands of times. Their number differs between runs, so they are not traced
#: for conversions with threads.
_UNCOUNTED = ("openat", "ioctl", "close", "fstatfs", "statfs")

ERRORS = ("error=ENOSPC", "error=EIO", "error=EDQUOT", "error=EINTR")
SIGNALS = ("signal=SIGINT", "signal=SIGTERM", "signal=SIGKILL")

_PATH = re.compile(r'<(/[^>]*)>|"(/[^"]*)"')


def content_of(path: Path) -> Content:
    """Return the content of the file or folder at `path`, or None if nothing exists there."""
    if path.is_dir():
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if not file.is_dir()}
    return path.read_bytes() if path.exists() else None


def put(path: Path, content: Content) -> None:
    """Write `content` to `path`."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        for name, data in content.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


@dataclass(frozen=True)
class Point:
    """The result of a conversion with `fault` at the call number `number` of the system call `call`.

    `outcome` contains for each target whether it is old, new or a mixture. `left` names the files that are left next to
    the targets. `line` is the error output.
    """

    conversion: str
    before: str
    call: str
    number: int
    fault: str
    exit: int
    outcome: tuple[str, ...]
    left: tuple[str, ...]
    line: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self)


@dataclass
class Conversion:
    """The command ``ckptconv convert `srcs` `dst` FLAGS``. Each run writes to a new folder below `folder`.

    `targets` names the files or folders that the command writes, and `before` is their content beforehand (None if they
    do not exist). `dst` is the first target by default. `threads` is true if other threads make some of the calls, so
    that the numbers of some calls differ from run to run. `processes` is true if other processes make the calls. In
    this case `calls` names them. `program` contains the arguments with which Python runs the command.
    """

    name: str
    folder: Path
    srcs: Sequence[Path]
    targets: Sequence[str]
    before: Content
    flags: Sequence[str] = ()
    dst: str | None = None
    threads: bool = False
    processes: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)
    program: Sequence[str] = ("-m", "ckptconv")

    def __post_init__(self) -> None:
        self._numbers: Iterator[int] = count()
        self.new: list[Content] = [self.before for _ in self.targets]
        first = self.fresh()
        done = subprocess.run(self._command(first), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done
        self.new = [content_of(first / target) for target in self.targets]
        assert None not in self.new
        assert self.before not in self.new
        found = [verify(path) for target in self.targets for path in checkpoints_in(first / target)]
        assert found
        assert all(verdict.ok for verdict in found), found
        if not self.calls:
            # The first run compiles the modules, so that the interpreter's own calls are the same in each later run.
            self.trace(self.fresh())
            out = self.fresh()
            self.calls = self._write_side(self.trace(out)[1], out)

    def fresh(self) -> Path:
        """Return a new folder whose targets have the content `before`."""
        out = self.folder / f"{next(self._numbers):04}" / "out"
        out.mkdir(parents=True)
        for target in self.targets:
            if self.before is not None:
                (out / target).parent.mkdir(parents=True, exist_ok=True)
                put(out / target, self.before)
        return out

    def _command(self, out: Path) -> list[str]:
        flags = ["--force"] if self.before is not None else []
        dst = out / self.targets[0] if self.dst is None else f"{out}/{self.dst}"
        return [sys.executable, *self.program, "convert", "-q", *map(str, self.srcs), str(dst), *self.flags, *flags]

    def trace(
        self, out: Path, *options: str, package: Path | None = None
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Convert in `out` under strace. Return the finished process and the lines of strace.

        `package` is the folder whose ``ckptconv`` runs.
        """
        log = out.with_name("strace.log")
        traced = [call for call in WRITE_SIDE if not (self.threads and call in _UNCOUNTED)]
        # strace does not inject signals with --seccomp-bpf, the filter that makes it fast.
        sends = any("signal=" in option for option in options)
        filtered = [] if sends else ["--seccomp-bpf"]
        done = subprocess.run(
            [
                "strace",
                "-f",
                *filtered,
                "-y",
                "-o",
                str(log),
                "-e",
                f"trace={','.join(traced)}",
                *options,
                *self._command(out),
            ],
            capture_output=True,
            text=True,
            cwd=package or out.parent,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        )
        return done, log.read_text().splitlines()

    def undurable(self, package: Path | None = None) -> list[str]:
        """Return what a loss of power could destroy, according to the order of the calls. `package` is the one of
        :meth:`trace`.
        """
        out = self.fresh()
        done, lines = self.trace(out, package=package)
        assert done.returncode == 0
        return not_durable(lines, out)

    def _write_side(self, lines: list[str], out: Path) -> list[tuple[str, int]]:
        """Return the calls that can fail, each with its number among the calls of this name in its thread.

        The calls begin with the first one that names `out`, and end with the last one that names `out` or an input. Of
        other threads than the first, only the first call of each name is included.
        """
        found: list[tuple[str, int, str]] = []
        seen: dict[tuple[str, str], int] = {}
        main = lines[0].split()[0]
        for line in lines:
            thread, rest = line.split(maxsplit=1)
            name = rest.split("(")[0]
            if name not in WRITE_SIDE:  # the rest of a call that another thread interrupted, or an exit
                continue
            seen[thread, name] = number = seen.get((thread, name), 0) + 1
            if thread == main or number == 1:
                found.append((name, number, rest))
        begin = next(i for i, (_, _, rest) in enumerate(found) if str(out) in rest)
        places = [str(out), *map(str, self.srcs)]
        end = max(i for i, (_, _, rest) in enumerate(found) if any(place in rest for place in places))
        calls = [(name, number) for name, number, _ in found[begin : end + 1]]
        return list(dict.fromkeys(calls))

    def points(self, faults: Sequence[str], calls: Sequence[str] | None = None) -> list[Point]:
        """Run the conversion with each of `faults` at each call, or at those in `calls`. Return the results.

        Raise AssertionError with all violations if a condition does not hold.
        """
        what = [
            (fault, call, number) for fault in faults for call, number in self.calls if calls is None or call in calls
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda each: self._try(*each), what))
        wrong = [each for each in results if isinstance(each, str)]
        assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n\n".join(wrong[:5])
        return [each for each in results if isinstance(each, Point)]

    def _try(self, fault: str, call: str, number: int) -> Point | str:
        """Run the conversion with one fault. Return its result, or a text with the violated conditions."""
        out = self.fresh()
        done, lines = self.trace(out, "-e", f"inject={call}:{fault}:when={number}")
        found = [content_of(out / target) for target in self.targets]
        outcome = tuple(
            "new" if each == new else "old" if each == self.before else "mixture"
            for each, new in zip(found, self.new, strict=True)
        )
        left = tuple(sorted(self._beside(out)))
        before = "absent" if self.before is None else "old"
        point = Point(self.name, before, call, number, fault, done.returncode, outcome, left, done.stderr.strip())
        wrong = list(self._wrong(point, lines))
        if wrong:
            return "\n".join([f"{point}: {'; '.join(wrong)}", *lines[-15:]])
        shutil.rmtree(out.parent)
        return point

    def _beside(self, out: Path) -> Iterator[str]:
        """Yield the names of files and folders in `out` that do not belong to a target.

        A folder that contains targets belongs to them. The contents of a temporary folder are not listed.
        """
        for path in sorted(out.rglob("*")):
            name = str(path.relative_to(out))
            holds = any(f"{target}/".startswith(f"{name}/") for target in self.targets)
            is_held = any(f"{name}/".startswith(f"{target}/") for target in self.targets)
            if any(map(is_temporary, Path(name).parent.parts)) or is_held or (holds and any(path.iterdir())):
                continue
            yield name

    def _wrong(self, point: Point, lines: list[str]) -> Iterator[str]:
        """Yield the violated conditions."""
        if not any("INJECTED" in line or "--- SIG" in line or "+++ killed" in line for line in lines):
            yield "the call never came"
        if "mixture" in point.outcome:
            yield "neither the old one nor the new one"
        if point.exit == 0 and "old" in point.outcome:
            yield "success without the new one"
        killed = point.fault == "signal=SIGKILL"
        may_stay = killed or (point.call in _REMOVING and point.fault in ERRORS)
        if not all(self._is_known(name, killed=killed) for name in point.left) or (point.left and not may_stay):
            yield "something is left"
        if "Traceback" in point.line or "Exception" in point.line:
            yield "a traceback"
        lines_said = point.line.splitlines()
        if point.exit in (0, 143, -signal.SIGKILL):
            if lines_said:
                yield "something is said"
        elif not 1 <= sum(not line.startswith("  ") for line in lines_said) <= self._most_lines(point):
            yield "not one line for each that failed, with hints below"
        in_place = sum("in place" in line for line in lines_said)
        if point.exit in (1, 3) and in_place != point.outcome.count("new") and len(self.targets) == 1:
            yield "what is in place is not said"
        if point.exit not in self._exits(point.fault):
            yield "another exit status"

    def _is_known(self, name: str, *, killed: bool) -> bool:
        """Return whether the leftover `name` is a temporary file or, if the process was `killed`, a folder made for
        targets.
        """
        return is_temporary(os.path.basename(name)) or (
            killed and any(each.startswith(f"{name}/") for each in self.targets)
        )

    def _most_lines(self, point: Point) -> int:
        """Return the largest number of error lines: one for each failure. A batch that is interrupted adds a line about
        how to continue.
        """
        if len(self.targets) == 1:
            return 1
        if point.exit == 130 or self.processes:
            return len(self.targets) + 1
        return point.outcome.count("old") + point.line.count("in place")

    def _exits(self, fault: str) -> tuple[int, ...]:
        if self.processes:  # a killed process is started again, and Ctrl-C is not sent to it
            return (0, 1, 3)
        if fault in SIGNALS:  # signals, which may arrive when everything is done
            return {"signal=SIGINT": (130,), "signal=SIGTERM": (143,), "signal=SIGKILL": (-signal.SIGKILL,)}[fault]
        return (0, 1, 3) if len(self.targets) > 1 else (0, 1)


def not_durable(lines: Sequence[str], out: Path) -> list[str]:
    """Return what a loss of power could destroy, according to the order of the calls in `lines`.

    Files must be synced before they get a name in `out`, and folders with new names before the process ends. The result
    is also not empty if nothing was written or nothing got a name.
    """
    unsynced: set[str] = set()  # temporary files, and temporary folders with new names
    names: set[str] = set()  # folders that contain new names
    wrong: list[str] = []
    written = named = 0
    for line in lines:
        call = line.split(maxsplit=1)[1]
        name = call.split("(")[0]
        paths = [a or b for a, b in _PATH.findall(call.split(" = ")[0]) if (a or b).startswith(str(out))]
        ours = [path for path in paths if ".ckptconv-" in path]
        if " = -1 " in call or not paths:
            continue
        if name == "fsync":
            unsynced.discard(paths[0])
            names.discard(paths[0])
        elif name in _NAMING and ours:
            named += 1
            # Other files may be written at the same time.
            inside = [path for path in unsynced if f"{path}/".startswith(f"{ours[0]}/")]
            wrong += [f"named before it was synced: {path}" for path in sorted(inside)]
            names.add(os.path.dirname(paths[-1]))
        elif name in _WRITING and ours:
            written += 1
            unsynced.add(ours[-1])
        elif name == "mkdir" or (name == "openat" and "O_CREAT" in call):
            parent = os.path.dirname(paths[0])
            if ".ckptconv-" in parent:
                unsynced.add(parent)
            elif name == "mkdir" and not ours:
                names.add(parent)
    wrong += [f"the names in it were never synced: {folder}" for folder in sorted(names)]
    return wrong if written and named else [*wrong, "nothing was written, or nothing named"]
