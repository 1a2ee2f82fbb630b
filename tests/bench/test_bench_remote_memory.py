"""``mpiddl bench remote-memory``: what it writes, and what it says to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

BENCH = "mpiddl", "bench", "remote-memory", "--seconds", "0"


@pytest.mark.more
@pytest.mark.parametrize(("kind", "name"), [("shared", "shared memory"), ("mpi", "MPI")])
def test_against_a_copy_and_grpc(mpirun, tmp_path, kind, name):
    out = tmp_path / "rows.json"
    done = mpirun(3, *BENCH, "--sizes", "1KiB,300KiB", "--kind", kind, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    rivals = {"memcpy"} | ({"gRPC"} if find_spec("grpc") else set())
    assert {(row["case"], row["baseline"]) for row in rows} == {
        (f"{what} {size}, {name}", rival) for what in ("write", "read") for size in ("1 KiB", "300 KiB") for rival in rivals}
    assert all(row["ratio"] == pytest.approx(row["baseline_seconds"] / row["seconds"]) for row in rows)
    assert ("gRPC: not installed" in done.stdout) == (find_spec("grpc") is None)


def test_nonsense_is_told(command, mpirun):
    alone = command(*BENCH)
    assert alone.returncode == 2 and "ranks: got 1, expected 2 or more" in alone.stderr
    done = mpirun(2, *BENCH, "--kind", "verbs", env={"MPIDDL_VERBS": "off"})
    assert done.returncode != 0 and done.stderr.count("verbs: switched off") == 1, done.stderr
    assert command(*BENCH, "--kind", "tcp").returncode == 2
