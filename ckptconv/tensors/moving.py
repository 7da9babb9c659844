"""``remap`` and ``devices``: move objects in memory between devices, and count their bytes.

A move keeps what ``torch.save`` and ``torch.load(map_location=...)`` would keep: values bit for bit, views, sharing of
storages, classes, attributes, ``requires_grad``. It also keeps gradients. Modules and optimizers move in place, as with
``Module.to``: their tensors stay the same objects for everything that refers to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptconv.checkpoint.state_dicts import CPU_RNG_BYTES, RngRules
from ckptconv.edits.devices import Devices, MapLocation, Target, to_devices
from ckptconv.errors import DeviceUnavailable
from ckptconv.hints import for_python, option
from ckptconv.tensors.containers import Contents, Slot, attributes_of, is_wrapper, set_attributes

_T = TypeVar("_T")
_NO_INDEX = ("cpu", "mps", "meta")  # devices whose tags have no index
_EVERYWHERE = ("cpu", "meta")


@for_python
def remap(obj: _T, map_location: MapLocation) -> _T:
    """Move the tensors in `obj` to other devices and return the result.

    A storage moves once and completely, so tensors that shared a storage share one afterwards. A tensor that is already
    on its device is returned unchanged. A tensor that moves becomes a leaf without hooks. Sparse, quantized, nested and
    wrapper tensors move by their own ``to``, and share no storages afterwards. ``meta`` tensors have no data and stay.
    States of random generators stay on the CPU, as in ``convert``.

    As with ``Module.to``, a module's parameters, gradients and buffers move, but tensors in plain attributes do not. An
    optimizer's parameters move with its state. If its ``step`` and a tensor ``lr`` are on the CPU, they stay there,
    except in groups that are ``capturable`` or ``fused``, as in torch. A ``state_dict()`` is a container like any
    other.

    Args:
        obj: A module, an optimizer, a tensor, or containers of them. :mod:`ckptconv.tensors.containers` describes the
            containers that are searched. Every other object is returned as it is.
        map_location: As for :func:`ckptconv.convert`, with two differences: a device without an index, for all tensors,
            is the current one of its family, and ``'auto'`` is the GPU if there is one, else the CPU.

    Returns:
        `obj` itself if it is a module or an optimizer, which move in place. Containers, and other tensors that have to
        move, are copied.

    Raises:
        DeviceUnavailable: torch does not have the device here. Nothing was moved.
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
                # modules override this: an LSTM joins its weights again afterwards
                place.node._apply(move.in_place)  # type: ignore[no-untyped-call]
        for tensor in found.owned:
            move.in_place(tensor)
        moved: _T = contents.copied(move.new)
    return moved


def devices(obj: object) -> dict[str, int]:
    """Count the bytes of storages on each device.

    Args:
        obj: Modules, optimizers and tensors with their gradients, in any containers.

    Returns:
        The number of bytes by device, the largest first. Devices are written as in a checkpoint: ``cpu``, ``cuda:0``,
        ``mps``. A storage counts once, with its full size. A storage on ``meta`` has a size and no data.
    """
    sizes: Counter[str] = Counter()
    with torch._C.DisableTorchFunctionSubclass():
        found = _Found(Contents(obj))
        storages = list(found.storages)
        for tensor in found.tensors():
            lying_on = list(_storages(tensor))
            storages += lying_on
            if not lying_on:  # a layout without storages
                sizes[_tag(tensor)] += tensor.numel() * tensor.element_size()
        for storage in {_key(storage): storage for storage in storages}.values():
            sizes[_tag(storage)] += storage.nbytes()
    return dict(sizes.most_common())


class _Found:
    """The tensors in `contents` and their gradients.

    Attributes:
        owned: The tensors of modules and optimizers, with their gradients. They move in place.
        free: The slots of all other tensors. Their gradients are added by :meth:`tensors`.
        storages: Storages that occur as objects of their own.
        hosted: Tensors of optimizers that stay on the CPU if they are there.
    """

    def __init__(self, contents: Contents) -> None:
        self.owned: list[torch.Tensor] = []
        self.free: list[Slot] = []
        self.storages: list[torch.UntypedStorage] = []
        self.hosted: list[torch.Tensor] = []
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
                self.storages.append(node if isinstance(node, torch.UntypedStorage) else node._untyped_storage)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors and gradients, without repetitions."""
        free = _with_gradients(place.node for place in self.free)
        return list({id(tensor): tensor for tensor in [*self.owned, *free]}.values())


def _tensors(obj: object) -> list[torch.Tensor]:
    """Return all tensors in the containers `obj`."""
    return [place.node for place in Contents(obj).leaves if isinstance(place.node, torch.Tensor)]


def _with_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors`, followed by the gradients of those that are leaves."""
    found = list(tensors)
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def _hosted(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of `optimizer` that stay on the CPU if they are there.

    These are ``step`` and the tensors among the options of groups (such as ``lr``), because the CPU reads them in each
    training step. In groups that are ``capturable`` or ``fused`` there are none. ``step`` stays too in torch's
    ``Optimizer._process_value_according_to_param_policy``.
    """
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        yield from _tensors({key: value for key, value in group.items() if key != "params"})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            yield from _tensors(state.get("step") if isinstance(state, dict) else None)


class _Move:
    """A move of storages and tensors to other devices. Each is moved once, even if several objects refer to it."""

    def __init__(self, devices: Devices, found: _Found) -> None:
        self.new_tag = cache(devices.new_tag)
        self.found = found
        self.storages: dict[StorageWeakRef, torch.UntypedStorage] = {}
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.all = found.tensors()
        users = Counter(_key(storage) for tensor in self.all for storage in _storages(tensor))
        users.update(map(_key, found.storages))
        self.rng = _keys(rng_states(found.free, lambda tensor: users[_key(tensor.untyped_storage())] == 1))
        self.hosted = _keys(found.hosted)

    def check(self) -> None:
        """Raise DeviceUnavailable if a tensor or storage would move to a device that does not exist here."""
        things = [*map(_thing, self.all), *self.found.storages]
        require_devices(
            (new for thing in things if (new := self.target(thing)) != _tag(thing)),
            hint=option("map_location", "cpu")
            + " works everywhere, "
            + option("map_location", "auto")
            + " uses the devices of this machine",
        )

    def target(self, thing: torch.Tensor | torch.UntypedStorage) -> str:
        """Return the tag of the device that `thing` moves to. It can be the device on which `thing` is."""
        tag = _tag(thing)
        key = _key(thing) if isinstance(thing, torch.UntypedStorage) else None
        if tag == "meta" or (tag == "cpu" and key in self.hosted):
            return tag
        return self.new_tag(tag, rng=key in self.rng)

    def new(self, leaf: Any) -> Any:
        """Return the object that replaces `leaf` in the copy of a container: a moved tensor or storage, or `leaf`
        itself.
        """
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
        """Return `storage` on its target device. A storage is moved by the first call only."""
        key = _key(storage)
        if key not in self.storages:
            tag = self.target(storage)
            new = storage if tag == _tag(storage) else _storage_on(tag, storage)
            self.storages[key] = self.storages[_key(new)] = new  # a storage on its target does not move again
        return self.storages[key]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` if it is on its target device or was moved in place. Otherwise return a copy there.

        The copy has a copy of the gradient.
        """
        if id(tensor) not in self.tensors:
            new = self.moved(tensor)
            self.tensors[id(tensor)] = tensor, new
            if new is not tensor and tensor.is_leaf and tensor.grad is not None:
                new.grad = self.tensor(tensor.grad)
        return self.tensors[id(tensor)][1]

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move `tensor` and its gradient in place, and return `tensor`."""
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
        """Return `tensor` if it is on its target device. Otherwise return a copy there, without the gradient."""
        storage = _own_storage(tensor)
        if storage is not None:
            new = self.storage(storage)
            return tensor if new._cdata == storage._cdata else _dressed(_view(new, tensor), tensor)
        tag = self.target(tensor)
        return tensor if tag == _tag(tensor) else _dressed(_tensor_on(tag, tensor), tensor)


def _resolved(map_location: MapLocation) -> Devices:
    """Return `map_location` as a mapping of devices.

    If it is one device without an index, the index of the current device is added, if this machine has the family.
    """
    devices = to_devices(
        automatic_device() if isinstance(map_location, str) and map_location == "auto" else map_location
    )
    if devices.to and devices.to.index is None and has_device(devices.to.family):
        return replace(devices, to=Target(devices.to.family, _current(devices.to.family)))
    return devices


def _current(family: str) -> int | None:
    """Return the index of the current device of `family`, or None if the family has no indices."""
    return torch.empty(0, device=family).device.index


def _tag(thing: torch.Tensor | torch.UntypedStorage) -> str:
    """Return the device of `thing` in the spelling that torch writes into files, such as ``cpu`` or ``cuda:0``."""
    device = thing.device
    return device.type if device.type in _NO_INDEX else f"{device.type}:{device.index or 0}"


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Return a key for the address of `storage`.

    No other storage has this address while the key exists, even after the bytes are freed.
    """
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _keys(tensors: Iterable[torch.Tensor]) -> set[StorageWeakRef]:
    """Return the keys of all storages of `tensors`."""
    return {_key(storage) for tensor in tensors for storage in _storages(tensor)}


def _own_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of `tensor`. Return None unless `tensor` is only a strided view of one storage."""
    special = tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or is_wrapper(tensor)
    return tensor.untyped_storage() if not special and torch._C._has_storage(tensor) else None


def _thing(tensor: torch.Tensor) -> torch.Tensor | torch.UntypedStorage:
    """Return the object that has to move so that `tensor` moves: its storage, or the tensor itself without one."""
    storage = _own_storage(tensor)
    return tensor if storage is None else storage


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield all storages of `tensor`, including those of the tensors inside a sparse or wrapper tensor."""
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
    """Return a copy of `storage` on the device `tag`. It moves as a tensor, because every backend can move tensors."""
    return _bytes(storage).to(tag).untyped_storage()


def _tensor_on(tag: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor`, which is not a strided view of one storage, on the device `tag`."""
    return tensor.detach().to(tag)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of `storage` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a view of `storage` with the dtype, offset, shape, stride and lazy bits of `like`."""
    view = torch.empty(0, dtype=like.dtype, device=storage.device)
    view.set_(storage, like.storage_offset(), like.size(), like.stride())
    # the lazy bits: conjugated, negated
    metadata = torch._utils.get_tensor_metadata(like)  # type: ignore[no-untyped-call]
    torch._utils.set_tensor_metadata(view, metadata)  # type: ignore[no-untyped-call]
    return view


def _dressed(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `data` as a leaf with the class, attributes and ``requires_grad`` of `like`."""
    if type(data) is not type(like):
        data = torch.Tensor._make_subclass(type(like), data)
    if not is_wrapper(like):
        set_attributes(data, attributes_of(like))
    return data.requires_grad_(like.requires_grad)


def _become(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Give the object `tensor` the content of `new`, as ``Module._apply`` does."""
    if torch._has_compatible_shallow_copy_type(tensor, new) and not (is_wrapper(tensor) or tensor.is_inference()):
        tensor.data = new
    else:
        tensor.grad = None  # a reference from the gradient would prevent the swap
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]


# Devices of this machine


def has_device(tag: str) -> bool:
    """Return whether torch can put tensors on the device `tag` here.

    Its backend must be built in, and the device must be visible. ``cpu`` and ``meta`` exist everywhere, but only
    without an index: the answer for ``cpu:0`` is False.
    """
    family, _, index = tag.partition(":")
    if family in _EVERYWHERE:
        return not index  # torch restores no tag cpu:0
    return int(index or 0) < _device_count(family) if index.isdecimal() or not index else False


def _device_count(family: str) -> int:
    """Return the number of available devices of `family`. Return 0 if torch does not know the family.

    Backends that register themselves with torch (npu, mlu, ...) are included. A backend that cannot count its devices
    counts as one.
    """
    try:
        backend = torch.get_device_module(family)
    except RuntimeError:  # no device that this torch knows
        return 0
    count = int(backend.device_count()) if hasattr(backend, "device_count") else 1
    return count if not hasattr(backend, "is_available") or backend.is_available() else 0


def require_devices(tags: Iterable[str], hint: str) -> None:
    """Raise DeviceUnavailable with `hint` if torch lacks one of the devices `tags`."""
    missing = sorted({tag for tag in tags if not has_device(tag)})
    if missing:
        families = sorted({tag.partition(":")[0] for tag in missing})
        seen = ", ".join(
            f"{_device_count(family) or 'no'} {family} device{'s' * (_device_count(family) != 1)}"
            for family in families
        )
        raise DeviceUnavailable(
            f"tensors would go to {', '.join(missing)}, which this machine does not have",
            got=seen,
            hint=hint,
        )


def automatic_device() -> str:
    """Return the family of the available accelerator, or ``cpu`` if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


# States of random generators


def rng_states(places: Iterable[Slot], alone: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """Return the tensors at `places` that are states of random generators.

    `alone` returns whether a tensor is the only user of its storage. Only such tensors can be states.
    """
    possible = [place for place in places if _is_bytes(place.node) and alone(place.node)]
    rules = RngRules(
        possible,
        lambda place: place.node.numel() == CPU_RNG_BYTES,
        lambda node: node if isinstance(node, dict) else None,
    )
    return [place.node for place in possible if rules.is_state(place, partial(_is_in_state_dict, rules))]


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a plain one-dimensional uint8 tensor that fills its storage, as states are."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype == torch.uint8
        and tensor.layout == torch.strided
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel()
    )


def _is_in_state_dict(rules: RngRules, place: Slot) -> bool:
    """Return whether one of the dictionaries that contain `place` is a state dict of a module.

    Dictionaries inside an optimizer's state do not count.
    """
    for node in [above.node for above in place.upwards() if isinstance(above.node, dict)][::-1]:
        if isinstance(getattr(node, "_metadata", None), Mapping):
            return True
        if {"state", "param_groups"} <= node.keys():
            return False
        tensors = {id(value) for value in node.values() if isinstance(value, torch.Tensor)}
        if tensors and all(map(_may_be_in_state_dict, node.keys(), node.values())) and not rules.are_states(tensors):
            return True
    return False


def _may_be_in_state_dict(key: object, value: object) -> bool:
    """Return whether a state dict can have `value` under `key`."""
    if not isinstance(key, str):
        return False
    return value is None or isinstance(value, torch.Tensor) or key.endswith("_extra_state")
