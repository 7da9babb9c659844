"""Two checkpoints compared: names, what the tensors are, what is no tensor, and values, which are read a buffer at a time.

torch is not imported unless bytes differ, or do not stand in the order of their tensors. A storage whose checksum is known on both sides, and equal, is not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite, prod
from typing import TYPE_CHECKING, TypeVar

from ckptconv import formats
from ckptconv.conversion import edits_from
from ckptconv.differences import Difference, OtherDifference, TensorDifference, ValueDifference
from ckptconv.dtypes import dtype_called
from ckptconv.edits import apply
from ckptconv.elements import piece_of
from ckptconv.errors import LimitError, RefusedError, UsageError, count, some
from ckptconv.graph import Call, Global, PersistentId, Tuple, Value, args_of, uncollected
from ckptconv.likenesses import command_that_fits
from ckptconv.limits import LIMITS
from ckptconv.model import (
    Cast,
    Checkpoint,
    Edits,
    Gather,
    Inflate,
    Late,
    Piece,
    Place,
    Progress,
    Span,
    Storage,
    TensorInfo,
)
from ckptconv.pairing import Pairing, Side
from ckptconv.pieces import Pieces
from ckptconv.rebuild_calls import FROM_TYPE
from ckptconv.same_bytes import Unequal, same_streams, unequal_parts
from ckptconv.sources import Source
from ckptconv.vocabulary import index_again
from ckptconv.wording import for_python

if TYPE_CHECKING:
    from ckptconv.tensors.comparing import Comparer

__all__ = ["compare", "diff"]

_T = TypeVar("_T")

_BLOCK = 1 << 15  # elements that are compared at once where bytes differ: as few as torch gives to one thread
_SHOWN = 3  # paths in a note
_ASKED = "left out as asked"
_WHOLE_NUMBERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}


@for_python
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    names_only: bool = False,
    state_dict: bool = False,
    select: str | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    unwrap: bool = False,
    strip_prefix: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    add_prefix: str | Iterable[str] = (),
) -> Difference:
    """What the checkpoints A and B, in whatever containers, do not have in common; ``.same`` says whether that is nothing. Neither is run, loaded or changed.

    ``rtol``, ``atol``: numbers are the same if |a - b| <= atol + rtol * |b|, as for ``torch.allclose``. ``names_only``: compare the names of tensors and nothing else.
    The other keywords are those of :func:`ckptconv.convert`, and are for A. Where one of the two is safetensors, the state dict of the other is taken.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError` where one cannot be read or an edit cannot be made.
    """
    edits = edits_from(
        state_dict=state_dict, select=select, include=include, exclude=exclude, unwrap=unwrap, strip_prefix=strip_prefix,
        rename=rename, add_prefix=add_prefix,
    )  # fmt: skip
    if not isinstance(names_only, bool):
        raise TypeError(f"names_only must be True or False, not {names_only!r}")
    return compare(a, b, edits, rtol=rtol, atol=atol, names_only=names_only)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    edits: Edits,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    names_only: bool = False,
    progress: Callable[[int], AbstractContextManager[Progress | None]] | None = None,
) -> Difference:
    """:func:`diff` with the edits as data. PROGRESS is called with the bytes to compare, and what it gives with each number of bytes compared."""
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not (isfinite(tolerance) and tolerance >= 0):
            raise UsageError(f"{name} {tolerance} is no tolerance", expected="a number that is not negative")
    with Source(a) as source_a, Source(b) as source_b:
        with uncollected():
            comparison = _Comparison(formats.read(source_a), formats.read(source_b), edits, (rtol, atol))
            comparison.pair(values=not names_only)
        comparison.read_values(progress)
        source_a.check_unchanged()
        source_b.check_unchanged()
        return comparison.result(names_only=names_only)


class _Comparison:
    """The steps of one comparison, in order."""

    def __init__(self, a: Checkpoint, b: Checkpoint, edits: Edits, tolerance: tuple[float, float]) -> None:
        self.a, self.b, self.edits, self.tolerance = a, b, edits, tolerance
        self.formats = a.format, b.format
        self.paths = str(a.source.path), str(b.source.path)
        self.weights_alone = [_why_alone(each) for each in (a, b) if _holds_weights_alone(each)]
        self.notes: list[str] = []
        self.rest: tuple[list[str], list[str]] = ([], [])
        self.take_parts()
        self.pairing = Pairing(Side(a), Side(b), tensors_alone=bool(self.weights_alone))
        self.values = _Values(a, b, *tolerance)
        self.found: list[tuple[TensorDifference, list[_Key]]] = []
        self.others: list[tuple[OtherDifference, _Key | None]] = []

    def take_parts(self) -> None:
        """Edit A; where one side holds weights alone, take the other's."""
        alone = bool(self.weights_alone)
        left = apply(self.a, replace(self.edits, state_dict=True) if alone else self.edits)
        left_in_b = []
        if alone:
            try:
                left_in_b = apply(self.b, Edits(state_dict=True)).left_behind
            except RefusedError as error:
                if "--select" in (error.hint or ""):
                    error.hint = "give this file first, and say which with --select PATH"
                raise
        if alone or self.edits != Edits():
            index_again(self.a)
        if left_in_b:
            index_again(self.b)
        self.notes += left.notes
        asked = self.edits.select is not None or self.edits.state_dict
        if alone:
            self.rest[0].extend(each.path for each in left.left_behind if not (asked or each.why == _ASKED))
            self.rest[1].extend(each.path for each in left_in_b)

    def notes_of_rest(self) -> Iterator[str]:
        """What was not compared because one side has tensors with names and nothing else."""
        for side, own, passed_over in zip("AB", self.rest, self.pairing.passed_over, strict=True):
            paths = [*own, *passed_over]
            if paths:
                what = f"{count(len(paths), 'thing')} of {side} beside its tensors ({some(paths, _SHOWN)})"
                yield f"not compared: {what}; {self.weights_alone[0]}"

    def pair(self, *, values: bool) -> None:
        """Find the names that both sides have, and compare everything but values, unless names are all that is asked for."""
        self.pairing.run()
        if not values:
            return
        for place_a, place_b in self.pairing.tensors:
            self.compare_tensors(place_a, place_b)
        for place_a, place_b in self.pairing.storages:
            self.compare_storages(place_a, place_b)
        if self.a.is_state_dict and self.b.is_state_dict:
            for key in {**self.a.metadata, **self.b.metadata}:
                texts = self.a.metadata.get(key), self.b.metadata.get(key)
                unsaid = key == "format" and None in texts  # every writer says it, or nobody needs it
                if texts[0] != texts[1] and not unsaid:
                    words = [None if text is None else repr(text[:60]) for text in texts]
                    self.others.append((OtherDifference(f"__metadata__/{key}", *words), None))

    def compare_tensors(self, place_a: Place, place_b: Place) -> None:
        side_a, side_b = self.pairing.a, self.pairing.b
        a, b = side_a.tensor(place_a.node), side_b.tensor(place_b.node)
        assert a and b and isinstance(place_a.node, Call) and isinstance(place_b.node, Call)
        plain = self.pairing.tensors_alone
        found = TensorDifference(
            "",
            dtype=_pair(a.dtype, b.dtype),
            shape=_pair(a.shape, b.shape),
            device=None if plain else _pair(a.device, b.device),
            requires_grad=None if plain else _pair(a.requires_grad, b.requires_grad),
            class_name=None if plain else _pair(_class_of(place_a.node, a, side_a), _class_of(place_b.node, b, side_b)),
            made_of=_pair(a.kind, b.kind),
        )
        keys: list[_Key] = []
        if not found.shape and not found.made_of and (a.dtype == b.dtype or _are_numbers(a.dtype, b.dtype)):
            if a.kind == "strided":
                keys.append(self.values.want(a, b))
            elif not found.dtype:
                same, inner = self.pairing.same_parts(place_a.node, place_b.node)
                alike = [(x, y) for x, y in inner if (x.shape, x.dtype) == (y.shape, y.dtype)]
                if not (same and len(alike) == len(inner)) and not found.requires_grad:
                    found = replace(found, made_of=(a.kind, f"{b.kind}, of other parts"))
                keys += [self.values.want(x, y) for x, y in alike]
        if keys or found != TensorDifference(""):
            self.found.append((replace(found, path=place_a.path), keys))

    def compare_storages(self, place_a: Place, place_b: Place) -> None:
        """Two bare storages, which are compared as bytes."""
        a, b = self.pairing.a.storages[id(place_a.node)], self.pairing.b.storages[id(place_b.node)]
        words = self.pairing.a.words(place_a.node), self.pairing.b.words(place_b.node)
        classes = _storage_class(place_a.node), _storage_class(place_b.node)
        if classes[0] != classes[1]:
            words = f"{classes[0]}, {words[0]}", f"{classes[1]}, {words[1]}"
        key = None
        if words[0] == words[1]:
            key = self.values.want(_bytes_of(a), _bytes_of(b))
            words = words[0], "other bytes"
        self.others.append((OtherDifference(place_a.path, *words), key))

    def read_values(self, progress: Callable[[int], AbstractContextManager[Progress | None]] | None) -> None:
        """Compare the values of all tensors that were asked for."""
        self.values.run(progress)

    def result(self, *, names_only: bool) -> Difference:
        differing = []
        for found, keys in self.found:
            values = _sum([self.values.found[key] for key in keys]) if keys else None
            if values is None or values.differing or replace(found, path="") != TensorDifference(""):
                differing.append(replace(found, values=values))
        others = [each for each, key in self.others if key is None or self.values.found[key].differing]
        pairing = self.pairing
        infos = [info for place, _ in pairing.tensors if (info := pairing.a.tensor(place.node))]
        distinct = {info.view if info.storage else (id(info),): info.nbytes for info in infos}
        return Difference(
            *self.paths, self.formats, len(pairing.tensors), sum(distinct.values()), tuple(pairing.a.only), tuple(pairing.b.only), tuple(differing),
            () if names_only else (*pairing.others, *others), (*self.notes, *self.more_notes(names_only=names_only)), self.suggestion(),
        )  # fmt: skip

    def more_notes(self, *, names_only: bool) -> Iterator[str]:
        """What else to know."""
        near = [found.path for found, keys in self.found if any(key in self.values.near for key in keys)]
        if near:
            most = max(self.values.near.values())
            yield f"{count(len(near), 'tensor')} of other values within the tolerance, apart by {most:.2g} at most: {some(near, _SHOWN)}"
        if not names_only:
            yield from self.notes_of_rest()
            yield from self.notes_of_ties()
            for each, checkpoint in (("A", self.a), ("B", self.b)):
                if checkpoint.unused:
                    yield f"not compared: what {each} has beside its checkpoint ({some([left.path for left in checkpoint.unused], _SHOWN)})"

    def suggestion(self) -> str | None:
        """The command that compares what is alike, where no name is in both."""
        if self.pairing.tensors or not (self.pairing.a.only and self.pairing.b.only):
            return None
        flags = [("--rtol", self.tolerance[0]), ("--atol", self.tolerance[1])]
        more = tuple(word for flag, value in flags if value for word in (flag, f"{value:g}"))
        return command_that_fits(self.a, self.b, self.edits, self.paths, more)

    def notes_of_ties(self) -> Iterator[str]:
        """Which names are one tensor on one side alone."""
        names = [place.path for place, _ in self.pairing.tensors]
        groups = _groups(self.a, names), _groups(self.b, names)
        for this, other, word in ((0, 1, "A"), (1, 0, "B")):
            tied = [f"{name} = {groups[this][name]}" for name in names if groups[this][name] not in (name, groups[other][name])]  # fmt: skip
            if tied:
                yield f"tied in {word} alone: {some(tied, _SHOWN)}"


def _holds_weights_alone(checkpoint: Checkpoint) -> bool:
    return checkpoint.is_state_dict or checkpoint.script_classes is not None


def _why_alone(checkpoint: Checkpoint) -> str:
    """Why nothing but tensors with names is compared where CHECKPOINT is one side."""
    if checkpoint.is_state_dict:
        return f"{checkpoint.format} holds nothing else"
    return f"of a {checkpoint.format} archive the weights are compared, and not the program"


def _pair(a: _T, b: _T) -> tuple[_T, _T] | None:
    return None if a == b else (a, b)


def _are_numbers(a: str, b: str) -> bool:
    from ckptconv.tensors.comparing import comparable

    return comparable(a, b)


def _class_of(node: Call, info: TensorInfo, side: Side) -> str:
    """The class of the tensor that NODE makes."""
    cls = args_of(node)[1] if str(node.callable) in FROM_TYPE and len(args_of(node)) > 1 else None
    if isinstance(cls, Global) and not info.is_parameter:
        return side.name(cls)
    return "Parameter" if info.is_parameter else "Tensor"


def _storage_class(node: Value) -> str:
    cls = node.id.items[1] if isinstance(node, PersistentId) and isinstance(node.id, Tuple) else None
    return cls.name if isinstance(cls, Global) else "storage"


def _bytes_of(storage: Storage) -> TensorInfo:
    """All bytes of STORAGE as a tensor of them."""
    return TensorInfo(
        "", None, "strided", "uint8", (storage.nbytes,), (1,), 0, storage.device, storage.nbytes, storage, False, False, True
    )  # fmt: skip


def _groups(checkpoint: Checkpoint, names: list[str]) -> dict[str, str]:
    """For each of NAMES the first of them that is the same tensor."""
    first: dict[str, str] = {}
    groups = {}
    for name in names:
        info = checkpoint.tensors.get(name)
        groups[name] = first.setdefault(info.tied_to or name if info else name, name)
    return groups


def _sum(values: list[ValueDifference]) -> ValueDifference:
    """What several tensors that make one differ in."""
    if len(values) == 1:
        return values[0]
    numbers = [each for each in values if each.largest is not None and each.largest_relative is not None]
    return ValueDifference(
        sum(each.elements for each in values),
        sum(each.differing for each in values),
        max((each.largest or 0 for each in numbers), default=0),
        max((each.largest_relative or 0.0 for each in numbers), default=0.0),
    )


# Values

_Key = tuple[tuple[object, ...], tuple[object, ...]]


class _Values:
    """Compares the values of pairs of tensors of A and B, each pair of views once."""

    def __init__(self, a: Checkpoint, b: Checkpoint, rtol: float, atol: float) -> None:
        self.orders = a.byteorder, b.byteorder
        self.rtol, self.atol = rtol, atol
        self.found: dict[_Key, ValueDifference] = {}
        self.near: dict[_Key, float] = {}
        self.wanted: dict[_Key, tuple[TensorInfo, TensorInfo]] = {}

    def want(self, a: TensorInfo, b: TensorInfo) -> _Key:
        """Have A and B, of one shape, compared; where the result will be found."""
        a, b = _in_numbers(a), _in_numbers(b)
        key = a.view, b.view
        if key not in self.found and key not in self.wanted:
            if not a.nbytes or self.known_equal(a, b):
                self.found[key] = ValueDifference(prod(a.shape), 0)
            else:
                self.wanted[key] = a, b
        return key

    def known_equal(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Whether A and B are the same view of storages that have the same checksum, by what their files say."""
        if not a.storage or not b.storage or a.view[1:] != b.view[1:] or self.orders[0] != self.orders[1]:
            return False
        sums = [each.storage.data.crc32 for each in (a, b) if each.storage and isinstance(each.storage.data, (Span, Inflate))]  # fmt: skip
        return a.storage.nbytes == b.storage.nbytes and len(sums) == 2 and sums[0] is not None and sums[0] == sums[1]

    def run(self, progress: Callable[[int], AbstractContextManager[Progress | None]] | None) -> None:
        """Compare what is wanted: as bytes where they can be, and as numbers where they differ."""
        as_bytes = {key: spans for key, (a, b) in self.wanted.items() if (spans := self.spans(a, b))}
        places = {_place(spans): spans for spans in as_bytes.values()}  # views can have one storage
        nbytes = sum(spans[0].length for spans in places.values())
        with progress(nbytes) if progress else nullcontext() as tick:
            unequal = unequal_parts(list(places.values()), tick)
        parts = {place: unequal.get(i) for i, place in enumerate(places)}
        slow: list[tuple[_Key, Piece, Piece]] = []
        for key, (a, b) in self.wanted.items():
            spans = as_bytes.get(key)
            found = parts[_place(spans)] if spans else None
            if spans and not found:
                self.found[key] = ValueDifference(prod(a.shape), 0)
                continue
            pieces = piece_of(a, self.orders[0]), piece_of(b, self.orders[1])
            if found and pieces == spans:
                self.compare_parts(key, (a, b), spans, found)
            else:
                slow.append((key, *pieces))
        self.compare_streams(slow)

    def spans(self, a: TensorInfo, b: TensorInfo) -> tuple[Span, Span] | None:
        """Ranges of the files which, if they are the same, say that A and B are: the elements, or the whole storages of the same view."""
        if a.dtype != b.dtype or (a.conj, a.neg) != (b.conj, b.neg) or self.orders[0] != self.orders[1]:
            return None
        assert a.storage and b.storage
        found: list[Piece]
        if a.contiguous and b.contiguous:
            found = [piece.of if isinstance(piece, Cast) else piece for piece in (piece_of(a, self.orders[0]), piece_of(b, self.orders[1]))]  # fmt: skip
        elif a.view[1:] == b.view[1:]:
            found = [a.storage.data, b.storage.data]
        else:
            return None
        left, right = found
        return (left, right) if isinstance(left, Span) and isinstance(right, Span) and left.length == right.length else None  # fmt: skip

    def compare_parts(
        self, key: _Key, infos: tuple[TensorInfo, TensorInfo], spans: tuple[Span, Span], parts: Sequence[Unequal]
    ) -> None:
        """Compare as numbers what differs as bytes."""
        comparer = self.comparer(*infos)
        size = _BLOCK * dtype_called(infos[0].dtype).itemsize
        for offset, length in parts:
            buffers = [memoryview(bytearray(min(size, length))) for _ in spans]
            for at in range(0, length, size):
                filled = [buffer[: min(size, length - at)] for buffer in buffers]
                for span, buffer in zip(spans, filled, strict=True):
                    span.source.read_into(span.offset + offset + at, buffer)
                comparer.add(*filled)
        self.conclude(key, comparer)

    def compare_streams(self, slow: list[tuple[_Key, Piece, Piece]]) -> None:
        """Compare what has to be inflated, gathered, turned round or widened."""
        for key, *pieces in slow:
            for info, piece in zip(self.wanted[key], pieces, strict=True):
                _check_gathered(info, piece)
        with Pieces(piece for _, *pieces in slow for piece in pieces) as reader:
            for key, a, b in slow:
                infos = self.wanted[key]
                assert not isinstance(a, (bytes, Late)) and not isinstance(b, (bytes, Late))
                stored = not isinstance(a, (Gather, Cast)) and not isinstance(b, (Gather, Cast))
                if stored and infos[0].dtype == infos[1].dtype and same_streams(reader.chunks(a), reader.chunks(b)):
                    self.found[key] = ValueDifference(prod(infos[0].shape), 0)
                    continue
                comparer = self.comparer(*infos)
                sizes = [_BLOCK * dtype_called(info.dtype).itemsize for info in infos]
                for left, right in zip(_blocks(reader.chunks(a), sizes[0]), _blocks(reader.chunks(b), sizes[1]), strict=True):  # fmt: skip
                    comparer.add(left, right)
                self.conclude(key, comparer)

    def comparer(self, a: TensorInfo, b: TensorInfo) -> Comparer:
        from ckptconv.tensors.comparing import Comparer

        return Comparer(a.dtype, b.dtype, prod(a.shape), self.rtol, self.atol)

    def conclude(self, key: _Key, comparer: Comparer) -> None:
        self.found[key] = found = comparer.result()
        if comparer.is_near:
            self.near[key] = float(found.largest or 0)


def _in_numbers(info: TensorInfo) -> TensorInfo:
    """INFO, a tensor with a storage, where it is quantized as its whole numbers; where several are packed in a byte as bytes."""
    dtype = dtype_called(info.dtype)
    if dtype.name in _WHOLE_NUMBERS:
        return replace(info, dtype=_WHOLE_NUMBERS[dtype.name], kind="strided")
    if dtype.packed == 1:
        return info
    if not info.contiguous:
        assert info.storage
        return _bytes_of(info.storage)
    offset = info.offset // dtype.packed * dtype.itemsize
    return replace(info, dtype="uint8", kind="strided", shape=(info.nbytes,), stride=(1,), offset=offset)


def _place(spans: tuple[Span, Span]) -> tuple[int, int, int]:
    return spans[0].offset, spans[1].offset, spans[0].length


def _check_gathered(info: TensorInfo, piece: Piece) -> None:
    """Raise LimitError where a view repeats its elements more often than anybody can wait for."""
    most = max(LIMITS.gathered_ratio * (info.storage.nbytes if info.storage else 0), LIMITS.gathered_bytes)
    if isinstance(piece, (Gather, Cast)) and info.nbytes > most:
        raise LimitError(
            f"{info.path} has too many elements for its storage", expected=f"at most {most:,} bytes", got=f"{info.nbytes:,}"
        )  # fmt: skip


def _blocks(chunks: Iterator[bytes | memoryview], size: int) -> Iterator[memoryview]:
    """What CHUNKS give, in buffers of SIZE bytes, of which the last may have less; each good until the next is asked for."""
    room = memoryview(bytearray(size))
    filled = 0
    for chunk in chunks:
        left = memoryview(chunk)
        while left:
            length = min(len(left), size - filled)
            room[filled : filled + length] = left[:length]
            filled, left = filled + length, left[length:]
            if filled == size:
                yield room
                filled = 0
    if filled:
        yield room[:filled]
