"""Tests of the index of a checkpoint. Each part is correct after each edit, and is computed as rarely as possible."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.cli.main import main
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import make_plan
from ckptconv.edits.options import edits_from
from ckptconv.errors import CkptconvError
from ckptconv.formats import opening
from ckptconv.pickles.graph import Dict, Effect, FrozenSet, gc_paused
from ckptconv.pickles.rows import RowCall
from tests.support import zoo
from tests.support.fresh_index import assert_fresh, check_each_access
from tests.support.sampled import sampled
from tests.support.walks import Walks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:tests.support.zoo")

#: Options of conversions: no edits, edits of one kind, and several kinds together.
EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "devices": {"map_location": {"any": "cuda:1", "cpu": "mps"}},
    "state dict": {"state_dict": True},
    "part": {"select": "model"},
    "globs": {"exclude": ["*0*", "*/*1*"]},
    "part and globs": {"state_dict": True, "include": ["*"], "exclude": ["*bias*"]},
    "names": {"unwrap": True, "rename": [("^", "net.")]},
    "dtypes": {"dtype": ["float16", "*/*=float64"]},
    "compaction": {"compact": True},
    "all": {
        "state_dict": True, "exclude": ["*2*"], "add_prefix": ["module"], "dtype": ["bfloat16"],
        "map_location": "cuda:0", "compact": True,
    },
}  # a table  # fmt: skip


def read(path: Path) -> Checkpoint:
    with Source(path) as source, gc_paused():
        return opening.read(source)


@pytest.mark.untraced
@pytest.mark.parametrize("name", sampled(name for name in zoo.ZOO if name not in ("sets", "long_values")))  # are large
def test_index_is_correct_during_edits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is correct at each access during all edits of all kinds of objects, for every output format."""
    zoo.save(zoo.ZOO[name](), tmp_path / "src.pt", pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    sources = [tmp_path / "src.pt"]
    with suppress(CkptconvError):
        ckptconv.convert(sources[0], tmp_path / "src.safetensors")
        sources.append(tmp_path / "src.safetensors")
    check_each_access(monkeypatch)
    for source in sources:
        for edits, options in EDITS.items():
            for format in ("pt", "safetensors", *(("legacy", "pickle") if edits in ("nothing", "all") else ())):
                checkpoint = read(source)
                with suppress(CkptconvError):
                    make_plan(checkpoint, tmp_path / "out", edits_from(**options), OutputOptions(format=format))


@pytest.mark.untraced
@pytest.mark.parametrize("edits", EDITS)
def test_index_is_correct_for_sharded_sets(edits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is correct for sharded sets that are merged, or split into the same or into other shards."""
    zoo.save({f"model.{i}.weight": torch.ones(100, 4) * i for i in range(6)}, tmp_path / "src.pt")
    for format in ("pt", "safetensors"):
        folder = tmp_path / format
        ckptconv.convert(tmp_path / "src.pt", folder, format=format, max_shard_size="4KB")
        with monkeypatch.context() as watched:
            check_each_access(watched)
            for again in ({}, {"max_shard_size": "6KB"}):
                for target in ("again", "file.pt"):
                    with suppress(CkptconvError):
                        ckptconv.convert(folder, tmp_path / target, dry_run=True, **again, **EDITS[edits])


@pytest.mark.untraced
@pytest.mark.parametrize("name", ["training", "module", "state_dict", "subclass", "objects", "cycles"])
def test_index_is_correct_while_checkpoints_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.save(zoo.ZOO[name](), tmp_path / "src.pt")
    zoo.save({"model": zoo.state_dict()}, tmp_path / "other.pt")
    check_each_access(monkeypatch)
    ckptconv.inspect(tmp_path / "src.pt")
    ckptconv.verify(tmp_path / "src.pt")
    for pair in (("src.pt", "other.pt"), ("other.pt", "src.pt")):
        for options in ({}, {"state_dict": True, "add_prefix": "module"}, {"exclude": ["*weight*"]}):
            with suppress(CkptconvError):
                ckptconv.diff(*(tmp_path / each for each in pair), **options)  # type: ignore[arg-type]
    with suppress(CkptconvError):
        ckptconv.load(tmp_path / "src.pt", "cpu")
    with ckptconv.open(tmp_path / "src.pt") as file:
        for path in file.tensors:
            with suppress(CkptconvError):
                file.load(path)


def test_edit_without_notice_is_found(tmp_path: Path) -> None:
    """An edit that does not call ``changed`` is noticed by :func:`assert_fresh`, on which the tests above depend."""
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "src.pt")
    for part in ("places", "referrers", "nodes", "obstacles"):
        checkpoint = read(tmp_path / "src.pt")
        getattr(checkpoint.index, part)
        root = checkpoint.graph.root
        assert isinstance(root, Dict)
        root.add(Effect("SETITEM", ["more", FrozenSet([])], None))
        with pytest.raises(AssertionError, match="is not so any more"):
            assert_fresh(checkpoint)
        checkpoint.changed()
        getattr(checkpoint.index, part)
        assert_fresh(checkpoint)


def test_outdated_index_computes_no_new_parts(tmp_path: Path) -> None:
    """An outdated index keeps the parts that it has computed, and refuses to compute others."""
    torch.save({"w": torch.ones(2)}, tmp_path / "src.pt")
    checkpoint = read(tmp_path / "src.pt")
    before = checkpoint.index
    assert [place.path for place in before.places] == [".", "w"]
    checkpoint.changed()
    assert [place.path for place in before.places] == [".", "w"]
    with pytest.raises(AssertionError, match="has changed since"):
        _ = before.nodes
    assert checkpoint.index.nodes


# Number of walks over the graph


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """Return the path of a checkpoint with a model, an optimizer with twice as many tensors, and a class that needs
    code.
    """
    model = {f"module.layers.{i}.weight": torch.ones(2, 2) for i in range(50)}
    state = {i: {"exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)} for i in range(50)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [*range(50)]}]}
    zoo.save({"model": model, "optimizer": optimizer, "args": argparse.Namespace(lr=0.1)}, tmp_path / "src.pt")
    return tmp_path / "src.pt"


@pytest.mark.parametrize(
    ("words", "nodes", "places"),
    [
        # Nodes: the part, the rest of the checkpoint, and the remainder of the part. Places: the checkpoint, the part,
        # and its remainder.
        (["convert", "-q", "{src}", "{dst}.safetensors", "--exclude", "*.1.*"], 1.7, 1.8),
        (["convert", "-q", "{src}", "{dst}.pt", "--state-dict", "--exclude", "*.1.*"], 1.7, 1.8),
        (["convert", "-q", "{src}", "{dst}.pt", "--exclude", "*.1.*", "--drop", "optimizer"], 1.7, 2.1),
        # One walk determines what the output still needs, because the source names a class that needs code.
        (["convert", "-q", "{src}", "{dst}.pt", "--to", "cpu"], 1, 1),
        (["convert", "-q", "{src}", "{dst}.pt", "--to", "cpu", "--strip-prefix", "module"], 1, 1),
        # The checkpoint, twice the part that loads, the part of the optimizer, the remainder without the class, and
        # again the checkpoint in plain form.
        (["inspect", "{src}"], 5.2, 2),
    ],
)
def test_how_often_the_graph_is_walked(
    words: list[str], nodes: float, places: float, training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command walks over at most `nodes` times the nodes and `places` times the places of the complete graph."""
    index = read(training).index
    whole = len(index.nodes), len(index.every_place)
    walks = Walks(monkeypatch)
    assert main([word.format(src=training, dst=training.with_name("dst")) for word in words]) == 0
    assert walks.of("walk", whole[0]) <= nodes
    assert 1 <= walks.of("find_places", whole[1]) <= places


def test_places_that_were_forgotten_are_found_again(tmp_path: Path) -> None:
    """Places that are computed again have the same paths and nodes as before, and the tensors remain the same
    objects.
    """
    torch.save({"a": [torch.ones(2), None], "b": {"c": 1}}, tmp_path / "a.pt")
    with Source(tmp_path / "a.pt") as source, gc_paused():
        index = opening.read(source).index
        before, tensors = [(place.path, place.node) for place in index.every_place], index.tensors
        assert index.places
        index.forget_places()
        assert vars(index).keys().isdisjoint({"every_place", "places"})
        after = [(place.path, place.node) for place in index.every_place]
        assert after == before and len(after) == 6 and index.tensors is tensors
        assert [place.path for place in index.places] == [".", "a", "a[0]", "b"]


def test_the_graph_is_freed_before_the_output_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the source is freed before the output is checked, because the check reads another graph of the same
    size.
    """
    torch.save({"a": torch.ones(2), "b": frozenset("c")}, tmp_path / "a.pt", pickle_protocol=4)
    left: list[object] = []
    with Source(tmp_path / "a.pt") as source, gc_paused():
        checkpoint = opening.read(source)
        monkeypatch.setattr(
            "ckptconv.conversion.plan.prove_that_it_loads",
            lambda *_: left.extend([checkpoint.graph.root, checkpoint.tensors, checkpoint.references]),
        )
        make_plan(checkpoint, tmp_path / "out.pt", edits_from(loadable=True), OutputOptions())
    assert left == [None, {}, []]


def test_storages_are_found_without_the_content_of_rows(tmp_path: Path) -> None:
    """Storages are found without the nodes inside of rows, because creating those of 60,000 rows would take seconds."""
    part, other = torch.ones(2), torch.ones(3)
    large = {str(i): torch.ones(4) for i in range(2000)} | {"part": part}
    torch.save({"a": large, "b": [part, other]}, tmp_path / "a.pt")
    with Source(tmp_path / "a.pt") as source, gc_paused():
        checkpoint = opening.read(source)
        rows = [node for node in checkpoint.graph.outer_calls if isinstance(node, RowCall) and node.row]
        inside = checkpoint.index.storages_below(checkpoint.places[1].node)
        assert len(rows) > 1900 and all(node.row for node in rows)
        assert len(inside) == 2001
        assert set(inside) == {info.storage for name, info in checkpoint.tensors.items() if name.startswith("a/")}
        _ = [node.args for node in rows]
        assert checkpoint.index.storages_below(checkpoint.places[1].node) == inside
