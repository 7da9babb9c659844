"""What a batch did, or would do: a line for each item, and the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.render.text import Look, cells, count, fact, size

if TYPE_CHECKING:
    from ckptconv.model import Report

__all__ = ["COPIED", "item_line", "skipped_line", "sum_lines"]

#: The formats in the report of what is no checkpoint and was copied.
COPIED = ("other", "other")
_SHOWN = 3  # things in one place
_PLAIN = Look()


def item_line(report: Report, look: Look = _PLAIN) -> str:
    """What became of one item, in one line."""
    return _line(look, report.dst, ", ".join(_parts(report)))


def skipped_line(dst: str, look: Look = _PLAIN) -> str:
    """The line of an item whose output is there already."""
    return _line(look, dst, "exists, skipped")


def _parts(report: Report) -> Iterator[str]:
    changes = report.changes
    old_format, new_format = report.formats
    yield size(report.size)
    if report.formats == COPIED:
        yield "copied"
    elif old_format != new_format:
        yield f"{old_format} → {new_format}"
    if changes.devices:
        yield _some(f"{old} → {new}" for old, new in changes.devices)
    if changes.names:
        yield count(len(changes.names), "name")
    if changes.dtypes:
        yield _some(f"{old} → {new}" for old, new in changes.dtypes)
    if report.overflowed:
        yield f"{sum(report.overflowed.values()):,} too large"
    if report.left_behind:
        yield f"{len(report.left_behind):,} left behind"
    if report.failed:
        yield f"{len(report.failed):,} beside it failed"
    if report.notes:
        yield count(len(report.notes), "note")


def sum_lines(
    reports: Sequence[Report], skipped: int, failed: int, seconds: float, other: Sequence[Path], unentered: Sequence[Path],
    look: Look = _PLAIN,
) -> Iterator[str]:  # fmt: skip
    """How many items there were and what became of them, and what in their folders was OTHER, or UNENTERED."""
    copied = sum(report.formats == COPIED for report in reports)
    would = "" if all(report.written for report in reports) else "would be "
    in_time = "" if would else f" in {seconds:.2f} s"
    total = size(sum(report.size for report in reports))
    said = [f"{len(reports) - copied:,} {would}converted", f"{total}{in_time}"]
    said += [f"{n:,} {what}" for n, what in ((copied, f"{would}copied"), (skipped, "skipped"), (failed, "failed")) if n]
    yield look.paint(look.text(f"{count(len(reports) + skipped + failed, 'item')}: {', '.join(said)}"), "title")
    if other:
        yield from fact(look, "left", f"{count(len(other), 'other file')} ({_names(other)}): --copy-others takes them along")  # fmt: skip
    if unentered:
        yield from fact(look, "not entered", f"{_names(unentered)}: hidden, or a link to a folder")
    if any(report.notes or report.left_behind for report in reports):
        yield from fact(look, "note", "-v tells all of each")


def _names(paths: Sequence[Path]) -> str:
    return _some(path.name for path in paths)


def _some(things: Iterable[str]) -> str:
    listed = list(dict.fromkeys(things))
    return ", ".join(listed[:_SHOWN]) + (", …" if len(listed) > _SHOWN else "")


def _line(look: Look, path: str, said: str) -> str:
    """PATH and what is SAID of it; on a terminal as much of both as fits a line, of the path its end."""
    path, said = look.text(path), look.text(said)
    if look.width is not None:
        mark = look.text("…")
        said = _fitting(said, look.columns - 20, lambda text: text[:-1], lambda text: text + mark)
        path = _fitting(path, look.columns - 2 - cells(said), lambda text: text[1:], lambda text: mark + text)
    return f"{path}: {said}"


def _fitting(text: str, room: int, shorter: Callable[[str], str], marked: Callable[[str], str]) -> str:
    """TEXT, or as much of it as fits ROOM columns once it is MARKED."""
    if cells(text) <= room:
        return text
    while text and cells(marked(text)) > room:
        text = shorter(text)
    return marked(text)
