"""Replace in a graph what the table knows by its plain form, and refuse all at once what is left.

Works on the pickle's graph alone: nothing is imported or called. What becomes of an object is made once, so what was
shared still is, and what holds itself still does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckptconv.byteranges.sources import BytesSource
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.effect_order import drop_effect_order
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import is_torchs, needed_import
from ckptconv.edits.changes import Changes, MadePlain
from ckptconv.edits.loadable.arrays import Arrays, is_array, type_text
from ckptconv.edits.loadable.pickled import NotPlain, pickled
from ckptconv.edits.loadable.table import (
    BY_CLASS,
    FROZEN_SET,
    NUMPY_TYPE,
    NUMPY_TYPES,
    OTHER,
    Row,
    described,
    frozen_set,
    named,
)
from ckptconv.edits.selection import holder_of
from ckptconv.errors import RefusedError, count, some
from ckptconv.hints import Message, Option, Placeholder, command, joined, option
from ckptconv.pickles.graph import (
    SET_CLASSES,
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Node,
    Object,
    PersistentId,
    Set,
    Tuple,
    Value,
    imported_name,
    is_global,
    members_of,
    strings_of,
    walk,
)
from ckptconv.pickles.machine import CODES
from ckptconv.pickles.paths import Place, Referrers, is_item

_KINDS: tuple[tuple[type, str], ...] = (
    (Dict, "dict"), (List, "list"), (Set, "set"), (str, "text"), (bool, "bool"), (int, "int"), (float, "float"),
    (bytes, "bytes"), (type(None), "None"), (Tuple, "tuple"),
)  # a table  # fmt: skip
_GENERATORS = ("MT19937",)  # that numpy's older states are tuples of
_SHOWN = 10  # objects in an error
_MOST_DROPS = 20  # in a command; above that, what they stand in goes
_LONGEST_KEY = 64  # members of a tuple
_NOT_DESCRIBED = ("builtins.", "copyreg.", "operator.")  # whose calls give anything


def make_loadable(checkpoint: Checkpoint, changes: Changes, *, objects: bool) -> None:
    """Make everything in a checkpoint plain that is only data.

    Args:
        checkpoint: It is changed in place.
        changes: It gains what became plain.
        objects: Make dicts of objects that are in no table, which name their classes.

    Raises:
        RefusedError: Something is left that torch's safe loader refuses.
    """
    places = (checkpoint.before_renaming or checkpoint.index).every_place
    making = _Making(checkpoint, objects=objects)
    making.run()
    nodes = list(walk([*checkpoint.graph.discarded, checkpoint.graph.root]))
    _refresh(checkpoint, nodes)
    refused = [*making.troubles, *checkpoint.index.obstacles]
    if refused:
        known = {id(place.node): place for place in places if isinstance(place.node, Node)}
        referrers = Referrers(checkpoint.graph, places, nodes)
        why: dict[int, str] = {}
        for reason, node in refused:
            for each in placed(node, referrers, making.old_of, known) or {id(places[0].node)}:
                why.setdefault(each, making.failed.get(each, reason))

        def helps() -> bool:  # asked last: the graph is changed by it
            again = _Making(checkpoint, objects=True)
            again.run()
            _refresh(checkpoint, list(walk([*checkpoint.graph.discarded, checkpoint.graph.root])))
            return not (again.troubles or checkpoint.index.obstacles)

        raise refusal(checkpoint, places, why, objects_help=None if objects else helps)
    drop_effect_order(checkpoint)
    changes.made_plain = making.said(places, nodes)
    if not changes.made_plain:
        changes.notes.append("everything in it is plain already, so " + option("loadable") + " changed nothing")


def _refresh(checkpoint: Checkpoint, nodes: list[Node]) -> None:
    """Bring what `checkpoint` knows of its graph, which has these `nodes` now, up to date."""
    graph, reached = checkpoint.graph, set(map(id, nodes))
    graph.used |= {
        CODES["BINBYTES"][0]
    }  # as if its source had bytes and sets, which torch has to be told in other words
    graph.globals = [node for node in nodes if isinstance(node, Global)]
    graph.calls = [node for node in nodes if isinstance(node, Call)]
    graph.references = [node for node in nodes if isinstance(node, PersistentId)]
    new = {id(each.node): each for each in checkpoint.references if id(each.node) in reached}
    checkpoint.references = [new[id(node)] for node in graph.references]
    checkpoint.changed()
    checkpoint.index.nodes = nodes


class _Making:
    """What each object of a graph becomes."""

    def __init__(self, checkpoint: Checkpoint, *, objects: bool) -> None:
        self._graph = checkpoint.graph
        self._arrays = Arrays(checkpoint)
        self._tensors = checkpoint.tensor_nodes
        self._objects = objects
        self._made: dict[int, Value] = {}  # by the id of the object
        self._rows: list[tuple[Node, Row, Value]] = []  # it keeps the objects, whose ids are known
        self._seen: list[Node] = []
        #: What new nodes stand for, by their ids.
        self.old_of: dict[int, Value] = {}
        #: Why an object of the table did not become plain, by its id.
        self.failed: dict[int, str] = {}
        #: What cannot be said, though nothing in it is refused.
        self.troubles: list[tuple[str, Node]] = []

    def run(self) -> None:
        """Replace what becomes plain, wherever it stands."""
        graph = self._graph
        graph.root = self.plain(graph.root)
        for node in walk([graph.root]):  # children are asked for after their parent was seen to
            self._note_states(node)
            if isinstance(node, Tuple):
                node.items = [self.plain(item) for item in node.items]
            elif isinstance(node, Object):
                self._replace_in(node)

    def said(self, places: Sequence[Place], nodes: Sequence[Node]) -> list[MadePlain]:
        """What became plain, each with the first of `places` at which it stands in what is one of `nodes` still: that
        can be a dtype, which a number of numpy's has had before.
        """
        left = {id(self.old_of.get(id(node), node)) for node in nodes}
        first: dict[int, Place] = {}
        for place in (*(each for each in places if each.parent and id(each.parent.node) in left), *places):
            first.setdefault(id(place.node), place)
        return [
            MadePlain(at.path, row.title, _kind(value), _reads(row, at, value))
            for node, row, value in self._rows
            if row.is_listed(value) and (at := first.get(id(node))) is not None
        ]

    def plain(self, value: Value) -> Value:
        """What `value` becomes: itself, if it is plain or in no table."""
        chain: list[Node] = []
        while isinstance(value, (Call, Global, FrozenSet)) and id(value) not in self._made:
            self._made[id(value)] = value  # while it is made, for what is made of itself
            self._seen.append(value)
            new = self._step(value)
            if new is value:
                break
            chain.append(value)
            value = new
        value = self._made.get(id(value), value) if isinstance(value, Node) else value
        for old in chain:
            self._made[id(old)] = value
            if isinstance(value, Node):
                self.old_of.setdefault(id(value), old)
        return value

    def _step(self, node: Call | Global | FrozenSet) -> Value:
        """What `node` becomes by one row of the table; itself, if it is in none or cannot."""
        row, value = self._by_row(node)
        if row is not None and value is not node:
            self._rows.append((node, row, value))
        return value

    def _by_row(self, node: Call | Global | FrozenSet) -> tuple[Row | None, Value]:
        if isinstance(node, FrozenSet):
            return FROZEN_SET, frozen_set(node.items)
        if isinstance(node, Global):
            name = imported_name(node, 2)
            if name in NUMPY_TYPES:
                return NUMPY_TYPE, type_text(name)
            is_named = self._objects and not is_torchs(node) and not is_dangerous(node)
            return (OTHER, named(name)) if is_named else (None, node)
        made = pickled(node)
        row = BY_CLASS.get(made.cls) if made else None
        try:
            if made and row:
                return row, row.make(self._arrays, made)
            if made and self._objects and self._can_be_described(node, made.cls):
                return OTHER, described(made)
        except NotPlain as why:
            self.failed[id(node)] = f"{row.title if row else made and made.cls} ({why})"
        return None, node

    def _can_be_described(self, call: Call, name: str) -> bool:
        """Whether `call`, of what is called `name`, is no tensor, nothing of torch's list, and harmless."""
        called = call.callable
        return (
            isinstance(called, Global)
            and (name != imported_name(called, 2) or not (is_torchs(called) or name.startswith(_NOT_DESCRIBED)))
            and id(call) not in self._tensors
            and not is_dangerous(Global(*name.rpartition(".")[::2]))
        )

    def _replace_in(self, node: Object) -> None:
        """Let `node` be made of what its parts become."""
        if isinstance(node, Call):
            members = members_of(node) if is_global(node.callable, *SET_CLASSES) else None
            if members:
                self._check_members(node, members)
            node.args = node.args if isinstance(node.args, Tuple) else self.plain(node.args)
            node.kwargs = self.plain(node.kwargs)
        old_keys: list[Value] = []
        keys: list[Value] = []
        for effect in node.effects:
            old, effect.values = effect.values, [self.plain(value) for value in effect.values]
            if effect.opcode in ("SETITEM", "SETITEMS"):
                old_keys += old[::2]
                keys += effect.values[::2]
            elif isinstance(node, Set):
                old_keys += old
                keys += effect.values
        self._check_keys(node, old_keys, keys, "keys")

    def _check_members(self, call: Call, members: list[Value]) -> None:
        self._check_keys(call, members, [self.plain(member) for member in members], "members")

    def _check_keys(self, holder: Node, old: list[Value], new: list[Value], what: str) -> None:
        """Note where keys become what is no key, or the same one."""
        if all(a is b and not isinstance(b, Tuple) for a, b in zip(old, new, strict=True)):
            return
        for before, after in zip(old, new, strict=True):
            if before is not after and isinstance(after, (Dict, List, Set)):
                self.troubles.append((f"a mapping or set in which a {_kind(after)} would be one of the {what}", holder))
        if len({_hashable(key, self.plain) for key in new}) < len({_hashable(key, lambda part: part) for key in old}):
            self.troubles.append((f"a mapping or set of which two {what} would become one", holder))

    def _note_states(self, node: Node) -> None:
        """Remember the arrays in a state of numpy's random generators: these take lists, and no tensor on a GPU."""
        if isinstance(node, Tuple) and len(node.items) in (3, 5) and text_of(node.items[0]) in _GENERATORS:
            self._arrays.in_states |= {id(node.items[1])} if is_array(node.items[1]) else set()
        elif isinstance(node, Dict) and node.effects:
            items = strings_of(node)
            if "bit_generator" in items:
                state = items.get("state")
                held = [*items.values(), *(strings_of(state).values() if isinstance(state, Dict) else ())]
                self._arrays.in_states |= {id(value) for value in held if is_array(value)}


def _hashable(key: Value, of: Callable[[Value], Value], depth: int = 4) -> object:
    """What is equal where Python finds keys equal: what `of` gives for atoms, and tuples of them; else the node."""
    if isinstance(key, Tuple) and depth and len(key.items) <= _LONGEST_KEY:
        return tuple(_hashable(item, of, depth - 1) for item in key.items)
    return of(key)


def _kind(value: Value) -> str:
    """What a plain `value` is, in a word."""
    if isinstance(value, Call):
        return "complex" if is_global(value.callable, "builtins.complex") else "tensor"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "object")


def _reads(row: Row, place: Place, value: Value) -> str:
    """How code reads what became plain by `row`, in code's words."""
    name = place.key if place.key and place.key.isidentifier() else "x"
    keys: Iterable[Value] = strings_of(value) if isinstance(value, Dict) else ()
    key = next(iter(keys), "name")
    reads = row.reads_list if row.reads_list and isinstance(value, List) else row.reads
    return reads.replace("{x}", name).replace("{key!r}", repr(key))


# Refusing


def placed(node: Value, referrers: Referrers, old_of: Mapping[int, Value], places: Mapping[int, Place]) -> set[int]:
    """The ids of the nodes in the source that have a place, and are `node`, or what it is a part of.

    `old_of`: what new nodes stand for, by their ids.
    """
    found: set[int] = set()
    seen: set[int] = set()
    todo: list[Value] = [node]
    if isinstance(node, Global):  # what is called stands where its call does
        users = referrers.users(node)
        todo = [user if isinstance(user, Call) and user.callable is node else node for user in users] or todo
    while todo:
        each = todo.pop()
        old = old_of.get(id(each), each)
        if id(old) in places:
            found.add(id(old))
        elif id(each) not in seen:
            seen.add(id(each))
            todo += referrers.users(each)
    return found


def refusal(
    checkpoint: Checkpoint,
    places: Sequence[Place],
    why: Mapping[int, str],
    *,
    objects_help: Callable[[], bool] | None,
) -> RefusedError:
    """The error for the nodes of which `why` says by their ids what they are.

    `places` are those of the source. `objects_help`: Whether ``loadable_objects`` would refuse nothing; None where it
    was asked for.
    """
    inside: dict[int, list[Place]] = {}
    for place in places:
        if place.parent is not None:
            inside.setdefault(id(place.parent.node), []).append(place)
    root = places[0]
    stands = _first_met(root, inside, why)
    drops = _drops(root, inside, set(why))
    if not _is_something_left(checkpoint, places, drops):
        drops = []
    needed = [needed_import(why[id(place.node)]) for place in stands]
    imports = ", ".join(sorted({module for module in needed if module}))
    known = dict.fromkeys(why[id(place.node)] for place, module in zip(stands, needed, strict=True) if module)
    hints = [
        f"torch.load(weights_only=True) takes {some([*known], _SHOWN)} after `import {imports}`" if imports else None,
        _without(checkpoint, tuple(dict.fromkeys(place.path for place in drops))) if None in needed else None,
        option("loadable_objects") + " makes dicts of objects that are in no table"
        if None in needed and objects_help and objects_help()
        else None,
    ]
    return RefusedError(
        f"{count(len(stands), 'object')} cannot become plain",
        where=checkpoint.source.path,
        got=some([f"{why[id(place.node)]} at {place.path}" for place in stands], _SHOWN),
        hint=joined(*hints) if any(hints) else None,
    )


def _without(checkpoint: Checkpoint, paths: tuple[str, ...]) -> str | None:
    """The command that leaves out what stands at `paths`, or takes the weights alone if there are none."""
    source = checkpoint.source
    if not paths and len(checkpoint.detected.main()) != 1:
        return None
    left_out = (Option("loadable"), Option("drop", paths)) if paths else (Option("state_dict"),)
    if isinstance(source, BytesSource):
        return joined(*(Message(each) for each in left_out), separator=" ")
    return "without: " + command("convert", source.path, Placeholder("OUT"), *left_out)


def _first_met(root: Place, inside: Mapping[int, list[Place]], stops: Collection[int]) -> list[Place]:
    """The places of nodes in `stops` (by id) that can be reached from `root` without another of them between."""
    found: list[Place] = []
    seen: set[int] = set()
    todo = [root]
    while todo:
        place = todo.pop()
        if id(place.node) in stops:
            found.append(place)
        elif id(place.node) not in seen:
            seen.add(id(place.node))
            todo += inside.get(id(place.node), [])[::-1]
    return found


def _drops(root: Place, inside: Mapping[int, list[Place]], stops: set[int]) -> list[Place]:
    """The places without which nothing in `stops` is left, fewer and higher ones where they are many."""
    found = _taken_out(root, inside, stops)
    while len(found) > _MOST_DROPS:
        deepest = max(place.depth for place in found)
        above = {id(place.parent.node) for place in found if place.parent and place.depth == deepest}
        fewer = _taken_out(root, inside, stops | above)
        if not fewer:
            break
        found, stops = fewer, stops | above
    return found


def _taken_out(root: Place, inside: Mapping[int, list[Place]], stops: set[int]) -> list[Place]:
    """The places without which nothing in `stops` is left; none if that is the root.

    An argument of a call, or an item of a tuple, goes with what it stands in, wherever that stands.
    """
    while True:
        found = _first_met(root, inside, stops)
        stuck = {id(place.parent.node) for place in found if place.parent and not _can_go(place)}
        if id(root.node) in stops | stuck:
            return []
        if not stuck:
            return found
        stops |= stuck


def _can_go(place: Place) -> bool:
    """Whether what stands at `place`, of which a key may have another name by now, can be left out by itself."""
    outer = place.parent and place.parent.node
    if place.segment.startswith("/."):
        return holder_of(place) is not None
    if isinstance(outer, Call):
        return is_item(place) and next(outer.elements(), None) is None
    return isinstance(outer, (List, Set)) or (isinstance(outer, Dict) and is_item(place))


def _is_something_left(checkpoint: Checkpoint, places: Iterable[Place], gone: Iterable[Place]) -> bool:
    """Whether a tensor is left, if there is one, once what stands at the places `gone` went."""
    lost = {id(place) for place in gone}
    tensors = [place for place in places if id(place.node) in checkpoint.tensor_nodes]
    return not tensors or any(lost.isdisjoint(id(above) for above in place.upwards()) for place in tensors)
