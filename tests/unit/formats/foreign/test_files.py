"""Files that are not checkpoints. The error names the kind of the file, the number of missing bytes if it can be
computed, and a next step that works.
"""

from __future__ import annotations

import bz2
import collections
import gzip
import io
import lzma
import os
import pickle
import re
import shlex
import struct
import subprocess
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes

import ckptconv
from ckptconv.cli.main import main
from ckptconv.errors import CkptconvError, InputError, LimitError, MalformedError, UnsupportedError, count
from tests.support import torch_facts
from tests.support.archives import records_of
from tests.support.conversions import read, run_without_torch, unreadable
from tests.support.hostile_bytes import saved, zip_of
from tests.support.memory import memory_below
from tests.support.polyglots import tar_of
from tests.support.reduced import Reduced

OBJECT = {"a": torch.arange(5000.0), "b": torch.arange(700, dtype=torch.uint8), "note": "x", "c": torch.zeros(3)}


def error_of(path: Path, words: str | None = None) -> InputError:
    """Return the error from reading `path`, which is one line that contains `words`."""
    error = unreadable(path, InputError, words)
    assert "\n" not in str(error)
    return error


Make = Callable[..., InputError]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file that a test truncates."""
    return tmp_path / "m.pt"


@pytest.fixture
def say(tmp_path: Path) -> Make:
    """Return a function that writes bytes to a file and returns the error from reading it."""

    def write(data: bytes, name: str = "x.pt") -> InputError:
        (tmp_path / name).write_bytes(data)
        return error_of(tmp_path / name)

    return write


OF_TORCH = saved(OBJECT)


def msgpack_text(text: str) -> bytes:
    return bytes([0xA0 + len(text)]) + text.encode()


def flax_array(shape: int = 3) -> bytes:
    """Return an array as flax writes it: type 1, which contains [shape, dtype, bytes]."""
    data = bytes(4 * shape)
    inner = b"\x93\x91" + bytes([shape]) + msgpack_text("float32") + b"\xc4" + bytes([len(data)]) + data
    return b"\xc7" + bytes([len(inner)]) + b"\x01" + inner


PARAMS = b"\x82" + msgpack_text("step") + b"\x07" + msgpack_text("params") + b"\x81" + msgpack_text("w") + flax_array()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n"
ONNX = b"\x08\x07\x12\x07pytorch\x1a\x032.0\x3a\x05\x0a\x03abc"

#: For each kind of file: its bytes, a pattern of the error, and a part of the hint.
FILES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "the file is empty", "download or copy it again"),
    "pointer": (LFS, "a Git LFS pointer, not the file itself .123,456,789 bytes", "with Git LFS"),
    "pointer without size": (LFS[:60], "a Git LFS pointer, not the file itself", "with Git LFS"),
    "login page": (
        b"<!DOCTYPE html>\n<html><head><title>Sign in\n to X</title>",
        r"an HTML page.*'Sign in to X'",
        "log in",
    ),
    "Drive's warning": (
        b"<html><head><title>Google Drive - Virus scan warning</title>",
        "'Google Drive - Virus scan warning'",
        "download the file",
    ),
    "page without title": (
        b"\xef\xbb\xbf \n<!-- x --><HTML lang=de>",
        "an HTML page, not a checkpoint",
        "download the file",
    ),
    "restricted": (
        b"Access to model meta-llama/Llama-2-7b is restricted and you are not in the authorized list.",
        "a server's answer.*meta-llama/Llama-2-7b is restricted",
        "logged in",
    ),
    "Hub's other answer": (
        b"Invalid username or password.",
        "a server's answer.*Invalid username",
        "download it again",
    ),
    "object store": (
        b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>",
        "a server's answer.*'AccessDenied'",
        "download it again",
    ),
    "JSON error": (b'{"error":"Not Found"}', "a server's answer.*'Not Found'", "download it again"),
    "JSON error in an object": (
        b'{"error":{"code":403,"message":"no quota"}}',
        "a server's answer.*'no quota'",
        "download",
    ),
    "configuration": (
        b'{"architectures": ["X"]}',
        r"a model's configuration, not a checkpoint: '{",
        "file with the weights",
    ),
    "JSON": (b"[1, 2]", r"a JSON file, not a checkpoint: '\[1, 2\]'", "file with the weights"),
    "Python": (
        b"import torch\nx = 1\n" + b"# long" * 99,
        r"a text file, which starts with 'import torch x = 1 # long#.*…'",
        "file with the weights",
    ),
    "text of other letters, cut": (
        ("a" + "é" * 5000).encode(),
        "a text file, which starts with 'aéé",
        "file with the weights",
    ),
    "first bytes of a zip": (b"PK\x03", "a zip archive of which only 3 bytes can be read", "again"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(64), "a GGUF file", "gguf package"),
    "GGML": (b"tjgg\x03\0\0\0" + bytes(64), "a GGML file", "publisher"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file", "h5py"),
    "Flax": (PARAMS, r"a Flax checkpoint \(msgpack\)", "flax.serialization.msgpack_restore"),
    "ONNX": (ONNX, "an ONNX model", "onnx package"),
    "TensorFlow's index": (
        b"\0\0\x02ab" + bytes(40) + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb",
        "the index of a TensorFlow checkpoint",
        "TensorFlow",
    ),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + b"\x01" * 8, "a TensorFlow Lite model", "TensorFlow"),
    "gzip": (gzip.compress(b"x" * 99), "compressed with gzip", "gzip -dc"),
    "gzip of tar": (tar_of({"weights.th": b"x"}, "w:gz"), "a tar archive, compressed with gzip", "tar -xzf"),
    "bzip2": (bz2.compress(b"x"), "compressed with bzip2", "bzip2 -dc"),
    "xz": (lzma.compress(b"x"), "compressed with xz", "xz -dc"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x00\x01", "compressed with zstd", "zstd -dc"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c\0\x04", "compressed with 7-Zip", "7z x"),
    "RAR": (b"Rar!\x1a\x07\x01\0", "compressed with RAR", "unrar x"),
    "zlib": (zlib.compress(pickle.dumps([1])), "a pickle, compressed with zlib", "joblib.load"),
    "ELF": (b"\x7fELF\x02\x01\x01" + bytes(50), "a program or library for Linux", "do not run it"),
    "PE": (b"MZ".ljust(60, b"\x01") + struct.pack("<I", 64) + b"PE\0\0", "a program for Windows", "do not run it"),
    "PNG": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG picture", "file with the weights"),
    "JPEG": (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG picture", "file with the weights"),
    "GIF": (b"GIF89a\x01\0", "a GIF picture", "file with the weights"),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3", "a PDF document", "file with the weights"),
    "Parquet": (b"PAR1\x15\x04\x15", "a Parquet table", "file with the weights"),
    "SQLite": (b"SQLite format 3\0\x10\0", "an SQLite database", "file with the weights"),
    "tar": (tar_of({"./a.txt": b"x" * 600, "sub/model.ckpt": b"y"}), "a tar archive of sub/model.ckpt", "tar -xf"),
    "tar without members": (
        bytes(257) + b"ustar\x0000" + bytes(248),
        "a tar archive, whose first name cannot be read;",
        "tar -xf",
    ),
    "torch 0.1": (
        tar_of({"sys_info": b"1", "pickle": b"2" * 600, "tensors": b"3", "storages": b"4"}),
        r"format from before 0\.1\.10",
        "torch.load",
    ),
    "unknown": (b"\x00\x01\xfe\xff" * 9, r"not a checkpoint that this version can read .*00 01 fe ff", ""),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_of_file_is_named_with_its_next_step(say: Make, kind: str) -> None:
    """Each kind of file is recognized by its content, although its suffix is that of a checkpoint. The hint contains a
    next step.
    """
    data, what, hint = FILES[kind]
    error = say(data)
    assert re.search(what, str(error)), str(error)
    assert hint in (error.hint or "")
    assert type(error) is (MalformedError if kind == "first bytes of a zip" else UnsupportedError)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        # Data files of TensorFlow have no signature, and protocol buffers have no reliable one.
        ("model.ckpt.data-00000-of-00001", b"\x9a\x01\xfe\xff" * 9, "TensorFlow"),
        ("x.pt", b"\x9a\x01\xfe\xff" * 9, "not a checkpoint that this version can read"),
        ("m.onnx", b"\x08\x07\x3a\xff\xfe\x01\x02\x03\x04", "ONNX"),
        ("x.pt", b"\x08\x07\x3a\xff\xfe\x01\x02\x03\x04", "not a checkpoint that this version can read"),
        ("saved_model.pb", b"\x08\x01\x12\xff\xfe\x01\x0a\x03\x04", "SavedModel"),
    ],
)
def test_kinds_that_only_the_name_decides(say: Make, name: str, data: bytes, what: str) -> None:
    """If the content is ambiguous, the name of the file decides."""
    assert what in str(say(data, name))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\xde\x00\x01" + msgpack_text("w") + flax_array(), True),
        (b"\x81\xa1a\x07\xff", False),
        (PARAMS.replace(b"\x01\x93", b"\x05\x93"), False),
        (b"\x81\x01" + flax_array(), False),
    ],
    ids=["a large map", "text to numbers", "another type of array", "a number as a key"],
)
def test_msgpack_is_not_always_flax(say: Make, data: bytes, named: bool) -> None:
    """A msgpack file is described as Flax only if it is a map of texts to arrays."""
    assert ("Flax" in str(say(data))) == named


def test_zeros_are_counted_up_to_a_bound(path: Path) -> None:
    """The zeros at the start of a file are counted up to 64 MiB, so a sparse file of a terabyte is not read
    completely.
    """
    path.touch()
    os.truncate(path, 1 << 40)
    error_of(path, "at least its first 67,108,864 bytes are zeros")


def test_escape_sequences_do_not_reach_the_terminal(say: Make) -> None:
    """The error contains no escape sequences of a text, a title or a JSON message."""
    for data in (b"\x1b[31mred", b"<html><title>\x1b[31mred</title>", b'{"error": "\\u001b[31m"}'):
        assert "\x1b" not in str(say(data))


def test_an_index_of_shards_under_another_name(tmp_path: Path) -> None:
    """An index of shards whose name does not end in ``.json`` is refused. After the rename that the hint suggests, the
    index is read.
    """
    torch.save({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "whole.pt")
    ckptconv.convert(tmp_path / "whole.pt", tmp_path / "set", max_shard_size=300, format="safetensors")
    index = (tmp_path / "set" / "model.safetensors.index.json").rename(tmp_path / "set" / "index")
    error = error_of(index, "the index of a checkpoint in 2 shards, but its name does not end in .json")
    subprocess.run(shlex.split(str(error.hint).removeprefix("rename it: ")), check=True)
    assert len(ckptconv.inspect(tmp_path / "set" / "model.index.json").tensors) == 2


def test_an_index_of_shards_by_its_content(tmp_path: Path) -> None:
    """A ``.json`` file with any name is recognized as an index of shards by its content. The index can be converted to
    one file and to shards.
    """
    torch.save({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "whole.pt")
    ckptconv.convert(tmp_path / "whole.pt", tmp_path / "set", max_shard_size=300, format="safetensors")
    index = (tmp_path / "set" / "model.safetensors.index.json").rename(tmp_path / "set" / "weights.json")
    assert len(ckptconv.inspect(index).tensors) == 2
    ckptconv.convert(index, tmp_path / "again.pt")
    assert ckptconv.diff(tmp_path / "again.pt", tmp_path / "whole.pt").same
    ckptconv.convert(index, tmp_path / "cast", dtype="fp16")
    assert len([*(tmp_path / "cast").glob("*.safetensors")]) == 2


# Zips


ZIPS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "torch 1.0": (
        {"m/model.json": b"{}", "m/code/m.py": b"", "m/tensors/0": b""},
        "a TorchScript archive from torch before 1.3",
        "torch.jit.load",
    ),
    "torch 1.2": (
        {"m/model.json": b"{}", "m/attributes.pkl": b"N."},
        "a TorchScript archive from torch before 1.3",
        "torch 1.13",
    ),
    "pt2": (
        {"m/archive_format": b"pt2", "m/data/weights/w": b""},
        r"a \.pt2 archive",
        "if you trust who made it, for it can run code, save only its weights: python -I -c 'import torch; "
        "torch.save(torch.export.load(",
    ),
    "pt2 of AOTInductor": (
        {"m/archive_format": b"pt2", "m/data/aotinductor/model/x.so": b"", "m/data/weights/weight_0": b""},
        r"a \.pt2 archive of AOTInductor",
        "model that it was compiled from",
    ),
    "pt2 of AOTInductor and its program": (
        {"m/archive_format": b"pt2", "m/data/aotinductor/model/x.so": b"", "m/models/model.json": b"{}"},
        r"a \.pt2 archive",
        "torch.export.load",
    ),
    "older pt2": (
        {"serialized_exported_program.json": b"{}", "version": b"5.1"},
        r"a \.pt2 archive",
        "torch.export.load",
    ),
    "mar": ({"MAR-INF/MANIFEST.json": b"{}", "model.pt": b""}, r"TorchServe model archive", "x.pt model.pt"),
    "mar without a checkpoint": (
        {"MAR-INF/MANIFEST.json": b"{}", "handler.py": b""},
        r"TorchServe model archive",
        "unpack it: unzip",
    ),
    "Stable-Baselines 2": (
        {"data": b"{}", "parameters": b"", "parameter_list": b"[]"},
        "Stable-Baselines 2",
        "x.pt parameters",
    ),
    "Stable-Baselines3": (
        {"data": b"{}", "pytorch_variables.pth": b"", "policy.pth": b"", "policy.optimizer.pth": b""},
        "Stable-Baselines3",
        "x.pt policy.pth",
    ),
    "Keras": ({"metadata.json": b"{}", "config.json": b"{}", "model.weights.h5": b""}, "a Keras model", "Keras"),
    "one checkpoint": (
        {"readme.txt": b"", "run 1/best.ckpt": b""},
        "with a checkpoint in it: run 1/best.ckpt",
        "'run 1/best.ckpt'",
    ),
    "Word": (
        {"[Content_Types].xml": b"", "word/a.xml": b"", "word/b.xml": b"", "c": b""},
        "not of torch: .*word/b.xml and 1 more .*FOLDER/data.pkl",
        "",
    ),
    "Java": ({"META-INF/MANIFEST.MF": b""}, "not of torch: META-INF/MANIFEST.MF", ""),
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("kind", ZIPS)
def test_each_kind_of_zip_is_named_with_its_next_step(say: Make, kind: str, method: int) -> None:
    """Each kind of zip archive is recognized by the names of its members, whether they are compressed or not."""
    members, what, hint = ZIPS[kind]
    error = say(zip_of(members, method))
    assert re.search(what, str(error)), str(error)
    assert hint in (error.hint or "")
    assert isinstance(error, UnsupportedError)


@pytest.mark.parametrize("name", ["../../evil.pt", "-d /.pt", "*.pt", "a\nb.pt"])
def test_unsafe_names_of_members_are_not_in_the_command(say: Make, name: str) -> None:
    """If unzip would take the name of a member for an option, a pattern or a path outside the folder, the suggested
    command unpacks all members.
    """
    error = say(zip_of({name: b""}))
    assert shlex.split(str(error.hint).split(": ")[1])[2:] == []


def run(command: str, folder: Path) -> None:
    """Run the `command` of a message in `folder`. Python programs run in this process, which has imported torch
    already.
    """
    words = shlex.split(command)
    if words[:2] == ["python", "-c"] and len(words) == 3:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.chdir(folder)
            warnings.simplefilter("ignore")
            exec(words[2], {})
    else:
        subprocess.run(command, shell=True, check=True, cwd=folder, capture_output=True)


def follow(path: Path, words: str) -> InputError:
    """Run the command that the error for `path` suggests, and return the error, which contains `words`."""
    error = error_of(path, words)
    run(str(error.hint).split(": ", 1)[1], path.parent)
    return error


def assert_out_is(folder: Path, expected: dict[str, Any]) -> None:
    """Check that ckptconv reads the out.pt in `folder`, and that torch's safe loader returns `expected`."""
    read(folder / "out.pt")
    loaded = torch.load(folder / "out.pt")
    assert list(loaded) == list(expected)
    for key, value in expected.items():
        assert torch.equal(loaded[key], value) if isinstance(value, torch.Tensor) else loaded[key] == value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch_facts.version() < (2, 8), reason="torch gives archives of programs a folder since 2.8")
def test_the_command_for_pt2_works(tmp_path: Path) -> None:
    """The suggested command saves the weights of an archive of torch.export that also contains a record of another
    reader.
    """
    linear = torch.nn.Linear(3, 2)
    torch.export.save(torch.export.export(linear, (torch.zeros(1, 3),)), tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2", "a") as archive:
        archive.writestr("m/data.pkl", b"N.")
    follow(tmp_path / "m.pt2", "a .pt2 archive")
    assert_out_is(tmp_path, linear.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch_facts.version() < (2, 8), reason="torch gives archives of programs a folder since 2.8")
def test_the_command_for_pt2_can_run_code(tmp_path: Path) -> None:
    """``torch.export.load`` runs a pickle in the archive, so the command is suggested only for trusted files."""
    linear = torch.nn.Linear(3, 2)
    torch.export.save(torch.export.export(linear, (torch.zeros(1, 3),)), tmp_path / "good.pt2")
    torch.save({"x": Reduced(exec, (f"open({str(tmp_path / 'ran')!r}, 'w').close()",))}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(tmp_path / "m.pt2", "w") as bad:
        for name in good.namelist():
            is_input = "sample_inputs" in name
            bad.writestr(name, (tmp_path / "x.pt").read_bytes() if is_input else good.read(name))
        bad.writestr("good/data.pkl", b"N.")
    follow(tmp_path / "m.pt2", "a .pt2 archive.*if you trust who made it")
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_commands_for_numpy_work(tmp_path: Path) -> None:
    """The suggested commands convert .npz and .npy files to tensors."""
    numpy.savez(tmp_path / "m.npz", a=numpy.arange(3), b=numpy.ones((2, 2)))
    follow(tmp_path / "m.npz", r"NumPy arrays \(.npz\): a.npy, b.npy")
    assert_out_is(tmp_path, {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.float64)})
    numpy.save(tmp_path / "m.npy", numpy.arange(3))
    follow(tmp_path / "m.npy", r"a NumPy array \(.npy\)")
    assert torch.equal(torch.load(tmp_path / "out.pt"), torch.arange(3))


def test_the_command_for_a_checkpoint_in_a_zip_works(tmp_path: Path) -> None:
    """The suggested command of unzip extracts a checkpoint that can be read."""
    (tmp_path / "m.zip").write_bytes(zip_of({"run 1/best.ckpt": OF_TORCH}))
    follow(tmp_path / "m.zip", "with a checkpoint in it")
    assert len(read(tmp_path / "run 1/best.ckpt").tensors) == 3


def test_the_command_for_records_without_their_folder_works(path: Path, tmp_path: Path) -> None:
    """A zip archive of torch's records without their folder is refused by torch too. The suggested command repairs the
    archive.
    """
    path.write_bytes(zip_of(records_of(OF_TORCH)))
    with pytest.raises(RuntimeError):
        torch.load(path)
    assert isinstance(follow(path, "torch's records without the folder"), MalformedError)
    assert_out_is(tmp_path, OBJECT)


def test_a_zip_with_something_before_it_can_be_freed(tmp_path: Path) -> None:
    """The bytes before a zip archive, for example an HTTP header, are counted, and the suggested command
    removes them.
    """
    (tmp_path / "m.pt").write_bytes(b"\x01\x02HTTP\xff" * 100 + OF_TORCH)
    follow(tmp_path / "m.pt", "a zip archive with 700 bytes before it")
    assert_out_is(tmp_path, OBJECT)


# Truncated zip archives


def missing_of(error: InputError) -> tuple[int, int]:
    """Return the two numbers in "at least N of about M bytes missing", or zeros."""
    found = re.search(r"at least ([\d,]+) of about ([\d,]+) bytes missing", str(error))
    return (int(found[1].replace(",", "")), int(found[2].replace(",", ""))) if found else (0, 0)


def test_missing_bytes_of_a_truncated_zip(path: Path) -> None:
    """Wherever the file is cut, the number of missing bytes is not too large, and not smaller than the number of bytes
    that the storages lack. If the pickle is incomplete, the error contains no number.
    """
    data = OF_TORCH
    infos = zipfile.ZipFile(io.BytesIO(data)).infolist()
    storages = sorted(info.header_offset for info in infos if "/data/" in info.filename)
    nbytes = sum(info.file_size for info in infos if "/data/" in info.filename)
    assert infos[0].filename.endswith("/data.pkl")
    behind = infos[1].header_offset + 10  # the method of the member after the pickle
    path.write_bytes(data)
    counted = 0
    for size in [*range(len(data) - 1, storages[-1], -7), *range(storages[-1], 60, -131), *range(60, 4, -1)]:
        os.truncate(path, size)
        error = error_of(path)
        assert isinstance(error, MalformedError) and "truncated" in str(error), size
        missing, whole = missing_of(error)
        counted += missing > 0
        assert missing <= len(data) - size
        if missing:
            assert whole - missing == size
        if size >= behind:
            assert missing >= nbytes - (size - behind)
        if behind <= size <= storages[0]:
            assert missing >= nbytes
        if size < behind:
            assert not missing
    assert counted > 100


def test_the_bound_is_exact_for_a_zip_without_padding(say: Make) -> None:
    """In an archive without padding, descriptors and other records, the computed size is the size of the file."""
    records = records_of(OF_TORCH)
    data = zip_of({f"m/{name}": records[name] for name in records if re.fullmatch(r"data\.pkl|data/\d+", name)})
    for size in (data.index(b"PK\x03\x04", 1) + 10, len(data) // 2, len(data) - 1):
        assert missing_of(say(data[:size])) == (len(data) - size, len(data))


def test_compressed_storages_are_not_counted(path: Path) -> None:
    """No number is given if the storages are compressed, because a megabyte of zeros takes only a thousand bytes."""
    members = records_of(saved({"a": torch.zeros(300_000), "b": torch.zeros(1000)}))
    for stored in (("data.pkl",), ("data.pkl", "byteorder", ".format_version", ".storage_alignment")):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                method = zipfile.ZIP_STORED if name in stored else zipfile.ZIP_DEFLATED
                archive.writestr(f"m/{name}", data, method)
        size = path.stat().st_size
        for cut in (30, 200, size // 2):
            os.truncate(path, size - cut)
            error = error_of(path, "truncated: the zip archive's end is missing")
            assert missing_of(error) == (0, 0)


def test_a_huge_claim_allocates_nothing(path: Path) -> None:
    """If the pickle of a truncated file claims an exabyte, the error contains this number, and nothing is allocated."""
    data = saved({"a": torch.zeros(5)})
    claim = data.replace(b"K\x05tq", b"\x8a\x08" + (1 << 60).to_bytes(8, "little") + b"tq", 1)
    assert claim != data
    path.write_bytes(claim[:400])
    with memory_below(8 << 20):
        error = error_of(path)
    assert missing_of(error)[1] > 4 << 60


@pytest.mark.parametrize("elements", [-1, 1 << 62, 1 << 30_000], ids=["negative", "2^62", "2^30000"])
def test_an_invalid_number_is_not_counted(say: Make, elements: int) -> None:
    """A number of elements that is negative or too large is not counted. Python refuses to print integers of more than
    4,300 digits.
    """
    data = saved({"a": torch.zeros(5)})
    number = elements.to_bytes(elements.bit_length() // 8 + 1, "little", signed=True)
    claim = data.replace(b"K\x05tq", b"\x8b" + struct.pack("<I", len(number)) + number + b"tq", 1)[: 300 + len(number)]
    assert "truncated" in str(say(claim))


def test_a_cut_inside_the_pickle_has_no_number(say: Make) -> None:
    """If the file is cut inside the pickle, no number is given, because the missing part contains the sizes of the
    storages.
    """
    error = say(OF_TORCH[:150])
    assert "inside data.pkl" in str(error)
    assert missing_of(error) == (0, 0)
    assert error.hint == "download or copy it again"


@given(st.data())
def test_number_of_missing_bytes_is_never_too_large(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A checkpoint with any sizes that is cut at any position raises a MalformedError, and the number of missing bytes
    in it is not too large.
    """
    sizes = data.draw(st.lists(st.integers(0, 300), max_size=5))
    whole = saved({f"w{i}": torch.zeros(n) for i, n in enumerate(sizes)})
    size = data.draw(st.integers(4, len(whole) - 1))
    path = tmp_path_factory.mktemp("cut") / "m.pt"
    path.write_bytes(whole[:size])
    error = error_of(path)
    assert isinstance(error, MalformedError)
    assert missing_of(error)[0] <= len(whole) - size


# safetensors


def test_missing_bytes_of_a_truncated_safetensors_file(say: Make) -> None:
    """If the file is cut in its data, the number of missing bytes is exact. If it is cut in its header, the error
    contains the number of bytes that the header lacks.
    """
    data = safetensors_bytes({"a": torch.arange(50.0), "b": torch.ones(3)})
    start = 8 + int.from_bytes(data[:8], "little")
    for size in range(len(data) - 1, 8, -1):
        error = say(data[:size], "m.safetensors")
        assert isinstance(error, MalformedError)
        lacking = (
            f"{count(len(data) - size, 'byte')} of {len(data)} missing"
            if size >= start
            else f"{count(start - size, 'byte')} of it and all tensors are missing"
        )
        assert lacking in str(error)
        assert error.hint == "download or copy it again"


# torch's older format


def test_missing_bytes_of_a_truncated_legacy_file(say: Make) -> None:
    """A truncated file of the older format is always reported. The number of missing bytes is exact if the pickles are
    complete.
    """
    shared = {**OBJECT, "view": OBJECT["a"][3:]}  # type: ignore[index]
    data = saved(shared, _use_new_zipfile_serialization=False)
    exact = 0
    for size in range(len(data) - 1, 14, -97):
        error = say(data[:size])
        assert isinstance(error, MalformedError), size
        assert "truncated" in str(error)
        exact += f"truncated: {len(data) - size:,} of {len(data):,} bytes missing" in str(error)
    assert exact >= (5000 * 4) // 97


def test_everything_else_in_the_corpus_is_named(corpus: Path) -> None:
    """Each file of the corpus that cannot be read is described, and its error contains a hint."""
    refused = 0
    for path in sorted(path for path in corpus.rglob("*") if path.is_file()):
        try:
            read(path)
        except UnsupportedError as caught:
            error = caught
        else:
            continue
        refused += 1
        assert "not a checkpoint that this version can read" not in str(error)
        assert error.hint
    assert refused


# Pickles


class Thing:
    """A class that only this module defines."""


PICKLES: dict[str, tuple[object, str]] = {
    "a dict": ({"a": 1, "b": 2, "c": [3]}, "a pickle without tensors: a dict of 3 items"),
    "a list": ([1], "a list of 1 item"),
    "a tuple": ((1, 2), "a tuple of 2 items"),
    "a set": ({1, 2, 3, 4}, "(a set of 4 items|an object of (builtins|__builtin__).set)"),
    "a number": (7, "one int"),
    "a text": ("x" * 100_000, "one str"),
    "None": (None, "without tensors: None"),
    "an array": ({"w": numpy.arange(3)}, "a dict of 1 item, with NumPy arrays in it; .*torch.from_numpy"),
    "an object": (Thing(), "an object of .*Thing"),
    "an ordered dict": (collections.OrderedDict(a=1), "an object of collections.OrderedDict"),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_without_tensors_is_described(say: Make, kind: str, protocol: int) -> None:
    """A pickle without tensors is described in every protocol, although the oldest protocols have no signature."""
    obj, what = PICKLES[kind]
    error = say(pickle.dumps(obj, protocol), "x.pkl")
    assert isinstance(error, UnsupportedError)
    assert re.search(what, str(error)), str(error)
    assert kind == "an array" or error.hint == "it contains no weights; use the file with the weights"


@pytest.mark.parametrize("protocol", range(6))
def test_objects_of_torch_without_tensors(say: Make, protocol: int) -> None:
    """A device, a dtype or a size of torch is not a tensor, but the error mentions objects of torch."""
    words = {"device": torch.device("cuda:0"), "dtype": torch.float16, "size": torch.Size([2, 3])}
    said = str(say(pickle.dumps(words, protocol)))
    assert "a pickle without tensors: a dict of 3 items, with objects of torch in it" in said


def test_a_dangerous_pickle_gets_no_command(say: Make) -> None:
    """The hint for a dangerous pickle contains no command, whatever else the pickle contains."""
    error = say(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n0cposix\nsystem\n(X\x02\0\0\0lstR.")
    assert "functions that no checkpoint needs (posix.system)" in str(error)
    assert error.hint == "do not load it"


def test_a_cut_pickle_is_malformed(say: Make) -> None:
    """A pickle that is cut at any position after its header is reported as truncated or damaged."""
    data = pickle.dumps({"a": [1, 2.5, "x" * 300], "b": b"y" * 70_000}, 4)
    for size in [*range(2, 400), len(data) - 1]:
        error = say(data[:size])
        assert isinstance(error, MalformedError)
        assert "a pickle that was truncated or damaged" in str(error)


# Damaged and incomplete files


#: Damaged and incomplete files: their bytes, the type of the error, and a part of it.
PARTS: dict[str, tuple[bytes, type[InputError], str]] = {
    # A download whose space was reserved and never filled.
    **{
        f"{size} zeros": (bytes(size), MalformedError, f"nothing but zeros, {count(size, 'byte')} of them")
        for size in (1, 4096, 5000, 3_000_000)
    },
    "zeros at the start": (
        bytes(1_500_000) + b"x" * 9,
        MalformedError,
        "its first 1,500,000 bytes are zeros",
    ),
    # Python's JSON parser cannot parse this file.
    "deeply nested JSON": (b"[" * 100_000, UnsupportedError, "a text file"),
    # No number can be given, because the first member is not data.pkl or is itself truncated.
    "a cut zip of something else": (
        zip_of({"a.txt": b"x" * 999})[:500],
        MalformedError,
        "a zip archive that was truncated",
    ),
    "a zip that was cut in a deflated data.pkl": (
        zip_of({"m/data.pkl": b"N." * 99}, zipfile.ZIP_DEFLATED)[:45],
        MalformedError,
        "a zip archive that was truncated",
    ),
    "a zip that was cut in its first header": (OF_TORCH[:33], MalformedError, "a zip archive that was truncated"),
    # With and without zip64 records at the end.
    **{
        f"{what} without {cut} bytes at its start": (
            data[cut:],
            MalformedError,
            f"a zip archive without its start: {count(cut, 'byte')} missing",
        )
        for what, data in (("torch's zip", OF_TORCH), ("a zip", zip_of({"m/data.pkl": b"N.", "m/x": b"y" * 999})))
        for cut in (1, 3, 300)
    },
    "a damaged start of a zip": (
        b"\x01\x02\xff\xfe" + OF_TORCH[4:],
        MalformedError,
        "a zip archive whose start is damaged",
    ),
    **{
        f"{n} bytes behind a zip": (
            OF_TORCH + b"\n" * n,
            MalformedError,
            f"does not end where the zip archive ends: {count(n, 'byte')} after it",
        )
        for n in (1, 999)
    },
    "bytes behind a safetensors file": (
        safetensors_bytes({"a": torch.ones(3)}) + bytes(17),
        MalformedError,
        "17 bytes after the last tensor",
    ),
    # A data.pkl that was extracted from its archive.
    "a checkpoint's bare pickle": (
        records_of(OF_TORCH)["data.pkl"],
        UnsupportedError,
        "the pickle of a torch checkpoint without its storages",
    ),
    "two pickles": (
        pickle.dumps([1]) * 2,
        UnsupportedError,
        f"a list of 1 item, and {len(pickle.dumps([1]))} bytes after it",
    ),
    # The pickle needs another package.
    "a pickle of another package": (
        pickle.dumps([Thing()], 2).replace(f"{__name__}\nThing".encode(), b"sklearn.svm._classes\nSVC"),
        UnsupportedError,
        "a list of 1 item, with objects of sklearn in it",
    ),
    # The pickle cannot be parsed, because raw arrays are between its opcodes.
    "a joblib file": (
        b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x13joblib.numpy_pickle\x94" + bytes(99),
        UnsupportedError,
        "a joblib file",
    ),
    # The error names a limit and does not describe the file.
    "an integer too long for any checkpoint": (
        b"\x80\x02\x8b\xff\xff\xff\x00" + bytes(1 << 20),
        LimitError,
        "an integer in the pickle is too long",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_damaged_and_incomplete_files_are_described(say: Make, kind: str) -> None:
    """A damaged or incomplete file is described. The error contains the number of zero, missing or additional bytes if
    it can be computed.
    """
    data, error, what = PARTS[kind]
    found = say(data)
    assert isinstance(found, error)
    assert what in str(found)


# Any bytes


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", *(data[:40] for data, _, _ in FILES.values())]),
    st.sampled_from(["x.pt", "x.safetensors", "x.onnx", "saved_model.pb"]),
)
def test_any_bytes_end_in_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes, name: str
) -> None:
    """Random bytes, alone or after the beginning of each kind of file, are read or raise an error with a printable
    message.
    """
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(head + data)
    line = ""
    try:
        read(path)
    except CkptconvError as error:
        line = str(error)
    assert not line or line.isprintable()


@given(st.sampled_from([data for data, _, _ in FILES.values() if len(data) > 1]), st.data())
def test_truncated_files_of_all_kinds_raise_an_error(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    """Each kind of file above, cut at any position, raises an error with a printable message."""
    path = tmp_path_factory.mktemp("cut") / "x.bin"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert str(error_of(path)).isprintable()


def test_convert_and_inspect_print_the_same_error(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``inspect`` and ``convert`` print the same line and fail with status 1, and nothing is written."""
    path.write_bytes(LFS)
    assert main(["inspect", str(path)]) == 1
    first = capsys.readouterr().err
    assert main(["convert", str(path), str(tmp_path / "out.pt"), "--to", "cpu"]) == 1
    assert capsys.readouterr().err == first
    assert sorted(os.listdir(tmp_path)) == ["m.pt"]


def test_torch_is_not_imported_to_describe_a_file(path: Path) -> None:
    """``inspect`` describes a file without importing torch."""
    path.write_bytes(saved(OBJECT, _use_new_zipfile_serialization=False))
    run_without_torch("from ckptconv.cli.main import main; main(['inspect', sys.argv[1]])", path)
