"""``regroup`` compared with transformers: its own operations on random tensors, and small models built from
configurations.

``from_pretrained`` converts by itself, so it would also accept an unconverted file. The tests therefore compare names
and shapes with ``model.state_dict()`` and use ``load_state_dict(strict=True)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist

import ckptconv
from ckptconv.edits.regroup_files import shipped_rules
from ckptconv.edits.regroup_rules import parse_rules

_SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts": 5,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "head_dim": 4, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip


def one(converted: Any) -> list[torch.Tensor]:
    """Return the tensors in the result of an operation of transformers."""
    values = [*converted.values()] if isinstance(converted, dict) else [converted]
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operations_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """The rules give the same bits as ``Chunk``, ``MergeModulelist`` and ``Concatenate``."""
    fused = torch.randn(12, 5).to(dtype)
    experts = {f"e.{i}.{w}": torch.randn(6, 4).to(dtype) for i in range(11) for w in ("w1", "w3")}
    torch.save({"qkv": fused, **experts}, tmp_path / "in.pt")
    rules = ("qkv = q:1, k:1, v:1", "e.{i}.w1:1, e.{i}.w3:1 = gate_up")
    ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup=rules)
    got = torch.load(tmp_path / "out.pt")
    patterns = ["q", "k", "v"]
    chunks = one(Chunk(dim=0).convert({"qkv": fused}, source_patterns=["qkv"], target_patterns=patterns))
    assert all(torch.equal(got[name], chunk) for name, chunk in zip(patterns, chunks, strict=True))
    lists = {w: [experts[f"e.{i}.{w}"] for i in range(11)] for w in ("w1", "w3")}
    merged = MergeModulelist(dim=0).convert(lists, source_patterns=["w1", "w3"], target_patterns=["gate_up"])
    (whole,) = one(Concatenate(dim=1).convert(merged, source_patterns=["w1", "w3"], target_patterns=["gate_up"]))
    assert torch.equal(got["gate_up"], whole)


@pytest.mark.parametrize("rules", ["mixtral", "qwen2-moe"])
def test_models_of_the_rules_have_the_same_mapping(rules: str) -> None:
    """The mapping of transformers for each model of the rules contains the patterns of the rules, without their
    wildcards.
    """
    parsed = parse_rules(shipped_rules()[rules].splitlines(), rules)
    for model in parsed[0].models:
        mapping = get_checkpoint_conversion_mapping(model)
        known = {target.split(".")[-1]: each.source_patterns for each in mapping for target in each.target_patterns}
        for rule, whole in zip(parsed, ("gate_up_proj", "down_proj"), strict=False):
            ends = [str(item.pattern).rpartition("{e}.")[2] for item in rule.read]
            assert [pattern.rpartition("*.")[2] for pattern in known[whole]] == ends, model


@pytest.mark.parametrize(
    ("model_type", "rules"),
    [
        ("mixtral", "mixtral"),
        ("qwen2_moe", "qwen2-moe"),
        ("qwen3_moe", "qwen2-moe"),
        ("deepseek_v3", "qwen2-moe"),
        ("olmoe", "qwen2-moe"),
        ("glm4_moe", "qwen2-moe"),
    ],
)
def test_models(tmp_path: Path, model_type: str, rules: str) -> None:
    """A file of ``save_pretrained`` is converted to the state dict of the model, which gives the same logits. The
    reverse rules restore the file.
    """
    torch.manual_seed(0)
    kind = transformers.AutoConfig.for_model(model_type)
    sizes = {**_SMALL, **({"num_key_value_heads": 4} if model_type == "deepseek_v3" else {})}
    config = type(kind)(**{key: value for key, value in sizes.items() if hasattr(kind, key)})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "saved")
    source = tmp_path / "saved" / "model.safetensors"
    ckptconv.convert(source, tmp_path / "memory.safetensors", rules=rules)
    got, wanted = load_file(tmp_path / "memory.safetensors"), model.state_dict()
    assert {name: tensor.shape for name, tensor in got.items()} == {name: each.shape for name, each in wanted.items()}
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(got, strict=True)
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits)
    save_file({name: tensor.contiguous() for name, tensor in wanted.items()}, tmp_path / "all.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ckptconv.convert(tmp_path / "all.safetensors", tmp_path / "back.safetensors", rules=rules, reverse=True)
    saved, back = load_file(source), load_file(tmp_path / "back.safetensors")
    assert saved.keys() == back.keys()
    assert all(torch.equal(saved[name], back[name]) and saved[name].dtype == back[name].dtype for name in saved)


def test_phi_3(tmp_path: Path) -> None:
    """The fused weights of Phi-3 are split into the rows of their parts. They are fused in the file and in memory."""
    config = transformers.Phi3Config(**{**_SMALL, "num_key_value_heads": 2})
    model = transformers.Phi3ForCausalLM(config)
    model.save_pretrained(tmp_path / "saved")
    ckptconv.convert(tmp_path / "saved" / "model.safetensors", tmp_path / "llama.safetensors", rules="phi-3")
    got, wanted = load_file(tmp_path / "llama.safetensors"), model.state_dict()
    attention = "model.layers.0.self_attn"
    heads, shared, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size // 4
    q, k, v = wanted[f"{attention}.qkv_proj.weight"].split([heads * dim, shared * dim, shared * dim])
    for name, part in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(got[f"{attention}.{name}_proj.weight"], part)
    gate, up = wanted["model.layers.1.mlp.gate_up_proj.weight"].chunk(2)
    assert torch.equal(got["model.layers.1.mlp.gate_proj.weight"], gate)
    assert torch.equal(got["model.layers.1.mlp.up_proj.weight"], up)
