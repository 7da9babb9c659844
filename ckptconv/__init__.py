"""Change what a PyTorch checkpoint says about its tensors, without running it, loading it, or having its devices.

On files: :func:`convert`, :func:`inspect`, :func:`diff`, :func:`verify`, :func:`open` (single tensors), :func:`load`,
:func:`save`; many of them: :func:`jobs_in`, :func:`convert_many`, :func:`write_index`. In memory: :func:`remap`,
:func:`devices`, :func:`strip_prefix`, :func:`add_prefix`. Every error is a :class:`CkptconvError`; its subclasses are
drawn in :mod:`ckptconv.errors`.
"""

from typing import TYPE_CHECKING, Any

from ckptconv.checkpoint.model import LeftBehind, TensorInfo
from ckptconv.conversion.batches import convert_many, jobs_in, write_index
from ckptconv.conversion.convert import convert
from ckptconv.conversion.jobs import Job, Outcome
from ckptconv.conversion.plan import Report
from ckptconv.edits.changes import Changes, NameChange
from ckptconv.edits.devices import MapLocation
from ckptconv.edits.in_memory import add_prefix, strip_prefix
from ckptconv.errors import (
    CkptconvError,
    CollisionError,
    DangerousError,
    DeviceUnavailable,
    InputChangedError,
    InputError,
    LimitError,
    MalformedError,
    NoMatchError,
    OutputError,
    RefusedError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from ckptconv.inspection.comparison.diff import diff
from ckptconv.inspection.comparison.differences import (
    Difference,
    OnlyIn,
    OtherDifference,
    TensorDifference,
    ValueDifference,
)
from ckptconv.inspection.summary import Summary, inspect
from ckptconv.inspection.verification import Finding, Verdict, verify
from ckptconv.tensors.files import CheckpointFile, load, open, save

if TYPE_CHECKING:
    from ckptconv.tensors.moving import devices, remap

__version__ = "0.1.0"
__all__ = [
    "Changes",
    "CheckpointFile",
    "CkptconvError",
    "CollisionError",
    "DangerousError",
    "DeviceUnavailable",
    "Difference",
    "Finding",
    "InputChangedError",
    "InputError",
    "Job",
    "LeftBehind",
    "LimitError",
    "MalformedError",
    "MapLocation",
    "NameChange",
    "NoMatchError",
    "OnlyIn",
    "OtherDifference",
    "Outcome",
    "OutputError",
    "RefusedError",
    "Report",
    "Summary",
    "TargetExistsError",
    "TensorDifference",
    "TensorInfo",
    "UnsupportedError",
    "UsageError",
    "ValueDifference",
    "Verdict",
    "add_prefix",
    "convert",
    "convert_many",
    "devices",
    "diff",
    "inspect",
    "jobs_in",
    "load",
    "open",
    "remap",
    "save",
    "strip_prefix",
    "verify",
    "write_index",
]


def __getattr__(name: str) -> Any:
    """What cannot be without torch, imported when it is first asked for: that takes a second or two."""
    if name in ("devices", "remap"):
        from ckptconv.tensors import moving

        globals()[name] = found = getattr(moving, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]
