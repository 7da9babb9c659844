"""The opcodes of pickle protocols 0 to 5 by name. A test compares them with ``pickletools``."""

from __future__ import annotations

CODES: dict[str, bytes] = {
    "INT": b"I", "BININT": b"J", "BININT1": b"K", "BININT2": b"M", "LONG": b"L", "LONG1": b"\x8a", "LONG4": b"\x8b",
    "STRING": b"S", "BINSTRING": b"T", "SHORT_BINSTRING": b"U", "BINBYTES": b"B", "SHORT_BINBYTES": b"C",
    "BINBYTES8": b"\x8e", "BYTEARRAY8": b"\x96", "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"\x98", "NONE": b"N",
    "NEWTRUE": b"\x88", "NEWFALSE": b"\x89", "UNICODE": b"V", "SHORT_BINUNICODE": b"\x8c", "BINUNICODE": b"X",
    "BINUNICODE8": b"\x8d", "FLOAT": b"F", "BINFLOAT": b"G", "EMPTY_LIST": b"]", "APPEND": b"a", "APPENDS": b"e",
    "LIST": b"l", "EMPTY_TUPLE": b")", "TUPLE": b"t", "TUPLE1": b"\x85", "TUPLE2": b"\x86", "TUPLE3": b"\x87",
    "EMPTY_DICT": b"}", "DICT": b"d", "SETITEM": b"s", "SETITEMS": b"u", "EMPTY_SET": b"\x8f", "ADDITEMS": b"\x90",
    "FROZENSET": b"\x91", "POP": b"0", "DUP": b"2", "MARK": b"(", "POP_MARK": b"1", "GET": b"g", "BINGET": b"h",
    "LONG_BINGET": b"j", "PUT": b"p", "BINPUT": b"q", "LONG_BINPUT": b"r", "MEMOIZE": b"\x94", "EXT1": b"\x82",
    "EXT2": b"\x83", "EXT4": b"\x84", "GLOBAL": b"c", "STACK_GLOBAL": b"\x93", "REDUCE": b"R", "BUILD": b"b",
    "INST": b"i", "OBJ": b"o", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "PROTO": b"\x80", "STOP": b".",
    "FRAME": b"\x95", "PERSID": b"P", "BINPERSID": b"Q",
}  # a table  # fmt: skip
