"""Fold repeated blocks: ``layers.0`` to ``layers.31`` become one branch if all of them are alike.

The paths of the tensors form a tree of their segments. Siblings whose segments are numbers are folded into one branch
if the segments, dtypes, shapes, devices, sizes and ties below them are the same. So two numbers of a path (layers and
experts) are folded if every layer has every expert, and otherwise only the inner number. Subtrees are compared by a
number for their content, so the time is that of sorting the names.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import gc_paused

if TYPE_CHECKING:
    from ckptconv.inspection.summary import TensorSummary

_DEEPEST = 64  # levels; the rest of a name is one segment, so that no name makes the tree deeper
_SHOWN_RUNS = 4
# A key that is not a string, an index with the separator after it, or a word up to the dot or slash that ends it, with
# the dots at its start.
_PIECE = regex(
    r"""\[ (?: '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [^]'"] )* \] (?:\\[0-9]+)? /?
      | \.* (?: \\. | [^\\/[.] )* (?: [./] | (?=\[) | $ )
      | .
    """,
    re.DOTALL | re.VERBOSE,
)
_PLAIN_PIECE = regex(r"\.*[^./]*[./]?")  # the same for paths without brackets and backslashes, but many times faster
_NUMBER = regex(r"(\[?)(0|[1-9][0-9]{0,8})(\]?[./]?)")


@dataclass(slots=True)
class Branch:
    """A branch of the tree. It can stand for several siblings.

    Attributes:
        segment: The segment of the first sibling.
        numbers: The numbers of the siblings. Empty for a single one.
        times: The number of paths that the branch stands for, including folded levels above it.
        first: The position of its first tensor in the order of the file.
        tensor: The tensor at this path, or None.
        below: The branches below.
        tensors: The number of all tensors that it stands for.
        nbytes: The bytes of these tensors, without tied ones.
    """

    segment: str
    numbers: list[int]
    times: int
    first: int
    tensor: TensorSummary | None
    below: list[Branch] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0

    def name(self) -> str:
        """Return the segment. If there are several siblings, all numbers are in it: ``{0…31}.`` or ``[0…31]``."""
        match = _NUMBER.fullmatch(self.segment)
        if not self.numbers or match is None:
            return self.segment
        opening, _, closing = match.groups()
        runs = _runs(self.numbers)
        return f"{opening}{runs}{closing}" if opening else f"{{{runs}}}{closing}"


def tree_of(tensors: Sequence[TensorSummary], *, fold: bool) -> list[Branch]:
    """Return the first level of the tree of `tensors`. With `fold`, repeated blocks become one branch."""
    with gc_paused():
        root = _Node(0)
        for i, tensor in enumerate(tensors):
            at = root
            for piece in _pieces(tensor.path):
                at = at.below.get(piece) or at.below.setdefault(piece, _Node(i))
            at.tensor = tensor
        if fold:
            _compare(root, {})
        return _branches(root, 1, fold=fold)


def leaves(branches: list[Branch], prefix: str = "") -> Iterator[tuple[str, Branch]]:
    """Yield each branch that is a tensor, after its complete name, which starts with `prefix`."""
    for branch in branches:
        name = prefix + branch.name()
        if branch.tensor is not None:
            yield name, branch
        yield from leaves(branch.below, name)


class _Node:
    """A node of the tree while it is built. Nodes with the same ``kind`` have the same content."""

    __slots__ = ("below", "first", "kind", "tensor")

    def __init__(self, first: int) -> None:
        self.below: dict[str, _Node] = {}
        self.first = first
        self.kind = 0
        self.tensor: TensorSummary | None = None


def _pieces(path: str) -> list[str]:
    """Return the segments of `path`. If there are more than 64, the last item contains all remaining ones."""
    pieces = [piece for piece in (_PIECE if "[" in path or "\\" in path else _PLAIN_PIECE).findall(path) if piece]
    return pieces if len(pieces) <= _DEEPEST else [*pieces[: _DEEPEST - 1], "".join(pieces[_DEEPEST - 1 :])]


def _compare(node: _Node, kinds: dict[Hashable, int]) -> int:
    """Compute the ``kind`` of `node` and of all nodes below it. Return that of `node`.

    `kinds` maps the content of a node to its number. New content gets a new number.
    """
    tensor = node.tensor
    alike = tensor and (
        tensor.dtype,
        tensor.shape,
        tensor.device,
        tensor.kind,
        tensor.nbytes,
        tensor.tied_to,
    )
    below = tuple(sorted((piece, _compare(inner, kinds)) for piece, inner in node.below.items()))
    node.kind = kinds.setdefault((alike, below), len(kinds))
    return node.kind


def _branches(node: _Node, times: int, *, fold: bool) -> list[Branch]:
    """Return the branches below `node`, which stands for `times` paths."""
    alike: dict[Hashable, list[tuple[int, str, _Node]]] = {}
    for piece, inner in node.below.items():
        match = _NUMBER.fullmatch(piece) if fold else None
        key = (match[1], match[3], inner.kind) if match else piece
        alike.setdefault(key, []).append((int(match[2]) if match else 0, piece, inner))
    return [_branch(group, times, fold=fold) for group in alike.values()]


def _branch(group: list[tuple[int, str, _Node]], times: int, *, fold: bool) -> Branch:
    """Return the branch for `group`, siblings with the same content. Each item is (number, segment, node)."""
    _, piece, node = group[0]
    times *= len(group)
    numbers = sorted(number for number, _, _ in group) if len(group) > 1 else []
    branch = Branch(piece, numbers, times, node.first, node.tensor, _branches(node, times, fold=fold))
    if node.tensor is not None:
        branch.tensors = times
        branch.nbytes = times * node.tensor.nbytes if node.tensor.tied_to is None else 0
    branch.tensors += sum(inner.tensors for inner in branch.below)
    branch.nbytes += sum(inner.nbytes for inner in branch.below)
    return branch


def _runs(numbers: list[int]) -> str:
    """Return ascending `numbers` as text. Consecutive ones become ``0…31``.

    Of many runs, those in the middle are left out.
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}…{b}" for a, b in runs]
    return ",".join(words if len(words) <= _SHOWN_RUNS else [*words[: _SHOWN_RUNS - 1], "…", words[-1]])
