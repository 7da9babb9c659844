"""The writers: each supports exactly the features that it declares, and no other code depends on the name of a
format.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from pathlib import Path
from pickle import UnpicklingError
from typing import get_args

import pytest
import torch

import ckptconv
from ckptconv.errors import UsageError
from ckptconv.formats import opening, writers
from ckptconv.formats.writers import WRITERS, FormatWord, Writer, writer_of
from tests.support.conversions import refused

PACKAGE = Path(ckptconv.__file__).parent
#: Formats of one file. tests/unit/formats/distributed/test_dcp_writing.py tests the format that is a folder.
FILES = {word: writer for word, writer in WRITERS.items() if not writer.is_folder}
every_writer = pytest.mark.parametrize("writer", FILES.values(), ids=FILES)


def test_the_type_lists_all_formats() -> None:
    """The type of the ``format`` argument lists all formats, so a type checker finds a misspelled one."""
    assert get_args(FormatWord) == (*WRITERS,)


def test_a_suffix_of_one_writer_is_that_of_its_new_files() -> None:
    """A file that is named with the suffix of a format, or with its name on the Hub, is accepted by this format."""
    for writer in FILES.values():
        assert writer in writers.admitted(f"x{writer.new_suffix}")
        if writer.hub:
            assert writer in writers.admitted(f"{writer.hub.model}{writer.hub.suffix}")


@pytest.mark.untraced
def test_no_format_is_compared_by_name() -> None:
    """No code compares the name or the suffix of a format, except the code for files of other programs. Code asks a
    writer what the format supports, so a new format needs no other change.
    """
    names = {*FILES, *(writer.name for writer in WRITERS.values())}  # dcp is also a kind of folder
    suffixes = {writer.hub.suffix for writer in WRITERS.values() if writer.hub}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            if (names | suffixes).intersection(map(str, words)):
                assert path.parent.name == "foreign", f"{path}:{node.lineno}"  # file names of other programs


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Return a file with tied tensors, a view of a larger storage, and a device."""
    big = torch.arange(100.0)
    weight = torch.ones(2, 3)
    torch.save({"a": weight, "b": weight, "view": big[:4]}, tmp_path / "weights.pt")
    ckptconv.convert(tmp_path / "weights.pt", tmp_path / "src.pt", map_location="cuda:1")
    return tmp_path / "src.pt"


@every_writer
def test_devices_ties_and_views(src: Path, writer: Writer) -> None:
    """A written file contains devices, ties and views exactly if its writer declares them."""
    dst = src.with_name(f"dst{writer.new_suffix}")
    ckptconv.convert(src, dst, format=writer.word)
    with opening.open_file(dst) as source:
        read = opening.read(source)
        tensors = {info.path: info for info in read.tensors.values()}
        assert read.format == writer.name
        assert {info.device for info in tensors.values()} == {"cuda:1" if writer.devices else "cpu"}
        assert bool(read.ties) is not writer.ties
        view = tensors["view"].storage
        assert view is not None and view.nbytes == (400 if writer.views else 16)


@every_writer
def test_objects(tmp_path: Path, writer: Writer) -> None:
    """A number next to the tensors is left behind exactly if the format cannot store objects."""
    torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "src.pt")
    report = ckptconv.convert(tmp_path / "src.pt", tmp_path / f"dst{writer.new_suffix}", format=writer.word)
    assert bool(report.left_behind) is not writer.objects


@every_writer
def test_shards(src: Path, writer: Writer) -> None:
    """Shards are written only in formats that the tools of the Hub read, with the names that these tools expect."""
    out = src.with_name("out")
    if not writer.shards:
        refused(UsageError, "no shards", src, out, format=writer.word, max_shard_size=30)
        return
    report = ckptconv.convert(src, out, format=writer.word, max_shard_size=30)
    assert writer.hub
    names = [name for name, _ in report.files]
    assert len(names) > 2
    assert all(name.startswith(f"{writer.hub.model}-") for name in names[:-1])
    assert {Path(name).suffix for name in names[:-1]} == {writer.hub.suffix}
    assert writer_of(report.formats[1]) is writer


@every_writer
def test_copies_of_ties(src: Path, writer: Writer) -> None:
    """``copy_tied`` is accepted only for formats that store ties as text, and refused for all others."""
    dst = src.with_name(f"dst{writer.new_suffix}")
    if writer.ties:
        refused(UsageError, "copy_tied", src, dst, format=writer.word, copy_tied=True)
    else:
        assert ckptconv.convert(src, dst, format=writer.word, copy_tied=True).ties == ()


@every_writer
def test_code(tmp_path: Path, writer: Writer) -> None:
    """A note reports an object that torch's safe loader refuses, but only in formats that this loader reads."""
    torch.save({"model": {"w": torch.ones(2)}, "args": Namespace(lr=1)}, tmp_path / "src.pt")
    dst = tmp_path / f"dst{writer.new_suffix}"
    report = ckptconv.convert(tmp_path / "src.pt", dst, format=writer.word)
    assert any("weights_only" in note for note in report.notes) is writer.safe_loader
    if writer.safe_loader:
        with pytest.raises(UnpicklingError, match="weights_only"):
            torch.load(dst, weights_only=True)
