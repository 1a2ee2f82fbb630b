"""A fair lock and a count of changes, in memory that several processes share.

Who comes draws a number, who leaves calls up the next one: first come, first served. The count is odd while somebody writes,
and even, two more, when he is done: who copies what it guards and finds it even before and unchanged after has a copy from
between two changes, and has held nobody up.

Cost: a lock that is free, one atomic addition and two cache lines; a change, two stores more; a copy, two loads more.
References: J. Mellor-Crummey, M. Scott, Algorithms for scalable synchronization on shared-memory multiprocessors, ACM TOCS
9(1), 1991, section 2.2 (the ticket lock), doi:10.1145/103727.103729; H.-J. Boehm, Can seqlocks get along with programming
language memory models?, MSPC 2012, doi:10.1145/2247684.2247688.
"""

from __future__ import annotations

from .atomics import EAGER, draw, fence, look, offer, pause, put
from .jit import kernel
from .lanes import base

LINE = 16
"""int64 words between two that different ranks write: 128 bytes, since processors fetch cache lines in pairs."""

NEXT, TURN, COUNT = 0, LINE, 2 * LINE
WORDS = 3 * LINE
"""int64 words of a lock; zero at first."""


@kernel
def acquire(words, state, patience):
    """Take the lock, or go on waiting for it; returns whether it is taken.

    `words`, shape (WORDS,), lies in shared memory. `state`, shape (1,), is this caller's own: one more than the number that
    it has drawn, 0 if it waits for nothing. After `patience` looks the call returns False, to be called again.
    """
    if state[0] == 0:
        state[0] = draw(base(words) + 8 * NEXT) + 1
    looks = 0
    while look(base(words) + 8 * TURN) != state[0] - 1:
        looks += 1
        if looks > patience:
            return False
        if looks < EAGER:
            pause()
        else:
            offer()
    state[0] = 0
    return True


@kernel
def release(words):
    """Give the lock, which the caller has, to the next."""
    put(base(words) + 8 * TURN, look(base(words) + 8 * TURN) + 1)


@kernel
def begin_change(words):
    """What is guarded is about to be written, by who has the lock; returns how many changes there have been."""
    count = look(base(words) + 8 * COUNT)
    put(base(words) + 8 * COUNT, count + 1)
    fence()
    return count // 2


@kernel
def end_change(words):
    """It is written."""
    put(base(words) + 8 * COUNT, look(base(words) + 8 * COUNT) + 1)


@kernel
def changes(words, patience):
    """The count: of changes, twice; odd if after `patience` looks there still is one going on."""
    count = look(base(words) + 8 * COUNT)
    looks = 0
    while count % 2 and looks < patience:
        if looks < EAGER:
            pause()
        else:
            offer()
        looks += 1
        count = look(base(words) + 8 * COUNT)
    return count


@kernel
def unchanged(words, count):
    """Whether what was read since the `count` was seen is from one moment."""
    fence()
    return look(base(words) + 8 * COUNT) == count
