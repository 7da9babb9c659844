"""The formats that can be written, and the choice of a format by a file name or by the format of the source."""

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

FormatWord: TypeAlias = Literal["pt", "legacy", "pickle", "safetensors", "dcp"]


class HubName(NamedTuple):
    """The file name that the Hub's tools give to a model in one file: ``model`` + ``.safetensors``."""

    model: str
    suffix: str


@dataclass(frozen=True)
class Writer:
    """A format that can be written: its names and its abilities.

    Other code decides by these attributes, and never by the name of a format.

    Attributes:
        word: Its name in ``--format``.
        name: Its name in reports.
        module: The module of ``ckptconv.formats`` with its ``layout(checkpoint, path)``, which also takes ``copy_tied``
            if `ties` is False.
        suffixes: The suffixes of its files. A suffix of several writers selects the first of them.
        new_suffix: The suffix for a file whose own suffix belongs to other formats.
        about: A description for a user who has to choose.
        hub: The file name of a model for the Hub's tools, or None if they do not read this format.
        shards: Whether the Hub's tools read shards of this format.
        stays: Whether a file of this format is written in this format again if its suffix selects another format first.
        devices: Whether the file records the device of a tensor.
        objects: Whether the file can contain every object that a pickle can. Otherwise it contains only names and
            tensors.
        ties: Whether two names can share a tensor. Otherwise a string in the metadata records the tie.
        views: Whether the file contains storages, of which tensors are views. Otherwise it contains only the elements
            of tensors.
        texts: Whether the file can contain strings next to tensors.
        records: Whether the file can contain other members of torch's archives.
        safe_loader: Whether torch's safe loader, which refuses unknown code, reads the file.
        is_folder: Whether this is a folder of files. Its ``layout`` takes the number of processes, `ranks`.
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
    is_folder: bool = False

    @property
    def shard_suffix(self) -> str:
        """The suffix of the shards. Only a format with `hub` has it."""
        assert self.hub is not None
        return self.hub.suffix

    def lay_out(self, checkpoint: Checkpoint, path: Path, *, copy_tied: bool = False, ranks: int = 1) -> Layout:
        """Plan the file, or the folder, at `path` for an edited `checkpoint`.

        Args:
            checkpoint: The checkpoint. This method may change it.
            path: The path of the file or folder.
            copy_tied: Whether to write a tied tensor under each of its names. Only allowed if `ties` is False.
            ranks: The number of processes for which a folder is written.

        Returns:
            The files to write, and the contents of the checkpoint that they cannot contain.

        Raises:
            RefusedError: The format cannot contain the checkpoint.
        """
        layout: Callable[..., Layout] = import_module(f"ckptconv.formats.{self.module}").layout
        if self.is_folder:
            return layout(checkpoint, path, ranks=ranks)
        return layout(checkpoint, path, copy_tied=True) if copy_tied else layout(checkpoint, path)


#: The suffixes that people give to files of ``pickle.dump`` and ``torch.save``. Torch's files have both kinds.
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".p")
_TORCH_SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt", ".th", ".tar", *_PICKLE_SUFFIXES)
_TORCH_HUB_NAME = HubName("pytorch_model", ".bin")
_ALL = (
    Writer("pt", "torch zip", "torch_zip", _TORCH_SUFFIXES, ".pt", hub=_TORCH_HUB_NAME, shards=True, records=True),
    Writer(
        "legacy",
        "torch legacy",
        "torch_legacy",
        _TORCH_SUFFIXES,
        ".pt",
        "the format of torch before 1.6",
        hub=_TORCH_HUB_NAME,
    ),
    Writer(
        "pickle",
        "pickle",
        "plain_pickle",
        _PICKLE_SUFFIXES,
        ".pkl",
        "a file for pickle.load",
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
    Writer(
        "dcp",
        "DCP",
        "distributed.dcp_writing",
        (),
        "",
        "a folder of torch.distributed.checkpoint",
        devices=False,
        ties=False,
        views=False,
        is_folder=True,
    ),
)
#: The writers by their words in ``--format``. A suffix selects the first writer that has it.
WRITERS = {writer.word: writer for writer in _ALL}
SUFFIXES = frozenset(suffix for writer in _ALL for suffix in writer.suffixes)
#: The format if neither the user nor a suffix selects one.
DEFAULT = WRITERS["pt"]


def suffix_of(name: str) -> str:
    """Return the suffix of the file `name` that selects a format, in the spelling of `name`. Empty if there is none."""
    return split_suffix(name)[1]


@lru_cache(maxsize=16)  # a conversion asks about ten times for one name
def split_suffix(name: str) -> tuple[str, str, str]:
    """Split the file name at its last suffix that selects a format. It may be in the middle: ``model.pt.bak``.

    Return the strings before, in and after the suffix. If there is none, return `name` and two empty strings.
    """
    for end in range(len(name), 0, -1):
        if name[end : end + 1] in ("", "."):
            known = (suffix for suffix in SUFFIXES if name[:end].lower().endswith(suffix))
            if start := len(max(known, key=len, default="")):
                return name[: end - start], name[end - start : end], name[end:]
    return name, "", ""


def admitted(name: str) -> list[Writer]:
    """Return the writers with the suffix of `name`. If the suffix is unknown or missing, return all writers."""
    suffix = suffix_of(name).lower()
    return [writer for writer in WRITERS.values() if not suffix or suffix in writer.suffixes]


def usual_format(name: str, container: str) -> str:
    """Return the word of the format for an output called `name`, if the user has not chosen a format.

    It is the first format with the suffix of `name`. But if the source has the format `container`, which allows the
    suffix and has `stays` set, the output keeps that format.
    """
    every = admitted(name)
    kept = [writer for writer in every if writer.stays and writer.name == container and suffix_of(name)]
    return (kept or every)[0].word


def also_meant(name: str, word: str) -> Writer | None:
    """Return another format that the suffix of `name` can mean, although the format `word` is written.

    None if there is none. Only formats with `stays` set count.
    """
    if not suffix_of(name):
        return None
    return next((writer for writer in admitted(name) if writer.stays and writer.word != word), None)


def writer_for(*, objects: bool) -> Writer:
    """Return the default writer for arbitrary objects if `objects` is true, otherwise for names and tensors only.

    It can write shards.
    """
    return next(writer for writer in WRITERS.values() if writer.shards and writer.objects is objects)


def writer_of(container: str) -> Writer | None:
    """Return the writer whose name ends `container`, the name of a source's format in reports, or None.

    For example, ``sharded safetensors`` is written by the writer for safetensors.
    """
    return next((writer for writer in WRITERS.values() if container.endswith(writer.name)), None)


def words(quality: str, *, holds: bool = True) -> str:
    """Return the words of the formats whose attribute `quality` of :class:`Writer` equals `holds`, joined by "or"."""
    return " or ".join(word for word, writer in WRITERS.items() if getattr(writer, quality) is holds)
