"""Pickles that are no zip of torch's: its format from before 1.6, and what ``pickle.dump`` wrote. Parsed as every pickle here, which runs nothing.

torch's older format: five pickles one behind another (a magic number, 1001, the machine's sizes, the object, the storages' keys), then for each key the number of elements (8 bytes) and
the storage's bytes. Source: ``_legacy_save`` in ``torch/serialization.py`` of torch 2.13.
"""

from __future__ import annotations

from ckptconv.commands import literal, saved_by_torch
from ckptconv.dangers import dangerous_globals
from ckptconv.dtypes import BY_STORAGE_CLASS
from ckptconv.errors import CkptconvError, InputError, MalformedError, UnsupportedError
from ckptconv.graph import (
    Blob,
    Call,
    Dict,
    Global,
    Graph,
    List,
    Object,
    Py2String,
    Tuple,
    Value,
    is_global,
    uncollected,
)
from ckptconv.pickles import parse
from ckptconv.safe_loader import obstacles, refused_opcodes
from ckptconv.sources import Readable

__all__ = ["LEGACY", "legacy_error", "looks_like_pickle", "pickle_error", "storage_sizes"]

LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch.serialization.MAGIC_NUMBER, pickled
_AGAIN = "download or copy it again"
_NO_WEIGHTS = "it holds no weights; give the file with the weights"
_LEGACY = "a checkpoint in torch's format from before 1.6"
_BEFORE_OBJECT = 3  # pickles
_PROTOCOLS = (2, 3, 4, 5)
_OLD_STARTS = b"(])}cIJKMLNSUVXFG"  # opcodes that a pickle of protocol 0 or 1 can start with
_OLD_MOST = 1 << 20  # bytes of such a pickle that are tried; text is more likely
_SHOWN = 3  # packages
_JOBLIB = b"joblib.numpy_pickle"
_PLAIN = ("builtins", "__builtin__", "collections", "copy_reg", "copyreg", "_codecs", "numpy")
_MOST_ELEMENTS = 1 << 62  # of a storage: torch counts in 64 bits with a sign
_MORE = 4096  # bytes of the start that are searched for joblib's name


def storage_sizes(graph: Graph) -> dict[str, int]:
    """Bytes by key of the storages that GRAPH refers to; what refers to something else, or has no sound size, is left out."""
    sizes: dict[str, int] = {}
    for reference in graph.references:
        items = reference.id.items if isinstance(reference.id, Tuple) else []
        if len(items) < 5 or _text(items[0]) != "storage":
            continue
        cls, key, numel = items[1], _text(items[2]), items[4]
        dtype = BY_STORAGE_CLASS.get(cls.name) if isinstance(cls, Global) else None
        if dtype and key is not None and type(numel) is int and 0 <= numel < _MOST_ELEMENTS:
            sizes[key] = numel * dtype.itemsize
    return sizes


def _text(value: Value) -> str | None:
    if isinstance(value, Py2String):
        return value.data.decode("ascii", "replace")
    return value if isinstance(value, str) else None


# torch's older format


def legacy_error(source: Readable) -> InputError:
    """What is to be said of SOURCE, which starts as torch wrote before 1.6."""
    try:
        with uncollected():
            graph, whole = _read_legacy(source)
    except MalformedError as error:
        if (
            error.got == "persistentid"
        ):  # a class that stands outside the pickle, beside its source code: a whole module
            return _legacy(source, _trusted(source))
        return MalformedError(
            f"{_LEGACY} that was cut short, or damaged, inside its pickles: {error.what}",
            where=source.path,
            hint=_AGAIN,
        )
    except InputError as error:
        return error
    if whole is not None and whole > source.size:
        return MalformedError(
            f"{_LEGACY} that was cut short: {whole - source.size:,} of {whole:,} bytes are missing",
            where=source.path, hint=_AGAIN,
        )  # fmt: skip
    if next(dangerous_globals(graph), None):
        return _legacy(source, "it names what no checkpoint needs: do not load it")
    if refused_opcodes(graph) or any(True for _ in obstacles(graph)):
        return _legacy(source, _trusted(source))
    load = f'torch.load({literal(source.path)}, map_location="cpu", weights_only=True)'
    return _legacy(source, f"save it again: {saved_by_torch(load)}")


def _legacy(source: Readable, hint: str) -> InputError:
    return UnsupportedError(f"{_LEGACY}, which this version does not read", where=source.path, hint=hint)


def _trusted(source: Readable) -> str:
    load = f'torch.load({literal(source.path)}, map_location="cpu")'
    return (
        f"if you trust who made it, load it with {load}, weights_only switched off, and torch.save what you need of it"
    )


def _read_legacy(source: Readable) -> tuple[Graph, int | None]:
    """The object's pickle, and the bytes that the file must have; None where its keys are not those of its storages."""
    where = str(source.path)
    at = 0
    for _ in range(_BEFORE_OBJECT):
        _, at = parse(source.read, source.size, where=where, offset=at)
    graph, at = parse(source.read, source.size, where=where, offset=at)
    sizes = storage_sizes(graph)
    listed, at = parse(source.read, source.size, where=where, offset=at)
    root = listed.root
    keys = [_text(key) for key in root.elements()] if isinstance(root, List) else []
    if any(key not in sizes for key in keys) or len(set(keys)) != len(keys):
        return graph, None
    return graph, at + sum(8 + sizes[key] for key in keys if key is not None)


# Plain pickles


def looks_like_pickle(source: Readable, head: bytes) -> bool:
    """Whether SOURCE, which starts with HEAD, can be a pickle: protocols 2 and higher say so, older ones must parse."""
    if head[:1] == b"\x80":
        return len(head) > 1 and head[1] in _PROTOCOLS
    if head[0] not in _OLD_STARTS or source.size > _OLD_MOST or source.read(source.size - 1, 1) != b".":
        return False
    try:
        _, end = parse(source.read, source.size, where=str(source.path))
    except CkptconvError:
        return False
    return end == source.size


def pickle_error(source: Readable) -> InputError:
    """What the pickle in SOURCE is."""
    joblib = _JOBLIB in source.read(0, min(_MORE, source.size))
    if joblib:  # raw arrays stand between its opcodes
        return UnsupportedError(
            "a file of joblib's, without tensors of torch", where=source.path,
            hint="load it with joblib.load, if you trust who made it, and save its arrays with torch",
        )  # fmt: skip
    try:
        with uncollected():
            graph, end = parse(source.read, source.size, where=str(source.path))
            return _described(source, graph, source.size - end)
    except MalformedError as error:
        return MalformedError(
            f"a pickle that was cut short or damaged: {error.what}", where=error.where, expected=error.expected,
            got=error.got, hint=_AGAIN,
        )  # fmt: skip
    except InputError as error:
        return error


def _described(source: Readable, graph: Graph, behind: int) -> InputError:
    modules = {node.module.partition(".")[0] for node in graph.globals}
    dangers = sorted(dangerous_globals(graph))
    if dangers:
        return UnsupportedError(
            f"a pickle that names what no checkpoint needs ({', '.join(dangers[:_SHOWN])})", where=source.path,
            hint="do not load it",
        )  # fmt: skip
    if storage_sizes(graph):
        return UnsupportedError(
            "the pickle of a torch checkpoint without the storages that belong to it", where=source.path,
            hint="give the whole file, or the folder that it was unpacked to",
        )  # fmt: skip
    if "torch" in modules:
        again = saved_by_torch(f'pickle.Unpickler(open({literal(source.path)}, "rb")).load()', "pickle")
        return UnsupportedError(
            "a pickle.dump of torch objects, which this version does not read", where=source.path,
            hint=f"if you trust who made it, save it again on a machine like the one it was made on: {again}",
        )  # fmt: skip
    arrays = "numpy" in modules
    packages = sorted(modules.difference(_PLAIN))
    inside = ["NumPy arrays"] if arrays else []
    inside += [f"objects of {', '.join(name[:40] for name in packages[:_SHOWN])}"] if packages else []
    within = f", with {' and '.join(inside)} in it" if inside else ""
    more = f", and {behind:,} bytes behind it" if behind else ""
    return UnsupportedError(
        f"a pickle without tensors: {_root(graph.root)}{within}{more}", where=source.path,
        hint="save its arrays with torch: torch.from_numpy makes tensors of them" if arrays else _NO_WEIGHTS,
    )  # fmt: skip


def _root(root: Value) -> str:
    """What the pickle's value is, in Python's words."""
    if isinstance(root, Dict):
        return f"a dict of {_items(sum(1 for _ in root.pairs()))}"
    if isinstance(root, Call):
        name = str(root.callable)[:80] if isinstance(root.callable, Global) else "an unknown class"
        if is_global(root.callable, "copyreg._reconstructor", "copy_reg._reconstructor") and isinstance(
            root.args, Tuple
        ):
            name = str(next((item for item in root.args.items if isinstance(item, Global)), name))[:80]
        return f"an object of {name}"
    if isinstance(root, Object):
        return f"a {type(root).__name__.lower()} of {_items(sum(1 for _ in root.elements()))}"
    if isinstance(root, Tuple):
        return f"a tuple of {_items(len(root.items))}"
    kind = root.kind if isinstance(root, Blob) else "None" if root is None else type(root).__name__.lower()
    return kind if root is None else f"one {kind}"


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"
