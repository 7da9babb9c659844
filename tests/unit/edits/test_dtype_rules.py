"""The grammar of ``--dtype``: words are torch's, safetensors' and people's; what makes no
sense is refused before anything is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES  # type: ignore[attr-defined]

from ckptconv.edits.dtype_rules import FLOATS, INTEGERS, DTypeRule, to_dtypes
from ckptconv.errors import UsageError
from tests.support.command import Command, in_one_line

TARGETS = sorted(FLOATS - {"float8_e8m0fnu"})


def dtype_of(said: Any) -> str:
    (rule,) = to_dtypes(said)
    assert rule.glob is None
    return rule.dtype


# Words


@pytest.mark.parametrize("name", [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)])
def test_every_name_that_torch_has(name: str) -> None:
    """Floats for all, integers for one tensor, by whatever name; what nothing can be cast to is no dtype."""
    dtype = getattr(torch, name)
    known = str(dtype)[6:]
    for said in (name, f"torch.{name}", name.upper(), f" {name} ", dtype):
        if known in TARGETS:
            assert dtype_of(said) == known
        else:
            with pytest.raises(UsageError, match="not a dtype"):
                to_dtypes(said)
    if known in INTEGERS:
        assert to_dtypes({"steps": dtype}) == (DTypeRule("steps", known),)


@pytest.mark.parametrize(("word", "dtype"), sorted(_TYPES.items()))
def test_every_word_of_safetensors(word: str, dtype: torch.dtype) -> None:
    """In capitals and not."""
    known = str(dtype)[6:]
    for said in (word, word.lower()):
        if known in TARGETS:
            assert dtype_of(said) == known
        elif known in INTEGERS:
            assert to_dtypes(f"steps={said}") == (DTypeRule("steps", known),)
        else:
            with pytest.raises(UsageError):
                to_dtypes(said)


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("fp64", "float64"),
        ("fp32", "float32"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("double", "float64"),
        ("float", "float32"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("F8_E4M3FN", "float8_e4m3fn"),
        ("bfloat", "bfloat16"),
    ],
)
def test_what_people_write(said: str, known: str) -> None:
    """Short names, in any case."""
    assert dtype_of(said) == dtype_of(said.upper()) == known


@pytest.mark.parametrize(
    "word",
    [
        "",
        "bf",
        "fp8",
        "float128",
        "complex64",
        "bool",
        "qint8",
        "e8m0",
        "float8_e8m0fnu",
        "F8_E8M0",
        "F4",
        "auto",
        "bf16,fp32",
    ],
)
def test_other_words_are_refused(word: str) -> None:
    """Also what could be two, and what weights cannot be."""
    for said in (word, f"*={word}", f"a.b={word}"):
        with pytest.raises(UsageError, match="is not a dtype to convert to"):
            to_dtypes(said)


# Rules


BF16, NORM = DTypeRule(None, "bfloat16"), DTypeRule("*.norm.*", "float32")


@pytest.mark.parametrize(
    ("said", "rules"),
    [
        ("a=b=bf16", (DTypeRule("a=b", "bfloat16"),)),  # names can have some
        ({"a=b": "bf16"}, (DTypeRule("a=b", "bfloat16"),)),  # in a mapping nothing is split
        (["bf16", "*.norm.*=fp32"], (BF16, NORM)),
        ((torch.bfloat16, "*.norm.*=torch.float32"), (BF16, NORM)),
        ((word for word in ("bf16", "*.norm.*=float")), (BF16, NORM)),
        ({"*.norm.*": torch.float32}, (NORM,)),
        ({"*.norm.*": "fp32"}, (NORM,)),
        (["bf16", "BF16", torch.bfloat16], (BF16,)),
        (None, ()),
        ((), ()),
        ({}, ()),
    ],
)
def test_all_ways_to_say_the_same(said: Any, rules: tuple[DTypeRule, ...]) -> None:
    """One word, a sequence of words, dtypes and rules, any iterable; a rule is split at its last equals sign."""
    assert to_dtypes(said) == rules


def test_rules_are_said_in_torchs_words() -> None:
    assert [str(rule) for rule in to_dtypes(["*.a=BF16", "BF16"])] == ["*.a=bfloat16", "bfloat16"]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (["bf16", "fp16"], "two dtypes for all weights"),
        (["*.a=bf16", "*.a=fp16"], "two dtypes for \\*.a"),
        ("=bf16", "has no glob"),
        ({"": "bf16"}, "has no glob"),
        ("int8", "not a dtype for weights"),
        ("*.a=int8", "not a dtype for weights"),
        ("a?=torch.int64", "not a dtype for weights"),
    ],
)
def test_what_contradicts_itself(said: Any, error: str) -> None:
    """Two dtypes for one glob, none, an empty glob, integers for weights."""
    with pytest.raises(UsageError, match=error):
        to_dtypes(said)


@pytest.mark.parametrize(
    "said", [3, [3], b"bf16", {"*": None}, {3: "bf16"}, {None: "bf16"}, [None], torch.ones(1), [["bf16"]], object()]
)
def test_what_is_no_word(said: Any) -> None:
    """A TypeError that says what is taken."""
    with pytest.raises(TypeError, match="dtype must"):
        to_dtypes(said)


def test_the_command_line_says_so(tmp_path: Path, command: Command) -> None:
    """One line, exit status 2, before the input is looked at."""
    words = "convert", tmp_path / "none.pt", tmp_path / "dst.pt"
    for flags, line in (
        (
            ["--dtype", "b16"],
            (
                "ckptconv: 'b16' is not a dtype to convert to (expected a dtype like fp32, fp16, bf16, float8_e4m3fn,"
                " float8_e5m2); did you mean: --dtype bf16"
            ),
        ),
        (
            ["--dtype", "=bf16"],
            (
                "ckptconv: '=bf16' has no glob (expected a dtype like fp32, fp16, bf16, float8_e4m3fn, float8_e5m2,"
                " after a glob like '*.norm.*')"
            ),
        ),
        (
            ["--dtype", "int8"],
            (
                "ckptconv: int8 is not a dtype for weights: rounded to integers they need scales, which a cast cannot"
                " compute (expected the whole path of a tensor of integers: 'PATH=int8')"
            ),
        ),
        (["--dtype", "bf16", "--dtype", "fp16"], "ckptconv: two dtypes for all weights (got bfloat16 and float16)"),
    ):
        assert in_one_line(command(*words, *flags, status=2).err) == line + "\n"
