"""Headless Chromium for tests of pages, with checks of the console and of requests. Tests are skipped if Chromium,
playwright or npm is missing.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["axe_source", "browser", "opened"]

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # a table  # fmt: skip
_AXE = "axe-core@4.14.1"
_AXE_INTEGRITY = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


@contextmanager
def browser() -> Iterator[Any]:
    """Yield the Chromium of the system, driven by playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=_FLAGS)
        try:
            yield started
        finally:
            started.close()


def axe_source(folder: Path) -> str:
    """Download axe-core to `folder` and return its script, which checks the accessibility of pages."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to get axe-core with")
    done = subprocess.run(["npm", "pack", _AXE], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("npm could not get axe-core")
    (archive,) = folder.glob("*.tgz")
    assert base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == _AXE_INTEGRITY
    with tarfile.open(archive) as opened:
        file = opened.extractfile("package/axe.min.js")
        assert file
        return file.read().decode()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1280, scheme: str = "light", frame: str = "") -> Iterator[Any]:
    """Yield the page at `path` in Chromium. Fail if the page writes to the console or sends requests, except for the
    page of a `frame`.
    """
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.on("dialog", lambda dialog: said.append(dialog.message))  # a dialog waits for an answer, so the test fails
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("#rows tr", state="attached")
        yield page
        assert said == [path.as_uri()] or (frame and said == [path.as_uri(), f"about:{frame}"])
    finally:
        context.close()
