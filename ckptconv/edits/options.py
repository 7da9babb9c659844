"""The edits of a conversion: the options that declare them, and the same as a dataclass."""

# No annotations from __future__: the arguments of Annotated are evaluated when the package is imported.

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_origin

from ckptconv.edits.devices import Devices, MapLocation, Rule, to_devices
from ckptconv.edits.dtype_rules import DTypeLike, DTypeRule, to_dtypes
from ckptconv.edits.names import strings
from ckptconv.errors import ArgumentTypeError
from ckptconv.guesses import Flag
from ckptconv.hints import Message, option
from ckptconv.light_dataclass import dataclass

if TYPE_CHECKING:
    from ckptconv.edits.regroup_rules import Rule as RegroupRule


class PartOptions(TypedDict, total=False):
    """The options that select a part of a checkpoint."""

    state_dict: Annotated[
        bool,
        Flag("Extract the state dict, wherever it is in SRC, also from a pickled model. Always on for safetensors."),
    ]
    select: Annotated[
        str | None,
        Flag(
            "Extract the object at PATH, such as ema/model.",
            "The path of the object to extract, such as ``ema/model``.",
            "PATH",
        ),
    ]
    include: Annotated[
        str | Iterable[str],
        Flag(
            "Keep only tensors whose name matches. * also matches dots. A GLOB with / is matched against paths.",
            "Globs. Only tensors whose name matches are kept. A glob with a slash is matched against paths.",
            "GLOB",
        ),
    ]
    exclude: Annotated[
        str | Iterable[str],
        Flag("Leave out tensors whose name matches.", "Globs. Tensors whose name matches are left out.", "GLOB"),
    ]


class NameOptions(TypedDict, total=False):
    """The options that edit the names in state dicts."""

    unwrap: Annotated[
        bool, Flag("Remove what DataParallel, torch.compile, FSDP and other wrappers have added to names.")
    ]
    strip_prefix: Annotated[
        str | Iterable[str],
        Flag(
            "Remove P from the start of names. If P does not end with a dot, a dot is added.",
            "Prefixes to remove from the start of names, such as ``module.``. A dot is added to a prefix without one at"
            " its end.",
            "P",
        ),
    ]
    rename: Annotated[
        Iterable[tuple[str, str]],
        Flag(
            "Rename with re.sub: replace each match of REGEX in a name with REPL.",
            "Pairs of a regular expression and its replacement in names. ``re.sub`` applies them in this order.",
            "REGEX REPL",
        ),
    ]
    add_prefix: Annotated[
        str | Iterable[str],
        Flag(
            "Add P to the start of the names in the state dict.",
            "Prefixes to add to the start of the names in the state dict, such as ``module.``.",
            "P",
        ),
    ]


class EditOptions(PartOptions, NameOptions, total=False):
    """All options that change the contents of a checkpoint."""

    regroup: Annotated[
        str | Iterable[str],
        Flag(
            "Split, join or stack tensors: 'qkv = q:1, k:1, v:1', 'experts.down = experts.{e}.down'. The documentation"
            " explains the rules.",
            "Rules that split, join and stack tensors, such as ``'qkv = q:1, k:1, v:1'``.",
            "RULE",
        ),
    ]
    rules: Annotated[
        str | Iterable[str],
        Flag(
            "Read regrouping rules from FILE, one per line, or use the built-in rules NAME, which 'ckptconv rules'"
            " lists.",
            "Files of such rules, one per line, or names of built-in rules (``qwen2-moe``). They are applied first.",
            "FILE|NAME",
        ),
    ]
    sizes: Annotated[
        "Mapping[str, int] | str | Iterable[str]",
        Flag(
            "The value of $NAME in rules: NAME=8, or a JSON file with the values. Default: config.json next to SRC.",
            "The values of names in rules (``$NAME``). By default they are read from the ``config.json`` next to the"
            " input.",
            "NAME=N",
        ),
    ]
    reverse: Annotated[
        bool,
        Flag(
            "Apply the rules in the other direction, the last one first.",
            "Exchange the sides of each rule, and apply the last rule first.",
        ),
    ]
    optimizer: Annotated[
        Literal["names", "numbers"] | None,
        Flag(
            "Key the state of optimizers by parameter names, as FSDP does, or by numbers, as torch.optim does.",
            "``'names'`` to key the state of optimizers by parameter names, as FSDP does, or ``'numbers'``, as"
            " ``torch.optim`` does.",
        ),
    ]
    optimizer_order: Annotated[
        Literal["model"] | None,
        Flag(
            "Confirm that the optimizer was created with model.parameters(), or with parts of it in that order.",
            "``'model'`` to confirm that the optimizer was created with ``model.parameters()``, or with parts of it in"
            " that order.",
        ),
    ]
    like: Annotated[
        str | os.PathLike[str] | None,
        Flag(
            "Keep only the names that are also in FILE, in the order of FILE, and use the groups of its optimizers.",
            "A checkpoint. The output contains only names that are also in it, in its order, with the groups of its"
            " optimizers.",
            "FILE",
        ),
    ]
    model: Annotated[
        str | os.PathLike[str] | None,
        Flag(
            "The file with the weights, if SRC contains only an optimizer.",
            "The checkpoint with the weights, if the input contains only an optimizer.",
            "FILE",
        ),
    ]
    drop: Annotated[
        str | Iterable[str],
        Flag(
            "Leave out the object at PATH, such as optimizer. A glob with a / can match several.",
            "Paths, or globs with a slash. The items, attributes and elements of lists at these paths are left out.",
            "PATH",
        ),
    ]
    map_location: Annotated[
        "MapLocation | None",
        Flag(
            "The same as --to (X is a DEVICE) or --map (X is OLD=NEW).",
            "A device for all tensors (``'cpu'``, ``'gpu'``, ``'cuda:1'``), a mapping from devices to devices"
            " (``{'cuda:0': 'cuda:1', 'any': 'cpu'}``), or a function from tag to tag. States of random generators stay"
            " on the CPU, where torch needs them.",
            "X",
        ),
    ]
    dtype: Annotated[
        "DTypeLike | None",
        Flag(
            "Cast the floating-point weights to D: fp32, bf16, fp16, float8_e4m3fn, ... 'GLOB=D' casts only tensors"
            " whose name in DST matches GLOB.",
            "``'bf16'`` (or ``torch.bfloat16``) for the floating-point weights, ``{'*.norm.*': 'fp32'}`` for the"
            " tensors that match globs, or several of both (``['bf16', '*.norm.*=fp32']``).",
            "D",
        ),
    ]
    loadable: Annotated[
        bool,
        Flag(
            "Convert data objects (numpy, Namespace, OmegaConf, ...) to tensors, dicts, lists and text, so that"
            " torch.load(weights_only=True) loads the whole file.",
            "Convert data objects (arrays and numbers of numpy, namespaces, configurations, paths, dates) to tensors,"
            " dicts, lists and text, so that ``torch.load(weights_only=True)`` loads the whole file. The conversion is"
            " refused if other objects remain.",
        ),
    ]
    loadable_objects: Annotated[
        bool,
        Flag(
            "Like --loadable, and also convert other objects to dicts with the name of their class.",
            "Do the same, and convert other objects to dicts with the name of their class, ``{'__class__':"
            " 'module.Name', ...}``.",
        ),
    ]
    compact: Annotated[bool, Flag("Drop the bytes of storages that no tensor uses.")]


@dataclass(frozen=True)
class Edits:
    """The edits of one conversion.

    ``select`` is a path, and ``drop`` contains paths. The globs of ``include`` and ``exclude`` are for names and
    paths of the source. The globs of ``dtypes`` are for the names after renaming.
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
    regroup: tuple["RegroupRule", ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    optimizer: Literal["names", "numbers"] | None = None
    optimizer_order: Literal["model"] | None = None
    like: str | None = None
    model: str | None = None
    dtypes: tuple[DTypeRule, ...] = ()
    loadable: bool = False
    loadable_objects: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentTypeError if a value has a wrong type."""
        check_flags(self)

    def without(self, field: str, what: object) -> "Edits":
        """Return these edits without the element `what` of `field`, or without the last of several equal ones.

        :class:`~ckptconv.errors.NoMatchError` contains both if an edit matches nothing. A prefix that is given twice
        can match once.
        """
        if field == "devices":
            return replace(self, devices=self.devices.without(what))
        every = getattr(self, field)
        last = [i for i, each in enumerate(every) if each == what][-1:]
        left: Any = tuple(each for i, each in enumerate(every) if i not in last and getattr(each, "file", 0) != what)
        return replace(self, **{field: left})

    def several(self) -> Iterator[tuple[str, object]]:
        """Yield a field and an element, for each element of the fields that are tuples and for each rule for devices.

        These elements can match nothing. Elements of a file of rules are yielded as the name of the file.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            held = value.rules if isinstance(value, Devices) else value if isinstance(value, tuple) else ()
            if each.name != "sizes":
                yield from ((each.name, getattr(one, "file", None) or one) for one in held)


def edits_from(**options: Any) -> Edits:
    """Return the edits in `options`, whose keys are those of :class:`EditOptions`.

    Raises:
        ArgumentTypeError: A value has a wrong type.
        UsageError: A value is not valid.
    """
    given = [options.pop(name, None) or () for name in ("rules", "regroup")]
    sizes, reverse = options.pop("sizes", None) or (), options.pop("reverse", False)
    if not isinstance(reverse, bool):
        raise ArgumentTypeError(f"reverse must be True or False, not {reverse!r}")
    if any(given) or sizes or reverse:
        from ckptconv.edits.regroup_files import read_rules, read_sizes  # lazily, for start-up

        options |= {"regroup": read_rules(*given, reverse=reverse), "sizes": read_sizes(sizes)}
    return Edits(
        **{_FIELDS.get(name, name): _READ[name](value) if name in _READ else value for name, value in options.items()}
    )


def split_edits(options: Mapping[str, Any]) -> tuple[Edits, dict[str, Any]]:
    """Return the edits in `options`, and a dict of the other options. Raises the errors of :func:`edits_from`."""
    edits = {name: value for name, value in options.items() if name in EditOptions.__annotations__}
    return edits_from(**edits), {name: value for name, value in options.items() if name not in edits}


def option_of(field: str, what: object) -> Message:
    """Return the command-line option for the element `what` of the field `field` of :class:`Edits`."""
    keyword = next((name for name, called in _FIELDS.items() if called == field), field)
    if isinstance(what, Rule):
        what = what.old, str(what.new)
    elif field == "regroup" and isinstance(what, str):
        keyword = "rules"
    return option(keyword, (what if isinstance(what, tuple) else str(what),))


def check_flags(options: Any) -> None:
    """Raise ArgumentTypeError if a field of the dataclass `options` has a value of a wrong type.

    Only fields of the types bool, int, ``str | None`` and ``Literal[...] | None`` are checked.
    """
    wanted: dict[Any, str] = {bool: "True or False", int: "a whole number", str | None: "a text"}
    for each in fields(options):
        value = getattr(options, each.name)
        kind: Any = each.type
        words = [word for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]
        if words and value not in (None, *words):
            raise ArgumentTypeError(f"{each.name} must be {' or '.join(map(repr, words))}, not {value!r}")
        if kind in wanted and not isinstance(value, kind):
            part = "; a part is taken with select=PATH" if each.name == "state_dict" else ""
            raise ArgumentTypeError(f"{each.name} must be {wanted[kind]}, not {value!r}{part}")


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
    **dict.fromkeys(("like", "model"), lambda value: os.fsdecode(value) if isinstance(value, os.PathLike) else value),
    **{name: partial(strings, name) for name in ("drop", "include", "exclude", "strip_prefix", "add_prefix")},
}
#: The fields of those that are called otherwise.
_FIELDS = {"map_location": "devices", "dtype": "dtypes"}
#: No edits at all.
NO_EDITS = Edits()
