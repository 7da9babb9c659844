"""Nothing that a hostile file says is run: an audit hook in a process of its own sees no import, no code, no process,
no socket and no file outside the target, whatever is done to the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import global_calls as ways
from tests.support.hostile_bytes import dict_of, saved, storage, tensor, text, torch_zip_of
from tests.support.legacy_files import Old
from tests.support.paths import SUPPORT

ARGS = text("MARK") + b"\x85"
#: What hostile files name: modules that nobody has imported, each with something that the hook would see; and what
#: would leave a mark.
NAMES = {"mkdir": ("os", "mkdir"), "import": ("this", "s"), "unknown": ("no_such_module", "call")}
TWIN = ("collections", "OrderedDict")

Code = Callable[[str, str], bytes]


def _ways() -> dict[str, Code]:
    """What pushes a call, or hides one, by module and name."""
    found: dict[str, Code] = {}
    for name, naming in ways.NAMINGS.items():
        found[name] = lambda m, n, naming=naming: naming(m, n, ARGS)  # type: ignore[misc]
    call = ways.NAMINGS["REDUCE"]
    for name, place in ways.PLACES.items():
        found[f"in {name}"] = lambda m, n, place=place: place(call(m, n, ARGS))  # type: ignore[misc]
    for name, nest in ways.NESTS.items():

        def inside(module: str, name: str, nest: Any = nest) -> bytes:
            made: bytes = nest(b"\x80\x02" + call(module, name, ARGS) + b".")
            return made

        found[f"inside {name}"] = inside
    for name, extension in ways.EXTENSIONS.items():
        found[name] = lambda *_, extension=extension: extension  # type: ignore[misc]
    found["dotted name"] = lambda m, n: ways.NAMINGS["REDUCE of STACK_GLOBAL"]("torch.serialization", f"{m}.{n}", ARGS)
    found["getattr"] = lambda m, n: b"cbuiltins\ngetattr\nc" + f"{m}\n{n}\n".encode() + text("__globals__") + b"\x86R"
    found["import of a call"] = lambda m, n: b"cbuiltins\n__import__\n" + text(m) + b"\x85R"
    return found


WAYS = _ways()
CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "zip.pt": ways.checkpoint,
    "legacy.pt": ways.legacy_with,
    "plain.pkl": ways.plain_of,
    "program.pt": ways.program_of,
}


def _files(folder: Path, module: str, name: str, first: int) -> list[Path]:
    """Files that name MODULE and NAME in all ways, in one container after the other from the FIRST on."""
    folder.mkdir()
    made = []
    for i, (way, code) in enumerate(WAYS.items()):
        container, make = [*CONTAINERS.items()][(first + i) % len(CONTAINERS)]
        path = folder / f"{way.replace(' ', '_')}-{container}"
        path.write_bytes(make(code(module, name)))
        made.append(path)
    call = WAYS["REDUCE"](module, name)
    others = {
        "popped.pkl": b"\x80\x02" + call + b"0N.",
        "nothing.pkl": b"\x80\x02" + call + b".",
        "bare.pkl": call + b".",
        "broken.pt": ways.checkpoint(call)[:-30],
        "behind.pt": ways.legacy_with(call) + b"\x80\x02" + call + b".",
        "extra.zip": saved({"w": 1}) + call,
        "names.safetensors": _safetensors(
            {f"{module}.{name}": "__import__('os').mkdir('MARK')", "format": "pt", "w": "../../w"}
        ),
        "tag.pt": torch_zip_of(dict_of(text("w"), tensor(storage(tag=f"{module}:0")))),
    }
    for other, data in others.items():
        (folder / other).write_bytes(data)
        made.append(folder / other)
    made += [ways.shards_in(folder / "shards", call), _bad_index(folder / "index", module, name)]
    return made


def _safetensors(metadata: dict[str, str]) -> bytes:
    header = json.dumps(
        {"__metadata__": metadata, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


def _bad_index(folder: Path, module: str, name: str) -> Path:
    """A set whose index names files elsewhere."""
    folder.mkdir()
    names = {"w": f"../{module}.{name}", "v": "/etc/passwd", "u": "$(mkdir MARK)"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is d", "ignore:.*torch.jit:DeprecationWarning")
def test_nothing_runs(tmp_path: Path) -> None:
    """inspect, verify, diff, open, and every conversion, allowed to carry what is dangerous or not; and the same hook
    sees pickle run the same files.
    """
    warm = _files(tmp_path / "warm", *TWIN, 0)
    hostile = [path for i, (word, names) in enumerate(NAMES.items()) for path in _files(tmp_path / word, *names, i)]
    warm.append(ways.dcp_in(tmp_path / "warm-dcp", Old(dict, ())))
    hostile.append(ways.dcp_in(tmp_path / "dcp", Old(print, ("MARK",))))
    hostile.append(_hostile_metadata(tmp_path / "metadata", tmp_path / "warm-dcp"))
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


def _hostile_metadata(folder: Path, good: Path) -> Path:
    """A folder of torch.distributed.checkpoint whose .metadata calls something."""
    folder.mkdir()
    for path in good.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / ".metadata").write_bytes(b"\x80\x02" + WAYS["REDUCE"]("os", "mkdir") + b".")
    return folder
