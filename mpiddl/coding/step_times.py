"""Predicted seconds of a step with redundancy.

Redundancy r multiplies the time of computation and divides the bytes. Two models:

    one sender at a time, every worker gets every block    T(r) = r T_calc + T_comm (n - r) / (r (n - 1))
    full-duplex links, every worker gets the sum           T(r) = r T_calc + max(egress, ingress of the busiest) / rate

T_calc is the time to compute 1/n of a batch. T_comm is the time to send every block gradient by unicast, one sender at a time,
without redundancy. The first model is that of the published scheme; the paper has T_comm / r, its limit for many workers. The
second takes its bytes from `mpiddl.coding.loads`: for replicate-and-slice max((n/r - 1) V, V/r) over multicast, and
V (1 + 1/r - 2/n) over unicast. Where r does not divide n, there are G = floor(n/r) groups, and n/G multiplies T_calc.
Sources: Li, Maddah-Ali & Avestimehr 2018, arXiv:1604.07086 (first model); ours, from the loads (second model).
"""

from __future__ import annotations

from mpiddl.coding.loads import Load
from mpiddl.coding.placements import check_redundancy


def published_seconds(workers: int, redundancy: int, calc_s: float, comm_s: float) -> float:
    """T(r) of the published scheme, one sender at a time.

    Examples
    --------
    >>> [round(published_seconds(8, r, 1.0, 8.0), 2) for r in (1, 2, 3, 4)]
    [9.0, 5.43, 4.9, 5.14]
    """
    check_redundancy(workers, redundancy)
    if workers == 1:
        return calc_s
    return redundancy * calc_s + comm_s * (workers - redundancy) / (redundancy * (workers - 1))


def step_seconds(load: Load, redundancy: float, calc_s: float, rate: float) -> float:
    """Seconds of a step over full-duplex links.

    Parameters
    ----------
    load : Load
        In any unit, for instance bytes.
    redundancy : float
        Computation of a worker, in units of 1/n of the batch.
    calc_s : float
        Seconds for 1/n of the batch.
    rate : float
        Units of the load that a link carries in a second, each way.

    Examples
    --------
    >>> from mpiddl.coding.loads import mds, replicate_and_slice
    >>> step_seconds(replicate_and_slice(10, 2, 90), 2, 1.0, 90.0)
    6.0
    >>> step_seconds(mds(10, 2, 90), 2, 1.0, 90.0)
    6.5
    """
    return redundancy * calc_s + max(load.egress, load.ingress) / rate
