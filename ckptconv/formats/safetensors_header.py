"""The header of a safetensors file: a strict reader, and the bytes for a new one.

Layout (https://github.com/huggingface/safetensors#format), the integer little-endian:

    length    8 bytes: the length of the header, at most 100 MB
    header    JSON, spaces around it: {"__metadata__": {string: string},
                                       NAME: {"dtype": WORD, "shape": [n, ...], "data_offsets": [start, end]}, ...}
    data      tensors in row-major order; offsets count from its start, and every byte belongs to exactly one tensor

The reader is as strict as the library. It is stricter if two readers could read one header differently: a duplicate key
(the library takes the last), an unknown field, a tensor as a JSON array or a dtype as an object. A test compares it
with the library.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import FILESYSTEM_BLOCK
from ckptconv.dtypes import BY_WORD
from ckptconv.errors import (
    DOWNLOAD_AGAIN,
    InputError,
    LimitError,
    MalformedError,
    UnsupportedError,
    check_limit,
    count,
    some,
)
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.work import seen, work

METADATA = "__metadata__"
_LENGTH = 8  # bytes of the integer before the header
_FIELDS = ("dtype", "shape", "data_offsets")
_FIELD_SET = {*_FIELDS}
_SPACES = b" \t\r\n"  # spaces in JSON; some files have spaces before the brace
_ALIGNMENT = 8
_WINDOW = 1024  # bytes of JSON


class Entry(NamedTuple):
    """An entry of the header, which describes a tensor.

    Attributes:
        name: The name of the tensor.
        word: The dtype in safetensors' spelling, for example ``BF16``.
        shape: The shape in elements of that dtype.
        start: The offset of the first byte from the start of the data.
        end: The offset after the last byte.
    """

    name: str
    word: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The content of a header.

    Attributes:
        metadata: The strings in ``__metadata__``, or None if the key is missing.
        entries: The tensors in the order of the header.
        data_offset: The offset of the data in the file.
    """

    metadata: dict[str, str] | None
    entries: tuple[Entry, ...]
    data_offset: int


def check_nesting(data: bytes) -> None:
    """Raise RecursionError if the JSON `data` is nested too deeply.

    Python's parser needs a stack for nested JSON. If the stack is small, as in a browser, the process would end. The
    parser also accepts UTF-16 and UTF-32, in which bytes of a text can look like the text's end.
    """
    if not (encoding := json.detect_encoding(data)).startswith("utf-8"):
        with contextlib.suppress(UnicodeDecodeError):  # the parser raises the same error
            data = data.decode(encoding, "surrogatepass").encode(errors="replace")
    if _may_be_deep(data):
        outside_of_texts = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
        if _may_be_deep(b"".join(outside_of_texts)):
            raise RecursionError("nested too deeply")


def _may_be_deep(data: bytes) -> bool:
    """Return whether `data` may have more than ``LIMITS.nesting`` brackets open at once.

    The brackets are counted by windows, so the answer True may be wrong, but the answer False never is.
    """
    depth = 0
    for start in range(0, len(data), _WINDOW):
        part = data[start : start + _WINDOW]
        opened = part.count(b"[") + part.count(b"{")
        if depth + opened > LIMITS.nesting:
            return True
        depth += opened - part.count(b"]") - part.count(b"}")
    return False


def read_header(source: Readable) -> Header:
    """Return the header of `source`, checked against the size of the file.

    An entry with a defect is reported as a fault and left out.

    Raises:
        MalformedError: The header is damaged, or the file is shorter than its tensors.
        UnsupportedError: A dtype or a field is unknown. This is also reported as a fault of the entry.
        LimitError: The header is nested too deeply or too large.
    """
    return _Reader(source, f"{source.path}: safetensors header").header()


class StrictJson:
    """A JSON reader that refuses data which two parsers could read differently, or which takes too much memory.

    Attributes:
        title: The name of the data in messages.
        word: The name of the data in messages that begin with the path of its file.
        integer: A method of the subclass that returns the value of an integer, written in digits, or raises an error.
        number: The same for a fraction, a power, an infinity or NaN.
    """

    title = word = "the index"
    integer: Callable[[str], int]
    number: Callable[[str], Any]

    def __init__(self, source: Readable, where: object, hint: str | None = None) -> None:
        self.source = source
        self.where, self.hint = where, hint  # of errors

    def error(self, what: str, **facts: Any) -> MalformedError:
        """Return a MalformedError with the message `what`. `facts` are its other arguments."""
        return MalformedError(what, **{"where": self.where, "hint": self.hint, **facts})

    def fail(self, what: str, **facts: Any) -> NoReturn:
        """Raise the error of :meth:`error`."""
        raise self.error(what, **facts)

    def json(self, raw: bytes, *, commas: int) -> Any:
        """Return the value of the JSON in `raw`.

        Raises LimitError if there are more than `commas` commas, apart from those in shapes, or too many brackets or
        quotes, and the error of :meth:`fail` if `raw` is not JSON in UTF-8.
        """
        brackets, quotes = raw.count(b"[") + raw.count(b"{"), raw.count(b'"')
        many = raw.count(b",") > commas + LIMITS.rank * brackets
        if many or brackets > LIMITS.header_brackets or quotes > LIMITS.header_quotes:
            what = f"{self.title} describes more data than a million tensors need"
            raise LimitError(what, where=self.source.path)
        try:
            text = raw.decode()
            check_nesting(raw)
            return json.loads(
                text,
                object_pairs_hook=self.object,
                parse_int=self.integer,
                parse_float=self.number,
                parse_constant=self.number,
            )
        except UnicodeDecodeError as error:
            self.fail(f"{self.word} is not UTF-8", got=f"byte {error.start}")
        except json.JSONDecodeError as error:
            self.fail(f"{self.word} is not JSON: {error.msg}", got=f"character {error.pos}")
        except RecursionError:
            raise LimitError(f"{self.title} is nested too deeply", where=self.source.path) from None

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return a JSON object from its key-value `pairs`.

        Raises the error of :meth:`fail` if a key occurs twice or is not valid.
        """
        if len(result := dict(pairs)) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)
            self.fail(f"{self.word} contains a key twice", got=repr(twice[0][0]))
        for key in result:
            self.check_text(key)
        return result

    def check_text(self, text: str) -> None:
        """Raise the error of :meth:`fail` if `text` contains half of a surrogate pair, which UTF-8 cannot encode."""
        if not is_text(text):
            self.fail("half of a surrogate pair is not text", got=repr(text))


class _Reader(StrictJson):
    """A reader of one header, which reports the faults of its entries."""

    title, word = "the header", "it"

    def header(self) -> Header:
        """Read, check and return the complete header. See :func:`read_header`."""
        size = self.source.size
        if size < _LENGTH:
            self.fail("the file is too short", expected=f"at least {_LENGTH} bytes", got=size)
        length = int.from_bytes(self.source.read(0, _LENGTH), "little")
        if length > LIMITS.safetensors_header:
            self.fail("it is too long", expected=f"at most {LIMITS.safetensors_header:,} bytes", got=length)
        data_offset = _LENGTH + length
        if data_offset > size:
            self.fail(
                f"the file ends inside it: {count(data_offset - size, 'byte')} of it and all tensors are missing",
                expected=f"{data_offset:,} bytes",
                got=f"{size:,}",
                hint=DOWNLOAD_AGAIN,
            )
        work().grant(length, self.source.path)
        top = self.parsed(self.source.read(_LENGTH, length))
        metadata = None
        with self.source.faults:
            metadata = self.metadata(top.pop(METADATA, None))
        entries = []
        for name, value in seen("header", top.items(), len(top)):
            try:  # report each bad entry and go on
                entries.append(self.entry(name, value))
            except InputError as error:
                self.source.faults.found(error)
        if len(entries) == len(top):  # otherwise a hole may be the data of a tensor that was not read
            self.check_data(entries, size, data_offset)
        return Header(metadata, tuple(entries), data_offset)

    def parsed(self, raw: bytes) -> dict[str, Any]:
        """Return the JSON object in `raw`, whose entries are not checked yet.

        Raises MalformedError if it is not an object.
        """
        start = raw.lstrip(_SPACES)[:1]
        if start != b"{":
            self.fail("it is not a JSON object", expected="{", got=start or "nothing")
        top = self.json(raw, commas=LIMITS.header_commas)
        assert isinstance(top, dict)
        return top

    def integer(self, digits: str) -> int:
        """Return the integer written as `digits`. Raises MalformedError if it is negative or at least 2^64."""
        if len(digits) > 20 or not 0 <= (number := int(digits)) < LIMITS.header_number or digits[0] == "-":
            self.fail("a number is negative or too large", expected="0 to 2^64 - 1", got=digits)
        return number

    def number(self, digits: str) -> NoReturn:
        """Raise MalformedError: a header contains no numbers with a fraction or an exponent."""
        self.fail("a number is not an integer", got=digits)

    def metadata(self, value: Any) -> dict[str, str] | None:
        """Return the strings in `value`, the content of ``__metadata__``, or None if `value` is None.

        Raises MalformedError if it is not an object of strings.
        """
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self.fail(f"{METADATA} is not an object of strings")
        for text in value.values():
            self.check_text(text)
        return value

    def entry(self, name: str, value: Any) -> Entry:
        """Return the entry `name`, which `value` describes.

        Raises MalformedError if a field is wrong or the number of bytes does not fit the shape, and UnsupportedError if
        the dtype or a field is unknown.
        """
        if not isinstance(value, dict) or not value.keys() >= _FIELD_SET:
            got = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            self.fail(f"{name!r} does not describe a tensor", expected=", ".join(_FIELDS), got=got)
        if len(value) > len(_FIELDS) and (more := value.keys() - _FIELD_SET):
            what = f"{name!r} has fields that are not known to this version"
            raise UnsupportedError(what, where=self.where, got=some(sorted(more)))
        word, shape, offsets = (value[field] for field in _FIELDS)
        if not isinstance(word, str):
            self.fail(f"{name!r} has an unknown dtype", got=type(word).__name__)
        if word not in BY_WORD:
            self.check_text(word)
            raise UnsupportedError(f"{name!r} has an unknown dtype", where=self.where, got=word)
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self.fail(f"{name!r} has no valid shape and data_offsets", expected="[n, ...] and [start, end]")
        entry = Entry(name, word, tuple(shape), *offsets)
        nbytes = self.nbytes(entry)
        if entry.end - entry.start != nbytes:
            self.fail(
                f"{name!r} has a number of bytes that does not match its shape",
                expected=nbytes,
                got=entry.end - entry.start,
            )
        return entry

    def nbytes(self, entry: Entry) -> int:
        """Return the number of bytes of `entry`, from its dtype and shape.

        Raises MalformedError if the number is too large, or if the bits of a packed dtype do not fill whole bytes.
        """
        dtype = BY_WORD[entry.word]
        bits = 1
        for factor in (*entry.shape, 8 * dtype.itemsize // dtype.packed):
            bits *= factor
            if bits >= LIMITS.header_number:
                self.fail(f"{entry.name!r} has too many elements", got=entry.shape)
        if bits % 8:
            self.fail(f"{entry.name!r} does not fill whole bytes", got=f"{entry.word} of shape {entry.shape}")
        return bits // 8

    def check_data(self, entries: Iterable[Entry], size: int, data_offset: int) -> None:
        """Report a fault unless every byte of the file from `data_offset` on belongs to exactly one of `entries`.

        `size` is the size of the file. Raises MalformedError if the file is too short.
        """
        report = self.source.faults.found
        at = 0
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
            if entry.start != at:
                what = f"the data has a hole or an overlap at {entry.name!r}"
                report(self.error(what, expected=at, got=entry.start))
            at = max(at, entry.end)
        end = data_offset + at
        expected, got = f"{end:,} bytes", f"{size:,}"
        if end > size:
            what = f"the file was truncated: {count(end - size, 'byte')} of {end:,} missing"
            self.fail(what, expected=expected, got=got, hint=DOWNLOAD_AGAIN)
        if end < size:
            report(self.error(f"{count(size - end, 'byte')} after the last tensor", expected=expected, got=got))


def _are_counts(value: Any) -> bool:
    """Return whether `value` is a list of integers. The JSON reader has refused negative ones already."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def is_text(string: str) -> bool:
    """Return whether `string` can be written as UTF-8: it contains no half of a surrogate pair."""
    return string.isascii() or not any("\ud800" <= c <= "\udfff" for c in string)


def header_bytes(metadata: dict[str, str] | None, entries: Iterable[Entry], *, like: int | None = None) -> bytes:
    """Return the length and the header of a new file, padded with spaces so that the data starts at a multiple of 8.

    Args:
        metadata: The strings for ``__metadata__``, or None to leave the key out.
        entries: The tensors, in the order of the header.
        like: A position. The data starts at the same position in a filesystem block, so that it can share blocks with
            another file whose data starts at `like`. Ignored if `like` is not a multiple of 8.

    Raises LimitError if the header is too long.
    """
    top: dict[str, object] = {} if metadata is None else {METADATA: metadata}
    for entry in entries:
        top[entry.name] = {"dtype": entry.word, "shape": entry.shape, "data_offsets": (entry.start, entry.end)}
    text = json.dumps(top, ensure_ascii=False, separators=(",", ":")).encode()
    wanted, modulus = (0, _ALIGNMENT) if like is None or like % _ALIGNMENT else (like, FILESYSTEM_BLOCK)
    text += b" " * ((wanted - _LENGTH - len(text)) % modulus)
    what = "the names and shapes are too long for a safetensors header"
    check_limit(what, len(text), LIMITS.safetensors_header, "bytes")
    return len(text).to_bytes(_LENGTH, "little") + text
