"""Recognise files of other formats, and return an error that says what the file is and what to do next.

A file is recognised by its content: the first bytes, sometimes a few at the end, and never more than a fixed amount. A
suffix decides only if the content allows two formats. The first test that fits is the right one.

Sources of the signatures: each format's own specification, ``_MsgpackExtType`` in flax's ``serialization.py``,
``ModelProto`` in ``onnx.proto``, TensorFlow's ``table/format.h``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import DOWNLOAD_AGAIN, InputError, MalformedError, UnsupportedError, count
from ckptconv.formats.foreign.paths import CHECKPOINT_SUFFIXES, FETCH_LFS, LFS
from ckptconv.formats.foreign.zips_and_pickles import displaced
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.hints import literal, saved_by_torch, shell
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.system import calls

_HEAD = 4096
_BLOCK = 512  # of a tar archive


#: The start of a map in msgpack whose first key is text: https://github.com/msgpack/msgpack/blob/master/spec.md
_MSGPACK_MAP = regex(rb"(?:[\x81-\x8f]|\xde..|\xdf.{4})[\xa1-\xbf\xd9\xda]", re.DOTALL)
#: An extension of msgpack: its length, flax's type 1 (array), 2 (complex) or 3 (scalar), and the start of its value.
_FLAX_VALUE = regex(rb"(?:[\xd4-\xd8]|\xc7.|\xc8..|\xc9.{4})(?:[\x01\x03]\x93|\x02\x92)", re.DOTALL)


class _File(NamedTuple):
    """A file, its first bytes, and these bytes as text. The text is None if they are not text."""

    source: Readable
    head: bytes
    text: str | None

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.source.path


#: A description of a file, and a hint.
_Answer = tuple[str, str]


def foreign_file_error(source: Readable) -> InputError | None:
    """Return the error that says what the file `source` is and what to do, or None if it is not recognised."""
    head = source.read(0, min(_HEAD, source.size))
    answer = next((answer for answer in _answers(_File(source, head, _text(head))) if answer), None)
    if isinstance(answer, tuple):
        what, hint = answer
        return UnsupportedError(what, where=source.path, hint=hint)
    return answer


def _answers(file: _File) -> Iterator[_Answer | InputError | None]:
    """Yield for each test its answer, or None if the test does not fit. The first answer is the right one."""
    source, head, path = file.source, file.head, file.path
    if not head:
        yield "the file is empty", DOWNLOAD_AGAIN
    if not head.strip(b"\0"):
        yield MalformedError(_zeros(file), where=path, hint=DOWNLOAD_AGAIN)
    if head in (b"PK", b"PK\x03"):
        what = f"a zip archive of which only {count(len(head), 'byte')} can be read"
        yield MalformedError(what, where=path, hint=DOWNLOAD_AGAIN)
    if head.startswith(LFS):
        size = re.search(rb"^size ([0-9]{1,18})\r?$", head, re.MULTILINE)
        yield "a Git LFS pointer, not the file itself" + (f" ({int(size[1]):,} bytes)" if size else ""), FETCH_LFS
    content = _json(file)
    yield _page(file)
    yield _refusal(file, content)
    yield _index(file, content)
    yield _tar(file)
    yield _compressed(file)
    for offset, signature, what, hint in _SIGNATURES:
        if head[offset : offset + len(signature)] == signature:
            yield what, hint.replace("{path}", shell(path))
    if head.startswith(b"\x93NUMPY"):
        yield (
            "a NumPy array (.npy)",
            "save it with torch: " + saved_by_torch(f"torch.from_numpy(numpy.load({literal(path)}))", "numpy"),
        )
    at = int.from_bytes(head[60:64], "little")
    if head.startswith(b"MZ") and head[at : at + 4] == b"PE\0\0":
        yield "a program for Windows, not a checkpoint", _PROGRAM
    if _MSGPACK_MAP.match(head) and _FLAX_VALUE.search(head):
        yield (
            "a Flax checkpoint (msgpack)",
            "load it with flax.serialization.msgpack_restore and save its arrays with torch: torch.from_numpy makes"
            " tensors of them",
        )
    if _is_onnx(file):
        yield (
            "an ONNX model, which is a program, not only weights",
            "read its weights with the onnx package: onnx.numpy_helper.to_array of each initializer",
        )
    if head.startswith(b"\x08\x01\x12") and path.name == "saved_model.pb":
        yield "a TensorFlow SavedModel's program", _TENSORFLOW
    start = repr(_cut(" ".join((file.text or "").split())))
    if isinstance(content, (dict, list)):
        is_model = isinstance(content, dict) and {"architectures", "model_type"} & content.keys()
        kind = "a model's configuration" if is_model else "a JSON file"
        yield f"{kind}, not a checkpoint: {start}", _WEIGHTS
    if file.text and file.text.strip():
        yield f"a text file, which starts with {start}", _WEIGHTS
    yield displaced(source)
    if source.size >= len(_LEVELDB) and source.read(source.size - len(_LEVELDB), len(_LEVELDB)) == _LEVELDB:
        yield "the index of a TensorFlow checkpoint, or another table of LevelDB's kind", _TENSORFLOW
    if re.search(r"\.data-[0-9]{5}-of-[0-9]{5}$", path.name):  # such a file has no mark but its name
        yield "by its name the data of a TensorFlow checkpoint", _TENSORFLOW


def _text(head: bytes) -> str | None:
    """Return `head` as text, or None if it is not UTF-8 or has control characters other than white space.

    The last character may be incomplete.
    """
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(head) < _HEAD or error.start < len(head) - 3:
            return None
        text = head[: error.start].decode("utf-8-sig")
    return None if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]", text) else text


def _zeros(file: _File) -> str:
    """Return a description of a file that starts with zeros: only zeros, or damaged at the start."""
    at, most = len(file.head), min(file.source.size, LIMITS.foreign_zeros)
    while at < most:
        part = file.source.read(at, min(1 << 20, most - at))
        rest = part.lstrip(b"\0")
        at += len(part) - len(rest)
        if rest:
            break
    if at == file.source.size:
        return f"nothing but zeros, {count(at, 'byte')} of them"
    return f"damaged: {'at least ' if at == most else ''}its first {at:,} bytes are zeros"


# Text


def _page(file: _File) -> _Answer | None:
    text = (file.text or "").lstrip()
    if not text.startswith("<") or not re.search(r"<!doctype html|<html|<head|<body", text, re.IGNORECASE):
        return None
    title = re.search(r"<title[^>]*>([^<]*)", text, re.IGNORECASE)
    shown = _cut(" ".join(title[1].split())) if title else ""
    return (
        "an HTML page, not a checkpoint" + (f": {shown!r}" if shown else ""),
        "download the file itself, not its web page; log in if the site requires it",
    )


def _refusal(file: _File, content: Any) -> _Answer | None:
    """Return the answer for a server's message in place of the file, or None.

    It is XML of an object store, JSON of an API (`content`), or a sentence of the Hub.
    """
    text = (file.text or "").lstrip()
    code = re.search(r"<Code>([^<]+)</Code>", text) if text.startswith("<") else None
    answer = code[1] if code else None
    if answer is None and re.match(
        r"Access to (model|dataset) .{1,200} is restricted|Invalid username or password|Entry not found|Repository not"
        r" found",
        text,
    ):
        answer = text.splitlines()[0]
    if answer is None and isinstance(content, dict):
        error = content.get("error")
        answer = error.get("message") if isinstance(error, dict) else error
    if not isinstance(answer, str):
        return None
    return (
        f"a server's answer, not the file: {_cut(answer, 120)!r}",
        "download it again, logged in and from where it is",
    )


def _index(file: _File, content: Any) -> _Answer | None:
    """Return the answer for an index of shards that was given under a wrong name or without its folder, or None.

    `content` is the JSON in the file.
    """
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        return None
    what = f"the index of a checkpoint in {count(len({*shards.values()}), 'shard')}"
    if not file.source.is_stored:
        return f"{what}: the tensors are in files next to it", "give the path of the index"
    rename = shell(calls.RENAME, file.path, file.path.with_name("model.index.json"))
    return f"{what}, but its name does not end in .json", f"rename it: {rename}"


def _json(file: _File) -> Any:
    """Return the JSON value in `file`, or None if it is not JSON or too large."""
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


def _cut(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


# Archives


def _tar(file: _File) -> _Answer | None:
    if file.head[257:262] != b"ustar":
        return None
    names = _tar_names(file.source)
    if {"pickle", "storages", "tensors"} <= set(names):
        return (
            "a checkpoint in torch's format from before 0.1.10, which this version does not read",
            f'if you trust who made it, load it with torch.load({literal(file.path)}, map_location="cpu"), weights_only'
            " switched off, and torch.save it again",
        )
    inner = next((name for name in names if name.endswith(CHECKPOINT_SUFFIXES)), None) or ", ".join(names[:3])
    content = f" of {_cut(inner, 120)}" if inner else ", whose first name cannot be read"
    return f"a tar archive{content}", f"unpack it: {shell('tar', '-xf', file.path)}"


def _tar_names(source: Readable) -> list[str]:
    """Return the names of the first members of the tar archive `source`."""
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


def _compressed(file: _File) -> _Answer | None:
    """Return the answer for a gzip file, or for zlib data as joblib writes it, or None.

    zlib data has only two characteristic bytes, so the file is decompressed to find out.
    """
    head = file.head
    is_gzip = head[:3] == b"\x1f\x8b\x08"
    if not is_gzip and (len(head) < 8 or head[0] != 0x78 or int.from_bytes(head[:2], "big") % 31):
        return None
    try:
        inside = zlib.decompressobj(31 if is_gzip else 15).decompress(head, _BLOCK)
    except zlib.error:
        inside = b""
    if is_gzip and inside[257:262] == b"ustar":
        return "a tar archive, compressed with gzip", f"unpack it: {shell('tar', '-xzf', file.path)}"
    if is_gzip:
        return "compressed with gzip", f"unpack it: {shell('gzip', '-dc', file.path)} > OUT"
    if not inside:
        return None
    kind = "a pickle, " if inside[:1] == b"\x80" else ""
    return (
        f"{kind}compressed with zlib, as joblib does",
        "load it with joblib.load, if you trust who made it, and save its arrays with torch",
    )


# By structure


def _is_onnx(file: _File) -> bool:
    """Return whether `file` starts like an ONNX model: a format version, followed by the name of the producer.

    Without a producer, the suffix must be ``.onnx``. Protocol buffers have no signature.
    """
    head = file.head
    if len(head) < 8 or head[0] != 0x08 or not 1 <= head[1] <= 30:
        return False
    name = head[4 : 4 + head[3]]
    producer = head[2] == 0x12 and 0 < len(name) < 64 and name.isascii() and name.decode("latin-1").isprintable()
    return producer or (head[2] in (0x3A, 0x42) and file.path.suffix == ".onnx")


_TENSORFLOW = "load it with TensorFlow and save its weights with torch"
_WEIGHTS = "use the file with the weights"
_PROGRAM = "do not run it; download the checkpoint itself"
_GGUF = "ask its publisher for the weights it was made from, or read it with the gguf package"
_GGML = "a GGML file (llama.cpp, before GGUF), not a PyTorch checkpoint"
_LEVELDB = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"  # the magic number at the end of its tables

#: Offset, signature, kind of file, and the next step. {path} is replaced by the file's path, quoted for a shell.
_SIGNATURES = (
    (0, b"GGUF", "a GGUF file, not a PyTorch checkpoint", _GGUF),
    (0, b"lmgg", _GGML, _GGUF),
    (0, b"fmgg", _GGML, _GGUF),
    (0, b"tjgg", _GGML, _GGUF),
    (0, b"algg", _GGML, _GGUF),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file (Keras), not a PyTorch checkpoint",
        "load it with Keras or h5py and save its weights with torch",
    ),
    (0, b"BZh", "compressed with bzip2", "unpack it: bzip2 -dc {path} > OUT"),
    (0, b"\xfd7zXZ\0", "compressed with xz", "unpack it: xz -dc {path} > OUT"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstd -dc {path} > OUT"),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4", "unpack it: lz4 -dc {path} > OUT"),
    (0, b"7z\xbc\xaf\x27\x1c", "compressed with 7-Zip", "unpack it: 7z x {path}"),
    (0, b"Rar!\x1a\x07", "compressed with RAR", "unpack it: unrar x {path}"),
    (0, b"\x7fELF", "a program or library for Linux, not a checkpoint", _PROGRAM),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG picture, not a checkpoint", _WEIGHTS),
    (0, b"\xff\xd8\xff", "a JPEG picture, not a checkpoint", _WEIGHTS),
    (0, b"GIF8", "a GIF picture, not a checkpoint", _WEIGHTS),
    (0, b"%PDF-", "a PDF document, not a checkpoint", _WEIGHTS),
    (0, b"PAR1", "a Parquet table, not a checkpoint", _WEIGHTS),
    (0, b"SQLite format 3\0", "an SQLite database, not a checkpoint", _WEIGHTS),
    (4, b"TFL3", "a TensorFlow Lite model, which is a program, not only weights", _TENSORFLOW),
)
