"""Whether torch loads a file: the answers for the arguments of allowed calls and for the records around the pickle are
compared with torch.
"""

from __future__ import annotations

import _codecs
import csv
import itertools
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as save_safetensors
from torch import nn

from ckptconv import convert, inspect, verify
from ckptconv.checkpoint.torch_versions import Rules, flaws_of, installed_torch
from ckptconv.checkpoint.weights_only import objects
from ckptconv.errors import CkptconvError
from ckptconv.formats import opening
from ckptconv.limits import LIMITS
from ckptconv.safety import torch_load
from ckptconv.safety.torch_load import CALL, Loading, torch_loading
from tests.support import torch_facts, zoo
from tests.support.archives import big_endian, rezip, rezipped
from tests.support.command import Command
from tests.support.conversions import saved_at
from tests.support.hostile_bytes import saved, torch_zip_of
from tests.support.judge import refusal
from tests.support.legacy_files import legacy_file, storage_id
from tests.support.paths import FIXTURES
from tests.support.reduced import Reduced
from tests.support.sampled import sampled

HOOKS: Any = OrderedDict()
VERSION = torch_facts.version()
TORCH = "{}.{}".format(*VERSION)
#: Whether this torch allows nested tensors.
NESTED = Rules(VERSION).allow("torch._utils._rebuild_nested_tensor")
takes_nested = pytest.mark.skipif(not NESTED, reason="this torch refuses all nested tensors")
utils = torch._utils


def answer(path: Path) -> Loading:
    with opening.open_input(path) as source:
        return torch_loading(opening.read(source))


def check(path: Path, expected: str, text: str = "") -> None:
    """Assert that the answer for `path` is `expected`, that `text` is in a reason, and that torch does not contradict
    it.
    """
    found = answer(path)
    why = refusal(path)
    assert found.answer == expected, (found.reasons, why)
    assert not text or any(text in reason.text for reason in found.reasons), [each.text for each in found.reasons]
    if expected != "not known":
        assert (why is None) == (expected == "loads"), why


def test_the_verdict_names_the_installed_version(fixtures: Path) -> None:
    """The answer contains the version of the installed torch."""
    assert answer(fixtures / "cuda0.pt").torch == TORCH
    assert "weights_only=True" in CALL


# Calls


def storage(n: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return torch.zeros(n, dtype=dtype)._typed_storage()


def v2(*changes: tuple[int, Any], dtype: torch.dtype = torch.float32, n: int = 8) -> Reduced:
    """Return a call of _rebuild_tensor_v2 with some of its arguments changed."""
    args = dict(enumerate((storage(n, dtype), 0, (2, 2), (2, 1), False, HOOKS))) | dict(changes)
    return Reduced(utils._rebuild_tensor_v2, tuple(args.values()))


def qtensor(params: Any, *, size: Any = (2, 2), requires_grad: Any = False) -> Reduced:
    made = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)._typed_storage()
    return Reduced(utils._rebuild_qtensor, (made, 0, size, (2, 1), params, requires_grad, HOOKS))


def sparse(name: str, *data: Any) -> Reduced:
    return Reduced(utils._rebuild_sparse_tensor, (Reduced(torch.serialization._get_layout, (name,)), data))


def nested(sizes: Any, strides: Any, offsets: Any, buffer: Any = None) -> Reduced:
    buffer = torch.zeros(5) if buffer is None else buffer
    return Reduced(utils._rebuild_nested_tensor, (buffer, sizes, strides, offsets))


def from_type(state: Any, cls: Any = torch.Tensor) -> Reduced:
    args = (storage(), 0, (2,), (1,), False, HOOKS)
    return Reduced(torch._tensor._rebuild_from_type_v2, (utils._rebuild_tensor_v2, cls, args, state))


def parameter(data: Any, requires_grad: Any = True) -> Reduced:
    return Reduced(utils._rebuild_parameter, (data, requires_grad, HOOKS))


def with_state(state: Any) -> Reduced:
    return Reduced(utils._rebuild_parameter_with_state, (torch.ones(2), True, HOOKS, state))


def from_cpu(data: Any, dtype: Any, requires_grad: Any = False) -> Reduced:
    return Reduced(utils._rebuild_device_tensor_from_cpu_tensor, (data, dtype, "xla:0", requires_grad))


def meta(*args: Any) -> Reduced:
    return Reduced(utils._rebuild_meta_tensor_no_storage, args)


def unindexed(tensor: Any) -> Any:
    """Return a tensor with `tensor` in its hooks. No reader looks for tensors there, so none reports an error in
    `tensor`.
    """
    return v2((5, tensor))


def built(obj: Any, state: Any) -> Reduced:
    return Reduced(*obj.reduced[:2], state)


AFFINE, CHANNELS = torch.per_tensor_affine, torch.per_channel_affine
ONES, LONGS = torch.ones(2), torch.zeros(2, dtype=torch.int64)
INDICES, CROW, COL = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1, 2]), torch.tensor([1, 2])
SIZES, STRIDES, OFFSETS = torch.tensor([[2], [3]]), torch.tensor([[1], [1]]), torch.tensor([0, 2])
LOADS, REFUSED, NOT_KNOWN = "loads", "refused", "not known"
ORDERED: Any = Reduced(OrderedDict, ())

#: Objects with calls, the expected answer, and a text in the reason.
CALLS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a view": (v2, LOADS, ""),
    "a size that is a torch.Size": (lambda: v2((2, torch.Size([2, 2]))), LOADS, ""),
    "requires_grad is 0": (lambda: v2((4, 0)), REFUSED, "requires_grad must be True or False, not an integer"),
    "requires_grad is None": (lambda: v2((4, None)), REFUSED, "not None"),
    "requires_grad of integers": (lambda: v2((4, True), dtype=torch.int64), REFUSED, "cannot require gradients"),
    "requires_grad": (lambda: v2((4, True)), LOADS, ""),
    "hooks of any kind": (lambda: v2((5, [1])), LOADS, ""),
    "an offset that is a float": (lambda: unindexed(v2((1, 0.0))), REFUSED, "storage offset must be an integer"),
    "an offset that is True": (lambda: unindexed(v2((1, True))), REFUSED, "a truth value"),
    "a size that begins with a truth value": (lambda: unindexed(v2((2, (True, 2)))), REFUSED, "not a truth value"),
    "a size that has a truth value": (lambda: unindexed(v2((2, (2, True)))), LOADS, ""),
    "a size that has a float": (lambda: unindexed(v2((2, (2.0, 2)))), REFUSED, "shape must be an integer"),
    "a size that has True": (lambda: unindexed(v2((2, (True, 2)))), REFUSED, "a truth value"),
    "metadata": (lambda: v2((6, {"conj": True}), dtype=torch.complex64), LOADS, ""),
    "metadata of integers": (lambda: v2((6, {"conj": True}), dtype=torch.int64), REFUSED, "conj bit"),
    "metadata that is a list": (lambda: v2((6, [1])), REFUSED, "metadata must be a dict"),
    "metadata that is empty": (lambda: v2((6, [])), LOADS, ""),
    "metadata of another kind": (lambda: v2((6, {"x": True})), NOT_KNOWN, "other than its conj and neg bits"),
    "an argument too many": (lambda: v2((6, None), (7, None)), REFUSED, "6 to 7 arguments, not 8"),
    "an argument too few": (lambda: Reduced(utils._rebuild_tensor_v2, (storage(), 0, (1,), (1,), False)), REFUSED, "5"),
    "a tensor for a storage": (lambda: v2((0, torch.ones(8))), REFUSED, "needs a storage, not a tensor"),
    "float8 with gradient": (
        lambda: torch.zeros(2, dtype=torch.float8_e5m2).requires_grad_(),
        REFUSED,
        "float8_e5m2 that requires gradients and is not a Parameter",
    ),
    "a Parameter of float8": (lambda: nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2)), LOADS, ""),
    "a quantized tensor": (lambda: qtensor((AFFINE, 0.1, 3)), LOADS, ""),
    "an integer for a scale": (lambda: qtensor((AFFINE, 1, 3)), LOADS, ""),
    "a float for a zero point": (lambda: qtensor((AFFINE, 0.1, 3.0)), REFUSED, "zero point must be an integer"),
    "two parts of a quantizer": (lambda: qtensor((AFFINE, 0.1)), REFUSED, "it takes 3 arguments"),
    "another scheme": (lambda: qtensor((torch.per_tensor_symmetric, 0.1, 0)), REFUSED, "no quantization scheme"),
    "quantized with gradient": (lambda: qtensor((AFFINE, 0.1, 3), requires_grad=True), REFUSED, "gradients"),
    "channels": (lambda: qtensor((CHANNELS, ONES, LONGS, 0)), LOADS, ""),
    "an axis that is none": (lambda: qtensor((CHANNELS, ONES, LONGS, 2)), REFUSED, "its axis 2"),
    "too few scales": (lambda: qtensor((CHANNELS, torch.ones(1), LONGS, 0)), REFUSED, "1 scales for 2 channels"),
    "scales that are integers": (lambda: qtensor((CHANNELS, LONGS, LONGS, 0)), REFUSED, "its scales are int64"),
    "scales in two dimensions": (lambda: qtensor((CHANNELS, ONES[None], LONGS, 0)), REFUSED, "have 2 dimensions"),
    "COO": (lambda: sparse("torch.sparse_coo", INDICES, ONES, (2, 3), True), LOADS, ""),
    "COO as older torch wrote it": (lambda: sparse("torch.sparse_coo", INDICES, ONES, [2, 3]), LOADS, ""),
    "COO coalesced by 1": (lambda: sparse("torch.sparse_coo", INDICES, ONES, (2, 3), 1), REFUSED, "is_coalesced"),
    "COO of too few values": (lambda: sparse("torch.sparse_coo", INDICES, ONES[:1], (2, 3)), REFUSED, "2 indices"),
    "COO of another size": (lambda: sparse("torch.sparse_coo", INDICES, ONES, (2, 3, 4)), REFUSED, "3 dimensions"),
    "COO of flat indices": (lambda: sparse("torch.sparse_coo", COL, ONES, (2, 3)), REFUSED, "have 1 dimensions"),
    "CSR": (lambda: sparse("torch.sparse_csr", CROW, COL, ONES, (2, 3)), LOADS, ""),
    "CSR of three parts": (lambda: sparse("torch.sparse_csr", CROW, COL, ONES), REFUSED, "it takes 4 arguments"),
    "a strided layout": (lambda: sparse("torch.strided", INDICES, ONES, (2, 3)), REFUSED, "is not a sparse layout"),
    "no layout": (lambda: sparse("torch.dense", INDICES, ONES, (2, 3)), REFUSED, "torch has no layout 'torch.dense'"),
    "nested": (lambda: nested(SIZES, STRIDES, OFFSETS), LOADS, ""),
    "nested before its buffer": (lambda: nested(SIZES, STRIDES, OFFSETS - 1), NOT_KNOWN, "begins at -1"),
    "nested outside of its buffer": (lambda: nested(SIZES, STRIDES, OFFSETS + 1), REFUSED, "reaches over 24 bytes"),
    "nested of int32": (lambda: nested(SIZES.int(), STRIDES, OFFSETS), REFUSED, "its sizes are int32"),
    "nested of one offset": (lambda: nested(SIZES, STRIDES, OFFSETS[:1]), REFUSED, "2 parts"),
    "nested in two dimensions": (lambda: nested(SIZES, STRIDES, OFFSETS, torch.ones(2, 3)), REFUSED, "2 dimensions"),
    "a meta tensor": (lambda: meta(torch.int1, (2,), (1,), False), LOADS, ""),
    "a negative size on meta": (lambda: unindexed(meta(torch.int8, (-2,), (1,), False)), REFUSED, "negative"),
    "a stride too few on meta": (lambda: unindexed(meta(torch.int8, (2,), (), False)), REFUSED, "its stride 0"),
    "a quantized meta tensor": (lambda: meta(torch.qint8, (2,), (1,), False), REFUSED, "quantized"),
    "a text for a dtype": (
        lambda: unindexed(meta("int8", (2,), (1,), False)),
        REFUSED,
        "must be a torch.dtype, not a text",
    ),
    "a Parameter": (lambda: parameter(torch.ones(2)), LOADS, ""),
    "a Parameter of nothing": (lambda: parameter(None), LOADS, ""),
    "a Parameter of a list": (lambda: parameter([1.0]), REFUSED, "data must be a tensor, not a list"),
    "a Parameter of integers": (lambda: parameter(LONGS), REFUSED, "a tensor of int64 cannot require gradients"),
    "attributes": (lambda: with_state({"note": 1}), LOADS, ""),
    "attributes and slots": (lambda: with_state(({"a": 1}, {"b": 2})), LOADS, ""),
    "no attributes": (lambda: with_state(None), LOADS, ""),
    "a state of three": (lambda: with_state((1, 2, 3)), REFUSED, "a tuple of 3"),
    "a state that is a list": (lambda: with_state([1]), REFUSED, "its state must be a dict, not a list"),
    "an attribute that is no text": (lambda: with_state({1: 2}), REFUSED, "an attribute's name is not a string"),
    "an attribute of torch's own": (lambda: with_state({"grad": 1}), NOT_KNOWN, "the attribute 'grad'"),
    "attributes in what was made of pairs": (
        lambda: with_state(Reduced(OrderedDict, ([["shape", 1]],))),
        NOT_KNOWN,
        "created from another object",
    ),
    "attributes in what has some": (
        lambda: with_state(Reduced(OrderedDict, (), {"items": 1})),
        NOT_KNOWN,
        "the items of a mapping with attributes",
    ),
    "a subclass's data": (lambda: from_type({"a": 1}), LOADS, ""),
    "a subclass that is none": (lambda: from_type({}, 1), REFUSED, "the class of a tensor is not a class"),
    "a tensor of another device": (lambda: from_cpu(torch.ones(2), torch.float64), LOADS, ""),
    "one of integers with gradient": (lambda: from_cpu(torch.ones(2), torch.int8, True), REFUSED, "gradients"),
    "one of numpy's": (
        lambda: Reduced(utils._rebuild_device_tensor_from_numpy, (ONES, torch.float32, "xla:0", False)),
        REFUSED,
        "a NumPy array",
    ),
    "a wrapper": (
        lambda: Reduced(
            utils._rebuild_wrapper_subclass,
            (torch.Tensor, torch.float32, (2,), (1,), 0, torch.strided, torch.device("cpu"), False),
        ),
        REFUSED,
        "it needs a subclass of torch.Tensor",
    ),
    "a device": (lambda: Reduced(torch.device, ("cuda:300",)), LOADS, ""),
    "a device and its index": (lambda: Reduced(torch.device, ("mps", 3)), LOADS, ""),
    "a device that is none": (lambda: Reduced(torch.device, ("foo",)), REFUSED, "torch knows no device 'foo'"),
    "a device with a zero too many": (lambda: Reduced(torch.device, ("cuda:00",)), REFUSED, "knows no device"),
    "a device with a negative index": (lambda: Reduced(torch.device, ("cuda", -1)), REFUSED, "index of a device"),
    "a size": (lambda: Reduced(torch.Size, ([1, 2],)), LOADS, ""),
    "a size of texts": (lambda: Reduced(torch.Size, (("a",),)), REFUSED, "takes integers, not a text"),
    "a complex number": (lambda: Reduced(complex, (1, 2.5)), LOADS, ""),
    "a complex number of None": (lambda: Reduced(complex, (None,)), REFUSED, "takes numbers, not None"),
    "a complex number beyond floats": (lambda: Reduced(complex, (1 << 1024, 0)), REFUSED, "too large for a float"),
    "bytes": (lambda: b"\xff\0", LOADS, ""),
    "bytes of other letters": (lambda: Reduced(_codecs.encode, ("\u0100", "latin1")), REFUSED, "latin1"),
    "bytes in another encoding": (lambda: Reduced(_codecs.encode, ("a", "rot13")), NOT_KNOWN, "'rot13'"),
    "long bytes": (lambda: b"\xff" * 100_000, LOADS, ""),
    "a bytearray": (lambda: bytearray(b"ab"), LOADS, ""),
    "a bytearray of numbers": (lambda: Reduced(bytearray, ([1, 2],)), LOADS, ""),
    "a bytearray of large numbers": (lambda: Reduced(bytearray, ([256],)), REFUSED, "range(0, 256)"),
    "a bytearray of a text": (lambda: Reduced(bytearray, ("a",)), REFUSED, "takes bytes, not a text"),
    "a set": (lambda: {1, "a", (2,)}, LOADS, ""),
    "a set of lists": (lambda: Reduced(set, ([[1]],)), REFUSED, "cannot hash"),
    "a set of a number": (lambda: Reduced(set, (1,)), REFUSED, "cannot iterate over an integer"),
    "a counter": (lambda: Counter("aab"), LOADS, ""),
    "a counter of lists": (lambda: Reduced(Counter, ([[1]],)), REFUSED, "cannot hash"),
    "pairs": (lambda: Reduced(OrderedDict, ([["a", 1]],)), LOADS, ""),
    "pairs that are none": (lambda: Reduced(OrderedDict, ([["a"]],)), REFUSED, "its items must be pairs"),
    "items": (lambda: Reduced(OrderedDict, (), None, None, iter([("a", 1)])), LOADS, ""),
    "_metadata": (lambda: built(ORDERED, {"_metadata": {}}), LOADS, ""),
    "attributes that are a list": (lambda: built(ORDERED, [1]), NOT_KNOWN, "attributes of an OrderedDict are a list"),
    "attributes that are a number": (lambda: built(ORDERED, 1), REFUSED, "attributes of an OrderedDict are an integer"),
    "attributes of a set": (lambda: built(Reduced(set, ()), {"a": 1}), REFUSED, "BUILD on a set"),
    "items of a device": (
        lambda: Reduced(torch.device, ("cpu",), None, None, iter([("a", 1)])),
        REFUSED,
        "SETITEM on a torch.device",
    ),
    "a tensor as a key": (lambda: {ONES: 1, (torch.float32, ONES): 2}, LOADS, ""),
    "a storage": (lambda: {"a": storage(), storage(): 1}, LOADS, ""),
    "a storage made anew": (lambda: Reduced(torch.UntypedStorage, (4,)), NOT_KNOWN, "a new storage"),
    "a tensor of a GPU by its class": (lambda: Reduced(torch.cuda.FloatTensor, ()), NOT_KNOWN, "a GPU"),
    "an unknown class": (lambda: zoo.Frozen(1, "b"), REFUSED, "tests.support.zoo.Frozen"),
}


#: Checks that older versions of torch lack: the first version with the check, and the answer for earlier ones.
SINCE = {
    "too few scales": ((2, 13), NOT_KNOWN),
    "an axis that is none": ((2, 13), NOT_KNOWN),
    "items of a device": ((2, 10), NOT_KNOWN),
    "nested outside of its buffer": ((2, 8), NOT_KNOWN),
    "nested of int32": ((2, 8), NOT_KNOWN),
    "a meta tensor": ((2, 7), REFUSED),
    "an alignment that is not a number": ((2, 7), LOADS),
}


def expected_here(name: str, expected: str, text: str) -> tuple[str, str]:
    """Return the answer that is expected for the object `name` with this torch, and a text in its reason."""
    if name.startswith("nested") and not NESTED:
        return REFUSED, "torch._utils._rebuild_nested_tensor"
    first, before = SINCE.get(name, (VERSION, expected))
    return (expected, text) if first <= VERSION else (before, "")


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, tmp_path: Path) -> None:
    """The answers for calls of allowed functions are correct, for arguments that a function accepts and for others."""
    make, expected, text = CALLS[name]
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"it": make()}, path)
    check(path, *expected_here(name, expected, text))


#: Opcodes that no pickler writes, the expected answer, and a text in the reason.
PICKLES: dict[str, tuple[bytes, str, str]] = {
    "a plain value": (b"N", LOADS, ""),
    "a dtype is called": (b"ctorch\nfloat32\n)R", REFUSED, "torch.float32: it cannot be called"),
    "a list as a key": (b"}]K\x01s", REFUSED, "a key that Python cannot hash"),
    "a list in a key": (b"}K\x01]\x86K\x01s", REFUSED, "a key that Python cannot hash"),
    "an OrderedDict as a key": (b"}ccollections\nOrderedDict\n)RK\x01s", REFUSED, "cannot hash"),
    "a list as a key of an OrderedDict": (b"ccollections\nOrderedDict\n)R]K\x01s", REFUSED, "cannot hash"),
    "a dtype as a key": (b"}ctorch\nfloat32\nK\x01s", LOADS, ""),
    "a new OrderedDict": (b"ccollections\nOrderedDict\n]K\x01\x86\x81", LOADS, ""),
    "a new function": (b"ctorch._utils\n_rebuild_tensor\n)\x81", REFUSED, "it cannot be called"),
    "a new Parameter": (b"ctorch.nn.parameter\nParameter\nN\x89\x86\x81", LOADS, ""),
    "an item on a list": (b"ctorch\nSize\n)RK\x01a", REFUSED, "APPEND on a torch.Size"),
    "Python 2's text": (b"U\x02\xc3\xa4", LOADS, ""),
    "Python 2's bytes": (b"U\x01\xff", REFUSED, "not UTF-8"),
    "Python 2's name of a class": (b"c__builtin__\nset\n]\x85R", LOADS, ""),
    "a list that is filled too late": (b"ctorch\nSize\n]q\x00\x85Rh\x00(X\x01\x00\x00\x00ae\x86", LOADS, ""),
    "a list that is filled in time": (b"ctorch\nSize\n](X\x01\x00\x00\x00ae\x85R", REFUSED, "takes integers"),
    "a call of the result of a call": (b"ctorch\nSize\n)R)R", REFUSED, "a torch.Size is called"),
    "an opcode of protocol 4": (b"\x8c\x01a", REFUSED, "opcode SHORT_BINUNICODE"),
    "a set's opcode": (b"\x8f(K\x01\x90", REFUSED, "opcode ADDITEMS"),
    "POP": (b"NN0", REFUSED, "opcode POP"),
    "calls that are nested": (b"ctorch.nn.parameter\nParameter\n" * 40 + b"N" + b"\x85R" * 40, LOADS, ""),
    "tuples in tuples in a key": (b"})" + b"\x85" * 60 + b"K\x01s", NOT_KNOWN, "nested too deeply"),
}  # a table  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_pickles(name: str, tmp_path: Path) -> None:
    """The answers cover the opcodes and keys that the unpickler itself refuses, and the order of its operations."""
    body, expected, text = PICKLES[name]
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip_of(b"\x80\x02" + body + b"."))
    check(path, expected, text)


# Records

WHOLE = saved({"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int64)})

#: Records that differ from those of torch, the expected answer, and a text in the reason.
RECORDS: dict[str, tuple[Mapping[str, bytes | None], str, str]] = {
    "as torch writes it": ({}, LOADS, ""),
    "version 10": ({"version": b"10"}, LOADS, ""),
    "version 11": ({"version": b"11"}, REFUSED, "version 11, and torch reads 1 to 10"),
    "version 0": ({"version": b"0"}, REFUSED, "version 0"),
    "two versions that agree": ({".data/version": b"3"}, LOADS, ""),
    "a second version": ({".data/version": b"99"}, REFUSED, "version 99"),
    "a second version in capitals": ({".DATA/Version": b"99"}, REFUSED, "version 99"),
    "a second version that counts": ({"version": b"99", ".data/version": b"3"}, LOADS, ""),
    "a second version that is not a number": ({".data/version": b"x"}, REFUSED, "not a number"),
    "an alignment that is not a number": ({".storage_alignment": b"x"}, REFUSED, ".storage_alignment is not a number"),
    "an id that is no text": ({".data/serialization_id": b"\xff"}, REFUSED, "is not UTF-8"),
    "another format version": ({".format_version": b"x"}, LOADS, ""),
    "constants beside a state dict": ({"constants.pkl": pickle.dumps((), 2)}, REFUSED, "TorchScript archive"),
    "constants elsewhere": ({"extra/constants.pkl": b"x"}, LOADS, ""),
    "a long name": ({"x" * 600: b""}, LOADS, ""),
    "a long name that torch cuts in two": ({"x" * 502 + "é" * 9: b""}, REFUSED, "cuts a character of it in two"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, tmp_path: Path) -> None:
    """The answers cover the requirements of torch for the records around the pickle."""
    change, expected, text = RECORDS[name]
    path = tmp_path / "x.pt"
    path.write_bytes(rezipped(WHOLE, change))
    check(path, *expected_here(name, expected, text))


@pytest.mark.parametrize(("length", "expected"), [(510, LOADS), (511, REFUSED), (5000, REFUSED)])
def test_the_archives_folder(length: int, expected: str, tmp_path: Path) -> None:
    """torch reads 511 bytes of the name of a record, including the slash after the folder. A file whose folder has a
    longer name is refused.
    """
    path = tmp_path / "x.pt"
    path.write_bytes(rezipped(WHOLE, folder="r" * length))
    check(path, expected, "of the archive's folder" if expected == REFUSED else "")


def test_constants_that_torch_sees_in_a_longer_name(tmp_path: Path) -> None:
    """torch cuts off long names of records. A file is refused if one of its names becomes ``constants.pkl`` in this
    way.
    """
    folder = "r" * (511 - len("/constants.pkl"))
    path = tmp_path / "x.pt"
    path.write_bytes(rezipped(WHOLE, {"constants.pkl.extra": b""}, folder=folder))
    check(path, REFUSED, "torch cuts it off")


def test_deflated_storages(tmp_path: Path) -> None:
    """Deflated storages are inflated for the answer. If a storage is damaged, the answer is 'not known', because torch
    uses the content of uninitialized memory without an error.
    """
    path = tmp_path / "x.pt"
    path.write_bytes(rezipped(WHOLE, method=zipfile.ZIP_DEFLATED))
    check(path, LOADS)
    with zipfile.ZipFile(path) as opened:
        info = opened.getinfo("archive/data/1")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len("archive/data/1")] = 0x07  # an invalid kind of block
    path.write_bytes(data)
    assert answer(path).answer == NOT_KNOWN


@takes_nested
def test_another_byte_order(tmp_path: Path) -> None:
    """The numbers of nested tensors are read in the byte order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), tmp_path / "x.pt")
    check(big_endian(tmp_path / "x.pt", tmp_path / "y.pt", {"0": 4, "1": 8, "2": 8, "3": 8}), LOADS)
    check(
        rezip(tmp_path / "x.pt", tmp_path / "y.pt", {"byteorder": b"big"}), REFUSED if VERSION >= (2, 8) else NOT_KNOWN
    )


def test_a_file_without_bytes(tmp_path: Path) -> None:
    """``skip_data`` writes a file without the bytes of storages and without checksums. torch loads zeros, and
    ``verify`` reports no damage.
    """
    path = tmp_path / "x.pt"
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(300)}, path)
    check(path, LOADS)
    verdict = verify(path)
    assert verdict.ok and verdict.safety == "loads with weights_only=True" and verdict.torch == TORCH
    assert any("skip_data" in finding.what for finding in verdict.findings if finding.level == "warning")
    assert any("skip_data" in note for note in inspect(path).notes)


@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_a_file_without_bytes_is_converted(tmp_path: Path, dtype: str | None) -> None:
    """A file without the bytes of its storages can be converted, and ``verify`` accepts the output. Checksums of only
    some storages would make the output a damaged file.
    """
    source, out = tmp_path / "x.pt", tmp_path / "y.pt"
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(300), "n": torch.ones(4, dtype=torch.int64)}, source)
    convert(source, out, dtype=dtype)
    assert verify(out).ok and not torch.load(out)["w"].any()
    convert(source, tmp_path / "y.safetensors")
    assert not load_file(tmp_path / "y.safetensors")["w"].any()


def small_nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


#: For each limit: an object, its compression, and the amount that it takes.
BOUNDS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "values_read": (small_nested, zipfile.ZIP_STORED, 3 * 2 * 16),
    "values_copied": (lambda: from_cpu(torch.ones(2), torch.float64), zipfile.ZIP_STORED, 2 * 16),
    "inflated_to_prove": (lambda: torch.ones(3), zipfile.ZIP_DEFLATED, 12),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a check takes more than its limit, the answer is 'not known'."""
    make, method, most = BOUNDS[name]
    if name == "values_read" and not NESTED:
        pytest.skip("this torch refuses all nested tensors")
    path = saved_at(tmp_path / "x.pt", make())
    rezip(path, path, method=method)
    for limit, expected in ((most, LOADS), (most - 1, NOT_KNOWN)):
        limits = replace(LIMITS, **{name: limit})
        monkeypatch.setattr(objects, "LIMITS", limits)
        monkeypatch.setattr(torch_load, "LIMITS", limits)
        assert answer(path).answer == expected, (limit, answer(path).reasons)


# Other containers


def test_names_of_files(tmp_path: Path) -> None:
    """Since version 2.13, torch reads a file as safetensors exactly if its name ends in .safetensors. Earlier versions
    never do this.
    """
    (tmp_path / "x.safetensors").write_bytes(WHOLE)
    by_name = VERSION >= (2, 13)
    check(tmp_path / "x.safetensors", *((REFUSED, "its name ends in .safetensors") if by_name else (LOADS,)))
    for name, expected in (("y.safetensors", LOADS if by_name else REFUSED), ("y.bin", REFUSED)):
        (tmp_path / name).write_bytes(save_safetensors({"a": torch.ones(2)}))
        check(tmp_path / name, expected)
    assert inspect(tmp_path / "y.safetensors").loads_here and not (by_name and inspect(tmp_path / "y.bin").loads_here)


def test_plain_pickles_and_programs(tmp_path: Path) -> None:
    """``torch.load`` refuses plain pickles and TorchScript programs."""
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": torch.ones(2)}))
    check(tmp_path / "x.pkl", REFUSED, "which torch.load does not read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), tmp_path / "y.pt")
    check(tmp_path / "y.pt", REFUSED, "TorchScript")


OLD_PARAMETER = Reduced(
    nn.Parameter,
    (Reduced(torch.FloatTensor, (), (storage_id(torch.FloatStorage, "1", "cpu", 4), 0, (2, 2), (2, 1))),),
    (True, False, OrderedDict()),
)
VIEW = storage_id(torch.FloatStorage, "1", "cuda:0", 4, ("2", 1, 2))

#: Objects in the older format with one storage of 16 bytes, the expected answer, and a text in the reason.
OLD_OBJECTS: dict[str, tuple[Any, str, str]] = {
    "a part of a storage": (Reduced(utils._rebuild_tensor, (VIEW, 0, (2,), (1,))), LOADS, ""),
    "of torch before 0.4": (OLD_PARAMETER, LOADS, ""),
    "of another dtype": (
        Reduced(torch.DoubleTensor, (), (storage_id(torch.FloatStorage, "1", "cpu", 4), 0, (2,), (1,))),
        REFUSED,
        "a tensor of float64 gets a storage of float32",
    ),
    "on a GPU": (
        Reduced(torch.cuda.FloatTensor, (), (storage_id(torch.FloatStorage, "1", "cuda:0", 4), 0, (2,), (1,))),
        NOT_KNOWN,
        "creates a tensor on a GPU",
    ),
    "a state that is none": (
        Reduced(nn.Parameter, (OLD_PARAMETER.reduced[1][0],), (True, False)),
        REFUSED,
        "has 2 parts",
    ),
}


@pytest.mark.parametrize("python2", [False, True])
@pytest.mark.parametrize("name", OLD_OBJECTS)
def test_older_format(name: str, python2: bool, tmp_path: Path) -> None:
    """Calls that very old versions of torch wrote are judged as they are in the file, although readers replace them
    with the calls of today.
    """
    obj, expected, text = OLD_OBJECTS[name]
    path = tmp_path / "x.pt"
    path.write_bytes(legacy_file({"a": obj}, {"1": (4, bytes(16))}, python2=python2))
    if python2:  # Python 2 writes longer texts in an opcode that the safe loader does not know
        assert (answer(path).answer == LOADS) == (refusal(path) is None)
    else:
        check(path, expected, text)


def test_nested_tensors_in_the_older_format(tmp_path: Path) -> None:
    """In the older format, torch creates a nested tensor before its sizes are read. The answer is never that such a
    file loads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        obj = torch.nested.nested_tensor([torch.ones(2)])
        torch.save(obj, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert answer(tmp_path / "x.pt").answer == (NOT_KNOWN if NESTED else REFUSED)
    assert not inspect(tmp_path / "x.pt").loads_here


def test_a_tar_archive(tmp_path: Path) -> None:
    """A file that is also a tar archive is refused. torch tries ``tarfile`` first, which accepts numbers that readers
    of the older format do not look for.
    """
    data = bytearray(legacy_file({"a": 1}, {}, sys_info={"padding": "\0" * 600}))
    total = sum(data[:512]) - sum(data[148:156]) + 8 * ord(" ")
    data[148:156] = f"+{total:o}".encode().ljust(8)
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    assert "tar" in str(refusal(path))
    assert "tar" in said_of(path)


def said_of(path: Path) -> str:
    """Return the first reason why torch does not load the file at `path`, or the error of the reader."""
    try:
        return answer(path).reasons[0].text
    except CkptconvError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "zipped", "protocol"), sampled(itertools.product(zoo.ZOO, (True, False), range(2, 6)))
)
def test_the_zoo(name: str, zipped: bool, protocol: int, tmp_path: Path) -> None:
    """For all kinds of saved objects and all protocols, the answer is known and is that of torch."""
    if protocol < zoo.NEEDS_PROTOCOL.get(name, 2):
        return
    path = tmp_path / "x.pt"
    with warnings.catch_warnings(), suppress(RuntimeError):  # the older format cannot contain everything
        warnings.simplefilter("ignore")
        zoo.save(zoo.ZOO[name](), path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    if not path.stat().st_size:
        return
    if name == "nested" and not zipped:  # the answer depends on the content of memory
        return
    found = answer(path)
    assert found.answer == ("refused" if refusal(path) else "loads"), found.reasons


def test_other_peoples_checkpoints(corpus: Path) -> None:
    """For each checkpoint of the corpus, the answer is known and is that of torch."""
    for row in csv.DictReader((corpus / "manifest.csv").read_text().splitlines()):
        path = corpus / row["path"]
        try:
            found = answer(path)
        except CkptconvError:
            continue
        assert found.answer == ("refused" if refusal(path) else "loads"), (path, found.reasons)


# Output


def test_output_of_inspect(tmp_path: Path, command: Command) -> None:
    """The output contains the answer, the call that it is about, and the version of torch, as text and in JSON."""
    path = saved_at(tmp_path / "x.pt", {"m": {"w": v2((4, 0))}})
    said = inspect(path).as_dict()["torch_load"]
    assert said == {
        "answer": "refused",
        "call": CALL,
        "torch": TORCH,
        "reasons": [
            {
                "refused": True,
                "text": "torch._utils._rebuild_tensor_v2: its requires_grad must be True or False, not an integer",
                "path": "m/w",
                "needs": None,
            }
        ],
        "other_torch": None,
        "needs": None,
        "installed": installed_torch(),
        "flaws": [*flaws_of(torch.__version__)],
        "versions": None,
    }
    assert (
        "loads here    no: torch.load(weights_only=True) refuses torch._utils._rebuild_tensor_v2"
        in command("inspect", path).out
    )
    torch.save([Reduced(torch.UntypedStorage, (4,))], path)
    out = command("inspect", path).out
    assert f"loads here    not known: torch {TORCH} may refuse the file: torch.storage.UntypedStorage: a new" in out
    assert (
        f"not known to load with weights_only=True, needs no code by the rules of torch {TORCH}"
        in command("verify", path).out
    )
    (summary,) = [inspect(path)]
    assert summary.loads_here is None and not summary.weights_only
    assert (
        f"yes: torch.load(path, weights_only=True), rules of torch {TORCH}"
        in command("inspect", FIXTURES / "cpu.pt").out
    )


@pytest.mark.untraced
@takes_nested
def test_jagged_tensors(tmp_path: Path, command: Command) -> None:
    """torch loads jagged tensors only after a certain module was imported. A fresh process refuses the file. A process
    that has created a jagged tensor has imported the module, and loads the file.
    """
    path = saved_at(tmp_path / "x.pt", {"j": torch.nested.nested_tensor([ONES, torch.ones(3)], layout=torch.jagged)})
    program = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
    ran = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert ran.returncode and "must be imported" in ran.stderr
    built = "import torch; torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged); "
    subprocess.run([sys.executable, "-W", "ignore", "-c", built + program, path], check=True, capture_output=True)
    assert "in a fresh process only after `import torch._dynamo`" in " ".join(command("inspect", path).out.split())
    assert inspect(path).safety == "refused by weights_only=True, needs no code"


def test_a_note_of_convert(tmp_path: Path) -> None:
    """A note of ``convert`` tells that torch refuses the output because of a global. There is no note if the edit
    removes this global.
    """
    source = saved_at(tmp_path / "x.pt", {"m": {"w": torch.ones(2)}, "bad": Reduced(print, ())})
    (note,) = convert(source, tmp_path / "y.pt").notes
    assert note.startswith("torch.load(weights_only=True) refuses the output because of its __builtin__.print")
    assert convert(source, tmp_path / "z.pt", select="m").notes == ()
    check(tmp_path / "z.pt", LOADS)
