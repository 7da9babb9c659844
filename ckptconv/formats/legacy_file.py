"""How a file of torch's format from before 1.6 starts, and what its reader keeps of it."""

from __future__ import annotations

from ckptconv.byteranges.spans import ByteRange
from ckptconv.formats.writers import WRITERS
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Global, Graph, PersistentId

__all__ = ["MAGIC", "MAGIC_BYTES", "NAME", "LegacyFile", "looks_like"]

NAME = WRITERS["legacy"].name
MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_BYTES = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # as LONG1 says it, in protocols 2 and higher
_MAGIC_TEXT = b"L119547037146038801333356L\n"  # in protocols 0 and 1


def looks_like(head: bytes) -> bool:
    """Whether a file that starts with `head` starts with the magic number, pickled in any protocol."""
    return head.startswith(_MAGIC_TEXT) or (head[:1] == b"\x80" and MAGIC_BYTES in head[:24])


@dataclass(eq=False)
class LegacyFile:
    """What stands in the file: the pickles before the object (None where torch's safe loader would refuse them), the
    object, the keys, and by key the bytes of the storages, in the file's order. ``around``: the pickles that are not
    the object, where they are not as torch writes them. ``class_ids`` and ``warnings``:
    see :class:`~ckptconv.checkpoint.model.Checkpoint`. ``pickle_offset`` and ``pickle_length`` say where the object's
    pickle stands, in bytes.
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
