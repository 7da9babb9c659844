"""Interfaces for pipelines: the schemas of ``--json``, the SARIF log, the pre-commit hook and the GitHub action."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # without this import, a missing jsonschema would silently turn off all schema checks
import pytest
import torch
import yaml
from torch import nn

import ckptconv
from ckptconv.formats.foreign.paths import FILE_SUFFIXES
from tests.support.command import Command
from tests.support.paths import ROOT
from tests.support.schemas import check, schema_of

COMMANDS = ("convert", "diff", "inspect", "verify")
pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def files(here: Path, fixtures: Path) -> None:
    """Write sound files, a file that needs code, a damaged file and a dangerous file."""
    for name in ("cuda0", "training"):
        shutil.copy(fixtures / f"{name}.pt", here)
    numbers = torch.arange(100.0)
    torch.save({"w": numbers}, "bad.pt")
    data = bytearray(Path("bad.pt").read_bytes())
    data[data.index(numbers.numpy().tobytes())] ^= 1
    Path("bad.pt").write_bytes(data)
    torch.save({"a": Calls()}, "evil ü.pt")


class Calls:
    """A class whose pickle calls ``os.system``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("name", COMMANDS)
def test_schemas_are_printed_and_valid(name: str, command: Command) -> None:
    schema = json.loads(command("schema", name).out)
    assert schema == schema_of(name)
    jsonschema.validators.validator_for(schema).check_schema(schema)
    defined = {*schema["$defs"]}
    assert {*re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))} == defined


def test_there_is_a_schema_for_each_command_with_json(command: Command) -> None:
    """There is a schema for each command with ``--json``, and for no other command."""
    command("schema", "undo", status=2, err="'convert', 'diff', 'inspect', 'verify'")
    assert {path.stem for path in (ROOT / "ckptconv/render/schemas").iterdir()} == {*COMMANDS}


def test_json_output_conforms_to_the_schemas(command: Command) -> None:
    """Rare forms of JSON output conform to the schemas. The `command` fixture validates each line."""
    Path("empty.pt").touch()
    Path("folder").mkdir()
    shutil.copy("cuda0.pt", "folder/a.pt")
    shutil.copy("empty.pt", "folder/broken.pt")
    Path("folder/notes.txt").write_text("of the run")
    torch.save(nn.Linear(2, 2), "module.pt")
    torch.save({"w": torch.tensor([1.0, torch.inf, torch.nan])}, "odd.pt")
    torch.save({"w": torch.tensor([1.5, -torch.inf, 0.0])}, "other.pt")
    ckptconv.convert("cuda0.pt", "big.pt", dtype="float64", force=True)
    command("inspect", "training.pt", "module.pt", "empty.pt", "--json", status=1)
    command("inspect", "odd.pt", "--histogram", "--json")
    command("diff", "odd.pt", "other.pt", "--values", "--histogram", "--json", status=1)
    command("diff", "cuda0.pt", "training.pt", "--json", status=1)
    command("diff", "folder", "missing", "--json", status=2)
    command("verify", "training.pt", "bad.pt", "empty.pt", "missing.pt", "--json", status=1)
    command("convert", "big.pt", "half.pt", "--dtype", "bf16", "--verify", "--json")
    command("convert", "training.pt", "plain.pt", "--loadable", "--to", "cpu", "--json")
    command("convert", "training.pt", "plain.pt", "--skip-existing", "--json")
    command("convert", "cuda0.pt", "--to", "cpu", "--in-place", "--json")
    words = ("convert", "folder", "out", "--to", "cpu", "--copy-others", "--json")
    kinds = [{*item} for item in command.json(*words, status=3)["items"]]
    assert any("copied" in keys for keys in kinds) and any("error" in keys for keys in kinds)
    assert any("devices" in keys for keys in kinds)
    command(*words, "--skip-existing", status=3)


@pytest.mark.parametrize("change", [{"sizes": 1}, {"size": "1"}, {"tensors": [{}]}, {"safety": "safe"}])
def test_the_schema_check_fails_for_other_output(change: dict[str, Any]) -> None:
    """The schema check fails for an additional key, a wrong type, a missing key and an unknown word."""
    printed = ckptconv.inspect("cuda0.pt").as_dict()
    with pytest.raises(AssertionError):
        check("inspect", {**printed, **change})


def sarif(command: Command, *words: str, status: int) -> Any:
    (run,) = json.loads(command("verify", *words, "--sarif", status=status).out)["runs"]
    return run


def test_sarif_contains_all_findings(command: Command) -> None:
    """The SARIF log contains the rule, level, file and position of each finding. With --strict, a file that needs code
    is an error.
    """
    run = sarif(command, ".", status=1)
    results = {}
    for result in run["results"]:
        (location,) = result["locations"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        place = location.get("logicalLocations", [{}])[0].get("fullyQualifiedName")
        results[uri] = (result["ruleId"], result["level"], place)
    assert results == {
        "bad.pt": ("damaged", "error", None),
        "evil%20%C3%BC.pt": ("dangerous", "error", "a"),
        "training.pt": ("needs-code", "warning", "args"),
    }
    known = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} <= known
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1, "toolExecutionNotifications": []}]
    assert len({result["partialFingerprints"]["finding/v1"] for result in run["results"]}) == 3
    (result,) = sarif(command, "training.pt", "--strict", status=1)["results"]
    assert result["level"] == "error"


def test_sarif_of_sound_files_is_empty(command: Command, here: Path) -> None:
    """The SARIF log of a sound file is empty. With -v, it contains notes. An absolute path becomes a URI."""
    assert sarif(command, "cuda0.pt", status=0)["results"] == []
    ckptconv.convert("cuda0.pt", "m.safetensors")
    (note,) = sarif(command, str(here / "m.safetensors"), "-v", status=0)["results"]
    assert note["ruleId"] == note["level"] == "note"
    (location,) = note["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == (here / "m.safetensors").as_uri()


def test_sarif_reports_files_that_were_not_checked(command: Command) -> None:
    """A missing file is a notification in the SARIF log. A file that is not a checkpoint is a result."""
    Path("page.pt").write_text("<html>")
    run = sarif(command, "missing.pt", "page.pt", status=1)
    (result,) = run["results"]
    assert result["ruleId"] == "unknown"
    (invocation,) = run["invocations"]
    (problem,) = invocation["toolExecutionNotifications"]
    assert not invocation["executionSuccessful"] and "missing.pt" in problem["message"]["text"]
    command("verify", "cuda0.pt", "--json", "--sarif", status=2, err="cannot be combined")


def test_the_pre_commit_hook(command: Command) -> None:
    """The pattern of the pre-commit hook matches every known suffix of checkpoints. Its command refuses files that are
    not proven safe.
    """
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert [suffix for suffix in FILE_SUFFIXES if not re.search(hook["files"], f"a/model{suffix.upper()}")] == []
    assert not re.search(hook["files"], "model.pt.txt") and not re.search(hook["files"], "apt")
    program, *words = shlex.split(hook["entry"])
    assert program == "ckptconv"
    assert command(*words, "cuda0.pt").out == ""
    command(*words, "training.pt", status=1, out="training.pt")


def test_the_github_action() -> None:
    """The script of the action passes paths unchanged as words, and returns the exit status of ckptconv.

    The Python in its PATH is a stub that installs nothing.
    """
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = action["runs"]["steps"]
    inputs = {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    assert {*step["env"].values()} == {*inputs.values()} and "inputs" not in step["run"]
    Path("bin").mkdir()
    Path("bin/python3").write_text('#!/bin/sh\nmkdir -p "$3/bin"; for name in python ckptconv; do\n'
        '  printf "#!/bin/sh\\nprintf \\"%%s|\\" $name \\"\\$@\\"; [ $name = python ] || exit 1" >"$3/bin/$name"\n'
        '  chmod +x "$3/bin/$name"; done\n')  # fmt: skip
    Path("bin/python3").chmod(0o755)

    def run(**given: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}", "RUNNER_TEMP": str(Path("temp").absolute())}
        names = {value: name for name, value in step["env"].items()}
        values = {
            names[inputs[name]]: given.get(name, spec.get("default", "")) for name, spec in action["inputs"].items()
        }
        typed = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        env |= {"GITHUB_ACTION_PATH": "/action", **values}
        return subprocess.run(typed, env=env, capture_output=True, text=True, check=False)

    done = run(paths="a b.pt\n-x;$(touch no).pt\n")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "python|-m|pip|install|--quiet|/action|ckptconv|verify|--strict|--|a b.pt|-x;$(touch no).pt|"
    assert not Path("no").exists()
    done = run(paths="a.pt", strict="false", **{"sarif-file": "out.sarif"})
    assert done.returncode == 1 and Path("out.sarif").read_text() == "ckptconv|verify|--sarif|--|a.pt|"
