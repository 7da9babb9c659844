"""Strangers' checkpoints: every zip of the corpus is converted, or refused for what it is; torch is the judge where its safe loader takes the source."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import assert_same, tags_of

import ckptconv
from ckptconv import formats
from ckptconv.errors import UnsupportedError
from ckptconv.graph import (
    Blob,
    ByteArray,
    Call,
    Extension,
    Global,
    Graph,
    Node,
    PersistentId,
    Py2String,
    Tuple,
    Value,
    children,
)
from ckptconv.pickles import parse
from ckptconv.sources import Source


@pytest.fixture(scope="module")
def manifest(corpus: Path) -> list[dict[str, str]]:
    """The rows of manifest.csv that are zips, with the whole path."""
    with (corpus / "manifest.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["container"].startswith(("zip", "torchscript"))]
    assert len(rows) > 30
    return [{**row, "path": str(corpus / row["path"])} for row in rows]


@pytest.fixture(scope="module")
def checkpoints(manifest: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those that are torch's zip format."""
    return [row for row in manifest if row["container"].startswith("zip")]


def test_torchscript_is_refused(manifest: list[dict[str, str]], tmp_path: Path) -> None:
    """A TorchScript archive is said to be one, and nothing is written; so is what torch 1.0 wrote, in other words."""
    scripts = [row for row in manifest if row["container"].startswith("torchscript")]
    assert scripts
    for row in scripts:
        with pytest.raises(UnsupportedError, match=r"zip archive|TorchScript"):
            ckptconv.convert(row["path"], tmp_path / "dst.pt", map_location="cpu")
    assert list(tmp_path.iterdir()) == []


def test_equal_where_torch_can_load(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """``to cpu``: what torch's safe loader gives is equal, and every tag says cpu; ``to cuda:1``: equal again, and every tag says cuda:1."""
    loadable = [row for row in checkpoints if row["weights_only_ok"] == "yes"]
    assert len(loadable) > 20
    for row in loadable:
        wanted = torch.load(row["path"], map_location="cpu", weights_only=True)
        for device in ("cpu", "cuda:1"):
            ckptconv.convert(row["path"], tmp_path / "dst.pt", map_location=device, force=True)
            found, tags = tags_of(tmp_path / "dst.pt", weights_only=True)
            assert_same(wanted, found)
            assert tags == [device] * int(row["n_storages"]), row["path"]


def test_graphs_are_equal_but_for_the_tags(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """Of every file, loadable or not, the pickle says the same in the same order with the same sharing; records have the same bytes."""
    for row in checkpoints:
        for device in ("cpu", "cuda:1"):
            ckptconv.convert(row["path"], tmp_path / "dst.pt", map_location=device, force=True)
            source, output = records(Path(row["path"])), records(tmp_path / "dst.pt")
            assert_same_graph(graph(source.pop("data.pkl")), graph(output.pop("data.pkl")), device)
            layout_records = (".format_version", ".storage_alignment", ".data/serialization_id")
            assert output == {name: data for name, data in source.items() if name not in layout_records}, row["path"]


def test_without_edits_the_pickle_is_the_same_bytes(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """Every pickle in the corpus is written again byte for byte."""
    for row in checkpoints:
        ckptconv.convert(row["path"], tmp_path / "dst.pt", force=True)
        assert records(Path(row["path"]))["data.pkl"] == records(tmp_path / "dst.pt")["data.pkl"], row["path"]


def test_the_manifest_agrees(checkpoints: list[dict[str, str]]) -> None:
    """Storages, tensors, tags and dtypes are as many as the manifest counts: one tag and one dtype for each storage."""
    for row in checkpoints:
        with Source(row["path"]) as source:
            checkpoint = formats.read(source)
        storages = checkpoint.storages.values()
        kinds = {info.storage: info.dtype for info in checkpoint.tensors.values() if info.storage}
        assert (len(storages), len(checkpoint.tensors)) == (int(row["n_storages"]), int(row["n_tensors"])), row["path"]
        assert Counter(storage.device for storage in storages) == counts(row["locations"]), row["path"]
        assert Counter(kinds.values()) == counts(row["dtypes"]), row["path"]


def counts(text: str) -> Counter[str]:
    """``cuda:0x188 cpux1`` as numbers."""
    return Counter({kind: int(n) for kind, n in (word.rsplit("x", 1) for word in text.split())})


def records(path: Path) -> dict[str, bytes]:
    """The records of the checkpoint at PATH, as torch reads them."""
    reader = torch._C.PyTorchFileReader(str(path))
    return {name: reader.get_record(name) for name in reader.get_all_records()}


def graph(pickle: bytes) -> tuple[Graph, bytes]:
    """PICKLE's graph, and its bytes, in which the long texts are."""
    return parse(lambda offset, n: pickle[offset : offset + n], len(pickle), where="pickle")[0], pickle


def assert_same_graph(left: tuple[Graph, bytes], right: tuple[Graph, bytes], tag: str) -> None:
    """Fail unless two graphs correspond node for node, what happens in them in the same order, where the right one's storages are on TAG."""
    partner: dict[int, int] = {}
    back: dict[int, int] = {}
    todo: list[tuple[Value, Value]] = [(left[0].root, right[0].root)]
    todo += zip(left[0].discarded, right[0].discarded, strict=True)
    assert len(left[0].calls) == len(right[0].calls)
    while todo:
        a, b = todo.pop()
        assert type(a) is type(b)
        if not isinstance(a, Node):
            assert repr(a) == repr(b)  # NaN, 1 and True
            continue
        assert partner.setdefault(id(a), id(b)) == id(b), "sharing differs"
        known = id(b) in back
        assert back.setdefault(id(b), id(a)) == id(a), "sharing differs"
        if not known:
            assert own_facts(a, left[1]) == own_facts(b, right[1])
            parts = children(a), children(b)
            if isinstance(a, PersistentId):
                (a_id,), (b_id,) = parts
                assert b_id.items[3] == tag
                parts = without_tag(a_id), without_tag(b_id)
            todo += zip(*parts, strict=True)


def without_tag(storage: Tuple) -> list[Value]:
    """A persistent id but for its location; its tuple is the pickle's own, shared with nothing."""
    return [*storage.items[:3], *storage.items[4:]]


def own_facts(node: Node, pickle: bytes) -> Any:
    """What NODE says beside its parts."""
    if isinstance(node, Global):
        return node.module, node.name
    if isinstance(node, (Py2String, ByteArray)):
        return node.data
    if isinstance(node, Blob):
        return node.kind, pickle[node.offset : node.offset + node.length]
    if isinstance(node, Extension):
        return node.code
    effects = [(effect.opcode, effect.order, len(effect.values)) for effect in getattr(node, "effects", ())]
    call = (node.kind, node.order, node.kwargs is None) if isinstance(node, Call) else None
    return call, effects, node.order if isinstance(node, PersistentId) else None
