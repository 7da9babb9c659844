"""Make objects that are only data plain, so that torch's safe loader takes the whole file.

Start with ``table``, then ``making``.
"""
