"""Tests of worker processes: their imports, their signals and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptconv import Job
from ckptconv.conversion.batches import processes, run_jobs
from tests.support.deadly_maps import interrupt
from tests.support.paths import ROOT
from tests.support.waiting import wait_for
from tests.support.worker_processes import processes_with

COMMAND = "import sys; from ckptconv.cli.main import main; sys.exit(main())"
#: Converts the working directory. The main program is not guarded and need not be.
BATCH = """
import os, sys, ckptconv
os.cpu_count = lambda: 2
outcomes = ckptconv.convert_many(ckptconv.jobs_in(".", "../out", map_location="cuda:1"))
sys.exit(next((str(outcome.error) for outcome in outcomes if outcome.error), 0))
"""
LISTED = """
import os, sys, ckptconv
from tests.support.deadly_maps import list_modules
os.cpu_count = lambda: 2
jobs = ckptconv.jobs_in(".", "../listed", map_location=list_modules, dtype="fp16")
sys.exit(next((str(outcome.error) for outcome in ckptconv.convert_many(jobs) if outcome.error), 0))
"""
#: Uses an executor of another program, which starts each process as ``python -c``.
EXECUTOR = """
import multiprocessing, sys, ckptconv
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        outcomes = ckptconv.convert_many(ckptconv.jobs_in(".", "../out", map_location="cuda:1"), executor)
    sys.exit(next((str(outcome.error) for outcome in outcomes if outcome.error), 0))
"""


def saved_in(folder: Path) -> Path:
    """Create `folder` with four checkpoints, and return it."""
    folder.mkdir()
    for i in range(4):
        torch.save({"w": torch.full((4,), float(i))}, folder / f"{i}.pt")
    return folder


@pytest.fixture
def folder(here: Path) -> Path:
    """Return a folder with four checkpoints."""
    return saved_in(here / "in")


def run(program: str, folder: Path, *words: str, **environment: str) -> str:
    """Write the script `program` next to `folder`, run it in `folder`, and return its output."""
    script = folder.parent / "script.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 or "PYTHONINSPECT" in environment, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the modules that a worker imports."""
    folder = saved_in(tmp_path_factory.mktemp("imported") / "in")
    found = {name.partition(".")[0] for name in run(LISTED, folder).split()}
    assert {"ckptconv", "numpy", "pickle", "signal", "struct", "torch"} <= found
    return found


def plant(folder: Path, imported: set[str]) -> Path:
    """Write a module into `folder` for each name in `imported` and in the standard library. When it is executed, it
    creates a file with its name in the returned folder.
    """
    ran = folder.parent / "ran"
    ran.mkdir()
    for name in imported | sys.stdlib_module_names:
        (folder / f"{name}.py").write_text(f"open({str(ran / name)!r}, 'w').close()\nraise ImportError('planted')\n")
    return ran


def outputs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"PYTHONINSPECT": "1"}])
def test_modules_of_the_current_folder(folder: Path, imported: set[str], environment: dict[str, str]) -> None:
    """No started process imports a module from the working directory. This applies to the option ``-j`` and to
    `convert_many` in a script in another folder, also with PYTHONINSPECT.
    """
    ran = plant(folder, imported)
    run(COMMAND, folder, "convert", ".", "../command", "--to", "cuda:1", "-j", "2", **environment)
    run(BATCH, folder, **environment)
    assert outputs(ran) == []
    assert outputs(folder.parent / "command") == outputs(folder.parent / "out") == [f"{i}.pt" for i in range(4)]


def test_a_relative_path_in_the_environment(folder: Path, imported: set[str]) -> None:
    """Relative and empty entries of PYTHONPATH refer to the folder in which a program starts. After the program has
    changed the folder, no started process imports modules from the new one.
    """
    ran = plant(folder, imported)
    (start := folder.parent / "start").mkdir()
    run("import os\nos.chdir('../in')" + BATCH, start, PYTHONPATH=os.pathsep.join(["", ".", str(ROOT)]))
    assert outputs(ran) == []
    assert len(outputs(folder.parent / "out")) == 4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has PYTHONSAFEPATH from 3.11 on")
def test_an_executor_of_others_with_pythonsafepath(folder: Path, imported: set[str]) -> None:
    """Processes that another program starts as ``python -c`` import no module from the working directory if
    PYTHONSAFEPATH is set, as SECURITY.md advises.
    """
    ran = plant(folder, imported)
    run(EXECUTOR, folder, PYTHONSAFEPATH="1")
    assert outputs(ran) == []
    assert len(outputs(folder.parent / "out")) == 4


def test_the_main_module_of_a_worker(folder: Path) -> None:
    """A function of the main program can be a mapping of devices. If the main program is not guarded, the jobs fail
    with an error that states this.
    """
    program = BATCH.replace('map_location="cuda:1"', "map_location=to_gpu")
    program = program.replace("os.cpu", "def to_gpu(tag):\n    return 'cuda:1'\nos.cpu")
    said = run(program.replace("sys.exit(", "print("), folder)
    assert 'guard the main program by if __name__ == "__main__"' in said
    run(
        program.replace("outcomes =", "if __name__ == '__main__':\n    outcomes =").replace("sys.exit", "    sys.exit"),
        folder,
    )
    assert len(outputs(folder.parent / "out")) == 4


def test_ctrl_c_in_a_worker(folder: Path) -> None:
    """A terminal sends Ctrl-C to all processes. A worker still completes its job."""
    jobs = [Job(folder / f"{i}.pt", folder / f"out{i}.pt", {"map_location": interrupt}) for i in range(4)]
    assert all(outcome.report for outcome in run_jobs(jobs, processes(2), lambda outcome: outcome))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize("attempt", range(3))
def test_workers_end_with_a_parent_that_is_killed_at_once(folder: Path, attempt: int) -> None:
    """Workers end if their parent is killed soon after they have started, also during a long job."""
    program = """
import os, ckptconv
from tests.support.deadly_maps import stall
os.cpu_count = lambda: 2
ckptconv.convert_many(ckptconv.jobs_in(".", "../out", map_location=stall))
"""
    value = os.urandom(8).hex()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CKPTCONV_TEST": value}
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder, env=environment) as parent:
        wait_for(lambda: len(processes_with(value)) > 1 or parent.poll() is not None)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not processes_with(value), seconds=30)
