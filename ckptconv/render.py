"""Draw a summary or a report as text. A table with borders on a terminal, plain lines elsewhere; names are escaped before they get out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptconv.errors import printable

if TYPE_CHECKING:
    from ckptconv.model import LeftBehind, NameChange, Report
    from ckptconv.summary import Summary, TensorSummary

__all__ = ["facts", "report_lines", "size", "table_lines", "tree_lines", "wrapped"]

_INDENT = "  "
_LABEL = 14  # columns
_SHOWN = 5  # paths in one fact
_LONGEST = 60  # characters of a text from the file


def size(nbytes: int) -> str:
    """NBYTES in the decimal units that disks and the Hub use."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = next((power for power in (1, 2, 3) if nbytes < 999.5 * 1000**power), 4)
    return f"{nbytes / 1000**power:.3g} {' kMGT'[power]}B"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _fact(label: str, text: str) -> str:
    return f"{_INDENT}{label:<{_LABEL}}{printable(text)}"


def wrapped(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """LINES of facts folded to WIDTH columns, what is folded standing below the text and not below the label."""
    for line in lines:
        if width is None or len(line) <= width:
            yield line
        else:
            hanging = " " * (len(_INDENT) + _LABEL) if line.startswith(_INDENT) else _INDENT
            yield from textwrap.wrap(
                line, max(width, 40), subsequent_indent=hanging, drop_whitespace=True, break_on_hyphens=False
            )


def _some(paths: Iterable[str]) -> str:
    every = list(paths)
    more = f", … {len(every) - _SHOWN:,} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


# Summary


def facts(summary: Summary) -> Iterator[str]:
    """The first screen: what it is, how much, where, and what stands in the way."""
    yield printable(f"{summary['path']}: {summary['format']}, {size(summary['size'])}")
    yield _fact(
        "tensors",
        f"{len(summary['tensors']):,} in {_count(summary['storages'], 'storage')}, {size(summary['nbytes'])} ({size(summary['stored_nbytes'])} stored)",
    )
    for label, shares in (("dtypes", summary["dtypes"]), ("devices", summary["devices"])):
        if shares:
            yield _fact(
                label,
                ", ".join(f"{name} ×{share['tensors']:,} ({size(share['nbytes'])})" for name, share in shares.items()),
            )
    if summary["protocol"] is None:
        yield _fact("devices", "none stored: whoever loads it says where to")
    for found in summary["state_dicts"]:
        yield _fact(
            "state dict",
            f"{found['path']}: {_count(found['names'], 'name')}, {found['parameters']:,} parameters"
            + _prefix(found["prefixes"], found["names"]),
        )
    for tie in summary["ties"][:_SHOWN]:
        yield _fact("tied", " = ".join(tie[:_SHOWN]) + (" …" if len(tie) > _SHOWN else ""))
    if len(summary["ties"]) > _SHOWN:
        yield _fact("tied", f"… {len(summary['ties']) - _SHOWN:,} more")
    if summary["views"]:
        yield _fact("views", f"{len(summary['views']):,} of larger storages or strided: {_some(summary['views'])}")
    if summary["rng_states"]:
        yield _fact("RNG states", _some(summary["rng_states"]))
    if summary["user_devices"]:
        yield _fact(
            "device values",
            _some(f"{path} = {device}" for path, device in summary["user_devices"].items()) + " (data: never changed)",
        )
    if summary["globals"]:
        yield _fact("globals", _some(summary["globals"]))
    yield from _safety(summary)
    if summary["metadata"]:
        yield _fact("metadata", _some(f"{key} = {text[:_LONGEST]}" for key, text in summary["metadata"].items()))
    for note in summary["notes"]:
        yield _fact("note", note)
    others = sorted(
        summary["others"].items(), key=lambda item: item[0].count("/")
    )  # an epoch before an optimizer's betas
    for path, value in others[: 2 * _SHOWN]:
        yield _fact("other", f"{path} = {value}")
    if len(others) > 2 * _SHOWN:
        yield _fact("other", f"… {len(others) - 2 * _SHOWN:,} more (--json lists all)")


def _prefix(prefixes: dict[str, int], names: int) -> str:
    """What most names start with, if that looks like a wrapper's doing: one first segment for all of them."""
    for prefix, count in prefixes.items():
        if count == names:
            return f", all start with {prefix}"
        if prefix in ("module.", "_orig_mod."):
            return f", {count:,} start with {prefix}"
    return ""


def _safety(summary: Summary) -> Iterator[str]:
    if summary["dangerous"]:
        yield _fact("DANGEROUS", f"names {_some(summary['dangerous'])}, which no checkpoint needs")
    if summary["protocol"] is None:
        yield _fact("loads safely", "yes: the format holds no code")
    elif summary["weights_only"]:
        yield _fact("loads safely", "yes: torch.load(weights_only=True) takes it")
    else:
        reasons = (f"{reason} ×{n:,}" if n > 1 else reason for reason, n in summary["obstacles"].items())
        yield _fact("loads safely", f"no: torch.load(weights_only=True) refuses {_some(reasons)}")


def _shape(tensor: TensorSummary) -> str:
    return "×".join(map(str, tensor["shape"])) or "scalar"


def _row(tensor: TensorSummary) -> tuple[str, str, str, str, str]:
    kind = "" if tensor["kind"] == "strided" else f" ({tensor['kind']})"
    tied = f" = {tensor['tied_to']}" if tensor["tied_to"] else ""
    return (
        printable(tensor["path"] + tied),
        tensor["dtype"] + kind,
        _shape(tensor),
        printable(tensor["device"] or "-"),
        size(tensor["nbytes"]),
    )


def table_lines(tensors: list[TensorSummary], *, terminal_width: int | None) -> Iterator[str]:
    """The tensor table: drawn for a terminal of that width, else a line for each tensor with tabs between its columns."""
    if terminal_width is None:
        for tensor in tensors:
            yield "\t".join((*_row(tensor)[:4], str(tensor["nbytes"])))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("tensor", overflow="fold", ratio=None)
    for heading in ("dtype", "shape", "device"):
        table.add_column(heading, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for tensor in tensors:
        table.add_row(*map(Text, _row(tensor)))
    console = Console(width=terminal_width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    yield from (line.rstrip() for line in capture.get().splitlines())


# Tree


class _Branch:
    """A level of the tree: what is below it, and the tensors and bytes in all of that."""

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.tensor: TensorSummary | None = None
        self.tensors = 0
        self.nbytes = 0


def tree_lines(tensors: list[TensorSummary]) -> Iterator[str]:
    """The tensors as a tree: of paths, and of the modules that dots in names make."""
    root = _Branch()
    for tensor in tensors:
        at = root
        for segment in _segments(tensor):
            at = at.below.setdefault(segment, _Branch())
            at.tensors += 1
            at.nbytes += tensor["nbytes"] if tensor["tied_to"] is None else 0
        at.tensor = tensor
    todo = [("", name, branch) for name, branch in reversed(root.below.items())]
    while todo:
        indent, name, branch = todo.pop()
        while branch.tensor is None and len(branch.below) == 1:
            inner, branch = next(iter(branch.below.items()))
            name += inner
        if branch.tensor is not None:
            _, dtype, shape, device, nbytes = _row(branch.tensor)
            yield f"{indent}{printable(name)}  {dtype} {shape} {device} {nbytes}"
        else:
            yield f"{indent}{printable(name)}  {_count(branch.tensors, 'tensor')}, {size(branch.nbytes)}"
        todo += [(indent + "  ", inner, below) for inner, below in reversed(branch.below.items())]


def _segments(tensor: TensorSummary) -> list[str]:
    from ckptconv.names import parse_path

    segments = [segment.removeprefix("/") for segment in parse_path(tensor["path"])] or ["."]
    name = tensor["name"] or ""
    if "." in name.strip(".") and segments[-1].endswith(name):
        parts = segments.pop().split(".")
        segments += [part + "." for part in parts[:-1]] + parts[-1:]
    return [
        segment + "/" if i + 1 < len(segments) and not segment.endswith(".") else segment
        for i, segment in enumerate(segments)
    ]


# Report


def report_lines(report: Report, *, every_name: bool = False) -> Iterator[str]:
    """What a conversion did, or, after a dry run, would do."""
    changes = report.changes
    done = (
        f"{size(report.size)} written in {report.seconds:.2f} s"
        if report.written
        else f"would write {size(report.size)}"
    )
    old_format, new_format = report.formats
    yield printable(f"{report.dst}: {new_format}, {done}")
    if old_format != new_format:
        yield _fact("format", f"{old_format} → {new_format}")
    for (old, new), (tensors, nbytes) in changes.devices.items():
        old = "none stored" if old_format == "safetensors" else old
        yield _fact("devices", f"{old} → {new}: {_count(tensors, 'tensor')}, {size(nbytes)}")
    yield from _name_lines(changes.names, every_name)
    if changes.unprefixed:
        yield _fact("names", f"{_count(changes.unprefixed, 'name')} without the prefix stayed as they were")
    if changes.rng_states:
        yield _fact(
            "RNG states",
            f"{_count(len(changes.rng_states), 'state')} of random generators, which belong on the CPU: {_some(changes.rng_states)}",
        )
    yield from _left_behind_lines(report.left_behind, every_name)
    yield from _tie_lines(report)
    if not (changes.devices or changes.names or report.left_behind or old_format != new_format):
        yield _fact("changes", "none")
    for note in report.notes:
        yield _fact("note", note)


def _tie_lines(report: Report) -> Iterator[str]:
    """The names that a safetensors file has as texts alone."""
    if report.ties:
        listed = _some(f"{name} → {first}" for name, first in report.ties)
        if report.formats[1] == "safetensors":
            listed = (
                f"{_count(len(report.ties), 'name')} in the metadata alone: {listed} "
                "(load_model reads them, load_file does not; --copy-tied writes the tensors)"
            )
        yield _fact("tied", listed)


def _left_behind_lines(left_behind: tuple[LeftBehind, ...], every_one: bool) -> Iterator[str]:
    """What the output does not hold, the reasons apart, the largest first."""
    by_reason: dict[str, list[LeftBehind]] = {}
    for left in sorted(left_behind, key=lambda left: -left.nbytes):
        by_reason.setdefault(left.why, []).append(left)
    for why, some in by_reason.items():
        shown = some if every_one else some[:_SHOWN]
        listed = ", ".join(f"{left.path} ({size(left.nbytes)})" if left.nbytes else left.path for left in shown)
        more = len(some) - len(shown)
        if more:
            rest = sum(left.nbytes for left in some[len(shown) :])
            listed += f", … {more:,} more" + (f" ({size(rest)})" if rest else "") + " (-v lists all)"
        yield _fact("left behind", f"{why}: {listed}")


def _name_lines(names: list[NameChange], every_name: bool) -> Iterator[str]:
    by_path: dict[str, list[NameChange]] = {}
    for change in names:
        by_path.setdefault(change.path, []).append(change)
    for path, changes in by_path.items():
        shown = changes if every_name else changes[:1]
        for change in shown:
            yield _fact("names", f"{path}: {change.old} → {change.new}")
        if len(changes) > len(shown):
            yield _fact(
                "", f"and {len(changes) - len(shown):,} more in {path}" + ("" if path != "." else " (the root)")
            )
