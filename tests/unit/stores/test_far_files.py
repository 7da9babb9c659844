"""Checkpoints over HTTP: each command gives the same result as for a local file, with few requests."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ckptconv
from ckptconv.errors import InputChangedError, MalformedError, MissingInputError, TransferError, UsageError
from ckptconv.formats.opening import open_input
from ckptconv.stores.remote import far_path
from ckptconv.stores.requests import POLICY, Extents, enlarged, in_parts, merged
from ckptconv.stores.urls import local_path, parse
from tests.support.command import Command
from tests.support.conversions import run_without_torch, saved_in_each_format
from tests.support.http_server import Exchange, FileServer, serving
from tests.support.paths import ROOT

KINDS = ("zip.pt", "legacy.pt", "s.safetensors")
HEADERS = 256 << 10  # bytes that reading the headers of a file may take

needs_urllib3 = pytest.mark.skipif(not find_spec("urllib3"), reason="the extra remote is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state dict in each format, and as a set of three shards with an index."""
    state = {f"module.layer.{i}": torch.arange(100_000.0) + i for i in range(6)}
    return saved_in_each_format(tmp_path_factory.mktemp("far"), state, "1MB")


@pytest.fixture
def server(folder: Path) -> Iterator[FileServer]:
    """Serve all files of the folder under their names."""
    files = {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}
    with serving(files) as server:
        yield server


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without a delay."""
    monkeypatch.setattr(POLICY, "backoff", 0.01)


def index_in(folder: Path) -> str:
    """Return the name of the index of the set in `folder`."""
    return next(f"set/{each.name}" for each in (folder / "set").glob("*.index.json"))


@needs_urllib3
@pytest.mark.parametrize("name", KINDS)
def test_inspect_reads_only_the_headers(name: str, server: FileServer, folder: Path) -> None:
    """``inspect`` gives the same facts as for the local file, in at most three requests. A note names what it did not
    read.
    """
    near, far = ckptconv.inspect(folder / name), ckptconv.inspect(server.url(name))
    assert far.path == server.url(name)
    assert (far.tensors, far.state_dicts, far.format, far.size) == (
        near.tensors,
        near.state_dicts,
        near.format,
        near.size,
    )
    assert any(note.startswith("not read, to save requests: ") for note in far.notes)
    assert len(server.seen) <= 3 - (name == "s.safetensors")
    assert server.sent <= HEADERS


@needs_urllib3
def test_ranges_that_exceed_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range is read correctly if some of its bytes are in memory already, and if it is too long to be kept there."""
    monkeypatch.setattr(POLICY, "held", 1 << 20)
    data = bytes(range(251)) * (3 << 12)
    with serving({"a.pt": data}) as server, open_input(server.url("a.pt")) as source:
        for start, stop in ((0, 2 << 20), (1000, 1 << 20), (len(data) - (700 << 10), len(data)), (0, len(data))):
            assert source.read(start, stop - start) == data[start:stop]


@needs_urllib3
@pytest.mark.parametrize("options", [{"map_location": "cuda:1"}, {"dtype": "bf16", "strip_prefix": "module."}])
@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
@pytest.mark.parametrize("name", KINDS)
def test_converts_to_the_same_bytes(
    name: str, out: str, options: dict[str, str], server: FileServer, folder: Path, tmp_path: Path
) -> None:
    """The output has the same bytes as that of the local file. No byte of a tensor is requested twice."""
    for place in ("near", "far"):
        (tmp_path / place).mkdir()
    ckptconv.convert(folder / name, tmp_path / "near" / out, **options)
    report = ckptconv.convert(server.url(name), tmp_path / "far" / out, verify=True, **options)
    assert (tmp_path / "far" / out).read_bytes() == (tmp_path / "near" / out).read_bytes()
    assert [each.name for each in (tmp_path / "far").iterdir()] == [out]
    assert server.sent <= len(server.files[name]) + HEADERS
    assert report.src == server.url(name)


@needs_urllib3
@pytest.mark.parametrize("name", KINDS)
def test_functions_give_the_same_results(name: str, server: FileServer, folder: Path) -> None:
    """``verify``, ``diff``, ``load`` and ``open`` give the same results as for the local file."""
    assert ckptconv.verify(server.url(name)).ok
    assert ckptconv.diff(server.url(name), folder / name, full=True).same
    expected = ckptconv.load(folder / name)
    loaded = ckptconv.load(server.url(name))
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    server.seen.clear()
    with ckptconv.open(server.url(name)) as file:
        assert torch.equal(file.load("module.layer.3"), expected["module.layer.3"])
    assert server.sent <= HEADERS + expected["module.layer.3"].nbytes + 6 * POLICY.window


@needs_urllib3
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_several_at_once(jobs: str, server: FileServer, folder: Path, tmp_path: Path, command: Command) -> None:
    """Several files are converted into a local folder under their own names, in one process or in two. An existing
    output is skipped, and a missing file is reported.
    """
    urls = [server.url(name) for name in (*KINDS, "none.pt")]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "legacy.pt").write_bytes(b"old")
    said = command("convert", *urls, f"{tmp_path}/out/", "--to", "cuda:1", "--skip-existing", "-j", jobs, status=3)
    assert f"{server.url('none.pt')}: cannot be read" in said.err
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(KINDS)
    assert (tmp_path / "out" / "legacy.pt").read_bytes() == b"old"
    assert set(ckptconv.inspect(tmp_path / "out" / "zip.pt").devices) == {"cuda:1"}
    assert command("inspect", *urls[:3], server.url("set/none.pt"), status=1).out.count(server.url("")) >= 3


@needs_urllib3
def test_damage_is_found(server: FileServer) -> None:
    """``verify`` finds a single bit that was changed in the remote file."""
    data = bytearray(server.files["zip.pt"])
    data[len(data) // 2] ^= 1
    server.files["zip.pt"] = bytes(data)
    assert [each.level for each in ckptconv.verify(server.url("zip.pt")).findings] == ["damaged"]


@needs_urllib3
def test_a_set_is_read_by_its_index(server: FileServer, folder: Path, tmp_path: Path) -> None:
    """A set is read by its index, with at most two requests for each file. It can be converted to a file, or to the
    same set as from the local files.
    """
    index = index_in(folder)
    far = ckptconv.inspect(server.url(index))
    assert far.tensors == ckptconv.inspect(folder / index).tensors
    assert len(server.seen) <= 2 * len([name for name in server.files if name.startswith("set/")])
    ckptconv.convert(server.url(index), tmp_path / "whole.safetensors")
    assert ckptconv.diff(tmp_path / "whole.safetensors", folder / "s.safetensors").same
    ckptconv.convert(server.url(index), tmp_path / "set/", strip_prefix="module.")
    ckptconv.convert(folder / index, tmp_path / "near/", strip_prefix="module.")
    for each in (tmp_path / "near").iterdir():
        assert (tmp_path / "set" / each.name).read_bytes() == each.read_bytes()


@needs_urllib3
def test_a_missing_shard(server: FileServer, folder: Path) -> None:
    """The error contains the name of a missing shard, as for local files."""
    shard = next(name for name in server.files if "00002-of" in name)
    del server.files[shard]
    with pytest.raises(MalformedError, match=rf"1 of \d shards is missing: {Path(shard).name}"):
        ckptconv.inspect(server.url(index_in(folder)))


@needs_urllib3
def test_an_index_names_only_files_next_to_it(server: FileServer, folder: Path) -> None:
    """An index that names anything but a file next to it is refused, and nothing else is requested."""
    index = index_in(folder)
    for elsewhere in (
        "../zip.pt", "http://127.0.0.1:1/x.safetensors", "/etc/passwd", "%2e%2e/zip.pt", "..%2fzip.pt", "..\\zip.pt",
        "//127.0.0.1:1/x.safetensors", "file:x.safetensors", "s3://b/x.safetensors", "@127.0.0.1:1", "a.safetensors?x",
        "a.safetensors#x", "a\n.safetensors", "C:\\x.safetensors", "a/../../zip.pt", ".", "", "\0",
    ):  # a table  # fmt: skip
        server.files[index] = json.dumps({"weight_map": {"a": elsewhere}}).encode()
        server.seen.clear()
        with pytest.raises(MalformedError):
            ckptconv.inspect(server.url(index))
        assert {each.path for each in server.seen} == {"/" + index}


@needs_urllib3
def test_the_first_shard_that_cannot_be_read_ends_it(server: FileServer, folder: Path) -> None:
    """The first shard that cannot be read ends the command, because each of the others could take until the
    deadline.
    """
    index = index_in(folder)
    shards = {f"w{i}": f"model-{i:05}-of-00200.safetensors" for i in range(1, 201)}
    server.files = {index: json.dumps({"weight_map": shards}).encode()} | {
        f"set/{name}": b"" for name in shards.values()
    }
    server.lie = lambda it: it.answer() if it.data else it.send(503, {"Content-Length": "0"}, b"")
    with pytest.raises(TransferError, match=r"model-00001-of-00200.*answers 503"):
        ckptconv.inspect(server.url(index))
    assert len({each.path for each in server.seen}) < 50


@needs_urllib3
def test_temporary_faults(server: FileServer, tmp_path: Path) -> None:
    """After a status 503 and two incomplete answers, the requests are repeated and the file is complete."""

    def lie(it: Exchange) -> None:
        if it.number == 0:
            it.send(503, {"Retry-After": "0", "Content-Length": "0"}, b"")
        elif it.number in (2, 4):
            it.send(206, it.headers(), it.part[:-7])
            it.handler.close_connection = True
        else:
            it.answer()

    server.lie = lie
    ckptconv.convert(server.url("zip.pt"), tmp_path / "a.pt")
    assert ckptconv.verify(tmp_path / "a.pt").ok
    assert {each.status for each in server.seen} == {503, 206}


@needs_urllib3
@pytest.mark.parametrize("etags", [True, False])
def test_a_range_that_is_ignored_once(etags: bool, server: FileServer, tmp_path: Path) -> None:
    """If the server ignores a range once and sends the complete file in the same version, the range is requested again.
    If the server always does this, an error is raised.
    """

    def ignore(it: Exchange) -> None:
        it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data)

    server.etags = etags
    server.lie = lambda it: ignore(it) if it.number == 1 else it.answer()
    ckptconv.convert(server.url("zip.pt"), tmp_path / "a.pt")
    assert ckptconv.verify(tmp_path / "a.pt").ok
    assert {each.status for each in server.seen} == {200, 206}
    server.lie, server.honest = ignore, len(server.seen) + 1
    with pytest.raises(TransferError, match="the whole file instead of a range"):
        ckptconv.convert(server.url("zip.pt"), tmp_path / "b.pt")


@needs_urllib3
@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_changes_meanwhile(etags: bool, server: FileServer, tmp_path: Path) -> None:
    """A file that changes between two requests is refused. With an ETag, a change to the same size is found, too: the
    request contains the ETag, and the server answers 412.
    """
    server.etags = etags

    def lie(it: Exchange) -> None:
        if it.number == 1:
            it.data = server.files["zip.pt"] = it.data[:-500] + bytes(500 - (not etags))
        it.answer()

    server.lie = lie
    with pytest.raises(InputChangedError):
        ckptconv.convert(server.url("zip.pt"), tmp_path / "a.pt")
    assert [*tmp_path.iterdir()] == []
    if etags:
        assert {each.status for each in server.seen} == {206, 412}


@needs_urllib3
def test_a_server_without_validators_is_noted(server: FileServer) -> None:
    """If a server sends neither ETag nor Last-Modified, a note is given, because a change could go unnoticed."""
    server.lie = lambda it: it.send(206, it.headers(ETag="", Last_Modified=""), it.part)
    assert any("no ETag" in note for note in ckptconv.inspect(server.url("zip.pt")).notes)


@needs_urllib3
def test_secrets_are_sent_and_never_shown(
    server: FileServer, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user name and the password of a URL are sent in a header, and a signed query is sent unchanged. Neither is
    printed.
    """
    far = server.url("zip.pt").replace("//", "//me:pass%20word@") + "?X-Amz-Signature=s3cret"
    said = command("inspect", far)
    said = said._replace(out=said.out + command("convert", far, tmp_path / "a.pt", "--to", "cuda:1", "-v").err)
    server.lie = lambda it: it.send(403, {"Content-Length": "0"}, b"")
    errors = command("verify", far, status=4).err
    for text in (*said, errors):
        assert "pass" not in text and "s3cret" not in text
    assert server.url("zip.pt") in said.out and server.url("zip.pt") in errors
    basic = "Basic " + base64.b64encode(b"me:pass word").decode()
    assert {each.headers["Authorization"] for each in server.seen} == {basic}
    assert {each.path for each in server.seen} == {"/zip.pt?X-Amz-Signature=s3cret"}


@needs_urllib3
def test_credentials_stay_with_their_host(server: FileServer) -> None:
    """Credentials are not sent to another host after a redirect."""
    elsewhere = server.url("zip.pt").replace("127.0.0.1", "localhost")

    def lie(it: Exchange) -> None:
        here = it.handler.headers["Host"].startswith("127.0.0.1")
        it.send(302, {"Location": elsewhere, "Content-Length": "0"}, b"") if here else it.answer()

    server.lie = lie
    ckptconv.inspect(server.url("zip.pt").replace("//", "//me:word@"))
    hosts = {each.headers["Host"].split(":")[0]: "Authorization" in each.headers for each in server.seen}
    assert hosts == {"127.0.0.1": True, "localhost": False}


@needs_urllib3
@pytest.mark.parametrize(
    ("before", "after"), [("https://a/x", "http://a/x"), ("https://a/x", "ftp://a/x"), ("http://a/x", "file:///x")]
)
def test_redirects_that_are_not_followed(before: str, after: str) -> None:
    """Redirects from https to http, and to any scheme that is not HTTP, are not followed."""
    from ckptconv.stores.http import HttpTransport

    transport = HttpTransport(parse(before), before)
    with pytest.raises(TransferError, match="not allowed"):
        transport._checked(before, after)
    assert transport._checked(before, "https://b/x") == "https://b/x"


@needs_urllib3
@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("hf://me/model/a/zip.pt", "me/model/resolve/main/a/zip.pt"),
        ("hf://me/model@v2/zip.pt", "me/model/resolve/v2/zip.pt"),
        ("hf://datasets/me/data/zip.pt", "datasets/me/data/resolve/main/zip.pt"),
    ],
)
def test_the_hub(url: str, path: str, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the Hub is read by its resolve URL, with the token. If a redirected URL has expired, the resolve URL is
    requested again.
    """
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.files[path] = b""

    def lie(it: Exchange) -> None:
        if it.handler.path == "/" + path:
            place = server.url(f"zip.pt?number={it.number}").replace("127.0.0.1", "localhost")
            it.send(307, {"Location": place, "Content-Length": "0"}, b"")
        elif it.handler.path.endswith("=0") and it.number > 1:
            it.send(403, {"Content-Length": "0"}, b"")
        else:
            it.answer()

    server.lie = lie
    assert ckptconv.inspect(url).path == url
    assert [each.status for each in server.seen] == [307, 206, 403, 307, 206]
    sent = {each.headers["Host"].split(":")[0]: each.headers.get("Authorization") for each in server.seen}
    assert sent == {"127.0.0.1": "Bearer hf_secret", "localhost": None}


@needs_urllib3
def test_missing_files(server: FileServer, command: Command) -> None:
    """A missing file raises MissingInputError, and the command reports it with its URL."""
    with pytest.raises(MissingInputError, match="no such file"):
        ckptconv.inspect(server.url("none.pt"))
    command("inspect", server.url("none.pt"), status=1, err=f"{server.url('none.pt')}: cannot be read")


@needs_urllib3
def test_a_file_that_was_closed(server: FileServer) -> None:
    """A read of a closed source fails."""
    source = open_input(server.url("zip.pt"))
    source.close()
    with pytest.raises(TransferError, match="closed"):
        source.read(1 << 20, 10)


def test_other_filesystems_are_tried(folder: Path) -> None:
    """URLs of other schemes are read by filesystems of fsspec, here the one in memory."""
    fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
    fsspec.filesystem("memory").pipe_file("/far/zip.pt", (folder / "zip.pt").read_bytes())
    assert ckptconv.inspect("memory://far/zip.pt").tensors == ckptconv.inspect(folder / "zip.pt").tensors
    with pytest.raises(MissingInputError):
        ckptconv.inspect("memory://far/none.pt")
    with pytest.raises(UsageError, match=r"nosuch://far/zip.pt: cannot be read"):
        ckptconv.inspect("nosuch://far/zip.pt")


def test_errors_of_other_stores_contain_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of other stores can contain the URL, but the user name, the password and the query are removed from
    them.
    """
    fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")

    def fail(url: str) -> None:
        raise OSError(f"no route to {url}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(ckptconv.CkptconvError, match="no route to") as caught:
        ckptconv.inspect("sftp://me:pass@host/m.pt?signed=abc")
    assert not re.search(r"me:pass|signed=abc", str(caught.value))


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a package is missing, the error contains its name and the extra that installs it."""
    for name in (
        "urllib3",
        "botocore",
        "botocore.session",
        "ckptconv.stores.http",
        "ckptconv.stores.s3",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    for url, package in (("https://h/a.pt", "urllib3"), ("hf://me/m/a.pt", "urllib3"), ("s3://b/a.pt", "botocore")):
        with pytest.raises(UsageError, match=rf'needs {package}.*pip install "ckptconv\[remote\]"'):
            ckptconv.inspect(url)


@needs_urllib3
def test_the_how_to_page_runs(
    server: FileServer, folder: Path, command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command and the Python code of the how-to page run with a server that has the files."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    zipped = server.files["zip.pt"]
    server.files |= {"runs/zip.pt": zipped, "me/model/resolve/main/zip.pt": zipped}
    server.files["set/model.safetensors.index.json"] = server.files[index_in(folder)]
    server.files["whole/zip.pt"] = server.files["zip.pt"]
    server.lie = lambda it: (
        it.send(200, it.headers(Content_Range="", Content_Length=str(len(it.data))), it.data)
        if "whole/" in it.handler.path
        else it.answer()
    )
    page = (ROOT / "docs/how-to/far-files.md").read_text().replace("https://example.org/", server.url(""))
    for line in "".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)).splitlines():
        command(*shlex.split(line)[1:])
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(code, {})


def test_local_files_by_their_urls(folder: Path, tmp_path: Path) -> None:
    """A ``file:`` URL is a local path, as the input and as the output."""
    url = f"file://{folder}/zip.pt"
    assert ckptconv.inspect(url).path == str(folder / "zip.pt")
    ckptconv.convert(url, f"file://{tmp_path}/a.pt", map_location="cpu")
    assert ckptconv.diff(tmp_path / "a.pt", folder / "zip.pt").same
    assert local_path(parse("file://localhost/tmp/a%20b.pt")) == Path("/tmp/a b.pt")


def test_local_files_import_no_remote_modules(folder: Path) -> None:
    """No module for remote files is imported for local files."""
    program = """
import ckptconv
ckptconv.inspect(sys.argv[1])
ckptconv.convert(sys.argv[1], sys.argv[2], map_location="cuda:1", force=True)
ours = {"ckptconv.stores.requests", "ckptconv.stores.remote"} & sys.modules.keys()
far = [*ours, *({"urllib3", "botocore", "fsspec"} & sys.modules.keys())]
assert not far, far
"""
    run_without_torch(program, folder / "zip.pt", folder / "other.pt")
    (folder / "other.pt").unlink()


def test_a_url_as_a_path() -> None:
    """The path of a URL shows its slashes and no secrets. A path next to it is a URL, too."""
    path = far_path("https://me:word@host:81/a%20b/c.pt?sig=x")
    assert (str(path), path.name, path.suffix) == ("https://host:81/a b/c.pt", "c.pt", ".pt")
    assert str(path.parent / "d.pt") == "https://host:81/a b/d.pt"
    assert path.url is not None
    assert path.url.full == "https://host:81/a%20b/c.pt?sig=x"
    assert path.with_name("d e.pt").url.full == "https://host:81/a%20b/d%20e.pt"
    assert "word" not in repr(path.url) and "sig" not in repr(path.url)
    assert str(far_path("s3:/bucket/odd?key#1")) == "s3://bucket/odd?key#1"


def test_ranges_are_merged_and_divided() -> None:
    """Ranges that are close to each other become one request. A long range becomes several requests. A request has at
    least the size of a window.
    """
    assert merged([(50, 60), (0, 10), (12, 20), (5, 5)], 2) == [(0, 20), (50, 60)]
    assert in_parts([(0, 25)], 10) == [(0, 10), (10, 20), (20, 25)]
    assert [enlarged(each, 100, 30) for each in ((0, 5), (80, 90), (50, 95))] == [(0, 30), (70, 100), (50, 95)]


def test_bytes_in_memory_are_limited() -> None:
    """The size of the bytes in memory is limited. The oldest bytes are dropped first, and overlapping ranges are stored
    once.
    """
    known = Extents(10)
    known.put(0, b"abcd")
    known.put(2, b"cdef")
    assert (known.get(0, 6), known.missing(0, 8), known.get(5, 7)) == (b"abcdef", [(6, 8)], None)
    known.put(20, b"0123456789")
    assert (known.get(20, 30), known.missing(0, 6)) == (b"0123456789", [(0, 6)])
