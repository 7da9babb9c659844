"""Say of all that cannot become plain where it stands, and which ``--drop``s take it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ckptconv.byteranges.sources import BytesSource
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import needed_import
from ckptconv.edits.selection import holder_of
from ckptconv.errors import RefusedError, count, some
from ckptconv.hints import Message, Option, Placeholder, command, joined, option
from ckptconv.pickles.graph import Call, Dict, Global, List, Set, Value
from ckptconv.pickles.paths import Place, Referrers, is_item

_SHOWN = 10  # objects in an error
_MOST_DROPS = 20  # in a command; above that, what they stand in goes


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
