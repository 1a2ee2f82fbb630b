"""scikit-learn's digits: 1,797 images of 8x8 pixels, always there. Pixels, 0 to 16, are scaled to 0..1."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..errors import DataError
from .arrays import arrays_data
from .base import Data
from .draws import HOLD_OUT, permutation
from .labels import Task

TEST_ROWS = 360  # a fifth, as close as a round number comes


def digits(task: Task | None = None) -> Data:
    """Return the digits: 1,437 rows to train on and 360 to test on, in a fixed random order.

    Raises
    ------
    DataError
        If scikit-learn is not installed.
    """
    pixels, labels = _table()
    x = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)
    order = permutation(len(x), 0, HOLD_OUT)
    test, train = order[:TEST_ROWS], order[TEST_ROWS:]
    return arrays_data(x[train], labels[train], x[test], labels[test], name="digits", task=task)


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels float64 (1797, 64) and labels int64 (1797,)."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError(
            "digits: this data set is part of scikit-learn, which is not installed: pip install scikit-learn"
        )
    # Straight from the file: importing sklearn.datasets takes over two seconds on every rank.
    table = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if table.exists():
        values = np.loadtxt(table, delimiter=",")
        return values[:, :-1], values[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.data, bunch.target.astype(np.int64)
