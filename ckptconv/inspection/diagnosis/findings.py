"""Issues and their fixes as data, and the command for a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PickledModule
from ckptconv.checkpoint.state_dicts import NamedOptimizer, StateDict
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.conversion.target_names import Found, name_in_folder
from ckptconv.formats.sharded import index as sharded
from ckptconv.formats.writers import WRITERS, suffix_of, usual_format, writer_for
from ckptconv.hints import Option, command_line, placed
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.light_dataclass import dataclass

#: The kinds of findings whose answer depends on the version of torch.
BY_RULES = ("code", "container", "import", "legacy", "opcodes")
#: The kinds of findings because of which it is not known whether the file loads.
OPEN = ("device", "not known")
SHOWN = 3  # unknown classes that get a line each


@dataclass(frozen=True)
class Advice:
    """A finding about loading a checkpoint.

    Attributes:
        kind: A word for programs.
        blocks: Whether ``torch.load`` would fail here.
        text: The finding, in one line.
        command: The command that corrects it, or None.
    """

    kind: str
    blocks: bool
    text: str
    command: str | None


@dataclass(frozen=True)
class Diagnosis:
    """The result of :func:`~ckptconv.inspection.diagnosis.diagnose.diagnose`.

    Attributes:
        findings: The findings. Those that block come first.
        remedy: One command that corrects several findings at the same time. None if the command of a finding is enough.
        other_torch: The version of torch on that machine if its rules are not known. Otherwise None.
    """

    findings: list[Advice]
    remedy: str | None
    other_torch: str | None = None

    @property
    def loads_here(self) -> bool | None:
        """Whether ``torch.load`` would load the file on that machine, or None if that is not known.

        It is not known for devices that only torch could detect, for objects whose construction by torch is not
        modelled, and for a version of torch whose rules are not known.
        """
        blocking = [advice.kind for advice in self.findings if advice.blocks]
        if any(kind not in BY_RULES for kind in blocking):
            return False
        if self.other_torch or any(advice.kind in OPEN for advice in self.findings):
            return None
        return not blocking


@dataclass(frozen=True)
class Fix:
    """A conversion that corrects an issue.

    Attributes:
        suffix: The text between the name of the source and the file suffix in the name of the output, such as "-cpu".
        part: Options that select a part of the checkpoint.
        names: Options that change names.
        to_cpu: Whether all tensors go to the CPU.
        maps: New tags for some tags.
        compact: Whether unused bytes of storages are removed.
        format: The word for the format of the output, or None for the default.
    """

    suffix: str
    part: tuple[Option, ...] = ()
    names: tuple[Option, ...] = ()
    to_cpu: bool = False
    maps: dict[str, str] = field(default_factory=dict)
    compact: bool = False
    format: str | None = None

    @property
    def is_any(self) -> bool:
        """Whether every conversion of the complete file corrects the issue."""
        return not self.options and self.format is None

    @property
    def options(self) -> tuple[Option, ...]:
        """The options of ``convert`` for this fix."""
        devices = "cpu" if self.to_cpu else tuple(self.maps.items())
        others = {"map_location": devices, "compact": self.compact}
        return (*self.part, *self.names, *(Option(name, value) for name, value in others.items() if value))


@dataclass(frozen=True)
class Issue:
    """A finding, and the conversion that corrects it, or None."""

    kind: str
    text: str
    fix: Fix | None = None
    blocks: bool = False


@dataclass(frozen=True)
class Scope:
    """A checkpoint, or a part of it, and the machine on which it is loaded.

    Attributes:
        checkpoint: The checkpoint.
        host: The machine.
        reach: The ids of the nodes in the part, or None for the complete checkpoint.
        module: The pickled module, if the part is its state dict. Otherwise None.
    """

    checkpoint: Checkpoint
    host: Host
    reach: set[int] | None = None
    module: PickledModule | None = None

    @cached_property
    def storages(self) -> list[Storage]:
        """The storages of the part, without repetitions."""
        references = self.checkpoint.references
        return list(dict.fromkeys(r.storage for r in references if self.reach is None or id(r.node) in self.reach))

    def named(self) -> Sequence[StateDict | NamedOptimizer | PickledModule]:
        """Return the objects with names: the module, or the state dicts in the part, or the optimizers without any of
        these.
        """
        if self.module is not None:
            return [self.module]
        if self.reach is None:
            return self.checkpoint.detected.state_dicts or self.checkpoint.detected.optimizers
        return [found for found in self.checkpoint.detected.state_dicts if id(found.node) in self.reach]


def advice(checkpoint: Checkpoint, issue: Issue) -> Advice:
    """Return `issue` with the command that corrects it."""
    line = fix_command(checkpoint, issue.fix) if issue.fix else None
    return Advice(kind=issue.kind, blocks=issue.blocks, text=issue.text, command=line)


def with_names_apart(issues: list[Issue]) -> list[Issue]:
    """Return `issues` with changed suffixes, so that different fixes have different outputs."""
    names: dict[tuple[object, ...], str] = {}
    apart = []
    for issue in issues:
        fix = issue.fix
        if fix:
            does = (*fix.options, fix.format)
            while does not in names and fix.suffix in names.values():
                stem, _, number = fix.suffix.rpartition("-")
                fix = replace(
                    fix, suffix=f"{stem}-{int(number) + 1}" if stem and number.isdecimal() else f"{fix.suffix}-2"
                )
            fix = replace(fix, suffix=names.setdefault(does, fix.suffix))
        apart.append(replace(issue, fix=fix))
    return apart


def together(fixes: list[Fix]) -> Fix:
    """Return one fix that does all of `fixes`. If two of them map the same tag, the later one wins."""
    return Fix(
        "-fixed",
        part=tuple(option for part in dict.fromkeys(fix.part for fix in fixes) for option in part),
        names=tuple(option for fix in fixes for option in fix.names),
        to_cpu=any(fix.to_cpu for fix in fixes),
        maps={old: new for fix in fixes for old, new in fix.maps.items()},
    )


def fix_command(checkpoint: Checkpoint, fix: Fix) -> str:
    """Return the ``ckptconv convert`` command for `fix`. The output is in the current folder."""
    path = Path(placed(checkpoint.source.path))
    writer = WRITERS[fix.format] if fix.format else writer_for(objects=not checkpoint.is_state_dict)
    is_set = checkpoint.source.is_folder
    target = name_in_folder(Found(path, "shards" if is_set else "file", ()), None, is_folder=True) + fix.suffix
    in_shards = checkpoint.format.startswith(sharded.NAME) and fix.format is None and not fix.part
    if not in_shards:
        suffix = "" if is_set else suffix_of(path.name)
        kept = suffix and usual_format(path.name, checkpoint.format) == writer.word
        target += suffix if kept else writer.new_suffix
    return command_line("convert", path, Path(target), *fix.options)
