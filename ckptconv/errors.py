"""The exceptions, and functions that format texts in messages.

An exception is one line of text and has its parts as data.

CkptconvError
├── UsageError          the request contradicts itself or cannot be understood (a ValueError too)
│   └── ArgumentTypeError   an argument has a wrong type, or no argument has that name (a TypeError too)
├── InputError          something is wrong with the input
│   ├── MissingInputError   it does not exist (a FileNotFoundError too)
│   ├── MalformedError      it breaks the rules of its format, or can be read in two ways
│   ├── LimitError          it needs more memory, time or nesting than ckptconv allows
│   ├── UnsupportedError    it is valid, but this version cannot handle it
│   ├── DangerousError      the output would contain code that no checkpoint needs
│   └── UnreadableError     its bytes could not be read, so nothing is known about them
│       ├── InputChangedError   it changed while it was being read
│       └── TransferError       a server, or the connection to it, failed or gave a wrong answer
├── MissingTorchError   the request needs torch, which is not installed (an ImportError too)
├── DeviceUnavailable   tensors would go to a device that torch does not have here
├── RefusedError        the request would lose data or surprise the user
│   ├── TargetExistsError   the output exists (a FileExistsError too)
│   ├── CollisionError      two names would become the same name
│   └── NoMatchError        a filter or prefix matches nothing, probably because of a typo
│       └── UnknownDeviceError  a mapping of a word that is not a device's name (a UsageError too)
└── OutputError         the system could not write; the old output is unchanged
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

#: The hint for a damaged file.
DOWNLOAD_AGAIN = "download or copy it again"
_LONGEST_FACT = 400  # characters; several names and their numbers
_LONGEST_NUMBER = 1000  # bits
_LONGEST_PART = 8000  # characters; a list of some hundred names, and not more than a terminal keeps
_SCHEME = r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{1,30}:/+)"
_AFTER_SCHEME = r"([^/?#\s]*)([^?#\s]*)(\S*)"
_NO_PORT = r"\[[^\]]*|(?:\[[^\]]*\]|[^:\[]*):[0-9]*[^0-9'\"<>),;.].*"
_CLOSING = "'\"<>),;."  # characters that end a URL in a sentence
_KEYED = ("s3:", "hf:", "file:")  # schemes in which a question mark is part of the path


def printable(text: object) -> str:
    """Return `text` with control, format and unpaired surrogate characters escaped, safe to send to a terminal."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def redacted(text: str) -> str:
    """Return `text` without the user names, passwords, queries and fragments of the URLs in it.

    Malformed URLs are included.
    """
    if ":/" not in text:
        return text
    import re  # few messages need it

    before, *found = re.split(_SCHEME, text)
    parts, in_query = [before], False
    for scheme, rest in zip(found[::2], found[1::2], strict=True):
        kept, ends_in_query = _without_secrets(scheme, f"?{rest}" if in_query else rest)
        parts.append(kept if in_query else scheme + kept)
        in_query = ends_in_query
    return text if (result := "".join(parts)) == text else result  # a message that has parts keeps them


def _without_secrets(scheme: str, rest: str) -> tuple[str, bool]:
    """Remove the secrets of a URL from `rest`, the text after its `scheme`.

    Return the new text, and whether `rest` ends inside the query of the URL. Then the next scheme may be a value of
    that query.
    """
    import re

    found = re.match(_AFTER_SCHEME, rest)
    assert found
    host, path, query = found.groups()
    if "@" not in host and re.fullmatch(_NO_PORT, host):  # a password with a slash, a question mark or a space in it
        return _without_secrets(scheme, rest.rpartition("@")[2] if "@" in rest else "…" + rest[len(host) :])
    if query and not scheme.lower().startswith(_KEYED):
        is_open = found.end() == len(rest)
        query = query[len(query.rstrip(_CLOSING)) :]
        return host.rpartition("@")[2] + path + query + rest[found.end() :], is_open
    return host.rpartition("@")[2] + path + query + rest[found.end() :], False


def size(nbytes: int) -> str:
    """Return `nbytes` as text in decimal units (kB, MB), as disks and the Hub use them, with three digits."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = next((power for power in (1, 2, 3) if nbytes < 999.5 * 1000**power), 4)
    return f"{nbytes / 1000**power:.3g} {' kMGT'[power]}B"


def count(n: int, noun: str) -> str:
    """Return `n` with `noun`, in the plural unless `n` is 1."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def some(words: Sequence[str], most: int = 3) -> str:
    """Return the first `most` of `words`, joined by commas, and the number of the others, if there are any."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def at_path(path: str) -> str:
    """Return `path` after the word "at", for use after a noun. Return an empty text for the root."""
    return "" if path == "." else f" at {path}"


def _fact(fact: object, most: int = _LONGEST_FACT) -> str:
    """Return `fact` as text. If it is longer than `most`, its middle is replaced: names in files can have megabytes."""
    text = str(fact)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _sayable(fact: object) -> object:
    """Return `fact`. An integer with more digits than Python prints is replaced by a text with its size in bits."""
    if isinstance(fact, int) and fact.bit_length() > _LONGEST_NUMBER:
        return f"an integer of {fact.bit_length():,} bits"
    return fact


class CkptconvError(Exception):
    """The base class of the exceptions. ``str(error)`` is one printable line with all parts.

    No part contains the password or the query of a URL.

    Attributes:
        what: What went wrong.
        where: The file, and the position in it.
        expected: The expected value.
        got: The value that was found.
        hint: What the user can do or type next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.hint = what, where, hint
        self.expected = _sayable(expected)
        self.got = _sayable(got)
        super().__init__(self.what)

    def __setattr__(self, name: str, value: object) -> None:
        """Set the attribute. If `value` is a text, secrets of URLs in it are removed."""
        super().__setattr__(name, redacted(value) if isinstance(value, str) else value)

    def __str__(self) -> str:
        hint = f"; {_fact(self.hint, _LONGEST_PART)}" if self.hint else ""
        return self.verdict + printable(hint)

    @property
    def verdict(self) -> str:
        """The printable line, without the hint."""
        line = _fact(self.what, _LONGEST_PART)
        if self.where is not None:
            line = f"{_fact(self.where, _LONGEST_PART)}: {line}"
        facts = [
            f"{word} {_fact(fact)}"
            for word, fact in (("expected", self.expected), ("got", self.got))
            if fact is not None
        ]
        if facts:
            line += f" ({', '.join(facts)})"
        return printable(line)


class _OfPath(OSError):
    """A base class for errors that have ``errno`` and ``filename``, as Python's own errors about files have."""

    where: object

    @property
    def filename(self) -> object:
        """The path, under the name that OSError uses."""
        return self.where

    @filename.setter
    def filename(self, path: object) -> None:
        """Set the path, as packages do that pickle errors with their tracebacks (tblib)."""
        self.where = path


class UsageError(CkptconvError, ValueError):
    """The request contradicts itself or cannot be understood; nothing was read."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a function has a wrong type, or the function has no argument of that name."""


class InputError(CkptconvError):
    """Something is wrong with the input."""


class MissingInputError(InputError, _OfPath, FileNotFoundError):
    """The input does not exist."""

    errno = errno.ENOENT


class MalformedError(InputError):
    """The input breaks the rules of its format, or can be read in two ways."""


class LimitError(InputError):
    """The input asks for more memory, time or nesting than :mod:`ckptconv.limits` allows."""


def check_limit(what: str, got: int, most: int, unit: str = "", *, where: object = None) -> None:
    """Raise LimitError with the message `what` if the number `got` is greater than `most`. `unit` is its unit."""
    if got > most:
        raise LimitError(what, where=where, expected=f"at most {most:,} {unit}".rstrip(), got=f"{got:,}")


class UnsupportedError(InputError):
    """The input is valid, but this version cannot handle it."""


class DangerousError(InputError):
    """The input calls a function that no checkpoint needs, and the output would contain that call."""


class UnreadableError(InputError):
    """A disk, a file object or a server failed, so bytes of the input could not be read and are unknown."""


class InputChangedError(UnreadableError):
    """The input's size, modification time or identity changed while it was being read."""


class TransferError(UnreadableError):
    """The server that has the input, or the connection to it, failed or gave a wrong answer."""


class MissingTorchError(CkptconvError, ImportError):
    """The request needs torch, which is not installed or cannot be imported."""


def require_torch(what: str, where: object = None) -> None:
    """Raise MissingTorchError if torch is not installed. torch is not imported.

    `what` is the operation that needs torch, and `where` the file, both for the error.
    """
    import importlib.util

    try:
        if "torch" in sys.modules or importlib.util.find_spec("torch"):
            return
    except ImportError:  # a finder of another package raised it
        pass
    raise MissingTorchError(
        f"torch is needed for {what}, and is not installed", where=where, hint='pip install "ckptconv[torch]"'
    )


class DeviceUnavailable(CkptconvError):
    """Tensors would go to a device that torch does not have here."""


class RefusedError(CkptconvError):
    """The request would lose data or surprise the user. Nothing was written."""


class TargetExistsError(RefusedError, _OfPath, FileExistsError):
    """The output exists, and the request does not allow to replace it."""

    errno = errno.EEXIST


class CollisionError(RefusedError):
    """Two names would become the same name."""


class NoMatchError(RefusedError):
    """A prefix, filter or path matches nothing.

    Attributes:
        unmatched: The name of a field of :class:`~ckptconv.edits.options.Edits`, and the item in it that matches
            nothing. None if the request makes no sense without the item. In a batch, the item may match something in
            another file.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
        unmatched: tuple[str, object] | None = None,
    ) -> None:
        super().__init__(what, where=where, expected=expected, got=got, hint=hint)
        self.unmatched = unmatched


class UnknownDeviceError(NoMatchError, UsageError):
    """A mapping replaces a word that is not a device's name, and no tensor is on such a device."""


class OutputError(CkptconvError):
    """The system could not write the output. An old output is unchanged unless the message says otherwise."""
