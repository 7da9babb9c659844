"""Byte ranges, and how to read, check and compute their bytes, a buffer at a time.

May import: ``pickles`` and the packages below it. Start with ``spans`` (the data), then ``sources`` (what is read).
"""
