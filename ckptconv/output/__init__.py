"""The writing of planned files and folders: each appears completely or not at all.

May import: ``checkpoint`` and the packages below it, not ``edits`` or ``formats``. Start with ``files``.
"""
