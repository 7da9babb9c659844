"""Recognise folders given in place of a file: what each is, and what to type instead.

Looks at names, a bounded number of them, and into small files that stand where a checkpoint should, for they may be Git
LFS pointers. Sources for the names: ``torch/distributed/checkpoint/filesystem.py`` and ``format_utils.py`` of torch
2.13, ``deepspeed/utils/zero_to_fp32.py``, ``megatron/training/checkpointing.py`` and the README of Megatron-LM,
transformers' ``utils/__init__.py``, Orbax's "Checkpoint Format Guide".
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import InputError, UnsupportedError, UsageError, some
from ckptconv.guesses import close_matches
from ckptconv.hints import TRUSTED, Placeholder, command, joined, option, python_command, shell
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.stores import first_bytes, is_url, list_folder, locate

LFS = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
#: No command: git runs aliases, filters and other programs that the folder's .git/config names, and so does Git LFS.
FETCH_LFS = (
    "download the file itself, or fetch it with Git LFS in your own clone, because git runs programs that .git/config"
    " names"
)
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".th", ".pth.tar")
#: What a folder's files are converted by, in any case of letters.
FILE_SUFFIXES = (*CHECKPOINT_SUFFIXES, ".pkl")
_METADATA, _METADATA_HEAD = b"torch.distributed.checkpoint.metadata", 128  # the first global, and where it stands
_POINTER = 1024  # bytes: Git LFS's own bound on a pointer
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
_SHARD = r".+-[0-9]{5}-of-(?!00000)[0-9]{5}(\.safetensors|\.bin)"  # whose folder is read as one checkpoint
_DEEPSPEED, _MEGATRON = "a DeepSpeed ZeRO checkpoint", "a checkpoint of Megatron-LM"
_ZERO = regex(r"(bf16_|fp16_)?zero_pp_rank_[0-9]+_.*\.pt")
_RANK = regex(r"mp_rank_[0-9]{2,}(_[0-9]{3,})*/")  # of Megatron-LM: tensor, pipeline and expert parallel ranks
_STEP = regex(r"(iter_[0-9]+|release)/")
_LATEST = "latest_checkpointed_iteration.txt"


class _Folder(NamedTuple):
    """A folder, and the names in it; those of folders end in a slash.

    `others` are no files: FIFOs, links to nowhere. `cut`: it has more names than were looked at.
    """

    path: Path
    names: frozenset[str]
    others: frozenset[str]
    cut: bool

    def has(self, *names: str) -> bool:
        """Whether all of `names` are there."""
        return self.names.issuperset(names)

    def any(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in self.names)


class _Answer(NamedTuple):
    """What a folder is, and the next step."""

    what: str
    hint: str


_Row = Callable[[_Folder], "_Answer | None"]


def folder_error(path: Path) -> InputError:
    """The error that says what the folder `path` is, and what to type instead."""
    try:
        folder = _list(path)
        answer = next(answer for row in _ROWS if (answer := row(folder)))
    except OSError as error:
        return InputError(f"a folder and not a file, which cannot be listed: {error.strerror}", where=path)
    return UnsupportedError("a folder and not a file: " + answer.what, where=path, hint=answer.hint)


def name_like(path: Path) -> Path | None:
    """A path beside `path`, which is missing, with nearly its name, if there is one."""
    folder = _folder_at(path.parent)
    if folder is None:
        return None
    names = {name.rstrip("/") for name in folder.names}
    if folder.cut:
        others = (path.stem + suffix for suffix in CHECKPOINT_SUFFIXES)
        names.update(name for name in others if os.path.isfile(path.with_name(name)))
    near = close_matches(path.name, sorted(names), n=1, cutoff=0.75)
    return path.with_name(near[0]) if near else None


def distributed_part_error(source: Readable) -> InputError | None:
    """What is to be said of the file `source` if it is a part of a checkpoint of torch.distributed.checkpoint, by what
    stands beside it; of one beside which nothing is known to stand, by its first bytes.
    """
    path = source.path
    if not source.is_stored:
        if _METADATA not in source.read(0, min(_METADATA_HEAD, source.size)):
            return None
        what = "the metadata of torch.distributed.checkpoint alone: its parts are files beside it"
        return UnsupportedError(what, where=path, hint="give the path of their folder")
    if path.suffix != ".distcp" and path.name != ".metadata":
        return None
    folder = _folder_at(path.parent)
    answer = folder and _distributed(folder)
    return UnsupportedError(f"a part of {answer.what}", where=path, hint=answer.hint) if answer else None


def _list(path: Path) -> _Folder:
    """The folder `path` with the first names in it, and with those that everybody knows."""
    names: set[str] = set()
    others: set[str] = set()
    if is_url(path):
        folders, files = list_folder(path)
        return _Folder(path, frozenset([*files, *(f"{name}/" for name in folders)]), frozenset(), cut=False)
    with os.scandir(path) as entries:
        for entry in islice(entries, LIMITS.folder_names):
            kind = _kind(entry)
            (others if kind is None else names).add(entry.name + (kind or ""))
        cut = next(entries, None) is not None
    if cut:
        names.update(name for name in _KNOWN if (os.path.isdir if name.endswith("/") else os.path.isfile)(path / name))
    return _Folder(path, frozenset(names), frozenset(others), cut)


def _kind(entry: os.DirEntry[str]) -> str | None:
    """What is put behind the name of `entry`; None where it is neither a folder nor a file."""
    try:
        return "/" if entry.is_dir() else "" if entry.is_file() else None
    except OSError:  # a link to itself
        return None


# Whose it is


def _when(fits: Callable[[_Folder], object], what: str, hint: str) -> _Row:
    """The row for folders of which `fits` is true."""
    return lambda folder: _Answer(what, hint) if fits(folder) else None


def _torch_records(folder: _Folder) -> _Answer | None:
    if not folder.has("data.pkl") or not (folder.names & {"data/", "version", "byteorder"}):
        return None
    whole = _absolute(folder.path)
    return _Answer(
        "the records of a torch checkpoint that was unpacked",
        f"make it a zip again: {python_command('-m', 'zipfile', '-c', 'out.pt', whole)}",
    )


def _distributed(folder: _Folder) -> _Answer | None:
    if not folder.has(".metadata") or not folder.any(r".*\.distcp"):
        return None
    out, whole = Path("out.pt"), _absolute(folder.path)
    if Path(os.path.realpath(whole)) in Path(os.path.realpath(out)).parents:  # among the parts nothing is written
        out = whole.with_name(f"{whole.name}.pt")
    whole_file = "make it one file: " + command("convert", folder.path, out)
    return _Answer("a checkpoint of torch.distributed.checkpoint (DCP)", whole_file)


def _pointers(folder: _Folder) -> _Answer | None:
    small = [name for name in sorted(folder.names) if name.endswith(CHECKPOINT_SUFFIXES)][:50]
    if not small or not all(_is_pointer(folder.path / name) for name in small):
        return None
    return _Answer(
        "a git clone in which the checkpoints are Git LFS pointers",
        FETCH_LFS,
    )


def _is_pointer(path: Path) -> bool:
    head = first_bytes(path, _POINTER + 1)
    return len(head) <= _POINTER and head.startswith(LFS)


def _model(folder: _Folder) -> _Answer | None:
    name = next((name for name in _MODELS if folder.has(name) and not _is_pointer(folder.path / name)), None)
    if name is None:
        return None
    path, beside = shell(folder.path / name), [each for each in _found(folder) if each not in _MODELS]
    if not beside:
        return _Answer(f"the checkpoint in it is {name}", f"give that file: {path}")
    return _Answer(f"the model in it is {name}, beside {some(beside)}", f"give that file: {path}; " + _or_all(folder))


def _deepspeed(folder: _Folder) -> _Answer | None:
    inside = any(_ZERO.fullmatch(name) for name in folder.names)
    if not inside and not folder.has("zero_to_fp32.py", "latest"):
        return None
    where, tag = folder.path, []
    if inside:  # DeepSpeed wants the folder above, and the name of this one
        whole = _absolute(folder.path)
        where, tag = whole.parent, ["--tag", whole.name]
    merge = python_command("-m", "deepspeed.utils.zero_to_fp32", where, "OUT_FOLDER", *tag)
    return _Answer(f"{_DEEPSPEED}, each file of it one rank's part", f"{TRUSTED}, let DeepSpeed merge it: {merge}")


def _megatron(folder: _Folder) -> _Answer | None:
    """A step's folder, with one for each rank, or the one above it."""
    inside = _has_ranks(folder)
    steps = [] if inside or not folder.has(_LATEST) else [name for name in _folders(folder) if _STEP.fullmatch(name)]
    if not inside and not any((step := _folder_at(folder.path / name)) and _has_ranks(step) for name in steps):
        return None
    where = _absolute(folder.path).parent if inside else folder.path  # Megatron wants that one
    whole = ("--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1")
    merge = shell(
        "python", "/PATH/TO/Megatron-LM/tools/checkpoint/convert.py", "--model-type", "GPT", "--load-dir", where,
        "--save-dir", "OUT_FOLDER", *whole,
    )  # fmt: skip
    return _Answer(
        f"{_MEGATRON}, each folder of it one rank's part",
        f"{TRUSTED}, let Megatron-LM merge it: {merge}",
    )


def about_part(path: Path) -> str | None:
    """What the file at `path` is one rank's part of, and what merges all of them, where DeepSpeed or Megatron-LM saved
    it.
    """
    here = Path(os.path.dirname(os.path.abspath(path)))
    if _ZERO.fullmatch(path.name):
        folder, run, row = _folder_at(here), _DEEPSPEED, _deepspeed
    elif _RANK.fullmatch(f"{here.name}/"):
        folder, run, row = _folder_at(here.parent), _MEGATRON, _megatron
    else:
        return None
    found = row(folder) if folder else None
    return f"one rank's part of {run}; {found.hint}" if found else None


def _absolute(path: Path) -> Path:
    """`path` from the root on, if it is one here."""
    return path if is_url(path) else Path(os.path.abspath(path))


def _has_ranks(folder: _Folder) -> bool:
    return sum(_RANK.fullmatch(name) is not None for name in folder.names) > 1


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
        f"the checkpoints {where} are {some(found)}",
        joined(f"give one of them: {path}", None if strange else _or_all(folder)),
    )


def _or_all(folder: _Folder) -> str:
    return "or convert all of them: " + command("convert_many", folder.path, Placeholder("OUT_FOLDER"))


def _found(folder: _Folder) -> list[str]:
    """The checkpoints in `folder`, by their names, and then those in folders below it: files, or folders that are one
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
        if inner.any(_SHARD) or any(row(inner) for row in (_torch_records, _distributed, _orbax, _deepspeed)):
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
    except (OSError, ValueError, InputError):  # a NUL in the path
        return None


def _nothing(folder: _Folder) -> _Answer:
    found = some(sorted(folder.names | folder.others))
    what = f"no checkpoint is among {_looked_at()}," if folder.cut else "no checkpoint is in it,"
    return _Answer(f"{what} but {found}", "give the path of the checkpoint itself")


def _looked_at() -> str:
    return f"the first {LIMITS.folder_names:,} names in it"


_orbax = _when(
    lambda folder: folder.names & {"_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", "_METADATA"},
    "an Orbax checkpoint (JAX)",
    "restore it with orbax.checkpoint and save its weights with torch",
)
_TENSORFLOW = "load it with TensorFlow and save its weights with torch"

#: The first that answers is right.
_ROWS: tuple[_Row, ...] = (
    _when(lambda folder: not (folder.names or folder.others), "it is empty", "give the path of the checkpoint itself"),
    _torch_records,
    _distributed,
    _pointers,
    _model,
    _deepspeed,
    _megatron,
    _when(
        lambda folder: folder.names & {"saved_model.pb", "saved_model.pbtxt"}, "a TensorFlow SavedModel", _TENSORFLOW
    ),
    _when(
        lambda folder: folder.any(r".*\.data-[0-9]{5}-of-[0-9]{5}") and folder.any(r".*\.index"),
        "a TensorFlow checkpoint",
        _TENSORFLOW,
    ),
    _orbax,
    _when(
        lambda folder: folder.has("model.weights.h5"),
        "a Keras model",
        "load it with Keras and save its weights with torch",
    ),
    _listed,
    _nothing,
)


_DRIVE = regex(r"([A-Za-z]):[\\/]")
_DOWNLOADS = {
    "http": ("curl", "-LO"),
    "https": ("curl", "-LO"),
    "s3": ("aws", "s3", "cp"),
    "gs": ("gcloud", "storage", "cp"),
}
#: Who writes files with a suffix that none of ours has.
_OTHERS = {
    suffix: program
    for program, suffixes in {
        "llama.cpp": ".gguf .ggml",
        "Keras": ".h5 .hdf5 .keras",
        "ONNX": ".onnx",
        "NumPy": ".npy .npz",
        "Flax": ".msgpack",
        "TensorFlow": ".pb .tflite",
        "Core ML": ".mlmodel .mlpackage",
        "TensorRT": ".engine .plan",
        "PaddlePaddle": ".pdparams",
        "NeMo": ".nemo",
        "torch.export": ".pt2",
        "torch.distributed.checkpoint": ".distcp",
        "a compressor": ".gz .bz2 .xz .zst .7z",
        "an index or a configuration": ".json .yaml",
    }.items()
    for suffix in suffixes.split()
}


def no_path_error(path: str | os.PathLike[str], *, is_output: bool) -> UsageError | None:
    """Return the error for a `path` that is a dash, a path of Windows or a URL, or None."""
    text = os.fsdecode(path)
    if text == "-":
        what = (
            "no checkpoint is written to standard output" if is_output else "no checkpoint is read from standard input"
        )
        instead = "write to a file, then pass it on with cat" if is_output else "save it to a file first"
        return UsageError(what, where=text, expected="a path; ./- is a file called -", hint=instead)
    if drive := _DRIVE.match(text):
        here = f"/mnt/{drive[1].lower()}/" + text[drive.end() :].replace("\\", "/").lstrip("/")
        what = "a Windows path, which this system does not understand"
        return UsageError(what, where=text, hint="under WSL, use " + shell(Path(here)))
    if not is_url(path):
        return None
    try:
        shown = str(locate(path))
    except UsageError as error:
        return error
    if is_output:
        return UsageError("a URL and not a path", where=shown, hint="write a file here, and copy it there")
    download = _DOWNLOADS.get(shown.partition(":")[0])
    behind = ["."] if download and download[0] != "curl" else []
    # without a name, a password or a query, which nobody prints; pathlib may have made one slash of two
    is_known = shown in (text, text.replace(":/", "://", 1))
    command = f": {shell(*download, shown, *behind)}" if download and is_known else ""
    return UsageError("a URL and not a path", where=shown, hint=f"download it first{command}")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise UsageError where `path` is a URL, for what is done to files here alone."""
    if is_url(path) and (error := no_path_error(path, is_output=False)):
        raise error


def odd_suffix_error(path: Path, known: Iterable[str], sources: Iterable[Path]) -> UsageError | None:
    """The error for an output `path` whose name promises what it would not be: another program's file, or one with
    nearly a suffix of ours.

    Args:
        path: Of a file. Numbers (``model.v2``) and suffixes that nobody knows promise nothing.
        known: Our suffixes, by the last of which in a name its format is told.
        sources: What is converted; a suffix that one of them has may stay.
    """
    known = set(known)
    own = {suffix for source in sources for suffix in source.suffixes}
    for suffix in reversed(path.suffixes):
        if suffix.lower() in known:
            return None
        near = next((each for each in sorted(known) if _is_near(suffix.lower(), each)), None)
        program = _OTHERS.get(suffix.lower())
        if suffix not in own and (near or program):
            hint = option("format", "pt") + " writes torch's format under this name"
            instead = str(path).replace(suffix, near) if near and not program else ""
            return UsageError(
                f"{suffix} is the format of {program}, which ckptconv does not write"
                if program
                else f"{suffix} is no suffix of a checkpoint",
                where=path,
                hint=f"is {instead} meant? (" + hint + ")" if instead else hint,
            )
    return None


def _is_near(suffix: str, known: str) -> bool:
    """Whether `suffix` is `known` but for one letter, or two that are swapped, or for little in a long one."""
    if len(known) < len(".pt"):  # every letter is near to one
        return False
    if close_matches(suffix, [known], cutoff=0.85):
        return True
    halves = [(known[:n], known[n:]) for n in range(1, len(known) + 1)]
    near = {a + b[1::-1] + b[2:] for a, b in halves} | {a + b[1:] for a, b in halves}  # swapped, or missing
    return suffix in near or any(
        suffix.startswith(a) and suffix[len(a) + 1 :] in (b, b[1:]) for a, b in halves
    )  # one more, or another
