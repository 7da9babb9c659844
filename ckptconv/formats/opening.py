"""Open an input, detect its format, and read it. A file is what its content says, never its suffix.

That it is one part of a distributed checkpoint is what the files beside it say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.file_objects import FileObjectSource, Input, is_file_object
from ckptconv.byteranges.given_paths import is_folder, path_at
from ckptconv.byteranges.sources import Readable, Source, SourceFolder, is_url
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.undo_journal import HOT, journals_of
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import InputError, MissingInputError, UnsupportedError, printable
from ckptconv.formats import torch_zip
from ckptconv.formats.distributed.rank_names import about_one, is_pattern
from ckptconv.formats.foreign.folders import about_part, distributed_part_error, folder_error, name_like
from ckptconv.formats.sharded.index import is_index, is_index_file
from ckptconv.formats.two_readings import refuse_two_readings
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import Message, command, shell

_R = TypeVar("_R", bound=Readable)

__all__ = ["interrupted", "open_file", "open_input", "open_part", "read"]


class Format(Protocol):
    """What a format's module offers."""

    NAME: str

    def looks_like(self, head: bytes) -> bool: ...

    def read(self, source: Readable) -> Checkpoint: ...


class FolderFormat(Protocol):
    """What the module of a format of several files offers.

    READ_FILE reads one of them, where it is a checkpoint itself.
    """

    NAME: str

    def looks_like(self, folder: SourceFolder) -> bool: ...

    def read(self, folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint: ...


_SAFETENSORS = WRITERS["safetensors"]
_HEAD = 64


def _file_formats() -> Iterator[Format]:
    """What a file can be. Each is imported when the ones before it are not what the file starts like, which saves a
    third of the start.

    safetensors before pickles: the length of a header can be the bytes with which a pickle starts.
    """
    yield torch_zip
    from ckptconv.formats import torch_legacy

    yield torch_legacy
    from ckptconv.formats import safetensors

    yield safetensors
    from ckptconv.formats import plain_pickle

    yield plain_pickle


def _folder_formats() -> Iterator[FolderFormat]:
    """What a folder can be."""
    from ckptconv.formats.distributed import dcp, rank_files, safetensors_parts
    from ckptconv.formats.sharded import reading as sharded

    yield from (dcp, safetensors_parts, rank_files, sharded)


def open_input(
    path: Input,
    faults: FaultSink = RAISED,
    *,
    skims: bool = False,
    download: bool | Path = False,
    progress: Meter | None = None,
) -> Readable:
    """What `path` means: a folder, the index of shards or the pattern of rank files, else a file; or the file object
    that it is.

    A context manager; `faults` takes what readers find wrong with it. `skims`: of a far file nothing is wanted but what
    is in it. `download`: one of which the server sends no ranges is downloaded, to a folder that this may say, and
    `progress` hears of that.

    Raises InputError, UsageError for a file object that cannot be read by position, OutputError for a download.
    """
    if is_file_object(path):
        return FileObjectSource(path, faults)
    if is_url(path):
        return _open_url(path, faults, skims=skims, download=download, progress=progress)
    name = os.fsdecode(path)
    if name and "\0" not in name and (os.path.isdir(name) or is_index_file(Path(name)) or is_pattern(name)):
        return SourceFolder(name, faults, open_part)
    return open_file(path, faults)


def _open_url(given: str | os.PathLike[str], faults: FaultSink, **how: Any) -> Readable:
    """What the URL `given` means: a folder, the index of shards, the pattern of rank files, else a file. `how` is as
    for :func:`open_input`, whose errors it raises.
    """
    path = path_at(given)
    if not is_url(path):
        return open_input(path, faults)
    from ckptconv.byteranges.far.download import open_far  # which no file here needs
    from ckptconv.byteranges.far.folder import FarFolder
    from ckptconv.byteranges.far.paths import FarPath

    assert isinstance(path, FarPath)
    if is_index(path.name) or is_pattern(path.name) or is_folder(path):
        return FarFolder(path, faults, checked_part, **how)
    try:
        return open_far(path, faults, **how)
    except MissingInputError as error:
        if not path.url.is_http:
            error.hint = f"of a folder the URL ends in a slash: {shell(f'{path}/')}"
        raise


def open_file(path: str | os.PathLike[str], faults: FaultSink = RAISED) -> Source:
    """The file `path`.

    Raises InputError, which says what a folder is, and which name is like that of a missing file.
    """
    try:
        return Source(path, faults, locked=True)
    except InputError as error:
        name = os.fsdecode(path)
        if name and os.path.isdir(name):
            raise folder_error(Path(name)) from error
        import glob

        from ckptconv.formats.foreign.paths import no_path_error

        is_missing = isinstance(error, MissingInputError)
        if is_missing and (no_path := no_path_error(name, is_output=False)):
            raise no_path from None
        near = name_like(Path(name)) if is_missing else None
        if is_missing and glob.glob(name):
            error.hint = "type the pattern without quotes: the shell then gives the names of the files"
        error.hint = f"is it {shell(near)}?" if near else error.hint
        raise


def open_part(path: str | os.PathLike[str], faults: FaultSink = RAISED) -> Source:
    """The file `path`, which belongs to a checkpoint of several.

    Raises InputError, and MalformedError where it can be read in two ways.
    """
    return checked_part(open_file(path, faults))


def checked_part(source: _R) -> _R:
    """`source`, a file of a checkpoint of several. Raises MalformedError where it can be read in two ways."""
    try:
        format_ = _format_of(source)
        if format_:
            refuse_two_readings(source, format_.NAME)
    except InputError:
        source.close()
        raise
    return source


def read(source: Readable) -> Checkpoint:
    """The checkpoint in `source`, in whatever container.

    Raises UnsupportedError with what it is instead, and what the reader raises.
    """
    said = interrupted(source)
    try:
        checkpoint = read_folder(source) if isinstance(source, SourceFolder) else read_file(source)
    except InputError as error:
        error.hint = said or error.hint
        raise
    checkpoint.notes += [said] if said else []
    checkpoint.notes += source.about()
    return checkpoint


def read_selected(source: Readable, select: str | None) -> tuple[Checkpoint, str | None]:
    """Return the checkpoint in `source`, and `select`, the path of the part that is to be taken of it.

    If a file of torch.save stands at that path, in a byte string, the checkpoint is the one in that file, and there is
    nothing more to select. Raises as :func:`read` does.
    """
    checkpoint = read(source)
    if select is None:
        return checkpoint, None
    from ckptconv.formats.nested_files import files_in

    places = (each for each in checkpoint.index.every_place if select in (each.path, printable(each.path)))
    found = next(files_in(places, checkpoint.blobs or checkpoint.source), None)
    if found is None:
        return checkpoint, select
    inner = read_file(found[1])
    inner.notes.append(f"the file in the byte string at {select}; what is around it is left behind")
    return inner, None


def interrupted(source: Readable) -> Message | None:
    """What to say where a change in place of `source`, or of a file in it, was begun and not finished."""
    if not source.is_stored:
        return None
    path = source.folder if isinstance(source, SourceFolder) else source.path
    hot = next((target for target, state in journals_of(path) if state == HOT), None)
    if hot is None:
        return None
    what = "this file" if hot.name == path.name else os.fspath(hot)
    return f"a change of {what} in place was interrupted: " + command("undo", hot) + " gives the old bytes back"


def read_folder(source: SourceFolder) -> Checkpoint:
    """The checkpoint whose parts stand in `source`. Raises as :func:`read` does."""
    for format_ in _folder_formats():
        if format_.looks_like(source):
            return format_.read(source, read_part)
    raise folder_error(source.path)


def read_file(source: Readable) -> Checkpoint:
    """The checkpoint in the file `source`. Raises as :func:`read` does, and MalformedError if it has two readings."""
    format_ = _format_of(source)
    if format_:
        refuse_two_readings(source, format_.NAME)
    checkpoint = _read_as(source, format_)
    is_part = any(info.kind == "partial" for info in checkpoint.tensors.values())
    about = about_one(source.path) if is_part else about_part(source.path) if source.is_stored else None
    checkpoint.notes += [about] if about else []
    return checkpoint


def read_part(source: Readable) -> Checkpoint:
    """The checkpoint in `source`, which :func:`open_part` has opened. Raises as :func:`read` does."""
    return _read_as(source, _format_of(source))


def _format_of(source: Readable) -> Format | None:
    """What `source` starts like; None where that is nothing that is read."""
    head = source.read(0, min(_HEAD, source.size))
    for format_ in _file_formats():
        if format_.looks_like(head):
            return format_
    from ckptconv.formats.foreign.pickles import looks_like_pickle

    # protocols 0 and 1, which have no signature
    return format_ if head and looks_like_pickle(source, head) else None


def _read_as(source: Readable, format_: Format | None) -> Checkpoint:
    """The checkpoint in `source`, a file of `format_` or of none that is read."""
    part = distributed_part_error(source)
    if part:
        raise part
    if format_:
        checkpoint = format_.read(source)
        with source.faults:
            if torch_zip.is_program(checkpoint):
                from ckptconv.formats import torchscript

                torchscript.read_program(source, checkpoint)
        return checkpoint
    from ckptconv.formats import safetensors
    from ckptconv.formats.foreign.files import foreign_file_error

    error = foreign_file_error(source)
    if error:
        raise error
    if source.path.suffix in _SAFETENSORS.suffixes:
        return safetensors.read(source)  # which says what is wrong with it
    raise UnsupportedError(
        "no checkpoint that this version reads",
        where=source.path,
        expected="a file of torch.save, pickle.dump or safetensors",
        got=f"a file that starts with the bytes {source.read(0, min(8, source.size)).hex(' ')}",
    )
