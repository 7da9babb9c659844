"""The page that converts in the browser: built once, served here, driven in headless browsers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Page", "Site", "built", "opened_page", "program_of", "served", "used_in"]

#: Milliseconds in which anything of these tests is done, on a busy machine too.
PATIENCE = 60_000
_DRIVER = "puppeteer-core@24.43.1"
_PROGRAMS = {
    "chrome": ("chromium", "chromium-browser", "google-chrome"),
    "firefox": ("firefox-esr", "firefox"),
}


class Site:
    """What is served: its URL, and the paths that were asked for since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []


def built(folder: Path) -> Path:
    """The page, built in `folder`; skips where that cannot be."""
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} to build the page with")
    from web.build import build

    try:
        build(folder)
    except subprocess.CalledProcessError as error:
        if "npm" not in error.cmd:
            raise
        pytest.skip("npm could not get Pyodide")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[Site]:
    """`folder`, at a URL of this machine."""

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            site.asked.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    site = Site(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Page:
    """The page as a person uses it. Whatever it says on the console stands in ``said``."""

    def __init__(self, page: Any) -> None:
        from playwright.sync_api import expect  # type: ignore[import-not-found,unused-ignore]

        self.page, self._expect = page, expect
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.set_default_timeout(PATIENCE)

    def text(self, name: str) -> str:
        """What the element with this id says."""
        found: str = self.page.locator(f"#{name}").text_content()
        return found

    def shows(self, name: str) -> bool:
        """Whether the element with this id is visible."""
        found: bool = self.page.locator(f"#{name}").is_visible()
        return found

    def settle(self) -> None:
        """Wait until it is done."""
        self._expect(self.page.locator("#state")).to_have_text(re.compile("^(Ready|Choose another)"), timeout=PATIENCE)

    def _begin(self) -> None:
        """Forget that it was done."""
        self.page.locator("#state").evaluate("(state) => { state.textContent = 'waiting'; }")

    def press(self, button: str, key: str = "") -> None:
        """Press a button, with a `key` or the mouse, and wait until that is done."""
        self._begin()
        if key:
            self.page.locator(button).press(key)
        else:
            self.page.locator(button).click()
        self.settle()

    def choose(self, *paths: Path) -> None:
        """Choose files, and wait until they are shown, or what is wrong with them."""
        self._begin()
        self.page.set_input_files("#choose", [*map(str, paths)])
        self.settle()

    def drop(self, *paths: Path) -> None:
        """Drop files or folders on the page, and wait until they are shown, or what is wrong with them."""
        self._begin()
        session = self.page.context.new_cdp_session(self.page)
        files = {"items": [], "files": [str(path.resolve()) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": files})
        self.settle()

    def prepare(self, **fields: str | bool) -> None:
        """Fill in the form, and have the copy planned."""
        self.page.locator("#more").evaluate("(more) => { more.open = true; }")
        for name, value in fields.items():
            field = self.page.locator(f"#edits [name={name}]")
            if value is True:
                field.check()
            elif name == "suffix":
                field.select_option(value)
            else:
                field.fill(value)
        self.press("#prepare")

    def save(self, button: str = "#save", patience: int = PATIENCE) -> Path:
        """What the browser downloads."""
        with self.page.expect_download(timeout=patience) as download:
            self.page.locator(button).click()
        return Path(download.value.path())


def program_of(kind: str) -> str:
    """The program of a `kind` of browser, "chrome" or "firefox"; skips where there is none, or no npm and node."""
    found = next(filter(None, map(shutil.which, _PROGRAMS[kind])), None)
    if found is None or not (shutil.which("npm") and shutil.which("node")):
        pytest.skip(f"needs npm, node and one of {', '.join(_PROGRAMS[kind])}")
    return found


def used_in(kind: str, site: Site, jobs: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What comes of `jobs` where the page is used in a `kind` of browser; skips where nothing drives it."""
    program = program_of(kind)
    folder.mkdir()
    got = subprocess.run(["npm", "install", _DRIVER], cwd=folder, capture_output=True, timeout=120, check=False)
    if got.returncode:
        pytest.skip("npm could not get what drives browsers")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("web_driver.mjs")
    typed = ["node", str(script), kind, program, site.url, "jobs.json"]
    done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def opened_page(
    browser: Any, site: Site, *, width: int = 1280, scheme: str = "light", script: str = ""
) -> Iterator[Page]:
    """The page in a profile of its own, which saves by downloading; `script` runs before those of the page."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.add_init_script("delete globalThis.showSaveFilePicker; delete globalThis.showDirectoryPicker;" + script)
    opened = Page(page)
    try:
        page.goto(site.url)
        yield opened
    finally:
        context.close()
