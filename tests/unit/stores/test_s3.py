"""Uploads to S3: the tests in tests/long for a real store run here with a store in memory."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptconv
from ckptconv.conversion.convert import run
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.targets import find_request
from ckptconv.edits.options import edits_from
from ckptconv.errors import OutputError, TargetExistsError
from ckptconv.output.folders import OtherFile
from ckptconv.stores import s3, uploads
from ckptconv.stores.remote import far_path
from ckptconv.stores.requests import POLICY
from tests.long import test_far_s3
from tests.long.test_far_s3 import (  # noqa: F401  # collected here too
    KINDS,
    MIB,
    state_dicts,
    test_a_dry_run_reports_the_requests,
    test_a_set_appears_whole,
    test_a_set_is_read_back,
    test_a_source_that_changes_meanwhile,
    test_an_object_that_exists,
    test_an_output_that_is_missing_when_it_is_read_back,
    test_missing_files_and_buckets,
    test_onto_itself,
    test_saving,
    test_several_at_once,
    test_sources,
    url,
)
from tests.support.command import Command
from tests.support.fake_s3 import running_fake
from tests.support.meter import Counted
from tests.support.seaweed import BUCKET, Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with smaller files than in tests/long, but with several parts."""
    return state_dicts(tmp_path_factory.mktemp("here"), 5 * MIB // 2)


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Yield a store that contains the files."""
    with running_fake(tmp_path_factory.mktemp("store")) as store:
        for name in KINDS:
            store.put(name, (folder / name).read_bytes())
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_far", [True, False], ids=["from S3", "from here"])
def test_targets(is_far: bool, name: str, store: Store, folder: Path, tmp_path: Path) -> None:
    """The object has the bytes that a local file would have, and no upload stays open."""
    test_far_s3.test_targets(is_far, name, "out.pt", {"dtype": "bf16"}, store, folder, tmp_path)
    test_far_s3.test_targets(is_far, name, "out.safetensors", {"strip_prefix": "module."}, store, folder, tmp_path)


@pytest.mark.parametrize("edits", [{"map_location": "cuda:1"}, {"dtype": "bf16"}], ids=["copied", "computed"])
def test_progress_of_uploads(edits: dict[str, str], store: Store) -> None:
    """The progress includes what is read to compare a remote file, computed, sent or copied, and read back. All
    promised bytes are reported as done.
    """
    meter = Counted()
    output = OutputOptions(verify=True, force=True)
    run(find_request(url("zip.pt"), url("meter.pt"), edits_from(**edits), output), meter)
    assert meter.done == meter.promised
    assert meter.promised[0] > 2 * 15 * MIB


def test_a_fault_at_every_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If any request fails, the old object is unchanged, and no upload is open."""
    test_far_s3.test_a_fault_at_every_request("refused", store, monkeypatch)


@pytest.mark.slow
def test_a_set_and_a_fault_at_every_request(store: Store, tmp_path: Path) -> None:
    """If any request fails, no upload is open, and no index names files of two sets."""
    test_far_s3.test_a_set_and_a_fault_at_every_request("same names", store, tmp_path)


@pytest.mark.slow
def test_two_that_replace_one_set(store: Store, tmp_path: Path) -> None:
    """If two processes replace the same set, a complete set of one of them remains, and the other one reports
    an error.
    """
    test_far_s3.two_that_replace_one_set([13, 14, 99], 250, 250, store, tmp_path)  # before our index, and after it
    test_far_s3.two_that_replace_one_set([10, 99], 90, 170, store, tmp_path)  # before our first shard


def test_the_output_is_read_back(store: Store, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """With ``--verify``, each byte of the output is read back. An output that differs is reported and kept, and it can
    be written again.
    """
    test_far_s3.test_the_output_is_read_back(("--to", "cuda:1"), store, monkeypatch, command)


SET: Any = {"max_shard_size": "14MB", "format": "safetensors"}


def test_a_shard_that_another_process_has_replaced_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process replaces a shard during a conversion, its file is kept, and all other files of the conversion
    are removed.
    """

    def replaced(path: Path, *args: Any) -> None:
        store.put("raced/model-00001-of-00002.safetensors", b"theirs")
        uploads.read_back(path, *args)

    monkeypatch.setattr(s3, "read_back", replaced)
    with pytest.raises(OutputError, match="another process has replaced"):
        ckptconv.convert(url("zip.pt"), url("raced/"), verify=True, **SET)
    assert store.keys("raced/") == ["raced/model-00001-of-00002.safetensors"]
    assert store.get("raced/model-00001-of-00002.safetensors") == b"theirs"


def test_another_file_that_another_process_has_replaced_is_kept(store: Store, tmp_path: Path) -> None:
    """After a fault, the other files that were uploaded are removed, except for those that another process has
    replaced.
    """
    for name in "ab":
        (tmp_path / name).write_bytes(b"ours")
    others = [OtherFile(far_path(url(f"others/{name}")), tmp_path / name, "file", 4) for name in "ab"]
    uploaded = s3.STORE.others_uploaded(others, replace=False, verify=False)
    uploaded.__enter__()
    store.put("others/b", b"theirs")
    assert not uploaded.__exit__(OutputError, OutputError("no room"), None)
    assert store.keys("others/") == ["others/b"] and store.get("others/b") == b"theirs"


@pytest.mark.parametrize("request_", ["PutObject", "CompleteMultipartUpload"])
def test_an_answer_that_is_lost(request_: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an answer is lost, the request is sent again, and the store answers that the object exists. The object is
    accepted if it is ours, and kept if it is from another process.
    """
    from botocore.client import BaseClient
    from botocore.exceptions import ReadTimeoutError

    src = tmp_path / "small.pt" if request_ == "PutObject" else url("zip.pt")
    ckptconv.save({"a": 1}, tmp_path / "small.pt")
    original, theirs = BaseClient._make_api_call, [False]

    def lose(self: Any, name: str, arguments: Any) -> Any:
        said = original(self, name, arguments)
        if name != request_ or lost:
            return said
        lost.append(name)
        if theirs[0]:
            store.put(arguments["Key"], b"theirs")
        raise ReadTimeoutError(endpoint_url="x")

    monkeypatch.setattr(POLICY, "backoff", 0.001)
    monkeypatch.setattr(BaseClient, "_make_api_call", lose)
    lost: list[str] = []
    ckptconv.convert(src, url(f"lost-{request_}.pt"))
    assert lost and ckptconv.verify(url(f"lost-{request_}.pt")).ok
    lost.clear()
    theirs[0] = True
    with pytest.raises((TargetExistsError, OutputError)):
        ckptconv.convert(src, url(f"raced-{request_}.pt"))
    assert store.get(f"raced-{request_}.pt") == b"theirs"


def test_ctrl_c_while_an_upload_begins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C during the request that begins an upload, the answer is awaited and the upload is aborted."""
    from botocore.client import BaseClient

    original = BaseClient._make_api_call

    def interrupt(self: Any, name: str, arguments: Any) -> Any:
        said = original(self, name, arguments)
        if name == "CreateMultipartUpload":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)
        return said

    monkeypatch.setattr(BaseClient, "_make_api_call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ckptconv.convert(url("zip.pt"), url("interrupted.pt"))
    assert store.uploads() == [] and store.keys("interrupted") == []


def test_ctrl_c_if_the_abort_is_not_answered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an upload cannot be aborted after Ctrl-C, the exception has a note with the command that lists the open
    upload. The command line prints such notes.
    """
    from botocore.client import BaseClient
    from botocore.exceptions import ReadTimeoutError

    original = BaseClient._make_api_call

    def fail(self: Any, name: str, arguments: Any) -> Any:
        if name == "CompleteMultipartUpload":
            raise KeyboardInterrupt
        if name == "AbortMultipartUpload":
            raise ReadTimeoutError(endpoint_url="x")
        return original(self, name, arguments)

    monkeypatch.setattr(POLICY, "backoff", 0.001)
    monkeypatch.setattr(BaseClient, "_make_api_call", fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        ckptconv.convert(url("zip.pt"), url("stopped.pt"))
    monkeypatch.undo()
    assert store.uploads() == ["stopped.pt"]
    assert f"list-multipart-uploads --bucket {BUCKET} --prefix stopped.pt" in str(vars(caught.value)["__notes__"])
    for each in store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        store.client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each.get("UploadId", "1"))


@pytest.mark.parametrize(
    ("lost", "refused", "is_said"),
    [
        ("CreateMultipartUpload", "CompleteMultipartUpload", True),
        ("AbortMultipartUpload", "CompleteMultipartUpload", True),
        ("", "CompleteMultipartUpload", False),
        ("", "CreateMultipartUpload", False),
    ],
)
def test_an_upload_that_may_stay_open_is_reported(
    lost: str, refused: str, is_said: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a failed upload contains the command that lists it if the upload may be open, because its id was
    lost or because it was not aborted.
    """
    from botocore.client import BaseClient
    from botocore.exceptions import ClientError, ReadTimeoutError

    original, seen = BaseClient._make_api_call, list[str]()

    def fail(self: Any, name: str, arguments: Any) -> Any:
        if name == refused and lost != name:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, name)
        said = None if name == "AbortMultipartUpload" == lost else original(self, name, arguments)
        if name == lost and (name not in seen or name == "AbortMultipartUpload"):
            seen.append(name)
            raise ReadTimeoutError(endpoint_url="x")
        return said

    monkeypatch.setattr(POLICY, "backoff", 0.001)
    monkeypatch.setattr(BaseClient, "_make_api_call", fail)
    with pytest.raises(OutputError) as caught:
        ckptconv.convert(url("zip.pt"), url("left.pt"))
    monkeypatch.undo()
    assert (f"list-multipart-uploads --bucket {BUCKET} --prefix left.pt" in str(caught.value)) is is_said
    assert ("left.pt" in store.uploads()) is is_said
    for each in store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        store.client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each.get("UploadId", "1"))


@pytest.mark.parametrize(
    ("target", "old", "new"), [("last.pt", {}, {}), ("last/", {**SET, "max_shard_size": "20MB"}, SET)]
)
def test_an_interrupt_after_the_last_request_keeps_the_output(
    target: str, old: Any, new: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the last request keeps the new output, because the previous output is gone by then."""
    ckptconv.convert(url("zip.pt"), url(target), **old)
    appear = s3._Upload.appear

    def interrupted(self: Any, condition: dict[str, str]) -> None:
        appear(self, condition)
        if self.path.name.endswith((".pt", ".json")):
            raise KeyboardInterrupt

    monkeypatch.setattr(s3._Upload, "appear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckptconv.convert(url("zip.pt"), url(target), strip_prefix="module.", force=True, **new)
    index = "" if target == "last.pt" else "model.safetensors.index.json"
    assert ckptconv.verify(url(target + index)).ok


def test_a_store_that_cannot_be_reached(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be reached is reported, also by the first request, which looks for an existing output."""
    monkeypatch.setattr(POLICY, "backoff", 0.001)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(OutputError, match="EndpointConnectionError"):
        ckptconv.convert(folder / "zip.pt", url("unreached.pt"))
