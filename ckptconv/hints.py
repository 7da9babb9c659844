"""Options and commands in messages, as data. They are printed in the words of a shell or of Python.

A message that is created while a public function runs is in the words of Python, any other in those of a shell.
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

_LONGEST = 80  # characters of a value that is printed
#: The name of a file object without a name in messages. In a command and a call it is a placeholder.
UNNAMED = "<file object>"
#: The start of advice by which another program unpickles the input, which can run any code.
TRUSTED = "if you trust who made it, for it can run code"
#: Options that only commands have, and the attribute or method of a result that has the same information.
_TERMINAL_ONLY = {"tree": "tensors", "json": "as_dict()", "verbose": "as_dict()"}
#: Flags that are not the keyword with dashes.
FLAGS = {"verbose": "-v", "sizes": "--size"}
#: One item for each public function that is running, in any thread.
_public_calls: list[None] = []


class Placeholder(str):
    """A word that the user replaces, such as OUT. Its ``repr`` has no quotes."""

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
        """Return the option as it is typed in a shell: a list of flags, each with its value."""
        flag = FLAGS.get(self.keyword, f"--{self.keyword.replace('_', '-')}")
        if self.value is None or self.value is True:
            return [(flag,)]
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if self.keyword == "map_location":
            return [("--map", "=".join(value)) if isinstance(value, tuple) else ("--to", value) for value in values]
        return [(flag, *value) if isinstance(value, tuple) else (flag, str(value)) for value in values]

    def in_python(self) -> str:
        """Return the option as a keyword argument.

        For an option that only commands have, return the equivalent in Python.
        """
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
    """A command of ckptconv. Its name is ``convert_many`` for a batch. Its arguments are paths and options."""

    name: str
    arguments: tuple[str | os.PathLike[str] | Option, ...]

    def words(self) -> list[tuple[str, ...]]:
        """Return the command as it is typed in a shell: a flag together with its value, each other word by itself."""
        words: list[tuple[str, ...]] = [("ckptconv",), (self.name.removesuffix("_many"),)]
        for argument in self.arguments:
            words += argument.words() if isinstance(argument, Option) else [(_no_option(argument),)]
        return words

    def in_python(self) -> str:
        """Return the equivalent call in Python. Options that only commands have are left out."""
        arguments = ", ".join(
            argument.in_python() if isinstance(argument, Option) else repr(placed(argument))
            for argument in self.arguments
            if not (isinstance(argument, Option) and argument.keyword in _TERMINAL_ONLY)
        )
        if self.name == "convert_many":
            return f"ckptconv.convert_many(ckptconv.jobs_in({arguments}))"
        return f"ckptconv.{self.name}({arguments})"


class Message(str):
    """A text that contains options and commands as objects, its parts.

    ``+`` adds a part. An f-string or ``join`` returns a plain text without the parts. Tests forbid both outside of
    :mod:`ckptconv.cli` and :mod:`ckptconv.render`. A message in the words of Python is pickled as a plain text. A
    message in the words of a shell is pickled with its parts, so that another process can print it in the words of
    Python.
    """

    parts: tuple[str | Option | Command, ...]
    is_typed: bool
    is_shell: bool

    def __new__(cls, *parts: str | Option | Command, is_typed: bool = False) -> Message:
        """Create a message. With `is_typed`, it is always in the words of a shell."""
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
    """Return a message that consists of an option. It can be added to a text or to another message with ``+``."""
    return Message(Option(keyword, value))


def command(name: str, *arguments: str | os.PathLike[str] | Option) -> Message:
    """Return a message that consists of a command. A path object that begins with a dash gets ``./`` before it."""
    return Message(Command(name, arguments))


def command_line(name: str, *arguments: str | os.PathLike[str] | Option) -> Message:
    """Return :func:`command` in the words of a shell, even inside a public function."""
    return Message(Command(name, arguments), is_typed=True)


def joined(*messages: str | None, separator: str = "; ") -> str:
    """Return `messages` joined by `separator`, without those that are empty or None. Their parts are kept.

    At least one of them must be a text that is not empty.
    """
    return functools.reduce(lambda text, message: text + separator + message, filter(None, messages))


def options_in(message: str | None) -> dict[str, Any]:
    """Return the values of the options that `message` contains outside of commands, by keyword."""
    return {part.keyword: part.value for part in _parts(message or "") if isinstance(part, Option)}


def command_in(message: str | None) -> Command | None:
    """Return the first command in `message`, or None."""
    return next((part for part in _parts(message or "") if isinstance(part, Command)), None)


@contextmanager
def python_words() -> Iterator[None]:
    """Create messages in the words of Python inside this block, in all threads."""
    _public_calls.append(None)
    try:
        yield
    finally:
        _public_calls.pop()


def for_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function` as a public function: its messages are in the words of Python.

    The returned function also raises ArgumentTypeError with a hint for an unknown keyword, and for a path of a wrong
    type.
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
    """Raise ArgumentTypeError if an argument whose name is that of a path has another type.

    An argument called `path` can be a file object.
    """
    for name, value in (*zip(_keywords(function), args, strict=False), *kwargs.items()):
        is_right = isinstance(value, (str, bytes, os.PathLike)) or (name == "path" and hasattr(value, "read"))
        if name in PLACES and not is_right:
            raise ArgumentTypeError(f"{name} must be a path, not {value!r}")


def unknown_keyword(function: str, guess: str, value: object, known: Sequence[str]) -> ArgumentTypeError:
    """Return the error for an unknown keyword argument.

    Its hint is the keyword that was probably intended, or the reason why none is needed.

    Args:
        function: The name of the function.
        guess: The unknown keyword.
        value: Its value.
        known: The keywords of the function.
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
    """Return a shell command that consists of `words`, quoted where needed.

    No program in a message may take code or settings from the current folder or from a file's folder, because another
    user may have put files there. So messages do not suggest git, and run Python by :func:`python_command`.
    """
    return calls.command_line([_no_option(word) for word in words])


def python_command(*words: str | os.PathLike[str]) -> str:
    """Return a command that runs Python with `words`, of which the first is ``-c`` or ``-m``.

    ``-I`` excludes the current folder from the search for modules. Python 3.10 has no ``-P``.
    """
    return shell("python", "-I", *words)


def saved_by_torch(expression: str, *modules: str) -> str:
    """Return a command that saves the value of the Python `expression`, which needs `modules` in addition to torch."""
    program = f'import {", ".join((*modules, "torch"))}; torch.save({expression}, "out.pt")'
    return python_command("-c", program.replace('"', calls.QUOTE))


def literal(path: str | os.PathLike[str]) -> str:
    """Return `path` as a Python literal whose quotes do not end a quoted word of a shell command."""
    text = json.dumps(os.fspath(path), ensure_ascii=False)
    if calls.QUOTE == '"':
        return text
    return "'" + text[1:-1].replace("'", "\\x27").replace('\\"', "\\x22") + "'"


def placed(word: str | os.PathLike[str]) -> str:
    """Return `word` as text. For a file object without a name, return a placeholder."""
    text = os.fspath(word)
    return Placeholder("FILE") if text == UNNAMED else text


def _no_option(word: str | os.PathLike[str]) -> str:
    """Return `word` as text. A path gets ``./`` before it if a program could misread its start.

    A program could read the start as an option (-), a list of paths (@) or, as tar does, another machine (host:).
    """
    if isinstance(word, str):
        return word
    path = placed(word)
    host = ":" in path.partition("/")[0] and "://" not in path and not os.path.splitdrive(path)[0]
    return f"./{path}" if path.startswith(("-", "@")) or host else path
