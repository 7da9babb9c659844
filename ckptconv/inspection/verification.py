"""Verify a checkpoint: collect every fault, compare every checksum, and judge whether loading it runs code.

Nothing in the file is run, and torch is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ckptconv.byteranges.fault_sink import CollectingSink, UnreadRecord
from ckptconv.byteranges.reading import read
from ckptconv.byteranges.record_checks import check_records, length_of
from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import ByteRange, Meter
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.conversion.discovery import find
from ckptconv.errors import (
    CkptconvError,
    DangerousError,
    InputError,
    LimitError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    count,
    size,
    some,
)
from ckptconv.formats import opening
from ckptconv.formats.distributed.rank_names import as_sets
from ckptconv.formats.foreign.zips_and_pickles import looks_like_pickle
from ckptconv.formats.opening import open_input
from ckptconv.formats.torch_zip import NO_CHECKSUMS
from ckptconv.hints import for_python, option
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import gc_paused
from ckptconv.result import Result
from ckptconv.safety.scan import Concern, concerns, concerns_in, level_of
from ckptconv.safety.scan import Level as Safety
from ckptconv.safety.torch_load import Loading, torch_loading
from ckptconv.stores import is_folder, locate
from ckptconv.stores.memory import Input

_SHA256_DIGITS = 64
_HEAD = 64  # bytes

#: ``not checked``: bytes could not be read. ``unknown``: sound or not, this version cannot say. None of ``needs code``,
#: ``not proved``, ``warning`` and ``note`` is damage; ``not proved`` is found by a strict verification only.
Level: TypeAlias = Literal[
    "damaged", "not checked", "unknown", "dangerous", "needs code", "not proved", "warning", "note"
]

#: ``not checked``: nothing is wrong with what could be read, and not all could.
Status: TypeAlias = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One thing that was found; ``str`` gives it as a printable line.

    Attributes:
        level: How bad it is.
        what: What it is, in words.
        where: The file or record.
        expected: What should stand there.
        got: What stands there.
        hint: What to do.
        path: Of what needs code, where in the checkpoint it stands.
    """

    level: Level
    what: str
    where: str | None = None
    expected: str | None = None
    got: str | None = None
    hint: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        where = self.where if self.path is None else f"{self.where}: at {self.path}"
        line = CkptconvError(self.what, where=where, expected=self.expected, got=self.got, hint=self.hint)
        return f"{self.level}: {line}"


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """What :func:`verify` found.

    Attributes:
        path: What was looked at.
        format: The name of its format; None where no checkpoint could be made of it.
        safety: What loading it takes; None as above.
        checked: How many records had a checksum.
        nbytes: The bytes of those records.
        findings: What was found.
        more: How many findings there are beyond the limit.
        strict: Whether only what is proved to load with ``weights_only=True``, or has no pickle, is ``ok``.
        torch: The version of torch whose rules `safety` follows.
    """

    path: str
    format: str | None
    safety: Safety | None
    checked: int
    nbytes: int
    findings: tuple[Finding, ...]
    more: int = 0
    strict: bool = False
    torch: str | None = None
    _drawn_by = "verdict"

    @property
    def ok(self) -> bool:
        """Whether `status` is ``ok``."""
        return self.status == "ok"

    @property
    def status(self) -> Status:
        """``failed`` if anything is wrong with it, ``not checked`` if bytes of it could not be read, or ``ok``."""
        bad = {"damaged", "unknown", "dangerous"} | ({"needs code", "not proved"} if self.strict else set())
        levels = {finding.level for finding in self.findings}
        return "failed" if levels & bad else "not checked" if "not checked" in levels else "ok"

    def _title(self) -> str:
        return [*self._lines()][-1]


@for_python
def verify(
    path: Input,
    *,
    strict: bool = False,
    expect_sha256: str | None = None,
    download: bool = False,
    progress: Meter | None = None,
) -> Verdict:
    """Everything that is wrong with the checkpoint at `path`. Reads all bytes that have a checksum.

    Args:
        path: A file, a folder with a set of shards or of torch.distributed.checkpoint, or the index of one; or a
            binary file object, as for :func:`ckptconv.open`.
        strict: Only what is proved to load with ``weights_only=True`` by the rules of torch 2.13, or has no pickle
            (safetensors), is ok.
        expect_sha256: The hexadecimal digits of the whole file's, which is read for it.
        download: Of a URL, as for :func:`ckptconv.convert`.
        progress: Called with the bytes that have a checksum, it gives a context manager for what is called with those
            that are done.

    Returns:
        The findings; its ``.ok`` says whether there is none that matters.

    Raises:
        InputError: Nothing can be opened at `path`.
        UsageError: `expect_sha256` is no SHA-256, or `path` is no single file, which alone has one.
    """
    return verdict_on(path, strict=strict, expect_sha256=expect_sha256, download=download, progress=progress)


def verdict_on(
    path: Input,
    *,
    strict: bool = False,
    expect_sha256: str | None = None,
    download: bool = False,
    progress: Meter | None = None,
) -> Verdict:
    """Return what :func:`verify` returns, in the words of the command line."""
    expected = _digits(expect_sha256)
    faults = CollectingSink()
    with _opened(path, faults, download=download, progress=progress) as source, gc_paused():
        if expected and isinstance(source, SourceFolder):
            raise UsageError("a SHA-256 is that of one file", where=source.path)
        checkpoint, found, loading = None, [], None
        with faults:
            checkpoint = opening.read(source)
            found = concerns(checkpoint, storages=True)
            loading = torch_loading(checkpoint, is_sound=not faults.errors)
        _keep_unread(faults)
        records = faults.records
        with progress(length_of(records)) if progress else nullcontext() as tick:
            check_records(records, faults, tick)
        if expected:
            _check_sha256(source, expected, faults)
        with faults:
            source.check_unchanged()
        findings = _findings(checkpoint, found, faults, source.path)
        if strict and checkpoint and loading:
            findings += _unproved(checkpoint, loading, findings)
        safety = _safety(checkpoint, found, findings, loading)
    return Verdict(
        str(source.path),
        checkpoint.format if checkpoint else None,
        safety,
        len(records),
        length_of(records),
        tuple(findings),
        faults.more,
        strict,
        loading.torch if loading else None,
    )


def _opened(path: Input, faults: CollectingSink, **how: Any) -> Readable:
    """Open `path`. Raises InputError: why bytes did not come, rather than what their absence looks like."""
    try:
        return open_input(path, faults, **how)
    except InputError:
        if faults.not_read:
            raise faults.not_read[0][1] from None
        raise


def checkpoints_in(path: str | os.PathLike[str], *, pickles: bool = False) -> list[str]:
    """The checkpoints that `path` means: itself, or those in the folder `path` and below it, each to be looked at by
    itself; the files of all ranks of a run are one, called by their pattern. `pickles`: what else is a pickle there
    too, whatever it is called, for somebody loads it.

    Raises InputError where a folder cannot be listed.
    """
    folder = locate(path)
    if not os.fspath(path) or not is_folder(folder):  # pathlib takes nothing for the folder that we are in
        return [os.fsdecode(path)]
    found = [
        str(each.path)
        for each in find(folder)
        if each.kind in ("file", "shards", "dcp") or (pickles and each.kind == "other" and _is_pickle(each.path))
    ]
    return as_sets(dict.fromkeys(found)) or [str(folder)]


def _is_pickle(path: Path) -> bool:
    try:
        with open_input(path) as source:
            head = source.read(0, min(_HEAD, source.size))
            return bool(head) and looks_like_pickle(source, head)
    except InputError:  # which nobody reads
        return False


def _digits(sha256: str | None) -> str | None:
    if sha256 is None:
        return None
    digits = sha256.strip().lower()
    if len(digits) != _SHA256_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise UsageError("no SHA-256", expected=f"{_SHA256_DIGITS} hexadecimal digits", got=sha256)
    return digits


# What was found


def _findings(checkpoint: Checkpoint | None, found: list[Concern], faults: CollectingSink, path: Path) -> list[Finding]:
    """All that is to be said of `checkpoint`, in which there were `faults` and concerns `found`."""
    if faults.errors:  # then not all of it may have become a checkpoint
        known = {concern.name for concern in found}
        found = found + [concern for concern in concerns_in(faults.named) if concern.name not in known]
    findings = [_of_error(error) for error in faults.errors if not (found and isinstance(error, DangerousError))]
    findings += (_of_concern(concern, path) for concern in found)
    return [*findings, *_notes(checkpoint, faults.records)] if checkpoint else findings


def _unproved(checkpoint: Checkpoint, loading: Loading, findings: list[Finding]) -> Iterator[Finding]:
    """The finding that `checkpoint` is not proved to load, which fails a strict verification, unless `findings` do."""
    has_pickle = not checkpoint.is_state_dict
    if has_pickle and not loading.loads and all(finding.level in ("note", "warning") for finding in findings):
        word = "refuses it" if loading.answer == "refused" else "may refuse it"
        why = some([reason.text for reason in loading.reasons])
        what = f"torch.load(weights_only=True) {word} by the rules of torch {loading.torch}"
        yield Finding("not proved", what, str(checkpoint.source.path), got=why)


def _safety(
    checkpoint: Checkpoint | None, found: list[Concern], findings: list[Finding], loading: Loading | None
) -> Safety | None:
    """What loading takes; None where that is not known."""
    levels = {finding.level for finding in findings}
    if "dangerous" in levels:
        return "dangerous"
    if checkpoint:
        return level_of(checkpoint, found, loading)
    return "needs code" if "needs code" in levels else None


def _keep_unread(faults: CollectingSink) -> None:
    """Put the reasons why bytes did not come in place of what their absence looked like to a reader."""
    if faults.not_read:
        first, _ = faults.not_read[0]
        later = faults.errors[first:]
        faults.errors[first:] = [error for error in later if isinstance(error, (DangerousError, UnreadableError))]
    for _, error in faults.not_read:
        faults.found(error)


def status_of(error: CkptconvError) -> Status:
    """Return ``not checked`` where `error` says that bytes could not be read, else ``failed``."""
    return "not checked" if isinstance(error, UnreadableError) else "failed"


def _of_error(error: CkptconvError) -> Finding:
    level: Level = "unknown" if isinstance(error, (UnsupportedError, LimitError)) else "damaged"
    level = "dangerous" if isinstance(error, DangerousError) else level
    level = "not checked" if status_of(error) == "not checked" else level
    where, expected, got = (None if part is None else str(part) for part in (error.where, error.expected, error.got))
    return Finding(level, error.what, where, expected, got, error.hint)


def _of_concern(concern: Concern, path: Path) -> Finding:
    more = f", and {count(concern.more, 'time')} more" if concern.more else ""
    hints = {
        "dangerous": "no checkpoint needs it, and attacks use it: do not load it",
        "unknown": "it cannot be judged, so it may be an attack",
    }
    return Finding(concern.kind, f"{concern.name}{more}", str(path), hint=hints.get(concern.kind), path=concern.path)


def _notes(checkpoint: Checkpoint, records: list[UnreadRecord]) -> Iterator[Finding]:
    """What is neither damage nor danger."""
    path = checkpoint.source.path
    if not records and NO_CHECKSUMS not in checkpoint.notes:
        yield Finding(
            "note",
            "it has no checksums, so damage to the tensors' bytes cannot be seen",
            str(path),
            hint=option("expect_sha256", None) + " compares the whole file",
        )
    for note in checkpoint.notes:
        yield Finding("warning" if note in checkpoint.warnings else "note", note, str(path))
    for each in checkpoint.unused:
        yield Finding("note", f"{each.path}, {size(each.nbytes)}: {each.why}", str(path))


def _check_sha256(source: Readable, expected: str, faults: CollectingSink) -> None:
    import hashlib  # not at the start of commands that need none

    digest = hashlib.sha256()
    try:
        for chunk in read(ByteRange(source, 0, source.size)):
            digest.update(chunk)
    except InputError as error:
        faults.found(error)
        return
    if digest.hexdigest() != expected:
        faults.found(
            InputError(
                "the file is another one: its SHA-256 differs",
                where=source.path,
                expected=expected,
                got=digest.hexdigest(),
            )
        )
