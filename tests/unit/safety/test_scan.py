"""The scan for code: dangerous and unknown globals in a checkpoint are found, with their paths. Harmless content is not
called dangerous, and a conversion carries nothing dangerous unless it is allowed to.
"""

from __future__ import annotations

import csv
import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from ckptconv.errors import CkptconvError, DangerousError, InputError, UnsupportedError
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.limits import Limits
from ckptconv.pickles.parser import parse
from ckptconv.safety import nested_pickles, scan
from ckptconv.safety.scan import Concern, concerns, level_of
from tests.support import global_calls as ways
from tests.support.archives import rezipped
from tests.support.command import Command
from tests.support.conversions import refused, saved_at
from tests.support.hostile_bytes import dict_of, integer, saved, storage, tensor, text, torch_zip_of, zip_of
from tests.support.judge import refusal
from tests.support.memory import memory_below
from tests.support.reduced import Reduced

ARGS = text("x") + b"\x85"
CALL = ways.NAMINGS["REDUCE"]("os", "system", ARGS)
INNER = b"\x80\x02" + CALL + b"."
METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
Write = Callable[..., Path]
LOADS, REFUSED = "loads with weights_only=True", "refused by weights_only=True, needs no code"


def judged(path: Path) -> tuple[list[Concern], str]:
    """Return the concerns of the checkpoint at `path`, and their level."""
    with open_input(path) as source:
        checkpoint = opening.read(source)
        found = concerns(checkpoint)
        return found, level_of(checkpoint, found)


def names(path: Path) -> list[str]:
    return [f"{concern.name} at {concern.path}" for concern in judged(path)[0]]


def nested(data: bytes, nest: str = "BINBYTES") -> bytes:
    """Return a checkpoint with the pickle `data` in a byte string."""
    return ways.checkpoint(ways.NESTS[nest](data))


def pushed(*codes: bytes) -> bytes:
    """Return a checkpoint with a tuple of the values that `codes` push."""
    return ways.checkpoint(b"(" + b"".join(codes) + b"t")


# Positions of globals


@pytest.mark.parametrize("naming", ways.NAMINGS)
def test_every_way_to_name_a_global(write: Write, naming: str) -> None:
    """Every opcode that names, calls or builds with a global is found, in each container with a pickle. The concern
    contains the path, and tells whether the global is dangerous.
    """
    for module, name, dangerous in (("os", "system", True), ("unknown", "Thing", False)):
        code = ways.NAMINGS[naming](module, name, ARGS)
        for data in (
            ways.checkpoint(code),
            ways.checkpoint(code, protocol=2),
            ways.legacy_with(code),
            ways.plain_of(code),
        ):
            (found,), level = judged(write(data))
            assert (found.name, found.dangerous) == (f"{module}.{name}", dangerous)
            assert found.path.startswith("x") and level == ("dangerous" if dangerous else "needs code")


@pytest.mark.parametrize("place", ways.PLACES)
def test_every_position(write: Write, place: str) -> None:
    """A dangerous global is found at every position in the graph, also in values that the pickle discards."""
    (found,), level = judged(write(ways.checkpoint(ways.PLACES[place](CALL))))
    assert found.name == "os.system" and level == "dangerous"
    thrown_away = found.path == "(a discarded value)"
    assert thrown_away == place.startswith("POP") and (thrown_away or found.path.startswith("x"))


@pytest.mark.parametrize("extension", ways.EXTENSIONS)
def test_extension_codes(write: Write, extension: str) -> None:
    """An extension code of the copyreg registry is a concern, also in a discarded value. Only the process that reads
    the file knows the global behind the code.
    """
    for code, path in (
        (ways.EXTENSIONS[extension], "x"),
        (ways.EXTENSIONS[extension] + b"0N", "(a discarded value)"),
    ):
        (found,), level = judged(write(ways.checkpoint(code)))
        assert found.name.startswith("extension code ") and found.path == path and level == "needs code"


def test_a_global_is_listed_once(write: Write) -> None:
    """A global is listed once, with its first path and the number of its other positions. Dangerous globals
    come first.
    """
    thing = ways.NAMINGS["REDUCE"]("unknown", "Thing", ARGS)
    (first, second), _ = judged(write(ways.checkpoint(b"](" + thing + thing + CALL + thing + b"e")))
    assert first == Concern("os.system", "x[2]", "dangerous", more=0)
    assert second == Concern("unknown.Thing", "x[0]", "needs code", more=2)


CUT_ARCHIVE = ways.NESTS["BINBYTES"](zip_of({"a/data.pkl": INNER})[:-1])
INSIDE = "os.system at x (pickle inside)"
#: Files, and the first concern that is expected.
NAMED: dict[str, tuple[bytes, str]] = {
    "the constants of a program are a pickle of its own": (ways.program_of(CALL), "os.system at constants.pkl: [0]"),
    "and both count": (ways.program_of(CALL, "data.pkl"), "os.system at [0]"),
    "_codecs.encode of a text alone is UTF-8": (
        ways.checkpoint(b"c_codecs\nencode\n" + text("cos\nsystem\n(S'\u20ac'\ntR.") + b"\x85R"),
        INSIDE,
    ),
    "a pickle's name counts in any case, as torch's reader has it": (
        nested(zip_of({"a/data.PKL": INNER})),
        "os.system at x (a/data.PKL inside)",
    ),
    "whatever its suffix": (nested(zip_of({"a/x.Pickle": INNER})), "os.system at x (a/x.Pickle inside)"),
    "pickles one behind another: a file of them can be read on": (nested(b"N." + INNER), INSIDE),
    "six of them": (nested(b"N." * 6 + INNER), INSIDE),
    "thousands": (nested(b"N." * 5_000 + INNER), INSIDE),
    "too many": (nested(b"N." * 10_001 + INNER), "too many nested pickles to check at x"),
    "long ones": (nested(b"N." + INNER, "long bytes"), INSIDE),
    "six long ones": (nested(b"N." * 6 + INNER, "long bytes"), INSIDE),
    "thousands of long ones": (nested(b"N." * 5_000 + INNER, "long bytes"), INSIDE),
    "too many long ones": (
        nested(b"N." * 10_001 + INNER, "long bytes"),
        "too many nested pickles to check at x",
    ),
    "an archive that cannot be read": (ways.checkpoint(CUT_ARCHIVE), "an archive that cannot be read at x"),
    "a bomb": (nested(zip_of({"a/data.pkl": bytes(10_000_000)}, 8)), "a pickle that is too long to check at x"),
}


@pytest.mark.parametrize("case", NAMED)
def test_pickles_and_archives_inside_a_file(write: Write, case: str) -> None:
    """Pickles and archives inside a file are scanned, up to limits of their number and length. The concern contains the
    path.
    """
    data, first = NAMED[case]
    found, level = judged(write(data))
    assert [f"{concern.name} at {concern.path}" for concern in found if concern.dangerous or len(found) == 1] == [first]
    assert level == ("dangerous" if first.startswith("os.system") else "needs code")


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda folder: ways.shards_in(folder, CALL), "os.system at (a discarded value)"),
        (
            lambda folder: ways.shards_in(folder, ways.NESTS["BINBYTES8"](INNER)),
            "os.system at (a discarded value) (pickle inside)",
        ),
        (
            lambda folder: ways.shards_in(folder, ways.NESTS["long bytes"](INNER)),
            "os.system at (a discarded value) (pickle inside)",
        ),
        (
            lambda folder: ways.shards_in(folder, b"ccollections\nOrderedDict\n)R)R"),
            "a call of the result of collections.OrderedDict at (a discarded value)",
        ),
        (lambda folder: ways.dcp_in(folder, Reduced(print, ("x",))), "builtins.print at x"),
        (lambda folder: ways.dcp_in(folder, {"a": INNER}), "os.system at x/a (pickle inside)"),
    ],
    ids=["shard", "shard, nested", "shard, long", "shard, result", "item of a run", "item, nested"],
)
def test_parts(tmp_path: Path, make: Callable[[Path], Path], where: str) -> None:
    """Values that a shard discards are scanned, although the merged checkpoint does not contain them. Items of
    torch.distributed.checkpoint are scanned, too.
    """
    assert names(make(tmp_path / "folder")) == [where]


def test_modules_of_the_older_format(write: Write) -> None:
    """In a file of torch before 1.6, a class that a persistent id names is one concern, at the path of the module."""
    path = write(saved([torch.nn.Linear(1, 1)], _use_new_zipfile_serialization=False))
    assert judged(path)[0] == [Concern("torch.nn.modules.linear.Linear", "[0]", "needs code")]


# Nested pickles


@pytest.mark.parametrize("nest", ways.NESTS)
def test_pickles_inside(write: Write, nest: str) -> None:
    """A pickle inside a byte string is found, for every kind of byte string and every protocol. The level of the file
    still tells only whether torch loads it.
    """
    for data in (ways.checkpoint, ways.legacy_with, ways.plain_of):
        for protocol in range(6):
            inner = pickle.dumps({"a": [Reduced(print, ("x",))]}, protocol)
            path = write(data(ways.NESTS[nest](inner)))
            (found,), level = judged(path)
            assert found.name in ("builtins.print", "__builtin__.print") and found.kind == "needs code"
            assert level == (REFUSED if refusal(path) else LOADS)
            assert " inside)/a[0]" in found.path
            assert found.path.startswith("(a discarded value)" if nest == "popped" else "x ")


@given(
    st.lists(
        st.one_of(
            st.binary(),
            st.binary().map(lambda data: b"c" + data),
            st.sampled_from([b".", b"N.", b"}.", b"config\nname\nmore", b"(lp0\n.", b"PK\x03\x04" + bytes(100)]),
        )
    )
)
def test_other_byte_strings(tmp_path_factory: pytest.TempPathFactory, values: list[bytes]) -> None:
    """Byte strings with random bytes, texts or pickles of plain values are not taken for nested pickles with code.

    Empty byte strings need code, because protocol 2 creates them by a call of ``bytes``.
    """
    path = saved_at(tmp_path_factory.mktemp("bytes") / "m.pt", {"w": torch.ones(1), "x": values})
    known = ("an archive that cannot be read", "builtins.bytes")
    assert all(concern.name in known and " inside)" not in concern.path for concern in judged(path)[0])


def test_a_file_of_weights_inside(write: Write) -> None:
    """A file of tensors inside a byte string needs no code."""
    for zipped in (True, False):
        inner = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=zipped)
        assert judged(write(saved({"x": inner}))) == ([], LOADS)


ran: list[str] = []


def runs(*_: object) -> str:
    """Record that a pickle below called this function."""
    ran.append("ran")
    return "os"


RUNS = ways.NAMINGS["REDUCE"](__name__, "runs", ARGS)


@pytest.mark.parametrize(
    "inner",
    [
        RUNS + b"\xff",
        RUNS,
        b"\x80\x02\x80\x04" + RUNS + b".",
        b"N" + RUNS + b".",
        b"(" + RUNS + b".",
        b"I010\n0" + RUNS + b".",
        b"L 7\n0" + RUNS + b".",
        b"\x80\x04\x95\x08\0\0\0\0\0\0\0\x95\x02\0\0\0\0\0\0\0" + RUNS + b".",
        b"\x8b\x01\x12\x01\0" + bytes(0x11201) + b"0" + RUNS + b".",
        b"C\x01x\x98" + RUNS + b".",
        b"Np 7\n0g 7\n0" + RUNS + b".",
        b"U%c%sU\x04runs\x93" % (len(__name__), __name__.encode()) + ARGS + b"R.",
        b"}Nb" + RUNS + b".",
    ],
)
def test_pickles_that_only_python_reads(write: Write, inner: bytes) -> None:
    """A pickle whose call Python runs is found inside a byte string, although the parser for checkpoints refuses the
    pickle.
    """
    ran.clear()
    with pytest.raises(InputError):
        parse(lambda offset, length: inner[offset : offset + length], len(inner), where="here")
    try:
        pickle.loads(inner)
    except Exception:
        assert ran
    assert ran
    found = names(write(nested(inner)))
    assert any(each.startswith(f"{__name__}.runs at x (pickle inside)") for each in found)


def test_computed_names_inside(write: Write) -> None:
    """In a nested pickle, STACK_GLOBAL with the result of a call is dangerous."""
    inner = RUNS + short("system") + b"\x93" + ARGS + b"R."
    found, level = judged(write(nested(inner)))
    assert level == "dangerous" and found[0].name == "builtins.__import__.system"


def short(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def test_depth(write: Write) -> None:
    """Nested pickles are scanned up to a depth of eight. Deeper ones are reported as unknown."""
    data = INNER
    for depth in range(1, 11):
        data = b"\x80\x04" + ways.NESTS["BINBYTES"](data) + b"."
        (found,), level = judged(write(nested(data)))
        assert found.name == ("os.system" if depth < 8 else "pickles nested too deeply"), depth
        assert (found.kind, level) == (("dangerous",) * 2 if depth < 8 else ("unknown", "needs code"))


def test_pickles_that_are_too_large_to_scan(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested pickle with more opcodes than the limit is reported as too long."""
    monkeypatch.setattr(nested_pickles, "LIMITS", Limits(nested_opcodes=100))
    assert names(write(nested(b"N0" * 100 + INNER))) == ["a pickle that is too long to check at x"]


def test_many_pickles_inside(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of nested pickles that are scanned is limited. The first one above the limit is reported as
    unknown.
    """
    monkeypatch.setattr(scan, "LIMITS", Limits(pickles_inside=10))
    found, level = judged(write(pushed(*[ways.NESTS["SHORT_BINBYTES"](b"cmine\nThing\n.")] * 12)))
    assert found == [
        Concern("too many nested pickles to check", "x[10]", "unknown", inside=True),
        Concern("mine.Thing", "x[0] (pickle inside)", "needs code", more=9, inside=True),
    ]
    assert level == "needs code"


def in_a_part(code: bytes) -> bytes:
    """Return a checkpoint with a tensor under ``x/a/w``, and the value that `code` pushes under ``x/b``."""
    part = b"}(" + text("a") + b"}(" + text("w") + tensor() + b"u" + text("b") + code + b"u"
    return torch_zip_of(dict_of(text("x"), part, protocol=4))


def test_content_that_cannot_be_checked_is_not_ok(write: Write, tmp_path: Path) -> None:
    """``verify`` fails for content that cannot be checked. ``convert`` refuses such content unless it is allowed or not
    selected.
    """
    data = INNER
    for _ in range(9):
        data = b"\x80\x04" + ways.NESTS["BINBYTES"](data) + b"."
    path = write(in_a_part(ways.NESTS["BINBYTES"](data)))
    verdict = ckptconv.verify(path)
    assert not verdict.ok and verdict.findings[0].level == "unknown"
    refused(DangerousError, "cannot be checked", path, tmp_path / "out.pt", map_location="cpu")
    ckptconv.convert(path, tmp_path / "out.pt", map_location="cpu", allow_unsafe=True)
    ckptconv.convert(path, tmp_path / "part.pt", select="x/a")
    assert judged(tmp_path / "part.pt") == ([], LOADS)


def test_concerns_of_all_kinds_are_listed(write: Write) -> None:
    """An archive that cannot be read is listed first, even with more than a thousand unknown globals."""
    strange = [f"cmodule{i}\nname\n".encode() for i in range(1001)]
    found, _ = judged(write(pushed(*strange, CUT_ARCHIVE)))
    assert (found[0].name, found[0].kind) == ("an archive that cannot be read", "unknown")


@pytest.mark.parametrize(
    ("codec", "errors"),
    [
        (codec, None)
        for codec in (
            "utf-8",
            "U8",
            "utf_16_le",
            "UTF-16LE",
            "utf 16 be",
            "utf-32-le",
            "utf-32-be",
            "utf-7",
            "ascii",
            "646",
            "iso-8859-1",
            "utf-16" + "-" * 50 + "le",
            "raw_unicode_escape",
        )
    ]
    + [("ascii", "ignore")],
)
def test_codecs(write: Write, codec: str, errors: str | None) -> None:
    """The result of ``_codecs.encode`` is scanned for every codec and every spelling of its name, also for a long text.
    Python's own codecs are the reference.
    """
    for length in (0, 70_000):
        data = b"cos\nsystem\n(S'" + b"x" * length + b"'\ntR."
        data += b"." * (-len(data) % 4)
        try:
            said = data.decode(codec, "surrogatepass") if codec != "ascii" else data.decode() + "\xff"
        except UnicodeDecodeError:
            continue
        if errors is None and codec == "ascii":
            said = said[:-1]
        assert (
            said.encode(codec, errors or "surrogatepass" if errors or "16" in codec or "32" in codec else "strict")[:6]
            == b"cos\nsy"
        )
        how = text(errors) + b"\x87R" if errors else b"\x86R"
        how = text("surrogatepass") + b"\x87R" if errors is None and "16" in codec else how
        raw = said.encode("utf-8", "surrogatepass")
        code = b"c_codecs\nencode\nX" + len(raw).to_bytes(4, "little") + raw + text(codec) + how
        assert names(write(ways.checkpoint(code))) == ["os.system at x (pickle inside)"]


@pytest.mark.parametrize("method", [0, 8])
def test_other_records_of_an_archive(write: Write, tmp_path: Path, method: int) -> None:
    """Pickles in other records of the archive are scanned. A conversion that carries these records refuses dangerous
    ones.
    """
    path = write(rezipped(ways.checkpoint(b"N"), {"extra/x.pkl": b"N." + INNER}, method=method))
    (found,), level = judged(path)
    assert (found.name, found.path, level) == ("os.system", "extra/x.pkl: .", "dangerous")
    refused(DangerousError, None, path, tmp_path / "out.pt", map_location="cpu")
    ckptconv.convert(path, tmp_path / "out.bin", map_location="cpu", format="legacy")
    assert judged(tmp_path / "out.bin") == ([], LOADS)
    program = rezipped(ways.program_of(CALL), {"constants.pkl": b"\x80\x02).", "code/x.pkl": INNER})
    assert "os.system at code/x.pkl: ." in names(write(program))


@pytest.mark.parametrize("number", range(5))
def test_pickles_around_the_object(write: Write, tmp_path: Path, number: int) -> None:
    """In the older format, byte strings in the pickles before and after the object are scanned, and a conversion does
    not carry them. For harmless byte strings, the level agrees with torch.
    """
    data, ends = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False), [0]
    for _ in range(5):
        ends.append(len(data) - len(_behind_pickle(data[ends[-1] :])))
    for nest in ("SHORT_BINSTRING", "BINBYTES"):
        at = ends[number] + 2
        path = write(data[:at] + ways.NESTS[nest](INNER) + b"0" + data[at:])
        if number == 0:
            with pytest.raises(InputError):  # the file is not recognized
                judged(path)
            continue
        (found,), level = judged(path)
        assert found.name == "os.system" and level == "dangerous"
        assert ("around the object: " in found.path) == (number != 3)
        if number != 3:
            ckptconv.convert(path, tmp_path / "out.pt", map_location="cpu", format="legacy", force=True)
            assert judged(tmp_path / "out.pt") == ([], LOADS)
        path = write(data[:at] + ways.NESTS[nest](b"harmless") + b"0" + data[at:])
        assert judged(path) == ([], REFUSED if refusal(path) else LOADS)


def _behind_pickle(data: bytes) -> bytes:
    file = io.BytesIO(data)
    for _ in pickletools.genops(file):
        pass
    return file.read()


def test_byte_strings_in_sys_info(write: Write, tmp_path: Path) -> None:
    """A byte string in ``sys_info`` that torch loads is scanned. A conversion does not carry it."""
    data = ways.legacy_with(b"N")
    at = data.index(b"\x80\x02}") + 3
    path = write(data[:at] + ways.NESTS["SHORT_BINSTRING"](b"cos\nsystem\n.") + b"Ns" + data[at:])
    (found,), _ = judged(path)
    assert (found.name, refusal(path)) == ("os.system", None)
    ckptconv.convert(path, tmp_path / "out.pt", map_location="cpu", format="legacy")
    assert judged(tmp_path / "out.pt") == ([], LOADS)


def test_extensions_around_the_object(write: Write) -> None:
    """An extension code of the copyreg registry in the pickles around the object is refused as code."""
    data = ways.legacy_with(b"N")
    at = data.index(b"\x80\x02}")
    with pytest.raises(InputError, match="the pickles around the object contain code"):
        judged(write(data[: at + 2] + b"\x82\x070" + data[at + 2 :]))


def test_a_pickled_module_inside(write: Write) -> None:
    """A pickled module in a byte string loads its storages from more byte strings, which are scanned. It needs the code
    of the module, but is not dangerous. Loading anything else in this way is dangerous.
    """
    for protocol in (2, 4):
        inner = pickle.dumps(torch.nn.Linear(1, 1), protocol)
        found, level = judged(write(nested(inner)))
        assert {concern.kind for concern in found} == {"needs code"} and level == REFUSED
        assert not any("_load_from_bytes" in concern.name for concern in found)
    load = b"ctorch.storage\n_load_from_bytes\n"
    evil = load + ways.NESTS["BINBYTES"](ways.legacy_of(INNER)) + b"\x85R."
    assert "os.system" in names(write(ways.checkpoint(ways.NESTS["BINBYTES"](evil))))[0]
    for code in (load + b".", load + RUNS + b"\x85R.", load + b"h\x00" + b"\x85R."):
        (first, *_), level = judged(write(ways.checkpoint(ways.NESTS["BINBYTES"](b"Nq\x000" + code))))
        assert (first.name, level) == ("torch.storage._load_from_bytes", "dangerous")


def test_each_byte_string_is_scanned_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte string is scanned once, even if the memo returns it often or many calls encode the same text. So the cost
    grows only with the file.
    """
    seen: list[int] = []
    scan_lenient = nested_pickles.scan_lenient

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return scan_lenient(*args, **kwargs)

    monkeypatch.setattr(nested_pickles, "scan_lenient", counted)
    again = ways.NESTS["BINBYTES"](INNER) + b"r\xf5\0\0\0" + b"j\xf5\0\0\0" * 1000
    assert names(write(ways.checkpoint(b"(" + again + b"t"))) and len(seen) == 1
    encoded = text(INNER.decode("latin-1")) + b"r\xf6\0\0\x000"
    calls = b"c_codecs\nencode\nj\xf6\0\0\0" + text("latin1") + b"\x86R"
    seen.clear()
    assert names(write(ways.checkpoint(encoded + b"(" + calls * 1000 + b"t"))) and len(seen) == 1


def test_memory(write: Write) -> None:
    """A nested pickle of 40 MB, as bytes or as a text, is scanned without a copy in memory."""
    for nest in ("BINBYTES", "_codecs.encode"):
        inner = b"\x80\x04" + ways.NESTS["BINBYTES"](bytes(40_000_000)) + b"0" + CALL + b"."
        path = write(ways.checkpoint(ways.NESTS[nest](inner)))
        with open_input(path) as source:
            checkpoint = opening.read(source)
            with memory_below(16_000_000):
                found = concerns(checkpoint)
        assert [concern.name for concern in found] == ["os.system"]


# Levels


def test_levels(tmp_path: Path) -> None:
    """The level tells whether a checkpoint loads, is refused although it needs no code, needs code, or is dangerous.
    torch's answers agree with it. A safetensors file contains no code.
    """
    path = tmp_path / "m.pt"
    for obj, protocol, level in (
        ({"w": torch.ones(1)}, 2, LOADS),
        ({"w": torch.ones(1), "s": {1, 2}}, 4, REFUSED),
        ({"w": torch.ones(1), "s": frozenset([1])}, 4, REFUSED),
        ({"w": torch.ones(1), "b": INNER}, 2, "dangerous"),
        ({"w": torch.ones(1), "b": b"cmine\nThing\n."}, 2, LOADS),
        (torch.nn.Linear(1, 1), 2, "needs code"),
        ([Reduced(eval, ("1",))], 2, "dangerous"),
    ):
        torch.save(obj, path, pickle_protocol=protocol)
        assert judged(path)[1] == level
        shown = ckptconv.inspect(path)
        assert shown.safety == level and (bool(shown.concerns) or level in (LOADS, REFUSED))
        assert (refusal(path) is None) == (level == LOADS or (isinstance(obj, dict) and "b" in obj))
    path.write_bytes(pickle.dumps({"w": torch.ones(1)}))
    assert judged(path) == ([], REFUSED)
    ckptconv.save({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    assert judged(tmp_path / "m.safetensors") == ([], "holds no code")


def test_the_corpus(corpus: Path) -> None:
    """No file of the corpus is dangerous, and no byte string is taken for a nested pickle. The level of a file is
    'loads' exactly if torch's safe loader accepted the file.
    """
    rows = list(csv.DictReader((corpus / "manifest.csv").read_text().splitlines()))
    judgements = 0
    for row in rows:
        path = corpus / row["path"]
        try:
            found, level = judged(path)
        except CkptconvError:
            continue
        judgements += 1
        assert not any(concern.dangerous or " inside)" in concern.path for concern in found), path
        assert (level == LOADS) == (row["weights_only_ok"] == "yes"), path
    assert judgements > len(rows) / 2


# Conversion


HIDDEN = {
    "call": CALL,
    "bytes": ways.NESTS["BINBYTES8"](INNER),
    "long": ways.NESTS["long bytes"](INNER),
    "text": ways.NESTS["_codecs.encode"](INNER),
    "popped call": CALL + b"0N",
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("target", ["out.pt", "out.pkl", "legacy.pt"])
def test_convert_refuses_dangerous_globals(write: Write, tmp_path: Path, hidden: str, target: str) -> None:
    """A conversion refuses a dangerous checkpoint, and its error contains the global and the path. With
    ``allow_unsafe``, the output has the same concern.
    """
    out = tmp_path / target
    format_: Any = "legacy" if target == "legacy.pt" else None
    path = write(ways.checkpoint(HIDDEN[hidden]))
    where = names(path)[0]
    error = refused(DangerousError, None, path, out, map_location="cpu", format=format_)
    assert where in str(error) and not out.exists()
    ckptconv.convert(path, out, map_location="cpu", format=format_, allow_unsafe=True)
    assert names(out)[0].replace("posix.", "os.") == where


def test_a_part_without_the_danger_is_converted(write: Write, tmp_path: Path) -> None:
    """A dangerous value that is not selected does not prevent the conversion."""
    path = write(in_a_part(HIDDEN["bytes"]))
    refused(DangerousError, None, path, tmp_path / "out.pt")
    ckptconv.convert(path, tmp_path / "out.pt", select="x/a")
    assert judged(tmp_path / "out.pt") == ([], LOADS)


@pytest.mark.parametrize("way", [*ways.NAMINGS, *ways.PLACES, *ways.NESTS])
def test_safetensors_output_contains_no_code(write: Write, tmp_path: Path, way: str) -> None:
    """The safetensors output of a dangerous checkpoint contains no part of the call."""
    code = (
        ways.NAMINGS[way]("os", "system", ARGS)
        if way in ways.NAMINGS
        else ways.PLACES[way](CALL)
        if way in ways.PLACES
        else ways.NESTS[way](INNER)
    )
    state = b"}" + text("w") + tensor() + b"s"
    path = write(torch_zip_of(dict_of(text("state_dict"), state, text("x"), code, protocol=4)))
    out = tmp_path / "m.safetensors"
    ckptconv.convert(path, out)
    assert b"os\nsystem" not in out.read_bytes() and b"system" not in out.read_bytes()
    assert judged(out) == ([], "holds no code")
    assert list(ckptconv.inspect(out).metadata) == ["format"]


def test_output_of_inspect_and_verify(write: Write, command: Command) -> None:
    """``inspect`` shows a dangerous global and its path in the first finding. ``verify`` fails."""
    path = write(ways.checkpoint(HIDDEN["bytes"]))
    shown = ckptconv.inspect(path)
    assert shown.dangerous == ("os.system",)
    (concern,) = shown.as_dict()["concerns"]
    where = {"path": "x (pickle inside)", "more": 0, "inside": True}
    assert concern == {"name": "os.system", "dangerous": True, **where}
    assert "os.system at x (pickle inside)" in shown.findings[0].text
    command("inspect", path, out="\n  pickles in it os.system at x (pickle inside)\n")
    command("verify", path, status=1, out="x (pickle inside)")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (CALL, "checkpoint does not write"),
        (b"cbuiltins\ngetattr\n" + METADATA + text("__init__") + b"\x86R", None),
        (b"cbuiltins\ngetattr\n" + METADATA + text("__subclasses__") + b"\x86R", "checkpoint does not write"),
    ],
    ids=["a call", "a method", "its innards"],
)
def test_metadata_of_a_run(tmp_path: Path, code: bytes, words: str | None) -> None:
    """``.metadata`` may only name the classes of torch's metadata, and must not reach other objects through them,
    because torch loads it without its safe loader.
    """
    folder = ways.dcp_in(tmp_path / "run", {"a": 1})
    (folder / ".metadata").write_bytes(b"\x80\x02" + METADATA + b")\x81}" + text("storage_meta") + code + b"sb.")
    said = str(error_of(folder))
    assert words in said if words else "getattr" not in said


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CALL, DangerousError),
        (ways.NAMINGS["REDUCE"]("unknown", "Thing", ARGS), UnsupportedError),
        (b"\x82\x07", UnsupportedError),
    ],
    ids=["dangerous", "unknown", "extension"],
)
def test_chunks_of_a_run(tmp_path: Path, code: bytes, kind: type[CkptconvError]) -> None:
    """A chunk with a global that its tensor does not need is refused, because the merged checkpoint would not show the
    global.
    """
    folder = ways.dcp_in(tmp_path / "run", {"a": 1})
    _with_chunk(folder, code + b"0")
    error = error_of(folder)
    assert type(error) is kind and "contains classes that no tensor needs" in str(error)


def _with_chunk(folder: Path, code: bytes) -> None:
    """Replace the chunk of the tensor in `folder` with one that pushes `code` first. The new chunk is appended to the
    file, and ``.metadata`` records its position.
    """
    (path,) = folder.glob("*.distcp")
    data = path.read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    pickled = b"\x80\x02" + code + tensor(storage("0", integer(2)), (2,)) + b"."
    chunk = torch_zip_of(pickled, {"data/0": bytes(8)})
    for index, place in metadata.storage_data.items():
        if index.fqn == "w":
            place.offset, place.length = len(data), len(chunk)
    path.write_bytes(data + chunk)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, 2))


def error_of(path: Path) -> CkptconvError:
    with pytest.raises(CkptconvError) as error:
        judged(path)
    return error.value


def test_the_list_ends(write: Write) -> None:
    """A thousand unknown globals are listed, and the others are counted. A dangerous global is listed in any case."""
    strange = [f"cmodule{i}\nname\n".encode() for i in range(1500)]
    found, level = judged(write(pushed(*strange, CALL)))
    assert (len(found), level) == (1002, "dangerous") and found[0].name == "os.system"
    assert [concern.more for concern in found if concern.name == "others (not listed)"] == [499]
    inside, _ = judged(write(pushed(*(ways.NESTS["SHORT_BINBYTES"](each + b".") for each in strange))))
    assert len(inside) == 1001 and inside[-1] == Concern(
        "others (not listed)", "x[1000] (pickle inside)", "needs code", more=499, inside=True
    )


def test_storages_of_plain_pickles_are_not_scanned(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storages of plain pickles are files of torch inside byte strings. The reader has read them already, so the
    scan leaves them out.
    """
    monkeypatch.setattr(nested_pickles, "scan_lenient", lambda *args, **kwargs: pytest.fail("it was"))
    for protocol in (2, 4):
        path = write(pickle.dumps({"w": torch.ones(2), "v": torch.ones(40_000)}, protocol))
        assert judged(path) == ([], REFUSED)
