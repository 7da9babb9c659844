"""Folders that Megatron-Core writes in one and two processes, compared with torch, transformers and Megatron's own
logits.

The tests need Megatron-Core, which only ``.ci/megatron`` installs, for this Python or for the one of
``MEGATRON_PYTHON``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ckptconv
from ckptconv.errors import RefusedError
from tests.support.megatron_runs import CASES, PADDED, TOKENS, VOCAB
from tests.support.paths import ROOT

_PYTHON = os.environ.get("MEGATRON_PYTHON", sys.executable)
if importlib.util.find_spec("megatron") is None and sys.executable == _PYTHON:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=[1, 2])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all cases, written by one or two processes."""
    folder = tmp_path_factory.mktemp(f"megatron{request.param}")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(request.param)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [_PYTHON, *launch, "-m", "tests.support.megatron_runs", str(folder)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    return folder


def config_of(case: str) -> Any:
    """Return the configuration of the transformers model for `case`."""
    own = CASES[case]
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": own.get("num_query_groups", 2), "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "head_dim": 8, "tie_word_embeddings": own.get("run", {}).get("tied", False),
    }  # fmt: skip
    if case.startswith("llama"):
        return transformers.LlamaConfig(**common)
    if case.startswith("qwen3-moe"):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**common, **experts)
    return (transformers.Qwen3Config if "qwen3" in case else transformers.Qwen2Config)(**common)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_those_of_torch(runs: Path, tmp_path: Path, case: str) -> None:
    """Every tensor equals the result of ``torch.distributed.checkpoint.load``, and the output contains the common
    state. An optimizer in buckets is left out and reported.
    """
    folder = runs / case / "iter_0001000"
    report = ckptconv.convert(folder, tmp_path / "out.pt", loadable_objects=True)
    found = torch.load(tmp_path / "out.pt", weights_only=False)
    wanted = torch.load(runs / case / "tensors.pt")
    in_buckets = {name for name in wanted if name.startswith("optimizer.distributed.")}
    assert {f"optimizer/{name}" for name in in_buckets} == {left.path for left in report.left_behind}
    moments = {
        f"optimizer.state.{moment}.{name}": tensor
        for moment, state in found.get("optimizer", {"state": {}})["state"].items()
        for name, tensor in state.items()
    }
    mine = {**found["model"], **moments}
    assert mine.keys() == wanted.keys() - in_buckets and len(mine) > 7
    for name, tensor in mine.items():
        assert torch.equal(wanted[name], tensor) and wanted[name].dtype == tensor.dtype, name
    assert found["common"]["iteration"] == 1000
    states = {"llama-adam": 2, "llama-reshardable": 3}.get(case, 0)
    assert len(moments) == states * len(found["model"]) and bool(in_buckets) == (case == "llama-buckets")


def test_an_optimizer_in_buckets_cannot_be_selected(runs: Path, tmp_path: Path) -> None:
    """An optimizer in buckets is refused with its reason. Its learning rates can be selected, because they are
    objects.
    """
    folder = runs / "llama-buckets" / "iter_0001000"
    with pytest.raises(RefusedError, match="optimizer cannot be selected: an optimizer in the buckets"):
        ckptconv.convert(folder, tmp_path / "out.pt", select="optimizer")
    ckptconv.convert(folder, tmp_path / "objects.pt", select="objects")
    objects = torch.load(tmp_path / "objects.pt")
    (state,) = objects["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"]
    assert state["param_groups"][0]["lr"] == 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_gives_the_same_logits(runs: Path, tmp_path: Path, case: str) -> None:
    """The rules and sizes that ``inspect`` suggests make shards that ``load_state_dict(strict=True)`` accepts, and the
    model gives the same logits.
    """
    folder = runs / case / "iter_0001000"
    hint = next(note for note in ckptconv.inspect(folder).notes if "names of transformers" in note)
    rules = "megatron-llama" if "llama" in case else "megatron-qwen-moe" if "moe" in case else "megatron-qwen"
    groups = CASES[case].get("num_query_groups", 2)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": groups, "vocab_size": VOCAB}
    assert repr(rules) in hint and all(f"'{name}={value}'" in hint for name, value in sizes.items())
    out = tmp_path / "hf"
    ckptconv.convert(folder, out, rules=rules, sizes=sizes, format="safetensors", max_shard_size=8000)
    weights = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert len([*out.glob("*.safetensors")]) > 3
    config = config_of(case)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if "moe" in case:  # transformers stacks experts in memory
        ckptconv.convert(out, tmp_path / "stacked.safetensors", rules="qwen2-moe")
        weights = load_file(tmp_path / "stacked.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    wanted = torch.load(runs / case / "logits.pt")[..., :VOCAB]
    with torch.no_grad():
        logits = model.eval()(TOKENS.view(1, -1)).logits
    torch.testing.assert_close(logits, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_back_to_the_names_of_megatron(runs: Path, tmp_path: Path, case: str) -> None:
    """``--reverse`` restores every weight, except the rows that padded the vocabulary."""
    folder = runs / case / "iter_0001000"
    rules = "megatron-llama" if "llama" in case else "megatron-qwen-moe" if "moe" in case else "megatron-qwen"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    ckptconv.convert(folder, tmp_path / "hf.safetensors", rules=rules, sizes=sizes)
    ckptconv.convert(tmp_path / "hf.safetensors", tmp_path / "back.pt", rules=rules, sizes=sizes, reverse=True)
    back = torch.load(tmp_path / "back.pt")
    ckptconv.convert(folder, tmp_path / "model.pt", select="model")
    wanted = torch.load(tmp_path / "model.pt")
    ln = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    if ln in wanted and "moe" in case:  # its name with Transformer Engine
        wanted["decoder.layers.pre_mlp_layernorm.weight"] = wanted.pop(ln)
    assert back.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(back[name], tensor[:VOCAB] if tensor.shape[0] == PADDED else tensor), name


def test_moments_get_the_names_too(runs: Path, tmp_path: Path) -> None:
    """The rules also apply to the moments of the optimizer, which have the names of the weights."""
    folder = runs / "llama-adam" / "iter_0001000"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    for part in ("model", "optimizer/state/exp_avg"):
        ckptconv.convert(
            folder, tmp_path / "out.safetensors", select=part, rules="megatron-llama", sizes=sizes, force=True
        )
        names = load_file(tmp_path / "out.safetensors").keys()
        assert names == transformers.LlamaForCausalLM(config_of("llama")).state_dict().keys(), part
