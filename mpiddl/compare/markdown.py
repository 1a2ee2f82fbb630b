"""A report as Markdown; its pictures are files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpiddl.compare.document import Block, Code, Heading, Items, Paragraph, Table
from mpiddl.compare.numbers import aligned

MARKS = re.compile(r"[\\`*\[\]<|]")
"""Characters that would be markup."""


def render(blocks: Sequence[Block]) -> str:
    """The text of the file. Markup in names and messages is shown as it is written."""
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_text(text)}"
        case Paragraph(text):
            return _text(text)
        case Items(texts, kind):
            first, *rest = map(_text, texts)
            return "\n".join([f"- **{first}**" if kind == "verdict" else f"- {first}", *(f"- {text}" for text in rest)])
        case Table():
            return "\n".join(_table(block))
        case Code(text):
            return "\n".join(f"    {line}" for line in text.splitlines())
        case _:
            return f"![{block.caption.partition(':')[0]}]({block.name})\n\n{block.caption}"


def _table(table: Table) -> list[str]:
    """Its lines: figures to the right, in columns of one width."""
    bold = {table.marked, *table.flagged}
    rows = [[f"**{_text(cell)}**" if cell and (number == table.marked or (number in bold and not column)) else _text(cell)
             for column, cell in enumerate(row)] for number, row in enumerate(table.rows)]  # fmt: skip
    left = [table.words or not column for column in range(len(table.heads))]
    lines = [list(map(_text, table.heads)), *rows]
    rule = ["---" if to_left else "--:" for to_left in left]
    head, *body = aligned(lines, left) if not table.words else lines
    if not table.words:
        rule = ["-" * len(cell) if to_left else "-" * (len(cell) - 1) + ":" for cell, to_left in zip(head, left, strict=True)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]


def _text(text: str) -> str:
    return MARKS.sub(r"\\\g<0>", text)
