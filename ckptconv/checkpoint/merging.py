"""Merge several checkpoints into one graph, and split one graph into several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.byteranges.spans import Data
from ckptconv.checkpoint.effect_order import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.new_tensors import TensorCalls, empty_graph
from ckptconv.checkpoint.reading import checkpoint_of
from ckptconv.checkpoint.storage_ids import changed_id, storage_id
from ckptconv.checkpoint.tensor_info import Reference
from ckptconv.errors import UnsupportedError
from ckptconv.pickles.graph import (
    Blob,
    Call,
    FrozenSet,
    Object,
    PersistentId,
    Value,
    subgraph,
    walk,
)
from ckptconv.pickles.paths import Place


class Merger:
    """Puts checkpoints whose bytes are parts of `source` together, and tensors that are made here."""

    def __init__(self, source: SourceFolder) -> None:
        self.source = source
        self._graph = empty_graph()
        self._latest = 0  # of the orders so far
        self._parts: list[Checkpoint] = []
        #: The bytes of each storage, by its key; who makes tensors adds theirs.
        self.records: dict[str, Data] = {}
        #: Makes tensors.
        self.calls = TensorCalls(self._graph)

    def take(self, part: Checkpoint, *, in_order: bool = False) -> Value:
        """`part`'s root, which belongs to the whole from now on.

        `in_order`: it will stand behind all that was taken before, so the order of its effects can stay.
        """
        if self._parts and part.byteorder != self._parts[0].byteorder:
            raise UnsupportedError(
                "the parts of one checkpoint have numbers in different byte orders",
                where=part.source.path,
                expected=f"{self._parts[0].byteorder}-endian, as in {self._parts[0].source.path}",
                got=f"{part.byteorder}-endian",
            )
        prefix = f"{len(self._parts)}/"
        self._parts.append(part)
        for reference in part.references:
            reference.node.id = changed_id(reference.node, key=prefix + reference.storage.key)
        part.changed(same_tensors=True)
        self.records.update((prefix + key, storage.data) for key, storage in part.storages.items())
        if part.graph.opcodes:
            if not in_order:
                drop_effect_order(part)
            self._move(part)
        graph = self._graph
        graph.globals += part.graph.globals
        graph.calls += part.graph.calls
        graph.references += part.graph.references
        graph.discarded += part.graph.discarded
        graph.shared |= part.graph.shared
        graph.byte_strings += part.graph.byte_strings
        graph.extensions += part.graph.extensions
        graph.protocol = max(graph.protocol, part.graph.protocol)
        graph.opcodes += part.graph.opcodes
        graph.used |= part.graph.used
        return part.graph.root

    def _move(self, part: Checkpoint) -> None:
        """Put `part`'s effects behind those of all others, and its long texts where the whole source has them."""
        before = self._latest
        for node in walk([*part.graph.discarded, part.graph.root, *part.graph.byte_strings]):
            if isinstance(node, Blob):
                node.offset += self.source.start_of(part.blobs or part.source)
            elif isinstance(node, (Call, PersistentId, FrozenSet)):
                node.order = self._later(node.order, before)
            if isinstance(node, Object):
                for effect in node.effects:
                    effect.order = self._later(effect.order, before)

    def _later(self, order: int | None, before: int) -> int | None:
        if order is not None:
            order += before
            self._latest = max(self._latest, order)
        return order

    def checkpoint(self, name: str, root: Value, container: object = None) -> Checkpoint:
        """All that `root` leads to, as a checkpoint in the format `name`. Raises MalformedError, LimitError."""
        self._graph.root = root
        graph = subgraph(self._graph, root)
        reached = set(graph.globals)
        graph.globals += [node for node in self._graph.globals if node not in reached]  # what parts name and throw away
        for part in self._parts:
            graph.left_out += [*part.graph.discarded, part.graph.root, *part.graph.written.values()]
        source, known = self.source, self.source.faults.again()
        checkpoint = checkpoint_of(name, source, graph, container, self.records.get, str(source.path), known)
        checkpoint.is_byteorder_said = any(part.is_byteorder_said for part in self._parts)
        for part in self._parts:
            checkpoint.byteorder = part.byteorder
            checkpoint.class_ids |= part.class_ids
            checkpoint.warnings += (text for text in part.warnings if text not in checkpoint.warnings)
            checkpoint.unused += part.unused
            checkpoint.notes += (note for note in part.notes if note not in checkpoint.notes)
        return checkpoint


def split(checkpoint: Checkpoint, parts: Iterable[tuple[Value, Checkpoint | None]]) -> Iterator[Checkpoint]:
    """A checkpoint for each root of `parts`, on the same nodes; to be laid out before the next is asked for.

    Beside a root stands the one that :class:`Merger` took there, if it is to stay in the container that it came in.
    """
    for root, like in parts:
        part = checkpoint.part(Place(None, "", root, 0))
        if like is not None:
            _own_keys(part.references)
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


def _own_keys(references: list[Reference]) -> None:
    """Give storages the keys that they had in the part that they came in."""
    for reference in references:
        reference.storage.key = storage_id(reference.node).key.partition("/")[2]
        reference.node.id = changed_id(reference.node, key=reference.storage.key)
