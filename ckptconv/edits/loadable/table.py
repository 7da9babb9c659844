"""The classes whose objects are only data: what each becomes, why nothing is lost or run, and how code reads it then.

Only what stands here is taken. Members of an Enum and states of dataclasses look like any other object in a pickle.
``docs/loadable.md`` has the same table, which a test compares with this one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ckptconv.edits.loadable import texts
from ckptconv.edits.loadable.arrays import FROM_BUFFER, RECONSTRUCT, SCALAR, Arrays, dtype_text, scalar
from ckptconv.edits.loadable.containers import (
    config,
    frozen_set,
    mapping,
    namespace,
    queue,
    random_state,
)
from ckptconv.edits.loadable.pickled import NotPlain, Pickled, bytes_of
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Value, members_of


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
        _by(texts.path), "text", "its text", "{x}, or pathlib.Path({x})",
    ),
    Row(
        "torch.torch_version.TorchVersion", ("torch.torch_version.TorchVersion",),
        _by(texts.version), "text", "the text that it is", "{x}, or TorchVersion({x})",
    ),
    Row(
        "datetime.datetime", ("datetime.datetime",), _by(texts.moment), "ISO text",
        "to the microsecond, with its offset from UTC; a zone with a name is refused", "datetime.fromisoformat({x})",
    ),
    Row(
        "datetime.date", ("datetime.date",), _by(texts.date), "ISO text",
        "the day", "date.fromisoformat({x})",
    ),
    Row(
        "datetime.time", ("datetime.time",), _by(texts.time), "ISO text",
        "to the microsecond, with its offset from UTC", "time.fromisoformat({x})",
    ),
    Row(
        "datetime.timedelta", ("datetime.timedelta",), _by(texts.duration), "ISO text",
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
