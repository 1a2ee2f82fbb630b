"""Whether a run had more ranks than the cores of a node, or than its work can use: sentences for the end of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum

LEAST_LOSS_S = 0.1
"""Shorter losses are not reported: nobody waits for them."""

LEAST_RATIO = 1.5
"""How many times as long as the estimate for one rank a run has to take. The estimate is rough."""

LESS_OFTEN = "or a strategy that communicates less often, such as `strategy='local-sgd'`"


def shared_cores(nodes: Iterable[tuple[int, int]]) -> str:
    """A sentence if a node has more ranks than cores, from the ranks and the cores of each node; else nothing.

    Examples
    --------
    >>> shared_cores([(2, 2), (3, 2)])
    'cores: 3 ranks share 2 cores of a node and take turns; expected at most 2 ranks on it'
    >>> shared_cores([(2, 2)])
    ''
    """
    ranks, cores = max(nodes, key=lambda node: node[0] / node[1])
    if ranks <= cores:
        return ""
    several = "s" * (cores > 1)
    return (f"cores: {ranks} ranks share {cores} core{several} of a node and take turns; expected at most {cores} "
            f"rank{several} on it")


def small_job(computing: Sequence[float], communicating: Sequence[float], remedy: str = "") -> str:
    """A sentence if one rank would be faster than all of them, by estimate; else nothing.

    Parameters
    ----------
    computing, communicating : sequence of float
        For each rank that has work, its seconds of computing, and those of communication and waiting together.
    remedy : str
        What may help instead of fewer ranks.

    Notes
    -----
    One rank does the computing of all and communicates with nobody: the estimate is the sum of all ranks' computing. It is too
    long where ranks share a core, and too short where the caches of one rank do not hold the data of all.

    Examples
    --------
    >>> small_job([0.03, 0.03, 0.04], [3.9, 4.0, 4.1])[:96]
    'ranks: 99% of 4.0 s went into communication and waiting: the job is too small for 3 ranks. One r'
    >>> small_job([1.0, 1.0], [0.1, 0.1])
    ''
    """
    ranks, alone, lost = len(computing), fsum(computing), fsum(communicating)
    if ranks < 2:
        return ""
    together = (alone + lost) / ranks
    if together - alone < LEAST_LOSS_S or together < LEAST_RATIO * alone:
        return ""
    fewer = f"use fewer ranks, {remedy}" if remedy else "use fewer ranks"
    return (f"ranks: {lost / (alone + lost):.0%} of {_seconds(together)} went into communication and waiting: the job is too "
            f"small for {ranks} ranks. One rank would take about {_seconds(alone)} (estimate: the computing of all ranks added "
            f"up); {fewer}")


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
