"""Render results for notebooks: a page in a frame that can do nothing outside of itself, or text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CkptconvError, count
from ckptconv.formats import opening
from ckptconv.render.page.difference import difference_data
from ckptconv.render.page.document import page_of
from ckptconv.render.page.report import report_data
from ckptconv.render.page.summary import summary_data

if TYPE_CHECKING:
    from ckptconv.conversion.plan import Report
    from ckptconv.inspection.comparison.differences import Difference
    from ckptconv.inspection.summary import Summary

_MOST = 100_000  # characters, so that a notebook of many results stays small
_OPEN = 200  # tensors, or lines, beyond which only the title is seen at first
_TRIES = 8
_FRAME = "width:100%;height:720px;border:0"


def summary_html(summary: Summary, title: str, lines: Iterable[str]) -> str:
    """The page of a checkpoint."""
    return _framed(partial(summary_data, summary), title, len(summary.tensors)) or text_html(title, lines)


def difference_html(difference: Difference, title: str, lines: Iterable[str]) -> str:
    """The page of a difference."""
    n = sum(map(len, (difference.differing, difference.only_in_a, difference.only_in_b)))
    return _framed(partial(difference_data, difference), title, n) or text_html(title, lines)


def report_html(report: Report, title: str, lines: Iterable[str]) -> str:
    """What was done, and the page of what was written, if it is still there as it was."""
    if report.written and "://" not in report.dst:
        try:
            alone = report.files[0][0] if len(report.files) == 1 else ""  # which is read by its own name
            with opening.open_input(Path(report.dst, alone)) as source:
                checkpoint = opening.read(source)
                is_whole = bool(report.files) or source.size == report.size
        except CkptconvError:  # it is gone, or several checkpoints, or was a file object
            is_whole = False
        if is_whole and (frame := _framed(partial(report_data, report, checkpoint), title, len(checkpoint.tensors))):
            return frame
    return text_html(title, lines)


def _framed(data: Callable[..., dict[str, Any]], title: str, n: int) -> str:
    """The page that shows `data` in a frame: of all `n` tensors, or of as many as there is room for; else nothing."""
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
    page = page_of(data).replace("&", "&amp;").replace("'", "&#39;")  # all that ends an attribute in these marks
    return f"<iframe sandbox='allow-scripts' style='{_FRAME}' title='{escape(title)}' srcdoc='{page}'></iframe>"


def text_html(title: str, lines: Iterable[str]) -> str:
    """`lines`, which are printable, or as many of them as a notebook should hold."""
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
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"
