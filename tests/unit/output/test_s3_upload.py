"""Uploads to S3: the tests that run against a real store in tests/long, here against one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptconv.conversion.convert import run
from ckptconv.conversion.options import OutputOptions
from ckptconv.edits.options import edits_from
from tests.long import test_far_s3
from tests.long.test_far_s3 import (  # noqa: F401  # collected here too
    KINDS,
    MIB,
    state_dicts,
    test_a_dry_run_says_what_it_takes,
    test_a_set_appears_whole,
    test_a_set_is_read_back,
    test_a_source_that_changes_meanwhile,
    test_an_object_that_is_there,
    test_onto_itself,
    test_saving,
    test_several_at_once,
    test_sources,
    test_what_is_not_there,
    test_what_is_read_back_is_not_there,
    url,
)
from tests.support.command import Command
from tests.support.fake_s3 import running_fake
from tests.support.meter import Counted
from tests.support.seaweed import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller files than there, yet of several parts."""
    return state_dicts(tmp_path_factory.mktemp("here"), 5 * MIB // 2)


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store that has the files."""
    with running_fake(tmp_path_factory.mktemp("store")) as store:
        for name in KINDS:
            store.put(name, (folder / name).read_bytes())
        yield store


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_far", [True, False], ids=["from S3", "from here"])
def test_targets(is_far: bool, name: str, store: Store, folder: Path, tmp_path: Path) -> None:
    """The object has the bytes that the file here would have; no upload stays open."""
    test_far_s3.test_targets(is_far, name, "out.pt", {"dtype": "bf16"}, store, folder, tmp_path)
    test_far_s3.test_targets(is_far, name, "out.safetensors", {"strip_prefix": "module."}, store, folder, tmp_path)


@pytest.mark.parametrize("edits", [{"map_location": "cuda:1"}, {"dtype": "bf16"}], ids=["copied", "computed"])
def test_how_far_it_is(edits: dict[str, str], store: Store) -> None:
    """What is read of a far file to compare it, made here, sent or copied, and read back: as much as was promised."""
    meter = Counted()
    run(url("zip.pt"), url("meter.pt"), edits_from(**edits), OutputOptions(verify=True, force=True), progress=meter)
    assert meter.done == meter.promised
    assert meter.promised[0] > 2 * 15 * MIB


def test_a_fault_at_every_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever fails: the old object as it was, and no open upload."""
    test_far_s3.test_a_fault_at_every_request("refused", store, monkeypatch)


def test_a_set_and_a_fault_at_every_request(store: Store, tmp_path: Path) -> None:
    """Whichever fails: no open upload, and no index that names files of two sets."""
    test_far_s3.test_a_set_and_a_fault_at_every_request("same names", store, tmp_path)


def test_it_is_read_back(store: Store, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Each byte of the output, when it is there. What differs is said, stays, and can be written again."""
    test_far_s3.test_it_is_read_back(("--to", "cuda:1"), store, monkeypatch, command)
