"""The functions that the worker of the page calls. They take paths of the chosen files, and return JSON values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckptconv.conversion.discovery import find_in
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.parts import PlannedFile, plan_files
from ckptconv.conversion.targets import find_request
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits, split_edits
from ckptconv.errors import CkptconvError, DangerousError, MissingTorchError, UsageError, count, printable, some
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.hints import Command, Option, Placeholder, command, command_in
from ckptconv.inspection.comparison.diff import compare
from ckptconv.inspection.comparison.options import Compared
from ckptconv.inspection.summary import Summary, summary_of
from ckptconv.pickles.graph import gc_paused
from ckptconv.render.difference import difference_lines
from ckptconv.render.page import page_of
from ckptconv.render.page.summary import NO_VERDICT, summary_data
from ckptconv.render.report import report_lines
from ckptconv.render.text import Style, error_lines
from ckptconv.stores import is_url, list_folder
from ckptconv.work import watched

__all__ = ["Bridge", "error_text"]

_SHOWN = 20  # names of tensors in a message
_MOST = 2  # checkpoints at the same time
#: The percentages at which a step begins and ends: its share of the time for 60,000 tensors. The checks after "places"
#: and the page after "rows" do not report how far they are.
_STEPS = {
    "members": (0, 16), "pickle": (16, 34), "header": (0, 24), "storages": (34, 43), "places": (43, 50),
    "rows": (66, 76),
}  # a table  # fmt: skip
_READ, _CHECKED = 50, 76
_PHASES = ((_CHECKED, "Drawing"), (_READ, "Checking"), (0, "Reading"))
_SUFFIXES = {".bin", ".distcp", ".pt", ".pth", ".safetensors"}  # of the files of a set


class Bridge:
    """The checkpoint that the page shows, and the copy that was planned last."""

    def __init__(self, folder: str) -> None:
        """Set the folder that contains the files of the user."""
        self.folder, self.path = Path(folder), ""
        self.planned: tuple[PlannedFile, ...] = ()
        self._opened = ExitStack()

    def checkpoints(self) -> list[str]:
        """Return the paths of the one or two checkpoints among the chosen files, as in a command line.

        Each is a file or a folder. A set of files is a folder, because browsers do not reveal the name of the real
        folder.
        """
        self.forget()
        os.chdir(self.folder)
        folders, files = list_folder(Path())
        sets = [each for each in find_in(Path()) if each.kind in ("shards", "dcp")] if len(files) > 1 else []
        if len(sets) == 1 and not folders:
            os.chdir(self.folder.parent)
            return [str(self.folder.name / sets[0].path)]
        if len(folders) + len(files) > _MOST:
            raise UsageError(
                "one checkpoint is shown here, or two are compared",
                got=some([*folders, *files]),
                hint="choose the files of one set together, and no others. In a terminal "
                + command("convert_many", Placeholder("FOLDER"), Placeholder("OUT_FOLDER"))
                + " converts all that a folder has",
            )
        return [*folders, *files]

    def inspect(self, path: str, tick: Callable[[str, int], object] = lambda *_: None) -> dict[str, Any]:
        """Inspect the checkpoint at `path`. Return the verdict, the findings with their fixes, and the page about its
        content.

        `tick` is called with the name of the current phase and the percentage of all work that is done.
        """
        self.forget()
        self.path = path
        with watched(_percentages(tick, _files(Path(path)))):
            summary = summary_of(path)
        dangers = [printable(each.text) for each in summary.findings if each.kind == "dangerous"]
        findings = [
            {"text": printable(str(each.text)), "fix": _fix(each.command)}
            for each in summary.findings
            if each.kind != "dangerous"
        ] + (self._without_danger() if dangers else [])
        return {
            "loads": summary.loads_here,
            "verdict": _verdict(summary, bool(findings)),
            "findings": findings,
            "danger": dangers,
            "remedy": _fix(summary.remedy),
            "page": page_of({**summary_data(summary), "verdict": NO_VERDICT}),
        }

    def _without_danger(self) -> list[dict[str, Any]]:
        """Return a finding whose fix extracts the state dict, or nothing if a dangerous call would be copied, too."""
        src = Path(self.path)
        typed = command("convert", src, Path(f"{src.stem}-weights.pt"), Option("state_dict", True))
        fix = _fix(typed)
        try:
            self.plan(f"{src.stem}-weights.pt", {"state_dict": True})
        except CkptconvError:
            return []
        finally:
            self.forget()
        return [{"text": "A copy of only the state dict contains nothing dangerous.", "fix": fix}]

    def plan(self, dst: str, options: dict[str, Any]) -> dict[str, Any]:
        """Plan a copy named `dst`. Return its report, its command line and its files.

        `options` are keywords of ``convert``.
        """
        self.forget()
        others = dict(options)
        maps = [tuple(each.split("=", 1)) if "=" in each else each for each in others.pop("map_location", [])]
        line = command("convert", Path(self.path), Path(dst), *_typed(maps), *_typed_others(others))
        edits, others = split_edits({**others, "map_location": to_devices(*options.get("map_location", []))})
        output = OutputOptions(**others)
        if is_url(dst):
            raise UsageError("a browser saves files on this machine", where=dst, expected="a name")
        request = find_request(self.path, dst, edits, output)
        try:
            planned = plan_files(request.src, request)
        except MissingTorchError as error:
            error.hint = f"a browser has no torch; the command line does it: {line}"
            raise
        except DangerousError as error:
            error.hint = (
                "do not load it. This page saves only a copy without that: take the state dict, or leave it out"
            )
            raise
        self.planned = planned
        self._opened.enter_context(planned[0])
        report = planned[0].report
        return {
            "command": str(line),
            "report": "\n".join(report_lines(report, Style())),
            "folder": request.dst.name if request.is_folder else "",
            "files": [
                {
                    "name": file.path.relative_to(request.dst).as_posix() if request.is_folder else file.path.name,
                    "size": file.size,
                    "reads": file.nbytes_read,
                }
                for file in planned
            ],
        }

    def parts(self, number: int, tick: Callable[[int], None]) -> Iterator[Any]:
        """Yield the parts of the planned file `number`. A part is bytes, or the path, offset and length of a range in a
        file.
        """
        for part in self.planned[number].parts(tick):
            if isinstance(part, bytes):
                yield part
            else:
                yield [os.path.relpath(part.path, self.folder), part.offset, part.length]

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Compare two checkpoints. Without torch, only their headers and checksums are compared."""
        line = str(command("diff", Path(a), Path(b)))
        try:
            found, note = compare(a, b, Edits()), ""
        except MissingTorchError:
            found = compare(a, b, Edits(), Compared(names_only=True))
            note = _by_headers(*map(_headers, (a, b)))
        lines = ("names: " if note else "") + "\n".join(difference_lines(found, Style(), names_only=bool(note)))
        dangers = [*map(printable, found.dangers)]
        return {"same": found.same and not note, "dangers": dangers, "text": lines, "note": note, "command": line}

    def forget(self) -> None:
        """Forget the copy that was planned last, and close its source."""
        self._opened.close()
        self.planned = ()


def _files(path: Path) -> int:
    """Return the number of files that belong to the checkpoint at `path`: a file, a folder or the index of a set."""
    if path.is_file() and path.suffix != ".json":
        return 1
    folder = path if path.is_dir() else path.parent
    return max(sum(each.suffix in _SUFFIXES for each in folder.iterdir()), 1)


def _percentages(tick: Callable[[str, int], object], files: int) -> Callable[[str, int, int], None]:
    """Return a watch that calls `tick` with the phase and the percentage of all work, whenever the percentage rises.

    A step that starts again belongs to the next of the `files`. The percentage never falls.
    """
    order = [*_STEPS]
    last = at = -1
    number = 0  # the index of the current file

    def watch(step: str, done: int, total: int) -> None:
        nonlocal last, at, number
        if not done and order.index(step) <= at:
            number = min(number + 1, files - 1)
        at = order.index(step)
        begin, end = _STEPS[step]
        exact = begin + (end - begin) * min(done, total) / max(total, 1)
        percent = int(exact if exact > _READ else (_READ * number + exact) / files)
        if percent > last:
            last = percent
            tick(next(phase for least, phase in _PHASES if percent >= least), percent)

    return watch


def _headers(path: str) -> dict[str, tuple[tuple[Any, ...], Any, int | None]]:
    """Return the dtype, shape and device of each tensor, its position in its storage, and the checksum or None, by
    path.
    """
    with open_input(path) as source, gc_paused():
        infos = opening.read(source).tensors.values()
        return {
            each.path: (
                (each.dtype, each.shape, each.device),
                (each.stride, each.offset),
                each.storage.data.crc32_known(),
            )
            for each in infos
            if each.storage
        }


def _by_headers(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return a text about the common tensors that differ, as far as headers and checksums show it."""
    found: dict[str, list[str]] = {"dtype": [], "shape": [], "device": [], "values": []}
    same = unknown = 0
    for path in (each for each in a if each in b):
        (facts, place, crc), (facts_b, place_b, crc_b) = a[path], b[path]
        kinds = [kind for kind, one, other in zip(found, facts, facts_b, strict=False) if one != other]
        has_values = (facts[:2], place) == (facts_b[:2], place_b) and None not in (crc, crc_b)
        kinds += ["values"] if has_values and crc != crc_b else []
        for kind in kinds:
            found[kind].append(path)
        same += has_values and not kinds
        unknown += not has_values and not kinds
    different = [
        f"{kind} of {count(len(paths), 'tensor')} ({some(paths, _SHOWN)})" for kind, paths in found.items() if paths
    ]
    return (
        "There are tensors that differ. Without torch, only headers and checksums are compared: "
        + ", ".join([*different, f"{same:,} the same", f"{unknown:,} not known"])
        + ". The command line says which values differ, and how far."
    )


def error_text(error: BaseException) -> str:
    """Return `error` as the command line prints it. Limits of the browser have their own text."""
    if isinstance(error, CkptconvError):
        return "\n".join(map(printable, error_lines(error)))
    if isinstance(error, (MemoryError, RecursionError)):
        return "ckptconv: this file needs more memory than a browser gives: use the command line"
    return printable(f"ckptconv: a fault of this program: {type(error).__name__}: {error}")


def _verdict(summary: Summary, has_findings: bool) -> str:
    said = {
        True: "torch.load takes it as it is.",
        False: "torch.load refuses it as it is.",
        None: "torch.load may refuse it.",
    }[summary.loads_here]
    return said + (" What was found:" if has_findings else "")


def _fix(message: str | None) -> dict[str, Any] | None:
    """Return the command in `message` as values for the form: the name of the copy, and the options."""
    line: Command | None = command_in(message)
    if line is None:
        return None
    _, dst, *others = line.arguments
    said = {each.keyword: _for_form(each) for each in others if isinstance(each, Option)}
    return {"command": str(message), "dst": str(dst), "options": said}


def _for_form(option: Option) -> Any:
    """Return the value of `option` as True, or as a list of texts or pairs. A pair of devices is the text OLD=NEW."""
    if isinstance(option.value, bool):
        return option.value
    join = "=".join if option.keyword == "map_location" else list
    return [join(each) if isinstance(each, tuple) else str(each) for each in _several(option.value)]


def _typed(devices: list[Any]) -> list[Option]:
    return [Option("map_location", (each,)) for each in devices]


def _typed_others(said: dict[str, Any]) -> list[Option]:
    found = []
    for keyword, value in said.items():
        several = tuple(tuple(each) if isinstance(each, list) else each for each in _several(value))
        found.append(Option(keyword, value if isinstance(value, (bool, str)) else several))
    return found


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
