"""Words that users type instead of commands and options, and the command line that was probably intended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import click

from ckptconv.edits.devices import FAMILIES, near_device, parse_target
from ckptconv.edits.dtype_rules import near_dtype, to_dtypes
from ckptconv.errors import UsageError
from ckptconv.formats.writers import WRITERS, admitted, split_suffix
from ckptconv.guesses import ALWAYS, PATHS, USUAL_VALUES, close_matches, normal
from ckptconv.guesses import OPTIONS as GUESSED
from ckptconv.hints import Option, Placeholder, command, shell

_VALUE = Placeholder("VALUE")  # the word after the guess
#: Options, and the words that stand for them.
OPTIONS = tuple((Option(name, _VALUE if value is None else value), each) for name, value, each in GUESSED)
#: Commands, with the options that a guess implies.
COMMANDS: dict[str, tuple[str, tuple[Option, ...]]] = {
    guess: (name, options)
    for name, options, guesses in (
        (
            "inspect",
            (),
            "info show ls list l cat print view summary head dump describe stat keys count doctor why fix repair",
        ),
        ("convert", (), "cp mv to map remap retag move cast save export merge transform change"),
        ("convert", (Option("format", "safetensors"),), "to-safetensors safetensors pt2safetensors"),
        ("convert", (Option("format", "pt"),), "to-pt to-pth to-torch to-bin"),
        ("convert", (Option("map_location", "cpu"),), "to-cpu cpu"),
        ("convert", (Option("map_location", "cuda"),), "to-gpu to-cuda cuda gpu"),
        ("convert", (Option("dtype", "fp16"),), "half to-fp16 fp16"),
        ("convert", (Option("dtype", "bf16"),), "to-bf16 bf16"),
        ("convert", (Option("strip_prefix", "module."),), "strip strip-prefix remove-prefix"),
        ("convert", (Option("unwrap"),), "unwrap unwrap-ddp"),
        ("convert", (Option("compact"),), "compact shrink compress"),
        ("convert", (Option("max_shard_size", "5GB"),), "split shard"),
        ("diff", (), "compare cmp equal eq"),
        ("verify", (), "check validate scan lint test fsck audit"),
        ("undo", (), "revert restore rollback"),
        ("help", (), "explain search error docs faq"),
    )
    for guess in guesses.split()
}
_ASKED = {"man": "-h", "usage": "-h", "version": "--version", "v": "--version"}
_FORMAT = Option("format", None).words()[0][0]
_MOST = 8  # guesses in one command line
_Commands = Mapping[str, click.Command]


def wrong_option(name: str, args: Sequence[str], commands: _Commands) -> UsageError:
    """Return the error for `args`, which contain an option that the command `name` does not have.

    `commands` are all commands by name. The hint is the command line that was probably intended, or else how to list
    the options.
    """
    first, now, words = _unknown(commands[name], args), name, [*args]
    for _ in range(_MOST):
        at = _unknown(commands[now], words)
        if at is None or (meant := _without(at, now, words, commands)) is None:
            break
        now, words = meant
    error = UsageError(f"{name} has no option {args[first or 0].partition('=')[0]}")
    is_right = at is None and _parsed(commands[now], words)
    error.hint = _meant(now, words, commands) if is_right else "to list its options: " + command(name, "-h")
    return error


def wrong_command(guess: str, args: Sequence[str], commands: _Commands) -> UsageError:
    """Return the error for the word `guess`, which was typed before `args` and is not one of `commands`."""
    words = [*args]
    near = close_matches(guess, commands, n=1)
    name, options = COMMANDS.get(normal(guess), (near[0] if near else "", ()))
    words += [word for option in options for flag in option.words() for word in flag]
    error = UsageError(f"there is no command {guess}")
    if (asked := normal(guess).lstrip("-")) in _ASKED:
        error.hint = "did you mean: " + shell(
            "ckptconv", *(each for each in args[:1] if each in commands), _ASKED[asked]
        )
        return error
    if "completion" in asked:
        name, words = "help", ["completion"]
    typed = next((n for n, each in enumerate(args) if each in commands), None) if guess.startswith("-") else None
    if typed is not None:
        error.what = "the command comes before its options"
        name, words = args[typed], [guess, *args[:typed], *args[typed + 1 :]]
    elif not name and (guess.startswith("-") or os.path.lexists(guess)):
        error.what = "the command is missing"
        words.insert(0, guess)
        fitting = [each for each in commands if len(_parsed(commands[each], words)) > (each == "convert")]
        name = next((each for each in ("convert", "inspect") if each in fitting), "".join(fitting[:1]))
        name = name or ("convert" if args and not guess.startswith("-") else "")
    if name and _unknown(commands[name], words) is not None:
        error.hint = wrong_option(name, words, commands).hint
    elif name:
        error.hint = _meant(name, words, commands)
    else:
        error.expected = ", ".join(commands)
    return error


def _without(at: int, name: str, words: list[str], commands: _Commands) -> tuple[str, list[str]] | None:
    """Replace the option at index `at` of `words`, which the command `name` does not have.

    Return the name of the intended command and its words. Return None if the intention is unknown.
    """
    flag, equals, inline = words[at].partition("=")
    before, behind = words[:at], [*([inline] if equals else []), *words[at + 1 :]]
    guess = normal(flag.lstrip("-"))
    known = _flags(commands[name])
    if guess in PATHS:
        path = behind.pop(0) if behind else "OUT"
        return name, [path, *before, *behind] if PATHS[guess] == 0 else [*before, *behind, path]
    option = _option_for(guess, known)
    if option:
        now = _typed(option, behind)
        return (name, [*before, *now, *behind]) if now else None
    if guess in ALWAYS:
        return name, [*before, *behind]
    spelled = f"--{guess}" if len(guess) > 1 else flag
    owner = next((each for each in (name, *commands) if spelled in _flags(commands[each])), None)
    if owner:
        outputs = _parsed(commands[name], before)[1:] if name == "convert" != owner else ()
        return owner, [*(each for each in before if each not in outputs), spelled, *behind]
    if guess in COMMANDS:
        meant, options = COMMANDS[guess]
        flags = [word for option in options for words in option.words() for word in words]
        return meant, [*(each for each in (*before, *behind) if os.path.lexists(each)), *flags]
    started = [each for each in known if each.startswith(spelled)]
    near = started if len(started) == 1 else close_matches(spelled, known, n=1, cutoff=0.75)
    if near:
        return name, [*before, *near, *behind]
    guesses = [each for _, row in OPTIONS for each in row.split() if _option_for(each, known)]
    return next(
        (
            _without(at, name, [*before, f"--{each}{equals}{inline}", *words[at + 1 :]], commands)
            for each in close_matches(guess, guesses, n=1, cutoff=0.8)
        ),
        None,
    )


def _option_for(guess: str, known: Sequence[str]) -> Option | None:
    """Return the option that `guess` stands for, if it is among the flags `known`. Otherwise return None."""
    return next((each for each, row in OPTIONS if guess in row.split() and each.words()[0][0] in known), None)


def _value(option: Option, value: str) -> tuple[str, ...]:
    """Return the words for `option` with the `value` of a guess, corrected if needed.

    Empty if no valid value is similar.
    """
    is_device, is_dtype = option.keyword == "map_location", option.keyword == "dtype"
    corrected: object = value
    try:
        if is_device and "=" in value:
            corrected = (tuple(value.split("=", 1)),)
        elif is_device:
            parse_target(value)
        elif is_dtype:
            to_dtypes(value)
    except UsageError:
        corrected = near_dtype(value) if is_dtype else near_device(value, ("gpu", *FAMILIES))
    return replace(option, value=corrected).words()[0] if corrected else ()


def _typed(option: Option, behind: list[str]) -> tuple[str, ...]:
    """Return the words for `option`. If its value is open, remove the value from the start of `behind`.

    Return an empty tuple if the value is invalid.
    """
    flag, *value = option.words()[0]
    if option.value is True and behind and behind[0].lower() == "true":
        behind.pop(0)
    if value == ["cuda"] and behind and behind[0].isdecimal():
        return flag, f"cuda:{behind.pop(0)}"
    template = "{}" if option.value is _VALUE else str(option.value)
    if "{}" not in template:
        return flag, *value
    usual = USUAL_VALUES.get(option.keyword)
    if usual and behind and behind[0].isdecimal():
        behind.pop(0)
        return flag, usual
    if not behind or behind[0].startswith("-") or (usual and os.path.lexists(behind[0])):
        return flag, usual or template.format(_VALUE)
    given = behind.pop(0)
    if option.keyword == "map_location" and given in ("cuda", "gpu") and behind and behind[0].isdecimal():
        given += ":" + behind.pop(0)
    return _value(option, given) if option.value is _VALUE else (flag, template.format(given))


def _meant(name: str, words: list[str], commands: _Commands) -> str:
    """Return the hint with this command line. If the output of ``convert`` is missing, OUT is added.

    If the suffix of the output contradicts ``--format``, it is corrected.
    """
    in_place = {"-i", *Option("in_place").words()[0]}
    if name == "convert" and len(_parsed(commands[name], words)) == 1 and in_place.isdisjoint(words):
        words = [words[0], "OUT", *words[1:]] if not words[0].startswith("-") else [*words, "OUT"]
    paths = _parsed(commands[name], words)
    asked = next((word for flag, word in pairwise(words) if flag == _FORMAT and word in WRITERS), None)
    if name == "convert" and len(paths) == 2 and asked and WRITERS[asked] not in admitted(paths[1]):
        stem, _, behind = split_suffix(paths[1])
        at = len(words) - 1 - words[::-1].index(paths[1])
        words = [*words[:at], stem + WRITERS[asked].new_suffix + behind, *words[at + 1 :]]
    return "did you mean: " + command(name, *words)


def _flags(command: click.Command) -> list[str]:
    return [flag for each in command.params if isinstance(each, click.Option) for flag in each.opts]


def _unknown(command: click.Command, args: Sequence[str]) -> int | None:
    """Return the index in `args` of the first option that `command` does not have. None if there is none."""
    try:
        _parser_of(command).parse_args([*args])
    except click.NoSuchOption as error:
        words = [n for n, word in enumerate(args) if word.startswith(error.option_name)]
        return words[0] if words else next(n for n, word in enumerate(args) if word.startswith("-"))
    except click.UsageError:
        pass
    return None


def _parsed(command: click.Command, args: Sequence[str]) -> list[str]:
    """Return the paths in `args`. Return an empty list if `command` refuses these arguments."""
    try:
        found, rest, _ = _parser_of(command).parse_args([*args])
    except click.UsageError:
        return []
    paths: list[str] = []
    for each in command.params:
        given = found.get(each.name or "") if isinstance(each, click.Argument) and not rest else None
        paths += [given] if isinstance(given, str) else given if isinstance(given, tuple) else []
    return paths


def _parser_of(command: click.Command) -> Any:
    """Return the parser of `command`.

    Its context has -h, because click caches the first help option that it creates.
    """
    return command.make_parser(click.Context(command, help_option_names=["-h", "--help"]))
