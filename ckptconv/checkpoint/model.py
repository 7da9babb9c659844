"""The data that flows from a file to a file: sources and byte ranges, storages and tensors, edits, plans and reports. Data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.edits.devices import Devices
from ckptconv.edits.dtype_rules import DTypeRule
from ckptconv.pickles.graph import Call, Global, Graph, PersistentId, Value

if TYPE_CHECKING:
    from ckptconv.byteranges.sources import Readable
    from ckptconv.errors import CkptconvError

__all__ = [
    "BLOCK",
    "Assemble",
    "Box",
    "Cast",
    "CastCount",
    "Chain",
    "Changes",
    "Checkpoint",
    "Data",
    "DeviceArgument",
    "Dropped",
    "Edits",
    "Gather",
    "Inflate",
    "Late",
    "Layout",
    "LeftBehind",
    "NameChange",
    "Other",
    "OutFile",
    "Overflow",
    "Part",
    "Piece",
    "Place",
    "Plan",
    "Reference",
    "Report",
    "Span",
    "Storage",
    "TensorInfo",
]


@dataclass(frozen=True)
class Span:
    """LENGTH bytes at OFFSET of SOURCE. ``crc32`` is what their checksum should be, where the source says it."""

    source: Readable
    offset: int
    length: int
    crc32: int | None = None


@dataclass(frozen=True)
class Inflate:
    """LENGTH bytes that the deflate stream OF gives; ``crc32`` is that of the result."""

    of: Span
    length: int
    crc32: int | None


@dataclass(frozen=True)
class Part:
    """LENGTH bytes at OFFSET of what the deflate stream OF gives."""

    of: Inflate
    offset: int
    length: int


@dataclass(frozen=True)
class Chain:
    """PARTS one behind another, LENGTH bytes in all. They are parts of WHOLE, whose checksum says whether they are what they should be; where that is None, each is whole and has its own."""

    parts: tuple[Span, ...]
    whole: Span | None
    length: int


@dataclass(frozen=True)
class Gather:
    """The elements of a strided view of OF, in row-major order, LENGTH bytes in all. Shape, stride and offset count elements of ITEMSIZE bytes."""

    of: Span | Inflate
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Box:
    """A part of a tensor, whole in OF: its first index and its number of indices in each dimension of the tensor, and its own strides in OF."""

    of: Span
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Assemble:
    """The elements of a tensor of SHAPE, in row-major order, LENGTH bytes in all: each of ITEMSIZE bytes, and in one of BOXES, which are in the order of their first indices."""

    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    itemsize: int
    length: int


@dataclass(frozen=True)
class Cast:
    """Each element of OF, which are of the dtype OLD, as one of the dtype NEW, LENGTH bytes in all.

    ``conj`` and ``neg`` are torch's lazy bits, resolved on the way. SWAPPED_IN: in OF the bytes of each number stand the other way round; SWAPPED_OUT: so they shall stand in the result.
    ``paths`` are those of the tensors that show these elements, and ``shown`` which ones they show, from the first up to the second of each pair; none: all of them.
    """

    of: Span | Inflate | Part | Chain | Gather | Assemble
    old: str
    new: str
    length: int
    conj: bool = False
    neg: bool = False
    swapped_in: bool = False
    swapped_out: bool = False
    paths: tuple[str, ...] = ()
    shown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Late:
    """LENGTH bytes that hold checksums: MAKE gives them, called with those of :attr:`OutFile.sums`, in order, when all are known."""

    length: int
    make: Callable[[Sequence[int]], bytes]


#: Bytes of a block that filesystems share between files, where both places agree modulo this.
BLOCK = 4096

#: What a storage's bytes are made of.
Data: TypeAlias = "Span | Inflate | Chain | Assemble | Cast"
#: What an output file is made of, in order.
Piece: TypeAlias = "bytes | Span | Inflate | Part | Chain | Gather | Assemble | Cast | Late"


@dataclass(eq=False)
class Storage:
    """The bytes that one or more tensors are views of. Identity is sharing.

    ``device`` is the location tag, as the file has it until an edit changes it.
    """

    key: str
    device: str
    nbytes: int
    data: Data


@dataclass(frozen=True, eq=False)
class Reference:
    """One mention of a storage in the pickle."""

    node: PersistentId
    storage: Storage


@dataclass(frozen=True, eq=False)
class DeviceArgument:
    """A device that is no storage's tag: argument INDEX of a rebuild call (xla tensors, wrapper subclasses).

    NESTED: ``call`` is ``_rebuild_from_type_v2(function, type, arguments, state)``, and the argument is one of ``arguments``.
    """

    call: Call
    nested: bool
    index: int
    device: str


@dataclass(eq=False, slots=True)  # not frozen: that makes a million of them three times as slow
class Place:
    """Where NODE stands first: SEGMENT (see :mod:`ckptconv.edits.names`) below PARENT. ``key`` is the key where the segment is a mapping's string key."""

    parent: Place | None
    segment: str
    node: Value
    depth: int
    key: str | None = None
    length: int = 0  # of the path, once the walk has come by

    @property
    def path(self) -> str:
        """The path, as ``inspect`` prints it."""
        segments: list[str] = []
        place: Place | None = self
        while (
            place is not None and place.parent is not None
        ):  # not by upwards(): asked for each tensor, again and again
            segments.append(place.segment)
            place = place.parent
        return "".join(reversed(segments)).removeprefix("/") or "."

    def upwards(self) -> Iterator[Place]:
        """This place, what it stands in, what that stands in, up to the root."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


@dataclass(eq=False, slots=True)
class TensorInfo:
    """A tensor as the pickle describes it. Shapes, strides and offset count elements; ``nbytes`` are the bytes of its elements.

    ``conj`` and ``neg`` say that the values are still to be conjugated or negated. ``kind`` is ``strided``, ``quantized``, ``sparse``, ``nested``, ``meta``, ``device`` (rebuilt from an array), ``wrapper`` (a subclass
    around other tensors) or ``partial`` (one process's part of a DTensor or ShardedTensor, with the shape of the whole). ``storage`` is None where the tensor has none of its own. ``name`` is its key where it stands in a
    mapping. ``tied_to`` is the path of an earlier tensor that is the same.
    """

    path: str
    name: str | None
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: str
    nbytes: int
    storage: Storage | None
    requires_grad: bool
    is_parameter: bool
    contiguous: bool
    tied_to: str | None = None
    conj: bool = False
    neg: bool = False

    @property
    def view(self) -> tuple[object, ...]:
        """What it shows of which storage: two tensors are tied if this is equal."""
        return id(self.storage), self.offset, self.shape, self.stride, self.dtype, self.conj, self.neg


@dataclass(frozen=True)
class LeftBehind:
    """Something that the source has and the target will not: its path, the bytes of storage that go with it, and why."""

    path: str
    nbytes: int
    why: str


@dataclass(eq=False)
class Checkpoint:
    """One checkpoint, parsed. The graph is the only truth and is edited in place; the rest is an index of it.

    ``is_state_dict``: its format holds nothing else, and ``ties`` are the names in it that are recorded as a text (second → first). ``container`` is what the format's reader keeps for its writer, ``metadata`` the texts that the container itself has (safetensors), ``unused`` what the file
    holds and nothing in it uses. ``class_ids``: the persistent ids, with the text of their source, by which torch's older format names classes of modules; in the graph stand the classes.
    ``blobs`` is what the places of long texts count in, which the graph has as byte ranges; None: the source.
    ``script_classes``: of a TorchScript archive the classes of modules by name, each with the names of its parameters and of its buffers; None for everything else.
    ``beside``: what other pickles of the file say, by their names in it; no conversion writes these.
    """

    format: str
    source: Readable
    graph: Graph
    container: object
    storages: dict[str, Storage]
    references: list[Reference]
    device_arguments: list[DeviceArgument]
    places: list[Place]
    tensors: dict[str, TensorInfo]
    tensor_nodes: dict[int, TensorInfo]
    blobs: Readable | None = None
    byteorder: str = "little"
    is_state_dict: bool = False
    ties: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    unused: list[LeftBehind] = field(default_factory=list)
    class_ids: dict[Global, PersistentId] = field(default_factory=dict)
    script_classes: dict[str, tuple[list[str], list[str]]] | None = None
    beside: dict[str, Checkpoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def root(self) -> Place:
        """Where the checkpoint itself stands: in a selected part, below the source's root."""
        return self.places[0] if self.places else Place(None, "", self.graph.root, 0)


@dataclass(frozen=True)
class Edits:
    """What the flags of ``convert`` and the keywords of its function become.

    ``select`` is a path, ``include`` and ``exclude`` are globs on names and paths of the source, those of ``dtypes`` on the new ones.
    """

    devices: Devices = field(default_factory=Devices)
    select: str | None = None
    state_dict: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    add_prefix: tuple[str, ...] = ()
    unwrap: bool = False
    dtypes: tuple[DTypeRule, ...] = ()
    compact: bool = False

    def without(self, field: str, what: object) -> Edits:
        """These edits but for WHAT in FIELD, where :class:`~ckptconv.errors.NoMatchError` says that it means nothing."""
        left: Any = tuple(each for each in getattr(self, field) if each != what)
        return replace(self, **{field: left})


@dataclass(frozen=True)
class NameChange:
    """One name of the state dict at PATH."""

    path: str
    old: str
    new: str


class CastCount(NamedTuple):
    """How many tensors were cast, ties once, and the bytes of their storages before and after."""

    tensors: int
    nbytes_before: int
    nbytes_after: int


class Dropped(NamedTuple):
    """How many storages lost bytes, and the bytes that they lost."""

    storages: int
    nbytes: int


@dataclass
class Changes:
    """What the edits change, for ``--dry-run`` and the report.

    ``devices`` maps (old tag, new tag) to the number of tensors and the bytes of storage; ``dtypes`` maps (old, new) to what was cast so; ``not_cast`` maps
    why tensors keep their dtype to their paths; ``separated`` has for each storage that was taken apart the paths of those that go on sharing one, by their dtype. ``compacted`` is what storages lost. ``rng_states`` are the
    paths of those that were kept on or brought to the CPU.
    """

    devices: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    names: list[NameChange] = field(default_factory=list)
    unprefixed: int = 0
    left_behind: list[LeftBehind] = field(default_factory=list)
    dtypes: dict[tuple[str, str], CastCount] = field(default_factory=dict)
    not_cast: dict[str, list[str]] = field(default_factory=dict)
    separated: list[dict[str, list[str]]] = field(default_factory=list)
    compacted: Dropped = field(default_factory=lambda: Dropped(0, 0))
    rng_states: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OutFile:
    """One file to write: its PIECES in order, and their SIZE in bytes.

    ``sums`` is that whose CRC-32 is computed beside the copy: checked where a range says what it should be, and handed to the late pieces. A :class:`Cast` or :class:`Assemble` in it is one of PIECES.
    """

    path: Path
    pieces: tuple[Piece, ...]
    size: int
    sums: tuple[Span | Chain | Assemble | Cast, ...] = ()


@dataclass(frozen=True)
class Other:
    """Something that is no checkpoint and comes along from SOURCE to PATH, with SIZE bytes to copy. KIND: ``file``, ``link``, ``folder``; ``kept``: it stays in the folder that is converted in place."""

    path: Path
    source: Path
    kind: str
    size: int


@dataclass(frozen=True)
class Layout:
    """What a format's writer decided: the files, what of the source they cannot hold, notes, and the ties (name, name it is tied to) that a file or its source records as texts."""

    files: tuple[OutFile, ...]
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first byte is written. ``formats`` are the source's and the target's; IS_FOLDER: TARGET is a folder, and FILES stand in it, with OTHERS, which come along as they are; else it is the one file."""

    formats: tuple[str, str]
    target: Path
    is_folder: bool
    files: tuple[OutFile, ...]
    changes: Changes
    ties: tuple[tuple[str, str], ...]
    left_behind: tuple[LeftBehind, ...]
    notes: tuple[str, ...]
    others: tuple[Other, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files) + sum(other.size for other in self.others)


@dataclass(frozen=True)
class Report:
    """What a conversion did. Sizes in bytes, time in seconds; ``written`` is False after a dry run.

    ``formats`` are the source's and the target's, ``size`` is that of the target, and ``files`` are the files in it with their sizes, where it is a folder; ``failed`` are those of a folder's files that could not be converted. ``changes`` says which devices and names changed, ``ties`` are names that the target holds as texts
    alone (name → the name that it is tied to), ``left_behind`` what the source has and the target has not, ``notes`` what else to know, ``overflowed`` how many numbers were too large for their new
    dtype, by the paths of the tensors that share their storage (which only writing can tell).
    """

    src: str
    dst: str
    formats: tuple[str, str]
    size: int
    changes: Changes
    ties: tuple[tuple[str, str], ...]
    left_behind: tuple[LeftBehind, ...]
    notes: tuple[str, ...]
    seconds: float
    written: bool
    overflowed: Overflow = field(default_factory=dict)
    files: tuple[tuple[str, int], ...] = ()
    failed: tuple[tuple[str, CkptconvError], ...] = ()


#: How many numbers were too large for their new dtype, by the paths of the tensors on their storage.
Overflow: TypeAlias = Mapping[tuple[str, ...], int]

#: Called with the number of bytes written since the last call.
Progress: TypeAlias = Callable[[int], None]
