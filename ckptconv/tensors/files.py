"""``open``, ``load`` and ``save``: checkpoint files from Python.

What needs torch imports it when it is called.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from ckptconv.byteranges.file_objects import Input, is_file_object, path_of
from ckptconv.byteranges.given_paths import path_at
from ckptconv.byteranges.sources import Readable, is_url
from ckptconv.checkpoint.effect_order import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint, TensorInfo
from ckptconv.conversion.convert import write
from ckptconv.conversion.folder_plans import FolderPlan
from ckptconv.conversion.options import OutputOptions, SaveOptions, takes
from ckptconv.conversion.plan import Report, Verified, make_plan, report_of
from ckptconv.conversion.targets import find_target
from ckptconv.edits.apply import apply
from ckptconv.edits.options import edits_from
from ckptconv.errors import ArgumentTypeError, NoMatchError, UsageError, count, require_torch
from ckptconv.formats import opening, torchscript
from ckptconv.formats.opening import open_input
from ckptconv.guesses import close_matches
from ckptconv.hints import for_python, in_python
from ckptconv.output import far_targets
from ckptconv.output import files as output_files
from ckptconv.output.destinations import FileObjectDestination, Output
from ckptconv.pickles.graph import gc_paused

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ckptconv.tensors.loading import LoadLocation

__all__ = ["CheckpointFile", "load", "open", "save"]


@for_python
def open(path: Input, *, download: bool = False) -> CheckpointFile:
    """The checkpoint at `path`, to look into and to take single tensors from.

    Args:
        path: A file, a sharded set or a folder of torch.distributed.checkpoint. Headers and the pickle are read. Or a
            binary file object that can seek, such as an io.BytesIO: all of it from its byte 0 on, wherever its position
            is. That is put back behind each reading, and the object stays open.
        download: Of a URL, as for :func:`ckptconv.convert`.

    Returns:
        The open checkpoint, for ``with``.

    Raises:
        CkptconvError: One of its subclasses, where there is none.
    """
    return CheckpointFile(path, download=download)


class CheckpointFile:
    """An open checkpoint. Nothing of a tensor is in memory until :meth:`load` is asked for it."""

    @for_python
    def __init__(self, path: Input, *, download: bool = False) -> None:
        self._source = open_input(path, download=download)
        self._is_closed = False
        try:
            with gc_paused():
                self._checkpoint, _ = _read(self._source)
        except BaseException:
            self._source.close()
            raise
        tensors = self._checkpoint.tensor_nodes
        self._places = {place.path: place for place in self._checkpoint.places if id(place.node) in tensors}

    @property
    def path(self) -> Path:
        """Where it is; of a file object, what it is called."""
        return self._source.path

    @property
    def format(self) -> str:
        """Its container: ``torch zip``, ``safetensors``."""
        return self._checkpoint.format

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by path (``state_dict/conv.weight``), in the file's order: dtype, shape and stride in elements,
        device, sizes in bytes, ties.
        """
        return MappingProxyType(self._checkpoint.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts that a safetensors file has beside its tensors."""
        return MappingProxyType(self._checkpoint.metadata)

    @for_python
    def load(self, path: str) -> torch.Tensor:
        """Load one tensor. Each call reads it anew.

        Args:
            path: Where it stands, as :attr:`tensors` says it.

        Returns:
            The tensor on the CPU, as torch would load it: dtype, shape, stride, ``requires_grad``, ``Parameter``.

        Raises:
            NoMatchError: No tensor stands there.
            UnsupportedError: It is made by code that torch's safe loader refuses.
        """
        require_torch("loading a tensor", self.path)
        from ckptconv.tensors.loading import load_checkpoint

        if self._is_closed:
            raise UsageError("the checkpoint is closed", where=self.path, hint="load its tensors inside the with block")
        tensor: torch.Tensor = load_checkpoint(self._part(path), "cpu", whole=False)
        self._source.check_unchanged()
        return tensor

    def _part(self, path: str) -> Checkpoint:
        """The tensor at `path` as a checkpoint of its own, on the same nodes."""
        if not isinstance(path, str):
            raise ArgumentTypeError(
                f"a tensor is loaded by its path, such as {next(iter(self._places), 'weight')!r}, not by {path!r}"
            )
        if path not in self._places:
            raise NoMatchError(f"no tensor stands at {path}", where=self.path, expected=_near(path, self._places))
        part = self._checkpoint.part(self._places[path])
        drop_effect_order(part)
        return part

    def close(self) -> None:
        """Let the file go."""
        self._is_closed = True
        self._source.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else count(len(self.tensors), "tensor")
        return f"<CheckpointFile {str(self.path)!r}: {self.format}, {state}>"

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _near(path: str, paths: Iterable[str]) -> str | None:
    """The path that was probably meant."""
    every = list(paths)
    ending = [each for each in every if each.endswith("/" + path)]
    close = ending or close_matches(path, every, n=1) or every
    return f"a path like {close[0]}" if close else None


@for_python
def load(
    path: Input,
    map_location: LoadLocation | None = None,
    *,
    state_dict: bool = False,
    select: str | None = None,
    strip_prefix: str | Iterable[str] = (),
    loadable: bool = False,
    download: bool = False,
) -> Any:
    """What ``torch.load(path, map_location, weights_only=True)`` gives, from any container.

    Nothing in the file is run. Of a file that needs unknown classes, a part without them loads by `state_dict` or
    `select`.

    Args:
        path: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`open`.
        map_location: What torch takes (a device, a mapping of tags, a function of storage and tag), and what
            :func:`ckptconv.convert` takes (families, ``'any'``, a function of the tag alone); ``'auto'`` is the GPU if
            there is one, else the CPU. A device without an index is torch's current one; states of random generators
            move with all others, as torch does it.
        state_dict: Take the state dict alone, wherever it is.
        select: The path of the part to take, such as ``ema/model``.
        strip_prefix: Prefixes to take off the start of names, such as ``module.``.
        loadable: Make plain what is only data, as :func:`ckptconv.convert` does, and load all of it.
        download: Of a URL, as for :func:`ckptconv.convert`.

    Returns:
        The object, with real tensors. Of a safetensors file also the tied names that its metadata records, which
        ``load_file`` leaves out: ``load_state_dict`` takes that for models that tie them and for models that do not.

    Raises:
        DeviceUnavailable: Tensors would go to a device that torch does not have here.
        UnsupportedError: Code would be needed.
        CkptconvError: Another of its subclasses.
    """
    require_torch("loading tensors", path_of(path))
    edits = edits_from(state_dict=state_dict, select=select, strip_prefix=strip_prefix, loadable=loadable)
    with open_input(path, download=download) as source:
        with gc_paused():
            checkpoint, selected = _read(source, edits.select)
            torchscript.refuse(checkpoint, weights=state_dict)
            apply(checkpoint, replace(edits, select=selected))
        for text in checkpoint.warnings:
            warnings.warn(f"{source.path}: {text}", stacklevel=2)
        from ckptconv.tensors.loading import load_checkpoint

        loaded = load_checkpoint(checkpoint, map_location)
        source.check_unchanged()
        return loaded


def _read(source: Readable, select: str | None = None) -> tuple[Checkpoint, str | None]:
    """Return what :func:`ckptconv.formats.opening.read_selected` does; warn if a change in place was interrupted."""
    found = opening.read_selected(source, select)
    if said := opening.interrupted(source):
        warnings.warn(in_python(said), UserWarning, stacklevel=4)
    return found


@for_python
@takes(SaveOptions, force=True)
def save(obj: object, path: Output, **options: Unpack[SaveOptions]) -> Report:
    """Write `obj` to `path`, which is replaced when the new file is whole, and not before.

    Tensors on a GPU are copied to the CPU 4 MiB at a time, others are written from where they are.

    Args:
        obj: Whatever ``torch.save`` takes.
        path: A file, here or in S3: ``.safetensors`` by its suffix, else torch's zip format. Or a binary file object
            that can seek, whose ``name``, if it has one, says the format as a path does: it is written from its
            position on, stays open, and its position is then behind what was written, as with ``torch.save``; where
            writing it fails, what was written until then stays.
        **options: The keys of :class:`~ckptconv.conversion.options.SaveOptions`.
        force: `path` may exist; False: it must not.

    Returns:
        A report of what was done. `map_location` changes what the file says; no tensor moves.

    Raises:
        CkptconvError: One of its subclasses; `path` is then as it was.
        Exception: What pickling `obj` raises.
    """
    started = time.monotonic()
    require_torch("saving tensors", path_of(path))
    edits, output = edits_from(**options), OutputOptions.of(options)
    out = FileObjectDestination(path) if is_file_object(path) else None
    target, format_ = _target_of(path, output)
    from ckptconv.tensors.saving import checkpoint_of_object

    with gc_paused():
        checkpoint = checkpoint_of_object(obj)
        plan = make_plan(checkpoint, target, edits, replace(output, format=format_))
    if out:
        overflowed = output_files.write_to_object(plan.files[0], out, verify=output.verify)
    else:
        overflowed = write(FolderPlan(plan), checkpoint.source, output)
    seconds = time.monotonic() - started
    verified = Verified(0, 0, output=True) if output.verify else None
    return in_python(
        report_of(plan, checkpoint.source, seconds=seconds, written=True, overflowed=overflowed, verified=verified)
    )


def _target_of(path: Output, output: OutputOptions) -> tuple[Path, str | None]:
    """The file that `path` means, or what a file object is called, and its format. Raises where no file may be."""
    if is_file_object(path):
        name = path_of(path)
        return name, find_target(Path(), name.name, output.format)[1]
    text = os.fsdecode(path)
    if os.path.isdir(text) or text.endswith(os.sep):
        raise UsageError("the output is a folder", where=text, expected="the path of a file")
    target, format_ = find_target(Path(), path_at(path) if is_url(path) else text, output.format)
    if is_url(target):
        far_targets.check_object(target, replace=output.force)
    else:
        output_files.check_target(target, replace=output.force)
    return target, format_
