"""Folders of torch.distributed.checkpoint. The output equals that of torch's own conversion and the state of
the run.
"""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties

import ckptconv
from ckptconv.byteranges.sources import SourceFolder
from ckptconv.byteranges.spans import Assemble, ByteRange, Cast, Concat
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.conversion.plan import make_plan
from ckptconv.edits.options import Edits
from ckptconv.errors import InputError, MalformedError, UnsupportedError
from ckptconv.formats.distributed import dcp
from ckptconv.pickles import graph
from tests.support import dcp_ranks
from tests.support.archives import flip_bit, rezipped
from tests.support.conversions import converted, loaded, refused, run_without_torch
from tests.support.hostile_bytes import saved as saved_bytes
from tests.support.judge import assert_same, tags_of
from tests.support.no_files import NO_FILES
from tests.support.reduced import Reduced
from tests.support.writers import ALONE, distributed

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")  # a warning of torch


def saved(path: Path, state: dict[str, Any]) -> Path:
    """Save `state` with one process in the folder `path`, and return the folder."""
    return distributed(state, path)


def opened(path: Path) -> Iterator[Checkpoint]:
    with SourceFolder(path) as folder:
        yield dcp.read(folder, lambda source: pytest.fail("no file of it is a checkpoint"))


def by_torch(folder: Path, tmp_path: Path) -> Any:
    """Return the result of torch's own conversion of `folder`."""
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    return torch.load(tmp_path / "torch.pt", weights_only=False)


def first_range(data: Any) -> ByteRange:
    """Return a range of bytes that is part of `data`."""
    if isinstance(data, Concat):
        data = data.parts[0]
    elif isinstance(data, Assemble):
        data = data.placements[-1].of
    assert isinstance(data, ByteRange)
    return data


def damaged(folder: Path, name: str, target: Path) -> Path:
    """Copy `folder` to `target`, flip one bit of the tensor `name` in the copy, and return `target`."""
    shutil.copytree(folder, target)
    for checkpoint in opened(target):
        storage = checkpoint.tensors[name].storage
        assert storage
        place = first_range(storage.data)
    flip_bit(place.source.path, place.offset + 1)
    return target


def assert_tensors(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that `found` contains the tensors of `wanted`, complete and in row-major order."""
    for name, whole in wanted.items():
        assert_same(found[name], whole.contiguous())


MESH = {name: whole for name, (whole, _) in dcp_ranks.MESH.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "threads", "mesh", "files"])
def test_output_equals_that_of_torch(ranks: Path, tmp_path: Path, dst: Path, name: str) -> None:
    """The output equals that of ``dcp_to_torch_save`` in nesting, order of keys, types, values and layout. The number
    of files and the distribution of the tensors do not matter.
    """
    report = ckptconv.convert(ranks / name, dst, verify=True)
    assert report.formats == ("DCP", "torch zip") and not report.left_behind
    assert_same(torch.load(dst), by_torch(ranks / name, tmp_path))
    assert zipfile.ZipFile(dst).testzip() is None


def test_output_of_torch_2_15(tmp_path: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.15, the state of TensorProperties has a sixth item for the strides, and the folder is converted like
    any other. A state with more items is refused. ``verify`` reports such a state as unknown and checks the other
    items.
    """
    state = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], (1, 6)))
        src = saved(tmp_path / "src", {"model": {"w": torch.arange(12.0).view(2, 6), "b": torch.ones(3)}})
        more = {"w": torch.ones(3), "step": 7, "b": torch.ones(2, dtype=torch.float16)}
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], *[None] * self.dtype.itemsize))
        later = saved(tmp_path / "later", more)
    assert ckptconv.verify(src).ok
    assert_same(converted(src, dst), {"model": {"w": torch.arange(12.0).view(2, 6), "b": torch.ones(3)}})
    refused(UnsupportedError, "the properties of 'w' have a state that is not known", later, tmp_path / "later.pt")
    verdict = ckptconv.verify(later)
    assert [finding.level for finding in verdict.findings] == ["unknown"] * 2
    assert verdict.checked and not verdict.ok


@pytest.mark.skipif(not hasattr(dcp_of_torch, "CheckpointableTensor"), reason="this torch has no such tensors")
def test_a_tensor_that_is_several_shards(tmp_path: Path, dst: Path) -> None:
    """Since torch 2.15, a plain tensor can contain several shards of a complete tensor, which is assembled from
    them.
    """
    local: Any = torch.arange(48.0).view(8, 6)
    local.global_shape, local.global_offsets = (6, 6), ((0, 0), (4, 0))
    local.local_offsets, local.local_sizes = ((0, 0), (5, 0)), ((4, 6), (2, 6))
    folder = saved(tmp_path / "dcp", {"w": local})
    assert torch.equal(converted(folder, dst)["w"], torch.cat([local[:4], local[5:7]]))


def test_values_equal_those_of_the_run(ranks: Path, dst: Path) -> None:
    """Tensors have the values that they had before they were distributed by rows, unevenly, over two dimensions, or out
    of order. Objects are kept.
    """
    rows = converted(ranks / "rows", dst)
    assert_tensors(rows["state_dict"], dcp_ranks.ROWS)
    moments = {name: state["exp_avg"] for name, state in rows["optimizer"]["state"].items()}
    assert_tensors(moments, dcp_ranks.ROWS)
    assert torch.equal(rows["old"], torch.tensor([1.0, 1, 3, 3, 5, 5]).repeat_interleave(2).view(6, 2))
    assert_tensors(rows, dcp_ranks.WHOLE)
    assert_same({key: rows[key] for key in dcp_ranks.OTHERS}, dcp_ranks.OTHERS)
    assert_tensors(converted(ranks / "mesh", dst), MESH)


def test_to_safetensors(ranks: Path, safe: Path) -> None:
    """The state dict of a folder becomes a safetensors file. The report names the objects that are left behind."""
    report = ckptconv.convert(ranks / "rows", safe)
    found = loaded(safe)
    assert found.keys() == dcp_ranks.ROWS.keys()
    assert_tensors(found, dcp_ranks.ROWS)
    assert {left.path for left in report.left_behind} >= {"epoch", "optimizer", "pair"}
    assert_tensors(converted(ranks / "mesh", safe, verify=True), MESH)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_casts_of_assembled_tensors(ranks: Path, tmp_path: Path, suffix: str) -> None:
    """``--dtype`` rounds tensors that are assembled from chunks as torch rounds the complete tensors, in both
    formats.
    """
    found = converted(ranks / "mesh", tmp_path / f"out.{suffix}", dtype="bf16", verify=True)
    assert_tensors(found, {name: whole if whole.is_complex() else whole.bfloat16() for name, whole in MESH.items()})


@pytest.mark.parametrize(("format_", "suffix"), [("legacy", "pt"), ("pickle", "pkl")])
def test_other_formats_of_torch(ranks: Path, tmp_path: Path, format_: str, suffix: str) -> None:
    """The output contains the same tensors in the formats without checksums."""
    path = tmp_path / f"out.{suffix}"
    ckptconv.convert(ranks / "mesh", path, format=format_, verify=True)  # type: ignore[arg-type]
    assert_tensors(ckptconv.load(path), MESH)


def test_load_and_open(ranks: Path) -> None:
    """``load`` and ``open`` return the tensors of a folder, whether they have to be assembled or not."""
    assert_tensors(ckptconv.load(ranks / "mesh"), MESH)
    with ckptconv.open(ranks / "rows") as file:
        assert_same(file.load("state_dict/model.embed.weight"), dcp_ranks.ROWS["model.embed.weight"])
        assert_same(file.load("transposed"), dcp_ranks.WHOLE["transposed"].contiguous())


def test_edits(ranks: Path, dst: Path) -> None:
    """Devices and names are edited as in a file."""
    edits: dict[str, Any] = {"map_location": "cuda:1", "strip_prefix": "model.", "exclude": "*embed*", "compact": True}
    ckptconv.convert(ranks / "rows", dst, **edits)
    found, tags = tags_of(dst)
    assert set(tags) == {"cuda:1"}
    assert "two.weight" in found["state_dict"] and "embed.weight" not in found["state_dict"]


def test_diff_of_the_same_checkpoint(ranks: Path) -> None:
    """``diff`` finds no difference between two folders of the same checkpoint, even if its tensors are cut in other
    ways.
    """
    assert ckptconv.diff(ranks / "mesh", ranks / "files").same
    assert ckptconv.diff(ranks / "rows", ranks / "threads").same
    assert not ckptconv.diff(ranks / "mesh", ranks / "rows").same


def test_rows_are_copied_and_columns_assembled(ranks: Path) -> None:
    """A tensor in one chunk is a range of its file, and a tensor in rows is several ranges. Other tensors are
    assembled.
    """
    for checkpoint in opened(ranks / "rows"):
        tensors = {path.rpartition("/")[2]: info for path, info in checkpoint.tensors.items()}
        kinds = {name: type(info.storage.data) for name, info in tensors.items() if info.storage}
        filled = [storage.data for storage in checkpoint.storages.values() if storage.nbytes]
        ranges = [data for data in filled if isinstance(data, ByteRange)]
        # The kernel copies these ranges from file to file.
        assert len(ranges) > 10 and all(data.source.fd >= 0 for data in ranges)
    assert {kinds[name] for name in ("model.embed.weight", "model.two.weight", "model.half.weight")} == {Concat}
    assert {kinds[name] for name in ("model.one.bias", "plain", "scalar", "step")} == {ByteRange}
    assert {kinds[name] for name in ("transposed", "model.kernel")} == {Assemble}
    for checkpoint in opened(ranks / "mesh"):
        kinds = {path: type(info.storage.data) for path, info in checkpoint.tensors.items() if info.storage}
    assert kinds["rows twice"] is Concat and kinds["everywhere"] is ByteRange
    assert {kinds[name] for name in ("rows and columns", "columns", "last of three")} == {Assemble}


def test_rows_need_no_torch(ranks: Path, dst: Path) -> None:
    """``inspect``, and a conversion that copies rows, do not import torch."""
    run_without_torch(
        "import ckptconv; ckptconv.inspect(sys.argv[1]);"
        "ckptconv.convert(sys.argv[1], sys.argv[2], select='state_dict', exclude='*kernel')",
        ranks / "rows",
        dst,
    )


def test_checksums_of_chunks_become_those_of_tensors(ranks: Path, tmp_path: Path, dst: Path) -> None:
    """The checksum of a tensor in rows is computed from the checksums of its chunks, without reading the data. Damaged
    data is therefore copied with a checksum that does not match. A conversion that reads the data reports the damage.
    """
    folder = damaged(ranks / "rows", "state_dict/model.embed.weight", tmp_path / "dcp")
    for checkpoint in opened(folder):
        plan = make_plan(checkpoint, dst, Edits(select="state_dict", exclude=("*kernel",)))
        assert plan.files[0].sums == ()
    ckptconv.convert(folder, dst, select="state_dict", exclude="*kernel")
    assert zipfile.ZipFile(dst).testzip() is not None
    refused(MalformedError, "checksum", folder, tmp_path / "out.safetensors")
    refused(MalformedError, "checksum", folder, tmp_path / "half.pt", dtype="bf16")


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_damage_in_assembled_tensors_is_found(
    ranks: Path, tmp_path: Path, suffix: str, options: dict[str, str]
) -> None:
    """Each chunk of an assembled tensor is compared with its own checksum."""
    folder = damaged(ranks / "mesh", "rows and columns", tmp_path / "dcp")
    refused(MalformedError, "checksum", folder, tmp_path / f"out.{suffix}", **options)


def test_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that are longer than a batch of appended items, and nested lists, keep their order."""
    monkeypatch.setattr(graph, "AT_ONCE", 3)
    state = {"list": [torch.full((2,), float(i)) for i in range(10)], "deep": [[torch.ones(1)], [torch.zeros(1), 5]]}
    folder = saved(tmp_path / "dcp", state)
    assert_same(ckptconv.load(folder), by_torch(folder, tmp_path))
    assert_same(ckptconv.load(folder)["deep"], state["deep"])


def test_list_elements_without_a_saved_value_become_none(tmp_path: Path, dst: Path) -> None:
    """An empty dict in a list has no saved value. The element becomes None, and a note reports it. Torch's own
    conversion fails with such a list.
    """
    folder = saved(tmp_path / "dcp", {"list": [{}, torch.ones(1), {}, torch.zeros(1)]})
    report = ckptconv.convert(folder, dst)
    assert torch.load(dst)["list"][::2] == [None, None]
    assert any("2 list elements without a saved value" in note for note in report.notes)


def test_flat_names_stay_flat(tmp_path: Path) -> None:
    """A planner that does not flatten the state dict stores no paths, so the names are keys."""
    planner = dcp_of_torch.DefaultSavePlanner(flatten_state_dict=False)
    dcp_of_torch.save(
        {"a.b": torch.ones(2), "c": torch.zeros(1)}, checkpoint_id=tmp_path / "dcp", planner=planner, **ALONE
    )
    assert_same(ckptconv.load(tmp_path / "dcp"), {"a.b": torch.ones(2), "c": torch.zeros(1)})


def test_pending_conjugation_and_negation(tmp_path: Path) -> None:
    """A tensor that was saved with a pending conjugation or negation has the same values as in torch's own conversion,
    if it is copied, cast or written out.
    """
    base = torch.randn(3, 4, dtype=torch.complex64)
    rest = torch._neg_view(base.mH)
    state = {
        "conj": base.conj(),
        "turned": base.mH,
        "neg": torch._neg_view(torch.arange(6.0)),
        "both": rest,
        "part": base.conj()[1:2],
    }
    folder = saved(tmp_path / "dcp", state)
    expected = by_torch(folder, tmp_path)
    for suffix in ("pt", "safetensors"):
        found = converted(folder, tmp_path / f"out.{suffix}", verify=True)
        for name, values in state.items():
            assert_same(found[name].resolve_conj().resolve_neg(), expected[name])
            assert torch.equal(found[name], values)
    assert found.keys() == state.keys() and not found["conj"].is_conj()
    found = converted(folder, tmp_path / "half.safetensors", dtype="bf16", compact=True)
    assert torch.equal(found["neg"], -torch.arange(6.0).bfloat16())
    assert ckptconv.diff(folder, tmp_path / "torch.pt").same
    assert ckptconv.load(folder)["both"].is_conj()  # as it was saved


def test_chunks_of_which_some_have_a_pending_conjugation(tmp_path: Path) -> None:
    """A tensor is refused if only some of its chunks have a pending conjugation, and the error contains its name."""
    whole = torch.ones(4, dtype=torch.complex64)
    folder = saved(tmp_path / "dcp", {"w": whole[:2].clone(), "x": whole[2:].clone().conj()})
    with changed_metadata(folder) as metadata:
        item, places = metadata.state_dict_metadata["w"], metadata.storage_data
        item.size = torch.Size([4])
        item.chunks.append(type(item.chunks[0])(torch.Size([2]), torch.Size([2])))
        x = next(index for index in places if index.fqn == "x")
        places[type(x)("w", torch.Size([2]), 1)] = places.pop(x)
        del metadata.state_dict_metadata["x"]
    message = refusal(folder, UnsupportedError)
    assert "some chunks of 'w' are still to be conjugated" in message and "resolve_conj()" in message


def test_views_and_dtypes(tmp_path: Path) -> None:
    """All dtypes and all kinds of views have the same values as in torch's own conversion."""
    base = torch.arange(24.0)
    state: dict[str, Any] = {
        "slice": base[3:9],
        "step": base[::5],
        "expanded": torch.ones(1).expand(3, 4),
        "permuted": base.view(2, 3, 4).permute(2, 0, 1),
        "conjugated": torch.ones(3, dtype=torch.complex64).mul(2j).conj().resolve_conj(),
        "empty": torch.empty(0),
        "odd": torch.empty(3, 0, 2),
    }
    for name in (
        "float64",
        "float16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex128",
        "float8_e5m2",
        *["float8_e8m0fnu"] * hasattr(torch, "float8_e8m0fnu"),  # since torch 2.7
    ):
        state[name] = (
            torch.zeros(3, dtype=torch.uint8).to(getattr(torch, name))
            if name != "float8_e8m0fnu"
            else torch.ones(3).to(torch.float8_e8m0fnu)
        )
    folder = saved(tmp_path / "dcp", state)
    found = ckptconv.load(folder)
    assert_same(found, by_torch(folder, tmp_path))
    assert_same(found["permuted"], state["permuted"].contiguous())


# Refused folders


@pytest.fixture
def copy(ranks: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder ``mesh``, whose tensors are cut along two dimensions."""
    return Path(shutil.copytree(ranks / "mesh", tmp_path / "dcp"))


@contextmanager
def changed_metadata(folder: Path) -> Iterator[Any]:
    """Yield the metadata of `folder`, and write it again with the changes of the test."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def replace_chunks(folder: Path, data: bytes) -> None:
    """Replace the only chunk of `folder` with `data`, and adapt its length in ``.metadata``."""
    (folder / "__0_0.distcp").write_bytes(data)
    with changed_metadata(folder) as metadata:
        for info in metadata.storage_data.values():
            info.length = len(data)


def refusal(folder: Path, error: type[InputError] = MalformedError) -> str:
    with pytest.raises(error) as caught:
        ckptconv.inspect(folder)
    return str(caught.value)


def test_missing_and_cut_files_are_named(copy: Path) -> None:
    """A missing or truncated file is named in the error."""
    path = copy / "__2_0.distcp"
    data = path.read_bytes()
    path.unlink()
    assert "1 file of 4 is missing" in refusal(copy) and "__2_0.distcp" in refusal(copy)
    path.write_bytes(data[:-7])
    assert "__2_0.distcp: the file was truncated: 7 bytes" in refusal(copy)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("FIFO", "a FIFO and not a file"),
        ("folder", "a folder, not a file"),
        ("link to nowhere", "cannot be read: No such file"),
        ("link to itself", "cannot be read: Too many levels"),
    ],
)
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_irregular_files_are_not_opened(copy: Path, name: str, kind: str, what: str) -> None:
    """A FIFO, a folder or a broken link in the place of a file is refused without waiting for it, and the error
    describes it. A folder that is named .metadata counts as missing.
    """
    (copy / name).unlink()
    NO_FILES[kind](copy / name)
    if (name, kind) == (".metadata", "folder"):
        assert "without .metadata" in refusal(copy)
    else:
        assert f"{name}: {what}" in refusal(copy, InputError)


def test_folders_with_names_of_parts_are_not_parts(tmp_path: Path) -> None:
    """A folder that contains complete checkpoints with names like those of parts is not a checkpoint itself. The error
    names these checkpoints.
    """
    saved(tmp_path / "step-7.distcp", {"weight": torch.ones(2)})
    (tmp_path / ".metadata").mkdir()
    with SourceFolder(tmp_path) as folder:
        assert not dcp.looks_like(folder)
    assert "step-7.distcp" in refusal(tmp_path, UnsupportedError)


@pytest.mark.parametrize("state", [{"w": torch.ones(3)}, {"w": torch.ones(3), "v": torch.ones(2, 2), "n": 3}])
def test_tensors_stored_as_safetensors(tmp_path: Path, state: dict[str, Any]) -> None:
    """The writer of torch can also put all tensors of a process into one safetensors file, with the same offset in
    .metadata for all of them. Such a folder is refused, and the error names the option that creates it.
    """
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("this torch has no such form")
    safetensors = filesystem.SerializationFormat.SAFETENSORS
    writer = filesystem.FileSystemWriter(tmp_path / "dcp", serialization_format=safetensors)
    dcp_of_torch.save(state, storage_writer=writer, **ALONE)
    message = refusal(tmp_path / "dcp", UnsupportedError)
    assert "serialization_format=SAFETENSORS" in message and "save it again" in message


def test_without_metadata(ranks: Path, copy: Path) -> None:
    """Files without .metadata are refused as an unfinished save. If each process wrote its own metadata, the error
    reports this.
    """
    (copy / ".metadata").unlink()
    assert "without .metadata" in refusal(copy)
    if dcp_ranks.HAS_OWN:  # not in torch 2.6
        assert "its own metadata" in refusal(ranks / "own", UnsupportedError)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_of_a_folder_is_not_a_checkpoint(ranks: Path, here: Path, dst: Path, name: str) -> None:
    """A single file of the folder is refused as a part. The call in the error converts the complete folder to
    one file.
    """
    message = refusal(ranks / "mesh" / name, UnsupportedError)
    assert "a part of" in message
    assert str(refused(UnsupportedError, None, ranks / "mesh" / name, dst)) == message
    eval(message.partition("make it one file: ")[2])
    assert torch.load(here / "out.pt").keys() == MESH.keys()


def test_call_in_the_error_works_inside_the_folder(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the folder, the call in the error writes next to the folder, because nothing is written among its
    parts.
    """
    monkeypatch.chdir(copy)
    eval(refusal(Path("__0_0.distcp"), UnsupportedError).partition("make it one file: ")[2])
    assert torch.load(tmp_path / "dcp.pt").keys() == MESH.keys()


def test_other_folders_are_not_recognized(tmp_path: Path) -> None:
    """A folder with a file named .metadata of another program is not a DCP checkpoint."""
    (tmp_path / ".metadata").write_text("{}")
    torch.save({"a": torch.ones(1)}, tmp_path / "model.pt")
    with SourceFolder(tmp_path) as folder:
        assert not dcp.looks_like(folder)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(3, 2), "float32 of shape (3, 2)"),
        (torch.ones(2, 3, dtype=torch.float16), "float16 of shape (2, 3)"),
        ({"a": 1}, "not a plain tensor"),
        (torch.ones(2, 3).to_sparse(), "not a plain tensor"),
        (torch.ones(4, 3)[:2], "stored in a way"),
        (torch.ones(1, 1).expand(2, 3), "stored in a way"),
    ],
)
def test_chunks_must_match_the_metadata(tmp_path: Path, other: Any, words: str) -> None:
    """A chunk is refused if its shape or dtype is not that of the metadata, if it is not a plain tensor, or if it does
    not use its complete storage in order. The error contains the name of the tensor.
    """
    folder = saved(tmp_path / "dcp", {"weight": torch.ones(2, 3)})
    replace_chunks(folder, saved_bytes(other))
    message = refusal(folder, InputError)
    assert "'weight'" in message and words in message


@pytest.mark.parametrize(
    "change",
    [
        lambda data: rezipped(data, method=zipfile.ZIP_DEFLATED),
        lambda data: rezipped(data, {"byteorder": b"big"}),
    ],
    ids=["deflated", "big-endian"],
)
def test_chunks_that_torch_does_not_write(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """A chunk that is compressed or big-endian is refused, and the error contains the name of the tensor."""
    weight = torch.ones(2, 3, dtype=torch.complex64)
    folder = saved(tmp_path / "dcp", {"weight": weight})
    replace_chunks(folder, change(saved_bytes(weight)))
    assert "a chunk of 'weight' is stored in a way" in refusal(folder, UnsupportedError)


def test_incomplete_and_overlapping_chunks_are_named(copy: Path) -> None:
    """A missing chunk leaves a hole, and an additional one overlaps. Both are refused, and the error contains the name
    of the tensor.
    """
    with changed_metadata(copy) as metadata:
        last = metadata.state_dict_metadata["rows and columns"].chunks.pop()
    assert "the chunks of 'rows and columns' leave holes" in refusal(copy)
    with changed_metadata(copy) as metadata:
        first = type(last)(torch.Size([0, *last.offsets[1:]]), last.sizes)
        metadata.state_dict_metadata["rows and columns"].chunks.append(first)
    assert "the chunks of 'rows and columns' overlap" in refusal(copy)


def test_items_that_are_stored_nowhere_or_twice(tmp_path: Path, dst: Path) -> None:
    """An item without a position in a file is refused. A position without an item is left behind, and the report names
    it.
    """
    folder = saved(tmp_path / "dcp", {"weight": torch.ones(2, 3), "other": torch.ones(1)})
    with changed_metadata(folder) as metadata:
        index = next(iter(metadata.storage_data))
        place = metadata.storage_data.pop(index)
    assert "'weight' is not stored in any file" in refusal(folder)
    with changed_metadata(folder) as metadata:
        metadata.storage_data[index] = place
        del metadata.state_dict_metadata["other"]
    report = ckptconv.convert(folder, dst)
    assert [left.path for left in report.left_behind] == ["other"]


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ("x", 20_000), "b": ("y",)},
        {"a": ("x", "y"), "b": ("x",)},
    ],
)
def test_items_with_conflicting_paths(tmp_path: Path, paths: dict[str, tuple[Any, ...]]) -> None:
    """Two items are refused if they have the same path, if one is inside the other, or if an index is far outside its
    list.
    """
    folder = saved(tmp_path / "dcp", {"a": torch.ones(1), "b": torch.ones(1)})
    with changed_metadata(folder) as metadata:
        metadata.planner_data = paths
    assert "planner_data" in refusal(folder) or "a list has too many places" in refusal(folder)


def test_objects_are_copied_and_never_run(here: Path, dst: Path) -> None:
    """A dangerous call in an object is refused. If it is allowed, the output contains the call, which is never run."""
    folder = saved(here / "dcp", {"bad": Reduced(os.system, ("touch ran",)), "weight": torch.ones(1)})
    refused(ckptconv.DangerousError, "system", folder, dst)
    ckptconv.convert(folder, dst, allow_unsafe=True)
    assert b"touch ran" in dst.read_bytes() and not (here / "ran").exists()


def test_assembled_pieces_are_planned(ranks: Path, tmp_path: Path) -> None:
    """The plan of a conversion contains the tensors that will be assembled. Without edits, the plan contains no casts
    and no concatenations.
    """
    for checkpoint in opened(ranks / "mesh"):
        pieces = make_plan(checkpoint, tmp_path / "out.pt", Edits()).files[0].pieces
    assert sum(isinstance(piece, Assemble) for piece in pieces) >= 6
    assert not any(isinstance(piece, (Cast, Concat)) for piece in pieces)
