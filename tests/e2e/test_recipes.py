"""The pages under docs/fix and docs/how-to. Each error in a title is raised by torch, and the commands of the page fix
it.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import shlex
import shutil
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import load_torch_model, save_torch_state_dict
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import import_utils

import ckptconv
from ckptconv.cli.main import main
from tests.support import torch_facts, written, zoo
from tests.support.archives import records_of, rezipped
from tests.support.command import Command, in_one_line
from tests.support.hostile_bytes import saved
from tests.support.megatron_folders import FFN, GROUPS, HEADS, HIDDEN, LAYERS, VOCAB, write_megatron
from tests.support.paths import ROOT
from tests.support.rank_runs import save_as_ranks
from tests.support.writers import distributed, scripted
from tests.support.zero_folders import a_run as a_zero_run
from tests.support.zero_folders import write_zero

pytestmark = pytest.mark.usefixtures("here")

#: The text of each page, by its title. If a page is about an error, the title is the error message.
RECIPES: dict[str, str] = {}
for _page in sorted([*(ROOT / "docs/fix").glob("*.md"), *(ROOT / "docs/how-to").glob("*.md")]):
    if _page.name not in ("index.md", "browser.md", "completion.md", "far-files.md"):
        _title, _, _body = _page.read_text().removeprefix("# ").partition("\n")
        RECIPES[re.sub(r"\\(.)", r"\1", _title)] = _body


def net() -> nn.Module:
    """Return a model with the names in the recipes."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3),
            features=nn.Sequential(nn.Linear(2, 2)),
            layers=nn.ModuleList([nn.Linear(2, 2)]),
            head=nn.Linear(2, 2),
        )
    )


class Arguments:
    """A class that torch's safe loader does not allow."""

    lr = 0.1


def load(name: str = "model.pt", **options: Any) -> Any:
    """Load `name` with torch, as a user without ckptconv does."""
    return torch.load(name, **options)


def into_net(name: str) -> None:
    net().load_state_dict(torch.load(name, map_location="cpu"), strict=True)


def saving(
    make: Callable[[], Any], attempt: Callable[[], Any] | None = load, tags: Sequence[str] = ("cpu",), **options: Any
) -> Callable[[], Callable[[], Any] | None]:
    """Return a function that saves the result of `make` as ``model.pt`` and returns `attempt`, which then fails."""

    def save() -> Callable[[], Any] | None:
        zoo.save(make(), "model.pt", tags, **options)
        return attempt

    return save


def state() -> Any:
    return net().state_dict()


def inner() -> Any:
    """Return the state dict of a model with one wrapped part."""
    model = net()
    model.features = nn.DataParallel(model.features)
    return model.state_dict()


def activations() -> Any:
    model = net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return with_wrappers(model)


def with_wrappers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors under their internal names. Newer wrappers hide these names from ``state_dict()``."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def fused() -> dict[str, torch.Tensor]:
    """Return fused weights, and experts whose weights are separate."""
    experts = {f"l.experts.{e}.{w}.weight": torch.rand(4, 2) for e in range(3) for w in ("w1", "w3")}
    return {"l.qkv.weight": torch.rand(6, 2), "l.qkv.bias": torch.rand(6), **experts}


def is_split_and_stacked() -> None:
    old, split, stacked, again = (load(f"{name}.pt") for name in ("model", "split", "stacked", "again"))
    assert torch.equal(torch.cat([split[f"l.{name}.weight"] for name in "qkv"]), old["l.qkv.weight"])
    experts = [torch.cat([old[f"l.experts.{e}.{w}.weight"] for w in ("w1", "w3")]) for e in range(3)]
    assert torch.equal(stacked["l.experts.gate_up_proj"], torch.stack(experts))
    assert again.keys() == split.keys()
    assert all(torch.equal(again[name], split[name]) for name in again)


def dumped() -> Callable[[], Any]:
    with zoo.tagging(["cuda:0"]):
        Path("data.pkl").write_bytes(pickle.dumps(state()))
    return lambda: pickle.loads(Path("data.pkl").read_bytes())


def pickled() -> Callable[[], Any]:
    Path("data.pkl").write_bytes(pickle.dumps(state(), 2))
    return lambda: torch.load("data.pkl", weights_only=False)


def loads_the_dumped() -> None:
    net().load_state_dict(pickle.loads(Path("cpu.pkl").read_bytes()), strict=True)
    into_net("cpu.pt")


def maps_into_memory() -> None:
    net().load_state_dict(torch.load("new.pt", mmap=True), strict=True)
    into_net("old.pt")


#: The name of this module in pickles, and a name of the same length that cannot be imported.
HERE = __name__.encode()
GONE = b"models".ljust(len(HERE), b"_")


def with_lost_class() -> Callable[[], Any]:
    torch.save({"state_dict": state(), "args": Arguments()}, "old.pt")
    data = Path("old.pt").read_bytes().replace(b"c%s\nArguments" % HERE, b"c%s\nArguments" % GONE)
    assert GONE in data
    Path("model.pt").write_bytes(without_checksums(data))
    return lambda: torch.load("model.pt", weights_only=False)


def without_checksums(data: bytes) -> bytes:
    """Return the archive `data` after torch has rewritten it, with correct checksums for the changed pickle."""
    Path("changed.pt").write_bytes(data)
    reader = torch._C.PyTorchFileReader("changed.pt")
    writer = torch._C.PyTorchFileWriter("again.pt")
    for name in reader.get_all_records():
        if name not in (".data/serialization_id", "version", ".format_version", ".storage_alignment"):
            record = reader.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return Path("again.pt").read_bytes()


class Net(nn.Module):
    """A model with a direct parameter, nested modules, buffers and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2))
        self.register_buffer("steps", torch.arange(3))
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.body[0].weight
        self.seen = torch.zeros(3)  # neither a parameter nor a buffer


def whole() -> Callable[[], Any]:
    """Save a pickled model of a module that does not exist."""
    return whole_model(Net(), HERE + b"\nNet", GONE + b"\nNet")


def whole_wrapped() -> Callable[[], Any]:
    """Save a pickled model on a GPU, in its wrapper. The class of the model does not exist."""
    return whole_model(nn.DataParallel(Net()), b"test_recipes\nNet", b"test_recipes\nOld", tags=["cuda:0"])


def whole_model(model: nn.Module, cls: bytes, gone: bytes, tags: Sequence[str] = ("cpu",)) -> Callable[[], Any]:
    zoo.save(model, "old.pt", tags)
    torch.save(getattr(model, "module", model).state_dict(), "expected.pt")
    data = Path("old.pt").read_bytes().replace(cls, gone)
    assert gone in data
    Path("model.pt").write_bytes(without_checksums(data))
    return lambda: torch.load("model.pt", weights_only=False, map_location="cpu")


def loads_the_weights() -> None:
    for weights in (torch.load("weights.pt"), SPACE["weights"]):
        into_a_new_one(weights)
    load_model(Net(), "weights.safetensors")


def loads_the_wrapped_weights() -> None:
    into_a_new_one(torch.load("plain.pt"))


def into_a_new_one(weights: Any) -> None:
    model = Net()
    model.load_state_dict(weights, strict=True)
    expected = torch.load("expected.pt")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def tied() -> Any:
    model = net()
    model.head.weight = model.features[0].weight
    return model.state_dict()


def training() -> Any:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer.state_dict()}


saved_training = saving(training, None, ["cuda:0"])


def saved_again() -> None:
    """Save a training checkpoint, a copy of it, its weights, and a later version in which only the head differs."""
    saved_training()
    ckptconv.convert("model.pt", "copy.pt")
    ckptconv.convert("model.pt", "weights.safetensors")
    later = load(map_location="cpu")
    later["model"]["head.weight"].add_(1)
    zoo.save(later, "later.pt", tags=["cuda:0"])


def the_same_is_said() -> None:
    """Fail unless ``diff`` of the compared part finds only the changed head, and ``diff`` of the complete files a
    difference.
    """
    (only,) = ckptconv.diff("model.pt", "later.pt", select="model").differing
    assert only.path == "head.weight"
    assert main(["diff", "model.pt", "later.pt", "-q"]) == 1


def writing(make: Callable[[], bytes], attempt: Callable[[], Any] | None = load) -> Callable[[], Any]:
    """Return a function that writes the bytes from `make` to ``model.pt`` and returns `attempt`, which then fails."""

    def write() -> Callable[[], Any] | None:
        Path("model.pt").write_bytes(make())
        return attempt

    return write


cut = writing(lambda: saved(state())[:1500])
pointer = writing(lambda: POINTER, lambda: load(weights_only=False))
empty = writing(lambda: b"")
cut_pickle = writing(lambda: pickle.dumps(b"0" * 1000)[:-500], lambda: pickle.loads(Path("model.pt").read_bytes()))
of_export = writing(lambda: exported(), None)


def tags(name: str) -> set[str]:
    return set(ckptconv.inspect(name).devices)


def loads_into(name: str) -> Callable[[], Any]:
    return lambda: into_net(name)


def resumes_from_plain() -> None:
    checkpoint = torch.load("plain.pt", weights_only=True)
    net().load_state_dict(checkpoint["model"], strict=True)
    assert (checkpoint["args"], checkpoint["epoch"]) == ({"lr": 0.1}, 3)


def in_shards() -> None:
    Path("hub").mkdir()
    save_torch_state_dict(state(), "hub", max_shard_size=60)
    Path("hub", "config.json").write_text("{}")


def loads_from_shards() -> None:
    net().load_state_dict(load_file("merged.safetensors"), strict=True)
    model = net().bfloat16()
    assert len(load_torch_model(model, "half").missing_keys) == 0
    assert Path("half", "config.json").exists()
    assert len(load_torch_model(net(), "dealt").missing_keys) == 0


def in_chunks() -> None:
    """Save a DCP folder of one process."""
    distributed({"model": state(), "step": 100}, Path("step-100"))
    with pytest.raises(IsADirectoryError):
        load("step-100")


def of_a_newer_torch() -> Callable[[], Any] | None:
    """Copy a folder that torch 2.15 wrote."""
    shutil.copytree(written.FOLDER / "2.15.dcp", "step-100")
    return FileSystemReader("step-100").read_metadata if torch_facts.version() < (2, 15) else None


def loads_with_dcp() -> None:
    wanted = written.distributed_state()
    made = {"model": {name: torch.empty_like(each) for name, each in wanted["model"].items()}, "epoch": 0}
    dcp.load(made, checkpoint_id="step-100-any-torch")
    assert torch.equal(made["model"]["w"], wanted["model"]["w"]) and made["epoch"] == 3  # type: ignore[index]
    assert load("whole.pt")["name"] == "é"


def is_fp32() -> None:
    weights = a_zero_run().weights
    for made in (load_file("model.safetensors"), load("whole.pt")["module"], load("weights.pt")):
        assert all(torch.equal(made[name], tensor) for name, tensor in weights.items())
    assert [*load("numbered.pt")["optimizer"]["state"]] == [*range(len(weights))]


def is_llama() -> None:
    """Fail unless a model of transformers loads the outputs."""
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": FFN}
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=GROUPS)
    for files in (["model.safetensors"], [*Path("hf").glob("*.safetensors")]):
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        LlamaForCausalLM(config).load_state_dict(found, strict=True)
    assert load("back.pt")["decoder.layers.mlp.linear_fc1.weight"].shape == (LAYERS, 2 * FFN, HIDDEN)


def is_whole() -> None:
    whole = load("whole.pt")
    assert whole["step"] == 100
    net().load_state_dict(whole["model"], strict=True)
    net().load_state_dict(load_file("weights.safetensors"), strict=True)


def of_ranks() -> None:
    """Save the files of four FSDP ranks. Tensors are sharded by rows, and buffers are complete."""
    save_as_ranks(net().state_dict(), Path("actor"), world=4)
    save_as_ranks({"step": 7, "exp_avg": torch.ones(3)}, Path("actor"), "optim", world=4)


def is_one_model() -> None:
    net().load_state_dict(load_file("model.safetensors"), strict=True)
    assert load("optim.pt")["exp_avg"].shape == (3,)


def a_run() -> None:
    for step in ("1", "2"):
        Path("run", step).mkdir(parents=True)
        zoo.save(state(), f"run/{step}/model.pt", tags=["cuda:0"])


def keeps_the_ties() -> None:
    model = net()
    model.head.weight = model.features[0].weight
    load_model(model, "model.safetensors")


def saved_fp8() -> None:
    """Save a quantized model in two shards. The scale of a weight is in another shard than the weight."""
    Path("DeepSeek-V3").mkdir()
    weight = torch.ones(130, 200).to(torch.float8_e4m3fn)
    for i, part in enumerate([{"a.weight": weight}, {"a.weight_scale_inv": torch.full((2, 2), 0.5)}], 1):
        save_file(part, f"DeepSeek-V3/model-0000{i}-of-00002.safetensors", {"format": "pt"})
    ckptconv.write_index("DeepSeek-V3")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "dtype": "float32"}
    Path("DeepSeek-V3/config.json").write_text(json.dumps(config))


def is_real() -> None:
    config = json.loads(Path("DeepSeek-V3-bf16/config.json").read_text())
    (file,) = Path("DeepSeek-V3-bf16").glob("*.safetensors")
    assert config == {"dtype": "bfloat16"}
    assert torch.equal(load_file(file)["a.weight"], torch.full((130, 200), 0.5, dtype=torch.bfloat16))


def is_half() -> None:
    half, mixed = load("half.pt", map_location="cpu"), load("mixed.pt", map_location="cpu")
    net().bfloat16().load_state_dict(half["model"], strict=True)
    assert {tensor.dtype for tensor in half["model"].values()} == {torch.bfloat16}
    assert {name for name, tensor in mixed["model"].items() if tensor.dtype == torch.float32} == {
        "head.weight",
        "head.bias",
    }


def is_small() -> None:
    assert Path("small.pt").stat().st_size < 5000
    assert load("small.pt")["a"].untyped_storage().nbytes() == 40
    assert Path("small.safetensors").stat().st_size < 1000 < 300_000 < Path("model.pt").stat().st_size
    assert load_file("small.safetensors")["a"].shape == (10,)


def resumes() -> None:
    assert tags("resumable.pt") == {"cuda:0", "cpu"}
    torch.set_rng_state(ckptconv.load("resumable.pt", {"cuda": "cpu"})["rng"])


def takes_parts() -> None:
    into_net_from_cpu = ckptconv.load("ema.pt", "cpu")
    net().load_state_dict(into_net_from_cpu, strict=True)
    net().load_state_dict(ckptconv.load("weights.pt", "cpu"), strict=True)
    assert not any(name.startswith("head") for name in ckptconv.load("headless.pt", "cpu"))


def for_a_thousand_classes() -> Any:
    return {**state(), "head.weight": torch.zeros(1000, 2), "head.bias": torch.zeros(1000)}


def loads_without_the_head() -> None:
    assert net().load_state_dict(SPACE["weights"], strict=False).missing_keys == ["head.weight", "head.bias"]


def saved_ddp_training() -> None:
    model = nn.DataParallel(net())
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    saving(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, None, ["cuda:0", "cuda:1"])()


def goes_on_there_and_back() -> None:
    """Fail unless the model and the optimizer load both outputs, without the wrapper and with it."""
    assert tags("laptop.pt") == {"cpu"} and tags("cluster.pt") == {"cuda:0"}
    for name, model in (("laptop.pt", net()), ("cluster.pt", nn.DataParallel(net()))):
        there = torch.load(name, map_location="cpu")
        model.load_state_dict(there["model"], strict=True)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(there["optimizer"])
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()


def attention(*names: str) -> nn.Module:
    """Return the model with modules of the given names. "qkv" stands for fused queries, keys and values."""
    model = net()
    model.add_module("a", nn.ModuleDict({name: nn.Linear(2, 2 * len(name)) for name in names}))
    return model


def trained_by_names() -> None:
    fused = attention("qkv")
    new = {"model": fused.state_dict(), "optimizer": torch.optim.Adam(fused.named_parameters()).state_dict()}
    torch.save(new, "new.pt")
    model = attention(*"qkv")
    optimizer = torch.optim.Adam(model.named_parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "model.pt")
    torch.save(model.state_dict(), "weights.pt")
    without_names = torch.optim.Adam(model.parameters())
    without_names.load_state_dict(optimizer.state_dict())
    without_names.param_groups[0].pop("param_names")
    torch.save(without_names.state_dict(), "optimizer.pt")


def goes_on_without_a_head() -> None:
    for name in ("joined.pt", "resumed.pt"):
        found, model = torch.load(name), attention("qkv")
        model.load_state_dict(found["model"], strict=True)
        optimizer = torch.optim.Adam(model.parameters())
        if name == "joined.pt":
            set_optimizer_state_dict(model, optimizer, found["optimizer"])
        else:
            optimizer.load_state_dict(found["optimizer"])
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    found, model = torch.load("smaller.pt"), attention(*"qkv")
    names = [name for name, _ in model.named_parameters()]
    assert torch.load("numbers.pt")["optimizer"]["param_groups"][0]["param_names"] == names
    for by_name in (torch.load("names.pt")["optimizer"], torch.load("by-name.pt")):
        optimizer = torch.optim.Adam(model.parameters())
        set_optimizer_state_dict(model, optimizer, by_name)
        assert len(optimizer.state) == len(names)
    del model.head
    model.load_state_dict(found["model"], strict=True)
    torch.optim.Adam(model.parameters()).load_state_dict(found["optimizer"])


def as_a_part() -> dict[str, torch.Tensor]:
    """Return the weights of a network that is stored as ``self.model`` in another module."""
    return {f"model.{name}": tensor for name, tensor in net().state_dict().items()}


def a_lightning_checkpoint() -> None:
    parts = {"epoch": 3, "pytorch-lightning_version": "2.5.0", "optimizer_states": [], "loops": {}}
    zoo.save({**parts, "state_dict": as_a_part()}, "epoch.ckpt", ["cuda:0"])


def unpickles(name: str) -> Callable[[], Any]:
    return lambda: pickle.loads(Path(name).read_bytes())


def misnamed() -> Callable[[], Any]:
    torch.save(state(), "model.safetensors")
    return lambda: load_file("model.safetensors")


def a_folder_of_the_hub() -> Callable[[], Any]:
    """Save a model folder of the Hub that transformers refuses to load with an older torch."""
    Path("model-folder").mkdir()
    torch.save(state(), "model-folder/pytorch_model.bin")

    def refused() -> None:
        with mock.patch.object(import_utils, "is_torch_greater_or_equal", return_value=False):
            import_utils.check_torch_load_is_safe()

    return refused


def a_trainers_folder() -> None:
    Path("checkpoint-500").mkdir()
    save_file(state(), "checkpoint-500/model.safetensors")
    zoo.save(training()["optimizer"], "checkpoint-500/optimizer.pt", ["cuda:0", "cuda:1"])
    torch.save({"cpu": torch.get_rng_state()}, "checkpoint-500/rng_state_0.pth")
    Path("checkpoint-500/config.json").write_text("{}")


def is_elsewhere() -> None:
    for folder, tag in (("first-gpu", "cuda:0"), ("without-gpu", "cpu")):
        names = {path.name for path in Path(folder).iterdir()}
        assert names == {path.name for path in Path("checkpoint-500").iterdir()}
        assert tags(f"{folder}/optimizer.pt") <= {tag, "cpu"} and tag in tags(f"{folder}/optimizer.pt")
        torch.set_rng_state(torch.load(f"{folder}/rng_state_0.pth")["cpu"])


#: The variables of the Python code in a recipe.
SPACE: dict[str, Any] = {}
#: Functions that make an unreadable file, and a part of the error of the commands.
UNREAD = {
    cut: "bytes missing",
    of_export: "the weight 'weight' is a pickle",
    pointer: "a Git LFS pointer",
    empty: "the file is empty",
    cut_pickle: "a pickle that was truncated or damaged",
}
#: For each heading: a function that prepares the files, and a function that checks the result of the recipe. The first
#: one returns a function that raises the error, or None if no machine raises it.
STORIES: dict[str, tuple[Callable[[], Callable[[], Any] | None], Callable[[], Any]]] = {
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False": (
        saving(state, tags=["cuda:0"]),
        loads_into("cpu.pt"),
    ),
    "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1": (
        saving(state, tags=["cuda:0", "cuda:1"]),
        lambda: tags("first.pt") == {"cuda:0"} or pytest.fail("a tag is left"),
    ),
    'Missing key(s) in state_dict: "conv.weight" ... Unexpected key(s) in state_dict: "module.conv.weight"': (
        saving(lambda: nn.DataParallel(net()).state_dict(), loads_into("model.pt")),
        loads_into("plain.pt"),
    ),
    'Missing key(s) in state_dict: "module.conv.weight" ... Unexpected key(s) in state_dict: "conv.weight"': (
        saving(state, lambda: nn.DataParallel(net()).load_state_dict(torch.load("model.pt"), strict=True)),
        lambda: nn.DataParallel(net()).load_state_dict(torch.load("ddp.pt"), strict=True),
    ),
    'Unexpected key(s) in state_dict: "features.module.0.weight"': (
        saving(inner, loads_into("model.pt")),
        loads_into("plain.pt"),
    ),
    'Unexpected key(s) in state_dict: "_orig_mod.conv.weight"': (
        saving(lambda: torch.compile(net()).state_dict(), loads_into("model.pt")),
        loads_into("plain.pt"),
    ),
    'Unexpected key(s) in state_dict: "layers.0._checkpoint_wrapped_module.weight"': (
        saving(activations, loads_into("model.pt")),
        loads_into("plain.pt"),
    ),
    "RuntimeError: Attempting to deserialize object on a CUDA device, from pickle.load": (dumped, loads_the_dumped),
    "RuntimeError: mmap can only be used with files saved with torch.save(... _use_new_zipfile_serialization=True)": (
        saving(state, lambda: torch.load("model.pt", mmap=True), _use_new_zipfile_serialization=False),
        maps_into_memory,
    ),
    "UnpicklingError: Weights only load failed": (
        saving(lambda: {"state_dict": state(), "args": Arguments()}),
        loads_into("weights.pt"),
    ),
    "UnpicklingError: Weights only load failed ... GLOBAL argparse.Namespace": (
        saving(lambda: {"model": state(), "args": argparse.Namespace(lr=0.1), "epoch": np.int64(3)}),
        resumes_from_plain,
    ),
    "UnpicklingError: Weights only load failed ... Unsupported operand 149": (
        saving(state, pickle_protocol=4),
        loads_into("loadable.pt"),
    ),
    "ModuleNotFoundError: No module named 'models'": (with_lost_class, loads_into("weights.pt")),
    "ModuleNotFoundError: No module named 'models', if the file is the model itself": (whole, loads_the_weights),
    "AttributeError: Can't get attribute 'Net' on <module '__main__'>": (whole_wrapped, loads_the_wrapped_weights),
    "RuntimeError: Cannot use weights_only=True with TorchScript archives": (
        writing(lambda: scripted(nn.Linear(3, 2))),
        lambda: nn.Linear(3, 2).load_state_dict(torch.load("weights.pt"), strict=True),
    ),
    "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk": (
        saving(tied, lambda: save_file(torch.load("model.pt"), "out.safetensors")),
        keeps_the_ties,
    ),
    "torch.cuda.OutOfMemoryError when training is resumed": (saved_training, lambda: load("cpu.pt")),
    "Killed: out of memory on a file that is larger than the RAM": (saved_training, lambda: None),
    "TypeError: RNG state must be a torch.ByteTensor": (
        saving(
            lambda: {"model": state(), "rng": torch.get_rng_state()},
            lambda: torch.set_rng_state(torch.load("model.pt", map_location="meta")["rng"]),
            ["cuda:0"],
        ),
        resumes,
    ),
    "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)": (
        saving(state, tags=["npu:0"]),
        loads_into("cpu.pt"),
    ),
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory": (
        cut,
        lambda: None,
    ),
    "UnpicklingError: invalid load key, 'v'": (pointer, lambda: None),
    "EOFError": (empty, lambda: None),
    "UnpicklingError: pickle data was truncated": (cut_pickle, lambda: None),
    "RuntimeError: Invalid magic number; corrupt file?": (
        pickled,
        lambda: net().load_state_dict(torch.load("model.pt"), strict=True),
    ),
    "Fused weights and stacked experts: split, join and stack them": (saving(fused, None), is_split_and_stacked),
    "The file is far too big": (saving(lambda: {"a": torch.randn(100_000)[:10]}, None), is_small),
    "The weights in half the bytes": (saved_training, is_half),
    "Real weights from fp8 and fp4": (saved_fp8, is_real),
    "The weights without the optimizer, the EMA, one part of the model": (saved_training, takes_parts),
    "The optimizer of a model that changes": (trained_by_names, goes_on_without_a_head),
    "A model in shards: one file of it, other shards, another device": (in_shards, loads_from_shards),
    "A folder with .metadata and .distcp files, which torch.load does not read": (in_chunks, is_whole),
    "A Megatron-Core folder, iter_0001000 with .metadata and metadata.json, for transformers": (
        lambda: write_megatron(Path("iter_0001000")) and None,
        is_llama,
    ),
    "A DeepSpeed ZeRO folder, global_step500 and zero_to_fp32.py, as one file": (
        lambda: write_zero(Path("checkpoint-500")) and None,
        is_fp32,
    ),
    "Files of FSDP ranks, model_world_size_4_rank_0.pt and so on, as one": (of_ranks, is_one_model),
    "A run full of checkpoints for a machine without a GPU": (
        a_run,
        lambda: [into_net(f"cpu/{step}/model.pt") for step in "12"],
    ),
    "Are these two checkpoints the same?": (saved_again, the_same_is_said),
    "From several GPUs to a laptop, and back, with the optimizer": (saved_ddp_training, goes_on_there_and_back),
    "A Lightning checkpoint for plain PyTorch": (a_lightning_checkpoint, loads_into("weights.pt")),
    "A folder of the Hugging Face Trainer for another machine": (a_trainers_folder, is_elsewhere),
    "In a notebook, a Dataset, a server": (
        saving(state, None),
        lambda: net().load_state_dict(SPACE["weights"], strict=True) and len(SPACE["loaded"]),
    ),
    "In a container, with one line of Docker": (saving(state, None, ["cuda:0"]), loads_into("cpu.pt")),
    "Names and shapes without loading": (saved_again, lambda: Path("changes.html").stat()),
    'Unexpected key(s) in state_dict: "model", "optimizer"': (
        saving(lambda: {"model": state(), "optimizer": {}}, lambda: into_net("model.pt")),
        loads_into("weights.pt"),
    ),
    "size mismatch for head.weight: copying a param with shape torch.Size([1000, 2]) from checkpoint": (
        saving(for_a_thousand_classes, lambda: into_net("model.pt")),
        loads_without_the_head,
    ),
    "AttributeError: 'Adam' object has no attribute 'to'": (
        lambda: lambda: torch.optim.Adam(net().parameters()).to("cpu"),  # type: ignore[attr-defined]
        lambda: None,
    ),
    "No space left on device, and the old checkpoint is gone": (lambda: None, lambda: load("last.pt")),
    "ModuleNotFoundError: No module named 'numpy._core'": (
        saving(lambda: {"model": state(), "mean": np.ones(3), "best": np.float64(0.5)}, None),
        lambda: torch.equal(load("plain.pt")["mean"], torch.ones(3).double()) or pytest.fail("another mean"),
    ),
    "RuntimeError: CUDA error: invalid device ordinal": (
        saving(state, None, ["cuda:0", "cuda:1"]),
        lambda: tags("first.pt") == {"cuda:0"} or pytest.fail("a tag is left"),
    ),
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!": (
        saving(state, None, ["cuda:0", "cpu", "cuda:1"]),
        lambda: (tags("cpu.pt"), tags("first.pt")) == ({"cpu"}, {"cuda:0"}) or pytest.fail("on several devices"),
    ),
    "UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function was "
    "specified": (
        saving(state, unpickles("model.pt")),
        lambda: net().load_state_dict(unpickles("data.pkl")(), strict=True),
    ),
    "SafetensorError: Error while deserializing header: header too large (HeaderTooLarge)": (
        misnamed,
        lambda: net().load_state_dict(load_file("model.safetensors"), strict=True),
    ),
    "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'": (
        saving(lambda: net().half().state_dict(), lambda: torch.cdist(*(load()["head.weight"],) * 2)),
        lambda: torch.cdist(*(load("full.pt")["head.weight"],) * 2),
    ),
    "ValueError: Due to a serious vulnerability issue in torch.load, ... we now require users to upgrade torch to at "
    "least v2.6": (a_folder_of_the_hub, lambda: net().load_state_dict(load_file("safe-folder/model.safetensors"))),
    "RuntimeError: model.pt is a zip archive (did you mean to use torch.jit.load()?)": (
        saving(state, None),
        loads_into("old.pt"),
    ),
    "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found": (
        saving(state, lambda: torch.jit.load("model.pt")),
        lambda: net().load_state_dict(SPACE["weights"], strict=True),
    ),
    "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'": (
        saving(state, lambda: load().eval()),
        lambda: net().load_state_dict(SPACE["weights"], strict=True),
    ),
    'Missing key(s) in state_dict: "conv.weight" ... Unexpected key(s) in state_dict: "model.conv.weight"': (
        saving(lambda: {"state_dict": as_a_part()}, lambda: net().load_state_dict(load()["state_dict"])),
        loads_into("plain.pt"),
    ),
    "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group": (
        saving(training, lambda: torch.optim.Adam([torch.ones(1)]).load_state_dict(load()["optimizer"])),
        lambda: load("noopt.pt").keys() == {"model", "ema"} or pytest.fail("other parts"),
    ),
    "ValueError: too many values to unpack (expected 5)": (of_a_newer_torch, loads_with_dcp),
    "Not read by this version": (of_export, lambda: None),
}


#: Messages of Python 3.13 and later, if they differ from the heading.
SINCE_3_13 = {
    "UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function was "
    "specified": "persistent IDs in protocol 0 must be ASCII strings",
}


def parts(heading: str) -> list[str]:
    """Return the parts of `heading` that the text of the exception contains."""
    text = re.sub(r"^[\w.]+: ", "", heading) if "Error: " in heading.split(" ")[0] + " " else heading
    unsaid = r"\.\.\.|, from pickle.*|\(tagged|\(Header.*|\"addmm_impl_cpu_\"|'models'.*|'Net'|'__main__'.*"
    return [part.strip() for part in re.split(unsaid, text) if part.strip(" )")]


def test_every_recipe_has_a_story() -> None:
    """Every recipe has an entry in ``STORIES``, and every entry has a recipe."""
    assert RECIPES.keys() == STORIES.keys()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch",
    "ignore:Detected pickle protocol 4",
    "ignore:.*TorchScript archive",
    "ignore:.*single process",
    "ignore:.*torch.jit.load. is deprecated",
)
@pytest.mark.parametrize("heading", STORIES)
def test_the_error_is_raised_and_fixed(heading: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error of the heading is raised, and `ckptconv help` finds the recipe for it. The commands of the recipe fix
    it.
    """
    before, after = STORIES[heading]
    attempt = before()
    gpus = torch.cuda.device_count()
    if attempt and ("CUDA device" not in heading or gpus == (1 if "device 1" in heading else 0)):
        error = raised_by(attempt)
        said = on_one_line(error)
        assert all(part in said for part in parts(heading)) or SINCE_3_13.get(heading, "none") in said, said
        capsys.readouterr()
        assert main(["help", "".join(traceback.format_exception(error))]) == 0
        found = re.findall(r"^(?:See also: )?(.*)$", capsys.readouterr().out, re.MULTILINE)
        assert heading in found and (heading == found[0] or heading.endswith((" itself", " pickle.load")))
    shell = [
        line
        for block in re.findall(r"```sh\n(.*?)```", RECIPES[heading], re.DOTALL)
        for line in block.replace("\\\n", "").splitlines()
    ]
    python = re.findall(r"```python\n(.*?)```", RECIPES[heading], re.DOTALL)
    assert shell or python
    for line in shell:
        words = shlex.split(line)
        if words[0] == "docker":  # the command in the container, after the installation
            words = words[-1].rpartition(" && ")[2].split()
        status = main(words[1:])
        shows_difference = words[1] == "diff" and "--html" in words
        assert status == (1 if before in UNREAD or shows_difference else 0), (line, capsys.readouterr().err)
    SPACE.clear()
    for code in python:
        exec(compile(code, heading, "exec"), SPACE)
    if before in UNREAD:
        assert UNREAD[before] in capsys.readouterr().err
    after()


# Other messages for the same problems


def torch_bytes(elements: int = 0) -> bytes:
    return saved({**state(), "more": torch.zeros(elements)})


def exported() -> bytes:
    """Return a program of torch.export whose weight is marked as a pickled object."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.zeros(1, 3),)), file)
    config = "data/weights/model_weights_config.json"
    text = records_of(file.getvalue())[config]
    return rezipped(file.getvalue(), {config: text.replace(b'"use_pickle": false', b'"use_pickle": true')})


DAMAGED = "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
PAGE = b"<!DOCTYPE html>\n<html><title>Sign in</title></html>"
JSON = b'{"architectures": ["Net"]}'
REFUSED = "UnpicklingError: Weights only load failed ... Unsupported operand"
#: For each error of torch: a function that returns the bytes of a file with this error, and a pattern of the error of
#: ``inspect``.
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    DAMAGED: (lambda: torch_bytes()[:1500], "bytes missing; download or copy it again"),
    "OSError: [Errno 22] Invalid argument": (
        lambda: torch_bytes(5000)[:-30],
        "truncated: the zip archive's end is missing; download or copy it again",
    ),
    "EOFError": (lambda: b"", "the file is empty; download or copy it again"),
    f"{REFUSED} 118": (lambda: POINTER, "a Git LFS pointer.*fetch it with Git LFS"),
    f"{REFUSED} 60": (lambda: PAGE, "an HTML page.*download the file itself.* log in"),
    f"{REFUSED} 123": (lambda: JSON, "a model's configuration.*use the file with the weights"),
    f"{REFUSED} 0": (
        lambda: b"GGUF\3\0\0\0" + bytes(64),
        "a GGUF file.*ask its publisher for the weights it was made from",
    ),
    "RuntimeError: Invalid magic number; corrupt file?": (
        lambda: pickle.dumps({"lr": 1}, 2),
        "a pickle without tensors.*use the file with the weights",
    ),
    "KeyError: 101": (lambda: b"hello world", "a text file.*use the file with the weights"),
    "RuntimeError: PytorchStreamReader failed locating file data.pkl": (
        exported,
        r"a pickle.*save only its weights: python -I -c",
    ),
}
#: Errors of torch for files with a location tag, and the tag.
DEVICES = {
    "RuntimeError: torch.UntypedStorage(): Storage device not recognized: mps": "mps",
    "RuntimeError: The HPU device module is not registered": "hpu:0",
    "RuntimeError: Attempting to deserialize object on a XPU device but torch.xpu.is_available() is False": "xpu:0",
}
UNKNOWN = "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)"


def raised_by(attempt: Callable[[], Any]) -> Exception:
    """Return the exception that `attempt` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, the caller says
        attempt()
    return caught.value


def on_one_line(error: Exception) -> str:
    """Return the type and message of `error` on one line, without torch's quotation marks."""
    return " ".join(f"{type(error).__name__}: {error}".replace("`", "").split())


def said_by(attempt: Callable[[], Any]) -> str:
    return on_one_line(raised_by(attempt))


def test_each_row_and_line_has_a_test() -> None:
    """The table of damaged files and the list of unknown devices in the recipes contain exactly the tested errors."""
    assert re.findall(r"^\| `(.*?)`", RECIPES[DAMAGED], re.MULTILINE) == list(FILES)
    assert re.findall(r"^- `(.*?)`", RECIPES[UNKNOWN], re.MULTILINE) == list(DEVICES)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore:Detected pickle protocol", "ignore:.*TorchScript archive"
)
@pytest.mark.parametrize("error", FILES)
def test_torch_raises_the_error_of_a_damaged_file(error: str, command: Command) -> None:
    """torch raises the error of the table for each file, and inspect describes the file with the next step of the
    table.
    """
    make, what = FILES[error]
    Path("model.pt").write_bytes(make())
    said = said_by(load)
    start, *rest = error.split(" ... ")
    assert said.startswith(start)
    assert all(re.search(rf"{re.escape(part)}\b", said) for part in rest)
    assert re.search(what, in_one_line(command("inspect", "model.pt", status=1).err))


@pytest.mark.parametrize(("data", "key"), [(POINTER, "'v'"), (PAGE, "'<'"), (JSON, "'{'")])
def test_torch_names_the_first_letter_without_weights_only(data: bytes, key: str) -> None:
    """torch reports the first byte of a file that is not a pickle. All versions before 2.6 report it by default."""
    Path("model.pt").write_bytes(data)
    said = said_by(lambda: load(weights_only=False))
    assert said.startswith(f"UnpicklingError: invalid load key, {key}")
    assert f"`invalid load key, {key}`" in RECIPES[DAMAGED]


@pytest.mark.parametrize("error", DEVICES)
def test_torch_raises_the_error_of_an_unknown_device(error: str, command: Command) -> None:
    """torch raises the listed error for each device, and the command of the recipe fixes the file."""
    zoo.save(state(), "model.pt", tags=[DEVICES[error]])
    assert said_by(load).startswith(error)
    command("convert", "model.pt", "cpu.pt", "--to", "cpu", "-q")
    into_net("cpu.pt")


def test_the_names_of_a_wrapped_model_are_excluded_with_their_prefix(command: Command) -> None:
    """The recipe excludes the head of a wrapped model with the prefix of its names. Without the prefix, nothing
    matches.
    """
    torch.save({"model": nn.DataParallel(net()).state_dict()}, "model.pt")
    convert = ["convert", "model.pt", "headless.pt", "--select", "model"]
    command(*convert, "--exclude", "head.*", status=1)
    recipe = RECIPES["The weights without the optimizer, the EMA, one part of the model"]
    flags = re.findall(r"`(--exclude .*?)`", recipe)
    assert len(flags) == 1
    command(*convert, *shlex.split(flags[0]))
    names = torch.load("headless.pt")
    assert names and not any("head" in name for name in names)
