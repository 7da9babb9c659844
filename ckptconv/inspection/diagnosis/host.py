"""Detect the devices of this machine, and its version of torch, from names of files and from environment variables,
without torch.

Sources: the CUDA programming guide on ``CUDA_VISIBLE_DEVICES``, and ``torch/cuda/__init__.py``
(``_parse_visible_devices``, ``_device_count_nvml``) of torch 2.13, with which a test compares. Linux: ``/dev/nvidiaN``
is one GPU of NVIDIA's, ``/dev/kfd`` the driver of AMD's, which torch calls cuda as well.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ckptconv.checkpoint.weights_only.objects import TORCH
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

_TORCH_INSTALLED = regex(r"torch-([0-9][^-]*)(?:-py[0-9.]+)?\.(?:dist|egg)-info")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Host:
    """The devices that there are: how many of ``cuda`` (None: nobody can tell), and whether Apple's ``mps``. `torch` is
    the version of torch that is installed; None if none is found.
    """

    cuda: int | None = 0
    mps: bool = False
    torch: str | None = None

    @property
    def other_torch(self) -> str | None:
        """The version of torch that is installed if its rules are not those that :data:`TORCH` names, else None."""
        return self.torch if self.torch and not f"{self.torch}.".startswith(f"{TORCH}.") else None

    def shows(self, tag: str) -> bool | None:
        """Whether tensors tagged `tag` can be loaded to where they were.

        None where only torch and a driver could tell.
        """
        family, _, index = tag.partition(":")
        if family in ("cpu", "meta"):
            return not index  # torch restores no tag cpu:0
        if family == "mps":
            return self.mps
        if family != "cuda" or self.cuda is None:
            return None
        return (not index or (index.isdecimal() and len(index) < 4)) and int(index or 0) < self.cuda


def this_host(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    system: str = sys.platform,
    processor: str | None = None,
    folders: Iterable[str] | None = None,
) -> Host:
    """What the files below `root`, the variables `environ` and the names of the `system` and its `processor` show, and
    which torch is installed in `folders`, else in those from which modules are imported.
    """
    torch = _torch(sys.path if folders is None else folders)
    if system == "darwin":
        return Host(0, mps=(processor or platform.machine()) == "arm64", torch=torch)
    return Host(_cuda(root, environ) if system == "linux" else None, torch=torch)


def _torch(folders: Iterable[str]) -> str | None:
    """Return the version of the first torch in `folders`, by the name of the folder that its installer left; None if
    there is none.

    ``importlib.metadata`` finds the same, and takes longer to import than most files take to inspect. Relative folders,
    as that which the process is in, are not looked into.
    """
    for folder in filter(os.path.isabs, folders):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if found := _TORCH_INSTALLED.fullmatch(name):
                    return found[1]
    return None


def _cuda(root: Path, environ: Mapping[str, str]) -> int | None:
    """How many GPUs torch would call cuda."""
    nvidia = _nvidia(root)
    if nvidia:
        return _visible(environ.get("CUDA_VISIBLE_DEVICES"), nvidia, _uuids(root))
    if (root / "dev/dxg").exists():  # Windows' GPUs under WSL: the file does not say which, nor how many
        return 0 if _visible(environ.get("CUDA_VISIBLE_DEVICES"), 1) == 0 else None
    below = _visible(environ.get("ROCR_VISIBLE_DEVICES"), _amd(root))
    return _visible(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), below)


def _nvidia(root: Path) -> int:
    """In a container, /dev has the GPUs that it was given and /proc has all.

    Outside, /dev has them once the driver was used.
    """
    files = [path for path in _listed(root / "dev") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    return len(files) or len(_listed(root / "proc/driver/nvidia/gpus"))


def _uuids(root: Path) -> list[str]:
    texts = [_text(path / "information") for path in _listed(root / "proc/driver/nvidia/gpus")]
    return [found[1] for text in texts if (found := re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE))]


def _amd(root: Path) -> int:
    """The nodes of the topology that are GPUs; processors are nodes too, with the id 0."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = _listed(root / "sys/class/kfd/kfd/topology/nodes")
    return sum(_text(node / "gpu_id").strip() not in ("", "0") for node in nodes)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """What `path` says; nothing where it may not be read, as that of a GPU which is not this container's."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _visible(variable: str | None, count: int, uuids: list[str] | None = None) -> int:
    """How many of `count` devices `variable` leaves.

    The list ends at the first entry that is no device; one that stands twice leaves none.

    Without `uuids` for all of them, whoever is named by one is believed to be there.
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
    """`entries` up to the first None; none at all if one stands there twice."""
    right = entries[: entries.index(None)] if None in entries else entries
    return [entry for entry in right if entry is not None] if len(set(right)) == len(right) else []


def _number(word: str) -> int | None:
    """The index that `word` starts with, as C's strtoul reads it; what follows is ignored."""
    match = re.match(r"[+-]?[0-9]{1,9}", word.strip())
    return int(match[0]) if match and int(match[0]) >= 0 else None


def _the_only(word: str, uuids: list[str]) -> str | None:
    """The UUID that `word` is the start of, if it is that of one alone."""
    found = [uuid for uuid in uuids if uuid.startswith(word)]
    return found[0] if len(found) == 1 else None
