"""Folders of DeepSpeed ZeRO: the checkpoint of all ranks, read without DeepSpeed.

Layout: :mod:`ckptconv.formats.distributed.zero_names` has the files, :mod:`ckptconv.formats.distributed.zero_flat` the
flat tensors. Model states are a dict with ``module`` (the weights in 16 bits; at stage 3 without elements),
``param_shapes`` (a list with a dict of shapes for each group, in the order of the flat data), ``shared_params`` (names
of tied parameters), ``frozen_param_shapes`` and ``frozen_param_fragments`` (parameters that are not trained), and the
other values that the run saved. Optimizer states are a dict with ``optimizer_state_dict``:

    stages 1, 2: single_partition_of_fp32_groups, base_optimizer_state (of torch; a list of states if elastic)
    stage 3:     fp32_flat_groups, optimizer_state_dict (of torch)

Sources: ``_common_checkpoint_state`` of ``deepspeed/runtime/engine.py``, and ``state_dict`` of
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and ``runtime/bf16_optimizer.py``, all of 0.19.8.

The result is the dict of model states without the keys that describe the division among ranks. Its ``module`` has the
fp32 weights, and its ``optimizer`` has the state of each parameter by name. A folder of Lightning becomes a checkpoint
of Lightning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple, NoReturn

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.blocks import assembled
from ckptconv.checkpoint.merging import Merger, empty_graph
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import ints_of
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo
from ckptconv.dtypes import BY_NAME
from ckptconv.errors import MalformedError, UnsupportedError, count, some
from ckptconv.formats.distributed.zero_flat import Cut, Flats, Parameter, Shape
from ckptconv.formats.distributed.zero_names import ZeroFiles, files_of
from ckptconv.hints import TRUSTED, Option, Placeholder, command, python_command
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    Effect,
    Global,
    List,
    Node,
    Object,
    PersistentId,
    Value,
    add_elements,
    args_of,
    is_count,
    members_of,
    set_items,
    strings_of,
    type_of,
    walk,
)
from ckptconv.work import work

NAME = "DeepSpeed ZeRO"
_STEPS = 4  # of work for a shape, or for a value in the state of a parameter
_COPY = "copy the files of all ranks into one folder, with their original names"
#: Keys of model states that describe the division among ranks.
_OF_PARTS = ("module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
#: Keys that DeepSpeed adds to those of Lightning.
_OF_DEEPSPEED = (
    "buffer_names", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
)  # a table  # fmt: skip
_LIGHTNING, _WRAPPER = "pytorch-lightning_version", "_forward_module."


def looks_like(folder: SourceFolder) -> bool:
    """Return whether `folder` is a ZeRO checkpoint, according to the names of its files.

    False if the user gave an index or a pattern instead of the folder.
    """
    return folder.is_whole and files_of(folder.folder) is not None


def read(folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint:
    """Return the checkpoint in `folder`, merged from the files of all ranks. `read_file` reads one file.

    Raises MalformedError if files are missing or disagree, UnsupportedError if the run divided tensors in a way that
    the files do not describe, LimitError, and the errors of `read_file`.
    """
    files = files_of(folder.folder)
    assert files is not None
    for what, names in files.others.items():
        if names:
            raise _refusal(folder, files, what, some(names))
    if not files.optims:
        raise MalformedError("no files with optimizer states", where=folder.folder / files.tag, hint=_COPY)
    folder.missing([files.path(name) for _, name in (*files.models, *files.optims)])  # opens remote files, all at once
    first = _Rank(read_file(folder.open(files.path(files.optims[0][1]))))
    _check_ranks(folder, files, first)
    optims = [first, *(_Rank(read_file(folder.open(files.path(name)))) for _, name in files.optims[1:])]
    models = [_Model(read_file(folder.open(files.path(name)))) for _, name in files.models]
    return _Reader(folder, files, models, optims).checkpoint()


def _refusal(folder: SourceFolder, files: ZeroFiles, what: str, got: object) -> UnsupportedError:
    where = folder.folder / files.tag
    words = ("-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", where, "--output_folder", "OUT_FOLDER")
    return UnsupportedError(
        f"files of {what} cannot be merged: how the tensors are divided is not stored",
        where=where,
        got=got,
        hint=f"{TRUSTED}, let DeepSpeed try it: {python_command(*words)}",
    )


def _check_ranks(folder: SourceFolder, files: ZeroFiles, first: _Rank) -> None:
    """Raise MalformedError unless there is exactly one file for each rank.

    The file `first` contains the number of ranks. Raises UnsupportedError if the groups have different numbers of
    ranks.
    """
    world = first.world
    if len({*world}) != 1:
        raise _refusal(folder, files, "groups of different ranks (experts)", f"partition_count {world[:9]}")
    every = range(world[0])
    for what, given, ranks in (
        ("optim", files.optims, every),
        ("model", files.models, every if first.stage == 3 else range(-1, 0)),
    ):
        name_of = dict(given)
        missing = [rank for rank in ranks if rank not in name_of]
        others = [name for rank, name in given if rank not in ranks or name != name_of[rank]]
        if missing or others:
            names = [f"{f'zero_pp_rank_{r}_' if r >= 0 else ''}mp_rank_00_{what}_states.pt" for r in missing]
            are = "is" if len(missing) == 1 else "are"
            raise MalformedError(
                f"{count(len(missing), 'file')} of {len(every):,} ranks {are} missing"
                if missing
                else f"there are more files than ranks in the run, which has {len(every):,}",
                where=folder.folder / files.tag,
                got=f"no {some(names)}" if missing else some(others),
                hint=_COPY,
            )


class _Fields:
    """The values in one file of a rank. Its methods return values of the expected type, or raise MalformedError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.where = checkpoint.source.path
        self.root = self.items("the file", checkpoint.graph.root)

    def items(self, what: str, node: Value) -> dict[str, Value]:
        """Return the items of the mapping `node` whose keys are strings. `what` names the mapping in errors."""
        return strings_of(self.mapping(what, node))

    def mapping(self, what: str, node: Value) -> Object:
        """Return `node`. Raises MalformedError if it is not a mapping. `what` names the mapping in errors."""
        if not isinstance(node, (Dict, Call)):
            self.fail(f"{what} is not a mapping", type_of(node).__name__)
        return node

    def elements(self, what: str, node: Value) -> list[Value]:
        """Return the elements of the list `node`. Raises MalformedError if it is not a list.

        `what` names the list in errors.
        """
        if not isinstance(node, List):
            self.fail(f"{what} is not a list", type_of(node).__name__)
        return members_of(node) or []

    def counts(self, what: str, node: Value) -> list[int]:
        """Return the integers in the list `node`. Raises MalformedError if an element is not a count.

        `what` is for errors.
        """
        elements = self.elements(what, node)
        numbers = [element for element in elements if is_count(element)]
        if len(numbers) != len(elements):
            self.fail(f"{what} is not a list of numbers")
        return numbers

    def flat(self, what: str, node: Value) -> _Flat:
        """Return the tensor `node` and its bytes. `what` names the tensor in errors.

        Raises UnsupportedError unless it is a contiguous little-endian tensor of a known dtype whose bytes are not
        compressed.
        """
        info = self.checkpoint.tensor_nodes.get(id(node))
        if info is None or info.kind != "strided" or info.storage is None or info.dtype not in BY_NAME:
            self.refuse(f"{what} is not a plain tensor", info.kind if info else type_of(node).__name__)
        data = info.storage.data
        if not isinstance(data, ByteRange) or not info.contiguous or self.checkpoint.byteorder != "little":
            self.refuse(f"{what} is stored in a way that DeepSpeed does not use", info.dtype)
        return _Flat(info, data)

    def shapes(self, what: str, node: Value) -> dict[str, Shape]:
        """Return the shapes in the mapping `node`, by name. `what` names the mapping in errors.

        Raises MalformedError if a key is not a string or occurs twice, or a value is not a shape.
        """
        shapes: dict[str, Shape] = {}
        for name, value in self.mapping(what, node).entries():
            work().charge(_STEPS)  # any number of groups can have the same shapes
            shape = ints_of(value)
            if not isinstance(name, str) or shape is None or name in shapes:
                self.fail(f"{what} has an item that is not a new name and a shape", _plain(name))
            shapes[name] = shape
        return shapes

    def fail(self, what: str, got: object = None) -> NoReturn:
        """Raise MalformedError for this file."""
        raise MalformedError(what, where=self.where, got=got)

    def refuse(self, what: str, got: object = None) -> NoReturn:
        """Raise UnsupportedError for this file."""
        raise UnsupportedError(what, where=self.where, got=got)


class _Flat(NamedTuple):
    """A tensor and the bytes of its storage."""

    info: TensorInfo
    data: ByteRange

    @property
    def numel(self) -> int:
        """The number of elements. Raises MalformedError if the tensor does not have exactly one dimension."""
        if len(self.info.shape) != 1:
            raise MalformedError(
                "a flat tensor does not have one dimension", where=self.data.where, got=self.info.shape
            )
        return self.info.shape[0]

    def span(self, start: int, number: int) -> ByteRange:
        """Return the bytes of `number` elements from element `start` on."""
        itemsize = BY_NAME[self.info.dtype].itemsize
        span = self.data.slice((self.info.offset + start) * itemsize, number * itemsize)
        assert isinstance(span, ByteRange)
        return span


class _Model(_Fields):
    """A file with the model states of a rank.

    Attributes:
        module: The mapping ``module``.
        shapes_of: The shapes of the trained parameters by name, one dict for each optimizer group.
        frozen: The shapes of the parameters that are not trained.
        fragments: The tensors of the parameters that are not trained.
        shared: For each tied name, the name of the parameter that is stored.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        if "module" not in self.root or not isinstance(self.root.get("param_shapes"), List):
            self.fail("the file has no module and param_shapes of ZeRO", some(sorted(self.root)))
        self.module = self.mapping("module", self.root["module"])
        groups = self.elements("param_shapes", self.root["param_shapes"])
        self.shapes_of = [self.shapes("param_shapes", group) for group in groups]
        frozen = self.root.get("frozen_param_shapes")
        self.frozen = {} if frozen is None else self.shapes("frozen_param_shapes", frozen)
        self.fragments: dict[str, Value] = {}
        if self.frozen:
            self.fragments = self.items("frozen_param_fragments", self.root.get("frozen_param_fragments"))
        shared = self.root.get("shared_params")
        pairs = self.items("shared_params", shared) if isinstance(shared, (Dict, Call)) else {}
        self.shared = {name: holder for name, holder in pairs.items() if isinstance(holder, str)}
        names = [*chain(*self.shapes_of, self.frozen, self.shared)]
        if len({*names}) != len(names):
            twice = Counter(names).most_common(1)[0][0]
            self.fail("a name occurs twice in param_shapes, frozen_param_shapes and shared_params", twice)

    @property
    def alike(self) -> tuple[object, ...]:
        """The values that must be equal in the model states of all ranks."""
        run = (_plain(self.root.get(key)) for key in ("global_steps", "dp_world_size", "ds_version"))
        return ([[*group.items()] for group in self.shapes_of], [*self.frozen.items()], *run)

    def original_order(self, ranks: int) -> list[list[str]]:
        """Return the parameter names of each group in the order of the run's optimizer. `ranks` is the number of ranks.

        ``param_shapes`` has this order, unless ``round_robin_gradients`` dealt the parameters to the ranks
        (``_round_robin_reorder`` of ``stage_1_and_2.py``).
        """
        config = self.root.get("ds_config")
        zero = strings_of(config).get("zero_optimization") if isinstance(config, Dict) else None
        is_dealt = isinstance(zero, Dict) and strings_of(zero).get("round_robin_gradients") is True
        orders = []
        for group in self.shapes_of:
            names = [*group]
            if is_dealt:
                dealt = iter(group)
                for rank in range(ranks):
                    names[rank::ranks] = islice(dealt, len(names[rank::ranks]))
            orders.append(names)
        return orders


class _Rank(_Fields):
    """A file with the optimizer states of a rank.

    Attributes:
        stage: The ZeRO stage: 1, 2 or 3.
        world: The number of ranks, for each group.
        flats: The flat fp32 tensors, one for each group.
        paddings: The number of padding elements at the end of each flat tensor.
        states: The optimizer state of each flat tensor. Empty if the file has no optimizer state.
        groups: The ``param_groups``, or None if the file has none.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.fields = self.items("optimizer_state_dict", self.root.get("optimizer_state_dict"))
        self.stage = self._stage()
        world = self.fields.get("partition_count")
        self.world = [world] if is_count(world) else self.counts("partition_count", world)
        if not self.world or not all(0 < ranks <= LIMITS.ranks for ranks in self.world):
            self.fail("partition_count is not a number of ranks", self.world[:9])
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self.flats = [self.flat(key, node) for node in self.elements(key, self.fields.get(key))]
        self.paddings = [0] * len(self.flats)
        if "group_paddings" in self.fields:
            self.paddings = self.counts("group_paddings", self.fields["group_paddings"])
        if len(self.paddings) != len(self.flats):
            self.fail("the number of group_paddings is not the number of flat tensors")
        self.groups: List | None = None
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        self.states = self._states(self.fields.get(key))

    def _stage(self) -> int:
        stage = self.fields.get("zero_stage")
        if isinstance(stage, Call) and isinstance(stage.callable, Global) and stage.callable.name == "ZeroStageEnum":
            stage = next(iter(args_of(stage)), None)
        if stage is None and "single_partition_of_fp32_groups" in self.fields:
            return 1  # DeepSpeed's BF16 optimizer does not say it
        if not isinstance(stage, int) or stage not in (1, 2, 3):
            self.fail("zero_stage is not 1, 2 or 3", _plain(stage))
        return stage

    def _states(self, state: Value) -> list[dict[str, Value]]:
        """Return the optimizer state of each flat tensor, as a dict of its values. Empty if `state` is None.

        An elastic checkpoint has a list of states. Otherwise `state` is a state dict of a torch optimizer, whose
        ``param_groups`` are kept in `groups`.
        """
        if state is None:
            return []
        if isinstance(state, List):  # elastic
            return [self.items("base_optimizer_state", node) for node in state.elements()]
        fields = self.items("the optimizer's state", state)
        groups = fields.get("param_groups")
        self.elements("param_groups", groups)
        self.groups = groups if isinstance(groups, List) else None
        by_number: dict[int, Value] = {}
        for key, value in self.mapping("the optimizer's state", fields.get("state")).entries():
            if is_count(key):
                by_number[key] = value
        numbers = range(len(self.flats))
        return [self.items("the optimizer's state", by_number.get(number, Dict())) for number in numbers]

    @property
    def alike(self) -> tuple[object, ...]:
        """The values that must be equal in the optimizer states of all ranks."""
        states = [{key: self._number(value) for key, value in state.items()} for state in self.states]
        return self.stage, self.world, len(self.flats), states

    def _number(self, value: Value) -> object:
        """Return a value by which to compare `value` between ranks.

        Scalars, such as the step, are compared by their bytes. Larger tensors are compared only by dtype and
        dimensions, because each rank has other elements.
        """
        info = self.checkpoint.tensor_nodes.get(id(value))
        if info is None or info.storage is None:
            return _plain(value)
        if info.shape or not isinstance(info.storage.data, ByteRange):
            return info.dtype, len(info.shape)
        span = _Flat(info, info.storage.data).span(0, 1) if info.dtype in BY_NAME else info.storage.data
        return info.dtype, span.source.read(span.offset, span.length)


class _Reader:
    """The merger of the files of all ranks into one checkpoint."""

    def __init__(self, folder: SourceFolder, files: ZeroFiles, models: list[_Model], ranks: list[_Rank]) -> None:
        self.folder, self.files = folder, files
        self.models, self.ranks = models, ranks
        self.model, self.first = models[0], ranks[0]
        self.merger = Merger(folder)
        self.is_lightning = _LIGHTNING in self.model.root
        self.without: set[Value] = set()  # names of weights without elements that are in no file

    def checkpoint(self) -> Checkpoint:
        """Return the merged checkpoint.

        Raises MalformedError if the files disagree, and UnsupportedError if they cannot be merged.
        """
        self.check_alike()
        parameters = self.parameters()
        weights: dict[str, Value] = {}
        for name, shape, group, cuts in parameters:
            flats = [self.ranks[cut.rank].flats[cut.group] for cut in cuts]
            # a parameter without elements has no cuts
            weights[name] = self.tensor(shape, flats or [self.first.flats[group]], cuts)
        replaced = self.replaced(weights)
        root = self.merger.take(self.model.checkpoint)
        dropped = {*_OF_PARTS, *(_OF_DEEPSPEED if self.is_lightning else ())}
        items = [
            value for pair in self.model.mapping("the file", root).entries() if pair[0] not in dropped for value in pair
        ]
        items += ["state_dict" if self.is_lightning else "module", self.module(weights)]
        if self.first.states or self.first.groups:
            optimizer = self.optimizer(parameters)
            items += (
                ["optimizer_states", add_elements(List(), [optimizer])]
                if self.is_lightning
                else ["optimizer", optimizer]
            )
        checkpoint = self.merger.checkpoint(NAME, set_items(Dict(), items))
        checkpoint.graph.left_out += [part.checkpoint.graph.root for part in (*self.models, *self.ranks)]
        names = [name for _, name in (*self.files.models, *self.files.optims)]
        parts = [part.checkpoint for part in (*self.models, *self.ranks)]
        parts[0] = replace(parts[0], graph=empty_graph())  # its graph became part of the result
        checkpoint.beside = dict(zip(names, parts, strict=True))
        checkpoint.unused += replaced
        checkpoint.notes += self.notes(len(parameters))
        return checkpoint

    # Checks

    def check_alike(self) -> None:
        """Raise MalformedError unless all files are from the same run and step.

        Raises UnsupportedError if the model was divided by tensor parallelism.
        """
        firsts: dict[type[_Fields], tuple[_Fields, object]] = {}
        parts: list[_Model | _Rank] = [*self.models, *self.ranks]
        for part in parts:
            alike = part.alike
            first, expected = firsts.setdefault(type(part), (part, alike))
            if alike != expected:
                raise MalformedError(
                    f"{part.where.name} and {first.where.name} are from different runs or steps: their parameters,"
                    " groups, ranks or optimizers differ",
                    where=self.folder.folder / self.files.tag,
                    hint=_COPY,
                )
        size = self.model.root.get("mp_world_size", 1)
        if size != 1 and is_count(size):
            raise _refusal(self.folder, self.files, "tensor parallelism", f"mp_world_size {size}")

    def parameters(self) -> list[Parameter]:
        """Return the trained parameters with their ranges in the flat tensors, in the order of the flat data."""
        where = self.model.where
        flats = Flats(where, [[flat.numel for flat in rank.flats] for rank in self.ranks])
        if self.first.stage == 3:
            return [*flats.of_ranks(self.model.shapes_of)]
        for group, ends in enumerate(zip(*(rank.paddings for rank in self.ranks), strict=False)):
            for rank, before, after in zip(self.ranks[1:], ends, ends[1:], strict=False):
                # padding follows all data, so a rank after padding has nothing else
                if before > after or (before == after > 0 and rank.flats[group].numel not in (0, after)):
                    rank.fail("the ranks are in another order than their names say, or one is there twice", ends)
        given = self.first.fields.get("param_alignment_paddings")
        paddings = None
        if given is not None:
            lists = self.first.elements("param_alignment_paddings", given)
            paddings = [self.first.counts("param_alignment_paddings", numbers) for numbers in lists]
            flats.check("the length of param_alignment_paddings", len(self.model.shapes_of), len(paddings))
        return [*flats.of_groups(self.model.shapes_of, paddings)]

    # Weights

    def tensor(self, shape: Shape, flats: list[_Flat], cuts: Iterable[Cut]) -> Call:
        """Return a call that rebuilds a tensor of `shape` from `cuts`.

        Each cut is a range of the flat tensor at the same index. Raises MalformedError if the flat tensors have
        different dtypes.
        """
        dtypes = {flat.info.dtype for flat in flats}
        if len(dtypes) > 1:
            self.first.fail("the ranks have flat tensors of different dtypes", some(sorted(dtypes)))
        dtype = BY_NAME[dtypes.pop() if dtypes else "float32"]
        placements: list[ChunkPlacement] = []
        verified: dict[int, ByteRange] = {}
        numel = 0
        for flat, cut in zip(flats, cuts, strict=False):
            work().charge(2 * _STEPS)  # any number of values in the state of a parameter are cut like it
            span = flat.span(cut.start, cut.numel)
            placements.append(ChunkPlacement(span, (numel,), (cut.numel,), (1,)))
            if span is not flat.data and flat.data.crc32 is not None:
                verified[id(flat.data)] = flat.data
            numel += cut.numel
        data = assembled((numel,), dtype.itemsize, placements, self.folder.path, (*verified.values(),))
        storage = flats[0].info.storage if flats else None
        # the tensor is on the device of the rank that has its first part
        return self.merger.tensor(dtype, shape, data, storage.device if storage else "cpu")

    def replaced(self, weights: dict[str, Value]) -> list[LeftBehind]:
        """Add the frozen and tied parameters to `weights`, and return the contents of the files that are left behind.

        Raises MalformedError if a tensor in ``module`` has another shape than in ``param_shapes``.
        """
        model, nodes = self.model, self.model.checkpoint.tensor_nodes
        saved = self.model.items("module", model.module)
        if self.first.stage == 3:
            fragments = [model.fragments for model in self.models]
            for name, shape in model.frozen.items():
                flats = [each.flat(name, part.get(name)) for each, part in zip(self.models, fragments, strict=True)]
                weights[name] = self.frozen(name, shape, flats)
        else:
            fragment = model.fragments
            weights.update((name, fragment[name]) for name in model.frozen if name in fragment and name not in saved)
            for name, shape in ((name, shape) for group in model.shapes_of for name, shape in group.items()):
                info = nodes.get(id(saved.get(name)))
                if info and info.shape != shape:
                    model.fail(
                        f"{name!r} has different shapes in module and in param_shapes", f"{info.shape} and {shape}"
                    )
        for name, holder in model.shared.items():
            if holder in weights:
                weights[name] = weights[holder]
        left = {id(info.storage): info.storage for name in weights if (info := nodes.get(id(saved.get(name))))}
        nbytes = sum(storage.nbytes for storage in left.values() if storage)
        model_file = self.files.path(self.files.models[0][1])
        replaced = [LeftBehind(f"{model_file}/module", nbytes, "the weights are taken from the optimizer, in fp32")]
        buffers = model.root.get("buffer_names")
        kept = {*buffers.elements()} if isinstance(buffers, List) else set()
        for name, value in saved.items() if self.first.stage == 3 else ():
            info = nodes.get(id(value))
            if info and 0 in info.shape and name not in kept and name not in weights:
                self.without.add(name)
                replaced.append(
                    LeftBehind(f"{model_file}/module/{name}", 0, "no file contains the elements of the weight")
                )
        if "loss_scaler" in self.first.fields:
            optim_file = self.files.path(self.files.optims[0][1])
            why = "it is an object of DeepSpeed, which other programs cannot load"
            replaced.append(LeftBehind(f"{optim_file}/optimizer_state_dict/loss_scaler", 0, why))
        return replaced

    def frozen(self, name: str, shape: Shape, flats: list[_Flat]) -> Call:
        """Return a call that rebuilds the frozen parameter `name`. `flats` has its slice in each rank."""
        (parameter,) = Flats(self.model.where, [[flat.numel] for flat in flats]).of_ranks([{name: shape}])
        return self.tensor(shape, [flats[cut.rank] for cut in parameter.cuts] or flats[:1], parameter.cuts)

    def module(self, weights: dict[str, Value]) -> Object:
        """Return the mapping ``module``, in which `weights` replace tensors of the same names.

        New names are appended.
        """
        module = self.model.module
        effects: list[Effect] = []
        done: set[Value] = set()
        for effect in module.effects:
            if effect.opcode not in ("SETITEM", "SETITEMS"):
                effects += [effect] if not self.is_wrapped else []
                continue
            values: list[Value] = []
            for name, value in zip(effect.values[::2], effect.values[1::2], strict=True):
                if name in self.without:
                    continue
                if isinstance(name, str) and name in weights:
                    value = _in_place_of(value, weights[name])
                done.add(name)
                values += [self.name_of(name), value]
            if values:
                effects.append(Effect("SETITEMS", values, effect.order))
        module.effects = effects
        others = [name for name in weights if name not in done]
        return set_items(module, [value for name in others for value in (self.name_of(name), weights[name])])

    @cached_property
    def is_wrapped(self) -> bool:
        """Whether parameter names have the prefix of Lightning's wrapper, ``_forward_module.``."""
        return self.is_lightning and any(name.startswith(_WRAPPER) for group in self.model.shapes_of for name in group)

    def name_of(self, name: Value) -> Value:
        """Return `name` without the prefix of Lightning's wrapper, if the file has that prefix."""
        return name.removeprefix(_WRAPPER) if isinstance(name, str) and self.is_wrapped else name

    # Optimizer

    def optimizer(self, parameters: list[Parameter]) -> Dict:
        """Return the optimizer's state dict with the names of `parameters` as keys."""
        state: list[Value] = []
        for parameter in parameters:
            if self.first.states:
                items: list[Value] = []
                for key in self.first.states[parameter.group]:
                    items += [key, self.state(key, parameter)]
                state += [self.name_of(parameter.name), set_items(Dict(), items)] if items else []
        return set_items(Dict(), ["state", set_items(Dict(), state), "param_groups", self.param_groups(parameters)])

    def state(self, key: str, parameter: Parameter) -> Value:
        """Return the value `key` in the optimizer state of `parameter`: a tensor of its shape, or a scalar."""
        work().charge(_STEPS)  # the keys of a group count for each of its parameters
        value = self.first.states[parameter.group][key]
        if not isinstance(value, Node):
            return value
        flat = self.first.flat(f"the optimizer's {key}", value)
        if not flat.info.shape:  # a number for all: each parameter gets its own, because optimizers change it in place
            return self.tensor((), [flat], [Cut(0, parameter.group, 0, 1)])
        flats = [self.moment(key, cut) for cut in parameter.cuts]
        return self.tensor(parameter.shape, flats or [flat], parameter.cuts)

    def moment(self, key: str, cut: Cut) -> _Flat:
        """Return the optimizer's flat tensor `key` of the rank and group of `cut`.

        Raises UnsupportedError unless it has one element for each element of the flat weights.
        """
        rank = self.ranks[cut.rank]
        flat = rank.flat(f"the optimizer's {key}", rank.states[cut.group].get(key))
        numel = rank.flats[cut.group].numel
        if flat.info.shape not in ((numel,), (numel + rank.paddings[cut.group],)):
            raise UnsupportedError(
                f"the optimizer's {key} does not have one number for each weight: it is quantized, or of another kind",
                where=rank.where,
                expected=f"{numel:,} elements",
                got=f"{flat.info.dtype} of shape {flat.info.shape}",
                hint=self.sixteen_bits(),
            )
        return flat

    def sixteen_bits(self) -> str | None:
        """Return a hint with the command that converts only the 16-bit weights.

        Return None at stage 3, where no file has them.
        """
        if self.first.stage == 3:
            return None
        path = self.model.where
        taken = command("convert", path, Placeholder("OUT"), Option("state_dict"))
        return "the 16-bit weights are in one file: " + taken

    def param_groups(self, parameters: list[Parameter]) -> List:
        """Return the ``param_groups`` of the first rank with parameter names instead of numbers.

        The names are in the order of the run's optimizer. If the file has no groups, the result has only names.
        """
        first = self.first
        orders = self.model.original_order(len(self.ranks))
        if first.groups is None:
            groups = [set_items(Dict(), ["params", add_elements(List(), names)]) for names in orders]
            return add_elements(List(), groups)
        place = next(place for place in first.checkpoint.places if place.node is first.groups)
        known = first.checkpoint.index.storage_of
        if any(isinstance(node, PersistentId) and id(node) not in known for node in walk([place.node])):
            first.fail("param_groups refer to a damaged storage")  # which a sink may have taken
        taken = self.merger.take(first.checkpoint.part(place))
        assert isinstance(taken, List)
        group_of = {parameter.name: parameter.group for parameter in parameters}
        for group in taken.elements():
            items = first.items("param_groups", group)
            numbers = {*first.counts("params", items.get("params"))}
            work().charge(len(group_of))
            names = [self.name_of(name) for names in orders for name in names if group_of[name] in numbers]
            for effect, i in first.mapping("param_groups", group).pairs():
                if effect.values[i] == "params":
                    effect.values[i + 1] = add_elements(List(), names)
        return taken

    def notes(self, parameters: int) -> list[str]:
        """Return the notes for the report. `parameters` is the number of parameters."""
        stage = f"stage {self.first.stage}" if "zero_stage" in self.first.fields else "the BF16 optimizer"
        version = self.model.root.get("ds_version")
        version = version if isinstance(version, str) else "of an unknown version"
        about = (
            f"put together from {count(len(self.ranks), 'rank')} of DeepSpeed {version} ({stage}, tag"
            f" {self.files.tag or self.folder.folder.name}): {count(parameters, 'parameter')} in fp32"
        )
        typed = (self.folder.path, Placeholder("OUT"))
        weights = command("convert", *typed, Option("state_dict"))
        notes = [about, weights + " writes the weights only, as zero_to_fp32.py does"]
        if not self.first.states:
            notes.append("the files have no state of the optimizer")
        elif self.first.groups is None:
            notes.append("the optimizer's param_groups contain only names: elastic checkpoints have no other values")
        else:
            numbered = command("convert", *typed, Option("optimizer", "numbers"))
            notes.append(numbered + " writes the optimizer as optimizer.load_state_dict needs it")
        return notes


def _in_place_of(old: Value, new: Value) -> Value:
    """Return the tensor `new`. If it has no position in the file (``order``), it gets that of the tensor `old`."""
    if isinstance(old, Call) and isinstance(new, Call) and new.order is None and old.order is not None:
        new.order = old.order
        for reference, before in zip(args_of(new)[:1], args_of(old)[:1], strict=False):
            if isinstance(reference, PersistentId) and isinstance(before, PersistentId):
                reference.order = before.order
    return new


def _plain(value: Value) -> object:
    """Return `value`, or the name of its type if it is a node. The result is for comparison and errors."""
    return type_of(value).__name__ if isinstance(value, Node) else value
