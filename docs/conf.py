"""Sphinx configuration: `sphinx-build -W docs BUILD_DIR`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import results  # the root is on the path now

project = "perfexp"
author = "the perfexp authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["measured.md"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "perfexp"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_copyright = False

_PLACE = "<!-- results -->"
_LINK = re.compile(r"(\]\((?:\.\./)?results/[\w-]+)\.json\)")


def _make_results(app):
    """Write the pages of results/ from their data."""
    results.write(Path(app.srcdir) / "results")


def _link_results(app, docname, source):
    """Put results/ into the table of contents, and lead links from the data to their page."""
    if docname == "index":
        listed = [
            "```{toctree}",
            ":hidden:",
            ":caption: Results",
            ":maxdepth: 1",
            "",
            "results/index",
            "```",
        ]
        source[0] = source[0].replace(_PLACE, "\n".join(listed))
    if docname == "results/index":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    source[0] = _LINK.sub(r"\1.md)", source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", _make_results)
    app.connect("source-read", _link_results)
