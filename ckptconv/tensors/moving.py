"""``remap`` and ``devices``: move objects in memory between devices, and count their bytes.

A move keeps what ``torch.save`` and ``torch.load(map_location=...)`` would keep: values bit for bit, views, what shares
a storage, classes, attributes, ``requires_grad``; and gradients too. Modules and optimizers move in place, as with
``Module.to``: their tensors stay the objects that they are, whoever else refers to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptconv.edits.devices import Devices, MapLocation, Target, to_devices
from ckptconv.hints import for_python, option
from ckptconv.tensors import devices_here
from ckptconv.tensors.containers import Contents, Slot, attributes_of, is_wrapper, set_attributes
from ckptconv.tensors.rng_states import rng_states

__all__ = ["devices", "remap"]

_T = TypeVar("_T")
_NO_INDEX = ("cpu", "mps", "meta")  # devices whose tags have none


@for_python
def remap(obj: _T, map_location: MapLocation) -> _T:
    """`obj` with its tensors on other devices.

    A storage moves once and as a whole, so what shared one shares one. A tensor that is where it should be is returned
    as it is; one that moves comes back as a leaf, without hooks. Sparse, quantized, nested and wrapper tensors move by
    their own ``to``, and share no storages after it. ``meta`` tensors have no data and stay. States of random
    generators stay on the CPU, as in ``convert``.

    As with ``Module.to``, a module's parameters, gradients and buffers move, and no tensor that is a plain attribute.
    An optimizer's parameters move with its state. Its ``step``, and the ``lr`` if it is a tensor, stay on the CPU if
    they are there, but in groups that are ``capturable`` or ``fused``, as torch has it. A ``state_dict()`` is a
    container like any other.

    Args:
        obj: A module, an optimizer, a tensor, or containers of them. :mod:`ckptconv.tensors.containers` says which
            containers are looked into; every other object is returned as it is.
        map_location: As for :func:`ckptconv.convert`, but that a device without an index, for all tensors, is the
            current one of its family, and ``'auto'`` is the GPU if there is one, else the CPU.

    Returns:
        `obj` itself if it is a module or an optimizer, which move in place; containers, and other tensors that have to
        move, are copied.

    Raises:
        DeviceUnavailable: torch does not have the device here; nothing was moved.
        UsageError: `map_location` makes no sense.
    """
    wish = _resolved(map_location)
    contents = Contents(obj)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = _Found(contents)
        move = _Move(wish, found)
        move.check()
        for place in contents.leaves:
            if isinstance(place.node, torch.nn.Module):
                # which modules override: an LSTM joins its weights again after it
                place.node._apply(move.in_place)  # type: ignore[no-untyped-call]
        for tensor in found.owned:
            move.in_place(tensor)
        moved: _T = contents.copied(move.new)
    return moved


def devices(obj: object) -> dict[str, int]:
    """Count the bytes of storages on each device.

    Args:
        obj: Modules, optimizers, tensors with their gradients, in any containers.

    Returns:
        The bytes by device, the most first; devices are written as in a checkpoint: ``cpu``, ``cuda:0``, ``mps``. A
        storage counts once, and as a whole; on ``meta`` it has a size and no data.
    """
    sizes: Counter[str] = Counter()
    with torch._C.DisableTorchFunctionSubclass():
        found = _Found(Contents(obj))
        storages = list(found.storages)
        for tensor in found.tensors():
            lying_on = list(_storages(tensor))
            storages += lying_on
            if not lying_on:  # in a layout of its own
                sizes[_tag(tensor)] += tensor.numel() * tensor.element_size()
        for storage in {_key(storage): storage for storage in storages}.values():
            sizes[_tag(storage)] += storage.nbytes()
    return dict(sizes.most_common())


class _Found:
    """The tensors in `contents` with their gradients: *owned* by modules and optimizers, or *free*."""

    def __init__(self, contents: Contents) -> None:
        self.owned: list[torch.Tensor] = []
        self.free: list[Slot] = []
        self.storages: list[torch.UntypedStorage] = []
        self.hosted: list[torch.Tensor] = []  # an optimizer's, which stay on the CPU if they are there
        for place in contents.leaves:
            node = place.node
            if isinstance(node, torch.nn.Module):
                self.owned += _with_gradients([*node.parameters(), *node.buffers()])
            elif isinstance(node, torch.optim.Optimizer):
                self.owned += _with_gradients(_tensors([node.param_groups, node.state]))
                self.hosted += _hosted(node)
            elif isinstance(node, torch.Tensor):
                self.free.append(place)
            elif isinstance(node, (torch.UntypedStorage, torch.storage.TypedStorage)):
                self.storages.append(_untyped(node))

    def tensors(self) -> list[torch.Tensor]:
        """All of them, each once."""
        free = _with_gradients(place.node for place in self.free)
        return list({id(tensor): tensor for tensor in [*self.owned, *free]}.values())


def _tensors(obj: object) -> list[torch.Tensor]:
    return [place.node for place in Contents(obj).leaves if isinstance(place.node, torch.Tensor)]


def _with_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = list(tensors)
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def _hosted(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """``step``, which torch's ``Optimizer._process_value_according_to_param_policy`` leaves too, and the groups'
    options: each step of training reads them.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        yield from _tensors({key: value for key, value in group.items() if key != "params"})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            yield from _tensors(state.get("step") if isinstance(state, dict) else None)


class _Move:
    """One move: each storage and each tensor of it once, whatever refers to them."""

    def __init__(self, devices: Devices, found: _Found) -> None:
        self.devices = devices
        self.found = found
        self.tags: dict[tuple[str, bool], str] = {}
        self.storages: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.all = found.tensors()
        users = Counter(_key(storage) for tensor in self.all for storage in _storages(tensor))
        users.update(map(_key, found.storages))
        self.rng = _keys(rng_states(found.free, lambda tensor: users[_key(tensor.untyped_storage())] == 1))
        self.hosted = _keys(found.hosted)

    def check(self) -> None:
        """Raise DeviceUnavailable if a device that something would move to is not here."""
        things = [*map(_thing, self.all), *self.found.storages]
        devices_here.require(
            (new for thing in things if (new := self.target(thing)) != _tag(thing)),
            where=None,
            hint=option("map_location", "cpu")
            + " works everywhere, "
            + option("map_location", "auto")
            + " takes what there is",
        )

    def target(self, thing: torch.Tensor | torch.UntypedStorage) -> str:
        """The tag of the device that `thing` belongs on."""
        tag = _tag(thing)
        key = _key(thing) if isinstance(thing, torch.UntypedStorage) else None
        if tag == "meta" or (tag == "cpu" and key in self.hosted):
            return tag
        case = tag, key in self.rng
        if case not in self.tags:
            self.tags[case] = self.devices.new_tag(tag, rng=case[1])
        return self.tags[case]

    def new(self, leaf: Any) -> Any:
        """What stands for `leaf` in the copy of a container."""
        if isinstance(leaf, torch.Tensor):
            return self.tensor(leaf)
        if isinstance(leaf, torch.UntypedStorage):
            return self.storage(leaf)
        if isinstance(leaf, torch.storage.TypedStorage):
            storage = self.storage(leaf._untyped_storage)
            make: Any = torch.storage.TypedStorage
            return make(wrap_storage=storage, dtype=leaf.dtype, _internal=True)
        return leaf

    def storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = _key(storage)
        if key not in self.storages:
            tag = self.target(storage)
            new = storage if tag == _tag(storage) else _storage_on(tag, storage)
            self.storages[key] = self.storages[_key(new)] = new  # what has arrived does not move on
        return self.storages[key]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` if it is on its target or owned by what moved in place, else a new one."""
        if id(tensor) not in self.tensors:
            new = self.moved(tensor)
            self.tensors[id(tensor)] = tensor, new
            if new is not tensor and tensor.is_leaf and tensor.grad is not None:
                new.grad = self.tensor(tensor.grad)
        return self.tensors[id(tensor)][1]

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which is on its target now, and so is its gradient."""
        if id(tensor) not in self.tensors:
            self.tensors[id(tensor)] = tensor, tensor
            gradient = tensor.grad if tensor.is_leaf else None
            new = self.moved(tensor)
            if new is not tensor:
                _become(tensor, new)
            if gradient is not None:
                tensor.grad = self.in_place(gradient)
        return tensor

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _own_storage(tensor)
        if storage is not None:
            new = self.storage(storage)
            return tensor if new._cdata == storage._cdata else _dressed(_view(new, tensor), tensor)
        tag = self.target(tensor)
        return tensor if tag == _tag(tensor) else _dressed(_tensor_on(tag, tensor), tensor)


def _resolved(map_location: MapLocation) -> Devices:
    """What `map_location` says. A device without an index, for all tensors, is the current one here."""
    devices = to_devices(
        devices_here.automatic() if isinstance(map_location, str) and map_location == "auto" else map_location
    )
    if devices.to and devices.to.index is None and devices_here.has(devices.to.family):
        return replace(devices, to=Target(devices.to.family, _current(devices.to.family)))
    return devices


def _current(family: str) -> int | None:
    return torch.empty(0, device=family).device.index


def _tag(thing: torch.Tensor | torch.UntypedStorage) -> str:
    """The device of `thing`, as torch writes it into a file."""
    device = thing.device
    return device.type if device.type in _NO_INDEX else f"{device.type}:{device.index or 0}"


def _untyped(storage: torch.UntypedStorage | torch.storage.TypedStorage) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Its address, which no other storage has while the key lives; the bytes may go."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _keys(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    return {_key(storage) for tensor in tensors for storage in _storages(tensor)}


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Its storage, if offset, shape and stride on it are all that `tensor` is."""
    special = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or is_wrapper(tensor)
    return tensor.untyped_storage() if not special and torch._C._has_storage(tensor) else None


def _thing(tensor: torch.Tensor) -> torch.Tensor | torch.UntypedStorage:
    """What has to move for `tensor` to move."""
    storage = _own_storage(tensor)
    return tensor if storage is None else storage


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """All that `tensor` lies on."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif torch._C._has_storage(tensor):
        yield tensor.untyped_storage()
        return
    else:
        return
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield from _storages(part)


def _storage_on(tag: str, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The bytes of `storage` on another device. As a tensor's, because every backend moves tensors."""
    return _bytes(storage).to(tag).untyped_storage()


def _tensor_on(tag: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is more than a view of one storage, on another device."""
    return tensor.detach().to(tag)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """What `like` is on its own storage, on `storage`."""
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    view.set_(storage, like.storage_offset(), like.size(), like.stride())
    # whether it is to be conjugated or negated
    metadata = torch._utils.get_tensor_metadata(like)  # type: ignore[no-untyped-call]
    torch._utils.set_tensor_metadata(view, metadata)  # type: ignore[no-untyped-call]
    return view


def _dressed(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`data` as a leaf with `like`'s class, attributes and ``requires_grad``."""
    if type(data) is not type(like):
        data = torch.Tensor._make_subclass(type(like), data)
    if not is_wrapper(like):
        set_attributes(data, attributes_of(like))
    return data.requires_grad_(like.requires_grad)


def _become(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Make `tensor`, the object, what `new` is, as ``Module._apply`` does."""
    if torch._has_compatible_shallow_copy_type(tensor, new) and not (is_wrapper(tensor) or tensor.is_inference()):
        tensor.data = new
    else:
        tensor.grad = None  # a gradient's reference would keep the two from being exchanged
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]
