"""Pages as files: their content and size, and that no text of a checkpoint becomes markup.

The behavior of pages in a browser is tested in tests/long/test_pages.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.command import Command

pytestmark = pytest.mark.usefixtures("here")


class Parsed(HTMLParser):
    """A page as an HTML parser reads it: its tags, its attributes, and the raw text of each kind of element."""

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
    command("inspect", "m.pt", "--html", "m.html", "--force", *words, err="m.html: written, ")
    return Parsed(Path("m.html").read_text("utf-8"))


def page_of_two(command: Command, *words: str) -> Parsed:
    """Return the page of the difference between a.pt and b.pt."""
    command("diff", "a.pt", "b.pt", "--html", "d.html", "--force", *words, status=1, err="d.html: written, ")
    return Parsed(Path("d.html").read_text("utf-8"))


def data_of(page: Parsed) -> Any:
    """Return the data of `page`. A list of equal items has only one item in the page, and is expanded here as the page
    does it.
    """
    data = json.loads(page.raw["data"])
    columns = data["tensors"]
    n = len(columns["paths"]) // 2
    lists = [(each, key) for each in columns["sides"] + columns["facts"] for key in each]
    for each, key in [(columns, "tied"), *lists]:
        if key in ("at", "numbers", "tied") and len(each[key]) == 1:
            each[key] *= n
    if columns["storage"] == "each":
        columns["storage"] = [*range(n)]
    return data


def facts_in(columns: Any) -> dict[str, list[Any]]:
    """Return the facts of `columns`, each with the values for all tensors."""
    return {
        fact["name"]: fact["numbers"] if "numbers" in fact else [[*fact["words"], None][i] for i in fact["at"]]
        for fact in columns["facts"]
    }


def extents_in(side: Any) -> list[Any]:
    """Return the number of bytes and of elements of each tensor of `side`, and whether the tensor is counted."""
    return [[*side["words"], None][i] for i in side["at"]]


def paths_in(columns: Any) -> list[str]:
    found, before = [], ""
    for shared, rest in zip(columns["paths"][::2], columns["paths"][1::2], strict=True):
        before = before[:shared] + rest
        found.append(before)
    return found


def test_the_policy_allows_its_own_script_and_nothing_else(command: Command) -> None:
    """The policy of a page allows only its own script and style. The page has no element or attribute that requests a
    resource.
    """
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
    """The elements of a page do not depend on the names of tensors and files. The data contains the names of tensors
    unchanged.
    """
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
    torch.save({}, "a.pt")
    torch.save({"w": torch.ones(2)}, "b.pt")
    plain = page_of_two(command).tags
    torch.save({name: torch.ones(2) for name in names}, "b.pt")
    page = page_of_two(command)
    assert page.tags == plain and "<" not in page.raw["data"]


def test_content_of_a_page(command: Command) -> None:
    """A page contains the facts of each tensor, its ties and its storage as numbers, and the verdict as text."""
    base = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": base, "b": base, "t": base.t(), "h": torch.tensor([1.0, float("nan")]).half()}, "m.pt")
    data = data_of(page_of(command, "--histogram"))
    columns = data["tensors"]
    assert paths_in(columns) == ["a", "b", "t", "h"]
    assert columns["tied"] == [-1, 0, -1, -1] and columns["storage"] == [0, 0, 0, 1]
    facts = facts_in(columns)
    assert facts["shape"] == ["2×3", "2×3", "3×2", "2"] and facts["dtype"] == [*3 * ["float32"], "float16"]
    assert (
        facts["stride"] == ["3, 1 (contiguous)", "3, 1 (contiguous)", "1, 3", "1 (contiguous)"]
        and "stored" not in facts
    )
    assert extents_in(columns["sides"][0]) == [[24, 6, 1], [24, 6, 0], [24, 6, 1], [4, 2, 1]]
    found = [facts[name][3] for name in ("nan", "inf", "zeros", "min", "max", "mean", "std", "norm")]
    assert found == [1, 0, 0, 1.0, 1.0, 1.0, None, 1.0] and sum(columns["histograms"][0]["bars"][0][1:]) == 6
    assert [(each["label"], each["groups"], each["says"]) for each in data["lists"]] == [
        ("tied", [[0, 1]], []),
        ("NaN or inf", [[3]], ["1 NaN"]),
    ]
    assert data["verdict"]["good"] is True and "loads" in data["verdict"]["text"]
    plain = data_of(page_of(command))
    assert "nan" not in facts_in(plain["tensors"]) and not plain["tensors"]["histograms"]
    assert ["NaN or inf", "none"] in data_of(page_of(command, "--values", "--exclude", "h"))["facts"]


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_dangerous_globals_are_in_the_verdict(command: Command) -> None:
    """The verdict contains the dangerous globals of a checkpoint, or of two that are compared. For a single checkpoint,
    it then does not tell whether the checkpoint loads.
    """
    torch.save({"w": torch.ones(2), "v": Harm()}, "m.pt")
    verdict = data_of(page_of(command))["verdict"]
    assert "posix.system at v" in verdict["danger"][0] and verdict["text"] == "" and not verdict["findings"]
    torch.save({"w": torch.ones(2)}, "a.pt")
    Path("m.pt").rename("b.pt")
    (danger,) = data_of(page_of_two(command))["verdict"]["danger"]
    assert danger.startswith("B: ") and "posix.system" in danger
    command("diff", "b.pt", "a.pt", status=1, out="DANGEROUS     A: it contains posix.system")
    assert json.loads(command("diff", "b.pt", "a.pt", "--json", status=1).out)["dangers"]
    command("diff", "a.pt", "a.pt", "--html", "d.html", "-f", err="written")
    assert data_of(Parsed(Path("d.html").read_text("utf-8")))["verdict"]["danger"] == []


def test_three_thousand_tensors_are_small(command: Command) -> None:
    torch.save({f"model.layers.{i // 9}.self_attn.{i % 9}.weight": torch.ones(i % 5) for i in range(3000)}, "m.pt")
    page_of(command)
    assert Path("m.html").stat().st_size < 250_000


def test_parts_and_storages(command: Command) -> None:
    """A page contains the part of the checkpoint to which each tensor belongs, and the position of a view in its
    storage.
    """
    whole = torch.arange(8.0)
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    model = {"w": whole[2:5], "v": whole[5:]}
    checkpoint = {
        "model": model,
        "ema": {**model},
        "optimizer": optimizer,
        "rng": torch.get_rng_state(),
        "x": [whole * 2],
    }
    torch.save(checkpoint, "m.pt")
    data = data_of(page_of(command))
    said, columns = dict(data["facts"]), data["tensors"]
    assert said["parts"].startswith("model: 2 tensors, 24 B (0.468 %); EMA: 2 tensors, 24 B (0.468 %); optimizer: ")
    assert (
        said["parameters"] == "5,073 numbers, shared ones counted once: RNG states 5,056, other 8, model 6, optimizer 3"
    )
    (table,) = data["tables"]
    assert table["label"] == "optimizer" and dict(zip(table["heads"], table["rows"][0], strict=True))["lr"] == "0.1"
    assert "param_groups" not in said.get("other values", "")
    facts, paths = facts_in(columns), paths_in(columns)
    assert dict(zip(paths, facts["part"], strict=True)) == {
        "model/w": "model",
        "model/v": "model",
        "ema/w": "EMA",
        "ema/v": "EMA",
        "optimizer/state[0]/exp_avg": "optimizer",
        "rng": "RNG states",
        "x[0]": "other",
    }
    assert facts["stored"][:2] == [f"in a storage of 32 B, from element {n}" for n in (2, 5)]
    assert facts["stored"][4:] == [None] * 3 and columns["storage"][:4] == [0] * 4


def test_globs_are_offered_with_what_they_need(command: Command) -> None:
    """The commands that a page offers for globs succeed. They exclude an optimizer that cannot follow the selected
    weights.
    """
    weights, moments = {"w": torch.ones(4), "b": torch.ones(4)}, {"exp_avg": torch.ones(4)}
    optimizer = {"state": {0: moments, 1: moments}, "param_groups": [{"params": [0, 1]}]}
    named = {**optimizer, "param_groups": [{"params": [0, 1], "param_names": ["w", "b"]}]}
    for kept, each in ((False, optimizer), (True, named)):
        torch.save({"model": weights, "optimizer": each}, "m.pt")
        command("inspect", "m.pt", "--html", "m.html", "--force", err="m.html: written")
        data = data_of(Parsed(Path("m.html").read_text("utf-8")))
        for _, _, *words in (each for each in data["commands"] if each[0] == "glob"):
            command(*("w" if word is None else word for word in words[1:]), "--force", "-q")
        assert ("optimizer" in torch.load("part.pt")) == kept
        assert data["optimizers"] == ["optimizer/"]


@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("state_dict", {"optimizer_states": [{"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []}]}),
        (
            "it's *",
            {
                "ema": {"w": torch.ones(5)},
                "optimizer/1": {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []},
            },
        ),
        ("model", {"optimizer": {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []}, "x": [torch.ones(2)]}),
    ],
)
def test_offers_to_make_a_file_smaller(model: str, others: dict[str, Any], command: Command) -> None:
    """Each command that is offered for a smaller checkpoint selects the parts that its text names. The output has the
    size that the text states.
    """
    torch.save({model: {"w": torch.ones(4), "b": torch.ones(1)}, **others, "epoch": 3}, "m.pt")
    alone, without = data_of(page_of(command))["smaller"]
    for offer, out, said in ((alone, "part.pt", r"^only .*: (\d+) B"), (without, "rest.pt", r"^without .*: (\d+) B")):
        command(*shlex.split(offer["command"])[1:])
        left = torch.load(out, weights_only=True)
        found = ckptconv.inspect(out)
        assert [str(found.nbytes)] == re.findall(said, offer["text"]), offer
        assert set(left.get(model, left)) == {"w", "b"} and not any("optimizer" in t.path for t in found.tensors)
    assert left["epoch"] == 3


def test_no_certain_saving_is_claimed_for_single_or_tied_parts(command: Command) -> None:
    model, optimizer = {"w": torch.ones(4)}, {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": []}
    torch.save(model, "m.pt")
    assert data_of(page_of(command))["smaller"] == []
    torch.save({"model": model, "ema": {**model}, "optimizer": optimizer}, "m.pt")
    assert ": at most 16 B" in data_of(page_of(command))["smaller"][-1]["text"]
    torch.save({"ema": model, "optimizer": optimizer}, "m.pt")
    assert data_of(page_of(command))["smaller"] == []  # the output would contain no model


def test_the_page_of_a_difference(command: Command) -> None:
    """The page of a difference contains the tensors that differ or are only on one side. It shows their sizes on both
    sides, and the kind and size of the difference.
    """
    shared, other = torch.tensor([1.0, 2.0]), torch.ones(2)
    a = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "n": torch.ones(2), "same": torch.ones(9), "s": torch.ones(3)}
    b = {"w": torch.tensor([1.0, 2.5, 3.0, 0.0]), "n": torch.tensor([1.0, float("nan")]), "same": torch.ones(9)}
    b = {**b, "s": torch.ones(2, 2).half(), "new": torch.ones(5), "i": torch.ones(2, dtype=torch.bool), "x": 2}
    a = {**a, "i": torch.ones(2, dtype=torch.uint8), "x": 1, "gone": shared, "gone too": shared}
    torch.save({**a, "e": other, "f": other}, "a.pt")
    torch.save({**b, "e": other + 1, "f": other + 1e-6}, "b.pt")
    data = data_of(page_of_two(command, "--values"))
    columns, paths = data["tensors"], paths_in(data["tensors"])
    assert data["title"] == "a.pt ↔ b.pt" and data["verdict"]["text"].startswith("different: 2 names only in A, ")
    assert paths == ["w", "n", "s", "i", "e", "f", "gone", "gone too", "new"] and data["maps"] == ["A", "B"]
    facts = facts_in(columns)
    assert facts["differs"] == [
        "values", "values", "dtype, shape", "dtype", "values", "values", "only in A", "only in A", "only in B",
    ]  # a table  # fmt: skip
    assert facts["dtype"][2] == "float32 → float16" and facts["shape"][2] == "3 → 2×2"
    assert [extents_in(side)[i] for side in columns["sides"] for i in (2, 6)] == [
        [12, 3, 1],
        [8, 2, 1],
        [8, 4, 1],
        None,
    ]
    assert columns["tied"] == [*7 * [-1], 6, -1]  # e and f are tied only in A
    assert facts["differing"][:4] == [2, 1, None, 0] and facts["share"][:2] == [50, 50]
    assert [facts[f"max |A − B|{name}"][0] for name in ("", " / max |B|", " / |B|")] == [4.0, 1.333, "inf"]
    assert facts["not finite"][:2] == [None, [0, 1]]
    # Tied tensors count once in a file: e and f in A, and gone and gone too in A. In B, e and f are not tied.
    assert [[each[i] and each[i][2] for i in (4, 5, 6, 7)] for each in map(extents_in, columns["sides"])] == [
        [1, 0, 1, 0],
        [1, 1, None, None],
    ]
    assert facts["largest difference"][:6] == [
        "1 or more", "NaN or inf", None, None, "1 or more", "less than 0.0001",
    ]  # a table  # fmt: skip
    assert facts["nan"][1] == [0, 1] and facts["max"][0] == [4.0, 3.0] and facts["max"][6] is None
    lists = {each["label"]: [[paths[i] for i in group] for group in each["groups"]] for each in data["lists"]}
    assert lists == {
        "largest max |A − B|": [["w"], ["e"], ["f"]],
        "NaN or inf in B": [["n"]],
        "only in A": [["gone"], ["gone too"]],
        "only in B": [["new"]],
    }
    assert ["not shown", "1 tensor in which nothing differs"] in data["facts"] and ["other", "x: 1 → 2"] in data[
        "facts"
    ]
    assert data["commands"] == [
        ["glob", "Compare only this", "ckptconv", "diff", "a.pt", "b.pt", "--values", "--include", None]
    ]


def test_pages_of_equal_and_of_differently_nested_checkpoints(command: Command) -> None:
    """The page of equal checkpoints contains no tensors. The page of two differently nested checkpoints contains a
    command that compares the matching parts.
    """
    torch.save({"w": torch.ones(2)}, "a.pt")
    torch.save({"model": {"w": torch.ones(2)}}, "b.pt")
    command("diff", "a.pt", "a.pt", "--html", "d.html", err="d.html: written", out="the same: 1 tensor, 8 B\n")
    data = data_of(Parsed(Path("d.html").read_text("utf-8")))
    assert data["verdict"]["good"] is True and data["verdict"]["remedy"] is None and not data["tensors"]["tied"]
    verdict = data_of(page_of_two(command))["verdict"]
    assert verdict["good"] is None and verdict["remedy"] == "ckptconv diff b.pt a.pt --select model"


def test_other_values_are_listed_up_to_a_limit(command: Command) -> None:
    for name, value in (("a", 1), ("b", 2)):
        torch.save({f"{i}": value for i in range(50)}, f"{name}.pt")
    facts = data_of(page_of_two(command))["facts"]
    assert facts.count(["other", "… 10 more that are not tensors"]) == 1
    assert [label for label, _ in facts].count("other") == 41


@pytest.mark.untraced
def test_three_thousand_differences_are_small(command: Command) -> None:
    """The page of 3,000 tensors that differ in values, or are only in A, has less than 250,000 bytes."""
    names = [f"model.layers.{i // 9}.self_attn.{i % 9}.weight" for i in range(3000)]
    torch.save({name: torch.rand(1 + i % 5) for i, name in enumerate(names)}, "a.pt")
    torch.save({name: torch.rand(1 + i % 5) for i, name in enumerate(names[100:])}, "b.pt")
    page_of_two(command)
    assert Path("d.html").stat().st_size < 250_000


def test_output_file_of_a_page(command: Command) -> None:
    """A page replaces an existing page only with ``--force``, and never a checkpoint. It shows one checkpoint or
    compares two. A name without the suffix of a page, and a missing folder, are refused.
    """
    torch.save({"w": torch.ones(2)}, "m.pt")
    before = Path("m.pt").read_bytes()
    for words in (("inspect", "m.pt"), ("diff", "m.pt", "m.pt")):
        for file in ("-", "m.pt", "page"):
            command(*words, "--html", file, status=2, err="is not the name of a page (expected a FILE that ends in")
        command(*words, "--open", status=2, err="--open opens the page that --html FILE writes")
        command(*words, "--html", "no/m.html", status=2, err="folder does not exist")
        command(*words, "--html", f"{words[0]}.html", err=f"{words[0]}.html: written")
        failed = 1 if words[0] == "inspect" else 2
        command(*words, "--html", f"{words[0]}.html", status=failed, err="the output exists; --force replaces it")
        command(*words, "--html", f"{words[0]}.html", "-f", err=f"{words[0]}.html: written")
    command("inspect", "m.pt", "m.pt", "--html", "m.html", status=2, err="a page shows one checkpoint, or compares")
    for folder in ("a", "b"):
        Path(folder).mkdir()
        for name in ("1.pt", "2.pt"):
            Path(folder, name).write_bytes(before)
    command("diff", "a", "b", "--html", "m.html", status=2, err="a page shows one checkpoint, or compares two")
    assert Path("m.pt").read_bytes() == before and not Path("m.html").exists()


def test_open(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, "m.pt")
    launched: list[str] = []
    monkeypatch.setattr("click.launch", launched.append)
    page_of(command, "--open")
    assert launched == [str(Path("m.html").absolute())]


def test_equal_items_are_one_in_the_page(command: Command) -> None:
    """A list of equal items has one item in the data of a page. Storages are not listed if none of them is shared.
    Other lists are complete.
    """
    torch.save({f"l{i}": torch.ones(1 + i % 2) for i in range(6)}, "m.pt")
    packed = json.loads(page_of(command).raw["data"])["tensors"]
    assert packed["tied"] == [-1] and packed["storage"] == "each"
    at = {fact["name"]: fact["at"] for fact in packed["facts"]}
    assert at["dtype"] == [0] and at["shape"] == [0, 1, 0, 1, 0, 1]
