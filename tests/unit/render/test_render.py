"""Output of ``inspect`` and lines of reports: golden texts at 80 and 200 columns, folding, widths, colors in a real
terminal, and commands that can be pasted.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptconv.conversion.plan import Report
from ckptconv.edits.changes import Changes, NameChange
from ckptconv.errors import count
from ckptconv.hints import Command, Message, Option, command
from ckptconv.inspection.diagnosis.findings import Advice, Diagnosis
from ckptconv.inspection.summary import Share, Summary, TensorSummary, inspect
from ckptconv.render.folding import leaves, tree_of
from ckptconv.render.report import patterns, report_lines
from ckptconv.render.summary import facts
from ckptconv.render.table import table_lines, tree_lines
from ckptconv.render.text import Style, broken, cells, command_lines, natural, wrapped
from tests.support.paths import FIXTURES, GOLDEN
from tests.support.results import make_report


def tensor(path: str, shape: tuple[int, ...] = (2,), **fields: Any) -> TensorSummary:
    """Return a row for a tensor, as ``inspect`` creates it."""
    nbytes = 4
    for n in shape:
        nbytes *= n
    row = TensorSummary(
        path=path, name=path, kind="strided", dtype="float32", shape=shape, stride=(), offset=0, device="cpu",
        module=None, nbytes=nbytes, storage_nbytes=nbytes, requires_grad=False, tied_to=None,
    )  # a table  # fmt: skip
    return replace(row, **fields)


def typed(line: str) -> Message:
    """Return the command in `line`. Each of its flags has at most one value."""
    arguments: list[str | Option] = []
    _, name, *words = shlex.split(line)
    for word in words:
        if word.startswith("--"):
            arguments.append(Option(word[2:].replace("-", "_")))
        elif arguments and isinstance(last := arguments[-1], Option):
            arguments[-1] = replace(last, value=word)
        else:
            arguments.append(word)
    return command(name, *arguments)


def finding(kind: str, text: str, line: str | None, *, blocks: bool = True) -> Advice:
    return Advice(kind=kind, blocks=blocks, text=text, command=line and typed(line))


def judged(summary: Summary, *findings: Advice, remedy: str | None = None) -> Summary:
    """Return `summary` with only the given `findings`, independent of this machine, and as if torch 2.13 were
    installed.
    """
    loads_here = Diagnosis([*findings], None).loads_here
    said = remedy and typed(remedy)
    load = replace(summary.torch_load, torch="2.13", installed="2.13.0")
    return replace(summary, findings=findings, loads_here=loads_here, remedy=said, path="model.pt", torch_load=load)


def assert_golden(lines: list[str], name: str, width: int | None) -> None:
    """Assert that `lines` are the reviewed text of the file `name`, and that they fit the `width`.

    If CKPTCONV_GOLDEN is ``write``, write the file first.
    """
    drawn = "".join(line + "\n" for line in lines)
    if os.environ.get("CKPTCONV_GOLDEN") == "write":
        (GOLDEN / name).write_text(drawn)
    assert drawn == (GOLDEN / name).read_text()
    assert max(map(cells, lines)) <= (width or 1000)


# Golden texts


def two_gpus(folder: Path) -> Summary:
    """Return the summary of a training checkpoint of a DataParallel model on two GPUs, with an optimizer and a random
    state.
    """
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    state = OrderedDict((f"module.{name}", value.detach()) for name, value in model.state_dict().items())
    torch.save(
        {
            "epoch": 12,
            "arch": "mlp",
            "best_acc": 0.75,
            "state_dict": state,
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "args": {"device": "cuda:0", "lr": 0.001, "milestones": [30, 60, 90]},
        },
        folder / "x.pt",
    )
    summary = inspect(folder / "x.pt")
    tensors = tuple(
        row
        if row.path == "rng" or row.path.endswith("step")
        else replace(row, device="cuda:1" if any(each in row.path for each in (".2.", "[2]", "[3]")) else "cuda:0")
        for row in summary.tensors
    )
    devices = {
        device: Share(
            tensors=sum(row.device == device for row in tensors),
            nbytes=sum(row.nbytes for row in tensors if row.device == device),
        )
        for device in ("cuda:0", "cuda:1", "cpu")
    }
    return judged(
        replace(summary, tensors=tensors, devices=devices),
        finding(
            "device",
            "12 of 17 tensors (2.54 kB) are on cuda:0 and cuda:1, and no GPU is here",
            "ckptconv convert epoch12.pt epoch12-cpu.pt --to cpu",
        ),
        finding(
            "prefix",
            "every name of state_dict starts with module., as DataParallel writes it",
            "ckptconv convert epoch12.pt epoch12-plain.pt --strip-prefix module.",
            blocks=False,
        ),
        remedy="ckptconv convert epoch12.pt epoch12-cpu-plain.pt --to cpu --strip-prefix module.",
    )


def transformer(folder: Path) -> Summary:
    """Return the summary of a decoder with 32 layers whose head is tied to its embedding."""
    state = OrderedDict({"model.embed_tokens.weight": torch.zeros(1000, 64)})
    for layer in range(32):
        at = f"model.layers.{layer}."
        for letter in "qkvo":
            state[f"{at}self_attn.{letter}_proj.weight"] = torch.zeros(64, 64)
        state[f"{at}mlp.up_proj.weight"] = torch.zeros(172, 64)
        state[f"{at}mlp.down_proj.weight"] = torch.zeros(64, 172)
        state[f"{at}input_layernorm.weight"] = torch.zeros(64)
    state["model.norm.weight"] = torch.zeros(64)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, folder / "x.pt")
    return judged(inspect(folder / "x.pt"))


def folders(folder: Path) -> Summary:
    """Return the summary of a checkpoint with nested dicts, lists, unequal blocks, a list of experts in each layer, and
    names from several alphabets.
    """
    value: dict[str, Any] = {
        "model": {f"layers.{i}.experts.{j}.w": torch.zeros(3, 3) for i in range(3) for j in range(4)},
        "ema": {"decay": 0.999, "shadow": {"层.权重": torch.ones(2), "bad\x1b[2J.name": torch.ones(2)}},
        "queue": [torch.ones(2) for _ in range(5)],
        "blocks": {f"{i}.weight": torch.ones(4, 4 if i != 4 else 5) for i in range(7)},
        "deep": {"er": {"and": [{"deeper": torch.ones(1, dtype=torch.float64)}]}},
        ("a", 1): torch.ones(1),
    }
    torch.save(value, folder / "x.pt")
    return judged(inspect(folder / "x.pt"))


def hub(folder: Path) -> Summary:
    """Return the summary of a safetensors file with metadata."""
    state = {
        f"bert.encoder.layer.{i}.{part}": torch.zeros(4, 4, dtype=torch.bfloat16)
        for i in range(12)
        for part in ("query.weight", "key.weight")
    }
    save_file({**state, "classifier.bias": torch.zeros(2)}, folder / "x.safetensors", {"format": "pt"})
    return judged(inspect(folder / "x.safetensors"))


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    ("name", "make", "draw"),
    [
        ("two_gpus", two_gpus, table_lines),
        ("transformer", transformer, table_lines),
        ("transformer_tree", transformer, tree_lines),
        ("folders_tree", folders, tree_lines),
        ("safetensors", hub, table_lines),
    ],
)
def test_golden(name: str, make: Callable[[Path], Summary], draw: Any, width: int, tmp_path: Path) -> None:
    """The facts, followed by the table or the tree, are the golden text. They take at most 50 lines."""
    summary = replace(make(tmp_path), path=f"{name}.pt", size=123_456)
    look = Style(width)
    lines = [*facts(summary, look), "", *draw(summary.tensors, look, limit=40)]
    assert_golden(lines, f"{name}_{width}.txt", width)
    assert len(lines) <= 50


# New names


@pytest.mark.parametrize(
    ("old", "new", "drawn"),
    [
        ("module.conv.w", "conv.w", "module.* → *"),
        ("w", "module.w", "* → module.*"),
        ("module.module.w", "module.w", "module.* → *"),
        ("features.module.0.w", "features.0.w", "*.module.* → *.*"),
        ("a.b._orig_mod.w", "a.b.w", "*._orig_mod.* → *.*"),
        ("a._orig_mod.b._orig_mod.w", "a.b.w", "*._orig_mod.*._orig_mod.* → *.*.*"),
        ("_orig_mod.module.a.w", "a.w", "_orig_mod.module.* → *"),
        ("ln.gamma", "ln.weight", "*.gamma → *.weight"),
        ("h0.w", "layer0.w", "h*.* → layer*.*"),
        ("attn.q_proj.w", "attn.q_lin.w", "*.*_proj.* → *.*_lin.*"),
        ("transformer.h.0.w", "model.layers.0.w", "transformer.h.* → model.layers.*"),
        ("layers.0.attn.w", "attn.0.layers.w", "layers.*.attn.* → attn.*.layers.*"),
        ("beta", "bias", "beta → bias"),
        ("a.0.w", "a_0_w", "*.*.* → *_*_*"),
        ("w", "", "w → "),
        ("x." + "a.b." * 20 + "w", "y." + "a.c." * 20 + "v", "x." + "a.b." * 20 + "w → y." + "a.c." * 20 + "v"),
    ],
)
def test_pattern_of_a_changed_name(old: str, new: str, drawn: str) -> None:
    """A star in a pattern stands for an unchanged part of a name. Between changed parts, this is a complete word or
    number.
    """
    ((was, becomes, paths, example),) = patterns([NameChange("m", old, new)])
    assert f"{was} → {becomes}" == drawn
    assert (paths, example) == ({"m": 1}, NameChange("m", old, new))


WORDS = st.lists(
    st.sampled_from(["module", "_orig_mod", "a", "h0", "q_proj", "0", "12", "", "é"]), min_size=1, max_size=6
)


@given(st.lists(st.tuples(WORDS.map(".".join), WORDS.map(".".join)), max_size=8))
def test_patterns_match_their_names(names: list[tuple[str, str]]) -> None:
    """Both names of a change match its pattern. All names are counted, and the pattern with the most names is first."""
    found = patterns([NameChange(path, *pair) for pair in names for path in ("model", "ema")])
    assert sum(sum(pattern.paths.values()) for pattern in found) == 2 * len(names)
    assert [pattern.paths["ema"] for pattern in found] == sorted((p.paths["model"] for p in found), reverse=True)
    for old, new in names:
        ((was, becomes, _, _),) = patterns([NameChange(".", old, new)])
        for pattern, name in ((was, old), (becomes, new)):
            assert re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)


def renamed(*changes: tuple[str, str], paths: tuple[str, ...] = (".",)) -> Report:
    """Return the report of a dry run that changes names."""
    names = [NameChange(path, old, new) for path in paths for old, new in changes]
    return make_report(changes=Changes(names=names))


def fsdp() -> Report:
    """Return the report of a sharded model and its average. Activation checkpointing wraps a part of each layer."""
    word, inner = "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."
    changes = [(f"{word}embed.weight", "embed.weight"), (f"{word}norm.weight", "norm.weight")]
    for i in range(12):
        changes.append((f"{word}layers.{i}.{word}attn.q_proj.weight", f"layers.{i}.attn.q_proj.weight"))
        changes.append((f"{word}layers.{i}.{word}{inner}mlp.up.weight", f"layers.{i}.mlp.up.weight"))
    return renamed(*changes, paths=("model", "ema"))


def many() -> Report:
    """Return a report in which ten words become upper case, one of them in two names."""
    return renamed(*((f"h.{word}", f"h.{word.upper()}") for word in [*"abcdefghi", "zeta"]), ("x.zeta", "x.ZETA"))


@pytest.mark.parametrize("width", [80, 200, None])
@pytest.mark.parametrize("make", [fsdp, many])
def test_golden_names(make: Callable[[], Report], width: int | None) -> None:
    """A report has a line for each pattern of names, with its state dicts and an example, as in the golden text."""
    lines = list(report_lines(make(), Style(width)))
    assert_golden(lines, f"names_{make.__name__}_{width or 'piped'}.txt", width)


PAIR = ("module.a", "a"), ("module.b", "b")
UNEVEN = renamed(*PAIR, paths=("m",))
UNEVEN.changes.names.append(NameChange("n", "module.c", "c"))


@pytest.mark.parametrize(
    ("report", "how", "drawn"),
    [
        (renamed(*PAIR), {}, ["module.* → *: 2 names, such as module.a → a"]),
        (renamed(*PAIR, paths=("m", "n")), {}, ["module.* → *: 2 names in each of m, n, such as module.a → a"]),
        (UNEVEN, {}, ["module.* → *: 3 names in m, n, such as module.a → a"]),
        (renamed(PAIR[0], paths=("m",)), {}, ["module.a → a in m"]),
        (renamed(("a", "b"), paths=("m", "n")), {}, ["a → b in m, n"]),
        (renamed(*PAIR), {"every_name": True}, ["module.a → a", "module.b → b"]),
        (renamed(*PAIR), {"style": Style(80, unicode=False)}, ["module.* -> *: 2 names, such as module.a -> a"]),
    ],
    ids=["root", "as many in several", "in all of them", "one name", "one name in several", "each", "in ASCII"],
)
def test_names_are_counted_in_state_dicts(report: Report, how: dict[str, Any], drawn: list[str]) -> None:
    """A report tells in which state dicts a pattern occurs, except for the root. A single name is shown as it is. With
    ``every_name``, all names are listed.
    """
    assert [line[16:] for line in report_lines(report, **how)][1:] == drawn


# The verdict


CONVERT = "ckptconv convert model.pt out.pt --to cpu"
DEVICES = [finding("device", f"reason {i}", f"{CONVERT} --map cuda:{i}=cpu") for i in range(3)]
NOTE = finding("prefix", "a note", "ckptconv convert a b --strip-prefix module.", blocks=False)
NPU = "11 tensors are on npu:0 (first: conv.weight), and torch.load needs a machine with that device"
OUTPUTS = [f"ckptconv convert 'a b.pt' {out} --to cpu" for out in ("x.pt", "'y z.pt'", "w.pt")]
SAME = [finding("device", f"reason {i}", command) for i, command in enumerate(OUTPUTS)]

YES = "  loads here    yes: torch.load(path, weights_only=True), rules of torch 2.13"
#: Findings, the command for all of them, and the expected lines from the second one on.
VERDICTS: dict[str, tuple[list[Advice], str | None, list[str]]] = {
    "the command for all findings is above them, and they have none of their own; notes come last": (
        [NOTE, *DEVICES],
        CONVERT,
        [
            "  loads here    no; this fixes everything:",
            f"    {CONVERT}",
            "  because       reason 0",
            "                reason 1",
            "                reason 2",
            "  devices       cpu",
            "  names         a note",
        ],
    ),
    "one finding": (DEVICES[:1], None, ["  loads here    no: reason 0", f"    {CONVERT} --map cuda:0=cpu"]),
    "notes alone": (
        [NOTE, finding("rng", "another", "ckptconv convert a b --to cpu", blocks=False)],
        f"{CONVERT} --add-prefix x.",
        [
            YES,
            "  devices       cpu",
            "  names         a note",
            "    ckptconv convert a b --strip-prefix module.",
            "  note          another",
            "    ckptconv convert a b --to cpu",
            "  all at once   in one command:",
            f"    {CONVERT} --add-prefix x.",
        ],
    ),
    "where no command mends all, no is said once": (
        [finding("code", f"torch.load refuses {name}", None) for name in ("a.B", "c.D")],
        None,
        ["  loads here    no: torch.load refuses a.B", "                torch.load refuses c.D"],
    ),
    "what nobody can tell is neither yes nor no": (
        [
            finding("prefix", "a note", None, blocks=False),
            finding("device", NPU, "ckptconv convert model.pt model-cpu.pt --map npu=cpu", blocks=False),
        ],
        None,
        [
            f"  loads here    it depends: {NPU}",
            "    ckptconv convert model.pt model-cpu.pt --map npu=cpu",
            "  devices       cpu",
            "  names         a note",
        ],
    ),
    "danger is loud": (
        [finding("dangerous", "calls os.system", None)],
        None,
        ["  loads here    no", "  DANGEROUS     calls os.system"],
    ),
    "a remedy that is the only finding's command is not said twice": (
        [finding("device", "no GPU", "ckptconv convert a b --to cpu")],
        "ckptconv convert a b --to cpu",
        ["  loads here    no: no GPU", "    ckptconv convert a b --to cpu"],
    ),
    "without findings it is a word": ([], None, [YES]),
    "a cure is said once: other flags, or the same for another input, are another": (
        [
            *SAME,
            finding("x", "note", "ckptconv convert 'a b.pt' x.pt --to cuda", blocks=False),
            finding("x", "note", "ckptconv convert b.pt x.pt --to cpu", blocks=False),
        ],
        None,
        [
            "  loads here    no: reason 0",
            f"    {OUTPUTS[0]}",
            "                reason 1",
            "                reason 2",
            "  devices       cpu",
            "  note          note",
            "    ckptconv convert 'a b.pt' x.pt --to cuda",
            "  note          note",
            "    ckptconv convert b.pt x.pt --to cpu",
        ],
    ),
    "a cure of all is said once": (
        SAME,
        OUTPUTS[2],
        [
            "  loads here    no; this fixes everything:",
            f"    {OUTPUTS[2]}",
            "  because       reason 0",
            "                reason 1",
            "                reason 2",
        ],
    ),
    "a note's cure is said once": (
        [finding("x", "note", OUTPUTS[1], blocks=False)],
        OUTPUTS[0],
        [YES, "  devices       cpu", "  note          note", f"    {OUTPUTS[1]}"],
    ),
}


@pytest.fixture
def whole(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns the facts of a transformer with the given findings, without wrapped lines."""
    summary = transformer(tmp_path)
    return lambda *findings, remedy=None: list(facts(judged(summary, *findings, remedy=remedy), Style(None)))


@pytest.mark.parametrize("case", VERDICTS)
def test_the_answer_is_in_the_first_lines(case: str, whole: Callable[..., list[str]]) -> None:
    """The first lines contain the verdict, its reasons and their commands. Other facts follow without commands."""
    findings, remedy, drawn = VERDICTS[case]
    lines = whole(*findings, remedy=remedy)
    assert lines[1 : len(drawn) + 1] == drawn
    assert not any("ckptconv" in line or "npu:0" in line for line in lines[len(drawn) + 1 :])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--to cpu", "everything:"),
        ("--state-dict --to cpu", "everything, for the state dict only:"),
        ("--select 'ema/the model'", "everything, for ema/the model only:"),
        ("--select ema --state-dict", "everything, for the state dict in ema only:"),
    ],
)
def test_a_remedy_that_extracts_a_part_names_it(flags: str, words: str, whole: Callable[..., list[str]]) -> None:
    """The text before a remedy names the part of the checkpoint that the command takes, because the command does not
    mend the rest.
    """
    remedy = f"ckptconv convert a b {flags}"
    findings = [finding("code", "a", "ckptconv convert a b --x"), finding("device", "b", "ckptconv convert a b --y")]
    assert whole(*findings, remedy=remedy)[1] == f"  loads here    no; this fixes {words}"
    lines = whole(finding("x", "a note", None, blocks=False), remedy=remedy)
    part = words.removeprefix("everything").removeprefix(", ")
    assert f"  all at once   {'in one command:' if part == ':' else part}" in lines


def test_needs_code_is_shown_only_if_nothing_else_tells_it(tmp_path: Path) -> None:
    """The fact 'needs code' is left out if the checkpoint loads, or if a finding is about code. It is shown if
    something else prevents loading, or if the verdict is open.
    """
    torch.save({"a": frozenset({1})}, tmp_path / "x.pt")
    refused = "\n".join(facts(inspect(tmp_path / "x.pt"), Style(80)))
    assert "needs code" not in refused
    assert refused.count("frozenset") == 1
    summary = judged(transformer(tmp_path))
    assert not any("needs code" in line for line in facts(summary, Style(80)))
    summary = replace(summary, loads_here=False)
    assert {"  loads here    no", "  needs code    no: only tensors and plain data"} <= {*facts(summary, Style(80))}
    unsure = judged(summary, finding("device", NPU, None, blocks=False))
    assert "  needs code    no: only tensors and plain data" in list(facts(unsure, Style(80)))


@pytest.mark.parametrize("width", [80, 200, None])
def test_many_facts_take_few_lines(width: int | None, tmp_path: Path) -> None:
    """Hundreds of state dicts, values and texts take at most five lines each, even with long names."""
    state = {"weight": torch.ones(2), "bias": torch.ones(2)}
    for name in ("x{}", "a/name of some words {0} " * 2, "y" * 3000 + "{}"):
        torch.save({name.format(i): state.copy() for i in range(300)}, tmp_path / "x.pt")
        summary = judged(inspect(tmp_path / "x.pt"))
        assert len(summary.state_dicts) == 300
        texts = {name.format(i): f"{i} text" * 30 for i in range(300)}
        summary = replace(summary, others=texts, metadata=texts)
        lines = list(facts(summary, Style(width)))
        for label in ("model", "values", "metadata"):
            first = next(i for i, line in enumerate(lines) if line.startswith(f"  {label}"))
            last = max(i for i, line in enumerate(lines) if line.startswith(f"  {label}"))
            while last + 1 < len(lines) and lines[last + 1].startswith(" " * 16):
                last += 1
            assert last - first < 5
            assert re.search(r"29\d\s+more", " ".join(lines[first : last + 1]))


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("most", range(4, 30))
def test_facts_fit_the_available_lines(width: int, most: int, tmp_path: Path) -> None:
    """If there are too many lines, the least important facts are left out and counted. The verdict and its command
    stay.
    """
    reasons = [finding("code", f"reason {i} of some words", None) for i in range(4)]
    notes = [finding("x", f"note {i}", f"{CONVERT} --drop x{i}", blocks=False) for i in range(4)]
    summary = judged(two_gpus(tmp_path), *reasons, finding("device", "no GPU", f"{CONVERT} --to cpu"), *notes)
    style = Style(width)
    whole, lines = list(facts(summary, style)), list(facts(summary, style, most=most))
    forced = next(i for i, line in enumerate(whole) if "reason 1" in line)
    assert lines[:forced] == whole[:forced]
    assert len(lines) <= max(most, forced + 1)
    if lines != whole:
        *kept, last = lines
        assert last == f"  … {count(len(whole) - len(kept), 'more line')} (--all shows them)"
        rest = iter(whole)
        assert all(line in rest for line in kept)  # in the same order
    command_stands = any("--to cpu" in line for line in lines)
    assert command_stands or not any("reason 1" in line or "note" in line for line in lines)


def test_shapes_of_empty_tensors_and_scalars(tmp_path: Path) -> None:
    """The shape of an empty tensor is a dash, in ASCII if required. The shape of a tensor without dimensions is
    'scalar'.
    """
    torch.save({"a": torch.ones(0, 3), "b": torch.tensor(1.0), "c": torch.ones(2, 3)}, tmp_path / "x.pt")
    tensors = inspect(tmp_path / "x.pt").tensors
    for unicode, shapes in ((True, ["–", "scalar", "2×3"]), (False, ["-", "scalar", "2x3"])):
        for width in (None, 80):
            drawn = list(table_lines(tensors, Style(width, unicode=unicode)))[0 if width is None else 2 :]
            assert [line.split()[2] for line in drawn] == shapes


def test_singular_and_plural(tmp_path: Path) -> None:
    """Texts use the singular for one name, parameter or tensor, and the plural for several."""
    base = torch.ones(3, 4)
    torch.save({"m": OrderedDict({"module.a": torch.ones(1)}), "v": base[1]}, tmp_path / "x.pt")
    one = "\n".join(facts(judged(inspect(tmp_path / "x.pt")), Style(None)))
    assert "m: 1 name, 1 parameter, 4 B, 1 starts with module.\n" in one
    assert "views         1 tensor is a slice of a larger storage, or transposed: v" in one
    state = OrderedDict({"module.a": torch.ones(1), "b": base.T, "c": base[:1], "module.d": torch.ones(1)})
    torch.save({"m": state}, tmp_path / "x.pt")
    two = "\n".join(facts(judged(inspect(tmp_path / "x.pt")), Style(None)))
    assert "m: 4 names, 18 parameters, 72 B, 2 start with module.\n" in two
    assert "2 tensors are slices of a larger storage, or transposed: m/b, m/c" in two


def pasted(lines: list[str]) -> list[list[str]]:
    """Return the words of the commands in `lines`, as a shell splits them."""
    text = "\n".join(line for line in lines if line.startswith("    ") and not line.startswith(" " * 16))
    return [shlex.split(line) for line in re.sub(r" \\\n +", " ", text).splitlines()]


@given(
    st.lists(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=50), max_size=8),
    st.integers(40, 200),
)
def test_commands_can_be_pasted(words: list[str], width: int) -> None:
    """A shell joins the lines of a wrapped command to the original words, including words with spaces and quotes."""
    words = [word for word in words if word.isprintable()]
    advice = Advice(kind="device", blocks=True, text="reason", command=command("convert", *words))
    words = ["ckptconv", "convert", *words]
    summary = judged(PLAIN, advice)
    lines = list(facts(summary, Style(width)))
    assert pasted(lines[2:3] if len(pasted(lines)) == 0 else lines) == [words]
    assert all(cells(line) <= width for line in lines if max(map(cells, map(shlex.quote, words))) < width - 10)


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="there is no bash")
def test_words_that_cannot_be_shown_are_escaped_for_the_shell() -> None:
    """Control characters in a path, and bytes that are not UTF-8, are escaped in the shell's syntax. bash turns the
    escapes into the path again.
    """
    for look in (Style(80), Style(80, unicode=False), Style(None)):
        for path in ("a\n\x1b[2J'b\\.pt", "x\udcffy\u202e.pt", "größe 层.pt", "\U000e0001", "größe\n.pt"):
            (line,) = command_lines(look, Command("convert", (path,)))
            assert line.isprintable()
            assert look.unicode or line.isascii()
            program = f'ckptconv() {{ printf %s "$2"; }}; {line}'
            done = subprocess.run(["/bin/bash", "-c", program], capture_output=True, env={"LC_ALL": "C.UTF-8"})
            assert os.fsdecode(done.stdout) == path


# Folding


def rows(tensors: list[TensorSummary]) -> list[tuple[str, int]]:
    return [(name, leaf.times) for name, leaf in leaves(tree_of(tensors, fold=True))]


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([f"layers.{i}.{n}" for i in range(32) for n in "ab"], [("layers.{0…31}.a", 32), ("layers.{0…31}.b", 32)]),
        ([f"h.{i}" for i in (0, 1, 2, 3, 5, 6)], [("h.{0…3,5,6}", 6)]),
        ([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)], [("l.{0…2}.e.{0…3}.w", 12)]),
        ([f"state[{i}]/exp_avg" for i in range(9)], [("state[0…8]/exp_avg", 9)]),
        ([f"h.{i}" for i in range(0, 20, 2)], [("h.{0,2,4,…,18}", 10)]),
        (
            [f"l.{i}.e.{j}" for i in range(3) for j in range(4) if (i, j) != (2, 1)],
            [("l.{0,1}.e.{0…3}", 8), ("l.2.e.{0,2,3}", 3)],
        ),
    ],
    ids=["names", "a gap", "two numbers", "brackets", "many gaps", "a layer without one of its experts"],
)
def test_equal_blocks_fold(names: list[str], folded: list[tuple[str, int]]) -> None:
    """Blocks with the same names, shapes and devices below numbers are one row. Gaps in the numbers are shown. Two
    numbers fold only if all their combinations exist.
    """
    assert rows([tensor(name) for name in names]) == folded


@pytest.mark.parametrize(
    "odd",
    [
        {"dtype": "float16"},
        {"shape": (3,)},
        {"device": "cuda:0"},
        {"kind": "sparse_coo"},
        {"nbytes": 1},
        {"tied_to": "x"},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_a_block_that_differs_stays_apart(odd: dict[str, Any]) -> None:
    """A block is not folded if one of its tensors has another dtype, shape, device, kind, size or tie."""
    tensors = [tensor(f"l.{i}.{n}", **(odd if (i, n) == (2, "b") else {})) for i in range(4) for n in "ab"]
    assert rows(tensors) == [("l.{0,1,3}.a", 3), ("l.{0,1,3}.b", 3), ("l.2.a", 1), ("l.2.b", 1)]


def test_names_without_separate_numbers_do_not_fold() -> None:
    """Numbers with leading zeros, numbers at the end of words, and string keys do not fold."""
    assert len(rows([tensor(name) for name in ("a.00", "a.0", "a1", "a2", "['1']", "['2']", "v1.x", "v2.x")])) == 8


@given(
    st.lists(
        st.lists(
            st.sampled_from(["0", "1", "2", "10", "a", "b", "[0]", "[1]", "a.", "", "\\.x"]), min_size=1, max_size=5
        ),
        max_size=40,
    ),
    st.data(),
)
def test_folded_rows_stand_for_each_tensor_once(names: list[list[str]], data: st.DataObject) -> None:
    """The unfolded rows contain each path once, with its shape. Without folding, each path has its own row."""
    paths = list(dict.fromkeys(".".join(name) or "." for name in names))
    shapes = {path: (data.draw(st.integers(1, 2)),) for path in paths}
    back: list[tuple[str, tuple[int, ...]]] = []
    for name, leaf in leaves(tree_of([tensor(path, shapes[path]) for path in paths], fold=True)):
        assert leaf.tensor is not None
        every = [(path, tuple(leaf.tensor.shape)) for path in unfolded(name)]
        assert len(every) == leaf.times
        back += every
    assert sorted(back) == sorted(shapes.items())
    plain = tree_of([tensor(path) for path in paths], fold=False)
    assert sorted(name for name, _ in leaves(plain)) == sorted(paths)


def unfolded(name: str) -> list[str]:
    match = re.search(r"\{([0-9,…]+)\}|(?<=\[)([0-9]+[,…][0-9,…]+)(?=\])", name)
    if match is None:
        return [name]
    numbers: list[int] = []
    for run in (match[1] or match[2]).split(","):
        first, _, last = run.partition("…")
        numbers += range(int(first), int(last or first) + 1)
    return [path for n in numbers for path in unfolded(name[: match.start()] + str(n) + name[match.end() :])]


def test_folded_rows_of_tree_and_table_count_all_tensors() -> None:
    """A folded branch shows the bytes of all its tensors. A folded row shows the shape of one tensor and the size of
    all. Limits and footers count rows and tensors.
    """
    tensors = [tensor(f"layers.{i}.{n}", (10,)) for i in range(32) for n in "ab"] + [tensor("z", (1000,))]
    lines = list(table_lines(tensors, Style(80)))
    assert lines[2].split() == ["layers.{0…31}.a", "×32", "float32", "10", "cpu", "1.28", "kB", "██▌"]
    assert lines[-1] == "  3 rows, 65 tensors: the shape of one ×N, the size of all (--all unfolds)"
    assert list(table_lines(tensors, Style(80), limit=1))[-1] == "  … 2 more rows, 33 more tensors (--all shows them)"
    assert list(table_lines(tensors, Style(80), by_size=True))[2].startswith("z ")
    assert len(list(table_lines(tensors, Style(80), fold=False))) == 2 + 65
    tree = list(tree_lines(tensors, Style(80)))
    assert tree[2].split() == ["layers.0", "…", "layers.31", "×32", "64", "tensors", "2.56", "kB", "39%", "█████▏"]
    assert next(iter(table_lines(tensors, Style()))) == "layers.0.a\tfloat32\t10\tcpu\t40"
    assert len(list(table_lines(tensors, Style()))) == 65


def test_deep_names_do_not_make_a_deep_tree() -> None:
    """A name with thousands of dots is drawn without its middle. Branches that are deeper than the terminal is wide
    stay within its width.
    """
    levels = [tensor("a." * i + name) for i in range(60) for name in "bc"]
    assert max(map(cells, tree_lines(levels, Style(80)))) <= 80
    lines = list(tree_lines([tensor("a." * 5000 + "b"), tensor("a." * 5000 + "c")], Style(80)))
    assert len(lines) < 40
    assert max(map(cells, lines)) <= 80


def test_names_sort_as_people_count() -> None:
    """Numbers in names are sorted by value, so layer 2 comes before layer 10. They may have thousands of digits."""
    names = ["l.10", "l.2", "l.02", "l.1", "a", "l." + "9" * 5000]
    assert sorted(names, key=natural) == ["a", "l.1", "l.2", "l.02", "l.10", "l." + "9" * 5000]


# Widths

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=80) | st.text("ab./ 层́[]0", min_size=1, max_size=120)


@given(st.lists(NAMES, min_size=1, max_size=6, unique=True), st.integers(40, 200), st.booleans(), st.data())
def test_no_line_is_wider_than_the_terminal(names: list[str], width: int, unicode: bool, data: st.DataObject) -> None:
    """For any names, devices, shapes and texts, the table, the tree and the facts stay within the width. They are ASCII
    if Unicode is not available.
    """
    long = st.lists(st.integers(0, 10**6), max_size=12).map(tuple)
    tensors = [
        tensor(
            name,
            data.draw(long),
            device=data.draw(st.sampled_from(["cpu", "cuda:0", name])),
            tied_to=data.draw(st.sampled_from([None, name])),
        )
        for name in names
    ]
    look = Style(width, unicode=unicode)
    summary = judged(PLAIN, finding("device", " ".join(names), None), finding("x", names[0], None, blocks=False))
    if data.draw(st.booleans()):
        summary = judged(summary, finding("device", names[0], None, blocks=False))
    texts = dict(zip(names, names, strict=True))
    seen = tuple(names)
    summary = replace(summary, path=names[0] * 3, notes=seen, views=seen, others=texts, metadata=texts)
    for line in (*facts(summary, look), *table_lines(tensors, look), *tree_lines(tensors, look)):
        assert cells(line) <= width
        assert line.isprintable()
        assert line == line.rstrip()
        assert unicode or line.isascii()


@given(NAMES, st.integers(6, 60))
def test_broken_names_are_complete(name: str, room: int) -> None:
    """The lines of a broken name contain the complete name. A word is broken only if it is wider than a line."""
    name = Style().text(name)
    lines = broken(name, room, hanging=2)
    assert all(line[:2] == "  " for line in lines[1:])
    assert "".join([lines[0], *(line[2:] for line in lines[1:])]).replace(" ", "") == name.replace(" ", "")
    assert broken("a.bcd.efghijk", 6, hanging=2) == ["a.bcd.", "  efgh", "  ijk"]


def test_sizes_keep_their_units() -> None:
    """A line of a report does not end between a number and its unit."""
    changes = Changes()
    changes.devices = {("cuda:0", "cpu"): (290, 2_100_000_000)}
    notes = ("2.1 GB of 2.1 GB are in 2.1 GB",)
    report = make_report(dst="b" * 30, size=2_100_000_000, changes=changes, notes=notes, seconds=1.0, written=True)
    for width in range(40, 100):
        lines = list(report_lines(report, Style(width)))
        assert not re.search(r"\d\n *[kMGT]?B", "\n".join(lines))
        assert max(map(cells, lines)) <= width
    assert "devices       cuda:0 → cpu: 290 tensors, 2.1 GB" in "\n".join(report_lines(report))
    assert "devices       cuda:0 -> cpu: 290 tensors" in "\n".join(report_lines(report, Style(80, unicode=False)))
    assert wrapped("one two three", 7) == ["one two", "three"]


# Colors


def on_a_terminal(path: Path, **env: str) -> str:
    """Return the output of ``inspect`` for `path` in a terminal of 80 columns, with the variables `env`."""
    master, slave = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptconv", "inspect", str(path)],
        stdout=slave,
        env={**clean, "COLUMNS": "80", "TERM": "xterm", **env},
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux reports a closed other end in this way
            break
        if not part:
            break
        written += part
    os.close(master)
    assert process.wait() == 0
    return written.decode().replace("\r\n", "\n")


def test_colours_are_for_terminals(fixtures: Path) -> None:
    """Output is colored only in a terminal, and not with NO_COLOR or in a dumb terminal. Without colors, the text is
    the same, within 80 columns.
    """
    file = fixtures / "two_gpus.pt"
    coloured = on_a_terminal(file)
    plain = on_a_terminal(file, NO_COLOR="1")
    assert "\x1b[33mcuda:1" in coloured
    assert "\x1b" not in plain
    assert "\x1b" not in on_a_terminal(file, TERM="dumb")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert max(map(cells, plain.splitlines())) <= 80
    assert "█" in plain
    ascii_only = on_a_terminal(file, PYTHONIOENCODING="ascii", NO_COLOR="1")
    assert ascii_only.isascii()
    assert "2x1x3x3" in ascii_only
    done = subprocess.run([sys.executable, "-m", "ckptconv", "inspect", str(file)], capture_output=True, check=True)
    assert b"\x1b" not in done.stdout


def test_tables_do_not_import_rich(fixtures: Path) -> None:
    """A table for a terminal is drawn without an import of rich."""
    code = (
        "import sys; from ckptconv.inspection.summary import inspect; from ckptconv.render.summary import facts;"
        " from ckptconv.render.table import table_lines; from ckptconv.render.text import Style\ns ="
        f" inspect({str(fixtures / 'resnet18.pt')!r}); n = len([*facts(s, Style(80)), *table_lines(s.tensors,"
        " Style(80))])\nassert n > 20; assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PLAIN = inspect(FIXTURES / "cpu.pt")
