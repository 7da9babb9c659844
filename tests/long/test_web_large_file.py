"""The page that converts in the browser, with a file of 5 GiB, in a separate Chromium whose memory can be measured."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from ckptconv.cli.main import main
from tests.long.test_web import here, site, sum_of  # noqa: F401  # fixtures
from tests.support.browser import browser
from tests.support.web_page import Site, opened_page


def test_five_gibibytes(site: Site) -> None:  # noqa: F811 - the fixture
    """The page reads at most 300 kB of a file with 5 GiB of tensors to show it and to plan the copy. The memory of the
    page stays small, and the copy equals the output of the command.
    """
    with torch.serialization.skip_data():
        torch.save({f"layers.{i}.weight": torch.empty(32 << 20, 4) for i in range(10)}, "large.pt")
    with browser() as chromium, opened_page(chromium, site) as page:
        page.choose(Path("large.pt"))
        page.prepare(to="cuda:0")
        assert page.text("save") == "Save large-new.pt, 5.37 GB" and "need not be read" in page.text("reads")
        assert int(page.page.locator("#file").get_attribute("data-nread")) <= 300_000
        assert largest_renderer(chromium) <= 350_000_000
        saved = page.save(patience=600_000)
        assert largest_renderer(chromium) <= 350_000_000
        assert main([*shlex.split(page.text("command"))[1:], "-q"]) == 0
        assert sum_of(saved) == sum_of(Path("large-new.pt"))
    Path("large-new.pt").unlink()


def largest_renderer(chromium: Any) -> int:
    """Return the peak memory in bytes of the largest renderer process of `chromium`."""
    said = chromium.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    found = []
    for pid in (each["id"] for each in said if each["type"] == "renderer"):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found.append(int(status["VmHWM"].split()[0]) * 1024)
    return max(found)
