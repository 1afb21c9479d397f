"""Grid: a table of words for readers, as lines of text or as Markdown."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest
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
        cells: one cell per row.
        rank: 0 for columns in the first table. If the width is short, the column with the highest
            rank moves to a further table first.
        is_key: whether it identifies the row; every further table repeats it.
        styles: terminal style of each cell, as rich names; empty without colors.
    """

    def __init__(
        self,
        title: str,
        cells: Iterable[str],
        *,
        rank: int = 0,
        prose: bool = False,
        is_key: bool = False,
        styles: Sequence[str] = (),
    ) -> None:
        self.title, self.cells = title, tuple(cells)
        self.styles = styles or [""] * len(self.cells)
        self.rank, self.prose, self.is_key = rank, prose, is_key

    @property
    def least_width(self) -> int:
        """Return the smallest width in terminal cells."""
        words = (word for cell in self.cells for word in cell.split())
        return max(map(cell_len, (self.title, *(words if self.prose else self.cells))))

    @property
    def whole_width(self) -> int:
        """Return the width in terminal cells if no cell wraps."""
        return max(map(cell_len, (self.title, *self.cells)))

    def padded(self, text: str, width: int) -> str:
        """Return a text padded to terminal cells: prose flush left, figures flush right."""
        return set_cell_size(text, width) if self.prose else " " * (width - cell_len(text)) + text

    def chosen(self, rows: Sequence[bool]) -> Column:
        """Return the column with only the chosen rows."""
        cells, styles = compress(self.cells, rows), list(compress(self.styles, rows))
        return Column(
            self.title, cells, rank=self.rank, prose=self.prose, is_key=self.is_key, styles=styles
        )

    def escaped(self, width: int) -> Column:
        """Return the column for Markdown; cells longer than `width` lose their middle."""
        cells = (_shortened(cell, width) for cell in self.cells)
        return Column(
            escape_markdown(self.title), cells, rank=self.rank, prose=self.prose, is_key=self.is_key
        )


@dataclass(frozen=True)
class Grid:
    """Table of words: columns of equal length, and notes, which are lines below it."""

    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, str]], *, figures: Collection[str] = ()) -> Self:
        """Return a table from rows with cells by title.

        Args:
            figures: titles of figure columns; all others are prose.
        """
        titles = rows[0] if rows else ()
        return cls(
            [
                Column(title, [row[title] for row in rows], prose=title not in figures)
                for title in titles
            ]
        )

    @property
    def least_width(self) -> int:
        """Return the smallest width in terminal cells."""
        return sum(column.least_width for column in self.columns) + GAP * (len(self.columns) - 1)

    @property
    def whole_width(self) -> int:
        """Return the width in terminal cells if no cell wraps."""
        return sum(column.whole_width for column in self.columns) + GAP * (len(self.columns) - 1)

    def widths(self, width: int) -> list[int]:
        """Return column widths that fill `width`; words are split only if `least_width` is larger.

        Extra room first goes to columns that need little of it to avoid wrapping.
        """
        widths, room = [column.least_width for column in self.columns], width - self.least_width
        needs = [column.whole_width - column.least_width for column in self.columns]
        for index in sorted(range(len(needs)), key=needs.__getitem__):
            grown = max(min(needs[index], room), 0)
            widths[index], room = widths[index] + grown, room - grown
        return widths

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """Return the cells row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def without_empty(self) -> Grid:
        """Return the grid without empty columns."""
        return replace(self, columns=[column for column in self.columns if any(column.cells)])

    def common(self) -> tuple[list[str], Grid]:
        """Return figures common to all rows as lines, and a grid with the rest and the notes."""
        shared = [one for one in self.columns if not one.is_key and len(set(one.cells)) == 1]
        lines = [f"{one.title}: {one.cells[0]}" for one in shared]
        rest = [one for one in self.columns if one not in shared]
        has_figures = not all(one.is_key for one in rest)
        return lines, replace(self, columns=rest if has_figures else [])

    def parts(self, width: int, most_columns: int | None = None) -> list[Grid]:
        """Return the grid as tables that fit a width in terminal cells.

        Columns without room follow in further tables. Each further table repeats the keys and only
        has rows with figures in it. The tables have no notes.
        """
        keys = [column for column in self.columns if column.is_key] or list(self.columns[:1])
        shown, moved = list(self.columns), list[Column]()
        while Grid(shown).least_width > width or (most_columns and len(shown) > most_columns):
            figures = [column for column in shown if column not in keys]
            optional = [column for column in figures if column.rank]
            if not optional or len(figures) == 1:
                break
            moved.append(max(optional, key=lambda column: column.rank))
            shown.remove(moved[-1])
        if not moved:
            return [Grid(shown)]
        rest = [column for column in self.columns if column in moved]
        filled = [any(cells) for cells in zip(*(column.cells for column in rest), strict=True)]
        further = Grid([column.chosen(filled) for column in (*keys, *rest)])
        return [Grid(shown), *further.parts(width, most_columns)]

    def text(self, width: int) -> list[Text]:
        """Return the grid as lines, head first; prose wraps to fit a width in terminal cells."""
        widths = self.widths(width)
        lines = [
            self._line([column.title for column in self.columns], ["bold"] * len(widths), widths)
        ]
        styles = zip(*(column.styles for column in self.columns), strict=True)
        lines += [
            self._line(cells, own, widths) for cells, own in zip(self.lines, styles, strict=True)
        ]
        return [line for wrapped in lines for line in wrapped]

    def _line(
        self, cells: Sequence[str], styles: Sequence[str], widths: Sequence[int]
    ) -> list[Text]:
        parts = [
            textwrap.wrap(cell, size) if cell_len(cell) > size else [cell]
            for cell, size in zip(cells, widths, strict=True)
        ]
        lines = []
        for texts in zip_longest(*parts, fillvalue=""):
            padded = map(Column.padded, self.columns, texts, widths)
            line = Text(" " * GAP).join(map(Text, padded, styles))
            line.rstrip()
            lines.append(line)
        return lines

    def markdown(self) -> str:
        """Return the grid as narrow Markdown tables, each with the keys; notes become paragraphs.

        Cells that are too long for a line lose their middle.
        """
        widths = [
            len(max(map(escape_markdown, column.cells), key=len))
            for column in self.columns
            if column.is_key
        ]
        fitting = (
            limit
            for limit in range(_KEY_WIDTH, 0, -1)
            if sum(min(w, limit) for w in widths) <= _KEY_WIDTH
        )
        key_width = next(fitting, 1)
        room = WIDTH - sum(min(width, key_width) for width in widths) - _RULES
        columns = [column.escaped(key_width if column.is_key else room) for column in self.columns]
        tables = [
            "\n".join(_markdown_lines(part))
            for part in Grid(columns).parts(WIDTH - _RULES, _MOST_COLUMNS)
        ]
        return "\n\n".join([*(tables if columns else ()), *map(escape_markdown, self.notes)]) + "\n"


class Commands(tuple[str, ...]):
    """Command lines to copy."""


class Section(NamedTuple):
    """Part of a report: a title, and a table or lines.

    An empty title continues the previous part.
    """

    title: str
    content: Grid | Sequence[str]


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows unchanged: no table, link, emphasis or HTML."""
    escaped = "".join(
        f"\\{character}" if character in r"\`*_[]#|~" else character for character in text
    )
    return html.escape(escaped, quote=False)


def _shortened(text: str, width: int) -> str:
    short, half = escape_markdown(text), min(len(text), width) // 2
    while len(short) > width and half:
        short, half = escape_markdown(f"{text[:half]}…{text[-half:]}"), half - 1
    return short


def _markdown_lines(grid: Grid) -> list[str]:
    rule = " | ".join("---" if column.prose else "---:" for column in grid.columns)
    rows = [" | ".join(cells) for cells in ([column.title for column in grid.columns], *grid.lines)]
    return [f"| {row} |" for row in (rows[0], rule, *rows[1:])]
