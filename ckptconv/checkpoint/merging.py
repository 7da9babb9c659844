"""Merge several checkpoints into one graph, split one graph into several checkpoints, and create calls for tensors.

If several files contain copies of the same data, the data is written once, and only if all copies are equal.

Source of the calls that create tensors: ``torch/_utils.py`` of 2.13 (``_rebuild_tensor_v2``; ``_rebuild_tensor_v3`` for
dtypes without a storage class).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from ckptconv.byteranges.rounding import needs_torch
from ckptconv.byteranges.sources import SourceFolder
from ckptconv.byteranges.spans import Data, Piece
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.rebuild_functions import OtherDType
from ckptconv.checkpoint.storage_ids import change_id, new_id, storage_id
from ckptconv.checkpoint.tensor_info import Replica, row_major
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.errors import RefusedError, UnsupportedError, require_torch, some
from ckptconv.hints import Placeholder, command, option
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Dict,
    FrozenSet,
    Global,
    Graph,
    Node,
    Object,
    PersistentId,
    Tuple,
    Value,
    set_items,
    walk,
)
from ckptconv.pickles.paths import Place, is_item, item_segments
from ckptconv.pickles.rows import RowCall, RowForm, RowId, outline, subgraph

_MOST_DROPPED = 20  # paths in a command; more would be too long to type


def drop_effect_order(checkpoint: Checkpoint) -> None:
    """Remove the order of the effects in `checkpoint` if the loaded objects are the same without it.

    This is for a checkpoint that was selected from a larger one. Some of its objects may have been created outside
    of it. To keep their order, it would need opcodes that torch's ``weights_only`` unpickler refuses.

    The order is removed if each call and each state uses only complete values, nothing contains itself, nothing is
    discarded, and torch's safe loader accepts every call. Otherwise nothing changes. The index stays valid.
    """
    index = checkpoint.index
    if index.graph.discarded or index.obstacles:
        return
    latest = _latest(index.graph.root)
    if latest is None:
        return
    for node in index.nodes:
        if isinstance(node, RowCall) and node.row:
            continue  # it uses only globals and its storage, which is read right before it
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
    """Return whether all effects in `values` come before `order`. True if `order` is None."""
    return order is None or all(latest.get(id(value), 0) < order for value in values if isinstance(value, Node))


def _latest(root: Value) -> dict[int, int] | None:
    """Return the greatest order of the effects in each node below `root`, by the id of the node.

    The effects in nodes below a node count, too. Return None if a node contains itself.
    """
    latest: dict[int, int] = {}
    open_: dict[int, int] = {}  # where the nodes whose children are visited are in the list
    todo = [root] if isinstance(root, Node) else []
    while todo:
        node = todo[-1]
        if id(node) in latest:
            todo.pop()
        elif id(node) not in open_:
            open_[id(node)] = len(todo)
            todo += [child for child in outline(node) if isinstance(child, Node)]
        elif open_.pop(id(node)) != len(todo):
            return None
        else:
            greatest = node.order or 0 if isinstance(node, (Call, PersistentId, FrozenSet)) else 0
            for effect in node.effects if isinstance(node, Object) else ():
                greatest = max(greatest, effect.order or 0)
            for child in outline(node):
                if isinstance(child, Node):
                    greatest = max(greatest, latest[id(child)])
            latest[id(todo.pop())] = greatest
    return latest


def empty_graph() -> Graph:
    """Return the graph of an empty dict."""
    return Graph(Dict(), 2, 0, frozenset(), [], [], [], [], set())


class TensorCalls:
    """Creates calls that build tensors in `graph`. All calls use the same nodes for the same globals."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._words: dict[tuple[str, str], Global] = {}
        self._forms: dict[tuple[str, tuple[int, ...], int], RowForm] = {}

    def tensor(
        self, dtype: DType, shape: tuple[int, ...], key: str, nbytes: int, conj: bool = False, neg: bool = False
    ) -> Call:
        """Return a call that builds a row-major tensor of a complete storage.

        Calls for tensors of one dtype and shape are rows, which are two nodes each.

        Args:
            dtype: The dtype of the tensor.
            shape: The shape of the tensor.
            key: The key of the storage.
            nbytes: The number of bytes of the storage.
            conj: Whether the tensor has torch's lazy conjugate bit.
            neg: Whether the tensor has torch's lazy negative bit.
        """
        if not dtype.storage_class or conj or neg:
            call, storage = self._call(dtype, shape, key, nbytes, conj, neg)
        else:
            form = self._forms.get((dtype.name, shape, nbytes))
            if form is None:
                form = RowForm.of(*self._call(dtype, shape, key, nbytes))
                self._forms[dtype.name, shape, nbytes] = form
            storage = RowId(form, key, "cpu")
            call = RowCall(form, storage)
            self._graph.has_inner_calls = True
        self._graph.references.append(storage)
        return call

    def _call(
        self, dtype: DType, shape: tuple[int, ...], key: str, nbytes: int, conj: bool = False, neg: bool = False
    ) -> tuple[Call, PersistentId]:
        """Return the call that :meth:`tensor` describes, and the persistent id of its storage."""
        name, version = dtype.storage_class, 2
        cls = self.word("torch", name) if name else self.word("torch.storage", "UntypedStorage")
        storage = PersistentId(new_id(cls, key, "cpu", prod(shape) if name else nbytes))
        hooks = Call("REDUCE", self.word("collections", "OrderedDict"), Tuple([]))
        args: list[Value] = [storage, 0, Tuple([*shape]), Tuple([*row_major(shape)]), False, hooks]
        if not name:
            version = 3
            args.append(
                self.word("torch", dtype.name) if dtype.name in BY_NAME else OtherDType("safetensors", dtype.name)
            )
        if conj or neg:
            bits = [*(("conj", True) if conj else ()), *(("neg", True) if neg else ())]
            args.append(set_items(Dict(), bits))
        return Call("REDUCE", self.word("torch._utils", f"_rebuild_tensor_v{version}"), Tuple(args)), storage

    def word(self, module: str, name: str) -> Global:
        """Return the node of the global `name` of `module`. Further calls return the same node."""
        if (module, name) not in self._words:
            self._words[module, name] = Global(module, name)
            self._graph.shared.add(self._words[module, name])
        return self._words[module, name]


class Merger:
    """Merges checkpoints from the files of `source`, and tensors that are built from their bytes, into one graph."""

    def __init__(self, source: SourceFolder) -> None:
        self.source = source
        self._graph = empty_graph()
        self._latest = 0  # the greatest order so far
        self._parts: list[Checkpoint] = []
        #: The bytes of each storage, by its key.
        self._records: dict[str, Data] = {}
        self._calls = TensorCalls(self._graph)
        self._tensors = 0  # the number of tensors that were made
        #: The key, the bytes and the location tag of each storage that several tensors share.
        self._shared: dict[object, tuple[str, Data, str]] = {}

    def tensor(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        data: Data,
        tag: str = "cpu",
        *bits: bool,
        shared: object = None,
    ) -> Call:
        """Return a call in the merged graph that builds a row-major tensor of a complete storage.

        Args:
            dtype: The dtype of the tensor.
            shape: The shape of the tensor.
            data: The bytes of the storage.
            tag: The location tag of the storage.
            bits: torch's lazy conjugate bit and negative bit. Both are False by default.
            shared: Tensors with an equal value use the storage of the first of them. None for a storage of its own.
        """
        key = str(self._tensors)
        self._tensors += 1
        if shared is not None:
            key, data, tag = self._shared.setdefault(shared, (key, data, tag))
        self._records[key] = data
        call = self._calls.tensor(dtype, shape, key, data.length, *bits)
        if tag != "cpu":
            change_id(self._graph.references[-1], tag=tag)
        return call

    def take(self, part: Checkpoint, *, in_order: bool = False) -> Value:
        """Add the checkpoint `part` to the merged graph. Return its root.

        The caller puts the root into the root of the merged graph. The keys of storages get a prefix, so that they
        are unique.

        Args:
            part: A checkpoint in a file of the source.
            in_order: Whether `part` comes after all earlier ones, so that its effects keep their order. If not, the
                order is dropped if possible.

        Raises:
            UnsupportedError: The byte order differs from that of the first checkpoint.
        """
        if self._parts and part.byteorder != self._parts[0].byteorder:
            raise UnsupportedError(
                "the parts of one checkpoint have different byte orders",
                where=part.source.path,
                expected=f"{self._parts[0].byteorder}-endian, as in {self._parts[0].source.path}",
                got=f"{part.byteorder}-endian",
            )
        prefix = f"{len(self._parts)}/"
        self._parts.append(part)
        for reference in part.references:
            change_id(reference.node, key=prefix + reference.storage.key)
        part.changed()
        self._records.update((prefix + key, storage.data) for key, storage in part.storages.items())
        if part.graph.opcodes:
            if not in_order:
                drop_effect_order(part)
            before = self._latest
            for node in walk([*part.graph.discarded, part.graph.root, *part.graph.byte_strings], parts=outline):
                if isinstance(node, Blob):
                    node.offset += self.source.start_of(part.blobs or part.source)
                elif isinstance(node, (Call, PersistentId, FrozenSet)):
                    node.order = self._later(node.order, before)
                if isinstance(node, RowCall):
                    node.next_items = None  # their orders and their positions in the source have changed
                if isinstance(node, Object):
                    for effect in node.effects:
                        effect.order = self._later(effect.order, before)
        graph = self._graph
        graph.globals += part.graph.globals
        graph.outer_calls += part.graph.outer_calls
        graph.references += part.graph.references
        graph.discarded += part.graph.discarded
        graph.shared |= part.graph.shared
        graph.byte_strings += part.graph.byte_strings
        graph.extensions += part.graph.extensions
        graph.protocol = max(graph.protocol, part.graph.protocol)
        graph.opcodes += part.graph.opcodes
        graph.used |= part.graph.used
        return part.graph.root

    def _later(self, order: int | None, before: int) -> int | None:
        """Return the order of an effect in the merged graph: `order` plus `before`, or None for None."""
        if order is not None:
            order += before
            self._latest = max(self._latest, order)
        return order

    def checkpoint(self, name: str, root: Value, container: object = None) -> Checkpoint:
        """Return the merged graph below `root` as a checkpoint in the format `name`.

        Raises MalformedError, LimitError.
        """
        graph = self._graph
        graph.root = root
        if graph.opcodes:  # otherwise it has only calls for tensors, and `root` contains them all
            graph = subgraph(graph, root)
            reached = set(graph.globals)
            graph.globals += [
                node for node in self._graph.globals if node not in reached
            ]  # globals that the merged files name and discard
            for part in self._parts:
                graph.left_out += [*part.graph.discarded, part.graph.root, *part.graph.written.values()]
        source, known = self.source, self.source.faults.again()
        checkpoint = checkpoint_of(name, source, graph, container, self._records.get, str(source.path), known)
        checkpoint.is_byteorder_said = any(part.is_byteorder_said for part in self._parts)
        for part in self._parts:
            checkpoint.byteorder = part.byteorder
            checkpoint.class_ids |= part.class_ids
            checkpoint.warnings += (text for text in part.warnings if text not in checkpoint.warnings)
            checkpoint.unused += part.unused
            checkpoint.notes += (note for note in part.notes if note not in checkpoint.notes)
        return checkpoint


def split(checkpoint: Checkpoint, parts: Iterable[tuple[Value, Checkpoint | None]]) -> Iterator[Checkpoint]:
    """Yield a checkpoint for each root in `parts`. The checkpoints use the same nodes, so write each before the next.

    `parts` are pairs of a root and the checkpoint whose container, source and keys of storages to use, or None for
    none.
    """
    for root, like in parts:
        part = checkpoint.part(Place(None, "", root, 0))
        if like is not None:  # storages get back the keys that they had in it
            for reference in part.references:
                reference.storage.key = storage_id(reference.node).key.partition("/")[2]
                change_id(reference.node, key=reference.storage.key)
        yield replace(
            part,
            container=like.container if like else None,
            source=like.source if like else checkpoint.source,
            blobs=checkpoint.blobs or checkpoint.source,
            unused=[],
            notes=[],
            format=like.format if like else checkpoint.format,
            is_state_dict=True,
        )


# Copies


def refuse_different(checkpoint: Checkpoint) -> None:
    """Raise RefusedError if copies of the same data in several files of `checkpoint` differ.

    Copies of data that an edit dropped do not count. Two records with known checksums of equal value are equal; all
    others are read and compared.
    """
    if not checkpoint.replicas:
        return
    from ckptconv.byteranges.materialise import Pieces
    from ckptconv.byteranges.reading import same_streams

    wanted: dict[object, Replica] = {}
    nodes = {id(node) for node in walk([checkpoint.graph.root])}
    segments: dict[int, set[str]] = {}
    for replica in checkpoint.replicas:
        if replica.pieces and have_equal_checksums(*replica.pieces):
            continue
        outer = _droppable(replica.place)
        holder = outer.parent.node if outer and outer.parent else None
        if outer is not None and isinstance(holder, Object):
            if id(holder) not in segments:
                segments[id(holder)] = set(item_segments(holder)) if id(holder) in nodes else set()
            if outer.segment not in segments[id(holder)]:
                continue  # an edit dropped it
        wanted.setdefault(replica.pieces or replica, replica)
    every = [piece for replica in wanted.values() for piece in replica.pieces or ()]
    if any(map(needs_torch, every)):
        require_torch("comparing strided copies", checkpoint.source.path)
    with Pieces(every) as pieces:
        differ = [
            replica
            for replica in wanted.values()
            if replica.pieces is None or not same_streams(*map(pieces.chunks, replica.pieces))
        ]
    if differ:
        raise _difference_error(checkpoint, differ)


def are_below(paths: Iterable[str], tops: Iterable[str]) -> bool:
    """Return whether each of `paths` is one of the paths `tops`, or below one."""
    highest: list[str] = []  # those that are not below others; what lies between a text and a longer one begins with it
    for top in sorted(f"{top}/" for top in tops):
        if not highest or not top.startswith(highest[-1]):
            highest.append(top)
    for path in paths:
        i = bisect_right(highest, whole := f"{path}/")
        if not i or not whole.startswith(highest[i - 1]):
            return False
    return True


def have_equal_checksums(a: Piece, b: Piece) -> bool:
    """Return whether `a` and `b` have the same length, and known checksums that are equal."""
    return a.length == b.length and a.crc32_known() is not None and a.crc32_known() == b.crc32_known()


def _droppable(place: Place) -> Place | None:
    """Return the innermost place from `place` upwards that is an item of a mapping. Return None if there is none."""
    above = (each for each in place.upwards() if each.parent and isinstance(each.parent.node, (Dict, Call)))
    return next(filter(is_item, above), None)


def _difference_error(checkpoint: Checkpoint, differ: list[Replica]) -> RefusedError:
    files: dict[str, tuple[str, str]] = {}
    for replica in differ:
        files.setdefault(replica.place.path, replica.files)
    dropped = list(dict.fromkeys(place.path if (place := _droppable(each.place)) else "." for each in differ))
    if "." in dropped or are_below(checkpoint.tensors, dropped):
        # a conversion does not drop all tensors and keep other values
        one = command("convert", checkpoint.source.folder / differ[0].files[0], Placeholder("OUT"))
        hint = "each rank has its own value, so the run needs the separate files; to convert one rank: " + one
    else:
        paths = tuple(dropped[:_MOST_DROPPED])
        more = f", and {len(dropped) - len(paths):,} more" if len(dropped) > len(paths) else ""
        hint = "to leave them out: " + option("drop", paths) + more
    return RefusedError(
        "the files contain different copies of the same value, and it is not known which one is right",
        where=checkpoint.source.path,
        got=some([f"{path} in {a} and {b}" for path, (a, b) in files.items()], 5),
        hint=hint,
    )
