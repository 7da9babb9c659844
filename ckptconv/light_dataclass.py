"""A faster replacement for ``dataclasses.dataclass``, without the code that it generates and compiles for each class.

Classes with many objects use ``slots=True``: their ``__init__`` is generated, because it is faster for each object.
``fields``, ``replace``, ``asdict``, ``inspect.signature`` and pickling work as with the standard decorator. Fields are
not inherited.
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
        """Return `cls` with the methods of a dataclass. Methods that `cls` defines itself are kept."""
        if cls is None:
            return partial(dataclass, frozen=frozen, eq=eq, repr=repr, slots=slots, unsafe_hash=unsafe_hash)
        if slots:
            cls.__doc__ = cls.__doc__ or cls.__name__  # otherwise it becomes the signature, which is slow
            cls = dataclasses.dataclass(repr=False, eq=False, frozen=frozen, slots=True)(cls)
            fields, methods = {field.name: field for field in dataclasses.fields(cls)}, {}
        else:
            fields = _take_fields(cls)
            methods = _construction_of(cls, fields)
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse} if frozen else {}
        methods |= {"__repr__": _repr_of([name for name, field in fields.items() if field.repr])} if repr else {}
        methods |= _comparison_of([*fields], frozen or unsafe_hash) if eq else {}
        for name in methods.keys() - vars(cls).keys():
            setattr(cls, name, methods[name])
        return cls

    def _take_fields(cls):
        """Return the fields that `cls` declares, by name. `cls` keeps their defaults as attributes."""
        fields = {}
        for name, kind in cls.__annotations__.items():
            if str(kind).removeprefix("typing.").startswith("ClassVar"):
                continue
            value = vars(cls).get(name, dataclasses.MISSING)
            fields[name] = field = value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value)
            field.name, field.type, field._field_type = name, kind, dataclasses._FIELD
            if field.default is not dataclasses.MISSING:
                setattr(cls, name, field.default)
            elif field is value:
                delattr(cls, name)
        return fields

    class _LazyAttribute:
        """An attribute of a class that is computed each time that it is read."""

        def __init__(self, compute):
            self.compute = compute

        def __get__(self, _, cls):
            return self.compute()

    def _construction_of(cls, fields):
        """Return ``__init__``, and the class attributes that describe its parameters."""
        names = [name for name, field in fields.items() if field.init]
        missing = dataclasses.MISSING
        defaults = [(name, fields[name].default) for name in names if fields[name].default is not missing]
        makers = [(name, fields[name].default_factory) for name in names if fields[name].default_factory is not missing]
        has_more = hasattr(cls, "__post_init__")
        expected = set(names)

        @cache
        def signature():
            declared = [(name, field.type, field) for name, field in fields.items()]
            return inspect.signature(dataclasses.make_dataclass(cls.__name__, declared))

        def __init__(self, *args, **keywords):
            values = self.__dict__
            values.update(zip(names, args))  # noqa: B905 - too many arguments raise an error below
            values.update(keywords)
            is_once = len(values) == len(args) + len(keywords)
            if len(values) < len(names):
                values.update({name: make() for name, make in makers if name not in values})
                values.update({name: value for name, value in defaults if name not in values})
            if not is_once or values.keys() != expected:
                signature().bind(*args, **keywords)  # raises TypeError
            if has_more:
                self.__post_init__()

        return {
            "__init__": __init__,
            "__signature__": _LazyAttribute(signature),
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
