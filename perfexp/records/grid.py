"""Grid: a table of words for readers, as lines of text or as Markdown.

All tables on the console and in report.md are grids. Cells are finished texts. A table that is too
wide is split: each further table repeats the key columns, which identify a row. Widths are in
terminal cells; wide characters, such as Chinese, take two.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import compress, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple, Self

from rich.cells import cell_len, set_cell_size
from rich.text import Text

#: Terminal cells between two columns.
GAP = 2
#: Limits for a Markdown table, in characters per line and in columns: MLflow's pages are not wider.
WIDTH, _MOST_COLUMNS = 80, 6
#: Limit for the keys in a line, and the extra width of Markdown rules compared with gaps in text.
_KEY_WIDTH, _RULES = 40, 9


class Column:
    """Column of figures (flush right) or prose (flush left, may wrap).

    Args:
        cells: one cell per row; empty if `Grid.of_cells` fills them later.
        rank: 0 for columns in the first table. If the width is short, the column with the highest
            rank moves to a further table first.
        is_key: whether it identifies the row; every further table repeats it.
        styles: terminal style of each cell, as rich names; empty without colors.
    """

    def __init__(
        self,
        title: str,
        cells: Iterable[str] = (),
        *,
        rank: int = 0,
        prose: bool = False,
        is_key: bool = False,
        styles: Sequence[str] = (),
    ) -> None:
        self.title, self.cells = title, tuple(cells)
        self.styles = styles
        self.rank, self.prose, self.is_key = rank, prose, is_key

    @property
    def least_width(self) -> int:
        """Return the smallest width in terminal cells: the longest word, or figure, or title.

        `Grid.parts` moves columns until this fits.
        """
        cells = " ".join(self.cells).split() if self.prose else self.cells
        return max(map(cell_len, (self.title, *cells)))

    @property
    def whole_width(self) -> int:
        """Return the width in terminal cells if no cell wraps."""
        return max(map(cell_len, (self.title, *self.cells)))

    def padded(self, text: str, width: int) -> str:
        """Return a text padded to terminal cells: prose flush left, figures flush right."""
        if self.prose:
            return set_cell_size(text, width)
        return " " * (width - cell_len(text)) + text

    def chosen(self, rows: Sequence[bool]) -> Column:
        """Return the column with the rows whose flag is set.

        Args:
            rows: one flag per row.
        """
        column = copy(self)
        column.cells = tuple(compress(self.cells, rows))
        column.styles = list(compress(self.styles, rows))
        return column

    def escaped(self, width: int) -> Column:
        """Return the column for Markdown; cells longer than `width` lose their middle.

        `Grid.markdown` shortens columns this way.
        """
        column = copy(self)
        column.title = escape_markdown(self.title)
        column.cells = tuple(_shortened(cell, width) for cell in self.cells)
        return column


@dataclass(frozen=True)
class Grid:
    """Table of words: columns of equal length, and notes, which are lines below it."""

    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, str]], *, figures: Collection[str] = ()) -> Self:
        """Return a table from rows with cells by title, all with the same titles.

        Args:
            figures: titles of figure columns; all others are prose.
        """
        columns = []
        for title in rows[0] if rows else ():
            columns.append(Column(title, map(itemgetter(title), rows), prose=title not in figures))
        return cls(columns)

    @classmethod
    def of_cells(
        cls, columns: Sequence[Column], rows: Iterable[Iterable[str]], notes: Sequence[str] = ()
    ) -> Self:
        """Fill columns row by row and return a table with them; without rows they stay empty."""
        for column, cells in zip(columns, zip(*rows, strict=True), strict=False):
            column.cells = cells
        return cls(columns, notes)

    @property
    def least_width(self) -> int:
        """Return the smallest width in terminal cells that splits no word, with gaps."""
        return sum(column.least_width for column in self.columns) + GAP * (len(self.columns) - 1)

    @property
    def whole_width(self) -> int:
        """Return the width in terminal cells if no cell wraps."""
        return sum(column.whole_width for column in self.columns) + GAP * (len(self.columns) - 1)

    def widths(self, width: int) -> list[int]:
        """Return column widths that fill `width`; words are split only if `least_width` is larger.

        Extra room first goes to columns that need little of it to avoid wrapping. `text` wraps
        prose to these widths.
        """
        widths, needs = [], []
        for column in self.columns:
            widths.append(column.least_width)
            needs.append(column.whole_width - column.least_width)
        room = width - self.least_width
        for index in sorted(range(len(needs)), key=needs.__getitem__):
            growth = max(min(needs[index], room), 0)
            widths[index] += growth
            room -= growth
        return widths

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """Return the cells row by row."""
        return list(zip(*map(attrgetter("cells"), self.columns), strict=True))

    def without_empty(self) -> Grid:
        """Return the grid without columns in which every cell is empty."""
        return replace(self, columns=[column for column in self.columns if any(column.cells)])

    def split_common(self) -> tuple[list[str], Grid]:
        """Return columns with the same cell in all rows as lines, and a grid with the others.

        A line is `TITLE: CELL`. The grid keeps the notes. It has no columns if only key columns,
        such as the size, remain. Reports show figures that all points share as lines above the
        table.
        """
        lines, rest, has_figures = [], list[Column](), False
        for column in self.columns:
            if not column.is_key and len(set(column.cells)) == 1:
                lines.append(f"{column.title}: {column.cells[0]}")
            else:
                rest.append(column)
                has_figures = has_figures or not column.is_key
        if not has_figures:
            rest.clear()
        return lines, replace(self, columns=rest)

    def parts(self, width: int, most_columns: int | None = None) -> list[Grid]:
        """Return the grid as tables that fit a width in terminal cells.

        Columns without room follow in further tables, those with the highest rank first. Each
        further table repeats the keys and only has rows with figures in it. The tables have no
        notes.

        Args:
            most_columns: limit on columns per table; None for no limit.
        """
        keys = [column for column in self.columns if column.is_key] or list(self.columns[:1])
        shown, moved = list(self.columns), list[Column]()
        while Grid(shown).least_width > width or (most_columns and len(shown) > most_columns):
            figures = [column for column in shown if column not in keys]
            last = max(figures, key=lambda column: column.rank, default=None)
            if last is None or not last.rank or len(figures) == 1:
                break
            moved.append(last)
            shown.remove(last)
        if not moved:
            return [Grid(shown)]
        moved_columns = Grid([column for column in self.columns if column in moved])
        filled = list(map(any, moved_columns.lines))
        further = Grid([column.chosen(filled) for column in (*keys, *moved_columns.columns)])
        return [Grid(shown), *further.parts(width, most_columns)]

    def text(self, width: int) -> list[Text]:
        """Return the grid as lines, head first; prose wraps to fit a width in terminal cells.

        The console prints the lines.
        """
        widths = self.widths(width)
        titles = list(map(attrgetter("title"), self.columns))
        lines = self._wrapped(titles, ["bold"] * len(widths), widths)
        for number, cells in enumerate(self.lines):
            styles = [column.styles[number] if column.styles else "" for column in self.columns]
            lines += self._wrapped(cells, styles, widths)
        return lines

    def _wrapped(
        self, cells: Sequence[str], styles: Sequence[str], widths: Sequence[int]
    ) -> list[Text]:
        """Return a row as lines, with cells wrapped to the column widths.

        A line has all columns; cells that need fewer lines than others are padded.
        """
        wrapped = []
        for cell, size in zip(cells, widths, strict=True):
            wrapped.append(textwrap.wrap(cell, size) if cell_len(cell) > size else [cell])
        lines = []
        for texts in zip_longest(*wrapped, fillvalue=""):
            padded = map(Column.padded, self.columns, texts, widths)
            line = Text(" " * GAP).join(map(Text, padded, styles))
            line.rstrip()
            lines.append(line)
        return lines

    def markdown(self) -> str:
        """Return the grid as narrow Markdown tables, each with the keys; notes become paragraphs.

        Cells that are too long for a line lose their middle. report.md, MLflow's descriptions and
        comparison.md contain it.
        """
        widths = []
        for column in self.columns:
            if column.is_key:
                widths.append(len(max(map(escape_markdown, column.cells), key=len)))
        # shorten the longest keys until all keys of a row together fit their limit
        key_width = _KEY_WIDTH
        while key_width > 1 and sum(min(width, key_width) for width in widths) > _KEY_WIDTH:
            key_width -= 1
        room = WIDTH - sum(min(width, key_width) for width in widths) - _RULES
        columns = [column.escaped(key_width if column.is_key else room) for column in self.columns]
        paragraphs: list[str] = []
        if columns:
            paragraphs += map(_markdown_table, Grid(columns).parts(WIDTH - _RULES, _MOST_COLUMNS))
        return "\n\n".join([*paragraphs, *map(escape_markdown, self.notes)]) + "\n"


class Commands(tuple[str, ...]):
    """Command lines to copy: lines of a `Section` that reports show as code, without wrapping."""


class Section(NamedTuple):
    """Part of a report: a title, and a table or lines.

    An empty title continues the previous part.
    """

    title: str
    content: Grid | Sequence[str]


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows unchanged: no table, link, emphasis or HTML."""
    return html.escape(re.sub(r"[\\`*_\[\]#|~]", r"\\\g<0>", text), quote=False)


def _shortened(text: str, width: int) -> str:
    """Return a text escaped for Markdown; its middle becomes `…` if it is longer than `width`."""
    short = escape_markdown(text)
    half = min(len(text), width) // 2
    while len(short) > width and half:
        short = escape_markdown(f"{text[:half]}…{text[-half:]}")
        half -= 1
    return short


def _markdown_table(grid: Grid) -> str:
    """Return a grid with escaped cells as a Markdown table; figures are aligned right."""
    titles = map(attrgetter("title"), grid.columns)
    rule = ["---" if column.prose else "---:" for column in grid.columns]
    lines = map(" | ".join, (titles, rule, *grid.lines))
    return "\n".join(f"| {line} |" for line in lines)
