"""``.metadata`` of DCP folders, which is read without unpickling. Everything that torch writes, or has written, is
read, and everything else is refused.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptconv.byteranges.sources import BytesSource
from ckptconv.dtypes import BY_NAME
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats.distributed.chunks import Chunk, check_cover
from ckptconv.formats.distributed.metadata import Metadata as Read
from ckptconv.formats.distributed.metadata import Stored, TensorItem, read_metadata
from tests.support import torch_facts
from tests.support.reduced import Reduced

WHERE = Path("folder/.metadata")


def good() -> Metadata:
    """Return torch's metadata of a tensor in two chunks and an object."""
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([1, 3])),
    ]
    metadata = Metadata(
        {
            "a.w": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([3, 3]), chunks),
            "epoch": BytesStorageMetadata(),
        },
        {"a.w": ("a", "w"), "epoch": ("epoch",)},
        {
            MetadataIndex("a.w", torch.Size([0, 0]), 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("a.w", torch.Size([2, 0]), 1): _StorageInfo("__1_0.distcp", 0, 90),
            MetadataIndex("epoch"): _StorageInfo("__0_0.distcp", 100, 50),
        },
        StorageMeta(WHERE, "an id"),
    )
    metadata.version = "1.0.0"  # torch 2.6 has no such field
    return metadata


def read(raw: bytes) -> Read:
    return read_metadata(BytesSource(raw, WHERE))


EXPECTED = Read(
    {"a.w": TensorItem(BY_NAME["bfloat16"], (3, 3), [Chunk((0, 0), (2, 3)), Chunk((2, 0), (1, 3))]), "epoch": None},
    {"a.w": ("a", "w"), "epoch": ("epoch",)},
    {
        ("a.w", (0, 0)): Stored("__0_0.distcp", 0, 100),
        ("a.w", (2, 0)): Stored("__1_0.distcp", 0, 90),
        ("epoch", None): Stored("__0_0.distcp", 100, 50),
    },
    has_strides=torch_facts.version() >= (2, 15),
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_torch(protocol: int) -> None:
    """Items, paths and positions equal those of torch's objects, in every pickle protocol."""
    assert read(pickle.dumps(good(), protocol)) == EXPECTED


@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_output_of_torch_2_15(strides: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 adds the strides of one rank's part as a sixth item to the state of TensorProperties. Only the
    presence of this item is recorded.
    """
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], strides))
    assert read(pickle.dumps(good())) == EXPECTED._replace(has_strides=True)


def test_metadata_of_older_versions() -> None:
    """Metadata of versions before torch 2.3 is read. It has no storage_meta and no version, and the class of the
    properties is in another module. A field for transforms exists only if there are transforms.
    """
    metadata = good()
    del metadata.storage_meta, metadata.version
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)  # torch 2.6 has no such field
    raw = pickle.dumps(metadata, 2)
    old = b"torch.distributed._shard.sharded_tensor.metadata\n"
    for name in (b"TensorProperties\n", b"_MEM_FORMAT_ENCODING\n"):
        assert b"torch.distributed.checkpoint.metadata\n" + name in raw
        raw = raw.replace(b"torch.distributed.checkpoint.metadata\n" + name, old + name.lstrip(b"_"))
    assert read(raw) == EXPECTED


def test_without_paths() -> None:
    """A planner that does not flatten the state dict stores no paths."""
    metadata = good()
    metadata.planner_data = None
    assert read(pickle.dumps(metadata)).paths == {}


@pytest.mark.parametrize("name", [name for name in BY_NAME if isinstance(getattr(torch, name, None), torch.dtype)])
def test_every_dtype(name: str) -> None:
    """Each dtype of torch is read as the same dtype."""
    metadata = good()
    metadata.state_dict_metadata["a.w"].properties.dtype = getattr(torch, name)
    item = read(pickle.dumps(metadata)).items["a.w"]
    assert item and item.dtype.name == name


def _index(offset: Any) -> MetadataIndex:
    """Return the index of a chunk with any `offset`."""
    index = MetadataIndex("a.w")
    object.__setattr__(index, "offset", offset)
    return index


class _Other(Metadata):
    pass


def _tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["a.w"]


def _info(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("epoch")]


def _set(find: Callable[[Metadata], Any], name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(find(metadata), name, value)


def _chunk(metadata: Metadata) -> Any:
    return _tensor(metadata).chunks[1]


class _New(Reduced):
    """An object that is pickled as a class, its arguments and a state (NEWOBJ)."""

    def __init__(self, cls: type, args: tuple[Any, ...] = (), state: Any = None) -> None:
        super().__init__(copyreg.__newobj__, (cls, *args), state)

    @property
    def __class__(self) -> Any:  # the pickler compares it
        return self.reduced[1][0]


def _properties(state: Any) -> Callable[[Metadata], None]:
    """Return an edit that gives the properties of the tensor another `state`."""
    return _set(_tensor, "properties", _New(TensorProperties, state=state))


def _size(*numbers: Any) -> Any:
    """Return a torch.Size of any `numbers`, as a pickle can contain it."""
    return Reduced(torch.Size, (numbers,))


UNSUPPORTED = {
    "os.system, or posix.system": (
        lambda m: m.state_dict_metadata.update(bad=Reduced(os.system, ("exit 1",))),
        "system",
    ),
    "a class of others": (lambda m: setattr(m, "planner_data", _Other({})), "_Other"),
    "a field of others": (_set(lambda m: m, "more_data", {}), "more_data"),
    "another version": (_set(lambda m: m, "version", "2.0.0"), "2.0.0"),
    "a transform": (_set(_info, "transform_descriptors", ["zstd"]), "'epoch' was stored through a transform"),
    "properties with a seventh item": (
        _properties((torch.float32, torch.strided, False, None, False, None, 1)),
        "the properties of 'a.w' have a state that is not known to this version",
    ),
    "properties with a dict for their state": (
        _properties({"dtype": torch.float32}),
        "the properties of 'a.w' have a state that is not known to this version",
    ),
    "a chunk that is made with arguments": (
        lambda m: _tensor(m).chunks.append(_New(ChunkStorageMetadata, (1,))),
        "ChunkStorageMetadata is created in a way that this version does not know",
    ),
    "a sparse tensor": (_set(lambda m: _tensor(m).properties, "layout", torch.sparse_coo), "sparse_coo"),
}
MALFORMED = {
    "no dict of items": (_set(lambda m: m, "state_dict_metadata", []), "state_dict_metadata is not a dict"),
    "an item that is none": (lambda m: m.state_dict_metadata.update(epoch=3), "another class"),
    "a name that is not a string": (
        lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}),
        "not a string",
    ),
    "a negative size": (_set(_tensor, "size", _size(-3, 3)), "not a count"),
    "a huge size": (_set(_tensor, "size", _size(1 << 62, 3)), "not a count"),
    "a size that is a bool": (_set(_tensor, "size", _size(True, 3)), "not a count"),
    "a size that is not a number": (_set(_tensor, "size", _size(3.0, 3)), "not a count"),
    "a size that is a list": (_set(_tensor, "size", [3, 3]), "not a torch.Size"),
    "too many dimensions": (_set(_tensor, "size", _size(*[1] * 65)), "at most 64"),
    "a chunk that reaches out": (_set(_chunk, "sizes", torch.Size([2, 3])), "a chunk lies outside of 'a.w'"),
    "a chunk of another rank": (_set(_chunk, "offsets", torch.Size([2])), "a chunk lies outside of 'a.w'"),
    "no list of chunks": (_set(_tensor, "chunks", None), "the chunks of 'a.w' are not a list"),
    "no properties": (_set(_tensor, "properties", None), "another class"),
    "a dtype that is none": (_set(lambda m: _tensor(m).properties, "dtype", torch.float32.__class__), None),
    "properties with four items": (
        _properties((torch.float32, torch.strided, False, None)),
        "the properties of 'a.w' are not a TensorProperties",
    ),
    "no places": (_set(lambda m: m, "storage_data", None), "storage_data is not a dict"),
    "a place twice": (
        lambda m: m.storage_data.update({_index(_size(2, 0)): _StorageInfo("x", 0, 1)}),
        "'a.w' is stored twice",
    ),
    "bytes of two items": (_set(_info, "offset", 99), "are stored in the same bytes"),
    "bytes of a chunk, and of the same without a place": (
        lambda m: m.storage_data.update({_index(None): m.storage_data[_index(torch.Size([0, 0]))]}),
        "are stored in the same bytes",
    ),
    "an object with fields without end": (
        lambda m: vars(_info(m)).update((f"x{i}", 1) for i in range(99)),
        "too many fields",
    ),
    "a negative offset": (_set(_info, "offset", -1), "no valid offset"),
    "a huge length": (_set(_info, "length", 1 << 62), "no valid offset"),
    "a length that is a float": (_set(_info, "length", 5.0), "no valid offset"),
    "an empty path": (lambda m: m.planner_data.update(epoch=()), "no path for 'epoch'"),
    "a negative index": (lambda m: m.planner_data.update(epoch=("a", -1)), "no path for 'epoch'"),
    "an index first": (lambda m: m.planner_data.update(epoch=(0, "a")), "no path for 'epoch'"),
    "a path that is a text": (lambda m: m.planner_data.update(epoch="epoch"), "no path for 'epoch'"),
    **{
        f"the file {file!r}": (_set(_info, "relative_path", file), "not a path inside the folder")
        for file in ("../x", "/etc/passwd", "a/../../x", "", "a//b", "a\0b", "C:x.distcp", "x.distcp:y", "a/NUL", 3)
    },
}


@pytest.mark.parametrize(
    ("kind", "error"),
    [*((kind, UnsupportedError) for kind in UNSUPPORTED), *((kind, InputError) for kind in MALFORMED)],
)
def test_refusals(kind: str, error: type[InputError]) -> None:
    """Contents that this version does not know, and wrong values, are refused. The error contains the reason and the
    path of the file.
    """
    edit, words = {**UNSUPPORTED, **MALFORMED}[kind]
    metadata = good()
    edit(metadata)
    with pytest.raises(error, match=words and re.escape(words)) as caught:
        read(pickle.dumps(metadata))
    assert str(WHERE) in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (pickle.dumps(good()) + b".", "not a plain pickle"),
        (pickle.dumps({"a": 1}), "another class"),
        (pickle.dumps(3), "another class"),
        (pickle.dumps(None), "another class"),
    ],
    ids=["bytes after it", "a dict", "a number", "None"],
)
def test_other_pickles(raw: bytes, words: str) -> None:
    """A pickle with data after its end is refused, and so is the pickle of another object."""
    with pytest.raises(MalformedError, match=words):
        read(raw)


def test_every_cut_is_an_error() -> None:
    """A pickle that is cut at any position raises an InputError."""
    raw = pickle.dumps(good())
    for end in range(len(raw)):
        with pytest.raises(InputError):
            read(raw[:end])


@pytest.mark.untraced
def test_every_byte_changed_is_an_error_or_an_answer() -> None:
    """A pickle in which any byte is changed is read, or raises an InputError."""
    raw = bytearray(pickle.dumps(good(), 4))
    for i in range(len(raw)):
        for change in (1, 0x80):
            raw[i] ^= change
            with suppress(InputError):
                assert isinstance(read(bytes(raw)), Read)
            raw[i] ^= change


@pytest.mark.untraced
def test_one_list_of_chunks_for_many() -> None:
    """If many tensors share one list of chunks, a small file would become a huge number of chunks, so the metadata is
    refused. Separate lists for the same number of tensors are read.
    """

    def many(count: int, chunks: Callable[[], list[ChunkStorageMetadata]]) -> Metadata:
        items = {
            f"w{i}": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([9]), chunks())
            for i in range(count)
        }
        return Metadata(items, {}, {})

    def nine() -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(9)]

    shared = nine()
    assert len(read(pickle.dumps(many(3, lambda: shared))).items) == 3
    with pytest.raises(MalformedError, match="more chunks than"):
        read(pickle.dumps(many(300, lambda: shared)))
    assert len(read(pickle.dumps(many(300, nine))).items) == 300


def test_shared_paths_and_sizes_are_converted_once() -> None:
    """A path or a size that the pickle contains once and uses several times is converted once."""
    metadata = good()
    path, size = ("a", "w") * 50, torch.Size([1] * 60)
    metadata.planner_data = {"a.w": path, "epoch": path}
    chunks = [ChunkStorageMetadata(size, size)]
    metadata.state_dict_metadata = {
        "a.w": TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size([2] * 60), chunks)
    }
    known = read(pickle.dumps(metadata))
    assert known.paths["a.w"] == path and known.paths["a.w"] is known.paths["epoch"]
    item = known.items["a.w"]
    assert item and item.chunks[0].offsets == tuple(size) and item.chunks[0].offsets is item.chunks[0].sizes


# Coverage of a tensor by its chunks


def _stairs(rank: int) -> list[Chunk]:
    """Return chunks that cover a tensor of shape ``(3,) * rank`` and are cut along all dimensions."""
    found, left = [], (3,) * rank
    offsets = [0] * rank
    for d in range(rank):
        found.append(Chunk(tuple(offsets), (*left[:d], 1, *left[d + 1 :])))
        offsets[d] = 1
        left = (*left[:d], 2, *left[d + 1 :])
    return [*found, Chunk(tuple(offsets), left)]


def _chunks(*chunks: Any) -> list[Chunk]:
    return [Chunk(*chunk) for chunk in chunks]


#: Four chunks around an empty middle.
PINWHEEL = _chunks(((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)))
STAIRS = _stairs(31)
HALF = 1 << 61

#: Shapes, and chunks that cover them.
COVERED: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {
    # Chunks need not form a grid, and chunks without elements are ignored.
    "a pinwheel": ((3, 3), [*PINWHEEL, *_chunks(((1, 1), (1, 1)), ((3, 3), (0, 0)), ((3, 0), (0, 3)))]),
    "nothing, twice": ((0, 3), _chunks(((0, 0), (0, 3)), ((0, 0), (0, 3)))),
    "nothing": ((0, 3), []),
    "a scalar": ((), _chunks(((), ()))),
    # A tensor that is cut along dozens of dimensions has more corners than can be counted.
    "40 dimensions": ((2, *[1] * 39), [Chunk((i, *[0] * 39), (1, *[1] * 39)) for i in range(2)]),
    "halves of 2^40": ((2,) * 40, [Chunk((0,) * 39 + (i,), (2,) * 39 + (1,)) for i in range(2)]),
    "stairs": ((3,) * 31, STAIRS),
    "2^61 rows": ((HALF, 3), _chunks(((0, 0), (HALF - 1, 3)), ((HALF - 1, 0), (1, 3)))),
}
#: Shapes, chunks that do not cover them, and a part of the error.
NOT_COVERED: dict[str, tuple[tuple[int, ...], list[Chunk], str]] = {
    "the same rows": ((4, 4), _chunks(((0, 0), (2, 4)), ((0, 0), (2, 4))), "overlap"),
    "a row twice": ((4, 4), _chunks(((0, 0), (3, 4)), ((1, 0), (1, 4))), "overlap"),
    "an element less": ((4,), _chunks(((0,), (2,)), ((3,), (1,))), "leave holes"),
    "an element twice": ((4,), _chunks(((0,), (4,)), ((3,), (1,))), "overlap"),
    "no chunks": ((4,), [], "leave holes"),
    "no chunk of a scalar": ((), [], "leave holes"),
    "a scalar twice": ((), _chunks(((), ()), ((), ())), "overlap"),
    "a pinwheel without its middle": ((3, 3), PINWHEEL, "leave holes"),
    # The number of elements is correct.
    "a pinwheel with a corner twice": ((3, 3), [*PINWHEEL, *_chunks(((0, 0), (1, 1)))], "overlap"),
    "one element of 2^40": ((2,) * 40, [Chunk((0,) * 40, (1,) * 40)], "leave holes"),
    "stairs with a step elsewhere": (
        (3,) * 31,
        [*STAIRS[:-1], Chunk((0, *STAIRS[-1].offsets[1:]), STAIRS[-1].sizes)],
        "overlap",
    ),
    "one of 2^61 rows twice": ((HALF, 3), _chunks(((0, 0), (HALF - 1, 3)), ((HALF - 2, 0), (1, 3))), "overlap"),
}


@pytest.mark.parametrize("kind", COVERED)
def test_chunks_that_cover(kind: str) -> None:
    """Chunks that contain each element exactly once are accepted."""
    check_cover(WHERE, "w", *COVERED[kind])


@pytest.mark.parametrize("kind", NOT_COVERED)
def test_holes_and_overlaps(kind: str) -> None:
    """Holes and overlaps are found, even if the number of elements is correct."""
    shape, chunks, words = NOT_COVERED[kind]
    with pytest.raises(MalformedError, match=f"the chunks of 'w' {words}"):
        check_cover(WHERE, "w", shape, chunks)


def test_a_great_many_chunks() -> None:
    """A tensor in 100,000 chunks is checked, and a hole is found. The chunks are not compared with one another, so the
    check is as fast as reading the metadata.
    """
    rows = [Chunk((i, j), (1, 5)) for i in range(50_000) for j in (0, 5)]
    check_cover(WHERE, "w", (50_000, 10), rows)
    rows[77] = Chunk(rows[77].offsets, (1, 4))
    with pytest.raises(MalformedError, match="leave holes"):
        check_cover(WHERE, "w", (50_000, 10), rows)
