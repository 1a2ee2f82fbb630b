"""A barrier through memory that several processes share: a dissemination barrier on flags.

In round k rank r raises its flag k and waits for that of rank r - 2^k: after ceil(log2 P) rounds everybody has heard,
at some remove, of everybody. Flags count up and are never lowered, so there is nothing to reset. What a rank wrote
before it raised a flag is seen by whoever saw the flag (release and acquire).

Cost: ceil(log2 P) rounds of one written and one awaited cache line; 0.1 to 0.2 microseconds each between cores that
share a cache.
Reference: D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier synchronization, Int. J. Parallel Programming
17(1), 1988, doi:10.1007/BF01379320.
"""

from __future__ import annotations

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import base
from mpiddl.kernels.node.atomics import put, wait_for

FLAGS = 16
"""int64 flags a rank: 128 bytes, since processors fetch cache lines in pairs. Enough for 2^16 ranks."""


@kernel
def meet(flags, state, rank, size, patience):
    """Take part in a barrier, or go on with it; returns whether all ranks have come.

    `flags`, shape (size, FLAGS), lies in shared memory and was zero at first. `state`, shape (2,), is this rank's own:
    barriers passed, and the round of the one it is in. After `patience` looks at a flag that is still down the call
    returns False, to be called again.
    """
    count, turn = state[0] + 1, state[1]
    while (1 << turn) < size:
        put(base(flags) + 8 * (rank * FLAGS + turn), count)
        awaited = base(flags) + 8 * ((rank - (1 << turn)) % size * FLAGS + turn)
        if not wait_for(awaited, count, patience):
            state[1] = turn
            return False
        turn += 1
    state[0], state[1] = count, 0
    return True
