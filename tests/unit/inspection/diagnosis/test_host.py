"""The devices that a machine has, found from trees of driver files. The results are compared with those of torch."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckptconv.inspection.diagnosis.host import Host, this_host

UUIDS = ["GPU-8932f937-d72c", "GPU-8932aaaa-1111", "GPU-1fb42d6f-7d6b"]


def nvidia(root: Path, count: int, *, dev: int | None = None, uuids: bool = True) -> Path:
    """Write a tree with `count` GPUs in /proc and `dev` of them in /dev, and return `root`."""
    (root / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (root / "dev" / name).touch()
    for i in range(count if dev is None else dev):
        (root / f"dev/nvidia{i}").touch()
    for i in range(count):
        folder = root / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0"
        folder.mkdir(parents=True)
        lines = ["Model: \t\t A GPU", f"GPU UUID: \t {UUIDS[i % 3]}", f"Device Minor: \t {i}"]
        (folder / "information").write_text("\n".join(lines) if uuids else "Model: A GPU\n")
    return root


def amd(root: Path, count: int) -> Path:
    """Write a tree with one processor and `count` AMD GPUs, and return `root`."""
    (root / "dev").mkdir(parents=True)
    (root / "dev/kfd").touch()
    for i in range(count + 1):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{i}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{i * 4711}\n")
    return root


def cuda(root: Path, **environ: str) -> int | None:
    return this_host(root, environ, "linux").cuda


@pytest.mark.parametrize(
    ("count", "dev", "seen"),
    [(2, None, 2), (2, 1, 1), (2, 0, 2), (0, None, 0), (12, None, 12)],
    ids=["two", "container", "unused", "driver alone", "many"],
)
def test_driver_files_are_counted(tmp_path: Path, count: int, dev: int | None, seen: int) -> None:
    """The GPUs in /dev are counted, because a container has only its own GPUs there. Without any, those in /proc are
    counted. Other files of the driver are not GPUs.
    """
    assert cuda(nvidia(tmp_path, count, dev=dev)) == seen


def test_without_driver_files(tmp_path: Path) -> None:
    """A machine without driver files has no GPU."""
    assert cuda(tmp_path) == 0


def test_amd_gpus_are_cuda_too(tmp_path: Path) -> None:
    """AMD GPUs, the nodes with an id that is not 0, count as cuda devices. A node that cannot be read is not counted.
    Without /dev/kfd there are none.
    """
    root = amd(tmp_path / "amd", 2)
    assert cuda(root) == 2
    assert cuda(root, HIP_VISIBLE_DEVICES="1") == 1
    assert cuda(root, HIP_VISIBLE_DEVICES="", CUDA_VISIBLE_DEVICES="0,1") == 0
    assert cuda(root, CUDA_VISIBLE_DEVICES="0") == 1
    assert cuda(root, ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="0,1") == 1
    gpu_id = root / "sys/class/kfd/kfd/topology/nodes/2/gpu_id"
    gpu_id.unlink()
    gpu_id.mkdir()
    assert cuda(root) == 1
    (root / "dev/kfd").unlink()
    assert cuda(root) == 0


def test_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac has no cuda, and mps only with an Apple processor. On Windows, the number of GPUs is not known."""
    monkeypatch.setattr("sys.path", [])
    for system, processor, host in (
        ("darwin", "arm64", Host(0, mps=True)),
        ("darwin", "x86_64", Host(0, mps=False)),
        ("win32", "AMD64", Host(None)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("platform.machine", partial(str, processor))
            assert this_host(tmp_path, {}, system) == host


def test_wsl(tmp_path: Path) -> None:
    """Under WSL, the number of GPUs is not known, unless the variable hides all of them."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert cuda(tmp_path) is None
    assert cuda(tmp_path, CUDA_VISIBLE_DEVICES="0") is None
    assert cuda(tmp_path, CUDA_VISIBLE_DEVICES="-1") == 0
    assert cuda(tmp_path, CUDA_VISIBLE_DEVICES="") == 0


def test_the_torch_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version of torch is that of importlib.metadata, without regard to the current folder."""
    torch.zeros(0)  # skips the test if there is no torch
    assert this_host(tmp_path, {}).torch == importlib.metadata.version("torch")
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    names = ("torch_x-9.dist-info", "torch-2.9.1+cu126.dist-info", "torch-2.6.0-py3.12.egg-info")
    for folder, name in zip(folders, names, strict=True):
        (folder / name).mkdir(parents=True)
    paths = list(map(str, folders))
    monkeypatch.chdir(folders[2])
    for searched, version in (
        (["", ".", *paths], "2.9.1+cu126"),
        ([str(tmp_path / "none"), *paths[::-1]], "2.6.0"),
        (paths[:1], None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("sys.path", searched)
            assert this_host(tmp_path, {}).torch == version
    assert Host(torch="2.99.1+cu126").other_torch == "2.99.1+cu126" and Host(torch="2.1").other_torch == "2.1"
    assert not any(Host(torch=same).other_torch for same in ("2.13.0+cpu", "2.6", "2.15.0a0+git1", None))


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,1", 2),
        ("0,2,-1,1", 2),
        ("0,0", 0),
        ("3", 0),
        ("0,3,1", 1),
        (" 1 , 2", 2),
        ("1gpu2,2ampere", 2),
        ("GPU-1fb4", 1),
        ("GPU-8932", 0),
        ("GPU-8932f,GPU-1", 2),
        ("GPU-1,GPU-1fb4", 0),
        ("GPU-1,0", 1),
        ("0,GPU-1", 1),
        ("GPU-none", 0),
        ("none", 0),
    ],
)
def test_the_variable_reduces_them(tmp_path: Path, variable: str, seen: int) -> None:
    """CUDA_VISIBLE_DEVICES contains indices or beginnings of UUIDs. The list ends at the first invalid device. A device
    that occurs twice hides all.

    This follows CUDA's programming guide, and torch agrees.
    """
    assert cuda(nvidia(tmp_path, 3), CUDA_VISIBLE_DEVICES=variable) == seen == torch_count(variable, 3)


def test_facts_that_only_the_driver_knows(tmp_path: Path) -> None:
    """Parts of a divided GPU count as one GPU. UUIDs that cannot be looked up are counted, up to the number of GPUs."""
    root = nvidia(tmp_path, 2, uuids=False)
    assert cuda(root, CUDA_VISIBLE_DEVICES="MIG-aaaa,MIG-bbbb") == 1
    assert cuda(root, CUDA_VISIBLE_DEVICES="GPU-aaaa") == 1
    assert cuda(root, CUDA_VISIBLE_DEVICES="GPU-aaaa,GPU-bbbb,GPU-cccc") == 2
    assert cuda(nvidia(tmp_path / "none", 0), CUDA_VISIBLE_DEVICES="MIG-aaaa") == 0


WORDS = [
    "0", "1", "2", "3", "7", "-1", "+1", "-0", " 2", "1x", "x", "", "GPU-1", "GPU-1fb42d", "GPU-8932", "GPU-8932a",
    "GPU-no", "00",
]  # a table  # fmt: skip


@given(words=st.lists(st.sampled_from(WORDS), max_size=5), count=st.integers(0, 3))
@example(words=["0", "7", "7"], count=3)
@example(words=["GPU-no", "GPU-no"], count=3)
def test_agrees_with_torch(tmp_path_factory: pytest.TempPathFactory, words: list[str], count: int) -> None:
    """For every value of the variable, the number of GPUs is the one that torch counts with NVIDIA's library."""
    variable = ",".join(words)
    root = tmp_path_factory.getbasetemp() / f"machine{count}"
    if not root.exists():
        nvidia(root, count)
    assert cuda(root, CUDA_VISIBLE_DEVICES=variable) == torch_count(variable, count)


def torch_count(variable: str, count: int) -> int:
    """Return the number of GPUs that torch counts if NVIDIA's library reports `count` GPUs."""
    with (
        mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": variable}),
        mock.patch("torch.cuda._raw_device_count_nvml", return_value=count),
        mock.patch("torch.cuda._raw_device_uuid_nvml", return_value=UUIDS[:count]),
    ):
        return torch.cuda._device_count_nvml()


def test_location_tags_that_exist_on_a_machine() -> None:
    """A machine has a tag according to its family and index. Tags that torch cannot restore are absent everywhere, and
    the presence of other devices is not known.
    """
    two = Host(2)
    tags = ["cpu", "meta", "cuda:0", "cuda:1", "cuda", "cuda:2", "cuda:x", "mps", "cpu:0", "xpu:0"]
    assert [two.shows(tag) for tag in tags] == [True, True, True, True, True, False, False, False, False, None]
    assert Host(mps=True).shows("mps")
    assert Host(None).shows("cuda:0") is None


def test_this_machine_agrees_with_torch() -> None:
    """On this machine, the devices are those that torch finds, as far as torch is built for them."""
    found = this_host()
    if torch.cuda.is_available():
        assert found.cuda == torch.cuda.device_count()
    assert found.mps == torch.backends.mps.is_available()
