"""Adding up arrays that lie in private memory, on the ranks of one node, through stages in shared memory.

    result = sum over ranks of source        by pieces of a stage's half

A rank copies a piece into its stage, meets the others, and adds up all stages' pieces straight into its own result.
There are two halves, so that one barrier a piece is enough: whoever writes a half has met everybody since they read it.

Cost a rank: V read and written by the copy, q V read and V written by the sum, most of it in the second cache; ceil(V /
half) barriers. Every rank adds in rank order, so all have the same bits. For a few ranks; with many it is better to
share out the sums.
"""

from __future__ import annotations

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import base, copy, size_of
from mpiddl.kernels.node.meet import meet
from mpiddl.kernels.node.node_sum import add_up

PIECES, STAGE, DONE = 3, 2, 4
"""Where `state` holds the pieces of all calls so far, whether this call's next piece is staged, and its elements done."""


@kernel
def node_copy_sum(source, result, stages, half, flags, state, rank, size, patience):
    """Add up; returns whether it is done, else it is to be called again with the same arguments.

    `source` and `result`, contiguous float arrays of one size, may be the same. `stages`, int64, holds the addresses of the
    ranks' stages, each of two halves of `half` elements. `flags` and `state`, shape (5,), are those of `meet`, kept from call
    to call.
    """
    width = size_of(source)
    while state[DONE] < source.size:
        begin = state[DONE]
        count = min(half, source.size - begin)
        shift = state[PIECES] % 2 * half * width
        if not state[STAGE]:
            copy(stages[rank] + shift, base(source) + begin * width, count * width)
            state[STAGE] = 1
        if not meet(flags, state, rank, size, patience):
            return False
        add_up(result, stages, begin, begin + count, False, shift - begin * width)
        state[STAGE] = 0
        state[PIECES] += 1
        state[DONE] = begin + count
    state[DONE] = 0
    return True
