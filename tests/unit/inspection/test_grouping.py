"""``diff`` and ``inspect`` suggest the rules of the package that fit a checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from tests.support.command import Command
from tests.unit.edits.test_rules_by_name import State, experts

MIXTRAL = experts("model.layers.0.block_sparse_moe", ("w1", "w3", "w2"))
PHI = {"m.0.self_attn.qkv_proj.weight": torch.rand(12, 4), "m.0.mlp.gate_up_proj.weight": torch.rand(6, 4)}
VIT = {f"blocks.{n}.attn.qkv.{p}": torch.rand(6, 2) for n in range(2) for p in ("weight", "bias")}


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    ("rules", "state", "config"),
    [
        ("mixtral", MIXTRAL, {}),
        ("phi-3", PHI, {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 1}),
        ("timm-vit", VIT, {"model_type": "vit"}),
    ],
)
def test_diff_gives_the_command(
    tmp_path: Path, command: Command, rules: str, state: State, config: dict[str, Any], reverse: bool
) -> None:
    """The suggested command converts A so that it is the same as B, in both directions and between containers."""
    a, b, out = tmp_path / "a.pt", tmp_path / "b.safetensors", tmp_path / "out.safetensors"
    torch.save(state, a)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ckptconv.convert(a, b, rules=rules)
    a, b = (b, a) if reverse else (a, b)
    difference = ckptconv.diff(a, b)
    assert difference.suggestion == f"ckptconv convert {a} OUT --rules {rules}{' --reverse' * reverse}"
    assert "only the grouping of the tensors differs" in str(difference)
    command(*shlex.split(difference.suggestion.replace("OUT", str(out)))[1:])
    assert ckptconv.diff(out, b).same


def test_diff_gives_no_command_that_would_not_work(tmp_path: Path) -> None:
    """There is no suggestion for another model, other shapes or dtypes, an additional tensor, or an optimizer next to
    the weights.
    """
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(MIXTRAL, a)
    ckptconv.convert(a, b, rules="mixtral")
    stacked = torch.load(b)
    assert ckptconv.diff(a, b).suggestion is not None
    for change in (
        {"one.more": torch.ones(1)},
        {"model.layers.0.mlp.experts.down_proj": torch.rand(3, 6, 4)},
        {"model.layers.0.mlp.experts.down_proj": torch.rand(3, 4, 6).half()},
    ):
        torch.save({**stacked, **change}, b)
        assert ckptconv.diff(a, b).suggestion is None
    torch.save(stacked, b)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ckptconv.diff(a, b).suggestion is None
    (tmp_path / "config.json").unlink()
    optimizer = {"state": {}, "param_groups": [{"params": [*range(9)]}]}
    torch.save({"model": MIXTRAL, "optimizer": optimizer}, a)
    torch.save({"model": stacked, "optimizer": optimizer}, b)
    assert ckptconv.diff(a, b).suggestion is None


def test_inspect_names_the_rules(tmp_path: Path) -> None:
    """A note of ``inspect`` names the rules for experts in separate tensors, but not for stacked experts or for another
    model.
    """
    torch.save(MIXTRAL, tmp_path / "a.pt")
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", rules="mixtral")
    torch.save(
        {"experts.0.gate_proj.weight": torch.ones(1), "m.shared_experts.0.w1.weight": torch.ones(1)}, tmp_path / "c.pt"
    )

    def about(name: str) -> list[str]:
        return [note for note in ckptconv.inspect(tmp_path / name).notes if "stacks them" in note]

    (note,) = about("a.pt")
    assert note.endswith("rules='mixtral')")
    assert about("b.pt") == about("c.pt") == []
    for text in ('{"model_type": "llama"}', "{"):
        (tmp_path / "config.json").write_text(text)
        assert about("a.pt") == []
