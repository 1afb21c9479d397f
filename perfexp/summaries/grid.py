"""Grid: a table of words that can be narrowed to a width; console and report draw it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest

from rich.cells import cell_len, set_cell_size

#: Cells between two columns.
GAP = 2
#: Limits of a table of Markdown, in characters of a line and in columns: MLflow's pages are not wider.
WIDTH, _MOST_COLUMNS = 80, 6
#: Limits of the keys in a line, in characters, and of the values of a listed figure.
_KEY_WIDTH, _MOST_LISTED = 40, 5


class Column:
    """One column of figures, set flush right, or of prose, set flush left, which may wrap.

    Args:
        cells: one for each row.
        rank: 0 for columns of the first table; of the others the highest is the first to follow in a further table if
            the width is short.
        is_key: whether it identifies the row; each of several tables repeats it.
        styles: style of each cell on a terminal, by the names of rich; none without colors.
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
        """Smallest width in terminal cells."""
        words = (word for cell in self.cells for word in cell.split())
        return max(map(cell_len, (self.title, *(words if self.prose else self.cells))))

    @property
    def whole_width(self) -> int:
        """Width in terminal cells if no cell wraps."""
        return max(map(cell_len, (self.title, *self.cells)))

    def padded(self, text: str, width: int) -> str:
        """Return a text in a width of terminal cells, flush left if the column is prose, otherwise flush right."""
        return set_cell_size(text, width) if self.prose else " " * (width - cell_len(text)) + text

    def chosen(self, rows: Sequence[bool]) -> Column:
        """Return the column with some of its rows."""
        cells, styles = compress(self.cells, rows), list(compress(self.styles, rows))
        return Column(self.title, cells, rank=self.rank, prose=self.prose, is_key=self.is_key, styles=styles)

    def shortened(self, width: int) -> Column:
        """Return the column without the middle of cells that exceed this number of characters in Markdown."""
        cells = (_shortened(cell, width) for cell in self.cells)
        return Column(self.title, cells, rank=self.rank, prose=self.prose, is_key=self.is_key)


@dataclass(frozen=True)
class Grid:
    """A table of words: columns with the same number of cells, and notes, which are lines below it."""

    columns: Sequence[Column]
    notes: Sequence[str] = ()

    @property
    def least_width(self) -> int:
        """Smallest width in terminal cells."""
        return sum(column.least_width for column in self.columns) + GAP * (len(self.columns) - 1)

    @property
    def whole_width(self) -> int:
        """Width in terminal cells if no cell wraps."""
        return sum(column.whole_width for column in self.columns) + GAP * (len(self.columns) - 1)

    def widths(self, width: int) -> list[int]:
        """Return the width of each column by which the grid has a width: no word is split unless `least_width` is more.

        Of the room beyond the least widths, columns that need little to be whole have theirs first.
        """
        widths, room = [column.least_width for column in self.columns], width - self.least_width
        needs = [column.whole_width - column.least_width for column in self.columns]
        for index in sorted(range(len(needs)), key=needs.__getitem__):
            grown = max(min(needs[index], room), 0)
            widths[index], room = widths[index] + grown, room - grown
        return widths

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The cells, row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def transposed(self) -> Grid:
        """Return the figures of the only line as lines of their own; its keys are left out."""
        figures = [column for column in self.columns if not column.is_key]
        names = Column("metric", (column.title for column in figures), prose=True)
        return Grid([names, Column("value", (column.cells[0] for column in figures), prose=True)], self.notes)

    def without_empty(self) -> Grid:
        """Return the grid without its empty columns."""
        return Grid([column for column in self.columns if any(column.cells)], self.notes)

    def parts(self, width: int) -> list[Grid]:
        """Return the grid as tables that fit a width in terminal cells: columns without room follow in further ones.

        Each further table repeats the keys, and has only the rows with a figure in it. The tables have no notes.
        """
        keys = [column for column in self.columns if column.is_key] or list(self.columns[:1])
        shown, moved = list(self.columns), list[Column]()
        while Grid(shown).least_width > width:
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
        return [Grid(shown), *further.parts(width)]

    def text(self, width: int | None = None) -> list[str]:
        """Return the grid as lines of plain text, its head first; prose wraps to fit a width in terminal cells."""
        widths = [column.whole_width for column in self.columns] if width is None else self.widths(width)
        lines = []
        for cells in ([column.title for column in self.columns], *self.lines):
            parts = [
                textwrap.wrap(cell, size) if cell_len(cell) > size else [cell]
                for cell, size in zip(cells, widths, strict=True)
            ]
            for texts in zip_longest(*parts, fillvalue=""):
                padded = [
                    column.padded(text, size) for column, text, size in zip(self.columns, texts, widths, strict=True)
                ]
                lines.append((" " * GAP).join(padded).rstrip())
        return lines

    def markdown(self) -> str:
        """Return the grid as narrow tables of Markdown, each with the keys; its notes as a paragraph each."""
        tables = ["\n".join(_markdown_lines(columns)) for columns in self._narrow() if columns]
        return "\n\n".join([*tables, *map(escape_markdown, self.notes)]) + "\n"

    def listed(self) -> list[str]:
        """Return a line for each column that is not a key: its values, with their rows if they differ."""
        titled = [[f"{column.title} {cell}" for cell in column.cells] for column in self.columns if column.is_key]
        labels = [" · ".join(words) for words in zip(*titled, strict=True)]
        lines = []
        for column in self.columns:
            values = [(cell, label) for cell, label in zip(column.cells, labels, strict=True) if cell]
            if column.is_key or not values:
                continue
            text = ", ".join(labeled := [f"{cell} ({label})" for cell, label in values])
            if len(dict(values)) == 1 and len(values) == len(labels):
                text = values[0][0]
            elif len(labeled) > _MOST_LISTED:
                text = f"{labeled[0]} … {labeled[-1]}"
            lines.append(f"{column.title}: {text}")
        return lines

    def _narrow(self) -> list[list[Column]]:
        keys = [column for column in self.columns if column.is_key]
        widths = [max(len(escape_markdown(cell)) for cell in (*key.cells, "")) for key in keys]
        # what narrow keys leave is for wide ones
        fitting = (limit for limit in range(_KEY_WIDTH, 0, -1) if sum(min(w, limit) for w in widths) <= _KEY_WIDTH)
        limit = next(fitting, 1)
        keys = [key.shortened(limit) for key in keys]
        room = WIDTH - _markdown_width(keys) - len(" |  ")
        tables = [[*keys]]
        for column in (column.shortened(room) for column in self.columns if not column.is_key):
            grown = [*tables[-1], column]
            if len(grown) > len(keys) + 1 and (len(grown) > _MOST_COLUMNS or _markdown_width(grown) > WIDTH):
                grown = [*keys, column]
                tables.append(grown)
            tables[-1] = grown
        return tables


def escape_markdown(text: str) -> str:
    """Return a text that Markdown shows as it is: no table, link, emphasis or HTML."""
    escaped = "".join(f"\\{character}" if character in r"\`*_[]#|~" else character for character in text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shortened(text: str, width: int) -> str:
    short, half = text, min(len(text), width) // 2
    while len(escape_markdown(short)) > width and half:
        short, half = f"{text[:half]}…{text[-half:]}", half - 1
    return short


def _markdown_lines(columns: Sequence[Column]) -> list[str]:
    rule = _markdown_line("---" if column.prose else "---:" for column in columns)
    cells = zip(*(column.cells for column in columns), strict=True)
    return [_markdown_line(column.title for column in columns), rule, *map(_markdown_line, cells)]


def _markdown_width(columns: Sequence[Column]) -> int:
    return max(map(len, _markdown_lines(columns)))


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell if set(cell) <= set('-:') else escape_markdown(cell) for cell in cells)} |"
