"""Messages over queue pairs: modes, credits, order and errors, on devices in this process."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness.fake_device import FakeNetwork

from mpiddl.errors import TransportError
from mpiddl.transport.base import ANY_SOURCE, ANY_TAG
from mpiddl.transport.verbs.messages import HEADER, Messages

pytestmark = pytest.mark.no_mpi

EAGER = 256


def ranks(size, seed=0, writes=False, **limits):
    network = FakeNetwork(size, seed, **limits)
    return network, [Messages(device, EAGER, writes) for device in network.devices]


def settle(network, made, operations, most=200_000):
    """Go on until all operations are over."""
    for _ in range(most):
        if all(operation.done for operation in operations):
            return
        if not network.step():
            moved = [messages.progress() for messages in made]
            assert any(moved) or network.step() or all(operation.done for operation in operations), "deadlock"
        elif network.draws.random() < 0.3:
            network.draws.choice(made).progress()
    raise AssertionError("it does not end")


SIZES = [0, 1, 64 - HEADER.size - 1, 64 - HEADER.size, 64 - HEADER.size + 1, EAGER - 1, EAGER, EAGER + 1, 5000]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("nbytes", SIZES)
def test_each_mode_moves_the_bytes(nbytes, late, writes):
    network, made = ranks(2, writes=writes, largest=2000)
    sent, got = np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8), np.zeros(nbytes + 3, np.uint8)
    started = [made[0].send(sent, 1, 0, 7)]
    if late:
        settle(network, made, [] if nbytes > EAGER else started)
    started.append(made[1].receive(got, 0, 0, 7))
    settle(network, made, started)
    assert got[:nbytes].tobytes() == sent.tobytes() and not got[nbytes:].any()
    assert all(operation.failure is None for operation in started)
    mode = "inline" if nbytes <= 16 else "eager" if nbytes <= EAGER else "write" if writes else "read"
    assert made[0].modes[mode] == 1


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_many_messages_in_any_order(seed, writes):
    """Small queues, all pairs, all modes; each pair of ranks keeps the order under one tag."""
    draws, size = random.Random(seed), 3
    network, made = ranks(size, seed, writes, sends=draws.choice([4, 5, 8]), receives=draws.choice([4, 5, 8]))
    rng, started, wanted = np.random.default_rng(seed), [], []
    sends = [(draws.randrange(size), draws.randrange(size), draws.choice(SIZES), draws.randrange(2)) for _ in range(150)]
    todo = [("send", *each) for each in sends]
    receives = [("receive", *each) for each in sends]
    done_before = {}
    while todo or receives:
        queue = todo if todo and (not receives or draws.random() < 0.5) else receives
        what, source, dest, nbytes, tag = queue.pop(0)
        if what == "send":
            data = rng.integers(0, 256, nbytes).astype(np.uint8)
            done_before.setdefault((source, dest, tag), []).append(data)
            started.append(made[source].send(data, dest, 0, tag))
        else:
            into = np.zeros(nbytes, np.uint8)
            wanted.append(((source, dest, tag), into))
            started.append(made[dest].receive(into, source, 0, tag))
        for _ in range(draws.randrange(4)):
            network.step()
    settle(network, made, started)
    for key, into in wanted:
        assert into.tobytes() == done_before[key].pop(0).tobytes()


def test_any_source_and_any_tag():
    network, made = ranks(3)
    started = [made[1].send(np.full(3, 1, np.uint8), 0, 0, 5), made[2].send(np.full(400, 2, np.uint8), 0, 0, 6)]
    into = [np.zeros(400, np.uint8) for _ in range(2)]
    started += [made[0].receive(each, ANY_SOURCE, 0, ANY_TAG) for each in into]
    settle(network, made, started)
    assert sorted(int(each[0]) for each in into) == [1, 2]


def test_groups_do_not_meet():
    network, made = ranks(2)
    started = [made[0].send(np.full(1, 9, np.uint8), 1, 1, 0), made[0].send(np.full(1, 8, np.uint8), 1, 0, 0)]
    first, second = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    started += [made[1].receive(first, 0, 0, 0), made[1].receive(second, 0, 1, 0)]
    settle(network, made, started)
    assert first[0] == 8 and second[0] == 9


@pytest.mark.parametrize("writes", [False, True])
def test_a_message_that_is_too_long(writes):
    network, made = ranks(2, writes=writes)
    started = [made[0].send(np.zeros(1000, np.uint8), 1, 0, 0), made[1].receive(np.zeros(999, np.uint8), 0, 0, 0)]
    settle(network, made, started)
    assert "got a message of 1000 bytes from rank 0, expected at most 999" in str(started[1].failure)
    assert started[0].failure is None


@pytest.mark.parametrize("writes", [False, True])
def test_a_peer_that_is_gone(writes, monkeypatch):
    """Also a rank that only waits is told."""
    clock = [0.0]
    monkeypatch.setattr("mpiddl.transport.verbs.operations.now", lambda: clock[0])
    network, made = ranks(3, writes=writes)
    waiting = [made[1].receive(np.zeros(10, np.uint8), 0, 0, 0), made[2].receive(np.zeros(10, np.uint8), ANY_SOURCE, 0, 0)]
    network.gone.add(0)
    settle(network, made[1:], [])
    assert not any(operation.done for operation in waiting)
    clock[0] += 1.5
    for messages in made[1:]:
        messages.progress()
    settle(network, made[1:], waiting)
    for operation in waiting:
        with pytest.raises(TransportError, match=r"to rank 0 failed: IBV_WC_RETRY_EXC_ERR \(the peer does not answer"):
            operation.Test()
    later = made[1].send(np.zeros(10, np.uint8), 0, 0, 0)
    assert isinstance(later.failure, TransportError)
    again = made[1].send(np.zeros(10, np.uint8), 2, 0, 0)
    settle(network, made[1:], [again, made[2].receive(np.zeros(10, np.uint8), 1, 0, 0)])


def test_arrays_are_registered_once_and_until_they_are_freed():
    network, made = ranks(2)
    before = len(network.devices[0].regions)
    whole = np.zeros(5000, np.uint8)
    for part in (whole[:1000], whole[1000:], whole):
        settle(network, made, [made[0].send(part, 1, 0, 0), made[1].receive(np.zeros(5000, np.uint8), 0, 0, 0)])
    assert len(network.devices[0].regions) == before + 1
    del whole, part
    assert len(network.devices[0].regions) == before


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("fails", [0, 1])
def test_memory_that_cannot_be_registered(writes, fails, monkeypatch):
    """As with too little locked memory: on both ranks there is an error, and messages go on."""
    network, made = ranks(2, writes=writes)
    register = network.devices[fails].register

    def refuse(array):
        if array.nbytes == 4000:
            raise TransportError(f"verbs: memory of {array.nbytes} bytes cannot be registered")
        return register(array)

    monkeypatch.setattr(network.devices[fails], "register", refuse)
    got = made[1].receive(np.zeros(4000, np.uint8), 0, 0, 0)
    if fails == 0 and not writes:
        with pytest.raises(TransportError, match="memory of 4000 bytes cannot be registered"):
            made[0].send(np.ones(4000, np.uint8), 1, 0, 0)
        got = made[1].receive(np.zeros(4000, np.uint8), 0, 0, 1)  # of the next message
    else:
        sent = made[0].send(np.ones(4000, np.uint8), 1, 0, 0)
        settle(network, made, [sent, got])
        own, other = (sent, got) if fails == 0 else (got, sent)
        assert "memory of 4000 bytes cannot be registered" in str(own.failure)
        assert f"rank {fails} could not register its memory for it" in str(other.failure)
    into = np.zeros(1000, np.uint8)
    settle(network, made, [made[0].send(np.full(1000, 7, np.uint8), 1, 0, 2), made[1].receive(into, 0, 0, 2)])
    assert (into == 7).all()


def test_two_arrays_over_one_memory_that_is_not_numpys():
    """The memory of the second is registered as long as it is in use, whatever becomes of the first."""
    network, made = ranks(2)
    whole = bytearray(b"x" * 5000)
    first, second, into = np.frombuffer(whole, np.uint8), np.frombuffer(whole, np.uint8), np.zeros(5000, np.uint8)
    settle(network, made, [made[0].send(first, 1, 0, 0), made[1].receive(into, 0, 0, 0)])
    sent = made[0].send(second, 1, 0, 0)
    del first
    got = made[1].receive(into, 0, 0, 0)
    settle(network, made, [sent, got])
    assert got.failure is None and bytes(into) == bytes(whole)


def test_a_forked_process_is_told(monkeypatch):
    _, made = ranks(2)
    waiting = made[0].receive(np.zeros(3, np.uint8), 1, 0, 0)
    monkeypatch.setattr(made[0].device, "forked", True)
    for call in (lambda: made[0].send(np.zeros(3, np.uint8), 1, 0, 0), lambda: made[0].receive(np.zeros(3, np.uint8), 1, 0, 0),
                 lambda: made[0].probe(1, 0, 0), waiting.Test):
        with pytest.raises(TransportError, match="this process was forked from one that uses verbs"):
            call()
