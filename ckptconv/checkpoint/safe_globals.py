"""The globals and opcodes that torch's ``weights_only`` unpickler accepts.

Source: ``torch/_weights_only_unpickler.py`` of torch 2.13. Tests compare the lists with torch's own. Older versions
accept less: ``_rebuild_wrapper_subclass`` and ``_rebuild_tensor_v3`` are accepted since 2.5. The effects of the
calls and opcodes are modelled in :mod:`ckptconv.checkpoint.weights_only`.
"""

from __future__ import annotations

from ckptconv.dtypes import BY_NAME, BY_STORAGE_CLASS
from ckptconv.pickles.graph import Global, Graph, Value, children, imported_name
from ckptconv.pickles.machine import CODES
from ckptconv.pickles.rows import RowCall, RowForm, RowId, outline

#: The functions that ``torch.save`` writes for most tensors and parameters.
_OF_TENSORS = ("collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter")
#: The classes of tensors of torch before 0.4, with their dtypes.
TENSOR_CLASSES = {
    "BFloat16Tensor": "bfloat16",
    "BoolTensor": "bool",
    "ByteTensor": "uint8",
    "CharTensor": "int8",
    "DoubleTensor": "float64",
    "FloatTensor": "float32",
    "HalfTensor": "float16",
    "IntTensor": "int32",
    "LongTensor": "int64",
    "ShortTensor": "int16",
}
_TYPED_STORAGES = {name for name in BY_STORAGE_CLASS if name and name != "UntypedStorage"}
_QUANTIZED = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")

ALLOWED: frozenset[str] = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
        "torch._tensor._rebuild_from_type_v2",
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
    }
    | {f"torch.{name}" for name in BY_NAME}
    | {f"torch.{name}" for name in _TYPED_STORAGES}
    | {f"torch.cuda.{name}" for name in _TYPED_STORAGES.difference(_QUANTIZED)}
    | {f"torch.{where}{name}" for name in TENSOR_CLASSES for where in ("", "cuda.")}
    | {f"torch.{where}sparse.{name}" for name in TENSOR_CLASSES if name != "BoolTensor" for where in ("", "cuda.")}
    | {
        f"torch.{name}"
        for name in (
            "per_tensor_affine",
            "per_tensor_symmetric",
            "per_channel_affine",
            "per_channel_symmetric",
            "per_channel_affine_float_qparams",
        )
    }
    | {
        f"torch._utils._rebuild_{name}"
        for name in (
            "parameter",
            "parameter_with_state",
            "qtensor",
            "tensor",
            "tensor_v2",
            "tensor_v3",
            "sparse_tensor",
            "meta_tensor_no_storage",
            "nested_tensor",
            "wrapper_subclass",
            "device_tensor_from_numpy",
            "device_tensor_from_cpu_tensor",
        )
    }
)

_OPCODES = (
    "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "MARK", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET",
    "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINPERSID", "BINGET",
    "LONG_BINGET", "BINPUT", "LONG_BINPUT", "LONG1", "PROTO", "STOP",
)  # a table  # fmt: skip
_TAKEN = {CODES[name][0] for name in _OPCODES}

#: Globals that ``import torch`` adds to the list.
IMPORTED_WITH_TORCH = frozenset(
    (
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
    )
)
#: Globals that modules of torch add to the list when they are imported.
ADDED_BY = {
    "torch.distributed.tensor": frozenset(
        (
            "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed.tensor.DTensor",
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
            "torch.distributed.tensor.placement_types.Partial",
            "torch.distributed.tensor.placement_types.Replicate",
            "torch.distributed.tensor.placement_types.Shard",
            "torch.distributed.tensor.placement_types._StridedShard",
        )
    ),
    "torch._dynamo": frozenset(("torch._dynamo.decorators._DimRange",)),
}

#: Classes that torchao 0.18 adds to the list when it is imported, by their modules below ``torchao``.
_TORCHAO = {
    "float8.config": "ScalingGranularity",
    "float8.float8_training_tensor": "Float8TrainingTensor GemmInputRole LinearMMConfig ScaledMMConfig",
    "float8.fsdp_utils": "WeightWithDynamicFloat8CastTensor",
    "float8.inference": "Float8MMConfig",
    "optim.subclass_4bit": "OptimState4bit",
    "optim.subclass_8bit": "OptimState8bit",
    "optim.subclass_fp8": "OptimStateFp8",
    "prototype.quantization.gguf.gguf_quantized_tensor": "GGUFQuantizedTensor",
    "quantization": (
        "Float8Tensor Int4PlainInt32Tensor Int4PreshuffledTensor Int4Tensor Int4TilePackedTo4dTensor "
        "Int8Tensor IntxOpaqueTensor IntxUnpackedToInt8Tensor"
    ),
    "quantization.granularity": "PerBlock PerRow PerTensor",
    "quantization.quant_primitives": "MappingType ZeroPointDomain",
    "quantization.quantize_.common.kernel_preference": "KernelPreference",
    "quantization.quantize_.workflows.float8.float8_packing_format": "Float8PackingFormat",
    "quantization.quantize_.workflows.float8.float8_sparse_2x4_1d_data_1d_metadata_tensor": (
        "Float8Sparse2x4_1DData1DMetadataTensor"
    ),
    "quantization.quantize_.workflows.float8.float8_sparse_2x4_2d_data_2d_metadata_tensor": (
        "Float8Sparse2x4_2DData2DMetadataTensor"
    ),
    "quantization.quantize_.workflows.float8.float8_tensor": "QuantizeTensorToFloat8Kwargs",
    "quantization.quantize_.workflows.int8.int8_tensor": "QuantizeTensorToInt8Kwargs",
    "quantization.quantize_.workflows.intx.intx_packing_format": "IntxPackingFormat",
    "quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor": (
        "IntxUnpackedToInt8TensorActivationQuantization"
    ),
    "quantization.quantize_.workflows.nf4.nf4_tensor": "NF4Tensor",
}
_TORCHAO_MX = {
    "config": "ScaleCalculationMode",
    "mx_tensor": "MXTensor QuantizeTensorToMXKwargs",
    "nvfp4_tensor": "NVFP4Tensor QuantizeTensorToNVFP4Kwargs",
}
_ADDED_BY_TORCHAO = {
    module: frozenset(f"{module}.{inner}.{name}" for inner, names in table.items() for name in names.split())
    for module, table in (("torchao", _TORCHAO), ("torchao.prototype.mx_formats", _TORCHAO_MX))
}


class PlainOutline:
    """The children of nodes, without the nodes inside plain rows.

    A row is plain if it makes a tensor or parameter as ``torch.save`` writes it. Then it contains only globals that are
    neither refused nor converted. So most passes over a graph need not create its nodes.
    """

    def __init__(self) -> None:
        self._plain: dict[RowForm, bool] = {}

    def __call__(self, node: Value) -> list[Value]:
        """Return the children of `node`. A plain row has its globals and its persistent id."""
        return outline(node) if self.is_plain(node) else children(node)

    def is_plain(self, node: Value) -> bool:
        """Return whether `node` is a plain row, or the persistent id of one."""
        form = node.row if isinstance(node, RowCall) else node.form if isinstance(node, RowId) else None
        if form and form not in self._plain:
            called = [imported_name(each, 2) for each in (*form.functions, *form.values) if isinstance(each, Global)]
            is_known = (name in _OF_TENSORS or name.removeprefix("torch.") in BY_STORAGE_CLASS for name in called)
            self._plain[form] = all(is_known)
        return form is not None and self._plain[form]


def is_allowed(node: Global) -> bool:
    """Return whether the unpickler accepts `node`, also by a name that Python 2 has for an accepted global."""
    return imported_name(node, 2) in ALLOWED


def is_torchs(node: Global) -> bool:
    """Return whether the unpickler accepts `node`, either always or after a module of torch is imported."""
    name = imported_name(node, 2)
    return name in ALLOWED or name in IMPORTED_WITH_TORCH or any(name in names for names in ADDED_BY.values())


def needed_import(name: str) -> str | None:
    """Return the module of torch or torchao whose import makes the unpickler accept the global `name`.

    Return None if none does.
    """
    if not name.startswith("torch"):
        return None
    return next((module for module, names in {**ADDED_BY, **_ADDED_BY_TORCHAO}.items() if name in names), None)


def refused_opcodes(graph: Graph) -> list[str]:
    """Return the names of the opcodes in the source of `graph` that the unpickler does not know, sorted."""
    refused = graph.used - _TAKEN
    return sorted(name for name, code in CODES.items() if code[0] in refused) if refused else []
