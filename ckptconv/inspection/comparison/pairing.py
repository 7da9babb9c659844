"""Walk two graphs at once: pair tensors by name, and compare everything that is no tensor.

Things are paired by their paths, so the order of keys does not count; members of sets are paired by what they are. A
pair of nodes is looked into once, wherever else the two meet again, so that what one side shares and the other has
twice is the same. What pickles and torch's loader spell in several ways (bytes, sets, bytearrays, names of Python 2) is
taken for what it means.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from itertools import takewhile

from ckptconv.byteranges.reading import same_streams
from ckptconv.checkpoint.describe import describe
from ckptconv.checkpoint.rebuild_functions import (
    device_arguments,
    is_word,
    strided_part,
    torch_device,
)
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import LimitError
from ckptconv.inspection.comparison.differences import OnlyIn, OtherDifference
from ckptconv.inspection.comparison.sides import KEY_SIZE, Meaning, Meant, Said, Side, inside_word, said_in
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Extension,
    Global,
    List,
    Node,
    Object,
    PersistentId,
    Tuple,
    Value,
    args_of,
    children,
)
from ckptconv.pickles.paths import Place, child_places, key_segment, parts_listed

#: Pairs of nodes that are looked at: so many, and more for each opcode and each place of either side. A real pair of
#: files takes one for each place.
_STEPS, _STEPS_EACH = 100_000, 2
_KEY_DEPTH = 16  # levels of a key or member that is compared by what it is


@dataclass
class Pairing:
    """Walks the sides `a` and `b`.

    `tensors_alone`: only the tensors that are items of the roots are meant, and nothing that hangs on them.

    ``tensors`` are the pairs of places where both have a tensor, ``storages`` those where both have a
    bare storage; ``others`` is what differs already. ``passed_over``: how many things on each side were
    not looked at because they are no tensors.
    """

    a: Side
    b: Side
    tensors_alone: bool = False
    tensors: list[tuple[Place, Place]] = field(default_factory=list)
    storages: list[tuple[Place, Place]] = field(default_factory=list)
    others: list[OtherDifference] = field(default_factory=list)
    passed_over: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        opcodes = self.a.checkpoint.graph.opcodes + self.b.checkpoint.graph.opcodes
        places = len(self.a.checkpoint.places) + len(self.b.checkpoint.places)
        self._steps = _STEPS + _STEPS_EACH * (opcodes + places)
        self._room = LIMITS.path_characters_unpickled + LIMITS.path_characters_each * opcodes
        self._shared = self.a.checkpoint.graph.shared, self.b.checkpoint.graph.shared  # what can be met again
        self._seen: set[int] = set()  # pairs, each as one number, which takes less memory
        self._listed: set[tuple[int, int]] = set()  # pairs of arguments and states that were looked into
        self._alike: dict[tuple[object, ...], bool] = {}
        self._meanings: dict[object, int] = {}  # of tuples and frozensets that are keys or members, numbered

    def run(self) -> None:
        """Find everything. Raises LimitError where two graphs share their parts in ways that would take forever."""
        if self.tensors_alone:
            self._items(self.a.root, self.b.root)
            return
        todo = [self.b.root, self.a.root]  # in turn, because a million pairs take less memory so
        while todo:
            a, b = todo.pop(), todo.pop()
            self._step(a)
            if self._differ(a, b):
                todo += self._pairs_below(a, b)[::-1]

    def same_parts(self, a: Call, b: Call) -> tuple[bool, list[tuple[TensorInfo, TensorInfo]]]:
        """Whether the calls `a` and `b`, which make tensors that have no storage of their own, hold the same beside
        tensors, and the tensors in them, pair by pair.
        """
        same = True
        tensors = []
        seen: set[tuple[int, int]] = set()
        todo: list[tuple[Value, Value]] = [(a, b)]
        while todo:
            left, right = todo.pop()
            self._step(None)
            one, other = self.a.inner_tensor(left), self.b.inner_tensor(right)
            if one and other:
                tensors.append((one, other))
                if one.kind == other.kind == "quantized":  # its scale and zero point stand beside its storage
                    todo.append((_quantizer(left), _quantizer(right)))
            elif one or other or not self._same_alone(left, right):
                same = False
            elif isinstance(left, Node) and isinstance(right, Node) and (id(left), id(right)) not in seen:
                seen.add((id(left), id(right)))
                parts = _parts(left, self.a), _parts(right, self.b)
                same = same and len(parts[0]) == len(parts[1])
                todo += list(zip(*parts, strict=False))[::-1]
        return same, tensors

    # Steps

    def _step(self, place: Place | None) -> None:
        self._steps -= 1
        if place:
            place.length = len(place.segment) + (place.parent.length if place.parent else 0)
            self._room -= place.length
        if self._steps < 0 or self._room < 0:
            raise LimitError(
                "the two share their parts in such ways that comparing them would take too long",
                where=self.a.checkpoint.source.path,
                expected=f"at most {_STEPS:,} pairs, and {_STEPS_EACH} for each opcode and each place",
            )

    def _differ(self, a: Place, b: Place) -> bool:
        """Note what the nodes at `a` and `b` do not have in common, and say whether to look into them."""
        left, right = a.node, b.node
        tensors = bool(self.a.tensor(left)), bool(self.b.tensor(right))
        if isinstance(left, Call) and isinstance(right, Call) and all(tensors):
            self.tensors.append((a, b))
            if not (self.a.leaf(left) or self.b.leaf(right)):
                return False  # most tensors: nothing stands in them
        elif any(tensors):
            self._other(a, b)
            return False
        elif isinstance(left, PersistentId) and isinstance(right, PersistentId):
            self.storages.append((a, b))
            return False
        elif not self._same_alone(left, right):
            self._other(a, b)
            if not (isinstance(left, Object) and isinstance(right, Object)):
                return False
        if not (isinstance(left, Node) and isinstance(right, Node)) or id(left) << 64 | id(right) in self._seen:
            return False
        if self.a.data(left) and self.b.data(right):
            return False
        if isinstance(left, (Dict, List)) and isinstance(right, (Dict, List)) and not (left.effects or right.effects):
            return False
        self._seen.add(id(left) << 64 | id(right))
        return True

    def _same_alone(self, a: Value, b: Value) -> bool:
        """Whether `a` and `b` are the same as far as that can be told without looking into them.

        What nobody looks into is compared whole.
        """
        if type(a) is type(b) and isinstance(a, (str, bytes, int)):
            return a == b
        if not (isinstance(a, Node) and isinstance(b, Node)):
            return self._is_same(a, b)
        if a not in self._shared[0] and b not in self._shared[1]:
            return self._is_same(a, b)
        pair = id(a), id(b)
        if pair not in self._alike:  # once: a text of gigabytes can stand in any number of places
            self._alike[pair] = self._is_same(a, b)
        return self._alike[pair]

    def _is_same(self, a: Value, b: Value) -> bool:
        data = self.a.data(a), self.b.data(b)
        if data[0] and data[1]:
            return data[0].kind == data[1].kind and same_streams(data[0].chunks(), data[1].chunks())
        if self.a.kind(a) != self.b.kind(b):
            return False
        if isinstance(a, Global):
            return self.a.name(a) == self.b.name(b)
        if isinstance(a, Extension) and isinstance(b, Extension):
            return a.code == b.code
        if isinstance(a, float) and isinstance(b, float):
            return a == b or (a != a and b != b)
        if not isinstance(a, Node):
            return a == b
        sets = self.a.set_of(a), self.b.set_of(b)
        if sets[0] and sets[1]:
            pair = "set", id(sets[0]), id(sets[1])
            if pair not in self._alike:
                self._alike[pair] = self._sorted(a, self.a) == self._sorted(b, self.b)
            return self._alike[pair]
        if is_word(a) and isinstance(a, Call) and isinstance(b, Call):
            return self._same_words(a, b)
        return True

    def _same_words(self, a: Call, b: Call) -> bool:
        """Whether two of torch's small words, devices and sizes, are the same."""
        devices = torch_device(a), torch_device(b)
        if devices != (None, None):
            return devices[0] == devices[1]
        pair = "word", id(inside_word(a)), id(inside_word(b))
        if pair not in self._alike:
            self._alike[pair] = said_in(a) == said_in(b)
        return self._alike[pair]

    def _pairs_below(self, a: Place, b: Place) -> list[Place]:
        """The places below `a` and `b` that both have, in turn; what one alone has is noted."""
        sets = self.a.set_of(a.node), self.b.set_of(b.node)
        if sets[0] and sets[1]:
            pair = id(sets[0]), id(sets[1])
            if pair in self._listed or self._sorted(a.node, self.a) is not None:
                return []
            self._listed.add(pair)
            left, right = _numbered(a, self.a.members(a.node) or []), _numbered(b, self.b.members(b.node) or [])
        else:
            again = self._listed_again(a.node, b.node)
            left, right = self._below(a, self.a, again[0]), self._below(b, self.b, again[1])
        pairs: list[Place] = []
        for what, place in left.items():
            other = right.pop(what, None)
            if other:
                pairs += (place, other)
            else:
                self._alone(place, self.a)
        for place in right.values():
            self._alone(place, self.b)
        return pairs

    def _listed_again(self, a: Value, b: Value) -> tuple[set[int], set[int]]:
        """The ids of the arguments and states of `a` and of `b` that were looked into as such, one beside the other."""
        if not (isinstance(a, Call) and isinstance(b, Call)):  # nothing else has any
            return set(), set()
        parts = zip(parts_listed(a, self.a.leaf), parts_listed(b, self.b.leaf), strict=False)
        pairs = [(id(x), id(y)) for x, y in parts if isinstance(x, Node) and isinstance(y, Node)]
        again = [pair for pair in pairs if pair in self._listed]
        self._listed.update(pairs)
        return {pair[0] for pair in again}, {pair[1] for pair in again}

    def _below(self, place: Place, side: Side, again: set[int]) -> dict[object, Place]:
        """The places right below `place` by what they are paired by: their segments, or the keys as they are meant,
        where these are no texts. Arguments and states whose ids are in `again` are left out.
        """
        node = place.node
        keys = [effect.values[i : i + 2] for effect, i in node.pairs()] if isinstance(node, Object) else []
        if all(isinstance(key, str) for key, _ in keys):
            return {below.segment: below for below in child_places(place, side.leaf, again)}
        found: dict[object, Place] = {}
        meanings = [None if isinstance(key, str) else self._canonical(key, side) for key, _ in keys]
        times: Counter[object] = Counter()
        n = 0
        for below in child_places(place, side.leaf, again):
            key, value = keys[n] if n < len(keys) else ("", place)
            meant = meanings[n] if n < len(keys) else None
            if meant and isinstance(key, Node) and below.segment == f"/<{n}>":
                continue  # the key, which stands before its value
            if value is not below.node or not below.segment.startswith(key_segment(key, n)):
                found[below.segment] = below
                continue
            n += 1
            if meant and isinstance(key, Call) and isinstance(meant[1], bytes):  # as protocol 2 spells them
                below.segment = key_segment(meant[1], n)
            times[meant] += 1
            found[(meant, times[meant]) if meant else below.segment] = below
        return found

    def _sorted(self, node: Value, side: Side) -> list[Said] | None:
        """What is the same for sets of the same members, in whatever order.

        None where some are objects, which are paired by their places.
        """
        stand_in = id(side.set_of(node))
        if stand_in not in side.sorted:  # once: any number of sets can be made of one list
            members = side.members(node) or []
            found = [*takewhile(bool, (self._canonical(member, side) for member in members))]
            side.sorted[stand_in] = sorted(filter(None, found)) if len(found) == len(members) else None
        return side.sorted[stand_in]

    def _canonical(self, value: Value, side: Side) -> Meant:
        """`value`, a key or member, so that it can be compared with others and sorted.

        None where it is an object, or too large.
        """
        meaning = Meaning(side, self._meanings)
        meant = meaning.of(value, _KEY_DEPTH)
        self._steps -= KEY_SIZE - meaning.room - 1
        self._step(None)
        return meant

    # What was found

    def _other(self, a: Place, b: Place) -> None:
        words = self.a.words(a.node), self.b.words(b.node)
        if words[0] == words[1]:
            kinds = self.a.kind(a.node), self.b.kind(b.node)
            words = (
                _apart(a.node, b.node, words[0])
                if kinds[0] == kinds[1]
                else (f"{words[0]} ({kinds[0]})", f"{words[1]} ({kinds[1]})")
            )
        self.others.append(OtherDifference(a.path, *words))

    def _alone(self, place: Place, side: Side) -> None:
        """Note what stands at `place` of `side` and not in the other: its tensors, each,
        and what is no tensor as one thing.
        """
        self._step(place)
        if side.tensor(place.node):
            side.only.append(OnlyIn(*side.facts(place)))
            return
        words = side.words(place.node)
        self.others.append(OtherDifference(place.path, *((words, None) if side is self.a else (None, words))))
        todo = [place]
        while todo:
            at = todo.pop()
            if isinstance(at.node, Node) and id(at.node) not in side.listed:
                side.listed.add(id(at.node))
                for below in child_places(at, side.leaf, side.shown)[::-1]:
                    self._step(below)
                    todo.append(below)
            if at is not place and side.tensor(at.node):
                side.only.append(OnlyIn(*side.facts(at)))

    def _items(self, a: Place, b: Place) -> None:
        """Pair the tensors that are items of the roots `a` and `b`, by name."""
        found: list[dict[str, Place]] = []
        for side, root, others in ((self.a, a, self.passed_over[0]), (self.b, b, self.passed_over[1])):
            tensors = {}
            for place in child_places(root, side.leaf):
                self._step(place)
                if side.tensor(place.node) and place.key is not None:
                    tensors[place.segment] = place
                else:
                    others.append(place.path)
            found.append(tensors)
        for segment, place in found[0].items():
            if segment in found[1]:
                self.tensors.append((place, found[1][segment]))
        for side, own, other in ((self.a, found[0], found[1]), (self.b, found[1], found[0])):
            for segment, place in own.items():
                if segment not in other:
                    side.only.append(OnlyIn(*side.facts(place)))


def _parts(node: Node, side: Side) -> list[Value]:
    """What `node`, in the call of a tensor, is made of, without its device and its
    attributes, which are compared elsewhere.
    """
    if side.data(node) is not None or is_word(node):
        return []
    parts = children(node)
    if not isinstance(node, Call):
        return parts
    attributes = {id(state) for state in side.leaf(node) or ()} if side.tensor(node) else set()
    arguments = device_arguments(node)
    devices, nested = {argument.index for argument in arguments}, any(argument.nested for argument in arguments)
    args: list[Value] = []
    for i, arg in enumerate(args_of(node)):
        if nested and i == 2 and isinstance(arg, Tuple):
            args += [each for j, each in enumerate(arg.items) if j not in devices]
        elif (nested or i not in devices) and id(arg) not in attributes:
            args.append(arg)
    states = [value for effect in node.effects for value in effect.values if id(value) not in attributes]
    return [node.callable, *args, *states]


def _quantizer(node: Value) -> Value:
    """The scheme, scales and zero points of the quantized tensor that `node` makes."""
    part = strided_part(node) if isinstance(node, Call) else None
    return next(iter(part.args.items[4:5]), None) if part else None


def _numbered(place: Place, members: list[Value]) -> dict[object, Place]:
    """The `members` of the set at `place`, paired by their places."""
    return {n: Place(place, f"/{{{n}}}", member, place.depth + 1) for n, member in enumerate(members)}


def _apart(a: Value, b: Value, words: str) -> tuple[str, str]:
    """Where `a` and `b` differ, which look alike at their beginnings, in `words`."""
    if isinstance(a, (str, bytes)) and isinstance(b, (str, bytes)) and type(a) is type(b):
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(0, at - 10)
        return f"… {describe(a[start:])} at {start:,}", f"… {describe(b[start:])} at {start:,}"
    return words, f"{words}, but not the same"
