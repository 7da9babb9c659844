"""``ckptconv diff -q``: it stops at the first difference, with the exit status of ``diff``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.byteranges.sources import Source
from ckptconv.cli.main import main
from ckptconv.inspection.comparison import values
from ckptconv.inspection.comparison.values import Values
from tests.support.archives import big_endian, rezip, without_crc32

_FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
_DTYPES = *_FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn


def bare(path: Path, obj: Any) -> Path:
    """Save `obj` at `path` without checksums, so that its bytes must be read, and return `path`."""
    with without_crc32():
        torch.save(obj, path)
    return path


def status(*args: object) -> int:
    return main(["diff", *map(str, args)])


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list of the numbers of bytes that are read from tensors within this context."""
    lengths: list[int] = []
    real = Source.read_into

    def read_into(self: Source, offset: int, buffer: memoryview) -> None:
        lengths.append(len(buffer))
        real(self, offset, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(Source, "read_into", read_into)
        yield lengths


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small segments and buffers, so that small files have many segments."""
    monkeypatch.setattr("ckptconv.inspection.values._SEGMENT", 64 << 10)
    monkeypatch.setattr(values, "_BUFFER", 4096)
    monkeypatch.setattr(values, "_LOOKED_AT", 4096)


def changed(numbers: torch.Tensor, at: int, value: float) -> torch.Tensor:
    new = numbers.clone()
    new[at] = value
    return new


@pytest.mark.parametrize(
    ("dtype", "length"), [*((each, 50) for each in _DTYPES), *((each, 100_000) for each in _DTYPES[1:4])], ids=str
)
def test_the_exit_status_is_that_without_it(tmp_path: Path, dtype: torch.dtype, length: int) -> None:
    """The exit status with -q is that without it: for equal values, for one changed value, and for bytes that differ
    but have equal values.
    """
    numbers = torch.arange(length).remainder(2).to(dtype)
    a = bare(tmp_path / "a.pt", {"w": numbers, "v": torch.ones(3)})
    others = [numbers, changed(numbers, 0, 1), changed(numbers, length - 2, 1)]
    if dtype in _FLOATS:
        others.append(changed(numbers, length // 4 * 2, -0.0))
        others.append(changed(numbers, length // 4 * 2, float("nan")))
    found = []
    for other in others:
        b = bare(tmp_path / "b.pt", {"w": other, "v": torch.ones(3)})
        found.append(status(a, b, "-q"))
        assert found[-1] == status(a, b), other
    assert found[:3] == [0, 1, 1]
    assert found[3:] == ([0, 1] if dtype in _FLOATS else [])


def test_nan_payloads_tolerances_views_and_containers(tmp_path: Path) -> None:
    """NaN payloads, views, tolerances, containers and byte order give the same exit status with and without -q."""
    numbers = torch.linspace(1, 2, 40_000)
    payload = numbers.clone()
    payload.view(torch.int32)[7] = 0x7FC00001
    plain = numbers.clone()
    plain[7] = float("nan")
    turned = torch.arange(40_000.0).view(200, 200)
    pairs = {
        "payload": (plain, payload, 0),
        "near": (numbers, numbers * 1.0000001, 1),
        "view": (turned.t(), turned.t().contiguous(), 0),
        "other view": (turned.t(), changed(turned, 199, -1).t(), 1),
        "half of a storage": (numbers[::2], changed(numbers, 1, 5)[::2], 0),
        "dtype": (numbers, numbers.double(), 1),
    }
    for name, (left, right, expected) in pairs.items():
        a, b = bare(tmp_path / "a.pt", {"w": left}), bare(tmp_path / "b.pt", {"w": right})
        assert status(a, b, "-q") == status(a, b) == expected, name
        torch.save({"w": right}, tmp_path / "stored.pt")
        deflated = rezip(tmp_path / "stored.pt", tmp_path / "deflated.pt", method=zipfile.ZIP_DEFLATED)
        assert status(a, deflated, "-q") == status(a, deflated), name
    left, right, _ = pairs["near"]
    a, b = bare(tmp_path / "a.pt", {"w": left}), bare(tmp_path / "b.pt", {"w": right})
    assert status(a, b, "-q", "--rtol", "1e-5") == 0
    assert status(a, b, "-q", "--rtol", "1e-9") == 1
    for path, numbers in ((a, left), (b, right)):
        torch.save({"w": numbers}, path)
    turned_round = [big_endian(each, each.with_name(f"big-{each.name}"), {"0": 4}) for each in (a, b)]
    assert status(*turned_round, "-q") == status(*turned_round) == 1


def test_it_stops_at_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If 8 MiB differ early, -q reads at most one segment of each file, and does not compute with torch. Without -q,
    all bytes are read.
    """
    monkeypatch.setattr("ckptconv.inspection.values._MOST_THREADS", 0)  # threads would continue to read
    numbers = torch.zeros(1 << 21)
    a = bare(tmp_path / "a.pt", {"w": numbers})
    early, late = (bare(tmp_path / f"{at}.pt", {"w": changed(numbers, at, 1.0)}) for at in (100, (1 << 21) - 2))
    with bytes_read(monkeypatch) as lengths:
        assert status(a, early) == 1
    assert sum(lengths) > 2 * numbers.nbytes * 0.9
    monkeypatch.setattr(Values, "comparer", None)
    with bytes_read(monkeypatch) as lengths:
        assert status(a, early, "-q") == 1
    assert sum(lengths) <= 2 * (64 << 10)  # one segment of each file
    with bytes_read(monkeypatch) as lengths:
        assert status(a, late, "-q") == 1
    assert sum(lengths) > 2 * numbers.nbytes * 0.9


def test_no_values_are_read_if_names_or_dtypes_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is read if names, dtypes, shapes or other values differ. In folders, a file that cannot be read gives
    the exit status 2.
    """
    numbers = torch.zeros(100_000)
    a = bare(tmp_path / "a.pt", {"w": numbers, "n": 1})
    others: list[dict[str, Any]] = [
        {"v": numbers, "n": 1},
        {"w": numbers.double(), "n": 1},
        {"w": numbers, "n": 2},
        {"w": numbers.view(100, 1000), "n": 1},
    ]
    for other in others:
        b = bare(tmp_path / "b.pt", other)
        with bytes_read(monkeypatch) as lengths:
            assert status(a, b, "-q") == 1
        assert lengths == []
    assert status(a, b, "-q", "--names-only") == 0
    folders = [tmp_path / name for name in ("x", "y")]
    for i, folder in enumerate(folders):
        folder.mkdir()
        bare(folder / "same.pt", {"w": numbers})
        bare(folder / "other.pt", {"w": numbers + i})
    assert status(*folders, "-q") == 1
    (folders[1] / "same.pt").write_bytes(b"PK\3\4 nothing")
    assert status(*folders, "-q") == 2
