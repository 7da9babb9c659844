"""The containers that a checkpoint can come in: one module each, with ``looks_like``, ``read`` and ``layout``. What a file is, its content says, never its suffix;
that it is one part of a distributed checkpoint, what stands beside it."""

from __future__ import annotations

from typing import Protocol

from ckptconv.errors import UnsupportedError
from ckptconv.folders import distributed_part_error
from ckptconv.formats import safetensors, torch_zip
from ckptconv.formats.strangers import stranger_error
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


def read(source: Source) -> Checkpoint:
    """The checkpoint in SOURCE, in whatever container. Raises UnsupportedError with what it is instead, and what the reader raises."""
    part = distributed_part_error(source.path)
    if part:
        raise part
    head = source.read(0, min(_HEAD, source.size))
    for format_ in FORMATS:
        if format_.looks_like(head):
            return format_.read(source)
    error = stranger_error(source)
    if error:
        raise error
    if source.path.suffix == ".safetensors":
        return safetensors.read(source)  # which says what is wrong with it
    raise UnsupportedError(
        "no checkpoint that this version reads", where=source.path, expected="torch's zip format or safetensors",
        got=f"a file that starts with the bytes {head[:8].hex(' ')}",
    )  # fmt: skip
