"""Recognise files of torch.save: by their first bytes, and in byte strings, as in skorch's pickles.

A byte string is a bytes object, a bytearray, a string of Python 2, or the call by which Python 3 writes bytes in
protocol 2 (``_codecs.encode`` of a text). Only its first bytes are read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptconv.byteranges.sources import Readable, SliceSource
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.legacy_python import bytes_in
from ckptconv.errors import MalformedError
from ckptconv.formats import torch_zip
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Global, Graph, PersistentId
from ckptconv.pickles.paths import Place

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # as an operand of LONG1, in protocols 2 and higher
_MAGIC_TEXT = b"L119547037146038801333356L\n"  # in protocols 0 and 1
_HEAD = 64
_DIRECTORY = 1 << 16  # bytes at the end of an archive that are searched


def looks_like_legacy(head: bytes) -> bool:
    """Return whether a file that starts with `head` starts with torch's magic number, pickled in any protocol."""
    return head.startswith(_MAGIC_TEXT) or (head[:1] == b"\x80" and MAGIC_BYTES in head[:24])


@dataclass(eq=False)
class LegacyFile:
    """The content of a file in torch's format from before 1.6.

    Attributes:
        head: The pickles before the object. None if torch's safe loader would refuse them, or if they contain other
            strings than torch's.
        graph: The object.
        keys: The keys of the storages.
        spans: The bytes of the storages by key, in the order of the file.
        class_ids: See :class:`~ckptconv.checkpoint.model.Checkpoint`.
        notes: Notes on the file.
        warnings: See :class:`~ckptconv.checkpoint.model.Checkpoint`.
        around: The pickles other than the object. Those before the object are left out if torch writes them exactly so.
        pickle_offset: The offset of the object's pickle.
        pickle_length: The number of bytes of the object's pickle.
    """

    head: ByteRange | None
    graph: Graph
    keys: frozenset[str]
    spans: dict[str, ByteRange]
    class_ids: dict[Global, PersistentId]
    notes: list[str]
    warnings: list[str]
    around: list[Graph]
    pickle_offset: int
    pickle_length: int


def files_in(places: Iterable[Place], blobs: Readable) -> Iterator[tuple[Place, Readable]]:
    """Yield the files of torch.save that are byte strings at `places`, each after its place.

    Args:
        places: Places in one graph.
        blobs: The source that contains the graph's long byte strings.
    """
    for place in places:
        try:
            span = bytes_in(place.node, blobs)
        except MalformedError:
            continue
        if span is None:
            continue
        file = SliceSource(*span)
        head = file.read(0, min(_HEAD, file.size))
        if torch_zip.looks_like(head):
            length = min(_DIRECTORY, file.size)
            is_file = b"/data.pkl" in file.read(file.size - length, length)
        else:
            is_file = looks_like_legacy(head)
        if is_file:
            yield place, file
