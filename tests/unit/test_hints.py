"""Suggestions in messages: flags on the command line and keywords in Python, which mean the same."""

from __future__ import annotations

import copy
import pickle
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptconv
from ckptconv.cli.main import main
from ckptconv.edits.options import Edits, edits_from, option_of
from ckptconv.hints import (
    Command,
    Message,
    Option,
    Placeholder,
    command,
    command_in,
    joined,
    option,
    options_in,
    python_words,
    shell,
)
from ckptconv.inspection.comparison.diff import options_of
from ckptconv.stores import locate
from tests.support.command import in_one_line
from tests.support.conversions import refused
from tests.support.suggestions import COMMANDS, CONTEXT, FLAGS, KEYWORDS, flags_in_texts, suggestions

ALL_FLAGS = set().union(*FLAGS.values())


def in_python(message: str) -> str:
    """Return the `message` as a public function would write it."""
    with python_words():
        return Message(*message.parts) if isinstance(message, Message) else message


@pytest.mark.parametrize(
    ("message", "typed", "called"),
    [
        (option("force") + " replaces it", "--force replaces it", "force=True replaces it"),
        ("first: " + option("select", "a b[0]"), "first: --select 'a b[0]'", "first: select='a b[0]'"),
        (option("exclude", ("a", "b c")), "--exclude a --exclude 'b c'", "exclude=['a', 'b c']"),
        (option("exclude", ("-n",)), "--exclude -n", "exclude='-n'"),
        (option("include", Placeholder("GLOB")) + ", as", "--include GLOB, as", "include=GLOB, as"),
        (option("rename", (("^mod", ""),)), "--rename '^mod' ''", "rename=[('^mod', '')]"),
        (option("rename", ((Placeholder("A"), Placeholder("B")),)), "--rename A B", "rename=[(A, B)]"),
        (option("map_location", "cpu"), "--to cpu", "map_location='cpu'"),
        (option("map_location", (("gpu", "cpu"),)), "--map gpu=cpu", "map_location={'gpu': 'cpu'}"),
        (option("max_shard_size", None) + " is", "--max-shard-size is", "max_shard_size is"),
        (option("max_shard_size", 5), "--max-shard-size 5", "max_shard_size=5"),
        (joined(None, "x", option("force"), None, separator=", "), "x, --force", "x, force=True"),
        (
            "or " + command("convert", Path("-a b"), Placeholder("OUT"), Option("state_dict")),
            "or ckptconv convert './-a b' OUT --state-dict",
            "or ckptconv.convert('-a b', OUT, state_dict=True)",
        ),
        (command("inspect", "a", Option("tree")), "ckptconv inspect a --tree", "ckptconv.inspect('a')"),
        (option("verbose") + " lists all", "-v lists all", "as_dict() lists all"),
        (
            command("convert_many", "in", "out"),
            "ckptconv convert in out",
            "ckptconv.convert_many(ckptconv.jobs_in('in', 'out'))",
        ),
        ("--force is no option here", "--force is no option here", "--force is no option here"),
    ],
)  # fmt: skip
def test_a_message_for_the_command_line_and_for_python(message: str, typed: str, called: str) -> None:
    """The text of a message contains flags, and its parts give the keywords, also after pickling."""
    assert message == typed == str(message)
    for each in (message, pickle.loads(pickle.dumps(message)), copy.deepcopy(message)):
        assert in_python(each) == called
    assert type(pickle.loads(pickle.dumps(in_python(message)))) is str


@given(st.sampled_from(["select", "include", "strip_prefix", "rename"]), st.text().filter(str.isprintable))
@example("strip_prefix", "a--verify.b")
@example("exclude", """it's "quoted"; $HOME --x \\""")
@example("select", "--force")
def test_values_are_unchanged(keyword: str, value: str) -> None:
    """Any value is unchanged in the flag that is typed, and in the keyword."""
    said: Any = ((value, "b"),) if keyword == "rename" else value
    message = "try: " + option(keyword, said)
    words = shlex.split(message.removeprefix("try: "))
    arguments = ["a.pt", "b.pt", *words]
    typed = COMMANDS["convert"].make_context("convert", arguments, parent=CONTEXT).params[keyword]
    assert typed in (said, (said,))
    assert eval(f"dict({in_python(message).removeprefix('try: ')})") == {
        keyword: [*said] if keyword == "rename" else said
    }


def test_text_that_looks_like_a_flag_is_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix that contains the name of a flag, and such names in the file, are not changed in a message."""
    torch.save({"--force.w": torch.ones(1)}, tmp_path / "a.pt")
    error = refused(ckptconv.NoMatchError, None, tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="a--verify.b")
    assert error.what == "no name starts with 'a--verify.b.'" and "--force." in str(error)
    assert error.args == (error.what,)
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--strip-prefix", "a--verify.b"]) == 1
    assert str(error) in in_one_line(capsys.readouterr().err)


def test_an_error_for_the_command_line_and_for_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error suggests flags on the command line and keywords in Python. The suggestion of ``select`` works in
    both.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"x": {"w": torch.ones(1)}, "y": {"w": torch.ones(1)}}, src)
    for flags, keywords in ((["--state-dict"], {"state_dict": True}), (["--strip-prefix", "w"], {"strip_prefix": "w"})):
        assert main(["convert", str(src), str(dst), *flags]) == 1
        said = capsys.readouterr().err
        with pytest.raises(ckptconv.CkptconvError) as caught:
            ckptconv.convert(src, dst, **keywords)  # type: ignore[arg-type]
        assert "--" not in str(caught.value)
        if "--select" in said:
            assert (
                main(["convert", str(src), str(dst), *shlex.split(said[said.index("--select") :].splitlines()[0])]) == 0
            )
            select: dict[str, Any] = eval(f"dict({str(caught.value.hint).split(': ')[1]})")
            ckptconv.convert(src, dst, force=True, **select)
    refused(ckptconv.TargetExistsError, "force=True", src, dst)
    with pytest.raises(ckptconv.UsageError, match="map_location='cpu'"):
        ckptconv.remap([], "meta")
    refused(ckptconv.UsageError, "'auto' only works with load and remap", src, dst, map_location="auto")
    for tolerance, said in (({"rtol": -1.0}, "rtol=-1.0"), ({"atol": float("nan")}, "atol=nan")):
        with pytest.raises(ckptconv.UsageError, match=f"^{said} is not a tolerance"):
            ckptconv.diff(src, src, **tolerance)  # type: ignore[arg-type]
    assert main(["diff", str(src), str(src), "--rtol", "-1"]) == 2
    assert "--rtol -1.0 is not a tolerance" in capsys.readouterr().err


def test_results_contain_keywords(here: Path) -> None:
    """Notes, findings and outcomes of functions contain keywords, and are plain strings. Suggested commands stay
    commands.
    """
    torch.save({"w": torch.ones(1)}, "a.pt")
    torch.save({"module.w": torch.ones(1)}, "ddp.pt")
    save_file({"w": torch.ones(1)}, "a.safetensors")
    unwrapped = "no name contains a wrapper's prefix, so unwrap=True changed nothing"
    converted = ckptconv.convert("a.pt", "b.pt", unwrap=True, compact=True)
    shown = "tensors use every byte of the storages that can be compacted, so compact=True changed nothing"
    assert converted.notes == (*converted.changes.notes,) == (unwrapped, shown)
    saved = ckptconv.save({"w": torch.ones(1)}, "b.pt", unwrap=True)
    verdict = ckptconv.verify("a.safetensors")
    difference = ckptconv.diff("a.pt", "a.safetensors", unwrap=True)
    assert saved.notes == difference.notes == (unwrapped,)
    assert verdict.findings[0].hint == "expect_sha256 compares the whole file"
    (outcome,) = ckptconv.convert_many([ckptconv.Job("a.pt", "b.pt")], ThreadPoolExecutor(1))
    assert outcome.error
    assert outcome.error.hint == "force=True replaces it, skip_existing=True keeps the existing output"
    summary, suggested = ckptconv.inspect("ddp.pt"), ckptconv.diff("ddp.pt", "a.pt")
    assert summary.findings[0].command == "ckptconv convert ddp.pt ddp-plain.pt --strip-prefix module."
    assert suggested.suggestion == "ckptconv diff ddp.pt a.pt --strip-prefix module."
    commands = summary.findings[0].command, suggested.suggestion
    assert all(map(command_in, commands))  # str() of a result wraps them
    summary = replace(summary, findings=tuple(replace(each, command=None) for each in summary.findings))
    suggested = replace(suggested, suggestion=None)
    for result in (converted, saved, verdict, difference, outcome, summary, suggested):
        assert Message.__module__.encode() not in pickle.dumps(result)


def test_every_function_writes_keywords() -> None:
    """Each public function that writes messages has the decorator for keywords. ``devices`` only counts."""
    public = {name: getattr(ckptconv, name) for name in ckptconv.__all__}
    functions = {name for name, each in public.items() if isinstance(each, FunctionType)}
    assert {name for name in functions if not hasattr(public[name], "__wrapped__")} == {"devices"}
    assert all(
        hasattr(each, "__wrapped__") for each in (ckptconv.CheckpointFile.__init__, ckptconv.CheckpointFile.load)
    )


def test_printed_results_contain_keywords(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``str()`` of a result and its HTML contain keywords. The command line prints flags instead."""
    w = torch.ones(1)
    torch.save({"state_dict": {"a": w, "b": w}, **{f"n{i}": i for i in range(9)}}, "a.pt")
    assert main(["convert", "a.pt", "b.safetensors"]) == 0
    typed = capsys.readouterr().err
    report = ckptconv.convert("a.pt", "b.safetensors", force=True)
    assert "(-v lists all)" in typed and "--copy-tied stores every name" in typed
    for said in (str(report), report._repr_html_()):
        assert "(as_dict() lists all)" in said and "copy_tied=True stores every name" in said
    changed = ckptconv.convert("a.pt", in_place=True, map_location="cuda:1")
    assert "undo          to restore the old bytes: ckptconv.undo('a.pt')" in str(changed)
    assert main(["inspect", "a.pt"]) == 0
    assert "4 more (--json)" in capsys.readouterr().out and "4 more (as_dict())" in str(ckptconv.inspect("a.pt"))


# All suggestions


@pytest.mark.untraced
def test_every_suggestion_is_an_option() -> None:
    """A suggested flag belongs to the command in the message, or to any command if there is none. If Python shows the
    message, the suggestion is also a keyword.
    """
    found = suggestions()
    assert len(found) > 90
    for each in found:
        place = f"{each.module}:{each.line}: {each.name}"
        if any(f"{maker}({each.name!r}" in each.message for maker in ("command", "command_line")):
            assert each.name.removesuffix("_many") in COMMANDS, place
            continue
        flag = Option(each.name, "cpu" if each.name == "map_location" else True).words()[0][0]
        assert flag in (FLAGS[each.command.removesuffix("_many")] if each.command else ALL_FLAGS), place
        if not each.module.startswith(("cli/", "render/")):
            assert each.name in {*KEYWORDS, "tree"}, place
            assert "{option(" not in each.message, f"{place} in an f-string, which loses it"


def test_every_edit_is_an_option() -> None:
    """The fields of edits have the names of options, so a message can contain any edit."""
    edits = edits_from(
        state_dict=True, select="x", include="i", exclude=["e", "f"], unwrap=True,
        strip_prefix="s", add_prefix="p", rename=[("o", "n")], dtype=["bf16", "*.w=fp32"],
    )  # fmt: skip
    said = " ".join(Message(each) for each in options_of(edits))
    parts, names = "--state-dict --select x --include i --exclude e --exclude f", "--rename o n --strip-prefix s"
    assert said == f"{parts} --unwrap {names} --add-prefix p"
    assert in_python(option_of("dtypes", edits.dtypes[1])) == "dtype='*.w=float32'"
    assert in_python(option_of("rename", ("o", "n"))) == "rename=[('o', 'n')]"
    assert options_of(Edits()) == ()


@pytest.mark.untraced
def test_strings_contain_no_flags() -> None:
    """No string in the code contains a flag, except for examples in the help, and for words that are read before click
    reads them.
    """
    assert flags_in_texts() == [
        f"cli/main.py: {flag}" for flag in ("--to", "--strip-prefix", "--to", "--in-place", "--debug")
    ]


def test_parts_are_data() -> None:
    """The options and the command that a message suggests can be read from it. A plain string suggests nothing."""
    message = "try " + option("select", "--to") + " or " + command("diff", "a", "b", Option("unwrap"))
    assert options_in(message) == {"select": "--to"}
    found = command_in(message)
    assert found == Command("diff", ("a", "b", Option("unwrap")))
    assert options_in("--select x") == options_in(None) == {} and command_in("ckptconv diff a b") is None


def test_parts_are_not_lost() -> None:
    """In this package, an operation that makes a plain string of a message raises an AssertionError in tests, except in
    modules that print it.
    """
    for text in ('f"{message}!"', '"{}".format(message)', 'message.replace("a", "b")', '(message + "x").split()'):
        for module, is_caught in (("ckptconv.edits.rename", True), ("ckptconv.cli.verify", False), ("a.user", False)):
            try:
                eval(text, {"message": option("force"), "__name__": module})
            except AssertionError:
                assert is_caught, text
            else:
                assert not is_caught, text


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("-x.tar", "./-x.tar"),
        ("@x.7z", "./@x.7z"),
        ("host:x.tar", "./host:x.tar"),
        ("a/host:x.tar", "a/host:x.tar"),
        ("https://host/x.tar", "https://host/x.tar"),
    ],
)
def test_names_that_programs_take_for_something_else(path: str, word: str) -> None:
    """A path that a program would read as an option, as a list of files, or with tar as another machine, is written
    with a folder. tar would start a shell for such a machine.
    """
    assert shell("tar", "-xf", locate(path)) == f"tar -xf {word}"
    assert command("inspect", locate(path)) == f"ckptconv inspect {word}"
