"""Give a file, or the files of a set, the bytes back that they had before a change in place."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ckptconv.byteranges.sources import ComputedSource, Source
from ckptconv.byteranges.undo_journal import DONE, HOT, NO_JOURNAL, Journal, journal_path, journals_of, read_journal
from ckptconv.conversion.in_place import open_locked, resolved
from ckptconv.errors import InputError, RefusedError, UsageError, some
from ckptconv.formats import opening
from ckptconv.formats.distributed import dcp
from ckptconv.formats.distributed.metadata import read_metadata
from ckptconv.formats.foreign.paths import refuse_url
from ckptconv.formats.in_place import rest_sum, tensor_spans
from ckptconv.formats.sharded.index import read_index
from ckptconv.hints import command, for_python
from ckptconv.output.files import as_output_error
from ckptconv.output.in_place import journal as journals
from ckptconv.output.in_place.signals import signals_held
from ckptconv.output.in_place.writing import WRITTEN_ANEW, check_restorable, restore, spoil
from ckptconv.pickles.graph import gc_paused


@for_python
def undo(path: str | os.PathLike[str]) -> int:
    """Give back the bytes that a file, or all files of its set, had before the last change in place.

    Args:
        path: A file; of a sharded set, any of its files that changed, or its folder.

    Returns:
        How many bytes were written.

    Raises:
        InputError: There is no journal, or it is damaged.
        UsageError: In the folder are several checkpoints that were changed.
        RefusedError: A journal is not to be trusted, or a file was written anew since; nothing was changed.
        OutputError: Writing failed; this can be done again.
    """
    return take_back(path)


def take_back(path: str | os.PathLike[str]) -> int:
    """:func:`undo` in the words of the command line."""
    refuse_url(path)
    found = journals_of(Path(os.fsdecode(path))) if os.path.isdir(path) else [(Path(os.fsdecode(path)), HOT)]
    changed = [target for target, state in found if state == HOT] or [target for target, _ in found]
    if not changed:
        raise InputError(NO_JOURNAL, where=path)
    target, _ = resolved(changed[0])
    with ExitStack() as opened:
        fd = opened.enter_context(open_locked(target))
        first = _Opened(target, fd, *read_journal(target, os.fstat(fd).st_uid))
        is_of_set = first.journal.leader is not None or first.journal.members
        files = _set_of(first, opened) if is_of_set else [first]
        if len(changed) > len(files):
            names = [os.path.basename(each) for each in changed]
            one = command("undo", target) + " takes one back"
            raise UsageError("several checkpoints in the folder were changed", where=path, got=some(names), hint=one)
        for file in files:
            check_restorable(file.fd, file.journal, file.path, done=file.state == DONE)
            _check_whole(file.path, file.fd, file.journal)
        written = 0
        with as_output_error(target), signals_held(f"{target}: restored"):
            for file in files:  # the leader first: from here on the set is hot, whatever happens
                journals.mark(file.path, HOT)
            if len(files) > 1:
                spoil(files[-1].fd, files[-1].journal)
            for file in files:
                written += restore(file.fd, file.journal)
            for file in files[::-1]:  # the leader last
                journals.discard(file.path)
    return written


class _Opened(NamedTuple):
    """A file that is open, its undo journal, and whether the change was finished: ``DONE``, or ``HOT``."""

    path: Path
    fd: int
    journal: Journal
    state: bytes


def _set_of(first: _Opened, opened: ExitStack) -> list[_Opened]:
    """The files of the set that the `first` one belongs to, the leader first. Raises as :func:`undo` does.

    In a set that is hot, a member without a journal is as it was: its change had not begun, or its undo was done.
    """
    target = first.path
    known = {target.name: first}

    def open_member(name: str) -> _Opened:
        if name not in known:
            path = target.with_name(name)
            fd = opened.enter_context(open_locked(path))
            known[name] = _Opened(path, fd, *read_journal(path, os.fstat(fd).st_uid))
        return known[name]

    leader = open_member(first.journal.leader or target.name)
    named = leader.path.name
    names = dict.fromkeys(leader.journal.members)
    if named not in names or target.name not in names:
        raise RefusedError("the undo journals of a set contradict each other", where=target, got=named)
    others = [name for name in names if name != named and os.path.lexists(journal_path(target.with_name(name)))]
    if leader.state == DONE and len(others) + 1 < len(names):
        lost = [name for name in names if name not in (named, *others)]
        raise RefusedError(
            "some files of the set were changed or undone one by one since then", where=target, got=some(lost)
        )
    files = [leader, *map(open_member, others)]
    for path, _, member, _ in files[1:]:
        if member.leader != named:
            raise RefusedError("the undo journals of a set contradict each other", where=path, got=member.leader)
    return files


class _AsBefore(ComputedSource, Source):
    """A file as it was before the change that a journal is of."""

    def __init__(self, path: Path, journal: Journal) -> None:
        super().__init__(path)
        self.size = journal.old_size
        self._patches = journal.patches
        self._ends = [each.offset + len(each.old) for each in journal.patches]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = min(offset + len(buffer), os.fstat(self.fd).st_size)
        super().read_into(offset, buffer[: max(0, end - offset)])
        for i in range(bisect_right(self._ends, offset), len(self._patches)):
            each = self._patches[i]
            start, stop = max(offset, each.offset), min(offset + len(buffer), each.offset + len(each.old))
            if start >= stop:
                break
            buffer[start - offset : stop - offset] = each.old[start - each.offset : stop - each.offset]


def _check_whole(path: Path, fd: int, journal: Journal) -> None:
    """Raise RefusedError unless what `journal` gives back to the open file `fd` at `path` is a checkpoint, nothing of
    it is in its tensors, and all else is as it was. An index, and metadata, have no tensors.
    """
    with _AsBefore(path, journal) as source, gc_paused():
        if not source.is_same_file(os.fstat(fd)):
            raise RefusedError("another file took its place", where=path, hint="try again")
        try:
            if path.name == dcp.METADATA:
                read_metadata(source)
                return
            if path.suffix == ".json" and source.read(0, source.size).lstrip().startswith(b"{"):
                read_index(source)
                return
            checkpoint = opening.read(source)
        except InputError as error:
            raise RefusedError(
                f"what the undo journal would give back is no checkpoint ({error.what})", where=path
            ) from error
        spans, rest = tensor_spans(checkpoint), rest_sum(checkpoint)
    starts, ends = [span.offset for span in spans], [*accumulate((span.offset + span.length for span in spans), max)]
    for patch in journal.patches:
        before = bisect_left(starts, patch.offset + len(patch.old))  # so many begin before it ends
        if before and ends[before - 1] > patch.offset:
            raise RefusedError(
                "the undo journal would change the bytes of a tensor", where=path, got=f"byte {patch.offset:,}"
            )
    if rest != journal.rest:
        raise RefusedError(WRITTEN_ANEW, where=path, got="other bytes around those of that change")
