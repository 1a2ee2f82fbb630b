"""Remote memory over real verbs, by the tests of all kinds of remote memory."""

from __future__ import annotations

import numpy as np
import pytest
from harness.remote_programs import counts, moves

from mpiddl.collectives import allreduce
from mpiddl.collectives.allreduce_ring_remote import RemoteRing
from mpiddl.remote_memory import allocate

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("program", [moves, counts])
def test_remote_memory(link, program):
    program(link, "verbs")


@pytest.mark.parametrize("size", [1, 5, 1000, 1_000_001])
def test_a_ring_without_handshakes_has_the_bits_of_the_ring_over_mpi(link, size):
    ring, theirs = RemoteRing(link, size, np.dtype(np.float32), kind="verbs"), np.zeros(size, np.float32)
    for step in range(3):
        array = np.random.default_rng([size, step, link.rank]).standard_normal(size).astype(np.float32)
        ring.input[:] = array
        ours = ring()
        allreduce(link, array, theirs, algorithm="ring")
        assert ours.tobytes() == theirs.tobytes()
    ring.Free()


def test_nothing_is_copied_and_nothing_is_registered_again(link):
    memory, array = allocate(link, 1 << 20, 1, "verbs"), np.ones(1 << 20, np.uint8)
    memory.register(array)
    messages = memory.messages
    copied, made = messages.copied, messages.registrations.made
    for step in range(1, 6):
        memory.write((link.rank + 1) % link.size, 0, array).Wait()
        memory.signal((link.rank + 1) % link.size, 0, step).Wait()
        memory.arrived(0, step).Wait()
    assert memory.local.all() and (messages.copied, messages.registrations.made) == (copied, made)
    link.Barrier()
    memory.Free()
