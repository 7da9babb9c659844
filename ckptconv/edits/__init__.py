"""The edits that a user requests, and their application to the graph of a checkpoint, in place.

May import: ``checkpoint`` and the packages below it, not ``formats`` or ``output``.
Start with ``options``, then ``apply``.
"""
