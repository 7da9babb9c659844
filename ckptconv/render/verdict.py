"""Format the verdict of ``verify``: a line for each finding, what to do about it, and the verdict as the last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ckptconv.checkpoint.torch_versions import KNOWN, RANGE, by_version, version_of
from ckptconv.errors import count, printable, size
from ckptconv.hints import command_line
from ckptconv.render.text import hint_lines

if TYPE_CHECKING:
    from ckptconv.inspection.verification import Verdict


#: The levels of safety that have other words in the last line.
_SAFETY = {"needs code": "but weights_only=True refuses it", "holds no code": "contains no code"}


def verdict_lines(verdict: Verdict, *, quiet: bool = False, verbose: bool = False) -> Iterator[str]:
    """Yield the lines of `verdict`. `quiet` suppresses them for a checkpoint that is ok, and `verbose` adds notes.

    A hint is below its finding. The hint of several consecutive findings is below the last of them.
    """
    shown = [each for each in verdict.findings if (verbose if each.level == "note" else not (quiet and verdict.ok))]
    for hint, findings in groupby(shown, attrgetter("hint")):
        yield from (str(replace(finding, hint=None)) for finding in findings)
        yield from (f"  {line}" for line in hint_lines(hint))
    if verdict.format and not quiet and any(finding.level == "needs code" for finding in verdict.findings):
        yield f"  to see what loads: {command_line('inspect', Path(verdict.path))}"
    if not verdict.ok:
        levels = Counter(finding.level for finding in verdict.findings if finding.level != "note")
        counts = [
            f"{'cannot be checked' if level == 'unknown' else level} ({count(number, 'finding')})"
            for level, number in levels.items()
        ]
        if verdict.more:
            counts.append(f"{count(verdict.more, 'more finding')} not listed")
        yield f"{verdict.status}: {printable(verdict.path)}: {', '.join(counts)}"
    elif not quiet:
        yield f"ok: {printable(verdict.path)}: {', '.join(_soundness(verdict))}"


def _soundness(verdict: Verdict) -> Iterator[str]:
    """Yield the texts about a checkpoint that is ok: its format, its checksums, and its safety if that is known."""
    yield str(verdict.format)
    yield f"{count(verdict.checked, 'checksum')} right ({size(verdict.nbytes)})" if verdict.checked else "no checksums"
    if verdict.safety:
        text = _SAFETY.get(verdict.safety, verdict.safety)
        if verdict.torch and "weights_only" in verdict.safety:
            known = "" if version_of(verdict.torch) in KNOWN else f" (known: {RANGE})"
            text += f" by the rules of torch {verdict.torch}{known}"
        yield text
    if verdict.versions:
        yield by_version(verdict.versions)
