"""Byte ranges, and functions that read, check and compute their bytes, one buffer at a time.

May import: ``pickles`` and the packages below it. Start with ``spans`` (the data), then ``sources`` (the inputs).
"""
