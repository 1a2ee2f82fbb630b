"""The measurement of fits against scikit-learn's."""

from __future__ import annotations

import pytest

from mpiddl.bench import sklearn_mlp
from mpiddl.errors import UsageError

pytestmark = pytest.mark.no_mpi


@pytest.mark.more
def test_rows_say_what_was_measured():
    [row] = sklearn_mlp.run(["digits"], [], rounds=1)
    assert row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"])
    assert row["accuracy"] == pytest.approx(row["baseline_accuracy"], abs=0.02)
    assert row["products"] > 0 and row["accuracy"] > 0.8


def test_an_unknown_case_is_refused():
    with pytest.raises(UsageError, match="cases: got 'letters', expected one or more of batch-200"):
        sklearn_mlp.run(["letters"], [])
