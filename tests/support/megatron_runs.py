"""Models of Megatron-Core on the CPU, each saved as a ``torch_dist`` folder.

Usage: ``python -m torch.distributed.run --nproc_per_node RANKS -m tests.support.megatron_runs FOLDER CASE...``. Next to
each folder, ``logits.pt`` contains the logits of the model, and ``tensors.pt`` contains the tensors that torch loads
from the folder. The program requires Megatron-Core and torch but not ckptconv, so that it can run in a separate
environment.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.support.megatron_folders import by_torch

VOCAB, PADDED = 100, 128
#: The configuration of each case, in addition to the common configuration. Keys that are not Megatron's are under
#: ``run``.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-adam": {"run": {"optimizer": True}},
    "llama-buckets": {"run": {"distributed": "dp_reshardable"}},  # the default of Megatron-LM
    "llama-reshardable": {"run": {"distributed": "fully_reshardable"}},
    "llama-single": {"run": {"singleton_local_shards": True}},
    "llama-tied": {"run": {"tied": True}},
    "llama-heads": {"num_query_groups": 4},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3-moe": {"qk_layernorm": True, "num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2},
    "qwen3-moe-single": {
        "qk_layernorm": True, "num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2,
        "run": {"singleton_local_shards": True},
    },
}  # fmt: skip
TOKENS = (torch.arange(12) * 7 + 3) % VOCAB


def model_of(case: dict[str, Any]) -> Any:
    """Return the model of `case`. Its weights depend only on the case."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-not-found]
    from megatron.core.models.gpt.gpt_model import GPTModel  # type: ignore[import-not-found]
    from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]

    options = {key: value for key, value in case.items() if key != "run"}
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "tensor_model_parallel_size": dist.get_world_size(),
            "use_cpu_initialization": True,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "add_bias_linear": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **options,
        }
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    torch.manual_seed(11)
    model = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.get("run", {}).get("tied", False),
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, which are initialized with ones and zeros
            with torch.no_grad():
                parameter += torch.rand(parameter.shape) / 4
                if parameter.shape[0] in (32, 8):
                    dist.broadcast(parameter, 0)
    return model


def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of `model` for some tokens, gathered from all processes."""
    tokens = TOKENS.view(1, -1)
    positions = torch.arange(tokens.shape[1]).view(1, -1)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        mine: torch.Tensor = model.eval()(tokens, positions, mask).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts, -1)


def _optimizer(model: Any, sharded: Any) -> Any:
    """Return the state of an optimizer after one step, by parameter."""
    from megatron.core.dist_checkpointing.optimizer import (  # type: ignore[import-not-found]
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    state = optimizer.state_dict()
    names = get_param_id_to_sharded_param_map(sharded, iter(model.parameters()))
    optim_state_to_sharding_state(state, names, exclude_keys=("step",))
    for moments in state["state"].values():
        moments.pop("step", None)
    return state


def _distributed(model: Any) -> tuple[Any, Any]:
    """Return a distributed optimizer of Megatron-Core after one step, and the model."""
    from megatron.core.distributed import (  # type: ignore[import-not-found]
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # type: ignore[import-not-found]

    parallel = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, parallel, model)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [wrapped])
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.rand(parameter.shape, generator=generator))
    optimizer.step()
    return optimizer, wrapped.module


class _OnCpu(TorchFunctionMode):
    """A mode that creates tensors on the CPU, although their type reports a GPU."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))
        is_type = func is torch.Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_type else found


def run(folder: Path, name: str) -> None:
    """Save the model of the case `name` in ``folder/NAME/iter_0001000``, and its logits next to that folder."""
    from megatron.core import dist_checkpointing  # type: ignore[import-not-found]

    case = CASES[name]
    own = case.get("run", {})
    model, optimizer = model_of(case), None
    metadata: dict[str, Any] = {"singleton_local_shards": own.get("singleton_local_shards", False)}
    if kind := own.get("distributed"):
        optimizer, model = _distributed(model)
        metadata["distrib_optim_sharding_type"] = kind
    sharded = model.sharded_state_dict(metadata=metadata)
    config = model.config
    args = Namespace(
        num_layers=2, hidden_size=32, num_attention_heads=4, group_query_attention=config.num_query_groups < 4,
        num_query_groups=config.num_query_groups if config.num_query_groups < 4 else 1, swiglu=True, vocab_size=VOCAB,
        padded_vocab_size=PADDED, params_dtype=torch.float32,
    )  # fmt: skip
    state = {"model": sharded, "checkpoint_version": 3.0, "iteration": 1000, "args": args}
    if own.get("optimizer"):
        state["optimizer"] = _optimizer(model, sharded)
    if optimizer:
        state["optimizer"] = optimizer.sharded_state_dict(sharded, metadata=metadata)
    target = folder / name / "iter_0001000"
    target.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(target))
    logits = logits_of(model)
    if not dist.get_rank():
        (folder / name / "latest_checkpointed_iteration.txt").write_text("1000")
        torch.save(logits, folder / name / "logits.pt")
        loaded = by_torch(target)
        tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
        torch.save(tensors, folder / name / "tensors.pt")
    dist.barrier()


def main(folder: Path, names: list[str]) -> None:
    """Run the cases `names` in this process, which is one of the processes of ``torch.distributed.run``."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random  # type: ignore[import-not-found]
    from megatron.core.transformer.moe import moe_utils  # type: ignore[import-not-found]

    moe_utils.te_general_gemm = None  # a function of Transformer Engine

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    random.get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # the tracker contains only states of GPUs
    with _OnCpu():
        for name in names:
            run(folder, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
