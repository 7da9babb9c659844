"""Files that one version of torch has written and that every other version must read.

``python -m tests.support.written`` adds the files of the installed torch to the folder ``written``, as ``VERSION.pt``
and ``VERSION.dcp``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.support import torch_facts, zoo

FOLDER = Path(__file__).with_name("written")
#: Dtypes of torch 2.6.
DTYPES = [
    "bfloat16", "bool", "complex128", "complex32", "complex64", "float16", "float32", "float64", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int16", "int32", "int64", "int8", "uint16", "uint32",
    "uint64", "uint8",
]  # a table  # fmt: skip


def state() -> dict[str, Any]:
    """Return the state dict of the file. Its bytes are the same in all versions, and the safe loader of each
    allows it.
    """
    dtypes = {name: zoo.counted(getattr(torch, name)) if name != "bool" else torch.tensor([True]) for name in DTYPES}
    kinds = (zoo.special_values, zoo.views, zoo.ties, zoo.small, zoo.conj_neg)
    # Other objects of the zoo contain undefined bytes, after the indices or in the last element of four bits.
    quantized = {name: each for name, each in zoo.quantized().items() if name != "quint4x2"}
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2]), torch.ones(3), (2, 3))
    sparse = {"coo": torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.ones(2), (2, 3)), "csr": csr}
    return {"dtypes": dtypes, "quantized": quantized, "sparse": sparse, **{make.__name__: make() for make in kinds}}


def distributed_state() -> dict[str, Any]:
    """Return the state dict of the DCP folder: rows, columns, a scalar and an empty tensor, numbers and text."""
    w = torch.arange(24.0).view(4, 6)
    model = {"w": w, "turned": w.t(), "half": w[:2].bfloat16(), "step": torch.tensor(7), "none": torch.empty(0, 3)}
    return {"model": model, "epoch": 3, "name": "é"}


def main() -> None:
    """Write the files of the installed torch."""
    major, minor = torch_facts.version()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo.save(state(), FOLDER / f"{major}.{minor}.pt")
        dcp.save(distributed_state(), checkpoint_id=FOLDER / f"{major}.{minor}.dcp")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    main()
