"""Convert pickle bytes to an inert graph of nodes with paths, and back.

Nothing that a pickle names is executed, and nothing here knows torch. May import: ``errors``, ``limits``. Start with
``graph`` (the nodes), then read ``parser`` and ``emitter``. The language: https://docs.python.org/3/library/pickle.html
and, for each opcode, CPython's ``Lib/pickletools.py``.
"""
