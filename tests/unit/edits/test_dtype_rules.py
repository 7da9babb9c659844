"""The grammar of ``--dtype``, which accepts the dtype names of torch and safetensors, and common short names.
Contradictory rules are refused before any input is read.
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


# Names of dtypes


@pytest.mark.parametrize("name", [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)])
def test_torch_names(name: str) -> None:
    """A dtype that weights can be cast to is accepted under each of its torch names. An integer dtype is accepted only
    for a named tensor. Other dtypes are refused.
    """
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
def test_safetensors_names(word: str, dtype: torch.dtype) -> None:
    """The dtype names of safetensors are accepted in upper and lower case."""
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
def test_common_short_names(said: str, known: str) -> None:
    """Common short names are accepted in upper and lower case."""
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
def test_other_names_are_refused(word: str) -> None:
    """Unknown and ambiguous names are refused, and so are dtypes that weights cannot have."""
    for said in (word, f"*={word}", f"a.b={word}"):
        with pytest.raises(UsageError, match="is not a dtype to convert to"):
            to_dtypes(said)


# Rules


BF16, NORM = DTypeRule(None, "bfloat16"), DTypeRule("*.norm.*", "float32")


@pytest.mark.parametrize(
    ("said", "rules"),
    [
        ("a=b=bf16", (DTypeRule("a=b", "bfloat16"),)),  # the name contains an equals sign
        ({"a=b": "bf16"}, (DTypeRule("a=b", "bfloat16"),)),  # keys of a mapping are not split
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
def test_accepted_forms(said: Any, rules: tuple[DTypeRule, ...]) -> None:
    """A dtype, a rule, a mapping, or any iterable of dtypes and rules is accepted. A rule is split at its last equals
    sign.
    """
    assert to_dtypes(said) == rules


def test_rules_are_printed_with_torch_names() -> None:
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
def test_contradictory_rules(said: Any, error: str) -> None:
    """Two dtypes for the same glob or for all weights, an empty glob, and an integer dtype for weights are refused."""
    with pytest.raises(UsageError, match=error):
        to_dtypes(said)


@pytest.mark.parametrize(
    "said", [3, [3], b"bf16", {"*": None}, {3: "bf16"}, {None: "bf16"}, [None], torch.ones(1), [["bf16"]], object()]
)
def test_values_of_other_types(said: Any) -> None:
    """A value of another type raises a TypeError."""
    with pytest.raises(TypeError, match="dtype must"):
        to_dtypes(said)


def test_errors_on_the_command_line(tmp_path: Path, command: Command) -> None:
    """The command fails with status 2 and prints one line, before it reads the input."""
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
