"""Prove of a planned file, before a byte of it is written, that torch's safe loader takes it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ckptconv.byteranges.sources import ComputedSource, Source
from ckptconv.byteranges.spans import OutFile
from ckptconv.errors import RefusedError, some
from ckptconv.formats import opening
from ckptconv.output.virtual_file import VirtualFile
from ckptconv.safety.torch_load import CALL, torch_loading


class _Planned(ComputedSource):
    """A planned file, read by position."""

    def __init__(self, file: OutFile) -> None:
        self.path, self.fd, self.size = file.path, -1, file.size
        self._stream = VirtualFile(file)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what stands at `offset`."""
        self._stream.seek(offset)
        self._stream.readinto(buffer)


def prove_that_it_loads(file: OutFile, source: Path) -> None:
    """Read a planned `file`, made of what stands in `source`, and follow what torch does with it.

    Raises RefusedError where torch refuses it, or where that is not known.
    """
    loading = torch_loading(opening.read_file(cast("Source", _Planned(file))))
    if not loading.loads:
        raise RefusedError(
            f"it cannot be proved that {CALL} takes the output",
            where=source,
            got=some([reason.text for reason in loading.reasons]),
        )
