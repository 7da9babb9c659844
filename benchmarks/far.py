"""The cost of inspecting remote checkpoints and of a retag within a store: requests, bytes and seconds.

    python benchmarks/far.py                          1 GiB in each format, over HTTP, with delays of 0, 20 and 100 ms
    python benchmarks/far.py --store inspect          the same over S3
    python benchmarks/far.py --store retag            a retag from S3 to S3, and a download, retag and upload

All servers run on the loopback interface. With ``--store``, the server is SeaweedFS, which must be installed. The
output is Markdown. A cell with seconds contains the lower quartile of the runs, the minimum and the maximum. The
numbers of requests and bytes are those of the last run.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import ckptconv
from tests.support.counting_proxy import relaying
from tests.support.http_server import FileServer, serving
from tests.support.seaweed import BUCKET, Store, running_store

TENSORS, SHARDS = 60, 12
LATENCIES = (0.0, 0.02, 0.1)
NOTHING = "import ckptconv.cli.main"
OURS = "import sys; from ckptconv.cli.main import main; sys.exit(main(['inspect', sys.argv[1]]))"
RETAG = "import sys, ckptconv; ckptconv.convert(sys.argv[1], sys.argv[1] + '.x', map_location='cuda:1', force=True)"
BY_HAND = (
    "import os, sys, ckptconv\n"
    "url, here = sys.argv[1], sys.argv[2]\n"
    "ckptconv.convert(url, here + '/down.pt', format='pt', force=True)\n"
    "ckptconv.convert(here + '/down.pt', here + '/out.pt', map_location='cuda:1', force=True)\n"
    "ckptconv.convert(here + '/out.pt', url + '.y', map_location='cuda:1', force=True)"
)
FSSPEC = (
    "import sys, fsspec, torch\n"
    "with fsspec.open(sys.argv[1]) as file: torch.load(file, weights_only=True, map_location='cpu')"
)
HUB = (
    "import sys\nfrom huggingface_hub import HfApi\n"
    "api = HfApi(token=False)\n"
    "print(len(api.parse_safetensors_file_metadata('me/model', 's.safetensors').tensors))"
)
#: A function that runs a measurement with a latency of the server in seconds. It returns the measured seconds, the
#: number of requests, and the number of bytes.
Asked = Callable[[float, Callable[[], float]], "tuple[float, int, int]"]


def make(folder: Path, nbytes: int) -> None:
    """Write the same weights to `folder` in each format, as shards and as a folder of torch.distributed.checkpoint."""
    each = nbytes // TENSORS // 4
    state = {f"module.layers.{i}.weight": torch.rand(each) for i in range(TENSORS)}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "s.safetensors")
    ckptconv.convert(folder / "s.safetensors", folder / "set/", max_shard_size=TENSORS // SHARDS * each * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that there is only one process
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)


def timed(python: str, code: str, *words: str) -> float:
    """Return the seconds of a process that runs `code`. Exit with its error message if it fails."""
    started = time.perf_counter()
    done = subprocess.run([python, "-c", code, *words], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    return seconds


def head(*columns: str) -> None:
    """Print the header of a table."""
    cells = [*columns, "requests", "bytes", *(f"{latency * 1000:g} ms" for latency in LATENCIES)]
    print(f"| {' | '.join(cells)} |\n|{' --- |' * len(cells)}", flush=True)


def row(label: str, asked: Asked, code: str, *words: str, runs: int, python: str = sys.executable) -> None:
    """Print a row with the cost of `code` at each latency."""
    cells = []
    for latency in LATENCIES:
        seconds = []
        for _ in range(runs):
            taken, requests, nbytes = asked(latency, lambda: timed(python, code, *words))
            seconds.append(taken)
        seconds.sort()
        cells.append(f"{seconds[(runs - 1) // 4]:.2f} s ({seconds[0]:.2f}–{seconds[-1]:.2f})")
    amount = f"{nbytes / 1024:,.0f} KiB" if nbytes < 100 << 20 else f"{nbytes / (1 << 30):.2f} GiB"
    print(f"| {label} | {requests} | {amount} | {' | '.join(cells)} |", flush=True)


def over_http(folder: Path, runs: int, others: int, python: str) -> None:
    """Print the table of `inspect` over HTTP."""
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for path in (each for each in folder.rglob("*") if each.is_file()):
            file = opened.enter_context(path.open("rb"))
            files[str(path.relative_to(folder))] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        files["me/model/resolve/main/s.safetensors"] = files["s.safetensors"]
        server: FileServer = opened.enter_context(serving(files))
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.port}"

        def asked(latency: float, run: Callable[[], float]) -> tuple[float, int, int]:
            server.latency = latency
            server.seen.clear()
            return run(), len(server.seen), server.sent

        head("")
        row("the start of ckptconv alone", asked, NOTHING, runs=runs)
        index = next(name for name in files if name.endswith(".index.json"))
        for name in ("zip.pt", "legacy.pt", "s.safetensors", index):
            row(f"`inspect {name}`", asked, OURS, server.url(name), runs=runs)
        row("huggingface_hub, s.safetensors", asked, HUB, runs=runs)
        row("fsspec and torch.load, zip.pt", asked, FSSPEC, server.url("zip.pt"), runs=others, python=python)


def fill(store: Store, folder: Path) -> None:
    """Upload all files of `folder` to `store`."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            store.client.put_object(Bucket=BUCKET, Key=str(path.relative_to(folder)), Body=file)


def over_s3(folder: Path, runs: int, others: int, python: str, *, retag: bool) -> None:
    """Print the table of `inspect` over S3. If `retag` is true, print the table of a retag from S3 to S3 instead."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as home, running_store(Path(home)) as store:
        fill(store, folder)
        port = urlsplit(store.endpoint).port or 0

        def asked(latency: float, run: Callable[[], float]) -> tuple[float, int, int]:
            with relaying(port) as relay:
                relay.latency = latency
                os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{relay.port}"
                seconds = run()
            return seconds, relay.turns, relay.sent + relay.received

        head("")
        index = next((folder / "set").glob("*.index.json")).name
        if retag:
            row("a retag within the store", asked, RETAG, f"s3://{BUCKET}/zip.pt", runs=runs)
            row("download, retag, upload", asked, BY_HAND, f"s3://{BUCKET}/zip.pt", str(folder), runs=others)
            return
        for name in ("zip.pt", "legacy.pt", "s.safetensors", f"set/{index}", "set/", "dcp/"):
            row(f"`inspect {name}`", asked, OURS, f"s3://{BUCKET}/{name}", runs=runs)
        row("fsspec and torch.load, zip.pt", asked, FSSPEC, f"s3://{BUCKET}/zip.pt", runs=others, python=python)


def main() -> None:
    """Write the checkpoints and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=["inspect", "retag"], help="over S3")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the weights")
    parser.add_argument("--runs", type=int, default=5, help="of each process")
    parser.add_argument("--others", type=int, default=5, help="runs of what moves all the bytes")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go")
    parser.add_argument("--python", default=sys.executable, help="one that has torch, s3fs and aiohttp, for fsspec")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make(Path(name), arguments.size)
        how = (Path(name), arguments.runs, arguments.others, arguments.python)
        if arguments.store:
            over_s3(*how, retag=arguments.store == "retag")
        else:
            over_http(*how)
    print(f"load at the end: {' '.join(f'{load:.1f}' for load in os.getloadavg())}")


if __name__ == "__main__":
    main()
