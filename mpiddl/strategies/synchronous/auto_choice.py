"""The choice of `auto`: the all-reduce for a gradient, and the size of its buckets.

For sums after the backward pass, a table of ``mpiddl tune`` for this machine takes precedence.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from mpiddl.node.topology import neighbours
from mpiddl.transport.comm import Comm
from mpiddl.tuning import chooser
from mpiddl.tuning.place import table_path

BUCKET_BYTES = 2 << 20
"""Smaller buckets start earlier and leave less at the end; larger ones cost fewer rounds. See docs/overlap.md."""

WORTH_BYTES = 1 << 20
"""A smaller gradient is summed in less time than a thread needs to wake up."""

SHORT_BYTES = 16 * 1024
"""Up to this size the number of rounds matters more than the number of bytes."""


class Choice(NamedTuple):
    """How a gradient is summed.

    algorithm : "none", "buckets" (during the backward pass), or one of `mpiddl.tuning.rule.CANDIDATES` (after it).
    bucket_bytes : least size of a bucket; 0 for the whole gradient.
    why : half a sentence for the user.
    """

    algorithm: str
    bucket_bytes: int
    why: str


def choose(comm: Comm, nbytes: int) -> Choice:
    """Return the choice for a gradient of ``nbytes`` on the ranks of ``comm``, the same on every rank.

    Communication
    -------------
    Collective at the first call on ``comm``: its neighbours; a broadcast of the table.
    """
    if comm.size == 1:
        return Choice("none", 0, "there is one rank")
    nodes = len(neighbours(comm).topology.nodes)
    if nodes > 1 and nbytes >= WORTH_BYTES:
        return Choice("buckets", BUCKET_BYTES, "links are slow enough to work while the backward pass goes on")
    table = chooser(comm, table_path(os.environ))
    if table.measured("allreduce"):
        found = table.choose("allreduce", nbytes)
        return Choice(found.algorithm, 0, str(found).partition(": ")[2])
    if nodes == 1:
        return Choice("two-step", 0, "on one node memory is the limit, which computing needs as well")
    if nbytes <= SHORT_BYTES:
        return Choice("doubling", 0, f"for {nbytes} bytes rounds count more than bytes")
    return Choice("two-step", 0, f"{nbytes / 1e6:.2g} MB are too few to start early")
