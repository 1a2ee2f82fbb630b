"""Synchronous SGD in which r workers compute the same gradient, so that each sends only a part of it.

The workers stand in groups of r, and the members of a group train on the same rows. Each sends another slice of the gradient,
by multicast or in rings. Over multicast no step waits for a worker that is late, as long as another one of its group is on
time: the one on time sends its slice, too, and the late one leaves out what it has not begun. The step is that of `allreduce`
with the same rows, to rounding. With and without late workers the weights have the same bits.

A worker is a host, whose ranks divide its rows and add up in shared memory; if all ranks are on one host, each is a worker.

Cost a step, V = bytes of the gradient, n workers: r times the computation. Multicast: V/r sent and V (n/r - 1) received by each
worker. Rings: V (1 + 1/r - 2/n) sent. With r = n nothing is sent.
Source: ours; see `mpiddl.collectives.allreduce_replicated_multicast` and `mpiddl.collectives.allreduce_replicated_ring`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from mpiddl.coding.loads import groups
from mpiddl.coding.placements import check_redundancy, replicated_groups
from mpiddl.collectives.allreduce_replicated_multicast import ReplicatedMulticast
from mpiddl.collectives.allreduce_replicated_ring import ReplicatedRing
from mpiddl.errors import TransportError, UsageError
from mpiddl.layout import rank_shards
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy
from mpiddl.strategies.coded.calibration import Trial, options
from mpiddl.strategies.coded.team import Team, share, teams
from mpiddl.strategies.synchronous.auto import Auto
from mpiddl.strategies.synchronous.two_step import TwoStep
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm

AUTO = "auto"

TRANSPORTS = (AUTO, "multicast", "unicast")

MEMORY_BYTES = 512 << 20
"""Most that steps under way take, unless there are fewer than two of them."""


@dataclass(frozen=True)
class CodedSum(Strategy):
    """Sum the gradients of groups of ``redundancy`` workers that compute the same.

    redundancy : workers that compute each gradient; auto: as many as make the step shortest, by measurements before the run.
    transport : multicast, unicast, or auto: multicast where it works.
    ahead : steps that other workers may be ahead of a late one; multicast only.
    interface : network interface for multicast, by name, address or network.
    """

    sums_gradients = True

    redundancy: str = "auto"
    transport: str = "auto"
    ahead: int = 4
    interface: str = ""
    homes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    predicted_s: float = field(default=0.0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UsageError(f"strategy coded-sum: transport: got {self.transport!r}, expected {', '.join(TRANSPORTS)}")
        if self.ahead < 2:
            raise UsageError(f"strategy coded-sum: ahead: got {self.ahead}, expected 2 or more")
        if str(self.redundancy) != AUTO and not str(self.redundancy).isdecimal():
            raise UsageError(f"strategy coded-sum: redundancy: got {self.redundancy!r}, expected auto or a whole number")

    @property
    def copies(self) -> int:
        """Workers that compute each gradient; 1 while that is not decided."""
        return 1 if str(self.redundancy) == AUTO else int(self.redundancy)

    @property
    def work(self) -> float:
        workers = len(teams(self.homes)) if self.homes else 1
        return workers / groups(workers, min(self.copies, workers))

    def check(self, size: int) -> None:
        check_redundancy(size, self.copies)

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        homes = tuple(comm.nodes())
        workers = teams(homes)
        check_redundancy(len(workers), self.copies)
        counts = sorted(set(map(len, workers)))
        if str(self.redundancy) != "1" and len(counts) > 1:
            return TwoStep(), (f"hosts with {' and '.join(map(str, counts))} ranks would compute different bits of the same "
                               "gradient: each gradient is computed once, as with strategy two-step")
        return replace(self, homes=homes), ""

    def calibrate(self, comm: Comm, trial: Trial) -> tuple[Strategy, str]:
        if str(self.redundancy) != AUTO:
            return self, ""
        transports = ["multicast", "unicast"] if self.transport == AUTO else [self.transport]
        found = options(comm, self._teams(comm.size), trial, transports, self.interface)
        best, others = found[0], sorted(found[1:], key=lambda option: option.redundancy)
        said = f"predicted step: {best}, " + ", ".join(map(str, others)) if others else ""
        if best.redundancy == 1:
            return Auto(), said
        chosen = replace(self, redundancy=str(best.redundancy), transport=best.transport, predicted_s=best.seconds)
        return chosen, said

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        members = self._teams(size)
        worker = next(number for number, ranks in enumerate(members) if rank in ranks)
        owners = replicated_groups(len(members), self.copies).owners
        number = next(number for number, workers in enumerate(owners) if worker in workers)
        mine = share(rank_shards(shards, len(owners), number), members[worker], rank)
        return Placement(mine, scores=mine[owners[number].index(worker) :: len(owners[number])])

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        return self._way(comm, size, dtype).team.input

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        return self._way(comm, size, dtype).note

    def needs_gradient(self, comm: Comm, state: Any, replica: Replica, step: Step) -> bool:
        return not self._way(comm, replica.params.size, replica.params.dtype).left_out()

    def combine(self, comm: Comm, state: Any, grad: np.ndarray, replica: Replica, step: Step) -> Combined:
        return Combined(self._way(comm, grad.size, grad.dtype).sum(grad), step.total, state)

    def finish(self, comm: Comm, state: Any, replica: Replica) -> None:
        self._way(comm, replica.params.size, replica.params.dtype).gather()

    def figures(self, comm: Comm, state: Any, replica: Replica) -> dict[str, Any]:
        way = self._way(comm, replica.params.size, replica.params.dtype)
        return {"coding": {**way.counted, "predicted_s": self.predicted_s or None, "step_s": way.step_s()}}

    def _teams(self, size: int) -> tuple[tuple[int, ...], ...]:
        return teams(self.homes or [0] * size)

    def _way(self, comm: Comm, size: int, dtype: np.dtype) -> Way:
        """Created once, collectively; freed with ``comm``."""
        found: Way = comm.kept((self, size, dtype), lambda: Way(comm, self, self._teams(comm.size), size, dtype))
        return found


class Way:
    """The exchange of one run: groups, memory and what was counted; freed with its communicator.

    note : what the user should know of it.
    counted : by worker, steps in which it was not waited for, and steps that it has left out; see `gather`.
    """

    def __init__(self, comm: Comm, strategy: CodedSum, members: Sequence[Sequence[int]], size: int, dtype: np.dtype):
        self.freed, self.note, self._comm = False, "", comm
        self.team = Team(comm, members, size, dtype)
        self._groups = replicated_groups(len(members), strategy.copies).owners
        self._skipped, self._left_out, self._began, self._usual_s = False, 0, 0.0, 0.0
        self.counted: dict[str, dict[str, int]] = {"not_waited_for": {}, "left_out": {}}
        self._taken, self._last = deque[float](maxlen=1000), 0.0
        self._exchange = self._connect(comm, strategy, size, dtype) if len(members) > 1 else None
        self.team.count(anew=True)

    def _connect(self, comm: Comm, strategy: CodedSum, size: int, dtype: np.dtype) -> Any:
        """Multicast where it works and is wanted, else rings; all ranks the same."""
        leaders, exchange, why = self.team.leaders, None, ""
        slots = max(2, min(strategy.ahead, MEMORY_BYTES // max(size * dtype.itemsize * len(self._groups), 1)))
        result = None if self.team.input is None else self.team.result
        if strategy.transport != "unicast":
            try:
                with agreed(comm):
                    if leaders is not None:
                        exchange = ReplicatedMulticast(leaders, self._groups, size, dtype, slots, strategy.interface, result)
            except TransportError as error:
                if strategy.transport == "multicast":
                    raise
                why = f"; {error}"
            else:
                self.note = f"{self._about()} by multicast"
                return exchange
        self.note = f"{self._about()} in rings{why}"
        return ReplicatedRing(leaders, self._groups, size, dtype, result) if leaders is not None else None

    def _about(self) -> str:
        sizes = sorted({len(workers) for workers in self._groups})
        if sizes == [1]:
            return "each worker sends its gradient to all others"
        several, each = "s" * (len(self._groups) > 1), " or ".join(map(str, sizes))
        return f"{len(self._groups)} group{several} of {each} workers that compute the same gradient; each sends a part of it"

    def left_out(self) -> bool:
        """Whether this worker is so late that its gradient of the coming step is not needed."""
        usual = self._usual_s
        self._skipped = self.team.decide(lambda: self._exchange is not None and self._exchange.begun(usual))
        self._left_out += self._skipped
        self._began = self._comm.now()
        return self._skipped

    def sum(self, gradient: np.ndarray) -> np.ndarray:
        """The sum of the gradients of all groups."""
        if not self._skipped:
            self._usual_s = self._comm.now() - self._began
        whole = gradient if self._skipped else self.team.sum(gradient)
        result: np.ndarray = whole if self._exchange is None else self._exchange(None if self._skipped else whole)
        shared = self.team.shared(result)
        self.team.count()
        if self._last:
            self._taken.append(self._comm.now() - self._last)
        self._last = self._comm.now()
        return shared

    def step_s(self) -> float | None:
        """Seconds of a step, as the median."""
        return median(self._taken) if self._taken else None

    def gather(self) -> None:
        """Steps in which workers were not waited for, and which workers left out, of all workers; collective."""
        late = self._exchange.late if self._exchange is not None else {}
        leading = self.team.leaders is not None
        everyone = self._comm.setup_allgather((dict(late), self.team.worker, self._left_out) if leading else None)
        found = [part for part in everyone if part is not None]
        total: Counter[int] = sum((Counter(late) for late, _, _ in found), Counter())
        self.counted = {"not_waited_for": {str(worker): count for worker, count in sorted(total.items())},
                        "left_out": {str(worker): count for _, worker, count in found if count}}

    def Free(self) -> None:
        """Collective."""
        self.freed = True
        if self._exchange is not None:
            self._exchange.Free()
