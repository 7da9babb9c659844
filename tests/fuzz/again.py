"""Run a stored input through its target again: ``python -m tests.fuzz.again PATH``.

The name of the file begins with the name of the target, as in the findings of ``.ci/fuzz``. atheris is not needed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.fuzz import targets

__all__ = ["target_of"]


def target_of(path: Path) -> str:
    """Return the target of the file at `path`."""
    return path.name.split("-")[0]


def main() -> None:
    """Run the input. The exception of the target is not caught."""
    path = Path(sys.argv[1])
    sys.setrecursionlimit(10_000)
    with tempfile.TemporaryDirectory() as folder:
        read = targets.run(target_of(path), path.read_bytes(), Path(folder))
    print("read" if read else "refused, as it should be")


if __name__ == "__main__":
    main()
