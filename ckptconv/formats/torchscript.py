"""TorchScript archives (``torch.jit.save``): read for their content and their weights.

They are programs, so they are not written.

Layout: that of torch's zip format (:mod:`ckptconv.formats.torch_zip`), with these records:

    data.pkl                  the module: objects of the classes in code/, each with a dict of attributes;
                              storages are data/KEY
    code/__torch__/A/B.py     the classes ``__torch__.A.B.Name``, in a subset of Python's grammar; deflated
    code/….py.debug_pkl       the origin of the code's lines
    constants.pkl             the tuple of what the code calls CONSTANTS.c0, CONSTANTS.c1, …; storages are constants/KEY
    traced_inputs.pkl         the shapes of the inputs with which a model was traced
    extra/NAME                files of the author (``_extra_files``)

A class of a module in the code, with a name that is not an identifier on its last line:

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
from typing import Any, NamedTuple, TypeAlias

from ckptconv.byteranges.sources import Readable
from ckptconv.checkpoint.model import Checkpoint, checkpoint_of
from ckptconv.checkpoint.tensor_info import LeftBehind
from ckptconv.errors import LimitError, RefusedError, check_limit, count, some
from ckptconv.formats.torch_zip import CONSTANTS, read_pickle, record_bytes
from ckptconv.formats.zip_archive import Archive
from ckptconv.hints import literal, option
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS

NAME = "TorchScript"
#: Descriptions of the records that a copy of the weights does not contain, by the start of their names.
_PROGRAM = {
    "code": "the program",
    "bytecode": "the program",
    "constants": "constants of the program",
    "traced_inputs": "inputs of the program",
}
_EXTRA = "part of the program"
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
_DEVICE = regex(rb'\btorch\.device\("([^"\\\n]{1,40})"\)|\btorch\.(cuda)\(')
_ESCAPE = regex(rb"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def read_program(source: Readable, checkpoint: Checkpoint) -> None:
    """Add information about the program in `source` to `checkpoint`, which was read from it.

    This adds the classes of its modules, its constants, notes on devices, and the records that a copy of the weights
    does not contain. Raises MalformedError, LimitError.
    """
    archive = checkpoint.container
    assert isinstance(archive, Archive)
    checkpoint.format = NAME
    checkpoint.script_classes = {}
    devices: Counter[str] = Counter()
    where: dict[str, str] = {}
    words = 0

    def counted(items: Iterator[Any]) -> Iterator[Any]:
        nonlocal words
        for item in items:
            words += 1
            if words > LIMITS.script_words:
                raise LimitError(
                    "the code of a TorchScript archive has too many names",
                    where=source.path,
                    expected=f"at most {LIMITS.script_words:,} classes, attributes and devices",
                )
            yield item

    for name, text in _code(source, archive):
        module = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        checkpoint.script_classes |= _classes(module, text, counted)
        for device, number in _devices(text, counted).items():
            devices[device] += number
            where.setdefault(device, name)
    if devices:
        listed = [f"{device} ×{n:,} (first in {where[device]})" for device, n in devices.most_common()]
        checkpoint.notes.append(f"devices in its code, which map_location does not change:  {some(listed, _SHOWN)}")
    constants = checkpoint.beside[CONSTANTS] = _constants(source, archive)
    if constants.tensors:
        by_device = Counter(info.device for info in constants.tensors.values())
        on = [f"{device} ×{n:,}" for device, n in by_device.most_common()]
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
    """Yield the name and the text of each file of code.

    Raises LimitError before any is inflated if they are too large.
    """
    files = [
        (name, member) for name, member in archive.names.items() if name.startswith("code/") and name[-3:] == ".py"
    ]
    size = sum(max(member.size, member.stored_size) for _, member in files)
    check_limit("a TorchScript archive has too much code", size, LIMITS.script_bytes, "bytes", where=source.path)
    for name, member in files:
        yield name, record_bytes(member)


_Counted: TypeAlias = "Callable[[Iterator[Any]], Iterator[Any]]"


class _Class(NamedTuple):
    """A class in the code: its parameters, its buffers, and the names of its attributes whose type is not Tensor.

    ``name`` is None if the class is not a module.
    """

    name: bytes | None
    parameters: list[str]
    buffers: list[str]
    others: set[str]


def _classes(module: str, text: bytes, counted: _Counted) -> dict[str, tuple[list[str], list[str]]]:
    """Return the names of the parameters and buffers of each module class in `text`, the code of `module`.

    The keys are the full names of the classes. `counted` wraps an iterator, and raises LimitError after too many items.
    """
    classes = [_Class(None, [], [], set())]  # for lines before the first class
    for line in counted(_CLASS_LINE.finditer(text)):
        kind = line["kind"]
        if line["cls"] is not None:
            classes.append(_Class(line["cls"] if line["module"] else None, [], [], set()))
        elif kind is not None:
            names = classes[-1].parameters if kind == b"parameters" else classes[-1].buffers
            names += counted(_listed(line["names"]))
        elif (line["type"] or line["annotation"]) != b"Tensor":
            classes[-1].others.add(_unquoted(line["name"] or line["quoted"]))
    # A state dict contains no buffer whose type allows None, but a parameter whose type does, unless it is None.
    return {
        f"{module}.{cls.name.decode('utf-8', 'replace')}": (
            cls.parameters,
            [name for name in cls.buffers if name not in cls.others],
        )
        for cls in classes
        if cls.name is not None
    }


def _listed(names: bytes) -> Iterator[str]:
    """Yield the strings in `names`, the text between the brackets of a list literal."""
    at = 0
    while item := _ITEM.match(names, at):
        yield _unquoted(item[1])
        at = item.end()


def _unquoted(text: bytes) -> str:
    """Return the string that `text`, the inside of a string literal, represents. Three octal digits are a byte."""

    def character(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(character, text).decode("utf-8", "surrogateescape")


def _devices(text: bytes, counted: _Counted) -> Counter[str]:
    """Return how often each device occurs in `text`. In the code, ``x.cuda()`` is written ``torch.cuda(x)``.

    `counted` wraps an iterator, and raises LimitError after too many items.
    """
    return Counter((match[1] or match[2]).decode("utf-8", "replace") for match in counted(_DEVICE.finditer(text)))


def _constants(source: Readable, archive: Archive) -> Checkpoint:
    """Return the constants of the code as a checkpoint. Raises MalformedError, LimitError."""
    member = archive.names[CONSTANTS]
    graph, _ = read_pickle(member)
    record = archive.records("constants/")
    return checkpoint_of(NAME, source, graph, archive, record, member.where)


# The weights


def _has_weights(checkpoint: Checkpoint) -> bool:
    """Return whether a module in `checkpoint` has a state dict, or one that cannot be determined."""
    return any(module.tensors or module.trouble for module in checkpoint.detected.modules)


def _why_none(archive: Archive) -> str:
    """Return a message that says why the program in `archive` has no weights."""
    frozen = any(name.startswith("constants/") for name in archive.names)
    why = ": torch.jit.freeze made them constants of its code, without names" if frozen else ""
    return f"it has no parameters and no buffers, so no state dict{why}"


def _left_behind(archive: Archive) -> list[LeftBehind]:
    """Return the records that a copy of the weights does not contain, with their total size by kind."""
    names = archive.names
    sizes: Counter[str] = Counter()
    for name, member in names.items():
        kind = name.partition("/")[0].removesuffix(".pkl")
        if kind in _PROGRAM:
            sizes[kind] += member.size
        elif kind == "extra":
            sizes[name] += member.size
    if sizes["constants"] == names[CONSTANTS].size:
        del sizes["constants"]  # there are no constants
    return [LeftBehind(name, size, _PROGRAM.get(name, _EXTRA)) for name, size in sizes.items() if size]


def refuse(checkpoint: Checkpoint, *, weights: bool) -> None:
    """Raise RefusedError if `checkpoint` is a program and cannot be written.

    If `weights` is true, only its weights are to be written, which is possible unless it has none.
    """
    if checkpoint.script_classes is None:
        return
    archive, where = checkpoint.container, checkpoint.source.path
    assert isinstance(archive, Archive)
    if not weights:
        load = f'torch.jit.load({literal(where)}, map_location="cpu")'
        raise RefusedError(
            "a TorchScript archive is a program, and the devices in its code and constants cannot be changed here",
            where=where,
            hint=option("state_dict")
            + f" extracts its weights; to move the program, load it on the other device: {load}",
        )
    if not _has_weights(checkpoint):
        raise RefusedError(
            _why_none(archive), where=where, hint="save the state dict of the model that it was created from"
        )
