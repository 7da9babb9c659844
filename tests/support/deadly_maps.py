"""Mappings of devices that end, keep or describe the process which asks them.

A module of its own: processes that import it need nothing else.
"""

import os
import signal
import sys
import time


def die(tag: str) -> str:
    """Never give `tag` back."""
    os.kill(os.getpid(), signal.SIGKILL)
    return tag


def stall(tag: str) -> str:
    """Give `tag` back, much later."""
    time.sleep(60)
    return tag


def interrupt(tag: str) -> str:
    """Send this process what Ctrl-C sends."""
    os.kill(os.getpid(), signal.SIGINT)
    return tag


def list_modules(tag: str) -> str:
    """Print the names of all modules that this process has imported."""
    print(*sys.modules, flush=True)
    return tag
