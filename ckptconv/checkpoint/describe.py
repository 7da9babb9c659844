"""Describe any object in a checkpoint that is not a tensor, in one short line."""

from __future__ import annotations

from ckptconv.checkpoint.rebuild_functions import torch_device
from ckptconv.errors import count
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Extension,
    Global,
    List,
    Node,
    PersistentId,
    Py2String,
    Tuple,
    Value,
    args_of,
    is_global,
    latin_1_text,
    members_of,
)

_LONGEST = 60  # characters
_LOOKED_AT = 64  # members of a collection that a call makes


def is_flat(node: Value) -> bool:
    """Return whether one line can show the content of `node`.

    It can for a sequence or set of atoms, an empty dict, a torch.device and a torch.Size.
    """
    members = members_of(node, _LOOKED_AT)
    if members is not None:
        return not any(isinstance(item, Node) for item in members)
    if isinstance(node, Call) and (torch_device(node) is not None or is_global(node.callable, "torch.Size")):
        return True
    return isinstance(node, Dict) and not node.effects


def describe(node: Value) -> str:
    """Return a line of about 60 characters that describes `node`.

    The time is short for any node, also for long collections.
    """
    members = members_of(node, _LOOKED_AT)
    if members is not None and not any(isinstance(item, Node) for item in members):
        return _short_sequence(node, members)
    if isinstance(node, Dict):
        return "{}"
    if isinstance(node, Call):
        return _short_call(node)
    if isinstance(node, Global):
        return str(node)
    if isinstance(node, Blob):
        return f"{node.kind} of {count(node.length, 'byte')}"
    if isinstance(node, PersistentId):
        return "storage"
    if isinstance(node, Extension):
        return f"extension {node.code}"
    if isinstance(node, (Py2String, ByteArray)):
        node = node.data
    if isinstance(node, (str, bytes)):
        node = node[:_LONGEST]
    if isinstance(node, int) and node.bit_length() > 200:
        return f"int of {node.bit_length():,} bits"
    return _cut(repr(node))


def _short_call(node: Call) -> str:
    device = torch_device(node)
    if device is not None:
        return f"torch.device({device!r})"
    first, text = next(iter(args_of(node)), None), latin_1_text(node)
    if (
        is_global(node.callable, "torch.Size")
        and isinstance(first, Tuple)
        and len(first.items) <= _LOOKED_AT
        and is_flat(first)
    ):
        return f"torch.Size({describe(first)})"
    if isinstance(text, str):
        return _cut(repr(text[:_LONGEST].encode("latin-1", "replace")))
    return f"object of {node.callable}" if isinstance(node.callable, Global) else "object"


def _short_sequence(node: Value, items: list[Value]) -> str:
    """Return the first 8 `items`, the members of `node`, as Python prints them. A frozenset is printed like a set."""
    opening, closing = "()" if isinstance(node, Tuple) else "[]" if isinstance(node, List) else "{}"
    if not items and opening == "{":
        return "set()"
    shown = ", ".join(describe(item) for item in items[:8])
    if len(items) > 8:
        number = "" if isinstance(node, Call) else f" {len(items):,} items"
        return f"{_cut(opening + shown)}, …{closing}{number}"
    return _cut(f"{opening}{shown}{',' if opening == '(' and len(items) == 1 else ''}{closing}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
