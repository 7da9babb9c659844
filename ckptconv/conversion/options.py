"""The keywords of ``convert`` and its kin, each declared once, and the output that they ask for as data."""

# No annotations from __future__: what stands in Annotated is read when the package is imported.

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from ckptconv.edits.options import EditOptions, Edits, check_flags
from ckptconv.formats.writers import WRITERS, FormatWord
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_WIDTH = 112  # columns of a docstring
_WORDS = ", ".join(f"``{word!r}``{writer.about and f' ({writer.about})'}" for word, writer in WRITERS.items())
_ENTRY = regex(r"^    \*\*options: .*\n(?: {8}.*\n)*", re.MULTILINE)


class PlanOptions(EditOptions, total=False):
    """The keywords of :func:`ckptconv.plan`: all that say what an output is."""

    format: Annotated[
        FormatWord | None,
        f"{_WORDS}, where the suffix of the output does not say it; a plain pickle stays one in a ``.pkl``.",
    ]
    copy_tied: Annotated[bool, "Write tied tensors to safetensors under each name."]
    allow_unsafe: Annotated[
        bool, "Carry over calls that no checkpoint needs (``os.system`` and the like); nothing is ever run here."
    ]


class SaveOptions(PlanOptions, total=False):
    """The keywords of :func:`ckptconv.save`."""

    force: Annotated[bool, "The output may exist, and may be the input."]
    verify: Annotated[
        bool,
        "Compare the input's records with their checksums, where it has some, and read the output back before it"
        " appears, or in a store when it is there; the report says what was compared.",
    ]


class WriteOptions(SaveOptions, total=False):
    """The keywords of whatever writes a checkpoint to another place."""

    max_shard_size: Annotated[
        int | str | None,
        "Write shards of at most so many bytes (``'5GB'``) with their index; the output is a folder then.",
    ]
    copy_others: Annotated[bool, "Of a folder, copy what is no checkpoint too."]
    dry_run: Annotated[bool, "Only say what would be done."]
    jobs: Annotated[int, "Threads that write the files of a folder."]
    download: Annotated[
        bool,
        "Where the server of a URL sends no ranges, download all of the file first; it goes when it has been read.",
    ]


class ConvertOptions(WriteOptions, total=False):
    """The keywords of :func:`ckptconv.convert`."""

    in_place: Annotated[
        bool,
        "Change `src` in its own file, without `dst`: devices and names alone, under an undo journal"
        " (:func:`ckptconv.undo`).",
    ]
    no_undo: Annotated[bool, "Remove that journal once the change is on the disk."]


class JobOptions(ConvertOptions, total=False):
    """The keywords of :class:`ckptconv.Job`."""

    skip_existing: Annotated[bool, "Leave what is there already as it is, whatever `force` says."]


class FromKeywords:
    """A dataclass that is made of keywords that somebody gave."""

    @classmethod
    def of(cls: type[_T], options: Mapping[str, Any]) -> _T:
        """Those of `options` that it has fields for."""
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]  # a base class is no dataclass yet
        return cls(**{name: options[name] for name in names if name in options})


@dataclass(frozen=True)
class OutputOptions(FromKeywords):
    """The keywords of :func:`ckptconv.convert` that are no edits, with their defaults."""

    format: str | None = None
    copy_tied: bool = False
    force: bool = False
    verify: bool = False
    allow_unsafe: bool = False
    max_shard_size: int | str | None = None
    copy_others: bool = False
    dry_run: bool = False
    jobs: int = 1
    in_place: bool = False
    no_undo: bool = False
    download: bool = False
    skip_existing: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError where a flag is neither True nor False."""
        check_flags(self)


#: What is written where nobody asks for anything.
USUAL = OutputOptions()


def takes(
    options: Any, data: type = OutputOptions, **defaults: object
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """For a function with ``**options: Unpack[...]`` of this TypedDict: it
    shows each option in its signature, and in its docstring in place of the entry ``**options``. That it has no others
    is what :func:`~ckptconv.hints.for_python` looks at.

    Args:
        options: What declares the keywords.
        data: The dataclass that has the defaults of those that are no edits.
        **defaults: Those that are others here than for :func:`ckptconv.convert`.
    """
    declared: dict[str, tuple[Any, str]] = {name: get_args(each) for name, each in options.__annotations__.items()}

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
        called.__doc__ = _documented(function.__doc__, {name: text for name, (_, text) in declared.items()})
        return called

    return taking


def _documented(doc: str | None, entries: Mapping[str, str]) -> str | None:
    """The docstring `doc` with `entries` in place of its entry ``**options``, but for those that it has already."""
    if doc is None:  # python -OO
        return None
    doc = inspect.cleandoc(doc)
    lines = [
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in entries.items()
        if f"\n    {name}: " not in doc
    ]
    return _ENTRY.sub(lambda _: "\n".join(lines) + "\n", doc)
