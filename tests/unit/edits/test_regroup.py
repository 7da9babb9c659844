"""``regroup`` splits, joins and stacks tensors. The results are compared with those of torch's own functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.edits.regroup_files import _flat
from ckptconv.edits.regroup_items import Items, Maker, apply_rules
from ckptconv.edits.regroup_plan import Group
from ckptconv.edits.regroup_rules import parse_rule
from ckptconv.errors import CkptconvError, CollisionError, LimitError, NoMatchError, RefusedError, UsageError
from ckptconv.limits import LIMITS
from ckptconv.work import bounded
from tests.support.http_server import serving
from tests.unit.test_limits import set_limits

State = dict[str, torch.Tensor]
MIXTRAL = (
    "**.experts.{e}.w1.weight:1, **.experts.{e}.w3.weight:1 = **.experts.gate_up_proj",
    "**.experts.{e}.w2.weight = **.experts.down_proj",
)


def numbered(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of `shape` with consecutive numbers from `start`."""
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n).reshape(shape).to(dtype)


def regrouped(tmp_path: Path, state: Any, *rules: str, out: str = "out.pt", **options: Any) -> Any:
    """Save `state`, regroup it with `rules`, and return the loaded result."""
    source = tmp_path / "in.pt"
    torch.save(state, source)
    ckptconv.convert(source, tmp_path / out, regroup=rules, force=True, **options)
    return load_file(tmp_path / out) if out.endswith("safetensors") else torch.load(tmp_path / out)


def same(got: State, expected: State) -> None:
    """Check that names, their order, dtypes, shapes and values are equal."""
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.fixture
def moe() -> State:
    """Return two layers with eleven experts each, so that expert 10 must come after expert 9 and not after expert 1.
    Each layer also has a shared expert.
    """
    state: State = {}
    for layer in range(2):
        at = f"layers.{layer}.mlp"
        for e in range(11):
            for i, w in enumerate(("w1", "w2", "w3")):
                shape = (4, 6) if w == "w2" else (6, 4)
                state[f"{at}.experts.{e}.{w}.weight"] = numbered(*shape, start=1000 * e + 100 * i + layer)
        state[f"{at}.shared_experts.0.w1.weight"] = numbered(2, 2)
    return state


def stacked(state: State) -> State:
    """Return the result of ``MIXTRAL`` for `state`, computed by torch."""
    out: State = {}
    for layer in range(2):
        at = f"layers.{layer}.mlp"
        one, two, three = (
            torch.stack([state[f"{at}.experts.{e}.{w}.weight"] for e in range(11)]) for w in ("w1", "w2", "w3")
        )
        out[f"{at}.experts.gate_up_proj"] = torch.cat([one, three], 1)
        out[f"{at}.experts.down_proj"] = two
        out[f"{at}.shared_experts.0.w1.weight"] = state[f"{at}.shared_experts.0.w1.weight"]
    return out


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_experts_are_stacked_and_unstacked(tmp_path: Path, moe: State, out: str) -> None:
    """Experts are stacked and unstacked again. Experts with another name do not change."""
    got = regrouped(tmp_path, moe, *MIXTRAL, out=out)
    assert {name: tensor.tolist() for name, tensor in got.items()} == {
        name: tensor.tolist() for name, tensor in stacked(moe).items()
    }
    back = tmp_path / ("back" + Path(out).suffix)
    ckptconv.convert(tmp_path / out, back, regroup=MIXTRAL, reverse=True)
    again = load_file(back) if out.endswith("safetensors") else torch.load(back)
    assert again.keys() == moe.keys()
    assert all(torch.equal(again[name], moe[name]) for name in moe)


def test_new_tensors_take_the_position_of_the_first_of_their_group(tmp_path: Path, moe: State) -> None:
    """A new tensor takes the position of the first tensor of its group. Unstacked tensors are sorted by index, and then
    as in the rule.
    """
    got = regrouped(tmp_path, moe, *MIXTRAL)
    same(got, stacked(moe))
    got = regrouped(tmp_path, got, *MIXTRAL, reverse=True)
    assert list(got)[:4] == [
        f"layers.0.mlp.experts.{e}.{w}.weight" for e in (0, 1) for w in ("w1", "w3")
    ]  # gate_up_proj was first, then down_proj


def test_parts_of_a_split_are_views_of_one_storage(tmp_path: Path) -> None:
    """The parts of a split along the first dimension are views of one storage."""
    got = regrouped(
        tmp_path, {"qkv.weight": numbered(12, 4), "qkv.bias": numbered(12)}, "**.qkv.* = **.q.*:1, **.k.*:1, **.v.*:1"
    )
    q, k, v = numbered(12, 4).chunk(3)
    assert torch.equal(got["q.weight"], q)
    assert torch.equal(got["k.weight"], k)
    assert torch.equal(got["v.weight"], v)
    assert len({tensor.untyped_storage().data_ptr() for tensor in got.values()}) == 2
    assert got["v.bias"].tolist() == [8, 9, 10, 11]


def test_split_by_sizes(tmp_path: Path) -> None:
    """A split needs sizes or shares, because the parts cannot be guessed. The 6144 rows of a fused weight of Llama-3,
    for example, could also be three parts of 2048.
    """
    state = {"a.qkv.weight": numbered(12, 2)}
    got = regrouped(tmp_path, state, "**.qkv.weight = **.q.weight[8], **.k.weight[2], **.v.weight[2]")
    q, k, v = state["a.qkv.weight"].split([8, 2, 2])
    same(got, {"a.q.weight": q, "a.k.weight": k, "a.v.weight": v})
    with pytest.raises(UsageError, match="a split needs the share or the size of each part"):
        regrouped(tmp_path, state, "**.qkv.weight = **.q.weight, **.k.weight, **.v.weight")


@pytest.mark.parametrize("leading", [False, True])
def test_groups_are_those_of_megatron(tmp_path: Path, *, leading: bool) -> None:
    """A grouped split equals a reshape in which each group contains its queries, a key and a value, as in Megatron.
    This is true with and without a leading dimension of layers.
    """
    layers, groups, q, dim, hidden = 2, 4, 3, 2, 5
    weight = numbered(layers, groups * (q + 2) * dim, hidden)
    by_group = weight.reshape(layers, groups, (q + 2), dim, hidden)
    expected = {}
    for layer in range(layers):
        parts = by_group[layer, :, :q], by_group[layer, :, q : q + 1], by_group[layer, :, q + 1 :]
        expected |= {f"l.{layer}.{n}": part.reshape(-1, hidden) for n, part in zip("qkv", parts, strict=True)}
    if leading:
        state = {"all.qkv": weight}
        rule = "all.qkv @1/4 = l.{i}.q:3, l.{i}.k:1, l.{i}.v:1"
    else:
        state = {f"{layer}.qkv": weight[layer].clone() for layer in range(layers)}
        rule = "{i}.qkv @0/4 = l.{i}.q:3, l.{i}.k:1, l.{i}.v:1"
    got = regrouped(tmp_path, state, rule)
    same(got, expected)
    same(regrouped(tmp_path, got, rule, reverse=True), state)


def test_groups_of_one_interleave(tmp_path: Path) -> None:
    """If each group contains one element of each part, the parts interleave. gpt-oss stores gate and up in this way
    along the last dimension.
    """
    weight = numbered(2, 3, 8)
    rule = "x.gate_up @2/4 = x.gate:1, x.up:1"
    got = regrouped(tmp_path, {"x.gate_up": weight}, rule)
    same(got, {"x.gate": weight[..., ::2].contiguous(), "x.up": weight[..., 1::2].contiguous()})
    same(regrouped(tmp_path, got, rule, reverse=True), {"x.gate_up": weight})


def test_other_dimensions(tmp_path: Path) -> None:
    """A split along the last dimension, and a split of a transposed tensor, write contiguous tensors."""
    state = {"w": numbered(3, 8), "t": numbered(8, 3).t()}
    rules = "w @1 = a:3, b:1", "t @0 = c:2, d:1"
    got = regrouped(tmp_path, state, *rules)
    same(got, {"a": state["w"][:, :6], "b": state["w"][:, 6:], "c": state["t"][:2], "d": state["t"][2:]})
    assert all(tensor.is_contiguous() for tensor in got.values())
    same(regrouped(tmp_path, got, *rules, reverse=True), state)


def test_part_named_dash_is_left_behind(tmp_path: Path) -> None:
    """A part that is named ``-`` is left behind, and the report contains its size. The part may be empty."""
    torch.save({"old.weight": numbered(10, 4)}, tmp_path / "in.pt")
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup="old.weight = new.weight[8], -")
    same(torch.load(tmp_path / "out.pt"), {"new.weight": numbered(10, 4)[:8]})
    assert [(left.path, left.nbytes) for left in report.left_behind] == [("old.weight, 2 of 10 along dimension 0", 32)]
    assert not ckptconv.convert(
        tmp_path / "in.pt", tmp_path / "all.pt", regroup="old.weight = new.weight[10], -"
    ).left_behind


def test_numbers_shift_and_those_below_0_stay(tmp_path: Path) -> None:
    """A rule can shift the numbers in names. A name whose number would be below 0 does not change, and a note counts
    such names.
    """
    torch.save({"blocks.0.x": numbered(1), "blocks.1.x": numbered(2)}, tmp_path / "in.pt")
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup="blocks.{n+1}.x = layers.{n}.x")
    assert list(torch.load(tmp_path / "out.pt")) == ["blocks.0.x", "layers.0.x"]
    assert any("1 name stays as it is" in note for note in report.notes)


def test_names_can_move_up(tmp_path: Path) -> None:
    """All names change at the same time, so a new name can equal an old name."""
    got = regrouped(tmp_path, {f"b.{n}": numbered(n + 1) for n in range(3)}, "b.{n} = b.{n+1}")
    assert {name: len(tensor) for name, tensor in got.items()} == {"b.1": 1, "b.2": 2, "b.3": 3}


def test_each_rule_applies_to_the_result_of_the_previous_rule(tmp_path: Path) -> None:
    """Each rule applies to the names that the previous rule left, including those of new tensors."""
    state = {f"l.{n}.qkv": numbered(6, 2, start=10 * n) for n in range(3)}
    got = regrouped(
        tmp_path, state, "l.{n}.qkv = l.{n}.q:1, l.{n}.k:1, l.{n}.v:1", "l.{n}.k = k", "l.{n}.v = v", "v:1, k:1 = vk @1"
    )
    k, v = (torch.stack([tensor[i : i + 2] for tensor in state.values()]) for i in (2, 4))
    assert torch.equal(got["vk"], torch.cat([v, k], 1))
    assert list(got) == ["l.0.q", "vk", "l.1.q", "l.2.q"]


def test_metadata_follows(tmp_path: Path) -> None:
    """``_metadata`` contains the modules of the new names, each with the version of the old module."""
    model = torch.nn.Module()
    model.add_module("qkv", torch.nn.Linear(2, 6))
    model.add_module("norm", torch.nn.BatchNorm1d(2))
    got = regrouped(tmp_path, model.state_dict(), "**.qkv.* = **.q.*:1, **.k.*:1, **.v.*:1", "norm.* = n.*")
    expected = torch.nn.Module()
    for name in "qkv":
        expected.add_module(name, torch.nn.Linear(2, 2))
    expected.add_module("n", torch.nn.BatchNorm1d(2))
    assert {**got._metadata} == {**expected.state_dict()._metadata}
    expected.load_state_dict(got, strict=True)


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    """The parts of a parameter are parameters, and they require gradients like the whole."""
    got = regrouped(tmp_path, {"w": torch.nn.Parameter(numbered(4, 2))}, "w = a:1, b:1")
    assert all(isinstance(each, torch.nn.Parameter) and each.requires_grad for each in got.values())


def test_ties_are_regrouped_once_or_refused(tmp_path: Path) -> None:
    """A tensor with two names is regrouped once and still has two names. A rule that regroups only one of the names is
    refused.
    """
    a, b = numbered(2, 2), numbered(2, 2, start=9)
    state = {"x.0.a": a, "x.0.b": b, "x.1.a": a, "x.1.b": b}
    got = regrouped(tmp_path, state, "x.{n}.a:1, x.{n}.b:1 = x.{n}.ab")
    assert torch.equal(got["x.0.ab"], torch.cat([a, b]))
    assert got["x.0.ab"].data_ptr() == got["x.1.ab"].data_ptr()
    with pytest.raises(RefusedError, match=r"x\.1\.a is tied to x\.0\.a"):
        regrouped(tmp_path, state, "x.0.a, x.0.b = ab")
    with pytest.raises(RefusedError, match=r"x\.0\.a is tied to x\.1\.a"):
        regrouped(tmp_path, state, "x.1.a, x.1.b = ab")
    with pytest.raises(RefusedError, match=r"head is tied to embed"):
        regrouped(tmp_path, {"embed": a, "head": a}, "embed = e[1], -")


def test_rename_ignores_the_numbers_of_an_optimizer(tmp_path: Path) -> None:
    """A rename is not refused if it is unknown which number of an optimizer belongs to which weight."""
    model = torch.nn.Linear(2, 6)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert regrouped(tmp_path, state, "weight = w", "bias = b")["optimizer"].keys() == {"state", "param_groups"}


def test_companions_of_a_weight(tmp_path: Path) -> None:
    """A weight is regrouped only together with its bias and its scales, and is cut only at the ends of their blocks.
    The bias of a stacked weight stays as it is, and a note names it.
    """
    fp8 = torch.zeros(512, 4).to(torch.float8_e4m3fn)
    state = {"a.qkv.weight": fp8, "a.qkv.weight_scale_inv": numbered(4, 1)}
    rule = "**.qkv.weight = **.q.weight[256], **.k.weight[256]"
    with pytest.raises(RefusedError, match=r"a\.qkv\.weight_scale_inv belongs to a\.qkv\.weight"):
        regrouped(tmp_path, state, rule)
    scales = "**.qkv.weight_scale_inv = **.q.weight_scale_inv[2], **.k.weight_scale_inv[2]"
    assert regrouped(tmp_path, state, rule, scales)["a.k.weight_scale_inv"].tolist() == [[2], [3]]
    with pytest.raises(RefusedError, match=r"not cut where the blocks of a\.qkv\.weight_scale_inv end"):
        regrouped(tmp_path, state, "**.qkv.weight = **.q.weight[200], **.k.weight[312]", scales)
    # 192 rows with two scales have blocks of 128, not of 96. 64 rows with one scale have blocks of 64 or 128.
    odd = {"a.qkv.weight": fp8[:192], "a.qkv.weight_scale_inv": numbered(2, 1)}
    halves = ("a.qkv.weight = a.q.weight:1, a.k.weight:1", "a.qkv.weight_scale_inv = a.q.scales:1, a.k.scales:1")
    with pytest.raises(RefusedError, match="not cut where the blocks"):
        regrouped(tmp_path, odd, *halves)
    for rows, ok in ((64, False), (128, True), (96, False)):
        parts = {f"{n}.weight{s}": numbered(1, 1) if s else fp8[:rows] for n in "qk" for s in ("", "_scale_inv")}
        joins = ("q.weight, k.weight = w", "q.weight_scale_inv, k.weight_scale_inv = w_scale_inv")
        if ok:
            assert regrouped(tmp_path, parts, *joins)["w_scale_inv"].shape == (2, 1)
        else:
            with pytest.raises(RefusedError, match="not cut where the blocks"):
                regrouped(tmp_path, parts, *joins)
    quantized = {"e.0.gate_proj_blocks": numbered(2), "e.0.gate_proj_scales": numbered(2)}
    with pytest.raises(RefusedError, match="gate_proj_scales belongs to"):
        regrouped(tmp_path, quantized, "e.{n}.gate_proj_blocks = e.gate_proj_blocks")
    state = {"qkv.weight": numbered(4, 2), "qkv.bias": numbered(4)}
    with pytest.raises(RefusedError, match=r"qkv\.bias belongs to qkv\.weight"):
        regrouped(tmp_path, state, "**.qkv.weight = **.q.weight:1, **.k.weight:1")
    torch.save({"e.0.weight": numbered(2), "e.0.bias": numbered(2)}, tmp_path / "in.pt")
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "x.pt", regroup="e.{n}.weight = e.weight")
    assert any("e.0.bias" in note for note in report.notes)


def test_named_sizes(tmp_path: Path) -> None:
    """The value of a named size comes from ``sizes`` or from the config.json next to the file. The name can contain a
    section.
    """
    state = {"qkv.weight": numbered(12, 2)}
    rule = "qkv.weight = q.weight:$heads, k.weight:$text_config.kv, v.weight:$text_config.kv"
    expected = dict(zip(("q.weight", "k.weight", "v.weight"), state["qkv.weight"].split([8, 2, 2]), strict=True))
    with pytest.raises(UsageError, match=r"the value of \$heads, \$text_config.kv is not known.*sizes='heads=N'"):
        regrouped(tmp_path, state, rule)
    same(regrouped(tmp_path, state, rule, sizes={"heads": 4, "text_config.kv": 1}), expected)
    (tmp_path / "sizes.json").write_text(json.dumps({"heads": 8, "text_config": {"kv": 2}}))
    same(regrouped(tmp_path, state, rule, sizes=str(tmp_path / "sizes.json")), expected)
    (tmp_path / "config.json").write_text(json.dumps({"heads": 4, "text_config": {"kv": 7}}))
    same(regrouped(tmp_path, state, rule, sizes="text_config.kv=1"), expected)


def test_files_of_rules(tmp_path: Path) -> None:
    """A file of rules contains one rule in each line, and comments. A rule that matches nothing is an error only if no
    rule matches.
    """
    rules = tmp_path / "my.rules"
    rules.write_text("// of my model\nw = a:1, b:1   // halves\nforward: x = y[1], -\n\nno.such = name\n")
    state = {"w": numbered(4, 2)}
    same(regrouped(tmp_path, state, rules=str(rules)), {"a": state["w"][:2], "b": state["w"][2:]})
    same(regrouped(tmp_path, {"a": state["w"][:2], "b": state["w"][2:]}, rules=rules.as_posix(), reverse=True), state)
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "back.pt", rules=str(rules), reverse=True)
    assert [note for note in report.notes if "x = y[1], -" in note] == [
        "rules that have no reverse are left out: x = y[1], -"
    ]
    with pytest.raises(NoMatchError, match=r"no rule of .*my\.rules matches a name"):
        regrouped(tmp_path, {"other": numbered(1)}, rules=str(rules))


def test_shards(tmp_path: Path, moe: State) -> None:
    """Tensors of several shards are joined, and the index contains the shard of each new tensor. A single shard is
    refused if parts are missing or can be in other shards.
    """
    folder = tmp_path / "set"
    folder.mkdir()
    names = list(moe)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: moe[name] for name in own}, folder / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ckptconv.convert(folder, tmp_path / "out", regroup=MIXTRAL)
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    got = {name: tensor for shard in shards for name, tensor in load_file(tmp_path / "out" / shard).items()}
    expected = stacked(moe)
    assert got.keys() == expected.keys() == written.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert all(written[name] in shards and name in load_file(tmp_path / "out" / written[name]) for name in written)
    ckptconv.convert(folder, tmp_path / "one.pt", regroup=MIXTRAL)
    assert torch.load(tmp_path / "one.pt").keys() == expected.keys()
    with pytest.raises(RefusedError, match="a part is missing"):
        ckptconv.convert(folder / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors", regroup=MIXTRAL[0])
    save_file({f"e.{i}.w": numbered(2) for i in range(3)}, one := tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(RefusedError, match="other parts can be in the others"):  # e.3.w may be in another shard
        ckptconv.convert(one, tmp_path / "x.safetensors", regroup="e.{i}.w = e.w")
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("name", ["in.pt", "in.safetensors"])
def test_a_split_in_place(tmp_path: Path, name: str) -> None:
    """An in-place split changes only the pickle or the header, and ``undo`` restores the file. A split that has to
    rewrite tensor data is refused.
    """
    state = {"qkv.weight": numbered(12, 4), "z": numbered(3)}
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(state, path)
    else:
        save_file({"qkv.weight": state["qkv.weight"], "z" * 500: state["z"]}, path)
        ckptconv.convert(path, rename=[("^z+$", "z")], in_place=True)  # this leaves free space in the header
    old = path.read_bytes()
    report = ckptconv.convert(path, regroup="qkv.weight = q:1, k:1, v:1", in_place=True)
    got = load_file(path) if name.endswith("safetensors") else torch.load(path)
    assert torch.equal(got["k"], state["qkv.weight"][4:8])
    assert torch.equal(got["z"], state["z"])
    assert report.nbytes < 4000
    ckptconv.undo(path)
    assert path.read_bytes() == old
    with pytest.raises(UsageError, match="rewrites tensor data"):
        ckptconv.convert(path, regroup="qkv.weight @1 = q:1, k:1", in_place=True)
    assert path.read_bytes() == old


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_remote_files(tmp_path: Path, moe: State, suffix: str) -> None:
    """Tensors of remote files are stacked, joined, and cut along another dimension."""
    state = {**moe, "qkv": numbered(4, 6)}
    save_file(state, tmp_path / "in.safetensors") if suffix == "safetensors" else torch.save(state, tmp_path / "in.pt")
    with serving({f"in.{suffix}": (tmp_path / f"in.{suffix}").read_bytes()}) as server:
        ckptconv.convert(server.url(f"in.{suffix}"), tmp_path / "out.pt", regroup=(*MIXTRAL, "qkv @1 = q[4], k[2]"))
    q, k = state["qkv"].split([4, 2], 1)
    same(torch.load(tmp_path / "out.pt"), {**stacked(moe), "q": q, "k": k})


def test_damage_is_seen(tmp_path: Path) -> None:
    """A split that writes new tensor data compares the source with its checksum, and reports damage."""
    torch.save({"w": numbered(64, 64), "x": numbered(64, 2)}, tmp_path / "in.pt")
    data = bytearray((tmp_path / "in.pt").read_bytes())
    at = data.index(numbered(64, 64).numpy().tobytes())
    data[at + 5] ^= 1
    (tmp_path / "in.pt").write_bytes(data)
    for rule in ("w @1 = a:1, b:1", "w @1/2 = a:1, b:1"):
        with pytest.raises(CkptconvError, match="checksum"):
            ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup=rule)
    assert not (tmp_path / "out.pt").exists()


def test_the_report_has_every_group_before_anything_is_written(tmp_path: Path, moe: State) -> None:
    """The report of a dry run contains every group with its shapes. The report of a conversion summarizes similar
    groups in its text.
    """
    torch.save(moe, tmp_path / "in.pt")
    report = ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup=MIXTRAL, dry_run=True)
    assert str(report).count("experts.gate_up_proj [11, 12, 4]") == 2
    short = str(ckptconv.convert(tmp_path / "in.pt", tmp_path / "out.pt", regroup=MIXTRAL))
    assert short.count("experts.gate_up_proj [11, 12, 4]") == 1
    assert "and 1 more in this way" in short
    first = report.as_dict()["regrouped"][0]
    assert first["old"][0] == "layers.0.mlp.experts.{e}.w1.weight [6, 4] × 11"
    assert first["new"] == ["layers.0.mlp.experts.gate_up_proj [11, 12, 4]"]


_PAIR = {"q": numbered(4, 2), "k": numbered(2, 2), "i": numbered(2, 2).to(torch.int64), "o": numbered(2, 3)}

#: Rules that make no sense for any names, and a part of the error.
SENSELESS = {
    "a": "one = between its sides",
    "a = b = c": "one = between its sides",
    "q -> a": "no rule contains >",
    "q, k = a, b": "several names are on both sides",
    "q, = a": "a name is missing",
    "q, q = a": "on one side twice",
    "q = a, b": "needs the share or the size",
    "q = a:1, b": "a part has no share",
    "q = a[1], b": "a part has no size",
    "q = a[1], b:1": "some parts have shares and others sizes",
    "q = a:0, b:1": "is not valid",
    "q = a:01, b:1": "is not valid",
    "q = a:1, b:1 @0": "is not valid",
    "q = a @0, b": "@ is written after the whole",
    "q:1 = a:1, b:1": "shares and sizes are for parts",
    "q @0 = a": "this is a rename",
    "x.{e} = a @0": "a rule with one part cuts nothing",
    "x.{e}.{e} = a": "in one name twice",
    "x.{e}{f} = a": "is ambiguous",
    "x.{e}1 = a": "is ambiguous",
    "x.*{e} = a.*": "is ambiguous",
    "x.{e = a": "a number in a name",
    "x.{n} = y.{m}": "a number that the other does not",
    "x.{n}.a:1, x.{m}.b:1 = y": "all parts have the same numbers",
    "a.{n} = b:1, c:1": "the whole has a number",
    "x.** = y.**": "at most one",
    "**.x = y": "the same wildcards",
    "- = a": "- is a part that a split drops",
    "q = -": "- is a part that a split drops",
    "q = -, a:1": "- is a part that a split drops",
    "q = a b": "needs a backslash",
}


@pytest.mark.parametrize("rule", SENSELESS)
def test_invalid_rules(tmp_path: Path, rule: str) -> None:
    """A rule that makes no sense is refused with the reason in one line, before anything is read."""
    with pytest.raises(UsageError) as error:
        ckptconv.convert(tmp_path / "none.pt", tmp_path / "out.pt", regroup=rule)
    assert SENSELESS[rule] in str(error.value)
    assert "\n" not in str(error.value)


#: Tensors, rules that do not fit them, and a part of the error.
UNFIT: dict[str, tuple[State, tuple[str, ...], str]] = {
    "shares": (_PAIR, ("q = a:1, b:2",), "4, which 3 shares do not divide"),
    "sizes": (_PAIR, ("q = a[1], b[2]",), "the sizes in the rule are not those of q"),
    "too small for a dash": (_PAIR, ("q = a[5], -",), "the sizes in the rule are not those of q"),
    "groups": (_PAIR, ("q @0/3 = a:1, b:1",), "not divisible by 3 groups"),
    "dtypes": (_PAIR, ("k, i = a",), "differ in dtype"),
    "another dimension": (_PAIR, ("k, o = a",), "differ in a dimension other"),
    "sizes of a join": (_PAIR, ("q:1, k:1 = a",), "other sizes along dimension 0"),
    "missing": (_PAIR, ("q, x = a",), "a part is missing: x"),
    "beyond": (_PAIR, ("q @2 = a:1, b:1",), "no dimension 2"),
    "exists": (_PAIR, ("q = k",), "k exists already"),
    "nothing": (_PAIR, ("nothing = a",), "no name matches the rule"),
    "three dimensions": ({"w": numbered(2, 4, 2)}, ("w = a:1, b:1",), "does not say along which"),
    "stacked dimension": ({"w": numbered(2, 4, 2)}, ("w @0 = a.{e}:1, b.{e}:1",), "is stacked"),
    "a gap": ({"x.0": numbered(1), "x.2": numbered(1)}, ("x.{e} = y",), "a part is missing: x.1"),
    "a huge gap": ({"x.0": numbered(1), f"x.{10**17}": numbered(1)}, ("x.{e} = y",), "a part is missing: x.1"),
    "not from 0": ({"x.1": numbered(1), "x.2": numbered(1)}, ("x.{e} = y",), "a part is missing: x.0"),
    "zeros": ({"x.00": numbered(1), "x.01": numbered(1)}, ("x.{e} = y",), "begins with 0"),
    "counts": (
        {"a.x.0": numbered(1), "a.x.1": numbered(1), "b.x.0": numbered(1)},
        ("**.x.{e} = **.y",),
        "different sizes",
    ),
    "shapes": ({"x.0": numbered(1), "x.1": numbered(2)}, ("x.{e} = y",), "differ in shape"),
    "two names": ({"x.0": numbered(1)}, ("x.{n}, *.{n} = y",), "wildcards"),
    "both sides": ({"a.b": numbered(4)}, ("a.b = a.b:1, c.d:1",), "two names of the rule match"),
    "layer norms": (
        {"qkv.weight": numbered(4), "qkv.layer_norm_weight": numbered(4)},
        ("qkv.* = q.*:1, k.*:1",),
        "layer_norm_weight is another",
    ),
    "scalars": ({"x": numbered(1).reshape(())}, ("x = a:1, b:1",), "has no dimension 0"),
    "sparse": ({"x": torch.eye(2).to_sparse()}, ("x = a:1, b:1",), "not a plain tensor"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_rules_that_do_not_fit(tmp_path: Path, case: str) -> None:
    """A rule that does not fit the tensors is refused with the reason in one line, and nothing is written."""
    state, rules, text = UNFIT[case]
    with pytest.raises(CkptconvError) as error:
        regrouped(tmp_path, state, *rules)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.pt").exists()


def test_rules_that_have_no_reverse(tmp_path: Path) -> None:
    """A rule that drops a part, and a join without shares or sizes, have no reverse. ``reverse`` without rules is
    refused.
    """
    for rule in ("q = a[1], -", "a, b = c"):
        with pytest.raises(UsageError):
            ckptconv.convert(tmp_path / "none.pt", tmp_path / "out.pt", regroup=rule, reverse=True)
    with pytest.raises(UsageError, match="reverse=True goes with"):
        ckptconv.convert(tmp_path / "none.pt", tmp_path / "out.pt", reverse=True)


def test_a_tensor_without_bytes_makes_no_million_names(tmp_path: Path) -> None:
    """A tensor without data can have any number of rows, so the number of new tensors is bounded."""
    with pytest.raises(LimitError):
        regrouped(tmp_path, {"x": torch.empty(LIMITS.regrouped + 1, 0)}, "x = y.{e}")


def test_rules_cost_no_more_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a rule, the number of rules times the number of names, and the number of new tensors are
    bounded.
    """
    state = {f"x.{i}": numbered(1) for i in range(100)}
    parts = ", ".join(f"y{i}.{{n}}:1" for i in range(999))
    with pytest.raises(UsageError, match=r"the rule is too long \(expected at most 10,000 characters\)"):
        regrouped(tmp_path, state, f"x.{{n}} = {parts}")
    set_limits(monkeypatch, dataclasses.replace(LIMITS, rule_length=100_000, regrouped=9_990))
    with pytest.raises(LimitError, match="too many tensors"):
        regrouped(tmp_path, state, f"x.{{n}} = {parts}")
    set_limits(monkeypatch, dataclasses.replace(LIMITS, rule_steps=299))
    with pytest.raises(LimitError, match="too many rules for so many names"):
        regrouped(tmp_path, state, "x.{n} = y.{n}", "y.{n} = z.{n}", "z.{n} = x.{n}")


def test_long_names_are_counted_as_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The characters of names are counted as work. The modules above a tensor, and the tensors that a rule makes of it,
    can have far more characters than its name.
    """
    monkeypatch.setattr("ckptconv.work.LIMITS", dataclasses.replace(LIMITS, work=20_000))
    save_file({"a." * 2_000 + "q.weight": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(LimitError, match="too much work"):
        ckptconv.convert(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            regroup="**.q.weight = **.a.weight:1, **.b.weight:1",
        )
    pattern = parse_rule("**.w = **.w.{e}").made[0].pattern
    assert pattern
    with bounded(), pytest.raises(LimitError, match="too much work"):
        _ = [pattern.fill({"e": row}, ("a" * 10_000 + ".",)) for row in range(100)]


def test_repeated_renames_are_counted_as_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of a name and a rule is counted as work, because the new names are kept until the optimizers have
    followed.
    """
    monkeypatch.setattr("ckptconv.work.LIMITS", dataclasses.replace(LIMITS, work=10_000, work_each=0))
    state = {f"a0.{i}": torch.ones(1) for i in range(50)}
    save_file(state, tmp_path / "a.safetensors")
    for n in (1, 50):
        rules = tuple(f"a{i}.{{n}} = a{i + 1}.{{n}}" for i in range(n))
        with nullcontext() if n == 1 else pytest.raises(LimitError, match="too much work"):
            ckptconv.convert(tmp_path / "a.safetensors", tmp_path / f"{n}.safetensors", regroup=rules)


def test_companion_whose_name_contains_a_line_break(tmp_path: Path) -> None:
    """A companion of a weight is recognized even if its name contains a line break. A pattern that ends at the line
    break would be tried at each word of a long name.
    """
    with pytest.raises(RefusedError, match=r"belongs to q\.weight, which is regrouped"):
        regrouped(tmp_path, {"q.weight": numbered(2), "q.scale\n": numbered(2)}, "q.weight = a.weight:1, b.weight:1")


def test_a_cell_of_many_tensors_is_read_once() -> None:
    """All tensors that an earlier rule made of one tensor are in one cell. A later rule that regroups each of them
    reads the cell once.
    """

    class Key(str):
        seen = 0

        def __hash__(self) -> int:
            Key.seen += 1
            return super().__hash__()

    class Sized(Maker[torch.Tensor]):
        def tensor(self, value: torch.Tensor) -> torch.Tensor:
            return value

        def made(self, group: Group, values: Sequence[torch.Tensor], like: torch.Tensor) -> Sequence[torch.Tensor]:
            return [torch.ones(1) for _ in group.new]

    items: Items[torch.Tensor] = Items([(Key(f"x.{i}"), torch.ones(2)) for i in range(300)], "")
    items.cells = [[item for cell in items.cells for item in cell]]
    items._cell_of = dict.fromkeys(items.values, 0)
    apply_rules([parse_rule("x.{e} @0 = a.{e}:1, b.{e}:1")], [items], Sized())
    assert [*items.values] == [key for key, _ in items.cells[0]] == [f"{w}.{i}" for i in range(300) for w in "ab"]
    assert Key.seen < 100 * 300


def test_files_without_valid_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of rules are reported if they are missing, too large, not text, or invalid in a line. Invalid sizes are
    reported too.
    """
    state = {"w": numbered(4)}
    rules, sizes = tmp_path / "my.rules", tmp_path / "my.json"
    with pytest.raises(CkptconvError, match="No such file"):
        regrouped(tmp_path, state, rules=str(rules))
    with pytest.raises(UsageError, match="there are no rules called xxx"):
        regrouped(tmp_path, state, rules="x" * 5_000)
    rules.write_text("w = a:1, b:1\n\nw = a =\n")
    with pytest.raises(UsageError, match=r"my\.rules, line 3: w = a =: a rule has one ="):
        regrouped(tmp_path, state, rules=str(rules))
    rules.write_bytes(b"\xef\xbb\xbfw = v\r\n")
    assert [*regrouped(tmp_path, state, rules=str(rules))] == ["v"]
    rules.write_bytes(b"\xff")
    with pytest.raises(CkptconvError, match="not text in UTF-8"):
        regrouped(tmp_path, state, rules=str(rules))
    for text in ("[" * 100_000, "{", "\xe9"):
        sizes.write_bytes(text.encode("latin-1"))
        with pytest.raises(CkptconvError, match=r"not JSON|not text"):
            regrouped(tmp_path, state, "w = a:$n, b:1", sizes=str(sizes))
    for size in ("n=0", "n=-1", "n=x", "n=", {"n": True}, {"n": 1.5}, f"n={1 << 70}", "n=" + "9" * 5_000):
        with pytest.raises(UsageError, match="whole number above 0"):
            regrouped(tmp_path, state, "w = a:$n, b:1", sizes=size)
    for value in (0, -1, True, 2.0, "2", [2], None):
        (tmp_path / "config.json").write_text(json.dumps({"n": value}))
        with pytest.raises(UsageError, match=r"the value of \$n is not known"):
            regrouped(tmp_path, state, "w = a:$n, b:1")
    (tmp_path / "config.json").write_text(json.dumps({"k" * 1_000: {f"n{i}": 1 for i in range(9)}, "n": 1}))
    assert _flat(json.loads((tmp_path / "config.json").read_text())) == {"n": 1}  # names of 1000 characters are ignored
    rules.write_text("w = a:1, b:1\n")
    assert regrouped(tmp_path, state, rules=str(rules)).keys() == {"a", "b"}
    set_limits(monkeypatch, dataclasses.replace(LIMITS, rules_bytes=len(rules.read_bytes()) - 1))
    with pytest.raises(CkptconvError, match="too large"):
        regrouped(tmp_path, state, rules=str(rules))


def test_two_names_that_become_one(tmp_path: Path) -> None:
    """If two names would become one, the error contains both names."""
    state = {"x.0.a": numbered(4), "x.1.a": numbered(4)}
    with pytest.raises(CollisionError, match=r"x\.0\.a and x\.1\.a would become y\.1"):
        regrouped(tmp_path, state, "x.{n}.a = y.{n}:1, y.{n+1}:1")
