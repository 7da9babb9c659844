"""Rewrite strided tensors: change their dtype, or remove the bytes of storages that no tensor uses.

Source: ``torch/_utils.py`` of 2.13. ``_rebuild_tensor_v2`` takes the dtype from the class of the storage.
``_rebuild_tensor_v3`` takes it as an argument; it is for dtypes without a storage class.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, count

from ckptconv.byteranges.spans import Cast, Concat, Data, Inflate, Piece
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import (
    FROM_CPU_TENSOR,
    PARAMETER,
    TensorReader,
    cpu_tensor_in,
    strided_part,
)
from ckptconv.checkpoint.storage_ids import changed_id, storage_id
from ckptconv.checkpoint.tensor_info import Reference, Storage, TensorInfo, extent
from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS, UNTYPED, DType, get_dtype
from ckptconv.edits.changes import Changes, Dropped
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Global, Node, PersistentId, Tuple, Value, args_of, children, walk

_Range = tuple[int, int]  # the first byte, and the byte after the last one


@dataclass(eq=False, slots=True)
class View:
    """A strided tensor.

    Attributes:
        call: The call that builds the tensor.
        reference: The persistent id of its storage in the source.
        info: The tensor as the call describes it now.
        storage: Its storage now.
    """

    call: Call
    reference: PersistentId
    info: TensorInfo
    storage: Storage


@dataclass(frozen=True)
class Group:
    """Views that get one common storage.

    Attributes:
        views: The views, all of one old storage.
        dtype: Their new dtype, or None to keep their dtype.
        paths: Their paths, for messages.
    """

    views: list[View]
    dtype: str | None = None
    paths: tuple[str, ...] = ()


class Views:
    """The strided tensors of a checkpoint, including those inside other tensors.

    :meth:`restate` changes the calls. Call :meth:`conclude` after all changes.

    Attributes:
        byteorder: The byte order of the checkpoint.
        of_storage: The views of each storage.
        dtypes_of: The dtypes of these views.
        used_otherwise: The storages to which anything other than a view refers.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        index = checkpoint.index
        self._checkpoint = checkpoint
        self.byteorder = checkpoint.byteorder
        self._of_call: dict[int, View] = {}
        self._copies: list[tuple[Call, Call]] = []  # a call that copies a CPU tensor to a device, and the tensor's call
        self._words: dict[str, Global] = {}
        self._nodes: dict[int, dict[Storage, PersistentId]] = {}  # by the id of the old reference: the new ones
        self._keys = dict.fromkeys(checkpoint.storages, 1)
        self.of_storage: dict[Storage, list[View]] = {}
        self.dtypes_of: dict[Storage, set[str]] = {}
        reader = TensorReader(index.storage_of, str(checkpoint.source.path))
        others = [*index.graph.discarded, index.graph.root]  # the nodes from which views are not searched
        for node in walk([*index.graph.discarded, index.graph.root]):
            if not isinstance(node, Call):
                continue
            part = strided_part(node)
            if part is None:
                if (inner := cpu_tensor_in(node)) is not None:
                    self._copies.append((node, inner))
                continue
            info = index.tensor_nodes.get(id(node)) or reader.strided_or_none(part.function, part.args.items)
            if info is None or info.storage is None:
                continue
            reference = part.args.items[0]
            assert isinstance(reference, PersistentId)
            view = self._of_call[id(node)] = View(node, reference, info, info.storage)
            self.of_storage.setdefault(info.storage, []).append(view)
            self.dtypes_of.setdefault(info.storage, set()).add(info.dtype)
            parents = [node, node.args, part.args] if part.nested else [node, part.args]
            for parent, child in zip(parents, [*parents[1:], reference], strict=True):
                rest = [*children(parent)]
                rest.remove(child)
                others += rest
        self.used_otherwise = set(index.storages_below(*others, seen={*self._of_call}))

    def at(self, node: Node) -> View | None:
        """Return the view of the tensor `node`. Return None if it is not strided.

        `node` can also be a parameter of a strided tensor, or a copy of one to a device.
        """
        around = (*PARAMETER, FROM_CPU_TENSOR)
        while isinstance(node, Call) and id(node) not in self._of_call and str(node.callable) in around:
            inner = args_of(node)[0] if args_of(node) else None
            if not isinstance(inner, Call):
                return None
            node = inner
        return self._of_call.get(id(node))

    def restate(self, storage: Storage, groups: list[Group], *, pack: bool) -> None:
        """Give each group of views its own storage. The first group keeps the object `storage`, with changed content.

        Args:
            storage: The storage.
            groups: All views of the storage, in groups.
            pack: Whether to remove the bytes of each new storage that its views do not use.
        """
        complete = storage.data
        for i, group in enumerate(groups):
            ranges = _packed_ranges(complete, group.views) if pack else [(0, complete.length)]
            starts = [start for start, _ in ranges]
            before_each = [0, *accumulate(stop - start for start, stop in ranges)]
            data = _packed(complete, ranges)
            old = group.views[0].info.dtype
            if group.dtype and group.dtype != old:
                shown = _reach(group.views, complete.length) if ranges == [(0, complete.length)] else ranges
                data = _cast(data, old, group, self._checkpoint.byteorder, shown if shown != ranges else [])
            own = new_storage(storage, data, self._keys) if i > 0 else storage
            own.data, own.nbytes = data, data.length
            for view in group.views:
                before = view.info
                old_start = bisect_right(starts, before.offset * get_dtype(before.dtype).itemsize) - 1
                gone = starts[old_start] - before_each[old_start] if ranges else 0
                view.info, view.storage = _moved(before, own, group.dtype or before.dtype, gone), own
                self._say(view, before)

    def _say(self, view: View, before: TensorInfo) -> None:
        """Rewrite the call and the persistent id of `view` from its current storage and tensor.

        `before` is the old tensor.
        """
        dtype, changed = get_dtype(view.info.dtype), view.info.dtype != before.dtype
        known = self._nodes.setdefault(id(view.reference), {})
        if view.storage not in known:
            cls = storage_id(view.reference).cls
            if changed:
                name = dtype.storage_class
                cls = self._word("torch", name) if name else self._word("torch.storage", UNTYPED.storage_class or "")
            numel = view.storage.nbytes // BY_STORAGE_CLASS[cls.name].itemsize
            id_ = changed_id(view.reference, cls=cls, key=view.storage.key, numel=numel)
            known[view.storage] = PersistentId(id_, view.reference.order)
        else:
            self._checkpoint.graph.shared.add(known[view.storage])
        part = strided_part(view.call)
        assert part is not None
        args = [known[view.storage], view.info.offset, *part.args.items[2:]]
        function = part.callable
        if changed:
            function, args = self._of_dtype(part.function, args, dtype)
        if part.nested:
            _, kept, _, *rest = args_of(view.call)
            view.call.args = Tuple([function, kept, Tuple(args), *rest])
        else:
            view.call.callable, view.call.args = function, Tuple(args)

    def _of_dtype(self, function: str, args: list[Value], dtype: DType) -> tuple[Value, list[Value]]:
        """Return the rebuild function for `dtype` and its arguments, in place of `function` with `args`."""
        if function.endswith("_v3"):
            del args[6]
        if dtype.storage_class is not None:
            name = "_rebuild_tensor" if len(args) == 4 else "_rebuild_tensor_v2"
            return self._word("torch._utils", name), args
        if len(args) == 4:
            args += [False, Call("REDUCE", self._word("collections", "OrderedDict"), Tuple([]))]
        return self._word("torch._utils", "_rebuild_tensor_v3"), [*args[:6], self._word("torch", dtype.name), *args[6:]]

    def _word(self, module: str, name: str) -> Global:
        """Return the node of the global ``module.name``: the node of the source, if it has one, or a new node.

        All calls return the same node.
        """
        if name not in self._words:
            graph = self._checkpoint.graph
            known = (node for node in graph.globals if (node.module, node.name) == (module, name))
            found = self._words[name] = next(known, None) or Global(module, name)
            graph.shared.add(found)
            if found not in graph.globals:
                graph.globals.append(found)
        return self._words[name]

    def conclude(self) -> None:
        """Update the references of the checkpoint, and the dtype in calls that copy its tensors to a device."""
        checkpoint = self._checkpoint
        for call, inner in self._copies:
            if view := self._of_call.get(id(inner)):  # such a call contains the dtype too
                data, _, *others = args_of(call)
                call.args = Tuple([data, self._word("torch", view.info.dtype), *others])
        for nodes in self._nodes.values():
            for node in nodes.values() if len(nodes) > 1 else ():  # each is written at its first use
                node.order = None
        checkpoint.references = [
            Reference(node, storage)
            for each in checkpoint.references
            for storage, node in self._nodes.get(id(each.node), {each.storage: each.node}).items()
        ]
        checkpoint.changed()


def new_storage(old: Storage, data: Data, keys: dict[str, int]) -> Storage:
    """Return a storage of the bytes `data` on the device of `old`.

    Its key begins with that of `old` and is not one of `keys`, to which it is added. Each value of `keys` is
    the first number that was not yet tried for a key, so that no number is tried again.
    """
    number, key = next((n, key) for n in count(keys.get(old.key, 1)) if (key := f"{old.key}.{n}") not in keys)
    keys[old.key], keys[key] = number + 1, 1
    return Storage(key, old.device, data.length, data)


def _packed_ranges(data: Data, views: list[View]) -> list[_Range]:
    """Return the ranges of `data` that `views` use.

    Return the complete range if `data` is deflated or a dtype is packed.
    """
    if isinstance(data.uncast(), Inflate) or any(get_dtype(view.info.dtype).packed != 1 for view in views):
        return [(0, data.length)]
    return _reach(views, data.length)


def _reach(views: list[View], length: int) -> list[_Range]:
    """Return the ranges that `views` use of a storage of `length` bytes, as start and end.

    The ranges are sorted and do not touch, and consist of complete elements of the widest dtype.
    """
    unit = max(max(get_dtype(view.info.dtype).itemsize, storage_id(view.reference).dtype.itemsize) for view in views)
    ranges: list[_Range] = []
    for start, stop in sorted(extent(view.info) for view in views if 0 not in view.info.shape):
        start, stop = start // unit * unit, min(-(-stop // unit) * unit, length)
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        else:
            ranges.append((start, stop))
    return ranges


def _packed(data: Data, ranges: list[_Range]) -> Data:
    """Return the `ranges` of `data`, joined."""
    if ranges == [(0, data.length)]:
        return data
    if isinstance(data, Cast):
        old, new = BY_NAME[data.old].itemsize, BY_NAME[data.new].itemsize
        of = _chain(data.of, [(start // new * old, stop // new * old) for start, stop in ranges])
        return replace(data, of=of, length=of.length // old * new, shown=())
    return _chain(data, ranges)


def _chain(data: Piece, ranges: list[_Range]) -> Concat:
    """Return the `ranges` of `data`, which consists of ranges of the source, joined."""
    spans = tuple(span for start, stop in ranges for span in data.slice(start, stop - start).ranges())
    verified = data.with_checksums() if data.stored() is None else ()
    return Concat(spans, data.stored(), sum(stop - start for start, stop in ranges), verified)


def _cast(data: Data, old: str, group: Group, byteorder: str, shown: list[_Range]) -> Cast:
    """Return `data`, elements of the dtype `old`, cast to the dtype of `group`, in the same byte order.

    `shown` are the ranges of bytes that views use, for the checks of values. If it is empty, all bytes are used.
    """
    assert not isinstance(data, Cast)
    new = group.dtype or old
    big = byteorder == "big"
    before, after = BY_NAME[old].itemsize, BY_NAME[new].itemsize
    return Cast(
        data,
        old,
        new,
        data.length // before * after,
        swapped_in=big and before > 1,
        swapped_out=big and after > 1,
        paths=group.paths,
        shown=tuple((start // before, stop // before) for start, stop in shown),
    )


def _moved(info: TensorInfo, storage: Storage, dtype: str, gone: int) -> TensorInfo:
    """Return `info` with `dtype` on `storage`. The new storage lacks `gone` bytes of the old one before the tensor."""
    old, new = get_dtype(info.dtype), get_dtype(dtype)
    offset = info.offset
    if 0 in info.shape:
        offset = min(offset, storage.nbytes // new.itemsize)
    elif old.packed == 1:
        offset -= gone // old.itemsize
    nbytes = info.nbytes if old == new else info.nbytes // old.itemsize * new.itemsize
    return replace(info, storage=storage, dtype=dtype, offset=offset, nbytes=nbytes)


def compact(checkpoint: Checkpoint, changes: Changes) -> None:
    """Remove the bytes that no view uses from the storages of `checkpoint`. The number of bytes goes into `changes`.

    A storage that is deflated, or to which anything other than a view refers, does not change. If no storage
    changes, a note is added.
    """
    views = Views(checkpoint)
    storages = dropped = 0
    for storage, users in views.of_storage.items():
        before = storage.nbytes
        kept = sum(stop - start for start, stop in _packed_ranges(storage.data, users))
        if storage in views.used_otherwise or kept == before:
            continue
        views.restate(storage, [Group(users)], pack=True)
        storages, dropped = storages + 1, dropped + before - storage.nbytes
    views.conclude()
    changes.compacted = Dropped(storages, dropped)
    if not storages:
        what = "tensors use every byte of the storages that can be compacted, so "
        changes.notes.append(what + option("compact") + " changed nothing")
