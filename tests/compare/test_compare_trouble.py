"""``mpiddl compare`` and what people do to it: hostile files, damaged folders, names made to do harm, budgets not used."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from harness.comparisons import HOSTS, TRAIN, Told, compared, found_of, grid_of, outcome

import mpiddl
from mpiddl.compare import html as page
from mpiddl.compare import markdown, plots
from mpiddl.compare.advice import advise
from mpiddl.compare.document import Heading, Items, Paragraph, Table
from mpiddl.compare.grid import make_grid
from mpiddl.compare.processes import Ended, reason
from mpiddl.compare.statistics import entries
from mpiddl.compare.store import Store
from mpiddl.compare.writing import write_report
from mpiddl.errors import OutputError, UsageError
from mpiddl.study.journal import Journal

pytestmark = pytest.mark.no_mpi

HARM = "<img src=x onerror=alert(1)>|"


def advice(grid, *told):
    found = advise(grid, found_of(grid, *told), 2, simulated=False)
    return " ".join([*found.verdict, *found.warnings, *found.notes])


@pytest.mark.parametrize(("asked", "workers", "said"), [
    ({}, (4, 4), "workers: got [4, 4], expected each value only once"),  # as --simulate 4,4
    ({"strategies": ["asgd", {"strategy": "asgd", "optimiser": "nesterov"}]}, (), "which are the same"),  # it is [train]'s
    ({"strategies": [{"strategy": "asgd", "rate": k / 1000} for k in range(1, 102)]}, (), "got 101 strategies, expected"),
])  # fmt: skip
def test_what_comes_twice_or_without_end_is_refused(asked, workers, said):
    with pytest.raises(UsageError) as refused:
        make_grid(TRAIN, {"strategies": ["ring"], "workers": 2, **asked}, workers)
    assert said in str(refused.value)


def test_names_do_no_harm(tmp_path):
    blocks = [Heading(HARM, 1), Paragraph(HARM), Items([HARM], "verdict"), Table(("strategy", "x"), [(HARM, HARM)])]
    text = page.render(blocks)
    assert HARM not in text and text.replace("\u00a0", " ").count("&lt;img src=x onerror=alert(1)&gt;|") == 6
    written = markdown.render(blocks)
    assert written.count("<img") == written.count(r"\<img") == 5 and written.count(r"\|") == 5 and "[" not in written
    grid = grid_of({"strategy": "asgd", "label": "../../" + "x" * 300}, {"strategy": "ring", "label": "../../" + "x" * 301})
    made = compared(tmp_path, grid, Told(lambda cell: Ended(1, f"ValueError: no\x1b[2J{HARM}")))
    names = {path.name for path in (tmp_path / "out" / "failed").iterdir()}
    assert len(names) == 6 and {outcome["words"] for outcome in made.found().values()} == names  # each its own, in the folder
    assert reason(Ended(1, "ValueError: no\x1b[2J"), 60) == "no[2J"  # a terminal is not told what to do


def test_runs_in_the_report_have_the_names_of_its_rows(tmp_path):
    fast, slow = ({"strategy": "asgd", "rate": rate, "label": label} for rate, label in ((0.1, "fast"), (0.01, "slow")))
    grid = grid_of("ring", fast, slow)
    told = json.loads(write_report(compared(tmp_path, grid), "")[1].with_suffix(".json").read_text())
    assert [run["strategy"] for run in told["runs"]] == ["ring", "fast", "slow"] * 3
    assert {run["in_full"] for run in told["runs"]} == {"Ring()"}


@pytest.mark.parametrize("text", ['{"train": 3}', '{"versions": []}', '{"train": {"epo', "3", ""])
def test_what_was_compared_before_may_be_damaged(tmp_path, text):
    grid = grid_of("ring")
    compared(tmp_path, grid)
    (tmp_path / "out" / "compare.json").write_text(text)
    again = Told()
    assert len(compared(tmp_path, grid, again).found()) == 3 and not again.done


@pytest.mark.parametrize(("old", "new"), [('"curve"', '"kurve"'), ('"accuracy": 0.91, "loss"', '"accuracy": "x", "loss"')])
def test_a_line_that_no_report_can_be_made_of_is_run_again(tmp_path, old, new):
    grid = grid_of("ring")
    compared(tmp_path, grid)
    file = tmp_path / "out" / "cells.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    assert old in first
    file.write_text(first.replace(old, new) + "".join(others))
    again = Told()
    made = compared(tmp_path, grid, again)
    assert write_report(made, "")[0][0].choice == "ring" and [cell.seed for cell in again.done] == [1]


def test_a_disk_that_takes_a_part_of_a_line_is_told(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "cells.jsonl", print)
    journal.add({"seed": 1}, {"wall": 1})
    real = open

    class Full:
        """Takes half of what comes, as the kernel does for the last free bytes."""

        def __init__(self, *words, **more):
            self._file = real(*words, **more)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, line):
            return self._file.write(line[: len(line) // 2])

    monkeypatch.setattr("mpiddl.study.journal.open", Full, raising=False)
    with pytest.raises(OutputError, match=os.strerror(28)):
        journal.add({"seed": 2}, {"wall": 2})
    assert journal.find({"seed": 2}) is None
    monkeypatch.undo()
    journal.add({"seed": 3}, {"wall": 3})
    said = []
    again = Journal(tmp_path / "cells.jsonl", said.append)
    assert len(said) == 1 and [bool(again.find({"seed": seed})) for seed in (1, 2, 3)] == [True, False, True]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OutputError, match=r"report\.html"):
        Store(tmp_path, (1, 1), print).write("report.html", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_baseline_that_gets_to_the_target_seldom_is_told():
    grid = grid_of("two-step", "asgd", target=0.9)
    fast = [outcome(0.95, a, 2.0) for a in (0.94, 0.95, 0.95)]
    told = advice(grid, [outcome(0.91, test=0.8), outcome(0.91, test=0.8), outcome(0.8)], fast)
    assert "Take asgd" in told and "two-step reaches it with 2 of 3 seeds" in told
    assert "time to 90 %: two-step does not reach it" in advice(grid, [outcome(0.8)] * 3, fast)
    assert "reaches it with" not in advice(grid, [outcome(0.91, test=0.8)] * 3, fast)


def test_what_the_seeds_leave_open_is_told():
    grid = grid_of("two-step", "local-sgd")
    exact = [outcome(a) for a in (0.90, 0.91, 0.92)]
    noisy = [outcome(a, seconds=5.0) for a in (0.88, 0.93, 0.91)]
    told = advice(grid, exact, noisy)
    assert "Take local-sgd" in told
    assert "two-step and local-sgd are equal within noise in validation accuracy; of these, local-sgd is the fastest" in told
    near = [outcome(a, seconds=5.0) for a in (0.899, 0.909, 0.919)]
    told = advice(grid, exact, near)
    assert "Take local-sgd" in told and "show no clear difference in validation accuracy; of these" in told


def test_a_budget_that_was_not_kept_is_told():
    grid = grid_of("two-step", "asgd", bytes=4_000_000)
    cut = [outcome(epochs=1.5)] * 3
    assert "budget" not in advice(grid, cut, cut)
    told = advice(grid, cut, [outcome()] * 3)
    assert "asgd did not use the whole budget: the 2 epochs of [train] ended before it." in told
    assert "asgd (1.50 times the budget) used more than" in advice(grid, cut, [outcome(sent=6_000_000, epochs=1.5)] * 3)
    timed, brief = replace(grid, budget=("seconds", 5.0)), [outcome(seconds=5.0, epochs=1.5)] * 3
    assert "two-step (2.00 times the budget)" in advice(timed, cut, brief)
    assert "budget" not in advice(replace(grid, budget=None), cut, [outcome()] * 3)


def test_seconds_that_are_the_budget_choose_nobody():
    grid = grid_of("two-step", "local-sgd", seconds=10.0)
    slow, less = [outcome(epochs=1.5)] * 3, [outcome(seconds=9.9, sent=5_000_000, epochs=1.5)] * 3
    told = advice(grid, slow, less)
    assert "Take two-step" in told and "local-sgd are equal within noise in validation accuracy; of these, two-step" in told
    less = [{**each, "seconds": 9.0} for each in less]
    assert "Take two-step" in advice(grid, slow, less) and "Take local-sgd" in advice(replace(grid, budget=None), slow, less)


def test_on_one_host_bytes_are_not_advised_by():
    """There some strategies pass numbers through memory, and send nothing."""
    grid = grid_of("two-step", "local-sgd", "gossip")
    costly, cheap = ([outcome(seconds=one, sent=sent, hosts=[]) for one in several]
                     for sent, several in ((10, (9.9, 10.0, 9.8)), (0, (9.8, 9.7, 10.0))))
    told = advice(grid, costly, cheap, [outcome(hosts=[])] * 3)
    assert "Take two-step" in told and "of these, two-step is the simplest." in told
    assert "so bytes were not compared" in told and "fewer bytes" not in told and "If only bytes" not in told
    timed = replace(grid, budget=("seconds", 10.0))
    assert "Take two-step" in advice(timed, costly, cheap, costly)
    between = [[{**each, "hosts": HOSTS} for each in seeds] for seeds in (costly, cheap, costly)]
    assert "Take local-sgd" in advice(grid, *between) and "were not compared" not in advice(grid, *between)


def test_what_differs_by_rounding_is_the_same():
    grid = grid_of("two-step", "gossip")
    rounded = [outcome(seconds=10.0 + 2e-15 * k, sent=1) for k in (1, 2, 2)]
    told = advice(grid, [outcome()] * 3, rounded)
    assert "Take gossip" in told and "training time +0.00 s, within noise" in told


@pytest.mark.parametrize(("budget", "folder", "looks"), [
    ({"max_seconds": 15.0}, None, 2), ({"max_bytes": 70_000}, None, 2),
    ({"max_seconds": 15.0}, "run", 1),  # it may go on as if it had not been cut
    ({"max_steps": 11}, None, 1),
])  # fmt: skip
def test_a_model_that_was_cut_amid_an_epoch_is_validated(tmp_path, budget, folder, looks):
    """Else a budget of seconds or bytes would let what steps together look at older models than the others."""
    out = str(tmp_path / folder) if folder else None
    job = {"epochs": 3, "batch": 128, "rate": 0.1, "simulate": 2, "quiet": True}
    result = mpiddl.train("softmax", "digits", out=out, strategy="two-step", **job, **budget)
    found = [line["step"] for line in result.history if "validation_loss" in line]
    assert len(found) == looks and found[0] == 11
    assert found[-1] == result.summary["steps"] or folder


def test_many_strategies_are_told_apart_in_pictures():
    grid = grid_of(*({"strategy": "asgd", "rate": k / 100} for k in range(1, 31)))
    looks = {(plots._colour(grid, entry), plots._marker(grid, entry)) for entry in entries(grid, {}, 2)}
    assert len(looks) == 30
