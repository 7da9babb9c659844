"""A comparison of two loaded objects with torch, in every property that a checkpoint can store."""

from __future__ import annotations

import struct
import warnings
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

#: Attributes that are not compared: the mode of a fake tensor, the offset of a fake storage in the file, and the mark
#: of a storage in the older format.
_MACHINERY = ("fake_mode", "_checkpoint_offset", "_torch_load_uninitialized")


def tags_of(path: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Load the object in `path` on the CPU. Return it, and the location tags of the storages in the order of
    loading.
    """
    tags: list[str] = []

    def keep(storage: Any, tag: str) -> Any:
        tags.append(tag)
        return storage

    return torch.load(path, map_location=keep, weights_only=kwargs.pop("weights_only", False), **kwargs), tags


def forget_sparse() -> None:
    """Forget the sparse tensors that a failed load has noted, because torch would validate them at the end of the next
    load.
    """
    utils: Any = torch._utils
    noted = getattr(utils, "_sparse_tensors_to_validate", None)
    (utils._get_sparse_tensors_to_validate() if noted is None else noted).clear()


def refusal(path: Any, **kwargs: Any) -> str | None:
    """Return the error with which torch's safe loader refuses the file at `path`, or None if it loads. The device is
    the CPU unless `kwargs` contain another.
    """
    forget_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about protocols
        try:
            torch.load(path, weights_only=True, **{"map_location": "cpu", **kwargs})
        except Exception as error:
            return str(error)
    return None


def assert_same(left: Any, right: Any) -> None:
    """Fail unless `left` and `right` are equal in types, nesting, order, values bit for bit, layout, and shared objects
    and storages.
    """
    _Judge().compare(left, right, ".")


def assert_same_files(left: Any, right: Any, **options: Any) -> None:
    """Fail unless torch loads equal objects and equal location tags from both files, with `options`."""
    (a, tags), (b, their_tags) = tags_of(left, **options), tags_of(right, **options)
    assert_same(a, b)
    assert tags == their_tags


class _Judge:
    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}  # by id, left → right and right → left: identities must correspond
        self.back: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.storages_back: dict[int, int] = {}
        self.kept: list[Any] = []

    def compare(self, a: Any, b: Any, path: str) -> None:
        assert type(a) is type(b), (path, type(a), type(b))
        if isinstance(a, (str, bytes, int, float, complex, bool, type(None), type, PurePath)):
            self.atom(a, b, path)
            return
        self.kept += (a, b)
        if id(a) in self.pairs or id(b) in self.back:
            if not isinstance(a, (tuple, torch.Size)) or a:
                assert self.pairs.get(id(a)) == id(b) and self.back.get(id(b)) == id(a), f"{path}: sharing differs"
            return
        self.pairs[id(a)], self.back[id(b)] = id(b), id(a)
        if isinstance(a, torch.Tensor):
            self.tensor(a, b, path)
        elif isinstance(a, (torch.storage.UntypedStorage, torch.storage.TypedStorage)):
            self.storage(a, b, path)
        elif isinstance(a, Mapping):
            assert len(a) == len(b), path
            for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
                self.compare(ka, kb, f"{path}/<key>")
                self.compare(va, vb, f"{path}/{ka!r:.50}")
        elif isinstance(a, (list, tuple, deque)):
            assert len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0), path
            for i, (va, vb) in enumerate(zip(a, b, strict=True)):
                self.compare(va, vb, f"{path}[{i}]")
        elif isinstance(a, (set, frozenset)):
            assert sorted(map(repr, a)) == sorted(map(repr, b)), path
            for va, vb in zip(sorted(a, key=repr), sorted(b, key=repr), strict=True):
                self.compare(va, vb, f"{path}{{{va!r:.50}}}")
        elif isinstance(a, (np.ndarray, np.generic)):
            self.array(a, b, path)
        elif isinstance(a, torch.Generator):
            assert a.device == b.device, path
            self.compare(a.get_state(), b.get_state(), path + ".state")
        elif _has_own_equality(a) and not _has_attributes(a):
            assert a == b, (path, a, b)
        elif isinstance(a, MethodType):
            self.compare([a.__func__, a.__self__], [b.__func__, b.__self__], path)
        elif isinstance(a, partial):
            self.compare([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], path)
        elif isinstance(a, FunctionType) or not (hasattr(a, "__dict__") or _has_attributes(a)):
            assert a is b, (path, a, b)  # a function, a dtype, a layout
        if hasattr(a, "default_factory"):
            assert a.default_factory is b.default_factory, path
        self.attributes(a, b, path)

    def atom(self, a: Any, b: Any, path: str) -> None:
        if isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b), (path, a, b)
        elif isinstance(a, complex):
            self.atom(a.real, b.real, path)
            self.atom(a.imag, b.imag, path)
        else:
            assert a == b, (path, a, b)

    def array(self, a: Any, b: Any, path: str) -> None:
        """Compare numpy arrays and scalars."""
        assert (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides), path
        if a.dtype.hasobject:
            self.compare(a.tolist(), b.tolist(), path + ".tolist()")
        else:
            assert a.tobytes() == b.tobytes(), path

    def attributes(self, a: Any, b: Any, path: str) -> None:
        """Compare the instance dict and the slots. The dict includes the ``_metadata`` of an OrderedDict."""
        va, vb = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
        if isinstance(va, dict) or isinstance(vb, dict):
            self.compare(_without_machinery(va), _without_machinery(vb), path + ".__dict__")
        for cls in type(a).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                assert hasattr(a, slot) == hasattr(b, slot), (path, slot)
                if hasattr(a, slot) and slot not in ("__dict__", "__weakref__"):
                    self.compare(getattr(a, slot), getattr(b, slot), f"{path}.{slot}")

    def storage(self, a: Any, b: Any, path: str) -> None:
        ua, ub = getattr(a, "_untyped_storage", a), getattr(b, "_untyped_storage", b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), path
        assert ua.nbytes() == ub.nbytes() and ua.device == ub.device, path
        assert self.storages.setdefault(ua._cdata, ub._cdata) == ub._cdata, f"{path}: sharing differs"
        assert self.storages_back.setdefault(ub._cdata, ua._cdata) == ua._cdata, f"{path}: sharing differs"
        self.kept += (ua, ub)
        if ua.device.type == "cpu":
            assert torch.equal(_bytes_of(ua), _bytes_of(ub)), path

    def tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        for what in ("dtype", "requires_grad", "layout", "device", "is_quantized", "is_nested"):
            assert getattr(a, what) == getattr(b, what), (path, what, getattr(a, what), getattr(b, what))
        if a.is_nested:
            self.compare(a._nested_tensor_size(), b._nested_tensor_size(), path + ".sizes")
            self.compare(a.values(), b.values(), path + ".values")
            return
        assert a.shape == b.shape, path
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), path
            self.compare(a._indices(), b._indices(), path + ".indices")
            self.compare(a._values(), b._values(), path + ".values")
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
            self.compare(a.crow_indices(), b.crow_indices(), path + ".crow")
            self.compare(a.col_indices(), b.col_indices(), path + ".col")
            self.compare(a.values(), b.values(), path + ".values")
        elif a.layout in (torch.sparse_csc, torch.sparse_bsc):
            self.compare(a.ccol_indices(), b.ccol_indices(), path + ".ccol")
            self.compare(a.row_indices(), b.row_indices(), path + ".row")
            self.compare(a.values(), b.values(), path + ".values")
        else:
            assert a.stride() == b.stride() and a.storage_offset() == b.storage_offset(), path
            assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), path
            if a.is_quantized:
                self.quantizer(a, b, path)
            if not _is_wrapper(a):
                self.storage(a.untyped_storage(), b.untyped_storage(), path + ".storage")
        self.attributes(a, b, path)

    def quantizer(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        assert a.qscheme() == b.qscheme(), path
        if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            assert (a.q_scale(), a.q_zero_point()) == (b.q_scale(), b.q_zero_point()), path
            return
        assert a.q_per_channel_axis() == b.q_per_channel_axis(), path
        assert torch.equal(a.q_per_channel_scales(), b.q_per_channel_scales()), path
        assert torch.equal(a.q_per_channel_zero_points(), b.q_per_channel_zero_points()), path


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has no storage of its own. The tensors that it wraps are attributes."""
    is_plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not is_plain and not isinstance(tensor, FakeTensor)


def _without_machinery(attributes: Any) -> dict[str, Any]:
    """Return a copy of `attributes` without those that torch's loaders set."""
    return {name: value for name, value in (attributes or {}).items() if name not in _MACHINERY}


def _has_own_equality(value: Any) -> bool:
    """Return whether the class of `value` defines the equality of its objects. Methods do not count, because their
    equality compares the objects that they are bound to.
    """
    equality: Any = type(value).__eq__
    return equality not in (object.__eq__, MethodType.__eq__)


def _has_attributes(value: Any) -> bool:
    return bool(getattr(value, "__dict__", None)) or any("__slots__" in cls.__dict__ for cls in type(value).__mro__)
