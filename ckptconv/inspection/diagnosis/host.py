"""Detect the devices of this machine and its version of torch, from names of files and from environment variables.

torch is not imported. Sources: the CUDA programming guide on ``CUDA_VISIBLE_DEVICES``, and ``torch/cuda/__init__.py``
(``_parse_visible_devices``, ``_device_count_nvml``) of torch 2.13, with which a test compares. On Linux,
``/dev/nvidiaN`` is one NVIDIA GPU, and ``/dev/kfd`` is the driver of AMD GPUs, which torch calls cuda too.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ckptconv.checkpoint.torch_versions import KNOWN, installed_torch, version_of
from ckptconv.light_dataclass import dataclass

_T = TypeVar("_T")


@dataclass(frozen=True)
class Host:
    """A machine on which a checkpoint is loaded.

    Attributes:
        cuda: The number of ``cuda`` devices, or None if it is not known.
        mps: Whether the machine has Apple's ``mps``.
        torch: The version of torch, or None if it is not installed.
    """

    cuda: int | None = 0
    mps: bool = False
    torch: str | None = None

    @property
    def other_torch(self) -> str | None:
        """The version of torch if its rules are not known. Otherwise None."""
        return self.torch if self.torch and version_of(self.torch) not in KNOWN else None

    def shows(self, tag: str) -> bool | None:
        """Return whether the machine has the device `tag`. Return None if only torch and a driver could tell."""
        family, _, index = tag.partition(":")
        if family in ("cpu", "meta"):
            return not index  # torch does not restore a tag cpu:0
        if family == "mps":
            return self.mps
        if family != "cuda" or self.cuda is None:
            return None
        return (not index or (index.isdecimal() and len(index) < 4)) and int(index or 0) < self.cuda


def this_host(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    system: str = sys.platform,
) -> Host:
    """Return this machine. The parameters replace facts about it in tests.

    Args:
        root: The folder with ``dev``, ``proc`` and ``sys``, whose files show the GPUs.
        environ: The environment variables.
        system: The name of the system, as in ``sys.platform``.
    """
    torch = installed_torch()
    if system == "darwin":
        return Host(0, mps=platform.machine() == "arm64", torch=torch)
    return Host(_cuda(root, environ) if system == "linux" else None, torch=torch)


def _cuda(root: Path, environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that torch calls cuda, after environment variables are applied.

    None if it is not known.
    """
    nvidia = _nvidia(root)
    if nvidia:
        return _visible(environ.get("CUDA_VISIBLE_DEVICES"), nvidia, _uuids(root))
    if (root / "dev/dxg").exists():  # GPUs of Windows under WSL: neither their kind nor their number is known
        return 0 if _visible(environ.get("CUDA_VISIBLE_DEVICES"), 1) == 0 else None
    below = _visible(environ.get("ROCR_VISIBLE_DEVICES"), _amd(root))
    return _visible(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), below)


def _nvidia(root: Path) -> int:
    """Return the number of NVIDIA GPUs.

    In a container, /dev contains only the GPUs of the container, but /proc contains all. Outside of containers, /dev
    contains them only after the driver was used once.
    """
    files = [path for path in _listed(root / "dev") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    return len(files) or len(_listed(root / "proc/driver/nvidia/gpus"))


def _uuids(root: Path) -> list[str]:
    """Return the UUIDs of the NVIDIA GPUs whose information can be read."""
    texts = [_text(path / "information") for path in _listed(root / "proc/driver/nvidia/gpus")]
    return [found[1] for text in texts if (found := re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE))]


def _amd(root: Path) -> int:
    """Return the number of AMD GPUs. These are the nodes of the topology whose gpu_id is not 0; processors have 0."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = _listed(root / "sys/class/kfd/kfd/topology/nodes")
    return sum(_text(node / "gpu_id").strip() not in ("", "0") for node in nodes)


def _listed(folder: Path) -> list[Path]:
    """Return the sorted paths in `folder`, or an empty list if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """Return the text of the file `path`. Return an empty text if it cannot be read, for example in a container."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _visible(variable: str | None, count: int, uuids: list[str] | None = None) -> int:
    """Return how many of `count` devices are visible to the process.

    Args:
        variable: The value of the environment variable, or None if it is not set. Its list ends at the first entry that
            is not a device. No device is visible if an entry occurs twice.
        count: The number of devices.
        uuids: Their UUIDs. If some are not known, every UUID in the list counts as a device.
    """
    if variable is None or not count:
        return count
    words = variable.split(",")
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if variable.startswith(prefix)), None)
    if prefix is None:
        numbers = _until_wrong([_number(word) for word in words])
        return next((i for i, number in enumerate(numbers) if number >= count), len(numbers))
    named = _until_wrong([word if word.startswith(prefix) else None for word in words])
    if prefix == "MIG-":
        return min(len(named), 1)  # a process sees one part of a divided GPU
    if uuids is None or len(uuids) != count:
        return min(len(named), count)
    return len(_until_wrong([_the_only(word, uuids) for word in named]))


def _until_wrong(entries: list[_T | None]) -> list[_T]:
    """Return `entries` before the first None. Return an empty list if one of these occurs twice."""
    right = entries[: entries.index(None)] if None in entries else entries
    return [entry for entry in right if entry is not None] if len(set(right)) == len(right) else []


def _number(word: str) -> int | None:
    """Return the number at the start of `word`, as C's strtoul reads it. None if there is none or it is negative."""
    match = re.match(r"[+-]?[0-9]{1,9}", word.strip())
    return int(match[0]) if match and int(match[0]) >= 0 else None


def _the_only(word: str, uuids: list[str]) -> str | None:
    """Return the UUID of `uuids` that starts with `word`. Return None if there is none, or more than one."""
    found = [uuid for uuid in uuids if uuid.startswith(word)]
    return found[0] if len(found) == 1 else None
