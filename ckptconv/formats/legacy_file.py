"""The start of a file in torch's format from before 1.6, and the result of its reader."""

from __future__ import annotations

from ckptconv.byteranges.spans import ByteRange
from ckptconv.formats.writers import WRITERS
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Global, Graph, PersistentId

NAME = WRITERS["legacy"].name
MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # as an operand of LONG1, in protocols 2 and higher
_MAGIC_TEXT = b"L119547037146038801333356L\n"  # in protocols 0 and 1


def looks_like(head: bytes) -> bool:
    """Return whether a file that starts with `head` starts with the magic number, pickled in any protocol."""
    return head.startswith(_MAGIC_TEXT) or (head[:1] == b"\x80" and MAGIC_BYTES in head[:24])


@dataclass(eq=False)
class LegacyFile:
    """The content of the file.

    Attributes:
        head: The pickles before the object, or None if torch's safe loader would refuse them.
        graph: The object.
        keys: The keys of the storages.
        spans: The bytes of the storages by key, in the order of the file.
        class_ids: See :class:`~ckptconv.checkpoint.model.Checkpoint`.
        notes: Notes on the file.
        warnings: See :class:`~ckptconv.checkpoint.model.Checkpoint`.
        around: The pickles other than the object, if they are not as torch writes them.
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
