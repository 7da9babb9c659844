"""What a shell offers when somebody presses Tab: devices, and the tags and prefixes that the given file has.

Click writes the completion of commands, flags and paths by itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click

_DEVICES = ("cpu", "gpu", "cuda:0", "cuda:1", "mps", "xpu:0", "npu:0", "hpu:0")


def complete_device(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    """Devices that begin as `typed`."""
    return [device for device in _DEVICES if device.startswith(typed)]


def complete_rule(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Rules OLD=NEW, of which OLD is on the device of a tensor of the file, or any."""
    old, _equals, new = typed.partition("=")
    if "=" in typed:
        return [f"{old}={device}" for device in _DEVICES if device.startswith(new)]
    return [f"{tag}=" for tag in (*_summary(context).get("devices", ()), "any") if tag.startswith(old)]


def complete_prefix(context: click.Context, _: click.Parameter, typed: str) -> list[str]:
    """Prefixes of names in the state dicts of the file."""
    found = {prefix: None for each in _summary(context).get("state_dicts", ()) for prefix in each["prefixes"]}
    return [prefix for prefix in found if prefix.startswith(typed)]


def _summary(context: click.Context) -> dict[str, Any]:
    """What is in the first file of the command line; nothing where it cannot be read: a completion says no errors."""
    from ckptconv.errors import CkptconvError
    from ckptconv.inspection.summary import inspect

    typed = [*(context.params.get("paths") or ()), context.params.get("a"), *context.args]  # the last before Tab
    first = next(filter(None, typed), None)
    with contextlib.suppress(CkptconvError):
        return inspect(first).as_dict() if first else {}
    return {}
