"""Folders of DeepSpeed ZeRO: which files in a folder belong to one checkpoint, according to their names.

Layout (``_get_ckpt_name`` and ``_get_rank_zero_ckpt_name`` of ``deepspeed/runtime/engine.py`` 0.19.8):

    latest                                                 the tag, as a text
    TAG/mp_rank_00_model_states.pt                         stages 1 and 2, written by rank 0
    TAG/zero_pp_rank_RANK_mp_rank_00_model_states.pt       stage 3, one for each rank
    TAG/[bf16_]zero_pp_rank_RANK_mp_rank_00_optim_states.pt

Lightning's folder is such a folder with the tag ``checkpoint``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ckptconv.errors import InputError
from ckptconv.lazy_regex import regex
from ckptconv.stores import first_bytes, list_folder, locate
from ckptconv.system.names import stays_inside

#: A rank's file: groups 1 to 3 are the rank or None, the rank of tensor parallelism, and the kind of states.
_FILE = regex(r"(?:(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_(model|optim)_states\.pt")
#: Files of the layers of a pipeline, and of experts.
_LAYER = regex(r"layer_[0-9]+-model_[0-9]+-model_states\.pt")
_EXPERT = regex(r"(?:layer_[0-9]+_expert_[0-9]+|expp_rank_[0-9]+)_mp_rank_[0-9]+_(?:model|optim)_states\.pt")
_PARALLEL, _LAYERS, _EXPERTS = "tensor parallelism", "the layers of a pipeline", "the experts of a mixture"
_LATEST, _LIGHTNING = "latest", "checkpoint"
_BESIDE = (_LATEST, "zero_to_fp32.py", "zero_to_torch.py")
_TAG = 1024  # bytes: the longest path of a tag that is read


class ZeroFiles(NamedTuple):
    """The names of the files of one checkpoint.

    Attributes:
        tag: The path of their folder relative to the given folder. Empty if they are in the given folder.
        models: The rank and the name of each file with model states, sorted by rank. Rank -1 is the file for all ranks.
        optims: The same for optimizer states.
        others: The names of files that cannot be merged, by a description of their contents.
    """

    tag: str
    models: list[tuple[int, str]]
    optims: list[tuple[int, str]]
    others: dict[str, list[str]]

    def path(self, name: str) -> str:
        """Return the path of the file `name` relative to the given folder."""
        return f"{self.tag}/{name}" if self.tag else name

    def has(self, folder: Path, path: Path) -> bool:
        """Return whether `path` is a file of this checkpoint, which was found in `folder`.

        Files that DeepSpeed writes next to the checkpoint, such as ``latest``, count too.
        """
        return (path.parent == folder / self.tag and is_part(path.name)) or (
            path.parent == folder and path.name in _BESIDE
        )


def files_of(folder: Path) -> ZeroFiles | None:
    """Return the files of the ZeRO checkpoint in `folder`, or None if it is another folder.

    They are in `folder`, or in the subfolder that ``latest`` names. Raises InputError if `folder` cannot be listed.
    """
    folders, names = list_folder(folder)
    files = _files("", names)
    if files.optims or files.others[_EXPERTS]:
        return files
    tag = _LIGHTNING if _LIGHTNING in folders else ""
    if _LATEST in names:
        tag = first_bytes(folder / _LATEST, _TAG).decode(errors="replace").strip()
    tag = "/".join(PurePosixPath(tag).parts)
    if not stays_inside(tag, folders=True):
        return None
    try:
        files = _files(tag, list_folder(folder / tag)[1])
    except (InputError, ValueError):
        files = _files(tag, [])
    is_run = "zero_to_fp32.py" in names and _LATEST in names and not files.models
    return files if files.optims or files.others[_EXPERTS] or is_run else None


def is_part(name: str) -> bool:
    """Return whether a file called `name` is one of the files of a ZeRO checkpoint."""
    return any(pattern.fullmatch(name) for pattern in (_FILE, _LAYER, _EXPERT))


def as_folders(paths: Iterable[str]) -> list[str]:
    """Return `paths`, in which the files of a checkpoint are replaced by their folder.

    Raises the errors of :func:`files_of`.
    """
    folders = {path: os.path.dirname(path) for path in paths if is_part(os.path.basename(path))}
    complete = {folder for folder in {*folders.values()} if files_of(locate(folder))}
    return [*dict.fromkeys(folder if (folder := folders.get(path)) in complete and folder else path for path in paths)]


def _files(tag: str, names: list[str]) -> ZeroFiles:
    files = ZeroFiles(tag, [], [], {_PARALLEL: [], _LAYERS: [], _EXPERTS: []})
    for name in names:
        parts = _FILE.fullmatch(name)
        if parts and not int(parts[2]):
            if parts[3] == "model" or parts[1]:
                (files.models if parts[3] == "model" else files.optims).append((int(parts[1] or -1), name))
        elif parts or is_part(name):
            what = _PARALLEL if parts else _LAYERS if _LAYER.fullmatch(name) else _EXPERTS
            files.others[what].append(name)
    files.models.sort()
    files.optims.sort()
    return files
