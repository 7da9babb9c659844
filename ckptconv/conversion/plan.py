"""Plan a conversion: decide everything about the output before the first byte is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path

from ckptconv.byteranges.rounding import needs_torch
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Assemble, Cast, Gather, OutFile, Overflow, Piece, Scaled
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.safe_globals import needed_import
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.checkpoint.weights_only.unpickler import may_have_obstacles
from ckptconv.conversion.options import USUAL, OutputOptions
from ckptconv.conversion.targets import Request
from ckptconv.edits.apply import apply
from ckptconv.edits.changes import Changes
from ckptconv.edits.devices import Devices
from ckptconv.edits.options import Edits
from ckptconv.edits.retag import tags_of, unmatched_rules
from ckptconv.errors import CkptconvError, DangerousError, RefusedError, UsageError, at_path, require_torch, some
from ckptconv.formats import opening, torchscript
from ckptconv.formats.layout import Layout, check_growth
from ckptconv.formats.sharded import index as sharded
from ckptconv.formats.sharded.writing import layout as shards_layout
from ckptconv.formats.torch_zip import is_exported
from ckptconv.formats.writers import DEFAULT, WRITERS, Writer, also_meant, usual_format, words, writer_for
from ckptconv.hints import option
from ckptconv.light_dataclass import dataclass
from ckptconv.output.folders import NewFolder, OtherFile, no_name
from ckptconv.output.transfer import VirtualFile
from ckptconv.pickles.graph import Global
from ckptconv.result import Result
from ckptconv.safety.scan import dangers_carried
from ckptconv.safety.torch_load import CALL, torch_loading
from ckptconv.stores.base import NO_OLD_SET, OldSet
from ckptconv.stores.memory import FileObjectSource


def prove_that_it_loads(file: OutFile, source: Path) -> None:
    """Read the planned `file`, and check that torch would load it. `source` is the input, for errors.

    Raises RefusedError if torch refuses the file, or if the answer is not known.
    """
    loading = torch_loading(opening.read_file(FileObjectSource(VirtualFile(file))))
    if not loading.loads:
        raise RefusedError(
            f"it cannot be proved that {CALL} loads the output",
            where=source,
            got=some([reason.text for reason in loading.reasons]),
        )


_SHOWN = 5  # dangers in an error
#: How each kind of computed piece is called in errors.
_COMPUTED: dict[type[Piece], str] = {
    Cast: "a cast",
    Gather: "writing out views",
    Assemble: "putting chunks together",
    Scaled: "applying scales",
}


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first byte is written.

    Attributes:
        formats: The formats of the source and of the target.
        target: The file to write, or the folder if `is_folder`.
        is_folder: Whether the target is a folder.
        files: The files to write.
        changes: The changes that the edits made.
        notes: Notes that the report includes.
        ties: Names that the target stores only as texts, each with the name of the tensor that it is tied to.
        left_behind: Objects of the source that the target does not contain.
        others: The files of a folder that are copied unchanged.
        failed: The checkpoints of a folder that cannot be converted, with their errors.
        may_go: Returns whether a file of an old target folder may be deleted. Its argument is the relative path.
        like: The folder whose attributes a new folder gets, or None.
        old: The files of an old set in a store that are deleted.
    """

    formats: tuple[str, str]
    target: Path
    is_folder: bool
    files: tuple[OutFile, ...]
    changes: Changes
    notes: tuple[str, ...]
    ties: tuple[tuple[str, str], ...] = ()
    left_behind: tuple[LeftBehind, ...] = ()
    others: tuple[OtherFile, ...] = ()
    failed: tuple[tuple[Path, CkptconvError], ...] = ()
    may_go: Callable[[str], bool] = no_name
    like: Path | None = None
    old: OldSet = NO_OLD_SET

    @property
    def size(self) -> int:
        """The sum of the sizes of all files, in bytes."""
        return sum(file.size for file in self.files) + sum(other.size for other in self.others)

    def as_new(self) -> NewFolder:
        """Return the description of the output for the module that writes files and folders."""
        return NewFolder(self.target, self.files, self.others, self.may_go, self.like, self.is_folder)


@dataclass(frozen=True)
class InPlace:
    """How a file was changed in place.

    Attributes:
        way: ``same size`` if the new bytes replace the old pickle or header, ``appended`` if the file grew, ``nothing``
            if there was nothing to change.
        nbytes: The number of bytes that were written, or in a dry run would be.
        journal: The path of the undo journal, or None if none was kept.
    """

    way: str
    nbytes: int
    journal: str | None


@dataclass(frozen=True)
class Verified:
    """The checks that ``verify=True`` made, all of them successful.

    Attributes:
        records: The number of records of the input that have a checksum in the file.
        nbytes: The bytes of these records.
        output: Whether the output was read back. False for a change in place, which has no output.
    """

    records: int
    nbytes: int
    output: bool


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The result of a conversion or of a dry run. Sizes are in bytes.

    Attributes:
        src: The input.
        dst: The output.
        formats: The formats of the input and of the output.
        size: The size of the output.
        changes: The changes that the edits made to devices, names, dtypes and others.
        ties: Names that the output stores only as texts, each with the name of the tensor that it is tied to.
        left_behind: Objects of the input that the output does not contain.
        notes: Further remarks.
        seconds: How long the conversion took.
        written: Whether something was written. False in a dry run.
        overflowed: The number of elements that were too large for their new dtype, by the paths of the tensors that
            share their storage. Known only after writing.
        files: The names of the files in an output folder, with their sizes.
        failed: The checkpoints of a folder that could not be converted, with their errors.
        in_place: How the input itself was changed, or None.
        verified: The checks of ``verify=True``, or None.
        direct: Whether the output was written with direct I/O, without the page cache.
    """

    src: str
    dst: str
    formats: tuple[str, str]
    size: int
    changes: Changes
    ties: tuple[tuple[str, str], ...] = ()
    left_behind: tuple[LeftBehind, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    written: bool = False
    overflowed: Overflow = field(default_factory=dict)
    files: tuple[tuple[str, int], ...] = ()
    failed: tuple[tuple[str, CkptconvError], ...] = ()
    in_place: InPlace | None = None
    verified: Verified | None = None
    direct: bool = False
    _drawn_by = "report"

    @property
    def changed(self) -> bool:
        """Whether the output differs from the input in content or format."""
        changes = self.changes
        edited = changes.devices or changes.names or changes.dtypes or changes.compacted.storages or changes.made_plain
        followed = changes.regrouped or changes.optimizers or changes.reordered
        return bool(edited or followed or self.left_behind or self.formats[0] != self.formats[1])

    @property
    def nbytes(self) -> int:
        """The number of bytes that were written, or in a dry run would be."""
        return self.in_place.nbytes if self.in_place else self.size


def make_plan(
    checkpoint: Checkpoint,
    path: Path,
    edits: Edits,
    output: OutputOptions = USUAL,
    *,
    usual: str = DEFAULT.word,
    is_folder: bool = False,
) -> Plan:
    """Edit `checkpoint`, and plan the output. Nothing is written.

    Args:
        checkpoint: The checkpoint, which is changed by the edits.
        path: The output.
        edits: The edits.
        output: The options of the output.
        usual: The format, if `output` names none.
        is_folder: Whether `path` is a folder, for new shards or those of the source.

    Raises:
        CkptconvError: The edits or options do not fit the checkpoint.
    """
    if path.suffix == ".pt2" and is_exported(checkpoint):
        return _program_plan(checkpoint, path, edits, output)
    writer = WRITERS[output.format or usual]
    is_loadable = (edits.loadable or edits.loadable_objects) and writer.objects
    _check_writer(writer, path, copy_tied=output.copy_tied, loadable=is_loadable, is_folder=is_folder)
    torchscript.refuse(checkpoint, weights=edits.state_dict or not writer.objects)
    notes = _about_edits(checkpoint, edits, writer)
    edits = _edits_for(writer, edits, in_shards=is_folder and output.max_shard_size is not None)
    with ExitStack() as opened:
        like, model = _beside(edits.like, opened), _beside(edits.model, opened)
        changes = apply(checkpoint, edits, is_emitted=writer.objects, like=like, model=model)
    if writer.objects and not output.allow_unsafe:
        refuse_dangers(checkpoint, as_archive=writer.records and not is_exported(checkpoint))
    if writer.safe_loader:
        notes += _about_code(checkpoint)
    if not checkpoint.is_byteorder_said and (checkpoint.format != writer.name or changes.dtypes):
        notes.append("the file does not record its byte order; it was read as little-endian")
    if is_folder and not writer.is_folder:
        layout = shards_layout(
            checkpoint, path, writer, copy_tied=output.copy_tied, max_shard_size=output.max_shard_size
        )
    else:
        layout = writer.lay_out(checkpoint, path, copy_tied=output.copy_tied, ranks=output.ranks)
    _check_layout(layout, checkpoint, writer, is_loadable=is_loadable)
    is_set = len(layout.files) > 1 and not writer.is_folder
    return Plan(
        formats=(checkpoint.format, f"{sharded.NAME} {writer.name}" if is_set else writer.name),
        target=path,
        is_folder=is_folder,
        files=tuple(replace(file, mode=checkpoint.source.mode) for file in layout.files),
        changes=changes,
        ties=layout.ties,
        left_behind=(*changes.left_behind, *layout.left_behind, *checkpoint.unused),
        notes=(*checkpoint.notes, *changes.notes, *layout.notes, *notes),
    )


def _program_plan(checkpoint: Checkpoint, path: Path, edits: Edits, output: OutputOptions) -> Plan:
    """Plan the archive at `path` with the program of `checkpoint`, as :func:`make_plan` does."""
    from ckptconv.conversion.programs import plan_program  # lazily, for start-up

    layout, changes = plan_program(checkpoint, path, edits if output.format in (None, DEFAULT.word) else None)
    if not output.allow_unsafe:
        refuse_dangers(checkpoint, as_archive=True)
    return Plan(
        formats=(checkpoint.format, checkpoint.format),
        target=path,
        is_folder=False,
        files=tuple(replace(file, mode=checkpoint.source.mode) for file in layout.files),
        changes=changes,
        notes=(*checkpoint.notes, *changes.notes),
    )


def _check_layout(layout: Layout, checkpoint: Checkpoint, writer: Writer, *, is_loadable: bool) -> None:
    """Check the planned files: their sizes, whether torch is installed if they need it, and whether torch loads them.

    The last check is made only if `is_loadable`, after the graph of `checkpoint` is freed. Raises LimitError,
    MissingTorchError or RefusedError.
    """
    check_growth(layout.files, checkpoint, keeps_views=writer.views)
    computed = dict.fromkeys(type(piece) for file in layout.files for piece in file.pieces if needs_torch(piece))
    if computed:
        require_torch(" and ".join(_COMPUTED[kind] for kind in computed), checkpoint.source.path)
    if is_loadable:
        checkpoint.forget_graph()  # the proof reads the graph of the output
        for file in () if writer.is_folder else layout.files:  # its layout refuses what the safe loader refuses
            prove_that_it_loads(file, checkpoint.source.path)


def _beside(path: str | None, opened: ExitStack) -> Checkpoint | None:
    """Read the checkpoint at `path`, which an option names. Return None if `path` is None.

    `opened` closes its source.
    """
    return None if path is None else opening.read(opened.enter_context(opening.open_input(path)))


def _check_writer(writer: Writer, path: Path, *, copy_tied: bool, loadable: bool, is_folder: bool) -> None:
    """Raise UsageError if an option has no meaning for the format of `writer`, or if the format needs a folder."""
    if writer.is_folder and not is_folder:
        raise UsageError(option("format", writer.word) + ": the output must be a folder", where=path)
    if copy_tied and writer.ties:
        why = f" is only for {words('ties', holds=False)}; torch's format keeps ties"
        raise UsageError(option("copy_tied") + why, where=path)
    if loadable and not writer.safe_loader:
        raise UsageError(
            option("loadable") + f" is for torch.load, which does not read {writer.name}",
            where=path,
            hint=option("format", DEFAULT.word) + " writes a file that it reads",
        )


def read_and_plan(source: Readable, request: Request) -> Plan:
    """Read the checkpoint in `source`, and return :func:`make_plan` for it and `request`.

    If neither an option nor the suffix of the output determines the format, the format of the source is used. If the
    suffix allows another format too, a note tells how to choose it.
    """
    path, output, is_folder = request.dst, request.output, request.is_folder
    checkpoint, selected = opening.read_selected(source, request.edits.select)
    edits = request.edits if selected == request.edits.select else replace(request.edits, select=selected)
    shards = writer_for(objects=not checkpoint.is_state_dict).word
    usual = shards if is_folder else usual_format(path.name, checkpoint.format)
    plan = make_plan(checkpoint, path, edits, output, usual=usual, is_folder=is_folder)
    also = None if is_folder or output.format else also_meant(path.name, usual)
    if also is None:
        return plan
    other = f"{path.name} is a {WRITERS[usual].name}; " + option("format", also.word) + f" writes {also.about}"
    return replace(plan, notes=(*plan.notes, other))


def report_of(
    plan: Plan,
    source: Readable,
    *,
    seconds: float,
    written: bool,
    overflowed: Overflow | None = None,
    verified: Verified | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Return the report about `plan` for the input `source`.

    Args:
        plan: The complete plan.
        source: The input.
        seconds: How long the conversion took.
        written: Whether the plan was carried out.
        overflowed: The numbers that were too large for their new dtype, counted while writing.
        verified: The checks that were made.
        notes: More notes.
    """
    inside: list[OutFile | OtherFile] = []
    if plan.is_folder:
        inside = [*plan.files, *(other for other in plan.others if other.kind == "file")]
    return Report(
        src=str(source.path),
        dst=str(plan.target),
        formats=plan.formats,
        size=plan.size,
        changes=plan.changes,
        ties=plan.ties,
        left_behind=plan.left_behind,
        notes=(*plan.notes, *_about_rounding(plan.changes, overflowed), *notes),
        seconds=seconds,
        written=written,
        overflowed=overflowed or {},
        files=tuple((str(file.path.relative_to(plan.target)), file.size) for file in inside),
        failed=tuple((str(path), error) for path, error in plan.failed),
        verified=verified,
        direct=any(file.direct for file in plan.files),
    )


def _about_rounding(changes: Changes, overflowed: Overflow | None) -> list[str]:
    """Return a list with the version of torch in a note, if numbers overflowed in a cast to float8_e4m3fn.

    Versions of torch differ in the result of such a cast. Otherwise the list is empty.
    """
    torch = sys.modules.get("torch")
    if torch is None or not overflowed or all(new != "float8_e4m3fn" for _, new in changes.dtypes):
        return []
    return [
        f"cast with torch {torch.__version__}: numbers too large for float8_e4m3fn become NaN in some versions of"
        " torch, and the largest number in others"
    ]


def _edits_for(writer: Writer, edits: Edits, *, in_shards: bool) -> Edits:
    """Return `edits` without those that the format of `writer` cannot store, and with those that it needs.

    For shards (`in_shards`) and formats without objects, ``state_dict`` is set.
    """
    if writer.objects and writer.devices and writer.views and not in_shards:
        return edits
    return replace(
        edits,
        state_dict=edits.state_dict or in_shards or not writer.objects,
        devices=edits.devices if writer.devices else Devices(),
        compact=edits.compact and writer.views,
        loadable=edits.loadable and writer.objects,
        loadable_objects=edits.loadable_objects and writer.objects,
    )


def _about_edits(checkpoint: Checkpoint, edits: Edits, writer: Writer) -> list[str]:
    """Return notes about edits that have no effect, and devices that are lost, because of the format of `writer`."""
    notes = []
    if edits.devices and not writer.devices:
        unmatched_rules(checkpoint, edits.devices, tags_of(checkpoint))  # a typo is an error for every format
        notes.append(f"no device was changed: {writer.name} stores none; the device is chosen when the file is loaded")
    elif not writer.devices and (tags := tags_of(checkpoint) - {"cpu"}):
        lost = ", ".join(sorted(tags))
        notes.append(f"{writer.name} stores no device ({lost} here); the device is chosen when the file is loaded")
    if (edits.loadable or edits.loadable_objects) and not writer.objects:
        notes.append(option("loadable") + f" has no effect on {writer.name}, which contains only tensors")
    if edits.compact and not writer.views:
        notes.append(option("compact") + f" has no effect on {writer.name}, which stores only bytes that tensors use")
    return notes


def _about_code(checkpoint: Checkpoint) -> list[str]:
    """Return a note if ``torch.load(weights_only=True)`` refuses the output, or needs an import first.

    Return an empty list otherwise.
    """
    obstacles = checkpoint.index.obstacles if may_have_obstacles(checkpoint.graph) else []
    found = dict.fromkeys(f"its {node}" if isinstance(node, Global) else reason for reason, node in obstacles)
    if not found:
        return []
    first, *others = found
    needed = {needed_import(name.removeprefix("its ")) for name in found}
    if None not in needed:
        return [f"torch.load(weights_only=True) loads the output only after `import {', '.join(map(str, needed))}`"]
    more = f" and {len(others):,} more" if others else ""
    return [f"torch.load(weights_only=True) refuses the output because of {first}{more}; inspect shows what to do"]


def refuse_dangers(checkpoint: Checkpoint, *, as_archive: bool) -> None:
    """Raise DangerousError if the output would contain a dangerous call or a pickle that cannot be judged.

    `as_archive` tells whether the output is a zip archive, which also keeps records other than the main pickle.
    """
    found = dangers_carried(checkpoint, as_archive=as_archive)
    dangers = [concern for concern in found if concern.dangerous]
    if found:
        raise DangerousError(
            (
                "loading this file may run functions that no checkpoint needs"
                if dangers
                else "this file contains pickles that cannot be checked"
            ),
            where=checkpoint.source.path,
            got=some([each.name + at_path(each.path) for each in dangers or found], _SHOWN),
            hint=(
                "do not load it; " + option("allow_unsafe") + " copies the call without running it"
                if dangers
                else option("allow_unsafe") + " copies them unchanged"
            ),
        )
