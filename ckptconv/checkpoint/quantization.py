"""Find quantized weights by the names, dtypes and shapes of tensors, and by ``config.json`` next to the checkpoint.

A quantized weight consists of codes and scales, which are tensors of the same module. The layouts are:

    fp8       W (float8), and W_scale_inv, W_scale or scale_W: one number for the tensor, a row, or a block
    MXFP8     W (float8), and W_scale or W_scale_inv: a power of two for 32 codes of a row
    NVFP4     W_packed, W_scale (float8, for 16 codes) / W_global_scale     compressed-tensors
              W (uint8), W_scale (float8, for 16 codes) × W_scale_2         ModelOpt
    MXFP4     W_packed, W_scale: a power of two for 32 codes                compressed-tensors
              W_blocks, W_scales: the same, and the matrix is transposed    gpt-oss

A layout is used only if exactly one interpretation fits. The block of an fp8 weight is in ``quantization_config`` of
``config.json``. Without it, blocks are 128×128, as DeepSeek and others write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from ckptconv.checkpoint.rebuild_functions import FROM_TYPE, PARAMETER
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.lazy_regex import regex
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Global, List, Object, Tuple, Value, args_of, is_count

_FLOAT8 = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
_FP4 = frozenset({"uint8", "float4_e2m1fn_x2"})
_NUMBERS = frozenset({"float32", "bfloat16", "float16"})
_EXPONENTS = frozenset({"uint8", "float8_e8m0fnu"})
_MOST = 20  # attributes of a tensor of torchao, and sizes of its block
_LONGEST = 60  # characters of a name
_USUAL = ((128, 128),)
_MX = (1, 32)
#: Scales of inputs, which nothing reads once the weight of their module is not quantized.
_OF_INPUTS = ("input_scale", "input_scale_inv", "input_global_scale", "scale_input")
_MARK = "scaled_fp8"  # of ComfyUI: an empty tensor
#: The last part of a name that only a scale of a weight has.
_SCALE = regex(r"(?!input_)(.*weight_scale(_inv|_2)?|.*_scale_inv|scale_weight|weight_global_scale)")
_CONVERTER = "convert_checkpoint of compressed-tensors (CompressedTensorsDequantizer)"
#: Tensors of layouts that are not in the table, by the last parts of their names, with the program that decodes them.
_OTHERS = (
    (regex(r"(.*\.)?qweight"), "GPTQ or AWQ", "GPTQModel (dequantize_weight() of each layer)"),
    (regex(r".*(\.SCB|\.quant_state\.bitsandbytes__\w+)"), "bitsandbytes", "model.dequantize() of transformers"),
    (regex(r"(.*\.)?weight_shape"), "packed integers of compressed-tensors", _CONVERTER),
)


@dataclass(frozen=True)
class QuantizationConfig:
    """The content of ``quantization_config``.

    Attributes:
        method: The ``quant_method``, or an empty string.
        blocks: The sizes of blocks that it contains, as rows and columns.
        whole: Whether it allows scales of complete tensors or rows.
    """

    method: str
    blocks: tuple[tuple[int, int], ...] = ()
    whole: bool = False


@dataclass(frozen=True)
class Quantized:
    """A quantized weight in a state dict.

    Attributes:
        weight: The name of the weight after it is dequantized.
        codes: The name of the tensor with its codes.
        scales: The names of its scales.
        others: The names of its tensors that are not needed after it is dequantized.
        layout: The name of its layout.
        shape: The shape of the dequantized weight, or () if it is unknown.
        matrix: The number of matrices, and the rows and columns of each, as they are stored.
        block: The rows and columns of a block with one scale.
        fp4: Whether each byte contains two codes.
        divides: Whether the scale is divided by the second scale, and not multiplied.
        transposed: Whether each matrix is stored transposed.
        trouble: The reason why it cannot be dequantized, the expected and the found value, or None.
    """

    weight: str
    codes: str
    scales: tuple[str, ...]
    others: tuple[str, ...] = ()
    layout: str = ""
    shape: tuple[int, ...] = ()
    matrix: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int] = (0, 0)
    fp4: bool = False
    divides: bool = False
    transposed: bool = False
    trouble: tuple[str, object, object] | None = None


class _Unreadable(Exception):
    """Raised if a weight does not fit its layout, with the reason, the expected and the found value."""


def read_config(config: Any) -> QuantizationConfig | None:
    """Return the quantization in `config`, the content of a ``config.json``. Return None if it contains none."""
    inner = config.get("text_config") if isinstance(config, dict) else None
    for each in (config, inner):
        found = each.get("quantization_config") if isinstance(each, dict) else None
        if isinstance(found, dict):
            break
    else:
        return None
    method = found.get("quant_method")
    size, blocks, whole = found.get("weight_block_size"), [], False
    if method == "fp8":
        whole = size is None
    blocks += [_pair(size)]
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            whole = whole or weights.get("strategy") in ("tensor", "channel")
            blocks += [_pair(weights.get("block_structure")), _pair([1, weights.get("group_size")])]
    return QuantizationConfig(method if isinstance(method, str) else "", tuple(filter(None, blocks)), whole)


def _pair(value: Any) -> tuple[int, int] | None:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    return (value[0], value[1]) if is_pair else None


def find_quantized(tensors: Mapping[str, TensorInfo], config: QuantizationConfig | None) -> list[Quantized]:
    """Return the quantized weights in a state dict. `tensors` are its tensors by name.

    A weight that does not fit its layout is returned with its ``trouble``. `config` is None if there is no config.
    """
    found = []
    for name, info in tensors.items():
        each = None if is_mark(name) else _names(name, info, tensors)
        if each is None:
            continue
        try:
            found.append(_fitted(each, tensors, config))
        except _Unreadable as error:
            found.append(replace(each, trouble=error.args))
    return found


def is_mark(name: str) -> bool:
    """Return whether `name` is that of an empty tensor that only marks checkpoints with quantized weights."""
    return name.rpartition(".")[2] == _MARK


def orphans(tensors: Mapping[str, TensorInfo], found: list[Quantized]) -> Iterator[str]:
    """Yield the names of float8 tensors without a scale and of scales without a weight, if they are not in `found`."""
    used = {name for each in found for name in (each.codes, *each.scales, *each.others)}
    used.update(filter(is_mark, tensors) if found else ())
    for name, info in tensors.items():
        is_lone = info.dtype in _FLOAT8 and info.shape
        if name not in used and (is_lone or _SCALE.fullmatch(name.rpartition(".")[2])):
            yield name


def of_other_programs(tensors: Mapping[str, TensorInfo]) -> tuple[int, str, str] | None:
    """Return the number of weights in a layout of another program, the name of the layout, and the program.

    Return None if there are no such weights.
    """
    for pattern, layout, program in _OTHERS:
        if n := sum(bool(pattern.fullmatch(name)) for name in tensors):
            return n, layout, program
    n = sum(info.dtype == "int8" and f"{name}_scale" in tensors for name, info in tensors.items())
    return (n, "8-bit integers with scales", _CONVERTER) if n else None


def torchao_layout(node: Value) -> str | None:
    """Return the class of torchao whose tensor `node` builds, with its block size, as a text.

    Return None for other tensors.

    The call is ``_rebuild_from_type_v2(function, class, arguments, state)``, possibly inside a parameter.
    """
    while isinstance(node, Call) and str(node.callable) in PARAMETER and args_of(node):
        node = args_of(node)[0]
    args = args_of(node) if isinstance(node, Call) and str(node.callable) in FROM_TYPE else []
    cls = args[1] if len(args) > 3 else None
    if not isinstance(cls, Global) or cls.module.partition(".")[0] != "torchao":
        return None
    state = args[3].items[0] if isinstance(args[3], Tuple) and args[3].items else args[3]
    entries = islice(state.entries(), _MOST) if isinstance(state, Object) else ()  # many tensors can share it
    block = next((value for key, value in entries if key == "block_size"), None)
    sizes = block.items if isinstance(block, Tuple) else block.elements() if isinstance(block, List) else [block]
    shown = "×".join(str(size) for size in islice(sizes, _MOST) if is_count(size))
    return f"{cls.name[:_LONGEST]} of torchao" + (f" in blocks of {shown}" if shown else "")


def _names(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Quantized | None:
    """Return the names of the quantized weight whose codes are the tensor `name`, or None if there is none.

    `info` is this tensor, and `tensors` are all tensors of the state dict.
    """
    module, dot, last = name.rpartition(".")
    module += dot
    others = tuple(module + each for each in _OF_INPUTS if last.startswith("weight") and module + each in tensors)
    if info.dtype in _FLOAT8:
        candidates = [f"{name}_scale_inv", f"{name}_scale", f"{module}scale_{last}"]
        candidates += [module + each for each in ("scale", "scale_inv") if last == "weight"]
        scales = tuple(each for each in candidates if each in tensors)
        return Quantized(name, name, scales, others, "fp8") if scales else None
    if info.dtype not in _FP4:
        return None
    weight, fp4 = name.removesuffix("_packed"), True
    if name.endswith("_blocks") and f"{name[:-6]}scales" in tensors:
        return Quantized(name[:-7], name, (f"{name[:-6]}scales",), others, "MXFP4", fp4=fp4, transposed=True)
    second = f"{weight}_scale_2" if weight == name else f"{weight}_global_scale"
    if f"{weight}_scale" not in tensors or (weight == name and second not in tensors):
        return None
    nv = second in tensors or tensors[f"{weight}_scale"].dtype in _FLOAT8
    scales = (f"{weight}_scale", *([second] if nv else []))
    return Quantized(weight, name, scales, others, "NVFP4" if nv else "MXFP4", fp4=fp4, divides=nv and weight != name)


def _fitted(each: Quantized, tensors: Mapping[str, TensorInfo], config: QuantizationConfig | None) -> Quantized:
    """Return `each` with its layout, shape, matrix and block.

    Raise _Unreadable if the tensors do not fit the layout.
    """
    codes, fp8 = tensors[each.codes], not each.fp4
    missing = [name for name in each.scales if name not in tensors]
    if missing:
        raise _Unreadable(f"{each.codes} has no {missing[0]}", "all scales", "none of that name")
    if fp8 and len(each.scales) > 1:
        raise _Unreadable(f"{each.codes} has several scales", "one of them", ", ".join(each.scales))
    if (zero := f"{each.weight}_zero_point") in tensors:
        raise _Unreadable(f"{each.codes} has a zero point, {zero}", "a layout without zero points", "one with them")
    for name in (each.codes, *each.scales):
        if tensors[name].kind != "strided" or not tensors[name].contiguous:
            raise _Unreadable(f"{name} is not a contiguous tensor", "contiguous", tensors[name].kind)
    scale, *second = (tensors[name] for name in each.scales)
    allowed = _NUMBERS | _EXPONENTS if fp8 else {"float8_e4m3fn"} if second else _EXPONENTS
    if scale.dtype not in allowed:
        raise _Unreadable(
            f"{each.scales[0]} has a dtype that scales do not have", ", ".join(sorted(allowed)), scale.dtype
        )
    for other, info in zip(each.scales[1:], second, strict=True):
        if prod(info.shape) != 1 or info.dtype not in _NUMBERS:
            raise _Unreadable(f"{other} is not a single number", "1 element", f"{info.dtype} {[*info.shape]}")
    shape = codes.shape
    if each.transposed:
        if len(shape) != 4 or shape[3] != 16 or scale.shape != shape[:3]:
            raise _Unreadable(f"{each.scales[0]} does not fit {each.codes}", f"{[*shape[:3]]}", f"{[*scale.shape]}")
        shape = (*shape[:2], shape[2] * 32)
        matrix, block = (shape[0], shape[1], shape[2]), _MX
    else:
        shape = (*shape[:-1], 2 * shape[-1]) if each.fp4 and shape else shape
        matrix, block = _grid(each, shape, scale, config)
    label = each.layout
    if fp8:
        whole = matrix[1:] == block
        label = f"fp8 in blocks of {block[0]}×{block[1]}"
        if block == _MX and scale.dtype in _EXPONENTS:
            label = "MXFP8"
        elif whole:
            label = "fp8 per tensor"
        elif block in ((1, matrix[2]), (matrix[1], 1)):
            label = "fp8 per channel"
    shape = (shape[0], shape[2], shape[1]) if each.transposed else shape
    return replace(each, layout=label, shape=shape, matrix=matrix, block=block)


def _grid(
    each: Quantized, shape: tuple[int, ...], scale: TensorInfo, config: QuantizationConfig | None
) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the number of matrices, their rows and columns, and the block of a weight of `shape`.

    Raises _Unreadable unless exactly one block fits the shape of `scale` and the `config`.
    """
    if not shape or 0 in shape:
        raise _Unreadable(f"{each.codes} has no rows", "at least 1 dimension", f"{[*shape]}")
    rows, columns = (1, *shape)[-2:]
    grid, outer = scale.shape, shape[:-2]
    exponents = scale.dtype in _EXPONENTS
    says = config if config and (config.blocks or config.whole) and not each.fp4 else None
    if each.fp4:
        blocks: tuple[tuple[int, int], ...] = (_MX if exponents else (1, 16),)
    else:
        blocks = says.blocks if says else (*_USUAL, *([_MX] if exponents else []))
    whole = says.whole if says else not each.fp4
    is_block = len(grid) > 1 and any(rows <= a and columns <= b for a, b in blocks)
    if prod(grid) == 1 and whole and not is_block:
        return (1, prod(outer) * rows, columns), (prod(outer) * rows, columns)
    full = (*grid, *(1 for _ in range(len(shape) - len(grid)))) if grid else (1,) * len(shape)
    tall, wide = (1, *full)[-2:]
    if whole and 1 in (tall, wide) and tall in (1, rows) and wide in (1, columns):
        blocks += ((rows if tall == 1 else 1, columns if wide == 1 else 1),)
    fitting = {
        (min(a, rows), min(b, columns)): (a, b)
        for a, b in blocks
        if (-(-rows // a), -(-columns // b)) == (tall, wide) and full[:-2] == outer
    }
    if len(fitting) != 1:
        listed = " or ".join(f"{a}×{b}" for a, b in dict.fromkeys(blocks))
        what = "does not fit" if not fitting else "fits in several ways"
        raise _Unreadable(f"{each.scales[0]} {what} {each.codes} {[*shape]}", f"blocks of {listed}", f"{[*grid]}")
    (block,) = fitting.values()
    return (prod(outer), rows, columns), block
