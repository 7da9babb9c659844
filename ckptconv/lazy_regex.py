"""Regular expressions that are compiled when they are first used: most commands need few of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    regex = re.compile
else:

    class regex:
        """What ``re.compile`` returns, later."""

        def __init__(self, pattern, flags=0):
            self._arguments = pattern, flags

        def __getattr__(self, name):
            found = getattr(re.compile(*self._arguments), name)
            setattr(self, name, found)
            return found
