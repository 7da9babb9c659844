"""The time of conversions in the web page, compared with the command line: ``python benchmarks/web.py``.

Chromium, node, npm and playwright are required. The page is built, served on the loopback interface and opened in
headless Chromium. Each run has a new profile. The output is Markdown: medians, with the minimum and the maximum in
parentheses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.browser import browser
from tests.support.web_page import Page, Site, built, opened_page, served

#: The number of tensors, and of float32 elements in each of them.
FILES = {"3 MB, 75 tensors": (75, 10_000), "1 GiB, 64 tensors": (64, 2**22), "5 MB, 20,000 tensors": (20_000, 1)}
#: Runs an expression. Returns the milliseconds until the status of the page begins with the given text.
TIMED = """(done) => new Promise((resolve) => {
  const state = document.getElementById("state"), began = performance.now();
  const look = () => {
    if (state.textContent.startsWith(done)) resolve(performance.now() - began);
    else requestAnimationFrame(look);
  };
  state.textContent = "";
  %s;
  look();
})"""
START = TIMED % 'document.getElementById("choose").focus()'
PLAN = TIMED % 'document.querySelector("[name=to]").value = "cuda:1"; document.getElementById("prepare").click()'
#: Measures the milliseconds from the choice of a file until the page shows the file.
WATCH = """() => {
  const state = document.getElementById("state");
  document.getElementById("choose").addEventListener("change", () => {
    const began = performance.now();
    new MutationObserver((_, observer) => {
      if (!state.textContent.startsWith("Ready")) return;
      globalThis.shown = performance.now() - began;
      observer.disconnect();
    }).observe(state, { childList: true });
  }, { capture: true });
}"""


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each (default: 5)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="ckptconv-web-") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        with served(built(folder / "site")) as site, browser() as chromium:
            load = f"a load of {os.getloadavg()[0]:.1f} before"
            print(f"Chromium {chromium.version}, {os.cpu_count()} cores, {runs} runs, {load}\n", flush=True)
            cold, warm = zip(*(started(chromium, site) for _ in range(runs)), strict=True)
            print(f"Python is loaded: {said(cold)}; from the last visit: {said(warm)}\n")
            print("| file | page: chosen → shown | `inspect` | page: asked → ready to save | `convert --dry-run` |")
            print("| --- | --- | --- | --- | --- |")
            for what, (tensors, elements) in FILES.items():
                path = folder / "src.pt"
                torch.save({f"layers.{i}.weight": torch.zeros(elements) for i in range(tensors)}, path)
                shown, planned = zip(*(used(chromium, site, path) for _ in range(runs)), strict=True)
                inspected = [typed("inspect", path) for _ in range(runs)]
                dry = ["convert", path, folder / "dst.pt", "--to", "cuda:1", "--dry-run"]
                converted = [typed(*dry) for _ in range(runs)]
                print(f"| {what} |", " | ".join(map(said, (shown, inspected, planned, converted))), "|", flush=True)


def started(chromium: Any, site: Site) -> tuple[float, float]:
    """Return the seconds until Python is loaded, for the first visit and for the second visit."""
    with opened_page(chromium, site) as opened:
        first = opened.page.evaluate(START, "Python is loaded.")
        opened.page.reload()
        return first / 1000, opened.page.evaluate(START, "Python is loaded.") / 1000


def used(chromium: Any, site: Site, path: Path) -> tuple[float, float]:
    """Return the seconds until the file at `path` is shown, and until a copy for another device can be saved.

    Python is already loaded when the measurement starts.
    """
    with opened_page(chromium, site) as opened:
        opened.page.evaluate(START, "Python is loaded.")
        opened.page.evaluate(WATCH)
        opened.choose(path)
        check(opened)
        planned = opened.page.evaluate(PLAN, "Ready")
        check(opened)
        return opened.page.evaluate("shown") / 1000, planned / 1000


def check(opened: Page) -> None:
    """Exit with the error message if the page shows an error."""
    if opened.shows("error"):
        sys.exit(opened.text("error"))


def typed(*words: object) -> float:
    """Return the seconds of the command line `words`."""
    command = [sys.executable, "-m", "ckptconv", *map(str, words)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def said(times: Any) -> str:
    """Return the median, the minimum and the maximum of `times` as a text."""
    return f"{median(times):.2f} s ({min(times):.2f}–{max(times):.2f})"


if __name__ == "__main__":
    main()
