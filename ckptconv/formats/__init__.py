"""One reader and writer for each container of checkpoints, and names for files that are none of them.

May import: ``checkpoint`` and what stands below it, not ``edits`` or ``output``. Start
with ``opening``, then ``torch_zip``.
"""
