"""``mpiddl bench staleness``: its arithmetic, its file of runs, its processes, and what it says to nonsense."""

from __future__ import annotations

import json
import math
import operator
import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from mpiddl.bench import staleness, staleness_rows
from mpiddl.bench.staleness_runs import SEQUENTIAL, Runner, slow
from mpiddl.cli import main
from mpiddl.errors import DataError, MpiddlError, UsageError
from mpiddl.study.journal import Journal
from mpiddl.study.pool import Pool

pytestmark = pytest.mark.no_mpi

SMALL = staleness.Study(rules=("ddc-asgd", "asgd"), workers=(2,), patterns=("straggler",), seeds=2, epochs=1, grid=(0.04, 0.32),
                        tune_workers=2, hidden=(8,), batch=32)  # fmt: skip
PLANNED = 3 * 2 + 2 * 3


@pytest.fixture(scope="module")
def parts():
    return Runner("digits", []).parts


class Counted(Runner):
    """Trains nothing: what comes out is made up of the settings, and better with a smaller rate."""

    def __init__(self, parts, stop_after=math.inf):
        super().__init__("digits", [])
        self.parts, self.stop_after, self.done = parts, stop_after, []

    def __call__(self, run):
        if len(self.done) == self.stop_after:
            raise KeyboardInterrupt
        self.done.append(run)
        found = 0.9 - run.rate / 10 - 0.01 * run.seed - 0.02 * (run.rule == "asgd")
        return {"diverged": False, "validation_accuracy": found, "test_accuracy": None if run.tuning else found, "delay": 1,
                "seconds": 1.0, "cpu_seconds": 1.0}


@pytest.fixture
def study(tmp_path, parts):
    """``study(runner, what)``: a study with the file that all in this test share; returns its rows and what it said."""
    def call(runner, what=SMALL):
        said = []
        journal = Journal(tmp_path / "runs.jsonl", said.append)
        return staleness.run(what, runner, journal, 1, said.append), said

    return call


def outcomes(*accuracies):
    return {seed: {"test_accuracy": value, "diverged": value == 0.1, "delay": 7} for seed, value in enumerate(accuracies, 1)}


def test_arithmetic_by_hand():
    found = {
        ("equal", 8, "ours"): outcomes(0.880, 0.884, 0.882),
        ("equal", 8, "a"): outcomes(0.870, 0.880, 0.878),
        ("equal", 8, "b"): outcomes(0.900, 0.900, 0.1),
        ("equal", 4, "ours"): outcomes(0.5),
    }
    rates = {"ours": 0.3, "a": 0.2, "b": 0.1, SEQUENTIAL: 0.4}
    rows = staleness_rows.rows(("ours", "a", "b"), found, outcomes(0.883, 0.889, 0.887), rates)
    assert [(row["contender"], row["baseline"]) for row in rows] == [
        ("ours", SEQUENTIAL), ("a", SEQUENTIAL), ("b", SEQUENTIAL), ("ours", "a"), ("ours", SEQUENTIAL)]
    t2 = 4.302653  # 97.5 % of Student's t with 2 degrees of freedom, from a table
    ours, _, b, best, alone = rows
    assert ours["accuracy"] == pytest.approx(88.2) and ours["interval"] == pytest.approx(t2 * 0.2 / math.sqrt(3))
    assert ours["baseline_accuracy"] == pytest.approx((88.3 + 88.9 + 88.7) / 3)
    apart = [-0.3, -0.5, -0.5]
    s = math.sqrt(sum((d + 1.3 / 3) ** 2 for d in apart) / 2)
    assert ours["difference"] == pytest.approx(-1.3 / 3) and ours["difference_interval"] == pytest.approx(t2 * s / math.sqrt(3))
    assert (ours["wanted"], ours["came"], ours["sure"]) == (-0.3, False, False)  # 0.13 short, with an interval of 0.29
    assert best["difference"] == pytest.approx((1.0 + 0.4 + 0.4) / 3) and best["wanted"] == 0 and best["came"]
    assert (b["diverged"], b["accuracy"], b["wanted"], b["came"]) == (1, pytest.approx(190 / 3), None, None)
    assert (alone["workers"], alone["seeds"], alone["interval"], alone["wanted"]) == (4, [1], None, None)


def test_a_whole_study(study, parts, tmp_path):
    runner = Runner("digits", [])
    runner.parts = parts
    rows, said = study(runner)
    assert [row["contender"] for row in rows] == ["ddc-asgd", "asgd", "ddc-asgd"] and "0:00:00 left" in said[-1]
    assert all(10 < row["accuracy"] < 100 and row["seeds"] == [1, 2] for row in rows)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert len(lines) == PLANNED and {line["settings"]["slow"] for line in lines if "slow" in line["settings"]} == {"", "1:8"}
    assert {line["settings"]["seed"] for line in lines if line["settings"]["tuning"]} == {0}
    again, _ = study(Counted(parts, stop_after=0))  # which would be stopped by its first run
    assert again == rows


def test_a_study_that_was_killed_goes_on(study, parts, tmp_path):
    first, second = Counted(parts, stop_after=8), Counted(parts)
    with pytest.raises(KeyboardInterrupt):
        study(first)
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # in the middle of a line
    rows, said = study(second)
    assert len(second.done) == PLANNED - 7 and second.done[0] == first.done[-1]
    assert sum("line 8: damaged" in line for line in said) == 1
    assert len(file.read_text().splitlines()) == PLANNED + 1
    assert rows[0]["difference"] == pytest.approx(0) and rows[2]["difference"] == pytest.approx(2)
    assert study(Counted(parts, stop_after=0))[0] == rows


@pytest.mark.parametrize("line", [b"", b"nonsense", b"\xff", b"null", b"[1]", b'{"settings": 1}',
                                  b'{"settings": 1, "outcome": 2}', b'{"settings": 1, "outcome": {"second": 1}}',
                                  b"[" * 100_000])  # fmt: skip
def test_a_damaged_line_is_passed_over(tmp_path, line):
    file, said = tmp_path / "runs.jsonl", []
    Journal(file, said.append, ["seconds"]).add({"run": 1}, {"seconds": 1})
    file.write_bytes(file.read_bytes() + line + b"\n")
    Journal(file, said.append, ["seconds"]).add({"run": 2}, {"seconds": 2})
    said.clear()
    assert len(Journal(file, said.append, ["seconds"])) == 2
    assert said == [f"{file}, line 2: damaged, passed over"] * bool(line)


@pytest.mark.parametrize("rate", [1e-13, 1e-300, 0.0141, 0.64])
def test_a_rate_of_the_grid_is_the_one_that_is_taken(rate):
    for run in replace(SMALL, grid=(rate,)).tuning():
        share = 1 if run.job()["optimiser"] == "sgd" else 0.1
        assert run.job()["rate"] == pytest.approx(share * rate, rel=1e-11, abs=0)


def test_studies_share_runs(study, parts, tmp_path):
    study(Counted(parts))
    wider = replace(SMALL, patterns=("straggler", "equal"), seeds=3)
    other = Counted(parts)
    study(other, wider)
    assert len(other.done) == 4 + 5  # two rules and two seeds at equal speeds, and all of the third seed
    ours, theirs = (Journal(tmp_path / "runs.jsonl", print) for _ in range(2))
    theirs.add({"a": 1}, {"b": 2})
    with open(theirs.path, "ab") as file:
        file.write(b'{"settings": {"c"')  # on its way
        file.flush()
        assert ours.find({"a": 1}) is None
        ours.refresh()
        assert ours.find({"a": 1}) == {"b": 2}
        file.write(b': 3}, "outcome": {}}\n')
    ours.refresh()
    assert ours.find({"c": 3}) == {}


def test_settings_tell_runs_apart(parts):
    runner = Counted(parts)
    run = SMALL.tuning()[-1]
    others = [replace(run, **change) for change in (
        {"rate": 0.5}, {"workers": 3}, {"pattern": "spread"}, {"seed": 1}, {"tuning": False}, {"epochs": 2}, {"batch": 16},
        {"hidden": (9,)}, {"rule": "dana"}, {"rule": "dc-asgd-c"}, {"rule": "dc-asgd-c:strength=0.1"}, {"rule": SEQUENTIAL})]
    keys = {json.dumps(runner.settings(other), sort_keys=True) for other in (run, *others)}
    assert len(keys) == 1 + len(others)


class Unread:
    """Rows that nobody may look at."""

    n, shape, classes, targets = 360, (64,), 10, ()

    def read(self, ranges):
        raise DataError("read")


def test_rates_are_chosen_without_test_rows(parts):
    runner = Runner("digits", [])
    runner.parts = parts._replace(tested=replace(parts.tested, test=Unread()))
    run = SMALL.tuning()[-1]
    assert parts.tuning.test is None
    assert runner(run)["test_accuracy"] is None
    with pytest.raises(DataError, match="read"):
        runner(replace(run, tuning=False))


def test_rates_are_chosen_by_the_rows_held_back(parts, tmp_path):
    journal, runner = Journal(tmp_path / "runs.jsonl", print), Counted(parts)
    for run in SMALL.tuning()[:-1]:
        best = run.rate == (0.32 if run.rule == "ddc-asgd" else 0.04)
        journal.add(runner.settings(run), {"validation_accuracy": 0.6 + 0.1 * best, "test_accuracy": 1.0 - best})
    assert staleness.chosen(SMALL, runner, journal) == {SEQUENTIAL: 0.04, "ddc-asgd": 0.32}  # asgd's are not complete
    ((x, _),), ((x_test, _),) = (source.read([range(source.n)]) for source in (parts.tested.train, parts.tested.test))
    rows = [set(map(bytes, np.ascontiguousarray(part))) for part in (x, parts.x, x_test)]
    assert len(x) + len(parts.x) + len(x_test) == 1797 == len(set.union(*rows))  # no digit is there twice


def test_speeds():
    assert slow("spread", 3) == "0:1,1:2.5,2:4" and slow("straggler", 8) == "7:8"


def test_what_a_process_does_comes_back():
    with Pool(operator.neg, 2) as pool:
        assert sorted(pool.results(range(5))) == [(task, -task) for task in range(5)]
        with pytest.raises(MpiddlError, match="bad operand"):
            list(pool.results(["word"]))


def test_a_process_that_ends_is_told():
    with Pool(os._exit, 2) as pool, pytest.raises(MpiddlError, match="3: the process of this run ended with exit code 3"):
        list(pool.results([3]))


@pytest.mark.parametrize(("change", "said"), [
    ({"rules": ()}, "rules: got none"),
    ({"rules": ("asgd", "asgd")}, "rules: got asgd,asgd"),
    ({"rules": ("asdg",)}, "did you mean 'asgd'"),
    ({"rules": ("local-sgd",)}, "expected parameter servers"),
    ({"rules": ("asgd:communication=one-sided",)}, "expected communication=two-sided"),
    ({"rules": ("asgd:servers=9999999",)}, "expected at most 64 servers"),
    ({"workers": (1, 8)}, "workers: got 1, expected 2"),
    ({"patterns": ("slow",)}, "patterns: got 'slow'"),
    ({"seeds": 0}, "seeds: got 0"),
    ({"grid": (0.1, -1.0)}, "grid: got 0.1,-1"),
    ({"grid": (0.1, math.nan)}, "grid: got"),
    ({"tune_workers": 1}, "tune_workers: got 1"),
])  # fmt: skip
def test_nonsense_is_refused(change, said):
    with pytest.raises(UsageError, match=said):
        replace(SMALL, **change)


@pytest.mark.parametrize(("flags", "said"), [
    (("--grid", "small"), "grid: got 'small', expected numbers"),
    (("--jobs", "-1"), "jobs: got -1"),
    (("--results", "/nowhere/at/all.jsonl"), "results: /nowhere/at/all.jsonl"),
    (("--plot", "picture"), "plot: got 'picture'"),
    (("--data", "nosuch"), "got 'nosuch', expected the built-in data set 'digits'"),
    (("--data", "digits", "--workers", "64"), "batch: got 2048, expected at most"),
    (("--rules", "asgd:lag=3"), "strategy asgd: got 'lag=3'"),
])  # fmt: skip
def test_nonsense_is_told(capsys, tmp_path, flags, said):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "staleness", "--results", str(tmp_path / "runs.jsonl"), *flags])
    assert ended.value.code == 2 and capsys.readouterr().err.count(said) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.plots
def test_tables_and_picture(study, parts, tmp_path, capsys):
    rules = "asgd", "asgd:servers=2", "dc-asgd-c:strength=0.1,servers=2"
    study(Counted(parts), replace(SMALL, rules=rules))
    table, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    plot = ["--plot", picture] if find_spec("matplotlib") else []
    words = ["bench", "staleness", "--data", "digits", "--rules", ",".join(rules), "--workers", "2",
             "--patterns", "straggler", "--tune-workers", "2", "--grid", "0.04,0.32", "--hidden", "8", "--seeds", "2",
             "--epochs", "1", "--results", tmp_path / "runs.jsonl", "--show", "--json", table, *plot]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    said, trouble = capsys.readouterr()
    assert ended.value.code == 0, trouble
    assert "straggler speeds" in said and "-2.00" in said and "±" not in said  # of two seeds: their range
    assert len(json.loads(table.read_text())["rows"]) == 4 and (not plot or picture.stat().st_size > 1000)
