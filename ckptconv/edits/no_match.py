"""What becomes of an option that matches nothing: one policy for all of them, the table in ``docs/no-match.md``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckptconv.errors import NoMatchError

#: What an option says of a checkpoint.
#:
#: - ``state``: how the output shall be. It is so already, which a note says.
#: - ``name``: something that is in it. There is no such thing, so it is a typo, an error; among several files only
#:   where it matches in none of them, else it is left out where it does not match, with a note.
#: - ``part``: what shall be taken of it. An error in each file: without the option more would be taken than was asked.
Kind: TypeAlias = Literal["state", "name", "part"]

POLICY: dict[str, Kind] = {
    "select PATH": "part",
    "include GLOB": "part",
    "drop PATH": "name",
    "exclude GLOB": "name",
    "strip_prefix P": "name",
    "rename REGEX REPL": "name",
    "add_prefix P": "name",
    "dtype GLOB=D": "name",
    "map WORD=NEW": "name",
    "map OLD=NEW": "state",
    "to DEVICE": "state",
    "dtype D": "state",
    "unwrap": "state",
    "loadable": "state",
    "compact": "state",
}


def no_match(option: str, error: NoMatchError, *, is_one_of_several: bool = False) -> str:
    """The note that an option matches nothing here, where it says how the output shall be.

    Args:
        option: A key of POLICY.
        error: What is said of it; with ``unmatched`` where the rest can be done without it.
        is_one_of_several: Others of the same option are left, so that a ``part`` is one without it too.

    Raises:
        NoMatchError: The option names what is not there.
    """
    kind = POLICY[option]
    if kind == "state":
        return error.what
    if kind == "part" and not is_one_of_several:
        error.unmatched = None
    raise error
