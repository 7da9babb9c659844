"""Scan a checkpoint for code that loading it could run. Nothing is run.

Every global that torch's safe loader refuses is a *concern*, in every pickle of the file: also in values that the
pickle throws away, and in pickles inside byte strings (:mod:`ckptconv.safety.nested_pickles`, which lists the cases
that are not searched).
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
from ckptconv.checkpoint.weights_only.objects import Answer
from ckptconv.errors import InputChangedError, InputError, LimitError
from ckptconv.formats import torch_zip
from ckptconv.formats.foreign.zips_and_pickles import LOADER
from ckptconv.formats.sharded.index import ShardedContainer
from ckptconv.formats.torch_files import LegacyFile
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
    imported_name,
    is_global,
    walk,
)
from ckptconv.pickles.paths import Place, Referrers, find_places
from ckptconv.safety.nested_pickles import (
    Encoded,
    Undecidable,
    byte_strings,
    is_numpy,
    pickles_from,
    pickles_in,
    pickles_in_member,
    string_length,
)
from ckptconv.safety.torch_load import Loading, torch_loading
from ckptconv.work import work

#: How safe it is to load a checkpoint, from safe to dangerous. torch can refuse a checkpoint that needs no code for
#: these reasons: a frozenset, opcodes that torch's safe loader does not know, an
#: argument that a function of torch does not accept, a class that torch allows only after a module of torch is
#: imported, or a container that torch.load does not read.
Level: TypeAlias = Literal[
    "holds no code",
    "loads with weights_only=True",
    "not known to load with weights_only=True, needs no code",
    "refused by weights_only=True, needs no code",
    "needs code",
    "dangerous",
]

#: The kinds of concerns, the most dangerous first. ``unknown``: the content cannot be determined.
Kind: TypeAlias = Literal["dangerous", "unknown", "needs code"]
_KINDS: tuple[Kind, ...] = ("dangerous", "unknown", "needs code")

_NOT_LISTED = "others (not listed)"


@dataclass(frozen=True)
class Concern:
    """A global that torch's safe loader refuses, or another finding.

    Attributes:
        name: The name of the global as the reading Python looks it up, or a description of the finding.
        path: The path of its first occurrence.
        kind: How dangerous it is, or ``unknown`` if this cannot be determined.
        more: The number of further occurrences.
        inside: Whether it occurs only in pickles that loading the checkpoint does not run: in byte strings and in other
            members of the file.
    """

    name: str
    path: str
    kind: Kind
    more: int = 0
    inside: bool = False

    @property
    def dangerous(self) -> bool:
        """Whether the global can do harm and no checkpoint needs it."""
        return self.kind == "dangerous"


def concerns(checkpoint: Checkpoint, *, storages: bool = False) -> list[Concern]:
    """Return the concerns of `checkpoint`, the most dangerous first.

    Its shards, the other pickles of its files and other members of its archive are searched, too. If `storages` is
    True, each storage is read as well: a storage that is a NumPy file of objects contains a pickle.
    """
    search = _Search(storages=storages)
    search.checkpoint(checkpoint, "")
    for part in _parts(checkpoint):
        for name, other in part.beside.items():
            search.checkpoint(other, f"{name}: ")
            search.members(other)
        search.members(part)
    for part in _parts(checkpoint):
        for graph in part.container.around if isinstance(part.container, LegacyFile) else ():
            search.left = _left_for(graph)
            search.graph(graph, _Where(graph, "around the object: "), checkpoint.source, 0)
    listed = search.listed()
    if torch_zip.is_exported(checkpoint):
        listed.append(Concern("a program of torch.export", "models", "needs code"))
    return listed


def concerns_in(pickles: Iterable[PickleSequence]) -> list[Concern]:
    """Return the concerns of `pickles` that cannot be read as checkpoints, the most dangerous first.

    Globals before the first fault of a pickle count, because loading runs the pickle up to the fault. A pickle that
    cannot be read at all is skipped.
    """
    search = _Search()
    for each in pickles:
        assert isinstance(each.of, Readable)
        search.left = LIMITS.nested_pickles * each.of.size
        work().grant(min(each.of.size, LIMITS.nested_opcodes))
        try:
            for inner in pickles_from(each.of, each.name, each.number, each.of.size):
                if not isinstance(inner, int):
                    inner.graph.globals = [node for node in inner.graph.globals if str(node) not in each.known]
                    search.graph(inner.graph, _Where(inner.graph, ""), inner.source, 0)
        except (Undecidable, InputError):  # the reader has reported it
            work().check()
            continue
    return search.listed()


def dangers_carried(checkpoint: Checkpoint, *, as_archive: bool) -> list[Concern]:
    """Return the dangerous and the undecidable findings that would be in the output of an edited `checkpoint`.

    The most dangerous are first. If `as_archive` is True, other members of the archive are searched, too, because
    they are copied to the output. A safetensors output contains no findings.
    """
    search = _Search(carried=True)
    search.checkpoint(checkpoint, "")
    if as_archive and checkpoint.script_classes is None:
        search.members(checkpoint)
        for name, other in checkpoint.beside.items() if torch_zip.is_exported(checkpoint) else ():
            search.checkpoint(other, f"{name}: ")
            search.members(other)
    return search.listed()


def level_of(checkpoint: Checkpoint, found: Iterable[Concern], loading: Loading | None = None) -> Level:
    """Return how safe it is to load `checkpoint`.

    Findings inside byte strings and other members count only if they are dangerous or unknown.

    Args:
        checkpoint: The checkpoint.
        found: The result of :func:`concerns`.
        loading: The result of :func:`ckptconv.safety.torch_load.torch_loading`, or None to compute it if it is needed.
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


def _parts(checkpoint: Checkpoint) -> list[Checkpoint]:
    """Return the shards of `checkpoint`, or a list of only `checkpoint` if it has none."""
    container = checkpoint.container
    return [shard.part for shard in container.shards] if isinstance(container, ShardedContainer) else [checkpoint]


def _left_for(graph: Graph) -> int:
    """Return the number of bytes that may be searched for pickles inside the byte strings of `graph`."""
    return LIMITS.nested_pickles * sum(string_length(value) for value, _ in byte_strings(graph))


class _Where:
    """The paths in one graph. They are computed when the first path is needed.

    Args:
        subject: The checkpoint or graph.
        inside: A prefix of the paths. For a pickle in a byte string, the name of the pickle.
        outer: The paths of the graph that contains the byte string, or None.
        holder: The node of the byte string in the outer graph.
    """

    def __init__(
        self, subject: Checkpoint | Graph, inside: str = "", outer: _Where | None = None, holder: Value = None
    ) -> None:
        self.subject, self.inside, self.outer, self.holder = subject, inside, outer, holder

    @cached_property
    def referrers(self) -> Referrers:
        """The users of each node."""
        subject = self.subject
        return subject.index.referrers if isinstance(subject, Checkpoint) else Referrers(subject, _places(subject))

    def path(self, value: Value) -> str:
        """Return the path of `value`.

        In a pickle inside a byte string, the path starts with the path of the byte string.
        """
        path = self.referrers.path(value)
        if self.outer is None:
            return self.inside + path
        outer = f"{self.outer.path(self.holder)} ({self.inside} inside)"
        return outer if path == "." else f"{outer}/{path}"


def _places(graph: Graph) -> Iterator[Place]:
    """Yield the places in `graph`. If the paths exceed the limit, the remaining places are left out."""
    try:
        yield from find_places(graph.root, lambda _: None, "", graph.opcodes)
    except LimitError:
        return


class _Search:
    """A search that collects concerns by name.

    Args:
        carried: Whether to collect only findings that are dangerous or unknown, and only from byte strings that the
            graph still contains after the edits.
        storages: Whether to search storages that are NumPy files.
    """

    def __init__(self, *, carried: bool = False, storages: bool = False) -> None:
        self.carried = carried
        self.storages = storages
        self.found: dict[str, Concern] = {}
        self.more: Counter[str] = Counter()
        self.urgent = 0  # concerns of a kind that is always listed
        self.left = 0  # bytes that may still be searched inside byte strings
        self.inside = 0  # pickles that were found inside byte strings

    def listed(self) -> list[Concern]:
        """Return the concerns, the most dangerous first."""
        found = (replace(concern, more=self.more[name]) for name, concern in self.found.items())
        return sorted(found, key=lambda concern: _KINDS.index(concern.kind))

    def checkpoint(self, checkpoint: Checkpoint, before: str) -> None:
        """Search the graph of `checkpoint`. The text `before` is put before all paths."""
        graph = checkpoint.graph
        self.left = _left_for(graph)
        self.graph(graph, _Where(checkpoint, before), checkpoint.blobs or checkpoint.source, 0)

    def members(self, checkpoint: Checkpoint) -> None:
        """Search the other members of the archive of `checkpoint` that are pickles or files of torch or NumPy.

        Nothing is searched if the checkpoint is not in an archive. A member with a fault is skipped.
        """
        archive, folder = checkpoint.container, "data"
        if isinstance(archive, torch_zip.ExportedProgram):
            archive, folder = archive.archive, "data/weights"
        known = {torch_zip.PICKLE, *checkpoint.beside, *(f"{folder}/{key}" for key in checkpoint.storages)}
        for name, member in archive.names.items() if isinstance(archive, Archive) else ():
            is_asked = self.storages and name != torch_zip.PICKLE
            if name in known and not (is_asked and is_numpy(member)):
                continue
            self.left = LIMITS.nested_pickles * member.size
            work().grant(member.stored_size)
            try:
                for inner in pickles_in_member(member, name, self.left):
                    if not isinstance(inner, int):
                        self.inside += 1
                        self.graph(inner.graph, _Where(inner.graph, f"{inner.name}: "), inner.source, 1)
            except Undecidable as why:
                self.add(str(why), _Where(checkpoint, f"{name}: "), checkpoint.graph.root, "unknown", inside=True)
            except InputChangedError:
                raise
            except InputError:  # a fault of the archive, which its checksums show
                work().check()
                continue

    def graph(self, graph: Graph, where: _Where, blobs: Readable, depth: int) -> None:
        """Add the concerns of `graph` and of the pickles in its byte strings.

        Args:
            graph: The graph.
            where: The paths of the graph.
            blobs: The source of long byte strings.
            depth: The number of byte strings and members that contain the pickle.
        """
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
        """Return whether findings in the byte string at the node `holder` count.

        They do not if only findings of the output are wanted and the edited graph no longer contains `holder`. Byte
        strings of nested pickles (`depth` above 0) always count.
        """
        return not self.carried or depth > 0 or where.referrers.has(holder)

    def byte_string(self, value: Value | Encoded, holder: Value, where: _Where, blobs: Readable, depth: int) -> None:
        """Search the pickles in `value`, the byte string at the node `holder`.

        The other arguments are as in :meth:`graph`.

        Raises Undecidable if the content cannot be determined, or if there are too many pickles or levels.
        """
        for inner in pickles_in(value, blobs, self.left):
            if isinstance(inner, int):
                self.left -= inner
            elif depth == LIMITS.nested_pickles:
                raise Undecidable("pickles nested too deeply")
            elif self.is_wanted(holder, where, depth):
                self.inside += 1
                if self.inside > LIMITS.pickles_inside:
                    raise Undecidable("too many nested pickles to check")
                self.graph(inner.graph, _Where(inner.graph, inner.name, where, holder), inner.source, depth + 1)

    def add(self, name: str, where: _Where, value: Value, kind: Kind, *, inside: bool) -> None:
        """Add a concern, or merge it with an earlier concern of the same name. The worse kind is kept.

        If there are too many concerns, all others are counted under one common name. Nothing is added for the kind
        ``needs code`` if only findings of the output are wanted.

        Args:
            name: The name of the concern.
            where: The paths of the graph.
            value: The node in the graph.
            kind: How dangerous the concern is.
            inside: Whether it is in a byte string or another member.
        """
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
    """Yield the name, the node and the kind of each concern in `graph`: globals, extension codes and other findings."""
    for node in graph.globals:
        if not is_torchs(node) and not isinstance(node, OtherDType):
            kind: Kind = "dangerous" if is_dangerous(node) else "needs code"
            yield imported_name(node, graph.protocol), node, kind
    for extension in graph.extensions:
        yield f"extension code {extension.code}", extension, "needs code"
    yield from reaches(graph)


def _storages_loaded(graph: Graph) -> set[int]:
    """Return the ids of the loader functions that `graph`, a pickle in a byte string, calls only with byte strings.

    Plain pickles contain their storages in this form. The byte strings are searched separately, so the function
    itself is not a concern.
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
    """Return whether the only argument of `call` is a byte string or a call that encodes a text as bytes."""
    (value, *more) = args_of(call) or [None]
    if isinstance(value, Call) and is_global(value.callable, "_codecs.encode"):
        value = (*args_of(value), None)[0]
        return isinstance(value, (str, Blob)) and not more
    return isinstance(value, (bytes, ByteArray, Py2String, Blob)) and not more
