"""Previous findings, seeds and changed seeds pass the targets: only expected errors are raised, and all guarantees
hold.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from ckptconv.formats import torch_zip
from ckptconv.stores.requests import Deadline
from tests.fuzz import targets, texts
from tests.fuzz.again import target_of
from tests.fuzz.archives import archive, records_of
from tests.fuzz.folders import pack, unpack
from tests.fuzz.http_answers import END, ON
from tests.fuzz.mutators import MUTATORS
from tests.fuzz.opcodes import split
from tests.fuzz.seeds import SEEDS, seeds_of

#: torch warns about some objects in the seeds.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Targets that are not tested here. The target "lenient" also runs CPython's unpicklers, so it needs a separate process
#: (tests/fuzz/test_differential.py).
_ELSEWHERE = {"lenient"} if find_spec("urllib3") and find_spec("fsspec") else {"lenient", "http", "index"}
TARGETS = [target for target in SEEDS if target not in _ELSEWHERE]
FINDINGS = [
    path for path in sorted(Path(__file__).with_name("findings").iterdir()) if target_of(path) not in _ELSEWHERE
]
_CHANGES = 40  # changes of each target, without coverage
_LEAST = 3  # the least number that can still be read


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.name)
def test_findings_stay_fixed(path: Path, tmp_path: Path) -> None:
    """An input that once violated a guarantee no longer does."""
    targets.run(target_of(path), path.read_bytes(), tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_pass(target: str, tmp_path: Path) -> None:
    """Every seed keeps all guarantees. More than 60 % of the seeds of each target can be read, so fuzzing passes the
    first checks.
    """
    seeds = seeds_of(target)
    read = [targets.run(target, data, tmp_path) for data in seeds.values()]
    assert sum(read) > len(seeds) * 0.6


@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs_pass_the_first_check(target: str, tmp_path: Path) -> None:
    """Mutated seeds keep all guarantees, and some of them can still be read."""
    random = Random(7)
    seeds = [*seeds_of(target).values()]

    def change(data: bytes) -> bytes:
        at = random.randrange(len(data) + 1)
        return data[:at] + random.randbytes(1) + data[at + 1 :]

    read = 0
    for _ in range(_CHANGES):
        read += targets.run(target, MUTATORS[target](random.choice(seeds), random, change), tmp_path)
    assert read >= _LEAST


def test_a_broken_promise_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception, changed tensors, and damage that verify misses are findings."""
    seed = seeds_of("zip")["state"]
    read = torch_zip.read

    def other_tensors(source: object, *like: object) -> object:
        checkpoint = read(source, *like)  # type: ignore[arg-type]
        for info in checkpoint.tensors.values():
            info.requires_grad = info.path.startswith("w") == ("input" in str(checkpoint.source.path))
        return checkpoint

    with monkeypatch.context() as patched:
        patched.setattr(torch_zip, "read", lambda *_: [][1])
        with pytest.raises(IndexError):
            targets.run("zip", seed, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(torch_zip, "read", other_tensors)
        with pytest.raises(AssertionError, match="the tensors are others"):
            [targets.run("zip", data, tmp_path) for data in seeds_of("zip").values()]
    with monkeypatch.context() as patched:
        patched.setattr(targets, "_verified", lambda path: True)
        with pytest.raises(AssertionError, match="nothing wrong"):
            targets.run("zip", seed[:-1], tmp_path)


def test_words_that_are_not_quoted_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are not quoted for the shell are a finding."""
    monkeypatch.setattr(texts, "shell", lambda *words: " ".join(words))
    with pytest.raises(AssertionError, match="a shell reads other words"):
        targets.run("shell", seeds_of("shell")["plain"], tmp_path)


def test_an_index_that_leads_to_another_folder_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that leads to a file in another folder is a finding if the check of names is removed."""
    pytest.importorskip("fsspec", reason="the extra remote is not installed")
    monkeypatch.setattr("ckptconv.formats.sharded.index.stays_inside", lambda name: True)
    with pytest.raises(AssertionError, match="a file elsewhere"):
        targets.run("index", pack({texts.INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}), tmp_path)


def test_a_secret_that_reaches_a_server_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception, a read past the deadline and a URL in the log of a library are findings."""
    http = pytest.importorskip("ckptconv.stores.http", reason="the extra remote is not installed")
    until, no_header = http.until, b"fHTTP/1.1 206 x\r\nno header\r\n\r\n"
    drips = b"fHTTP/1.1 206 x\r\nX: " + ON + b"y" + END
    for data in (drips, no_header):
        assert not targets.run("http", data, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(http, "check_range", lambda *what: {}[what])
        with pytest.raises(KeyError):
            targets.run("http", seeds_of("http")["ranges"], tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(http, "until", lambda deadline: until(Deadline(deadline.at + 100)))
        with pytest.raises(AssertionError, match="past its deadline"):
            targets.run("http", drips, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(logging.getLogger("urllib3.connection"), "filters", [])
        with pytest.raises(AssertionError, match="says on its own"):
            targets.run("http", no_header, tmp_path)


def test_split_and_joined_inputs_are_unchanged() -> None:
    """Archives, folders and pickles that are split and joined again are unchanged."""
    for data in seeds_of("zip").values():
        records = records_of(data)
        assert records is not None
        again = records_of(archive(records))
        assert again is not None and [(r.name, r.data) for r in again] == [(r.name, r.data) for r in records]
    for data in seeds_of("dcp").values():
        assert pack(unpack(data)) == data
    for data in seeds_of("pickle").values():
        pieces, rest = split(data)
        assert b"".join(pieces) == data and not rest and pieces[-1] == b"."
