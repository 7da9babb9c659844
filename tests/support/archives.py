"""Zip archives that are rewritten: with other records, compressed, in another byte order, without checksums, or
damaged.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["big_endian", "flip_bit", "records_of", "rezip", "rezipped", "turned", "without_crc32", "without_sums"]


def records_of(archive: Path | bytes) -> dict[str, bytes]:
    """Return the records of `archive` by their names below its folder."""
    with zipfile.ZipFile(io.BytesIO(archive) if isinstance(archive, bytes) else archive) as opened:
        return {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}


def rezipped(
    whole: bytes,
    change: Mapping[str, bytes | None] | None = None,
    *,
    method: int = zipfile.ZIP_STORED,
    folder: str | None = None,
) -> bytes:
    """Return the archive `whole`, rewritten by Python's zipfile.

    Args:
        whole: The archive.
        change: Records to replace, to add, or (None) to leave out, by their names below its folder.
        method: The compression method of the records.
        folder: Another name for that folder.
    """
    with zipfile.ZipFile(io.BytesIO(whole)) as old:
        folder = folder or old.namelist()[0].partition("/")[0]
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as new:
        for name, data in {**records_of(whole), **(change or {})}.items():
            if data is not None:
                new.writestr(f"{folder}/{name}", data)
    return stream.getvalue()


def rezip(
    path: Path, to: Path, change: Mapping[str, bytes | None] | None = None, *, method: int = zipfile.ZIP_STORED
) -> Path:
    """Rewrite the archive at `path` to `to` with `rezipped`, and return `to`. Both paths can be the same."""
    to.write_bytes(rezipped(path.read_bytes(), change, method=method))
    return to


def without_sums(path: Path) -> None:
    """Replace the checksums in all headers of the archive at `path` by 0, which means that they are not known."""
    whole = bytearray(path.read_bytes())
    for found in re.finditer(rb"PK(?:\x03\x04.{10}|\x01\x02.{12})", bytes(whole), re.DOTALL):
        whole[found.end() : found.end() + 4] = bytes(4)
    path.write_bytes(whole)


def turned(data: bytes, width: int) -> bytes:
    """Return `data` with the bytes of each number of `width` bytes in reverse order."""
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def big_endian(path: Path, to: Path, widths: Mapping[str, int], *, method: int = zipfile.ZIP_STORED) -> Path:
    """Write to `to` the checkpoint at `path` as a big-endian machine would have written it.

    Args:
        path: A little-endian checkpoint of torch.
        to: The path of the output.
        widths: The number of bytes of the numbers in each storage, by its key.
        method: The compression method of the records.
    """
    records = records_of(path)
    swapped = {f"data/{key}": turned(records[f"data/{key}"], width) for key, width in widths.items()}
    return rezip(path, to, {"byteorder": b"big", **swapped}, method=method)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Let torch save archives without checksums in this context."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def flip_bit(path: Path, at: int) -> None:
    """Flip one bit in the byte `at` of the file at `path`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
