"""Markdown: a record's sections as a page, for report.md and run descriptions in MLflow.

The page is narrow enough for MLflow. Texts from records are escaped, so that they cannot add links
or images.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from perfexp.comparison import comparison_table
from perfexp.comparison.document import Comparison
from perfexp.records.analysis import Analysis
from perfexp.records.grid import Commands, Grid, Section, escape_markdown
from perfexp.records.subject import one_line
from perfexp.report.sections import sections

#: Longest code line, and longest word in it, in characters.
_CODE_WIDTH, _LONGEST_WORD = 76, 68


def markdown(analysis: Analysis, plots: Sequence[str] = ()) -> str:
    """Return a record's sections as a page, with environment and command.

    The run writes it as report.md, and MLflow shows it as the run's description.

    Args:
        plots: file names of plots beside the page; they follow the first section.
    """
    (title, content), *others = sections(analysis, is_whole=True)
    parts = map(section, others)
    images = ""
    for name in plots:
        images += f"![{escape_markdown(name.partition('.')[0])}]({quote(name)})\n"
    above = (f"# {escape_markdown(title)}\n", section(Section("", content)), images)
    return "\n".join(filter(None, (*above, *parts)))


def comparison(compared: Comparison) -> str:
    """Return a whole comparison (`perfexp compare`) as a page.

    It becomes comparison.md, and the description of a comparison in MLflow.
    """
    parts = comparison_table.sections(compared, has_kernels=True)
    return "\n".join(["# Comparison\n", *map(section, parts)])


def section(part: Section) -> str:
    """Return a section as Markdown, with a final line break.

    Pages of runs and comparisons, and descriptions of sweeps consist of such sections.
    """
    title = escape_markdown(part.title[:1].upper() + part.title[1:])
    if isinstance(part.content, Grid):
        text = part.content.markdown()
    elif isinstance(part.content, Commands):
        text = "".join(map(code, part.content))
    else:
        text = _list(part.content)
    return f"## {title}\n\n{text}" if title else text


def _list(lines: Iterable[str]) -> str:
    """Return lines as a list. A line that begins with a space continues the previous line."""
    items: list[str] = []
    for line in lines:
        if line.startswith(" ") and items:
            items[-1] += f"; {line.strip()}"
        else:
            items.append(line)
    return "".join(f"- {escape_markdown(one_line(item))}\n" for item in items)


def code(command: str) -> str:
    """Return a command as a code block that fits the page and can be pasted into a shell.

    Lines that are too long for the page continue after a backslash.
    """
    try:
        words = shlex.split(one_line(command))
    except ValueError:  # a foreign record may hold anything
        words = [one_line(command)]
    lines = [""]
    for word in words:
        # a shell joins the pieces, since it removes a backslash with the line break after it
        for index, start in enumerate(range(0, max(len(word), 1), _LONGEST_WORD)):
            piece = shlex.quote(word[start : start + _LONGEST_WORD])
            if index:
                lines[-1] += "\\"
                lines.append(piece)
            elif len(lines[-1]) + len(piece) + len("  \\") > _CODE_WIDTH:
                lines[-1] += " \\"
                lines.append(f"  {piece}")
            else:
                lines[-1] += f" {piece}" if lines[-1] else piece
    return "".join(f"    {line}\n" for line in lines)
