"""``regroup`` for a state dict in memory: the same operation as ``convert --regroup``, with real tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckptconv.edits.in_memory import StateDictT, check_type, copied, set_metadata
from ckptconv.edits.names import strings
from ckptconv.edits.regroup_files import read_rules, read_sizes
from ckptconv.edits.regroup_items import Items, Maker, apply_rules
from ckptconv.edits.regroup_plan import Group
from ckptconv.errors import RefusedError, some
from ckptconv.hints import for_python


@for_python
def regroup(
    state_dict: StateDictT,
    rules: str | Iterable[str],
    *,
    reverse: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> StateDictT:
    """Return a copy of `state_dict` in which tensors are split, joined and stacked by `rules`.

    Args:
        state_dict: The state dict.
        rules: Texts that contain a ``=`` are rules, as for :func:`ckptconv.convert`. Others are files of rules, or
            names that ``ckptconv rules`` lists. Files are applied first.
        reverse: Apply the rules backwards.
        sizes: Numbers for the ``$NAME`` of rules.

    Returns:
        A mapping of the same type, with ``_metadata``. Other tensors are not copied. A slice of a tensor is a view of
        the tensor if its elements are adjacent.

    Raises:
        CkptconvError: One of its subclasses, if a rule makes no sense, matches nothing, or does not fit the tensors.
        ArgumentTypeError: `state_dict` is not a mutable mapping.
    """
    check_type(state_dict)
    texts = strings("rules", rules)
    parsed = read_rules(
        [each for each in texts if "=" not in each], [each for each in texts if "=" in each], reverse=reverse
    )
    items: Items[Any] = Items(state_dict.items(), "the state dict")
    tensors = _Tensors(dict(read_sizes(sizes or {})))
    with torch.no_grad():
        apply_rules(parsed, [items], tensors)
    tensors.check_ties(items.values)
    regrouped = copied(state_dict, (pair for cell in items.cells for pair in cell))
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        gone, added = items.modules(metadata)
        set_metadata(regrouped, metadata, {}, lambda path: None if path in gone else path)
        for path, like in added.items():
            regrouped._metadata[path] = dict(metadata.get(like, {"version": 1}))  # type: ignore[attr-defined]
    return regrouped


class _Tensors(Maker[Any]):
    """Applies rules to real tensors. `sizes` are numbers for the ``$NAME`` of rules."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._taken: dict[object, str] = {}
        self._made: dict[object, list[torch.Tensor]] = {}

    def tensor(self, value: object) -> torch.Tensor | None:
        """Return `value` if it is a plain tensor, else None."""
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]
        return value if is_plain and not value.is_quantized else None  # type: ignore[attr-defined, return-value]

    def made(self, group: Group, values: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """Return the new tensors of `group`. Tied tensors are regrouped once.

        Raises RefusedError if the tensors to join differ in device, in ``requires_grad``, or in being parameters.
        """
        if len({(type(each), each.requires_grad, each.device) for each in values}) > 1:
            raise RefusedError(
                f"{group.rule}: the parts differ in device, in requires_grad, or in being parameters",
                got=some(group.old),
            )
        views = [*map(_view, values)]
        self._taken.update(zip(views, group.old, strict=True))
        known = group.geometry, group.rule.whole_is_read, *views
        if known not in self._made:
            made = _split(group, values[0]) if group.rule.whole_is_read else [_whole(group, values)]
            is_parameter = isinstance(like, torch.nn.Parameter)
            wrap = torch.nn.Parameter if is_parameter else torch.Tensor.requires_grad_
            self._made[known] = [wrap(each, like.requires_grad) for each in made]
        return self._made[known]

    def check_ties(self, values: Mapping[str, object]) -> None:
        """Raise RefusedError if one of `values` is tied to a regrouped tensor, but was not regrouped itself."""
        new = {id(tensor) for made in self._made.values() for tensor in made}
        for name, value in values.items():
            tensor = self.tensor(value)
            if tensor is not None and id(tensor) not in new and tensor.numel() and _view(tensor) in self._taken:
                raise RefusedError(
                    f"{name} is tied to {self._taken[_view(tensor)]}, and no rule takes it",
                    expected="a rule for each name of a tensor",
                )


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that consist of the same elements of one storage."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _split(group: Group, whole: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors into which `whole` is split."""
    geometry = group.geometry
    refined = whole.detach().reshape(geometry.refined(geometry.shape, geometry.dim))
    return [refined[box.slices].reshape(box.shape) for box in geometry.boxes()]


def _whole(group: Group, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor that is joined from `parts`."""
    geometry = group.geometry
    whole = parts[0].new_empty(geometry.refined(geometry.shape, geometry.dim))
    for box, part in zip(geometry.boxes(), parts, strict=True):
        whole[box.slices] = part.detach().reshape(box.sizes)
    return whole.reshape(geometry.shape)
