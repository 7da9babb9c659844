"""Render summaries, reports, differences and verdicts as text, for a terminal or for a pipe.

Names are escaped before they get out.

==============  ==========================================================================
``text``        widths, breaks, colours, numbers: what all renderers share
``facts``       the first screen: does it load here, what to type, what is in it
``folding``     the tree of the tensors' paths, repeated blocks as one
``table``       the tensors in columns
``tree``        the tensors as a tree
``values``      the tensors with their extremes, means and what is not finite
``report``      what a conversion did
``renames``     renamed tensors, grouped by what changed in their names
``batch``       what many conversions did
``difference``  what two checkpoints do not have in common
``notebook``    results as HTML, for notebooks
``page``        a checkpoint as a page to look at
``verdict``     what is wrong with a checkpoint, or that nothing is
==============  ==========================================================================
"""
