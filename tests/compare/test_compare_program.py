"""``mpiddl compare --program``: an unchanged program with several strategies."""

from __future__ import annotations

import json
import sys
from itertools import starmap

import pytest
from harness.tiers import more

from mpiddl.compare.grid import Contender
from mpiddl.compare.program_report import verdict
from mpiddl.compare.statistics import Entry

pytestmark = pytest.mark.no_mpi

PROGRAM = """
import sys
from itertools import starmap
print("accuracy: 1 %")
print("accuracy: " + sys.argv[sys.argv.index("--seed") + 1] + "0 %")
"""

COMPARE = [sys.executable, "-m", "mpiddl", "compare"]


def entry(label, metrics, seconds, failed=0):
    good = {seed: {"metric": value, "seconds": seconds, "bytes": 0} for seed, value in enumerate(metrics, 1)}
    return Entry(Contender(label, "auto"), 2, good, (), {99: "lost"} if failed else {}, ())


def test_the_fastest_of_those_that_are_as_good_is_advised():
    there = [entry("slow", [90.0, 91.0, 92.0], 10.0), entry("fast", [90.2, 90.9, 92.1], 2.0), entry("bad", [50.0] * 3, 1.0)]
    choice, sentences = verdict(there, lower=False, margin=0.0)
    assert choice == "fast"
    assert "5.00 times as fast" in " ".join(sentences)
    assert verdict(there, lower=True, margin=0.0).choice == "bad"
    assert verdict(there, lower=False, margin=60.0).choice == "bad"


def test_a_strategy_that_failed_is_left_out():
    choice, sentences = verdict([entry("first", [1.0, 1.0], 1.0, failed=1), entry("second", [0.5, 0.5], 1.0)], False, 0.0)
    assert choice == "second" and "first (1 run failed) is left out." in sentences
    assert verdict([entry("first", [], 1.0, failed=1)], False, 0.0).choice is None


@pytest.mark.more
def test_a_program_on_one_and_two_ranks(command, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--program", "program.py", "--metric", "accuracy: (.*) %", "--strategy", "auto", "--strategy", "two-step",
             "--workers", "1,2", "--seeds", "2", "--", "--seed", "{seed}"]
    done = command(*COMPARE, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "runs/compare-program/report.json").read_text())
    assert [(row["strategy"], row["workers"]) for row in report["rows"]] == [("one rank", 1), ("auto", 2), ("two-step", 2)]
    assert all([row["good"][seed]["metric"] for seed in "12"] == [10.0, 20.0] for row in report["rows"])
    assert "Take " in done.stdout and (tmp_path / "runs/compare-program/report.html").exists()
    again = command(*COMPARE, *words, cwd=tmp_path)
    assert again.returncode == 0 and "6 done, 0 to do" in again.stderr
    (tmp_path / "program.py").write_text(PROGRAM + "sys.exit(3)\n")
    failing = command(*COMPARE, *words[:6], "--seeds", "1", *words[-3:], cwd=tmp_path)
    assert failing.returncode == 1 and "FAILED" in failing.stderr and "none is advised" in failing.stdout


@pytest.mark.parametrize(("words", "said"), [
    (["--program", "program.py"], "metric: got none"),
    *starmap(more, [(["--program", "missing.py", "--metric", "x"], "program: got 'missing.py'"),
    (["--program", "program.py", "--metric", "("], "metric: got '('"),
    (["--program", "program.py", "--metric", "(a)(b)"], "with 2 groups"),
    (["--program", "program.py", "--metric", "x", "--strategy", "nothing"], "strategy"),
    (["--program", "program.py", "--metric", "x", "--strategy", "auto", "--strategy", "auto"], "expected each of them once"),
    (["--program", "program.py", "--metric", "x", "--workers", "0"], "workers: got '0'"),
    (["--program", "program.py", "--metric", "x", "--simulate"], "program: got --simulate"),
    (["--metric", "x", "job.toml"], "metric: got this option without --program"),
    ([], "JOB.toml: got nothing"),
    (["--program", "program.py", "--metric", "nowhere", "--seeds", "1"], "was not found in the output"),
    (["--program", "program.py", "--metric", "(acc)uracy", "--seeds", "1"], "expected a number")]),
])
def test_mistakes_are_told(command, tmp_path, words, said):
    (tmp_path / "program.py").write_text("print('accuracy: 1')")
    done = command(*COMPARE, *words, cwd=tmp_path)
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
