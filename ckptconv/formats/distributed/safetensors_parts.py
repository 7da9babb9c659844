"""Folders of safetensors files with parts of the same tensors, one file for each process of a run.

torch.distributed.checkpoint's ``HuggingFaceStorageWriter(save_distributed=True)`` leaves them.

Layout: no index and no metadata file; each process wrote files of its own:

    shard-RANK-model-NUMBER-of-COUNT.safetensors    a safetensors file

Its metadata (:mod:`ckptconv.formats.distributed.sharding_info`) says where each of its tensors
belongs in the whole one.

Source: ``torch/distributed/checkpoint/hf_storage.py`` and ``_hf_utils.py`` of torch 2.13. One name stands in several
files, so they are never merged by their names: parts must fit together without holes and overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ckptconv.byteranges.sources import Readable, SourceFolder, list_folder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.new_tensors import row_major
from ckptconv.dtypes import BY_WORD
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats.distributed.chunks import Chunk, assembled, check_cover
from ckptconv.formats.distributed.sharding_info import SHARDING_INFO, is_part, saved_offsets
from ckptconv.formats.safetensors_header import Entry, read_header
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import Dict, Value, set_items

NAME = "DCP safetensors"
_SUFFIX = ".safetensors"
_SHARD = regex(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_ABOUT_PARTS = (SHARDING_INFO, "DCP_VERSION")  # what is not true of whole tensors


def looks_like(folder: SourceFolder) -> bool:
    """Whether `folder`, given as such, has parts: by the names that torch gives them, else by what the
    first file says.
    """
    if not folder.is_whole:
        return False
    names = _names(folder)
    return any(map(_SHARD.fullmatch, names)) or (bool(names) and _has_parts(folder, names[0]))


def _names(folder: SourceFolder) -> list[str]:
    return [name for name in list_folder(folder.folder)[1] if name.endswith(_SUFFIX)]


def _has_parts(folder: SourceFolder, name: str) -> bool:
    try:
        with folder.peek(name) as source:
            offsets = saved_offsets(read_header(source), source.path)
    except InputError:
        return False
    return offsets is not None and is_part(source.path, offsets)


def read(
    folder: SourceFolder,
    read_file: Callable[[Readable], Checkpoint],  # noqa: ARG001 - its files are parts
) -> Checkpoint:
    """The checkpoint in `folder`.

    Raises MalformedError, UnsupportedError, LimitError, and InputError where a file cannot be read.
    """
    parts: dict[str, list[tuple[Entry, ChunkPlacement]]] = {}
    texts: list[dict[str, str]] = []
    folder.missing(names := _names(folder))  # which opens those that are far, several at once
    for name in names:
        source = folder.open(name)
        header = read_header(source)
        offsets = saved_offsets(header, source.path)
        if offsets is None:
            raise MalformedError(
                f"a file without {SHARDING_INFO} stands among parts of tensors",
                where=source.path,
                hint="move what is no part of the checkpoint to another folder",
            )
        texts.append(header.metadata or {})
        for entry in header.entries:
            of = ByteRange(source, header.data_offset + entry.start, entry.end - entry.start)
            placement = ChunkPlacement(of, offsets[entry.name], entry.shape, row_major(entry.shape))
            parts.setdefault(entry.name, []).append((entry, placement))
    merger = Merger(folder)
    items: list[Value] = []
    for name, found in parts.items():
        items += (name, _tensor(merger, name, found))
    root = set_items(Dict(), items)
    checkpoint = merger.checkpoint(NAME, root)
    checkpoint.is_state_dict = True
    checkpoint.metadata = _shared(texts)
    checkpoint.notes.append("no file says how large the tensors are: each reaches as far as its parts")
    return checkpoint


def _tensor(merger: Merger, name: str, parts: list[tuple[Entry, ChunkPlacement]]) -> Value:
    """The tensor `name`, of its `parts`. Raises MalformedError, UnsupportedError."""
    folder = merger.source.path
    words = sorted({entry.word for entry, _ in parts})
    ranks = {len(placement.sizes) for _, placement in parts}
    if len(words) > 1 or len(ranks) > 1:
        raise MalformedError(
            f"the parts of {name!r} do not fit together",
            where=folder,
            expected="one dtype and rank",
            got=" and ".join(words),
        )
    dtype = BY_WORD[words[0]]
    if dtype.packed != 1:
        raise UnsupportedError(
            f"{name!r} has several elements in a byte, whose parts cannot be put together", where=folder, got=dtype.word
        )
    placements = [placement for _, placement in parts]
    ends = (
        [start + size for start, size in zip(placement.offsets, placement.sizes, strict=True)]
        for placement in placements
    )
    shape = tuple(map(max, zip(*ends, strict=True)))
    check_cover(folder, name, shape, [Chunk(placement.offsets, placement.sizes) for placement in placements])
    data = assembled(shape, dtype.itemsize, placements, folder)
    key = str(len(merger.records))
    merger.records[key] = data
    return merger.calls.tensor(dtype, shape, key, prod(shape) * dtype.itemsize)


def _shared(texts: list[dict[str, str]]) -> dict[str, str]:
    """What all of `texts` say, but for what is not true of whole tensors."""
    first, *others = texts
    return {
        key: text
        for key, text in first.items()
        if key not in _ABOUT_PARTS and all(each.get(key) == text for each in others)
    }
