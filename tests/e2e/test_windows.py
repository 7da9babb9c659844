"""Where Python has not what Unix gives it, all can be imported, and each command says what it needs in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

#: Takes away what Python on Windows has not.
WITHOUT_UNIX = """
import multiprocessing.connection, os, pkgutil, signal, subprocess, sys
sys.modules |= dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios"))
for module, names in (
    (os, "pread pwrite preadv O_CLOEXEC O_NOFOLLOW O_NONBLOCK geteuid fchmod statvfs posix_fadvise"),
    (signal, "SIGHUP SIGPIPE SIGKILL pthread_sigmask SIG_BLOCK SIG_SETMASK"),
):
    for name in names.split():
        delattr(module, name)
"""


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_UNIX + program, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_every_module_can_be_imported() -> None:
    """But for the kernels, which need torch, and with what works on objects in memory."""
    ended = run(
        """
import ckptconv
for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
    if ".kernels" not in module.name and "__main__" not in module.name:
        __import__(module.name)
print(ckptconv.strip_prefix({"module.w": 1}, "module."))
try:
    ckptconv.inspect("fixtures/cuda0.pt")
except ckptconv.UnsupportedError as error:
    print(error)
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("{'w': 1}") and "on Windows, install and run it in WSL" in ended.stdout


@pytest.mark.parametrize(
    "line",
    [
        "inspect a.pt",
        "convert a.pt b.pt --to cpu",
        "convert a.pt --in-place --to cpu",
        "undo a.pt",
        "convert a.pt b.pt c -j 2",
    ],
)
def test_a_command_says_what_it_needs(line: str) -> None:
    """In one line, and the status is that of a failure."""
    ended = run("from ckptconv.cli.main import main; sys.exit(main(sys.argv[1:]))", *line.split())
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1 and "(expected Linux or macOS); on Windows, install" in ended.stderr


def test_the_help_is_there() -> None:
    ended = run("from ckptconv.cli.main import main; sys.exit(main(['convert', '--help']))")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--strip-prefix" in ended.stdout
