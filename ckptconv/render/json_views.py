"""What ``--json`` prints: results as plain, versioned dicts. All sizes in bytes."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import cache
from math import isinf
from typing import TYPE_CHECKING, Any

from ckptconv.errors import redacted

if TYPE_CHECKING:
    from ckptconv.conversion.plan import Report
    from ckptconv.errors import CkptconvError
    from ckptconv.inspection.comparison.differences import Difference, OnlyIn, TensorDifference
    from ckptconv.inspection.summary import Summary
    from ckptconv.inspection.verification import Verdict

SCHEMA_VERSION = 1


def summary_as_dict(summary: Summary) -> dict[str, Any]:
    """`summary` for ``--json``."""
    shown = _plain(summary)
    del shown["parts"], shown["has_values"]  # its schema has none
    if not summary.has_values:
        for tensor in shown["tensors"]:
            del tensor["values"]
    return {"schema_version": SCHEMA_VERSION, **shown}


def _plain(value: Any) -> Any:
    """`value` with its objects as dicts and its tuples as lists."""
    if isinstance(value, (str, int)) or value is None:
        return value
    if isinstance(value, float):
        return _in_json(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    kind: Any = type(value)
    return {name: _plain(getattr(value, name)) for name in _names_of(kind)}


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def report_as_dict(report: Report) -> dict[str, Any]:
    """`report` for ``--json``."""
    changes = report.changes
    return {
        "schema_version": SCHEMA_VERSION,
        "src": report.src,
        "dst": report.dst,
        "formats": list(report.formats),
        "size": report.size,
        "files": [{"name": name, "size": size} for name, size in report.files],
        "failed": [{"path": path, "error": str(error)} for path, error in report.failed],
        "written": report.written,
        "changed": report.changed,
        "seconds": round(report.seconds, 6),
        "devices": [
            {"old": old, "new": new, "tensors": tensors, "nbytes": nbytes}
            for (old, new), (tensors, nbytes) in changes.devices.items()
        ],
        "names": [{"path": change.path, "old": change.old, "new": change.new} for change in changes.names],
        "optimizers": [{"path": path, "names": names} for path, names in changes.optimizers.items()],
        "ties": [list(tie) for tie in report.ties],
        "unprefixed": changes.unprefixed,
        "dtypes": [{"old": old, "new": new, **done._asdict()} for (old, new), done in changes.dtypes.items()],
        "not_cast": changes.not_cast,
        "separated": changes.separated,
        "overflowed": [{"paths": list(paths), "numbers": numbers} for paths, numbers in report.overflowed.items()],
        "compacted": changes.compacted._asdict(),
        "rng_states": changes.rng_states,
        "made_plain": [each._asdict() for each in changes.made_plain],
        "left_behind": [{"path": left.path, "nbytes": left.nbytes, "why": left.why} for left in report.left_behind],
        "notes": list(report.notes),
        "in_place": report.in_place and asdict(report.in_place),
        "verified": report.verified and asdict(report.verified),
        "direct": report.direct,
    }


def error_as_dict(error: CkptconvError) -> dict[str, str | None]:
    """Return the facts of `error` for ``--json``, the whole message as ``text``."""
    facts = {
        name: None if (fact := getattr(error, name)) is None else str(fact)
        for name in ("what", "where", "expected", "got", "hint")
    }
    return {"type": type(error).__name__, **facts, "text": str(error)}


def unread_as_dict(path: str, error: CkptconvError) -> dict[str, Any]:
    """Return what ``inspect --json`` prints of a `path` that cannot be read, without the secrets of a URL."""
    return {"schema_version": SCHEMA_VERSION, "path": redacted(path), "error": error_as_dict(error)}


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """`verdict` for ``--json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "path": verdict.path,
        "ok": verdict.ok,
        "status": verdict.status,
        "strict": verdict.strict,
        "format": verdict.format,
        "safety": verdict.safety,
        "torch": verdict.torch,
        "checked": verdict.checked,
        "nbytes": verdict.nbytes,
        "findings": [asdict(finding) for finding in verdict.findings],
        "more": verdict.more,
    }


def difference_as_dict(difference: Difference) -> dict[str, Any]:
    """`difference` for ``--json``; an infinity, which JSON has no number for, is the text ``inf``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "a": difference.a,
        "b": difference.b,
        "formats": list(difference.formats),
        "same": difference.same,
        "tensors": difference.tensors,
        "nbytes": difference.nbytes,
        "near": difference.near,
        "only_in_a": [_only_in(found) for found in difference.only_in_a],
        "only_in_b": [_only_in(found) for found in difference.only_in_b],
        "differing": [_differing(found) for found in difference.differing],
        "others": [{"path": other.path, "a": other.a, "b": other.b} for other in difference.others],
        "notes": list(difference.notes),
        "suggestion": difference.suggestion,
    }


def _only_in(found: OnlyIn) -> dict[str, Any]:
    return {
        "path": found.path,
        "dtype": found.dtype,
        "shape": list(found.shape),
        "nbytes": found.nbytes,
        "tied_to": found.tied_to,
    }


def _differing(found: TensorDifference) -> dict[str, Any]:
    values = found.values
    return {
        "path": found.path,
        **{
            name: None if (pair := getattr(found, name)) is None else list(pair)
            for name in ("dtype", "shape", "device", "requires_grad", "class_name", "made_of")
        },
        "values": values
        and {
            "elements": values.elements,
            "differing": values.differing,
            "not_finite": values.not_finite,
            "largest": _in_json(values.largest),
            "largest_relative": _in_json(values.largest_relative),
            "relative_to_max": _in_json(values.relative_to_max),
            **({} if values.histogram is None else {"histogram": _plain(values.histogram)}),
        },
        "rng_state": found.rng_state,
        **({} if found.statistics is None else {"statistics": _plain(found.statistics)}),
    }


def _in_json(number: float | None) -> float | str | None:
    return str(number) if isinstance(number, float) and isinf(number) else number


def skipped_as_dict(src: str, dst: str) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "src": src, "dst": dst, "skipped": True}
