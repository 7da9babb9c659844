"""The mutators of each target. Their changes pass the first check of a reader.

For example, a pickle is changed by opcodes and its archive gets correct checksums, or the numbers in a header stay
consistent.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, TypeAlias

from ckptconv.dtypes import BY_STORAGE_CLASS, BY_WORD
from ckptconv.errors import CkptconvError
from ckptconv.pickles.graph import Global, Tuple
from ckptconv.pickles.parser import parse
from tests.fuzz import json_changes, opcodes
from tests.fuzz.archives import Record, archive, records_of
from tests.fuzz.folders import pack, unpack
from tests.fuzz.http_answers import BODY, END, FIRST, LAST, ON, SIZE
from tests.fuzz.json_changes import Pairs
from tests.fuzz.odd_pickles import made, mutated
from tests.fuzz.opcodes import Change
from tests.support import row_pickles

__all__ = ["MUTATORS", "Mutator", "fitting", "noise", "pickles_of", "storages_of"]

#: A function that changes data. It applies its last argument to bytes without a known structure.
Mutator: TypeAlias = Callable[[bytes, Random, Change], bytes]


def noise(data: bytes, random: Random) -> bytes:
    """Return `data` with a few bytes deleted, duplicated or replaced."""
    at, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    end = min(end, at + 8)
    what = random.randrange(4)
    if what == 0:
        return data[:at] + data[end:]
    if what == 1:
        return data[:at] + data[at:end] + data[at:]
    return data[:at] + random.randbytes(1 if what == 2 else end - at) + data[at + 1 if what == 2 else end :]


_MOST = 1024  # the most bytes of a storage or tensor that is adjusted
_NAMES = (
    b"data.pkl", b"data/0", b"data/1", b"data/2", b"DATA.PKL", b"Data/0", b"version", b"byteorder",
    b".format_version", b".storage_alignment", b".data/serialization_id", b"constants.pkl", b"code/x.py", b"data",
    b"data/", b"../x", b"a\0b", b"\xff", b"extra/a.txt", b"",
)  # a table  # fmt: skip
_NOTES = (b"3\n", b"little", b"big", b"middle", b"", b"1", b"64", b"x" * 100)

# Recent pickles, whose opcodes are inserted into others.
_seen: list[list[bytes]] = []


def _pickle(data: bytes, random: Random, change: Change) -> bytes:
    pieces, _ = opcodes.split(data)
    if len(pieces) > 2:
        _seen[:] = [*_seen[-63:], pieces]
    return opcodes.changed(data, random, change, others=_seen)


def storages_of(data: bytes, at: int = 0) -> dict[str, tuple[int, int]]:
    """Return the number of elements and bytes of each storage that the pickle at offset `at` of `data` refers to, by
    key.
    """
    try:
        graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="", offset=at)
    except CkptconvError:
        return {}
    found: dict[str, tuple[int, int]] = {}
    for reference in graph.references:
        items = reference.id.items if isinstance(reference.id, Tuple) else []
        if len(items) > 4 and isinstance(items[1], Global) and isinstance(items[2], str) and type(items[4]) is int:
            dtype = BY_STORAGE_CLASS.get(items[1].name)
            nbytes = items[4] * dtype.itemsize if dtype else -1
            if 0 <= nbytes <= _MOST:
                found[items[2]] = items[4], nbytes
    return found


# Zip archives


def _program(data: bytes, random: Random, change: Change) -> bytes:
    """Return an archive of a torch.export program whose JSON is changed at the level of values."""
    records = records_of(data)
    texts = [i for i, record in enumerate(records or ()) if record.name.endswith(b".json")]
    if not records or not texts or random.random() < 0.3:
        return _zip(data, random, change)
    i = random.choice(texts)
    return archive(fitting(_with(records, i, data=_json(records[i].data, random, change)), random))


def _zip(data: bytes, random: Random, change: Change) -> bytes:
    records = records_of(data)
    if records is None or random.random() < 0.1:
        return change(data)
    for _ in range(random.choice((1, 1, 2))):
        records = _other_records(records, random, change) or records
    if random.random() < 0.8:
        records = fitting(records, random)
    return archive(records, zip64=random.random() < 0.5, comment=b"" if random.random() < 0.95 else b"comment")


def _other_records(records: list[Record], random: Random, change: Change) -> list[Record]:
    i = random.randrange(len(records))
    pickles = [n for n, record in enumerate(records) if record.name.endswith(b".pkl")]
    what = random.randrange(12)
    if what < 6 and pickles:
        i = random.choice(pickles)
        return _with(records, i, data=_pickle(records[i].data, random, change))
    if what == 6:
        return _with(records, i, data=change(records[i].data) or random.choice(_NOTES))
    if what == 7:
        name = records[i].name.split(b"/")[0] + b"/" + random.choice(_NAMES)
        if random.random() < 0.5:
            return _with(records, i, name=name)
        return [*records, Record(name, random.choice((b"", *_NOTES)))]
    if what == 8:
        return [*records[:i], *records[i + 1 :]]
    if what == 9:
        return random.sample(records, len(records)) if random.random() < 0.5 else [*records, records[i]]
    if what == 10:
        word = random.choice(("deflated", "checked", "descriptor", "aligned"))
        return _with(records, i, **{word: not getattr(records[i], word)})
    return [*records[:i], records[i].lying(random), *records[i + 1 :]]


def _with(records: list[Record], i: int, **what: Any) -> list[Record]:
    return [*records[:i], replace(records[i], **what), *records[i + 1 :]]


def fitting(records: list[Record], random: Random) -> list[Record]:
    """Return `records` with all storages that data.pkl refers to, in the sizes that it requires."""
    main = next((record for record in records if record.name.endswith(b"/data.pkl")), None)
    if main is None:
        return records
    root = main.name[: -len(b"data.pkl")]
    sizes = {
        root + b"data/" + key.encode("utf-8", "replace"): size for key, (_, size) in storages_of(main.data).items()
    }
    kept = [replace(r, data=_sized(r.data, sizes.pop(r.name))) if r.name in sizes else r for r in records]
    return kept + [Record(name, random.randbytes(size), aligned=True) for name, size in sizes.items()]


def _sized(data: bytes, size: int) -> bytes:
    return data[:size] + bytes(size - len(data[:size]))


# torch's format before 1.6


def pickles_of(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the pickles at the start of `data`, at most five as in the older format, and the remaining bytes."""
    pickles, rest = [], data
    for _ in range(5):
        pieces, following = opcodes.split(rest)
        if not pieces or pieces[-1] != b".":
            break
        pickles.append(rest[: len(rest) - len(following)])
        rest = following
    return pickles, rest


def _legacy(data: bytes, random: Random, change: Change) -> bytes:
    pickles, rest = pickles_of(data)
    if len(pickles) < 5:
        return change(data)
    i = random.choice((0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5))
    if i == 5:
        return b"".join(pickles) + change(rest)
    pickles[i] = _pickle(pickles[i], random, change)
    storages = storages_of(pickles[3])
    if i == 3 and storages and random.random() < 0.8:
        pickles[4] = pickle.dumps([*storages], 2)
        rest = b"".join(struct.pack("<q", numel) + random.randbytes(size) for numel, size in storages.values())
    return b"".join(pickles) + rest


# safetensors


def _safetensors(data: bytes, random: Random, change: Change) -> bytes:
    length = int.from_bytes(data[:8], "little")
    try:
        top = json_changes.parsed(data[8 : 8 + length].decode())
    except (ValueError, RecursionError):
        return change(data)
    what = random.randrange(10)
    if what == 0:
        return data[:8] + change(data[8:])
    if what == 1:
        return change(data)
    top = json_changes.changed(top, random)
    body = data[8 + length :]
    if random.random() < 0.7:
        body = bytes(_place(top))
    header = json_changes.said(top).encode("utf-8", "surrogatepass") + b" " * random.choice((0, 0, 1, 7))
    return len(header).to_bytes(8, "little") + header + body


def _place(top: Any) -> int:
    """Set consecutive offsets for the valid tensors in the header `top`, and return the number of bytes of all
    tensors.
    """
    at = 0
    for _, entry in top if isinstance(top, Pairs) else ():
        fields = dict(entry) if isinstance(entry, Pairs) else {}
        word, shape = fields.get("dtype"), fields.get("shape")
        if (
            isinstance(word, str)
            and word in BY_WORD
            and isinstance(shape, list)
            and all(type(n) is int and 0 <= n <= _MOST for n in shape)
        ):
            size = math.prod(shape) * BY_WORD[word].itemsize // BY_WORD[word].packed
            for pair in entry if size <= _MOST else ():
                if pair[0] == "data_offsets":
                    pair[1] = [at, at + size]
            at += min(size, _MOST)
    return at


# Folders


def _folder(data: bytes, random: Random, change: Change) -> bytes:
    files = unpack(data)
    if not files or random.random() < 0.03:
        return change(data)
    name = random.choice([*files])
    if random.random() < 0.15:
        return pack(_other_files(files, name, random))
    files[name] = _by_name(name)(files[name], random, change)
    return pack(files)


def _other_files(files: dict[str, bytes], name: str, random: Random) -> dict[str, bytes]:
    """Return `files` after one change: a file is removed, copied to another name, or replaced by another file."""
    other = random.choice([*files])
    what = random.randrange(4)
    if what == 0:
        return {each: data for each, data in files.items() if each != name}
    if what == 1:
        return {**files, name: files[other]}
    if what == 2:
        return {**files, name.replace("1", "2", 1): files[name]}
    return {
        **files,
        random.choice(
            ("model.safetensors", "model-00003-of-00003.safetensors", "__1_0.distcp", "config.json", ".metadata")
        ): files[other],
    }


def _by_name(name: str) -> Mutator:
    if name.endswith(".json"):
        return _json
    if name.endswith(".safetensors"):
        return _safetensors
    if name.endswith((".rules", ".ckptconv-undo")):
        return lambda data, random, change: _text(data, random, change, _RULE_PARTS)
    return _pickle if name == ".metadata" else _chunks if name.endswith(".distcp") else _zip


def _json(data: bytes, random: Random, change: Change) -> bytes:
    try:
        top = json_changes.parsed(data.decode())
    except (ValueError, RecursionError):
        return change(data)
    if random.random() < 0.1:
        return change(data)
    if random.random() < 0.1:
        return json.dumps(top, indent=2).encode("utf-8", "surrogatepass")
    return json_changes.said(json_changes.changed(top, random)).encode("utf-8", "surrogatepass")


def _chunks(data: bytes, random: Random, change: Change) -> bytes:
    """Return the concatenated archives in `data` with a change that keeps their length, because .metadata refers to
    them by offset.
    """
    at = data.find(b"PK\x03\x04", random.randrange(len(data) or 1))
    if at < 0:
        return change(data)
    pieces, rest = opcodes.split(data[data.find(b"\x80\x02", at) :])
    if not pieces or random.random() < 0.5:
        raw = bytearray(data)
        raw[random.randrange(len(raw))] = random.randrange(256)
        return bytes(raw)
    i = random.randrange(len(pieces))
    other = opcodes.changed(pieces[i], random, change)
    pieces[i] = (other + pieces[i])[: len(pieces[i])]
    body = b"".join(pieces) + rest
    return data[: len(data) - len(body)] + body


# HTTP answers

_STATUSES = (
    b"100 Continue", b"200 OK", b"204 No", b"206 Partial", b"301 M", b"302 F", b"304 No", b"307 T", b"401 No",
    b"403 No", b"404 No", b"412 No", b"416 No", b"429 Wait", b"503 Busy", b"099 x", b"999", b"-1 x", b"2\xb20 x",
    b"200", b"",
)  # fmt: skip
_NUMBERS = (
    FIRST, LAST, SIZE, b"0", b"-1", b"+5", b"1_0", b"0x40", b"1e3", b" 7 ", b"64", b"191", b"9" * 19, b"9" * 5000,
    b"%d" % (2**63 - 1), b"%d" % 2**63, b"\xb2", "\u0663".encode(), b"", b"*",
)  # fmt: skip
_TEXTS = (
    b'"a"', b'"b"', b'W/"a"', b"identity", b"gzip", b"x-gzip", b"br", b"chunked", b"gzip, chunked", b"close",
    b"keep-alive", b"bytes */0", b"bytes */*", b"bytes 0-63/*", b"bytes=0-63/192", b"multipart/byteranges; boundary=x",
    b"Mon, 02 Nov 2026 10:00:00 GMT", b"Mon, 99 Foo 99999999999999999999 10:00:00 GMT", b"Mon, 01 Jan 0001 0:0:0 -0000",
    b"Mon, 02 Nov 2026 10:00:00 +9999999", b"/", b"//", b"///x", b"http://", b"http://[", b"http://[::1]:80/x",
    b"http://a:99999/", b"http://a:\xb2/", b"http://a\\@b/", b"http://a b/", b"http://no-host/?Signature=S3CRET",
    b"HTTPS://other/x", b"file:///etc/passwd", b"ftp://a/", b"javascript:0", b"http://\xc3\xa4/", b"http://%5b/",
    b"http://" + b"a" * 70 + b".b/", b"http:///x", b"http:x", b"?", b"#", b"\\\\a\\b", b"%", b"a\tb", b"\xff\xfe", b"",
    b'<http://hub/api/y>; rel="next"', b'</y?S3CRET>; rel=next', b'<http://other/>; rel="next"',
    b'<http://[>; rel=next',
)  # fmt: skip
_FIELDS = (
    b"Content-Range", b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"ETag", b"Last-Modified",
    b"Location", b"Retry-After", b"Connection", b"Link", b"Content-Type", b"X", b" X", b"", b"X Y", b"\xff",
)  # fmt: skip
_FRAMES = (b"40;x=y", b"0", b"-1", b"1", b"8" + b"0" * 250, b"x", b"", b"1_0", b"+2", b" 3", b";", b"\xb2")
_HEAD_ENDS = b"\r\n\r\n"


def _http(data: bytes, random: Random, change: Change) -> bytes:
    kind, answers = data[:1], data[1:].split(END)
    what = random.randrange(16)
    i = random.randrange(len(answers) - (not answers[-1]) or 1)
    if what == 0:
        return random.choice((b"f", b"d", b"l")) + data[1:]
    if what == 1:
        answers.insert(random.randrange(len(answers)), answers[i])
    elif what == 2:
        del answers[i]
    elif what == 3:
        answers[i] = change(answers[i])
    elif what == 4:
        at = random.randrange(len(answers[i]) + 1)
        pause = random.choice((ON, b"\0\x01", b"\0\x13", b"\0\x15", b"\0\x7f"))
        answers[i] = answers[i][:at] + pause + answers[i][at:]
    else:
        head, ends, body = answers[i].partition(_HEAD_ENDS)
        if what < 7:
            body = _other_body(body, random, change)
        else:
            head = _other_head(head, random, change)
        answers[i] = head + ends + body
    return kind + END.join(answers)


def _other_head(head: bytes, random: Random, change: Change) -> bytes:
    status, *fields = head.split(b"\r\n")
    what = random.randrange(12)
    if what < 2:
        version = random.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"HTTP/0.9", b"ICY", b""))
        status = version + b" " + random.choice(_STATUSES)
    elif what == 2:
        status = change(status)
    elif what < 6 or not fields:
        value = random.choice(random.choice((_TEXTS, _NUMBERS)))
        fields.insert(random.randrange(len(fields) + 1), random.choice(_FIELDS) + b": " + value)
    else:
        i = random.randrange(len(fields))
        name, _, value = fields[i].partition(b":")
        numbers = [*re.finditer(rb"[0-9]+|[\x01-\x03]", value)]
        if what == 6:
            del fields[i]
        elif what == 7:
            fields.append(fields[i])
        elif what == 8:
            fields[i] = change(fields[i])
        elif what == 9 or not numbers:
            fields[i] = name + b": " + random.choice(_TEXTS)
        else:
            found = random.choice(numbers)
            fields[i] = name + b":" + value[: found.start()] + random.choice(_NUMBERS) + value[found.end() :]
    return random.choice((b"\r\n", b"\r\n", b"\r\n", b"\n")).join([status, *fields])


def _other_body(body: bytes, random: Random, change: Change) -> bytes:
    what = random.randrange(4)
    if what == 0:
        return change(body)
    if what == 1:
        return random.choice(
            (b"", body * 2, body[:-1], body + b"x", b"[]", b"{}", b"[" * 3000, b'[{"path":"../x"}]', BODY)
        )
    lines = body.split(b"\r\n")
    if what == 2:
        lines[random.randrange(len(lines))] = random.choice(_FRAMES)
    else:
        lines.insert(random.randrange(len(lines) + 1), random.choice(_FRAMES))
    return b"\r\n".join(lines)


_RULE_PARTS = (
    b"{e}", b"{e:d}", b"**", b"*", b"[0]", b"[::2]", b":1", b":-1", b":$N", b"$", b" = ", b" , ", b"// for: x\n", b"\n",
    b"1" * 30, b"(", b")", b"^T", b"a.b", b"\\", b"\xff", b"*" * 50,
)  # a table  # fmt: skip
_URL_PARTS = (
    b"http://", b"https://u:S3CRET@h/", b"s3://b/", b"hf://o/r@main/", b"file:///", b"memory://", b"::", b"@", b"?",
    b"#", b"%2e%2e/", b"..", b"\\", b"[", b"]", b":99999", b"\0", b"\n", b" ", b"\xc3\xa4", b"\xff", b"*.pt", b"/",
)  # a table  # fmt: skip
_NAME_PARTS = (
    b"<script>", b"</script>", b"<!--", b"-->", b"]]>", b"'\"", b"&#60;", b"\xe2\x80\xa8", b"\xe2\x80\xae",
    b"<img src=x>", b"</title>", b"`", b"${x}", b"$data", b"\\u003c/script>", b"\0", b"\x1b[2J", b".", b"\n", b"</pre>",
    b"javascript:",
)  # a table  # fmt: skip


_WORD_PARTS = (
    b"$(x)", b"`x`", b"'", b'"', b"\\", b"\n", b"\r", b"\t", b"\0", b";", b"&", b"|", b">x", b"*", b"?", b"[a]",
    b"{a,b}", b"~", b"#", b"!!", b"$'", b"\\'", b"$HOME", b"-", b"@", b" ", b"\xc3\xa4", b"\xff", b"\x1b[2J",
    b"\xe2\x80\xae", b"=", b"%2", b"^", b"\xc2\xa0",
)  # a table  # fmt: skip


def _text(data: bytes, random: Random, change: Change, parts: tuple[bytes, ...]) -> bytes:
    """Return `data` with one of `parts` inserted, or in place of a few bytes."""
    if random.random() < 0.3:
        return change(data)
    at, end = sorted(random.randrange(len(data) + 1) for _ in range(2))
    return data[:at] + random.choice(parts) + data[at if random.random() < 0.7 else min(end, at + 20) :]


MUTATORS: dict[str, Mutator] = {
    "pickle": _pickle,
    "lenient": lambda data, random, change: made(random) if random.random() < 0.3 else mutated(data, random, change),
    "rows": lambda data, random, change: row_pickles.made(random) if random.random() < 0.3 else change(data),
    "zip": _zip,
    "legacy": _legacy,
    "safetensors": _safetensors,
    "shards": _folder,
    "dcp": _folder,
    "zero": _folder,
    "http": _http,
    "rules": _folder,
    "journal": _folder,
    "url": lambda data, random, change: _text(data, random, change, _URL_PARTS),
    "page": lambda data, random, change: _text(data, random, change, _NAME_PARTS),
    "index": _folder,
    "shell": lambda data, random, change: _text(data, random, change, _WORD_PARTS),
    "program": _program,
}
