"""All advice that the package prints is executed as printed, and its promised effect is checked.

Each case provokes a piece of advice, executes the printed text and checks the result. During a run,
:mod:`tests.support.advice` records which places in the package printed the advice of a case. A place without a case
must be in the table ``OTHERS``, with the test of another module that executes it, or with a reason. ``pytest -s -k
is_typed`` prints all places.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.tensor  # registers the classes that loading DTensors needs
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.optim.swa_utils import AveragedModel

import ckptconv
from ckptconv import hints
from ckptconv.byteranges.undo_journal import HOT
from ckptconv.cli.main import main
from ckptconv.formats.foreign import paths
from ckptconv.output import in_place as writing
from tests.support import written, zoo
from tests.support.advice import Place, come_by, places
from tests.support.archives import rezip
from tests.support.megatron_folders import write_megatron
from tests.support.paths import ROOT
from tests.support.rank_runs import save_as_ranks
from tests.support.writers import distributed as dcp_folder
from tests.support.zero_folders import TAG, quantized, write_zero

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("here")]


class Unknown:
    """A class that torch's safe loader does not know."""


class Odd:
    """An object that is in no table."""


class Parts(nn.Module):
    """A model with a part that can be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(2, 3)), nn.Linear(3, 2)


class Holder(nn.Module):
    """A model whose part contains a module named "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def trained() -> dict[str, Any]:
    """Return a training checkpoint without its model."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return {"optimizer": optimizer.state_dict(), "epoch": 3, "args": argparse.Namespace(lr=1)}


def grouped(state: dict[Any, Any], params: list[Any] | None = None) -> dict[str, Any]:
    """Return an optimizer state dict with `state` and one parameter group."""
    return {"state": state, "param_groups": [{"params": params or [*state]}]}


def lightning(model: nn.Module, **others: Any) -> dict[str, Any]:
    """Return the checkpoint that Lightning saves for a module that contains `model`."""
    module = nn.ModuleDict({"model": model, **others})
    return {"pytorch-lightning_version": "2.6", "epoch": 1, "state_dict": module.state_dict(), "optimizer_states": []}


def distributed(shard: bool = False) -> dict[str, Any]:
    """Save the state dict of `net` as DTensors of the first of two processes to parts.tmp. Return an empty dict.

    The DTensors are replicated, or sharded if `shard` is true.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        place = torch.distributed.tensor.Shard(0) if shard else Replicate()
        state = {
            name: DTensor.from_local(value, mesh, [place], run_check=False) if value.dim() else value
            for name, value in net().state_dict().items()
        }
        torch.save({"model": state}, "parts.tmp")
    finally:
        torch.distributed.destroy_process_group()
    return {}


# Checks of promised results


def loads(made: Path) -> Any:
    return torch.load(made, weights_only=True)


def fits(model: Callable[[], nn.Module] = net, *keys: str) -> Callable[[Path], None]:
    """Return a check that a new model loads the output, or the item under `keys` in it, with ``strict=True``."""

    def judge(made: Path) -> None:
        found = load_file(made) if made.suffix == ".safetensors" else loads(made)
        for key in keys:
            found = found[key]
        model().load_state_dict(found, strict=True)

    return judge


def resumes(made: Path) -> None:
    """Fail unless model, optimizer and epoch can be restored from `made`."""
    found, model = loads(made), net()
    model.load_state_dict(found["model"], strict=True)
    torch.optim.AdamW(model.parameters()).load_state_dict(found["optimizer"])
    assert found["epoch"] == 3 and found.get("args", {"lr": 1}) == {"lr": 1}


def has(*names: str) -> Callable[[Path], None]:
    """Return a check that the state dict contains exactly these names."""
    return lambda made: _equal(list(load_file(made) if made.suffix == ".safetensors" else loads(made)), list(names))


def _equal(a: object, b: object) -> None:
    assert a == b


def same(obj: Callable[[], Any]) -> Callable[[Path], None]:
    def judge(made: Path) -> None:
        expected, got = obj(), loads(made)
        assert list(got) == list(expected)
        assert all(torch.equal(got[name], expected[name]) for name in expected)

    return judge


def same_as(name: str) -> Callable[[Path], None]:
    return lambda made: _equal(made.read_bytes(), Path(name).read_bytes())


def is_there(name: str) -> Callable[[Path], None]:
    return lambda _: _equal(Path(name).exists(), True)


def nothing(made: Path) -> None:
    """Do nothing: the advice promises only that it runs."""


# Cases


@dataclass(frozen=True)
class Case:
    """A piece of advice, how it is provoked and executed, and how its result is checked.

    `make` writes the files for a given stem. `words` is the command that provokes the advice. `says` is a regular
    expression, and its group is the text to execute. `promise` describes the effect. `judge` checks the resulting file,
    if there is one. `instead` replaces placeholders. `made` is the command to which the advice is added, if it is not
    `words`.
    """

    make: Callable[[str], Any]
    words: str
    says: str
    promise: str
    judge: Callable[[Path], Any]
    instead: dict[str, str] = field(default_factory=dict)
    made: str | None = None


def saved(obj: Callable[[], Any], tags: tuple[str, ...] = ("cpu",), suffix: str = ".pt", **options: Any) -> Any:
    return lambda m: zoo.save(obj(), m + suffix, tags, **options)


def weights() -> dict[str, torch.Tensor]:
    return {"a.w": torch.arange(3.0), "b.w": torch.ones(2, dtype=torch.float64)}


def two() -> dict[str, Any]:
    return {"x": {"w": torch.ones(1)}, "y": {"w": torch.ones(2)}}


def saved_bytes(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def averaged() -> dict[str, Any]:
    return {"model": {"w": torch.ones(1)}, "ema": {"decay": 0.9, "shadow": {"w": torch.ones(1) * 2}}}


def exists(m: str) -> None:
    torch.save(weights(), m + ".pt")
    torch.save({}, "out.pt")


def scaled(*others: str) -> dict[str, torch.Tensor]:
    """Return a quantized weight with its scale, and weights named `others` without scales."""
    codes = {name: torch.ones(3, 3).to(torch.float8_e4m3fn) for name in ("a.weight", *others)}
    return codes | {"a.weight_scale_inv": torch.ones(1, 1)}


def quantized_folder() -> None:
    Path("src").mkdir()
    save_file(scaled(), "src/model.safetensors.tmp")
    Path("src/model.safetensors.tmp").rename("src/model-00001-of-00001.safetensors")
    Path("src/config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')


LINE = r"(ckptconv \w+ .*)"
FINDING = r"(?:{}.*\n)\s+(ckptconv convert .*)"

CASES: dict[str, Case] = {
    # splitting and joining tensors
    "an optimizer whose state cannot be split": Case(
        saved(lambda: {"model": {"w": torch.ones(2)}, "optimizer": grouped({"w": {"rows": torch.ones(1)}})}),
        "convert {m}.pt out.pt --regroup w=a:1,b:1", r"(--drop \S+)", "without it",
        lambda path: loads(path)["model"]["a"],
    ),
    "numbers of a model that is regrouped": Case(
        saved(lambda: {"model": {"w": torch.ones(2)}, "optimizer": grouped({0: {"exp_avg": torch.ones(2)}})}),
        "convert {m}.pt out.pt --regroup w=a:1,b:1", r"(--optimizer names) needs", "by names",
        lambda path: _equal(loads(path)["optimizer"]["param_groups"][0]["params"], ["a", "b"]),
    ),
    "an optimizer by numbers in DCP": Case(
        saved(lambda: {"model": {"w": torch.ones(2)}, "optimizer": grouped({0: {"exp_avg": torch.ones(2)}})}),
        "convert {m}.pt out --format dcp -n", r"needs names: (--optimizer names)", "by names",
        lambda _: _equal(ckptconv.inspect("out").optimizers[0].keyed_by, "names"),
        made="convert {m}.pt out --format dcp",
    ),
    "numbers of an optimizer that are text": Case(
        saved(lambda: {"w": torch.ones(2), "optimizer": grouped({"0": {"exp_avg": torch.ones(2)}}, [0])}),
        "inspect {m}.pt", r"\((--optimizer numbers) mends", "numbers", made="convert {m}.pt out.pt",
        judge=lambda path: _equal([*loads(path)["optimizer"]["state"]], [0]),
    ),
    "the order of a model that is regrouped": Case(
        lambda m: (
            saved(lambda: {"model": {"w": torch.ones(2)}, "optimizer": grouped({0: {"exp_avg": torch.ones(2)}})})(m),
            saved(lambda: {"model": {"b": torch.ones(1), "a": torch.ones(1)}, "opt": grouped({"b": {}, "a": {}})})("c"),
        ),
        "convert {m}.pt out.pt --regroup w=a:1,b:1", r"(--like \S+) uses", "as there",
        lambda path: _equal(loads(path)["optimizer"]["param_groups"][0]["param_names"], ["b", "a"]), {"FILE": "c.pt"},
    ),
    "an order for which somebody vouches": Case(
        saved(lambda: {"model": {"w": torch.ones(2)}, "optimizer": grouped({0: {"exp_avg": torch.ones(2)}})}),
        "convert {m}.pt out.pt --regroup w=a:1,b:1", r"(--optimizer-order model) if", "in the order of the output",
        lambda path: _equal(loads(path)["optimizer"]["param_groups"][0]["param_names"], ["a", "b"]),
    ),
    "a number in a rule": Case(
        saved(lambda: {"w": torch.ones(6, 2)}), "convert {m}.pt out.pt --regroup w=a:$heads,b:1", r"(--size \S+)",
        "with the number", lambda path: loads(path)["a"], {"heads=N": "heads=2"},
    ),
    "experts one by one": Case(
        saved(lambda: {f"m.mlp.experts.{e}.down_proj.weight": torch.ones(2, 3) for e in range(4)}),
        "inspect {m}.pt", "stacks them: " + LINE, "stacked",
        lambda path: _equal(loads(path)["m.mlp.experts.down_proj"].shape, (4, 2, 3)),
    ),
    "files that differ by grouping": Case(
        lambda m: (
            saved(lambda: {"m.mlp.experts.down_proj": torch.ones(4, 2, 3)})(m),
            torch.save({f"m.mlp.experts.{e}.down_proj.weight": torch.ones(2, 3) for e in range(4)}, "b.pt"),
        ),
        "diff {m}.pt b.pt", LINE, "as in B", lambda path: _equal(loads(path).keys(), loads(Path("b.pt")).keys()),
    ),
    "a float8 weight without a scale": Case(
        saved(lambda: scaled("b.weight")), "convert {m}.pt out.pt --dtype bf16", r"leave them out: (--exclude \S+)",
        "cast", lambda made: _equal(loads(made)["a.weight"].dtype, torch.bfloat16),
    ),
    "a scale that does not fit": Case(
        saved(lambda: scaled("b.weight") | {"b.weight_scale_inv": torch.ones(2, 2)}),
        "convert {m}.pt out.pt --dtype bf16", r"(--dtype \S+) for other", "cast",
        lambda made: _equal(loads(made)["a.weight"].dtype, torch.bfloat16), {"GLOB=D": "a.*=bf16"},
        made="convert {m}.pt out.pt",
    ),
    "a scale that is deflated": Case(
        lambda m: (
            torch.save(scaled(), m + ".tmp"),
            rezip(Path(m + ".tmp"), Path(m + ".pt"), method=zipfile.ZIP_DEFLATED),
        ),
        "convert {m}.pt out.pt --dtype bf16", r"convert it first:\s+(.*)", "loads", loads, {"OUT": "first.pt"},
    ),
    "a configuration of a quantized model": Case(
        lambda _: quantized_folder(), "convert src out --dtype bf16", r"for a folder, (--copy-others) writes", "plain",
        lambda _: _equal(json.loads(Path("out/config.json").read_text()), {}), made="convert src out --dtype bf16 -f",
    ),
    "a join of deflated tensors": Case(
        lambda m: (
            saved(lambda: {"x.0": torch.ones(99), "x.1": torch.ones(99)})("in"),
            rezip(Path("in.pt"), Path(m + ".pt"), method=zipfile.ZIP_DEFLATED),
        ),
        "convert {m}.pt out.pt --regroup x.{{e}}=x", LINE, "stored as they are", loads,
    ),
    # findings of inspect
    "a GPU that is not here": Case(
        saved(lambda: net().state_dict(), ("cuda:1",)), "inspect {m}.pt", FINDING.format("are on cuda:1"),
        "loads, strict", fits(),
    ),
    "a CPU with an index": Case(
        saved(lambda: net().state_dict(), ("cpu:1",)), "inspect {m}.pt", FINDING.format("cpu without an index"),
        "loads, strict", fits(),
    ),
    "a device that only its own program shows": Case(
        saved(lambda: net().state_dict(), ("xla:0",)), "inspect {m}.pt", FINDING.format("with that device"),
        "loads, strict", fits(),
    ),
    "one of two whole modules": Case(
        saved(lambda: {"x": net(), "y": nn.Linear(1, 1)}), "inspect {m}.pt", FINDING.format("is a pickled model"),
        "loads, strict", fits(),
    ),
    "DataParallel": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "inspect {m}.pt", FINDING.format("start with module."),
        "loads, strict, no prefix", fits(),
    ),
    "torch.compile": Case(
        saved(lambda: torch.compile(net()).state_dict()), "inspect {m}.pt", FINDING.format("start with _orig_mod."),
        "loads, strict, no prefix", fits(),
    ),
    "DataParallel of torch.compile": Case(
        saved(lambda: nn.DataParallel(torch.compile(net())).state_dict()), "inspect {m}.pt",
        FINDING.format("start with module._orig_mod."), "loads, strict, no prefix", fits(),
    ),
    "FSDP's names inside": Case(
        saved(lambda: {f"0._fsdp_wrapped_module.{n}": t for n, t in net().state_dict().items()}), "inspect {m}.pt",
        FINDING.format("_fsdp_wrapped_module. is in"), "loads, strict, no prefix", fits(lambda: nn.Sequential(net())),
    ),
    "DataParallel around a part": Case(
        saved(lambda: _features().state_dict()), "inspect {m}.pt", FINDING.format("contain an inner module."),
        "loads, strict, no prefix", fits(Parts),
    ),
    **{
        f"DataParallel around a part, {option}": Case(
            saved(lambda: _features().state_dict()), f"convert {{m}}.pt out.pt {option}",
            r"to remove it: (--rename .*)", "loads, strict, no prefix", fits(Parts), made="convert {m}.pt plain.pt",
        )
        for option in ("--unwrap", "--strip-prefix module.", "--strip-prefix features.module", "--rename ^module. x")
    },
    "a group of a pattern, as sed's users write it": Case(
        saved(weights), "convert {m}.pt out.pt --rename ([ab])\\.w w.$1", r"did you mean: (--rename .*)", "the names",
        has("w.a", "w.b"), made="convert {m}.pt out.pt",
    ),
    "a dtype by its bits": Case(
        saved(weights), "convert {m}.pt out.pt --dtype *.w=16", r"did you mean: (--dtype .*)", "loads",
        lambda made: _equal({each.dtype for each in loads(made).values()}, {torch.float16}),
        made="convert {m}.pt out.pt",
    ),
    "a size in a unit that is not known": Case(
        saved(weights), "convert {m}.pt out --max-shard-size 5GiBB", r"did you mean: (--max-shard-size .*)", "loads",
        same(weights), made="convert {m}.pt out",
    ),
    "a module called module in DataParallel": Case(
        saved(lambda: nn.DataParallel(nn.DataParallel(net())).state_dict()), "inspect {m}.pt",
        r"model; (--strip-prefix module\.module\.)", "loads, strict, no prefix", fits(), made="convert {m}.pt out.pt",
    ),
    "AveragedModel, into the model": Case(
        saved(lambda: AveragedModel(net()).state_dict()), "inspect {m}.pt", FINDING.format("AveragedModel"),
        "loads, strict, no prefix", fits(),
    ),
    "AveragedModel, going on": Case(
        saved(lambda: {"model": net().state_dict(), "ema": AveragedModel(net()).state_dict()}, ("cuda:0",)),
        "inspect {m}.pt", r"AveragedModel\(model\): (averaged\..*)", "the average resumes, strict", nothing,
    ),
    "a training file with an average": Case(
        saved(lambda: {"model": net().state_dict(), "ema": AveragedModel(net()).state_dict(), "epoch": 1}),
        "inspect {m}.pt", FINDING.format("AveragedModel"), "loads, strict, no prefix", fits(net, "ema"),
    ),
    "AveragedModel of a compiled model": Case(
        saved(lambda: AveragedModel(torch.compile(net())).state_dict()), "inspect {m}.pt",
        FINDING.format("AveragedModel"), "loads, strict, no prefix", fits(),
    ),
    "AveragedModel in safetensors": Case(
        lambda m: save_file(AveragedModel(net()).state_dict(), m + ".safetensors"), "inspect {m}.safetensors",
        FINDING.format("AveragedModel"), "loads, strict, no prefix", fits(),
    ),
    "AveragedModel in safetensors, going on": Case(
        lambda m: save_file(AveragedModel(net()).state_dict(), m + ".safetensors"), "inspect {m}.safetensors",
        r"AveragedModel\(model\): (averaged\..*)", "the average resumes, strict", nothing,
    ),
    "AveragedModel, pickled whole": Case(
        saved(lambda: AveragedModel(net())), "inspect {m}.pt", r"this fixes everything.*\n\s+(ckptconv .*)",
        "loads, strict, no prefix", fits(),
    ),
    "FSDP around everything": Case(
        saved(lambda: {f"_fsdp_wrapped_module.{n}": t for n, t in net().state_dict().items()}), "inspect {m}.pt",
        FINDING.format("start with _fsdp_wrapped_module."), "loads, strict, no prefix", fits(),
    ),
    "Lightning": Case(
        saved(lambda: lightning(net()), suffix=".ckpt"), "inspect {m}.ckpt", FINDING.format("Lightning"),
        "loads, strict, no prefix", fits(),
    ),
    "Lightning, with a metric beside the model": Case(
        saved(lambda: lightning(net(), metric=nn.BatchNorm1d(1)), suffix=".ckpt"), "inspect {m}.ckpt",
        FINDING.format("Lightning"), "loads, strict, no prefix", fits(),
    ),
    "Lightning, of a compiled model": Case(
        saved(lambda: lightning(torch.compile(net())), suffix=".ckpt"), "inspect {m}.ckpt",
        FINDING.format("Lightning"), "loads, strict, no prefix", fits(),
    ),
    "a training file with its arguments": Case(
        saved(lambda: {"model": net().state_dict(), **trained()}), "inspect {m}.pt", FINDING.format("without args"),
        "loads; model, optimizer and epoch resume", resumes,
    ),
    "a training file on a GPU, all at once": Case(
        saved(lambda: {"model": nn.DataParallel(net()).state_dict(), **trained()}, ("cuda:0",)), "inspect {m}.pt",
        r"this fixes everything:\n\s+(ckptconv .*)", "loads; model, optimizer and epoch resume", resumes,
    ),
    "weights beside code": Case(
        saved(lambda: {"model": net().state_dict(), "log": [Unknown()]}), "inspect {m}.pt",
        FINDING.format("only the state dict loads .*without log"), "loads, strict", fits(),
    ),
    "one of several models beside code": Case(
        saved(lambda: {"x": net().state_dict(), "y": [Unknown(), torch.ones(1)]}), "inspect {m}.pt",
        FINDING.format("only .* loads"), "loads, strict", fits(),
    ),
    "an unusual part": Case(
        saved(lambda: {"a": [torch.ones(9)], "y": [Unknown(), torch.ones(1)]}), "inspect {m}.pt",
        FINDING.format("only a loads"), "loads", loads,
    ),
    "a whole module": Case(
        saved(net), "inspect {m}.pt", FINDING.format("is a pickled model"), "loads, strict", fits(),
    ),
    "a verdict on a whole module": Case(
        saved(net), "verify {m}.pt", r"to see what loads: (ckptconv inspect .*)", "shows it", nothing,
    ),
    "DTensors need an import": Case(
        lambda m: (distributed(), os.rename("parts.tmp", m + ".pt")), "inspect {m}.pt",
        r"only after `(import torch\.distributed\.tensor)`", "torch.load takes it behind that line", nothing,
    ),
    "DTensors that are whole": Case(
        lambda m: (distributed(), os.rename("parts.tmp", m + ".pt")), "inspect {m}.pt", r"is the whole: (python .*)",
        "loads, strict", fits(),
    ),
    "DTensors of which the rest is elsewhere": Case(
        lambda m: (distributed(shard=True), os.rename("parts.tmp", m + ".pt")), "inspect {m}.pt",
        r"type on every rank `(from .*?)`, and on rank 0 `torch\.save", "loads, strict", nothing,
    ),
    "what is only data": Case(
        saved(lambda: {"w": torch.ones(1), "args": argparse.Namespace(lr=1)}), "inspect {m}.pt",
        FINDING.format("it is only data"), "loads", loads,
    ),
    "plain, for pickle": Case(
        saved(lambda: {"w": torch.ones(1), "args": argparse.Namespace(lr=1)}),
        "convert {m}.pt out.pkl --format pickle --loadable", r"(--format pt) writes", "loads", loads,
        made="convert {m}.pt out.pkl --loadable",
    ),
    "objects in no table": Case(
        saved(lambda: {"w": torch.ones(1), "o": Odd()}), "convert {m}.pt out.pt --loadable",
        r"(--loadable-objects) converts", "loads", loads,
        made="convert {m}.pt out.pt",
    ),
    "an optimizer that cannot follow its weights": Case(
        saved(lambda: {"model": dict(net().named_parameters()), "optimizer": trained()["optimizer"]}),
        "convert {m}.pt out.pt --exclude *.weight", r"to leave out the optimizer: (--drop \w+)", "loads",
        lambda made: _equal(list(loads(made)["model"]), ["0.bias", "1.bias", "2.bias"]),
    ),
    "an optimizer whose order is not known": Case(
        saved(lambda: {"model": net().state_dict(), "optimizer": trained()["optimizer"]}),
        "convert {m}.pt out.pt --optimizer names", r"(--optimizer-order model) if", "torch takes the names",
        lambda made: set_optimizer_state_dict(
            model := net(), torch.optim.AdamW(model.parameters()), loads(made)["optimizer"]
        ),
    ),
    "an optimizer in a file of its own": Case(
        lambda m: (torch.save(trained()["optimizer"], m + ".pt"), torch.save(net().state_dict(), "weights.pt")),
        "convert {m}.pt out.pt --optimizer names --optimizer-order model",
        r"with the weights: (--model FILE)", "torch takes the names",
        lambda made: set_optimizer_state_dict(model := net(), torch.optim.AdamW(model.parameters()), loads(made)),
        {"FILE": "weights.pt"},
    ),
    "files of ranks that differ": Case(
        lambda m: _ranks(m, epoch=2), "convert {m} out.pt", r"to leave them out: (--drop \S+)", "loads",
        same(weights),
    ),
    "files of ranks, one left out": Case(
        lambda m: _ranks(m), "convert {m}/model_world_size_3_rank_0.pt {m}/model_world_size_3_rank_1.pt out.pt",
        r"\s+(ckptconv convert .*)", "loads", same(weights),
        {"OUT": "out.pt"},
    ),
    "a file of one rank": Case(
        lambda m: _ranks(m), "inspect {m}/model_world_size_3_rank_1.pt",
        r"note .*?(ckptconv convert .* OUT) merges all of them", "loads", same(weights), {"OUT": "out.pt"},
    ),
    "files of ranks, of two models": Case(
        lambda m: (_ranks(m), _ranks(m, "ema")), "convert {m} out.pt", r"one of them:\s+(ckptconv convert .*)", "loads",
        same(weights), {"OUT": "out.pt"},
    ),
    "files of ranks, of an optimizer too": Case(
        lambda m: (_ranks(m), _ranks(m, "optim")), "convert {m} out.pt", r"checkpoint:\s+(ckptconv inspect .*)",
        "shows the optimizer's", nothing,
    ),
    "protocol 4": Case(
        saved(lambda: {"model": net().state_dict(), "s": {1}}, pickle_protocol=4), "inspect {m}.pt",
        FINDING.format("pickle protocol 4"), "loads, strict", fits(net, "model"),
    ),
    "a plain pickle": Case(
        lambda m: Path(m + ".pkl").write_bytes(pickle.dumps(net().state_dict())), "inspect {m}.pkl",
        FINDING.format("plain pickle"), "loads, strict", fits(),
    ),
    "what torch's old format cannot hold": Case(
        saved(lambda: {"a": torch.ones(2, dtype=torch.float8_e5m2)}, _use_new_zipfile_serialization=False),
        "inspect {m}.pt", FINDING.format("before 1.6"), "loads", loads,
    ),
    "large storages of small views": Case(
        saved(lambda: {"a": torch.zeros(1_000_000)[:10]}), "inspect {m}.pt", FINDING.format("not used by any tensor"),
        "loads, and is small", lambda made: _equal((list(loads(made)), made.stat().st_size < 5000), (["a"], True)),
    ),
    "tied weights": Case(
        saved(lambda: dict.fromkeys("ab", torch.ones(4))), "inspect {m}.pt", FINDING.format("share memory"),
        "safetensors loads it", has("a"),
    ),
    "an optimizer on one GPU": Case(
        saved(lambda: {"model": net().state_dict(), **trained(), "args": 1}, ("cuda:0",)), "inspect {m}.pt",
        FINDING.format("the state of optimizer"), "no tensor is on that GPU, the optimizer resumes",
        lambda made: torch.optim.AdamW(net().parameters()).load_state_dict(loads(made)["optimizer"]),
    ),
    "a generator's state on a GPU": Case(
        saved(lambda: {"rng_state": torch.get_rng_state(), "w": torch.ones(1)}, ("cuda:0",)), "inspect {m}.pt",
        r"cuda:0.*\n\s+(ckptconv .*)", "torch.set_rng_state takes it",
        lambda made: torch.set_rng_state(loads(made)["rng_state"]),
    ),
    # messages of conversions
    "no output": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt", r"(ckptconv convert \S.* OUT --to cpu)", "loads", same(weights),
        {"OUT": "out.pt"},
    ),
    "the output exists": Case(
        exists, "convert {m}.pt out.pt", r"(--force) replaces it", "replaced, loads", same(weights),
        made="convert {m}.pt out.pt",
    ),
    "the output is the same file as the input": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt {m}.pt --to cpu", r"(--force) replaces it", "loads",
        same(weights),
    ),
    "no such folder": Case(
        saved(weights), "convert {m}.pt {m}/out.pt", r"(mkdir -p .*)", "the same command works now", nothing,
    ),
    "a near name": Case(
        saved(weights), "inspect {m}.ptt", r"is it (.*)\?", "that is the file", nothing,
    ),
    "another prefix": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "convert {m}.pt out.pt --strip-prefix modul",
        r"(--strip-prefix module\.) may be meant", "loads, strict, no prefix", fits(), made="convert {m}.pt out.pt",
    ),
    "less than a segment": Case(
        saved(lambda: {"model_a": torch.ones(1)}), "convert {m}.pt out.pt --strip-prefix model_",
        r"to remove less: (--rename .*)", "the names have it no more", has("a"), made="convert {m}.pt out.pt",
    ),
    "no prefix at all": Case(
        saved(weights), "convert {m}.pt out.pt --strip-prefix .", r"for anything else: (--rename .*)",
        "the names are others", has("x.w", "b.w"),
        {"REGEX": "^a", "REPLACEMENT": "x"}, made="convert {m}.pt out.pt",
    ),
    "a prefix for several state dicts": Case(
        saved(two), "convert {m}.pt out.pt --add-prefix p", r"all of them: (--rename .*)", "all names have it",
        lambda made: _equal({k: [*v] for k, v in loads(made).items()}, {"x": ["p.w"], "y": ["p.w"]}),
        made="convert {m}.pt out.pt",
    ),
    "names are in a pickled module": Case(
        saved(lambda: nn.DataParallel(net())), "convert {m}.pt out.pt --strip-prefix module",
        r"(--state-dict) extracts its", "loads, strict, no prefix", fits(),
    ),
    "a checkpoint in a byte string": Case(
        saved(lambda: {"inside": saved_bytes({"w": torch.ones(1)}), "n": 1}), "inspect {m}.pt",
        FINDING.format("inside contains a checkpoint"), "loads", same(lambda: {"w": torch.ones(1)}),
    ),
    "an average beside the weights": Case(
        saved(averaged), "inspect {m}.pt", FINDING.format("ema/shadow is an average"), "loads",
        same(lambda: averaged()["ema"]["shadow"]),
    ),
    "weights without their average": Case(
        saved(averaged), "convert {m}.pt out.pt --state-dict", r"to extract only the average: (--select \S+)", "loads",
        same(lambda: averaged()["ema"]["shadow"]),
        made="convert {m}.pt new.pt",
    ),
    "a backend of one's own": Case(
        saved(lambda: {"w": torch.ones(1)}), "convert {m}.pt out.pt --to foo:0", r"of your own: (--map any=foo:0)",
        "has the tag", lambda made: _equal({each.device for each in ckptconv.inspect(made).tensors}, {"foo:0"}),
        made="convert {m}.pt out.pt",
    ),
    "which state dict": Case(
        saved(two), "convert {m}.pt out.pt --state-dict", r"for the first: (--select \w+)", "loads",
        same(lambda: two()["x"]),
    ),
    "a state dict where there is none": Case(
        saved(lambda: {"a": [torch.ones(9)], "b": torch.ones(2, 2)}), "convert {m}.pt out.pt --state-dict",
        r"(--select \S+) extracts", "loads", loads, made="convert {m}.pt out.pt",
    ),
    "a part of a state dict": Case(
        saved(weights), "convert {m}.pt out.pt --select nope", r"to see the contents:\s+(ckptconv .*)", "it is shown",
        nothing,
    ),
    "a part of names for a glob": Case(
        saved(weights), "convert {m}.pt out.pt --include a", r"try: (--include .*)", "the names", has("a.w"),
        made="convert {m}.pt out.pt",
    ),
    "an arrow in a rule": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --map cuda:0->cpu", r"did you mean: (--map .*)", "loads",
        same(weights), made="convert {m}.pt out.pt",
    ),
    "a format by its suffix": Case(
        saved(weights), "convert {m}.pt out.safetensors --format .safetensors", r"did you mean: (--format .*)",
        "the names", has("b.w", "a.w"), made="convert {m}.pt out.safetensors",
    ),
    "no path of that name": Case(
        saved(two), "convert {m}.pt out.pt --select nope", r"see the contents:\s+(ckptconv .*)", "it is shown", nothing,
    ),
    "nothing to drop": Case(
        saved(two), "convert {m}.pt out.pt --drop qqqqq", r"see the contents:\s+(ckptconv .*)", "it is shown", nothing,
    ),
    "a part of a tuple to drop": Case(
        saved(lambda: {"t": (torch.ones(1), 2), "w": torch.ones(1)}), "convert {m}.pt out.pt --drop t[0]",
        r"to leave out what contains it: (--drop t)", "loads without it", has("w"),
        made="convert {m}.pt out.pt",
    ),
    "a name inside a module": Case(
        saved(lambda: {"m": Parts()}), "convert {m}.pt out.pt --select head.weight",
        r"its path is: (--select \S+)", "loads", loads,
        made="convert {m}.pt out.pt",
    ),
    "a module inside a module": Case(
        saved(lambda: {"m": Parts()}), "convert {m}.pt out.pt --select head",
        r"its path is: (--select .* \(and --state-dict) for only its weights", "loads, strict",
        fits(lambda: nn.Linear(3, 2)), made="convert {m}.pt out.pt",
    ),
    "a device that is nearly one": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --map cuda0=cpu", r"(--map \S+) may be meant", "loads",
        same(weights), made="convert {m}.pt out.pt",
    ),
    "a device that has no tensors": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --to meta", r"try: (--to cpu)", "loads", same(weights),
        made="convert {m}.pt out.pt",
    ),
    "a rule without a device": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --map cpu", r"for all tensors: (--to cpu)", "loads",
        same(weights), made="convert {m}.pt out.pt",
    ),
    "a rule in --to": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --to cuda:0=cpu", r"hint.*|(--map cuda:0=cpu)", "loads",
        same(weights), made="convert {m}.pt out.pt",
    ),
    "a dtype by a path": Case(
        saved(two), "convert {m}.pt out.pt --dtype x.w=bf16", r"has a slash: (--dtype \S+)", "loads, cast",
        lambda made: _equal(loads(made)["x"]["w"].dtype, torch.bfloat16), made="convert {m}.pt out.pt",
    ),
    "what safetensors cannot hold": Case(
        saved(lambda: {"w": torch.ones(1), "s": torch.ones(2, 2).to_sparse()}), "convert {m}.pt out.safetensors",
        r"to leave them out: (--exclude \S+)", "safetensors loads it", has("w"),
    ),
    "a wrapper on the way to safetensors": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "convert {m}.pt out.safetensors",
        r"(--strip-prefix module\.) removes it", "safetensors loads it, strict, no prefix", fits(),
        made="convert {m}.pt out.safetensors -f",
    ),
    "ties in safetensors": Case(
        saved(lambda: dict.fromkeys("ab", torch.ones(4))), "convert {m}.pt out.safetensors",
        r"(--copy-tied) stores every name", "load_file has every name",
        lambda made: _equal(sorted(load_file(made)), ["a", "b"]),
        made="convert {m}.pt out.safetensors -f",
    ),
    "a call that no checkpoint needs": Case(
        lambda m: _dangerous(m), "convert {m}.pt out.pt --to cpu", r"(--allow-unsafe) copies", "carried over, not run",
        nothing,
    ),
    "a suffix of pickles": Case(
        saved(weights), "convert {m}.pt out.pkl", r"torch zip; (--format pickle) writes", "pickle loads it",
        lambda made: _equal(list(pickle.loads(made.read_bytes())), ["a.w", "b.w"]), made="convert {m}.pt out.pkl -f",
    ),
    "an odd suffix": Case(
        saved(weights), "convert {m}.pt out.safetensor", r"\((--format pt) writes", "loads", same(weights),
    ),
    "old format, new dtype": Case(
        saved(lambda: {"a": torch.ones(2, dtype=torch.float8_e5m2)}, _use_new_zipfile_serialization=False),
        "convert {m}.pt out.pt --format legacy", r"(--format pt) writes (?:it|them)", "loads", loads,
        made="convert {m}.pt out.pt",
    ),
    "old format, a nested tensor": Case(
        saved(lambda: [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])]),
        "convert {m}.pt out.pt --format legacy", r"(--format pt) writes it", "loads",
        lambda made: torch.load(made, weights_only=False),  # torch 2.15 refuses nested tensors otherwise
        made="convert {m}.pt out.pt",
    ),
    "a program to another device": Case(
        lambda m: torch.jit.script(net()).save(m + ".pt"), "convert {m}.pt out.pt --to cpu",
        r"(--state-dict) extracts its weights", "loads, strict", fits(),
        made="convert {m}.pt out.pt",
    ),
    "a program": Case(
        lambda m: torch.jit.script(net()).save(m + ".pt"), "convert {m}.pt out.pt --to cpu",
        r"other device: (torch\.jit\.load\(.*\))", "torch.jit.load loads it there", nothing,
    ),
    "a program's weights": Case(
        lambda m: torch.jit.script(net()).save(m + ".pt"), "inspect {m}.pt", FINDING.format("TorchScript"),
        "loads, strict", fits(),
    ),
    "no input": Case(
        saved(weights, ("cuda:0",)), "convert --in-place", r"(ckptconv convert .*--in-place)", "loads", same(weights),
        {r"SRC\.\.\.": "{m}.pt"},
    ),
    "--no-undo alone": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt --to cpu --no-undo", r"needs (--in-place)", "loads",
        same(weights),
    ),
    "an interrupted change": Case(
        lambda m: _interrupted(m), "inspect {m}.pt", r"bytes: (ckptconv undo .*)", "the old bytes", same_as("old.pt"),
    ),
    "an interrupted change, again in place": Case(
        lambda m: _interrupted(m), "convert {m}.pt --in-place --to cpu", r"(ckptconv undo .*)", "the old bytes",
        same_as("old.pt"),
    ),
    "an interrupted change, replaced": Case(
        lambda m: _interrupted(m), "convert old.pt {m}.pt -f --to cpu", r"(ckptconv undo .*)", "the old bytes",
        same_as("old.pt"),
    ),
    "a file of two names": Case(
        lambda m: (saved(weights, ("cuda:0",))(m), os.link(m + ".pt", "two.pt")), "convert {m}.pt --in-place --to cpu",
        r"(--force) changes it", "loads", same(weights),
    ),
    "in place, no room": Case(
        lambda m: save_file({"w": torch.ones(1)}, m + ".safetensors"),
        "convert {m}.safetensors --in-place --add-prefix " + "p" * 90, r"same edits:\s+(ckptconv convert .*--force)",
        "the names have it", lambda made: _equal(list(load_file(made)), ["p" * 90 + ".w"]),
    ),
    "a change in place": Case(
        saved(weights, ("cuda:0",)), "convert {m}.pt --to cpu --in-place", r"bytes: (ckptconv undo .*)", "restored",
        lambda made: _equal(list(ckptconv.open(made).tensors), list(weights())),
    ),
    "a change in place that is shown": Case(
        lambda m: (saved(weights, ("cuda:0",))(m), main(["convert", m + ".pt", "--to", "cpu", "--in-place"])),
        "inspect {m}.pt", r"(ckptconv undo .*) reverts", "the old bytes", nothing,
    ),
    **{
        f"in place with an output, {what}": Case(
            saved(weights, ("cuda:0",)), "convert {m}.pt out.pt --to cpu --in-place", says, "loads", same(weights),
        )
        for what, says in (("the file", r"did you mean:\s+(ckptconv .*)"), ("the output", r"or:\s+(ckptconv .*)"))
    },
    "in place, what moves tensors": Case(
        saved(weights), "convert {m}.pt --in-place --dtype bf16", r"write a new file:\s+(ckptconv .*)",
        "with the same edits, loads", loads,
        {"SRC": "{m}.pt", "DST": "out.pt"},
    ),
    # sets and folders
    "what one file leaves of a folder": Case(
        lambda m: _sharded(m), "convert {m} out.safetensors", r"(--copy-others) copies", "it is there",
        is_there("all/config.json"), made="convert {m} all",
    ),
    "what a set leaves of a folder": Case(
        lambda m: _sharded(m), "convert {m} all --add-prefix x", r"(--copy-others) copies", "it is there",
        is_there("all/config.json"), made="convert {m} all -f --add-prefix x",
    ),
    "what a batch leaves of a folder": Case(
        lambda m: (_folder(m), Path(m, "readme").touch()), "convert {m} all --to cpu", r"(--copy-others) copies",
        "it is there",
        is_there("all/readme"), made="convert {m} all -f --to cpu",
    ),
    "shards by themselves": Case(
        lambda m: _sharded(m), "convert {m}/model-00001-of-00002.safetensors {m}/model-00002-of-00002.safetensors some",
        r"convert the set:\s+(ckptconv convert .*)", "the index is there", is_there("all/model.safetensors.index.json"),
        {"OUT_FOLDER": "all"},
    ),
    "a folder of several, in Python": Case(
        lambda m: _folder(m), "python ckptconv.convert({m!r}, 'all')", r"all of them: (ckptconv\.convert_many\(.*\))",
        "all are there", is_there("all/b.pt"),
    ),
    "a folder of several, to diff": Case(
        lambda m: (_folder(m), torch.save({}, "b.pt")), "convert {m} o.pt", r"or convert all of them:\s+(ckptconv .*)",
        "all are there", is_there("all/b.pt"),
        {"OUT_FOLDER": "all"},
    ),
    "a batch again": Case(
        lambda m: (_folder(m), main(["convert", m, "all", "--to", "cpu"])), "convert {m} all --to cpu",
        r"(--skip-existing) keeps", "the rest is there", is_there("all/b.pt"),
    ),
    "a folder that exists": Case(
        lambda m: (_sharded(m), main(["convert", m, "all"])), "convert {m} all --add-prefix x",
        r"(--force) replaces the folder",
        "replaced", is_there("all/model.safetensors.index.json"),
    ),
    "a folder with more in it": Case(
        lambda m: (_sharded(m), main(["convert", m, "all", "--copy-others"])), "convert {m} all --force --add-prefix x",
        r"or (--copy-others) if", "replaced", is_there("all/config.json"),
    ),
    # comparisons
    "names that differ by a prefix": Case(
        lambda m: (saved(weights)(m), torch.save({"module." + n: t for n, t in weights().items()}, "b.pt")),
        "diff b.pt {m}.pt", LINE, "the same", nothing,
    ),
    "names that lack a prefix": Case(
        lambda m: (saved(weights)(m), torch.save({"x": 1, "net": {"n." + n: t for n, t in weights().items()}}, "b.pt")),
        "diff b.pt {m}.pt", LINE, "the same", nothing,
    ),
    "names that differ by wrappers": Case(
        lambda m: (saved(weights)(m), torch.save({"module._orig_mod." + n: t for n, t in weights().items()}, "b.pt")),
        "diff b.pt {m}.pt", LINE, "the same", nothing,
    ),
    "names that have a wrapper inside": Case(
        lambda m: (saved(lambda: {"a.a": torch.ones(1), "b.b": torch.ones(1)})(m),
                   torch.save({f"{n}._fsdp_wrapped_module.{n}": torch.ones(1) for n in "ab"}, "b.pt")),
        "diff b.pt {m}.pt", LINE, "the same", nothing,
    ),
    "names that fit the other way round": Case(
        lambda m: (saved(weights)(m), torch.save({"x": 1, "net": weights()}, "b.pt")), "diff {m}.pt b.pt", LINE,
        "the same", nothing,
    ),
    "names that get a prefix": Case(
        lambda m: (saved(weights)(m), torch.save({"x." + n: t for n, t in weights().items()}, "b.pt")),
        "diff {m}.pt b.pt", LINE, "the same", nothing,
    ),
    "a module against its state dict": Case(
        lambda m: (saved(net)(m), torch.manual_seed(0), torch.save({"a.0": net().state_dict()}, "b.pt"),
                   torch.manual_seed(0), torch.save(net().state_dict(), "c.pt")),
        "diff {m}.pt c.pt", LINE, "compared: all tensors alike but _metadata", nothing,
    ),
    "an edit of the second file": Case(
        lambda m: (saved(weights)(m), torch.save({"module." + n: t for n, t in weights().items()}, "b.pt")),
        "diff {m}.pt b.pt --strip-prefix module", LINE, "the same", nothing,
    ),
    "which of the second file": Case(
        lambda m: (saved(lambda: two()["x"])(m), torch.save(two(), "b.pt")), "diff b.pt {m}.pt --state-dict",
        r"(--select \w+)", "the same", nothing, made="diff b.pt {m}.pt",
    ),
    "which part of B": Case(
        lambda m: (saved(lambda: two())(m), save_file({"w": torch.ones(1)}, "a.safetensors")),
        "diff a.safetensors {m}.pt", r"say which with (--select PATH)", "the same", nothing, {"PATH": "x"},
        made="diff {m}.pt a.safetensors",
    ),
    "checksums that were not compared": Case(
        lambda m: (saved(weights)(m), shutil.copy(m + ".pt", "b.pt")), "diff {m}.pt b.pt", r"(--full) reads",
        "the same",
        nothing,
    ),
    # wrong commands
    "the guess strip": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "strip {m}.pt", r"did you mean:\s+(ckptconv .*)",
        "loads, strict, no prefix",
        fits(), {"OUT": "out.pt"},
    ),
    "the guess unwrap-ddp": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "unwrap-ddp {m}.pt", r"did you mean:\s+(ckptconv .*)",
        "loads, strict, no prefix",
        fits(), {"OUT": "out.pt"},
    ),
    "the guess half": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "half {m}.pt", r"did you mean:\s+(ckptconv .*)", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "the guess to-cpu": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "to-cpu {m}.pt", r"did you mean:\s+(ckptconv .*)", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "the guess to-pt": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "to-pt {m}.pt", r"did you mean:\s+(ckptconv .*)", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "the guess --device": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "convert {m}.pt out.pt --device cpu",
        r"did you mean:\s+(ckptconv .*)", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "the guess -i --cpu": Case(
        saved(lambda: nn.DataParallel(net()).state_dict()), "convert {m}.pt -i --strip",
        r"did you mean:\s+(ckptconv .*)", "loads, strict, no prefix",
        fits(), {"OUT": "out.pt"},
    ),
    "the guess shrink": Case(
        saved(weights), "shrink {m}.pt", r"did you mean:\s+(ckptconv .*)", "loads", same(weights), {"OUT": "out.pt"},
    ),
    "the guess split": Case(
        saved(weights), "split {m}.pt", r"did you mean:\s+(ckptconv .*)", "the shards are there", is_there("all"),
        {"OUT": "all"},
    ),
    "the guess man": Case(
        saved(weights), "man convert", r"did you mean:\s+(ckptconv convert -h)", "it is shown", nothing,
    ),
    "a pair in one word": Case(
        saved(weights), "convert {m}.pt out.pt --rename a=c", r"did you mean: (--rename .*)", "renamed",
        has("c.w", "b.w"), made="convert {m}.pt out.pt",
    ),
    "a dtype for a device": Case(
        saved(weights), "convert {m}.pt out.pt --to bf16", r"try: (--dtype \S+)", "loads", loads,
        made="convert {m}.pt out.pt",
    ),
    "a part for a glob": Case(
        saved(two), "convert {m}.pt out.pt --include x", r"part of that name: (--select x)", "loads",
        same(lambda: two()["x"]), made="convert {m}.pt out.pt",
    ),
    "shards to one file": Case(
        lambda m: _sharded(m),
        "convert {m}/model-00001-of-00002.safetensors {m}/model-00002-of-00002.safetensors out.pt",
        r"to merge a sharded set:\s+(ckptconv convert .*)", "loads", loads,
    ),
    "no such option": Case(
        saved(weights), "convert {m}.pt --frobnicate", r"options:\s+(ckptconv convert -h)", "they are listed", nothing,
    ),
    "a checksum to compare with": Case(
        lambda m: save_file(weights(), m + ".safetensors"), "verify {m}.safetensors -v", r"(--expect-sha256) compares",
        "compared", nothing,
        made="verify {m}.safetensors SHA256",
    ),
    "several changes in one folder": Case(
        lambda m: (_folder(m), [main(["convert", f"{m}/{n}.pt", "--in-place", "--add-prefix", "x"]) for n in "ab"]),
        "undo {m}", r"to revert one:\s+(ckptconv undo .*)", "one has its old bytes", nothing,
    ),
    "in place, a wrapper in some shards": Case(
        lambda m: (torch.save({"module.a": torch.ones(9), "b": torch.ones(9)}, "w.pt"),
                   ckptconv.convert("w.pt", m, max_shard_size=40, format="safetensors")),
        "convert {m} --in-place --unwrap", r"(--strip-prefix module\.) removes it", "the names have it no more",
        nothing, made="convert {m} --in-place",
    ),
    "in place, a folder of DCP": Case(
        lambda m: _dcp(m), "convert {m} --in-place --drop epoch", r"write a new file:\s+(ckptconv convert .*)",
        "with the same edits, loads", loads,
        {"SRC": "{m}", "DST": "out.pt"}, made="EDITS --drop epoch",
    ),
    "in place, names in a folder of DCP that are not its places": Case(
        lambda m: _dcp(m), "convert {m} --in-place --to cuda", r"same edits:\s+(ckptconv convert .*)", "loads",
        nothing, {"OUT": "out.pt"}, made="EDITS --to cuda",
    ),
    "a part as the output": Case(
        lambda m: _sharded(m), "convert {m} {m}/model-00001-of-00002.safetensors --to cpu",
        r"(ckptconv convert .*)", "loads", same(weights),
    ),
    "several models in one folder": Case(
        lambda m: (_sharded(m), torch.save(weights(), Path(m, "pytorch_model.bin"))), "convert {m} out.pt",
        r"use its path: (.*)", "that is the file", nothing,
    ),
    "a model in a folder": Case(
        lambda m: (Path(m).mkdir(), save_file(weights(), Path(m, "model.safetensors"))), "convert {m} o.pt",
        r"give that file: (.*)", "that is the file", nothing,
    ),
    "a checkpoint in a folder": Case(
        lambda m: (Path(m, "in").mkdir(parents=True), torch.save({}, Path(m, "in", "a b.pt"))), "convert {m} o.pt",
        r"use its path: (.*)", "that is the file", nothing,
    ),
    "a folder of DCP": Case(
        lambda m: _dcp(m), "inspect {m}", FINDING.format("over several files"), "loads", loads,
    ),
    "a folder of DCP that torch 2.15 wrote": Case(
        lambda m: shutil.copytree(written.FOLDER / "2.15.dcp", m), "inspect {m}", FINDING.format("since torch 2.15"),
        "any torch loads it", lambda made: _equal(FileSystemReader(made.parent).read_metadata().version, "1.0.0"),
    ),
    "a part of DCP": Case(
        lambda m: _dcp(m), "inspect {m}/__0_0.distcp", r"make it one file:\s+(.*)", "loads", loads,
    ),
    "a folder of Megatron-Core": Case(
        lambda m: write_megatron(Path(m)), "inspect {m}", r"names of transformers: (ckptconv convert .*)",
        "safetensors loads it", lambda made: _equal(len(load_file(made)), 21), {"OUT.safetensors": "out.safetensors"},
    ),
    "a file of one rank of ZeRO": Case(
        lambda m: write_zero(Path(m)), f"inspect {{m}}/{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        r"make it one file:\s+(.*)", "loads", loads,
    ),
    "files of ZeRO": Case(
        lambda m: write_zero(Path(m)), "inspect {m}", r"note +(ckptconv convert .*) writes the weights only", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "files of ZeRO, for an optimizer of torch": Case(
        lambda m: write_zero(Path(m)), "inspect {m}", r"note +(ckptconv convert .* --optimizer numbers)", "loads",
        loads, {"OUT": "out.pt"},
    ),
    "files of ZeRO with a quantized optimizer": Case(
        lambda m: write_zero(Path(m), change=quantized), "convert {m} out.pt", r"in one file:\s+(ckptconv convert .*)",
        "loads", loads, {"OUT": "out.pt"},
    ),
    "an index that contradicts its shards": Case(
        lambda m: (_sharded(m), _turned(Path(m, "model.safetensors.index.json"))), "inspect {m}",
        r"one by one:\s+(.*)", "loads", nothing,
        {"OUT": "out.pt"},
    ),
    "a shard that is none": Case(
        lambda m: _no_shard(m), "inspect {m}", r"convert it by itself:\s+(.*)", "loads", loads, {"OUT": "out.pt"},
    ),
    "a part of a set to a folder": Case(
        lambda m: (torch.save(weights(), "w.pt"), ckptconv.convert("w.pt", m, max_shard_size=20, format="pt")),
        "convert {m} all --select a.w", r"such as (out\.pt), is one file", "loads", loads,
        made="convert {m} ADVICE --select a.w",
    ),
    "a record that torch cannot read": Case(
        lambda m: (saved(weights)("in"), rezip(Path("in.pt"), Path(m + ".pt"), {".storage_alignment": b"x"})),
        "inspect {m}.pt", FINDING.format("is not a number"), "loads", same(weights),
    ),
    "a plain pickle of what makes its storages": Case(
        saved(lambda: {"w": torch.ones(1), "f": torch.storage._load_from_bytes}),
        "convert {m}.pt out.pkl --allow-unsafe --format pickle", r"(--format pt) writes it", "the container is there",
        nothing, made="convert {m}.pt out.pt --allow-unsafe",
    ),
    "two dtypes of one storage": Case(
        saved(weights), "python w = torch.ones(4); ckptconv.save([w, w.view(torch.int32)], 'out.pt')",
        r"(clone\(\)) one of them", "saved, loads", nothing,
        made="python w = torch.ones(4); ckptconv.save([w.ADVICE, w.view(torch.int32)], 'out.pt')",
    ),
    "code that only Python's unpickler takes": Case(
        saved(lambda: [Unknown(), *map(torch.ones, (1, 1, 1))]), "python ckptconv.load({m!r} + '.pt')",
        r"ckptconv\.open\(path\)(\.load)\(\.\.\.\) gives", "each tensor is given", nothing,
        made="python ckptconv.open({m!r} + '.pt')ADVICE('[1]')",
    ),
    "a program of which the names are mended": Case(
        lambda m: torch.jit.script(Holder()).save(m + ".pt"), "inspect {m}.pt",
        FINDING.format("contain an inner module."),
        "loads, no prefix", loads,
    ),
    # hidden rows
    "more tensors": Case(
        saved(weights), "inspect {m}.pt --limit 1", r"\((--all) shows", "all are shown", nothing, made="inspect {m}.pt",
    ),
    "more values": Case(
        saved(lambda: {"a": [{"b": i} for i in range(40)], **weights()}), "inspect {m}.pt", r"more \((--json)\)",
        "all are shown",
        nothing,
    ),
    "more left behind": Case(
        saved(lambda: {"state_dict": weights(), **{f"n{i}": i for i in range(9)}}), "convert {m}.pt {m}.safetensors",
        r"\((-v) lists all\)", "all are listed", nothing,
        made="convert {m}.pt {m}.safetensors --force ADVICE",
    ),
    # the library
    "load without the device": Case(
        saved(weights, ("cuda:0",)), "python ckptconv.load({m!r} + '.pt')", r"(map_location='cpu') loads it here",
        "loads", nothing,
        made="python ckptconv.load({m!r} + '.pt', ADVICE)",
    ),
    "load, on what there is": Case(
        saved(weights, ("cuda:0",)), "python ckptconv.load({m!r} + '.pt')", r"(map_location='auto') on what there is",
        "loads", nothing,
        made="python ckptconv.load({m!r} + '.pt', ADVICE)",
    ),
    "remap to no device": Case(
        saved(weights), "python ckptconv.remap([torch.ones(1)], 'cuda:7')", r"(map_location='cpu') works everywhere",
        "moves", nothing,
        made="python ckptconv.remap([torch.ones(1)], ADVICE)",
    ),
    "load with code": Case(
        saved(lambda: {"model": net().state_dict(), "args": argparse.Namespace()}),
        "python ckptconv.load({m!r} + '.pt')",
        r"(state_dict=True) loads a part", "loads, strict", nothing,
        made="python net().load_state_dict(ckptconv.load({m!r} + '.pt', ADVICE))",
    ),
    "load of a part with code": Case(
        saved(lambda: {"x": net().state_dict(), "y": [argparse.Namespace(), torch.ones(1)], "z": {"w": torch.ones(1)}}),
        "python ckptconv.load({m!r} + '.pt')", r"(select='x') loads a part", "loads, strict", nothing,
        made="python net().load_state_dict(ckptconv.load({m!r} + '.pt', ADVICE))",
    ),
    "code where only an import is missing": Case(
        lambda m: (distributed(), os.rename("parts.tmp", m + ".pt")), "convert {m}.pt out.pt --to cuda",
        r"only after `(import torch\.distributed\.tensor)`", "torch.load takes it behind that line", nothing,
    ),
    # other formats
    "gzip": Case(
        lambda m: (saved(weights)(m), subprocess.run(["gzip", m + ".pt"], check=True)), "inspect {m}.pt.gz",
        r"unpack it: (.*)", "loads", same(weights), {"OUT": "out.pt"},
    ),
    "bzip2": Case(
        lambda m: (saved(weights)(m), subprocess.run(["bzip2", m + ".pt"], check=True)), "inspect {m}.pt.bz2",
        r"unpack it: (.*)", "loads", same(weights), {"OUT": "out.pt"},
    ),
    "xz": Case(
        lambda m: (saved(weights)(m), subprocess.run(["xz", m + ".pt"], check=True)), "inspect {m}.pt.xz",
        r"unpack it: (.*)", "loads", same(weights), {"OUT": "out.pt"},
    ),
    "tar": Case(
        lambda m: (saved(weights)("in"), subprocess.run(["tar", "-cf", m + ".tar", "in.pt"], check=True),
        os.remove("in.pt")),
        "inspect {m}.tar", r"unpack it: (.*)", "loads", same(weights),
    ),
    "tar, gzip": Case(
        lambda m: (saved(weights)("in"), subprocess.run(["tar", "-czf", m + ".tgz", "in.pt"], check=True),
        os.remove("in.pt")),
        "inspect {m}.tgz", r"unpack it: (.*)", "loads", same(weights),
    ),
    "NumPy's arrays": Case(
        lambda m: numpy.savez(m + ".npz", a=numpy.arange(3)), "inspect {m}.npz", r"(python -I -c .*)", "loads",
        same(lambda: {"a": torch.arange(3)}),
    ),
    "a NumPy array": Case(
        lambda m: numpy.save(m + ".npy", numpy.arange(3)), "inspect {m}.npy", r"(python -I -c .*)", "loads", loads,
    ),
}  # fmt: skip


def _features() -> nn.Module:
    model = Parts()
    model.features = nn.DataParallel(model.features)
    return model


def _dangerous(m: str) -> None:
    from tests.support.hostile_bytes import torch_zip_of

    Path(m + ".pt").write_bytes(torch_zip_of(pickle.dumps({"b": eval}, 2), {}))


def _sharded(m: str) -> None:
    torch.save(weights(), "whole.pt")
    ckptconv.convert("whole.pt", m, max_shard_size=20, format="safetensors")
    Path(m, "config.json").write_text("{}")


def _folder(m: str) -> None:
    Path(m).mkdir()
    for name in "ab":
        torch.save(weights(), Path(m, f"{name}.pt"))


def _dcp(m: str) -> None:
    dcp_folder({"w": torch.ones(3), "epoch": 1}, Path(m))


def _ranks(m: str, name: str = "model", epoch: int = 0) -> None:
    """Write the files of three ranks. If `epoch` is given, the last rank has this epoch and the others have epoch 1."""
    save_as_ranks(weights(), Path(m), name, 3)
    for rank, number in enumerate((1, 1, epoch) if epoch else ()):
        path = Path(m, f"{name}_world_size_3_rank_{rank}.pt")
        torch.save({**torch.load(path, weights_only=False), "epoch": number}, path)


def _turned(index: Path) -> None:
    found = json.loads(index.read_text())
    names = found["weight_map"]
    found["weight_map"] = dict(zip(names, reversed(names.values()), strict=True))
    index.write_text(json.dumps(found))


def _no_shard(m: str) -> None:
    Path(m).mkdir()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    torch.save({"a": torch.ones(1)}, Path(m, names[0]))
    torch.save([torch.ones(1)], Path(m, names[1]))
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    Path(m, "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _interrupted(m: str) -> None:
    saved(weights, ("cuda:0",))(m)
    shutil.copy(m + ".pt", "old.pt")
    ckptconv.convert(m + ".pt", in_place=True, map_location="cpu")
    writing.mark_journal(Path(m + ".pt"), HOT)


#: A name that has to be quoted in a shell. ``.ci/long`` types all advice for an ordinary name too.
NAMES = ("./-it's a $m", "m") if os.environ.get("HYPOTHESIS_PROFILE") == "long" else ("./-it's a $m",)


def typed(line: str, words: list[str], stem: str, case: Case) -> None:
    """Execute the advice `line` of `case` with the files of `stem`. `words` is the command to which options are
    added.
    """
    line = line.replace("(and ", "")
    for word, text in case.instead.items():
        line = re.sub(rf"\b{word}(?!\w)", lambda _, text=text: shlex.quote(text.format(m=stem)), line)
    if "SHA256" in words:
        digest = hashlib.sha256(Path(stem + ".safetensors").read_bytes()).hexdigest()
        words, line = words[:-1], f"{line} {digest}"
    program, *rest = words
    if program == "python":
        exec(" ".join(rest).replace("ADVICE", line) if "ADVICE" in " ".join(rest) else f"list({line})", globals())
    elif line.startswith(("averaged.", "import ", "from ", "torch.")):
        scope = {"averaged": AveragedModel(net()), "ckptconv": ckptconv, "model": net(), "torch": torch}
        exec(line, scope)
        if "whole" in scope:
            net().load_state_dict(scope["whole"], strict=True)
        if line.startswith("import "):
            loads(Path(stem + ".pt"))
    elif line.startswith("python -I -c "):
        exec(shlex.split(line)[3], {})
    elif "ADVICE" in words:
        assert main([line if word == "ADVICE" else word for word in words]) == 0, line
    elif line.startswith("--"):
        assert main([*words, *shlex.split(line)]) == 0, line
    elif line.startswith("ckptconv "):
        edits = rest if program == "EDITS" else []
        assert main([*shlex.split(line)[1:], *edits]) in ((0, 1) if "compared" in case.promise else (0,)), line
    else:
        subprocess.run(["bash", "-c", f"test -e {line}" if case.promise == "that is the file" else line], check=True)


def provoked(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the output of the command `words`, or the message of its error if it is Python code."""
    if words[0] != "python":
        main(words)
        return "".join(capfd.readouterr())
    with pytest.raises(ckptconv.CkptconvError) as caught:
        exec(" ".join(words[1:]), globals())
    return str(caught.value)


def advised(case: Case, stem: str, capfd: pytest.CaptureFixture[str]) -> re.Match[str]:
    """Make the files of `stem`, run `case.words`, and return the match of the advice in the output."""
    torch.manual_seed(0)
    case.make(stem)
    capfd.readouterr()
    out = provoked([word.format(m=stem) for word in case.words.split()], capfd)
    found = re.search(case.says, out, re.MULTILINE)
    assert found, out
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stem", NAMES, ids=lambda stem: "plain" if stem == "m" else "odd")
@pytest.mark.parametrize("name", CASES)
def test_advice(name: str, stem: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The advice of each case is printed, runs unchanged, and has the promised effect, also for a file with an odd
    name.
    """
    case = CASES[name]
    line = advised(case, stem, capfd)[1]
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    typed(line, [word.format(m=stem) for word in (case.made or case.words).split()], stem, case)
    new = [
        path
        for path in Path().rglob("*")
        if path.name[0] != "." and path.is_file() and before.get(path) != path.stat().st_mtime_ns
    ]
    case.judge(max(new, key=lambda path: path.stat().st_mtime_ns) if new else Path(stem + ".pt"))


_NAMED = "it names what was typed, and says what is wrong with it"
_NO_CHANGE = "a note that the option which was typed changed nothing"
_NETWORK = "it needs a server or a registry"
_OTHERS = "it needs a program that is not here (zstd, lz4, 7z, unrar, DeepSpeed, Megatron-LM)"
_FAULT = "it needs a fault of the disk, or another program, at one moment; the words are those of another place"
_NO_ADVICE = "no advice: a description, or a table that others read"
_RUN = "it is for the run of several processes that saved the files"
_DCP = "formats/distributed/test_dcp_writing.py::test_the_remedies_work"
_LOADABLE = "edits/loadable/test_refusals.py::"
_FOREIGN = "formats/foreign/test_files.py::"
#: Places without a case here. For each place of a name: a test in tests/unit that types its advice, or the reason why
#: no test does.
OTHERS: dict[str, tuple[str, ...]] = {
    "checkpoint/describe.py:text": (_NO_ADVICE,),
    "checkpoint/merging.py:command convert": ("formats/distributed/test_rank_files.py::test_extra_state",),
    "checkpoint/torch_versions.py:option torch": (_NAMED,),
    "cli/commands.py:option open": (_NAMED,),
    "cli/commands.py:option html": (_NAMED, _NAMED),
    "cli/convert.py:option skip_existing": (f"after Ctrl-C; {_FAULT}",),
    "cli/convert.py:option no_undo": (_NAMED,),
    "cli/convert.py:option to": (_NAMED,),
    "cli/guesses.py:option in_place": (_NO_ADVICE,),
    "cli/help.py:command inspect": ("the FILE is a placeholder",),
    "cli/inspect.py:option fail_on": (_NAMED,),
    "edits/regroup_files.py:option regroup": (_NAMED,),
    "edits/regroup_files.py:option reverse": (_NAMED,),
    "edits/regroup_files.py:option rules": (_NAMED,),
    "edits/regroup_items.py:option regroup": (_NAMED,),
    "cli/verify.py:option expect_sha256": (_NAMED,),
    "cli/verify.py:option json": (_NAMED,),
    "cli/verify.py:option sarif": (_NAMED,),
    "conversion/in_place.py:option in_place": (_NAMED, _NAMED),
    "conversion/in_place.py:command convert": ("conversion/test_in_place.py::test_a_system_without_owners",),
    "conversion/in_place.py:lsattr": ("conversion/test_in_place.py::test_immutable_files",),
    "conversion/in_place.py:chattr": ("conversion/test_in_place.py::test_immutable_files",),
    "conversion/in_place.py:chmod": ("conversion/test_in_place.py::test_files_without_write_permission",),
    "conversion/in_place.py:command undo": (_FAULT, _FAULT, _FAULT),
    "conversion/plan.py:option format": (_NAMED,),
    "conversion/plan.py:option copy_tied": (_NAMED,),
    "conversion/plan.py:option loadable": (_NAMED, _NO_CHANGE),
    "conversion/plan.py:option compact": (_NO_CHANGE,),
    "conversion/plan.py:option allow_unsafe": ("its effect is that of a dangerous call, two lines above",),
    "conversion/targets.py:option format": (_NAMED,) * 4,
    "conversion/targets.py:option copy_others": (_NAMED,) * 4,
    "conversion/targets.py:option max_shard_size": (_NAMED,) * 2,
    "conversion/targets.py:option ranks": (_NAMED,),
    "edits/dtype_casts.py:option dtype": (_NO_CHANGE,),
    "edits/loadable/making.py:option loadable": (_NO_CHANGE,),
    "edits/loadable/making.py:text": (_LOADABLE + "test_classes_of_torch_name_the_import",),
    "edits/loadable/making.py:option drop": (_LOADABLE + "test_the_command_drops_everything_that_is_refused",),
    "edits/loadable/making.py:option state_dict": (_LOADABLE + "test_no_command_if_nothing_would_be_left",),
    "edits/loadable/making.py:command convert": (_LOADABLE + "test_the_command_drops_everything_that_is_refused",),
    "edits/options.py:option *": (_NO_ADVICE,),
    "edits/optimizers.py:option optimizer": (_NO_CHANGE,),
    "edits/rename.py:option unwrap": (_NO_CHANGE, _NO_CHANGE),
    "edits/retag.py:option map_location": (_NO_CHANGE,),
    "edits/views.py:option compact": (_NO_CHANGE,),
    "errors.py:text": (_NETWORK,),
    "formats/distributed/dcp_writing.py:option drop": (_DCP,),
    "formats/distributed/dcp_writing.py:option loadable": (_DCP,),
    "formats/distributed/dcp_writing.py:option select": (_DCP, _DCP),
    "formats/distributed/zero.py:python": (_OTHERS,),
    "formats/distributed/dcp.py:text": (_RUN,),
    "formats/distributed/rank_parts.py:text": (_RUN, _RUN),
    "formats/distributed/safetensors_parts.py:command convert": (
        "it takes a run of several processes; its folder is converted in test_safetensors_parts.py",
    ),
    "formats/foreign/files.py:*": (_FOREIGN + "test_an_index_of_shards_under_another_name",),
    "formats/foreign/files.py:text": (
        "it would run what is in the file, as it says", _OTHERS, _OTHERS, _OTHERS, _OTHERS,
    ),
    "formats/foreign/paths.py:python": (
        "formats/foreign/test_folders.py::test_the_command_for_an_unpacked_checkpoint_works", _OTHERS,
    ),
    "formats/foreign/paths.py:*": ("it takes Windows", _NETWORK),
    "formats/foreign/zips_and_pickles.py:unzip": (
        _FOREIGN + "test_the_command_for_records_without_their_folder_works",
        _FOREIGN + "test_the_command_for_a_checkpoint_in_a_zip_works",
    ),
    "formats/foreign/zips_and_pickles.py:python": (
        _FOREIGN + "test_the_command_for_records_without_their_folder_works",
    ),
    "formats/foreign/zips_and_pickles.py:*": ("it takes torch 1.13", _FOREIGN + "test_the_command_for_pt2_works"),
    "formats/foreign/zips_and_pickles.py:tail": (_FOREIGN + "test_a_zip_with_something_before_it_can_be_freed",),
    "formats/layout.py:option exclude": ("the GLOB is a placeholder; a case types an example of it",) * 2,
    "formats/layout.py:option format": (
        "formats/test_layout.py::test_views_that_repeat", "it takes a storage of which no dtype is known",
    ),
    "formats/layout.py:option include": ("formats/test_layout.py::test_views_that_repeat",),
    "formats/opening.py:*": (_NETWORK,),
    "formats/safetensors.py:text": (_RUN,),
    "formats/sharded/writing.py:option format": (_NAMED,),
    "formats/sharded/writing.py:option max_shard_size": (_NAMED,) * 5,
    "formats/sharded/writing.py:text": (_NETWORK,),
    "inspection/comparison/options.py:option *": (_NAMED, _NAMED),
    "inspection/comparison/options.py:option names_only": (_NAMED, _NAMED),
    "inspection/comparison/options.py:option full": (_NAMED,),
    "inspection/diagnosis/refusals.py:issue not known": ("it says that nothing is known, and advises nothing",),
    "inspection/verification.py:option expect_sha256": (_NAMED,),
    "inspection/values.py:option include": ("it takes a file larger than a test makes",),
    "output/files.py:option force": (_FAULT, _FAULT),
    "output/folders.py:option force": (_FAULT,),
    "render/difference.py:option verbose": ("inspection/comparison/test_diff.py::test_text_of_equal_checkpoints",),
    "render/listing.py:option all": ("cli/test_inspect.py::test_a_folder_and_more_than_two_files_are_a_table",),
    "render/page/summary.py:option drop": ("render/test_page.py::test_globs_are_offered_with_what_they_need",),
    "render/page/summary.py:command convert": ("render/test_page.py::test_offers_to_make_a_file_smaller",) * 2,
    "render/report.py:option verbose": (
        "edits/test_regroup.py::test_the_report_has_every_group_before_anything_is_written",
        "cli/test_convert.py::test_dry_run_writes_nothing",
    ),
    "render/summary.py:option all": ("cli/test_inspect.py::test_the_verdict_and_the_parts_come_first",),
    "render/summary.py:text": (_NO_ADVICE, _NO_ADVICE),
    "render/table.py:option all": ("it says what the rows would be; another place in the file has the same option",),
    "stores/base.py:option force": (_NETWORK,),
    "stores/http.py:option download": ("stores/test_downloads.py::test_the_error_names_the_missing_option",),
    "stores/remote.py:text": (_NETWORK,),
    "stores/s3.py:aws": ("stores/test_s3.py::test_an_upload_that_may_stay_open_is_reported",),
    "stores/uploads.py:option force": ("stores/test_s3.py::test_the_output_is_read_back",),
    "stores/uploads.py:command inspect": (_NETWORK,),
    "stores/uploads.py:command verify": (_NETWORK,),
    "tensors/loading.py:text": ("the module is imported here already",),
}  # fmt: skip


@pytest.mark.parametrize("test", sorted({each for each in chain(*OTHERS.values()) if "::" in each}))
def test_tests_in_the_table_exist(test: str) -> None:
    """The tests that are named in the table exist."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests/unit" / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_every_advice_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every place that prints advice has a case, or an entry in the table with another test or a reason. The table
    contains no other entries.
    """
    by: dict[Place, str] = {}
    for number, (name, case) in enumerate(CASES.items()):
        (here := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(here)
        with come_by() as run:
            advice = advised(case, "m", capfd)
        by |= {place: name for place in run if place.is_in(advice[0] if place.what == "text" else advice[1])}
    for place in places():
        print(f"{place.file}:{place.first} {place.what} | {by.get(place) or OTHERS.get(place.name) or 'NOBODY'}")
    others = Counter(place.name for place in places() if place not in by)
    assert others == Counter({name: len(reasons) for name, reasons in OTHERS.items()})


#: Programs in messages. None of them takes code or settings from the current folder or from the folder of a file.
HARMLESS = {
    "aws", "bzip2", "chattr", "chmod", "ckptconv", "curl", "gcloud", "gzip", "lsattr", "lz4", "mkdir", "mv", "tail",
    "tar", "unrar", "unzip", "xz", "zstd", "7z",
}  # fmt: skip


def test_programs_that_messages_name() -> None:
    """Every program in a message is in the table of programs that run nothing from the current folder. Python commands
    have the option -I, or the absolute path of a script.
    """
    said: list[list[str]] = []
    for path in sorted(Path(ckptconv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "shell" and path.name != "hints.py":
                said.append([each.value for each in node.args if isinstance(each, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said += [[program] for program in re.findall(r"^unpack it: (\w+) \S+ \{path\}", node.value)]
    said += [[*words] for words in paths._DOWNLOADS.values()]
    programs = {words[0] for words in said if words}
    scripts = {tuple(words[1:2]) for words in said if words[:1] == ["python"]}
    assert programs - HARMLESS == {"python"}
    assert scripts == {("/PATH/TO/Megatron-LM/tools/checkpoint/convert.py",)}
    assert {"7z", "curl", "tar", "unzip", "xz"} <= programs
    assert hints.python_command("-m", "zipfile") == "python -I -m zipfile"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "npz", "records", "pointer", "folder of pointers"])
def test_a_command_runs_nothing_from_its_folder(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A printed command runs no code from the current folder or from the folder of the file.

    Both folders contain a git repository with aliases that run a program. The current folder also contains modules with
    the names of torch, numpy, ckptconv and the standard library.
    """
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    Path("m").mkdir()
    if kind in ("npy", "npz"):
        numpy.savez("m.npz", a=numpy.arange(3))
        numpy.save("m.npy", numpy.arange(3))
    elif kind == "records":
        saved(weights)("whole")
        zipfile.ZipFile("whole.pt").extractall()
        Path("m").rmdir()
        Path("whole").rename("m")
    else:
        for path in ("m.pt", "m/model.pt"):
            Path(path).write_bytes(pointer)
    main(["convert", {"npy": "m.npy", "npz": "m.npz", "pointer": "m.pt"}.get(kind, "m"), "other.pt"])
    out = "".join(capfd.readouterr())
    Path("ran").mkdir()
    for name in {"torch", "numpy", "ckptconv"} | sys.stdlib_module_names:
        Path(f"{name}.py").write_text(f"open('ran/{name}', 'w').close()\nraise ImportError\n")
    for folder in (".", "m"):
        subprocess.run(["git", "init", "-q", folder], check=True)
        Path(folder, ".git/config").write_text("[alias]\n\tlfs = !touch ran/git\n\tclone = !touch ran/git\n")
    for line in re.findall(r"(?:: |^|and )((?:python|git) .*)", out, re.MULTILINE):
        assert kind not in ("pointer", "folder of pointers"), line
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["bash", "-c", line], check=True, env={**os.environ, "PATH": path})
        assert Path("out.pt").exists()
    assert ("out.pt" in os.listdir()) == (kind in ("npy", "npz", "records"))
    assert os.listdir("ran") == []
