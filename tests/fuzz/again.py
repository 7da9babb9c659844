"""One input through its target again: ``python -m tests.fuzz.again PATH``.

The file's name begins with that of the target, as ``.ci/fuzz`` names what it finds. Needs no atheris.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.fuzz import targets

__all__ = ["target_of"]


def target_of(path: Path) -> str:
    """The target that the file at `path` is for."""
    return path.name.split("-")[0]


def main() -> None:
    """Raise what the target raises."""
    path = Path(sys.argv[1])
    sys.setrecursionlimit(10_000)
    with tempfile.TemporaryDirectory() as folder:
        read = targets.run(target_of(path), path.read_bytes(), Path(folder))
    print("read" if read else "refused, as it should be")


if __name__ == "__main__":
    main()
