"""The initial inputs of each target: small files written by torch, safetensors and pickle, and others made by hand.

``python -m tests.fuzz.seeds FOLDER`` writes them to FOLDER/TARGET.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import ckptconv
from tests.fuzz import texts
from tests.fuzz.archives import archive, records_of
from tests.fuzz.folders import pack, unpack
from tests.fuzz.http_answers import BODY, END, FIRST, LAST, ON, SIZE
from tests.fuzz.odd_pickles import BY_HAND, made
from tests.support import row_pickles
from tests.support.archives import rezipped
from tests.support.legacy_files import legacy_file, storage_id
from tests.support.megatron_folders import VERSIONS, write_megatron
from tests.support.reduced import Reduced
from tests.support.writers import distributed, scripted
from tests.support.zero_folders import TAG, a_run, write_zero

__all__ = ["SEEDS", "seeds_of"]


def _objects() -> dict[str, Any]:
    """Return all kinds of objects that users save, with a few elements each."""
    linear = nn.Linear(2, 3)
    adam = torch.optim.Adam(linear.parameters())
    linear(torch.ones(1, 2)).sum().backward()
    adam.step()
    base = torch.arange(12.0)
    tied = torch.ones(2)
    sparse = torch.eye(2)
    return {
        "tensor": torch.ones(2),
        "state": linear.state_dict(),
        "prefixed": OrderedDict((f"module.{name}", value) for name, value in linear.state_dict().items()),
        "training": {
            "model": linear.state_dict(),
            "optimizer": adam.state_dict(),
            "epoch": 3,
            "args": {"device": "cuda:0", "lr": 0.1},
        },
        "views": {
            "all": base,
            "some": base[2:7],
            "turned": base.view(3, 4).T,
            "step": base[::3],
            "same": base.expand(2, 12),
            "none": base[:0],
        },
        "tied": {"a": tied, "b": tied, "c": [tied, (tied.view(2, 1),)]},
        "dtypes": {
            str(dtype): torch.zeros(2).to(dtype)
            for dtype in (
                torch.bfloat16,
                torch.float16,
                torch.int64,
                torch.bool,
                torch.complex64,
                torch.float8_e4m3fn,
                torch.uint16,
            )
        },
        "bits": {
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
            "neg": torch.ones(2, dtype=torch.complex64).conj().imag,
        },
        "kinds": {
            "sparse": sparse.to_sparse(),
            "csr": sparse.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(base, 0.1, 3, torch.qint8),
            "meta": torch.ones(2, device="meta"),
        },
        "parameters": {
            "parameter": nn.Parameter(torch.ones(2)),
            "buffer": nn.Buffer(torch.ones(2)),
            "size": torch.Size([1, 2]),
            "dtype": torch.float32,
            "device": torch.device("cuda:1"),
        },
        "module": nn.Sequential(linear, nn.BatchNorm1d(3)),
        "rng": {
            "rng_state": torch.get_rng_state()[:16],
            "torch_rng_state": torch.zeros(16, dtype=torch.uint8),
            "python": (3, (1, 2, 3), None),
        },
        "storage": {"typed": torch.FloatStorage([1.0]), "untyped": torch.ones(1).untyped_storage()},
        "containers": {
            "list": [1, [2.5, None]],
            "set": {1},
            "frozen": frozenset([2]),
            "counter": Counter("ab"),
            "default": defaultdict(list, {"a": [1]}),
            "complex": 1j,
            "bytes": b"\xff",
            3: torch.ones(1),
        },
        "numpy": {"array": np.arange(3.0), "scalar": np.float32(1), "tensor": torch.ones(1)},
    }


def _saved(obj: Any, tags: tuple[str, ...] = ("cpu", "cuda:0"), **kwargs: Any) -> bytes:
    stream = io.BytesIO()
    with (
        warnings.catch_warnings(),
        mock.patch("torch.serialization.location_tag", lambda storage: tags[storage.nbytes() // 4 % len(tags)]),
    ):
        torch.save(obj, stream, **kwargs)
    return stream.getvalue()


def _zips() -> Iterator[tuple[str, bytes]]:
    for name, obj in _objects().items():
        yield name, _saved(obj)
    state = _saved(_objects()["state"])
    records = records_of(state)
    assert records is not None
    yield "deflated", archive([replace(record, deflated=True) for record in records])
    yield "bare", archive([replace(record, checked=False, descriptor=False) for record in records[:1] + records[4:]])
    yield "zip64", archive(records, zip64=True, comment=b"x")
    yield "big_endian", archive([replace(r, data=b"big") if r.name.endswith(b"byteorder") else r for r in records])
    yield "zipfile", rezipped(state, method=zipfile.ZIP_DEFLATED)
    yield "script", scripted(nn.Linear(1, 1))
    program = io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(1, 1), (torch.zeros(1, 1),)), program)
    yield "program", program.getvalue()


def _legacies() -> Iterator[tuple[str, bytes]]:
    for name, obj in _objects().items():
        if name not in ("storage", "dtypes"):
            yield name, _saved(obj, _use_new_zipfile_serialization=False)
    for protocol in (0, 4):
        yield (
            f"protocol_{protocol}",
            _saved(_objects()["views"], _use_new_zipfile_serialization=False, pickle_protocol=protocol),
        )
    view = storage_id(torch.FloatStorage, "1", "cuda:0", 4, ("2", 1, 2))
    tensor = Reduced(torch._utils._rebuild_tensor, (view, 0, (2,), (1,)))
    yield "view", legacy_file({"a": tensor}, {"1": (4, bytes(16))})
    yield "python2", legacy_file({"a": tensor}, {"1": (4, bytes(16))}, python2=True)


def _pickles() -> Iterator[tuple[str, bytes]]:
    yield from BY_HAND.items()
    for name, data in _zips():
        main = [record.data for record in records_of(data) or () if record.name.endswith(b"/data.pkl")]
        yield from ((f"zip_{name}", pickled) for pickled in main)
    objects = _objects()
    for protocol in (0, 2, 4, 5):
        for name in ("views", "containers", "training"):
            yield f"{name}_{protocol}", pickle.dumps(objects[name], protocol)


def _odd_pickles() -> Iterator[tuple[str, bytes]]:
    yield from BY_HAND.items()
    random = Random(0)
    yield from ((f"made_{i}", made(random)) for i in range(100))


def _safetensors() -> Iterator[tuple[str, bytes]]:
    yield "empty", save({})
    yield "one", save({"a": torch.ones(2)}, {"format": "pt"})
    yield (
        "several",
        save(
            {
                f"m.{i}": torch.zeros(i + 1, 1).to(dtype)
                for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2))
            },
            {"b": "a"},
        ),
    )
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16)
    yield "fp8", save({"a.weight": codes.view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)})
    yield "mxfp4", save({"a_blocks": codes.view(2, 2, 1, 16), "a_scales": codes[0, :4].reshape(2, 2, 1).clone()})
    yield "tied", save({"a": torch.ones(2)}, {"format": "pt", "b": "a"})
    yield "scalar", save({"a": torch.tensor(1.0), "b": torch.ones(0, 3)})
    info = json.dumps({"a": {"saved_offsets": [0, 0]}})
    yield "part", save({"a": torch.ones(1, 2)}, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"})
    header = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    yield "packed", len(header).to_bytes(8, "little") + header + b"ab"


def _shards() -> Iterator[tuple[str, bytes]]:
    tensors = {"a.weight": torch.ones(2), "a.bias": torch.zeros(1), "b.weight": torch.ones(3)}
    halves = [dict([*tensors.items()][:1]), dict([*tensors.items()][1:])]
    for suffix, stem in ((".safetensors", "model"), (".bin", "pytorch_model")):
        names = [f"{stem}-0000{i}-of-00002{suffix}" for i in (1, 2)]
        parts = [save(half, {"format": "pt"}) if suffix == ".safetensors" else _saved(half) for half in halves]
        weight_map = {name: names[i] for i, half in enumerate(halves) for name in half}
        index = json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}).encode()
        files = dict(zip(names, parts, strict=True))
        yield f"index{suffix}", pack({f"{stem}{suffix}.index.json": index, **files})
        yield f"no_index{suffix}", pack(files)
    yield "whole", pack({"model.safetensors": save(tensors), "config.json": b"{}"})
    offsets = ([0, 0], [1, 0])
    infos = [
        {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": at}}), "DCP_VERSION": "1.0", "format": "pt"}
        for at in offsets
    ]
    files = {
        f"shard-0000{i}-model-00001-of-00001.safetensors": save({"a": torch.ones(1, 2)}, info)
        for i, info in enumerate(infos)
    }
    yield "parts", pack(files)


def _folders_of_dcp() -> Iterator[tuple[str, bytes]]:
    state = {
        "flat": {"a": torch.ones(2), "n": 3},
        "nested": {"model": {"w": torch.ones(2, 2), "l": [torch.zeros(1), {"x": 1}]}, "step": 1},
    }
    with tempfile.TemporaryDirectory() as name:
        for what, obj in state.items():
            folder = distributed(obj, Path(name, what))
            packed = pack({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
            yield what, packed
            if what == "flat":
                yield "rows", _in_rows(unpack(packed))
        for version in VERSIONS:
            small = {"w": torch.ones(2), "optimizer.state.exp_avg.w": torch.ones(2), "w._extra_state/shard_0_1": [1]}
            folder = write_megatron(Path(name, version), version, small, {"num_layers": 1})
            yield f"megatron_{version}", pack({path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def _in_rows(files: dict[str, bytes]) -> bytes:
    """Return a folder whose tensor ``a`` was saved in two parts."""
    metadata = pickle.loads(files[".metadata"])
    described = metadata.state_dict_metadata["a"]
    assert isinstance(described, TensorStorageMetadata)
    metadata.state_dict_metadata = {"a": described}
    half = torch.Size([1])
    described.chunks = [ChunkStorageMetadata(torch.Size([i]), half) for i in (0, 1)]
    parts = [_saved(torch.full((1,), float(i)), ("cpu",)) for i in (0, 1)]
    starts = (0, len(parts[0]))
    metadata.storage_data = {
        MetadataIndex("a", torch.Size([i])): _StorageInfo("__0_0.distcp", starts[i], len(parts[i])) for i in (0, 1)
    }
    metadata.planner_data = {"a": ("a",)}
    return pack({".metadata": pickle.dumps(metadata), "__0_0.distcp": b"".join(parts)})


def _folders_of_zero() -> Iterator[tuple[str, bytes]]:
    kinds: dict[str, dict[str, Any]] = {
        "two": {"stage": 2, "aligned": True},
        "elastic": {"stage": 1, "elastic": True},
        "three": {"stage": 3, "sub_group": 4},
    }
    with tempfile.TemporaryDirectory() as name:
        for what, kind in kinds.items():
            folder = write_zero(Path(name, what), a_run(frozen=True), **kind) / TAG
            yield what, pack({path.name: path.read_bytes() for path in sorted(folder.iterdir())})


def _pickles_with_rows() -> Iterator[tuple[str, bytes]]:
    random = Random(0)
    every = (row_pickles.made(random) for _ in range(100))
    yield from ((f"made_{i}", data) for i, data in enumerate(every) if row_pickles.read(data, rows=False)[0])


def _http() -> Iterator[tuple[str, bytes]]:
    """Yield answers for ranges of a file, also after other valid answers, for downloads, and for lists."""
    bytes_said = b"Content-Range: bytes %s-%s/%s\r\n" % (FIRST, LAST, SIZE)
    part = b"HTTP/1.1 206 Partial Content\r\n" + bytes_said
    validators = b'ETag: "a"\r\nLast-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\n'
    right = part + validators + b"\r\n" + BODY + END
    yield "ranges", b"f" + right
    yield "no_validator", b"f" + part + b"\r\n" + BODY + END
    yield "weak_etag", b"f" + part + b'ETag: W/"a"\r\nContent-Encoding: identity\r\n\r\n' + BODY + END
    yield (
        "chunked",
        b"f" + part + b"Transfer-Encoding: chunked\r\n\r\n40;x=y\r\n" + BODY + b"\r\n0\r\nX: y\r\n\r\n" + END,
    )
    yield "slow", b"f" + part + b"X: \0\x10y\r\n\r\n" + b"\0\x05" + BODY + END
    yield "empty", b"f" + b"HTTP/1.1 416 No\r\nContent-Range: bytes */0\r\n\r\n" + END
    moved = b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" + END
    places = b"/x?Signature=S3CRET", b"//other:81/y", b"https://user:S3CRET@other/", b"?a#b"
    yield "redirects", b"f" + b"".join(moved % place for place in places) + right
    again = b"HTTP/1.1 503 Busy\r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n" + END
    after = b"0", b"7", b"Fri, 15 Jan 2027 08:16:45 GMT"
    yield "again", b"f" + b"".join(again % when for when in after) + right
    yield "let_in", b"f" + right + moved % b"/y" + b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n" + END + right
    yield "continue", b"f" + b"HTTP/1.1 100 Continue\r\n\r\n" + right
    whole = b"d" + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde" + END
    head = b"HTTP/1.1 200 OK\r\n"
    yield "whole", whole
    yield "whole_old", b"d" + b"HTTP/1.0 200 OK\r\n\r\nabcde" + END
    yield "whole_zipped", b"d" + head + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"abc" * 9, mtime=0) + END
    yield (
        "whole_chunked",
        b"d" + head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\nX: y\r\n\r\n" + END,
    )
    yield "whole_slow", b"d" + head + b"Content-Length: 70\r\n\r\na\0\x10b" + ON + b"cd" + END
    entries = [{"type": "file", "path": name, "size": size} for name, size in (("a.pt", 5), ("b/c.pt", 2**60))]
    page = json.dumps([*entries, {"type": "directory", "path": "b"}]).encode()
    link = b'HTTP/1.1 200 OK\r\nLink: <http://hub/api/x?cursor=%d>; rel="next"\r\nContent-Length: %d\r\n\r\n'
    yield "list", b"l" + head + b"Content-Length: %d\r\n\r\n" % len(page) + page + END
    yield "pages", b"l" + link % (1, len(page)) + page + END + link % (2, 2) + b"[]" + END + head + b"\r\n" + page + END


def _folders_of_rules() -> Iterator[tuple[str, bytes]]:
    """Yield folders with a model, rules, and the sizes that the names in rules stand for."""
    model = save({f"l.{i}.e.{j}.w": torch.ones(2, 2) for i in range(2) for j in range(2)} | {"qkv": torch.ones(6, 2)})
    for name, rules in {
        "stacked": b"l.{i}.e.{e}.w = l.{i}.e\n",
        "split": b"// for: x\nqkv = q:$N, k:$N, v:$N\n",
        "both": b"l.{i}.e.{e}.w = l.{i}.e\nqkv = q, k, v\n",
    }.items():
        for sizes in (b'{"N": 2}', b'{"N": 2, "text_config": {"M": 4}, "model_type": "x"}'):
            packed = {texts.MODEL: model, texts.RULES: rules, texts.SIZES: sizes, "config.json": sizes}
            yield f"{name} {len(sizes)}", pack(packed)


def _journals() -> Iterator[tuple[str, bytes]]:
    """Yield files that were changed in place with their undo journals."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, texts.JOURNAL)
        for name, options in {"device": {"map_location": "cuda:1"}, "names": {"strip_prefix": "module"}}.items():
            torch.save({"module.a": torch.ones(2), "module.b": torch.zeros(3)}, file)
            ckptconv.convert(file, in_place=True, **options)
            yield name, pack({each.name: each.read_bytes() for each in sorted(Path(folder).iterdir())})
            for each in Path(folder).iterdir():
                each.unlink()


def _urls() -> Iterator[tuple[str, bytes]]:
    for i, url in enumerate((
        b"http://u:S3CRET@h/x.pt?sig=S3CRET", b"https://h:8/a/b.pt", b"s3://bucket/a.pt", b"hf://o/r/x.pt",
        b"hf://datasets/o/r@main/x.pt", b"file:///tmp/x.pt", b"simplecache::http://h/x.pt", b"zip://x.pt::http://h/x.zip",
        b"http://[::1]:80/x", b"memory://a/x.pt", b"http://h/%2e%2e/x.pt#f",
    )):  # a table  # fmt: skip
        yield str(i), url


def _names() -> Iterator[tuple[str, bytes]]:
    yield "plain", b"a\nlayer.0.weight"
    yield "elements", b"<script>alert(1)</script>\n<!--\n</title>"
    yield "escapes", "é\n\u2028\n\u202e\n😀\n&lt;\n\\u003c".encode()


def _words() -> Iterator[tuple[str, bytes]]:
    yield "plain", b"ckptconv\0convert\0a b.pt\0--to\0cpu"
    yield "quoted", b'it\'s\0"$(x)`y`"\0a\\b\0*?[x]{a,b}~#!'
    yield "controls", "a\nb\x1b[31m\x7f\0é\u202e\u2028\0".encode() + b"\xff\xfe"


def _programs() -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "m.pt2")
        torch.export.save(torch.export.export(nn.Linear(3, 2).eval(), (torch.zeros(1, 3),)), file)
        yield "linear", file.read_bytes()


SEEDS = {
    "pickle": _pickles,
    "lenient": _odd_pickles,
    "rows": _pickles_with_rows,
    "zip": _zips,
    "legacy": _legacies,
    "safetensors": _safetensors,
    "shards": _shards,
    "dcp": _folders_of_dcp,
    "zero": _folders_of_zero,
    "http": _http,
    "rules": _folders_of_rules,
    "journal": _journals,
    "url": _urls,
    "page": _names,
    "index": lambda: ((name, data) for name, data in _shards() if name == "index.safetensors"),
    "shell": _words,
    "program": _programs,
}


def seeds_of(target: str) -> dict[str, bytes]:
    """Return the seeds of `target` by name. All calls return the same seeds."""
    torch.manual_seed(0)
    return dict(SEEDS[target]())


if __name__ == "__main__":
    for _target in SEEDS:
        _corpus = Path(sys.argv[1], _target)
        _corpus.mkdir(parents=True, exist_ok=True)
        for _name, _data in seeds_of(_target).items():
            (_corpus / _name).write_bytes(_data)
