"""Pages as files: what is in them, how large they are, and that nothing of a checkpoint is markup. What they do in a
browser is in tests/long/test_pages.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.render.page.vendor import make
from tests.support.command import Command

pytestmark = pytest.mark.usefixtures("here")


class Parsed(HTMLParser):
    """A page as a parser of HTML sees it: its elements, and the texts of those that are read raw."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.raw: dict[str, str] = {}
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in = "data" if ("id", "data") in attrs else tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.raw[self._in] = self.raw.get(self._in, "") + data


def page_of(command: Command, *words: str) -> Parsed:
    command("inspect", "m.pt", "--html", "m.html", *words, err="m.html: written, ")
    return Parsed(Path("m.html").read_text("utf-8"))


def data_of(page: Parsed) -> Any:
    return json.loads(page.raw["data"])


def paths_in(columns: Any) -> list[str]:
    found, before = [], ""
    for shared, rest in zip(columns["paths"][::2], columns["paths"][1::2], strict=True):
        before = before[:shared] + rest
        found.append(before)
    return found


def test_the_policy_allows_its_own_script_and_nothing_else(command: Command) -> None:
    """No element and no attribute that would ask for anything."""
    torch.save({"w": torch.ones(2)}, "m.pt")
    page = page_of(command)
    (policy,) = re.findall(r"default-src.*", next(v for k, v in page.attributes if k == "content" and v and "src" in v))
    for kind, text in (("script", page.raw["script"]), ("style", page.raw["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; script-src") and "unsafe" not in policy
    assert not {"src", "href", "srcset", "action", "style"} & {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)


def test_names_are_data(command: Command) -> None:
    """A parser sees the same elements whatever the tensors are called; the names come out as they are."""
    torch.save({"w": torch.ones(2)}, "m.pt")
    plain = page_of(command).tags
    names = [
        "</script><img src=x>",
        "<!--",
        "]]>",
        "a\u2028b",
        "\u202e",
        "é",
        "😀x",
        "😀y",
        "x" * 10_000,
        "${data}",
        "$$",
    ]
    torch.save({name: torch.ones(2) for name in names}, "m.pt")
    page = page_of(command)
    assert page.tags == plain and "<" not in page.raw["data"]
    Path("<").mkdir()
    Path("m.pt").rename("</script><img src=x>.pt")
    command("inspect", "</script><img src=x>.pt", "--html", "n.html")
    assert Parsed(Path("n.html").read_text("utf-8")).tags == plain
    escaped = [re.sub(r"\\(.)", r"\1", path) for path in paths_in(data_of(page)["tensors"])]
    assert escaped == names


def test_what_is_in_it(command: Command) -> None:
    """Each tensor with its facts, ties and storages by number, and the verdict in words."""
    base = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": base, "b": base, "t": base.t(), "h": torch.tensor([1.0, float("nan")]).half()}, "m.pt")
    data = data_of(page_of(command, "--histogram"))
    columns = data["tensors"]
    assert paths_in(columns) == ["a", "b", "t", "h"]
    assert columns["tied"] == [-1, 0, -1, -1] and columns["storage"] == [0, 0, 0, 1]
    assert [columns["shapes"][i] for i in columns["shape"]] == [[2, 3], [2, 3], [3, 2], [2]]
    assert columns["stride"] == [0, 0, [1, 3], 0]
    assert columns["values"][3][:8] == [1, 0, 0, 1.0, 1.0, 1.0, None, 1.0] and sum(columns["values"][0][8][1:]) == 6
    assert data["verdict"]["good"] is True and "loads" in data["verdict"]["text"]
    assert "values" not in data_of(page_of(command))["tensors"]


def test_three_thousand_tensors_are_small(command: Command) -> None:
    torch.save({f"model.layers.{i // 9}.self_attn.{i % 9}.weight": torch.ones(i % 5) for i in range(3000)}, "m.pt")
    page_of(command)
    assert Path("m.html").stat().st_size < 250_000


def test_where_it_is_written(command: Command) -> None:
    """A page replaces a page, and never a checkpoint; it is of one."""
    torch.save({"w": torch.ones(2)}, "m.pt")
    before = Path("m.pt").read_bytes()
    for file in ("-", "m.pt", "page"):
        command("inspect", "m.pt", "--html", file, status=2, err="is no name of a page (expected a FILE that ends in")
    command("inspect", "m.pt", "m.pt", "--html", "m.html", status=2, err="a page is of one checkpoint")
    command("inspect", "m.pt", "--open", status=2, err="--open opens the page that --html FILE writes")
    assert Path("m.pt").read_bytes() == before and not Path("m.html").exists()
    page_of(command)
    page_of(command)


def test_open(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, "m.pt")
    launched: list[str] = []
    monkeypatch.setattr("click.launch", launched.append)
    page_of(command, "--open")
    assert launched == [str(Path("m.html").absolute())]


def test_what_others_wrote_is_made_again(tmp_path: Path) -> None:
    """d3-hierarchy in pages is what its author published, byte for byte."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    try:
        make.make(tmp_path)
    except (subprocess.SubprocessError, OSError):
        pytest.skip("npm could not get it")
    for name in make.FILES.values():
        assert (tmp_path / name).read_bytes() == (Path(make.__file__).parent / name).read_bytes()
