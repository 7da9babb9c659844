"""TorchScript archives (``torch.jit.save``): read for what is in them and for their weights.

They are programs, so they are not written.

Layout: that of torch's zip format (:mod:`ckptconv.formats.torch_zip`), and beside that

    data.pkl                  the module: objects of the classes in code/, each with a dict of attributes;
                              storages are data/KEY
    code/__torch__/A/B.py     the classes ``__torch__.A.B.Name``, in a part of Python's grammar; deflated
    code/….py.debug_pkl       where its lines came from
    constants.pkl             the tuple of what the code calls CONSTANTS.c0, CONSTANTS.c1, …; storages are constants/KEY
    traced_inputs.pkl         the shapes of the inputs that a model was traced with
    extra/NAME                what its author put in (``_extra_files``)

A class in the code that is a module, with the names that are no identifiers as the last one's:

    class Linear(Module):
      __parameters__ = ["weight", "bias", ]
      __buffers__ = []
      weight : Tensor
      __annotations__["0"] = __torch__.torch.nn.modules.linear.Linear

The code is only searched, never run. Source: ``torch/csrc/jit/serialization`` of torch 2.13: ``export_module.cpp``,
``python_print.cpp`` and ``import_source.cpp``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ckptconv.byteranges.sources import Readable
from ckptconv.byteranges.spans import ByteRange, Inflate
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import LimitError, RefusedError, count, some
from ckptconv.formats.torch_zip import CONSTANTS, read_pickle, record_bytes
from ckptconv.formats.zip_archive import Archive
from ckptconv.hints import literal, option
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS

NAME = "TorchScript"
#: What else there is, by the first part of its name, for who takes the weights alone.
_PROGRAM = {
    "code": "the program",
    "bytecode": "the program",
    "constants": "constants of the program",
    "traced_inputs": "inputs of the program",
}
_EXTRA = "it belongs to the program"
_SHOWN = 5  # devices in a note
_STRING = rb'"((?:[^"\\\n]|\\.){0,1000})"'  # no attribute has a longer name
_ITEM = regex(_STRING + rb",? *")
_CLASS_LINE = regex(
    rb"^(?:class (?P<cls>[^(:\n]+)(?P<module>\(Module\))?[^\n]*"
    rb"|  __(?P<kind>parameters|buffers)__ = \[(?P<names>[^\n]*)\]"
    rb"|  __annotations__\[" + _STRING.replace(b"(", b"(?P<quoted>", 1) + rb"\] = (?P<annotation>[^\n]+)"
    rb"|  (?P<name>\w+) : (?P<type>[^\n]+))$",
    re.MULTILINE,
)
_Word = TypeVar("_Word")
_DEVICE = regex(rb'\btorch\.device\("([^"\\\n]{1,40})"\)|\btorch\.(cuda)\(')
_ESCAPE = regex(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def read_program(source: Readable, checkpoint: Checkpoint) -> None:
    """Add to `checkpoint`, read from `source`, what the program beside it says: the classes of its modules, devices,
    what a copy of its weights leaves behind.

    Raises MalformedError, LimitError.
    """
    archive = checkpoint.container
    assert isinstance(archive, Archive)
    checkpoint.format = NAME
    checkpoint.script_classes = {}
    devices: Counter[str] = Counter()
    where: dict[str, str] = {}
    words = _Words(source)
    for name, text in _code(source, archive):
        module = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        checkpoint.script_classes |= _classes(module, text, words.count)
        for device, n in _devices(text, words.count).items():
            devices[device] += n
            where.setdefault(device, name)
    if devices:
        listed = [f"{device} ×{n:,} (first in {where[device]})" for device, n in devices.most_common()]
        checkpoint.notes.append(f"devices in its code, which no map_location changes: {some(listed, _SHOWN)}")
    constants = checkpoint.beside[CONSTANTS] = _constants(source, archive)
    if constants.tensors:
        found = Counter(info.device for info in constants.tensors.values())
        on = [f"{device} ×{n:,}" for device, n in found.most_common()]
        nbytes = sum(storage.nbytes for storage in constants.storages.values())
        checkpoint.notes.append(
            f"constants of its code: {count(len(constants.tensors), 'tensor')} in {CONSTANTS}, {nbytes:,} bytes, on"
            f" {some(on, _SHOWN)}"
        )
    if not _has_weights(checkpoint):
        checkpoint.notes.append(_why_none(archive))
    checkpoint.unused += _left_behind(archive)


# The code


def _code(source: Readable, archive: Archive) -> Iterator[tuple[str, bytes]]:
    """The name and the text of each file of code. Raises LimitError before anything is inflated."""
    files = [(name, each) for name, each in archive.names().items() if name.startswith("code/") and name[-3:] == ".py"]
    size = sum(max(member.size, member.stored_size) for _, member in files)
    if size > LIMITS.script_bytes:
        raise LimitError(
            "a TorchScript archive has too much code",
            where=source.path,
            expected=f"at most {LIMITS.script_bytes:,} bytes",
            got=f"{size:,}",
        )
    for name, member in files:
        yield name, record_bytes(source, member, f"{source.path}: {name}", checked=archive.has_checksums)


class _Words:
    """How many words of interest the code of `source` has."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.left = LIMITS.script_words

    def count(self, words: Iterator[_Word]) -> Iterator[_Word]:
        """`words`, each counted. Raises LimitError."""
        for word in words:
            self.left -= 1
            if self.left < 0:
                raise LimitError(
                    "the code of a TorchScript archive says too much",
                    where=self.source.path,
                    expected=f"at most {LIMITS.script_words:,} classes, attributes and devices",
                )
            yield word


_Counted: TypeAlias = "Callable[[Iterator[Any]], Iterator[Any]]"


class _Class(NamedTuple):
    """A class in the code: its lists, and its attributes that are not simply tensors."""

    name: bytes | None
    parameters: list[str]
    buffers: list[str]
    others: set[str]


def _classes(module: str, text: bytes, counted: _Counted = iter) -> dict[str, tuple[list[str], list[str]]]:
    """The classes of modules in `text`, the code of `module`: the names of their parameters and of their buffers.

    `counted` bounds what it is given.
    """
    every = [_Class(None, [], [], set())]  # for lines before the first
    for line in counted(_CLASS_LINE.finditer(text)):
        cls, kind = line["cls"], line["kind"]
        if cls is not None:
            every.append(_Class(cls if line["module"] else None, [], [], set()))
        elif kind is not None:
            (every[-1].parameters if kind == b"parameters" else every[-1].buffers).extend(
                counted(_listed(line["names"]))
            )
        elif (line["type"] or line["annotation"]) != b"Tensor":
            every[-1].others.add(_unquoted(line["name"] or line["quoted"]))
    return {  # a buffer that can be None is in no state dict; a parameter that can is, where it is not
        f"{module}.{each.name.decode('utf-8', 'replace')}": (
            each.parameters,
            [name for name in each.buffers if name not in each.others],
        )
        for each in every
        if each.name is not None
    }


def _listed(names: bytes) -> Iterator[str]:
    """The strings in `names`, what stands between the brackets of a list."""
    at = 0
    while item := _ITEM.match(names, at):
        yield _unquoted(item[1])
        at = item.end()


def _unquoted(text: bytes) -> str:
    """`text` of a string in the code.

    Other letters than those of ASCII stand there as three octal digits for each byte.
    """

    def character(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(character, text).decode("utf-8", "surrogateescape")


def _devices(text: bytes, counted: _Counted = iter) -> Counter[str]:
    """The devices that `text` names, and how often; ``torch.cuda(x)`` is what becomes of ``x.cuda()``."""
    found = counted(_DEVICE.finditer(text))
    return Counter((device[1] or device[2]).decode("utf-8", "replace") for device in found)


# The constants


def _constants(source: Readable, archive: Archive) -> Checkpoint:
    """What the code calls CONSTANTS."""
    names, checked = archive.names(), archive.has_checksums
    where = f"{source.path}: {CONSTANTS}"
    graph, _ = read_pickle(source, names[CONSTANTS], where, checked=checked)

    def record(key: str) -> ByteRange | Inflate | None:
        found = names.get(f"constants/{key}")
        return found.data(source, checked=checked) if found else None

    return checkpoint_of(NAME, source, graph, archive, record, where)


# Its weights


def _has_weights(checkpoint: Checkpoint) -> bool:
    """Whether there is a module with a state dict, or one that cannot be known."""
    return any(module.tensors or module.trouble for module in checkpoint.detected.modules)


def _why_none(archive: Archive) -> str:
    frozen = any(name.startswith("constants/") for name in archive.names())
    why = ": torch.jit.freeze made them constants of its code, without names" if frozen else ""
    return f"it has no parameters and no buffers, so no state dict{why}"


def _left_behind(archive: Archive) -> list[LeftBehind]:
    """What a copy of the weights does not have: the program and what belongs to it, each kind as one."""
    names = archive.names()
    sizes: Counter[str] = Counter()
    for name, member in names.items():
        kind = name.partition("/")[0].removesuffix(".pkl")
        if kind in _PROGRAM:
            sizes[kind] += member.size
        elif kind == "extra":
            sizes[name] += member.size
    if sizes["constants"] == names[CONSTANTS].size:
        del sizes["constants"]  # it says that there are none
    return [LeftBehind(name, size, _PROGRAM.get(name, _EXTRA)) for name, size in sizes.items() if size]


def refuse(checkpoint: Checkpoint, *, weights: bool) -> None:
    """Raise RefusedError where `checkpoint` is of a program and more is wanted of it than it can give: it whole, or, if
    it is the `weights` alone, those of a model that has none.
    """
    if checkpoint.script_classes is None:
        return
    archive, where = checkpoint.container, checkpoint.source.path
    assert isinstance(archive, Archive)
    if not weights:
        load = f'torch.jit.load({literal(where)}, map_location="cpu")'
        raise RefusedError(
            "a TorchScript archive is a program, with devices in its code and its constants: changed here it would be"
            " another one",
            where=where,
            hint=option("state_dict")
            + f" takes its weights alone; to have it on another device, load it there: {load}",
        )
    if not _has_weights(checkpoint):
        raise RefusedError(_why_none(archive), where=where, hint="save the state dict of the model that it was made of")
