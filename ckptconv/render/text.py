"""Functions that all renderers use: styles, widths, line breaks, escapes, labelled facts and commands."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckptconv.errors import CkptconvError, printable
from ckptconv.hints import Command, Message
from ckptconv.lazy_regex import regex
from ckptconv.system import calls

_CLAUSE = regex(r"""(?<!\w)'[^']*'|"[^"]*"|; """)
_LONGEST = 8000  # characters of a line of a hint, which can name anything in a file
_INDENT = "  "
_LABEL = 14  # columns
_NARROWEST = 40  # columns; a narrower terminal gets lines for 40
_TIE = "\N{NO-BREAK SPACE}"  # joins words that must stay on one line; printable() escapes it in texts from files
# Patterns are plain texts, so that they are compiled only for a terminal, because compiling is slow.
_TOGETHER = r"(?<=\d) (?=[kMGT]?B\b)| (?=[×x]\d)"  # a size and its unit; a word and the number of times that it occurs
_ASCII = str.maketrans(
    {"×": "x", "…": "...", "→": "->", "←": "<-", "─": "-", "–": "-", "—": "--", "·": "*", "≤": "<=", "≥": ">="}
)
_STYLES = {
    "good": {"fg": "green"},
    "bad": {"fg": "red", "bold": True},
    "command": {"fg": "cyan"},
    "device": {"fg": "yellow"},
    "whole": {"fg": "green"},
    "half": {"fg": "blue"},
    "byte": {"fg": "magenta"},
    "title": {"bold": True},
    "quiet": {"dim": True},
}
_SEGMENT = r"(?:[^./ ]| (?=[×x][0-9]))*(?:[./ ]|$)"


class Style(NamedTuple):
    """The properties of the output: a terminal with `width` columns, or a program if `width` is None.

    `colour` allows colours. Without `unicode`, the text is ASCII.
    """

    width: int | None = None
    colour: bool = False
    unicode: bool = True

    @property
    def columns(self) -> int:
        """The width of the lines, at least 40."""
        return max(self.width or 0, _NARROWEST)

    def text(self, raw: object) -> str:
        """Return `raw` as printable text. Control characters are escaped, because the text may come from a file."""
        text = str(raw)
        if text.isascii():
            return text if text.isprintable() else printable(text)
        text = printable(text)
        return text if self.unicode else text.translate(_ASCII).encode("ascii", "backslashreplace").decode()

    def paint(self, text: str, style: str | None) -> str:
        """Return `text` in the colours of `style`, a key of ``_STYLES``.

        Return it unchanged without colours or `style`.
        """
        if not (self.colour and style and text):
            return text
        from click import style as styled  # only output in colours needs it

        return styled(text, **_STYLES[style])  # type: ignore[arg-type]  # the table has the keywords of style()


#: The style of ``str()``.
PLAIN = Style()


# Widths and breaks


def cells(text: str) -> int:
    """Return the number of terminal columns that `text` takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


@lru_cache(maxsize=4096)
def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def rows_of(lines: Iterable[str], style: Style) -> int:
    """Return the number of terminal rows that `lines` need. A line that is wider than the terminal needs several."""
    return sum(max(1, -(-cells(re.sub(r"\x1b\[[0-9;]*m", "", line)) // style.columns)) for line in lines)


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` with spaces up to `width` columns, after the text or, if `right` is set, before it."""
    gap = " " * (width - cells(text))
    return gap + text if right else text + gap


def wrapped(text: str, room: int) -> list[str]:
    """Return `text` in lines of at most `room` columns, broken at spaces.

    A word that is too long for a line is broken too.
    """
    lines, line, used = [], "", 0
    for word in text.split(" "):
        width = cells(word)
        if line and used + 1 + width > room:
            lines.append(line)
            line = ""
        if width > room:
            *full_lines, word = wrapped(word.replace(_TIE, " "), room) if _TIE in word else broken(word, room)
            lines += full_lines
            width = cells(word)
        line, used = (f"{line} {word}", used + 1 + width) if line else (word, width)
    return [line.replace(_TIE, " ").rstrip() for line in (*lines, line)]


def broken(name: str, room: int, *, hanging: int = 0) -> list[str]:
    """Return `name` in lines of at most `room` columns, broken after dots, slashes and spaces if possible.

    All lines but the first are indented by `hanging` columns.
    """
    lines, line, used, most = [], "", 0, max(1, room)
    rest = max(1, room - hanging)
    for segment in re.findall(_SEGMENT, name):
        width = cells(segment.rstrip())
        if line and segment.strip() and used + width > most:
            lines.append(line.rstrip())
            line, used, most = "", 0, rest
        if width > most:
            *heads, segment = _cut(segment, most, rest)
            lines += heads
            most = rest
        line += segment
        used += cells(segment)
    first, *others = [*lines, line.rstrip()]
    return [first, *(" " * hanging + other for other in others)]


def _cut(text: str, most: int, rest: int) -> list[str]:
    """Return `text` in pieces of at least one character: the first of at most `most` columns, the others of at most
    `rest`.

    A space at the end of `text` needs no column.
    """
    pieces, start, used = [], 0, 0
    for i, character in enumerate(text.rstrip()):
        used += _cells_of(character)
        if used > most and i > start:
            pieces.append(text[start:i])
            start, used, most = i, _cells_of(character), rest
    return [*pieces, text[start:]]


def fitting(text: str, room: int, style: Style, *, end: bool = False) -> str:
    """Return `text`, cut to `room` columns with a mark if it is longer.

    The beginning is kept, or with `end` the end.
    """
    if cells(text) <= room:
        return text
    mark = style.text("…")
    room -= cells(mark)
    kept = 0
    for character in reversed(text) if end else text:
        room -= _cells_of(character)
        if room < 0:
            break
        kept += 1
    return mark + text[len(text) - kept :] if end else text[:kept] + mark


# Order


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key for `name` that puts layer 2 before layer 10."""
    return [
        (len(digits := part.lstrip("0")), digits) if i % 2 else (0, part)
        for i, part in enumerate(re.split(r"([0-9]+)", name))
    ]


# Facts and commands


def headline(style: Style, path: str, what: str) -> Iterator[str]:
    """Yield the first line: `path` and `what`. If both do not fit into one line, `what` begins a new one."""
    path, what = f"{style.text(path)}:", style.text(what)
    if style.width is None or cells(path) + 1 + cells(what) <= style.columns:
        yield style.paint(f"{path} {what}", "title")
        return
    for line in (
        *broken(path, style.columns, hanging=2),
        *(_INDENT + line for line in wrapped(what, style.columns - 2)),
    ):
        yield style.paint(line, "title")


def fact(
    style: Style,
    label: str,
    what: str | Sequence[str],
    *,
    separator: str = ", ",
    paint: Callable[[str], str] = lambda line: line,
) -> Iterator[str]:
    """Yield the lines of a fact: a `label` and a text.

    Args:
        style: The style of the output.
        label: The label.
        what: A sentence, or several items. An item is broken only if it is longer than a line.
        separator: The text between two items.
        paint: Applied to the text of each line on a terminal.
    """
    if style.width is None:
        text = style.text(what) if isinstance(what, str) else separator.join(map(style.text, what))
        yield f"{_INDENT}{label:<{_LABEL}}{text}"
        return
    if isinstance(what, str):
        text = re.sub(_TOGETHER, _TIE, style.text(what))
    else:
        text = separator.join(style.text(item).replace(" ", _TIE) for item in what)
    margin = len(_INDENT) + _LABEL
    first, *others = wrapped(text, style.columns - margin)
    yield _INDENT + style.paint(f"{label:<{_LABEL}}" if first else label, "quiet") + paint(first)
    for line in others:
        yield " " * margin + paint(line)


def command_lines(style: Style, command: Command) -> Iterator[str]:
    """Yield the lines of `command` as it is typed.

    If it is wider than the terminal, all lines but the last end in a backslash, so that it can be pasted. For shells
    that do not support this, it is one line. A flag and its value are on the same line. A word that is wider than the
    terminal is not broken.
    """
    indent = 2 * _INDENT
    line = ""
    typed = [calls.command_line(words, ascii_only=not style.unicode) for words in command.words()]
    if not calls.CONTINUED:
        every = [each for words in command.words() for each in words]
        typed = [calls.command_line(every, ascii_only=not style.unicode)]
    for word in typed:
        if style.width is not None and line and cells(indent + line + word) + 3 > style.columns:
            yield indent + style.paint(line, "command") + calls.CONTINUED
            indent, line = 4 * _INDENT, ""
        line = f"{line} {word}" if line else word
    yield indent + style.paint(line, "command")


def first_of(items: Iterable[str], most: int, *, hint: str = "") -> list[str]:
    """Return the first `most` of `items`. If there are more, add a text with their number, followed by `hint`."""
    every = list(items)
    rest = [f"… {len(every) - most:,} more{hint}"] if len(every) > most else []
    return every[:most] + rest


def error_lines(error: CkptconvError) -> Iterator[str]:
    """Yield the verdict of `error`, and below it the hint, with each command on a line of its own."""
    yield f"ckptconv: {error.verdict}"
    yield from (f"  {line[:_LONGEST]}" for line in hint_lines(error.hint))


def _clauses(text: str) -> list[str]:
    """Return `text` split at semicolons, except for those in quotes, which belong to commands."""
    cuts = [found for found in _CLAUSE.finditer(text) if found[0] == "; "]
    starts = [0, *(cut.end() for cut in cuts)]
    return [text[a:b] for a, b in zip(starts, [*(cut.start() for cut in cuts), len(text)], strict=True)]


def hint_lines(hint: str | None) -> list[str]:
    """Return `hint` as lines, split at semicolons. Each command is on an indented line of its own."""
    lines = [""]
    for part in hint.parts if isinstance(hint, Message) else (hint or "",):
        if isinstance(part, Command):
            lines += [f"  {Message(part)}", ""]
        else:
            first, *others = _clauses(part) if isinstance(part, str) else [f"{Message(part)}"]
            lines[-1] += first if lines[-1] else first.lstrip()
            lines += others
    return [line.rstrip() for line in lines if line.strip()]
