"""A report as one HTML file that holds all it shows: it can be sent by mail and read without a network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from mpiddl.compare.document import Block, Code, Heading, Items, Paragraph, Table

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: #fff; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: .88rem; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th { background: #f4f4f4; vertical-align: bottom; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; }
table.words td { overflow-wrap: anywhere; }
table.words th:first-child { width: 16rem; }
tr.marked td { background: #eaf4ea; font-weight: 600; } tr.flagged td { background: #fdecea; }
ul.verdict { list-style: none; margin: 1rem 0; padding: .6rem .9rem; background: #eaf4ea; border-left: 4px solid #3a7d3a; }
ul.verdict li:first-child { font-size: 1.15rem; font-weight: 600; }
ul.verdict li + li, ul.warning li + li { margin-top: .5rem; }
ul.warning { list-style: none; margin: 1rem 0; padding: .6rem .9rem; background: #fff6e0; border-left: 4px solid #d98c3a; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; }
pre { background: #f4f4f4; padding: .7rem 1rem; overflow-x: auto; }
"""


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
        case Items(texts, kind):
            return f"<ul{_class(kind)}>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"
        case Table():
            return _table(block)
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case _:
            image = base64.b64encode(block.png).decode()
            return (f'<figure><img alt="{escape(block.caption)}" src="data:image/png;base64,{image}">'
                    f"<figcaption>{escape(block.caption)}</figcaption></figure>")


def _table(table: Table) -> str:
    heads = [head.replace(", ", ",\u00a0") for head in table.heads]  # a unit stays with its word
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    for number, row in enumerate(table.rows):
        kind = "marked" if number == table.marked else "flagged" if number in table.flagged else ""
        texts = row if table.words else [row[0], *map(_figure, row[1:])]
        lines.append(f"<tr{_class(kind)}>" + "".join(f"<td>{escape(text)}</td>" for text in texts) + "</tr>")
    return f'<div class="scroll"><table{_class("words" if table.words else "")}>' + "\n".join(lines) + "</table></div>"


def _figure(text: str) -> str:
    """A figure that is broken into lines before a bracket only."""
    return text.replace(" ", "\u00a0").replace("\u00a0(", " (")


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
