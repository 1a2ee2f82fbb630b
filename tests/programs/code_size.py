"""The size and the shape of the package: code lines (without blank lines, comments and docstrings), modules outside of
packages, the folder with the most modules, and arguments that are communicators but have no type.

    python tests/programs/code_size.py             of this checkout
    python tests/programs/code_size.py ../old      of another one, to compare
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COMMUNICATORS = {"comm", "link", "control", "local", "across", "near", "parent", "communicator"}


def code_lines(text, tree):
    doc = set()
    for node in ast.walk(tree):
        for child in node.body if isinstance(getattr(node, "body", None), list) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                doc.update(range(child.lineno, child.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - doc)


def untyped(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                kind = argument.annotation
                if argument.arg in COMMUNICATORS and isinstance(kind, ast.Name) and kind.id == "Any":
                    yield argument.lineno


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2])
    files = sorted(path for folder in ("mpiddl", "kernels") for path in (root / folder).rglob("*.py"))
    sizes, folders, anys = Counter(), Counter(), []
    for path in files:
        text = path.read_text()
        tree = ast.parse(text)
        sizes[path.relative_to(root).parts[0]] += code_lines(text, tree)
        folders[path.parent.relative_to(root)] += 1
        anys += [f"{path.relative_to(root)}:{line}" for line in untyped(tree)]
    (fullest, count), *_ = folders.most_common(1)
    parts = ", ".join(f"{count} in {name}" for name, count in sizes.items())
    print(f"code lines                          {sum(sizes.values())} ({parts})")
    print(f"modules outside of packages         {len(list((root / 'mpiddl').glob('*.py')))}")
    print(f"most modules in a folder            {count} ({fullest})")
    print(f"communicator arguments typed Any    {len(anys)}" + f" ({', '.join(anys[:5])}, ...)" * bool(anys))


if __name__ == "__main__":
    main()
