"""What messages suggest, as data: options and commands of ckptconv, in the words of a shell or of Python.

A message is in the words of Python if it is made while a public function runs, and in those of a shell otherwise.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from ckptconv.errors import ArgumentTypeError, printable
from ckptconv.guesses import PLACES, keyword_for, unneeded
from ckptconv.light_dataclass import dataclass

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LONGEST = 80  # characters of a value that is said
#: What a file object without a name is called in messages; in a command and a call it has a placeholder.
UNNAMED = "<file object>"
#: How advice starts that has another program unpickle the input, which can run any code.
TRUSTED = "if you trust who made it, for it can run code"
#: Options of commands that no function has, and what of a result has in Python what they show.
_TERMINAL_ONLY = {"tree": "tensors", "json": "as_dict()", "verbose": "as_dict()"}
_SHORT = {"verbose": "-v"}  # as they are said
#: One item for each public function that runs, in any thread.
_public_calls: list[None] = []


class Placeholder(str):
    """A word for what the reader puts in its place, such as OUT."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Option:
    """An option, called as the keyword is, and its value.

    The value is a text or number, or a tuple of texts or pairs for what can be given several times; True for a switch;
    None where the option is only named. The devices of ``map_location`` are a text or pairs.
    """

    keyword: str
    value: Any = True

    def words(self) -> list[tuple[str, ...]]:
        """What is typed for it: each flag with its value."""
        flag = _SHORT.get(self.keyword, f"--{self.keyword.replace('_', '-')}")
        if self.value is None or self.value is True:
            return [(flag,)]
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if self.keyword == "map_location":
            return [("--map", "=".join(each)) if isinstance(each, tuple) else ("--to", each) for each in values]
        return [(flag, *each) if isinstance(each, tuple) else (flag, str(each)) for each in values]

    def in_python(self) -> str:
        """The keyword with its value; what is an option of commands alone, in Python's way."""
        if self.keyword in _TERMINAL_ONLY:
            return _TERMINAL_ONLY[self.keyword]
        value = self.value
        if isinstance(value, tuple):
            of_pairs: Any = dict if self.keyword == "map_location" else list
            one = len(value) == 1 and isinstance(value[0], str)
            value = value[0] if one else of_pairs(value)
        return self.keyword if value is None else f"{self.keyword}={value!r}"


@dataclass(frozen=True)
class Command:
    """A command of ours: its name, ``convert_many`` for a batch, and its paths and options."""

    name: str
    arguments: tuple[str | os.PathLike[str] | Option, ...]

    def words(self) -> list[tuple[str, ...]]:
        """What is typed: each flag with its value, every other word by itself."""
        words: list[tuple[str, ...]] = [("ckptconv",), (self.name.removesuffix("_many"),)]
        for each in self.arguments:
            words += each.words() if isinstance(each, Option) else [(_no_option(each),)]
        return words

    def in_python(self) -> str:
        """The call that does the same."""
        arguments = ", ".join(
            each.in_python() if isinstance(each, Option) else repr(placed(each))
            for each in self.arguments
            if not (isinstance(each, Option) and each.keyword in _TERMINAL_ONLY)
        )
        if self.name == "convert_many":
            return f"ckptconv.convert_many(ckptconv.jobs_in({arguments}))"
        return f"ckptconv.{self.name}({arguments})"


class Message(str):
    """A text of parts, some of them options and commands.

    ``+`` adds a part. An f-string or ``join`` makes a text of it, in which the parts are lost: outside of
    :mod:`ckptconv.cli` and :mod:`ckptconv.render` the tests let none pass. In the words of Python it is pickled as a
    plain text. In those of a shell its parts are pickled, so that it can become one of Python in another process.
    """

    parts: tuple[str | Option | Command, ...]
    is_typed: bool
    is_shell: bool

    def __new__(cls, *parts: str | Option | Command, is_typed: bool = False) -> Message:
        """Make a message. `is_typed`: it is in the words of a shell, wherever it is made."""
        is_shell = is_typed or not _public_calls
        words = (
            part if isinstance(part, str) else shell(*chain(*part.words())) if is_shell else part.in_python()
            for part in parts
        )
        self = super().__new__(cls, "".join(words))
        self.parts, self.is_typed, self.is_shell = parts, is_typed, is_shell
        return self

    def __add__(self, other: str) -> Message:
        return Message(*self.parts, *_parts(other))

    def __radd__(self, other: str) -> Message:
        return Message(*_parts(other), *self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_typed:
            return functools.partial(Message, is_typed=True), self.parts
        return (Message, self.parts) if self.is_shell else (str, (str(self),))


def _parts(text: str) -> tuple[str | Option | Command, ...]:
    return text.parts if isinstance(text, Message) else (text,)


def option(keyword: str, value: object = True) -> Message:
    """Make a message of an option, which is then added to a text or to another message with ``+``."""
    return Message(Option(keyword, value))


def command(name: str, *arguments: str | os.PathLike[str] | Option) -> Message:
    """A command of ours as a message. A path that starts with a dash, and is no text, gets a folder."""
    return Message(Command(name, arguments))


def command_line(name: str, *arguments: str | os.PathLike[str] | Option) -> Message:
    """Return :func:`command` as it is typed, which a public function gives so too."""
    return Message(Command(name, arguments), is_typed=True)


def joined(*messages: str | None, separator: str = "; ") -> str:
    """Those of `messages` that there are, as one."""
    there = [each for each in messages if each]
    return functools.reduce(lambda text, each: text + separator + each, there)


def options_in(message: str | None) -> dict[str, Any]:
    """The values of the options that `message` names outside of commands, by keyword."""
    return {each.keyword: each.value for each in _parts(message or "") if isinstance(each, Option)}


def command_in(message: str | None) -> Command | None:
    """The first command of ours in `message`."""
    return next((each for each in _parts(message or "") if isinstance(each, Command)), None)


@contextmanager
def python_words() -> Iterator[None]:
    """Have messages that are made meanwhile, in any thread, speak of keywords and calls."""
    _public_calls.append(None)
    try:
        yield
    finally:
        _public_calls.pop()


def for_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function` as a public one: its messages are in the words of Python, also those about a keyword that it
    has not.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = _keywords(function) if kwargs else []
        for name, value in kwargs.items():
            if name not in known:
                raise unknown_keyword(function.__name__, name, value, known)
        try:
            with python_words():
                return function(*args, **kwargs)
        except ArgumentTypeError:
            raise
        except TypeError:  # of Python, which does not say the argument
            _check_paths(function, *args, **kwargs)
            raise

    return called


@functools.cache
def _keywords(function: Callable[..., Any]) -> list[str]:
    import inspect  # which costs those who need it not some milliseconds

    return [*inspect.signature(function).parameters]


def _check_paths(function: Callable[..., Any], *args: object, **kwargs: object) -> None:
    """Raise ArgumentTypeError where an argument of `function` that is to be a path is none."""
    for name, value in (*zip(_keywords(function), args, strict=False), *kwargs.items()):
        if name in PLACES and not isinstance(value, (str, bytes, os.PathLike)):
            raise ArgumentTypeError(f"{name} must be a path, not {value!r}")


def unknown_keyword(function: str, guess: str, value: object, known: Sequence[str]) -> ArgumentTypeError:
    """The error for the keyword `guess` of a `function` that has those `known`, with what is meant by it."""
    hint = None
    if why := unneeded(guess, known):
        hint = f"leave it out: {why}"
    elif meant := keyword_for(guess, value, known):
        keyword, said = meant
        shown = repr(said)
        hint = "is this meant: " + (keyword if said is None or len(shown) > _LONGEST else f"{keyword}={shown}")
    return ArgumentTypeError(f"{function}() got an unexpected keyword argument {guess!r}", hint=hint)


# Words of a shell, and of other programs


def shell(*words: str | os.PathLike[str]) -> str:
    """Return a command of these `words`.

    No program that a message names may take code or settings from the current folder or from a file's folder, which
    somebody else may have filled: git is out, and Python is for :func:`python_command`. Paths are :func:`_no_option`.
    """
    return " ".join(quoted(_no_option(word)) for word in words)


def python_command(*words: str | os.PathLike[str]) -> str:
    """Return a command that runs Python with these `words`, ``-c`` or ``-m`` first.

    ``-I`` keeps the current folder off the search for modules. Python 3.10 has no ``-P``.
    """
    return shell("python", "-I", *words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """A command that saves what the Python `expression` gives, which needs `modules` beside torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return python_command("-c", program)


def literal(path: str | os.PathLike[str]) -> str:
    """`path` as Python writes it, in the quotation marks that leave a shell's alone."""
    return json.dumps(os.fspath(path), ensure_ascii=False)


def placed(word: str | os.PathLike[str]) -> str:
    """`word` as text; a placeholder for what has no name."""
    text = os.fspath(word)
    return Placeholder("FILE") if text == UNNAMED else text


def _no_option(word: str | os.PathLike[str]) -> str:
    """Return `word`; a path with a folder, if a program could take its start for an option (-), for a list of paths (@)
    or, as tar does, for another machine (host:).
    """
    if isinstance(word, str):
        return word
    path = placed(word)
    host = ":" in path.partition("/")[0] and "://" not in path
    return f"./{path}" if path.startswith(("-", "@")) or host else path


def quoted(word: str, *, ascii_only: bool = False) -> str:
    """`word` for a shell; what cannot be shown is in the shell's own escapes, for a message would show it in others."""
    if printable(word) == word and (word.isascii() or not ascii_only):
        return shlex.quote(word)
    return f"$'{''.join(_escaped(each, ascii_only=ascii_only) for each in word)}'"


def _escaped(character: str, *, ascii_only: bool = False) -> str:
    """`character` as it stands between ``$'`` and ``'`` in a shell."""
    if printable(character) == character and character not in "\\'" and (character.isascii() or not ascii_only):
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
