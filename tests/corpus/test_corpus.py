"""Tests with third-party checkpoints. Every file of the corpus is converted, or refused with a reason that fits.

The outputs are compared with torch if its safe loader reads the source. State dicts are converted to safetensors and
back, and safetensors files are converted to torch's format and back. The safetensors library also reads these outputs.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.byteranges.spans import ByteRange
from ckptconv.checkpoint.rebuild_functions import STRIDED
from ckptconv.cli.main import main
from ckptconv.conversion.convert import run
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.targets import find_request
from ckptconv.edits.options import edits_from
from ckptconv.errors import CkptconvError, RefusedError, UnsupportedError
from ckptconv.formats import opening
from ckptconv.hints import command_in
from ckptconv.pickles.graph import (
    Blob,
    ByteArray,
    Call,
    Extension,
    Global,
    Graph,
    Node,
    PersistentId,
    Py2String,
    Tuple,
    Value,
    children,
    type_of,
)
from ckptconv.pickles.parser import parse
from ckptconv.pickles.paths import key_segment
from tests.support.conversions import read
from tests.support.judge import assert_same, refusal, tags_of


@pytest.fixture(scope="module")
def everything(corpus: Path) -> list[dict[str, str]]:
    """Return all rows of manifest.csv with absolute paths. The largest file has only 4 MB, so all files are used."""
    with (corpus / "manifest.csv").open(newline="") as file:
        rows = [{**row, "path": str(corpus / row["path"])} for row in csv.DictReader(file)]
    assert len(rows) > 70
    return rows


@pytest.fixture(scope="module")
def checkpoints(everything: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of the files in torch's zip format."""
    return [row for row in everything if row["container"].startswith("zip")]


@pytest.fixture(scope="module")
def legacy(everything: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows of the files in torch's format from before 1.6."""
    return [row for row in everything if row["container"] == "legacy-pt"]


@pytest.mark.slow
def test_retagged_files_load_as_equal_objects(
    checkpoints: list[dict[str, str]], legacy: list[dict[str, str]], tmp_path: Path
) -> None:
    """A conversion to cpu or cuda:1 keeps what torch's safe loader reads, and all location tags become that device.

    The files of both torch formats are converted to both formats.
    """
    judged: Counter[str] = Counter()
    for row in [*checkpoints, *legacy]:
        if row["weights_only_ok"] != "yes":
            continue
        wanted = torch.load(row["path"], map_location="cpu", weights_only=True)
        for device in ("cpu", "cuda:1"):
            for format in ("pt", "legacy"):
                ckptconv.convert(row["path"], tmp_path / "dst.pt", map_location=device, format=format, force=True)
                found, tags = tags_of(tmp_path / "dst.pt", weights_only=True)
                assert_same(wanted, found)
                assert tags == [device] * int(row["n_storages"]), row["path"]
        judged[row["container"]] += 1
    assert judged == {"zip-pt": 26, "legacy-pt": 16}


def test_legacy_files_stay_the_same_bytes(legacy: list[dict[str, str]], tmp_path: Path) -> None:
    """Without edits, files that torch 0.4 and later wrote with Python 3 stay identical in the legacy format. A
    conversion to the zip format and back keeps all tensors.
    """
    same = 0
    for row in legacy:
        src = Path(row["path"])
        ckptconv.convert(src, tmp_path / "same.pt", format="legacy", force=True)
        ckptconv.convert(src, tmp_path / "there.pt", force=True)
        ckptconv.convert(tmp_path / "there.pt", tmp_path / "back.pt", format="legacy", force=True)
        same += (tmp_path / "same.pt").read_bytes() == src.read_bytes()
        assert tensors_of(tmp_path / "same.pt") == tensors_of(src) == tensors_of(tmp_path / "back.pt"), row["path"]
    assert (same, len(legacy)) == (17, 25)


def tensors_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return the properties and storage bytes of each tensor in the file at `path`."""
    with Source(path) as source:
        return {
            place: (
                info.dtype,
                info.shape,
                info.stride,
                info.offset,
                info.device,
                info.requires_grad,
                source.read(data.offset, data.length),
            )
            for place, info in opening.read(source).tensors.items()
            if info.storage and isinstance(data := info.storage.data, ByteRange)
        }


def test_only_location_tags_of_graphs_change(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """In every file, a retag changes only the location tags of the graph. Sharing and order stay the same, and the
    records keep their bytes.
    """
    for row in checkpoints:
        for device in ("cpu", "cuda:1"):
            ckptconv.convert(row["path"], tmp_path / "dst.pt", map_location=device, force=True)
            source, output = records(Path(row["path"])), records(tmp_path / "dst.pt")
            assert_same_graph(graph(source.pop("data.pkl")), graph(output.pop("data.pkl")), device)
            layout_records = (".format_version", ".storage_alignment", ".data/serialization_id")
            assert output == {name: data for name, data in source.items() if name not in layout_records}, row["path"]


def test_without_edits_the_pickle_is_the_same_bytes(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """A conversion without edits writes every pickle of the corpus with the same bytes."""
    for row in checkpoints:
        ckptconv.convert(row["path"], tmp_path / "dst.pt", force=True)
        assert records(Path(row["path"]))["data.pkl"] == records(tmp_path / "dst.pt")["data.pkl"], row["path"]


def test_the_manifest_agrees(checkpoints: list[dict[str, str]], legacy: list[dict[str, str]]) -> None:
    """The numbers of storages, tensors, location tags and dtypes are those of the manifest."""
    for row in [*checkpoints, *legacy]:
        checkpoint = read(Path(row["path"]))
        storages = checkpoint.storages.values()
        kinds = {info.storage: info.dtype for info in checkpoint.tensors.values() if info.storage}
        rebuilt = {id(call) for call in checkpoint.graph.calls if str(call.callable) in STRIDED}
        tensors = len(rebuilt) if row in legacy else len(checkpoint.tensors)  # each counted once in old files
        assert (len(storages), tensors) == (int(row["n_storages"]), int(row["n_tensors"])), row["path"]
        assert Counter(storage.device for storage in storages) == counts(row["locations"]), row["path"]
        assert Counter(kinds.values()) == counts(row["dtypes"]), row["path"]


# Conversions to safetensors and back


def test_state_dicts_to_safetensors_and_back(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """The tensors of a state dict are those of the source's records and of torch's safe loader, in safetensors and in
    torch's format after the way back. A second conversion to safetensors gives the same file.
    """
    there, back = tmp_path / "there.safetensors", tmp_path / "back.pt"
    judged: Counter[str] = Counter()
    for row in checkpoints:
        try:
            report = ckptconv.convert(row["path"], there, force=True)
        except RefusedError:
            continue
        ckptconv.convert(there, back, map_location="cuda:1", force=True)
        found, tags = tags_of(back, weights_only=True)
        path = state_dict_path(row["path"])
        from_records = tensors_at(row["path"], path)
        assert found.keys() == from_records.keys(), row["path"]
        assert_equal_tensors(found, from_records)
        assert_equal_tensors(load_file(there), from_records)
        assert set(tags) == {"cuda:1"}
        with safe_open(there, "pt") as file:
            ties = {name: kept for name, kept in file.metadata().items() if name != "format"}
        assert set(load_file(there)) == found.keys() - ties.keys()
        assert all(found[name].data_ptr() == found[kept].data_ptr() for name, kept in ties.items())
        left = {place.path for place in report.left_behind}
        assert not any(place in found for place in left)
        judged["records"] += 1
        if row["weights_only_ok"] == "yes":
            loaded = at_path(torch.load(row["path"], map_location="cpu", weights_only=True), path)
            assert_equal_tensors(found, {key: value for key, value in loaded.items() if value is not None})
            judged["safe loader"] += 1
        again = tmp_path / "again.safetensors"
        ckptconv.convert(back, again, force=True)
        assert again.read_bytes() == there.read_bytes(), row["path"]
    assert judged == {"records": 23, "safe loader": 19}


def test_safetensors_files_to_torch_and_back(everything: list[dict[str, str]], tmp_path: Path) -> None:
    """A safetensors file is converted to torch's format with new location tags, and back to safetensors. All tensors
    stay equal. A conversion without edits keeps the metadata.
    """
    files = [row["path"] for row in everything if row["container"] == "safetensors"]
    assert len(files) == 6
    for path in files:
        wanted = load_file(path)
        summary = ckptconv.inspect(path)
        assert {tensor.name: tuple(tensor.shape) for tensor in summary.tensors} == {
            name: tuple(tensor.shape) for name, tensor in wanted.items()
        }
        ckptconv.convert(path, tmp_path / "there.pt", map_location="cuda:0", force=True)
        found, tags = tags_of(tmp_path / "there.pt", weights_only=True)
        assert tags == ["cuda:0"] * len(wanted)
        assert_equal_tensors(found, wanted)
        for source in (tmp_path / "there.pt", path):
            ckptconv.convert(source, tmp_path / "back.safetensors", force=True)
            assert_equal_tensors(load_file(tmp_path / "back.safetensors"), wanted)
        with safe_open(path, "pt") as old, safe_open(tmp_path / "back.safetensors", "pt") as new:
            assert new.metadata() == old.metadata()


#: The expected number of each outcome, by container and target.
OUTCOMES = {
    "zip-pt": {
        "inspect": {"read": 32},
        "pt": {"converted": 32},
        "safetensors": {"converted": 23, "no state dict": 8, "several state dicts": 1},
    },
    "legacy-pt": {
        "inspect": {"read": 25},
        "pt": {"converted": 25},
        "safetensors": {"converted": 22, "no state dict": 2, "several state dicts": 1},
    },
    "safetensors": {"inspect": {"read": 6}, "pt": {"converted": 6}, "safetensors": {"converted": 6}},
    "torchscript": {
        "inspect": {"read": 4},
        "pt": {"a program": 4},
        "safetensors": {"converted": 3, "no state dict": 1},
    },
    "torchscript-old-json": {t: {"TorchScript from before 1.4": 1} for t in ("inspect", "pt", "safetensors")},
    "pickle": {
        "inspect": {"read": 3, "no tensors": 2},
        "pt": {"converted": 3, "no tensors": 2},
        "safetensors": {"several state dicts": 3, "no tensors": 2},
    },
    "tar.gz-archive": {t: {"to be unpacked": 1} for t in ("inspect", "pt", "safetensors")},
}
#: Parts of error messages, and the outcomes that they mean.
REASONS = {
    "there is no state dict in it": "no state dict",
    "so no state dict": "no state dict",
    "there are several state dicts": "several state dicts",
    "a pickle without tensors": "no tensors",
    "unpack it": "to be unpacked",
    "TorchScript archive is a program": "a program",
    "TorchScript": "TorchScript from before 1.4",
}


def test_every_outcome_is_a_file_or_a_reason(everything: list[dict[str, str]], tmp_path: Path) -> None:
    """Every file is inspected and converted, or refused with a reason that fits. A refused conversion writes no
    file.
    """
    table: dict[str, dict[str, Counter[str]]] = {}
    for i, row in enumerate(everything):
        kinds = table.setdefault(row["container"], {})
        for target in ("inspect", "pt", "safetensors"):
            dst = tmp_path / f"{i}.{target}"
            outcome = "read" if target == "inspect" else "converted"
            try:
                ckptconv.inspect(row["path"]) if target == "inspect" else ckptconv.convert(row["path"], dst)
            except CkptconvError as error:
                said = str(error)
                outcome = next((short for words, short in REASONS.items() if words in said), said)
                assert not dst.exists()
            kinds.setdefault(target, Counter())[outcome] += 1
    for container, kinds in table.items():
        for target, outcomes in kinds.items():
            print(f"{container:22}{target:13}", ", ".join(f"{outcome}: {n}" for outcome, n in outcomes.items()))
    assert {c: {t: dict(n) for t, n in kinds.items()} for c, kinds in table.items()} == OUTCOMES


def test_each_file_is_the_same_as_itself(everything: list[dict[str, str]]) -> None:
    """Every readable file is the same as itself if all bytes are compared."""
    compared = 0
    for row in everything:
        with suppress(CkptconvError):
            assert ckptconv.diff(row["path"], row["path"], full=True).same, row["path"]
            compared += 1
    assert compared == 70


@pytest.mark.slow
def test_loadable_outputs_load(everything: list[dict[str, str]], tmp_path: Path) -> None:
    """With ``--loadable``, no file that torch's safe loader reads is refused, and its output is equal. Some refused
    files load afterwards.

    If a file is still refused and the hint contains a command, this command works and its output loads.
    """
    out = tmp_path / "out.pt"
    counts: Counter[tuple[str, str]] = Counter()
    for row in everything:
        src = Path(row["path"])
        before = "refused" if refusal(src) else "loads"
        try:
            run(find_request(src, out, edits_from(loadable=True), OutputOptions(format="pt", force=True)))
        except UnsupportedError:
            counts[before, "not read"] += 1
        except RefusedError as error:
            counts[before, "refused"] += 1
            typed = command_in(error.hint)
            if typed is not None:
                words = [word for flag in typed.words() for word in flag]
                assert main([str(out) if word == "OUT" else word for word in words[1:]] + ["-f"]) == 0, words
                assert refusal(out) is None
        else:
            counts[before, "loads"] += 1
            assert refusal(out) is None
            if before == "loads" and src.suffix != ".safetensors":
                assert_same(torch.load(out, "cpu", weights_only=True), torch.load(src, "cpu", weights_only=True))
    print(dict(counts))
    assert counts["refused", "loads"] >= 5 and not counts["loads", "refused"]


def test_refused_checkpoints_contain_no_state_dict(checkpoints: list[dict[str, str]], tmp_path: Path) -> None:
    """If a conversion to safetensors is refused, no mapping in the loaded checkpoint contains only names and tensors,
    except in optimizers.
    """
    judged = 0
    for row in checkpoints:
        try:
            ckptconv.convert(row["path"], tmp_path / "dst.safetensors", force=True)
        except RefusedError:
            if row["weights_only_ok"] == "yes":
                loaded = torch.load(row["path"], map_location="cpu", weights_only=True)
                assert not list(state_dicts_in(loaded)), row["path"]
                judged += 1
    assert judged == 7


def state_dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings in `value` that contain only tensors with strings as keys, except those in optimizers."""
    if isinstance(value, dict) and not {"state", "param_groups"} <= value.keys():
        kinds = {(type(key), isinstance(item, torch.Tensor)) for key, item in value.items()}
        if kinds == {(str, True)}:
            yield value
        for item in value.values():
            yield from state_dicts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from state_dicts_in(item)


def state_dict_path(path: str) -> str:
    """Return the path of the state dict that a conversion uses: the only one, or the one with a usual name."""
    paths = [found.path for found in ckptconv.inspect(path).state_dicts]
    return paths[0] if len(paths) == 1 else next(p for p in paths if p in ("state_dict", "model", "model_state_dict"))


def at_path(value: Any, path: str) -> Any:
    """Return the item at `path` in the loaded checkpoint `value`. The path consists of keys and indices."""
    for word in re.findall(r"\[\d+\]|[^/\[]+", "" if path == "." else path):
        value = value[int(word[1:-1]) if word[0] == "[" else word]
    return value


def tensors_at(path: str, state_dict: str) -> dict[str, torch.Tensor]:
    """Return the tensors of `state_dict` as views of the bytes that torch reads from the records of `path`."""
    infos = read(Path(path)).tensors
    found = {}
    data = {key: bytearray(record) for key, record in records(Path(path)).items()}
    prefix = "" if state_dict == "." else state_dict + "/"
    for place, info in infos.items():
        if info.name is not None and info.storage and place == prefix + key_segment(info.name, 0)[1:]:
            raw = torch.frombuffer(data[f"data/{info.storage.key}"], dtype=getattr(torch, info.dtype))
            found[info.name] = raw.as_strided(info.shape, info.stride, info.offset)
    return found


def assert_equal_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Fail unless each tensor in `found` is in `wanted` with the same dtype, shape and bytes."""
    assert found.keys() <= wanted.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        left, right = (t.reshape(-1).clone().view(torch.uint8) for t in (tensor, wanted[name]))
        assert torch.equal(left, right), name


def counts(text: str) -> Counter[str]:
    """Return a text such as ``cuda:0x188 cpux1`` as a counter."""
    return Counter({kind: int(n) for kind, n in (word.rsplit("x", 1) for word in text.split())})


def records(path: Path) -> dict[str, bytes]:
    """Return the records of the checkpoint at `path`, read by torch."""
    reader = torch._C.PyTorchFileReader(str(path))
    return {name: reader.get_record(name) for name in reader.get_all_records()}


def graph(pickle: bytes) -> tuple[Graph, bytes]:
    """Return the graph of `pickle`, and its bytes, which contain the long strings."""
    return parse(lambda offset, n: pickle[offset : offset + n], len(pickle), where="pickle")[0], pickle


def assert_same_graph(left: tuple[Graph, bytes], right: tuple[Graph, bytes], tag: str) -> None:
    """Fail unless both graphs correspond node by node, in the same order. Only the location tags differ: in the right
    graph, all of them are `tag`.
    """
    partner: dict[int, int] = {}
    back: dict[int, int] = {}
    todo: list[tuple[Value, Value]] = [(left[0].root, right[0].root)]
    todo += zip(left[0].discarded, right[0].discarded, strict=True)
    assert len(left[0].calls) == len(right[0].calls)
    while todo:
        a, b = todo.pop()
        assert type_of(a) is type_of(b)
        if not isinstance(a, Node):
            assert repr(a) == repr(b)  # repr compares NaN, and tells 1 from True
            continue
        assert partner.setdefault(id(a), id(b)) == id(b), "sharing differs"
        known = id(b) in back
        assert back.setdefault(id(b), id(a)) == id(a), "sharing differs"
        if not known:
            assert own_facts(a, left[1]) == own_facts(b, right[1])
            parts = children(a), children(b)
            if isinstance(a, PersistentId):
                (a_id,), (b_id,) = parts
                assert b_id.items[3] == tag
                parts = without_tag(a_id), without_tag(b_id)
            todo += zip(*parts, strict=True)


def without_tag(storage: Tuple) -> list[Value]:
    """Return the items of a persistent id without the location tag. Its tuple is compared by items, not by identity."""
    return [*storage.items[:3], *storage.items[4:]]


def own_facts(node: Node, pickle: bytes) -> Any:
    """Return the properties of `node` without its children."""
    if isinstance(node, Global):
        return node.module, node.name
    if isinstance(node, (Py2String, ByteArray)):
        return node.data
    if isinstance(node, Blob):
        return node.kind, pickle[node.offset : node.offset + node.length]
    if isinstance(node, Extension):
        return node.code
    effects = [(effect.opcode, effect.order, len(effect.values)) for effect in getattr(node, "effects", ())]
    call = (node.kind, node.order, node.kwargs is None) if isinstance(node, Call) else None
    return call, effects, node.order if isinstance(node, PersistentId) else None
