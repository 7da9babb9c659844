"""Checkpoints of a public corpus and objects of the zoo, changed in place. A printed table shows how many are changed
in which way.

Each changed file equals the output of ``convert`` and loads equally in torch. ``undo`` restores every byte.
"""

from __future__ import annotations

import csv
import hashlib
import io
import pickle
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import ckptconv
from ckptconv.byteranges.undo_journal import journal_path
from tests.support.judge import assert_same, tags_of
from tests.support.zoo import NEEDS_PROTOCOL, ZOO, save, tagging

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch about deprecated and beta features

#: The edits. The removed prefix is one that the checkpoint contains.
EDITS: dict[str, dict[str, Any]] = {
    "--to cuda:1": {"map_location": "cuda:1"},
    "--to cpu": {"map_location": "cpu"},
    "--map any=mps": {"map_location": {"any": "mps"}},
    "--add-prefix module.": {"add_prefix": "module."},
    "--strip-prefix": {"strip_prefix": None},
    "--rename $=_": {"rename": [("$", "_")]},
    "--rename ^=LONG": {"rename": [("^", "a.name.that.is.much.longer.than.it.was.")]},
}
WAYS = ("same size", "appended", "nothing", "none")


def corpus_files(corpus: Path) -> Iterator[tuple[str, Path]]:
    """Yield the container and the path of each checkpoint of the corpus."""
    with (corpus / "manifest.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield row["container"], corpus / row["path"]


def zoo_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the container and the path of each object of the zoo, in each format that can store it."""
    for name, build in ZOO.items():
        protocol = NEEDS_PROTOCOL.get(name, 2)
        for container, path in (("zip", folder / f"{name}.pt"), ("legacy", folder / f"{name}.legacy.pt")):
            try:
                save(build(), path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
            except Exception:  # the older format cannot store every object
                continue
            yield container, path
        path = folder / f"{name}.pkl"
        with tagging():
            path.write_bytes(pickle.dumps(build(), 4))
        yield "pickle", path


def loads(path: Path, *, safely: bool) -> Any:
    """Return the object that torch or safetensors loads, with the location tags, or None if it does not load.

    If `safely` is true, only torch's safe loader is used, because the files come from other people.
    """
    try:
        if path.suffix == ".safetensors":
            return sorted(load_file(path).items())  # sorted, because the order of the bytes does not change
        if path.suffix == ".pkl" and not safely:
            with mock.patch("torch.storage._load_from_bytes", lambda data: tags_of(io.BytesIO(data))[0]):
                return pickle.loads(path.read_bytes())
        return tags_of(path, weights_only=safely)
    except Exception:
        return None


def prefix_in(path: Path) -> str | None:
    """Return the most common prefix of the names in the state dicts of `path`."""
    counts: Counter[str] = Counter()
    for found in ckptconv.inspect(path).state_dicts:
        counts.update(found.prefixes)
    return next((prefix for prefix, _ in counts.most_common() if prefix.endswith(".")), None)


def way_of(path: Path, copy: Path, edits: dict[str, Any], *, safely: bool) -> str | None:
    """Change `path` in place and return the way of the change, or None if `edits` do not apply. Fail unless the result
    equals the conversion of `copy`, and ``undo`` restores `path`.
    """
    converted = copy.with_name("converted" + copy.suffix)
    try:
        ckptconv.convert(copy, converted, force=True, allow_unsafe=True, **edits)
    except ckptconv.CkptconvError:
        return None
    before = hashlib.sha256(path.read_bytes()).digest()
    try:
        report = ckptconv.convert(path, in_place=True, allow_unsafe=True, **edits)
    except (ckptconv.RefusedError, ckptconv.UnsupportedError) as error:
        if "ckptconv.convert(" not in str(error):
            raise
        assert hashlib.sha256(path.read_bytes()).digest() == before
        return "none"
    assert report.in_place
    difference = ckptconv.diff(path, converted)
    assert difference.same, (path, edits, difference)
    assert ckptconv.inspect(path).devices == ckptconv.inspect(converted).devices
    # torch writes a few files that it cannot read, and convert changes their format.
    wanted = None if loads(copy, safely=safely) is None else loads(converted, safely=safely)
    if wanted is not None:
        assert_same(loads(path, safely=safely), wanted)
    if report.in_place.way != "nothing":
        ckptconv.undo(path)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert not journal_path(path).exists()
    return f"{report.in_place.way}{'' if wanted is None else ' loaded'}"


@pytest.mark.parametrize("whose", ["corpus", "zoo"])
def test_every_checkpoint(whose: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    files = corpus_files(request.getfixturevalue("corpus")) if whose == "corpus" else zoo_files(tmp_path)
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for container, source in files:
        path, copy = tmp_path / f"in_place{source.suffix}", tmp_path / f"copy{source.suffix}"
        shutil.copyfile(source, path)
        shutil.copyfile(source, copy)
        for asked, edits in EDITS.items():
            if "strip_prefix" in edits:
                try:
                    edits = {"strip_prefix": prefix_in(path)}
                except ckptconv.CkptconvError:
                    continue
            if None in edits.values():
                continue
            way = way_of(path, copy, edits, safely=whose == "corpus")
            if way:
                table[container, asked][way.removesuffix(" loaded")] += 1
                table[container, asked]["loaded"] += way.endswith(" loaded")
    print(f"\n{whose:15} {'':22}" + "".join(f"{way:>11}" for way in (*WAYS, "loaded")))
    for (container, asked), counts in sorted(table.items()):
        print(f"{container:15} {asked:22}" + "".join(f"{counts[way]:11}" for way in (*WAYS, "loaded")))
    zips = [counts for (container, _), counts in table.items() if container in ("zip", "zip-pt")]
    assert zips and not any(counts["none"] for counts in zips)
    assert torch.tensor([counts["loaded"] for counts in table.values()]).sum() > 100
