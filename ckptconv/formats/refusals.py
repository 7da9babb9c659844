"""The error for tensors that a format cannot hold, and the command that leaves them out."""

from __future__ import annotations

from ckptconv.checkpoint.globs import glob_of, matches
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import RefusedError
from ckptconv.hints import Placeholder, option
from ckptconv.pickles.graph import Call, Dict
from ckptconv.pickles.paths import Place, is_item, is_repeated

_LISTED = 20  # tensors in an error


def cannot_hold(checkpoint: Checkpoint, what: str, troubles: list[tuple[Place, str]]) -> RefusedError:
    """The error for a target, `what`, that cannot hold some tensors: where each stands, its
    trouble, and how to leave all of them out.
    """
    of_source: dict[int, list[Place]] = {}
    for place in checkpoint.source_places:
        of_source.setdefault(id(place.node), []).append(place)
    listed = ", ".join(f"{of_source.get(id(place.node), [place])[0].path} ({trouble})" for place, trouble in troubles)
    once = [p for place, _ in troubles if not is_repeated(place) for p in of_source.get(id(place.node), [])]
    droppable = all(is_item(p) and p.parent and isinstance(p.parent.node, (Dict, Call)) for p in once)
    if not droppable or len({id(place.node) for place in once}) == len(checkpoint.tensor_nodes):
        once = []  # what has no key cannot be left out, or nothing would be left
    globs = _globs(checkpoint, once)
    hint = "to leave them out: " + option("exclude", globs) if globs else None
    if len(globs) > _LISTED:
        listed = f"{len(troubles):,} tensors: {listed}"
        such = ", as often as it takes, such as " + option("exclude", globs[0])
        hint = "to leave them out: " + option("exclude", Placeholder("GLOB")) + such
    return RefusedError(f"{what} cannot hold {listed}", where=checkpoint.source.path, hint=hint)


def _globs(checkpoint: Checkpoint, places: list[Place]) -> tuple[str, ...]:
    """The globs that mean the tensors at `places`: names in state dicts, elsewhere paths, which need a slash. None if
    one of them would mean another tensor too.
    """
    named = {id(found.node) for found in checkpoint.detected.state_dicts} if places else set()

    def said(place: Place) -> tuple[str, str | None]:
        if place.parent and id(place.parent.node) in named:
            return place.path, place.key
        return (place.path if "/" in place.path else f"./{place.path}"), None

    globs = tuple(glob_of(*said(place)) for place in places)
    meant = {id(place.node) for place in places}
    loose = [glob for glob, place in zip(globs, places, strict=True) if not f"{place.path}{place.key}".isprintable()]
    others = [said(place) for place in checkpoint.source_places if loose and id(place.node) not in meant]
    return () if any(matches(glob, *other) for glob in loose for other in others) else globs
