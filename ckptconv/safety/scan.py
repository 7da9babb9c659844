"""Scan a checkpoint for what loading it would run. Looks; runs nothing.

Every global that torch's safe loader refuses is a *concern*, wherever the file names it: in each of its pickles, in
what they make and throw away, and in pickles inside byte strings (:mod:`ckptconv.safety.nested_pickles`, which says
what is not looked into).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias

from ckptconv.byteranges.fault_sink import PickleSequence
from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.dangerous_calls import reaches
from ckptconv.checkpoint.dangerous_globals import is_dangerous
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import OtherDType
from ckptconv.checkpoint.safe_globals import is_torchs
from ckptconv.checkpoint.weights_only.answers import Answer
from ckptconv.errors import InputChangedError, InputError, LimitError
from ckptconv.formats import torch_zip
from ckptconv.formats.foreign.pickles import LOADER
from ckptconv.formats.legacy_file import LegacyFile
from ckptconv.formats.sharded.container import ShardedContainer
from ckptconv.formats.zip_archive import Archive
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Graph,
    Py2String,
    Value,
    args_of,
    children,
    is_global,
    walk,
)
from ckptconv.pickles.paths import Place, find_places
from ckptconv.pickles.python2_names import imported_name
from ckptconv.pickles.referrers import Referrers
from ckptconv.safety.nested_pickles import (
    Encoded,
    Inner,
    Undecidable,
    byte_strings,
    is_numpy,
    pickles_from,
    pickles_in,
    pickles_in_member,
    string_length,
)
from ckptconv.safety.torch_load import Loading, torch_loading

__all__ = ["Concern", "Kind", "Level", "concerns", "concerns_in", "dangers_carried", "level_of"]

#: What is refused and needs no code is so for a frozenset, for opcodes that torch's safe loader does not know, for an
#: argument that a function of torch's does not take, for a class that torch allows once a module of its own is
#: imported, or because torch.load reads no such container.
Level: TypeAlias = Literal[
    "holds no code",
    "loads with weights_only=True",
    "not known to load with weights_only=True, needs no code",
    "refused by weights_only=True, needs no code",
    "needs code",
    "dangerous",
]

#: The worst first. ``unknown``: nobody can tell what is there.
Kind: TypeAlias = Literal["dangerous", "unknown", "needs code"]
_KINDS: tuple[Kind, ...] = ("dangerous", "unknown", "needs code")

_NOT_LISTED = "others that are not listed"


@dataclass(frozen=True)
class Concern:
    """A global that torch's safe loader refuses, as the reading Python looks it up, or what else there is that nobody
    can judge; where it stands first, and in how many more places. `inside`: alone in pickles that loading leaves
    as they are, in byte strings and in other members of the file.
    """

    name: str
    path: str
    kind: Kind
    more: int = 0
    inside: bool = False

    @property
    def dangerous(self) -> bool:
        """Whether no checkpoint needs it, and attacks do."""
        return self.kind == "dangerous"


def concerns(checkpoint: Checkpoint, *, storages: bool = False) -> list[Concern]:
    """What is to be known of `checkpoint` before it is loaded, the worst first. `storages`: each is asked whether
    ``numpy.load`` takes it for an array of objects, which costs a read of each.
    """
    search = _Search(storages=storages)
    search.checkpoint(checkpoint, "")
    for part in _parts(checkpoint):
        for name, other in part.beside.items():
            search.checkpoint(other, f"{name}: ")
        search.members(part)
    for graph in _around(checkpoint):
        search.left = _left_for(graph)
        search.graph(graph, _Where(graph, "around the object: "), checkpoint.source, 0)
    return search.listed()


def concerns_in(pickles: Iterable[PickleSequence]) -> list[Concern]:
    """What is to be known of `pickles` that no checkpoint can be made of: what they name before
    they break off, because loading them runs that much.
    """
    search = _Search()
    for each in pickles:
        assert isinstance(each.of, Readable)
        search.left = LIMITS.nested_pickles * each.of.size
        try:
            for inner in pickles_from(each.of, each.name, each.number, each.of.size):
                if not isinstance(inner, int):
                    inner.graph.globals = [node for node in inner.graph.globals if str(node) not in each.known]
                    search.graph(inner.graph, _Where(inner.graph, ""), inner.of, 0)
        except (Undecidable, InputError):  # which was said when it was to be read
            continue
    return search.listed()


def dangers_carried(checkpoint: Checkpoint, *, as_archive: bool) -> list[Concern]:
    """What is dangerous in `checkpoint`, edited, or cannot be judged, and would be in all that is written of it but
    safetensors; the worst first. `as_archive`: what its own archive has besides is kept.
    """
    search = _Search(carried=True)
    search.checkpoint(checkpoint, "")
    if as_archive and checkpoint.script_classes is None:
        search.members(checkpoint)
    return search.listed()


def level_of(checkpoint: Checkpoint, found: Iterable[Concern], loading: Loading | None = None) -> Level:
    """How safe it is to load `checkpoint`, in which :func:`concerns` has `found` something or nothing.

    `loading`: what :func:`ckptconv.safety.torch_load.torch_loading` says of it, where that was asked before.
    """
    met = {concern.kind for concern in found if concern.kind != "needs code" or not concern.inside}
    if met:
        return "dangerous" if "dangerous" in met else "needs code"
    if not checkpoint.graph.opcodes:
        return "holds no code"
    return _BY_ANSWER[(loading or torch_loading(checkpoint)).answer]


_BY_ANSWER: dict[Answer, Level] = {
    "loads": "loads with weights_only=True",
    "not known": "not known to load with weights_only=True, needs no code",
    "refused": "refused by weights_only=True, needs no code",
}


def _around(checkpoint: Checkpoint) -> list[Graph]:
    """The pickles of a file of torch before 1.6 that stand around its object."""
    containers = [part.container for part in _parts(checkpoint)]
    return [graph for each in containers if isinstance(each, LegacyFile) for graph in each.around]


def _parts(checkpoint: Checkpoint) -> list[Checkpoint]:
    """The files of `checkpoint`."""
    container = checkpoint.container
    return [shard.part for shard in container.shards] if isinstance(container, ShardedContainer) else [checkpoint]


def _left_for(graph: Graph) -> int:
    return LIMITS.nested_pickles * sum(string_length(value) for value, _ in byte_strings(graph))


class _Where:
    """Paths in one graph, made when the first is asked for.

    What is `inside` a byte string stands where that does: beside `holder` in `outer`.
    """

    def __init__(
        self, of: Checkpoint | Graph, inside: str = "", outer: _Where | None = None, holder: Value = None
    ) -> None:
        self.of, self.inside, self.outer, self.holder = of, inside, outer, holder

    @cached_property
    def referrers(self) -> Referrers:
        return self.of.index.referrers if isinstance(self.of, Checkpoint) else Referrers(self.of, _places(self.of))

    def path(self, value: Value) -> str:
        path = self.referrers.path(value)
        if self.outer is None:
            return self.inside + path
        outer = f"{self.outer.path(self.holder)} ({self.inside} inside)"
        return outer if path == "." else f"{outer}/{path}"


def _places(graph: Graph) -> Iterator[Place]:
    """The places in a `graph` that is no checkpoint, as far as there is room for them."""
    try:
        yield from find_places(graph.root, lambda _: None, "", graph.opcodes)
    except LimitError:
        return


class _Search:
    """Collects concerns by their names.

    `carried`: only what is dangerous or cannot be judged, and only in byte strings that the graph still has.
    """

    def __init__(self, *, carried: bool = False, storages: bool = False) -> None:
        self.carried = carried
        self.storages = storages
        self.found: dict[str, Concern] = {}
        self.more: Counter[str] = Counter()
        self.urgent = 0  # concerns of a kind that is always listed
        self.left = 0  # bytes that may still be looked at inside byte strings
        self.inside = 0  # pickles that were found there

    def listed(self) -> list[Concern]:
        """What was found, the worst first."""
        found = (replace(concern, more=self.more[name]) for name, concern in self.found.items())
        return sorted(found, key=lambda concern: _KINDS.index(concern.kind))

    def checkpoint(self, checkpoint: Checkpoint, before: str) -> None:
        """Look at the graph of `checkpoint`; paths begin with `before`."""
        graph = checkpoint.graph
        self.left = _left_for(graph)
        self.graph(graph, _Where(checkpoint, before), checkpoint.blobs or checkpoint.source, 0)

    def members(self, checkpoint: Checkpoint) -> None:
        """Look at the pickles and files of torch in the archive of `checkpoint` that are not its own, which whoever
        knows them loads.
        """
        archive = checkpoint.container
        known = {torch_zip.PICKLE, *checkpoint.beside, *(f"data/{key}" for key in checkpoint.storages)}
        for name, member in archive.names().items() if isinstance(archive, Archive) else ():
            is_asked = self.storages and name != torch_zip.PICKLE
            if name in known and not (is_asked and is_numpy(checkpoint.source, member)):
                continue
            self.left = LIMITS.nested_pickles * member.size
            try:
                self.member(pickles_in_member(checkpoint.source, member, name, self.left))
            except Undecidable as why:
                self.add(str(why), _Where(checkpoint, f"{name}: "), checkpoint.graph.root, "unknown", inside=True)
            except InputChangedError:
                raise
            except InputError:  # a fault of the archive's, which its checksums show
                continue

    def member(self, pickles: Iterable[Inner | int]) -> None:
        """Look at `pickles`, which are in a member of an archive."""
        for inner in pickles:
            if not isinstance(inner, int):
                self.inside += 1
                self.graph(inner.graph, _Where(inner.graph, f"{inner.name}: "), inner.of, 1)

    def graph(self, graph: Graph, where: _Where, blobs: Readable, depth: int) -> None:
        """Look at what `graph` names, and into its byte strings, of which the long ones are ranges of `blobs`."""
        read_here = _storages_loaded(graph) if depth else set()
        for name, named, kind in _named(graph):
            if id(named) not in read_here:
                self.add(name, where, named, kind, inside=depth > 0)
        for value, holder in byte_strings(graph):
            if self.inside > LIMITS.pickles_inside:
                return
            try:
                self.byte_string(value, holder, where, blobs, depth)
            except Undecidable as why:
                if self.is_wanted(holder, where, depth):
                    self.add(str(why), where, holder, "unknown", inside=True)

    def is_wanted(self, holder: Value, where: _Where, depth: int) -> bool:
        """Whether to look at what `holder` says: where it is asked what is carried, only if the graph still has it."""
        return not self.carried or depth > 0 or where.referrers.has(holder)

    def byte_string(self, value: Value | Encoded, holder: Value, where: _Where, blobs: Readable, depth: int) -> None:
        """Look at the pickles in `value`, which stands where `holder` does."""
        for inner in pickles_in(value, blobs, self.left):
            if isinstance(inner, int):
                self.left -= inner
            elif depth == LIMITS.nested_pickles:
                raise Undecidable("pickles nested too deeply")
            elif self.is_wanted(holder, where, depth):
                self.inside += 1
                if self.inside > LIMITS.pickles_inside:
                    raise Undecidable("more pickles inside than are looked into")
                self.graph(inner.graph, _Where(inner.graph, inner.name, where, holder), inner.of, depth + 1)

    def add(self, name: str, where: _Where, value: Value, kind: Kind, *, inside: bool) -> None:
        """`name` is, or stands at, `value`."""
        urgent = kind != "needs code"
        if self.carried and not urgent:
            return
        known = self.found.get(name)
        if known is None and len(self.found) >= LIMITS.concerns and not (urgent and self.urgent < LIMITS.concerns):
            name, known = _NOT_LISTED, self.found.get(_NOT_LISTED)
        self.urgent += urgent and known is None
        if known is None:
            place, more = where.referrers.of(value)
            self.found[name], self.more[name] = Concern(name, where.path(place), kind, inside=inside), more
            return
        self.more[name] += 1 if where.outer else where.referrers.of(value)[1] + 1
        worst = min(kind, known.kind, key=_KINDS.index)
        if (worst, known.inside and inside) != (known.kind, known.inside):
            self.found[name] = replace(known, kind=worst, inside=known.inside and inside)


def _named(graph: Graph) -> Iterator[tuple[str, Value, Kind]]:
    """What `graph` names that torch's safe loader refuses, where, and of what kind it is."""
    for node in graph.globals:
        if not is_torchs(node) and not isinstance(node, OtherDType):
            kind: Kind = "dangerous" if is_dangerous(node) else "needs code"
            yield imported_name(node, graph.protocol), node, kind
    for extension in graph.extensions:
        yield f"extension code {extension.code}", extension, "needs code"
    yield from reaches(graph)


def _storages_loaded(graph: Graph) -> set[int]:
    """The ids of the loaders that `graph`, a pickle inside a byte string, calls on bytes and uses for nothing else.

    So plain pickles hold storages. The bytes are looked into by themselves, so that the loader is no concern.
    """
    loaders = {id(node) for node in graph.globals if is_global(node, LOADER)}
    if not loaders:
        return loaders
    others = set()
    for node in walk([graph.root, *graph.discarded]):
        is_load = isinstance(node, Call) and id(node.callable) in loaders and _is_of_bytes(node)
        others |= {id(child) for child in children(node) if not (is_load and id(child) in loaders)}
    return loaders - others - {id(graph.root)}


def _is_of_bytes(call: Call) -> bool:
    """Whether `call` is one of a byte string, or of a text as Latin-1."""
    (value, *more) = args_of(call) or [None]
    if isinstance(value, Call) and is_global(value.callable, "_codecs.encode"):
        value = (*args_of(value), None)[0]
        return isinstance(value, (str, Blob)) and not more
    return isinstance(value, (bytes, ByteArray, Py2String, Blob)) and not more
