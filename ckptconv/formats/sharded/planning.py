"""Deal tensors into shards by size.

The planner is huggingface_hub's, so that a set has the shards that the Hub's own tools would have
made; it needs sizes alone, and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.rebuild_functions import is_word
from ckptconv.errors import ArgumentTypeError, UsageError
from ckptconv.formats.sharded.index import index_name
from ckptconv.hints import option
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Global, Node, Value, children

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = regex(r"\s*(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[KMGT]B)?\s*", re.IGNORECASE)
_EXAMPLES = "5GB, 500MB or a number of bytes"


class Weight(NamedTuple):
    """What a tensor adds to its shard: `nbytes`, and once for all that have the same `group`, which stay together."""

    nbytes: int
    group: Hashable


@dataclass(frozen=True)
class Deal:
    """`files` with the names of the tensors in each, in the order of the state dict.

    The name of the `index`, None for one file; and how many tensors are `too_large`, so that their shards are, tied
    ones counted once.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    index: str | None
    too_large: int = 0


def parse_size(size: int | str) -> int:
    """`size` in bytes: an integer, or a text such as ``5GB``, in which units are decimal.

    Raises UsageError, TypeError.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ArgumentTypeError(f"max_shard_size must be a text such as '5GB' or a number of bytes, not {size!r}")
    found = _SIZE.fullmatch(str(size))
    unit = found["unit"] if found else None
    if found is None or (unit is None and "." in found["number"]):
        near = re.match(r"\s*([0-9]{1,18})\s*([KMGT])", str(size), re.IGNORECASE)
        raise UsageError(
            option("max_shard_size", None) + " is not a size",
            expected=_EXAMPLES,
            got=size,
            hint="is this meant: " + option("max_shard_size", f"{near[1]}{near[2].upper()}B") if near else None,
        )
    nbytes = int(float(found["number"]) * _UNITS[unit.upper()]) if unit else int(found["number"])
    if nbytes == 0:
        raise UsageError(option("max_shard_size", None) + " is no size of a file", expected=_EXAMPLES, got=size)
    return nbytes


def deal(weights: Mapping[str, Weight], max_shard_size: int | str, stem: str, suffix: str) -> Deal:
    """The shards for tensors of these `weights`, by name, none larger than `max_shard_size` unless one group is.

    Raises UsageError, also where there are several groups and each is: that is a typo.
    """
    most = parse_size(max_shard_size)
    sizes = [nbytes for nbytes in {each.group: each.nbytes for each in weights.values()}.values() if nbytes]
    too_large = sum(nbytes > most for nbytes in sizes)
    if too_large == len(sizes) > 1:
        raise UsageError(
            option("max_shard_size", max_shard_size) + " is less than any tensor has",
            expected=f"at least {min(sizes):,} bytes",
            got=f"{most:,}",
            hint="a number without a unit is bytes" if str(most) == str(max_shard_size).strip() else None,
        )
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise UsageError(
            option("max_shard_size", None) + " needs huggingface_hub, which plans the shards",
            hint="pip install 'ckptconv[hub]'",
        ) from error
    literal = stem.replace("{", "{{").replace("}", "}}")
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        get_storage_id=lambda weight: weight.group,
        filename_pattern=f"{literal}{{suffix}}{suffix}",
        max_shard_size=most,
    )
    if len(split.filename_to_tensors) > LIMITS.shards:
        raise UsageError(
            option("max_shard_size", max_shard_size) + f" would take {len(split.filename_to_tensors):,} shards",
            expected=f"at most {LIMITS.shards:,}",
            hint="say a larger one",
        )
    place = {name: i for i, name in enumerate(weights)}  # the planner puts what is tied last
    files = tuple(
        (file, tuple(sorted(names, key=place.__getitem__))) for file, names in split.filename_to_tensors.items()
    )
    return Deal(files, index_name(stem, suffix) if len(files) > 1 else None, too_large)


# What a tensor weighs


def weights_of_tensors(checkpoint: Checkpoint, items: Mapping[str, Value], *, copy_tied: bool) -> dict[str, Weight]:
    """The tensors among `items` of `checkpoint`, each written out by itself.

    What is tied stays together, unless it is copied.
    """
    weights: dict[str, Weight] = {}
    for name, value in items.items():
        info = checkpoint.tensor_nodes.get(id(value))
        if info is not None:
            group = name if copy_tied or info.storage is None or not info.nbytes else info.view
            weights[name] = Weight(info.nbytes, group)
    return weights


def weights_of_storages(checkpoint: Checkpoint, items: Mapping[str, Value]) -> dict[str, Weight]:
    """Those of `items` of `checkpoint` that are tensors or hold some, with the bytes of their storages.

    What shares a storage or an object stays together.
    """
    groups = _Groups(checkpoint, items)
    weights: dict[str, Weight] = {}
    for name, value in items.items():
        group = groups.of(name)
        if groups.nbytes.get(group) or id(value) in checkpoint.tensor_nodes:
            weights[name] = Weight(groups.nbytes.get(group, 0), group)
    return weights


class _Groups:
    """Which of `items` lead to one node or storage.

    A group is called by the name of one of its members; NBYTES are those of its storages.
    """

    def __init__(self, checkpoint: Checkpoint, items: Mapping[str, Value]) -> None:
        self.above = {name: name for name in items}
        self.owner: dict[int, str] = {}  # the id of a node or storage → the name that led to it first
        storages = checkpoint.index.storage_of
        for name, value in items.items():
            todo = [value]
            while todo:
                node = todo.pop()
                if not isinstance(node, Node) or isinstance(node, Global) or is_word(node):
                    continue  # texts, classes, devices: what is shared and means nothing
                if self.meet(name, node):
                    todo += children(node)
                if id(node) in storages:
                    self.meet(name, storages[id(node)])
        self.nbytes: dict[str, int] = {}
        for storage in checkpoint.storages.values():
            if id(storage) in self.owner:
                group = self.of(self.owner[id(storage)])
                self.nbytes[group] = self.nbytes.get(group, 0) + storage.nbytes

    def meet(self, name: str, thing: object) -> bool:
        """Whether `thing`, to which `name` leads, is new; if not, `name` and the first that led to it are one group."""
        if id(thing) not in self.owner:
            self.owner[id(thing)] = name
            return True
        self.above[self.of(name)] = self.of(self.owner[id(thing)])
        return False

    def of(self, name: str) -> str:
        """The group of `name`."""
        while self.above[name] != name:
            self.above[name] = name = self.above[self.above[name]]
        return name
