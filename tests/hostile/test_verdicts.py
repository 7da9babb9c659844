"""inspect, verify and convert reach the same verdict on every hostile file and folder of the tests.

If inspect or convert refuses the input, verify does not end with 0. If verify finds damage, inspect refuses the file,
or convert with --verify does.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import ckptconv
from ckptconv.cli.main import main
from ckptconv.errors import CkptconvError, DangerousError, InputError, LimitError
from ckptconv.inspection.verification import checkpoints_in
from tests.fuzz.folders import unpack, write
from tests.fuzz.seeds import seeds_of
from tests.support.writers import distributed

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of torch about the contents of the seeds

#: Tables of hostile files: the module, the file name, and the names of the tables.
TABLES = [
    ("tests.hostile.test_threats", "m.pt", ["MALFORMED", "SIZES", "ZIPS", "OLDER"]),
    ("tests.hostile.test_threats", "m.safetensors", ["HEADERS"]),
    ("tests.unit.formats.test_torch_zip", "m.pt", ["MALFORMED"]),
    ("tests.unit.formats.test_torch_legacy", "m.pt", ["BAD"]),
    ("tests.unit.formats.test_zip_archive", "m.pt", ["MALFORMED", "UNSUPPORTED"]),
    ("tests.unit.formats.test_safetensors_header", "m.safetensors", ["BROKEN", "DIFFERENCES"]),
    ("tests.unit.formats.test_plain_pickle", "m.pkl", ["REFUSED"]),
    ("tests.unit.formats.foreign.test_files", "m.bin", ["FILES", "PARTS"]),
    ("tests.unit.safety.test_torch_load", "m.pt", ["PICKLES"]),
    ("tests.unit.safety.test_scan", "m.pkl", ["NAMED"]),
]
#: The seeds of the fuzzers, and the file name of each kind. None means folders.
SEEDS = {
    "zip": "m.pt",
    "legacy": "m.pt",
    "pickle": "m.pkl",
    "safetensors": "m.safetensors",
    "shards": None,
    "dcp": None,
    "zero": None,
}
_LARGE = 1 << 21  # bytes; larger files test something else


def _files(value: object) -> Iterator[bytes]:
    """Yield the files in `value`, a row of a table."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _files(each)
    elif callable(value) and not isinstance(value, type):
        yield from _files(value())


def verdict(path: Path) -> str | None:
    """Run the three commands on `path`, a checkpoint or a folder with one. Return their disagreement, or None if they
    agree.
    """
    inspected, verified = main(["inspect", str(path)]), main(["verify", str(path)])
    refused = None
    try:
        (checkpoint,) = checkpoints_in(path)
        ckptconv.convert(checkpoint, path.parent / "out.pt", verify=True, force=True)
    except CkptconvError as error:
        refused = error
    if inspected and not verified:
        return "inspect refuses what verify calls ok"
    if isinstance(refused, InputError) and not verified and not _is_output(refused):
        return f"convert refuses what verify calls ok: {refused}"
    levels = {finding.level for finding in ckptconv.verify(path).findings} if verified and not inspected else set()
    if "damaged" in levels and not refused:
        return "verify finds damage that inspect and convert --verify do not"
    return None


def _is_output(error: InputError) -> bool:
    """Return whether `error` is about the output: the output is too large, or would run something."""
    return isinstance(error, (LimitError, DangerousError))


def assert_one_verdict(files: Mapping[str, bytes], name: str, tmp_path: Path) -> None:
    differ = {}
    for i, (row, data) in enumerate(files.items()):
        path = tmp_path / str(i) / name
        path.parent.mkdir()
        path.write_bytes(data)
        if said := verdict(path):
            differ[row] = said
    assert files and not differ


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name", "tables"), TABLES, ids=lambda value: str(value))
def test_of_files(module: str, name: str, tables: list[str], tmp_path: Path) -> None:
    """The three commands agree on every file smaller than 2 MB in the tables of other tests."""
    found = importlib.import_module(module)
    files = {
        f"{table}: {row} {i}": data
        for table in tables
        for row, value in getattr(found, table).items()
        for i, data in enumerate(_files(value))
        if len(data) < _LARGE
    }
    assert_one_verdict(files, name, tmp_path)


@pytest.mark.parametrize("target", SEEDS)
def test_verdicts_on_the_seeds_of_the_fuzzers(target: str, tmp_path: Path) -> None:
    """The three commands agree on every seed of the fuzzers and on every file or folder that the fuzzers found."""
    findings = (Path(__file__).parent.parent / "fuzz" / "findings").glob(f"{target}-*")
    files = seeds_of(target) | {path.name: path.read_bytes() for path in findings}
    name = SEEDS[target]
    if name:
        assert_one_verdict(files, name, tmp_path)
        return
    differ = {}
    for row, packed in files.items():
        folder = tmp_path / row
        folder.mkdir()
        write(unpack(packed), folder)
        if said := verdict(folder):
            differ[row] = said
    assert files and not differ


def test_of_folders_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """The three commands agree on every refused edit of ``.metadata``, and on tensors without chunks whose shapes
    contain 0.
    """
    found: Any = importlib.import_module("tests.unit.formats.distributed.test_metadata")

    def shape(*sizes: int) -> Any:
        item = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(sizes), [])
        return lambda metadata: metadata.state_dict_metadata.update(empty=item), None

    edits = found.UNSUPPORTED | found.MALFORMED
    edits |= {f"the shape {sizes}": shape(*sizes) for sizes in ((0, 1 << 61, 1 << 61), (1 << 61, 0, 1 << 61), (0, 3))}
    differ = {}
    for i, (row, (edit, _)) in enumerate(edits.items()):
        folder = distributed({"a": {"w": torch.ones(3, 3).bfloat16()}, "epoch": 3}, tmp_path / str(i))
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        with contextlib.suppress(IndexError, KeyError):  # the edit is of a chunk that this folder does not contain
            edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        if said := verdict(folder):
            differ[row] = said
    assert not differ
