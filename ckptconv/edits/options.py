"""The edits that a user asks for: the keywords that say them, and the same as data."""

# No annotations from __future__: what stands in Annotated is read when the package is imported.

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, replace
from functools import cache, partial
from typing import Annotated, Any, TypedDict

from ckptconv.edits.devices import Devices, MapLocation, Rule, to_devices
from ckptconv.edits.dtype_rules import DTypeLike, DTypeRule, to_dtypes
from ckptconv.edits.names import strings
from ckptconv.errors import ArgumentTypeError
from ckptconv.hints import Message, option
from ckptconv.light_dataclass import dataclass


class PartOptions(TypedDict, total=False):
    """The keywords that take a part of a checkpoint, each with its type and what it means."""

    state_dict: Annotated[bool, "Take the state dict alone, wherever it is; safetensors always does."]
    select: Annotated[str | None, "The path of the part to take, such as ``ema/model``."]
    include: Annotated[
        str | Iterable[str], "Keep only tensors that match: globs on names, or on paths where they have a slash."
    ]
    exclude: Annotated[str | Iterable[str], "Leave out tensors that match, by such globs."]


class NameOptions(TypedDict, total=False):
    """The keywords that edit the names in state dicts."""

    unwrap: Annotated[bool, "Take out what wrappers (DataParallel, torch.compile, FSDP and others) put into names."]
    strip_prefix: Annotated[str | Iterable[str], "Prefixes to take off the start of names, such as ``module.``."]
    rename: Annotated[
        Iterable[tuple[str, str]], "(regular expression, replacement) for names, one after another as ``re.sub`` does."
    ]
    add_prefix: Annotated[str | Iterable[str], "Prefixes to put before the names, such as ``module.``."]


class EditOptions(PartOptions, NameOptions, total=False):
    """All keywords that change what a checkpoint says."""

    drop: Annotated[
        str | Iterable[str],
        "Leave out what stands at these paths, or globs with a slash: items, attributes, elements of lists, whatever"
        " they are.",
    ]
    map_location: Annotated[
        "MapLocation | None",
        "A device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices"
        " (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a function from tag to tag; states of random generators stay on"
        " the CPU, where torch needs them.",
    ]
    dtype: Annotated[
        "DTypeLike | None",
        "``'bf16'`` (or ``torch.bfloat16``) for the floating-point weights, ``{'*.norm.*': 'fp32'}`` for what globs"
        " mean, or several of both (``['bf16', '*.norm.*=fp32']``).",
    ]
    loadable: Annotated[
        bool,
        "Make plain what is only data (arrays and numbers of numpy, namespaces, configurations, paths, dates), so that"
        " ``torch.load(weights_only=True)`` takes all of a training file; what is left is refused.",
    ]
    loadable_objects: Annotated[
        bool, "The same, and make of other objects dicts that name their class, ``{'__class__': 'module.Name', ...}``."
    ]
    compact: Annotated[bool, "Drop the bytes of storages that no tensor shows."]


@dataclass(frozen=True)
class Edits:
    """What the flags of ``convert`` and the keywords of its function become.

    ``select`` is a path, ``drop`` are paths, ``include`` and ``exclude`` are globs on names and paths of the
    source, those of ``dtypes`` on the new ones.
    """

    devices: Devices = field(default_factory=Devices)
    select: str | None = None
    state_dict: bool = False
    drop: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    add_prefix: tuple[str, ...] = ()
    unwrap: bool = False
    dtypes: tuple[DTypeRule, ...] = ()
    loadable: bool = False
    loadable_objects: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError where a flag is neither True nor False."""
        check_flags(self)

    def without(self, field: str, what: object) -> "Edits":
        """These edits but for `what` in `field`, where :class:`~ckptconv.errors.NoMatchError` says that it
        means nothing.
        """
        if field == "devices":
            return replace(self, devices=self.devices.without(what))
        left: Any = tuple(each for each in getattr(self, field) if each != what)
        return replace(self, **{field: left})

    def several(self) -> Iterator[tuple[str, object]]:
        """The fields that hold several, each with each of what it holds: what could mean nothing somewhere."""
        for each in fields(self):
            value = getattr(self, each.name)
            held = value.rules if isinstance(value, Devices) else value if isinstance(value, tuple) else ()
            yield from ((each.name, one) for one in held)


def edits_from(**options: Any) -> Edits:
    """Those of `options` that are keys of :class:`EditOptions`, as data; others are left to whoever knows them.

    Raises TypeError where one is of a wrong type, UsageError where it makes no sense.
    """
    said = {name: _READ.get(name, _as_it_is)(options[name]) for name in EditOptions.__annotations__ if name in options}
    return Edits(**{_FIELDS.get(name, name): value for name, value in said.items()})


def option_of(field: str, what: object) -> Message:
    """The option that says `what` in a `field` of :class:`Edits` that holds several."""
    keyword = next((name for name, called in _FIELDS.items() if called == field), field)
    if isinstance(what, Rule):
        what = what.old, str(what.new)
    return option(keyword, (what if isinstance(what, tuple) else str(what),))


def check_flags(options: Any) -> None:
    """Raise ArgumentTypeError where a field of the dataclass `options` that is declared as a bool, a number or a text
    holds something else.
    """
    kind: Any = type(options)
    for name, wanted, said in _wanted(kind):
        flag = getattr(options, name)
        if not isinstance(flag, wanted):
            part = "; a part is taken with select=PATH" if name == "state_dict" else ""
            raise ArgumentTypeError(f"{name} must be {said}, not {flag!r}{part}")


@cache
def _wanted(kind: Any) -> list[tuple[str, Any, str]]:
    """The fields of the class `kind` that are checked: their names, and their types, in words too."""
    types = {each.name: each.type for each in fields(kind)}  # texts already, where postponed
    said = {name: type_.__name__ if isinstance(type_, type) else str(type_) for name, type_ in types.items()}
    return [(name, *_WANTED[type_]) for name, type_ in said.items() if type_ in _WANTED]


#: The types of fields that are checked, in words.
_WANTED: dict[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "int": (int, "a whole number"),
    "str | None": (str | None, "a text"),
}


def _as_it_is(value: Any) -> Any:
    return value


def _pairs(rename: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    found = tuple(rename) if isinstance(rename, Iterable) else (rename,)
    if not all(isinstance(pair, (tuple, list)) and [type(word) for word in pair] == [str, str] for pair in found):
        raise ArgumentTypeError(f"rename must be pairs like [('^module[.]', '')], not {rename!r}")
    return tuple((old, new) for old, new in found)


#: How the keywords are read that are no data yet.
_READ: dict[str, Callable[[Any], Any]] = {
    "map_location": to_devices,
    "dtype": to_dtypes,
    "rename": _pairs,
    **{name: partial(strings, name) for name in ("drop", "include", "exclude", "strip_prefix", "add_prefix")},
}
#: The fields of those that are called otherwise.
_FIELDS = {"map_location": "devices", "dtype": "dtypes"}
#: No edits at all.
NO_EDITS = Edits()
