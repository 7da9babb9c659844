"""Planned files and folders to disk: each appears whole or not at all.

May import: ``checkpoint`` and what stands below it, not ``edits`` or ``formats``. Start with ``files``.
"""
