"""Grid: a table of words that can be narrowed to a width; console and report draw it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size

#: Cells between two columns.
GAP = 2


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        cells: one for each row.
        rank: 0 for what has to be seen; of the others the highest gives way first where the width is short.
        prose: whether it is set flush left and may go over several lines; figures are flush right and never do.
    """

    title: str
    cells: tuple[str, ...]
    rank: int = 0
    prose: bool = False

    @property
    def least_width(self) -> int:
        """Terminal cells that it takes at least."""
        texts: Iterable[str] = self.cells
        if self.prose:
            texts = (word for cell in self.cells for word in cell.split())
        return max(map(cell_len, (self.title, *texts)))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of words.

    Attributes:
        columns: all with the same number of cells.
        notes: what has to be said below it.
    """

    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()

    @property
    def least_width(self) -> int:
        """Terminal cells that it takes at least."""
        return sum(column.least_width for column in self.columns) + GAP * (len(self.columns) - 1)

    @property
    def whole_width(self) -> int:
        """Terminal cells that it takes if no cell goes over several lines."""
        return sum(self._widths) + GAP * (len(self.columns) - 1)

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The cells, row by row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    def fitted(self, width: int) -> Grid:
        """The grid without the columns that have to give way; a note names them.

        Args:
            width: terminal cells that there are.
        """
        grid, dropped = self, list[Column]()
        while grid.least_width > width and (optional := [column for column in grid.columns if column.rank]):
            first = max(optional, key=lambda column: column.rank)
            dropped.append(first)
            grid = replace(grid, columns=tuple(column for column in grid.columns if column is not first))
        if not dropped:
            return self
        titles = ", ".join(column.title for column in self.columns if column in dropped)
        return replace(grid, notes=(*grid.notes, f"not shown for want of width: {titles} (see the CSV)"))

    @property
    def _widths(self) -> list[int]:
        return [max(map(cell_len, (column.title, *column.cells))) for column in self.columns]

    def text(self) -> list[str]:
        """The grid as lines of plain text, its head first."""
        widths = self._widths
        lines = [tuple(column.title for column in self.columns), *self.lines]
        return [
            (" " * GAP)
            .join(
                set_cell_size(cell, width) if column.prose else " " * (width - cell_len(cell)) + cell
                for column, width, cell in zip(self.columns, widths, line, strict=True)
            )
            .rstrip()
            for line in lines
        ]

    def markdown(self) -> str:
        """The grid as a table of Markdown, with its notes as a paragraph each."""
        if not self.columns:
            return "\n\n".join(map(escape_markdown, self.notes)) + "\n"
        head = _markdown_line(column.title for column in self.columns)
        rule = _markdown_line("---" if column.prose else "---:" for column in self.columns)
        table = "\n".join([head, rule, *map(_markdown_line, self.lines)])
        return "\n\n".join([table, *map(escape_markdown, self.notes)]) + "\n"


def escape_markdown(text: str) -> str:
    """A text that Markdown shows as it is: nothing in it becomes a table, a link, an emphasis or HTML."""
    escaped = "".join(f"\\{character}" if character in r"\`*_[]#|~" else character for character in text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell if set(cell) <= set('-:') else escape_markdown(cell) for cell in cells)} |"
