"""The rules of torch's ``weights_only`` unpickler as a static copy: allowed globals, and what it refuses.

Source: ``torch/_weights_only_unpickler.py`` of torch 2.13; a test compares the list with torch's own. Older versions
take less: ``_rebuild_wrapper_subclass`` and ``_rebuild_tensor_v3`` since 2.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Extension,
    FrozenSet,
    Global,
    Graph,
    Node,
    Object,
    Py2String,
    Tuple,
    Value,
    children,
    is_global,
    walk,
)
from ckptconv.pickles.opcodes import CODES
from ckptconv.pickles.python2_names import imported_name

__all__ = ["ALLOWED", "can_be_made_loadable", "is_allowed", "obstacles", "refused_opcodes"]

_TENSOR_CLASSES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_TYPED_STORAGES = {name for name in BY_STORAGE_CLASS if name and name != "UntypedStorage"}
_QUANTIZED = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")

ALLOWED: frozenset[str] = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
    }
    | {f"torch.{name}" for name in BY_NAME}
    | {f"torch.{name}" for name in _TYPED_STORAGES}
    | {f"torch.cuda.{name}" for name in _TYPED_STORAGES.difference(_QUANTIZED)}
    | {f"torch.{where}{name}Tensor" for name in _TENSOR_CLASSES for where in ("", "cuda.")}
    | {f"torch.{where}sparse.{name}Tensor" for name in _TENSOR_CLASSES if name != "Bool" for where in ("", "cuda.")}
    | {
        f"torch.{name}"
        for name in (
            "per_tensor_affine",
            "per_tensor_symmetric",
            "per_channel_affine",
            "per_channel_symmetric",
            "per_channel_affine_float_qparams",
        )
    }
    | {
        f"torch._utils._rebuild_{name}"
        for name in (
            "parameter",
            "parameter_with_state",
            "qtensor",
            "tensor",
            "tensor_v2",
            "tensor_v3",
            "sparse_tensor",
            "meta_tensor_no_storage",
            "nested_tensor",
            "wrapper_subclass",
            "device_tensor_from_numpy",
            "device_tensor_from_cpu_tensor",
        )
    }
)

_OPCODES = (
    "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MARK", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET",
    "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINPERSID", "BINGET",
    "LONG_BINGET", "BINPUT", "LONG_BINPUT", "LONG1", "PROTO", "STOP",
)  # a table  # fmt: skip
_TAKEN = {CODES[name][0] for name in _OPCODES}
_MAPPINGS = ("collections.OrderedDict", "collections.Counter")
_BUILDABLE = (
    *_MAPPINGS,
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_tensor",
)
_LONG = "an integer of more than 255 bytes"
_LONGEST_INT = 8 * 255 - 1  # LONG1 has one byte for the length, and the integer a sign


def is_allowed(node: Global) -> bool:
    """Whether the unpickler takes `node`. Whatever the protocol, it maps Python 2's names first."""
    return imported_name(node, 2) in ALLOWED


def refused_opcodes(graph: Graph) -> list[str]:
    """The names of the opcodes in the pickle as it stands that the unpickler does not know."""
    return sorted(name for name, code in CODES.items() if code[0] in graph.used - _TAKEN)


def can_be_made_loadable(graph: Graph) -> bool:
    """Whether the unpickler refuses the pickle for its opcodes or protocol alone, so that
    it only has to be written differently.
    """
    return (graph.protocol > 2 or bool(refused_opcodes(graph))) and next(obstacles(graph), None) is None


def obstacles(graph: Graph, nodes: Iterable[Node] | None = None) -> Iterator[tuple[str, Value]]:
    """What in `graph` the unpickler refuses however it is written: a global's name or a reason, and where it stands.

    `nodes` are all of `graph`, where they are known.
    """
    if _is_long(graph.root):
        yield _LONG, graph.root
    for node in walk([*graph.discarded, graph.root]) if nodes is None else nodes:
        yield from ((reason, node) for reason in _node_obstacles(node))
    for value in graph.discarded:
        if isinstance(value, Node):
            yield "a call whose result is thrown away", value


def _node_obstacles(node: Node) -> Iterator[str]:
    if isinstance(node, Global):
        if not is_allowed(node):
            yield str(node)
    elif isinstance(node, Call):
        yield from _call_obstacles(node)
    elif isinstance(node, FrozenSet):
        yield "a frozenset"
    elif isinstance(node, Extension):
        yield "an extension code"
    elif (isinstance(node, Py2String) and len(node.data) > 255) or (isinstance(node, Blob) and node.kind != "str"):
        yield "a long byte string"
    elif isinstance(node, Py2String) and not _is_utf8(node.data):
        yield "a byte string of Python 2 that is no UTF-8"
    if isinstance(node, (Object, Tuple)) and any(_is_long(value) for value in children(node)):
        yield _LONG


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_long(value: Value) -> bool:
    return type(value) is int and (value if value >= 0 else ~value).bit_length() > _LONGEST_INT


def _call_obstacles(call: Call) -> Iterator[str]:
    function = call.callable
    if not isinstance(function, Global) or call.kind not in ("REDUCE", "NEWOBJ"):
        yield "an object made in a way that only pickle knows"
    for effect in call.effects:
        if effect.opcode in ("SETITEM", "SETITEMS"):
            fits = is_global(function, *_MAPPINGS)
        else:
            fits = effect.opcode == "BUILD" and is_global(function, *_BUILDABLE)
        if not fits and isinstance(function, Global) and is_allowed(function):
            yield f"{effect.opcode} on the result of {function}"
