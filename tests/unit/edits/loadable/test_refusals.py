"""Tests of the errors of ``--loadable``. The error names all objects that cannot become plain data, with a command that
leaves them out. Hostile files raise a CkptconvError.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core.multiarray import _reconstruct, scalar

import ckptconv
from ckptconv.conversion.convert import run
from ckptconv.conversion.targets import find_request
from ckptconv.edits.options import edits_from
from ckptconv.errors import DangerousError, LimitError, RefusedError, UsageError
from ckptconv.hints import command_in
from tests.support import zoo
from tests.support.command import Command
from tests.support.conversions import refused, refused_in_place, saved_at
from tests.support.judge import assert_same, refusal
from tests.support.rank_runs import save_as_ranks
from tests.unit.edits.loadable.test_table import Odd, loadable

NAME = f"{__name__.rpartition('.')[0]}.test_table.Odd"


class Made:
    """An object that is pickled with `parts`: a callable, its arguments, and optionally a state."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def typed(src: Path, dst: Path, **options: Any) -> Any:
    """Return the options of the command that the error suggests, as words of a shell."""
    said = suggested(src, dst, **options)
    assert said is not None
    words = [word for flag in said.words() for word in flag]
    return words[words.index("OUT") + 1 :]


def suggested(src: Path, dst: Path, **options: Any) -> Any:
    """Return the command that the error suggests, or None. Assert that nothing is written."""
    with pytest.raises(RefusedError, match="cannot be converted to plain data") as caught:
        run(find_request(src, dst, edits_from(loadable=True, **options)))
    assert not dst.exists()
    return command_in(caught.value.hint)


#: Objects that contain instances of unknown classes, and the objects that the suggested command leaves. The instances
#: are shared, nested, and in tuples, keys and attributes.
ODD = Odd(a=1)
INNER = {"deep": Odd(b=2), "n": 1}
TUPLE = (1, Odd(c=3))
LEFT: list[tuple[Any, Any]] = [
    ({"w": torch.ones(1), "o": ODD, "l": [1, ODD, 2]}, {"w": torch.ones(1), "l": [1, 2]}),
    ({"o": Odd(inner=INNER), "again": INNER}, {"again": {"n": 1}}),
    ({"args": argparse.Namespace(lr=1, hook=Odd()), "w": 2}, {"args": {"lr": 1}, "w": 2}),
    ({"t": TUPLE, "l": [TUPLE, 5]}, {"l": [5]}),
    ({"t": ((TUPLE,), 1), "a": {"b": TUPLE}, "w": 0}, {"a": {}, "w": 0}),
    ({"k": {(1, 2): Odd(), None: 3}}, {"k": {None: 3}}),
    ({"kind": Odd, "f": len, "w": 1}, {"w": 1}),
    ({"odd / [name": {"it's": Odd()}, "w": 1}, {"odd / [name": {}, "w": 1}),
    ({"a": np.array([1, Odd()], object), "d": np.ma.masked_array([1], [0]), "w": 1}, {"w": 1}),
    ({f"a{n}": {f"b{i}": Odd() for i in range(9)} for n in range(9)}, {}),
]


@pytest.mark.parametrize("n", range(len(LEFT)))
def test_the_command_drops_everything_that_is_refused(tmp_path: Path, n: int, command: Command) -> None:
    """The suggested command converts the file. It leaves out only the objects that cannot become plain data, and the
    tuples and objects that contain them.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    obj, expected = LEFT[n]
    torch.save(obj, src)
    words = typed(src, dst)
    said = command("convert", src, dst, "--loadable", status=1)
    assert shlex.join(words) in said.err
    command("convert", src, dst, *words)
    assert_same(torch.load(dst, weights_only=True), expected)


def test_the_command_has_the_option_that_was_typed(tmp_path: Path, command: Command) -> None:
    """The suggested command contains ``--loadable-objects`` if the user gave it."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"hook": Odd(a=1), "every": range(3), "w": 1}, src)
    said = command("convert", src, dst, "--loadable-objects", status=1)
    words = shlex.split(said.err.split(" OUT ")[1].splitlines()[0])
    assert words == ["--loadable-objects", "--drop", "every"]
    command("convert", src, dst, *words)
    assert_same(torch.load(dst, weights_only=True), {"hook": {"__class__": NAME, "a": 1}, "w": 1})


def test_paths_are_those_of_the_source(tmp_path: Path, command: Command) -> None:
    """The suggested ``--drop`` uses the paths of the source, also if the conversion selects a part and changes
    names.
    """
    obj = {"model": {"module.w": torch.ones(1), "module._extra_state": Odd()}, "rest": Odd()}
    torch.save(obj, tmp_path / "a.pt")
    options = {"select": "model", "strip_prefix": "module."}
    words = typed(tmp_path / "a.pt", tmp_path / "b.pt", **options)
    assert words == ["--loadable", "--drop", "model/module._extra_state"]
    command("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--select", "model", "--strip-prefix", "module.", *words)
    assert torch.load(tmp_path / "b.pt", weights_only=True).keys() == {"w"}


def test_no_command_if_nothing_would_be_left(tmp_path: Path) -> None:
    """If the suggested command would leave nothing, no command is suggested, or ``--state-dict`` for a module."""
    torch.save(Odd(w=torch.ones(2)), tmp_path / "a.pt")
    assert suggested(tmp_path / "a.pt", tmp_path / "b.pt") is None
    torch.save([torch.nn.Linear(2, 2)], tmp_path / "a.pt")
    assert suggested(tmp_path / "a.pt", tmp_path / "b.pt").words()[-1] == ("--state-dict",)
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", state_dict=True)


def test_classes_of_torch_name_the_import(tmp_path: Path) -> None:
    """A DTensor is refused with a hint about the import after which torch loads it. The hint contains no ``--drop``."""
    save_as_ranks({"w": torch.ones(4, 2)}, tmp_path / "ranks")
    src = tmp_path / "ranks" / "model_world_size_2_rank_0.pt"
    error = refused(RefusedError, "1 object", src, tmp_path / "b.pt", loadable=True)
    assert error.hint == (
        "torch.load(weights_only=True) takes torch.distributed.tensor.DTensor after `import torch.distributed.tensor`"
    )
    torch.load(src, weights_only=True)  # torch.distributed.tensor is imported by now


def test_every_reason_is_reported(tmp_path: Path) -> None:
    """One error names all refused objects with their paths and reasons."""
    torch.save({"a": [Odd()], "b": np.longdouble(1) / 3, "c": len, "w": 1}, tmp_path / "a.pt")
    error = refused(RefusedError, "3 objects", tmp_path / "a.pt", tmp_path / "b.pt", loadable=True)
    assert error.got == (
        f"{NAME} at a[0], numpy scalar (it contains a long double that a float cannot represent exactly) at b,"
        " __builtin__.len at c"
    )


def test_unsupported_outputs(tmp_path: Path) -> None:
    """``loadable`` is refused in place and for plain pickles. For safetensors, a note states that the format contains
    only tensors.
    """
    src = saved_at(tmp_path / "a.pt", {"w": torch.ones(2)})
    for options in ({"loadable": True}, {"loadable_objects": True}):
        refused_in_place(UsageError, "in_place", src, **options)
        refused(UsageError, "does not read pickle", src, tmp_path / "b.pkl", format="pickle", **options)
        report = ckptconv.convert(src, tmp_path / "b.safetensors", force=True, **options)
        assert any("contains only tensors" in note for note in report.notes)


def test_load_and_save(tmp_path: Path) -> None:
    """`load` and `save` accept ``loadable``. `save` refuses objects that cannot become plain data."""
    obj = {"args": argparse.Namespace(lr=1), "a": np.arange(3, dtype=">i8"), "w": torch.ones(2)}
    plain = {"args": {"lr": 1}, "a": torch.arange(3), "w": torch.ones(2)}
    torch.save(obj, tmp_path / "a.pt")
    assert_same(ckptconv.load(tmp_path / "a.pt", loadable=True), plain)
    ckptconv.save(obj, tmp_path / "b.pt", loadable=True)
    assert_same(torch.load(tmp_path / "b.pt", weights_only=True), plain)
    with pytest.raises(RefusedError, match=r"drop='o'"):
        ckptconv.save({**obj, "o": Odd()}, tmp_path / "c.pt", loadable=True)


def test_report_and_json(tmp_path: Path, command: Command) -> None:
    """The report lists each changed object with its path and the code that reads it now. A dry run prints the same."""
    torch.save({"args": argparse.Namespace(lr=1, out=np.float32(2)), "w": torch.ones(1)}, tmp_path / "a.pt")
    said = command.json("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--loadable", "-n")
    assert said["changed"] and said["made_plain"] == [
        {"path": "args", "old": "argparse.Namespace", "new": "dict",
         "reads": "args['lr'], or argparse.Namespace(**args)"},
        {"path": "args/.out", "old": "numpy scalar", "new": "float", "reads": "out"},
    ]  # a table  # fmt: skip
    shown = "argparse.Namespace → dict: args; to read it: args['lr'], or argparse.Namespace(**args)"
    command("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--loadable", err=shown)
    command("convert", tmp_path / "a.pt", tmp_path / "c.pt", "--loadable", "-n", out=shown)


def test_with_other_edits(tmp_path: Path) -> None:
    """Objects that become plain data are neither cast nor moved to a device. Other tensors are edited as usual."""
    obj = {"model": {"module.w": torch.ones(2)}, "a": np.arange(3.0), "r": np.random.RandomState(0).get_state()}
    torch.save(obj, tmp_path / "a.pt")
    options: dict[str, Any] = {"map_location": "cuda", "dtype": "bf16", "strip_prefix": "module.", "compact": True}
    report = ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", loadable=True, **options)
    assert report.changes.devices == {("cpu", "cuda:0"): (1, 4)}
    found = torch.load(tmp_path / "b.pt", weights_only=True, map_location="cpu")
    assert_same(found["model"], {"w": torch.ones(2, dtype=torch.bfloat16)})
    assert_same(found["a"], torch.arange(3.0, dtype=torch.float64))


@pytest.mark.untraced
@pytest.mark.filterwarnings("ignore")  # warnings about pickle protocols and about deprecated objects
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_zoo(tmp_path: Path, name: str, protocol: int) -> None:
    """A checkpoint that torch loads with ``weights_only=True`` keeps its content. Any other is made loadable or
    refused.
    """
    if protocol < zoo.NEEDS_PROTOCOL.get(name, 2):
        pytest.skip("needs a newer protocol")
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    zoo.save(zoo.ZOO[name](), src, ("cpu",), pickle_protocol=protocol)
    took = refusal(src) is None
    for options in ({"loadable": True}, {"loadable_objects": True}):
        refused_at = None
        try:
            ckptconv.convert(src, dst, force=True, **options)
        except (RefusedError, DangerousError) as error:
            refused_at = error.got
        else:
            assert refusal(dst) is None
        assert not (took and refused_at)
        if took:
            same = torch.load(src, map_location="cpu", weights_only=True)
            assert_same(torch.load(dst, map_location="cpu", weights_only=True), same)


# Hostile files

F4 = np.dtype("f4")
NDARRAY = (_reconstruct, (np.ndarray, (0,), b"b"))


def array(*state: Any) -> Made:
    """Return an array with the pickled state `state`."""
    return Made(*NDARRAY, state)


def dtype(name: str, *state: Any) -> Made:
    """Return a dtype with the name `name` and the pickled state `state`."""
    return Made(np.dtype, (name, False, True), (3, *state, -1, 0))


#: Objects whose pickled state is invalid.
LIES: dict[str, Any] = {
    "too few bytes": array(1, (3,), F4, False, b"12345678"),
    "too many bytes": array(1, (1,), F4, False, b"12345678"),
    "a negative shape": array(1, (-1, -2), F4, False, b"12345678"),
    "a shape of texts": array(1, ("2",), F4, False, b"12345678"),
    "a shape of truth": array(1, (True,), F4, False, b"1234"),
    "a huge shape": array(1, (1 << 61, 4), F4, False, b""),
    "a shape beyond": array(1, (1 << 70,), F4, False, b""),
    "too many dimensions": array(1, (1,) * 70, F4, False, b"1234"),
    "no dtype": array(1, (1,), "f4", False, b"1234"),
    "another's dtype": array(1, (1,), dtype("f4", "<", F4, None, None, -1), 0, b"1234"),
    "a dtype without an order": array(1, (1,), dtype("f4", "?", None, None, None, -1), 0, b"1234"),
    "a dtype of two sizes": array(1, (1,), dtype("U1", "<", None, None, None, 8), 0, b"1234"),
    "a dtype in a dtype": array(1, (1,), dtype("V4", "|", None, ("a",), {"a": (F4, 2)}, 4), 0, b"1234"),
    "a dtype of objects": array(1, (1,), np.dtype("O"), False, b"12345678"),
    "fewer objects": array(1, (3,), np.dtype("O"), False, [1, 2]),
    "no bytes": array(1, (1,), F4, False, None),
    "a text": array(1, (4,), np.dtype("u1"), False, "abcd"),
    "no state": Made(*NDARRAY),
    "a short state": array(1, (1,)),
    "a class": Made(_reconstruct, (Odd, (0,), b"b"), (1, (1,), F4, False, b"1234")),
    "a scalar of two": Made(scalar, (F4, b"12345678")),
    "a scalar of nothing": Made(scalar, (F4,)),
    "not valid Unicode": Made(scalar, (np.dtype("U1"), b"\xff\xff\xff\xff")),
    "a path of numbers": Made(Path, (1, 2)),
    "no month": Made(datetime.date, (b"\x07\xe6\x0d\x01",)),
    "no date": Made(datetime.date, (b"\x07\xe6",)),
    "a long time": Made(datetime.timedelta, (1 << 40, 0, 0)),
    "a dict of two": Made(collections.defaultdict, (list, {"a": 1}, {"b": 2})),
    "a dict of pairs": Made(collections.defaultdict, (list, [("a", 1)])),
    "a short time": array(1, (1,), dtype("M4", "<", None, None, None, -1), 0, b"1234"),
    "a namespace of numbers": Made(argparse.Namespace, (), {1: 2}),
    "a namespace with arguments": Made(argparse.Namespace, (1,), {"a": 2}),
}  # a table  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_false_statements(tmp_path: Path, what: str) -> None:
    """An object with an invalid state is refused with its path, nothing is written, and the error suggests a command
    without the object.
    """
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"lie": LIES[what], "w": torch.ones(1)}, src)
    words = typed(src, dst)
    assert words == ["--loadable", "--drop", "lie"]
    ckptconv.convert(src, dst, loadable=True, drop="lie")
    assert_same(torch.load(dst, weights_only=True), {"w": torch.ones(1)})


def test_small_files_with_large_contents(tmp_path: Path) -> None:
    """A small file that describes a huge array, or uses the same bytes in many arrays, is refused with a LimitError."""
    many = np.zeros((10**9, 0), "U1")
    with pytest.raises(LimitError, match="far more bytes"):
        loadable({"a": many}, tmp_path / "a.pt")
    data = b"x" * (1 << 20)
    arrays = [array(1, (1 << 20,), np.dtype("u1"), False, data) for _ in range(1100)]
    with pytest.raises(LimitError, match="far more bytes"):
        loadable({"a": arrays}, tmp_path / "a.pt")


@pytest.mark.untraced
def test_many_objects(tmp_path: Path) -> None:
    """A file with 20,001 objects, some of them shared, is converted."""
    same = argparse.Namespace(x=1)
    obj = [argparse.Namespace(n=n, same=same, f=np.float64(n)) for n in range(10_000)]
    found, made = loadable(obj, tmp_path / "a.pt")
    assert len(made) == 20_001
    assert found[-1] == {"n": 9_999, "same": {"x": 1}, "f": 9_999.0}
    assert found[0]["same"] is found[-1]["same"]


def test_many_refused_objects(tmp_path: Path) -> None:
    """If many objects in one container are refused, the suggested command drops the container."""
    torch.save({"a": [Odd() for _ in range(3000)], "w": 1}, tmp_path / "a.pt")
    assert typed(tmp_path / "a.pt", tmp_path / "b.pt") == ["--loadable", "--drop", "a"]


def test_nested_objects(tmp_path: Path) -> None:
    """300 nested objects are converted."""
    obj: Any = 1
    for _ in range(300):
        obj = argparse.Namespace(x=obj)
    found, _ = loadable({"o": obj}, tmp_path / "a.pt")
    for _ in range(300):
        (found,) = found.values()
    assert found == {"x": 1}


def test_dangerous_calls_are_refused(tmp_path: Path) -> None:
    """Dangerous calls are refused, also by ``loadable_objects``, and are never executed."""
    mark = tmp_path / "mark"
    for made in (Made(os.system, (f"touch {mark}",)), Made(getattr, (Odd, "a"))):
        torch.save({"o": made, "w": 1}, tmp_path / "a.pt")
        for options in ({"loadable": True}, {"loadable_objects": True}):
            with pytest.raises((DangerousError, RefusedError)):
                ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options)
    assert not mark.exists()


def test_conversion_to_dicts_is_suggested_only_if_it_helps(tmp_path: Path) -> None:
    """The error of ``loadable`` suggests ``loadable_objects`` only if that would convert the file."""
    bad = Made(os.system, (f"touch {tmp_path / 'mark'}",))
    for obj, helps in (({"o": Odd()}, True), ({"b": bad}, False), ({"o": Odd(), "b": bad}, False)):
        torch.save({"w": torch.ones(1), **obj}, tmp_path / "a.pt")
        error = refused(RefusedError, None, tmp_path / "a.pt", tmp_path / "b.pt", loadable=True)
        assert ("loadable_objects" in str(error)) is helps
        if helps:
            ckptconv.convert(tmp_path / "a.pt", tmp_path / "c.pt", loadable_objects=True)
    assert not (tmp_path / "mark").exists()


def test_a_defaultdict_with_items_as_arguments(tmp_path: Path) -> None:
    """The items of a defaultdict that are arguments of its call are kept."""
    made = Made(collections.defaultdict, (list, {"a": 1}))
    assert_same(loadable({"d": made}, tmp_path / "a.pt")[0], {"d": {"a": 1}})


def test_an_unproved_output_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the output cannot be proved to load, nothing is written."""
    torch.save({"a": np.arange(3), "w": torch.ones(1)}, tmp_path / "long.pt")
    monkeypatch.setattr("ckptconv.safety.torch_load._LONGEST_NAME", 3)
    refused(RefusedError, "cannot be proved", tmp_path / "long.pt", tmp_path / "b.pt", loadable=True)
