"""The lock that ranks of a node share, and copies of what it guards that are made without it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpiddl import kernels
from mpiddl.kernels.node.lock import STATE, WORDS, acquire, begin_change, changes, leave, unchanged
from mpiddl.node.guard import TRIES, Guard

pytestmark = pytest.mark.no_mpi


def test_a_lock_goes_round_in_the_order_of_arrival():
    words, states = np.zeros(WORDS, np.int64), np.zeros((3, STATE), np.int64)
    assert acquire(words, states[0], 0)
    assert not acquire(words, states[2], 10) and not acquire(words, states[1], 10)
    leave(words, states[0])
    assert not acquire(words, states[1], 10) and acquire(words, states[2], 0)
    leave(words, states[2])
    leave(words, states[2])  # the second time is nothing
    assert acquire(words, states[1], 0)


def test_who_gives_up_waiting_is_passed_over():
    words, states = np.zeros(WORDS, np.int64), np.zeros((5, STATE), np.int64)
    for turn in range(600):  # more numbers than there are marks
        assert acquire(words, states[0], 0)
        for waiting in states[1:]:
            assert not acquire(words, waiting, 0)
        for waiting in states[1:4] if turn % 2 else states[3:0:-1]:
            leave(words, waiting)
        leave(words, states[0])
        assert acquire(words, states[4], 0)
        if turn % 3 == 0:
            assert not acquire(words, states[1], 0)
            leave(words, states[4])  # calls the next one up, who
            leave(words, states[1])  # gives up at that moment
        else:
            leave(words, states[4])
    assert not states.any() and not words[3 * 16 :].any()


def test_a_copy_that_a_change_came_into_is_told():
    words, state = np.zeros(WORDS, np.int64), np.zeros(STATE, np.int64)
    assert acquire(words, state, 0) and begin_change(words, state) == 0 and changes(words, 10) == 1
    leave(words, state)
    count = changes(words, 0)
    assert count == 2 and unchanged(words, count)
    assert acquire(words, state, 0) and begin_change(words, state) == 1 and not unchanged(words, count)


class Meanwhile:
    """The lock, with changes by others in the middle of the first copies."""

    def __init__(self, change, times):
        self._change, self._left = change, times

    def __getattr__(self, name):
        return getattr(kernels.lock, name)

    def changes(self, words, patience):
        count = kernels.lock.changes(words, patience)
        if self._left:  # after the reader has looked, and before it copies
            self._left -= 1
            self._change()
        return count


@pytest.mark.parametrize("times", [0, 1, TRIES - 1, TRIES])
def test_a_copy_that_a_change_came_into_is_made_again(times):
    words, data, copy = np.zeros(Guard.WORDS, np.int64), np.zeros(4, np.int64), np.empty(4, np.int64)
    writer, reader = Guard(None, words), Guard(None, words)

    def change():
        with writer.changing():
            data[:] += 1

    reader._lock = Meanwhile(change, times)
    assert reader.copy(data, copy) == copy[0] == data[0] == times  # the last one is made under the lock


class Rung(Exception):
    """What a program's signal handler raises."""


class Ringing:
    """A communicator that lets nothing go on, but raises each time that it is asked to."""

    def progress(self):
        raise Rung


def test_an_exception_while_waiting_for_a_lock_leaves_it_to_the_others():
    """They waited for ever."""
    words = np.zeros(Guard.WORDS, np.int64)
    first, ringing, last = Guard(None, words), Guard(Ringing(), words), Guard(Ringing(), words)
    for _ in range(3):
        with first.changing():
            for what in (ringing.held, ringing.changing):
                with pytest.raises(Rung), what():
                    pass
            with pytest.raises(Rung):
                ringing.copy(words[:1], np.zeros(1, np.int64))
        with last.changing():  # at once: whoever has to wait for it raises
            pass
        with pytest.raises(Rung), last.changing():
            raise Rung
    assert first.changes == 9


def test_no_addition_of_threads_is_lost():
    """Though now and then one gives up waiting. There is room for 1024 numbers between the first and the last that waits."""
    words, total, added = np.zeros(WORDS, np.int64), np.zeros(1, np.int64), []

    def add(state):
        count = 0
        for _ in range(300):
            if acquire(words, state, 3):
                total[0] += 1
                count += 1
            leave(words, state)
        added.append(count)

    threads = [threading.Thread(target=add, args=(np.zeros(STATE, np.int64),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == sum(added) and acquire(words, np.zeros(STATE, np.int64), 0)
