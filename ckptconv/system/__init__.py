"""The differences between operating systems. No other package checks on which system it runs.

`calls` is the module for this system. The modules for all systems have the same functions.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    from ckptconv.system import windows as _calls
else:
    from ckptconv.system import posix as _calls

calls = _calls
