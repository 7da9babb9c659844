"""Which file a conversion writes, and in which format: what the user's words for the target mean."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptconv.errors import UsageError

__all__ = ["TARGET_FORMATS", "find_target", "format_of", "suffix_of"]

TARGET_FORMATS = ("pt", "safetensors")
_SUFFIXES = {
    "pt": (".pth.tar", ".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl", ".tar"),
    "safetensors": (".safetensors",),
}


#: transformers' two names for one thing, the number of a shard behind it.
_HUB_MODEL = re.compile(r"(model|pytorch_model)(-[0-9]{5}-of-[0-9]{5})?")
#: The stems that diffusers and peft use in both formats.
_HUB_BIN = ("diffusion_pytorch_model", "adapter_model")


def find_target(src: Path, dst: str | os.PathLike[str], format: str | None) -> tuple[Path, str]:
    """The file that is meant by DST, and its format: FORMAT, else what its suffix says, else ``pt``.

    To a folder it keeps the name of SRC, or gets the suffix of FORMAT where that is another one; the Hub's names for one thing
    (``pytorch_model.bin``, ``model.safetensors``) follow. Raises UsageError where format and suffix contradict each other.
    """
    path = Path(dst)
    if not os.fspath(dst):
        raise UsageError("no output given: its path is empty")
    if "\0" in os.fspath(path):
        raise UsageError("no such path can exist", where=path)
    if format is not None and format not in TARGET_FORMATS:
        raise UsageError(f"no format is called {format!r}", expected=" or ".join(TARGET_FORMATS))
    if path.is_dir() or os.fspath(dst).endswith(os.sep):
        path = path / _name_in_folder(src.name, format)
    by_suffix = format_of(path.name)
    if format and by_suffix and format != by_suffix:
        raise UsageError(f"the suffix says {by_suffix} and --format {format}", where=path, hint="change one of them")
    return path, format or by_suffix or "pt"


def format_of(name: str) -> str | None:
    """The format that the suffix of NAME stands for, if any."""
    return next((format for format, suffixes in _SUFFIXES.items() if name.lower().endswith(suffixes)), None)


def suffix_of(name: str) -> str:
    """The suffix of NAME that stands for a format, as it is spelled there; empty if there is none."""
    every = [suffix for suffixes in _SUFFIXES.values() for suffix in suffixes]
    known = next((suffix for suffix in every if name.lower().endswith(suffix)), "")
    return name[len(name) - len(known) :]


def _name_in_folder(name: str, format: str | None) -> str:
    old = format_of(name)
    if format is None or format == old:
        return name
    stem = name[: len(name) - len(suffix_of(name))]
    model, number = _HUB_MODEL.fullmatch(stem), ""
    if model:
        stem, number = model[1], model[2] or ""
    if format == "safetensors":
        return f"{'model' if model else stem}{number}.safetensors"
    if model:
        return f"pytorch_model{number}.bin"
    return f"{stem}.bin" if stem.endswith(_HUB_BIN) else f"{stem}.pt"
