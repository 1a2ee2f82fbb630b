"""Adding up arrays that lie in private memory, on the ranks of one node, each rank reading the others' memory itself.

    part = (sum over ranks of source)[first:last]        and then, where it is wanted, everybody's parts

Every rank says where its arrays lie, adds up one slice of all sources, and meets the others; who gathers reads the other
slices where their owners have put them. That is an all-reduce if all gather, a reduction if one does, a reduce-scatter if
none. What one rank reads another has written long before, so the processor fetches ahead; no cache line goes to and fro, as
those of a stage in shared memory do (`node_copy_sum`).

Cost a rank: (q-1)/q V read from others into the second cache, V/q read and written by the sum; (q-1)/q V read to gather; three
barriers. A slice is added up in rank order by one rank, so all have the same bits.
Source: reading other processes' memory for collectives, T. Ma, G. Bosilca, A. Bouteiller, J. Dongarra, Kernel-assisted
and topology-aware MPI collective communications on multicore/many-core platforms, J. Parallel Distrib. Comput. 73(7), 2013,
doi:10.1016/j.jpdc.2013.01.015 [I: with the sum in slices, and barriers in memory].
"""

from __future__ import annotations

from mpiddl.kernels.jit import kernel
from mpiddl.kernels.lanes import base, copy, size_of
from mpiddl.kernels.node.atomics import look, put
from mpiddl.kernels.node.meet import meet
from mpiddl.kernels.node.node_sum import add_up
from mpiddl.kernels.node.remote import fetch

SOURCE, PART, FAILED, FIRST, DONE, LAST, WORDS = 0, 1, 2, 3, 4, 5, 8
"""What a rank says in shared memory, as int64 words: where its source lies, where its part would begin if it were the whole,
whether it could not read, of which slice it has added up how much; a cache line."""

PHASE, UNREAD = 2, 3
"""Where `state` holds how far a call is, and whether any rank could not read."""


@kernel
def node_read_sum(source, part, first, last, origin, gather, places, processes, scratch, inputs, vectors,
                  flags, state, rank, size, patience):  # fmt: skip
    """Add up; returns whether it is done, else it is to be called again with the same arguments.

    `source` and `part` are contiguous float arrays; `part` begins with element `origin` of the whole sum and has room for those
    from `first` to `last`, which no other rank adds up; it may be in the place of those elements of `source`. With `gather` it
    has room for all of them, of which rank r adds up those from `slice_of(n, width, r, size)` on.

    `places`, int64, holds the addresses of each rank's WORDS in shared memory, 0 at first; `processes`, int32, who the ranks
    are. For the kernel to use: `scratch`, shape (size, piece) of the arrays' dtype, `inputs`, int64 of shape (size,), and
    `vectors` (`fetch`). `flags` and `state`, shape (5,), are those of `meet`. If any rank could not read, `state` says so on
    all of them, and `places` what has been added up; of what has not, no source is changed.
    """
    if state[PHASE] == 0:
        put(places[rank] + 8 * SOURCE, base(source))
        put(places[rank] + 8 * PART, base(part) - origin * size_of(part))
        state[PHASE] = 1
    if state[PHASE] == 1:
        if not meet(flags, state, rank, size, patience):
            return False
        done = _add_up_slice(source, part, first, last, origin, places, processes, scratch, inputs, vectors, rank, size)
        put(places[rank] + 8 * FIRST, first)
        put(places[rank] + 8 * DONE, done)
        put(places[rank] + 8 * LAST, last)
        if done < last:
            put(places[rank] + 8 * FAILED, 1)
        state[PHASE] = 2
    if state[PHASE] == 2:
        if not meet(flags, state, rank, size, patience):
            return False
        if gather and not _read_slices(source.size, part, places, processes, vectors, rank, size):
            put(places[rank] + 8 * FAILED, 1)
        state[PHASE] = 3
    if not meet(flags, state, rank, size, patience):  # nobody changes its arrays while others read them
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
def _add_up_slice(source, part, first, last, origin, places, processes, scratch, inputs, vectors, rank, size):
    width, piece = size_of(source), scratch.shape[1]
    whole = base(part) - origin * width
    apart = rank > 1 and whole == base(source)  # its place then holds the sum of those before
    for begin in range(first, last, piece):
        nbytes, skipped = (min(begin + piece, last) - begin) * width, (begin - origin) * width
        for step in range(1, size):
            other = (rank + step) % size  # not all of them the same one at a time
            here = base(scratch) + other * piece * width
            if not fetch(vectors, processes[other], here, look(places[other] + 8 * SOURCE) + begin * width, nbytes):
                return begin
            inputs[other] = here - skipped
        inputs[rank] = base(source) + origin * width
        if apart:
            here = base(scratch) + rank * piece * width
            copy(here, base(source) + begin * width, nbytes)
            inputs[rank] = here - skipped
        add_up(part, inputs, begin - origin, begin - origin + nbytes // width, False, 0)
    return last


@kernel
def _read_slices(n, part, places, processes, vectors, rank, size):
    width = size_of(part)
    for other in range(size):
        if look(places[other] + 8 * FAILED):  # a source in the place of the result is still needed
            return True
    for step in range(1, size):
        other = (rank + step) % size
        begin, end = slice_of(n, width, other, size), slice_of(n, width, other + 1, size)
        there = look(places[other] + 8 * PART) + begin * width
        if not fetch(vectors, processes[other], base(part) + begin * width, there, (end - begin) * width):
            return False
    return True
