"""Draw ``difference.jpg``, a screenshot of the page that compares two epochs of a language model.

``python -m docs.make_page_picture [OUT]``. This needs playwright and Chromium.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from ckptconv.cli.main import main
from docs.make_picture import Model

SIZE = {"width": 1100, "height": 840}


def save_epochs(folder: Path) -> None:
    """Save two epochs to `folder`. In the second, one layer is unchanged, one is in half precision and one has
    a NaN.
    """
    torch.manual_seed(0)
    model = Model(width=128, layers=6).state_dict()
    torch.save(model, folder / "epoch1.pt")
    for i, (name, tensor) in enumerate(model.items()):
        if "layers.2." not in name:
            tensor += torch.randn_like(tensor) * 10.0 ** -(1 + i % 5)
    model["layers.4.mlp.0.weight"][0, 0] = float("nan")
    model["layers.5.mlp.0.weight"] = model["layers.5.mlp.0.weight"].half()
    torch.save(model, folder / "epoch2.pt")


def picture(out: Path) -> None:
    """Write the picture to `out`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        os.chdir(folder)  # the page shows the paths; relative ones are short
        save_epochs(Path())
        main(["diff", "epoch1.pt", "epoch2.pt", "--html", "page.html"])
        os.chdir(before)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(Path(folder, "page.html").as_uri())
        page.select_option("#colour", "largest difference")
        page.locator("#facts button", has_text="layers.4.mlp.0.weight").first.click()
        page.screenshot(path=out, type="jpeg", quality=45)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("difference.jpg")).absolute())
