"""Checkpoints in shards: read as one, edited as one, written as they were or dealt anew. transformers, huggingface_hub
and torch judge what comes out.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import load_state_dict_from_file, load_torch_model, save_torch_state_dict
from hypothesis import given, reject
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.conversion import convert as conversion
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import Report
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
from tests.support.judge import assert_same, tags_of
from tests.support.tiny_models import tiny_model, transformers_offline

State = dict[str, torch.Tensor]


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
    """To a file where DST has a suffix, else to a folder."""
    output = OutputOptions(format=format, max_shard_size=max_shard_size, copy_tied=copy_tied, force=force)
    return conversion.run(src, dst, edits_from(**edits), output, is_folder=not dst.suffix)


def some_state() -> State:
    """Six weights of 400 bytes and one more name for the first."""
    torch.manual_seed(0)
    state = {f"module.{i}.weight": torch.randn(10, 10) for i in range(6)}
    return {**state, "module.tied": state["module.0.weight"]}


def save_set(folder: Path, state: State, *, safe: bool, size: int | str = 900, **kwargs: Any) -> Path:
    """STATE in shards, as huggingface_hub writes them."""
    folder.mkdir(parents=True)
    logging.disable(logging.WARNING)  # that pickles are deprecated
    save_torch_state_dict(dict(state), folder, max_shard_size=size, safe_serialization=safe, **kwargs)
    logging.disable(logging.NOTSET)
    return folder


def index_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_bytes())


def load_set(folder: Path) -> State:
    """What the shards in FOLDER hold, each read with its own library, where the index says that it is."""
    state: State = {}
    for shard in dict.fromkeys(index_of(folder)["weight_map"].values()):
        path = folder / shard
        state |= load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert set(state) == set(index_of(folder)["weight_map"])
    return state


def assert_equal(left: State, right: State) -> None:
    """Fail unless both have the same names and values, in whatever order."""
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


@pytest.fixture(params=[True, False], ids=["safetensors", "bin"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A set of three shards, of either kind."""
    return save_set(tmp_path / "set", some_state(), safe=request.param)


# What the Hub's libraries read


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """The library."""
    with transformers_offline() as library:
        yield library


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest, transformers: ModuleType) -> Any:
    """A tiny model, with tied embeddings and without."""
    return tiny_model(transformers, request.param)


def assert_pretrained(transformers: ModuleType, folder: Path, model: Any, **kwargs: Any) -> None:
    """Fail unless ``from_pretrained`` finds all of MODEL in FOLDER and nothing else,
    and computes the same, bit for bit.
    """
    model.config.save_pretrained(folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **kwargs
    )
    assert not any(info.values()), info
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("size", [None, "40KB", "1GB"])
@pytest.mark.parametrize("format", ["safetensors", "pt"])
@pytest.mark.parametrize("safe", [True, False], ids=["of-safetensors", "of-bin"])
def test_from_pretrained(
    transformers: ModuleType, model: Any, tmp_path: Path, safe: bool, format: str, size: str | None
) -> None:
    """What DataParallel named and the Hub's tools put into shards loads once the prefix is off: in its own shards or
    others, of either format, or in one file.
    """
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    save_set(tmp_path / "set", state, safe=safe, size="20KB")
    convert(tmp_path / "set", tmp_path / "out", format=format, max_shard_size=size, strip_prefix="module")
    index = "model.safetensors.index.json" if format == "safetensors" else "pytorch_model.bin.index.json"
    assert [path.name for path in (tmp_path / "out").glob("*.json")] == ([index] if size != "1GB" else [])
    assert_pretrained(transformers, tmp_path / "out", model)


def test_a_variant(transformers: ModuleType, model: Any, tmp_path: Path) -> None:
    """Shards of a variant keep their names, dealt anew too: ``from_pretrained`` finds them."""
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB", variant="fp16")
    for n, size in enumerate((None, "40KB")):
        out = tmp_path / f"out{n}"
        convert(tmp_path / "set" / "model.safetensors.index.fp16.json", out, max_shard_size=size)
        assert (out / "model.safetensors.index.fp16.json").exists()
        assert_pretrained(transformers, out, model, variant="fp16")


def test_what_is_not_changed_stays_byte_for_byte(model: Any, tmp_path: Path) -> None:
    """A set of ``save_pretrained`` that is converted to the same is the same, index and shards."""
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB")
    convert(tmp_path / "set", tmp_path / "out")
    names = {path.name for path in (tmp_path / "set").iterdir() if "safetensors" in path.name}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names and len(names) > 3
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "set" / name).read_bytes(), name


def test_huggingface_hub_loads_it(saved: Path, tmp_path: Path) -> None:
    """``load_torch_model`` takes a dealt set strictly, and ``load_state_dict_from_file`` each shard."""
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
def test_one_file_becomes_the_set_that_the_hub_would_make(tmp_path: Path, safe: bool) -> None:
    """Files, places and the index are those of ``save_torch_state_dict``, to which the same state dict was given."""
    state = {**some_state(), "big": torch.ones(999), "small": torch.ones(3)}
    torch.save(state, tmp_path / "whole.pt")
    theirs = save_set(tmp_path / "theirs", state, safe=safe)
    format = "safetensors" if safe else "pt"
    convert(tmp_path / "whole.pt", tmp_path / "ours", format=format, max_shard_size=900)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(theirs))
    assert index_of(tmp_path / "ours") == index_of(theirs)
    assert_equal(load_set(tmp_path / "ours"), load_set(theirs))


# One checkpoint


def test_merged_to_one_file(saved: Path, tmp_path: Path) -> None:
    """All names, in the order of the shards, ties still tied, whichever way the set says them."""
    convert(saved, tmp_path / "out.pt")
    merged = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_equal(merged, some_state())
    assert merged["module.tied"].data_ptr() == merged["module.0.weight"].data_ptr()
    convert(saved, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "module.tied": "module.0.weight"}
        assert set(file.keys()) == set(some_state()) - {"module.tied"}


def test_by_the_path_of_its_index(saved: Path, tmp_path: Path) -> None:
    """The index means its set, whatever else there is."""
    (index,) = saved.glob("*.json")
    torch.save({}, saved / "pytorch_model.bin")
    with pytest.raises(RefusedError, match="not clear"):
        convert(saved, tmp_path / "out.pt")
    convert(index, tmp_path / "out.pt")
    assert_equal(torch.load(tmp_path / "out.pt", weights_only=True), some_state())


def test_without_an_index(saved: Path, tmp_path: Path) -> None:
    """Shards whose names say that all are there are a set; what comes out has an index."""
    (index,) = saved.glob("*.json")
    there = index.read_bytes()
    index.unlink()
    convert(saved, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in saved.iterdir()} | {
        index.name
    }
    assert index_of(tmp_path / "out")["weight_map"] == json.loads(there)["weight_map"]


def test_retagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is what ``torch.load`` with a ``map_location`` makes of it, and stays
    the file that it was, but for tags.
    """
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        saved = save_set(tmp_path / "set", some_state(), safe=False)
    report = convert(saved, tmp_path / "out", map_location="cuda:1")
    assert report.changes.devices == {("cuda:0", "cuda:1"): (7, 2400)}
    for path in saved.glob("*.bin"):
        before, after = tags_of(path), tags_of(tmp_path / "out" / path.name)
        assert set(before[1]) == {"cuda:0"} and set(after[1]) == {"cuda:1"}
        assert_same(before[0], after[0])


def test_renamed_across_shards(saved: Path, tmp_path: Path) -> None:
    """One edit reaches all of them, the index too; two names that would meet are seen, though they are in two files."""
    convert(saved, tmp_path / "out", rename=[(r"^module\.(\d)", r"layers.\1")])
    assert {*index_of(tmp_path / "out")["weight_map"]} >= {f"layers.{i}.weight" for i in range(6)}
    load_set(tmp_path / "out")
    with pytest.raises(CollisionError):
        convert(saved, tmp_path / "no", rename=[(r"module\.[05]\.", "module.")])
    with pytest.raises(NoMatchError):
        convert(saved, tmp_path / "no", strip_prefix="encoder")
    assert not (tmp_path / "no").exists()


def test_cast(saved: Path, tmp_path: Path) -> None:
    """The new sizes are in the index."""
    convert(saved, tmp_path / "out", dtype=["bf16", "module.1.*=fp16"])
    expected = {
        name: tensor.to(torch.float16 if ".1." in name else torch.bfloat16) for name, tensor in some_state().items()
    }
    loaded = load_set(tmp_path / "out")
    assert_equal(loaded, {name: expected[name] for name in loaded})
    assert set(expected) - set(loaded) <= {"module.tied"}
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 1200


def test_what_shared_a_storage_and_goes_two_ways(tmp_path: Path) -> None:
    """It is taken apart within its shard, beside another that has storages of the same keys."""
    flat = torch.arange(8.0)
    state = {"a": flat[:4], "b": flat[4:], "c": torch.ones(4)}
    (tmp_path / "set").mkdir()
    torch.save({name: state[name] for name in "ab"}, tmp_path / "set" / "model-00001-of-00002.bin")
    torch.save({"c": state["c"]}, tmp_path / "set" / "model-00002-of-00002.bin")
    convert(tmp_path / "set", tmp_path / "out", dtype=["a=bf16", "b=fp16", "c=fp64"])
    expected = {"a": state["a"].bfloat16(), "b": state["b"].half(), "c": state["c"].double()}
    assert_equal(load_set(tmp_path / "out"), expected)
    assert index_of(tmp_path / "out")["metadata"] == {"total_size": 48}


def test_a_shard_that_loses_all_goes(saved: Path, tmp_path: Path) -> None:
    """The others get its number, and the index says what is left."""
    convert(saved, tmp_path / "out", exclude=["module.2.*", "module.3.*"])
    suffix = next(saved.glob("*-00001-*")).suffix
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index = index_of(tmp_path / "out")
    assert set(index["weight_map"].values()) == {f"{stem}-0000{n}-of-00002{suffix}" for n in (1, 2)}
    assert index["metadata"]["total_size"] == 1600
    assert index["weight_map"]["module.4.weight"] == f"{stem}-00002-of-00002{suffix}"
    load_set(tmp_path / "out")


def test_counts_that_would_be_false_are_left_out(model: Any, tmp_path: Path) -> None:
    """transformers' number of parameters stays as long as no tensor is left out, and is named when it goes."""
    model.save_pretrained(tmp_path / "set", max_shard_size="20KB")
    kept = index_of_transformers(tmp_path / "set")["metadata"]["total_parameters"]
    convert(tmp_path / "set", tmp_path / "same", format="pt", add_prefix="module")
    assert index_of(tmp_path / "same")["metadata"]["total_parameters"] == kept
    for n, size in enumerate((None, "30KB")):
        report = convert(
            tmp_path / "set",
            tmp_path / f"less{n}",
            max_shard_size=size,
            exclude="*norm*" if "Llama" in type(model).__name__ else "*ln*",
        )
        assert "total_parameters" not in index_of(tmp_path / f"less{n}")["metadata"]
        assert "model.safetensors.index.json/metadata/total_parameters" in [each.path for each in report.left_behind]


def index_of_transformers(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.safetensors.index.json").read_bytes())


def test_in_the_hubs_cache(saved: Path, tmp_path: Path) -> None:
    """A snapshot of links to blobs is the set, by the folder and by the index; a link to a
    blob that is not there is a missing shard.
    """
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, path in enumerate(sorted(saved.iterdir())):
        os.rename(path, blobs / f"hash{n}")
        os.symlink(f"../../blobs/hash{n}", snapshot / path.name)
    (index,) = snapshot.glob("*.json")
    for n, path in enumerate((snapshot, index)):
        convert(path, tmp_path / f"{n}.pt")
        assert_equal(torch.load(tmp_path / f"{n}.pt", weights_only=True), some_state())
    (blobs / "hash1").unlink()
    with pytest.raises(MalformedError, match=r"1 of 3 shards is missing: \w+-00002-of-00003"):
        convert(snapshot, tmp_path / "no.pt")


# What the index says and the shards do not


def mend(saved: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the places in the index of SAVED."""
    (path,) = saved.glob("*.json")
    index = json.loads(path.read_bytes())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def refused(saved: Path, tmp_path: Path) -> str:
    with pytest.raises(MalformedError) as caught:
        convert(saved, tmp_path / "no")
    assert caught.value.hint and "ckptconv convert" in caught.value.hint
    assert not (tmp_path / "no").exists()
    return caught.value.what


def test_a_missing_tensor(saved: Path, tmp_path: Path) -> None:
    """The index has it, and no shard."""
    mend(saved, lambda places: places.update(ghost=places["module.0.weight"]))
    assert refused(saved, tmp_path).startswith("1 tensor stands in no shard, but in the index: 'ghost' not in ")


def test_an_unknown_tensor(saved: Path, tmp_path: Path) -> None:
    """A shard has it, and the index has not."""
    mend(saved, lambda places: places.pop("module.3.weight") and None)
    assert refused(saved, tmp_path).startswith("1 tensor stands in a shard, but not in the index: 'module.3.weight'")


def test_swapped_tensors(saved: Path, tmp_path: Path) -> None:
    """They are there, but elsewhere: a reader that goes by the index would not find them."""

    def swap(places: dict[str, str]) -> None:
        places["module.0.weight"], places["module.5.weight"] = places["module.5.weight"], places["module.0.weight"]

    mend(saved, swap)
    assert refused(saved, tmp_path).startswith("2 tensors stand in another shard than the index says: ")
    next(saved.glob("*.json")).unlink()  # as the hint says
    convert(saved, tmp_path / "out")


def test_a_doubled_tensor(saved: Path, tmp_path: Path) -> None:
    """In two shards: which one is read depends on the reader, with an index and without."""
    shards = sorted(path for path in saved.iterdir() if path.suffix != ".json")
    if shards[0].suffix == ".bin":
        torch.save({**torch.load(shards[1]), "module.0.weight": torch.zeros(1)}, shards[1])
    else:
        content = load_file(shards[1])  # mapped
        shards[1].unlink()
        save_file({**content, "module.0.weight": torch.zeros(1)}, shards[1])
    assert "'module.0.weight' in " in refused(saved, tmp_path)
    next(saved.glob("*.json")).unlink()
    assert refused(saved, tmp_path).startswith("1 tensor stands in more than one shard: ")


def test_the_hint_is_true(saved: Path, tmp_path: Path) -> None:
    """Where the index contradicts shards that are all there, it can be taken away; where two shards contradict each
    other, that would not help.
    """
    mend(saved, lambda places: places.update(ghost=places["module.0.weight"]))
    with pytest.raises(MalformedError) as caught:
        convert(saved, tmp_path / "no")
    assert "take the index away" in (caught.value.hint or "")
    next(saved.glob("*.json")).unlink()
    convert(saved, tmp_path / "out")
    first, second, _ = sorted(saved.iterdir())
    os.unlink(second)
    os.link(first, second)
    with pytest.raises(MalformedError) as caught:
        convert(saved, tmp_path / "no")
    assert "take the index away" not in (caught.value.hint or "")


def test_names_of_somebodys_own(tmp_path: Path) -> None:
    """An index can be called as one likes, and so can shards; where two would get one name, that is said."""
    saved = tmp_path / "set"
    saved.mkdir()
    for n, name in enumerate(("a.bin", "b", "a")):
        torch.save({str(n): torch.ones(n + 1)}, saved / name)
    places = {"0": "a.bin", "1": "b"}
    (saved / "the.index.json").write_text(json.dumps({"weight_map": places}))
    convert(saved / "the.index.json", tmp_path / "out", format="safetensors")
    assert sorted(os.listdir(tmp_path / "out")) == ["a.safetensors", "b.safetensors", "the.index.json"]
    assert_equal(load_set(tmp_path / "out"), {"0": torch.ones(1), "1": torch.ones(2)})
    (saved / "the.index.json").write_text(json.dumps({"weight_map": {**places, "2": "a"}}))
    with pytest.raises(RefusedError, match="one name"):
        convert(saved / "the.index.json", tmp_path / "no", format="safetensors")
    convert(saved / "the.index.json", tmp_path / "same")
    assert sorted(os.listdir(tmp_path / "same")) == ["a", "a.bin", "b", "the.index.json"]


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    """It is a file that cannot be read, whatever is to become of it."""
    for out in ("out", "out.pt"):
        with pytest.raises(InputError, match="No such file"):
            convert(tmp_path / "model.safetensors.index.json", tmp_path / out)


def test_shards_of_older_formats(tmp_path: Path) -> None:
    """Those from before torch 1.6 become zips under their names, whether they go to a folder or into one file."""
    saved = tmp_path / "set"
    saved.mkdir()
    for n in (1, 2):
        shard = {f"w{n}": torch.full((n,), 2.0)}
        torch.save(shard, saved / f"pytorch_model-0000{n}-of-00002.bin", _use_new_zipfile_serialization=False)
    report = convert(saved, tmp_path / "out")
    assert report.formats[0] == "sharded torch legacy"
    assert_equal(load_set(tmp_path / "out"), {f"w{n}": torch.full((n,), 2.0) for n in (1, 2)})
    assert (tmp_path / "out" / "pytorch_model-00001-of-00002.bin").read_bytes()[:2] == b"PK"


def test_shards_that_are_no_files(saved: Path, tmp_path: Path) -> None:
    """A FIFO, a folder: refused before anything waits for it."""
    shard = sorted(path for path in saved.iterdir() if path.suffix != ".json")[1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(InputError, match="FIFO"):
        convert(saved, tmp_path / "no")
    shard.unlink()
    shard.mkdir()
    with pytest.raises(InputError, match="folder"):
        convert(saved, tmp_path / "no")


def test_shards_that_are_pointers(saved: Path, tmp_path: Path) -> None:
    """A clone without Git LFS is said to be one."""
    for path in saved.iterdir():
        if path.suffix != ".json":
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(InputError, match="LFS"):
        convert(saved, tmp_path / "no")


def test_shards_of_two_formats(tmp_path: Path) -> None:
    """What is called safetensors and is a pickle in one shard: refused, both named."""
    saved = save_set(tmp_path / "set", some_state(), safe=True)
    path = saved / "model-00002-of-00003.safetensors"
    content = load_file(path)  # mapped
    path.unlink()
    torch.save(content, path)
    with pytest.raises(UnsupportedError, match=r"model-00003-of-00003.safetensors is safetensors, model-00002"):
        convert(saved, tmp_path / "no")


@pytest.mark.parametrize("content", [[torch.ones(2)], {1: torch.ones(2)}, OrderedDict([(b"a", torch.ones(2))])])
def test_shards_that_are_no_state_dicts(tmp_path: Path, content: Any) -> None:
    """What has no names is no part of one."""
    (tmp_path / "set").mkdir()
    torch.save(content, tmp_path / "set" / "model-00001-of-00001.bin")
    with pytest.raises(UnsupportedError, match=r"no mapping|no names"):
        convert(tmp_path / "set", tmp_path / "no")


def test_a_name_that_stands_twice_in_a_shard(tmp_path: Path) -> None:
    """A pickle can say that; which of the two is meant, no index does."""
    saved = tmp_path / "set"
    saved.mkdir()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"aa": torch.zeros(1), "bb": torch.ones(1)}, saved / "model-00001-of-00001.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    whole = (saved / "model-00001-of-00001.bin").read_bytes()
    (saved / "model-00001-of-00001.bin").write_bytes(whole.replace(b"X\x02\x00\x00\x00bb", b"X\x02\x00\x00\x00aa"))
    with pytest.raises(MalformedError, match="twice") as caught:
        convert(saved, tmp_path / "no")
    assert caught.value.got == "'aa'"


def test_an_index_with_more_in_it(saved: Path, tmp_path: Path) -> None:
    """Parts that nobody knows are named as left behind, what its metadata says is kept."""
    (path,) = saved.glob("*.json")
    index = json.loads(path.read_bytes())
    index["metadata"] |= {"note": "hello", "steps": 7, "nested": {"a": [1]}}
    path.write_text(json.dumps({**index, "other": 1}))
    for n, size in enumerate((None, 1300)):
        report = convert(saved, tmp_path / f"out{n}", max_shard_size=size)
        assert index_of(tmp_path / f"out{n}")["metadata"] == index["metadata"]
        assert f"{path.name}/other" in [each.path for each in report.left_behind]
    report = convert(saved, tmp_path / "one", format="safetensors", max_shard_size="1GB")
    assert {each.path.rpartition("/")[2] for each in report.left_behind} == {"other", "steps", "nested"}
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata()["note"] == "hello"


# What else shards hold


def test_texts_of_safetensors(tmp_path: Path) -> None:
    """Each shard keeps its own; merged they are those of one file, and where two contradict each other that is said."""
    saved, out = tmp_path / "set", tmp_path / "out"
    saved.mkdir()
    for n, texts in enumerate(({"a": "1", "b": "x"}, {"a": "1", "b": "y", "c": "z"}), 1):
        save_file({f"w{n}": torch.ones(n)}, saved / f"model-0000{n}-of-00002.safetensors", metadata=texts)
    report = convert(saved, out)
    assert not report.left_behind
    with safe_open(out / "model-00002-of-00002.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "1", "b": "y", "c": "z"}
    report = convert(saved, tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "1", "b": "x", "c": "z"}
    assert [(each.path, each.why) for each in report.left_behind] == [
        ("model-00002-of-00002.safetensors/__metadata__/b", "other shards have another text there")
    ]
    for format, size in (("pt", None), ("pt", 4), ("safetensors", 4)):
        report = convert(saved, tmp_path / f"{format}{size}", format=format, max_shard_size=size)
        assert index_of(tmp_path / f"{format}{size}")["metadata"] == {"a": "1", "b": "x", "c": "z", "total_size": 12}
        assert len(report.left_behind) == 1


def test_a_text_that_would_be_a_tie(saved: Path, tmp_path: Path) -> None:
    """A name that a text of the index happens to be, once names are changed, is not
    written as one: it would be read as a tie.
    """
    (path,) = saved.glob("*.json")
    index = json.loads(path.read_bytes())
    index["metadata"]["best"] = "1.weight"
    path.write_text(json.dumps(index))
    report = convert(saved, tmp_path / "out", format="safetensors", strip_prefix="module")
    assert index_of(tmp_path / "out")["metadata"] == {"tied": "0.weight", "total_size": 2400}
    assert "it would be read as a tie" in [each.why for each in report.left_behind]


def test_what_is_no_tensor(tmp_path: Path) -> None:
    """stays in its shard, goes to the first one where shards are dealt, and is named
    where the format has no place for it.
    """
    state = {"a": torch.ones(100), "b": torch.ones(100), "c_extra_state": None, "d": torch.ones(100)}
    saved = tmp_path / "set"
    saved.mkdir()
    torch.save({name: state[name] for name in ("a", "b")}, saved / "model-00001-of-00002.bin")
    torch.save({name: state[name] for name in ("c_extra_state", "d")}, saved / "model-00002-of-00002.bin")
    convert(saved, tmp_path / "same")
    assert torch.load(tmp_path / "same" / "model-00002-of-00002.bin").keys() == {"c_extra_state", "d"}
    convert(saved, tmp_path / "dealt", max_shard_size=400)
    assert list(torch.load(tmp_path / "dealt" / "pytorch_model-00001-of-00003.bin")) == ["a", "c_extra_state"]
    assert index_of(tmp_path / "dealt")["weight_map"]["c_extra_state"] == "pytorch_model-00001-of-00003.bin"
    for size in (None, 400):
        report = convert(saved, tmp_path / f"safe{size}", format="safetensors", max_shard_size=size)
        assert [each.path for each in report.left_behind] == ["c_extra_state"]
        assert_equal(
            load_set(tmp_path / f"safe{size}"), {name: value for name, value in state.items() if value is not None}
        )


def test_long_texts(tmp_path: Path) -> None:
    """What the parser leaves in the file is found in the right one, whether shards stay, are dealt anew
    or become one.
    """
    saved = tmp_path / "set"
    saved.mkdir()
    state: dict[str, Any] = {}
    for n in (1, 2, 3):
        shard = {f"w{n}": torch.ones(n), f"{n}_extra_state": str(n) * 100_000}
        torch.save(shard, saved / f"model-0000{n}-of-00003.bin")
        state |= shard
    convert(saved, tmp_path / "same")
    convert(saved, tmp_path / "dealt", max_shard_size=12)
    convert(saved, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), state)
    for out in ("same", "dealt"):
        shards = [torch.load(tmp_path / out / shard) for shard in set(index_of(tmp_path / out)["weight_map"].values())]
        assert {key: value for shard in shards for key, value in shard.items() if "extra" in key} == {
            key: value for key, value in state.items() if "extra" in key
        }


def test_attributes_of_a_state_dict(tmp_path: Path) -> None:
    """``_metadata`` has no place in a set, and is named, whether it comes from a shard or a file."""
    state = torch.nn.Linear(2, 2).state_dict()
    saved = tmp_path / "set"
    saved.mkdir()
    torch.save(state, saved / "model-00001-of-00001.bin")
    report = convert(saved, tmp_path / "out")
    assert [each.path for each in report.left_behind] == ["model-00001-of-00001.bin/._metadata"]
    out = torch.load(tmp_path / "out" / "model-00001-of-00001.bin")
    assert type(out) is OrderedDict and not hasattr(out, "_metadata")
    convert(saved, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), out)
    for format in ("pt", "safetensors"):
        report = convert(saved / "model-00001-of-00001.bin", tmp_path / format, format=format, max_shard_size=16)
        assert [each.path for each in report.left_behind] == ["._metadata"]


def test_storages_stay_whole_in_torchs_format(tmp_path: Path) -> None:
    """All views of a flat buffer go into one shard, which is as large as it is; in
    safetensors each is a tensor of its own.
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


def test_copied_ties(tmp_path: Path) -> None:
    """With --copy-tied each name has its bytes, in whatever shard, and the index counts them all."""
    torch.save(some_state(), tmp_path / "whole.pt")
    convert(tmp_path / "whole.pt", tmp_path / "out", format="safetensors", max_shard_size=900, copy_tied=True)
    assert_equal(load_set(tmp_path / "out"), some_state())
    assert index_of(tmp_path / "out")["metadata"] == {"total_size": 2800}
    assert len(set(index_of(tmp_path / "out")["weight_map"].values())) == 4


def test_a_whole_training_checkpoint(tmp_path: Path) -> None:
    """Its state dict goes into shards, the rest is named."""
    torch.save({"state_dict": some_state(), "epoch": 3}, tmp_path / "last.ckpt")
    report = convert(tmp_path / "last.ckpt", tmp_path / "out", max_shard_size=900)
    assert_equal(load_set(tmp_path / "out"), some_state())
    assert [each.path for each in report.left_behind] == ["epoch"]


# What is refused


def test_a_part_without_a_state_dict(saved: Path, tmp_path: Path) -> None:
    """Whoever typed a command is told what shows what there is, and nothing about objects in memory."""
    with pytest.raises(RefusedError, match="no state dict") as caught:
        convert(saved, tmp_path / "no.safetensors", select=next(iter(some_state())))
    assert caught.value.hint == f"see what there is: ckptconv inspect {saved}"


def test_a_folder_without_a_size(tmp_path: Path) -> None:
    """One file is no shards, nor is a part of some: how large they may be is asked."""
    torch.save(some_state(), tmp_path / "whole.pt")
    with pytest.raises(UsageError, match="not in shards") as caught:
        convert(tmp_path / "whole.pt", tmp_path / "no")
    assert "--max-shard-size" in (caught.value.hint or "")


def test_formats_that_have_no_shards(saved: Path, tmp_path: Path) -> None:
    """The older ones write one file."""
    for format in ("legacy", "pickle"):
        with pytest.raises(UsageError, match="one file"):
            convert(saved, tmp_path / "no", format=format)
        convert(saved, tmp_path / f"{format}.bin" if format == "legacy" else tmp_path / "out.pkl", format=format)


@pytest.mark.parametrize("key", [1, ("a",), "\ud800"])
def test_names_that_no_index_can_hold(tmp_path: Path, key: Any) -> None:
    """A key that is no text, beside ones that are."""
    state = torch.nn.Linear(2, 2).state_dict()
    state[key] = torch.ones(1)
    torch.save(state, tmp_path / "whole.pt")
    with pytest.raises(RefusedError, match="an index cannot hold"):
        convert(tmp_path / "whole.pt", tmp_path / "no", max_shard_size=8)


def test_tensors_that_are_larger_than_a_shard(tmp_path: Path) -> None:
    """They are counted in a note, tied ones once, and have a shard each; a size that none of several fits is a typo,
    and what a size needs is said. One tensor alone is what it is.
    """
    state = {"a": torch.ones(10), "b": torch.ones(20), "c": torch.ones(2), "e": torch.ones(0)}
    torch.save({**state, "tied": state["b"]}, tmp_path / "whole.pt")
    for format in ("pt", "safetensors"):
        report = convert(tmp_path / "whole.pt", tmp_path / format, format=format, max_shard_size=30)
        assert "2 tensors are larger than --max-shard-size 30 and have a shard each" in report.notes
        with pytest.raises(UsageError, match="less than any tensor") as caught:
            convert(tmp_path / "whole.pt", tmp_path / "no", format=format, max_shard_size="5")
        assert (caught.value.expected, caught.value.hint) == ("at least 8 bytes", "a number without a unit is bytes")
    assert not any(
        "larger" in note for note in convert(tmp_path / "whole.pt", tmp_path / "80", max_shard_size=80).notes
    )
    torch.save({"b": state["b"]}, tmp_path / "one.pt")
    assert any(
        "1 tensor is larger" in note
        for note in convert(tmp_path / "one.pt", tmp_path / "1", max_shard_size="0.01KB").notes
    )


def test_nothing_to_deal(tmp_path: Path) -> None:
    """A file without a tensor makes no shard."""
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError, match="no tensor"):
        convert(tmp_path / "model.safetensors", tmp_path / "no", max_shard_size="1GB")


def test_a_folder_that_changes(saved: Path) -> None:
    """One whose shards go after they were seen says what it is then."""
    with SourceFolder(saved) as folder:
        assert reading.looks_like(folder)
        for path in saved.iterdir():
            path.unlink()
        with pytest.raises(InputError, match="empty"):
            reading.read(folder, opening.read)


# Whatever there is


@st.composite
def states(draw: st.DrawFn) -> State:
    """State dicts in which several names have one tensor, or views of one storage."""
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
def test_dealt_and_dealt_again(
    tmp_path_factory: pytest.TempPathFactory, state: State, format: str, size: int, again: int
) -> None:
    """A file in shards, in other shards, and in one file again: the same values under
    the same names, and tied what was tied.
    """
    folder = tmp_path_factory.mktemp("dealt")
    torch.save(state, folder / "whole.pt")
    try:
        convert(folder / "whole.pt", folder / "a", format=format, max_shard_size=size)
        convert(folder / "a", folder / "b", max_shard_size=again)
    except UsageError:  # none of the tensors is so small
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
