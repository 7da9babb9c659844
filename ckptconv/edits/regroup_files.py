"""Read the files for ``--regroup``: files of rules, files of sizes, and the ``config.json`` of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptconv.byteranges.sources import Readable, Source
from ckptconv.edits.names import strings
from ckptconv.edits.regroup_rules import Rule, parse_rule, parse_rules
from ckptconv.errors import MalformedError, RefusedError, UsageError, some
from ckptconv.hints import Placeholder, option
from ckptconv.limits import LIMITS

CONFIG = "config.json"


def read_rules(files: object, rules: object, *, reverse: bool) -> tuple[Rule, ...]:
    """Return the rules in `files`, followed by the rules in the texts `rules`.

    If `reverse` is True, the order and each rule are reversed. Rules without a reverse stay unchanged, with
    ``is_forward`` set.

    Raises:
        UsageError: A rule is not valid or cannot be reversed, or there is no rule to reverse.
        InputError, MalformedError: A file cannot be read.
    """
    found: list[Rule] = []
    for file in strings("rules", files):  # type: ignore[arg-type]
        shipped = shipped_rules() if "/" not in file and "." not in file else {}
        if shipped and file not in shipped and not os.path.exists(file):
            raise UsageError(f"there are no rules called {file}", expected=f"a file, or one of {', '.join(shipped)}")
        text = shipped[file] if file in shipped else _text(Path(file))
        found += parse_rules(text.splitlines(), file)
    found += [parse_rule(text) for text in strings("regroup", rules)]  # type: ignore[arg-type]
    if reverse:
        if not found:
            raise UsageError(
                option("reverse") + " goes with " + option("regroup", None) + " and " + option("rules", None)
            )
        found = [rule if rule.is_forward else rule.reversed() for rule in reversed(found)]
    else:
        found = [replace(rule, is_forward=False) for rule in found]
    return tuple(found)


def shipped_rules() -> dict[str, str]:
    """Return the texts of the files of rules in this package, by name."""
    files = sorted(Path(__file__).with_name("rules").glob("*.rules"))
    return {file.stem: file.read_text("utf-8") for file in files}


def check_model(source: Readable, rule: Rule) -> str | None:
    """Return a note if no ``config.json`` next to `source` tells whether the file of `rule` is for this model.

    Return None if the model fits, or if the file is for all models. Raises RefusedError if it is for other models.
    """
    if not rule.models:
        return None
    content = content_of_config(source)
    model = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(model, str):
        return f"no {CONFIG} next to it names its model: the rules {rule.file} are for {', '.join(rule.models)}"
    if model not in rule.models:
        raise RefusedError(
            f"the rules {rule.file} are for other models",
            where=config_of(source),
            expected=", ".join(rule.models),
            got=model,
        )
    return None


def read_sizes(sizes: object) -> tuple[tuple[str, int], ...]:
    """Return `sizes` as pairs of a name and a number.

    `sizes` is a mapping, or one or several texts: ``NAME=8`` or the name of a JSON file. Raises UsageError for
    other values.
    """
    if isinstance(sizes, Mapping):
        return tuple(_size(name, value, "sizes") for name, value in sizes.items())
    found: dict[str, int] = {}
    for text in strings("sizes", sizes):  # type: ignore[arg-type]
        name, equals, value = text.partition("=")
        if equals:
            is_number = value.isdecimal() and len(value) < 20  # int() refuses long texts in another way
            found |= [_size(name.removeprefix("$"), int(value) if is_number else value, text)]
        else:
            found |= _flat(_json(Path(text)))
    return tuple(found.items())


def _size(name: object, value: object, where: str) -> tuple[str, int]:
    if not isinstance(name, str) or not _is_size(value):
        raise UsageError("a size is a name and a whole number above 0", where=where, expected="NAME=8", got=value)
    return name, int(value)  # type: ignore[call-overload]


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < LIMITS.elements


def _flat(config: Any, prefix: str = "", depth: int = 10) -> dict[str, int]:
    """Return all positive integers in `config` by name.

    Names in inner mappings have their path with dots before them. One that is longer than a rule needs is left out.
    """
    found: dict[str, int] = {}
    for name, value in config.items() if isinstance(config, dict) and depth else ():
        if len(prefix) + len(name) > LIMITS.matched_name:
            continue
        if _is_size(value):
            found[prefix + name] = value
        found |= _flat(value, f"{prefix}{name}.", depth - 1)
    return found


def sizes_in(source: Readable | None, wanted: Iterable[str], sizes: Mapping[str, int], rule: object) -> dict[str, int]:
    """Return the numbers for the names `wanted`, which begin with ``$``.

    Args:
        source: The file, or None for a state dict in memory.
        wanted: The names.
        sizes: The numbers that the user gave. Others are read from the ``config.json`` next to `source`.
        rule: The rule, for errors.

    Raises:
        UsageError: The number of a name is not known.
        MalformedError: The ``config.json`` is not JSON.
    """
    names = [name.removeprefix("$") for name in wanted]
    known = dict(sizes)
    config = config_of(source) if source else None
    if config and any(name not in known for name in names):
        known = {**_flat(_json(config)), **known}
    missing = [name for name in names if name not in known]
    if missing:
        raise UsageError(
            f"the value of {some([f'${name}' for name in missing])} is not known",
            where=source.path if source else None,
            expected=f"a whole number above 0 in {config}" if config else f"a {CONFIG} next to it" if source else None,
            got=rule,
            hint="to give it: " + option("sizes", (f"{missing[0]}={Placeholder('N')}",)),
        )
    return {f"${name}": known[name] for name in names}


def content_of_config(source: Readable) -> Any:
    """Return the content of the ``config.json`` next to `source`. Return None if there is none or `source` is remote.

    Raises MalformedError if the file is not JSON.
    """
    config = config_of(source)
    return _json(config) if config else None


def config_of(source: Readable) -> Path | None:
    """Return the path of the ``config.json`` next to `source`. Return None if there is none or `source` is remote."""
    if not source.is_stored:
        return None
    return source.folder / CONFIG if (source.folder / CONFIG).is_file() else None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise MalformedError("the file is not JSON", where=path, got=str(error) or type(error).__name__) from None


def _text(path: Path) -> str:
    """Return the text of a file of limited size. Raise InputError or MalformedError if it cannot be read."""
    with Source(path) as source:
        if source.size > LIMITS.rules_bytes:
            raise MalformedError("the file is too large", where=path, expected=f"at most {LIMITS.rules_bytes:,} bytes")
        try:
            return source.read(0, source.size).decode("utf-8-sig")  # editors on Windows write such a mark
        except UnicodeDecodeError:
            raise MalformedError("the file is not text in UTF-8", where=path) from None
