"""A report as one HTML file that holds all it shows: it can be sent by mail and read without a network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from mpiddl.compare.document import Block, Code, Heading, Items, Paragraph, Table

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: #fff; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
p, li, td.words { max-width: 50rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { background: #f4f4f4; } td { white-space: nowrap; } td.words { white-space: normal; text-align: left; }
th:first-child, td:first-child, th.words { text-align: left; white-space: normal; }
tr.marked td { background: #eaf4ea; font-weight: 600; }
li.answer { font-size: 1.15rem; font-weight: 600; list-style: none; margin: 0 0 .6rem -1.2rem; padding: .6rem .9rem;
  background: #eaf4ea; border-left: 4px solid #3a7d3a; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; max-width: 50rem; }
pre { background: #f4f4f4; padding: .7rem 1rem; overflow-x: auto; }
"""

LONG = 60
"""Letters above which a cell is words, not figures: it is broken into lines."""


def render(blocks: Sequence[Block]) -> str:
    """The text of the file."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(map(_block, blocks))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Items(texts, answer):
            marks = [' class="answer"' if answer and not number else "" for number in range(len(texts))]
            return "<ul>" + "".join(f"<li{mark}>{escape(text)}</li>" for mark, text in zip(marks, texts, strict=True)) + "</ul>"
        case Table(heads, rows, marked):
            return _table(heads, rows, marked)
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case _:
            image = base64.b64encode(block.png).decode()
            return (f'<figure><img alt="{escape(block.caption)}" src="data:image/png;base64,{image}">'
                    f"<figcaption>{escape(block.caption)}</figcaption></figure>")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None) -> str:
    wordy = {column for column in range(len(heads)) if column and any(len(row[column]) > LONG for row in rows)}

    def cell(column: int, text: str) -> str:
        return f'<td class="words">{escape(text)}</td>' if column in wordy or len(heads) == 2 else f"<td>{escape(text)}</td>"

    marks = [' class="words"' if column in wordy or len(heads) == 2 else "" for column in range(len(heads))]
    lines = ["<tr>" + "".join(f"<th{mark}>{escape(head)}</th>" for mark, head in zip(marks, heads, strict=True)) + "</tr>"]
    for number, row in enumerate(rows):
        mark = ' class="marked"' if number == marked else ""
        lines.append(f"<tr{mark}>" + "".join(cell(column, text) for column, text in enumerate(row)) + "</tr>")
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"
