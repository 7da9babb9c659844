"""Cast tensors to other dtypes: choose the tensors by the rules, and split storages that they share with others.

Ties stay ties: a tensor with several names gets one dtype, by the most specific rule for any of its names.

A quantized weight (float8, or packed integers) is useless without its scales. Scales are other tensors of the same
module, often with a higher precision: ``weight_scale_inv`` (DeepSeek), ``weight_scale`` (compressed-tensors, ModelOpt),
``scale_weight`` (ComfyUI), ``scales`` (GPTQ, AWQ). So scales keep their dtype, and a float8 weight with scales is not
cast. Weights that :mod:`ckptconv.edits.dequantizing` has dequantized are float32 here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace

from ckptconv.byteranges.spans import Scaled
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.state_dicts import Detected
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo, glob_of
from ckptconv.dtypes import BY_NAME
from ckptconv.edits.changes import CastCount, Changes
from ckptconv.edits.dtype_rules import EXACT, FLOATS, INTEGERS, WEIGHTS, DTypeRule, strongest
from ckptconv.edits.views import Group, View, Views
from ckptconv.errors import NoMatchError, RefusedError, UsageError, some
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Node
from ckptconv.pickles.paths import Place
from ckptconv.system import calls

_SHOWN = 3  # paths in a note
_NO_WEIGHTS = "there are no floating-point weights"
_COMPLEX = frozenset({"complex32", "bcomplex32", "complex64", "complex128"})
#: The dtypes that a glob, or a dtype without a glob, is for. Those of them that cannot be cast are reported.
_MEANT = FLOATS | _COMPLEX | {name for name in BY_NAME if name.startswith("q")}
_FROM = FLOATS | INTEGERS | {"bool"}
_PACKED = ("int8", "uint8", "int32", "float4_e2m1fn_x2")
#: Names that only scales have. Their weight may be in another shard.
_SCALE = regex(r".*(weight_scale(_inv|_2)?|_scale_inv|scale_weight)")
#: The name of a shard of a set.
SHARD = regex(r".*-\d{5}-of-\d{5}\..*")


@dataclass(eq=False)
class _Tie:
    """One tensor with all its places.

    Attributes:
        info: The tensor.
        counts: Whether the tensor is the step counter of an optimizer.
        is_scale: Whether the tensor is a scale of a quantized weight.
        scale: The path of the scale of this tensor, or None.
        places: The places of the tensor.
        offered: The rules that match one of its places: the rule, its rank, and the path.
        rule: The rule that is used, or None.
        rank: How specific this rule is: EXACT, GLOB, WEIGHTS, or 0 without a rule.
        named: The paths that this rule matches.
    """

    info: TensorInfo
    counts: bool = False
    is_scale: bool = False
    scale: str | None = None
    places: list[Place] = field(default_factory=list)
    offered: list[tuple[DTypeRule, int, str]] = field(default_factory=list)
    rule: DTypeRule | None = None
    rank: int = 0
    named: list[str] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        """The paths of the tensor."""
        return [place.path for place in self.places]

    def decide(self) -> None:
        """Choose the most specific rule. Raise UsageError if two equally specific rules have different dtypes."""
        self.rank, rules = strongest((rule, rank) for rule, rank, _ in self.offered)
        for rule, rank, path in self.offered:
            if rank < self.rank or rule not in rules:
                continue
            self.rule = self.rule or rule
            if rule.dtype != self.rule.dtype:
                same = self.named[0] if self.named[0] == path else f"{self.named[0]} and {path}, which are one tensor"
                raise UsageError(
                    f"two rules match {same}",
                    got=f"{self.rule} and {rule}",
                    hint=(
                        "the more specific rule wins: a full name, then a glob that another one includes"
                        " (layers.0.* in layers.*), then a bare dtype"
                    ),
                )
            self.named.append(path)


def cast(checkpoint: Checkpoint, rules: Sequence[DTypeRule], detected: Detected, changes: Changes) -> None:
    """Cast the tensors that `rules` match. Tensors that cannot be cast are reported in ``changes.not_cast``.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        rules: The rules.
        detected: The state dicts, optimizers and modules in the checkpoint.
        changes: The report, to which the casts are added.

    Raises:
        UsageError: Two rules contradict each other, or a rule casts floating-point numbers to integers.
        NoMatchError: A rule matches nothing.
        RefusedError: A float8 weight with a scale would be cast.
    """
    ties = _Chooser(checkpoint, rules, detected, changes).choose()
    views = Views(checkpoint)
    jagged = {tie.info.view for tie in ties if tie.info.kind == "jagged"}
    new: dict[Storage, dict[View, str]] = {}
    paths: dict[View, list[str]] = {}
    for tie in ties:
        tied: list[View] = []
        for place in tie.places:
            if isinstance(place.node, Node) and (view := views.at(place.node)):
                tied.append(view)
                paths.setdefault(view, []).append(place.path)
        if tie.rule is None or tie.rule.dtype == tie.info.dtype:
            continue
        is_part = tie.info.kind == "strided" and tie.info.view in jagged
        why = "part of a jagged tensor" if is_part else _obstacle(tie, tie.rule, tied, views)
        if tie.scale and not why:
            raise RefusedError(
                f"{tie.named[0]} is {tie.info.dtype}, and a cast does not multiply it by its scale, {tie.scale}",
                got=str(tie.rule),
                hint="fp32, fp16 and bf16 do; a dtype without a GLOB casts only the other weights",
            )
        if why:
            changes.not_cast.setdefault(why, []).extend(tie.paths)
        else:
            new.setdefault(tied[0].storage, {}).update(dict.fromkeys(tied, tie.rule.dtype))
    for storage, dtypes in new.items():
        _cast_storage(storage, views, dtypes, paths, changes)
    views.conclude()
    for storage in checkpoint.storages.values():
        if isinstance(storage.data, Scaled):  # the requested dtype is float32, which the values have already
            _count_scaled(storage.data, "float32", 1, storage.nbytes, changes)
    from_float8 = any(old.startswith("float8") for old, _ in changes.dtypes)
    if from_float8 and SHARD.fullmatch(checkpoint.source.path.name):
        changes.notes.append("the float8 weights may have scales in another shard: to be sure, convert the whole set")
    if not (changes.dtypes or changes.not_cast):
        why = "all selected tensors have this dtype already" if any(tie.rule for tie in ties) else _NO_WEIGHTS
        changes.notes.append(why + ", so " + option("dtype", None) + " changed nothing")


def _obstacle(tie: _Tie, rule: DTypeRule, tied: list[View], views: Views) -> str | None:
    """Return the reason why the tensor `tie` cannot be cast by `rule`, or None if it can.

    Args:
        tie: The tensor.
        rule: Its rule.
        tied: The views of the tensor.
        views: The views of the checkpoint.
    """
    dtype = tie.info.dtype
    if tie.info.kind != "strided" or not tied:
        return tie.info.kind
    if dtype in _COMPLEX:
        return "complex"
    if dtype not in _FROM:
        return dtype
    if dtype.startswith("float8") and tie.rank == WEIGHTS:
        if tie.scale:
            return f"{dtype} that has a scale, which a cast does not apply"
        return f"{dtype} has scales, so only a GLOB casts it"
    if tie.is_scale and tie.rank < EXACT:
        return "scales of quantized weights, which are cast only by their full names"
    if tie.counts and tie.rank < EXACT:
        return "an optimizer's steps, which fewer bits would round: only the full path casts them"
    storage = tied[0].storage
    if storage in views.used_otherwise:
        return "another object refers to the storage"
    if len(views.dtypes_of[storage]) > 1:
        return "the storage is shared under two dtypes"
    if storage.nbytes % BY_NAME[dtype].itemsize:
        return "the storage ends within an element"
    old, new = BY_NAME[dtype], BY_NAME[rule.dtype]
    if new.storage_class is None and any(view.info.requires_grad for view in tied):
        return f"torch cannot load a {new.name} that requires grad and is not a Parameter"
    if new.name.startswith("float8") and any(view.info.neg for view in tied):
        return f"torch cannot negate {new.name}, which loading this tensor needs"
    for each in (old, new):
        if views.byteorder == "big" and each.storage_class is None and each.itemsize > 1:
            return f"torch reads {each.name} with the wrong byte order in a big-endian file"
    return None


def _cast_storage(
    storage: Storage, views: Views, new: dict[View, str], paths: dict[View, list[str]], changes: Changes
) -> None:
    """Cast views of `storage`, and add the casts to `changes`.

    If not all views get the same dtype, the storage is split into one storage for each dtype.

    Args:
        storage: The storage.
        views: The views of the checkpoint.
        new: The new dtypes of the views to cast.
        paths: The paths of the tensors, by view.
        changes: The report.
    """
    every = views.of_storage[storage]
    old, scaled = every[0].info.dtype, storage.data
    by_dtype: dict[str, list[View]] = {}
    for view in sorted(every, key=lambda view: view in new):  # views without a new dtype keep the storage
        by_dtype.setdefault(new.get(view, old), []).append(view)
    known = {dtype: [path for view in group for path in paths.get(view, ())] for dtype, group in by_dtype.items()}
    tensors = {dtype: len({view.info.view for view in group}) for dtype, group in by_dtype.items()}
    groups = [Group(group, dtype, tuple(known[dtype])) for dtype, group in by_dtype.items()]
    views.restate(storage, groups, pack=len(groups) > 1)
    if len(groups) > 1:
        changes.separated.append(known)
    for dtype in dict.fromkeys(new.values()):
        nbytes = by_dtype[dtype][0].storage.nbytes
        if isinstance(scaled, Scaled):
            _count_scaled(scaled, dtype, tensors[dtype], nbytes, changes)
            continue
        was = nbytes // BY_NAME[dtype].itemsize * BY_NAME[old].itemsize
        changes.count_casts(old, dtype, CastCount(tensors[dtype], was, nbytes))


def _count_scaled(scaled: Scaled, dtype: str, tensors: int, nbytes: int, changes: Changes) -> None:
    """Add the dequantized weights on one storage to `changes`.

    Args:
        scaled: The codes and scales of the weights.
        dtype: The dtype of the values.
        tensors: The number of tensors.
        nbytes: The bytes of the values.
        changes: The report.
    """
    was = sum(span.length for span in scaled.read_from())
    changes.count_casts(scaled.label, dtype, CastCount(tensors, was, nbytes))


class _Chooser:
    """Chooses the rule for each tensor, by its path and by its names after renaming.

    Attributes:
        bare: The rule without a glob, or None.
        globs: The rules with a glob.
        useful: The globs that match a tensor of a dtype that can be cast.
        names: The names of tensors in pickled modules, by the id of the tensor's node.
    """

    def __init__(
        self, checkpoint: Checkpoint, rules: Sequence[DTypeRule], detected: Detected, changes: Changes
    ) -> None:
        self.checkpoint, self.detected, self.changes = checkpoint, detected, changes
        self.nodes = checkpoint.tensor_nodes
        self.bare = next((rule for rule in rules if rule.glob is None), None)
        self.globs = [rule for rule in rules if rule.glob is not None]
        self.useful: set[DTypeRule] = set()
        self.state_dicts = {id(found.node) for found in detected.state_dicts}
        self.names: dict[int, list[str]] = {}
        for module in detected.modules:
            for name, node in module.tensors.items():
                self.names.setdefault(id(node), []).append(name)

    def choose(self) -> list[_Tie]:
        """Return all tensors, each with its rule or None. Raise UsageError and NoMatchError as :func:`cast` does."""
        ties: dict[tuple[object, ...], _Tie] = {}
        places = [place for place in self.checkpoint.places if id(place.node) in self.nodes]
        has_weights = any(self.names_at(place) for place in places)
        others: list[tuple[_Tie, str]] = []
        for place in places:
            info = self.nodes[id(place.node)]
            tie = ties.setdefault((info.kind, *info.view) if info.storage else (id(place.node),), _Tie(info))
            tie.places.append(place)
            tie.counts = tie.counts or (place.key == "step" and self.is_in_optimizer(place))
            for rule in self.globs:
                rank = self.rank(rule, place)
                if rank == EXACT and rule.dtype in INTEGERS and info.dtype in FLOATS | _COMPLEX:
                    text = f"{place.path} is {info.dtype}, which is not cast to integers"
                    raise UsageError(text, got=str(rule))
                if rank == EXACT or (rank and info.dtype in _MEANT):
                    self.useful.add(rule)
                    tie.offered.append((rule, rank, place.path))
            if self.bare and info.dtype in _MEANT:
                if self.names_at(place) or not (has_weights or self.is_in_optimizer(place)):
                    tie.offered.append((self.bare, WEIGHTS, place.path))
                else:
                    others.append((tie, place.path))
        for rule in self.globs:
            if rule not in self.useful:
                raise self.unmatched(rule, places)
        self.find_scales(ties.values())
        for tie in ties.values():
            tie.decide()
        self.say(list(ties.values()), [path for tie, path in others if tie.rule is None])
        return list(ties.values())

    def find_scales(self, ties: Iterable[_Tie]) -> None:
        """Set ``is_scale`` of the scales among `ties`, and ``scale`` of the quantized weights that have one."""
        named: dict[tuple[int, str], dict[str, _Tie]] = {}  # the tensors of each module, by the last part of the name
        for tie in ties:
            for place in tie.places:
                for name in self.names_at(place):
                    module, _, last = name.rpartition(".")
                    is_key = name == place.key and place.parent is not None
                    named.setdefault((id(place.parent.node) if is_key and place.parent else 0, module), {})[last] = tie
        for tensors in named.values():
            quantized = {
                last: tie
                for last, tie in tensors.items()
                if tie.info.dtype.startswith("float8") or (tie.info.dtype in _PACKED and "weight" in last)
            }
            for last, tie in tensors.items():
                if "scale" not in last or tie.info.dtype not in FLOATS or not (quantized or _SCALE.fullmatch(last)):
                    continue
                tie.is_scale = True
                for weight, other in quantized.items():
                    names = f"{weight}_scale_inv", f"{weight}_scale", f"scale_{weight}", "scale", "scales", "scale_inv"
                    if other is not tie and last in names and other.info.dtype in FLOATS:
                        other.scale = tie.paths[0]

    def rank(self, rule: DTypeRule, place: Place) -> int:
        """Return the rank of `rule`, which has a glob, for the tensor at `place`.

        A glob with a slash is compared with paths, and a glob without one with names in state dicts and modules.
        """
        return rule.rank(self.paths_of(place) if "/" in (rule.glob or "") else self.names_at(place))

    def paths_of(self, place: Place) -> list[str]:
        """Return the paths of `place`, in the source and below the root that was selected."""
        root, path = self.checkpoint.root.path, place.path
        own = path.removeprefix(root).removeprefix("/") if path.startswith(root) else path
        return [path, f"./{path}", own, f"./{own}"]

    def names_at(self, place: Place) -> list[str]:
        """Return the name of the node at `place` in its state dict, or else its names in pickled modules, if any."""
        if place.key is not None and place.parent is not None and id(place.parent.node) in self.state_dicts:
            return [place.key]
        return self.names.get(id(place.node), [])

    def is_in_optimizer(self, place: Place) -> bool:
        """Return whether `place` is inside the state of an optimizer."""
        return any(id(above.node) in self.detected.optimizer_nodes for above in place.upwards())

    def unmatched(self, rule: DTypeRule, places: list[Place]) -> NoMatchError:
        """Return the error for `rule`, which matches no tensor or only tensors that it cannot cast."""
        match = next((place for place in places if self.rank(rule, place)), None)
        if match is not None:
            return NoMatchError(
                f"{rule.glob!r} matches no floating-point tensor",
                got=f"{self.nodes[id(match.node)].dtype} at {match.path}",
                hint="integers are only cast by the full path of a tensor, without a wildcard",
                unmatched=("dtypes", rule),
            )
        glob = rule.glob or ""
        slash = "/" in glob
        known = [place for place in places if slash or self.names_at(place)]
        hint = None
        for as_path in () if slash else (f"./{glob}", glob.replace(".", "/"), f"{glob}/*"):
            if any(self.rank(replace(rule, glob=as_path), place) for place in places):
                hint = "a path has a slash: " + option("dtype", f"{as_path}={rule.dtype}")
                break
        return NoMatchError(
            f"no {'tensor' if slash else 'name in a state dict'} matches {glob!r}",
            expected=(
                f"something like {known[0].path if slash else self.names_at(known[0])[0]}"
                if known
                else "a path, with a slash"
            ),
            hint=hint,
            unmatched=("dtypes", rule),
        )

    def say(self, ties: list[_Tie], left: list[str]) -> None:
        """Report the tensors that are cast by another of their names, and the floating-point tensors that keep
        their dtype.

        Args:
            ties: All tensors.
            left: The paths of the floating-point tensors that keep their dtype.
        """
        along = []
        for tie in ties:
            if tie.rule and len(tie.named) < len(tie.places):
                named = set(tie.named)
                along += [path for path in tie.paths if path not in named]
        if along:
            self.changes.notes.append(f"also cast, because they are tied to cast tensors: {some(along, _SHOWN)}")
        if left and self.bare:
            first, slash, _ = left[0].partition("/")
            glob = f"{glob_of(first, None)}/*" if slash else f"./{first}"
            why = f"not weights; {calls.quoted(f'{glob}={self.bare.dtype}')} casts {'some' if len(left) > 1 else 'it'}"
            self.changes.not_cast.setdefault(why, []).extend(left)
