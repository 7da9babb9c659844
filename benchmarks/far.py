"""What looking into far files takes, and a retag within a store: requests, bytes and seconds.

    python benchmarks/far.py                 1 GiB in each format, over HTTP, answers 0, 20 and 100 ms late
    python benchmarks/far.py --store         over S3, and a retag there beside download, convert and upload

Servers are on the loopback: SeaweedFS for the second, where it is installed. Prints Markdown.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import ckptconv
from tests.support.counting_proxy import relaying
from tests.support.http_server import FileServer, serving
from tests.support.seaweed import BUCKET, running_store

TENSORS, SHARDS = 60, 12
OURS = "import sys; from ckptconv.cli.main import main; sys.exit(main(['inspect', sys.argv[1]]))"
NOTHING = "import ckptconv.cli.main"
OTHERS = {
    "fsspec + torch.load(mmap=False)": (
        "import sys, fsspec, torch\n"
        "with fsspec.open(sys.argv[1]) as file: torch.load(file, weights_only=True, map_location='cpu')",
        ("zip.pt",),
    ),
    "huggingface_hub": (
        "import sys\nfrom huggingface_hub import HfApi\n"
        "api = HfApi(token=False)\n"
        "print(len(api.parse_safetensors_file_metadata('me/model', 's.safetensors').tensors))",
        ("s.safetensors",),
    ),
}


def make(folder: Path, nbytes: int) -> None:
    """The same weights in each format, and in shards."""
    each = nbytes // TENSORS // 4
    state = {f"module.layers.{i}.weight": torch.rand(each) for i in range(TENSORS)}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "s.safetensors")
    size = f"{-(-nbytes // SHARDS // (each * 4)) * each * 4}"
    ckptconv.convert(folder / "s.safetensors", folder / "set/", max_shard_size=size)


def timed(code: str, *words: str) -> float:
    """Seconds of a process that runs `code`."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    return seconds


def row(label: str, server: FileServer, code: str, url: str, runs: int) -> None:
    """Print what `code` takes at each latency: the least of its `runs`, and requests and bytes of one."""
    cells = []
    for latency in (0.0, 0.02, 0.1):
        server.latency = latency
        seconds = []
        for _ in range(runs):
            server.seen.clear()
            seconds.append(timed(code, url))
        cells.append(f"{min(seconds):.2f} s")
    print(f"| {label} | {len(server.seen)} | {server.sent / 1024:,.0f} KiB | {' | '.join(cells)} |", flush=True)


def over_http(folder: Path, runs: int) -> None:
    """The table of inspect."""
    with ExitStack() as opened:
        files = {}
        for path in (each for each in folder.rglob("*") if each.is_file()):
            file = opened.enter_context(path.open("rb"))
            files[str(path.relative_to(folder))] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        files["me/model/resolve/main/s.safetensors"] = files["s.safetensors"]
        server = opened.enter_context(serving(files))
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.port}"
        print("| | requests | bytes | 0 ms | 20 ms | 100 ms |\n| --- | --- | --- | --- | --- | --- |")
        row("the start of ckptconv alone", server, NOTHING, "", runs)
        index = next(name for name in files if name.endswith(".index.json"))
        for name in ("zip.pt", "legacy.pt", "s.safetensors", index):
            row(f"`ckptconv inspect {name}`", server, OURS, server.url(name), runs)
        for label, (code, names) in OTHERS.items():
            for name in names:
                row(f"{label}: {name}", server, code, server.url(name), 1)


def over_s3(port: int, index: str, most: int) -> None:
    """The table of inspect over S3, and of a retag there: the least of several runs, and turns and bytes of one."""
    retag = "import sys, ckptconv; ckptconv.convert(sys.argv[1], sys.argv[1] + '.x', map_location='cuda:1', force=True)"
    rows = [(f"`ckptconv inspect {name}`", OURS, name, most) for name in ("a.pt", "legacy.pt", "s.safetensors", index)]
    rows += [("`ckptconv inspect set/`, a folder", OURS, "set/", most), ("a retag within the store", retag, "a.pt", 1)]
    print("| | requests | bytes | 0 ms | 20 ms | 100 ms |\n| --- | --- | --- | --- | --- | --- |")
    for label, code, name, runs in rows:
        cells = []
        for latency in (0.0, 0.02, 0.1):
            seconds = []
            for _ in range(runs):
                with relaying(port) as relay:
                    relay.latency = latency
                    os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{relay.port}"
                    seconds.append(timed(code, f"s3://{BUCKET}/{name}"))
            cells.append(f"{min(seconds):.2f} s")
        nbytes = (relay.sent + relay.received) / 1024
        print(f"| {label} | {relay.turns} | {nbytes:,.0f} KiB | {' | '.join(cells)} |", flush=True)


def in_store(folder: Path, runs: int) -> None:
    """The tables of S3: of inspect, and of a retag from S3 to S3."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as home, running_store(Path(home)) as store:
        port = urlsplit(store.endpoint).port or 0
        ckptconv.convert(folder / "zip.pt", f"s3://{BUCKET}/a.pt", map_location="cpu")
        for name in ("legacy.pt", "s.safetensors"):
            ckptconv.convert(folder / name, f"s3://{BUCKET}/{name}", format="legacy" if "pt" in name else None)
        index = next((folder / "set").glob("*.index.json"))
        ckptconv.convert(index, f"s3://{BUCKET}/set/")
        over_s3(port, f"set/{index.name}", runs)
        print("| | sent and received | seconds |\n| --- | --- | --- |")
        with relaying(port) as relay:
            os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{relay.port}"
            started = time.perf_counter()
            ckptconv.convert(f"s3://{BUCKET}/a.pt", f"s3://{BUCKET}/b.pt", map_location="cuda:1")
            seconds = time.perf_counter() - started
            nbytes = (relay.sent + relay.received) / (1 << 20)
            print(f"| retag within the store | {nbytes:,.1f} MiB | {seconds:.1f} |", flush=True)
        with relaying(port) as relay:
            os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{relay.port}"
            started = time.perf_counter()
            ckptconv.convert(f"s3://{BUCKET}/a.pt", folder / "down.pt", format="pt", force=True)
            ckptconv.convert(folder / "down.pt", folder / "b.pt", map_location="cuda:1", force=True)
            ckptconv.convert(folder / "b.pt", f"s3://{BUCKET}/c.pt", map_location="cuda:1")
            seconds = time.perf_counter() - started
            nbytes = (relay.sent + relay.received) / (1 << 20)
            print(f"| download, convert, upload | {nbytes:,.1f} MiB | {seconds:.1f} |")


def main() -> None:
    """Make the files and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help="the retag within a store")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the weights")
    parser.add_argument("--runs", type=int, default=5, help="the least of so many is printed")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name), arguments.size)
        (in_store if arguments.store else over_http)(Path(name), arguments.runs)


if __name__ == "__main__":
    main()
