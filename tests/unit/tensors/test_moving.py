"""Moving objects in memory.

Without GPUs, devices are pretended: their storages are in main memory, and their devices are recorded.
"""

from __future__ import annotations

import copy
import io
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ckptconv.errors import DeviceUnavailable, UsageError
from ckptconv.tensors import moving
from ckptconv.tensors.moving import devices, remap
from tests.support import zoo
from tests.support.hostile_bytes import saved
from tests.support.judge import assert_same

# torch warns once in each process that nested, quantized and compressed sparse tensors are experimental or deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo", "ignore:ComplexHalf"
)

needs_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]
needs_two_gpus = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


#: Objects of the zoo with tensors that are more than a view of one storage.
OF_SEVERAL = ("sparse", "quantized", "nested")


class Pretended:
    """Devices that do not exist here: the device of each storage, and the moves of storages."""

    def __init__(self) -> None:
        self.tags: dict[Any, str] = {}
        self.moved: list[tuple[str, str]] = []
        self.current = 0

    def tag(self, thing: Any) -> str:
        storage = thing.untyped_storage() if isinstance(thing, torch.Tensor) and torch._C._has_storage(thing) else thing
        real: str = thing.device.type
        return self.tags.get(moving._key(storage), real) if isinstance(storage, torch.UntypedStorage) else real

    def storage_on(self, tag: str, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        new = storage.clone()
        self.moved.append((self.tag(storage), tag))
        self.tags[moving._key(new)] = tag
        return new

    def tensor_on(self, tag: str, tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.detach().clone()
        if torch._C._has_storage(new):
            self.tags[moving._key(new.untyped_storage())] = tag
        return new

    def put(self, tag: str, *tensors: torch.Tensor) -> None:
        """Record that `tensors` are on `tag`."""
        for tensor in tensors:
            self.tags[moving._key(tensor.untyped_storage())] = tag


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Pretend that every device is available. A move to it is a copy in main memory."""
    there = Pretended()
    monkeypatch.setattr(moving, "_tag", there.tag)
    monkeypatch.setattr(moving, "_storage_on", there.storage_on)
    monkeypatch.setattr(moving, "_tensor_on", there.tensor_on)
    monkeypatch.setattr(moving, "_current", lambda family: None if family == "cpu" else there.current)
    monkeypatch.setattr(moving, "has_device", lambda tag: True)
    return there


def saved_and_loaded(obj: Any) -> Any:
    return torch.load(io.BytesIO(saved(obj)), weights_only=False)


def loss_of(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: torch.Tensor) -> torch.Tensor:
    """Return the loss of `model` for `numbers`. The gradients are those of this loss only."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(numbers).pow(2).sum()
    loss.backward()
    return loss


def trained(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Any:
    """Return a module after a step, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made = optimizer(model.parameters(), **options)
    made.step(lambda: loss_of(model, made, torch.arange(6.0).view(2, 3)))
    return model, made


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


# Content that a move keeps


def built(name: str) -> Any:
    """Return the object `name` of the zoo, with the same values in each call."""
    torch.manual_seed(0)
    with mock.patch.object(RemovableHandle, "next_id", 0):
        return zoo.ZOO[name]()


@pytest.mark.parametrize("name", sorted(set(zoo.ZOO) - set(OF_SEVERAL)))
@pytest.mark.parametrize("wish", ["cuda:1", {"cpu": "xpu"}])
def test_a_moved_object_keeps_its_content(pretended: Pretended, name: str, wish: Any) -> None:
    """An object keeps its types, nesting, order, values bit for bit, layout, sharing and attributes when it moves. The
    original does not change.

    All tensors move, except for states of random generators.
    """
    obj, before = built(name), built(name)
    moved = remap(obj, wish)
    assert_same(moved, before)
    assert_same(obj, before)
    target = "cuda:1" if wish == "cuda:1" else "xpu:0"
    assert devices(moved).get(target, 0) == devices(before).get("cpu", 0) - sum(
        tensor.nbytes for tensor in moving._tensors(moved) if name in zoo.RNG and tensor.numel() in zoo.RNG_SIZES
    )


@pytest.mark.parametrize("name", sorted(set(zoo.ZOO) - {"quantized"}))  # half a byte of one is uninitialized
def test_a_move_to_the_same_device_changes_nothing(name: str) -> None:
    """A move to the device on which everything is already changes nothing. The devices are not pretended here."""
    obj = built(name)
    assert_same(remap(obj, "cpu"), built(name))


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_tensors_made_of_several(pretended: Pretended, name: str) -> None:
    """Sparse, quantized and nested tensors keep their class, layout, dtype, values and ``requires_grad`` when they
    move.
    """
    tensors = [tensor for tensor in moving._tensors(built(name)) if tensor.dtype != torch.quint4x2]
    tensors += [nn.Parameter(tensor.detach(), requires_grad=False) for tensor in tensors]
    for old, new in zip(tensors, remap(tensors, "cuda:0"), strict=True):
        assert new is not old and type(new) is type(old)
        assert (new.layout, new.dtype, new.requires_grad) == (old.layout, old.dtype, old.requires_grad)
        if name == "sparse":
            assert torch.equal(new.to_dense(), old.to_dense())
            assert new.layout != torch.sparse_coo or new.is_coalesced() == old.is_coalesced()
        else:
            assert all(map(torch.equal, new.unbind(), old.unbind())) and new.is_nested == old.is_nested


def test_a_storage_moves_once_and_views_stay_views(pretended: Pretended) -> None:
    """Offsets, strides, dtypes and sharing of views are kept, also with a bare storage in the object."""
    whole = torch.arange(24.0)
    obj = {
        "whole": whole,
        "rows": [whole.view(4, 6)[1:3]],
        "t": whole.view(4, 6).t(),
        "bits": whole.view(torch.int32)[5:],
        "storage": whole.untyped_storage(),
    }
    new = remap(obj, "cuda:0")
    assert pretended.moved == [("cpu", "cuda:0")]
    assert new["rows"][0].storage_offset() == 6 and new["t"].stride() == (1, 6)
    new["whole"].fill_(7)
    assert (new["t"] == 7).all() and (new["rows"][0] == 7).all() and new["storage"].nbytes() == 96
    assert whole[0] == 0
    assert devices(new) == {"cuda:0": 96}


def test_objects_on_the_right_device_are_not_copied() -> None:
    """Tensors, storages and tuples that are on the right device are returned as the same objects. Lists and dicts are
    copied.
    """
    tensor = torch.ones(2, requires_grad=True)
    inner = [tensor]
    obj = {
        "t": tensor,
        "storage": torch.UntypedStorage(3),
        "tuple": (tensor, 1),
        "size": torch.Size([2]),
        "list": inner,
        "again": inner,
    }
    new = remap(obj, "cpu")
    assert all(new[key] is obj[key] for key in ("t", "storage", "tuple", "size"))
    assert new is not obj and new["list"] is not inner and new["again"] is new["list"] and new["list"][0] is tensor
    result = tensor * 2
    assert remap([result], "cpu")[0].grad_fn is result.grad_fn


def test_a_moved_tensor_is_a_leaf_with_its_gradient(pretended: Pretended) -> None:
    """A moved tensor is a leaf, with the same class, ``requires_grad`` and attributes. Its ``.grad`` moves too, and
    stays the same object as elsewhere in the result.
    """
    parameter = nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    parameter.note, parameter.other = "fc", torch.zeros(2)
    result = parameter * 2
    new = remap({"p": parameter, "grad": parameter.grad, "result": result, "other": parameter.other}, "cuda:0")
    assert type(new["p"]) is nn.Parameter and new["p"] is not parameter and new["p"].requires_grad
    assert new["p"].note == "fc" and new["p"].other is new["other"] and parameter.other is not new["other"]
    assert (
        new["p"].grad is new["grad"] and new["grad"] is not parameter.grad and torch.equal(new["grad"], torch.ones(3))
    )
    assert new["result"].is_leaf and new["result"].requires_grad and result.grad_fn is not None
    assert devices(new) == {"cuda:0": 44}


def test_meta_tensors_stay() -> None:
    """Meta tensors do not move, because they have no data. ``meta`` as a target is an error."""
    model = nn.Linear(2, 2, device="meta")
    assert remap([model, torch.ones(2, device="meta")], {"any": "cpu"})[0] is model
    assert devices(model) == {"meta": 24}
    with pytest.raises(UsageError, match="no data"):
        remap(model, "meta")


def test_a_device_of_another_kind(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch cannot put the new data into the old tensor, the two tensors are swapped. The parameter stays the same
    object with its class, and its gradient moves too.
    """
    monkeypatch.setattr(
        moving, "_storage_on", lambda tag, storage: torch.UntypedStorage(storage.nbytes(), device="meta")
    )
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    parameter.note = "kept"
    optimizer = torch.optim.SGD([parameter])
    assert remap(optimizer, "xpu:0") is optimizer
    assert (
        optimizer.param_groups[0]["params"][0] is parameter
        and type(parameter) is nn.Parameter
        and parameter.note == "kept"
    )
    assert parameter.is_meta and parameter.grad is not None and parameter.grad.is_meta


# Targets


def on(pretended: Pretended, *tags: str) -> list[torch.Tensor]:
    tensors = [torch.full((i + 1,), float(i)) for i, _ in enumerate(tags)]
    for tag, tensor in zip(tags, tensors, strict=True):
        pretended.put(tag, tensor)
    return tensors


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("cpu", ["cpu"] * 4),
        ("cuda:1", ["cuda:1"] * 4),
        ("gpu", ["cuda:3"] * 4),
        ("cuda", ["cuda:3"] * 4),
        ("auto", ["cuda:3"] * 4),
        (torch.device("cuda"), ["cuda:3"] * 4),
        (torch.device("cuda", 2), ["cuda:2"] * 4),
        (torch.device("cpu", 0), ["cpu"] * 4),
        ("cuda:0=cuda:1", ["cpu", "cuda:1", "cuda:1", "mps"]),
        ({"cuda:0": "cuda:1", "cuda:1": "cuda:0"}, ["cpu", "cuda:1", "cuda:0", "mps"]),
        ({"cuda": "xpu", "any": "cpu"}, ["cpu", "xpu:0", "xpu:1", "cpu"]),
        ({"gpu": "cpu"}, ["cpu"] * 4),
        ({"cpu": "cuda"}, ["cuda:0", "cuda:0", "cuda:1", "mps"]),
        (lambda tag: tag.replace("cuda:1", "cpu"), ["cpu", "cuda:0", "cpu", "mps"]),
        (lambda tag: "cuda", ["cuda:0", "cuda:0", "cuda:1", "cuda:0"]),
        (None, ["cpu", "cuda:0", "cuda:1", "mps"]),
    ],
)
def test_targets_of_map_location(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, wish: Any, expected: list[str]
) -> None:
    """Each form of ``map_location`` gives the expected devices, for copies and in place. A device without an index is
    the current one, but in a rule it keeps the index.
    """
    monkeypatch.setattr(moving, "automatic_device", lambda: "cuda")
    pretended.current = 3
    tags = ("cpu", "cuda:0", "cuda:1", "mps")
    assert [pretended.tag(tensor) for tensor in remap(on(pretended, *tags), wish)] == expected
    owned = nn.ParameterList(on(pretended, *tags))
    remap(owned, wish)
    assert [pretended.tag(tensor) for tensor in owned] == expected


def test_a_function_is_called_once_for_each_tag(pretended: Pretended) -> None:
    """A function is called once for each tag, not for each tensor."""
    asked: list[str] = []
    remap(on(pretended, "cpu", "cuda:0", "cpu", "cuda:0"), lambda tag: asked.append(tag) or "cpu")
    assert asked == ["cpu", "cuda:0"]


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        *(
            (wish, UsageError)
            for wish in ("xla", "", "cuda:300", {"cuda:0": "disk"}, lambda tag: "disk", lambda tag: None)
        ),
        # in torch, a ``map_location`` with two arguments gets a storage, which does not exist here
        (lambda storage, tag: storage, TypeError),
    ],
)
def test_invalid_devices(wish: Any, error: type[Exception]) -> None:
    """An invalid device is a UsageError. A function for torch, which takes two arguments, is a TypeError."""
    with pytest.raises(error, match="one argument" if error is TypeError else None):
        remap([torch.ones(1)], wish)


@pytest.mark.parametrize("wish", ["cuda:99", "xpu:99", {"cpu": "npu:3"}, lambda tag: "mlu:7"])
def test_unavailable_devices(wish: Any) -> None:
    """DeviceUnavailable contains the missing device and the argument that helps. Nothing has moved."""
    model = nn.Linear(2, 2)
    before = model.weight.data_ptr()
    with pytest.raises(DeviceUnavailable, match=r"(cuda:99|xpu:99|npu:3|mlu:7).*map_location='cpu'"):
        remap((model, {"x": torch.ones(1)}), wish)
    with pytest.raises(DeviceUnavailable):
        remap([torch.UntypedStorage(1)], wish)
    assert model.weight.data_ptr() == before


def test_nothing_moves_if_one_device_is_missing(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """All targets are checked before the first tensor moves. A target to which no tensor moves may be missing."""
    monkeypatch.setattr(moving, "has_device", lambda tag: tag in ("cpu", "cuda:0"))
    tensors = on(pretended, "cpu", "cuda:1")
    with pytest.raises(DeviceUnavailable, match="cuda:9"):
        remap(nn.ParameterList(tensors), {"cpu": "cuda:0", "cuda:1": "cuda:9"})
    assert pretended.moved == []
    assert devices(remap(tensors, {"cpu": "cuda:0", "mps": "cuda:9"})) == {"cuda:1": 8, "cuda:0": 4}


# Modules and optimizers


def test_modules_move_in_place(pretended: Pretended) -> None:
    """The parameters, buffers and gradients of a module stay the same objects, for an optimizer, an EMA or a list that
    refers to them. Shared ones move once.
    """
    model, _ = trained()
    model.tied = nn.Linear(4, 2)
    model.tied.weight = model[2].weight
    before = tensors_of(model)
    gradients = [tensor.grad for tensor in before]
    expected = saved_and_loaded(model)
    held = {"model": model, "refers": [model[2].weight], "again": model}
    new = remap(held, "cuda:0")
    assert new["model"] is model and new["again"] is model and new["refers"][0] is model[2].weight
    assert [id(tensor) for tensor in tensors_of(model)] == list(map(id, before))
    assert [tensor.grad for tensor in before] == gradients or all(
        a.grad is b for a, b in zip(before, gradients, strict=True)
    )
    assert_same(model, expected)
    assert devices(new).keys() == {"cuda:0"}
    assert len(pretended.moved) == len(before) + sum(gradient is not None for gradient in gradients)


def test_a_plain_attribute_stays_as_with_module_to(pretended: Pretended) -> None:
    """``remap`` does not move a plain attribute of a module, like ``Module.to``."""
    model = nn.Linear(2, 2)
    model.scale = torch.ones(5)
    remap(model, "cuda:0")
    assert pretended.tag(model.scale) == "cpu" and pretended.tag(model.weight) == "cuda:0"


class Metric(nn.Module):
    """A module that moves its own plain attribute, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.weight = torch.zeros(3), nn.Parameter(torch.ones(1))
        self.alias = self.weight.data

    def _apply(self, function: Any, *args: Any) -> Any:
        super()._apply(function, *args)
        self.total, self.alias = function(self.total), function(self.weight.data)
        return self


def test_modules_move_with_their_own_method(pretended: Pretended) -> None:
    """The ``_apply`` method of a module is called, as by ``Module.to``. Data that has moved does not move again."""
    metric = remap(Metric(), {"cpu": "cuda:0", "cuda:0": "cpu"})
    assert pretended.tag(metric.total) == "cuda:0"
    assert pretended.tag(metric.alias) == "cuda:0" and metric.alias.data_ptr() == metric.weight.data_ptr()
    model = DataModule(2)
    assert remap([model], "cuda:0")[0] is model and pretended.tag(model.linear.weight) == "cuda:0"


def test_a_module_and_its_state_dict_share_after_the_move(pretended: Pretended) -> None:
    """The tensors of a moved state dict are copies that use the new storages of the module."""
    model, optimizer = trained()
    state = model.state_dict()
    new = remap((state, model, optimizer.state_dict(), optimizer), "cuda:0")
    assert (
        type(new[0]) is OrderedDict and new[0]._metadata == state._metadata and new[0]._metadata is not state._metadata
    )
    for name, parameter in model.named_parameters():
        assert (
            new[0][name] is not state[name]
            and new[0][name].data_ptr() == parameter.data_ptr() != state[name].data_ptr()
        )
    assert new[2]["state"][0]["exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]
    assert {pretended.tag(tensor) for tensor in state.values()} == {"cpu"}


def test_lazy_modules_move(pretended: Pretended) -> None:
    """A parameter that has no shape yet moves, too."""
    model = nn.LazyLinear(3)
    remap(model, "cuda:0")
    assert pretended.tag(model.weight.data) == "cuda:0" and model.has_uninitialized_params()


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    "capturable": (torch.optim.Adam, {"capturable": True, "lr": torch.tensor(0.1)}),
    "fused": (torch.optim.Adam, {"fused": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "lbfgs": (torch.optim.LBFGS, {"max_iter": 3}),
}


def options_of(name: str) -> dict[str, Any]:
    """Return the options of the optimizer `name`, with a ``lr`` of its own."""
    return copy.deepcopy(OPTIMIZERS[name][1])


def trained_by(name: str) -> Any:
    options = options_of(name)
    later = {"capturable": options.pop("capturable", False)}  # a step with it needs a GPU
    model, optimizer = trained(OPTIMIZERS[name][0], **options)
    for group in optimizer.param_groups:
        group.update(later)
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_moves_in_place_with_its_parameters(pretended: Pretended, name: str) -> None:
    """The state, the parameters and the gradients of an optimizer move, and stay the same objects. ``step`` and the
    options stay on the CPU unless the group is capturable or fused.
    """
    _, optimizer = trained_by(name)
    before = {id(tensor) for tensor in moving._tensors([optimizer.state, optimizer.param_groups])}
    expected = saved_and_loaded([optimizer.state_dict(), optimizer.param_groups])
    assert remap(optimizer, "cuda:1") is optimizer
    assert_same([optimizer.state_dict(), optimizer.param_groups], expected)
    assert {id(tensor) for tensor in moving._tensors([optimizer.state, optimizer.param_groups])} == before
    hosted = "cuda:1" if name in ("capturable", "fused") else "cpu"
    for group in optimizer.param_groups:
        assert all(pretended.tag(p) == pretended.tag(p.grad) == "cuda:1" for p in group["params"])
        assert not isinstance(group["lr"], torch.Tensor) or pretended.tag(group["lr"]) == hosted
    for state in optimizer.state.values():
        for key, value in state.items():
            expected_tag = hosted if key == "step" else "cuda:1"
            assert all(pretended.tag(tensor) == expected_tag for tensor in moving._tensors(value)), key
    remap(optimizer, "cpu")
    assert devices(optimizer).keys() == {"cpu"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_model_and_its_optimizer_move_together(pretended: Pretended, order: tuple[int, int]) -> None:
    """Each storage of a model and its optimizer moves once, in either order. If devices are swapped, a second move
    would bring it back.
    """
    pair = trained()
    model, optimizer = pair
    pretended.put("cuda:0", *tensors_of(model))
    swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    remap({"both": tuple(pair[i] for i in order), "weight": [model[0].weight]}, swap)
    assert {pretended.tag(tensor) for tensor in tensors_of(model)} == {"cuda:1"}
    assert Counter(pretended.moved) == {("cuda:0", "cuda:1"): len(tensors_of(model))}
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


# Containers


@dataclass(frozen=True)
class Frozen:
    """A frozen, hashable dataclass."""

    weight: Any
    name: str = "f"


@dataclass(slots=True)
class WithSlots:
    """A dataclass with slots, one of them private."""

    weight: Any
    _hidden: Any = None


@dataclass(frozen=True, slots=True)
class FrozenWithSlots:
    """A frozen dataclass with slots, whose fields cannot be set."""

    weight: Any


@dataclass
class Failed(Exception):
    """A dataclass with data in C, which a copy would not have."""

    weight: Any


@dataclass(eq=False)
class DataModule(nn.Module):
    """A module that is also a dataclass."""

    size: int

    def __post_init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(self.size, 1)


class Locked(dict):  # type: ignore[type-arg]
    """A dict whose items cannot be set."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("locked")

    def __reduce__(self) -> Any:
        return Locked, (dict(self),)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """A dict that is also a dataclass, like the outputs of models."""

    logits: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


W = torch.arange(3.0)
SHARED = [W]


@pytest.mark.parametrize(
    "obj",
    [
        {"b": W, "a": [W, {"c": (W,)}]},
        OrderedDict(z=W, a=1),
        defaultdict(list, {"x": [W]}),
        Counter({"x": 2}),
        {W: W},
        {(1, W): 1},
        (W, (1, 2)),
        zoo.Pair(W, [W]),
        torch.max(torch.eye(2), 0),
        {W, 1},
        frozenset({W}),
        {frozenset({(W, 1)})},
        deque([W, 2], maxlen=4),
        [SHARED, SHARED, (SHARED,)],
        Frozen(W),
        {Frozen((1, W)): 1},
        {Frozen(1), Frozen(W)},
        WithSlots(W, [W]),
        FrozenWithSlots(W),
        Locked(x=W),
        zoo.Config(weight=W),
        Output(W),
        UserDict(x=W, y=[W]),
        UserDict(UserDict(x=W)),
        zoo.ListAndDict([W]),
        [None, Ellipsis, zoo.a_function, zoo.Config, torch.float8_e5m2],
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_containers(pretended: Pretended, obj: Any) -> None:
    """A container is copied with its type, order and sharing. The original does not change."""
    before = saved_and_loaded(obj)
    new = remap(obj, "cuda:0")
    assert_same(new, before)
    assert_same(obj, before)
    assert devices(new).keys() <= {"cuda:0"} and devices(obj).keys() <= {"cpu"}


def test_attributes_of_containers(pretended: Pretended) -> None:
    """The attributes of a tuple or set with a class of its own are part of it."""

    class Numbers(tuple):
        """A tuple that can have attributes."""

    class Names(set):
        """A set that can have attributes."""

    numbers, names = Numbers((1, 2)), Names("a")
    numbers.weight, names.weight = W, W
    numbers.itself = numbers
    new = remap([numbers, names], "cuda:0")
    assert type(new[0]) is Numbers and new[0] == (1, 2) and new[0].itself is new[0] and type(new[1]) is Names
    assert new[0].weight is new[1].weight is not W and numbers.weight is W


def test_other_objects_are_not_copied(pretended: Pretended) -> None:
    """Objects of other classes, views of dicts, data loaders, generators, functions and classes are returned as they
    are. Their tensors are neither moved nor counted.
    """

    class Other:
        """An object with a tensor, and with other content that nobody knows."""

        weight = W

    obj: list[Any] = [
        Other(),
        Failed(W),
        UserList([W]),
        {"x": W}.values(),
        DataLoader([W]),
        torch.Generator(),
        lambda: W,
        Mapping,
    ]
    assert all(new is old for new, old in zip(remap(obj, "cuda:0"), obj, strict=True))
    assert devices(obj) == {}


def test_cycles() -> None:
    """Cycles through lists, dicts, attributes and tuples, and through several of these, are kept."""
    obj = zoo.cycles()
    inside: list[Any] = []
    first = (inside,)
    second = (first, inside)
    inside += [second, first]
    obj["mixed"] = second
    new = remap(obj, "cpu")
    assert_same(new, obj)
    assert new["tuple"][1][0] is new["tuple"] is not obj["tuple"]
    assert new["mixed"][1][0] is new["mixed"] and new["mixed"][0][0] is new["mixed"][1]


@pytest.mark.untraced
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, Frozen, lambda x: frozenset({x})])
def test_nesting_of_any_depth(pretended: Pretended, wrap: Any) -> None:
    """10,000 levels cause no RecursionError. A frozenset or a frozen dataclass has only 100 levels, because Python
    computes its hash by recursion.
    """
    obj: Any = W
    for _ in range(100 if isinstance(wrap(0), (frozenset, Frozen)) else 10_000):
        obj = wrap(obj)
    assert devices(remap(obj, "cuda:0")) == {"cuda:0": 12}


# States of random generators


def test_states_of_generators_stay_on_the_cpu(pretended: Pretended) -> None:
    """States of random generators stay on the CPU, because torch accepts them only there. They are recognized by their
    size, by their key, or by the states next to them.

    Rules for ``any`` move them, as in ``convert``.
    """
    gpu, named = torch.zeros(16, dtype=torch.uint8), torch.zeros(17, dtype=torch.uint8)
    obj = {
        "state": [torch.get_rng_state()],
        "all": {"python": 1, "numpy": 2, "cuda": [gpu]},
        "cuda_rng_state": named,
        "image": torch.zeros(3, dtype=torch.uint8),
        "weight": W,
    }
    new = remap(obj, "cuda:0")
    assert devices(new) == {"cpu": 5056 + 16 + 17, "cuda:0": 15}
    pretended.put("cuda:0", gpu)
    assert devices(remap(obj, "cuda:1"))["cpu"] == 5056 + 16 + 17
    assert devices(remap(obj, "cpu=cuda:1"))["cpu"] == 5056 + 17
    assert devices(remap(obj, {"any": "cuda:1"})).keys() == {"cuda:1"}


@pytest.mark.parametrize(
    ("obj", "stays"),
    [
        (lambda t: {"rng": t}, True),
        (lambda t: [{"seed": [t, t]}], True),
        (lambda t: {"generator": {"a": t}, "x": 1}, True),
        (lambda t: {"rng": t, "weight": W}, False),
        (lambda t: {"model": {"rng": t, "weight": W}}, False),
        (lambda t: OrderedDict(rng=[t]), True),
        (lambda t: {"optimizer": {"state": {"rng": t, "w": W}, "param_groups": []}}, True),
        (lambda t: {"cpu": torch.get_rng_state(), "cuda": t}, True),
        (lambda t: {"cpu": torch.get_rng_state(), "torch.cuda": [t], "x": 1}, True),
        (lambda t: {"rng_state": torch.get_rng_state(), "mask": t}, False),
        (lambda t: {"rng_state": torch.get_rng_state(), 0: t}, False),
        (lambda t: {"range": t, "x": 1}, False),
        (lambda t: {"rng": t, "view": t[:2], "x": 1}, False),
        (lambda t: {"rng": t, "its": t.untyped_storage(), "x": 1}, False),
        (lambda t: {"rng": t.view(2, 8), "x": 1}, False),
        (lambda t: {"rng": t[1:], "x": 1}, False),
        (lambda t: nn.Buffer(t), False),
    ],
)
def test_tensors_that_are_rng_states(pretended: Pretended, obj: Any, stays: bool) -> None:
    """The rules of conversions apply: a state is below a key with a certain word, outside of state dicts. It has its
    own storage and one dimension.
    """
    state = torch.zeros(16, dtype=torch.uint8)
    new = remap(obj(state), "cuda:0")
    left = [tensor for tensor in moving._tensors(new) if tensor.numel() != 5056 and pretended.tag(tensor) == "cpu"]
    assert bool(left) is stays


# Sizes on devices


def test_devices_counts_each_storage_once(pretended: Pretended) -> None:
    """``devices`` counts each storage once and completely, with views, gradients and the state of an optimizer. The
    device with the most bytes is first.
    """
    model, optimizer = trained()
    numbers = sum(p.numel() for p in model.parameters())
    assert devices(model) == {"cpu": (2 * numbers + 4 + 4) * 4 + 8}
    steps = 4 * 6
    everything = (model, [optimizer], model.state_dict(), model[0].weight[0])
    assert devices(everything) == {"cpu": (4 * numbers + 4 + 4) * 4 + 8 + steps}
    big = torch.ones(1000)
    pretended.put("cuda:1", big)
    assert list(devices([model, big[:1]]).items()) == [("cuda:1", 4000), ("cpu", (2 * numbers + 4 + 4) * 4 + 8)]
    assert devices({}) == {} and devices([1, "x"]) == {}


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (lambda: torch.eye(3).to_sparse(), 3 * 4 + 6 * 8),
        (lambda: torch.eye(3).to_sparse_csr(), 3 * 4 + 4 * 8 + 6 * 8),
        (lambda: torch.eye(3).to_sparse_csc(), 3 * 4 + 4 * 8 + 6 * 8),
        (lambda: torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8), 5),
        (lambda: torch.ones(2, 2).to_mkldnn(), 16),
        (lambda: zoo.nested(), 20),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 20 + 24),
    ],
)
def test_devices_of_sparse_and_other_tensors(tensor: Any, nbytes: int) -> None:
    """For a sparse tensor, its values and indices are counted. For other special layouts, the elements are counted."""
    assert devices([tensor()]) == {"cpu": nbytes}


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=needs_a_gpu)])
def test_tags_are_those_of_torch(device: str) -> None:
    """A device is named as ``torch.save`` names it."""
    tensor = torch.ones(2, device=device)
    assert list(devices(tensor)) == [torch.serialization.location_tag(tensor.untyped_storage())]


# On GPUs


def test_a_buffer_of_inference_mode_is_usable(pretended: Pretended) -> None:
    """A buffer from inference mode is usable after it has moved. ``tensor.data = ...`` would leave it neither an
    inference tensor nor an ordinary one.
    """
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        module.register_buffer("c", torch.ones(2))
    remap(module, "cuda:1")
    assert module.c._version >= 0 and repr(module.c)
    assert module.c.tolist() == [1, 1]


@pytest.fixture
def gpu() -> Iterator[str]:
    """Yield the tag of a GPU."""
    yield "cuda:0"
    torch.cuda.empty_cache()


class TestOnAGpu:
    """Moves to a real GPU."""

    pytestmark = needs_a_gpu

    @pytest.mark.parametrize("name", sorted(set(zoo.ZOO) - set(OF_SEVERAL)))
    def test_there_and_back(self, gpu: str, name: str) -> None:
        """An object that moves to a GPU and back does not change."""
        there = remap(built(name), gpu)
        assert set(devices(there)) <= {gpu, "meta", *(["cpu"] if name in zoo.RNG else [])}
        assert_same(remap(there, "cpu"), built(name))

    def test_as_module_to(self, gpu: str) -> None:
        """A module has the same tensors on the same device as after ``Module.to``. It computes there, and its optimizer
        continues.
        """
        model, optimizer = trained()
        other = saved_and_loaded(model).to(gpu)
        remap((model, optimizer), "cuda")
        assert all(
            a.device == b.device and torch.equal(a, b)
            for a, b in zip(tensors_of(model), tensors_of(other), strict=True)
        )
        loss = model(torch.ones(2, 3, device=gpu)).sum()
        loss.backward()
        optimizer.step()
        assert all(p.device == p.grad.device == torch.device(gpu) for p in model.parameters())

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_as_load_state_dict(self, gpu: str, name: str) -> None:
        """The state of an optimizer is on the device to which ``load_state_dict`` would move it, and the training
        continues.
        """
        model, optimizer = trained_by(name)
        other = saved_and_loaded(model).to(gpu)
        loaded = OPTIMIZERS[name][0](other.parameters(), **options_of(name))
        loaded.load_state_dict(optimizer.state_dict())
        remap((optimizer, model), gpu)
        for ours, theirs in zip(optimizer.state.values(), loaded.state.values(), strict=True):
            for key in theirs:
                assert [t.device for t in moving._tensors(ours[key])] == [
                    t.device for t in moving._tensors(theirs[key])
                ], key

        optimizer.step(lambda: loss_of(model, optimizer, torch.ones(2, 3, device=gpu)))

    def test_an_lstm_keeps_its_weights_together(self, gpu: str) -> None:
        """The weights of an LSTM have one storage. cuDNN needs this, and torch warns if they do not."""
        lstm = remap(nn.LSTM(3, 4), gpu)
        lstm(torch.ones(2, 1, 3, device=gpu))
        assert len({p.untyped_storage().data_ptr() for p in lstm.parameters()}) == 1

    def test_the_old_memory_is_given_back(self, gpu: str) -> None:
        """A module that has left the GPU leaves no memory allocated there."""
        before = torch.cuda.memory_allocated()
        model = nn.Linear(1000, 1000, device=gpu)
        remap(model, "cpu")
        assert torch.cuda.memory_allocated() == before

    def test_auto_is_the_gpu(self, gpu: str) -> None:
        """``auto`` is the current GPU of torch."""
        assert remap(W, "auto").device == torch.empty(0, device="cuda").device


class TestOnTwoGpus:
    """Moves that need two GPUs."""

    pytestmark = needs_two_gpus

    def test_swapped(self) -> None:
        """All mappings apply at the same time, so a tensor moves only once."""
        model = nn.Sequential(nn.Linear(2, 2, device="cuda:0"), nn.Linear(2, 2, device="cuda:1"))
        remap(model, {"cuda:0": "cuda:1", "cuda:1": "cuda:0"})
        assert [layer.weight.device.index for layer in model] == [1, 0]

    def test_the_current_one(self) -> None:
        """``cuda`` is the current GPU of torch. In a rule, it keeps the index."""
        with torch.cuda.device(1):
            assert remap(W, "cuda").device.index == 1
            assert remap(W.to("cuda:0"), {"cuda": "cuda"}).device.index == 0
