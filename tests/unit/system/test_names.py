"""Names of files that are stored in other files: none leads out of the folder, on any system."""

from __future__ import annotations

import ntpath
import posixpath

import pytest

from ckptconv.system.names import stays_inside

ELSEWHERE = [
    *("", ".", "..", "a\0b", "a\nb", "a\\b", "..\\a", "C:", "C:x.distcp", "C:\\x", "name:stream", "x.pt::$DATA"),
    *("NUL", "nul.distcp", "Con", "aux.tar.gz", "COM1", "lpt9.bin", "com\u00b9.pt", "CONIN$", "prn .pt", "NUL "),
    *("x.", "x. .", "x ", "...", ".. "),
]
HERE = [
    "__0_0.distcp",
    "model-00001-of-00002.safetensors",
    ".metadata",
    "..a",
    "a..b",
    "nullable.pt",
    "com10.pt",
    "é.bin",
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_that_leave_the_folder(name: str) -> None:
    """A name that leads out of the folder on some system is refused, also as the name of a folder and of a file in a
    folder.
    """
    assert not any(stays_inside(each, folders=True) for each in (name, f"{name}/x", f"x/{name}", f"/{name}"))


@pytest.mark.parametrize("name", HERE)
def test_unchanged_values(name: str) -> None:
    """Ordinary names stay in the folder, as POSIX and Windows join paths. Names with folders are accepted only with
    `folders`.
    """
    assert stays_inside(name) and stays_inside(f"a/{name}", folders=True) and not stays_inside(f"a/{name}")
    for system in (posixpath, ntpath):
        folder = system.normpath(system.join("root", "folder"))
        assert system.dirname(system.normpath(system.join(folder, name))) == folder
