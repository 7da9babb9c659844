"""End-to-end tests of rows: all results are the same as with the pickle machine that creates every node."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ckptconv import convert, inspect
from ckptconv.errors import CkptconvError
from ckptconv.inspection.verification import verify
from ckptconv.pickles import parser, rows
from ckptconv.pickles.machine import PickleMachine
from tests.support.archives import records_of, rezipped
from tests.support.writers import sharded

_EDITS: dict[str, dict[str, Any]] = {
    "to": {"map_location": "cpu"},
    "map": {"map_location": {"cuda:0": "cuda:1", "cpu": "cuda:0"}},
    "strip": {"map_location": "cpu", "strip_prefix": "module."},
    "part": {"select": "model", "exclude": ["*.3.*"]},
    "dtype": {"dtype": "bfloat16"},
    "compact": {"compact": True, "map_location": "cpu"},
    "loadable": {"loadable": True},
    "safetensors": {"select": "model", "copy_tied": True},
    "legacy": {"format": "legacy", "map_location": "cpu"},
}


def _checkpoint(tag: Callable[[Any], str]) -> bytes:
    """Return a training checkpoint of about two hundred tensors with parameters, views, ties, empty tensors and
    scalars.
    """
    model: dict[str, Any] = {}
    for i in range(30):
        model[f"module.{i}.weight"] = torch.nn.Parameter(torch.full((4, 3), float(i)))
        model[f"module.{i}.bias"] = torch.full((4,), float(i), dtype=torch.float16 if i % 2 else torch.float32)
        model[f"module.{i}.steps"] = torch.tensor(i)
    model["module.tied"] = model["module.0.bias"]
    model["module.view"] = model["module.1.weight"].data[1:, :2]
    model["module.empty"] = torch.zeros(0, 3)
    moments = {i: {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 3), "at": f"cuda:{i % 2}"} for i in range(30)}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [*range(30)]}]}
    given = {"model": model, "optimizer": optimizer, "extra": [torch.ones(2, 2, requires_grad=True) for _ in range(9)]}
    stream = io.BytesIO()
    before = torch.serialization.location_tag
    torch.serialization.location_tag = tag
    try:
        torch.save(given, stream)
    finally:
        torch.serialization.location_tag = before
    return stream.getvalue()


_CHECKPOINTS = {
    "one text": _checkpoint(lambda storage: "cuda:0"),
    "a text each": _checkpoint(lambda storage: f"cuda:{storage.nbytes() % 2}"),
}


def _result(data: bytes, folder: Path, edits: dict[str, Any], suffix: str) -> tuple[object, ...]:
    """Return the results of `inspect` and `verify` and the output of `convert`, or their errors."""
    src, dst = folder / "src.pt", folder / f"dst{suffix}"
    src.write_bytes(data)
    said: list[object] = []
    for ask in (lambda: inspect(src).as_dict(), lambda: verify(src).as_dict(), lambda: convert(src, dst, **edits)):
        try:
            found = ask()
            said.append(found if isinstance(found, dict) else dst.read_bytes())
        except CkptconvError as error:
            said.append(f"{type(error).__name__}: {error}")
    dst.unlink(missing_ok=True)
    return tuple(said)


def _both(
    data: bytes, folder: Path, edits: dict[str, Any], monkeypatch: pytest.MonkeyPatch, suffix: str = ".pt"
) -> tuple[object, ...]:
    """Return the result for `data`. Fail if it differs without rows."""
    found = _result(data, folder, edits, suffix)
    with monkeypatch.context() as patch:
        patch.setattr(parser, "RowMachine", PickleMachine)
        expected = _result(data, folder, edits, suffix)
    assert found == expected
    return found


@pytest.mark.parametrize("edits", _EDITS)
@pytest.mark.parametrize("tags", _CHECKPOINTS)
def test_rows_change_nothing(tags: str, edits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results for a checkpoint with many rows are the same with and without rows, for every edit."""
    met: Counter[str] = Counter()
    one, items = rows.RowMachine._read_one, rows.RowMachine._read_items
    monkeypatch.setattr(rows.RowMachine, "_read_one", lambda *args: met.update(row=(is_so := one(*args))) or is_so)
    monkeypatch.setattr(
        rows.RowMachine, "_read_items", lambda *args: met.update(row=len(args[-1]) * (is_so := items(*args))) or is_so
    )
    suffix = ".safetensors" if edits == "safetensors" else ".pt"
    _, _, written = _both(_CHECKPOINTS[tags], tmp_path, _EDITS[edits], monkeypatch, suffix)
    assert isinstance(written, bytes), written
    assert met["row"] > 300


@pytest.mark.parametrize("seed", range(12))
def test_rows_change_nothing_in_damaged_pickles(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results for a damaged pickle, with one or three changed bytes, are the same with and without rows."""
    random = Random(seed)
    whole = random.choice([*_CHECKPOINTS.values()])
    pickle = bytearray(records_of(whole)["data.pkl"])
    for _ in range(random.choice((1, 1, 3))):
        at = random.randrange(2500, len(pickle))
        pickle[at] = random.choice((random.randrange(256), (pickle[at] + 1) % 256, *b"rhjXK)tRQ(\x88\x89\x86\x87"))
    _both(rezipped(whole, {"data.pkl": bytes(pickle)}), tmp_path, _EDITS["to"], monkeypatch)


def test_rows_of_merged_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are merged keep their order, and torch's safe loader reads the output. It is the same without
    rows.
    """
    shards = [{f"{shard}.layers.{i}.weight": torch.full((2,), float(i)) for i in range(50)} for shard in "ab"]
    folder = sharded(tmp_path / "shards", *shards)
    weight_map = {
        name: file.name for file, shard in zip(sorted(folder.iterdir()), shards, strict=True) for name in shard
    }
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    written = tmp_path / "whole.pt"
    convert(folder, written)
    assert [*torch.load(written, weights_only=True)] == [*weight_map]
    found = written.read_bytes()
    monkeypatch.setattr(parser, "RowMachine", PickleMachine)
    convert(folder, written, force=True)
    assert found == written.read_bytes()
