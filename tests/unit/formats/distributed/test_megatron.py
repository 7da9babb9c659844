"""Folders of Megatron-Core with a model, an optimizer and a common state, in the layout of each version."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptconv
from ckptconv.conversion.discovery import find
from ckptconv.errors import CkptconvError, InputError, MalformedError, NoMatchError, RefusedError, UnsupportedError
from tests.support.conversions import converted, refused
from tests.support.judge import assert_same
from tests.support.megatron_folders import (
    ARGS,
    BUCKET,
    FFN,
    GROUP,
    GROUPS,
    HEADS,
    LAYERS,
    OBJECT,
    RESHAPED,
    SHAPES,
    VERSIONS,
    VOCAB,
    by_torch,
    weights,
    write_megatron,
)
from tests.support.reduced import Reduced
from tests.support.writers import ALONE

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")  # a warning of torch

_SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": VOCAB}


@pytest.fixture(params=VERSIONS)
def iteration(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder as each version of Megatron-Core writes it."""
    return write_megatron(tmp_path / "iter_0001000", request.param)


def test_paths_of_all_items(iteration: Path, dst: Path) -> None:
    """Weights have their own names, and each moment of the optimizer has the same names."""
    ckptconv.convert(iteration, dst)
    state = torch.load(dst, weights_only=False)
    assert_same(state["model"], weights())
    assert_same(state["optimizer"], {"state": {"exp_avg": {name: each * 2 for name, each in weights().items()}}})
    assert list(state) == ["model", "optimizer", "objects", "common"]
    assert state["objects"] == {OBJECT: [None], GROUP: [{"step": 3}]}
    assert state["common"] == {"args": Namespace(**ARGS), "checkpoint_version": 3.0, "iteration": 1000}


def test_verify_checks_the_complete_folder(iteration: Path) -> None:
    """``verify`` checks the folder as one checkpoint and finds no problem. ``inspect`` names the global that the
    arguments need.
    """
    verdict = ckptconv.verify(iteration)
    assert verdict.ok and verdict.checked
    found = ckptconv.inspect(iteration)
    assert "argparse.Namespace" in found.globals


def test_tensors_that_are_not_by_parameter_are_left_behind(iteration: Path, tmp_path: Path) -> None:
    """Tensors of the optimizer in buckets or in another shape are left behind, and the report names them. Selecting one
    of them is refused.
    """
    is_old = (iteration / ".metadata").read_bytes().count(b"nd_reformulated") > 0
    names = [BUCKET, *([RESHAPED] if is_old else [])]
    report = ckptconv.convert(iteration, tmp_path / "out.pt")
    assert {left.path for left in report.left_behind} == {f"optimizer/{name}" for name in names}
    assert any(f"not read: {len(names)} tensor" in note for note in report.notes)
    for name in names:
        refused(RefusedError, "cannot be selected", iteration, tmp_path / "no.pt", select=f"optimizer/{name}")


def test_selecting_an_optimizer_in_buckets_only(tmp_path: Path) -> None:
    """Selecting an optimizer that is stored only in buckets is refused, and the error contains the reason."""
    src = write_megatron(tmp_path / "src", state={**weights(), BUCKET: torch.zeros(7)})
    refused(
        RefusedError,
        "optimizer cannot be selected: an optimizer in the buckets",
        src,
        tmp_path / "a.pt",
        select="optimizer",
    )
    refused(NoMatchError, "there is nothing at optim", src, tmp_path / "a.pt", select="optim")
    assert converted(src, tmp_path / "w.pt", select="model").keys() == SHAPES.keys()


def test_safetensors_contains_the_weights(iteration: Path, tmp_path: Path) -> None:
    """The safetensors file contains the weights. The objects of the processes, the common state and the optimizer are
    left behind, and the report names them.
    """
    report = ckptconv.convert(iteration, tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), weights())
    assert {"objects", "common", "optimizer"} <= {left.path for left in report.left_behind}


def names_of_transformers(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights `model` with the names of transformers, cut by plain slices."""
    state = {"model.norm.weight": model["decoder.final_layernorm.weight"]}
    state["model.embed_tokens.weight"] = model["embedding.word_embeddings.weight"][:VOCAB]
    state["lm_head.weight"] = model["output_layer.weight"][:VOCAB]
    one = {
        "self_attn.o_proj": "self_attention.linear_proj.weight", "mlp.down_proj": "mlp.linear_fc2.weight",
        "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    }  # fmt: skip
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        state |= {f"{at}.{new}.weight": model[f"decoder.layers.{old}"][i] for new, old in one.items()}
        fc1 = model["decoder.layers.mlp.linear_fc1.weight"][i]
        state |= {f"{at}.mlp.gate_proj.weight": fc1[:FFN], f"{at}.mlp.up_proj.weight": fc1[FFN:]}
        qkv = model["decoder.layers.self_attention.linear_qkv.weight"][i].unflatten(
            0, (GROUPS, HEADS // GROUPS + 2, -1)
        )
        parts = {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
        state |= {f"{at}.self_attn.{n}_proj.weight": part.flatten(0, -2) for n, part in parts.items()}
    return state


def test_the_names_of_transformers(iteration: Path, tmp_path: Path) -> None:
    """One command converts the folder to shards with the names of transformers. The reverse restores the weights
    without the rows of padding.
    """
    out = tmp_path / "hf"
    ckptconv.convert(iteration, out, format="safetensors", rules="megatron-llama", sizes=_SIZES, max_shard_size=2000)
    files = [*out.glob("*.safetensors")]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = names_of_transformers(weights())
    assert len(files) > 1 and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    back = converted(out, tmp_path / "back.pt", rules="megatron-llama", sizes=_SIZES, reverse=True)
    cut = {name: tensor[:VOCAB] if name.startswith(("emb", "out")) else tensor for name, tensor in weights().items()}
    assert back.keys() == cut.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in cut.items())


def test_edits_in_one_command(tmp_path: Path) -> None:
    """A part of a larger model is selected, renamed, and converted to shards with the names of transformers in one
    command.
    """
    state = {f"language_model.{name}": tensor for name, tensor in weights().items()}
    src = write_megatron(tmp_path / "src", state={**state, "vision_model.w": torch.ones(3), OBJECT: [None]})
    assert not any("transformers" in note for note in ckptconv.inspect(src).notes)
    edits: dict[str, Any] = {"select": "model", "exclude": "vision_model.*", "strip_prefix": "language_model."}
    more: dict[str, Any] = {"rename": [("^output_layer", "lm_head")], "add_prefix": "net.", "format": "safetensors"}
    out = tmp_path / "hf"
    ckptconv.convert(src, out, **edits, **more, rules="megatron-llama", sizes=_SIZES, max_shard_size=2000)
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    wanted = {f"net.{name}": tensor for name, tensor in names_of_transformers(weights()).items()}
    wanted["net.lm_head.weight"] = weights()["output_layer.weight"]  # renamed before the rules apply
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("args", "rules"),
    [
        ({}, "megatron-llama"),
        ({"group_query_attention": False}, "num_key_value_heads=4"),
        ({"vocab_size": None}, "vocab_size=N"),
        ({"num_query_groups": -1}, "num_key_value_heads=N"),
        ({"num_attention_heads": 10**5000}, "num_attention_heads=N"),
        ({"swiglu": None}, None),
        ({"swiglu": False}, None),
        ({"apply_layernorm_1p": True}, None),
        ({"attention_output_gate": True}, None),
    ],
)
def test_next_step(tmp_path: Path, args: dict[str, Any], rules: str | None) -> None:
    """``inspect`` suggests the command with the sizes of the run, unless the run used an option that the rules do not
    support.
    """
    src = write_megatron(tmp_path / "src", args=ARGS | args)
    notes = [note for note in ckptconv.inspect(src).notes if "transformers" in note]
    assert (rules in notes[0]) if rules else not notes


@pytest.mark.parametrize("root", [7, "text", [1], {}])
@pytest.mark.parametrize("args", [None, [], Reduced(dict, ())])
def test_a_common_state_of_another_kind(tmp_path: Path, root: Any, args: Any) -> None:
    """The weights are read whatever the common state contains. The note about Megatron-Core contains no facts about the
    run.
    """
    src = write_megatron(tmp_path / "src")
    torch.save({"args": args, "iteration": "x"} if root == {} else root, src / "common.pt")
    assert any(note == "written by Megatron-Core" for note in ckptconv.inspect(src).notes)
    assert converted(src, tmp_path / "out.pt", select="model").keys() == SHAPES.keys()


@pytest.mark.parametrize("key", [OBJECT, GROUP, "optimizer.state.exp_avg.w"])
def test_an_object_that_runs_code(tmp_path: Path, key: str) -> None:
    """A dangerous call is found in every object, also in an object of an optimizer whose tensors are left out."""
    objects = {key: [Reduced(os.system, ("true",))]}
    src = write_megatron(tmp_path / "src", state={**weights(), BUCKET: torch.zeros(7), **objects})
    assert [found.level for found in ckptconv.verify(src).findings].count("dangerous") == 1
    refused(ckptconv.errors.DangerousError, "posix.system", src, tmp_path / "out.pt")


def test_a_common_state_that_runs_code(tmp_path: Path) -> None:
    """A dangerous call in the common state is found in ``common.pt``, and in the item that version 0.19 writes."""
    for version in ("0.16", "0.19"):
        src = write_megatron(tmp_path / version, version, args={"x": Reduced(os.system, ("true",))})
        verdict = ckptconv.verify(src)
        assert verdict.findings[0].level == "dangerous" and "common/args" in str(verdict.findings[0])
        refused(ckptconv.errors.DangerousError, "posix.system", src, tmp_path / "out.pt")


def test_a_common_state_twice(tmp_path: Path) -> None:
    """An item with the path or the name of ``common.pt`` is refused. Megatron-Core reads the file if it exists, so its
    contents must be checked.
    """
    src = write_megatron(tmp_path / "new", "0.19", {"w": torch.ones(2)})
    torch.save({"x": Reduced(os.system, ("true",))}, src / "common.pt")
    refused(MalformedError, "'common.pt' and another item have the same path", src, tmp_path / "out.pt")
    for item in ([1], torch.ones(3)):
        src = write_megatron(tmp_path / type(item).__name__, state={"w": torch.ones(2), "common.pt": item})
        refused(MalformedError, "an item has the name of the file common.pt", src, tmp_path / "out.pt")
        assert not ckptconv.verify(src).ok


@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_a_damaged_common_state(tmp_path: Path, damage: str) -> None:
    """If ``common.pt`` is missing, truncated or invalid, the error names the file."""
    src = write_megatron(tmp_path / "src")
    data = (src / "common.pt").read_bytes()
    (src / "common.pt").unlink()
    if damage != "gone":
        (src / "common.pt").write_bytes(data[:-90] if damage == "cut" else b"hello")
    refused(InputError, "common.pt", src, tmp_path / "out.pt")
    assert not ckptconv.verify(src).ok


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", "[" * 100_000, '{"format": "x"}'])
def test_another_metadata_json(tmp_path: Path, text: str) -> None:
    """A folder with another ``metadata.json`` is read as an ordinary DCP folder."""
    src = write_megatron(tmp_path / "src")
    (src / "metadata.json").write_text(text)
    assert converted(src, tmp_path / "out.pt").keys() > SHAPES.keys()


def test_plans_are_not_read_but_known(tmp_path: Path) -> None:
    """The plans in ``.metadata`` are not used, but a global that no version writes there is refused. Unknown fields are
    refused too.
    """
    src = write_megatron(tmp_path / "src")
    metadata = pickle.loads((src / ".metadata").read_bytes())
    metadata.all_local_plans.append(pickle.dumps)
    (src / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(UnsupportedError, "pickle.dumps", src, tmp_path / "out.pt")
    metadata.all_local_plans = [[]]
    metadata.mcore_data = {next(iter(SHAPES)): 3, "x": {"y": 3}}
    (src / ".metadata").write_bytes(pickle.dumps(metadata))
    assert converted(src, tmp_path / "out.pt", select="model").keys() == SHAPES.keys()
    metadata.more = 1
    (src / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "out.pt").unlink()
    refused(UnsupportedError, "fields that this version does not know", src, tmp_path / "out.pt")
    del metadata.more
    metadata.mcore_data = [1]
    (src / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(MalformedError, "mcore_data is not a dict", src, tmp_path / "out.pt")


def test_two_moments_of_one_name(tmp_path: Path) -> None:
    """Chained optimizers are merged, so two states with the same parameter name are refused."""
    state = {f"chained_{i}.optimizer.state.exp_avg.w": torch.ones(2) * i for i in (0, 1)}
    src = write_megatron(tmp_path / "src", state={"w": torch.ones(2), **state})
    refused(MalformedError, "have the same path", src, tmp_path / "out.pt")
    src = write_megatron(
        tmp_path / "one", state={"w": torch.ones(2), "chained_1.optimizer.state.exp_avg.w": torch.ones(2)}
    )
    assert_same(converted(src, tmp_path / "out.pt", select="optimizer")["state"], {"exp_avg": {"w": torch.ones(2)}})


def test_a_folder_of_iterations(tmp_path: Path) -> None:
    """Each iteration is one checkpoint, and ``common.pt`` is a part of it."""
    for name in ("iter_0001000", "iter_0002000"):
        write_megatron(tmp_path / "run" / name)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2000")
    found = {each.path.name: (each.kind, [part.name for part in each.parts]) for each in find(tmp_path / "run")}
    parts = [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    assert found.pop("latest_checkpointed_iteration.txt")[0] == "other"
    assert found == {"iter_0001000": ("dcp", parts), "iter_0002000": ("dcp", parts)}


def test_rename_in_place_is_refused(iteration: Path) -> None:
    """A rename in place is refused, because the names of the items are not their paths in the checkpoint."""
    with pytest.raises(UnsupportedError, match="do not match their paths"):
        ckptconv.convert(iteration, in_place=True, rename=[("^decoder", "d")], select=None)


def test_from_megatron_to_dcp(iteration: Path, tmp_path: Path) -> None:
    """The weights can be converted to a DCP folder, which torch loads."""
    ckptconv.convert(iteration, tmp_path / "out", format="dcp", select="model", ranks=2)
    state = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", **ALONE)
    assert all(torch.equal(state[name], tensor) for name, tensor in weights().items())


@pytest.mark.untraced
@pytest.mark.filterwarnings("ignore")
def test_changed_metadata_is_read_like_torch(tmp_path: Path) -> None:
    """If ``.metadata`` with a few changed bytes is read by ckptconv and by torch, both read the same weights."""
    src = write_megatron(tmp_path / "src", "0.16", weights())
    right, random, read = (src / ".metadata").read_bytes(), Random(5), 0
    for _ in range(80):
        data = bytearray(right)
        for _ in range(random.randint(1, 2)):
            at = random.randrange(len(data))
            data[at] = (data[at] + random.choice((1, -1, 8))) % 256
        (src / ".metadata").write_bytes(data)
        try:
            found = converted(src, tmp_path / "out.pt", select="model")
        except CkptconvError:
            continue
        try:
            wanted = by_torch(src)  # only classes of torch, because others were refused
        except (Exception, SystemExit):  # in the plans, which ckptconv does not read
            continue
        read += 1
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert read > 5
