"""Questions about checkpoints that change nothing: what is inside, is it sound, does it load, are two the same.

May import: ``conversion`` and what stands below it. Start with ``summary``.
"""
