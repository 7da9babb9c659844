"""Predict whether ``torch.load(path, map_location="cpu", weights_only=True)`` loads a file: yes, no, or not known.

:mod:`ckptconv.checkpoint.weights_only` models the pickle. This module models torch's checks of the file around it.
Source: ``torch/serialization.py`` of torch 2.6 to 2.15, and tests of its C++ code in
``caffe2/serialize/inline_container.cc``.

The answer is valid if the reader has found no fault in the file, if the process has imported only torch, and if it has
enough memory for the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.byteranges.reading import inflated
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Inflate
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.storage_ids import storage_id
from ckptconv.checkpoint.torch_versions import KNOWN, NEWEST, RANGE, Rules, Version, asked_version, word_of
from ckptconv.checkpoint.weights_only.objects import Answer, Contents, Reason
from ckptconv.checkpoint.weights_only.unpickler import reasons
from ckptconv.dtypes import BY_NAME, UNTYPED
from ckptconv.errors import InputError, MalformedError
from ckptconv.formats.sharded.index import ShardedContainer
from ckptconv.formats.torch_files import LegacyFile
from ckptconv.formats.torch_zip import CONSTANTS, is_exported, record_bytes
from ckptconv.formats.two_readings import is_tar
from ckptconv.formats.writers import WRITERS
from ckptconv.formats.zip_archive import Archive, Member
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.limits import LIMITS

#: The call whose result is predicted.
CALL = 'torch.load(path, map_location="cpu", weights_only=True)'
#: The reason for a safetensors file in torch before :data:`SAFETENSORS_SINCE`.
NO_SAFETENSORS = "torch.load reads safetensors since torch 2.13"
SAFETENSORS_SINCE = "2.13"
_ZIP, _LEGACY, _PICKLE, _SAFETENSORS = (WRITERS[word].name for word in ("pt", "legacy", "pickle", "safetensors"))
_VERSIONS = range(1, 11)
_NUMBER = regex(rb"\s*\+?([0-9]{1,19})")
_LONGEST_NAME = 511  # bytes of a record's name that torch keeps
_ALIGNMENT = ".storage_alignment"
_SERIALIZATION_ID = ".data/serialization_id"
_OTHER_VERSION = ".data/version"
#: The records that torch reads next to the pickle and the storages. It ignores the case of their names.
_RECORDS = ("version", _OTHER_VERSION, _ALIGNMENT, _SERIALIZATION_ID, ".format_version", "byteorder")


@dataclass(frozen=True)
class Loading:
    """The prediction for one version of torch.

    Attributes:
        answer: ``loads``, ``refused`` or ``not known``.
        reasons: The reasons, refusals first. Empty if the answer is ``loads``.
        torch: The version of torch, such as ``2.13``.
        varies: Whether the answer may be different for other known versions.
    """

    answer: Answer
    reasons: tuple[Reason, ...] = ()
    torch: str = word_of(NEWEST)
    varies: bool = False

    @property
    def loads(self) -> bool:
        """Whether the answer is ``loads``."""
        return self.answer == "loads"


def torch_loading(checkpoint: Checkpoint, *, is_sound: bool = True, torch: Version | None = None) -> Loading:
    """Return whether torch's safe loader would load the file of `checkpoint`.

    Args:
        checkpoint: The unedited checkpoint, whose source must be open.
        is_sound: Whether the reader has found no fault in the file. If it has, the answer is ``not known``.
        torch: The version of torch. None is the installed version, or the newest known version if none is installed.

    Returns:
        The answer for :data:`CALL` on a machine without accelerators. It is ``not known`` for an unknown version.
    """
    torch = torch or asked_version(None)
    if torch not in KNOWN or not is_sound:
        why = f"ckptconv knows the rules of torch {RANGE} only"
        why = why if is_sound else "something is wrong with the file"
        return Loading("not known", (Reason("not known", why),), word_of(torch))
    rules = Rules(torch)
    found = [*_reasons(checkpoint, checkpoint.blobs or checkpoint.source, rules)]
    found.sort(key=lambda each: each.known != "refused")
    return Loading(found[0].known if found else "loads", tuple(found), word_of(torch), rules.vary)


def answers_of(checkpoint: Checkpoint, loading: Loading) -> dict[str, Answer]:
    """Return the answers of all known versions of torch. `loading` is the answer of one version."""
    every = {word_of(version): version for version in KNOWN}
    if not loading.varies and loading.torch in every:
        return dict.fromkeys(every, loading.answer)
    return {word: torch_loading(checkpoint, torch=version).answer for word, version in every.items()}


def _reasons(checkpoint: Checkpoint, blobs: Readable, rules: Rules) -> Iterator[Reason]:
    """Yield the reasons against loading a file, or each shard of a set. `blobs` is the source of long texts."""
    container = checkpoint.container
    if isinstance(container, ShardedContainer):
        for shard in container.shards:
            yield from _reasons(shard.part, blobs, rules)
        return
    is_named_safetensors = checkpoint.source.path.name.endswith(".safetensors") and rules.since(2, 13)
    if is_named_safetensors and checkpoint.format != _SAFETENSORS:
        yield Reason("refused", "its name ends in .safetensors, but it is not a safetensors file")
    if is_exported(checkpoint):
        yield Reason(
            "refused", "it is a program of torch.export, which torch.export.load loads and torch.load does not"
        )
        return
    if checkpoint.script_classes is not None:
        yield Reason("refused", "it is a TorchScript archive, which torch.jit.load loads and torch.load does not")
        return
    if checkpoint.format == _ZIP:
        yield from _zip_reasons(checkpoint, blobs, rules)
    elif checkpoint.format == _LEGACY:
        yield from _legacy_reasons(checkpoint, blobs, rules)
    elif checkpoint.format == _PICKLE:
        yield Reason("refused", "it is a plain pickle, which torch.load does not read", is_spelling=True)
    elif checkpoint.format == _SAFETENSORS:
        yield from _safetensors_reasons(checkpoint, rules)
    else:
        yield Reason(
            "refused", "the tensors are split over several files, and torch.load reads only one", is_spelling=True
        )


# torch's zip


def _zip_reasons(checkpoint: Checkpoint, blobs: Readable, rules: Rules) -> Iterator[Reason]:
    """Yield the reasons against loading a zip file of torch."""
    archive = checkpoint.container
    assert isinstance(archive, Archive)
    yield from _record_reasons(checkpoint, archive, rules)
    yield from _deflate_reasons(checkpoint)
    contents = Contents(checkpoint.index.storage_of, blobs, checkpoint.byteorder)
    yield from reasons(checkpoint.graph, contents, rules)


def _record_reasons(checkpoint: Checkpoint, archive: Archive, rules: Rules) -> Iterator[Reason]:
    """Yield reasons from the records that torch's reader of archives checks, apart from the pickle and the storages."""
    names = archive.names
    root = archive.root.encode()
    if len(root) >= _LONGEST_NAME:
        yield Reason(
            "refused", f"the name of the archive's folder has {len(root):,} bytes, and torch keeps {_LONGEST_NAME}"
        )
    for member in archive.members:
        yield from _name_reasons(member.name.encode(), root)
    read = {name.lower(): member for name, member in names.items() if name.lower() in _RECORDS}
    try:
        records = {name: _short_record(checkpoint, member) for name, member in read.items()}
    except InputError as error:
        yield Reason("not known", f"a record that torch reads is not valid: {error.what}")
        return
    yield from _version_reasons(records.get(_OTHER_VERSION, records.get("version")))
    try:
        int(records.get(_ALIGNMENT, b"64"))
    except ValueError:
        if rules.since(2, 7):
            yield Reason("refused", f"the record {_ALIGNMENT} is not a number", is_spelling=True)
    try:
        records.get(_SERIALIZATION_ID, b"").decode()
    except UnicodeDecodeError:
        yield Reason("refused", f"the record {_SERIALIZATION_ID} is not UTF-8", is_spelling=True)


def _name_reasons(name: bytes, root: bytes) -> Iterator[Reason]:
    """Yield reasons for a record whose name is longer than torch keeps. `root` is the name of the archive's folder."""
    kept = name[:_LONGEST_NAME]
    if kept == name:
        return
    try:
        kept.decode()
    except UnicodeDecodeError:
        yield Reason("refused", f"a record's name has {len(name):,} bytes, and torch cuts a character of it in two")
    if kept == root + b"/" + CONSTANTS.encode():
        yield Reason("refused", f"a long record name begins with {CONSTANTS}, where torch cuts it off")


def _version_reasons(note: bytes | None) -> Iterator[Reason]:
    """Yield a reason if `note`, the content of the record with the archive's version, is missing or not accepted."""
    number = _NUMBER.match(note or b"")
    if note is None:  # the record is damaged, or its case differs as only Unicode defines it
        yield Reason("refused", "the record with the archive's version is missing")
    elif number is None:
        yield Reason("refused", "the archive's version is not a number")
    elif int(number[1]) not in _VERSIONS:
        yield Reason(
            "refused",
            f"the archive has version {int(number[1])}, and torch reads {_VERSIONS[0]} to {_VERSIONS[-1]}",
        )


def _short_record(checkpoint: Checkpoint, member: Member) -> bytes:
    """Return the content of the record `member`. Raise MalformedError if it is longer than a short record may be."""
    if member.size > LIMITS.inline_bytes:
        raise MalformedError("the record is too long", where=f"{checkpoint.source.path}: {member.name}")
    return record_bytes(member._replace(checked=False))


def _deflate_reasons(checkpoint: Checkpoint) -> Iterator[Reason]:
    """Yield a reason if a deflated storage is damaged, or if the deflated storages are too long for a test.

    torch inflates them when it loads the file.
    """
    deflated = [each.data for each in checkpoint.storages.values() if isinstance(each.data, Inflate)]
    if sum(each.length for each in deflated) > LIMITS.inflated_to_prove:
        yield Reason("not known", "its compressed storages are too large to be checked")
        return
    try:
        for each in deflated:
            for _ in inflated(each):
                pass
    except InputError as error:
        yield Reason("not known", f"a compressed storage is damaged: {error.what}")


# torch's format before 1.6


def _legacy_reasons(checkpoint: Checkpoint, blobs: Readable, rules: Rules) -> Iterator[Reason]:
    """Yield the reasons against loading a file in torch's format before 1.6."""
    container = checkpoint.container
    assert isinstance(container, LegacyFile)
    if is_tar(checkpoint.source):
        yield Reason("refused", "torch takes it for a tar archive")
    for graph in container.around:
        yield from reasons(graph, rules=rules)
    if container.class_ids:
        yield Reason("refused", "it contains module classes with their source code")
    for each in checkpoint.references:
        if storage_id(each.node).dtype is UNTYPED:
            yield Reason("refused", "torch cannot read a storage without a dtype from this format", is_spelling=True)
    contents = Contents(checkpoint.index.storage_of, blobs, are_there=False)
    yield from reasons(checkpoint.graph, contents, rules)


def _safetensors_reasons(checkpoint: Checkpoint, rules: Rules) -> Iterator[Reason]:
    """Yield the reasons against loading a safetensors file.

    torch.load passes a file with this suffix to the safetensors package. Version 0.8 of the package is modelled.
    """
    if not rules.since(2, 13):
        yield Reason("refused", NO_SAFETENSORS)
    elif not checkpoint.source.path.name.endswith(".safetensors"):
        yield Reason("refused", "torch.load reads safetensors only under a name that ends in .safetensors")
    without = {info.dtype for info in checkpoint.tensors.values()} - BY_NAME.keys()
    if without:
        yield Reason("not known", f"torch has no dtype for {', '.join(sorted(without))}")
