"""Plan programs of torch.export (``.pt2``) for other devices: every mention of a device is changed, or it is refused.

A device is mentioned in the configurations of weights and constants, in the graph (the tensors, and the arguments of
nodes), and in the files of torch.save inside the archive, which have the sample inputs. Text that torch does not read
back, such as stack traces, stays. The name of an operator, its unknown argument, or code can also depend on a device.
The error names the node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from ckptconv.byteranges.spans import ByteRange, Literal
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.edits.apply import apply
from ckptconv.edits.changes import Changes
from ckptconv.edits.devices import DEVICE_STRING, Devices
from ckptconv.edits.options import Edits
from ckptconv.edits.retag import about_kept_devices, tags_of, unmatched_rules
from ckptconv.errors import MalformedError, RefusedError, count, some
from ckptconv.formats import torch_zip
from ckptconv.formats.exported import INNER, device_of, devices_in, is_device, read_json
from ckptconv.formats.layout import Layout
from ckptconv.formats.torch_zip import ExportedProgram, ZipWriter
from ckptconv.lazy_regex import regex

#: Operators whose arguments are known. Those of other libraries can depend on a device in any way.
_KNOWN = regex(r"(torch\.ops\.(aten|prims|prim|higher_order|_c10d_functional)|_operator|math|builtins)\..*")
#: Words in the names of operators that are compiled, or that only one kind of device has.
_BOUND = {
    "cpu", "cuda", "cudnn", "hip", "miopen", "mkldnn", "mkl", "onednn", "mps", "xpu", "hpu", "triton", "inductor",
    "aoti", "flash", "efficient", "cutlass", "delegate", "torchbind",
}  # fmt: skip
_WORD = regex(r"(?s:.*\b(device|cpu|cuda|mps|xpu|hpu|meta)\b.*)")  # in code, and in texts for operators
_AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
_DROPPED = ".data/serialization_id"  # a hash of the old records
_JSON = regex(r"models/.*\.json|data/(weights|constants)/[^/]+_config\.json")
_COMPILED = ("data/aotinductor/", "data/executorch/")


def plan_program(checkpoint: Checkpoint, path: Path, edits: Edits | None) -> tuple[Layout, Changes]:
    """Plan the archive at `path` with the program of `checkpoint` on the devices of `edits`. Return it and the changes.

    `edits` is None if another format is asked for.

    Raises:
        RefusedError: There are other edits, or a mention of a device cannot be changed with certainty.
        MalformedError: The archive is damaged.
    """
    where = checkpoint.source.path
    if edits is None or edits != Edits(devices=edits.devices):
        raise RefusedError(
            "only the devices of a program of torch.export are changed",
            where=where,
            hint="other edits are for its weights: name an output that ends in .safetensors",
        )
    devices = edits.devices
    assert isinstance(checkpoint.container, ExportedProgram)
    archive = checkpoint.container.archive
    names = archive.names
    if "archive_format" not in names:
        raise RefusedError(
            "a program of torch before 2.8 is not written, only its weights",
            where=where,
            hint="name an output that ends in .safetensors",
        )
    texts = {name: read_json(archive, name, exact=True) for name in names if devices and _JSON.fullmatch(name)}
    inner = {name: each for name, each in checkpoint.beside.items() if devices and INNER.fullmatch(name)}
    tags = Counter(tag for each in inner.values() for tag in tags_of(each))
    for name, text in texts.items():
        try:
            tags.update(devices_in(text))
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedError("a device is not valid", where=f"{where}: {name}", got=error) from error
    has_nulls = '": null' in json.dumps(texts).replace('\\"', "")  # not in texts inside
    program = _Program(devices, str(where), tags, has_nulls)
    writer = ZipWriter(archive.root, checked=archive.has_checksums)
    for name, member in names.items():
        if name in texts:
            program.move(name, texts[name])
            writer.record(name, json.dumps(texts[name]).encode())
        elif name in inner:
            writer.pickle(name, _moved(inner[name], devices, f"{where}: {name}"), like=None)
        elif not devices or name != _DROPPED:
            if devices:
                program.check(name)
            writer.member(name, member)
    changes = Changes(notes=unmatched_rules(checkpoint, devices, {*tags}))
    for storage in checkpoint.storages.values():
        if (new := devices.new_tag(storage.device)) != storage.device:
            changes.count_devices(storage.device, new, checkpoint.index.tensor_counts[storage], storage.nbytes)
    moved = sum(n for tag, n in tags.items() if devices.new_tag(tag) != tag)
    changes.notes.append(f"{count(moved, 'mention')} of devices changed, in the weights, graphs and sample inputs")
    return Layout((writer.finish(path),)), changes


def _moved(inner: Checkpoint, devices: Devices, where: str) -> list[Literal | ByteRange]:
    """Return the bytes of `inner`, a file of torch.save, on other devices."""
    if kept := about_kept_devices(inner, devices):
        raise RefusedError("objects of the program are bound to a device", where=where, got=some(kept))
    for rule in devices.rules:  # it is for other parts of the program
        if not any(map(rule.matches, tags_of(inner))):
            devices = devices.without(rule)
    apply(inner, Edits(devices=devices))
    (file,) = torch_zip.layout(inner, inner.source.path).files
    pieces = [piece for piece in file.pieces if isinstance(piece, Literal | ByteRange)]
    if len(pieces) != len(file.pieces):
        raise RefusedError("its records are deflated or have no checksum", where=where)
    return pieces


class _Program:
    """The mentions of devices in a program.

    Attributes:
        tags: The number of mentions of each device, as a tag.
        has_nulls: Whether the JSON has nulls, which torch 2.8 leaves out.
    """

    def __init__(self, devices: Devices, where: str, tags: Counter[str], has_nulls: bool) -> None:
        self.devices, self.where, self.has_nulls = devices, where, has_nulls
        self._families: dict[str, set[str]] = {}  # the new families of each old one
        for tag in tags:
            self._families.setdefault(tag.partition(":")[0], set()).add(devices.new_tag(tag).partition(":")[0])

    def refuse(self, what: str, got: object) -> NoReturn:
        """Raise RefusedError because of the node or record `what`."""
        raise RefusedError(
            f"{what} depends on a device in a way that is not certain, so the program is not moved",
            where=self.where,
            got=got,
            hint="export the model on the new device; or take the weights: name an output that ends in .safetensors",
        )

    def check(self, name: str) -> None:
        """Refuse the record `name` if its content is not known. It is neither JSON nor a file that can be read."""
        if name.startswith(_COMPILED):
            self.refuse(name, "compiled code")
        if INNER.fullmatch(name):
            self.refuse(name, "a pickle of any object")

    def move(self, name: str, text: Any) -> None:
        """Change the devices in `text`, the JSON of the record `name`."""
        guards = text.get("guards_code") if isinstance(text, dict) else None
        for operator, holder, key in _mentions(text, name):
            value = holder[key]
            if key == "use_pickle":
                self.refuse(f"an entry of {name}", f"a pickle: {holder.get('path_name')}")
            elif isinstance(value, dict):
                tag = device_of(value)
                if operator != name and not _KNOWN.fullmatch(operator):
                    self.refuse(operator, tag)
                if (new := self.devices.new_tag(tag)) != tag:
                    family, _, index = new.partition(":")
                    value.update(type=family, index=int(index) if index else None)
                    if not index and not self.has_nulls:
                        del value["index"]
            elif key == "target" and "inputs" in holder:
                if not _BOUND.isdisjoint(value.replace("_", ".").split(".")):
                    self.refuse(value, "an operator of one kind of device")
            elif operator == _AUTOCAST and key == "as_string":
                holder[key] = self._family(value)
            elif key == "as_string" and operator.startswith("torch.ops.aten.") and DEVICE_STRING.fullmatch(value):
                holder[key] = self.devices.new_tag(value)  # move_to_device_pass writes a device as a text
            elif DEVICE_STRING.fullmatch(value) or (_WORD.fullmatch(value) and (operator != name or holder is guards)):
                self.refuse(operator, value)

    def _family(self, family: str) -> str:
        """Return the family of devices that replaces `family`, the argument of an autocast."""
        new = self._families.get(family) or {self.devices.new_tag(family).partition(":")[0]}
        if len(new) > 1:
            self.refuse(_AUTOCAST, " or ".join(sorted(new)))
        return next(iter(new))


def _mentions(text: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where the JSON `text` of the record `name` has a device, a string, or an entry that is a pickle.

    Each is given by the operator of its node, or `name`, by the list or object that contains it, and by its key there.
    """
    todo: list[tuple[str, Any, Any]] = [(name, {"": text}, "")]
    while todo:
        operator, holder, key = todo.pop()
        value = holder[key]
        is_text = isinstance(value, str) and key != "name"
        if is_text or is_device(value) or (key == "use_pickle" and value is not False):
            yield operator, holder, key
        elif isinstance(value, list):
            todo += ((operator, value, i) for i in range(len(value)))
        elif isinstance(value, dict):
            is_node = isinstance(value.get("target"), str) and "inputs" in value
            operator = value["target"] if is_node else operator
            todo += ((operator, value, each) for each in value if not (is_node and each == "metadata"))
