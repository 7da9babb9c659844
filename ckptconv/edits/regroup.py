"""Split, join and stack tensors in the graph of a checkpoint, by the rules of ``--regroup``.

A part whose elements follow one another in its storage becomes a view of that storage, so no bytes move. Everything
else gets a storage of its own, whose bytes are ranges of others, or are assembled from blocks of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from operator import add, mul

from ckptconv.byteranges.spans import Assemble, ChunkPlacement
from ckptconv.checkpoint.blocks import assembled, blocks_of, cut
from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import PARAMETER, STRIDED
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.storage_ids import changed_id, storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Reference, Storage, TensorInfo, row_major
from ckptconv.dtypes import get_dtype
from ckptconv.edits.changes import Changes, NameChange, Regrouping
from ckptconv.edits.companions import check_companions
from ckptconv.edits.options import Edits
from ckptconv.edits.regroup_files import check_model, sizes_in
from ckptconv.edits.regroup_plan import Group, Planner
from ckptconv.edits.regroup_rules import Rule
from ckptconv.edits.rename import rename_keys, replace_names
from ckptconv.errors import NoMatchError, RefusedError, some
from ckptconv.hints import Placeholder, command, option
from ckptconv.pickles.graph import Call, Dict, Effect, PersistentId, Tuple, Value, args_of, set_items, strings_of

_Shape = tuple[int, ...]


def regroup(checkpoint: Checkpoint, edits: Edits, changes: Changes) -> None:
    """Apply the rules of `edits` to the state dicts of `checkpoint`, which is changed in place.

    Raises:
        NoMatchError: A rule, or a file of rules, matches no name.
        RefusedError: Tensors do not fit a rule, or something would be broken that belongs to them.
        UsageError: A size is named in a rule, and nothing says how much it is.
    """
    detected, where = checkpoint.detected, checkpoint.source.path
    dicts = [_Items(found, where) for found in detected.state_dicts]
    tensors = _Tensors(checkpoint)
    matched: set[str | Rule] = set()
    for rule in edits.regroup:
        if _apply(rule, dicts, tensors, edits, changes):
            matched.add(rule.file or rule)
    for rule in edits.regroup:
        if (rule.file or rule) not in matched:
            names = [name for each in dicts for name in each.before]
            raise NoMatchError(
                f"no rule of {rule.file} matches a name" if rule.file else f"no name matches the rule {rule}",
                where=where,
                got=some(names) or "no state dict",
                hint=None if names else detected.hint_of_modules(),
                unmatched=("regroup", rule.file or rule),
            )
    if tensors.taken:
        _refuse_optimizers(checkpoint)
    followed: set[int] = set()
    for each in dicts:
        check_companions(each.found.path, each.before, each.values, each.groups, where, changes)
        each.write()
        if each.found.metadata is not None and id(each.found.metadata) not in followed:
            followed.add(id(each.found.metadata))
            _follow(each)
    tensors.conclude()


class _Items:
    """The items of a state dict while rules change them.

    Attributes:
        found: The state dict.
        before: Its names before all rules.
        values: The values by name.
        groups: The groups of tensors so far.
        origin: The name in whose place each new name stands.
    """

    def __init__(self, found: StateDict, where: object) -> None:
        self.found = found
        self.before = found.names()
        self.values: dict[str, Value] = {}
        self.groups: list[Group] = []
        self.origin: dict[str, str] = {}
        self._cells: list[tuple[Effect, list[tuple[Value, Value]]]] = []  # what stands for each item of the source
        self._cell_of: dict[str, int] = {}
        for effect, i in found.node.pairs():
            key, value = effect.values[i], effect.values[i + 1]
            if isinstance(key, str):
                if key in self.values:
                    raise RefusedError(f"the name {key} occurs twice", where=where, got=found.path)
                self.values[key], self._cell_of[key] = value, len(self._cells)
            self._cells.append((effect, [(key, value)]))

    def first(self, names: Iterable[str]) -> str:
        """Return the one of `names` that stands first."""
        wanted = {*names}
        cell = min(self._cell_of[name] for name in wanted)
        return next(key for key, _ in self._cells[cell][1] if isinstance(key, str) and key in wanted)

    def rename(self, new: Mapping[str, str]) -> None:
        """Change names, all at once."""
        cells = {self._cell_of[name] for name in new}
        for cell in cells:
            items = self._cells[cell][1]
            items[:] = [(new.get(key, key) if isinstance(key, str) else key, value) for key, value in items]
        self.values = {new.get(name, name): value for name, value in self.values.items()}
        self._cell_of = {new.get(name, name): cell for name, cell in self._cell_of.items()}
        self.origin |= {becomes: self.origin.get(old, old) for old, becomes in new.items()}

    def regroup(self, group: Group, values: Sequence[Value]) -> None:
        """Put the new tensors of `group` where the first of the old ones stands, and remove these."""
        first = self.first(group.old)
        home = self._cell_of[first]
        old, new = {*group.old}, dict(zip(group.new, values, strict=True))
        for cell in {self._cell_of[name] for name in old}:
            items: list[tuple[Value, Value]] = []
            for key, value in self._cells[cell][1]:
                if key == first and cell == home:
                    items += new.items()
                elif not (isinstance(key, str) and key in old):
                    items.append((key, value))
            self._cells[cell][1][:] = items
        for name in old:
            del self.values[name], self._cell_of[name]
        self.values |= new
        self._cell_of |= dict.fromkeys(new, home)
        self.origin |= dict.fromkeys(new, self.origin.get(first, first))
        self.groups.append(group)

    def write(self) -> None:
        """Give the items to the effects that set them."""
        if not self.origin:
            return
        by_effect: dict[int, tuple[Effect, list[Value]]] = {}
        for effect, items in self._cells:
            values = by_effect.setdefault(id(effect), (effect, []))[1]
            for item in items:
                values += item
        for effect, values in by_effect.values():
            effect.opcode, effect.values = "SETITEMS", values
        node = self.found.node
        node.effects = [effect for effect in node.effects if effect.values or id(effect) not in by_effect]


def _apply(rule: Rule, dicts: list[_Items], tensors: _Tensors, edits: Edits, changes: Changes) -> bool:
    """Apply `rule` to the state dicts `dicts`, and return whether it matched a name."""
    patterns = [item.pattern for item in rule.read if item.pattern]
    if not any(pattern.match(name) for each in dicts for name in each.values for pattern in patterns):
        return False
    if (about := check_model(tensors.checkpoint.source, rule)) and about not in changes.notes:
        changes.notes.append(about)
    if wanted := rule.values():
        rule = rule.resolved(sizes_in(tensors.checkpoint.source, wanted, dict(edits.sizes), rule))
    planner = Planner(rule, tensors.where)
    below, matched = 0, False
    for each in dicts:
        planned = planner.plan(each.values, lambda name, each=each: tensors.plain(each.values[name]))  # type: ignore[misc]
        below += planned.below
        matched = matched or bool(planned.groups or planned.renamed)
        if planned.renamed:
            each.rename(planned.renamed)
            named = {old: new for old, new in planned.renamed.items() if old != new}
            changes.names += [NameChange(each.found.path, old, new) for old, new in named.items()]
        for group in planned.groups:
            nodes = [node for name in group.old if isinstance(node := each.values[name], Call)]
            like = nodes[group.old.index(each.first(group.old))]
            changes.left_behind += tensors.left_behind(group, nodes[0])
            each.regroup(group, tensors.made(group, nodes, like))
            changes.regrouped.append(Regrouping(each.found.path, str(rule), *group.shown))
        for optimizer in tensors.checkpoint.detected.optimizers if planned.renamed else ():
            replace_names(optimizer, planned.renamed)
    if below:
        text = f"{below:,} names stay as they are, because a number in them would be below 0: "
        changes.notes.append(text + option("regroup", (str(rule),)))
    return matched


class _Tensors:
    """Makes tensors of others in the graph of `checkpoint`.

    Attributes:
        taken: The views of which others were made, each with its path.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.where = checkpoint.source.path
        self.taken: dict[tuple[object, ...], str] = {}
        self._infos = dict(checkpoint.tensor_nodes)
        self._keys = {*checkpoint.storages}
        self._references: dict[Storage, PersistentId] = {}
        self._made: dict[tuple[object, ...], list[Call]] = {}

    def plain(self, node: Value) -> TensorInfo | None:
        """Return the tensor that `node` makes, or None if it is not a plain strided one."""
        info = self._infos.get(id(node))
        if info is None or info.kind != "strided" or info.storage is None or info.own_device is not None:
            return None
        inner = _inner(node)
        is_simple = inner is not None and str(inner.callable) in _REBUILD and not _has_more(inner)
        return info if is_simple and get_dtype(info.dtype).packed == 1 else None

    def left_behind(self, group: Group, node: Call) -> list[LeftBehind]:
        """Return what `group`, a split of `node`, leaves behind."""
        geometry, info = group.geometry, self._infos[id(node)]
        if geometry.named == len(geometry.sizes) or not geometry.sizes or not geometry.sizes[-1]:
            return []
        rest, size = geometry.sizes[-1], sum(geometry.sizes)
        path = f"{info.path}, {rest:,} of {size:,} along dimension {geometry.dim}"
        return [LeftBehind(path, info.nbytes // size * rest, "the rule leaves it behind")]

    def made(self, group: Group, nodes: list[Call], like: Call) -> list[Call]:
        """Return the new tensors of `group`, made of `nodes`; a storage of their own gets its key like that of `like`.

        Tensors that were tied before are so afterwards. Raises RefusedError.
        """
        infos = [self._infos[id(node)] for node in nodes]
        self.taken.update((info.view, info.path) for info in infos)
        kinds = {(info.requires_grad, info.is_parameter, info.conj, info.neg) for info in infos}
        if len(kinds) > 1:
            raise RefusedError(
                f"{group.rule}: some parts are parameters or require grad, and others do not",
                where=self.where,
                got=some(group.old),
            )
        known = group.rule.whole_is_read, group.geometry, *(info.view for info in infos), infos[0].is_parameter
        if known not in self._made:
            split = group.rule.whole_is_read
            self._made[known] = self._split(group, infos[0], like) if split else [self._whole(group, infos, like)]
        return self._made[known]

    def _whole(self, group: Group, infos: list[TensorInfo], like: Call) -> Call:
        """Return the tensor that consists of the parts `infos`."""
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
        """Return the parts of the tensor `info`."""
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
        """Return the blocks of `info` in another `shape`. Raise RefusedError if its bytes cannot be taken apart."""
        blocks = blocks_of(info, shape, stride)
        if blocks is None:
            raise RefusedError(
                f"the bytes of {info.path} cannot be regrouped as they are stored (deflated, or in pieces)",
                where=self.where,
                hint="convert it first: " + command("convert", self.where, Placeholder("OUT")),
            )
        return blocks

    def _stored(
        self, shape: _Shape, refined: _Shape, blocks: list[ChunkPlacement], infos: list[TensorInfo], like: Call
    ) -> Call:
        """Return a tensor of `shape` on a storage of its own, which consists of `blocks` of the tensors `infos`."""
        like_info = self._infos[id(like)]
        old = like_info.storage
        assert old is not None
        used = {id(block.of) for block in blocks}
        spans = {id(span): span for info in infos if info.storage for span in info.storage.data.with_checksums()}
        verified = tuple(span for key, span in spans.items() if key not in used)
        itemsize = get_dtype(like_info.dtype).itemsize
        data = assembled(refined, itemsize, blocks, self.where, verified)
        key = next(key for n in count(1) if (key := f"{old.key}.{n}") not in self._keys)
        self._keys.add(key)
        return self._tensor(like, like_info, Storage(key, old.device, data.length, data), 0, shape)

    def _tensor(self, like: Call, info: TensorInfo, storage: Storage, offset: int, shape: _Shape) -> Call:
        """Return a call that makes a row-major tensor of `shape` on `storage`, in all else like `like`."""
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
        """Bring the checkpoint up to date. Raise RefusedError if a tensor stays that is tied to one that went."""
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
                    where=self.where,
                    expected="a rule for each name of a tensor",
                )


_REBUILD = STRIDED[:3]


def _inner(node: Value) -> Call | None:
    """Return the call that makes the strided tensor of `node`, which can be a plain parameter of it. Else None."""
    if isinstance(node, Call) and str(node.callable) == PARAMETER[0] and not _has_more(node):
        node = args_of(node)[0]
    return node if isinstance(node, Call) else None


def _has_more(call: Call) -> bool:
    """Return whether `call`, of a rebuild function, makes more than a plain tensor: one with attributes or hooks."""
    hooks = (each for each in args_of(call)[1:] if isinstance(each, Call))
    return bool(call.effects) or any(any(each.pairs()) or each.states() for each in hooks)


def _fresh(value: Value) -> Value:
    """Return `value`, an argument of a rebuild function, or a new one if it is a mapping of hooks."""
    is_mapping = isinstance(value, Call) and not args_of(value)
    return Call(value.kind, value.callable, Tuple([])) if is_mapping and isinstance(value, Call) else value


def _refuse_optimizers(checkpoint: Checkpoint) -> None:
    """Raise RefusedError if there is an optimizer, whose state would be that of other tensors."""
    nodes = checkpoint.detected.optimizer_nodes
    paths = tuple(dict.fromkeys(place.path for place in checkpoint.places if id(place.node) in nodes))
    if paths:
        raise RefusedError(
            "the optimizer has a state for each tensor that is regrouped, and does not follow",
            where=checkpoint.source.path,
            got=some(paths),
            hint="without it: " + option("drop", paths),
        )


def _follow(items: _Items) -> None:
    """Change the module paths in ``_metadata`` as the names of its state dict changed."""
    metadata = items.found.metadata
    assert metadata is not None
    before, after = _modules(items.before), _modules(items.values)
    known = strings_of(metadata)
    origin: dict[str, str] = {}
    for new, old in items.origin.items():
        a, b = new.split(".")[:-1], old.split(".")[:-1]
        for depth in range(len(a), 0, -1) if len(a) == len(b) else [len(a)]:
            origin.setdefault(".".join(a[:depth]), ".".join(b[:depth] if len(a) == len(b) else b))
    added: list[Value] = []
    for module in after:
        if module not in before and module not in known and known.keys() & before.keys():
            like = known.get(origin.get(module, module))
            version = like.entries() if isinstance(like, Dict) else ()
            added += (module, set_items(Dict(), [word for pair in version for word in pair] or ["version", 1]))
    gone = before.keys() - after.keys()
    rename_keys(metadata, lambda path: None if path in gone else path)
    set_items(metadata, added)


def _modules(names: Iterable[str]) -> dict[str, None]:
    """Return the paths of the modules that contain `names`, without the outermost, in order."""
    modules: dict[str, None] = {}
    for name in names:
        module = name.rpartition(".")[0]
        path = module
        above: list[str] = []
        while path and path not in modules:
            above.append(path)
            path = path.rpartition(".")[0]
        modules.update(dict.fromkeys(reversed(above)))
    return modules
