"""Drop the order of a pickle's effects if no reader can tell the difference.

This is for a part of a checkpoint. Some of its objects may have been made outside of the part, where they occur first.
Written in the order of the source, such a part would need opcodes that torch's ``weights_only`` unpickler refuses.
"""

from __future__ import annotations

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.pickles.graph import Call, FrozenSet, Node, Object, PersistentId, Value, children


def drop_effect_order(checkpoint: Checkpoint) -> None:
    """Remove the order of the effects in `checkpoint` if no reader can tell the difference.

    No reader can if each call and each state is complete before it is used, and if torch's safe loader accepts every
    call. Nothing in an index depends on the order.
    """
    index = checkpoint.index
    if index.graph.discarded or index.obstacles:
        return
    latest = _latest(index.graph.root)
    if latest is None:
        return
    for node in index.nodes:
        if isinstance(node, Call) and not _before([node.callable, node.args, node.kwargs], node.order, latest):
            return
        for effect in node.effects if isinstance(node, Object) else ():
            if effect.opcode == "BUILD" and not _before(effect.values, effect.order, latest):
                return
    for node in index.nodes:
        if isinstance(node, (Call, PersistentId, FrozenSet)):
            node.order = None
        if isinstance(node, Object):
            for effect in node.effects:
                effect.order = None


def _before(values: list[Value], order: int | None, latest: dict[int, int]) -> bool:
    """Return whether all effects in `values` come before `order`, or whether `order` is None."""
    return order is None or all(latest.get(id(value), 0) < order for value in values if isinstance(value, Node))


def _latest(root: Value) -> dict[int, int] | None:
    """Return the number of the last effect in each node below `root` and in its parts, by the id of the node.

    Return None if a node contains itself.
    """
    latest: dict[int, int] = {}
    open_: set[int] = set()
    todo: list[tuple[Value, bool]] = [(root, False)]
    while todo:
        node, entered = todo.pop()
        if not isinstance(node, Node) or id(node) in latest:
            continue
        if entered:
            open_.discard(id(node))
            own = [getattr(node, "order", None) or 0]
            if isinstance(node, Object):
                own += [effect.order or 0 for effect in node.effects]
            latest[id(node)] = max(own + [latest[id(child)] for child in children(node) if isinstance(child, Node)])
        elif id(node) in open_:
            return None
        else:
            open_.add(id(node))
            todo.append((node, True))
            todo += [(child, False) for child in children(node)]
    return latest
