"""Small checkpoints in Megatron-Core's format ``torch_dist``, written by torch without Megatron-Core.

The pickles name the same globals as those of Megatron-Core, because a module with its name replaces it while they are
written. ``tests/long/test_megatron_runs.py`` reads folders that Megatron-Core itself has written.
"""

from __future__ import annotations

import json
import pickle
import sys
import types
import warnings
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.support.writers import ALONE

VERSIONS = ("0.14", "0.15", "0.16", "0.19")
_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"
HEADS, GROUPS, VOCAB, HIDDEN, FFN, LAYERS = 4, 2, 10, 8, 12, 2
ARGS = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "group_query_attention": True,
    "num_query_groups": GROUPS, "swiglu": True, "vocab_size": VOCAB, "padded_vocab_size": 16,
    "params_dtype": torch.bfloat16, "tokenizer_type": "HuggingFaceTokenizer",
}  # fmt: skip
_ATTENTION = "decoder.layers.self_attention"
#: The shape of each weight of a model like Llama. All layers are in one tensor.
SHAPES = {
    "embedding.word_embeddings.weight": (16, HIDDEN),
    f"{_ATTENTION}.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    f"{_ATTENTION}.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    f"{_ATTENTION}.linear_qkv.weight": (LAYERS, 2 * (HEADS + 2 * GROUPS), HIDDEN),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, FFN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "output_layer.weight": (16, HIDDEN),
}
OBJECT = f"{_ATTENTION}.linear_proj._extra_state/shard_0_2"
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_torch.bfloat16.bucket_idx_0.exp_avg"
GROUP = f"{BUCKET}.group/shard_0_1"
RESHAPED = "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"


def weights() -> dict[str, torch.Tensor]:
    """Return the weights of a model, by their names in Megatron-Core."""
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}


def write_megatron(
    folder: Path, version: str = "0.16", state: dict[str, Any] | None = None, args: dict[str, Any] | None = None
) -> Path:
    """Write `state` to `folder` as Megatron-Core `version` does, with a common state that contains `args`. Return
    `folder`.

    By default, `state` contains a model, one moment of an optimizer by parameter, and parts of other optimizer states
    that are not stored by parameter.
    """
    model = weights()
    moments = {f"optimizer.state.exp_avg.{name}": tensor * 2 for name, tensor in model.items()}
    others = {OBJECT: [None], BUCKET: torch.zeros(7), GROUP: [{"step": 3}]}
    if version in ("0.14", "0.15"):
        others[RESHAPED] = torch.ones(2, 2, 2)
    flat: dict[str, Any] = {**model, **moments, **others} if state is None else dict(state)
    common = {"args": Namespace(**(ARGS if args is None else args)), "checkpoint_version": 3.0, "iteration": 1000}
    about: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if version == "0.19":
        flat["common_state/shard_0_1"] = [common]
    else:
        about |= {"common_backend": "torch", "common_backend_version": 1}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no other processes
        dcp.save(flat, checkpoint_id=folder, planner=planner, **ALONE)
    if version != "0.19":
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(about))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    above = [_STRATEGIES.rsplit(".", i)[0] for i in range(1, 5)]  # pickle imports these packages first
    with mock.patch.dict(sys.modules, {name: types.ModuleType(name) for name in above} | {_STRATEGIES: _strategies()}):
        (folder / ".metadata").write_bytes(pickle.dumps(_with_plans(metadata, flat, version)))
    return folder


def by_torch(folder: Path) -> dict[str, Any]:
    """Return the state dict that torch loads from the DCP folder `folder`, without Megatron-Core."""
    state: dict[str, Any] = {}
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data = {name: (name,) for name in metadata.state_dict_metadata}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, storage_reader=_Known(folder, metadata), planner=planner, no_dist=True)
    return state


class _Known(dcp.FileSystemReader):
    """A reader of a folder with given metadata, because Megatron-Core does not write the paths that torch requests."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self._known


def _strategies() -> Any:
    """Return a module with the classes of Megatron-Core up to 0.15."""
    module: Any = types.ModuleType(_STRATEGIES)

    @dataclass(frozen=True)
    class MCoreSavePlan(SavePlan):
        mcore_data: Any = None

    @dataclass
    class MCoreMetadata(Metadata):
        mcore_data: Any = None

    for cls in (MCoreSavePlan, MCoreMetadata):
        cls.__module__, cls.__qualname__ = _STRATEGIES, cls.__name__
        setattr(module, cls.__name__, cls)
    return module


def _with_plans(metadata: Metadata, state: dict[str, Any], version: str) -> Metadata:
    """Return `metadata` with the additions of Megatron-Core `version`."""
    classes = sys.modules[_STRATEGIES]
    plan = create_default_local_save_plan(state, True)
    if version in ("0.14", "0.15"):
        shape = {"nd_reformulated_orig_global_shape": (8,)}
        data = {name: shape if name == RESHAPED else {} for name in state}
        plan = classes.MCoreSavePlan(*(getattr(plan, field.name) for field in fields(plan)), data)
        if version == "0.15":
            metadata = classes.MCoreMetadata(*(getattr(metadata, field.name) for field in fields(metadata)))
        metadata.mcore_data = data  # type: ignore[attr-defined]
    metadata.all_local_plans = [plan]  # type: ignore[attr-defined]
    return metadata
