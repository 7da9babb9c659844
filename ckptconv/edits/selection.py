"""Reduce a checkpoint to an object, a state dict or some tensors, and list the data that is not in the output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PARTS, PickledModule, detached
from ckptconv.checkpoint.rebuild_functions import ints_of
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.tensor_info import LeftBehind, left_behind_at, matches
from ckptconv.edits.error_paths import names_checkpoint
from ckptconv.edits.options import Edits
from ckptconv.errors import NoMatchError, RefusedError, at_path, count, printable
from ckptconv.guesses import close_matches
from ckptconv.hints import Option, command, command_in, joined, option
from ckptconv.pickles.graph import Call, Dict, Global, List, Node, Object, Set, Tuple, Value, set_items, strings_of
from ckptconv.pickles.paths import Place, item_segments, key_segment
from ckptconv.work import CHARACTERS, work

_LISTED = 20  # candidates in an error
_LOOKED_AT = 2000  # paths among which a similar one is searched
_ADDING = ("APPEND", "APPENDS", "ADDITEMS")
_STEPS = 10  # of work for a path that is left out


@names_checkpoint
def select(checkpoint: Checkpoint, edits: Edits, *, is_emitted: bool = True) -> list[LeftBehind]:
    """Reduce `checkpoint` to the data that the options select. The paths of objects do not change.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        edits: The edits. Only ``select``, ``state_dict``, ``drop``, ``include`` and ``exclude`` are used, in this
            order.
        is_emitted: Whether the graph will be written as a pickle. If not, the slow check of the order of effects is
            skipped.

    Returns:
        The data that is not in the output.

    Raises:
        NoMatchError: A path or glob matches nothing, or no tensor remains.
        RefusedError: There is no state dict or more than one, or an object cannot be removed.
    """
    before = checkpoint.index
    left: list[LeftBehind] = []
    paths: dict[str, str] = {}
    if edits.select is not None:
        left += _take(checkpoint, _place_at(checkpoint, edits.select))
    if edits.state_dict and not (edits.select is not None and named_tensors(checkpoint)):
        found = _state_dict(checkpoint)
        if isinstance(found, PickledModule):
            paths = {name: place.path for name, place in found.places.items()}
            left += _take_module(checkpoint, found)
        else:
            _refuse_partitioned(checkpoint, found)
            left += _take(checkpoint, next(place for place in checkpoint.places if place.node is found.node))
    if edits.drop:
        unwanted = [place for path in edits.drop for place in _places_at(checkpoint, path, before)]
        left += leave_out(checkpoint, unwanted)
    if edits.include or edits.exclude:
        left += _filter(checkpoint, edits.include, edits.exclude, paths, before)
    if is_emitted and checkpoint.index is not before:
        drop_effect_order(checkpoint)
    return left


# One part


def _place_at(checkpoint: Checkpoint, path: str) -> Place:
    """Return the place with the path `path`, in its exact form or as ``inspect`` prints it.

    Raises RefusedError if the reader skipped the data at the path, and NoMatchError if nothing has this path.
    """
    for shown in (str, printable):
        for place in checkpoint.places:
            if shown(place.path) == path:
                return place
    for left in checkpoint.unused:
        if left.path == path or left.path.startswith(f"{path}/"):
            what = f"{path} cannot be selected: {left.why}"
            raise RefusedError(what, got=left.path if left.path != path else None)
    raise _no_place(checkpoint, path)


def _no_place(checkpoint: Checkpoint, path: str) -> NoMatchError:
    """Return the error for a `path` without a place.

    The hint is a similar path, or the command that lists the paths.
    """
    known, meant = _candidates(checkpoint), _called(checkpoint, path)
    if not meant and [each.path for each in checkpoint.detected.state_dicts] == ["."]:
        known, meant = "", joined("the checkpoint is itself a state dict", _look_for(checkpoint, Option("tree")))
    return NoMatchError(
        f"there is nothing at {path or repr(path)}",
        expected=f"a path such as {known}" if known and not meant else None,
        hint=meant or _look_for(checkpoint, Option("tree")),
    )


def _called(checkpoint: Checkpoint, name: str) -> str | None:
    """Return a hint with the path of the object to which `name` refers in a pickled module, or None.

    `name` can be a name as in a state dict, such as ``conv.weight``, also without the path of the module.
    """
    modules = checkpoint.detected.modules
    words = _words(name)
    meant = {words, *(_words(module.path) + words for module in modules)} if words else set()
    found = next((place for place in checkpoint.places if _words(place.path) in meant), None)
    if found is None:
        return None
    is_module = any(id(found.node) in module.modules for module in modules)
    weights = " (and " + option("state_dict") + " for only its weights)" if is_module else ""
    return "its path is: " + option("select", found.path) + weights


def _words(path: str) -> tuple[str, ...]:
    """Return the segments of a path or name, without attributes such as ``_modules`` that contain parts of a module."""
    return tuple(word for word in re.split(r"[./\[\]\\]+", path) if word and word not in PARTS)


def _look_for(checkpoint: Checkpoint, *options: Option) -> str | None:
    """Return a hint with the ``inspect`` command for the checkpoint and `options`, or None if it is not a file or
    folder.
    """
    source = checkpoint.source
    return "to see the contents: " + command("inspect", source.path, *options) if source.is_stored else None


def _state_dict(checkpoint: Checkpoint) -> StateDict | PickledModule:
    """Return the main state dict, or the pickled module that contains it.

    Raise RefusedError if there are none or several.
    """
    found = checkpoint.detected.main()
    if len(found) == 1:
        return found[0]
    if not found:
        root = checkpoint.root.path
        tensors = named_tensors(checkpoint)
        what = _nameless(checkpoint)
        raise RefusedError(
            f"there is no state dict {'in it' if root == '.' else 'at ' + root}: "
            + (what or "no dict contains only names and tensors"),
            hint=(
                option("select", root) + f" extracts its {count(tensors, 'tensor')} by name"
                if tensors
                else _look_for(checkpoint) or "pass a state dict, such as model.state_dict()"
            ),
        )
    raise RefusedError(
        f"there are several state dicts: {_candidates(checkpoint)}",
        hint="for the first: " + option("select", found[0].path),
    )


def _refuse_partitioned(checkpoint: Checkpoint, found: StateDict) -> None:
    """Raise RefusedError if a tensor of `found` is empty because stage 3 of DeepSpeed ZeRO divided it among the ranks.

    The shape of such a tensor differs from the one in the root's ``param_shapes``. Without ``param_shapes``, nothing is
    checked.
    """
    root = checkpoint.root.node
    groups = strings_of(root).get("param_shapes") if isinstance(root, Dict) else None
    shapes: dict[str, Value] = {}
    for group in dict.fromkeys(groups.elements() if isinstance(groups, List) else ()):  # a list can repeat one
        shapes.update(strings_of(group) if isinstance(group, (Dict, Call)) else {})
    for name, value in found.items() if shapes else ():
        info = checkpoint.tensor_nodes.get(id(value))
        if info and 0 in info.shape and name in shapes and ints_of(shapes[name]) != info.shape:
            raise RefusedError(
                f"{name!r} in {found.path} has no elements, which are in the files of all ranks of DeepSpeed ZeRO",
                expected=f"shape {ints_of(shapes[name])}",
                got=info.shape,
                hint=next(filter(command_in, checkpoint.notes), None),  # of the reader, which knows the folder
            )


def _nameless(checkpoint: Checkpoint) -> str | None:
    """Return why a checkpoint with tensors has no state dict, or None if the reason is not known.

    Known reasons are the state of an optimizer and a list of tensors without names.
    """
    tensors, parts = checkpoint.tensor_nodes, checkpoint.detected.optimizer_nodes
    seen: set[int] = set()
    for place in checkpoint.places:
        node, at = place.node, "it" if place.path == "." else place.path
        if id(node) in seen:
            continue
        seen.add(id(node))
        if id(node) in parts:
            return f"{at} is the state of an optimizer, and contains no weights"
        items = [*node.elements()] if isinstance(node, List) else []
        if items and all(isinstance(item, Node) and id(item) in tensors for item in items):
            return (
                f"{at} is a list of {count(len(items), 'tensor')} without names. In an average of weights (EMA), they"
                " have the order of model.parameters()"
            )
    return None


def named_tensors(checkpoint: Checkpoint) -> int:
    """Return the number of tensors that are values of string keys of the root. Other tensors are not counted."""
    root = checkpoint.graph.root
    entries = root.entries() if isinstance(root, (Dict, Call)) else ()
    return sum(isinstance(key, str) and id(value) in checkpoint.tensor_nodes for key, value in entries)


def _candidates(checkpoint: Checkpoint) -> str:
    """Return the paths of all state dicts and of all pickled modules with tensors, and their sizes in bytes.

    Long lists are cut and end in ``...``. The text is empty if there are none.
    """
    detected = checkpoint.detected
    found: list[tuple[str, list[Node]]] = [(each.path, [each.node]) for each in detected.state_dicts]
    found += [(f"{each.path}, a {each.cls}", list(each.tensors.values())) for each in detected.modules if each.tensors]
    sizes = [sum(s.nbytes for s in checkpoint.index.storages_below(*nodes)) for _, nodes in found[:_LISTED]]
    listed = [f"{path} ({count(nbytes, 'byte')})" for (path, _), nbytes in zip(found, sizes, strict=False)]
    return ", ".join(listed) + (" ..." if len(found) > _LISTED else "")


def _restrict(
    checkpoint: Checkpoint, root: Place, left: Mapping[str, Iterable[Place]], before: Index
) -> list[LeftBehind]:
    """Make the object at `root` the root of the checkpoint.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        root: The place of the new root.
        left: The places that are not in the output, by reason.
        before: The index of the checkpoint before the change.

    Returns:
        The data that is not in the output, for the report. Bytes are counted for storages that no tensor uses now.
    """
    checkpoint.restrict(root)
    kept = checkpoint.storages.values()
    return [part for why, places in left.items() for part in left_behind_at(places, before.storage_of, kept, why)]


def _take(checkpoint: Checkpoint, place: Place) -> list[LeftBehind]:
    """Make the object at `place` the root of the checkpoint. Return the data that is not in the output.

    If `place` is the root already, nothing changes and the list is empty.
    """
    if place.node is checkpoint.graph.root:
        return []
    index = checkpoint.index
    others = [other for other in index.places_in(_above(place) - {id(place.node)}) if other.node is not place.node]
    checkpoint.graph.discarded = []
    return _restrict(checkpoint, place, {f"outside {place.path}": others}, index)


def _above(place: Place) -> set[int]:
    """Return the ids of all nodes that contain `place`, up to the root."""
    return {id(above.node) for above in place.upwards() if above is not place}


def _take_module(checkpoint: Checkpoint, module: PickledModule) -> list[LeftBehind]:
    """Make the state dict of `module` the root of the checkpoint. Return the data that is not in the output.

    The state dict is an OrderedDict from names to detached tensors, at the path of the module. Raises RefusedError if
    the state dict of the module cannot be determined.
    """
    if module.trouble:
        raise RefusedError(f"{module.path} has no state dict: {module.trouble}", got=module.cls)
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
            whys.setdefault("in the state dict, but not a known kind of tensor", []).append(place)
        elif module.is_bookkeeping(place):
            of_torch.append(place)
        else:
            whys.setdefault(f"not part of the state dict{at_path(module.path)}", []).append(place)
    state_dict = Call("REDUCE", Global("collections", "OrderedDict"), Tuple([]))
    items: list[Value] = []
    named: set[int] = set()
    for name, node in module.tensors.items():
        tensor = detached(node)
        if id(node) in named and isinstance(tensor, Call):  # detach() makes a tensor for each name
            tensor = Call(tensor.kind, tensor.callable, tensor.args)
        named.add(id(node))
        items += (name, tensor)
    set_items(state_dict, items)
    place = module.place
    checkpoint.graph.discarded = []
    left = _restrict(checkpoint, Place(place.parent, place.segment, state_dict, place.depth, place.key), whys, index)
    if of_torch:  # one line for all of them, because they are many
        numbers = f"{count(len(of_torch), 'attribute')} of {count(len(module.modules), 'module')}"
        why = f"attributes that torch adds to every module (hooks, training; {numbers})"
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
    """Remove tensors that no glob of `include` matches, and tensors that a glob of `exclude` matches.

    A glob without a slash is compared with the names in state dicts, and a glob with a slash with the paths of all
    tensors. If all globs of `include` are without a slash, only tensors in state dicts are removed for it.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        include: The globs of tensors to keep. If there are none, all are kept.
        exclude: The globs of tensors to remove.
        paths: The paths in the source of the names in a module's state dict. Globs can match these paths, too.
        before: The index of the complete source. Another edit may have removed some of its tensors already.

    Returns:
        The data that is not in the output.

    Raises:
        NoMatchError: A glob matches nothing, or no tensor remains.
        RefusedError: A tensor cannot be removed, because it is not the value of a key.
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
        """Return the ids of the places that `globs` of the option `field` match. Raise NoMatchError if none does."""
        found: set[int] = set()
        for glob in globs:
            searched = places if "/" in glob else named
            hits = {id(place) for place in searched if is_meant(place, glob)}
            is_gone = field == "exclude" and "/" in glob and before is not checkpoint.index
            if not hits and is_gone and any(matches(glob, path, None) for path in before.tensors):
                continue
            if not hits:
                # without its only glob, include would take everything
                unmatched = (field, glob) if field == "exclude" or len(globs) > 1 else None
                raise _no_match(checkpoint, field, glob, searched, unmatched)
            found |= hits
        return found

    unwanted = meant("exclude", exclude)
    if include:
        of_others = any("/" in glob for glob in include)
        wanted = meant("include", include)
        unwanted |= {id(p) for p in places if id(p) not in wanted and (of_others or id(p) in inside)}
    return leave_out(checkpoint, [place for place in places if id(place) in unwanted], only_keyed=True)


def _no_match(
    checkpoint: Checkpoint, field: str, glob: str, searched: Sequence[Place], unmatched: tuple[str, str] | None
) -> NoMatchError:
    """Return the error for `glob`, which matches none of the places `searched`.

    `field` is the name of the option of the glob. `unmatched` goes into the error, so that a caller can try without
    the glob.
    """
    what, near = "tensor", None
    if "/" not in glob:
        what = "name in a state dict"
        near = _near_glob(checkpoint, field, glob, searched) or checkpoint.detected.hint_of_modules()
    return NoMatchError(
        f"no {what} matches {glob!r}",
        expected=f"something like {searched[0].path}" if searched else "a path, with a slash",
        hint=near,
        unmatched=unmatched,
    )


def _near_glob(checkpoint: Checkpoint, field: str, glob: str, named: Sequence[Place]) -> str | None:
    """Return a hint with the option to type instead of `glob`, which no name matches, or None if nothing is similar.

    The hint is ``--select`` or ``--drop`` if `glob` is the path of an object, or a longer glob if `glob` is a segment
    of the names at the places `named`.
    """
    part = glob.removesuffix(".*")
    if any(place.path == part for place in checkpoint.index.every_place):
        return "for the part of that name: " + option("select" if field == "include" else "drop", part)
    for meant in (f"{part}.*", f"*.{part}.*") if part == glob else ():
        if any(matches(meant, place.path, place.key) for place in named):
            return "try: " + option(field, meant)
    return None


def _places_at(checkpoint: Checkpoint, path: str, before: Index) -> list[Place]:
    """Return the places that `path` matches, which is a path or a glob with a slash.

    Places below another match are left out. The list is empty if only `before`, the index of the complete source, has
    matches: they were removed already. Raises NoMatchError if neither has matches.
    """
    found = _meant_places(checkpoint.index, path)
    if not found and before is not checkpoint.index and _meant_places(before, path):
        return []
    if not found:
        every = [place.path for place in before.every_place[:_LOOKED_AT]]
        parts = [written for written in every if "/" not in written]  # people mean these by one word
        near = close_matches(path, parts, n=1) or close_matches(path, every, n=1)
        raise NoMatchError(
            f"there is nothing at {path}",
            hint=f"did you mean {near[0]}?" if near else _look_for(checkpoint, Option("tree")),
            unmatched=("drop", path),
        )
    inside = {id(place) for place in found}
    return [place for place in found if inside.isdisjoint(id(above) for above in [*place.upwards()][1:])]


def _meant_places(index: Index, path: str) -> list[Place]:
    """Return the first place in `index` whose path is `path`.

    If there is none, return all places that the glob `path` matches.

    The list is empty if nothing matches. A `path` without a slash is not used as a glob.
    """
    known = [(place.path, place) for place in index.every_place]
    found = [place for written, place in known if path in (written, printable(written))][:1]
    if not found and "/" in path:
        found = [place for written, place in known if matches(path, written, None)]
    return found


def holder_of(place: Place) -> tuple[Object, str] | None:
    """Return the object from which the node at `place` can be removed, and the segment of the node in it.

    For an attribute, the object is the dict of attributes. Return None for the root, arguments and members of tuples,
    which cannot be removed.
    """
    outer = place.parent.node if place.parent else None
    if place.segment.startswith("/.") and isinstance(outer, Object):  # an attribute is an item of a state
        work().charge(len(outer.effects))
        states = (state for state in outer.states() if isinstance(state, Dict) and place.key in strings_of(state))
        return next(((state, key_segment(place.key, 0)) for state in states), None)
    return (outer, place.segment) if isinstance(outer, Object) else None


def leave_out(
    checkpoint: Checkpoint, unwanted: list[Place], why: str = "left out as requested", *, only_keyed: bool = False
) -> list[LeftBehind]:
    """Remove the nodes at the places `unwanted` from the objects that contain them.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        unwanted: The places to remove.
        why: The reason, for the report.
        only_keyed: Whether to refuse nodes that are not values of keys in a mapping.

    Returns:
        The data that is not in the output.

    Raises:
        RefusedError: A node cannot be removed, or is not the value of a key and `only_keyed` is True.
        NoMatchError: The checkpoint had tensors, and none remains.
    """
    by_mapping: dict[int, tuple[Object, set[str]]] = {}
    segments_of: dict[int, set[str]] = {}
    for place in unwanted:
        holder, segment = holder_of(place) or (None, "")
        if holder is not None and id(holder) not in segments_of:  # once for each: an object can have many items
            segments_of[id(holder)] = set(_segments(holder))
        has_key = segment == place.segment and isinstance(holder, (Dict, Call))
        if holder is None or segment not in segments_of[id(holder)] or (only_keyed and not has_key):
            what = "what has a key" if only_keyed else "items, attributes and elements of lists"
            raise RefusedError(
                f"only {what} can be left out",
                got=place.path,
                hint="to leave out what contains it: " + option("drop", (place.parent.path,)) if place.parent else None,
            )
        by_mapping.setdefault(id(holder), (holder, set()))[1].add(segment)
    index = checkpoint.index
    had_tensors = bool(checkpoint.tensors)
    again = [place for place in index.places if id(place.node) in by_mapping]
    for mapping, segments in by_mapping.values():
        _remove(mapping, segments)
    left = _restrict(checkpoint, checkpoint.root, {why: unwanted}, index)
    named = {place.path for place in unwanted}
    for place in again:  # a mapping with two paths loses its items at both
        segments = by_mapping[id(place.node)][1]
        work().charge((_STEPS + place.length // CHARACTERS) * len(segments))  # it can have any number of paths
        paths = [place.path.removesuffix(".") + segment for segment in sorted(segments)]
        left += [LeftBehind(path, 0, "left out with it") for path in paths if path.removeprefix("/") not in named]
    if had_tensors and not checkpoint.tensors:
        raise NoMatchError("no tensor would be left")
    return left


def _segments(holder: Object) -> list[str]:
    """Return the segments of the elements of `holder`, if it is a list or set, or else of the values of its items."""
    if isinstance(holder, (List, Set)):
        return [f"[{i}]" if isinstance(holder, List) else f"/{{{i}}}" for i in range(len([*holder.elements()]))]
    return item_segments(holder)


def _remove(holder: Object, segments: set[str]) -> None:
    """Remove the items or elements with these `segments` from `holder`. Segments that do not occur are ignored."""
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
