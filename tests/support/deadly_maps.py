"""Device mappings that kill, delay, interrupt or describe the process that calls them.

The functions have a module of their own, so that a process that imports it needs nothing else.
"""

import os
import signal
import sys
import time


def die(tag: str) -> str:
    """Kill this process before `tag` is returned."""
    os.kill(os.getpid(), signal.SIGKILL)
    return tag


def stall(tag: str) -> str:
    """Return `tag` after 60 seconds."""
    time.sleep(60)
    return tag


def interrupt(tag: str) -> str:
    """Send SIGINT, the signal of Ctrl-C, to this process."""
    os.kill(os.getpid(), signal.SIGINT)
    return tag


def list_modules(tag: str) -> str:
    """Print the names of all modules that this process has imported."""
    print(*sys.modules, flush=True)
    return tag
