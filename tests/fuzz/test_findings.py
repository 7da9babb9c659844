"""What fuzzing found, and what it starts from, through the targets again: nothing but
our errors, and every promise kept.
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

#: torch warns about what the seeds are made with; coverage would go over all modules again and again.
pytestmark = pytest.mark.filterwarnings("ignore")

#: What runs CPython's unpicklers too needs a process of its own (tests/fuzz/test_differential.py).
_ELSEWHERE = {"lenient"} if find_spec("urllib3") and find_spec("fsspec") else {"lenient", "http", "index"}
TARGETS = [target for target in SEEDS if target not in _ELSEWHERE]
FINDINGS = [
    path for path in sorted(Path(__file__).with_name("findings").iterdir()) if target_of(path) not in _ELSEWHERE
]
_CHANGES = 40  # of each target, with no coverage to guide them
_LEAST = 3  # of those that can still be read


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.name)
def test_findings_stay_mended(path: Path, tmp_path: Path) -> None:
    """What once broke a promise keeps it."""
    targets.run(target_of(path), path.read_bytes(), tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_pass(target: str, tmp_path: Path) -> None:
    """Every seed keeps all promises, and most are read: fuzzing starts behind the first check."""
    seeds = seeds_of(target)
    read = [targets.run(target, data, tmp_path) for data in seeds.values()]
    assert sum(read) > len(seeds) * 0.6


@pytest.mark.parametrize("target", TARGETS)
def test_changes_get_behind_the_first_check(target: str, tmp_path: Path) -> None:
    """What the mutators make of seeds keeps all promises, and some of it is still read."""
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
    """An error that is none of ours, tensors that come out as others, damage that verify does not see: each raises."""
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


def test_words_that_a_shell_reads_otherwise_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are not quoted."""
    monkeypatch.setattr(texts, "shell", lambda *words: " ".join(words))
    with pytest.raises(AssertionError, match="a shell reads other words"):
        targets.run("shell", seeds_of("shell")["plain"], tmp_path)


def test_an_index_that_leads_elsewhere_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nobody checked."""
    pytest.importorskip("fsspec", reason="the extra remote is not installed")
    monkeypatch.setattr("ckptconv.formats.sharded.index.stays_inside", lambda name: True)
    with pytest.raises(AssertionError, match="a file elsewhere"):
        targets.run("index", pack({texts.INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}), tmp_path)


def test_what_a_server_must_not_reach_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of ours, an answer that is read past the deadline, a URL in another library's log."""
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


def test_changes_keep_what_they_do_not_change() -> None:
    """Archives, folders and pickles are put together again as they were taken apart."""
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
