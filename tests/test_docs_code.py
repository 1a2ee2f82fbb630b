"""The Python code of pages: it runs, and what stands in an example too is the same there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_mpi

ROOT = Path(__file__).parents[1]
PAGES = {"optimisers.md": "own_optimiser.py", "decomposition.md": "own_solver.py"}  # and the example that has its classes


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def classes(source):
    return {node.name: ast.dump(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in code_of(page):
        exec(compile(block, page, "exec", dont_inherit=True), names)
    assert code_of(page)


@pytest.mark.parametrize("page", PAGES)
def test_classes_are_those_of_the_example(page):
    there = classes((ROOT / "examples" / PAGES[page]).read_text())
    here = classes("\n".join(code_of(page)))
    assert there and {name: here.get(name) for name in there} == there
