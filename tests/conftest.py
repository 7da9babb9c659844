"""The fixtures and hooks of all tests. The environment variable CKPTCONV_CORPUS contains the folder of the corpus.

HYPOTHESIS_PROFILE selects the amount of work. With ``quick``, the default, generated tests have few examples, and a run
of all tests leaves out the slow ones. ``gate`` also runs the slow tests. With ``long``, generated tests have many
examples, and tests/long is collected.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ckptconv.hints import Message
from ckptconv.result import Result
from tests.support.command import Command
from tests.support.paths import FIXTURES, SUPPORT, TESTS
from tests.support.schemas import check

HAS_TORCH = bool(find_spec("torch"))
if not HAS_TORCH:
    from tests.support.without_torch import WithoutTorch

    _without_torch = WithoutTorch()  # before test files are imported

    def pytest_configure(config: pytest.Config) -> None:
        """Skip tests that need torch if torch is not installed."""
        config.pluginmanager.register(_without_torch)


for _profile, _examples in (("quick", 20), ("gate", 40)):
    settings.register_profile(
        _profile, max_examples=_examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
settings.register_profile("long", max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
settings.load_profile(PROFILE)
_MOST_PROCESSES = 8

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell without job control starts background commands with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _keeping_parts(method: Any) -> Any:
    """Return `method` of a message, which turns the message into plain text, with a check of the caller.

    Within ckptconv, only the command line and the renderers may call it.
    """

    def called(self: Message, *args: object) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        prints = caller.startswith(("ckptconv.cli", "ckptconv.render"))
        assert prints or not caller.startswith("ckptconv."), "a message loses its parts"
        return method(self, *args)

    return called


for _name in ("__format__", "__mod__", "format", "partition", "removeprefix", "replace", "split", "strip"):
    setattr(Message, _name, _keeping_parts(getattr(str, _name)))


def _checked(as_dict: Callable[[Result], dict[str, Any]]) -> Callable[[Result], dict[str, Any]]:
    """Return `as_dict` of results with a check that its output conforms to the published schema."""
    commands = {"Summary": "inspect", "Report": "convert", "Verdict": "verify", "Difference": "diff"}

    @functools.wraps(as_dict)
    def called(self: Result) -> dict[str, Any]:
        found = as_dict(self)
        check(commands[type(self).__name__], found)
        return found

    return called


Result.as_dict = _checked(Result.as_dict)  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use all cores if no test is named, and skip slow tests in a quick run."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    config.option.is_without_slow = PROFILE == "quick"
    if hasattr(config, "workerinput"):  # an xdist worker
        return
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = min(os.cpu_count() or 1, _MOST_PROCESSES), "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if PROFILE == "quick":
        print("About 4 minutes on two idle cores. HYPOTHESIS_PROFILE=gate also runs the slow tests.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove slow tests from a quick run, and skip tests that need a GPU if there is none.

    Coverage is measured only in tests/unit, without the tests that have generated examples, because the other tests
    repeat the same lines many times.
    """
    if getattr(config.option, "is_without_slow", False):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    for item in items:
        is_generated = hasattr(getattr(item, "obj", None), "hypothesis")
        if is_generated or item.path.relative_to(TESTS).parts[0] != "unit":
            item.add_marker(pytest.mark.untraced)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Turn off coverage for tests with the mark "untraced".

    The mark of pytest-cov has no effect in xdist workers, because a second measurement continues there.
    """
    traces = sys.gettrace(), threading.gettrace()
    if item.get_closest_marker("untraced"):
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # the default of new threads
    try:
        return (yield)
    finally:
        sys.settrace(traces[0])
        threading.settrace(traces[1])  # type: ignore[arg-type]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command line, checks its exit status and returns its output."""
    return Command(capsys)


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes bytes to a file with a given name in a new folder."""

    def write(data: bytes, name: str = "m.pt") -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path

    return write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all examples of a generated test share."""
    return tmp_path_factory.mktemp("folder")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change the working directory to the folder of the test, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Return the folder of third-party checkpoints, which contains manifest.csv."""
    folder = os.environ.get("CKPTCONV_CORPUS")
    if not folder:
        pytest.skip("CKPTCONV_CORPUS names no folder of checkpoints")
    return Path(folder)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Return the folder of the checkpoints in the repository."""
    return FIXTURES


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """Yield the transformers library in offline mode."""
    from tests.support.tiny_models import transformers_offline

    with transformers_offline() as library:
        yield library


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest, transformers: ModuleType) -> Any:
    """Return a tiny model of transformers: gpt2 with tied embeddings, or llama without."""
    from tests.support.tiny_models import tiny_model

    return tiny_model(transformers, request.param)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folders that four processes save with torch.distributed.checkpoint
    (:mod:`tests.support.dcp_ranks`).
    """
    if not HAS_TORCH:
        pytest.skip("needs torch")
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, SUPPORT / "dcp_ranks.py", folder], check=True)
    return folder
