"""Convert objects that contain only data to plain data, so that torch's safe loader accepts the complete file.

Start with ``table``, then ``making``.
"""
