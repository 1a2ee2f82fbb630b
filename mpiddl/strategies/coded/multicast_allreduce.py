"""Synchronous SGD whose gradients are sent by multicast: each worker sends its gradient once, and all others receive it.

The step is that of `allreduce`, to rounding. A worker is a host, or a rank if all ranks are on one host.

Cost a step, V = bytes of the gradient, n workers: V sent and (n - 1) V received by each worker. A ring sends and receives
2 (n - 1)/n V: less for n > 2, but n - 1 times as many messages, one after the other.
Source: as `mpiddl.strategies.coded.coded_sum`, without redundancy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpiddl.strategies.coded.coded_sum import CodedSum


@dataclass(frozen=True)
class MulticastAllReduce(CodedSum):
    """Send each worker's gradient to all others by multicast."""

    sums_gradients = True
    name: ClassVar[str] = "multicast-allreduce"

    redundancy: str = "1"
