"""Recognise what is typed in place of a path of a file: a dash, a URL, a path of Windows, a name that promises another
format.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckptconv.byteranges.given_paths import path_at
from ckptconv.byteranges.sources import is_url
from ckptconv.errors import UsageError
from ckptconv.guesses import close_matches
from ckptconv.hints import option, shell
from ckptconv.lazy_regex import regex

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
        shown = str(path_at(path))
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
