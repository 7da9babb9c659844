"""Rewrite strided views: give tensors another dtype, or drop the storage bytes that no tensor uses.

Source: ``torch/_utils.py`` of 2.13. ``_rebuild_tensor_v2`` has its dtype from the storage's class,
``_rebuild_tensor_v3`` as an argument: it is for dtypes that no storage class has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, count

from ckptconv.byteranges.spans import Cast, Concat, Data, Inflate, Piece
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import (
    FROM_CPU_TENSOR,
    PARAMETER,
    StridedPart,
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
from ckptconv.pickles.graph import Call, Global, Node, PersistentId, Tuple, Value, args_of, children

_Range = tuple[int, int]  # of bytes: the first, and the one behind the last


@dataclass(eq=False, slots=True)
class View:
    """A strided tensor: the `call` that makes it, `nested` in one that gives it a class.

    What it says, with the storage that it is on; the `reference` in it, as the source has it.
    """

    call: Call
    nested: bool
    reference: PersistentId
    info: TensorInfo
    storage: Storage


@dataclass(frozen=True)
class Group:
    """`views` of one storage that share its bytes.

    `dtype` is what they become, None: they keep theirs. `paths` are where they stand.
    """

    views: list[View]
    dtype: str | None = None
    paths: tuple[str, ...] = ()


class Views:
    """The strided tensors of `checkpoint`, wherever they stand, inside of other tensors too.

    What :meth:`restate` changes, :meth:`conclude` makes the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.byteorder = checkpoint.byteorder
        self._of_call: dict[int, View] = {}
        self._words: dict[str, Global] = {}
        self._nodes: dict[int, dict[Storage, PersistentId]] = {}  # what a reference becomes on each storage
        self._keys = {*checkpoint.storages}
        self.of_storage: dict[Storage, list[View]] = {}
        self.dtypes_of: dict[Storage, set[str]] = {}
        #: Storages that something else refers to.
        self.used_otherwise: set[Storage] = set()
        self._read()

    def _read(self) -> None:
        index = self._checkpoint.index
        reader = TensorReader(index.storage_of, str(self._checkpoint.source.path))
        parts: dict[int, StridedPart] = {}  # by the id of the call
        for node in index.nodes:
            part = strided_part(node) if isinstance(node, Call) else None
            info = index.tensor_nodes.get(id(node)) if part else None  # read already
            if part and info is None:
                info = reader.strided_or_none(part.function, part.args.items)
            if part is None or info is None or info.storage is None or not isinstance(node, Call):
                continue
            reference = part.args.items[0]
            assert isinstance(reference, PersistentId)
            parts[id(node)] = part
            view = self._of_call[id(node)] = View(node, part.nested, reference, info, info.storage)
            self.of_storage.setdefault(info.storage, []).append(view)
            self.dtypes_of.setdefault(info.storage, set()).add(info.dtype)
        #: Calls that copy a CPU tensor to a device, each with the call that makes this tensor.
        self._copies = [(found.call, cpu_tensor_in(found.call)) for found in index.device_arguments]
        roots = [*index.graph.discarded, index.graph.root]
        self.used_otherwise = {
            index.storage_of[id(node)] for node in _others(roots, index.nodes, parts) if id(node) in index.storage_of
        }

    def at(self, node: Node) -> View | None:
        """The view that the tensor `node` is, is a parameter of, or copies to a device."""
        around = (*PARAMETER, FROM_CPU_TENSOR)
        while isinstance(node, Call) and id(node) not in self._of_call and str(node.callable) in around:
            inner = args_of(node)[0] if args_of(node) else None
            if not isinstance(inner, Call):
                return None
            node = inner
        return self._of_call.get(id(node))

    def restate(self, storage: Storage, groups: list[Group], *, pack: bool) -> None:
        """Let each of `groups`, which have all views of `storage`, have a storage of its own, the first the old one.

        `pack`: it holds no more than they show.
        """
        whole = storage.data
        for i, group in enumerate(groups):
            ranges = _packed_ranges(whole, group.views) if pack else [(0, whole.length)]
            starts = [start for start, _ in ranges]
            before_each = [0, *accumulate(stop - start for start, stop in ranges)]
            data = _packed(whole, ranges)
            old = group.views[0].info.dtype
            if group.dtype and group.dtype != old:
                shown = _reach(group.views, whole.length) if ranges == [(0, whole.length)] else ranges
                data = _cast(data, old, group, self._checkpoint.byteorder, shown if shown != ranges else [])
            own = storage if i == 0 else Storage(self._new_key(storage.key), storage.device, 0, data)
            own.data, own.nbytes = data, data.length
            for view in group.views:
                before = view.info
                old_start = bisect_right(starts, before.offset * get_dtype(before.dtype).itemsize) - 1
                gone = starts[old_start] - before_each[old_start] if ranges else 0
                view.info, view.storage = _moved(before, own, group.dtype or before.dtype, gone), own
                self._say(view, before)

    def _new_key(self, key: str) -> str:
        """A key that no storage has, for one that was part of `key`'s."""
        new = next(new for i in count(1) if (new := f"{key}.{i}") not in self._keys)
        self._keys.add(new)
        return new

    def _say(self, view: View, before: TensorInfo) -> None:
        """Let `view`'s call, which says `before`, say what it is now, and its reference what its storage is."""
        dtype, changed = get_dtype(view.info.dtype), view.info.dtype != before.dtype
        known = self._nodes.setdefault(id(view.reference), {})
        if view.storage not in known:
            cls = self._storage_class(dtype) if changed else storage_id(view.reference).cls
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
        if view.nested:
            _, kept, _, *rest = args_of(view.call)
            view.call.args = Tuple([function, kept, Tuple(args), *rest])
        else:
            view.call.callable, view.call.args = function, Tuple(args)

    def _of_dtype(self, function: str, args: list[Value], dtype: DType) -> tuple[Value, list[Value]]:
        """The function that makes a tensor of `dtype`, and its arguments, instead of `function` with `args`."""
        if function.endswith("_v3"):
            del args[6]
        if dtype.storage_class is not None:
            name = "_rebuild_tensor" if len(args) == 4 else "_rebuild_tensor_v2"
            return self._word("torch._utils", name), args
        if len(args) == 4:
            args += [False, Call("REDUCE", self._word("collections", "OrderedDict"), Tuple([]))]
        return self._word("torch._utils", "_rebuild_tensor_v3"), [*args[:6], self._word("torch", dtype.name), *args[6:]]

    def _storage_class(self, dtype: DType) -> Global:
        name = dtype.storage_class
        return self._word("torch", name) if name else self._word("torch.storage", UNTYPED.storage_class or "")

    def _word(self, module: str, name: str) -> Global:
        """A global, the same for all that say it, also in the source."""
        if name not in self._words:
            graph = self._checkpoint.graph
            known = (node for node in graph.globals if (node.module, node.name) == (module, name))
            found = self._words[name] = next(known, None) or Global(module, name)
            graph.shared.add(found)
            if found not in graph.globals:
                graph.globals.append(found)
        return self._words[name]

    def conclude(self) -> None:
        """Let the checkpoint's references say what its graph says now."""
        checkpoint = self._checkpoint
        for call, inner in self._copies:
            if view := self._of_call.get(id(inner)):  # such a call says the dtype as well
                data, _, *others = args_of(call)
                call.args = Tuple([data, self._word("torch", view.info.dtype), *others])
        for nodes in self._nodes.values():
            for node in nodes.values() if len(nodes) > 1 else ():  # each is made where it is needed first
                node.order = None
        checkpoint.references = [
            Reference(node, storage)
            for each in checkpoint.references
            for storage, node in self._nodes.get(id(each.node), {each.storage: each.node}).items()
        ]
        checkpoint.changed()


def _others(roots: list[Value], nodes: list[Node], parts: Mapping[int, StridedPart]) -> Iterator[Value]:
    """What stands elsewhere than where the tensors' calls, whose `parts` are given, have their storages: anything that
    `nodes`, reached from `roots`, have in them.

    A storage belongs where ``_rebuild_tensor_v2(STORAGE, ...)`` has it, or ``_rebuild_from_type_v2(function, class,
    (STORAGE, ...), state)``. Arguments are tuples, which others can have as well: then it stands elsewhere too.
    """
    arguments = {id(part.args): part.args for part in parts.values()}
    outer = {
        id(node.args): part.args
        for node in nodes
        if isinstance(node, Call) and (part := parts.get(id(node))) and part.nested
    }
    yield from roots
    for node in nodes:
        for i, child in enumerate(children(node)):
            if id(node) in parts and isinstance(node, Call) and child is node.args:
                continue
            if id(node) in outer and child is outer[id(node)] and i == 2:
                continue
            if id(node) in arguments and i == 0 and id(node) not in outer:
                continue
            yield child
            inner = outer.get(id(child)) or arguments.get(id(child))
            if inner is not None:  # somebody else's arguments too
                yield inner.items[0]


def _packed_ranges(data: Data, views: list[View]) -> list[_Range]:
    """The bytes of `data` that `views` reach over; all of them where they cannot be taken apart."""
    if isinstance(data.uncast(), Inflate) or any(get_dtype(view.info.dtype).packed != 1 for view in views):
        return [(0, data.length)]
    return _reach(views, data.length)


def _reach(views: list[View], length: int) -> list[_Range]:
    """The bytes that `views` reach over of a storage of this `length`, in whole elements of the widest dtype."""
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
    """`ranges` of `data`, one behind another."""
    if ranges == [(0, data.length)]:
        return data
    if isinstance(data, Cast):
        old, new = BY_NAME[data.old].itemsize, BY_NAME[data.new].itemsize
        of = _chain(data.of, [(start // new * old, stop // new * old) for start, stop in ranges])
        return replace(data, of=of, length=of.length // old * new, shown=())
    return _chain(data, ranges)


def _chain(data: Piece, ranges: list[_Range]) -> Concat:
    """These ranges of what is made of ranges of the source."""
    spans = tuple(span for start, stop in ranges for span in data.slice(start, stop - start).ranges())
    return Concat(spans, data.stored(), sum(stop - start for start, stop in ranges))


def _cast(data: Data, old: str, group: Group, byteorder: str, shown: list[_Range]) -> Cast:
    """`data`, whose elements are of the dtype `old`, as `group`'s, in the same order of bytes.

    `shown` are the bytes that matter, none: all.
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
    """`info` as `dtype` on `storage`, in which so many bytes before it are `gone` of the one that it was on."""
    old, new = get_dtype(info.dtype), get_dtype(dtype)
    offset = info.offset
    if 0 in info.shape:
        offset = min(offset, storage.nbytes // new.itemsize)
    elif old.packed == 1:
        offset -= gone // old.itemsize
    nbytes = info.nbytes if old == new else info.nbytes // old.itemsize * new.itemsize
    return replace(info, storage=storage, dtype=dtype, offset=offset, nbytes=nbytes)


def compact(checkpoint: Checkpoint, changes: Changes) -> None:
    """Let each storage of `checkpoint` hold no more than its views reach over.

    One that something else refers to, or that is deflated, stays whole.
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
        what = "tensors show every byte of the storages that could be compacted, so "
        changes.notes.append(what + option("compact") + " changed nothing")
