"""``DCP_SHARDING_INFO``: the metadata of a safetensors file that says which part of each tensor it holds.

torch's ``HuggingFaceStorageWriter`` writes it into every file, ``{NAME: {"saved_offsets": [n, ...]}}``, also
where all tensors are whole (``torch/distributed/checkpoint/filesystem.py`` and ``_hf_utils.py`` of 2.13). How
large the whole tensors are no file says. So one of them alone can be told from a whole model by its name
only, or where a tensor in it does not begin at 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptconv.byteranges.sources import Readable
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats.safetensors_header import Header, check_nesting
from ckptconv.hints import Placeholder, command
from ckptconv.lazy_regex import regex
from ckptconv.pickles.graph import is_count

SHARDING_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_WHOLE = regex(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")  # beside shard-00001-model-00001-of-00001.safetensors


def saved_offsets(header: Header, path: Path) -> dict[str, tuple[int, ...]] | None:
    """The first index of each part in `header`, that of the file `path`; None where it says none.

    Raises MalformedError.
    """
    text = (header.metadata or {}).get(SHARDING_INFO)
    if text is None:
        return None
    try:
        check_nesting(text.encode(errors="replace"))
        info = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{SHARDING_INFO} is no JSON object", where=path, got=error) from error
    if not isinstance(info, dict):
        raise MalformedError(f"{SHARDING_INFO} is no JSON object", where=path, got=type(info).__name__)
    offsets, wrong = {}, []
    for entry in header.entries:
        first = _offsets(info.get(entry.name))
        if first is None or len(first) != len(entry.shape):
            wrong.append(entry.name)
        else:
            offsets[entry.name] = first
    if wrong or len(info) != len(offsets):
        raise MalformedError(
            f"{SHARDING_INFO} does not fit the tensors",
            where=path,
            expected=f"{_OFFSETS} for each, and for no other",
            got=repr(wrong[0]) if wrong else f"{len(info):,} for {len(offsets):,} tensors",
        )
    return offsets


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in it twice")
    return found


def _offsets(entry: object) -> tuple[int, ...] | None:
    """The counts in `entry`; None where there are none."""
    numbers = entry.get(_OFFSETS) if isinstance(entry, dict) else None
    return tuple(numbers) if isinstance(numbers, list) and all(map(is_count, numbers)) else None


def is_part(path: Path, offsets: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the file `path`, whose tensors begin at `offsets`, is one of several that hold parts."""
    return _WHOLE.fullmatch(path.name) is None or any(map(any, offsets.values()))


def part_error(source: Readable) -> InputError:
    """What is to be said of such a file that was given alone."""
    folder = command("convert", source.path.parent, Placeholder("OUT"))
    return UnsupportedError(
        "one part of a distributed checkpoint: torch.distributed.checkpoint saved parts of the same tensors in several"
        " safetensors files",
        where=source.path,
        hint="give the folder with all of them" + (": " + folder if source.is_stored else ", by its path"),
    )
