"""Folders of safetensors files with slices of the same tensors, one file for each process of a run.

``HuggingFaceStorageWriter(save_distributed=True)`` of torch.distributed.checkpoint writes them.

Layout: there is no index and no metadata file. Each process wrote its own files:

    shard-RANK-model-NUMBER-of-COUNT.safetensors    a safetensors file

The metadata of each file has ``DCP_SHARDING_INFO``, ``{NAME: {"saved_offsets": [n, ...]}}``: the index in the complete
tensor at which the slice in this file begins. It is written even if all tensors are complete. No file contains the
shapes of the complete tensors. So a single file can be distinguished from a complete model only by its name, or by a
tensor that does not begin at 0.

Source: ``torch/distributed/checkpoint/hf_storage.py``, ``filesystem.py`` and ``_hf_utils.py`` of torch 2.13. Several
files contain the same name, so they are never merged by names: the slices must fit together without holes and
overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, ChunkPlacement
from ckptconv.checkpoint.merging import Merger
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import row_major
from ckptconv.dtypes import BY_WORD
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats.safetensors_header import Entry, Header, check_nesting, read_header
from ckptconv.hints import Placeholder, command
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import Dict, Value, is_count, set_items
from ckptconv.stores import list_folder

NAME = "DCP safetensors"
SHARDING_INFO = "DCP_SHARDING_INFO"
_SHARD = regex(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_ABOUT_PARTS = (SHARDING_INFO, "DCP_VERSION")  # metadata that does not apply to complete tensors
_WHOLE = regex(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")  # next to shard-00001-model-00001-of-00001.safetensors


def saved_offsets(header: Header, path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the first index of each tensor of the file `path` in the complete tensor, from the metadata in `header`.

    Return None if there is no such metadata. Raises MalformedError if it does not fit the tensors.
    """
    text = (header.metadata or {}).get(SHARDING_INFO)
    if text is None:
        return None
    try:
        check_nesting(text.encode(errors="replace"))
        info = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{SHARDING_INFO} is not a JSON object", where=path, got=error) from error
    if not isinstance(info, dict):
        raise MalformedError(f"{SHARDING_INFO} is not a JSON object", where=path, got=type(info).__name__)
    offsets, wrong = {}, []
    for entry in header.entries:
        fields = info.get(entry.name)
        first = fields.get("saved_offsets") if isinstance(fields, dict) else None
        if isinstance(first, list) and all(map(is_count, first)) and len(first) == len(entry.shape):
            offsets[entry.name] = tuple(first)
        else:
            wrong.append(entry.name)
    if wrong or len(info) != len(offsets):
        raise MalformedError(
            f"{SHARDING_INFO} does not match the tensors",
            where=path,
            expected="saved_offsets for each, and for no other",
            got=repr(wrong[0]) if wrong else f"{len(info):,} for {len(offsets):,} tensors",
        )
    return offsets


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of `pairs`. Raises ValueError if a key occurs twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("it contains a key twice")
    return entries


def is_part(path: Path, offsets: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the file `path`, whose tensors begin at `offsets`, contains slices of tensors.

    False if it has the name of a complete model and all offsets are 0.
    """
    return _WHOLE.fullmatch(path.name) is None or any(map(any, offsets.values()))


def part_error(source: Readable) -> InputError:
    """Return the error for `source`, one of several files with slices, which was given without the others."""
    folder = command("convert", source.path.parent, Placeholder("OUT"))
    return UnsupportedError(
        "one part of a distributed checkpoint: torch.distributed.checkpoint saved parts of the same tensors in several"
        " safetensors files",
        where=source.path,
        hint="give the folder with all of them" + (": " + folder if source.is_stored else ", by its path"),
    )


def looks_like(folder: SourceFolder) -> bool:
    """Return whether `folder` contains files with slices: by their names, or by the metadata of the first file.

    False if the user gave an index or a pattern instead of the folder.
    """
    names = _names(folder) if folder.is_whole else []
    if not names or any(map(_SHARD.fullmatch, names)):
        return bool(names)
    try:
        with folder.peek(names[0]) as source:
            offsets = saved_offsets(read_header(source), source.path)
    except InputError:
        return False
    return offsets is not None and is_part(source.path, offsets)


def _names(folder: SourceFolder) -> list[str]:
    return [name for name in list_folder(folder.folder)[1] if name.endswith(".safetensors")]


def read(
    folder: SourceFolder,
    read_file: Callable[[Readable], Checkpoint],  # noqa: ARG001 - its files are parts
) -> Checkpoint:
    """Return the checkpoint merged from the files in `folder`. `read_file` is not used.

    Raises MalformedError, UnsupportedError, LimitError, and InputError if a file cannot be read.
    """
    parts: dict[str, list[tuple[Entry, ChunkPlacement]]] = {}
    texts: list[dict[str, str]] = []
    folder.missing(names := _names(folder))  # opens remote files, several at once
    for name in names:
        source = folder.open(name)
        header = read_header(source)
        offsets = saved_offsets(header, source.path)
        if offsets is None:
            raise MalformedError(
                f"a file without {SHARDING_INFO} is among the parts of tensors",
                where=source.path,
                hint="move files that do not belong to the checkpoint to another folder",
            )
        texts.append(header.metadata or {})
        for entry in header.entries:
            data = ByteRange(source, header.data_offset + entry.start, entry.end - entry.start)
            placement = ChunkPlacement(data, offsets[entry.name], entry.shape, row_major(entry.shape))
            parts.setdefault(entry.name, []).append((entry, placement))
    merger = Merger(folder)
    items: list[Value] = []
    for name, tensor_parts in parts.items():
        items += (name, _tensor(merger, name, tensor_parts))
    checkpoint = merger.checkpoint(NAME, set_items(Dict(), items))
    checkpoint.is_state_dict = True
    first, *others = texts
    checkpoint.metadata = {
        key: text
        for key, text in first.items()
        if key not in _ABOUT_PARTS and all(other.get(key) == text for other in others)
    }
    checkpoint.notes.append("no file records the sizes of the tensors: each ends where its last part ends")
    return checkpoint


def _tensor(merger: Merger, name: str, parts: list[tuple[Entry, ChunkPlacement]]) -> Value:
    """Return a call that rebuilds the tensor `name` from `parts`, its slices with their header entries.

    Raises MalformedError if they do not match, and UnsupportedError if the dtype has several elements in a byte.
    """
    from ckptconv.checkpoint.blocks import assembled
    from ckptconv.formats.distributed.chunks import Chunk, check_cover

    folder = merger.source.path
    words = sorted({entry.word for entry, _ in parts})
    ranks = {len(placement.sizes) for _, placement in parts}
    if len(words) > 1 or len(ranks) > 1:
        raise MalformedError(
            f"the parts of {name!r} do not match",
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
    return merger.tensor(dtype, shape, data)
