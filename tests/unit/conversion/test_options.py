"""The keywords of public functions: what their declaration makes of them."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

import ckptconv
from ckptconv.conversion.options import ConvertOptions, JobOptions, OutputOptions, takes
from ckptconv.edits.options import EditOptions


def test_each_keyword_is_an_edit_or_about_the_output() -> None:
    """And has a type and a text."""
    output = {each.name for each in fields(OutputOptions)}
    assert output.isdisjoint(EditOptions.__annotations__)
    assert ConvertOptions.__annotations__.keys() == output | EditOptions.__annotations__.keys()
    for name, declared in JobOptions.__annotations__.items():
        (text,) = declared.__metadata__
        assert text.endswith(".") and len(text) > 10, name


def test_a_signature_has_each_keyword_with_its_default() -> None:
    """Those of ``save`` are fewer, and one is another."""
    convert, save, diff = (
        inspect.signature(each).parameters for each in (ckptconv.convert, ckptconv.save, ckptconv.diff)
    )
    assert [*convert][:2] == ["src", "dst"]
    assert convert.keys() - {"src", "dst"} == ConvertOptions.__annotations__.keys()
    assert {name: convert[name].default for name in ("force", "jobs", "include", "dtype")} == {
        "force": False,
        "jobs": 1,
        "include": (),
        "dtype": None,
    }
    assert str(convert["map_location"]) == "map_location: 'MapLocation | None' = None"
    assert save["force"].default is True
    assert convert.keys() - save.keys() == {
        *("src", "dst", "max_shard_size", "copy_others", "dry_run", "jobs", "in_place", "no_undo")
    }
    assert {"names_only", "strip_prefix"} < diff.keys() and "dtype" not in diff


def test_the_docstring_has_each_keyword_once() -> None:
    """What a function says itself comes first; without docstrings there is nothing to say."""
    text = inspect.getdoc(ckptconv.save) or ""
    for name in inspect.signature(ckptconv.save).parameters:
        assert text.count(f"\n    {name}: ") == 1, name
    assert "force: `path` may exist" in text and "**options" not in text

    @takes(ConvertOptions)
    def silent(**options: Any) -> None:
        pass

    assert silent.__doc__ is None


@pytest.mark.parametrize("function", [ckptconv.convert, ckptconv.save, ckptconv.diff])
def test_an_unknown_keyword_is_refused(function: Any) -> None:
    """In Python's words, before anything is opened."""
    with pytest.raises(TypeError) as caught:
        function("a.pt", "b.pt", mao_location="cpu")
    assert str(caught.value) == f"{function.__name__}() got an unexpected keyword argument 'mao_location'"


@pytest.mark.parametrize("flag", [each.name for each in fields(OutputOptions) if each.type is bool] + ["unwrap"])
def test_flags_are_true_or_false(flag: str) -> None:
    """Wherever they are given."""
    functions: list[Any] = [ckptconv.convert]
    if flag in JobOptions.__annotations__:
        functions.append(lambda src, dst, **options: ckptconv.Job(src, dst, options))
    for function in functions:
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, not 'no'$"):
            function("a.pt", "b.pt", **{flag: "no"})
