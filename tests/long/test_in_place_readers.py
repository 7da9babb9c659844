"""Fifty processes read a checkpoint or change it in place at the same time. No reader of ckptconv sees a mixture, and
none waits. torch, which ignores locks, loads a complete file or none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.byteranges.undo_journal import HOT, state_of

LONG = "a.name.that.is.much.longer.than.it.was"
NAMES = ("a", "b", LONG)
READERS = ("inspect", "verify", "convert") * 8 + ("torch_load",) * 6
WRITERS = ("write",) * 20
TENSORS = 60

#: Forks a process for each argument after the checkpoint and the names. All start at the same time. Prints a line of
#: JSON for each, with the number of each outcome.
_CROWD = """
import glob, json, os, random, sys, tempfile, time
from collections import Counter
import ckptconv
from ckptconv import CkptconvError

path, names, *roles = sys.argv[1:]
names = json.loads(names)

def prefixes(path):
    return {tensor.path.rpartition(".")[0] for tensor in ckptconv.inspect(path).tensors}

def inspect(choice):
    return sorted(prefixes(path))

def verify(choice):
    verdict = ckptconv.verify(path)
    return verdict.ok or verdict.findings[0].what

def convert(choice):
    with tempfile.TemporaryDirectory() as folder:
        ckptconv.convert(path, folder + "/out.pt")
        return sorted(prefixes(folder + "/out.pt"))

def torch_load(choice):  # takes no notice of locks
    import torch
    seen = Counter()
    for file in [path] if os.path.isfile(path) else glob.glob(path + "/*.bin"):
        for _ in range(20):
            try:
                names = torch.load(file, weights_only=True)
            except Exception:
                seen["refused"] += 1
            else:
                seen[str(sorted({name.rpartition(".")[0] for name in names}))] += 1
    return seen

def write(choice):
    to = choice.choice([*names, None])
    if to is None:
        target = path if os.path.isfile(path) else next(each.path for each in os.scandir(path) if each.name[0] != ".")
        ckptconv.undo(target)
    else:
        ckptconv.convert(path, in_place=True, rename=[(r"^.*\\.", to + ".")])
    return "done"

def tried(role, seed):
    choice, seen = random.Random(seed), Counter()
    for _ in range(30 if role != "write" else 200):
        time.sleep(choice.random() * (2 if role != "write" else 0.3))
        try:
            got = globals()[role](choice)
            seen.update(got if isinstance(got, Counter) else [str(got)])
        except CkptconvError as error:
            seen[f"{type(error).__name__}: {error.what}"] += 1
    return seen

gate, opened = os.pipe()
results = []
for seed, role in enumerate(roles):
    result, end = os.pipe()
    if not os.fork():
        os.close(opened)
        os.read(gate, 1)
        try:
            seen = tried(role, seed)
        except BaseException as error:
            seen = {repr(error): 1}
        os.write(end, json.dumps(seen).encode())
        os._exit(0)
    os.close(end)
    results.append(result)
os.close(opened)
for result in results:
    print(os.fdopen(result).read())
"""
#: Accepted errors of readers and writers: another process uses the file, or another undo came first.
_TOLD = (
    "UnreadableError: another process is changing the file in place",
    "RefusedError: another process is using the file",
)
_UNDONE = "InputError: there is no undo journal, so there is no in-place change to revert"


@pytest.fixture(params=["a file", "a set"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save({f"a.{i}": torch.arange(4.0) + i for i in range(TENSORS)}, path)
    if request.param == "a file":
        return path
    ckptconv.convert(path, tmp_path / "set", max_shard_size=400, format="pt")
    return tmp_path / "set"


def test_fifty_readers_and_writers(checkpoint: Path) -> None:
    roles = READERS + WRITERS
    words = [os.fspath(checkpoint), json.dumps(NAMES if checkpoint.is_file() else NAMES[:2])]
    done = subprocess.run(
        [sys.executable, "-c", _CROWD, *words, *roles], capture_output=True, text=True, check=True, timeout=540
    )
    seen: dict[str, Counter[str]] = {role: Counter() for role in roles}
    for role, line in zip(roles, done.stdout.splitlines(), strict=True):
        seen[role].update(json.loads(line))
    for role, counts in seen.items():
        print(f"\n{role}: {dict(counts)}", end="")
    whole = {str([name]) for name in NAMES}
    for role in ("inspect", "convert"):
        assert seen[role].keys() <= {*whole, *_TOLD}
        assert len(seen[role].keys() & whole) > 1
    assert seen["torch_load"].keys() <= {*whole, "refused"} and seen["torch_load"].total() > 1000
    assert seen["verify"].keys() <= {"True", *_TOLD, _TOLD[0].partition(": ")[2]}  # for a shard it is a finding
    assert seen["write"].keys() <= {"done", _UNDONE, *_TOLD}
    assert seen["write"]["done"] > len(NAMES)
    assert ckptconv.verify(checkpoint).ok
    files = [checkpoint] if checkpoint.is_file() else list(checkpoint.iterdir())
    assert not [file for file in files if state_of(file) == HOT]
