"""Which devices torch has on this machine, and the error for those that it has not."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptconv.errors import DeviceUnavailable

__all__ = ["automatic", "has", "require"]

_EVERYWHERE = ("cpu", "meta")


def has(tag: str) -> bool:
    """Whether torch can put tensors on `tag` here: its backend is built in, and so many devices are visible."""
    family, _, index = tag.partition(":")
    if family in _EVERYWHERE:
        return not index  # torch restores no tag cpu:0
    return int(index or 0) < _count(family) if index.isdecimal() or not index else False


def _count(family: str) -> int:
    """How many devices of `family` there are.

    Backends that register themselves with torch (npu, mlu, ...) are modules of it like torch's own.
    """
    try:
        backend = torch.get_device_module(family)
    except RuntimeError:  # no device that this torch knows
        return 0
    count = int(backend.device_count()) if hasattr(backend, "device_count") else 1
    return count if not hasattr(backend, "is_available") or backend.is_available() else 0


def require(tags: Iterable[str], *, where: object, hint: str) -> None:
    """Raise DeviceUnavailable if torch lacks one of `tags`, before torch says so in the middle of its work."""
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
    """The family of the accelerator that there is, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"
