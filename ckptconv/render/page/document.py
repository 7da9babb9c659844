"""Put a page together: one file, whose policy allows its own script and style and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from ckptconv.errors import printable
from ckptconv.render.page.difference import difference_data
from ckptconv.render.page.summary import summary_data

if TYPE_CHECKING:
    from ckptconv.hints import Command
    from ckptconv.inspection.comparison.differences import Difference
    from ckptconv.inspection.summary import Summary

__all__ = ["difference_page", "summary_page"]


def summary_page(summary: Summary) -> str:
    """The page of a checkpoint."""
    return _document(summary_data(summary))


def difference_page(difference: Difference, command: Command | None = None) -> str:
    """The page of what two checkpoints do not have in common; `command` compares them."""
    return _document(difference_data(difference, command))


def _document(data: dict[str, Any]) -> str:
    """The page that shows `data`."""
    script, style = _text("vendor/d3-hierarchy.min.js") + _text("page.js"), _text("page.css")
    return Template(_text("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_sum(script)}'; style-src '{_sum(style)}'; base-uri 'none';"
        " form-action 'none'",
        title=escape(printable(data["title"])),
        style=style,
        script=script,
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


@cache
def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


@cache
def _sum(text: str) -> str:
    """`text` as a policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
