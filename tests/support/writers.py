"""Checkpoints that are more than a file of torch.save: TorchScript archives, folders of torch.distributed.checkpoint,
and sets of shards.
"""

from __future__ import annotations

import inspect
import io
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support import torch_facts

__all__ = ["ALONE", "calculated_offsets", "distributed", "scripted", "sharded"]


#: The keyword which tells torch.distributed.checkpoint that there is only one process. torch 2.6 finds this out itself.
ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def calculated_offsets() -> AbstractContextManager[Any]:
    """Return a context in which torch computes the offsets of storages instead of reading them from the archive. The
    context has no effect in torch 2.6.
    """
    if torch_facts.version() < (2, 7):
        return nullcontext()
    from torch.utils.serialization import config

    settings: Any = config
    context: AbstractContextManager[Any] = settings.patch({"load.calculate_storage_offsets": True})
    return context


def scripted(module: torch.nn.Module) -> bytes:
    """Return the TorchScript archive of `module`."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(module), file)
    return file.getvalue()


def distributed(state: dict[str, Any], folder: Path) -> Path:
    """Save `state` with torch.distributed.checkpoint in one process to `folder`, which must not exist. Return
    `folder`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save(state, checkpoint_id=folder, **ALONE)
    return folder


def sharded(folder: Path, *shards: Any, stem: str = "pytorch_model", **options: Any) -> Path:
    """Save `shards` with torch.save in `folder`, without an index. Their names begin with `stem`. Return `folder`."""
    folder.mkdir()
    for i, shard in enumerate(shards, 1):
        torch.save(shard, folder / f"{stem}-{i:05d}-of-{len(shards):05d}.bin", **options)
    return folder
