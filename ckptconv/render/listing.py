"""Format many checkpoints, or the items of a batch: one line for each, and their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import count, size, some
from ckptconv.hints import option
from ckptconv.render.text import Style, cells, fact, fitting, padded, wrapped

if TYPE_CHECKING:
    from ckptconv.conversion.jobs import Outcome
    from ckptconv.conversion.plan import Report
    from ckptconv.conversion.targets import Listing
    from ckptconv.inspection.summary import Summary

_GAP = "  "
_UNKNOWN = "–"
_HEADINGS = ("checkpoint", "format", "size", "tensors", "devices", "loads here")
#: The words for one checkpoint and for several.
_ANSWERS = {
    "yes": ("loads here", "load here"),
    "no": ("does not load here", "do not load here"),
    "DANGEROUS": ("is dangerous", "are dangerous"),
    "not known": ("is not known to load here", "are not known to load here"),
    "not readable": ("cannot be read", "cannot be read"),
}
_RIGHT = (2, 3)  # columns of numbers
_LEAST_PATH = 12  # columns
_LINES = 23  # a terminal has 24, one of them for the prompt
_REASONS = 10  # reasons of failures that are printed


class Line(NamedTuple):
    """A checkpoint in the table.

    Attributes:
        path: Its path.
        texts: Its format, number of tensors, devices, and whether it loads here.
        nbytes: Its size, or None if that is not known.
        answer: A key of ``_ANSWERS``, by which checkpoints are counted in the sum.
    """

    path: str
    texts: tuple[str, ...]
    nbytes: int | None
    answer: str


def line_of(summary: Summary) -> Line:
    """Return the table line for `summary`."""
    blocking = next((finding.kind for finding in summary.findings if finding.blocks), "")
    answer = (
        "DANGEROUS" if blocking == "dangerous" else {True: "yes", False: "no", None: "not known"}[summary.loads_here]
    )
    if summary.torch_load.other_torch and answer == "not known":
        with_other = f"no: {blocking}" if blocking else "yes" if summary.torch_load.answer == "loads" else answer
        loads = f"{with_other} (torch {summary.torch_load.torch})"
    else:
        loads = f"no: {blocking}" if answer == "no" and blocking else answer
    devices = ", ".join(list(summary.devices)[:2]) + (", …" if len(summary.devices) > 2 else "") or "–"
    return Line(summary.path, (summary.format, f"{len(summary.tensors):,}", devices, loads), summary.size, answer)


def unread_line(path: str, nbytes: int | None) -> Line:
    """Return the table line for a path that could not be read.

    `nbytes` is the size of the file, or None if not known.
    """
    return Line(path, (_UNKNOWN, _UNKNOWN, _UNKNOWN, "not readable"), nbytes, "not readable")


def listing_lines(
    lines: Sequence[Line], style: Style, *, limit: int | None = None, everything: bool = False
) -> Iterator[str]:
    """Yield a table of `lines`, and their sum.

    The table has at most `limit` rows. If `limit` is None, it has all rows if `everything` is set or the output goes to
    a program, and otherwise as many as fit into 24 lines of a terminal.
    """
    if limit is None and style.width is not None and not everything and len(lines) > _LINES - 3:
        limit = _LINES - 4
    shown = lines if everything else lines[:limit]
    if style.width is None:
        for line in shown:
            form, *others = (style.text(text) for text in line.texts)
            yield "\t".join(
                (style.text(line.path), form, _UNKNOWN if line.nbytes is None else str(line.nbytes), *others)
            )
    else:
        yield from _drawn(shown, style)
    if len(shown) < len(lines):
        more = f"  … {count(len(lines) - len(shown), 'more checkpoint')} ({option('all')} shows them)"
        yield style.paint(style.text(more), "quiet")
    answers = Counter(line.answer for line in lines)
    answered = ", ".join(f"{n:,} {_ANSWERS[answer][n > 1]}" for answer, n in answers.items())
    why = "; inspect one file to see why" if answers.keys() - {"yes"} else ""
    total = f"{count(len(lines), 'checkpoint')}, {size(sum(line.nbytes or 0 for line in lines))}: {answered}{why}"
    yield from wrapped(style.text(total), style.columns) if style.width else [style.text(total)]


def _drawn(lines: Sequence[Line], style: Style) -> Iterator[str]:
    """Yield `lines` under headings, not wider than the terminal. A path that is too long loses its beginning."""
    sizes = [_UNKNOWN if line.nbytes is None else size(line.nbytes) for line in lines]
    rows = [(line.path, line.texts[0], nbytes, *line.texts[1:]) for line, nbytes in zip(lines, sizes, strict=True)]
    table = [_HEADINGS, *([style.text(text) for text in row] for row in rows)]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    room = style.columns - sum(widths[1:]) - len(_GAP) * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, _LEAST_PATH))
    for at, (path, *texts) in enumerate(table):
        texts = [fitting(path, widths[0], style, end=True), *texts]
        line = _GAP.join(padded(text, widths[i], right=i in _RIGHT) for i, text in enumerate(texts)).rstrip()
        yield style.paint(fitting(line, style.columns, style), None if at else "title")


def item_line(report: Report, style: Style, *, copied: bool = False) -> str:
    """Return one line about the conversion of an item. With `copied`, the item is not a checkpoint and was copied."""
    parts = [size(report.size), "copied" if report.written else "would be copied"] if copied else _parts(report)
    return _line(style, report.dst, ", ".join(parts))


def skipped_line(dst: str, style: Style) -> str:
    """Return the line for an item that was skipped because its output `dst` exists."""
    return _line(style, dst, "exists, skipped")


def _parts(report: Report) -> Iterator[str]:
    """Yield short texts about the changes of a conversion."""
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
        yield f"{len(report.left_behind):,} not saved"
    if report.failed:
        yield f"{len(report.failed):,} other {'file' if len(report.failed) == 1 else 'files'} failed"
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
    """Yield a summary of a batch: the numbers of items, the reasons of failures, and the files that were left out.

    Args:
        outcomes: The outcome of each item.
        listing: The items of the command, and the files that it left out.
        why: The inputs that failed, by reason. This includes files next to converted sets.
        style: The style of the output.
        seconds: The duration of the batch.
        in_full: Whether the complete report of each item was printed.
    """
    converted = [each.report for each in outcomes if each.report and not each.is_copy]
    copied = [each.report for each in outcomes if each.report and each.is_copy]
    done = [*converted, *copied]
    would = "" if all(report.written for report in done) else "would be "
    in_time = "" if would else f" in {seconds:.2f} s"
    sums = [f"{len(converted):,} {would}converted", f"{size(sum(report.nbytes for report in done))}{in_time}"]
    beside = sum(len(report.failed) for report in converted)
    counts = (
        (len(copied), f"{would}copied"),
        (sum(each.skipped for each in outcomes), "skipped"),
        (sum(each.error is not None for each in outcomes), "failed"),
        (beside, "other files failed"),
    )
    sums += [f"{n:,} {what}" for n, what in counts if n]
    yield style.paint(style.text(f"{count(len(outcomes), 'item')}: {', '.join(sums)}"), "title")
    for reason, paths in [*why.items()][:_REASONS]:
        yield from fact(style, "failed", f"{reason}: {some(paths)}")
    if len(why) > _REASONS:
        yield from fact(style, "failed", f"… for {count(len(why) - _REASONS, 'more reason')}")
    if listing.other:
        them = "it" if len(listing.other) == 1 else "them"
        yield from fact(
            style,
            "not copied",
            f"{count(len(listing.other), 'other file')}: {some([path.name for path in listing.other])};"
            f" {option('copy_others')} copies {them}",
        )
    if listing.unentered:
        yield from fact(
            style, "not entered", f"{some([path.name for path in listing.unentered])}: hidden, or a link to a folder"
        )
    for note in listing.notes:
        yield from fact(style, "note", note)
    if not in_full and any(report.notes or report.left_behind for report in done):
        yield from fact(style, "note", "-v shows all details")


def _some(things: Iterable[str]) -> str:
    """Return the first three distinct `things` as text, and a mark if there are more."""
    listed = list(dict.fromkeys(things))
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")


def _line(style: Style, path: str, text: str) -> str:
    """Return `path` and `text` in one line. On a terminal, both are cut to fit, and the path loses its beginning."""
    path, text = style.text(path), style.text(text)
    if style.width is not None:
        text = fitting(text, style.columns - 20, style)
        path = fitting(path, style.columns - 2 - cells(text), style, end=True)
    return f"{path}: {text}"
