"""The options of ``convert`` and similar functions, each declared once, and the output options as data."""

# No annotations from __future__: what stands in Annotated is read when the package is imported.

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from ckptconv.edits.devices import to_devices
from ckptconv.edits.options import EditOptions, Edits, check_flags, split_edits
from ckptconv.formats.writers import WRITERS, FormatWord
from ckptconv.guesses import DOWNLOAD, Flag
from ckptconv.hints import Option
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
            "The format of DST. By default it follows from the suffix. "
            + ", ".join(f"{word}: {writer.about}" for word, writer in WRITERS.items() if writer.about)
            + ".",
            ", ".join(f"``{word!r}``{writer.about and f' ({writer.about})'}" for word, writer in WRITERS.items())
            + ". By default the format follows from the suffix of the output. A plain pickle stays a pickle in a"
            " ``.pkl`` file.",
        ),
    ]
    copy_tied: Annotated[bool, Flag("Safetensors: store tensors that share memory under each of their names.")]
    allow_unsafe: Annotated[
        bool,
        Flag(
            "Copy dangerous calls (such as os.system) to DST instead of refusing SRC. Nothing is run.",
            "Copy dangerous calls (such as ``os.system``) to the output instead of refusing the input. Nothing is run.",
        ),
    ]


class SaveOptions(PlanOptions, total=False):
    """The options of :func:`ckptconv.save`."""

    force: Annotated[
        bool,
        Flag(
            "Replace DST if it exists. DST may be SRC.",
            "Whether to replace the output if it exists. It may be the input.",
            short="-f",
        ),
    ]
    verify: Annotated[
        bool,
        Flag(
            "Check the tensor data of SRC against its checksums, if SRC has any, and read DST back to compare it.",
            "Check the tensor data of the input against its checksums, if it has any, and read the output back before"
            " it appears (in a remote store: afterwards). The report says what was compared.",
        ),
    ]


class ConvertOptions(SaveOptions, total=False):
    """The options of :func:`ckptconv.convert`."""

    max_shard_size: Annotated[
        int | str | None,
        Flag(
            "Write shards of at most SIZE (5GB, 500MB) and their index to the folder DST, as on the Hugging Face Hub."
            ' Needs huggingface_hub: pip install "ckptconv[hub]".',
            "Write shards of at most this size (bytes, or ``'5GB'``) and their index to a folder.",
            "SIZE",
        ),
    ]
    ranks: Annotated[
        int,
        Flag(
            "With --format dcp: write one file for each of N processes. Any number of processes can read the folder.",
            "With ``format='dcp'``: the number of processes that the folder has a file for. Any number of processes can"
            " read it.",
            "N",
        ),
    ]
    copy_others: Annotated[bool, Flag("If SRC is a folder, also copy files that are not checkpoints.")]
    dry_run: Annotated[bool, Flag("Only print what would be done.", short="-n")]
    jobs: Annotated[
        int,
        Flag(
            "Convert N checkpoints, or write N shards, at the same time.",
            "The number of threads that write the files of a folder.",
            "N",
            "-j",
        ),
    ]
    download: Annotated[
        bool,
        Flag(
            "If the server of a URL does not support range requests, download the whole file first. The download is"
            " deleted after it is read.",
            DOWNLOAD.doc,
        ),
    ]
    in_place: Annotated[
        bool,
        Flag(
            "Change the file SRC itself. 'ckptconv undo' reverts the change.",
            "Change devices and names in the file `src` itself, without `dst`, under an undo journal"
            " (:func:`ckptconv.undo`).",
            short="-i",
        ),
    ]
    no_undo: Annotated[
        bool,
        Flag(
            "With --in-place: delete the undo journal once the change is on the disk.",
            "With `in_place`: delete the undo journal once the change is on the disk.",
        ),
    ]


class JobOptions(ConvertOptions, total=False):
    """The options of :class:`ckptconv.Job`."""

    skip_existing: Annotated[
        bool,
        Flag(
            "Skip outputs that exist, even with --force.",
            "Skip the output if it exists, even with `force`.",
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

    @property
    def is_for_ranks(self) -> bool:
        """Whether the format of the output is a folder with a file for each process."""
        return self.format in WRITERS and WRITERS[self.format].is_folder

    @property
    def writes_folder(self) -> bool:
        """Whether the output of one checkpoint is a folder: a set of shards, or a format that is a folder."""
        return self.max_shard_size is not None or self.is_for_ranks


def parse_options(options: Mapping[str, Any]) -> tuple[Edits, OutputOptions]:
    """Return the keywords `options` as edits and output options.

    Raises the errors of :func:`~ckptconv.edits.options.edits_from`, and ArgumentTypeError for an output option.
    """
    edits, others = split_edits(options)
    output = OutputOptions(**others)
    check_flags(output)
    return edits, output


def given_options(options: Mapping[str, Any], *without: str) -> list[Option]:
    """Return those of the keywords `options` that are not their defaults and not in `without`, for a command.

    A function cannot be typed and is left out.
    """
    found = []
    for name, value in options.items():
        usual = getattr(OutputOptions, name, getattr(Edits, name, None))
        if value and value != usual and name not in without and not callable(value):
            found.append(Option(name, to_devices(value).given() if name == "map_location" else value))
    return found


#: The options if the user gives none.
USUAL = OutputOptions()


def takes(
    options: Any, data: type = OutputOptions, **defaults: object
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator for a function with ``**options: Unpack[...]`` of the TypedDict `options`.

    The decorated function has each option in its signature, and in its docstring instead of the entry ``**options``.
    :func:`~ckptconv.hints.for_python` refuses other keywords.

    Args:
        options: The TypedDict that declares the options.
        data: The dataclass with the defaults of the options that are not edits.
        **defaults: Defaults that differ from those of :func:`ckptconv.convert`.
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
        if function.__doc__ is not None:  # the docstring is None with python -OO
            called.__doc__ = _documented(inspect.cleandoc(function.__doc__), declared)
        return called

    return taking


def _documented(doc: str, declared: Mapping[str, tuple[Any, Flag]]) -> str:
    """Return `doc` with the `declared` options instead of the entry ``**options``.

    Options that `doc` describes are left out.
    """
    lines = [
        textwrap.fill(f"{name}: {flag.doc or flag.help}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, (_, flag) in declared.items()
        if f"\n    {name}: " not in doc
    ]
    return _ENTRY.sub(lambda _: "\n".join(lines) + "\n", doc)
