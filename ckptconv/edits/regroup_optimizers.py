"""Change optimizers together with weights that ``--regroup`` splits, joins and stacks.

State in the shape of a parameter (``exp_avg``) is regrouped like the parameter. A number (``step``) is copied to each
part of a split, and must be equal in all parts of a join. Any other state is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.reading import announce, same_streams
from ckptconv.byteranges.spans import Piece
from ckptconv.checkpoint.describe import describe
from ckptconv.checkpoint.merging import have_equal_checksums
from ckptconv.checkpoint.optimizers import LIKE_THE_PARAMETER, Key, Optimizer, Weights, names_in
from ckptconv.checkpoint.tensor_info import piece_of
from ckptconv.edits.changes import Changes
from ckptconv.edits.optimizers import Followers, are_same, options_of, rewrite
from ckptconv.edits.regroup import Tensors
from ckptconv.edits.regroup_items import Step
from ckptconv.edits.regroup_plan import Group
from ckptconv.edits.rename import replace_names
from ckptconv.errors import RefusedError, at_path, some
from ckptconv.hints import option
from ckptconv.pickles.graph import Call, Dict, Node, Value, replace_items, set_items, strings_of
from ckptconv.work import work


def follow(followers: Followers, changes: Changes, tensors: Tensors, steps: Mapping[int, Sequence[Step]]) -> None:
    """Change the optimizers of `followers` like their weights.

    Args:
        followers: The optimizers, and the state dicts before the rules.
        changes: The report.
        tensors: Builds tensors in the checkpoint that contains the weights.
        steps: The steps of each state dict, by the id of its node.

    Raises:
        RefusedError: It is not known which weights an optimizer has, or its state cannot be regrouped like them.
    """
    checkpoint = followers.checkpoint
    own = tensors if followers.of is checkpoint else Tensors(checkpoint, changes)
    of = {id(weights): steps[id(found.node)] for found, weights in followers.models}
    is_regrouped = {key for key, done in of.items() if any(isinstance(step, Group) for step in done)}
    followed = set()
    for optimizer in followers.optimizers if is_regrouped else ():
        every = [id(weights) for weights in followers.candidates(optimizer)]
        if (optimizer.params or optimizer.trouble) and not (every and is_regrouped.isdisjoint(every)):
            parameters = _Parameters(optimizer, followers, own, changes)
            parameters.follow(of)
            followed.add(optimizer.path)
    for named in checkpoint.detected.optimizers:
        if named.path not in followed:
            for step in (step for done in steps.values() for step in done):
                if not isinstance(step, Group):
                    work().charge(1 + len(named.places) // 4)  # there can be any number of state dicts
                    replace_names(named, step)
    if own is not tensors:
        own.conclude()


class _Parameters:
    """The parameters of `optimizer` while rules change them. The key of a new parameter is a new number."""

    def __init__(self, optimizer: Optimizer, followers: Followers, tensors: Tensors, changes: Changes) -> None:
        self.optimizer = optimizer
        self.followers = followers
        self.tensors = tensors
        self.changes = changes
        self.names: dict[Key, str] = {}
        self.key_of: dict[str, Key] = {}
        self.entries = dict(optimizer.entries)
        self.home = {key: group for group in optimizer.groups for key in group.params}
        self.place = {key: i for i, key in enumerate(optimizer.params)}
        self.instead: dict[Key, list[Key]] = {}  # the new parameters that replace an old one
        self.pairs: list[
            tuple[Group, str, list[Piece]]
        ] = []  # pairs of numbers that must be equal, with their group and field
        self.unused = 1 + max((key for key in optimizer.params if isinstance(key, int)), default=0)

    def follow(self, steps: Mapping[int, Sequence[Step]]) -> None:
        """Apply the steps of the weights of this optimizer. `steps` are given by the id of the weights.

        Raises RefusedError.
        """

        def ask(weights: Weights) -> tuple[dict[Key, str], Sequence[Step]] | str:
            names = names_in(self.optimizer, weights, in_order=self.followers.in_order)
            return names if isinstance(names, str) else (names, steps[id(weights)])

        names, own = self.followers.agreed(self.optimizer, "which parameter belongs to which weight", ask)
        self.names = dict(names)
        self.key_of = {name: key for key, name in names.items()}
        for step in own:
            if isinstance(step, Group):
                self.regroup(step)
            else:
                work().charge(len(self.names) // 4)
                self.names = {key: step.get(name, name) for key, name in self.names.items()}
                self.key_of = {name: key for key, name in self.names.items()}
        self.compare()
        self.write()

    def regroup(self, group: Group) -> None:
        """Replace the old parameters of `group` by the new ones.

        Do nothing if the optimizer has none of the old ones.
        """
        keys = [self.key_of[name] for name in group.old if name in self.key_of]
        if not keys:
            return
        for name in group.old:
            if name not in self.key_of:
                self.fail(group, f"{self.names[keys[0]]} is one of its parameters, and {name} is not")
        home, *others = (options_of(each) for each in {id(self.home[key]): self.home[key] for key in keys}.values())
        if not all(are_same(home, other) for other in others):
            self.fail(group, f"{some(group.old)} are in groups with different options")
        entries = self.made(group, keys)
        new = [*range(self.unused, self.unused + len(group.new))]
        self.unused += len(new)
        first = min(keys, key=lambda key: self.place[key])
        for key in keys:
            del self.key_of[self.names.pop(key)]
            self.instead[key] = [*new] if key == first else []
        for key, name in zip(new, group.new, strict=True):
            self.names[key], self.key_of[name] = name, key
            self.home[key], self.place[key] = self.home[first], self.place[first]
        self.entries.update(zip(new, entries, strict=False))
        self.followers.change_of(self.optimizer, self.changes).regrouped += len(new)

    def made(self, group: Group, keys: Sequence[Key]) -> list[Dict]:
        """Return the states of the new parameters of `group`, built from the states of the old parameters `keys`.

        The list is empty if none of these has a state. Raises RefusedError if only some have one, or if a state is
        unknown.
        """
        having = [self.names[key] for key in keys if key in self.entries]
        if not having:
            return []
        if len(having) < len(keys):
            name = next(self.names[key] for key in keys if key not in self.entries)
            self.fail(group, f"{having[0]} has a state, and {name} has none: it is frozen or was never updated")
        entries = [self.entries[key] for key in keys]
        known = [(strings_of(each), len([*each.entries()])) for each in entries if isinstance(each, Dict)]
        fields = [own for own, n in known if len(own) == n > 0]
        if len(fields) < len(keys) or any(each.keys() != fields[0].keys() for each in fields):
            self.fail(group, f"the states of {some(group.old)} have different or unknown keys, or are not dicts")
        made: dict[str, Sequence[Value]] = {}
        unknown = []
        for field in fields[0]:
            values = self.values(group, field, [own[field] for own in fields])
            if values is None:
                info = self.tensors.tensor(fields[0][field])
                unknown.append(f"{field} {[*info.shape]}" if info else field)
            else:
                made[field] = values
        if unknown:
            self.fail(group, f"its state of {group.old[0]} has another shape, or an unknown name: {some(unknown)}")
        items = ([word for key, values in made.items() for word in (key, values[i])] for i in range(len(group.new)))
        return [set_items(Dict(), each) for each in items]

    def values(self, group: Group, field: str, values: Sequence[Value]) -> Sequence[Value] | None:
        """Return the values of `field` in the states of the new parameters of `group`.

        Return None if they are not known.

        `values` are the values in the states of the old parameters.
        """
        count = len(group.new)
        if not any(isinstance(value, Node) for value in values):
            if not all(are_same(value, values[0]) for value in values):
                self.fail(group, f"{field} of {some(group.old)} must be equal", got=some([*map(describe, values)]))
            return [values[0]] * count
        infos = [info for value in values if (info := self.tensors.tensor(value))]
        if len(infos) < len(values):
            return None
        if len({info.dtype for info in infos}) > 1:
            self.fail(group, f"{field} of {some(group.old)} differs in dtype", got=some([each.dtype for each in infos]))
        nodes = [value for value in values if isinstance(value, Call)]
        shapes = [box.shape for box in group.geometry.boxes()]
        wanted = [group.geometry.shape] if group.rule.whole_is_read else shapes
        if field in LIKE_THE_PARAMETER and [info.shape for info in infos] == wanted:
            return self.tensors.regrouped(group, nodes, nodes[0])
        if any(info.shape for info in infos):
            return None
        pieces = [piece_of(info, "little") for info in infos]
        self.pairs += [(group, field, [pieces[0], piece]) for piece in pieces[1:]]
        return [
            nodes[0],
            *(self.tensors.copy(nodes[0]) for _ in range(count - 1)),
        ]  # copies, because torch changes each in place

    def compare(self) -> None:
        """Raise RefusedError if numbers of joined parameters differ. Numbers without known checksums are read."""
        unsure = [each for each in self.pairs if not have_equal_checksums(*each[2])]
        every = [piece for _, _, pair in unsure for piece in pair]
        announce(every)
        with Pieces(every) as pieces:
            for group, field, pair in unsure:
                if not same_streams(*map(pieces.chunks, pair)):
                    self.fail(group, f"{field} of {some(group.old)} must be equal")

    def write(self) -> None:
        """Write the new parameters and their states into the optimizer."""
        items: list[tuple[Value, Value]] = []
        for stored, value in self.optimizer.state.entries():
            key = self.optimizer.key(stored)
            if key is not None and key in self.instead:
                items += [(new, self.entries[new]) for new in self.now([key])]
            else:
                items.append((stored, value))
        replace_items(self.optimizer.state, items)
        groups = [self.now(group.params) for group in self.optimizer.groups]
        rewrite(self.optimizer, groups, self.names, is_named=self.optimizer.is_named)

    def now(self, keys: Iterable[Key]) -> list[Key]:
        """Return the parameters that replace `keys` after all steps. A key that was not replaced stays."""
        found: list[Key] = []
        todo = [*keys][::-1]
        while todo:
            key = todo.pop()
            if key in self.instead:
                todo += reversed(self.instead[key])
            else:
                found.append(key)
        return found

    def fail(self, group: Group, what: str, got: str | None = None) -> NoReturn:
        path = self.optimizer.path
        raise RefusedError(
            f"the optimizer{at_path(path)} cannot follow {group.rule}: {what}",
            where=self.followers.checkpoint.source.path,
            got=got,
            hint="to leave out the optimizer: " + option("drop", path) if path != "." else None,
        )
