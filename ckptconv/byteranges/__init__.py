"""Where bytes are, and how to read, check and compute them, a buffer at a time.

May import: ``pickles`` and what stands below it. Start with ``spans`` (the data), then ``sources`` (what is read).
"""
