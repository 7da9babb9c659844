"""Determine what loading a checkpoint would run: nothing, code that it needs, or code that no checkpoint needs.

May import: ``formats`` and the packages below it. Start with ``scan``.
"""
