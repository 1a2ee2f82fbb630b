"""``mpiddl compare`` with learning rates to try, a reference, and conditions that depend on the number of workers."""

from __future__ import annotations

import json

import pytest
from harness.comparisons import FACTS, TRAIN, Told, compared, grid_of, outcome

from mpiddl.cli import main
from mpiddl.compare.advice import advise
from mpiddl.compare.backends import Simulated
from mpiddl.compare.choice import choose
from mpiddl.compare.grid import TUNING_SEED, make_grid
from mpiddl.compare.preflight import check
from mpiddl.compare.processes import Ended
from mpiddl.compare.statistics import best_rates, entries
from mpiddl.compare.store import Store
from mpiddl.compare.strategy_texts import learning_rate
from mpiddl.compare.study import Study
from mpiddl.compare.writing import remember
from mpiddl.training.watch import DIVERGED

pytestmark = pytest.mark.no_mpi

RATES = [0.1, 0.2, 0.4]
ALONE = {"strategy": "alone", "workers": 1, "label": "sequential", "rates": [0.3]}
GRID = grid_of("two-step", {"strategy": "asgd", "rate": 0.02}, ALONE, rates=RATES, workers=[4, 2], seeds=2)


def rate_of(cell):
    return dict(cell.contender.own)["rate"]


def best_at(rate):
    """Runs whose validation accuracy is best at a rate; their test accuracy is worst there."""
    return lambda cell: outcome(0.9 - abs(rate_of(cell) - rate), test=0.5 + abs(rate_of(cell) - rate))


def test_the_validation_rows_choose_the_rate_that_is_compared(tmp_path):
    place = Told(best_at(0.2))
    made = compared(tmp_path, GRID, place)
    tuning, rest = place.done[:4], place.done[4:]
    assert [(rate_of(cell), cell.workers, cell.seed) for cell in tuning] == [(0.1, 4, TUNING_SEED), (0.2, 4, TUNING_SEED),
                                                                            (0.4, 4, TUNING_SEED), (0.3, 1, TUNING_SEED)]
    assert {(cell.contender.spec, rate_of(cell)) for cell in rest} == {("two-step", 0.2), ("asgd", 0.02), ("alone", 0.3)}
    assert len(rest) == 2 * (2 + 2 + 1)  # two seeds; the reference runs once for both numbers of workers
    assert TUNING_SEED not in {cell.seed for cell in rest}
    assert [contender.label for contender in made.grid.contenders] == ["two-step", "asgd (rate=0.02)", "sequential"]


def test_nothing_is_run_twice(tmp_path):
    said = []
    for place in (Told(best_at(0.2)), again := Told(best_at(0.2))):
        compared(tmp_path, GRID, place, said.append)
    more = Told(best_at(0.2))
    compared(tmp_path, grid_of("two-step", rates=[*RATES, 0.8], workers=[4, 2], seeds=2), more)
    assert [text.partition(": ")[2] for text in said if text.startswith("14 runs")] == ["0 done, 14 to do", "14 done, 0 to do"]
    assert any(text.startswith("[14/14]") for text in said)
    assert not again.done and [rate_of(cell) for cell in more.done] == [0.8]


def test_a_rate_that_diverges_is_not_chosen_and_one_that_fails_is_tried_again(tmp_path):
    def ends(cell):
        if cell.seed == TUNING_SEED and rate_of(cell) == 0.2:
            return Ended(1, DIVERGED)
        return Ended(1, "no host") if cell.seed == TUNING_SEED and rate_of(cell) == 0.4 else outcome(0.9 - rate_of(cell))

    grid = grid_of("two-step", "ring", rates=RATES)
    made = compared(tmp_path, grid, Told(ends))
    assert not made.found() and not any(contender.settled for contender in made.grid.contenders)
    advice = advise(made.grid, made.found(), 2, True)
    assert made.failed() == 2 and not any("has not been run" in text for text in advice.warnings)
    assert advice.choice is None and any("ring: no learning rate of 3 from 0.1 to 0.4" in text for text in advice.warnings)
    second = Told(best_at(0.2))
    made = compared(tmp_path, grid, second)
    assert [rate_of(cell) for cell in second.done[:2]] == [0.4, 0.4]
    assert {rate_of(cell) for cell in made.found()} == {0.1}  # 0.2 diverged, which is no reason to try again


def test_what_a_place_tells_hides_no_setting(tmp_path):
    """The rate of the links stood in the place of the learning rate: runs with other rates were taken for the same."""
    place = Told(best_at(0.2))
    place.about = {"place": "testbed", "rate": "1gbit", "hosts": 2, "launcher": "openmpi", "seed": 0, "workers": 2}
    made = compared(tmp_path, GRID, place)
    assert len(place.done) == 14 and [rate_of(cell) for cell in made.found()][:3] == [0.2, 0.02, 0.3]


def test_equal_rates_give_the_smallest():
    grid = grid_of("ring", rates=[0.4, 0.1, 0.2])
    assert best_rates(grid, lambda cell: outcome(0.9)) == {"ring": 0.1}
    assert best_rates(grid, lambda cell: outcome(0.9) if rate_of(cell) < 0.3 else None) == {}


@pytest.mark.parametrize(("rate", "end"), [(0.1, True), (0.2, False), (0.4, True)])
def test_the_end_of_the_list_is_told(tmp_path, rate, end):
    grid = grid_of("ring", rates=RATES).with_rates({"ring": rate})
    warned = advise(grid, {cell: outcome(0.9) for cell in grid.cells()}, 2, True).warnings
    said = f"ring: learning rate {rate:g}, the best of 3 from 0.1 to 0.4, which is an end"
    assert any(said in text for text in warned) == end
    (one,) = grid_of("ring", rates=[0.1]).with_rates({"ring": 0.1}).contenders
    assert learning_rate(one).endswith("best of 1 from 0.1 to 0.1")


def test_a_reference_stands_beside_all_and_is_not_advised():
    grid = grid_of("ring", {"strategy": "alone", "workers": 1}, workers=[2, 4], baseline="alone (workers=1)")
    found = {cell: outcome(0.99 if cell.workers == 1 else 0.8) for cell in grid.cells()}
    assert len(found) == 3 * (2 + 1)
    alone = grid_of({"strategy": "alone", "workers": 1})
    assert "Every strategy is a reference" in advise(alone, found, 2, True).verdict[0]
    assert "only strategy compared" in advise(grid, found, 2, True).verdict[1]
    for workers in grid.workers:
        there = entries(grid, found, workers)
        assert [len(entry.good) for entry in there] == [3, 3] and choose(grid, there, True).taken.label == "ring"
        assert advise(grid, found, workers, True).choice == "ring"


def test_the_parts_of_a_comparison_share_the_runs_that_choose_rates(tmp_path):
    """Of two parts that begin together, each begins at another run, and leaves out what the other has done meanwhile."""
    grid = grid_of("ring", rates=RATES, seeds=4)
    stores = [Store(tmp_path / "out", (part, 2), lambda text: None) for part in (1, 2)]
    places = [Told(best_at(0.2)), Told(best_at(0.2))]
    studies = [Study(grid, place, store, FACTS, lambda text: None) for place, store in zip(places, stores, strict=True)]

    def both(cell):
        if len(places[0].done) == 1:  # during the first part's first run
            studies[1].run((2, 2))
        return best_at(0.2)(cell)

    places[0]._act = both
    for store in stores:
        store.take()
    studies[0].run((1, 2))
    for store in stores:
        store.close()
    first, second = ([(rate_of(cell), cell.seed) for cell in place.done] for place in places)
    assert first == [(0.1, 0), (0.2, 1), (0.2, 3)]
    assert second == [(0.2, 0), (0.4, 0), (0.1, 0), (0.2, 2), (0.2, 4)]  # 0.1 was on its way


def test_all_parts_choose_the_same_rate_where_they_ran_the_same_cell_twice(tmp_path):
    """Real runs differ in the last bits. Each part took its own outcome."""
    grid, said = grid_of("ring", rates=RATES), []
    for part, best in ((1, 0.1), (2, 0.4)):
        store = Store(tmp_path / "out", (part, 2), said.append)
        store.take()
        study = Study(grid, Told(best_at(best)), store, FACTS, said.append)
        for cell in grid.tuning(grid.contenders[0]).values():
            store.add(study.key(cell), outcome(0.9 - abs(rate_of(cell) - best)))
        store.close()
    for part in ((1, 2), (2, 2), (1, 1)):
        chosen = Study(grid, Told(), Store(tmp_path / "out", part, said.append), FACTS, said.append).grid
        assert [dict(each.own)["rate"] for each in chosen.contenders] == [0.1]


def test_another_batch_in_the_same_folder_is_told(tmp_path):
    said = []
    for batch in (16, 32):
        remember(compared(tmp_path, grid_of("ring", batch_per_worker=batch), Told(), said.append))
    assert any("batch_per_worker 16 -> 32" in text for text in said)


def test_conditions_follow_the_number_of_workers():
    grid = make_grid(TRAIN, {"strategies": ["ring", {"strategy": "alone", "workers": 1}], "workers": [2, 4], "seeds": 1,
                             "batch_per_worker": 8, "samples": 1000})  # fmt: skip
    ring, alone, more = (grid.settings(cell, 1000) for cell in grid.cells())
    assert (ring["batch"], ring["max_steps"]) == (16, 63) and (more["batch"], more["max_steps"]) == (32, 32)
    assert alone["batch"] == 8


def test_a_reference_has_the_validation_rows_of_the_others():
    """They depend on the shards."""
    alone = {"strategy": "alone", "workers": 1}
    for workers in ([12], [4, 8, 16, 32], [3, 5]):
        grid = grid_of("two-step", "asgd", alone, workers=workers, tune_workers=workers[0])
        shards = {grid.settings(cell, 1000)["shards"] for cell in grid.cells()}
        (count,) = shards
        assert all(count % each == 0 and count > each for each in workers)
    assert grid_of("two-step", alone, workers=[1021, 1019]).shards(1019) == 1019  # no count for all of them


def test_mistakes_are_found_before_rates_are_tried():
    grid = make_grid(TRAIN, {"strategies": [{"strategy": "ddc-asgd", "optimiser": "sgd"}], "rates": RATES})
    with pytest.raises(Exception, match="optimiser: got sgd"):
        check(grid, Simulated(1, {}), [])


@pytest.mark.more
def test_a_comparison_with_rates_from_the_command_line(tmp_path, capsys):
    file = tmp_path / "job.toml"
    file.write_text('[train]\nepochs = 1\nhidden = [8]\nslow = "straggler:8"\n[compare]\nworkers = 2\nseeds = 1\n'
                    'rates = [1e-6, 0.05]\nbatch_per_worker = 32\nstrategies = ["ring", {strategy = "alone", workers = 1}]\n')
    words = ["compare", str(file), "--simulate", "--jobs", "2", "--out", str(tmp_path / "out")]
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(words)
        told = capsys.readouterr()
        assert not ended.value.code, told.err
        words = [*words, "--show"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["own"] for row in report["rows"]] == [{"rate": 0.05}] * 2 and len(report["runs"]) == 2
    assert [run["workers"] for run in report["runs"]] == [2, 1] and report["runs"][0]["samples"] == 1293
    page = (tmp_path / "out" / "report.md").read_text()
    assert "ring: learning rate 0.05, the best of 2 from 1e-06 to 0.05, which is an end of the list" in page
    assert "32 for each worker" in page and "straggler:8" in page
    assert "Take ring" in told.out
