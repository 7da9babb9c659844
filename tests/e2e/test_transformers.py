"""transformers as the judge: what DataParallel saved on a GPU loads with ``from_pretrained`` once
it is converted, and gives the same logits.
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
    """The model's state dict as DataParallel saves it on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        wrapped = torch.nn.DataParallel(model).cpu()  # where there is a GPU, DataParallel moves the module to it
        torch.save(wrapped.state_dict(), tmp_path / "pytorch_model.bin")
    assert set(tags_of(tmp_path / "pytorch_model.bin")[1]) == {"cuda:0"}
    return tmp_path / "pytorch_model.bin"


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    """What ``from_pretrained`` reads, but for the weights."""
    model.config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ties(model: Any) -> dict[str, str]:
    """GPT-2's output layer is its input embedding."""
    return {"lm_head.weight": "transformer.wte.weight"} if model.config.tie_word_embeddings else {}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6)).logits


def assert_loads(transformers: ModuleType, folder: Path, model: Any) -> None:
    """Fail unless ``from_pretrained`` finds in `folder` all names of `model` and no other, and the
    result computes the same, bit for bit.
    """
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **EAGER)
    assert not any(info.values()), info
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_what_dataparallel_saved_does_not_load_as_it_is(transformers: ModuleType, saved: Path, folder: Path) -> None:
    """Every name is missing, so the other tests here see it when a conversion does nothing."""
    os.link(saved, folder / saved.name)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert set(info["missing_keys"]) == set(loaded.state_dict())


def test_to_a_bin_for_the_cpu(transformers: ModuleType, model: Any, saved: Path, folder: Path) -> None:
    """``pytorch_model.bin`` without the prefix loads by its own names, ties and all."""
    ckptconv.convert(saved, folder / "pytorch_model.bin", map_location="cpu", strip_prefix="module.")
    state, tags = tags_of(folder / "pytorch_model.bin", weights_only=True)
    assert set(tags) == {"cpu"}
    assert list(state) == list(model.state_dict())
    assert_loads(transformers, folder, model)


def test_to_safetensors(transformers: ModuleType, model: Any, saved: Path, folder: Path) -> None:
    """``model.safetensors`` has what is tied once, says so, and loads."""
    ckptconv.convert(saved, folder / "model.safetensors", strip_prefix="module.")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", **ties(model)}
        assert set(file.keys()) == set(model.state_dict()) - set(ties(model))
    assert_loads(transformers, folder, model)


def test_from_safetensors(transformers: ModuleType, model: Any, folder: Path) -> None:
    """What ``save_pretrained`` writes becomes a ``pytorch_model.bin`` that loads; into the module itself too, but for
    ties, which the library does not record.
    """
    model.save_pretrained(folder)
    ckptconv.convert(folder / "model.safetensors", folder / "pytorch_model.bin", map_location="cuda:1")
    (folder / "model.safetensors").unlink()
    state, tags = tags_of(folder / "pytorch_model.bin", weights_only=True)
    assert set(tags) == {"cuda:1"}
    assert_loads(transformers, folder, model)
    assert type(model)(model.config).load_state_dict(state, strict=False) == (list(ties(model)), [])


def test_there_and_back(model: Any, saved: Path, tmp_path: Path) -> None:
    """Through safetensors and back with the prefix, all names and ties are there again: DataParallel
    loads it strictly.
    """
    ckptconv.convert(saved, tmp_path / "model.safetensors", strip_prefix="module.")
    ckptconv.convert(tmp_path / "model.safetensors", tmp_path / "back.pt", add_prefix="module.")
    back, _ = tags_of(tmp_path / "back.pt", weights_only=True)
    assert all(torch.equal(back[f"module.{name}"], tensor) for name, tensor in model.state_dict().items())
    assert all(back[f"module.{a}"].data_ptr() == back[f"module.{b}"].data_ptr() for a, b in ties(model).items())
    torch.nn.DataParallel(type(model)(model.config)).load_state_dict(back, strict=True)


def test_its_adafactor_follows_weights_that_are_left_out(tmp_path: Path) -> None:
    """The shapes of its rows and columns tell which weight is which, and the next steps are those of a run without
    these weights. Regrouped they cannot be, which is said by their names.
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
