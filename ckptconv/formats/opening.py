"""Open an input, detect its format and read it. The format is decided by the content of a file, never by its suffix.

Names of files next to the input tell whether it is one file of a distributed checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckptconv.byteranges import sources
from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, Source, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.byteranges.undo_journal import HOT, journals_at
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.errors import InputError, MissingInputError, UnsupportedError, printable
from ckptconv.formats import torch_zip
from ckptconv.formats.distributed.rank_names import about_one, is_pattern
from ckptconv.formats.foreign.paths import about_part, distributed_part_error, folder_error, name_like
from ckptconv.formats.foreign.zips_and_pickles import ExportedError
from ckptconv.formats.sharded.index import is_index, is_index_file
from ckptconv.formats.two_readings import refuse_two_readings
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import Message, command, shell
from ckptconv.stores import is_url, locate
from ckptconv.stores.memory import FileObjectSource, Input, is_file_object

_R = TypeVar("_R", bound=Readable)


class Format(Protocol):
    """The interface of a module that reads one kind of file."""

    NAME: str

    def looks_like(self, head: bytes) -> bool: ...

    def read(self, source: Readable) -> Checkpoint: ...


class FolderFormat(Protocol):
    """The interface of a module that reads one kind of folder.

    `read_file` is a function that reads a file of the folder which is a checkpoint itself.
    """

    NAME: str

    def looks_like(self, folder: SourceFolder) -> bool: ...

    def read(self, folder: SourceFolder, read_file: Callable[[Readable], Checkpoint]) -> Checkpoint: ...


_SAFETENSORS = WRITERS["safetensors"]
_HEAD = 64


def _file_formats() -> Iterator[Format]:
    """Yield the modules of the file formats. A module is imported only if no module before it matches the file.

    safetensors comes before plain pickles, because the length of a header can have the bytes with which a pickle
    starts.
    """
    yield torch_zip
    from ckptconv.formats import torch_legacy

    yield torch_legacy
    from ckptconv.formats import safetensors

    yield safetensors
    from ckptconv.formats import plain_pickle

    yield plain_pickle


def _folder_formats() -> Iterator[FolderFormat]:
    """Yield the modules of the folder formats."""
    from ckptconv.formats.distributed import dcp, rank_files, safetensors_parts
    from ckptconv.formats.sharded import reading as sharded

    yield from (dcp, safetensors_parts, rank_files, sharded)
    from ckptconv.formats.distributed import zero  # after shards, which trainers put next to the folder of ZeRO

    yield zero


def open_input(
    path: Input,
    faults: FaultSink = RAISED,
    *,
    skims: bool = False,
    download: bool | Path = False,
    progress: Meter | None = None,
) -> Readable:
    """Open `path`: a folder, an index of shards, a pattern of rank files, any other file, or a file object.

    Args:
        path: The input.
        faults: The sink that receives the faults that readers find.
        skims: Whether to skip integrity checks of a remote file that cost requests.
        download: Whether to download a remote file if its server cannot send ranges. A path is the folder for the
            download.
        progress: A function that reports the progress of the download.

    Returns:
        The source, which is a context manager.

    Raises:
        InputError: The input is missing or cannot be read.
        UsageError: A file object cannot be read by position.
        OutputError: A download cannot be written.
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
    """Open the URL `given`: a folder, an index of shards, a pattern of rank files, or any other file.

    `how` are the remaining arguments of :func:`open_input`. The errors are the same.
    """
    from ckptconv.stores.remote import FarFolder, FarPath, open_far

    path = locate(given)
    if not isinstance(path, FarPath):  # a URL of the scheme file
        return open_input(path, faults)
    if is_index(path.name) or is_pattern(path.name) or path.is_dir():
        return FarFolder(path, faults, checked_part, **how)
    try:
        return open_far(path, faults, **how)
    except MissingInputError as error:
        if not path.url.is_http:
            error.hint = f"of a folder the URL ends in a slash: {shell(f'{path}/')}"
        raise


def open_file(path: str | os.PathLike[str], faults: FaultSink = RAISED, *, is_part: bool = False) -> Readable:
    """Open the local file `path`. `is_part` is whether it is one of several files of a checkpoint.

    Raises InputError. If `path` is a folder, the error lists its content. If it is missing, the error suggests a file
    with a similar name.
    """
    try:
        return sources.open_part(path, faults) if is_part else Source(path, faults, locked=True)
    except InputError as error:
        name = os.fsdecode(path)
        if name and os.path.isdir(name):
            raise folder_error(Path(name)) from error
        if not isinstance(error, MissingInputError):
            raise
        import glob

        from ckptconv.formats.foreign.paths import no_path_error

        if no_path := no_path_error(name, is_output=False):
            raise no_path from None
        near = name_like(Path(name))
        if name not in (matching := glob.glob(name)) and matching:  # a link to nothing matches its own name
            error.hint = "type the pattern without quotes: the shell then gives the names of the files"
        error.hint = f"is it {shell(near)}?" if near else error.hint
        raise


def open_part(path: str | os.PathLike[str], faults: FaultSink = RAISED) -> Readable:
    """Open the local file `path`, which is one of several files of a checkpoint.

    Raises InputError, and MalformedError if another program could read the file as something else.
    """
    return checked_part(open_file(path, faults, is_part=True))


def checked_part(source: _R) -> _R:
    """Return `source`, one of several files of a checkpoint, unchanged.

    Raises MalformedError if another program could read the file as something else. The source is then closed.
    """
    try:
        format_ = _format_of(source)
        if format_:
            refuse_two_readings(source, format_.NAME)
    except InputError:
        source.close()
        raise
    return source


def read(source: Readable, like: Checkpoint | None = None) -> Checkpoint:
    """Return the checkpoint in `source`, a file or folder of any format.

    If its pickle equals that of `like`, both checkpoints use the same nodes. Neither may be edited then.

    Raises UnsupportedError if it is not a checkpoint (the error names its format), and the errors of the format's
    reader.
    """
    unfinished = interrupted(source)
    try:
        if isinstance(source, SourceFolder):
            folder_reader = folder_format(source)
            if folder_reader is None:
                raise folder_error(source.path)
            checkpoint = folder_reader.read(source, read_part)
        else:
            checkpoint = read_file(source, like)
    except InputError as error:
        error.hint = unfinished or error.hint
        error.where = source.path if error.where is None else error.where
        raise
    checkpoint.notes += [unfinished] if unfinished else []
    checkpoint.notes += source.about()
    return checkpoint


def read_selected(source: Readable, select: str | None) -> tuple[Checkpoint, str | None]:
    """Return the checkpoint in `source`, and the path that remains to be selected in it, or None.

    Usually the path is `select`. But if a byte string at this path is a file of torch.save, the checkpoint in that file
    is returned with None. Raises the same errors as :func:`read`.
    """
    checkpoint = read(source)
    if select is None:
        return checkpoint, None
    from ckptconv.formats.torch_files import files_in

    places = (place for place in checkpoint.index.every_place if select in (place.path, printable(place.path)))
    for _, file in files_in(places, checkpoint.blobs or checkpoint.source):
        inner = read_file(file)
        inner.notes.append(f"read from the file in the byte string at {select}; everything around it is not saved")
        return inner, None
    return checkpoint, select


def interrupted(source: Readable) -> Message | None:
    """Return a message if an in-place change of `source`, or of a file in the folder, was interrupted.

    Otherwise return None.
    """
    hot = next((target for target, state in journals_at(source) if state == HOT), None)
    if hot is None:
        return None
    what = os.fspath(hot) if source.is_folder else "this file"
    return f"an in-place change of {what} was interrupted; to restore the old bytes: " + command("undo", hot)


def folder_format(source: SourceFolder) -> FolderFormat | None:
    """Return the format of the folder `source`, by the names of its files, or None if no format matches."""
    return next((format_ for format_ in _folder_formats() if format_.looks_like(source)), None)


def read_file(source: Readable, like: Checkpoint | None = None) -> Checkpoint:
    """Return the checkpoint in the file `source`. `like` is as for :func:`read`.

    Raises the same errors as :func:`read`, and MalformedError if another program could read the file as something else.
    """
    format_ = _format_of(source)
    if format_:
        refuse_two_readings(source, format_.NAME)
    checkpoint = _read_as(source, format_, like)
    is_part = any(info.kind == "partial" for info in checkpoint.tensors.values())
    about = about_one(source.path) if is_part else about_part(source.path) if source.is_stored else None
    checkpoint.notes += [about] if about else []
    return checkpoint


def read_part(source: Readable) -> Checkpoint:
    """Return the checkpoint in `source`, a file that :func:`open_part` opened.

    Raises the same errors as :func:`read`.
    """
    return _read_as(source, _format_of(source))


def _format_of(source: Readable) -> Format | None:
    """Return the format that the first bytes of `source` match, or None."""
    head = source.read(0, min(_HEAD, source.size))
    for format_ in _file_formats():
        if format_.looks_like(head):
            return format_
    from ckptconv.formats import plain_pickle
    from ckptconv.formats.foreign.zips_and_pickles import looks_like_pickle

    # protocols 0 and 1, which have no signature
    return plain_pickle if head and looks_like_pickle(source, head) else None


def _read_as(source: Readable, format_: Format | None, like: Checkpoint | None = None) -> Checkpoint:
    """Return the checkpoint in the file `source`, read by `format_`. `like` is as for :func:`read`.

    If `format_` is None, raise an error that says what the file is.
    """
    part = distributed_part_error(source)
    if part:
        raise part
    if format_:
        try:
            checkpoint = torch_zip.read(source, like) if format_ is torch_zip else format_.read(source)
        except ExportedError as unread:
            from ckptconv.formats import exported

            return exported.read(source, UnsupportedError(unread.what, where=unread.where, hint=unread.hint))
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
        return safetensors.read(source)  # its reader raises the error
    raise UnsupportedError(
        "not a checkpoint that this version can read",
        where=source.path,
        expected="a file of torch.save, pickle.dump or safetensors",
        got=f"a file that starts with the bytes {source.read(0, min(8, source.size)).hex(' ')}",
    )
