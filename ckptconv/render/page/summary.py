"""What the page of a checkpoint shows, as data: the facts as texts, and the tensors in columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, size
from ckptconv.hints import Command
from ckptconv.render.page.columns import (
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

if TYPE_CHECKING:
    from ckptconv.inspection.summary import Summary, TensorSummary

__all__ = ["NO_VERDICT", "summary_data"]

#: In place of a verdict, where it stands elsewhere.
NO_VERDICT: dict[str, Any] = {"good": None, "text": "", "findings": [], "remedy": None}
_PARTS, _OTHERS = 12, 24


def summary_data(summary: Summary, most: int | None = None) -> dict[str, Any]:
    """The page of `summary`, or of as many of its tensors as `most` says, the largest."""
    tensors, left_out = largest(summary.tensors, lambda tensor: tensor.nbytes, most)
    src = Path(summary.path)
    return {
        "title": summary.path,
        "named": any(found.path == "." for found in summary.state_dicts),  # so that globs mean names
        "verdict": _verdict(summary),
        "facts": [*_facts(summary), *left_out],
        "lists": _lists(summary, tensors),
        "maps": ["Map"],
        "commands": [
            typed("path", "Take this part alone", Command("convert", (src, "part.pt")), "select"),
            typed("path", "Leave it out", Command("convert", (src, "rest.pt")), "drop"),
            typed("glob", "Take this alone", Command("convert", (src, "part.pt")), "include"),
            typed("glob", "Leave it out", Command("convert", (src, "rest.pt")), "exclude"),
        ],
        "tensors": _columns(summary, tensors),
    }


def _verdict(summary: Summary) -> dict[str, Any]:
    """What inspect says first: whether it loads here, what is in the way, and what to type."""
    says = {
        True: "It loads on this machine: torch.load takes it as it is.",
        False: "It does not load on this machine as it is.",
        None: "Whether it loads on this machine is not known.",
    }
    return {
        "good": summary.loads_here,
        "text": says[summary.loads_here],
        "findings": [
            {"text": str(each.text)[:LONGEST], "command": each.command and str(each.command)}
            for each in summary.findings[:MOST]
        ],
        "remedy": summary.remedy and str(summary.remedy),
    }


def _facts(summary: Summary) -> list[tuple[str, str]]:
    untied = [tensor for tensor in summary.tensors if tensor.tied_to is None]
    parts = [
        f"{part.kind}{f' at {part.path}' if part.path not in ('', '.') else ''}:"
        f" {count(part.tensors, 'tensor')}, {size(part.nbytes)}"
        for part in summary.parts
    ]
    others = [f"{path}: {value}" for path, value in summary.others.items()]
    shares = [(name, share.tensors, share.nbytes) for name, share in summary.dtypes.items()]
    found = [
        ("format", f"{summary.format}, {size(summary.size)}"),
        ("tensors", f"{count(len(summary.tensors), 'tensor')}, {size(summary.nbytes)}"),
        ("parameters", f"{sum(prod(tensor.shape) for tensor in untied):,} numbers, ties once"),
        ("parts", "; ".join(first_of(parts, _PARTS)) if len(parts) > 1 else ""),
        ("dtypes", ", ".join(f"{name} ×{n:,} ({size(nbytes)})" for name, n, nbytes in shares)),
        ("devices", ", ".join(summary.devices) or "none stored"),
        ("ties", f"{count(len(summary.ties), 'group')} of names that are one tensor" if summary.ties else ""),
        ("no tensors", "; ".join(first_of(others, _OTHERS))[:LONGEST]),
        ("safety", summary.safety),
    ]
    if summary.has_values and not any(each.values and each.values.nan + each.values.inf for each in summary.tensors):
        found.append(("NaN or inf", "none"))
    found += [("note", str(note)[:LONGEST]) for note in summary.notes[:MOST]]
    return [(label, text) for label, text in found if text]


def _lists(summary: Summary, tensors: Sequence[TensorSummary]) -> list[dict[str, Any]]:
    """What is tied, and what is not finite."""
    numbers = {tensor.path: i for i, tensor in enumerate(tensors)}
    ties = [[numbers[path] for path in tie if path in numbers] for tie in summary.ties]
    bad, says = [], []
    for i, tensor in enumerate(tensors):
        values = tensor.values
        if values and values.nan + values.inf and tensor.tied_to not in numbers:
            bad.append([i])
            says.append(", ".join(f"{n:,} {word}" for n, word in ((values.nan, "NaN"), (values.inf, "inf")) if n))
    found = [
        listed("tied", [tie for tie in ties if len(tie) > 1]),
        listed("NaN or inf", bad, says, bad=True),
    ]
    return [each for each in found if each]


def _columns(summary: Summary, tensors: Sequence[TensorSummary]) -> dict[str, Any]:
    places = {tensor.path: i for i, tensor in enumerate(tensors)}
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
        [tensor.path for tensor in tensors],
        [[(tensor.shape, tensor.nbytes) for tensor in tensors]],
        [places.get(tensor.tied_to, -1) if tensor.tied_to else -1 for tensor in tensors],
        facts,
        storage=[tensor.storage for tensor in tensors],
        histograms=bars("", (each.histogram if each else None for each in values)),
    )


def _parts(summary: Summary) -> Any:
    """A function that names the part that a tensor belongs to."""
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
    """The stride, or that the elements stand in their order."""
    step = 1
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        if stride != step and n > 1:
            return ", ".join(map(str, tensor.stride))
        step *= n
    return "contiguous"


def _stored(tensor: TensorSummary) -> str | None:
    """What is stored beside the elements, None where that is nothing."""
    if tensor.storage_nbytes is None or tensor.storage_nbytes == tensor.nbytes:
        return None
    return f"in a storage of {size(tensor.storage_nbytes)}, from element {tensor.offset:,}"
