"""Tests of the keywords of public functions, which are declared in one place."""

from __future__ import annotations

import inspect
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.conversion.options import ConvertOptions, JobOptions, OutputOptions, SaveOptions, takes
from ckptconv.edits.options import EditOptions
from ckptconv.errors import ArgumentTypeError
from tests.support.conversions import saved_at


def test_each_keyword_is_an_edit_or_about_the_output() -> None:
    """Every keyword is either an edit or an option of the output, and has a help text."""
    output = {each.name for each in fields(OutputOptions)}
    assert output.isdisjoint(EditOptions.__annotations__)
    assert JobOptions.__annotations__.keys() == output | EditOptions.__annotations__.keys()
    for name, declared in JobOptions.__annotations__.items():
        (flag,) = declared.__metadata__
        assert all(text.endswith(".") and len(text) > 10 for text in (flag.help, flag.doc or flag.help)), name


def test_a_signature_has_each_keyword_with_its_default() -> None:
    """The signatures contain the declared keywords with their defaults and types. `save` has fewer keywords, and
    ``force=True`` as the default.
    """
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
    only = convert.keys() - save.keys()
    assert only == {"src", "dst", *ConvertOptions.__annotations__} - SaveOptions.__annotations__.keys()
    assert {"max_shard_size", "dry_run", "jobs", "in_place"} < only
    assert {"names_only", "strip_prefix"} < diff.keys() and "dtype" not in diff


def test_the_docstring_has_each_keyword_once() -> None:
    """The docstring describes every keyword once. The function's own text about a keyword is preferred. A function
    without a docstring gets none.
    """
    text = inspect.getdoc(ckptconv.save) or ""
    for name in inspect.signature(ckptconv.save).parameters:
        assert text.count(f"\n    {name}: ") == 1, name
    assert "force: Whether `path` may exist" in text and "**options" not in text

    @takes(ConvertOptions)
    def silent(**options: Any) -> None:
        pass

    assert silent.__doc__ is None


MEANT = {
    ("convert", "to", "cpu"): "did you mean: map_location='cpu'",
    ("convert", "map", "cuda=cpu"): "did you mean: map_location='cuda=cpu'",
    ("convert", "cuda", True): "did you mean: map_location='cuda'",
    ("convert", "half", True): "did you mean: dtype='fp16'",
    ("convert", "half", False): "did you mean: dtype",
    ("convert", "strip", True): "did you mean: strip_prefix='module.'",
    ("convert", "strip", "a."): "did you mean: strip_prefix='a.'",
    ("convert", "overwrite", False): "did you mean: force=False",
    ("convert", "weights_only", True): "did you mean: state_dict=True",
    ("convert", "output", "o.pt"): "did you mean: dst='o.pt'",
    ("convert", "mao_location", "cpu"): "did you mean: map_location='cpu'",
    ("convert", "dtype_", "x" * 100): "did you mean: dtype",
    ("jobs_in", "to", "cpu"): "did you mean: map_location='cpu'",
    ("load", "device", "cpu"): "did you mean: map_location='cpu'",
    ("load", "weights_only", True): "leave it out: it is always as with weights_only=True",
    ("load", "f", "m.pt"): "did you mean: path='m.pt'",
    ("save", "out", "m.pt"): "did you mean: path='m.pt'",
    ("inspect", "file", "m.pt"): "did you mean: path='m.pt'",
    ("verify", "sha256", "0"): "did you mean: expect_sha256='0'",
    ("diff", "tol", 1.0): "did you mean: rtol=1.0",
    ("remap", "device", "cpu"): "did you mean: map_location='cpu'",
}


@pytest.mark.parametrize(("name", "guess", "value"), MEANT)
def test_an_unknown_keyword_is_refused_with_a_suggestion(name: str, guess: str, value: Any) -> None:
    """An unknown keyword is refused with Python's message before a file is opened. The error suggests the intended
    keyword.
    """
    function = getattr(ckptconv, name)
    with pytest.raises(ArgumentTypeError) as caught:
        function("a.pt", "b.pt", **{guess: value})
    meant = MEANT[name, guess, value]
    assert str(caught.value) == f"{name}() got an unexpected keyword argument {guess!r}; {meant}"
    if meant.startswith("did you mean: "):
        assert meant.removeprefix("did you mean: ").partition("=")[0] in inspect.signature(function).parameters


def test_an_unknown_keyword_without_a_suggestion() -> None:
    """If no keyword resembles an unknown one, the error suggests none."""
    with pytest.raises(TypeError) as caught:
        ckptconv.convert("a.pt", "b.pt", frobnicate=1)  # type: ignore[call-arg]
    assert str(caught.value) == "convert() got an unexpected keyword argument 'frobnicate'"


@pytest.mark.parametrize("flag", [each.name for each in fields(OutputOptions) if each.type is bool] + ["unwrap"])
def test_flags_are_true_or_false(flag: str) -> None:
    """A flag that is neither True nor False is refused, in `convert` and in `Job`."""
    functions: list[Any] = [lambda src, dst, **options: ckptconv.Job(src, dst, options)]
    if flag in ConvertOptions.__annotations__:
        functions.append(ckptconv.convert)
    for function in functions:
        with pytest.raises(TypeError, match=f"^{flag} must be True or False, not 'no'$"):
            function("a.pt", "b.pt", **{flag: "no"})


@pytest.mark.parametrize(("option", "words"), [({"jobs": "x"}, "a whole number, not 'x'"), ({"select": 3}, "a text")])
def test_types_of_numbers_and_texts(option: dict[str, Any], words: str) -> None:
    """A number or a text of the wrong type is refused before a file is opened."""
    with pytest.raises(ArgumentTypeError, match=f"^{next(iter(option))} must be {words}"):
        ckptconv.convert("a.pt", "b.pt", **option)


@pytest.mark.parametrize(
    ("name", "args", "wrong"),
    [
        ("convert", (None, "o.pt"), "src"),
        ("convert", ("m.pt", 3), "dst"),
        *((name, (None,), "path") for name in ("inspect", "load", "open", "undo", "verify")),
        ("save", ({}, None), "path"),
        ("diff", ("m.pt", None), "b"),
        ("jobs_in", (3, "o"), "src"),
        ("write_index", (3.5,), "folder"),
    ],
)
def test_arguments_that_are_not_paths(name: str, args: tuple[object, ...], wrong: str, tmp_path: Path) -> None:
    """An argument that is not a path is refused with its name. A TypeError from a function of the user is raised
    unchanged.
    """
    with pytest.raises(ArgumentTypeError, match=f"^{wrong} must be a path, not "):
        getattr(ckptconv, name)(*[torch_file(tmp_path) if each == "m.pt" else each for each in args])
    with pytest.raises(TypeError, match="of mine"):
        ckptconv.convert(torch_file(tmp_path), tmp_path / "o.pt", map_location=of_mine)
    with pytest.raises(TypeError, match="of mine"):
        ckptconv.load(io.BytesIO(torch_file(tmp_path).read_bytes()), map_location=lambda storage, tag: of_mine(tag))


def of_mine(tag: str) -> str:
    """Raise a TypeError, like a function of the user with an error."""
    raise TypeError("of mine")


def torch_file(folder: Path) -> Path:
    """Return the path of a torch checkpoint in `folder`."""
    return saved_at(folder / "m.pt", {"w": torch.ones(1)})


class AnyPath:
    """A path-like object that is neither a string nor a path of pathlib."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


def test_every_path_may_be_path_like(here: Path) -> None:
    """Every public function accepts path-like objects."""
    src, dst = AnyPath("m.pt"), AnyPath("o.pt")
    assert ckptconv.save({"module.w": torch.ones(300), "module.b": torch.zeros(300)}, src).written
    assert ckptconv.convert(src, dst, strip_prefix="module.").dst == "o.pt"
    assert ckptconv.convert(src, AnyPath("sh"), max_shard_size=1500).files
    assert ckptconv.diff(src, dst, strip_prefix="module.").same
    assert ckptconv.convert(dst, in_place=True, map_location="cuda").changed
    assert ckptconv.undo(dst) > 0
    assert ckptconv.load(AnyPath("sh")).keys() == {"module.w", "module.b"}
    assert ckptconv.inspect(src).path == "m.pt" and ckptconv.verify(src).ok
    with ckptconv.open(src) as file:
        assert len(file.tensors) == 2
    (job,) = ckptconv.jobs_in([src], AnyPath("many"))
    for each in (job, ckptconv.Job(src, AnyPath("p.pt"))):
        (outcome,) = ckptconv.convert_many([each], ThreadPoolExecutor(1))
        assert outcome.report and outcome.report.written
    (here / "sh" / "pytorch_model.bin.index.json").unlink()
    assert ckptconv.write_index(AnyPath("sh")).name == "pytorch_model.bin.index.json"
    with pytest.raises(FileNotFoundError, match=r"^no: "):
        ckptconv.write_index(AnyPath("no"))


def test_a_report_contains_whether_anything_changed(tmp_path: Path) -> None:
    """The report's ``changed`` is true only if an edit or the format changes something, in a new file or in place."""
    src = saved_at(tmp_path / "m.pt", {"module.w": torch.ones(3)})

    def changed(dst: str, **options: Any) -> bool:
        return ckptconv.convert(src, tmp_path / dst, **options).changed

    assert not changed("a.pt") and not changed("b.pt", map_location="cpu")
    assert changed("c.pt", map_location="cuda") and changed("d.pt", strip_prefix="module.")
    assert changed("e.pt", dtype="fp16") and changed("f.safetensors") and changed("g.pt", format="legacy")
    assert changed("h.pt", map_location="cuda", dry_run=True)
    assert not ckptconv.convert(src, in_place=True, map_location="cpu").changed
    assert ckptconv.convert(src, in_place=True, map_location="cuda").changed
