"""Tests of ``--loadable`` for numpy arrays. Arrays of every dtype, shape and memory order become tensors with the same
values, or lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from tests.support.archives import big_endian
from tests.support.conversions import run_without_torch
from tests.support.judge import assert_same
from tests.unit.edits.loadable.test_table import SAVE, loadable

TORCH = [
    "bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"
]  # a table  # fmt: skip
#: Dtypes that torch does not have. Arrays of these dtypes become lists.
LISTS = ["U3", "S3", "V3", "M8[s]", "M8[D]", "M8[ns]", "m8[ms]", "m8[h]", "g"]
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "U": st.sampled_from(["", "a", "éé", "abc", "\U0001f600x"]), "S": st.binary(max_size=3), "V": st.binary(max_size=3),
    "M": st.integers(-(10**5), 10**5), "m": st.integers(-(10**9), 10**9),
    "f": st.floats(allow_nan=False, allow_infinity=False),
}  # a table  # fmt: skip


def iso(span: Any) -> str:
    """Return a duration as an ISO text."""
    unit, count = np.datetime_data(span.dtype)[0], int(span.astype("i8"))
    sign = "-" if count < 0 else ""
    return f"{sign}PT{abs(count)}H" if unit == "h" else f"{sign}PT{abs(count) // 1000}.{abs(count) % 1000:03}S"


PLAIN: dict[str, Any] = {
    "U": str, "S": bytes, "V": lambda each: each.tobytes(), "M": str, "m": iso, "f": float,
}  # a table  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
ORDERS = st.sampled_from(["C", "F", "K", "every second"])


def placed(flat: Any, shape: tuple[int, ...], order: str) -> Any:
    """Return `flat` with the shape `shape` and the memory order `order`."""
    made = flat.reshape(shape)
    if order == "K":
        return made.transpose(np.roll(range(len(shape)), 1).tolist())
    if order == "every second":
        return np.repeat(made, 2, axis=-1)[..., ::2] if shape else made
    return np.asarray(made, order="F" if order == "F" else "C")


@given(
    dtype=st.sampled_from(TORCH), swapped=st.booleans(), shape=SHAPES, order=ORDERS, data=st.binary(min_size=1),
    save=st.sampled_from([*SAVE]), turned=st.booleans(),
)  # fmt: skip
def test_arrays_are_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    swapped: bool,
    shape: tuple[int, ...],
    order: str,
    data: bytes,
    save: str,
    turned: bool,
) -> None:
    """An array becomes a tensor with the same dtype, shape and values. Big-endian numbers are byte-swapped, also in
    big-endian files, and Fortran order is kept in the strides.
    """
    path = tmp_path_factory.mktemp("arrays") / "a.pt"
    kind = np.dtype(dtype).newbyteorder(">" if swapped else "<")
    size = int(np.prod(shape))
    flat = np.frombuffer((data * (size * kind.itemsize // len(data) + 1))[: size * kind.itemsize], kind)
    array = placed(flat if dtype != "bool" else flat.view("u1") % 2 == 1, shape, order)
    if turned and save == "zip":
        torch.save({"a": array, "w": torch.arange(3, dtype=torch.int32)}, path)
        big_endian(path, path, {"0": 4})
        obj, saver = None, lambda *_: None
    else:
        obj, saver = {"a": array, "w": torch.arange(3, dtype=torch.int32)}, SAVE[save]
    found, made = loadable(obj, path, saver)
    native = array.astype(kind.newbyteorder("="))
    tensor = found["a"]
    assert tensor.dtype == torch.from_numpy(np.zeros(1, native.dtype)).dtype and tensor.shape == array.shape
    assert tensor.numpy().tobytes() == native.tobytes()
    assert made == [("a", "numpy.ndarray", "tensor")]
    assert_same(found["w"], torch.arange(3, dtype=torch.int32))
    if array.size and order == "F":
        assert tensor.numpy().flags.f_contiguous


@given(dtype=st.sampled_from(LISTS), swapped=st.booleans(), shape=SHAPES, order=ORDERS, data=st.data())
def test_arrays_of_other_dtypes_are_lists(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    swapped: bool,
    shape: tuple[int, ...],
    order: str,
    data: st.DataObject,
) -> None:
    """An array of a dtype that torch does not have becomes the list that ``tolist()`` returns. Times are numpy's texts,
    and durations are ISO texts.
    """
    path = tmp_path_factory.mktemp("arrays") / "a.pt"
    kind = np.dtype(dtype).newbyteorder(">" if swapped else "<")
    values = data.draw(st.lists(VALUES[kind.kind], min_size=1, max_size=6))
    size = int(np.prod(shape))
    flat = np.array((values * (size // len(values) + 1))[:size], np.dtype(dtype)).astype(kind)
    array = placed(flat, shape, order)
    found, _ = loadable({"a": array, "w": torch.ones(1)}, path, SAVE[data.draw(st.sampled_from([*SAVE]))])
    assert_same(found["a"], np.array([*map(PLAIN[kind.kind], array.flat)], object).reshape(array.shape).tolist())


@pytest.mark.filterwarnings("ignore:The 'generic' unit")
def test_times_in_every_unit(tmp_path: Path) -> None:
    """A time of any unit becomes a text from which numpy reads the same time and unit. Units that have no such text are
    refused.
    """
    units = ["Y", "M", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"]
    times = [np.datetime64(n, unit) for unit in units for n in (0, 1, -1, 29)] + [np.datetime64("NaT", "D")]
    found, _ = loadable({"t": times}, tmp_path / "a.pt")
    assert found["t"] == [str(time) for time in times]
    read = [np.datetime64(text) for text in found["t"]]
    assert [(each, each.dtype) for each in read[:-1]] == [(each, each.dtype) for each in times[:-1]]
    for odd in (np.datetime64(10**6, "Y"), np.datetime64(1, "2s"), np.timedelta64(1, "Y"), np.timedelta64(1)):
        with pytest.raises(ckptconv.errors.RefusedError, match="numpy scalar"):
            loadable({"t": odd, "w": 1}, tmp_path / "a.pt")


def test_long_doubles(tmp_path: Path) -> None:
    """A long double is refused unless a float represents it exactly."""
    floats = [1.5, -0.0, 2.0**1023, 5e-324, 2.0**-1074 * 3, 1 / 3]
    found, _ = loadable({"f": [np.longdouble(each) for each in floats]}, tmp_path / "a.pt")
    assert_same(found["f"], floats)
    for odd in (np.longdouble(1) / 3, np.longdouble(2) ** 2000, np.longdouble(2) ** -1080, np.longdouble("nan")):
        with pytest.raises(ckptconv.errors.RefusedError, match="contains a long double"):
            loadable({"f": odd, "w": 1}, tmp_path / "a.pt")


def test_structured_arrays(tmp_path: Path) -> None:
    """A structured array becomes a list of dicts by the names of the fields, also for nested records."""
    inner = np.dtype([("x", "<f4"), ("n", "U2")])
    array = np.array([(1, (0.5, "é")), (2, (1.5, ""))], [("a", ">i4"), ("b", inner)])
    found, _ = loadable({"a": array, "one": array[1]}, tmp_path / "a.pt")
    records = [{"a": 1, "b": {"x": 0.5, "n": "é"}}, {"a": 2, "b": {"x": 1.5, "n": ""}}]
    assert_same(found, {"a": records, "one": {**records[1], "b": {**records[1]["b"]}}})  # type: ignore[dict-item]


def test_arrays_of_objects(tmp_path: Path) -> None:
    """An array of objects becomes nested lists, and its objects become plain data."""
    array = np.empty((2, 2), object)
    array[:] = [[None, np.float32(0.5)], [np.arange(2.0), [b"x"]]]
    for order in ("C", "F"):
        found, _ = loadable({"a": np.asarray(array, order=order)}, tmp_path / "a.pt")  # type: ignore[call-overload]
        assert_same(found["a"], [[None, 0.5], [torch.arange(2.0, dtype=torch.float64), [b"x"]]])


@pytest.mark.parametrize("save", SAVE)
def test_long_arrays(tmp_path: Path, save: str) -> None:
    """An array that is too large to be kept in memory is read in steps from the file, also if its bytes are stored as
    text.
    """
    array = np.random.default_rng(0).integers(0, 256, 3_500_000, np.uint8)
    array[:2_200_000] %= 128  # so that characters of one byte and of two bytes are at the ends of steps
    found, _ = loadable({"a": array, "w": torch.ones(2)}, tmp_path / "a.pt", SAVE[save])
    assert torch.equal(found["a"], torch.from_numpy(array))
    with ckptconv.open(tmp_path / "out.pt") as out:
        assert torch.equal(out.load("a"), torch.from_numpy(array))
    assert ckptconv.verify(tmp_path / "out.pt").ok


def test_subclasses(tmp_path: Path) -> None:
    """A matrix becomes a tensor. Subclasses with more content, such as masked arrays, are refused."""
    matrix = np.arange(4.0).reshape(2, 2).view(np.matrix)
    found, _ = loadable({"m": matrix}, tmp_path / "a.pt")
    assert_same(found["m"], torch.arange(4.0, dtype=torch.float64).reshape(2, 2))
    with pytest.raises(ckptconv.errors.RefusedError, match=r"numpy\.ma"):
        loadable({"m": np.ma.masked_array([1, 2], [0, 1]), "w": 1}, tmp_path / "a.pt")


def test_states_of_generators(tmp_path: Path) -> None:
    """numpy accepts the converted states of random generators, and draws the same numbers from them."""
    old = np.random.RandomState(1)
    kinds = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
    generators = [np.random.Generator(kind(1)) for kind in kinds]
    obj = {
        "old": old.get_state(),
        "dict": old.get_state(legacy=False),
        "new": [g.bit_generator.state for g in generators],
    }
    found, _ = loadable(obj, tmp_path / "a.pt")
    expected = old.random()
    for state in (found["old"], found["dict"]):
        again = np.random.RandomState(2)
        again.set_state(state)
        assert again.random() == expected
    assert not any(isinstance(each, torch.Tensor) for each in found["old"])
    for kind, state, generator in zip(kinds, found["new"], generators, strict=True):
        bits = kind(2)
        bits.state = state
        assert np.random.Generator(bits).random() == generator.random()


def test_without_numpy_and_without_torch(tmp_path: Path) -> None:
    """Neither numpy nor torch is imported if the numbers keep their bytes."""
    obj = {"a": np.arange(100_000), "s": np.float32(1), "r": np.random.RandomState(0).get_state(), "w": torch.ones(1)}
    torch.save(obj, tmp_path / "a.pt")
    program = (
        "sys.modules['numpy'] = None; import ckptconv; ckptconv.convert(*sys.argv[1:], loadable=True)"
        "; assert not [name for name in sys.modules if name.startswith('numpy.')]"
    )
    run_without_torch(program, tmp_path / "a.pt", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt", weights_only=True)["a"], torch.arange(100_000))
