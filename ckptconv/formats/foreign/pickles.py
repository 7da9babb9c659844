"""Recognise pickles that hold no tensors.

They are parsed like every pickle here, which runs nothing.
"""

from __future__ import annotations

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.dangerous_calls import dangerous_globals
from ckptconv.checkpoint.storage_ids import storage_sizes
from ckptconv.errors import (
    DOWNLOAD_AGAIN,
    CkptconvError,
    DangerousError,
    InputError,
    MalformedError,
    UnsupportedError,
    count,
)
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Dict,
    Global,
    Graph,
    Object,
    Tuple,
    Value,
    gc_paused,
    is_global,
)
from ckptconv.pickles.parser import parse

LOADER = "torch.storage._load_from_bytes"  #: by which a plain pickle holds a storage, and nothing else does
_NO_WEIGHTS = "it holds no weights; give the file with the weights"
_PROTOCOLS = (2, 3, 4, 5)
_OLD_STARTS = b"(])}cIJKMLNSUVXFG"  # opcodes that a pickle of protocol 0 or 1 can start with
_SHOWN = 3  # packages
_JOBLIB = b"joblib.numpy_pickle"
_PLAIN = ("builtins", "__builtin__", "collections", "copy_reg", "copyreg", "_codecs", "numpy")
_MORE = 4096  # bytes of the start that are searched for joblib's name


def looks_like_pickle(source: Readable, head: bytes) -> bool:
    """Whether `source`, which starts with `head`, can be a pickle: protocols 2 and higher say so, older ones must
    parse.
    """
    if head[:1] == b"\x80":
        return len(head) > 1 and head[1] in _PROTOCOLS
    if (
        head[0] not in _OLD_STARTS
        or source.size > LIMITS.unmarked_pickle_bytes
        or source.read(source.size - 1, 1) != b"."
    ):
        return False
    try:
        _, end = parse(source.read, source.size, where=str(source.path))
    except CkptconvError:
        return False
    return end == source.size


def pickle_error(source: Readable) -> InputError:
    """What the pickle in `source` is."""
    joblib = _JOBLIB in source.read(0, min(_MORE, source.size))
    if joblib:  # raw arrays stand between its opcodes
        return UnsupportedError(
            "a file of joblib's, without tensors of torch",
            where=source.path,
            hint="load it with joblib.load, if you trust who made it, and save its arrays with torch",
        )
    try:
        with gc_paused():
            graph, end = parse(source.read, source.size, where=str(source.path))
            return _described(source, graph, source.size - end)
    except MalformedError as error:
        return MalformedError(
            f"a pickle that was truncated or damaged: {error.what}",
            where=error.where,
            expected=error.expected,
            got=error.got,
            hint=DOWNLOAD_AGAIN,
        )
    except InputError as error:
        return error


def _described(source: Readable, graph: Graph, behind: int) -> InputError:
    modules = {node.module.partition(".")[0] for node in graph.globals}
    dangers = sorted({*dangerous_globals(graph)} - {LOADER})
    if dangers:
        return DangerousError(
            f"a pickle that names what no checkpoint needs ({', '.join(dangers[:_SHOWN])})",
            where=source.path,
            hint="do not load it",
        )
    if storage_sizes(graph):
        return UnsupportedError(
            "the pickle of a torch checkpoint without the storages that belong to it",
            where=source.path,
            hint="give the whole file, or the folder that it was unpacked to",
        )
    arrays = "numpy" in modules
    packages = sorted(modules.difference(_PLAIN))
    inside = ["NumPy arrays"] if arrays else []
    inside += [f"objects of {', '.join(name[:40] for name in packages[:_SHOWN])}"] if packages else []
    within = f", with {' and '.join(inside)} in it" if inside else ""
    more = f", and {count(behind, 'byte')} behind it" if behind else ""
    return UnsupportedError(
        f"a pickle without tensors: {_root(graph.root)}{within}{more}",
        where=source.path,
        hint="save its arrays with torch: torch.from_numpy makes tensors of them" if arrays else _NO_WEIGHTS,
    )


def _root(root: Value) -> str:
    """What the pickle's value is, in Python's words."""
    if isinstance(root, Dict):
        return f"a dict of {count(sum(1 for _ in root.pairs()), 'item')}"
    if isinstance(root, Call):
        name = str(root.callable)[:80] if isinstance(root.callable, Global) else "an unknown class"
        if is_global(root.callable, "copyreg._reconstructor", "copy_reg._reconstructor") and isinstance(
            root.args, Tuple
        ):
            name = str(next((item for item in root.args.items if isinstance(item, Global)), name))[:80]
        return f"an object of {name}"
    if isinstance(root, Object):
        return f"a {type(root).__name__.lower()} of {count(sum(1 for _ in root.elements()), 'item')}"
    if isinstance(root, Tuple):
        return f"a tuple of {count(len(root.items), 'item')}"
    kind = root.kind if isinstance(root, Blob) else "None" if root is None else type(root).__name__.lower()
    return kind if root is None else f"one {kind}"
