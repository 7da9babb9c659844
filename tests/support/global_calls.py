"""All ways in which a pickle names and calls a global, and the positions in a checkpoint where a global can hide.

The functions accept any global: a dangerous one, or its harmless twin.
"""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.archives import rezipped
from tests.support.hostile_bytes import dict_of, tensor, text, torch_zip_of, zip_of
from tests.support.legacy_files import MAGIC, SYS_INFO, keys_and_data
from tests.support.writers import distributed, scripted

__all__ = [
    "EXTENSIONS", "NAMINGS", "NESTS", "PLACES", "checkpoint", "dcp_in", "legacy_of", "legacy_with", "plain_of",
    "program_of", "shards_in", "whole",
]  # a table  # fmt: skip


_HEAD = b"".join(pickle.dumps(value, 2) for value in (MAGIC, 1001, SYS_INFO))


def short(value: str) -> bytes:
    """Return the opcode SHORT_BINUNICODE with `value`."""
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def lines(module: str, name: str) -> bytes:
    return f"{module}\n{name}\n".encode()


#: Functions of a module, a name, and opcodes that push a tuple of arguments. They return opcodes that push the global,
#: or the result of its call.
NAMINGS: dict[str, Callable[[str, str, bytes], bytes]] = {
    "GLOBAL": lambda m, n, _: b"c" + lines(m, n),
    "STACK_GLOBAL": lambda m, n, _: short(m) + short(n) + b"\x93",
    "REDUCE": lambda m, n, args: b"c" + lines(m, n) + args + b"R",
    "REDUCE of STACK_GLOBAL": lambda m, n, args: short(m) + short(n) + b"\x93" + args + b"R",
    "REDUCE of STACK_GLOBAL of texts in the memo": lambda m, n, args: (
        short(n)
        + b"r\xf0\x00\x00\x000"
        + short(m)
        + b"r\xf1\x00\x00\x000j\xf1\x00\x00\x00j\xf0\x00\x00\x00\x93"
        + args
        + b"R"
    ),
    "REDUCE of STACK_GLOBAL of UNICODE": lambda m, n, args: f"V{m}\nV{n}\n".encode() + b"\x93" + args + b"R",
    "REDUCE of STACK_GLOBAL of BINUNICODE8": lambda m, n, args: (
        b"".join(b"\x8d" + struct.pack("<Q", len(each)) + each.encode() for each in (m, n)) + b"\x93" + args + b"R"
    ),
    "REDUCE of a DUP": lambda m, n, args: b"(c" + lines(m, n) + b"2" + args + b"Rt",
    "REDUCE out of the memo": lambda m, n, args: (
        b"(c" + lines(m, n) + b"r\xf2\x00\x00\x00j\xf2\x00\x00\x00" + args + b"Rt"
    ),
    "NEWOBJ": lambda m, n, args: b"c" + lines(m, n) + args + b"\x81",
    "NEWOBJ_EX": lambda m, n, args: b"c" + lines(m, n) + args + b"}\x92",
    "INST": lambda m, n, args: b"(" + text("x") + b"i" + lines(m, n),
    "OBJ": lambda m, n, args: b"(c" + lines(m, n) + text("x") + b"o",
    "BUILD": lambda m, n, args: b"c" + lines(m, n) + args + b"R}" + text("state") + text("x") + b"sb",
    "BUILD of a call": lambda m, n, args: (
        b"ccollections\nOrderedDict\n)R}" + text("state") + b"c" + lines(m, n) + args + b"Rsb"
    ),
    "call of a call": lambda m, n, args: b"c" + lines(m, n) + args + b"R)R",
    "APPEND on a call": lambda m, n, args: b"c" + lines(m, n) + args + b"RNa",
    "SETITEM on a call": lambda m, n, args: b"c" + lines(m, n) + args + b"R" + text("k") + b"Ns",
}
EXTENSIONS = {"EXT1": b"\x82\x07", "EXT2": b"\x83\x07\x01", "EXT4": b"\x84\x07\x00\x01\x00"}

#: Functions that return opcodes with the value of `code` at a position in another value.
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "value": lambda code: code,
    "list": lambda code: b"](" + code + b"e",
    "tuple": lambda code: code + b"\x85",
    "set": lambda code: b"\x8f(" + code + b"\x90",
    "frozenset": lambda code: b"(" + code + b"\x91",
    "key": lambda code: b"}" + code + b"Ns",
    "argument": lambda code: b"ccollections\nOrderedDict\n" + code + b"\x85R",
    "attribute": lambda code: b"ccollections\nOrderedDict\n)R}" + text("hidden") + code + b"sb",
    "hooks of a tensor": lambda code: tensor().replace(
        b"ccollections\nOrderedDict\n)R", b"ccollections\nOrderedDict\n)R" + text("hook") + code + b"s"
    ),
    "POP": lambda code: code + b"0N",
    "POP_MARK": lambda code: b"(" + code + b"1N",
    "POP of a MARK": lambda code: b"(" + code + b"00N",
}


def zipped(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    return zip_of({"archive/data.pkl": data, "archive/version": b"3\n"}, method)


def legacy_of(data: bytes) -> bytes:
    """Return a file of torch before 1.6 whose object is the pickle `data`, without storages."""
    return _HEAD + data + keys_and_data({})


def _long(data: bytes) -> bytes:
    """Return `data`, followed by more bytes than the program holds in memory."""
    return data + b"." * 70_000


#: Functions that return opcodes for a byte string with the pickle `data` in it.
NESTS: dict[str, Callable[[bytes], bytes]] = {
    "SHORT_BINBYTES": lambda data: b"C" + bytes([len(data)]) + data,
    "BINBYTES": lambda data: b"B" + struct.pack("<I", len(data)) + data,
    "BINBYTES8": lambda data: b"\x8e" + struct.pack("<Q", len(data)) + data,
    "BYTEARRAY8": lambda data: b"\x96" + struct.pack("<Q", len(data)) + data,
    "SHORT_BINSTRING": lambda data: b"U" + bytes([len(data)]) + data,
    "BINSTRING": lambda data: b"T" + struct.pack("<i", len(data)) + data,
    "STRING": lambda data: b"S" + repr(data)[1:].encode() + b"\n",
    "_codecs.encode": lambda data: b"c_codecs\nencode\n" + text(data.decode("latin-1")) + text("latin1") + b"\x86R",
    "bytearray of a text": lambda data: (
        b"cbuiltins\nbytearray\n" + text(data.decode("latin-1")) + text("latin1") + b"\x86R"
    ),
    "long bytes": lambda data: NESTS["BINBYTES"](_long(data)),
    "long bytearray": lambda data: NESTS["BYTEARRAY8"](_long(data)),
    "long text": lambda data: NESTS["_codecs.encode"](_long(data)),
    "with a tail": lambda data: NESTS["BINBYTES"](data + b"tail"),
    "torch zip": lambda data: NESTS["BINBYTES"](zipped(data)),
    "deflated torch zip": lambda data: NESTS["BINBYTES"](zipped(data, zipfile.ZIP_DEFLATED)),
    "torch legacy": lambda data: NESTS["BINBYTES"](legacy_of(data)),
    "twice": lambda data: NESTS["BINBYTES"](b"\x80\x04" + NESTS["BINBYTES"](data) + b"."),
    "popped": lambda data: NESTS["BINBYTES"](data) + b"0N",
}


def whole(code: bytes, protocol: int = 4) -> bytes:
    """Return a pickle of a dict that contains a tensor, and the value that `code` pushes under the key ``x``."""
    return dict_of(text("w"), tensor(), text("x"), code, protocol=protocol)


def checkpoint(code: bytes, protocol: int = 4) -> bytes:
    """Return a torch zip file that contains the value that `code` pushes under the key ``x``."""
    return torch_zip_of(whole(code, protocol))


def legacy_with(code: bytes) -> bytes:
    """Return a file of torch before 1.6 that contains the value that `code` pushes under the key ``x``."""
    reference = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04NtQ"
    data = dict_of(text("w"), tensor(reference), text("x"), code, protocol=2)
    return _HEAD + data + keys_and_data({"0": (4, bytes(16))})


def plain_of(code: bytes) -> bytes:
    """Return a plain pickle of a tensor, and of the value that `code` pushes."""
    data = pickle.dumps({"w": torch.ones(2)}, 4)[11:]  # without PROTO and FRAME
    return b"\x80\x04" + data[:-1] + text("x") + code + b"s."


def program_of(code: bytes, record: str = "constants.pkl") -> bytes:
    """Return a TorchScript archive whose `record` is a tuple of the value that `code` pushes."""
    return rezipped(scripted(torch.nn.Linear(2, 2)), {record: b"\x80\x02" + code + b"\x85."})


def shards_in(folder: Path, code: bytes) -> Path:
    """Write a sharded set into `folder`, and return `folder`. One shard pushes the value of `code` and discards it."""
    folder.mkdir()
    popped = b"\x80\x02" + code + b"0}(" + text("v") + tensor() + b"u."
    shards = {"w": dict_of(text("w"), tensor()), "v": popped}
    names = {name: f"pytorch_model-0000{i}-of-00002.bin" for i, name in enumerate(shards, 1)}
    for name, data in shards.items():
        (folder / names[name]).write_bytes(torch_zip_of(data))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def dcp_in(folder: Path, item: object) -> Path:
    """Save a tensor and `item` with torch.distributed.checkpoint in `folder`. Return the path of the checkpoint."""
    return distributed({"w": torch.ones(2), "x": item}, folder)
