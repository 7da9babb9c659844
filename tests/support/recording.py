"""A recorder of the output of every command, which shows whether a change of the code changes any output.

Usage:
    recording.py inputs FOLDER              write the inputs once: fixtures, corpus and generated files
    recording.py make FOLDER OUT.json       run every command on the inputs, with the ckptconv that Python finds
    recording.py compare OLD.json NEW.json  print the differences, and exit with status 1 if there are any

A recording contains for each command its exit status, stdout, stderr, and the SHA-256 and mode of each file that it
wrote. Times are omitted. The inputs must be kept, because ``torch.save`` does not write the same bytes in every
version.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import re
import runpy
import shutil
import stat
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The name of the output and the options of each conversion. All conversions run on every checkpoint.
CONVERSIONS = (
    ("out.pt", "-v"),
    ("out.pt", "--to cpu -v"),
    ("out.pt", "--to gpu --json"),
    ("out.pt", "--map any=cuda:1 --map cpu=mps --verify"),
    ("out.pt", "--map-location cuda:0=cpu -n"),
    ("out.pt", "--state-dict -v"),
    ("out.pt", "--select state_dict"),
    ("out.pt", "--select model --json"),
    ("out.pt", "--include *weight* -v"),
    ("out.pt", "--exclude *bias* --json"),
    ("out.pt", "--unwrap -v"),
    ("out.pt", "--strip-prefix module. -v"),
    ("out.pt", "--rename ^ new. --add-prefix module"),
    ("out.pt", "--dtype bf16 -v"),
    ("out.pt", "--dtype *weight=fp64 --state-dict --verify --json"),
    ("out.pt", "--compact --json"),
    ("out.pt", "--loadable --json"),
    ("out.pt", "--allow-unsafe --to cpu"),
    ("out.pt", "--format legacy -v"),
    ("out.pkl", "--format pickle -v"),
    ("out.safetensors", "-v"),
    ("out.safetensors", "--exclude *bias* --copy-tied --dtype fp16 --json"),
    ("out.safetensors", "--strip-prefix module --to cpu --compact -n -v"),
    ("out/", "--max-shard-size 200KB --json"),
    ("out/", "--max-shard-size 1MB --format safetensors -v"),
    ("out", "--to cpu --copy-others"),
)
#: Commands that only read a checkpoint.
READING = (
    "inspect",
    "inspect --tree",
    "inspect --json",
    "inspect --all --sort size",
    "inspect --include *weight* --limit 3",
    "verify",
    "verify --json --strict",
)
#: Help texts, invalid command lines, and commands on several files.
OTHERS = (
    "",
    "--help",
    "--version",
    "inspect --help",
    "convert --help",
    "diff --help",
    "verify --help",
    "show in/x.pt",
    "convert",
    "convert in/fixtures/cpu.pt",
    "convert in/fixtures/cpu.pt out.pt --to nowhere",
    "inspect missing.pt",
    "convert in/fixtures/cpu.pt out.pt --map cuda=cpu --map cuda=mps",
    "convert in/fixtures/cpu.pt out.pt --dtype f",
    "convert in/fixtures/cpu.pt in/fixtures/cuda0.pt --to cpu",
    "convert in/fixtures/cpu.pt in/fixtures/cpu.pt",
    "convert in/fixtures/cpu.pt out.pt --copy-tied",
    "convert in/fixtures/cpu.pt out.safetensors --format pt",
    "convert in/fixtures/tied.pt in/fixtures/cuda0.pt out/ --to gpu",
    "convert in/fixtures out --to gpu -v",
    "convert in/fixtures out --to gpu -v --copy-others",
    "convert in/fixtures out --dtype bf16 --json -n",
    "inspect in/fixtures",
    "verify in/fixtures",
    "verify in/fixtures --json",
    "inspect in/fixtures/cpu.pt in/nothing",
    "diff in/fixtures/cpu.pt in/fixtures/cuda0.pt",
    "diff in/fixtures/dataparallel.pt in/fixtures/cpu.pt",
    "diff in/fixtures/dataparallel.pt in/fixtures/cpu.pt --strip-prefix module -v",
    "diff in/fixtures/cpu.pt missing.pt",
    "diff in/fixtures/training.pt in/fixtures/cpu.pt --select model --json",
    "diff in/fixtures/cpu.pt in/fixtures/tied.pt",
)


def main(words: list[str]) -> int:
    """Run one of the three commands of the module's docstring, and return the exit status."""
    if len(words) == 2 and words[0] == "inputs":
        make_inputs(Path(words[1]))
    elif len(words) == 3 and words[0] == "make":
        recording = record(Path(words[1]).absolute())
        Path(words[2]).write_text(json.dumps(recording, indent=1, sort_keys=True))
        print(f"{len(recording)} commands recorded")
    elif len(words) == 3 and words[0] == "compare":
        return compare(*(json.loads(Path(word).read_text()) for word in words[1:]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print the differences between two recordings. Return 1 if there are any, and 0 otherwise."""
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    for key in differing:
        before, after = (_lines(each.get(key)) for each in (old, new))
        print(f"== ckptconv {key}", *difflib.unified_diff(before, after, "old", "new", lineterm="", n=0), sep="\n")
    print(f"{len(new)} commands, {len(differing)} differ")
    return 1 if differing else 0


def _lines(outcome: Any) -> list[str]:
    return json.dumps(outcome, indent=1, sort_keys=True).replace("\\n", "\n").split("\n")


def make_inputs(folder: Path) -> None:
    """Fill `folder` with the fixtures, the corpus in CKPTCONV_CORPUS, generated checkpoints, seeds of the fuzzers, and
    damaged files.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    zoo, seeds = importlib.import_module("tests.support.zoo"), importlib.import_module("tests.fuzz.seeds")
    shutil.copytree(ROOT / "fixtures", folder / "fixtures", ignore=shutil.ignore_patterns("*.py", "*.md"))
    if corpus := os.environ.get("CKPTCONV_CORPUS"):
        shutil.copytree(corpus, folder / "corpus")
    for kind in ("zoo", "seeds"):
        (folder / kind).mkdir()
    for name, make in zoo.ZOO.items():
        torch.manual_seed(0)
        zoo.save(make(), folder / "zoo" / f"{name}.pt", pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
    for target in seeds.SEEDS:
        for i, data in enumerate(seeds.seeds_of(target).values()):
            (folder / "seeds" / f"{target}{i}.pt").write_bytes(data)
    damaged = random.Random(0)
    for path in sorted((folder / "fixtures").glob("*.pt")):
        data = bytearray(path.read_bytes())
        data[damaged.randrange(len(data))] ^= 1 << damaged.randrange(8)
        (folder / "seeds" / f"damaged_{path.name}").write_bytes(data)
        (folder / "seeds" / f"truncated_{path.name}").write_bytes(data[: damaged.randrange(len(data))])


def record(folder: Path) -> dict[str, Any]:
    """Run every command on the files in `folder`, with two processes. Return the results by command line."""
    import ckptconv

    # All modules are imported before the process of the first command starts. Without torch, some imports fail.
    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return dict(pool.imap_unordered(record_one, ((folder, words) for words in command_lines(folder)), chunksize=8))


def command_lines(folder: Path) -> Iterator[str]:
    """Yield all command lines. Their paths are relative to a working folder in which ``in`` is `folder`."""
    yield from OTHERS
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or re.search(r"\s", str(name)):
            continue
        for words in READING:
            yield f"{words} in/{name}"
        for target, words in CONVERSIONS:
            yield f"convert in/{name} {target} {words}"
        yield f"diff in/{name} in/{name}"
        yield f"diff in/{name} in/fixtures/dataparallel.pt -v"


def record_one(job: tuple[Path, str]) -> tuple[str, dict[str, Any]]:
    """Run one command line in a new folder and a separate process. Return the command line and its result."""
    folder, words = job
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "in").symlink_to(folder)
        streams = [work / ".stdout", work / ".stderr"]
        pid = os.fork()
        if not pid:
            run(words.split(), work, streams)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [stream.read_bytes().decode("utf-8", "replace") for stream in streams]
        written = {
            str(path.relative_to(work)): described(path) for path in sorted(work.rglob("*")) if path not in streams
        }
        del written["in"]
    return words, {"exit": status, "stdout": untimed(said[0]), "stderr": untimed(said[1]), "written": written}


def run(words: list[str], work: Path, streams: list[Path]) -> None:
    """Run ``python -m ckptconv WORDS`` in the folder `work`, and end this process."""
    status = 70
    try:
        os.chdir(work)
        os.environ.update(COLUMNS="80", CUDA_VISIBLE_DEVICES="")
        for number, stream in enumerate(streams, 1):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["ckptconv", *words]
        runpy.run_module("ckptconv", run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def described(path: Path) -> str:
    """Return the kind, mode and checksum of `path`."""
    mode = path.lstat().st_mode
    content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
    return f"{stat.filemode(mode)} {content}".strip()


def untimed(text: str) -> str:
    """Return `text` without times, rates and addresses."""
    text = re.sub(r'"seconds": [0-9.e-]+', '"seconds": T', text)
    text = re.sub(r"\b[0-9.]+ (s|ms|[kMG]B/s)\b", r"T \1", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
