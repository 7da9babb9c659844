"""Tests that take minutes, or need root, strace or a trainer. Only ``.ci/long`` collects them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("HYPOTHESIS_PROFILE") == "long" else ["*.py"]
