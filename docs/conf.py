"""Sphinx configuration: `sphinx-build -W docs BUILD_DIR`."""

from __future__ import annotations

import re
from pathlib import Path

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
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)?results/([\w-]+)\.md\)")


def _link_results(app, docname, source):
    """Put results/ into the table of contents, and leave only the text of links to pages that are not there."""
    folder = Path(app.srcdir) / "results"
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
        source[0] = source[0].replace(
            _PLACE, "\n".join(listed) if (folder / "index.md").is_file() else ""
        )
    if docname == "results/index":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    source[0] = _LINK.sub(
        lambda link: link[0] if (folder / f"{link[2]}.md").is_file() else link[1], source[0]
    )


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _link_results)
