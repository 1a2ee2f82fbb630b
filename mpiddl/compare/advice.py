"""What to take, in plain language, and the figures behind it.

Who is within ``margin`` points of the most accurate is good enough. Of these the fastest is recommended - to the target, if
there is one -, and where several are as fast, as far as the seeds can tell, the one that sends least; where ranks were all on
one host, so that bytes tell nothing, the fastest on average. A difference is beyond noise if the 95 % interval of its mean over
paired seeds does not hold 0. Times to a target are known no better than validations are apart: what differs by less is as fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddl.compare.figures import Entry, Measure, computing, entries, grain, paired, points, reaching, seconds, sent
from mpiddl.compare.grid import Cell, Grid
from mpiddl.compare.words import SAME, difference, percent, times, told

CLOSE = 1.2
"""Who takes longer than so many times the fastest is not as fast, however noisy the seeds."""


FASTER = 1.5
"""Who is not good enough is told of all the same, if so many times faster."""


OVER = 1.05
"""Who uses so many times the budget is told of."""


ONE_HOST = ("All workers were on one host, where some strategies pass numbers through memory that workers share, which sends "
            "nothing: bytes tell nothing here. If they are what you pay for, compare on several hosts, or with --testbed.")


class Cost(NamedTuple):
    """The time that counts, in words; its measure; how long before it may have been, if it is only looked at now and then."""

    words: str
    measure: Measure
    grain: Measure | None = None

    def apart(self, one: Entry, other: Entry) -> float:
        """By how much two have to differ to be told apart."""
        return max(_value(one, self.grain), _value(other, self.grain)) if self.grain else 0.0


class Advice(NamedTuple):
    """For one number of workers: which contender, if any, and why, a sentence or two an entry."""

    workers: int
    choice: str | None
    reasons: list[str]


def advise(grid: Grid, found: Mapping[Cell, Mapping[str, Any]], workers: int, simulated: bool) -> Advice:
    """The recommendation for so many workers."""
    there = entries(grid, found, workers)
    whole = [entry for entry in there if entry.whole]
    if not whole:
        return Advice(workers, None, ["No strategy has a result of every seed, so nothing is recommended.", *_troubles(there)])
    best = max(whole, key=_accuracy)
    good = [entry for entry in whole if _accuracy(best) - _accuracy(entry) <= grid.margin]
    able = [entry for entry in good if _reaches(grid, entry)] or good
    cost = _cost(grid, able)
    fastest = min(able, key=lambda entry: _value(entry, cost.measure))
    tied = able if _same_seconds(grid, cost) else [entry for entry in able if _as_fast(entry, fastest, cost)]
    counted = simulated or _between_hosts(there)
    # Of those that are the same, the first, as they are compared.
    choice = min(tied, key=lambda entry: _preference(grid, cost, counted, entry))
    baseline = next(entry for entry in there if entry.label == grid.baseline)
    return Advice(workers, choice.label, [
        f"Take {choice.label}{_of(choice, grid)}",
        *_good_enough(grid, good, [entry for entry in whole if entry not in good], best),
        *(_why(grid, choice, tied, cost, counted) if len(able) > 1 else []),
        *_against(choice, baseline, cost, counted),
        *_unsure(grid, choice, best),
        *_others(grid, choice, good, best, counted),
        *_faster(grid, choice, whole, good, best),
        *_troubles(there),
        *_budget(grid, there),
        *_caveats(grid, simulated),
        *([] if counted else [ONE_HOST]),
        *_holds_for(choice, baseline, simulated),
    ])  # fmt: skip


def _between_hosts(there: list[Entry]) -> bool:
    """Whether workers were on several hosts, with links between them that were counted."""
    return any(outcome.get("hosts") for entry in there for outcome in entry.good.values())


def _cost(grid: Grid, able: list[Entry]) -> Cost:
    """What counts for them."""
    if all(_reaches(grid, entry) for entry in able):
        words = f"time to {percent(grid.target)} on the validation rows"
        return Cost(words, reaching(grid.target, "seconds"), grain(grid.target))
    return Cost("time of training", seconds)


def _preference(grid: Grid, cost: Cost, counted: bool, entry: Entry) -> float:
    """By what one is chosen of those as fast: what it sends, where that counts, else its time, if that is no budget."""
    if counted:
        return _value(entry, sent)
    return 0.0 if _same_seconds(grid, cost) else _value(entry, cost.measure)


def _same_seconds(grid: Grid, cost: Cost) -> bool:
    """Whether the time that counts is the budget itself, so that it tells nothing."""
    return grid.budget is not None and grid.budget[0] == "seconds" and not cost.grain


def _reaches(grid: Grid, entry: Entry) -> bool:
    """Whether it comes to the target, if there is one, with every seed."""
    return bool(grid.target) and all(reaching(grid.target, "seconds")(each) is not None for each in entry.good.values())


def _value(entry: Entry, measure: Measure) -> float:
    """The mean of what every outcome has."""
    found = entry.mean(measure)
    assert found is not None
    return found.value


def _accuracy(entry: Entry) -> float:
    return _value(entry, points)


def _as_fast(entry: Entry, fastest: Entry, cost: Cost) -> bool:
    """As far as the seeds and the validations can tell."""
    gap = paired(entry, fastest, cost.measure)
    if gap is None:
        return False
    noise = gap.half is None or gap.value <= gap.half
    close = _value(entry, cost.measure) <= CLOSE * _value(fastest, cost.measure)
    same = gap.value <= SAME * _value(fastest, cost.measure)  # rounding
    return same or gap.value <= cost.apart(entry, fastest) or (noise and close)


def _of(entry: Entry, grid: Grid) -> str:
    """Its figures."""
    parts = [f"{told(entry.mean(points))} % of the test rows right", f"{told(entry.mean(seconds))} s of training",
             f"{told(entry.mean(sent))} MB sent"]  # fmt: skip
    until = told(entry.mean(reaching(grid.target, "seconds"))) if _reaches(grid, entry) else ""
    return f": {', '.join(parts)}" + (f"; {percent(grid.target)} on the validation rows after {until} s." if until else ".")


def _good_enough(grid: Grid, good: list[Entry], below: list[Entry], best: Entry) -> list[str]:
    others = [f"{entry.label} ({difference(paired(entry, best, points), 'points')})" for entry in good if entry is not best]
    if others:
        lines = [f"{best.label} is the most accurate on average. As good, within {grid.margin:g} points: {'; '.join(others)}."]
    else:
        lines = [f"{best.label} is the most accurate on average, and no other comes within {grid.margin:g} points of it."]
    if below:
        least = [f"{entry.label} ({difference(paired(entry, best, points), 'points')})" for entry in below]
        noisy = any("within" in each for each in least)
        unsure = " Where that is within noise, more seeds may tell otherwise." if noisy else ""
        lines.append(f"Further below it: {'; '.join(least)}.{unsure}")
    return lines


def _unsure(grid: Grid, choice: Entry, best: Entry) -> list[str]:
    """Whether the seeds leave open that the choice is not good enough."""
    gap = paired(choice, best, points)
    if gap is None or gap.half is None or gap.half - gap.value <= grid.margin:
        return []
    return [f"These seeds cannot tell whether {choice.label} is within {grid.margin:g} points of {best.label}: it may be "
            f"{gap.half - gap.value:.2f} below. More seeds tell more."]  # fmt: skip


def _why(grid: Grid, choice: Entry, tied: list[Entry], cost: Cost, counted: bool) -> list[str]:
    if len(tied) == 1:
        return [f"Of the good ones {choice.label} is the fastest ({cost.words})."]
    equal = " and ".join(filter(None, [", ".join(entry.label for entry in tied[:-1]), tied[-1].label]))
    kinds = "these seeds and the validations, an epoch apart," if cost.grain else "these seeds"
    least, most = (pick(_value(entry, sent) for entry in tied) for pick in (min, max))
    why = f"{choice.label} sends the fewest bytes" if least < most else f"which send the same, {choice.label} stands first"
    if not counted:
        why = f"{choice.label} stands first" if _same_seconds(grid, cost) else f"{choice.label} was the fastest on average"
    if _same_seconds(grid, cost):
        return [f"All trained for the same seconds. Of the good ones, {equal}, {why}."]
    return [f"Of the good ones {equal} are the fastest, alike as far as {kinds} can tell ({cost.words}); of these {why}."]


def _against(choice: Entry, baseline: Entry, cost: Cost, counted: bool) -> list[str]:
    if choice is baseline:
        return [f"{choice.label} is the baseline itself: of what else has results, nothing is worth a change."]
    accuracy = paired(choice, baseline, points)
    if accuracy is None:
        return [f"The baseline, {baseline.label}, has no result to compare with."]
    parts = [f"accuracy {difference(accuracy, 'points')}", _longer(choice, baseline, cost)]
    if cost.grain:
        parts.append(f"time of the whole training {difference(paired(choice, baseline, seconds), 's')}")
    ours, theirs = _value(choice, sent), _value(baseline, sent)
    if counted and ours and theirs:
        parts.append(times(ours, theirs, "bytes"))
    return [f"Against the baseline, {baseline.label}, with the same seeds: {'; '.join(parts)}."]


def _longer(choice: Entry, baseline: Entry, cost: Cost) -> str:
    """The difference of the time that counts, and of how many seeds that is."""
    gap = paired(choice, baseline, cost.measure)
    if gap is None:
        return f"{cost.words}: {baseline.label} does not get there"
    some = f" ({baseline.label} gets there with {gap.seeds} of {len(baseline.good)} seeds)" * (gap.seeds < len(baseline.good))
    return f"{cost.words} {difference(gap, 's', cost.apart(choice, baseline))}{some}"


def _others(grid: Grid, choice: Entry, good: list[Entry], best: Entry, counted: bool) -> list[str]:
    """Who else is worth a look, by what counts."""
    least = min(good, key=lambda entry: _value(entry, sent))
    lines = []
    if counted and _value(least, sent) < _value(choice, sent):
        lines.append(f"If bytes are what you pay for: {least.label}{_of(least, grid)}")
    if best is not choice:
        lines.append(f"If accuracy alone counts: {best.label}{_of(best, grid)}")
    return lines


def _faster(grid: Grid, choice: Entry, whole: list[Entry], good: list[Entry], best: Entry) -> list[str]:
    """Who is not good enough, but much faster than what is recommended."""
    below = [entry for entry in whole if entry not in good and (_reaches(grid, entry) or not _reaches(grid, choice))]
    cost = _cost(grid, [choice, *below])
    fastest = min(below, key=lambda entry: _value(entry, cost.measure), default=None)
    if fastest is None or _value(fastest, cost.measure) * FASTER > _value(choice, cost.measure):
        return []
    return [f"If {_accuracy(best) - _accuracy(fastest):.1f} points may be given for speed: {fastest.label}{_of(fastest, grid)}"]


def _holds_for(choice: Entry, baseline: Entry, simulated: bool) -> list[str]:
    """For whom: the share of time that messages take decides most of it."""
    share = baseline.mean(computing)
    if simulated or share is None:
        return ["This holds for this job with these settings: another network, another model or more training may turn it "
                "round."]
    return [f"This holds for this job on this network, where {baseline.label} computes for {share.value:.0f} % of its "
            "seconds, and spends the rest on messages and waiting. Where a job computes for a larger share of its time, "
            "bytes matter less; with another model, or more training, accuracies may come out differently."]  # fmt: skip


def _troubles(there: list[Entry]) -> list[str]:
    lines = []
    for entry in there:
        parts = [f"diverged with seed {', '.join(map(str, entry.diverged))}"] if entry.diverged else []
        if entry.failed:
            parts.append(f"failed with seed {', '.join(map(str, entry.failed))}: {next(iter(entry.failed.values()))}")
        if entry.missing:
            parts.append(f"has not been run with seed {', '.join(map(str, entry.missing))}")
        if parts:
            lines.append(f"{entry.label} is left out: it {'; it '.join(parts)}.")
    return lines


def _budget(grid: Grid, there: list[Entry]) -> list[str]:
    """Who did not have the budget that all should have: epochs were over before, or ranks looked too late."""
    if grid.budget is None or grid.budget[0] == "samples":
        return []
    kind, amount = grid.budget
    epochs, lines = grid.shared_job().epochs, []
    if short := [entry.label for entry in there if any(each.get("epochs", 0) >= epochs for each in entry.good.values())]:
        lines.append(f"Not all of the budget was used with {', '.join(short)}: the {epochs} epochs of [train] were over "
                     "before. More epochs make it equal.")  # fmt: skip
    used: Measure = {"seconds": seconds, "bytes": lambda outcome: float(outcome["bytes"])}[kind]
    over = [(entry.label, _value(entry, used) / amount) for entry in there if entry.good]
    if more := [f"{label} {times:.2f} times" for label, times in over if times > OVER]:
        lines.append(f"More than the budget was used, since {kind} are looked at now and then only: {', '.join(more)} of it.")
    return lines


def _caveats(grid: Grid, simulated: bool) -> list[str]:
    lines = []
    if len(grid.seeds) < 3:
        one = len(grid.seeds) == 1
        came = "There was one seed: nothing here tells what chance does" if one else "There were two seeds: intervals are wide"
        lines.append(f"{came}. Take three or more before you rely on it.")
    if simulated:
        job = grid.shared_job()
        lines.append(f"Seconds are simulated: {job.step_seconds:g} for a worker's step, {job.message_seconds:g} for a message "
                     "whatever its size. They tell who waits for whom, not how fast your network is.")  # fmt: skip
    return lines
