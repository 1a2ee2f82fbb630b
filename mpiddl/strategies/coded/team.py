"""Workers: the ranks of one host together, or single ranks where all are on one host.

The ranks of a worker divide its rows and add up their gradients in shared memory. One of them, the leader, talks to other
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiddl.collectives import TwoStep
from mpiddl.layout import block
from mpiddl.node.arena import Arena
from mpiddl.node.topology import Topology
from mpiddl.transport.comm import Comm
from mpiddl.transport.meter import Meter, booked


def teams(homes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each worker, given the lowest rank of each rank's node.

    Examples
    --------
    >>> teams([0, 0, 2, 2]), teams([0, 0, 0])
    (((0, 1), (2, 3)), ((0,), (1,), (2,)))
    """
    nodes = Topology(homes).nodes
    return nodes if len(nodes) > 1 else tuple((rank,) for rank in range(len(homes)))


def share(shards: Sequence[int], team: Sequence[int], rank: int) -> Sequence[int]:
    """The part of a worker's shards that one of its ranks holds."""
    part = block(len(shards), len(team), team.index(rank))
    return shards[part.start : part.stop]


class Team:
    """The ranks of this rank's worker; made once for each run.

    Attributes
    ----------
    leaders : Comm or None
        The leaders of all workers, in order; None on ranks that are not leaders.
    worker : int
        Number of this worker.
    input : ndarray, shape (size,), or None
        Where each rank's gradient is computed, if the worker has several ranks.
    """

    def __init__(self, comm: Comm, members: Sequence[Sequence[int]], size: int, dtype: np.dtype):
        self.worker = next(number for number, ranks in enumerate(members) if comm.rank in ranks)
        team = members[self.worker]
        leading = comm.rank == team[0]
        made = comm.Create([ranks[0] for ranks in members] if leading else [comm.rank])
        self.leaders = made if leading else None
        self._comm, self._talking = comm, [made]
        self._alone, self.input = len(team) == 1, None
        if not self._alone:
            local = comm.Create(team)
            self._talking.append(local)
            self._plan = TwoStep(local, size, dtype)
            self._arena = Arena(local)
            self.result = self._arena.common("result", size, dtype)
            self._flag = self._arena.common("flag", 1, np.int64)
            self.input = self._plan.input

    def count(self, anew: bool = False) -> None:
        """Count what was sent and waited for as the run's; ``anew``: forget what it was up to now."""
        for each in self._talking:
            (Meter() if anew else self._comm.meter).take(each.meter)

    def sum(self, gradient: np.ndarray) -> np.ndarray:
        """The sum of the gradients of the worker's ranks, on its leader at least."""
        if self._alone:
            return gradient
        assert self.input is not None
        if gradient is not self.input:
            self.input[:] = gradient
        return self._plan()

    def decide(self, asked: Callable[[], bool]) -> bool:
        """What the leader finds, on all ranks of the worker."""
        if self._alone:
            return asked()
        if self.leaders is not None:
            self._flag[0] = asked()
        with booked(self._comm, "waiting"):
            self._arena.meet("flag").Wait()
            found = bool(self._flag[0])
            self._arena.meet("flag").Wait()
        return found

    def shared(self, result: np.ndarray) -> np.ndarray:
        """The leader's ``result``, on all ranks of the worker; it is in `result` if there are several."""
        if self._alone:
            return result
        with booked(self._comm, "waiting"):
            self._arena.meet("result").Wait()
        return self.result
