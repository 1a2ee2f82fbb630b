"""``mpiddl compare``: its file, its arithmetic, its folder of finished runs, and what it says to nonsense."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from harness.comparisons import FACTS, TRAIN, grid_of
from harness.lone_rank import Rank

from mpiddl.compare.advice import advise
from mpiddl.compare.backends import Simulated
from mpiddl.compare.grid import KEYS, Cell, make_grid, ranks_beside, read_grid
from mpiddl.compare.preflight import check
from mpiddl.compare.processes import Ended, reason
from mpiddl.compare.statistics import entries, grain, paired, points, rows
from mpiddl.compare.store import Store
from mpiddl.compare.strategy_texts import plain
from mpiddl.compare.study import Study
from mpiddl.compare.writing import remember, write_report
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.strategies import STRATEGIES, make_strategy
from mpiddl.transport import uncaught

pytestmark = pytest.mark.no_mpi

THREE = ["two-step", "local-sgd", {"strategy": "asgd", "rate": 0.02}]
ASKED = {"strategies": THREE, "workers": [2, 4], "seeds": 2, "target": 0.9}
GRID = make_grid(TRAIN, ASKED)


def outcome(accuracy, seconds=10.0, sent=4_000_000, **more):
    """What a run might have told."""
    curve = [{"samples": 1000 * k, "seconds": seconds * k / 2, "bytes": sent * k // 2, "accuracy": accuracy - 0.05 * (2 - k),
              "distance": 0.1} for k in (1, 2)]
    return {"accuracy": accuracy, "seconds": seconds, "bytes": sent, "staleness": None, "curve": curve,
            "hosts": [{"sent": sent, "received": sent}], "phases": {"compute": seconds, "communication": 0.0, "waiting": 0.0},
            "wall": 1.0, "samples": 2000, "ranks": 2, "parameters": 100, "mpi": "none", **more}


class Told(Simulated):
    """Trains nothing: a run's outcome is made up, unless ``act`` does something else with it."""

    def __init__(self, act=None, stop_after=10**9):
        super().__init__(1, {})
        self.done, self._act, self._left = [], act or (lambda cell: None), stop_after

    def run(self, cell, files, mark, limit_s):
        if len(self.done) == self._left:
            raise KeyboardInterrupt
        self.done.append(cell)
        ended = self._act(cell)
        if ended is None:
            late = {"staleness": {"histogram": {"0": 3, "2": 1}}} if cell.contender.spec == "asgd" else {}
            Path(files[1]).write_text(json.dumps(outcome(0.9 + 0.01 * cell.seed, **late)))
        return ended or Ended(0, "")


@pytest.fixture
def study(tmp_path):
    """``study(place, grid)``: runs what is missing in the folder that all in this test share; returns it, and what it said."""

    def call(place, grid=GRID, part=(1, 1)):
        said = []
        store = Store(tmp_path / "out", part, said.append)
        store.take()
        try:
            made = Study(grid, place, store, FACTS, said.append)
            made.begin(part)
            remember(made)
            made.run(part)
        finally:
            store.close()
        return made, said

    return call


def test_a_grid_is_all_of_it_in_order():
    cells = GRID.cells()
    assert len(cells) == len(set(map(str, cells))) == 3 * 2 * 2
    assert [cell.seed for cell in cells] == [1] * 6 + [2] * 6
    assert [contender.label for contender in GRID.contenders] == ["two-step", "local-sgd", "asgd (rate=0.02)"]
    settings = GRID.settings(cells[2], 1000)
    wanted = {"rate": 0.02, "seed": 1, "optimiser": "nesterov", "threads": 1, "strategy": "asgd"}
    assert settings.items() >= wanted.items()


@pytest.mark.parametrize(("asked", "wanted"), [
    ({}, {}),
    ({"samples": 2500}, {"epochs": 3, "max_steps": 40}),
    ({"samples": 1000}, {"epochs": 1, "max_steps": 16}),  # the last batch of an epoch is a small one
    ({"seconds": 9}, {"max_seconds": 9.0}),
    ({"bytes": 10_000}, {"max_bytes": 10_000}),
])  # fmt: skip
def test_an_equal_budget(asked, wanted):
    grid = make_grid({"batch": 64}, {**ASKED, **asked})
    settings = grid.settings(grid.cells()[0], 1000)
    assert {name: settings.get(name) for name in wanted} == wanted
    assert not ({"max_steps", "max_seconds", "max_bytes"} - wanted.keys()) & settings.keys()


def test_shards_are_the_same_for_all_and_suit_servers():
    grid = make_grid({}, {"strategies": ["two-step", "asgd:servers=3,communication=two-sided"], "workers": [2, 16, 24]})
    assert [grid.shards(workers) for workers in grid.workers] == [16, 32, 48]
    assert ranks_beside(make_strategy("asgd:servers=3"), 8) == 3 and ranks_beside(make_strategy("ring"), 8) == 0


def test_an_optimiser_that_was_not_chosen_is_that_of_each_strategy(study):
    grid = make_grid({"epochs": 1, "hidden": [8]}, {"strategies": ["asgd", "ddc-asgd"], "workers": 2, "seeds": 1})
    made, _ = study(Simulated(2, os.environ), grid)
    assert [made.key(cell)["optimiser"] for cell in grid.cells()] == ["momentum", "nesterov"]
    assert [outcome["strategy"].partition("(")[0] for outcome in made.found().values()] == ["ASGD", "DDCASGD"]
    with pytest.raises(UsageError, match="which are the same"):
        make_grid({}, {"strategies": ["ddc-asgd", {"strategy": "ddc-asgd", "optimizer": "nesterov"}]})


def test_other_names_of_settings_are_understood():
    grid = make_grid({"lr": 0.1, "batch_size": 32}, {"strategies": ["ring", {"strategy": "asgd", "lr": 0.02}]})
    assert [grid.settings(cell, 100)["rate"] for cell in grid.cells()[:2]] == [0.1, 0.02]
    assert grid.contenders[1].label == "asgd (rate=0.02)"


def test_every_strategy_is_described():
    said = [plain(make_strategy(name)) for name in STRATEGIES]
    assert said == [entry.about for entry in STRATEGIES.values()] and len(set(said)) == len(STRATEGIES)


OPEN_MPI = """An MPI communication peer process has unexpectedly disconnected.  This
usually indicates a failure in the peer process (e.g., a crash).

  Local host: h7
  Local PID:  141
  Peer host:  h4
----------
\0[h7:00000] *** on a NULL communicator
----------
\0"""
NOTICED = """----------
prterun noticed that process rank 3 with PID 5 on node h4 exited on
signal 9 (Killed).
----------"""
HYDRA = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 14 RUNNING AT h4
=   EXIT CODE: 9
==========
[mpiexec@login] main (mpiexec.c:270): process manager error waiting for completion"""


@pytest.mark.parametrize(("code", "text", "said"), [
    (1, OPEN_MPI, "a rank on h4 was killed or crashed"),
    (137, NOTICED, "rank 3 on h4 was ended by signal 9"),
    (9, HYDRA, "a rank on h4 ended with code 9"),
    (137, "srun: error: h2: task 3: Killed\nsrun: Terminating StepId=1.0", "on h2, task 3: Killed"),
    (1, f"Traceback\nmpiddl.errors.CommError: nobody is there\n{HYDRA}", "nobody is there"),  # the cause, not what came of it
    (137, "", "ended by signal 9 (out of memory?)"),
    (143, "some words", "ended by signal 15"),
    (1, "some words\n----\n\0\n", "some words"),
    (2, "----", "exit code 2"),
])  # fmt: skip
def test_why_a_run_has_failed_is_told(code, text, said):
    assert reason(Ended(code, text), 60) == said


OPEN_MPI_ENDED = """--------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-h4-7@1,1]
   Exit code:    1
--------
"""


@pytest.mark.parametrize(("error", "said"), [(UsageError("rate: got -1"), "rate: got -1"), (OSError("shard 7"), "shard 7")])
@pytest.mark.parametrize("alone", ["", " in loader", None])
def test_the_error_of_a_run_on_several_ranks_is_told(capsys, monkeypatch, error, said, alone):
    with suppress(type(error)):
        raise error
    if alone is None:
        monkeypatch.setattr(uncaught, "_speaks", lambda error: True)
        error.speaks, error.ranks = True, "ranks 0, 1, 2"
        uncaught._Once(None)(type(error), error, None)
    else:
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit):
            uncaught.end_job(Rank(), error, alone)
    assert reason(Ended(1, capsys.readouterr().err + OPEN_MPI_ENDED), 60) == said


def test_the_example_and_its_page_tell_the_keys_there_are():
    root = Path(__file__).parents[2]
    grid = read_grid(root / "examples" / "compare.toml")
    assert len(read_grid(root / "examples" / "compare-fashion.toml").cells()) == 15
    assert len(read_grid(root / "examples" / "compare-hosts.toml").cells()) == 14
    late, seldom = (read_grid(root / "examples" / f"compare-{name}.toml") for name in ("staleness", "gossip"))
    assert late.cells() == [] and sum(len(late.tuning(each)) for each in late.contenders) == 91 and len(seldom.cells()) == 25
    assert check(grid, Simulated(1, {}), []).train_rows == 1293 and len(grid.contenders) == 5
    page = (root / "docs" / "compare.md").read_text()
    assert all(f"`{key}`" in page for key in KEYS)


def test_what_is_checked_is_what_there_is(tmp_path):
    facts = check(make_grid(TRAIN, {**ASKED, "strategies": list(STRATEGIES)[2:]}), Simulated(1, {}), [])
    assert facts.train_rows == 1293 and facts.data["rows"] == 1437 and facts.data["test_rows"] == 360
    file = tmp_path / "job.toml"
    file.write_text('[train]\nepochs = 2\nhidden = [8]\noptimiser = "nesterov"\n[compare]\nworkers = [2, 4]\nseeds = 2\n'
                    'target = 0.9\nstrategies = ["two-step", "local-sgd", {strategy = "asgd", rate = 0.02}]')
    assert read_grid(file) == GRID and read_grid(file, (8,)).workers == (8,)


def test_a_study_that_was_stopped_goes_on(study):
    first, second = Told(stop_after=5), Told()
    with pytest.raises(KeyboardInterrupt):
        study(first)
    made, said = study(second)
    assert first.done + second.done == GRID.cells() and any("5 done, 7 to do" in line for line in said)
    assert len(made.found()) == 12 and "[12/12]" in said[-1]
    assert study(Told(stop_after=0))[0].found() == made.found()  # which would be stopped by its first run


def test_a_line_cut_short_by_a_kill_is_run_again(study, tmp_path):
    study(Told())
    file = tmp_path / "out" / "cells.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    again = Told()
    _, said = study(again)
    assert again.done == GRID.cells()[-1:] and sum("damaged" in line for line in said) == 1
    assert not list((tmp_path / "out").glob(".cell*"))


def test_what_fails_is_a_row_and_is_tried_again(study, tmp_path):
    def act(cell):
        if cell.contender.spec == "asgd" and cell.workers == 4:
            return Ended(1, "Traceback\nmpiddl.errors.CommError: nobody is there\nmpiexec: 1 has failed")
        if cell.contender.spec == "local-sgd":
            return Ended(124, "") if cell.seed == 1 else Ended(1, "x.ConvergenceError: step 3: training has diverged at rate 1")
        return None

    made, said = study(Told(act))
    for words in ("FAILED: nobody is there", "FAILED: not finished after 3600 s", "DIVERGED"):
        assert sum(words in line for line in said) == 2
    told = {(row["strategy"], row["workers"]): row for row in rows(GRID, made.found())}
    assert told["asgd (rate=0.02)", 4]["failed"] == {"1": "nobody is there", "2": "nobody is there"}
    assert told["local-sgd", 2]["diverged"] == [2] and told["local-sgd", 2]["accuracy"] is None
    assert told["two-step", 4]["accuracy"]["value"] == pytest.approx(91.5)
    (name,) = {path.stem for path in (tmp_path / "out" / "failed").glob("asgd--rate-0-02--4-1-*")}
    assert "nobody is there" in (tmp_path / "out" / "failed" / f"{name}.txt").read_text()
    advice, page = write_report(made, "mpiddl compare")
    assert [each.choice for each in advice] == ["two-step", "two-step"]
    assert "1\u00a0diverged" in page.read_text() and "nobody is there" in page.with_suffix(".md").read_text()
    again = Told()
    study(again)
    assert [str(cell) for cell in again.done] == [
        "local-sgd, 2 workers, seed 1", "local-sgd, 4 workers, seed 1", "asgd (rate=0.02), 4 workers, seed 1",
        "asgd (rate=0.02), 4 workers, seed 2"]  # what diverged would diverge again


@pytest.mark.parametrize("said", [
    "slurmstepd-h1: error: *** STEP 1.7 ON h1 CANCELLED AT 2026-11-23T00:49:03 DUE TO TIME LIMIT ***",
    "srun: error: Unable to create step for job 1: Job/step already completing or completed",
])  # fmt: skip
def test_a_run_whose_job_is_over_has_not_failed(study, said):
    second = GRID.cells()[1]
    with pytest.raises(SystemExit) as ended:
        study(Told(lambda cell: Ended(1, said) if cell == second else None))
    assert ended.value.code == 75
    again = Told()
    made, _ = study(again)
    assert again.done == GRID.cells()[1:] and len(made.found()) == 12


def test_a_place_that_fails_fails_its_run(study):
    def act(cell):
        raise MpiddlError("no cluster")

    _, said = study(Told(act), replace(GRID, seeds=(1,)))
    assert sum("FAILED: no cluster" in line for line in said) == 6


def test_a_changed_job_is_run_and_told(study):
    study(Told())
    other, changed = Told(), make_grid({**TRAIN, "epochs": 3}, {**ASKED, "seeds": 3})
    _, said = study(other, changed)
    assert len(other.done) == 18 and "epochs 2 -> 3" in said[0] and "They are kept, but not used here" in said[0]
    more = Told()
    _, said = study(more, make_grid(TRAIN, {**ASKED, "seeds": 3, "target": 0.8}))  # what was run first is there still
    assert len(more.done) == 6


def test_parts_share_a_grid(study, tmp_path):
    places = [Told(), Told(), Told()]
    for number, place in enumerate(places, 1):
        study(place, part=(number, 3))
    assert [len(place.done) for place in places] == [4, 4, 4] and len({cell for place in places for cell in place.done}) == 12
    assert sorted(path.name for path in (tmp_path / "out").glob("cells*")) == [f"cells-{n}-of-3.jsonl" for n in (1, 2, 3)]
    whole = Told()
    assert len(study(whole)[0].found()) == 12 and not whole.done


def test_two_at_once_in_a_folder_are_refused(tmp_path):
    first, second, part = (Store(tmp_path, part, print) for part in ((1, 1), (1, 1), (1, 2)))
    first.take()
    part.take()
    with pytest.raises(UsageError, match="another comparison is running in "):
        second.take()
    first.close()
    second.take()
    for store in (second, part):
        store.close()


def found_of(grid, **told):
    """Outcomes by cell; ``told``: by strategy, with underscores, those of the seeds."""
    return {Cell(contender, 2, seed): made for contender in grid.contenders
            for seed, made in zip(grid.seeds, told[contender.label.replace("-", "_")], strict=True)}


def test_arithmetic_by_hand():
    grid = grid_of("two-step", "ring", target=0.87)
    found = found_of(grid, two_step=list(map(outcome, (0.90, 0.92, 0.91))), ring=list(map(outcome, (0.89, 0.92, 0.88))))
    one, other = entries(grid, found, 2)
    gap = paired(other, one, points)
    t2 = 4.302653  # 97.5 % of Student's t with 2 degrees of freedom, from a table
    apart = [-1.0, 0.0, -3.0]
    s = (sum((d + 4 / 3) ** 2 for d in apart) / 2) ** 0.5
    assert gap.value == pytest.approx(-4 / 3) and gap.half == pytest.approx(t2 * s / 3**0.5)
    first, second = rows(grid, found)
    assert first["difference"] is None and second["difference"]["value"] == pytest.approx(-4 / 3)
    assert first["seconds_to_target"]["value"] == pytest.approx((10 + 5 + 10) / 3)  # 0.92 was at 0.87 with its first validation
    assert (first["reached"], second["reached"]) == (3, 3) and first["distance"]["value"] == pytest.approx(10)


def test_the_cheapest_of_the_good_is_recommended():
    grid = grid_of("two-step", "local-sgd", "ring", "asgd")
    near = [outcome(a, s, 1_000_000) for a, s in ((0.899, 4.1), (0.921, 4.0), (0.909, 3.9))]
    found = found_of(grid, two_step=[outcome(a, 10.0) for a in (0.90, 0.92, 0.91)], local_sgd=near,
                     ring=[outcome(a, s) for a, s in ((0.90, 3.9), (0.92, 4.1), (0.91, 3.8))],
                     asgd=[outcome(a, 1.0, 1) for a in (0.80, 0.82, 0.81)])  # fmt: skip
    advice = advise(grid, found, 2, simulated=False)
    told = " ".join([*advice.verdict, *advice.notes])
    assert advice.choice == "local-sgd"  # as fast as ring, within noise, for a quarter of the bytes; asgd is 10 points below
    assert all(words in told for words in ("sends the fewest bytes", "4.0 times fewer bytes", "within noise", "every seed"))
    reached = advise(replace(grid, target=0.95), found, 2, simulated=False)
    assert reached.choice == "local-sgd"  # nobody reaches the target: the seconds of training count


def test_times_to_a_target_are_known_to_a_validation_only():
    """Validations come every 5 s: the baseline's second may be no later than the other's first."""
    grid = grid_of("two-step", "ring", target=0.85)
    found = found_of(grid, two_step=[outcome(0.89)] * 3, ring=[outcome(0.90)] * 3)
    advice = advise(replace(grid, margin=2.0), found, 2, simulated=False)
    told = " ".join(advice.verdict)
    assert entries(grid, found, 2)[0].mean(grain(0.85)).value == 5.0
    assert advice.choice == "two-step" and "two-step is the simplest, and they send about the same (4.00 MB" in told
    assert "show no clear difference in validation accuracy and time to 85 % (two-step: -1.00 points and +5.00 s ag" in told
    slower = found_of(grid, two_step=[outcome(0.89, 20.0)] * 3, ring=[outcome(0.90)] * 3)
    assert advise(replace(grid, margin=2.0), slower, 2, simulated=False).choice == "ring"


def test_a_recommendation_says_for_whom_it_holds():
    grid = grid_of("two-step", "local-sgd")
    phases = {"phases": {"compute": 1.0, "communication": 2.0, "waiting": 1.0}}
    found = found_of(grid, two_step=[outcome(0.9, **phases)] * 3, local_sgd=[outcome(0.8, 1.0, **phases)] * 3)
    told = " ".join(advise(grid, found, 2, simulated=False).notes)
    assert "two-step spends 25 % of its time on computation" in told
    assert "If you can give up 10.0 points of accuracy for speed: local-sgd" in told
    assert "25 %" not in " ".join(advise(grid, found, 2, simulated=True).notes)
    equal = found_of(grid, two_step=[outcome(0.9, **phases)] * 3, local_sgd=[outcome(0.9, 1.0, 4_000_001)] * 3)
    assert "; as many bytes." in advise(grid, equal, 2, simulated=False).verdict[2]


def test_a_recommendation_says_what_it_does_not_know():
    one = grid_of("two-step", "ring", seeds=1)
    found = found_of(one, two_step=[outcome(0.9)], ring=[outcome(0.9, 9.9)])
    told = advise(one, found, 2, simulated=True)
    assert "One seed says nothing about noise" in told.verdict[2] and "Seconds are simulated" in told.warnings[0]
    assert "±" not in " ".join(told.verdict)
    nothing = advise(one, {}, 2, simulated=False)
    assert nothing.choice is None and "none is advised" in nothing.verdict[0]


@pytest.mark.plots
def test_a_page_that_holds_all_it_shows(study, tmp_path):
    pytest.importorskip("matplotlib")
    grid = make_grid({**TRAIN, "data": "<digits>"}, {**ASKED, "target": 0.99})
    made, _ = study(Told(), grid)
    _, page = write_report(made, "mpiddl compare 'a <b>.toml'")
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 4 * 2 and "http" not in text and "src=" in text
    assert "<digits>" not in text and "&lt;digits&gt;" in text and "not\u00a0reached" in text
    files = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")}
    pictures = {f"{what}-{workers}.png" for what in ("accuracy", "ends", "time", "staleness") for workers in (2, 4)}
    assert files == {"cells.jsonl", "compare.json", "report.html", "report.md", "report.json", *pictures}
    told = json.loads(page.with_suffix(".json").read_text())
    assert len(told["runs"]) == 12 and told["rows"][2]["staleness"]["median"] == 0
