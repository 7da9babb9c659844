"""The formats that can be written, and which of them a suffix or a container means."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ckptconv.light_dataclass import dataclass

if TYPE_CHECKING:
    from ckptconv.checkpoint.model import Checkpoint
    from ckptconv.formats.layout import Layout

__all__ = [
    "DEFAULT",
    "SUFFIXES",
    "WRITERS",
    "FormatWord",
    "HubName",
    "Writer",
    "admitted",
    "also_meant",
    "split_suffix",
    "suffix_of",
    "usual_format",
    "words",
    "writer_for",
    "writer_of",
]

FormatWord: TypeAlias = Literal["pt", "legacy", "pickle", "safetensors"]


class HubName(NamedTuple):
    """What the Hub's tools call a whole model in a format: ``model`` + ``.safetensors``."""

    model: str
    suffix: str


@dataclass(frozen=True)
class Writer:
    """A format that can be written: its names, and what it can hold. Everything else asks this, and no format's name.

    Attributes:
        word: What ``--format`` calls it.
        name: What reports call it.
        module: That of ``ckptconv.formats`` with its ``layout(checkpoint, path)``, and ``copy_tied`` where `ties` is
            False.
        suffixes: Those of its files. What the first of several writers with a suffix writes is meant by it.
        new_suffix: That of a file whose own suffix belongs to other formats.
        about: What it is, for who has to choose.
        hub: What the Hub's tools call a model in it, if they read it.
        shards: Whether they read shards of it.
        stays: Whether a file of this format stays one under a suffix that means another format first.
        devices: Whether it stores the device of a tensor.
        objects: Whether it holds whatever a pickle can say; else names and their tensors alone.
        ties: Whether two names can have one tensor; else texts say so.
        views: Whether it holds storages, of which tensors show parts; else what tensors show and no more.
        texts: Whether it holds texts beside tensors.
        records: Whether it holds what else stands in an archive of torch's.
        safe_loader: Whether torch's safe loader reads it, which refuses code that it does not know.
    """

    word: str
    name: str
    module: str
    suffixes: tuple[str, ...]
    new_suffix: str
    about: str = ""
    hub: HubName | None = None
    shards: bool = False
    stays: bool = False
    devices: bool = True
    objects: bool = True
    ties: bool = True
    views: bool = True
    texts: bool = False
    records: bool = False
    safe_loader: bool = True

    @property
    def shard_suffix(self) -> str:
        """The suffix of its shards, if it has any."""
        assert self.hub is not None
        return self.hub.suffix

    def lay_out(self, checkpoint: Checkpoint, path: Path, *, copy_tied: bool = False) -> Layout:
        """The file that `checkpoint`, edited, becomes at `path`.

        Args:
            checkpoint: It can be changed by this.
            path: Of the file.
            copy_tied: Write tied tensors under each of their names; not where `ties` is True.

        Raises:
            RefusedError: The format cannot hold it.
        """
        layout: Callable[..., Layout] = import_module(f"ckptconv.formats.{self.module}").layout
        return layout(checkpoint, path, copy_tied=True) if copy_tied else layout(checkpoint, path)


#: What ``torch.save`` gets called by, and what ``pickle.dump`` does, which is torch's too.
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".p")
_TORCH_SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt", ".th", ".tar", *_PICKLE_SUFFIXES)
_TORCH_HUB_NAME = HubName("pytorch_model", ".bin")
_ALL = (
    Writer("pt", "torch zip", "torch_zip", _TORCH_SUFFIXES, ".pt", hub=_TORCH_HUB_NAME, shards=True, records=True),
    Writer("legacy", "torch legacy", "torch_legacy", _TORCH_SUFFIXES, ".pt", "torch's before 1.6", hub=_TORCH_HUB_NAME),
    Writer(
        "pickle",
        "pickle",
        "plain_pickle",
        _PICKLE_SUFFIXES,
        ".pkl",
        "what pickle.load reads",
        stays=True,
        safe_loader=False,
    ),
    Writer(
        "safetensors",
        "safetensors",
        "safetensors",
        (".safetensors",),
        ".safetensors",
        hub=HubName("model", ".safetensors"),
        shards=True,
        devices=False,
        objects=False,
        ties=False,
        views=False,
        texts=True,
        safe_loader=False,
    ),
)
#: By the word of ``--format``. Of those that a suffix admits, the first is meant where nobody says anything else.
WRITERS = {each.word: each for each in _ALL}
SUFFIXES = frozenset(suffix for writer in _ALL for suffix in writer.suffixes)
#: What is written where nothing says anything else.
DEFAULT = WRITERS["pt"]


def suffix_of(name: str) -> str:
    """The suffix of the file `name` that stands for a format, as it is spelled there; empty if there is none."""
    return split_suffix(name)[1]


@lru_cache(maxsize=16)  # one name is asked for some ten times while it is converted
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


def also_meant(name: str, word: str) -> Writer | None:
    """What else the suffix of `name` says, of which the format `word` is written: one that stays what it is."""
    if not suffix_of(name):
        return None
    return next((writer for writer in admitted(name) if writer.stays and writer.word != word), None)


def writer_for(*, objects: bool) -> Writer:
    """The writer of what holds any objects, or names and tensors alone, where nobody says which, in shards too."""
    return next(writer for writer in WRITERS.values() if writer.shards and writer.objects is objects)


def writer_of(container: str) -> Writer | None:
    """The writer of the files of a container as reports call it, be it one file or a set (``sharded safetensors``)."""
    return next((writer for writer in WRITERS.values() if container.endswith(writer.name)), None)


def words(quality: str, *, holds: bool = True) -> str:
    """The words of the formats that have a `quality` of :class:`Writer`, or have it not, for an error."""
    return " or ".join(word for word, writer in WRITERS.items() if getattr(writer, quality) is holds)
