"""The formats that can be written, and which of them a suffix or a container means."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckptconv.formats import plain_pickle, safetensors, torch_legacy, torch_zip
from ckptconv.formats.layout import Writer

__all__ = [
    "DEFAULT",
    "SUFFIXES",
    "WRITERS",
    "FormatWord",
    "admitted",
    "split_suffix",
    "suffix_of",
    "usual_format",
    "words",
    "writer_for",
    "writer_of",
]

FormatWord: TypeAlias = Literal["pt", "legacy", "pickle", "safetensors"]

#: By the word of ``--format``. Of those that a suffix admits, the first is meant where nobody says anything else.
WRITERS: dict[str, Writer] = {
    each.word: each for each in (torch_zip.WRITER, torch_legacy.WRITER, plain_pickle.WRITER, safetensors.WRITER)
}
SUFFIXES = frozenset(suffix for writer in WRITERS.values() for suffix in writer.suffixes)
#: What is written where nothing says anything else.
DEFAULT = torch_zip.WRITER


def suffix_of(name: str) -> str:
    """The suffix of the file `name` that stands for a format, as it is spelled there; empty if there is none."""
    return split_suffix(name)[1]


def split_suffix(name: str) -> tuple[str, str, str]:
    """The file `name` before, in, and behind the last suffix in it that stands for a format (``model.safetensors.bak``
    is one); all of it, and nothing, where there is none.
    """
    for end in range(len(name), 0, -1):
        if name[end : end + 1] in ("", "."):
            known = (each for each in SUFFIXES if name[:end].lower().endswith(each))
            if start := len(max(known, key=len, default="")):
                return name[: end - start], name[end - start : end], name[end:]
    return name, "", ""


def admitted(name: str) -> list[Writer]:
    """The writers of what the suffix of `name` says; all where it has none that is known."""
    suffix = suffix_of(name).lower()
    return [writer for writer in WRITERS.values() if not suffix or suffix in writer.suffixes]


def usual_format(name: str, container: str) -> str:
    """The format of a file called `name` where nobody says which, made of a `container`: what its suffix says first,
    unless the container is of a format that stays what it is.
    """
    every = admitted(name)
    kept = [writer for writer in every if writer.stays and writer.name == container and suffix_of(name)]
    return (kept or every)[0].word


def writer_for(*, objects: bool) -> Writer:
    """The writer of what holds any objects, or names and tensors alone, where nobody says which, in shards too."""
    return next(writer for writer in WRITERS.values() if writer.shards and writer.objects is objects)


def writer_of(container: str) -> Writer | None:
    """The writer of the files of a container as reports call it, be it one file or a set (``sharded safetensors``)."""
    return next((writer for writer in WRITERS.values() if container.endswith(writer.name)), None)


def words(quality: str, *, holds: bool = True) -> str:
    """The words of the formats that have a `quality` of :class:`Writer`, or have it not, for an error."""
    return " or ".join(word for word, writer in WRITERS.items() if getattr(writer, quality) is holds)
