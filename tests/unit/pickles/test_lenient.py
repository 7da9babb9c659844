"""The lenient reader lists the globals that CPython's unpicklers reach. The results are compared with those of the
unpicklers.
"""

from __future__ import annotations

import pytest

from ckptconv.pickles.lenient import LenientScan, scan_lenient
from tests.fuzz import unpicklers

PLAIN = unpicklers.Way("latin-1", calls_give_texts=False, names_give_texts=False)
C, PYTHON, _ = (by for by, *_ in unpicklers.READERS)


def frame(length: int) -> bytes:
    return b"\x95" + length.to_bytes(8, "little")


def scan(data: bytes) -> LenientScan:
    return scan_lenient(lambda offset, length: data[offset : offset + length], 0, len(data), most=1000)


def listed(data: bytes) -> set[tuple[str, str]]:
    seen = scan(data)
    return {(node.module, node.name) for node in seen.graph.globals}


def reached_by(data: bytes) -> dict[str, list[tuple[str, str]]]:
    return {each.by: each.globals for each in unpicklers.reached(data, PLAIN)}


GLOBAL = b"cm\nf\n"
FOUND = [("m", "f")]

#: The name of a case, the pickle, and the unpickler that reaches m.f in it.
FORGIVEN = [
    ("NUL behind the slot of a PUT", b"Np1\0\n0g1\n0" + GLOBAL + b".", C),
    ("NUL and more behind it", b"Np1\0 two\n0h\x01" + GLOBAL + b".", C),
    ("NUL behind the slot of a GET", b"Nq\x010g1\0x\n" + GLOBAL + b".", C),
    ("spaces around a slot", b"Np \t1 \r\n0h\x01" + GLOBAL + b".", C),
    ("underscores and a sign", b"Np+1_0\n0h\x0a" + GLOBAL + b".", PYTHON),
    ("an odd slot", b"Np123456789012345678901234567890\n0" + GLOBAL + b".", PYTHON),
    ("NUL in an INT", b"I1\0x\n" + GLOBAL + b".", C),
    ("NUL in a FLOAT", b"F1\0x\n" + GLOBAL + b".", C),
    ("a LONG with L and underscores", b"L1_0L\n" + GLOBAL + b".", PYTHON),
    ("a frame past the end", frame(255) + GLOBAL + b".", PYTHON),
    ("a frame in the middle", b"N" + frame(len(GLOBAL)) + GLOBAL + b".", C),
    ("a frame in a frame", frame(20) + frame(1) + b"N" + GLOBAL + b"." + bytes(20), C),
    ("a frame of nothing", frame(0) + GLOBAL + b".", PYTHON),
    ("the last line without its end", b"cm\nfX", PYTHON),
    ("an empty line", b"cm\n\n.", PYTHON),
    ("the first line alone", b"cmX", PYTHON),
    ("INST without a MARK", b"im\nf\n.", PYTHON),
    ("POP of a MARK", b"(0" + GLOBAL + b".", C),
    ("no PROTO, and one in the middle", b"N\x80\x04" + GLOBAL + b".", C),
    ("an out-of-band buffer", b"\x97\x98" + GLOBAL + b".", C),
    ("duplicates of a global", GLOBAL + b"2\x86.", C),
    ("nothing behind it", GLOBAL, PYTHON),
    ("bytes behind STOP", GLOBAL + b".\xff\xff", C),
    ("a key without a value behind it", b"}(" + GLOBAL + b"u.", PYTHON),
]


@pytest.mark.parametrize(("data", "by"), [row[1:] for row in FORGIVEN], ids=[row[0] for row in FORGIVEN])
def test_globals_in_unusual_pickles_are_listed(data: bytes, by: str) -> None:
    """A global that one of CPython's unpicklers reaches in an unusual pickle is listed."""
    found = reached_by(data)[by]
    assert found and found[0][0] == "m"
    assert set(found) <= listed(data)


def test_slots_of_more_digits_than_python_converts() -> None:
    """Memo slots can have any number of digits, because Python before 3.11 had no limit. Different spellings of a slot
    are the same slot.
    """
    digits = b"1" * 5000
    data = b"cm\nf\np" + digits + b"\n0Vn\ng+1_" + digits[1:] + b"\n\x85R."
    seen = scan(data)
    assert seen.is_whole is False and listed(data) == set(FOUND)  # a text cannot be called
    data = b"cm\nf\np" + digits + b"\n0g+1_" + digits[1:] + b"\n)R."
    seen = scan(data)
    assert seen.is_whole and seen.graph.calls


@pytest.mark.parametrize(
    "maker", [b"cn\nt\n", b"cn\nt\n)R", b"Pid\n", b"\x82\x01"], ids=["global", "call", "id", "code"]
)
def test_unknown_texts_of_a_global(maker: bytes) -> None:
    """A global, or the result of a call or of a persistent id, can be a text. STACK_GLOBAL with such a text can name
    any global.
    """
    assert ("builtins.__import__", "f") in listed(maker + b"Vf\n\x93.")
    assert ("m", "builtins.__import__") in listed(b"Vm\n" + maker + b"\x93" + GLOBAL + b".")


def test_texts_of_python_2() -> None:
    """The encoding of texts of Python 2 depends on the loader. The names in UTF-8 and in Latin-1 are both listed."""
    data = b"U\x01mU\x03f\xc3\xa9\x93U\x01mU\x02f\xe9\x93."
    assert listed(data) == {("m", "fé"), ("m", "fÃ©")}


@pytest.mark.parametrize("opcodes", [b"Na", b"(Ne", b"NNs", b"(NNu", b"(N\x90", b"Nb", b"(NNNu"])
def test_changes_of_a_global_count_as_calls(opcodes: bytes) -> None:
    """An item or a state that is set on a global, such as ``os.environ``, counts as a call."""
    data = b"cos\nenviron\n" + opcodes + b"\xff"
    seen = scan(data)
    assert [call.callable for call in seen.graph.calls] == seen.graph.globals
    assert any(each.used for each in unpicklers.reached(data, PLAIN))


CUT = [
    frame(5) + b"cm\nXf\n.",
    frame(2) + b"cXm\nf\n.",
    frame(4) + b"V\xff\xffXm\nVf\n\x93.",
    frame(12) + b"N" + frame(6) + b"XX" + b"cm\nf\n.",
    frame(10) + b"N" + frame(3) + b"cmXm\nf\n.",
]


@pytest.mark.parametrize("data", CUT)
def test_frames_that_cut_opcodes(data: bytes) -> None:
    """If a frame ends inside an opcode, C's unpickler may drop the rest of the frame, depending on whether its file has
    ``peek``. Such a pickle is two programs, so the scan is in doubt.
    """
    found = reached_by(data)
    assert len({*map(tuple, found.values())}) > 1
    seen = scan(data)
    assert seen.doubt == "a pickle whose frames cut its opcodes in two"


def test_stop_inside_a_frame() -> None:
    """If STOP is inside a frame, the next pickle may start after STOP or after the frame, so the scan is in doubt. The
    scan is not in doubt if the frame ends with STOP or exceeds the file.
    """
    for length, doubt in ((2, False), (3, True), (8, True), (9, False)):
        seen = scan(frame(length) + b"N." + bytes(6))
        assert seen.is_whole and bool(seen.doubt) == doubt
