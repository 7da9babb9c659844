"""Tests of ``--dtype`` for quantized weights. Every layout is compared with a reference in NumPy, and invalid scales
are refused.
"""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptconv
from ckptconv.conversion.plan import Report
from tests.support.archives import flip_bit

np.seterr(all="ignore")
E4M3 = np.array([float(x) for x in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()], np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def reference(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return the matrices `codes`, multiplied by the scale of each block in float32, as `dtype`."""
    rows, columns = codes.shape[-2:]
    spread = np.repeat(np.repeat(scales, block[0], -2)[..., :rows, :], block[1], -1)[..., :columns]
    return torch.from_numpy(codes * spread.astype(np.float32)).to(dtype)


def pairs(packed: torch.Tensor) -> np.ndarray:
    """Return the two numbers of each byte. The number in the low bits is the first."""
    data = packed.numpy()
    return np.stack([E2M1[data & 15], E2M1[data >> 4]], -1).reshape(*data.shape[:-1], -1)


def codes(*shape: int) -> torch.Tensor:
    """Return random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random scales with NaN, infinities and zeros."""
    made = torch.randn(shape)
    odd = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    made.view(-1)[::7] = odd[torch.arange(len(made.view(-1)[::7])) % 4]
    return made.to(dtype)


def converted(folder: Path, model: dict[str, torch.Tensor], dtype: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Save `model`, convert it to `dtype`, and return the tensors of the output."""
    save_file(model, folder / "src.safetensors")
    ckptconv.convert(folder / "src.safetensors", folder / "dst.safetensors", dtype=dtype, force=True, **options)
    return load_file(folder / "dst.safetensors")


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that two tensors are equal, with equal signs of zeros and with NaN at the same positions."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.isnan(), b.isnan())
    kept = ~a.isnan()
    assert torch.equal(a[kept], b[kept]) and torch.equal(a[kept].signbit(), b[kept].signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(128, 128), (192, 300), (129, 257), (1, 1), (5, 3000), (3, 130, 260), (2049, 1031)])
def test_blocks(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights with a scale for each block of 128×128 numbers are converted. The last blocks may be smaller, and weights
    may be stacks of matrices.
    """
    weight, scale = codes(*shape), scales(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    model = {"a.weight": weight.view(torch.float8_e4m3fn), "a.weight_scale_inv": scale, "a.bias": torch.rand(4)}
    found = converted(tmp_path, model, dtype)
    assert sorted(found) == ["a.bias", "a.weight"]
    assert_equal(found["a.weight"], reference(E4M3[weight.numpy()], scale.numpy(), (128, 128), dtype))
    assert_equal(found["a.bias"], model["a.bias"].to(dtype))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (70, 1), (70,), (1, 90)])
def test_scales_of_tensors_rows_and_columns(shape: tuple[int, ...], kind: torch.dtype, tmp_path: Path) -> None:
    """Weights with one scale for the tensor, or for each row or column, are converted. The scale of the inputs is
    removed too.
    """
    weight, scale = codes(70, 90), scales(*shape, dtype=kind)
    full = scale.float().numpy().reshape(-1, 1) if len(shape) < 2 else scale.float().numpy()
    block = (70 // full.shape[0], 90 // full.shape[1])
    model = {
        "a.weight": weight.view(torch.float8_e4m3fn),
        "a.weight_scale": scale,
        "a.input_scale": torch.rand(1),
    }
    found = converted(tmp_path, model, "bf16")
    assert [*found] == ["a.weight"]
    assert_equal(found["a.weight"], reference(E4M3[weight.numpy()], full, block, torch.bfloat16))


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_powers_of_two(name: str, tmp_path: Path) -> None:
    """A scale of one byte is an exponent. It applies to a block of 128×128 numbers, or to 32 numbers of a row."""
    weight, exponents = codes(130, 256), codes(130, 8)
    power = np.ldexp(np.float32(1), exponents.numpy().astype(int) - 127)
    model = {"a.weight": weight.view(torch.float8_e4m3fn), f"a.{name}": exponents}
    found = converted(tmp_path, model, "fp32")["a.weight"]
    assert_equal(found, reference(E4M3[weight.numpy()], power, (1, 32), torch.float32))
    model[f"a.{name}"] = exponents[:2, :2].contiguous()
    found = converted(tmp_path, model, "fp32")["a.weight"]
    assert_equal(found, reference(E4M3[weight.numpy()], power[:2, :2], (128, 128), torch.float32))
    model[f"a.{name}"] = exponents[:2, :2].contiguous().view(torch.float8_e8m0fnu)
    power[exponents.numpy() == 255] = np.nan
    found = converted(tmp_path, model, "fp32")["a.weight"]
    assert_equal(found, reference(E4M3[weight.numpy()], power[:2, :2], (128, 128), torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    """NVFP4 weights are converted. compressed-tensors divides the scale by the global scale, and ModelOpt multiplies it
    by the second scale.
    """
    packed, scale, second = codes(33, 40), codes(33, 5), torch.tensor([3.7])
    numbers, of_16, float8 = pairs(packed), E4M3[scale.numpy()], scale.view(torch.float8_e4m3fn)
    model = {
        "a.weight_packed": packed,
        "a.weight_scale": scale.view(torch.float8_e4m3fn),
        "a.weight_global_scale": second,
    }
    found = converted(tmp_path, model, dtype)
    assert [*found] == ["a.weight"]
    assert_equal(found["a.weight"], reference(numbers, of_16 / second.numpy(), (1, 16), dtype))
    model = {"a.weight": packed, "a.weight_scale": float8, "a.weight_scale_2": second[0]}
    found = converted(tmp_path, model, dtype)
    assert_equal(found["a.weight"], reference(numbers, of_16 * second.numpy(), (1, 16), dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [7, 4096])
def test_mxfp4(rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """MXFP4 weights, with an exponent for 32 numbers, are converted. The experts of gpt-oss are transposed, also if
    they are read in parts that end within a row.
    """
    packed, exponents = codes(2, rows, 9, 16), torch.randint(0, 255, (2, rows, 9), dtype=torch.uint8)
    power = np.ldexp(np.float32(1), exponents.numpy().astype(int) - 127)
    want = reference(pairs(packed.flatten(2)), power, (1, 32), dtype)
    found = converted(tmp_path, {"up_blocks": packed, "up_scales": exponents, "up_bias": torch.rand(3)}, dtype)
    assert sorted(found) == ["up", "up_bias"]
    assert_equal(found["up"], want.transpose(1, 2))
    flat = {"a.weight_packed": packed[0].flatten(1).contiguous(), "a.weight_scale": exponents[0].contiguous()}
    assert_equal(converted(tmp_path, flat, dtype)["a.weight"], want[0])


def test_exponents_that_float32_lacks(tmp_path: Path) -> None:
    """An exponent of 2**128, which float32 lacks, gives a number if the code is 0.5, as in gpt-oss."""
    packed = torch.full((1, 1, 1, 16), 0x10, dtype=torch.uint8)
    found = converted(
        tmp_path, {"up_blocks": packed, "up_scales": torch.full((1, 1, 1), 255, dtype=torch.uint8)}, "fp32"
    )
    assert found["up"].flatten().tolist()[:2] == [0.0, 2.0**127]


def quantized() -> dict[str, torch.Tensor]:
    """Return two weights in blocks of 128×128 numbers with their scales, and another weight."""
    return {
        "a.weight": codes(200, 300).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.rand(2, 3),
        "b.weight": codes(200, 300).view(torch.float8_e4m3fn),
        "b.weight_scale_inv": torch.rand(2, 3),
        "c.weight": torch.rand(3),
    }


def wanted(model: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the expected values of the weight `name` of :func:`quantized` in bfloat16."""
    numbers = E4M3[model[name].view(torch.uint8).numpy()]
    return reference(numbers, model[f"{name}_scale_inv"].numpy(), (128, 128), torch.bfloat16)


@pytest.mark.parametrize("copied", [False, True])
def test_a_set_with_its_configuration(copied: bool, tmp_path: Path) -> None:
    """The scale of a weight may be in another shard. The new index contains no scales, and a copied ``config.json`` no
    quantization.
    """
    model, src, dst = quantized(), tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    names = [["a.weight", "b.weight_scale_inv"], ["a.weight_scale_inv", "b.weight", "c.weight"]]
    for i, each in enumerate(names, 1):
        save_file({name: model[name] for name in each}, src / f"model-0000{i}-of-00002.safetensors", {"format": "pt"})
    ckptconv.write_index(src)
    config = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "torch_dtype": "float32",
        "é": 1e-06,
    }
    (src / "config.json").write_text(json.dumps(config), "utf-8")
    report = ckptconv.convert(src, dst, dtype="bf16", copy_others=copied)
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["a.weight", "b.weight", "c.weight"]
    assert index["metadata"]["total_size"] == 2 * (2 * 200 * 300 + 3)
    found = {name: value for file in dst.glob("*.safetensors") for name, value in load_file(file).items()}
    for name in ("a.weight", "b.weight"):
        assert_equal(found[name], wanted(model, name))
    if copied:
        assert json.loads((dst / "config.json").read_text("utf-8")) == {"torch_dtype": "bfloat16", "é": 1e-06}
    else:
        assert any("has quantization_config" in note and "copy_others" in note for note in report.notes)


def test_the_report(tmp_path: Path) -> None:
    """The report contains the layout, the number of weights and bytes, and the removed scales."""
    save_file(quantized(), tmp_path / "src.safetensors")
    report: Report = ckptconv.convert(tmp_path / "src.safetensors", tmp_path / "dst.safetensors", dtype="bf16")
    assert tuple(report.changes.dtypes["fp8 in blocks of 128×128", "bfloat16"]) == (2, 2 * (60000 + 24), 240000)
    assert {left.path for left in report.left_behind} == {"a.weight_scale_inv", "b.weight_scale_inv"}


def test_a_glob_selects_weights(tmp_path: Path) -> None:
    """If a glob selects a weight, the other weights stay quantized."""
    model = quantized()
    found = converted(tmp_path, model, "a.*=bf16")
    assert_equal(found["a.weight"], wanted(model, "a.weight"))
    assert torch.equal(found["b.weight"].view(torch.uint8), model["b.weight"].view(torch.uint8))
    assert "b.weight_scale_inv" in found


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_torch_files(suffix: str, tmp_path: Path) -> None:
    """In a torch file, tied weights stay tied, and ``verify=True`` compares the checksums."""
    model = quantized()
    model["tied.weight"], model["tied.weight_scale_inv"] = model["a.weight"], model["a.weight_scale_inv"]
    torch.save(model, tmp_path / f"src{suffix}")
    ckptconv.convert(tmp_path / f"src{suffix}", tmp_path / f"dst{suffix}", dtype="bf16", verify=True)
    found = torch.load(tmp_path / f"dst{suffix}")
    assert_equal(found["a.weight"], wanted(model, "a.weight"))
    assert found["tied.weight"].data_ptr() == found["a.weight"].data_ptr()


def test_a_wrong_checksum(tmp_path: Path) -> None:
    """A flipped bit in a scale is found by its checksum."""
    model = {"a.weight": codes(200, 300).view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.rand(2, 3)}
    torch.save(model, tmp_path / "src.pt")
    data = (tmp_path / "src.pt").read_bytes()
    flip_bit(tmp_path / "src.pt", data.index(model["a.weight_scale_inv"].numpy().tobytes()))
    with pytest.raises(ckptconv.MalformedError, match="checksum"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.safetensors", dtype="bf16")


def refused(folder: Path, model: dict[str, torch.Tensor], config: object = None) -> str:
    """Return the error for `model` with the quantization config `config` next to it."""
    save_file(model, folder / "src.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ckptconv.RefusedError) as caught:
        ckptconv.convert(folder / "src.safetensors", folder / "no.safetensors", dtype="bf16")
    assert not (folder / "no.safetensors").exists()
    return str(caught.value)


FP8 = {"quant_method": "fp8"}
LONE = "a weight has no scale, or a scale has no weight"


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({"a.weight_scale_inv": torch.rand(2, 2)}, None, r"a.weight_scale_inv does not fit a.weight [200, 300]"),
        ({"a.weight_scale_inv": torch.rand(3, 2)}, None, r"expected blocks of 128×128"),
        ({"a.weight_scale_inv": torch.rand(2, 3)}, {**FP8, "weight_block_size": [64, 64]}, "expected blocks of 64×64"),
        ({"a.weight_scale_inv": None}, None, f"{LONE}: a.weight"),
        ({"a.weight": None}, None, f"{LONE}: a.weight_scale_inv"),
        ({"a.weight": torch.rand(200, 300)}, None, f"{LONE}: a.weight_scale_inv"),
        ({"a.weight_scale": torch.rand(1)}, None, "a.weight has several scales"),
        ({"a.weight_zero_point": torch.rand(1)}, None, "a.weight has a zero point, a.weight_zero_point"),
        ({"a.weight_scale_inv": torch.ones(2, 3, dtype=torch.int32)}, None, "a dtype that scales do not have"),
        ({"a.weight_packed": codes(4, 16), "a.weight_scale": codes(4, 3)}, None, "fit a.weight_packed [4, 32]"),
    ],
)  # fmt: skip
def test_wrong_scales(changes: dict[str, Any], config: Any, expected: str, tmp_path: Path) -> None:
    """A scale that is missing, has the wrong shape or dtype, or has no weight is refused."""
    model = {name: value for name, value in (quantized() | changes).items() if value is not None}
    if "a.weight_packed" in changes:
        del model["a.weight"], model["a.weight_scale_inv"]
    assert expected in refused(tmp_path, model, config)


def test_two_readings(tmp_path: Path) -> None:
    """If the shape of the scales fits two layouts, the weight is refused, or read with the blocks of
    ``config.json``.
    """
    weight = codes(128, 256)
    model = {"a.weight": weight.view(torch.float8_e4m3fn), "a.weight_scale": scales(1, 2)}
    found = converted(tmp_path, model, "bf16")["a.weight"]
    assert_equal(found, reference(E4M3[weight.numpy()], model["a.weight_scale"].numpy(), (128, 128), torch.bfloat16))
    model = {"a.weight": codes(256, 64).view(torch.float8_e4m3fn), "a.weight_scale": torch.rand(2, 4)}
    assert "expected blocks of 128×128" in refused(tmp_path, model)
    config = {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [128, 16]}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = converted(tmp_path, model, "bf16")["a.weight"]
    numbers = E4M3[model["a.weight"].view(torch.uint8).numpy()]
    assert_equal(found, reference(numbers, model["a.weight_scale"].numpy(), (128, 16), torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "layout", "program"),
    [
        ("a.qweight", "GPTQ or AWQ", "GPTQModel"),
        ("a.SCB", "bitsandbytes", "dequantize()"),
        ("a.weight_shape", "packed integers of compressed-tensors", "CompressedTensorsDequantizer"),
    ],
)
def test_layouts_of_other_programs(name: str, layout: str, program: str, tmp_path: Path) -> None:
    """Layouts of other programs are kept, and a note names the program that decodes them."""
    model = {name: torch.ones(4, 4, dtype=torch.int32), "a.scales": torch.rand(4), "b.weight": torch.rand(4)}
    save_file(model, tmp_path / "src.safetensors")
    report = ckptconv.convert(tmp_path / "src.safetensors", tmp_path / "dst.safetensors", dtype="bf16")
    assert any(layout in note and program in note for note in report.notes)
    assert load_file(tmp_path / "dst.safetensors")[name].dtype == torch.int32


def test_integers_with_scales(tmp_path: Path) -> None:
    """8-bit integers with scales, as compressed-tensors writes them, are kept with a note."""
    model = {"a.weight": codes(4, 4).view(torch.int8), "a.weight_scale": torch.rand(4, 1), "b.weight": torch.rand(4)}
    save_file(model, tmp_path / "src.safetensors")
    report = ckptconv.convert(tmp_path / "src.safetensors", tmp_path / "dst.safetensors", dtype="bf16")
    (note,) = (note for note in report.notes if "1 weight of 8-bit integers with scales" in note)
    assert "convert_checkpoint" in note
    assert load_file(tmp_path / "dst.safetensors")["a.weight"].dtype == torch.int8


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_wrong_scales(seed: int, tmp_path: Path) -> None:
    """Weights with random scales are refused, kept as they are, or multiplied by the scales of a fitting block size."""
    random, outcomes = Random(seed), Counter[str]()
    torch.manual_seed(seed)
    for _ in range(50):
        rows, columns = random.choice([(256, 384), (130, 200), (64, 96), (200, 1), (3, 160)])
        grids = [(-(-rows // 128), -(-columns // 128)), (rows, 1), (1, columns), (1,), (), (rows, -(-columns // 32))]
        odd = [(columns, 1), (1, rows), (2,), (-(-columns // 128), -(-rows // 128)), (rows,)]
        grid = random.choice([*grids, *grids, *odd])
        kind = random.choice([torch.float32, torch.bfloat16, torch.float32, torch.int32, torch.bool, torch.float64])
        scale = (scales(*grid) if grid else torch.tensor(2.5)) * random.choice([1, 1, 0, torch.nan])
        name = random.choice(["weight_scale_inv", "weight_scale_inv", "weight_scale", "scale", "other", "wieght_scale"])
        weight = codes(rows, columns)
        model = {"a.weight": weight.view(torch.float8_e4m3fn), f"a.{name}": scale.to(kind), "b": torch.rand(3)}
        try:
            found = converted(tmp_path, model, "fp32")["a.weight"]
        except ckptconv.RefusedError:
            outcomes["refused"] += 1
            continue
        if found.dtype == torch.float8_e4m3fn:  # no scale was found, so the weight is not cast
            assert name in ("other", "wieght_scale")
            outcomes["kept"] += 1
            continue
        outcomes["computed"] += 1
        full = scale.to(kind).float().numpy()
        full = full.reshape(-1, 1) if full.ndim < 2 else full
        blocks = [(128, 128), (1, columns), (rows, 1), (rows, columns)]
        fitting = [b for b in blocks if full.shape == (-(-rows // b[0]), -(-columns // b[1]))]
        wanted = [reference(E4M3[weight.numpy()], full, block, torch.float32) for block in fitting]
        assert any(torch.equal(found.nan_to_num(7), each.nan_to_num(7)) for each in wanted), (grid, kind, name)
    assert min(outcomes.values()) > 4 and len(outcomes) == 3, outcomes


def test_the_mark_of_comfyui(tmp_path: Path) -> None:
    """The tensor with which ComfyUI marks scaled weights is removed with the scales."""
    model = {
        "model.scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
        "model.a.weight": codes(4, 4).view(torch.float8_e4m3fn),
        "model.a.scale_weight": torch.tensor(2.0),
    }
    found = converted(tmp_path, model, "bf16")
    assert [*found] == ["model.a.weight"]


def test_inspect_shows_layouts(tmp_path: Path) -> None:
    """`inspect` shows the layouts and the logical number of parameters, without the scales."""
    model = quantized() | {"d.weight_packed": codes(4, 32), "d.weight_scale": codes(4, 2)}
    save_file(model, tmp_path / "src.safetensors")
    (state_dict,) = ckptconv.inspect(tmp_path / "src.safetensors").state_dicts
    assert state_dict.quantized == {"fp8 in blocks of 128×128": 2, "MXFP4": 1}
    assert state_dict.parameters == 2 * 200 * 300 + 3 + 4 * 64
    assert "quantized: 2 weights as fp8 in blocks of 128×128, 1 weight as MXFP4" in str(
        ckptconv.inspect(tmp_path / "src.safetensors")
    )


def test_a_tensor_of_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` shows the layout of a torchao tensor and counts its logical parameters. The error of a safetensors
    conversion suggests torchao's function.
    """
    module = types.ModuleType("torchao.quantization")

    class Int8Tensor(torch.Tensor):
        """A tensor that contains other tensors, like those of torchao."""

        @staticmethod
        def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            made = torch.Tensor._make_wrapper_subclass(cls, (4, 8), dtype=torch.bfloat16)
            made.qdata, made.scale, made.block_size = qdata, scale, [1, 8]
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0]  # detach

    Int8Tensor.__module__, Int8Tensor.__qualname__ = "torchao.quantization", "Int8Tensor"
    module.Int8Tensor = Int8Tensor
    for name, each in (("torchao", types.ModuleType("torchao")), ("torchao.quantization", module)):
        monkeypatch.setitem(sys.modules, name, each)
    weight = nn.Parameter(Int8Tensor(torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1)), requires_grad=False)
    torch.save({"a.weight": weight, "a.bias": torch.ones(4)}, tmp_path / "src.pt")
    (state_dict,) = ckptconv.inspect(tmp_path / "src.pt").state_dicts
    assert state_dict.quantized == {"Int8Tensor of torchao in blocks of 1×8": 1}
    assert state_dict.parameters == 4 * 8 + 4
    with pytest.raises(ckptconv.RefusedError, match=r"Int8Tensor of torchao.*flatten_tensor_state_dict"):
        ckptconv.convert(tmp_path / "src.pt", tmp_path / "dst.safetensors")


def test_diff_compares_values(tmp_path: Path) -> None:
    """`diff` compares a quantized file with its source by value, in either order. It does not list the scales."""
    real = torch.randn(200, 300)
    scale = torch.full((2, 3), 0.01)
    model = {"a.weight": (real / 0.01).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    save_file(model, tmp_path / "q.safetensors")
    save_file({"a.weight": real}, tmp_path / "real.safetensors")
    largest = (real - model["a.weight"].float() * scale[0, 0]).abs().max().item()
    for pair in (("q", "real"), ("real", "q")):
        found = ckptconv.diff(*(tmp_path / f"{name}.safetensors" for name in pair))
        (difference,) = found.differing
        assert difference.values and difference.values.largest == largest
        assert not found.only_in_a and not found.only_in_b
        assert any("fp8 in blocks of 128×128: compared by value" in note for note in found.notes)
    ckptconv.convert(tmp_path / "q.safetensors", tmp_path / "again.safetensors", dtype="fp32")
    assert ckptconv.diff(tmp_path / "q.safetensors", tmp_path / "again.safetensors").same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("moved", "most"), [(0.0, 0.5), (4.0, 4.25)])
def test_diff_counts_steps(moved: float, most: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """`diff` reports differences in steps of the quantization. Rounding to the nearest code gives at most half
    a step.
    """
    real = (torch.randn(200, 300) * 0.3).clamp(-0.8, 0.8).to(dtype)
    scale = torch.full((2, 3), 2.0**-9)
    model = {"a.weight": (real.float() / scale[0, 0]).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    near = model["a.weight"][0, 0].float()
    step = 2.0 ** max(int(near.abs().log2().floor()), -6) / 8 * scale[0, 0]
    real[0, 0] = (near * scale[0, 0] + moved * step * near.sign()).to(dtype)
    save_file(model, tmp_path / "q.safetensors")
    save_file({"a.weight": real}, tmp_path / "real.safetensors")
    for pair in (("q", "real"), ("real", "q")):
        (note,) = (note for note in ckptconv.diff(*(tmp_path / f"{name}.safetensors" for name in pair)).notes if "steps" in note)  # fmt: skip  # noqa: E501
        found = float(note.split("at most ")[1].split(" ")[0])
        assert max(moved, 0.45) * 0.97 <= found <= most
