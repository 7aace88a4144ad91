"""Renders tables as Markdown and as aligned plain text. Owns layout only; callers format the cells. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

Row = Sequence[str]

RULE: Row = ()  # among the rows of a text table: a horizontal line


def markdown_table(head: Row, rows: Sequence[Row], align: str = "<>") -> str:
    """Returns a Markdown table; `|` in a cell is escaped. `align`: `<` or `>` per column; the last one is repeated."""
    rule = [":--" if side == "<" else "--:" for side in align[: len(head)].ljust(len(head), align[-1])]
    escaped = [[re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in (head, *rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (escaped[0], rule, *escaped[1:]))


def text_table(
    head: Row | None,
    rows: Sequence[Row],
    align: str = "<>",
    *,
    indent: int = 0,
    ruled: bool = True,
) -> str:
    """Returns a table for a terminal, its columns padded to the widest cell; lines have no trailing blanks.

    Args:
        head: None for no header; below it a line is drawn if `ruled`.
        rows: `RULE` draws a horizontal line.
        align: as for `markdown_table`.
    """
    cells = [row for row in ([] if head is None else [head]) + list(rows) if row]
    if not cells:
        return ""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = align[: len(widths)].ljust(len(widths), align[-1])

    def line(row: Row) -> str:
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        return "  ".join(padded).rstrip()

    rule = "-" * max(len(line(row)) for row in cells)
    body = [line(row) if row else rule for row in rows]
    if head is not None:
        body = [line(head), *([rule] if ruled else []), *body]
    return "\n".join(" " * indent + text for text in body)


def counted(count: int, noun: str) -> str:
    """Returns `1 run` or `2 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
