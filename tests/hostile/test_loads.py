"""ckptconv's answer to whether torch loads a file, compared with torch itself. The files are real ones, without a
change or with one mutation.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from hypothesis import settings

from ckptconv.errors import CkptconvError
from ckptconv.formats import opening
from ckptconv.safety.torch_load import torch_loading
from tests.support.mutants import LEVELS, kinds, mutant
from tests.support.torch_process import TorchProcess

#: The number of mutants: 240 in the gate, 20,000 in the long run. pytest's -s shows the outcomes.
MUTANTS = int(os.environ.get("CKPTCONV_MUTANTS", 4 * settings().max_examples))
#: The relative frequency of each level. Readers accept few files with a mutated byte.
WEIGHTS = {"byte": 1, "opcode": 2, "argument": 3, "container": 2}
#: The largest share of unmutated kinds whose answer may be 'not known': 2 %.
NOT_KNOWN = 0.02


def judged(path: Path) -> tuple[str, str]:
    """Return ckptconv's answer for the file at `path`, or 'not read' if no reader accepts it, and the reason."""
    try:
        with opening.open_input(path) as source:
            found = torch_loading(opening.read(source))
    except CkptconvError as error:
        return "not read", str(error)
    return found.answer, "; ".join(reason.text for reason in found.reasons[:2])


def written(name: str, data: bytes, folder: Path) -> Path:
    """Write `data` to a file and return its path. torch recognizes safetensors by the suffix, so the kind `name`
    decides it.
    """
    path = folder / ("x.safetensors" if name == "safetensors" else "x.pt")
    path.write_bytes(data)
    return path


def real_kinds() -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kinds()


def test_real_kinds(tmp_path: Path) -> None:
    """The answer for an unmutated file agrees with torch and is 'not known' for at most 2 % of the kinds."""
    found = real_kinds()
    assert len(found) >= 40
    counts: Counter[str] = Counter()
    with TorchProcess() as torch:
        for name, data in found.items():
            path = written(name, data, tmp_path)
            (said, why), refused = judged(path), torch.compare(path, None, None)["first"]
            assert said in (("refused", "not read", "not known") if refused else ("loads", "not known")), (name, why)
            counts[said] += 1
    print(f"{len(found)} kinds: {dict(counts)}")
    assert counts["not known"] <= NOT_KNOWN * len(found)


def test_mutants(tmp_path: Path) -> None:
    """No mutant that torch refuses has the answer 'loads'. No mutant that torch loads has the answer 'refused'."""
    random, originals = Random(os.environ.get("CKPTCONV_SEED", "mutants")), real_kinds()
    counts: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    with TorchProcess() as torch:
        for i in range(MUTANTS):
            name = random.choice([*originals])
            (level,) = random.choices([*LEVELS], [WEIGHTS[each] for each in LEVELS])
            data = mutant(originals[name], level, random)
            path = written(name, data, tmp_path)
            (said, why), refused = judged(path), torch.compare(path, None, None)["first"]
            counts[f"{level}: {said}, and torch {'refuses' if refused else 'loads'}"] += 1
            counts[f"all: {said}, and torch {'refuses' if refused else 'loads'}"] += 1
            unknown[re.sub(r"[0-9]+", "…", why)[:90]] += said == "not known"
            if (said == "loads" and refused) or (said == "refused" and not refused):
                kept = tmp_path / f"wrong-{i}{path.suffix}"
                kept.write_bytes(data)
                wrong[f"{kept} ({name}, {level}): {said}, {why}"] = (refused or "torch loads it")[:200]
        counts["all: the end of torch's process"] = torch.ended
    print(f"{MUTANTS:,} mutants of {len(originals)} kinds")
    for what, number in sorted(counts.items()):
        print(f"{number:8,}  {what}")
    for what, number in unknown.most_common(30):
        print(f"{number:8,}  not known: {what}" if number else "")
    assert not wrong, "\n".join(f"{what}: {why}" for what, why in wrong.items())
    assert counts["all: loads, and torch loads"] > MUTANTS / 20
