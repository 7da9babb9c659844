"""Plan the changes that a rule of ``--regroup`` makes to a state dict, from the names and shapes of its tensors.

All errors about names and shapes are raised here. This module uses neither files nor graphs nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple, NoReturn

from ckptconv.edits.regroup_rules import Item, Match, Pattern, Rule
from ckptconv.errors import CollisionError, LimitError, RefusedError, some
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

#: What the last segment of a name may be where a rule has a ``*`` for it.
_OPEN = ("weight", "bias")

_Shape = tuple[int, ...]


class Box(NamedTuple):
    """The position of one part in the joined tensor, in the refined shapes of :class:`Geometry`.

    Attributes:
        part: The number of the part in the rule.
        offsets: The first index of the part in the joined tensor.
        sizes: The sizes of the part in the joined tensor; 1 in each stacked dimension.
        shape: The shape of the part by itself.
    """

    part: int
    offsets: _Shape
    sizes: _Shape
    shape: _Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the joined tensor that select the part."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Geometry:
    """The positions of the parts of a group in the joined tensor.

    If the parts alternate in several groups along a dimension, a part is not one box. So the *refined* shapes have two
    dimensions for this dimension: the number of the group, and the index in the group. In them, each part is one box.

    Attributes:
        shape: The shape of the joined tensor.
        stack: The sizes of its first dimensions, along which parts are stacked.
        dim: The dimension of the joined tensor along which it is cut, or None if there is only one part.
        groups: The number of equal groups of that dimension. Each group contains an equal share of each part.
        sizes: The size of each part along that dimension, over all groups.
        named: The number of parts with names. If the rule ends in ``-``, the last part has none and is not written.
    """

    shape: _Shape
    stack: _Shape
    dim: int | None
    groups: int
    sizes: _Shape
    named: int

    def refined(self, values: _Shape, dim: int | None, step: int | None = None) -> _Shape:
        """Return `values` with two values in place of the one for `dim`.

        If there are no groups, return `values` unchanged.

        Args:
            values: Sizes or strides, by dimension.
            dim: The dimension that is cut, or None to return `values` unchanged.
            step: None if `values` are sizes. For strides, the number of indices in a group.
        """
        if dim is None or self.groups == 1:
            return values
        value = values[dim]
        pair = (self.groups, value // self.groups) if step is None else (value * step, value)
        return (*values[:dim], *pair, *values[dim + 1 :])

    @property
    def part_dim(self) -> int | None:
        """The dimension of a part along which the tensor is cut, or None if it is not cut.

        Stacked dimensions do not count.
        """
        return None if self.dim is None else self.dim - len(self.stack)

    def part_shape(self, part: int) -> _Shape:
        """Return the shape of the part with the number `part`, without the stacked dimensions."""
        shape = self.shape[len(self.stack) :]
        d = self.part_dim
        return shape if d is None else (*shape[:d], self.sizes[part], *shape[d + 1 :])

    def boxes(self) -> Iterator[Box]:
        """Yield the box of each part that has a name: all parts of the first index of the stack, then of the next."""
        starts = [0, *accumulate(self.sizes)]
        for index in product(*map(range, self.stack)):
            for part in range(self.named):
                shape = self.refined(self.part_shape(part), self.part_dim)
                offsets = [0] * len(shape)
                if self.part_dim is not None:
                    offsets[self.part_dim + (self.groups > 1)] = starts[part] // self.groups
                yield Box(part, (*index, *offsets), (*(1 for _ in index), *shape), self.part_shape(part))


@dataclass(frozen=True)
class Group:
    """Tensors that are read together, and the tensors that are built from them.

    Attributes:
        rule: The rule.
        old: The names of the tensors that are read. Parts are ordered by stack index, then as in the rule.
        new: The names of the new tensors, in the same order.
        geometry: The positions of the parts in the joined tensor.
        shown: For messages: the names with shapes of the tensors that are read, and of those that are built. ``{e}`` is
            in place of the index in the stack.
    """

    rule: Rule
    old: tuple[str, ...]
    new: tuple[str, ...]
    geometry: Geometry
    shown: tuple[tuple[str, ...], tuple[str, ...]]


class _Family(NamedTuple):
    """The tensors of one group while they are collected.

    Attributes:
        numbers: The numbers in the names, without those of the stack.
        wild: The texts that the wildcards match.
        members: The names of the tensors, by the number of the part and the index in the stack.
    """

    numbers: dict[str, int]
    wild: tuple[str, ...]
    members: dict[tuple[int, tuple[int, ...]], str]


class Planner:
    """Apply `rule` to the state dicts of one checkpoint.

    Args:
        rule: The rule.
        resolve: Returns the rule with numbers in place of its names. It is called if a name matches.
        tensor: Returns the tensor of a value in a state dict, with the attributes ``shape`` and ``dtype``, or None if
            the value is not an ordinary tensor.

    Attributes:
        below: The number of names that stay because a number in the new name would be negative.
    """

    def __init__(self, rule: Rule, resolve: Callable[[Rule], Rule], tensor: Callable[[Any], Any]) -> None:
        self._rule, self._resolve = rule, resolve
        self.below = 0
        self._tensor = tensor
        self._stack: tuple[_Shape, str] | None = None  # that of the first group, and its first name
        self._made = 0  # tensors
        self._tensors: dict[str, Any] = {}

    @cached_property
    def rule(self) -> Rule:
        """The rule with numbers in place of its names."""
        return self._resolve(self._rule)

    def plan(self, values: Mapping[str, object]) -> tuple[list[Group], dict[str, str]]:
        """Return the groups in a state dict, in the order of their first names, and its new names by the old ones.

        A rule makes either groups or new names. `values` are the values of the state dict by name.

        Raises:
            RefusedError: A tensor or name that matches does not fit the rule, or a part is missing.
            CollisionError: A new name exists already, or two tensors would get the same name.
            LimitError: Too many tensors would be built.
        """
        renamed: dict[str, str] = {}
        self._tensors = {}
        families: dict[object, _Family] = {}
        for name in values:
            found = self._matched(name)
            if found is None:
                continue
            number, match = found
            if self.rule.whole_is_read is None:
                new = self.rule.made[0].pattern
                renamed[name] = (new and new.fill(match.numbers, match.wild)) or name
                continue
            self._tensors[name] = self._tensor(values[name])
            if self._tensors[name] is None:
                self._fail(f"{name} is not a plain tensor")
            index = tuple(match.numbers.pop(each) for each in self.rule.stacked) if not self.rule.whole_is_read else ()
            key = (tuple(sorted(match.numbers.items())), match.wild)
            families.setdefault(key, _Family(match.numbers, match.wild, {})).members[number, index] = name
            if self.rule.whole_is_read:
                self._check_number(len(families) * len(self.rule.named))
        groups = [self._group(family) for family in families.values()]
        self._check_names(groups, renamed, values.keys())
        return groups, renamed

    def _matched(self, name: str) -> tuple[int, Match] | None:
        """Return the number of the item of the rule that matches `name`, and the match.

        Return None if no item matches. Return None, and count the name in ``below``, if a number in the new name would
        be negative. Raises RefusedError if two items match or if the match is ambiguous.
        """
        found: list[tuple[int, Pattern, Match]] = []
        for number, item in enumerate(self._rule.read):
            if item.pattern and (match := item.pattern.match(name)):
                found.append((number, item.pattern, match))
        if not found:
            return None
        rule = self.rule
        number, pattern, match = found[0]
        if match.zeros:
            self._fail(f"a number in {name} begins with 0, which {pattern} does not have")
        others = [str(each) for _, each, _ in found[1:]]
        is_rename = rule.whole_is_read is None
        if not is_rename:
            others += [str(item.pattern) for item in rule.made if item.pattern and item.pattern.match(name)]
        if others:
            self._fail(f"two names of the rule match {name}", got=f"{pattern} and {others[0]}")
        filled = [each.pattern.fill(match.numbers, match.wild) for each in rule.made if each.pattern]
        if None in filled or min(match.numbers.values(), default=0) < 0:
            self.below += 1
            return None
        if pattern.ends_open and not is_rename and match.wild[-1] not in _OPEN:
            self._fail(
                f"* at the end of {pattern} means weight and bias, and {name} is another",
                hint="name what is to be regrouped, or leave it out",
            )
        return number, match

    def _group(self, family: _Family) -> Group:
        rule = self.rule
        if rule.whole_is_read:
            whole = family.members[0, ()]
            geometry = self._split(whole, tuple(self._tensors[whole].shape))
        else:
            geometry = self._joined(family)
        name = next(iter(family.members.values()))
        stack, first = self._stack = self._stack or (geometry.stack, name)
        if stack != geometry.stack:
            self._fail(f"{first} and {name} are of groups of different sizes", stack, geometry.stack)
        self._made += prod(geometry.stack) * geometry.named if rule.whole_is_read else 1
        self._check_number(self._made)
        numbers = (dict(zip(rule.stacked, index, strict=True)) for index in product(*map(range, geometry.stack)))
        named = (p.fill({**family.numbers, **of_stack}, family.wild) for of_stack in numbers for p in rule.named)
        assert rule.whole.pattern
        of_whole = (rule.whole.pattern.fill(family.numbers, family.wild) or "",)
        times = f" × {prod(geometry.stack)}" if geometry.stack else ""
        shown = tuple(
            f"{pattern.fill(family.numbers, family.wild)} {[*geometry.part_shape(i)]}{times}"
            for i, pattern in enumerate(rule.named)
        )
        sides = (
            (of_whole, tuple(name for name in named if name is not None)),
            ((f"{of_whole[0]} {[*geometry.shape]}",), shown),
        )
        (old, new), texts = sides if rule.whole_is_read else (sides[0][::-1], sides[1][::-1])
        return Group(rule, old, new, geometry, texts)

    def _check_number(self, made: int) -> None:
        """Raise LimitError if `made`, the number of new tensors, exceeds the limit."""
        if made > LIMITS.regrouped:
            what = f"{self.rule}: too many tensors would be made"
            raise LimitError(what, expected=f"at most {LIMITS.regrouped:,}", got=f"{made:,}")

    def _joined(self, family: _Family) -> Geometry:
        """Return the geometry of the tensor that joins the members of `family`.

        Raises RefusedError if a member is missing, or if dtypes, shapes or sizes do not fit the rule.
        """
        rule, members, tensors = self.rule, family.members, self._tensors
        # a number can be huge, so nothing counts up to it; if one is left out, the first that is missing is among these
        stack = tuple(len({index[i] for _, index in members}) for i in range(len(rule.stacked)))
        every = ((n, index) for index in product(*map(range, stack)) for n in range(len(rule.named)))
        missing = next((each for each in every if each not in members), None)
        if missing:
            n, index = missing
            numbers = {**family.numbers, **dict(zip(rule.stacked, index, strict=True))}
            self._fail(
                f"a part is missing: {rule.named[n].fill(numbers, family.wild)}",
                got=some([*members.values()]),
                hint="if it is in another shard, convert the whole set",
            )
        one = members[0, (0,) * len(stack)]
        first = tensors[one]
        shapes: list[_Shape] = [()] * len(rule.named)
        for (n, index), name in sorted(members.items()):
            tensor = tensors[name]
            if tensor.dtype != first.dtype:
                self._fail(f"the parts differ in dtype: {one} and {name}", got=f"{first.dtype} and {tensor.dtype}")
            if not any(index):
                shapes[n] = tuple(tensor.shape)
            elif tuple(tensor.shape) != shapes[n]:
                self._fail(f"the parts that are stacked differ in shape: {name}", shapes[n], tuple(tensor.shape))
        if len(shapes) == 1:
            return Geometry((*stack, *shapes[0]), stack, None, 1, (), 1)
        rank = len(stack) + len(shapes[0])
        dim = self._dim(one, rank, len(stack))
        d = dim - len(stack)
        rest = (*shapes[0][:d], *shapes[0][d + 1 :])
        for n, shape in enumerate(shapes[1:], 1):
            if len(shape) != len(shapes[0]) or (*shape[:d], *shape[d + 1 :]) != rest:
                name = members[n, (0,) * len(stack)]
                self._fail(f"the parts differ in a dimension other than {dim}: {one} and {name}", shapes[0], shape)
        sizes = tuple(shape[d] for shape in shapes)
        groups = self._groups(sum(sizes), sizes, one)
        whole = (*stack, *shapes[0][:d], sum(sizes), *shapes[0][d + 1 :])
        wanted = self._sizes(sum(sizes), one)
        if wanted and wanted != sizes:
            self._fail(f"the parts have other sizes along dimension {dim} than the rule says: {one}", wanted, sizes)
        return Geometry(whole, stack, dim, groups, sizes, len(sizes))

    def _split(self, name: str, shape: _Shape) -> Geometry:
        """Return the geometry of a split.

        Raise RefusedError if the tensor `name`, of this `shape`, cannot be cut by the rule.
        """
        rule = self.rule
        depth = len(rule.stacked)
        if len(shape) < depth:
            self._fail(f"{name} has fewer dimensions than are to be unstacked", depth, shape)
        if 0 in shape[:depth]:
            self._fail(f"{name} has nothing to unstack", got=shape)
        stack = shape[:depth]
        if len(rule.parts) == 1:
            return Geometry(shape, stack, None, 1, (), 1)
        dim = self._dim(name, len(shape), depth)
        sizes = self._sizes(shape[dim], name)
        groups = self._groups(shape[dim], sizes, name)
        return Geometry(shape, stack, dim, groups, sizes, len(rule.named))

    def _dim(self, name: str, rank: int, depth: int) -> int:
        """Return the dimension of the joined tensor along which it is cut.

        Args:
            name: The name of the joined tensor or of its first part, for errors.
            rank: The number of dimensions of the joined tensor.
            depth: The number of stacked dimensions.

        Raises:
            RefusedError: The rule has no dimension and it is ambiguous, or the dimension is stacked or does not exist.
        """
        dim = self.rule.whole.dim
        if dim is None:
            if not depth and rank > 2:
                self._fail(
                    f"{name} has {rank} dimensions, and the rule does not say along which its parts lie",
                    hint=f"write it after the whole: {self.rule.whole.pattern} @0",
                )
            dim = depth
        if dim < depth:
            self._fail(f"dimension {dim} is stacked, and parts cannot lie along it: {name}")
        if dim >= rank:
            self._fail(f"the whole of {name} has no dimension {dim}", got=f"{rank} dimensions")
        return dim

    def _groups(self, size: int, sizes: _Shape, name: str) -> int:
        groups = self.rule.whole.groups
        assert isinstance(groups, int)
        if any(each % groups for each in (size, *sizes)):
            self._fail(f"the sizes of the parts of {name} are not divisible by {groups} groups", got=sizes)
        return groups

    def _sizes(self, size: int, name: str) -> _Shape:
        """Return the size of each part along a dimension of `size`.

        The tuple is empty if the rule has no sizes or shares.

        Raises RefusedError if they do not add up to `size`. `name` is the tensor in the error.
        """
        parts: tuple[Item, ...] = self.rule.parts
        shares = [part.share for part in parts if isinstance(part.share, int)]
        if shares:
            if size % sum(shares):
                self._fail(f"{name} has {size}, which {sum(shares)} shares do not divide")
            return tuple(share * (size // sum(shares)) for share in shares)
        sizes = [part.size for part in parts if isinstance(part.size, int)]
        if not sizes:
            return ()
        if len(sizes) < len(parts):  # a bare -
            sizes.append(size - sum(sizes))
        if sum(sizes) != size or sizes[-1] < 0:
            known = [part.size for part in parts if isinstance(part.size, int)]
            self._fail(f"the sizes in the rule are not those of {name}", f"{sum(known)}", f"{size}")
        return tuple(sizes)

    def _check_names(self, groups: list[Group], renamed: dict[str, str], names: Collection[str]) -> None:
        """Raise CollisionError if two tensors get the same name, or one gets the name of a tensor that stays.

        `groups` and `renamed` are the change, and `names` are the names before it.
        """
        gone = {name for group in groups for name in group.old} | renamed.keys()
        made: dict[str, str] = {}
        pairs = [(new, group.old[0]) for group in groups for new in group.new]
        for new, old in [*pairs, *((new, old) for old, new in renamed.items())]:
            if new in made:
                raise CollisionError(f"{made[new]} and {old} would become {new}", got=str(self.rule))
            if new in names and new not in gone:
                raise CollisionError(f"{new} exists already", got=str(self.rule))
            made[new] = old

    def _fail(self, what: str, expected: object = None, got: object = None, hint: str | None = None) -> NoReturn:
        raise RefusedError(f"{self.rule}: {what}", expected=expected, got=got, hint=hint)
