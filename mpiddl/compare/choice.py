"""Which strategy is advised: by accuracy on the validation rows, then time, bytes and simplicity. Test rows decide nothing.

1. Candidates are the strategies with a result for every seed. A reference, which has a number of workers of its own, is none.
2. As accurate as the best: at most ``margin`` points below it in the mean, or a difference within noise, of at most 5 points:
   a strategy that fails with one seed has so wide an interval that anything would be within noise.
3. If some of these reach the target with every seed, only they go on.
4. As fast as the fastest of these: at most 5 % slower in the mean, a difference within noise, or one below the time between two
   validations. The time is that to the target, or that of training where there is no target. A budget of seconds is no cost.
5. Of these, the one that sends the fewest bytes, with 5 % of tolerance, where bytes are known: on several hosts, or simulated.
6. Of these, the simplest (the order of `mpiddl.registry`), and of equally simple ones the first in the file.

"Within noise": the 95 % interval of the mean of paired differences, run by run with the same seed, holds 0; with fewer than
three seeds: their range does.
"""

from __future__ import annotations

from typing import NamedTuple

from mpiddl.compare.grid import Grid
from mpiddl.compare.numbers import percent
from mpiddl.compare.statistics import Entry, Measure, grain, paired, reaching, seconds, sent, validated
from mpiddl.compare.strategy_texts import complexity

NOISE_MOST = 5.0
"""Points of accuracy that noise can excuse."""

CLOSE = 1.05
"""Times and bytes up to so many times the lowest count as equal."""


class Cost(NamedTuple):
    """The time that counts: in words, as a measure, and the time between two validations if it is known only so well."""

    words: str
    measure: Measure
    grain: Measure | None = None

    def apart(self, one: Entry, other: Entry) -> float:
        """How much two times have to differ to be told apart."""
        return max(amount(one, self.grain), amount(other, self.grain)) if self.grain else 0.0


class Choice(NamedTuple):
    """A decision and the sets that led to it.

    whole : strategies with a result for every seed.
    best : of these, the most accurate.
    good : as accurate as it.
    able : of these, those that reach the target, or all.
    tied : of these, those as fast as the ``fastest``.
    taken : the one of these that is advised.
    time_counts : whether time is a cost; not if it is the budget.
    bytes_count : whether bytes are known.
    """

    whole: list[Entry]
    best: Entry
    good: list[Entry]
    able: list[Entry]
    cost: Cost
    fastest: Entry
    tied: list[Entry]
    taken: Entry
    time_counts: bool
    bytes_count: bool


def choose(grid: Grid, there: list[Entry], simulated: bool) -> Choice | None:
    """The decision; None if no strategy has a result for every seed."""
    whole = [entry for entry in there if entry.whole and not entry.contender.workers]
    if not whole:
        return None
    best = max(whole, key=accuracy)
    good = [entry for entry in whole if _as_accurate(grid, entry, best)]
    able = [entry for entry in good if reaches(grid, entry)] or good
    cost = cost_of(grid, able)
    time_counts = not (grid.budget and grid.budget[0] == "seconds" and not cost.grain)
    fastest = min(able, key=lambda entry: amount(entry, cost.measure))
    tied = [entry for entry in able if _as_fast(entry, fastest, cost)] if time_counts else able
    bytes_count = simulated or any(outcome.get("hosts") for entry in there for outcome in entry.good.values())
    taken = _simplest(tied, bytes_count)
    return Choice(whole, best, good, able, cost, fastest, tied, taken, time_counts, bytes_count)


def accuracy(entry: Entry) -> float:
    """On the validation rows, in the mean."""
    return amount(entry, validated)


def amount(entry: Entry, measure: Measure) -> float:
    """The mean of a measure that every outcome has."""
    found = entry.mean(measure)
    assert found is not None
    return found.value


def reaches(grid: Grid, entry: Entry) -> bool:
    """Whether a strategy reaches the target, if there is one, with every seed."""
    return bool(grid.target) and all(reaching(grid.target, "seconds")(each) is not None for each in entry.good.values())


def cost_of(grid: Grid, able: list[Entry]) -> Cost:
    """The time that counts for these."""
    if all(reaches(grid, entry) for entry in able):
        return Cost(f"time to {percent(grid.target)}", reaching(grid.target, "seconds"), grain(grid.target))
    return Cost("training time", seconds)


def _as_accurate(grid: Grid, entry: Entry, best: Entry) -> bool:
    gap = paired(entry, best, validated)
    assert gap is not None
    return -gap.value <= (max(NOISE_MOST, grid.margin) if gap.noise else grid.margin)


def _as_fast(entry: Entry, fastest: Entry, cost: Cost) -> bool:
    gap = paired(entry, fastest, cost.measure)
    assert gap is not None
    close = amount(entry, cost.measure) <= CLOSE * amount(fastest, cost.measure)
    return close or gap.noise or gap.value <= cost.apart(entry, fastest)


def _simplest(tied: list[Entry], bytes_count: bool) -> Entry:
    """Of those that send the fewest bytes, if these count."""
    least = min(amount(entry, sent) for entry in tied)
    cheap = [entry for entry in tied if amount(entry, sent) <= CLOSE * least] if bytes_count else tied
    return min(cheap, key=lambda entry: complexity(entry.contender.strategy))
