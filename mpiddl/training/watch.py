"""Actions between steps: lines of metrics, validation, checkpoints, and the decision to stop.

Ranks in lockstep decide together. In asynchronous runs each rank writes its own lines and uses its own clock, without
communication, except at meetings.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.errors import DIVERGED, ConvergenceError, MismatchError
from mpiddl.memory import FlatBuffer
from mpiddl.models.base import Score
from mpiddl.strategies.base import Step, Strategy
from mpiddl.strategies.periodic.averages import average
from mpiddl.training import checkpoint
from mpiddl.training.evaluation import evaluate_rows
from mpiddl.training.job import Job
from mpiddl.training.loop import Plan, State
from mpiddl.training.metrics import Metrics, finite
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm

CHECK_S = 0.5  # seconds between two comparisons of the clocks of ranks in lockstep


@dataclass
class Watch:
    """Called by the loop after each step.

    comm : a communicator that the strategy does not use.
    validation : returns this rank's validation rows in chunks; without any rows there is no validation.
    checkpoints : folder for checkpoints, or None.
    about : JSON values for each checkpoint's manifest.
    show : called with each line of metrics, on every rank (the report prints on rank 0).
    keep : called before a checkpoint. Creates the run folder again if it was removed. Collective.
    begun : the step from which the run is continued; None after the first checkpoint.
    """

    comm: Comm
    job: Job
    model: Any
    strategy: Strategy
    plan: Plan
    metrics: Metrics
    validation: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
    checkpoints: Path | None
    about: dict[str, Any]
    show: Callable[[dict[str, Any]], None]
    keep: Callable[[], None] = lambda: None
    ended: str = ""
    begun: int | None = None
    _check_at: int = field(default=1, init=False)
    _why: str = field(default="", init=False)

    def __call__(self, state: State, step: Step, score: Score, meet: bool = False) -> bool:
        self.metrics.add(score, step.count)
        done, last = state.index, state.index == self.plan.steps
        epoch_over = done % self.plan.steps_per_epoch == 0 or last
        if step.total and (epoch_over or done % self.job.log_every == 0):
            line = self.metrics.line(done, done / self.plan.steps_per_epoch, step.rate)
            self.show(line)
            _check_loss(line)
        if self.strategy.lockstep:
            with self.metrics.aside():
                if (last or done % self._validate_every == 0) and self._validated(state):
                    self.ended = f"validation accuracy reached {self.job.target_accuracy:g}"
                elif self._save_now(done) and not last:
                    self.save(state)
        if meet:
            with self.metrics.aside():
                if self._validated(state):
                    self.ended = f"validation accuracy reached {self.job.target_accuracy:g}"
                elif self.checkpoints:
                    self.save(state)
                if not self.ended and self.job.max_bytes and self._spent(self.metrics.all_bytes()):
                    self.ended = self._why
        if step.total and not self.ended and self._late(done):  # a serving rank continues until all workers have left
            self.ended = self._why
        return bool(self.ended)

    @property
    def _validate_every(self) -> int:
        return self.job.validate_every or self.plan.steps_per_epoch

    def _save_now(self, done: int) -> bool:
        return bool(self.checkpoints) and done % (self.job.checkpoint_every or self.plan.steps_per_epoch) == 0

    def save(self, state: State, finished: bool = False) -> dict[str, Any]:
        """Write a checkpoint of all ranks' states. Returns its manifest. Collective.

        The state of a ``finished`` strategy is not saved: a run with more epochs starts with a new one.
        """
        assert self.checkpoints is not None
        self.keep()
        with self.metrics.traffic.aside():
            return self._save(self.checkpoints, state, finished)

    def _save(self, checkpoints: Path, state: State, finished: bool) -> dict[str, Any]:
        step = max(self.comm.allgather(self.plan.done(state)))
        counts = {"index": state.index, "updates": state.updates, "seen": state.seen}
        common = counts if self.strategy.lockstep else {"index": step, "updates": step, "seen": state.seen}
        self.check_replicas(state)
        params, moments = state.params if finished else self.consensus(state), state.moments
        own = {} if params is state.params else {"params": state.params.flat}
        if not self.strategy.replicated:
            own |= {f"moment.{name}": moment for name, moment in moments.items()}
            moments = {name: _mean(self.comm, moment, self.plan.trainers) for name, moment in moments.items()}
        if told := self.strategy.moments(self.comm, state.strategy, state.replica):
            moments, common = told[0], {**common, "seen": told[1]}
            own = {} if finished else own  # a run that goes on takes the moments of the one model
        begun, self.begun = self.begun, None
        return checkpoint.save(
            self.comm, checkpoints, step, params.views, moments, own,
            {**counts, "strategy": None if finished else state.strategy},
            {**self.about, **common, "finished": finished, "elapsed": self.metrics.elapsed_s,
             "bytes_sent": self.metrics.all_bytes()},
            self.job.keep, begun,
        )

    def consensus(self, state: State) -> FlatBuffer:
        """The common model of all ranks. Collective."""
        return consensus(self.comm, self.model, self.strategy, state)

    def look_back(self, state: State) -> None:
        """Validate the final model if it has not been validated yet. Collective.

        This happens after asynchronous runs, and after a limit of time or bytes between two validations. A run that can be
        resumed is not validated in the second case: it continues as if it had not been stopped.
        """
        amid = (bool(self.ended) and not self.checkpoints and state.index % self._validate_every > 0
                and state.index < self.plan.steps)
        if amid or not self.strategy.lockstep:
            with self.metrics.aside():
                self._validated(state, finished=True)

    def _validated(self, state: State, finished: bool = False) -> bool:
        """Evaluate on the validation rows. Returns True if the target accuracy is reached. Collective."""
        if not self.job.validation:
            return False
        elapsed, aside = self.metrics.elapsed_s, self.metrics.aside_s
        with self.metrics.traffic.aside():
            model = state.params if finished else self.consensus(state)
            found = evaluate_rows(self.comm, self.model, model, self.validation())
            distance = None if finished else finite(self._distance(state, model))
            step = max(self.comm.allgather(self.plan.done(state)))  # of the run: a slow rank has done fewer steps
            sent = self.metrics.all_bytes()
        if not found.count:
            return False
        line = {
            "step": state.index,
            "epoch": round(step / self.plan.steps_per_epoch, 4),
            "validation_loss": finite(found.loss),
            "validation_accuracy": found.accuracy,
            "distance": distance,
            "elapsed": round(elapsed, 4),
            "aside": round(aside, 4),
            "bytes": sent,
        }
        self.metrics.lines.write(line)
        self.show(line)
        return bool(self.job.target_accuracy) and (found.accuracy or 0.0) >= self.job.target_accuracy

    def _distance(self, state: State, model: FlatBuffer) -> float:
        """Root mean square distance of the training ranks from ``model``, divided by its norm. Collective."""
        if self.strategy.replicated and not self.strategy.guesses:
            return 0.0
        trains = not self.plan.placement.serves and self.comm.rank < (self.plan.trainers or self.comm.size)
        apart = (state.params.flat - model.flat).astype(float)
        sums = np.array([float(apart @ apart), 1.0]) if trains else np.zeros(2)
        self.comm.Allreduce(IN_PLACE, sums)
        norm = float(np.linalg.norm(model.flat.astype(float)))
        return float(np.sqrt(sums[0] / max(sums[1], 1.0))) / norm if norm else 0.0

    def _late(self, done: int) -> bool:
        """Whether the limit of time or bytes is reached. Ranks in lockstep check at the same steps, about every half second."""
        limit_s, limit_bytes = self.job.max_seconds, self.job.max_bytes
        elapsed, steps = self.metrics.session_s, max(self.metrics.session_steps, 1)
        if not self.strategy.lockstep:
            return self._timed_out(elapsed)
        if not (limit_s or limit_bytes) or done < self._check_at:
            return False
        everyone = self.comm.allgather((elapsed, self.metrics.meter.bytes))
        latest = max(theirs[0] for theirs in everyone)
        sent = self.metrics.earlier_bytes + sum(theirs[1] for theirs in everyone)
        pause = CHECK_S * steps / max(latest, 1e-9)
        if limit_bytes and sent:
            pause = min(pause, (limit_bytes - sent) / (2 * sent) * done)  # half of the remaining bytes
        self._check_at = done + max(1, int(pause))
        return self._timed_out(latest) or self._spent(sent)

    def _timed_out(self, elapsed_s: float) -> bool:
        if not self.job.max_seconds or elapsed_s < self.job.max_seconds:
            return False
        self._why = f"{self.job.max_seconds:g} s are over"
        return True

    def _spent(self, sent: int) -> bool:
        if not self.job.max_bytes or sent < self.job.max_bytes:
            return False
        self._why = f"{self.job.max_bytes} bytes are sent"
        return True

    def check_replicas(self, state: State) -> None:
        """Raise a `MismatchError` on every rank if replicated parameters differ between ranks. Collective."""
        if not self.strategy.replicated:
            return
        mine = zlib.crc32(self.consensus(state).flat.data)
        for moment in state.moments.values():
            mine = zlib.crc32(moment.data, mine)
        everyone = self.comm.allgather(mine)
        odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if odd:
            name, own = type(self.strategy).__name__, not type(self.strategy).__module__.startswith("mpiddl.")
            remedy = "A possible cause is a model or an optimiser that draws random numbers or depends on the rank"
            if own:
                remedy = (f"If ranks may differ, set replicated = False in {name}; otherwise combine and mix must have "
                          "the same result on every rank")
            error = MismatchError(f"step {state.index}: the parameters of ranks {odd[:8]} differ from those of rank 0, but "
                                  f"with strategy {name} they must be equal on every rank. {remedy}")
            error.exit_code = 1
            raise error


def consensus(comm: Comm, model: Any, strategy: Strategy, state: State) -> FlatBuffer:
    """The common model of all ranks: the strategy's, or the replicated parameters, or the mean over the ranks with rows.

    Communication
    -------------
    Collective over ``comm``, which the strategy's steps do not use: that of `Strategy.model`, or an all-reduce of the
    parameters.
    """
    told = strategy.model(comm, state.strategy, state.params.flat)
    if told is None:
        if strategy.replicated:
            return state.params
        told = _mean(comm, state.params.flat, state.trainers)
    found = FlatBuffer(model.shapes, state.params.dtype)
    found.flat[:] = told
    return found


def _mean(comm: Comm, array: np.ndarray, trainers: int) -> np.ndarray:
    mean = array.copy()
    average(comm, mean, trainers)
    return mean


def _check_loss(line: dict[str, Any]) -> None:
    if line["loss"] is None:
        raise ConvergenceError(
            f"step {line['step']}: the loss is not finite: {DIVERGED} at rate {line['rate']:g}; "
            "try a smaller `rate`, a `warmup`, or `clip`"
        )
