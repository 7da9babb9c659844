"""Give the wheel its bill of materials: `sboms/ckptconv.cdx.json` in its metadata, CycloneDX 1.6, as PEP 770 says.

The wheel contains one piece of software of others, the JavaScript in `ckptconv/render/page/vendor`. Its version and
hash are the constants with which `vendored.py` fetches it. There is no date and no serial number in the bill, so that
the same source gives the same wheel.
"""

from __future__ import annotations

import base64
import hashlib
import json
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PAGE = "ckptconv/render/page"


class SbomHook(BuildHookInterface):
    """A build hook that writes the bill of materials to a temporary folder and names it to the builder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill and add it to `build_data`."""
        self._work = tempfile.TemporaryDirectory()
        path = Path(self._work.name, "ckptconv.cdx.json")
        bill = _bill(Path(self.root), self.metadata.version)
        path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8", newline="\n")
        path.chmod(0o644)
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self._work.cleanup()


def _bill(root: Path, version: str) -> dict[str, Any]:
    vendored = runpy.run_path(str(root / _PAGE / "vendored.py"))
    name, _, number = vendored["PACKAGE"].partition("@")
    algorithm, _, digest = vendored["INTEGRITY"].partition("-")
    assert algorithm == "sha512"
    ours, theirs = f"pkg:pypi/ckptconv@{version}", f"pkg:npm/{name}@{number}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _library("ckptconv", version, ours, "Apache-2.0")},
        "components": [
            {
                **_library(name, number, theirs, "ISC"),
                "description": "The SHA-512 is that of the archive from which the files were taken.",
                "hashes": [{"alg": "SHA-512", "content": base64.b64decode(digest).hex()}],
                "components": [_file(root, f"{_PAGE}/vendor/{file}") for file in vendored["FILES"].values()],
            }
        ],
        "dependencies": [{"ref": ours, "dependsOn": [theirs]}],
    }


def _library(name: str, version: str, purl: str, license_id: str) -> dict[str, Any]:
    licenses = [{"license": {"id": license_id}}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "licenses": licenses}


def _file(root: Path, path: str) -> dict[str, Any]:
    digest = hashlib.sha256((root / path).read_bytes()).hexdigest()
    return {"type": "file", "name": path, "hashes": [{"alg": "SHA-256", "content": digest}]}
