"""Storages and tensors as a checkpoint describes them: their bytes, globs that match them, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate
from operator import mul

from ckptconv.byteranges.spans import ByteRange, Cast, Data, Gather, Inflate, Piece
from ckptconv.dtypes import BY_NAME, get_dtype
from ckptconv.errors import printable
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, PersistentId, walk
from ckptconv.pickles.paths import Place
from ckptconv.pickles.rows import outline


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes that one or more tensors are views of. Tensors that share bytes share this object.

    Attributes:
        key: The name of the storage in the checkpoint.
        device: The location tag of the file, or the new one after an edit.
        nbytes: The number of bytes.
        data: The range of the source with the bytes, or the bytes.
    """

    key: str
    device: str
    nbytes: int
    data: Data


@dataclass(eq=False, slots=True)  # not frozen, which is three times as slow
class Reference:
    """A reference to a storage in the pickle."""

    node: PersistentId
    storage: Storage


@dataclass(frozen=True, eq=False)
class DeviceArgument:
    """A device that is an argument of a rebuild call, and not the tag of a storage (xla tensors, wrapper subclasses).

    Attributes:
        call: The call.
        nested: Whether ``call`` is ``_rebuild_from_type_v2(function, type, arguments, state)``. If so, the device is in
            ``arguments``.
        index: The position of the device in the arguments.
        device: The name of the device.
    """

    call: Call
    nested: bool
    index: int
    device: str


@dataclass(eq=False, slots=True)
class TensorInfo:
    """A tensor as the pickle describes it. Shape, stride and offset count elements.

    Attributes:
        path: The path of the tensor in the checkpoint.
        name: The key of the tensor if it is in a mapping, or None.
        kind: ``strided``, ``quantized``, ``sparse``, ``nested``, ``jagged`` (both with the shape of the tensor that
            contains their elements), ``meta``, ``device`` (rebuilt from a numpy array), ``wrapper`` (a subclass around
            other tensors) or ``partial`` (the shard of one process of a DTensor or ShardedTensor, with the shape of the
            complete tensor).
        dtype: The name of the dtype, without ``torch.``.
        shape: The sizes.
        stride: The strides.
        offset: The position of the first element in the storage.
        own_device: The device, if it is known and differs from the tag of the storage, or None.
        nbytes: The number of bytes of the elements.
        storage: The storage, or None if the tensor has no storage of its own.
        requires_grad: Whether the tensor requires gradients.
        is_parameter: Whether the tensor is a ``torch.nn.Parameter``.
        contiguous: Whether the elements are stored in row-major order without gaps.
        tied_to: The path of an earlier tensor with the same view, or None.
        conj: Whether the values are conjugated when they are read.
        neg: Whether the values are negated when they are read.
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
        """The device on which torch would put the tensor: ``own_device``, or else the tag of the storage, or
        ``unknown``.
        """
        return self.own_device or (self.storage.device if self.storage else "unknown")

    @property
    def view(self) -> tuple[object, ...]:
        """The storage and the position in it. Two tensors are tied if their views are equal."""
        return id(self.storage), self.offset, self.shape, self.stride, self.dtype, self.conj, self.neg


@dataclass(frozen=True)
class LeftBehind:
    """Data of the source that is not in the output.

    Attributes:
        path: The path of the data in the source.
        nbytes: The bytes of storages that are not in the output because of it.
        why: The reason.
    """

    path: str
    nbytes: int
    why: str


@dataclass(frozen=True, eq=False)
class Replica:
    """Two copies of the data at `place`, in two `files`.

    `pieces` is the bytes of both, or None if they are known to differ.
    """

    place: Place
    files: tuple[str, str]
    pieces: tuple[Piece, Piece] | None = None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape`, as torch computes them."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def extent(info: TensorInfo) -> tuple[int, int]:
    """Return the range of bytes in the storage that `info` uses: the first byte, and the end of the last element.

    Return (0, 0) if the tensor is empty.
    """
    if 0 in info.shape:
        return 0, 0
    dtype = get_dtype(info.dtype)
    last = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    return dtype.bytes_of(1) * info.offset, dtype.bytes_of(1) * (info.offset + last + 1)


def piece_of(info: TensorInfo, byteorder: str) -> Piece:
    """Return the elements of `info`, a strided tensor with a storage, in row-major order, little-endian.

    Conjugation, negation and a change of dtype are applied. `byteorder` is the byte order of the storage.
    """
    assert info.storage is not None
    data = info.storage.data
    dtype, cast = get_dtype(info.dtype), data if isinstance(data, Cast) else None
    old = get_dtype(cast.old) if cast else dtype
    of, offset = data.uncast(), info.offset * old.itemsize
    length = info.nbytes // dtype.itemsize * old.itemsize
    if info.contiguous:
        elements = of.slice(offset, length)
    else:
        of, offset = of.part_at(offset)  # a view lies within one, because parts are the reach of views
        assert isinstance(of, (ByteRange, Inflate))
        elements = Gather(of, old.itemsize, info.shape, info.stride, offset // old.itemsize, length)
    swapped = byteorder == "big" and old.itemsize > 1 and old.name in BY_NAME
    if not (cast or swapped or info.conj or info.neg):
        return elements
    return Cast(
        elements, old.name, dtype.name, info.nbytes, info.conj, info.neg, swapped, paths=cast.paths if cast else ()
    )


def left_behind_at(
    places: Iterable[Place], storage_of: Mapping[int, Storage], kept: Iterable[Storage | None], why: str
) -> list[LeftBehind]:
    """Return an entry for the report for each of `places`, with the bytes of the storages that are no longer used.

    Args:
        places: The places of the data that is not in the output.
        storage_of: The storage of each persistent id, by the id of the node.
        kept: Storages that stay in the output and do not count. Any other storage counts at its first place only.
        why: The reason.
    """
    counted = {id(storage) for storage in kept}
    seen: set[int] = set()
    left = []
    for place in places:
        nbytes = 0
        for node in walk([place.node], seen, outline):
            storage = storage_of.get(id(node))
            if storage is not None and id(storage) not in counted:
                counted.add(id(storage))
                nbytes += storage.nbytes
        left.append(LeftBehind(place.path, nbytes, why))
    return left


def matches(glob: str, path: str, name: str | None) -> bool:
    """Return whether `glob` matches the tensor at `path`, whose key is `name`.

    If `glob` has a slash or the tensor has no key, the path is compared, with or without ``./`` before it. Otherwise
    the key is compared. ``*`` also matches dots and slashes.
    """
    if "/" in glob or name is None:
        return fnmatchcase(path, glob) or fnmatchcase("./" + path, glob)
    return fnmatchcase(name, glob)


def glob_of(path: str, name: str | None) -> str:
    """Return a glob that matches the tensor at `path` with the key `name`.

    It can match others only if unprintable characters occur, for which it has ``?``.
    """
    literal = path if "/" in path or name is None else name
    return "".join(f"[{c}]" if c in "*?[" else c if c == printable(c) else "?" for c in literal)
