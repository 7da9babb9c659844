"""What a page shows, as data: the facts as texts, and the tensors in columns, so that a page of thousands is small."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, size

if TYPE_CHECKING:
    from ckptconv.inspection.summary import Summary, TensorSummary

__all__ = ["summary_data"]

_DIGITS = 6  # of the numbers that a page shows
_SHOWN = 40  # notes and findings
_LONGEST = 1000  # characters of a text that is no name


def summary_data(summary: Summary) -> dict[str, Any]:
    """The page of `summary`."""
    return {
        "path": summary.path,
        "named": any(found.path == "." for found in summary.state_dicts),  # so that globs mean names
        "verdict": _verdict(summary),
        "facts": _facts(summary),
        "tensors": _columns(summary),
    }


def _verdict(summary: Summary) -> dict[str, Any]:
    """What inspect says first: whether it loads here, what is in the way, and what to type."""
    words = {
        True: "It loads on this machine: torch.load takes it as it is.",
        False: "It does not load on this machine as it is.",
        None: "Whether it loads on this machine is not known.",
    }
    return {
        "good": summary.loads_here,
        "text": words[summary.loads_here],
        "findings": [
            {"text": str(each.text)[:_LONGEST], "command": each.command and str(each.command), "blocks": each.blocks}
            for each in summary.findings[:_SHOWN]
        ],
        "remedy": summary.remedy and str(summary.remedy),
    }


def _facts(summary: Summary) -> list[tuple[str, str]]:
    untied = [tensor for tensor in summary.tensors if tensor.tied_to is None]
    shares = [(name, share.tensors, share.nbytes) for name, share in summary.dtypes.items()]
    found = [
        ("format", f"{summary.format}, {size(summary.size)}"),
        ("tensors", f"{count(len(summary.tensors), 'tensor')}, {size(summary.nbytes)}"),
        ("parameters", f"{sum(prod(tensor.shape) for tensor in untied):,} numbers, ties once"),
        ("dtypes", ", ".join(f"{name} ×{n:,} ({size(nbytes)})" for name, n, nbytes in shares)),
        ("devices", ", ".join(summary.devices) or "none stored"),
        ("ties", f"{count(len(summary.ties), 'group')} of names that are one tensor" if summary.ties else ""),
        ("safety", summary.safety),
    ]
    found += [("note", str(note)[:_LONGEST]) for note in summary.notes[:_SHOWN]]
    return [(label, text) for label, text in found if text]


class _Words:
    """Different values, each with a number."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, word: Hashable) -> int:
        return self.numbers.setdefault(word, len(self.numbers))

    @property
    def words(self) -> list[Hashable]:
        return [*self.numbers]


def _columns(summary: Summary) -> dict[str, Any]:
    """The tensors: for each fact an array, in which what repeats is a number."""
    tensors = summary.tensors
    dtypes, devices, parts, shapes = _Words(), _Words(), _Words(), _Words()
    places = {tensor.path: i for i, tensor in enumerate(tensors)}
    part_of = _parts(summary)
    columns: dict[str, Any] = {
        "paths": _front_coded([tensor.path for tensor in tensors]),
        "dtype": [dtypes.number(t.dtype + ("" if t.kind == "strided" else f" ({t.kind})")) for t in tensors],
        "device": [devices.number(tensor.device or "none stored") for tensor in tensors],
        "part": [parts.number(part_of(tensor)) for tensor in tensors],
        "shape": [shapes.number(tensor.shape) for tensor in tensors],
        "stride": [0 if _is_contiguous(tensor) else list(tensor.stride) for tensor in tensors],
        "offset": [tensor.offset for tensor in tensors],
        "nbytes": [tensor.nbytes for tensor in tensors],
        "storage": [tensor.storage for tensor in tensors],
        "stored": [0 if tensor.storage_nbytes == tensor.nbytes else tensor.storage_nbytes for tensor in tensors],
        "tied": [places.get(tensor.tied_to, -1) if tensor.tied_to else -1 for tensor in tensors],
        "dtypes": dtypes.words,
        "devices": devices.words,
        "parts": parts.words,
        "shapes": shapes.words,
    }
    if summary.has_values:
        columns["values"] = [_values(tensor) for tensor in tensors]
    return columns


def _front_coded(paths: Sequence[str]) -> list[Any]:
    """For each path how many characters it begins with as the one before it does, and the rest."""
    found: list[Any] = []
    before = ""
    for path in paths:
        shared = commonprefix([before, path])  # noqa: RUF071 - of texts, not of paths
        same = len(shared) if shared.isascii() else 0  # the page counts other characters otherwise
        found += [same, path[same:]]
        before = path
    return found


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


def _is_contiguous(tensor: TensorSummary) -> bool:
    step = 1
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        if stride != step and n > 1:
            return False
        step *= n
    return True


def _values(tensor: TensorSummary) -> list[Any] | None:
    """The values of `tensor` in the order in which the page has them, with few digits; infinities as texts."""
    if (values := tensor.values) is None:
        return None
    numbers = [values.nan, values.inf, values.zeros, values.min, values.max, values.mean, values.std, values.norm]
    found: list[Any] = [_rounded(number) for number in numbers]
    if values.histogram:
        found.append([_rounded(values.histogram.edges[-1]), *values.histogram.counts])
    return found


def _rounded(number: float | int | None) -> float | int | str | None:
    if not isinstance(number, float):
        return number if number is None or abs(number) < 2**53 else str(number)
    short = float(f"{number:.{_DIGITS}g}")
    return short if abs(short) != float("inf") else str(short)
