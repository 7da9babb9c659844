"""What the worker calls: files of the browser go in; verdicts, plans and parts come out, as JSON can hold them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.parts import PlannedFile
from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import Edits, edits_from
from ckptconv.errors import CkptconvError, MissingTorchError, printable, some
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.hints import Command, Option, command, command_in
from ckptconv.inspection.comparison.diff import Compared, compare
from ckptconv.inspection.summary import Summary, summary_of
from ckptconv.pickles.graph import gc_paused
from ckptconv.render.difference import difference_lines
from ckptconv.render.page.document import page_of
from ckptconv.render.page.summary import NO_VERDICT, summary_data
from ckptconv.render.report import report_lines

__all__ = ["Bridge", "DroppedFile", "error_text"]

_SHOWN = 20  # names in a text


class Slices(Protocol):
    """A file of the browser: what the worker has of it."""

    name: str
    size: int

    def read(self, offset: int, length: int) -> Any:
        """These bytes, which ``to_bytes`` gives; a text says why they cannot be read."""


class DroppedFile:
    """A file of the browser as a file object of Python, which counts what it has read."""

    def __init__(self, file: Slices) -> None:
        self._file, self._at, self.nread = file, 0, 0
        self.name = file.name

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(self._file.size - self._at, 0)
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        found = self._file.read(self._at, length)
        if isinstance(found, str):
            raise OSError(found)
        data: bytes = found.to_bytes()
        self._at += len(data)
        self.nread += len(data)
        return data


class Bridge:
    """The file that is looked at, and what was planned last."""

    def __init__(self) -> None:
        self.file: DroppedFile | None = None
        self.planned: PlannedFile | None = None

    def inspect(self, file: Slices) -> dict[str, Any]:
        """Look into `file`: the verdict, the fixes, and the page of what is in it."""
        self.file, self.planned = DroppedFile(file), None
        summary = summary_of(self.file)
        return {
            "loads": summary.loads_here,
            "verdict": _verdict(summary),
            "format": summary.format,
            "findings": [
                {"text": printable(str(each.text)), "blocks": each.blocks, "fix": _fix(each.command)}
                for each in summary.findings
            ],
            "remedy": _fix(summary.remedy),
            "notes": [printable(str(note)) for note in summary.notes],
            "page": page_of({**summary_data(summary), "verdict": NO_VERDICT}),
            "nread": self.file.nread,
        }

    def plan(self, dst: str, options: dict[str, Any]) -> dict[str, Any]:
        """Plan the file `dst`, with the `options` of ``convert``: the report, the command line, what will be read."""
        self.planned = None
        assert self.file is not None
        said = dict(options)
        maps = [tuple(each.split("=", 1)) if "=" in each else each for each in said.pop("map_location", [])]
        edits = edits_from(map_location=to_devices(*options.get("map_location", [])), **said)
        line = command("convert", Path(self.file.name), Path(dst), *_typed(maps), *_typed_others(said))
        try:
            self.planned = PlannedFile(self.file, Path(dst), edits, OutputOptions.of(said))
        except MissingTorchError as error:
            error.hint = f"a browser has no torch; the command line does it: {line}"
            raise
        return {
            "command": str(line),
            "report": "\n".join(report_lines(self.planned.report)),
            "size": self.planned.size,
            "reads": self.planned.nbytes_read,
        }

    def parts(self, tick: Callable[[int], None]) -> Iterator[Any]:
        """What the planned file is made of: bytes, or the offset and length of what stands in the file."""
        assert self.planned is not None
        for part in self.planned.parts(tick):
            yield part if isinstance(part, bytes) else [part.offset, part.length]

    def diff(self, a: Slices, b: Slices) -> dict[str, Any]:
        """Compare two files as far as it can be done without torch."""
        files = DroppedFile(a), DroppedFile(b)
        line = str(command("diff", Path(a.name), Path(b.name)))
        try:
            found, note = compare(*files, Edits()), ""
        except MissingTorchError:
            found = compare(*files, Edits(), Compared(names_only=True))
            note = _by_checksums(*(_checksums(file) for file in files))
        lines = ("names: " if note else "") + "\n".join(difference_lines(found, names_only=bool(note)))
        return {"same": found.same and not note, "text": lines, "note": note, "command": line}


def _checksums(file: DroppedFile) -> dict[str, tuple[Any, int | None]]:
    """What each tensor is, and the checksum of its storage, if the file has one."""
    with open_input(file) as source, gc_paused():
        infos = opening.read(source).tensors.values()
        return {
            each.path: ((each.dtype, each.shape, each.stride, each.offset), each.storage.data.crc32_known())
            for each in infos
            if each.storage
        }


def _by_checksums(a: dict[str, tuple[Any, int | None]], b: dict[str, tuple[Any, int | None]]) -> str:
    """Which tensors of one path are others, as far as headers and checksums tell."""
    both = [path for path in a if path in b]
    different = [path for path in both if a[path] != b[path] and None not in (a[path][1], b[path][1])]
    known = [path for path in both if path not in different and a[path] == b[path] and a[path][1] is not None]
    rest = len(both) - len(different) - len(known)
    return (
        "There are tensors that differ. Without torch, only headers and checksums are compared:"
        f" {len(different):,} different"
        + (f" ({some(different, _SHOWN)})" if different else "")
        + f", {len(known):,} the same, {rest:,} not known. The command line says which values differ, and how far."
    )


def error_text(error: BaseException) -> str:
    """What the command line says of `error`, which is one of ours, or what a browser's limits do."""
    if isinstance(error, CkptconvError):
        return printable(f"ckptconv: {error}")
    if isinstance(error, (MemoryError, RecursionError)):
        return "ckptconv: this file needs more memory than a browser gives: use the command line"
    return printable(f"ckptconv: a fault of this program: {type(error).__name__}: {error}")


def _verdict(summary: Summary) -> str:
    if summary.loads_here and summary.findings:
        return "torch.load takes it as it is. What else was found:"
    return {
        True: "torch.load takes it as it is.",
        False: "torch.load does not take it as it is.",
        None: "Whether torch.load takes it depends on the machine.",
    }[summary.loads_here]


def _fix(message: str | None) -> dict[str, Any] | None:
    """The command in `message` as what the form is filled with: the name of the output, and the options."""
    line: Command | None = command_in(message)
    if line is None:
        return None
    _, dst, *others = line.arguments
    said = {each.keyword: _for_form(each.value) for each in others if isinstance(each, Option)}
    return {"command": str(message), "dst": str(dst), "options": said}


def _for_form(value: Any) -> Any:
    """The value of an option: True, or texts, one a line; a pair of devices is OLD=NEW."""
    if isinstance(value, bool):
        return value
    return ["=".join(each) if isinstance(each, tuple) else str(each) for each in _several(value)]


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
