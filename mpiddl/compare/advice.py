"""The verdict of a comparison in at most three sentences, warnings, and notes for readers who want more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpiddl.compare.choice import CLOSE, Choice, Cost, accuracy, amount, choose, cost_of, reaches
from mpiddl.compare.grid import Cell, Grid
from mpiddl.compare.numbers import counted, difference, listed, percent, times, told
from mpiddl.compare.statistics import Entry, Measure, computing, entries, paired, points, reaching, seconds, sent, validated
from mpiddl.compare.strategy_texts import at_an_end, complexity, learning_rate
from mpiddl.study.intervals import mean

FASTER = 1.5
"""A less accurate strategy is noted if it is so many times faster."""

OVER = 1.05
"""A strategy that uses so many times the budget is warned of."""

ONE_HOST = ("All workers ran on one host, where some strategies use shared memory and send nothing, so bytes were not "
            "compared. If bytes are what you pay for, compare on several hosts, or with --testbed.")


class Advice(NamedTuple):
    """For one number of workers.

    choice : the label of the advised strategy; None if none is.
    verdict : at most three sentences: the choice with its figures, the reason, and what to mind.
    warnings : what is wrong with the runs or limits what they say.
    notes : alternatives, and where the verdict holds.
    """

    workers: int
    choice: str | None
    verdict: list[str]
    warnings: list[str]
    notes: list[str]


def advise(grid: Grid, found: Mapping[Cell, Mapping[str, Any]], workers: int, simulated: bool) -> Advice:
    """The advice for so many workers."""
    there = entries(grid, found, workers)
    choice = choose(grid, there, simulated)
    warnings = [*_troubles(there), *_budget(grid, there)]
    warnings += [f"{learning_rate(each)}." for each in grid.contenders if not each.settled or at_an_end(each)]
    if choice is None:
        references = all(entry.contender.workers for entry in there)
        why = "Every strategy is a reference" if references else "No strategy has a result for every seed"
        return Advice(workers, None, [f"{why}, so none is advised."], warnings, [])
    warnings += [*_simulated(grid, simulated), *([] if choice.bytes_count else [ONE_HOST])]
    baseline = next(entry for entry in there if entry.label == grid.baseline)
    against, caveat = _against(choice, baseline), _caveat(grid, there)
    verdict = [f"Take {choice.taken.label}{_figures(choice.taken, grid)}", _why(grid, choice, there), *(caveat or against)]
    notes = [*(against if caveat else []), *_more_seeds(grid, choice), *_below(choice), *_others(grid, choice),
             *_faster(grid, choice), *_holds_for(baseline, simulated)]  # fmt: skip
    return Advice(workers, choice.taken.label, verdict, warnings, notes)


def _figures(entry: Entry, grid: Grid) -> str:
    parts = [f"{told(entry.mean(points), unit='%')} of the test rows right",
             f"{told(entry.mean(seconds), unit='s')} of training", f"{told(entry.mean(sent), unit='MB')} sent"]  # fmt: skip
    if reaches(grid, entry):
        until = told(entry.mean(reaching(grid.target, "seconds")), unit="s")
        parts.append(f"{percent(grid.target)} of the validation rows right after {until}")
    return f": {', '.join(parts)}."


def _why(grid: Grid, choice: Choice, there: list[Entry]) -> str:
    """The reason for the choice in one sentence, with the figures that decided."""
    taken = choice.taken.label

    def named(those: list[Entry]) -> str:
        return f"All {len(there)} strategies" if len(those) == len(there) > 2 else listed([entry.label for entry in those])

    if len(choice.whole) == 1:
        alone = sum(not entry.contender.workers for entry in there) == 1
        return f"It is the only strategy {'compared' if alone else 'with a result for every seed'}."
    if len(choice.good) == 1:
        second = max((entry for entry in choice.whole if entry is not choice.taken), key=accuracy)
        gap = difference(paired(choice.taken, second, validated), "points")
        return f"It is the most accurate on the validation rows; against the second best, {second.label}: {gap}."
    if len(choice.able) == 1:
        return (f"{named(choice.good)} {_differ(choice, choice.good)} in validation accuracy; of these, "
                f"only {taken} reaches {percent(grid.target)} with every seed.")  # fmt: skip
    if len(choice.tied) == 1:
        others = [entry for entry in choice.able if entry is not choice.taken]
        second = min(others, key=lambda entry: amount(entry, choice.cost.measure))
        gap = difference(paired(second, choice.taken, choice.cost.measure), "s", choice.cost.apart(second, choice.taken))
        return (f"{named(choice.able)} {_differ(choice, choice.able)} in validation accuracy; of these, "
                f"{taken} is the fastest ({choice.cost.words} with the second fastest, {second.label}: {gap}).")  # fmt: skip
    time = f" and {choice.cost.words}" if choice.time_counts else ""
    return (f"{named(choice.tied)} {_differ(choice, choice.tied, choice.time_counts)} in validation "
            f"accuracy{time}{_gaps(choice)}; of these, {taken} {_preferred(choice)}.")  # fmt: skip


def _differ(choice: Choice, those: list[Entry], time: bool = False) -> str:
    """Whether noise explains all their differences from the most accurate, and from the fastest."""
    gaps = [paired(entry, choice.best, validated) for entry in those]
    gaps += [paired(entry, choice.fastest, choice.cost.measure) for entry in those] if time else []
    return "are equal within noise" if all(gap and gap.noise for gap in gaps) else "show no clear difference"


def _gaps(choice: Choice) -> str:
    """How far the choice is from the most accurate and from the fastest."""
    taken, best, fastest, cost = choice.taken, choice.best, choice.fastest, choice.cost
    far = {best.label: [told(paired(taken, best, validated), "+", "points")]} if taken is not best else {}
    if choice.time_counts and taken is not fastest:
        far.setdefault(fastest.label, []).append(told(paired(taken, fastest, cost.measure), "+", "s"))
    parts = [f"{' and '.join(gaps)} against {label}" for label, gaps in far.items()]
    return f" ({taken.label}: {', '.join(parts)})" if parts else ""


def _preferred(choice: Choice) -> str:
    """Why one of several that are equal is taken."""
    taken = choice.taken
    others = [entry for entry in choice.tied if entry is not taken]
    alike = any(complexity(entry.contender.strategy) == complexity(taken.contender.strategy) for entry in others)
    simplest = "comes first of the simplest ones" if alike else "is the simplest"
    if not choice.bytes_count:
        return simplest
    ours, theirs = amount(taken, sent), [amount(entry, sent) for entry in others]
    low, high = (told(mean([pick(theirs)])) for pick in (min, max))
    figures = f"({told(taken.mean(sent), unit='MB')}; {'the others' if len(others) > 1 else 'the other one'}: " \
              f"{f'{low} to {high}' if low != high else high} MB)"  # fmt: skip
    if max(theirs) <= CLOSE * ours:
        return f"{simplest}, and they send about the same {figures}"
    least = "sends the fewest bytes" if ours <= min(theirs) else f"{simplest} of those that send the fewest bytes"
    return f"{least} {figures}"


def _against(choice: Choice, baseline: Entry) -> list[str]:
    """The choice beside the baseline, on the test rows."""
    taken, cost = choice.taken, choice.cost
    if taken is baseline:
        return []
    gap = paired(taken, baseline, points)
    if gap is None:
        return [f"The baseline, {baseline.label}, has no result to compare with."]
    parts = [f"test accuracy {difference(gap, 'points')}", _longer(taken, baseline, cost)]
    ours, theirs = amount(taken, sent), amount(baseline, sent)
    if choice.bytes_count and ours and theirs:
        parts.append(times(ours, theirs, "bytes"))
    return [f"Against the baseline, {baseline.label}: {'; '.join(parts)}."]


def _longer(taken: Entry, baseline: Entry, cost: Cost) -> str:
    """The difference of the time that counts, and of how many seeds it is."""
    gap = paired(taken, baseline, cost.measure)
    if gap is None:
        return f"{cost.words}: {baseline.label} does not reach it"
    some = f" ({baseline.label} reaches it with {gap.seeds} of {len(baseline.good)} seeds)" * (gap.seeds < len(baseline.good))
    return f"{cost.words} {difference(gap, 's', cost.apart(taken, baseline))}{some}"


def _caveat(grid: Grid, there: list[Entry]) -> list[str]:
    """What to mind most: strategies that are left out, and too few seeds."""
    parts = []
    if out := [entry for entry in there if not entry.whole]:
        names = listed([f"{entry.label} ({incomplete(entry)})" for entry in out])
        parts.append(f"{names} {'is' if len(out) == 1 else 'are'} left out")
    if len(grid.seeds) == 1:
        parts.append("one seed says nothing about noise, so run three or more before you rely on this")
    elif len(grid.seeds) == 2:
        parts.append("two seeds say little about noise, so run three or more before you rely on this")
    text = "; ".join(parts)
    return [f"{text[0].upper() if not out else text[0]}{text[1:]}."] if text else []


def incomplete(entry: Entry) -> str:
    """How many runs of a strategy have no result, and why."""
    parts = [(len(entry.diverged), "diverged"), (len(entry.failed), "failed"), (len(entry.missing), "not run")]
    return ", ".join(f"{counted(number, 'run')} {what}" for number, what in parts if number)


def _more_seeds(grid: Grid, choice: Choice) -> list[str]:
    """Whether noise hides differences that would matter."""
    gaps = [paired(entry, choice.best, validated) for entry in choice.good]
    if not any(gap and gap.noise and -gap.value > grid.margin for gap in gaps):
        return []
    return [f"Differences of more than {grid.margin:g} points are within noise here. More seeds make the intervals smaller."]


def _below(choice: Choice) -> list[str]:
    """Strategies that are not accurate enough."""
    below = [entry for entry in choice.whole if entry not in choice.good]
    gaps = [f"{entry.label} ({difference(paired(entry, choice.best, validated), 'points')})" for entry in below]
    return [f"Less accurate than {choice.best.label} on the validation rows: {listed(gaps)}."] if gaps else []


def _others(grid: Grid, choice: Choice) -> list[str]:
    """Strategies that are first in one figure alone."""
    least = min(choice.good, key=lambda entry: amount(entry, sent))
    firsts = [("accuracy", choice.best)]
    firsts += [("time", choice.fastest)] if choice.time_counts else []
    firsts += [("bytes", least)] if choice.bytes_count and amount(least, sent) < amount(choice.taken, sent) else []
    found: dict[str, list[str]] = {}
    for what, entry in firsts:
        if entry is not choice.taken:
            found.setdefault(entry.label, []).append(what)
    by_label = {entry.label: entry for entry in choice.whole}
    return [f"If only {' or '.join(what)} matter{'s' * (what != ['bytes'])}: {label}{_figures(by_label[label], grid)}"
            for label, what in found.items()]  # fmt: skip


def _faster(grid: Grid, choice: Choice) -> list[str]:
    """A strategy that is not accurate enough, but much faster than the choice."""
    taken = choice.taken
    below = [entry for entry in choice.whole if entry not in choice.good and (reaches(grid, entry) or not reaches(grid, taken))]
    measure = cost_of(grid, [taken, *below]).measure
    fastest = min(below, key=lambda entry: amount(entry, measure), default=None)
    if fastest is None or amount(fastest, measure) * FASTER > amount(taken, measure):
        return []
    lost = accuracy(choice.best) - accuracy(fastest)
    return [f"If you can give up {lost:.1f} points of accuracy for speed: {fastest.label}{_figures(fastest, grid)}"]


def _holds_for(baseline: Entry, simulated: bool) -> list[str]:
    """Where the verdict holds: the share of time that messages take decides most of it."""
    share = baseline.mean(computing)
    if simulated or share is None:
        return ["The verdict holds for this job and these settings. Another network, another model or longer training may "
                "change it."]  # fmt: skip
    return [f"The verdict holds for this job on this network, where {baseline.label} spends {share.value:.0f} % of its time on "
            "computation and the rest on messages and waiting. Where that share is larger, bytes matter less. Another model or "
            "longer training may change the accuracies."]  # fmt: skip


def _troubles(there: list[Entry]) -> list[str]:
    """Runs without a result, strategy by strategy, with the reason."""
    lines = []
    for entry in there:
        parts = [f"diverged with {_seeds(entry.diverged)}"] if entry.diverged else []
        if entry.failed:
            parts.append(f"failed with {_seeds(tuple(entry.failed))} ({next(iter(entry.failed.values()))})")
        if entry.missing and entry.contender.settled:
            parts.append(f"has not been run with {_seeds(entry.missing)}")
        if parts:
            lines.append(f"{entry.label} is left out: it {'; it '.join(parts)}.")
    return lines


def _seeds(seeds: tuple[int, ...]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {listed(list(map(str, seeds)))}"


def _budget(grid: Grid, there: list[Entry]) -> list[str]:
    """Strategies that used less or more than the budget: epochs ended early, or ranks checked the budget too late."""
    if grid.budget is None or grid.budget[0] == "samples":
        return []
    kind, limit = grid.budget
    epochs, lines = grid.shared_job().epochs, []
    if short := [entry.label for entry in there if any(each.get("epochs", 0) >= epochs for each in entry.good.values())]:
        lines.append(f"{listed(short)} did not use the whole budget: the {epochs} epochs of [train] ended before it. Set more "
                     "epochs for an equal budget.")  # fmt: skip
    used: Measure = {"seconds": seconds, "bytes": lambda outcome: float(outcome["bytes"])}[kind]
    shares = [(entry.label, amount(entry, used) / limit) for entry in there if entry.good]
    if over := [f"{label} ({share:.2f} times the budget)" for label, share in shares if share > OVER]:
        lines.append(f"{listed(over)} used more than the budget, because ranks check {kind} only now and then.")
    return lines


def _simulated(grid: Grid, simulated: bool) -> list[str]:
    job = grid.shared_job()
    return [f"Seconds are simulated: {job.step_seconds:g} s for a step of a worker, {job.message_seconds:g} s for a message of "
            "any size. They show which ranks wait for which, not the speed of your network. The settings step_seconds and "
            "message_seconds in [train] change them."] if simulated else []  # fmt: skip
