"""``dataclass`` as the standard library has it, without the code that it generates and compiles for each class: that
took a third of the time in which ``inspect`` of a small file ran.

Classes of many objects have slots: their ``__init__`` is generated, for one that is not takes longer. ``fields``,
``replace``, ``asdict``, ``inspect.signature`` and pickling work as with the other. Fields are not inherited.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, slots=False, unsafe_hash=False):
        """`cls` with the methods of a dataclass; what it defines itself stays."""
        if cls is None:
            return partial(dataclass, frozen=frozen, eq=eq, repr=repr, slots=slots, unsafe_hash=unsafe_hash)
        if slots:
            cls.__doc__ = cls.__doc__ or cls.__name__  # else it becomes the signature, which takes as long as the rest
            cls = dataclasses.dataclass(repr=False, eq=False, frozen=frozen, slots=True)(cls)
            fields, methods = {each.name: each for each in dataclasses.fields(cls)}, {}
        else:
            fields = _take_fields(cls)
            methods = _construction_of(cls, fields)
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse} if frozen else {}
        methods |= {"__repr__": _repr_of([name for name, each in fields.items() if each.repr])} if repr else {}
        methods |= _comparison_of([*fields], frozen or unsafe_hash) if eq else {}
        for name in methods.keys() - vars(cls).keys():
            setattr(cls, name, methods[name])
        return cls

    def _take_fields(cls):
        """The fields that `cls` declares, by name; it keeps their defaults as attributes."""
        fields = {}
        for name, kind in cls.__annotations__.items():
            if str(kind).removeprefix("typing.").startswith("ClassVar"):
                continue
            value = vars(cls).get(name, dataclasses.MISSING)
            fields[name] = each = value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value)
            each.name, each.type, each._field_type = name, kind, dataclasses._FIELD
            if each.default is not dataclasses.MISSING:
                setattr(cls, name, each.default)
            elif each is value:
                delattr(cls, name)
        return fields

    class _Asked:
        """An attribute of a class that is computed when somebody asks for it."""

        def __init__(self, compute):
            self.compute = compute

        def __get__(self, _, cls):
            return self.compute()

    def _construction_of(cls, fields):
        """``__init__``, and what says what it takes."""
        names = [name for name, each in fields.items() if each.init]
        missing = dataclasses.MISSING
        defaults = [(name, fields[name].default) for name in names if fields[name].default is not missing]
        makers = [(name, fields[name].default_factory) for name in names if fields[name].default_factory is not missing]
        has_more = hasattr(cls, "__post_init__")
        expected = set(names)

        @cache
        def signature():
            said = [(name, each.type, each) for name, each in fields.items()]
            return inspect.signature(dataclasses.make_dataclass(cls.__name__, said))

        def __init__(self, *args, **keywords):
            values = self.__dict__
            values.update(zip(names, args))  # noqa: B905 - too many are told below
            values.update(keywords)
            is_once = len(values) == len(args) + len(keywords)
            if len(values) < len(names):
                values.update({name: make() for name, make in makers if name not in values})
                values.update({name: value for name, value in defaults if name not in values})
            if not is_once or values.keys() != expected:
                signature().bind(*args, **keywords)  # which raises TypeError
            if has_more:
                self.__post_init__()

        return {
            "__init__": __init__,
            "__signature__": _Asked(signature),
            "__dataclass_fields__": fields,
        }

    def _repr_of(names):
        def __repr__(self):
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            return f"{type(self).__qualname__}({values})"

        return __repr__

    def _comparison_of(names, hashed):
        values = attrgetter(*names)

        def __eq__(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def __hash__(self):
            return hash(values(self))

        return {"__eq__": __eq__, "__hash__": __hash__ if hashed else None}

    def _refuse(self, name, *_):  # noqa: ARG001 - the signature is Python's
        raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")
