"""Conversions that are checked with transformers. ``from_pretrained`` loads converted DataParallel checkpoints, and the
logits are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

import ckptconv
from tests.support.judge import tags_of
from tests.support.tiny_models import EAGER


@pytest.fixture
def saved(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state dict of the model, saved by DataParallel on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        wrapped = torch.nn.DataParallel(model).cpu()  # with a GPU, DataParallel moves the module to it
        torch.save(wrapped.state_dict(), tmp_path / "pytorch_model.bin")
    assert set(tags_of(tmp_path / "pytorch_model.bin")[1]) == {"cuda:0"}
    return tmp_path / "pytorch_model.bin"


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """Return a folder that ``from_pretrained`` can load once it contains weights."""
    model.config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ties(model: Any) -> dict[str, str]:
    """Return the tied name and the name that it refers to. The output layer of GPT-2 is its input embedding."""
    return {"lm_head.weight": "transformer.wte.weight"} if model.config.tie_word_embeddings else {}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6)).logits


def assert_loads(transformers: ModuleType, folder: Path, model: Any) -> None:
    """Fail unless ``from_pretrained`` loads exactly the names of `model` from `folder`, and the logits are
    identical.
    """
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **EAGER)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_an_unconverted_checkpoint_does_not_load(transformers: ModuleType, saved: Path, folder: Path) -> None:
    """Without a conversion, every name is missing. The other tests would therefore notice a conversion without
    effect.
    """
    os.link(saved, folder / saved.name)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert set(info["missing_keys"]) == set(loaded.state_dict())


def test_conversion_to_a_bin_file(transformers: ModuleType, model: Any, saved: Path, folder: Path) -> None:
    """``pytorch_model.bin`` without the prefix has the names and ties of the model, and loads."""
    ckptconv.convert(saved, folder / "pytorch_model.bin", map_location="cpu", strip_prefix="module.")
    state, tags = tags_of(folder / "pytorch_model.bin", weights_only=True)
    assert set(tags) == {"cpu"}
    assert list(state) == list(model.state_dict())
    assert_loads(transformers, folder, model)


def test_to_safetensors(transformers: ModuleType, model: Any, saved: Path, folder: Path) -> None:
    """``model.safetensors`` contains each tied tensor once, records the tie in its metadata, and loads."""
    ckptconv.convert(saved, folder / "model.safetensors", strip_prefix="module.")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **ties(model)}
        assert set(file.keys()) == set(model.state_dict()) - set(ties(model))
    assert_loads(transformers, folder, model)


def test_from_safetensors(transformers: ModuleType, model: Any, folder: Path) -> None:
    """A file from ``save_pretrained`` is converted to a ``pytorch_model.bin`` that loads. The module itself lacks only
    the tied names, which the library does not record.
    """
    model.save_pretrained(folder)
    ckptconv.convert(folder / "model.safetensors", folder / "pytorch_model.bin", map_location="cuda:1")
    (folder / "model.safetensors").unlink()
    state, tags = tags_of(folder / "pytorch_model.bin", weights_only=True)
    assert set(tags) == {"cuda:1"}
    assert_loads(transformers, folder, model)
    assert type(model)(model.config).load_state_dict(state, strict=False) == (list(ties(model)), [])


def test_there_and_back(model: Any, saved: Path, tmp_path: Path) -> None:
    """A conversion to safetensors and back with the prefix restores all names and ties. DataParallel loads the result
    with ``strict=True``.
    """
    ckptconv.convert(saved, tmp_path / "model.safetensors", strip_prefix="module.")
    ckptconv.convert(tmp_path / "model.safetensors", tmp_path / "back.pt", add_prefix="module.")
    back, _ = tags_of(tmp_path / "back.pt", weights_only=True)
    assert all(torch.equal(back[f"module.{name}"], tensor) for name, tensor in model.state_dict().items())
    assert all(back[f"module.{a}"].data_ptr() == back[f"module.{b}"].data_ptr() for a, b in ties(model).items())
    torch.nn.DataParallel(type(model)(model.config)).load_state_dict(back, strict=True)


def test_adafactor_follows_excluded_weights(tmp_path: Path) -> None:
    """If weights are excluded, the state of Adafactor loses their entries, because the shapes of rows and columns
    identify them. Training continues as without these weights. Regrouping is refused, and the error names the state.
    """
    optimization = pytest.importorskip("transformers.optimization")

    def run(net: torch.nn.ModuleDict, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = sum(module(torch.full((1, 4), step + 1.0)).square().sum() for module in net.values())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(0)
    net = torch.nn.ModuleDict({f"n{n}": torch.nn.Linear(4, n) for n in (3, 5, 2)})
    optimizer = optimization.Adafactor(net.parameters())
    run(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", exclude="n5.*")
    made = torch.load(tmp_path / "b.pt")
    fewer = torch.nn.ModuleDict({name: torch.nn.Linear(4, int(name[1])) for name in ("n3", "n2")})
    fewer.load_state_dict(made["model"])
    after = optimization.Adafactor(fewer.parameters())
    after.load_state_dict(made["optimizer"])
    del net["n5"]
    assert run(fewer, after) == run(net, optimizer)
    with pytest.raises(ckptconv.CkptconvError, match=r"exp_avg_sq_row \[3\], exp_avg_sq_col \[4\]"):
        ckptconv.convert(tmp_path / "a.pt", tmp_path / "c.pt", regroup="n3.* = a.*[1], b.*[2]", optimizer="names")
