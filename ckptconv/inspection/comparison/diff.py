"""Compare two checkpoints: select state dicts, pair names, compare tensors and other objects, read values."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptconv.byteranges.spans import Meter
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import FROM_TYPE
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo, matches
from ckptconv.conversion.options import takes
from ckptconv.dtypes import CODES
from ckptconv.edits.apply import apply
from ckptconv.edits.dequantizing import show_values
from ckptconv.edits.names import unwrapped
from ckptconv.edits.options import NO_EDITS, Edits, split_edits
from ckptconv.edits.selection import named_tensors, select
from ckptconv.errors import CkptconvError, NoMatchError, RefusedError, count, some
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.formats.torch_zip import is_exported
from ckptconv.hints import Option, Placeholder, command, command_line, for_python, option
from ckptconv.inspection.comparison.differences import (
    Difference,
    OtherDifference,
    TensorDifference,
    TensorFacts,
    ValueDifference,
)
from ckptconv.inspection.comparison.options import ALL, Compared, DiffOptions
from ckptconv.inspection.comparison.pairing import Pairing, Side
from ckptconv.inspection.comparison.values import DifferenceFound, Key, Values, bytes_of, have_equal_sums
from ckptconv.inspection.diagnosis.diagnose import danger
from ckptconv.inspection.grouping import rules_between
from ckptconv.inspection.summary import COPIES
from ckptconv.inspection.values import values_of
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Global, Value, args_of, gc_paused
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import RowCall, RowForm
from ckptconv.safety.scan import concerns
from ckptconv.stores.memory import Input
from ckptconv.work import CHARACTERS, work

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PARTS = 64  # state dicts of one file that are tried at most
_TRIED = 8  # names whose prefix is looked for in the other file
_T = TypeVar("_T")
_SHOWN = 3  # paths in a brief note
_ASKED = "left out as requested"


@dataclass(frozen=True)
class _Part:
    """A state dict, or a pickled module: its path, its names, and the options that select it."""

    path: str
    names: Collection[str]
    options: tuple[Option, ...]


def command_that_fits(
    a: Checkpoint, b: Checkpoint, edits: Edits, paths: tuple[str, str], more: Sequence[Option] = ()
) -> str | None:
    """Return the ``ckptconv diff`` command that compares the common tensors of `a` and `b`.

    None if no such command is found.

    Args:
        a: The first checkpoint. None of its names is in `b`.
        b: The second checkpoint.
        edits: The edits of `a`. Its selection is applied to `b` too.
        paths: The paths of both.
        more: Further options of the command.
    """
    if edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix:
        return None  # another edit of names could apply in the wrong order
    again = options_of(edits)
    parts = _parts(a, edits), _parts(b, Edits())
    for step in (1,) if again else (1, -1):  # options of names apply to the first file
        if options := _options(*parts[::step]):
            return command_line("diff", *map(Path, paths[::step]), *again, *options, *more)
    return None


def options_of(edits: Edits) -> tuple[Option, ...]:
    """Return the options that select state dicts and edit names in `edits`."""
    asked = ("state_dict", "select", "include", "exclude", "unwrap", "rename", "strip_prefix", "add_prefix")
    values = ((name, getattr(edits, name)) for name in asked)
    return tuple(Option(name, value) for name, value in values if value not in (None, False, ()))


def _parts(checkpoint: Checkpoint, edits: Edits) -> list[_Part]:
    """Return the state dicts and modules of `checkpoint`. If `edits` already select one, return only that."""
    detected = checkpoint.detected
    taken = edits.select is not None or edits.state_dict
    parts = [
        _Part(part.path, part.names(), _taking(part.path))
        for part in detected.state_dicts
        if part.path == "." or not taken
    ]
    if not taken:
        parts += [
            _Part(f"a module at {part.path}", part.names(), (*_taking(part.path), Option("state_dict")))
            for part in detected.modules
        ]
    return parts


def _taking(path: str) -> tuple[Option, ...]:
    """Return the options that select the object at `path`. None are needed for the root."""
    return () if path == "." else (Option("select", path),)


def _options(ours: list[_Part], theirs: list[_Part]) -> tuple[Option, ...]:
    """Return options with which at least half of the names of one of `ours` match those of one of `theirs`.

    Else nothing.

    The state dict of `theirs` must be its root, or have the same path. Of several results, the one with the most common
    names is returned.
    """
    best: tuple[tuple[int, int, list[str]], tuple[Option, ...]] = (0, 0, []), ()
    by_path = {their.path: their for their in theirs}
    for our in ours[:_PARTS]:
        for their in {".": by_path.get("."), our.path: by_path.get(our.path)}.values():
            taking = our.options if their and their.path == "." else ()
            names = set(their.names) if their else set()
            for edit, renamed in _renamed(our.names, names):
                common = len(names.intersection(renamed))
                if 2 * common >= max(len(names), len(renamed)) > 0 and (taking or edit):
                    options = (*taking, *edit)
                    best = max(best, ((common, *_simple(options)), options), key=lambda each: each[0])
    return best[1]


def _simple(options: tuple[Option, ...]) -> tuple[int, list[str]]:
    """Return a sort key for `options`. It is larger for options that are shorter to type.

    ``--unwrap`` counts as longer than a single prefix that has the same effect.
    """
    words = [word for each in options for group in each.words() for word in group]
    return -len(words) - 2 * (Option("unwrap") in options), words


def _renamed(ours: Collection[str], theirs: Collection[str]) -> Iterator[tuple[tuple[Option, ...], Collection[str]]]:
    """Yield pairs of options and names: `ours` unchanged, and `ours` after each edit that could make them equal
    `theirs`.
    """
    yield (), ours
    yield (Option("unwrap"),), set(unwrapped(ours).values())
    for prefix in _before(theirs, ours):
        yield (Option("strip_prefix", prefix),), [name.removeprefix(prefix) for name in ours]
    for prefix in _before(ours, theirs):
        yield (Option("add_prefix", prefix),), [prefix + name for name in ours]


def _before(short: Collection[str], long: Collection[str]) -> set[str]:
    """Return the prefixes that some of `short` have in `long`. Only the first names of `short` are tried."""
    return {
        name.removesuffix(each)
        for each, _ in zip(short, range(_TRIED), strict=False)
        for name in long
        if each and name.endswith(f".{each}")
    }


@for_python
@takes(DiffOptions, Compared)
def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], **options: Unpack[DiffOptions]) -> Difference:
    """Compare the checkpoints `a` and `b`. Their formats may differ.

    Neither is executed, loaded or changed. Options that select a part of a checkpoint apply to both. If `b` does not
    have this part, all of `b` is compared. Options that edit names apply only to `a`. If one of the two is safetensors,
    only the state dict of the other is compared.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        **options: The keys of :class:`~ckptconv.inspection.comparison.options.DiffOptions`.

    Returns:
        The differences. ``.same`` is True if there are none.

    Raises:
        CkptconvError: One of its subclasses, if a checkpoint cannot be read or an edit cannot be applied to `a`.
        ArgumentTypeError: An option has a wrong type, or no option has that name.
    """
    edits, others = split_edits(options)
    return compare(a, b, edits, Compared(**others))


def compare(
    a: Input,
    b: Input,
    edits: Edits,
    compared: Compared = ALL,
    *,
    brief: bool = False,
    progress: Meter | None = None,
) -> Difference:
    """Return the result of :func:`diff`. `a` and `b` can also be file objects.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        edits: The edits of `a`, and the selection for both.
        compared: The facts to compare, and the tolerances.
        brief: Whether notes name only a few of many paths.
        progress: Called with the number of bytes to compare. It returns a context manager for a function that is called
            with the number of bytes compared since its last call.
    """
    with _paired(a, b, edits, compared, brief=brief, progress=progress, judged=True) as comparison:
        comparison.values.run(progress)
        difference = comparison.result()
        if compared.values or compared.histogram:
            difference = replace(difference, differing=comparison.with_statistics(difference.differing))
        return difference


def are_same(
    a: Input,
    b: Input,
    edits: Edits,
    compared: Compared = ALL,
    *,
    progress: Meter | None = None,
) -> bool:
    """Return whether :func:`compare` would find no difference. The comparison stops at the first difference."""
    with _paired(a, b, edits, compared, brief=True, progress=progress) as comparison:
        if comparison.differs_already():
            return False
        comparison.values.stops = True
        try:
            comparison.values.run(progress)
        except DifferenceFound:
            return False
        return comparison.result().same


@contextmanager
def _paired(
    a: Input, b: Input, edits: Edits, compared: Compared, *, brief: bool, progress: Meter | None, judged: bool = False
) -> Iterator[_Comparison]:
    """Open `a` and `b`, and yield their comparison. Everything except tensor values has been compared.

    With `judged`, dangerous calls in both are recorded too. Raises InputChangedError at the end of the block if a file
    has changed.
    """
    with (
        open_input(a, download=compared.download, progress=progress) as source_a,
        open_input(b, download=compared.download, progress=progress) as source_b,
    ):
        with gc_paused():
            first = opening.read(source_a)
            checkpoints = first, opening.read(source_b, first if edits == NO_EDITS else None)
            sides = dict(zip("AB", checkpoints, strict=True)) if judged else {}
            dangers = {side: danger(concerns(checkpoint)) for side, checkpoint in sides.items()}  # before edits
            comparison = _Comparison(*checkpoints, edits, compared, brief=brief)
            comparison.dangers = tuple(f"{side}: {text}" for side, text in dangers.items() if text)
            comparison.pair()
            comparison.notes += filter(None, map(opening.interrupted, (source_a, source_b)))
        yield comparison
        source_a.check_unchanged()
        source_b.check_unchanged()


class _Comparison:
    """The steps of one comparison, in the order in which they run."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        edits: Edits,
        compared: Compared,
        *,
        brief: bool,
    ) -> None:
        self.a, self.b, self.edits, self.compared = a, b, edits, compared
        self.brief = brief
        self.formats = a.format, b.format
        self.paths = str(a.source.path), str(b.source.path)
        self.weights_alone = [why for checkpoint in (a, b) if (why := _why_weights_alone(checkpoint))]
        self.notes: list[str] = []
        self.dangers: tuple[str, ...] = ()
        self.rest: tuple[list[str], list[str]] = ([], [])
        self.take_parts()
        self.pairing = Pairing(Side(a), Side(b), bool(self.weights_alone), self.rest, self.equal_rows)
        self.values = Values(a, b, compared)
        self.alike: dict[tuple[RowForm | None, RowForm | None], bool] = {}  # see are_alike()
        #: Two places, what differs apart from values, and the comparisons of values.
        self.found: list[tuple[tuple[Place, Place], TensorDifference | None, list[Key]]] = []
        self.places: dict[str, tuple[Place, Place]] = {}  # of tensors that differ
        self.others: list[tuple[OtherDifference, Key | None]] = []

    # Parts

    def take_parts(self) -> None:
        """Reduce both sides to the state dict that the options select, and edit the names of `a`.

        If one side has only tensors (safetensors), both are reduced to their state dicts.
        """
        alone = bool(self.weights_alone)
        if alone and not (self.a.tensors or self.b.tensors):
            self.notes.append(f"neither has a tensor: {self.weights_alone[0]}")
            return
        edits = replace(self.edits, state_dict=True) if alone else self.edits
        try:
            left = apply(self.a, edits, is_emitted=False)
        except NoMatchError as error:
            hint = self.hint_of_other_order(edits)
            if hint is None:
                raise
            raise NoMatchError(
                error.what, where=error.where, expected=error.expected, got=error.got, hint=hint
            ) from None
        self.a.restart_paths()
        self.notes += left.notes
        if self.edits.unwrap and not left.names:
            self.edits = replace(self.edits, unwrap=False)
        left_in_b = self.take_part_of_b(alone=alone)
        self.filter_b()
        self.show_values()
        self.b.restart_paths()
        if alone and self.edits.select is None and not self.edits.state_dict:
            self.rest[0].extend(each.path for each in left.left_behind if each.why != _ASKED)
            self.rest[1].extend(each.path for each in left_in_b)

    def show_values(self) -> None:
        """Dequantize the quantized weights of each side whose names on the other side belong to unquantized tensors."""
        both = self.a, self.b
        has_codes = [not CODES.isdisjoint(info.dtype for info in each.tensors.values()) for each in both]
        if not any(has_codes):
            return
        plain = [
            {name for found in each.detected.state_dicts for name in found.names()}
            - {info.name for info in each.tensors.values() if info.dtype in CODES}
            for each in both
        ]
        for side, each, wanted, found in zip("AB", both, reversed(plain), has_codes, strict=True):
            for layout, n in show_values(each, wanted).items() if found else ():
                weights = count(n, "weight")
                self.notes.append(f"{side} stores {weights} as {layout}: compared by value, in float32, without scales")

    def hint_of_other_order(self, edits: Edits) -> str | None:
        """Return a hint to give `b` first, if `edits` can be applied to `b`. Else return None. `b` is changed."""
        try:
            apply(self.b, edits, is_emitted=False)
        except CkptconvError:
            return None
        names = edits.unwrap or edits.strip_prefix or edits.rename or edits.add_prefix
        why = "options that change names apply to the first file" if names else "only the first file must contain it"
        files = map(Path, self.paths[::-1])
        return f"{why}: " + command("diff", *files, *options_of(self.edits), *self.compared.options())

    def take_part_of_b(self, *, alone: bool) -> list[LeftBehind]:
        """Reduce `b` to the selected part, if `b` has it, and return the objects that are left out.

        `alone` requests the state dict. A note is added if all of `b` is compared instead. Raises RefusedError if `b`
        has several state dicts, or none although one is needed.
        """
        path = self.edits.select
        if path is not None:
            try:
                return select(self.b, Edits(select=path, state_dict=alone or self.edits.state_dict), is_emitted=False)
            except NoMatchError:
                self.notes.append(f"B has nothing at {path}, so all of B is compared")
        try:
            return select(self.b, Edits(state_dict=alone or self.edits.state_dict), is_emitted=False)
        except RefusedError as error:
            main = self.b.detected.main()
            if not alone and not main:
                self.notes.append("B has no state dict, so all of B is compared")
                return []
            if len(main) == 1 or not (main or named_tensors(self.b)):
                raise
            which = "say which with " + option("select", Placeholder("PATH"))
            hint = which + "; if the other file has nothing there, give this one first"
            raise RefusedError(error.what, where=error.where, hint=hint) from None

    def filter_b(self) -> None:
        """Apply the globs to `b`. A glob that matches nothing in `b` is not applied, and a note names it."""
        include, exclude = (_meaningful(self.b, globs) for globs in (self.edits.include, self.edits.exclude))
        for glob in (*self.edits.include, *self.edits.exclude):
            if glob not in include and glob not in exclude:
                remark = "" if include or exclude else ", so all of B is compared"
                self.notes.append(f"no name in B matches {glob!r}{remark}")
        select(self.b, Edits(include=include, exclude=exclude), is_emitted=False)

    # Names, and everything but values

    def pair(self) -> None:
        """Pair the names of both sides. Unless only names are compared, compare everything except tensor values."""
        for checkpoint in (self.a, self.b):
            checkpoint.index.forget_places()
        self.pairing.run()
        del self.pairing.equal_rows  # a cycle with this object, whose memory would be freed late
        if self.compared.names_only:
            return
        for pair in self.pairing.tensors:
            self.compare_tensors(pair)
        for place_a, place_b in self.pairing.storages:
            self.compare_storages(place_a, place_b)
        if self.a.is_state_dict and self.b.is_state_dict:
            for key in {**self.a.metadata, **self.b.metadata}:
                texts = self.a.metadata.get(key), self.b.metadata.get(key)
                unsaid = key == "format" and None in texts  # every writer may add it, and no reader needs it
                if texts[0] != texts[1] and not unsaid:
                    words = [None if text is None else repr(text[:60]) for text in texts]
                    self.others.append((OtherDifference(f"__metadata__/{key}", *words), None))

    def equal_rows(self, pairs: list[tuple[Value, Value]]) -> tuple[dict[int, TensorInfo], dict[int, TensorInfo]]:
        """Return the tensors in `pairs` that :meth:`compare_tensors` would find equal by their checksums.

        Tensors of one form differ only in their storages, so only these are compared for each pair. `pairs` contains
        values with the same name. Nothing is returned if tensors share storages, because these can be tied.
        """
        equal: tuple[dict[int, TensorInfo], dict[int, TensorInfo]] = {}, {}
        if self.compared.full or self.compared.names_only or not self.are_unshared():
            return equal
        infos, others = self.a.tensor_nodes, self.b.tensor_nodes
        for x, y in pairs:
            a, b = infos.get(id(x)), others.get(id(y))
            if a and b and self.are_alike((x, a), (y, b)) and have_equal_sums(a.storage, b.storage):
                equal[0][id(x)], equal[1][id(y)] = a, b
        self.values.believe(equal[0].values(), equal[1].values())
        return equal

    def are_alike(self, *tensors: tuple[Value, TensorInfo]) -> bool:
        """Return whether two tensors, each with its call, are rows that are equal if their storages are equal."""
        (x, a), (y, b) = tensors
        if not (isinstance(x, RowCall) and isinstance(y, RowCall) and (forms := (x.row, y.row)) and all(forms)):
            return False
        if forms not in self.alike:  # rows of one form differ only in their storages
            facts = self.facts(x, a, self.pairing.a), self.facts(y, b, self.pairing.b)
            one, other = ((*each[:2], *each[3:]) for each in facts)  # without the device
            is_same = one == other and a.kind == "strided" and a.nbytes > 0
            self.alike[forms] = is_same and self.values.is_same_view(a, b)
        return self.alike[forms] and (self.pairing.tensors_alone or a.device == b.device)

    def are_unshared(self) -> bool:
        """Return whether no tensors of one side share a storage, so that none are tied."""
        return self.a.index.is_unshared and self.b.index.is_unshared

    def compare_tensors(self, pair: tuple[Place, Place]) -> None:
        """Compare two tensors with the same name, except for their values. Their values are queued for comparison."""
        place_a, place_b = pair
        side_a, side_b = self.pairing.a, self.pairing.b
        a, b = side_a.tensor(place_a.node), side_b.tensor(place_b.node)
        assert a and b and isinstance(place_a.node, Call) and isinstance(place_b.node, Call)
        is_same = self.are_alike((place_a.node, a), (place_b.node, b))
        facts = ((), ()) if is_same else (self.facts(place_a.node, a, side_a), self.facts(place_b.node, b, side_b))
        if facts[0] == facts[1] and a.kind == "strided":
            self.found.append((pair, None, [self.values.want(a, b)]))
            return
        work().charge(COPIES * (len(a.device) + len(b.device)) // CHARACTERS)  # text and JSON copy them
        differing: Any = map(_pair, *facts)
        difference = TensorDifference(place_a.path, *differing)
        keys: list[Key] = []
        is_comparable = not difference.shape and not difference.made_of
        if is_comparable and difference.dtype:
            from ckptconv.byteranges.kernels.comparing import comparable  # imports torch

            is_comparable = comparable(a.dtype, b.dtype)
        if is_comparable:
            if a.kind == "strided":
                keys.append(self.values.want(a, b))
            elif not difference.dtype:
                same, inner = self.pairing.same_parts(place_a.node, place_b.node)
                alike = [(x, y) for x, y in inner if (x.shape, x.dtype) == (y.shape, y.dtype)]
                if not (same and len(alike) == len(inner)) and not difference.requires_grad:
                    difference = replace(difference, made_of=(a.kind, f"{b.kind}, with different parts"))
                keys += [self.values.want(x, y) for x, y in alike]
        if keys or _is_described(difference):
            self.found.append((pair, difference, keys))

    def facts(self, node: Call, info: TensorInfo, side: Side) -> tuple[Any, ...]:
        """Return what is compared of a tensor, in the order of the fields of :class:`TensorDifference`."""
        facts = info.device, info.requires_grad, _class_of(node, info, side)
        return info.dtype, info.shape, *((None,) * 3 if self.pairing.tensors_alone else facts), info.kind

    def compare_storages(self, place_a: Place, place_b: Place) -> None:
        """Compare the class, size and device of two storages without tensors.

        If they agree, queue their bytes for comparison.
        """
        a, b = self.pairing.a.storages[id(place_a.node)], self.pairing.b.storages[id(place_b.node)]
        words = self.pairing.a.words(place_a.node), self.pairing.b.words(place_b.node)
        classes = storage_id(place_a.node).cls.name, storage_id(place_b.node).cls.name
        if classes[0] != classes[1]:
            words = f"{classes[0]}, {words[0]}", f"{classes[1]}, {words[1]}"
        key = None
        if words[0] == words[1]:
            key = self.values.want(bytes_of(a), bytes_of(b))
            words = words[0], "other bytes"
        self.others.append((OtherDifference(place_a.path, *words), key))

    # Results

    def with_statistics(self, differing: Sequence[TensorDifference]) -> tuple[TensorDifference, ...]:
        """Return `differing` with statistics of the elements on both sides. The tensors are read."""
        a, b = (
            values_of(
                {each.path: side.at(self.places[each.path][i]) for each in differing},
                side.checkpoint.byteorder,
                histogram=self.compared.histogram,
            )
            for i, side in enumerate((self.pairing.a, self.pairing.b))
        )
        return tuple(replace(each, statistics=(a.get(each.path), b.get(each.path))) for each in differing)

    def differs_already(self) -> bool:
        """Return whether a difference is known before tensor values are read."""
        pairing = self.pairing
        if pairing.a.only or pairing.b.only:
            return True
        others = () if self.compared.names_only else (*pairing.others, *(each for each, key in self.others if not key))
        unlike = any(difference and _is_described(difference) for _, difference, _ in self.found)
        return bool(others) or unlike or None in self.values.found.values()

    def result(self) -> Difference:
        """Return the complete difference, after tensor values were compared."""
        differing = []
        for pair, difference, keys in self.found:
            values = _sum([self.values.found[key] for key in keys]) if keys else None
            if values is None or values.differing or (difference and _is_described(difference)):
                place_a, place_b = self.places[pair[0].path] = pair
                difference = difference or TensorDifference(place_a.path)
                sides = TensorFacts(*self.pairing.a.facts(place_a)), TensorFacts(*self.pairing.b.facts(place_b))
                differing.append(replace(difference, values=values, sides=sides))
        states = {info.path for side in (self.a, self.b) for info in side.detected.rng_states} if differing else set()
        others = [each for each, key in self.others if key is None or self.differs(key)]
        pairing = self.pairing
        infos = [info for place, _ in pairing.tensors if (info := pairing.a.tensor(place.node))] + pairing.equal
        if not self.a.index.is_unshared:  # ties count once
            infos = [*{info.view if info.storage else (id(info),): info for info in infos}.values()]
        near = [pair[0].path for pair, _, keys in self.found if not self.values.near.keys().isdisjoint(keys)]
        return Difference(
            *self.paths,
            self.formats,
            len(pairing.tensors) + len(pairing.equal),
            sum(info.nbytes for info in infos),
            tuple(pairing.a.only),
            tuple(pairing.b.only),
            tuple(
                replace(difference, rng_state=True) if difference.path in states else difference
                for difference in differing
            ),
            () if self.compared.names_only else (*pairing.others, *others),
            (*self.notes, *self.more_notes(near)),
            self.suggestion(),
            len(near),
            self.dangers,
        )

    def suggestion(self) -> str | None:
        """Return a command that is useful for this difference, or None.

        If only the grouping of tensors differs (such as fused weights), the command converts `a` to the grouping of
        `b`. If no name is common, the command compares matching names.
        """
        pairing = self.pairing
        if not (pairing.a.only and pairing.b.only):
            return None
        if rules := rules_between(self.a, self.b):
            files = Path(self.paths[0]), Placeholder("OUT")
            return command_line("convert", *files, *options_of(self.edits), *rules)
        if pairing.tensors or pairing.equal:
            return None
        return command_that_fits(self.a, self.b, self.edits, self.paths, self.compared.options())

    def differs(self, key: Key) -> bool:
        """Return whether the values of `key` differ or could not be compared."""
        values = self.values.found[key]
        return values is None or values.differing > 0

    # Notes

    def more_notes(self, near: list[str]) -> Iterator[str]:
        """Yield notes about differences within the tolerance, unread storages, ties, warnings, and data not compared.

        `near` are the paths of tensors that differ within the tolerance.
        """
        if near:
            most = max(self.values.near.values())
            yield (
                f"{count(len(near), 'tensor')} differ within the tolerance, by {most:.3g} at most: {self.some(near)}"
            )
        if steps := self.values.steps.values():
            yield (
                f"quantized weights differ by at most {max(steps):.3g} steps of their codes"
                " (rounding to the nearest code gives 0.5)"
            )
        unread = self.values.unread
        if unread:
            yield (
                f"{count(unread, 'storage')} {'has' if unread == 1 else 'have'} equal checksums in both files and"
                f" {'was' if unread == 1 else 'were'} not read; "
                + option("full")
                + f" reads {'it' if unread == 1 else 'them'}"
            )
        if not self.compared.names_only:
            yield from self.notes_of_rest()
            yield from self.notes_of_ties()
            for each, checkpoint in (("A", self.a), ("B", self.b)):
                yield from (f"{each}: {text}" for text in checkpoint.warnings)
                if checkpoint.unused:
                    yield (
                        f"not compared: files next to the checkpoint {each}"
                        f" ({self.some([left.path for left in checkpoint.unused])})"
                    )

    def notes_of_rest(self) -> Iterator[str]:
        """Yield a note for each side about objects that were not compared because the other side has only tensors."""
        for side, paths in zip("AB", self.pairing.passed_over, strict=True):
            if paths:
                what = f"{count(len(paths), 'object')} of {side} other than tensors ({self.some(paths)})"
                yield f"not compared: {what}; {self.weights_alone[0]}"

    def some(self, paths: Sequence[str]) -> str:
        """Return `paths` as text. A brief comparison includes only the first few."""
        return some(paths, _SHOWN if self.brief else len(paths))

    def notes_of_ties(self) -> Iterator[str]:
        """Yield notes about names that are tied on one side only."""
        if self.are_unshared():
            return
        names = [place.path for place, _ in self.pairing.tensors]
        groups = _groups(self.a, names), _groups(self.b, names)
        for this, other, word in ((0, 1, "A"), (1, 0, "B")):
            tied = [
                f"{name} = {groups[this][name]}"
                for name in names
                if groups[this][name] not in (name, groups[other][name])
            ]
            if tied:
                yield f"tied only in {word}: {self.some(tied)}"


def _meaningful(checkpoint: Checkpoint, globs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `globs` that match a tensor of `checkpoint`.

    A glob with a slash is matched with the paths of all tensors, any other with the names in state dicts only.
    """
    state_dicts = {id(state_dict.node) for state_dict in checkpoint.detected.state_dicts} if globs else set()
    tensors = [place for place in checkpoint.places if id(place.node) in checkpoint.tensor_nodes] if globs else []
    named = [place for place in tensors if place.parent is not None and id(place.parent.node) in state_dicts]
    return tuple(
        glob for glob in globs if any(matches(glob, at.path, at.key) for at in (tensors if "/" in glob else named))
    )


def _why_weights_alone(checkpoint: Checkpoint) -> str | None:
    """Return the reason why only named tensors can be compared with `checkpoint`.

    None if it has other comparable objects.
    """
    if is_exported(checkpoint):
        return f"only the weights of a {checkpoint.format} are compared"
    if checkpoint.is_state_dict:
        return f"{checkpoint.format} contains only tensors"
    if checkpoint.script_classes is not None:
        return f"only the weights of a {checkpoint.format} archive are compared, not the program"
    return None


def _pair(a: _T, b: _T) -> tuple[_T, _T] | None:
    """Return `a` and `b` as a pair if they differ, else None."""
    return None if a == b else (a, b)


def _is_described(difference: TensorDifference) -> bool:
    """Return whether `difference` contains a difference that is known before values are read."""
    kinds = difference.dtype, difference.shape, difference.device, difference.requires_grad
    return any((*kinds, difference.class_name, difference.made_of))


def _class_of(node: Call, info: TensorInfo, side: Side) -> str:
    """Return the class of the tensor that `node` makes: ``Parameter``, ``Tensor``, or the name of a subclass."""
    cls = args_of(node)[1] if str(node.callable) in FROM_TYPE and len(args_of(node)) > 1 else None
    if isinstance(cls, Global) and not info.is_parameter:
        return side.name(cls)
    return "Parameter" if info.is_parameter else "Tensor"


def _groups(checkpoint: Checkpoint, names: list[str]) -> dict[str, str]:
    """Return, for each of `names`, the first of `names` that is the same tensor in `checkpoint`."""
    first: dict[str, str] = {}
    groups = {}
    for name in names:
        info = checkpoint.tensors.get(name)
        groups[name] = first.setdefault(info.tied_to or name if info else name, name)
    return groups


def _sum(parts: list[ValueDifference | None]) -> ValueDifference | None:
    """Return the difference of a tensor with several components, from the differences `parts` of these components.

    Return None if one of them is None.
    """
    if len(parts) == 1:
        return parts[0]
    values = [each for each in parts if each is not None]
    if len(values) < len(parts):
        return None
    numbers = [each for each in values if each.largest is not None and each.largest_relative is not None]
    return ValueDifference(
        sum(each.elements for each in values),
        sum(each.differing for each in values),
        max((each.largest or 0 for each in numbers), default=0),
        max((each.largest_relative or 0.0 for each in numbers), default=0.0),
        sum(each.not_finite for each in values),
        not_finite_in=(sum(each.not_finite_in[0] for each in values), sum(each.not_finite_in[1] for each in values)),
    )
