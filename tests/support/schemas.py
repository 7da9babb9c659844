"""The published schemas in closed form: an object that a test prints must contain only keys that its schema names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from json import loads
from typing import Any

__all__ = ["check", "schema_of"]

_SAMPLE = 20  # number of items at each end of a list that are checked, so that large checkpoints do not take too long


def schema_of(command: str) -> Any:
    """Return the published schema of the output of `command` with ``--json``."""
    return loads(files("ckptconv.render").joinpath(f"schemas/{command}.json").read_text("utf-8"))


def check(command: str, printed: Any) -> None:
    """Fail if the object `printed` does not match the schema of `command`, or if the words of a command in it differ
    from its text.

    The schema is only checked if jsonschema is installed. The gate has it, a browser does not.
    """
    if find_spec("jsonschema"):
        from jsonschema.exceptions import best_match

        error = best_match(_validator(command).iter_errors(printed))
        why = [f"{each.json_path}: {each.message[:300]}" for each in (error, *(error.context or ()))] if error else []
        assert not why, (command, *why)
    for each in (printed, *printed.get("findings", ())):
        for key, words in each.items():
            if key.endswith("_words") and os.name == "posix":
                typed = each[key.removesuffix("_words")]
                assert words == (typed and shlex.split(typed)), (command, typed, words)


@cache
def _validator(command: str) -> Any:
    from jsonschema.validators import Draft202012Validator, extend

    def items(validator: Any, schema: Any, instance: Any, _: Any) -> Iterator[Any]:
        if isinstance(instance, list):
            for item in [*instance[:_SAMPLE], *instance[_SAMPLE:][-_SAMPLE:]]:
                yield from validator.descend(item, schema)

    schema = schema_of(command)
    Draft202012Validator.check_schema(schema)
    return extend(Draft202012Validator, {"items": items})(_closed(schema))


def _closed(schema: Any) -> Any:
    """Return `schema` with objects that allow only the keys that it names."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(schema.get("required"), list) else closed
