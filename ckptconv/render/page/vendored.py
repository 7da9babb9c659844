"""Fetch the JavaScript of others that pages contain. Its version and SHA-512 are constants of this file.

``python ckptconv/render/page/vendored.py FOLDER`` writes the files into FOLDER, for a comparison. Without FOLDER it
writes them to the folder ``vendor`` next to this file. It needs npm and a network.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "d3-hierarchy@3.1.2"
INTEGRITY = "sha512-FX/9frcub54beBdugHjDCdikxThEqjnR93Qt7PvQTOHxyiNCAlvMrHhclk3cD5VeAaq9fxmfRp+CnWw9rEMBuA=="
#: The files that are taken from the archive, and their names here.
FILES = {"package/dist/d3-hierarchy.min.js": "d3-hierarchy.min.js", "package/LICENSE": "d3-hierarchy.LICENSE"}


def published(package: str, integrity: str) -> dict[str, bytes]:
    """Return the files of the npm package `package`, by their names in the archive.

    Args:
        package: The name and version.
        integrity: The hash of the archive, as npm writes it in lock files.

    Raises:
        OSError: npm is not installed.
        subprocess.CalledProcessError: npm could not get the package.
        ValueError: The archive has another hash.
    """
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", package], cwd=work, check=True, capture_output=True, timeout=60)
        (archive,) = Path(work).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != integrity:
            raise ValueError(f"{package} is not what it was: sha512-{digest}")
        with tarfile.open(archive) as opened:
            return {member.name: file.read() for member in opened if (file := opened.extractfile(member))}


def make(folder: Path) -> None:
    """Write the files into `folder`. Raise what :func:`published` raises."""
    contents = published(PACKAGE, INTEGRITY)
    for member, name in FILES.items():
        (folder / name).write_bytes(contents[member])


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "vendor")
