"""Select a part of a checkpoint: an object, a state dict, or some tensors.

What is not taken is named, with its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckptconv.checkpoint.effect_order import drop_effect_order
from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PARTS, PickledModule, detached
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.tensor_info import LeftBehind, left_behind_at, matches
from ckptconv.edits.no_match import no_match
from ckptconv.edits.options import Edits
from ckptconv.errors import NoMatchError, RefusedError, count, printable
from ckptconv.guesses import close_matches
from ckptconv.hints import Option, command, joined, option
from ckptconv.pickles.graph import Call, Dict, Global, List, Node, Object, Set, Tuple, Value, set_items, strings_of
from ckptconv.pickles.paths import Place, item_segments, key_segment

_LISTED = 20  # candidates in an error
_KEYED = "what has a key"  # of which globs speak
_LOOKED_AT = 2000  # paths, where a near one is looked for
_ADDING = ("APPEND", "APPENDS", "ADDITEMS")


def select(checkpoint: Checkpoint, edits: Edits, *, is_emitted: bool = True) -> list[LeftBehind]:
    """Reduce a checkpoint to the part that is asked for. Paths stay those of the source.

    Args:
        checkpoint: It is changed in place.
        edits: Those of them that name a part: ``select``, ``state_dict``, ``drop``, ``include``, ``exclude``.
        is_emitted: Whether a pickle will be made of it. Only then its order of effects has to be looked at, which takes
            longer than everything else here.

    Returns:
        What is left behind.

    Raises:
        NoMatchError: A path or glob matches nothing.
        RefusedError: Several state dicts could be meant.
    """
    before = checkpoint.index
    left: list[LeftBehind] = []
    paths: dict[str, str] = {}
    if edits.select is not None:
        place = _place_at(checkpoint, edits.select)
        if place is None:
            no_match("select PATH", _no_place(checkpoint, edits.select))  # which raises it
        else:
            left += _take(checkpoint, place)
    if edits.state_dict and not (edits.select is not None and _named_tensors(checkpoint)):
        found = _state_dict(checkpoint)
        if isinstance(found, PickledModule):
            paths = {name: place.path for name, place in found.places.items()}
            left += _take_module(checkpoint, found)
        else:
            left += _take(checkpoint, next(place for place in checkpoint.places if place.node is found.node))
    if edits.drop:
        unwanted = [place for path in edits.drop for place in _places_at(checkpoint, path, before)]
        left += _drop(checkpoint, unwanted, "items, attributes and elements of lists")
    if edits.include or edits.exclude:
        left += _filter(checkpoint, edits.include, edits.exclude, paths, before)
    if is_emitted and checkpoint.index is not before:
        drop_effect_order(checkpoint)
    return left


# One part


def _place_at(checkpoint: Checkpoint, path: str) -> Place | None:
    for written in (str, printable):  # as it is, or as ``inspect`` shows it
        for place in checkpoint.places:
            if written(place.path) == path:
                return place
    return None


def _no_place(checkpoint: Checkpoint, path: str) -> NoMatchError:
    known, meant = _candidates(checkpoint), _called(checkpoint, path)
    if not meant and [each.path for each in checkpoint.detected.state_dicts] == ["."]:
        known, meant = "", joined("the checkpoint is a state dict itself", _look_for(checkpoint, Option("tree")))
    return NoMatchError(
        f"nothing stands at {path or repr(path)}",
        where=checkpoint.source.path,
        expected=f"a path such as {known}" if known and not meant else None,
        hint=meant or _look_for(checkpoint, Option("tree")),
    )


def _called(checkpoint: Checkpoint, name: str) -> str | None:
    """What to type for `name` if it is one in a whole module, or a path without the
    attributes in which modules keep their parts.
    """
    modules = checkpoint.detected.modules
    words = _words(name)
    meant = {words, *(_words(module.path) + words for module in modules)} if words else set()
    found = next((place for place in checkpoint.places if _words(place.path) in meant), None)
    if found is None:
        return None
    is_module = any(id(found.node) in module.modules for module in modules)
    weights = " (and " + option("state_dict") + " for its weights alone)" if is_module else ""
    return "what is called so has another path: " + option("select", found.path) + weights


def _words(path: str) -> tuple[str, ...]:
    """The words of a path or name, without what says where a module keeps its parts."""
    return tuple(word for word in re.split(r"[./\[\]\\]+", path) if word and word not in PARTS)


def _look_for(checkpoint: Checkpoint, *options: Option) -> str | None:
    """The command that shows what there is, in a file or folder."""
    source = checkpoint.source
    return "see what there is: " + command("inspect", source.path, *options) if source.is_stored else None


def _state_dict(checkpoint: Checkpoint) -> StateDict | PickledModule:
    """The state dict that is meant when nobody says which, or the module that would give it."""
    found = checkpoint.detected.main()
    if len(found) == 1:
        return found[0]
    if not found:
        root = checkpoint.root.path
        tensors = _named_tensors(checkpoint)
        what = _nameless(checkpoint)
        raise RefusedError(
            f"there is no state dict {'in it' if root == '.' else 'at ' + root}: "
            + (what or "no dict contains only names and tensors"),
            where=checkpoint.source.path,
            hint=(
                option("select", root) + f" takes {count(tensors, 'tensor')}, by the names there"
                if tensors
                else _look_for(checkpoint) or "pass a state dict, such as model.state_dict()"
            ),
        )
    raise RefusedError(
        f"it is not clear which state dict is meant: {_candidates(checkpoint)}",
        where=checkpoint.source.path,
        hint="for the first: " + option("select", found[0].path),
    )


def _nameless(checkpoint: Checkpoint) -> str | None:
    """Return what holds the tensors of a checkpoint that has no state dict, if that is known."""
    tensors, parts = checkpoint.tensor_nodes, checkpoint.detected.optimizer_nodes
    for place in checkpoint.places:
        node, at = place.node, "it" if place.path == "." else place.path
        if id(node) in parts:
            return f"{at} is the state of an optimizer, and contains no weights"
        items = [*node.elements()] if isinstance(node, List) else []
        if items and all(isinstance(item, Node) and id(item) in tensors for item in items):
            return (
                f"{at} is a list of {count(len(items), 'tensor')} without names, like many averages of weights (EMA);"
                " only the model knows the names, in the order of model.parameters()"
            )
    return None


def _named_tensors(checkpoint: Checkpoint) -> int:
    """How many tensors are items of the root with a string key."""
    root = checkpoint.graph.root
    pairs = root.pairs() if isinstance(root, (Dict, Call)) else ()
    return sum(
        isinstance(effect.values[i], str) and id(effect.values[i + 1]) in checkpoint.tensor_nodes for effect, i in pairs
    )


def _candidates(checkpoint: Checkpoint) -> str:
    """The state dicts and whole modules that there are, with their sizes."""
    detected = checkpoint.detected
    found: list[tuple[str, list[Node]]] = [(each.path, [each.node]) for each in detected.state_dicts]
    found += [(f"{each.path}, a {each.cls}", list(each.tensors.values())) for each in detected.modules if each.tensors]
    sizes = [sum(s.nbytes for s in checkpoint.index.storages_below(*nodes)) for _, nodes in found[:_LISTED]]
    listed = [f"{path} ({count(nbytes, 'byte')})" for (path, _), nbytes in zip(found, sizes, strict=False)]
    return ", ".join(listed) + (" ..." if len(found) > _LISTED else "")


def _restrict(
    checkpoint: Checkpoint, root: Place, left: Mapping[str, Iterable[Place]], before: Index
) -> list[LeftBehind]:
    """Make what stands at `root` the whole checkpoint, of which `before` is the index so far.

    What is `left` behind is given by why it is.
    """
    checkpoint.restrict(root)
    kept = checkpoint.storages.values()
    return [each for why, places in left.items() for each in left_behind_at(places, before.storage_of, kept, why)]


def _take(checkpoint: Checkpoint, place: Place) -> list[LeftBehind]:
    """Make what stands at `place` the whole checkpoint."""
    if place.node is checkpoint.graph.root:
        return []
    index = checkpoint.index
    others = [each for each in index.places_in(_above(place) - {id(place.node)}) if each.node is not place.node]
    checkpoint.graph.discarded = []
    return _restrict(checkpoint, place, {f"not in {place.path}": others}, index)


def _above(place: Place) -> set[int]:
    """The ids of what `place` stands in."""
    return {id(above.node) for above in place.upwards() if above is not place}


def _take_module(checkpoint: Checkpoint, module: PickledModule) -> list[LeftBehind]:
    """Make the state dict that `module` would give the whole checkpoint.

    Its tensors' paths are their names, below the module's path.
    """
    if module.trouble:
        raise RefusedError(
            f"{module.path} gives no state dict: {module.trouble}", where=checkpoint.source.path, got=module.cls
        )
    taken = {id(node) for node in module.tensors.values()}
    unknown = {id(value) for value in module.unknown.values() if isinstance(value, Node)}
    whys: dict[str, list[Place]] = {}
    of_torch: list[Place] = []
    index = checkpoint.index
    for place in (
        *index.places_in(module.opened | _above(module.place)),
        *index.attribute_places(module.tensors.values()),
    ):
        if id(place.node) in taken and place.parent is not None and id(place.parent.node) in module.holders:
            continue
        if id(place.node) in unknown:
            whys.setdefault("it has a name in the state dict, and is no tensor that is known", []).append(place)
        elif module.is_bookkeeping(place):
            of_torch.append(place)
        else:
            whys.setdefault(f"not in the state dict of {module.path}", []).append(place)
    state_dict = Call("REDUCE", Global("collections", "OrderedDict"), Tuple([]))
    items: list[Value] = []
    named: set[int] = set()
    for name, node in module.tensors.items():
        tensor = detached(node)
        if id(node) in named and isinstance(tensor, Call):  # each name has a tensor of its own, as detach() makes them
            tensor = Call(tensor.kind, tensor.callable, tensor.args)
        named.add(id(node))
        items += (name, tensor)
    set_items(state_dict, items)
    place = module.place
    checkpoint.graph.discarded = []
    left = _restrict(checkpoint, Place(place.parent, place.segment, state_dict, place.depth, place.key), whys, index)
    if of_torch:  # a line for all: there are more of them than of everything else
        numbers = f"{count(len(of_torch), 'attribute')} of {count(len(module.modules), 'module')}"
        why = f"what every module has for torch's own use (hooks, training; {numbers})"
        left.append(LeftBehind(module.path, 0, why))
    return left


# Some tensors


def _filter(
    checkpoint: Checkpoint,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    paths: Mapping[str, str],
    before: Index,
) -> list[LeftBehind]:
    """Take the tensors that are not wanted out of their mappings.

    A glob without a slash speaks of tensors in state dicts alone.

    `paths` say where in the source the names of a module's state dict stood. `before` is the index of the whole source:
    what a glob with a slash excludes may be left behind already.
    """
    detected = checkpoint.detected
    state_dicts = {id(found.node) for found in detected.state_dicts}
    places = [place for place in checkpoint.places if id(place.node) in checkpoint.tensor_nodes]
    named = [place for place in places if place.parent is not None and id(place.parent.node) in state_dicts]
    inside = {id(place) for place in named}

    def is_meant(place: Place, glob: str) -> bool:
        source = paths.get(place.key or "")
        return matches(glob, place.path, place.key) or (source is not None and matches(glob, source, place.key))

    def meant(field: str, globs: tuple[str, ...]) -> set[int]:
        """The ids of the places that one of `globs`, those of `field`, means."""
        found: set[int] = set()
        for glob in globs:
            searched = places if "/" in glob else named
            hits = {id(place) for place in searched if is_meant(place, glob)}
            is_gone = field == "exclude" and "/" in glob and before is not checkpoint.index
            if not hits and is_gone and any(matches(glob, path, None) for path in before.tensors):
                continue
            if not hits:
                what = "tensor" if "/" in glob else "name in a state dict"
                error = NoMatchError(
                    f"no {what} matches {glob!r}",
                    where=checkpoint.source.path,
                    expected="something like " + (searched[0].path if searched else "a path, with a slash"),
                    hint=None
                    if "/" in glob
                    else _near_glob(checkpoint, field, glob, named) or detected.hint_of_modules(),
                    unmatched=(field, glob),
                )
                no_match(f"{field} GLOB", error, is_one_of_several=len(globs) > 1)  # which raises it
            found |= hits
        return found

    unwanted = meant("exclude", exclude)
    if include:
        of_others = any("/" in glob for glob in include)
        wanted = meant("include", include)
        unwanted |= {id(p) for p in places if id(p) not in wanted and (of_others or id(p) in inside)}
    return _drop(checkpoint, [place for place in places if id(place) in unwanted], _KEYED)


def _near_glob(checkpoint: Checkpoint, field: str, glob: str, named: Sequence[Place]) -> str | None:
    """What to type for `glob`, which no name matches, but which is a part of the checkpoint, or of names."""
    if "/" in glob:
        return None
    part = glob.removesuffix(".*")
    if any(place.path == part for place in checkpoint.index.every_place):
        return "for the part of that name: " + option("select" if field == "include" else "drop", part)
    near = (each for each in (f"{part}.*", f"*.{part}.*") if any(matches(each, at.path, at.key) for at in named))
    meant = next(near, None) if part == glob else None
    return "try: " + option(field, meant) if meant else None


def _places_at(checkpoint: Checkpoint, path: str, before: Index) -> list[Place]:
    """Return the places that `path` means, which is written out, or a glob with a slash.

    A place inside another one of them is left out. The list is empty if they are left behind already: only `before`,
    the index of the whole source, has them.
    """
    found = _meant_places(checkpoint.index, path)
    if not found and before is not checkpoint.index and _meant_places(before, path):
        return []
    if not found:
        every = [place.path for place in before.every_place[:_LOOKED_AT]]
        parts = [written for written in every if "/" not in written]  # which are what people mean by one word
        near = close_matches(path, parts, n=1) or close_matches(path, every, n=1)
        error = NoMatchError(
            f"nothing stands at {path}",
            where=checkpoint.source.path,
            hint=f"is {near[0]} meant?" if near else _look_for(checkpoint, Option("tree")),
            unmatched=("drop", path),
        )
        no_match("drop PATH", error)  # which raises it
    inside = {id(place) for place in found}
    return [place for place in found if inside.isdisjoint(id(above) for above in [*place.upwards()][1:])]


def _meant_places(index: Index, path: str) -> list[Place]:
    """Return the first place in `index` that is called `path`, or else all places that the glob `path` matches."""
    known = [(place.path, place) for place in index.every_place]
    found = [place for written, place in known if path in (written, printable(written))][:1]
    if not found and "/" in path:
        found = [place for written, place in known if matches(path, written, None)]
    return found


def holder_of(place: Place) -> tuple[Object, str] | None:
    """What holds `place` so that it can be taken out, and its segment there. Arguments and members of tuples stay."""
    outer = place.parent.node if place.parent else None
    if place.segment.startswith("/.") and isinstance(outer, Object):  # an attribute: an item of a state
        states = (state for state in outer.states() if isinstance(state, Dict) and place.key in strings_of(state))
        return next(((state, key_segment(place.key, 0)) for state in states), None)
    return (outer, place.segment) if isinstance(outer, Object) else None


def _drop(checkpoint: Checkpoint, unwanted: list[Place], what: str) -> list[LeftBehind]:
    """Take what is `unwanted` out of what holds it, where that is `what` can be left out."""
    by_mapping: dict[int, tuple[Object, set[str]]] = {}
    segments_of: dict[int, set[str]] = {}
    for place in unwanted:
        holder, segment = holder_of(place) or (None, "")
        if holder is not None and id(holder) not in segments_of:  # once: it can have as many items as there are places
            segments_of[id(holder)] = set(_segments(holder))
        has_key = segment == place.segment and isinstance(holder, (Dict, Call))
        if holder is None or segment not in segments_of[id(holder)] or (what is _KEYED and not has_key):
            raise RefusedError(
                f"only {what} can be left out",
                where=checkpoint.source.path,
                got=place.path,
                hint="what it is in: " + option("drop", (place.parent.path,)) if place.parent else None,
            )
        by_mapping.setdefault(id(holder), (holder, set()))[1].add(segment)
    index = checkpoint.index
    had_tensors = bool(checkpoint.tensors)
    again = [place for place in index.places if id(place.node) in by_mapping]
    for mapping, segments in by_mapping.values():
        _remove(mapping, segments)
    left = _restrict(checkpoint, checkpoint.root, {"left out as asked": unwanted}, index)
    named = {place.path for place in unwanted}
    for place in again:  # a mapping that stands in two places loses its items in both
        paths = [place.path.removesuffix(".") + segment for segment in sorted(by_mapping[id(place.node)][1])]
        left += [LeftBehind(path, 0, "left out with it") for path in paths if path.removeprefix("/") not in named]
    if had_tensors and not checkpoint.tensors:
        raise NoMatchError("no tensor would be left", where=checkpoint.source.path)
    return left


def _segments(holder: Object) -> list[str]:
    """The segments of what can be taken out of `holder`: items, or the elements of a list or set."""
    if isinstance(holder, (List, Set)):
        return [f"[{i}]" if isinstance(holder, List) else f"/{{{i}}}" for i in range(len([*holder.elements()]))]
    return item_segments(holder)


def _remove(holder: Object, segments: set[str]) -> None:
    """Take out of `holder` what has these `segments`."""
    gone = {n for n, segment in enumerate(_segments(holder)) if segment in segments}
    opcodes, width = (_ADDING, 1) if isinstance(holder, (List, Set)) else (("SETITEM", "SETITEMS"), 2)
    n = 0
    effects = []
    for effect in holder.effects:
        if effect.opcode in opcodes:
            values: list[Value] = []
            for i in range(0, len(effect.values), width):
                if n not in gone:
                    values += effect.values[i : i + width]
                n += 1
            if not values:
                continue
            effect.values = values
        effects.append(effect)
    holder.effects = effects
