"""Change a checkpoint, or the files of a set, in place, and undo such a change.

The steps of a change: open and lock the files, plan the edits, write the undo journals, write the files.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ckptconv.byteranges.record_checks import CheckingSink
from ckptconv.byteranges.sources import (
    MORE_FILES,
    Readable,
    Source,
    SourceFolder,
    leave_spare,
    lock_exclusive,
)
from ckptconv.byteranges.undo_journal import (
    DONE,
    HOT,
    NO_JOURNAL,
    Journal,
    Patch,
    Patches,
    journal_path,
    journals_of,
    read_journal,
    refuse_no_journal,
    state_of,
)
from ckptconv.conversion.discovery import is_hub_blob
from ckptconv.conversion.options import given_options
from ckptconv.conversion.plan import InPlace, Report, Verified, refuse_dangers
from ckptconv.conversion.targets import Request
from ckptconv.edits.apply import apply
from ckptconv.edits.changes import Changes
from ckptconv.edits.names import is_wrapped
from ckptconv.errors import (
    CollisionError,
    InputError,
    MissingInputError,
    NoMatchError,
    OutputError,
    RefusedError,
    UnsupportedError,
    UsageError,
    some,
)
from ckptconv.formats import opening
from ckptconv.formats.distributed import dcp
from ckptconv.formats.distributed.metadata import read_metadata
from ckptconv.formats.foreign.paths import folder_error, refuse_url
from ckptconv.formats.in_place import patches_of, rest_sum, tensor_spans
from ckptconv.formats.sharded.index import find_set, is_index_file, read_index
from ckptconv.formats.writers import writer_of
from ckptconv.hints import Option, Placeholder, command, for_python, option, shell
from ckptconv.light_dataclass import dataclass
from ckptconv.output import in_place as writing
from ckptconv.output.files import as_output_error
from ckptconv.output.signals import HeldSignals, signals_held, with_note
from ckptconv.pickles.graph import gc_paused
from ckptconv.system import calls

#: Edits that move tensor bytes, and options that need a new output.
_MOVES = (
    *("dtypes", "compact", "loadable", "loadable_objects"),
    *("select", "state_dict", "drop", "include", "exclude", "optimizer", "like"),
)
_NO_OUTPUT = ("format", "copy_tied", "max_shard_size", "copy_others")


@dataclass
class _File:
    """A file that may change, open and locked, with its planned changes."""

    path: Path
    fd: int
    patches: Patches | None = None
    rest: str | None = None

    @property
    def changes(self) -> bool:
        """Whether any byte of the file changes."""
        return self.patches is not None and bool(self.patches.patches)


def change_in_place(request: Request) -> Report:
    """Change the file or the set of shards ``request.src`` in place, under an undo journal. Return the report.

    A link to a file is followed. With ``force``, a file may have other hard links.

    Raises:
        UsageError: An edit would move tensor bytes.
        RefusedError: The file cannot be changed in place, or cannot be changed now.
        DangerousError: The file contains a call that no checkpoint needs.
        OutputError: Writing failed. The journal contains the old bytes.
    """
    src, output = request.src, request.output
    refuse_url(src)
    check_edits(request)
    started = time.monotonic()
    index, paths = _files_of(src)
    if request.edits.regroup and len(paths) > 1:
        raise _moves(request, "regroup", "from shard to shard")
    with ExitStack() as opened, gc_paused():
        notes: list[str] = []
        files = []
        for path in paths:
            target, about = resolved(path)
            if path != src or len(paths) > 1:
                _check_inside(path, target)
            notes += about
            files.append(_File(target, opened.enter_context(open_locked(target))))
            _check_file(files[-1], force=output.force)
        if index and _files_of(src, Source) != (index, paths):  # without a lock, because this process has it
            raise RefusedError("the index was written again", where=index, hint="try again")
        faults = CheckingSink()
        changes, format_ = _plan(files, index, request, faults)
        changed = [file for file in files if file.changes]
        written = _write(changed, keep_journal=not output.no_undo) if changed and not output.dry_run else 0
    planned = [file.patches for file in files if file.patches]
    verified = Verified(faults.checked, faults.nbytes, output=False)
    return Report(
        src=str(src),
        dst=str(src),
        formats=(format_, format_),
        size=sum(each.new_size for each in planned),
        changes=changes,
        notes=(*notes, *dict.fromkeys(changes.notes), *request.notes),
        seconds=time.monotonic() - started,
        written=not output.dry_run,
        in_place=InPlace(
            "appended" if any(each.way == "appended" for each in planned) else "same size" if changed else "nothing",
            sum(each.nbytes for each in planned) if output.dry_run else written,
            str(journal_path(changed[0].path)) if changed and not output.no_undo else None,
        ),
        verified=verified if output.verify and not output.dry_run else None,
    )


def _files_of(path: Path, open_file: Callable[[Path], Readable] = opening.open_file) -> tuple[Path | None, list[Path]]:
    """Return the index of the set at `path` (None without one), and all files that may change, the index last.

    `open_file` opens the index.
    """
    if not path.is_dir() and not is_index_file(path):
        return None, [path]
    found = find_set(path)
    if found is None and path.is_dir() and dcp.looks_like_metadata(path):
        return None, [path / dcp.METADATA]
    if found is None:
        raise folder_error(path)
    folder = path if path.is_dir() else path.parent
    if found.index is None:
        return None, [folder / name for name in found.shards]
    index = folder / found.index
    with open_file(index) as source:
        return index, [*(folder / name for name in read_index(source).shards()), index]


def _plan(files: list[_File], index: Path | None, request: Request, faults: CheckingSink) -> tuple[Changes, str]:
    """Plan the changes of all `files` before the first is written. Return the changes and the format.

    An edit may match nothing in some shards, if it matches in others. Raises the errors of :func:`change_in_place`.
    """
    edits, shards = request.edits, files[:-1] if index else files
    total = Changes()
    missing: list[dict[tuple[str, object], NoMatchError]] = []  # for each shard, by the edit
    format_ = ""
    wrapped: set[bool] = set()
    names: dict[str, set[str]] = {}
    for file in shards:
        here = request
        missing.append({})
        while True:
            try:
                format_ = _plan_file(file, here, total, wrapped, names, faults)
                break
            except NoMatchError as error:  # it may match in another shard
                if error.unmatched is None or len(shards) == 1:
                    raise
                missing[-1].setdefault(error.unmatched, error)
                here = replace(here, edits=here.edits.without(*error.unmatched))
    for edit, first in next(iter(missing), {}).items():
        if all(edit in errors for errors in missing):
            raise first
    if edits.unwrap and len(shards) > 1 and len(wrapped) > 1:
        raise RefusedError(
            "all names begin with module. in some shards but not in others, so it was not added by a wrapper",
            where=index or files[0].path.parent,
            hint=option("strip_prefix", "module.") + " removes it anyway",
        )
    shard_of: dict[str, str] = {}
    for shard, own in names.items():
        for name in own:
            if shard_of.setdefault(name, shard) != shard:
                what = f"two shards would have the name {name!r}"
                raise CollisionError(what, where=index or files[0].path.parent, got=f"{shard_of[name]} and {shard}")
    total.notes = [note for note, n in Counter(total.notes).items() if n == len(shards)]  # notes that all shards have
    if index:
        _plan_index(files[-1], {change.old: change.new for change in total.names})
    return total, f"sharded {format_}" if index or len(shards) > 1 else format_


def _plan_file(
    file: _File,
    request: Request,
    total: Changes,
    wrapped: set[bool],
    names: dict[str, set[str]],
    faults: CheckingSink,
) -> str:
    """Plan the changes of `file`, which is a checkpoint or a shard. Return its format.

    The changes are added to `total`. For each state dict, True is added to `wrapped` if all its names have the prefix
    of a wrapper, else False. The new names in all state dicts are added to `names`, by the name of the file; they are
    the old ones if no name matches an edit.
    """
    of_folder, output = file.path.name == dcp.METADATA, request.output
    # The sources are not locked, because this process already has the lock.
    with SourceFolder(file.path.parent, faults) if of_folder else Source(file.path, faults) as source:
        checkpoint = opening.read(source)
        _check_not_replaced(file.path, file.fd, source)
        format_ = checkpoint.format
        file.rest = None if of_folder else rest_sum(checkpoint)
        before = [found.names() for found in checkpoint.detected.state_dicts]
        wrapped.update(is_wrapped(own) for own in before if own)
        known = {*checkpoint.storages}
        names[file.path.name] = {name for own in before for name in own}
        changes = apply(checkpoint, request.edits)
        names[file.path.name] = {name for found in checkpoint.detected.state_dicts for name in found.names()}
        if request.edits.regroup and (of_folder or not known.issuperset(checkpoint.storages)):
            raise _moves(
                request,
                "regroup",
                "in these files"
                if of_folder
                else "where it joins, cuts another dimension, or copies the step of an optimizer",
            )
        writer = writer_of(format_)
        if not output.allow_unsafe and (writer is None or writer.objects):
            refuse_dangers(checkpoint, as_archive=bool(writer and writer.records))
        file.patches = patches_of(checkpoint)
        if file.patches is None:
            raise RefusedError(
                "the new header does not fit into the space of the old one",
                where=file.path,
                hint="write a new file, with the same edits: "
                + command("convert", file.path, file.path, *_others(request, "force"), Option("force")),
            )
        if output.verify and not output.dry_run:
            faults.check()
        source.check_unchanged()
    total.add(changes)
    return format_


def _check_not_replaced(path: Path, fd: int, source: Readable) -> None:
    """Raise RefusedError if `source`, which was opened at `path`, is another file than the open file `fd`."""
    if not source.is_same_file(os.fstat(fd)):
        raise RefusedError("another file has replaced it", where=path, hint="try again")


def _plan_index(file: _File, names: dict[str, str]) -> None:
    """Plan the change of the index `file`. `names` maps old names to new ones. The order of names is kept."""
    with Source(file.path) as source:
        _check_not_replaced(file.path, file.fd, source)
        read_index(source)  # which checks it again
        old = source.read(0, source.size)
        source.check_unchanged()
    content = json.loads(old)
    content["weight_map"] = {names.get(name, name): shard for name, shard in content["weight_map"].items()}
    if isinstance(content.get("metadata"), dict):  # the metadata contains ties
        content["metadata"] = {
            names.get(key, key): names.get(value, value) if isinstance(value, str) else value
            for key, value in content["metadata"].items()
        }
    new = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode() if names else old
    patches = (Patch(0, old, new),) if new != old else ()
    file.patches = Patches("same size", patches, len(old), len(new), ((0, 0xFF),))


def check_edits(request: Request) -> None:
    """Raise UsageError if an edit would move tensor bytes, if an option needs an output, or if no edit is requested."""
    edits = request.edits
    for options, names in (edits, _MOVES), (request.output, _NO_OUTPUT):
        for name in names:
            if getattr(options, name) != getattr(type(options), name):
                raise _moves(request, name.replace("dtypes", "dtype"))
    if not (edits.devices or edits.strip_prefix or edits.rename or edits.add_prefix or edits.unwrap or edits.regroup):
        raise UsageError(
            option("in_place") + " needs a change",
            expected="a new device or new names",
        )


def _moves(request: Request, keyword: str, when: str = "") -> UsageError:
    """Return the error for an option that moves tensor bytes. `when` restricts this to a case, in words."""
    why = f", because it rewrites tensor data{when and ' ' + when}"
    return UsageError(
        option(keyword, None) + " cannot be used with " + option("in_place") + why,
        hint="write a new file: " + command("convert", request.src, Placeholder("OUT"), *_others(request)),
    )


def _others(request: Request, *without: str) -> list[Option]:
    """Return the options of `request`, without those for a change in place and those in `without`."""
    return given_options(request.given, "in_place", "no_undo", *without)


def resolved(path: str | os.PathLike[str]) -> tuple[Path, tuple[str, ...]]:
    """Return the file that `path` leads to, and a note if `path` is a link. Raises RefusedError for the Hub's cache."""
    named = Path(os.fsdecode(path))
    target = Path(os.path.realpath(named))
    if is_hub_blob(target):
        raise RefusedError(
            "the file is in the Hub's cache, where its name is its checksum",
            where=named,
            hint="convert it to another file",
        )
    if target == Path(os.path.abspath(named)):
        return named, ()
    return target, (f"{named} is a link: {target} was changed",)


@contextmanager
def open_locked(path: Path) -> Iterator[int]:
    """Open the file at `path` for writing, lock it, and yield its descriptor.

    Raises:
        UnsupportedError: This system cannot change files in place.
        InputError: There is no regular file.
        OutputError: The file cannot be opened for writing.
        RefusedError: Another program uses the file.
    """
    if not calls.HAS_OWNERS:
        raise UnsupportedError(
            "files cannot be changed in place on this system yet",
            where=path,
            hint="write a new file: " + command("convert", path, Placeholder("OUT")),
        )
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError("not a regular file", where=path)
        fd = calls.open_to_change(path)
    except FileNotFoundError as error:
        raise MissingInputError("no such file", where=path) from error
    except OSError as error:
        raise OutputError(f"cannot be changed: {error.strerror}", where=path, hint=_remedy(error, path)) from error
    try:
        leave_spare(fd)
        lock_exclusive(fd, path)
        yield fd
    finally:
        os.close(fd)


def _remedy(error: OSError, path: Path) -> str:
    """Return a hint for the user after `error`, which was raised because the file or folder `path` could not be
    written.
    """
    copies = "convert it to another file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or " + copies
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{MORE_FILES}: all files of a set are open at once; or {copies}"
    if error.errno == errno.EPERM:  # a flag of the filesystem, or the folder's sticky bit
        return (
            f"{shell('lsattr', '-d', path)} shows whether it is immutable; {shell('chattr', '-i', path)} changes that"
        )
    if error.errno == errno.EACCES and os.stat(path).st_uid == os.geteuid():
        return shell("chmod", "u+w", path)
    return copies


def _check_file(file: _File, *, force: bool) -> None:
    """Raise RefusedError if `file` has an interrupted change, or has other hard links and `force` is False."""
    links = os.fstat(file.fd).st_nlink
    if links > 1 and not force:
        raise RefusedError(
            f"the file has {links} names (hard links), and all of them would change",
            where=file.path,
            hint=option("force") + " changes it",
        )
    refuse_no_journal(file.path)
    if state_of(file.path) == HOT:
        raise RefusedError(
            "an in-place change of this file was interrupted",
            where=file.path,
            hint=command("undo", file.path),
        )


def _check_inside(path: Path, target: Path) -> None:
    """Raise RefusedError if `path`, a file of a folder or set, is a link to a `target` in another folder.

    Undo looks for journals in only one folder, and the journals of a set name files of that folder.
    """
    if os.path.realpath(path.parent) != os.path.realpath(target.parent):
        raise RefusedError(
            "a link leads out of the folder", where=path, got=target, hint="convert the folder to another one"
        )


def _write(files: list[_File], *, keep_journal: bool) -> int:
    """Write the patches of `files`, each under its journal. Return how many bytes were written.

    The first file is the leader. The change of the set is complete when the leader's journal is marked as done. Ctrl-C,
    SIGTERM and SIGHUP are delayed until everything can be undone, or until everything is done.
    """
    leader = files[0]
    done = f"{leader.path} was changed"
    if keep_journal:
        done += "; " + command("undo", leader.path) + " reverts it"
    with signals_held(done) as signals:
        names = tuple(file.path.name for file in files) if len(files) > 1 else ()
        journals_ = [_journal(file, names, None if file is leader else leader.path.name) for file in files]
        pairs = [*zip(files, journals_, strict=True)]
        if names:  # an old journal next to a new one would restore too much
            with as_output_error(leader.path):
                writing.discard_journals(*(file.path for file in files))
        for file, journal in pairs:
            try:
                writing.write_journal(file.path, journal)
            except OSError as error:
                _take_back(pairs, begun=0)
                raise OutputError(
                    f"the undo journal cannot be written, so nothing was changed: {error.strerror}",
                    where=journal_path(file.path),
                    hint=_remedy(error, file.path.parent),
                ) from error
        written = 0
        for i, (file, journal) in enumerate(pairs, 1):
            _deliver(signals, pairs, begun=i - 1)
            try:
                with as_output_error(file.path):
                    if i == 1 and names:
                        written += writing.spoil(files[-1].fd, journals_[-1])
                    written += writing.apply(file.fd, journal)
            except OutputError as error:
                back = _take_back(pairs, begun=i)
                error.hint = "nothing was changed" if back else command("undo", leader.path)
                raise
        _deliver(signals, pairs, begun=len(pairs))
        try:
            for file in files:  # the leader first
                writing.mark_journal(file.path, DONE)
            for file in files[::-1] if not keep_journal else ():
                writing.discard_journals(file.path)
        except OSError as error:
            raise OutputError(
                f"the change could not be finished: {error.strerror}",
                where=leader.path,
                hint=command("undo", leader.path),
            ) from error
        return written


def _deliver(signals: HeldSignals, files: list[tuple[_File, Journal]], *, begun: int) -> None:
    """Deliver the delayed `signals`. If a handler raises an exception, the old bytes are restored before it goes on."""
    try:
        signals.deliver()
    except BaseException as error:
        leader = files[0][0].path
        back = _take_back(files, begun=begun)
        with_note(error, f"{leader}: nothing was changed" if back else f"{leader}: " + command("undo", leader))
        raise


def _take_back(files: list[tuple[_File, Journal]], *, begun: int) -> bool:
    """Restore the old bytes of `files`, and remove their journals. Return whether that worked.

    The first `begun` files may have new bytes. The last file may too, because it is poisoned first. If the result is
    False, the journals are hot. A journal with the state done belongs to an earlier change, and stays.
    """
    try:
        for file, journal in [*files[:-1][:begun], *files[-1:]] if begun else ():
            writing.restore(file.fd, journal)
        for file, _ in files[::-1]:
            if state_of(file.path) == HOT:
                writing.discard_journals(file.path)
    except OSError:
        return False
    return True


def _journal(file: _File, members: tuple[str, ...], leader: str | None) -> Journal:
    assert file.patches
    patches = file.patches
    inode = os.fstat(file.fd).st_ino
    own = () if leader else members
    return Journal(inode, patches.old_size, patches.new_size, patches.patches, patches.poison, leader, own, file.rest)


@for_python
def undo(path: str | os.PathLike[str]) -> int:
    """Restore the bytes that a file, or all files of its set, had before the last change in place.

    Args:
        path: A file; or any changed file of a sharded set, or its folder.

    Returns:
        The number of bytes that were written.

    Raises:
        InputError: There is no journal, or it is damaged.
        UsageError: The folder contains several checkpoints that were changed.
        RefusedError: A journal cannot be trusted, or a file was written again since. Nothing was changed.
        OutputError: Writing failed. The call can be repeated.
    """
    return take_back(path)


def take_back(path: str | os.PathLike[str]) -> int:
    """Undo a change as :func:`undo` does, with errors in the words of the command line."""
    refuse_url(path)
    found = journals_of(Path(os.fsdecode(path))) if os.path.isdir(path) else [(Path(os.fsdecode(path)), HOT)]
    changed = [target for target, state in found if state == HOT] or [target for target, _ in found]
    if not changed:
        raise InputError(NO_JOURNAL, where=path)
    target, _ = resolved(changed[0])
    with ExitStack() as opened, gc_paused():
        fd = opened.enter_context(open_locked(target))
        first = _Opened(target, fd, *read_journal(target, os.fstat(fd).st_uid))
        is_of_set = first.journal.leader is not None or first.journal.members
        files = _set_of(first, opened) if is_of_set else [first]
        if len(changed) > len(files):
            names = [os.path.basename(each) for each in changed]
            one = "to revert one: " + command("undo", target)
            raise UsageError("several checkpoints in the folder were changed", where=path, got=some(names), hint=one)
        for file in files:
            writing.check_restorable(file.fd, file.journal, file.path, done=file.state == DONE)
            _check_whole(file.path, file.fd, file.journal)
        written = 0
        with as_output_error(target), signals_held(f"{target}: restored"):
            for file in files:  # the leader first: from here on the set is hot, even after an interruption
                writing.mark_journal(file.path, HOT)
            if len(files) > 1:
                writing.spoil(files[-1].fd, files[-1].journal)
            for file in files:
                written += writing.restore(file.fd, file.journal)
            for file in files[::-1]:  # the leader last
                writing.discard_journals(file.path)
    return written


class _Opened(NamedTuple):
    """An open file, its undo journal, and the state of the journal: ``DONE`` if the change was finished, or ``HOT``."""

    path: Path
    fd: int
    journal: Journal
    state: bytes


def _set_of(first: _Opened, opened: ExitStack) -> list[_Opened]:
    """Return the files of the set to which `first` belongs, the leader first. Raises the errors of :func:`undo`.

    If the set is hot, files without a journal are left out: their change had not begun, or was undone.
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
        present = {named, *others}
        lost = [name for name in names if name not in present]
        raise RefusedError(
            "some files of the set were changed or undone separately since then", where=target, got=some(lost)
        )
    files = [leader, *map(open_member, others)]
    for path, _, member, _ in files[1:]:
        if member.leader != named:
            raise RefusedError("the undo journals of a set contradict each other", where=path, got=member.leader)
    return files


class _AsBefore(Source):
    """A file as it was before the change in `journal`, as a source."""

    def __init__(self, path: Path, journal: Journal) -> None:
        super().__init__(path)
        self.size = journal.old_size
        self._patches = journal.patches
        self._ends = [each.offset + len(each.old) for each in journal.patches]

    read = Readable.read  # not the bytes that the file has now

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
    """Raise RefusedError unless `journal` can restore the open file `fd` at `path`.

    The restored file must be a checkpoint, the patches must not be inside its tensors, and all other bytes must be
    unchanged. An index and metadata have no tensors.
    """
    with _AsBefore(path, journal) as source, gc_paused():
        _check_not_replaced(path, fd, source)
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
                f"the bytes in the undo journal are not a checkpoint ({error.what})", where=path
            ) from error
        spans, rest = tensor_spans(checkpoint), rest_sum(checkpoint)
    starts, ends = [span.offset for span in spans], [*accumulate((span.offset + span.length for span in spans), max)]
    for patch in journal.patches:
        before = bisect_left(starts, patch.offset + len(patch.old))  # the number of tensors that begin before its end
        if before and ends[before - 1] > patch.offset:
            raise RefusedError(
                "the undo journal would change the bytes of a tensor", where=path, got=f"byte {patch.offset:,}"
            )
    if rest != journal.rest:
        raise RefusedError(writing.WRITTEN_ANEW, where=path, got="changes elsewhere in the file")
