"""The verdict of ``mpiddl compare``: which rows choose, what noise hides, few seeds, failed runs, and the page around it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness.comparisons import FACTS, Told, compared, found_of, grid_of, outcome

from mpiddl.compare import document, markdown, plots
from mpiddl.compare import html as page
from mpiddl.compare.advice import advise
from mpiddl.compare.backends import Simulated
from mpiddl.compare.columns import results
from mpiddl.compare.grid import make_grid
from mpiddl.compare.preflight import check
from mpiddl.compare.processes import Ended
from mpiddl.compare.statistics import rows
from mpiddl.compare.store import Store
from mpiddl.compare.strategy_texts import plain
from mpiddl.compare.study import Study
from mpiddl.compare.writing import spoken, write_report
from mpiddl.errors import UsageError
from mpiddl.strategies import STRATEGIES, Strategy
from mpiddl.strategies.periodic.local_sgd import LocalSGD

pytestmark = pytest.mark.no_mpi

def verdict(grid, *told, simulated=False):
    return advise(grid, found_of(grid, *told), 2, simulated)


def noisy(*seconds, **more):
    """Runs that differ in accuracy and time by chance."""
    return [outcome(0.90 + 0.01 * k, seconds=each, **more) for k, each in enumerate(seconds)]


@dataclass(frozen=True)
class Mine(Strategy):
    """Adds up gradients on ``Sundays`` only. Nothing else."""

    period: int = 7


@dataclass(frozen=True)
class Bare(LocalSGD):
    period: int = 7


class Plain(Strategy):
    pass


@pytest.mark.parametrize(("strategy", "said"), [
    (Mine(), "Adds up gradients on Sundays only."),
    (Bare(), "Bare: a strategy without a description."),  # dataclasses write a docstring of fields
])  # fmt: skip
def test_a_strategy_without_a_sentence_is_described_by_its_docstring(tmp_path, strategy, said):
    grid = grid_of("two-step", f"{__name__}:{type(strategy).__name__}")
    text = write_report(compared(tmp_path, grid), "")[1].read_text()
    assert said in text and plain(strategy) == said
    assert plain(Plain()) == "Plain: a strategy without a description."  # not by the docstring of its parent


def test_validation_rows_choose_and_test_rows_are_reported():
    grid = grid_of("two-step", "ring")
    lucky = [outcome(a, test=0.99) for a in (0.80, 0.81, 0.82)]  # on the test rows
    told = verdict(grid, lucky, [outcome(a, test=0.85) for a in (0.90, 0.91, 0.92)])
    assert told.choice == "ring" and "Take ring: 85.00 % of the test rows right" in told.verdict[0]
    assert "most accurate on the validation rows" in told.verdict[1] and "+10.00 points" in told.verdict[1]
    row = rows(grid, found_of(grid, lucky, lucky))[0]
    assert (round(row["validation"]["value"]), round(row["accuracy"]["value"])) == (81, 99)


def test_the_page_tells_the_order_of_simplicity():
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    (order,) = re.findall(r"The order of simplicity is: (.*?)\n\n", text, re.DOTALL)
    assert re.findall(r"`([^`]+)`", order) == list(STRATEGIES), "docs/compare.md: its order of simplicity is not the registry's"


def test_what_stops_at_the_last_epoch_is_chosen_by_the_finished_model():
    """Not by its best validation."""
    grid = grid_of("two-step", "ring")
    fell = [outcome(0.8)] * 3
    fell = [{**each, "curve": [{**each["curve"][0], "accuracy": 0.99}, each["curve"][1]]} for each in fell]
    assert verdict(grid, fell, [outcome(0.9)] * 3).choice == "ring"


def test_no_validation_rows_are_refused_before_anything_runs():
    with pytest.raises(UsageError, match=r"validation: got 0 in \[train\], expected a share above 0"):
        make_grid({"validation": 0.0}, {"strategies": ["ring"]})
    with pytest.raises(UsageError, match="validation: got 1e-05, which selects no row of digits"):
        check(make_grid({"validation": 1e-5}, {"strategies": ["ring"], "workers": 2}), Simulated(1, {}), [])


def test_within_noise_the_cheapest_in_bytes_is_advised():
    """As on examples/compare.toml, where 54.72 ± 71.44 s won against 95.96 ± 71.26 s and nine times the bytes."""
    grid = grid_of("two-step", "local-sgd", "ddc-asgd", target=0.8)
    fast = [outcome(a, seconds=s, sent=68_000_000) for a, s in ((0.97, 60.0), (0.98, 20.0), (0.96, 84.0))]
    slow = [outcome(a, seconds=s, sent=7_500_000) for a, s in ((0.96, 128.0), (0.93, 80.0), (0.97, 80.0))]
    middle = [outcome(a, seconds=s, sent=59_000_000) for a, s in ((0.95, 70.0), (0.97, 90.0), (0.97, 60.0))]
    told = verdict(grid, middle, slow, fast, simulated=True)
    assert told.choice == "local-sgd"
    assert "All 3 strategies are equal within noise in validation accuracy and time to 80 %" in told.verdict[1]
    assert "local-sgd sends the fewest bytes (7.50 MB; the others: 59.00 to 68.00 MB)" in told.verdict[1]
    assert "against ddc-asgd" in told.verdict[1] and "±" in told.verdict[1]


def test_within_noise_the_simplest_is_advised_where_bytes_are_unknown():
    grid = grid_of("ddc-asgd", "local-sgd", "two-step")
    told = verdict(grid, noisy(10, 11, 9, hosts=[]), noisy(9, 12, 8, hosts=[]), noisy(12, 10, 11, hosts=[]))
    assert told.choice == "two-step" and "two-step is the simplest." in told.verdict[1]
    assert verdict(grid, noisy(10, 11, 9), noisy(9, 12, 8), noisy(12, 10, 11)).choice == "two-step"  # all send the same
    two = grid_of({"strategy": "asgd", "rate": 0.1, "label": "a"}, {"strategy": "asgd", "rate": 0.2, "label": "b"})
    assert "a comes first of the simplest ones" in verdict(two, noisy(10, 11, 9), noisy(9, 12, 8)).verdict[1]


def test_beyond_noise_the_fastest_is_advised_whatever_it_sends():
    grid = grid_of("two-step", "local-sgd", "ddc-asgd")
    told = verdict(grid, noisy(20, 21, 19), noisy(30, 31, 29, sent=1), noisy(10, 11, 9, sent=68_000_000))
    assert told.choice == "ddc-asgd"
    assert "fastest (training time with the second fastest, two-step: +10.00 s with every seed)" in told.verdict[1]
    assert any(note.startswith("If only bytes matter: local-sgd") for note in told.notes)


def test_less_accurate_beyond_noise_is_not_advised():
    grid = grid_of("two-step", "local-sgd")
    worse = [outcome(0.88 + 0.01 * k + 0.001 * (k == 1), seconds=1.0, sent=1) for k in range(3)]
    told = verdict(grid, noisy(10, 11, 9), worse)
    assert told.choice == "two-step" and "beyond noise" in told.verdict[1]
    near = [{**each, "curve": [{**point, "accuracy": point["accuracy"] + 0.017} for point in each["curve"]]} for each in worse]
    assert verdict(grid, noisy(10, 11, 9), near).choice == "local-sgd"  # 0.3 points below, beyond noise but within the margin
    assert verdict(replace(grid, margin=0.0), noisy(10, 11, 9), near).choice == "two-step"


def test_noise_does_not_excuse_a_strategy_that_fails_with_one_seed():
    """It was advised: its interval was so wide that the difference was within noise."""
    grid = grid_of("two-step", "dana")
    good, bad = [outcome(0.90, seconds=12.0)] * 3, [outcome(accuracy, seconds=5.0) for accuracy in (0.89, 0.10, 0.89)]
    found = verdict(grid, good, bad)
    assert found.choice == "two-step" and any("Less accurate than two-step" in text for text in found.notes)
    assert verdict(grid, good, [outcome(accuracy, seconds=5.0) for accuracy in (0.89, 0.86, 0.89)]).choice == "dana"


def test_two_seeds_have_a_range_and_no_interval():
    grid = grid_of("two-step", "ring", seeds=2)
    told = verdict(grid, noisy(10, 30), noisy(30, 10))
    text = " ".join([*told.verdict, *told.notes])
    assert "±" not in text and "90.50 % (90.00 to 91.00) of the test rows right" in text
    assert "two seeds say little about noise" in text.lower() and "are equal within noise" in text
    clear = verdict(grid, noisy(30, 31), noisy(10, 11))
    assert clear.choice == "ring" and "+20.00 s with both seeds" in clear.verdict[1]
    assert all(row["accuracy"]["half"] is None for row in rows(grid, found_of(grid, noisy(10, 30), noisy(30, 10))))


def test_one_seed_has_a_value_alone():
    grid = grid_of("two-step", "ring", seeds=1)
    told = verdict(grid, [outcome(0.9)], [outcome(0.9, seconds=5.0)])
    text = " ".join([*told.verdict, *told.notes])
    assert told.choice == "ring" and "±" not in text and " to " not in text.replace("within", "").split("on the")[0]
    assert told.verdict[2].startswith("One seed says nothing about noise")


def test_what_failed_or_diverged_is_flagged(tmp_path):
    def act(cell):
        if cell.contender.label == "ring" and cell.seed > 1:
            return Ended(1, "x.CommError: nobody is there") if cell.seed == 2 else outcome(0.1, loss=None)
        return None

    grid = grid_of("two-step", "ring", "local-sgd")
    made = compared(tmp_path, grid, Told(act))
    advice, file = write_report(made, "")
    html, text, told = file.read_text(), file.with_suffix(".md").read_text(), spoken(made, advice, quiet=False)
    assert "ring (1 run diverged, 1 run failed) is left out" in advice[0].verdict[2]
    assert "ring is left out: it diverged with seed 3; it failed with seed 2 (nobody is there)." in advice[0].warnings[0]
    html = html.replace("\u00a0", " ")
    for page_of in (html, text, told):
        assert "1 of 3 (1 diverged, 1 failed)" in page_of and "3 of 3" in page_of and "nobody is there" in page_of
    assert html.count('<tr class="flagged">') == 2 and html.index('<ul class="warning">') < html.index("Results")
    assert "| **ring**" in text
    whole = rows(grid, made.found())[1]
    assert whole["diverged"] == [3] and whole["accuracy"]["seeds"] == 1  # a loss that is not finite is kept as null


def test_missing_runs_are_told():
    grid = grid_of("two-step", "ring")
    told = verdict(grid, noisy(10, 11, 9), [outcome(0.99), None, None])
    assert told.choice == "two-step" and "ring (2 runs not run) is left out" in told.verdict[2]
    assert "only strategy with a result for every seed" in told.verdict[1]


@pytest.mark.parametrize("act", [lambda cell: Ended(1, "no"), lambda cell: outcome(0.1, loss=None)])
def test_if_all_fail_none_is_advised(tmp_path, act):
    made = compared(tmp_path, grid_of("two-step", "ring", target=0.9), Told(act))
    (advice,), file = write_report(made, "")
    assert advice.choice is None and "none is advised" in advice.verdict[0] and len(advice.warnings) == 2
    assert "0\u00a0of\u00a03" in file.read_text() and "0 of 3" in spoken(made, [advice], quiet=False)


def test_a_folder_without_runs_has_a_report(tmp_path):
    store = Store(tmp_path, (1, 1), print)
    made = Study(grid_of("two-step", "ring"), Told(), store, FACTS, print)
    store.open()
    (advice,), file = write_report(made, "")
    assert advice.choice is None and "0 of 3 (3 not run)" in file.with_suffix(".md").read_text()


def test_one_strategy_alone_and_equal_values():
    told = verdict(grid_of("asgd"), [outcome()] * 3)
    assert told.choice == "asgd" and "It is the only strategy compared." in told.verdict
    same = verdict(grid_of("asgd", "two-step"), [outcome()] * 3, [outcome()] * 3)
    assert same.choice == "two-step" and "equal within noise" in same.verdict[1] and "nan" not in " ".join(same.verdict)


@pytest.mark.parametrize("target", [0.0, 0.5, 0.905, 0.99])
@pytest.mark.parametrize("seeds", [1, 2, 3])
@pytest.mark.parametrize("broken", [None, 1])
def test_a_verdict_is_at_most_three_sentences(target, seeds, broken):
    grid = grid_of("two-step", "ring", "local-sgd", "gossip", "asgd", seeds=seeds, target=target, baseline="asgd")
    told = [noisy(*range(8 + k, 8 + k + seeds), sent=10**6 * (k + 1)) for k in range(5)]
    if broken is not None:
        told[broken] = [{"error": "no"}] * seeds
    advice = verdict(grid, *told)
    assert 1 <= len(advice.verdict) <= 3
    for sentence in advice.verdict:
        assert sentence.endswith(".") and not re.search(r"\. [A-Z]", sentence)


@pytest.mark.plots
def test_the_picture_is_right_below_the_verdict(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_report(compared(tmp_path, grid_of("two-step", "local-sgd")), "")[1].with_suffix(".md").read_text()
    blocks = text.split("\n\n")
    (at,) = (number for number, block in enumerate(blocks) if block.startswith("- **Take"))
    assert blocks[at].count("\n") < 3 and blocks[at + 1].startswith("![Accuracy on the validation rows")
    assert blocks[at - 1].startswith("2 strategies to train one model on digits with 2 workers: 3 seeds")
    assert text.index("## Results") < text.index("## More pictures") < text.index("## How it was measured")


def test_columns_without_figures_are_hidden(tmp_path):
    made = compared(tmp_path, grid_of("two-step", "local-sgd"), Told(lambda cell: outcome(hosts=[])))
    for file in (write_report(made, "")[1], write_report(made, "")[1].with_suffix(".md")):
        text = file.read_text().replace("\u00a0", " ")
        assert "distance, %" in text and not any(word in text for word in ("egress", "ingress", "staleness, ", "runs |"))
    alone = document.figures_table(rows(grid := grid_of("ring"), found_of(grid, noisy(1, 2, 3))), None,
                                   results(grid, []))  # fmt: skip
    assert "against ring, points" not in alone.heads and "runs" not in alone.heads


def test_tables_have_one_width():
    tables = [document.Table(("strategy", "a", "b"), [("x", "1", "-"), ("a long name", "2.00 ± 1.00", "3")], 1, [0]),
              document.Table(("column", "meaning"), [("a", "words")], words=True)]  # fmt: skip
    html = page.render([document.Heading("x", 1), *tables])
    assert html.count("<table") == 2 and re.search(r"table \{[^}]*width: 100%", html) and "max-width: 50rem" not in html
    lines = markdown.render(tables[:1]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].endswith("-: |") and "**2.00 ± 1.00**" in lines[3]


def test_pictures_tell_of_runs_that_are_left_out():
    grid = grid_of("two-step", {"strategy": "ring", "label": "_a $b"})
    found = found_of(grid, noisy(1, 2, 3), [outcome(), {"error": "no"}, outcome()])
    labels = [plots._label(grid, entry) for entry in plots.entries(grid, found, 2)]
    assert labels == ["two-step", r" _a \$b (2 of 3 runs)"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["accuracy", "seconds", "curve"])
def test_figures_that_are_not_finite_are_run_again(tmp_path, name, value):
    grid = grid_of("two-step")
    bad = outcome()
    if name == "curve":
        bad["curve"][-1]["accuracy"] = value
    else:
        bad[name] = value
    compared(tmp_path, grid, Told(lambda cell: bad if cell.seed == 2 else None))
    again = Told()
    made = compared(tmp_path, grid, again)
    assert [cell.seed for cell in again.done] == [2] and write_report(made, "")[0][0].choice == "two-step"


@pytest.mark.parametrize("change", [
    {"hosts": 5}, {"hosts": [{"sent": "much", "received": 1}]}, {"phases": {"a": 1}}, {"phases": [1]}, {"staleness": [1]},
    {"staleness": {"histogram": {"one": 1}}}, {"staleness": {"histogram": {"1": "two"}}},
    {"curve": [{"samples": 1, "seconds": "1", "bytes": 1, "accuracy": 0.5, "distance": 0.0}]},
    {"curve": [{"samples": 1, "seconds": 1, "bytes": 1, "accuracy": "0.5", "distance": 0.0}]},
    {"curve": [{"samples": 1, "seconds": 1, "bytes": 1, "accuracy": 0.5, "distance": []}]},
])  # fmt: skip
def test_damaged_figures_are_run_again(tmp_path, change):
    grid = grid_of("two-step", "asgd")
    compared(tmp_path, grid, Told(lambda cell: outcome(**change) if cell.seed == 2 else None))
    again = Told()
    made = compared(tmp_path, grid, again)
    assert [cell.seed for cell in again.done] == [2, 2] and write_report(made, "")[0][0].choice


def test_runs_of_a_version_without_a_validation_are_run_again(tmp_path):
    grid = grid_of("two-step")
    compared(tmp_path, grid, Told(lambda cell: outcome(curve=[]) if cell.seed == 1 else None))
    again = Told()
    compared(tmp_path, grid, again)
    assert [cell.seed for cell in again.done] == [1]


def test_markup_in_names_is_shown_as_it_is(tmp_path):
    label = "![x](http://h/y.png) `a` | <b> * [z] \\"
    text = write_report(compared(tmp_path, grid_of({"strategy": "ring", "label": label})), "")[1].with_suffix(".md").read_text()
    assert "](http" not in text.replace(r"\](http", "") and "<b>" not in text.replace(r"\<b>", "")
    assert r"!\[x\](http://h/y.png) \`a\` \| \<b> \* \[z\] \\" in text
