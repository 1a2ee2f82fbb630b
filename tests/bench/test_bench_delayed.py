"""``mpiddl bench delayed``: what it writes, and what it says to nonsense."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest


@pytest.mark.plots
@pytest.mark.more
def test_rows_and_the_share_of_the_bound(mpirun, tmp_path):
    out, picture = tmp_path / "rows.json", tmp_path / "steps.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    done = mpirun(2, "mpiddl", "bench", "delayed", "--hidden", "64", "--batch-per-rank", "8,16", "--seconds", "0",
                  "--steps", "2", "--strategy", "delayed", "--strategy", "local-sgd:period=2", "--json", out, *plot)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of the bound or more, expected 90%") == 2
    rows = json.loads(out.read_text())["rows"]
    assert not plot or picture.stat().st_size > 1000
    for batch in (8, 16):
        found = {row["contender"]: row for row in rows if row["batch_per_rank"] == batch}
        assert list(found) == ["computing alone", "communication alone", "synchronous", "delayed", "local-sgd:period=2",
                               "bound"]
        bound = max(found["computing alone"]["seconds"], found["communication alone"]["seconds"])
        assert found["bound"]["seconds"] == bound and found["bound"]["of_bound"] == 1
        assert found["delayed"]["of_bound"] == pytest.approx(bound / found["delayed"]["seconds"])
        assert {name for name, row in found.items() if row["wanted"]} == {"delayed", "local-sgd:period=2"}


@pytest.mark.parametrize(("flags", "said"), [
    (("--hidden", "wide"), "hidden: got 'wide', expected whole numbers of 1 or more"),
    (("--batch-per-rank", "64,0"), "batch_per_rank: got '64,0'"),
    (("--strategy", "asgd"), "strategy: got 'asgd', expected a synchronous strategy"),
    (("--strategy", "late"), "strategy: got 'late', expected one of"),
    (("--plot", "/nowhere/at/all.png"), "plot: /nowhere/at/all.png"),
    ((), "bench delayed: got 1 rank, expected 2 or more"),
])
def test_nonsense_is_told(command, flags, said):
    done = command("mpiddl", "bench", "delayed", "--seconds", "0", *flags)
    assert done.returncode != 0 and done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_strategy_that_ranks_do_not_share_is_refused(mpirun):
    done = mpirun(2, "mpiddl", "bench", "delayed", "--seconds", "0", "--strategy", "alone")
    assert done.returncode == 2 and done.stderr.count("strategy: got 'alone' on 2 ranks, expected one rank") == 1, done.stderr


@pytest.mark.more
def test_a_long_delay_takes_no_longer(mpirun):
    done = mpirun(2, "mpiddl", "bench", "delayed", "--hidden", "16", "--batch-per-rank", "7", "--seconds", "0", "--strategy",
                  "delayed:delay=60")  # fmt: skip
    assert done.returncode == 0, done.stderr
