"""Folders of Megatron-Core (``torch_dist``): DCP folders with a common state, nested here as a training checkpoint.

Layout, in addition to that of :mod:`ckptconv.formats.distributed.dcp`:

    metadata.json       {"sharded_backend": "torch_dist", ...}
    common.pt           a file of torch.save with the values that all processes share (``args``, ``iteration``, ...).
                        In 0.19, the item ``common_state/shard_0_1`` is a list with that dict

The names of items are flat. The items are nested at these paths:

    model/NAME                      a weight
    optimizer/state/MOMENT/NAME     optimizer.state.MOMENT.NAME, in a ChainedOptimizer with chained_N. before it
    objects/NAME                    everything that is not a tensor: NAME/shard_OFFSET_SHAPE, of one process. All are
                                    read, because loading one can run code
    common                          the common state

Two kinds of tensors are left out: those of optimizers stored by the buckets of the run's processes
(``optimizer.distributed.``), whose elements cannot be assigned to parameters, and those that are stored in another
shape than that of the parameter.

Source: ``megatron/core/dist_checkpointing`` and ``optimizer/distrib_optimizer.py`` of Megatron-Core 0.14 to 0.19.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import MalformedError, count
from ckptconv.formats.distributed.metadata import ItemPath, Metadata, TensorItem, states_of
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.hints import Option, Placeholder, command
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, List, Value, is_count, is_global, strings_of
from ckptconv.stores import first_bytes

COMMON = "common.pt"
_FILE = "metadata.json"
_COMMON_ITEM = "common_state/shard_0_1"
_STATE = regex(r"(?:chained_[0-9]+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKETS = regex(r"(?:chained_[0-9]+\.)?optimizer\.distributed\.")
_QKV = regex(r"decoder\.layers\.(?:[0-9]+\.)?self_attention\.linear_qkv\.weight")
#: The arguments of the run that notes show.
_SHOWN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "num_experts", "swiglu", "untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size",
)  # fmt: skip
#: Arguments with which weights mean something else than the models of the rules.
_OTHER_MODELS = ("attention_output_gate", "apply_layernorm_1p", "rotary_interleaved", "multi_latent_attention")


def files_in(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the files that Megatron-Core adds to a DCP folder.

    ``common.pt`` is included if it is there, because all versions read it then, or if ``metadata.json`` says that it
    was written. The result is empty if another program wrote `folder`. `names` are the names of the files in it.
    """
    data = first_bytes(folder / _FILE, LIMITS.config_bytes) if _FILE in names else b""
    try:
        check_nesting(data)
        content = json.loads(data)
    except (ValueError, RecursionError):
        return []
    if not isinstance(content, dict) or "sharded_backend" not in content:
        return []
    return [_FILE, COMMON] if COMMON in names or "common_backend" in content else [_FILE]


def nested(metadata: Metadata, files: Collection[str], where: Path) -> tuple[Metadata, list[LeftBehind]]:
    """Return `metadata` with a path for each item, and the items that are left out.

    `files` are the result of :func:`files_in`. If ``common.pt`` is among them, it becomes an item. Raises
    MalformedError, which names the file `where`, if another item has that name.
    """
    items: dict[str, TensorItem | None] = {}
    paths = dict(metadata.paths)
    left: dict[str, str] = {}
    for name, item in metadata.items.items():
        if item and _BUCKETS.match(name):
            left[name] = "an optimizer in the buckets of the run's processes, not by parameter"
        elif item and name in metadata.reshaped:
            left[name] = "stored in another shape than that of its parameter"
        else:
            items[name] = item
            paths.setdefault(name, _path(name, item))
    if COMMON in files:
        if COMMON in metadata.items:  # one of the two would not be read
            raise MalformedError(f"an item has the name of the file {COMMON}", where=where)
        items[COMMON] = None
        paths[COMMON] = ("common",)
    sizes = Counter[str]()
    for (name, _), place in metadata.stored.items():
        sizes[name] += place.length
    unread = metadata.unread | left.keys()
    behind = [LeftBehind(f"optimizer/{name}", sizes[name], why) for name, why in left.items()]
    return metadata._replace(items=items, paths=paths, unread=unread), behind


def _path(name: str, item: TensorItem | None) -> ItemPath:
    if item is None:
        return ("common",) if name == _COMMON_ITEM else ("objects", name)
    state = _STATE.fullmatch(name)
    return ("optimizer", "state", *state.groups()) if state else ("model", name)


def common_of(value: Value) -> Value:
    """Return the common state in the item `value`. If it is a list with one element, it is that element."""
    elements = [*value.elements()] if isinstance(value, List) else []
    return elements[0] if len(elements) == 1 else value


def notes_on(path: Path, common: Value, names: Collection[str], left: int) -> Iterator[str]:
    """Yield notes on the folder `path`: its origin, and the command that renames its weights for transformers.

    Args:
        path: The folder.
        common: The common state, or None.
        names: The names of all items.
        left: The number of items that :func:`nested` left out.
    """
    state = strings_of(common) if isinstance(common, Dict) else {}
    args = _arguments(state.get("args"))
    iteration = state.get("iteration", args.get("iteration"))
    known = [f"{name} {value}" for name in _SHOWN if isinstance(value := args.get(name), bool) or is_count(value)]
    about = "written by Megatron-Core"
    about += f", iteration {iteration:,}" if is_count(iteration) else ""
    yield about + (f"; its args: {', '.join(known)}" if known else "")
    if left:
        yield f"not read: {count(left, 'tensor')} of its optimizer, which is not stored by parameter"
    is_known = args.get("swiglu") is True and not any(args.get(name) for name in _OTHER_MODELS)
    if not is_known or not any(map(_QKV.fullmatch, names)):
        return
    heads = args.get("num_attention_heads")
    groups = {True: args.get("num_query_groups"), False: heads}.get(args.get("group_query_attention") is True)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": args.get("vocab_size")}
    given = (f"{name}={value if value and is_count(value) else Placeholder('N')}" for name, value in sizes.items())
    words = {word for name in names for word in (".linear_qkv.bias", ".q_layernorm.", ".router.") if word in name}
    rules = "megatron-qwen-moe" if ".router." in words else "megatron-qwen" if words else "megatron-llama"
    arguments = (path, Placeholder("OUT.safetensors"), Option("rules", rules), Option("sizes", tuple(given)))
    yield "to the names of transformers: " + command("convert", *arguments)


def _arguments(args: Value) -> dict[str, Value]:
    """Return the attributes of `args`, an argparse.Namespace. Empty if it is another object."""
    if not isinstance(args, Call) or not is_global(args.callable, "argparse.Namespace"):
        return {}
    return {name: value for state in states_of(args) for name, value in strings_of(state).items()}
