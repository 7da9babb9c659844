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

__all__ = ["FILES", "INTEGRITY", "PACKAGE", "make"]

PACKAGE = "d3-hierarchy@3.1.2"
#: As npm says it in lock files: of the archive that was published.
INTEGRITY = "sha512-FX/9frcub54beBdugHjDCdikxThEqjnR93Qt7PvQTOHxyiNCAlvMrHhclk3cD5VeAaq9fxmfRp+CnWw9rEMBuA=="
#: What of the archive is taken, and what it is called here.
FILES = {"package/dist/d3-hierarchy.min.js": "d3-hierarchy.min.js", "package/LICENSE": "d3-hierarchy.LICENSE"}


def make(folder: Path) -> None:
    """Write the files into `folder`.

    Raises:
        OSError: There is no npm.
        subprocess.CalledProcessError: It could not get the package.
        ValueError: What it got is not what is expected.
    """
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", PACKAGE], cwd=work, check=True, capture_output=True, timeout=60)
        (archive,) = Path(work).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != INTEGRITY:
            raise ValueError(f"{PACKAGE} is not what it was: sha512-{digest}")
        with tarfile.open(archive) as opened:
            for member, name in FILES.items():
                file = opened.extractfile(member)
                assert file
                (folder / name).write_bytes(file.read())


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
