"""What the same bits on any number of ranks cost: steps of one job with the reproducible mode and without, in turn.

Afterwards the same job is trained for a given number of steps in the mode, and the checksum of its weights is told: to be
compared with that of other numbers of ranks, and of the other MPI library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.training.loop import loop
from mpiddl.training.request import Request
from mpiddl.training.run import train
from mpiddl.training.session import open_session, starting_state
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world

STEPS = 20
"""A sample is the mean of so many: what a loop sets up at its beginning is then a small part of it."""


def run(env: Any, data: str, hidden: tuple[int, ...], batch: int, shards: int, strategy: str, steps: int,
        seconds: float) -> list[dict[str, Any]]:
    """The two rows, the strategy's and the mode's, on rank 0; elsewhere none.

    Communication
    -------------
    Collective over ``COMM_WORLD``: what the training runs send.
    """
    job: dict[str, Any] = {"data": data, "hidden": hidden, "batch": batch, "shards": shards, "strategy": strategy,
                           "epochs": 1_000_000, "schedule": "constant", "threads": 1}
    with world(env) as link:
        ways = {strategy: False, "reproducible": True}
        with ExitStack() as open_runs:
            contenders = {name: Contender(open_runs.enter_context(_steps(link, {**job, "reproducible": mode})))
                          for name, mode in ways.items()}
            take_turns(link, contenders, seconds)
            trained = train(comm=link, quiet=True, **{**job, "reproducible": True, "max_steps": steps})
        rows = list(_rows(link.size, job, steps, contenders, trained.summary["checkpoint_sha256"]))
        return [] if link.rank else rows


@contextmanager
def _steps(link: Comm, settings: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A training that goes on by `STEPS` steps whenever it is called. Collective."""
    own, control = link.Dup(), link.Dup()
    request = Request(quiet=True, settings=settings)
    with open_session(own, control, request) as session:
        state, _ = starting_state(own, control, session)

        def block() -> None:
            goal = state.index + STEPS
            loop(own, session.model, session.optimiser, session.strategy, session.plan, state, lambda *_: state.index >= goal)

        yield block
    control.Free()
    own.Free()


def _rows(size: int, job: dict[str, Any], steps: int, contenders: dict[str, Contender],
          sha256: str) -> Iterator[dict[str, Any]]:
    baseline = quantiles(contenders[job["strategy"]].seconds)[1]
    for name, contender in contenders.items():
        low, median, high = quantiles(contender.seconds)
        yield {
            "case": f"{job['data']}, batch {job['batch']}, {size} rank{'s' * (size > 1)}",
            "contender": name, "baseline": job["strategy"], "seconds": median / STEPS, "baseline_seconds": baseline / STEPS,
            "ratio": baseline / median, "p10": low / STEPS, "p90": high / STEPS,
            "steps": steps, "sha256": sha256 if name == "reproducible" else None,
        }
