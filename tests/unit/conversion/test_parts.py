"""Tests of planned files as parts. Joined together, the parts equal the output of ``convert``."""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptconv
from ckptconv.conversion.parts import FilePart
from ckptconv.errors import InputChangedError, LimitError, MalformedError
from ckptconv.limits import LIMITS, lower
from tests.support.archives import rezip

CHECKPOINT = {
    "state_dict": {"module.w": torch.arange(6.0).reshape(2, 3), "module.b": torch.ones(3, dtype=torch.float16)},
    "epoch": 3,
}


class Counted(io.BytesIO):
    """A file in memory that counts the bytes that are read."""

    nread = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.nread += len(data)
        return data


def put_together(src: Any, dst: str, data: bytes, **options: Any) -> bytes:
    """Return the joined parts of a planned file, after a check of its size and of the progress."""
    with ckptconv.plan(src, dst, **options) as planned:
        ticks: list[int] = []
        parts = [*planned.parts(ticks.append)]
        assert sum(ticks) == planned.nbytes_read and not planned.report.written
        out = b"".join(data[at.offset : at.offset + at.length] if isinstance(at, FilePart) else at for at in parts)
        assert len(out) == planned.size == planned.report.size
    return out


def write(kind: str, path: Path) -> None:
    """Write the checkpoint to `path` in a container of the kind `kind`."""
    if kind == "safetensors":
        safetensors.torch.save_file(CHECKPOINT["state_dict"], path)  # type: ignore[arg-type]
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"w": torch.ones(2, 3)}))
    else:
        torch.save(CHECKPOINT, path, _use_new_zipfile_serialization=kind != "legacy")
        if kind == "deflated":
            rezip(path, path, method=zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize("dst", ["out.pt", "out.safetensors", "out.pkl"])
@pytest.mark.parametrize("kind", ["zip", "deflated", "legacy", "safetensors", "pickle"])
def test_the_parts_are_what_convert_writes(kind: str, dst: str, tmp_path: Path) -> None:
    """The parts equal the output of ``convert``, for a path and for a file object without a name."""
    path = tmp_path / "m.safetensors" if kind == "safetensors" else tmp_path / "m.pt"
    write(kind, path)
    options = {"map_location": "cuda:1", "add_prefix": "x."}
    ckptconv.convert(path, tmp_path / dst, **options)
    expected, data = (tmp_path / dst).read_bytes(), path.read_bytes()
    assert put_together(path, dst, data, **options) == expected
    file = Counted(data)
    assert put_together(file, dst, data, **options) == expected and not file.closed


def test_casts(tmp_path: Path) -> None:
    """The parts contain the result of a cast. The report counts the overflowed elements after the parts were read."""
    torch.save({"w": torch.full((3,), 1e38), "v": torch.ones(2)}, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "out.pt", dtype="fp16")
    with ckptconv.plan(tmp_path / "m.pt", "out.pt", dtype="fp16") as planned:
        data = (tmp_path / "m.pt").read_bytes()
        out = [data[at.offset : at.offset + at.length] if isinstance(at, FilePart) else at for at in planned.parts()]
        assert b"".join(out) == (tmp_path / "out.pt").read_bytes()
        assert planned.report.overflowed == {("w",): 3}


def test_the_bytes_of_tensors_stay_where_they_are(tmp_path: Path) -> None:
    """Tensor data is not read if the target stores the checksums of the source."""
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "m.pt")
    file = Counted((tmp_path / "m.pt").read_bytes())
    with ckptconv.plan(file, "out.pt", map_location="cuda:0") as planned:
        parts = [*planned.parts()]
    assert planned.nbytes_read == 0 and file.nread < 100_000
    assert max(part.length for part in parts if isinstance(part, FilePart)) >= 4 << 20


def test_damage_and_change_are_found(tmp_path: Path) -> None:
    """A wrong checksum is reported before the first part if the target cannot store it. A change of the source is
    reported after the last part.
    """
    torch.save({"w": torch.arange(4096.0)}, tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[data.index(torch.arange(4096.0).numpy().tobytes()) + 1] ^= 1
    with ckptconv.plan(io.BytesIO(data), "out.safetensors") as planned, pytest.raises(MalformedError, match="checksum"):
        next(planned.parts())
    file = io.BytesIO(data)
    with ckptconv.plan(file, "out.pt") as planned:
        file.seek(0, io.SEEK_END)
        file.write(b"more")
        with pytest.raises(InputChangedError):
            [*planned.parts()]


def test_no_unix_module_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning works without the modules that only Unix has, as in a browser."""
    torch.save(CHECKPOINT, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    expected = put_together(tmp_path / "m.pt", "x.pt", data)
    for module in ("resource", "fcntl", "signal"):
        monkeypatch.setitem(sys.modules, module, None)
    assert put_together(tmp_path / "m.pt", "x.pt", data) == expected


def test_limits_can_be_lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits can be lowered and never raised. The change also applies to modules that have already imported them."""
    torch.save(CHECKPOINT, tmp_path / "m.pt")
    before = LIMITS.nesting
    try:
        lower(nesting=2)
        with pytest.raises(LimitError, match="nested too deeply"):
            ckptconv.inspect(tmp_path / "m.pt")
        for wrong in ({"nesting": 3}, {"nesting": 0}, {"depth": 1}):
            with pytest.raises(ValueError, match="does not lower the limit"):
                lower(**wrong)
    finally:
        object.__setattr__(LIMITS, "nesting", before)
