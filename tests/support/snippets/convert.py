"""Convert a file, and read the report."""

from pathlib import Path

import ckptconv

report = ckptconv.convert(Path("ddp.pt"), "cpu.pt", map_location="cpu", strip_prefix="module.")
for (old, new), (tensors, nbytes) in report.changes.devices.items():
    print(f"{old} → {new}: {tensors} tensors, {nbytes} bytes")
for change in report.changes.names:
    print(change.old, "→", change.new)
assert report.written and report.size > 0
