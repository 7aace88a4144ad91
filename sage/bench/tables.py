"""Renders tables as Markdown and as aligned plain text. Owns layout only; callers format the cells. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Row = Sequence[str]
Style = Callable[[str], str]

RULE: Row = ()  # among the rows of a text table: a horizontal line


def markdown_table(head: Row, rows: Sequence[Row], align: str = "<>") -> str:
    """Returns a Markdown table; `|` within a cell is escaped.

    Args:
        head: one cell per column.
        rows: as many cells each.
        align: `<` or `>` per column; the last character applies to the remaining columns.
    """
    rule = [":--" if side == "<" else "--:" for side in _sides(align, len(head))]
    escaped = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in (head, *rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (escaped[0], rule, *escaped[1:]))


def text_table(
    head: Row | None,
    rows: Sequence[Row],
    align: str = "<>",
    *,
    separator: str = "  ",
    indent: int = 0,
    min_widths: Sequence[int] = (),
    ruled: bool = True,
    style: Style | None = None,
) -> str:
    """Returns a table for a terminal, its columns padded to the widest cell; lines have no trailing blanks.

    Args:
        head: one cell per column; None = no header.
        rows: as many cells each; `RULE` draws a horizontal line.
        align: as for `markdown_table`.
        separator: text between two columns.
        indent: blanks before every line.
        min_widths: least width of the first columns, in characters.
        ruled: whether a line is drawn below the header.
        style: applied to the complete header line, for example to make it bold.
    """
    cells = [row for row in ([] if head is None else [head]) + list(rows) if row]
    if not cells:
        return ""
    least = [*min_widths, *[0] * len(cells[0])]
    widths = [max(map(len, column), default=0) for column in zip(*cells, strict=True)]
    widths = [max(width, floor) for width, floor in zip(widths, least, strict=False)]
    sides = _sides(align, len(widths))

    def line(row: Row) -> str:
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        return separator.join(padded).rstrip()

    rule = "-" * max(len(line(row)) for row in cells)
    body = [line(row) if row else rule for row in rows]
    if head is not None:
        title = line(head)
        body = [title if style is None else style(title), *([rule] if ruled else []), *body]
    return "\n".join(" " * indent + text for text in body)


def _sides(align: str, count: int) -> str:
    return align[:count].ljust(count, align[-1])
