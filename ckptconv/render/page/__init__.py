"""Render a checkpoint as one page of HTML that needs no network: a treemap, a tree, a table, and the commands.

``data`` says what is in a page, ``document`` puts it together of ``page.html``, ``page.css`` and ``page.js``. What a
file says stands in the page as JSON alone, which the script shows as text; nothing of it is markup or code. ``vendor``
has the layout of treemaps, d3-hierarchy, and makes it again of what its author published.
"""
