"""The classes whose objects are only data, and what each becomes: why nothing is lost or run, and how code reads it.

Only what stands here is taken. Members of an Enum and states of dataclasses look like any other object in a pickle.
``docs/loadable.md`` has the same table, which a test compares with this one.

Source: ``__reduce__`` and ``_getstate`` of ``pathlib`` and ``datetime`` (``Lib/_pydatetime.py``) of CPython.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath

from ckptconv.edits.loadable.arrays import FROM_BUFFER, RECONSTRUCT, SCALAR, Arrays, dtype_text, scalar
from ckptconv.edits.loadable.pickled import NotPlain, Pickled, bytes_of, pickled, texts_of
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import AT_ONCE, Call, Dict, Effect, List, Node, Set, Value, members_of, set_items

#: Attributes that mappings keep for themselves, beside their items.
_OWN = ("__immutable__", "__deprecated_keys__", "__renamed_keys__", "__new_allowed__", "__frozen", "__parent", "__key")
_WITH_FACTORY = "collections.defaultdict"  # which is called with what makes missing values first
_WORDS = {"__class__", "__args__", "__state__", "__items__", "__elements__"}


def _list(elements: list[Value]) -> List:
    """A list of `elements`."""
    made = List()
    for start in range(0, len(elements), AT_ONCE):
        made.add(Effect("APPENDS", elements[start : start + AT_ONCE], None))
    return made


def namespace(made: Pickled) -> Dict:
    """A dict of the attributes."""
    if made.args or made.items or made.elements:
        raise NotPlain("it has more than attributes")
    return set_items(Dict(), [value for item in made.attributes().items() for value in item])


def mapping(made: Pickled) -> Dict:
    """A dict of the items of a mapping, whose attributes say nothing else."""
    items = made.items
    args = made.args[1:] if made.cls == _WITH_FACTORY else made.args
    if args and not made.is_new:  # called with them; dict.__new__ does not look at them
        if len(args) > 1 or not isinstance(args[0], Dict):
            raise NotPlain("it is made of what is no dict")
        items = [value for effect, i in args[0].pairs() for value in effect.values[i : i + 2]] + items
    if made.elements:
        raise NotPlain("it is a mapping and a list")
    if [state for state in made.states if state is not made.call]:  # a class can have itself as its attributes
        known = {key: value for key, value in zip(items[::2], items[1::2], strict=True) if isinstance(key, str)}
        for name, value in made.attributes().items():
            if name not in _OWN and not (name in known and _is_same(known[name], value)):
                raise NotPlain(f"its attribute {name} is no item of it")
    return set_items(Dict(), items)


def _is_same(a: Value, b: Value) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Node) and a == b)


def config(attribute: str, made: Pickled) -> Value:
    """What a container or a node of OmegaConf's holds as this `attribute`; a text where it is missing or an
    interpolation.
    """
    attributes = made.attributes()
    if made.args or made.items or made.elements or attribute not in attributes:
        raise NotPlain("it is none of OmegaConf 2")
    return attributes[attribute]


def queue(made: Pickled) -> List:
    """A list of what is in a deque."""
    first = made.args[0] if made.args else None
    held = members_of(first) if first is not None else []
    if held is None or len(made.args) > 2 or made.items or made.attributes():
        raise NotPlain("it is not said as Python says a deque")
    return _list([*held, *made.elements])


def random_state(made: Pickled) -> Dict:
    """The state of a RandomState, in which its generator's stands too."""
    state = made.states[0] if len(made.states) == 1 else None
    if not isinstance(state, Dict) or made.items or made.elements:
        raise NotPlain("its state is not said as numpy says one")
    return state


def frozen_set(members: list[Value]) -> Set:
    """A set of `members`."""
    made = Set()
    for start in range(0, len(members), AT_ONCE):
        made.add(Effect("ADDITEMS", members[start : start + AT_ONCE], None))
    return made


def named(name: str) -> Dict:
    """A dict that says the `name` of a class or function."""
    return set_items(Dict(), ["__global__", name])


def described(made: Pickled) -> Dict:
    """A dict that says what the pickle says: the class, and the attributes of the object.

    What it is called with, holds as a mapping or list, or has as another state, has keys like ``__args__``.
    """
    items: list[Value] = ["__class__", made.cls]
    if made.args:
        items += ("__args__", _list(made.args))
    try:
        attributes: dict[str, Value] = made.attributes()
    except NotPlain:
        attributes = {}
        items += ("__state__", made.states[0] if len(made.states) == 1 else _list(made.states))
    if made.items:
        items += ("__items__", set_items(Dict(), made.items))
    if made.elements:
        items += ("__elements__", _list(made.elements))
    if not _WORDS.isdisjoint(attributes):
        raise NotPlain("an attribute is called as what says its class")
    return set_items(Dict(), [*items, *(value for item in attributes.items() for value in item)])


_UTC = ("pytz._UTC", "dateutil.tz.tz.tzutc")


def _path_text(made: Pickled) -> str:
    """The text of a path, which is made of its parts."""
    parts = texts_of(made.args)
    _check_bare(made)
    return str(PureWindowsPath(*parts) if "Windows" in made.cls else PurePosixPath(*parts))


def _version_text(made: Pickled) -> str:
    """The text that a version is."""
    if len(made.args) != 1 or made.attributes():
        raise NotPlain("it is more than a text")
    return texts_of(made.args)[0]


def _date_text(made: Pickled) -> str:
    """A date as ISO text."""
    data = _state(made, 4)
    return _checked(lambda: datetime.date(data[0] << 8 | data[1], data[2], data[3]).isoformat())


def _time_text(made: Pickled) -> str:
    """A time of day as ISO text."""
    data, zone = _state(made, 6), _zone(made)
    return _checked(
        lambda: datetime.time(data[0], data[1], data[2], int.from_bytes(data[3:6], "big"), zone).isoformat()
    )


def _moment_text(made: Pickled) -> str:
    """A date and time as ISO text, with its offset from UTC where it has one."""
    data, zone = _state(made, 10), _zone(made)
    year, (month, day, hour, minute, second) = data[0] << 8 | data[1], data[2:7]
    microsecond = int.from_bytes(data[7:10], "big")
    return _checked(lambda: datetime.datetime(year, month, day, hour, minute, second, microsecond, zone).isoformat())


def _duration_text(made: Pickled) -> str:
    """A span of time as an ISO duration: days, seconds and microseconds, all of one sign."""
    span = _span(made)
    sign, span = ("-", -span) if span.days < 0 else ("", span)
    seconds = f"{span.seconds}.{span.microseconds:06}" if span.microseconds else f"{span.seconds}"
    return f"{sign}P{span.days}DT{seconds}S"


def _span(made: Pickled) -> datetime.timedelta:
    _check_bare(made)
    parts = made.args
    if len(parts) != 3 or not all(type(part) is int and abs(part) < 1 << 50 for part in parts):
        raise NotPlain("it is not said in days, seconds and microseconds")
    try:
        return datetime.timedelta(*parts)  # type: ignore[arg-type]  # three integers: checked above
    except OverflowError:
        raise NotPlain("Python has no such span of time") from None


def _state(made: Pickled, length: int) -> bytes:
    """The bytes that say a date or time."""
    _check_bare(made)
    data = bytes_of(made.args[0]) if made.args else None
    if data is None or len(data) != length or len(made.args) > 2:
        raise NotPlain(f"it is not said in {length} bytes")
    return data


def _zone(made: Pickled) -> datetime.tzinfo | None:
    """The time zone, which has to be an offset from UTC without a name of its own."""
    if len(made.args) < 2 or made.args[1] is None:
        return None
    zone = pickled(made.args[1]) if isinstance(made.args[1], Call) else None
    if zone and zone.cls in _UTC and not zone.args:
        return datetime.timezone.utc
    if zone is None or zone.cls != "datetime.timezone" or len(zone.args) != 1 or not isinstance(zone.args[0], Call):
        raise NotPlain("its time zone is no offset from UTC alone")
    _check_bare(zone)
    offset = pickled(zone.args[0])
    if offset is None or offset.cls != "datetime.timedelta":
        raise NotPlain("its time zone is no offset from UTC alone")
    try:
        return datetime.timezone(_span(offset))
    except ValueError:
        raise NotPlain("its time zone is no offset from UTC alone") from None


def _checked(make: Callable[[], str]) -> str:
    """What `make` gives, where there is such a time. A second time within one hour (fold) has no ISO text."""
    try:
        return make()
    except (ValueError, OverflowError):
        raise NotPlain("there is no such date or time, or ISO has no text for it") from None


def _check_bare(made: Pickled) -> None:
    """Raise NotPlain where anything is done to it after it is made."""
    if made.states or made.items or made.elements:
        raise NotPlain("something is done to it after it is made")


@dataclass(frozen=True)
class Row:
    """Classes whose objects become plain in one way.

    Attributes:
        title: What the report and the docs call them.
        classes: Their names, by Python 3's modules; or those of the functions that pickles call to make one.
        make: Gives the plain value of what a pickle says, which may stand in an array of the checkpoint's, or raises
            :class:`~ckptconv.edits.loadable.pickled.NotPlain`.
        plain: What that is.
        why: Why nothing is lost or run.
        reads: How code reads it then; ``{x}`` stands for its name, ``{key}`` for a key in it.
        reads_list: The same where it is a list.
        is_listed: Whether a report names an object that became this value.
    """

    title: str
    classes: tuple[str, ...]
    make: Callable[[Arrays, Pickled], Value]
    plain: str
    why: str
    reads: str
    reads_list: str = ""
    is_listed: Callable[[Value], bool] = lambda _: True


def _by(read: Callable[[Pickled], Value]) -> Callable[[Arrays, Pickled], Value]:
    """What `read` makes, which has nothing to do with arrays."""
    return lambda _, made: read(made)


def _bytes(made: Pickled) -> Value:
    data = bytes_of(made.call)
    if data is None:
        raise NotPlain("it is not said as Python 2's protocol says no bytes")
    return data


def _frozen_set(made: Pickled) -> Value:
    members = members_of(made.call)
    if members is None:
        raise NotPlain("it is made of what is no sequence")
    return frozen_set(members)


def _is_interpolation(value: Value) -> bool:
    return isinstance(value, str) and "${" in value


_NAMESPACES = {"argparse.Namespace": "**{x}", "types.SimpleNamespace": "**{x}", "optparse.Values": "{x}"}
_CONFIG_NODES = ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum", "InterpolationResult")
_PATHS = ("PurePosixPath", "PosixPath", "PureWindowsPath", "WindowsPath", "PurePath", "Path")

FROZEN_SET = Row(
    "frozenset", ("builtins.frozenset",), _by(_frozen_set), "set",
    "its members; a set is no key, so a frozenset that is one is refused", "{x}, or frozenset({x})",
)  # a table  # fmt: skip
NUMPY_TYPE = Row(
    "numpy type", (), lambda *_: None, "text",
    "its name, of which `numpy.dtype` makes the same", "numpy.dtype({x}).type",
)  # a table  # fmt: skip
#: With ``loadable_objects``: whatever stands in no other row.
OTHER = Row(
    "any other object, if asked for", (), lambda *_: None, "dict",
    "its class by name, which is not looked for, and its attributes", "{x}[{key!r}]",
)  # a table  # fmt: skip

ROWS: tuple[Row, ...] = (
    Row(
        "numpy.ndarray", (*RECONSTRUCT, *FROM_BUFFER), Arrays.array,
        "tensor of its dtype and shape; nested list where torch has no such dtype; list in states of generators",
        "its bytes; big-endian ones swapped, Fortran order kept as strides",
        "{x}, or {x}.numpy()",
        "{x}, or numpy.array({x})",
    ),
    Row(
        "numpy scalar", SCALAR, _by(scalar), "number, text or bytes",
        "the Python number of the same value; a long double only where a float is that", "{x}",
    ),
    Row(
        "numpy.dtype", ("numpy.dtype",), _by(lambda made: dtype_text(made.call)), "text",
        "its name, of which `numpy.dtype` makes the same", "numpy.dtype({x})",
    ),
    Row(
        "numpy.random.RandomState", ("numpy.random._pickle.__randomstate_ctor",),
        _by(random_state), "dict",
        "its state, of which it draws the same numbers", "RandomState().set_state({x})",
    ),
    *(
        Row(
            title, (title,), _by(namespace), "dict",
            "its attributes, in their order", f"{{x}}[{{key!r}}], or {title}({args})",
        )
        for title, args in _NAMESPACES.items()
    ),
    Row(
        "collections.defaultdict", ("collections.defaultdict",), _by(mapping), "dict",
        "its items, in their order; what makes missing ones is code", "{x}[{key!r}], or defaultdict(..., {x})",
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
        _by(mapping), "dict",
        "its items, in their order; its attributes are the same, or the class's own", "{x}[{key!r}]",
    ),
    Row(
        "OmegaConf container",
        ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.UnionNode"),
        _by(partial(config, "_content")), "dict or list",
        "what it holds; types and flags are OmegaConf's own", "{x}[{key!r}], or OmegaConf.create({x})",
    ),
    Row(
        "OmegaConf interpolation", tuple(f"omegaconf.nodes.{name}Node" for name in _CONFIG_NODES),
        _by(partial(config, "_val")), "text",
        "the value that a node holds; an interpolation is not resolved", "OmegaConf.create(...) resolves it",
        is_listed=_is_interpolation,
    ),
    Row(
        "collections.deque", ("collections.deque",), _by(queue), "list",
        "what it holds, in its order; its greatest length is lost", "{x}, or deque({x}, maxlen=...)",
    ),
    FROZEN_SET,
    Row(
        "bytes", ("builtins.bytes",), _by(_bytes), "bytes",
        "the same; protocol 2 says by a call that there are none", "{x}",
        is_listed=lambda _: False,
    ),
    Row(
        "path", tuple(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        _by(_path_text), "text", "its text", "{x}, or pathlib.Path({x})",
    ),
    Row(
        "torch.torch_version.TorchVersion", ("torch.torch_version.TorchVersion",),
        _by(_version_text), "text", "the text that it is", "{x}, or TorchVersion({x})",
    ),
    Row(
        "datetime.datetime", ("datetime.datetime",), _by(_moment_text), "ISO text",
        "to the microsecond, with its offset from UTC; a zone with a name is refused", "datetime.fromisoformat({x})",
    ),
    Row(
        "datetime.date", ("datetime.date",), _by(_date_text), "ISO text",
        "the day", "date.fromisoformat({x})",
    ),
    Row(
        "datetime.time", ("datetime.time",), _by(_time_text), "ISO text",
        "to the microsecond, with its offset from UTC", "time.fromisoformat({x})",
    ),
    Row(
        "datetime.timedelta", ("datetime.timedelta",), _by(_duration_text), "ISO text",
        "days, seconds and microseconds, such as P1DT3600S", "{x}, or pandas.Timedelta({x})",
    ),
)  # a table  # fmt: skip

BY_CLASS = {name: row for row in ROWS for name in row.classes}

#: numpy's types of which torch has the dtypes.
NUMPY_TYPES = frozenset(
    f"numpy.{name}"
    for name in (
        "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    )
)  # a table  # fmt: skip
