"""What loading a checkpoint would run: nothing, code that it needs, or code that no checkpoint needs.

May import: ``formats`` and what stands below it. Start with ``scan``.
"""
