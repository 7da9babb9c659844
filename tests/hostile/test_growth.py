"""The work of the commands grows linearly with the pickle, even if its nodes are shared. Each node is visited once, not
once for each path to it. The tests count calls, not seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptconv
from ckptconv.checkpoint import dangerous_calls
from ckptconv.errors import CkptconvError, LimitError
from ckptconv.inspection.comparison import pairing
from ckptconv.pickles.machine import PickleMachine
from tests.fuzz.budgets import SHAPES, file_of
from tests.support.sampled import sampled

OPCODES = 1000, 4000
#: Shapes whose objects share a value that each of their plain forms contains in full. The budget of work limits these.
_COPIED = (
    "a list in frozensets of protocol 2",
    "a list in queues",
    "a dict in namespaces",
    "a dict in mappings of protocol 0",
    "a list of groups in optimizers",
)
#: Shapes in which many nodes share one node.
SHARED = [shape for shape in SHAPES if shape.startswith("a ") and "wide" not in shape and shape not in _COPIED]


def diff_with_copy(path: Path) -> object:
    copy = path.with_name("copy.pt")
    copy.write_bytes(path.read_bytes())
    return ckptconv.diff(path, copy)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "inspect": ckptconv.inspect,
    "verify": ckptconv.verify,
    "diff": diff_with_copy,
}


def calls_of(run: Callable[[Path], object], path: Path) -> int:
    """Return the number of calls that `run` makes, including calls of C functions and resumptions of generators."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run(path)
    except CkptconvError:
        pass
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(
    ("shape", "command"),
    [
        *sampled(((shape, command) for shape in SHARED for command in ("inspect", "diff")), 5),
        *((shape, "verify") for shape in ("calls of calls", "getattr as an argument")),
    ],
)
def test_work_grows_with_the_pickle(shape: str, command: str, tmp_path: Path) -> None:
    """A pickle of four times the size takes less than six times as many calls. Quadratic work would take sixteen times
    as many.
    """
    path = tmp_path / "a.pt"
    path.write_bytes(file_of("None", 10)[0])
    calls_of(COMMANDS[command], path)  # runs the imports that occur on first use
    calls = []
    for opcodes in OPCODES:
        path.write_bytes(file_of(shape, opcodes)[0])
        calls.append(calls_of(COMMANDS[command], path))
    assert calls[1] < 6 * calls[0]


def test_integers_of_one_hash() -> None:
    """Multiples of 2^61 - 1 have the same hash in Python. Memo slots and the keys of paired items for these numbers
    have different hashes.
    """
    numbers = [i * ((1 << 61) - 1) for i in range(1, 100)]
    machine = PickleMachine.__new__(PickleMachine)
    machine.memo, machine.stack = {}, [None]
    for number in numbers:
        machine.put(number)
    assert len({hash(slot) for slot in machine.memo}) == len({hash(pairing._atom(number)) for number in numbers}) == 99


def test_a_chain_of_attributes() -> None:
    """The name of a long chain of attribute lookups has a bounded length."""
    meaning: dangerous_calls._Meaning = dangerous_calls._Ref("m", "f")
    for _ in range(50):
        meaning = dangerous_calls._attribute(meaning, "a" * 900)
    assert isinstance(meaning, dangerous_calls._Ref) and len(meaning.name) < 2000


def test_a_getter_is_nothing_else() -> None:
    """Meanings of values are compared by value. A getter of ``m.f`` is not equal to ``m.f`` or to the result of a call
    of it.
    """
    function = dangerous_calls._Ref("m", "f")
    made = [dangerous_calls._Made(function, of_class) for of_class in (False, True)]
    assert not {function, *made} & {dangerous_calls._Getter(calls, ("m", "f")) for calls in (False, True)}


def rank_files(folder: Path, world: int, shape: tuple[int, ...], more: Placement) -> Path:
    """Write the rank files of a run over `world` processes and return their folder. All tensors share one spec: rows
    over the processes, and the placement `more` in 63 mesh dimensions of size 1.
    """
    folder.mkdir()
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (world, *[1] * 63))
            meta = TensorMeta(torch.Size(shape), (1,) * len(shape), torch.float32)
            spec = DTensorSpec(mesh, (Shard(0), *[more] * 63), meta)
            local = torch.zeros(shape[0] // world, *shape[1:])
            state = {f"t{i}": DTensor(local, spec, requires_grad=False) for i in range(10)}
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


@pytest.mark.filterwarnings("ignore")  # warnings of torch
def test_placements_of_rank_files(tmp_path: Path) -> None:
    """Tensors that share one spec cost about the same whatever its placements are. The spec is followed once, and a
    placement over a single process makes no pieces.
    """
    plain = rank_files(tmp_path / "plain", 8, (8, 1), Replicate())
    calls_of(ckptconv.inspect, plain)
    pieces = rank_files(tmp_path / "pieces", 8, (8, 1), _StridedShard(0, split_factor=8))
    assert len(ckptconv.inspect(pieces).tensors) == 10
    assert calls_of(ckptconv.inspect, pieces) < 1.2 * calls_of(ckptconv.inspect, plain)


def test_contents_of_only_the_first_rank(tmp_path: Path) -> None:
    """If only the first of many rank files contains many items, comparing the files takes too many steps and is
    refused.
    """
    for rank in range(40):
        more = {f"item {i}": i for i in range(0 if rank else 2000)}
        torch.save({"epoch": 1, **more}, tmp_path / f"model_world_size_40_rank_{rank}.pt")
    with pytest.raises(LimitError, match="comparing the files takes too many steps"):
        ckptconv.inspect(tmp_path)
