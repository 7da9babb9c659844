"""Far files that are one checkpoint: an index and what it names beside it, or what a folder has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ckptconv.byteranges.far.download import open_far
from ckptconv.byteranges.far.paths import FarPath
from ckptconv.byteranges.far.planning import POLICY
from ckptconv.byteranges.far.source import FarSource
from ckptconv.byteranges.fault_sink import RAISED, FaultSink
from ckptconv.byteranges.sources import Readable, SourceFolder
from ckptconv.byteranges.spans import Meter
from ckptconv.errors import MissingInputError, UnsupportedError


class FarFolder(SourceFolder):
    """The far set in the folder `path`, or whose index is there. Nothing is read but what stands in that folder."""

    is_far = True
    is_stored = False

    def __init__(
        self,
        path: FarPath,
        faults: FaultSink = RAISED,
        check: Callable[[Readable], Readable] = lambda source: source,
        *,
        skims: bool = False,
        download: bool | Path = False,
        progress: Meter | None = None,
    ) -> None:
        """`check` is called with each file that is opened, and raises what is wrong with it."""

        def open_ranges(path: Path) -> Readable:
            assert isinstance(path, FarPath)
            return check(FarSource(path, faults, skims=skims))

        def open_file(path: Path, faults: FaultSink) -> Readable:
            assert isinstance(path, FarPath)
            return check(open_far(path, faults, skims=skims, download=download, progress=progress))

        super().__init__(path, faults, open_file)
        self._open_ranges = open_ranges
        self.mode = 0o666

    def missing(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that are not there. The others are opened, several at once."""
        assert isinstance(self.folder, FarPath)
        unknown = [name for name in names if name not in self._open]
        absent = {name for name in unknown if self.folder.holds(name) is False}

        def opened(name: str) -> Readable | None:
            try:
                return self._open_ranges(self.folder / name)
            except MissingInputError:
                return None

        with ThreadPoolExecutor(POLICY.concurrency) as pool:
            tasks = [(name, pool.submit(opened, name)) for name in unknown if name not in absent]
        found = {name: task.result() for name, task in tasks if task.exception() is None}
        for name, source in found.items():
            if source:
                self._open[name] = source
                self.add(source)
        for name, task in tasks:
            if isinstance(task.exception(), UnsupportedError):
                self.open(name)  # which can download it: here, where Ctrl-C ends that
            else:
                task.result()  # which raises
        return absent | {name for name, source in found.items() if source is None}

    def names(self) -> list[str]:
        """What is in the folder; of an index beside which nobody has looked, nothing."""
        return super().names() if self.is_whole else []
