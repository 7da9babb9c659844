"""Limits of inputs: a file at a limit is read, and is refused if the limit is lower by one.

The limits are small here. A file at the real limits would have gigabytes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pickle
import pickletools
import re
import struct
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckptconv
from ckptconv.errors import CkptconvError, LimitError, MalformedError, RefusedError, UnsupportedError
from ckptconv.limits import LIMITS, Limits
from ckptconv.pickles import paths
from tests.support.conversions import read
from tests.support.hostile_bytes import dict_of, storage, tensor, text, torch_zip_of
from tests.support.legacy_files import legacy_file, storage_id
from tests.support.reduced import Reduced
from tests.support.writers import distributed


class Case(NamedTuple):
    """A file that takes `size` of a limit, and the `kind` and `what` of the error if the limit is lower by one.

    `run` reads the file. `modules` are the modules in which the limit is set, by default all. `others` are set at the
    same time.
    """

    make: Callable[[Path], Path]
    size: int
    kind: type[CkptconvError]
    what: str
    run: Callable[[Path], object] = ckptconv.inspect
    modules: tuple[str, ...] = ()
    others: dict[str, int] = {}  # noqa: RUF012 - nobody changes it


def file(data: bytes, name: str = "m.pt") -> Callable[[Path], Path]:
    """Return a function that writes `data` to a file with that `name`."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def checkpoint(*items: bytes) -> bytes:
    """Return a pickle of one tensor, and of `items` under their own keys."""
    return dict_of(text("w"), tensor(), *(each for i, item in enumerate(items) for each in (text(f"x{i}"), item)))


def opcodes(data: bytes) -> int:
    return sum(1 for _ in pickletools.genops(data))


def nested(levels: int) -> bytes:
    """Return the opcodes of so many `levels` of nested lists."""
    return b"]" * levels + b"a" * (levels - 1)


def parameters(levels: int) -> bytes:
    """Return the opcodes of so many `levels` of nested calls that create one tensor."""
    out = tensor()
    for _ in range(levels - 1):
        out = b"ctorch._utils\n_rebuild_parameter\n(" + out + b"\x89ccollections\nOrderedDict\n)RtR"
    return out


def lengths_of_paths(path: Path) -> int:
    """Return the total length of all paths of a checkpoint, in characters."""
    found = 0
    real = paths.find_places

    def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal found
        for place in real(*args, **kwargs):
            found += len(place.segment) + (place.parent.length if place.parent else 0)
            yield place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptconv.checkpoint.index.find_places", counted)
        read(path)
    return found


GOOD = checkpoint()
LONG = checkpoint(b"N0" * 200 + b"N")
DEFLATED = torch_zip_of(checkpoint(text("a" * 5000)), method=zipfile.ZIP_DEFLATED)


def inflate_ratio(data: bytes) -> int:
    info = zipfile.ZipFile(io.BytesIO(data)).getinfo("made/data.pkl")
    return -(-info.file_size // info.compress_size)


def commented() -> bytes:
    """Return an archive whose first directory entry has a comment."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, data in {"m/data.pkl": GOOD, "m/data/0": bytes(16), "m/version": b"3\n"}.items():
            info = zipfile.ZipInfo(name)
            info.comment = (
                b"c" * (3 * 100 * 3 - len("m/data.pkl" + "m/data/0" + "m/version")) if name == "m/data.pkl" else b""
            )
            made.writestr(info, data)
    return stream.getvalue()


def older(key: str, protocol: int = 2) -> bytes:
    """Return a file in the older format, with one storage that has this `key`."""
    parts = storage_id(torch.FloatStorage, key, "cpu", 4), 0, (4,), (1,), False, OrderedDict()
    made = Reduced(torch._utils._rebuild_tensor_v2, parts)
    return legacy_file({"w": made}, {key: (4, bytes(16))}, protocol=protocol)


HEADER = {
    "__metadata__": {"a,b": "c"},
    "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
}
HEADER_TEXT = json.dumps(HEADER).encode()
SAFETENSORS = struct.pack("<Q", len(HEADER_TEXT)) + HEADER_TEXT + bytes(16)


def index(metadata: dict[str, Any], shards: int = 3) -> Callable[[Path], Path]:
    """Return a function that writes a set of so many `shards`, with `metadata` in its index."""

    def make(folder: Path) -> Path:
        torch.save({str(i): torch.ones(2) for i in range(shards)}, folder / "s.pt")
        ckptconv.convert(folder / "s.pt", folder / "set", format="safetensors", max_shard_size=8)
        (path,) = (folder / "set").glob("*.json")
        content = json.loads(path.read_bytes())
        content["metadata"].update(metadata)
        path.write_text(json.dumps(content))
        return path

    return make


def archived(*names: str) -> bytes:
    """Return a tar archive of empty files with these `names`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


def to_safetensors(path: Path) -> None:
    ckptconv.convert(path, path.with_name("out.safetensors"), dry_run=True)


def said(what: str) -> Callable[[Path], None]:
    """Return a function that reads a file that is no checkpoint. It raises the error only if `what` is not in
    its text.
    """

    def run(path: Path) -> None:
        try:
            ckptconv.inspect(path)
        except CkptconvError as error:
            if what not in error.what:
                raise

    return run


EXPANDED = checkpoint(tensor(None, (10, 4), (0, 1)))  # 160 bytes from 16

CASES: dict[str, Case] = {
    "pickle_bytes": Case(file(torch_zip_of(LONG)), len(LONG), LimitError, "the pickle is too large"),
    "pickle_opcodes": Case(file(torch_zip_of(LONG)), opcodes(LONG), LimitError, "too many pickle opcodes"),
    "inline_bytes": Case(
        file(torch_zip_of(checkpoint(b"\x8b" + struct.pack("<i", 300) + b"1" * 300))),
        300,
        LimitError,
        "an integer in the pickle is too long",
    ),
    "pickle_line": Case(
        file(torch_zip_of(checkpoint(b"V" + b"a" * 300 + b"\n"))), 300, LimitError, "a line of the pickle is too long"
    ),
    "globals": Case(
        file(torch_zip_of(checkpoint(*(b"cm\nf%d\n" % i for i in range(30)), *(b"\x82%c" % i for i in range(1, 11))))),
        43,
        LimitError,
        "names too many classes and functions",
    ),
    "global_characters": Case(
        file(torch_zip_of(checkpoint(*(b"cmm\nf%d\n" % i for i in range(10)), b"cmm\nf1\n"))),
        109,
        LimitError,
        "names too many classes and functions",
    ),
    "global_name": Case(
        file(torch_zip_of(checkpoint(b"cm\n" + b"f" * 300 + b"\n"))),
        301,
        LimitError,
        "the name of a class or function is too long",
    ),
    "nesting": Case(file(torch_zip_of(checkpoint(nested(50)))), 51, LimitError, "nested too deeply"),
    "rank": Case(
        file(torch_zip_of(checkpoint(tensor(None, (1,) * 7, (1,) * 7)))), 7, LimitError, "too many dimensions"
    ),
    "elements": Case(file(torch_zip_of(checkpoint())), 5, MalformedError, "parts of wrong types"),
    "nested_calls": Case(file(torch_zip_of(checkpoint(parameters(9)))), 9, LimitError, "nested too deeply"),
    "zip_members": Case(file(torch_zip_of(GOOD)), 3, LimitError, "too many zip members"),
    "member_name": Case(file(commented()), 100, MalformedError, "too large for its members"),
    "note_bytes": Case(
        file(torch_zip_of(GOOD, {"data/0": bytes(16), "version": b"3" * 40})),
        40,
        MalformedError,
        "the record is too long",
    ),
    "unmarked_pickle_bytes": Case(
        file(pickle.dumps("a" * 100, 0)),
        len(pickle.dumps("a" * 100, 0)),
        UnsupportedError,
        "a text file",
        said("a pickle"),
    ),
    "id_text": Case(file(older("k" * 30, protocol=0)), 30, UnsupportedError, "does not name a storage"),
    "pickle_inflate_ratio": Case(
        file(DEFLATED),
        inflate_ratio(DEFLATED),
        LimitError,
        "a deflated record is too large",
        modules=("ckptconv.formats.torch_zip",),
        others={"inline_bytes": 0},
    ),
    "safetensors_header": Case(file(SAFETENSORS, "m.safetensors"), len(HEADER_TEXT), MalformedError, "it is too long"),
    "path_characters_unpickled": Case(file(SAFETENSORS, "m.safetensors"), 4, LimitError, "paths in the"),
    "header_brackets": Case(file(SAFETENSORS, "m.safetensors"), 8, LimitError, "more data than a million tensors"),
    "header_quotes": Case(
        file(SAFETENSORS, "m.safetensors"), HEADER_TEXT.count(b'"'), LimitError, "more data than a million tensors"
    ),
    "header_commas": Case(
        file(SAFETENSORS, "m.safetensors"),
        HEADER_TEXT.count(b","),
        LimitError,
        "more data than a million tensors",
        modules=("ckptconv.formats.safetensors_header",),
        others={"rank": 0},
    ),
    "header_number": Case(file(SAFETENSORS, "m.safetensors"), 65, MalformedError, "too many elements"),
    "shards": Case(index({}), 3, LimitError, "too many shards"),
    "index_digits": Case(index({"total_parameters": 10**20}), 21, MalformedError, "a number in the index is too long"),
    "foreign_json": Case(
        file(b'{"error": "no"}' + b" " * 85), 100, UnsupportedError, "a text file", said("a server's answer")
    ),
    "foreign_index": Case(
        file(b'{"weight_map": {}}' + b" " * 82), 100, UnsupportedError, "a text file", said("a JSON file")
    ),
    "foreign_zeros": Case(
        file(bytes(10_000)),
        10_000,
        MalformedError,
        "at least its first 9,999 bytes are zeros",
        said("nothing but zeros"),
    ),
    "foreign_members": Case(
        file(archived("a", "b", "model.pt")), 3, UnsupportedError, "a tar archive of a, b", said("of model.pt")
    ),
    "matched_name": Case(
        file(torch_zip_of(dict_of(text("a" * 50), tensor()))),
        50,
        LimitError,
        "too long to be matched",
        lambda path: ckptconv.convert(path, path.with_name("out.pt"), rename=[("a+", "b")], force=True),
        ("ckptconv.edits.rename",),
    ),
    "gathered_bytes": Case(
        file(torch_zip_of(EXPANDED)),
        160,
        RefusedError,
        "exceed the limit",
        to_safetensors,
        others={"gathered_ratio": 1},
    ),
    "gathered_ratio": Case(
        file(torch_zip_of(EXPANDED)),
        10,
        RefusedError,
        "exceed the limit",
        to_safetensors,
        others={"gathered_bytes": 1},
    ),
}

#: Limits without an entry in CASES, and the names of their tests.
ELSEWHERE = {
    "far_files": "stores/test_far_folders.py::test_too_many_files",
    "far_name": "stores/test_far_folders.py::test_a_false_list_of_files",
    "path_characters": "test_limits.py::test_the_total_length_of_paths",
    "path_characters_each": "test_limits.py::test_the_total_length_of_paths",
    "script_words": "formats/test_torchscript.py::test_code_with_too_many_statements_is_refused",
    "program_bytes": "formats/test_exported.py::test_a_program_that_is_too_large",
    "script_bytes": "formats/test_torchscript.py::test_a_bomb_of_code_is_refused_before_it_is_inflated",
    "list_holes": "test_limits.py::test_bounds_of_distributed_metadata",
    "metadata_state": "test_limits.py::test_bounds_of_distributed_metadata",
    "opcodes_of_a_chunk": "test_limits.py::test_bounds_of_distributed_metadata",
    "shared_nodes": "formats/distributed/test_dcp_writing.py::test_small_files_that_would_become_large",
    "ranks": "formats/distributed/test_rank_files.py::test_bounds",
    "spread_steps": "formats/distributed/test_rank_files.py::test_bounds",
    "zero_cuts": "formats/distributed/test_zero.py::test_too_many_pieces",
    "inflated_bytes": "test_work.py::test_deflated_records_are_granted_little",
    "match_seconds": "edits/test_matching.py::test_a_match_that_does_not_end",
    "optimizer_steps": "edits/test_optimizers.py::test_bounds",
    "strips": "formats/distributed/test_rank_files.py::test_bounds",
    "undo_journal": "conversion/test_in_place.py::test_a_journal_that_is_too_large",
    "undo_header": "conversion/test_in_place.py::test_a_journal_that_is_too_large",
    "nested_pickles": "safety/test_scan.py::test_depth",
    "nested_opcodes": "safety/test_scan.py::test_pickles_that_are_too_large_to_scan",
    "pickles_inside": "safety/test_scan.py::test_many_pickles_inside",
    "second_reading_opcodes": "formats/test_two_readings.py::test_number_of_bytes_read",
    "second_reading_bytes": "formats/test_two_readings.py::test_number_of_bytes_read",
    "concerns": "safety/test_scan.py::test_the_list_ends",
    "values_read": "safety/test_torch_load.py::test_bounds",
    "values_copied": "safety/test_torch_load.py::test_bounds",
    "inflated_to_prove": "safety/test_torch_load.py::test_bounds",
    "config_bytes": "test_limits.py::test_a_configuration",
    "regrouped": "edits/test_regroup.py::test_a_tensor_without_bytes_makes_no_million_names",
    "rule_length": "edits/test_regroup.py::test_rules_cost_no_more_than_a_bound",
    "rule_steps": "edits/test_regroup.py::test_rules_cost_no_more_than_a_bound",
    "rules_bytes": "edits/test_regroup.py::test_files_without_valid_rules",
    "folder_names": "formats/foreign/test_folders.py::test_a_bounded_number_of_names_is_looked_at",
    "work": "test_work.py::test_every_command_counts",
    "work_each": "test_work.py::test_a_budget_is_that_of_the_outermost_block",
    "findings": "inspection/test_verification.py::test_lines_beyond_the_limit_are_counted",
}


def set_limits(monkeypatch: pytest.MonkeyPatch, limits: Limits, modules: tuple[str, ...] = ()) -> None:
    """Set `limits` in `modules`, or in all modules."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ckptconv") and hasattr(module, "LIMITS") and (not modules or name in modules):
            monkeypatch.setattr(module, "LIMITS", limits)


def test_every_bound_has_a_test() -> None:
    """Every limit has a test in exactly one of the tables, and the tests in the second table exist."""
    fields = {field.name for field in dataclasses.fields(Limits)}
    assert fields == CASES.keys() | ELSEWHERE.keys() and not CASES.keys() & ELSEWHERE.keys()
    for where in ELSEWHERE.values():
        name, _, test = where.partition("::")
        assert f"def {test}(" in (Path(__file__).parent / name).read_text()


def test_every_bound_has_a_reason() -> None:
    """There is a comment before each limit, or before a group of limits."""
    lines = Path(sys.modules[Limits.__module__].__file__ or "").read_text().splitlines()
    numbers = [i for i, line in enumerate(lines) if re.match(r"    \w+: int = ", line)]
    assert len(numbers) == len(dataclasses.fields(Limits))
    assert all(lines[i - 1].startswith("    #: ") or i - 1 in numbers for i in numbers)


@pytest.fixture
def assert_bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that reads a file at a limit, and expects an error if the limit is lower by one."""

    def assert_bound(
        run: Callable[[], object],
        kind: type[CkptconvError],
        what: str,
        bound: str,
        size: int,
        *,
        modules: tuple[str, ...] = (),
        **others: int,
    ) -> None:
        limits = dataclasses.replace(LIMITS, **{**others, bound: size})
        set_limits(monkeypatch, limits, modules)
        run()
        set_limits(monkeypatch, dataclasses.replace(limits, **{bound: size - 1}), modules)
        with pytest.raises(kind, match=re.escape(what)):
            run()
        set_limits(monkeypatch, LIMITS)

    return assert_bound


@pytest.mark.parametrize("name", CASES)
def test_at_the_bound_and_above(tmp_path: Path, assert_bound: Callable[..., None], name: str) -> None:
    """A file at a limit is read. If the limit is lower by one, the file is refused with the expected error."""
    case = CASES[name]
    path = case.make(tmp_path)
    case.run(path)  # import all modules first
    run = functools.partial(case.run, path)
    assert_bound(run, case.kind, case.what, name, case.size, modules=case.modules, **case.others)


def test_the_total_length_of_paths(tmp_path: Path, assert_bound: Callable[..., None]) -> None:
    """The total length of all paths is limited to a fixed number of characters, and a number for each opcode."""
    data = checkpoint(nested(5), text("a"), b"]")
    path = file(torch_zip_of(data))(tmp_path)
    length, count = lengths_of_paths(path), opcodes(data)
    run, what = functools.partial(ckptconv.inspect, path), "paths in the checkpoint are too long"
    for each in (0, length // count):
        size = length - each * count
        assert_bound(run, LimitError, what, "path_characters", size, path_characters_each=each)


def test_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype of a configuration is ignored if the file is too long or nested too deeply. A FIFO in its place does
    not block.
    """
    index({})(tmp_path)
    folder = tmp_path / "set"
    content = json.dumps({"dtype": "float32", "x": "a" * 100, "y": [[[[[]]]]]})
    (folder / "config.json").write_text(content)

    def notes() -> str:
        return " ".join(ckptconv.convert(folder, tmp_path / "out", dtype="bf16", dry_run=True).notes)

    set_limits(monkeypatch, dataclasses.replace(LIMITS, config_bytes=len(content)))
    assert "config.json has dtype float32" in notes()
    set_limits(monkeypatch, dataclasses.replace(LIMITS, config_bytes=len(content) - 1))
    assert "config.json has" not in notes()
    set_limits(monkeypatch, dataclasses.replace(LIMITS, nesting=5))
    assert "config.json has" not in notes()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json has" not in notes()


def test_bounds_of_distributed_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assert_bound: Callable[..., None]
) -> None:
    """The metadata of a run is limited where a few bytes could request much: positions in lists, fields of an object,
    and one list of chunks for many tensors.
    """
    path = distributed({"x": torch.ones(4), "list": [torch.ones(1)]}, tmp_path / "dcp") / ".metadata"
    run, written = functools.partial(ckptconv.inspect, path.parent), path.read_bytes()
    metadata = pickle.loads(written)
    (name,) = [name for name, place in metadata.planner_data.items() if place == ("list", 0)]
    metadata.planner_data[name] = ("list", 7)
    path.write_bytes(pickle.dumps(metadata))
    assert_bound(run, MalformedError, "places without a value", "list_holes", 7)
    path.write_bytes(written)
    most = max(
        2 * len(vars(each)) + 1
        for each in (
            metadata,
            *metadata.storage_data,
            *metadata.storage_data.values(),
            *metadata.state_dict_metadata.values(),
        )
    )
    assert_bound(run, MalformedError, "too many fields", "metadata_state", most)
    chunks = 1 + len(metadata.state_dict_metadata[name].chunks) + 1 + len(metadata.state_dict_metadata["x"].chunks)
    each = opcodes(written) // chunks
    set_limits(monkeypatch, dataclasses.replace(LIMITS, opcodes_of_a_chunk=each))
    run()
    set_limits(monkeypatch, dataclasses.replace(LIMITS, opcodes_of_a_chunk=opcodes(written) // (chunks - 1) + 1))
    with pytest.raises(MalformedError, match="more chunks than"):
        run()


def test_the_length_of_storage_keys(tmp_path: Path) -> None:
    """The older format accepts keys of storages up to 64 KiB. A zip archive cannot contain a record with such a name,
    so the checkpoint is refused.
    """
    for length in (LIMITS.inline_bytes, LIMITS.inline_bytes + 1):
        path = tmp_path / "m.pt"
        key = "k" * length
        path.write_bytes(older(key))
        if length > LIMITS.inline_bytes:
            with pytest.raises(MalformedError, match="parts of wrong types"):
                ckptconv.inspect(path)
        else:
            assert ckptconv.inspect(path).storages == 1
        zipped = tmp_path / "z.pt"
        zipped.write_bytes(torch_zip_of(dict_of(text("w"), tensor(storage(key)))))
        with pytest.raises(MalformedError, match=r"no such storage|parts of wrong types"):
            ckptconv.inspect(zipped)


def test_the_real_bounds_are_those_of_the_page() -> None:
    """The real limits are those of the documentation: 256 MiB and 20 million opcodes of a pickle, 1,000 levels, 64
    dimensions, a million zip members, 64 KiB of a key, a hundredfold size after inflating, and an output of 16 times
    the input or 1 GiB.
    """
    assert (LIMITS.pickle_bytes, LIMITS.pickle_opcodes, LIMITS.nesting, LIMITS.rank) == (
        256 << 20,
        20_000_000,
        1_000,
        64,
    )
    assert (LIMITS.zip_members, LIMITS.member_name, LIMITS.inline_bytes) == (1_000_000, 64 << 10, 64 << 10)
    assert LIMITS.pickle_inflate_ratio == 100
    assert LIMITS.gathered(0) == 1 << 30 and LIMITS.gathered(1 << 30) == 16 << 30
