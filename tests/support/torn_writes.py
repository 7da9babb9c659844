"""The states in which a file can be after a loss of power during a function that writes to it.

The calls with which the function writes are recorded. Between two syncs, a disk may write any of their sectors in any
order, or none.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptconv
from ckptconv.byteranges.undo_journal import SECTOR

#: An operation on a file: ("write", offset, bytes), ("size", bytes) or ("sync",).
Operation = tuple[Any, ...]


def operations_of(function: Callable[[int], object], path: Path) -> list[Operation]:
    """Call `function` with a descriptor of the open file at `path`, and return the operations on the file."""
    done: list[Operation] = []
    real = SimpleNamespace(pwrite=os.pwrite, ftruncate=os.ftruncate, fsync=os.fsync)

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        done.append(("write", offset, bytes(data)))
        written: int = real.pwrite(fd, data, offset)
        return written

    def ftruncate(fd: int, size: int) -> None:
        done.append(("size", size))
        real.ftruncate(fd, size)

    def fsync(fd: int) -> None:
        done.append(("sync",))
        real.fsync(fd)

    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for call in (pwrite, ftruncate, fsync):
                patch.setattr(os, call.__name__, call)
            function(fd)
    finally:
        os.close(fd)
    return done


def torn_states(before: bytes, operations: list[Operation], choice: random.Random, tries: int) -> Iterator[bytes]:
    """Yield possible contents of the file for each moment at which power can be lost: `tries` random ones for each."""
    durable = before
    pending: list[Operation] = []
    for operation in [*operations, ("sync",)]:
        if operation[0] == "sync":
            durable = _done(durable, pending)
            pending = []
            yield durable
            continue
        pending.append(operation)
        for _ in range(tries):
            yield _done(durable, [part for each in pending for part in _some_of(each, choice)])


def _some_of(operation: Operation, choice: random.Random) -> list[Operation]:
    """Return random sectors of a write. A change of the size is done completely or not at all."""
    if operation[0] == "size":
        return [operation] if choice.random() < 0.5 else []
    _, offset, data = operation
    parts = []
    at = 0
    while at < len(data):
        stop = min(at + SECTOR - (offset + at) % SECTOR, len(data))
        if choice.random() < 0.5:
            parts.append(("write", offset + at, data[at:stop]))
        at = stop
    return parts


def _done(content: bytes, operations: list[Operation]) -> bytes:
    """Return `content` after `operations`. A hole contains zeros, as in a filesystem."""
    room = bytearray(content)
    for operation in operations:
        if operation[0] == "size":
            size = operation[1]
            room = room[:size] + bytes(max(0, size - len(room)))
        else:
            _, offset, data = operation
            room += bytes(max(0, offset + len(data) - len(room)))
            room[offset : offset + len(data)] = data
    return bytes(room)


#: Functions of other libraries that read a file, by its suffix or name. torch's safe loader reads all other files.
_READERS: dict[str, Callable[[bytes], object]] = {
    ".pkl": pickle.loads,
    ".metadata": pickle.loads,
    ".safetensors": safetensors.torch.load,
    ".json": json.loads,
}


def loads(file: Path) -> bool:
    """Return whether `file` loads with ckptconv, or with the library for its format: torch, safetensors, pickle or
    json.
    """

    def other() -> object:
        read = _READERS.get(file.suffix or file.name)
        return read(file.read_bytes()) if read else torch.load(file, weights_only=True)

    for load in (other, lambda: ckptconv.inspect(file)):
        try:
            load()
        except Exception:
            continue
        return True
    return False
