"""The page that converts in the browser, in headless Chromium. It saves the same bytes as the command line, sends no
requests, and shows the same errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shlex
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptconv
import ckptconv.errors
from ckptconv.cli.main import main
from tests.support.archives import flip_bit, records_of, rezip
from tests.support.browser import axe_source, browser
from tests.support.web_page import Page, Site, built, opened_page, served, used_in
from tests.support.writers import scripted


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with served(built(tmp_path_factory.mktemp("site"))) as started:
        yield started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(chromium: Any, site: Site) -> Iterator[Page]:
    """Yield a page that is shared by tests that leave nothing in it. It must write nothing to the console."""
    with opened_page(chromium, site) as opened:
        yield opened
        assert opened.said == []


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a temporary folder for files and commands."""
    monkeypatch.chdir(tmp_path)


def state(prefix: str = "module.") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"{prefix}layers.{i}.weight": torch.randn(8, 4 + i) for i in range(6)}
    return {**tensors, f"{prefix}tied": tensors[f"{prefix}layers.0.weight"]}


def training() -> dict[str, Any]:
    optimizer = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": [{"params": [0]}]}
    return {"state_dict": state(), "optimizer": optimizer, "args": SimpleNamespace(lr=0.1), "epoch": 3}


def write(kind: str) -> Path:
    """Write a checkpoint of this `kind` to the current folder, and return its path."""
    path = Path(f"{kind}.safetensors" if kind == "safetensors" else f"{kind}.pkl" if kind == "pickle" else f"{kind}.pt")
    if kind == "safetensors":
        safetensors.torch.save_file({name: tensor.clone() for name, tensor in state().items()}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(state()))
    elif kind == "script":
        path.write_bytes(scripted(torch.nn.Linear(3, 2)))
    else:
        value = state() if kind in ("deflated", "zip") else training()
        torch.save(value, path, _use_new_zipfile_serialization=kind != "legacy")
        if kind == "deflated":
            rezip(path, path, method=zipfile.ZIP_DEFLATED)
    return path


def write_set(folder: Path, suffix: str) -> dict[str, torch.Tensor]:
    """Write three shards, their index and a configuration file to `folder`, and return the tensors."""
    folder.mkdir()
    tensors = {f"module.l{i}.w": torch.full((100,), float(i)) for i in range(3)}
    (folder / "config.json").write_text("{}")
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = {name: f"{stem}-{i:05d}-of-00003{suffix}" for i, name in enumerate(tensors, 1)}
    for name, shard in names.items():
        save = torch.save if suffix == ".bin" else safetensors.torch.save_file
        save({name: tensors[name]}, folder / shard)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return tensors


#: A container, the fields that are filled in, and words of the command.
CONVERSIONS: list[tuple[str, dict[str, str | bool], str]] = [
    ("zip", {"to": "cuda:1"}, "--to cuda:1"),
    ("zip", {"map": "cpu=cuda:0", "strip_prefix": "module."}, "--map cpu=cuda:0 --strip-prefix module."),
    ("zip", {"suffix": ".safetensors", "unwrap": True}, "--unwrap"),
    ("zip", {"suffix": ".safetensors", "copy_tied": True, "add_prefix": "a.\nb."}, "--add-prefix a. --add-prefix b."),
    ("legacy", {"to": "mps", "drop": "args"}, "--drop args"),
    ("legacy", {"suffix": ".safetensors", "select": "state_dict"}, "--select state_dict"),
    ("safetensors", {"suffix": ".pt", "regex": r"layers\.(\d)", "replacement": r"blocks.\1"}, "--rename"),
    ("safetensors", {"dst": "x.safetensors", "include": "*.0.*\n*.1.*"}, "--include '*.0.*'"),
    ("pickle", {"dst": "x.pt", "exclude": "*.tied"}, "--exclude '*.tied'"),
    ("deflated", {"suffix": ".safetensors"}, ""),
    ("deflated", {"to": "cuda:0"}, ""),
    ("training", {"loadable": True}, "--loadable"),
    ("training", {"state_dict": True, "compact": True}, "--state-dict"),
    ("script", {"state_dict": True, "dst": "weights.pt"}, "--state-dict"),
]  # a table  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "words"), CONVERSIONS)
def test_the_page_saves_the_bytes_of_the_command_line(
    kind: str, fields: dict[str, str | bool], words: str, page: Page
) -> None:
    """The page saves the same bytes as the command that it shows."""
    page.choose(write(kind))
    page.prepare(**fields)
    assert not page.shows("error"), page.text("error")
    typed = shlex.split(page.text("command"))
    assert words in page.text("command")
    saved = page.save()
    assert main([*typed[1:], "-q"]) == 0
    assert sum_of(saved) == sum_of(Path(typed[3]))


def test_firefox_saves_the_same(site: Site, tmp_path: Path) -> None:
    """Firefox saves the same bytes for all conversions and for a set of shards, and blocks planted requests."""
    check_what_is_saved("firefox", site, tmp_path)


def check_what_is_saved(kind: str, site: Site, folder: Path) -> None:
    """Fail unless a browser of this `kind` saves the same bytes as the command line, and blocks requests. `folder` is
    for its files.
    """
    write_set(Path("FOLDER"), ".bin")
    chosen = [[write(kind)] for kind, _, _ in CONVERSIONS] + [[*Path("FOLDER").iterdir()]]
    filled = [*(each for _, each, _ in CONVERSIONS), {"dst": "one.safetensors"}]
    jobs = [
        {"files": [str(path.resolve()) for path in paths], "fields": fields}
        for paths, fields in zip(chosen, filled, strict=True)
    ]
    found = used_in(kind, site, jobs, folder / "driver")
    assert found["promise"].startswith("Nothing is uploaded: the browser forbids it") and found["said"] == []
    assert found["planted"] == ["blocked"] * 3 and len(found["results"]) == len(jobs)
    for result in found["results"]:
        typed = shlex.split(result["command"])
        assert main([*typed[1:], "-q", "-f"]) == 0 and result["sum"] == sum_of(Path(typed[3]))


@pytest.mark.parametrize("way", ["chosen", "dropped"])
@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_set_of_shards_is_one_checkpoint(suffix: str, way: str, page: Page) -> None:
    """A set of shards, as chosen files or as a dropped folder, is converted to one file or to another set, like the
    command that the page shows.
    """
    tensors = write_set(Path("FOLDER"), suffix)
    if way == "chosen":
        page.choose(*sorted(Path("FOLDER").iterdir()))
    else:
        page.drop(Path("FOLDER"))
    assert not page.shows("error"), page.text("error")
    assert page.shows("several") and "a folder of shards again" in page.text("several")
    assert page.shows("stands")  # a note says that FOLDER stands for another name
    rows = page.page.frame_locator("#inside").locator("#rows tr")
    rows.nth(2).wait_for(state="attached")
    assert rows.count() >= len(tensors)
    for name in ("one.safetensors", "one.pt", "set"):
        page.prepare(dst=name, strip_prefix="module.")
        assert not page.shows("error"), page.text("error")
        assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0
        buttons = page.page.locator("#outputs button")
        if name != "set":
            assert buttons.count() == 0 and sum_of(page.save()) == sum_of(Path(name))
            continue
        names = [text.split()[-1] for text in page.page.locator("#outputs li").all_text_contents()]
        assert sorted(names) == sorted(path.name for path in Path("set").iterdir()) and not page.shows("save")
        assert [sum_of(page.save(f"#outputs button >> nth={i}")) for i in range(buttons.count())] == [
            sum_of(Path("set") / name) for name in names
        ]


def test_an_incomplete_set_names_the_missing_files(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """The error about an incomplete set is that of the command line. For a folder with several checkpoints, the error
    names them and the command that converts all of them.
    """
    write_set(Path("FOLDER"), ".bin")
    Path("FOLDER/pytorch_model-00002-of-00003.bin").unlink()
    page.choose(*sorted(Path("FOLDER").iterdir()))
    assert main(["inspect", "FOLDER/pytorch_model.bin.index.json"]) == 1
    assert page.text("error") == capsys.readouterr().err.strip() and "pytorch_model-00002-of-" in page.text("error")
    Path("runs").mkdir()
    for name in "ab":
        torch.save(state(), f"runs/{name}.pt")
    page.drop(Path("runs"))
    with pytest.raises(ckptconv.errors.UnsupportedError) as caught:
        ckptconv.inspect("runs")
    assert "runs/a.pt" in page.text("error") and page.text("error").startswith(f"ckptconv: {caught.value}"[:60])
    assert "ckptconv convert runs OUT_FOLDER" in page.text("error")


def test_a_set_is_saved_in_one_folder(chromium: Any, site: Site) -> None:
    """If the browser provides a folder, a set is saved to it with the same bytes as by the command line. A folder that
    exists already is refused.
    """
    script = "globalThis.showDirectoryPicker = () => navigator.storage.getDirectory();"
    tensors = write_set(Path("FOLDER"), ".safetensors")
    with opened_page(chromium, site, script=script) as page:
        page.choose(*sorted(Path("FOLDER").iterdir()))
        page.prepare(dst="set", strip_prefix="module.")
        page.page.locator("#save").click()
        page.page.wait_for_selector("#saved:has-text('did not change')")
        saved = page.page.evaluate("""async () => {
            const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("set"), found = {};
            for await (const [name, handle] of folder.entries()) {
                const data = await (await handle.getFile()).arrayBuffer();
                const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", data));
                found[name] = [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("");
            }
            return found;
        }""")
        assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0 and len(saved) == len(tensors) + 1
        assert saved == {path.name: sum_of(path) for path in Path("set").iterdir()}
        page.page.locator("#save").click()
        page.page.wait_for_selector("#error:visible")
        assert "there is such a folder already" in page.text("error")


def sum_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            found.update(chunk)
    return found.hexdigest()


def test_the_fixes_of_inspect_are_buttons(page: Page) -> None:
    """A button for a finding fills in the command that ``inspect`` suggests."""
    torch.save({f"module.{name}": tensor for name, tensor in state("").items()}, "ddp.pt")
    page.choose(Path("ddp.pt"))
    assert "module." in page.text("findings") and not page.shows("several") and not page.shows("stands")
    assert page.text("verdict") == "torch.load takes it as it is. What was found:"
    page.press("#findings button >> nth=0")
    assert page.text("command") == "ckptconv convert ddp.pt ddp-plain.pt --strip-prefix module."
    saved = page.save()
    assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0 and sum_of(saved) == sum_of(Path("ddp-plain.pt"))


def test_all_faults_are_mended_before_one(page: Page) -> None:
    """The first button mends all findings, and the others mend one each. The mended copy loads on a CPU."""
    torch.save(state(), "cpu.pt")
    assert main(["convert", "cpu.pt", "gpu.pt", "--map", "cpu=cuda:0", "-q"]) == 0
    page.choose(Path("gpu.pt"))
    first, *others = page.page.locator("#findings button[title]").all_text_contents()
    assert first == "Mend all" and {*others} == {"Mend only this"} and len(others) >= 2
    assert page.text("state").endswith("nothing of it was run. Next: mend it, or save a changed copy.")
    page.press("#findings button >> nth=0")
    assert page.page.locator("#more").evaluate("(more) => more.open") and page.shows("save")  # shows the set option
    assert "Press Save" in page.text("state") and page.page.locator("#edits [name=strip_prefix]").is_visible()
    assert page.text("save").startswith("Save gpu-fixed.pt, ")
    loaded = torch.load(page.save(), weights_only=True)
    assert loaded.keys() == state("").keys() and all(map(torch.equal, loaded.values(), state("").values()))


@pytest.mark.parametrize("width", [400, 1280])
def test_save_is_next_to_the_button_that_was_pressed(width: int, chromium: Any, site: Site) -> None:
    """After a button is pressed, Save is enabled and visible next to it without scrolling. This also applies to
    Prepare, and to a set without a folder.
    """
    torch.save(state(), "cpu.pt")
    assert main(["convert", "cpu.pt", "gpu.pt", "--map", "cpu=cuda:0", "-q"]) == 0
    write_set(Path("FOLDER"), ".safetensors")
    place = "(e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom, scrollY]; }"
    with opened_page(chromium, site, width=width) as page:
        for files, button in (([Path("gpu.pt")], "#save"), (sorted(Path("FOLDER").iterdir()), "#outputs button")):
            page.choose(*files)
            assert page.text("saved").startswith("First press Mend") and page.page.locator("#save").is_disabled()
            mend = page.page.locator("#findings button").first
            mend.scroll_into_view_if_needed()
            scrolled = page.page.evaluate("scrollY")
            page.press("#findings button >> nth=0")
            save = page.page.locator(button).first
            left, top, right, bottom, now = save.evaluate(place)
            assert save.is_enabled() and page.page.locator("#save").count() == 1
            assert 0 <= left < right <= width and 0 <= top < bottom <= 900 and now == scrolled
            assert top - mend.evaluate(place)[3] < 80 and button[1:5] in page.page.evaluate(
                "document.activeElement.closest('#outputs, #save').id"
            )
        page.prepare(dst="one.pt")
        assert (
            0 <= page.page.locator("#save").evaluate(place)[1] - page.page.locator("#prepare").evaluate(place)[1] < 80
        )


def test_the_contents_are_the_page_of_inspect(page: Page) -> None:
    """The page of ``inspect`` is shown in a frame, also for a second file."""
    for kind in ("zip", "training"):
        page.choose(write(kind))
        frame = page.page.frame_locator("#inside")
        frame.locator("#map div").nth(3).wait_for(state="attached")  # parts outside the window may not be drawn
    assert "optimizer" in frame.locator("#tree").text_content() and frame.locator("#rows button").count() >= 9
    page.page.locator("#full").click()
    page.page.wait_for_function("document.fullscreenElement?.id === 'inside'")
    page.page.evaluate("document.exitFullscreen()")
    assert not frame.locator("#verdict").text_content()


def test_two_files_are_compared(page: Page) -> None:
    """Two files are equal if their checksums are equal. Otherwise the page reports the differences that can be found
    without torch.
    """
    torch.save(state(), "a.pt")
    torch.save(state(), "b.pt")
    page.choose(Path("a.pt"), Path("b.pt"))
    assert page.text("same") == "They are the same."
    torch.save(state(""), "b.pt")
    page.choose(Path("a.pt"), Path("b.pt"))
    assert page.text("same") == "They are not the same." and page.text("diff-command") == "ckptconv diff a.pt b.pt"
    torch.save({name: tensor + 1 for name, tensor in state().items()}, "b.pt")
    page.choose(Path("a.pt"), Path("b.pt"))
    assert page.text("same") == "They are not the same."
    assert "compared: values of 7 tensors (module.layers.0.weight, " in page.text("difference")


def test_three_files_are_refused_with_a_command(page: Page) -> None:
    for name in "abc":
        torch.save(state(), f"{name}.pt")
    page.choose(*map(Path, ("a.pt", "b.pt", "c.pt")))
    assert "ckptconv convert FOLDER OUT_FOLDER" in page.text("error")


def deep(path: Path) -> None:
    """Save lists with 500 levels of nesting."""
    torch.save({"w": torch.ones(1), "v": []}, path)
    pickled = records_of(path)["data.pkl"]
    assert pickled.count(b"]") == 1
    rezip(path, path, {"data.pkl": pickled.replace(b"]", 500 * b"]" + 499 * b"a")})


def dangerous(path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    torch.save({"w": torch.ones(2), "v": Harm()}, path)


def truncated(path: Path) -> None:
    path.write_bytes(write("zip").read_bytes()[:-500])


#: Files that the page refuses with the error of the command line.
HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep": deep,
    "truncated": truncated,
    "empty": Path.touch,
    "text": lambda path: path.write_text("{'a': 1}"),
    "json": lambda path: path.write_bytes((500_000).to_bytes(8, "little") + b'{"a":' * 100_000),
    "header": lambda path: path.write_bytes((1 << 40).to_bytes(8, "little") + b'{"a'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_read_errors_are_those_of_the_command_line(
    name: str, page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error about an unreadable file is that of the command line. Only the limit on nesting is lower."""
    path = Path(f"{name}.pt")
    HOSTILE[name](path)
    page.choose(path)
    if name == "deep":  # the only limit that is lower in the browser
        assert "nested too deeply" in page.text("error") and "at most 400 levels" in page.text("error")
        return
    assert main(["inspect", str(path)]) == 1
    assert page.text("error") == capsys.readouterr().err.strip()


def test_page_continues_after_a_stack_overflow(chromium: Any, site: Site) -> None:
    """100,000 nested tuples, which Python frees recursively, are reported. The page reads the next file, even if the
    worker ended.
    """
    Path("tuples.pkl").write_bytes(b"\x80\x04N" + b"\x85" * 100_000 + b".")
    with opened_page(chromium, site) as page:
        page.choose(Path("tuples.pkl"))
        ended = "needs a larger stack, or more memory, than a browser gives: use the command line"
        assert ended in page.text("error") or "nested too deeply" in page.text("error")
        page.choose(write("zip"))
        assert not page.shows("error") and page.text("name") == "zip.pt"


def test_conversion_errors_are_those_of_the_command_line(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """The errors about a wrong prefix and a wrong checksum are those of the command line. An error about a field is
    shown next to it.
    """
    page.choose(write("zip"))
    page.prepare(dst="x.pt", strip_prefix="modul.")
    assert main(["convert", "zip.pt", "x.pt", "--strip-prefix", "modul."]) == 1
    assert page.text("error") == capsys.readouterr().err.strip()
    assert page.page.locator("#edits #error").count() == 1 and page.page.locator("#save").is_disabled()
    page.prepare(strip_prefix="", to="nonsense:x")  # the error names only the value of the option
    error = page.page.locator("p:has([name=to]) + #error")
    assert error.inner_text().startswith("ckptconv: 'nonsense:x' is not a device")
    assert page.page.evaluate("document.activeElement.name") == "to"
    page.prepare(to="")
    data = Path("zip.pt").read_bytes()
    flip_bit(Path("zip.pt"), data.index(state()["module.layers.3.weight"].numpy().tobytes()))
    page.choose(Path("zip.pt"))
    page.prepare(dst="x.safetensors")
    page.page.locator("#save").click()
    page.page.wait_for_selector("#error:visible")
    assert main(["convert", "zip.pt", "x.safetensors"]) == 1
    assert page.text("error") == capsys.readouterr().err.strip()


def test_dangerous_objects_are_not_saved(page: Page) -> None:
    """A dangerous file has its own headline, and Save gives the reason why it is disabled. The error names no option
    that the page lacks. Without the dangerous object the file can be saved.
    """
    dangerous(Path("bad.pt"))
    page.choose(Path("bad.pt"))
    assert page.text("danger").startswith("Dangerous: do not load this file") and "posix.system" in page.text("danger")
    assert page.text("verdict") == "torch.load refuses it as it is."
    save = page.page.locator("#save")
    for options in ({}, {"to": "cpu"}):
        assert save.is_disabled() and "something dangerous" in page.text("saved")
        page.prepare(dst="x.pt", **options)
        assert "posix.system" in page.text("error") and "--" not in page.text("error") and not page.shows("planned")
    page.prepare(drop="v")
    assert page.text("command") == "ckptconv convert bad.pt x.pt --to cpu --drop v" and save.is_enabled()
    assert torch.load(page.save(), weights_only=True).keys() == {"w"}
    page.choose(write("zip"))
    assert not page.shows("danger") and page.text("saved") == "First press Mend this."


def test_names_are_text(page: Page) -> None:
    """Hostile names of files and tensors are shown as text."""
    name = "<img src=x onerror=document.title='gone'>"
    torch.save({f"module.{name}": torch.ones(1), "other": torch.ones(1)}, f"{name.replace('/', '')}.pt")
    Path("a\u202egnp.pt").write_bytes(Path(f"{name}.pt").read_bytes())
    page.choose(Path("a\u202egnp.pt"))
    assert page.text("name") == "a\\u{202e}gnp.pt" and "\u202e" not in page.page.inner_text("body")
    page.choose(Path(f"{name}.pt"))
    page.prepare(drop=f"module.{name}")
    assert page.page.title() == "ckptconv in the browser" and page.page.locator("main img").count() == 0
    assert name in page.text("name") and "<img src=x" in page.text("command")


@pytest.mark.parametrize("way", ["chosen", "dropped"])
@pytest.mark.parametrize("change", [lambda path: path.write_bytes(bytes(path.stat().st_size)), Path.unlink])
def test_a_file_that_changes_is_noticed(change: Callable[[Path], object], way: str, page: Page) -> None:
    """A changed or deleted file is an error when it is saved, planned or read, even if its size is the same."""
    path = write("legacy")
    page.choose(path) if way == "chosen" else page.drop(path)
    page.prepare(to="cuda:0")
    change(path)
    page.page.locator("#save").click()
    page.page.wait_for_selector("#error:visible")
    assert "changed" in page.text("error") and "legacy.pt" in page.text("error")
    page.prepare(to="cuda:0")
    assert "changed" in page.text("error") and not page.shows("planned")
    if way == "chosen":  # the page does not check, so the worker that reads finds the change
        page.page.evaluate("Blob.prototype.arrayBuffer = async () => new ArrayBuffer(0)")
        page.prepare(to="cuda:1")
        assert "ckptconv: legacy.pt: the file was changed, moved or deleted since it was chosen" in page.text("error")
        page.page.reload()


def test_a_file_that_changes_while_it_is_saved_is_noticed(chromium: Any, site: Site) -> None:
    """A file that changes during the save is an error, and no part of it is kept."""
    script = """globalThis.showSaveFilePicker = async ({ suggestedName }) => {
        await new Promise((done) => { globalThis.go = done; });
        return (await navigator.storage.getDirectory()).getFileHandle(suggestedName, { create: true });
    };"""
    with opened_page(chromium, site, script=script) as page:
        path = write("zip")
        page.drop(path)
        page.prepare(to="cuda:0")
        page.page.locator("#save").click()
        page.page.wait_for_selector("#saved:has-text('asks where')")
        path.write_bytes(bytes(path.stat().st_size))
        page.page.evaluate("go()")
        page.page.wait_for_selector("#error:visible")
        assert "changed" in page.text("error") and page.text("saved") == ""
        size = "navigator.storage.getDirectory().then((d) => d.getFileHandle('zip-new.pt'))"
        assert page.page.evaluate(f"{size}.then((h) => h.getFile()).then((f) => f.size)") == 0


def test_no_request_after_the_page_is_loaded(chromium: Any, site: Site) -> None:
    """After the page is loaded, reading, showing, planning and saving send no request. Planted requests are blocked."""
    with opened_page(chromium, site) as page, served(Path()) as other:
        page.choose(write("zip"))
        assert "Nothing is uploaded: the browser forbids it" in page.text("promise")
        asked: list[str] = []
        page.page.context.on("request", lambda request: asked.append(request.url))
        before = len(site.asked)
        page.choose(write("training"))
        page.prepare(to="cuda:0", suffix=".safetensors")
        page.save()
        assert {*site.asked[before:]} <= {"/sw.js"}  # the browser checks whether that file has changed
        assert [url for url in asked if not url.startswith(("blob:", "about:"))] == []
        assert page.said == []
        for target in (other.url, site.url + "index.html?data", "data:,"):
            planted = f"fetch('{target}', {{method: 'GET'}}).then(() => 'sent', () => 'blocked')"
            assert page.page.workers[0].evaluate(planted) == "blocked"
            assert page.page.evaluate(planted) == "blocked"
        assert page.page.evaluate(f"fetch('{site.url}page.css', {{method: 'POST', body: 'x'}}).catch(() => 0)") == 0
        assert other.asked == [] and {*site.asked[before:]} <= {"/sw.js"}


def test_it_works_offline(chromium: Any, site: Site) -> None:
    """From the second visit on, the page works without its host."""
    with opened_page(chromium, site) as page:
        page.choose(write("zip"))
        page.page.context.set_offline(True)
        before = len(site.asked)
        page.page.reload()
        page.choose(write("legacy"))
        page.prepare(to="cuda:0")
        saved = page.save()
        assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0
        assert sum_of(saved) == sum_of(Path("legacy-new.pt"))
        assert {*site.asked[before:]} <= {"/sw.js"}  # browsers request it again, here without success


def test_python_is_started_once(chromium: Any, site: Site) -> None:
    """Python is started only once, even if keyboard, pointer and file request it while it loads."""
    script = """globalThis.started = 0;
        globalThis.Worker = class extends Worker { constructor(...given) { super(...given); started++; } };"""
    with opened_page(chromium, site, script=script) as page:
        page.page.locator("#choose").focus()
        page.page.locator("#drop").hover()
        page.choose(write("zip"))
        assert not page.shows("error") and page.page.evaluate("started") == 1


def test_a_worker_that_hangs_is_ended(chromium: Any, site: Site) -> None:
    """A worker that hangs is ended after a deadline, which the test shortens. The page stays, and another worker reads
    the next file.
    """
    script = """const after = setTimeout, send = Worker.prototype.postMessage;
        setTimeout = (run, ms) => after(run, ms === 60000 && globalThis.hangs ? 1000 : ms);
        Worker.prototype.postMessage = function (said) { if (!globalThis.hangs) send.call(this, said); };"""
    with opened_page(chromium, site, script=script) as page:
        page.choose(write("zip"))
        page.page.evaluate("globalThis.hangs = true")
        page.choose(write("legacy"))
        assert "so this was stopped" in page.text("error")
        page.page.evaluate("globalThis.hangs = false")
        page.choose(write("legacy"))
        assert not page.shows("error") and page.text("name") == "legacy.pt"
        page.page.evaluate("globalThis.hangs = true")
        page.prepare(to="cuda:0")
        assert "so this was stopped" in page.text("error")
        page.page.evaluate("globalThis.hangs = false")
        page.prepare(to="cuda:0")
        assert not page.shows("error") and page.shows("planned")


def test_output_is_streamed_to_a_file(chromium: Any, site: Site) -> None:
    """If the browser provides a file, the output is streamed to it. Here it is in the file system of the page."""
    script = """globalThis.showSaveFilePicker = async ({ suggestedName }) =>
        (await navigator.storage.getDirectory()).getFileHandle(suggestedName, { create: true });"""
    with opened_page(chromium, site, script=script) as page:
        page.choose(write("zip"))
        page.prepare(to="cuda:0")
        page.page.locator("#save").click()
        page.page.wait_for_selector("#saved:has-text('did not change')")
        saved = page.page.evaluate("""async () => {
            const file = await (await (await navigator.storage.getDirectory()).getFileHandle("zip-new.pt")).getFile();
            const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
            return [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("");
        }""")
        assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0 and saved == sum_of(Path("zip-new.pt"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_everybody_can_use_it(width: int, scheme: str, chromium: Any, site: Site, tmp_path: Path) -> None:
    """axe-core finds no violations, and nothing is wider than the window, before and after a file is chosen."""
    axe = axe_source(tmp_path)
    with opened_page(chromium, site, width=width, scheme=scheme) as page:
        page.page.evaluate(axe)
        for step in range(3):
            if step == 1:
                page.choose(write("training"))
            elif step == 2:
                page.prepare(to="cuda:0")
            assert page.shows("errors") == (step == 0)  # the list of errors is shown until a file is chosen
            run = "axe.run({iframes: false}).then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))"
            found = page.page.evaluate(run)
            assert found == []
            assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_by_keyboard(page: Page) -> None:
    """The keyboard leads from the chooser to a fix and to the saved copy."""
    torch.save(state(), "ddp.pt")
    page.choose(Path("ddp.pt"))
    page.page.locator("#choose").focus()
    for _ in range(2):
        page.page.keyboard.press("Tab")
    assert page.page.evaluate("document.activeElement.textContent") == "Mend this"
    page.press("#findings button >> nth=0", "Enter")
    assert page.page.evaluate("document.activeElement.id") == "save"
    with page.page.expect_download():
        page.page.keyboard.press("Enter")
