"""Outputs in filesystems of fsspec: they are complete or absent, by a transaction or by a move. Other filesystems are
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import ckptconv
from ckptconv.errors import CkptconvError, OutputError, TargetExistsError, UnsupportedError, UsageError
from ckptconv.stores.remote import far_path
from tests.support.judge import assert_same

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from fsspec.spec import AbstractFileSystem  # noqa: E402

STATE = {f"module.{i}": torch.arange(50_000.0) + i for i in range(4)}


class Moving(LocalFileSystem):
    """A filesystem in a local folder, in which files can be moved."""

    protocol = "moving"
    root = Path()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        name = str(path).partition("://")[2]
        return str(cls.root / name) if "://" in str(path) else str(path)


class Neither(Moving):
    """A filesystem like the other one, but its move is a copy, and its files appear when they are opened."""

    protocol = "neither"
    mv = AbstractFileSystem.mv

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return open(path, mode)


@pytest.mark.parametrize("said", [{"ETag": 5}, {"etag": b"x"}, {"mtime": ["x"]}, {"size": True}, {"size": "9"}, None])
def test_properties_that_a_filesystem_reports(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem can describe a file with values of any type. They are used as the version of the file, or lead to an
    error of this package, also in a list of files.
    """
    files, info = fsspec.filesystem("memory"), MemoryFileSystem.info
    with files.open("/odd/x.safetensors", "wb") as file:
        file.write(save({"a": torch.ones(2)}))
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path, **how: said and {**info(self, path), **said})
    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, path, **how: {"/odd/x.safetensors": said})
    for step in (
        lambda: ckptconv.inspect("memory://odd/x.safetensors").tensors,
        lambda: far_path("memory://odd/").below(),
    ):
        try:
            assert step()
        except CkptconvError:
            assert not said or "size" in said


@pytest.fixture(params=["memory", "moving"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return each filesystem that supports outputs, and the URL of a folder in it."""
    for kind in (Moving, Neither):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)
    monkeypatch.setattr(Moving, "root", tmp_path / "store")
    (tmp_path / "store").mkdir()
    MemoryFileSystem.store.clear()
    torch.save(STATE, tmp_path / "a.pt")
    return fsspec.filesystem(request.param), f"{request.param}://out"


def names(files: Any, url: str) -> list[str]:
    root = fsspec.core.url_to_fs(url)[1]
    return sorted(str(path)[len(root) :].lstrip("/") for path in files.find(root)) if files.exists(root) else []


@pytest.mark.parametrize("options", [{"map_location": "cpu"}, {"dtype": "bf16"}])
def test_a_file_and_a_set(options: dict[str, str], store: Any, tmp_path: Path) -> None:
    """An output file has the same bytes as a local one. Files and sets in the filesystem can be read."""
    files, url = store
    (tmp_path / "near").mkdir()
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "near/b.pt", **options)
    report = ckptconv.convert(tmp_path / "a.pt", f"{url}/b.pt", **options)
    assert files.cat_file(fsspec.core.url_to_fs(f"{url}/b.pt")[1]) == (tmp_path / "near/b.pt").read_bytes()
    assert any("when two write to one place" in note for note in report.notes)
    ckptconv.convert(f"{url}/b.pt", f"{url}/set/", max_shard_size="300KB", format="safetensors")
    assert ckptconv.diff(f"{url}/set/", f"{url}/b.pt", full=True).same
    assert not [name for name in names(files, url) if "ckptconv" in name]
    ckptconv.save(STATE, f"{url}/c.pt")
    assert ckptconv.verify(f"{url}/c.pt").ok


def test_a_dcp_folder(store: Any, tmp_path: Path) -> None:
    """A DCP folder can replace one with more processes. The file of the process that does not exist any more is
    removed.
    """
    files, url = store
    ckptconv.convert(tmp_path / "a.pt", f"{url}/dcp/", format="dcp", ranks=3)
    ckptconv.convert(tmp_path / "a.pt", f"{url}/dcp/", format="dcp", ranks=2, force=True)
    assert names(files, f"{url}/dcp") == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    ckptconv.convert(f"{url}/dcp/", tmp_path / "back.pt")
    assert_same(torch.load(tmp_path / "back.pt"), torch.load(tmp_path / "a.pt"))


def test_existing_outputs_are_kept(store: Any, tmp_path: Path) -> None:
    """An existing output is replaced only with ``force``."""
    _, url = store
    for dst in (f"{url}/a.pt", f"{url}/a/"):
        more = {"max_shard_size": "400KB"} if dst.endswith("/") else {}
        ckptconv.convert(tmp_path / "a.pt", dst, **more)
        with pytest.raises(TargetExistsError):
            ckptconv.convert(tmp_path / "a.pt", dst, map_location="cuda:1", **more)
        ckptconv.convert(tmp_path / "a.pt", dst, map_location="cuda:1", force=True, **more)
        assert set(ckptconv.inspect(dst).devices) == {"cuda:1"}


def test_an_old_set_is_removed(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of an old set is removed before a new shard appears. The other old shards are removed as well, and
    files that are not part of the set stay.
    """
    files, url = store
    how = {"format": "safetensors", "max_shard_size": "300KB"}
    ckptconv.convert(tmp_path / "a.pt", f"{url}/set/", **how)
    folder = fsspec.core.url_to_fs(f"{url}/set")[1]
    files.pipe_file(f"{folder}/config.txt", b"{}")
    old = names(files, f"{url}/set")
    index = next(name for name in old if name.endswith(".json"))
    with pytest.raises(TargetExistsError):
        ckptconv.convert(tmp_path / "a.pt", f"{url}/set/", **how | {"max_shard_size": "500KB"})
    assert names(files, f"{url}/set") == old
    seen: list[list[str]] = []
    kind = type(files)
    for name in ("mv", "rm_file") if kind is Moving else ("rm_file",):
        do = getattr(kind, name)

        def noted(self: Any, *args: Any, _do: Any = do, **more: Any) -> Any:
            done = _do(self, *args, **more)
            seen.append(names(files, f"{url}/set"))
            return done

        monkeypatch.setattr(kind, name, noted)
    ckptconv.convert(tmp_path / "a.pt", f"{url}/set/", force=True, map_location="cpu", strip_prefix="module.", **how)
    sets = [[name for name in each if name[0] != "."] for each in seen]
    assert index not in sets[0] and len(sets[0]) == len(old) - 1
    ckptconv.convert(tmp_path / "a.pt", f"{url}/set/", force=True, **how | {"max_shard_size": "500KB"})
    left = names(files, f"{url}/set")
    assert set(left) & set(old) == {index, "config.txt"} and len(left) < len(old)
    assert ckptconv.diff(f"{url}/set/", tmp_path / "a.pt").same


def test_a_fault_leaves_nothing(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault leaves no file, no part of a set, and no temporary file."""
    files, url = store
    numbers = iter(range(100))

    def fail(*_: Any, **__: Any) -> None:
        if next(numbers) >= 2:
            raise OSError("the line is cut")

    monkeypatch.setattr("ckptconv.stores.fsspec.FsspecStore.check_target", lambda *_, **__: None)
    monkeypatch.setattr("ckptconv.byteranges.sources.Source.check_unchanged", fail)
    with pytest.raises(OutputError, match="the line is cut"):
        ckptconv.convert(tmp_path / "a.pt", f"{url}/set/", max_shard_size="300KB", format="safetensors")
    assert names(files, url) == []


def test_filesystems_without_moves_and_transactions(store: Any, tmp_path: Path) -> None:
    """Nothing is written to a filesystem that has no move and no transactions. URLs of schemes that are only read, or
    that are unknown, are refused.
    """
    with pytest.raises(UnsupportedError, match="no move and no transaction"):
        ckptconv.convert(tmp_path / "a.pt", "neither://b.pt")
    assert [*(tmp_path / "store").iterdir()] == []
    with pytest.raises(UsageError, match="a URL, not a path"):
        ckptconv.convert(tmp_path / "a.pt", "https://localhost/b.pt")
    with pytest.raises(UsageError):
        ckptconv.convert(tmp_path / "a.pt", "nosuch://localhost/b.pt")
