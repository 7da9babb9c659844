"""Check that the biases, scales and quantization state of regrouped tensors are regrouped, too.

The scales of a quantized weight are other tensors of its module (``weight_scale_inv``, ``scales``, ``qzeros``), or
their names begin with its name (``gate_up_proj_scale_inv``, ``weight.absmax``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from ckptconv.edits.regroup_plan import Geometry, Group
from ckptconv.errors import RefusedError, some
from ckptconv.lazy_regex import regex
from ckptconv.work import CHARACTERS, work

#: Words in the last segment of a name that only quantization state has.
_STATE = regex(r"(?is).*(scale|zero_?point|q?zeros|g_idx|absmax|amax|quant|scb|_shape|codebook).*")
_WEIGHTS = ("weight", "qweight")
#: What a block of elements with one scale can have along a dimension.
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)


def check_companions(path: str, before: Sequence[str], after: Collection[str], groups: Sequence[Group]) -> list[str]:
    """Check the tensors that belong to regrouped tensors. Return a list with a note if biases of stacked weights stay.

    Args:
        path: The path of the state dict.
        before: Its names before all rules.
        after: Its names after all rules.
        groups: The groups of tensors that were regrouped.

    Raises:
        RefusedError: A bias or quantization state of a regrouped tensor was not regrouped, or is cut differently.
    """
    group_of = {name: group for group in groups for name in group.old}
    if not group_of:
        return []
    _check_gates(groups)
    left = _Beside([name for name in before if name in after])
    taken = _Beside([*group_of])
    stacked: list[str] = []
    for name, group in group_of.items():
        state = next(left.state_of(name), None)
        if state:
            raise RefusedError(
                f"{state} belongs to {name}, which is regrouped, and no rule takes it",
                got=str(group.rule),
                expected=f"a rule for each of them in {path}",
            )
        for other in taken.state_of(name):
            if not _is_cut_alike(group.geometry, group_of[other].geometry, is_split=bool(group.rule.whole_is_read)):
                raise RefusedError(
                    f"{name} is not cut where the blocks of {other} end",
                    expected=f"parts of whole blocks: {_sizes(group.geometry)}",
                    got=_sizes(group_of[other].geometry),
                )
        for bias in left.biases_of(name):
            if group.geometry.dim is not None:
                raise RefusedError(
                    f"{bias} belongs to {name}, which is split or joined, and no rule takes it",
                    got=str(group.rule),
                    expected=f"a rule for each of them in {path}",
                )
            stacked.append(bias)
    names = [*dict.fromkeys(stacked)]
    return [f"the weights next to {some(names)} are stacked, but these biases are unchanged"] if names else []


def _check_gates(groups: Sequence[Group]) -> None:
    """Raise RefusedError if the shape of stacked gates, [E, 2I, H], does not fit the down projection, [E, H, I]."""
    wholes = {(group.old if group.rule.whole_is_read else group.new)[0]: group.geometry.shape for group in groups}
    for name, shape in wholes.items():
        other = wholes.get(name.removesuffix("gate_up_proj") + "down_proj")
        if name.endswith("gate_up_proj") and other and shape[1:] != (2 * other[-1], *other[1:-1]):
            raise RefusedError(
                f"{name} has its dimensions in an order that the rules are not for",
                expected=f"{[other[0], 2 * other[-1], *other[1:-1]]} beside down_proj {[*other]}",
                got=f"{[*shape]}",
            )


class _Beside:
    """An index of names by their modules.

    Args:
        names: The names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {*names}
        self._state: dict[str, list[str]] = {}  # the last segments of state by module
        self._below: dict[str, str] = {}  # the first name below each name or module
        for name in names:
            module, _, last = name.rpartition(".")
            if _STATE.fullmatch(last):
                insort(self._state.setdefault(module, []), last)
            while module and module not in self._below:
                work().charge(1 + len(module) // CHARACTERS)
                self._below[module] = name
                module = module.rpartition(".")[0]

    def state_of(self, name: str) -> Iterator[str]:
        """Yield the names of the quantization state of the tensor `name`. There may be none."""
        if name in self._below:
            yield self._below[name]
        module, _, own = name.rpartition(".")
        stem = own.removesuffix("_blocks").removesuffix("_packed")
        state = self._state.get(module, [])
        start = 0 if stem in _WEIGHTS else bisect_left(state, f"{stem}_")
        for last in islice(state, start, None) if stem in _WEIGHTS or not _STATE.fullmatch(own) else ():
            if stem not in _WEIGHTS and not last.startswith(f"{stem}_"):
                break
            if last != own:
                yield f"{module}.{last}" if module else last

    def biases_of(self, name: str) -> Iterator[str]:
        """Yield the names of the biases that belong to the weight `name`, as far as they exist."""
        for bias in (f"{name}_bias", name.removesuffix("weight") + "bias" if name.endswith("weight") else ""):
            if bias in self._names:
                yield bias


def _is_cut_alike(tensor: Geometry, state: Geometry, *, is_split: bool) -> bool:
    """Return whether a tensor and its scales are cut at the same blocks.

    The size of a block is determined from the sizes of the tensors that are read. If several are possible, all must
    fit.

    Args:
        tensor: The geometry of the tensor.
        state: The geometry of the scales or other state.
        is_split: Whether the rule splits the tensor.
    """
    forms = [(each.part_dim, len(each.stack), each.groups, each.named, len(each.sizes)) for each in (tensor, state)]
    if forms[0] != forms[1]:
        return False
    pairs = [*zip(tensor.sizes, state.sizes, strict=True)]
    known = [(sum(tensor.sizes), sum(state.sizes))] if is_split else pairs
    blocks = [block for block in _BLOCKS if all(-(-size // block) == number for size, number in known)]
    cut = pairs if tensor.groups > 1 else pairs[:-1]  # the last block can be smaller
    return not pairs or (bool(blocks) and all(size == number * block for size, number in cut for block in blocks))


def _sizes(geometry: Geometry) -> str:
    """Return a text with the sizes of the parts along the dimension that is cut, or with the stacked dimensions."""
    return f"{[*geometry.sizes]} along dimension {geometry.dim}" if geometry.sizes else f"stacked {[*geometry.stack]}"
