"""What a pickle says of an object that it makes: its class, its arguments, and what is done to it."""

from __future__ import annotations

from ckptconv.byteranges.reading import Latin1Text
from ckptconv.byteranges.sources import BytesSource, Readable
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.errors import MalformedError
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Dict,
    Global,
    Py2String,
    Tuple,
    Value,
    args_of,
    imported_name,
    is_global,
)

_RECONSTRUCTOR = "copyreg._reconstructor"


class NotPlain(Exception):
    """An object of a class in the table that has no exact plain form; the text says why."""


@dataclass(frozen=True)
class Pickled:
    """An object as its pickle makes it.

    Attributes:
        call: The call that makes it.
        cls: What is called, or the class of which an instance is made: ``module.name``, by Python 3's names.
        args: The arguments.
        is_new: It is made by ``cls.__new__``, which is not called otherwise.
        items: Keys and values in turn that are set on it.
        elements: What is appended to it.
        states: What its state is set to, one after another.
    """

    call: Call
    cls: str
    args: list[Value]
    is_new: bool
    items: list[Value]
    elements: list[Value]
    states: list[Value]

    def attributes(self) -> dict[str, Value]:
        """The attributes that its states give it.

        Raises NotPlain where a state is no dict of texts.
        """
        found: dict[str, Value] = {}
        for state in self.states:
            of_slots = isinstance(state, Tuple) and len(state.items) == 2
            for part in state.items if of_slots and isinstance(state, Tuple) else [state]:
                if part is None:
                    continue
                if not isinstance(part, Dict):
                    raise NotPlain("its state is no dict")
                for effect, i in part.pairs():
                    name = text_of(effect.values[i])
                    if name is None:
                        raise NotPlain("a name in its state is no text")
                    found[name] = effect.values[i + 1]
        return found


def pickled(call: Call) -> Pickled | None:
    """What `call` makes; None where it calls what is no global, or with arguments that are no tuple."""
    if not isinstance(call.callable, Global) or not isinstance(call.args, Tuple) or call.kind == "NEWOBJ_EX":
        return None
    name, args, is_new = imported_name(call.callable, 2), args_of(call), call.kind != "REDUCE"
    items = [value for effect, i in call.pairs() for value in effect.values[i : i + 2]]
    if name == _RECONSTRUCTOR and len(args) == 3 and isinstance(args[0], Global):  # protocols 0 and 1
        cls, base, state = args
        if isinstance(state, Dict) and is_global(base, "builtins.dict", "__builtin__.dict"):
            items = [*(value for effect, i in state.pairs() for value in effect.values[i : i + 2]), *items]
        elif state is not None or not is_global(base, "builtins.object", "__builtin__.object"):
            return None
        name, args, is_new = imported_name(cls, 2) if isinstance(cls, Global) else "", [], True
    return Pickled(call, name, args, is_new, items, [*call.elements()], call.states())


def texts_of(values: list[Value]) -> list[str]:
    """`values`, which are texts. Raises NotPlain."""
    texts = [text for value in values if (text := text_of(value)) is not None]
    if len(texts) != len(values):
        raise NotPlain("it is made of what is no text")
    return texts


def count_of(value: Value, most: int = LIMITS.elements) -> int:
    """`value`, an integer from 0 to below `most`. Raises NotPlain."""
    if type(value) is not int or not 0 <= value < most:
        raise NotPlain("a size in it is no number of elements")
    return value


def bytes_of(value: Value) -> bytes | None:
    """The bytes object `value`, however its protocol says it; None where it is none, or is too long to be held."""
    if isinstance(value, Call):
        return _said(value)
    if isinstance(value, (Py2String, ByteArray)):
        return value.data
    return value if isinstance(value, bytes) else None


def _said(call: Call) -> bytes | None:
    """The bytes that `call` gives where it is how protocol 2 says them."""
    args = args_of(call)
    if is_global(call.callable, "__builtin__.bytes", "builtins.bytes") and not args and not call.effects:
        return b""
    text = _encoded(call)
    if not isinstance(text, str):
        return None
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return None


def _encoded(call: Call) -> Value:
    """The text that `call` encodes, if that is what it does."""
    args = args_of(call)
    if is_global(call.callable, "_codecs.encode") and len(args) == 2 and not call.effects:
        return args[0] if text_of(args[1]) in ("latin1", "latin-1") else None
    return None


def data_of(value: Value, blobs: Readable) -> ByteRange:
    """Where the bytes of the bytes object `value` stand, its long texts in `blobs`. Raises NotPlain."""
    data = bytes_of(value)
    if data is not None:
        return ByteRange(BytesSource(data, blobs.path), 0, len(data))
    text = _encoded(value) if isinstance(value, Call) else None
    if isinstance(value, Blob) and value.kind != "str":
        return ByteRange(blobs, value.offset, value.length)
    if isinstance(text, Blob) and text.kind == "str":
        try:
            whole = Latin1Text(ByteRange(blobs, text.offset, text.length))
        except MalformedError:
            raise NotPlain("its bytes are not said as bytes") from None
        return ByteRange(whole, 0, whole.size)
    raise NotPlain("its bytes are not there")
