"""Compare two checkpoints, whatever their containers.

===============  ================================================================
``diff``         the steps of a comparison, and the command that pairs more names
``options``      the keywords of ``diff``
``folders``      pairs of checkpoints in two folders
``pairing``      two graphs walked together: names, and everything but tensors
``values``       pairs of tensors, compared as bytes if possible, else as numbers
``differences``  the result, as data
===============  ================================================================
"""
