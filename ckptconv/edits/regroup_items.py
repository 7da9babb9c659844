"""Apply the rules of ``--regroup`` to named values of any kind: nodes of a graph, tensors in memory, or shapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from ckptconv.byteranges.sources import Readable
from ckptconv.edits.companions import check_companions
from ckptconv.edits.regroup_files import sizes_in
from ckptconv.edits.regroup_plan import Group, Planner
from ckptconv.edits.regroup_rules import Rule
from ckptconv.errors import LimitError, NoMatchError, RefusedError, some
from ckptconv.hints import option
from ckptconv.limits import LIMITS
from ckptconv.work import CHARACTERS, work

_T = TypeVar("_T")
_STEPS = 6  # of work for a new name, which is kept in the steps
#: What a rule did to a state dict: a group of tensors, or new names by the old ones.
Step: TypeAlias = "Group | Mapping[str, str]"


class Items(Generic[_T]):
    """The items of a state dict while rules change them.

    Attributes:
        path: The path of the state dict.
        cells: For each item of the original state dict, the items that replace it now.
        before: The original names.
        values: The current values by name.
        steps: The steps so far: groups of tensors, or new names by old ones.
        origin: For each new name, the original name that it replaces.
    """

    def __init__(self, items: Iterable[tuple[Any, _T]], path: str) -> None:
        self.path = path
        self.cells = [[item] for item in items]
        self.values: dict[str, _T] = {}
        self.steps: list[Step] = []
        self.origin: dict[str, str] = {}
        self._cell_of: dict[str, int] = {}
        for cell, [(key, value)] in enumerate(self.cells):
            if isinstance(key, str):
                if key in self.values:
                    raise RefusedError(f"the name {key} occurs twice", got=path)
                self.values[key], self._cell_of[key] = value, cell
        self.before = [*self.values]

    def firsts(self, groups: Iterable[Group]) -> dict[str, Group]:
        """Return `groups` by the name of their old ones that comes first in the order of the items."""
        groups = [*groups]
        cells = sorted({self._cell_of[name] for group in groups for name in group.old})
        place = {key: i for i, (key, _) in enumerate(item for cell in cells for item in self.cells[cell])}
        return {min(group.old, key=place.__getitem__): group for group in groups}

    def rename(self, new: Mapping[str, str]) -> None:
        """Change the names that are keys of `new` to their values, all at once."""
        work().charge(len(self.values) // 4 + _STEPS * len(new))  # each rule can have new names for all
        for cell in {self._cell_of[name] for name in new}:
            self.cells[cell] = [(new.get(key, key), value) for key, value in self.cells[cell]]
        self.values = {new.get(name, name): value for name, value in self.values.items()}
        self._cell_of = {new.get(name, name): cell for name, cell in self._cell_of.items()}
        self.origin |= {becomes: self.origin.get(old, old) for old, becomes in new.items()}
        self.steps.append(new)

    def regroup(self, groups: Mapping[str, Group], values: Mapping[str, Iterable[_T]]) -> None:
        """Replace the old tensors of `groups` by the new ones, `values`, at the position of the first old tensor.

        Both are by the name of that tensor. A cell is read once, because it can have the tensors of many groups.
        """
        made = {first: dict(zip(group.new, values[first], strict=True)) for first, group in groups.items()}
        old = {name for group in groups.values() for name in group.old}
        for cell in {self._cell_of[name] for name in old}:
            items: list[tuple[Any, _T]] = []
            for key, value in self.cells[cell]:
                if key in made:
                    items += made[key].items()
                elif key not in old:
                    items.append((key, value))
            self.cells[cell] = items
        for first, new in made.items():
            home, origin = self._cell_of[first], self.origin.get(first, first)
            for name in groups[first].old:
                del self._cell_of[name], self.values[name]
            self.values |= new
            self._cell_of |= dict.fromkeys(new, home)
            self.origin |= dict.fromkeys(new, origin)
            self.steps.append(groups[first])

    def modules(self, known: Collection[str]) -> tuple[set[str], dict[str, str]]:
        """Return the module paths that the rules remove from ``_metadata``, and those that they add.

        Args:
            known: The module paths in ``_metadata``.

        Returns:
            The paths of modules without names now, and a dict from each new path to the old path that it replaces.
        """
        before, after = _modules(self.before), _modules(self.values)
        origin: dict[str, str] = {}
        for new, old in self.origin.items():
            a, b = new.split(".")[:-1], old.split(".")[:-1]
            for depth in range(len(a), 0, -1) if len(a) == len(b) else [len(a)]:
                work().charge(1 + len(new) // CHARACTERS)
                origin.setdefault(".".join(a[:depth]), ".".join(b[:depth] if len(a) == len(b) else b))
        follows = not before.keys().isdisjoint(known)
        added = [module for module in after if follows and module not in before and module not in known]
        return before.keys() - after.keys(), {module: origin.get(module, module) for module in added}


class Maker(Generic[_T]):
    """Builds new values from old ones.

    Attributes:
        source: The file, or None for a state dict in memory.
        sizes: The numbers for the ``$NAME`` of rules.
    """

    source: Readable | None = None
    sizes: Mapping[str, int] = {}

    def tensor(self, value: _T) -> Any:
        """Return an object with the ``dtype`` and ``shape`` of `value`, or None if `value` is not an ordinary
        tensor.
        """
        raise NotImplementedError

    def made(self, group: Group, values: Sequence[_T], like: _T) -> Iterable[_T]:
        """Return the new tensors of `group`, built from `values`.

        `like` is the tensor that comes first in the state dict.
        """
        raise NotImplementedError

    def resolved(self, rule: Rule) -> Rule:
        """Return `rule` with numbers in place of ``$NAME``. Raise UsageError if a number is not known."""
        return rule.resolved(sizes_in(self.source, rule.values(), self.sizes, rule))


def apply_rules(
    rules: Sequence[Rule], dicts: Sequence[Items[_T]], maker: Maker[_T], hint: str | None = None
) -> list[str]:
    """Apply `rules`, one after another, to the state dicts `dicts`. Return notes for the report.

    Args:
        rules: The rules.
        dicts: The items of the state dicts, which are changed in place.
        maker: Builds the new values.
        hint: The hint of the error if there are no names at all.

    Raises:
        NoMatchError: A rule, or a file of rules, matches no name.
        RefusedError, CollisionError, LimitError: Tensors do not fit a rule, or a bias or scale of a tensor is not
            regrouped with it.
    """
    # a file can have several rules for variants of the same names; only a rule that ends in - loses data
    losing = (rule for rule in rules if rule.file is None or rule.made[-1].pattern is None)
    left_out = [str(rule) for rule in losing if rule.is_forward]
    notes = [f"rules that have no reverse are left out: {some(left_out)}"] if left_out else []
    rules = [rule for rule in rules if not rule.is_forward]
    matched: set[str | Rule] = set()
    steps = sum(len(rule.read) for rule in rules) * sum(len(items.values) for items in dicts)
    if steps > LIMITS.rule_steps:
        raise LimitError("too many rules for so many names", expected=f"at most {LIMITS.rule_steps:,}")
    for rule in rules:
        planner = Planner(rule, maker.resolved, maker.tensor)
        for items in dicts:
            groups, renamed = planner.plan(items.values)
            if renamed or groups:
                matched.add(rule.file or rule)
            if renamed:
                items.rename(renamed)
            firsts, values = items.firsts(groups), items.values
            made = {
                first: maker.made(group, [values[name] for name in group.old], values[first])
                for first, group in firsts.items()
            }
            items.regroup(firsts, made)
        if planner.below:
            stay = "name stays as it is" if planner.below == 1 else "names stay as they are"
            text = f"{planner.below:,} {stay}, because a number would be below 0: "
            notes.append(text + option("regroup", (str(rule),)))
    for rule in rules:
        if (rule.file or rule) not in matched:
            names = [name for items in dicts for name in items.before]
            raise NoMatchError(
                f"no rule of {rule.file} matches a name" if rule.file else f"no name matches the rule {rule}",
                got=some(names) or "no state dict",
                hint=None if names else hint,
                unmatched=("regroup", rule.file or rule),
            )
    for items in dicts:
        groups = [step for step in items.steps if isinstance(step, Group)]
        notes += check_companions(items.path, items.before, items.values, groups)
    return notes


def _modules(names: Iterable[str]) -> dict[str, None]:
    """Return the paths of all modules that contain `names`, in order, without the outermost module."""
    modules: dict[str, None] = {}
    for name in names:
        path = name.rpartition(".")[0]
        above: list[str] = []
        while path and path not in modules:
            work().charge(1 + len(path) // CHARACTERS)
            above.append(path)
            path = path.rpartition(".")[0]
        modules.update(dict.fromkeys(reversed(above)))
    return modules
