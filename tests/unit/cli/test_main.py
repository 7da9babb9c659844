"""Tests of the command line: arguments, output, exit statuses, signals and imports. Most of them start no process."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckptconv import CkptconvError, __version__, convert
from ckptconv.cli import commands as commands_module
from ckptconv.cli import convert as convert_module
from ckptconv.cli.main import cli, main
from ckptconv.errors import UsageError
from tests.support.command import Command


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["convert", "{src}"], 2, ["no output given", "--in-place"]),
        (["convert", "{src}", "a.pt", "b.pt"], 2, ["several inputs need a folder"]),
        (["convert"], 2, ["SRC... DST"]),
        (["convert", "{src}", "{out}", "--to", "cuda:999"], 2, ["0 to 127"]),
        (["convert", "{src}", "{out}", "--to", "xla"], 2, ["xla", "--to cpu"]),
        (["convert", "{src}", "{out}", "--to", "cpu=cuda"], 2, ["--map cpu=cuda"]),
        (["convert", "{src}", "{out}", "--map", "cuda"], 2, ["--to cuda"]),
        (["convert", "{src}", "{out}", "--map", "cuda=cpu", "--map", "cuda=mps"], 2, ["twice"]),
        (["convert", "{src}", "{out}", "--no-such-flag"], 2, ["no-such-flag"]),
        (["convert", "{src}", "{src}"], 1, ["as the input", "--force"]),
        (["convert", "{src}", "nowhere/x.pt"], 2, ["folder does not exist"]),
        (["convert", "missing.pt", "{out}"], 1, ["missing.pt", "No such file"]),
        (["convert", "{src}", "{out}", "--strip-prefix", "net."], 1, ["net.", "module. ("]),
        (["convert", "{src}", "{out}.safetensors", "--format", "pt"], 2, ["suffix", "--format"]),
        (["convert", "{src}", "{out}", "--copy-tied"], 2, ["safetensors"]),
        (
            ["convert", "{src}", "{out}", "--select", "nowhere"],
            1,
            ["nowhere", "the checkpoint is itself a state dict", "ckptconv inspect ddp.pt --tree"],
        ),
        (["convert", "{src}", "{out}", "--exclude", "nothing*"], 1, ["nothing*"]),
        (["convert", "{src}", "{out}", "--rename", "a=b"], 2, ["REGEX REPL", "did you mean: --rename a b"]),
        (["convert", "{src}", "{out}", "--rename", "a=b", "--force"], 2, ["did you mean: --rename a b"]),
        (["convert", "{src}", "{out}", "--to"], 2, ["expected --to DEVICE"]),
        (["convert", "{src}", "{out}", "--format", "zip"], 2, ["ckptconv: ", "pt, legacy"]),
        (["convert", "{src}", "{out}", "--to", "safetensors"], 2, ["try: --format safetensors"]),
        (["convert", "{src}", "{out}", "--to", "half"], 2, ["try: --dtype fp16"]),
        (["diff", "{src}"], 2, ["expected ckptconv diff A B"]),
        (
            ["convert", "{src}", "{out}", "--to", "cpu", "--to", "cuda"],
            2,
            ["--to is given twice, with different values", "cpu and cuda"],
        ),
        (
            ["convert", "{src}", "{out}", "--select", "a", "--select", "b"],
            2,
            ["--select is given twice, with different values"],
        ),
        (["convert", "{src}", "{out}", "-j", "2", "--jobs", "3"], 2, ["--jobs is given twice, with different values"]),
        (["diff", "{src}", "{src}", "--rtol", "1", "--rtol", "2"], 2, ["--rtol is given twice, with different values"]),
        (["convert", "-", "{out}"], 2, ["no checkpoint is read from standard input"]),
        (["convert", "-i", "https://host/m.pt", "--to", "cpu"], 2, ["download it first: curl -LO https://host/m.pt"]),
        (["convert", "-i", "s3://bucket/m.pt", "--to", "cpu"], 2, ["download it first: aws s3 cp s3://bucket/m.pt ."]),
        (["undo", "hf://me/m/m.pt"], 2, ["hf://me/m/m.pt: a URL, not a path"]),
        (["diff", "hf://m.pt", "{src}"], 2, ["hf://m.pt/: a URL that names no file"]),
        (["inspect", "https://name:secret@host"], 1, ["https://host/: a URL that names no file"]),
        (["inspect", "-"], 1, ["no checkpoint is read from standard input"]),
        (["inspect", "missing.pt"], 1, ["missing.pt"]),
        (["inspect"], 2, ["PATH"]),
        (["inspect", "bad\n\x1b[31mname.pt"], 1, ["name.pt"]),
    ],
)
def test_errors_have_hints(
    ddp: Path, args: list[str], status: int, words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mistake gives its exit status and one error on standard error, with hints below it. This is also true for a
    path with a newline or an escape sequence. No file is left.
    """
    monkeypatch.chdir(ddp.parent)
    said = command(*(arg.format(src="ddp.pt", out="o.pt") for arg in args), status=status, err=tuple(words))
    assert said.out == ""
    first, *hints = said.err.splitlines()
    is_error = first.startswith("ckptconv: ") and all(line.startswith("  ") for line in hints)
    assert is_error or first.startswith("Usage: ")
    assert os.listdir() == ["ddp.pt"]


def test_a_path_with_a_nul_is_a_usage_error(ddp: Path) -> None:
    """A path with a NUL character is a usage error of the function. No shell can pass such a path."""
    with pytest.raises(UsageError, match="this path cannot exist"):
        convert(ddp, "a\0b")


def test_debug_raises(ddp: Path) -> None:
    """With ``--debug``, the exception of an error is raised."""
    for words in (["inspect", "missing.pt"], ["convert", "missing.pt", str(ddp.with_name("o.pt"))]):
        with pytest.raises(CkptconvError):
            main([*words, "--debug"])


def test_version_and_help(command: Command) -> None:
    """``--version`` and the help of the commands are printed on standard output."""
    for args, word in (
        (["--version"], __version__),
        (["-h"], "ckptconv convert model.pt out.pt --to cpu"),
        (["convert", "-h"], "--map"),
        (["inspect", "--help"], "--tree"),
    ):
        shown = command(*args).out
        assert word in shown
        assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_help_lists_the_exit_statuses(name: str, command: Command) -> None:
    """The help of every command lists the exit statuses. Only `convert` has the additional status 3."""
    said = " ".join(command(name, "-h").out.split())
    assert re.search(r"Exit status: 0 .*, 1 .*, 2 .*, 130 Ctrl-C, 141 the reader of a pipe has ended", said)
    assert ("3 some of several failed" in said) == (name == "convert")


@pytest.mark.parametrize(("name", "groups"), [("convert", 9), ("diff", 4)])
def test_help_has_groups_with_examples(name: str, groups: int, command: Command) -> None:
    """The help of a command groups all its options. Each group has an example with options that exist."""
    titles = re.findall(r"^(\w.*) \((ckptconv .*)\):$", command(name, "-h").out, re.MULTILINE)
    assert len(titles) == groups
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, commands_module.Command)
    grouped = {option for _, options in found.groups.values() for option in options.split()}
    assert grouped == {option.name for option in found.params if isinstance(option, click.Option)}
    for _, example in titles:
        assert {word for word in example.split() if word[0] == "-"} <= {
            flag for each in found.params for flag in each.opts
        }


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("con", ["convert"]),
        ("convert {ddp} o.pt --strip", ["--strip-prefix"]),
        ("convert {ddp} o.pt --strip-prefix ", ["module."]),
        ("convert {ddp} o.pt --to cuda", ["cuda:0", "cuda:1"]),
        ("convert {ddp} o.pt --map ", ["cuda:0=", "any="]),
        ("convert {ddp} o.pt --map cuda:0=m", ["cuda:0=mps"]),
        ("diff {ddp} b.pt --strip-prefix mod", ["module."]),
        ("convert missing.pt o.pt --strip-prefix ", []),
    ],
)
def test_a_shell_completes(words: str, offered: list[str], ddp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Completion in bash offers commands, options and values for the last word."""
    typed = f"ckptconv {words.format(ddp=ddp)}"
    environment = {
        "_CKPTCONV_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    subprocess.run([sys.executable, "-m", "ckptconv"], env={**os.environ, **environment}, check=True)
    said = capfd.readouterr()
    assert [line.partition(",")[2] for line in said.out.splitlines() if line] == offered and not said.err


def test_interrupt(ddp: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Ctrl-C ends a command with status 130 and one line."""

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "run", interrupt)
    assert command("convert", ddp, ddp.with_name("o.pt"), status=130).err.strip() == "ckptconv: interrupted"


def test_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM and SIGHUP end a command with its clean-up, but a signal that the caller ignores (nohup) does not. After
    the command, the previous handlers are restored.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(cli, "main", lambda *_, **__: signal.raise_signal(signal.SIGHUP))
        assert main([]) == 0
        monkeypatch.setattr(cli, "main", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit, match="143"):
            main([])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_callback(number: signal.Signals, slow: bool) -> None:
    """Python prints and drops an exception that is raised in a callback such as ``__del__``. A signal during such a
    callback still ends the command, also on a slow machine.
    """
    code = f"""
import signal, sys, time
from ckptconv.cli import main as module
timer = signal.setitimer
def slow(*args):
    signal.setitimer = timer
    timer(*args)
    signal.raise_signal(signal.SIGALRM)
if {slow}:
    signal.setitimer = slow
class Callback:
    def __del__(self):
        signal.raise_signal({int(number)})
def run(*args, **keywords):
    Callback()
    time.sleep(50)
module.cli.main = run
sys.exit(module.main([]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=40, check=False)
    said = "ckptconv: interrupted\n" if number == signal.SIGINT else ""
    assert (done.returncode, done.stderr) == (128 + number, said)


def run_python(*args: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr


def test_torch_is_not_imported(ddp: Path) -> None:
    """`inspect`, a conversion of devices and a change of a prefix do not import torch, numpy, safetensors or rich."""
    code = f"""
import sys, ckptconv, ckptconv.cli.main
assert ckptconv.cli.main.main(["inspect", {str(ddp)!r}]) == 0
words = ["convert", {str(ddp)!r}, {str(ddp.with_name("o.pt"))!r}, "--to", "cpu", "--strip-prefix", "module."]
assert ckptconv.cli.main.main(words) == 0
assert not {{"torch", "numpy", "rich", "safetensors"}} & set(sys.modules)
"""
    run_python("-c", code)


#: The modules that ``inspect`` of a small file imports. More modules would make every call slower.
_NEEDED = {
    "": "byteranges checkpoint cli conversion dtypes edits errors formats guesses hints inspection lazy_regex"
    " light_dataclass limits output pickles render result safety stores system work",
    "byteranges": "checksums fault_sink reading sources spans undo_journal",
    "checkpoint": "dangerous_calls dangerous_globals describe index legacy_python model"
    " pickled_modules rebuild_functions safe_globals state_dicts storage_ids "
    " tensor_info torch_versions weights_only",
    "checkpoint.weights_only": "objects tensors unpickler",
    "cli": "commands inspect main terminal",
    "conversion": "target_names",
    "edits": "devices names",
    "formats": "distributed foreign layout opening safetensors_header sharded torch_files"
    " torch_zip two_readings writers zip_archive",
    "formats.distributed": "rank_names",
    "formats.foreign": "paths zips_and_pickles",
    "formats.sharded": "index",
    "inspection": "diagnosis summary",
    "inspection.diagnosis": "diagnose findings host issues refusals",
    "output": "signals",
    "pickles": "graph lenient machine parser paths rows",
    "render": "facts json_views listing result summary table text tree values",
    "safety": "nested_pickles scan torch_load",
    "stores": "base memory posix",
    "system": "names posix",
}
#: Modules of the standard library that are slow to import.
_HEAVY = {"bz2", "ctypes", "difflib", "gzip", "hashlib", "lzma", "random", "shutil", "tarfile", "tempfile", "textwrap"}


def test_imports_of_inspect(fixtures: Path) -> None:
    """`inspect` imports only the modules that every file needs. It imports other readers, edits and writers only if a
    file requires them.
    """
    code = f"""
import sys, click, json
before = set(sys.modules)
import ckptconv.cli.main
assert ckptconv.cli.main.main(["inspect", {str(fixtures / "cuda0.pt")!r}]) == 0
print("imported", *(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = set(done.stdout.rpartition("imported ")[2].split())
    needed = {".".join(filter(None, ("ckptconv", at, name))) for at, names in _NEEDED.items() for name in names.split()}
    assert {name for name in imported if name.startswith("ckptconv.")} - needed == set()
    assert imported & _HEAVY == set()


def test_module_runs_and_survives_a_closed_pipe(fixtures: Path) -> None:
    """If the reader of its output ends, ``python -m ckptconv`` exits with status 141 and no traceback, whether output
    is buffered or not. The C locale works.
    """
    large = f"inspect --json {fixtures / 'resnet18.pt'}", f"diff -v {fixtures / 'resnet18.pt'} {fixtures / 'cpu.pt'}"
    for typed, flags in itertools.product((*large, "inspect --help", "--help"), ("", "-u")):
        ours = f"{sys.executable} {flags} -m ckptconv {typed}"
        command = f"(sleep 0.1; {ours}) | true; exit $(( PIPESTATUS[0] ))"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (141, ""), typed
    run_python("-m", "ckptconv", "inspect", str(fixtures / "cpu.pt"), LC_ALL="C", PYTHONUTF8="0")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("words", "both", "status"),
    [
        ("diff cuda0.pt training.pt", False, 1),
        ("diff cuda0.pt nowhere.pt", False, 2),
        ("diff --nope", False, 2),
        ("diff cuda0.pt cuda0.pt", True, 2),
        ("convert --nope", False, 2),
        ("convert nowhere.pt {out}", False, 1),
        ("convert cuda0.pt training.pt {out} --to cuda:1", False, 0),
        ("inspect cuda0.pt", True, 1),
        ("nope", True, 2),
    ],
)
def test_standard_error_on_a_full_disk(fixtures: Path, tmp_path: Path, words: str, both: bool, status: int) -> None:
    """If standard error is a full disk, the exit status is still the documented one, also if standard output is full
    too. A batch continues.
    """
    command = [sys.executable, "-m", "ckptconv", *words.format(out=f"{tmp_path / 'out'}/").split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full if both else subprocess.PIPE, stderr=full, cwd=fixtures)
    assert done.returncode == status
    assert sorted(os.listdir(tmp_path)) == (["out"] if status == 0 else [])
    assert status or sorted(os.listdir(tmp_path / "out")) == ["cuda0.pt", "training.pt"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_standard_output_on_a_full_disk(fixtures: Path) -> None:
    """If standard output is a full disk, the command prints one error and exits with status 1."""
    command = [sys.executable, "-m", "ckptconv", "inspect", str(fixtures / "cpu.pt")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "ckptconv: cannot write to standard output: No space left on device\n",
    )


def test_other_errors_of_the_system(fixtures: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """An OSError that does not come from standard output is not reported as an error of standard output."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(cli, "main", fail)
    said = command("inspect", fixtures / "cpu.pt", status=1)
    assert said.err == "ckptconv: libfoo.so: cannot open shared object file\n"


def test_an_option_twice_with_the_same_value(ddp: Path, command: Command) -> None:
    """An option may be given twice with the same value, so a wrapper script may append an option that the user
    typed.
    """
    command("convert", ddp, ddp.with_name("o.pt"), "--to", "cpu", "--to", "cpu", "-j", "2", "--jobs", "2")


def test_every_command_has_the_class_that_catches_typos() -> None:
    """Every command uses the class that reports an option with two different values. Otherwise the first value would be
    lost without a message.
    """
    group = cli.make_context("ckptconv", [], resilient_parsing=True)
    commands = [cli.get_command(group, name) for name in cli.list_commands(group)]
    assert commands and all(isinstance(each, commands_module.Command) for each in commands)
