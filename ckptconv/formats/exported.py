"""Programs of torch.export (``.pt2``): the weights are read, and the program is described.

Layout, in one folder of a zip archive (torch 2.9 and newer):

    archive_format                       pt2
    byteorder                            little or big
    models/MODEL.json                    the program: the graph, its signature, the version of its schema
    data/weights/MODEL_weights_config.json
                                         {"config": {NAME: {"path_name": "weight_0", "use_pickle": false,
                                                            "tensor_meta": {dtype, sizes, strides, storage_offset,
                                                                            device, layout}}}}
    data/weights/weight_0                the bytes of a storage
    data/constants/MODEL_constants_config.json, data/constants/tensor_0
                                         the same for constants; custom_obj_N and opaque_obj_N are pickles
    data/sample_inputs/MODEL.pt          a file of torch.save

torch 2.8 has ``data/weights/MODEL.pt``, a file of torch.save, in place of the configuration and the storages. Archives
of torch before 2.8 have no folder, and the records ``serialized_exported_program.json``,
``serialized_state_dict.pt``, ``serialized_constants.pt`` and ``serialized_example_inputs.pt``.

Nothing of a program is run. Source: ``torch/export/pt2_archive/_package.py`` and ``torch/_export/serde/schema.py`` of
torch 2.13.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.merging import TensorCalls, empty_graph
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.storage_ids import change_id
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.dtypes import BY_NAME
from ckptconv.errors import (
    InputError,
    MalformedError,
    RefusedError,
    UnsupportedError,
    check_limit,
    count,
    some,
)
from ckptconv.formats.safetensors_header import check_nesting
from ckptconv.formats.torch_zip import ExportedProgram, read_byteorder, read_inner, record_bytes
from ckptconv.formats.zip_archive import STORED, Archive, Member, read_archive
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Object, Tuple, Value, is_count, set_items
from ckptconv.work import work

NAME = "torch.export program"
_WEIGHTS = "data/weights/"
#: Files of torch.save in the archive.
INNER = regex(r"data/(weights|constants|sample_inputs)/[^/]+\.pt|serialized_(constants|example_inputs)\.pt")
#: The program and the weights in an archive of torch before 2.8, which has no folder.
_FLAT, _STATE_DICT = "serialized_exported_program.json", "serialized_state_dict.pt"
_MODEL = regex(r"models/([^/]+)\.json")
#: Records that other readers of torch look for.
_OTHERS = {"data.pkl", "constants.pkl", "attributes.pkl"}
#: Steps for the objects, lists and texts of JSON, by the characters in it that tell how many there are.
_STEPS = {b"{": 2, b"[": 2, b'"': 1, b",": 1, b":": 1}
_STRIDED = 7
_DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
    "complex128", "bool", "bfloat16",
)  # from 1 on  # fmt: skip
_LATER = (
    "uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "uint32",
    "uint64",
)  # from 28 on  # fmt: skip
_SCALARS = dict(enumerate(_DTYPES, 1)) | dict(enumerate(_LATER, 28))
_SHOWN = 5


def read(source: Readable, unread: UnsupportedError) -> Checkpoint:
    """Return the weights in the program `source` as a state dict, with notes about the program.

    Raises:
        UnsupportedError: The archive has another layout. The error is `unread`, which the caller provides.
        MalformedError: The archive or its JSON is damaged.
        LimitError: Its JSON is too large.
    """

    def is_known(names: list[str]) -> None:
        below = {name.partition("/")[2].casefold() for name in names}
        if _FLAT not in names and ("archive_format" not in below or not _OTHERS.isdisjoint(below)):
            raise unread

    archive = read_archive(source, is_known, lambda name: name.startswith(_WEIGHTS), flat=_FLAT)
    names = archive.names
    models = [match[1] for name in names if (match := _MODEL.fullmatch(name))]
    configs = {model: f"{_WEIGHTS}{model}_weights_config.json" for model in models}
    saved = names.get(_STATE_DICT if _FLAT in names else f"{_WEIGHTS}{models[0]}.pt" if len(models) == 1 else "")
    twice = [name for model in models if (name := f"{_WEIGHTS}{model}.pt") in names and configs[model] in names]
    if twice:  # torch.export.load takes the file of torch.save then, and this reader would take the configuration
        raise MalformedError("the weights of a program are there twice", where=source.path, got=some(twice))
    source.faults.unread(archive.unread())
    if models and names.keys() >= {*configs.values()}:
        checkpoint = _weights(source, archive, configs, unread)
    elif saved and saved.method == STORED:
        checkpoint = read_inner(saved.stored())
        checkpoint.source, checkpoint.blobs = source, checkpoint.blobs or checkpoint.source
    else:  # a reader that collects faults leaves out bad names
        raise unread
    checkpoint.format, checkpoint.container = NAME, ExportedProgram(archive)
    checkpoint.is_state_dict = len(models) < 2
    for model in models or [_FLAT]:
        checkpoint.notes += _notes(source, archive, model)
    checkpoint.notes += _inner_files(names, checkpoint)
    checkpoint.unused += _left_behind(names, {*configs.values(), _STATE_DICT})
    return checkpoint


# The weights


def _weights(source: Readable, archive: Archive, configs: dict[str, str], unread: UnsupportedError) -> Checkpoint:
    """Return the tensors that the records `configs` describe, as a dict, or of several programs as a dict of dicts.

    An entry that is not valid is reported as a fault. Raises `unread` for one that is a pickle, MalformedError,
    LimitError.
    """
    names = archive.names
    graph = empty_graph()
    calls = TensorCalls(graph)
    for model, config in configs.items():
        items: list[Value] = []
        for name, entry in _entries(archive, config).items():
            where = f"{source.path}: {config}"
            try:
                if entry["use_pickle"] is True:
                    raise UnsupportedError(f"the weight {name!r} is a pickle", where=where, hint=unread.hint)
                items += (name, _tensor(calls, entry, names))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                got = f"{type(error).__name__}: {error}"
                source.faults.found(MalformedError(f"the entry of {name!r} is not valid", where=where, got=got))
        assert isinstance(graph.root, Object)
        set_items(graph.root, items if len(configs) == 1 else [model, set_items(Dict(), items)])

    record = archive.records(_WEIGHTS)
    checkpoint = checkpoint_of(NAME, source, graph, ExportedProgram(archive), record, str(source.path))
    read_byteorder(checkpoint, names)
    return checkpoint


def _entries(archive: Archive, config: str) -> dict[str, Any]:
    """Return the entries in the JSON record `config` by name. Raises MalformedError, LimitError."""
    parsed = read_json(archive, config)
    entries = parsed.get("config") if isinstance(parsed, dict) else None
    if not isinstance(entries, dict):
        where = archive.names[config].where
        raise MalformedError("the record has no entries", where=where, expected='{"config": {…}}')
    return entries


def _tensor(calls: TensorCalls, entry: Any, names: Mapping[str, Member]) -> Call:
    """Return a call that rebuilds the tensor that `entry` describes.

    Its storage is one of the records `names`. Raises KeyError, TypeError, ValueError or AttributeError if
    the entry is not valid.
    """
    meta, key = entry["tensor_meta"], entry["path_name"]
    if entry["use_pickle"] is not False:
        raise ValueError("use_pickle")
    if meta["layout"] != _STRIDED:
        raise ValueError(f"layout {meta['layout']}")
    dtype = BY_NAME[_SCALARS[meta["dtype"]]]
    size, stride = ([number["as_int"] for number in meta[which]] for which in ("sizes", "strides"))
    offset = meta["storage_offset"]["as_int"]
    if not all(map(is_count, [*size, *stride, offset])):
        raise ValueError("a size is not a number")
    nbytes = names[f"{_WEIGHTS}{key}"].size
    node = calls.tensor(dtype, (nbytes // dtype.itemsize,), key, nbytes)
    assert isinstance(node.args, Tuple)
    node.args.items[1:4] = offset, Tuple([*size]), Tuple([*stride])
    reference = node.args.items[0]
    change_id(reference, tag=device_of(meta["device"]))  # type: ignore[arg-type]
    return node


def device_of(device: Any) -> str:
    """Return the location tag of `device`, a JSON object with a type and perhaps an index.

    Raises KeyError, TypeError, ValueError.
    """
    kind, index = device["type"], device.get("index")
    if not isinstance(kind, str) or not kind.isidentifier() or not (index is None or is_count(index)):
        raise ValueError(f"a device {kind!r}")
    return kind if index is None else f"{kind}:{index}"


# The program


def _notes(source: Readable, archive: Archive, model: str) -> Iterator[str]:
    """Yield notes about the program `model`: its version, inputs and devices, and its constants.

    If its JSON is not that of a program, a fault is reported.
    """
    record, constants = f"models/{model}.json", f"data/constants/{model}_constants_config.json"
    record = model if model == _FLAT else record
    program = read_json(archive, record)
    try:
        graph, version = program["graph_module"]["graph"], program["schema_version"]
        devices = Counter(devices_in(program))
        inputs = [spec for spec in program["graph_module"]["signature"]["input_specs"] if "user_input" in spec]
        about = f"schema {version['major']}.{version['minor']}, {count(len(graph['nodes']), 'node')}"
        yield f"a program ({about}, {count(len(inputs), 'input')}) with code, which is not read as a checkpoint"
        listed = [f"{device} ×{n:,}" for device, n in devices.most_common()]
        yield f"devices in the program: {some(listed, _SHOWN) or 'none'}"
    except (KeyError, TypeError, ValueError) as error:
        where, got = f"{source.path}: {record}", f"{type(error).__name__}: {error}"
        source.faults.found(MalformedError("this is not the JSON of a program", where=where, got=got))
    if constants in archive.names and (entries := _entries(archive, constants)):
        texts = [f"{name} ({_about(entry)})" for name, entry in entries.items()]
        yield f"{count(len(texts), 'constant')}, not in the state dict: {some(texts, _SHOWN)}"


def _inner_files(names: Mapping[str, Member], checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes about the files of torch.save in the archive: the sample inputs, and those that are not read.

    They are added to `checkpoint`, so that they are searched for dangerous functions.
    """
    for name, saved in names.items():
        if not INNER.fullmatch(name) or saved.method != STORED:
            continue
        is_sample = "_inputs" in name
        try:
            inner = read_inner(saved.stored())
        except InputError as error:  # it may contain objects of any class, and is not converted
            yield f"{'sample inputs that are' if is_sample else name + ' is'} not read: {error.what}"
            continue
        checkpoint.beside[name] = inner
        if is_sample:
            infos = [*inner.tensors.values()]  # many of them can have one long text as their device
            shown = [f"{info.dtype} {[*info.shape]} on {info.device}" for info in infos[:_SHOWN]]
            yield f"sample inputs: {some(shown + [''] * len(infos[_SHOWN:]), _SHOWN) or 'no tensor'}"


def _about(entry: Any) -> str:
    """Return the dtype, shape and device of the constant `entry`, or "an object" if it is not a tensor."""
    try:
        meta = entry["tensor_meta"]
        size = [number["as_int"] for number in meta["sizes"]]
        return f"{_SCALARS[meta['dtype']]} {size} on {device_of(meta['device'])}"
    except (KeyError, TypeError, ValueError):
        return "an object"


def is_device(value: Any) -> bool:
    """Return whether the JSON `value` is a device: an object with a type and perhaps an index, as in torch 2.8."""
    return (
        isinstance(value, dict)
        and "type" in value
        and value.keys() <= {"type", "index"}
        and not isinstance(value["type"], dict | list)
    )


def devices_in(program: Any) -> Iterator[str]:
    """Yield each device in the JSON `program`."""
    todo = [program]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            if is_device(value):
                yield device_of(value)
            else:
                todo += value.values()


def _left_behind(names: Mapping[str, Member], read: set[str]) -> Iterator[LeftBehind]:
    """Yield the records that a copy of the weights does not contain, with their total size by folder.

    `read` are the names of other records, which the weights are read from.
    """
    sizes: Counter[str] = Counter()
    for name, member in names.items():
        is_part = name.startswith(("models/", "data/", "extra/", "serialized_", "extra_files/"))
        if is_part and not name.startswith(_WEIGHTS) and name not in read:
            sizes["/".join(name.split("/")[: 2 if name.startswith("data/") else 1])] += member.size
    for name, size in sizes.items():
        yield LeftBehind(name, size, "part of the program")


def read_json(archive: Archive, name: str, *, exact: bool = False) -> Any:
    """Return the content of the JSON record `name`.

    Raises MalformedError if it is not JSON, LimitError if it is too large, and if `exact` is True, RefusedError if
    writing it as torch does would not give the same bytes.
    """
    member = archive.names[name]
    where = member.where
    check_limit("the JSON of a program is too large", member.size, LIMITS.program_bytes, "bytes", where=where)
    data = record_bytes(member)
    work().grant(work().take_inflated(member.size, member.stored_size), where)
    work().charge(sum(steps * data.count(symbol) for symbol, steps in _STEPS.items()))
    try:
        check_nesting(data)
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the record is not JSON", where=where, got=str(error) or "nested too deeply") from None
    if exact and json.dumps(parsed).encode() != data:
        raise RefusedError("the record is not written as torch writes it, so it is not changed", where=where)
    return parsed
