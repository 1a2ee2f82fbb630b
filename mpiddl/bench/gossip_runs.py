"""The runs of ``mpiddl bench gossip``: trainings up to an accuracy on a clock that stands still while it is measured.

They are made by the session, the loop and the strategies that users get. Every so many steps all ranks meet, score the mean of
their models on the validation rows, and go on together. Between two meetings the slowest rank's seconds count, and what the
links carry; what a meeting takes and sends does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from mpiddl.errors import UsageError
from mpiddl.machine.clock import now
from mpiddl.models.base import Score
from mpiddl.node.topology import neighbours
from mpiddl.strategies import Step, Strategy, make_strategy
from mpiddl.study.interleaved import quantiles
from mpiddl.study.limits import HEADERS, wire_limit
from mpiddl.training.builders import find_data
from mpiddl.training.evaluation import evaluate_rows
from mpiddl.training.job import make_job
from mpiddl.training.link_traffic import Traffic
from mpiddl.training.loop import State, loop
from mpiddl.training.request import Request
from mpiddl.training.session import Session, open_session, starting_state
from mpiddl.training.watch import consensus
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm

SAMPLE = 10
"""Steps of a sample."""

LEAST = 5
"""Samples of each, however long they take."""

STREAM_BYTES = 4 << 20
"""Of a message that tells what links carry: 30 times what the testbed's links let pass at once."""

OUTCOME = "points", "links", "sent", "messages", "computing", "step", "wire", "share"


class Contender(NamedTuple):
    """A strategy and its rate; ``name`` is both, as they were given."""

    name: str
    strategy: str
    rate: float


class Rhythm(NamedTuple):
    """Of a strategy's steps on these ranks and links, medians of the slowest rank, in seconds.

    computing : a step that exchanges nothing.
    step : a step.
    wire : bits a second that each link carries, headers too; 0 on one host.
    """

    computing: float
    step: float
    wire: float

    @property
    def share(self) -> float:
        """The part of a step that is not computing."""
        return max(0.0, 1 - self.computing / self.step)

    def rate_for(self, share: float) -> float:
        """Bits a second at which so much of a step would be communication, if that takes as much longer as links are slower.

        Examples
        --------
        >>> Rhythm(computing=1.0, step=3.0, wire=400e6).rate_for(0.5)
        800000000.0
        """
        return self.wire * (self.step - self.computing) / (self.computing * share / (1 - share))


def read_contender(text: str) -> Contender:
    """What ``NAME[:key=value,...]@RATE`` means.

    Raises
    ------
    UsageError
        For anything else, or a strategy that is not known.

    Examples
    --------
    >>> read_contender("gossip:graph=ring@0.1")
    Contender(name='gossip:graph=ring@0.1', strategy='gossip:graph=ring', rate=0.1)
    """
    strategy, _, rate = text.partition("@")
    try:
        number = float(rate)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"strategy: got {text!r}, expected NAME@RATE with a learning rate above 0, such as gossip@0.1")
    make_strategy(strategy)  # it checks
    return Contender(text, strategy, number)


class Runner:
    """Trains on the ranks of ``link``. Made collectively.

    Parameters
    ----------
    link : Comm
        The strategies'.
    job : mapping
        Settings of `mpiddl.training.job.Job` that all runs have in common.
    every : int
        Steps from one meeting to the next.
    target : float
        Accuracy at which a run ends.
    search : sequence of Path
        Folders of data.
    """

    def __init__(self, link: Comm, job: Mapping[str, Any], every: int, target: float, search: Sequence[Path]):
        self.link, self.control, self.every, self.target = link, link.Dup(), every, target
        self._job = dict(job)
        with agreed(self.control):
            self._data = find_data(make_job(self._job), search)
        self._about = {"mpi": link.library(), "nodes": link.nodes(), "job": self._job, "every": every, "target": target}

    def check(self, contender: Contender) -> None:
        """Raise a `UsageError`, on all ranks, for a strategy that does not run on these or has them not step together."""
        strategy = make_strategy(contender.strategy)
        with agreed(self.control):
            strategy.check(self.link.size)
        if not strategy.lockstep or not strategy.resolve(self.control)[0].lockstep:
            raise UsageError(f"strategy: got {contender.strategy!r}, expected a synchronous strategy, such as gossip")

    def settings(self, contender: Contender, seed: int) -> dict[str, Any]:
        """By which a run is known."""
        return {**self._about, "strategy": contender.strategy, "rate": contender.rate, "seed": seed}

    def __call__(self, contender: Contender, seed: int) -> dict[str, Any]:
        """One run: ``points`` of its course (`Course`), what each host's link carried (``links``), payload bytes that each rank
        has ``sent``, and ``messages``. Collective."""
        with self._opened(contender, seed) as session:
            state, _ = starting_state(self.link, self.control, session)
            course = Course(self.control, self.link.meter, session, self.every, self.target)
            loop(self.link, session.model, session.optimiser, session.strategy, session.plan, state, course)
            links, sent, messages = course.traffic.links(), *course.sent()
            figures = session.strategy.figures(self.link, state.strategy, state.replica)
            session.strategy.finish(self.link, state.strategy, state.replica)
        return {"points": course.points, "links": [list(link) for link in links], "sent": sent, "messages": messages,
                **self.control.bcast(figures)}

    def rhythm(self, contender: Contender, seconds: float) -> Rhythm:
        """Measure for so long. Collective."""
        with self._opened(contender, 0) as session:
            forms, times, until = (replace(session, strategy=Strategy()), session), list[list[float]](), now() + seconds
            while self.control.bcast(now() < until) or len(times) <= LEAST:
                times.append([self._sample(form) for form in forms])
        computing, step = (quantiles(list(found))[1] for found in zip(*times[1:], strict=True))  # the first makes connections
        return Rhythm(computing, step, self._wire())

    @contextmanager
    def _opened(self, contender: Contender, seed: int) -> Iterator[Session]:
        settings = {**self._job, "strategy": contender.strategy, "rate": contender.rate, "seed": seed}
        request = Request(data=self._data, quiet=True, settings=settings)
        with open_session(self.link, self.control, request) as session:
            yield session

    def _sample(self, session: Session) -> float:
        """Seconds of a step, the mean of some, on the slowest rank. The first one, which makes arrays, is left out."""
        state, _ = starting_state(self.link, self.control, session)
        times: list[float] = []

        def after(*_: Any) -> bool:
            times.append(now())
            return len(times) > SAMPLE

        self.control.Barrier()
        began = now()
        loop(self.link, session.model, session.optimiser, session.strategy, session.plan, state, after)
        marks = [began, *times][len(times) > 1 :]
        session.strategy.finish(self.link, state.strategy, state.replica)
        return max(self.control.allgather((marks[-1] - marks[0]) / (len(marks) - 1)))

    def _wire(self) -> float:
        near = neighbours(self.link)
        if len(near.topology.nodes) == 1:
            return 0.0
        stream, times = wire_limit(near, STREAM_BYTES).call, []
        for _ in range(LEAST):
            self.control.Barrier()
            began = now()
            stream()
            times.append(max(self.control.allgather(now() - began)))
        return STREAM_BYTES * 8 * HEADERS / quantiles(times)[1]


class Course:
    """Called by the loop after each step; keeps the accuracy of the ranks' one model over steps, seconds and bytes.

    Attributes
    ----------
    points : list
        For each meeting: steps, seconds of training, bytes and messages sent by all ranks, accuracy.
    traffic : Traffic
        What links carry, but for meetings.
    """

    def __init__(self, control: Comm, meter: Any, session: Session, every: int, target: float):
        self._control, self._meter, self._session, self._every, self._target = control, meter, session, every, target
        self.points: list[list[float]] = []
        self.traffic = Traffic(control)
        self._seconds, self._before = 0.0, (meter.bytes, meter.messages)
        control.Barrier()
        self._left = now()

    def sent(self) -> tuple[list[int], list[int]]:
        """Payload bytes and messages that each rank has sent so far. Collective."""
        mine = self._meter.bytes - self._before[0], self._meter.messages - self._before[1]
        nbytes, messages = zip(*self._control.allgather(mine), strict=True)
        return list(nbytes), list(messages)

    def __call__(self, state: State, step: Step, score: Score, meet: bool) -> bool:
        if state.index % self._every and state.index < self._session.plan.steps:
            return False
        taken = now() - self._left
        with self.traffic.aside():
            self._seconds += max(self._control.allgather(taken))
            nbytes, messages = self.sent()
            model = consensus(self._control, self._session.model, self._session.strategy, state)
            found = evaluate_rows(self._control, self._session.model, model, self._session.validation_rows())
            self.points.append([state.index, self._seconds, sum(nbytes), sum(messages), found.accuracy or 0.0])
            self._control.Barrier()
        self._left = now()
        return self.points[-1][-1] >= self._target or not isfinite(found.loss)
