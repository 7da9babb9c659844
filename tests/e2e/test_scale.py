"""The programs in docs/scale.md run unchanged: local processes, Dask workers of which one is killed, MPI, and single
shards.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv
from tests.support.paths import ROOT
from tests.support.waiting import wait_for

PAGE = ROOT / "docs" / "scale.md"
JOBS = 40
LIMIT = 60  # seconds


@pytest.fixture
def here(here: Path) -> Path:
    """Write the programs of the page and a folder of checkpoints to the working directory, and return its path."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, code in blocks:
        (here / name).write_text(code)
    assert len(blocks) == 4
    folder = here / "run"
    folder.mkdir()
    for i in range(JOBS):
        torch.save({"w": torch.full((1 << 18,), float(i))}, folder / f"{i}.pt")
    ckptconv.convert(folder / "0.pt", folder / "0.pt", map_location="cuda:0", force=True)
    return here


def assert_all_there() -> None:
    """Fail unless every output exists, is complete and is on the CPU."""
    for i in range(JOBS):
        assert torch.equal(torch.load(f"cpu/{i}.pt")["w"], torch.full((1 << 18,), float(i)))


def program(*words: str) -> list[str]:
    return [sys.executable, *words]


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run `command` and yield its process. Kill the process group at the end."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """Return the output of `process`. Fail unless it exits successfully in time."""
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    return said


def test_here(here: Path) -> None:
    """The program with local processes converts all files."""
    with running(*program("here.py")) as process:
        assert ended(process).count("done") == JOBS
    assert_all_there()


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="there is no Dask")
def test_dask(here: Path) -> None:
    """One of two Dask workers is killed during the run. The other worker converts the remaining files."""
    own = ("--host", "127.0.0.1", "--no-dashboard")
    with ExitStack() as stack:
        stack.enter_context(
            running(
                *program("-m", "distributed.cli.dask_scheduler", "--port", "0", "--scheduler-file", "dask.json", *own)
            )
        )
        wait_for(Path("dask.json").exists)
        workers = [
            stack.enter_context(
                running(
                    *program(
                        "-m",
                        "distributed.cli.dask_worker",
                        "--scheduler-file",
                        "dask.json",
                        "--nthreads",
                        "1",
                        "--no-nanny",
                        *own,
                    )
                )
            )
            for _ in range(2)
        ]
        driver = stack.enter_context(running(*program("with_dask.py")))
        wait_for(lambda: driver.poll() is not None or len([*Path("cpu").glob("*.pt")]) > 2)
        os.killpg(workers[0].pid, signal.SIGKILL)
        assert len([*Path("cpu").glob("*.pt")]) < JOBS
        ended(driver)
    assert_all_there()


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="there is no mpi4py")
def test_mpi(here: Path) -> None:
    """One MPI process distributes the work and two convert. A second run also succeeds."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("there is no mpiexec")
    for _ in range(2):
        with running(mpiexec, "-n", "3", *program("-m", "mpi4py.futures", "with_mpi.py")) as process:
            ended(process)
        assert_all_there()


def test_shards_as_jobs(here: Path) -> None:
    """Each shard is converted alone, and the index is written last. ckptconv reads the result as one checkpoint.

    ``write_index`` refuses a folder that already has an index, a folder without shards and an incomplete set.
    """
    Path("model").mkdir()
    save_file({"module.a": torch.ones(2), "module.b": torch.zeros(3)}, "model/model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, "model/model-00002-of-00002.safetensors")
    with running(*program("in_shards.py")) as process:
        assert ended(process) == "new/model.safetensors.index.json\n"
    ckptconv.convert("new", "one.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in load_file("one.safetensors").items()} == {
        "a": (2,),
        "b": (3,),
        "c": (4,),
    }
    with pytest.raises(ckptconv.RefusedError, match="have an index"):
        ckptconv.write_index("new")
    with pytest.raises(ckptconv.RefusedError, match="no shards are in it"):
        ckptconv.write_index("run")
    Path("new/model.safetensors.index.json").unlink()
    Path("new/model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ckptconv.MalformedError, match="1 of 2 shards is missing"):
        ckptconv.write_index("new")
