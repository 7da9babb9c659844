"""Summarise a checkpoint. All sizes are in bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.undo_journal import HOT, journal_path, journals_at
from ckptconv.checkpoint.describe import describe, is_flat
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PickledModule
from ckptconv.checkpoint.state_dicts import IS_AVERAGE, StateDict
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.checkpoint.torch_versions import (
    ALL,
    NEWEST,
    asked_version,
    flaws_of,
    installed_torch,
    word_of,
)
from ckptconv.checkpoint.weights_only.objects import Answer
from ckptconv.dtypes import CODES
from ckptconv.edits.devices import user_devices
from ckptconv.edits.names import prefixes_of
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.formats.torch_zip import SUPERSEDED, is_exported
from ckptconv.hints import Placeholder, command, for_python
from ckptconv.inspection.diagnosis.diagnose import diagnose
from ckptconv.inspection.diagnosis.findings import Advice
from ckptconv.inspection.diagnosis.host import Host, this_host
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Node,
    Set,
    Tuple,
    Value,
    gc_paused,
    is_global,
)
from ckptconv.pickles.paths import Place
from ckptconv.result import Result
from ckptconv.safety.scan import Concern, Level, concerns, level_of
from ckptconv.safety.torch_load import CALL, NO_SAFETENSORS, SAFETENSORS_SINCE, Loading, answers_of, torch_loading
from ckptconv.stores.memory import Input
from ckptconv.work import CHARACTERS, seen, work

if TYPE_CHECKING:
    from ckptconv.inspection.values import TensorValues

_MOST_OPTIMIZERS = 100
_ORDERED_DICT = "collections.OrderedDict"
_STEPS = 4  # of work for a path and a text that are kept
COPIES = 3  # of the device of a tensor in JSON or text, while it is printed
_Kind: TypeAlias = Literal["model", "EMA", "optimizer", "RNG states", "other"]
_KINDS = get_args(_Kind)


@dataclass(frozen=True)
class Share:
    """The number of tensors in a group (of one dtype or one device), and the sum of their bytes."""

    tensors: int
    nbytes: int


@dataclass(frozen=True)
class StateDictSummary:
    """The size of a state dict, and the prefixes of its names.

    Attributes:
        path: Its path in the graph.
        tensors: The number of its tensors.
        parameters: The number of their elements. Tied tensors count once. A quantized weight counts with the elements
            that it has after dequantization, and its scales do not count.
        nbytes: The bytes of its tensors. Tied tensors count once.
        prefixes: How many names start with each prefix, the most frequent first.
        names: The number of its names, including those of values that are not tensors.
        quantized: The number of quantized weights of each layout.
    """

    path: str
    tensors: int
    parameters: int
    nbytes: int
    prefixes: dict[str, int]
    names: int
    quantized: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerSummary:
    """The state of an optimizer.

    Attributes:
        path: Its path.
        keyed_by: ``names`` or ``numbers``: the keys by which it lists its parameters.
        has_names: Whether it contains the names of its parameters.
        has_texts: Whether its state is keyed by texts instead of numbers, which ``load_state_dict`` ignores.
        groups: The number of its parameter groups.
        parameters: The number of parameters in the groups.
        entries: The number of parameters that have a state.
        models: The paths of the state dicts that it can belong to. They are found by its names, or by shapes if it
            contains no names.
        shapes_agree: Whether the shapes of its state match those of the weights in `models`. None if there is nothing
            to compare.
        trouble: The reason why its structure is not understood, or None.
    """

    path: str
    keyed_by: str
    has_names: bool
    has_texts: bool
    groups: int
    parameters: int
    entries: int
    models: tuple[str, ...]
    shapes_agree: bool | None
    trouble: str | None


@dataclass(frozen=True)
class NamedTensor:
    """A name in the state dict of a pickled module, and the path of its tensor in the file.

    The path is None if only the module contains the tensor.
    """

    name: str
    path: str | None


@dataclass(frozen=True)
class ModuleSummary:
    """A module that was pickled as an object, and the state dict that ``module.state_dict()`` would return.

    Attributes:
        path: Its path in the graph.
        class_name: Its class, as the file names it.
        tensors: The names and tensors of the state dict.
        parameters: The number of elements of these tensors. Tied ones count once.
        nbytes: The bytes of these tensors. Tied ones count once.
        prefixes: How many names start with each prefix, the most frequent first.
        unknown: The names of parameters and buffers that could not be read as tensors.
        trouble: The reason why no state dict can be formed, or None.
    """

    path: str
    class_name: str
    tensors: tuple[NamedTensor, ...]
    parameters: int
    nbytes: int
    prefixes: dict[str, int]
    unknown: tuple[str, ...]
    trouble: str | None


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A row of the tensor table. Shape, stride and offset are in elements.

    Attributes:
        path: The path of the tensor in the graph.
        name: The tensor's key in a mapping. For a tensor of a pickled module: its name in the module's state dict.
        module: The path of the pickled module that contains the tensor, or None.
        kind: Which kind of tensor this is, such as ``tensor`` or ``wrapper`` (a tensor subclass).
        device: The device in the file, or None for a format that stores none.
        nbytes: The bytes of the tensor's elements.
        storage_nbytes: The bytes of its storage, or None without a storage.
        tied_to: The path of the first tensor with the same data, or None.
        storage: The number of its storage, from 0. Tensors with the same number share a storage.
        values: Statistics of the elements. None if they were not requested, or if the elements are not numbers.
    """

    path: str
    name: str | None
    module: str | None
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str | None
    nbytes: int
    storage_nbytes: int | None
    requires_grad: bool
    tied_to: str | None
    storage: int | None = None
    values: TensorValues | None = None


@dataclass(frozen=True)
class ReasonSummary:
    """A reason why torch refuses the file, or why the answer is not known.

    Attributes:
        refused: True if torch refuses the object; False if the answer is not known.
        text: The reason in words.
        path: The path of the object, or None if the reason concerns the complete file.
        needs: The module of torch or torchao to import first, if that is enough to load the object. Otherwise None.
    """

    refused: bool
    text: str
    path: str | None
    needs: str | None


@dataclass(frozen=True)
class TorchLoadSummary:
    """Whether ``torch.load`` loads the file on a machine without any of the devices in it.

    Attributes:
        answer: ``loads``, ``refused`` or ``not known``.
        call: The call of ``torch.load`` that was simulated.
        torch: The version of torch whose rules were applied.
        reasons: Why the file is refused, or why the answer is not known.
        other_torch: The version of torch that was requested or is installed, if its rules are not known. Otherwise
            None.
        needs: The lowest version of torch that has the call, if older versions do not have it. Otherwise None.
        installed: The version of torch that is installed, or None.
        flaws: The known vulnerabilities of the safe loader in the requested version.
        versions: The answer of each known version of torch. None unless the answers were requested, or `torch` does not
            load the file and another version has another answer.
    """

    answer: Answer
    call: str
    torch: str
    reasons: tuple[ReasonSummary, ...]
    other_torch: str | None = None
    needs: str | None = None
    installed: str | None = None
    flaws: tuple[str, ...] = ()
    versions: dict[str, Answer] | None = None


@dataclass(frozen=True)
class JournalSummary:
    """An undo journal next to a file, and its size. ``hot`` means that the change in place was not finished."""

    path: str
    nbytes: int
    hot: bool


@dataclass(frozen=True)
class RecordSummary:
    """A record (zip member) of the file, and its size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Part:
    """The tensors that belong to one model, optimizer or group of random states.

    A state dict is an ``EMA`` if its path contains a word such as "ema".

    Attributes:
        kind: The kind of the group. ``other`` is for all remaining tensors.
        path: The path of the state dict, module or optimizer. Empty for random states and for the remaining tensors.
        tensors: The number of tensors, with tied ones.
        nbytes: The bytes of the tensors. Tied ones count once.
    """

    kind: _Kind
    path: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """The result of :func:`inspect`. Sizes are in bytes.

    Attributes:
        path: The file or folder.
        format: The name of its format.
        size: Its size on the disk.
        loads_here: Whether ``torch.load(path)`` without options loads it on this machine. None if that is not known,
            for example because the rules of this version of torch are not known.
        findings: Problems and unusual facts, each with the command that corrects it.
        remedy: One command that corrects all findings, or None.
        protocol: The protocol of the pickle, or None if there is no pickle.
        nbytes: The size of all tensors. Tied ones count once.
        stored_nbytes: The size of their storages.
        storages: The number of storages.
        dtypes: The number of tensors of each dtype, and their bytes. Tied ones count once.
        devices: For each device, the number of tensors and the bytes of storages. Empty if the format stores no device.
        state_dicts: The state dicts, and the prefixes of their names.
        modules: The modules that were pickled as objects, each with its state dict.
        ties: Groups of paths that lead to the same tensor.
        views: The paths of tensors that use only a slice of their storage, or use it in another order.
        rng_states: The paths of states of random generators.
        optimizers: The states of optimizers.
        weights_only: True if ``torch.load(path, weights_only=True)`` is proved to load it, or if there is no pickle.
        obstacles: The objects that ``weights_only=True`` refuses, and how often they occur.
        torch_load: The proof: the answer, the call, the version of torch, the reasons.
        safety: How safe loading is.
        concerns: The findings on which ``safety`` is based, with their paths.
        dangerous: The names of the concerns that attacks use and no checkpoint needs.
        globals: All globals that the pickle names, and how often.
        user_devices: Devices in the user's own data, by path. Conversions do not change them.
        others: A short text for each value that is not a tensor, by path.
        metadata: The texts in the header of a safetensors file.
        journals: Undo journals of changes in place.
        superseded: Records that a change in place replaced and left in the file.
        notes: Further remarks.
        tensors: A row for each tensor, in the order of the file.
        parts: The tensors grouped by model, optimizer and random states. ``as_dict()`` does not contain them.
        has_values: Whether the values of tensors were read.
    """

    path: str
    format: str
    size: int
    loads_here: bool | None
    findings: tuple[Advice, ...]
    remedy: str | None
    protocol: int | None
    nbytes: int
    stored_nbytes: int
    storages: int
    dtypes: dict[str, Share]
    devices: dict[str, Share]
    state_dicts: tuple[StateDictSummary, ...]
    modules: tuple[ModuleSummary, ...]
    ties: tuple[tuple[str, ...], ...]
    views: tuple[str, ...]
    rng_states: tuple[str, ...]
    optimizers: tuple[OptimizerSummary, ...]
    weights_only: bool
    obstacles: dict[str, int]
    torch_load: TorchLoadSummary
    safety: Level
    concerns: tuple[Concern, ...]
    dangerous: tuple[str, ...]
    globals: dict[str, int]
    user_devices: dict[str, str]
    others: dict[str, str]
    metadata: dict[str, str]
    journals: tuple[JournalSummary, ...]
    superseded: tuple[RecordSummary, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorSummary, ...]
    parts: tuple[Part, ...]
    has_values: bool = False
    _drawn_by = "summary"


@for_python
def inspect(
    path: Input,
    *,
    values: bool = False,
    histogram: bool = False,
    download: bool = False,
    torch: str | None = None,
) -> Summary:
    """Summarise the checkpoint at `path`. No tensor data is read, unless `values` or `histogram` is set.

    Args:
        path: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`ckptconv.open`.
        values: Read all tensors in bounded memory, which needs NumPy or torch. Each tensor then has ``values``: the
            counts of NaN, infinities and zeros, the extremes, mean, standard deviation and norm.
        histogram: The same, with a histogram of 32 bins for each tensor.
        download: For a URL, as for :func:`ckptconv.convert`.
        torch: The version of torch that loads the file, such as ``"2.9"``, or ``"all"`` for the answers of all known
            versions as well. None means the installed one, or the newest known one if none is installed.

    Returns:
        The summary: tensors, devices, dtypes, names, findings, and more.

    Raises:
        CkptconvError: One of its subclasses.
    """
    select = attrgetter("tensors") if values or histogram else None
    return summary_of(path, select, histogram=histogram, download=download, torch=torch)


def summary_of(
    path: Input,
    select: Callable[[Summary], Iterable[TensorSummary]] | None = None,
    *,
    histogram: bool = False,
    download: bool = False,
    torch: str | None = None,
    progress: Meter | None = None,
) -> Summary:
    """Return the same summary as :func:`inspect`, with messages in the words of the command line.

    Args:
        path: A checkpoint, or a binary file object.
        select: Returns the tensors of a summary whose values are read, or None to read no values.
        histogram: Whether to make a histogram for each of these tensors.
        download: Whether to download a remote file completely first.
        torch: A version of torch, ``"all"``, or None for the installed one.
        progress: Called with the number of bytes that will be read.
    """
    host = this_host()
    if torch not in (None, ALL):
        host = replace(host, torch=word_of(asked_version(torch)))
    with open_input(path, skims=select is None, download=download, progress=progress) as source:
        with gc_paused():
            checkpoint = opening.read(source)
            summary = summarize(checkpoint, host, every=torch == ALL)
        if select is None:
            return summary
        from ckptconv.inspection.values import values_of

        wanted = {tensor.path: checkpoint.tensors[tensor.path] for tensor in select(summary)}
        values_by_path = values_of(wanted, checkpoint.byteorder, histogram=histogram, progress=progress)
        source.check_unchanged()
    tensors = (replace(tensor, values=values_by_path.get(tensor.path)) for tensor in summary.tensors)
    return replace(summary, tensors=tuple(tensors), has_values=True)


def summarize(checkpoint: Checkpoint, host: Host, *, every: bool = False) -> Summary:
    """Return the summary of `checkpoint` for loading on `host`.

    `every` requests the answers of all known versions of torch.
    """
    detected = checkpoint.detected
    tensors = list(checkpoint.tensors.values())
    untied = [info for info in tensors if info.tied_to is None]
    graph = checkpoint.graph
    has_pickle = not checkpoint.is_state_dict
    loading = torch_loading(checkpoint, torch=NEWEST if host.other_torch else asked_version(host.torch))
    concerned = concerns(checkpoint)
    diagnosis = replace(diagnose(checkpoint, host, loading, concerned), other_torch=host.other_torch)
    refusals = Counter(reason.text for reason in loading.reasons if reason.known == "refused") if has_pickle else {}
    globals_ = Counter(map(str, graph.globals))
    places = checkpoint.index.every_place
    others = dict(_others(checkpoint, places))
    return Summary(
        path=str(checkpoint.source.path),
        format=checkpoint.format,
        size=checkpoint.source.size,
        loads_here=diagnosis.loads_here,
        findings=tuple(diagnosis.findings),
        remedy=diagnosis.remedy,
        protocol=graph.protocol if has_pickle else None,
        nbytes=sum(info.nbytes for info in untied),
        stored_nbytes=sum(storage.nbytes for storage in checkpoint.storages.values()),
        storages=len(checkpoint.storages),
        dtypes=_shares((info.dtype, 1, info.nbytes) for info in untied),
        devices=_devices(checkpoint, untied) if has_pickle or is_exported(checkpoint) else {},
        state_dicts=tuple(_state_dict(found, checkpoint) for found in detected.state_dicts),
        modules=tuple(_module(found, checkpoint) for found in detected.modules),
        ties=_ties(tensors),
        views=tuple(
            info.path for info in untied if info.storage and (not info.contiguous or info.nbytes < info.storage.nbytes)
        ),
        rng_states=tuple(info.path for info in detected.rng_states),
        optimizers=tuple(_optimizers(checkpoint)) if detected.optimizer_nodes else (),
        weights_only=loading.loads or (not has_pickle and not is_exported(checkpoint)),
        obstacles=dict(refusals),
        torch_load=_torch_load(loading, checkpoint, host, every=every),
        safety=level_of(checkpoint, concerned, loading),
        concerns=tuple(concerned),
        dangerous=tuple(sorted(concern.name for concern in concerned if concern.dangerous)),
        globals=dict(globals_.most_common()),
        user_devices=user_devices(places),
        others=others,
        metadata=checkpoint.metadata,
        journals=_journals(checkpoint.source),
        superseded=tuple(RecordSummary(each.path, each.nbytes) for each in checkpoint.unused if each.why == SUPERSEDED),
        notes=(*checkpoint.notes, *_about_experts(checkpoint)),
        tensors=tuple(_rows(checkpoint)),
        parts=_parts(checkpoint),
    )


def _about_experts(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note with the command that stacks the experts of `checkpoint`.

    Yield nothing unless they are stored one by one.
    """
    if any(".experts." in path for path in checkpoint.tensors):
        from ckptconv.inspection.grouping import rules_that_stack  # lazily, for start-up

        if rules := rules_that_stack(checkpoint):
            stacking = command("convert", checkpoint.source.path, Placeholder("OUT"), rules)
            yield "each expert has its own tensors; transformers 5 stacks them: " + stacking


def _optimizers(checkpoint: Checkpoint) -> Iterator[OptimizerSummary]:
    """Yield a summary of each optimizer of `checkpoint` (at most 100), with the state dicts that it can belong to."""
    from ckptconv.checkpoint.optimizers import candidates, mismatched, optimizers_in, weights_in  # for start-up

    index, detected = checkpoint.index, checkpoint.detected
    averages = {id(found) for found in detected.averages()}
    every = [weights_in(found, index) for found in detected.state_dicts if id(found) not in averages]
    for found in optimizers_in(index, detected)[:_MOST_OPTIMIZERS]:
        models = candidates(found, every[:_MOST_OPTIMIZERS])
        differs = any(any(True for _ in mismatched(found, weights)) for weights in models)
        is_compared = bool(found.shapes and (models or (every and found.names is None)))
        yield OptimizerSummary(
            path=found.path,
            keyed_by="names" if found.is_named else "numbers",
            has_names=found.names is not None,
            has_texts=found.has_texts,
            groups=len(found.groups),
            parameters=len(found.params),
            entries=len(found.entries),
            models=tuple(weights.path for weights in models),
            shapes_agree=bool(models) and not differs if is_compared else None,
            trouble=found.trouble,
        )


def _rows(checkpoint: Checkpoint) -> Iterator[TensorSummary]:
    """Yield a row for each tensor of `checkpoint`, in the order of the file."""
    in_modules = {
        place.path: (name, module.path)
        for module in checkpoint.detected.modules
        for name, place in reversed(module.places.items())
    }
    numbers = {id(storage): i for i, storage in enumerate(checkpoint.storages.values())}
    for info in seen("rows", checkpoint.tensors.values(), len(checkpoint.tensors)):
        work().charge(COPIES * len(info.device) // CHARACTERS)  # any number of tensors can have a long one
        name, module_path = in_modules.get(info.path, (info.name, None))
        yield TensorSummary(
            path=info.path,
            name=name,
            module=module_path,
            kind=info.kind,
            dtype=info.dtype,
            shape=info.shape,
            stride=info.stride,
            offset=info.offset,
            device=None if checkpoint.is_state_dict and not is_exported(checkpoint) else info.device,
            nbytes=info.nbytes,
            storage_nbytes=info.storage.nbytes if info.storage else None,
            requires_grad=info.requires_grad,
            tied_to=info.tied_to,
            storage=numbers.get(id(info.storage)),
        )


def _parts(checkpoint: Checkpoint) -> tuple[Part, ...]:
    """Return the tensors of `checkpoint` grouped by model, EMA, optimizer, random states and others."""
    detected = checkpoint.detected
    part_at: dict[int, tuple[_Kind, str]] = {}
    for state_dict in detected.state_dicts:
        part_at[id(state_dict.node)] = ("EMA" if IS_AVERAGE.search(state_dict.path) else "model", state_dict.path)
    for module in detected.modules:
        part_at[id(module.place.node)] = ("model", module.path)
    rng = {info.path for info in detected.rng_states}
    parts_of: dict[int, tuple[_Kind, str] | None] = {}
    found_parts: dict[tuple[_Kind, str], list[TensorInfo]] = {}
    places, tensors = checkpoint.index.every_place, checkpoint.tensors
    parents = {id(place.parent) for place in places}
    for place in places:
        part = parts_of.get(id(place.parent)) or part_at.get(id(place.node))
        if part is None and id(place.node) in detected.optimizer_nodes:
            part = "optimizer", place.path
        if id(place) in parents:
            parts_of[id(place)] = part
        if isinstance(place.node, Node) and (info := tensors.get(place.path)):
            own: tuple[_Kind, str] = ("RNG states", "") if info.path in rng else part or ("other", "")
            found_parts.setdefault(own, []).append(info)
    parts = [Part(*named, len(infos), _sizes(infos, checkpoint)[1]) for named, infos in found_parts.items()]
    return tuple(sorted(parts, key=lambda part: _KINDS.index(part.kind)))


def _torch_load(loading: Loading, checkpoint: Checkpoint, host: Host, *, every: bool) -> TorchLoadSummary:
    """Return the summary of `loading`, with the paths of at most ``LIMITS.concerns`` reasons.

    `every` requests the answers of all known versions of torch. They are also included if versions differ and `torch`
    does not load the file.
    """
    texts = {reason.text for reason in loading.reasons}
    wanted = every or (loading.varies and not loading.loads and not checkpoint.is_state_dict)
    uses = checkpoint.index.referrers if any(isinstance(each.node, Node) for each in loading.reasons) else None
    return TorchLoadSummary(
        answer=loading.answer,
        call=CALL,
        torch=loading.torch,
        reasons=tuple(
            ReasonSummary(
                refused=reason.known == "refused",
                text=reason.text,
                path=uses.path(uses.of(reason.node)[0]) if uses and isinstance(reason.node, Node) else None,
                needs=reason.needs,
            )
            for reason in loading.reasons[: LIMITS.concerns]
        ),
        other_torch=host.other_torch,
        needs=SAFETENSORS_SINCE if checkpoint.is_state_dict and texts <= {NO_SAFETENSORS} else None,
        installed=installed_torch(),
        flaws=flaws_of(host.torch),
        versions=answers_of(checkpoint, loading) if wanted else None,
    )


def _journals(source: Readable) -> tuple[JournalSummary, ...]:
    """Return the undo journals next to the files of `source`.

    The result is empty if the source is not a file on a disk.
    """
    return tuple(
        JournalSummary(path=str(path), nbytes=path.lstat().st_size, hot=state == HOT)
        for target, state in journals_at(source)
        if os.path.lexists(path := journal_path(target))
    )


def _devices(checkpoint: Checkpoint, tensors: list[TensorInfo]) -> dict[str, Share]:
    """Return, for each device, the number of `tensors` and the bytes of the storages on it."""
    own = {info.storage: info.own_device for info in tensors if info.storage and info.own_device}
    stored = [(own.get(each) or each.device, 0, each.nbytes) for each in checkpoint.storages.values()]
    return _shares([*stored, *((info.device, 1, 0) for info in tensors)])


def _shares(counted: Iterable[tuple[str, int, int]]) -> dict[str, Share]:
    """Return the sums of `counted` by word. Each item is (word, number of tensors, bytes)."""
    tensors, sizes = Counter[str](), Counter[str]()
    for (word, n, nbytes), times in Counter(counted).items():  # most are alike
        tensors[word] += times * n
        sizes[word] += times * nbytes
    return {word: Share(n, sizes[word]) for word, n in tensors.items()}


def _state_dict(state_dict: StateDict, checkpoint: Checkpoint) -> StateDictSummary:
    """Return the summary of a state dict. Quantized weights whose layout is not understood are not counted as such."""
    tensors = checkpoint.tensor_nodes
    values = [(name, tensors[id(value)], value) for name, value in state_dict.items() if id(value) in tensors]
    infos = [info for _, info, _ in values]
    parameters, nbytes = _sizes(infos, checkpoint)
    names = state_dict.names()
    layouts: list[str] = []
    has_codes = any(info.dtype in CODES for info in infos)
    if has_codes or any(info.kind == "wrapper" for info in infos):
        from ckptconv.checkpoint.quantization import find_quantized, torchao_layout  # lazily, for start-up
        from ckptconv.edits.dequantizing import known_config

        config = known_config(checkpoint.source) if has_codes else None
        named = checkpoint.named_tensors(state_dict.node)
        quantized = [each for each in find_quantized(named, config) if not each.trouble]
        stored = {name for each in quantized for name in (each.codes, *each.scales)}
        others = [info for name, info, _ in values if name not in stored]
        parameters = _sizes(others, checkpoint)[0] + sum(prod(each.shape) for each in quantized)
        wrappers = (torchao_layout(value) for _, info, value in values if info.kind == "wrapper")
        layouts = [*(each.layout for each in quantized), *filter(None, wrappers)]
    return StateDictSummary(
        path=state_dict.path,
        tensors=len(infos),
        parameters=parameters,
        nbytes=nbytes,
        prefixes=dict(prefixes_of(names).most_common()),
        names=len(names),
        quantized=dict(Counter(layouts)),
    )


def _module(module: PickledModule, checkpoint: Checkpoint) -> ModuleSummary:
    """Return the summary of a pickled module."""
    tensors = checkpoint.tensor_nodes
    infos = dict.fromkeys(tensors[id(node)] for node in module.tensors.values())  # a module can occur twice
    parameters, nbytes = _sizes([*infos], checkpoint)
    places = module.places
    return ModuleSummary(
        path=module.path,
        class_name=module.cls,
        tensors=tuple(NamedTensor(name=n, path=places[n].path if n in places else None) for n in module.tensors),
        parameters=parameters,
        nbytes=nbytes,
        prefixes=dict(prefixes_of(module.tensors).most_common()),
        unknown=tuple(module.unknown),
        trouble=module.trouble,
    )


def _sizes(infos: list[TensorInfo], checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the number of elements and of bytes of `infos`, which are tensors of `checkpoint`.

    Tied ones count once.
    """
    if not checkpoint.index.is_unshared:
        distinct = {(id(info.storage), info.offset, info.shape) if info.storage else id(info): info for info in infos}
        infos = list(distinct.values())
    return sum(prod(info.shape) for info in infos), sum(info.nbytes for info in infos)


def _ties(tensors: list[TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of tied paths. Each group begins with the tensor that the others are tied to."""
    groups: dict[str, list[str]] = {}
    for info in tensors:
        if info.tied_to is not None:
            groups.setdefault(info.tied_to, [info.tied_to]).append(info.path)
    return tuple(map(tuple, groups.values()))


# Everything but tensors


def _others(checkpoint: Checkpoint, places: list[Place]) -> Iterator[tuple[str, str]]:
    """Yield the path and a short text of each value that is not a tensor.

    Values inside a value that is printed as one text (such as a flat list) are left out, and so is ``._metadata``.
    """
    hidden, tensors, budget = set[int](), checkpoint.tensor_nodes, work()
    shown: dict[int, tuple[bool, str | None]] = {}  # for shared nodes, which can occur at any number of paths
    for place in places:
        node = place.node
        if place.parent is not None and id(place.parent) in hidden:
            if isinstance(node, Node):  # nothing is below an atom
                hidden.add(id(place))
            continue
        if id(node) in tensors:
            continue
        if place.segment.startswith("/._metadata"):
            hidden.add(id(place))
            continue
        is_whole, words = shown.get(id(node)) or _shown(node)
        if isinstance(node, Node) and node in checkpoint.graph.shared:
            shown[id(node)] = is_whole, words
        if is_whole:
            hidden.add(id(place))
        if words is not None:
            budget.charge(_STEPS + place.length // CHARACTERS)
            yield place.path, words


def _shown(node: Value) -> tuple[bool, str | None]:
    """Return whether the text of `node` includes everything inside `node`, and the text. The text is None for a plain
    container, whose items have texts of their own.
    """
    if not isinstance(node, (Dict, List, Tuple, Set, FrozenSet, Call)) or is_flat(node):
        return True, describe(node)
    if isinstance(node, Call) and isinstance(node.callable, Global) and node.callable.name == "scalar":
        from ckptconv.edits.loadable.arrays import scalar_text  # only files with scalars of NumPy need it

        if number := scalar_text(node):
            return True, number
    return False, describe(node) if isinstance(node, Call) and not is_global(node.callable, _ORDERED_DICT) else None
