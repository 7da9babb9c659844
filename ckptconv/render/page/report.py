"""What a notebook shows of a conversion, as data: what was done, and the tensors of what was written."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from ckptconv.errors import count, size
from ckptconv.hints import in_python
from ckptconv.render.page.columns import LONGEST, MOST, columns, largest, listed, shape_words, words
from ckptconv.render.report import report_facts, report_title

if TYPE_CHECKING:
    from ckptconv.checkpoint.model import Checkpoint
    from ckptconv.checkpoint.tensor_info import TensorInfo
    from ckptconv.conversion.plan import Report


def report_data(report: Report, checkpoint: Checkpoint, most: int | None = None) -> dict[str, Any]:
    """The page of `report`, which tells of how `checkpoint` was written; `most`: as many tensors, the largest."""
    tensors, left_out = largest([*checkpoint.tensors.values()], lambda info: info.nbytes, _home, most)
    numbers = {info.path: i for i, info in enumerate(tensors)}
    tied = [numbers.get(info.tied_to or "", -1) for info in tensors]
    ties: dict[int, list[int]] = {}
    for i, home in enumerate(tied):
        if home >= 0:
            ties.setdefault(home, [home]).append(i)
    untied = [info.nbytes for info in checkpoint.tensors.values() if info.tied_to is None]
    devices = [None if checkpoint.is_state_dict else info.device for info in tensors]
    was = {change.new: change.old for change in report.changes.names}
    said = map(in_python, report_facts(report))
    found = [listed("tied", [*ties.values()])]
    return {
        "title": report.dst,
        "named": False,
        "verdict": {"good": None, "text": report_title(report), "findings": [], "remedy": None},
        "facts": [
            ("from", report.src),
            ("tensors", f"{count(len(checkpoint.tensors), 'tensor')}, {size(sum(untied))}"),
            *(
                (label, (what if isinstance(what, str) else ", ".join(what))[:LONGEST])
                for label, what in islice(said, MOST)
            ),
            *left_out,
        ],
        "lists": [each for each in found if each],
        "maps": ["Map"],
        "commands": [],
        "tensors": columns(
            [info.path for info in tensors],
            [[(info.shape, info.nbytes, _home(info)) for info in tensors]],
            tied,
            [
                words("dtype", (info.dtype for info in tensors), colour=True),
                words("shape", (shape_words(info.shape) for info in tensors)),
                words("device", devices, colour=True),
                words("was called", (was.get(info.name or "") for info in tensors)),
            ],
        ),
    }


def _home(info: TensorInfo) -> str:
    return info.tied_to or info.path
