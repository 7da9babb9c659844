"""The configuration of the documentation: ``sphinx-build -W docs site``.

The build and the pages load nothing from other hosts. If ``python -m web.build`` was run before, the site contains the
page that converts files in the browser.
"""

from pathlib import Path

import ckptconv

project = "ckptconv"
author = "the ckptconv authors"
release = version = ckptconv.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["make_picture.py", "make_page_picture.py"]
html_theme = "furo"
if (page := Path(__file__).parents[1] / "web" / "dist").is_dir():
    html_extra_path = [str(page)]
    tags.add("page")  # noqa: F821 - sphinx gives it
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_js_files = ["search.js"]
html_title = f"ckptconv {version}"
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
smartquotes = False  # smart quotes would turn -- into a dash
pygments_style = "friendly"
pygments_dark_style = "monokai"
#: ``sphinx-build -b man docs docs/man`` makes the manual page that the wheel installs.
man_pages = [("reference/help", "ckptconv", "change what a PyTorch checkpoint says about its tensors", [author], 1)]
