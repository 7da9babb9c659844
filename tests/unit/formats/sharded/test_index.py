"""The index of a set of shards. The reader is strict, and names and bytes equal those of the Hub's libraries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.byteranges.sources import BytesSource, SourceFolder
from ckptconv.errors import CkptconvError, InputError, LimitError, MalformedError, RefusedError, UsageError
from ckptconv.formats.sharded.index import (
    Index,
    find_set,
    index_bytes,
    index_name,
    of_other_suffix,
    read_index,
    refuse_missing,
    sets_in,
    shard_name,
    stem_for,
)
from ckptconv.formats.sharded.writing import Weight, deal, parse_size
from ckptconv.limits import LIMITS, Limits
from tests.support.conversions import run_without_torch
from tests.support.tiny_models import tiny_model, transformers_offline

GOOD = {
    "metadata": {"total_size": 24},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def read(raw: bytes, name: str = "model.safetensors.index.json") -> Index:
    return read_index(BytesSource(raw, Path(name)))


def with_shard(name: str) -> bytes:
    """Return a valid index in which one shard has this `name`."""
    return json.dumps({**GOOD, "weight_map": {**GOOD["weight_map"], "b": name}}).encode()


# Reading


def test_a_valid_index() -> None:
    """Metadata and positions are read without changes, and the shards are in the order of their numbers. Metadata can
    be missing, numbers can be floats, and other keys are recorded.
    """
    index = read(json.dumps(GOOD).encode())
    assert index == Index({"total_size": 24}, GOOD["weight_map"])
    assert index.shards() == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    other = read(json.dumps({"weight_map": GOOD["weight_map"], "model": 1}).encode())
    assert other == Index({}, GOOD["weight_map"], ("model",))
    assert read(json.dumps({**GOOD, "metadata": {"total_size": 24.5}}).encode()).metadata == {"total_size": 24.5}


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../model-00002-of-00002.safetensors",
        "/etc/passwd.safetensors",
        "sub/b.safetensors",
        "..\\b.safetensors",
        "C:b.safetensors",
        "b\0.safetensors",
        "\\\\host\\b.safetensors",
    ],
)
def test_a_shard_is_next_to_its_index(name: str) -> None:
    """The name of a shard is refused if it contains a folder or is not a file name. The error contains the name."""
    with pytest.raises(MalformedError, match="without a folder") as caught:
        read(with_shard(name))
    assert caught.value.got == repr(name)


def test_a_shard_is_of_the_format_of_its_index() -> None:
    """Safetensors in an index of pickles are refused, as in huggingface_hub. An index whose name contains no format can
    contain any format.
    """
    with pytest.raises(MalformedError, match="another format"):
        read(json.dumps(GOOD).encode(), "pytorch_model.bin.index.json")
    assert read(with_shard("b.bin"), "the.index.json").weight_map["b"] == "b.bin"


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not UTF-8"),
        (b'{"weight_map": {"a": "a.safetensors"}', "not JSON"),
        (b'{"weight_map": {"a": "a.safetensors"}} {}', "not JSON"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": ["a"]}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "names no shard"),
        (b'{"weight_map": {"a": ["a.safetensors"]}}', "names no shard"),
        (b'{"metadata": [], "weight_map": {"a": "a.safetensors"}}', "metadata is not an object"),
        (b'{"metadata": null, "weight_map": {"a": "a.safetensors"}}', "metadata is not an object"),
        (b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}', "the index contains a key twice"),
        (
            b'{"weight_map": {"a": "a.safetensors"}, "weight_map": {"a": "b.safetensors"}}',
            "the index contains a key twice",
        ),
        (b'{"weight_map": {"\\ud800": "a.safetensors"}}', "surrogate"),
        (b'{"weight_map": {"a": "\\ud800.safetensors"}}', "surrogate"),
        (b'{"metadata": {"x": NaN}, "weight_map": {"a": "a.safetensors"}}', "not JSON"),
        (b'{"metadata": {"x": -Infinity}, "weight_map": {"a": "a.safetensors"}}', "not JSON"),
        (b'{"metadata": {"x": 1e999}, "weight_map": {"a": "a.safetensors"}}', "too large"),
        (b'{"metadata": {"x": ' + 5000 * b"9" + b'}, "weight_map": {"a": "a.safetensors"}}', "too long"),
        # A pickle in an index of safetensors is refused too, as in huggingface_hub.
        (with_shard("b.bin"), "another format"),
    ],
)
def test_a_bad_index_is_refused(raw: bytes, what: str) -> None:
    """An invalid index raises a MalformedError with the reason and a hint."""
    with pytest.raises(MalformedError, match=what) as caught:
        read(raw)
    assert "download it again, or delete it" in (caught.value.hint or "")


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (
            lambda: json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(LIMITS.shards + 1)}}).encode(),
            "too many shards",
        ),
        (lambda: b'{"metadata": ' + 200_000 * b"[" + 200_000 * b"]" + b"}", "nested"),
        (lambda: b"[" + b"0," * LIMITS.header_quotes + b"0," * 99 + b"0]", "more data than a million"),
    ],
    ids=["shards", "nesting", "numbers"],
)
def test_an_index_is_bounded(raw: Callable[[], bytes], what: str) -> None:
    """The nesting of an index, and the amount of data that it describes, are bounded."""
    with pytest.raises(LimitError, match=what):
        read(raw())


def test_the_size_of_an_index_is_bounded() -> None:
    """An index that is too long is refused before it is read."""
    huge = BytesSource(b"", Path("model.safetensors.index.json"))
    huge.size = LIMITS.safetensors_header + 1
    with pytest.raises(LimitError, match="too long"):
        read_index(huge)


@given(st.binary(max_size=64), st.integers(0, 200), st.integers(0, 64))
def test_any_bytes_are_read_or_raise_an_error(junk: bytes, at: int, cut: int) -> None:
    """A valid index with any bytes inserted is read or raises a CkptconvError."""
    raw = json.dumps(GOOD).encode()
    with suppress(CkptconvError):
        read(raw[:at] + junk + raw[at + cut :])


# Writing


def test_the_bytes_equal_those_of_transformers(tmp_path: Path) -> None:
    """The index that ``save_pretrained`` writes has the same bytes after it is read and written again."""
    with transformers_offline() as transformers:
        tiny_model(transformers, "gpt2").save_pretrained(tmp_path, max_shard_size="20KB")
    raw = (tmp_path / "model.safetensors.index.json").read_bytes()
    index = read(raw)
    assert len(index.shards()) > 1
    assert index_bytes(index.metadata, index.weight_map) == raw


def test_names_of_every_family() -> None:
    """The stems ``model`` and ``pytorch_model`` are exchanged with the format, and other stems stay the same. A variant
    is at the position where each library expects it.
    """
    there = {
        "pytorch_model-00001-of-00003.bin": "model-00001-of-00003.safetensors",
        "pytorch_model.bin.index.json": "model.safetensors.index.json",
        "pytorch_model.fp16-00001-of-00002.bin": "model.fp16-00001-of-00002.safetensors",
        "pytorch_model-00001-of-00002.fp16.bin": "model-00001-of-00002.fp16.safetensors",
        "pytorch_model.bin.index.fp16.json": "model.safetensors.index.fp16.json",
        "diffusion_pytorch_model-00002-of-00002.bin": "diffusion_pytorch_model-00002-of-00002.safetensors",
        "adapter_model.bin.index.json": "adapter_model.safetensors.index.json",
        "llama-3.1-8b-00001-of-00002.bin": "llama-3.1-8b-00001-of-00002.safetensors",
        "part_a.bin": "part_a.safetensors",
    }
    for bin_, safetensors in there.items():
        assert of_other_suffix(bin_, ".safetensors") == safetensors
        assert of_other_suffix(safetensors, ".bin") == bin_
        assert of_other_suffix(bin_, ".bin") == bin_ and of_other_suffix(safetensors, ".safetensors") == safetensors
    assert shard_name("model", 7, 12, ".bin") == "model-00007-of-00012.bin"


@pytest.mark.parametrize(
    ("name", "suffix", "stem"),
    [
        ("pytorch_model.bin", ".safetensors", "model"),
        ("model.fp16.safetensors", ".bin", "pytorch_model.fp16"),
        ("model.safetensors.index.fp16.json", ".safetensors", "model.fp16"),
        ("diffusion_pytorch_model-00001-of-00002.bin", ".safetensors", "diffusion_pytorch_model"),
        ("adapter_model.safetensors", ".bin", "adapter_model"),
        ("llama.pt", ".safetensors", "model"),
        ("model.pt", ".bin", "pytorch_model"),
        ("epoch=3-step=100.ckpt", ".bin", "pytorch_model"),
    ],
)
def test_a_set_gets_a_stem_that_the_hub_looks_for(name: str, suffix: str, stem: str) -> None:
    """A set keeps its stem if the Hub uses this stem. Otherwise it gets the stem of a model."""
    assert stem_for(name, suffix) == stem


def test_the_name_of_an_index() -> None:
    """The variant of one of the Hub's stems follows the word index. A dot in any other stem does not begin a
    variant.
    """
    assert index_name("model", ".safetensors") == "model.safetensors.index.json"
    assert index_name("model.fp16", ".safetensors") == "model.safetensors.index.fp16.json"
    assert index_name("llama-3.1", ".bin") == "llama-3.1.bin.index.json"


# The set of a folder


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_an_index_is_a_set(tmp_path: Path) -> None:
    """``find_set`` returns the set of an index for the folder of the index and for its path. For a folder without
    shards, the result is None.
    """
    assert find_set(tmp_path) is None
    touch(tmp_path, "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = find_set(path)
        assert found and (found.stem, found.suffix, found.index) == (
            "model",
            ".safetensors",
            "model.safetensors.index.json",
        )


def test_shards_without_an_index(tmp_path: Path) -> None:
    """Shards without an index are a set if all of them exist. Otherwise the error contains the number and the names of
    those that are missing.
    """
    touch(tmp_path, *(shard_name("model", n, 4, ".bin") for n in (1, 2, 4)))
    with pytest.raises(MalformedError, match=r"1 of 4 shards is missing: model-00003-of-00004\.bin"):
        find_set(tmp_path)
    touch(tmp_path, "model-00003-of-00004.bin")
    found = find_set(tmp_path)
    assert found and found.shards == tuple(shard_name("model", n, 4, ".bin") for n in range(1, 5))
    touch(tmp_path, "model-00000-of-00004.bin")
    with pytest.raises(MalformedError, match="numbered 1, 2, 3"):
        find_set(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
        ("model.safetensors", "pytorch_model-00001-of-00001.bin"),  # with the same weights or others
    ],
)
def test_several_models_in_one_folder(first: str, second: str, tmp_path: Path) -> None:
    """A folder with several checkpoints is refused, and the hint contains a path to use. The path of an index selects
    its set.
    """
    touch(tmp_path, first, second)
    with pytest.raises(RefusedError, match="several checkpoints") as caught:
        find_set(tmp_path)
    assert second in caught.value.what
    assert caught.value.hint == f"use its path: {tmp_path}/{first}"
    assert not second.endswith(".json") or find_set(tmp_path / second)


def test_sets_by_their_names() -> None:
    """Sets are distinguished by stem, variant and number of shards. Shards with an index belong to the set of this
    index.
    """
    sets = sets_in(
        [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "model.fp16-00001-of-00001.safetensors",
            "model.safetensors.index.fp16.json",
            "x-00001-of-00002.bin",
            "x-00001-of-00003.bin",
        ]
    )
    assert [(each.stem, each.suffix, each.index, each.shards, each.count) for each in sets] == [
        (
            "model.fp16",
            ".safetensors",
            "model.safetensors.index.fp16.json",
            ("model.fp16-00001-of-00001.safetensors",),
            0,
        ),
        (
            "model",
            ".safetensors",
            "model.safetensors.index.json",
            ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            0,
        ),
        ("x", ".bin", None, ("x-00001-of-00002.bin",), 2),
        ("x", ".bin", None, ("x-00001-of-00003.bin",), 3),
    ]


def test_missing_shards(tmp_path: Path) -> None:
    """Shards in the index that do not exist are counted and named. A link to a file counts as a shard, and a broken
    link does not.
    """
    (tmp_path / "blob").touch()
    os.symlink("blob", tmp_path / "a.bin")
    os.symlink("nowhere", tmp_path / "b.bin")
    refuse_missing(SourceFolder(tmp_path), ["a.bin"])
    with pytest.raises(MalformedError, match=r"2 of 3 shards are missing: b\.bin, c\.bin"):
        refuse_missing(SourceFolder(tmp_path), ["a.bin", "b.bin", "c.bin"])


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder cannot be listed, the error contains the reason from the system."""
    monkeypatch.setattr(os, "scandir", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match="Permission denied"):
        find_set(tmp_path)


# Planning


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5_000_000_000), ("500MB", 500_000_000), ("1.5 kb", 1500), (" 2TB ", 2 * 10**12), (700, 700), ("700", 700)],
)
def test_sizes_are_decimal(text: int | str, nbytes: int) -> None:
    """Units are decimal, as in the tools of the Hub. A number without a unit means bytes."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "5GiB",
        "-5GB",
        -5,
        0,
        "0GB",
        "0.1KBB",
        "1e9",
        "nanGB",
        "infGB",
        "1.5",
        "5 G B",
        "٥GB",
        400 * "9" + "TB",
    ],
)
def test_an_invalid_size(text: int | str) -> None:
    """An invalid size is refused, and the error contains examples."""
    with pytest.raises(UsageError, match="5GB, 500MB"):
        parse_size(text)


def test_a_size_of_another_type() -> None:
    """A size of another type raises a TypeError."""
    for size in (5e9, None, True):
        with pytest.raises(TypeError, match="5GB"):
            parse_size(size)  # type: ignore[arg-type]


def test_the_plan_equals_that_of_huggingface_hub() -> None:
    """A state dict with a tie and a large tensor gets the same shards and names as from
    ``split_torch_state_dict_into_shards``.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    tied = torch.zeros(50)
    state = {
        "a": torch.zeros(100),
        "tied": tied,
        "big": torch.zeros(1000),
        "b": torch.zeros(60),
        "again": tied,
        "c": torch.zeros(9),
    }
    theirs = split_torch_state_dict_into_shards(state, max_shard_size=860)
    weights = {name: Weight(t.untyped_storage().nbytes(), t.untyped_storage().data_ptr()) for name, t in state.items()}
    ours = deal(weights, 860, "model", ".safetensors")
    assert {file: sorted(names) for file, names in ours.files} == {
        file: sorted(names) for file, names in theirs.filename_to_tensors.items()
    }
    assert ours.index == "model.safetensors.index.json"
    assert [name for _, names in ours.files for name in names if name != "big"] == ["a", "tied", "b", "again", "c"]


def test_one_shard_needs_no_index() -> None:
    """A single shard has the plain name and no index, as with the tools of the Hub. Braces in the stem do not
    change.
    """
    ours = deal({"a": Weight(5, 1)}, "1KB", "{x}", ".bin")
    assert (ours.files, ours.index) == ((("{x}.bin", ("a",)),), None)


def test_too_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shards than the five digits of a name can count are refused."""
    monkeypatch.setattr("ckptconv.formats.sharded.writing.LIMITS", Limits(shards=3))
    with pytest.raises(UsageError, match="would take 4 shards"):
        deal({str(i): Weight(8, i) for i in range(4)}, 8, "model", ".bin")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub, the hint contains the command that installs it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="huggingface_hub") as caught:
        deal({"a": Weight(5, 1)}, "1KB", "model", ".bin")
    assert caught.value.hint == 'pip install "ckptconv[hub]"'


def test_planning_needs_no_torch() -> None:
    """Planning needs only the sizes of tensors, so torch is not imported."""
    run_without_torch(
        "from ckptconv.formats.sharded.writing import Weight, deal;deal({'a': Weight(5, 1)}, '1KB', 'model', '.bin')"
    )
