"""Recognise zips and pickles that are not checkpoints of torch, and torch zips that are truncated.

Pickles are parsed as everywhere in this package, without running anything.

A truncated zip has no directory. But torch writes ``data.pkl`` first, and ``data.pkl`` contains the size of each
storage. So a lower bound of the number of missing bytes is known: headers and padding between storages are counted as
short as possible. The bound is only reported if the following members are stored and not compressed.

Sources: ``torch/jit/_serialization.py`` and ``torch/export/pt2_archive/constants.py`` of torch 2.13, the "save format"
pages of TorchServe, Stable-Baselines and Stable-Baselines3, Keras' ``save_model``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.dangerous_calls import dangerous_globals
from ckptconv.checkpoint.storage_ids import storage_sizes
from ckptconv.errors import (
    DOWNLOAD_AGAIN,
    CkptconvError,
    DangerousError,
    InputError,
    LimitError,
    MalformedError,
    UnsupportedError,
    count,
    some,
)
from ckptconv.formats.foreign.paths import CHECKPOINT_SUFFIXES
from ckptconv.formats.zip_archive import (
    CENTRAL_SIZE,
    END,
    END_FIELDS,
    END_SIZE,
    LOCAL,
    LOCAL_SIZE,
    LONGEST_END,
    STORED,
    ZIP64_END,
    ZIP64_END_FIELDS,
    ZIP64_END_SIZE,
    ZIP64_LOCATOR_SIZE,
    first_member,
)
from ckptconv.hints import TRUSTED, literal, python_command, saved_by_torch, shell
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, Call, Dict, Global, Graph, Object, Tuple, Value, gc_paused, is_global, kind_of
from ckptconv.pickles.parser import parse

_PICKLE = "data.pkl"
_TAME = regex(r"(?!-)(?!.*\.\.)[\w ./+=@%-]+")  # a name that unzip takes for no option and no pattern
_ZIP64_TAIL = ZIP64_END_SIZE + ZIP64_LOCATOR_SIZE
_METHOD = regex(re.escape(LOCAL) + rb"(?s:.{4}(..))")  # in a local header: two bytes after version and flags
_FOLLOWING = 4096  # bytes after data.pkl, in which a few small records and the first storage start


class ExportedError(UnsupportedError):
    """The error for a torch.export program. :mod:`ckptconv.formats.exported` may be able to read its weights."""


def refuse_foreign_zips(source: Readable, names: list[str]) -> None:
    """Raise an error that says what kind of zip `source` is, unless it is a checkpoint of torch.

    `names` are the names of its members.
    """
    below = _below(name for name in names if "/data/" not in name)  # without the storages, for speed
    if _PICKLE in below and below.isdisjoint(_NO_CHECKPOINT):
        return
    path = str(source.path)
    error = next(chain(_kinds_of_torch(path, names, _below(names)), _other_kinds(path, names)))
    error.where = source.path
    raise error


def _below(names: Iterable[str]) -> frozenset[str]:
    """Return `names` as torch looks for them: without the folder at the root, and in lower case."""
    return frozenset(name.partition("/")[2].casefold() for name in names)


_PROGRAM = "serialized_exported_program.json"  # torch 2.1 to 2.7
_PACKAGE = ".data/extern_modules"
#: Members that other readers of torch look for, which then run code next to them. An archive with one of them is not a
#: checkpoint, even with ``data.pkl``.
_NO_CHECKPOINT = ("attributes.pkl", "archive_format", _PROGRAM, _PACKAGE)


def _kinds_of_torch(path: str, names: list[str], below: frozenset[str]) -> Iterator[InputError]:
    """Yield the error for each kind of torch archive that is not a checkpoint, if the archive at `path` is of it.

    `names` are the members, and `below` their names without the root folder, in lower case.
    """
    has_code = "model.json" in below and any(name.startswith("code/") for name in below)  # torch 1.0 to 1.2
    if has_code or not below.isdisjoint(("constants.pkl", "attributes.pkl")):
        weights = saved_by_torch(f'torch.jit.load({literal(path)}, map_location="cpu").state_dict()')
        yield UnsupportedError(
            "a TorchScript archive from torch before 1.3, which today's torch does not read either",
            hint="save only its weights, with torch 1.13, which reads it: " + weights,
        )
    # torch.export.load wants a program, and finds none next to the machine code
    folders = {name.rpartition("/")[0] for name in below}
    if "models" not in folders and any(folder.startswith("data/aotinductor/") for folder in folders):
        yield UnsupportedError(
            "a .pt2 archive of AOTInductor, which contains a compiled program",
            hint="save the weights of the model that it was compiled from",
        )
    if not below.isdisjoint(("archive_format", _PROGRAM)) or _PROGRAM in names:
        weights = saved_by_torch(f"torch.export.load({literal(path)}).state_dict")
        yield ExportedError(
            "a .pt2 archive (torch.export), which contains a program, not only weights",
            hint=f"{TRUSTED}, save only its weights: " + weights,
        )
    if _PACKAGE in below:
        yield UnsupportedError(
            "a torch.package archive, which contains a program, not only weights",
            hint="load it with torch.package.PackageImporter, which runs its code, and save its state dict",
        )
    if _PICKLE in names:
        zipped = python_command("-m", "zipfile", "-c", "out.pt", "out")
        yield MalformedError(
            "torch's records without the folder that they must be in",
            expected=f"a member FOLDER/{_PICKLE}",
            hint=f"zip them again: {shell('unzip', path, '-d', 'out')} && " + zipped,
        )


def _other_kinds(path: str, names: list[str]) -> Iterator[InputError]:
    """Yield the error for each kind of archive of other programs that fits. The last kind always fits."""
    members = set(names)
    checkpoint = next((name for name in names if name.endswith(CHECKPOINT_SUFFIXES)), None)
    listed = some([name[:80] for name in dict.fromkeys(names)])

    def inside(what: str, purpose: str, name: str | None) -> UnsupportedError:
        """Return the error about `what`, with the command that extracts the member `name` for `purpose`.

        The command extracts all members if `name` is None or could be misread as an option or a pattern.
        """
        command = shell("unzip", path, *([name] if name and _TAME.fullmatch(name) else []))
        return UnsupportedError(what, hint=f"{purpose if name else 'unpack it'}: {command}")

    if "MAR-INF/MANIFEST.json" in members:
        what = "a TorchServe model archive (.mar), which contains a program and a checkpoint"
        yield inside(what, "take the checkpoint out", checkpoint)
    if members >= {"data", "parameters", "parameter_list"}:
        what = "a model of Stable-Baselines 2 (TensorFlow), its weights as NumPy arrays inside a zip"
        yield inside(what, "take them out", "parameters")
    if members >= {"data", "policy.pth"}:
        yield inside("a model of Stable-Baselines3, its checkpoints inside a zip", "take one out", "policy.pth")
    if members >= {"config.json", "metadata.json", "model.weights.h5"}:
        yield UnsupportedError("a Keras model (.keras)", hint="load it with Keras and save its weights with torch")
    if names and all(name.endswith(".npy") for name in names):
        arrays = f"{{k: torch.from_numpy(v) for k, v in numpy.load({literal(path)}).items()}}"
        hint = "save them with torch: " + saved_by_torch(arrays, "numpy")
        yield UnsupportedError(f"NumPy arrays (.npz): {listed}", hint=hint)
    if checkpoint:
        yield inside(f"a zip archive with a checkpoint in it: {checkpoint}", "take it out", checkpoint)
    what = f"a zip archive, but not of torch: {listed or 'it is empty'}"
    yield UnsupportedError(what, expected=f"a member FOLDER/{_PICKLE}")


# Truncated and displaced zips


def cut_short(source: Readable) -> InputError:
    """Return the error for `source`, a zip archive without its end. If known, it says how many bytes are missing."""
    name, method, data_offset = first_member(source) or ("", STORED, 0)
    root, _, record = name.rpartition("/")
    if record != _PICKLE or method != STORED:
        return _damaged(source, "a zip archive that was truncated: its end is missing")
    try:
        with gc_paused():
            graph, end = parse(source.read, source.size, where=f"{source.path}: {_PICKLE}", offset=data_offset)
            sizes = storage_sizes(graph)
    except LimitError as error:
        return error
    except InputError as error:
        what = f"a torch checkpoint that was truncated, or damaged, inside {_PICKLE}, its first record: {error.what}"
        return _damaged(source, what)
    names = [len(f"{root}/data/{key}".encode("utf-8", "surrogatepass")) for key in sizes]
    headers = sum(LOCAL_SIZE + CENTRAL_SIZE + 2 * length for length in names)
    least = end + sum(sizes.values()) + headers + CENTRAL_SIZE + len(name.encode()) + END_SIZE
    # The members that start soon after data.pkl must be there and stored: a compressed storage can have any size.
    following = source.read(end, min(_FOLLOWING, source.size - end))
    methods = {int.from_bytes(match[1], "little") for match in _METHOD.finditer(following)}
    if least <= source.size or methods != {STORED}:
        return _damaged(source, "a torch checkpoint that was truncated: the zip archive's end is missing")
    missing = f"at least {least - source.size:,} of about {least:,} bytes missing"
    return _damaged(source, f"a torch checkpoint that was truncated: {missing}")


def _damaged(source: Readable, what: str) -> MalformedError:
    return MalformedError(what, where=source.path, hint=DOWNLOAD_AGAIN)


def displaced(source: Readable) -> InputError | None:
    """Return the error for `source` if it is a zip archive with bytes missing or added at its start.

    Otherwise return None.
    """
    start = max(0, source.size - LONGEST_END)
    tail = source.read(start, source.size - start)
    at = tail.rfind(END)
    if at < 0 or len(tail) - at < END_SIZE:
        return None
    *_, members, size, offset, comment = END_FIELDS.unpack_from(tail, at)
    if at + END_SIZE + comment != len(tail) or not members:
        return None
    if tail[at - _ZIP64_TAIL :][:4] == ZIP64_END and at >= _ZIP64_TAIL:
        at -= _ZIP64_TAIL
        *_, size, offset = ZIP64_END_FIELDS.unpack_from(tail, at)
    before = start + at - size - offset
    if before < 0:
        return _damaged(source, f"a zip archive without its start: {count(-before, 'byte')} missing")
    if before == 0 or before + 4 > source.size or source.read(before, 4) != LOCAL:
        return _damaged(source, "a zip archive whose start is damaged")
    return MalformedError(
        f"a zip archive with {count(before, 'byte')} before it",
        where=source.path,
        hint=f"remove them:  {shell('tail', '-c', f'+{before + 1}', source.path)} > out.pt",
    )


LOADER = "torch.storage._load_from_bytes"  #: The function by which a plain pickle contains a storage.
_PROTOCOLS = (2, 3, 4, 5)
_OLD_STARTS = b"(])}cIJKMLNSUVXFG"  # opcodes that a pickle of protocol 0 or 1 can start with
_SHOWN = 3  # packages
_PLAIN = ("builtins", "__builtin__", "collections", "copy_reg", "copyreg", "_codecs", "numpy")
_MORE = 4096  # bytes of the start that are searched for joblib's name


def looks_like_pickle(source: Readable, head: bytes) -> bool:
    """Return whether `source`, which starts with `head`, can be a pickle.

    Protocols 2 and higher are recognised by the first bytes. For protocols 0 and 1, the complete file is parsed.
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
    """Return the error that says what the pickle in `source`, which contains no tensors, is."""
    if b"joblib.numpy_pickle" in source.read(0, min(_MORE, source.size)):  # raw arrays are between its opcodes
        return UnsupportedError(
            "a joblib file without torch tensors",
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


def _described(source: Readable, graph: Graph, following: int) -> InputError:
    """Return the error that says what `graph`, the pickle in `source`, contains.

    `following` is the number of bytes after the pickle.
    """
    dangers = sorted({*dangerous_globals(graph)} - {LOADER})
    if dangers:
        return DangerousError(
            f"a pickle with functions that no checkpoint needs ({', '.join(dangers[:_SHOWN])})",
            where=source.path,
            hint="do not load it",
        )
    if storage_sizes(graph):
        return UnsupportedError(
            "the pickle of a torch checkpoint without its storages",
            where=source.path,
            hint="give the whole file, or the folder that it was unpacked into",
        )
    modules = {node.module.partition(".")[0] for node in graph.globals}
    packages = sorted(modules.difference(_PLAIN))
    inside = ["NumPy arrays"] if "numpy" in modules else []
    inside += [f"objects of {', '.join(name[:40] for name in packages[:_SHOWN])}"] if packages else []
    within = f", with {' and '.join(inside)} in it" if inside else ""
    more = f", and {count(following, 'byte')} after it" if following else ""
    return UnsupportedError(
        f"a pickle without tensors: {_root(graph.root)}{within}{more}",
        where=source.path,
        hint="save its arrays with torch: torch.from_numpy makes tensors of them"
        if "numpy" in modules
        else "it contains no weights; use the file with the weights",
    )


def _root(root: Value) -> str:
    """Return a description of the pickle's value `root`, such as "a dict of 3 items"."""
    if isinstance(root, Dict):
        return f"a dict of {count(sum(1 for _ in root.pairs()), 'item')}"
    if isinstance(root, Call):
        name: Value = root.callable
        if is_global(name, "copyreg._reconstructor", "copy_reg._reconstructor") and isinstance(root.args, Tuple):
            name = next((item for item in root.args.items if isinstance(item, Global)), name)
        return f"an object of {str(name)[:80] if isinstance(name, Global) else 'an unknown class'}"
    if isinstance(root, Object):
        return f"a {kind_of(root)} of {count(sum(1 for _ in root.elements()), 'item')}"
    if isinstance(root, Tuple):
        return f"a tuple of {count(len(root.items), 'item')}"
    if root is None:
        return "None"
    return f"one {root.kind if isinstance(root, Blob) else kind_of(root)}"
