"""ckptconv: change what a PyTorch checkpoint says about its tensors, without running it, loading it, or having its devices."""

from ckptconv.conversion import convert
from ckptconv.errors import CkptconvError
from ckptconv.model import Report
from ckptconv.summary import Summary, inspect

__version__ = "0.1.0"
__all__ = ["CkptconvError", "Report", "Summary", "convert", "inspect"]
