"""A function that saves an object with location tags, converts it, and loads it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ckptconv import Report, convert
from tests.support import zoo
from tests.support.judge import tags_of

__all__ = ["round_trip"]


def round_trip(
    folder: Path,
    obj: Any,
    dst: str = "dst.pt",
    *,
    tags: Sequence[str] = ("cpu",),
    weights_only: bool = False,
    **options: Any,
) -> tuple[Any, Report]:
    """Save `obj` with `tags` as ``src.pt`` in `folder`, convert it with `options` to `dst`, and load the output.

    Return the loaded object and the report. The object is loaded on the CPU, regardless of its tags. Existing files
    with these names are replaced.
    """
    zoo.save(obj, folder / "src.pt", tags)
    target = folder / dst
    report = convert(folder / "src.pt", target, force=True, **options)
    found = load_file(target) if dst.endswith(".safetensors") else tags_of(target, weights_only=weights_only)[0]
    return found, report
