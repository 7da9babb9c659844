"""Suggest the edit that gives one checkpoint's tensors the names that they have in the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.edits.options import Edits
from ckptconv.edits.wrappers import unwrapped
from ckptconv.hints import shell

__all__ = ["command_that_fits", "flags_of"]

_PARTS = 64  # state dicts of one file that are looked at
_TRIED = 8  # names that are looked for in the other with something before them


@dataclass(frozen=True)
class _Part:
    """A state dict, or a module that gives one: its path, its names, and the flags that take it."""

    path: str
    names: Collection[str]
    flags: tuple[str, ...]


def command_that_fits(
    a: Checkpoint, b: Checkpoint, edits: Edits, paths: tuple[str, str], more: tuple[str, ...] = ()
) -> str | None:
    """The ``ckptconv diff`` that compares what A and B, of which no names match, have in common, if there is one.

    A is edited, and a part is taken of B as EDITS say; MORE are flags to repeat.
    """
    if edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix:
        return None  # another edit of names would not come where it should
    again = flags_of(edits)
    parts = _parts(a, edits), _parts(b, Edits())
    files = [Path(path) for path in paths]
    found = _flags(*parts)
    if found:
        return shell("ckptconv", "diff", *files, *again, *found, *more)
    swapped = _flags(*parts[::-1]) if not again else None
    return shell("ckptconv", "diff", *files[::-1], *swapped, *more) if swapped else None


def flags_of(edits: Edits) -> tuple[str, ...]:
    """The flags that say which parts EDITS take, and which names they change."""
    flags = ["--state-dict"] if edits.state_dict else []
    flags += ["--select", edits.select] if edits.select is not None else []
    repeated = (("--include", edits.include), ("--exclude", edits.exclude))
    prefixes = (("--strip-prefix", edits.strip_prefix), ("--add-prefix", edits.add_prefix))
    flags += [word for flag, values in repeated for value in values for word in (flag, value)]
    flags += ["--unwrap"] if edits.unwrap else []
    flags += [word for pair in edits.rename for word in ("--rename", *pair)]
    flags += [word for flag, values in prefixes for value in values for word in (flag, value)]
    return tuple(flags)


def _parts(checkpoint: Checkpoint, edits: Edits) -> list[_Part]:
    detected = checkpoint.detected
    taken = edits.select is not None or edits.state_dict
    parts = [
        _Part(found.path, found.names(), ("--select", found.path) if found.path != "." else ())
        for found in detected.state_dicts
        if found.path == "." or not taken
    ]
    if not taken:
        parts += [
            _Part(
                f"a module at {found.path}",
                found.names(),
                ("--select", found.path, "--state-dict") if found.path != "." else ("--state-dict",),
            )
            for found in detected.modules
        ]
    return parts


def _flags(ours: list[_Part], theirs: list[_Part]) -> tuple[str, ...] | None:
    """What to ask for, so that most names of one of OUR parts are those of one of THEIRS, which is all that they have
    or stands at the same path.
    """
    best: tuple[int, int, tuple[str, ...]] = (0, 0, ())
    by_path = {their.path: their for their in theirs}
    for our in ours[:_PARTS]:
        for their in {".": by_path.get("."), our.path: by_path.get(our.path)}.values():
            flags = our.flags if their and their.path == "." else ()
            names = set(their.names) if their else set()
            for edit, renamed in _renamed(our.names, names):
                common = len(names.intersection(renamed))
                if 2 * common >= max(len(names), len(renamed)) > 0 and (flags or edit):
                    best = max(best, (common, _simple(flags, edit), (*flags, *edit)))
    return best[2] or None


def _simple(flags: tuple[str, ...], edit: tuple[str, ...]) -> int:
    """The larger, the less there is to ask for; a prefix says more plainly what it takes off than ``--unwrap``."""
    return -len(flags) - (len(edit) if edit != ("--unwrap",) else 3)


def _renamed(ours: Collection[str], theirs: Collection[str]) -> Iterator[tuple[tuple[str, ...], Collection[str]]]:
    """OUR names as they are, and as edits make them that could give THEIRS, each with its flags."""
    yield (), ours
    yield ("--unwrap",), set(unwrapped(ours).values())
    for prefix in _before(theirs, ours):
        yield ("--strip-prefix", prefix), [name.removeprefix(prefix) for name in ours]
    for prefix in _before(ours, theirs):
        yield ("--add-prefix", prefix), [prefix + name for name in ours]


def _before(short: Collection[str], long: Collection[str]) -> set[str]:
    """What stands before some of the SHORT names in LONG."""
    return {
        name.removesuffix(each)
        for each, _ in zip(short, range(_TRIED), strict=False)
        for name in long
        if each and name.endswith(f".{each}")
    }
