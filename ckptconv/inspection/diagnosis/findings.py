"""Issues and their fixes as data, and the command line of a fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PickledModule
from ckptconv.checkpoint.state_dicts import NamedOptimizer, StateDict
from ckptconv.checkpoint.tensor_info import Storage
from ckptconv.conversion.target_names import Found, name_in_folder
from ckptconv.errors import some
from ckptconv.formats.sharded import index as sharded
from ckptconv.formats.writers import WRITERS, suffix_of, usual_format, writer_for
from ckptconv.hints import Option, command_line, placed
from ckptconv.inspection.diagnosis.host import Host
from ckptconv.light_dataclass import dataclass

#: Kinds of findings in the way that are those of one version of torch.
BY_RULES = ("code", "container", "import", "legacy", "opcodes")
#: Kinds of findings that leave open whether the file loads.
OPEN = ("device", "not known")
SHOWN = 3  # words of a list, unknown classes that get a line each


@dataclass(frozen=True)
class Advice:
    """Something to know before loading the file, in a line, and the command that mends it, if one does.

    ``kind`` is a word for programs; ``blocks``: ``torch.load`` would fail here.
    """

    kind: str
    blocks: bool
    text: str
    command: str | None


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found, what matters most first.

    ``remedy`` is one command for all findings that one command can mend, where there are several. ``other_torch`` is
    the version of torch on that machine if its rules were not asked, else None.
    """

    findings: list[Advice]
    remedy: str | None
    other_torch: str | None = None

    @property
    def loads_here(self) -> bool | None:
        """Whether ``torch.load`` would take the file on that machine; None: if it has devices of which
        nobody can tell, or something in it that torch builds in a way that is not modelled, or if the answer rests on
        the rules of another version of torch.
        """
        blocking = [each.kind for each in self.findings if each.blocks]
        if any(kind not in BY_RULES for kind in blocking):
            return False
        if self.other_torch or any(each.kind in OPEN for each in self.findings):
            return None
        return not blocking


@dataclass(frozen=True)
class Fix:
    """Options of ``convert``: the `part` to take, changes of `names`, everything `to_cpu` or only some tags by `maps`,
    storages made `compact`. The output is the source's name with `suffix` behind it.
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
        """Whether every conversion of the whole file does it."""
        return not self.options and self.format is None

    @property
    def options(self) -> tuple[Option, ...]:
        """What is typed for it."""
        devices = "cpu" if self.to_cpu else tuple(self.maps.items())
        others = {"map_location": devices, "compact": self.compact}
        return (*self.part, *self.names, *(Option(name, value) for name, value in others.items() if value))


@dataclass(frozen=True)
class Issue:
    kind: str
    text: str
    fix: Fix | None = None
    blocks: bool = False


@dataclass(frozen=True)
class Scope:
    """What is looked at: a checkpoint on a machine, or a part of it.

    `reach`, if given, are the nodes (by id) of that part; `module` is the one whose state dict it is.
    """

    checkpoint: Checkpoint
    host: Host
    reach: set[int] | None = None
    module: PickledModule | None = None

    @cached_property
    def storages(self) -> list[Storage]:
        """Its storages, each once."""
        used = (
            each.storage for each in self.checkpoint.references if self.reach is None or id(each.node) in self.reach
        )
        return list(dict.fromkeys(used))

    def named(self) -> Sequence[StateDict | NamedOptimizer | PickledModule]:
        """Where names are; in a file of optimizers alone, theirs."""
        if self.module is not None:
            return [self.module]
        if self.reach is None:
            return self.checkpoint.detected.state_dicts or self.checkpoint.detected.optimizers
        return [found for found in self.checkpoint.detected.state_dicts if id(found.node) in self.reach]


def advice(checkpoint: Checkpoint, issue: Issue) -> Advice:
    line = fix_command(checkpoint, issue.fix) if issue.fix else None
    return Advice(kind=issue.kind, blocks=issue.blocks, text=issue.text, command=line)


def with_names_apart(issues: list[Issue]) -> list[Issue]:
    """`issues` whose fixes write files of different names, where they are different fixes."""
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
    """All of `fixes` at once; of two that send one tag somewhere the later is heard."""
    return Fix(
        "-fixed",
        part=tuple(option for part in dict.fromkeys(fix.part for fix in fixes) for option in part),
        names=tuple(option for fix in fixes for option in fix.names),
        to_cpu=any(fix.to_cpu for fix in fixes),
        maps={old: new for fix in fixes for old, new in fix.maps.items()},
    )


def fix_command(checkpoint: Checkpoint, fix: Fix) -> str:
    """The command line, as it can be typed where the checkpoint's path was."""
    path = Path(placed(checkpoint.source.path))
    writer = WRITERS[fix.format] if fix.format else writer_for(objects=not checkpoint.is_state_dict)
    is_set = isinstance(checkpoint.source, SourceFolder)
    target = name_in_folder(Found(path, "shards" if is_set else "file", ()), None, is_folder=True) + fix.suffix
    in_shards = checkpoint.format.startswith(sharded.NAME) and fix.format is None and not fix.part
    if not in_shards:
        suffix = "" if is_set else suffix_of(path.name)
        kept = suffix and usual_format(path.name, checkpoint.format) == writer.word
        target += suffix if kept else writer.new_suffix
    return command_line("convert", path, Path(target), *fix.options)


def first_few(words: Sequence[str]) -> str:
    """`words`, or the first of them and how many more."""
    return some(words, SHOWN)
