"""A pytest plugin for Python in a browser. A test that uses something that no browser has is skipped, with the
reason.
"""

from __future__ import annotations

import collections
import sys
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest

from ckptconv.limits import lower
from tests.support.absent import Absent, uses
from tests.support.paths import ROOT
from web.build import NOT_HERE

__all__ = ["main"]

found: collections.Counter[str] = collections.Counter()
"""The number of tests with each outcome, and the number of files that could not be read."""

#: Packages that tests import and that are missing.
PACKAGES = ("torch", "numpy", "safetensors", "huggingface_hub")
#: For each missing thing: the type of the error if it is used, and a part of the message.
ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "processes": (OSError, "emscripten does not support processes"),
    "threads": (RuntimeError, "can't start new thread"),
    "a terminal": (OSError, "out of pty devices"),
    "Unix": (AttributeError, "module '"),
    "a module": (ModuleNotFoundError, "No module named"),
    "an archive that torch writes": (zipfile.BadZipFile, "File is not a zip file"),
}
#: Test files that used a missing package during their import. Their tables contain stand-ins.
FILES: set[Path] = set()
#: Modules that the page does not contain, and the modules that write files, which it does not use.
ELSEWHERE = tuple(f"{ROOT}/ckptconv/{name}" for name in (*NOT_HERE.split(), "output"))

for _name in PACKAGES:
    sys.meta_path.insert(0, Absent(_name))


def main(words: list[str]) -> dict[str, int]:
    """Run the tests that `words` select, with the limits of a browser. Return the number of tests by outcome, and
    pytest's exit status.
    """
    lower(nesting=400)
    usual = ["-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", "--continue-on-collection-errors"]
    usual += ["--import-mode=importlib", "--basetemp=/tmp/tests"]
    return {"status": pytest.main([*words, *usual], plugins=[sys.modules[__name__]]), **found}


def _wait(self: threading.Condition, timeout: float | None = None) -> bool:
    raise RuntimeError("can't start new thread: nobody ends this wait")


threading.Condition.wait = _wait  # type: ignore[method-assign]  # the wait would never end


def lacks(error: BaseException | None) -> str | None:
    """Return the reason if `error` comes from something that a browser or the page lacks, and None otherwise."""
    if error is None:
        return None
    if "_Needed" in str(error):
        return f"needs a package: {error}"
    for what, (kind, text) in ERRORS.items():
        if isinstance(error, kind) and text in str(error) and not _in_the_page(error):
            return f"needs {what}: {error}"
    return lacks(error.__cause__ or error.__context__)


def _in_the_page(error: BaseException) -> bool:
    """Return whether the last line of the project that led to `error` is part of the page."""
    trace, ours = error.__traceback__, ""
    while trace:
        path = trace.tb_frame.f_code.co_filename
        ours = path if path.startswith(f"{ROOT}/") else ours
        trace = trace.tb_next
    return ours.startswith(f"{ROOT}/ckptconv/") and not ours.startswith(ELSEWHERE)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the tests of modules that the page does not contain."""
    module = str(collection_path).replace("/tests/unit/", "/ckptconv/").replace("/test_", "/")
    return module.startswith(ELSEWHERE) or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    before = len(uses)
    report = yield
    if isinstance(collector, pytest.Module) and len(uses) > before:
        FILES.add(collector.path)
        if report.failed:
            why = f"needs {uses[before]} when it is read"
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, why)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = report.failed and call.excinfo and lacks(call.excinfo.value)
    if report.failed and item.path in FILES:
        why = why or "needs a package when its file is read"
    if why:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, why)
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        found[report.outcome] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        found[f"files {report.outcome}"] += 1
