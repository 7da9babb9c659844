"""Verify a checkpoint: collect all faults, compare all checksums, and judge whether loading it can run code.

Nothing in the file is executed, and torch is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ckptconv.byteranges.fault_sink import CollectingSink, UnreadRecord
from ckptconv.byteranges.reading import read
from ckptconv.byteranges.record_checks import check_records, length_of
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Meter
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.torch_versions import ALL, KNOWN, asked_version, by_version
from ckptconv.checkpoint.weights_only.objects import Answer
from ckptconv.errors import (
    CkptconvError,
    DangerousError,
    InputError,
    LimitError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    at_path,
    size,
    some,
)
from ckptconv.formats import opening
from ckptconv.formats.distributed.rank_names import as_sets
from ckptconv.formats.distributed.zero_names import as_folders
from ckptconv.formats.foreign.zips_and_pickles import looks_like_pickle
from ckptconv.formats.opening import open_input
from ckptconv.formats.torch_zip import NO_CHECKSUMS
from ckptconv.hints import for_python, option
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import gc_paused
from ckptconv.result import Result
from ckptconv.safety.scan import Concern, concerns, concerns_in, level_of
from ckptconv.safety.scan import Level as Safety
from ckptconv.safety.torch_load import Loading, answers_of, torch_loading
from ckptconv.stores import is_folder, locate
from ckptconv.stores.memory import Input

_SHA256_DIGITS = 64
_HEAD = 64  # bytes

#: ``not checked``: bytes could not be read. ``unknown``: this version cannot judge the object. ``needs code``, ``not
#: proved``, ``warning`` and ``note`` are not damage. Only a strict verification finds ``not proved``.
Level: TypeAlias = Literal[
    "damaged", "not checked", "unknown", "dangerous", "needs code", "not proved", "warning", "note"
]

#: ``not checked``: everything that could be read is right, but some bytes could not be read.
Status: TypeAlias = Literal["ok", "failed", "not checked"]


@dataclass(frozen=True)
class Finding:
    """A finding. ``str(finding)`` is one printable line.

    Attributes:
        level: How severe it is.
        what: The problem in words.
        where: The file or record.
        expected: The expected value.
        got: The value that was found.
        hint: What the user can do.
        path: The path in the graph, if the finding is about an object of a pickle. None for other findings.
    """

    level: Level
    what: str
    where: str | None = None
    expected: str | None = None
    got: str | None = None
    hint: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        what = self.what
        if self.path is not None:
            verb = "weights_only=True refuses" if self.level == "needs code" else "it contains"
            what = f"{verb} {what}{at_path(self.path)}"
        line = CkptconvError(what, where=self.where, expected=self.expected, got=self.got, hint=self.hint)
        return f"{self.level}: {line}"


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """The result of :func:`verify`.

    Attributes:
        path: The file or folder.
        format: The name of its format, or None if it could not be read as a checkpoint.
        safety: How safe loading is, or None if that is not known.
        checked: The number of records that have a checksum.
        nbytes: The bytes of those records.
        findings: The findings.
        more: The number of findings beyond the limit.
        strict: Whether `status` is ``ok`` only if the checkpoint is proved to load with ``weights_only=True`` or has no
            pickle.
        torch: The version of torch whose rules `safety` is based on. None if the file could not be read.
        versions: The answer of each known version of torch. None if it was not computed.
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
    versions: dict[str, Answer] | None = None
    _drawn_by = "verdict"

    @property
    def ok(self) -> bool:
        """Whether `status` is ``ok``."""
        return self.status == "ok"

    @property
    def status(self) -> Status:
        """``failed`` if a finding is severe, else ``not checked`` if bytes could not be read, else ``ok``.

        Severe are ``damaged``, ``unknown`` and ``dangerous``. With `strict`, ``needs code`` and ``not proved`` are too.
        """
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
    torch: str | None = None,
    progress: Meter | None = None,
) -> Verdict:
    """Find all faults of the checkpoint at `path`. All bytes that have a checksum are read.

    Args:
        path: A file, a folder with a set of shards or of torch.distributed.checkpoint, or the index of one; or a binary
            file object, as for :func:`ckptconv.open`.
        strict: Accept a checkpoint only if it is proved to load with ``weights_only=True``, or contains no pickle
            (safetensors).
        expect_sha256: The SHA-256 of the file in hexadecimal digits. The complete file is then read.
        download: For a URL, as for :func:`ckptconv.convert`.
        torch: The version of torch that loads the file, as for :func:`ckptconv.inspect`. With ``"all"``, `strict`
            demands that all known versions load it.
        progress: Called with the number of bytes that have a checksum. It returns a context manager for a function that
            is called with the number of bytes checked since its last call.

    Returns:
        The findings. ``.ok`` is True if none of them is severe.

    Raises:
        InputError: Nothing can be opened at `path`.
        UsageError: `expect_sha256` is not a SHA-256, or `path` is not a single file.
    """
    return verdict_on(
        path, strict=strict, expect_sha256=expect_sha256, download=download, torch=torch, progress=progress
    )


def verdict_on(
    path: Input,
    *,
    strict: bool = False,
    expect_sha256: str | None = None,
    download: bool = False,
    torch: str | None = None,
    progress: Meter | None = None,
) -> Verdict:
    """Return the verdict of :func:`verify`, with messages in the words of the command line."""
    expected, version = _digits(expect_sha256), asked_version(torch)
    faults = CollectingSink()
    with _opened(path, faults, download=download, progress=progress) as source, gc_paused():
        if expected and source.is_folder:
            raise UsageError("a SHA-256 is compared with one file", where=source.path)
        checkpoint, concerned, loading, versions = None, [], None, None
        with faults:
            checkpoint = opening.read(source)
            concerned = concerns(checkpoint, storages=True)
            loading = torch_loading(checkpoint, is_sound=not faults.errors, torch=version)
            if not faults.errors and (torch == ALL or (not loading.loads and (loading.varies or version not in KNOWN))):
                versions = answers_of(checkpoint, loading) if not checkpoint.is_state_dict else None
        _keep_unread(faults)
        records = faults.records
        with progress(length_of(records)) if progress else nullcontext() as tick:
            check_records(records, faults, tick)
        if expected:
            _check_sha256(source, expected, faults)
        with faults:
            source.check_unchanged()
        findings = _findings(checkpoint, concerned, faults, source.path)
        if strict and checkpoint and loading:
            findings += _unproved(checkpoint, loading, findings, versions if torch == ALL else None)
        safety = _safety(checkpoint, concerned, findings, loading)
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
        versions,
    )


def _opened(path: Input, faults: CollectingSink, **how: Any) -> Readable:
    """Open `path`. If bytes could not be read, raise the original reason instead of a fault that follows from it."""
    try:
        return open_input(path, faults, **how)
    except InputError:
        if faults.not_read:
            raise faults.not_read[0][1] from None
        raise


def checkpoints_in(path: str | os.PathLike[str], *, pickles: bool = False) -> list[str]:
    """Return the checkpoints at `path`: the file itself, or all checkpoints in and below the folder `path`.

    The files of all ranks of a run are one checkpoint. It is named by a pattern or, if DeepSpeed wrote it, by its
    folder. With `pickles`, all other pickles are included too, whatever their names, because somebody may load them. If
    a folder contains no checkpoint, return the folder.

    Raises InputError if a folder cannot be listed.
    """
    folder = locate(path)
    if not os.fspath(path) or not is_folder(folder):  # pathlib would read an empty path as the current folder
        return [os.fsdecode(path)]
    from ckptconv.conversion.discovery import find  # only needed for folders

    paths = [
        str(each.path)
        for each in find(folder)
        if each.kind in ("file", "shards", "dcp") or (pickles and each.kind == "other" and _is_pickle(each.path))
    ]
    return as_folders(as_sets(dict.fromkeys(paths))) or [str(folder)]


def _is_pickle(path: Path) -> bool:
    """Return whether the file at `path` starts like a pickle. False if it cannot be read."""
    try:
        with open_input(path) as source:
            head = source.read(0, min(_HEAD, source.size))
            return bool(head) and looks_like_pickle(source, head)
    except InputError:  # a file that cannot be read cannot be loaded either
        return False


def _digits(sha256: str | None) -> str | None:
    """Return `sha256` in lower case, or None if `sha256` is None. Raise UsageError if it is not a SHA-256."""
    if sha256 is None:
        return None
    digits = sha256.strip().lower()
    if len(digits) != _SHA256_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise UsageError(
            option("expect_sha256", None) + " is not a SHA-256",
            expected=f"{_SHA256_DIGITS} hexadecimal digits",
            got=sha256,
        )
    return digits


# Findings


def _findings(
    checkpoint: Checkpoint | None, concerned: list[Concern], faults: CollectingSink, path: Path
) -> list[Finding]:
    """Return the findings about `checkpoint`: its `faults`, the concerns `concerned`, and notes.

    If there are faults, the globals of pickles outside of the checkpoint's graph are judged too. `checkpoint` is None
    if it could not be read.
    """
    if faults.errors:  # the checkpoint may then lack some objects of the file
        known = {concern.name for concern in concerned}
        concerned = concerned + [concern for concern in concerns_in(faults.named) if concern.name not in known]
    findings = [finding_of(error) for error in faults.errors if not (concerned and isinstance(error, DangerousError))]
    findings += (_of_concern(concern, path) for concern in concerned)
    return [*findings, *_notes(checkpoint, faults.records)] if checkpoint else findings


def _unproved(
    checkpoint: Checkpoint, loading: Loading, findings: list[Finding], versions: Mapping[str, Answer] | None
) -> Iterator[Finding]:
    """Yield a finding if `checkpoint` is not proved to load, by the rules of one version or of all `versions`.

    Nothing is yielded if other `findings` already fail a strict verification.
    """
    has_pickle = not checkpoint.is_state_dict
    if loading.loads and versions and {*versions.values()} != {"loads"}:
        what, got = "torch.load(weights_only=True) of some versions may refuse it", by_version(versions)
    elif has_pickle and not loading.loads and all(finding.level in ("note", "warning") for finding in findings):
        word = "refuses it" if loading.answer == "refused" else "may refuse it"
        what = f"torch.load(weights_only=True) {word} by the rules of torch {loading.torch}"
        got = some([reason.text for reason in loading.reasons])
    else:
        return
    yield Finding("not proved", what, str(checkpoint.source.path), got=got)


def _safety(
    checkpoint: Checkpoint | None, concerned: list[Concern], findings: list[Finding], loading: Loading | None
) -> Safety | None:
    """Return how safe loading is. Return None if `checkpoint` is None and no finding needs code or is dangerous."""
    levels = {finding.level for finding in findings}
    if "dangerous" in levels:
        return "dangerous"
    if checkpoint:
        return level_of(checkpoint, concerned, loading)
    return "needs code" if "needs code" in levels else None


def _keep_unread(faults: CollectingSink) -> None:
    """Add the reasons why bytes could not be read, and remove the faults that may only follow from these."""
    if faults.not_read:
        first, _ = faults.not_read[0]
        later = faults.errors[first:]
        faults.errors[first:] = [error for error in later if isinstance(error, (DangerousError, UnreadableError))]
    for _, error in faults.not_read:
        faults.found(error)


def status_of(error: CkptconvError) -> Status:
    """Return ``not checked`` if `error` is about bytes that could not be read, else ``failed``."""
    return "not checked" if isinstance(error, UnreadableError) else "failed"


def finding_of(error: CkptconvError) -> Finding:
    """Return `error`, which was raised or collected by a reader, as a finding."""
    level: Level = "unknown" if isinstance(error, (UnsupportedError, LimitError)) else "damaged"
    level = "dangerous" if isinstance(error, DangerousError) else level
    level = "not checked" if status_of(error) == "not checked" else level
    where, expected, got = (None if part is None else str(part) for part in (error.where, error.expected, error.got))
    return Finding(level, error.what, where, expected, got, error.hint)


def _of_concern(concern: Concern, path: Path) -> Finding:
    """Return `concern` as a finding about the file at `path`."""
    more = f" ({concern.more + 1:,} times)" if concern.more else ""
    hints = {
        "dangerous": "attacks use it, and no checkpoint needs it: do not load it",
        "unknown": "it cannot be checked, so it may be an attack",
    }
    return Finding(concern.kind, f"{concern.name}{more}", str(path), hint=hints.get(concern.kind), path=concern.path)


def _notes(checkpoint: Checkpoint, records: list[UnreadRecord]) -> Iterator[Finding]:
    """Yield the findings that are neither damage nor danger, among them the absence of checksums."""
    path = checkpoint.source.path
    if not records and NO_CHECKSUMS not in checkpoint.notes:
        yield Finding(
            "note",
            "it has no checksums, so damage to tensor data cannot be detected",
            str(path),
            hint=option("expect_sha256", None) + " compares the whole file",
        )
    for note in checkpoint.notes:
        yield Finding("warning" if note in checkpoint.warnings else "note", note, str(path))
    for each in checkpoint.unused:
        yield Finding("note", f"{each.path}, {size(each.nbytes)}: {each.why}", str(path))


def _check_sha256(source: Readable, expected: str, faults: CollectingSink) -> None:
    """Read all of `source`. Add a fault if its SHA-256 is not `expected`, or if it cannot be read."""
    import hashlib  # few commands need it

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
                "the SHA-256 of the file differs",
                where=source.path,
                expected=expected,
                got=digest.hexdigest(),
            )
        )
