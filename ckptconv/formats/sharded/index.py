"""The index of a sharded checkpoint, and the names of its files: a strict reader, and the bytes of a new index.

Layout (huggingface_hub's ``serialization/_torch.py``, transformers' ``modeling_utils.py``),
for each set of shards in one folder:

    STEM-00001-of-00003.safetensors      each shard is a checkpoint of its own; .bin is a file of torch.save
    STEM.safetensors.index.json          {"metadata": {"total_size": bytes, ...}, "weight_map": {NAME: SHARD, ...}}

A variant is a part of the stem, and stands behind the word index: ``model.fp16-00001-of-00002.safetensors`` and
``model.safetensors.index.fp16.json``.

Names of shards are checked as texts: a folder of the Hub's cache consists of links to
``../../blobs``, which are meant. What is stricter than other readers: a key that stands twice, names
with folders in them, shards of two formats in one set.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import InputError, LimitError, MalformedError, RefusedError, count, some
from ckptconv.formats.safetensors_header import check_nesting, is_text
from ckptconv.formats.writers import WRITERS, HubName, split_suffix
from ckptconv.hints import shell
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Object
from ckptconv.stores import list_folder, stays_inside

NAME = "sharded"  # before the name of the format of each shard
TOTAL_SIZE = "total_size"
_SHOWN = 5  # shards that an error lists
_WITHOUT = "fetch it again; or take it away: without it the shards are read as they are, if all are there"
#: What the Hub's tools call a model in shards, by the suffix of these.
_MODELS = {writer.hub.suffix: writer.hub.model for writer in WRITERS.values() if writer.hub and writer.shards}
_SUFFIXES = "|".join(map(re.escape, _MODELS))
_SHARD = regex(
    rf"(?P<stem>.+)-(?P<number>\d{{5}})-of-(?P<count>\d{{5}})(?P<variant>\.[^.]+)?(?P<suffix>{_SUFFIXES})", re.ASCII
)
_INDEX = regex(rf"(?P<stem>.+)(?P<suffix>{_SUFFIXES})\.index(?P<variant>\.[^.]+)?\.json")
#: The stems that transformers, diffusers and peft give to a model, and what tells its variants apart.
_ONE_NAME = ("diffusion_pytorch_model", "adapter_model")  # in all formats
_STEMS = "|".join((*_MODELS.values(), *_ONE_NAME))
_HUB = regex(rf"(?P<stem>{_STEMS})(?P<variant>\.[^.]+)?")
_WHOLE = regex(rf"({_STEMS})({_SUFFIXES})")
_MODEL = regex(rf"({'|'.join(_MODELS.values())})(-[0-9]{{5}}-of-[0-9]{{5}})?")


# Names


@dataclass(frozen=True)
class ShardSet:
    """One checkpoint in shards, by the names in its folder.

    ``index`` is the name of its index, ``shards`` are those that are there; where there is no index, ``count`` says of
    how many, else it is 0.
    """

    stem: str
    suffix: str
    index: str | None
    shards: tuple[str, ...]
    count: int


def is_index(name: str) -> bool:
    """Whether a file called `name` is the index of a sharded set, as the Hub's libraries name it."""
    return name.endswith(".index.json") or (".index." in name and name.endswith(".json"))


def is_index_file(path: Path) -> bool:
    """Whether the file at `path` is the index of a sharded set: by its name, or a JSON file by its content.

    Args:
        path: A path that may be missing, or no regular file.

    Returns:
        False too where the file cannot be read: whoever opens it says why.
    """
    if is_index(path.name):
        return True
    if path.suffix.lower() != ".json":
        return False
    try:
        with Source(path) as source:
            data = source.read(0, source.size) if source.size <= LIMITS.foreign_index else b""
            check_nesting(data)
            found = json.loads(data) if b'"weight_map"' in data else None
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("weight_map"), dict)


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """The name of the shard `number`, from 1 on, of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}{suffix}"


def index_name(stem: str, suffix: str) -> str:
    """The name of the index of the shards `stem`-…`suffix`.

    The Hub's tools look for that of a variant under another name than its shards have.
    """
    hub = _HUB.fullmatch(stem)
    if hub and hub["variant"]:
        return f"{hub['stem']}{suffix}.index{hub['variant']}.json"
    return f"{stem}{suffix}.index.json"


def stem_for(name: str, suffix: str) -> str:
    """The stem of shards with `suffix` that are made of a checkpoint called `name`: a file, a shard or an index.

    One of those that the Hub's tools look for.
    """
    found = _SHARD.fullmatch(name) or _INDEX.fullmatch(name)
    stem = _family(found)[0] if found else split_suffix(name)[0]
    return _stem_like(stem if _HUB.fullmatch(stem) else "model", suffix)


def hub_name(stem: str, hub: HubName) -> str | None:
    """What the Hub's tools call the file `stem`, a whole model or a shard, in the format of `hub`.

    None where they have no name for it.
    """
    if found := _MODEL.fullmatch(stem):
        return f"{hub.model}{found[2] or ''}{hub.suffix}"
    return stem + hub.suffix if stem.endswith(_ONE_NAME) else None


def of_other_suffix(name: str, suffix: str) -> str:
    """What the shard or index `name` is called in a set with `suffix`: ``pytorch_model-….bin`` is
    ``model-….safetensors``.
    """
    found = _SHARD.fullmatch(name) or _INDEX.fullmatch(name)
    if found is None:
        return name if name.endswith(".json") else split_suffix(name)[0] + suffix
    if found["suffix"] == suffix:
        return name
    stem, start, end = found.end("stem"), found.start("suffix"), found.end("suffix")
    return _stem_like(name[:stem], suffix) + name[stem:start] + suffix + name[end:]


def renumbered(names: list[str]) -> list[str]:
    """`names` of shards with the numbers that they have when there are no others.

    As they are, where one is not numbered.
    """
    found = [_SHARD.fullmatch(name) for name in names]
    return (
        [
            shard_name(each["stem"], number, len(names), f"{each['variant'] or ''}{each['suffix']}")
            for number, each in enumerate(found, 1)
            if each
        ]
        if all(found)
        else names
    )


def family_of(name: str) -> str | None:
    """Which model the file `name` is, or a part of: its stem with the variant, one for all formats.

    None where the name says nothing of that.
    """
    found = _SHARD.fullmatch(name) or _INDEX.fullmatch(name)
    whole = re.fullmatch(rf"({_HUB.pattern})({_SUFFIXES})", name)
    stem = _family(found)[0] if found else whole[1] if whole else None
    return _stem_like(stem, next(iter(_MODELS))) if stem else None


def _stem_like(stem: str, suffix: str) -> str:
    """`stem` as the Hub's tools spell it beside `suffix`: transformers has two names for one thing."""
    model, dot, variant = stem.partition(".")
    if model in _MODELS.values():
        model = _MODELS[suffix]
    return model + dot + variant


def sets_in(names: Iterable[str]) -> list[ShardSet]:
    """The sets of shards that files with these `names` are: one for each index, and those that have none."""
    indexes: dict[tuple[str, str], list[str]] = defaultdict(list)
    shards: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if found := _INDEX.fullmatch(name):
            indexes[_family(found)].append(name)
        elif found := _SHARD.fullmatch(name):
            shards[_family(found)][int(found["count"])].append(name)
    sets = []
    for family, called in indexes.items():
        mine = tuple(name for part in shards.pop(family, {}).values() for name in part)
        sets += [ShardSet(*family, name, mine, 0) for name in called]
    return sets + [
        ShardSet(*family, None, tuple(part), number)
        for family, parts in shards.items()
        for number, part in parts.items()
    ]


def _family(found: re.Match[str]) -> tuple[str, str]:
    """Stem and suffix of the set of a shard or an index."""
    return found["stem"] + (found["variant"] or ""), found["suffix"]


def names_in(folder: Path) -> list[str]:
    """What is in `folder`, folders too: one with the name of a shard is said to be one. Raises InputError."""
    folders, files = list_folder(folder)
    return [*folders, *files]


def find_set(path: Path, faults: FaultSink = RAISED) -> ShardSet | None:
    """The set of shards that `path` means, which is an index or a folder; None where it has none.

    Raises RefusedError where it has several models; a fault are shards without an index that are missing.
    """
    if not path.is_dir():
        found = _INDEX.fullmatch(path.name)
        return ShardSet(*(_family(found) if found else ("model", "")), path.name, (), 0)
    names = names_in(path)
    sets = sets_in(names)
    whole = sorted(name for name in names if _WHOLE.fullmatch(name))
    if sets and len(sets) + len(whole) > 1:
        raise _several(path, sets, whole)
    if sets and sets[0].index is None:
        _refuse_gaps(path, sets[0], faults)
    return sets[0] if sets else None


def _several(path: Path, sets: list[ShardSet], whole: list[str]) -> RefusedError:
    """The error for a folder in which there are `sets` of shards and files that are a `whole`
    model, more than one of both together.
    """
    listed = some([each.index or f"{each.shards[0]} …" for each in sets] + whole, _SHOWN)
    one = next((name for name in (*(each.index for each in sets), *whole) if name), None)
    return RefusedError(
        f"it is not clear which checkpoint in it is meant: {listed}",
        where=path,
        hint=f"give its path: {shell(path / one)}" if one else "put each into a folder of its own",
    )


def _refuse_gaps(path: Path, found: ShardSet, faults: FaultSink) -> None:
    """It is a fault unless all shards of `found` are there, which has no index."""
    numbers = {int(match["number"]) for name in found.shards if (match := _SHARD.fullmatch(name))}
    missing = [n for n in range(1, found.count + 1) if n not in numbers]
    if missing:
        first = _SHARD.fullmatch(found.shards[0])
        assert first is not None
        names = [f"{first['stem']}-{n:05d}-of-{first['count']}{first['variant'] or ''}{found.suffix}" for n in missing]
        faults.found(_missing(path, names, found.count))
    elif len(found.shards) != found.count or not found.count:
        faults.found(
            MalformedError(
                f"the shards {found.shards[0]} … are not numbered from 1 on, each number once",
                where=path,
                expected=count(found.count, "shard"),
                got=len(found.shards),
            )
        )


def refuse_missing(folder: SourceFolder, shards: list[str]) -> list[str]:
    """`shards`, named by an index; it is a fault if one is not in `folder`, and who collects faults gets the others."""
    missing = folder.missing(shards)
    if missing:
        folder.faults.found(_missing(folder.folder, sorted(missing), len(shards)))
    return [name for name in shards if name not in missing]


def refuse_unnamed(folder: SourceFolder, index: Index) -> None:
    """Find a fault where shards stand in `folder` that are numbered as those of `index` are, and that it does not name:
    who goes by the names reads them.
    """
    named = index.shards()
    numbered = {(_family(found), found["count"]) for name in named if (found := _SHARD.fullmatch(name))}
    beside = [
        name
        for name in folder.names()
        if (found := _SHARD.fullmatch(name)) and (_family(found), found["count"]) in numbered
    ]
    unnamed = sorted({*beside} - {*named})
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
    are = "is" if len(names) == 1 else "are"
    return MalformedError(
        f"{len(names):,} of {count(total, 'shard')} {are} missing: {some(names, _SHOWN)}",
        where=folder,
        hint="download or copy what is missing",
    )


# The index


@dataclass(frozen=True)
class Index:
    """What an index says: ``weight_map`` has the shard of each tensor, in the index's order.

    ``others`` are keys beside these two, which nobody knows.
    """

    metadata: dict[str, Any]
    weight_map: dict[str, str]
    others: tuple[str, ...] = ()

    def shards(self) -> list[str]:
        """The names of the shards, sorted, which is the order of their numbers."""
        return sorted(set(self.weight_map.values()))


def read_index(source: Readable) -> Index:
    """The index in `source`. Raises MalformedError, LimitError."""
    return _Reader(source).index()


class _Reader:
    """Reads one index, and says what is wrong with it."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        name = _INDEX.fullmatch(source.path.name)
        self.suffix = name["suffix"] if name else None

    def fail(self, what: str, *, expected: object = None, got: object = None) -> NoReturn:
        raise MalformedError(what, where=self.source.path, expected=expected, got=got, hint=_WITHOUT)

    def index(self) -> Index:
        """All of it."""
        top = self.parsed()
        if not isinstance(top, dict):
            self.fail("the index is no JSON object", expected="{", got=type(top).__name__)
        metadata, weight_map = top.get("metadata", {}), top.get("weight_map")
        if not isinstance(metadata, dict):
            self.fail("the index's metadata is no object", got=type(metadata).__name__)
        if not isinstance(weight_map, dict) or not weight_map:
            self.fail("the index has no weight_map, which says in which shard each tensor is", got=", ".join(top))
        for name, shard in weight_map.items():
            if not isinstance(shard, str):
                self.fail(f"the index has no name of a shard for {name!r}", got=type(shard).__name__)
        shards = dict.fromkeys(weight_map.values())
        for shard in shards:
            self.check_shard(shard)
        if len(shards) > LIMITS.shards:
            raise LimitError(
                "the index names too many shards",
                where=self.source.path,
                expected=f"at most {LIMITS.shards:,}",
                got=f"{len(shards):,}",
            )
        return Index(metadata, weight_map, tuple(key for key in top if key not in ("metadata", "weight_map")))

    def parsed(self) -> Any:
        """The JSON, whatever it is."""
        size = self.source.size
        if size > LIMITS.safetensors_header:  # an index says of each tensor less than a header does
            raise LimitError(
                "the index is too long",
                where=self.source.path,
                expected=f"at most {LIMITS.safetensors_header:,} bytes",
                got=f"{size:,}",
            )
        raw = self.source.read(0, size)
        brackets, quotes = raw.count(b"[") + raw.count(b"{"), raw.count(b'"')
        if brackets > LIMITS.header_brackets or max(quotes, raw.count(b",")) > LIMITS.header_quotes:
            raise LimitError("the index describes more than a million tensors could need", where=self.source.path)
        try:
            check_nesting(raw)
            return json.loads(
                raw.decode(),
                object_pairs_hook=self.object,
                parse_int=self.integer,
                parse_float=self.number,
                parse_constant=lambda word: self.fail("the index is no JSON", got=word),
            )
        except UnicodeDecodeError as error:
            self.fail("the index is not UTF-8", got=f"byte {error.start}")
        except json.JSONDecodeError as error:
            self.fail(f"the index is no JSON: {error.msg}", got=f"character {error.pos}")
        except RecursionError:
            raise LimitError("the index is nested too deeply", where=self.source.path) from None

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """A JSON object, each of whose keys stands in it once; all texts in it are texts."""
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)
            self.fail("a key stands twice in the index", got=repr(twice[0][0]))
        for text in (text for pair in pairs for text in pair if isinstance(text, str)):
            if not is_text(text):
                self.fail("half of a surrogate pair in the index is no text", got=repr(text))
        return found

    def integer(self, digits: str) -> int:
        if len(digits) > LIMITS.index_digits:
            self.fail(
                "a number in the index is too long", expected=f"at most {LIMITS.index_digits} digits", got=len(digits)
            )
        return int(digits)

    def number(self, digits: str) -> float:
        """A number that is no integer: some tools counted bits, and wrote ``13476835328.0``."""
        value = float(digits)
        if not math.isfinite(value):
            self.fail("a number in the index is too large", got=digits)
        return value

    def check_shard(self, name: str) -> None:
        """SHARD must name a file in the index's own folder, of the format that the index's name says."""
        if not stays_inside(name):
            self.fail("a shard must be named without a folder", expected="a file beside the index", got=repr(name))
        if self.suffix and not name.endswith(self.suffix):
            self.fail(
                "a shard is of another format than its index", expected=f"a name with {self.suffix}", got=repr(name)
            )


def index_bytes(metadata: dict[str, Any], weight_map: dict[str, str]) -> bytes:
    """The index of a set, as transformers and diffusers write it."""
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    return (text + "\n").encode()


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of a set: its `name`, the checkpoint in it as it was read, and its `root`, which has
    its items in common with the root of all.
    """

    name: str
    part: Checkpoint
    root: Object


@dataclass(frozen=True, eq=False)
class ShardedContainer:
    """What the reader keeps for the writer: the set as it was.

    `index` is the name that its index has or would have, `metadata` what stands in it, `names` how many there were.

    `contradictions` are texts that shards have and that differ from one to the other.
    """

    root: Object
    shards: tuple[Shard, ...]
    index: str
    metadata: Mapping[str, Any]
    names: int
    contradictions: tuple[LeftBehind, ...]
