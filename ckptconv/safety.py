"""What loading a checkpoint would run, by an allowlist: nothing, code that has to be there, code that no checkpoint needs. Looks; runs nothing.

Every global that torch's safe loader refuses is a *concern*, wherever the file names it: in each of its pickles, in what they make and throw away, and in pickles inside byte strings
(:mod:`ckptconv.nested`, which says what is not looked into).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ckptconv.dangers import is_dangerous, reaches
from ckptconv.errors import InputError, LimitError
from ckptconv.faults import Pickles
from ckptconv.formats import plain_pickle
from ckptconv.graph import Graph, Value
from ckptconv.limits import LIMITS
from ckptconv.model import Checkpoint, Place
from ckptconv.nested import Unjudged, byte_strings, length_of, pickles_from, pickles_in
from ckptconv.pickles.imports import imported_name
from ckptconv.places import find_places
from ckptconv.rebuild_calls import OtherDType
from ckptconv.safe_loader import is_allowed, obstacles, refused_opcodes
from ckptconv.sources import Readable
from ckptconv.uses import Uses
from ckptconv.vocabulary import every_place

__all__ = ["Concern", "Level", "concerns", "concerns_in", "dangers_carried", "level_of"]

#: What is refused and needs no code is so for a frozenset, for opcodes that torch's safe loader does not know, or because torch.load reads no such container.
Level: TypeAlias = Literal[
    "holds no code", "loads with weights_only=True", "refused by weights_only=True, needs no code", "needs code", "dangerous"
]  # fmt: skip

_NOT_LISTED = "others that are not listed"


@dataclass(frozen=True)
class Concern:
    """A global that torch's safe loader refuses, as the reading Python looks it up, or what else there is that nobody can judge; where it stands first, and in how many more places."""

    name: str
    path: str
    dangerous: bool
    more: int = 0


def concerns(checkpoint: Checkpoint) -> list[Concern]:
    """What is to be known of CHECKPOINT before it is loaded, the dangerous first."""
    search = _Search()
    search.checkpoint(checkpoint, "")
    for name, other in checkpoint.beside.items():
        search.checkpoint(other, f"{name}: ")
    return sorted(search.found.values(), key=lambda concern: not concern.dangerous)


def concerns_in(pickles: Iterable[Pickles]) -> list[Concern]:
    """What is to be known of PICKLES that no checkpoint can be made of: what they name as far as they go, for who loads them runs that much."""
    search = _Search()
    for each in pickles:
        search.left = LIMITS.nested_pickles * each.of.size
        try:
            for inner in pickles_from(each.of, each.name, each.number, each.of.size):
                if not isinstance(inner, int):
                    search.graph(inner.graph, _Where(inner.graph, ""), inner.of, 0)
        except (Unjudged, InputError):  # which was said when it was to be read
            continue
    return sorted(search.found.values(), key=lambda concern: not concern.dangerous)


def dangers_carried(checkpoint: Checkpoint) -> list[Concern]:
    """What is dangerous in CHECKPOINT, edited, and would be in all that is written of it but safetensors."""
    search = _Search(carried=True)
    search.checkpoint(checkpoint, "")
    return [*search.found.values()]


def level_of(checkpoint: Checkpoint, found: Iterable[Concern]) -> Level:
    """How safe it is to load CHECKPOINT, in which :func:`concerns` has FOUND something or nothing."""
    dangerous = {concern.dangerous for concern in found}
    if dangerous:
        return "dangerous" if True in dangerous else "needs code"
    graph = checkpoint.graph
    if not graph.opcodes:
        return "holds no code"
    refused = (
        refused_opcodes(graph) or next(obstacles(graph), None) is not None or checkpoint.format == plain_pickle.NAME
    )
    return "refused by weights_only=True, needs no code" if refused else "loads with weights_only=True"


class _Where:
    """Paths in one graph, made when the first is asked for. What is INSIDE a byte string stands where that does: beside HOLDER in OUTER."""

    def __init__(
        self, of: Checkpoint | Graph, inside: str = "", outer: _Where | None = None, holder: Value = None
    ) -> None:
        self.of, self.inside, self.outer, self.holder = of, inside, outer, holder
        self._uses: Uses | None = None

    @property
    def uses(self) -> Uses:
        if self._uses is None:
            of = self.of
            self._uses = Uses(of.graph, every_place(of)) if isinstance(of, Checkpoint) else Uses(of, _places(of))
        return self._uses

    def path(self, value: Value) -> str:
        path = self.uses.path(value)
        if self.outer is None:
            return self.inside + path
        outer = f"{self.outer.path(self.holder)} ({self.inside} inside)"
        return outer if path == "." else f"{outer}/{path}"


def _places(graph: Graph) -> Iterator[Place]:
    """The places in a GRAPH that is no checkpoint, as far as there is room for them."""
    try:
        yield from find_places(graph.root, lambda _: None, "", graph.opcodes)
    except LimitError:
        return


class _Search:
    """Collects concerns by their names. CARRIED: only what is dangerous, and only in byte strings that the graph still has."""

    def __init__(self, *, carried: bool = False) -> None:
        self.carried = carried
        self.found: dict[str, Concern] = {}
        self.dangers = 0
        self.left = 0  # bytes that may still be looked at inside byte strings
        self.inside = 0  # pickles that were found there

    def checkpoint(self, checkpoint: Checkpoint, before: str) -> None:
        graph = checkpoint.graph
        self.left = LIMITS.nested_pickles * sum(length_of(value) for value, _ in byte_strings(graph))
        self.graph(graph, _Where(checkpoint, before), checkpoint.blobs or checkpoint.source, 0)

    def graph(self, graph: Graph, where: _Where, blobs: Readable, depth: int) -> None:
        """Look at what GRAPH names, and into its byte strings, of which the long ones are ranges of BLOBS."""
        for name, named, dangerous in _named(graph):
            self.add(name, where, named, dangerous=dangerous)
        for value, holder in byte_strings(graph):
            if self.inside > LIMITS.pickles_inside:
                return
            try:
                self.byte_string(value, holder, where, blobs, depth)
            except Unjudged as why:
                self.add(str(why), where, holder, dangerous=False)

    def byte_string(self, value: Value, holder: Value, where: _Where, blobs: Readable, depth: int) -> None:
        """Look at the pickles in VALUE, which stands where HOLDER does."""
        for inner in pickles_in(value, blobs, self.left):
            if isinstance(inner, int):
                self.left -= inner
            elif depth == LIMITS.nested_pickles:
                raise Unjudged("pickles nested too deeply")
            elif not self.carried or depth or where.uses.has(holder):
                self.inside += 1
                if self.inside > LIMITS.pickles_inside:
                    raise Unjudged("more pickles inside than are looked into")
                self.graph(inner.graph, _Where(inner.graph, inner.name, where, holder), inner.of, depth + 1)

    def add(self, name: str, where: _Where, value: Value, *, dangerous: bool) -> None:
        """NAME is, or stands at, VALUE."""
        if self.carried and not dangerous:
            return
        known = self.found.get(name)
        if known is None and len(self.found) >= LIMITS.concerns and not (dangerous and self.dangers < LIMITS.concerns):
            name, known = _NOT_LISTED, self.found.get(_NOT_LISTED)
        self.dangers += dangerous and known is None
        if known is None:
            places = where.uses.of(value)
            self.found[name] = Concern(name, where.path(places[0]), dangerous, len(places) - 1)
        else:
            more = 1 if where.outer else len(where.uses.of(value))
            self.found[name] = replace(known, more=known.more + more, dangerous=known.dangerous or dangerous)


def _named(graph: Graph) -> Iterator[tuple[str, Value, bool]]:
    """What GRAPH names that torch's safe loader refuses, where, and whether it is dangerous."""
    for node in graph.globals:
        dangerous = is_dangerous(node)
        if dangerous or not (is_allowed(node) or isinstance(node, OtherDType)):
            yield imported_name(node, graph.protocol), node, dangerous
    for extension in graph.extensions:
        yield f"extension code {extension.code}", extension, False
    yield from ((what, node, True) for what, node in reaches(graph))
