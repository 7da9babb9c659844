"""HTML pages in headless Chromium. They send no requests, can be used with the mouse and the keyboard, and show names
of files as text. torch and the command line check the commands that pages show.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.cli.main import main
from tests.support.browser import axe_source, browser, opened
from tests.support.rank_runs import save_as_ranks

#: Names that would do harm as markup or code, or in a terminal or shell, and names of JavaScript's own properties.
HOSTILE = [
    "</script><script>document.title='gone'</script>", "<img src=x onerror=document.title='gone'>", "</style>",
    "--> <!--", "\x1b[31mred\x07", "a\u202egnp.exe", "\u2066x\u2069", "x" * 10_000, "a'b\"c`d$(touch gone)",
    "new\nline", "*?[a]", "-rf", "é漢字😀.weight", "😀.bias", "\ud800", "__proto__", "constructor.prototype",
    "toString", "${data}", "&amp;<b>", "a/b[0]\\c", "a" + 100 * "😀",
]  # a table  # fmt: skip


def state(n: int, wide: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{i // 2}.{'weight' if i % 2 else 'bias'}": torch.randn(wide, 2 + i % 5) for i in range(n)}


def bert() -> dict[str, torch.Tensor]:
    """Return a state dict with ties, a NaN element, and a layer with far larger values than the others."""
    found = {f"bert.{name}": tensor for name, tensor in state(40).items()}
    embeddings = torch.randn(500, 8)
    found = {"bert.embeddings.weight": embeddings, **found, "cls.decoder.weight": embeddings}
    found["bert.layers.3.weight"][0, 0] = float("nan")
    found["bert.layers.10.weight"] *= -50
    return found


def resnet50() -> dict[str, torch.Tensor]:
    """Return a state dict with the names and shapes of ResNet-50: 25,557,032 parameters."""
    found: dict[str, torch.Tensor] = {}

    def add(conv: str, norm: str, out: int, *shape: int) -> None:
        found[f"{conv}.weight"] = torch.empty(out, *shape)
        for name in ("weight", "bias", "running_mean", "running_var"):
            found[f"{norm}.{name}"] = torch.ones(out)
        found[f"{norm}.num_batches_tracked"] = torch.tensor(0)

    add("conv1", "bn1", 64, 3, 7, 7)
    before = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            add(f"{at}.conv1", f"{at}.bn1", width, before, 1, 1)
            add(f"{at}.conv2", f"{at}.bn2", width, width, 3, 3)
            add(f"{at}.conv3", f"{at}.bn3", 4 * width, width, 1, 1)
            if not block:
                add(f"{at}.downsample.0", f"{at}.downsample.1", 4 * width, before, 1, 1)
            before = 4 * width
    return {**found, "fc.weight": torch.empty(1000, 2048), "fc.bias": torch.empty(1000)}


def training() -> dict[str, Any]:
    model = state(20)
    moments = {i: {"exp_avg": torch.rand_like(t), "step": torch.tensor(3.0)} for i, t in enumerate(model.values())}
    return {
        "model": model,
        "ema": {name: tensor.bfloat16() for name, tensor in model.items()},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": [*range(20)]}]},
        "rng": torch.get_rng_state(),
    }


def two_epochs() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two successive training checkpoints. They differ in values, NaN, dtypes, shapes, names and other
    objects.
    """
    left, right = ({"model": state(60), "epoch": epoch} for epoch in (1, 2))
    for i, tensor in enumerate(right["model"].values()):
        tensor[0] += 10.0 ** (1 - i % 6) if i % 3 else 0
    right["model"]["layers.3.weight"][0, 0] = float("nan")
    right["model"]["layers.4.weight"] = left["model"]["layers.4.weight"].half()
    right["model"]["layers.5.weight"] = torch.ones(3)
    del right["model"]["layers.6.weight"]
    right["model"]["adapter.weight"] = torch.ones(4, 4)
    return left, right


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints and their pages."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "resnet": resnet50(),
        "bert": bert(),
        "training": training(),
        "hostile": {name: torch.ones(2, 3) for name in HOSTILE},
    }
    made["many"] = {f"model.layers.{i // 10}.experts.{i % 10}.weight": torch.ones(1 + i % 7) for i in range(60_000)}
    for name, value in made.items():
        torch.save(value, folder / f"{name}.pt")
        values = ["--histogram"] if name == "bert" else []
        assert main(["inspect", str(folder / f"{name}.pt"), "--html", str(folder / f"{name}.html"), *values]) == 0
    left, right = two_epochs()
    hostile = {name: torch.zeros(2, 3) for name in HOSTILE}
    made = {"a": left, "b": right, "hostile_b": {**hostile, "new": torch.ones(2)}}
    made["many_b"] = {f"model.layers.{i // 10}.experts.{i % 10}.weight": torch.zeros(1 + i % 7) for i in range(60_000)}
    for name, value in made.items():
        torch.save(value, folder / f"{name}.pt")
    for a, b, page, words in (
        ("a", "b", "difference", ["--values"]),
        ("hostile", "hostile_b", "hostile_difference", []),
        ("many", "many_b", "many_differences", []),
    ):
        files = [str(folder / f"{name}.pt") for name in (a, b)]
        assert main(["diff", *files, "--html", str(folder / f"{page}.html"), *words]) == 1
    save_as_ranks(state(6), folder / "ranks")
    pattern = str(folder / "ranks" / "model_world_size_2_rank_*.pt")
    assert main(["inspect", pattern, "--html", str(folder / "ranks.html")]) == 0
    return folder


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


ONE = ["resnet", "bert", "training", "ranks", "hostile", "many"]
TWO = ["difference", "hostile_difference", "many_differences"]


@pytest.mark.parametrize("name", [*ONE, *TWO])
@pytest.mark.parametrize("width", [400, 2000])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_errors(name: str, width: int, scheme: str, pages: Path, chromium: Any) -> None:
    """A page has no errors, sends no requests and is not wider than the window. Its map and its table are filled."""
    with opened(chromium, pages / f"{name}.html", width=width, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert [one.locator("div").count() > 1 for one in page.locator(".map").all()] == [True] * (
            1 + (name in TWO[:2])
        )  # equal layouts have one map
        assert page.locator("#rows button").count() > 5


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_source(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("name", ["bert", "training", "hostile", "difference"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(name: str, scheme: str, pages: Path, chromium: Any, axe: str) -> None:
    """axe-core finds no violations, before and after a selection."""
    with opened(chromium, pages / f"{name}.html", scheme=scheme) as page:
        page.evaluate(axe)
        for _ in range(2):
            found = page.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))")
            assert found == []
            page.locator("#rows button").nth(1).click()


def test_search_sort_and_select(pages: Path, chromium: Any) -> None:
    """The mouse searches, sorts and selects in the table and the map, and follows ties."""
    with opened(chromium, pages / "bert.html") as page:
        names = page.locator("#rows .name")
        assert names.first.inner_text() == "bert.embeddings.weight"  # the largest tensor
        page.get_by_role("button", name="tensor", exact=True).click()
        assert (
            names.first.inner_text() == "bert.embeddings.weight" and names.nth(1).inner_text() == "bert.layers.0.bias"
        )
        assert page.locator("th[aria-sort=ascending]").inner_text().startswith("tensor")
        page.fill("#search", "layers.1 weight")
        assert page.locator("#shown").inner_text() == "11 of 42"
        page.fill("#search", "")
        page.select_option("#filter", label="NaN or inf")
        assert names.all_inner_texts() == ["bert.layers.3.weight"]
        names.first.click()
        assert page.locator("#selected h3").inner_text() == "bert.layers.3.weight"
        assert page.locator("#selected .bad").inner_text() == "1" and page.locator(".bars i").count() in (16, 32)
        assert "contiguous" in page.locator("#selected dl").inner_text()
        assert "number " in page.locator("#selected dl").inner_text()
        page.locator("#facts button", has_text="cls.decoder.weight").click()
        assert page.locator("#map .tied").count() == 1  # drawn at the first of the tied tensors
        page.locator(".map div", has_text="layers").first.click(position={"x": 4, "y": 4})
        assert page.locator("#selected h3").inner_text().startswith("bert.layers.")
        page.locator("input[value=count]").check()
        assert "tensors" not in page.locator("#crumbs").inner_text() and "42" in page.locator("#crumbs").inner_text()


@pytest.mark.parametrize("width", [400, 1280])
def test_the_selection_is_visible(width: int, pages: Path, chromium: Any) -> None:
    """The details of a selection are visible wherever the page is scrolled, and the focus does not move into them.
    After they are closed, the tree has the focus.
    """
    in_sight = "(e => { const b = e.getBoundingClientRect(); return b.top >= 0 && b.bottom <= innerHeight; })"
    with opened(chromium, pages / "bert.html", width=width) as page:
        links = ("#facts button.link", "#tree li:nth-child(4)", ".map > div:not(.frame)", "#rows button")
        for n, selector in enumerate(links):
            page.locator(selector).first.click(position={"x": 4, "y": 4})
            assert page.evaluate(in_sight + "(document.getElementById('details'))"), selector
            assert page.locator("#selected h3").count() == 1
            assert not page.evaluate("document.getElementById('details').contains(document.activeElement)")
            if n == 1:
                assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
        page.locator("#close").click()
        assert page.locator("#selected h3").count() == 0 and not page.locator("#close").is_visible()
        assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"


def test_a_search_reports_its_results(pages: Path, chromium: Any) -> None:
    with opened(chromium, pages / "training.html") as page:
        hits = page.locator("#hits")
        for query, said in (
            ("", ""),
            ("model layers.1.", "2 tensors"),
            ("rng", "1 tensor"),
            ("lr", "No tensor has this in its name. Other values are listed above. They are not searched."),
        ):
            page.fill("#search", query)
            assert hits.inner_text() == said


def test_the_values_of_tensors(pages: Path, chromium: Any) -> None:
    """Each row has a histogram. The page names the layer with unusual values, and sorts by the largest magnitude."""
    with opened(chromium, pages / "bert.html") as page:
        tensor = "bert.layers.10.weight"
        assert page.locator("#rows svg path").count() == page.locator("#rows tr[aria-rowindex]").count() > 30
        listed = page.locator("#facts dd", has_text="× the median").inner_text()
        assert listed.startswith(tensor) and ";" not in listed and 20 < float(listed.split("(")[1].split()[0]) < 200
        for head in ("max |x|", "× usual", "norm"):
            page.get_by_role("button", name=head, exact=True).click()
            assert page.locator("#rows .name").first.inner_text() == tensor
        page.select_option("#colour", "× usual")
        assert page.locator("#legend li").count() == 7
        marked = page.locator("#tree li", has_text="⚠").all_inner_texts()
        assert marked and page.locator(".map .bad").count() == 1
        page.locator("#rows button").first.click()
        assert "max |x|" in page.locator("#selected").inner_text()


def test_no_label_is_cut_and_the_panel_covers_nothing(pages: Path, chromium: Any) -> None:
    """No label of the map is cut off, and the details are next to the map."""
    with opened(chromium, pages / "resnet.html") as page:
        cut = "all => all.filter((e) => e.textContent && e.scrollWidth > e.clientWidth + 1).length"
        assert page.locator(".map div").evaluate_all(cut) == 0
        page.locator(".map > div:not(.inner)").first.click()
        details, area = (page.locator(each).bounding_box() for each in ("#details", "#map"))
        assert details["x"] >= area["x"] + area["width"]


def test_a_search_dims_the_rest_and_opens_the_tree(pages: Path, chromium: Any) -> None:
    """A search dims all other tensors and opens the row of similar blocks in the tree. An empty query restores the
    tree.
    """
    with opened(chromium, pages / "resnet.html") as page:
        names, dim = page.locator("#tree .name"), page.locator(".map .dim, #tree .dim")
        before = names.all_inner_texts()
        assert dim.count() == 0
        page.fill("#search", "layer2.2.conv1")
        dim.first.wait_for(state="attached")
        assert "{1…3} ×3" in names.all_inner_texts() and "conv1.weight" in names.all_inner_texts()
        assert dim.count() > 20 and page.locator("#tree li:not(.dim)").count() < 9
        page.locator("#search").press("Enter")
        assert page.evaluate("document.activeElement.id") == "scroll"
        page.fill("#search", "")
        dim.first.wait_for(state="detached")
        assert dim.count() == 0 and names.all_inner_texts() == before


def test_a_difference_of_one_layout_has_one_map(pages: Path, chromium: Any) -> None:
    """The difference of two files with one layout has one map. The legend names the kinds of differences, and the
    meaning of the columns is below the table.
    """
    with opened(chromium, pages / "many_differences.html") as page:
        assert page.locator(".map").count() == 1 and page.locator("#legend li").count() == 0  # all values differ by 1
    with opened(chromium, pages / "difference.html") as page:
        assert "divided by the element of B itself" in page.locator("#finite").inner_text()
        legend = page.locator("#legend li").all_inner_texts()
        assert legend[0] == "only in A" and "values" in legend
        assert page.locator("#beyond").inner_text().startswith("To the right: ")
    with opened(chromium, pages / "difference.html", width=1000) as page:  # a name in the tree keeps some room
        assert page.locator("#tree .name").evaluate_all("all => Math.min(...all.map((e) => e.clientWidth))") > 40


def test_the_worst_difference_has_the_strongest_colour(chromium: Any, tmp_path: Path) -> None:
    """The largest difference has the strongest color and the smallest the weakest, even if all differences are small.
    Every layer in the map has a label.
    """
    for name, by in (("a", 0), ("b", 2)):
        layers = {f"layers.{i}.{k}": torch.ones(8) + by * 10.0 ** -(3 + i % 3) for i in range(33) for k in range(9)}
        torch.save(layers, tmp_path / f"{name}.pt")
    files = [str(tmp_path / f"{name}.pt") for name in "ab"]
    assert main(["diff", *files, "--html", str(tmp_path / "d.html")]) == 1
    with opened(chromium, tmp_path / "d.html") as page:
        assert page.locator("#legend li").all_inner_texts() == ["0.001 to 0.01", "0.0001 to 0.001", "less than 0.0001"]
        colours = page.locator("#legend i").evaluate_all("all => all.map((e) => e.style.background)")
        assert colours == ["var(--s6)", "var(--s3)", "var(--s0)"]
        assert {*map(str, range(33))} <= {*page.locator(".map .inner").all_inner_texts()}
        page.get_by_role("button", name="max |A − B|", exact=True).click()
        page.fill("#search", "8")
        rows = page.locator("#rows .name").all_inner_texts()
        assert len(rows) > 30 and [int(row.split(".")[1]) % 3 for row in rows] == sorted(
            int(row.split(".")[1]) % 3 for row in rows
        )


def test_names_stay_when_the_table_is_scrolled(pages: Path, chromium: Any) -> None:
    with opened(chromium, pages / "bert.html", width=400) as page:
        name, left = page.locator("#rows td").first, "e => e.getBoundingClientRect().left"
        before = name.evaluate(left)
        page.evaluate("document.getElementById('scroll').scrollLeft = 300")
        assert name.evaluate(left) == before and page.locator("th").nth(1).evaluate(left) < before
        assert page.locator("#finite").is_visible()


def test_a_resnet(pages: Path, chromium: Any) -> None:
    """The page of a ResNet-50 shows its known number of parameters, plus its buffers. The map opens a stage and
    returns.
    """
    with opened(chromium, pages / "resnet.html") as page:
        parameters = 25_557_032 + sum(
            t.numel() for name, t in resnet50().items() if "running" in name or "num_" in name
        )
        assert f"{parameters:,} numbers" in page.locator("#facts").inner_text()
        page.locator(".map div.inner", has_text="layer4").first.dblclick(position={"x": 4, "y": 4})
        assert "layer4." in page.locator("#crumbs b").inner_text()
        assert all(name.startswith("layer4.") for name in page.locator("#rows .name").all_inner_texts())
        page.locator("#crumbs button").first.click()
        assert page.locator("#crumbs b").inner_text() == "everything"
        page.get_by_role("button", name="shape").click()
        assert page.locator("#rows .name").first.inner_text() == "layer4.0.conv2.weight"  # the first of three


def test_the_keyboard(pages: Path, chromium: Any) -> None:
    """The tree can be used with the keyboard as screen readers expect."""
    with opened(chromium, pages / "training.html") as page:
        page.locator("#tree li[tabindex='0']").focus()
        for key in ("Home", "ArrowRight", "ArrowDown", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        chosen = page.locator("#tree li[aria-selected=true]")
        assert chosen.count() == 1 and chosen.get_attribute("aria-level") >= "2"
        assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"
        assert page.locator("#selected code").count() == 2
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "1"


def test_a_difference(pages: Path, chromium: Any) -> None:
    """The page of a difference has two maps, filters for the kinds of differences, an order by the largest difference,
    and both values of a selected tensor.
    """
    with opened(chromium, pages / "difference.html") as page:
        facts = page.locator("#facts")
        assert page.locator("#verdict").inner_text().startswith("different: 1 name only in A, 1 name only in B")
        facts.get_by_role("button", name="model/adapter.weight").click()
        assert [one.locator(".frame").count() for one in page.locator(".map").all()] == [0, 1]
        assert page.locator("#selected code").count() == 0 and "– → 64" in page.locator("#selected").inner_text()
        page.select_option("#filter", label="differs: only in A")
        assert page.locator("#rows .name").all_inner_texts() == ["model/layers.6.weight"]
        page.select_option("#filter", label="NaN or inf")
        page.locator("#rows button").click()
        said = page.locator("#selected").inner_text()
        assert "0 → 1" in said and page.locator("#selected .bad").count() == 2  # not finite, nan
        page.select_option("#filter", label="all tensors")
        page.get_by_role("button", name="max |A − B|", exact=True).click()
        assert page.locator("#rows tr").first.locator("td").nth(4).inner_text() == "1"
        page.select_option("#colour", "largest difference")
        assert page.locator("#legend li").all_inner_texts()[0] == "1 or more"


def test_a_difference_by_its_command(pages: Path, chromium: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The command for each tensor compares only that tensor."""
    with opened(chromium, pages / "hostile_difference.html") as page:
        assert page.locator("#rows button").count() == len(HOSTILE) + 1
        for button in page.locator("#rows button").all():
            button.click()
            if any(text in page.locator("#selected h3").inner_text() for text in ("d800", "new")):
                continue  # no shell can spell the name, or the tensor is not in A
            (line,) = [code.text_content() for code in page.locator("#selected code").all()]
            capsys.readouterr()
            assert main([*words_of(line)[1:], "--json"]) == 1, line
            found = json.loads(capsys.readouterr().out)
            assert len(found["differing"]) + len(found["only_in_b"]) == 1, line


def test_names_are_text(pages: Path, chromium: Any) -> None:
    """Hostile names are shown as text. No name is markup or code, and control characters are escaped."""
    with opened(chromium, pages / "hostile.html") as page:
        assert page.locator("#rows tr").count() == len(HOSTILE)
        assert page.title().endswith("hostile.pt") and page.locator("img, #rows script").count() == 0
        shown = page.locator("#rows").inner_text()
        assert "\u202e" not in shown and "\x1b" not in shown and "a\\u{202e}gnp.exe" in shown
        assert not page.evaluate("/\\p{Cs}/u.test(document.body.innerText)")  # half of a surrogate pair


@pytest.mark.parametrize("name", ["hostile", "training"])
def test_the_commands_have_their_described_effects(
    name: str, pages: Path, chromium: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For each tensor or part, one command extracts it, and the other leaves it out."""
    whole = set(paths_of(pages / f"{name}.pt"))
    with opened(chromium, pages / f"{name}.html") as page:
        items = page.locator("#tree li" if name == "training" else "#rows button")
        for n in range(min(items.count(), 24)):
            items.nth(n).click()
            path = page.evaluate("document.querySelector('#selected h3').textContent")
            commands = [code.text_content() for code in page.locator("#selected code").all()]
            if path == "everything" or "d800" in path or "{" in path:  # no shell can spell a surrogate, or it is a fold
                continue
            found = []
            for i, line in enumerate(commands):
                words = words_of(line)
                words[3] = str(tmp_path / f"{i}.pt")
                capsys.readouterr()
                assert main([*words[1:], "--force", "-q"]) == 0, (line, capsys.readouterr().err)
                found.append(set(paths_of(tmp_path / f"{i}.pt")))
            if not commands:  # a tensor of the optimizer, which belongs to its weight
                continue
            taken, left = found
            gone = whole - taken - left  # the state of an optimizer is removed with its parameters
            assert taken and left < whole and not taken & left, (path, commands)
            assert all(path.startswith("optimizer/") for path in gone), (path, commands)


def paths_of(path: Path) -> list[str]:
    return [tensor.path for tensor in ckptconv.inspect(path).tensors]


def words_of(line: str) -> list[str]:
    """Return the words into which bash splits `line`."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_sixty_thousand_tensors(pages: Path, chromium: Any) -> None:
    """The page of 60,000 tensors combines levels in the map, creates only visible rows, and finds a single tensor."""
    with opened(chromium, pages / "many.html") as page:
        areas = page.locator(".map div").all_inner_texts()
        assert 20 < len(areas) <= 62 and all(areas) and sum("tensors" in text for text in areas) > 20
        assert page.locator("#rows tr").count() < 100
        page.locator(".map div").nth(3).dblclick()  # the first click opens it; the second has no effect
        assert page.locator("#crumbs b").inner_text() == areas[3].split("\n")[0].replace(" (", "\n").split("\n")[0]
        page.locator("#crumbs button").first.click()
        page.evaluate("document.getElementById('scroll').scrollTop = 28 * 30000")
        page.locator("#rows tr[aria-rowindex='30002']").wait_for()  # waiting with a function would need eval
        page.fill("#search", "layers.4321.experts.7")
        assert page.locator("#rows .name").all_inner_texts() == ["model.layers.4321.experts.7.weight"]
        found = page.locator("#tree li:not(.dim) .name", has_text="7.weight")
        found.wait_for()  # the tree shows a part of the 6,000 layers, beginning with the first match
        page.locator("#rows button").click()
        assert page.locator("#tree li[aria-selected=true] .name").inner_text() == "7.weight"
        assert page.locator("#tree li").count() < 300
        page.get_by_role("treeitem", name="… 4,321 before").click()
        assert page.get_by_role("treeitem", name="… 4,221 before").count() == 1


@pytest.mark.parametrize("width", [400, 1280])
def test_a_row_of_the_table_has_one_height(width: int, pages: Path, chromium: Any) -> None:
    """All rows have the same height, even with long names, because the table computes positions from it. A narrow page
    shows a name in two lines.
    """
    with opened(chromium, pages / "hostile.html", width=width) as page:
        heights = page.locator("#rows tr").evaluate_all("all => all.map((row) => row.getBoundingClientRect().height)")
        assert all(28 <= height <= 29 for height in heights)


def test_in_a_notebook(pages: Path, chromium: Any) -> None:
    """The page works in a frame without an origin, including the copy button, and does not change the notebook."""
    html = ckptconv.inspect(pages / "hostile.pt")._repr_html_()
    (pages / "notebook.html").write_text(f"<title>kept</title><table><tbody id=rows><tr></table>{html}")
    with opened(chromium, pages / "notebook.html", frame="srcdoc") as page:
        frame = page.frames[1]
        frame.wait_for_selector(".map div")
        frame.locator("#rows button").nth(1).click()
        frame.locator(".command button").first.click()
        assert frame.locator(".command button").first.inner_text() == "Copied" and page.title() == "kept"


def test_in_a_static_export(pages: Path, chromium: Any, tmp_path: Path) -> None:
    """In a static export of nbconvert, a summary, a difference and a report show their maps, even outside the window or
    in a folded part.
    """
    exporters = pytest.importorskip("nbconvert.exporters", reason="nbconvert is not installed")
    v4 = pytest.importorskip("nbformat.v4")
    results = [
        ckptconv.inspect(pages / "bert.pt"),
        ckptconv.diff(pages / "a.pt", pages / "b.pt"),
        ckptconv.convert(pages / "bert.pt", tmp_path / "out.safetensors", strip_prefix="bert."),
        ckptconv.inspect(pages / "many.pt"),
    ]
    outputs = [v4.new_output("execute_result", data={"text/html": result._repr_html_()}) for result in results]
    notebook = v4.new_notebook(cells=[v4.new_code_cell("", outputs=outputs)])
    body, _ = exporters.HTMLExporter(embed_images=True).from_notebook_node(notebook)
    (tmp_path / "notebook.html").write_text(body)
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    try:
        page = context.new_page()
        page.goto((tmp_path / "notebook.html").as_uri())
        page.locator("details summary").click()
        maps = []
        for element in page.locator("iframe").all():
            element.scroll_into_view_if_needed()
            frame = element.element_handle().content_frame()
            frame.wait_for_selector(".map div")
            maps.append(frame.locator(".map").count())
        assert maps == [1, 2, 1, 1]
    finally:
        context.close()


def test_on_paper(pages: Path, chromium: Any) -> None:
    """In print the table shows all of its rows, and the search field is hidden."""
    with opened(chromium, pages / "training.html") as page:
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.locator("#rows tr").count() == 81 and not page.locator("#search").is_visible()
