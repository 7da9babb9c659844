"""Mutants: real files of many kinds, each with a change that torch would not write.

There are four levels of changes. ``byte`` changes bytes of the file, with the old checksums of an archive, or bytes of
the pickle, with correct checksums. ``opcode`` changes opcodes of the pickle. ``argument`` changes an argument of a
call, a state, a key or a persistent id. ``container`` changes the records around the pickle, or the other pickles of
the older format.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save as save_safetensors
from torch import nn

from ckptconv.checkpoint.safe_globals import ALLOWED
from ckptconv.pickles.emitter import emit
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Dict,
    Effect,
    Global,
    Graph,
    List,
    Object,
    PersistentId,
    Set,
    Tuple,
    Value,
    children,
    walk,
)
from ckptconv.pickles.parser import parse
from tests.fuzz import mutators, opcodes
from tests.fuzz.archives import Record, archive, records_of
from tests.fuzz.mutators import MUTATORS, noise
from tests.support import zoo
from tests.support.legacy_files import legacy_file, storage_id
from tests.support.paths import ROOT
from tests.support.reduced import Reduced

__all__ = ["LEVELS", "kinds", "mutant"]

_LARGEST = 100_000  # in bytes: most changes of a larger file would have no effect
#: Objects of the zoo that are too large.
_TOO_LARGE = ("long_values", "numpy_objects")
_PROTOCOLS = {"state_dict": (3, 4, 5), "allowed": (4,), "views": (4,), "training": (5,)}
_LEGACY = (
    "state_dict", "views", "ties", "parameters", "sparse", "quantized", "small", "training", "conj_neg", "atoms",
    "allowed",
)  # a table  # fmt: skip


def _saved(obj: Any, **kwargs: Any) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo.save(obj, stream, **kwargs)
    return stream.getvalue()


@cache
def kinds() -> dict[str, bytes]:
    """Return real files of many kinds by name, as torch, pickle and safetensors write them."""
    torch.manual_seed(0)
    found = dict(_of_zoo())
    found.update(_of_other_writers(found["state_dict"]))
    found.update((path.stem, path.read_bytes()) for path in sorted((ROOT / "fixtures").glob("*.pt")))
    return {name: data for name, data in found.items() if len(data) < _LARGEST}


def _of_zoo() -> Iterator[tuple[str, bytes]]:
    for name, build in zoo.ZOO.items():
        if name in _TOO_LARGE:
            continue
        obj = build()
        yield name, _saved(obj, pickle_protocol=zoo.NEEDS_PROTOCOL.get(name, 2))
        for protocol in _PROTOCOLS.get(name, ()):
            yield f"{name}, protocol {protocol}", _saved(obj, pickle_protocol=protocol)
        if name in _LEGACY:
            yield f"{name}, before 1.6", _saved(obj, _use_new_zipfile_serialization=False)
    yield "kinds", _saved(_mixed())
    yield "kinds, before 1.6", _saved(_mixed(), _use_new_zipfile_serialization=False)


def _mixed() -> Any:
    """Return a dict with an example of nearly every object that torch's safe loader accepts."""
    base = torch.arange(12.0)
    attributed: Any = nn.Parameter(base[:3].clone())
    attributed.note = {"a": 1}
    return {
        "view": base[2:8].view(2, 3),
        "parameter": nn.Parameter(base),
        "attributed": attributed,
        "coo": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(base, 0.1, 3, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "meta": torch.ones(2, device="meta"),
        "float8": torch.ones(3).to(torch.float8_e5m2),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "set": {1, "a", (2, "b")},
        "bytes": b"\xff\0",
        "bytearray": bytearray(b"ab"),
        "complex": 1 + 2j,
        "size": torch.Size([1, 2]),
        "device": torch.device("cuda:1"),
        "dtype": torch.float16,
        ("a", 1): [1, 2.5, None, True],
    }


def _of_other_writers(state: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield files that the current version of ``torch.save`` does not write."""
    records = records_of(state)
    assert records is not None
    yield "without byteorder", archive([r for r in records if not r.name.endswith((b"byteorder", b"_id", b"ment"))])
    yield "big-endian", archive([replace(r, data=b"big") if r.name.endswith(b"byteorder") else r for r in records])
    yield "deflated", archive([replace(r, deflated=True) for r in records])
    yield "without checksums", archive([replace(r, checked=False) for r in records])
    yield "zip64", archive(records, zip64=True, comment=b"x")
    yield (
        "skip_data",
        archive([replace(r, checked=b"/data/" not in r.name) for r in records]),
    )
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        for record in records:
            written.writestr(record.name.decode(), record.data)
    yield "zipfile", stream.getvalue()
    scripted = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), scripted)
    yield "TorchScript", scripted.getvalue()
    yield "plain pickle", pickle.dumps({"a": torch.ones(2)}, 2)
    yield (
        "safetensors",
        save_safetensors({"a": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.int64)}, {"format": "pt"}),
    )
    view = storage_id(torch.FloatStorage, "1", "cuda:0", 4, ("2", 1, 2))
    tensor = Reduced(torch._utils._rebuild_tensor, (view, 0, (2,), (1,)))
    yield "a part of a storage", legacy_file({"a": tensor}, {"1": (4, bytes(16))})
    yield "Python 2", legacy_file({"a": tensor}, {"1": (4, bytes(16))}, python2=True)
    whole = storage_id(torch.FloatStorage, "1", "cpu", 4)
    old = Reduced(torch.FloatTensor, (), (whole, 0, (2, 2), (2, 1)))
    yield (
        "before 0.4",
        legacy_file(OrderedDict(a=Reduced(nn.Parameter, (old,), (True, False, OrderedDict()))), {"1": (4, bytes(16))}),
    )


# Mutants


def mutant(data: bytes, level: str, random: Random) -> bytes:
    """Return a changed copy of a file.

    Args:
        data: A file of any kind.
        level: One of :data:`LEVELS`.
        random: The source of all randomness.

    Returns:
        The changed file, which can equal `data` by chance.
    """
    return LEVELS[level](data, random)


def _bytes(data: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return noise(data, random)
    return _with_pickle(data, random, lambda pickled: noise(pickled, random))


def _opcodes(data: bytes, random: Random) -> bytes:
    return _with_pickle(data, random, lambda p: opcodes.changed(p, random, lambda part: noise(part, random)))


def _container(data: bytes, random: Random) -> bytes:
    if data[:2] == b"PK":
        records = records_of(data)
        if records is None:
            return noise(data, random)
        for _ in range(random.choice((1, 1, 2))):
            records = _other_records(records, random)
        return archive(records, zip64=random.random() < 0.3, comment=random.choice((b"", b"", b"", b"comment")))
    target = "safetensors" if data[8:9] == b"{" else "legacy"
    return MUTATORS[target](data, random, lambda part: noise(part, random))


_NOTES = (
    b"3\n", b"1", b"0", b"10", b"11", b"99", b"+3", b" 3", b"3x", b"x", b"", b"-3", b"little", b"big", b"64", b"\xff",
    b"1" * 30, b"0x3", b"3\0",
)  # a table  # fmt: skip
_NAMES = (
    b"data.pkl", b"data/0", b"data/1", b"Data/0", b"version", b"byteorder", b".format_version", b".storage_alignment",
    b".data/serialization_id", b".data/version", b".DATA/version", b"constants.pkl", b"CONSTANTS.pkl", b"code/x.py",
    b"a\0b", b"\xff", b"data/", b"x" * 600, b"x" * 500 + b"\xc3\xa9" * 9, b"",
)  # a table  # fmt: skip


def _other_records(records: list[Record], random: Random) -> list[Record]:
    i = random.randrange(len(records))
    record = records[i]
    root = record.name.split(b"/")[0]
    what = random.randrange(9)
    if what == 0:
        return [*records[:i], *records[i + 1 :]]
    if what == 1:
        return [*records, Record(root + b"/" + random.choice(_NAMES), random.choice(_NOTES))]
    if what == 2:
        notes = [n for n, each in enumerate(records) if len(each.data) < 64]
        i = random.choice(notes or [i])
        return [*records[:i], replace(records[i], data=random.choice(_NOTES)), *records[i + 1 :]]
    if what == 3:
        new = random.choice((b"a", b"", b".", b"x" * 510, b"x" * 511, b"x" * 5000, b"\xff", "é".encode(), b"a b"))
        return [replace(each, name=new + each.name[len(root) :]) for each in records]
    if what == 4:
        return random.sample(records, len(records))
    if what == 5:
        return [*records[:i], replace(record, name=root + b"/" + random.choice(_NAMES)), *records[i + 1 :]]
    if what == 6:
        turned = [
            replace(record, deflated=not record.deflated),
            replace(record, checked=not record.checked),
            replace(record, descriptor=not record.descriptor),
            replace(record, aligned=not record.aligned),
        ]
        return [*records[:i], random.choice(turned), *records[i + 1 :]]
    if what == 7:
        return [*records[:i], replace(record, data=noise(record.data, random)), *records[i + 1 :]]
    return [*records[:i], record.lying(random), *records[i + 1 :]]


def _with_pickle(data: bytes, random: Random, change: Callable[[bytes], bytes]) -> bytes:
    """Return `data` with its pickle changed by `change`, and usually with storages that fit the changed pickle."""
    if data[:2] == b"PK":
        records = records_of(data)
        main = next((i for i, r in enumerate(records or ()) if r.name.endswith(b"/data.pkl")), None)
        if records is None or main is None:
            return noise(data, random)
        records[main] = replace(records[main], data=change(records[main].data))
        return archive(mutators.fitting(records, random) if random.random() < 0.9 else records)
    pickles, rest = mutators.pickles_of(data)
    if len(pickles) == 5:
        pickles[3] = change(pickles[3])
        storages = mutators.storages_of(pickles[3])
        if storages and random.random() < 0.9:
            pickles[4] = pickle.dumps([*storages], 2)
            rest = b"".join(struct.pack("<q", numel) + random.randbytes(size) for numel, size in storages.values())
        return b"".join(pickles) + rest
    return change(data) if pickles else noise(data, random)


# Arguments


def _arguments(data: bytes, random: Random) -> bytes:
    return _with_pickle(data, random, lambda pickled: _other_arguments(pickled, random))


def _other_arguments(pickled: bytes, random: Random) -> bytes:
    """Return the pickle with one to three values changed, usually written with opcodes that the safe loader knows."""
    try:
        graph, _ = parse(lambda at, length: pickled[at : at + length], len(pickled), where="")
    except Exception:
        return pickled
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change_somewhere(graph, random)
    for node in walk([graph.root]):  # calls are written in the order of the graph
        if isinstance(node, (Call, PersistentId)):
            node.order = None
        for effect in node.effects if isinstance(node, Object) else ():
            effect.order = None
    if _is_made_of_itself(graph.root):
        return pickled
    pieces = emit(graph, loadable=random.random() < 0.97)
    return b"".join(pickled[p.offset : p.offset + p.length] if isinstance(p, Blob) else p for p in pieces)


def _is_made_of_itself(root: Value) -> bool:
    """Return whether an object below `root` contains itself in a way that no pickle can create."""
    made: set[int] = set()
    open_: set[int] = set()
    todo: list[tuple[Value, bool]] = [(node, False) for node in walk([root])]
    while todo:
        node, entered = todo.pop()
        if entered:
            open_.discard(id(node))
            made.add(id(node))
        elif id(node) in open_:
            return True
        elif id(node) not in made and isinstance(node, (Call, Tuple, PersistentId)):
            open_.add(id(node))
            todo.append((node, True))
            parts = [node.callable, node.args, node.kwargs] if isinstance(node, Call) else children(node)
            todo += [(part, False) for part in parts]
    return False


def _change_somewhere(graph: Graph, random: Random) -> None:
    nodes = list(walk([graph.root]))
    calls = [node for node in nodes if isinstance(node, Call)]
    what = random.randrange(10)
    if what < 6 and calls:
        _change_call(random.choice(calls), nodes, random)
    elif what == 6:
        tuples = [node for node in nodes if isinstance(node, Tuple) and node.items]
        if tuples:
            _change_items(random.choice(tuples).items, nodes, random)
    elif what == 7:
        changed = [node for node in nodes if isinstance(node, Object) and node.effects]
        if changed:
            effect = random.choice(random.choice(changed).effects)
            if effect.values:
                effect.values[random.randrange(len(effect.values))] = _value(nodes, random)
    elif what == 8:
        objects = [node for node in nodes if isinstance(node, Object)]
        if objects:
            _add_effect(random.choice(objects), nodes, random)
    else:
        references = [node for node in nodes if isinstance(node, PersistentId) and isinstance(node.id, Tuple)]
        if references:
            node = random.choice(references)
            assert isinstance(node.id, Tuple)
            node.id = Tuple([*node.id.items])
            _change_items(node.id.items, nodes, random)


def _change_call(call: Call, nodes: list[Any], random: Random) -> None:
    what = random.randrange(8)
    if what == 0:
        call.callable = _a_global(random)
    elif what == 1:
        call.kind = random.choice(("REDUCE", "NEWOBJ"))
    elif isinstance(call.args, Tuple):
        call.args = Tuple([*call.args.items])
        _change_items(call.args.items, nodes, random)


def _change_items(items: list[Value], nodes: list[Any], random: Random) -> None:
    what = random.randrange(10)
    if what == 0 and items:
        del items[random.randrange(len(items))]
    elif what == 1 or not items:
        items.insert(random.randrange(len(items) + 1), _value(nodes, random))
    elif what == 2:
        i, j = random.randrange(len(items)), random.randrange(len(items))
        items[i], items[j] = items[j], items[i]
    elif what < 6:
        i = random.randrange(len(items))
        items[i] = _near(items[i], nodes, random)
    else:
        items[random.randrange(len(items))] = _value(nodes, random)


def _add_effect(target: Object, nodes: list[Any], random: Random) -> None:
    opcode = {List: "APPENDS", Dict: "SETITEMS", Set: "ADDITEMS"}.get(type(target))
    if opcode is None:
        opcode = random.choice(("BUILD", "BUILD", "SETITEMS", "APPENDS"))
    n = {"BUILD": 1, "SETITEMS": 2}.get(opcode, 1)
    target.add(Effect(opcode, [_value(nodes, random) for _ in range(n)], None))


_ATOMS: tuple[Value, ...] = (
    None, True, False, 0, 1, 2, 3, 4, 7, 8, 12, -1, -2, 63, 64, 65, 127, 255, 256, 1 << 31, 1 << 40, 1 << 62,
    1 << 63, 1 << 64, 1 << 70, -(1 << 63), 1 << 2000, 0.0, 1.0, -1.5, float("nan"), float("inf"), 1e300, "", "a", "cpu",
    "cuda", "cuda:0", "cuda:00", "cuda:300", "foo", "meta", "mps:1", "conj", "neg", "latin1", "utf-8", "rot13", "ascii",
    "\u0100", "\ud800", "torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.jagged", "storage", "0", "1",
    "requires_grad", "data", "grad", "shape", "note", "__class__", "__dict__", "_backward_hooks", "x" * 300,
)  # a table  # fmt: skip


def _near(value: Value, nodes: list[Any], random: Random) -> Value:
    """Return a value that is close to `value`."""
    if isinstance(value, bool) or value is None:
        return random.choice((True, False, None, 0, 1))
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, 2 * value, value // 2, float(value % 1000), bool(value)))
    if isinstance(value, str):
        return random.choice((value + "x", value[:-1], value.upper(), *_ATOMS[-30:]))
    if isinstance(value, Tuple):
        items = [*value.items]
        if random.random() < 0.3:
            made = List()
            made.add(Effect("APPENDS", items, None))
            return made
        _change_items(items, nodes, random)
        return Tuple(items)
    if isinstance(value, Global):
        return _a_global(random)
    return _value(nodes, random)


def _a_global(random: Random) -> Global:
    module, _, name = random.choice(sorted(ALLOWED)).rpartition(".")
    return Global(module, name)


def _value(nodes: list[Any], random: Random) -> Value:
    """Return a random value: an atom, a part of the file, a global, a new call or a new container."""
    what = random.randrange(12)
    if what < 5:
        return random.choice(_ATOMS)
    if what < 8:
        picked = random.choice(nodes)
        parts: list[Value] = [picked, *children(picked)]
        return random.choice(parts)
    if what == 8:
        return _a_global(random)
    if what == 9:
        return Call("REDUCE", _a_global(random), Tuple([_value(nodes, random) for _ in range(random.randrange(3))]))
    values = [_value(nodes, random) for _ in range(random.randrange(4))]
    if what == 10:
        return Tuple(values)
    made: Object = random.choice((List, Dict, Set))()
    if isinstance(made, Dict):
        values = [*values, *values][: len(values) * 2 // 2 * 2]
        made.add(Effect("SETITEMS", values[: len(values) // 2 * 2], None))
    else:
        made.add(Effect("APPENDS" if isinstance(made, List) else "ADDITEMS", values, None))
    return made


#: Functions that change data, by the part of the file that they change.
LEVELS: dict[str, Callable[[bytes, Random], bytes]] = {
    "byte": _bytes,
    "opcode": _opcodes,
    "argument": _arguments,
    "container": _container,
}


def write(folder: Path) -> list[Path]:
    """Write each kind to a separate file in `folder`, with a suffix for its format. Return the paths."""
    paths = []
    for name, data in kinds().items():
        suffix = ".safetensors" if name.startswith("safetensors") else ".pt"
        paths.append(folder / (name.replace(" ", "_").replace(",", "") + suffix))
        paths[-1].write_bytes(data)
    return paths
