"""Group renamed tensors by pattern: ``module.* → *`` stands for all names that lost a prefix.

Names fall into words, numbers and what stands between. What a name keeps is a ``*``, what it loses or gains is written
out: ``h*.* → layer*.*`` for ``h0.w → layer0.w``, ``*.module.* → *.*`` for a wrapper anywhere inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptconv.edits.changes import NameChange

_LARGEST_TABLE = 2048  # cells: longer changes, which only a file made for it has, are written out
# Texts, compiled when a name has changed, as in ``text``.
_WORD = r"(?s)[^\W\d_]+|\d+|."
_ENDS_APART = r"(?s)\A([\W_]*)\w.*?([\W_]*)\Z"

#: Numbers that are equal where two names' words are: how they are alike depends on nothing else.
_Words = tuple[int, ...]


class Pattern(NamedTuple):
    """What became of names: how many in the state dict at each of the ``paths``, and the first of them."""

    old: str
    new: str
    paths: dict[str, int]
    example: NameChange


def patterns(changes: Iterable[NameChange]) -> list[Pattern]:
    """`changes` by pattern, the commonest first."""
    found: dict[tuple[str, str], Pattern] = {}
    for change in changes:
        words = _pattern(change.old, change.new)
        paths = found.setdefault(words, Pattern(*words, {}, change)).paths
        paths[change.path] = paths.get(change.path, 0) + 1
    return sorted(found.values(), key=lambda pattern: -sum(pattern.paths.values()))


def _pattern(old: str, new: str) -> tuple[str, str]:
    """`old` and `new` with what they have in common as stars.

    Segments at the end are compared first: of ``module.module.w → module.w`` the first one went.
    """
    a, b = old.split("."), new.split(".")
    tail = _common(reversed(a), reversed(b))
    a, b = a[: len(a) - tail], b[: len(b) - tail]
    head = _common(a, b)
    was, becomes = _words_apart(".".join(a[head:]), ".".join(b[head:]))
    before, after = ["*"] * bool(head), ["*"] * bool(tail)
    return ".".join([*before, *filter(None, [was]), *after]), ".".join([*before, *filter(None, [becomes]), *after])


@lru_cache(maxsize=4096)
def _words_apart(old: str, new: str) -> tuple[str, str]:
    """What differs in two names, with the words and numbers that they still have in common as stars."""
    was, becomes = re.findall(_WORD, old), re.findall(_WORD, new)
    ids: dict[str, int] = {}
    a, b = (tuple(ids.setdefault(word, len(ids)) for word in words) for words in (was, becomes))
    runs = _kept(a, b)
    return _starred(was, ((i, n) for i, _, n in runs)), _starred(becomes, ((j, n) for _, j, n in runs))


def _common(a: Iterable[str], b: Iterable[str]) -> int:
    """How many of the first words of `a` and `b` are the same."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@lru_cache(maxsize=1024)
def _kept(a: _Words, b: _Words) -> Sequence[tuple[int, int, int]]:
    """The words that `a` and `b` have in common and in the same order, as many as there can be:
    runs of (where in `a`, where in `b`, how many).
    """
    if len(a) * len(b) > _LARGEST_TABLE:
        return []
    most = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]  # from here to the end
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            most[i][j] = most[i + 1][j + 1] + 1 if a[i] == b[j] else max(most[i + 1][j], most[i][j + 1])
    runs: list[tuple[int, int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            x, y, n = runs[-1] if runs else (0, 0, 0)
            if n and (x + n, y + n) == (i, j):
                runs[-1] = x, y, n + 1
            else:
                runs.append((i, j, 1))
            i, j = i + 1, j + 1
        elif most[i + 1][j] >= most[i][j + 1]:
            i += 1
        else:
            j += 1
    return runs


def _starred(words: list[str], runs: Iterable[tuple[int, int]]) -> str:
    """`words` with each of the `runs` (first, number) as a star; dots and the like at its ends stay."""
    parts, at = [], 0
    for first, number in runs:
        parts += words[at:first]
        at = first + number
        parts.append(re.sub(_ENDS_APART, r"\1*\2", "".join(words[first:at])))
    return "".join([*parts, *words[at:]])
