"""Far files of which a server sends no ranges: with ``--download`` they are downloaded once, and read here."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ckptconv.byteranges.far.paths import FarPath
from ckptconv.byteranges.far.planning import POLICY
from ckptconv.byteranges.far.requests import Deadline, Transient, retried
from ckptconv.byteranges.far.source import FarSource
from ckptconv.byteranges.far.transports import transport_for
from ckptconv.byteranges.far.urls import HTTP
from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import Meter
from ckptconv.errors import CkptconvError, OutputError, UnsupportedError, size

if TYPE_CHECKING:
    from ckptconv.byteranges.far.http import HttpTransport


def open_far(
    path: FarPath,
    faults: FaultSink = RAISED,
    *,
    skims: bool = False,
    download: bool | Path = False,
    progress: Meter | None = None,
) -> Readable:
    """The far file at `path`, read by ranges. With `download` it is downloaded if the server sends no ranges.

    `download` can be the folder to use. `progress` is called with the bytes that are downloaded.

    Raises InputError, UsageError where no package can reach it, OutputError where there is no room for it.
    """
    try:
        return FarSource(path, faults, skims=skims)
    except UnsupportedError:
        if not download or path.url.scheme not in (*HTTP, "hf"):
            raise
    return _Downloaded(path, faults, download if isinstance(download, Path) else Path(tempfile.gettempdir()), progress)


class _Downloaded(Readable):
    """All of the far file at `path`, in a file without a name in `folder`, which goes when it is closed."""

    def __init__(self, path: FarPath, faults: FaultSink, folder: Path, progress: Meter | None) -> None:
        self.path, self.url, self.faults, self._folder = path, path.url, faults, folder
        self._progress = progress or (lambda _: contextlib.nullcontext())
        with self._as_error():
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with this
        self.fd = self._file.fileno()
        try:
            self.size = retried(self._received, path)
        except BaseException:
            self.close()
            raise

    def _received(self, deadline: float) -> int:
        """How many bytes came, all of which are in our file now. Raises Transient, InputError, OutputError.

        Every ``POLICY.part`` bytes must come within ``POLICY.deadline`` seconds.
        """
        done = due = 0
        limit = Deadline(deadline)
        transport = cast("HttpTransport", transport_for(self.url, self.path))
        with contextlib.closing(transport), self._as_error(), transport.whole(limit) as (length, chunks):
            self._check_room(length)
            self._file.seek(0)
            with self._progress(length) as tick:
                for chunk in chunks:
                    if done >= due:
                        due, limit.at = done + POLICY.part, time.monotonic() + POLICY.deadline
                    if time.monotonic() > limit.at:
                        raise Transient(f"the server is too slow: {done:,} bytes came")
                    done += self._file.write(chunk)
                    if tick:
                        tick(len(chunk))
            self._file.flush()
        return done

    def _check_room(self, length: int) -> None:
        space = os.fstatvfs(self.fd)
        free = space.f_bavail * space.f_frsize
        if length > free:
            what, expected = "too little free space for the download", f"{length:,} bytes for a while"
            raise OutputError(what, where=self._folder, expected=expected, got=f"{free:,} bytes")

    @contextlib.contextmanager
    def _as_error(self) -> Iterator[None]:
        """Raise in our words what the system says meanwhile of our file."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CkptconvError):
                raise
            what = f"the download cannot be kept there: {error.strerror or error}"
            raise OutputError(what, where=self._folder) from error

    def about(self) -> list[str]:
        """A note that it was downloaded."""
        return [f"the server sends no ranges of it: all {size(self.size)} were downloaded first"]

    def close(self) -> None:
        """Close the file, which has no name, so that its space is free again."""
        self._file.close()
