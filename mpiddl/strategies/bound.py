"""Bounded staleness: which workers of a parameter server may begin another step, and which are held up.

A worker's clock is the number of its pushes that have been applied. Whoever has pushed gets an answer, the parameters as they
are then, once the slowest is no more than ``bound`` steps behind. So what a worker computes with at clock c holds everybody's
updates up to clock c - ``bound``, and its delay is (2 bound + 1)(workers - 1) at most. With bound 0 all compute each step on
the same parameters. Who has left for good holds up nobody.

Cost: nothing is sent for it; answers wait.
Source: Ho et al., NIPS 2013, section 2 (SSP). Departures: the parameters are pulled anew in every step, there is no cache that
may serve an older clock; where all have to meet, no worker begins a step that the bound does not ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def going(clocks: Sequence[int], held: Sequence[int], left: Collection[int], bound: int, due: bool = False) -> list[int]:
    """Those of the workers ``held`` that go on, in this order.

    Parameters
    ----------
    clocks : sequence of int
        Steps that each worker has done.
    held : sequence of int
        Workers that wait for an answer.
    left : collection of int
        Workers that make no more steps.
    bound : int
        Steps that a worker may be ahead.
    due : bool
        All shall meet as soon as they can: then only those go on that would be too far behind the others after it.

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
    highest = max(clocks[worker] + (worker not in held) for worker in active)  # who computes will push once more
    return [worker for worker in free if clocks[worker] < highest - bound]
