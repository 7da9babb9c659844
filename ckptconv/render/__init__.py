"""Render summaries, reports, differences and verdicts as text, JSON or pages.

Names from files are escaped before they are returned.

==============  =====================================================================================
``text``        widths, line breaks, colours and labelled facts, which all renderers share
``summary``     ``inspect`` of one checkpoint: whether it loads, what to type, its parts, its tensors
``table``       tensors as a table or as a tree
``folding``     the tree of the tensors' paths, in which repeated blocks are one
``values``      tensors with their extremes, means, and counts of NaN and infinities
``listing``     one line for each of many checkpoints, or for each item of a batch
``report``      what a conversion did
``difference``  what two checkpoints do not have in common
``verdict``     what ``verify`` found
``json_views``  what ``--json`` prints
``notebook``    results as HTML for notebooks
``page``        a checkpoint as a page to look at
==============  =====================================================================================
"""
