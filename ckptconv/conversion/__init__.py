"""One conversion, a folder of conversions, or many conversions in processes.

May import: ``safety`` and the packages below it. Start with ``convert``, which opens, edits, plans and writes.
"""
