"""The versions of torch whose safe loader is modelled, their differences, and the installed version.

Sources: ``torch/_weights_only_unpickler.py``, ``_utils.py``, ``serialization.py`` and ``storage.py`` of each version.
The tests' table ``torch_facts.txt`` contains the names and the hashes of the functions that were compared.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from ckptconv.checkpoint.safe_globals import ALLOWED, IMPORTED_WITH_TORCH
from ckptconv.errors import UsageError
from ckptconv.hints import option
from ckptconv.lazy_regex import regex

#: Major and minor version. Patch releases of the known versions have the same rules.
Version: TypeAlias = "tuple[int, int]"

OLDEST, NEWEST = (2, 6), (2, 15)
KNOWN: tuple[Version, ...] = tuple((2, minor) for minor in range(OLDEST[1], NEWEST[1] + 1))
#: The known versions, for messages.
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)

_BITS = [f"torch.{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
#: The first versions whose list has these globals. The others have been on it since :data:`OLDEST`.
SINCE: dict[str, Version] = {
    "torch.float8_e8m0fnu": (2, 7),
    "torch.float4_e2m1fn_x2": (2, 8),
    **dict.fromkeys(_BITS, (2, 7)),
    "torch.bcomplex32": (2, 14),
    "torch.distributed._mesh_layout._MeshLayout": (2, 10),
    "torch.distributed._mesh_layout._FlatLayout": (2, 13),
}
#: The first versions whose list does not have these globals any more.
UNTIL: dict[str, Version] = {
    "torch._utils._rebuild_nested_tensor": (2, 15),
    "torch.nested._internal.nested_tensor.NestedTensor": (2, 15),
    "torch.nested._internal.nested_tensor._rebuild_njt": (2, 15),
}
#: Ends of the names of Python's exceptions and stack summaries, which only ``import torch`` of 2.14 adds.
_ONLY_IN_2_14 = ("Error", "Exception", "Exit", "Group", "Interrupt", "Iteration", "Summary", "Warning")

#: Vulnerabilities of torch.load(weights_only=True): the first versions without them, and what a file can do.
_FLAWS = {"CVE-2025-32434": ((2, 6), "run code"), "CVE-2026-24747": ((2, 10), "corrupt memory")}

_INSTALLED = regex(r"torch-([0-9]+\.[0-9][^-]*)(?:-py[0-9.]+)?\.(?:dist|egg)-info")
_NUMBERS = regex(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])")
#: The word that asks about every known version.
ALL = "all"


class Rules:
    """The rules of the safe loader in one version of torch.

    Attributes:
        torch: The version.
        keep: Whether to allow globals, too, that only older known versions allow.
        vary: Whether the answer to an earlier call may be different for another known version.
    """

    def __init__(self, torch: Version = NEWEST, *, keep: bool = False) -> None:
        self.torch = torch
        self.keep = keep
        self.vary = False

    def since(self, *version: int) -> bool:
        """Return whether the version is `version` or newer. Also set ``vary``."""
        self.vary = True
        return self.torch >= version

    def allow(self, name: str) -> bool:
        """Return whether the unpickler allows the global `name`."""
        return name in ALLOWED and self._have(name)

    def add(self, name: str) -> bool:
        """Return whether ``import torch`` adds the global `name` to the allowed globals."""
        if name.startswith(("builtins.", "traceback.")) and name.endswith(_ONLY_IN_2_14):
            return self.since(2, 14) and not self.since(2, 15)
        return name in IMPORTED_WITH_TORCH and self._have(name)

    def _have(self, name: str) -> bool:
        if name in SINCE:
            return self.since(*SINCE[name])
        return name not in UNTIL or self.keep or not self.since(*UNTIL[name])


def version_of(text: str) -> Version:
    """Return the version in `text`, such as ``2.9`` or ``2.9.1+cu126``.

    Raise UsageError if `text` does not start with one.
    """
    found = _NUMBERS.match(text)
    if found is None:
        raise UsageError("no version of torch", expected=option("torch", "2.9") + ", or all", got=text)
    return int(found[1]), int(found[2])


def asked_version(torch: str | None) -> Version:
    """Return the version `torch`.

    For None or ``all``, return the installed one, or the newest known one if there is none.

    Raises UsageError if `torch` is not a version.
    """
    text = installed_torch() if torch in (None, ALL) else torch
    return NEWEST if text is None else version_of(text)


def word_of(version: Version) -> str:
    """Return `version` as a text such as ``2.13``."""
    return "{}.{}".format(*version)


def by_version(answers: Mapping[str, str]) -> str:
    """Return the answers of all known versions as one text: ``loads in torch 2.6 to 2.14, refused by torch 2.15``.

    `answers` maps each version to its answer, the oldest version first.
    """
    runs = [(answer, [version for version, _ in each]) for answer, each in groupby(answers.items(), itemgetter(1))]
    if [answer for answer, _ in runs] == ["refused", "loads"]:
        return f"requires torch {runs[1][1][0]} or newer"
    verbs = {"loads": "loads in", "refused": "refused by"}
    return ", ".join(
        f"{verbs.get(answer, 'not known for')} torch {' to '.join(dict.fromkeys((versions[0], versions[-1])))}"
        for answer, versions in runs
    )


def installed_torch() -> str | None:
    """Return the version of the first torch in ``sys.path``, from the name of its ``dist-info`` folder.

    Return None if there is none. Relative folders, such as the working directory, are ignored.
    ``importlib.metadata`` would find the same, but its import takes longer than the inspection of most files.
    """
    for folder in filter(os.path.isabs, sys.path):
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith("torch-") and (found := _INSTALLED.fullmatch(name)):
                    return found[1]
    return None


def flaws_of(torch: str | None) -> tuple[str, ...]:
    """Return the known vulnerabilities of the safe loader in the version `torch`. The tuple is empty for None."""
    return () if torch is None else tuple(name for name, (mended, _) in _FLAWS.items() if version_of(torch) < mended)


def warning_of_flaws(torch: str | None) -> str | None:
    """Return a warning of the vulnerabilities of the version `torch`. Return None if none are known."""
    found = flaws_of(torch)
    if not found:
        return None
    what = " and ".join(f"{name} (a file can {_FLAWS[name][1]})" for name in found)
    mended = word_of(max(_FLAWS[name][0] for name in found))
    return f"torch {torch} has {what}, also with weights_only=True: install torch {mended} or newer"
