"""Sphinx configuration: `sphinx-build -W docs BUILD_DIR`."""

from __future__ import annotations

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

_RESULTS = "<!-- results -->"


def _list_results(app, docname, source):
    """Put the pages of results/ into the table of contents, where there are any."""
    if docname != "index":
        return
    folder = Path(app.srcdir) / "results"
    pages = sorted((page.stem for page in folder.glob("*.md")), key=lambda name: (name != "index", name))
    lines = ["```{toctree}", ":hidden:", ":caption: Results", ":maxdepth: 1", "", *(f"results/{name}" for name in pages), "```"]
    source[0] = source[0].replace(_RESULTS, "\n".join(lines) if pages else "")


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _list_results)
