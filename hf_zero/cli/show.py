"""Tables and text that all commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import size_text

Row = Sequence[str | Text]


def table(
    console: Console,
    title: str,
    columns: Row,
    *sections: Iterable[Row],
    caption: str = "",
    left: int = 1,
    fold: bool = False,
) -> None:
    """Print a title, sections of rows and a caption. All but the first `left` columns are numbers.

    `fold`: split a table that is too wide into several with the same left columns.
    """
    parts = [list(rows) for rows in sections]
    chosen = [list(range(len(columns)))]
    if fold:
        chosen = _folded(console, columns, parts, left)
    text(console, title, "bold")
    for keep in chosen:
        rows = [[[row[at] for at in keep] for row in rows] for rows in parts]
        console.print(_table([columns[at] for at in keep], rows, left))
    if caption:
        text(console, caption, "italic")


def _table(columns: Row, sections: Iterable[Iterable[Row]], left: int) -> Table:
    made = Table()
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for rows in sections:
        for row in rows:
            made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        made.add_section()
    return made


def _folded(console: Console, columns: Row, sections: Sequence[Sequence[Row]], left: int) -> list[list[int]]:
    """Choose the columns of each table: the left ones in all, and as many others as fit."""
    wide = Console(width=10_000)

    def width(keep: Sequence[int]) -> int:
        rows = [[[row[at] for at in keep] for row in rows] for rows in sections]
        return wide.measure(_table([columns[at] for at in keep], rows, left)).maximum

    out, keep = [], list(range(left))
    for at in range(left, len(columns)):
        if len(keep) > left and width([*keep, at]) > console.width:
            out.append(keep)
            keep = list(range(left))
        keep.append(at)
    return [*out, keep]


def ranks_text(count: int) -> str:
    return f"{count:,} rank{'s' if count > 1 else ''}"


def short_size(nbytes: float) -> str:
    """Format a size with three digits: `14.9 GiB`, `120 GiB`."""
    if not nbytes:
        return "0"
    number, unit = size_text(nbytes).split()
    value = float(number)
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def pasted(console: Console, line: str) -> None:
    """Print a line to copy: indented, never folded."""
    console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)


def text(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False)
