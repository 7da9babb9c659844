"""Compare two checkpoints, whatever their containers.

===============  ========================================================================
``differences``  what is found, as data
``same_bytes``   threads that compare byte ranges of two files
``values``       pairs of tensors: as bytes where they can be, else as numbers
``pairing``      two graphs walked at once: names, and what is no tensor
``suggestions``  the command that compares what is alike, where no name is in both
``diff``         the steps of a comparison, in order
===============  ========================================================================
"""
