"""HTML for notebooks: a page in a frame, or text. It is limited in size, and names from a file never become markup."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.render.page import page_of
from ckptconv.render.page.difference import difference_data
from ckptconv.render.page.summary import summary_data


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
def test_a_summary_is_shown_as_a_page(n: int, tags: list[str], tmp_path: Path) -> None:
    """A summary is shown as a page in a frame, which may run scripts but has no origin. The frame is folded if the
    checkpoint has many tensors.
    """
    summary = saved(tmp_path, n, "a'b\"c</iframe>&amp;{}")
    html = summary._repr_html_()
    elements = Elements(html)
    assert [tag for tag, _ in elements.found] == tags and len(html) <= 100_000
    frame = elements.found[-1][1]
    assert frame["sandbox"] == "allow-scripts" and frame["srcdoc"] == page_of(summary_data(summary))


def data_in(html: str) -> Any:
    """Return the data of the page in the frame of `html`."""
    page = Elements(html).found[-1][1]["srcdoc"]
    assert page and page.count('id="data">') == 1
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.untraced
def test_a_large_summary_shows_the_largest_tensors(tmp_path: Path) -> None:
    """A summary that is too large shows the largest tensors, and the number of tensors that were left out. It is text
    if there is no room for a single tensor.
    """
    torch.save({f"layers.{i}.weight": torch.ones(i % 1000) for i in range(5000)}, tmp_path / "m.pt")
    html = ckptconv.inspect(tmp_path / "m.pt")._repr_html_()
    assert 80_000 < len(html) <= 100_000 and Elements(html).found[0][0] == "details"
    data = data_in(html)
    shown = len(data["tensors"]["paths"]) // 2
    assert dict(data["facts"])["left out"].startswith(f"{5000 - shown:,} other tensors, ")
    side = data["tensors"]["sides"][0]
    assert min(side["words"][i][0] for i in side["at"]) > 3000
    html = saved(tmp_path, 30, "x" * 50_000 + "{}")._repr_html_()
    elements = Elements(html)
    assert len(html) <= 100_000 and [tag for tag, _ in elements.found] == ["pre"]
    assert " more lines" in elements.text


def test_a_difference_is_shown_as_a_page(tmp_path: Path) -> None:
    saved(tmp_path, 1, "<script>{}")
    torch.save({f"<img src=x>{i}": torch.ones(2) for i in range(300)}, tmp_path / "b.pt")
    found = ckptconv.diff(tmp_path / "m.pt", tmp_path / "b.pt")
    html = found._repr_html_()
    assert [tag for tag, _ in Elements(html).found] == ["details", "summary", "iframe"] and len(html) < 100_000
    assert Elements(html).found[-1][1]["srcdoc"] == page_of(difference_data(found))
    assert ckptconv.diff(tmp_path / "m.pt", tmp_path / "m.pt")._repr_html_().startswith("<iframe")


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out/"])
def test_a_report_shows_the_page_of_its_output(out: str, tmp_path: Path) -> None:
    """A report shows the page of its output. The page contains the changes, the previous name of each tensor, and a
    list of tied tensors.
    """
    tied = torch.ones(2)
    torch.save({"module.a": tied, "module.b": tied, "module.c": torch.ones(3)}, tmp_path / "m.pt")
    options = {"max_shard_size": "10", "format": "safetensors"} if out == "out/" else {}
    target = f"{tmp_path}/{out}"
    report = ckptconv.convert(tmp_path / "m.pt", target, strip_prefix="module.", map_location="cuda:1", **options)
    data = data_in(report._repr_html_())
    facts = {fact["name"]: fact for fact in data["tensors"]["facts"]}
    written = [tensor.path for tensor in ckptconv.inspect(target).tensors]
    assert facts["was called"]["words"] == [f"module.{path}" for path in written]
    assert ("device" in facts) == (out == "out.pt") and data["title"] == report.dst
    assert "written in" in data["verdict"]["text"] and dict(data["facts"])["names"].startswith("module.* → *")
    ((tie,),) = [each["groups"] for each in data["lists"]]
    assert [written[i] for i in tie] == ["a", "b"]


def test_a_report_without_its_output_is_text(tmp_path: Path) -> None:
    """A report is text if its output was replaced or deleted, or is remote. The results of a dry run and of ``verify``
    are text, too.
    """
    saved(tmp_path, 2)
    target = tmp_path / "out.pt"
    report = ckptconv.convert(tmp_path / "m.pt", target, add_prefix="<b>.")
    assert Elements(report._repr_html_()).found[0][0] == "iframe"
    torch.save({}, target)
    results = [report, replace(report, dst="s3://bucket/out.pt"), ckptconv.verify(tmp_path / "m.pt")]
    results.append(ckptconv.convert(tmp_path / "m.pt", tmp_path / "new.pt", dry_run=True))
    for result in results:
        elements = Elements(result._repr_html_())
        assert [tag for tag, _ in elements.found] == ["pre"] and elements.text == str(result)
    target.unlink()
    assert Elements(report._repr_html_()).text == str(report)
