"""``open``, ``load`` and ``save``: checkpoint files from Python.

What needs torch imports it when it is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckptconv.checkpoint.effect_order import drop_effect_order
from ckptconv.checkpoint.model import Checkpoint, TensorInfo
from ckptconv.conversion.convert import write
from ckptconv.conversion.plan import Report, make_plan, report_of
from ckptconv.conversion.targets import find_target
from ckptconv.edits.apply import apply
from ckptconv.edits.devices import MapLocation
from ckptconv.edits.dtype_rules import DTypeLike
from ckptconv.edits.options import edits_from
from ckptconv.errors import NoMatchError, UsageError
from ckptconv.formats import opening, torchscript
from ckptconv.formats.opening import open_input
from ckptconv.hints import for_python
from ckptconv.output import files as output_files
from ckptconv.pickles.graph import gc_paused, subgraph

if TYPE_CHECKING:
    import torch

    from ckptconv.tensors.loading import LoadLocation

__all__ = ["CheckpointFile", "load", "open", "save"]


def open(path: str | os.PathLike[str]) -> CheckpointFile:
    """The checkpoint at PATH, to look into and to take single tensors from.

    Reads headers and the pickle; use it with ``with``.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError` where there is none.
    """
    return CheckpointFile(path)


class CheckpointFile:
    """An open checkpoint. Nothing of a tensor is in memory until :meth:`load` is asked for it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = open_input(path)
        self._is_closed = False
        try:
            with gc_paused():
                self._checkpoint = opening.read(self._source)
        except BaseException:
            self._source.close()
            raise
        tensors = self._checkpoint.tensor_nodes
        self._references = {id(reference.node): reference for reference in self._checkpoint.references}
        self._places = {place.path: place for place in self._checkpoint.places if id(place.node) in tensors}

    @property
    def path(self) -> Path:
        """Where it is."""
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

    def load(self, path: str) -> torch.Tensor:
        """The tensor at PATH, on the CPU, as torch would load it: dtype, shape, stride, ``requires_grad``,
        ``Parameter``. Each call reads it anew.

        Raises NoMatchError where no tensor stands there, UnsupportedError where it is made by
        code that torch's safe loader refuses.
        """
        from ckptconv.tensors.loading import load_checkpoint

        if self._is_closed:
            raise UsageError("the checkpoint is closed", where=self.path, hint="load its tensors inside the with block")
        tensor: torch.Tensor = load_checkpoint(self._part(path), "cpu", whole=False)
        self._source.check_unchanged()
        return tensor

    def _part(self, path: str) -> Checkpoint:
        """The tensor at PATH as a checkpoint of its own, on the same nodes."""
        if not isinstance(path, str):
            raise TypeError(
                f"a tensor is loaded by its path, such as {next(iter(self._places), 'weight')!r}, not by {path!r}"
            )
        if path not in self._places:
            raise NoMatchError(f"no tensor stands at {path}", where=self.path, expected=_near(path, self._places))
        node = self._places[path].node
        graph = subgraph(self._checkpoint.graph, node)
        references = [self._references[id(each)] for each in graph.references]
        drop_effect_order(graph)
        return replace(
            self._checkpoint,
            graph=graph,
            storages={reference.storage.key: reference.storage for reference in references},
            references=references,
            device_arguments=[],  # they go where map_location says
        )

    def close(self) -> None:
        """Let the file go."""
        self._is_closed = True
        self._source.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self.tensors):,} tensors"
        return f"<CheckpointFile {str(self.path)!r}: {self.format}, {state}>"

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _near(path: str, paths: Iterable[str]) -> str | None:
    """The path that was probably meant."""
    from difflib import get_close_matches

    every = list(paths)
    ending = [each for each in every if each.endswith("/" + path)]
    close = ending or get_close_matches(path, every, n=1) or every
    return f"a path like {close[0]}" if close else None


@for_python
def load(
    path: str | os.PathLike[str],
    map_location: LoadLocation | None = None,
    *,
    state_dict: bool = False,
    select: str | None = None,
    strip_prefix: str | Iterable[str] = (),
) -> Any:
    """What ``torch.load(path, map_location, weights_only=True)`` gives, from any container that ckptconv reads.

    Nothing in the file is run.

    ``map_location`` is what torch takes (a device, a mapping of tags, a function of storage and tag), and what
    :func:`ckptconv.convert` takes (families, ``'any'``, a function of the tag alone); ``'auto'`` is the GPU if there is
    one, else the CPU. A device without an index is torch's current one; states of random generators move with all
    others, as torch does it. ``state_dict``: the state dict alone, wherever it is. ``select``: the part at that path,
    such as ``ema/model``. ``strip_prefix``: prefixes to take off names, such as ``module.``. Of a file that needs
    unknown classes, a part without them loads by either of the two.

    Raises :class:`~ckptconv.errors.DeviceUnavailable` where tensors would go to a device that torch does not have here,
    :class:`~ckptconv.errors.UnsupportedError` where code would be needed, and other subclasses of
    :class:`~ckptconv.errors.CkptconvError`.
    """
    edits = edits_from(state_dict=state_dict, select=select, strip_prefix=strip_prefix)
    with open_input(path) as source:
        with gc_paused():
            checkpoint = opening.read(source)
            torchscript.refuse(checkpoint, weights=state_dict)
            apply(checkpoint, edits)
        from ckptconv.tensors.loading import load_checkpoint

        loaded = load_checkpoint(checkpoint, map_location)
        source.check_unchanged()
        return loaded


@for_python
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation | None = None,
    state_dict: bool = False,
    select: str | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    unwrap: bool = False,
    strip_prefix: str | Iterable[str] = (),
    rename: Iterable[tuple[str, str]] = (),
    add_prefix: str | Iterable[str] = (),
    dtype: DTypeLike | None = None,
    compact: bool = False,
    format: Literal["pt", "legacy", "pickle", "safetensors"] | None = None,
    copy_tied: bool = False,
    force: bool = True,
    verify: bool = False,
    allow_unsafe: bool = False,
) -> Report:
    """Write OBJ, whatever ``torch.save`` takes, to PATH: ``.safetensors`` by its suffix, else torch's zip format.

    PATH is replaced when the new file is whole, and not before.

    The keywords are those of :func:`ckptconv.convert`; ``map_location`` changes what the file says, no
    tensor moves. ``force=False``: PATH must not exist. Tensors on a GPU are copied to the CPU 4 MiB at a
    time, others are written from where they are.

    Raises a subclass of :class:`~ckptconv.errors.CkptconvError`, PATH is then as it was; and what pickling OBJ raises.
    """
    started = time.monotonic()
    edits = edits_from(
        map_location=map_location,
        state_dict=state_dict,
        select=select,
        include=include,
        exclude=exclude,
        unwrap=unwrap,
        strip_prefix=strip_prefix,
        rename=rename,
        add_prefix=add_prefix,
        dtype=dtype,
        compact=compact,
    )
    path = os.fsdecode(path)
    if os.path.isdir(path) or path.endswith(os.sep):
        raise UsageError("the output is a folder", where=path, expected="the path of a file")
    target, meant = find_target(Path(), path, format)
    format_ = meant or "pt"
    output_files.check_target(target, replace=force)
    from ckptconv.tensors.saving import checkpoint_of_object

    with gc_paused():
        checkpoint = checkpoint_of_object(obj)
        plan = make_plan(checkpoint, target, edits, format=format_, copy_tied=copy_tied, allow_unsafe=allow_unsafe)
    overflowed = write(plan, checkpoint.source, replace=force, verify=verify)
    return report_of(plan, checkpoint.source, seconds=time.monotonic() - started, written=True, overflowed=overflowed)
