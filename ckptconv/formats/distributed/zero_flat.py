"""Flat data of DeepSpeed ZeRO: which elements of the ranks' flat tensors belong to which parameter.

Layout (``deepspeed/utils/zero_to_fp32.py``, ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` of 0.19.8):

- Stages 1 and 2: a group is one flat tensor, and each rank has a partition of it. The parameters follow one another in
  the order of ``param_shapes``, each with ``param_alignment_paddings`` elements after it. The fp32 weights end with the
  data, or with padding (the BF16 optimizer). The moments have ``group_paddings`` elements more.
- Stage 3: a rank has one flat tensor for each sub-group. Each parameter takes ``ceil(numel / ranks)`` elements at the
  same offset of each rank, counted over all sub-groups. The last ranks have padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckptconv.errors import LimitError, MalformedError
from ckptconv.limits import LIMITS

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """A range of a flat tensor: `numel` elements from `start` on of the tensor number `group` of `rank`."""

    rank: int
    group: int
    start: int
    numel: int


class Parameter(NamedTuple):
    """A parameter: its name, its shape, the number of the flat tensor in which it begins, and its ranges in order."""

    name: str
    shape: Shape
    group: int
    cuts: tuple[Cut, ...]


class Flats:
    """The sizes of flat tensors, from which the ranges of parameters are computed.

    ``sizes[rank][group]`` is the number of elements of a flat tensor that parameters can take. `where` is for errors.
    """

    def __init__(self, where: object, sizes: Sequence[Sequence[int]]) -> None:
        self.where = where
        self.sizes = sizes
        self.ranks = len(sizes)
        self._left = LIMITS.zero_cuts

    def of_groups(
        self, shapes: Sequence[dict[str, Shape]], paddings: Sequence[Sequence[int]] | None
    ) -> Iterator[Parameter]:
        """Yield the parameters of stages 1 and 2. `shapes` has a dict of shapes for each group.

        `paddings` has the number of elements after each parameter, or is None if there are none. Raises MalformedError
        if the parameters take more elements than there are, or leave more than padding.
        """
        for sizes in self.sizes:
            self.check("the number of flat tensors", len(shapes), len(sizes))
        for group, names in enumerate(shapes):
            gaps = [0] * len(names) if paddings is None else paddings[group]
            self.check("the number of paddings", len(names), len(gaps))
            starts = [0, *accumulate(sizes[group] for sizes in self.sizes)]
            offset = end = 0
            for (name, shape), gap in zip(names.items(), gaps, strict=True):
                numel = prod(shape)
                end = offset + numel
                if end > starts[-1]:
                    raise self.too_few(name, shape, offset, starts[-1])
                cuts = ((rank, start, count) for rank, start, count in self._cut(starts, offset, numel))
                yield Parameter(name, shape, group, tuple(Cut(rank, group, *rest) for rank, *rest in cuts))
                offset = end + gap
            # the partitions are equal and end at a multiple of twice the ranks, at least
            if starts[-1] - max(end, min(offset, starts[-1])) >= 2 * self.ranks:
                raise self.left_over(end, starts[-1])

    def of_ranks(self, shapes: Sequence[dict[str, Shape]]) -> Iterator[Parameter]:
        """Yield the parameters of stage 3. `shapes` has dicts of shapes, in the order of the flat data.

        Raises MalformedError unless the parameters take exactly the elements that there are.
        """
        for sizes in self.sizes:
            if sizes != self.sizes[0]:
                what = "the ranks have flat tensors of different sizes"
                raise MalformedError(what, where=self.where, expected=self.sizes[0], got=sizes)
        starts = [0, *accumulate(self.sizes[0])]
        offset = 0
        for name, shape in ((name, shape) for names in shapes for name, shape in names.items()):
            numel = prod(shape)
            share = -(-numel // self.ranks)
            if offset + share > starts[-1]:
                raise self.too_few(name, shape, offset, starts[-1])
            cuts = []
            for rank in range(-(-numel // share) if share else 0):
                count = min(share, numel - rank * share)
                cuts += [Cut(rank, *rest) for rest in self._cut(starts, offset, count)]
            yield Parameter(name, shape, min(bisect_right(starts, offset), len(starts) - 1) - 1, tuple(cuts))
            offset += share
        if offset != starts[-1]:
            raise self.left_over(offset, starts[-1])

    def _cut(self, starts: list[int], offset: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges of `count` elements from `offset` on in consecutive tensors.

        A range is the number of the tensor, the first element in it, and the number of elements. `starts` has the
        offset of each tensor and the total size. Raises LimitError after too many ranges.
        """
        i = bisect_right(starts, offset) - 1
        while count:
            done = min(starts[i + 1] - offset, count)
            if done:
                self._left -= 1
                if not self._left:
                    raise LimitError("the parameters are split into too many pieces", where=self.where)
                yield i, offset - starts[i], done
            offset, count, i = offset + done, count - done, i + 1

    def check(self, what: str, expected: int, got: int) -> None:
        """Raise MalformedError about `what` unless the numbers `expected` and `got` are equal."""
        if expected != got:
            raise self.disagree(what, f"{expected:,}", f"{got:,}")

    def disagree(self, what: str, expected: str, got: str) -> MalformedError:
        """Return the error for shapes and flat data that disagree about `what`."""
        what += ": param_shapes and the flat data disagree"
        return MalformedError(what, where=self.where, expected=expected, got=got)

    def too_few(self, name: str, shape: Shape, offset: int, available: int) -> MalformedError:
        """Return the error for the parameter `name`, which does not fit into the flat data.

        `offset` is the position where it begins, and `available` the number of all elements.
        """
        what = f"{name!r} of shape {shape} does not fit"
        return self.disagree(what, f"at most {available:,} elements", f"{prod(shape):,} from {offset:,} on")

    def left_over(self, used: int, available: int) -> MalformedError:
        """Return the error for flat data with `available` elements, of which the parameters take only `used`."""
        return self.disagree("the sum of all elements", f"{available:,}", f"{used:,}")
