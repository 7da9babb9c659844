"""Changes of pickles at the level of opcodes. The result is mostly a valid pickle that no pickler would write."""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable
from random import Random

from ckptconv.checkpoint.safe_globals import ALLOWED

__all__ = ["Change", "changed", "split"]

#: A function that changes bytes.
Change = Callable[[bytes], bytes]

_FRAME, _PROTO, _STOP, _MARK, _POP = b"\x95", b"\x80", b".", b"(", b"0"
_OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
_NUMBERS = (
    0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 65, 100, 127, 128, 255, 256, 1000, 5056, 65535, 65536, (1 << 31) - 1,
    1 << 31, (1 << 32) - 16, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    1 << 64, -1, -2, -128, -(1 << 31), -(1 << 63),
)  # a table  # fmt: skip
_TEXTS = (
    "", "a", "storage", "module", "cpu", "cuda:0", "cuda", "cuda:999", "meta", "xla:0", "mps", "0", "1", "2", "../0",
    "data", "a/b", "[0]", "\\", "é", "\ud800", "\0", "\x1b[2J", "x" * 300, "state_dict", "model", "optimizer",
    "state", "param_groups", "params", "module.a", "a.weight", "_metadata", "version", "rng_state",
    "torch_rng_state", "python", "numpy", "_parameters", "_buffers", "_modules", "training", "latin1", "encode",
    "os", "system", "builtins", "eval", "torch", "FloatStorage", "torch.strided", "little_endian", "fqn", "offset",
    "relative_path", "length", "chunks", "sizes", "__0_0.distcp", "1.0.0", "exp_avg", "step", "ema", "_extra_state",
    "__metadata__", "format",
)  # a table  # fmt: skip
_GLOBALS = (
    *sorted(ALLOWED),
    "os.system",
    "builtins.eval",
    "builtins.getattr",
    "builtins.list",
    "builtins.dict",
    "__builtin__.set",
    "copy_reg._reconstructor",
    "copyreg.__newobj__",
    "functools.partial",
    "collections.defaultdict",
    "argparse.Namespace",
    "numpy.core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
    "torch.storage._load_from_bytes",
    "torch._C.Generator",
    "torch.nn.modules.linear.Linear",
    "torch._utils._rebuild_parameter_v9",
    "torch.distributed.checkpoint.metadata.Metadata",
    "commands.getoutput",
    "a.b.c",
    "é.ü",
    "pickle.loads",
    "torch._tensor._rebuild_from_type_v2",
    "torch.distributed.tensor.DTensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
    "torch._dynamo.eval_frame.OptimizedModule",
)


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the opcodes of the pickle at the start of `data` with their operands, and the remaining bytes."""
    stream = io.BytesIO(data)
    pieces, end = [], 0
    try:
        for _, _, at in pickletools.genops(stream):
            pieces.append(data[at : stream.tell()])
            end = stream.tell()
    except Exception:
        pass  # the invalid bytes are returned as the rest
    return pieces, data[end:]


def changed(data: bytes, random: Random, change: Change, *, others: list[list[bytes]] | None = None) -> bytes:
    """Return the pickle `data` with one to three changes. Parts of `others` may be inserted.

    `change` is used for bytes without a structure.
    """
    pieces, rest = split(data)
    if not pieces:
        return change(data)
    for _ in range(random.choice((1, 1, 1, 1, 1, 2, 2, 3))):
        pieces = random.choice(_EDITS)(pieces, random, change, others or [pieces]) or [_STOP]
    if random.random() < 0.8:
        pieces = _closed(pieces, random)
    if random.random() < 0.8:
        pieces = _framed(pieces, random)
    return b"".join(pieces) + rest


# Edits


def _run(pieces: list[bytes], random: Random) -> tuple[int, int]:
    start = random.randrange(len(pieces))
    return start, min(len(pieces), start + random.choice((1, 1, 1, 2, 3, 5, 8, 20)))


def _delete(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    start, end = _run(pieces, random)
    return pieces[:start] + pieces[end:]


def _duplicate(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    start, end = _run(pieces, random)
    at = random.randrange(len(pieces))
    times = random.choice((1, 1, 1, 2, 10, 50))
    return pieces[:at] + pieces[start:end] * times + pieces[at:]


def _swap(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    i, j = random.randrange(len(pieces)), random.randrange(len(pieces))
    pieces = [*pieces]
    pieces[i], pieces[j] = pieces[j], pieces[i]
    return pieces


def _splice(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    other = random.choice(others)
    start, end = _run(other, random)
    at = random.randrange(len(pieces))
    return pieces[:at] + [piece for piece in other[start:end] if piece != _STOP] + pieces[at:]


def _insert(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    at = random.randrange(len(pieces))
    return pieces[:at] + [_any(random) for _ in range(random.choice((1, 1, 2, 3)))] + pieces[at:]


def _operand(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    with_operand = [i for i, piece in enumerate(pieces) if len(piece) > 1]
    if not with_operand:
        return pieces
    i = random.choice(with_operand)
    return [*pieces[:i], _other_operand(pieces, i, random, change), *pieces[i + 1 :]]


def _noise(pieces: list[bytes], random: Random, change: Change, others: list[list[bytes]]) -> list[bytes]:
    i = random.randrange(len(pieces))
    return [*pieces[:i], change(pieces[i]) or pieces[i], *pieces[i + 1 :]]


_EDITS = (_delete, _duplicate, _swap, _splice, _splice, _insert, _operand, _operand, _operand, _operand, _noise)


# Opcodes


def _other_operand(pieces: list[bytes], i: int, random: Random, change: Change) -> bytes:
    """Return opcode `i` of `pieces` with another operand of the same kind."""
    code = pieces[i][:1]
    if code in b"JKMIL\x8a\x8b":
        return _number(random.choice(_NUMBERS), random)
    if code in b"X\x8c\x8dVSUTC":
        return _text(random.choice(_TEXTS), random)
    if code in b"hjgqrp\x94":
        slots = sum(piece[:1] in b"qrp\x94" for piece in pieces)
        return _slot(
            random.choice((random.randrange(slots + 1), random.choice(_NUMBERS) % (1 << 32))),
            random,
            put=code in b"qrp\x94",
        )
    if code == b"c":
        return _global(random)
    return change(pieces[i]) or pieces[i]


def _any(random: Random) -> bytes:
    """Return a random opcode."""
    kind = random.randrange(8)
    if kind == 0:
        return _number(random.choice(_NUMBERS), random)
    if kind == 1:
        return _text(random.choice(_TEXTS), random)
    if kind == 2:
        return _slot(random.randrange(12), random, put=random.random() < 0.5)
    if kind == 3:
        return _global(random)
    if kind == 4:
        return random.choice(
            (
                b"\x82\x01",
                b"\x84\0\0\x01\0",
                b"cm\nC\n)\x81",
                b"cm\nf\n)R",
                b"im\nC\n",
                b"Pid\n",
                b"G" + random.randbytes(8),
                b"F1e5\n",
                b"\x96" + bytes(8),
                b"]\x94",
                b"B\1\0\0\0b",
            )
        )
    return random.choice([code for code, op in _OPCODES.items() if op.arg is None and code != _STOP])


def _number(n: int, random: Random) -> bytes:
    ways = [b"I%d\n" % n, b"L%dL\n" % n]
    size = n.bit_length() // 8 + 1
    ways += [b"\x8a" + bytes([size]) + n.to_bytes(size, "little", signed=True)] * 2
    if 0 <= n < 256:
        ways += [b"K" + bytes([n])] * 4
    if 0 <= n < 65536:
        ways += [b"M" + n.to_bytes(2, "little")] * 3
    if -(1 << 31) <= n < 1 << 31:
        ways += [b"J" + n.to_bytes(4, "little", signed=True)] * 3
    return random.choice(ways)


def _text(text: str, random: Random) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    ways = [b"X" + struct.pack("<I", len(data)) + data] * 5 + [
        b"B" + struct.pack("<I", len(data)) + data,
        b"T" + struct.pack("<i", len(data)) + data,
        b"\x8d" + struct.pack("<Q", len(data)) + data,
    ]
    if len(data) < 256:
        ways += [bytes([code, len(data)]) + data for code in b"\x8c\x8cUC"]
    if data.isalnum():
        ways += [b"V" + data + b"\n", b"S'" + data + b"'\n"]
    return random.choice(ways)


def _slot(n: int, random: Random, *, put: bool) -> bytes:
    ways = [(b"r" if put else b"j") + struct.pack("<I", n), (b"p%d\n" if put else b"g%d\n") % n]
    if n < 256:
        ways += [(b"q" if put else b"h") + bytes([n])] * 4
    return random.choice([*ways, b"\x94"] if put else ways)


def _global(random: Random) -> bytes:
    module, _, name = random.choice(_GLOBALS).rpartition(".")
    if random.random() < 0.2:
        return _text(module, random) + _text(name, random) + b"\x93"
    return f"c{module}\n{name}\n".encode()


# Valid pickles


def _closed(pieces: list[bytes], random: Random) -> list[bytes]:
    """Return `pieces` with opcodes at the end that combine the rest of the stack into one value."""
    body = [piece for piece in pieces if piece != _STOP]
    heights = [0]
    for piece in body:
        op = _OPCODES.get(piece[:1])
        if piece == _MARK:
            heights.append(0)
        elif op is not None and pickletools.markobject in op.stack_before:
            if len(heights) > 1:
                heights.pop()
            below = op.stack_before.index(pickletools.markobject)
            heights[-1] = max(0, heights[-1] - below) + len(op.stack_after)
        elif piece == _POP and not heights[-1] and len(heights) > 1:
            heights.pop()
        elif op is not None:
            heights[-1] = max(0, heights[-1] - len(op.stack_before)) + len(op.stack_after)
    while len(heights) > 1:
        heights.pop()
        heights[-1] += 1
        body.append(random.choice((b"t", b"t", b"l")))
    if not heights[0]:
        body.append(b"N")
    body += [b"\x86"] * (heights[0] - 1)
    return [*body, _STOP]


def _framed(pieces: list[bytes], random: Random) -> list[bytes]:
    """Return `pieces` with one protocol at the start, and with one frame or none."""
    protocol = next((piece for piece in pieces if piece[:1] == _PROTO), _PROTO + b"\x02")
    body = b"".join(piece for piece in pieces if piece[:1] not in (_PROTO, _FRAME))
    frame = _FRAME + struct.pack("<Q", len(body)) if protocol[1:] >= b"\x04" and random.random() < 0.7 else b""
    return [protocol, frame, body]
