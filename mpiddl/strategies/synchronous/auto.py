"""Synchronous SGD with automatic choice of the all-reduce, overlapped with the backward pass where that helps.

The gradient is divided into buckets in the order of the backward pass, the last layer first. The all-reduce of a bucket starts
when the bucket is complete. A progress thread advances it during the rest of the backward pass, and `combine` waits for the
end. Where overlap gains nothing (`mpiddl.tuning.rule.gradient`), the gradient is summed afterwards. The step is
that of `allreduce`, to rounding.

Cost per step: 2 (N-1)/N V sent by a node, N nodes; the time that the dependency graph does not allow to hide
(`mpiddl.strategies.synchronous.overlap_schedule`). The second to fourth step of a run have no overlap, to measure how much time
can be hidden. Sources: buckets as in Li et al. 2020, doi:10.14778/3415478.3415530; the sum as `mpiddl.collectives.buckets`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiddl.collectives import TwoStep, allreduce
from mpiddl.collectives.buckets import Buckets
from mpiddl.collectives.wire import MPI, VERBS
from mpiddl.errors import UsageError
from mpiddl.memory import PRIVATE
from mpiddl.progress.started import go_on
from mpiddl.progress.thread import Progress
from mpiddl.strategies.base import Combined, Replica, Step, Strategy
from mpiddl.strategies.synchronous.overlap_measured import Hidden
from mpiddl.transport.base import IN_PLACE
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import booked
from mpiddl.tuning import Choice, chooser
from mpiddl.tuning.rule import BUCKETS, BUCKETS_VERBS, LIBRARY, OVER_VERBS

BUCKET_BYTES = 2 << 20
"""Smaller buckets start earlier and leave less at the end; larger ones cost fewer rounds. See docs/overlap.md."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Sum the gradients over all ranks in every step. ``bucket_bytes=0``: automatic choice."""

    bucket_bytes: int = 0
    sums_gradients = True

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0:
            raise UsageError(f"auto: bucket_bytes: got {self.bucket_bytes}, expected 1 or more, or 0 for an automatic choice")

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        way = self._way(comm, size, dtype)
        return way.sum.input if way.sum is not None else None

    def placed(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        reduction = self._way(comm, size, dtype).sum
        return reduction.placed if reduction is not None else PRIVATE

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        trouble = self._way(comm, size, dtype).trouble
        return trouble and f"auto: {trouble}: communication goes on only between the parts of the backward pass"

    def overlaps(self, comm: Comm, size: int, dtype: np.dtype) -> bool:
        return isinstance(self._way(comm, size, dtype).sum, Buckets)

    def start(self, comm: Comm, state: Any, grad: np.ndarray, part: slice, step: Step) -> Any:
        way = self._way(comm, grad.size, grad.dtype)
        if not isinstance(way.sum, Buckets):
            return state
        begin, end = state.get("bucket", (part.stop, part.stop))
        if part.stop != begin:  # not adjacent: close the current bucket
            way.bucket(begin, end)
            end = part.stop
        full = (end - part.start) * grad.itemsize >= way.bucket_bytes
        if full:
            way.bucket(part.start, end)
        way.move_on()
        return {"bucket": [part.start, part.start if full else end], "done": state.get("done", 0) + part.stop - part.start}

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        way = self._way(comm, grad.size, grad.dtype)
        algorithm = way.choice.algorithm
        if algorithm == LIBRARY:
            comm.Allreduce(IN_PLACE, grad)
        elif way.sum is None and comm.size > 1:
            allreduce(comm, IN_PLACE, grad, algorithm=algorithm)
        if way.sum is None:
            return Combined(grad, step.total, state)
        if grad is not way.sum.input:  # made by a previous strategy of a chain
            way.sum.input[:] = grad
            state = {}
        if isinstance(way.sum, TwoStep):
            return Combined(way.sum(), step.total, state)
        begin, end = state.get("bucket", (0, grad.size))
        if state.get("done", grad.size) != grad.size:
            raise UsageError(f"model.gradient: the calls of ready() cover {state['done']} elements, expected each "
                             f"of the {grad.size} elements once")
        way.bucket(begin, end)
        return Combined(way.wait(), step.total, {})

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._way(comm, replica.params.size, replica.params.dtype).stop()

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        way = self._way(comm, replica.params.size, replica.params.dtype)
        return {"sums": f"{way.choice.algorithm}: {way.choice.why}", "overlap": way.hidden.summary()}

    def _way(self, comm: Comm, size: int, dtype: np.dtype) -> Way:
        """Created once, collectively; freed with ``comm``."""
        return comm.kept((self, size, dtype), lambda: Way(comm, size, dtype, self.bucket_bytes))


class Way:
    """The all-reduce of one gradient: choice, buffers and measurements; freed with its communicator.

    sum : the reduction; None if there is none, or if it works on arrays in any memory.
    trouble : the reason why there is no progress thread, or "".
    """

    def __init__(self, comm: Comm, size: int, dtype: np.dtype, bucket_bytes: int):
        self.bucket_bytes, self.choice = bucket_bytes or BUCKET_BYTES, choose(comm, size * dtype.itemsize)
        if bucket_bytes and comm.size > 1:
            self.choice = Choice(BUCKETS, "as asked for")
        self.trouble, self.hidden, self.freed = "", Hidden(comm.now), False
        self.sum: TwoStep | Buckets | None = None
        self._comm, self._thread, self._later = comm, Progress(comm), list[tuple[int, int]]()
        algorithm = self.choice.algorithm
        transport = VERBS if algorithm in (*OVER_VERBS, BUCKETS_VERBS) else MPI
        if algorithm.startswith("two-step"):
            self.sum = TwoStep(comm, size, dtype, leader=algorithm == "two-step-leader", transport=transport)
        if algorithm in (BUCKETS, BUCKETS_VERBS):
            self.sum = Buckets(comm, size, dtype, transport=transport)
            self.trouble = self._thread.trouble

    def bucket(self, begin: int, end: int) -> None:
        """Elements ``begin`` to ``end`` are final."""
        if begin < end:
            self.hidden.ready(end - begin)
            self._later.append((begin, end))
            if not self.hidden.measuring:
                self._send()

    def move_on(self) -> None:
        """Called between two parts of the backward pass: advances communication if there is no progress thread."""
        if self.trouble:
            with booked(self._comm, "moving"):
                go_on(self._comm, list(self._comm.started))

    def wait(self) -> np.ndarray:
        """Called when the gradient is complete. Waits for the sum and returns it."""
        assert isinstance(self.sum, Buckets)
        self.hidden.computed()
        self._thread.rest()
        self._send()
        self.sum.wait()
        self.hidden.over()
        return self.sum.result

    def _send(self) -> None:
        assert isinstance(self.sum, Buckets)
        for begin, end in self._later:
            request = self.sum.start(begin, end)
            if not self.hidden.measuring:
                self._thread.on(request)
        self._later.clear()

    def stop(self) -> None:
        """Stop the progress thread. The next bucket starts a new one."""
        self._thread.Free()

    def Free(self) -> None:
        """Collective."""
        self.freed = True
        self.stop()
        if self.sum is not None:
            self.sum.Free()


def choose(comm: Comm, nbytes: int) -> Choice:
    """Return the choice for a gradient of ``nbytes``, the same on every rank: by the table of ``mpiddl tune``, or by the rule.

    Communication
    -------------
    Collective: its neighbours, at the first time; two all-gathers.
    """
    return chooser(comm, os.environ).gradient(nbytes)
