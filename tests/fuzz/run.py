"""Fuzz one target with atheris, which ends the process.

An input that hangs or uses too much memory ends the process, and libFuzzer stores it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NoReturn

import atheris

with atheris.instrument_imports(include=["ckptconv"]):
    from tests.fuzz.fuzzer import HANG, LONGEST, Fuzzer, start
    from tests.fuzz.mutators import MUTATORS

__all__ = ["fuzz"]

_MOST_MEMORY = 1024  # MB; the process starts with about 150


def fuzz(target: str, seconds: int, work: Path, corpus: Path, finds: Path) -> NoReturn:
    """Fuzz `target` with the inputs in `corpus`, and add new inputs to it.

    The report is written to `work`, and findings to `finds`.
    """
    start()
    fuzzer = Fuzzer(target, work, corpus, finds)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            data = random.choice(fuzzer.good)
        plain = random.random() < 0.1
        changed = (
            atheris.Mutate(data, max_size)
            if plain
            else MUTATORS[target](data, random, lambda part: atheris.Mutate(part, len(part) + 16))
        )
        return changed[:max_size]

    arguments = [
        "fuzz",
        "-seed=1",
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-timeout={HANG}",
        f"-rss_limit_mb={_MOST_MEMORY}",
        f"-artifact_prefix={finds / target}-",
        "-print_final_stats=1",
        "-mutate_depth=2",
        str(corpus),
    ]
    atheris.Setup(arguments, fuzzer.test_one, custom_mutator=mutate)
    atheris.Fuzz()
    raise AssertionError("atheris ends the process")
