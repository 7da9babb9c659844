"""Change what a PyTorch checkpoint says about its tensors, without running it, loading it, or having its devices.

On files: :func:`convert`, :func:`plan` (what that would write, as parts), :func:`undo` (of a change in place),
:func:`inspect`, :func:`diff`, :func:`verify`, :func:`open` (single tensors), :func:`load`, :func:`save`; many of them:
:func:`jobs_in`, :func:`convert_many`, :func:`write_index`. In memory: :func:`remap`, :func:`devices`,
:func:`strip_prefix`, :func:`add_prefix`, :func:`regroup`. Every error is a :class:`CkptconvError`; its subclasses are
drawn in :mod:`ckptconv.errors`.
"""

from ckptconv.errors import (
    ArgumentTypeError,
    CkptconvError,
    CollisionError,
    DangerousError,
    DeviceUnavailable,
    InputChangedError,
    InputError,
    LimitError,
    MalformedError,
    MissingInputError,
    MissingTorchError,
    NoMatchError,
    OutputError,
    RefusedError,
    TargetExistsError,
    TransferError,
    UnknownDeviceError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    require_torch,
)

TYPE_CHECKING = False  # as type checkers take it; the module typing is not needed for more
if TYPE_CHECKING:
    from ckptconv.checkpoint.tensor_info import LeftBehind, TensorInfo
    from ckptconv.conversion.batches import convert_many, jobs_in, write_index
    from ckptconv.conversion.convert import convert
    from ckptconv.conversion.in_place import undo
    from ckptconv.conversion.jobs import Job, Outcome
    from ckptconv.conversion.parts import FilePart, PlannedFile, plan
    from ckptconv.conversion.plan import InPlace, Report, Verified
    from ckptconv.edits.changes import Changes, NameChange
    from ckptconv.edits.devices import MapLocation
    from ckptconv.edits.in_memory import add_prefix, strip_prefix
    from ckptconv.inspection.comparison.diff import diff
    from ckptconv.inspection.comparison.differences import (
        Difference,
        OnlyIn,
        OtherDifference,
        TensorDifference,
        TensorFacts,
        ValueDifference,
    )
    from ckptconv.inspection.summary import Summary, inspect
    from ckptconv.inspection.verification import Finding, Verdict, verify
    from ckptconv.tensors.files import CheckpointFile, load, open, save
    from ckptconv.tensors.moving import devices, remap
    from ckptconv.tensors.regrouping import regroup

__version__ = "0.1.0"
__all__ = [
    "ArgumentTypeError",
    "Changes",
    "CheckpointFile",
    "CkptconvError",
    "CollisionError",
    "DangerousError",
    "DeviceUnavailable",
    "Difference",
    "FilePart",
    "Finding",
    "InPlace",
    "InputChangedError",
    "InputError",
    "Job",
    "LeftBehind",
    "LimitError",
    "MalformedError",
    "MapLocation",
    "MissingInputError",
    "MissingTorchError",
    "NameChange",
    "NoMatchError",
    "OnlyIn",
    "OtherDifference",
    "Outcome",
    "OutputError",
    "PlannedFile",
    "RefusedError",
    "Report",
    "Summary",
    "TargetExistsError",
    "TensorDifference",
    "TensorFacts",
    "TensorInfo",
    "TransferError",
    "UnknownDeviceError",
    "UnreadableError",
    "UnsupportedError",
    "UsageError",
    "ValueDifference",
    "Verdict",
    "Verified",
    "add_prefix",
    "convert",
    "convert_many",
    "devices",
    "diff",
    "inspect",
    "jobs_in",
    "load",
    "open",
    "plan",
    "regroup",
    "remap",
    "save",
    "strip_prefix",
    "undo",
    "verify",
    "write_index",
]

#: The other public names, by the module that has them. Each is imported when it is first used (PEP 562): ``import
#: ckptconv`` then costs next to nothing, and torch is imported only for names that need it.
_HOMES = {
    "checkpoint.model": "LeftBehind TensorInfo",
    "conversion.batches": "convert_many jobs_in write_index",
    "conversion.convert": "convert",
    "conversion.jobs": "Job Outcome",
    "conversion.parts": "FilePart PlannedFile plan",
    "conversion.plan": "InPlace Report Verified",
    "conversion.in_place": "undo",
    "edits.changes": "Changes NameChange",
    "edits.devices": "MapLocation",
    "edits.in_memory": "add_prefix strip_prefix",
    "inspection.comparison.diff": "diff",
    "inspection.comparison.differences": "Difference OnlyIn OtherDifference TensorDifference TensorFacts"
    " ValueDifference",
    "inspection.summary": "Summary inspect",
    "inspection.verification": "Finding Verdict verify",
    "tensors.files": "CheckpointFile load open save",
    "tensors.moving": "devices remap",
    "tensors.regrouping": "regroup",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def _function_without_torch(name: str, error: MissingTorchError) -> object:
    """Return a function `name` that raises `error`, so that ``help(ckptconv)`` and ``import *`` work without torch."""

    def missing(*_: object, **__: object) -> object:
        raise error

    missing.__name__, missing.__doc__ = name, str(error)
    return missing


if not TYPE_CHECKING:  # so that a type checker reports a name that does not exist

    def __getattr__(name: str) -> object:
        """Import a public name from the module that has it, and return it."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if _HOME_OF[name] in ("tensors.moving", "tensors.regrouping"):
            try:
                require_torch(f"ckptconv.{name}")
                import_module(f"{__name__}.byteranges.kernels")  # raises MissingTorchError if torch is broken
            except MissingTorchError as error:
                return _function_without_torch(name, error)
        globals()[name] = found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors"]
