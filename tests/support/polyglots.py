"""Files with two readings, and ordinary safetensors files with only one.

A file with two readings is a valid checkpoint in one format, and in another format it runs code. The code only creates
a marker.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from ckptconv.formats.torch_files import MAGIC_BYTES

__all__ = [
    "checksummed",
    "gzip_in_safetensors",
    "ordinary_safetensors",
    "pickle_in_safetensors",
    "runs",
    "tar_in_legacy",
    "tar_in_pickle",
    "tar_in_safetensors",
    "tar_of",
    "zip_in_safetensors",
    "zip_of_pickle",
]

_BLOCK = 512
_CHECKSUM = slice(148, 156)
_OBJECT = {"w": torch.arange(4.0)}


def runs(marker: Path) -> bytes:
    """Return a pickle that creates the file `marker`."""
    return b"cbuiltins\nopen\n(V%b\nVw\ntR." % str(marker).encode()


# tar


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    """Return a tar archive of `members`, compressed if `mode` requests it, as in the tarfile module."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def checksummed(block: bytes, spelled: bytes = b"%06o\0 ", *, signed: bool = False) -> bytes:
    """Return the tar header `block` with its checksum, written in the format `spelled`."""
    blank = block[:148] + b" " * 8 + block[156:_BLOCK]
    total: int = sum(struct.unpack("512b" if signed else "512B", blank))
    return block[:148] + (spelled % total).ljust(8, b"\0")[:8] + block[156:]


def _tar_behind(start: bytes, payload: bytes) -> bytes:
    """Return a tar archive that begins with `start`, in which torch finds `payload` as the storages."""
    tar = tar_of({"x": b"", "storages": payload})
    return checksummed(start.ljust(100, b"\0") + tar[100:])


def tar_in_pickle(payload: bytes) -> bytes:
    """Return a plain pickle of a tensor that begins with a tar archive, as bytes that the pickle discards."""
    length = len(_tar_behind(b"", payload))
    start = b"\x80\x02B"
    start += struct.pack("<I", length - len(start) - 4)
    return _tar_behind(start, payload) + b"0" + pickle.dumps(_OBJECT, 2)[2:]


def tar_in_legacy(payload: bytes) -> bytes:
    """Return a file of torch before 1.6 with a tar archive in its first pickle."""
    stream = io.BytesIO()
    torch.save(_OBJECT, stream, _use_new_zipfile_serialization=False)
    usual = b"\x80\x02" + MAGIC_BYTES
    rest = stream.getvalue().removeprefix(usual)
    length = len(_tar_behind(b"", payload))
    start = usual + b"B" + struct.pack("<I", length - len(usual) - 5)
    return _tar_behind(start, payload) + b"0" + rest


def tar_in_safetensors(payload: bytes) -> bytes:
    """Return a safetensors file whose first 512 bytes are a tar header, and whose only tensor is the rest of the
    archive.

    The numbers of the tar header are spaces, which mean 0. Only the checksum is a number, which is also the tensor's
    shape.
    """
    data = tar_of({"storages": payload})
    for filling in range(4000):
        size = 20000
        for _ in range(20):
            block = _header_like_tar(size, filling)
            total = int(f"{sum(block[:148]) + sum(block[156:]) + 8 * 32:o}")
            if total == size:
                return block + data.ljust(size, b"\0")
            size = total
    raise AssertionError("no checksum fits")


def _header_like_tar(size: int, filling: int) -> bytes:
    """Return the length and the header of a tensor of `size` bytes. Each `filling` leads to another checksum."""
    start = b'{"w":{"dtype":"U8","data_offsets":[0,%d],"shape":[' % size
    start = (_BLOCK - 8).to_bytes(8, "little") + start.ljust(140) + b"%-8d" % size + b"]}"
    text = ("~" * (filling // 90) + chr(33 + filling % 90)).replace('"', "#").replace("\\", "#")
    start += b',"__metadata__":{"x":"%b"}' % text.encode()
    return start.ljust(_BLOCK - 1) + b"}"


# gzip

_STORED_IN = b"p\x3c\x50\xc3\xaf"  # the start of an uncompressed block of deflate, which is also valid UTF-8


def gzip_in_safetensors(payload: bytes) -> bytes:
    """Return a safetensors file that gzip decompresses to a pickle that ends in `payload`.

    The length of the header is gzip's signature. The name of the only tensor is a series of uncompressed blocks, which
    contain a pickled text. The text ends in the tensor's bytes, and `payload` follows.
    """
    length, step = 0x088B1F, len(_STORED_IN) + int.from_bytes(_STORED_IN[1:3], "little")
    last = b"\n0" + payload
    size = 0
    while True:
        rest = b'":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
        text = bytearray(b"x" * (length - 2 - len(rest)) + rest)
        for at in range(0, len(text), step):
            text[at : at + len(_STORED_IN)] = _STORED_IN
        text[len(_STORED_IN)] = ord("V")
        data = bytes(-len(text) % step) + struct.pack("<BHH", 1, len(last), 0xFFFF - len(last)) + last
        unpacked = zlib.decompress(text + data, -zlib.MAX_WBITS)
        data += struct.pack("<II", zlib.crc32(unpacked), len(unpacked))
        if len(data) == size:
            return length.to_bytes(8, "little") + b'{"' + bytes(text) + data
        size = len(data)


# Pickle and zip


def pickle_in_safetensors(opcodes: bytes) -> bytes:
    """Return a safetensors file that is also a pickle with `opcodes`.

    The length of the header is the opcode of a text of five bytes. The tensor's name discards that text and begins
    another one, which ends in the tensor's bytes, followed by `opcodes`.
    """
    length = 0x558  # BINUNICODE, 5, 0, 0, 0
    data = b"\n0" + opcodes
    header = json.dumps({"0V": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}})
    return length.to_bytes(8, "little") + header.encode().ljust(length) + data


def zip_of_pickle(payload: bytes) -> bytes:
    """Return a file that torch recognizes as a checkpoint, with `payload` as its pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/data.pkl", payload)
        archive.writestr("a/version", "3\n")
    return stream.getvalue()


def zip_in_safetensors(payload: bytes, *, absolute: bool = False) -> bytes:
    """Return a safetensors file whose last bytes are an archive. If `absolute` is true, its offsets count from the
    start of the file.
    """
    archive = zip_of_pickle(payload)
    file = save({"w": torch.frombuffer(bytearray(archive), dtype=torch.uint8)})
    if not absolute:
        return file
    stream = io.BytesIO(file[: -len(archive)])
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "a") as other:
        other.writestr("a/data.pkl", payload)
        other.writestr("a/version", "3\n")
    assert len(stream.getvalue()) == len(file)
    return stream.getvalue()


# Ordinary files

_WORDS = (
    "model layers transformer h encoder decoder self_attn q_proj k_proj o_proj Q K V weight bias running_mean c_attn"
    " num_batches_tracked embeddings position_ids LayerNorm conv1 bn1 downsample query key value w1 mlp Norm Quant"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/ :"
_OTHERS = "模型层权重偏置注意力编码器解码器éüñÀçßжлдяфЖщ日本語ت"
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "BOOL": 1}


def ordinary_safetensors(random: Random) -> bytes:
    """Return a safetensors file like those of many programs, with random names and weights. The header is minified or
    indented, and aligned or not.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if random.random() < 0.6 else {}
    at, parts = 0, []
    for _ in range(random.choice((1, 1, 2, 3, 5, 8, 13, 40, 120))):
        word = random.choice([*_SIZES])
        nbytes = random.randint(0, 12) * _SIZES[word]
        shape = [nbytes // _SIZES[word]]
        name = _name(random)
        if name not in header:
            header[name] = {"dtype": word, "shape": shape, "data_offsets": [at, at + nbytes]}
            parts.append(_numbers(random, nbytes, _SIZES[word]))
            at += nbytes
    text = json.dumps(header, ensure_ascii=random.random() < 0.3, **_style(random)).encode()
    if random.random() < 0.6:
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _style(random: Random) -> dict[str, Any]:
    way = random.random()
    return {"separators": (",", ":")} if way < 0.7 else {} if way < 0.85 else {"indent": random.choice((0, 1, 2, 4))}


def _name(random: Random) -> str:
    way = random.random()
    if way < 0.5:
        words = _WORDS.split()
        parts = (random.choice(words) if random.random() < 0.8 else str(random.randrange(40)) for _ in range(6))
        return ".".join([*parts][: random.randint(1, 6)])
    letters = _LETTERS if way < 0.8 else _OTHERS + _LETTERS
    return "".join(random.choices(letters, k=random.randint(1, 30)))


def _numbers(random: Random, nbytes: int, size: int) -> bytes:
    way = random.random()
    if way < 0.5:
        return random.randbytes(nbytes)
    if way < 0.6:
        return bytes(nbytes)
    if way < 0.7:
        return bytes([random.randrange(256)]) * nbytes
    if way < 0.85:
        return b"".join(i.to_bytes(size, "little") for i in range(nbytes // size))
    if way < 0.9:
        return bytes(random.choices(range(32, 127), k=nbytes))
    stray = b"".join(random.choices((b"PK\x05\x06", b"PK\x01\x02", b"PK\x06\x07", b"PK\x03\x04", bytes(4)), k=nbytes))
    return stray[:nbytes]
