"""Synchronous SGD in which r workers compute the same gradient, so that each sends only a part of it.

Two codes, by multicast or in rings:

=======  ==================================================  =======================================================
code     who computes what                                   by multicast, a step waits
=======  ==================================================  =======================================================
slices   groups of r workers compute the same gradient, and  for one worker of each group; another one sends the
         each sends another slice of it                      slice of one that is late
mds      worker w computes blocks w, w-1, ..., w-r+1, and    for all but ``stragglers`` workers, s; blocks that they
         sends one coded vector                              have finished are used
=======  ==================================================  =======================================================

The step is that of `allreduce` with the same rows, to rounding. With slices, the weights have the same bits with and without
late workers. A worker is a host, whose ranks divide its rows and add up in shared memory; if all ranks are on one host, each is
a worker.

Cost a step, V = bytes of the gradient, n workers: r times the computation. By multicast, slices: V/r sent and V (n/r - 1)
received by each worker; mds: V/(r - s) sent and V (n - 1)/(r - s) received. In rings, slices: V (1 + 1/r - 2/n) sent; mds:
V (n - 1)/r. With r = n nothing is sent.
Source: see `mpiddl.strategies.coded.replicate_and_slice` and `mpiddl.strategies.coded.mds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from mpiddl.coding.mds_code import computing_order
from mpiddl.coding.placements import BlockPlacement, block_rows, check_redundancy, cyclic, replicated_groups, shares
from mpiddl.errors import UsageError
from mpiddl.layout import rank_shards
from mpiddl.strategies.base import Combined, Placement, Replica, Step, Strategy, check_numbers
from mpiddl.strategies.coded.calibration import Trial, best_of_each_way, options, rates
from mpiddl.strategies.coded.exchange import Way
from mpiddl.strategies.coded.mds import Mds
from mpiddl.strategies.coded.replicate_and_slice import ReplicateAndSlice
from mpiddl.strategies.coded.team import share, teams
from mpiddl.strategies.synchronous.auto import Auto
from mpiddl.strategies.synchronous.two_step import TwoStep
from mpiddl.transport.comm import Comm

AUTO = "auto"

CHOICES = {"code": (AUTO, "slices", "mds"), "transport": (AUTO, "multicast", "unicast"),
           "speeds": ("even", "measured")}


@dataclass(frozen=True)
class CodedSum(Strategy):
    """Sum the gradients of groups of ``redundancy`` workers that compute the same.

    redundancy : workers that compute each gradient; auto: as many as make the step shortest, by measurements before the run.
    code : slices, mds, or auto: the one with the shorter step where redundancy is measured, else slices.
    stragglers : number of workers that may be late without delaying a step, below the redundancy; code mds and multicast only.
    transport : multicast, unicast, or auto: multicast where it works.
    speeds : even; measured: slow workers compute fewer rows, by measurements before the run.
    ahead : number of steps by which a worker may fall behind before the others wait; multicast only.
    interface : network interface for multicast, by name, address or network.
    """

    sums_gradients = True
    name: ClassVar[str] = "coded-sum"

    redundancy: str = "auto"
    code: str = "auto"
    stragglers: int = 0
    transport: str = "auto"
    speeds: str = "even"
    ahead: int = 4
    interface: str = ""
    homes: tuple[int, ...] = field(default=(), repr=False, compare=False)
    predicted_s: float = field(default=0.0, repr=False, compare=False)
    rates: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, choices in CHOICES.items():
            if (got := getattr(self, name)) not in choices:
                raise UsageError(f"strategy {self.name}: {name}: got {got!r}, expected {', '.join(choices)}")
        if self.transport == "unicast" and (self.stragglers or (self.code == "mds" and str(self.redundancy) == AUTO)):
            raise UsageError(f"strategy {self.name}: transport: got unicast with stragglers, or with code mds and redundancy "
                             "auto; expected multicast: in rings, a step waits for all workers, and slices send less")
        if self.stragglers and self.code != "mds":
            raise UsageError(f"strategy {self.name}: stragglers: got {self.stragglers} with code {self.code}, expected code "
                             "mds; with slices, all but one worker of each group may be late")
        if self.ahead < 2:
            raise UsageError(f"strategy {self.name}: ahead: got {self.ahead}, expected 2 or more")
        if str(self.redundancy) != AUTO and not str(self.redundancy).isdecimal():
            raise UsageError(f"strategy {self.name}: redundancy: got {self.redundancy!r}, expected auto or a whole number")
        if self.stragglers < 0 or (self.stragglers >= max(self.copies, 1) and str(self.redundancy) != AUTO):
            raise UsageError(f"strategy {self.name}: stragglers: got {self.stragglers} with redundancy {self.redundancy}, "
                             "expected a whole number from 0 to redundancy - 1")

    @property
    def copies(self) -> int:
        """Workers that compute each gradient; 1 while that is not decided."""
        return 1 if str(self.redundancy) == AUTO else int(self.redundancy)

    @property
    def undecided(self) -> str:
        return " and ".join(["redundancy"] * (str(self.redundancy) == AUTO) + ["speeds"] * (self.speeds == "measured"))

    @property
    def even(self) -> bool:  # type: ignore[override]
        """Not if slow workers compute fewer rows."""
        return not self.rates

    def check(self, size: int) -> None:
        check_redundancy(size, self.copies)

    def resolve(self, comm: Comm) -> tuple[Strategy, str]:
        homes = tuple(comm.nodes())
        workers = teams(homes)
        check_redundancy(len(workers), max(self.copies, self.stragglers + 1))
        counts = sorted(set(map(len, workers)))
        if (self.copies > 1 or str(self.redundancy) == AUTO) and len(counts) > 1:
            return TwoStep(), (f"hosts with {' and '.join(map(str, counts))} ranks would compute different bits of the same "
                               "gradient: each gradient is computed once, as with strategy two-step")
        return replace(self, homes=homes), ""

    def calibrate(self, comm: Comm, trial: Trial) -> tuple[Strategy, str]:
        chosen, said = self._choose(comm, trial) if str(self.redundancy) == AUTO else (self, "")
        if self.speeds == "measured" and isinstance(chosen, CodedSum):
            chosen = replace(chosen, rates=tuple(rates(comm, chosen._teams(comm.size), trial)))
        return chosen, said

    def _choose(self, comm: Comm, trial: Trial) -> tuple[Strategy, str]:
        """The strategy with the shortest step, and the predictions."""
        transports = ["multicast", "unicast"] if self.transport == AUTO else [self.transport]
        codes = ["slices", "mds"] if self.code == AUTO else [self.code]
        found, trouble = options(comm, self._teams(comm.size), trial, codes, transports, self.stragglers, self.interface)
        best = found[0]
        said = "predicted step: " + ", ".join(map(str, best_of_each_way(found))) + (f"; {trouble}" if trouble else "")
        if best.redundancy == 1:
            return Auto(), said
        transport = self.transport if best.transport == "multicast" else "unicast"  # auto: it falls back to rings
        chosen = replace(self, redundancy=str(best.redundancy), code=best.code, stragglers=best.stragglers,
                         transport=transport, predicted_s=best.seconds)
        return chosen, said

    def placement(self, shards: int, rank: int, size: int) -> Placement:
        members = self._teams(size)
        worker = next(number for number, ranks in enumerate(members) if rank in ranks)
        if self._uses_mds(len(members)):
            parts = self._block_shards(shards, rank, size)
            return Placement([shard for part in parts for shard in part], scores=parts[0])
        placement = replicated_groups(len(members), self.copies)
        (number,), owners = placement.blocks[worker], placement.owners
        mine = share(self._split(shards, placement)[number], members[worker], rank)
        return Placement(mine, scores=mine[owners[number].index(worker) :: len(owners[number])])

    def _split(self, shards: int, placement: BlockPlacement) -> list[range]:
        """The shards of each block."""
        if self.rates:
            return block_rows(shards, shares(placement, self.rates))
        return [rank_shards(shards, len(placement.owners), block) for block in range(len(placement.owners))]

    def blocks(self, shards: int, rank: int, size: int) -> Sequence[Sequence[int]] | None:
        return self._block_shards(shards, rank, size) if self._uses_mds(len(self._teams(size))) else None

    def _block_shards(self, shards: int, rank: int, size: int) -> list[Sequence[int]]:
        """With code mds: the rank's share of each block of its worker, in the order in which they are computed."""
        members = self._teams(size)
        worker = next(number for number, ranks in enumerate(members) if rank in ranks)
        placement = cyclic(len(members), self.copies)
        split = self._split(shards, placement)
        return [share(split[block], members[worker], rank) for block in computing_order(placement, worker)]

    def _uses_mds(self, workers: int) -> bool:
        """With as many workers as the redundancy, each has all gradients: there is nothing to send or to code."""
        return self.code == "mds" and str(self.redundancy) != AUTO and self.copies < workers

    def memory(self, comm: Comm, size: int, dtype: np.dtype) -> np.ndarray | None:
        return self._way(comm, size, dtype).team.input

    def note(self, comm: Comm, size: int, dtype: np.dtype) -> str:
        return self._way(comm, size, dtype).note

    def needs_gradient(self, comm: Comm, state: Any, replica: Replica, step: Step) -> bool:
        return self._way(comm, replica.params.size, replica.params.dtype).needs_gradient()

    def combine_block(self, comm: Comm, state: Any, grad: np.ndarray, number: int, step: Step) -> Any:
        self._way(comm, grad.size, grad.dtype).keep(number, grad)
        return state

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
        found: Way = comm.kept((self, size, dtype), lambda: self._made(comm, size, dtype))
        return found

    def _made(self, comm: Comm, size: int, dtype: np.dtype) -> Way:
        members, how = self._teams(comm.size), (self.transport, self.ahead, self.interface)
        if self._uses_mds(len(members)):
            return Mds(comm, members, self.copies, self.stragglers, size, dtype, *how)
        return ReplicateAndSlice(comm, members, self.copies, size, dtype, *how)
