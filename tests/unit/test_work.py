"""The budget of work: its charges and grants, and that every command uses it."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.errors import CkptconvError, LimitError
from ckptconv.limits import Limits
from ckptconv.pickles.graph import List, Object, Tuple, Value, gc_paused, walk
from ckptconv.work import Work, bounded, seen, tell, watched, work
from tests.fuzz.budgets import file_of
from tests.support.hostile_bytes import dict_of, pickle_of, storage, tensor, text, torch_zip_of, zip_of

#: Shapes with many nodes, which some command has to visit several times.
DEAR = (
    "lists",
    "tuples in tuples",
    "attributes, each thrown away",
    "chains of calls, thrown away",
    "calls in a list, popped",
)
COMMANDS: dict[str, Callable[[Path], object]] = {
    "inspect": ckptconv.inspect,
    "verify": lambda path: refused_by(ckptconv.verify(path)),
    "convert": lambda path: ckptconv.convert(path, path.with_name("out.pt"), map_location="cpu", force=True),
    "loadable": lambda path: ckptconv.convert(path, path.with_name("out.pt"), loadable=True, force=True),
    "diff": lambda path: ckptconv.diff(path, path),
}


def refused_by(verdict: ckptconv.Verdict) -> None:
    """Raise LimitError if a finding of `verdict` tells that the work was used up."""
    for finding in verdict.findings:
        if "too much work" in str(finding):
            raise LimitError("its contents take too much work", where=finding.where)


def test_a_budget_is_that_of_the_outermost_block() -> None:
    """Inner blocks share the budget of the outermost block. After this block, the budget is another one."""
    with bounded():
        outer = work()
        with bounded(), gc_paused():
            assert work() is outer
            work().charge(10)
        assert outer.left == Limits().work - 10
        outer.grant(100)
        assert outer.left == Limits().work - 10 + 100 * Limits().work_each
    assert work() is not outer


def test_a_used_up_budget_stays_used_up() -> None:
    """After the budget is used up, each charge and each check raises the error again. So an error that another one has
    hidden is not lost.
    """
    budget = Work(5)
    budget.charge(5)
    for again in (lambda: budget.charge(1), budget.check, lambda: budget.charge(0)):
        with pytest.raises(LimitError, match=r"take too much work.*expected at most 4,000,000 steps for 0 bytes"):
            again()


@pytest.mark.parametrize("kind", ["a pickle", "pickles in a program", "JSON of a program"])
def test_deflated_records_are_granted_little(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few deflated bytes can contain many opcodes or lists, in one record or in several. Therefore they grant little
    work.
    """
    path = tmp_path / "a.pt2"
    many = zip_of({"a/data.pkl": b"\x80\x02](" + b"N" * 20_000 + b"e.", "a/version": b"3"}, zipfile.ZIP_DEFLATED)
    if kind == "a pickle":
        path.write_bytes(many)
    else:
        fat = kind == "JSON of a program"
        program = {"graph_module": {"graph": {"nodes": [[]] * 20_000 * fat}, "signature": {"input_specs": []}}}
        text = json.dumps({**program, "schema_version": {"major": 8, "minor": 1}}, separators=(",", ":")).encode()
        records = {f"data/sample_inputs/{i}.pt": many for i in range(0 if fat else 3)}
        weights = "data/weights/m_weights_config.json"
        stored = zip_of({"a/archive_format": b"pt2", f"a/{weights}": b'{"config": {}}'}, zipfile.ZIP_STORED)
        path.write_bytes(stored)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/models/m.json", text)
            for name, data in records.items():
                archive.writestr(zipfile.ZipInfo(f"a/{name}"), data)  # stored
    ckptconv.inspect(path)
    few = Limits(inflated_bytes=20_100 if kind == "pickles in a program" else 1000, work=20_000)
    for module in ("work", "limits"):
        monkeypatch.setattr(f"ckptconv.{module}.LIMITS", few)
    if kind == "pickles in a program":
        assert "too many pickle opcodes" in str(ckptconv.inspect(path).notes)
        return
    with pytest.raises(LimitError, match="in a deflated pickle" if kind == "a pickle" else "too much work"):
        ckptconv.inspect(path)


def test_a_long_device_counts_for_each_tensor_that_differs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``diff`` reports both devices of each tensor, so a long device is charged for each tensor, even if the tensors
    share its text.
    """
    shared = tensor(storage(tag="d").replace(text("d"), b"h\x00"))
    for name in ("a", "b"):
        data = pickle_of(text(name * 20_000) + b"q\x00", *[shared] * 100)
        (tmp_path / name).write_bytes(torch_zip_of(data))
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=20_000))
    assert ckptconv.diff(tmp_path / "a", tmp_path / "a").same
    with pytest.raises(LimitError, match="too much work"):
        ckptconv.diff(tmp_path / "a", tmp_path / "b")


def test_a_walk_is_charged_for_each_node() -> None:
    """A walk charges each node, and ends with an error when the budget is used up."""
    nodes = Tuple([Tuple([]) for _ in range(10)])
    with bounded():
        work().left = 5
        visited = []
        with pytest.raises(LimitError):
            visited.extend(walk([nodes]))
        assert work().left < 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("shape", DEAR)
def test_every_command_counts(shape: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small budget, no command finishes an expensive file. Each command ends with an error that names the file,
    and writes no output.
    """
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, 6000)[0])
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=3000, work_each=0))
    with pytest.raises(LimitError, match=r"a\.pt.*: its contents take too much work"):
        COMMANDS[command](path)
    assert not path.with_name("out.pt").exists()


@pytest.mark.untraced
@pytest.mark.parametrize(
    "shape",
    [
        "a list in sets of protocol 2",
        "a list in frozensets of protocol 2",
        "a list in queues",
        "a dict as a state",
        "a dict in states",
        "a dict in namespaces",
        "a dict in mappings of protocol 0",
        "arrays of one list",
        "numbers of a dtype with elements",
        "texts of the same bytes",
        "paths of one text",
        "keys of tuples of tuples",
        "objects below deep lists",
    ],
)
def test_shared_containers_are_charged_each_time(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file whose objects share one container is refused, because each plain form would contain all members."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, 6000)[0])
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=200_000, work_each=0))
    with pytest.raises(LimitError, match="too much work"):
        COMMANDS["loadable"](path)


@pytest.mark.parametrize(
    "shape",
    [
        "a list of parameters in groups",
        "a list of groups in optimizers",
        "metadata of tensors",
        "tensors with a long name",
        "tensors on a long device",
    ],
)
def test_shared_parts_of_optimizers_and_tensors_are_charged_each_time(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``inspect`` reads the parameters of all groups and optimizers, and the metadata, ties and devices of all tensors.
    Shared content is charged each time.
    """
    path = tmp_path / "a.pt"
    path.write_bytes(file_of(shape, 6000)[0])
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=200_000, work_each=0))
    with pytest.raises(LimitError, match="too much work"):
        ckptconv.inspect(path)


@pytest.mark.untraced
def test_a_dict_that_loses_items_at_many_paths(tmp_path: Path) -> None:
    """A report contains the paths of all removed items at all positions of their dict, and these paths are charged."""
    shared = {str(i): i for i in range(1000)}
    path = tmp_path / "a.pt"
    torch.save({"x": shared, "y": [shared] * 1000}, path)
    with pytest.raises(LimitError, match="too much work"):
        ckptconv.convert(path, tmp_path / "out.pt", drop=["x/*"])


@pytest.mark.untraced
def test_states_without_one_attribute(tmp_path: Path) -> None:
    """An object can have any number of states, which are searched for each attribute. This search is charged."""
    state = b"}(" + b"".join(text(str(i)) + b"K\1" for i in range(1000)) + b"ub"
    path = tmp_path / "a.pt"
    path.write_bytes(torch_zip_of(dict_of(text("x"), b"cargparse\nNamespace\n)R" + state + b"Nb" * 5000)))
    with pytest.raises(LimitError, match="too much work"):
        ckptconv.convert(path, tmp_path / "out.pt", drop=["x/.*"])


def test_shapes_that_a_list_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of shapes of DeepSpeed is read once, even if a list contains it many times."""
    path, shapes = tmp_path / "a.pt", {f"w{i}": torch.Size([1]) for i in range(100)}
    torch.save({"module": {"w": torch.zeros(1)}, "param_shapes": [shapes] * 100}, path)
    taken = 0
    entries = Object.entries

    def counted(node: Object) -> Iterator[tuple[Value, Value]]:
        nonlocal taken
        for entry in entries(node):
            taken += 1
            yield entry

    monkeypatch.setattr(Object, "entries", counted)
    ckptconv.convert(path, tmp_path / "out.pt", state_dict=True)
    assert taken < 20 * 100


def test_a_list_in_many_lists_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list with many positions is searched for a state dict only once, before the error tells that there is none."""
    path = tmp_path / "a.pt"
    path.write_bytes(file_of("a list in lists", 4000)[0])
    taken = 0
    elements = List.elements

    def counted(node: List) -> Iterator[Value]:
        nonlocal taken
        for element in elements(node):
            taken += 1
            yield element

    monkeypatch.setattr(List, "elements", counted)
    with pytest.raises(CkptconvError, match="there is no state dict in it"):
        ckptconv.convert(path, tmp_path / "out.pt", state_dict=True)
    assert taken < 10 * 4000


def budgets(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Return the budgets that `run` made."""
    seen: list[Work] = []

    class Seen(Work):
        def __init__(self, left: int) -> None:
            super().__init__(left)
            seen.append(self)

    with monkeypatch.context() as patch:
        patch.setattr("ckptconv.work.Work", Seen)
        run()
    return seen


def steps_of(budget: Work) -> int:
    """Return the steps that were taken of `budget`."""
    return Limits().work + Limits().work_each * budget.nbytes - budget.left


def test_ordinary_files_are_far_from_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each command, a state dict takes less than a tenth of the work that its bytes grant."""
    path = tmp_path / "a.pt"
    torch.save({f"layers.{i}.weight": torch.zeros(1) for i in range(2000)}, path)
    for command in ("inspect", "verify", "convert", "diff"):
        made = budgets(lambda command=command: COMMANDS[command](path), monkeypatch)
        most = max(made, key=lambda budget: budget.nbytes)
        assert 10 * steps_of(most) < Limits().work_each * most.nbytes


def test_a_trial_takes_nothing_from_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``inspect`` reads a file a second time, to try whether ``loadable`` helps. The limit only has to suffice for each
    reading by itself.
    """
    path = tmp_path / "a.pt"
    torch.save([argparse.Namespace(a=i) for i in range(500)], path)
    made = budgets(lambda: ckptconv.inspect(path), monkeypatch)
    reading, trial = (steps_of(budget) for budget in made if budget.nbytes)
    monkeypatch.setattr("ckptconv.work.LIMITS", Limits(work=max(reading, trial), work_each=0))
    assert "it is only data" in str(ckptconv.inspect(path))


def test_steps_are_reported_while_they_are_watched() -> None:
    """The steps are reported at the start, after each thousand items, and at the end. If nobody watches, the items are
    returned as they are.
    """
    told: list[tuple[str, int, int]] = []
    items = range(2500)
    with watched(lambda *said: told.append(said)):
        assert [*seen("items", items, len(items))] == [*items]
        tell("bytes", 3, 4)
    assert told == [("items", n, 2500) for n in (0, 1000, 2000, 2500)] + [("bytes", 3, 4)]
    assert seen("items", items, len(items)) is items
    tell("bytes", 4, 4)
    assert len(told) == 5
