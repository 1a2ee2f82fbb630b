"""Figures of a comparison: means over the seeds for each strategy and number of workers, with 95 % intervals (ranges with fewer
than three seeds), and differences from the baseline's runs with the same seed.

Accuracy on the validation rows chooses a strategy, accuracy on the test rows is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from mpiddl.compare.grid import Cell, Contender, Grid
from mpiddl.strategies.server.push import staleness
from mpiddl.study.intervals import Mean, mean

HEADER_BYTES = 14 + 20 + 32
"""Of a packet of the kernel: Ethernet, IPv4, TCP with time stamps. Acknowledgements have them too."""

Outcome = Mapping[str, Any]
Measure = Callable[[Outcome], float | None]


class Entry(NamedTuple):
    """A contender on so many workers.

    good : the outcomes that are results, by seed.
    diverged, failed : seeds without a result; ``failed`` with the reason.
    missing : seeds that have not been run.
    """

    contender: Contender
    workers: int
    good: Mapping[int, Outcome]
    diverged: tuple[int, ...]
    failed: Mapping[int, str]
    missing: tuple[int, ...]

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def whole(self) -> bool:
        """Whether every seed has a result."""
        return not (self.diverged or self.failed or self.missing)

    def mean(self, measure: Measure) -> Mean | None:
        """Over the seeds that have it; None if none has."""
        values = [value for outcome in self.good.values() if (value := measure(outcome)) is not None]
        return mean(values) if values else None

    def staleness(self) -> dict[str, Any] | None:
        """Staleness of the gradients of all seeds; None where workers step together, so that no gradient is late."""
        counts: dict[str, int] = {}
        for outcome in self.good.values():
            for delay, count in ((outcome.get("staleness") or {}).get("histogram") or {}).items():
                counts[delay] = counts.get(delay, 0) + count
        return staleness(counts) if counts else None


def diverges(outcome: Outcome) -> bool:
    """Whether a run diverged: it ended early, or the loss of its finished model is not a finite number (kept as None)."""
    return bool(outcome.get("diverged")) or outcome.get("loss", 0.0) is None


def entries(grid: Grid, found: Mapping[Cell, Outcome], workers: int) -> list[Entry]:
    """One for each contender, in their order."""
    made = []
    for contender in grid.contenders:
        by_seed = {seed: found.get(grid.cell(contender, workers, seed)) for seed in grid.seeds}
        good = {seed: each for seed, each in by_seed.items() if each and not each.get("error") and not diverges(each)}
        diverged = tuple(seed for seed, each in by_seed.items() if each and diverges(each))
        failed = {seed: each["error"] for seed, each in by_seed.items() if each and each.get("error")}
        missing = tuple(seed for seed, each in by_seed.items() if not each)
        made.append(Entry(contender, workers, good, diverged, failed, missing))
    return made


def best_rates(grid: Grid, find: Callable[[Cell], Outcome | None]) -> dict[str, float]:
    """By label, the learning rate of the best validation accuracy, of equals the smallest; only where all runs are over.

    A run that diverged is worse than any other. A run that failed has to be made again.
    """
    rates: dict[str, float] = {}
    for contender in grid.contenders:
        found = {rate: find(cell) for rate, cell in grid.tuning(contender).items()}
        whole = {rate: each for rate, each in found.items() if each and not each.get("error")}
        good = {rate: validated(each) for rate, each in whole.items() if not diverges(each)}
        if good and len(whole) == len(found):
            rates[contender.label] = max(sorted(good), key=good.__getitem__)
    return rates


def paired(one: Entry, other: Entry, measure: Measure) -> Mean | None:
    """The mean over the seeds that both have of ``one`` minus ``other``; None if they have none in common."""
    differences = []
    for seed in sorted(one.good.keys() & other.good.keys()):
        a, b = measure(one.good[seed]), measure(other.good[seed])
        if a is not None and b is not None:
            differences.append(a - b)
    return mean(differences) if differences else None


def points(outcome: Outcome) -> float:
    """Test accuracy in %: what is reported."""
    return 100 * outcome["accuracy"]


def validated(outcome: Outcome) -> float:
    """Accuracy of the finished model on the validation rows, in %: what chooses."""
    return 100 * float(outcome["curve"][-1]["accuracy"])


def seconds(outcome: Outcome) -> float:
    """Of training, without validation."""
    return float(outcome["seconds"])


def sent(outcome: Outcome) -> float:
    """Payload in MB: each message counted once, where it is sent."""
    return float(outcome["bytes"]) / 1e6


def egress(outcome: Outcome) -> float | None:
    """MB that the hosts' links sent; None where they are not counted."""
    return _links(outcome, "sent")


def ingress(outcome: Outcome) -> float | None:
    """MB that the hosts' links received."""
    return _links(outcome, "received")


def _links(outcome: Outcome, way: str) -> float | None:
    hosts = outcome.get("hosts")
    return sum(host[way] for host in hosts) / 1e6 if hosts else None


def payload(outcome: Outcome) -> float | None:
    """MB that the hosts' links sent, without the headers of Ethernet, IPv4 and TCP (66 bytes a packet of the kernel)."""
    hosts = [host for host in outcome.get("hosts") or () if "packets" in host]
    return sum(host["sent"] - HEADER_BYTES * host["packets"] for host in hosts) / 1e6 if hosts else None


def apart(outcome: Outcome) -> float | None:
    """Consensus distance in % of the model's norm, the mean of all validations."""
    found = [point["distance"] for point in outcome["curve"] if point["distance"] is not None]
    return 100 * fmean(found) if found else None


def computing(outcome: Outcome) -> float | None:
    """Share of the ranks' seconds in which they compute, in %; the rest goes to messages and waiting."""
    phases = outcome.get("phases")
    return 100 * phases["compute"] / whole if phases and (whole := sum(phases.values())) else None


def reaching(target: float, axis: str) -> Measure:
    """A measure: how many ``axis`` ("seconds", "bytes", "samples") until the first validation at or above ``target``."""

    def measure(outcome: Outcome) -> float | None:
        return next((float(point[axis]) for point in outcome["curve"] if (point["accuracy"] or 0.0) >= target), None)

    return measure


def grain(target: float) -> Measure:
    """A measure: how many seconds the validation that first reaches ``target`` is after the one before it."""

    def measure(outcome: Outcome) -> float | None:
        before = 0.0
        for point in outcome["curve"]:
            if (point["accuracy"] or 0.0) >= target:
                return float(point["seconds"]) - before
            before = float(point["seconds"])
        return None

    return measure


def rows(grid: Grid, found: Mapping[Cell, Outcome]) -> list[dict[str, Any]]:
    """All figures of the report's tables as plain values; a mean has the names of `mpiddl.study.intervals.Mean`."""
    made = []
    for workers in grid.workers:
        there = entries(grid, found, workers)
        baseline = next(entry for entry in there if entry.label == grid.baseline)
        made += [_row(grid, entry, baseline) for entry in there]
    return made


def _row(grid: Grid, entry: Entry, baseline: Entry) -> dict[str, Any]:
    measures: dict[str, Measure] = {"accuracy": points, "validation": validated, "seconds": seconds, "sent_mb": sent,
                                    "egress_mb": egress, "payload_mb": payload, "ingress_mb": ingress, "distance": apart,
                                    "computing": computing}  # fmt: skip
    if grid.target:
        measures |= {f"{axis}_to_target": reaching(grid.target, axis) for axis in ("seconds", "bytes", "samples")}
    late = entry.staleness()
    return {
        "strategy": entry.label, "spec": entry.contender.spec, "own": dict(entry.contender.own),
        "rates": entry.contender.rates, "workers": entry.workers,
        "ranks": next((outcome["ranks"] for outcome in entry.good.values()), None),
        **{name: _plain(entry.mean(measure)) for name, measure in measures.items()},
        "difference": None if entry is baseline else _plain(paired(entry, baseline, points)),
        "reached": _reached(grid, entry),
        "staleness": late,
        "samples": _plain(entry.mean(lambda outcome: float(outcome["samples"]))),
        "seeds": sorted(entry.good), "diverged": list(entry.diverged), "missing": list(entry.missing),
        "failed": {str(seed): why for seed, why in entry.failed.items()},
    }  # fmt: skip


def _reached(grid: Grid, entry: Entry) -> int | None:
    """How many seeds reach the target; None if there is none."""
    there = [reaching(grid.target, "samples")(outcome) is not None for outcome in entry.good.values()]
    return sum(there) if grid.target else None


def _plain(value: Mean | None) -> dict[str, Any] | None:
    return value._asdict() if value else None
