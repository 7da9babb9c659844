"""Make the calls that rebuild tensors, for containers that have no pickle.

Source: ``torch/_utils.py`` of 2.13 (``_rebuild_tensor_v2``; ``_rebuild_tensor_v3``
for dtypes that no storage class has).
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul

from ckptconv.checkpoint.rebuild_functions import OtherDType
from ckptconv.checkpoint.storage_ids import new_id
from ckptconv.dtypes import BY_NAME, DType
from ckptconv.pickles.graph import Call, Dict, Global, Graph, PersistentId, Tuple, Value, set_items


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a tensor of `shape` whose elements stand in order."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def empty_graph() -> Graph:
    """The graph of an empty dict."""
    return Graph(Dict(), 2, 0, frozenset(), [], [], [], [], set())


class TensorCalls:
    """Makes calls for `graph`, which share their globals, as a pickle does."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._words: dict[tuple[str, str], Global] = {}

    def tensor(
        self, dtype: DType, shape: tuple[int, ...], key: str, nbytes: int, conj: bool = False, neg: bool = False
    ) -> Call:
        """A tensor that is all of the storage `key`, of `nbytes`, in row-major order.

        `conj`, `neg`: its numbers are still to be conjugated, negated.
        """
        typed = dtype.storage_class is not None
        storage_class = (
            self._word("torch", dtype.storage_class)
            if dtype.storage_class
            else self._word("torch.storage", "UntypedStorage")
        )
        storage = PersistentId(new_id(storage_class, key, "cpu", prod(shape) if typed else nbytes))
        self._graph.references.append(storage)
        stride = row_major(shape)
        hooks = Call("REDUCE", self._word("collections", "OrderedDict"), Tuple([]))
        args: list[Value] = [storage, 0, Tuple([*shape]), Tuple([*stride]), False, hooks]
        if not typed:
            args.append(
                self._word("torch", dtype.name) if dtype.name in BY_NAME else OtherDType("safetensors", dtype.name)
            )
        if conj or neg:
            put_off = Dict()
            set_items(put_off, [each for bit, there in (("conj", conj), ("neg", neg)) if there for each in (bit, True)])
            args.append(put_off)
        name = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
        return Call("REDUCE", self._word("torch._utils", name), Tuple(args))

    def _word(self, module: str, name: str) -> Global:
        if (module, name) not in self._words:
            self._words[module, name] = Global(module, name)
            self._graph.shared.add(self._words[module, name])
        return self._words[module, name]
