"""A real store that speaks S3: sources, uploads that appear completely or not at all, and copies within the store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file

import ckptconv
from ckptconv.errors import CkptconvError, InputError, MissingInputError, OutputError, TargetExistsError
from ckptconv.stores.requests import POLICY
from tests.support.command import Command
from tests.support.counting_proxy import relaying
from tests.support.sampled import sampled
from tests.support.seaweed import BUCKET, Store, running_store

KINDS = ("zip.pt", "legacy.pt", "s.safetensors")
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state dict in each format, large enough for several parts."""
    return state_dicts(tmp_path_factory.mktemp("here"), 6 * MIB)


def state_dicts(folder: Path, size: int) -> Path:
    """Write a state dict of six tensors of `size` bytes in each format to `folder`, and return `folder`."""
    state = {f"module.layer.{i}": torch.rand(size // 4) for i in range(6)}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "s.safetensors")
    return folder


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Yield a store that contains the files of `folder`."""
    with running_store(tmp_path_factory.mktemp("store")) as store:
        for name in KINDS:
            store.put(name, (folder / name).read_bytes())
        yield store


def url(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


@pytest.mark.parametrize("name", KINDS)
def test_sources(name: str, store: Store, folder: Path, tmp_path: Path) -> None:
    """An object is inspected, verified, compared and converted like the local file."""
    assert ckptconv.inspect(url(name)).tensors == ckptconv.inspect(folder / name).tensors
    assert ckptconv.verify(url(name)).ok
    assert ckptconv.diff(url(name), folder / name, full=True).same
    ckptconv.convert(url(name), tmp_path / "a.pt", dtype="bf16")
    assert ckptconv.diff(tmp_path / "a.pt", folder / name, names_only=True).same


def test_missing_files_and_buckets(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing object or bucket is a MissingInputError. An empty object and a refused request are errors too."""
    for missing in (url("none.pt"), "s3://nobucket/none.pt"):
        with pytest.raises(MissingInputError):
            ckptconv.inspect(missing)
    store.put("empty.pt", b"")
    with pytest.raises(InputError, match="empty"):
        ckptconv.inspect(url("empty.pt"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(InputError, match=r"the store refuses \(got 403"):
        ckptconv.inspect(url("zip.pt"))


@pytest.mark.parametrize("options", [{"map_location": "cuda:1"}, {"strip_prefix": "module."}, {"dtype": "bf16"}])
@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_far", [True, False], ids=["from S3", "from here"])
def test_targets(
    is_far: bool, name: str, out: str, options: dict[str, str], store: Store, folder: Path, tmp_path: Path
) -> None:
    """A converted object has the same bytes as a converted local file, and no upload stays open."""
    key = f"{is_far}-{name}-{options}/{out}"
    ckptconv.convert(folder / name, tmp_path / out, **options)
    report = ckptconv.convert(url(name) if is_far else folder / name, url(key), **options)
    assert store.get(key) == (tmp_path / out).read_bytes()
    assert report.dst == url(key)
    assert store.uploads() == []


def test_a_retag_within_the_store_sends_five_mebibytes(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retag within the store transfers only the first part of 5 MiB in each direction, and headers: at most 12 MiB in
    total. S3 copies the rest.
    """
    state = {f"layer.{i}": torch.rand(8 * MIB) for i in range(4)}
    torch.save(state, tmp_path / "large.pt")
    store.put("large.pt", (tmp_path / "large.pt").read_bytes())
    (tmp_path / "near").mkdir()
    ckptconv.convert(tmp_path / "large.pt", tmp_path / "near" / "a.pt", map_location="cuda:1")
    with relaying(urlsplit(store.endpoint).port or 0) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{relay.port}")
        report = ckptconv.convert(url("large.pt"), url("copied/a.pt"), map_location="cuda:1")
    assert relay.sent + relay.received <= 12 * MIB
    assert store.get("copied/a.pt") == (tmp_path / "near" / "a.pt").read_bytes()
    assert any("copied within S3" in note for note in report.notes)


def test_a_dry_run_reports_the_requests(store: Store, command: Command) -> None:
    """A dry run reports the requests, and the bytes that are sent and copied. Nothing is written."""
    command("convert", url("zip.pt"), url("dry.pt"), "--to", "cuda:1", "-n", out=["sent from here", "copied within S3"])
    words = ["--to", "cuda:1", "-n", "--verify", "--max-shard-size", "14MB", "--format", "safetensors"]
    command("convert", url("zip.pt"), url("dry/"), *words, out=["requests: ", "sent from here", "is read back"])
    command(
        "convert", url("zip.pt"), url("dry.pt"), "--to", "cuda:1", "-n", "--verify", out="of the input that S3 copies"
    )
    assert store.keys("dry") == []


def test_an_object_that_exists(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """An existing object stays without ``--force``, also one that appears during the upload."""
    store.put("there.pt", b"old")
    with pytest.raises(TargetExistsError):
        ckptconv.convert(folder / "zip.pt", url("there.pt"))
    monkeypatch.setattr("ckptconv.stores.s3.S3Store.check_target", lambda *_, **__: None)
    for name in ("zip.pt", "s.safetensors"):
        with pytest.raises(TargetExistsError, match="created by another process"):
            ckptconv.convert(url(name), url("there.pt"), format="pt")
    assert (store.get("there.pt"), store.uploads()) == (b"old", [])
    command("convert", url("zip.pt"), url("there.pt"), "--skip-existing", "--force")
    assert store.get("there.pt") == b"old"
    ckptconv.convert(url("zip.pt"), url("there.pt"), force=True)
    assert ckptconv.verify(url("there.pt")).ok


@pytest.mark.parametrize("words", [("--to", "cuda:1"), ("--dtype", "bf16")], ids=["copied", "computed"])
def test_the_output_is_read_back(
    words: tuple[str, str], store: Store, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """With ``--verify`` the output is read back. If it differs, the command fails with a hint to ``--force``, and the
    object stays.
    """
    bad = url(f"back/{words[1]}.pt")
    made = calls(monkeypatch, lambda *_: None)
    command("convert", url("zip.pt"), url(f"back/good-{words[1]}.pt"), "--verify", *words, err="the output read back")
    assert made[-1] == "GetObject"
    read_wrongly(monkeypatch, bad)
    said = ("differs when it is read back", "the new object is visible: --force writes it again")
    command("convert", url("zip.pt"), bad, "--verify", *words, status=1, err=said)
    monkeypatch.undo()
    command("convert", url("zip.pt"), bad, "--verify", "--force", *words)


def read_wrongly(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Change the last byte of each response about an object whose URL contains `wrong`."""
    from ckptconv.stores.requests import Answer
    from ckptconv.stores.s3 import S3Transport

    original = S3Transport.get

    def get(self: Any, *args: Any) -> Answer:
        answer = original(self, *args)
        if wrong in str(self._where):
            answer = Answer(answer.data[:-1] + bytes([answer.data[-1] ^ 1]), answer.version)
        return answer

    monkeypatch.setattr(S3Transport, "get", get)


def test_an_output_that_is_missing_when_it_is_read_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process replaces or deletes the object before it is read back, the error says so, and a replaced
    object stays.
    """
    from ckptconv.stores import uploads

    def replace(data: bytes | None) -> Any:
        def before(path: Any, *args: Any) -> None:
            store.client.delete_object(Bucket=BUCKET, Key="theirs.pt") if data is None else store.put("theirs.pt", data)
            uploads.read_back(path, *args)

        return before

    for data, said in ((b"theirs", "another process has replaced the object"), (None, "could not be read back")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptconv.stores.s3.read_back", replace(data))
            with pytest.raises(OutputError, match=said):
                ckptconv.convert(url("zip.pt"), url("theirs.pt"), verify=True)
        assert store.keys("theirs.pt") == (["theirs.pt"] if data else [])
        store.client.delete_object(Bucket=BUCKET, Key="theirs.pt")


def test_a_set_is_read_back(store: Store) -> None:
    """The shards of a set are read back before the index appears. If a shard differs, nothing is left. The output of
    ``save`` is read back too.
    """
    how = {"max_shard_size": "14MB", "format": "safetensors", "verify": True}
    with pytest.MonkeyPatch.context() as patch:
        read_wrongly(patch, "backset/model-00001")
        with pytest.raises(OutputError, match="differs when it is read back") as caught:
            ckptconv.convert(url("zip.pt"), url("backset/"), **how)
        assert "is there" not in str(caught.value)
        assert store.keys("backset/") == []
        read_wrongly(patch, "saved-bad")
        with pytest.raises(OutputError, match="differs when it is read back"):
            ckptconv.save({"a": torch.ones(3)}, url("saved-bad.pt"), verify=True)
    report = ckptconv.convert(url("zip.pt"), url("backset/"), **how)
    assert report.verified and report.verified.output


def test_onto_itself(store: Store, folder: Path) -> None:
    """With ``force`` an object can be converted onto itself, like a file."""
    store.put("self.pt", (folder / "zip.pt").read_bytes())
    ckptconv.convert(url("self.pt"), url("self.pt"), map_location="cuda:1", force=True)
    assert set(ckptconv.inspect(url("self.pt")).devices) == {"cuda:1"}


def test_a_source_that_changes_meanwhile(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that changes during a copy within the store is an error, because the store compares the ETag. No output
    and no upload is left.
    """
    store.put("moving.pt", (folder / "zip.pt").read_bytes())
    made = calls(monkeypatch, lambda name, _: name == "UploadPartCopy" and store.put("moving.pt", b"another"))
    with pytest.raises(CkptconvError):
        ckptconv.convert(url("moving.pt"), url("never.pt"), map_location="cuda:1")
    assert "UploadPartCopy" in made
    assert store.keys("never.pt") == []
    assert store.uploads() == []


def calls(monkeypatch: pytest.MonkeyPatch, before: Any) -> list[str]:
    """Return a list that collects the names of all further requests. `before` is called with the name and the number of
    each request.
    """
    from botocore.client import BaseClient

    original = BaseClient._make_api_call
    made: list[str] = []

    def make(self: Any, name: str, arguments: Any) -> Any:
        made.append(name)
        before(name, len(made))
        return original(self, name, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", make)
    return made


@pytest.mark.parametrize("fault", [KeyboardInterrupt, "refused", "line"])
def test_a_fault_at_every_request(fault: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If any request fails, the old object is unchanged, and no upload stays open."""
    from botocore.exceptions import ClientError, EndpointConnectionError

    monkeypatch.setattr(POLICY, "backoff", 0.001)
    store.put("old.pt", b"old")
    numbers, failed = iter(range(1, 1000)), 0
    for number in numbers:

        def fail(name: str, at: int, number: int = number) -> None:
            if at < number or name in ("AbortMultipartUpload", "ListMultipartUploads"):
                return
            if fault is KeyboardInterrupt and at == number:
                raise KeyboardInterrupt
            if fault == "refused" and at == number:
                raise ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, name)
            if fault == "line" and at >= number:
                raise EndpointConnectionError(endpoint_url="x")

        with pytest.MonkeyPatch.context() as patch:
            made = calls(patch, fail)
            try:
                ckptconv.convert(url("zip.pt"), url("old.pt"), map_location="cuda:1", force=True)
            except (InputError, OutputError, KeyboardInterrupt):
                failed += 1
            else:
                break
        assert store.get("old.pt") == b"old", (number, made)
        assert store.uploads() == [], (number, made)
    assert failed == number - 1 > 6
    assert ckptconv.verify(url("old.pt")).ok


_KILL = """
import os, signal, sys
from botocore.client import BaseClient
original, made = BaseClient._make_api_call, []
def make(self, name, arguments):
    made.append(name)
    if len(made) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, name, arguments)
BaseClient._make_api_call = make
import ckptconv
"""
_KILLED = _KILL + 'ckptconv.convert(sys.argv[1], sys.argv[2], map_location="cuda:1", force=True)'
_SET_KILLED = (
    _KILL + 'ckptconv.convert(*sys.argv[1:3], max_shard_size="14MB", strip_prefix="module.", force=True, verify=True)'
)


@pytest.mark.parametrize("number", [1, 3, 6, 8, 10])
def test_killed_at_a_request(number: int, store: Store) -> None:
    """If the process is killed, the old object stays. An upload can stay open, but readers of the folder do not
    see it.
    """
    store.put("killed/old.pt", b"old")
    words = [sys.executable, "-c", _KILLED, url("zip.pt"), url("killed/old.pt"), str(number)]
    assert subprocess.run(words, capture_output=True).returncode == -9
    assert store.get("killed/old.pt") == b"old"
    assert store.keys("killed/") == ["killed/old.pt"]
    abort_all(store)


def abort_all(store: Store) -> None:
    """Abort the uploads that a killed process has left."""
    for each in store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        store.client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


def test_several_at_once(store: Store, folder: Path, command: Command) -> None:
    """One or several files are written to a prefix under their own names. An existing output is skipped or is
    an error.
    """
    ckptconv.convert(folder / "zip.pt", url("prefix/"), map_location="cpu")
    assert store.keys("prefix/") == ["prefix/zip.pt"]
    words = [url("zip.pt"), folder / "s.safetensors", url("many/"), "--to", "cuda:1", "--format", "pt"]
    command("convert", *words, "-j", "2")
    command("convert", *words, "--skip-existing")
    command("convert", *words, status=1, err="the output exists")
    assert store.keys("many/") == ["many/s.pt", "many/zip.pt"]


def test_a_set_appears_whole(store: Store, folder: Path, tmp_path: Path) -> None:
    """With ``force`` a set replaces an old set and leaves other objects in the folder. Without it, the old set is an
    error.
    """
    near = tmp_path / "near"
    for size in ("7MB", "99MB", "14MB"):
        ckptconv.convert(folder / "zip.pt", near, max_shard_size=size, format="safetensors", force=True)
        ckptconv.convert(url("zip.pt"), url("set"), max_shard_size=size, format="safetensors", force=True)
        names = sorted(each.name for each in near.iterdir())
        kept = [f"set/{name}" for name in names] + (["set/readme.txt"] if size != "7MB" else [])
        assert store.keys("set/") == kept
        assert all(store.get(f"set/{name}") == (near / name).read_bytes() for name in names)
        store.put("set/readme.txt", b"mine")
    assert ckptconv.diff(url("set/"), folder / "zip.pt", full=True).same
    with pytest.raises(TargetExistsError, match="the output exists: model-00001"):
        ckptconv.convert(folder / "zip.pt", url("set/"), max_shard_size="14MB", format="safetensors")
    assert store.uploads() == []


SETS = {"new": None, "same names": "14MB", "other names": "20MB"}  # the size of the shards of the old set
_HOW: Any = {"max_shard_size": "14MB", "strip_prefix": "module.", "force": True}


class Sets:
    """An old set and the new set that replaces it. The methods check that an index always belongs to a complete set."""

    def __init__(self, kind: str, store: Store, folder: Path) -> None:
        self.store, self.prefix = store, f"sets/{kind}/"
        self.old: dict[str, bytes] = {}
        if size := SETS[kind]:
            self.old = self._made("s.safetensors", {"max_shard_size": size}, folder / "old")
        self.new = self._made("s.safetensors", _HOW, folder / "new")

    def _made(self, name: str, how: dict[str, Any], near: Path) -> dict[str, bytes]:
        ckptconv.convert(url(name), near, **how)
        return {each.name: each.read_bytes() for each in near.iterdir()}

    def reset(self) -> None:
        """Restore the old set, and delete everything else."""
        for key in self.store.keys(self.prefix):
            self.store.client.delete_object(Bucket=BUCKET, Key=key)
        for name, data in self.old.items():
            self.store.put(self.prefix + name, data)

    def seen(self) -> dict[str, bytes]:
        """Return the objects of the folder. Fail if an index is present and a shard of its set is missing."""
        there = {key[len(self.prefix) :]: self.store.get(key) for key in self.store.keys(self.prefix)}
        for name in there:
            if name.endswith(".json"):
                whole = self.old if there[name] == self.old.get(name) else self.new
                assert whole.items() <= there.items(), sorted(there)
        return there


@pytest.mark.parametrize("kind", SETS)
def test_a_set_and_a_fault_at_every_request(kind: str, store: Store, tmp_path: Path) -> None:
    """If any request fails, no upload stays open. The old set stays, unless the error says that the new set is there or
    that the old index is gone.
    """
    sets = Sets(kind, store, tmp_path)
    gone = 0
    for number in sampled(range(1, 100)):
        sets.reset()
        said = set_with_a_fault(number, sets)
        if said is None:
            break
        there = sets.seen()
        assert store.uploads() == []
        if "the new set is there" in said:
            assert sets.new.items() <= there.items()
        elif kind != "same names":
            assert there == sets.old
        else:
            gone += there != sets.old
            assert (there == sets.old) != ("the old index is gone" in said), said
    assert number > 12
    assert bool(gone) == (kind == "same names")
    assert sets.seen() == sets.new


def set_with_a_fault(number: int, sets: Sets) -> str | None:
    """Return the error message if the request `number` fails. Return None if fewer requests are sent."""
    from botocore.exceptions import ClientError

    seen: list[str] = []

    def fail(name: str, at: int) -> None:
        seen.append(name)
        if at == number:
            raise ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, name)

    with pytest.MonkeyPatch.context() as patch:
        calls(patch, fail)
        try:
            ckptconv.convert(url("s.safetensors"), url(sets.prefix), **_HOW)
        except CkptconvError as error:
            return str(error)
    return None


@pytest.mark.parametrize("theirs", [170, 250], ids=["their shards are called like ours", "otherwise"])
@pytest.mark.parametrize("old", [170, 250, 90], ids=["as ours", "as the other's", "otherwise"])
def test_two_that_replace_one_set(old: int, theirs: int, store: Store, tmp_path: Path) -> None:
    """If a second conversion replaces the same set during a conversion, the set of the index is complete. If it is the
    set of the first conversion, that conversion reports no error.
    """
    two_that_replace_one_set(range(1, 100), old, theirs, store, tmp_path)


def two_that_replace_one_set(numbers: Sequence[int], old: int, theirs: int, store: Store, tmp_path: Path) -> None:
    """Convert to a set with shards of `old` bytes. Before the request with one of the `numbers`, another conversion
    writes a set with shards of `theirs` bytes.

    The other conversion never comes between the check whether a file is old and its deletion, because the store has no
    protection against that.
    """
    ckptconv.save({f"module.{i}": torch.full((20,), float(i)) for i in range(6)}, tmp_path / "small.pt")
    prefix = f"both/{old}-{theirs}/"
    how: Any = {"format": "safetensors", "force": True}
    one = {"max_shard_size": 170, "strip_prefix": "module.", **how}
    two = {"max_shard_size": theirs, "add_prefix": "theirs.", **how}
    ckptconv.convert(tmp_path / "small.pt", tmp_path / "one", **one)
    ckptconv.convert(tmp_path / "small.pt", tmp_path / "two", **two)
    ours, others = ({each.name: each.read_bytes() for each in (tmp_path / name).iterdir()} for name in ("one", "two"))
    said: list[str] = []
    for number in numbers:
        ckptconv.convert(tmp_path / "small.pt", url(prefix), max_shard_size=old, **how)
        with pytest.MonkeyPatch.context() as patch:
            came: list[int] = []

            def come(name: str, at: int, number: int = number, came: list[int] = came) -> None:
                if at >= number and not came and name != "DeleteObject":
                    came.append(at)
                    ckptconv.convert(tmp_path / "small.pt", url(prefix), **two)

            made = calls(patch, come)
            try:
                ckptconv.convert(tmp_path / "small.pt", url(prefix), **one)
                said.append("")
            except OutputError as error:
                said.append(str(error))
        there = {key[len(prefix) :]: store.get(key) for key in store.keys(prefix)}
        index = there["model.safetensors.index.json"]
        whole = ours if index == ours["model.safetensors.index.json"] else others
        assert whole.items() <= there.items(), (number, made, said[-1], sorted(there))
        assert whole is others or not said[-1], (number, made, said[-1])
        assert store.uploads() == []
        if not came:
            break
    assert any("another process has written to this folder meanwhile" in each for each in said)
    assert whole is ours and number > 15  # in the last round the other conversion did not run


@pytest.mark.parametrize("kind", SETS)
def test_a_set_killed_at_every_request(kind: str, store: Store, tmp_path: Path) -> None:
    """If the process is killed at any request, an index belongs to a complete old or new set, or there is no index. The
    set of an index can be inspected.
    """
    sets = Sets(kind, store, tmp_path)
    without = 0
    for number in range(1, 100):
        sets.reset()
        words = [sys.executable, "-c", _SET_KILLED, url("s.safetensors"), url(sets.prefix), str(number)]
        if subprocess.run(words, capture_output=True).returncode == 0:
            break
        there = sets.seen()
        without += not any(name.endswith(".json") for name in there)
        if any(name.endswith(".json") for name in there):
            (index,) = (name for name in there if name.endswith(".json"))
            assert len(ckptconv.inspect(url(sets.prefix + index)).tensors) == 6
        abort_all(store)
    assert number > 12
    assert bool(without) == (kind != "other names")
    assert sets.seen() == sets.new


def test_saving(store: Store) -> None:
    """``save`` writes to the store in both formats and replaces an existing object. With ``force=False`` an existing
    object is an error.
    """
    state = {"a": torch.arange(10), "b": torch.ones(3)}
    for name in ("saved.pt", "saved.safetensors", "saved.pt"):
        report = ckptconv.save(state, url(name), verify=True)
        assert report.dst == url(name)
        loaded = ckptconv.load(url(name))
        assert all(torch.equal(loaded[key], state[key]) for key in state)
    with pytest.raises(TargetExistsError):
        ckptconv.save(state, url("saved.pt"), force=False)
