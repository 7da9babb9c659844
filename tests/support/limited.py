"""``ckptconv`` in a separate process that cannot write large files. The limit of the process that runs the tests does
not change.
"""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["ckptconv_with_small_files"]

_PROGRAM = """
import resource, sys
from ckptconv.cli.main import main
nbytes = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
sys.exit(main(sys.argv[2:]))
"""


def ckptconv_with_small_files(nbytes: int, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``ckptconv`` with `words`, and capture stdout and stderr. Writing a file larger than `nbytes` fails with
    EFBIG in the process.
    """
    command = [sys.executable, "-c", _PROGRAM, str(nbytes), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
