"""Split, join and stack tensors in the graph of a checkpoint, by the rules of ``--regroup``.

A part whose elements are consecutive in its storage becomes a view of this storage, so no bytes move. Every other new
tensor gets a new storage. Its bytes are ranges of other storages, or are assembled from blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import add, mul
from typing import Any, TypeAlias

from ckptconv.byteranges.spans import Assemble, ChunkPlacement
from ckptconv.checkpoint.blocks import assembled, blocks_of, cut
from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import PARAMETER, STRIDED
from ckptconv.checkpoint.storage_ids import changed_id, storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Reference, Storage, TensorInfo, row_major
from ckptconv.dtypes import get_dtype
from ckptconv.edits.changes import Changes, NameChange, Regrouping
from ckptconv.edits.dtype_casts import SHARD
from ckptconv.edits.error_paths import names_checkpoint
from ckptconv.edits.options import Edits
from ckptconv.edits.regroup_files import check_model
from ckptconv.edits.regroup_items import Items, Maker, Step, apply_rules
from ckptconv.edits.regroup_plan import Group
from ckptconv.edits.regroup_rules import Rule
from ckptconv.edits.rename import rename_keys, replace_in_effects
from ckptconv.edits.views import new_storage
from ckptconv.errors import RefusedError, some
from ckptconv.hints import Placeholder, command
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Object,
    PersistentId,
    Tuple,
    Value,
    args_of,
    set_items,
    strings_of,
)
from ckptconv.work import work

_STEPS = 16  # of work for a copy of a tensor: each part of a split gets a copy of each number in the state
_Shape = tuple[int, ...]
Follow: TypeAlias = "Callable[[Tensors, Mapping[int, Sequence[Step]]], None]"


@names_checkpoint
def regroup(checkpoint: Checkpoint, edits: Edits, changes: Changes, follow: Follow | None = None) -> None:
    """Apply the rules of `edits` to the state dicts of `checkpoint`, which is changed in place.

    Args:
        checkpoint: The checkpoint.
        edits: The edits, which contain the rules and the sizes that the rules name.
        changes: The report, to which the changes are added.
        follow: A function that changes the optimizers accordingly, or None. Its arguments are the new tensors, and the
            steps of each state dict by the id of its node.

    Raises:
        NoMatchError: A rule, or a file of rules, matches no name.
        RefusedError: Tensors do not fit a rule, or a tensor that stays is tied to one that is replaced.
        UsageError: The value of a name in a rule is not known.
    """
    detected = checkpoint.detected
    dicts: list[Items[Any]] = [Items(found.items(), found.path) for found in detected.state_dicts]
    tensors = Tensors(checkpoint, changes, dict(edits.sizes))
    changes.notes += apply_rules(edits.regroup, dicts, tensors, detected.hint_of_modules())
    if follow:
        follow(tensors, {id(found.node): each.steps for each, found in zip(dicts, detected.state_dicts, strict=True)})
    followed: set[int] = set()
    for items, found in zip(dicts, detected.state_dicts, strict=True):
        for step in items.steps:
            if isinstance(step, Group):
                changes.regrouped.append(Regrouping(items.path, str(step.rule), *step.shown))
            else:
                changes.names += [NameChange(items.path, old, new) for old, new in step.items() if old != new]
        if items.origin:
            replace_in_effects(found.node, [[word for item in cell for word in item] for cell in items.cells])
        if found.metadata is not None and id(found.metadata) not in followed:
            followed.add(id(found.metadata))
            _follow(items, found.metadata)
    tensors.conclude()


class Tensors(Maker[Any]):
    """Builds new tensors from others in the graph of `checkpoint`.

    Args:
        checkpoint: The checkpoint, which is changed by :meth:`conclude`.
        changes: The report.
        sizes: The values of names in rules that the user gave.

    Attributes:
        taken: The views from which other tensors were built, each with its path.
    """

    def __init__(self, checkpoint: Checkpoint, changes: Changes, sizes: Mapping[str, int] | None = None) -> None:
        self.checkpoint = checkpoint
        self.source = checkpoint.source
        self.sizes = sizes or {}
        self._changes = changes
        self.taken: dict[tuple[object, ...], str] = {}
        self._infos = dict(checkpoint.tensor_nodes)
        self._keys = dict.fromkeys(checkpoint.storages, 1)
        self._references: dict[Storage, PersistentId] = {}
        self._made: dict[tuple[object, ...], list[Call]] = {}

    def resolved(self, rule: Rule) -> Rule:
        """Return `rule` with numbers in place of names. Add a note to the report if the rule is for other models."""
        if (about := check_model(self.checkpoint.source, rule)) and about not in self._changes.notes:
            self._changes.notes.append(about)
        return super().resolved(rule)

    def tensor(self, value: Value) -> TensorInfo | None:
        """Return the tensor that `value` builds, or None if rules cannot use it.

        Rules can use strided tensors and parameters without attributes and hooks, of a dtype that is not packed.
        """
        node, info = value, self._infos.get(id(value))
        if info is None or info.kind != "strided" or info.storage is None or info.own_device is not None:
            return None
        inner = _inner(node)
        is_simple = inner is not None and str(inner.callable) in _REBUILD and not _has_more(inner)
        return info if is_simple and get_dtype(info.dtype).packed == 1 else None

    def _left_behind(self, group: Group, node: Call) -> list[LeftBehind]:
        """Return the data of `node` that `group` leaves out of the output, because its rule ends in ``-``."""
        geometry, info = group.geometry, self._infos[id(node)]
        if geometry.named == len(geometry.sizes) or not geometry.sizes or not geometry.sizes[-1]:
            return []
        rest, size = geometry.sizes[-1], sum(geometry.sizes)
        path = f"{info.path}, {rest:,} of {size:,} along dimension {geometry.dim}"
        return [LeftBehind(path, info.nbytes // size * rest, "the rule does not use it")]

    def made(self, group: Group, values: Sequence[Call], like: Call) -> list[Call]:
        """Return the new tensors of `group`, built from `values`. `like` is as in :meth:`regrouped`.

        Raises RefusedError if they cannot be built, or if parts may be in another shard.
        """
        path = self.checkpoint.source.path
        if group.rule.stacked and not group.rule.whole_is_read and SHARD.fullmatch(path.name):
            what = "this is one of several shards, and other parts can be in the others"
            raise RefusedError(f"{group.rule}: {what}", where=path, hint="convert the whole set")
        made = self.regrouped(group, values, like)
        infos = (self._infos[id(value)] for value in values)
        self.taken.update((info.view, name) for info, name in zip(infos, group.old, strict=True))
        return made

    def regrouped(self, group: Group, values: Sequence[Call], like: Call) -> list[Call]:
        """Return the new tensors of `group`. Tensors that were tied before are tied again.

        Args:
            group: The group.
            values: The tensors from which they are built.
            like: A tensor of which the new ones get the class, the device and the start of the key of a new storage.

        Raises:
            RefusedError: Some parts are parameters or require gradients and others do not, or the bytes cannot be
                taken apart.
        """
        self._changes.left_behind += self._left_behind(group, values[0])
        infos = [self._infos[id(value)] for value in values]
        self.taken.update((info.view, info.path) for info in infos)
        kinds = {(info.requires_grad, info.is_parameter, info.conj, info.neg) for info in infos}
        if len(kinds) > 1:
            raise RefusedError(
                f"{group.rule}: some parts are parameters or require grad, and others do not",
                where=self.checkpoint.source.path,
                got=some(group.old),
            )
        known = group.rule.whole_is_read, group.geometry, *(info.view for info in infos), infos[0].is_parameter
        if known not in self._made:
            split = group.rule.whole_is_read
            self._made[known] = self._split(group, infos[0], like) if split else [self._whole(group, infos, like)]
        return self._made[known]

    def copy(self, node: Call) -> Call:
        """Return a copy of the tensor `node` on a new storage.

        Raise RefusedError if its bytes cannot be taken apart.
        """
        work().charge(_STEPS)
        info = self._infos[id(node)]
        return self._stored(info.shape, info.shape, self._blocks(info, info.shape, info.stride), [info], node)

    def _whole(self, group: Group, infos: list[TensorInfo], like: Call) -> Call:
        """Return the tensor that joins the parts `infos`. `like` is as in :meth:`regrouped`."""
        geometry = group.geometry
        depth, d = len(geometry.stack), geometry.part_dim
        blocks: list[ChunkPlacement] = []
        for box, info in zip(geometry.boxes(), infos, strict=True):
            step = geometry.sizes[box.part] // geometry.groups if d is not None else None
            shape, stride = box.sizes[depth:], geometry.refined(info.stride, d, step)
            for block in self._blocks(info, shape, stride):
                inside = map(add, box.offsets[depth:], block.offsets)
                sizes = (*box.sizes[:depth], *block.sizes)
                stride = (*row_major(sizes)[:depth], *block.stride)
                blocks.append(ChunkPlacement(block.of, (*box.offsets[:depth], *inside), sizes, stride))
        return self._stored(geometry.shape, geometry.refined(geometry.shape, geometry.dim), blocks, infos, like)

    def _split(self, group: Group, info: TensorInfo, like: Call) -> list[Call]:
        """Return the parts into which `group` splits the tensor `info`. `like` is as in :meth:`regrouped`."""
        geometry, depth = group.geometry, len(group.geometry.stack)
        step = sum(geometry.sizes) // geometry.groups if geometry.dim is not None else None
        shape = geometry.refined(info.shape, geometry.dim)
        stride = geometry.refined(info.stride, geometry.dim, step)
        itemsize = get_dtype(info.dtype).itemsize
        assert info.storage is not None
        is_whole = isinstance(info.storage.data, Assemble)  # which can be sliced nowhere
        blocks: list[ChunkPlacement] | None = None
        parts: list[Call] = []
        for box in geometry.boxes():
            sizes = box.sizes[depth:]
            usual = row_major(sizes)
            in_order = all(a == b or n == 1 for a, b, n in zip(stride[depth:], usual, sizes, strict=True))
            if 0 in sizes or (in_order and not is_whole):
                offset = min(info.offset + sum(map(mul, box.offsets, stride)), info.storage.nbytes // itemsize)
                parts.append(self._tensor(like, info, info.storage, offset, box.shape))
                continue
            if blocks is None:
                blocks = self._blocks(info, shape, stride)
            found = (cut(block, box.offsets, box.sizes, itemsize) for block in blocks)
            own = [
                replace(block, offsets=block.offsets[depth:], sizes=block.sizes[depth:], stride=block.stride[depth:])
                for block in found
                if block
            ]
            parts.append(self._stored(box.shape, sizes, own, [info], like))
        return parts

    def _blocks(self, info: TensorInfo, shape: _Shape, stride: _Shape) -> list[ChunkPlacement]:
        """Return blocks of the storage of `info` that form a tensor of this `shape` and `stride`.

        Raises RefusedError if the bytes cannot be taken apart, because they are deflated or in pieces.
        """
        blocks = blocks_of(info, shape, stride)
        if blocks is None:
            raise RefusedError(
                f"the bytes of {info.path} cannot be regrouped as they are stored (deflated, or in pieces)",
                where=self.checkpoint.source.path,
                hint="convert it first: " + command("convert", self.checkpoint.source.path, Placeholder("OUT")),
            )
        return blocks

    def _stored(
        self, shape: _Shape, refined: _Shape, blocks: list[ChunkPlacement], infos: list[TensorInfo], like: Call
    ) -> Call:
        """Return a tensor of `shape` on a new storage.

        Args:
            shape: The shape.
            refined: The shape in which the blocks have their positions.
            blocks: The blocks of which the storage consists.
            infos: The tensors that contain the blocks.
            like: As in :meth:`regrouped`.
        """
        like_info = self._infos[id(like)]
        old = like_info.storage
        assert old is not None
        used = {id(block.of) for block in blocks}
        spans = {id(span): span for info in infos if info.storage for span in info.storage.data.with_checksums()}
        verified = tuple(span for key, span in spans.items() if key not in used)
        itemsize = get_dtype(like_info.dtype).itemsize
        data = assembled(refined, itemsize, blocks, self.checkpoint.source.path, verified)
        return self._tensor(like, like_info, new_storage(old, data, self._keys), 0, shape)

    def _tensor(self, like: Call, info: TensorInfo, storage: Storage, offset: int, shape: _Shape) -> Call:
        """Return a call that builds a row-major tensor of `shape` at `offset` of `storage`, otherwise like `like`.

        `info` describes `like`.
        """
        inner = _inner(like)
        assert inner is not None
        if storage not in self._references:
            old = args_of(inner)[0]
            assert isinstance(old, PersistentId)
            numel = storage.nbytes // storage_id(old).dtype.itemsize
            self._references[storage] = PersistentId(changed_id(old, key=storage.key, numel=numel))
            self.checkpoint.graph.shared.add(self._references[storage])
        stride = row_major(shape)
        rest = [_fresh(each) for each in args_of(inner)[4:]]
        made = Call(
            "REDUCE",
            inner.callable,
            Tuple([self._references[storage], offset, Tuple([*shape]), Tuple([*stride]), *rest]),
        )
        node = made
        if like is not inner:
            node = Call("REDUCE", like.callable, Tuple([made, *map(_fresh, args_of(like)[1:])]))
        nbytes = prod(shape) * get_dtype(info.dtype).itemsize
        self._infos[id(node)] = replace(
            info, shape=shape, stride=stride, offset=offset, nbytes=nbytes, storage=storage, contiguous=True
        )
        return node

    def conclude(self) -> None:
        """Update the checkpoint. Raise RefusedError if a tensor that stays is tied to a tensor that was replaced."""
        checkpoint = self.checkpoint
        checkpoint.references += [Reference(node, storage) for storage, node in self._references.items()]
        checkpoint.graph.references += self._references.values()
        checkpoint.restrict(checkpoint.root)
        drop_effect_order(checkpoint)
        new = {id(node) for nodes in self._made.values() for node in nodes}
        for key, info in checkpoint.tensor_nodes.items():
            if key not in new and info.nbytes and info.view in self.taken:
                raise RefusedError(
                    f"{info.path} is tied to {self.taken[info.view]}, and no rule takes it",
                    where=self.checkpoint.source.path,
                    expected="a rule for each name of a tensor",
                )


_REBUILD = STRIDED[:3]


def _inner(node: Value) -> Call | None:
    """Return the call that builds the strided tensor of `node`: `node`, or the argument of a parameter without hooks.

    Return None if there is no such call.
    """
    if isinstance(node, Call) and str(node.callable) == PARAMETER[0] and not _has_more(node):
        node = args_of(node)[0]
    return node if isinstance(node, Call) else None


def _has_more(call: Call) -> bool:
    """Return whether `call`, a rebuild call, builds a tensor with attributes or hooks."""
    hooks = (each for each in args_of(call)[1:] if isinstance(each, Call))
    return bool(call.effects) or any(any(each.pairs()) or each.states() for each in hooks)


def _fresh(value: Value) -> Value:
    """Return a new empty mapping if `value`, an argument of a rebuild function, is a mapping of hooks.

    Otherwise return `value`.
    """
    is_mapping = isinstance(value, Call) and not args_of(value)
    return Call(value.kind, value.callable, Tuple([])) if is_mapping and isinstance(value, Call) else value


def _follow(items: Items[Value], metadata: Object) -> None:
    """Change the module paths in `metadata` like the names in `items`, the items of its state dict."""
    known = strings_of(metadata)
    gone, added = items.modules(known)
    rename_keys(metadata, lambda path: None if path in gone else path)
    for module, like in added.items():
        version = known.get(like)
        words = [word for pair in version.entries() for word in pair] if isinstance(version, Dict) else []
        set_items(metadata, [module, set_items(Dict(), words or ["version", 1])])
