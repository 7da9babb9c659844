"""Pickle bytes ⇄ inert graph. Knows no torch, imports nothing that a pickle names, calls nothing.

The language: https://docs.python.org/3/library/pickle.html and, opcode by opcode, CPython's ``Lib/pickletools.py``.
"""

from ckptconv.pickles.emitter import emit
from ckptconv.pickles.parser import parse

__all__ = ["emit", "parse"]
