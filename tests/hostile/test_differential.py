"""Randomly changed files, read by torch and by ckptconv. If both read a file, the contents must be the same. ckptconv
accepts files that torch refuses only for known reasons.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

from ckptconv import Summary, convert, inspect
from ckptconv.errors import CkptconvError
from tests.fuzz.mutators import MUTATORS, noise
from tests.fuzz.seeds import seeds_of
from tests.support.torch_process import TorchProcess

#: The number of changed files of each format: 300 in the gate, 25,000 in the long run. pytest's -s shows the outcomes.
CHANGES = 5 * settings().max_examples

#: Messages of errors about bounds and damaged archives. ckptconv must find these errors itself, so they do not count as
#: the failure of a call.
BOUNDS = (
    "out of bounds|out of range|negative|overflow|wrong byte size|unexpected"
    " EOF|StreamReader|inline_container|hasRecord"
)
#: The reasons why ckptconv accepts a file that torch refuses, and a pattern of torch's error message.
ONLY_WE = {
    "it names what torch's safe loader does not allow: data to us, and said to need code": (
        r"Unsupported global|unsupported GLOBAL"
    ),
    "it has opcodes that the safe loader does not know": r"Unsupported operand",
    "it does what the safe loader does not do: data to us": (
        r"Trying to call reduce for unrecognized function|Only persistent_load of storage is allowed|Can only"
        r" (build|create new)|Can only (SETITEM|APPEND|extend)|Attempted to (build|append)"
    ),
    "a record about the layout makes no sense: we do without": (
        r"invalid literal for int|^UnicodeDecodeError: |hasRecord\(\"version\"\)|parse the version|PyTorch file with"
        r" version"
    ),
    "its device is not here": r"not compiled with CUDA",
    "a call fails when it is made: we make none": (
        r"^(TypeError|AttributeError|KeyError|AssertionError|IndexError|UnboundLocalError|ValueError|RuntimeError):"
        rf" (?!.*({BOUNDS}))"
    ),
}
#: Seeds that torch.load does not load, and seeds whose tensors use parts of storages. ckptconv reports their offsets in
#: complete storages; tests/unit/formats compares them.
LEFT_OUT = ("program", "view", "python2")


def _ours(path: Path, out: Path) -> tuple[Summary | None, str]:
    """Convert `path` to `out`. Return the summary of `path` and an empty text, or None and the error."""
    try:
        summary = inspect(path)
        convert(path, out, map_location="cpu", force=True, format="pt", allow_unsafe=True)
    except CkptconvError as error:
        return None, f"{type(error).__name__}: {error.what}"
    return summary, ""


def _tensors(summary: Summary) -> dict[str, list[Any]]:
    """Return the dtype, shape, stride and offset of each tensor in `summary`, by path."""
    tensors = summary.tensors
    if any("\\" in info.path for info in tensors):  # torch keeps only the last value of a key that is set twice
        return {}
    return {info.path: [info.dtype, [*info.shape], [*info.stride], info.offset] for info in tensors}


def _kind(error: str) -> str:
    """Return `error` without the parts that differ from file to file."""
    return re.sub(
        r"'[^']*'|\"[^\"]*\"|[0-9][0-9,]*|0x[0-9a-f]+|/\S+", "…", error.split("WeightsUnpickler error: ")[-1].strip()
    )[:90]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["zip", "legacy"])
def test_changed_files(target: str, tmp_path: Path) -> None:
    """torch loads the same objects from a changed file and from its converted output, and the tensors have the reported
    properties. ckptconv accepts a file that torch refuses only for a reason in ``ONLY_WE``.
    """
    random = Random(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seeds = [data for name, data in seeds_of(target).items() if name not in LEFT_OUT]
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    counts: Counter[str] = Counter()
    only_torch: Counter[str] = Counter()
    wrong: dict[str, bytes] = {}
    with TorchProcess() as torch:
        for _ in range(CHANGES):
            data = MUTATORS[target](random.choice(seeds), random, lambda part: noise(part, random))
            path.write_bytes(data)
            summary, error = _ours(path, out)
            found = torch.compare(path, out, _tensors(summary)) if summary else torch.compare(path, None, None)
            if summary is None:
                counts["neither" if found["first"] else "only torch"] += 1
                only_torch[_kind(error)] += not found["first"]
            elif found["first"]:
                reason = next(
                    (reason for reason, error in ONLY_WE.items() if re.search(error, found["first"], re.DOTALL)), None
                )
                counts[f"only we: {reason}"] += 1
                if reason is None or (summary.weights_only and "does not allow" in reason):
                    wrong.setdefault(_kind(found["first"]), data)
            elif found["second"] or found["difference"]:
                wrong.setdefault(_kind(found["second"] or found["difference"] or ""), data)
            elif not summary.weights_only:
                wrong.setdefault("we say that torch's safe loader does not take it", data)
            else:
                counts["both, and the same"] += 1
        counts["the end of torch's process"] = torch.ended
    print(f"{target}, {CHANGES:,} changes")
    for name, count in [
        *counts.most_common(),
        *((f"only torch: {kind}", count) for kind, count in only_torch.most_common() if count),
    ]:
        print(f"{count:8,}  {name}")
    for i, (what, data) in enumerate(wrong.items()):
        (tmp_path / f"wrong-{i}").write_bytes(data)
        print(f"{tmp_path}/wrong-{i}: {what}")
    assert not wrong and counts["both, and the same"] > CHANGES / 20
