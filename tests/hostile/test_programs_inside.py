"""Programs and dangerous calls in the parts of a checkpoint: an archive inside another file, a shard, a stored
object.

Each program writes ``marker`` if its own loader loads it. torch.load(weights_only=False) runs an archive of torch.jit
as a program, also if the archive is a byte string or a part of a file.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ckptconv.inspection.verification import verify
from tests.support import global_calls as ways
from tests.support.gadgets import GADGETS, call, sequence
from tests.support.hostile_bytes import text, zip_of

_CODE = """class C:
  x : int
  def __getstate__(self: __torch__.C) -> int:
    return 1
  def __setstate__(self: __torch__.C,
    s: int) -> NoneType:
    self.x = s
    torch.save(s, "marker")
    return None
"""
_CONSTANTS = b"\x80\x02(c__torch__\nC\n)\x81K\x05bt."
_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x02tQ"
_REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n(%bK\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
_STATE = b"}" + text("w") + _REBUILT % _STORAGE + b"s"
_SHARD = "pytorch_model-00001-of-00001.bin"
_LOAD = "import sys, torch; torch.load(sys.argv[1], weights_only=False)"
_UNPICKLE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
_LOAD_FOLDER = (
    "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as load;"
    "load(sys.argv[1], 'out.pt')"
)


def archive(pickled: bytes, *, is_program: bool = True) -> bytes:
    """Return an archive in the format of torch.save, with a storage of 8 bytes and the pickle `pickled`."""
    records = {"data.pkl": b"\x80\x02" + pickled + b".", "data/0": bytes(8), "version": b"3\n"}
    if is_program:
        records |= {"code/__torch__.py": _CODE.encode(), "constants.pkl": _CONSTANTS}
    return zip_of({f"archive/{name}": data for name, data in records.items()})


def in_pickle(folder: Path) -> tuple[Path, str]:
    inner = archive(_STORAGE)
    storage = b"ctorch.storage\n_load_from_bytes\nB" + len(inner).to_bytes(4, "little") + inner + b"\x85R"
    path = folder / "x.pkl"
    path.write_bytes(b"\x80\x03" + _REBUILT % storage + b".")
    return path, _UNPICKLE


def in_distributed(folder: Path) -> tuple[Path, str]:
    ways.dcp_in(folder, 1)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "x")
    inner, file = archive(b"K\x05"), folder / place.relative_path
    place.offset, place.length = file.stat().st_size, len(inner)
    file.write_bytes(file.read_bytes() + inner)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder, _LOAD_FOLDER


def in_shard(folder: Path, data: bytes) -> Path:
    (folder / _SHARD).write_bytes(data)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"w": _SHARD}}))
    return folder / _SHARD


def runs(load: str, path: Path, folder: Path) -> bool:
    subprocess.run([sys.executable, "-c", load, path], cwd=folder, capture_output=True, check=False)
    return (folder / "marker").exists()


@pytest.mark.parametrize("hide", [in_pickle, in_distributed])
def test_a_program_inside(tmp_path: Path, hide: object) -> None:
    """An archive inside another file fails ``verify`` if it contains more than torch.save writes."""
    folder = tmp_path / "made"
    folder.mkdir()
    path, load = hide(folder)  # type: ignore[operator]
    assert not verify(path).ok
    assert runs(load, path, tmp_path)


def test_a_program_as_a_shard(tmp_path: Path) -> None:
    """The constants of a program are examined if the program is one of several shards."""
    path = in_shard(tmp_path, archive(_STATE))
    for each in (tmp_path, path):
        verdict = verify(each, strict=True)
        assert not verdict.ok and verdict.safety == "needs code"
    assert runs(_LOAD, path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(b"%b0" + _STATE, id="discarded"),
        pytest.param(
            b"ccollections\nOrderedDict\n)R" + _STATE[1:] + b"}" + text("_metadata") + b"%bsb", id="attribute"
        ),
    ],
)
@pytest.mark.parametrize("gadget", ["Path.mkdir by getattr", "Path.mkdir by methodcaller"])
def test_objects_that_are_not_in_a_set(tmp_path: Path, gadget: str, place: bytes) -> None:
    """A shard can make objects that the set leaves out. These objects are examined, because loading the shard makes
    them.
    """
    path = in_shard(tmp_path, archive(place.replace(b"%b", GADGETS[gadget].code), is_program=False))
    verdict = verify(tmp_path)
    assert not verdict.ok and verdict.safety == "dangerous"
    assert runs(_LOAD, path, tmp_path)


@pytest.mark.parametrize("look_up", ["builtins:getattr", "operator:attrgetter", "operator:methodcaller"])
def test_long_names(tmp_path: Path, look_up: str) -> None:
    """An attribute name of more than 1000 characters is dangerous. It is not examined, because thousands of calls can
    share it.
    """
    path = tmp_path / "x.pt"
    first = [b"N"] if look_up == "builtins:getattr" else []
    for name, is_dangerous in ("a" * 1000, False), ("a" * 1001, True), ("a." * 32000, True):
        path.write_bytes(ways.checkpoint(call(call(look_up, *first, text(name)), b"N")))
        assert (verify(path).safety == "dangerous") is is_dangerous


def test_a_text_in_a_list(tmp_path: Path) -> None:
    """A function that evaluates texts also evaluates texts in lists, so such a list is dangerous."""
    path = tmp_path / "x.pt"
    path.write_bytes(ways.checkpoint(call("sympy:Matrix", sequence(text("open('marker', 'w')")))))
    assert verify(path).safety == "dangerous"
    path.write_bytes(ways.checkpoint(call("sympy:Matrix", sequence(b"K\x01"))))
    assert verify(path).ok


@pytest.mark.parametrize(
    "name",
    ["torch._ops:ops.aten.from_file.default", "torch._ops:ops.aten.from_file._op", "readline:write_history_file"],
)
def test_writers_of_files(tmp_path: Path, name: str) -> None:
    """Overloads of operators and functions written in C are dangerous if they write files."""
    path = tmp_path / "x.pt"
    path.write_bytes(ways.checkpoint(call(name, text("marker"))))
    assert verify(path).safety == "dangerous"
