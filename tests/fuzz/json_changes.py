"""Changes of JSON at the level of values. Objects are lists of pairs, so a key can occur twice."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

from ckptconv.dtypes import BY_WORD

__all__ = ["Pairs", "changed", "parsed", "said"]

_NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    64,
    100,
    -1,
    1.5,
    1e300,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    10**30,
)
_TEXTS = (
    "", "a", "a.weight", "module.a", "__metadata__", "format", "pt", "dtype", "shape", "data_offsets", "metadata",
    "weight_map", "total_size", "..", "../x", "/x", "a/b", "a\\b", "\0", "\ud800", "é", "\x1b[0m",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors", "DCP_SHARDING_INFO",
    "%2e%2e%2fx.safetensors", "x.safetensors?y", "http://127.0.0.1:1/x.safetensors", "memory://a/x.safetensors",
    "saved_offsets", *sorted(BY_WORD),
)  # a table  # fmt: skip


class Pairs(list[Any]):
    """A JSON object as a list of keys and values."""


def parsed(text: str) -> Any:
    """Return the JSON value in `text`."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def said(value: Any) -> str:
    """Return `value` as JSON."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{said(each)}" for key, each in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(said, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def changed(top: Any, random: Random) -> Any:
    """Return `top` after a few changes in place, or another value."""
    for _ in range(random.choice((1, 1, 2, 3))):
        slots = _slots(top)
        if not slots:
            return _any(random)
        holder, i = random.choice(slots)
        what = random.randrange(7)
        if what == 0:
            del holder[i]
        elif what == 1:
            holder.insert(random.randrange(len(holder) + 1), deepcopy(holder[i]))
        elif what == 2 and isinstance(holder, Pairs):
            holder[i] = [random.choice((*_TEXTS, *(key for key, _ in holder))), holder[i][1]]
        elif what == 3:
            other, j = random.choice(slots)
            if isinstance(other, Pairs) == isinstance(holder, Pairs):
                holder[i] = deepcopy(other[j])
        elif what == 4:
            number = holder[i][1] if isinstance(holder, Pairs) else holder[i]
            if isinstance(number, int):
                _put(holder, i, number + random.choice((-8, -4, -1, 1, 4, 8)))
        else:
            _put(holder, i, _any(random))
    return top


def _slots(top: Any) -> list[tuple[list[Any], int]]:
    """Return every position in `top` as a list and an index in it."""
    found, todo = [], [top]
    while todo:
        at = todo.pop()
        if isinstance(at, list):
            found += [(at, i) for i in range(len(at))]
            todo += [value for _, value in at] if isinstance(at, Pairs) else at
    return found


def _put(holder: list[Any], i: int, value: Any) -> None:
    holder[i] = [holder[i][0], value] if isinstance(holder, Pairs) else value


def _any(random: Random) -> Any:
    return random.choice(
        (
            random.choice(_NUMBERS),
            random.choice(_TEXTS),
            random.choice(_TEXTS),
            None,
            True,
            [],
            Pairs(),
            [0, 4],
            [1] * 70,
            Pairs([[random.choice(_TEXTS), 1]]),
        )
    )
