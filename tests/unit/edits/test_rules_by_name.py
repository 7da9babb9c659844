"""The rules that are part of the package: the tensors that they make, and the models that they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.edits.regroup_files import shipped_rules
from ckptconv.edits.regroup_rules import parse_rules
from ckptconv.errors import RefusedError, UsageError
from tests.support.command import Command

State = dict[str, torch.Tensor]


def converted(folder: Path, state: State, config: dict[str, Any] | None = None, **options: Any) -> State:
    """Save `state` with a config.json of `config` next to it, convert the file, and return the result."""
    torch.save(state, folder / "in.pt")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    ckptconv.convert(folder / "in.pt", folder / "out.pt", force=True, **options)
    loaded: State = torch.load(folder / "out.pt")
    return loaded


def same(got: State, expected: State) -> None:
    """Check that names, shapes and values are equal. The order may differ."""
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def experts(at: str, names: tuple[str, str, str]) -> State:
    """Return three experts of one layer in separate tensors below the path `at`."""
    gate, up, down = names
    return {
        f"{at}.experts.{e}.{name}.weight": torch.rand((4, 6) if name == down else (6, 4))
        for e in range(3)
        for name in (gate, up, down)
    }


@pytest.mark.parametrize(
    ("rules", "model", "before", "names"),
    [
        ("mixtral", "mixtral", "model.layers.0.block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen2-moe", "olmoe", "model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts(tmp_path: Path, rules: str, model: str, before: str, names: tuple[str, str, str]) -> None:
    """Experts are stacked and joined as torch does it, and the reverse restores them."""
    gate, up, down = names
    state = {f"{before}.gate.weight": torch.rand(3, 4), **experts(before, names)}
    stacks = {n: torch.stack([state[f"{before}.experts.{e}.{n}.weight"] for e in range(3)]) for n in names}
    at = "model.layers.0.mlp"
    expected = {
        f"{at}.gate.weight": state[f"{before}.gate.weight"],
        f"{at}.experts.gate_up_proj": torch.cat([stacks[gate], stacks[up]], 1),
        f"{at}.experts.down_proj": stacks[down],
    }
    config = {"model_type": model}
    same(converted(tmp_path, state, config, rules=rules), expected)
    same(converted(tmp_path, expected, config, rules=rules, reverse=True), state)


def test_phi_3(tmp_path: Path) -> None:
    """The sizes of queries, keys and values are computed from the numbers of heads in the configuration."""
    fused = {"l.self_attn.qkv_proj.weight": torch.rand(12, 4), "l.mlp.gate_up_proj.weight": torch.rand(6, 4)}
    q, k, v = fused["l.self_attn.qkv_proj.weight"].split([8, 2, 2])
    gate, up = fused["l.mlp.gate_up_proj.weight"].chunk(2)
    parts = {f"l.self_attn.{n}_proj.weight": part for n, part in zip("qkv", (q, k, v), strict=True)}
    parts |= {"l.mlp.gate_proj.weight": gate, "l.mlp.up_proj.weight": up}
    config = {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 1}
    same(converted(tmp_path, fused, config, rules="phi-3"), parts)
    same(converted(tmp_path, parts, config, rules="phi-3", reverse=True), fused)


def test_timm_vit(tmp_path: Path) -> None:
    """Queries, keys and values are the thirds of a fused tensor. All other tensors are renamed."""
    state = {f"blocks.{n}.attn.qkv.{p}": torch.rand(6, 2) for n in range(2) for p in ("weight", "bias")}
    state |= {"cls_token": torch.rand(1, 1, 2), "head.weight": torch.rand(3, 2), "norm.bias": torch.rand(2)}
    state["blocks.1.norm2.weight"] = torch.rand(2)
    got = converted(tmp_path, state, rules="timm-vit")
    key = state["blocks.1.attn.qkv.weight"].chunk(3)[1]
    assert torch.equal(got["vit.encoder.layer.1.attention.attention.key.weight"], key)
    assert {"vit.embeddings.cls_token", "classifier.weight", "vit.layernorm.bias"} <= got.keys()
    assert "vit.encoder.layer.1.layernorm_after.weight" in got
    same(converted(tmp_path, got, rules="timm-vit", reverse=True), state)


def test_other_models_are_refused(tmp_path: Path) -> None:
    """Rules refuse models of another type, and tensors with their dimensions in another order. Without a configuration,
    the report contains a note.
    """
    stacked = {"m.mlp.experts.gate_up_proj": torch.rand(3, 12, 4), "m.mlp.experts.down_proj": torch.rand(3, 4, 6)}
    torch.save(stacked, tmp_path / "in.pt")
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", rules="qwen2-moe", reverse=True)
    assert any("no config.json next to it names its model" in note for note in report.notes)
    with pytest.raises(RefusedError, match=r"are for other models .*got gpt_oss"):
        converted(tmp_path, stacked, {"model_type": "gpt_oss"}, rules="qwen2-moe", reverse=True)
    (tmp_path / "config.json").unlink()
    turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in stacked.items()}
    with pytest.raises(RefusedError, match="has its dimensions in an order"):
        converted(tmp_path, turned, rules="qwen2-moe", reverse=True)
    with pytest.raises(UsageError, match=r"there are no rules called mixtrel .*mixtral, phi-3, qwen2-moe"):
        converted(tmp_path, stacked, rules="mixtrel")


def test_rules_are_listed(command: Command) -> None:
    """The command lists the rules with their models. Each rule has a reverse unless it is a rule for the forward
    direction only.
    """
    said = command("rules").out
    for name, text in shipped_rules().items():
        rules = parse_rules(text.splitlines(), name)
        assert all(rule.models and (rule.is_forward or rule.reversed().reversed() == rule) for rule in rules)
        assert f"{name}: " in said
        assert f"for: {' '.join(rules[0].models)}\n" in said
