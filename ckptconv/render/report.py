"""Format the report of a conversion. Renamed tensors are grouped by the change of their names.

``module.* → *`` stands for all names that lost a prefix. Names are split into words, numbers and single other
characters. A ``*`` stands for words that a name keeps, and words that it loses or gains are written out: ``h*.* →
layer*.*`` for ``h0.w → layer0.w``, ``*.module.* → *.*`` for a wrapper inside a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptconv.errors import at_path, count, size
from ckptconv.formats.writers import writer_of
from ckptconv.hints import command, option
from ckptconv.render.text import PLAIN, Style, fact, first_of, headline

if TYPE_CHECKING:
    from ckptconv.checkpoint.tensor_info import LeftBehind
    from ckptconv.conversion.plan import Report, Verified
    from ckptconv.edits.changes import MadePlain, NameChange, OptimizerChange, Regrouping

_LARGEST_TABLE = 2048  # the largest product of two lengths; longer changes are written out completely
# Patterns are plain texts, so that they are compiled only if a name has changed.
_WORD = r"(?s)[^\W\d_]+|\d+|."
_ENDS_APART = r"(?s)\A([\W_]*)\w.*?([\W_]*)\Z"

#: The words of a name as numbers. Equal words of two names have equal numbers, and the rest does not matter.
_Words = tuple[int, ...]
Fact: TypeAlias = "tuple[str, str | Sequence[str]]"  # a label, and a text or a sequence of texts
_SHOWN = 5  # items in one fact
_PATTERNS = 8  # of names
_IN_PLACE = {
    "nothing": "nothing had to change",
    "same size": "only the header is replaced; the file keeps its size",
    "appended": "a new pickle follows the tensors; the old one stays until you convert the file to another",
}


class Pattern(NamedTuple):
    """A change that several names have in common.

    Attributes:
        old: The pattern of the old names.
        new: The pattern of the new names.
        paths: The number of names that changed in this way, by the path of their state dict.
        example: The first of these changes.
    """

    old: str
    new: str
    paths: dict[str, int]
    example: NameChange


def patterns(changes: Iterable[NameChange]) -> list[Pattern]:
    """Return `changes` grouped by pattern, the most frequent pattern first."""
    by_words: dict[tuple[str, str], Pattern] = {}
    for change in changes:
        words = _pattern(change.old, change.new)
        paths = by_words.setdefault(words, Pattern(*words, {}, change)).paths
        paths[change.path] = paths.get(change.path, 0) + 1
    return sorted(by_words.values(), key=lambda pattern: -sum(pattern.paths.values()))


def _pattern(old: str, new: str) -> tuple[str, str]:
    """Return `old` and `new` with a star for the segments that they have in common.

    The last segments are compared first, so that ``module.module.w → module.w`` loses the first ``module``.
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
    """Return two names with stars for the words that both have in the same order."""
    was, becomes = re.findall(_WORD, old), re.findall(_WORD, new)
    ids: dict[str, int] = {}
    a, b = (tuple(ids.setdefault(word, len(ids)) for word in words) for words in (was, becomes))
    runs = _kept(a, b)
    return _starred(was, ((i, n) for i, _, n in runs)), _starred(becomes, ((j, n) for _, j, n in runs))


@lru_cache(maxsize=1024)
def _kept(a: _Words, b: _Words) -> Sequence[tuple[int, int, int]]:
    """Return the runs of words that `a` and `b` have in common, as (index in `a`, index in `b`, length).

    Return none if `a` and `b` are too long to be compared.
    """
    from difflib import SequenceMatcher  # slow to import

    if len(a) * len(b) > _LARGEST_TABLE:
        return []
    return SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()


def _starred(words: list[str], runs: Iterable[tuple[int, int]]) -> str:
    """Return `words` as text with a star for each of `runs` (index, length).

    Punctuation at the ends of a run is kept.
    """
    parts, at = [], 0
    for first, number in runs:
        parts += words[at:first]
        at = first + number
        parts.append(re.sub(_ENDS_APART, r"\1*\2", "".join(words[first:at])))
    return "".join([*parts, *words[at:]])


def report_lines(report: Report, style: Style = PLAIN, *, every_name: bool = False) -> Iterator[str]:
    """Yield the lines of a report about a conversion or a dry run. With `every_name`, all changes are listed."""
    yield from headline(style, report.dst, report_title(report))
    for label, what in report_facts(report, every_name=every_name):
        yield from fact(style, label, what)


#: How the parameters of an optimizer were matched with names.
_NAMES_FROM = {
    "itself": "parameter names are its own",
    "shapes": "parameter names follow from the shapes of its state",
    "order": "parameter names are in the order of model.parameters(), as you confirmed",
}


def report_title(report: Report) -> str:
    """Return the format, the number of files, the bytes written, and the time."""
    written = size(report.nbytes)
    done = f"{written} written in {report.seconds:.2f} s" if report.written else f"would write {written}"
    new_format = report.formats[1]
    return f"{new_format}, {count(len(report.files), 'file')}, {done}" if report.files else f"{new_format}, {done}"


def report_facts(report: Report, *, every_name: bool = False) -> Iterator[Fact]:
    """Yield the facts below the title, as pairs of a label and a text. With `every_name`, all changes are listed."""
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
    """Yield facts about the changes of the optimizer at `path`, and how its parameters were matched with names."""
    if change.names:
        yield ("names", f"{count(change.names, 'name')} in the optimizer{at_path(path)} changed with them")
    done = [f"{count(change.left_out, 'parameter')} left out"] if change.left_out else []
    if change.regrouped:
        done.append(f"{count(change.regrouped, 'parameter')} regrouped with the weights")
    if change.groups is not None:
        done.append(f"the order of the other checkpoint, in {count(change.groups, 'group')}")
    if change.keyed_by:
        done.append(f"keyed by {change.keyed_by}")
    if done:
        yield ("optimizer", f"{path}: {'; '.join(done)}; {_NAMES_FROM[change.names_from or 'itself']}")


def _verified(verified: Verified) -> list[str]:
    """Return texts about the checks: the checksums of the input, then the comparison of the output."""
    records, nbytes = count(verified.records, "record"), size(verified.nbytes)
    checksums = "its checksum" if verified.records == 1 else "their checksums"
    right = f"{records} of the input ({nbytes}) compared with {checksums}"
    about = right if verified.records else "the input has no checksums, so damage cannot be detected"
    return [about, *(["the output read back"] if verified.output else [])]


def _holds(container: str, quality: str) -> bool:
    """Return whether the format `container` has the attribute `quality` of :class:`~ckptconv.formats.writers.Writer`.

    Return True for a format that cannot be written, and for a mix of formats.
    """
    writer = None if " and " in container else writer_of(container)
    return writer is None or getattr(writer, quality)


def _group_lines(groups: list[Regrouping], every_one: bool) -> Iterator[Fact]:
    """Yield facts about regrouped tensors: all groups, or for each rule the first and the number of others."""
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
    """Yield facts about casts, tensors that were not cast, overflows, and storages that were separated or compacted."""
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
        yield ("compacted", f"removed {gone} that no tensor uses, from {storages}")


def _plain_lines(made_plain: list[MadePlain], every_one: bool) -> Iterator[Fact]:
    """Yield facts about objects that became plain, grouped by old and new type, with an expression that reads the
    first.
    """
    groups: dict[tuple[str, str], list[MadePlain]] = {}
    for each in made_plain:
        groups.setdefault((each.old, each.new), []).append(each)
    for (old, new), group in groups.items():
        where = _all_or_some([each.path for each in group], every_one)
        yield ("plain", f"{old} → {new}: " + where + f"; to read it: {group[0].reads}")


def _tie_lines(report: Report) -> Iterator[Fact]:
    """Yield a fact about names that the output stores only as texts in its metadata."""
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
    """Yield facts about objects that the output does not contain, grouped by reason, the largest first."""
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
        yield ("not saved", why if listed == "." else f"{why}: " + listed)


def _name_lines(names: list[NameChange], every_name: bool) -> Iterator[Fact]:
    """Yield facts about changed names, grouped by pattern unless `every_name` is set."""
    if every_name:
        for change in names:
            yield ("names", f"{change.old} → {change.new}{at_path(change.path)}")
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
    """Return texts about a pattern: the number of its names, their state dicts, and an example."""
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
    """Return `things` as text: all of them, or the first ones and the option that lists all."""
    if every_one or len(things) <= _SHOWN:
        return ", ".join(things)
    return ", ".join(things[:_SHOWN]) + _more(len(things) - _SHOWN)


def _more(number: int, nbytes: str = "") -> str:
    """Return the text "… more" with `number`, and the option that lists all."""
    return f", … {number:,} more{nbytes} (" + option("verbose") + " lists all)"


def _listed(things: Iterable[str]) -> str:
    """Return the first of `things` and the number of the others as text."""
    return ", ".join(first_of(things, _SHOWN))
