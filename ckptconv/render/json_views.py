"""Convert results to the plain, versioned dicts that ``--json`` prints. All sizes are in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from itertools import chain
from math import isinf
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CkptconvError, redacted
from ckptconv.hints import command_in

if TYPE_CHECKING:
    from ckptconv.conversion.plan import Report
    from ckptconv.inspection.summary import Summary
    from ckptconv.result import Result

SCHEMA_VERSION = 1
#: The keys of the classes whose keys are not simply their fields.
_KEYS = {
    "Concern": ("name", "path", "dangerous", "more", "inside"),
    "Difference": (
        *("a", "b", "formats", "same", "tensors", "nbytes", "near", "only_in_a", "only_in_b"),
        *("differing", "others", "notes", "dangers", "suggestion"),
    ),
    "ValueDifference": (
        *("elements", "differing", "not_finite", "not_finite_in"),
        *("largest", "largest_relative", "relative_to_max", "histogram"),
    ),
    "Verdict": (
        *("path", "ok", "status", "strict", "format", "safety", "torch", "versions"),
        *("checked", "nbytes", "findings", "more"),
    ),
}
#: Fields that contain a command. The words of the command are under the same key with ``_words``.
_COMMANDS = ("command", "remedy", "suggestion")
#: Fields that the schema does not contain.
_HIDDEN = ("parts", "has_values", "sides")
#: Keys that are left out if the value is None.
_OPTIONAL = {"TensorDifference": "statistics", "ValueDifference": "histogram"}


def as_dict(result: Result) -> dict[str, Any]:
    """Return `result` as the dict for ``--json``."""
    view = _VIEWS.get(type(result).__name__, _plain)
    return {"schema_version": SCHEMA_VERSION, **view(result)}


def _summary(summary: Summary) -> dict[str, Any]:
    """Return `summary` as a dict. Its tensors have statistics only if their values were read."""
    view: dict[str, Any] = _plain(summary)
    if not summary.has_values:
        for tensor in view["tensors"]:
            del tensor["values"]
    return view


def _report(report: Report) -> dict[str, Any]:
    """Return `report` as a dict, with the changes of its edits."""
    changes = report.changes
    view: dict[str, Any] = _plain(
        {
            "src": report.src,
            "dst": report.dst,
            "formats": report.formats,
            "size": report.size,
            "files": _rows(("name", "size"), report.files),
            "failed": _rows(("path", "error"), report.failed),
            "written": report.written,
            "changed": report.changed,
            "seconds": round(report.seconds, 6),
            "devices": _rows(("old", "new", "tensors", "nbytes"), ((*a, *b) for a, b in changes.devices.items())),
            "names": changes.names,
            "optimizers": [{"path": path, **_plain(change)} for path, change in changes.optimizers.items()],
            "reordered": changes.reordered,
            "ties": report.ties,
            "regrouped": changes.regrouped,
            "unprefixed": changes.unprefixed,
            "dtypes": [{"old": old, "new": new, **cast._asdict()} for (old, new), cast in changes.dtypes.items()],
            "not_cast": changes.not_cast,
            "separated": changes.separated,
            "overflowed": _rows(("paths", "numbers"), report.overflowed.items()),
            "compacted": changes.compacted._asdict(),
            "rng_states": changes.rng_states,
            "made_plain": [plain._asdict() for plain in changes.made_plain],
            "left_behind": report.left_behind,
            "notes": report.notes,
            "in_place": report.in_place,
            "verified": report.verified,
            "direct": report.direct,
        }
    )
    return view


#: How results are viewed that need more than a walk through their keys.
_VIEWS: dict[str, Any] = {"Report": _report, "Summary": _summary}


def _rows(keys: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return a dict with these `keys` for each of `rows`."""
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _plain(value: Any) -> Any:
    """Return `value` with objects converted to dicts, tuples to lists, and errors and infinities to texts."""
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, float):
        return str(value) if isinf(value) else value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, CkptconvError):
        return str(value)
    kind: Any = type(value)
    view = {name: _plain(getattr(value, name)) for name in _keys_of(kind)}
    for name in view.keys() & {*_COMMANDS}:
        command = command_in(getattr(value, name))
        view[f"{name}_words"] = [*chain(*command.words())] if command else None
    if (optional := _OPTIONAL.get(kind.__name__)) and view[optional] is None:
        del view[optional]
    return view


@cache
def _keys_of(kind: Any) -> tuple[str, ...]:
    """Return the keys for objects of the class `kind`, in order: those in ``_KEYS``, or else its fields.

    Fields in ``_HIDDEN`` are left out.
    """
    return _KEYS.get(kind.__name__) or tuple(field.name for field in fields(kind) if field.name not in _HIDDEN)


def error_as_dict(error: CkptconvError) -> dict[str, str | None]:
    """Return the attributes of `error` as a dict for ``--json``. ``text`` is the complete message."""
    facts = {
        name: None if (fact := getattr(error, name)) is None else str(fact)
        for name in ("what", "where", "expected", "got", "hint")
    }
    return {"type": type(error).__name__, **facts, "text": str(error)}


def unread_as_dict(path: str, error: CkptconvError) -> dict[str, Any]:
    """Return the dict that ``inspect --json`` prints for a `path` that cannot be read. Secrets of a URL are removed."""
    return {"schema_version": SCHEMA_VERSION, "path": redacted(path), "error": error_as_dict(error)}


def skipped_as_dict(src: str, dst: str) -> dict[str, Any]:
    """Return the dict that ``convert --json`` prints for `src` if it was skipped because `dst` exists."""
    return {"schema_version": SCHEMA_VERSION, "src": src, "dst": dst, "skipped": True}
