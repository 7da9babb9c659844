"""The grammar of ``--dtype`` and ``dtype=``.

``bf16`` is for the weights, and ``GLOB=bf16`` for the tensors that GLOB matches. A dtype can be written with torch's
name, safetensors' word, or another common word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from ckptconv.dtypes import BY_NAME
from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.guesses import close_matches
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass

if TYPE_CHECKING:
    import torch

DTypeLike: TypeAlias = "str | torch.dtype | Mapping[str, str | torch.dtype] | Iterable[str | torch.dtype]"

#: The floating-point dtypes that torch casts from. float8_e8m0fnu is for scales, and nothing is cast to it.
FLOATS = frozenset(name for name in BY_NAME if re.fullmatch(r"b?float(8_\w+|16|32|64)", name))
_TARGETS = FLOATS - {"float8_e8m0fnu"}
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"})
WEIGHTS, GLOB, EXACT = 1, 2, 3  # how specific a rule is
#: Other usual words.
_CALLED = {
    "double": "float64", "float": "float32", "half": "float16", "bfloat": "bfloat16", "fp64": "float64",
    "fp32": "float32", "fp16": "float16", "long": "int64", "int": "int32", "short": "int16",
    "f8_e4m3fn": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # a table  # fmt: skip
#: Words that are too vague to be accepted. They are only suggested.
_LOOSELY = {
    "16": "fp16",
    "32": "fp32",
    "64": "fp64",
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "bfp16": "bf16",
}
_NAMES = {
    **{name: name for name in _TARGETS | INTEGERS},
    **{dtype.word.lower(): name for name, dtype in BY_NAME.items() if dtype.word and name in _TARGETS | INTEGERS},
    **_CALLED,
}


@dataclass(frozen=True)
class DTypeRule:
    """A rule that casts tensors.

    Attributes:
        dtype: torch's name of the new dtype, without ``torch.``.
        glob: The glob that the tensors match, or None for all weights.
    """

    glob: str | None
    dtype: str

    def rank(self, known: Sequence[str]) -> int:
        """Return how specific this rule is for a tensor with the names `known`: EXACT, GLOB, WEIGHTS, or 0 if it does
        not match.

        A glob that is equal to a name is exact, even if it contains brackets. Rules for integers match only exactly.
        """
        if self.glob is None:
            return WEIGHTS
        if self.glob in known:
            return EXACT
        return GLOB if self.dtype not in INTEGERS and any(fnmatchcase(each, self.glob) for each in known) else 0

    def is_within(self, other: DTypeRule) -> bool:
        """Return whether this glob is more specific than the glob of `other`.

        It is if the glob of `other` matches the text of this glob, and not the other way round.
        """
        return (
            self.glob is not None
            and other.glob is not None
            and fnmatchcase(self.glob, other.glob)
            and not fnmatchcase(other.glob, self.glob)
        )

    def __str__(self) -> str:
        return self.dtype if self.glob is None else f"{self.glob}={self.dtype}"


def strongest(ranked: Iterable[tuple[DTypeRule, int]]) -> tuple[int, list[DTypeRule]]:
    """Return the highest rank in `ranked`, and the rules of this rank whose globs include no glob of another of them.

    The rank is 0 if no rule matches. Then there are no rules.
    """
    known = [*ranked]
    best = max((rank for _, rank in known), default=0)
    rules = dict.fromkeys(rule for rule, rank in known if rank == best > 0)
    return best, [rule for rule in rules if not any(other.is_within(rule) for other in rules)]


def near_dtype(word: str) -> str | None:
    """Return the dtype that resembles `word`, or None if there is none.

    The digits must be the same, in any order: ``float61`` is float16, and ``fp4`` is not fp64.
    """
    plain = word.strip().lower().removesuffix("-mixed").removesuffix("-true")
    if plain in _NAMES or plain in _LOOSELY:
        return _LOOSELY.get(plain, plain)
    same = [each for each, name in _NAMES.items() if name in FLOATS and _digits(each) == _digits(plain)]
    return next(iter(close_matches(plain, same, n=1, cutoff=0.7)), None)


def _digits(word: str) -> list[str]:
    return sorted(filter(str.isdigit, word))


def to_dtypes(dtype: DTypeLike | None) -> tuple[DTypeRule, ...]:
    """Return the rules in `dtype`. The tuple is empty for None.

    Args:
        dtype: A dtype, a rule ``GLOB=DTYPE``, a mapping from globs to dtypes, or several dtypes and rules.

    Raises:
        UsageError: A word is not a dtype, or two dtypes are given for one glob.
        ArgumentTypeError: A dtype is not a string or a ``torch.dtype``, or a glob is not a string.
    """
    if dtype is None:
        return ()
    if isinstance(dtype, Mapping):
        if not all(isinstance(glob, str) for glob in dtype):
            raise ArgumentTypeError(f"dtype must map globs to dtypes, not {dtype!r}")
        pairs: list[tuple[str | None, str]] = [(glob, _word(word)) for glob, word in dtype.items()]
    else:
        words = [dtype] if isinstance(dtype, str) or not isinstance(dtype, Iterable) else dtype
        pairs = [_split(_word(word)) for word in words]
    rules: dict[str | None, DTypeRule] = {}
    for glob, word in pairs:
        rule = _rule(glob, word)
        if rules.setdefault(glob, rule) != rule:
            raise UsageError(f"two dtypes for {glob or 'all weights'}", got=f"{rules[glob].dtype} and {rule.dtype}")
    return tuple(rules.values())


def _word(dtype: object) -> str:
    """Return the text of `dtype` without ``torch.``. Raise ArgumentTypeError if it is not a string or dtype."""
    if not isinstance(dtype, str) and type(dtype).__name__ != "dtype":
        raise ArgumentTypeError(f"dtype must be a dtype, its name, or a mapping from globs to such, not {dtype!r}")
    return str(dtype).removeprefix("torch.")


def _split(text: str) -> tuple[str | None, str]:
    """Split ``GLOB=DTYPE`` at the last equals sign, because names may contain one. The glob may be None."""
    glob, equals, word = text.rpartition("=")
    return (glob if equals else None), word


def _rule(glob: str | None, word: str) -> DTypeRule:
    """Return the rule for `glob` and the dtype `word`. Raise UsageError if one of them is not valid."""
    name = _NAMES.get(word.strip().removeprefix("torch.").lower())
    if name is None or glob == "":
        expected = "a dtype like fp32, fp16, bf16, float8_e4m3fn, float8_e5m2" + (
            ", after a glob like '*.norm.*'" if glob == "" else ""
        )
        near = near_dtype(word) if glob != "" else None
        raise UsageError(
            f"{word!r} is not a dtype to convert to" if glob != "" else f"'={word}' has no glob",
            expected=expected,
            hint="did you mean: " + option("dtype", near if glob is None else f"{glob}={near}") if near else None,
        )
    rule = DTypeRule(glob, name)
    if name in INTEGERS and (glob is None or re.search("[*?]", glob)):  # a path may contain a bracket
        raise UsageError(
            f"{name} is not a dtype for weights: rounded to integers they need scales, which a cast cannot compute",
            expected=f"the whole path of a tensor of integers: 'PATH={name}'",
        )
    return rule
