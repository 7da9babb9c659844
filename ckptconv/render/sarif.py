"""Create the SARIF log that ``verify --sarif`` prints, for code scanning.

SARIF 2.1.0: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ckptconv.errors import CkptconvError, MissingInputError, UnreadableError, count
from ckptconv.stores import is_url

if TYPE_CHECKING:
    from ckptconv.inspection.verification import Finding, Level, Verdict

#: For each level of findings, SARIF's level and a description.
_RULES: dict[Level, tuple[str, str]] = {
    "damaged": ("error", "The file is damaged, or is not the file that is expected."),
    "unknown": ("error", "This version of ckptconv cannot judge the file or an object in it."),
    "dangerous": ("error", "The file calls a function that attacks use and that no checkpoint needs."),
    "needs code": ("warning", "torch.load(weights_only=True) refuses an object in the file."),
    "not proved": ("error", "torch.load(weights_only=True) is not proved to load the file."),
    "warning": ("warning", "The file has an unusual property."),
    "note": ("note", "The file has a property that may be of interest."),
}


def sarif_log(
    verdicts: Iterable[Verdict],
    failed: Iterable[tuple[str, CkptconvError, Finding]],
    exit_code: int,
    *,
    notes: bool,
    version: str,
) -> dict[str, Any]:
    """Return the log of one run.

    Args:
        verdicts: The checkpoints that were opened.
        failed: The checkpoints that could not be opened: path, error, and the error as a finding.
        exit_code: The exit status of the command.
        notes: Whether findings of the level ``note`` are included.
        version: The version of this package.
    """
    results: list[dict[str, Any]] = []
    problems: list[dict[str, Any]] = []
    for verdict in verdicts:
        listed = [finding for finding in verdict.findings if notes or finding.level != "note"]
        results += _results(verdict.path, listed, strict=verdict.strict)
        problems += [_problem(verdict.path, str(each)) for each in verdict.findings if each.level == "not checked"]
        if verdict.more:
            problems.append(_problem(verdict.path, f"{count(verdict.more, 'finding')} more are not listed"))
    for path, error, finding in failed:
        if isinstance(error, (MissingInputError, UnreadableError)):  # nothing is known about the file
            problems.append(_problem(path, str(error)))
        else:
            results += _results(path, [finding], strict=False)
    rules = [
        {"id": _id(level), "shortDescription": {"text": text}, "defaultConfiguration": {"level": worst}}
        for level, (worst, text) in _RULES.items()
    ]
    invocation = {
        "executionSuccessful": not problems,
        "exitCode": exit_code,
        "toolExecutionNotifications": problems,
    }
    driver = {"name": "ckptconv", "version": version, "rules": rules}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _results(path: str, findings: Sequence[Finding], *, strict: bool) -> Iterator[dict[str, Any]]:
    """Yield the results for `findings` in the checkpoint at `path`.

    Findings about bytes that were not read are left out.
    """
    for finding in findings:
        if finding.level == "not checked":
            continue
        location = _location(path)
        if finding.path is not None:
            location["logicalLocations"] = [{"fullyQualifiedName": finding.path}]
        identity = "\n".join((finding.level, path, finding.path or "", finding.what))
        fails = strict and finding.level == "needs code"
        yield {
            "ruleId": _id(finding.level),
            "level": "error" if fails else _RULES[finding.level][0],
            "message": {"text": str(finding)},
            "locations": [location],
            # GitHub would compute the same one for all findings in a file, from the text of its first line.
            "partialFingerprints": {"finding/v1": sha256(identity.encode("utf-8", "replace")).hexdigest()},
        }


def _problem(path: str, text: str) -> dict[str, Any]:
    """Return the notification that something prevented a complete check of the checkpoint at `path`."""
    return {"level": "error", "message": {"text": text}, "locations": [_location(path)]}


def _location(path: str) -> dict[str, Any]:
    """Return the location of the file at `path`.

    The line is always 1, because GitHub displays only results with a line.
    """
    local = Path(path)
    if is_url(path):
        uri = quote(path, safe=":/%?=&")
    else:
        uri = local.as_uri() if local.is_absolute() else quote(os.fsencode(local.as_posix()))
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": {"startLine": 1}}}


def _id(level: Level) -> str:
    return level.replace(" ", "-")
