"""Read the state of an optimizer: its groups, the state of each parameter, and the names of the parameters.

``param_groups[...]["params"]`` lists the parameters by numbers, or by names (FSDP, ``get_optimizer_state_dict``), and
``state`` contains the state of each. ``load_state_dict`` matches parameters by their position in all groups
together, so the numbers are only labels. From torch 2.6 on, a group can also have ``param_names``. A parameter that
is frozen or was never updated has no state. Source: ``torch/optim/optimizer.py`` of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias, TypeGuard

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.state_dicts import Detected, StateDict
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.errors import some
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, List, Node, Object, Value, members_of, strings_of
from ckptconv.pickles.paths import Place
from ckptconv.work import work

#: A number or a name.
Key: TypeAlias = "int | str"
Shape: TypeAlias = "tuple[int, ...]"

#: Parameters with their names, the last one first, each with those before it.
_Reading: TypeAlias = "tuple[_Reading, Key, str] | None"

#: Buffers of ``torch.nn.modules.batchnorm``.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
#: What optimizers keep in the shape of the parameter: those of ``torch.optim``, Lion, Adan, bitsandbytes, and copies of
#: the parameters in float32.
LIKE_THE_PARAMETER = frozenset((
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_diff", "neg_pre_grad", "momentum_buffer", "sum"),
    *("square_avg", "acc_delta", "grad_avg", "ax", "prev", "step_size", "variance", "state1", "state2"),
    *("master_param", "fp32_param"),
))  # fmt: skip
#: The factors of Adafactor: torch keeps the dimension over which it averaged with the size 1, transformers does not.
_ROWS, _COLUMNS = ("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col")


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """A group of parameters.

    Attributes:
        node: The mapping of the group.
        params: The numbers or names of its parameters.
        names: Its ``param_names``, or None.
    """

    node: Object
    params: list[Key]
    names: list[str] | None


@dataclass(frozen=True, eq=False)
class Optimizer:
    """The state of an optimizer.

    Attributes:
        path: The path of the optimizer.
        node: The mapping with ``state`` and ``param_groups``.
        state: The mapping from parameters to their states.
        groups: The groups.
        entries: The state of each parameter that has one.
        shapes: The shape of each parameter, as far as its state shows it.
        trouble: The reason why it cannot be read, or None. If there is one, the other attributes may be incomplete.
    """

    path: str
    node: Object
    state: Object
    groups: list[ParameterGroup]
    entries: dict[Key, Value]
    shapes: dict[Key, Shape]
    trouble: str | None = None

    def key(self, value: Value) -> Key | None:
        """Return the parameter to which the key `value` of ``state`` belongs. Return None if it belongs to none.

        Numbers can be strings, because DCP stores them as strings.
        """
        found = self._by_text.get(str(value)) if is_key(value) else None
        return found if isinstance(value, str) or type(found) is int else None

    @cached_property
    def _by_text(self) -> dict[str, Key]:
        return {str(key): key for key in self.params}

    @property
    def has_texts(self) -> bool:
        """Whether keys of ``state`` are strings in place of numbers. ``load_state_dict`` ignores such keys."""
        return not self.is_named and any(
            isinstance(key, str) and self.key(key) is not None for key, _ in self.state.entries()
        )

    @cached_property
    def params(self) -> list[Key]:
        """The numbers or names of the parameters of all groups, in order."""
        return [key for group in self.groups for key in group.params]

    @property
    def is_named(self) -> bool:
        """Whether the groups list parameters by names."""
        return bool(self.params) and isinstance(self.params[0], str)

    @cached_property
    def names(self) -> dict[Key, str] | None:
        """The name of each parameter, from the groups or from ``param_names``. None if a group has no names."""
        if self.is_named:
            return {key: str(key) for key in self.params}
        if not self.params or any(group.names is None for group in self.groups if group.params):
            return None
        return {key: name for group in self.groups for key, name in zip(group.params, group.names or (), strict=True)}


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a state dict, by name.

    Attributes:
        path: The path of the state dict, for messages.
        shapes: The shapes of the tensors.
        floats: The names of the floating-point and complex tensors. Only these can be updated.
        first: The first name of each tensor. Tied tensors have several names.
        is_ordered: Whether the names are in the order of the model. safetensors sorts them.
    """

    path: str
    shapes: dict[str, Shape]
    floats: frozenset[str]
    first: dict[str, str]
    is_ordered: bool = True

    @cached_property
    def untied(self) -> list[str]:
        """The first name of each tensor, in order."""
        return list(dict.fromkeys(self.first.values()))

    @cached_property
    def float_shapes(self) -> Counter[Shape]:
        """The number of tensors that can be updated, by shape. Tied tensors count once."""
        return Counter(self.shapes[name] for name in self.untied if name in self.floats)


def weights_in(found: StateDict, index: Index, *, is_ordered: bool = True) -> Weights:
    """Return the tensors of the state dict `found`.

    `is_ordered` is False if the names may be sorted, and so are not in the order of the model.
    """
    tensors = index.tensor_nodes
    infos = {name: tensors[id(value)] for name, value in strings_of(found.node).items() if id(value) in tensors}
    seen: dict[tuple[object, ...], str] = {}
    first = {}
    for name, info in infos.items():
        is_shared = info.storage is not None and info.nbytes > 0
        first[name] = seen.setdefault(info.view, name) if is_shared else name
    floats = frozenset(name for name, info in infos.items() if info.dtype.startswith(("float", "bfloat", "complex")))
    return Weights(found.path, {name: info.shape for name, info in infos.items()}, floats, first, is_ordered)


def optimizers_in(index: Index, detected: Detected) -> list[Optimizer]:
    """Return the optimizers of a checkpoint, each once. Optimizers that share a state or group have ``trouble``."""
    read: dict[int, Optimizer] = {}
    states: Counter[int] = Counter()
    for place in index.places:
        if id(place.node) in detected.optimizer_nodes and id(place.node) not in read:
            found = read[id(place.node)] = _read(place, index)
            states.update([id(found.state), *{id(group.node) for group in found.groups}])
    for found in read.values():
        if any(states[id(node)] > 1 for node in (found.state, *(group.node for group in found.groups))):
            read[id(found.node)] = _in_trouble(found.path, found.node, "another optimizer shares its state or a group")
    return list(read.values())


def _in_trouble(path: str, node: Object, trouble: str) -> Optimizer:
    return Optimizer(path, node, Dict(), [], {}, {}, trouble)


def _read(place: Place, index: Index) -> Optimizer:
    """Return the optimizer at `place`. Its ``trouble`` is set if its form is not known."""
    node = place.node
    assert isinstance(node, Object)
    keys = strings_of(node)
    state, holder = keys["state"], keys["param_groups"]
    if not isinstance(state, (Dict, Call)) or not isinstance(holder, List):
        return _in_trouble(place.path, node, "its state is not a dict, or its param_groups are not a list")
    groups = [_group(each) for each in holder.elements()]
    if not groups or None in groups:
        return _in_trouble(place.path, node, "a group does not list its parameters by numbers or names")
    found = Optimizer(place.path, node, state, [group for group in groups if group], {}, {})
    params = set(found.params)
    kinds = {type(key) for key in params}
    if len(kinds) > 1 or len(params) != len(found.params):
        what = "numbers and names" if len(kinds) > 1 else "a parameter twice"
        return _in_trouble(place.path, node, f"its groups list {what}")
    for stored, value in state.entries():
        key = found.key(stored)
        if key is not None:
            if key in found.entries:
                return _in_trouble(place.path, node, f"its state has {key!r} twice")
            if isinstance(value, Dict) and "prev_flat_grad" in strings_of(value):
                return _in_trouble(place.path, node, "LBFGS has one state for all parameters")
            found.entries[key] = value
            shape = _shape_of(value, index.tensor_nodes)
            if shape is not None:
                found.shapes[key] = shape
        elif not isinstance(stored, str) or kinds == {str}:
            return _in_trouble(place.path, node, "its state has parameters that are in no group")
    return found


def is_key(value: Value) -> TypeGuard[Key]:
    """Return whether `value` can be the label of a parameter: a string, or an integer that is not too long to print."""
    return type(value) is str or (type(value) is int and abs(value) < LIMITS.elements)


def _group(value: Value) -> ParameterGroup | None:
    """Return the group in the mapping `value`. Return None if it does not list its parameters by numbers or names."""
    keys = strings_of(value) if isinstance(value, Dict) else {}
    params, names = keys.get("params"), keys.get("param_names")
    members = members_of(params) if isinstance(params, List) else None
    if not isinstance(value, Dict) or members is None:
        return None
    listed = [key for key in members if is_key(key)]
    if len(listed) != len(members):
        return None
    members = members_of(names) if isinstance(names, List) else None
    if members is None:
        return ParameterGroup(value, listed, None)
    texts = [name for name in members if isinstance(name, str)]
    return ParameterGroup(value, listed, texts) if len(texts) == len(listed) == len(members) else None


def _shape_of(entry: Value, tensors: Mapping[int, TensorInfo]) -> Shape | None:
    """Return the shape of a parameter, from the tensors in its state `entry`.

    Return None if they show none or differ.
    """
    if not isinstance(entry, (Dict, Call)):
        return None
    values = strings_of(entry).items()
    infos = {key: tensors[id(value)].shape for key, value in values if isinstance(value, Node) and id(value) in tensors}
    shapes = {shape for key, shape in infos.items() if key in LIKE_THE_PARAMETER}
    for row_key, column_key in zip(_ROWS, _COLUMNS, strict=True):
        row, column = infos.get(row_key), infos.get(column_key)
        if row and column:
            shapes.add((*row[: None if row_key == "exp_avg_sq_row" else -1], column[-1]))
    return shapes.pop() if len(shapes) == 1 else None


# The weights that it belongs to


def candidates(optimizer: Optimizer, every: Sequence[Weights]) -> list[Weights]:
    """Return the state dicts of `every` to which the parameters of `optimizer` can belong.

    If it has names, these are the state dicts that contain most of them, and those that contain any of the
    remaining names. Otherwise these are the state dicts with a tensor of the right shape for each number.
    """
    # This pays also for what the caller does with each of them.
    work().charge(sum(len(optimizer.params) + len(each.shapes) for each in every))
    if optimizer.names is None:
        return [each for each in every if optimizer.params and _fits(optimizer, each)]
    names = set(optimizer.names.values())
    counts = [len(names & each.shapes.keys()) for each in every]
    most = max(counts, default=0)
    is_found = [n == most > 0 for n in counts]
    rest = names.difference(*(each.shapes for each, found in zip(every, is_found, strict=True) if found))
    return [each for each, found in zip(every, is_found, strict=True) if found or not rest.isdisjoint(each.shapes)]


def _fits(optimizer: Optimizer, weights: Weights) -> bool:
    """Return whether `weights` has enough tensors of each shape for the numbers of `optimizer`."""
    wanted = Counter(optimizer.shapes.values())
    return wanted <= weights.float_shapes and len(optimizer.params) <= len(weights.untied)


def alternatives(optimizer: Optimizer, weights: Weights) -> Iterator[tuple[list[Key], list[str]]]:
    """Yield pairs: numbers of parameters, and the names that they can have, by their shapes.

    If there are more names than numbers, some of these tensors are buffers or not in the optimizer. The last pair
    has the numbers whose shape is unknown.
    """
    numbers: dict[Shape, list[Key]] = {}
    for key, shape in optimizer.shapes.items():
        numbers.setdefault(shape, []).append(key)
    rest = []
    by_shape: dict[Shape, list[str]] = {}
    for name in weights.untied:
        if name in weights.floats and weights.shapes[name] in numbers:
            by_shape.setdefault(weights.shapes[name], []).append(name)
        else:
            rest.append(name)
    for shape, keys in numbers.items():
        names = by_shape.get(shape, [])
        yield keys, names
        if len(names) > len(keys):
            rest += names
    unknown = [key for key in optimizer.params if key not in optimizer.shapes]
    if unknown:
        yield unknown, rest


def names_in(optimizer: Optimizer, weights: Weights, *, in_order: bool) -> dict[Key, str] | str:
    """Return the name of each parameter of `optimizer`, if it belongs to `weights`, or a text with the reason why not.

    Its own names are used. Without them, shapes must be unambiguous, or `in_order` must be True.

    Args:
        optimizer: The optimizer.
        weights: The weights.
        in_order: Whether the user asserts that the parameters of each group are in the order of the state dict.
    """
    for name, shape, own in mismatched(optimizer, weights):
        return f"its state of {name} has the shape {[*shape]}, but the weight {[*own]}"
    if optimizer.names is not None:
        return optimizer.names
    found: dict[Key, str] = {}
    for keys, names in alternatives(optimizer, weights):
        found.update(zip(keys, names, strict=False))
        if len(names) > 1 and not in_order:
            return doubt_of(keys, names)
    if not in_order or all(len(names) == 1 for _, names in alternatives(optimizer, weights)):
        return found
    if not weights.is_ordered:
        return f"safetensors sorts names, so {weights.path} does not have the order of the model"
    return _in_order(optimizer, weights)


def doubt_of(keys: Sequence[Key], names: Sequence[str]) -> str:
    """Return a text: each of `keys` can be each of `names`, because all have the same shape."""
    return f"{some([str(key) for key in keys])} can be {some(names)} and have the same shape"


def _in_order(optimizer: Optimizer, weights: Weights) -> dict[Key, str] | str:
    """Return the name of each parameter if those of each group are in the order of `weights`, or a text with the doubt.

    Each name belongs to the next parameter of a group, or to no group. The buffers of batch norms belong to no group.
    """
    names = [name for name in weights.untied if not name.endswith(_BUFFERS)]
    groups = [group.params for group in optimizer.groups]
    spare = len(names) - len(optimizer.params)
    start = (0,) * len(groups)
    steps: dict[tuple[int, ...], list[_Reading]] = {
        start: [None]
    }  # at most two readings, by the position in each group
    done = 0
    for i, name in enumerate(names):
        later: dict[tuple[int, ...], list[_Reading]] = {}
        for at, readings in steps.items():
            if i - sum(at) < spare:
                later.setdefault(at, []).extend(readings)
            fitting = {
                g: params[n]
                for g, (n, params) in enumerate(zip(at, groups, strict=True))
                if n < len(params) and _may_be(params[n], name, optimizer, weights)
            }
            cost = len(groups) * (1 + len(fitting) // 8)  # a new position copies one number for each group
            work().charge(cost)
            done += cost
            if done > LIMITS.optimizer_steps:
                return "too many parameters have no state with their shape"
            for g, key in fitting.items():
                further = (*at[:g], at[g] + 1, *at[g + 1 :])
                later.setdefault(further, []).extend((each, key, name) for each in readings)
        steps = {at: readings[:2] for at, readings in later.items()}
    found = [_unrolled(each) for each in steps.get(tuple(map(len, groups)), [])]
    if len(found) == 1:
        return found[0]
    if not found:
        return f"the order of {weights.path} does not match the shapes of its state"
    a, b = found
    key = next(key for key in optimizer.params if a[key] != b[key])
    return doubt_of([key], [a[key], b[key]])


def _may_be(key: Key, name: str, optimizer: Optimizer, weights: Weights) -> bool:
    """Return whether the parameter `key` can be the tensor `name`, by its shape.

    A parameter without a shape can be any tensor.
    """
    if key not in optimizer.shapes:
        return True
    return name in weights.floats and optimizer.shapes[key] == weights.shapes[name]


def _unrolled(reading: _Reading) -> dict[Key, str]:
    found = {}
    while reading:
        reading, key, name = reading
        found[key] = name
    return found


def keys_of(names: Collection[str], optimizer: Optimizer, weights: Weights) -> set[Key] | str:
    """Return the numbers of the parameters `names` in `optimizer`, or a text with the reason why they are not known.

    `names` are first names in `weights`. The numbers are known if all interpretations of the shapes give the same set.
    """
    found: set[Key] = set()
    wanted = set(names)
    for keys, possible in alternatives(optimizer, weights):
        if possible and wanted.issuperset(possible):
            found.update(keys)
        elif not wanted.isdisjoint(possible):
            return doubt_of(keys, possible)
    return found


def mismatched(optimizer: Optimizer, weights: Weights) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield the name, the shape of the state and the shape of the weight, for each parameter where the shapes differ.

    Nothing is yielded if `optimizer` has no names.
    """
    for key, name in (optimizer.names or {}).items():
        shape, own = optimizer.shapes.get(key), weights.shapes.get(name)
        if shape is not None and own is not None and shape != own:
            yield name, shape, own
