"""What the reader of a set of shards keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Object

NAME = "sharded"  # before the name of the format of each shard


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of a set: its `name`, the checkpoint in it as it was read, and its `root`, which has
    its items in common with the root of all.
    """

    name: str
    part: Checkpoint
    root: Object


@dataclass(frozen=True, eq=False)
class ShardedContainer:
    """What the reader keeps for the writer: the set as it was.

    `index` is the name that its index has or would have, `metadata` what stands in it, `names` how many there were.

    `contradictions` are texts that shards have and that differ from one to the other.
    """

    root: Object
    shards: tuple[Shard, ...]
    index: str
    metadata: Mapping[str, Any]
    names: int
    contradictions: tuple[LeftBehind, ...]
