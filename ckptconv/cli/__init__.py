"""The command line: one module for each command, and ``render`` for what they print.

May import: everything. Start with ``main``.
"""
