"""Read the arguments of a call as the function would: each reader refuses what torch or Python refuses."""

from __future__ import annotations

from ckptconv.checkpoint.safe_globals import ALLOWED
from ckptconv.checkpoint.weights_only.answers import AfterUnknown, NotKnown, Refused
from ckptconv.checkpoint.weights_only.objects import Objects
from ckptconv.checkpoint.weights_only.values import (
    UNKNOWN,
    Held,
    SizeValue,
    StorageValue,
    TensorValue,
    said,
)
from ckptconv.dtypes import BY_NAME
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Global, List, Tuple, Value
from ckptconv.pickles.python2_names import imported_name

_INT64 = 1 << 63


class Arguments:
    """The arguments `items` of a call with the number `now` in the pickle."""

    __slots__ = ("items", "now", "objects")

    def __init__(self, items: list[Value], objects: Objects, now: int | None) -> None:
        self.items = items
        self.objects = objects
        self.now = now

    def check_count(self, least: int, most: int | None = None) -> int:
        """The number of arguments, which must be `least` to `most`."""
        n = len(self.items)
        most = least if most is None else most
        if not least <= n <= most:
            raise Refused(f"it takes {least}{'' if most == least else f' to {most}'} arguments, and gets {n}")
        return n

    def held(self, i: int) -> Held:
        """Argument `i`, which must be known."""
        found = self.objects.held(self.items[i])
        if found is UNKNOWN:
            raise AfterUnknown
        return found

    def integer(self, i: int, what: str) -> int:
        """Argument `i`, an integer of 64 bits."""
        value = self.items[i]
        if type(value) is int and -_INT64 <= value < _INT64:
            return value
        return _integer(self.held(i), what)

    def integers(self, i: int, what: str) -> list[int]:
        """Argument `i`, a tuple, list or torch.Size of integers."""
        value = self.items[i]
        if type(value) is Tuple:
            items = value.items
        elif type(value) is List:
            items = self.objects.elements(value, self.now) or []
        else:
            held = self.held(i)
            if not isinstance(held, SizeValue):
                raise Refused(f"its {what} must be a tuple of integers, and is {said(held)}")
            items = [*held.sizes]
        if len(items) > LIMITS.rank:
            raise NotKnown(f"a {what} of {len(items):,} dimensions")
        for item in items:
            if type(item) is not int or not -_INT64 <= item < _INT64:
                numbers = [self.objects.held(each) for each in items]  # of truth values, torch looks at the first alone
                return [_integer(int(n) if i and isinstance(n, bool) else n, what) for i, n in enumerate(numbers)]
        return items  # type: ignore[return-value]  # integers, all of them

    def flag(self, i: int, what: str) -> bool:
        """Argument `i`, True or False."""
        value = self.items[i]
        if value is True or value is False:
            return value
        raise Refused(f"its {what} must be True or False, and is {said(self.held(i))}")

    def storage(self, i: int) -> StorageValue:
        """Argument `i`, a storage."""
        held = self.held(i)
        if isinstance(held, StorageValue):
            return held
        raise Refused(f"it needs a storage, and gets {said(held)}")

    def tensor(self, i: int, what: str) -> TensorValue:
        """Argument `i`, a tensor."""
        held = self.held(i)
        if isinstance(held, TensorValue):
            return held
        raise Refused(f"its {what} must be a tensor, and is {said(held)}")

    def dtype(self, i: int) -> str:
        """Argument `i`, a dtype."""
        held = self.held(i)
        name = dtype_name(held)
        if name is None:
            raise Refused(f"its dtype must be a torch.dtype, and is {said(held)}")
        return name

    def global_name(self, i: int) -> str | None:
        """The name of argument `i`, a global; None where it is none."""
        held = self.held(i)
        if not isinstance(held, Global):
            return None
        name = imported_name(held, 2)
        if name not in ALLOWED:  # which was said of the global
            raise AfterUnknown
        return name

    def tuple(self, i: int, what: str) -> Arguments:
        """What is in argument `i`, a tuple or list."""
        items = self.objects.elements(self.items[i], self.now)
        if items is None or not isinstance(self.items[i], (Tuple, List)):
            held = self.held(i)
            if isinstance(held, (bool, int, float)) or held is None:
                raise Refused(f"its {what} must be a tuple, and is {said(held)}")
            raise NotKnown(f"its {what} is {said(held)}")
        return Arguments(items, self.objects, self.now)


def dtype_name(held: Held) -> str | None:
    """The name of the dtype that `held` is, without ``torch.``."""
    if isinstance(held, Global):
        module, _, name = imported_name(held, 2).rpartition(".")
        if module == "torch" and name in BY_NAME:
            return name
    return None


def _integer(held: Held, what: str) -> int:
    if type(held) is int:
        if -_INT64 <= held < _INT64:
            return held
        raise Refused(f"its {what} has a number that does not fit 64 bits")
    if held is UNKNOWN:
        raise AfterUnknown
    if isinstance(held, TensorValue):  # of one element, a tensor counts as an integer
        raise NotKnown(f"its {what} is a tensor")
    raise Refused(f"its {what} must be an integer, and is {said(held)}")
