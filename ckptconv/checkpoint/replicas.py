"""What several files of one checkpoint each have a copy of: it is written once, and only if all copies are the same."""

from __future__ import annotations

from ckptconv.byteranges.materialise import Pieces
from ckptconv.byteranges.reading import same_streams
from ckptconv.byteranges.sources import SourceFolder
from ckptconv.byteranges.spans import Piece
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import Replica
from ckptconv.errors import RefusedError, require_torch, some
from ckptconv.hints import Placeholder, command, option
from ckptconv.pickles.graph import Call, Dict, Object, walk
from ckptconv.pickles.paths import Place, is_item, item_segments

_MOST_DROPPED = 20  # paths in a command; nobody types more


def refuse_different(checkpoint: Checkpoint) -> None:
    """Raise RefusedError where files of `checkpoint` differ in what each has a copy of, and it was not left out.

    Two records whose checksums are known and equal are the same; everything else is read.
    """
    if not checkpoint.replicas:
        return
    held = _Held(checkpoint)
    wanted: dict[object, Replica] = {}
    for each in checkpoint.replicas:
        if not (each.pieces and _is_known(*each.pieces)) and held.has(each.place):
            wanted.setdefault(each.pieces or each, each)
    every = [piece for each in wanted.values() for piece in each.pieces or ()]
    if any(piece.is_computed for piece in every):
        require_torch("comparing strided copies", checkpoint.source.path)
    with Pieces(every) as pieces:
        differ = [
            each
            for each in wanted.values()
            if each.pieces is None or not same_streams(*map(pieces.chunks, each.pieces))
        ]
    if differ:
        raise _error(checkpoint, differ)


def _is_known(a: Piece, b: Piece) -> bool:
    """Whether `a` and `b` are the same by their checksums."""
    return a.length == b.length and a.crc32_known() is not None and a.crc32_known() == b.crc32_known()


def _droppable(place: Place) -> Place | None:
    """The innermost place from `place` upwards that can be left out of a mapping."""
    above = (each for each in place.upwards() if each.parent and isinstance(each.parent.node, (Dict, Call)))
    return next(filter(is_item, above), None)


class _Held:
    """What `checkpoint` holds, as it is now."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._nodes = {id(node) for node in walk([checkpoint.graph.root])}
        self._segments: dict[int, set[str]] = {}

    def has(self, place: Place) -> bool:
        """Whether what stood at `place` was not left out."""
        outer = _droppable(place)
        holder = outer.parent.node if outer and outer.parent else None
        if outer is None or not isinstance(holder, Object):
            return True
        if id(holder) not in self._segments:
            is_there = id(holder) in self._nodes
            self._segments[id(holder)] = set(item_segments(holder)) if is_there else set()
        return outer.segment in self._segments[id(holder)]


def _error(checkpoint: Checkpoint, left: list[Replica]) -> RefusedError:
    found: dict[str, tuple[str, str]] = {}
    for each in left:
        found.setdefault(each.place.path, each.files)
    dropped = list(dict.fromkeys(place.path if (place := _droppable(each.place)) else "." for each in left))
    folder = checkpoint.source.folder if isinstance(checkpoint.source, SourceFolder) else checkpoint.source.path.parent
    one = command("convert", folder / left[0].files[0], Placeholder("OUT"))
    hint = "each rank needs its own, so the run needs all files as they are; that of one rank alone: " + one
    if all(any(path == each or path.startswith(each + "/") for each in dropped) for path in checkpoint.tensors):
        dropped = ["."]  # a conversion leaves no tensor out but others stay
    if "." not in dropped:
        paths = tuple(dropped[:_MOST_DROPPED])
        more = f", and {len(dropped) - len(paths):,} more" if len(dropped) > len(paths) else ""
        hint = "to leave them out: " + option("drop", paths) + more
    return RefusedError(
        "the files differ in what each of them has a copy of, and nothing says which one is right",
        where=checkpoint.source.path,
        got=some([f"{path} in {a} and {b}" for path, (a, b) in found.items()], 5),
        hint=hint,
    )
