"""``open``, ``load`` and ``save``: checkpoint files from Python.

Code that needs torch imports it when it is called.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.merging import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.conversion.convert import write
from ckptconv.conversion.options import OutputOptions, SaveOptions, parse_options, takes
from ckptconv.conversion.plan import Report, Verified, make_plan, report_of
from ckptconv.conversion.targets import find_target
from ckptconv.edits.apply import apply
from ckptconv.edits.options import edits_from
from ckptconv.errors import ArgumentTypeError, NoMatchError, UsageError, count, require_torch
from ckptconv.formats import opening, torchscript
from ckptconv.formats.opening import open_input
from ckptconv.guesses import close_matches
from ckptconv.hints import for_python
from ckptconv.pickles.graph import gc_paused
from ckptconv.stores import locate, store_of
from ckptconv.stores.memory import FileObjectDestination, Input, Output, is_file_object, path_of
from ckptconv.system import calls

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ckptconv.tensors.loading import LoadLocation


@for_python
def open(path: Input, *, download: bool = False) -> CheckpointFile:
    """Open the checkpoint at `path`, to inspect it and to load single tensors.

    Only headers and the pickle are read.

    Args:
        path: A file, a sharded set, or a folder of torch.distributed.checkpoint. Or a binary file object that can seek,
            such as an io.BytesIO. It is read from its byte 0, whatever its position. Each read restores the position,
            and the object stays open.
        download: For a URL, as for :func:`ckptconv.convert`.

    Returns:
        The open checkpoint, for a ``with`` statement.

    Raises:
        CkptconvError: One of its subclasses, if there is no checkpoint or it cannot be read.
    """
    return CheckpointFile(path, download=download)


class CheckpointFile:
    """An open checkpoint. The data of a tensor is read only by :meth:`load`."""

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
        """The path or URL of the checkpoint, or the name of the file object."""
        return self._source.path

    @property
    def format(self) -> str:
        """The container, such as ``torch zip`` or ``safetensors``."""
        return self._checkpoint.format

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by path (``state_dict/conv.weight``), in the order of the file.

        Each has its dtype, shape, stride in elements, device, sizes in bytes, and tie.
        """
        return MappingProxyType(self._checkpoint.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts in the header of a safetensors file."""
        return MappingProxyType(self._checkpoint.metadata)

    @for_python
    def load(self, path: str) -> torch.Tensor:
        """Load one tensor. Each call reads the tensor again.

        Args:
            path: The path of the tensor, as in :attr:`tensors`.

        Returns:
            The tensor on the CPU, with the dtype, shape, stride, ``requires_grad`` and class (such as ``Parameter``)
            that torch would load.

        Raises:
            NoMatchError: There is no tensor at this path.
            UsageError: The checkpoint is closed.
            UnsupportedError: Torch's safe loader refuses code that creates the tensor.
        """
        require_torch("loading a tensor", self.path)
        from ckptconv.byteranges import kernels  # noqa: F401 - raises MissingTorchError if torch is broken
        from ckptconv.tensors.loading import load_checkpoint

        if self._is_closed:
            raise UsageError("the checkpoint is closed", where=self.path, hint="load its tensors inside the with block")
        tensor: torch.Tensor = load_checkpoint(self._part(path), "cpu", whole=False)
        self._source.check_unchanged()
        return tensor

    def _part(self, path: str) -> Checkpoint:
        """Return a checkpoint with the same nodes that contains only the tensor at `path`.

        Raises NoMatchError if there is none, and ArgumentTypeError if `path` is not a text.
        """
        if not isinstance(path, str):
            raise ArgumentTypeError(
                f"a tensor is loaded by its path, such as {next(iter(self._places), 'weight')!r}, not by {path!r}"
            )
        if path not in self._places:
            raise NoMatchError(f"there is no tensor at {path}", where=self.path, expected=_near(path, self._places))
        part = self._checkpoint.part(self._places[path])
        drop_effect_order(part)
        return part

    def close(self) -> None:
        """Close the file. A file object stays open."""
        self._is_closed = True
        self._source.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else count(len(self.tensors), "tensor")
        return f"<CheckpointFile {str(self.path)!r}: {self.format}, {state}>"

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _near(path: str, paths: Iterable[str]) -> str | None:
    """Return a text with the most similar of `paths`, or with the first if none is similar.

    Return None if there are no paths.
    """
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
    """Load a checkpoint as real tensors. Needs torch: ``pip install "ckptconv[torch]"``.

    The result is the same as that of ``torch.load(path, map_location, weights_only=True)``, for any container. Nothing
    in the file is executed. If the file needs unknown classes, use `state_dict` or `select` to load a part without
    them.

    Args:
        path: A checkpoint, as for :func:`ckptconv.convert`, or a binary file object, as for :func:`open`.
        map_location: What torch accepts (a device, a mapping of tags, a function of storage and tag), or what
            :func:`ckptconv.convert` accepts (families, ``'any'``, a function of the tag only). ``'auto'`` is the GPU if
            there is one, else the CPU. A device without an index is torch's current one. States of random generators
            move with all other tensors, as in torch.
        state_dict: Load only the state dict, wherever it is.
        select: Load only the object at this path, such as ``ema/model``.
        strip_prefix: Prefixes to remove from the start of names, such as ``module.``.
        loadable: Turn objects that are only data into plain containers, as :func:`ckptconv.convert` does, and load
            everything.
        download: For a URL, as for :func:`ckptconv.convert`.

    Returns:
        The object, with real tensors.

    Raises:
        DeviceUnavailable: Tensors would go to a device that torch does not have here.
        UnsupportedError: Loading would need code.
        CkptconvError: Another of its subclasses.
    """
    require_torch("loading tensors", path_of(path))
    from ckptconv.byteranges import kernels  # noqa: F401 - as above

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
    """Return the result of :func:`ckptconv.formats.opening.read_selected`.

    Warn if a change in place was interrupted.
    """
    found = opening.read_selected(source, select)
    if warning := opening.interrupted(source):
        warnings.warn(warning, UserWarning, stacklevel=4)
    return found


@for_python
@takes(SaveOptions, force=True)
def save(obj: object, path: Output, **options: Unpack[SaveOptions]) -> Report:
    """Write `obj` to `path`. An existing file is replaced only after the new file is complete.

    Tensors on a GPU are copied to the CPU 4 MiB at a time. Other tensors are written directly from memory.

    Args:
        obj: Any object that ``torch.save`` accepts.
        path: A local file or one in S3. The format is safetensors if the suffix is ``.safetensors``, else torch's zip
            format. Or a binary file object that can seek. If it has a ``name``, the name determines the format in the
            same way. It is written from its position on and stays open, and its position is then after the last byte,
            as with ``torch.save``. If writing fails, the bytes written so far stay in it.
        **options: The keys of :class:`~ckptconv.conversion.options.SaveOptions`.
        force: Whether `path` may exist.

    Returns:
        The report. `map_location` changes only the devices in the file, and no tensor moves.

    Raises:
        CkptconvError: One of its subclasses. `path` is then unchanged.
        Exception: The exception that pickling `obj` raises.
    """
    started = time.monotonic()
    require_torch("saving tensors", path_of(path))
    from ckptconv.byteranges import kernels  # noqa: F401 - as above

    edits, output = parse_options(options)
    out = FileObjectDestination(path) if is_file_object(path) else None
    target, format_ = _target_of(path, output)
    from ckptconv.tensors.saving import checkpoint_of_object

    with gc_paused():
        checkpoint = checkpoint_of_object(obj)
        plan = make_plan(checkpoint, target, edits, replace(output, format=format_))
    overflowed = out.write_all(plan.files[0], verify=output.verify) if out else write(plan, checkpoint.source, output)
    seconds = time.monotonic() - started
    verified = Verified(0, 0, output=True) if output.verify else None
    return report_of(plan, checkpoint.source, seconds=seconds, written=True, overflowed=overflowed, verified=verified)


def _target_of(path: Output, output: OutputOptions) -> tuple[Path, str | None]:
    """Return the file to write and its format. The format is None if neither an option nor the suffix determines it.

    For a file object, return its name as the path. Raises UsageError if `path` is a folder, and another CkptconvError
    if it may not be written.
    """
    if is_file_object(path):
        name = path_of(path)
        return name, find_target(Path(), name.name, output.format)[1]
    text = os.fsdecode(path)
    if os.path.isdir(text) or text.endswith(calls.SEPARATORS):
        raise UsageError("the output is a folder", where=text, expected="the path of a file")
    target, format_ = find_target(Path(), text and locate(path), output.format)  # "" is no path
    store_of(target, writing=True).check_target(target, replace=output.force)
    return target, format_
