"""The header of a safetensors file: invalid headers, valid headers, and written headers.

The results are compared with those of the safetensors library.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.sources import Source
from ckptconv.dtypes import BY_NAME, BY_WORD
from ckptconv.errors import InputError, LimitError, MalformedError, UnsupportedError
from ckptconv.formats import safetensors_header
from ckptconv.formats.safetensors_header import METADATA, Entry, Header, header_bytes, read_header
from ckptconv.limits import LIMITS
from tests.support.conversions import read as read_checkpoint
from tests.support.conversions import unreadable

DATA = bytes(range(1, 252))  # all bytes differ, so a wrong range gives different bytes
ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'  # a valid header for four bytes of data


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a file to which the examples are written one after the other."""
    return tmp_path_factory.mktemp("headers") / "m.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet."""
    return tmp_path / "m.safetensors"


def file_of(header: bytes, data: bytes = DATA[:4], length: int | None = None) -> bytes:
    """Return a file with `header` and `data`. Its first 8 bytes contain `length`, by default the length of the
    header.
    """
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def tensor(**fields: object) -> bytes:
    """Return the header of one tensor, ``a``, with four bytes of F32. The `fields` replace or extend its
    description.
    """
    sound = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return json.dumps({"a": {**sound, **fields}}).encode()


def put(path: Path, blob: bytes) -> None:
    """Write `blob` to a new file at `path`. If an existing file were truncated, ext4 would flush it to the disk at
    once.
    """
    path.unlink(missing_ok=True)
    path.write_bytes(blob)


def read(path: Path, blob: bytes) -> Header:
    """Write `blob` to `path`, and return the header that ckptconv reads from it."""
    put(path, blob)
    with Source(path) as source:
        return read_header(source)


def seen_by_us(path: Path, blob: bytes) -> tuple[object, object] | InputError:
    """Return the metadata, and the dtype, shape and bytes of each tensor by name. Return the error if ckptconv refuses
    `blob`.
    """
    try:
        header = read(path, blob)
    except InputError as error:
        return error
    data = blob[header.data_offset :]
    return header.metadata, {e.name: (e.word, [*e.shape], data[e.start : e.end]) for e in header.entries}


def seen_by_library(path: Path, blob: bytes) -> tuple[object, object] | str:
    """Return the same as ``seen_by_us``, as the library reads `blob`."""
    put(path, blob)
    try:
        tensors = safetensors.deserialize(blob)
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata()
    except safetensors.SafetensorError as error:
        return str(error)
    return metadata, {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in tensors}


# Invalid headers

BROKEN = {
    "nothing": (b"", "too short"),
    "ends in the length": (file_of(ONE)[:7], "too short"),
    "ends in the header": (file_of(ONE)[:30], "the file ends inside it"),
    "ends in the data": (file_of(ONE)[:-1], "1 byte of 66 missing"),
    "no data": (file_of(ONE, b""), "4 bytes of"),
    "over 100 MB": (file_of(ONE, length=100_000_001), "too long .*100,000,000 bytes, got 100000001"),
    "length of 2^64 - 1": (file_of(ONE, length=2**64 - 1), "too long"),
    "no header": (file_of(b"", b""), "not a JSON object .*nothing"),
    "spaces alone": (file_of(b"   ", b""), "not a JSON object .*nothing"),
    "zeros before the brace": (file_of(b"\0" + ONE), "not a JSON object"),
    "a vertical tab before the brace": (file_of(b"\v" + ONE), "not a JSON object"),
    "a byte order mark": (file_of(b"\xef\xbb\xbf" + ONE), "not a JSON object"),
    "an array": (file_of(b"[]", b""), "not a JSON object"),
    "null": (file_of(b"null", b""), "not a JSON object"),
    "not UTF-8": (file_of(ONE.replace(b'"a"', b'"\xff"')), "not UTF-8 .*byte 2"),
    "UTF-16": (file_of(ONE.decode().encode("utf-16-le")), "not JSON"),
    "a surrogate in UTF-8": (file_of(ONE.replace(b'"a"', b'"\xed\xa0\x80"')), "not UTF-8"),
    "half a surrogate pair as a name": (file_of(ONE.replace(b'"a"', rb'"\ud800"')), "surrogate"),
    "the other half in the metadata": (file_of(b'{"__metadata__":{"k":"\\udc00"}}', b""), "surrogate"),
    "a surrogate pair turned round": (file_of(ONE.replace(b'"a"', rb'"\udc00\ud800"')), "surrogate"),
    "half a surrogate pair as a dtype": (file_of(tensor(dtype="\ud800")), "surrogate"),
    "a control character": (file_of(ONE.replace(b'"a"', b'"\x01"')), "not JSON"),
    "a line break in a name": (file_of(ONE.replace(b'"a"', b'"a\n"')), "not JSON"),
    "an unknown escape": (file_of(ONE.replace(b'"a"', rb'"\x41"')), "not JSON"),
    "zeros after it": (file_of(ONE + b"\0\0"), "not JSON"),
    "a second object after it": (file_of(ONE + b"{}"), "not JSON"),
    "a comma too many": (file_of(ONE[:-1] + b",}"), "not JSON"),
    "single quotes": (file_of(ONE.replace(b'"', b"'")), "not JSON"),
    "a comment": (file_of(b"{/**/}", b""), "not JSON"),
    "the metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}', b""), "twice .*__metadata__"),
    "a field twice": (file_of(ONE.replace(b'"shape"', b'"dtype":"F32","shape"')), "twice .*dtype"),
    "a hole at the start": (file_of(tensor(data_offsets=[4, 8]), DATA[:8]), "hole or an overlap at 'a'"),
    "a hole in the middle": (
        file_of(tensor()[:-1] + b", " + tensor(data_offsets=[5, 9]).replace(b'"a"', b'"b"')[1:], DATA[:9]),
        "hole or an overlap at 'b' .*expected 4, got 5",
    ),
    "an overlap": (
        file_of(tensor()[:-1] + b", " + tensor(data_offsets=[3, 7]).replace(b'"a"', b'"b"')[1:], DATA[:7]),
        "hole or an overlap at 'b' .*expected 4, got 3",
    ),
    "two tensors on the same bytes": (
        file_of(tensor()[:-1] + b", " + tensor().replace(b'"a"', b'"b"')[1:]),
        "hole or an overlap at 'b' .*expected 4, got 0",
    ),
    "an empty tensor inside another": (
        file_of(tensor()[:-1] + b", " + tensor(shape=[0], data_offsets=[2, 2]).replace(b'"a"', b'"b"')[1:]),
        "hole or an overlap at 'b'",
    ),
    "trailing bytes": (file_of(ONE, DATA[:5]), "1 byte after"),
    "bytes of no tensor": (file_of(b"{}", b"x"), "1 byte after"),
    "more bytes than the shape": (
        file_of(tensor(data_offsets=[0, 5]), DATA[:5]),
        "a number of bytes .*expected 4, got 5",
    ),
    "fewer bytes than the shape": (file_of(tensor(shape=[2])), "a number of bytes .*expected 8, got 4"),
    "a scalar of no bytes": (file_of(tensor(shape=[], data_offsets=[0, 0]), b""), "a number of bytes"),
    "half a byte": (file_of(tensor(dtype="F4", shape=[1], data_offsets=[0, 1]), b"x"), "whole bytes"),
    "three quarters of a byte": (file_of(tensor(dtype="F6_E2M3", shape=[1], data_offsets=[0, 1]), b"x"), "whole bytes"),
    "2^64 elements": (file_of(tensor(shape=[2**32, 2**32])), "too many elements"),
    "2^64 elements, then none": (file_of(tensor(shape=[2**63, 2, 0], data_offsets=[0, 0]), b""), "too many"),
    "2^64 bits": (file_of(tensor(shape=[2**59])), "too many elements"),
    "an end beyond the file": (file_of(tensor(shape=[2**40], data_offsets=[0, 2**42])), "missing"),
    "the end before the start": (file_of(tensor(data_offsets=[4, 0])), "valid shape and data_offsets"),
    "three offsets": (file_of(tensor(data_offsets=[0, 4, 4])), "valid shape and data_offsets"),
    "one offset": (file_of(tensor(data_offsets=[4])), "valid shape and data_offsets"),
    "a number for the shape": (file_of(tensor(shape=1)), "valid shape"),
    "null for the shape": (file_of(tensor(shape=None)), "valid shape"),
    "an object for the offsets": (file_of(tensor(data_offsets={"0": 0, "1": 4})), "valid shape and data_offsets"),
    "a shape of texts": (file_of(tensor(shape=["1"])), "valid shape"),
    "true in the shape": (file_of(tensor(shape=[True])), "valid shape"),
    "an array in the shape": (file_of(tensor(shape=[[1]])), "valid shape"),
    "a negative size": (file_of(tensor(shape=[-1])), "is negative or too large .*-1"),
    "two negative sizes": (file_of(tensor(shape=[-1, -1])), "is negative or too large"),
    "a negative start": (file_of(tensor(data_offsets=[-4, 0])), "is negative or too large"),
    "-0": (file_of(ONE.replace(b"[0,4]", b"[-0,4]")), "is negative or too large .*-0"),
    "2^64": (file_of(tensor(shape=[2**64])), "is negative or too large"),
    "a number of 10,000 digits": (
        file_of(ONE.replace(b"[1]", b"[" + b"9" * 10_000 + b"]")),
        "is negative or too large",
    ),
    "a leading zero": (file_of(ONE.replace(b"[1]", b"[01]")), "not JSON"),
    "a float": (file_of(tensor(shape=[1.0])), "not an integer .*1.0"),
    "an exponent": (file_of(ONE.replace(b"[1]", b"[1e0]")), "not an integer .*1e0"),
    "NaN": (file_of(tensor(shape=[float("nan")])), "not an integer .*NaN"),
    "-Infinity": (file_of(tensor(shape=[float("-inf")])), "not an integer .*-Infinity"),
    "null for the dtype": (file_of(tensor(dtype=None)), "unknown dtype .*NoneType"),
    "a number for the dtype": (file_of(tensor(dtype=7)), "unknown dtype .*int"),
    "no dtype": (file_of(ONE.replace(b'"dtype":"F32",', b"")), "does not describe .*got shape, data_offsets"),
    "no shape": (file_of(ONE.replace(b'"shape":[1],', b"")), "does not describe"),
    "no offsets": (file_of(ONE.replace(b',"data_offsets":[0,4]', b"")), "does not describe"),
    "an empty tensor object": (file_of(b'{"a":{}}', b""), "does not describe"),
    "null for a tensor": (file_of(b'{"a":null}', b""), "does not describe .*NoneType"),
    "a text for a tensor": (file_of(b'{"a":"b"}', b""), "does not describe .*str"),
    "a number in the metadata": (file_of(b'{"__metadata__":{"step":1}}', b""), "not an object of strings"),
    "null in the metadata": (file_of(b'{"__metadata__":{"step":null}}', b""), "not an object of strings"),
    "an object in the metadata": (file_of(b'{"__metadata__":{"a":{}}}', b""), "not an object of strings"),
    "an array as the metadata": (file_of(b'{"__metadata__":[]}', b""), "not an object of strings"),
    "a tensor named __metadata__": (file_of(ONE.replace(b'"a"', b'"__metadata__"')), "not an object of strings"),
}


@pytest.mark.parametrize("row", BROKEN)
def test_a_broken_header_is_malformed(row: str, path: Path) -> None:
    """An invalid header is reported in one line that contains the path and the fault. The library refuses it too."""
    blob, what = BROKEN[row]
    with pytest.raises(MalformedError, match=what) as caught:
        read(path, blob)
    assert str(caught.value).startswith(f"{path}: safetensors header: ")
    assert str(caught.value).isprintable()
    assert isinstance(seen_by_library(path, blob), str)


@pytest.mark.parametrize(
    ("blob", "what"),
    [
        (file_of(tensor(dtype="F128")), "'a' has an unknown dtype .*F128"),
        (file_of(tensor(dtype="f32")), "'a' has an unknown dtype .*f32"),
        (file_of(tensor(strides=[1])), "'a' has fields that are not known to this version .*strides"),
    ],
    ids=["a dtype", "a dtype in small letters", "a field"],
)
def test_unknown_dtypes_and_fields_are_unsupported(blob: bytes, what: str, path: Path) -> None:
    """A dtype or a field that is not in the specification is reported as unsupported, not as malformed. A new field may
    change the meaning of the tensor.
    """
    with pytest.raises(UnsupportedError, match=what):
        read(path, blob)


@pytest.mark.parametrize("opening", [b'{"a":', b"["])
def test_deep_nesting_is_a_limit(opening: bytes, tmp_path: Path) -> None:
    """A header with 100,000 levels of nesting is reported as a limit. It neither crashes the interpreter nor raises a
    bare RecursionError.
    """
    blob = file_of(b'{"a":' + opening * 100_000, b"")
    with pytest.raises(LimitError, match="nested too deeply"):
        read(tmp_path / "m.safetensors", blob)
    assert isinstance(seen_by_library(tmp_path / "m.safetensors", blob), str)


def test_nesting_is_a_limit_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on nesting is checked before the header is parsed, because the parser would end the process if the
    stack is small, as in a browser. Brackets in strings do not count.
    """
    path = tmp_path / "m.safetensors"
    texts = {"a": "[" * 500, "b": "\\" + "{" * 500, "c": '"' + "[" * 500}
    sound = file_of(json.dumps({"__metadata__": texts}).encode(), b"")
    deep = file_of(b'{"a":' * 401, b"")
    with pytest.raises(MalformedError):
        read(path, deep)
    monkeypatch.setattr(safetensors_header, "LIMITS", dataclasses.replace(LIMITS, nesting=400))
    assert read(path, sound).metadata == texts
    with pytest.raises(LimitError, match="nested too deeply"):
        read(path, deep)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_nesting_in_each_encoding_of_json(encoding: str) -> None:
    """Brackets in a string do not count as nesting, in any encoding of JSON. In UTF-16 and UTF-32, one byte of U+2200
    equals an ASCII quotation mark, but it does not end the string.
    """
    safetensors_header.check_nesting(('["\u2200", "' + "[" * 5000 + '"]').encode(encoding))
    with pytest.raises(RecursionError):
        safetensors_header.check_nesting(('["\u2200", ' + "[" * 5000).encode(encoding))


@pytest.mark.parametrize("header", [b"{\0\0\0\xff\xff\xff\xff", b"{\0\0\0\0\0\x11\0"])
def test_text_that_is_invalid_in_its_encoding(header: bytes, path: Path) -> None:
    with pytest.raises(MalformedError, match="it is no"):
        read(path, file_of(header, b""))


@pytest.mark.parametrize("rank", [64, 65])
def test_more_dimensions_than_torch_has_are_a_limit(rank: int, path: Path) -> None:
    """A header with a tensor of 65 dimensions is valid, also for the library, but the checkpoint is refused and the
    error names the tensor. A tensor of 64 dimensions is read.
    """
    blob = file_of(tensor(shape=[1] * rank))
    assert seen_by_us(path, blob) == seen_by_library(path, blob) == (None, {"a": ("F32", [1] * rank, DATA[:4])})
    if rank == 64:
        assert read_checkpoint(path).tensors["a"].shape == (1,) * rank
    else:
        unreadable(path, LimitError, r"at a: .*expected at most 64, got 65")


def limit_headers(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Replace some of the limits for headers."""
    monkeypatch.setattr(safetensors_header, "LIMITS", dataclasses.replace(safetensors_header.LIMITS, **limits))


def test_the_librarys_bound_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 100,000,000 bytes is not too long. A header with one byte more is refused. The safetensors library
    has the same limit.
    """
    for length, ours, librarys in (
        (100_000_000, "ends inside it", "invalid header length"),
        (100_000_001, "too long", "header too large"),
    ):
        blob = file_of(ONE, length=length)
        assert librarys in str(seen_by_library(tmp_path / "m", blob))
        assert ours in str(seen_by_us(tmp_path / "m", blob))
    for length, fits in ((len(ONE), True), (len(ONE) - 1, False)):
        limit_headers(monkeypatch, safetensors_header=length)
        assert isinstance(seen_by_us(tmp_path / "m", file_of(ONE)), tuple) == fits


# Valid headers

SOUND = {
    "plain": file_of(ONE),
    "spaces before the brace": file_of(b" \t\r\n" + ONE),
    "spaces after it": file_of(ONE + b" \t\r\n"),
    "spaces everywhere": file_of(json.dumps(json.loads(ONE), indent=4).encode()),
    **{f"data starts at 8 n + {i}": file_of(ONE + b" " * (i + -len(ONE) % 8)) for i in range(8)},
    "nothing in it": file_of(b"{}", b""),
    "metadata null": file_of(b'{"__metadata__":null}', b""),
    "metadata empty": file_of(b'{"__metadata__":{}}', b""),
    "only _metadata": file_of(b'{"__metadata__":{"format":"pt","":"","\\u00e9":"\\ud83d\\ude00"}}', b""),
    "metadata last": file_of(ONE[:-1] + b',"__metadata__":{"a":"a"}}'),
    "an escaped key": file_of(b'{"\\u005f_metadata__":{"a":"b"}}', b""),
    "the empty name": file_of(ONE.replace(b'"a"', b'""')),
    "a name with NUL, DEL and a quote": file_of(ONE.replace(b'"a"', b'"\\u0000\x7f\\""')),
    "a name outside the BMP, in pairs": file_of(ONE.replace(b'"a"', rb'"\ud83d\ude00"')),
    "fields in another order": file_of(b'{"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}'),
    "a scalar": file_of(tensor(shape=[])),
    "empty tensors before, between and after": file_of(
        json.dumps(
            {
                "after": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
                "y": {"dtype": "I32", "shape": [1], "data_offsets": [4, 8]},
                "between": {"dtype": "F64", "shape": [3, 0, 2**40], "data_offsets": [4, 4]},
                "too": {"dtype": "F4", "shape": [0], "data_offsets": [4, 4]},
                "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "before": {"dtype": "BOOL", "shape": [0], "data_offsets": [0, 0]},
            }
        ).encode(),
        DATA[:8],
    ),
    "a size of 2^64 - 1 beside a 0": file_of(tensor(shape=[2**64 - 1, 0, 2**64 - 1], data_offsets=[0, 0]), b""),
    "empty tensors alone": file_of(tensor(shape=[0], data_offsets=[0, 0]), b""),
}


@pytest.mark.parametrize("row", SOUND)
def test_a_sound_header_is_read(row: str, path: Path) -> None:
    """The names, dtypes, shapes, bytes and metadata are the same as those from the library. The entries have the order
    of the header.
    """
    seen = seen_by_us(path, SOUND[row])
    assert isinstance(seen, tuple), seen
    assert seen == seen_by_library(path, SOUND[row])
    header = read(path, SOUND[row])
    length = int.from_bytes(SOUND[row][:8], "little")
    assert header.data_offset == 8 + length
    assert [e.name for e in header.entries] == [n for n in json.loads(SOUND[row][8 : 8 + length]) if n != METADATA]


# Differences between ckptconv and the library. ckptconv never reads a header that the library refuses.

DIFFERENCES = {
    "a name twice: the library takes the last, another reader may take the first": (
        file_of(ONE[:-1] + b',"a":{"dtype":"I32","shape":[],"data_offsets":[0,4]}}'),
        "it contains a key twice .*'a'",
    ),
    "a metadata key twice: the same": (
        file_of(b'{"__metadata__":{"k":"1","k":"2"}}', b""),
        "it contains a key twice .*'k'",
    ),
    "a tensor as an array: an accident of the library's parser, in no specification": (
        file_of(b'{"a":["F32",[1],[0,4]]}'),
        "does not describe a tensor .*list",
    ),
    "a dtype as an object: the same": (file_of(tensor(dtype={"F32": None})), "unknown dtype .*dict"),
}


@pytest.mark.parametrize("row", DIFFERENCES)
def test_a_known_difference_is_one(row: str, path: Path) -> None:
    """The library reads the header, and ckptconv refuses it. A row must be removed when the library refuses it too."""
    blob, what = DIFFERENCES[row]
    assert isinstance(seen_by_library(path, blob), tuple)
    with pytest.raises(MalformedError, match=what):
        read(path, blob)


def without_differences(blob: bytes) -> bytes:
    """Return the file that `blob` becomes without the peculiarities in DIFFERENCES, with the meaning that the library
    gives them.
    """
    length = int.from_bytes(blob[:8], "little")
    top = json.loads(blob[8 : 8 + length])  # keeps the last of two equal keys, as the library does
    for name in top.keys() - {METADATA}:
        fields = top[name]
        if isinstance(fields, list):
            fields = dict(zip(("dtype", "shape", "data_offsets"), fields, strict=True))
        if isinstance(fields["dtype"], dict):
            (fields["dtype"],) = fields["dtype"]
        top[name] = {key: value for key, value in fields.items() if key in ("dtype", "shape", "data_offsets")}
    return file_of(json.dumps(top).encode(), blob[8 + length :])


def pairs(blob: bytes) -> Any:
    """Return the header of `blob` with all its keys, also those that occur twice."""
    return json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")], object_pairs_hook=lambda pairs: ("{}", *pairs))


def check_difference(path: Path, blob: bytes) -> str:
    """Check that ckptconv and the library both read `blob` and agree, or both refuse it, or differ as in
    DIFFERENCES.

    Return which of the three applies. If they differ, ckptconv must read the file without the peculiarities as the
    library reads `blob`.
    """
    ours, librarys = seen_by_us(path, blob), seen_by_library(path, blob)
    if isinstance(librarys, str):
        assert isinstance(ours, InputError), (blob, librarys)
        return "refused"
    if isinstance(ours, tuple):
        assert ours == librarys, blob
        return "read"
    plain = without_differences(blob)
    assert pairs(plain) != pairs(blob), (blob, str(ours))
    assert seen_by_us(path, plain) == librarys, blob
    return "different"


# Generated headers. In the tree, an object is a tuple of pairs, so that a key can occur twice.

WORDS = sorted(BY_WORD)
NAMES = ["a", "b", "c.weight", "", "é", "😀", 'a"b', "a\\", "\x01", "\x7f", "__metadata", "dtype"]
KEYS = ["dtype", "shape", "data_offsets", METADATA, "strides", *NAMES]
NUMBERS = [0, 1, 4, 8, -1, -0.0, 1.0, 2**63, 2**64 - 1, 2**64, 1e300, float("nan")]
ARRAYS = [[], [0], [1], [0, 0], [0, 4], [0, 4, 4], ["F32", [1], [0, 4]]]
OBJECTS = [
    (),
    (("F32", None),),
    (("F32", 1),),
    (("a", "b"),),
    (("dtype", "F32"), ("shape", [1]), ("data_offsets", [0, 4])),
]
JUNK: list[Any] = [None, True, "", "F32", "x", "\ud800", *NUMBERS, *ARRAYS, *OBJECTS]
BYTES = b' \t\r\n\v\0\x01\x7f\x80\xc3\xa9\xff"{}[],:\\/u-+.eE0123456789nulltrueF'


def sound_tree(random: Random) -> tuple[Any, int]:
    """Return a valid header as a tree, and the number of bytes of its data."""
    items: list[tuple[str, Any]] = []
    at = 0
    for name in random.sample(NAMES, random.choice([0, 1, 1, 2, 2, 3])):
        word = random.choice(WORDS)
        shape = random.choices([0, 1, 1, 2, 3], k=random.randrange(3)) + [8] * (BY_WORD[word].packed > 1)
        end = at + BY_WORD[word].bytes_of(prod(shape))
        fields = [("dtype", word), ("shape", shape), ("data_offsets", [at, end])]
        items.append((name, tuple(random.sample(fields, 3))))
        at = end
    if random.random() < 0.5:
        texts = tuple((key, random.choice(NAMES)) for key in random.sample(NAMES, random.randrange(3)))
        items.append((METADATA, random.choice([texts, texts, None])))
    return tuple(random.sample(items, len(items))), at


def mutated(tree: Any, random: Random) -> Any:
    """Return `tree` with one change, usually at a deep level."""
    if isinstance(tree, (tuple, list)) and random.random() < 0.95:
        items = list(tree)
        i = random.randrange(len(items) + 1)
        if items[i:] and random.random() < 0.75:
            child = items[i]
            items[i] = (child[0], mutated(child[1], random)) if isinstance(tree, tuple) else mutated(child, random)
            return type(tree)(items)
        junk = (random.choice(KEYS), random.choice(JUNK)) if isinstance(tree, tuple) else random.choice(JUNK)
        added, dropped = [*items[:i], junk, *items[i:]], [*items[:i], *items[i + 1 :]]
        doubled = [*items, *items[i : i + 1]]
        values = [item[1] for item in items] if isinstance(tree, tuple) else items
        return random.choice([type(tree)(added), type(tree)(dropped), type(tree)(doubled), values])
    if isinstance(tree, int) and random.random() < 0.7:
        return tree + random.choice([-4, -1, 1, 4, 8, 2**32, 2**64])
    if isinstance(tree, str) and random.random() < 0.5:
        return random.choice([((tree, None),), random.choice(WORDS)])
    return random.choice(JUNK)


def spelled(tree: Any, random: Random) -> str:
    """Return `tree` as JSON with random spaces."""
    space = random.choice(["", "", "", " ", "\n\t"])
    if isinstance(tree, tuple):
        items = (f"{spelled(key, random)}:{space}{spelled(value, random)}" for key, value in tree)
        return space + "{" + f",{space}".join(items) + "}" + space
    if isinstance(tree, list):
        return "[" + f"{space},".join(spelled(value, random) for value in tree) + "]"
    return json.dumps(tree, ensure_ascii=random.random() < 0.5)


def generated(random: Random) -> bytes:
    """Return a file with a valid header and a few random changes: in its structure, in its bytes, or in its lengths."""
    tree, nbytes = sound_tree(random)
    for _ in range(random.choice([0, 1, 1, 2])):
        tree = mutated(tree, random)
    header = spelled(tree, random).encode("utf-8", "surrogatepass")
    if random.random() < 0.3:
        i, new = random.randrange(len(header) + 1), bytes([random.choice(BYTES)])
        header = random.choice(
            [header[:i] + new + header[i:], header[:i] + new + header[i + 1 :], header[:i] + header[i + 1 :]]
        )
    nbytes, length = (n + (random.choice([-1, 1, 4]) if random.random() < 0.05 else 0) for n in (nbytes, len(header)))
    return file_of(header, DATA[: max(nbytes, 0)], max(length, 0))


@given(st.integers(0, 2**64))
def test_the_library_and_we_agree_on_generated_headers(file: Path, seed: int) -> None:
    """ckptconv and the library both read a generated header and agree, or both refuse it, except for the known
    differences.
    """
    random = Random(seed)
    for _ in range(30):
        check_difference(file, generated(random))


def test_generated_headers_come_in_all_kinds(file: Path) -> None:
    """Enough of the generated headers are read, refused, and read only by the library. Otherwise the previous test
    would show little.
    """
    random = Random(0)
    kinds = Counter(check_difference(file, generated(random)) for _ in range(500))
    assert min(kinds["read"], kinds["refused"]) > 100
    assert kinds["different"] > 5


# Dtypes


def test_the_dtypes_are_the_librarys(tmp_path: Path) -> None:
    """The known dtypes are exactly those that the library lists in its error message."""
    message = seen_by_library(tmp_path / "m", file_of(tensor(dtype="F128")))
    assert set(re.findall(r"`(\w+)`", str(message))) == {"F128", *BY_WORD}


@pytest.mark.parametrize("word", WORDS)
def test_a_dtype_has_the_librarys_size(word: str, path: Path) -> None:
    """Eight elements of each dtype need exactly the same number of bytes in the table, in ckptconv and in the
    library.
    """
    right = BY_WORD[word].bytes_of(8)
    for nbytes in (right - 1, right, right + 1):
        blob = file_of(tensor(dtype=word, shape=[8], data_offsets=[0, nbytes]), DATA[:nbytes])
        for seen in (seen_by_us(path, blob), seen_by_library(path, blob)):
            assert isinstance(seen, tuple) == (nbytes == right)


@pytest.mark.parametrize("word", [word for word in WORDS if BY_WORD[word].name in BY_NAME])
def test_a_dtype_is_the_librarys_in_torch(word: str, path: Path) -> None:
    """The library returns a tensor with the torch dtype that has the same name."""
    nbytes = BY_WORD[word].bytes_of(8)
    path.write_bytes(file_of(tensor(dtype=word, shape=[8], data_offsets=[0, nbytes]), bytes(nbytes)))
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_tensor("a").dtype is getattr(torch, BY_WORD[word].name)


# Written headers

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(NAMES)
names = texts.filter(lambda name: name != METADATA)
kinds = st.tuples(st.sampled_from(WORDS), st.lists(st.sampled_from([0, 1, 2, 8]), max_size=2))


@given(
    st.dictionaries(texts, texts, max_size=3),
    st.dictionaries(names, kinds, max_size=4),
    st.randoms(use_true_random=False),
    st.none() | st.integers(8, 20_000) | st.integers(1, 2_500).map(lambda n: 8 * n),
)
def test_a_written_header_is_read_back(
    file: Path, metadata: dict[str, str], tensors: dict[str, tuple[str, list[int]]], random: Random, like: int | None
) -> None:
    """The library and ckptconv read a written header back without changes, in the given order. The data starts at a
    multiple of 8. If `like` is a multiple of 8, the data starts at the same position modulo 4096.
    """
    entries = {}
    at = 0
    for name in random.sample(list(tensors), len(tensors)):
        word, shape = tensors[name]
        shape = [*shape, 8] if BY_WORD[word].packed > 1 else shape
        entries[name] = Entry(name, word, tuple(shape), at, at := at + BY_WORD[word].bytes_of(prod(shape)))
    in_order = tuple(entries[name] for name in tensors)
    head = header_bytes(metadata, in_order, like=like)
    blob = head + random.randbytes(at)

    assert read(file, blob) == Header(metadata, in_order, len(head))
    assert seen_by_us(file, blob) == seen_by_library(file, blob)
    assert len(head) % 8 == 0
    if like is not None and like % 8 == 0:
        assert len(head) % 4096 == like % 4096
    assert head == header_bytes(metadata, in_order, like=like)


def test_a_header_is_compact_and_padded_with_spaces() -> None:
    """A header is JSON without spaces, and ends with at most 7 spaces of padding, as other writers do. The metadata
    comes first, in its own order.
    """
    head = header_bytes({"z": "é", "a": '"'}, [Entry("x", "F32", (1, 2), 0, 8), Entry("b", "U8", (), 8, 9)])
    text = (
        '{"__metadata__":{"z":"é","a":"\\""},"x":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        '"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    ).encode()
    assert head == file_of(text + b" " * (-len(text) % 8), b"")


def test_a_header_that_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header above the limit is not written. The padding counts."""
    entries = [Entry("a", "F32", (1,), 0, 4)]
    length = len(header_bytes({}, entries)) - 8
    limit_headers(monkeypatch, safetensors_header=length)
    assert len(header_bytes({}, entries)) == 8 + length
    limit_headers(monkeypatch, safetensors_header=length - 1)
    with pytest.raises(LimitError, match=f"at most {length - 1:,} bytes, got {length:,}"):
        header_bytes({}, entries)


@pytest.mark.parametrize("field", ["header_brackets", "header_quotes", "header_commas"])
def test_a_header_that_describes_too_much_is_refused_before_it_is_parsed(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header with too many brackets, quotation marks or commas is refused before it is parsed. A few megabytes of
    them would become gigabytes of objects.
    """
    limit_headers(monkeypatch, rank=0, **{field: 1})
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("parsed"))
    with pytest.raises(LimitError, match="more data than a million tensors"):
        read(tmp_path / "a.safetensors", file_of(ONE))
