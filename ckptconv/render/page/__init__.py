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
    """The script and the style of all these pages, as the policy of a page around them has to allow them."""
    return _sum(_script()), _sum(_text("page.css"))


def page_of(data: dict[str, Any]) -> str:
    """The page that shows `data`."""
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
    return _text("vendor/d3-hierarchy.min.js") + _text("page.js")


@cache
def _text(name: str) -> str:
    """The file `name`, without what only its readers need."""
    lines = map(str.strip, files(__package__).joinpath(name).read_text("utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("// ")) + "\n"


@cache
def _sum(text: str) -> str:
    """`text` as a policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
