"""Remote folders: each command gives the same result as for a local folder, and each folder is listed once."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

import ckptconv
from ckptconv.errors import (
    CkptconvError,
    InputError,
    LimitError,
    MalformedError,
    MissingInputError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ckptconv.limits import LIMITS
from ckptconv.stores import is_folder, store_of
from ckptconv.stores.remote import Listing, far_path
from ckptconv.stores.requests import POLICY, Entry, paged
from tests.support.command import Command
from tests.support.fake_s3 import running_fake
from tests.support.hostile_bytes import saved
from tests.support.http_server import Exchange, FileServer, serving
from tests.support.rank_runs import save_as_ranks
from tests.support.writers import distributed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*single process"),  # a warning of torch about a single process
    pytest.mark.skipif(not (find_spec("urllib3") and find_spec("fsspec")), reason="the extra remote is not installed"),
]
STATE = {f"module.layer.{i}": torch.arange(50_000.0) + i for i in range(4)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with files, a set, a DCP folder whose name has a suffix, rank files, and files that
    are no checkpoints.
    """
    run = tmp_path_factory.mktemp("far") / "run"
    for name in ("deep/er", "set", "ranks"):
        (run / name).mkdir(parents=True)
    torch.save(STATE, run / "last.pt")
    torch.save(STATE, run / "deep" / "er" / "first.pt")
    ckptconv.convert(run / "last.pt", run / "set", format="safetensors", max_shard_size="400KB", force=True)
    distributed(STATE, run / "epoch=9.ckpt")
    save_as_ranks(STATE, run / "ranks")
    (run / "config.json").write_text("{}")
    (run / "deep" / "notes.txt").write_text("of a batch")
    (run / "set" / "tokenizer").mkdir()
    (run / "set" / "tokenizer" / "words.txt").write_text("a\nb\n")
    (run / "set" / "model.txt").symlink_to("tokenizer/words.txt")
    return run


@pytest.fixture
def server() -> Iterator[FileServer]:
    """Serve files as the Hub does."""
    with serving() as server:
        yield server


@pytest.fixture(params=["the Hub", "S3", "fsspec"])
def far(
    request: pytest.FixtureRequest, run: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Yield the URL of the folder in each kind of store."""
    files = {str(each.relative_to(run.parent)): each.read_bytes() for each in run.rglob("*") if each.is_file()}
    if request.param == "fsspec":
        import fsspec

        fsspec.filesystem("memory").pipe({f"/top/{name}": data for name, data in files.items()})
        yield "memory://top/run"
        return
    if request.param == "S3":
        with running_fake(tmp_path) as store:
            for name, data in {**files, "run/": b"", "run-2/other.pt": b""}.items():
                store.put(name, data)
            yield store.put("run/", b"").rstrip("/")
        return
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    server.files = {f"me/model/resolve/main/{name}": data for name, data in files.items()}
    yield "hf://me/model/run"


def test_each_checkpoint_in_a_folder_is_read(far: str, run: Path) -> None:
    """Each checkpoint in a remote folder is read like the local one: a file, a set by its folder and by its index, a
    DCP folder, and the files of all ranks.
    """
    index = next((run / "set").glob("*.index.json")).name
    for name in (
        "last.pt",
        "set",
        "set/",
        f"set/{index}",
        "epoch=9.ckpt/",
        "ranks",
        "ranks/model_world_size_2_rank_*.pt",
    ):
        summary = ckptconv.inspect(f"{far}/{name}")
        assert summary.tensors == ckptconv.inspect(run / name).tensors, name
        assert summary.path.rstrip("/") == f"{far}/{name}".rstrip("/")
        assert ckptconv.verify(f"{far}/{name}").ok
    assert ckptconv.diff(f"{far}/epoch=9.ckpt/", f"{far}/ranks", full=True).same
    loaded = ckptconv.load(f"{far}/set/")
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)


def test_the_table_of_a_folder(far: str, run: Path, command: Command) -> None:
    """``inspect`` and ``verify`` give the same table as for the local folder. ``diff`` compares complete
    folders, too.
    """
    for words in (["inspect"], ["verify", "-q"]):
        said = command(*words, f"{far}/").out.replace(far, "RUN").replace("ckpt/", "ckpt")
        assert said.split() == command(*words, run).out.replace(str(run), "RUN").split(), words
    command("diff", f"{far}/", run, "--names-only", out="same")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_batch(jobs: str, far: str, run: Path, tmp_path: Path, command: Command) -> None:
    """All checkpoints in a remote folder are converted to the same files as those in the local folder. A second run
    skips them.
    """
    if jobs == "2" and not far.startswith("hf:"):
        pytest.skip("processes ask every store in one way, but for the one that is in this process alone")
    for src, dst in ((f"{far}/", tmp_path / "far"), (run, tmp_path / "near")):
        command("convert", src, f"{dst}/", "--to", "cuda:1", "-j", jobs)
    files = {place: _files(tmp_path / place) for place in ("near", "far")}
    assert files["far"] == files["near"]
    assert len(files["far"]) == 8, [*files["far"]]
    command("convert", f"{far}/", f"{tmp_path}/far/", "--to", "cuda:1", "--skip-existing", err="skipped")


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["set", "deep"], ids=["a set", "a batch"])
def test_other_files_are_copied(name: str, far: str, run: Path, tmp_path: Path, command: Command) -> None:
    """Files that are no checkpoints are copied from a remote folder, to one, and from one to another, with all
    subfolders.
    """
    words = ["--to", "cuda:1", "--copy-others"]
    for src, place in ((run, "near"), (far, "far")):
        command("convert", f"{src}/{name}/", f"{tmp_path}/{place}/", *words, "--verify")
    near = _files(tmp_path / "near")
    assert _files(tmp_path / "far") == near
    assert {"notes.txt"} <= near.keys() or {"model.txt", "tokenizer/words.txt"} <= near.keys()
    for src, dst in ((run, f"{far}-up-{name}/"), (far, f"{far}-{name}/")) if not far.startswith("hf") else ():
        command("convert", f"{src}/{name}/", dst, *words, "--verify")
        command("convert", f"{src}/{name}/", dst, *words, status=1, err="the output exists")
        assert {each.place: each.size for each in far_path(dst).below().values()} == {
            each: len(data) for each, data in near.items()
        }
        for each in near:
            with store_of(far_path(dst)).open(far_path(dst) / each) as source:
                assert source.read(0, source.size) == near[each]


def test_no_link_leads_out_on_the_way_to_a_store(run: Path, tmp_path: Path) -> None:
    """A link to a file outside of the folder, and a link to such a link, are not copied to a store."""
    src = tmp_path / "set"
    shutil.copytree(run / "set", src, symlinks=True)
    (tmp_path / "secret.txt").write_text("secret")
    (src / "out.txt").symlink_to(tmp_path / "secret.txt")
    (src / "chain.txt").symlink_to("out.txt")
    report = ckptconv.convert(src, "memory://chain/out/", copy_others=True, map_location="cuda:1")
    assert sorted(Path(path).name for path, _ in report.failed) == ["chain.txt", "out.txt"]
    there = {name for name in far_path("memory://chain/out/").below() if name.endswith("txt")}
    assert there == {"model.txt", "tokenizer/words.txt"}


@pytest.mark.parametrize("name", ["C:x.pt", "a:b/x.pt", "NUL", "x\\..\\..\\y.pt"])
def test_a_name_that_leads_elsewhere_on_some_system(name: str, run: Path, tmp_path: Path) -> None:
    """A name that leads out of the folder on some systems is not used for a local file. The file itself can be read and
    converted, and a batch for another store includes it.
    """
    import fsspec

    folder, data = f"memory://elsewhere-{len(name)}", (run / "last.pt").read_bytes()
    fsspec.filesystem("memory").pipe({f"/{folder[9:]}/{each}": data for each in (name, "model.bin")})
    with pytest.raises(ckptconv.RefusedError, match="leads elsewhere on some systems"):
        ckptconv.jobs_in(f"{folder}/", tmp_path / "all", copy_others=True)
    assert ckptconv.inspect(f"{folder}/{name}").tensors
    ckptconv.convert(f"{folder}/{name}", tmp_path / "one.pt")
    assert len(ckptconv.jobs_in(f"{folder}/", f"{folder}-copy/", copy_others=True)) == 2


def test_a_copied_file_with_a_name_that_leaves_the_folder(run: Path, tmp_path: Path) -> None:
    """A file next to a set is not copied if its name leads out of the folder on some systems. The set is converted, and
    the report contains the error.
    """
    import fsspec

    files = {f"/beside/set/{each.name}": each.read_bytes() for each in (run / "set").iterdir() if each.is_file()}
    fsspec.filesystem("memory").pipe({**files, "/beside/set/C:evil.txt": b"x"})
    report = ckptconv.convert("memory://beside/set/", tmp_path / "set", copy_others=True)
    assert [error.what for _, error in report.failed] == ["the store lists a name that leads elsewhere on some systems"]
    assert "C:evil.txt" not in os.listdir(tmp_path / "set")


def test_files_next_to_an_index_are_copied(far: str, run: Path, tmp_path: Path) -> None:
    """If the input is an index, the files next to it are copied, but no folders."""
    index = next((run / "set").glob("*.index.json")).name
    ckptconv.convert(f"{far}/set/{index}", tmp_path / "beside", copy_others=True)
    assert {name for name in _files(tmp_path / "beside") if name.endswith("txt")} == {"model.txt"}


@pytest.mark.parametrize("name", ["set", "epoch=9.ckpt/", "ranks"])
@pytest.mark.parametrize("out", ["one.pt", "shards/"])
def test_one_checkpoint_of_several_files(name: str, out: str, far: str, run: Path, tmp_path: Path) -> None:
    """A checkpoint of several files is converted to a file or a set, with the same bytes as from the local folder."""
    more = {"max_shard_size": "400KB"} if out == "shards/" else {}
    for src, place in ((far, "far"), (run, "near")):
        (tmp_path / place).mkdir()
        ckptconv.convert(f"{src}/{name}", f"{tmp_path}/{place}/{out}", map_location="cpu", verify=True, **more)
    assert _files(tmp_path / "far") == _files(tmp_path / "near")


def test_missing_files_and_buckets(far: str, run: Path, tmp_path: Path) -> None:
    """A missing file or folder is reported. The error tells that the URL of a folder ends in a slash. Files can be
    copied along only from folders that can be listed.
    """
    for name in ("none/", "none.pt", "none"):
        with pytest.raises(MissingInputError):
            ckptconv.inspect(f"{far}/{name}")
    with pytest.raises(MissingInputError, match="of a folder the URL ends in a slash"):
        ckptconv.inspect(f"{far}/epoch=9.ckpt")
    with pytest.raises(UsageError, match="copy_others=True needs a folder"):
        ckptconv.convert(f"{far}/last.pt", tmp_path / "x/", copy_others=True)
    with pytest.raises(UsageError, match="web servers do not list"):
        ckptconv.convert("http://localhost/model.safetensors.index.json", tmp_path / "x/", copy_others=True)
    with pytest.raises(UnsupportedError, match=r"the checkpoint in it is first\.pt.*/deep/er/first\.pt"):
        ckptconv.inspect(f"{far}/deep/er/")


def test_a_missing_file_of_a_checkpoint(server: FileServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing part of a DCP folder, its metadata, a shard, or the file of a rank is reported, as for a local
    folder.
    """
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    whole = {f"me/model/resolve/main/{each.relative_to(run)}": each for each in run.rglob("*") if each.is_file()}
    for gone in (
        "epoch=9.ckpt/__0_0.distcp",
        "epoch=9.ckpt/.metadata",
        "set/model-00001",
        "ranks/model_world_size_2_rank_1",
    ):
        server.files = {
            name: each.read_bytes()
            for name, each in whole.items()
            if not name.startswith(f"me/model/resolve/main/{gone}")
        }
        with pytest.raises(MalformedError, match=r"missing|without \.metadata"):
            ckptconv.inspect(f"hf://me/model/{gone.partition('/')[0]}/")


def test_a_folder_is_listed_once(
    server: FileServer, run: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """A folder is listed once, page by page. A checkpoint in it that is a folder is listed once more, because it may be
    read by another process.
    """
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.files = {
        f"datasets/me/data/resolve/refs/pr/1/{each.relative_to(run)}": each.read_bytes()
        for each in run.rglob("*")
        if each.is_file()
    }
    seen: list[str] = []

    def lists(it: Exchange, files: dict[str, bytes], *, most: int) -> None:
        seen.append(it.handler.path)
        assert it.handler.headers["Authorization"] == "Bearer hf_secret"
        it.list(files, most=most)

    server.lists, server.page = lists, 4
    command("inspect", "hf://datasets/me/data@refs%2Fpr%2F1/", out="epoch=9.ckpt")
    pages = -(-len(server.files) // 4)
    assert len([path for path in seen if "epoch" not in path and "ranks" not in path]) == pages
    assert all(path.startswith("/api/datasets/me/data/tree/refs%2Fpr%2F1") for path in seen)


@pytest.mark.parametrize(
    ("body", "link", "error"),
    [
        (b"no JSON", "", TransferError),
        (b'{"error": "x"}', "", TransferError),
        (b"[" * 100_000, "", TransferError),
        (b'[{"type": "file", "path": "../../etc/x.pt", "size": 1}]', "", InputError),
        (b'[{"type": "file", "path": "a//x.pt", "size": "much"}]', "", InputError),
        (b"[]", '<http://127.0.0.1:1/api/models/me/model/tree/main?cursor=1>; rel="next"', TransferError),
        (b"[]", "", MissingInputError),
        (b"x" * (17 << 20), "", TransferError),
        (json.dumps([{"type": "file", "path": "a/" * 600 + "x.pt"}]).encode(), "", LimitError),
    ],
)
def test_a_false_list_of_files(
    body: bytes, link: str, error: type[CkptconvError], server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong list of files is refused. No name leads out of the folder, and no other server is asked."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setattr(POLICY, "backoff", 0.001)
    headers = {"Content-Length": str(len(body)), **({"Link": link} if link else {})}
    server.lists = lambda it, files, most: it.send(200, headers, body)
    with pytest.raises(error):
        ckptconv.inspect("hf://me/model/")


def test_too_many_files(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of files is refused if it exceeds the limit. So an endless list is refused, too."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    monkeypatch.setattr("ckptconv.stores.requests.LIMITS", replace(LIMITS, far_files=5))
    body = json.dumps([{"type": "file", "path": f"{i}.pt", "size": 1} for i in range(3)]).encode()
    link = {"Link": f'<http://127.0.0.1:{server.port}/api/models/me/model/tree/main?cursor=1>; rel="next"'}
    server.lists = lambda it, files, most: it.send(200, {"Content-Length": str(len(body)), **link}, body)
    with pytest.raises(LimitError, match="too many files"):
        ckptconv.inspect("hf://me/model/")


def test_folders_whose_paths_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder in a list has its own path. The total length of these paths is limited."""
    monkeypatch.setattr("ckptconv.stores.remote.LIMITS", replace(LIMITS, path_characters_unpickled=200_000))
    names = (f"{i}/{'ab/' * 100}x.pt" for i in range(100))
    with pytest.raises(LimitError, match="too long together"):
        Listing((Entry(name, 1) for name in names), "here")


def test_a_list_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one time limit for all pages of a list. Without it, a page with one name every two minutes could
    continue for months.
    """
    monkeypatch.setattr(POLICY, "patience", 0.05)

    def slowly(at: str, deadline: float) -> tuple[list[Entry], str]:
        time.sleep(0.01)
        return [Entry("x", 1)], at

    with pytest.raises(TransferError, match="did not end within"):
        list(paged(slowly, "", "here"))


def test_names_that_a_url_would_divide(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special character in the name of a file is escaped in the URL that is requested. A percent sign in a name
    stands for itself.
    """
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.port}")
    for name in ("a?b.pt", "a#b.pt", "%2e%2e%2fa.pt", "a%20b.pt"):
        server.files = {f"me/model/resolve/main/{name}": saved({"a": torch.ones(1)})}
        assert ckptconv.inspect(f"hf://me/model/{name}").tensors
        assert server.seen[-1].path == f"/me/model/resolve/main/{quote(name)}"


def test_web_servers_do_not_list_folders(command: Command) -> None:
    """Web servers do not list folders. The error tells which URL can be given instead."""
    command(
        "inspect", "https://localhost:1/run/", status=1, err=["web servers do not list", "model.safetensors.index.json"]
    )
    with pytest.raises(UnsupportedError, match="web servers do not list"):
        ckptconv.convert("https://localhost:1/run/", "out.pt")


def test_remote_paths() -> None:
    """A slash at the end of a URL marks a folder, and is not part of its name. Repositories and buckets are folders
    without a slash, too.
    """
    for text in (
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket/run/",
        "hf://me/model",
        "hf://datasets/me/data@v1",
        "memory://a/b/",
    ):
        assert is_folder(text), text
    assert far_path("s3://bucket/run/") == far_path("s3://bucket/run")
    path = far_path("s3://bucket/run/a=1.ckpt/")
    assert (str(path), path.name, str(path / "x.pt")) == (
        "s3://bucket/run/a=1.ckpt/",
        "a=1.ckpt",
        "s3://bucket/run/a=1.ckpt/x.pt",
    )
    assert [str(each) for each in (path / "x.pt").parents] == [
        "s3://bucket/run/a=1.ckpt/",
        "s3://bucket/run/",
        "s3://bucket/",
    ]
    assert str((path / "x.pt").relative_to(path)) == "x.pt"
    for text in ("hf://me", "https://host", "s3://"):
        with pytest.raises(UsageError):
            far_path(text)
