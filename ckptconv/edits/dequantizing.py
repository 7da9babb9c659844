"""Dequantize weights: replace codes and scales by float32 tensors, which the casts then round.

A weight is replaced only if its rule has a floating-point dtype of at least 16 bits. Its scales, and the scales of the
inputs of its module, are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import prod

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Piece, Scaled
from ckptconv.checkpoint.merging import TensorCalls, drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.quantization import (
    QuantizationConfig,
    Quantized,
    find_quantized,
    is_mark,
    of_other_programs,
    orphans,
    read_config,
)
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.checkpoint.tensor_info import LeftBehind, Reference, TensorInfo, glob_of, piece_of
from ckptconv.dtypes import BY_NAME, CODES
from ckptconv.edits.changes import Changes, NameChange
from ckptconv.edits.dtype_rules import EXACT, DTypeRule, strongest
from ckptconv.edits.regroup_files import content_of_config
from ckptconv.edits.rename import replace_in_effects
from ckptconv.edits.views import new_storage
from ckptconv.errors import CollisionError, InputError, RefusedError, count, some
from ckptconv.hints import Placeholder, command, option
from ckptconv.pickles.graph import Call, Value

_TARGETS = frozenset({"float64", "float32", "float16", "bfloat16"})
_MOST = 20  # globs in a hint
_DONE = "scales that the weights now include"
_UNREAD = "they are not needed after the weights are dequantized"


def dequantize(checkpoint: Checkpoint, rules: Sequence[DTypeRule], changes: Changes) -> bool:
    """Dequantize the weights of `checkpoint` that `rules` match. Return whether there were any.

    Args:
        checkpoint: The checkpoint, which is changed in place.
        rules: The rules for dtypes.
        changes: The report.

    Raises:
        RefusedError: The layout of a weight is not known, or its scales do not fit.
        CollisionError: Another tensor already has the name of a dequantized weight.
    """
    tensors = {id(found.node): checkpoint.named_tensors(found.node) for found in checkpoint.detected.state_dicts}
    dtypes = {info.dtype for each in tensors.values() for info in each.values()}
    if dtypes.isdisjoint(CODES):
        return False
    config = read_config(content_of_config(checkpoint.source))
    weights = _Weights(checkpoint, changes)
    for found in checkpoint.detected.state_dicts:
        known = tensors[id(found.node)]
        quantized = find_quantized(known, config)
        asked = [each for each in quantized if _is_asked(rules, found.path, each.weight)]
        if other := of_other_programs(known):
            n, layout, program = other
            changes.notes.append(f"{count(n, 'weight')} of {layout} stay quantized: {program} decodes them")
        if asked:
            _refuse_orphans(rules, found, known, quantized)
            weights.replace(found, known, asked)
            changes.still_quantized += len(quantized) - len(asked)
    if changes.still_quantized:
        changes.notes.append(f"{count(changes.still_quantized, 'other weight')} of the same model stay quantized")
    return weights.conclude()


def show_values(checkpoint: Checkpoint, wanted: Collection[str]) -> Counter[str]:
    """Dequantize the weights of `checkpoint` whose names are in `wanted`. Return the number of these weights by layout.

    Weights whose values are not certain stay as they are, and so do state dicts with an error.
    """
    config, weights, layouts = known_config(checkpoint.source), _Weights(checkpoint, Changes()), Counter[str]()
    for found in checkpoint.detected.state_dicts:
        known = checkpoint.named_tensors(found.node)
        asked = [each for each in find_quantized(known, config) if each.weight in wanted and not each.trouble]
        with suppress(RefusedError, CollisionError):
            weights.replace(found, known, asked)
            layouts.update(each.layout for each in asked)
    weights.conclude()
    return layouts


def known_config(source: Readable) -> QuantizationConfig | None:
    """Return the quantization in the ``config.json`` next to `source`.

    Return None if there is none or it cannot be read.
    """
    try:
        return read_config(content_of_config(source))
    except InputError:
        return None


def _is_asked(rules: Sequence[DTypeRule], path: str, name: str, *, exactly: bool = False) -> bool:
    """Return whether the most specific rule for `name`, in the state dict at `path`, needs the weight dequantized.

    If `exactly` is True, only rules count whose glob is the complete name or path.
    """
    paths = (f"{path}/{name}", f"./{path}/{name}") if path != "." else (f"./{name}",)
    rank, best = strongest((rule, rule.rank(paths if "/" in (rule.glob or "") else (name,))) for rule in rules)
    return (rank == EXACT or not exactly) and any(rule.dtype in _TARGETS for rule in best)


def _refuse_orphans(
    rules: Sequence[DTypeRule],
    found: StateDict,
    tensors: Mapping[str, TensorInfo],
    quantized: list[Quantized],
) -> None:
    """Raise RefusedError if `found` contains a float8 tensor without a scale, or a scale without a weight.

    A float8 tensor whose complete name is in a rule is cast without a scale, and so does not count.
    """
    lone = [name for name in orphans(tensors, quantized) if not _is_asked(rules, found.path, name, exactly=True)]
    if lone:
        globs = tuple(glob_of(tensors[name].path, name) for name in lone[:_MOST])
        raise RefusedError(
            f"a weight has no scale, or a scale has no weight: {some(lone)}",
            got=f"{count(len(quantized), 'weight')} with scales",
            hint="convert the whole set, if this is a part of it; or leave them out: " + option("exclude", globs),
        )


class _Weights:
    """Builds float32 tensors from quantized weights in `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, changes: Changes) -> None:
        self.checkpoint, self.changes = checkpoint, changes
        self._calls = TensorCalls(checkpoint.graph)
        self._keys = dict.fromkeys(checkpoint.storages, 1)
        self._made: dict[tuple[object, ...], Call] = {}

    def replace(self, found: StateDict, tensors: Mapping[str, TensorInfo], weights: list[Quantized]) -> None:
        """Replace the codes of `weights` in the state dict `found` by float32 tensors, and remove their scales."""
        new: dict[str, tuple[str, Call]] = {}
        gone = dict.fromkeys(filter(is_mark, tensors) if weights else (), _UNREAD)
        for each in weights:
            self._check(each, tensors)
            new[each.codes] = each.weight, self._tensor(each, tensors)
            gone |= dict.fromkeys(each.others, _UNREAD) | dict.fromkeys(each.scales, _DONE)
        items: list[Sequence[Value]] = []
        for key, value in found.node.entries():
            name = key if isinstance(key, str) else ""
            items.append(new.get(name) or (() if name in gone else (key, value)))
        replace_in_effects(found.node, items)
        self.changes.left_behind += [
            LeftBehind(tensors[name].path, tensors[name].nbytes, why) for name, why in gone.items()
        ]
        self.changes.names += [
            NameChange(found.path, codes, weight) for codes, (weight, _) in new.items() if codes != weight
        ]
        self.changes.dequantized += len(weights)

    def _check(self, each: Quantized, tensors: Mapping[str, TensorInfo]) -> None:
        """Raise RefusedError if the values of `each` are not certain, and CollisionError if its new name exists
        already.
        """
        if each.trouble:
            what, expected, got = each.trouble
            raise RefusedError(
                f"{what}, so the values of {each.weight} are not certain",
                expected=expected,
                got=got,
                hint=(
                    "a config.json next to the file decides it with its quantization_config; "
                    + option("dtype", Placeholder("GLOB=D"))
                    + " for other weights leaves this one as it is"
                ),
            )
        if each.weight != each.codes and each.weight in tensors:
            raise CollisionError(f"{each.codes} would become {each.weight}, which exists")
        if self.checkpoint.byteorder == "big":
            raise RefusedError("scales in a big-endian file cannot be read", got=each.scales[0])

    def _piece(self, name: str, info: TensorInfo) -> Piece:
        """Return the bytes of the tensor `name`. Raise RefusedError if they are deflated or made of other bytes."""
        piece = piece_of(info, "little")
        if info.conj or info.neg or not piece.ranges():
            raise RefusedError(
                f"the bytes of {name} are not stored in one piece (deflated, or made of others)",
                hint="convert it first: " + command("convert", self.checkpoint.source.path, Placeholder("OUT")),
            )
        return piece

    def _tensor(self, each: Quantized, tensors: Mapping[str, TensorInfo]) -> Call:
        """Return a call that builds a float32 tensor with the values of `each`. Tied weights have the same call."""
        codes, scale, *second = (tensors[name] for name in (each.codes, *each.scales))
        known = (each.layout, *(info.view for info in (codes, scale, *second)))
        if known in self._made:
            return self._made[known]
        dtype = BY_NAME["float32"]
        assert codes.storage is not None
        checked = {
            id(span): span
            for info in (codes, scale, *second)
            if info.storage
            for span in info.storage.data.with_checksums()
        }
        data = Scaled(
            self._piece(each.codes, codes),
            self._piece(each.scales[0], scale),
            self._piece(each.scales[1], second[0]) if second else None,
            "fp4" if each.fp4 else codes.dtype,
            "ldexp" if each.transposed else scale.dtype,
            second[0].dtype if second else "",
            each.matrix,
            each.block,
            0,
            prod(each.shape) * dtype.itemsize,
            each.divides,
            each.transposed,
            each.layout,
            tuple(checked.values()),
        )
        storage = new_storage(codes.storage, data, self._keys)
        node = self._made[known] = self._calls.tensor(dtype, each.shape, storage.key, storage.nbytes)
        reference = self.checkpoint.graph.references[-1]
        change_id(reference, tag=storage.device)
        self.checkpoint.references.append(Reference(reference, storage))
        return node

    def conclude(self) -> bool:
        """Update the checkpoint if weights were replaced. Return whether any were."""
        if self._made:
            self.checkpoint.restrict(self.checkpoint.root)
            drop_effect_order(self.checkpoint)
        return bool(self._made)
