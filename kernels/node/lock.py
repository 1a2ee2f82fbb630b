"""A fair lock and a count of changes, in memory that several processes share.

A process that wants the lock draws a number. The process that leaves the lock calls the next number: first come, first served.
A process that gives up waiting marks its number, and marked numbers are skipped. The count is odd during a change, and each
change adds two to it. A process copies the guarded data without the lock: if the count was even before the copy and is the same
after it, the copy is from between two changes. No other process waits for the copy.

Cost: a lock that is free, one atomic addition and three cache lines; a change, two stores more; a copy, two loads more.
References: J. Mellor-Crummey, M. Scott, Algorithms for scalable synchronization on shared-memory multiprocessors, ACM TOCS
9(1), 1991, section 2.2 (the ticket lock), doi:10.1145/103727.103729; H.-J. Boehm, Can seqlocks get along with programming
language memory models?, MSPC 2012, doi:10.1145/2247684.2247688. [I: numbers that are given up.]
"""

from __future__ import annotations

from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.lanes import base
from mpiddl.kernels.node.atomics import EAGER, add, fence, look, mark, offer, pause, put, unmark, wait_for

LINE = 16
"""int64 words between two that different ranks write: 128 bytes, since processors fetch cache lines in pairs."""

NEXT, TURN, COUNT, GIVEN_UP = 0, LINE, 2 * LINE, 3 * LINE
WORDS = 4 * LINE
"""int64 words of a lock; zero at first. The last line has a bit for each of 1024 successive numbers: at most so many wait."""

DRAWN, HELD, WRITING = 0, 1, 2
STATE = 3
"""int64 words of a process that takes the lock, zero at first: one more than its number, or 0; whether it has the lock; whether
it is writing."""


@kernel
def acquire(words, state, patience):
    """Take the lock, or go on waiting for it; returns whether it is taken.

    `words`, shape (WORDS,), lies in shared memory. `state`, shape (STATE,), is this caller's own. After `patience` looks the
    call returns False, to be called again, or to be given up by `leave`.
    """
    if state[DRAWN] == 0:
        state[DRAWN] = add(base(words) + 8 * NEXT, 1) + 1
    if not wait_for(base(words) + 8 * TURN, state[DRAWN] - 1, patience):  # others pass no number that waits
        return False
    state[DRAWN], state[HELD] = 0, 1
    return True


@kernel
def leave(words, state):
    """End the change if there is one, and give the lock to the next process. A process that still waits gives up its number."""
    if state[WRITING]:
        put(base(words) + 8 * COUNT, look(base(words) + 8 * COUNT) + 1)
    if state[DRAWN]:
        number = state[DRAWN] - 1
        mark(_word(words, number), _bit(number))
        fence()
        # If the number was called before it was marked, the calling process has not seen the mark. Whichever of the two
        # processes clears the mark calls the next number.
        if look(base(words) + 8 * TURN) == number and _taken_away(words, number):
            _call_next(words)
    elif state[HELD]:
        _call_next(words)
    state[:] = 0


@inlined
def _call_next(words):
    """Call the first number after this one that is not marked."""
    number = look(base(words) + 8 * TURN)
    while True:
        number += 1
        put(base(words) + 8 * TURN, number)
        fence()
        if not _taken_away(words, number):
            break


@inlined
def _taken_away(words, number):
    """Clear the mark of a number. Returns whether it was marked, and this call has cleared it."""
    word, bit = _word(words, number), _bit(number)
    return look(word) & bit != 0 and unmark(word, bit) & bit != 0


@inlined
def _word(words, number):
    return base(words) + 8 * (GIVEN_UP + (number >> 6) % LINE)


@inlined
def _bit(number):
    return 1 << (number & 63)


@kernel
def begin_change(words, state):
    """What is guarded is about to be written, by who has the lock; returns how many changes there have been."""
    count = look(base(words) + 8 * COUNT)
    put(base(words) + 8 * COUNT, count + 1)
    fence()
    state[WRITING] = 1
    return count // 2


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
