"""Folders of safetensors files that contain parts of tensors. The parts are assembled as by torch's own reader, and no
part is taken for a model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptconv
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats import safetensors_header
from ckptconv.formats.distributed.safetensors_parts import SHARDING_INFO
from ckptconv.limits import LIMITS
from tests.support import dcp_ranks
from tests.support.conversions import converted, loaded, metadata_of
from tests.support.judge import assert_same
from tests.support.writers import ALONE

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*single process"),  # a warning of torch
    pytest.mark.skipif(not dcp_ranks.HAS_HF, reason="this torch has no such writer"),
]

WHOLE = {
    name: whole
    for name, whole in {**{name: whole for name, (whole, _) in dcp_ranks.MESH.items()}, **dcp_ranks.ROWS}.items()
    if name not in dcp_ranks.OUT_OF_ORDER
}


def by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that torch's own reader reads from `folder`."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, dcp_of_torch.HuggingFaceStorageReader(str(folder)), planner=_EmptyStateDictLoadPlanner(), **ALONE
    )
    return state


def part(path: Path, tensors: dict[str, torch.Tensor], offsets: dict[str, Any]) -> Path:
    """Write a file of parts, with `tensors` that begin at `offsets`, and return its path."""
    path.parent.mkdir(exist_ok=True)
    info = {name: {"saved_offsets": first} for name, first in offsets.items()}
    save_file(tensors, path, {SHARDING_INFO: json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"})
    return path


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_parts_are_assembled(ranks: Path, tmp_path: Path, suffix: str) -> None:
    """Tensors are assembled and equal those of the run and of torch's own reader. The metadata of the parts is
    removed.
    """
    path = tmp_path / f"out.{suffix}"
    report = ckptconv.convert(ranks / "hf", path, verify=True)
    assert report.formats[0] == "DCP safetensors" and any(
        "ends where its last part ends" in note for note in report.notes
    )
    found = loaded(path)
    assert found.keys() == WHOLE.keys()
    for name, whole in WHOLE.items():
        assert_same(found[name], whole.contiguous())
    for name, tensor in by_torch(ranks / "hf").items():
        assert_same(found[name], tensor)
    if suffix == "safetensors":
        assert metadata_of(path) == {"format": "pt"}


def test_casts_and_loads(ranks: Path, safe: Path) -> None:
    """Tensors are cast and renamed while they are assembled. ``load`` returns them without writing a file."""
    found = converted(ranks / "hf", safe, dtype={"*rows*": "bf16"}, rename=[("^", "m.")])
    assert_same(found["m.rows and columns"], WHOLE["rows and columns"].bfloat16())
    assert_same(ckptconv.load(ranks / "hf")["columns twice"], WHOLE["columns twice"])


@pytest.mark.parametrize("number", [1, 3])
def test_one_part_is_not_a_model(ranks: Path, tmp_path: Path, number: int) -> None:
    """The file of one process is refused, also under another name, and the error suggests the folder. This is also true
    for the first file, in which all parts begin at 0.
    """
    path = ranks / f"hf/shard-{number:05}-model-00001-of-00001.safetensors"
    renamed = tmp_path / "model.safetensors"
    renamed.write_bytes(path.read_bytes())
    for each in (path, renamed):
        for use in (
            ckptconv.inspect,
            ckptconv.open,
            ckptconv.load,
            lambda src: ckptconv.convert(src, tmp_path / "out.pt"),
        ):
            with pytest.raises(UnsupportedError, match="one part of a distributed checkpoint") as caught:
                use(each)
            assert f"ckptconv.convert({str(each.parent)!r}, OUT)" in str(caught.value)


def test_whole_files_of_the_same_writer_are_models(tmp_path: Path) -> None:
    """A file of the same writer is a model if its name is that of a model and its tensors are complete. The information
    about parts is left behind, and the report names it.
    """
    writer = dcp_of_torch.HuggingFaceStorageWriter(str(tmp_path / "hf"))
    dcp_of_torch.save({"a": torch.ones(2, 3)}, storage_writer=writer, **ALONE)
    path = tmp_path / "hf/model-00001-of-00001.safetensors"
    assert SHARDING_INFO in metadata_of(path)
    report = ckptconv.convert(path, tmp_path / "out.safetensors")
    assert [left.path for left in report.left_behind] == [f"__metadata__/{SHARDING_INFO}"]
    assert_same(ckptconv.load(tmp_path / "out.safetensors"), {"a": torch.ones(2, 3)})
    part(path, {"a": torch.ones(2, 3)}, {"a": [2, 0]})
    with pytest.raises(UnsupportedError, match="one part"):
        ckptconv.inspect(path)


def test_holes_and_overlaps(ranks: Path, tmp_path: Path) -> None:
    """A missing part and a repeated part are refused, and the error contains the name of a tensor."""
    folder = Path(shutil.copytree(ranks / "hf", tmp_path / "hf"))
    second = folder / "shard-00002-model-00001-of-00001.safetensors"
    second.rename(tmp_path / "second")
    with pytest.raises(MalformedError, match=r"the chunks of '.*' leave holes"):
        ckptconv.inspect(folder)
    shutil.copy(tmp_path / "second", second)
    ckptconv.inspect(folder)
    shutil.copy(tmp_path / "second", folder / "shard-00005-model-00001-of-00001.safetensors")
    with pytest.raises(MalformedError, match=r"the chunks of '.*' overlap"):
        ckptconv.inspect(folder)


def test_any_names_and_empty_parts(tmp_path: Path) -> None:
    """Parts are recognized by their metadata, whatever the names of the files are. A part can be empty, and a tensor
    can be a scalar.
    """
    part(tmp_path / "x/one.safetensors", {"w": torch.ones(2, 3), "s": torch.tensor(2.0)}, {"w": [0, 0], "s": []})
    part(tmp_path / "x/two.safetensors", {"w": torch.zeros(0, 3)}, {"w": [2, 0]})
    assert_same(ckptconv.load(tmp_path / "x"), {"s": torch.tensor(2.0), "w": torch.ones(2, 3)})


def test_file_without_information_about_parts_is_refused(tmp_path: Path) -> None:
    """A file without information about parts is refused among files with it, because its tensors could be anything."""
    part(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"w": torch.ones(2)}, {"w": [0]})
    save_file({"v": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(MalformedError, match="without DCP_SHARDING_INFO"):
        ckptconv.inspect(tmp_path)


def test_parts_of_two_dtypes(tmp_path: Path) -> None:
    """Parts of one tensor are refused if they differ in dtype or in the number of dimensions."""
    for i, other in enumerate((torch.ones(2, dtype=torch.float16), torch.ones(2, 1))):
        folder = tmp_path / str(i)
        part(folder / "shard-00001-model-00001-of-00001.safetensors", {"w": torch.ones(2)}, {"w": [0]})
        part(folder / "shard-00002-model-00001-of-00001.safetensors", {"w": other}, {"w": [2, 0][: other.dim()]})
        with pytest.raises(MalformedError, match="the parts of 'w' do not match"):
            ckptconv.inspect(folder)


#: Invalid information about a tensor of two elements, and about a scalar.
BAD_INFO = {
    "elements": [
        "",
        "[]",
        "{",
        "3",
        '{"w": {"saved_offsets": [0]}, "v": {"saved_offsets": [0]}}',
        "{}",
        '{"w": {"saved_offsets": [-1]}}',
        '{"w": {"saved_offsets": [0, 0]}}',
        '{"w": {"saved_offsets": [true]}}',
        '{"w": {"saved_offsets": [0.0]}}',
        '{"w": {}}',
        '{"w": [0]}',
        '{"w": {"saved_offsets": "0"}}',
        '{"w": {"saved_offsets": [0]}, "w": {"saved_offsets": [1]}}',
        '{"w": {"saved_offsets": [9223372036854775808]}}',
        "[" * 100_000,
        '{"w": {"saved_offsets": [' + "9" * 5000 + "]}}",
    ],
    # A scalar has no offsets, but the information must contain an entry for it.
    "number": ["3", "null", "[1]", '"w"', "{}", '{"w": 1}', '{"w": {}}', '{"v": {"saved_offsets": []}}'],
}


@pytest.mark.parametrize(("kind", "info"), [(kind, info) for kind, infos in BAD_INFO.items() for info in infos])
def test_bad_info(tmp_path: Path, kind: str, info: str) -> None:
    """Invalid information about parts is reported, for the folder and for the file."""
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2) if kind == "elements" else torch.tensor(2.0)}, path, {SHARDING_INFO: info})
    for each in (path, tmp_path):
        with pytest.raises(InputError if kind == "elements" else MalformedError, match=SHARDING_INFO):
            ckptconv.inspect(each)


def test_depth_of_the_information_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Information that is nested too deeply is refused. With a small stack, as in a browser, the JSON parser would end
    the process.
    """
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(2)}, path, {SHARDING_INFO: '{"w": ' + "[" * 400 + "]" * 400 + "}"})
    monkeypatch.setattr(safetensors_header, "LIMITS", replace(LIMITS, nesting=400))
    with pytest.raises(MalformedError, match="nested too deeply"):
        ckptconv.inspect(path)
