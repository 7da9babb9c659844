"""An object as a pickle creates it: its class, its arguments, and the later changes."""

from __future__ import annotations

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.legacy_python import bytes_in, text_of
from ckptconv.errors import MalformedError
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Global,
    Tuple,
    Value,
    args_of,
    imported_name,
    is_count,
    is_global,
)
from ckptconv.work import CHARACTERS, work

#: Characters of a word of the file in a reason, which any number of objects can have.
LONGEST_WORD = 100
_RECONSTRUCTOR = "copyreg._reconstructor"
_COPIES = 3  # of a text, while an object is made of it


class NotPlain(Exception):
    """Raised if an object of a class in the table cannot be converted exactly. The text is the reason."""


@dataclass(frozen=True)
class Pickled:
    """An object as a pickle creates it.

    Attributes:
        call: The call that creates it.
        cls: The class, or the function that is called, as ``module.name`` in Python 3.
        args: The arguments.
        is_new: Whether it is created by ``cls.__new__`` and not by a call of ``cls``.
        items: The keys and values, in turn, that are set on it.
        elements: The values that are appended to it.
        states: The states that are set on it, in order.
    """

    call: Call
    cls: str
    args: list[Value]
    is_new: bool
    items: list[Value]
    elements: list[Value]
    states: list[Value]

    def attributes(self) -> dict[str, Value]:
        """Return the attributes in all states. Raise NotPlain if a state is not a dict with string keys.

        A state of an object with slots is a pair of such dicts. Raises LimitError if the budget of work is used up,
        because many objects can share a state.
        """
        found: dict[str, Value] = {}
        for state in self.states:
            of_slots = isinstance(state, Tuple) and len(state.items) == 2
            for part in state.items if of_slots and isinstance(state, Tuple) else [state]:
                if part is None:
                    continue
                if not isinstance(part, Dict):
                    raise NotPlain("its state is not a dict")
                entries = [*part.entries()]
                work().charge(len(entries))
                for key, value in entries:
                    name = text_of(key)
                    if name is None:
                        raise NotPlain("its state has a name that is not a string")
                    found[name] = value
        return found


def pickled(call: Call) -> Pickled | None:
    """Return the object that `call` creates.

    Return None if the callable is not a global, the arguments are not a tuple, or there are keyword arguments.
    """
    if not isinstance(call.callable, Global) or not isinstance(call.args, Tuple) or call.kind == "NEWOBJ_EX":
        return None
    name, args, is_new = imported_name(call.callable, 2), args_of(call), call.kind != "REDUCE"
    items = [value for item in call.entries() for value in item]
    if name == _RECONSTRUCTOR and len(args) == 3 and isinstance(args[0], Global):  # protocols 0 and 1
        cls, base, state = args
        if isinstance(state, Dict) and is_global(base, "builtins.dict", "__builtin__.dict"):
            items = [*(value for item in state.entries() for value in item), *items]
        elif state is not None or not is_global(base, "builtins.object", "__builtin__.object"):
            return None
        name, args, is_new = imported_name(cls, 2) if isinstance(cls, Global) else "", [], True
    elements = [*call.elements()]
    work().charge(len(args) + len(items) + len(elements) + len(call.effects))
    return Pickled(call, name, args, is_new, items, elements, call.states())


def texts_of(values: list[Value]) -> list[str]:
    """Return `values` as strings. Raise NotPlain if a value is not a text.

    Raises LimitError if the budget of work is used up, because many objects can share a long text.
    """
    texts = [text for value in values if (text := text_of(value)) is not None]
    work().charge(_COPIES * sum(map(len, texts)) // CHARACTERS)
    if len(texts) != len(values):
        raise NotPlain("it is not created from strings")
    return texts


def count_of(value: Value) -> int:
    """Return `value`. Raise NotPlain if it is not a number of elements."""
    if not is_count(value):
        raise NotPlain("it has a size that is not a number of elements")
    return value


def data_of(value: Value, blobs: Readable) -> ByteRange:
    """Return the range with the bytes of the bytes object `value`. Raise NotPlain if it is not a bytes object.

    `blobs` is the source of long byte strings.
    """
    try:
        found = bytes_in(value, blobs)
    except MalformedError:
        raise NotPlain("its bytes are not a valid byte string") from None
    if found is None:
        raise NotPlain("its bytes are missing")
    return ByteRange(*found)
