"""Would ``torch.load(path, map_location="cpu", weights_only=True)`` load the file? A proof, a refusal, or not known.

The pickle is run by :mod:`ckptconv.checkpoint.weights_only`; here is what torch does with the file around it. Source:
``torch/serialization.py`` of torch 2.13, and of its C++ ``caffe2/serialize/inline_container.cc``, by what it answers.

What is promised: the reader has found nothing wrong with the file, the process has imported torch and nothing else, and
it has memory for what the file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.byteranges.reading import inflated
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Inflate
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.weights_only.answers import TORCH, Answer, Reason
from ckptconv.checkpoint.weights_only.objects import Contents
from ckptconv.checkpoint.weights_only.unpickler import reasons
from ckptconv.dtypes import BY_NAME, UNTYPED
from ckptconv.errors import InputError, MalformedError
from ckptconv.formats.legacy_file import LegacyFile
from ckptconv.formats.sharded.container import ShardedContainer
from ckptconv.formats.torch_zip import CONSTANTS, record_bytes
from ckptconv.formats.two_readings import is_tar
from ckptconv.formats.writers import WRITERS
from ckptconv.formats.zip_archive import Archive, Member
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

__all__ = ["CALL", "Loading", "torch_loading"]

#: What the answer is about.
CALL = 'torch.load(path, map_location="cpu", weights_only=True)'
_SAFETENSORS = WRITERS["safetensors"].name
_VERSIONS = range(1, 11)
_NUMBER = regex(rb"\s*\+?([0-9]{1,19})")
_LONGEST_NAME = 511  # bytes: what torch keeps of a record's name
_ALIGNMENT = ".storage_alignment"
_SERIALIZATION_ID = ".data/serialization_id"
_OTHER_VERSION = ".data/version"
#: What torch reads beside the pickle and the storages; it looks for all of them without regard to case.
_RECORDS = ("version", _OTHER_VERSION, _ALIGNMENT, _SERIALIZATION_ID, ".format_version", "byteorder")


@dataclass(frozen=True)
class Loading:
    """The answer, and the reasons for one that is not ``loads``, refusals first.

    Attributes:
        answer: ``loads``, ``refused`` or ``not known``.
        reasons: Why.
        torch: The version of torch that was modelled.
    """

    answer: Answer
    reasons: tuple[Reason, ...] = ()
    torch: str = TORCH

    @property
    def loads(self) -> bool:
        """Whether it was proved that torch loads the file."""
        return self.answer == "loads"


def torch_loading(checkpoint: Checkpoint, *, is_sound: bool = True) -> Loading:
    """Tell whether torch's safe loader would load a file.

    Args:
        checkpoint: What the reader made of it, unedited, while the source is open.
        is_sound: Whether the reader has found nothing wrong with it.

    Returns:
        The answer, about :data:`CALL` on a machine without accelerators.
    """
    if not is_sound:
        return Loading("not known", (_not_known("something is wrong with the file"),))
    blobs = checkpoint.blobs or checkpoint.source
    found = list(_reasons(checkpoint, blobs))
    found.sort(key=lambda each: each.known != "refused")
    return Loading(found[0].known if found else "loads", tuple(found))


def _refused(text: str, *, is_spelling: bool = False) -> Reason:
    return Reason("refused", text, is_spelling=is_spelling)


def _not_known(text: str) -> Reason:
    return Reason("not known", text)


def _reasons(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    """The reasons in one file, or in each of a set of shards; its long texts stand in `blobs`."""
    container = checkpoint.container
    if isinstance(container, ShardedContainer):
        for shard in container.shards:
            yield from _reasons(shard.part, blobs)
        return
    is_named_safetensors = checkpoint.source.path.name.endswith(".safetensors")
    if is_named_safetensors and checkpoint.format != _SAFETENSORS:
        yield _refused("torch.load takes a file of this name for safetensors, and it is none")
    if checkpoint.script_classes is not None:
        yield _refused("it is a TorchScript archive, which torch.jit.load loads and torch.load does not")
        return
    yield from _BY_FORMAT.get(checkpoint.format, _of_folder)(checkpoint, blobs)


# torch's zip


def _of_zip(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    archive = checkpoint.container
    assert isinstance(archive, Archive)
    yield from _of_records(checkpoint, archive)
    yield from _of_deflated(checkpoint)
    contents = Contents(checkpoint.index.storage_of, blobs, checkpoint.byteorder)
    yield from reasons(checkpoint.graph, contents)


def _of_records(checkpoint: Checkpoint, archive: Archive) -> Iterator[Reason]:
    """What torch's reader of archives demands of the records beside the pickle and the storages."""
    names = archive.names()
    root = archive.root.encode()
    if len(root) >= _LONGEST_NAME:
        yield _refused(f"the name of the archive's folder has {len(root):,} bytes, and torch keeps {_LONGEST_NAME}")
    for member in archive.members:
        yield from _of_name(member.name.encode(), root)
    read = {name.lower(): member for name, member in names.items() if name.lower() in _RECORDS}
    try:
        said = {name: _said(checkpoint, member) for name, member in read.items()}
    except InputError as error:
        yield _not_known(f"a record that torch reads: {error.what}")
        return
    yield from _of_version(said.get(_OTHER_VERSION, said.get("version")))
    try:
        int(said.get(_ALIGNMENT, b"64"))
    except ValueError:
        yield _refused(f"the record {_ALIGNMENT} is no number", is_spelling=True)
    try:
        said.get(_SERIALIZATION_ID, b"").decode()
    except UnicodeDecodeError:
        yield _refused(f"the record {_SERIALIZATION_ID} is no UTF-8", is_spelling=True)


def _of_name(name: bytes, root: bytes) -> Iterator[Reason]:
    """What torch makes of a record's name that is longer than it keeps."""
    kept = name[:_LONGEST_NAME]
    if kept == name:
        return
    try:
        kept.decode()
    except UnicodeDecodeError:
        yield _refused(f"a record's name has {len(name):,} bytes, and torch cuts a character of it in two")
    if kept == root + b"/" + CONSTANTS.encode():
        yield _refused(f"a record's name begins with {CONSTANTS}, and torch sees no more of it")


def _of_version(note: bytes | None) -> Iterator[Reason]:
    found = _NUMBER.match(note) if note is not None else None
    if note is None:  # the record is damaged, or differs from torch's in case as Unicode has it
        yield _refused("there is no record that says the archive's version")
    elif found is None:
        yield _refused("the record that says the archive's version is no number")
    elif int(found[1]) not in _VERSIONS:
        yield _refused(f"the archive has version {int(found[1])}, and torch reads {_VERSIONS[0]} to {_VERSIONS[-1]}")


def _said(checkpoint: Checkpoint, member: Member) -> bytes:
    """The bytes of a record in which a word stands, as far as anybody needs them."""
    if member.size > LIMITS.inline_bytes:
        raise MalformedError("the record is too long", where=f"{checkpoint.source.path}: {member.name}")
    return record_bytes(checkpoint.source, member, f"{checkpoint.source.path}: {member.name}", checked=False)


def _of_deflated(checkpoint: Checkpoint) -> Iterator[Reason]:
    """Storages that torch inflates when it loads them, which fails where they are damaged."""
    deflated = [each.data for each in checkpoint.storages.values() if isinstance(each.data, Inflate)]
    if sum(each.length for each in deflated) > LIMITS.inflated_to_prove:
        yield _not_known("its storages are deflated, and too long to be inflated for this")
        return
    try:
        for each in deflated:
            for _ in inflated(each):
                pass
    except InputError as error:
        yield _not_known(f"a deflated storage cannot be inflated: {error.what}")


# torch's format before 1.6


def _of_legacy(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    container = checkpoint.container
    assert isinstance(container, LegacyFile)
    if is_tar(checkpoint.source):
        yield _refused("torch takes it for a tar archive, which Python's tarfile does")
    for graph in container.around:
        yield from reasons(graph)
    if container.class_ids:
        yield _refused("it names the classes of modules, with their source")
    for each in checkpoint.references:
        if storage_id(each.node).dtype is UNTYPED:
            yield _refused("torch cannot read a storage without a dtype from this format", is_spelling=True)
    yield from reasons(checkpoint.graph, Contents(blobs=blobs, are_there=False))


# What torch.load reads in no case, or hands on


def _of_pickle(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    del checkpoint, blobs
    yield _refused("it is a plain pickle: torch.load finds no magic number, and reads none", is_spelling=True)


def _of_safetensors(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    """torch.load hands a file of that name to the safetensors package, here of version 0.8."""
    del blobs
    if not checkpoint.source.path.name.endswith(".safetensors"):
        yield _refused("torch.load reads safetensors only under a name that ends in .safetensors")
    without = {info.dtype for info in checkpoint.tensors.values()} - BY_NAME.keys()
    if without:
        yield _not_known(f"what safetensors makes of {', '.join(sorted(without))}, which torch has not")


def _of_folder(checkpoint: Checkpoint, blobs: Readable) -> Iterator[Reason]:
    del checkpoint, blobs
    yield _refused("torch.load reads files, and these are several, with parts of the same tensors", is_spelling=True)


#: All others are folders.
_BY_FORMAT: dict[str, Callable[[Checkpoint, Readable], Iterator[Reason]]] = {
    WRITERS["pt"].name: _of_zip,
    WRITERS["legacy"].name: _of_legacy,
    WRITERS["pickle"].name: _of_pickle,
    _SAFETENSORS: _of_safetensors,
}
