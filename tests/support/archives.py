"""Zip archives written again: with other records, compressed, in another byte order, without checksums, damaged."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["big_endian", "flip_bit", "records_of", "rezip", "rezipped", "turned", "without_crc32"]


def records_of(archive: Path | bytes) -> dict[str, bytes]:
    """The records of `archive` by their names below its folder."""
    with zipfile.ZipFile(io.BytesIO(archive) if isinstance(archive, bytes) else archive) as opened:
        return {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}


def rezipped(
    whole: bytes,
    change: Mapping[str, bytes | None] | None = None,
    *,
    method: int = zipfile.ZIP_STORED,
    folder: str | None = None,
) -> bytes:
    """The archive `whole`, written again by Python's zipfile.

    Args:
        whole: The archive.
        change: Records to replace, to add, or (None) to leave out, by their names below its folder.
        method: How records are stored.
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
    """Write the archive at `path` again to `to`, which can be the same, as `rezipped` does it."""
    to.write_bytes(rezipped(path.read_bytes(), change, method=method))
    return to


def turned(data: bytes, width: int) -> bytes:
    """`data` with the bytes of each number of `width` bytes in the other order."""
    return b"".join(data[at : at + width][::-1] for at in range(0, len(data), width))


def big_endian(path: Path, to: Path, widths: Mapping[str, int], *, method: int = zipfile.ZIP_STORED) -> Path:
    """Write to `to` what a big-endian machine would have written instead of the checkpoint at `path`.

    Args:
        path: A little-endian checkpoint of torch's.
        to: Where to.
        widths: How many bytes the numbers of each storage have, by its key.
        method: How records are stored.
    """
    records = records_of(path)
    swapped = {f"data/{key}": turned(records[f"data/{key}"], width) for key, width in widths.items()}
    return rezip(path, to, {"byteorder": b"big", **swapped}, method=method)


@contextmanager
def without_crc32() -> Iterator[None]:
    """In this context torch saves archives without checksums."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def flip_bit(path: Path, at: int) -> None:
    """Flip one bit of the file at `path`, in its byte `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
