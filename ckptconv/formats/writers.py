"""The formats that can be written, and which of them a suffix or a container stands for."""

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
    """The name that the Hub's tools give to a model in one file: ``model`` + ``.safetensors``."""

    model: str
    suffix: str


@dataclass(frozen=True)
class Writer:
    """A format that can be written: its names, and what it can hold. All other code uses this, and never the name of a
    format.

    Attributes:
        word: Its name in ``--format``.
        name: Its name in reports.
        module: The module of ``ckptconv.formats`` with its ``layout(checkpoint, path)``, which also takes ``copy_tied``
            if `ties` is False.
        suffixes: The suffixes of its files. If several writers have a suffix, it stands for the first of them.
        new_suffix: The suffix for a file whose own suffix belongs to other formats.
        about: A description for a user who has to choose.
        hub: The name that the Hub's tools give to a model in it, if they read it.
        shards: Whether the Hub's tools read shards of it.
        stays: Whether a file of this format keeps its format under a suffix that stands for another format first.
        devices: Whether it stores the device of a tensor.
        objects: Whether it can hold every object that a pickle can. Otherwise it holds only names and their tensors.
        ties: Whether two names can share a tensor. Otherwise a text records that.
        views: Whether it stores storages, of which tensors are views. Otherwise it stores only the elements of tensors.
        texts: Whether it can hold texts next to tensors.
        records: Whether it can hold other members of torch's archives.
        safe_loader: Whether torch's safe loader reads it, which refuses unknown code.
        is_folder: Whether it is a folder of files. Its ``layout`` takes the number of processes, `ranks`.
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
        """The suffix of its shards. Only for a format with a ``hub`` name."""
        assert self.hub is not None
        return self.hub.suffix

    def lay_out(self, checkpoint: Checkpoint, path: Path, *, copy_tied: bool = False, ranks: int = 1) -> Layout:
        """Plan the file, or the folder, at `path` for an edited `checkpoint`.

        Args:
            checkpoint: The checkpoint, which this may change.
            path: The path of the file.
            copy_tied: Write a tied tensor under each of its names. Only if `ties` is False.
            ranks: The number of processes for which a folder is written.

        Returns:
            The files to write, and what they cannot hold.

        Raises:
            RefusedError: The format cannot hold the checkpoint.
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
#: By the word of ``--format``. A suffix stands for the first writer that has it, unless the user says otherwise.
WRITERS = {writer.word: writer for writer in _ALL}
SUFFIXES = frozenset(suffix for writer in _ALL for suffix in writer.suffixes)
#: The format if neither the user nor a suffix says otherwise.
DEFAULT = WRITERS["pt"]


def suffix_of(name: str) -> str:
    """Return the suffix of the file `name` that stands for a format, spelled as in the name, or an empty text."""
    return split_suffix(name)[1]


@lru_cache(maxsize=16)  # a conversion asks about ten times for one name
def split_suffix(name: str) -> tuple[str, str, str]:
    """Split the file `name` at the last suffix that stands for a format, which may be in the middle (``model.pt.bak``).

    Return the texts before, in and after the suffix. If there is none, return the name and two empty texts.
    """
    for end in range(len(name), 0, -1):
        if name[end : end + 1] in ("", "."):
            known = (suffix for suffix in SUFFIXES if name[:end].lower().endswith(suffix))
            if start := len(max(known, key=len, default="")):
                return name[: end - start], name[end - start : end], name[end:]
    return name, "", ""


def admitted(name: str) -> list[Writer]:
    """Return the writers that the suffix of `name` allows. Without a known suffix, return all writers."""
    suffix = suffix_of(name).lower()
    return [writer for writer in WRITERS.values() if not suffix or suffix in writer.suffixes]


def usual_format(name: str, container: str) -> str:
    """Return the word of the format for a file called `name`, made from a `container`, if the user has not chosen one.

    It is the first format of the suffix, unless the container is in a format that keeps its format under this suffix.
    """
    every = admitted(name)
    kept = [writer for writer in every if writer.stays and writer.name == container and suffix_of(name)]
    return (kept or every)[0].word


def also_meant(name: str, word: str) -> Writer | None:
    """Return another writer that the suffix of `name` can stand for, if `word` is written, or None.

    Only formats that keep their format under the suffix of another one count.
    """
    if not suffix_of(name):
        return None
    return next((writer for writer in admitted(name) if writer.stays and writer.word != word), None)


def writer_for(*, objects: bool) -> Writer:
    """Return the default writer for any objects, or for names and tensors only. It can write shards."""
    return next(writer for writer in WRITERS.values() if writer.shards and writer.objects is objects)


def writer_of(container: str) -> Writer | None:
    """Return the writer for the name of a `container` in reports, or None. The container may be a set of files."""
    return next((writer for writer in WRITERS.values() if container.endswith(writer.name)), None)


def words(quality: str, *, holds: bool = True) -> str:
    """Return the words of the formats whose attribute `quality` equals `holds`, joined for an error.

    `quality` is the name of an attribute of :class:`Writer`.
    """
    return " or ".join(word for word, writer in WRITERS.items() if getattr(writer, quality) is holds)
