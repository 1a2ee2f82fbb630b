"""A report as Markdown; its pictures are files beside it."""

from __future__ import annotations

from collections.abc import Sequence

from mpiddl.compare.document import Block, Code, Heading, Items, Paragraph, Table


def render(blocks: Sequence[Block]) -> str:
    """The text of the file; what would be HTML is shown as it is written."""
    return "\n\n".join(map(_block, blocks)) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_text(text)}"
        case Paragraph(text):
            return _text(text)
        case Items(texts, answer):
            first, *rest = map(_text, texts)
            return "\n".join([f"- **{first}**" if answer else f"- {first}", *(f"- {text}" for text in rest)])
        case Table(heads, rows, marked):
            lines = [_line(heads), _line(["---"] * len(heads))]
            for number, row in enumerate(rows):
                lines.append(_line([f"**{cell}**" if number == marked and cell else cell for cell in row]))
            return "\n".join(lines)
        case Code(text):
            return "\n".join(f"    {line}" for line in text.splitlines())
        case _:
            return f"![{block.caption.partition(':')[0]}]({block.name})\n\n{block.caption}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_text(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _text(text: str) -> str:
    return text.replace("<", chr(92) + "<")
