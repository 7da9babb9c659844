"""One conversion, a folder of them, or many of them in processes.

May import: ``safety`` and what stands below it. Start with ``convert``, which opens, edits, plans and writes.
"""
