"""Convert the bytes of a pickle to a graph of nodes with paths, and back.

Nothing in a pickle is executed, and this package knows nothing of torch. May import: ``errors``, ``limits``. Start with
``graph`` (the nodes), then read ``parser`` and ``emitter``. The language: https://docs.python.org/3/library/pickle.html
and, for each opcode, CPython's ``Lib/pickletools.py``.
"""
