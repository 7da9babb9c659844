"""Answer questions about checkpoints without changing them: what is inside, is it sound, does it load, are two the
same.

May import ``conversion`` and what is below it. Start with ``summary``.
"""
