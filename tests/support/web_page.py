"""The page that converts in the browser: built once, served by a local server, and used in headless browsers."""

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

#: The timeout of each step in milliseconds, which is long enough for a busy machine.
PATIENCE = 60_000
_DRIVER = "puppeteer-core@24.43.1"
_PROGRAMS = {
    "chrome": ("chromium", "chromium-browser", "google-chrome"),
    "firefox": ("firefox-esr", "firefox"),
}


class Site:
    """A served page: its URL, and the paths that browsers have requested."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[str] = []


def built(folder: Path) -> Path:
    """Build the page in `folder`, and return `folder`. Skip the test if the page cannot be built."""
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
    """Serve `folder` at a local URL, and yield the site."""

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
    """The page as a person uses it. ``said`` contains its messages on the console."""

    def __init__(self, page: Any) -> None:
        from playwright.sync_api import expect  # type: ignore[import-not-found,unused-ignore]

        self.page, self._expect = page, expect
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.set_default_timeout(PATIENCE)

    def text(self, name: str) -> str:
        """Return the text of the element with the id `name`."""
        found: str = self.page.locator(f"#{name}").text_content()
        return found

    def shows(self, name: str) -> bool:
        """Return whether the element with the id `name` is visible."""
        found: bool = self.page.locator(f"#{name}").is_visible()
        return found

    def settle(self) -> None:
        """Wait until the page is ready again."""
        self._expect(self.page.locator("#state")).to_have_text(re.compile("^(Ready|Choose another)"), timeout=PATIENCE)

    def _begin(self) -> None:
        """Replace the state of the page, so that :meth:`settle` waits for a new one."""
        self.page.locator("#state").evaluate("(state) => { state.textContent = 'waiting'; }")

    def press(self, button: str, key: str = "") -> None:
        """Press `button` with a `key` or the mouse, and wait until the page is ready again."""
        self._begin()
        if key:
            self.page.locator(button).press(key)
        else:
            self.page.locator(button).click()
        self.settle()

    def choose(self, *paths: Path) -> None:
        """Choose the files at `paths`, and wait until the page shows them or an error."""
        self._begin()
        self.page.set_input_files("#choose", [*map(str, paths)])
        self.settle()

    def drop(self, *paths: Path) -> None:
        """Drop the files or folders at `paths` on the page, and wait until the page shows them or an error."""
        self._begin()
        session = self.page.context.new_cdp_session(self.page)
        files = {"items": [], "files": [str(path.resolve()) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": 200, "y": 200, "data": files})
        self.settle()

    def prepare(self, **fields: str | bool) -> None:
        """Fill in the form, and let the page plan the copy."""
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
        """Press `button`, and return the path of the file that the browser downloads."""
        with self.page.expect_download(timeout=patience) as download:
            self.page.locator(button).click()
        return Path(download.value.path())


def program_of(kind: str) -> str:
    """Return the program of the browser `kind`, "chrome" or "firefox". Skip the test if it, npm or node is missing."""
    found = next(filter(None, map(shutil.which, _PROGRAMS[kind])), None)
    if found is None or not (shutil.which("npm") and shutil.which("node")):
        pytest.skip(f"needs npm, node and one of {', '.join(_PROGRAMS[kind])}")
    return found


def used_in(kind: str, site: Site, jobs: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the results of `jobs`, done with the page in the browser `kind`. Skip the test if the driver is
    missing.
    """
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
    """Open the page in a new profile in which it saves by downloading, and yield it. `script` runs before the scripts
    of the page.
    """
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.add_init_script("delete globalThis.showSaveFilePicker; delete globalThis.showDirectoryPicker;" + script)
    opened = Page(page)
    try:
        page.goto(site.url)
        yield opened
    finally:
        context.close()
