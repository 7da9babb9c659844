"""Commands that must have the same exit status and write the same bytes on two systems. `.ci/windows` compares Windows
with Linux.

Usage:
    command_matrix.py inputs FOLDER          make the inputs, with torch
    command_matrix.py run FOLDER OUT.json    run every command without torch, and record the results
    command_matrix.py compare A.json B.json  print the differences, and exit with status 1 if there are any

A record contains the exit status, the JSON output with slashes in its paths, and the SHA-256 of every file in the
command's own folder. Of an HTML page, which contains paths, the record contains only the name. The commands run without
pytest and torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ODD = "é ü → 模型"
#: Commands. OUT is an empty folder. The file or folder before ``:`` is copied to it first.
COMMANDS = """
inspect IN/cuda0.pt --json
inspect IN/training.pt --json
inspect IN/legacy.pt --json
inspect IN/plain.pkl --json
inspect IN/model.safetensors --json
inspect IN/set --json
inspect IN/dcp --json
inspect IN/ranks --json
inspect IN/missing.pt
inspect IN
inspect IN/damaged.pt
inspect IN/cuda0.pt --html OUT/page.html
inspect IN/cuda0.pt -v
verify IN/cuda0.pt --json
verify IN --json
verify IN/damaged.pt --json
verify IN/set --json
verify IN/dcp --json
verify IN/dangerous.pkl --json
diff IN/cuda0.pt IN/cuda0.pt
diff IN/cuda0.pt IN/cpu.pt --json
diff IN/cuda0.pt IN/training.pt --html OUT/page.html
diff IN/model.safetensors IN/set --json
diff IN/cuda0.pt IN/missing.pt
help RuntimeError: Attempting to deserialize object on a CUDA device
rules
schema inspect
convert IN/cuda0.pt OUT/a.pt --to cpu
convert IN/cuda0.pt OUT/a.pt --map cuda=cuda:1 --verify
convert IN/cuda0.pt OUT/a.pt --to cpu --dry-run
convert IN/cuda0.pt OUT/a.pt --to cpu --json
convert IN/dataparallel.pt OUT/a.pt --strip-prefix module.
convert IN/dataparallel.pt OUT/a.pt --unwrap --rename ^ net.
convert IN/training.pt OUT/a.pt --state-dict
convert IN/training.pt OUT/a.pt --select model
convert IN/cuda0.pt OUT/a.pt --include *weight*
convert IN/cuda0.pt OUT/a.pt --exclude *bias*
convert IN/cuda0.pt OUT/a.pt --exclude nothing*
convert IN/cuda0.pt OUT/a.safetensors
convert IN/tied.pt OUT/a.safetensors
convert IN/cuda0.pt OUT/a.pt --format legacy
convert IN/cuda0.pt OUT/a.pkl
convert IN/legacy.pt OUT/a.pt --to cpu
convert IN/plain.pkl OUT/a.pt
convert IN/deflated.pt OUT/a.pt --to cpu
convert IN/deflated.pt OUT/a.safetensors
convert IN/model.safetensors OUT/a.pt --verify
convert IN/cuda0.pt OUT/a.pt --dtype bf16
convert IN/damaged.pt OUT/a.pt --to cpu
convert IN/damaged.pt OUT/a.pt --to cpu --verify
convert IN/dangerous.pkl OUT/a.pt
convert IN/missing.pt OUT/a.pt
convert IN/cuda0.pt OUT/no/folder/a.pt
convert IN/cuda0.pt OUT/a.gguf
convert IN/set OUT/a.safetensors
convert IN/set/model.safetensors.index.json OUT/a.pt
convert IN/set OUT/set/ --copy-others
convert IN/set OUT/set/ --format safetensors --max-shard-size 2KB
convert IN/cuda0.pt OUT/set/ --max-shard-size 1KB
convert IN/dcp OUT/a.pt --verify
convert IN/dcp OUT/a.safetensors
convert IN/cuda0.pt OUT/dcp/ --format dcp
convert IN/cuda0.pt OUT/dcp/ --format dcp --ranks 2
convert IN/ranks OUT/a.pt
convert IN OUT/all/ --to cpu
convert IN OUT/all/ --to cpu -j 2
convert IN OUT/all/ --to cpu --copy-others --json
convert IN/cuda0.pt IN/cpu.pt OUT/two/ --to cuda:1
convert IN/deep OUT/deep/ --to cpu --copy-others
cuda0.pt: convert OUT/cuda0.pt OUT/cuda0.pt --to cpu
cuda0.pt: convert OUT/cuda0.pt OUT/cuda0.pt --to cpu --force
cuda0.pt: convert OUT/cuda0.pt OUT/cuda0.pt --to cpu --force --verify
cuda0.pt: convert IN/cpu.pt OUT/cuda0.pt --force
cuda0.pt: convert IN/cpu.pt OUT/cuda0.pt --skip-existing
set: convert OUT/set OUT/set/ --to cpu --force
set: convert OUT/set OUT/set/ --force --copy-others --max-shard-size 2KB
dcp: convert OUT/dcp OUT/dcp/ --force --format dcp
deep: convert OUT/deep OUT/deep/ --to cpu --force
model.safetensors: convert OUT/model.safetensors OUT/model.safetensors --strip-prefix layer. --force
cuda0.pt: convert OUT/cuda0.pt OUT/long/a.pt --to cpu
cuda0.pt: convert OUT/cuda0.pt OUT/ODD.pt --to cpu
cuda0.pt: inspect OUT/cuda0.pt OUT/cuda0.pt --json
""".strip().splitlines()
#: Fields of the output that depend on the machine or on the time.
ELSE_PRINTED = ("loads_here", "findings", "remedy", "remedy_words", "seconds", "torch", "torch_load")
#: Commands that Windows does not support. They fail there with status 1, and do not change the file.
ELSEWHERE = (
    "convert IN/cuda0.pt nul",
    "cuda0.pt: convert OUT/cuda0.pt --in-place --to cpu",
    "cuda0.pt: undo OUT/cuda0.pt",
)


def make_inputs(folder: Path) -> None:
    """Make the inputs in `folder`."""
    import pickle
    import zipfile

    import torch
    import torch.distributed.checkpoint as dcp

    import ckptconv
    from tests.support.rank_runs import save_as_ranks

    folder.mkdir(parents=True)
    for path in (ROOT / "fixtures").glob("*.pt"):
        shutil.copy(path, folder)
    state = {f"layer.{i}.weight": torch.arange(300.0) + i for i in range(6)}
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "plain.pkl").write_bytes(pickle.dumps({"epoch": 3, "text": "a\r\nb\x1a"}))
    (folder / "dangerous.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    ckptconv.save(state, folder / "model.safetensors")
    ckptconv.convert(folder / "model.safetensors", folder / "set", max_shard_size="4KB", format="safetensors")
    (folder / "set" / "notes.txt").write_bytes(b"a\nb\n")
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "ranks").mkdir()
    save_as_ranks(state, folder / "ranks")
    (folder / "deep" / "er").mkdir(parents=True)
    shutil.copy(folder / "cuda0.pt", folder / "deep" / "er" / "Model.pt")
    (folder / "deep" / "notes.txt").write_bytes(b"a\nb\n")
    data = bytearray((folder / "cuda0.pt").read_bytes())
    with (
        zipfile.ZipFile(folder / "cuda0.pt") as old,
        zipfile.ZipFile(folder / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
        at = old.getinfo("cuda0/data/8").header_offset + 200
    data[at] ^= 1
    (folder / "damaged.pt").write_bytes(data)


def run(inputs: Path) -> dict[str, Any]:
    """Run every command in a folder next to `inputs`. Return the records by command."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    from ckptconv.cli.main import main

    work = inputs.parent / f"work-{os.name}"
    work.mkdir()
    os.chdir(work)
    records: dict[str, Any] = {}
    for number, line in enumerate((*COMMANDS, *ELSEWHERE)):
        before, _, words = line.rpartition(": ") if line.split(" ")[0].endswith(":") else ("", "", line)
        out = Path(f"{number:02}")
        out.mkdir()
        source = inputs / before
        if before:
            shutil.copytree(source, out / before) if source.is_dir() else shutil.copy(source, out / before)
        if "OUT/long" in words:
            words = words.replace("long", "/".join(["long" * 20] * 4))
            os.makedirs(
                "\\\\?\\" + os.path.abspath(out / words.split("OUT/")[2].rpartition("/")[0])
                if os.name == "nt"
                else out / words.split("OUT/")[2].rpartition("/")[0]
            )
        words = words.replace("IN/", "../in/").replace("OUT", str(out)).replace("ODD", "\0")
        listed = [word.replace("\0", ODD) if word != "IN" else "../in" for word in words.split(" ")]
        records[line] = _record(main, listed, out)
    records.update(_processes(inputs, work))
    return records


def _record(main: Any, words: list[str], out: Path) -> dict[str, Any]:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as said:
            status = main(words)
    except SystemExit as error:
        status = error.code
    except BaseException:
        status, _ = "raised", said.write(traceback.format_exc())
    printed.flush()
    text = printed.buffer.getvalue().decode().replace("\\\\", "/").replace("\r", "")
    found = [_without(json.loads(line)) for line in text.splitlines() if "--json" in words]
    return {
        "status": status,
        "files": {name: "" if name.endswith(".html") else sha256 for name, sha256 in files_in(out).items()},
        "printed": found,
        "said": said.getvalue().splitlines()[-3:],
    }


def _without(value: Any) -> Any:
    """Return the JSON `value` without the entries that depend on the machine or the time, and with only double
    quotes.
    """
    if isinstance(value, str):
        return value.replace("'", '"')
    if isinstance(value, dict):
        return {key: _without(each) for key, each in value.items() if key not in ELSE_PRINTED}
    return [_without(each) for each in value] if isinstance(value, list) else value


def files_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in and below `folder`, by its path with slashes."""
    root = Path("\\\\?\\" + os.path.abspath(folder)) if os.name == "nt" else folder
    return {
        each.relative_to(root).as_posix(): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in sorted(root.rglob("*"))
        if each.is_file()
    }


def _processes(inputs: Path, work: Path) -> dict[str, Any]:
    """Return the records of commands that need a new process, because of the encoding of the output or a closed
    pipe.
    """
    records: dict[str, Any] = {}
    shutil.copy(inputs / "cuda0.pt", work / f"{ODD}.pt")
    command = [sys.executable, "-m", "ckptconv"]
    for encoding in ("cp437", "cp1252", "utf-8"):
        for words in (["inspect", f"{ODD}.pt"], ["inspect", f"{ODD}.pt", "--json"], ["inspect", f"gone {ODD}.pt"]):
            environment = {**os.environ, "PYTHONIOENCODING": encoding}
            done = subprocess.run([*command, *words], capture_output=True, env=environment, stdin=subprocess.DEVNULL)
            text = (done.stdout + done.stderr).decode(encoding)  # raises if a byte is not valid in `encoding`
            records[f"{encoding} {words[0]} {len(words)} {words[1][:4]}"] = {
                "status": done.returncode, "files": {}, "printed": None, "said": [text[-300:]],
            }  # fmt: skip
    with subprocess.Popen(
        [*command, "schema", "inspect"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.close()
        process.wait()
        assert process.stderr
        said = process.stderr.read().decode(errors="replace")
    records["closed pipe"] = {"status": process.returncode, "files": {}, "printed": None, "said": [said[-300:]]}
    return records


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the differences between the runs `a` and `b`."""
    wrong = []
    for line in a:
        if line in ELSEWHERE:
            continue
        for what in ("status", "files", "printed"):
            if a[line][what] != b[line][what]:
                wrong.append(f"{line}: {what}: {a[line][what]} {a[line]['said']} | {b[line][what]} {b[line]['said']}")
    return wrong


def _main(what: str, *paths: str) -> None:
    if what == "inputs":
        make_inputs(Path(paths[0]))
    elif what == "run":
        Path(paths[1]).write_text(json.dumps(run(Path(paths[0]).absolute()), indent=1))
    else:
        a, b = (json.loads(Path(path).read_text()) for path in paths)
        wrong = compare(a, b)
        files = sum(len(each["files"]) for line, each in a.items() if line not in ELSEWHERE)
        print(*wrong, f"{len(a) - len(ELSEWHERE)} commands, {files} files, {len(wrong)} differences", sep="\n")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    _main(*sys.argv[1:])
