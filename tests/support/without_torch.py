"""A pytest plugin for an environment without torch. A test is skipped if it uses a package that is not installed.

The conftest registers the plugin. ``.ci/light`` creates such an environment.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptconv.errors import MissingTorchError
from tests.support.absent import Absent, uses

__all__ = ["WithoutTorch"]

#: Packages that tests import and that may be missing.
PACKAGES = (
    "torch", "numpy", "safetensors", "huggingface_hub", "transformers", "urllib3", "botocore", "fsspec", "zlib_ng",
)  # fmt: skip


class WithoutTorch:
    """A plugin that replaces missing packages with modules that cannot be used, and skips the tests that use them."""

    def __init__(self) -> None:
        self.files: set[Path] = set()  # files that used such a package during their import
        missing = [name for name in PACKAGES if not find_spec(name)]
        sys.meta_path += [Absent(name) for name in missing]  # last, so that modules that tests insert come first

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Skip a file that cannot be imported without such a package."""
        before = len(uses)
        report = yield
        if isinstance(collector, pytest.Module) and len(uses) > before:
            self.files.add(collector.path)
            if report.failed:
                why = f"needs {uses[before]} when it is read"
                report.outcome, report.longrepr = "skipped", (str(collector.path), 0, why)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a test that used such a package, in this process or in another one."""
        report = yield
        if report.failed and call.excinfo:
            why = _lacks(call.excinfo.value)
            if item.path in self.files:
                why = why or "needs a package when its file is read"
            if why:
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, why)
        return report


def _lacks(error: BaseException | None) -> str | None:
    """Return the reason for skipping if `error` reports a missing package, and None otherwise."""
    if error is None:
        return None
    text = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        text += str(error.stderr)
    if isinstance(error, MissingTorchError) or "_Needed" in text or "No module named " in text:
        return f"needs a package: {text[-300:]}"
    return _lacks(error.__cause__ or error.__context__)
