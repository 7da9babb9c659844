"""The classes whose objects contain only data: the plain data for each, why nothing is lost, and how code reads it.

Objects of other classes are not converted. Members of an Enum and states of dataclasses cannot be told from other
objects in a pickle. ``docs/loadable.md`` contains the same table; a test compares them.

Each function takes an object and returns its plain form, or raises NotPlain.

Source: ``__reduce__`` and ``_getstate`` of ``pathlib`` and ``datetime`` (``Lib/_pydatetime.py``) of CPython.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath

from ckptconv.checkpoint.legacy_python import bytes_of
from ckptconv.edits.loadable.arrays import FROM_BUFFER, RECONSTRUCT, SCALAR, numpy_dtype, scalar
from ckptconv.edits.loadable.pickled import LONGEST_WORD, NotPlain, Pickled, pickled, texts_of
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Dict, List, Node, Set, Value, add_elements, members_of, set_items

#: Attributes that mappings keep for their own use, in addition to their items.
_OWN = ("__immutable__", "__deprecated_keys__", "__renamed_keys__", "__new_allowed__", "__frozen", "__parent", "__key")
_WITH_FACTORY = "collections.defaultdict"  # its first argument makes missing values
_WORDS = {"__class__", "__args__", "__state__", "__items__", "__elements__"}
_UTC = ("pytz._UTC", "dateutil.tz.tz.tzutc")


# Containers. These functions return the plain value of an object, or raise NotPlain.


def _namespace(made: Pickled) -> Dict:
    """Return a dict of the attributes of an object that has nothing else."""
    if made.args or made.items or made.elements:
        raise NotPlain("it has data other than attributes")
    return set_items(Dict(), [value for item in made.attributes().items() for value in item])


def _mapping(made: Pickled) -> Dict:
    """Return a dict of the items of a mapping. Raise NotPlain if its attributes contain other data."""
    items = made.items
    args = made.args[1:] if made.cls == _WITH_FACTORY else made.args
    if args and not made.is_new:  # dict.__new__ ignores its arguments
        if len(args) > 1 or not isinstance(args[0], Dict):
            raise NotPlain("it is not created from a dict")
        items = [value for item in args[0].entries() for value in item] + items
    if made.elements:
        raise NotPlain("it is both a mapping and a list")
    if [state for state in made.states if state is not made.call]:  # a mapping can be its own attributes
        known = {key: value for key, value in zip(items[::2], items[1::2], strict=True) if isinstance(key, str)}
        for name, value in made.attributes().items():
            if name not in _OWN and not (name in known and _is_same(known[name], value)):
                raise NotPlain(f"its attribute {name[:LONGEST_WORD]} is not one of its items")
    return set_items(Dict(), items)


def _is_same(a: Value, b: Value) -> bool:
    """Return whether `a` and `b` are the same node, or atoms of equal type and value."""
    return a is b or (type(a) is type(b) and not isinstance(a, Node) and a == b)


def _config(attribute: str, made: Pickled) -> Value:
    """Return the content of a container or node of OmegaConf, which is its attribute `attribute`.

    The content is a text if the value is missing or an interpolation.
    """
    attributes = made.attributes()
    if made.args or made.items or made.elements or attribute not in attributes:
        raise NotPlain("it is not in the form of OmegaConf 2")
    return attributes[attribute]


def _queue(made: Pickled) -> List:
    """Return a list of the elements of a deque. The maximum length is dropped."""
    first = made.args[0] if made.args else None
    members = members_of(first) if first is not None else []
    if members is None or len(made.args) > 2 or made.items or made.attributes():
        raise NotPlain("it is not in the form that Python writes")
    return add_elements(List(), [*members, *made.elements])


def _random_state(made: Pickled) -> Dict:
    """Return the state dict of a RandomState, which includes the state of its bit generator."""
    state = made.states[0] if len(made.states) == 1 else None
    if not isinstance(state, Dict) or made.items or made.elements:
        raise NotPlain("its state is not in the form that NumPy writes")
    return state


def _frozen_set(made: Pickled) -> Set:
    """Return a set of the members of a frozenset that is the result of a call, as before protocol 4."""
    members = members_of(made.call)
    if members is None:
        raise NotPlain("it is not created from a sequence")
    return add_elements(Set(), members)


def _bytes(made: Pickled) -> bytes:
    """Return the empty bytes object that the call of Python 2's protocol creates."""
    data = bytes_of(made.call)
    if data is None:
        raise NotPlain("it is not in the form that protocol 2 uses for empty bytes")
    return data


def described(made: Pickled) -> Dict:
    """Return a dict with the class and the attributes of an object of any class.

    Arguments, items, elements, and a state that is not a dict, are values of keys such as ``__args__``. Raises
    NotPlain if an attribute has the name of such a key.
    """
    items: list[Value] = ["__class__", made.cls]
    if made.args:
        items += ("__args__", add_elements(List(), made.args))
    try:
        attributes: dict[str, Value] = made.attributes()
    except NotPlain:
        attributes = {}
        items += ("__state__", made.states[0] if len(made.states) == 1 else add_elements(List(), made.states))
    if made.items:
        items += ("__items__", set_items(Dict(), made.items))
    if made.elements:
        items += ("__elements__", add_elements(List(), made.elements))
    if not _WORDS.isdisjoint(attributes):
        raise NotPlain("an attribute has a reserved name, such as __class__")
    return set_items(Dict(), [*items, *(value for item in attributes.items() for value in item)])


# Texts


def _path(made: Pickled) -> str:
    """Return the text of a path, from its components."""
    parts = texts_of(made.args)
    _check_bare(made)
    return str(PureWindowsPath(*parts) if "Windows" in made.cls else PurePosixPath(*parts))


def _version(made: Pickled) -> str:
    """Return the text of a TorchVersion."""
    if len(made.args) != 1 or made.attributes():
        raise NotPlain("it has data other than its text")
    return texts_of(made.args)[0]


def _iso(made: Pickled, make: Callable[[Pickled], datetime.date | datetime.time | datetime.datetime]) -> str:
    """Return the ISO text of the date or time that `make` returns. Raise NotPlain if there is none."""
    try:
        return make(made).isoformat()
    except (ValueError, OverflowError):  # also for the second time within one hour (fold)
        raise NotPlain("it is not a valid date or time, or has no ISO form") from None


def _date(made: Pickled) -> datetime.date:
    data = _state(made, 4)
    return datetime.date(data[0] << 8 | data[1], data[2], data[3])


def _time(made: Pickled) -> datetime.time:
    data, zone = _state(made, 6), _zone(made)
    return datetime.time(data[0], data[1], data[2], int.from_bytes(data[3:6], "big"), zone)


def _moment(made: Pickled) -> datetime.datetime:
    data, zone = _state(made, 10), _zone(made)
    year, (month, day, hour, minute, second) = data[0] << 8 | data[1], data[2:7]
    return datetime.datetime(year, month, day, hour, minute, second, int.from_bytes(data[7:10], "big"), zone)


def _duration(made: Pickled) -> str:
    """Return a timedelta as an ISO duration in days, seconds and microseconds, with a minus before it if it is
    negative.
    """
    span = _span(made)
    sign, span = ("-", -span) if span.days < 0 else ("", span)
    seconds = f"{span.seconds}.{span.microseconds:06}" if span.microseconds else f"{span.seconds}"
    return f"{sign}P{span.days}DT{seconds}S"


def _span(made: Pickled) -> datetime.timedelta:
    """Return a ``datetime.timedelta``.

    Raise NotPlain if the arguments are not days, seconds and microseconds in its range.
    """
    _check_bare(made)
    parts = made.args
    if len(parts) != 3 or not all(type(part) is int and abs(part) < 1 << 50 for part in parts):
        raise NotPlain("it is not given in days, seconds and microseconds")
    try:
        return datetime.timedelta(*parts)  # type: ignore[arg-type]  # three integers: checked above
    except OverflowError:
        raise NotPlain("it is too long for a timedelta") from None


def _state(made: Pickled, length: int) -> bytes:
    """Return the bytes of a date or time. Raise NotPlain unless there are `length` bytes."""
    _check_bare(made)
    data = bytes_of(made.args[0]) if made.args else None
    if data is None or len(data) != length or len(made.args) > 2:
        raise NotPlain(f"its value does not have {length} bytes")
    return data


def _zone(made: Pickled) -> datetime.tzinfo | None:
    """Return the time zone of a time, or None if it has none.

    Raise NotPlain unless it is an offset from UTC without a name.
    """
    if len(made.args) < 2 or made.args[1] is None:
        return None
    zone = pickled(made.args[1]) if isinstance(made.args[1], Call) else None
    if zone and zone.cls in _UTC and not zone.args:
        return datetime.timezone.utc
    if zone and zone.cls == "datetime.timezone" and len(zone.args) == 1 and isinstance(zone.args[0], Call):
        _check_bare(zone)
        offset = pickled(zone.args[0])
        if offset and offset.cls == "datetime.timedelta":
            try:
                return datetime.timezone(_span(offset))
            except ValueError:
                pass
    raise NotPlain("its time zone is not a plain offset from UTC")


def _check_bare(made: Pickled) -> None:
    """Raise NotPlain if the pickle changes the object after its creation."""
    if made.states or made.items or made.elements:
        raise NotPlain("it is changed after it is created")


# The table


@dataclass(frozen=True)
class Row:
    """Classes whose objects are converted to plain data in the same way.

    Attributes:
        title: The name of the classes in the report and the docs.
        classes: The classes, or the functions that pickles call to create an object, with Python 3's modules.
        make: A function that returns the plain data, or raises :class:`~ckptconv.edits.loadable.pickled.NotPlain`.
            None for arrays, which become tensors of the checkpoint, and for rows without classes.
        plain: The kind of the plain data.
        why: The reason why nothing is lost or run.
        reads: Code that reads the plain data. ``{x}`` is replaced by its name, and ``{key}`` by a key in it.
        reads_list: The same code if the plain data is a list, or an empty string.
        is_listed: A function that returns whether the report lists an object with this plain data.
    """

    title: str
    classes: tuple[str, ...]
    make: Callable[[Pickled], Value] | None
    plain: str
    why: str
    reads: str
    reads_list: str = ""
    is_listed: Callable[[Value], bool] = lambda _: True


_NAMESPACES = {"argparse.Namespace": "**{x}", "types.SimpleNamespace": "**{x}", "optparse.Values": "{x}"}
_CONFIG_NODES = ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum", "InterpolationResult")
_PATHS = ("PurePosixPath", "PosixPath", "PureWindowsPath", "WindowsPath", "PurePath", "Path")

FROZEN_SET = Row(
    "frozenset", ("builtins.frozenset",), _frozen_set, "set",
    "its members; a frozenset that is a key is refused, because a set cannot be one", "{x}, or frozenset({x})",
)  # a table  # fmt: skip
NUMPY_TYPE = Row(
    "numpy type", (), None, "text",
    "its name, for `numpy.dtype(name)`", "numpy.dtype({x}).type",
)  # a table  # fmt: skip
#: All other classes, if ``loadable_objects`` is set.
OTHER = Row(
    "any other object, if requested", (), None, "dict",
    "the name of its class, and its attributes", "{x}[{key!r}]",
)  # a table  # fmt: skip

ROWS: tuple[Row, ...] = (
    Row(
        "numpy.ndarray", (*RECONSTRUCT, *FROM_BUFFER), None,
        "tensor of its dtype and shape; nested list where torch has no such dtype; list in states of generators",
        "its bytes; big-endian ones swapped, Fortran order kept as strides",
        "{x}, or {x}.numpy()",
        "{x}, or numpy.array({x})",
    ),
    Row(
        "numpy scalar", SCALAR, scalar, "number, text or bytes",
        "the Python number of the same value; a long double only if a float is equal to it", "{x}",
    ),
    Row(
        "numpy.dtype", ("numpy.dtype",), lambda made: numpy_dtype(made.call).text, "text",
        "its name, for `numpy.dtype(name)`", "numpy.dtype({x})",
    ),
    Row(
        "numpy.random.RandomState", ("numpy.random._pickle.__randomstate_ctor",),
        _random_state, "dict",
        "its state, which gives the same random numbers", "RandomState().set_state({x})",
    ),
    *(
        Row(
            title, (title,), _namespace, "dict",
            "its attributes, in their order", f"{{x}}[{{key!r}}], or {title}({args})",
        )
        for title, args in _NAMESPACES.items()
    ),
    Row(
        "collections.defaultdict", ("collections.defaultdict",), _mapping, "dict",
        "its items, in their order, without the default factory", "{x}[{key!r}], or defaultdict(..., {x})",
    ),
    Row(
        "dict with attributes",
        (
            "easydict.EasyDict", "munch.Munch", "addict.addict.Dict", "addict.Dict", "yacs.config.CfgNode",
            "fvcore.common.config.CfgNode", "detectron2.config.config.CfgNode", "mmengine.config.config.ConfigDict",
            "mmcv.utils.config.ConfigDict", "lightning.fabric.utilities.data.AttributeDict",
            "lightning_fabric.utilities.data.AttributeDict", "pytorch_lightning.utilities.parsing.AttributeDict",
            "lightning.pytorch.utilities.parsing.AttributeDict",
        ),
        _mapping, "dict",
        "its items, in their order; its attributes are the same, or the class's own", "{x}[{key!r}]",
    ),
    Row(
        "OmegaConf container",
        ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.UnionNode"),
        partial(_config, "_content"), "dict or list",
        "its content, without the types and flags of OmegaConf", "{x}[{key!r}], or OmegaConf.create({x})",
    ),
    Row(
        "OmegaConf interpolation", tuple(f"omegaconf.nodes.{name}Node" for name in _CONFIG_NODES),
        partial(_config, "_val"), "text",
        "the value of a node; an interpolation is not resolved", "OmegaConf.create(...) resolves it",
        is_listed=lambda value: isinstance(value, str) and "${" in value,
    ),
    Row(
        "collections.deque", ("collections.deque",), _queue, "list",
        "its elements, in their order, without its maximum length", "{x}, or deque({x}, maxlen=...)",
    ),
    FROZEN_SET,
    Row(
        "bytes", ("builtins.bytes",), _bytes, "bytes",
        "the same; protocol 2 writes empty bytes as a call", "{x}",
        is_listed=lambda _: False,
    ),
    Row(
        "path", tuple(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        _path, "text", "its text", "{x}, or pathlib.Path({x})",
    ),
    Row(
        "torch.torch_version.TorchVersion", ("torch.torch_version.TorchVersion",),
        _version, "text", "its text", "{x}, or TorchVersion({x})",
    ),
    Row(
        "datetime.datetime", ("datetime.datetime",), partial(_iso, make=_moment), "ISO text",
        "to the microsecond, with its offset from UTC; a zone with a name is refused", "datetime.fromisoformat({x})",
    ),
    Row(
        "datetime.date", ("datetime.date",), partial(_iso, make=_date), "ISO text",
        "the day", "date.fromisoformat({x})",
    ),
    Row(
        "datetime.time", ("datetime.time",), partial(_iso, make=_time), "ISO text",
        "to the microsecond, with its offset from UTC", "time.fromisoformat({x})",
    ),
    Row(
        "datetime.timedelta", ("datetime.timedelta",), _duration, "ISO text",
        "days, seconds and microseconds, such as P1DT3600S", "{x}, or pandas.Timedelta({x})",
    ),
)  # a table  # fmt: skip

BY_CLASS = {name: row for row in ROWS for name in row.classes}

#: The types of numpy for which torch has a dtype.
NUMPY_TYPES = frozenset(
    f"numpy.{name}"
    for name in (
        "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
)  # a table  # fmt: skip
