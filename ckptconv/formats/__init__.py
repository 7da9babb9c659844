"""The containers that a checkpoint can come in: one module each, with ``looks_like``, ``read`` and ``layout``. What a file is, its content says, never its suffix."""

from __future__ import annotations

from typing import Protocol

from ckptconv.errors import UnsupportedError
from ckptconv.formats import safetensors, torch_zip
from ckptconv.model import Checkpoint
from ckptconv.sources import Source

__all__ = ["FORMATS", "read"]


class Format(Protocol):
    """What a format's module offers."""

    NAME: str

    def looks_like(self, head: bytes) -> bool: ...

    def read(self, source: Source) -> Checkpoint: ...


FORMATS: tuple[Format, ...] = (torch_zip, safetensors)

_HEAD = 64
_OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer and not the file itself", "fetch the file: git lfs pull"),
    (b"<!DOCTYPE html", "an HTML page and not a checkpoint", "download the file itself, not the page that offers it"),
    (b"<html", "an HTML page and not a checkpoint", "download the file itself, not the page that offers it"),
    (
        b"GGUF",
        "a GGUF file and not a checkpoint of torch",
        "ask its publisher for the weights it was made from, or read it with the gguf package",
    ),
    (
        b"\x89HDF",
        "an HDF5 file (Keras) and not a checkpoint of torch",
        "load it with Keras or h5py and save its weights with torch",
    ),
    (
        b"\x80\x02\x8a\x0a",
        "a checkpoint in torch's format from before 1.6, which this version does not read",
        "load it with torch and save it again",
    ),
)


def read(source: Source) -> Checkpoint:
    """The checkpoint in SOURCE, in whatever container. Raises UnsupportedError with what it is instead, and what the reader raises."""
    if source.size == 0:
        raise UnsupportedError("the file is empty", where=source.path, hint="download or copy it again")
    head = source.read(0, min(_HEAD, source.size))
    for start, what, hint in _OTHERS:
        if head.lstrip().lower().startswith(start.lower()):
            raise UnsupportedError(what, where=source.path, hint=hint)
    for format_ in FORMATS:
        if format_.looks_like(head):
            return format_.read(source)
    if source.path.suffix == ".safetensors":
        return safetensors.read(source)  # which says what is wrong with it
    raise UnsupportedError(
        "no checkpoint that this version reads", where=source.path, expected="torch's zip format or safetensors"
    )
