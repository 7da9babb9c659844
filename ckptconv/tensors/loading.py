"""Load real tensors with torch's own safe loader, from an archive that exists only in memory.

torch reads the pickle that the graph emits, and the bytes of the storages directly from the source
(:class:`ckptconv.output.transfer.VirtualFile`). So the same code loads a part of a file, a safetensors file, and a
pickle that torch refuses only for its protocol.
"""

from __future__ import annotations

import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO, Any, TypeAlias, cast

import torch

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import OtherDType
from ckptconv.checkpoint.safe_globals import needed_import
from ckptconv.checkpoint.torch_versions import warning_of_flaws
from ckptconv.edits.changes import Changes
from ckptconv.edits.devices import Devices, MapLocation, accepts, parse_target, to_devices
from ckptconv.edits.error_paths import names_checkpoint
from ckptconv.edits.retag import retag, tags_of
from ckptconv.errors import MalformedError, UnsupportedError, at_path
from ckptconv.formats import torch_zip
from ckptconv.hints import joined, option
from ckptconv.inspection.diagnosis.refusals import Refused
from ckptconv.output.transfer import VirtualFile
from ckptconv.pickles.graph import Global, imported_name
from ckptconv.tensors.moving import automatic_device, require_devices

#: A function for ``torch.load``: it moves a storage, which was loaded on the CPU, to its device.
TorchsFunction: TypeAlias = Callable[[torch.UntypedStorage, str], "torch.UntypedStorage | None"]
LoadLocation: TypeAlias = "MapLocation | TorchsFunction"


@names_checkpoint
def load_checkpoint(checkpoint: Checkpoint, map_location: LoadLocation | None, *, whole: bool = True) -> Any:
    """Return the object in `checkpoint`, with real tensors. The checkpoint's graph is changed.

    Args:
        checkpoint: The checkpoint.
        map_location: As for :func:`ckptconv.load`.
        whole: Whether the complete checkpoint is loaded, so that errors can suggest a part that loads.

    Raises:
        DeviceUnavailable: torch lacks a device. Raised before a tensor is read.
        UnsupportedError: torch's safe loader refuses the checkpoint.
        MalformedError: torch cannot create the objects in the checkpoint.
    """
    _warn_of_flaws()
    devices, target = _meaning(map_location)
    _refuse_code(checkpoint, whole=whole)
    retag(checkpoint, devices, (), Changes())
    if not checkpoint.is_byteorder_said:
        checkpoint.byteorder = _default_byteorder()
    if not callable(target):
        tags = tags_of(checkpoint)
        require_devices(
            tags if target is None or not tags else [target],
            hint=option("map_location", "cpu")
            + " loads it here, "
            + option("map_location", "auto")
            + " on what there is",
        )
    stream = VirtualFile(torch_zip.archived(checkpoint))
    try:
        with stream:
            return torch.load(cast("IO[bytes]", stream), map_location=target, weights_only=True, mmap=False)
    except BaseException as error:
        if stream.failure:  # torch reports that reading failed, without the reason
            raise stream.failure from None
        if isinstance(error, pickle.UnpicklingError):
            reason = re.search(r"WeightsUnpickler error:\s*(.*?)(?:\.? Please|$)", str(error), re.MULTILINE)
            raise UnsupportedError("torch's safe loader refuses it", got=reason and reason[1]) from error
        if not isinstance(error, Exception):
            raise
        short = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in str(error)
        if short or callable(target):  # not a fault of the file, or perhaps an error of the function itself
            raise
        raise MalformedError(
            "torch cannot create the objects in the file", got=f"{type(error).__name__}: {error}"
        ) from error


@cache
def _warn_of_flaws() -> None:
    """Warn, once in a process, if the installed torch has known vulnerabilities in its safe loader."""
    if warning := warning_of_flaws(torch.__version__):
        warnings.warn(warning, stacklevel=2)


def _refuse_code(checkpoint: Checkpoint, *, whole: bool) -> None:
    """Raise UnsupportedError if torch's safe loader would refuse `checkpoint`. No tensor is read.

    With `whole`, the error suggests a part that would load.
    """
    unknown = sorted({node.name for node in checkpoint.graph.globals if isinstance(node, OtherDType)})
    if unknown:
        raise UnsupportedError("torch has no such dtype", got=", ".join(unknown))
    trusted = {  # trusted by the program that uses this package
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}"
        for each in torch.serialization.get_safe_globals()
    }
    refused = [
        (reason, node)
        for reason, node in checkpoint.index.obstacles
        if not (isinstance(node, Global) and imported_name(node, 2) in trusted)
    ]
    if refused:
        found = Refused(checkpoint, refused)
        got = ", ".join(word + at_path(first) for word, (first, _) in found.where.items())
        needed = {needed_import(word) for word in found.where}
        if None not in needed:
            raise UnsupportedError(
                "torch's safe loader loads it only after an import",
                got=got,
                hint="import " + ", ".join(sorted(map(str, needed))) + " first",
            )
        part = found.loadable_part() if whole else None
        one_by_one = (
            "ckptconv.open(path).load(...) gives its tensors one by one" if whole and checkpoint.tensors else None
        )
        take = part and joined(
            option("select", part.path) if part.path is not None else None,
            option("state_dict") if part.path is None or part.module else None,
            separator=", ",
        )
        is_code = any(isinstance(node, Global) for _, node in refused)
        raise UnsupportedError(
            "loading it needs code that torch's safe loader refuses" if is_code else "torch's safe loader refuses it",
            got=got,
            hint=take + " loads a part without it" if take else one_by_one,
        )


def _default_byteorder() -> str:
    """Return torch's setting for the byte order of files that do not record it: ``little`` or ``big``."""
    setting = torch.serialization.get_default_load_endianness()
    if setting == torch.serialization.LoadEndianness.NATIVE:
        return sys.byteorder
    return "big" if setting == torch.serialization.LoadEndianness.BIG else "little"


def _meaning(map_location: LoadLocation | None) -> tuple[Devices, Any]:
    """Return `map_location` as a mapping of tags for ckptconv, and as an argument for torch. One of them has no effect.

    Raises UsageError if `map_location` is wrong.
    """
    if callable(map_location):
        if accepts(map_location, None, "cpu"):  # the storage and its tag, as for torch
            return Devices(), map_location
        return to_devices(cast("Callable[[str], str]", map_location)), None
    if isinstance(map_location, Mapping) or (isinstance(map_location, str) and "=" in map_location):
        return to_devices(map_location), None
    return Devices(), None if map_location is None else _device(map_location)


def _device(word: object) -> str:
    """Return the device `word`, on which all tensors are loaded, in torch's spelling.

    Without an index, torch uses the current device of the family. ``auto`` is the available accelerator, or the CPU.
    """
    if word == "auto":
        return automatic_device()
    if str(word) == "meta":  # no data, but the user may want only the shapes
        return "meta"
    target = parse_target(word)
    return target.family if target.index is None else target.tag("")
