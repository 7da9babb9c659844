"""Suggest the edit that gives one checkpoint's tensors the names that they have in the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.edits.names import unwrapped
from ckptconv.edits.options import Edits
from ckptconv.hints import Option, command
from ckptconv.light_dataclass import dataclass

_PARTS = 64  # state dicts of one file that are looked at
_TRIED = 8  # names that are looked for in the other with something before them


@dataclass(frozen=True)
class _Part:
    """A state dict, or a module that gives one: its path, its names, and the options that take it."""

    path: str
    names: Collection[str]
    options: tuple[Option, ...]


def command_that_fits(
    a: Checkpoint, b: Checkpoint, edits: Edits, paths: tuple[str, str], more: Sequence[Option] = ()
) -> str | None:
    """The ``ckptconv diff`` that compares what `a` and `b`, of which no names match, have in common, if there is one.

    `a` is edited, and a part is taken of `b` as `edits` say; `more` are options to repeat.
    """
    if edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix:
        return None  # another edit of names would not come where it should
    again = options_of(edits)
    parts = _parts(a, edits), _parts(b, Edits())
    files = [Path(path) for path in paths]
    found = _options(*parts)
    if found:
        return command("diff", *files, *again, *found, *more)
    swapped = _options(*parts[::-1]) if not again else None
    return command("diff", *files[::-1], *swapped, *more) if swapped else None


def options_of(edits: Edits) -> tuple[Option, ...]:
    """The options that say which parts `edits` take, and which names they change."""
    asked = ("state_dict", "select", "include", "exclude", "unwrap", "rename", "strip_prefix", "add_prefix")
    values = ((name, getattr(edits, name)) for name in asked)
    return tuple(Option(name, value) for name, value in values if value not in (None, False, ()))


def _parts(checkpoint: Checkpoint, edits: Edits) -> list[_Part]:
    detected = checkpoint.detected
    taken = edits.select is not None or edits.state_dict
    parts = [
        _Part(found.path, found.names(), _taking(found.path))
        for found in detected.state_dicts
        if found.path == "." or not taken
    ]
    if not taken:
        parts += [
            _Part(f"a module at {found.path}", found.names(), (*_taking(found.path), Option("state_dict")))
            for found in detected.modules
        ]
    return parts


def _taking(path: str) -> tuple[Option, ...]:
    return () if path == "." else (Option("select", path),)


def _options(ours: list[_Part], theirs: list[_Part]) -> tuple[Option, ...]:
    """What to ask for, so that most names of one of `ours` are those of one of `theirs`, which is all that they have
    or stands at the same path.
    """
    best: tuple[tuple[int, int, list[str]], tuple[Option, ...]] = (0, 0, []), ()
    by_path = {their.path: their for their in theirs}
    for our in ours[:_PARTS]:
        for their in {".": by_path.get("."), our.path: by_path.get(our.path)}.values():
            taking = our.options if their and their.path == "." else ()
            names = set(their.names) if their else set()
            for edit, renamed in _renamed(our.names, names):
                common = len(names.intersection(renamed))
                if 2 * common >= max(len(names), len(renamed)) > 0 and (taking or edit):
                    found = (*taking, *edit)
                    best = max(best, ((common, *_simple(found)), found), key=lambda each: each[0])
    return best[1]


def _simple(options: tuple[Option, ...]) -> tuple[int, list[str]]:
    """The larger, the less there is to type; a prefix says more plainly what it takes off than ``--unwrap``."""
    words = [word for each in options for group in each.words() for word in group]
    return -len(words) - 2 * (Option("unwrap") in options), words


def _renamed(ours: Collection[str], theirs: Collection[str]) -> Iterator[tuple[tuple[Option, ...], Collection[str]]]:
    """`ours` as they are, and as edits make them that could give `theirs`, each with its option."""
    yield (), ours
    yield (Option("unwrap"),), set(unwrapped(ours).values())
    for prefix in _before(theirs, ours):
        yield (Option("strip_prefix", prefix),), [name.removeprefix(prefix) for name in ours]
    for prefix in _before(ours, theirs):
        yield (Option("add_prefix", prefix),), [prefix + name for name in ours]


def _before(short: Collection[str], long: Collection[str]) -> set[str]:
    """What stands before some of the `short` names in `long`."""
    return {
        name.removesuffix(each)
        for each, _ in zip(short, range(_TRIED), strict=False)
        for name in long
        if each and name.endswith(f".{each}")
    }
