"""Which file a conversion writes, and in which format: what the user's words for the target mean."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ckptconv.errors import UsageError

__all__ = ["TARGET_FORMATS", "find_target", "suffix_of", "usual_format"]

TARGET_FORMATS = ("pt", "legacy", "pickle", "safetensors")
#: The formats that each suffix admits. What they name first is meant where nobody says anything else.
_SUFFIXES = {
    **dict.fromkeys((".pth.tar", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar"), ("pt", "legacy")),
    **dict.fromkeys((".pkl", ".pickle", ".p"), ("pt", "legacy", "pickle")),
    ".safetensors": ("safetensors",),
}

#: transformers' two names for one thing, the number of a shard behind it.
_HUB_MODEL = re.compile(r"(model|pytorch_model)(-[0-9]{5}-of-[0-9]{5})?")
#: The stems that diffusers and peft use in both formats.
_HUB_BIN = ("diffusion_pytorch_model", "adapter_model")


def find_target(src: Path, dst: str | os.PathLike[str], format: str | None) -> tuple[Path, str | None]:
    """The file that is meant by DST, and its format: FORMAT, else what its suffix says; None where it leaves that open.

    To a folder it keeps the name of SRC, or gets a suffix for FORMAT where its own does not admit that; the Hub's names for one thing
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
    admitted = _admitted(path.name)
    if format and format not in admitted:
        raise UsageError(
            f"the suffix says {' or '.join(admitted)} and --format {format}", where=path, hint="change one of them"
        )
    return path, format or (admitted[0] if len(admitted) == 1 else None)


def usual_format(name: str, source: str) -> str:
    """The format of a file called NAME where nobody says which, made of a SOURCE of that format: a plain pickle stays one where its suffix says so, else ``pt``."""
    admitted = _admitted(name)
    return "pickle" if source == "pickle" and suffix_of(name) and "pickle" in admitted else admitted[0]


def _admitted(name: str) -> tuple[str, ...]:
    """The formats that the suffix of NAME admits; all where it has none that is known."""
    return _SUFFIXES.get(suffix_of(name).lower(), TARGET_FORMATS)


def suffix_of(name: str) -> str:
    """The suffix of NAME that stands for a format, as it is spelled there; empty if there is none."""
    known = next((suffix for suffix in _SUFFIXES if name.lower().endswith(suffix)), "")
    return name[len(name) - len(known) :]


def _name_in_folder(name: str, format: str | None) -> str:
    suffix = suffix_of(name)
    if format is None or (suffix and format in _admitted(name)):
        return name
    stem = name[: len(name) - len(suffix)]
    model, number = _HUB_MODEL.fullmatch(stem), ""
    if model:
        stem, number = model[1], model[2] or ""
    if format == "safetensors":
        return f"{'model' if model else stem}{number}.safetensors"
    if format == "pickle":
        return f"{stem}{number}.pkl"
    if model:
        return f"pytorch_model{number}.bin"
    return f"{stem}.bin" if stem.endswith(_HUB_BIN) else f"{stem}.pt"
