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


@dataclass(eq=False, slots=True)
class Storage:
    """The bytes that one or more tensors are views of. Tensors that share bytes share the object.

    ``device`` is the location tag of the file, until an edit changes it.
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
    """A device that is not the tag of a storage: argument `index` of a rebuild call (xla tensors, wrapper subclasses).

    `nested`: ``call`` is ``_rebuild_from_type_v2(function, type, arguments, state)``, and the argument is one of
    ``arguments``.
    """

    call: Call
    nested: bool
    index: int
    device: str


@dataclass(eq=False, slots=True)
class TensorInfo:
    """A tensor as the pickle describes it. Shape, stride and offset count elements.

    Attributes:
        path: Its path in the checkpoint.
        name: Its key if it is in a mapping.
        kind: ``strided``, ``quantized``, ``sparse``, ``nested``, ``jagged`` (both with the shape of the tensor that
            contains their elements), ``meta``, ``device`` (rebuilt from a numpy array), ``wrapper`` (a subclass around
            other tensors) or ``partial`` (one process's part of a DTensor or ShardedTensor, with the shape of the
            whole).
        dtype: Its dtype as torch calls it, without ``torch.``.
        shape: Its size in each dimension.
        stride: Its step in each dimension.
        offset: Its first element in its storage.
        own_device: Its device if its storage does not tell it and it is known.
        nbytes: The bytes of its elements.
        storage: Its storage, or None if it has none of its own.
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
        """The device of its storage, also after an edit, unless a call copies the tensor elsewhere."""
        return self.own_device or (self.storage.device if self.storage else "unknown")

    @property
    def view(self) -> tuple[object, ...]:
        """The storage and the position in it. Two tensors are tied if these are equal."""
        return id(self.storage), self.offset, self.shape, self.stride, self.dtype, self.conj, self.neg


@dataclass(frozen=True)
class LeftBehind:
    """Data at `path` in the source that will not be in the target, with `nbytes` of storages, and `why`."""

    path: str
    nbytes: int
    why: str


@dataclass(frozen=True, eq=False)
class Replica:
    """Copies of the data at `place` in two `files`: the bytes of each, or None if it is known that they differ."""

    place: Place
    files: tuple[str, str]
    pieces: tuple[Piece, Piece] | None = None


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a tensor of `shape` whose elements are in order."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1] if shape else ()


def extent(info: TensorInfo) -> tuple[int, int]:
    """Return the first byte of its storage that `info` reaches, and the end of the last one. (0, 0) if it is empty."""
    if 0 in info.shape:
        return 0, 0
    dtype = get_dtype(info.dtype)
    last = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    return dtype.bytes_of(1) * info.offset, dtype.bytes_of(1) * (info.offset + last + 1)


def piece_of(info: TensorInfo, byteorder: str) -> Piece:
    """Return the elements of `info`, a strided tensor, in row-major order, little-endian.

    `byteorder` is that of the numbers in its storage.
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
    """Return what is left behind at `places`, with the bytes of the storages that go with it.

    Args:
        places: The places of the data.
        storage_of: The storage of each persistent id, by the id of the node.
        kept: Storages that stay in the target. Of the others, each is counted at the first place that refers to it.
        why: The reason.
    """
    counted = {id(storage) for storage in kept}
    seen: set[int] = set()
    left = []
    for place in places:
        nbytes = 0
        for node in walk([place.node], seen):
            storage = storage_of.get(id(node))
            if storage is not None and id(storage) not in counted:
                counted.add(id(storage))
                nbytes += storage.nbytes
        left.append(LeftBehind(place.path, nbytes, why))
    return left


def matches(glob: str, path: str, name: str | None) -> bool:
    """Return whether `glob` matches the tensor at `path`, whose key is `name`.

    The path is compared if `glob` has a slash or the tensor has no name, else the name. ``./w`` is the path of an item
    of the root. ``*`` crosses dots and slashes.
    """
    if "/" in glob or name is None:
        return fnmatchcase(path, glob) or fnmatchcase("./" + path, glob)
    return fnmatchcase(name, glob)


def glob_of(path: str, name: str | None) -> str:
    """Return a glob that matches the tensor at `path` and, as far as globs can tell, no other."""
    literal = path if "/" in path or name is None else name
    return "".join(f"[{c}]" if c in "*?[" else c if c == printable(c) else "?" for c in literal)
