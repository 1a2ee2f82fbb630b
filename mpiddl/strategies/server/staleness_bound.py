"""Staleness bounds: which workers of a parameter server may begin another step, and which must wait.

The clock of a worker is the number of its applied pushes. A pushing worker gets its answer, the current parameters, when the
slowest worker is at most ``bound`` steps behind it. The parameters at clock c therefore contain all workers' updates up to
clock c - ``bound``, and no delay exceeds (2 bound + 1)(workers - 1). With bound 0 all workers compute each step at the same
parameters. A worker that has left for good is not waited for.

Cost: no messages; answers are postponed.
Source: Ho et al., NIPS 2013, section 2 (SSP). Departures: the parameters are pulled in every step, there is no cache with older
clocks; before a meeting, no worker begins a step that the bound does not require.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def going(clocks: Sequence[int], held: Sequence[int], left: Collection[int], bound: int, due: bool = False) -> list[int]:
    """Return the workers of ``held`` that may continue, in this order.

    Parameters
    ----------
    clocks : sequence of int
        Number of finished steps of each worker.
    held : sequence of int
        Workers that wait for an answer.
    left : collection of int
        Workers that have left the run.
    bound : int
        Steps that a worker may be ahead of the slowest one.
    due : bool
        A meeting is due: only workers that would otherwise be too far behind continue.

    Examples
    --------
    >>> going([5, 3, 4], held=[0, 2], left=[], bound=1)
    [2]
    >>> going([5, 3, 4], held=[0, 2], left=[1], bound=1)
    [0, 2]
    >>> going([5, 3, 4], held=[2, 1, 0], left=[], bound=1, due=True)
    [1]
    """
    active = [worker for worker in range(len(clocks)) if worker not in left]
    slowest = min((clocks[worker] for worker in active), default=0)
    free = [worker for worker in held if clocks[worker] - slowest <= bound]
    if not due:
        return free
    highest = max(clocks[worker] + (worker not in held) for worker in active)  # a computing worker will push once more
    return [worker for worker in free if clocks[worker] < highest - bound]
