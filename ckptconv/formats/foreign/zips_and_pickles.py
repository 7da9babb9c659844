"""Recognise zips that are no torch checkpoint, and torch zips that are truncated.

A zip without its end has no directory. But torch writes ``data.pkl`` first, and that says how large each storage is, so
what is left of the file says how much is missing at least: headers and padding between the storages are counted as
short as a zip can have them. Only where what is left is stored and not compressed.

Sources: ``torch/jit/_serialization.py`` and ``torch/export/pt2_archive/constants.py`` of torch 2.13, TorchServe's,
Stable-Baselines' and Stable-Baselines3's "save format" pages, Keras' ``save_model``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

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
_TAME = regex(r"(?!-)(?!.*\.\.)[\w ./+=@%-]+")  # what unzip takes for a name and not for an option or a pattern
_ZIP64_TAIL = ZIP64_END_SIZE + ZIP64_LOCATOR_SIZE
_METHOD = regex(re.escape(LOCAL) + rb"(?s:.{4}(..))")  # of a local header: two bytes behind version and flags
_BEHIND = 4096  # bytes behind data.pkl, in which a few small records and the first storage start


class _Names(NamedTuple):
    """The archive's names, whole, and below the folder at its root, there without regard to case: so torch looks for
    them.
    """

    path: str
    whole: dict[str, None]  # in the directory's order
    below: frozenset[str]

    def unzip(self, name: str) -> str:
        """The command that takes the member `name` out."""
        return shell("unzip", self.path, name) if _TAME.fullmatch(name) else shell("unzip", self.path)

    @property
    def checkpoint(self) -> str | None:
        """The first member that is a checkpoint by its name."""
        return next((name for name in self.whole if name.endswith(CHECKPOINT_SUFFIXES)), None)


class _Row(NamedTuple):
    """A kind of archive: whether names are of it, and the error that says so."""

    fits: Callable[[_Names], object]
    error: Callable[[_Names], InputError]


def refuse_foreign_zips(source: Readable, names: list[str]) -> None:
    """Raise what a zip archive of `names` is if it is none of torch's checkpoints."""
    below = frozenset(name.partition("/")[2].casefold() for name in names)
    if _PICKLE in below and below.isdisjoint(_NO_CHECKPOINT):
        return
    found = _Names(str(source.path), dict.fromkeys(names), below)
    error = next(row.error(found) for row in _ROWS if row.fits(found))
    error.where = source.path
    raise error


# Whose it is

_PROGRAM = "serialized_exported_program.json"  # torch 2.1 to 2.7
_PACKAGE = ".data/extern_modules"
#: What other readers of torch's own look for, and run what stands beside it: not even with ``data.pkl`` a checkpoint.
_NO_CHECKPOINT = ("attributes.pkl", "archive_format", _PROGRAM, _PACKAGE)


def _is_old_torchscript(names: _Names) -> bool:
    old = "model.json" in names.below and any(name.startswith("code/") for name in names.below)  # torch 1.0 to 1.2
    return old or not names.below.isdisjoint(("constants.pkl", "attributes.pkl"))


def _is_compiled(names: _Names) -> bool:
    """Whether ``torch.export.load``, which wants a program, finds none beside machine code."""
    parts = {name.rpartition("/")[0] for name in names.below}
    return "models" not in parts and any(part.startswith("data/aotinductor/") for part in parts)


def _unzipped(names: _Names, to: str, inner: str | None) -> str:
    return f"{to}: {names.unzip(inner)}" if inner else f"unpack it: {shell('unzip', names.path)}"


def _listed(names: _Names) -> str:
    return some([name[:80] for name in names.whole])


#: The first that fits is right.
_ROWS = (
    _Row(
        _is_old_torchscript,
        lambda names: UnsupportedError(
            "a TorchScript archive as torch wrote it before 1.3, which today's torch does not read either",
            hint="save its weights alone with torch 1.13, which does: "
            + saved_by_torch(f'torch.jit.load({literal(names.path)}, map_location="cpu").state_dict()'),
        ),
    ),
    _Row(
        _is_compiled,
        lambda names: UnsupportedError(
            "a .pt2 archive of AOTInductor, which holds a compiled program",
            hint="save the weights of what it was compiled from; torch._inductor.aoti_load_package loads it, which runs"
            " its machine code",
        ),
    ),
    _Row(
        lambda names: not names.below.isdisjoint(("archive_format", _PROGRAM)) or _PROGRAM in names.whole,
        lambda names: UnsupportedError(
            "a .pt2 archive (torch.export), which holds a program and not only weights",
            hint=f"{TRUSTED}, save its weights alone: "
            + saved_by_torch(f"torch.export.load({literal(names.path)}).state_dict"),
        ),
    ),
    _Row(
        lambda names: _PACKAGE in names.below,
        lambda names: UnsupportedError(
            "a torch.package archive, which holds a program and not only weights",
            hint="torch.package.PackageImporter loads it, which runs its code; save the state dict of what is in it",
        ),
    ),
    _Row(
        lambda names: _PICKLE in names.whole,
        lambda names: MalformedError(
            "torch's records without the folder that they must be in",
            expected=f"a member FOLDER/{_PICKLE}",
            hint=f"zip them again: {shell('unzip', names.path, '-d', 'out')} && "
            + python_command("-m", "zipfile", "-c", "out.pt", "out"),
        ),
    ),
    _Row(
        lambda names: "MAR-INF/MANIFEST.json" in names.whole,
        lambda names: UnsupportedError(
            "a TorchServe model archive (.mar), which holds a program beside its checkpoint",
            hint=_unzipped(names, "take the checkpoint out", names.checkpoint),
        ),
    ),
    _Row(
        lambda names: {"data", "parameters", "parameter_list"} <= names.whole.keys(),
        lambda names: UnsupportedError(
            "a model of Stable-Baselines 2 (TensorFlow), its weights as NumPy arrays inside a zip",
            hint=_unzipped(names, "take them out", "parameters"),
        ),
    ),
    _Row(
        lambda names: {"data", "policy.pth"} <= names.whole.keys(),
        lambda names: UnsupportedError(
            "a model of Stable-Baselines3, its checkpoints inside a zip",
            hint=_unzipped(names, "take one out", "policy.pth"),
        ),
    ),
    _Row(
        lambda names: {"config.json", "metadata.json", "model.weights.h5"} <= names.whole.keys(),
        lambda names: UnsupportedError(
            "a Keras model (.keras)", hint="load it with Keras and save its weights with torch"
        ),
    ),
    _Row(
        lambda names: names.whole and all(name.endswith(".npy") for name in names.whole),
        lambda names: UnsupportedError(
            f"NumPy arrays (.npz): {_listed(names)}",
            hint="save them with torch: "
            + saved_by_torch(
                f"{{k: torch.from_numpy(v) for k, v in numpy.load({literal(names.path)}).items()}}", "numpy"
            ),
        ),
    ),
    _Row(
        lambda names: names.checkpoint,
        lambda names: UnsupportedError(
            f"a zip archive with a checkpoint in it: {names.checkpoint}",
            hint=_unzipped(names, "take it out", names.checkpoint),
        ),
    ),
    _Row(
        lambda names: True,
        lambda names: UnsupportedError(
            f"a zip archive, but none of torch's: {_listed(names) or 'it is empty'}",
            expected=f"a member FOLDER/{_PICKLE}",
        ),
    ),
)


# What is left of one


def cut_short(source: Readable) -> InputError:
    """What is missing of `source`, which starts as a zip archive and has no end."""
    first = first_member(source)
    root, _, record = first.name.rpartition("/") if first else ("", "", "")
    if first is None or record != _PICKLE or first.method != STORED:
        return MalformedError(
            "a zip archive that was truncated: its end is missing", where=source.path, hint=DOWNLOAD_AGAIN
        )
    try:
        with gc_paused():
            graph, end = parse(source.read, source.size, where=f"{source.path}: {_PICKLE}", offset=first.data_offset)
            sizes = storage_sizes(graph)
    except LimitError as error:
        return error
    except InputError as error:
        return MalformedError(
            f"a torch checkpoint that was truncated, or damaged, inside {_PICKLE}, its first record: {error.what}",
            where=source.path,
            hint=DOWNLOAD_AGAIN,
        )
    names = [len(f"{root}/data/{key}".encode("utf-8", "surrogatepass")) for key in sizes]
    headers = sum(LOCAL_SIZE + CENTRAL_SIZE + 2 * length for length in names)
    whole = end + sum(sizes.values()) + headers + CENTRAL_SIZE + len(first.name.encode()) + END_SIZE
    if whole <= source.size or not _only_stored(source, end):
        return MalformedError(
            "a torch checkpoint that was truncated: the zip archive's end is missing",
            where=source.path,
            hint=DOWNLOAD_AGAIN,
        )
    return MalformedError(
        f"a torch checkpoint that was truncated: at least {whole - source.size:,} of about {whole:,} bytes missing",
        where=source.path,
        hint=DOWNLOAD_AGAIN,
    )


def _only_stored(source: Readable, start: int) -> bool:
    """Whether the members that start close behind `start` are there and stored, as all that torch writes: a compressed
    storage can have any size.
    """
    behind = source.read(start, min(_BEHIND, source.size - start))
    methods = {int.from_bytes(match[1], "little") for match in _METHOD.finditer(behind)}
    return methods == {STORED}


def displaced(source: Readable) -> InputError | None:
    """What is wrong with `source` if it is a zip archive that starts too late or too early."""
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
        return MalformedError(
            f"a zip archive without its start: {count(-before, 'byte')} missing", where=source.path, hint=DOWNLOAD_AGAIN
        )
    if before == 0 or before + 4 > source.size or source.read(before, 4) != LOCAL:
        return MalformedError("a zip archive whose start is damaged", where=source.path, hint=DOWNLOAD_AGAIN)
    return MalformedError(
        f"a zip archive with {count(before, 'byte')} before it",
        where=source.path,
        hint=f"take them off: {shell('tail', '-c', f'+{before + 1}', source.path)} > out.pt",
    )


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
        return f"a {kind_of(root)} of {count(sum(1 for _ in root.elements()), 'item')}"
    if isinstance(root, Tuple):
        return f"a tuple of {count(len(root.items), 'item')}"
    kind = root.kind if isinstance(root, Blob) else "None" if root is None else kind_of(root)
    return kind if root is None else f"one {kind}"
