"""Render a checkpoint as one page of HTML that needs no network: a treemap, a tree, a table, and the commands.

``summary`` and ``difference`` make the data of a page, and :func:`page_of` fills it into ``page.html`` with
``page.css`` and ``page.js``. Texts from files stand in the page only as JSON, which the script shows. ``vendor``
contains d3-hierarchy, which lays out the treemap. The policy of a page allows its own script and style, and nothing
else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ckptconv.errors import printable


def hashes() -> tuple[str, str]:
    """Return the hashes of the script and of the style, for the policy of a page that contains such pages."""
    return _sum(_script()), _sum(_text("page.css"))


def page_of(data: dict[str, Any]) -> str:
    """Return the page that shows `data`."""
    script, style = _script(), _text("page.css")
    return Template(_text("page.html")).substitute(
        policy=f"default-src 'none'; script-src '{_sum(script)}'; style-src '{_sum(style)}'; base-uri 'none';"
        " form-action 'none'",
        title=escape(printable(data["title"])),
        style=style,
        script=script,
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _script() -> str:
    """Return the script of the page."""
    return _text("vendor/d3-hierarchy.min.js") + _text("page.js")


@cache
def _text(name: str) -> str:
    """Return the file `name` without indents, empty lines and comment lines."""
    lines = map(str.strip, files(__package__).joinpath(name).read_text("utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("// ")) + "\n"


@cache
def _sum(text: str) -> str:
    """Return the hash of `text` as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
