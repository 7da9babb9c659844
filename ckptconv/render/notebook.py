"""Render results for notebooks: a page in a frame that can do nothing outside of itself, or text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from ckptconv.errors import count
from ckptconv.render.page.document import summary_page

if TYPE_CHECKING:
    from ckptconv.inspection.summary import Summary

__all__ = ["summary_html", "text_html"]

_MOST = 100_000  # characters, so that a notebook of many results stays small
_OPEN = 200  # tensors, or lines, beyond which only the title is seen at first
_FRAME = "width:100%;height:720px;border:0"


def summary_html(summary: Summary, title: str, lines: Iterable[str]) -> str:
    """The page of a checkpoint, or its facts as text where the page would be too large."""
    page = (
        summary_page(summary).replace("&", "&amp;").replace("'", "&#39;")
    )  # all that ends an attribute in these marks
    if len(page) > _MOST:
        return text_html(title, lines)
    frame = f"<iframe sandbox='allow-scripts' style='{_FRAME}' title='{escape(title)}' srcdoc='{page}'></iframe>"
    return _folded(title, frame) if len(summary.tensors) > _OPEN else frame


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
