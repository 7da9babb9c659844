"""The index of a sharded checkpoint, and the names of its files: a strict reader, and the bytes of a new index.

Layout of each set of shards in a folder (huggingface_hub's ``serialization/_torch.py``, transformers'
``modeling_utils.py``):

    STEM-00001-of-00003.safetensors      each shard is a checkpoint of its own; .bin is a file of torch.save
    STEM.safetensors.index.json          {"metadata": {"total_size": bytes, ...}, "weight_map": {NAME: SHARD, ...}}

A variant is a part of the stem of the shards. In the index's name it follows the word index:
``model.fp16-00001-of-00002.safetensors`` and ``model.safetensors.index.fp16.json``.

Only the names of shards are checked, not their links, because a folder of the Hub's cache consists of links to
``../../blobs``. This reader is stricter than others: it refuses duplicate keys, names with folders in them, and shards
of two formats in one set.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import InputError, MalformedError, RefusedError, check_limit, count, some
from ckptconv.formats.safetensors_header import StrictJson, check_nesting
from ckptconv.formats.writers import WRITERS, HubName, split_suffix
from ckptconv.hints import shell
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Object
from ckptconv.stores import list_folder
from ckptconv.system.names import stays_inside

NAME = "sharded"  # before the name of the format of each shard
TOTAL_SIZE = "total_size"
_SHOWN = 5  # shards that an error lists
_WITHOUT = "download it again, or delete it: complete shards are read without an index"
#: The name of a model in shards by the Hub's tools, by the suffix of the shards.
_MODELS = {writer.hub.suffix: writer.hub.model for writer in WRITERS.values() if writer.hub and writer.shards}
_SUFFIXES = "|".join(map(re.escape, _MODELS))
_SHARD = regex(
    rf"(?P<stem>.+)-(?P<number>\d{{5}})-of-(?P<count>\d{{5}})(?P<variant>\.[^.]+)?(?P<suffix>{_SUFFIXES})", re.ASCII
)
_INDEX = regex(rf"(?P<stem>.+)(?P<suffix>{_SUFFIXES})\.index(?P<variant>\.[^.]+)?\.json")
#: The stems that transformers, diffusers and peft give to a model, and a variant after them.
_ONE_NAME = ("diffusion_pytorch_model", "adapter_model")  # in all formats
_STEMS = "|".join((*_MODELS.values(), *_ONE_NAME))
_HUB = regex(rf"(?P<stem>{_STEMS})(?P<variant>\.[^.]+)?")
_WHOLE = regex(rf"({_STEMS})({_SUFFIXES})")
_MODEL = regex(rf"({'|'.join(_MODELS.values())})(-[0-9]{{5}}-of-[0-9]{{5}})?")


# Names


@dataclass(frozen=True)
class ShardSet:
    """A checkpoint in shards, as the file names in its folder describe it.

    Attributes:
        stem: The stem of the names, with the variant: ``model``, ``model.fp16``.
        suffix: The suffix of the shards.
        index: The name of the index, or None if there is no index.
        shards: The names of the shards that exist. Empty if only the path of the index is known.
        count: The number of shards according to their names, or 0 if there is an index.
    """

    stem: str
    suffix: str
    index: str | None
    shards: tuple[str, ...]
    count: int


def is_index(name: str) -> bool:
    """Return whether `name` is a name that the Hub's libraries give to an index of shards."""
    return name.endswith(".index.json") or (".index." in name and name.endswith(".json"))


def is_index_file(path: Path) -> bool:
    """Return whether the file at `path` is an index of shards, by its name or its content.

    The content is read only if the suffix is ``.json``: an index has a dict ``weight_map``. Return False if the file is
    missing, too long or not valid JSON. Opening it then raises the error.
    """
    if is_index(path.name):
        return True
    if path.suffix.lower() != ".json":
        return False
    try:
        with Source(path) as source:
            data = source.read(0, source.size) if source.size <= LIMITS.foreign_index else b""
            check_nesting(data)
            top = json.loads(data) if b'"weight_map"' in data else None
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(top, dict) and isinstance(top.get("weight_map"), dict)


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """Return the name of shard `number` of `count`. The first shard has the number 1."""
    return f"{stem}-{number:05d}-of-{count:05d}{suffix}"


def index_name(stem: str, suffix: str) -> str:
    """Return the name of the index of shards with this `stem` and `suffix`.

    If the stem is a model of the Hub with a variant (``model.fp16``), the variant follows the word index.
    """
    hub = _HUB.fullmatch(stem)
    if hub and hub["variant"]:
        return f"{hub['stem']}{suffix}.index{hub['variant']}.json"
    return f"{stem}{suffix}.index.json"


def stem_for(name: str, suffix: str) -> str:
    """Return the stem of the new shards with `suffix` that are written for a source file, shard or index called `name`.

    The stem is one that the Hub's tools look for. If `name` has another stem, it is the model's name for `suffix`.
    """
    match = _matched(name)
    stem = _family(match)[0] if match else split_suffix(name)[0]
    return _stem_like(stem if _HUB.fullmatch(stem) else "model", suffix)


def hub_name(stem: str, hub: HubName) -> str | None:
    """Return the Hub's file name for `stem`, a complete model or a shard, in the format of `hub`.

    Return None if the Hub's tools do not use such a stem.
    """
    if match := _MODEL.fullmatch(stem):
        return f"{hub.model}{match[2] or ''}{hub.suffix}"
    return stem + hub.suffix if stem.endswith(_ONE_NAME) else None


def of_other_suffix(name: str, suffix: str) -> str:
    """Return the name that the shard or index `name` has in a set with `suffix`.

    ``pytorch_model-….bin`` becomes ``model-….safetensors``. Another file gets `suffix` in place of its own, and another
    JSON file keeps its name.
    """
    match = _matched(name)
    if match is None:
        return name if name.endswith(".json") else split_suffix(name)[0] + suffix
    if match["suffix"] == suffix:
        return name
    stem, start, end = match.end("stem"), match.start("suffix"), match.end("suffix")
    return _stem_like(name[:stem], suffix) + name[stem:start] + suffix + name[end:]


def renumbered(names: list[str]) -> list[str]:
    """Return `names` of shards with new numbers, 1 to the length of the list.

    If any name has no number, return `names` unchanged.
    """
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    if len(matches) < len(names):
        return names
    return [
        shard_name(match["stem"], number, len(names), f"{match['variant'] or ''}{match['suffix']}")
        for number, match in enumerate(matches, 1)
    ]


def family_of(name: str) -> str | None:
    """Return the stem, with the variant, of the model that the file `name` belongs to. It is the same for all formats.

    Return None if `name` is not the name of a shard, an index or a complete model of the Hub.
    """
    match, model = _matched(name), re.fullmatch(rf"({_HUB.pattern})({_SUFFIXES})", name)
    stem = _family(match)[0] if match else model[1] if model else None
    return _stem_like(stem, next(iter(_MODELS))) if stem else None


def _stem_like(stem: str, suffix: str) -> str:
    """Return `stem` with the model name that transformers uses for `suffix`: ``pytorch_model`` or ``model``.

    Other stems are returned unchanged.
    """
    model, dot, variant = stem.partition(".")
    if model in _MODELS.values():
        model = _MODELS[suffix]
    return model + dot + variant


def sets_in(names: Iterable[str]) -> list[ShardSet]:
    """Return the sets of shards among files with these `names`.

    There is one set for each index, in first place, and one for each stem, suffix and number of shards without an
    index.
    """
    indexes: dict[tuple[str, str], list[str]] = defaultdict(list)
    shards: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if match := _INDEX.fullmatch(name):
            indexes[_family(match)].append(name)
        elif match := _SHARD.fullmatch(name):
            shards[_family(match)][int(match["count"])].append(name)
    sets = []
    for family, index_names in indexes.items():
        members = tuple(name for part in shards.pop(family, {}).values() for name in part)
        sets += [ShardSet(*family, name, members, 0) for name in index_names]
    return sets + [
        ShardSet(*family, None, tuple(part), number)
        for family, parts in shards.items()
        for number, part in parts.items()
    ]


def _matched(name: str) -> re.Match[str] | None:
    """Return the match of `name` as a shard or an index, or None if it is neither."""
    return _SHARD.fullmatch(name) or _INDEX.fullmatch(name)


def _family(match: re.Match[str]) -> tuple[str, str]:
    """Return the stem with the variant, and the suffix, from the match of a shard or an index."""
    return match["stem"] + (match["variant"] or ""), match["suffix"]


def names_in(folder: Path) -> list[str]:
    """Return the names of the folders and files in `folder`. Raises InputError.

    Folders are included, so that opening a folder with the name of a shard raises an error that says it is a folder.
    """
    folders, files = list_folder(folder)
    return [*folders, *files]


def find_set(path: Path, faults: FaultSink = RAISED) -> ShardSet | None:
    """Return the set of shards at `path`, an index or a folder, or None if the folder has no shards.

    For an index, the set contains only names: the index is not read. Without an index, a missing shard is a fault.
    Raises RefusedError if the folder has several models.
    """
    if not path.is_dir():
        match = _INDEX.fullmatch(path.name)
        return ShardSet(*(_family(match) if match else ("model", "")), path.name, (), 0)
    names = names_in(path)
    sets = sets_in(names)
    models = sorted(name for name in names if _WHOLE.fullmatch(name))
    if sets and len(sets) + len(models) > 1:
        raise _several(path, sets, models)
    if sets and sets[0].index is None:
        _refuse_gaps(path, sets[0], faults)
    return sets[0] if sets else None


def _several(path: Path, sets: list[ShardSet], models: list[str]) -> RefusedError:
    """Return the error for the folder `path` with several checkpoints: `sets` of shards and `models` in one file."""
    listed = some([shard_set.index or f"{shard_set.shards[0]} …" for shard_set in sets] + models, _SHOWN)
    one = next((name for name in (*(shard_set.index for shard_set in sets), *models) if name), None)
    return RefusedError(
        f"there are several checkpoints in it: {listed}",
        where=path,
        hint=f"use its path: {shell(path / one)}" if one else "put each into its own folder",
    )


def _refuse_gaps(path: Path, shards: ShardSet, faults: FaultSink) -> None:
    """Report a fault if some of `shards`, a set without an index, are missing or are numbered wrongly."""
    matches = [match for name in shards.shards if (match := _SHARD.fullmatch(name))]
    numbers = {int(match["number"]) for match in matches}
    missing = [n for n in range(1, shards.count + 1) if n not in numbers]
    if missing:
        stem, end = matches[0]["stem"], (matches[0]["variant"] or "") + shards.suffix
        faults.found(_missing(path, [shard_name(stem, n, shards.count, end) for n in missing], shards.count))
    elif len(shards.shards) != shards.count or not shards.count:
        faults.found(
            MalformedError(
                f"the shards {shards.shards[0]} … are not numbered 1, 2, 3, ...",
                where=path,
                expected=count(shards.count, "shard"),
                got=len(shards.shards),
            )
        )


def refuse_missing(folder: SourceFolder, shards: list[str]) -> list[str]:
    """Return those of `shards` that exist in `folder`. Report a fault that lists the missing ones.

    `shards` are the names in an index.
    """
    missing = folder.missing(shards)
    if missing:
        folder.faults.found(_missing(folder.folder, sorted(missing), len(shards)))
    return [name for name in shards if name not in missing]


def refuse_unnamed(folder: SourceFolder, index: Index) -> None:
    """Report a fault if `folder` has shards that are numbered like those of `index`, but are not listed in it.

    A reader that goes by the names of files would read them.
    """
    named = index.shards()
    numbered = {(_family(match), match["count"]) for name in named if (match := _SHARD.fullmatch(name))}
    unnamed = sorted(
        name
        for name in {*folder.names()} - {*named}
        if (match := _SHARD.fullmatch(name)) and (_family(match), match["count"]) in numbered
    )
    if unnamed:
        are = "is" if len(unnamed) == 1 else "are"
        folder.faults.found(
            MalformedError(
                f"{count(len(unnamed), 'shard')} {are} not in the index: {some(unnamed, _SHOWN)}",
                where=folder.folder,
                hint=_WITHOUT,
            )
        )


def _missing(folder: Path, names: list[str], total: int) -> MalformedError:
    """Return the error for the missing shards `names`. The set has `total` shards."""
    are = "is" if len(names) == 1 else "are"
    return MalformedError(
        f"{len(names):,} of {count(total, 'shard')} {are} missing: {some(names, _SHOWN)}",
        where=folder,
        hint="download or copy what is missing",
    )


# The index


@dataclass(frozen=True)
class Index:
    """The content of an index.

    Attributes:
        metadata: The object ``metadata``, which usually has ``total_size``.
        weight_map: The shard of each tensor, by the tensor's name, in the order of the index.
        others: The keys of the index other than ``metadata`` and ``weight_map``.
    """

    metadata: dict[str, Any]
    weight_map: dict[str, str]
    others: tuple[str, ...] = ()

    def shards(self) -> list[str]:
        """Return the names of the shards without repetition, sorted, which is the order of their numbers."""
        return sorted(set(self.weight_map.values()))


def read_index(source: Readable) -> Index:
    """Return the index in `source`. Raises MalformedError, LimitError."""
    return _Reader(source, source.path, _WITHOUT).index()


class _Reader(StrictJson):
    """A reader of an index."""

    def index(self) -> Index:
        """Read, check and return the index.

        Raises MalformedError if a name or type is wrong, and LimitError if there are too many shards.
        """
        top = self.parsed()
        if not isinstance(top, dict):
            self.fail("the index is not a JSON object", expected="{", got=type(top).__name__)
        metadata, weight_map = top.get("metadata", {}), top.get("weight_map")
        if not isinstance(metadata, dict):
            self.fail("the index's metadata is not an object", got=type(metadata).__name__)
        if not isinstance(weight_map, dict) or not weight_map:
            self.fail("the index has no weight_map with the shard of each tensor", got=", ".join(top))
        for name, shard in weight_map.items():
            if not isinstance(shard, str):
                self.fail(f"the index names no shard for {name!r}", got=type(shard).__name__)
        shards = dict.fromkeys(weight_map.values())
        match = _INDEX.fullmatch(self.source.path.name)
        suffix = match["suffix"] if match else ""
        for shard in shards:
            if not stays_inside(shard):
                self.fail(
                    "a shard must be named without a folder", expected="a file next to the index", got=repr(shard)
                )
            if not shard.endswith(suffix):
                what = "a shard is of another format than its index"
                self.fail(what, expected=f"a name with {suffix}", got=repr(shard))
        check_limit("the index names too many shards", len(shards), LIMITS.shards, where=self.where)
        return Index(metadata, weight_map, tuple(key for key in top if key not in ("metadata", "weight_map")))

    def parsed(self) -> Any:
        """Return the JSON value of the file, which can be of any type. Raises LimitError if the file is too long."""
        size = self.source.size
        # an index has less about each tensor than a header
        check_limit("the index is too long", size, LIMITS.safetensors_header, "bytes", where=self.where)
        return self.json(self.source.read(0, size), commas=LIMITS.header_quotes)

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return a JSON object from its key-value `pairs`.

        Raises MalformedError if a key occurs twice or a text value is not valid Unicode.
        """
        for _, text in pairs:
            if isinstance(text, str):
                self.check_text(text)
        return super().object(pairs)

    def integer(self, digits: str) -> int:
        """Return the integer written as `digits`. Raises MalformedError if there are too many digits."""
        if len(digits) > LIMITS.index_digits:
            self.fail(
                "a number in the index is too long", expected=f"at most {LIMITS.index_digits} digits", got=len(digits)
            )
        return int(digits)

    def number(self, digits: str) -> float:
        """Return the float written as `digits`. Raises MalformedError if it is not finite.

        Some tools write sizes as floats: ``13476835328.0``.
        """
        value = float(digits)
        if not math.isfinite(value):
            self.fail("a number in the index is not JSON, or too large", got=digits)
        return value


def index_bytes(metadata: dict[str, Any], weight_map: dict[str, str]) -> bytes:
    """Return the bytes of an index with `metadata` and `weight_map`, formatted as by transformers and diffusers."""
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    return (text + "\n").encode()


@dataclass(frozen=True, eq=False)
class Shard:
    """A file of a sharded set.

    Attributes:
        name: The name of the file.
        part: The checkpoint in the file.
        root: The mapping of names to tensors. The root of the set contains the same items.
    """

    name: str
    part: Checkpoint
    root: Object


@dataclass(frozen=True, eq=False)
class ShardedContainer:
    """A sharded set as it was read. The writer needs it.

    Attributes:
        root: The mapping of the names in all shards.
        shards: The shards.
        index: The name of the index. If there is no index, the name that it would have.
        metadata: The metadata of the index, without the entries that record ties.
        names: The number of names.
        contradictions: The metadata texts that differ between shards.
    """

    root: Object
    shards: tuple[Shard, ...]
    index: str
    metadata: Mapping[str, Any]
    names: int
    contradictions: tuple[LeftBehind, ...]
