"""One reader and writer for each container of checkpoints, and names for files that are not checkpoints.

May import: ``checkpoint`` and the packages below it, not ``edits`` or ``output``. Start with ``opening``, then read
``torch_zip``.
"""
