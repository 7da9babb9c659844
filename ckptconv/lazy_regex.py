"""Regular expressions that are compiled at their first use, because a command uses only few of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    regex = re.compile
else:

    class regex:
        """A pattern with the interface of ``re.Pattern``, compiled when its first attribute is read."""

        def __init__(self, pattern, flags=0):
            self._arguments = pattern, flags

        def __getattr__(self, name):
            value = getattr(re.compile(*self._arguments), name)
            setattr(self, name, value)
            return value
