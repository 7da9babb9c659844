"""RECIPES.md holds: each error is torch's own and comes up before, each command runs as it stands, and the error is gone after."""

from __future__ import annotations

import re
import shlex
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptconv
from ckptconv.cli import main

ROOT = Path(__file__).parent.parent
RECIPES = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", (ROOT / "RECIPES.md").read_text(), re.MULTILINE))


def net() -> nn.Module:
    """A model whose names are those of the recipes."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 2, 3), features=nn.Sequential(nn.Linear(2, 2)), layers=nn.ModuleList([nn.Linear(2, 2)]), head=nn.Linear(2, 2)
        )
    )  # fmt: skip


class Arguments:
    """A class that nobody has told torch of."""

    lr = 0.1


def load(name: str = "model.pt", **options: Any) -> Any:
    """What somebody who knows nothing of ckptconv types."""
    return torch.load(name, **options)


def into_net(name: str) -> None:
    net().load_state_dict(torch.load(name, map_location="cpu"), strict=True)


def on_gpu() -> Callable[[], Any]:
    zoo.save(net().state_dict(), "model.pt", tags=["cuda:0"])
    return load


def on_second_gpu() -> Callable[[], Any]:
    zoo.save(net().state_dict(), "model.pt", tags=["cuda:0", "cuda:1"])
    return load


def wrapped() -> Callable[[], Any]:
    torch.save(nn.DataParallel(net()).state_dict(), "model.pt")
    return lambda: into_net("model.pt")


def plain() -> Callable[[], Any]:
    torch.save(net().state_dict(), "model.pt")
    return lambda: nn.DataParallel(net()).load_state_dict(torch.load("model.pt"), strict=True)


def inner() -> Callable[[], Any]:
    model = net()
    model.features = nn.DataParallel(model.features)
    torch.save(model.state_dict(), "model.pt")
    return lambda: into_net("model.pt")


def compiled() -> Callable[[], Any]:
    torch.save(torch.compile(net()).state_dict(), "model.pt")
    return lambda: into_net("model.pt")


def activations() -> Callable[[], Any]:
    model = net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    torch.save({f"{name}": tensor for name, tensor in with_wrappers(model).items()}, "model.pt")
    return lambda: into_net("model.pt")


def with_wrappers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The names as they are inside: the wrapper's own hook hides them in ``state_dict()`` of its newer versions."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def with_class() -> Callable[[], Any]:
    torch.save({"state_dict": net().state_dict(), "args": Arguments()}, "model.pt")
    return load


def of_protocol_4() -> Callable[[], Any]:
    torch.save(net().state_dict(), "model.pt", pickle_protocol=4)
    return load


def with_lost_class() -> Callable[[], Any]:
    torch.save({"state_dict": net().state_dict(), "args": Arguments()}, "old.pt")
    data = Path("old.pt").read_bytes().replace(b"ctest_recipes\nArguments", b"cmodels______\nArguments")
    assert b"models______" in data
    Path("model.pt").write_bytes(without_checksums(data))
    return lambda: torch.load("model.pt", weights_only=False)


def without_checksums(data: bytes) -> bytes:
    """The archive DATA, written anew by torch around its changed pickle."""
    Path("changed.pt").write_bytes(data)
    reader = torch._C.PyTorchFileReader("changed.pt")
    writer = torch._C.PyTorchFileWriter("again.pt")
    for name in reader.get_all_records():
        if name not in (".data/serialization_id", "version", ".format_version", ".storage_alignment"):
            record = reader.get_record(name)
            writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return Path("again.pt").read_bytes()


def tied() -> Callable[[], Any]:
    model = net()
    model.head.weight = model.features[0].weight
    torch.save(model.state_dict(), "model.pt")
    return lambda: save_file(torch.load("model.pt"), "out.safetensors")


def training() -> Callable[[], Any] | None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    zoo.save(
        {"model": model.state_dict(), "ema": model.state_dict(), "optimizer": optimizer.state_dict()},
        "model.pt",
        tags=["cuda:0"],
    )
    return None


def with_rng() -> Callable[[], Any]:
    state = {"model": net().state_dict(), "rng": torch.get_rng_state()}
    zoo.save(state, "model.pt", tags=["cuda:0"])
    return lambda: torch.set_rng_state(torch.load("model.pt", map_location="meta")["rng"])


def of_unknown_device() -> Callable[[], Any]:
    zoo.save(net().state_dict(), "model.pt", tags=["npu:0"])
    return load


def cut() -> Callable[[], Any]:
    torch.save(net().state_dict(), "whole.pt")
    Path("model.pt").write_bytes(Path("whole.pt").read_bytes()[:1500])
    return load


def of_before() -> Callable[[], Any] | None:
    torch.save(net().state_dict(), "model.pt", _use_new_zipfile_serialization=False)
    return None


def views() -> Callable[[], Any] | None:
    torch.save({"a": torch.randn(100_000)[:10]}, "model.pt")
    return None


def tags(name: str) -> set[str]:
    return set(ckptconv.inspect(name)["devices"])


def loads_into(name: str) -> Callable[[], Any]:
    return lambda: into_net(name)


def keeps_the_ties() -> None:
    model = net()
    model.head.weight = model.features[0].weight
    load_model(model, "model.safetensors")


def is_small() -> None:
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


#: What inspect says of what cannot be read.
UNREAD = {cut: "bytes are missing", of_before: "before 1.6"}
#: Heading: how to come to the error (None: nothing raises it on any machine), and what has to work after.
STORIES: dict[str, tuple[Callable[[], Callable[[], Any] | None], Callable[[], Any]]] = {
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False": (on_gpu, loads_into("cpu.pt")),
    "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1": (
        on_second_gpu, lambda: tags("first.pt") == {"cuda:0"} or pytest.fail("a tag is left"),
    ),
    'Missing key(s) in state_dict: "conv.weight" ... Unexpected key(s) in state_dict: "module.conv.weight"': (wrapped, loads_into("plain.pt")),
    'Missing key(s) in state_dict: "module.conv.weight" ... Unexpected key(s) in state_dict: "conv.weight"': (
        plain, lambda: nn.DataParallel(net()).load_state_dict(torch.load("ddp.pt"), strict=True),
    ),
    'Unexpected key(s) in state_dict: "features.module.0.weight"': (inner, loads_into("plain.pt")),
    'Unexpected key(s) in state_dict: "_orig_mod.conv.weight"': (compiled, loads_into("plain.pt")),
    'Unexpected key(s) in state_dict: "layers.0._checkpoint_wrapped_module.weight"': (activations, loads_into("plain.pt")),
    "UnpicklingError: Weights only load failed": (with_class, loads_into("weights.pt")),
    "UnpicklingError: Weights only load failed ... Unsupported operand 149": (of_protocol_4, loads_into("loadable.pt")),
    "ModuleNotFoundError: No module named 'models'": (with_lost_class, loads_into("weights.pt")),
    "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk": (tied, keeps_the_ties),
    "torch.cuda.OutOfMemoryError when training is resumed": (training, lambda: load("cpu.pt")),
    "Killed: out of memory on a file that is larger than the RAM": (training, lambda: None),
    "TypeError: RNG state must be a torch.ByteTensor": (with_rng, resumes),
    "RuntimeError: don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)": (
        of_unknown_device, loads_into("cpu.pt"),
    ),
    "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory": (cut, lambda: None),
    "The file is far too big": (views, is_small),
    "The weights without the optimizer, the EMA, one part of the model": (training, takes_parts),
    "Names and shapes without loading": (training, lambda: None),
    "AttributeError: 'Adam' object has no attribute 'to'": (
        lambda: lambda: torch.optim.Adam(net().parameters()).to("cpu"), lambda: None,  # type: ignore[attr-defined]
    ),
    "No space left on device, and the old checkpoint is gone": (lambda: None, lambda: load("last.pt")),
    "Not read by this version": (of_before, lambda: None),
}  # fmt: skip


def parts(heading: str) -> list[str]:
    """What of HEADING stands in the exception's text."""
    text = re.sub(r"^[\w.]+: ", "", heading) if "Error: " in heading.split(" ")[0] + " " else heading
    return [part.strip() for part in re.split(r"\.\.\.|\(tagged|'models'", text) if part.strip(" )")]


def test_every_recipe_has_a_story() -> None:
    """And the other way round."""
    assert list(RECIPES) == list(STORIES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("heading", STORIES)
def test_the_error_comes_up_and_goes(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch says what the heading says; the recipe's commands run; what failed works."""
    monkeypatch.chdir(tmp_path)
    before, after = STORIES[heading]
    attempt = before()
    gpus = torch.cuda.device_count()
    if attempt and ("CUDA device" not in heading or gpus == (1 if "device 1" in heading else 0)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, the heading says
            attempt()
        for part in parts(heading):
            assert part in f"{type(caught.value).__name__}: {caught.value}", str(caught.value)
    shell = [
        line for block in re.findall(r"```sh\n(.*?)```", RECIPES[heading], re.DOTALL) for line in block.splitlines()
    ]
    python = re.findall(r"```python\n(.*?)```", RECIPES[heading], re.DOTALL)
    assert shell or python
    for line in shell:
        status = main(shlex.split(line)[1:])
        assert status == (1 if before in UNREAD else 0), (line, capsys.readouterr().err)
    for code in python:
        exec(compile(code, heading, "exec"), {})
    if before in UNREAD:
        assert UNREAD[before] in capsys.readouterr().err
    after()
