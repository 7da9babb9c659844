"""What notebooks show: a page in a frame, or text; small, folded where it is long, and never markup of a file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.render.page.document import summary_page


class Elements(HTMLParser):
    """The elements of a piece of HTML, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def saved(folder: Path, n: int, name: str = "layers.{}.weight") -> ckptconv.Summary:
    torch.save({name.format(i): torch.ones(2) for i in range(n)}, folder / "m.pt")
    return ckptconv.inspect(folder / "m.pt")


@pytest.mark.parametrize(("n", "tags"), [(3, ["iframe"]), (201, ["details", "summary", "iframe"])])
def test_a_summary_is_its_page(n: int, tags: list[str], tmp_path: Path) -> None:
    """In a frame that may run the page's own script, and has no origin; folded where there are many tensors."""
    summary = saved(tmp_path, n, "a'b\"c</iframe>&amp;{}")
    html = summary._repr_html_()
    elements = Elements(html)
    assert [tag for tag, _ in elements.found] == tags and len(html) <= 100_000
    frame = elements.found[-1][1]
    assert frame["sandbox"] == "allow-scripts" and frame["srcdoc"] == summary_page(summary)


def test_what_is_too_large_is_text(tmp_path: Path) -> None:
    html = saved(tmp_path, 5000)._repr_html_()
    assert 50_000 < len(html) <= 100_000
    elements = Elements(html)
    assert [tag for tag, _ in elements.found] == ["details", "summary", "pre"]
    assert "layers.0.weight" in elements.text and " more lines" in elements.text


def test_all_else_is_text(tmp_path: Path) -> None:
    """A difference, a report, a verdict: what `str` says, and none of it markup."""
    saved(tmp_path, 1, "<script>{}")
    torch.save({"<img src=x>": torch.ones(2)}, tmp_path / "b.pt")
    results = [
        ckptconv.diff(tmp_path / "m.pt", tmp_path / "b.pt"),
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out.pt", add_prefix="<b>."),
        ckptconv.verify(tmp_path / "m.pt"),
    ]
    for result in results:
        elements = Elements(result._repr_html_())
        assert [tag for tag, _ in elements.found] == ["pre"] and elements.text == str(result)
