"""The allowed calls that make no tensor: Python's containers and numbers, torch.Size, torch.device, layouts."""

from __future__ import annotations

from ckptconv.checkpoint.weights_only.answers import AfterUnknown, NotKnown, Refused
from ckptconv.checkpoint.weights_only.arguments import Arguments
from ckptconv.checkpoint.weights_only.values import (
    BYTEARRAY,
    BYTES,
    COMPLEX,
    COUNTER,
    DEVICE,
    ORDERED_DICT,
    SET,
    UNKNOWN,
    Held,
    LayoutValue,
    Made,
    SizeValue,
    said,
)
from ckptconv.lazy_regex import regex
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Blob, Dict, Global, Tuple, Value

#: The names under which ``torch`` has its layouts.
LAYOUTS = frozenset(
    f"torch.{name}"
    for name in ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "jagged")
)
_DEVICE = regex(r"([a-z]+)(?::(0|[1-9][0-9]{0,8}))?")
#: The families that torch knows a name of, whatever the machine has.
DEVICE_TYPES = frozenset(
    (
        "cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy",
        "vulkan", "mps", "meta", "hpu", "mtia", "privateuseone",
    )
)  # a table  # fmt: skip
_LATIN_1 = frozenset(("latin1", "latin-1", "latin_1", "iso-8859-1"))
_UTF_8 = frozenset(("utf-8", "utf8"))
_NUMBERS = (bool, int, float)
_AT_ONCE = 100  # characters that are encoded in the time of one step


def ordered_dict(args: Arguments) -> Made:
    """``OrderedDict()``, of a mapping or of pairs."""
    if args.check_count(0, 1):
        value = args.items[0]
        if not args.objects.is_mapping(value):
            for pair in _elements(args, value):
                _check_pair(args, pair)
    return ORDERED_DICT


def _check_pair(args: Arguments, pair: Value) -> None:
    parts = args.objects.elements(pair, args.now) if isinstance(pair, Tuple) else _elements(args, pair)
    if parts is None or len(parts) != 2:
        raise Refused("its items must be pairs")
    args.objects.check_hashable(parts[0])


def counter(args: Arguments) -> Made:
    """``Counter()``, of a mapping or of what is to be counted."""
    if args.check_count(0, 1):
        value = args.items[0]
        if value is not None and not args.objects.is_mapping(value):
            for item in _elements(args, value):
                args.objects.check_hashable(item)
    return COUNTER


def set_(args: Arguments) -> Made:
    """``set()``, of what can be iterated over."""
    if args.check_count(0, 1):
        for item in _elements(args, args.items[0]):
            args.objects.check_hashable(item, "member of a set")
    return SET


def _elements(args: Arguments, value: Value) -> list[Value]:
    """What iterating over `value` gives, where that is a container of Python's."""
    found = args.objects.elements(value, args.now)
    if found is None:
        found = args.objects.keys(value, args.now)
    if found is not None:
        return found
    held = args.objects.held(value)
    if isinstance(held, (str, SizeValue)):
        items: list[Value] = [*(held if isinstance(held, str) else held.sizes)]
        args.objects.charge(len(items))
        return items
    if isinstance(held, (*_NUMBERS, Global)) or held is None:
        raise Refused(f"it cannot iterate over {said(held)}")
    if held is UNKNOWN:
        raise AfterUnknown
    raise NotKnown(f"what {said(held)} gives when it is iterated over")


def complex_(args: Arguments) -> Made:
    """``complex()``, of numbers."""
    for i in range(args.check_count(0, 2)):
        held = args.held(i)
        if isinstance(held, Made) and held is COMPLEX:
            continue
        if not isinstance(held, _NUMBERS):
            if held is None or isinstance(held, (Tuple, Dict)):
                raise Refused(f"it takes numbers, and gets {said(held)}")
            raise NotKnown(f"what it makes of {said(held)}")
        try:
            float(held)
        except OverflowError:
            raise Refused("it gets an integer that is too large for a float") from None
    return COMPLEX


def encode(args: Arguments) -> Made:
    """``_codecs.encode(text, encoding)``, by which older protocols write bytes."""
    n = args.check_count(1, 3)
    held = args.held(0)
    encoding = args.held(1) if n > 1 else "utf-8"
    if n > 2 or not isinstance(held, (str, Blob)) or not isinstance(encoding, str):
        if n == 2 and isinstance(held, (*_NUMBERS, type(None))) and encoding in _LATIN_1:
            raise Refused(f"it takes a text, and gets {said(held)}")
        raise NotKnown("an encoding in a way that torch.save does not write")
    _check_encodable(args, held, encoding.lower())
    return BYTES


def _check_encodable(args: Arguments, text: str | Blob, encoding: str) -> None:
    if encoding not in _LATIN_1 and (encoding not in _UTF_8 or isinstance(text, Blob)):
        raise NotKnown(f"the encoding {encoding[:40]!r}")
    if isinstance(text, Blob):
        fits = args.objects.is_latin_1(text)
    else:
        args.objects.charge(len(text) // _AT_ONCE)
        fits = text.isascii() or _has(encoding, text)
    if not fits:
        raise Refused(f"a text has characters that {encoding} has not")


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def bytearray_(args: Arguments) -> Made:
    """``bytearray()``, of bytes, of a text and its encoding, or of numbers."""
    n = args.check_count(0, 3)
    held = args.held(0) if n else BYTES
    if n > 1:
        encoding = args.held(1)
        if n > 2 or not isinstance(held, (str, Blob)) or not isinstance(encoding, str):
            raise NotKnown("a bytearray in a way that pickle does not write")
        _check_encodable(args, held, encoding.lower())
    elif isinstance(held, (str, Blob, float)) or held is None:
        raise Refused(f"it takes bytes, and gets {said(held)}")
    elif isinstance(held, int):
        if held < 0:
            raise Refused("its length is negative")
        if held > LIMITS.inline_bytes:
            raise NotKnown(f"it takes {held:,} bytes of memory")
        args.objects.copy(held, 1)
    elif held is not BYTES and held is not BYTEARRAY:
        _check_bytes(args, _elements(args, args.items[0]))
    return BYTEARRAY


def _check_bytes(args: Arguments, items: list[Value]) -> None:
    for item in items:
        held = args.objects.held(item)
        if not isinstance(held, int):
            raise NotKnown(f"what a bytearray makes of {said(held)}")
        if not 0 <= held < 256:
            raise Refused("a byte must be in range(0, 256)")


def size(args: Arguments) -> Made:
    """``torch.Size()``, of integers."""
    if not args.check_count(0, 1):
        return SizeValue([])
    sizes = []
    for item in _elements(args, args.items[0]):
        held = args.objects.held(item)
        if not isinstance(held, int):
            if isinstance(held, (float, str, Tuple)) or held is None:
                raise Refused(f"it takes integers, and gets {said(held)}")
            raise NotKnown(f"a size that is {said(held)}")
        sizes.append(int(held))
    return SizeValue(sizes)


def device(args: Arguments) -> Made:
    """``torch.device()``, of a text, with an index or not."""
    n = args.check_count(1, 2)
    held = args.held(0)
    if n == 1 and held is DEVICE:
        return DEVICE
    if n == 1 and type(held) is int:
        raise NotKnown("a device that is a number means the accelerator of the machine")
    if not isinstance(held, str):
        raise Refused(f"it takes a text, and gets {said(held)}") if held is None else NotKnown("a device")
    found = _DEVICE.fullmatch(held)
    if found is None or found[1] not in DEVICE_TYPES:
        raise Refused(f"torch knows no device {held[:40]!r}")
    if n == 2 and args.items[1] is not None:
        index = args.integer(1, "index")
        if index < 0 or found[2] is not None:
            raise Refused(f"the index of a device is {index}")
    return DEVICE


def layout(args: Arguments) -> Held:
    """``torch.serialization._get_layout(name)``."""
    args.check_count(1)
    held = args.held(0)
    if held not in LAYOUTS:
        raise Refused(f"torch has no layout {held[:40]!r}" if isinstance(held, str) else "torch has no such layout")
    assert isinstance(held, str)
    return LayoutValue(held)
