"""Readers and writers for the formats of checkpoints, and recognition of files that are not checkpoints.

May import: ``checkpoint`` and the packages below it, not ``edits`` or ``output``. Start with ``opening``, then read
``torch_zip``.
"""
