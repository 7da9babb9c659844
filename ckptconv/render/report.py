"""Draw the report of a conversion. Renamed tensors are grouped by what changed in their names.

``module.* → *`` stands for all names that lost a prefix. Names are split into words, numbers and what is between them.
What a name keeps is a ``*``, and what it loses or gains is written out: ``h*.* → layer*.*`` for ``h0.w → layer0.w``,
``*.module.* → *.*`` for a wrapper anywhere inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptconv.errors import count, size
from ckptconv.formats.writers import writer_of
from ckptconv.hints import command, option
from ckptconv.render.text import PLAIN, Style, fact, first_of, headline

if TYPE_CHECKING:
    from ckptconv.checkpoint.tensor_info import LeftBehind
    from ckptconv.conversion.plan import Report, Verified
    from ckptconv.edits.changes import MadePlain, NameChange, OptimizerChange, Regrouping

_LARGEST_TABLE = 2048  # cells; longer changes, as in a file made for that, are written out
# Patterns are texts, so that they are compiled only if a name has changed.
_WORD = r"(?s)[^\W\d_]+|\d+|."
_ENDS_APART = r"(?s)\A([\W_]*)\w.*?([\W_]*)\Z"

#: The words of a name as numbers. Equal words of two names have equal numbers, and the rest does not matter.
_Words = tuple[int, ...]
Fact: TypeAlias = "tuple[str, str | Sequence[str]]"  # a label, and a text or parts of one
_SHOWN = 5  # things in one fact
_PATTERNS = 8  # of names
_IN_PLACE = {
    "nothing": "nothing had to change",
    "same size": "in the space of the old header",
    "appended": "with a new pickle after the tensors; the old one stays until you convert the file to another",
}


class Pattern(NamedTuple):
    """How names changed: the number of names in the state dict at each of the ``paths``, and the first of them."""

    old: str
    new: str
    paths: dict[str, int]
    example: NameChange


def patterns(changes: Iterable[NameChange]) -> list[Pattern]:
    """Return `changes` by pattern, the commonest first."""
    by_words: dict[tuple[str, str], Pattern] = {}
    for change in changes:
        words = _pattern(change.old, change.new)
        paths = by_words.setdefault(words, Pattern(*words, {}, change)).paths
        paths[change.path] = paths.get(change.path, 0) + 1
    return sorted(by_words.values(), key=lambda pattern: -sum(pattern.paths.values()))


def _pattern(old: str, new: str) -> tuple[str, str]:
    """Return `old` and `new` with stars for what they have in common.

    The last segments are compared first: of ``module.module.w → module.w`` the first one went.
    """
    a, b = old.split("."), new.split(".")
    tail = len(commonprefix([a[::-1], b[::-1]]))  # noqa: RUF071 - of words, not of paths
    a, b = a[: len(a) - tail], b[: len(b) - tail]
    head = len(commonprefix([a, b]))  # noqa: RUF071 - of words
    was, becomes = _words_apart(".".join(a[head:]), ".".join(b[head:]))
    before, after = ["*"] * bool(head), ["*"] * bool(tail)
    return ".".join([*before, *filter(None, [was]), *after]), ".".join([*before, *filter(None, [becomes]), *after])


@lru_cache(maxsize=4096)
def _words_apart(old: str, new: str) -> tuple[str, str]:
    """Return two names, or the parts of them that differ, with stars for the words that they still have in common."""
    was, becomes = re.findall(_WORD, old), re.findall(_WORD, new)
    ids: dict[str, int] = {}
    a, b = (tuple(ids.setdefault(word, len(ids)) for word in words) for words in (was, becomes))
    runs = _kept(a, b)
    return _starred(was, ((i, n) for i, _, n in runs)), _starred(becomes, ((j, n) for _, j, n in runs))


@lru_cache(maxsize=1024)
def _kept(a: _Words, b: _Words) -> Sequence[tuple[int, int, int]]:
    """Return the runs that `a` and `b` share as (index in `a`, index in `b`, length), or none if they are too long."""
    from difflib import SequenceMatcher  # slow to import

    if len(a) * len(b) > _LARGEST_TABLE:
        return []
    return SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()


def _starred(words: list[str], runs: Iterable[tuple[int, int]]) -> str:
    """Return `words` with a star for each of the `runs` (first, number). Punctuation at the ends of a run stays."""
    parts, at = [], 0
    for first, number in runs:
        parts += words[at:first]
        at = first + number
        parts.append(re.sub(_ENDS_APART, r"\1*\2", "".join(words[first:at])))
    return "".join([*parts, *words[at:]])


def report_lines(report: Report, style: Style = PLAIN, *, every_name: bool = False) -> Iterator[str]:
    """Yield what a conversion did, or would do after a dry run. `every_name` lists everything that changed."""
    yield from headline(style, report.dst, report_title(report))
    for label, what in report_facts(report, every_name=every_name):
        yield from fact(style, label, what)


#: Where the names of an optimizer's parameters come from.
_NAMES_FROM = {
    "itself": "with its own names",
    "shapes": "with names found by the shapes of its state",
    "order": "with names in the order of model.parameters(), as you confirmed",
}


def report_title(report: Report) -> str:
    """Return the format, the number of files, how much was written, and how fast."""
    written = size(report.nbytes)
    done = f"{written} written in {report.seconds:.2f} s" if report.written else f"would write {written}"
    new_format = report.formats[1]
    return f"{new_format}, {count(len(report.files), 'file')}, {done}" if report.files else f"{new_format}, {done}"


def report_facts(report: Report, *, every_name: bool = False) -> Iterator[Fact]:
    """Yield the facts below the first line. `every_name` lists everything that changed."""
    changes = report.changes
    old_format, new_format = report.formats
    if every_name and report.files:
        yield ("files", ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in report.files))
    if old_format != new_format:
        yield ("format", f"{old_format} → {new_format}")
    for (old, new), (tensors, nbytes) in changes.devices.items():
        old = old if _holds(old_format, "devices") else "none stored"
        yield ("devices", f"{old} → {new}: {count(tensors, 'tensor')}, {size(nbytes)}")
    yield from _name_lines(changes.names, every_name)
    for path, change in changes.optimizers.items():
        yield from _optimizer_lines(path, change)
    if changes.reordered:
        yield ("names", f"in the order of the other checkpoint: {_listed(changes.reordered)}")
    if changes.unprefixed:
        yield ("names", f"{count(changes.unprefixed, 'name')} without the prefix are unchanged")
    yield from _group_lines(changes.regrouped, every_name or not report.written)
    yield from _dtype_lines(report, every_name)
    yield from _plain_lines(changes.made_plain, every_name)
    if changes.rng_states:
        yield (
            "RNG states",
            f"{count(len(changes.rng_states), 'state')} of random number generators, which torch needs on the CPU:"
            f" {_listed(changes.rng_states)}",
        )
    yield from _left_behind_lines(report.left_behind, every_name)
    yield from _tie_lines(report)
    if not report.changed:
        yield ("changes", "none")
    if report.in_place:
        yield ("in place", _IN_PLACE[report.in_place.way])
        if report.in_place.journal and report.written:
            yield ("undo", "to restore the old bytes: " + command("undo", Path(report.dst)))
    if report.verified:
        yield ("verified", _verified(report.verified))
    for note in report.notes:
        yield ("note", note)


def _optimizer_lines(path: str, change: OptimizerChange) -> Iterator[Fact]:
    """Yield what changed in the optimizer at `path`, and what told which parameter is which."""
    if change.names:
        yield ("names", f"{count(change.names, 'name')} in the optimizer at {path} changed with them")
    done = [f"{count(change.left_out, 'parameter')} left out"] if change.left_out else []
    if change.regrouped:
        done.append(f"{count(change.regrouped, 'parameter')} regrouped with the weights")
    if change.groups is not None:
        done.append(f"the order of the other checkpoint, in {count(change.groups, 'group')}")
    if change.keyed_by:
        done.append(f"keyed by {change.keyed_by}")
    if done:
        yield ("optimizer", f"{path}: {'; '.join(done)}, {_NAMES_FROM[change.names_from or 'itself']}")


def _verified(verified: Verified) -> list[str]:
    """Return what was compared: the checksums of the input, then the output."""
    records, nbytes = count(verified.records, "record"), size(verified.nbytes)
    checksums = "its checksum" if verified.records == 1 else "their checksums"
    right = f"{records} of the input ({nbytes}) compared with {checksums}"
    about = right if verified.records else "the input has no checksums, so damage cannot be detected"
    return [about, *(["the output read back"] if verified.output else [])]


def _holds(container: str, quality: str) -> bool:
    """Return whether a container has the attribute `quality` of :class:`~ckptconv.formats.writers.Writer`.

    It is True for a container that cannot be written, and for a mix of several.
    """
    writer = None if " and " in container else writer_of(container)
    return writer is None or getattr(writer, quality)


def _group_lines(groups: list[Regrouping], every_one: bool) -> Iterator[Fact]:
    """Yield the tensors that were regrouped: every group, or the first and the number of others of each rule."""
    by_rule: dict[str, list[Regrouping]] = {}
    for group in groups:
        by_rule.setdefault(group.rule, []).append(group)
    for group_list in by_rule.values():
        for group in group_list if every_one else group_list[:1]:
            where = "" if group.path == "." else f" in {group.path}"
            yield ("regrouped", f"{', '.join(group.old)} → {', '.join(group.new)}{where}")
        if not every_one and len(group_list) > 1:
            yield ("", f"and {len(group_list) - 1:,} more in this way (" + option("verbose") + " lists all)")


def _dtype_lines(report: Report, every_one: bool) -> Iterator[Fact]:
    """Yield what was cast, what was not and why, the numbers that overflowed, and what storages were separated or
    compacted.
    """
    changes = report.changes
    for (old, new), done in changes.dtypes.items():
        sizes = f"{size(done.nbytes_before)} → {size(done.nbytes_after)}"
        yield ("dtypes", f"{old} → {new}: {count(done.tensors, 'tensor')}, {sizes}")
    for why, paths in changes.not_cast.items():
        yield ("not cast", f"{why}: " + _all_or_some(paths, every_one))
    if report.overflowed:
        worst = sorted(report.overflowed.items(), key=lambda each: -each[1])
        places = [f"{_listed(paths) or 'inside other tensors'} ({numbers:,})" for paths, numbers in worst]
        total = count(sum(report.overflowed.values()), "number")
        yield ("overflow", f"{total} too large for the new dtype: " + _all_or_some(places, every_one))
    if changes.separated:
        groups = [
            " | ".join(f"{_listed(paths) or 'others'} ({dtype})" for dtype, paths in each.items())
            for each in changes.separated
        ]
        yield ("separated", "they shared a storage and were cast differently: " + _all_or_some(groups, every_one))
    if changes.compacted.storages:
        gone, storages = size(changes.compacted.nbytes), count(changes.compacted.storages, "storage")
        yield ("compacted", f"{gone} that no tensor uses removed from {storages}")


def _plain_lines(made_plain: list[MadePlain], every_one: bool) -> Iterator[Fact]:
    """Yield the objects that became plain, by their old and new types, with the expression that reads the first of
    them.
    """
    groups: dict[tuple[str, str], list[MadePlain]] = {}
    for each in made_plain:
        groups.setdefault((each.old, each.new), []).append(each)
    for (old, new), group in groups.items():
        where = _all_or_some([each.path for each in group], every_one)
        yield ("plain", f"{old} → {new}: " + where + f"; to read it: {group[0].reads}")


def _tie_lines(report: Report) -> Iterator[Fact]:
    """Yield the names that the output has only as texts in its metadata."""
    if report.ties:
        listed = _listed(f"{name} → {first}" for name, first in report.ties)
        if not _holds(report.formats[1].split(" and ")[-1], "ties"):
            listed = (
                f"{count(len(report.ties), 'name')} stored only in the metadata: {listed} (load_model restores"
                f" {'it' if len(report.ties) == 1 else 'them'}, load_file does not; "
                + option("copy_tied")
                + " stores every name)"
            )
        yield ("tied", listed)


def _left_behind_lines(left_behind: tuple[LeftBehind, ...], every_one: bool) -> Iterator[Fact]:
    """Yield what the output does not contain, by the reason, the largest first."""
    by_reason: dict[str, list[LeftBehind]] = {}
    for left in sorted(left_behind, key=lambda left: -left.nbytes):
        by_reason.setdefault(left.why, []).append(left)
    for why, group in by_reason.items():
        shown = group if every_one else group[:_SHOWN]
        listed = ", ".join(f"{left.path} ({size(left.nbytes)})" if left.nbytes else left.path for left in shown)
        more = len(group) - len(shown)
        if more:
            rest = sum(left.nbytes for left in group[len(shown) :])
            listed += _more(more, f" ({size(rest)})" if rest else "")
        yield ("not saved", f"{why}: " + listed)


def _name_lines(names: list[NameChange], every_name: bool) -> Iterator[Fact]:
    """Yield the names that changed, grouped by pattern unless `every_name` is set."""
    if every_name:
        for change in names:
            yield ("names", f"{change.path}: {change.old} → {change.new}")
        return
    by_pattern = patterns(names)
    label = "names"
    for pattern in by_pattern[:_PATTERNS]:
        yield (label, _renamed(pattern))
        label = ""
    if len(by_pattern) > _PATTERNS:
        yield (
            label,
            f"… {count(len(by_pattern) - _PATTERNS, 'more pattern')} (" + option("verbose") + " lists every name)",
        )


def _renamed(pattern: Pattern) -> list[str]:
    """Return a pattern, the number of names that it applies to, their state dicts, and an example."""
    example = f"{pattern.example.old} → {pattern.example.new}"
    where = "" if [*pattern.paths] == ["."] else f" in {_listed(pattern.paths)}"
    most, total = max(pattern.paths.values()), sum(pattern.paths.values())
    if total == 1 or example == f"{pattern.old} → {pattern.new}":
        return [example + where]
    if most * len(pattern.paths) == total > most:
        where = f" in each of {_listed(pattern.paths)}"
        total = most
    return [f"{pattern.old} → {pattern.new}: {count(total, 'name')}{where}", f"such as {example}"]


def _all_or_some(things: Sequence[str], every_one: bool) -> str:
    """Return `things`, or the first of them and how to list the others."""
    if every_one or len(things) <= _SHOWN:
        return ", ".join(things)
    return ", ".join(things[:_SHOWN]) + _more(len(things) - _SHOWN)


def _more(number: int, nbytes: str = "") -> str:
    """Return that there are `number` more things, and how to list them."""
    return f", … {number:,} more{nbytes} (" + option("verbose") + " lists all)"


def _listed(things: Iterable[str]) -> str:
    """Return the first of `things`, and the number of the others."""
    return ", ".join(first_of(things, _SHOWN))
