"""``mpiddl bench gossip``: how much sooner an accuracy is reached by exchanging seldom, and whether links carry what we count.

First it measures what part of a step of the first strategy is communication, on the links that are there. Then all
strategies train, one after the other, turn by turn, each turn with a seed of its own that they share. Finished runs are kept
in a `mpiddl.study.journal.Journal`, if there is one; whatever is in it is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddl.bench import gossip_rows
from mpiddl.bench.gossip_runs import OUTCOME, Contender, Rhythm, Runner, read_contender
from mpiddl.errors import UsageError
from mpiddl.machine.launch_line import more_ranks
from mpiddl.study.journal import Journal
from mpiddl.training.request import search_path
from mpiddl.transport.agree import agreed
from mpiddl.transport.mpi import connect, failing_together

SHARE = 0.8
"""Of a step of the first strategy that shall be communication."""

SAME_LINKS = 1.5
"""By what factor the links of runs that are compared may differ, as they are measured."""


@dataclass(frozen=True)
class Study:
    """What is compared; the others with the first of the ``strategies``. See ``mpiddl bench gossip --help``.

    Raises
    ------
    UsageError
        A value that cannot be taken.
    """

    strategies: tuple[str, ...]
    targets: tuple[float, ...]
    turns: int
    seed: int
    every: int
    seconds: float
    data: str
    model: str
    hidden: tuple[int, ...]
    batch: int
    epochs: int
    threads: int

    def __post_init__(self) -> None:
        for name in ("strategies", "targets"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UsageError(f"{name}: got {','.join(map(str, values)) or 'none'}, expected one or more values, each only "
                                 "once")
        self.contenders()

    def contenders(self) -> list[Contender]:
        return [read_contender(text) for text in self.strategies]

    def job(self) -> dict[str, Any]:
        """What all runs have in common."""
        return {"data": self.data, "model": self.model, "hidden": self.hidden, "batch": self.batch, "epochs": self.epochs,
                "optimiser": "nesterov", "warmup": 0.5, "threads": self.threads}


def run(env: Any, study: Study, results: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of `mpiddl.bench.gossip_rows`, on rank 0; elsewhere none.

    Parameters
    ----------
    study : Study
    results : Path or None
        The file of finished runs.
    say : callable
        Is told on rank 0 how far it is.

    Raises
    ------
    UsageError, DataError
        On every rank: there is one rank only, or a strategy, setting or file that cannot be taken.

    Communication
    -------------
    Collective over ``COMM_WORLD``: what the strategies send, and at each meeting an all-reduce of the parameters.
    """
    link = connect(env=env)
    with failing_together(link):
        if link.size == 1:
            raise UsageError(f"bench gossip: got 1 rank, expected 2 or more: {more_ranks(env, 'bench gossip')}")
        runner = Runner(link, study.job(), study.every, max(study.targets), search_path(env))
        tell = say if link.rank == 0 else lambda text: None
        rows = _compared(runner, study, results, tell)
    rank = link.rank
    link.Free()
    return [] if rank else rows


def _compared(runner: Runner, study: Study, results: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    contenders, control = study.contenders(), runner.control
    with agreed(control):
        journal = Journal(results, say, OUTCOME) if results is not None and control.rank == 0 else None
    for contender in contenders:
        runner.check(contender)
    rhythm = runner.rhythm(contenders[0], study.seconds)
    for sentence in sentences(contenders[0], rhythm):
        say(sentence)
    found: dict[str, dict[int, Any]] = {contender.name: {} for contender in contenders}
    for turn in range(study.turns):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            outcome = _outcome(runner, contender, study.seed + turn, journal, rhythm)
            found[contender.name][turn] = outcome
            say(f"turn {turn + 1} of {study.turns}, {contender.name}: {gossip_rows.brief(outcome)}")
    return list(gossip_rows.rows(study.targets, found))


def _outcome(runner: Runner, contender: Contender, seed: int, journal: Journal | None, rhythm: Rhythm) -> dict[str, Any]:
    """What came of a run, now or before. Collective."""
    control, settings = runner.control, runner.settings(contender, seed)
    outcome: dict[str, Any] | None = control.bcast(journal.find(settings) if journal is not None else None)
    if outcome is None:
        outcome = {**runner(contender, seed), **rhythm._asdict(), "share": rhythm.share}
        with agreed(control):
            if journal is not None:
                journal.add(settings, outcome)
    factor = max(outcome["wire"], rhythm.wire) / max(min(outcome["wire"], rhythm.wire), 1.0)
    if factor > SAME_LINKS:
        raise UsageError(f"results: got a file of runs over links of {outcome['wire'] / 1e6:.0f} Mbit/s, expected "
                         f"another file, because the links now carry {rhythm.wire / 1e6:.0f} Mbit/s")
    return outcome


def sentences(reference: Contender, rhythm: Rhythm) -> Iterator[str]:
    """What part of a step is communication, and at which rate it would be as much as is wanted."""
    yield (f"a step of {reference.name} takes {rhythm.step * 1e3:.1f} ms, one that exchanges nothing "
           f"{rhythm.computing * 1e3:.1f} ms: {rhythm.share:.0%} is communication, expected about {SHARE:.0%}")
    if rhythm.wire:
        yield (f"links carry {rhythm.wire / 1e6:.0f} Mbit/s; {SHARE:.0%} would be at about "
               f"--rate {rhythm.rate_for(SHARE) / 1e6:.0f}mbit")
