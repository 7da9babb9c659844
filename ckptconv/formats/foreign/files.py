"""Recognise files of other formats: one table of signatures, with what each is and what to do next.

The first row that answers is right.

By content: the first bytes, a few at the end, never more than a bounded part. A suffix decides only where content
leaves two possibilities. Signatures: each format's own specification, ``_MsgpackExtType`` in flax's
``serialization.py``, ``ModelProto`` in ``onnx.proto``, TensorFlow's ``table/format.h``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import DOWNLOAD_AGAIN, InputError, MalformedError, UnsupportedError, count
from ckptconv.formats.foreign.paths import CHECKPOINT_SUFFIXES, FETCH_LFS, LFS
from ckptconv.formats.foreign.zips_and_pickles import displaced
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.hints import literal, saved_by_torch, shell
from ckptconv.limits import LIMITS

_HEAD = 4096
_SHOWN = 40  # characters of a text
_BLOCK = 512  # of a tar archive


class _File(NamedTuple):
    """A file, its first bytes, and those as text where they are."""

    source: Readable
    head: bytes
    text: str | None

    @property
    def path(self) -> Path:
        return self.source.path


class _Answer(NamedTuple):
    """What a file is, and the next step. `damaged`: it should be something else."""

    what: str
    hint: str | None
    damaged: bool = False


_Row = Callable[[_File], "_Answer | InputError | None"]


def foreign_file_error(source: Readable) -> InputError | None:
    """The error that says what `source` is, and the next step; None where nobody knows."""
    head = source.read(0, min(_HEAD, source.size))
    file = _File(source, head, _text(head))
    answer = next((answer for row in _ROWS if (answer := row(file))), None)
    if isinstance(answer, _Answer):
        kind = MalformedError if answer.damaged else UnsupportedError
        return kind(answer.what, where=source.path, hint=answer.hint)
    return answer


def _text(head: bytes) -> str | None:
    """`head` as text, if it is: UTF-8, cut anywhere, without control characters but white space."""
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(head) < _HEAD or error.start < len(head) - 3:
            return None
        text = head[: error.start].decode("utf-8-sig")
    return None if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]", text) else text


_Text = str | Callable[[_File], str]


def _when(fits: Callable[[_File], object], what: _Text, hint: _Text, *, damaged: bool = False) -> _Row:
    """The row for files of which `fits` is true; {path} in a text is the file's, quoted for a shell."""

    def row(file: _File) -> _Answer | None:
        if not fits(file):
            return None
        said, then = (
            text.replace("{path}", shell(file.path)) if isinstance(text, str) else text(file) for text in (what, hint)
        )
        return _Answer(said, then, damaged)

    return row


def _starts(signature: bytes, what: str, hint: _Text, at: int = 0) -> _Row:
    """The row for files with `signature` at the offset `at`."""
    return _when(lambda file: file.head[at : at + len(signature)] == signature, what, hint)


def _compressed(signature: bytes, name: str, command: str) -> _Row:
    return _starts(signature, f"compressed with {name}", f"unpack it: {command}")


# Next to nothing


def _zeros(file: _File) -> _Answer | None:
    """Of a download that was prepared and never came, or of a disk that failed."""
    if file.head.strip(b"\0"):
        return None
    at, most = len(file.head), min(file.source.size, LIMITS.foreign_zeros)
    while at < most:
        part = file.source.read(at, min(1 << 20, most - at))
        rest = part.lstrip(b"\0")
        at += len(part) - len(rest)
        if rest:
            break
    if at == file.source.size:
        return _Answer(f"nothing but zeros, {count(at, 'byte')} of them", DOWNLOAD_AGAIN, damaged=True)
    least = "at least " if at == most else ""
    return _Answer(f"damaged: {least}its first {at:,} bytes are zeros", DOWNLOAD_AGAIN, damaged=True)


# Text


def _pointer(file: _File) -> _Answer | None:
    if not file.head.startswith(LFS):
        return None
    size = re.search(rb"^size ([0-9]{1,18})\r?$", file.head, re.MULTILINE)
    of = f" of {int(size[1]):,} bytes" if size else ""
    return _Answer(f"a Git LFS pointer and not the file itself{of}", FETCH_LFS)


def _page(file: _File) -> _Answer | None:
    text = (file.text or "").lstrip()
    if not text.startswith("<") or not re.search(r"<!doctype html|<html|<head|<body", text, re.IGNORECASE):
        return None
    title = re.search(r"<title[^>]*>([^<]*)", text, re.IGNORECASE)
    shown = _cut(" ".join(title[1].split())) if title else ""
    return _Answer(
        "an HTML page and not a checkpoint" + (f": {shown!r}" if shown else ""),
        "download the file itself, not the page that offers it, logged in if it asks for that",
    )


def _refusal(file: _File) -> _Answer | None:
    """What a server answered in place of the file: XML of an object store, JSON of an interface, a
    sentence of the Hub.
    """
    text = (file.text or "").lstrip()
    code = re.search(r"<Code>([^<]+)</Code>", text) if text.startswith("<") else None
    said = code[1] if code else None
    if said is None and re.match(
        r"Access to (model|dataset) .{1,200} is restricted|Invalid username or password|Entry not found|Repository not"
        r" found",
        text,
    ):
        said = text.splitlines()[0]
    found = _json(file) if said is None else None
    if isinstance(found, dict) and isinstance(found.get("error"), (str, dict)):
        error = found["error"]
        said = error if isinstance(error, str) else error.get("message")
    if not isinstance(said, str):
        return None
    return _Answer(
        f"a server's answer and not the file: {_cut(said, 120)!r}", "download it again, logged in and from where it is"
    )


def _index(file: _File) -> _Answer | None:
    """The index of a checkpoint in shards."""
    found = _json(file)
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        return None
    what = f"the index of a checkpoint in {count(len({*shards.values()}), 'shard')}"
    if not file.source.is_stored:
        return _Answer(f"{what}: the tensors are in files beside it", "give the path of the index")
    return _Answer(
        f"{what}, but its name does not end in .json",
        f"rename it: {shell('mv', file.path, file.path.with_name('model.index.json'))}",
    )


def _configuration(file: _File) -> _Answer | None:
    found = _json(file)
    if not isinstance(found, (dict, list)):
        return None
    kind = (
        "a model's configuration"
        if isinstance(found, dict) and {"architectures", "model_type"} & found.keys()
        else "a JSON file"
    )
    return _Answer(f"{kind}, and not a checkpoint: {_start(file)}", "give the file with the weights")


def _json(file: _File) -> Any:
    """The JSON in a file of bounded size; None where there is none."""
    if file.text is None or not file.text.lstrip().startswith(("{", "[")):
        return None
    if file.source.size > (LIMITS.foreign_index if '"weight_map"' in file.text else LIMITS.foreign_json):
        return None
    try:
        data = file.source.read(0, file.source.size)
        check_nesting(data)
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _start(file: _File) -> str:
    return repr(_cut(" ".join((file.text or "").split())))


def _cut(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


# Archives


def _tar(file: _File) -> _Answer | None:
    if file.head[257:262] != b"ustar":
        return None
    names = _tar_names(file.source)
    if {"pickle", "storages", "tensors"} <= set(names):
        return _Answer(
            "a checkpoint in torch's format from before 0.1.10, which this version does not read",
            f'if you trust who made it, load it with torch.load({literal(file.path)}, map_location="cpu"), weights_only'
            " switched off, and torch.save it again",
        )
    inner = next((name for name in names if name.endswith(CHECKPOINT_SUFFIXES)), None)
    shown = inner or ", ".join(names[:3])
    of = f" of {_cut(shown, 120)}" if shown else ", whose first name cannot be read"
    return _Answer(f"a tar archive{of}", f"unpack it: {shell('tar', '-xf', file.path)}")


def _tar_names(source: Readable) -> list[str]:
    """The names at the start of a tar archive."""
    names: list[str] = []
    at = 0
    while at + _BLOCK <= source.size and len(names) < LIMITS.foreign_members:
        block = source.read(at, _BLOCK)
        size = block[124:136].strip(b" \0")
        if block[257:262] != b"ustar" or not re.fullmatch(rb"[0-7]{1,11}", size):
            break
        if block[156:157] not in (b"x", b"g", b"L", b"K"):  # these say something about the next member
            names.append(block[:100].rstrip(b"\0").decode("utf-8", "replace").removeprefix("./"))
        at += _BLOCK + -(-int(size, 8) // _BLOCK) * _BLOCK
    return [name for name in names if name]


def _gzip(file: _File) -> _Answer | None:
    if file.head[:3] != b"\x1f\x8b\x08":
        return None
    try:
        inside = zlib.decompressobj(31).decompress(file.head, _BLOCK)
    except zlib.error:
        inside = b""
    if inside[257:262] == b"ustar":
        return _Answer("a tar archive, compressed with gzip", f"unpack it: {shell('tar', '-xzf', file.path)}")
    return _Answer("compressed with gzip", f"unpack it: {shell('gzip', '-dc', file.path)} > OUT")


def _zlib(file: _File) -> _Answer | None:
    """Joblib's compression, which has no signature but two bytes; what they promise is tried."""
    if len(file.head) < 8 or file.head[0] != 0x78 or int.from_bytes(file.head[:2], "big") % 31:
        return None
    try:
        inside = zlib.decompressobj().decompress(file.head, _BLOCK)
    except zlib.error:
        return None
    if not inside:
        return None
    kind = "a pickle, " if inside[:1] == b"\x80" else ""
    return _Answer(
        f"{kind}compressed with zlib, as joblib does",
        "load it with joblib.load, if you trust who made it, and save its arrays with torch",
    )


# By structure


def _is_flax(head: bytes) -> bool:
    """Whether it starts a msgpack map whose keys are text, with one of flax's own types of value in it."""
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    key = 1 + {0xDE: 2, 0xDF: 4}.get(head[0], 0)
    if not 0xA1 <= head[key : key + 1].ljust(1, b"\0")[0] <= 0xBF and head[key : key + 1] not in (b"\xd9", b"\xda"):
        return False
    at = 0
    while at < len(head):
        code = head[at]
        if 0xC7 <= code <= 0xC9 or 0xD4 <= code <= 0xD8:
            return _is_flax_value(head, at, code)
        step = _msgpack_step(head, at, code)
        if step is None:
            return False
        at += step
    return False


def _is_flax_value(head: bytes, at: int, code: int) -> bool:
    """Ndarray (1) and numpy scalar (3) are [shape, dtype, bytes] in msgpack, a complex number (2) is two floats."""
    at += 1 + {0xC7: 1, 0xC8: 2, 0xC9: 4}.get(code, 0)
    return head[at : at + 2] in (b"\x01\x93", b"\x02\x92", b"\x03\x93")


#: msgpack's codes (https://github.com/msgpack/msgpack/blob/master/spec.md): of numbers and heads of arrays and maps,
#: bytes that they take.
_MSGPACK_FIXED = {
    0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5,
    0xD3: 9, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5,
}  # a table  # fmt: skip
#: Of texts and bytes, the width of their length.
_MSGPACK_LONG = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}


def _msgpack_step(head: bytes, at: int, code: int) -> int | None:
    """The bytes that the value with `code` at `at` takes, without what an array or map holds.

    None where there is no such code.
    """
    if code <= 0x9F or code >= 0xE0:  # small numbers, heads of small maps and arrays
        return 1
    if code <= 0xBF:
        return 1 + code - 0xA0
    width = _MSGPACK_LONG.get(code)
    if width is None:
        return _MSGPACK_FIXED.get(code)
    return 1 + width + int.from_bytes(head[at + 1 : at + 1 + width], "big")


def _is_onnx(file: _File) -> bool:
    """Protocol buffers have no signature: the version of the format, then the producer's name, or the suffix."""
    head = file.head
    if len(head) < 8 or head[0] != 0x08 or not 1 <= head[1] <= 30:
        return False
    name = head[4 : 4 + head[3]]
    producer = head[2] == 0x12 and 0 < len(name) < 64 and name.isascii() and name.decode("latin-1").isprintable()
    return producer or (head[2] in (0x3A, 0x42) and file.path.suffix == ".onnx")


def _ends(file: _File, magic: bytes) -> bool:
    size = file.source.size
    return size >= len(magic) and file.source.read(size - len(magic), len(magic)) == magic


def _is_for_windows(head: bytes) -> bool:
    at = int.from_bytes(head[60:64], "little")
    return head[:2] == b"MZ" and head[at : at + 4] == b"PE\0\0"


_TENSORFLOW = "load it with TensorFlow and save its weights with torch"
_PICTURE = "give the file with the weights"
_GGUF = "ask its publisher for the weights it was made from, or read it with the gguf package"

_ROWS: tuple[_Row, ...] = (
    _when(lambda file: not file.head, "the file is empty", DOWNLOAD_AGAIN),
    _zeros,
    _when(
        lambda file: file.head in (b"PK", b"PK\x03"),
        lambda file: f"a zip archive of which only {count(len(file.head), 'byte')} can be read",
        DOWNLOAD_AGAIN,
        damaged=True,
    ),
    _pointer,
    _page,
    _refusal,
    _index,
    _starts(b"GGUF", "a GGUF file and not a checkpoint of torch", _GGUF),
    *(
        _starts(magic, "a GGML file (llama.cpp, before GGUF) and not a checkpoint of torch", _GGUF)
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
    _starts(
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file (Keras) and not a checkpoint of torch",
        "load it with Keras or h5py and save its weights with torch",
    ),
    _tar,
    _starts(
        b"\x93NUMPY",
        "a NumPy array (.npy)",
        lambda file: (
            "save it with torch: " + saved_by_torch(f"torch.from_numpy(numpy.load({literal(file.path)}))", "numpy")
        ),
    ),
    _gzip,
    _compressed(b"BZh", "bzip2", "bzip2 -dc {path} > OUT"),
    _compressed(b"\xfd7zXZ\0", "xz", "xz -dc {path} > OUT"),
    _compressed(b"\x28\xb5\x2f\xfd", "zstd", "zstd -dc {path} > OUT"),
    _compressed(b"\x04\x22\x4d\x18", "lz4", "lz4 -dc {path} > OUT"),
    _compressed(b"7z\xbc\xaf\x27\x1c", "7-Zip", "7z x {path}"),
    _compressed(b"Rar!\x1a\x07", "RAR", "unrar x {path}"),
    _zlib,
    _starts(
        b"\x7fELF",
        "a program or library for Linux and not a checkpoint",
        "do not run it; download the checkpoint itself",
    ),
    _when(
        lambda file: _is_for_windows(file.head),
        "a program for Windows and not a checkpoint",
        "do not run it; download the checkpoint itself",
    ),
    _starts(b"\x89PNG\r\n\x1a\n", "a PNG picture and not a checkpoint", _PICTURE),
    _starts(b"\xff\xd8\xff", "a JPEG picture and not a checkpoint", _PICTURE),
    _starts(b"GIF8", "a GIF picture and not a checkpoint", _PICTURE),
    _starts(b"%PDF-", "a PDF document and not a checkpoint", _PICTURE),
    _starts(b"PAR1", "a Parquet table and not a checkpoint", _PICTURE),
    _starts(b"SQLite format 3\0", "an SQLite database and not a checkpoint", _PICTURE),
    _starts(b"TFL3", "a TensorFlow Lite model, which is a program and not only weights", _TENSORFLOW, at=4),
    _when(
        lambda file: _is_flax(file.head),
        "a Flax checkpoint (msgpack)",
        "load it with flax.serialization.msgpack_restore and save its arrays with torch: torch.from_numpy makes tensors"
        " of them",
    ),
    _when(
        _is_onnx,
        "an ONNX model, which is a program and not only weights",
        "read its weights with the onnx package: onnx.numpy_helper.to_array of each initializer",
    ),
    _when(
        lambda file: file.head[:3] == b"\x08\x01\x12" and file.path.name == "saved_model.pb",
        "a TensorFlow SavedModel's program",
        _TENSORFLOW,
    ),
    _configuration,
    _when(
        lambda file: file.text and file.text.strip(),
        lambda file: f"a text file, which starts with {_start(file)}",
        "give the file with the weights",
    ),
    lambda file: displaced(file.source),
    _when(
        lambda file: _ends(file, b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"),  # the magic number of its tables
        "the index of a TensorFlow checkpoint, or another table of LevelDB's kind",
        _TENSORFLOW,
    ),
    _when(  # which has no mark but its name
        lambda file: re.search(r"\.data-[0-9]{5}-of-[0-9]{5}$", file.path.name),
        "by its name the data of a TensorFlow checkpoint",
        _TENSORFLOW,
    ),
)
