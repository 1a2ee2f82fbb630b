"""Adding up arrays that lie in private memory, on the ranks of one node, each rank reading the others' memory itself.

    result = sum over ranks of source

Every rank says where its arrays lie, adds up one slice of all sources into its own result, and then reads the other slices
from the results of their owners. What one rank reads another has written long before, so the processor fetches ahead; no
line goes to and fro, as those of a stage in shared memory do (`node_copy_sum`).

Cost a rank: 2 (q-1)/q V read from others, of which half lands in the second cache, V/q read and written by the sum; three
barriers. A slice is added up in rank order by one rank, so all have the same bits.
Source: reading other processes' memory for collectives, T. Ma, G. Bosilca, A. Bouteiller, J. Dongarra, Kernel-assisted
and topology-aware MPI collective communications on multicore/many-core platforms, J. Parallel Distrib. Comput. 73(7), 2013,
doi:10.1016/j.jpdc.2013.01.015 [I: with the sum in slices, and barriers in memory].
"""

from __future__ import annotations

from .atomics import look, put
from .jit import kernel
from .lanes import base, copy, size_of
from .meet import meet
from .node_sum import add_up
from .remote import fetch

SOURCE, RESULT, FAILED, WORDS = 0, 1, 2, 8
"""What a rank says in shared memory, as int64 words: where its arrays lie, and whether it could not read; a cache line."""

PHASE, UNREAD = 2, 3
"""Where `state` holds how far a call is, and whether any rank could not read."""


@kernel
def node_read_sum(source, result, places, processes, scratch, inputs, vectors, flags, state, rank, size, patience):
    """Add up; returns whether it is done, else it is to be called again with the same arguments.

    `source` and `result`, contiguous float arrays of one size, may be the same. `places`, int64, holds the addresses of each
    rank's WORDS in shared memory, 0 at first; `processes`, int32, who the ranks are. For the kernel to use: `scratch`, shape
    (size, piece) of the arrays' dtype, `inputs`, int64 of shape (size,), and `vectors` (`fetch`). `flags` and `state`, shape
    (5,), are those of `meet`. If any rank could not read, `state` says so on all of them from then on.
    """
    if state[PHASE] == 0:
        put(places[rank] + 8 * SOURCE, base(source))
        put(places[rank] + 8 * RESULT, base(result))
        state[PHASE] = 1
    if state[PHASE] == 1:
        if not meet(flags, state, rank, size, patience):
            return False
        if not _add_up_slice(source, result, places, processes, scratch, inputs, vectors, rank, size):
            put(places[rank] + 8 * FAILED, 1)
        state[PHASE] = 2
    if state[PHASE] == 2:
        if not meet(flags, state, rank, size, patience):
            return False
        if not _read_slices(result, places, processes, vectors, rank, size):
            put(places[rank] + 8 * FAILED, 1)
        state[PHASE] = 3
    if not meet(flags, state, rank, size, patience):  # nobody changes its result while others read it
        return False
    for other in range(size):
        state[UNREAD] |= look(places[other] + 8 * FAILED)
    state[PHASE] = 0
    return True


@kernel
def slice_of(n, width, rank, size):
    """Begin of slice `rank` of `n` elements of `width` bytes: on cache lines if the array is."""
    line = 64 // width
    return min(n, ((n + line - 1) // line * rank // size) * line)


@kernel
def _add_up_slice(source, result, places, processes, scratch, inputs, vectors, rank, size):
    width, piece = size_of(source), scratch.shape[1]
    apart = rank > 1 and base(source) == base(result)  # its place then holds the sum of those before
    first, last = slice_of(source.size, width, rank, size), slice_of(source.size, width, rank + 1, size)
    for begin in range(first, last, piece):
        end = min(begin + piece, last)
        inputs[rank] = base(source)
        if apart:
            here = base(scratch) + rank * piece * width
            copy(here, base(source) + begin * width, (end - begin) * width)
            inputs[rank] = here - begin * width
        for step in range(1, size):
            other = (rank + step) % size  # not all of them the same one at a time
            here, there = base(scratch) + other * piece * width, look(places[other] + 8 * SOURCE) + begin * width
            if not fetch(vectors, processes[other], here, there, (end - begin) * width):
                return False
            inputs[other] = here - begin * width
        add_up(result, inputs, begin, end, False, 0)
    return True


@kernel
def _read_slices(result, places, processes, vectors, rank, size):
    width = size_of(result)
    for step in range(1, size):
        other = (rank + step) % size
        begin, end = slice_of(result.size, width, other, size), slice_of(result.size, width, other + 1, size)
        there = look(places[other] + 8 * RESULT) + begin * width
        if not fetch(vectors, processes[other], base(result) + begin * width, there, (end - begin) * width):
            return False
    return True
