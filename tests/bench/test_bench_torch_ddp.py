"""`mpiddl bench torch-ddp`: its rows, with a strategy beside DistributedDataParallel, and what is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more]


def test_rows_of_every_case(tmp_path, mpirun):
    path = tmp_path / "rows.json"
    found = mpirun(2, "mpiddl", "bench", "torch-ddp", "--elements", "1000", "--seconds", "0.1", "--strategy", "gossip:period=2",
                   "--json", path)
    assert found.returncode == 0, found.stderr
    rows = json.loads(path.read_text())["rows"]
    cases = {(row["case"].split(",")[0].split()[0], row["contender"]) for row in rows}
    assert cases == {(case, name) for case in ("exchange", "step", "round") for name in ("mpiddl", "gloo")} | {
        ("round", "gossip:period=2")}
    assert all(row["seconds"] > 0 for row in rows)


def test_an_unknown_strategy_is_one_error_before_anything_is_measured(mpirun):
    found = mpirun(2, "mpiddl", "bench", "torch-ddp", "--strategy", "gosip")
    assert found.returncode == 2
    assert found.stderr.count("mpiddl: error:") == 1
    assert "did you mean 'gossip'?" in found.stderr
