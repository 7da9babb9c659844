"""Light dataclasses, which behave like those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ckptconv.light_dataclass import dataclass

KINDS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"eq": False},
    {"frozen": True, "eq": False},
    {"repr": False},
    {"slots": True},
    {"slots": True, "unsafe_hash": True},
    {"frozen": True, "slots": True},
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def made(decorator: Callable[..., Any], **kind: bool) -> Any:
    """Return a class with a field of each kind, made by `decorator`."""

    class Example:
        shared: ClassVar[int] = 3
        first: int
        second: str = "b"
        many: list[int] = dataclasses.field(default_factory=list)
        hidden: int = dataclasses.field(default=4, repr=False)

    return decorator(**kind)(Example)


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of `call` as text, or the type of its exception."""
    try:
        return repr(call()).replace("light", "").replace("heavy", "")
    except (TypeError, AttributeError) as error:
        return type(error)


@every_kind
def test_light_and_standard_dataclasses_are_alike(kind: dict[str, bool]) -> None:
    """Light and standard dataclasses give the same results for creation, comparison, hashing, printing, changes,
    replacement, and facts about the fields.
    """

    def asked(decorator: Callable[..., Any]) -> list[Any]:
        cls = made(decorator, **kind)
        one = cls(1)
        other = cls(first=1, second="b", hidden=4)
        calls: list[Callable[[], Any]] = [
            lambda: (one.first, one.second, one.many, one.hidden, one.shared, cls.second, cls.shared),
            lambda: dataclasses.astuple(cls(1, "c", [2], 5)),
            lambda: one == other,
            lambda: one == cls(2),
            lambda: one == (1, "b", [], 4),
            lambda: one.many is other.many,
            lambda: cls(),
            lambda: cls(1, first=1),
            lambda: cls(1, "b", [], 4, 5),
            lambda: cls(1, other=2),
            lambda: hash(cls(1, "b", (), 4)) == hash(cls(1, "b", (), 4)),
            lambda: setattr(one, "first", 2),
            lambda: delattr(one, "first"),
            lambda: dataclasses.astuple(dataclasses.replace(other, second="x")),
            lambda: dataclasses.asdict(other),
            lambda: [(each.name, each.type, each.default, each.repr) for each in dataclasses.fields(cls)],
            lambda: inspect.signature(cls),
            lambda: dataclasses.is_dataclass(cls),
            lambda: dataclasses.astuple(copy.deepcopy(other)),
        ]
        is_plain = kind.get("repr", True)
        return [outcome(call) for call in [*calls, *([lambda: other] if is_plain else [])]]

    assert asked(dataclass) == asked(dataclasses.dataclass)


@dataclass(frozen=True)
class Sent:
    """A dataclass that is sent to another process."""

    size: int
    doubled: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative")


def test_pickling_and_methods_of_the_class() -> None:
    """A light dataclass can be pickled. The class keeps its own ``__repr__`` and its check in ``__post_init__``."""
    assert pickle.loads(pickle.dumps(Sent(3))) == Sent(3) != Sent(4)
    assert repr(Sent(3)) == "Sent(size=3, doubled=0)"
    with pytest.raises(ValueError, match="negative"):
        Sent(-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sent(1).size = 2  # type: ignore[misc]

    @dataclass
    class Own:
        size: int

        def __repr__(self) -> str:
            return "own"

    assert repr(Own(1)) == "own"


@every_kind
def test_internal_attributes_of_fields(kind: dict[str, bool]) -> None:
    """A field has the same internal attributes as in the standard library. If a new version of Python has others, this
    test fails.

    ``kw_only`` is left out, because only the creation of a class uses it.
    """
    names = set(dataclasses.Field.__slots__) - {"kw_only"}
    ours, standard = (
        {field.name: {name: getattr(field, name) for name in names} for field in dataclasses.fields(cls)}
        for cls in (made(decorator, **kind) for decorator in (dataclass, dataclasses.dataclass))
    )
    assert ours == standard


def test_internals_of_the_standard_library() -> None:
    """The undocumented names of the standard library that the package uses exist, and have the same meaning as
    before.
    """

    @dataclasses.dataclass
    class Standard:
        first: int

    @dataclass
    class Light:
        first: int

    for cls in (Standard, Light):
        (field,) = vars(cls)["__dataclass_fields__"].values()
        assert field._field_type is dataclasses._FIELD  # type: ignore[attr-defined]
        assert dataclasses.is_dataclass(cls) and dataclasses.fields(cls) == (field,)
        assert str(inspect.signature(cls)) == "(first: 'int') -> None"
    assert issubclass(dataclasses.FrozenInstanceError, AttributeError)
