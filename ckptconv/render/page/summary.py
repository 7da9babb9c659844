"""Compute the data of the page of a checkpoint: facts as texts, and tensors in columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, size
from ckptconv.hints import Command, Option, command_line
from ckptconv.lazy_regex import regex
from ckptconv.render.page import (
    LONGEST,
    MOST,
    bars,
    columns,
    largest,
    listed,
    shape_words,
    typed,
    values_numbers,
    words,
)
from ckptconv.render.text import first_of
from ckptconv.render.values import counted_words

if TYPE_CHECKING:
    from ckptconv.inspection.summary import Part, Summary, TensorSummary

#: The verdict for a page whose verdict is displayed elsewhere.
NO_VERDICT: dict[str, Any] = {"good": None, "text": "", "danger": [], "findings": [], "remedy": None}
_PARTS, _OTHERS, _ALONE = 12, 24, 3
_GROUP = regex(r"(.*?)param_groups\[(\d+)\]/([^/\[]+)")


def summary_data(summary: Summary, most: int | None = None) -> dict[str, Any]:
    """Return the data of the page of `summary`, with the `most` largest tensors (None: all)."""
    tensors, left_out = largest(summary.tensors, most)
    src = Path(summary.path)
    inside = [each for each in summary.optimizers if each.path != "."]
    unsure = [each for each in inside if not (each.has_names and len(each.models) == 1 and each.shapes_agree)]
    without = [Option("drop", each.path) for each in unsure]  # it cannot follow some of its weights
    return {
        "title": summary.path,
        "named": any(state_dict.path == "." for state_dict in summary.state_dicts),  # then globs match names
        "verdict": _verdict(summary),
        "facts": [*_facts(summary), *left_out],
        "tables": _hyperparameters(summary),
        "lists": _lists(summary, tensors),
        "smaller": [{"text": text[:LONGEST], "command": typed} for text, typed in _smaller(summary)],
        "maps": ["Map"],
        "optimizers": [each.path + "/" for each in inside],  # whose tensors follow weights, and no globs
        "commands": [
            typed("path", "Save only this part", Command("convert", (src, "part.pt")), "select"),
            typed("path", "Save everything else", Command("convert", (src, "rest.pt")), "drop"),
            typed("glob", "Save only this", Command("convert", (src, "part.pt", *without)), "include"),
            typed("glob", "Save everything else", Command("convert", (src, "rest.pt", *without)), "exclude"),
        ],
        "tensors": _columns(summary, tensors),
    }


def _verdict(summary: Summary) -> dict[str, Any]:
    """Return whether the checkpoint loads here, the findings, and the command that fixes them."""
    says = {
        True: "It loads on this machine: torch.load takes it as it is.",
        False: "It does not load on this machine as it is.",
        None: "Whether it loads on this machine is not known"
        + (f": torch {summary.torch_load.other_torch} is here." if summary.torch_load.other_torch else "."),
    }
    danger = [each.text for each in summary.findings if each.kind == "dangerous"]
    return {
        "good": summary.loads_here,
        "text": "" if danger else says[summary.loads_here],
        "danger": danger,
        "findings": [
            {"text": str(each.text)[:LONGEST], "command": each.command and str(each.command)}
            for each in summary.findings[:MOST]
            if each.kind != "dangerous"
        ],
        "remedy": summary.remedy and str(summary.remedy),
    }


def _facts(summary: Summary) -> list[tuple[str, str]]:
    """Return the facts of the page, as pairs of a label and a text."""
    parts = [
        f"{_part(part)}: {count(part.tensors, 'tensor')}, {_share(part.nbytes, summary)}" for part in summary.parts
    ]
    others = [f"{path}: {value}" for path, value in summary.others.items() if not _GROUP.fullmatch(path)]
    shares = [(name, share.tensors, share.nbytes) for name, share in summary.dtypes.items()]
    facts = [
        ("format", f"{summary.format}, {size(summary.size)}"),
        ("tensors", f"{count(len(summary.tensors), 'tensor')}, {size(summary.nbytes)}"),
        ("parameters", _parameters(summary)),
        ("parts", "; ".join(first_of(parts, _PARTS)) if len(parts) > 1 else ""),
        ("dtypes", ", ".join(f"{name} ×{n:,} ({size(nbytes)})" for name, n, nbytes in shares)),
        ("devices", ", ".join(summary.devices) or "none stored"),
        ("other values", "; ".join(first_of(others, _OTHERS))[:LONGEST]),
        ("safety", summary.safety),
    ]
    if summary.has_values and not any(each.values and each.values.nan + each.values.inf for each in summary.tensors):
        facts.append(("NaN or inf", "none"))
    facts += [("note", str(note)[:LONGEST]) for note in summary.notes[:MOST]]
    return [(label, text) for label, text in facts if text]


def _hyperparameters(summary: Summary) -> list[dict[str, Any]]:
    """Return a table for each optimizer, with a row for each of its groups of parameters."""
    optimizers: dict[str, dict[str, dict[str, str]]] = {}
    for path, value in summary.others.items():
        if match := _GROUP.fullmatch(path):
            optimizer, group, name = match.groups()
            optimizers.setdefault(optimizer, {}).setdefault(group, {})[name] = value
    tables = []
    for optimizer, groups in [*optimizers.items()][:_PARTS]:
        names = [*dict.fromkeys(chain.from_iterable(groups.values()))][:_OTHERS]
        rows = [[group, *(said.get(name, "") for name in names)] for group, said in [*groups.items()][:_PARTS]]
        left = len(groups) - len(rows)
        rows += [[f"… {left:,} more", *("" for _ in names)]] if left else []
        tables.append({"label": optimizer.rstrip("/") or "optimizer", "heads": ["group", *names], "rows": rows})
    return tables


def _part(part: Part) -> str:
    """Return the kind and path of `part` as text."""
    said = part.path.casefold() in ("", ".", part.kind.casefold())
    return part.kind if said else f"{part.kind} at {part.path}"


def _share(nbytes: int, summary: Summary) -> str:
    """Return `nbytes` as text, with their share of the bytes of all tensors."""
    return f"{size(nbytes)} ({100 * nbytes / max(summary.nbytes, 1):.3g} %)"


def _parameters(summary: Summary) -> str:
    """Return the number of elements of the tensors as text, in all and by kind of group."""
    part_of = _parts(summary)
    numbers: Counter[str] = Counter()
    for tensor in summary.tensors:
        if tensor.tied_to is None:
            numbers[part_of(tensor)] += prod(tensor.shape)
    of_each = ", ".join(f"{kind} {n:,}" for kind, n in numbers.most_common()) if len(numbers) > 1 else ""
    return f"{numbers.total():,} numbers, shared ones counted once{of_each and ': '}{of_each}"


def _smaller(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield pairs of a text and a command that selects a part, or leaves parts out.

    The text contains the resulting size.
    """
    if len(summary.parts) < 2:
        return
    src, places = Path(summary.path), {state_dict.path for state_dict in summary.state_dicts}
    alone = [part for part in summary.parts if part.kind == "model" and part.path in places and part.path != "."]
    for part in alone[:_ALONE]:
        typed = command_line("convert", src, Path("part.pt"), Option("select", part.path))
        yield f"only {_part(part)}: {_share(part.nbytes, summary)}", str(typed)
    gone = [part for part in summary.parts if part.kind in ("optimizer", "EMA") and part.path not in ("", ".")]
    left = [part for part in summary.parts if part not in gone]
    if gone and len(gone) <= _PARTS and any(part.kind == "model" for part in left):
        nbytes = sum(part.nbytes for part in left)
        most = (
            "" if sum(part.nbytes for part in summary.parts) == summary.nbytes else "at most "
        )  # parts can share tensors
        typed = command_line("convert", src, Path("rest.pt"), *(Option("drop", part.path) for part in gone))
        less = f"without {' and '.join(map(_part, gone))}: {most}{_share(nbytes, summary)}"
        yield f"{less}, unless other parts use the same tensors", str(typed)


def _lists(summary: Summary, tensors: Sequence[TensorSummary]) -> list[dict[str, Any]]:
    """Return the lists of tied tensors, and of tensors with NaN or infinities."""
    numbers = {tensor.path: i for i, tensor in enumerate(tensors)}
    ties = [[numbers[path] for path in tie if path in numbers] for tie in summary.ties]
    bad, says = [], []
    for i, tensor in enumerate(tensors):
        values = tensor.values
        if values and values.nan + values.inf and tensor.tied_to not in numbers:
            bad.append([i])
            says.append(counted_words(values))
    lists = [
        listed("tied", [tie for tie in ties if len(tie) > 1]),
        listed("NaN or inf", bad, says, bad=True),
    ]
    return [each for each in lists if each]


def _columns(summary: Summary, tensors: Sequence[TensorSummary]) -> dict[str, Any]:
    """Return the data of `tensors` in columns."""
    part_of = _parts(summary)
    values = [tensor.values for tensor in tensors]
    facts = [
        words("dtype", (t.dtype + ("" if t.kind == "strided" else f" ({t.kind})") for t in tensors), colour=True),
        words("shape", (shape_words(tensor.shape) for tensor in tensors)),
        words("stride", (_stride(tensor) for tensor in tensors), table=False),
        words("device", (tensor.device or "none stored" for tensor in tensors), colour=True),
        words("part", (part_of(tensor) for tensor in tensors), table=False, colour=True),
        words("stored", (_stored(tensor) for tensor in tensors), table=False),
        *(values_numbers(values) if summary.has_values else []),
    ]
    return columns(
        tensors,
        [tensors],
        facts,
        storage=[tensor.storage for tensor in tensors],
        histograms=bars("", (each.histogram if each else None for each in values)),
    )


def _parts(summary: Summary) -> Any:
    """Return a function that returns the kind of the group (such as "model") that a tensor belongs to."""
    rng = set(summary.rng_states)
    parts = sorted(((part.path, part.kind) for part in summary.parts), key=lambda part: -len(part[0]))

    def part_of(tensor: TensorSummary) -> str:
        if tensor.path in rng:
            return "RNG states"
        for path, kind in parts:
            if path and (path == "." or tensor.path.startswith((path + "/", path + "["))):
                return kind
        return "other"

    return part_of


def _stride(tensor: TensorSummary) -> str:
    """Return the stride of `tensor` as text, and whether its elements are contiguous."""
    step, strides = 1, ", ".join(map(str, tensor.stride))
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        if stride != step and n > 1:
            return strides
        step *= n
    return f"{strides} (contiguous)" if strides else "contiguous"


def _stored(tensor: TensorSummary) -> str | None:
    """Return a text about the storage of `tensor`. None if the storage has the same size as the tensor."""
    if tensor.storage_nbytes is None or tensor.storage_nbytes == tensor.nbytes:
        return None
    return f"in a storage of {size(tensor.storage_nbytes)}, from element {tensor.offset:,}"
