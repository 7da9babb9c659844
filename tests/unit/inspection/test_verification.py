"""``verify``: every fault is found, not only the first one, and undamaged files pass."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file

from ckptconv import InputError, UsageError, Verdict, convert, verify
from ckptconv.byteranges import checksums, fault_sink, record_checks
from ckptconv.inspection import verification
from ckptconv.limits import LIMITS
from ckptconv.render.verdict import verdict_lines
from tests.support.archives import rezipped
from tests.support.command import Command
from tests.support.conversions import saved_at
from tests.support.hostile_bytes import (
    data_of,
    dict_of,
    flipped,
    in_header,
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
from tests.support.reduced import Reduced
from tests.support.writers import distributed, sharded

TORCH = ".".join(torch.__version__.split(".")[:2])
STATE = {f"w{i}": torch.arange(12.0).reshape(3, 4) + i for i in range(4)}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """Return a checkpoint of four tensors that torch has saved."""
    return saved_at(tmp_path / "model.pt", STATE)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def damaged(path: Path, *names: str) -> Path:
    """Flip a bit in each of the records `names` of the file at `path`, and return `path`."""
    data = path.read_bytes()
    for name in names:
        data = flipped(data, data_of(data, name))
    return written(path, data)


def lines_of(verdict: Verdict) -> list[str]:
    """Return the findings of the levels 'damaged' and 'not checked' as lines."""
    return [str(finding) for finding in verdict.findings if finding.level in ("damaged", "not checked")]


def levels_of(verdict: Verdict) -> list[str]:
    return [finding.level for finding in verdict.findings]


def assert_said(lines: list[str], *words: str) -> None:
    """Check that each of the `lines` contains the text at the same position in `words`, and that there are no other
    lines.
    """
    assert [word if word in line else line for word, line in zip(words, lines, strict=True)] == [*words]


def legacy_start() -> bytes:
    """Return the bytes before the object in a file from before torch 1.6."""
    data = saved(0, _use_new_zipfile_serialization=False)
    return data[: data.index(b"\x80\x02K\0.")]


@pytest.fixture
def run(command: Command) -> Command:
    """Return a function that runs ``ckptconv verify`` with the given arguments."""
    return command.of("verify")


# Undamaged files


RECORDS = (
    "data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "data/1", "data/2", "data/3", "version",
    ".data/serialization_id",
)  # a table  # fmt: skip


def test_every_record_is_compared(sound: Path) -> None:
    """Every record of a zip is compared with its checksum."""
    verdict = verify(sound)
    assert (verdict.ok, verdict.format, verdict.findings) == (True, "torch zip", ())
    assert (verdict.safety, verdict.checked) == ("loads with weights_only=True", len(RECORDS))
    data = sound.read_bytes()
    for name in RECORDS:
        bad = verify(damaged(written(sound, data), f"model/{name}"))
        assert not bad.ok
        assert any(name in line and "checksum is wrong" in line for line in lines_of(bad)), bad


def test_a_sound_safetensors_file(tmp_path: Path) -> None:
    """A safetensors file passes. A note reports that it has no checksums."""
    save_file(STATE, tmp_path / "m.safetensors")
    verdict = verify(tmp_path / "m.safetensors")
    assert (verdict.ok, verdict.checked) == (True, 0)
    (note,) = verdict.findings
    assert (note.level, note.what) == ("note", "it has no checksums, so damage to tensor data cannot be detected")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_output_of_conversions_passes(sound: Path, suffix: str) -> None:
    """The output of a conversion passes."""
    target = sound.with_name("out" + suffix)
    convert(sound, target, map_location="cuda:1")
    assert verify(target).ok


# All findings, not only the first one


def test_all_damaged_records_are_listed(sound: Path) -> None:
    """All damaged records are listed, storages and small records."""
    verdict = verify(damaged(sound, "model/data/1", "model/data/3", "model/version"))
    assert [line.split(": ")[2] for line in lines_of(verdict)] == ["version", "data/1", "data/3"]
    assert not verdict.ok
    first = verdict.findings[1]
    crc32 = zlib.crc32(STATE["w1"].numpy().tobytes())
    assert (first.where, first.expected) == (f"{sound}: data/1", f"{crc32:08x}")


def test_headers_that_disagree_hide_no_checksum(sound: Path) -> None:
    """Members with wrong local headers are reported, together with the wrong checksum of another member."""
    data = damaged(sound, "model/data/1").read_bytes()
    data = in_header(data, "local", "model/data/0", "flags", 1)
    data = in_header(data, "local", "model/data/2", "method", 8)
    assert_said(
        lines_of(verify(written(sound, data))),
        "the headers of 'model/data/0' disagree",
        "the headers of 'model/data/2' disagree",
        "data/1",
    )


def test_a_member_without_a_header_is_reported_once(sound: Path) -> None:
    """A member without a local header gives one finding, and no findings about the consequences."""
    data = sound.read_bytes()
    without = flipped(data, local_header(data, "model/data/2"))
    assert_said(lines_of(verify(written(sound, without))), "'model/data/2' has no local header")


def test_a_broken_pickle_hides_no_damage(sound: Path) -> None:
    """The findings are the wrong checksum of the pickle, its unknown opcode, and the damage to a storage."""
    data = damaged(sound, "model/data/3").read_bytes()
    data = patched(data, data_of(data, "model/data.pkl") + 2, "<B", 0xFF)
    lines = lines_of(verify(written(sound, data)))
    assert_said(lines, "data.pkl: the record is damaged", "unknown pickle opcode", "data/3")


def test_all_wrong_storages_and_tensors_are_listed(tmp_path: Path) -> None:
    """Each tensor that exceeds its storage, a missing storage, and a storage of another size are listed."""
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
        "storage 1 has a different size from its record",
        "at a: a tensor reaches outside its storage",
        "at b: a tensor reaches outside its storage",
    ]


def test_all_wrong_tensors_of_a_safetensors_header_are_listed(tmp_path: Path) -> None:
    """Each tensor with an unknown dtype or a wrong size is listed. If there are none, each hole or overlap is
    listed.
    """
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}

    def file_of(**entries: dict[str, Any]) -> Path:
        header = json.dumps(entries).encode()
        return written(tmp_path / "m.safetensors", struct.pack("<Q", len(header)) + header + bytes(40))

    wrong = verify(file_of(a=good, b=good | {"dtype": "F31"}, c=good | {"shape": [3]}))
    assert_said([*map(str, wrong.findings[:2])], "unknown: ", "damaged: ")
    assert_said([*map(str, wrong.findings[:2])], "'b' has an unknown dtype", "'c' has a number of bytes")
    holes = verify(file_of(a=good, b=good | {"data_offsets": [16, 24]}, c=good | {"data_offsets": [20, 28]}))
    assert_said(lines_of(holes), "hole or an overlap at 'b'", "hole or an overlap at 'c'", "12 bytes after")


def a_set(folder: Path, *, safe: bool) -> tuple[Path, list[Path]]:
    """Write a set of four shards to `folder`, and return its index and the shards."""
    state = {f"w{i}": torch.arange(50.0) for i in range(8)}
    save_torch_state_dict(state, folder, max_shard_size=450, safe_serialization=safe)
    assert verify(folder).ok
    (index,) = folder.glob("*.json")
    shards = sorted({*folder.iterdir()} - {index})
    assert len(shards) == 4
    return index, shards


@pytest.mark.parametrize("safe", [True, False])
def test_all_that_is_wrong_with_a_set_is_listed(tmp_path: Path, safe: bool) -> None:
    """A missing shard, a damaged one, and a name that differs from the index are all listed."""
    index, shards = a_set(tmp_path, safe=safe)
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    index.write_text(index.read_text().replace('"w7"', '"w9"'))
    assert_said(
        lines_of(verify(tmp_path)),
        "1 of 4 shards is missing",
        shards[1].name,
        "1 tensor is in no shard, but in the index: 'w9'",
        "1 tensor is in a shard, but not in the index: 'w7'",
    )


def test_shards_without_an_index(tmp_path: Path) -> None:
    """Without an index, a missing shard and a damaged one are listed."""
    index, shards = a_set(tmp_path, safe=False)
    index.unlink()
    shards[0].unlink()
    with zipfile.ZipFile(shards[2]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data/0"))
    damaged(shards[2], name)
    assert_said(lines_of(verify(tmp_path)), "1 of 4 shards is missing", "checksum is wrong")


@pytest.fixture
def chunks(ranks: Path, tmp_path: Path) -> list[Path]:
    """Return the files of chunks that four processes wrote, in a folder of their own."""
    shutil.copytree(ranks / "rows", tmp_path / "dcp")
    assert not verify(tmp_path / "dcp").findings
    return sorted((tmp_path / "dcp").glob("*.distcp"))


def test_all_damaged_chunks_of_a_run_are_listed(chunks: list[Path]) -> None:
    """Every storage that four processes wrote is compared with its checksum, also in files that look alike."""
    data = chunks[0].read_bytes()
    ends = [match.end() + 18 for match in re.finditer(b"PK\x05\x06", data)]
    assert len(ends) > 1
    for start in (0, *ends[:-1]):
        data = flipped(data, _storage_at(data, start))
    chunks[0].write_bytes(data)
    lines = lines_of(verify(chunks[0].parent))
    assert len([line for line in lines if "checksum is wrong" in line]) == len(ends)


def _storage_at(data: bytes, start: int) -> int:
    """Return the position of the storage in torch's file that begins at `start` in `data`."""
    at = data.index(b"/data/0", start)
    header = data.rindex(b"PK\x03\x04", start, at)
    name, extra = struct.unpack_from("<HH", data, header + 26)
    return header + 30 + name + extra


def test_a_damaged_item_of_a_run_hides_no_other(chunks: list[Path]) -> None:
    """A missing file is one finding. The items in the other files are still checked."""
    first, *_, last = chunks
    data = last.read_bytes()
    last.write_bytes(flipped(data, _storage_at(data, 0)))
    first.unlink()
    lines = lines_of(verify(first.parent))
    assert any("file" in line and first.name in line for line in lines)
    assert any(last.name in line and "checksum is wrong" in line for line in lines)


def test_a_run_that_is_damaged_needs_no_code(chunks: list[Path]) -> None:
    """A folder of chunks has no finding about code, whether a chunk is damaged or not, because its metadata uses only
    classes of torch. Bytes that belong to no item are noted.
    """
    first, *_, last = chunks
    first.write_bytes(first.read_bytes() + b"more bytes")
    (note,) = verify(first.parent).findings
    assert (note.level, note.what) == ("note", f"{first.name}, 10 B: nothing is stored there")
    last.write_bytes(last.read_bytes()[:-1])
    assert set(levels_of(verify(first.parent))) == {"damaged", "note"}


def test_deflated_records_are_inflated(tmp_path: Path) -> None:
    """A damaged deflate stream is reported."""
    data = rezipped(saved({"w": torch.zeros(1000)}), method=zipfile.ZIP_DEFLATED)
    path = written(tmp_path / "m.pt", data)
    assert verify(path).ok
    bad = patched(data, data_of(data, "archive/data/0"), "<B", 0x07)
    assert "deflated record" in lines_of(verify(written(path, bad)))[0]


def test_lines_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    """Findings beyond the limit are counted but not listed, and the file fails."""
    monkeypatch.setattr(fault_sink, "LIMITS", replace(LIMITS, findings=2))
    items = [part for i in range(5) for part in (text(str(i)), tensor(shape=(5,)))]
    path = written(tmp_path / "m.pt", torch_zip_of(dict_of(*items)))
    verdict = verify(path)
    assert (len(verdict.findings), verdict.more) == (2, 3)
    last = f"failed: {path}: damaged (2 findings), 3 more findings not listed"
    assert run(path, status=1).out.splitlines()[-1] == last


# Reading


@pytest.mark.parametrize("fast", [True, False])
def test_large_records_are_summed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """The checksum of several pieces is that of the complete record, with zlib and with the faster library."""
    crc32 = pytest.importorskip("zlib_ng.zlib_ng").crc32 if fast else zlib.crc32
    monkeypatch.setattr(checksums, "crc32_for_much", lambda: crc32)
    monkeypatch.setattr(checksums, "_WORTH_FASTER", 1)
    monkeypatch.setattr(record_checks, "_PIECE", 1000)
    data = saved({"w": torch.randn(5000)})
    assert verify(written(tmp_path / "m.pt", data)).ok
    bad = flipped(data, data_of(data, "archive/data/0") + 12_345)
    assert len(lines_of(verify(written(tmp_path / "bad.pt", bad)))) == 1


def test_without_the_faster_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the faster library, zlib is used."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zlib_ng", None)
        patch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
        checksums.crc32_for_much.cache_clear()
        assert checksums.crc32_for_much() is zlib.crc32
    checksums.crc32_for_much.cache_clear()


def test_unreadable_data_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that cannot be read is a finding. The other storages are still compared."""
    sound = saved_at(tmp_path / "model.pt", {str(i): torch.ones(2000) for i in range(4)})
    bad, real = data_of(sound.read_bytes(), "model/data/1"), os.preadv
    damaged(sound, "model/data/3")

    def preadv(fd: int, buffers: list[Any], offset: int) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert_said(lines_of(verify(sound)), "Input/output error", "data/3")


def test_a_file_that_changes_meanwhile(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes while it is checked is reported."""

    def check(*args: object) -> None:
        with sound.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(verification, "check_records", check)
    assert "changed while it was read" in lines_of(verify(sound))[0]


def test_sha256(sound: Path, run: Command) -> None:
    """The SHA-256 of the complete file is accepted in lower and upper case. Another value is damage. An invalid value,
    and a value for several paths, are usage errors.
    """
    right = hashlib.sha256(sound.read_bytes()).hexdigest()
    assert verify(sound, expect_sha256=right.upper()).ok
    (finding,) = verify(sound, expect_sha256="0" * 64).findings
    assert (finding.level, finding.expected, finding.got) == ("damaged", "0" * 64, right)
    for wrong in ("", "0" * 63, "x" * 64):
        with pytest.raises(UsageError, match="not a SHA-256"):
            verify(sound, expect_sha256=wrong)
    run(sound, sound, "--expect-sha256", right, status=2)
    run(sound.parent, "--expect-sha256", right, status=2)
    run(sound, "--expect-sha256", right)


def test_progress(sound: Path) -> None:
    """The progress function receives the number of all bytes that are compared."""
    sizes: list[int] = []
    counts: list[int] = []

    @contextmanager
    def progress(size: int) -> Any:
        sizes.append(size)
        yield counts.append

    verdict = verify(sound, progress=progress)
    assert sizes == [verdict.nbytes] == [sum(counts)]


# Output


class Custom:
    """A class that torch's safe loader does not know."""


def test_needs_code(tmp_path: Path, run: Command) -> None:
    """A class that the safe loader refuses is listed with its path. The file fails only with ``--strict``."""
    path = written(tmp_path / "m.pt", saved({"args": {"x": Custom()}}))
    verdict = verify(path)
    assert (verdict.ok, levels_of(verdict)) == (True, ["needs code"])
    assert "args/x" in str(verdict.findings[0]) and f"{__name__}.Custom" in str(verdict.findings[0])
    assert not verify(path, strict=True).ok
    run(path)
    run(path, "--strict", status=1)


#: Functions that write a checkpoint, and the reason why it is not proved to load, or None.
PROVED: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "a zip": (lambda path: torch.save(STATE, path), None),
    "the older format": (lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False), None),
    "safetensors": (lambda path: save_file({"w": torch.ones(2)}, path), None),
    "a set of shards": (lambda path: sharded(path, {"a": torch.ones(2)}, {"b": torch.ones(3)}), None),
    "protocol 4": (lambda path: torch.save({"w": torch.ones(2)}, path, pickle_protocol=4), "opcode MEMOIZE"),
    "a plain pickle": (
        lambda path: path.write_bytes(pickle.dumps({"w": torch.ones(2)})),
        "which torch.load does not read",
    ),
    "a folder of DCP": (lambda path: distributed({"w": torch.ones(2)}, path), "over several files"),
    "a new storage": (
        lambda path: torch.save({"w": torch.ones(2), "s": Reduced(torch.UntypedStorage, (4,))}, path),
        "a new storage",
    ),
}


@pytest.mark.parametrize("kind", PROVED)
def test_strict(kind: str, tmp_path: Path, run: Command) -> None:
    """With ``--strict``, a file with a pickle fails if it is not proved to load with weights_only=True. The finding
    contains the reason and the version whose rules apply. Without ``--strict`` the file passes.
    """
    make, why = PROVED[kind]
    path = tmp_path / "m.pt"
    make(path)
    run(path)
    if why is None:
        said = run(path, "--strict").out
        assert f"by the rules of torch {TORCH}" in said or "contains no code" in said
        return
    run(path, "--strict", status=1, out=("not proved: ", why, f"by the rules of torch {TORCH}"))
    verdict = verify(path, strict=True)
    assert levels_of(verdict)[-1] == "not proved" and "not proved" not in levels_of(verify(path))


CALL = b"cos\nsystem\n(" + text("true") + b"tR"
BROKEN = dict_of(text("a"), CALL, text("b"), b"\xff")


@pytest.mark.parametrize(
    ("data", "levels", "safety"),
    [
        (torch_zip_of(dict_of(text("a"), CALL), {}), ["dangerous"], "dangerous"),
        (torch_zip_of(BROKEN), ["damaged", "dangerous"], "dangerous"),
        (legacy_start() + BROKEN, ["damaged", "dangerous"], "dangerous"),
        (BROKEN, ["damaged", "dangerous"], "dangerous"),
        (b"cos\nsystem\n(S'true'\ntR.", ["dangerous"], "dangerous"),
        (b"GGUF" + bytes(100), ["unknown"], None),
    ],
    ids=["dangerous", "damaged zip", "damaged legacy", "damaged pickle", "pickle without tensors", "not read"],
)
def test_files_that_fail(tmp_path: Path, data: bytes, levels: list[str], safety: str | None, run: Command) -> None:
    """A dangerous call is listed, even if the pickle breaks after it, because it runs when the file is loaded. A file
    in a format that this version does not read fails.
    """
    path = written(tmp_path / "m.pt", data)
    verdict = verify(path)
    assert (verdict.ok, levels_of(verdict), verdict.safety) == (False, levels, safety)
    assert ("os.system" in str(verdict.findings[-1])) == (safety == "dangerous")
    run(path, status=1)


def test_a_danger_has_its_path(tmp_path: Path) -> None:
    """A dangerous call is listed with its path."""
    path = written(tmp_path / "m.pt", torch_zip_of(dict_of(text("a"), CALL), {}))
    assert "at a" in str(verify(path).findings[0])


def test_a_missing_file(tmp_path: Path, run: Command) -> None:
    """A missing file is an error, also in the JSON output."""
    with pytest.raises(InputError, match="No such file"):
        verify(tmp_path / "none.pt")
    run(tmp_path / "none.pt", tmp_path, status=1)
    said = run.json(tmp_path / "none.pt", status=1)
    assert (said["ok"], said["path"]) == (False, str(tmp_path / "none.pt")) and "No such file" in said["error"]


def test_an_empty_path(sound: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    """An empty path is an error, not the current folder. An unset variable of a shell would otherwise pass."""
    monkeypatch.chdir(sound.parent)
    run("", status=1)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda path: torch.save(STATE, path),
            f"ok: m.pt: torch zip, 10 checksums right, loads with weights_only=True by the rules of torch {TORCH}",
        ),
        (
            lambda path: torch.save(Custom(), path),
            "ok: m.pt: torch zip, 6 checksums right, but weights_only=True refuses it",
        ),
        (
            lambda path: torch.save(STATE, path, _use_new_zipfile_serialization=False),
            f"ok: m.pt: torch legacy, no checksums, loads with weights_only=True by the rules of torch {TORCH}",
        ),
    ],
    ids=["zip", "code", "legacy"],
)
def test_the_last_line(here: Path, make: Callable[[str], None], line: str, run: Command) -> None:
    """The last line contains the format, the number of checksums, and the conditions for loading."""
    make("m.pt")
    last = run("m.pt").out.splitlines()[-1]
    without_size = re.sub(r" \([0-9.]+ k?B\)", "", last)
    assert without_size == line


def test_findings_with_the_same_hint_are_above_one_line() -> None:
    """A hint is printed once, below the last of the consecutive findings that share it."""
    what = {"os.system": "do not load it", "nt.system": "do not load it", "data/0": None, "builtins.eval": "look"}
    findings = tuple(verification.Finding("dangerous", name, "a.pt", hint=hint) for name, hint in what.items())
    lines = [*verdict_lines(Verdict("a.pt", "torch zip", "dangerous", 0, 0, findings))]
    assert lines[:-1] == [
        "dangerous: a.pt: os.system",
        "dangerous: a.pt: nt.system",
        "  do not load it",
        "dangerous: a.pt: data/0",
        "dangerous: a.pt: builtins.eval",
        "  look",
    ]


def test_json_and_quiet_and_verbose(sound: Path, run: Command) -> None:
    """``--json`` prints one object for each path, ``-q`` prints nothing for a file that passes, and ``-v`` prints
    notes.
    """
    bad = damaged(Path(shutil.copy(sound, sound.with_name("bad.pt"))), "model/data/0")
    first, second = map(json.loads, run(sound, bad, "--json", status=1).out.splitlines())
    assert (first["schema_version"], first["ok"], second["ok"]) == (1, True, False)
    assert second["findings"][0]["level"] == "damaged" and second["findings"][0]["where"] == f"{bad}: data/0"
    assert run(sound, "-q").out == ""
    _, hint, verdict = run(sound, bad, "-q", status=1).out.splitlines()
    assert hint == "  download or copy it again" and verdict.startswith("failed")
    plain = sound.with_name("m.safetensors")
    save_file(STATE, plain)
    assert len(run(plain).out.splitlines()) == 1
    assert run(plain, "-v").out.splitlines()[1:-1] == ["  --expect-sha256 compares the whole file"]


def test_all_checkpoints_of_a_folder_are_checked(sound: Path, run: Command) -> None:
    """All checkpoints in a folder are checked, also those after one that cannot be opened."""
    inner = sound.parent / "run"
    (inner / "set").mkdir(parents=True)
    save_torch_state_dict({f"w{i}": torch.arange(50.0) for i in range(4)}, inner / "set", max_shard_size=450)
    torch.save(STATE, inner / "a.pt")
    (inner / "b.pt").symlink_to("nowhere")
    (inner / "notes.txt").write_text("no checkpoint")
    said = [line for line in run(sound.parent, status=1).out.splitlines() if line.startswith(("ok", "failed"))]
    assert [Path(line.split(": ")[1]).name for line in said] == ["model.pt", "a.pt", "model.safetensors.index.json"]
    (inner / "b.pt").unlink()
    assert run(sound.parent).out.splitlines()[-1] == "3 checkpoints: 3 ok, 0 failed"


@pytest.mark.parametrize("data", [b"cos\nsystem\n(Vtrue\ntR.", b"\x80\x04cos\nsystem\n)R.", b"\x80\x02N."])
def test_pickles_by_any_name_in_a_folder(sound: Path, run: Command, data: bytes) -> None:
    """Pickles with any name are checked, because a program may load them. Other files are ignored."""
    for name, other in {"merges.txt": b"#version: 0.2\n", "config.json": b"{}", "vocab": b"", "x.npy": b"S."}.items():
        (sound.parent / name).write_bytes(other)
    assert "1 checkpoint" not in run(sound.parent).out
    (sound.parent / "scheduler").write_bytes(data)
    said = run(sound.parent, status=1).out
    assert f"{sound.parent / 'scheduler'}" in said and said.splitlines()[-1] == "2 checkpoints: 1 ok, 1 failed"


def test_a_folder_without_checkpoints(tmp_path: Path, run: Command) -> None:
    """A folder without checkpoints is an error."""
    (tmp_path / "notes.txt").write_text("no checkpoint")
    run(tmp_path, status=1)


@pytest.mark.parametrize("version", [None, b"", b"three\n"])
def test_a_zip_without_a_version(tmp_path: Path, version: bytes | None) -> None:
    """A zip without a valid version fails and cannot be converted, because torch does not read it."""
    records = {"m/data.pkl": b"\x80\x02N."} | ({} if version is None else {"m/version": version})
    path = written(tmp_path / "m.pt", zip_of(records))
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    assert "version, which torch needs" in lines_of(verify(path))[0]
    with pytest.raises(InputError, match="version, which torch needs"):
        convert(path, tmp_path / "out.pt")


def test_a_damaged_plain_pickle_is_not_dangerous(tmp_path: Path) -> None:
    """A damaged plain pickle is not dangerous: every such file contains the call with which torch stores each
    storage.
    """
    bytes_of = saved(torch.arange(4.0)._typed_storage())
    bytes_of = flipped(bytes_of, bytes_of.index(torch.arange(4.0).numpy().tobytes()))
    loaded = b"ctorch.storage\n_load_from_bytes\n(B" + struct.pack("<I", len(bytes_of)) + bytes_of + b"tR"
    path = written(tmp_path / "m.pkl", dict_of(text("w"), tensor(loaded), protocol=4))
    assert levels_of(verify(path)) == ["damaged"]
