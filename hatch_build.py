"""Give the wheel the pages that `ckptconv help` searches, and its bill of materials.

The bill is `sboms/ckptconv.cdx.json` in the metadata, CycloneDX 1.6, as PEP 770 says. The wheel contains no software of
others, so the bill names only the package. There is no date and no serial number in the bill, so that the same source
gives the same wheel.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SbomHook(BuildHookInterface):
    """A build hook that names pages of the documentation, and the bill of materials, to the builder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the bill to a temporary folder, and add it and the pages to `build_data`."""
        self._work = tempfile.TemporaryDirectory()
        path = Path(self._work.name, "ckptconv.cdx.json")
        bill = _bill(self.metadata.version)
        path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8", newline="\n")
        path.chmod(0o644)
        build_data["sbom_files"].append(str(path))
        if version != "editable":  # in an editable install, `ckptconv help` reads the pages in docs/
            for name in ("fix", "how-to"):
                build_data["force_include"][f"docs/{name}"] = f"ckptconv/cli/pages/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self._work.cleanup()


def _bill(version: str) -> dict[str, Any]:
    ours = f"pkg:pypi/ckptconv@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _library("ckptconv", version, ours, "Apache-2.0")},
        "components": [],
        "dependencies": [{"ref": ours, "dependsOn": []}],
    }


def _library(name: str, version: str, purl: str, license_id: str) -> dict[str, Any]:
    licenses = [{"license": {"id": license_id}}]
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, "licenses": licenses}
