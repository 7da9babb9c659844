"""The command line as its users meet it: what they type, what they see, the exit status; no
process is started where none is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from ckptconv import CkptconvError, __version__, convert, inspect
from ckptconv.cli import convert as convert_module
from ckptconv.cli import terminal
from ckptconv.cli.main import main
from ckptconv.errors import UsageError


@pytest.fixture
def ddp(tmp_path: Path, fixtures: Path) -> Path:
    """A copy of the DataParallel fixture."""
    return Path(shutil.copy(fixtures / "dataparallel.pt", tmp_path / "ddp.pt"))


def test_to_cpu_strips_and_reports(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The main job: one line for what became of devices, one for names, on stderr; torch loads the result."""
    out = ddp.with_name("plain.pt")
    assert main(["convert", str(ddp), str(out), "--to", "cpu", "--strip-prefix", "module"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cuda:0 → cpu" in captured.err
    assert "module." in captured.err
    assert not any(name.startswith("module.") for name in torch.load(out))


def test_convert_json_is_on_stdout(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report as JSON has a version and integers in bytes."""
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--map", "cuda:0=cuda:1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["written"] is True
    assert report["size"] == ddp.with_name("o.pt").stat().st_size
    assert [(d["old"], d["new"]) for d in report["devices"]] == [("cuda:0", "cuda:1")]


def test_dry_run_writes_nothing(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints its plan on stdout, every name with -v, and creates no file."""
    out = ddp.with_name("o.pt")
    assert main(["convert", str(ddp), str(out), "--strip-prefix", "module.", "-n", "-v"]) == 0
    printed = capsys.readouterr().out
    assert "would write" in printed
    assert printed.count(" → ") == len(torch.load(ddp, map_location="cpu"))
    assert sorted(path.name for path in ddp.parent.iterdir()) == ["ddp.pt"]


def test_quiet_says_nothing(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-q silences the report but not what a dry run or an error has to say."""
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--to", "cpu", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt")), "--to", "cpu", "-q"]) == 1
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["convert", "{src}"], 2, ["no output given", "--force"]),
        (["convert", "{src}", "a.pt", "b.pt"], 2, ["several inputs need a folder"]),
        (["convert"], 2, ["SRC... DST"]),
        (["convert", "{src}", "{out}", "--to", "cuda:999"], 2, ["0 to 127"]),
        (["convert", "{src}", "{out}", "--to", "xla"], 2, ["xla", "--to cpu"]),
        (["convert", "{src}", "{out}", "--to", "cpu=cuda"], 2, ["--map cpu=cuda"]),
        (["convert", "{src}", "{out}", "--map", "cuda"], 2, ["--to cuda"]),
        (["convert", "{src}", "{out}", "--map", "cuda=cpu", "--map", "cuda=mps"], 2, ["twice"]),
        (["convert", "{src}", "{out}", "--no-such-flag"], 2, ["no-such-flag"]),
        (["convert", "{src}", "{src}"], 1, ["is the input", "--force"]),
        (["convert", "{src}", "nowhere/x.pt"], 2, ["folder does not exist"]),
        (["convert", "missing.pt", "{out}"], 1, ["missing.pt", "No such file"]),
        (["convert", "{src}", "{out}", "--strip-prefix", "net."], 1, ["net.", "module. ("]),
        (["convert", "{src}", "{out}.safetensors", "--format", "pt"], 2, ["suffix", "--format"]),
        (["convert", "{src}", "{out}", "--copy-tied"], 2, ["safetensors"]),
        (
            ["convert", "{src}", "{out}", "--select", "nowhere"],
            1,
            ["nowhere", "the checkpoint is a state dict itself", "ckptconv inspect ddp.pt --tree"],
        ),
        (["convert", "{src}", "{out}", "--exclude", "nothing*"], 1, ["nothing*"]),
        (["inspect", "missing.pt"], 1, ["missing.pt"]),
        (["inspect"], 2, ["PATH"]),
    ],
)
def test_errors_say_what_to_type(
    ddp: Path,
    args: list[str],
    status: int,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every mistake ends in its exit status and a message on stderr that names the way out, and leaves
    nothing behind.
    """
    monkeypatch.chdir(ddp.parent)
    assert main([arg.format(src="ddp.pt", out="o.pt") for arg in args]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err
    assert sorted(os.listdir()) == ["ddp.pt"]


def test_error_is_one_line(ddp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own errors are one line, also when a path holds a newline or an escape sequence."""
    assert main(["inspect", "bad\n\x1b[31mname.pt"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_path_with_a_nul_is_a_usage_error(ddp: Path) -> None:
    """No shell can pass one, a program can."""
    with pytest.raises(UsageError, match="no such path"):
        convert(ddp, "a\0b")


def test_debug_raises(ddp: Path) -> None:
    """--debug lets the traceback through."""
    with pytest.raises(CkptconvError):
        main(["inspect", "missing.pt", "--debug"])
    with pytest.raises(CkptconvError):
        main(["convert", "missing.pt", str(ddp.with_name("o.pt")), "--debug"])


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """--version, -h and each command's -h answer on stdout."""
    for args, word in (
        (["--version"], __version__),
        (["-h"], "ckptconv convert model.pt out.pt --to cpu"),
        (["convert", "-h"], "--map"),
        (["inspect", "--help"], "--tree"),
    ):
        assert main(args) == 0
        shown = capsys.readouterr().out
        assert word in shown
        assert max(map(len, shown.splitlines())) <= 100


def test_inspect_piped_is_plain(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: facts, then a line with tabs for each tensor, all of them."""
    assert main(["inspect", str(fixtures / "training.pt")]) == 0
    printed = capsys.readouterr().out
    summary = inspect(fixtures / "training.pt")
    assert [line.split("\t")[0].split(" = ")[0] for line in printed.splitlines() if "\t" in line] == [
        t["path"] for t in summary["tensors"]
    ]
    for word in ("RNG states", "cuda:0", "state dict", "epoch"):
        assert word in printed


def test_inspect_json_is_the_summary(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints what the function returns."""
    assert main(["inspect", str(fixtures / "two_gpus.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(inspect(fixtures / "two_gpus.pt")))


def test_inspect_selects_and_sorts(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--include and --exclude take names or paths, --sort and --limit order and cut; a glob for nothing is an error."""
    path = str(fixtures / "training.pt")
    assert main(["inspect", path, "--include", "*weight", "--json"]) == 0
    names = [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert names
    assert all(name.endswith("weight") for name in names)
    assert main(["inspect", path, "--include", "*/exp_avg", "--exclude", "*state[[]0]*/*", "--json"]) == 0
    paths = [tensor["path"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert paths
    assert all(path.endswith("/exp_avg") and "state[0]" not in path for path in paths)
    assert main(["inspect", path, "--sort", "size", "--limit", "2"]) == 0
    sizes = [int(line.split("\t")[-1]) for line in capsys.readouterr().out.splitlines() if "\t" in line]
    assert len(sizes) == 2
    assert sizes[0] == max(t["nbytes"] for t in inspect(path)["tensors"])
    assert main(["inspect", path, "--sort", "name", "--all", "--json"]) == 0
    paths = [tensor["path"] for tensor in json.loads(capsys.readouterr().out)["tensors"]]
    assert paths == sorted(paths)
    assert main(["inspect", path, "--exclude", "no such*"]) == 1
    assert "no such*" in capsys.readouterr().err


def test_inspect_of_several_goes_on_after_an_error(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unreadable file does not stop the others; the status tells. An empty line stands between two."""
    (tmp_path / "empty.pt").touch()
    assert main(["inspect", str(tmp_path / "empty.pt"), str(fixtures / "cpu.pt")]) == 1
    captured = capsys.readouterr()
    assert "empty" in captured.err
    assert "cpu.pt" in captured.out
    assert main(["inspect", *2 * [str(fixtures / "cpu.pt")], "--limit", "1"]) == 0
    first, second = capsys.readouterr().out.split("\n\n" + str(fixtures))
    assert first + "\n" == str(fixtures) + second


@pytest.mark.parametrize("width", [80, 200])
def test_inspect_fits_a_terminal(
    fixtures: Path, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal no line is wider than it, the table has a heading, rows fill the screen but for the prompt's line,
    at least 10 and at most 40, with a word about the rest, and --all shows every tensor.
    """
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    path = str(fixtures / "resnet18.pt")
    total = len(inspect(path)["tensors"])
    for height, drawn in ((5, 10), (30, None), (200, 40)):
        monkeypatch.setenv("LINES", str(height))
        assert main(["inspect", path]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.split() == ["tensor", "dtype", "shape", "device", "size"] for line in lines)
        assert lines[-1].endswith(" more tensors (--all shows them)")
        assert rows(lines) == drawn if drawn else height - 2 <= len(lines) < height
    assert main(["inspect", path, "--limit", "33"]) == 0
    assert rows(capsys.readouterr().out.splitlines()) == 33
    assert main(["inspect", path, "--all"]) == 0
    assert rows(capsys.readouterr().out.splitlines()) == total
    monkeypatch.setenv("LINES", "30")
    assert main(["inspect", path, "--tree"]) == 0
    assert 28 <= len(capsys.readouterr().out.splitlines()) < 30


def rows(lines: list[str]) -> int:
    return sum(line.rstrip("▏▎▍▌▋▊▉█ ").endswith(" B") and " cpu " in line for line in lines)


def test_a_command_that_the_terminal_breaks_takes_several_lines(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path in a command is never broken here; the screen has fewer rows for the table then."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    path = shutil.copy(fixtures / "resnet18.pt", tmp_path / ("x" * 200 + ".pt"))
    convert(path, dst := tmp_path / ("y" * 200 + ".pt"), map_location="npu:0")
    assert main(["inspect", str(dst)]) == 0
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) > 200
    assert 38 <= sum(-(-max(1, len(line)) // 80) for line in lines) < 40


def test_tree_groups_modules(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tree: a level for each module, with the number and bytes of what is below; single branches are joined."""
    assert main(["inspect", str(fixtures / "dataparallel.pt"), "--tree"]) == 0
    printed = capsys.readouterr().out
    total = len(inspect(fixtures / "dataparallel.pt")["tensors"])
    assert f"\nmodule.  {total} tensors" in printed
    assert "\n    weight  float32" in printed


def test_terminal_escapes_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name from a file cannot move the cursor, colour the screen or look like another name."""
    torch.save({"a\x1b[2Jb\u202ec": torch.zeros(1), "text": "\x07bell"}, tmp_path / "x.pt")
    for extra in ([], ["--tree"]):
        assert main(["inspect", str(tmp_path / "x.pt"), *extra]) == 0
        printed = capsys.readouterr().out
        assert "\x1b" not in printed
        assert "\u202e" not in printed
        assert "\x07" not in printed
        assert "\\x1b" in printed


def test_progress_on_a_terminal(
    ddp: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal an output that is large gets a bar that ends at its own size; small ones, dry runs
    and -q get none.
    """
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    out = ddp.with_name("o.pt")
    convert(fixtures / "training.pt", out, state_dict=True)
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size)
    command = ["convert", str(fixtures / "training.pt"), str(out), "--state-dict", "--force"]
    assert main(command) == 0
    total = f"/{out.stat().st_size / 1000:.1f} kB"
    assert total in capsys.readouterr().err
    assert torch.load(out, map_location="cpu")
    for flag in ("--dry-run", "-q"):
        assert main([*command, flag]) == 0
        assert total not in capsys.readouterr().err
    monkeypatch.setattr(terminal, "PROGRESS_FROM", out.stat().st_size + 1)
    assert main(command) == 0
    assert total not in capsys.readouterr().err


def test_interrupt(ddp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C is status 130 and one line."""

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "run", interrupt)
    assert main(["convert", str(ddp), str(ddp.with_name("o.pt"))]) == 130
    assert capsys.readouterr().err.strip() == "ckptconv: interrupted"


def test_nohup_stays_nohup(fixtures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A signal that the caller ignores stays ignored; others end the process by way of the clean-up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        assert main(["inspect", str(fixtures / "cpu.pt")]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert main(["inspect", str(fixtures / "cpu.pt")]) == 0
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_python(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False, **kwargs}
    return subprocess.run([sys.executable, *args], **options)  # type: ignore[call-overload,no-any-return]


def test_torch_is_not_imported(ddp: Path) -> None:
    """inspect, a device conversion and a prefix change leave torch (and rich, without a terminal) out
    of sys.modules.
    """
    code = f"""
import sys, ckptconv, ckptconv.cli.main
assert ckptconv.cli.main.main(["inspect", {str(ddp)!r}]) == 0
words = ["convert", {str(ddp)!r}, {str(ddp.with_name("o.pt"))!r}, "--to", "cpu", "--strip-prefix", "module."]
assert ckptconv.cli.main.main(words) == 0
assert not {{"torch", "numpy", "rich", "safetensors"}} & set(sys.modules)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_module_runs_and_survives_a_closed_pipe(fixtures: Path) -> None:
    """python -m ckptconv; a reader that goes away is no traceback; the C locale breaks nothing."""
    command = f"{sys.executable} -m ckptconv inspect {fixtures / 'resnet18.pt'} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    done = run_python(
        "-m", "ckptconv", "inspect", str(fixtures / "cpu.pt"), env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    )
    assert done.returncode == 0, done.stderr


def test_unsafe_is_refused_and_carried_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What calls os.system is not carried over, unless asked; then it is data still, and nothing ran."""

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"w": torch.zeros(2), "x": Attack()}, tmp_path / "bad.pt")
    out = tmp_path / "out.pt"
    assert main(["convert", str(tmp_path / "bad.pt"), str(out), "--to", "cpu"]) == 1
    assert "posix.system" in capsys.readouterr().err
    assert not out.exists()
    assert main(["convert", str(tmp_path / "bad.pt"), str(out), "--to", "cuda:1", "--allow-unsafe"]) == 0
    assert main(["inspect", str(out)]) == 0
    assert "DANGEROUS" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_standard_output(fixtures: Path) -> None:
    """One line says that the result could not be written, and the exit status does."""
    command = [sys.executable, "-m", "ckptconv", "inspect", str(fixtures / "cpu.pt")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "ckptconv: cannot write to standard output: No space left on device\n",
    )


@pytest.mark.parametrize("flag", ["-n", "--dry-run", "-f", "--to"])
def test_a_flag_is_no_replacement(
    fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    """A forgotten replacement does not turn a dry run into a conversion."""
    assert main(["convert", str(fixtures / "cpu.pt"), str(tmp_path / "out.pt"), "--rename", "conv", flag]) == 2
    assert f"{flag} stands where the replacement for 'conv' should be" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()
