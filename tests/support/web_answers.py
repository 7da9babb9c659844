"""The answers of the page for files, and the hashes of its copies, as JSON. They are the same in the page's Python and
in this one.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

#: Packages that the page does not contain.
NOT_THERE = ("torch", "numpy", "safetensors", "huggingface_hub")
FORMATS = ("pt", "safetensors")


def main(words: list[str]) -> dict[str, Any]:
    """Return the answers for each file and folder in the folder ``words[0]``: an inspection and two copies."""
    from ckptconv.limits import lower
    from web.bridge import Bridge, error_text

    lower(nesting=400)
    os.chdir(words[0])
    bridge = Bridge(words[0])

    def said(call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:
            return error_text(error)

    def copy(path: str, name: str) -> Any:
        bridge.path = path
        plan = bridge.plan(name, {"map_location": ["cpu"]})
        return plan, [_sum(bridge, number) for number in range(len(bridge.planned))]

    paths = sorted(map(str, Path().rglob("*")))
    return {path: [said(bridge.inspect, path), *(said(copy, path, f"x.{to}") for to in FORMATS)] for path in paths}


class Missing(importlib.abc.MetaPathFinder):
    """A finder that reports some packages as not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError for the packages in NOT_THERE, and return None for all others."""
        if name.partition(".")[0] in NOT_THERE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _sum(bridge: Any, number: int) -> str:
    found = hashlib.sha256()
    for part in bridge.parts(number, lambda nbytes: None):
        data = part
        if not isinstance(part, bytes):
            path, offset, length = part
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(length)
        found.update(data)
    return found.hexdigest()


if __name__ == "__main__":
    sys.meta_path.insert(0, Missing())
    sys.platform = "emscripten"
    print(json.dumps(main(sys.argv[1:])))
