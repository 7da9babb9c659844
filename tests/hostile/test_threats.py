"""Bad inputs, and how ``inspect``, ``convert`` and ``verify`` treat each of them.

The tests of the readers contain more variants. The table lists each input and its outcome, with the tests below the
outcome.

input                                             outcome
                                                  test
a call of an unknown global, by each opcode       needs code: kept as data, every global listed
                                                  test_calls_of_unknown_globals
the same call with a discarded result             needs code
                                                  test_calls_of_unknown_globals
a call of a function that no checkpoint needs     dangerous: copied only with --allow-unsafe
                                                  test_calls_of_dangerous_functions
gadgets of libraries: aliases, methods of         dangerous: a table of Python, torch and numpy
results, lookups of names, functions that write   test_dangerous_functions_that_libraries_import
files
a call of the result of a Python function         unknown: not sound, not copied
                                                  test_a_call_that_cannot_be_followed
EXT1, EXT2, EXT4                                  needs code; malformed if the code is not positive
                                                  test_extensions, test_malformed_pickles
STACK_GLOBAL                                      a known name is sound, a dotted path needs code, other operands than
                                                  texts are malformed
                                                  test_stack_global, test_malformed_pickles
REDUCE of an object that is not a global          malformed; needs code if a call made the object
                                                  test_malformed_pickles, test_reduce
an item, member or state for an object that       malformed
takes none                                        test_malformed_pickles
slots of the memo                                 any number is sound, a missing or negative one is malformed
                                                  test_memo_slots, test_malformed_pickles
a value that doubles itself                       sound, in a few megabytes
                                                  test_doubling
100,000 levels of nesting                         a limit
                                                  test_nesting
a length that lies                                malformed, no memory is allocated for it
                                                  test_wrong_lengths
frames, protocols, bytes after the end            malformed
                                                  test_malformed_pickles
keys that are not names                           kept in torch's format, escaped on a screen, refused by other
                                                  formats
                                                  test_odd_keys
names that a safetensors file cannot contain      refused
                                                  test_names_that_safetensors_cannot_have
persistent ids                                    malformed
                                                  test_malformed_pickles
sizes of storages                                 malformed
                                                  test_malformed_files
a storage with two dtypes                         sound if torch writes it so
                                                  test_a_storage_under_two_dtypes
tensors outside of their storage                  malformed
                                                  test_malformed_pickles
a tensor of terabytes on 16 bytes                 shown; a limit if it would be written in full
                                                  test_a_tensor_of_terabytes
views, lazy bits, rare dtypes                     the right values
                                                  test_right_values
zips with two readings or none                    malformed
                                                  test_malformed_files
zips that only other programs read                unsupported, or read within limits
                                                  test_rare_zips
checksums                                         malformed if the record is read; verify reads all
                                                  test_checksums
an extremely large argument                       sound: nothing is called
                                                  test_an_absurd_argument
devices, FIFOs, sockets                           refused
                                                  test_irregular_files
a file that torch writes                          sound
                                                  test_a_real_file
the order of bytes                                kept, swapped for safetensors; malformed if unknown
                                                  test_byte_order, test_malformed_pickles
the format before torch 1.6                       malformed; big-endian is a note
                                                  test_malformed_files, test_older_format_of_a_big_endian_machine
safetensors                                       malformed
                                                  test_malformed_files
the index of shards                               refused, the error names the shard or tensor
                                                  test_shards
files that are not checkpoints                    an error that says what they are, and the next step
                                                  test_files_of_other_kinds, test_a_folder, test_programs
an integer of more digits than Python prints      an error without the digits
                                                  test_huge_integers
a tar archive in the first 512 bytes of another   refused: two readings
format, which torch.load checks for first         test_a_tar_archive_too
a pickle at the first byte of safetensors         refused if it names a global; plain values are harmless
                                                  test_a_pickle_at_the_first_byte, test_plain_values_at_the_first_byte
a stream of torch's older format at the first     refused: torch.load runs it
byte of safetensors                               test_a_legacy_stream_at_the_first_byte
a zip directory at the end of another format      refused; stray signatures are harmless
                                                  test_a_zip_directory_at_the_end, test_stray_signatures
a gzip file at the first byte of safetensors      refused: joblib unpacks it
                                                  test_a_gzip_file_too
a state dict that torch.package, torch.export or  refused
torch.jit.load reads as its own archive           test_archives_of_torchs_other_readers,
                                                  test_a_program_in_capital_letters
two readings of a shard or of .metadata           refused
                                                  test_two_readings_of_a_part
a hidden pickle that only one of CPython's        its globals are found; a pickle of two programs is unknown
unpicklers reads                                  test_hidden_pickles_that_one_unpickler_forgives,
                                                  test_hidden_pickles_that_are_two_programs
a file of torch as a member or byte string        examined like a pickle
                                                  test_files_of_torch_inside
an array of objects as a member or byte string    examined like a pickle
                                                  test_arrays_inside
allowed globals that torch's safe loader refuses  the file is not reported to load; details in
to use in this way                                tests/unit/safety/test_torch_load.py
                                                  test_weights_only_claims
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import re
import socket
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.package
from torch.export.pt2_archive import _package

import ckptconv
from ckptconv.cli.main import main
from ckptconv.errors import InputError, LimitError, MalformedError, RefusedError, UnsupportedError
from ckptconv.inspection.verification import Level, verify
from tests.support.archives import without_crc32
from tests.support.command import Command
from tests.support.conversions import refused, saved_at
from tests.support.gadgets import GADGETS
from tests.support.hostile_bytes import (
    central_entry,
    data_of,
    dict_of,
    end_of,
    flipped,
    found_in,
    in_header,
    in_headers,
    integer,
    local_header,
    patched,
    saved,
    storage,
    tensor,
    text,
    torch_zip_of,
    zip_of,
)
from tests.support.judge import assert_same
from tests.support.polyglots import (
    gzip_in_safetensors,
    pickle_in_safetensors,
    runs,
    tar_in_legacy,
    tar_in_pickle,
    tar_in_safetensors,
    zip_in_safetensors,
    zip_of_pickle,
)
from tests.support.writers import distributed, scripted

Write = Callable[..., Path]
MIB = 1 << 20
OBJECT = {"a": torch.arange(5.0), "b": torch.arange(7, dtype=torch.uint8)}


def each_of(table: Mapping[str, Iterable[Any]]) -> list[Any]:
    """Return the cases of `table` as parameters, each with its key. The ids are the keys with a number."""
    return [pytest.param(key, case, id=f"{key} {i}") for key, cases in table.items() for i, case in enumerate(cases)]


# Assertions for the rows


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of the files in `folder`, and None for each folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def findings(path: Path, *levels: str) -> list[str]:
    """Return the findings of ``verify`` with one of these `levels`, one line each."""
    return [str(each) for each in verify(path).findings if each.level in levels]


def assert_refused(
    path: Path, kind: type[InputError], what: str, *, out: str = "out.pt", edits: Sequence[str] = ()
) -> None:
    """Fail unless ``inspect``, ``convert`` and ``verify`` all refuse `path` with the error `what` of exactly this
    `kind`, and exit status 1. No output may appear, and an old output must stay.
    """
    with pytest.raises(InputError, match=re.escape(what)) as error:
        ckptconv.inspect(path)
    assert type(error.value) is kind and "\n" not in str(error.value)
    assert_not_converted(path, kind, what, out=out, edits=edits)
    assert_found(path, what, "damaged" if kind is MalformedError else "unknown")
    assert main(["inspect", str(path)]) == 1


def assert_found(path: Path, what: str, *levels: str) -> None:
    """Fail unless ``verify`` reports `what` in one line and exits with 1."""
    assert any(what in each for each in findings(path, *levels or ("damaged",))), (
        what,
        findings(path, *get_args(Level)),
    )
    assert not verify(path).ok and main(["verify", str(path)]) == 1


def assert_not_converted(
    path: Path, kind: type[ckptconv.CkptconvError], what: str, *, out: str = "out.pt", edits: Sequence[str] = ()
) -> None:
    """Fail unless ``convert`` refuses `path` with the error `what` of exactly this `kind`, and exit status 1. No output
    may appear, and an old output must stay.
    """
    folder = path.parent.parent / "out"
    folder.mkdir(exist_ok=True)
    before = tree(path.parent)
    for old in (None, b"the old one"):
        if old is not None:
            (folder / out).write_bytes(old)
        error = refused(ckptconv.CkptconvError, re.escape(what), path, folder / out, force=True)
        assert type(error) is kind and "\n" not in str(error)
        assert main(["convert", str(path), str(folder / out), "--force", *edits]) == 1
        assert tree(folder) == ({} if old is None else {out: old})
    assert tree(path.parent) == before
    (folder / out).unlink()


def assert_sound(path: Path, *, notes: str | None = None, loads: bool = True) -> Path:
    """Convert `path` and return the output. Fail unless ``inspect`` shows `notes` or none, ``verify`` passes, and the
    output contains the same object on the CPU.
    """
    shown = ckptconv.inspect(path).notes
    assert notes in " ".join(shown) if notes else not shown, shown
    assert verify(path).ok
    assert all(any(note in each for each in findings(path, "note", "warning")) for note in shown)
    assert main(["inspect", str(path)]) == main(["verify", str(path)]) == 0
    out = path.parent.parent / "out.pt"
    assert main(["convert", str(path), str(out), "--to", "cpu", "--force"]) == 0
    assert verify(out).ok
    if loads:
        assert_same(torch.load(out), torch.load(path, map_location="cpu"))
    return out


def assert_needs_code(path: Path, names: Sequence[str], where: str | None = None) -> None:
    """Fail unless ``inspect`` and ``verify`` list each of `names`, ``verify`` reports the position `where`, and only a
    strict ``verify`` fails. ``convert`` must keep the globals, and torch's safe loader must refuse the output.
    """
    shown = ckptconv.inspect(path)
    assert not shown.weights_only and not shown.dangerous
    assert set(names) <= set(shown.globals), shown.globals
    code = findings(path, "needs code")
    for name in names:
        assert any(name in each for each in code), verify(path).findings
    if where:
        assert any(where in each for each in code), verify(path).findings
    assert verify(path).ok and not verify(path, strict=True).ok
    assert main(["verify", str(path)]) == 0 and main(["verify", str(path), "--strict"]) == 1
    out = path.parent.parent / "out.pt"
    assert main(["convert", str(path), str(out), "--to", "cpu", "--force"]) == 0
    assert ckptconv.inspect(out).globals == shown.globals
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch about the protocol
        with pytest.raises(pickle.UnpicklingError):
            torch.load(out, weights_only=True)


def peak(function: Callable[[], object]) -> int:
    """Return the peak of the memory that `function` allocates."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def everything(path: Path) -> None:
    """Inspect, verify and convert `path`, whatever the outcome is."""
    out = path.parent.parent / "out.pt"
    for command in (["inspect"], ["verify"], ["convert", "--force"]):
        main([*command, str(path), *([str(out)] if command[0] == "convert" else [])])


def checkpoint(*items: bytes, protocol: int = 4) -> bytes:
    """Return a checkpoint of one tensor, and of `items` under separate keys."""
    keyed = [each for i, item in enumerate(items) for each in (text(f"x{i}"), item)]
    return torch_zip_of(dict_of(text("w"), tensor(), *keyed, protocol=protocol))


# Pickles

#: A slot of the memo that no real pickle uses.
HIGH = struct.pack("<I", 2**32 - 16)
PLAIN = dict_of(text("w"), tensor(), protocol=4)


def framed(before: bytes, behind: bytes = b"") -> bytes:
    """Return a checkpoint whose pickle contains `before` in front of its first opcode after PROTO, and `behind` after
    STOP.
    """
    return torch_zip_of(PLAIN[:2] + before + PLAIN[2:] + behind)


def stored(of: bytes) -> bytes:
    """Return a checkpoint of a tensor on the storage that `of` pushes."""
    return torch_zip_of(dict_of(text("w"), tensor(of)))


def shaped(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """Return a checkpoint of a tensor on 16 bytes."""
    return torch_zip_of(dict_of(text("w"), tensor(None, shape, stride, offset)))


def described_twice(other: bytes) -> bytes:
    """Return a checkpoint of a tensor, and of another on the storage that `other` pushes."""
    return torch_zip_of(dict_of(text("a"), tensor(), text("b"), tensor(other, shape=(1,))))


#: Pickles that no pickler writes, by the text of the error.
MALFORMED: dict[str, list[bytes]] = {
    # calls and globals
    "an extension code must be positive": [
        checkpoint(code) for code in (b"\x82\0", b"\x83\0\0", b"\x84\0\0\0\0", b"\x84\xff\xff\xff\xff")
    ],
    "STACK_GLOBAL needs two texts": [
        checkpoint(operands + b"\x93")
        for operands in (b"K\x01K\x02", text("m") + b"N", b"]" + text("n"), b"C\x01mC\x01n")
    ],
    "REDUCE of an object that cannot be called": [
        checkpoint(value + b")R") for value in (b"K\x01", b"N", text("f"), b"]", b"}", b")", b"\x89")
    ],
    "REDUCE needs a tuple of arguments": [
        checkpoint(b"cm\nf\n" + args + b"R") for args in (b"N", b"]", b"K\x01", b"}")
    ],
    # an item for a list, a member for a dict, a state for an object that takes none
    "SETITEM on": [checkpoint(value + b"K\x01K\x02s") for value in (b"]", b")", storage())],
    "SETITEMS on": [checkpoint(b"](K\x01K\x02u")],
    "items are set on a tensor": [checkpoint(tensor() + items) for items in (text("k") + b"Ns", b"(NNu", b"Na")],
    "APPEND on": [checkpoint(b"}K\x01a")],
    "APPENDS on": [checkpoint(b"}(K\x01e")],
    "ADDITEMS on": [checkpoint(b"](K\x01\x90")],
    "BUILD on": [checkpoint(value + b"}b") for value in (b"}", b"]", b"N", b"K\x01")],
    "a key without a value": [checkpoint(b"}(K\x01u")],
    # the memo
    "the memo has no such slot": [checkpoint(b"h\xc8"), checkpoint(b"j" + HIGH)],
    "a memo slot is negative": [checkpoint(b"Np-1\n")],
    # A frame contains complete opcodes. The pickle ends where its record ends. The protocol occurs once, at the start.
    "a length in the pickle reaches beyond its end": [framed(b"\x95" + struct.pack("<Q", 1 << 20))],
    "the pickle ends inside a frame": [framed(b"\x95" + struct.pack("<Q", 200), bytes(200))],
    "an opcode straddles the end of its frame": [framed(b"\x95" + struct.pack("<Q", 3))],
    "a frame inside a frame": [framed(b"\x95" + struct.pack("<Q", 12) + b"\x95" + struct.pack("<Q", 1))],
    "bytes after the end of the pickle": [framed(b"", b"\0"), framed(b"", b"\x80\x02cos\nsystem\nq\0.")],
    "PROTO in the middle of the pickle": [framed(b"N0\x80\x02"), framed(b"\x80\x02")],
    "unknown pickle protocol": [
        torch_zip_of(dict_of(text("w"), tensor(), protocol=protocol)) for protocol in (6, 127, 255)
    ],
    # a persistent id is ('storage', class, key, location, elements), with a class of torch
    "a persistent id does not name a storage": [
        stored(of)
        for of in (
            b"NQ",
            b"K\x07Q",
            text("0") + b"Q",
            b")Q",
            b"]Q",
            b"(" + text("storage") + b"tQ",
            storage().replace(text("storage"), text("module")),
        )
    ],
    "does not name a storage class": [
        stored(of)
        for of in (
            storage().replace(b"ctorch\nFloatStorage\n", text("FloatStorage")),
            storage(cls="Tensor"),
            storage().replace(b"ctorch\n", b"cos\n"),
        )
    ],
    "parts of wrong types": [
        stored(of)
        for of in (storage().replace(text("0"), b"K\x00"), storage().replace(text("cpu"), b"N"), storage(tag=""))
    ],
    # the key is the exact name of a record
    "the file has no such storage": [
        *(stored(storage(key)) for key in ("../../etc/passwd", "/etc/passwd", "..\\0", "", "0\0", "./0")),
        torch_zip_of(dict_of(text("w"), tensor(storage("a"))), {"data/A": bytes(16)}),
    ],
    # torch would find a record whose name differs in case; other readers would not
    "differs in case from torch's name": [
        torch_zip_of(PLAIN, {name: bytes(16)}) for name in ("DATA/0", "Data/0", "ByteOrder", ".FORMAT_VERSION")
    ],
    "storage 0 is described in two ways": [
        described_twice(storage(numel=integer(3))),
        described_twice(storage(tag="cuda:0")),
        described_twice(storage(cls="IntStorage")),
        described_twice(storage(cls="DoubleStorage")),
    ],
    # The last element is inside the storage, computed with integers that do not overflow. No number is negative.
    "reaches outside its storage": [
        shaped((5,), (1,)),
        shaped((4,), (1,), 1),
        shaped((2,), (4,)),
        shaped((1,), (1,), 4),
        shaped((), (), 4),
        shaped((2, 3), (3, 1)),
        shaped((2**31, 2**31), (2**31, 1)),
        shaped((2**61, 2**61), (2**61, 2**61), 2**61),
        shaped((2,), (2**61,)),
    ],
    "do not match": [
        shaped((2**62,), (1,)),
        shaped((2**64 + 1,), (1,)),
        shaped((1,), (2**64,)),
        shaped((-1,), (1,)),
        shaped((4,), (-1,), 3),
        shaped((4,), (1, 1)),
        shaped((4,), ()),
    ],
    "not a number of elements": [shaped((1,), (1,), offset) for offset in (-1, 2**62, 2**64)],
    "the byte order is unknown": [
        torch_zip_of(PLAIN, {"data/0": bytes(16), "byteorder": order})
        for order in (b"", b"Big", b"little\n", b"\0", b"middle")
    ],
}


@pytest.mark.parametrize(("what", "data"), each_of(MALFORMED))
def test_malformed_pickles(write: Write, what: str, data: bytes) -> None:
    """A malformed pickle is refused with the error that describes its defect."""
    assert_refused(write(data), MalformedError, what)


CALLS = {
    "REDUCE": b"c%b)R",
    "NEWOBJ": b"c%b)\x81",
    "NEWOBJ_EX": b"c%b)}\x92",
    "INST": b"(i%b",
    "OBJ": b"(c%bo",
    "STACK_GLOBAL": b"%b)R",
    "BUILD": b"c%b)\x81}b",
}


def call(opcode: str, module: str, name: str) -> bytes:
    """Return opcodes that call a global by `opcode`, without arguments."""
    named = f"{module}\n{name}\n".encode()
    return CALLS[opcode] % (text(module) + text(name) + b"\x93" if opcode == "STACK_GLOBAL" else named)


#: Opcodes that keep the result of a call as a value, that discard it by POP, by POP_MARK or after a copy into the memo,
#: or that use it as a member of a set or as an argument.
FATES = {
    "kept": b"%b",
    "POP": b"%b0N",
    "POP_MARK": b"(%b1N",
    "memo": b"%bq\xc80N",
    "member": b"\x8f(%b\x90",
    "argument": b"ccollections\nOrderedDict\n%b\x85R",
}


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("opcode", CALLS)
def test_calls_of_unknown_globals(write: Write, opcode: str, fate: str) -> None:
    """A call of an unknown class by any opcode is listed and kept as it is. A call with a discarded result is listed
    too, because the unpickler would still run it.
    """
    assert_needs_code(
        write(checkpoint(FATES[fate] % call(opcode, "stranger.things", "Eleven"))), ["stranger.things.Eleven"]
    )


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("opcode", CALLS)
def test_calls_of_dangerous_functions(write: Write, opcode: str, fate: str) -> None:
    """A call of ``os.system`` at any position is reported by every command. ``convert`` copies it only with
    ``--allow-unsafe``.
    """
    path = write(checkpoint(FATES[fate] % call(opcode, "os", "system")))
    assert ckptconv.inspect(path).dangerous == ("os.system",)
    assert_found(path, "os.system", "dangerous")
    assert_not_converted(path, ckptconv.DangerousError, "no checkpoint needs")
    out = path.parent.parent / "out.pt"
    assert main(["convert", str(path), str(out), "--to", "cpu", "--allow-unsafe"]) == 0
    assert ckptconv.inspect(out).dangerous == ("os.system",)


@pytest.mark.parametrize("name", GADGETS)
def test_dangerous_functions_that_libraries_import(write: Write, name: str) -> None:
    """Gadgets of libraries are dangerous in each container and are not copied. They are aliases, methods of results,
    looked-up attributes, classes that open files, and functions that call their arguments. An item, member or state of
    a global is also malformed.
    """
    path = write(checkpoint(GADGETS[name].code))
    if GADGETS[name].malformed:
        assert_not_converted(path, MalformedError, "cannot take it")
    else:
        assert ckptconv.inspect(path).dangerous
        assert_not_converted(path, ckptconv.DangerousError, "no checkpoint needs")
    assert any(findings(path, "dangerous")) and not verify(path).ok
    bare = write(GADGETS[name].pickle, "bare.pkl")
    assert any(findings(bare, "dangerous")) and not verify(bare).ok


def test_a_call_that_cannot_be_followed(write: Write) -> None:
    """The result of a Python function can be any object, so a call of it is unknown: neither dangerous nor sound."""
    item = b"coperator\ngetitem\n(" + text("mine") + b"K\x00tR)R"
    path = write(checkpoint(item))
    assert_found(path, "a call of the result of operator.getitem", "unknown")
    assert not verify(path, strict=True).ok and not ckptconv.inspect(path).weights_only
    assert_not_converted(path, ckptconv.DangerousError, "operator.getitem")


@pytest.mark.parametrize(
    ("opcode", "code"), [(b"\x82\x07", 7), (b"\x83\x07\x01", 263), (b"\x84\x07\x00\x01\x00", 65543)]
)
def test_extensions(write: Write, opcode: bytes, code: int) -> None:
    """A class that is named by its number in copyreg's registry needs code, because the unpickler needs that
    registry.
    """
    path = write(checkpoint(opcode + b")R"))
    assert not ckptconv.inspect(path).weights_only
    assert any(str(code) in each for each in findings(path, "needs code")), verify(path).findings
    assert verify(path).ok and not verify(path, strict=True).ok
    out = path.parent.parent / "out.pt"
    ckptconv.convert(path, out)
    assert findings(out, "needs code")


def test_stack_global(write: Write) -> None:
    """A known name that STACK_GLOBAL takes from two texts is sound, and torch's safe loader accepts the output. A
    dotted path needs code.
    """
    known = text("collections") + text("OrderedDict") + b"\x93)R"
    out = assert_sound(write(checkpoint(known)), loads=False)  # torch refuses protocol 4
    assert torch.load(out, weights_only=True)["w"].tolist() == torch.load(out)["w"].tolist()
    assert_needs_code(write(checkpoint(text("stranger") + text("Class.method") + b"\x93)R")), ["stranger.Class.method"])


def test_reduce(write: Write) -> None:
    """A call of the result of ``functools.partial`` needs code, and ``convert`` keeps it as data."""
    partial = b"cfunctools\npartial\n(" + b"cstranger\nClass\n" + b"tR"
    assert_needs_code(write(checkpoint(partial + b")R")), ["functools.partial", "stranger.Class"])


def test_memo_slots(write: Write) -> None:
    """The memo is a mapping, so a slot with a number above four billion costs no more memory than the first slot."""
    path = write(checkpoint(b"]r" + HIGH + b"0j" + HIGH))
    assert_sound(path, loads=False)
    assert peak(lambda: everything(path)) < 16 * MIB


@pytest.mark.parametrize(
    "frame", [b"%b", b"}%bNs", b"\x8f(%b\x90", b"(%b\x91", b"cstranger\nf\n%b\x85R", b"]%ba", b"cstranger\nf\n)\x81%bb"]
)
@pytest.mark.parametrize("double", [b"2\x86", b"q\xc8h\xc8\x86"])
def test_doubling(write: Write, frame: bytes, double: bytes) -> None:
    """A tuple that is doubled 900 times, by DUP or by the memo, is inspected, verified and converted in less than 32
    MiB. It can be a value, key, member, argument, item or state.
    """
    path = write(checkpoint(frame.replace(b"%b", b"N" + double * 900)))
    assert peak(lambda: everything(path)) < 32 * MIB
    ckptconv.inspect(path)
    assert verify(path).ok and path.parent.with_name("out.pt").exists()


@pytest.mark.parametrize(
    "levels",
    [
        (b"", b"]", b"a"),
        (b"N", b"", b"\x85"),
        (b"", b"}N", b"s"),
        (b"N", b"", b"\x85cm\nf\nq\xc80h\xc8\x86"),
        (b"", b"cm\nf\n", b"\x85R"),
        (b"", b"cm\nf\n)\x81", b"b"),
    ],
)
def test_nesting(write: Write, levels: tuple[bytes, bytes, bytes]) -> None:
    """Lists, tuples, dicts, calls or states with 2,000 or 100,000 levels of nesting exceed a limit of ckptconv. The
    interpreter's recursion limit is not reached.
    """
    start, down, up = levels
    for depth in (100_000, 2_000):
        path = write(checkpoint(start + down * depth + (b"N" if down else b"") + up * depth))
        with pytest.raises(LimitError, match="nested too deeply"):
            ckptconv.inspect(path)
    assert_refused(path, LimitError, "nested too deeply")


@pytest.mark.parametrize(
    "code",
    [
        b"X\xff\xff\xff\xff",
        b"B\xff\xff\xff\xff",
        b"T\xff\xff\xff\x7f",
        b"T\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\xff",
        *(
            code + length
            for code in (b"\x8d", b"\x8e", b"\x96", b"\x95")
            for length in (struct.pack("<Q", 4 << 30), struct.pack("<Q", 1 << 63), b"\xff" * 8)
        ),
        b"X\xff\xff\x00\x00",
        b"J\x01",
        b"G\x00",
        b"\x8a\xff\x00",
    ],
)
def test_wrong_lengths(write: Write, code: bytes) -> None:
    """A length of gigabytes, of 2^63 or more, below zero or beyond the data is a typed error. No memory is allocated
    for it.
    """
    data = b"\x80\x04}" + text("x") + code
    path = write(torch_zip_of(data, {}))
    kind = LimitError if code == b"\x8b\xff\xff\xff\x7f" else MalformedError
    with pytest.raises(kind, match=r"too long|reaches beyond its end|is negative|ends too early") as error:
        ckptconv.inspect(path)
    assert_refused(path, kind, error.value.what)
    assert peak(lambda: everything(path)) < 8 * MIB


KEYS: dict[str, tuple[list[object], str | None]] = {
    "an integer": ([7], "its key is not a string"),
    "None": ([None], "its key is not a string"),
    "a bool": ([True], "its key is not a string"),
    "a tuple": ([(1, "a")], "its key is not a string"),
    "bytes": ([b"w"], "its key is not a string"),
    "half of a surrogate pair": (["w\ud800"], "its name is not a string"),
    "NUL": (["w\0w"], None),
    "an escape sequence": (["\x1b]0;owned\x07\x1b[31mw"], None),
    "text that runs backwards": (["w\u202egnp.exe"], None),
    "lines": (["w\nckptconv: all is well\n"], None),
    "1 beside '1'": (["1", 1], "its key is not a string"),
}


@pytest.mark.parametrize("name", KEYS)
def test_odd_keys(write: Write, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """torch's format keeps a key of any type, and control characters in keys are never printed. A safetensors file
    takes only valid texts as names, and other keys are refused.
    """
    keys, trouble = KEYS[name]
    of_keys: dict[Any, torch.Tensor] = {key: torch.arange(2.0) + i for i, key in enumerate(keys)}
    path = write(saved({"a": torch.ones(2), **of_keys}))
    assert_sound(path)
    folder = path.parent.parent
    with pytest.raises(RefusedError, match=trouble) if trouble else nullcontext():
        ckptconv.convert(path, folder / "state.safetensors", select=".")
    assert (folder / "state.safetensors").exists() == (trouble is None)
    if not trouble:
        assert set(safetensors.torch.load_file(folder / "state.safetensors")) == {"a", *keys}
    capsys.readouterr()
    for line in (
        ["inspect", "{}"],
        ["inspect", "{}", "--tree"],
        ["verify", "{}"],
        ["convert", "{}", "{}.safetensors", "-f"],
        ["convert", "{}", "{}.out", "-n", "-v"],
    ):
        main([word.format(path) for word in line])
        printed = "".join(capsys.readouterr())
        assert not set(printed) & set("\0\x1b\x07\ud800\u202e"), line
        assert "\nckptconv: all is well" not in printed


def test_a_key_set_twice(write: Write) -> None:
    """torch's format keeps both values of a key that is set twice, in their order. A safetensors file refuses the
    second value.
    """
    path = write(torch_zip_of(dict_of(text("w"), tensor(), text("w"), tensor(offset=0, shape=(2,)))))
    out = assert_sound(path)
    assert torch.load(out)["w"].shape == (2,)
    assert len(ckptconv.inspect(out).tensors) == 2
    assert_not_converted(path, RefusedError, "a second value with that name", out="out.safetensors")


def test_names_that_safetensors_cannot_have(write: Write) -> None:
    """A safetensors file refuses a tensor named ``__metadata__``. No format accepts edits that give two tensors one
    name.
    """
    path = write(saved({"__metadata__": torch.ones(1), "w": torch.ones(1)}))
    assert_sound(path)
    assert_not_converted(path, RefusedError, "the name is reserved", out="out.safetensors")
    path = write(saved({"module.w": torch.ones(1), "w": torch.zeros(1)}))
    for out in ("out.pt", "out.safetensors"):
        refused(ckptconv.CollisionError, r"module\.w", path, path.with_name(out), strip_prefix="module.")
        assert main(["convert", str(path), str(path.with_name(out)), "--strip-prefix", "module."]) == 1
        assert not path.with_name(out).exists()


# Storages and tensors


SIZES: dict[str, tuple[bytes, str]] = {
    **{
        f"of {word}": (stored(storage(numel=numel)), "parts of wrong types")
        for word, numel in {
            "-1": integer(-1),
            "-2^63": integer(-(2**63)),
            "a float": b"G" + struct.pack(">d", 4.0),
            "True": b"\x88",
            "None": b"N",
            "a text": text("4"),
            "2^62": integer(2**62),
            "2^64": integer(2**64),
        }.items()
    },
    **{
        f"of {n} elements": (stored(storage(numel=integer(n))), "a different size from its record")
        for n in (2**61, 5, 3, 0)
    },
}


def test_a_storage_under_two_dtypes(write: Write) -> None:
    """A tensor that torch stores as bytes, such as float8, can share its storage with a view as bytes. The output
    shares it too.
    """
    weight = torch.arange(8.0).to(torch.float8_e4m3fn)
    out = assert_sound(write(saved({"x": weight, "y": weight.view(torch.uint8)})))
    loaded = torch.load(out)
    assert loaded["x"].data_ptr() == loaded["y"].data_ptr()


def test_more_dimensions_than_torch_has(write: Write) -> None:
    """A tensor of 64 dimensions is read. A tensor of 65 dimensions exceeds a limit."""
    assert_sound(write(torch_zip_of(dict_of(text("w"), tensor(None, (1,) * 64, (1,) * 64)))))
    assert_refused(
        write(torch_zip_of(dict_of(text("w"), tensor(None, (1,) * 65, (1,) * 65)))), LimitError, "too many dimensions"
    )


def test_a_tensor_of_terabytes(write: Write, command: Command) -> None:
    """A tensor of four tebibytes on 16 bytes, with a stride of 0, is shown, verified and retagged. A safetensors file
    would contain it in full, so that output is refused before memory is allocated.
    """
    path = write(torch_zip_of(dict_of(text("w"), tensor(None, (1 << 40, 1), (0, 1)))))
    out = assert_sound(path, loads=False)
    loaded = torch.load(out, weights_only=True)["w"]
    assert (loaded.shape, loaded.stride(), loaded.untyped_storage().nbytes()) == ((1 << 40, 1), (0, 1), 16)
    (shown,) = ckptconv.inspect(path).tensors
    assert (shown.nbytes, shown.storage_nbytes) == (4 << 40, 16)
    command("inspect", path, out="TB")
    assert_not_converted(path, RefusedError, "exceed the limit of 1,073,741,824", out="out.safetensors")
    assert peak(lambda: everything(path)) < 16 * MIB


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "unfolded": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "every second": lambda: torch.arange(12.0)[1::2],
    "diagonal": lambda: torch.arange(16.0).reshape(4, 4).diagonal(),
    "conjugated": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    "negated": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj().imag,
    "conjugated and transposed": lambda: torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3).mH,
    "empty": lambda: torch.empty(0, 3),
    "a scalar": lambda: torch.tensor(7.0),
    **{
        name: lambda name=name: torch.arange(6).to(getattr(torch, name)).reshape(2, 3).T
        for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "bfloat16", "bool", "float16")
    },
}


@pytest.mark.parametrize("name", VIEWS)
def test_right_values(write: Write, name: str) -> None:
    """Views, lazy bits and dtypes without a storage class keep the same tensor in torch's format, and the same values
    in safetensors.
    """
    view = VIEWS[name]()
    path = write(saved({"w": view}))
    assert_sound(path)
    out = path.with_name("out.safetensors")
    ckptconv.convert(path, out)
    written = safetensors.torch.load_file(out)["w"]
    view = view.contiguous().resolve_conj().resolve_neg()
    assert written.dtype == view.dtype and written.shape == view.shape
    assert torch.equal(
        written.view(torch.uint8) if view.dim() else written, view.view(torch.uint8) if view.dim() else view
    )


# Zips


def good_zip(method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive by Python's own writer, which puts sizes and checksums into local headers."""
    return torch_zip_of(dict_of(text("w"), tensor()), method=method)


def renamed(data: bytes, old: str, new: str) -> bytes:
    """Return `data` with the record `old` renamed in both headers. The new name must have the same length."""
    assert len(old) == len(new) and data.count(old.encode()) == 2
    return data.replace(old.encode(), new.encode())


def with_member(name: str, data: bytes = b"3\n") -> bytes:
    """Return a checkpoint with one more record `name`. The name replaces a placeholder, so it can repeat
    another name.
    """
    made = torch_zip_of(dict_of(text("w"), tensor()), {"data/0": bytes(16), "\1" * (len(name) - 5): data})
    return renamed(made, "made/" + "\1" * (len(name) - 5), name)


def zip64(data: bytes) -> bytes:
    """Return `data` with a zip64 end record, as torch writes it."""
    end = end_of(data)
    count, size, start = struct.unpack_from("<HII", data, end + 10)
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    return data[:end] + wide + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1) + data[end:]


ZIPS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a name twice": (lambda: with_member("made/version"), "two zip members have the same name"),
    "a name twice but for case": (lambda: with_member("made/VERSION"), "two zip members have the same name"),
    "a pickle twice but for case": (lambda: with_member("made/DATA.PKL"), "two zip members have the same name"),
    "a name twice after folding": (
        lambda: zip_of({"m/data.pkl": b"N.", "m/straße": b"", "m/STRASSE": b""}),
        "two zip members have the same name",
    ),
    "two roots": (lambda: with_member("maid/version"), "two folders at its root"),
    "a name that leads out": (lambda: with_member("made/../x"), "not in the archive's folder"),
    "an absolute name": (lambda: with_member("/made/x"), "not in the archive's folder"),
    "local and central sizes": (
        lambda: in_header(good_zip(), "local", "made/data/0", "size", 8),
        "disagree",
    ),
    "local and central checksums": (
        lambda: in_header(good_zip(), "local", "made/data/0", "crc", 8),
        "disagree",
    ),
    "local and central methods": (
        lambda: in_header(good_zip(), "local", "made/data/0", "method", 8),
        "disagree",
    ),
    "local and central names": (
        lambda: patched(good_zip(), local_header(good_zip(), "made/data/0") + 30, "<B", 0x41),
        "a zip member has two different names",
    ),
    "overlap": (
        lambda: patched(
            good_zip(), central_entry(good_zip(), "made/data/0") + 42, "<I", local_header(good_zip(), "made/data/0") - 1
        ),
        "overlaps the next record",
    ),
    "beyond the end": (
        lambda: patched(good_zip(), central_entry(good_zip(), "made/data/0") + 42, "<I", 1 << 30),
        "belong to no member",
    ),
    "a size beyond the end": (
        lambda: in_header(
            in_header(good_zip(), "central", "made/data/0", "stored size", 1 << 30),
            "central",
            "made/data/0",
            "size",
            1 << 30,
        ),
        "overlaps the next record",
    ),
    "cut in the directory": (lambda: good_zip()[:-30], "truncated"),
    "cut in a record": (lambda: good_zip()[:300], "truncated"),
    "an end that counts too many": (
        lambda: patched(patched(good_zip(), end_of(good_zip()) + 8, "<H", 4), end_of(good_zip()) + 10, "<H", 4),
        "the zip's directory",
    ),
    "an end that counts too few": (
        lambda: patched(patched(good_zip(), end_of(good_zip()) + 8, "<H", 2), end_of(good_zip()) + 10, "<H", 2),
        "the zip's directory",
    ),
    "an end of another place": (
        lambda: patched(good_zip(), end_of(good_zip()) + 16, "<I", 5),
        "does not end at its end record",
    ),
    "a zip64 end that counts otherwise": (
        lambda: patched(zip64(good_zip()), end_of(zip64(good_zip())) - 44 + 8 * 1, "<Q", 2),
        "the two end records of the zip archive differ",
    ),
    "a zip64 locator to nowhere": (
        lambda: patched(zip64(good_zip()), end_of(zip64(good_zip())) - 12, "<Q", 7),
        "the zip64 locator does not point to a zip64 end record",
    ),
    "two end records": (
        lambda: zip_of({"m/data.pkl": b"N."}, comment=zip_of({"m/data.pkl": b"I1\n."})),
        "two end records",
    ),
    "bytes after the end": (lambda: good_zip() + b"\0", "does not end where the zip archive ends"),
    "bytes before the start": (lambda: b"#!/bin/sh\n" + good_zip(), "a zip archive with 10 bytes before it"),
}


def test_the_good_ones_are_sound(write: Write) -> None:
    """The files from which the malformed ones are made are sound."""
    for data in (good_zip(), zip64(good_zip()), with_member("made/surplus"), older(OBJECT)):
        assert_sound(write(data))
    path = write(header("{" + entry() + "}", struct.pack("<2f", 1, 2)), "good.safetensors")
    out = path.parent.parent / "out.pt"
    ckptconv.convert(path, out, force=True)
    assert torch.load(out)["w"].tolist() == [1, 2]
    assert verify(path).ok and verify(out).ok


def test_rare_zips(write: Write, tmp_path: Path) -> None:
    """A zip archive that is encrypted or has an unknown compression method is unsupported.

    A deflated archive is read. A deflated record that inflates to more than the limit is refused, with little memory.
    """
    for flag in (1, 1 << 6, 1 << 13):
        encrypted = in_headers(good_zip(), "made/data/0", {"flags": flag})
        assert_refused(write(encrypted), UnsupportedError, "the zip archive is encrypted")
    for method in (1, 9, 12, 14, 93, 99):
        compressed = in_headers(good_zip(), "made/data/0", {"method": method})
        assert_refused(write(compressed), UnsupportedError, "a zip member is compressed in an unknown way")
    out = assert_sound(write(good_zip(zipfile.ZIP_DEFLATED)))
    assert zipfile.ZipFile(out).testzip() is None
    bomb = dict_of(text("w"), tensor(), text("x"), b"]" + b"N0" * (32 * MIB))
    path = write(torch_zip_of(bomb, method=zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < MIB
    assert_refused(path, LimitError, "a deflated record is too large")
    assert peak(lambda: everything(path)) < 24 * MIB


def deflated(numel: int, shape: tuple[int, ...] = (4,)) -> bytes:
    """Return a file with 4 MiB of zeros in 4 KiB. The pickle declares `numel` numbers."""
    pickle_ = dict_of(text("w"), tensor(storage(numel=integer(numel)), shape))
    return torch_zip_of(pickle_, {"data/0": bytes(4 * MIB)}, zipfile.ZIP_DEFLATED)


def test_a_storage_that_inflates_to_something_else(write: Write) -> None:
    """4 MiB of zeros in 4 KiB are read if the pickle declares them. With another declared size the file is refused, and
    the zeros are not written.
    """
    out = assert_sound(write(deflated(MIB)))
    assert out.stat().st_size > 4 * MIB
    for lie in (1 << 40, 8, 4 * MIB - 4):
        assert_refused(write(deflated(lie // 4)), MalformedError, "a different size from its record")
    path = write(in_headers(deflated(2, (2,)), "made/data/0", {"size": 8}))  # the size that the pickle declares
    assert_not_converted(path, MalformedError, "another size than declared")
    assert_found(path, "another size than declared")


def test_checksums(write: Write) -> None:
    """A record with a wrong checksum is malformed if it is read, and ``verify`` reads all records. A file without
    checksums, or without checksums of storages, gets a note. A single checksum of 0 counts as wrong.
    """
    two = {"data/0": bytes(range(16)), "data/1": bytes(range(16, 32))}
    data = torch_zip_of(dict_of(text("w"), tensor(), text("v"), tensor(storage("1"))), two)
    names = ("made/data/0", "made/data/1", "made/data.pkl", "made/version")
    for name, at in zip(names, (5, 5, 60, 0), strict=True):
        path = write(flipped(data, data_of(data, name) + at))
        assert_found(path, f"{name.split('/', 1)[1]}: the record is damaged: its checksum is wrong")
        assert_not_converted(path, MalformedError, "checksum", out="out.safetensors")
        assert_found(write(in_headers(data, name, {"crc": 0})), "checksum")
    for zeros, note in ((names[:2], "no storage has a checksum"), (names, "no checksums")):
        assert_sound(write(reduce(lambda made, name: in_headers(made, name, {"crc": 0}), zeros, data)), notes=note)
    empty = torch_zip_of(dict_of(text("w"), tensor(storage(numel=integer(0)), (0,))), {"data/0": b""})
    assert_sound(write(empty))


def test_archives_without_checksums(write: Write) -> None:
    """A file of ``set_crc32_options(False)`` is sound, with a note. The output has no checksums either."""
    with without_crc32():
        data = saved(OBJECT)
    out = assert_sound(write(data), notes="no checksums")
    assert all(info.CRC == 0 for info in zipfile.ZipFile(out).infolist())


def test_an_absurd_argument(write: Write) -> None:
    """``bytearray(2**40)`` and a ``torch.Size`` of such numbers are not called, although torch's allowlist contains
    both functions.
    """
    calls = [
        b"c__builtin__\nbytearray\n" + integer(2**40) + b"\x85R",
        b"ctorch\nSize\n(" + integer(2**40) * 3 + b"t\x85R",
    ]
    path = write(checkpoint(*calls, protocol=2))
    out = assert_sound(path, loads=False)
    assert peak(lambda: everything(path)) < 8 * MIB
    assert ckptconv.inspect(out).globals == ckptconv.inspect(path).globals


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the path of a socket is limited in length


@pytest.mark.parametrize(
    ("make", "word"),
    [(os.mkfifo, "a FIFO"), (a_socket, "a socket"), (lambda path: path.symlink_to("/dev/null"), "a device")],
    ids=["fifo", "socket", "device"],
)
def test_irregular_files(here: Path, make: Callable[[Path], None], word: str) -> None:
    """A FIFO, socket or device as input, target or shard is refused without waiting for its other end, and is not
    replaced.
    """
    path, good = here / "in" / "thing.pt", here / "good.pt"
    path.parent.mkdir()
    make(path)
    with pytest.raises(InputError, match=word):
        ckptconv.inspect(path)
    refused(InputError, word, path, here / "out.pt")
    assert main(["verify", str(path)]) == main(["inspect", str(path)]) == 1
    good.write_bytes(saved(OBJECT))
    for force in ([], ["--force"]):
        assert main(["convert", str(good), str(path), *force]) in (1, 2)
        assert not path.is_file()
    folder = here / "set"
    ckptconv.convert(good, folder, max_shard_size=8)
    (shard,) = folder.glob("*-00001-*")
    shard.unlink()
    shard.symlink_to(path)
    for each in (folder, *folder.glob("*.json")):
        with pytest.raises(InputError, match=word):
            ckptconv.inspect(each)
        assert main(["verify", str(each)]) == 1
    assert sorted(os.listdir(here)) == ["good.pt", "in", "set"]


def test_a_real_file(write: Write) -> None:
    """A file of torch is sound, and so is its output. Such a file has flags 0x808, zeros in local headers, data
    descriptors, padding and a zip64 end record.
    """
    data = saved(OBJECT)
    at = local_header(data, "archive/data/0")
    assert struct.unpack_from("<HH3I", data, at + 6)[::2] == (0x808, 0, 0) or struct.unpack_from(
        "<H", data, at + 6
    ) == (0x808,)
    assert b"PK\x07\x08" in data and b"PK\x06\x06" in data and b"FB" in data
    assert_sound(write(data))


def test_byte_order(write: Write) -> None:
    """Big-endian bytes are kept in torch's format and swapped for safetensors. A file without a byte order is
    little-endian.
    """
    numbers = {"data/0": struct.pack(">4f", 1, 2, 3, 4)}
    pickle_ = dict_of(text("w"), tensor())
    path = write(torch_zip_of(pickle_, {**numbers, "byteorder": b"big"}))
    out = assert_sound(path)
    assert zipfile.ZipFile(out).read("made/byteorder") == b"big"
    ckptconv.convert(path, path.with_name("out.safetensors"))
    assert safetensors.torch.load_file(path.with_name("out.safetensors"))["w"].tolist() == [1, 2, 3, 4]
    little = write(torch_zip_of(pickle_, {"data/0": struct.pack("<4f", 1, 2, 3, 4)}))
    assert torch.load(assert_sound(little))["w"].tolist() == [1, 2, 3, 4]


# Other containers


def older(obj: Any) -> bytes:
    """Return `obj` in the format of torch before 1.6."""
    return saved(obj, _use_new_zipfile_serialization=False)


def _older(change: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    return lambda: change(older(OBJECT))


def with_keys(keys: list[str]) -> Callable[[bytes], bytes]:
    """Return a change of the list of keys. In the file of OBJECT the keys are 0, 1."""

    def change(data: bytes) -> bytes:
        at = data.index(b"\x80\x02]q", 200)
        end = data.index(b"e.", at) + 2
        return data[:at] + pickle.dumps(keys, 2) + data[end:]

    return change


def _numel(value: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = found_in(data, struct.pack("<q5f", 5, *range(5)))
        return patched(data, at, "<q", value)

    return change


def _in_id(value: int) -> Callable[[bytes], bytes]:
    """Return a change of the number of elements, 5, in the persistent id of the first storage."""

    def change(data: bytes) -> bytes:
        at = data.index(b"K\x05N", 200)
        return data[:at] + integer(value) + data[at + 2 :]

    return change


OLDER: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut in the pickles": (_older(lambda data: data[:150]), "truncated"),
    "cut in a storage": (_older(lambda data: data[:-3]), "truncated"),
    "cut to its magic number": (_older(lambda data: data[:14]), "truncated"),
    "a count of more": (_older(_numel(6)), "a different size from its persistent id"),
    "a count of fewer": (_older(_numel(4)), "a different size from its persistent id"),
    "a count below 0": (_older(_numel(-1)), "a different size from its persistent id"),
    "a count of 2^40": (_older(_numel(1 << 40)), "a different size from its persistent id"),
    "2^40 elements in the id": (_older(_in_id(1 << 40)), "truncated"),
    "2^40 elements in both": (_older(lambda data: _in_id(1 << 40)(_numel(1 << 40)(data))), "truncated"),
    "no keys": (_older(with_keys([])), "the list of keys does not match the storages"),
    "a key is missing": (_older(with_keys(["0"])), "the list of keys does not match the storages"),
    "a key too many": (_older(with_keys(["0", "1", "2"])), "the list of keys does not match the storages"),
    "a key twice": (_older(with_keys(["0", "0", "1"])), "not a list of distinct strings"),
    "bytes after the end": (_older(lambda data: data + b"\0"), "bytes after the last storage"),
}


def test_older_format_of_a_big_endian_machine(write: Write) -> None:
    """torch wrote little-endian numbers on every machine, so a big-endian flag in the older format is only a note."""
    data = older(OBJECT)
    at = found_in(data, b"little_endian") + len(b"little_endian")
    at = data.index(b"\x88", at)
    path = write(patched(data, at, "<B", 0x89))
    out = assert_sound(path, notes="big-endian", loads=False)
    assert_same(torch.load(out), OBJECT)
    assert_sound(write(data))


def header(text_: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with the header `text_`. `length` replaces the stated length of the header."""
    raw = text_.encode() if isinstance(text_, str) else text_
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(name: str = "w", dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


HEADERS: dict[str, tuple[bytes, str]] = {
    "over 100 MB": (header("{" + entry() + "}", bytes(8), 100_000_001), "it is too long"),
    "2^63 bytes": (header("{" + entry() + "}", bytes(8), 1 << 63), "it is too long"),
    "longer than the file": (header("{" + entry() + "}", b"", 10_000), "the file ends inside it"),
    "not UTF-8": (header(b'{"\xff":1}'), "it is not UTF-8"),
    "no brace": (header(' [{"w":1}]'), "it is not a JSON object"),
    "spaces alone": (header("   "), "it is not a JSON object"),
    "a key twice": (header("{" + entry() + "," + entry() + "}", bytes(8)), "it contains a key twice"),
    "a field twice": (
        header('{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "it contains a key twice",
    ),
    "metadata twice": (
        header('{"__metadata__":{},"__metadata__":{},' + entry() + "}", bytes(8)),
        "it contains a key twice",
    ),
    "a hole": (header("{" + entry(offsets="[4,12]") + "}", bytes(12)), "a hole or an overlap"),
    "a hole between": (
        header("{" + entry() + "," + entry("v", offsets="[12,20]") + "}", bytes(20)),
        "a hole or an overlap",
    ),
    "an overlap": (header("{" + entry() + "," + entry("v", offsets="[4,12]") + "}", bytes(12)), "a hole or an overlap"),
    "one range twice": (header("{" + entry() + "," + entry("v") + "}", bytes(8)), "a hole or an overlap"),
    "an overflow": (header("{" + entry(shape="[4611686018427387904,4]", offsets="[0,0]") + "}"), "too many elements"),
    "an offset of 2^64": (
        header("{" + entry(offsets="[0,18446744073709551616]") + "}", bytes(8)),
        "a number is negative or too large",
    ),
    "a negative offset": (header("{" + entry(offsets="[-8,0]") + "}", bytes(8)), "a number is negative or too large"),
    "offsets the wrong way": (header("{" + entry(offsets="[8,0]") + "}", bytes(8)), "no valid shape and data_offsets"),
    "bytes after": (header("{" + entry() + "}", bytes(9)), "1 byte after the last tensor"),
    "cut in the data": (header("{" + entry() + "}", bytes(7)), "truncated: 1 byte of"),
    "a size that is not the shape's": (
        header("{" + entry(shape="[3]") + "}", bytes(8)),
        "a number of bytes that does not match its shape",
    ),
    "a shape of a fraction": (header("{" + entry(shape="[2.0]") + "}", bytes(8)), "a number is not an integer"),
    "a shape of true": (header("{" + entry(shape="[true]") + "}", bytes(8)), "no valid shape and data_offsets"),
}


#: Files of each container: the file name, the contents and the error.
FILES: dict[str, tuple[str, bytes | Callable[[], bytes], str]] = {
    f"{kind} {case}": (name, data, what)
    for kind, name, table in (
        ("a storage", "m.pt", SIZES),
        ("zip:", "m.pt", ZIPS),
        ("older:", "m.pt", OLDER),
        ("safetensors:", "m.safetensors", HEADERS),
    )
    for case, (data, what) in table.items()
}


@pytest.mark.parametrize("case", FILES)
def test_malformed_files(write: Write, case: str) -> None:
    """A file that is truncated, contains false numbers or names, or has two readings is malformed. No memory is
    allocated for false sizes.
    """
    name, data, what = FILES[case]
    path = write(data() if callable(data) else data, name)
    assert_refused(path, MalformedError, what)
    assert peak(lambda: everything(path)) < 8 * MIB


#: Contents that a later torch or safetensors may write: the file name, the contents and the error.
LATER: dict[str, tuple[str, bytes, str]] = {
    "a sixth part of a persistent id": ("m.pt", stored(storage()[:-2] + b"NtQ"), "has parts that are not known"),
    "a storage class": ("m.pt", stored(storage(cls="Float6Storage")), "a storage class that is not known"),
    "a dtype": (
        "m.pt",
        torch_zip_of(dict_of(text("w"), tensor()).replace(b"_v2\n", b"_v3\n").replace(b"tR", b"ctorch\nfloat6\ntR")),
        "a dtype that is not known",
    ),
    "a dtype of safetensors": ("m.safetensors", header("{" + entry(dtype="F33") + "}", bytes(8)), "an unknown dtype"),
    "a field of safetensors": (
        "m.safetensors",
        header("{" + entry().replace("}", ',"strides":[1]}') + "}", bytes(8)),
        "has fields that are not known",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_unknown_fields_of_later_versions(write: Write, case: str) -> None:
    """Contents that this version does not know are unsupported, and never called damaged."""
    name, data, what = LATER[case]
    assert_refused(write(data, name), UnsupportedError, what)


Shards = Callable[[dict[str, Any], Path], object]


def _change_map(name: str, shard: str) -> Shards:
    return lambda index, folder: index["weight_map"].update({name: shard})


def _less(*names: str) -> Shards:
    return lambda index, folder: [index["weight_map"].pop(name) for name in names]


def _second(folder: Path) -> Path:
    (shard,) = folder.glob("*-00002-*")
    return shard


def _shard_is(make: Callable[[Path], None]) -> Shards:
    def change(index: dict[str, Any], folder: Path) -> None:
        shard = _second(folder)
        shard.unlink()
        make(shard)

    return change


def _swapped(index: dict[str, Any], folder: Path) -> None:
    names = index["weight_map"]
    names.update(a=names["b"], b=names["a"])


def _swapped_files(index: dict[str, Any], folder: Path) -> None:
    first, second = sorted(folder.glob("*-of-*"))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)


SHARDS: dict[str, tuple[Shards, str]] = {
    "..": (_change_map("b", "../model-00002-of-00002.safetensors"), "a shard must be named without a folder"),
    "just ..": (_change_map("b", ".."), "a shard must be named without a folder"),
    "absolute": (_change_map("b", "/etc/passwd.safetensors"), "a shard must be named without a folder"),
    "backslash": (_change_map("b", "..\\m.safetensors"), "a shard must be named without a folder"),
    "a drive": (_change_map("b", "c:m.safetensors"), "a shard must be named without a folder"),
    "a stream": (_change_map("b", "a:m.safetensors"), "a shard must be named without a folder"),
    "a device": (_change_map("b", "nul.safetensors"), "a shard must be named without a folder"),
    "NUL": (_change_map("b", "model-00002-of-00002\0.safetensors"), "a shard must be named without a folder"),
    "nothing": (_change_map("b", ""), "a shard must be named without a folder"),
    "a FIFO": (_shard_is(os.mkfifo), "a FIFO and not a file"),
    "a folder": (_shard_is(os.mkdir), "a folder, not a file"),
    "a link to nowhere": (
        _shard_is(lambda path: path.symlink_to("nowhere")),
        "missing: model-00002-of-00002.safetensors",
    ),
    "a missing shard": (lambda index, folder: _second(folder).unlink(), "missing: model-00002-of-00002.safetensors"),
    "a tensor that the index lacks": (_less("b"), "'b' in model-00002-of-00002.safetensors"),
    "a shard that the index lacks": (_less("b", "c"), "model-00002-of-00002.safetensors"),
    "a tensor that no shard has": (_change_map("d", "model-00001-of-00002.safetensors"), "'d'"),
    "a tensor in two shards": (
        lambda index, folder: safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(2)}, _second(folder)),
        "'a' in model-00001-of-00002.safetensors and model-00002-of-00002.safetensors",
    ),
    "two names swapped": (_swapped, "'a' in model-00001-of-00002.safetensors and not in"),
    "two files swapped": (_swapped_files, "'a' in model-00002-of-00002.safetensors"),
    "a number for a shard": (
        lambda index, folder: index["weight_map"].update(b=2),
        "the index names no shard for 'b'",
    ),
    "no map": (lambda index, folder: index.pop("weight_map"), "the index has no weight_map"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(tmp_path: Path, name: str) -> None:
    """A set is refused if its index names files elsewhere, or if the shards do not contain exactly the tensors that the
    index lists. The error names the shard or the tensor.
    """
    change, what = SHARDS[name]
    state = saved_at(tmp_path / "state.pt", {"a": torch.ones(2), "b": torch.zeros(1), "c": torch.zeros(1)})
    folder = tmp_path / "in"
    ckptconv.convert(state, folder, format="safetensors", max_shard_size=8)
    assert verify(folder).ok
    (index,) = folder.glob("*.json")
    content = json.loads(index.read_bytes())
    change(content, folder)
    index.write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    for path in (folder, index):
        with pytest.raises(InputError, match=re.escape(what)) as error:
            ckptconv.inspect(path)
        assert "\n" not in str(error.value)
        refused(InputError, re.escape(what), path, tmp_path / "out" / "whole.pt")
        refused(InputError, re.escape(what), path, tmp_path / "out" / "set", format="safetensors")
        assert_found(path, what, "damaged", "unknown")
    assert not tree(tmp_path / "out")


def test_links_of_a_cache_are_followed_safely(tmp_path: Path) -> None:
    """The Hub's cache consists of links to ``../../blobs``. Shard names are checked, not the targets of links, so the
    set is read.
    """
    torch.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "state.pt")
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    ckptconv.convert(tmp_path / "state.pt", blobs, format="safetensors", max_shard_size=8)
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(Path("../../blobs") / blob.name)
    assert verify(folder).ok
    ckptconv.convert(folder, tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), {"a": torch.ones(2), "b": torch.zeros(2)})


NO_CHECKPOINTS: dict[str, tuple[bytes | Callable[[], bytes], str, str]] = {
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n",
        "a Git LFS pointer",
        "with Git LFS",
    ),
    "HTML page": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>", "an HTML page", "download"),
    "empty file": (b"", "empty", "download"),
    "zeros": (bytes(4096), "zeros", ""),
    "truncated download": (lambda: saved(OBJECT)[:-400], "truncated", "download or copy it again"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), "GGUF", "gguf"),
    "plain pickle": (pickle.dumps({"a": [1, 2, 3]}), "pickle", ""),
    "another magic number": (
        _older(
            lambda data: data.replace(b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x18", 1)
        ),
        "pickle",
        "",
    ),
    "error message": (b'{"error": "Repository not found"}', "Repository not found", ""),
}


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_files_of_other_kinds(write: Write, name: str) -> None:
    """A file that is not a checkpoint is refused by all three commands. The error is one line that says what the file
    is, and most errors have a hint about the next step.
    """
    data, what, hint = NO_CHECKPOINTS[name]
    path = write(data() if callable(data) else data)
    with pytest.raises(InputError, match=what) as error:
        ckptconv.inspect(path)
    assert hint in (error.value.hint or "") and "\n" not in str(error.value)
    assert_not_converted(path, type(error.value), error.value.what)  # type: ignore[arg-type]
    assert_found(path, error.value.what, "damaged", "unknown")
    assert peak(lambda: everything(path)) < 8 * MIB


def test_a_folder(tmp_path: Path) -> None:
    """A folder without a checkpoint is refused as a folder by all three commands."""
    folder = tmp_path / "in" / "folder"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("nothing")
    assert_refused(folder, UnsupportedError, "a folder, not a file")


def test_programs(write: Write) -> None:
    """An exported program is refused by its name. TorchScript is inspected and verified, and its weights can be
    extracted, but the complete archive is not converted.
    """
    exported = write(zip_of({"m/archive_format": b"pt2", "m/models/model.json": b"{}", "m/version": b"1"}), "m.pt2")
    assert_refused(exported, UnsupportedError, "a .pt2 archive (torch.export)")
    path = write(scripted(torch.nn.Linear(2, 2)))
    assert ckptconv.inspect(path).format == "TorchScript" and verify(path).ok
    assert_not_converted(path, RefusedError, "a TorchScript archive is a program")
    out = path.with_name("weights.pt")
    assert main(["convert", str(path), str(out), "--state-dict"]) == 0
    assert set(torch.load(out)) == {"weight", "bias"}


HUGE = 1 << 480_000


@pytest.mark.parametrize("where", ["offset", "storage"])
def test_huge_integers(write: Write, command: Command, where: str) -> None:
    """An error about an integer of 480,000 bits is reported as text and as JSON. Python prints no integer of more than
    4,300 digits.
    """
    huge = pickle.dumps(HUGE, 2)[2:-1]
    value = tensor().replace(integer(0) + b"(", huge + b"(", 1) if where == "offset" else tensor(storage(numel=huge))
    path = write(torch_zip_of(dict_of(text("w"), value)))
    assert_refused(path, MalformedError, "not a number of elements" if where == "offset" else "parts of wrong types")
    command.json("verify", path, status=1)
    (path.parent.parent / "folder").mkdir()
    report = command.json("convert", path.parent, path.parent.parent / "folder", status=1)
    assert report["items"][0]["error"]["type"] == "MalformedError"


def test_huge_integers_in_metadata(write: Write, tmp_path: Path) -> None:
    """An integer of 480,000 bits is sound as a key. It is not a valid offset in the metadata of
    torch.distributed.checkpoint.
    """
    path = write(torch_zip_of(dict_of(pickle.dumps(HUGE, 2)[2:-1], tensor(), text("w"), tensor())))
    assert_sound(path, loads=False)
    for command in (["inspect", "--tree"], ["inspect", "--json"], ["diff", str(path)]):
        assert main([*command, str(path)]) == 0
    metadata = distributed({"w": torch.ones(2)}, tmp_path / "dcp" / "in") / ".metadata"
    said = pickle.loads(metadata.read_bytes())
    next(iter(said.storage_data.values())).offset = HUGE
    metadata.write_bytes(pickle.dumps(said))
    assert_refused(metadata.parent, MalformedError, "no valid offset and length")


# One file with two readings


def assert_two_readings(path: Path, as_: str, other: str) -> None:
    """Fail unless all commands and functions that read `path` refuse it, and name both readings."""
    what = f"it can be read in two ways: as a {as_} file, and as {other}"
    assert_refused(path, MalformedError, what)
    for read in (ckptconv.open, ckptconv.load, lambda path: ckptconv.diff(path, path)):
        with pytest.raises(MalformedError, match=re.escape(what)):
            read(path)
    assert main(["diff", str(path), str(path)]) == 2
    verdict = verify(path)
    assert verdict.safety is None and verdict.format is None


def assert_runs(load: Callable[[], object], marker: Path) -> None:
    """Fail unless `load` writes `marker`, whatever it raises. This proves that the file is an attack."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        load()
    assert marker.exists()
    marker.unlink()


TARS = {
    "safetensors": (tar_in_safetensors, "m.bin"),  # torch.load recognizes a safetensors file by its suffix
    "torch legacy": (tar_in_legacy, "m.pt"),
    "pickle": (tar_in_pickle, "m.pkl"),
}


@pytest.mark.parametrize("as_", TARS)
def test_a_tar_archive_too(write: Write, tmp_path: Path, as_: str) -> None:
    """torch.load checks first for the tar archive that torch wrote before 0.1.10, and runs its contents. A file of
    another format that is also such an archive is refused.
    """
    make, name = TARS[as_]
    path = write(make(runs(tmp_path / "marker")), name)
    assert_runs(lambda: torch.load(path, weights_only=False), tmp_path / "marker")
    assert_two_readings(path, as_, "a tar archive, which torch.load checks for first")


def test_a_pickle_at_the_first_byte(write: Write, tmp_path: Path) -> None:
    """A safetensors file can also be a pickle, if the length of the header is an opcode. The file is refused if one of
    its pickles reaches a global, an extension code or a persistent id.
    """
    path = write(pickle_in_safetensors(runs(tmp_path / "marker")), "m.safetensors")
    assert safetensors.torch.load_file(path)
    assert_runs(lambda: pickle.loads(path.read_bytes()), tmp_path / "marker")
    assert_two_readings(path, "safetensors", "a pickle that contains builtins.open")
    for opcodes, named in (
        (b"cm\nf\n.", "m.f"),
        (b"cm\nf\n0\0", "m.f"),
        (b"N." + RUNS_NOTHING, "m.f"),
        (b"\x82\x07.", "extension code 7"),
        (b"\x82\x07)R\xff", "extension code 7"),
        (b"Vid\nQ", "a persistent id"),
        (b"Pid\n.", "a persistent id"),
        (b"(Vstorage\nNtQ.", "a persistent id"),
    ):
        path = write(pickle_in_safetensors(opcodes), "m.safetensors")
        assert_two_readings(path, "safetensors", f"a pickle that contains {named}")
    for opcodes, doubt in ((b"N0" * 6000 + b".", "that is too long to check"), (CUT_IN_TWO, "cut its opcodes in two")):
        path = write(pickle_in_safetensors(opcodes), "m.safetensors")
        assert_two_readings(path, "safetensors", f"a pickle: a pickle {'whose frames ' * (doubt[0] == 'c')}{doubt}")


RUNS_NOTHING = b"\x80\x02cm\nf\n)R."
#: C's unpickler reads a call of m.f if its source has no ``peek``. All other readers see an invalid text.
CUT_IN_TWO = b"\x95" + struct.pack("<Q", 5) + b"V\xff\xff\xff" + b"Xcm\nf\n)R."


@pytest.mark.parametrize("opcodes", [b".", b"N.", b"]K\x01a.", b"}Vkey\nNs.", b"\xff", b"\x82\x07\0", b"K\x01Q."])
def test_plain_values_at_the_first_byte(write: Write, opcodes: bytes) -> None:
    """A pickle of plain values at the start of a safetensors file is sound, and so is an unused extension code. A
    header can be such a pickle by chance.
    """
    assert_sound(write(pickle_in_safetensors(opcodes), "m.safetensors"), loads=False)


def test_a_legacy_stream_at_the_first_byte(write: Write, tmp_path: Path) -> None:
    """A safetensors file that starts with a stream of torch's older format is refused. The magic number is a plain
    value, but torch.load reads the pickles after it.
    """
    marker = tmp_path / "marker"
    stream = saved_before_1_6(runs(marker))
    path = write(pickle_in_safetensors(stream), "m.bin")
    assert safetensors.torch.load(path.read_bytes())
    assert_runs(lambda: torch.load(path, weights_only=False), marker)
    assert_two_readings(path, "safetensors", "a pickle that contains builtins.open")


def saved_before_1_6(payload: bytes) -> bytes:
    """Return a stream of the older format without its PROTO opcodes, with `payload` as the object."""
    numbers = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    return b"".join(pickle.dumps(number, 2)[2:] for number in numbers) + payload


def zip_in_legacy(payload: bytes) -> bytes:
    """Return a file of torch before 1.6 whose last storage is an archive."""
    tensor = torch.frombuffer(bytearray(zip_of_pickle(payload)), dtype=torch.uint8)
    return saved({"w": tensor}, _use_new_zipfile_serialization=False)


def zip_in_pickle(payload: bytes) -> bytes:
    """Return a pickle of a tensor, and of a byte string that ends with an archive."""
    return pickle.dumps({"w": torch.ones(2), "x": b"#!/bin/sh\n" + zip_of_pickle(payload)}, 4)


EMBEDDED = {
    "counted from the archive": (zip_in_safetensors, "safetensors", "m.safetensors"),
    "counted from the file": (
        lambda payload: zip_in_safetensors(payload, absolute=True),
        "safetensors",
        "m.safetensors",
    ),
    "zip64": (lambda payload: with_zip64(zip_in_safetensors, payload), "safetensors", "m.safetensors"),
    "before 1.6": (zip_in_legacy, "torch legacy", "m.pt"),
    "in a pickle": (zip_in_pickle, "pickle", "m.pkl"),
}


def with_zip64(make: Callable[[bytes], bytes], payload: bytes) -> bytes:
    """Return the output of `make` with a zip64 end record. The other end record then contains no valid position of the
    directory.
    """
    data = make(payload + b" " * 200)
    archive = zip64(zip_of_pickle(payload))
    archive = patched(archive, end_of(archive) + 12, "<I", 0xFFFFFFFF)
    archive = patched(archive, end_of(archive) + 16, "<I", 0xFFFFFFFF)
    return data[: len(data) - len(archive)] + archive


@pytest.mark.parametrize("how", EMBEDDED)
def test_a_zip_directory_at_the_end(write: Write, tmp_path: Path, how: str) -> None:
    """A zip archive at the end of another format is refused. zipfile finds it at any start, and torch's own reader
    finds it if its offsets are counted from the start of the file.
    """
    make, as_, name = EMBEDDED[how]
    marker = tmp_path / "marker"
    path = write(make(runs(marker)), name)

    def load() -> None:
        with zipfile.ZipFile(path) as archive:
            pickle.loads(archive.read("a/data.pkl"))

    assert_runs(load, marker)
    if how == "counted from the file":
        assert torch._C.PyTorchFileReader(str(path)).get_all_records() == ["data.pkl", "version"]
    assert_two_readings(path, as_, "a zip archive, which zipfile and torch.jit.load find from the end of the file")


def test_a_gzip_file_too(write: Write, tmp_path: Path) -> None:
    """A safetensors file that is also a gzip file is refused, because joblib unpacks it. A gzip signature without a
    gzip file is harmless.
    """
    marker = tmp_path / "marker"
    path = write(gzip_in_safetensors(runs(marker)), "m.safetensors")
    assert safetensors.torch.load_file(path)

    def load() -> None:
        with gzip.open(path) as unpacked:
            pickle.load(unpacked)

    assert_runs(load, marker)
    assert_two_readings(path, "safetensors", "a gzip file, which joblib unpacks")
    data = path.read_bytes()
    assert_sound(write(data[:8] + data[8:].replace(b"p<P", b"v<P"), "m.safetensors"), loads=False)


PACKED = {
    "torch.package": (
        {".data/extern_modules": b"builtins\n", "m/model.bin": None},
        lambda path: torch.package.PackageImporter(path).load_pickle("m", "model.bin"),
        "a torch.package archive",
    ),
    "torch.export": (
        {
            "Archive_Format": b"pt2",
            "data/constants/m_constants_config.json": json.dumps(
                {
                    "config": {
                        "c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
                    }
                }
            ).encode(),
            "data/constants/opaque_obj_0": None,
        },
        lambda path: _package._load_constants(_package.PT2ArchiveReader(str(path)), "m"),
        "a .pt2 archive",
    ),
}


@pytest.mark.parametrize("reader", PACKED)
def test_archives_of_torchs_other_readers(write: Write, tmp_path: Path, reader: str) -> None:
    """A state dict with the records of torch.package or torch.export is refused. These readers ignore the case of
    record names, and run such records.
    """
    records, load, what = PACKED[reader]
    marker = tmp_path / "marker"
    members = {name: runs(marker) if data is None else data for name, data in records.items()}
    path = write(torch_zip_of(dict_of(text("w"), tensor()), {"data/0": bytes(16), **members}))
    assert torch.load(path)["w"].shape
    assert_runs(lambda: load(path), marker)
    assert_refused(path, UnsupportedError, what)
    assert verify(path).safety is None


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.jit
def test_a_program_in_capital_letters(write: Write) -> None:
    """A TorchScript archive with ``Constants.pkl`` is malformed. torch.jit.load reads it as a program."""
    with zipfile.ZipFile(io.BytesIO(scripted(torch.nn.ReLU()))) as archive:
        members = {name.replace("constants.pkl", "Constants.pkl"): archive.read(name) for name in archive.namelist()}
    path = write(zip_of(members))
    assert torch.jit.load(path)(torch.ones(1)) == 1
    assert_found(path, "a record's name differs in case from torch's name", "damaged")


def test_stray_signatures(write: Write) -> None:
    """Weights can contain any bytes, so an end record without a directory and a directory without an end record are
    sound.
    """
    stray = b"PK\x05\x06" * 9 + b"PK\x06\x07" * 9 + b"PK\x01\x02" * 30 + b"PK\x03\x04" * 9 + zip_of_pickle(b"N.")[:-22]
    tensor = torch.frombuffer(bytearray(stray + bytes(-len(stray) % 8)), dtype=torch.uint8)
    assert_sound(write(safetensors.torch.save({"w": tensor}), "m.safetensors"), loads=False)
    assert_sound(write(saved({"w": tensor}, _use_new_zipfile_serialization=False)))
    assert_sound(write(saved({"w": tensor})))


def test_two_readings_of_a_part(tmp_path: Path) -> None:
    """A shard and the metadata of torch.distributed.checkpoint are also refused if they have two readings."""
    folder = tmp_path / "set"
    folder.mkdir()
    marker = tmp_path / "marker"
    data = tar_in_safetensors(runs(marker))
    weights = safetensors.torch.save({"v": torch.ones(1)})
    for i, part in enumerate((data, weights), 1):
        (folder / f"model-{i:05}-of-00002.safetensors").write_bytes(part)
    what = "it can be read in two ways: as a safetensors file, and as a tar archive"
    for read in (ckptconv.inspect, ckptconv.load, lambda path: ckptconv.convert(path, tmp_path / "out.pt")):
        with pytest.raises(MalformedError, match=what):
            read(folder)
    assert_found(folder, what)
    saved_here = distributed({"w": torch.ones(2)}, tmp_path / "dcp")
    metadata = saved_here / ".metadata"
    prefix = tar_in_pickle(runs(marker))
    thrown_away = prefix[: 2 + 5 + int.from_bytes(prefix[3:7], "little") + 1]
    metadata.write_bytes(thrown_away + metadata.read_bytes()[2:])
    what = "it can be read in two ways: as a pickle file, and as a tar archive"
    with pytest.raises(MalformedError, match=what):
        ckptconv.inspect(saved_here)
    assert_found(saved_here, what)


FORGIVEN = {
    "NUL in a PUT": (b"Np1\0\n0g1\n0%b", "C"),
    "NUL in a GET": (b"Np1\n0g1\0x\n0%b", "C"),
    "a frame longer than the pickle": (b"\x80\x04\x95\xff\xff\0\0\0\0\0\0%b", "Python"),
    "no PROTO, and one in the middle": (b"N0\x80\x03(0%b", "C"),
    "bytes behind STOP": (b"%b\xff\xff", "C"),
    "the last line without its end": (b"%b", "Python"),
}


@pytest.mark.parametrize("how", FORGIVEN)
def test_hidden_pickles_that_one_unpickler_forgives(write: Write, tmp_path: Path, how: str) -> None:
    """A pickle inside a byte string is examined even if only one of CPython's unpicklers accepts it. Its globals are
    found.
    """
    before, reader = FORGIVEN[how]
    marker = tmp_path / "marker"
    payload = before % runs(marker)
    if how == "the last line without its end":
        payload += b"cthis\ndX"
    unpickler = pickle.Unpickler if reader == "C" else pickle._Unpickler
    assert_runs(lambda: unpickler(io.BytesIO(payload)).load(), marker)
    path = write(saved({"w": torch.ones(1), "x": payload}))
    assert ckptconv.inspect(path).dangerous == ("builtins.open",)
    assert_found(path, "builtins.open", "dangerous")
    assert_not_converted(path, ckptconv.DangerousError, "no checkpoint needs")


def test_hidden_pickles_that_are_two_programs(write: Write, tmp_path: Path) -> None:
    """C's unpickler drops the first bytes of an opcode that a frame cuts in two, if its source has no ``peek``. Other
    readers find no global in such a pickle, so ckptconv reports it as unknown and does not copy it.
    """
    marker = tmp_path / "marker"
    hidden = runs(marker)
    number = b"\x8a\x06" + b"abcde" + b"f"  # the frame ends before the last byte, so C reads the next six bytes
    payload = b"\x95" + struct.pack("<Q", 7) + number + b"X" + struct.pack("<I", len(hidden)) + hidden + b"0."
    assert_runs(lambda: pickle.load(io.BytesIO(payload)), marker)
    assert pickle.loads(payload) == int.from_bytes(b"abcdef", "little") and not marker.exists()
    path = write(saved({"w": torch.ones(1), "x": payload}))
    assert_found(path, "a pickle whose frames cut its opcodes in two", "unknown")
    assert_not_converted(path, ckptconv.DangerousError, "cannot be checked")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("nested", ["as it is", "in another archive", "before 1.6"])
def test_files_of_torch_inside(write: Write, tmp_path: Path, method: int, nested: str) -> None:
    """A dangerous file of torch inside a checkpoint is found, as a member with any name and as a byte string."""
    marker = tmp_path / "marker"
    inner = zip_of_pickle(runs(marker))
    assert_runs(lambda: torch.load(io.BytesIO(inner), weights_only=False), marker)
    if nested == "in another archive":
        inner = zip_of({"b/extra/model.pt": inner}, method)
    elif nested == "before 1.6":
        inner = b"\x80\x02" + saved_before_1_6(runs(marker))
        assert_runs(lambda: torch.load(io.BytesIO(inner), weights_only=False), marker)
    member = torch_zip_of(dict_of(text("w"), tensor()), {"data/0": bytes(16), "more/model.pt": inner}, method)
    for data in (member, saved({"w": torch.ones(1), "x": inner})):
        path = write(data)
        assert ckptconv.inspect(path).dangerous == ("builtins.open",)
        assert_found(path, "builtins.open", "dangerous")
        assert_not_converted(path, ckptconv.DangerousError, "no checkpoint needs")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["x.npy", "extra/x", "data/0", "data/1"])
def test_arrays_inside(write: Write, here: Path, name: str, method: int) -> None:
    """numpy.load accepts any zip and any of its members as an array, also a storage. An array of objects is dangerous,
    a plain array is not. ``convert`` does not examine storages; ``verify`` reads them all.
    """
    stream = io.BytesIO()
    np.save(stream, np.array([Runs()], object))
    array = stream.getvalue()
    pickled = dict_of(text("w"), tensor(storage("0", integer(len(array)), "ByteStorage"), (1,)))
    path = write(torch_zip_of(pickled, {"data/0": bytes(len(array)), name: array}, method))
    assert len(torch.load(path)["w"]) == 1

    def load() -> None:
        np.load(path, allow_pickle=True)[f"made/{name}"]

    assert_runs(load, here / "marker")
    assert_found(path, "io.open", "dangerous")
    if name != "data/0":
        assert_not_converted(path, ckptconv.DangerousError, "no checkpoint needs")
    stream = io.BytesIO()
    np.save(stream, np.arange(5.0))
    path = write(torch_zip_of(dict_of(text("w"), tensor()), {"data/0": bytes(16), "x.npy": stream.getvalue()}, method))
    assert verify(path, strict=True).ok


class Runs:
    """An object whose pickle makes the file ``marker``."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, ("marker", "w")


# Uses that torch's safe loader refuses


def called(function: str, *args: bytes) -> bytes:
    """Return opcodes that push a call of `function`, written as ``module name``, with the arguments `args`."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(args) + b"tR"


RECORDS = {"data/0": bytes(16), "version": b"3\n"}
#: The value of an item of a dict, and the records of the archive. torch refuses each of these files.
CLAIMS: dict[str, tuple[bytes, Mapping[str, bytes]]] = {
    "constants.pkl beside a state dict": (tensor(), {**RECORDS, "constants.pkl": b"\x80\x02)."}),
    "a version outside of 1 to 10": (tensor(), {**RECORDS, "version": b"11\n"}),
    "another version in .data/version": (tensor(), {**RECORDS, ".data/version": b"99\n"}),
    "a list as a key": (b"}]K\x01s", RECORDS),
    "REDUCE of a dtype": (called("torch float32"), RECORDS),
    "BUILD of an OrderedDict with a list": (called("collections OrderedDict") + b"]K\x01ab", RECORDS),
    "requires_grad that is no bool": (tensor().replace(b"\x89ccoll", b"K\x01ccoll"), RECORDS),
    "a device that is none": (called("torch device", text("foo")), RECORDS),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_weights_only_claims(write: Write, name: str) -> None:
    """A file that torch refuses with ``weights_only=True`` is not reported to load, neither by ``inspect`` nor by
    ``verify``.
    """
    value, records = CLAIMS[name]
    path = write(torch_zip_of(dict_of(text("w"), value), records))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((RuntimeError, TypeError, ValueError, pickle.UnpicklingError)):
            torch.load(path, map_location="cpu", weights_only=True)
    shown = ckptconv.inspect(path)
    assert not shown.weights_only and not shown.loads_here and shown.torch_load.answer != "loads"
    assert verify(path).safety == shown.safety != "loads with weights_only=True"


def test_a_folder_of_5000_characters_in_an_archive(write: Write) -> None:
    """torch keeps 511 bytes of a record's name, so it refuses an archive with longer names. ckptconv reports
    the same.
    """
    records = {"data.pkl": dict_of(text("w"), tensor()), **RECORDS}
    path = write(zip_of({f"{'m' * 5000}/{name}": data for name, data in records.items()}))
    with pytest.raises(RuntimeError):
        torch.load(path, map_location="cpu", weights_only=True)
    assert ckptconv.inspect(path).torch_load.answer == "refused"
