"""torch as the judge: whether two loaded objects are the same in everything that a checkpoint can say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def tags_of(path: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """The object in PATH loaded on the CPU, and the location tag of each storage in the order of loading."""
    tags: list[str] = []

    def keep(storage: Any, tag: str) -> Any:
        tags.append(tag)
        return storage

    return torch.load(path, map_location=keep, weights_only=kwargs.pop("weights_only", False), **kwargs), tags


def assert_same(left: Any, right: Any) -> None:
    """Fail unless LEFT and RIGHT are the same: types, nesting, order, values bit for bit, layout, and what shares what."""
    _Judge().compare(left, right, ".")


class _Judge:
    def __init__(self) -> None:
        self.pairs: dict[int, int] = {}  # object on the left → the one on the right, and back: identity must correspond
        self.back: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.storages_back: dict[int, int] = {}
        self.kept: list[Any] = []

    def compare(self, a: Any, b: Any, path: str) -> None:
        assert type(a) is type(b), (path, type(a), type(b))
        if isinstance(a, (str, bytes, int, float, complex, bool, type(None), type)):
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
        elif isinstance(a, (list, tuple)):
            assert len(a) == len(b), path
            for i, (va, vb) in enumerate(zip(a, b, strict=True)):
                self.compare(va, vb, f"{path}[{i}]")
        elif isinstance(a, (set, frozenset)):
            assert len(a) == len(b), path
            assert sorted(map(repr, a)) == sorted(map(repr, b)), path
        elif type(a).__module__ == "numpy":
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), path
        self.attributes(a, b, path)

    def atom(self, a: Any, b: Any, path: str) -> None:
        if isinstance(a, float) and math.isnan(a):
            assert math.isnan(b), path
        elif isinstance(a, float):
            assert a.hex() == b.hex(), (path, a, b)
        else:
            assert a == b, (path, a, b)

    def attributes(self, a: Any, b: Any, path: str) -> None:
        """Instance dict and slots; an OrderedDict's ``_metadata`` is one of them."""
        va, vb = getattr(a, "__dict__", None), getattr(b, "__dict__", None)
        if isinstance(va, dict) or isinstance(vb, dict):
            self.compare(dict(va or {}), dict(vb or {}), path + ".__dict__")
        for cls in type(a).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                assert hasattr(a, slot) == hasattr(b, slot), (path, slot)
                if hasattr(a, slot) and slot not in ("__dict__", "__weakref__"):
                    self.compare(getattr(a, slot), getattr(b, slot), f"{path}.{slot}")

    def storage(self, a: Any, b: Any, path: str) -> None:
        ua, ub = getattr(a, "_untyped_storage", a), getattr(b, "_untyped_storage", b)
        assert ua.nbytes() == ub.nbytes() and ua.device == ub.device, path
        if ua.nbytes():
            assert self.storages.setdefault(ua.data_ptr(), ub.data_ptr()) == ub.data_ptr(), f"{path}: sharing differs"
            assert self.storages_back.setdefault(ub.data_ptr(), ua.data_ptr()) == ua.data_ptr(), (
                f"{path}: sharing differs"
            )
        if ua.device.type == "cpu":
            assert bytes(ua) == bytes(ub) if ua.nbytes() < 1 << 16 else ua.tolist() == ub.tolist(), path

    def tensor(self, a: torch.Tensor, b: torch.Tensor, path: str) -> None:
        for what in ("dtype", "shape", "requires_grad", "layout", "device", "is_quantized", "is_nested"):
            assert getattr(a, what) == getattr(b, what), (path, what, getattr(a, what), getattr(b, what))
        if a.is_nested:
            self.compare(a._nested_tensor_size(), b._nested_tensor_size(), path + ".sizes")
            self.compare(a.values(), b.values(), path + ".values")
        elif a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), path
            self.compare(a._indices(), b._indices(), path + ".indices")
            self.compare(a._values(), b._values(), path + ".values")
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
            self.compare(a.crow_indices(), b.crow_indices(), path + ".crow")
            self.compare(a.col_indices(), b.col_indices(), path + ".col")
            self.compare(a.values(), b.values(), path + ".values")
        else:
            assert a.stride() == b.stride() and a.storage_offset() == b.storage_offset(), path
            assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg(), path
            if a.is_quantized:
                assert a.qscheme() == b.qscheme(), path
            try:
                sa, sb = a.untyped_storage(), b.untyped_storage()
                sa.data_ptr(), sb.data_ptr()
            except (RuntimeError, NotImplementedError):
                return  # a wrapper subclass: its parts are attributes
            self.storage(sa, sb, path + ".storage")
        if isinstance(a, torch.nn.Parameter) or type(a) is not torch.Tensor:
            self.attributes(a, b, path)
