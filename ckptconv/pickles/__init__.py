"""Pickle bytes to an inert graph of nodes with paths, and back. Runs nothing that a pickle names, and knows no torch.

May import: ``errors``, ``limits``. Start with ``graph`` (the nodes), then ``parser`` and ``emitter``.
The language: https://docs.python.org/3/library/pickle.html and, opcode by opcode, CPython's ``Lib/pickletools.py``.
"""
