"""The command line: one module for each command. The package ``render`` formats the output.

May import: everything. Start with ``main``.
"""
