"""Recognise folders given in place of a file: what each is, and what to type instead.

Looks at names, a bounded number of them, and into small files that stand where a checkpoint should, for they may be Git
LFS pointers. Sources for the names: ``torch/distributed/checkpoint/filesystem.py`` and ``format_utils.py`` of torch
2.13, ``deepspeed/utils/zero_to_fp32.py``, transformers' ``utils/__init__.py``, Orbax's "Checkpoint Format Guide".
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptconv.errors import InputError, UnsupportedError, some
from ckptconv.hints import shell
from ckptconv.limits import LIMITS

__all__ = ["CHECKPOINT_SUFFIXES", "FILE_SUFFIXES", "LFS", "distributed_part_error", "folder_error", "name_like"]

LFS = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".th", ".pth.tar")
#: What a folder's files are converted by, in any case of letters.
FILE_SUFFIXES = (*CHECKPOINT_SUFFIXES, ".pkl")
_POINTER = 1024  # bytes: Git LFS's own bound on a pointer
_SHOWN = 3  # names that are listed
#: The names that transformers, peft and diffusers give to a whole model, the better format first.
_MODELS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
#: Names that the rows ask for, which are looked for where a listing was cut; those of folders end in a slash.
_KNOWN = (
    *_MODELS, "data.pkl", "data/", "version", "byteorder", ".metadata", "__0_0.distcp", "zero_to_fp32.py", "latest",
    "saved_model.pb", "saved_model.pbtxt", "_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", "_METADATA",
    "model.weights.h5",
)  # a table  # fmt: skip
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>(?!00000)[0-9]{5})(?P<suffix>\.safetensors|\.bin)")
_ZERO = re.compile(r"(bf16_|fp16_)?zero_pp_rank_[0-9]+_.*\.pt")


class _Folder(NamedTuple):
    """A folder, and the names in it; those of folders end in a slash.

    OTHERS are no files: FIFOs, links to nowhere. CUT: it has more names than were looked at.
    """

    path: Path
    names: frozenset[str]
    others: frozenset[str]
    cut: bool

    def has(self, *names: str) -> bool:
        """Whether all of NAMES are there."""
        return self.names.issuperset(names)

    def any(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in self.names)


class _Answer(NamedTuple):
    """What a folder is, and the next step."""

    what: str
    hint: str


def folder_error(path: Path) -> InputError:
    """The error that says what the folder PATH is, and what to type instead."""
    try:
        folder = _list(path)
        answer = next(answer for row in _ROWS if (answer := row(folder)))
    except OSError as error:
        return InputError(f"a folder and not a file, which cannot be listed: {error.strerror}", where=path)
    return UnsupportedError(f"a folder and not a file: {answer.what}", where=path, hint=answer.hint)


def name_like(path: Path) -> Path | None:
    """A path beside PATH, which is missing, with nearly its name, if there is one."""
    try:
        folder = _list(path.parent)
    except (OSError, ValueError):
        return None
    names = {name.rstrip("/") for name in folder.names}
    if folder.cut:
        others = (path.stem + suffix for suffix in CHECKPOINT_SUFFIXES)
        names.update(name for name in others if os.path.isfile(path.with_name(name)))
    near = get_close_matches(path.name, sorted(names), n=1, cutoff=0.75)
    return path.with_name(near[0]) if near else None


def distributed_part_error(path: Path) -> InputError | None:
    """What is to be said of the file PATH if it is a part of a checkpoint of
    torch.distributed.checkpoint, by what stands beside it.
    """
    if path.suffix != ".distcp" and path.name != ".metadata":
        return None
    try:
        answer = _distributed(_list(path.parent))
    except OSError:
        return None
    return UnsupportedError(f"a part of {answer.what}", where=path, hint=answer.hint) if answer else None


def _list(path: Path) -> _Folder:
    """The folder PATH with the first names in it, and with those that everybody knows."""
    names: set[str] = set()
    others: set[str] = set()
    with os.scandir(path) as entries:
        for entry in islice(entries, LIMITS.folder_names):
            kind = _kind(entry)
            (others if kind is None else names).add(entry.name + (kind or ""))
        cut = next(entries, None) is not None
    if cut:
        names.update(name for name in _KNOWN if (os.path.isdir if name.endswith("/") else os.path.isfile)(path / name))
    return _Folder(path, frozenset(names), frozenset(others), cut)


def _kind(entry: os.DirEntry[str]) -> str | None:
    """What is put behind the name of ENTRY; None where it is neither a folder nor a file."""
    try:
        return "/" if entry.is_dir() else "" if entry.is_file() else None
    except OSError:  # a link to itself
        return None


# Whose it is


def _empty(folder: _Folder) -> _Answer | None:
    return None if folder.names or folder.others else _Answer("it is empty", "give the path of the checkpoint itself")


def _torch_records(folder: _Folder) -> _Answer | None:
    if not folder.has("data.pkl") or not (folder.names & {"data/", "version", "byteorder"}):
        return None
    whole = Path(os.path.abspath(folder.path))
    return _Answer(
        "the records of a torch checkpoint that was unpacked",
        f"make it a zip again: {shell('python', '-m', 'zipfile', '-c', 'out.pt', whole)}",
    )


def _distributed(folder: _Folder) -> _Answer | None:
    if not folder.has(".metadata") or not folder.any(r".*\.distcp"):
        return None
    out, whole = Path("out.pt"), Path(os.path.abspath(folder.path))
    if Path(os.path.realpath(whole)) in Path(os.path.realpath(out)).parents:  # among the parts nothing is written
        out = whole.with_name(f"{whole.name}.pt")
    command = shell("ckptconv", "convert", folder.path, out)
    return _Answer("a checkpoint of torch.distributed.checkpoint (DCP)", f"make it one file: {command}")


def _pointers(folder: _Folder) -> _Answer | None:
    small = [name for name in sorted(folder.names) if name.endswith(CHECKPOINT_SUFFIXES)][:50]
    if not small or not all(_is_pointer(folder.path / name) for name in small):
        return None
    return _Answer(
        "a git clone in which the checkpoints are Git LFS pointers",
        f"fetch them: {shell('git', '-C', folder.path, 'lfs', 'pull')}",
    )


def _is_pointer(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _POINTER:  # a FIFO is none
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return os.read(fd, len(LFS)) == LFS
        finally:
            os.close(fd)
    except OSError:
        return False


def _model(folder: _Folder) -> _Answer | None:
    name = next((name for name in _MODELS if folder.has(name) and not _is_pointer(folder.path / name)), None)
    if name is None:
        return None
    path, beside = shell(folder.path / name), [each for each in _found(folder) if each not in _MODELS]
    if not beside:
        return _Answer(f"the checkpoint in it is {name}", f"give that file: {path}")
    return _Answer(
        f"the model in it is {name}, beside {some(beside, _SHOWN)}", f"give that file: {path}; {_or_all(folder)}"
    )


def _shards(folder: _Folder) -> _Answer | None:
    shards = [match for name in sorted(folder.names) if (match := _SHARD.fullmatch(name))]
    if not shards:
        return None
    first = max(shards, key=lambda shard: (shard["suffix"] == ".safetensors", -shards.index(shard)))
    mine = {int(shard["number"]) for shard in shards if _set_of(shard) == _set_of(first)}
    missing = [n for n in range(1, int(first["count"]) + 1) if n not in mine]
    what = f"a checkpoint in {int(first['count']):,} shards"
    if missing and not folder.cut:
        names = [f"{first['stem']}-{n:05d}-of-{first['count']}{first['suffix']}" for n in missing]
        return _Answer(
            f"{what}, of which {some(names, _SHOWN)} {'is' if len(names) == 1 else 'are'} missing",
            "download or copy what is missing",
        )
    return _Answer(what, f"make it one file: {shell('ckptconv', 'convert', folder.path, 'out' + first['suffix'])}")


def _set_of(shard: re.Match[str]) -> tuple[str, str, str]:
    return shard["stem"], shard["count"], shard["suffix"]


def _deepspeed(folder: _Folder) -> _Answer | None:
    inside = any(_ZERO.fullmatch(name) for name in folder.names)
    if not inside and not folder.has("zero_to_fp32.py", "latest"):
        return None
    where, tag = folder.path, []
    if inside:  # DeepSpeed wants the folder above, and the name of this one
        whole = Path(os.path.abspath(folder.path))
        where, tag = whole.parent, ["--tag", whole.name]
    command = shell("python", "-m", "deepspeed.utils.zero_to_fp32", where, "OUT_FOLDER", *tag)
    return _Answer("a DeepSpeed ZeRO checkpoint, each file of it one rank's part", f"let DeepSpeed merge it: {command}")


def _saved_model(folder: _Folder) -> _Answer | None:
    if not folder.names & {"saved_model.pb", "saved_model.pbtxt"}:
        return None
    return _Answer("a TensorFlow SavedModel", "load it with TensorFlow and save its weights with torch")


def _tensorflow(folder: _Folder) -> _Answer | None:
    if not folder.any(r".*\.data-[0-9]{5}-of-[0-9]{5}") or not folder.any(r".*\.index"):
        return None
    return _Answer("a TensorFlow checkpoint", "load it with TensorFlow and save its weights with torch")


def _orbax(folder: _Folder) -> _Answer | None:
    marks = {"_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", "_METADATA"}
    if not folder.names & marks:
        return None
    return _Answer("an Orbax checkpoint (JAX)", "restore it with orbax.checkpoint and save its weights with torch")


def _keras(folder: _Folder) -> _Answer | None:
    if not folder.has("model.weights.h5"):
        return None
    return _Answer("a Keras model", "load it with Keras and save its weights with torch")


def _listed(folder: _Folder) -> _Answer | None:
    """Whatever looks like a checkpoint by its name, here or further down."""
    found = _found(folder)
    if not found:
        return None
    where = f"among {_looked_at()}" if folder.cut else "in it"
    path = shell(folder.path / found[0])
    if len(found) == 1:
        return _Answer(f"the checkpoint {where} is {found[0]}", f"give its path: {path}")
    strange = any(
        row(inner) for name in found if (inner := _folder_at(folder.path / name)) for row in (_torch_records, _orbax)
    )
    return _Answer(
        f"the checkpoints {where} are {some(found, _SHOWN)}",
        f"give one of them: {path}" + ("" if strange else f"; {_or_all(folder)}"),
    )


def _or_all(folder: _Folder) -> str:
    return f"or convert all of them: {shell('ckptconv', 'convert', folder.path, 'OUT_FOLDER')}"


def _found(folder: _Folder) -> list[str]:
    """The checkpoints in FOLDER, by their names, and then those in folders below it: files, or folders that are one
    checkpoint. Links and hidden folders are not entered.
    """
    found = _files(folder)
    waiting, left = deque(_folders(folder)), LIMITS.folder_names
    while waiting and left > 0:
        name = waiting.popleft()
        inner = _folder_at(folder.path / name)
        if inner is None:
            continue
        left -= len(inner.names)
        if any(row(inner) for row in (_torch_records, _distributed, _shards, _orbax, _deepspeed)):
            found.append(name.rstrip("/"))
        else:
            found += (name + file for file in _files(inner))
            waiting += (name + below for below in _folders(inner))
    return found


def _files(folder: _Folder) -> list[str]:
    return sorted(name for name in folder.names if name.lower().endswith(FILE_SUFFIXES))


def _folders(folder: _Folder) -> list[str]:
    inside = sorted(name for name in folder.names if name.endswith("/") and not name.startswith("."))
    return [name for name in inside if not os.path.islink(folder.path / name.rstrip("/"))]


def _folder_at(path: Path) -> _Folder | None:
    try:
        return _list(path)
    except OSError:
        return None


def _nothing(folder: _Folder) -> _Answer:
    found = some(sorted(folder.names | folder.others), _SHOWN)
    what = f"no checkpoint is among {_looked_at()}," if folder.cut else "no checkpoint is in it,"
    return _Answer(f"{what} but {found}", "give the path of the checkpoint itself")


def _looked_at() -> str:
    return f"the first {LIMITS.folder_names:,} names in it"


#: The first that answers is right.
_ROWS: tuple[Callable[[_Folder], _Answer | None], ...] = (
    _empty, _torch_records, _distributed, _pointers, _model, _shards, _deepspeed, _saved_model, _tensorflow, _orbax,
    _keras, _listed, _nothing,
)  # a table  # fmt: skip
