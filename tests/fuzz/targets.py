"""The targets. Bytes are read as a file or folder of one format, which is inspected, verified and converted.

Files and outputs are file objects in memory. One of twenty files has a path in a temporary folder, and folders always
have one.

Every exception except :class:`~ckptconv.errors.CkptconvError` is a finding. A violated guarantee is also a finding:

- An output can be read, contains the same tensors, and is converted again to the same bytes.
- A pickle that is emitted again does the same.
- The lenient reader lists every global that one of CPython's unpicklers reaches.
- A pickle has the same graph, error and output with and without rows.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ckptconv.byteranges.spans import Assemble, Cast, Gather
from ckptconv.checkpoint.weights_only.unpickler import can_be_made_loadable
from ckptconv.conversion.convert import convert, write
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import Plan, make_plan
from ckptconv.edits.options import Edits, edits_from
from ckptconv.errors import CkptconvError, DangerousError, MalformedError
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.inspection.summary import Summary, summarize
from ckptconv.inspection.verification import verify
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import Blob, Graph, gc_paused
from ckptconv.pickles.parser import parse
from ckptconv.render.summary import facts
from ckptconv.render.table import table_lines, tree_lines
from ckptconv.render.text import Style
from ckptconv.stores.memory import FileObjectDestination
from tests.fuzz import folders, http_answers, texts, unpicklers
from tests.support import row_pickles
from tests.support.reference_machine import trace

__all__ = ["TARGETS", "Target", "run"]

#: A machine with one GPU, for the same results on every machine.
_MACHINE = Host(1)
_BY_PATH = 20  # one of so many files has a path
_TRACED = 2000  # bytes of a pickle that the reference machine also runs, which recurses as deeply as the pickle


class Memory(io.BytesIO):
    """A file in memory with a name."""

    def __init__(self, path: Path, data: bytes = b"") -> None:
        super().__init__(data)
        self.name = str(path)


Given: TypeAlias = "Path | Memory"


class Target(NamedTuple):
    """A target. `check` processes bytes in an empty folder, returns whether they were read, and raises for a
    finding.
    """

    name: str
    check: Callable[[bytes, Path], bool]


def run(target: str, data: bytes, folder: Path) -> bool:
    """Run `target` on `data` in `folder`, which is emptied before and after. Return whether the data was read."""
    try:
        _empty(folder)
        return TARGETS[target].check(data, folder)
    finally:
        _empty(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# Pickles


def _check_pickle(data: bytes, folder: Path) -> bool:
    try:
        graph = _parsed(data)
    except CkptconvError:
        return _check_file("input.pkl", data, folder)
    for loadable in {False, can_be_made_loadable(graph)}:
        once = _emitted(data, graph, loadable=loadable)
        again = _emitted(once, _parsed(once), loadable=loadable)
        assert loadable or graph.discarded or again == once, "what was emitted is not emitted again"
        if not loadable and len(data) < _TRACED:
            assert trace(once) == trace(data) == trace(again), "what was emitted does something else"
    _check_file("input.pkl", data, folder)
    return True


def _check_http(data: bytes, folder: Path) -> bool:
    try:
        return http_answers.read(data, folder)
    except CkptconvError as error:
        _check_line(error)
        return False


def _parsed(data: bytes) -> Graph:
    graph, end = parse(lambda offset, length: data[offset : offset + length], len(data), where="input")
    assert end <= len(data)
    return graph


def _emitted(data: bytes, graph: Graph, *, loadable: bool) -> bytes:
    pieces = emit(graph, loadable=loadable)
    return b"".join(data[p.offset : p.offset + p.length] if isinstance(p, Blob) else p for p in pieces)


def _check_program(data: bytes, folder: Path) -> bool:
    """Fail unless a program is moved to another device with all tensors, or refused with a printable error."""
    given, moved = folder / "input.pt2", folder / "moved.pt2"
    given.write_bytes(data)
    try:
        before = _inspected(given)
        convert(given, moved, map_location="cuda:1", allow_unsafe=True)
    except CkptconvError as error:
        _check_line(error)
        assert not moved.exists(), "a refused program was written"
        return False
    after = _inspected(moved)
    assert _tensors(after) == _tensors(before), "the tensors are others"
    assert {*after.devices} <= {"cuda:1", "meta"}, "a device is left"
    return True


def _check_lenient(data: bytes, folder: Path) -> bool:
    with unpicklers.bounded():
        seen = unpicklers.compared(data)
    assert not seen.missed, seen.missed
    return seen.reached > 0


def _check_rows(data: bytes, folder: Path) -> bool:
    del folder
    (graph, said), (plain, expected) = row_pickles.read(data, rows=True), row_pickles.read(data, rows=False)
    assert said == expected, "an error, or its place, is another with rows"
    if graph and plain:
        for tag in (None, "mps:0"):
            written = row_pickles.emitted(graph, data, tag, splice=True)
            assert written == row_pickles.emitted(plain, data, tag, splice=False), "rows are written in other bytes"
    assert row_pickles.described(graph) == row_pickles.described(plain), "the graph is another with rows"
    return graph is not None


# Files and folders


def _check_file(name: str, data: bytes, folder: Path) -> bool:
    by_path, choice = divmod(zlib.crc32(data), _BY_PATH)[::-1]
    path = folder / name
    if by_path:
        return _use(Memory(path, data), folder, choice)
    path.write_bytes(data)
    return _use(path, folder, choice)


def _check_folder(data: bytes, folder: Path) -> bool:
    path = folder / "input"
    path.mkdir()
    folders.write(folders.unpack(data), path)
    return _use(path, folder, zlib.crc32(data))


def _use(given: Given, folder: Path, choice: int) -> bool:
    """Inspect, verify and convert `given` with outputs in `folder`. Return whether it was read.

    `choice` selects one of the slow checks.
    """
    sound = _verified(given)
    try:
        summary = _inspected(given)
    except CkptconvError as error:
        _check_line(error)
        if sound and not isinstance(error, DangerousError):
            raise AssertionError("verify finds nothing wrong with what inspect refuses") from error
        return False
    json.dumps(summary.as_dict())
    if choice % 4 == 0:
        _draw(summary)
    if choice % 2:
        _convert_twice(given, folder, summary, sound=sound)
    else:
        _convert_somehow(given, folder, choice // 4, sound=sound)
    return True


def _verified(given: Given) -> bool:
    """Return whether verify finds no damage in `given`. Code that loading would run is no damage."""
    try:
        verdict = verify(given)
    except CkptconvError as error:
        _check_line(error)
        return False
    for finding in verdict.findings:
        assert str(finding).isprintable()
    return not verdict.more and not {"damaged", "unknown"} & {finding.level for finding in verdict.findings}


def _inspected(given: Given) -> Summary:
    with open_input(given) as source, gc_paused():
        return summarize(opening.read(source), _MACHINE)


def _check_line(error: CkptconvError) -> None:
    line = str(error)
    assert line.isprintable() and len(line) < 40_000, "an error is no printable line"


def _check_refusal(error: CkptconvError, *, sound: bool) -> None:
    _check_line(error)
    is_damage = isinstance(error, MalformedError)
    is_damage &= not str(error.where).endswith("config.json")  # verify does not read this file next to the checkpoint
    assert not (sound and is_damage), "verify finds nothing wrong with what is damaged"


def _draw(summary: Summary) -> None:
    for look in (Style(), Style(80, colour=True), Style(120, unicode=False)):
        lines = [*facts(summary, look), *table_lines(summary.tensors, look), *tree_lines(summary.tensors, look)]
        for line in [] if look.colour else lines:
            assert line.replace("\n", "").replace("\t", "").isprintable(), "a line would move the cursor"


def _convert_twice(given: Given, folder: Path, summary: Summary, *, sound: bool) -> None:
    """Convert `given` to torch's zip format on the CPU. Fail unless the tensors stay the same and the bytes become
    stable.
    """
    edits = edits_from(map_location="cpu")
    try:
        first = _converted(given, folder / "1.pt", edits, "pt")
        if not first:
            return
    except CkptconvError as error:
        _check_refusal(error, sound=sound)
        return
    assert _tensors(_inspected(first)) == _tensors(summary), "the tensors are others"
    # The first conversion of the output may change bytes. Python has one object for each string of one character, and a
    # key in the output can be one. Bytes that contain a torch file are first written as bytes, and later as a call of
    # protocol 2, whose objects are then shared.
    before = first
    for n in range(2, 5):
        after = _converted(before, folder / f"{n}.pt", edits, "pt")
        assert after
        if _bytes(before) == _bytes(after):
            return
        before = after
    raise AssertionError("what was written is not written again")


def _bytes(given: Given) -> bytes:
    return given.getvalue() if isinstance(given, Memory) else given.read_bytes()


_FILE_AS_KEY = re.compile(r"(\[<[0-9]+>\]|/\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.).*", re.DOTALL)
_SOMEHOW: tuple[tuple[str, str, Edits], ...] = (
    ("out.safetensors", "safetensors", edits_from()),
    ("out.pt", "legacy", edits_from(map_location="cuda:1")),
    ("out.pkl", "pickle", edits_from(map_location={"cuda": "cpu", "any": "mps"})),
    ("out.pt", "pt", edits_from(state_dict=True, unwrap=True, compact=True)),
    ("out.pt", "pt", edits_from(dtype=["bf16", "*bias=fp32"], add_prefix="model")),
    ("out.pt", "pt", edits_from(rename=[("^[a-z]+", "x")], exclude="*.b*")),
    ("out.safetensors", "safetensors", edits_from(strip_prefix="module", dtype="fp16")),
)


def _convert_somehow(given: Given, folder: Path, choice: int, *, sound: bool) -> None:
    name, format, edits = _SOMEHOW[choice % len(_SOMEHOW)]
    copy_tied = format == "safetensors" and bool(choice & 64)
    try:
        written = _converted(given, folder / name, edits, format, copy_tied=copy_tied)
    except CkptconvError as error:
        _check_refusal(error, sound=sound)
        return
    if written and (format != "pickle" or _inspected(given).storages):  # a pickle without tensors is not a checkpoint
        _inspected(written)


def _converted(given: Given, target: Path, edits: Edits, format: str, *, copy_tied: bool = False) -> Given | None:
    """Return the converted `given` in `format`. If that needs torch, only make a plan and return None.

    The output of a file in memory is a file in memory named `target`. Otherwise, it is written to `target`.
    """
    with open_input(given) as source:
        output = OutputOptions(format=format, copy_tied=copy_tied, allow_unsafe=True, force=True)
        plan = make_plan(opening.read(source), target, edits, output)
        if _needs_torch(plan):
            return None
        if isinstance(given, Path):
            write(plan, source, output)
            return target
        memory = Memory(target)
        FileObjectDestination(memory).write_all(plan.files[0], verify=False)
        source.check_unchanged()
        return memory


def _needs_torch(plan: Plan) -> bool:
    return any(isinstance(piece, (Gather, Cast, Assemble)) for file in plan.files for piece in file.pieces)


def _tensors(summary: Summary) -> list[Any]:
    """Return the properties of the tensors in `summary` that do not depend on devices.

    Tensors and storages are numbered in the order of their paths, because the order in the file can change. So can the
    first of several tied tensors. A key that contains a complete torch file has no name until it is written again, so
    such keys are replaced.
    """
    named = [
        replace(tensor, name=None, path=_FILE_AS_KEY.sub("[?]", tensor.path))
        if _FILE_AS_KEY.search(tensor.path)
        else tensor
        for tensor in summary.tensors
    ]
    named.sort(key=lambda tensor: tensor.path)
    numbers: dict[object, int] = {}
    first: dict[str, str] = {}  # the first path of each group of tied tensors
    for tensor in named:
        first.setdefault(tensor.tied_to or tensor.path, tensor.path)
    return [
        replace(
            tensor,
            device=None,
            storage=numbers.setdefault(tensor.storage, len(numbers)),
            tied_to=first[tensor.tied_to or tensor.path],
        )
        for tensor in named
    ]


TARGETS = {
    target.name: target
    for target in (
        Target("pickle", _check_pickle),
        Target("lenient", _check_lenient),
        Target("rows", _check_rows),
        Target("zip", lambda data, folder: _check_file("input.pt", data, folder)),
        Target("legacy", lambda data, folder: _check_file("input.pt", data, folder)),
        Target("safetensors", lambda data, folder: _check_file("input.safetensors", data, folder)),
        Target("shards", _check_folder),
        Target("dcp", _check_folder),
        Target("zero", _check_folder),
        Target("http", _check_http),
        Target("rules", texts.check_rules),
        Target("journal", texts.check_journal),
        Target("url", texts.check_url),
        Target("page", texts.check_page),
        Target("index", texts.check_index),
        Target("shell", texts.check_shell),
        Target("program", _check_program),
    )
}
