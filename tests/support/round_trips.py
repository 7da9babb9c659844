"""An object saved with location tags, converted, and loaded again."""

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
    """`obj` saved with `tags` as ``src.pt`` in `folder`, converted with `options` to `dst` there, and loaded again.

    It comes back on the CPU, whatever its tags say. Also the report. An old file of either name is replaced.
    """
    zoo.save(obj, folder / "src.pt", tags)
    target = folder / dst
    report = convert(folder / "src.pt", target, force=True, **options)
    found = load_file(target) if dst.endswith(".safetensors") else tags_of(target, weights_only=weights_only)[0]
    return found, report
