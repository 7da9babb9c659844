"""The devices that torch has on this machine, and the error for missing ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptconv.errors import DeviceUnavailable

_EVERYWHERE = ("cpu", "meta")


def has(tag: str) -> bool:
    """Return whether torch can put tensors on the device `tag` here.

    Its backend must be built in, and the device must be visible. ``cpu`` and ``meta`` exist everywhere. Their tags have
    no index, so the answer for ``cpu:0`` is False.
    """
    family, _, index = tag.partition(":")
    if family in _EVERYWHERE:
        return not index  # torch restores no tag cpu:0
    return int(index or 0) < _count(family) if index.isdecimal() or not index else False


def _count(family: str) -> int:
    """Return the number of devices of `family`, or 0 if this torch does not know it.

    Backends that register themselves with torch (npu, mlu, ...) are modules of torch too. A backend that cannot count
    its devices has one.
    """
    try:
        backend = torch.get_device_module(family)
    except RuntimeError:  # no device that this torch knows
        return 0
    count = int(backend.device_count()) if hasattr(backend, "device_count") else 1
    return count if not hasattr(backend, "is_available") or backend.is_available() else 0


def require(tags: Iterable[str], *, where: object, hint: str) -> None:
    """Raise DeviceUnavailable if torch lacks one of the devices `tags`.

    `where` names the checkpoint in the error and `hint` says what to do.
    """
    missing = sorted({tag for tag in tags if not has(tag)})
    if missing:
        families = sorted({tag.partition(":")[0] for tag in missing})
        seen = ", ".join(
            f"{_count(family) or 'no'} {family} device{'s' * (_count(family) != 1)}" for family in families
        )
        raise DeviceUnavailable(
            f"tensors would go to {', '.join(missing)}, which torch does not have here",
            where=where,
            got=seen,
            hint=hint,
        )


def automatic() -> str:
    """Return the family of the available accelerator, or ``cpu`` if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"
