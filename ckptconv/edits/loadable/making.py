"""Convert the objects of a graph that the table knows to plain data, and refuse all other objects in one error.

Plain data is data that ``torch.load(weights_only=True)`` accepts: dicts, lists, texts, numbers and tensors. Only the
graph changes; nothing is imported or called. Each object is converted once, so objects that are shared before are
shared after, and cycles stay cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

from ckptconv.byteranges.sources import BytesSource
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.legacy_python import text_of
from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import PlainOutline, is_torchs, needed_import
from ckptconv.edits.changes import Changes, MadePlain
from ckptconv.edits.loadable.arrays import Arrays, is_array
from ckptconv.edits.loadable.pickled import NotPlain, pickled
from ckptconv.edits.loadable.table import (
    BY_CLASS,
    FROZEN_SET,
    NUMPY_TYPE,
    NUMPY_TYPES,
    OTHER,
    Row,
    described,
)
from ckptconv.edits.selection import holder_of
from ckptconv.errors import RefusedError, at_path, count, some
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
    add_elements,
    imported_name,
    is_global,
    members_of,
    set_items,
    strings_of,
    walk,
)
from ckptconv.pickles.machine import CODES
from ckptconv.pickles.paths import Place, Referrers, is_item
from ckptconv.work import work

_KINDS: tuple[tuple[type, str], ...] = (
    (Dict, "dict"), (List, "list"), (Set, "set"), (str, "text"), (bool, "bool"), (int, "int"), (float, "float"),
    (bytes, "bytes"), (type(None), "None"), (Tuple, "tuple"),
)  # a table  # fmt: skip
_SHOWN = 10  # objects in an error
_MOST_DROPS = 20  # paths in a command; above that, the objects around them are dropped
_LONGEST_KEY = 64  # members of a tuple
_NOT_DESCRIBED = ("builtins.", "copyreg.", "operator.")  # functions that return any object


def make_loadable(checkpoint: Checkpoint, changes: Changes, *, objects: bool) -> None:
    """Convert all objects of `checkpoint` that contain only data to plain data.

    If there is nothing to convert, a note in `changes` reports this.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        changes: The report of changes. The converted objects are added as ``made_plain``.
        objects: Whether to convert objects of other classes, too: to dicts that name their classes.

    Raises:
        RefusedError: An object remains that torch's safe loader refuses, or two keys would become equal.
        LimitError: Converted arrays would take far more bytes than the file.
    """
    places = (checkpoint.before_renaming or checkpoint.index).every_place
    making = _Making(checkpoint, objects=objects)
    refused = making.run()
    if refused:
        known = {id(place.node): place for place in places if isinstance(place.node, Node)}
        referrers = Referrers(checkpoint.graph, places)
        why: dict[int, str] = {}
        for reason, node in refused:
            for id_ in _placed(node, referrers, making.old_of, known) or {id(places[0].node)}:
                why.setdefault(id_, making.failed.get(id_, reason))
        objects_help = None if objects else lambda: not _Making(checkpoint, objects=True).run()
        raise _refusal(checkpoint, places, why, objects_help=objects_help)
    drop_effect_order(checkpoint)
    changes.made_plain = making.report(places)
    if not changes.made_plain:
        changes.notes.append("it contains only plain data already, so " + option("loadable") + " changed nothing")


def _refresh(checkpoint: Checkpoint, nodes: list[Node]) -> None:
    """Update the lists that `checkpoint` derives from its graph. It consists of `nodes`, and of nodes inside rows."""
    graph = checkpoint.graph
    reached = set(map(id, nodes))
    # so that bytes and sets are written with opcodes that torch's safe loader knows
    graph.used |= {CODES["BINBYTES"][0]}
    graph.globals = [node for node in nodes if isinstance(node, Global)]
    graph.outer_calls = [node for node in nodes if isinstance(node, Call)]
    graph.references = [node for node in nodes if isinstance(node, PersistentId)]
    new = {id(reference.node): reference for reference in checkpoint.references if id(reference.node) in reached}
    checkpoint.references = [new[id(node)] for node in graph.references]
    checkpoint.changed()


class _Making:
    """The conversion of the objects of one graph to plain data.

    Args:
        checkpoint: The checkpoint, whose graph is changed.
        objects: Whether objects of classes outside the table become dicts that name their classes.

    Attributes:
        old_of: The objects that new nodes replace, by the ids of the new nodes.
        failed: The reasons why objects of the table could not be converted, by the ids of the objects.
        troubles: Pairs of a reason and an object that must be refused although torch's safe loader would accept it:
            a mapping or set with keys that became unhashable or equal.
    """

    def __init__(self, checkpoint: Checkpoint, *, objects: bool) -> None:
        self._checkpoint = checkpoint
        self._arrays = Arrays(checkpoint)
        self._tensors = checkpoint.tensor_nodes
        self._objects = objects
        self._made: dict[Node, Value] = {}
        self._rows: list[tuple[Node, Row, Value]] = []
        self._nodes: list[Node] = []
        self._parts = PlainOutline()
        self.old_of: dict[int, Value] = {}
        self.failed: dict[int, str] = {}
        self.troubles: list[tuple[str, Node]] = []

    def run(self) -> list[tuple[str, Value]]:
        """Convert all objects below the root, in place. Return the objects that are refused, each with the reason."""
        graph = self._checkpoint.graph
        graph.root = self.plain(graph.root)
        for node in walk([graph.root], parts=self._parts):  # this visits the children after the changes of their parent
            self._nodes.append(node)
            self._note_states(node)
            if isinstance(node, Tuple):
                node.items = [self.plain(item) for item in node.items]
            elif isinstance(node, Object) and not self._parts.is_plain(node):
                self._replace_in(node)
        if graph.discarded:
            self._nodes = list(walk([*graph.discarded, graph.root], parts=self._parts))
        _refresh(self._checkpoint, self._nodes)
        return [*self.troubles, *self._checkpoint.index.obstacles]

    def report(self, places: Sequence[Place]) -> list[MadePlain]:
        """Return the converted objects that have a place in the source and that their row lists in reports.

        If an object has several of `places`, a place whose parent is still in the graph is preferred.
        """
        parents = {id(place.parent.node) for place in places if place.parent}
        left = {old for node in self._nodes if (old := id(self.old_of.get(id(node), node))) in parents}
        first: dict[Value, Place] = {}
        for place in chain((each for each in places if each.parent and id(each.parent.node) in left), places):
            if isinstance(place.node, (Call, Global, FrozenSet)) and place.node in self._made:
                first.setdefault(place.node, place)
        return [
            MadePlain(at.path, row.title, _kind(value), _reads(row, at, value))
            for node, row, value in self._rows
            if row.is_listed(value) and (at := first.get(node)) is not None
        ]

    def plain(self, value: Value) -> Value:
        """Return the plain form of `value`.

        Return `value` itself if it is plain already, if no row of the table is for it, or if the conversion failed.
        Calls with the same node return the same object.
        """
        if self._parts.is_plain(value):
            return value
        chain: list[Node] = []
        while isinstance(value, (Call, Global, FrozenSet)) and value not in self._made:
            self._made[value] = value  # for an object that contains itself
            row, new = self._by_row(value)
            if new is value:
                break
            if row is not None:
                self._rows.append((value, row, new))
            chain.append(value)
            value = new
        value = self._made.get(value, value) if isinstance(value, Node) else value
        for old in chain:
            self._made[old] = value
            if isinstance(value, Node):
                self.old_of.setdefault(id(value), old)
        return value

    def _by_row(self, node: Call | Global | FrozenSet) -> tuple[Row | None, Value]:
        """Return the row of the table for `node` and the converted value.

        Return None and `node` if there is no row for it, or if the conversion failed. The reason of a failure is added
        to ``failed``.
        """
        if isinstance(node, FrozenSet):
            return FROZEN_SET, add_elements(Set(), node.items)
        if isinstance(node, Global):
            name = imported_name(node, 2)
            if name in NUMPY_TYPES:
                return NUMPY_TYPE, name.rpartition(".")[2].removesuffix("_")
            is_named = self._objects and not is_torchs(node) and not is_dangerous(node)
            return (OTHER, set_items(Dict(), ["__global__", name])) if is_named else (None, node)
        made = pickled(node)
        row = BY_CLASS.get(made.cls) if made else None
        try:
            if made and row:
                return row, row.make(made) if row.make else self._arrays.array(made)
            if made and self._objects and self._can_be_described(node, made.cls):
                return OTHER, described(made)
        except NotPlain as why:
            self.failed[id(node)] = f"{row.title if row else made and made.cls} ({why})"
        return None, node

    def _can_be_described(self, call: Call, name: str) -> bool:
        """Return whether `call` may become a dict that describes the object. `name` is the class of the object.

        The callable must be a global. The call must not make a tensor, torch's safe loader must not accept the
        callable, and `name` must be neither dangerous nor a function that can return any object.
        """
        called = call.callable
        return (
            isinstance(called, Global)
            and (name != imported_name(called, 2) or not (is_torchs(called) or name.startswith(_NOT_DESCRIBED)))
            and id(call) not in self._tensors
            and not is_dangerous(Global(*name.rpartition(".")[::2]))
        )

    def _replace_in(self, node: Object) -> None:
        """Replace the arguments of `node` and the values of its effects by their plain forms.

        Keys and members that cannot be replaced are added to ``troubles``.
        """
        if isinstance(node, Call):
            members = members_of(node) if is_global(node.callable, *SET_CLASSES) else None
            if members:
                self._check_keys(node, members, [self.plain(member) for member in members], "members")
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

    def _check_keys(self, holder: Node, old: list[Value], new: list[Value], what: str) -> None:
        """Add to ``troubles`` if a plain form is not hashable or if two plain forms are equal.

        Args:
            holder: The mapping or set.
            old: Its keys or members.
            new: Their plain forms, in the same order.
            what: The word for them in the reason: ``keys`` or ``members``.
        """
        if all(a is b and not isinstance(b, Tuple) for a, b in zip(old, new, strict=True)):
            return
        for before, after in zip(old, new, strict=True):
            if before is not after and isinstance(after, (Dict, List, Set)):
                self.troubles.append((f"a mapping or set would get a {_kind(after)} as one of its {what}", holder))
        if len({_hashable(key, self.plain) for key in new}) < len({_hashable(key, lambda part: part) for key in old}):
            self.troubles.append((f"two {what} of a mapping or set would become equal", holder))

    def _note_states(self, node: Node) -> None:
        """Record the arrays in `node`, if it is the state of a numpy random generator.

        These arrays become lists, because numpy does not accept tensors there. A state is a dict with a
        ``bit_generator`` or, in older files, a tuple of 3 or 5 items that starts with ``MT19937``.
        """
        if isinstance(node, Tuple) and len(node.items) in (3, 5) and text_of(node.items[0]) == "MT19937":
            self._arrays.in_states |= {id(node.items[1])} if is_array(node.items[1]) else set()
        elif isinstance(node, Dict) and node.effects:
            items = strings_of(node)
            if "bit_generator" in items:
                state = items.get("state")
                held = [*items.values(), *(strings_of(state).values() if isinstance(state, Dict) else ())]
                self._arrays.in_states |= {id(value) for value in held if is_array(value)}


def _hashable(key: Value, plain: Callable[[Value], Value], depth: int = 4) -> object:
    """Return an object that is equal for equal keys.

    This is `plain` of the key, or a tuple of such objects for a tuple of at most 64 items that is at most `depth`
    levels deep.
    """
    if isinstance(key, Tuple) and depth and len(key.items) <= _LONGEST_KEY:
        work().charge(len(key.items))  # keys can share items
        return tuple(_hashable(item, plain, depth - 1) for item in key.items)
    return plain(key)


def _kind(value: Value) -> str:
    """Return a word for the kind of a plain `value`, such as ``dict`` or ``tensor``. For other nodes: ``object``."""
    if isinstance(value, Call):
        return "complex" if is_global(value.callable, "builtins.complex") else "tensor"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "object")


def _reads(row: Row, place: Place, value: Value) -> str:
    """Return the code that reads the plain `value` at `place`: the template of `row`, with the names filled in."""
    name = place.key if place.key and place.key.isidentifier() else "x"
    keys: Iterable[Value] = strings_of(value) if isinstance(value, Dict) else ()
    key = next(iter(keys), "name")
    reads = row.reads_list if row.reads_list and isinstance(value, List) else row.reads
    return reads.replace("{x}", name).replace("{key!r}", repr(key))


# Refusing


def _placed(node: Value, referrers: Referrers, old_of: Mapping[int, Value], places: Mapping[int, Place]) -> set[int]:
    """Return the ids of the nearest nodes of the source that have a place: `node`, or the nodes that contain it.

    A global that is called has the place of its calls. The set is empty if no place is found. Raises LimitError if the
    budget of work is used up.

    Args:
        node: A node of the graph now.
        referrers: The referrers in the graph now.
        old_of: The objects that new nodes replace, by the ids of the new nodes.
        places: The places in the source, by the ids of their nodes.
    """
    found: set[int] = set()
    seen: set[int] = set()
    todo: list[Value] = [node]
    if isinstance(node, Global):  # a global has no place of its own; its calls have
        users = referrers.users(node)
        todo = [user if isinstance(user, Call) and user.callable is node else node for user in users] or todo
    while todo:
        work().charge(1)
        node = todo.pop()
        old = old_of.get(id(node), node)
        if id(old) in places:
            found.add(id(old))
        elif id(node) not in seen:
            seen.add(id(node))
            todo += referrers.users(node)
    return found


def _refusal(
    checkpoint: Checkpoint,
    places: Sequence[Place],
    why: Mapping[int, str],
    *,
    objects_help: Callable[[], bool] | None,
) -> RefusedError:
    """Return the error for objects that cannot be converted to plain data. Its hints name options that help.

    Args:
        checkpoint: The checkpoint.
        places: The places in the source, the root first.
        why: The reason why torch's safe loader refuses each object, by the id of the node in the source.
        objects_help: Returns whether ``loadable_objects`` would convert all of them. None if this option is set.
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
    asked = Option("loadable" if objects_help else "loadable_objects")
    needed = [needed_import(why[id(place.node)]) for place in stands]
    imports = ", ".join(sorted({module for module in needed if module}))
    known = dict.fromkeys(why[id(place.node)] for place, module in zip(stands, needed, strict=True) if module)
    hints = [
        f"torch.load(weights_only=True) takes {some([*known], _SHOWN)} after `import {imports}`" if imports else None,
        _without(checkpoint, asked, tuple(dict.fromkeys(place.path for place in drops))) if None in needed else None,
        option("loadable_objects") + " converts unknown objects to dicts"
        if None in needed and objects_help and objects_help()
        else None,
    ]
    return RefusedError(
        f"{count(len(stands), 'object')} cannot be converted to plain data",
        got=some([why[id(place.node)] + at_path(place.path) for place in stands], _SHOWN),
        hint=joined(*hints) if any(hints) else None,
    )


def _without(checkpoint: Checkpoint, asked: Option, paths: tuple[str, ...]) -> str | None:
    """Return the command that leaves out the objects at `paths`, or that extracts the state dict if there are no paths.

    The command that leaves them out has the option `asked`, which the user gave. Return None if there are no paths and
    no single main state dict.
    """
    source = checkpoint.source
    if not paths and len(checkpoint.detected.main()) != 1:
        return None
    left_out = (asked, Option("drop", paths)) if paths else (Option("state_dict"),)
    if isinstance(source, BytesSource):
        return joined(*(Message(each) for each in left_out), separator=" ")
    return "to leave them out: " + command("convert", source.path, Placeholder("OUT"), *left_out)


def _first_met(root: Place, inside: Mapping[int, list[Place]], stops: Collection[int]) -> list[Place]:
    """Return the places of nodes in `stops` that can be reached from `root` without passing another node in `stops`.

    Args:
        root: The place where the search starts.
        inside: The places directly in each node, by the id of the node.
        stops: The ids of nodes.
    """
    found: list[Place] = []
    seen: set[int] = set()
    budget = work()
    todo = [root]
    while todo:
        budget.charge(1)  # there are as many searches as levels
        place = todo.pop()
        if id(place.node) in stops:
            found.append(place)
        elif id(place.node) not in seen:
            seen.add(id(place.node))
            todo += inside.get(id(place.node), [])[::-1]
    return found


def _drops(root: Place, inside: Mapping[int, list[Place]], stops: set[int]) -> list[Place]:
    """Return places whose removal removes all nodes in `stops`. The list is empty if only the removal of the root does.

    If there are more than 20 places, the deepest are replaced by the places that contain them. The arguments are
    those of :func:`_first_met`.
    """
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
    """Return the places whose removal removes all nodes in `stops`.

    The list is empty if the root would have to be removed.

    An argument of a call, or an item of a tuple, is removed with the object that contains it, at all its places. The
    arguments are those of :func:`_first_met`; the ids of these objects are added to `stops`.
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
    """Return whether the node at `place` can be removed from its parent with ``--drop``. Its key may have changed."""
    outer = place.parent and place.parent.node
    if place.segment.startswith("/."):
        return holder_of(place) is not None
    if isinstance(outer, Call):
        return is_item(place) and next(outer.elements(), None) is None
    return isinstance(outer, (List, Set)) or (isinstance(outer, Dict) and is_item(place))


def _is_something_left(checkpoint: Checkpoint, places: Iterable[Place], gone: Iterable[Place]) -> bool:
    """Return whether a tensor at `places` remains after the removal of the places `gone`.

    Return True if there are no tensors.
    """
    lost = {id(place) for place in gone}
    tensors = [place for place in places if id(place.node) in checkpoint.tensor_nodes]
    return not tensors or any(lost.isdisjoint(id(above) for above in place.upwards()) for place in tensors)
