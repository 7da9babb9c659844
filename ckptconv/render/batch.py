"""Render what a batch did: a line for each item, and the sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.errors import count, size, some
from ckptconv.hints import option
from ckptconv.render.text import Style, cells, fact, fitting

if TYPE_CHECKING:
    from ckptconv.conversion.jobs import Outcome
    from ckptconv.conversion.plan import Report
    from ckptconv.conversion.targets import Listing

_REASONS = 10  # of failures


def item_line(report: Report, style: Style, *, copied: bool = False) -> str:
    """What became of one item, in one line. `copied`: it is no checkpoint, and was copied."""
    said = [size(report.size), "copied" if report.written else "would be copied"] if copied else _parts(report)
    return _line(style, report.dst, ", ".join(said))


def skipped_line(dst: str, style: Style) -> str:
    """The line of an item whose output is there already."""
    return _line(style, dst, "exists, skipped")


def _parts(report: Report) -> Iterator[str]:
    changes = report.changes
    old_format, new_format = report.formats
    yield size(report.nbytes) + (" in place" if report.in_place else "")
    if old_format != new_format:
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
    outcomes: Sequence[Outcome],
    listing: Listing,
    why: Mapping[str, Sequence[str]],
    style: Style,
    *,
    seconds: float,
    in_full: bool,
) -> Iterator[str]:
    """How many items there were and what became of them, what failed, and what was left in their folders.

    Args:
        outcomes: What became of each.
        listing: What the command meant.
        why: What went wrong, with the inputs of which that is true, those beside sets among them.
        style: What it is drawn for.
        seconds: How long it took.
        in_full: The report of each was shown.
    """
    converted = [each.report for each in outcomes if each.report and not each.is_copy]
    copied = [each.report for each in outcomes if each.report and each.is_copy]
    done = [*converted, *copied]
    would = "" if all(report.written for report in done) else "would be "
    in_time = "" if would else f" in {seconds:.2f} s"
    said = [f"{len(converted):,} {would}converted", f"{size(sum(report.nbytes for report in done))}{in_time}"]
    beside = sum(len(report.failed) for report in converted)
    counts = (
        (len(copied), f"{would}copied"),
        (sum(each.skipped for each in outcomes), "skipped"),
        (sum(each.error is not None for each in outcomes), "failed"),
        (beside, "beside a set failed"),
    )
    said += [f"{n:,} {what}" for n, what in counts if n]
    yield style.paint(style.text(f"{count(len(outcomes), 'item')}: {', '.join(said)}"), "title")
    for reason, paths in [*why.items()][:_REASONS]:
        yield from fact(style, "failed", f"{reason}: {some(paths)}")
    if len(why) > _REASONS:
        yield from fact(style, "failed", f"… for {count(len(why) - _REASONS, 'more reason')}")
    if listing.other:
        them = "it" if len(listing.other) == 1 else "them"
        yield from fact(
            style,
            "left",
            f"{count(len(listing.other), 'other file')}: {_names(listing.other)}; {option('copy_others')} takes {them}"
            " along",
        )
    if listing.unentered:
        yield from fact(style, "not entered", f"{_names(listing.unentered)}: hidden, or a link to a folder")
    for note in listing.notes:
        yield from fact(style, "note", note)
    if not in_full and any(report.notes or report.left_behind for report in done):
        yield from fact(style, "note", "-v tells all of each")


def _names(paths: Sequence[Path]) -> str:
    return some([path.name for path in paths])


def _some(things: Iterable[str]) -> str:
    listed = list(dict.fromkeys(things))
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")


def _line(style: Style, path: str, said: str) -> str:
    """`path` and what is `said` of it; on a terminal as much of both as fits a line, of the path its end."""
    path, said = style.text(path), style.text(said)
    if style.width is not None:
        said = fitting(said, style.columns - 20, style)
        path = fitting(path, style.columns - 2 - cells(said), style, end=True)
    return f"{path}: {said}"
