"""What a conversion did, or would do, for its reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptconv.render.text import Look, count, fact, headline, size, some

if TYPE_CHECKING:
    from ckptconv.model import LeftBehind, NameChange, Report

__all__ = ["report_lines"]

_SHOWN = 5  # things in one fact
_PLAIN = Look()


def report_lines(report: Report, look: Look = _PLAIN, *, every_name: bool = False) -> Iterator[str]:
    """What a conversion did, or, after a dry run, would do."""
    changes = report.changes
    done = (
        f"{size(report.size)} written in {report.seconds:.2f} s"
        if report.written
        else f"would write {size(report.size)}"
    )
    old_format, new_format = report.formats
    yield from headline(look, report.dst, f"{new_format}, {done}")
    if old_format != new_format:
        yield from fact(look, "format", f"{old_format} → {new_format}")
    for (old, new), (tensors, nbytes) in changes.devices.items():
        old = "none stored" if old_format == "safetensors" else old
        yield from fact(look, "devices", f"{old} → {new}: {count(tensors, 'tensor')}, {size(nbytes)}")
    yield from _name_lines(changes.names, every_name, look)
    if changes.unprefixed:
        yield from fact(look, "names", f"{count(changes.unprefixed, 'name')} without the prefix stayed as they were")
    if changes.rng_states:
        yield from fact(
            look,
            "RNG states",
            f"{count(len(changes.rng_states), 'state')} of random generators, which belong on the CPU: {_listed(changes.rng_states)}",
        )
    yield from _left_behind_lines(report.left_behind, every_name, look)
    yield from _tie_lines(report, look)
    if not (changes.devices or changes.names or report.left_behind or old_format != new_format):
        yield from fact(look, "changes", "none")
    for note in report.notes:
        yield from fact(look, "note", note)


def _tie_lines(report: Report, look: Look) -> Iterator[str]:
    """The names that a safetensors file has as texts alone."""
    if report.ties:
        listed = _listed(f"{name} → {first}" for name, first in report.ties)
        if report.formats[1] == "safetensors":
            listed = (
                f"{count(len(report.ties), 'name')} in the metadata alone: {listed} "
                "(load_model reads them, load_file does not; --copy-tied writes the tensors)"
            )
        yield from fact(look, "tied", listed)


def _left_behind_lines(left_behind: tuple[LeftBehind, ...], every_one: bool, look: Look) -> Iterator[str]:
    """What the output does not hold, the reasons apart, the largest first."""
    by_reason: dict[str, list[LeftBehind]] = {}
    for left in sorted(left_behind, key=lambda left: -left.nbytes):
        by_reason.setdefault(left.why, []).append(left)
    for why, group in by_reason.items():
        shown = group if every_one else group[:_SHOWN]
        listed = ", ".join(f"{left.path} ({size(left.nbytes)})" if left.nbytes else left.path for left in shown)
        more = len(group) - len(shown)
        if more:
            rest = sum(left.nbytes for left in group[len(shown) :])
            listed += f", … {more:,} more" + (f" ({size(rest)})" if rest else "") + " (-v lists all)"
        yield from fact(look, "left behind", f"{why}: {listed}")


def _name_lines(names: list[NameChange], every_name: bool, look: Look) -> Iterator[str]:
    by_path: dict[str, list[NameChange]] = {}
    for change in names:
        by_path.setdefault(change.path, []).append(change)
    for path, changes in by_path.items():
        shown = changes if every_name else changes[:1]
        for change in shown:
            yield from fact(look, "names", f"{path}: {change.old} → {change.new}")
        if len(changes) > len(shown):
            yield from fact(
                look, "", f"and {len(changes) - len(shown):,} more in {path}" + ("" if path != "." else " (the root)")
            )


def _listed(things: Iterable[str]) -> str:
    return ", ".join(some(things, _SHOWN))
