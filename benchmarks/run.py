"""The time and memory of ckptconv as complete processes, compared with `cp` and torch.

The output is Markdown. README.md explains the figures.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from measuring import Bench
from programs import make
from tables import GIB, TABLES


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MiB and 3 runs: whether it works, not how fast")
    parser.add_argument("--runs", type=int, help="runs of each command (default: 9)")
    parser.add_argument("--folder", type=Path, help="a folder on a disk, with 20 GB free (default: a temporary one)")
    parser.add_argument(
        "--only", metavar="TABLE", nargs="+", choices=TABLES, help=f"of the tables: {', '.join(TABLES)}"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older version, which takes turns with this")
    parser.add_argument("--size", type=float, help="of a file, in GiB (default: 2)")
    options = parser.parse_args()
    size, runs = (GIB // 16, 3) if options.quick else (2 * GIB, 9)
    runs, size = options.runs or runs, int((options.size or size / GIB) * GIB)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles the packages that it installs
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ckptconv-bench-") as folder:
        print(about(Path(folder), runs), flush=True)
        bench = Bench(Path(folder).resolve(), runs, options.before and options.before.resolve())
        make(bench.folder / "src.pt", size)
        for name in options.only or TABLES:
            table, part, bench.limit = TABLES[name]
            table(bench, int(part * size))
        bench.summary()


def about(folder: Path, runs: int) -> str:
    """Return one line about the machine, the file system and the versions."""
    mount = subprocess.run(["df", "--output=fstype,source", folder], capture_output=True, text=True).stdout.split()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    busy = f"{os.getloadavg()[0]:.1f} processes ran before"
    return (
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GB, Linux"
        f" {platform.release()}, {mount[2]} on {mount[3]}, Python {platform.python_version()}, torch"
        f" {metadata.version('torch')}; {runs} rounds, {busy}"
    )


if __name__ == "__main__":
    main()
