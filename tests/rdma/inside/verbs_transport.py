"""Messages over real verbs: every mode bit for bit, collectives, and errors."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from mpiddl.collectives import allreduce
from mpiddl.errors import TransportError
from mpiddl.transport.verbs.messages import HEADER
from mpiddl.transport.verbs.transport import connect

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.limit(120)]

@pytest.fixture(params=[False, True], ids=["read", "write"])
def verbs(link, request):
    made = connect(link, depth=16, writes=request.param)
    yield made
    made.Free()


def sizes(messages):
    inline, eager = messages.device.inline - HEADER.size, messages.eager_bytes
    return [0, 1, inline - 1, inline, inline + 1, eager - 1, eager, eager + 1, 1 << 20, (16 << 20) + 3]


def test_each_mode_bit_for_bit(verbs):
    """Round the ring; large messages are not copied."""
    right, left = (verbs.rank + 1) % verbs.size, (verbs.rank - 1) % verbs.size
    for nbytes in sizes(verbs.messages):
        sent, wanted = (np.random.default_rng([nbytes, rank]).integers(0, 256, nbytes, np.uint8) for rank in (verbs.rank, left))
        got, before = np.zeros(nbytes, np.uint8), verbs.messages.copied
        coming, leaving = verbs.Irecv(got, left, 3), verbs.Isend(sent, right, 3)
        coming.Wait()
        leaving.Wait()
        assert got.tobytes() == wanted.tobytes()
        assert nbytes <= verbs.messages.eager_bytes or verbs.messages.copied == before
    large = "write" if verbs.messages.modes["write"] else "read"
    assert verbs.messages.modes == {**dict.fromkeys(("read", "write"), 0), "inline": 4, "eager": 3, large: 3}


@pytest.fixture
def untraced():
    """Coverage is not counted: it takes three times as long."""
    trace = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(trace)


def test_many_messages_in_random_order(link, untraced):
    """10,000 messages over queues of 8 entries (3,000 on three ranks). A missing receive would be an error of the device."""
    verbs, draws = connect(link, depth=8, writes=True), random.Random(link.size)
    lengths = [0, 1, 100, 172, 173, 1000, 8192, 8193, 20_000]
    plan = [(draws.randrange(link.size), draws.randrange(link.size), draws.choice(lengths))
            for _ in range(10_000 if link.size == 2 else 3_000)]
    under_way = []

    def finish():
        for request, got, number in under_way:
            request.Wait()
            assert got is None or (got == number % 251).all()
        under_way.clear()

    for number, (source, dest, nbytes) in enumerate(plan):
        if dest == link.rank:
            got = np.zeros(nbytes, np.uint8)
            under_way.append((verbs.Irecv(got, source, 1), got, number))
        if source == link.rank:
            under_way.append((verbs.Isend(np.full(nbytes, number % 251, np.uint8), dest, 1), None, number))
        if len(under_way) > 300:
            finish()
    finish()
    verbs.Free()


@pytest.mark.parametrize("size", [1, 5, 1000, 100_001, 1_000_000])
def test_the_ring_has_the_bits_of_the_ring_over_mpi(verbs, link, size):
    array = np.random.default_rng([size, link.rank]).standard_normal(size).astype(np.float32)
    ours, theirs = np.zeros_like(array), np.zeros_like(array)
    allreduce(verbs, array, ours, algorithm="ring")
    allreduce(link, array, theirs, algorithm="ring")
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("wanted", "words"), [
    ("mlx5_7", "got device 'mlx5_7', expected one of this host: rxe0"),
    ("rxe0:2", "got port 2 of rxe0, expected 1 to 1"),
    ("rxe0:1:200", "got GID index 200 of rxe0 port 1, expected one that has an address: "),
])
def test_devices_that_there_are_not(link, wanted, words):
    with pytest.raises(TransportError, match=f"verbs: {words}"):
        connect(link, wanted)


def test_a_peer_that_is_gone(link):
    """Its queue pairs are destroyed. For the other device, this is as if its process had ended. A rank that only waits gets the
    error, too."""
    verbs = connect(link)
    if link.rank == link.size - 1:
        verbs.messages.close()
    link.Barrier()
    if link.rank < link.size - 1:
        with pytest.raises(TransportError, match=f"to rank {link.size - 1} failed: IBV_WC_RETRY_EXC_ERR"):
            verbs.Recv(np.zeros(4), link.size - 1, 5)
        verbs.messages.close()
    link.Barrier()


def test_arrays_that_are_freed_are_not_registered_any_more(link):
    verbs = connect(link)
    before = len(verbs.messages.registrations)
    array = np.zeros(1 << 20, np.uint8)
    got = np.zeros(1 << 20, np.uint8)
    coming, leaving = verbs.Irecv(got, (link.rank - 1) % link.size), verbs.Isend(array, (link.rank + 1) % link.size)
    coming.Wait()
    leaving.Wait()
    assert len(verbs.messages.registrations) == before + 2
    del array, got, coming, leaving
    assert len(verbs.messages.registrations) == before
    verbs.Free()
