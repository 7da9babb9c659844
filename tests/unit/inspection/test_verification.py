"""``verify``: everything that is wrong is found, not the first fault alone, and what is sound is said to be."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from ckptconv import InputError, UsageError, Verdict, convert, verify
from ckptconv.cli.main import main
from ckptconv.limits import LIMITS
from tests.support.hostile_bytes import (
    data_of,
    dict_of,
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

STATE = {f"w{i}": torch.arange(12.0).reshape(3, 4) + i for i in range(4)}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A checkpoint of four tensors, by torch."""
    torch.save(STATE, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


def lines_of(verdict: Verdict, level: str = "damaged") -> list[str]:
    return [str(finding) for finding in verdict.findings if finding.level == level]


class Said(NamedTuple):
    """What the command said, and its exit status."""

    exit_code: int
    output: str


def legacy_start() -> bytes:
    """What stands before the object in a file from before torch 1.6."""
    file = BytesIO()
    torch.save(0, file, _use_new_zipfile_serialization=False)
    return file.getvalue()[: file.getvalue().index(b"\x80\x02K\0.")]


def run(*args: object) -> Said:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        return Said(main(["verify", *map(str, args)]), out.getvalue())


# What is sound


def test_every_record_is_compared(sound: Path) -> None:
    """All records of a zip have checksums, and each is looked at."""
    verdict = verify(sound)
    assert (verdict.ok, verdict.format, verdict.safety, verdict.findings) == (
        True,
        "torch zip",
        "loads with weights_only=True",
        (),
    )
    records = [
        b"model/" + name
        for name in (
            b"data.pkl",
            b".format_version",
            b".storage_alignment",
            b"byteorder",
            b"data/0",
            b"data/1",
            b"data/2",
            b"data/3",
            b"version",
            b".data/serialization_id",
        )
    ]
    assert verdict.checked == len(records)
    for name in records:
        data = sound.read_bytes()
        at = data_of(data, name.decode())
        bad = verify(written(sound.with_name("bad.pt"), flipped(data, at)))
        assert not bad.ok
        assert any(
            name.decode().removeprefix("model/") in line and "checksum is wrong" in line for line in lines_of(bad)
        ), bad


def test_a_sound_safetensors_file(tmp_path: Path) -> None:
    """It has no checksums, which is said, and no code."""
    save_file(STATE, tmp_path / "m.safetensors")
    verdict = verify(tmp_path / "m.safetensors")
    assert (verdict.ok, verdict.checked) == (True, 0)
    (note,) = verdict.findings
    assert (note.level, note.what) == ("note", "it has no checksums, so damage to the tensors' bytes cannot be seen")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_what_we_write_is_sound(sound: Path, suffix: str) -> None:
    """Of each of our writers."""
    target = sound.with_name("out" + suffix)
    convert(sound, target, map_location="cuda:1")
    assert verify(target).ok


# All findings, and not the first


def test_all_damaged_records_are_listed(sound: Path) -> None:
    """Two storages and a small record."""
    data = sound.read_bytes()
    for name in ("model/data/1", "model/data/3", "model/version"):
        data = flipped(data, data_of(data, name))
    verdict = verify(written(sound, data))
    assert [line.split(": ")[2] for line in lines_of(verdict)] == ["version", "data/1", "data/3"]
    assert not verdict.ok
    first = verdict.findings[1]
    crc32 = zlib.crc32(STATE["w1"].numpy().tobytes())
    assert (first.where, first.expected) == (f"{sound}: data/1", f"{crc32:08x}")


def test_headers_that_disagree_hide_no_checksum(sound: Path) -> None:
    """Two members with wrong local headers, a third with wrong bytes."""
    data = sound.read_bytes()
    for name, field in (("model/data/0", 6), ("model/data/2", 8)):  # flags, method
        at = local_header(data, name) + field
        data = patched(data, at, "<H", 1 if field == 6 else 8)
    data = flipped(data, data_of(data, "model/data/1"))
    lines = lines_of(verify(written(sound, data)))
    assert len(lines) == 3
    assert "the headers of 'model/data/0' disagree" in lines[0]
    assert "the headers of 'model/data/2' disagree" in lines[1]
    assert "data/1" in lines[2]


def test_a_member_without_a_header_is_said_once(sound: Path) -> None:
    """What its absence would lead to is no finding of its own."""
    data = sound.read_bytes()
    at = local_header(data, "model/data/2")
    lines = lines_of(verify(written(sound, flipped(data, at))))
    assert len(lines) == 1
    assert "'model/data/2' has no local header" in lines[0]


def test_a_broken_pickle_hides_no_damage(sound: Path) -> None:
    """The pickle's checksum, what is wrong in it, and the damage to a storage."""
    data = sound.read_bytes()
    data = patched(data, data_of(data, "model/data.pkl") + 2, "<B", 0xFF)
    lines = lines_of(verify(written(sound, flipped(data, data_of(data, "model/data/3")))))
    assert [
        ("data.pkl: the record is damaged" in line, "no such pickle opcode" in line, "data/3" in line) for line in lines
    ] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_all_wrong_storages_and_tensors_are_listed(tmp_path: Path) -> None:
    """Tensors out of bounds, a storage that is not there, one of another size."""
    pickle = dict_of(
        text("a"),
        tensor(shape=(5,)),
        text("b"),
        tensor(offset=1),
        text("c"),
        tensor(storage("7")),
        text("d"),
        tensor(storage("1", integer(9))),
        text("e"),
        tensor(),
    )
    path = written(tmp_path / "m.pt", torch_zip_of(pickle, {"data/0": bytes(16), "data/1": bytes(16)}))
    lines = [line.removeprefix(f"damaged: {path}: data.pkl: ") for line in lines_of(verify(path))]
    assert [line.split(" (")[0] for line in lines] == [
        "the file has no such storage",
        "storage 1 has another size than its record",
        "at a: a tensor reaches outside its storage",
        "at b: a tensor reaches outside its storage",
    ]


def test_all_wrong_tensors_of_a_safetensors_header_are_listed(tmp_path: Path) -> None:
    """An unknown dtype and a wrong size; where all are known, each hole."""
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

    def file_of(**entries: dict[str, Any]) -> Path:
        header = json.dumps(entries).encode()
        return written(tmp_path / "m.safetensors", struct.pack("<Q", len(header)) + header + bytes(40))

    wrong = verify(file_of(a=good, b=good | {"dtype": "F31"}, c=good | {"shape": [3]}))
    assert ["'b' has an unknown dtype" in lines_of(wrong)[0], "'c' has more or fewer bytes" in lines_of(wrong)[1]] == [
        True,
        True,
    ]
    holes = lines_of(verify(file_of(a=good, b=good | {"data_offsets": [16, 24]}, c=good | {"data_offsets": [20, 28]})))
    assert [
        "hole or an overlap at 'b'" in holes[0],
        "hole or an overlap at 'c'" in holes[1],
        "12 bytes follow" in holes[2],
    ] == [True] * 3


@pytest.mark.parametrize("safe", [True, False])
def test_all_that_is_wrong_with_a_set_is_listed(tmp_path: Path, safe: bool) -> None:
    """A shard that is missing, one that is damaged, a name that the index has elsewhere."""
    folder = tmp_path / "set"
    folder.mkdir()
    save_torch_state_dict(
        {f"w{i}": torch.arange(50.0) for i in range(8)}, folder, max_shard_size=450, safe_serialization=safe
    )
    assert verify(folder).ok
    index = next(folder.glob("*.json"))
    shards = sorted({*json.loads(index.read_text())["weight_map"].values()})
    assert len(shards) == 4
    (folder / shards[0]).unlink()
    damaged = (folder / shards[1]).read_bytes()
    (folder / shards[1]).write_bytes(damaged[:-1])
    index.write_text(index.read_text().replace('"w7"', '"w9"'))
    lines = lines_of(verify(folder))
    assert "1 of 4 shards is missing" in lines[0]
    assert shards[1] in lines[1]
    assert "1 tensor stands in no shard, but in the index: 'w9'" in lines[2]
    assert "1 tensor stands in a shard, but not in the index: 'w7'" in lines[3]
    assert len(lines) == 4


def test_shards_without_an_index(tmp_path: Path) -> None:
    """One is missing, another damaged."""
    save_torch_state_dict(
        {f"w{i}": torch.arange(50.0) for i in range(8)}, tmp_path, max_shard_size=450, safe_serialization=False
    )
    next(tmp_path.glob("*.json")).unlink()
    shards = sorted(tmp_path.iterdir())
    shards[0].unlink()
    data = shards[2].read_bytes()
    shards[2].write_bytes(
        flipped(
            data,
            data_of(
                data, next(name for name in ("archive/data/0", f"{shards[2].stem}/data/0") if name.encode() in data)
            ),
        )
    )
    lines = lines_of(verify(tmp_path))
    assert ["1 of 4 shards is missing" in lines[0], "checksum is wrong" in lines[1]] == [True, True]
    assert len(lines) == 2


def test_all_damaged_chunks_of_a_run_are_listed(ranks: Path, tmp_path: Path) -> None:
    """Every storage that four processes wrote is compared with its checksum, those of files that look alike too."""
    folder = tmp_path / "dcp"
    shutil.copytree(ranks / "rows", folder)
    whole = verify(folder)
    assert whole.ok
    chunk = sorted(folder.glob("*.distcp"))[0]
    data = bytearray(chunk.read_bytes())
    ends = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x05\x06"]
    assert len(ends) > 1
    starts = [0, *(end + 22 for end in ends[:-1])]
    for start in starts:
        data[_storage_at(data, start)] ^= 1
    chunk.write_bytes(data)
    lines = lines_of(verify(folder))
    assert len([line for line in lines if "checksum is wrong" in line]) == len(starts)


def _storage_at(data: bytearray, start: int) -> int:
    """The first byte of the storage in the file of torch that begins at START."""
    at = data.index(b"/data/0", start)
    header = data.rindex(b"PK\x03\x04", start, at)
    name, extra = struct.unpack_from("<HH", data, header + 26)
    return header + 30 + name + extra


def test_a_damaged_item_of_a_run_hides_no_other(ranks: Path, tmp_path: Path) -> None:
    """A missing file is one finding, and the items in the others are still looked at."""
    folder = tmp_path / "dcp"
    shutil.copytree(ranks / "rows", folder)
    first, *_, last = sorted(folder.glob("*.distcp"))
    data = bytearray(last.read_bytes())
    data[_storage_at(data, 0)] ^= 1
    last.write_bytes(data)
    first.unlink()
    lines = lines_of(verify(folder))
    assert any("file" in line and first.name in line for line in lines)
    assert any(last.name in line and "checksum is wrong" in line for line in lines)


def test_a_run_that_is_damaged_needs_no_code(ranks: Path, tmp_path: Path) -> None:
    """What its metadata names is torch's own, whether a chunk is damaged or not;
    bytes that belong to nothing are noted.
    """
    folder = tmp_path / "dcp"
    shutil.copytree(ranks / "rows", folder)
    assert not verify(folder).findings
    first, *_, last = sorted(folder.glob("*.distcp"))
    first.write_bytes(first.read_bytes() + b"more bytes")
    (note,) = verify(folder).findings
    assert (note.level, note.what) == ("note", f"{first.name}, 10 bytes: nothing is stored in that much of it")
    last.write_bytes(last.read_bytes()[:-1])
    assert {finding.level for finding in verify(folder).findings} == {"damaged", "note"}


def test_deflated_records_are_inflated(tmp_path: Path) -> None:
    """A stream that is damaged, and one that is longer than its record says."""
    import io
    import zipfile

    plain = saved({"w": torch.zeros(1000)})
    names = zipfile.ZipFile(io.BytesIO(plain))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name in names.namelist():
            made.writestr(name, names.read(name))
    path = written(tmp_path / "m.pt", file.getvalue())
    assert verify(path).ok
    data = file.getvalue()
    at = data_of(data, "archive/data/0")
    assert "deflated record" in lines_of(verify(written(path, patched(data, at, "<B", 0x07))))[0]


def test_lines_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot fill the screen, and is not sound because nobody counts on."""
    from dataclasses import replace

    from ckptconv.byteranges import fault_sink

    monkeypatch.setattr(fault_sink, "LIMITS", replace(LIMITS, findings=2))
    items = [part for i in range(5) for part in (text(str(i)), tensor(shape=(5,)))]
    path = written(tmp_path / "m.pt", torch_zip_of(dict_of(*items)))
    verdict = verify(path)
    assert (len(verdict.findings), verdict.more) == (2, 3)
    result = run(path)
    assert (result.exit_code, result.output.splitlines()[-1]) == (
        1,
        f"failed: {path}: 2 damaged, 3 more that are not listed",
    )


# Reading


@pytest.mark.parametrize("fast", [True, False])
def test_large_records_are_summed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Several pieces give the checksum of the whole, with zlib and with what is faster."""
    from ckptconv.byteranges import checksums
    from ckptconv.inspection import verification

    if fast:
        fast_crc32 = pytest.importorskip("zlib_ng.zlib_ng").crc32
    monkeypatch.setattr(checksums, "checksum", fast_crc32 if fast else zlib.crc32)
    monkeypatch.setattr(verification, "_PIECE", 1000)
    torch.save({"w": torch.randn(5000)}, tmp_path / "m.pt")
    assert verify(tmp_path / "m.pt").ok
    data = (tmp_path / "m.pt").read_bytes()
    assert len(lines_of(verify(written(tmp_path / "bad.pt", flipped(data, data_of(data, "m/data/0") + 12_345))))) == 1


def test_without_the_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib's own is taken."""
    import importlib

    from ckptconv.byteranges import checksums

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zlib_ng", None)
        patch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
        assert importlib.reload(checksums).checksum is zlib.crc32
    importlib.reload(checksums)


def test_what_cannot_be_read_is_a_finding(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector under one storage: the others are still compared."""
    data = sound.read_bytes()
    bad, damaged = data_of(data, "model/data/1"), data_of(data, "model/data/3")
    sound.write_bytes(flipped(data, damaged))
    real = os.preadv

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    lines = lines_of(verify(sound))
    assert ["Input/output error" in lines[0], "data/3" in lines[1]] == [True, True]
    assert len(lines) == 2


def test_a_file_that_changes_meanwhile(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared may not be what is there."""
    from ckptconv.inspection import verification

    def check(*args: object) -> None:
        with sound.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(verification, "_check_records", check)
    assert "changed while it was read" in lines_of(verify(sound))[0]


def test_sha256(sound: Path) -> None:
    """That of the whole file, in digits of either case; others than it are damage, and what is none a usage error."""
    right = hashlib.sha256(sound.read_bytes()).hexdigest()
    assert verify(sound, expect_sha256=right.upper()).ok
    (finding,) = verify(sound, expect_sha256="0" * 64).findings
    assert (finding.level, finding.expected, finding.got) == ("damaged", "0" * 64, right)
    for wrong in ("", "0" * 63, "x" * 64):
        with pytest.raises(UsageError, match="no SHA-256"):
            verify(sound, expect_sha256=wrong)
    assert run(sound, sound, "--expect-sha256", right).exit_code == 2
    assert run(sound.parent, "--expect-sha256", right).exit_code == 2
    assert run(sound, "--expect-sha256", right).exit_code == 0


def test_progress(sound: Path) -> None:
    """All bytes that are compared are counted."""
    from contextlib import contextmanager

    sizes: list[int] = []
    counts: list[int] = []

    @contextmanager
    def progress(size: int) -> Any:
        sizes.append(size)
        yield counts.append

    verdict = verify(sound, progress=progress)
    assert sizes == [verdict.nbytes] == [sum(counts)]


# What is said


class Custom:
    """What torch's safe loader does not know."""


def test_needs_code(tmp_path: Path) -> None:
    """Is listed with its path, and not ok where one is strict."""
    torch.save({"args": {"x": Custom()}}, tmp_path / "m.pt")
    verdict = verify(tmp_path / "m.pt")
    (finding,) = verdict.findings
    assert (verdict.ok, finding.level) == (True, "needs code")
    assert "args/x" in str(finding) and f"{__name__}.Custom" in str(finding)
    assert not verify(tmp_path / "m.pt", strict=True).ok
    assert [run(tmp_path / "m.pt").exit_code, run(tmp_path / "m.pt", "--strict").exit_code] == [0, 1]


def test_dangerous(tmp_path: Path) -> None:
    """Is not ok."""
    path = written(tmp_path / "m.pt", torch_zip_of(dict_of(text("a"), b"cos\nsystem\n(" + text("true") + b"tR"), {}))
    verdict = verify(path)
    assert (verdict.ok, [finding.level for finding in verdict.findings]) == (False, ["dangerous"])
    assert "os.system" in str(verdict.findings[0]) and "at a" in str(verdict.findings[0])
    assert run(path).exit_code == 1


@pytest.mark.parametrize("container", ["zip", "legacy", "pickle"])
def test_what_is_damaged_can_be_dangerous(tmp_path: Path, container: str) -> None:
    """A call before the place at which the pickle breaks runs when the file is loaded,
    so it is listed, with what is damaged.
    """
    bad = dict_of(text("a"), b"cos\nsystem\n(" + text("true") + b"tR", text("b"), b"\xff")
    data = {"zip": torch_zip_of(bad), "legacy": legacy_start() + bad, "pickle": bad}[container]
    verdict = verify(written(tmp_path / "m.pt", data))
    levels = [finding.level for finding in verdict.findings]
    assert levels == ["damaged", "dangerous"]
    assert "os.system" in str(verdict.findings[1])
    assert verdict.safety == "dangerous"


def test_a_dangerous_pickle_without_tensors(tmp_path: Path) -> None:
    """Is no checkpoint, and dangerous nevertheless."""
    verdict = verify(written(tmp_path / "m.pkl", b"cos\nsystem\n(S'true'\ntR."))
    assert ([finding.level for finding in verdict.findings], verdict.safety) == (["dangerous"], "dangerous")


def test_what_this_version_does_not_read(tmp_path: Path) -> None:
    """Is not called sound."""
    path = written(tmp_path / "m.gguf", b"GGUF" + bytes(100))
    verdict = verify(path)
    assert (verdict.ok, [finding.level for finding in verdict.findings], verdict.safety) == (False, ["unknown"], None)


def test_nothing_there(tmp_path: Path) -> None:
    """An error, and no verdict."""
    with pytest.raises(InputError, match="No such file"):
        verify(tmp_path / "none.pt")
    result = run(tmp_path / "none.pt", tmp_path)
    assert result.exit_code == 1
    said = json.loads(run(tmp_path / "none.pt", "--json").output)
    assert (said["ok"], said["path"]) == (False, str(tmp_path / "none.pt")) and "No such file" in said["error"]


def test_an_empty_path(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not the folder that we are in: a variable of a shell that is not set would be called sound."""
    monkeypatch.chdir(sound.parent)
    assert run("").exit_code == 1


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda path: torch.save(STATE, path),
            "ok: m.pt: torch zip, 10 checksums right (624 B), loads with weights_only=True",
        ),
        (lambda path: torch.save(Custom(), path), "ok: m.pt: torch zip, 6 checksums right (119 B), needs code"),
        (
            lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
            "ok: m.pt: torch legacy, no checksums, loads with weights_only=True",
        ),
    ],
    ids=["zip", "code", "legacy"],
)
def test_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], None], line: str) -> None:
    """Says what it is, what was compared, and what loading it takes."""
    monkeypatch.chdir(tmp_path)
    make("m.pt")
    last = run("m.pt").output.splitlines()[-1]
    without_size = last.replace(last[last.find(" (") : last.find(")") + 1], "") if " (" in last else last
    expected = line.replace(line[line.find(" (") : line.find(")") + 1], "") if " (" in line else line
    assert without_size == expected


def test_json_and_quiet_and_verbose(sound: Path) -> None:
    """One object for each path; nothing where nothing is wrong; notes."""
    bad = written(sound.with_name("bad.pt"), flipped(sound.read_bytes(), data_of(sound.read_bytes(), "model/data/0")))
    result = run(sound, bad, "--json")
    first, second = map(json.loads, result.output.splitlines())
    assert (result.exit_code, first["ok"], second["ok"]) == (1, True, False)
    assert second["findings"][0]["level"] == "damaged" and second["findings"][0]["where"] == f"{bad}: data/0"
    assert first["schema_version"] == 1
    assert run(sound, "-q").output == ""
    assert len(run(sound, bad, "-q").output.splitlines()) == 2
    save_file(STATE, sound.with_name("m.safetensors"))
    assert len(run(sound.with_name("m.safetensors")).output.splitlines()) == 1
    assert len(run(sound.with_name("m.safetensors"), "-v").output.splitlines()) == 2


def test_a_folder_is_all_checkpoints_in_it(sound: Path) -> None:
    """And one that cannot be opened stops no other."""
    inner = sound.parent / "run"
    (inner / "set").mkdir(parents=True)
    save_torch_state_dict({f"w{i}": torch.arange(50.0) for i in range(4)}, inner / "set", max_shard_size=450)
    torch.save(STATE, inner / "a.pt")
    (inner / "b.pt").symlink_to("nowhere")
    (inner / "notes.txt").write_text("no checkpoint")
    result = run(sound.parent)
    assert result.exit_code == 1
    said = [line for line in result.output.splitlines() if line.startswith(("ok", "failed"))]
    assert [Path(line.split(": ")[1]).name for line in said] == ["model.pt", "a.pt", "model.safetensors.index.json"]
    (inner / "b.pt").unlink()
    result = run(sound.parent)
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "3 checkpoints: 3 ok, 0 failed")


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    """Is an error: nobody wants to hear that nothing is wrong with nothing."""
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert run(tmp_path).exit_code == 1


@pytest.mark.parametrize("version", [None, b"", b"three\n"])
def test_a_zip_without_a_version(tmp_path: Path, version: bytes | None) -> None:
    """Is one that torch does not read either."""
    path = written(
        tmp_path / "m.pt", zip_of({"m/data.pkl": b"\x80\x02N."} | ({} if version is None else {"m/version": version}))
    )
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    assert "says no version" in lines_of(verify(path))[0]
    with pytest.raises(InputError, match="says no version"):
        convert(path, tmp_path / "out.pt")


def test_a_damaged_plain_pickle_is_not_dangerous(tmp_path: Path) -> None:
    """The call by which torch says each storage there is what every such file has."""
    bytes_of = saved(torch.arange(4.0)._typed_storage())
    bytes_of = flipped(bytes_of, bytes_of.index(torch.arange(4.0).numpy().tobytes()))
    loaded = b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(bytes_of)) + bytes_of + b"tR"
    path = written(tmp_path / "m.pkl", dict_of(text("w"), tensor(loaded), protocol=4))
    assert [finding.level for finding in verify(path).findings] == ["damaged"]
