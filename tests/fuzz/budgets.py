"""Measure the cost of the worst shapes of pickles: ``python -m tests.fuzz.budgets [OPCODES [COMMAND...]]``.

Each pickle has 1,000,000 opcodes by default. It is the ``data.pkl`` of a torch file, which is read in a new process.
One line is printed for each shape and command:

- the processor time as a share of the budget, which is 2 s for each MB of the inflated pickle and 10 µs for each opcode
- the bytes of memory for each opcode, beyond the memory at the start and 64 MB, with a budget of 300
- the result of the command

The exit status is 1 if a budget is exceeded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.archives import Record, archive
from tests.support.hostile_bytes import integer, storage, tensor, text
from tests.support.paths import ROOT

__all__ = ["SHAPES", "Cost", "file_of", "measured", "opcodes_for", "seconds_for"]

MB = 1 << 20
SECONDS_EACH_MB, SECONDS_EACH, FLOOR, EACH = 2.0, 10e-6, 64 * MB, 300
COMMANDS = ("parse", "inspect", "verify", "convert", "loadable", "diff")
#: The modulus of Python's hash of integers.
_PRIME = (1 << 61) - 1
_CALL, _WRAPPED = b"cm\nf\n", b"\x80\x04%b."
#: A tensor without elements.
_VIEW = tensor(storage(numel=integer(0)), (0,))


def _wide(opcode: bytes) -> Callable[[int], bytes]:
    return lambda n: b"(" + opcode * n + b"t"


def _long(start: bytes, *opcodes: bytes) -> Callable[[int], bytes]:
    return lambda n: start + b"".join(opcodes) * (n // len(opcodes))


def _shared(shared: Callable[[int], bytes], *each: bytes, also: bytes = b"N") -> Callable[[int], bytes]:
    """Return a shape whose second half uses a shared value from the first half again and again.

    Memo 0 is the shared value, and memo 1 is the value of `also`. `each` are the opcodes that use them.
    """
    holder = b"".join(each)
    return lambda n: b"(" + shared(n // 2) + b"q\0" + also + b"q\1" + holder * (n // 2 // len(each)) + b"t"


def _tuple(n: int) -> bytes:
    return b"(" + b"K\7" * n + b"t"


def _list(n: int) -> bytes:
    return b"](" + b"K\7" * n + b"e"


def _lists(n: int) -> bytes:
    return b"(" + b"]" * n + b"t"


def _dict(n: int) -> bytes:
    return b"}(" + b"".join(b"\x8c\x08%08dN" % i for i in range(n // 2)) + b"u"


def _ordered(n: int) -> bytes:
    return b"ccollections\nOrderedDict\n)R" + _dict(n)[1:]


def _frozenset(n: int) -> bytes:
    return b"(" + b"".join(b"J" + i.to_bytes(4, "little") for i in range(n)) + b"\x91"


def _text(n: int) -> bytes:
    return text("a" * min(n, 1 << 16))


_CLASS, _SIZE, _SET, _GETATTR = b"cm\nC\n", b"ctorch\nSize\n", b"c__builtin__\nset\n", b"c__builtin__\ngetattr\n"
_TAGGED = tensor(storage("data of 01234567", integer(0)), (0,)).replace(text("cpu"), b"h\0")
_HOOKED = tensor(storage(numel=integer(0)), (0,)).replace(b"ccollections\nOrderedDict\n)R", b"h\0")

_GETTER = b"coperator\nattrgetter\n"
_PARTS = tuple(text(f"_{part}") for part in ("parameters", "buffers", "modules"))


def _getter(n: int) -> bytes:
    return _GETTER + b"(" + b"".join(text(f"a{i}.b") for i in range(n)) + b"tR"


def _parameters(n: int) -> bytes:
    return b"}(" + b"".join(text(f"p{i}") + _VIEW for i in range(n // 30)) + b"u"


def _groups(n: int) -> bytes:
    """Return a state dict of an optimizer. All of its groups share one list of parameters."""
    group = b"}(" + text("params") + b"h\0" + text("lr") + b"Nu"
    return (
        b"}("
        + text("state")
        + b"}"
        + text("param_groups")
        + b"]("
        + _list(n // 2)
        + b"q\0000"
        + group * (n // 14)
        + b"eu"
    )


def _optimizers(n: int) -> bytes:
    """Return state dicts of optimizers that share one list of groups. The only group has many names."""
    names = b"](" + b"".join(b"\x8c\x08%08d" % i for i in range(n // 2)) + b"e"
    groups = b"]}" + text("params") + names + b"sa"
    each = b"}(" + text("state") + b"}" + text("param_groups") + b"h\0u"
    return b"(" + groups + b"q\0" + each * (n // 14) + b"t"


def _modules(n: int) -> bytes:
    """Return modules that share one dict of parameters."""
    module = b"h\1)\x81}(" + _PARTS[0] + b"h\0" + _PARTS[1] + b"}" + _PARTS[2] + b"}ub"
    return b"](" + _parameters(n // 2) + b"q\0000" + _CLASS + b"q\0010" + module * (n // 26) + b"e"


#: NumPy's dtype float64, as memo 1.
_FLOATS = b"cnumpy\ndtype\n\x8c\2f8\x89\x88\x87R(K\3\x8c\1<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tbq\0010"
_ARRAY = b"h\0h\2K\0\x85C\1b\x87R(K\1K\1\x85h\1\x89C\x08\0\0\0\0\0\0\xf0?tb"


def _data(made_by: bytes, each: bytes, opcodes: int, before: bytes = b"") -> Callable[[int], bytes]:
    """Return a shape with a list of objects of a shared class or function. Each object has the given number of
    `opcodes`.

    `made_by` pushes the shared callable, which becomes memo 0.
    """
    return lambda n: before + made_by + b"q\0000](" + each * (n // opcodes) + b"e"


#: The end of the state of a NumPy dtype, with its size, alignment and flags.
_END = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
_SCALAR = b"cnumpy._core.multiarray\nscalar\nq\0000"
_NEW_ARRAY = b"cnumpy._core.multiarray\n_reconstruct\nq\0000cnumpy\nndarray\nq\0020" + _FLOATS


def _scalars(n: int) -> bytes:
    """Return NumPy scalars of one dtype, to which elements were appended."""
    dtype = b"cnumpy\ndtype\n\x8c\2f8\x89\x88\x87R(K\3\x8c\1<" + _END + b"(" + b"K\7" * (n // 2) + b"eq\0010"
    return _SCALAR + dtype + b"C\x08\0\0\0\0\0\0\xf0?q\0020](" + b"h\0h\1h\2\x86R" * (n // 10) + b"e"


def _text_scalars(n: int) -> bytes:
    """Return NumPy strings that are made of the same bytes."""
    size = (60_000).to_bytes(4, "little")
    dtype = b"cnumpy\ndtype\n\x8c\6U15000\x89\x88\x87R(K\3\x8c\1<NNNJ" + size + b"K\4K\x08tbq\0010"
    return _SCALAR + dtype + b"B" + size + b"a\0\0\0" * 15_000 + b"q\0020](" + b"h\0h\1h\2\x86R" * (n // 5) + b"e"


def _arrays(shared: Callable[[int], bytes], each: bytes, before: bytes = b"") -> Callable[[int], bytes]:
    """Return a shape with NumPy arrays that share a value (memo 3). Each has 17 opcodes, and `each` pushes its
    state.
    """
    array = b"h\0h\2K\0\x85C\1b\x87R(K\1" + each + b"tb"
    return lambda n: _NEW_ARRAY + before + shared(n // 2) + b"q\0030](" + array * (n // 34) + b"e"


_OBJECTS = b"cnumpy\ndtype\n\x8c\2O8\x89\x88\x87R(K\3\x8c\1|" + _END + b"q\0040"


def _axes(n: int) -> bytes:
    """Return NumPy arrays that share the order of their axes."""
    array = b"h\0(C\x08\0\0\0\0\0\0\xf0?h\1K\1\x85\x8c\1Kh\3tR"
    function = b"cnumpy._core.numeric\n_frombuffer\nq\0000"
    return function + _FLOATS + _tuple(n // 2) + b"q\0030](" + array * (n // 18) + b"e"


def _with_metadata(n: int) -> bytes:
    """Return tensors of different shapes that share a long dict of metadata."""
    before = _dict(n // 2) + b"q\0000" + storage(numel=integer(0)) + b"q\0010"
    before += b"ctorch._utils\n_rebuild_tensor_v2\nq\0020ccollections\nOrderedDict\n)Rq\0030]("
    shapes = (b"K\0J" + i.to_bytes(4, "little") + b"\x86K\1K\1\x86" for i in range(n // 32))
    return before + b"".join(b"h\2(h\1K\0" + shape + b"\x89h\3h\0tR" for shape in shapes) + b"e"


def _on_devices(n: int) -> bytes:
    """Return tensors on one device, which is made from a long tuple."""
    before = b"ctorch\ndevice\n" + _tuple(n // 2) + b"Rq\0000ctorch\nfloat32\nq\0020"
    function = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\nq\0010"
    return before + function + b"](" + b"h\1(Nh\2h\0\x89tR" * (n // 18) + b"e"


def _tied(n: int) -> bytes:
    """Return tensors that are tied to a tensor with a long name."""
    before = b"ctorch._utils\n_rebuild_tensor_v2\nq\0000" + storage(numel=integer(0))
    each = b"h\0(h\1K\0K\0\x85K\1\x85\x89h\2tRq\0030"
    names = text("a" * 60_000) + b"h\3" + b"".join(text(str(i)) + b"h\3" for i in range(n // 2))
    return before + b"q\0010ccollections\nOrderedDict\n)Rq\0020" + each + b"}(" + names + b"u"


def _on_long_device(n: int) -> bytes:
    """Return tensors on a device with a long name."""
    before = b"ctorch._utils\n_rebuild_tensor_v2\nq\0000" + storage(numel=integer(0), tag="c" * 60_000) + b"q\0010"
    each = b"h\0(h\1K\0K\0\x85K\1\x85\x89h\2tR"
    tensors = b"".join(text(str(i)) + each for i in range(n // 12))
    return before + b"ccollections\nOrderedDict\n)Rq\0020}(" + tensors + b"u"


def _tuples_of_tuples(n: int) -> bytes:
    """Return dicts with one shared key: nested tuples that share their items."""
    deeper = b"".join(b"(" + b"h\0" * 64 + b"tq\0000" for _ in range(3))
    return b"(" + b"K\1" * 64 + b"tq\0000" + deeper + b"](" + b"}h\0Ns" * (n // 4) + b"e"


def _below_lists(n: int) -> bytes:
    """Return objects below many levels of lists, next to other lists."""
    chain = b"]" * 300 + _CALL + b")R" + b"a" * 300
    return b"](](" + b"]" * n + b"e" + chain * 25 + b"e"


#: Python's codecs for text.
_CODECS = (
    "utf_8 latin_1 ascii utf_16 utf_32 utf_7 utf_16_le utf_16_be utf_32_le utf_32_be utf_8_sig raw_unicode_escape "
    "unicode_escape cp437 cp850 cp852 cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 koi8_r koi8_u "
    "iso8859_2 iso8859_3 iso8859_4 iso8859_5 iso8859_6 iso8859_7 iso8859_8 iso8859_9 iso8859_15"
)
_ENCODE = b"c_codecs\nencode\n"
_DEEPER = b"h\0h\2X\1\0\0\0%b\x86Rq\2"  # an attribute of memo 2


def _dicts_of_tensors(n: int) -> bytes:
    return b"}(" + b"".join(text(f"{i:08}") + b"}" + text("w") + _VIEW + b"s" for i in range(n // 33)) + b"u"


def _in_codecs(n: int) -> bytes:
    """Return one text that is encoded with many codecs again and again."""
    codecs = _CODECS.split()
    calls = b"".join(b"h\1h\0" + text(codecs[i % len(codecs)]) + b"\x86R" for i in range(n // 5))
    return b"(" + _text(n) + b"q\0" + _ENCODE + b"q\1" + calls + b"t"


def _attributes(each: bytes) -> Callable[[int], bytes]:
    """Return a shape with a chain of attributes, which are also items of a tuple. `each` pushes one attribute."""
    return lambda n: b"(" + _GETATTR + b"q\0cm\nf\nq\2" + each * (n // 6) + b"t"


#: Functions of a number `n`, which return the opcodes of a value: about `n` opcodes.
SHAPES: dict[str, Callable[[int], bytes]] = {
    "None": _wide(b"N"),
    "lists": _wide(b"]"),
    "dicts": _wide(b"}"),
    "sets": _wide(b"\x8f"),
    "empty tuples": _wide(b")"),
    "marks": lambda n: b"(" * (n // 2) + b"t" * (n // 2),
    "tuples in tuples": _long(b"N", b"\x85"),
    "tuples of two of one": _long(b"N", b"2", b"\x86"),
    "duplicates": lambda n: b"(]" + b"2" * n + b"t",
    "memo": _long(b"]", b"\x94"),
    "memo, other slots": lambda n: b"]" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(n)),
    "memo, read": lambda n: b"(]\x94" + b"h\0" * n + b"t",
    "appended": _long(b"]", b"N", b"a"),
    "appended lists": _long(b"]", b"]", b"a"),
    "items": _long(b"}", b"N", b"N", b"s"),
    "a wide list": lambda n: b"](" + b"N" * n + b"e",
    "a wide dict": lambda n: b"}(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(n // 2)) + b"u",
    "a wide set": lambda n: b"\x8f(" + b"".join(b"J" + i.to_bytes(4, "little") for i in range(n)) + b"\x90",
    "frozensets": lambda n: b"(" + b"(\x91" * (n // 2) + b"t",
    "states": _long(_CALL + b")R", b"N", b"b"),
    "calls": lambda n: b"(" + _CALL + b"q\0" + b"h\0)R" * (n // 3) + b"t",
    "calls of calls": _long(_CALL, b")", b"R"),
    "objects": lambda n: b"(" + (b"(" + _CALL + b"o") * (n // 3) + b"t",
    "called and popped": lambda n: _CALL + b"q\0" + b"h\0)R0" * (n // 4),
    "popped": _long(b"N", b"N", b"0"),
    "persistent ids": _long(b"N", b"Q"),
    "extensions": _wide(b"\x82\1"),
    "globals": _wide(_CALL),
    "short texts": _wide(b"\x8c\1a"),
    "texts": lambda n: b"(" + b"".join(b"\x8c\x08%08d" % i for i in range(n)) + b"t",
    "short bytes": _wide(b"C\1a"),
    "bytearrays": _wide(b"\x96\1\0\0\0\0\0\0\0a"),
    "strings of Python 2": _wide(b"U\1a"),
    "integers": _wide(b"M\xff\xff"),
    "long integers": _wide(b"\x8a\x09" + b"\xff" * 8 + b"\0"),
    "floats": _wide(b"G" + b"\x3f\xb9" * 4),
    "decimal integers": _wide(b"I7\n"),
    "other globals": lambda n: b"(" + b"".join(b"cm\nf%d\n" % i for i in range(n)) + b"t",
    "calls in tuples, popped": lambda n: b"N" + (_CALL + b")R\x86" + b"\x85" * 30) * (n // 33) + b"0N",
    "calls in a list, popped": lambda n: b"](" + (_CALL + b")R") * (n // 3) + b"e0N",
    "named tuples": lambda n: b"(" + (_CALL + b"K\1K\2\x86\x81") * (n // 5) + b"t",
    "objects with attributes": lambda n: b"(" + (_CALL + b")\x81}\x8c\1aNsb") * (n // 7) + b"t",
    "dicts in dicts": lambda n: b"(" + (b"}\x8c\1a}\x8c\1b}\x8c\1cNsss") * (n // 10) + b"t",
    "pickles in bytes": _wide(b"C\x08cm\nf\n)R."),
    "slots of one hash": lambda n: b"]" + b"".join(b"p%d\n" % (i * _PRIME) for i in range(n)),
    "keys of one hash": lambda n: b"}(" + b"".join(integer(i * _PRIME) + b"N" for i in range(n // 2)) + b"u",
    "attributes of attributes": lambda n: (
        b"cbuiltins\ngetattr\nq\0000X\x84\3\0\0"
        + b"a" * 900
        + b"q\0010cm\nf\nq\0020]("
        + b"h\0h\2h\1\x86Rq\2" * (n // 6)
        + b"e"
    ),
    "tensors of one storage": lambda n: (
        b"}(" + b"".join(b"J" + i.to_bytes(4, "little") + _VIEW for i in range(n // 30)) + b"u"
    ),
    "names of tensors": lambda n: (
        b"}(" + b"".join(b"\x8c\x1bmodule.a%08d.b.c.weight" % i + _VIEW for i in range(n // 30)) + b"u"
    ),
    "tensors in lists": lambda n: b"](" + (b"(" + _VIEW + b"l") * (n // 32) + b"e",
    "a tuple in lists": _shared(_tuple, b"]", b"h\0", b"a"),
    "a tuple in tuples": _shared(_tuple, b"h\0", b"\x85"),
    "a tuple in dicts": _shared(_tuple, b"}", b"N", b"h\0", b"s"),
    "a tuple as a key": _shared(_tuple, b"}", b"h\0", b"N", b"s"),
    "a list in lists": _shared(_list, b"]", b"h\0", b"a"),
    "a tuple of lists in lists": _shared(_lists, b"]", b"h\0", b"a"),
    "a dict in lists": _shared(_dict, b"]", b"h\0", b"a"),
    "a dict in dicts": _shared(_dict, b"}", b"N", b"h\0", b"s"),
    "a frozenset in lists": _shared(_frozenset, b"]", b"h\0", b"a"),
    "a frozenset as a key": _shared(_frozenset, b"}", b"h\0", b"N", b"s"),
    "a frozenset in frozensets": _shared(_frozenset, b"(", b"h\0", b"\x91"),
    "a tuple as arguments": _shared(_tuple, b"h\1", b"h\0", b"R", also=_CALL),
    "a tuple as an argument": _shared(_tuple, b"h\1", b"h\0", b"\x85", b"R", also=_CALL),
    "a tuple of lists as arguments": _shared(_lists, b"h\1", b"h\0", b"R", also=_CALL),
    "a dict as keywords": _shared(_dict, b"h\1", b")", b"h\0", b"\x92", also=_CLASS),
    "a tuple in torch.Size": _shared(_tuple, b"h\1", b"h\0", b"\x85", b"R", also=_SIZE),
    "a torch.Size": _shared(lambda n: _SIZE + _tuple(n) + b"\x85R", b"]", b"h\0", b"a"),
    "a list in sets of protocol 2": _shared(_list, b"h\1", b"h\0", b"\x85", b"R", also=_SET),
    "a list in frozensets of protocol 2": _shared(
        _list, b"h\1", b"h\0", b"\x85", b"R", also=b"c__builtin__\nfrozenset\n"
    ),
    "a list in queues": _shared(_list, b"h\1", b"h\0", b"\x85", b"R", also=b"ccollections\ndeque\n"),
    "a dict in counters": _shared(_dict, b"h\1", b"h\0", b"\x85", b"R", also=b"ccollections\nCounter\n"),
    "a dict in namespaces": _shared(_dict, b"h\1", b")", b"\x81", b"h\0", b"b", also=b"cargparse\nNamespace\n"),
    "a dict in refused namespaces": _shared(
        _dict, b"h\1", b"K\1", b"\x85", b"R", b"h\0", b"b", also=b"cargparse\nNamespace\n"
    ),
    "a dict in mappings of protocol 0": lambda n: (
        b"("
        + _dict(n // 2)
        + b"q\0cm\nC\nq\1c__builtin__\ndict\nq\2ccopy_reg\n_reconstructor\nq\3"
        + b"h\3(h\1h\2h\0tR" * (n // 14)
        + b"t"
    ),
    "a set of protocol 2": _shared(lambda n: _SET + _list(n) + b"\x85R", b"]", b"h\0", b"a"),
    "a dict as a state": _shared(_dict, b"h\1", b")", b"\x81", b"h\0", b"b", also=_CLASS),
    "a tuple as a state": _shared(_tuple, b"h\1", b")", b"\x81", b"h\0", b"b", also=_CLASS),
    "a list as a state": _shared(_list, b"h\1", b")", b"\x81", b"h\0", b"b", also=_CLASS),
    "a dict in states": _shared(_dict, b"h\1", b")", b"\x81", b"N", b"h\0", b"\x86", b"b", also=_CLASS),
    "a dict as a state of dicts": _shared(_dict, b"h\1", b")", b"R", b"h\0", b"b", also=b"ccollections\nOrderedDict\n"),
    "a state of one object": _shared(_dict, b"h\1", b"h\0", b"b", b"0", also=_CLASS + b")\x81"),
    "a dict as hooks": lambda n: b"](" + _ordered(n // 2) + b"q\0" + _HOOKED * (n // 60) + b"e",
    "a text as a location": lambda n: (
        b"](" + _text(n) + b"q\0" + b"".join(_TAGGED.replace(b"01234567", b"%08d" % i) for i in range(n // 30)) + b"e"
    ),
    "deep lists": lambda n: b"](" + (b"]" * 900 + b"a" * 899) * (n // 1799) + b"e",
    "deep dicts": lambda n: b"](" + (b"}" + b"N}" * 899 + b"s" * 899) * (n // 2698) + b"e",
    "a text as a key": _shared(_text, b"}", b"h\0", b"N", b"s"),
    "a text as a key of containers": _shared(_text, b"}", b"h\0", b"]", b"s"),
    "a text as an attribute": _shared(_text, b"h\1", b")", b"\x81", b"}", b"h\0", b"N", b"s", b"b", also=_CLASS),
    "a text as a module": lambda n: (
        b"(" + _text(n // 2) + b"\x940" + b"".join(b"h\0\x8c\x08%08d\x93" % i for i in range(n // 6)) + b"t"
    ),
    "a text in lists": _shared(_text, b"]", b"h\0", b"a"),
    "a text encoded": _shared(_text, b"h\1", b"h\0", text("latin1"), b"\x86", b"R", also=b"c_codecs\nencode\n"),
    "getattr as an argument": lambda n: b"(" + _GETATTR + b"q\0" + _CALL + b"q\1" + b"h\1h\0\x85R" * (n // 4) + b"t",
    "a text in getattr": _shared(_text, b"h\1", b"N", b"h\0", b"\x86", b"R", also=_GETATTR),
    "namespaces": _data(b"cargparse\nNamespace\n", b"h\0)\x81}\x8c\1aNsb", 8),
    "numbers of numpy": _data(
        b"cnumpy._core.multiarray\nscalar\n", b"h\0h\1C\x08\0\0\0\0\0\0\xf0?\x86R", 5, before=_FLOATS
    ),
    "arrays of numpy": _data(
        b"cnumpy._core.multiarray\n_reconstruct\n", _ARRAY, 17, before=_FLOATS + b"cnumpy\nndarray\nq\0020"
    ),
    "paths": _data(b"cpathlib\nPurePosixPath\n", b"h\0\x8c\1a\x85R", 4),
    "dates": _data(b"cdatetime\ndate\n", b"h\0C\4\7\xea\1\1\x85R", 4),
    "default dicts": _data(b"ccollections\ndefaultdict\n", b"h\0)RK\1Ns", 6),
    "bytes in lists": _shared(
        lambda n: b"B" + min(n, 60000).to_bytes(4, "little") + b"a" * min(n, 60000), b"]", b"h\0", b"a"
    ),
    "a getter": _shared(_getter, b"h\0", b"h\1", b"\x85", b"R", also=_CALL),
    "a list of parameters in groups": _groups,
    "a list of groups in optimizers": _optimizers,
    "modules of one dict": _modules,  # the number of names is limited
    "dicts with a tensor": _dicts_of_tensors,
    "a text in many codecs": _in_codecs,
    "attributes, each in a list": _attributes(_DEEPER % b"a"),
    "attributes, each thrown away": _attributes(_DEEPER % b"a" + b"0"),
    "dangerous attributes": _attributes((_DEEPER % b"a").replace(b"X\1\0\0\0a", b"X\5\0\0\0torch")),
    "chains of calls, thrown away": lambda n: (_CALL + b")R" * 300 + b"0") * (n // 602) + b"N",
    "chains of tuples, thrown away": lambda n: (_CALL + b")R" + b"\x85" * 300 + b"0") * (n // 303) + b"N",
    "a tuple as a shape of arrays": _arrays(_tuple, b"h\3h\1\x89C\x08\0\0\0\0\0\0\xf0?"),
    "a tuple as axes of arrays": _axes,
    "a tuple in devices": _on_devices,
    "a list in pairs of Python 2": lambda n: (
        b"U\1a0ccollections\nOrderedDict\nq\0010" + _list(n // 2) + b"q\0000](" + b"h\1]h\0a\x85R" * (n // 12) + b"e"
    ),
    "arrays of one list": _arrays(_list, b")h\4\x89h\3", _OBJECTS),
    "metadata of tensors": _with_metadata,
    "numbers of a dtype with elements": _scalars,
    "texts of the same bytes": _text_scalars,
    "paths of one text": lambda n: (
        b"cpathlib\nPurePosixPath\nq\0010" + _text(1 << 16) + b"q\0000](" + b"h\1h\0\x85R" * (n // 4) + b"e"
    ),
    "tensors with a long name": _tied,
    "tensors on a long device": _on_long_device,
    "keys of tuples of tuples": _tuples_of_tuples,
    "objects below deep lists": _below_lists,
    "a bytearray in lists": _shared(lambda n: b"\x96" + n.to_bytes(8, "little") + b"a" * n, b"]", b"h\0", b"a"),
}


def file_of(shape: str, opcodes: int) -> tuple[bytes, int]:
    """Return a torch file whose pickle has the given shape and about `opcodes` opcodes, and the length of the
    pickle.
    """
    pickled = _WRAPPED % SHAPES[shape](opcodes)
    storages = [Record(b"a/data/" + key, b"") for key in {b"0", *re.findall(rb"(data of [0-9]{8})", pickled)}]
    return archive([Record(b"a/data.pkl", pickled), Record(b"a/version", b"3\n"), *storages]), len(pickled)


def opcodes_for(shape: str, nbytes: int) -> int:
    """Return the number of opcodes of the longest pickle with this `shape` that has at most `nbytes` bytes."""
    low, high = 1000, nbytes
    while high - low > nbytes // 100:
        middle = (low + high) // 2
        low, high = (middle, high) if len(SHAPES[shape](middle)) <= nbytes else (low, middle)
    return low


def seconds_for(length: int, opcodes: int) -> float:
    """Return the budget in seconds for a pickle of `length` bytes and `opcodes` opcodes."""
    return SECONDS_EACH_MB * length / MB + SECONDS_EACH * opcodes


class Cost:
    """The cost of a command: processor `seconds`, bytes of additional `memory`, and its result (`came`)."""

    def __init__(self, seconds: float, memory: int, came: str) -> None:
        self.seconds, self.memory, self.came = seconds, memory, came


def measured(command: str, path: Path) -> Cost:
    """Return the cost of `command` on the file at `path`, in a new process."""
    words = [sys.executable, "-m", "tests.fuzz.budgets", "--measure", command, str(path)]
    where = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": where})
    seconds, memory, came = done.stdout.split(" ", 2)
    return Cost(float(seconds), int(memory), came.strip())


def _measure(command: str, path: Path) -> None:
    """Run `command` in this process and print its cost."""
    import ckptconv
    from ckptconv.byteranges.sources import Source
    from ckptconv.errors import CkptconvError
    from ckptconv.formats.torch_zip import read_pickle
    from ckptconv.formats.zip_archive import read_archive
    from ckptconv.pickles.graph import gc_paused

    (path.parent / "warm.pt").write_bytes(file_of("None", 10)[0])
    for each in (path.parent / "warm.pt", path):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
        before, started, came = memory("VmRSS"), time.process_time(), "done"
        try:
            if command == "parse":
                with Source(each) as source, gc_paused():
                    read_pickle(read_archive(source).names["data.pkl"])
            elif command == "diff":
                shutil.copy(each, path.parent / "copy.pt")
                ckptconv.diff(each, path.parent / "copy.pt")
            elif command == "convert":
                ckptconv.convert(each, path.parent / "out.pt", map_location="cpu", force=True)
            elif command == "loadable":
                ckptconv.convert(each, path.parent / "out.pt", loadable=True, force=True)
            else:
                getattr(ckptconv, command)(each)
        except CkptconvError as error:
            came = f"{type(error).__name__}: {error.what[:60]}"
    print(time.process_time() - started, memory("VmHWM") - before, came)


def memory(which: str) -> int:
    """Return the bytes of memory of this process: the current size (VmRSS) or the peak (VmHWM)."""
    found = re.search(rf"{which}:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main() -> int:
    """Measure all shapes and return the exit status."""
    if sys.argv[1:2] == ["--measure"]:
        _measure(sys.argv[2], Path(sys.argv[3]))
        return 0
    opcodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    commands = sys.argv[2:] or COMMANDS
    exceeded = 0
    form = "{:<24}{:<9}{:>6}{:>8}{:>9}  {}"
    print(form.format("shape", "command", "MB", "budget", "B/opcode", "result"))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder, "a.pt")
        for shape in SHAPES:
            data, length = file_of(shape, opcodes)
            path.write_bytes(data)
            for command in commands:
                cost = measured(command, path)
                files = 2 if command == "diff" else 1
                share = cost.seconds / seconds_for(files * length, files * opcodes)
                each = max(0, cost.memory - FLOOR) / (files * opcodes)
                over = share > 1 or each > EACH
                exceeded += over
                result = cost.came + " OVER" * over
                row = form.format(shape, command, f"{length / MB:.1f}", f"{share:.0%}", f"{each:.0f}", result)
                print(row, flush=True)
    print(f"{exceeded} over the budget")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
