"""Draw ``inspect.svg``, the output of ``ckptconv inspect`` for a checkpoint of a DataParallel run on a GPU.

``python docs/make_picture.py [OUT]``
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from ckptconv.byteranges.sources import Source
from ckptconv.formats import opening
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.inspection.summary import summarize
from ckptconv.render.summary import summary_lines
from ckptconv.render.text import Style

COLUMNS = 80
#: The frame of rich, without the font that a browser would load from the network.
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "Fira Code", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width)})
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Model(nn.Module):
    """A language model."""

    def __init__(self, width: int = 64, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1000, bias=False)


def checkpoint() -> dict[str, object]:
    """Return the object that the training script saves."""
    model = nn.DataParallel(Model())
    return {"model": model.state_dict(), "epoch": 3}


def drawn() -> list[str]:
    """Return the lines that a terminal of a machine without a GPU shows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "gpt.pt")
        with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
            torch.save(checkpoint(), path)
        with Source(path) as source:
            source.path = Path("gpt.pt")
            summary = summarize(opening.read(source), Host(cuda=0, mps=False))
    look = Style(width=COLUMNS, colour=True, unicode=True)
    return ["\x1b[1m$ ckptconv inspect gpt.pt\x1b[0m", *summary_lines(summary, look)]


def picture() -> str:
    """Return the SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(width=COLUMNS, record=True, file=nowhere, force_terminal=True, color_system="standard")
        for line in drawn():
            console.print(Text.from_ansi(line), no_wrap=True, crop=False)
        return console.export_svg(title="", code_format=FRAME, unique_id="inspect")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("inspect.svg")).write_text(picture())
