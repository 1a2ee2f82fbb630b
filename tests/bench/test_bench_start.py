"""``mpiddl bench start``: what it measures, and what it says to a mistake."""

from __future__ import annotations

import json
import sys

import pytest

from mpiddl.bench import start
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine.launch_line import Machine


@pytest.mark.limit(240)
@pytest.mark.more
@pytest.mark.no_mpi
def test_rows_of_one_rank_and_of_two(command, tmp_path):
    out = tmp_path / "rows.json"
    ended = command("mpiddl", "bench", "start", "--rounds", "1", "--json", out, timeout_s=200)
    assert ended.returncode == 0, ended.stderr
    assert "1 rank" in ended.stdout and "2 ranks" in ended.stdout and "resident MiB" in ended.stdout
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 12 and {row["baseline"] for row in rows} == {start.BASELINE}
    assert all(0 < row["cpu_seconds"] < 200 and 20 < row["resident_MiB"] < 1000 for row in rows)
    one = {row["contender"]: row for row in rows if row["case"] == "1 rank"}
    assert one["mpiddl train, 1 step"]["resident_MiB"] > one[start.BASELINE]["resident_MiB"] + 20


def test_the_largest_of_all_ranks_is_taken_and_the_first_round_is_not_counted(monkeypatch):
    costs = iter([start._Cost(99.0, 99.0, 2.0**20), start._Cost(2.0, 1.0, 3 * 2.0**20), start._Cost(4.0, 3.0, 5 * 2.0**20)])
    monkeypatch.setattr(start, "_programs", lambda folder: {start.BASELINE: ""})
    monkeypatch.setattr(start, "_start", lambda *call: next(costs))
    (row,) = start.run({}, [1], 2, lambda text: None)
    assert (row["case"], row["seconds"], row["cpu_seconds"], row["resident_MiB"]) == ("1 rank", 3.0, 2.0, 4.0)


def test_a_rank_that_has_most_counts():
    program = "import os; os.write(2, b'\\nstart: 1.5 7\\n\\nstart: 0.5 9\\n')"
    cost = start._start([sys.executable, "-c", program], {}, "two ranks")
    assert cost[1:] == (1.5, 9.0)


def test_a_program_that_fails_is_told_by_its_name():
    with pytest.raises(MpiddlError, match=r"broken: the program failed:\n(?s:.*)ZeroDivisionError"):
        start._start([sys.executable, "-c", "1 / 0"], {}, "broken")


def test_several_ranks_need_mpiexec(monkeypatch):
    monkeypatch.setattr(start, "this_machine", lambda env: Machine("", "other", 2, False))
    with pytest.raises(UsageError, match="ranks: got 2, expected 1"):
        start.run({}, [2], 1, lambda text: None)


@pytest.mark.parametrize(("flags", "said"), [
    (("--ranks", "0"), "ranks: got '0', expected whole numbers of 1 or more"),
    (("--json", "/nowhere/at/all.json"), "json: /nowhere/at/all.json"),
])
def test_nonsense_is_told(command, flags, said):
    ended = command("mpiddl", "bench", "start", *flags)
    assert ended.returncode == 2 and ended.stderr.count(said) == 1, ended.stderr


def test_it_is_started_on_one_rank(mpirun):
    ended = mpirun(2, "mpiddl", "bench", "start")
    assert ended.returncode != 0 and ended.stderr.count("got several ranks, expected one") == 1, ended.stderr
