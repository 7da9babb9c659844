"""Answer questions about checkpoints without changing them: contents, damage, loading, and differences between two.

May import ``conversion`` and the packages below it. Start with ``summary``.
"""
