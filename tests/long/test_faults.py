"""A fault at every system call with which a conversion changes a disk. strace injects each kind of fault into each kind
of conversion.

A JSON file contains the outcome of each point. CKPTCONV_POINTS names it; the default is a file in the temporary folder
of the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv import convert
from ckptconv.output.direct_writes import WINDOW
from tests.support.injection import ERRORS, OLD, OLD_SET, SIGNALS, Content, Conversion, Point
from tests.support.writers import distributed, sharded

pytestmark = pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed")

KINDS = (
    "pt to pt",
    "pt to safetensors",
    "safetensors to pt",
    "cast",
    "shards to folder",
    "DCP to pt",
    "direct",
    "two files to folder",
    "two processes",
)
#: The command, which treats every file as large compared to the available memory.
DIRECT = (
    "-c",
    "from ckptconv.output import direct_writes as d; d.available_memory = lambda: 0\n"
    "d._LEAST = 0\nfrom ckptconv.cli.main import main\nraise SystemExit(main())",
)
ALL = (*ERRORS, *SIGNALS)
#: Faults of conversions that take seconds, with and without an old output.
FEW = {"old": ("error=EIO", "signal=SIGINT", "signal=SIGKILL"), "absent": ("error=EIO",)}
LEAST = 1000


def a_set(folder: Path) -> Path:
    """Write a model in two shards and its optimizer to `folder`, and return `folder`."""
    sharded(folder, {"w1": torch.randn(5000)}, {"w2": torch.randn(5000)})
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    return folder


def make(kind: str, folder: Path, fixtures: Path, before: Content) -> Conversion:
    """Return the conversion of this `kind`, in `folder`."""
    to_cpu = ("--to", "cpu")
    runs = folder / "runs"
    src = fixtures / "training.pt"
    if kind == "pt to safetensors":
        return Conversion(kind, runs, [src], ["dst.safetensors"], before)
    if kind == "safetensors to pt":
        convert(src, folder / "src.safetensors")
        return Conversion(kind, runs, [folder / "src.safetensors"], ["dst.pt"], before)
    if kind == "cast":
        torch.save({f"w{i}": torch.randn(70_000) for i in range(3)} | {"n": torch.arange(9)}, folder / "src.pt")
        return Conversion(kind, runs, [folder / "src.pt"], ["dst.pt"], before, ("--dtype", "bf16"), threads=True)
    if kind == "shards to folder":
        old = before and {**OLD_SET, "optimizer.pt": b"old"}
        return Conversion(kind, runs, [a_set(folder / "src")], ["dst"], old, to_cpu)
    if kind == "DCP to pt":
        state = {"w": torch.randn(3000), "n": {"b": torch.arange(50)}}
        return Conversion(kind, runs, [distributed(state, folder / "src")], ["dst.pt"], before, to_cpu)
    if kind == "pt to pt":
        return Conversion(kind, runs, [src], ["dst.pt"], before, to_cpu)
    if kind == "direct":
        torch.save({"w": torch.arange(3 << 20)}, folder / "src.pt")
        conversion = Conversion(
            kind, runs, [folder / "src.pt"], ["dst.pt"], before, ("--to", "cuda:0"), program=DIRECT, threads=True
        )
        assert any(f" = {WINDOW}" in line for line in conversion.trace(conversion.fresh())[1])
        return conversion
    srcs = [Path(shutil.copy(src, folder / f"{name}.pt")) for name in "ab"]
    if kind == "two files to folder":
        flags = (*to_cpu, "-j", "1")
        return Conversion(kind, runs, srcs, ["new/a.pt", "new/b.pt"], before, flags, dst="new/", threads=True)
    calls = [(call, 1) for call in ("fallocate", "copy_file_range", "pwrite64", "fsync")] + [("fsync", 2)]
    if before is not None:  # without an old output the name is a link, which the parent process makes too
        calls.append(("rename", 1))
    return Conversion(
        kind, runs, srcs, ["a.pt", "b.pt"], before, (*to_cpu, "-j", "2"), dst="", processes=True, calls=calls
    )


@pytest.fixture(
    scope="module",
    params=[(kind, before) for kind in KINDS for before in ("absent", "old")],
    ids=lambda param: "-".join(param).replace(" ", "_"),
)
def conversion(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fixtures: Path) -> Conversion:
    """Return one conversion for each kind, with and without an old output at its target."""
    kind, before = request.param
    return make(kind, tmp_path_factory.mktemp("faults"), fixtures, None if before == "absent" else OLD)


@pytest.fixture(scope="module")
def all_points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Point]]:
    """Yield a list for the outcomes of all points, and write it to a file at the end."""
    points: list[Point] = []
    yield points
    path = Path(os.environ.get("CKPTCONV_POINTS", tmp_path_factory.getbasetemp() / "points.json"))
    path.write_text(json.dumps([point.as_dict() for point in points], indent=0))
    print(f"\n{len(points)} points: {path}")


def test_every_fault_at_every_call(conversion: Conversion, all_points: list[Point]) -> None:
    """After a fault or a kill at any write-side call, the target is the complete old or new output. Exit status 0 means
    the new one, and an error is one line. A temporary file is left only after a kill or a failed removal.
    """
    faults = FEW["absent" if conversion.before is None else "old"] if conversion.threads else ALL
    if conversion.processes:  # Ctrl-C is for the parent process
        faults = tuple(fault for fault in ALL if fault != "signal=SIGINT")
    points = conversion.points(faults)
    assert len({(point.call, point.number, point.fault) for point in points}) == len(points) >= 10
    assert any("old" in point.outcome for point in points)
    assert any("new" in point.outcome for point in points)
    all_points += points


def test_the_order_of_calls(conversion: Conversion) -> None:
    """The bytes are synced before the file gets its name, and the folder of the name is synced afterwards. A name
    therefore has complete bytes after a loss of power.

    All files of a folder and their names are synced before the folder gets its name.
    """
    assert conversion.undurable() == []


def test_every_fsync_is_needed(conversion: Conversion, tmp_path: Path) -> None:
    """If a copy of ckptconv omits the fsync of files or of folders, ``undurable`` reports it. This is the control for
    ``test_the_order_of_calls``.
    """
    found = []
    for what, name, step in [
        ("files", "output/files.py", "        calls.sync(wait)\n"),
        ("folders", "system/posix.py", "        sync(fd)\n    finally"),
    ]:
        package = tmp_path / what / "ckptconv"
        shutil.copytree(Path(ckptconv.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        module = package / name
        text = module.read_text()
        assert text.count(step) == 1
        module.write_text(text.replace(step, re.sub(r"[a-z.]+(?=\()", "bool", step)))
        found.append({line.split(":")[0] for line in conversion.undurable(package.parent)})
    named, never = "named before it was synced", "the names in it were never synced"
    is_folder = isinstance(conversion.new[0], dict)
    assert found == [{named}, {named, never} if is_folder else {never}]


def test_there_are_enough_points(all_points: list[Point], request: pytest.FixtureRequest) -> None:
    """At least a thousand points were tested if all kinds of conversion ran, and no two points are equal."""
    distinct = {(point.conversion, point.before, point.call, point.number, point.fault) for point in all_points}
    assert len(distinct) == len(all_points)
    if {point.conversion for point in all_points} == set(KINDS):
        assert len(distinct) >= LEAST
