"""Summarise a checkpoint. All sizes are in bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.undo_journal import HOT, journal_path, journals_of
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
    strings_of,
)
from ckptconv.pickles.paths import Place
from ckptconv.result import Result
from ckptconv.safety.scan import Concern, Level, concerns, level_of
from ckptconv.safety.torch_load import CALL, NO_SAFETENSORS, SAFETENSORS_SINCE, Loading, answers_of, torch_loading
from ckptconv.stores.memory import Input
from ckptconv.work import work

if TYPE_CHECKING:
    from ckptconv.checkpoint.quantization import Quantized
    from ckptconv.inspection.values import TensorValues

_MOST_OPTIMIZERS = 100
_ORDERED_DICT = "collections.OrderedDict"
_STEPS = 4  # of work for a path and a text that are kept
_Kind: TypeAlias = Literal["model", "EMA", "optimizer", "RNG states", "other"]
_KINDS = get_args(_Kind)


@dataclass(frozen=True)
class Share:
    """The number of tensors that have something in common, and the bytes of their storages."""

    tensors: int
    nbytes: int


@dataclass(frozen=True)
class StateDictSummary:
    """A state dict: its path, its size, and how many of its names start with each first segment.

    Attributes:
        quantized: The number of quantized weights of each layout. In ``parameters`` they count with the elements that
            they have once they are not quantized, and their scales do not count.
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
        keyed_by: ``names`` or ``numbers``, by which it lists its parameters.
        has_names: Whether the names of its parameters are in it.
        has_texts: Whether its state has texts in place of numbers, which ``load_state_dict`` ignores.
        groups: The number of its groups.
        parameters: The number of parameters in them.
        entries: The number of parameters that have a state.
        models: The paths of the state dicts to which it can belong, by its names or else by shapes.
        shapes_agree: Whether the shapes of its state are those of the weights. None if there is nothing to compare.
        trouble: Why it cannot be understood, or None.
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
    """A name in the state dict that a module would give, and the path of its tensor in the file.

    The path is None if only the module contains the tensor.
    """

    name: str
    path: str | None


@dataclass(frozen=True)
class ModuleSummary:
    """A whole module: its class, as the file names it, and the state dict that it would give.

    ``trouble`` says why it gives none. ``unknown`` are the names of parameters and buffers that are not known tensors.
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
        name: The key in a mapping, or the name in the state dict that the whole module at the path ``module`` would
            give.
        storage: The number of its storage, from 0. Tensors with the same number share it.
        values: None if the values were not asked for, or are not numbers.
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
    """A reason why torch refuses the file, or why that is not known.

    Attributes:
        refused: Whether torch refuses it.
        text: The reason in words.
        path: Where the reason is, or None if it is the file as a whole.
        needs: The module of torch or torchao that has to be imported first, if that is all.
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
        call: The call that was followed.
        torch: The version of torch whose rules were followed.
        reasons: Why it is refused, or not known.
        other_torch: The version of torch that was asked about, if its rules are not known.
        needs: The lowest version of torch that the call needs, if it needs one.
        installed: The version of torch that is installed, or None.
        flaws: The vulnerabilities of the safe loader in the version that was asked about.
        versions: The answers of all known versions, or None if they were not asked for and `torch` loads the file or no
            version has another answer.
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
    """An undo journal next to a file, and its size. It is ``hot`` if the change was not finished."""

    path: str
    nbytes: int
    hot: bool


@dataclass(frozen=True)
class RecordSummary:
    """A record of the file, and its size."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Part:
    """Tensors that belong together: what they are, their path, their number, and their bytes. Tied ones count once.

    A state dict is an EMA if its path has a word for one.
    """

    kind: _Kind
    path: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """What :func:`inspect` returns. Sizes are in bytes.

    Attributes:
        path: The file or folder.
        format: The name of its format.
        size: Its size on the disk.
        loads_here: Whether a plain ``torch.load(path)`` loads it on this machine. None if that is not known, as with a
            version of torch whose rules are not known.
        findings: What is in the way, or unusual, each with the command that mends it.
        remedy: One command that mends all findings, if there is one.
        protocol: The protocol of the pickle, or None if there is no pickle.
        nbytes: The size of all tensors; tied ones count once.
        stored_nbytes: The size of their storages.
        storages: The number of storages.
        dtypes: The number of tensors of each dtype, and their bytes; tied ones count once.
        devices: The same for devices. Empty if the format stores none.
        state_dicts: The state dicts, and the prefixes of their names.
        modules: The modules that were pickled whole, with the state dict that each would give.
        ties: The paths of tensors that are the same.
        views: The paths of tensors that show a part of their storage, or not in its order.
        rng_states: The paths of states of random generators.
        optimizers: The states of optimizers.
        weights_only: Whether ``torch.load(path, weights_only=True)`` is proved to load it, or there is no pickle.
        obstacles: What ``weights_only=True`` refuses, and how often.
        torch_load: The proof: its answer, the call, the version of torch, the reasons.
        safety: How safe loading is.
        concerns: What ``safety`` is based on, with the paths.
        dangerous: The names of the concerns that attacks use and no checkpoint needs.
        globals: All globals that the pickle names, and how often.
        user_devices: Devices in the user's own data, by path. Conversions do not change them.
        others: Everything but tensors, by path, in words.
        metadata: The texts in the header of a safetensors file.
        journals: Undo journals of changes in place.
        superseded: Records that a change in place replaced and left in the file.
        notes: What else to know.
        tensors: A row for each tensor, in the file's order.
        parts: Tensors by what they belong to. ``as_dict()`` does not contain them.
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
    """Summarise the checkpoint at `path`. No tensor data is read, unless its values are asked for.

    Args:
        path: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`ckptconv.open`.
        values: Read all tensors in bounded memory, which needs torch. Each tensor then has ``values``: the counts of
            NaN, infinities and zeros, the extremes, mean, standard deviation and norm.
        histogram: The same, with a histogram of 32 bins for each tensor.
        download: For a URL, as for :func:`ckptconv.convert`.
        torch: The version of torch that loads the file, such as ``"2.9"``, or ``"all"`` for the answers of all known
            versions as well. None means the installed one, or the newest known one if none is installed.

    Returns:
        Tensors, devices, dtypes, names, and the rest.

    Raises:
        CkptconvError: One of its subclasses.
    """
    wanted = ValuesWanted(histogram=histogram) if values or histogram else None
    return summary_of(path, wanted, download=download, torch=torch)


@dataclass(frozen=True)
class ValuesWanted:
    """Which values are read: those of the tensors that `select` returns for a summary, with histograms if `histogram`
    is set.
    """

    histogram: bool = False
    select: Callable[[Summary], Iterable[TensorSummary]] = lambda summary: summary.tensors


def summary_of(
    path: Input,
    values: ValuesWanted | None = None,
    *,
    download: bool = False,
    torch: str | None = None,
    progress: Meter | None = None,
) -> Summary:
    """Return what :func:`inspect` returns, in the words of the command line.

    `values` says which values are read; None: none. `progress` is called with the bytes to read.
    """
    host = this_host()
    if torch not in (None, ALL):
        host = replace(host, torch=word_of(asked_version(torch)))
    with open_input(path, skims=values is None, download=download, progress=progress) as source:
        with gc_paused():
            checkpoint = opening.read(source)
            summary = summarize(checkpoint, host, every=torch == ALL)
        if values is None:
            return summary
        from ckptconv.inspection.values import values_of

        wanted = {tensor.path: checkpoint.tensors[tensor.path] for tensor in values.select(summary)}
        values_by_path = values_of(wanted, checkpoint.byteorder, histogram=values.histogram, progress=progress)
        source.check_unchanged()
    tensors = (replace(tensor, values=values_by_path.get(tensor.path)) for tensor in summary.tensors)
    return replace(summary, tensors=tuple(tensors), has_values=True)


def summarize(checkpoint: Checkpoint, host: Host, *, every: bool = False) -> Summary:
    """Return the summary of `checkpoint`, to be loaded on `host`. `every` asks about all known versions of torch."""
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
    """Yield the command that stacks the experts of `checkpoint`, if they are stored one by one."""
    if any(".experts." in path for path in checkpoint.tensors):
        from ckptconv.inspection.grouping import rules_that_stack  # lazily, for start-up

        if rules := rules_that_stack(checkpoint):
            stacking = command("convert", checkpoint.source.path, Placeholder("OUT"), rules)
            yield "each expert has its own tensors; transformers 5 stacks them: " + stacking


def _optimizers(checkpoint: Checkpoint) -> Iterator[OptimizerSummary]:
    """Yield the optimizers of `checkpoint`, with the weights that they can belong to."""
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
    """Yield a row for each tensor of `checkpoint`, in the file's order."""
    in_modules = {
        place.path: (name, module.path)
        for module in checkpoint.detected.modules
        for name, place in reversed(module.places.items())
    }
    numbers = {id(storage): i for i, storage in enumerate(checkpoint.storages.values())}
    for info in checkpoint.tensors.values():
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
    """Return the tensors of `checkpoint` by what they belong to."""
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
    """Return whether torch loads `checkpoint`, with the paths of the reasons."""
    texts = {reason.text for reason in loading.reasons}
    wanted = every or (loading.varies and not loading.loads and not checkpoint.is_state_dict)
    uses = checkpoint.index.referrers if loading.reasons else None
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
    """Return the undo journals next to the files of `source`."""
    if not source.is_stored:
        return ()
    folder = source.folder if isinstance(source, SourceFolder) else source.path
    return tuple(
        JournalSummary(path=str(path), nbytes=path.lstat().st_size, hot=state == HOT)
        for target, state in journals_of(folder)
        if os.path.lexists(path := journal_path(target))
    )


def _devices(checkpoint: Checkpoint, tensors: list[TensorInfo]) -> dict[str, Share]:
    """Return the storages of each device by their bytes, and its `tensors` by their number."""
    own = {info.storage: info.own_device for info in tensors if info.storage and info.own_device}
    stored = [(own.get(each) or each.device, 0, each.nbytes) for each in checkpoint.storages.values()]
    return _shares([*stored, *((info.device, 1, 0) for info in tensors)])


def _shares(counted: Iterable[tuple[str, int, int]]) -> dict[str, Share]:
    """Return the sums of (word, number of tensors, bytes), by word."""
    tensors, sizes = Counter[str](), Counter[str]()
    for (word, n, nbytes), times in Counter(counted).items():  # most are alike
        tensors[word] += times * n
        sizes[word] += times * nbytes
    return {word: Share(n, sizes[word]) for word, n in tensors.items()}


def _state_dict(state_dict: StateDict, checkpoint: Checkpoint) -> StateDictSummary:
    """Return the summary of a state dict."""
    tensors = checkpoint.tensor_nodes
    infos = [info for _, value in state_dict.items() if (info := tensors.get(id(value)))]
    parameters, nbytes = _sizes(infos, checkpoint)
    names = state_dict.names()
    known = _quantized(state_dict, checkpoint) if any(info.dtype in CODES for info in infos) else []
    if known:
        stored = {name for each in known for name in (each.codes, *each.scales)}
        others = [
            tensors[id(value)] for name, value in state_dict.items() if name not in stored and id(value) in tensors
        ]
        parameters = _sizes(others, checkpoint)[0] + sum(prod(each.shape) for each in known)
    wrappers = [value for _, value in state_dict.items() if (i := tensors.get(id(value))) and i.kind == "wrapper"]
    return StateDictSummary(
        path=state_dict.path,
        tensors=len(infos),
        parameters=parameters,
        nbytes=nbytes,
        prefixes=dict(prefixes_of(names).most_common()),
        names=len(names),
        quantized=dict(Counter([each.layout for each in known] + _subclasses(wrappers))),
    )


def _subclasses(wrappers: list[Value]) -> list[str]:
    """Return the layouts of those of `wrappers` that are tensors of torchao."""
    if not wrappers:
        return []
    from ckptconv.checkpoint.quantization import torchao_layout  # lazily, for start-up

    return [layout for value in wrappers if (layout := torchao_layout(value))]


def _quantized(state_dict: StateDict, checkpoint: Checkpoint) -> list[Quantized]:
    """Return the quantized weights of a state dict whose layout is known."""
    from ckptconv.checkpoint.quantization import find_quantized  # lazily, for start-up
    from ckptconv.edits.dequantizing import known_config

    infos = checkpoint.tensor_nodes
    tensors = {name: infos[id(node)] for name, node in strings_of(state_dict.node).items() if id(node) in infos}
    return [each for each in find_quantized(tensors, known_config(checkpoint.source)) if not each.trouble]


def _module(module: PickledModule, checkpoint: Checkpoint) -> ModuleSummary:
    """Return the summary of a whole module."""
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
    """Return the elements and bytes of `infos`, which are tensors of `checkpoint`. Ties count once."""
    if not checkpoint.index.is_unshared:
        distinct = {(id(info.storage), info.offset, info.shape) if info.storage else id(info): info for info in infos}
        infos = list(distinct.values())
    return sum(prod(info.shape) for info in infos), sum(info.nbytes for info in infos)


def _ties(tensors: list[TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the paths of tied tensors, the first one and those that are tied to it together."""
    groups: dict[str, list[str]] = {}
    for info in tensors:
        if info.tied_to is not None:
            groups.setdefault(info.tied_to, [info.tied_to]).append(info.path)
    return tuple(map(tuple, groups.values()))


# Everything but tensors


def _others(checkpoint: Checkpoint, places: list[Place]) -> Iterator[tuple[str, str]]:
    """Yield the path and a short text of everything but tensors, unless it is inside something that is shown as a
    whole.
    """
    hidden, tensors, budget = set[int](), checkpoint.tensor_nodes, work()
    shown: dict[int, tuple[bool, str | None]] = {}  # shared nodes, which can occur in any number of places
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
            budget.charge(_STEPS)
            yield place.path, words


def _shown(node: Value) -> tuple[bool, str | None]:
    """Return whether `node` is shown as a whole, and the words for it, or None."""
    if not isinstance(node, (Dict, List, Tuple, Set, FrozenSet, Call)) or is_flat(node):
        return True, describe(node)
    if isinstance(node, Call) and isinstance(node.callable, Global) and node.callable.name == "scalar":
        from ckptconv.edits.loadable.arrays import scalar_text  # only files with scalars of NumPy need it

        if number := scalar_text(node):
            return True, number
    return False, describe(node) if isinstance(node, Call) and not is_global(node.callable, _ORDERED_DICT) else None
