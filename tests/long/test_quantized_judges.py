"""Quantized weights compared with the libraries that define the layouts: compressed-tensors, modelopt and
transformers.

``CKPTCONV_JUDGES`` is a folder with these packages: ``pip install --no-deps --target FOLDER compressed-tensors==0.20.0
nvidia-modelopt==0.47.0 psutil loguru``, as ``.ci/quantized`` does. Without it, their tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv
from tests.unit.edits.test_dequantizing import assert_equal, codes, converted, scales

pytestmark = [pytest.mark.filterwarnings("ignore")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make compressed-tensors importable, or skip the test."""
    folder = os.environ.get("CKPTCONV_JUDGES", "")
    if folder:
        monkeypatch.syspath_prepend(folder)
    pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (192, 300), (129, 257), (1, 1), (5, 3000), (2049, 1031)])
@pytest.mark.usefixtures("judge")
def test_blocks(shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks of fp8 are dequantized like ``FP8BlockDequantizer``, for every shape."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    weight, scale = codes(*shape).view(torch.float8_e4m3fn), scales(-(-shape[0] // 128), -(-shape[1] // 128))
    want = FP8BlockDequantizer(dtype=dtype)._create_dequantized_weight(weight, scale)
    found = converted(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, dtype)
    assert_equal(found["a.weight"], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp32", "ue8m0", "mxfp8"])
def test_fp8_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks of fp8 that divide the shape are dequantized like ``Fp8Dequantize``."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = codes(256, 384).view(torch.float8_e4m3fn)
    grid = (256, 12) if kind == "mxfp8" else (2, 3)
    scale = scales(*grid) if kind == "fp32" else codes(*grid)
    want = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    found = converted(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, dtype)
    assert_equal(found["a.weight"], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    """The experts of gpt-oss are dequantized like in transformers, on random bytes and exponents."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, exponents = codes(3, 70, 5, 16), codes(3, 70, 5)
    found = converted(tmp_path, {"up_blocks": blocks, "up_scales": exponents}, dtype)
    assert_equal(found["up"], convert_moe_packed_tensors(blocks, exponents, dtype=dtype))


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "MXFP8", "FP8", "FP8_DYNAMIC"])
@pytest.mark.usefixtures("judge")
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    """Each format is dequantized like its ``decompress()``, on random bytes."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    float8 = codes(33, 96).view(torch.float8_e4m3fn)
    compressor, state = {
        "NVFP4A16": (
            NVFP4PackedCompressor,
            {
                "weight_packed": codes(33, 48),
                "weight_scale": codes(33, 6).view(torch.float8_e4m3fn),
                "weight_global_scale": torch.tensor([3.7]),
            },
        ),
        "MXFP4A16": (MXFP4PackedCompressor, {"weight_packed": codes(33, 48), "weight_scale": codes(33, 3)}),
        "MXFP8": (MXFP8QuantizationCompressor, {"weight": float8, "weight_scale": codes(33, 3)}),
        "FP8": (FloatQuantizationCompressor, {"weight": float8, "weight_scale": torch.tensor([0.3])}),
        "FP8_DYNAMIC": (FloatQuantizationCompressor, {"weight": float8, "weight_scale": scales(33, 1)}),
    }[name]
    want = compressor.decompress(dict(state), preset_name_to_scheme(name, ["Linear"]))["weight"]
    found = converted(tmp_path, {f"a.{key}": value for key, value in state.items()}, "bf16")
    assert_equal(found["a.weight"], want.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 48), (128, 256), (2, 16), (7, 160)])
def test_nvfp4_of_modelopt(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvfp4 weights are dequantized like ``NVFP4QTensor.dequantize()``. Its file is loaded without the rest of the
    package, which has many dependencies.
    """
    file = Path(os.environ.get("CKPTCONV_JUDGES", ""), "modelopt/torch/quantization/qtensor/nvfp4_tensor.py")
    if not file.exists():
        pytest.skip("no nvidia-modelopt")
    root = "modelopt.torch.quantization"
    base = type("Base", (), {"__init__": lambda self, *values: self.__dict__.update(values=values)})
    parts = {
        "backends.utils": ["fp4_compatible"],
        "utils": ["reduce_amax", "reduce_block_amax", "reduce_block_padding"],
    }
    parts |= {
        "utils.numeric_utils": ["E2M1_MAX", "E4M3_MAX", "fp8_max_for_normalization"],
        "qtensor": [],
        "backends": [],
    }
    parts |= {"qtensor.base_qtensor": ["BaseQuantizedTensor"]}
    for name in ("modelopt", "modelopt.torch", root, *(f"{root}.{each}" for each in parts)):
        stub = types.ModuleType(name)
        stub.__dict__.update(dict.fromkeys(parts.get(name.removeprefix(f"{root}."), []), base), __path__=[])
        monkeypatch.setitem(sys.modules, name, stub)
    spec = importlib.util.spec_from_file_location(f"{root}.qtensor.nvfp4_tensor", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    packed, scale = codes(shape[0], shape[1] // 2), codes(shape[0], shape[1] // 16).view(torch.float8_e4m3fn)
    tensor, second = module.NVFP4QTensor(), torch.rand(()) * 3
    tensor.metadata, tensor._quantized_data = {"shape": torch.Size(shape)}, packed
    want = tensor.dequantize(dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
    model = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": second}
    found = converted(tmp_path, model, dtype)["a.weight"]
    assert_equal(found + 0.0, want + 0.0)  # modelopt gives 0 for -0


def test_a_model_gives_the_same_logits(tmp_path: Path) -> None:
    """A Llama in blocks of fp8 gives the same logits with the converted weights as with weights that the test
    dequantizes itself.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).to(torch.bfloat16).eval()
    state: dict[str, torch.Tensor] = {}
    real: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if "proj" not in key:
            state[key] = real[key] = value.clone()
            continue
        blocks = value.float().view(value.shape[0] // 128, 128, value.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        state[key] = (blocks / scale[:, None, :, None]).view(value.shape).to(torch.float8_e4m3fn)
        state[f"{key}_scale_inv"] = scale
        again = state[key].float().view_as(blocks) * scale[:, None, :, None]
        real[key] = again.view(value.shape).to(torch.bfloat16)
    (tmp_path / "q").mkdir()
    save_file(state, tmp_path / "q/model.safetensors", {"format": "pt"})
    model.config.save_pretrained(tmp_path / "q")
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    ckptconv.convert(tmp_path / "q/model.safetensors", tmp_path / "plain.safetensors", dtype="bf16")
    found = load_file(tmp_path / "plain.safetensors")
    assert found.keys() == real.keys()
    ids = torch.arange(16)[None]
    model.load_state_dict(real)
    want = model(ids).logits
    model.load_state_dict(found)
    assert torch.equal(model(ids).logits, want)
