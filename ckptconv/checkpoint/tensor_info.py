"""Storages, tensors and what is left behind, as a checkpoint describes them."""

from __future__ import annotations

from ckptconv.byteranges.spans import Data, Piece
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, PersistentId
from ckptconv.pickles.paths import Place


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes that one or more tensors are views of. Identity is sharing.

    ``device`` is the location tag, as the file has it until an edit changes it.
    """

    key: str
    device: str
    nbytes: int
    data: Data


@dataclass(eq=False, slots=True)  # not frozen: that makes them three times as slow
class Reference:
    """One mention of a storage in the pickle."""

    node: PersistentId
    storage: Storage


@dataclass(frozen=True, eq=False)
class DeviceArgument:
    """A device that is no storage's tag: argument `index` of a rebuild call (xla tensors, wrapper subclasses).

    `nested`: ``call`` is ``_rebuild_from_type_v2(function, type, arguments, state)``, and
    the argument is one of ``arguments``.
    """

    call: Call
    nested: bool
    index: int
    device: str


@dataclass(eq=False, slots=True)
class TensorInfo:
    """A tensor as the pickle describes it. Shape, stride and offset count elements.

    Attributes:
        path: Where in the checkpoint it stands.
        name: Its key where it stands in a mapping.
        kind: ``strided``, ``quantized``, ``sparse``, ``nested``, ``jagged`` (both with the shape of the tensor that
            holds their elements), ``meta``, ``device`` (rebuilt from a numpy array), ``wrapper`` (a subclass around
            other tensors) or ``partial`` (one process's part of a DTensor or ShardedTensor, with the shape of the
            whole).
        dtype: As torch calls it, without ``torch.``.
        shape: Its size in each dimension.
        stride: Its step in each dimension.
        offset: Where it begins in its storage.
        own_device: Where it is if its storage does not say that and it is known.
        nbytes: The bytes of its elements.
        storage: None where it has none of its own.
        requires_grad: As in torch.
        is_parameter: Whether it is a ``torch.nn.Parameter``.
        contiguous: Whether its elements follow one another in the order of its indices.
        tied_to: The path of an earlier tensor that is the same.
        conj: Whether its values are still to be conjugated.
        neg: Whether its values are still to be negated.
    """

    path: str
    name: str | None
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    own_device: str | None
    nbytes: int
    storage: Storage | None
    requires_grad: bool
    is_parameter: bool
    contiguous: bool
    tied_to: str | None = None
    conj: bool = False
    neg: bool = False

    @property
    def device(self) -> str:
        """Where it is: where its storage is, also when an edit has moved that, unless a call copies it elsewhere."""
        return self.own_device or (self.storage.device if self.storage else "unknown")

    @property
    def view(self) -> tuple[object, ...]:
        """What it shows of which storage: two tensors are tied if this is equal."""
        return id(self.storage), self.offset, self.shape, self.stride, self.dtype, self.conj, self.neg


@dataclass(frozen=True)
class LeftBehind:
    """What stands at `path` in the source and will not be in the target: ``nbytes`` of storage go with it, and why."""

    path: str
    nbytes: int
    why: str


@dataclass(frozen=True, eq=False)
class Replica:
    """What stands at `place` in two `files`, whose bytes are `pieces`; None where it is known that they differ."""

    place: Place
    files: tuple[str, str]
    pieces: tuple[Piece, Piece] | None = None
