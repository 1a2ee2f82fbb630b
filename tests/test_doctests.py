"""The examples in the docstrings of all modules, under the names by which users import them."""

from __future__ import annotations

import doctest
import importlib

import pytest
from harness.sources import modules

pytestmark = pytest.mark.no_mpi

# pytest's own --doctest-modules goes by folders, and would load kernels/ again, as a package of that name.
WITH_EXAMPLES = [name for name, path in modules().items() if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name, monkeypatch, tmp_path):
    if name.startswith("mpiddl.torch."):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for examples in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name):
        runner.run(examples, out=said.append)
    assert runner.tries
    assert not runner.failures, "".join(said)
