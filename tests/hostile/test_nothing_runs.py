"""Nothing in a hostile file runs. An audit hook in a separate process sees no import, no executed code, no process, no
socket and no file outside the target, whatever command reads the file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tests.support import global_calls as ways
from tests.support.hostile_bytes import dict_of, saved, storage, tensor, text, torch_zip_of
from tests.support.paths import SUPPORT
from tests.support.reduced import Reduced
from tests.support.sampled import sampled

ARGS = text("MARK") + b"\x85"
#: Globals that hostile files name. The modules of the last two are not imported yet, so the hook would see their
#: import. A call of ``os.mkdir`` would leave a folder.
NAMES = {"mkdir": ("os", "mkdir"), "import": ("this", "s"), "unknown": ("no_such_module", "call")}
TWIN = ("collections", "OrderedDict")

Code = Callable[[str, str], bytes]


def _call(module: str, name: str) -> bytes:
    return ways.NAMINGS["REDUCE"](module, name, ARGS)


#: Opcodes that push a call or hide one, by module and name.
WAYS: dict[str, Code] = {
    **{name: lambda m, n, naming=naming: naming(m, n, ARGS) for name, naming in ways.NAMINGS.items()},
    **{f"in {name}": lambda m, n, place=place: place(_call(m, n)) for name, place in ways.PLACES.items()},
    **{
        f"inside {name}": lambda m, n, nest=nest: nest(b"\x80\x02" + _call(m, n) + b".")
        for name, nest in ways.NESTS.items()
    },
    **{name: lambda *_, extension=extension: extension for name, extension in ways.EXTENSIONS.items()},
    "dotted name": lambda m, n: ways.NAMINGS["REDUCE of STACK_GLOBAL"]("torch.serialization", f"{m}.{n}", ARGS),
    "getattr": lambda m, n: b"cbuiltins\ngetattr\nc" + f"{m}\n{n}\n".encode() + text("__globals__") + b"\x86R",
    "import of a call": lambda m, n: b"cbuiltins\n__import__\n" + text(m) + b"\x85R",
}
CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "zip.pt": ways.checkpoint,
    "legacy.pt": ways.legacy_with,
    "plain.pkl": ways.plain_of,
    "program.pt": ways.program_of,
}


def _files(folder: Path, module: str, name: str, first: int) -> list[Path]:
    """Write files that name `module` and `name` in all ways, and return their paths. The containers alternate,
    beginning with the one numbered `first`.
    """
    folder.mkdir()
    files = {}
    for i, (way, code) in enumerate(WAYS.items()):
        container, make = [*CONTAINERS.items()][(first + i) % len(CONTAINERS)]
        files[f"{way.replace(' ', '_')}-{container}"] = make(code(module, name))
    call = _call(module, name)
    files |= {
        "popped.pkl": b"\x80\x02" + call + b"0N.",
        "nothing.pkl": b"\x80\x02" + call + b".",
        "bare.pkl": call + b".",
        "broken.pt": ways.checkpoint(call)[:-30],
        "behind.pt": ways.legacy_with(call) + b"\x80\x02" + call + b".",
        "extra.zip": saved({"w": 1}) + call,
        "names.safetensors": save(
            {"w": torch.zeros(1)},
            {f"{module}.{name}": "__import__('os').mkdir('MARK')", "format": "pt", "w": "../../w"},
        ),
        "tag.pt": torch_zip_of(dict_of(text("w"), tensor(storage(tag=f"{module}:0")))),
    }
    for file, data in files.items():
        (folder / file).write_bytes(data)
    shards = ways.shards_in(folder / "shards", call)
    return [*(folder / file for file in files), shards, _bad_index(folder / "index", module, name)]


def _bad_index(folder: Path, module: str, name: str) -> Path:
    """Write a set whose index names files elsewhere, and return its folder."""
    folder.mkdir()
    names = {"w": f"../{module}.{name}", "v": "/etc/passwd", "u": "$(mkdir MARK)"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_nothing_runs(tmp_path: Path) -> None:
    """inspect, verify, diff, open and each conversion of a hostile file cause no event that the hook forbids, with and
    without ``allow_unsafe``. As a control, the hook sees pickle run the same calls.
    """
    warm = _files(tmp_path / "warm", *TWIN, 0)
    hostile = [
        path for i, (word, names) in sampled(enumerate(NAMES.items())) for path in _files(tmp_path / word, *names, i)
    ]
    warm.append(ways.dcp_in(tmp_path / "warm-dcp", Reduced(dict, ())))
    hostile.append(ways.dcp_in(tmp_path / "dcp", Reduced(print, ("MARK",))))
    hostile.append(Path(shutil.copytree(tmp_path / "warm-dcp", tmp_path / "metadata")))
    (hostile[-1] / ".metadata").write_bytes(b"\x80\x02" + _call("os", "mkdir") + b".")
    control = []
    for way in (way for way in WAYS if way in ways.NAMINGS or way.startswith("in ")):
        control.append(tmp_path / f"control-{len(control)}.pkl")
        control[-1].write_bytes(b"\x80\x04" + WAYS[way](*NAMES["mkdir"]).replace(b"storage", b"") + b".")
    for folder in ("out", "here", "marked"):
        (tmp_path / folder).mkdir()
    jobs = {
        "warm": warm,
        "hostile": hostile,
        "control": control,
        "out": tmp_path / "out",
        "control folder": tmp_path / "marked",
    }
    (tmp_path / "jobs.json").write_text(json.dumps(jobs, default=str))
    driver = [sys.executable, SUPPORT / "audited.py", tmp_path / "jobs.json"]
    done = subprocess.run(driver, capture_output=True, text=True, cwd=tmp_path / "here", check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["results"]) == len(hostile) >= 60
    caused = [(path, what, seen) for path, each in found["results"].items() for what, (_, seen) in each.items() if seen]
    assert caused == []
    outcomes = [(path, what, outcome) for path, each in found["results"].items() for what, (outcome, _) in each.items()]
    assert [each for each in outcomes if each[2].startswith("UNTYPED")] == []
    assert sum(outcome in ("done", "exit 0", "exit 1") for *_, outcome in outcomes) > len(outcomes) / 2
    assert [*tmp_path.rglob("MARK")] == [tmp_path / "marked" / "MARK"]
    ran = [seen for seen in found["control"].values() if any("pickle.find_class" in each for each in seen)]
    assert len(ran) == len(control)
    assert any("os.mkdir ('MARK'" in each for seen in ran for each in seen)
