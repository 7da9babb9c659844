"""The classes whose objects are only data: what each becomes, why nothing is lost or run, and how code reads it then.

Only what stands here is taken. Members of an Enum and states of dataclasses look like any other object in a pickle.
``docs/loadable.md`` has the same table, which a test compares with this one.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptconv.edits.loadable import texts
from ckptconv.edits.loadable.arrays import FROM_BUFFER, RECONSTRUCT, SCALAR, Arrays, dtype_text
from ckptconv.edits.loadable.containers import (
    config_container,
    config_node,
    frozen_set,
    mapping,
    namespace,
    queue,
    random_state,
)
from ckptconv.edits.loadable.pickled import NotPlain, Pickled, bytes_of
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Value, members_of

__all__ = ["BY_CLASS", "FROZEN_SET", "NUMPY_TYPE", "NUMPY_TYPES", "OTHER", "ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """Classes whose objects become plain in one way.

    Attributes:
        title: What the report and the docs call them.
        classes: Their names, by Python 3's modules; or those of the functions that pickles call to make one.
        make: Gives the plain value, or raises :class:`~ckptconv.edits.loadable.pickled.NotPlain`.
        plain: What that is.
        why: Why nothing is lost or run.
        reads: How code reads it then; ``{x}`` stands for its name, ``{key}`` for a key in it.
        reads_list: The same where it is a list.
        is_listed: Whether a report names an object that became this value.
    """

    title: str
    classes: tuple[str, ...]
    make: Callable[[Arrays, Call, Pickled], Value]
    plain: str
    why: str
    reads: str
    reads_list: str = ""
    is_listed: Callable[[Value], bool] = lambda _: True


def _bytes(_: Arrays, call: Call, __: Pickled) -> Value:
    data = bytes_of(call)
    if data is None:
        raise NotPlain("it is not said as Python 2's protocol says no bytes")
    return data


def _frozen_set(_: Arrays, call: Call, __: Pickled) -> Value:
    members = members_of(call)
    if members is None:
        raise NotPlain("it is made of what is no sequence")
    return frozen_set(members)


def _is_interpolation(value: Value) -> bool:
    return isinstance(value, str) and "${" in value


_NAMESPACES = {"argparse.Namespace": "**{x}", "types.SimpleNamespace": "**{x}", "optparse.Values": "{x}"}
_CONFIG_NODES = ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum", "InterpolationResult")
_PATHS = ("PurePosixPath", "PosixPath", "PureWindowsPath", "WindowsPath", "PurePath", "Path")

FROZEN_SET = Row(
    "frozenset", ("builtins.frozenset",), _frozen_set, "set",
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
        "numpy scalar", SCALAR, lambda arrays, _, made: arrays.scalar(made), "number, text or bytes",
        "the Python number of the same value; a long double only where a float is that", "{x}",
    ),
    Row(
        "numpy.dtype", ("numpy.dtype",), lambda _, call, __: dtype_text(call), "text",
        "its name, of which `numpy.dtype` makes the same", "numpy.dtype({x})",
    ),
    Row(
        "numpy.random.RandomState", ("numpy.random._pickle.__randomstate_ctor",),
        lambda _, __, made: random_state(made), "dict",
        "its state, of which it draws the same numbers", "RandomState().set_state({x})",
    ),
    *(
        Row(
            title, (title,), lambda _, __, made: namespace(made), "dict",
            "its attributes, in their order", f"{{x}}[{{key!r}}], or {title}({args})",
        )
        for title, args in _NAMESPACES.items()
    ),
    Row(
        "collections.defaultdict", ("collections.defaultdict",), lambda _, call, made: mapping(made, call), "dict",
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
        lambda _, call, made: mapping(made, call), "dict",
        "its items, in their order; its attributes are the same, or the class's own", "{x}[{key!r}]",
    ),
    Row(
        "OmegaConf container",
        ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.UnionNode"),
        lambda _, __, made: config_container(made), "dict or list",
        "what it holds; types and flags are OmegaConf's own", "{x}[{key!r}], or OmegaConf.create({x})",
    ),
    Row(
        "OmegaConf interpolation", tuple(f"omegaconf.nodes.{name}Node" for name in _CONFIG_NODES),
        lambda _, __, made: config_node(made), "text",
        "the value that a node holds; an interpolation is not resolved", "OmegaConf.create(...) resolves it",
        is_listed=_is_interpolation,
    ),
    Row(
        "collections.deque", ("collections.deque",), lambda _, __, made: queue(made), "list",
        "what it holds, in its order; its greatest length is lost", "{x}, or deque({x}, maxlen=...)",
    ),
    FROZEN_SET,
    Row(
        "bytes", ("builtins.bytes",), _bytes, "bytes", "the same; protocol 2 says by a call that there are none", "{x}",
        is_listed=lambda _: False,
    ),
    Row(
        "path", tuple(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        lambda _, __, made: texts.path(made), "text", "its text", "{x}, or pathlib.Path({x})",
    ),
    Row(
        "torch.torch_version.TorchVersion", ("torch.torch_version.TorchVersion",),
        lambda _, __, made: texts.version(made), "text", "the text that it is", "{x}, or TorchVersion({x})",
    ),
    Row(
        "datetime.datetime", ("datetime.datetime",), lambda _, __, made: texts.moment(made), "ISO text",
        "to the microsecond, with its offset from UTC; a zone with a name is refused", "datetime.fromisoformat({x})",
    ),
    Row(
        "datetime.date", ("datetime.date",), lambda _, __, made: texts.date(made), "ISO text",
        "the day", "date.fromisoformat({x})",
    ),
    Row(
        "datetime.time", ("datetime.time",), lambda _, __, made: texts.time(made), "ISO text",
        "to the microsecond, with its offset from UTC", "time.fromisoformat({x})",
    ),
    Row(
        "datetime.timedelta", ("datetime.timedelta",), lambda _, __, made: texts.duration(made), "ISO text",
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
