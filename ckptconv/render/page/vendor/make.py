"""Make the JavaScript of others that pages contain, of what their authors published: version and SHA-512 stand here.

``python ckptconv/render/page/vendor/make.py FOLDER`` writes the files into FOLDER, for a comparison; without FOLDER,
into the one that this file is in. It needs npm and a network.
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
#: What of the archive is taken, and what it is called here.
FILES = {"package/dist/d3-hierarchy.min.js": "d3-hierarchy.min.js", "package/LICENSE": "d3-hierarchy.LICENSE"}


def published(package: str, integrity: str) -> dict[str, bytes]:
    """The files of what was published as `package`, by their names in the archive.

    Args:
        package: Its name and version.
        integrity: Of the archive, as npm says it in lock files.

    Raises:
        OSError: There is no npm.
        subprocess.CalledProcessError: It could not get the package.
        ValueError: What it got is not what is expected.
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
    """Write the files into `folder`. Raises as :func:`published` does."""
    found = published(PACKAGE, INTEGRITY)
    for member, name in FILES.items():
        (folder / name).write_bytes(found[member])


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
