"""Draw passages that users read, from two revisions, mixed and without labels, for somebody to read with fresh eyes.

    python tests/programs/draw_passages.py --before 1cbdc09 --after HEAD --count 40 --seed 1 --key key.txt > passages.txt

Passages are paragraphs, list items and table rows of README.md and of the four pages that users read first, help texts of
commands, and error messages. ``count`` are drawn from each revision. The key names the revision and the file of each passage.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

PAGES = ["README.md", *(f"docs/{name}.md" for name in ("training", "strategies", "communicator", "decomposition"))]
SHORTEST = 40
"""Characters; a shorter passage says too little to be hard to read."""


class Passage(NamedTuple):
    """A piece of text, where it stands, and the revision."""

    text: str
    place: str
    revision: str


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def of_page(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables; no code, no headings, no pictures."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"    \S|#|!\[|\|[ :|-]+\|$", line)]
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        for piece in re.split(r"\n(?=[-*|] ?|\d+\. )", block.strip()):
            yield " ".join(piece.split())


def words_of(node: ast.AST) -> str:
    """A string in the source as it would be printed, with what is filled in as {name}."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value).rpartition(".")[2][:24] + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words_of(node.left) + words_of(node.right)
    return ""


def of_source(source: str, path: str) -> Iterator[str]:
    """Messages of exceptions that are raised, and the help of commands, options and settings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield words_of(node.exc.args[0])
        elif isinstance(node, ast.Call):
            yield from (words_of(keyword.value) for keyword in node.keywords if keyword.arg == "help")
            if isinstance(node.func, ast.Name) and node.func.id == "setting" and len(node.args) > 1:
                yield words_of(node.args[1])
        elif isinstance(node, ast.FunctionDef) and "/cli/" in path and "command" in ast.unparse(node).split("def ")[0]:
            yield from of_page(ast.get_docstring(node) or "")


def passages(revision: str) -> list[Passage]:
    """Everything that may be drawn from a revision, each text once."""
    found: dict[str, Passage] = {}
    for path in git("ls-tree", "-r", "--name-only", revision).splitlines():
        source = path.startswith("mpiddl/") and path.endswith(".py")
        if source or path in PAGES:
            text = git("show", f"{revision}:{path}")
            for piece in of_source(text, path) if source else of_page(text):
                if len(piece) >= SHORTEST:
                    found.setdefault(piece, Passage(piece, path, revision))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="REVISION")
    parser.add_argument("--after", default="HEAD", metavar="REVISION")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", required=True, metavar="FILE", help="Where to write which passage is of which revision.")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    chosen = [passage for name in (options.before, options.after) for passage in draw.sample(passages(name), options.count)]
    draw.shuffle(chosen)
    with open(options.key, "w") as key:
        for number, passage in enumerate(chosen, 1):
            print(f"{number}. {passage.text}\n")
            print(number, passage.revision, passage.place, file=key)


if __name__ == "__main__":
    main()
