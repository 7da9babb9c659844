"""Loops over numbers that need torch. Imported only when numbers are cast, gathered, assembled or compared.

The import fails with a MissingTorchError if torch is not installed, or is and cannot be imported.
"""

from ckptconv.errors import MissingTorchError, require_torch

require_torch("computing numbers")
try:
    import torch  # noqa: F401
except Exception as error:
    raise MissingTorchError(
        "torch is installed, but cannot be imported",
        got=f"{type(error).__name__}: {error}",
        hint="reinstall it; inspect, verify, and convert of devices and names work without torch",
    ) from error
