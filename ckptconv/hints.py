"""What messages suggest, as data: options and commands of ckptconv, in the words of a shell or of Python.

A message is in the words of Python if it is made while a public function runs, and in those of a shell otherwise.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from ckptconv.errors import ArgumentTypeError
from ckptconv.guesses import PLACES, keyword_for, unneeded
from ckptconv.light_dataclass import dataclass
from ckptconv.system import calls

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LONGEST = 80  # characters of a value that is shown
#: The name of a file object without a name in messages. In a command and a call it is a placeholder.
UNNAMED = "<file object>"
#: The start of advice by which another program unpickles the input, which can run any code.
TRUSTED = "if you trust who made it, for it can run code"
#: Options that only commands have, and the attribute or method of a result that has what they show.
_TERMINAL_ONLY = {"tree": "tensors", "json": "as_dict()", "verbose": "as_dict()"}
#: Flags that are not the keyword with dashes.
FLAGS = {"verbose": "-v", "sizes": "--size"}
#: One item for each public function that runs, in any thread.
_public_calls: list[None] = []


class Placeholder(str):
    """A word that the reader replaces, such as OUT."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Option:
    """An option and its value.

    Attributes:
        keyword: The name of the keyword.
        value: A text or number; a tuple of texts or pairs for an option that can be repeated; True for a flag; None if
            the option is only named. The devices of ``map_location`` are a text or pairs.
    """

    keyword: str
    value: Any = True

    def words(self) -> list[tuple[str, ...]]:
        """Return what a user types for it: each flag with its value."""
        flag = FLAGS.get(self.keyword, f"--{self.keyword.replace('_', '-')}")
        if self.value is None or self.value is True:
            return [(flag,)]
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if self.keyword == "map_location":
            return [("--map", "=".join(value)) if isinstance(value, tuple) else ("--to", value) for value in values]
        return [(flag, *value) if isinstance(value, tuple) else (flag, str(value)) for value in values]

    def in_python(self) -> str:
        """Return the keyword with its value. For an option that only commands have, return what replaces it."""
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
    """A command of ckptconv: its name, ``convert_many`` for a batch, and its paths and options."""

    name: str
    arguments: tuple[str | os.PathLike[str] | Option, ...]

    def words(self) -> list[tuple[str, ...]]:
        """Return what a user types: each flag with its value, every other word by itself."""
        words: list[tuple[str, ...]] = [("ckptconv",), (self.name.removesuffix("_many"),)]
        for argument in self.arguments:
            words += argument.words() if isinstance(argument, Option) else [(_no_option(argument),)]
        return words

    def in_python(self) -> str:
        """Return the call that does the same."""
        arguments = ", ".join(
            argument.in_python() if isinstance(argument, Option) else repr(placed(argument))
            for argument in self.arguments
            if not (isinstance(argument, Option) and argument.keyword in _TERMINAL_ONLY)
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
    """Make a message of a command. A path object that begins with a dash gets the current folder before it."""
    return Message(Command(name, arguments))


def command_line(name: str, *arguments: str | os.PathLike[str] | Option) -> Message:
    """Return :func:`command` as it is typed, which a public function gives so too."""
    return Message(Command(name, arguments), is_typed=True)


def joined(*messages: str | None, separator: str = "; ") -> str:
    """Join those of `messages` that are neither empty nor None, at least one, and keep their parts."""
    return functools.reduce(lambda text, message: text + separator + message, filter(None, messages))


def options_in(message: str | None) -> dict[str, Any]:
    """Return the values of the options that `message` contains outside of commands, by keyword."""
    return {part.keyword: part.value for part in _parts(message or "") if isinstance(part, Option)}


def command_in(message: str | None) -> Command | None:
    """Return the first command in `message`, or None."""
    return next((part for part in _parts(message or "") if isinstance(part, Command)), None)


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
    import inspect

    return [*inspect.signature(function).parameters]


def _check_paths(function: Callable[..., Any], *args: object, **kwargs: object) -> None:
    """Raise ArgumentTypeError if an argument of `function` has the name of a path and is not one."""
    for name, value in (*zip(_keywords(function), args, strict=False), *kwargs.items()):
        if name in PLACES and not isinstance(value, (str, bytes, os.PathLike)):
            raise ArgumentTypeError(f"{name} must be a path, not {value!r}")


def unknown_keyword(function: str, guess: str, value: object, known: Sequence[str]) -> ArgumentTypeError:
    """Return the error for the unknown keyword `guess` with `value` of a `function` that has the keywords `known`.

    Its hint is the keyword that is probably meant, or why none is needed.
    """
    hint = None
    if why := unneeded(guess, known):
        hint = f"leave it out: {why}"
    elif meant := keyword_for(guess, value, known):
        keyword, meant_value = meant
        shown = repr(meant_value)
        hint = "did you mean: " + (keyword if meant_value is None or len(shown) > _LONGEST else f"{keyword}={shown}")
    return ArgumentTypeError(f"{function}() got an unexpected keyword argument {guess!r}", hint=hint)


# Commands for a shell


def shell(*words: str | os.PathLike[str]) -> str:
    """Return a command of these `words`.

    No program in a message may take code or settings from the current folder or from a file's folder, which another
    user may have filled. So messages do not suggest git, and Python is run by :func:`python_command`.
    """
    return calls.command_line([_no_option(word) for word in words])


def python_command(*words: str | os.PathLike[str]) -> str:
    """Return a command that runs Python with these `words`, ``-c`` or ``-m`` first.

    ``-I`` keeps the current folder off the search for modules. Python 3.10 has no ``-P``.
    """
    return shell("python", "-I", *words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """Return a command that saves the value of the Python `expression`, which needs `modules` in addition to torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return python_command("-c", program.replace('"', calls.QUOTE))


def literal(path: str | os.PathLike[str]) -> str:
    """Return `path` as a Python literal in the quotes that a word of a shell command can contain."""
    text = json.dumps(os.fspath(path), ensure_ascii=False)
    if calls.QUOTE == '"':
        return text
    return "'" + text[1:-1].replace("'", "\\x27").replace('\\"', "\\x22") + "'"


def placed(word: str | os.PathLike[str]) -> str:
    """Return `word` as text, or a placeholder for a file object without a name."""
    text = os.fspath(word)
    return Placeholder("FILE") if text == UNNAMED else text


def _no_option(word: str | os.PathLike[str]) -> str:
    """Return `word`, a text or path. A path gets the current folder before it if a program could misread it.

    A program could take its start for an option (-), a list of paths (@) or, as tar does, another machine (host:).
    """
    if isinstance(word, str):
        return word
    path = placed(word)
    host = ":" in path.partition("/")[0] and "://" not in path and not os.path.splitdrive(path)[0]
    return f"./{path}" if path.startswith(("-", "@")) or host else path
