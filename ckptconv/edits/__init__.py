"""What a user asks for, and doing it to the graph of a checkpoint, in place.

May import: ``checkpoint`` and what stands below it, not ``formats`` or ``output``.
Start with ``options``, then ``apply``.
"""
