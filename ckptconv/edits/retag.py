"""Change the location tags of storages, and the devices of rebuild calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import cache

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import cpu_tensor_in
from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.checkpoint.tensor_info import DeviceArgument, Storage
from ckptconv.edits.changes import Changes
from ckptconv.edits.devices import FAMILIES, Devices, near_device, user_devices
from ckptconv.errors import UnknownDeviceError, UsageError, some
from ckptconv.hints import option
from ckptconv.pickles.graph import Call, Global, Tuple, Value, args_of, children, walk


def retag(checkpoint: Checkpoint, devices: Devices, rng_storages: Container[Storage], changes: Changes) -> None:
    """Change the tags of storages and the devices of rebuild calls, as `devices` maps them.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        devices: The mapping of tags.
        rng_storages: The storages with states of random generators.
        changes: The report.

    Raises:
        UnknownDeviceError: A rule is for a device that neither torch nor the checkpoint knows.
        UsageError: The new device is one that neither torch nor the checkpoint knows.
    """
    _unwrap(checkpoint, devices)
    tags: dict[str, str] = {}  # one string for each tag, as in a pickle
    new_tags: dict[Storage, str] = {}
    counts, arguments = checkpoint.index.tensor_counts, checkpoint.index.device_arguments
    seen_tags = tags_of(checkpoint)
    new_tag = cache(devices.new_tag)
    for storage in checkpoint.storages.values():
        new = new_tag(storage.device, rng=storage in rng_storages)
        if new != storage.device:
            new_tags[storage] = tags.setdefault(new, new)
            changes.count_devices(storage.device, new, counts[storage], storage.nbytes)
    for reference in checkpoint.references:
        if reference.storage in new_tags:
            change_id(reference.node, tag=new_tags[reference.storage])
    for storage, new in new_tags.items():
        storage.device = new
    for argument in arguments:
        new = new_tag(argument.device)
        if new != argument.device:
            _set_device(argument, tags.setdefault(new, new))
            changes.count_devices(argument.device, new, 1, 0)
    checkpoint.changed()
    changes.notes += unmatched_rules(checkpoint, devices, seen_tags)
    if devices.to and not changes.devices:
        nothing = "no tensor has data" if checkpoint.tensors else "there are no tensors"
        reason = "it changes nothing" if seen_tags else nothing
        if seen_tags == {devices.to.tag("")}:
            reason = f"every tensor is on {devices.to} already"
        changes.notes.append(reason + ", so " + option("map_location", str(devices.to)) + " changed nothing")


def _unwrap(checkpoint: Checkpoint, devices: Devices) -> None:
    """Replace each call that copies a CPU tensor to a device by the CPU tensor, with that device as its tag.

    The call stays if `devices` does not change the device, because torch has no tag for it (XLA). It also stays if the
    storage or a node of the tensor is shared.
    """
    index = checkpoint.index
    copies = [
        (call, inner, argument.device)
        for argument in index.device_arguments
        if devices.new_tag(argument.device) != argument.device
        and (inner := cpu_tensor_in(call := argument.call))
        and not call.effects
    ]
    if not copies:
        return
    uses = Counter(id(child) for node in walk([*index.graph.discarded, index.graph.root]) for child in children(node))
    references = Counter(reference.storage for reference in checkpoint.references)
    for call, inner, device in copies:
        args = args_of(inner)
        storage = index.storage_of[id(args[0])]
        if references[storage] == 1 and all(uses[id(node)] == 1 for node in (call.args, inner, inner.args, args[0])):
            call.callable, call.args = inner.callable, Tuple([*args[:4], args_of(call)[3], *args[5:]])
            storage.device = device
    checkpoint.changed()


def about_kept_devices(checkpoint: Checkpoint, devices: Devices) -> list[str]:
    """Return a list with a note on devices in the user's data that `devices` maps. Edits do not change such data.

    The list is empty if there are none.
    """
    data = user_devices(checkpoint.index.every_place)
    stay = [f"{path} = {device}" for path, device in data.items() if devices.new_tag(device) != device]
    return [f"devices in user data, which are not changed: {some(stay)}"] if stay else []


def tags_of(checkpoint: Checkpoint) -> set[str]:
    """Return the tags of all storages and rebuild calls of `checkpoint`."""
    arguments = {argument.device for argument in checkpoint.index.device_arguments}
    return {storage.device for storage in checkpoint.storages.values()} | arguments


def unmatched_rules(checkpoint: Checkpoint, devices: Devices, tags: set[str]) -> list[str]:
    """Return a note for each rule of `devices` that matches none of `tags`, the tags of `checkpoint`.

    Raises:
        UnknownDeviceError: Such a rule is for a word that is not a device.
        UsageError: A new device is a backend of which `checkpoint` has no tag, and the rule is not for ``any``.
    """
    notes = []
    for target in (devices.to, *(rule.new for rule in devices.rules if rule.rank)):
        if target and not target.is_known and not any(tag.split(":")[0] == target.family for tag in tags):
            raise UsageError(
                f"{str(target)!r} is not a device, and no tensor has such a tag",
                where=checkpoint.source.path,
                got=", ".join(sorted(tags)) or "no tensors",
                hint="for a backend of your own: " + option("map_location", (("any", str(target)),)),
            )
    for rule in devices.rules:
        if any(rule.matches(tag) for tag in tags):
            continue
        if rule.is_known:
            notes.append(f"no tensor is on {rule.old!r}, so mapping it changed nothing")
            continue
        near = near_device(rule.old, ("gpu", "any", *FAMILIES))
        raise UnknownDeviceError(
            f"{rule.old!r} is not a device, and no tensor has such a tag",
            where=checkpoint.source.path,
            got=", ".join(sorted(tags)) or "no tensors",
            hint=option("map_location", ((near, str(rule.new)),)) + " may be meant" if near else None,
            unmatched=("devices", rule),
        )
    return notes


def _set_device(argument: DeviceArgument, tag: str) -> None:
    """Replace the device in one argument of one call by `tag`.

    Tuples of arguments can be shared with other calls, so they are replaced and not changed.
    """
    outer = argument.call.args
    inner = outer.items[2] if argument.nested and isinstance(outer, Tuple) else outer
    assert isinstance(outer, Tuple) and isinstance(inner, Tuple)
    old = inner.items[argument.index]
    new: Value = tag
    if isinstance(old, Call):
        family, _, index = tag.partition(":")
        new = Call("REDUCE", Global("torch", "device"), Tuple([family, int(index)] if index else [family]))
    args = Tuple([*inner.items[: argument.index], new, *inner.items[argument.index + 1 :]])
    argument.call.args = Tuple([*outer.items[:2], args, *outer.items[3:]]) if argument.nested else args
