"""The grammar of ``--dtype`` and ``dtype=``.

``bf16`` is for the weights, ``GLOB=bf16`` for what GLOB names. Words are torch's,
safetensors', and those that people use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

#: Numbers with a floating point that torch casts from; float8_e8m0fnu has none to cast
#: to (it holds scales, not weights).
FLOATS = frozenset(name for name in BY_NAME if re.fullmatch(r"b?float(8_\w+|16|32|64)", name))
_TARGETS = FLOATS - {"float8_e8m0fnu"}
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"})
#: What people write beside torch's names and safetensors' words.
_CALLED = {
    "double": "float64", "float": "float32", "half": "float16", "bfloat": "bfloat16", "fp64": "float64",
    "fp32": "float32", "fp16": "float16", "long": "int64", "int": "int32", "short": "int16",
    "f8_e4m3fn": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # a table  # fmt: skip
#: What people write that is not exact enough to be taken without a question.
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
    """`dtype`, by torch's name, for the tensors that `glob` names; None: for all weights."""

    glob: str | None
    dtype: str

    def is_within(self, other: DTypeRule) -> bool:
        """Whether this glob means less than `other`'s, as far as their texts tell: `other`'s fits
        this one's, and not the other way round.
        """
        return (
            self.glob is not None
            and other.glob is not None
            and fnmatchcase(self.glob, other.glob)
            and not fnmatchcase(other.glob, self.glob)
        )

    def __str__(self) -> str:
        return self.dtype if self.glob is None else f"{self.glob}={self.dtype}"


def near_dtype(word: str) -> str | None:
    """Return the dtype for weights that somebody means by `word`, or None.

    The digits must be right but for their order: ``float61`` is float16, and ``fp4`` is not fp64.
    """
    plain = word.strip().lower().removesuffix("-mixed").removesuffix("-true")
    if plain in _NAMES or plain in _LOOSELY:
        return _LOOSELY.get(plain, plain)
    same = [each for each, name in _NAMES.items() if name in FLOATS and _digits(each) == _digits(plain)]
    return next(iter(close_matches(plain, same, n=1, cutoff=0.7)), None)


def _digits(word: str) -> list[str]:
    return sorted(filter(str.isdigit, word))


def to_dtypes(dtype: DTypeLike | None) -> tuple[DTypeRule, ...]:
    """The rules that `dtype` says.

    Raises UsageError for what is no dtype or contradicts itself, TypeError for what is no word.
    """
    if dtype is None:
        return ()
    if isinstance(dtype, Mapping):
        if not all(isinstance(glob, str) for glob in dtype):
            raise ArgumentTypeError(f"dtype must map globs to dtypes, not {dtype!r}")
        said: list[tuple[str | None, str]] = [(glob, _word(word)) for glob, word in dtype.items()]
    elif isinstance(dtype, str) or not isinstance(dtype, Iterable):
        said = [_split(_word(dtype))]
    else:
        said = [_split(_word(each)) for each in dtype]
    rules: dict[str | None, DTypeRule] = {}
    for glob, word in said:
        rule = _rule(glob, word)
        if rules.setdefault(glob, rule) != rule:
            raise UsageError(f"two dtypes for {glob or 'all weights'}", got=f"{rules[glob].dtype} and {rule.dtype}")
    return tuple(rules.values())


def _word(said: object) -> str:
    """What somebody `said`, without what torch puts before the names of its dtypes."""
    text = said if isinstance(said, str) else str(said) if type(said).__name__ == "dtype" else None
    if text is None:
        raise ArgumentTypeError(f"dtype must be a dtype, its name, or a mapping from globs to such, not {said!r}")
    return text.removeprefix("torch.")


def _split(text: str) -> tuple[str | None, str]:
    """``GLOB=DTYPE`` at its last equals sign, which names can have too."""
    glob, equals, word = text.rpartition("=")
    return (glob if equals else None), word


def _rule(glob: str | None, word: str) -> DTypeRule:
    name = _NAMES.get(word.strip().removeprefix("torch.").lower())
    if name is None or glob == "":
        expected = "a dtype like fp32, fp16, bf16, float8_e4m3fn, float8_e5m2" + (
            ", after a glob like '*.norm.*'" if glob == "" else ""
        )
        near = near_dtype(word) if glob != "" else None
        raise UsageError(
            f"{word!r} is no dtype to convert to" if glob != "" else f"'={word}' has no glob",
            expected=expected,
            hint="is this meant: " + option("dtype", near if glob is None else f"{glob}={near}") if near else None,
        )
    rule = DTypeRule(glob, name)
    if name in INTEGERS and (glob is None or re.search("[*?]", glob)):  # a path can have a bracket
        raise UsageError(
            f"{name} is no dtype for weights: rounded to integers they need scales, which no cast can find",
            expected=f"the whole path of a tensor of integers: 'PATH={name}'",
        )
    return rule
