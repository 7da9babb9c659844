"""Render results for notebooks: as a page in a sandboxed frame, or as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.conversion.plan import Report
from ckptconv.errors import CkptconvError, count, size
from ckptconv.formats import opening
from ckptconv.inspection.comparison.differences import Difference
from ckptconv.inspection.summary import Summary
from ckptconv.render.page import LONGEST, MOST, columns, largest, listed, page_of, shape_words, words
from ckptconv.render.page.difference import difference_data
from ckptconv.render.page.summary import summary_data
from ckptconv.render.report import report_facts, report_title
from ckptconv.result import Result

_MOST = 100_000  # characters, so that a notebook of many results stays small
_OPEN = 200  # tensors or lines; a result with more is closed at first and displays only its title
_TRIES = 8
_FRAME = "width:100%;height:720px;border:0"


def report_data(report: Report, checkpoint: Checkpoint, most: int | None = None) -> dict[str, Any]:
    """Return the data of the page of `report`, with the `most` largest tensors of its output `checkpoint`, or all."""
    tensors, left_out = largest([*checkpoint.tensors.values()], most)
    numbers = {info.path: i for i, info in enumerate(tensors)}
    ties: dict[int, list[int]] = {}
    for i, info in enumerate(tensors):
        if (home := numbers.get(info.tied_to)) is not None:
            ties.setdefault(home, [home]).append(i)
    untied = [info.nbytes for info in checkpoint.tensors.values() if info.tied_to is None]
    devices = [None if checkpoint.is_state_dict else info.device for info in tensors]
    was = {change.new: change.old for change in report.changes.names}
    facts = report_facts(report)
    tied = [listed("tied", [*ties.values()])]
    return {
        "title": report.dst,
        "named": False,
        "verdict": {"good": None, "text": report_title(report), "danger": [], "findings": [], "remedy": None},
        "facts": [
            ("from", report.src),
            ("tensors", f"{count(len(checkpoint.tensors), 'tensor')}, {size(sum(untied))}"),
            *(
                (label, (what if isinstance(what, str) else ", ".join(what))[:LONGEST])
                for label, what in islice(facts, MOST)
            ),
            *left_out,
        ],
        "lists": [each for each in tied if each],
        "maps": ["Map"],
        "commands": [],
        "tensors": columns(
            tensors,
            [tensors],
            [
                words("dtype", (info.dtype for info in tensors), colour=True),
                words("shape", (shape_words(info.shape) for info in tensors)),
                words("device", devices, colour=True),
                words("was called", (was.get(info.name or "") for info in tensors)),
            ],
        ),
    }


def html(result: Result, title: str, lines: Iterable[str]) -> str:
    """Return `result` as HTML: a page in a frame, or `title` and `lines` if it has no page or the page is too large.

    The page of a summary shows the checkpoint, and that of a difference both. The page of a report shows the output, if
    it is unchanged since it was written.
    """
    frame = ""
    if isinstance(result, Summary):
        frame = _framed(partial(summary_data, result), title, len(result.tensors))
    elif isinstance(result, Difference):
        n = sum(map(len, (result.differing, result.only_in_a, result.only_in_b)))
        frame = _framed(partial(difference_data, result), title, n)
    elif isinstance(result, Report) and (checkpoint := _written(result)):
        frame = _framed(partial(report_data, result, checkpoint), title, len(checkpoint.tensors))
    return frame or _text_html(title, lines)


def _written(report: Report) -> Checkpoint | None:
    """Return the output of `report` as a checkpoint.

    None if it is gone, has changed, or is not one local checkpoint.
    """
    if not report.written or "://" in report.dst:
        return None
    try:
        alone = report.files[0][0] if len(report.files) == 1 else ""  # a single file is read by its own name
        with opening.open_input(Path(report.dst, alone)) as source:
            checkpoint = opening.read(source)
            return checkpoint if report.files or source.size == report.size else None
    except CkptconvError:
        return None


def _framed(data: Callable[..., dict[str, Any]], title: str, n: int) -> str:
    """Return the page of `data` in a frame. Return "" if it is too large even with few tensors.

    Args:
        data: Called with the number of tensors to show. Returns the data of the page.
        title: The title of the frame.
        n: The number of all tensors. If the page would be too large, only the largest are shown.
    """
    empty = len(_frame(data(most=0), title))
    most = n
    for _ in range(_TRIES):
        frame = _frame(data(most=most), title)
        if len(frame) + 2 * len(title) + 100 <= _MOST:
            return _folded(title, frame) if n > _OPEN else frame
        most = min(most * (_MOST - empty) // (len(frame) - empty + 1) * 9 // 10, most // 2)
        if most <= 0:
            break
    return ""


def _frame(data: dict[str, Any], title: str) -> str:
    """Return the page for `data` in a frame, without access to anything outside of it."""
    page = page_of(data).replace("&", "&amp;").replace("'", "&#39;")  # nothing else can end the attribute
    return f"<iframe sandbox='allow-scripts' style='{_FRAME}' title='{escape(title)}' srcdoc='{page}'></iframe>"


def _text_html(title: str, lines: Iterable[str]) -> str:
    """Return `lines`, which are printable, as HTML. Lines beyond the limit of characters are left out."""
    shown, room = [], _MOST - len(escape(title)) - 500
    rest = 0
    for line in lines:
        text = escape(line)
        room -= len(text) + 1
        if room < 0:
            rest += 1
        else:
            shown.append(text)
    if rest:
        shown.append(f"… {count(rest, 'more line')}")
    block = "<pre style='white-space:pre-wrap'>" + "\n".join(shown) + "</pre>"
    return _folded(title, block) if len(shown) > _OPEN else block


def _folded(title: str, inside: str) -> str:
    """Return `inside` as a block that is closed at first and displays only `title`."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"
