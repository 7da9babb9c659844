"""The options of ``convert`` and similar functions, each declared once, and the output options as data."""

# No annotations from __future__: what stands in Annotated is read when the package is imported.

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from ckptconv.edits.options import EditOptions, Edits, check_flags
from ckptconv.formats.writers import WRITERS, FormatWord
from ckptconv.guesses import DOWNLOAD, Flag
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WIDTH = 112  # columns of a docstring
_ENTRY = regex(r"^    \*\*options: .*\n(?: {8}.*\n)*", re.MULTILINE)


class PlanOptions(EditOptions, total=False):
    """The options of :func:`ckptconv.plan`, which describe one output file."""

    format: Annotated[
        FormatWord | None,
        Flag(
            "The format of DST, where its suffix does not say it: "
            + ", ".join(f"{word} is {writer.about}" for word, writer in WRITERS.items() if writer.about)
            + ".",
            ", ".join(f"``{word!r}``{writer.about and f' ({writer.about})'}" for word, writer in WRITERS.items())
            + ", if the suffix of the output does not decide it. A plain pickle stays one in a ``.pkl``.",
        ),
    ]
    copy_tied: Annotated[bool, Flag("Write tied tensors to safetensors under each name.")]
    allow_unsafe: Annotated[
        bool,
        Flag(
            "Carry over calls that no checkpoint needs (os.system and the like); they are not run.",
            "Carry over calls that no checkpoint needs (``os.system`` and the like). They are not run.",
        ),
    ]


class SaveOptions(PlanOptions, total=False):
    """The options of :func:`ckptconv.save`."""

    force: Annotated[
        bool,
        Flag(
            "Replace DST if it exists, safely even if it is SRC.",
            "Whether the output may exist. It may be the input.",
            short="-f",
        ),
    ]
    verify: Annotated[
        bool,
        Flag(
            "Compare SRC's records with their checksums, where it has some, and read DST back to compare it.",
            "Compare the records of the input with their checksums, if it has some, and read the output back before it"
            " appears (in a store: afterwards). The report says what was compared.",
        ),
    ]


class WriteOptions(SaveOptions, total=False):
    """The options of functions that write a checkpoint to another place."""

    max_shard_size: Annotated[
        int | str | None,
        Flag(
            "Write shards of at most SIZE (5GB, 500MB) with their index, as the Hub has them; DST is a folder then."
            " Needs huggingface_hub: pip install 'ckptconv[hub]'.",
            "Write shards of at most so many bytes (``'5GB'``), and their index, to a folder.",
            "SIZE",
        ),
    ]
    ranks: Annotated[
        int,
        Flag(
            "Write a DCP folder as N processes would, a file for each; any number of processes reads it.",
            "The number of processes that a folder of ``torch.distributed.checkpoint`` (``format='dcp'``) is written"
            " for: a file for each. Any number of processes reads it.",
            "N",
        ),
    ]
    copy_others: Annotated[bool, Flag("Of a folder, copy what is no checkpoint too.")]
    dry_run: Annotated[bool, Flag("Only say what would be done.", short="-n")]
    jobs: Annotated[
        int,
        Flag(
            "Convert N checkpoints, or write N shards, at once.", "Threads that write the files of a folder.", "N", "-j"
        ),
    ]
    download: Annotated[
        bool,
        Flag(
            "Where the server of a URL sends no ranges, download all of the file first; it goes when it has been read.",
            DOWNLOAD.doc,
        ),
    ]


class ConvertOptions(WriteOptions, total=False):
    """The options of :func:`ckptconv.convert`."""

    in_place: Annotated[
        bool,
        Flag(
            "Change the file SRC itself. undo takes it back.",
            "Change devices and names in the file `src` itself, without `dst`, under an undo journal"
            " (:func:`ckptconv.undo`).",
            short="-i",
        ),
    ]
    no_undo: Annotated[
        bool,
        Flag(
            "In place: keep no journal for undo once the change is on the disk.",
            "With `in_place`: remove the undo journal after the change is on the disk.",
        ),
    ]


class JobOptions(ConvertOptions, total=False):
    """The options of :class:`ckptconv.Job`."""

    skip_existing: Annotated[
        bool,
        Flag(
            "Leave outputs that exist as they are, even with --force.",
            "Leave an output that exists as it is, even with `force`.",
        ),
    ]


@dataclass(frozen=True)
class OutputOptions:
    """The options of :class:`ckptconv.Job` that are not edits, with their defaults."""

    format: str | None = None
    copy_tied: bool = False
    force: bool = False
    verify: bool = False
    allow_unsafe: bool = False
    max_shard_size: int | str | None = None
    ranks: int = 1
    copy_others: bool = False
    dry_run: bool = False
    jobs: int = 1
    in_place: bool = False
    no_undo: bool = False
    download: bool = False
    skip_existing: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentTypeError if a value has a wrong type."""
        check_flags(self)

    @property
    def is_for_ranks(self) -> bool:
        """Whether the output is in a format that is a folder, with a file for each process."""
        return self.format in WRITERS and WRITERS[self.format].is_folder

    @property
    def writes_folder(self) -> bool:
        """Whether the output of one checkpoint is a folder: of shards, or in a format that is one."""
        return self.max_shard_size is not None or self.is_for_ranks


#: The options if none is given.
USUAL = OutputOptions()


def takes(
    options: Any, data: type = OutputOptions, **defaults: object
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator for a function with ``**options: Unpack[...]`` of the TypedDict `options`.

    The function shows each option in its signature, and in its docstring in place of the entry ``**options``. That it
    is called with no others is what :func:`~ckptconv.hints.for_python` checks.

    Args:
        options: The TypedDict that declares the options.
        data: The dataclass with the defaults of the options that are not edits.
        **defaults: The defaults that differ from those of :func:`ckptconv.convert`.
    """
    declared: dict[str, tuple[Any, Flag]] = {name: get_args(each) for name, each in options.__annotations__.items()}

    def taking(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, getattr(data, name, getattr(Edits, name, None))),
                annotation=getattr(type_, "__forward_arg__", type_),
            )
            for name, (type_, _) in declared.items()
        ]

        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return function(*args, **{**defaults, **kwargs})  # type: ignore[arg-type]

        called.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        if function.__doc__ is not None:  # as it is with python -OO
            called.__doc__ = _documented(inspect.cleandoc(function.__doc__), declared)
        return called

    return taking


def _documented(doc: str, declared: Mapping[str, tuple[Any, Flag]]) -> str:
    """Return `doc` with the `declared` options in place of ``**options``, except those that `doc` itself describes."""
    lines = [
        textwrap.fill(f"{name}: {flag.doc or flag.help}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, (_, flag) in declared.items()
        if f"\n    {name}: " not in doc
    ]
    return _ENTRY.sub(lambda _: "\n".join(lines) + "\n", doc)
