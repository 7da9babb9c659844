"""Replace forms of Python 2 and of torch before 0.4 by those of today's torch, so that other code knows only one form.

    a key that is a Python 2 ``str``             text, if it is UTF-8, as torch's loader decodes it
    ``OrderedDict([[key, value], ...])``         an OrderedDict whose items are set afterwards
    ``torch.cuda.FloatTensor()`` and its state   ``_rebuild_tensor(storage, offset, size, stride)``, without CUDA
    ``Parameter(tensor, ...)`` and its state     ``_rebuild_parameter(tensor, requires_grad, hooks)``

This module also reads texts and bytes in the forms of all protocols.

Source: ``Tensor.__setstate__`` in ``torch/_tensor.py`` of torch 2.13, which still accepts the old states.
"""

from __future__ import annotations

from typing import TypeAlias

from ckptconv.byteranges.reading import Latin1Text, Step, no_bytes
from ckptconv.byteranges.sources import BytesSource, Readable
from ckptconv.byteranges.spans import ByteRange
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Effect,
    Global,
    Graph,
    List,
    Object,
    Py2String,
    Tuple,
    Value,
    args_of,
    is_global,
    latin_1_text,
    walk,
)
from ckptconv.pickles.machine import CODES

#: A source, an offset and a length.
Span: TypeAlias = "tuple[Readable, int, int]"
_PYTHON_2 = frozenset(CODES[name][0] for name in ("STRING", "BINSTRING", "SHORT_BINSTRING"))
_TENSOR_CLASS = regex(r"torch\.(?:cuda\.)?[A-Z][A-Za-z0-9]*Tensor")
_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.Parameter")


def text_of(value: Value) -> str | None:
    """Return the text of `value`, a string of Python 3 or a UTF-8 string of Python 2. Return None for other values."""
    if isinstance(value, Py2String):
        return value.text
    return value if isinstance(value, str) else None


def bytes_of(value: Value) -> bytes | None:
    """Return the bytes of `value`, in any form in which a protocol writes bytes.

    Return None if it is not a bytes object, or if its bytes are still in the file.
    """
    if isinstance(value, (Py2String, ByteArray)):
        return value.data
    if isinstance(text := latin_1_text(value), str):
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            return None
    if isinstance(value, Call) and is_global(value.callable, "__builtin__.bytes", "builtins.bytes"):
        return None if args_of(value) or value.effects else b""
    return value if isinstance(value, bytes) else None


def bytes_in(value: Value, blobs: Readable, where: str = "", last: Step | None = None) -> Span | None:
    """Return the source, offset and length of the bytes object `value`. Return None if it is not a bytes object.

    Args:
        value: A value of the graph.
        blobs: The source of the graph's long byte strings.
        where: The place of `value` for errors.
        last: See :class:`~ckptconv.byteranges.reading.Latin1Text`.

    Raises MalformedError if `value` is bytes written as a text with characters outside Latin-1.
    """
    if isinstance(value, Blob):
        return None if value.kind == "str" else (blobs, value.offset, value.length)
    text, data = latin_1_text(value), bytes_of(value)
    if isinstance(text, Blob) and text.kind == "str":
        decoded = Latin1Text(ByteRange(blobs, text.offset, text.length), where, last)
        return decoded, 0, decoded.size
    if isinstance(text, str) and data is None:
        raise no_bytes(where)
    return None if data is None else (BytesSource(data, blobs.path), 0, len(data))


def modernize(graph: Graph) -> None:
    """Replace the old forms in `graph` in place. ``graph.written`` maps the changed calls to those of the source."""
    if not _PYTHON_2.isdisjoint(graph.used):
        for call in graph.calls:
            if is_global(call.callable, "collections.OrderedDict"):
                _set_items(call, graph)
        for node in walk([graph.root, *graph.discarded]):
            for effect, i in node.pairs() if isinstance(node, Object) else ():
                key = effect.values[i]
                if isinstance(key, Py2String) and key.text is not None:
                    effect.values[i] = key.text
    names = {str(node) for node in graph.globals}
    if names.isdisjoint(_PARAMETERS) and not any(map(_TENSOR_CLASS.fullmatch, names)):
        return
    rebuild_tensor = Global("torch._utils", "_rebuild_tensor")
    rebuild_parameter = Global("torch._utils", "_rebuild_parameter")
    for call in graph.calls:
        if is_global(call.callable, *_PARAMETERS):
            args = _parameter(call)
            if args:
                _become(call, rebuild_parameter, args, graph)
        elif _TENSOR_CLASS.fullmatch(str(call.callable)) and not args_of(call):
            state = _state(call)
            if state and len(state.items) == 4:
                _become(call, rebuild_tensor, state, graph)


def _set_items(call: Call, graph: Graph) -> None:
    """Set the items of the OrderedDict that `call` creates, instead of passing them as a list of pairs.

    Do nothing if the argument is not a list of pairs, or if anything else refers to the list or to a pair.
    """
    pairs = args_of(call)[0] if len(args_of(call)) == 1 else None
    if call.kind != "REDUCE" or not isinstance(pairs, List) or pairs in graph.shared:
        return
    items: list[Value] = []
    for pair in pairs.elements():
        if not isinstance(pair, (List, Tuple)) or pair in graph.shared:  # before it is read, for it can be long
            return
        parts = list(pair.elements()) if isinstance(pair, List) else pair.items
        if len(parts) != 2:
            return
        items += parts
    _keep(call, graph)
    order, call.order, call.args = call.order, None, Tuple([])
    call.effects = [*([Effect("SETITEMS", items, order)] if items else []), *call.effects]


def _state(call: Call) -> Tuple | None:
    """Return the state of the object that `call` creates. Return None if it is not a tuple or not the only effect."""
    state = next(iter(call.states()), None) if call.kind == "REDUCE" and len(call.effects) == 1 else None
    return state if isinstance(state, Tuple) else None


def _parameter(call: Call) -> Tuple | None:
    """Return the tensor, ``requires_grad`` and the hooks of the parameter that `call` creates.

    torch 0.4 wrote ``Parameter(tensor, requires_grad)``. Earlier versions wrote ``Parameter(tensor)`` and a state.
    Return None if the form is different.
    """
    args, state = args_of(call), _state(call)
    if call.kind != "REDUCE" or len(args) not in (1, 2):
        return None
    requires_grad, _, hooks = state.items if state and len(state.items) == 3 else ((*args, True)[1], None, None)
    if not isinstance(requires_grad, bool) or (call.effects and not state):
        return None
    return Tuple([args[0], requires_grad, hooks])


def _keep(call: Call, graph: Graph) -> None:
    """Remember `call` as it is in the source."""
    graph.written[call] = kept = Call(call.kind, call.callable, call.args, call.kwargs, call.order)
    kept.effects = call.effects


def _become(call: Call, function: Global, args: Tuple, graph: Graph) -> None:
    """Turn `call` and its state into one call of `function` with `args`, in the position of the state."""
    _keep(call, graph)
    call.callable, call.args = function, args
    if call.effects:
        call.order = call.effects[0].order
        call.effects = []
