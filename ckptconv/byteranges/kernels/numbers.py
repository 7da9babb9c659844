"""Read numbers of all dtypes that torch has as float64, int64 or complex128."""

from __future__ import annotations

import torch

_NUMBERS = {
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex32",
    "complex64",
    "complex128",
}


def is_number(name: str) -> bool:
    """Return whether elements of the dtype `name` are numbers (or bool), one in each item, and torch has this dtype."""
    return name in _NUMBERS and isinstance(getattr(torch, name, None), torch.dtype)


def as_real(numbers: torch.Tensor) -> torch.Tensor:
    """Return the real `numbers` as float64."""
    if numbers.dtype == torch.bool:
        return as_whole(numbers).double()
    return (numbers.float() if numbers.dtype.itemsize == 1 else numbers).double()


def as_whole(numbers: torch.Tensor) -> torch.Tensor:
    """Return the integers or bools `numbers` as int64. The upper half of uint64 becomes negative."""
    if numbers.dtype == torch.uint64:
        return numbers.view(torch.int64)
    return (numbers.view(torch.uint8) != 0 if numbers.dtype == torch.bool else numbers).to(torch.int64)


def as_complex(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers` as complex128."""
    if numbers.dtype == torch.complex32:
        return torch.view_as_complex(numbers.view(torch.float16).double().view(-1, 2))
    return (
        numbers.to(torch.complex128)
        if numbers.is_complex()
        else torch.complex(as_real(numbers), torch.zeros(()).double().expand(len(numbers)))
    )


def magnitudes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of complex `numbers`. A number with a NaN component has the magnitude NaN."""
    values = numbers.abs()
    values[numbers.isnan()] = torch.nan
    return values


def extremes(numbers: torch.Tensor) -> tuple[float | int, float | int]:
    """Return the smallest and the largest of `numbers`, exactly. There must be at least one."""
    if numbers.is_floating_point():
        low, high = numbers.aminmax()
        return float(low) + 0.0, float(high) + 0.0  # -0.0 is 0.0
    words = as_whole(numbers)
    if numbers.dtype == torch.uint64:  # torch cannot compare it
        low, high = (words ^ torch.iinfo(torch.int64).min).aminmax()
        return int(low) + (1 << 63), int(high) + (1 << 63)
    low, high = words.aminmax()
    return int(low), int(high)
