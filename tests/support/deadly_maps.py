"""Mappings of devices that end, or keep, the process which asks them.

A module of its own: processes that import it need nothing else.
"""

import os
import signal
import time


def die(tag: str) -> str:
    """Never give `tag` back."""
    os.kill(os.getpid(), signal.SIGKILL)
    return tag


def stall(tag: str) -> str:
    """Give `tag` back, much later."""
    time.sleep(60)
    return tag
