"""Names and paths: the grammar of prefixes inside a state dict, and of where things stand in a checkpoint.

A *name* is a key inside a state dict: ``module.conv.weight``; its segments end at dots. A *path* says where something stands:

    ========================  ==========================================================
    ``optimizer/state``       string keys, joined by ``/``
    ``[0]``, ``[None]``       a list's index, or a key that is no string, by its literal
    ``/.name``                an attribute (state of BUILD that is a dict)
    ``/.__state__``           other state
    ``/(0)``, ``/(name)``     an argument of a call; ``/(call)`` is what is called, ``/(*)`` all arguments, where that is a call's result
    ``/{0}``                  a member of a set, by position
    ``/<0>``                  a mapping's key itself, by position, where it is an object; ``[<0>]`` is its value
    ``.``                     the root
    ========================  ==========================================================

In a string key, ``/``, ``[`` and backslash are escaped by a backslash, and so is one of ``.({<`` at its start; an empty key is ``\\e``. What
would be a segment's second use in one place (a key that is set twice) has ``\\2`` behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase

from ckptconv.errors import UsageError, printable
from ckptconv.pickles.graph import Call, Node, Tuple, Value, args_of, is_global

__all__ = [
    "ancestors",
    "escaped",
    "glob_of",
    "key_segment",
    "matches",
    "modules_without",
    "normal_prefix",
    "parse_path",
    "prefixes_of",
    "strings",
]

_LONGEST_LITERAL = 80
_SEGMENT = re.compile(
    r"""\[ (?: '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [^]'"] )* \] (?:\\[0-9]+)?   # [0], [(1, 'a')], [0]\2
      | / (?:\\. | [^\\/[])*                                                       # /weight, /a\/b, /.name, /(0)
    """,
    re.DOTALL | re.VERBOSE,
)


def key_segment(key: Value, position: int) -> str:
    """The segment for the value under KEY, the POSITION-th of its mapping."""
    if isinstance(key, str):
        return "/" + ("\\" if key[:1] in tuple(".({<") else "") + escaped(key)
    literal = _literal(key)
    return f"[{literal}]" if literal else f"[<{position}>]"


def escaped(word: str) -> str:
    """WORD with what would end a segment escaped."""
    return re.sub(r"[\\/\[]", r"\\\g<0>", word) or "\\e"


def _literal(key: Value) -> str | None:
    """KEY as Python would write it, if it is short and made of atoms alone: a nested key could take forever to print."""
    if isinstance(key, Call):
        key = _said_bytes(key)
    if isinstance(key, Tuple):
        parts = [
            _literal(item) if isinstance(item, Call) or not isinstance(item, Node) else None for item in key.items[:9]
        ]
        if len(parts) > 8 or None in parts:
            return None
        text = "(" + ", ".join(map(str, parts)) + (",)" if len(parts) == 1 else ")")
    elif (
        isinstance(key, Node)
        or (isinstance(key, (str, bytes)) and len(key) > _LONGEST_LITERAL)
        or (isinstance(key, int) and key.bit_length() > 200)
    ):
        return None
    else:
        text = repr(key)
    return text if len(text) <= _LONGEST_LITERAL else None


def _said_bytes(call: Call) -> Value:
    """The bytes that CALL gives if it is the one that stands for them in protocol 2, which is what torch's safe loader takes; else CALL."""
    text, encoding = args_of(call) if len(args_of(call)) == 2 else (None, None)
    if is_global(call.callable, "_codecs.encode") and isinstance(text, str) and len(text) <= _LONGEST_LITERAL and encoding == "latin1" and not call.effects:  # fmt: skip
        with suppress(UnicodeEncodeError):
            return text.encode("latin-1")
    return call


def parse_path(path: str) -> list[str]:
    """The segments of PATH, from the root on, as :func:`key_segment` writes them; the root itself has none."""
    if path == ".":
        return []
    return _SEGMENT.findall(path if path.startswith("[") else "/" + path)


def matches(glob: str, path: str, name: str | None) -> bool:
    """Whether GLOB means the tensor at PATH: by its path if GLOB has a slash or the tensor no NAME, else by its name. ``./w`` is the path of what stands at the root. ``*`` crosses dots and slashes."""
    if "/" in glob or name is None:
        return fnmatchcase(path, glob) or fnmatchcase("./" + path, glob)
    return fnmatchcase(name, glob)


def glob_of(path: str, name: str | None) -> str:
    """The glob that means the tensor at PATH and, as far as globs can tell, no other."""
    literal = path if "/" in path or name is None else name
    return "".join(f"[{c}]" if c in "*?[" else c if c == printable(c) else "?" for c in literal)


def normal_prefix(prefix: str) -> str:
    """PREFIX with the dot that ends its last segment: ``module`` means ``module.``"""
    dotted = prefix if prefix.endswith(".") else prefix + "."
    if not prefix or any(not segment for segment in dotted[:-1].split(".")):
        raise UsageError(
            f"{prefix!r} is no prefix of names",
            expected="segments that end at a dot, like module.",
            hint="for anything else: --rename REGEX REPLACEMENT",
        )
    return dotted


def strings(name: str, words: str | Iterable[str]) -> tuple[str, ...]:
    """WORDS, the argument NAME, which may be one string. Raises TypeError for anything else."""
    found = (words,) if isinstance(words, str) else tuple(words) if isinstance(words, Iterable) else (words,)
    if not all(isinstance(word, str) for word in found):
        raise TypeError(f"{name} must be a string or strings, not {words!r}")
    return found


def prefixes_of(names: Iterable[str]) -> Counter[str]:
    """The first segments that NAMES have, with their dots, and how many have each."""
    return Counter(name.split(".")[0] + "." for name in names if "." in name)


# The keys of _metadata are module paths: the names' without their last segments, '' for the outermost module.


def modules_without(prefix: str, modules: Collection[object], *, keep_ancestors: bool) -> Callable[[str], str | None]:
    """What a module path, one of MODULES, becomes without PREFIX; None: it goes. The wrapper's own entries go, because its place is taken by what it wrapped.

    KEEP_ANCESTORS: names without the prefix stay beside it, and so do the modules around it but for the outermost.
    """
    wrapped = prefix[:-1]
    gone = set() if wrapped not in modules else {""} if keep_ancestors else ancestors(wrapped)
    return lambda path: None if path in gone else "" if path == wrapped else path.removeprefix(prefix)


def ancestors(path: str) -> set[str]:
    """The module paths above PATH, the outermost being ''."""
    segments = path.split(".")
    return {".".join(segments[:n]) for n in range(len(segments))}
