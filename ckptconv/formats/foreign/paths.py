"""Recognise a path that is not the path of a checkpoint: a folder, a URL, a dash, the name of another format.

Of a folder, a limited number of names is read, and the first bytes of small files with a checkpoint's name, because
they may be Git LFS pointers.

Sources of the names: ``torch/distributed/checkpoint/filesystem.py`` and ``format_utils.py`` of torch 2.13,
``deepspeed/utils/zero_to_fp32.py``, ``megatron/training/checkpointing.py`` and the README of Megatron-LM, transformers'
``utils/__init__.py``, Orbax's "Checkpoint Format Guide".
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import InputError, UnsupportedError, UsageError, some
from ckptconv.guesses import close_matches
from ckptconv.hints import TRUSTED, Message, Placeholder, command, joined, option, python_command, shell
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.stores import first_bytes, is_url, list_folder, locate

LFS = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
#: Not a command, because git and Git LFS run aliases, filters and other programs that .git/config of the folder names.
FETCH_LFS = (
    "download the file itself, or fetch it with Git LFS in your own clone, because git runs programs that .git/config"
    " names"
)
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".th", ".pth.tar")
#: The suffixes of the files that are converted in a folder, in any case of letters.
FILE_SUFFIXES = (*CHECKPOINT_SUFFIXES, ".pkl")
_METADATA, _METADATA_HEAD = (
    b"torch.distributed.checkpoint.metadata",
    128,
)  # the first global, and the length of the start that contains it
_POINTER = 1024  # bytes: Git LFS's own bound on a pointer
#: The names that transformers, peft and diffusers give to a complete model, the better format first.
_MODELS = (
    "model.safetensors",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
#: Names that tests ask for. They are looked for if a listing was cut. Names of folders end in a slash.
_KNOWN = (
    *_MODELS, "data.pkl", "data/", "version", "byteorder", ".metadata", "__0_0.distcp", "zero_to_fp32.py", "latest",
    "saved_model.pb", "saved_model.pbtxt", "_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", "_METADATA",
    "model.weights.h5",
)  # a table  # fmt: skip
_SHARD = r".+-[0-9]{5}-of-(?!00000)[0-9]{5}(\.safetensors|\.bin)"  # a folder with such files is read as one checkpoint
_DEEPSPEED, _MEGATRON = "a DeepSpeed ZeRO checkpoint", "a checkpoint of Megatron-LM"
_ZERO = regex(r"(bf16_|fp16_)?zero_pp_rank_[0-9]+_.*\.pt")
_RANK = regex(r"mp_rank_[0-9]{2,}(_[0-9]{3,})*/")  # of Megatron-LM: tensor, pipeline and expert parallel ranks
_STEP = regex(r"(iter_[0-9]+|release)/")
_LATEST = "latest_checkpointed_iteration.txt"


class _Folder(NamedTuple):
    """A folder and the names in it. Names of subfolders end in a slash.

    `others` are the names of everything else, such as FIFOs and broken links. `cut` is whether the folder has more
    names than were read.
    """

    path: Path
    names: frozenset[str]
    others: frozenset[str]
    cut: bool

    def has(self, *names: str) -> bool:
        """Return whether the folder contains all of `names`."""
        return self.names.issuperset(names)

    def any(self, pattern: str) -> bool:
        """Return whether a name matches the regular expression `pattern`."""
        return any(re.fullmatch(pattern, name) for name in self.names)


#: A description of a folder, and a hint.
_Answer = tuple[str, str]


def folder_error(path: Path) -> InputError:
    """Return the error for a folder `path` that is not a checkpoint. It says what the folder is and what to do."""
    try:
        what, hint = next(answer for answer in _answers(_list(path)) if answer)
    except OSError as error:
        return InputError(f"a folder, not a file, which cannot be listed: {error.strerror}", where=path)
    return UnsupportedError("a folder, not a file: " + what, where=path, hint=hint)


def _answers(folder: _Folder) -> Iterator[_Answer | None]:
    """Yield for each test its answer, or None if the test does not fit. The first answer is the right one."""
    give = "use the path of the checkpoint itself"
    if not (folder.names or folder.others):
        yield "it is empty", give
    yield _torch_records(folder)
    yield _distributed(folder)
    checkpoints = [name for name in sorted(folder.names) if name.endswith(CHECKPOINT_SUFFIXES)][:50]
    if checkpoints and all(_is_pointer(folder.path / name) for name in checkpoints):
        yield "a git clone in which the checkpoints are Git LFS pointers", FETCH_LFS
    yield _model(folder)
    yield _deepspeed(folder)
    yield _megatron(folder)
    tensorflow = "load it with TensorFlow and save its weights with torch"
    if folder.names & {"saved_model.pb", "saved_model.pbtxt"}:
        yield "a TensorFlow SavedModel", tensorflow
    if folder.any(r".*\.data-[0-9]{5}-of-[0-9]{5}") and folder.any(r".*\.index"):
        yield "a TensorFlow checkpoint", tensorflow
    if _is_orbax(folder):
        yield "an Orbax checkpoint (JAX)", "restore it with orbax.checkpoint and save its weights with torch"
    if folder.has("model.weights.h5"):
        yield "a Keras model", "load it with Keras and save its weights with torch"
    looked_at = f"the first {LIMITS.folder_names:,} names in it"
    yield _listed(folder, f"among {looked_at}" if folder.cut else "in it")
    what = f"there is no checkpoint among {looked_at}," if folder.cut else "it contains no checkpoint,"
    yield f"{what} only {some(sorted(folder.names | folder.others))}", give


def name_like(path: Path) -> Path | None:
    """Return a path next to the missing `path` with a similar name, or None if there is none."""
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
    """Return the error for `source` if it is one file of a torch.distributed.checkpoint folder. Otherwise return None.

    The file is recognised by its name and the files next to it. If it has no folder, its first bytes decide.
    """
    path = source.path
    if not source.is_stored:
        if _METADATA not in source.read(0, min(_METADATA_HEAD, source.size)):
            return None
        what = "only the metadata of torch.distributed.checkpoint: the tensors are in other files of its folder"
        return UnsupportedError(what, where=path, hint="use the path of the folder")
    if path.suffix != ".distcp" and path.name != ".metadata":
        return None
    folder = _folder_at(path.parent)
    answer = folder and _distributed(folder)
    return UnsupportedError(f"a part of {answer[0]}", where=path, hint=answer[1]) if answer else None


def _list(path: Path) -> _Folder:
    """Return the folder `path` with a limited number of its names, and with all its :data:`_KNOWN` names.

    Raises OSError, or InputError for a URL.
    """
    names: set[str] = set()
    others: set[str] = set()
    if is_url(path):
        folders, files = list_folder(path)
        return _Folder(path, frozenset([*files, *(f"{name}/" for name in folders)]), frozenset(), cut=False)
    with os.scandir(path) as entries:
        for entry in islice(entries, LIMITS.folder_names):
            try:
                is_folder = entry.is_dir()
                (names if is_folder or entry.is_file() else others).add(entry.name + ("/" if is_folder else ""))
            except OSError:  # a link to itself
                others.add(entry.name)
        cut = next(entries, None) is not None
    if cut:
        names.update(name for name in _KNOWN if (os.path.isdir if name.endswith("/") else os.path.isfile)(path / name))
    return _Folder(path, frozenset(names), frozenset(others), cut)


# Kinds of folders


def _torch_records(folder: _Folder) -> _Answer | None:
    if not folder.has("data.pkl") or not (folder.names & {"data/", "version", "byteorder"}):
        return None
    return (
        "the records of a torch checkpoint that was unpacked",
        f"make it a zip again: {python_command('-m', 'zipfile', '-c', 'out.pt', _absolute(folder.path))}",
    )


def _distributed(folder: _Folder) -> _Answer | None:
    if not folder.has(".metadata") or not folder.any(r".*\.distcp"):
        return None
    return "a checkpoint of torch.distributed.checkpoint (DCP)", "make it one file: " + _to_one(folder)


def _to_one(folder: _Folder) -> Message:
    """Return the command that converts `folder` to one file."""
    out, source = Path("out.pt"), _absolute(folder.path)
    if Path(os.path.realpath(source)) in Path(os.path.realpath(out)).parents:  # never write into the folder itself
        out = source.with_name(f"{source.name}.pt")
    return command("convert", folder.path, out)


def _is_orbax(folder: _Folder) -> bool:
    return bool(folder.names & {"_CHECKPOINT_METADATA", "orbax.checkpoint", "manifest.ocdbt", "_METADATA"})


def _is_pointer(path: Path) -> bool:
    """Return whether the file `path` is a Git LFS pointer."""
    head = first_bytes(path, _POINTER + 1)
    return len(head) <= _POINTER and head.startswith(LFS)


def _model(folder: _Folder) -> _Answer | None:
    """Return the answer for a folder that contains a complete model with one of the usual names, or None."""
    name = next((name for name in _MODELS if folder.has(name) and not _is_pointer(folder.path / name)), None)
    if name is None:
        return None
    give = f"give that file: {shell(folder.path / name)}"
    others = [other for other in _checkpoints_in(folder) if other not in _MODELS]
    if not others:
        return f"the checkpoint in it is {name}", give
    return f"the model in it is {name}, next to {some(others)}", f"{give}; " + _or_all(folder)


def _deepspeed(folder: _Folder) -> _Answer | None:
    inside = any(_ZERO.fullmatch(name) for name in folder.names)
    if not inside and not folder.has("zero_to_fp32.py", "latest"):
        return None
    if not inside:
        return f"{_DEEPSPEED} without the files of its ranks", "copy the folder that the file latest names"
    return f"{_DEEPSPEED}, with one file for each rank", "make it one file: " + _to_one(folder)


def _megatron(folder: _Folder) -> _Answer | None:
    """Return the answer for a Megatron-LM folder, or None. It is the folder of a step, or the folder with all steps."""
    inside = _has_ranks(folder)
    steps = [] if inside or not folder.has(_LATEST) else [name for name in _folders(folder) if _STEP.fullmatch(name)]
    if not inside and not any((step := _folder_at(folder.path / name)) and _has_ranks(step) for name in steps):
        return None
    where = _absolute(folder.path).parent if inside else folder.path  # Megatron wants the folder above
    one_rank = ("--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "1")
    merge = shell(
        "python", "/PATH/TO/Megatron-LM/tools/checkpoint/convert.py", "--model-type", "GPT", "--load-dir", where,
        "--save-dir", "OUT_FOLDER", *one_rank,
    )  # fmt: skip
    return f"{_MEGATRON}, with one folder for each rank", f"{TRUSTED}, let Megatron-LM merge it: {merge}"


def _has_ranks(folder: _Folder) -> bool:
    return sum(_RANK.fullmatch(name) is not None for name in folder.names) > 1


def about_part(path: Path) -> str | None:
    """Return a note on the file `path` if it is one rank's file of DeepSpeed or Megatron-LM. Otherwise return None.

    The note says how to merge the files of all ranks.
    """
    here = Path(os.path.dirname(os.path.abspath(path)))
    if _ZERO.fullmatch(path.name):
        folder, run, recognise = _folder_at(here), _DEEPSPEED, _deepspeed
    elif _RANK.fullmatch(f"{here.name}/"):
        folder, run, recognise = _folder_at(here.parent), _MEGATRON, _megatron
    else:
        return None
    answer = recognise(folder) if folder else None
    return f"one rank's part of {run}; " + answer[1] if answer else None


def _absolute(path: Path) -> Path:
    """Return the absolute path of `path`. A URL is returned unchanged."""
    return path if is_url(path) else Path(os.path.abspath(path))


def _listed(folder: _Folder, where: str) -> _Answer | None:
    """Return an answer that lists the checkpoints in the folder and its subfolders, or None if there are none.

    `where` says in messages where they are.
    """
    names = _checkpoints_in(folder)
    if not names:
        return None
    path = shell(folder.path / names[0])
    if len(names) == 1:
        return f"the checkpoint {where} is {names[0]}", f"use its path: {path}"
    inner = filter(None, (_folder_at(folder.path / name) for name in names))
    is_foreign = any(_torch_records(subfolder) or _is_orbax(subfolder) for subfolder in inner)
    return (
        f"the checkpoints {where} are {some(names)}",
        joined(f"give one of them: {path}", None if is_foreign else _or_all(folder)),
    )


def _or_all(folder: _Folder) -> str:
    return "or convert all of them: " + command("convert_many", folder.path, Placeholder("OUT_FOLDER"))


def _checkpoints_in(folder: _Folder) -> list[str]:
    """Return the names of the checkpoints in `folder`, then those in its subfolders.

    A checkpoint is a file with such a suffix, or a folder that is one checkpoint. Links and hidden folders are not
    entered.
    """
    names = _files(folder)
    waiting, left = deque(_folders(folder)), LIMITS.folder_names
    while waiting and left > 0:
        name = waiting.popleft()
        inner = _folder_at(folder.path / name)
        if inner is None:
            continue
        left -= len(inner.names)
        is_one = inner.any(_SHARD) or _torch_records(inner) or _distributed(inner)
        if is_one or _is_orbax(inner) or _deepspeed(inner):
            names.append(name.rstrip("/"))
        else:
            names += (name + file for file in _files(inner))
            waiting += (name + below for below in _folders(inner))
    return names


def _files(folder: _Folder) -> list[str]:
    return sorted(name for name in folder.names if name.lower().endswith(FILE_SUFFIXES))


def _folders(folder: _Folder) -> list[str]:
    inside = sorted(name for name in folder.names if name.endswith("/") and not name.startswith("."))
    return [name for name in inside if not os.path.islink(folder.path / name.rstrip("/"))]


def _folder_at(path: Path) -> _Folder | None:
    """Return the folder `path` with its names, or None if it cannot be listed."""
    try:
        return _list(path)
    except (OSError, ValueError, InputError):  # ValueError: a NUL in the path
        return None


# Other paths


_DRIVE = regex(r"([A-Za-z]):[\\/]")
_DOWNLOADS = {
    "http": ("curl", "-LO"),
    "https": ("curl", "-LO"),
    "s3": ("aws", "s3", "cp"),
    "gs": ("gcloud", "storage", "cp"),
}
#: The programs that write files with suffixes of other formats.
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
    """Return the error for a `path` that is a dash, a Windows path or a URL. Return None for other paths.

    `is_output` is whether the path is that of an output.
    """
    text = os.fsdecode(path)
    if text == "-":
        what = (
            "no checkpoint is written to standard output" if is_output else "no checkpoint is read from standard input"
        )
        instead = "write to a file, then send it with cat" if is_output else "save it to a file first"
        return UsageError(what, where=text, expected="a path; ./- is a file called -", hint=instead)
    if (drive := _DRIVE.match(text)) and not Path(text).drive:
        here = f"/mnt/{drive[1].lower()}/" + text[drive.end() :].replace("\\", "/").lstrip("/")
        what = "a Windows path, which this system does not understand"
        return UsageError(what, where=text, hint="under WSL, use " + shell(Path(here)))
    return _url_error(path, is_output=is_output)


def _url_error(path: str | os.PathLike[str], *, is_output: bool = False) -> UsageError | None:
    """Return the error for a `path` that is a URL. Return None for other paths."""
    if not is_url(path):
        return None
    text = os.fsdecode(path)
    try:
        shown = str(locate(path))
    except UsageError as error:
        return error
    if is_output:
        return UsageError("a URL, not a path", where=shown, hint="write a local file, and copy it there")
    download = _DOWNLOADS.get(shown.partition(":")[0])
    target = ["."] if download and download[0] != "curl" else []
    # A URL with a name, a password or a query is not printed. pathlib may have made one slash of two.
    is_known = shown in (text, text.replace(":/", "://", 1))
    typed = f": {shell(*download, shown, *target)}" if download and is_known else ""
    return UsageError("a URL, not a path", where=shown, hint=f"download it first{typed}")


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise UsageError if `path` is a URL. For operations that only work on local files."""
    if error := _url_error(path):
        raise error


def odd_suffix_error(path: Path, known: Iterable[str], sources: Iterable[Path]) -> UsageError | None:
    """Return the error for an output `path` with a misspelled suffix or a suffix of another program.

    Otherwise return None.

    Args:
        path: The path of a file. Numbers (``model.v2``) and unknown suffixes are accepted.
        known: The suffixes of formats that can be written. The last of them in a name decides the format.
        sources: The paths of the inputs. A suffix that one of them has is accepted.
    """
    known = set(known)
    own = {suffix for source in sources for suffix in source.suffixes}
    for suffix in reversed(path.suffixes):
        if suffix.lower() in known:
            return None
        near = next((other for other in sorted(known) if _is_near(suffix.lower(), other)), None)
        program = _OTHERS.get(suffix.lower())
        if suffix not in own and (near or program):
            hint = option("format", "pt") + " writes torch's format under this name"
            instead = str(path).replace(suffix, near) if near and not program else ""
            return UsageError(
                f"{suffix} is the format of {program}, which ckptconv does not write"
                if program
                else f"{suffix} is not the suffix of a checkpoint",
                where=path,
                hint=f"did you mean {instead}? (" + hint + ")" if instead else hint,
            )
    return None


def _is_near(suffix: str, known: str) -> bool:
    """Return whether `suffix` looks like a misspelling of the suffix `known`.

    True if one letter is changed, added or missing, two letters are swapped, or a long suffix differs little.
    """
    if len(known) < len(".pt"):  # every letter is near to one
        return False
    if close_matches(suffix, [known], cutoff=0.85):
        return True
    halves = [(known[:n], known[n:]) for n in range(1, len(known) + 1)]
    near = {a + b[1::-1] + b[2:] for a, b in halves} | {a + b[1:] for a, b in halves}  # swapped, or missing
    return suffix in near or any(
        suffix.startswith(a) and suffix[len(a) + 1 :] in (b, b[1:]) for a, b in halves
    )  # one more, or another
