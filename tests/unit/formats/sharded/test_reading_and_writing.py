"""Checkpoints in shards, which are read and edited as one checkpoint, and written to the same shards, to other shards
or to one file. transformers, huggingface_hub and torch load the results.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import load_state_dict_from_file, load_torch_model, save_torch_state_dict
from hypothesis import given, reject
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.conversion import convert as conversion
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import Report
from ckptconv.conversion.targets import Request
from ckptconv.edits.options import edits_from
from ckptconv.errors import (
    CollisionError,
    InputError,
    MalformedError,
    NoMatchError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptconv.formats import opening
from ckptconv.formats.sharded import reading
from tests.support.archives import rezip, without_crc32, without_sums
from tests.support.conversions import Error, ends_in, metadata_of
from tests.support.judge import assert_same, tags_of
from tests.support.no_files import NO_FILES
from tests.support.sampled import sampled
from tests.support.writers import sharded
from tests.support.zoo import tagging

State = dict[str, torch.Tensor]
#: Saves a set without an index, each file with torch.
save_shards = partial(sharded, stem="model")


def convert(
    src: Path,
    dst: Path,
    *,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    copy_tied: bool = False,
    force: bool = False,
    **edits: Any,
) -> Report:
    """Convert `src` to a file if `dst` has a suffix, and otherwise to a folder."""
    output = OutputOptions(format=format, max_shard_size=max_shard_size, copy_tied=copy_tied, force=force)
    return conversion.run(Request(src, dst, "file", edits_from(**edits), output, is_folder=not dst.suffix))


def some_state() -> State:
    """Return six weights of 400 bytes, and one more name for the first of them."""
    torch.manual_seed(0)
    state = {f"module.{i}.weight": torch.randn(10, 10) for i in range(6)}
    return {**state, "module.tied": state["module.0.weight"]}


def save_set(folder: Path, state: State, *, safe: bool, size: int | str = 900, **kwargs: Any) -> Path:
    """Save `state` in shards, as huggingface_hub writes them, and return `folder`."""
    folder.mkdir(parents=True)
    logging.disable(logging.WARNING)  # warnings that pickles are deprecated
    save_torch_state_dict(dict(state), folder, max_shard_size=size, safe_serialization=safe, **kwargs)
    logging.disable(logging.NOTSET)
    return folder


def index_path(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads(index_path(folder).read_bytes())


def load_set(folder: Path) -> State:
    """Return the tensors of all shards in the index of `folder`, each shard read by its own library."""
    state: State = {}
    for shard in dict.fromkeys(index_of(folder)["weight_map"].values()):
        path = folder / shard
        state |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert set(state) == set(index_of(folder)["weight_map"])
    return state


def assert_equal(left: State, right: State) -> None:
    """Check that both state dicts contain the same names and values, in any order."""
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def refused(kind: type[Error], words: str, src: Path, dst: Path, **options: Any) -> Error:
    """Check that converting `src` to `dst` raises an error of `kind` that contains `words`, and that `dst` does not
    exist. Return the error.
    """
    with ends_in(kind, words, src.parent, dst.parent) as caught:
        convert(src, dst, **options)
    assert not dst.exists()
    return caught.value


@pytest.fixture
def no(tmp_path: Path) -> Path:
    """Return the path of a folder that must not be written."""
    return tmp_path / "no"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the path of the output folder."""
    return tmp_path / "out"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Return the path of one file that contains all weights."""
    torch.save(some_state(), tmp_path / "whole.pt")
    return tmp_path / "whole.pt"


@pytest.fixture(params=[True, False], ids=["safetensors", "bin"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a set of three shards in each of the formats."""
    return save_set(tmp_path / "set", some_state(), safe=request.param)


# Loading by the Hub's libraries


def assert_pretrained(transformers: ModuleType, folder: Path, model: Any, **kwargs: Any) -> None:
    """Check that ``from_pretrained`` finds all of `model` in `folder` and nothing else, and that both models compute
    the same values, bit for bit.
    """
    model.config.save_pretrained(folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **kwargs
    )
    assert not any(info.values()), info
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("safe", "format", "size"),
    sampled(itertools.product((True, False), ("safetensors", "pt"), (None, "40KB", "1GB")), 4),
)
def test_from_pretrained(
    transformers: ModuleType, model: Any, tmp_path: Path, safe: bool, format: str, size: str | None
) -> None:
    """Shards that were saved with the prefix of DataParallel load after the prefix is removed. They can be converted to
    the same shards, other shards, the other format, or one file.
    """
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    save_set(tmp_path / "set", state, safe=safe, size="20KB")
    convert(tmp_path / "set", tmp_path / "out", format=format, max_shard_size=size, strip_prefix="module")
    index = "model.safetensors.index.json" if format == "safetensors" else "pytorch_model.bin.index.json"
    assert [path.name for path in (tmp_path / "out").glob("*.json")] == ([index] if size != "1GB" else [])
    assert_pretrained(transformers, tmp_path / "out", model)


def test_a_variant(transformers: ModuleType, model: Any, tmp_path: Path) -> None:
    """The shards of a variant keep the variant in their names, also with another size, and ``from_pretrained`` finds
    them.
    """
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB", variant="fp16")
    for n, size in enumerate((None, "40KB")):
        out = tmp_path / f"out{n}"
        convert(tmp_path / "set" / "model.safetensors.index.fp16.json", out, max_shard_size=size)
        assert (out / "model.safetensors.index.fp16.json").exists()
        assert_pretrained(transformers, out, model, variant="fp16")


def test_unchanged_sets_have_the_same_bytes(model: Any, tmp_path: Path, out: Path) -> None:
    """If nothing changes, the index and the shards of ``save_pretrained`` are written with the same bytes."""
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB")
    convert(tmp_path / "set", out)
    before = {path.name: path.read_bytes() for path in (tmp_path / "set").glob("*safetensors*")}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert len(before) > 3


def test_huggingface_hub_loads_the_output(saved: Path, tmp_path: Path) -> None:
    """``load_torch_model`` loads a set of new shards strictly, and ``load_state_dict_from_file`` loads each shard."""
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(6)))
    for format in ("safetensors", "pt"):
        out = tmp_path / format
        convert(saved, out, format=format, max_shard_size=1300, strip_prefix="module", exclude="module.tied")
        load_torch_model(model, out, strict=True, safe=format == "safetensors")
        for i, tensor in enumerate(model.state_dict().values()):
            assert torch.equal(tensor, some_state()[f"module.{i}.weight"])
        for shard in set(index_of(out)["weight_map"].values()):
            assert load_state_dict_from_file(out / shard, safe=format == "safetensors")


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_one_file_becomes_the_set_of_huggingface_hub(tmp_path: Path, safe: bool) -> None:
    """Files, positions and the index equal those of ``save_torch_state_dict`` for the same state dict."""
    state = {**some_state(), "big": torch.ones(999), "small": torch.ones(3)}
    torch.save(state, tmp_path / "whole.pt")
    theirs = save_set(tmp_path / "theirs", state, safe=safe)
    format = "safetensors" if safe else "pt"
    convert(tmp_path / "whole.pt", tmp_path / "ours", format=format, max_shard_size=900)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(theirs))
    assert index_of(tmp_path / "ours") == index_of(theirs)
    assert_equal(load_set(tmp_path / "ours"), load_set(theirs))


# Reading a set as one checkpoint


def test_merged_to_one_file(saved: Path, tmp_path: Path) -> None:
    """The output contains all names, and tied names are still tied, however the set stores ties."""
    convert(saved, tmp_path / "out.pt")
    merged = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_equal(merged, some_state())
    assert merged["module.tied"].data_ptr() == merged["module.0.weight"].data_ptr()
    safe = tmp_path / "out.safetensors"
    convert(saved, safe)
    assert metadata_of(safe) == {"format": "pt", "module.tied": "module.0.weight"}
    assert set(load_file(safe)) == set(some_state()) - {"module.tied"}


def test_path_of_an_index(saved: Path, tmp_path: Path) -> None:
    """The path of an index selects its set, even if the folder contains other checkpoints."""
    torch.save({}, saved / "pytorch_model.bin")
    refused(RefusedError, "several checkpoints", saved, tmp_path / "out.pt")
    convert(index_path(saved), tmp_path / "out.pt")
    assert_equal(torch.load(tmp_path / "out.pt", weights_only=True), some_state())


def test_without_an_index(saved: Path, out: Path) -> None:
    """Shards without an index are a set if their names show that all of them exist. The output has an index."""
    names, index = sorted(os.listdir(saved)), index_of(saved)
    index_path(saved).unlink()
    convert(saved, out)
    assert sorted(os.listdir(out)) == names
    assert index_of(out)["weight_map"] == index["weight_map"]


def test_retagged(tmp_path: Path) -> None:
    """The tags in each shard change, and the objects and the file names stay the same."""
    with tagging(["cuda:0"]):
        saved = save_set(tmp_path / "set", some_state(), safe=False)
    report = convert(saved, tmp_path / "out", map_location="cuda:1")
    assert report.changes.devices == {("cuda:0", "cuda:1"): (7, 2400)}
    for path in saved.glob("*.bin"):
        before, after = tags_of(path), tags_of(tmp_path / "out" / path.name)
        assert set(before[1]) == {"cuda:0"} and set(after[1]) == {"cuda:1"}
        assert_same(before[0], after[0])


def test_renamed_across_shards(saved: Path, out: Path, no: Path) -> None:
    """An edit applies to all shards and to the index. Two names that would become one are refused, even if they are in
    different shards.
    """
    convert(saved, out, rename=[(r"^module\.(\d)", r"layers.\1")])
    assert {*index_of(out)["weight_map"]} >= {f"layers.{i}.weight" for i in range(6)}
    load_set(out)
    refused(CollisionError, "become", saved, no, rename=[(r"module\.[05]\.", "module.")])
    refused(NoMatchError, "encoder", saved, no, strip_prefix="encoder")


def test_cast(saved: Path, out: Path) -> None:
    """Tensors of all shards are cast, and the index contains the new size."""
    convert(saved, out, dtype=["bf16", "module.1.*=fp16"])
    expected = {
        name: tensor.to(torch.float16 if ".1." in name else torch.bfloat16) for name, tensor in some_state().items()
    }
    loaded = load_set(out)
    assert_equal(loaded, {name: expected[name] for name in loaded})
    assert set(expected) - set(loaded) <= {"module.tied"}
    assert index_of(out)["metadata"]["total_size"] == 1200


def test_views_of_one_storage_with_different_casts(tmp_path: Path, out: Path) -> None:
    """Views of one storage that are cast to different dtypes are separated in their shard. Another shard can contain
    storages with the same keys.
    """
    flat, c = torch.arange(8.0), torch.ones(4)
    save_shards(tmp_path / "set", {"a": flat[:4], "b": flat[4:]}, {"c": c})
    convert(tmp_path / "set", out, dtype=["a=bf16", "b=fp16", "c=fp64"])
    assert_equal(load_set(out), {"a": flat[:4].bfloat16(), "b": flat[4:].half(), "c": c.double()})
    assert index_of(out)["metadata"] == {"total_size": 48}


def test_a_shard_without_tensors_is_removed(saved: Path, out: Path) -> None:
    """A shard from which all tensors are excluded is removed. The other shards get new numbers, and the index contains
    the remaining tensors.
    """
    convert(saved, out, exclude=["module.2.*", "module.3.*"])
    suffix = next(saved.glob("*-00001-*")).suffix
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index = index_of(out)
    assert set(index["weight_map"].values()) == {f"{stem}-0000{n}-of-00002{suffix}" for n in (1, 2)}
    assert index["metadata"]["total_size"] == 1600
    assert index["weight_map"]["module.4.weight"] == f"{stem}-00002-of-00002{suffix}"
    load_set(out)


@pytest.mark.parametrize("size", [None, "30KB"])
def test_wrong_counts_are_left_out(model: Any, tmp_path: Path, out: Path, size: str | None) -> None:
    """The number of parameters that transformers stores is kept if no tensor is left out. Otherwise it is left behind,
    and the report names it.
    """
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB")
    index = json.loads((tmp_path / "set" / "model.safetensors.index.json").read_bytes())
    convert(tmp_path / "set", tmp_path / "same", format="pt", add_prefix="module")
    kept = index_of(tmp_path / "same")["metadata"]["total_parameters"]
    assert kept == index["metadata"]["total_parameters"]
    norms = "*norm*" if "Llama" in type(model).__name__ else "*ln*"
    report = convert(tmp_path / "set", out, max_shard_size=size, exclude=norms)
    assert "total_parameters" not in index_of(out)["metadata"]
    assert "model.safetensors.index.json/metadata/total_parameters" in [each.path for each in report.left_behind]


def test_in_the_hubs_cache(saved: Path, tmp_path: Path) -> None:
    """A snapshot of links to blobs is a set, by the path of its folder and of its index. A link to a blob that does not
    exist is a missing shard.
    """
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, path in enumerate(sorted(saved.iterdir())):
        os.rename(path, blobs / f"hash{n}")
        os.symlink(f"../../blobs/hash{n}", snapshot / path.name)
    for n, path in enumerate((snapshot, index_path(snapshot))):
        convert(path, tmp_path / f"{n}.pt")
        assert_equal(torch.load(tmp_path / f"{n}.pt", weights_only=True), some_state())
    (blobs / "hash1").unlink()
    refused(MalformedError, r"1 of 3 shards is missing: \w+-00002-of-00003", snapshot, tmp_path / "no.pt")


# Indexes that contradict their shards


def mend(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the index of `saved`."""
    index = index_of(saved)
    change(index)
    index_path(saved).write_text(json.dumps(index))


def contradiction(saved: Path, no: Path, words: str) -> str:
    """Return the hint of the error that is raised for a contradictory set, and whose message begins with `words`."""
    error = refused(MalformedError, words, saved, no)
    assert error.what.startswith(words)
    assert "ckptconv convert" in (error.hint or "")
    return str(error.hint)


def add_ghost(index: dict[str, Any]) -> None:
    """Add a tensor that is in no shard to `index`."""
    index["weight_map"]["ghost"] = index["weight_map"]["module.0.weight"]


def swap(index: dict[str, Any]) -> None:
    """Exchange the shards of two tensors in `index`, so that a reader that uses the index would not find them."""
    places = index["weight_map"]
    places["module.0.weight"], places["module.5.weight"] = places["module.5.weight"], places["module.0.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_ghost, "1 tensor is in no shard, but in the index: 'ghost' not in "),
        (
            lambda index: index["weight_map"].pop("module.3.weight"),
            "1 tensor is in a shard, but not in the index: 'module.3.weight'",
        ),
        (swap, "2 tensors are in a shard other than the index says: "),
    ],
    ids=["missing", "unknown", "swapped"],
)
def test_an_index_that_contradicts_its_shards(
    saved: Path, out: Path, no: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    """An index that contradicts its shards is refused. After it is deleted, as the hint suggests, the set is read."""
    mend(saved, change)
    assert "delete the index" in contradiction(saved, no, words)
    index_path(saved).unlink()
    convert(saved, out)


def test_a_tensor_in_two_shards(saved: Path, no: Path) -> None:
    """A tensor in two shards is refused with and without an index, because it depends on the reader which one
    is used.
    """
    shards = shards_of(saved)
    if shards[0].suffix == ".bin":
        torch.save({**torch.load(shards[1]), "module.0.weight": torch.zeros(1)}, shards[1])
    else:
        content = load_file(shards[1])  # memory-mapped
        shards[1].unlink()
        save_file({**content, "module.0.weight": torch.zeros(1)}, shards[1])
    words = "1 tensor is in more than one shard: 'module.0.weight' in "
    assert "delete the index" not in contradiction(saved, no, words)  # deleting it would not help
    index_path(saved).unlink()
    contradiction(saved, no, words)


def test_custom_names(tmp_path: Path, out: Path, no: Path) -> None:
    """An index and its shards can have any names. If two shards would get the same name, the conversion is refused."""
    saved = tmp_path / "set"
    saved.mkdir()
    index = saved / "the.index.json"
    for n, name in enumerate(("a.bin", "b", "a")):
        torch.save({str(n): torch.ones(n + 1)}, saved / name)
    places = {"0": "a.bin", "1": "b"}
    index.write_text(json.dumps({"weight_map": places}))
    convert(index, out, format="safetensors")
    assert sorted(os.listdir(out)) == ["a.safetensors", "b.safetensors", "the.index.json"]
    assert_equal(load_set(out), {"0": torch.ones(1), "1": torch.ones(2)})
    index.write_text(json.dumps({"weight_map": {**places, "2": "a"}}))
    refused(RefusedError, "the same name", index, no, format="safetensors")
    convert(index, tmp_path / "same")
    assert sorted(os.listdir(tmp_path / "same")) == ["a", "a.bin", "b", "the.index.json"]


@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_a_missing_index(tmp_path: Path, name: str) -> None:
    """An index that does not exist is reported as a missing file, whether the output is a file or a folder."""
    refused(InputError, "No such file", tmp_path / "model.safetensors.index.json", tmp_path / name)


def test_shards_of_older_formats(tmp_path: Path, out: Path) -> None:
    """Shards from before torch 1.6 become zip files with the same names."""
    state = {f"w{n}": torch.full((n,), 2.0) for n in (1, 2)}
    shards = [{name: tensor} for name, tensor in state.items()]
    report = convert(save_shards(tmp_path / "set", *shards, _use_new_zipfile_serialization=False), out)
    assert report.formats[0] == "sharded torch legacy"
    assert_equal(load_set(out), state)
    assert (out / "model-00001-of-00002.bin").read_bytes()[:2] == b"PK"


def shards_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix != ".json")


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_shards_that_are_not_files(saved: Path, no: Path, kind: str) -> None:
    """A FIFO or a folder in the place of a shard is refused without waiting for it."""
    shard = shards_of(saved)[1]
    shard.unlink()
    NO_FILES[kind](shard)
    refused(InputError, kind, saved, no)


def test_shards_that_are_pointers(saved: Path, no: Path) -> None:
    """Shards that are Git LFS pointers are refused as such."""
    for path in shards_of(saved):
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    refused(InputError, "LFS", saved, no)


def test_shards_of_two_formats(tmp_path: Path, no: Path) -> None:
    """A pickle with the suffix of safetensors among shards of safetensors is refused, and the error names both
    formats.
    """
    saved = save_set(tmp_path / "set", some_state(), safe=True)
    path = saved / "model-00002-of-00003.safetensors"
    content = load_file(path)  # memory-mapped
    path.unlink()
    torch.save(content, path)
    refused(UnsupportedError, r"model-00003-of-00003.safetensors is safetensors, model-00002", saved, no)


@pytest.mark.parametrize("content", [[torch.ones(2)], {1: torch.ones(2)}, OrderedDict([(b"a", torch.ones(2))])])
def test_shards_that_are_not_state_dicts(tmp_path: Path, no: Path, content: Any) -> None:
    """A shard that is not a mapping of names to tensors is refused."""
    refused(UnsupportedError, r"not a mapping|not names", save_shards(tmp_path / "set", content), no)


def test_a_name_that_is_twice_in_a_shard(tmp_path: Path, no: Path) -> None:
    """A pickle can contain a name twice. Such a shard is refused, because no index determines which tensor is used."""
    with without_crc32():
        save_shards(tmp_path / "set", {"aa": torch.zeros(1), "bb": torch.ones(1)})
    (path,) = (tmp_path / "set").iterdir()
    path.write_bytes(path.read_bytes().replace(b"X\x02\x00\x00\x00bb", b"X\x02\x00\x00\x00aa"))
    assert refused(MalformedError, "twice", tmp_path / "set", no).got == "'aa'"


def test_deflated_shards_without_checksums(tmp_path: Path) -> None:
    """Deflated shards without checksums are joined. The checksums of the new file are right."""
    state = some_state()
    shards = save_set(tmp_path / "set", state, safe=False)
    for path in shards.glob("*.bin"):
        without_sums(rezip(path, path, method=zipfile.ZIP_DEFLATED))
    convert(shards, tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt")
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    with zipfile.ZipFile(tmp_path / "one.pt") as archive:
        assert archive.testzip() is None
        assert all(record.CRC for record in archive.infolist())


def test_an_index_with_more_in_it(saved: Path, tmp_path: Path) -> None:
    """Unknown keys of an index are left behind, and the report names them. The metadata is kept."""
    more = {"note": "hello", "steps": 7, "nested": {"a": [1]}}
    mend(saved, lambda index: index["metadata"].update(more))
    mend(saved, lambda index: index.update(other=1))
    for n, size in enumerate((None, 1300)):
        report = convert(saved, tmp_path / f"out{n}", max_shard_size=size)
        assert index_of(tmp_path / f"out{n}")["metadata"] == index_of(saved)["metadata"]
        assert f"{index_path(saved).name}/other" in [each.path for each in report.left_behind]
    report = convert(saved, tmp_path / "one", format="safetensors", max_shard_size="1GB")
    assert {each.path.rpartition("/")[2] for each in report.left_behind} == {"other", "steps", "nested"}
    assert metadata_of(tmp_path / "one" / "model.safetensors")["note"] == "hello"


# Other contents of shards


def test_texts_of_safetensors(tmp_path: Path, out: Path) -> None:
    """Each shard keeps its own texts. In one file they are merged, and the report names texts that contradict each
    other.
    """
    saved = tmp_path / "set"
    saved.mkdir()
    for n, texts in enumerate(({"a": "1", "b": "x"}, {"a": "1", "b": "y", "c": "z"}), 1):
        save_file({f"w{n}": torch.ones(n)}, saved / f"model-0000{n}-of-00002.safetensors", metadata=texts)
    report = convert(saved, out)
    assert not report.left_behind
    assert metadata_of(out / "model-00002-of-00002.safetensors") == {"a": "1", "b": "y", "c": "z"}
    report = convert(saved, tmp_path / "one.safetensors")
    assert metadata_of(tmp_path / "one.safetensors") == {"a": "1", "b": "x", "c": "z"}
    assert [(each.path, each.why) for each in report.left_behind] == [
        ("model-00002-of-00002.safetensors/__metadata__/b", "other shards have different text there")
    ]
    for format, size in (("pt", None), ("pt", 4), ("safetensors", 4)):
        report = convert(saved, tmp_path / f"{format}{size}", format=format, max_shard_size=size)
        assert index_of(tmp_path / f"{format}{size}")["metadata"] == {"a": "1", "b": "x", "c": "z", "total_size": 12}
        assert len(report.left_behind) == 1


def test_a_text_that_would_be_a_tie(saved: Path, out: Path) -> None:
    """A text of the index is left behind if it equals a new name in the output, because it would be read as a tie."""
    mend(saved, lambda index: index["metadata"].update(best="1.weight"))
    report = convert(saved, out, format="safetensors", strip_prefix="module")
    assert index_of(out)["metadata"] == {"tied": "0.weight", "total_size": 2400}
    assert "it would be read as a tie" in [each.why for each in report.left_behind]


def test_values_that_are_not_tensors(tmp_path: Path) -> None:
    """A value that is not a tensor stays in its shard, or is in the first one of new shards. In safetensors, the value
    is left behind, and the report names it.
    """
    state = {name: torch.ones(100) for name in "abd"}
    shards = {"a": state["a"], "b": state["b"]}, {"c_extra_state": None, "d": state["d"]}
    saved = save_shards(tmp_path / "set", *shards)
    convert(saved, tmp_path / "same")
    assert torch.load(tmp_path / "same" / "model-00002-of-00002.bin").keys() == {"c_extra_state", "d"}
    convert(saved, tmp_path / "dealt", max_shard_size=400)
    assert list(torch.load(tmp_path / "dealt" / "pytorch_model-00001-of-00003.bin")) == ["a", "c_extra_state"]
    assert index_of(tmp_path / "dealt")["weight_map"]["c_extra_state"] == "pytorch_model-00001-of-00003.bin"
    for size in (None, 400):
        report = convert(saved, tmp_path / f"safe{size}", format="safetensors", max_shard_size=size)
        assert [each.path for each in report.left_behind] == ["c_extra_state"]
        assert_equal(load_set(tmp_path / f"safe{size}"), state)


def test_long_texts(tmp_path: Path) -> None:
    """Long texts, which the parser leaves in the file, are read from the correct shard. The output can be the same
    shards, new shards or one file.
    """
    shards = [{f"w{n}": torch.ones(n), f"{n}_extra_state": str(n) * 100_000} for n in (1, 2, 3)]
    saved = save_shards(tmp_path / "set", *shards)
    convert(saved, tmp_path / "same")
    convert(saved, tmp_path / "dealt", max_shard_size=12)
    convert(saved, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), {key: value for shard in shards for key, value in shard.items()})
    for out in ("same", "dealt"):
        loaded = [torch.load(tmp_path / out / shard) for shard in set(index_of(tmp_path / out)["weight_map"].values())]
        texts = {key: value for shard in loaded for key, value in shard.items() if "extra" in key}
        assert texts == {f"{n}_extra_state": str(n) * 100_000 for n in (1, 2, 3)}


def test_attributes_of_a_state_dict(tmp_path: Path, out: Path) -> None:
    """``_metadata`` cannot be stored in a set, so the report names it, whether the source is a shard or a file."""
    saved = save_shards(tmp_path / "set", torch.nn.Linear(2, 2).state_dict())
    report = convert(saved, out)
    assert [each.path for each in report.left_behind] == ["model-00001-of-00001.bin/._metadata"]
    found = torch.load(out / "model-00001-of-00001.bin")
    assert type(found) is OrderedDict and not hasattr(found, "_metadata")
    convert(saved, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), found)
    for format in ("pt", "safetensors"):
        report = convert(saved / "model-00001-of-00001.bin", tmp_path / format, format=format, max_shard_size=16)
        assert [each.path for each in report.left_behind] == ["._metadata"]


def test_storages_remain_complete_in_the_format_of_torch(tmp_path: Path) -> None:
    """In torch's format, all views of a storage are in one shard, however large the storage is. In safetensors, each
    view is a separate tensor.
    """
    flat = torch.arange(100.0)
    state = {"a": flat[:50], "x": torch.ones(10), "b": flat[50:], "y": torch.ones(10)}
    torch.save(state, tmp_path / "whole.pt")
    convert(tmp_path / "whole.pt", tmp_path / "bin", max_shard_size=50)
    places = index_of(tmp_path / "bin")["weight_map"]
    assert places["a"] == places["b"] and len(set(places.values())) == 3
    assert index_of(tmp_path / "bin")["metadata"]["total_size"] == 480
    shard = torch.load(tmp_path / "bin" / places["a"])
    assert shard["a"].untyped_storage().data_ptr() == shard["b"].untyped_storage().data_ptr()
    convert(tmp_path / "whole.pt", tmp_path / "safe", format="safetensors", max_shard_size=50)
    assert len(set(index_of(tmp_path / "safe")["weight_map"].values())) == 4
    for out in ("bin", "safe"):
        assert_equal(load_set(tmp_path / out), state)


def test_notes_are_on_the_whole_set(tmp_path: Path, out: Path) -> None:
    """Notes count the parameters of the complete set, and report a prefix only if all names of the set have it."""
    source = tmp_path / "source.pt"
    torch.save({name: torch.nn.Parameter(torch.ones(9)) for name in ("module.a", "module.b", "c")}, source)
    of_parameters = "safetensors does not store requires_grad, which {} had"
    report = convert(source, out, format="safetensors", max_shard_size=36)
    assert [*report.notes] == [of_parameters.format("3 parameters")]
    torch.save({f"module.{name}": torch.ones(9) for name in "abc"}, source)
    report = convert(source, tmp_path / "wrapped", format="safetensors", max_shard_size=36)
    assert [*report.notes] == ["every name starts with module.: --strip-prefix module. removes it"]


def test_copied_ties(whole: Path, out: Path) -> None:
    """With ``copy_tied``, each name has its own bytes in any of the shards, and the index counts all of them."""
    convert(whole, out, format="safetensors", max_shard_size=900, copy_tied=True)
    assert_equal(load_set(out), some_state())
    assert index_of(out)["metadata"] == {"total_size": 2800}
    assert len(set(index_of(out)["weight_map"].values())) == 4


def test_a_whole_training_checkpoint(tmp_path: Path, out: Path) -> None:
    """The state dict of a training checkpoint is written to shards, and the report names the other values."""
    torch.save({"state_dict": some_state(), "epoch": 3}, tmp_path / "last.ckpt")
    report = convert(tmp_path / "last.ckpt", out, max_shard_size=900)
    assert_equal(load_set(out), some_state())
    assert [each.path for each in report.left_behind] == ["epoch"]


# Refused conversions


def test_a_part_without_a_state_dict(saved: Path, tmp_path: Path) -> None:
    """The hint for a part without a state dict contains the command that shows the contents."""
    error = refused(RefusedError, "no state dict", saved, tmp_path / "no.safetensors", select=next(iter(some_state())))
    assert error.hint == f"to see the contents: ckptconv inspect {saved}"


def test_a_folder_without_a_size(whole: Path, no: Path) -> None:
    """Without a size for shards, one file cannot be converted to a folder. The hint suggests a path with a suffix."""
    assert "a path with a suffix" in (refused(UsageError, "DST is a folder", whole, no).hint or "")


@pytest.mark.parametrize(("format", "name"), [("legacy", "out.bin"), ("pickle", "out.pkl")])
def test_formats_that_have_no_shards(saved: Path, tmp_path: Path, no: Path, format: str, name: str) -> None:
    """The older formats cannot be written as shards, only as one file."""
    refused(UsageError, "one file", saved, no, format=format)
    convert(saved, tmp_path / name, format=format)


@pytest.mark.parametrize("key", [1, ("a",), "\ud800"])
def test_names_that_no_index_can_contain(tmp_path: Path, no: Path, key: Any) -> None:
    """A state dict with a key that is not valid text cannot be written to shards."""
    state = torch.nn.Linear(2, 2).state_dict()
    state[key] = torch.ones(1)
    torch.save(state, tmp_path / "whole.pt")
    refused(RefusedError, "an index cannot contain", tmp_path / "whole.pt", no, max_shard_size=8)


def test_tensors_that_are_larger_than_a_shard(tmp_path: Path, no: Path) -> None:
    """Tensors that are larger than the size get separate shards, and a note counts them, tied ones once. A size that is
    smaller than each of several tensors is refused as a typo, but one tensor alone is written.
    """
    state = {"a": torch.ones(10), "b": torch.ones(20), "c": torch.ones(2), "e": torch.ones(0)}
    whole, one = tmp_path / "whole.pt", tmp_path / "one.pt"
    torch.save({**state, "tied": state["b"]}, whole)
    for format in ("pt", "safetensors"):
        report = convert(whole, tmp_path / format, format=format, max_shard_size=30)
        assert "2 tensors are larger than --max-shard-size 30 and get a separate shard" in report.notes
        error = refused(UsageError, "smaller than every tensor", whole, no, format=format, max_shard_size="5")
        assert (error.expected, error.hint) == ("at least 8 bytes", "a number without a unit means bytes")
    assert not any("larger" in note for note in convert(whole, tmp_path / "80", max_shard_size=80).notes)
    torch.save({"b": state["b"]}, one)
    report = convert(one, tmp_path / "1", max_shard_size="0.01KB")
    assert any("1 tensor is larger" in note for note in report.notes)


def test_a_file_without_tensors(tmp_path: Path, no: Path) -> None:
    """A file without tensors cannot be written to shards."""
    save_file({}, tmp_path / "model.safetensors")
    refused(RefusedError, "no tensor", tmp_path / "model.safetensors", no, max_shard_size="1GB")


def test_a_folder_that_changes(saved: Path) -> None:
    """If the shards are deleted after the folder was recognized as a set, the error describes the folder as empty."""
    with SourceFolder(saved) as folder:
        assert reading.looks_like(folder)
        for path in saved.iterdir():
            path.unlink()
        with pytest.raises(InputError, match="empty"):
            reading.read(folder, opening.read)


# Random state dicts


@st.composite
def states(draw: st.DrawFn) -> State:
    """Generate state dicts in which several names have the same tensor or views of one storage."""
    storages = [torch.randn(draw(st.integers(0, 40))) for _ in range(draw(st.integers(1, 4)))]
    state: State = {}
    for n in range(draw(st.integers(1, 10))):
        storage = draw(st.sampled_from(storages))
        start, stop = sorted(draw(st.tuples(*[st.integers(0, len(storage))] * 2)))
        view = storage[start:stop]
        if len(view) % 2 == 0 and draw(st.booleans()):
            view = view.view(2, -1).t() if len(view) else view
        state[f"{draw(st.sampled_from('abc'))}.{n}"] = view
    return state


@given(states(), st.sampled_from(["safetensors", "pt"]), st.integers(1, 400), st.integers(1, 400))
def test_shards_of_shards(
    tmp_path_factory: pytest.TempPathFactory, state: State, format: str, size: int, again: int
) -> None:
    """A file that is converted to shards, to other shards, and to one file again contains the same names and values.
    Tied tensors are still tied.
    """
    folder = tmp_path_factory.mktemp("dealt")
    torch.save(state, folder / "whole.pt")
    try:
        convert(folder / "whole.pt", folder / "a", format=format, max_shard_size=size)
        convert(folder / "a", folder / "b", max_shard_size=again)
    except UsageError:  # all tensors are larger
        reject()
    convert(folder / "b", folder / "c") if len(os.listdir(folder / "b")) > 1 else os.rename(folder / "b", folder / "c")
    files = [path for path in (folder / "c").iterdir() if path.suffix != ".json"]
    convert(files[0] if len(files) == 1 else folder / "c", folder / "one.pt")
    out = torch.load(folder / "one.pt", weights_only=True)
    assert_equal(out, state)
    for a, first in state.items():
        for b, second in state.items():
            if first.numel() and (first.data_ptr(), first.shape, first.stride()) == (
                second.data_ptr(),
                second.shape,
                second.stride(),
            ):
                assert out[a].data_ptr() == out[b].data_ptr(), (a, b)
    if format == "pt":
        whole = torch.load(folder / "whole.pt", weights_only=True)
        assert_same(out, {name: whole[name] for name in out})
