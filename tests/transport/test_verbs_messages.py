"""Messages over queue pairs: modes, credits, order and errors, on devices in this process."""

from __future__ import annotations

import random

import numpy as np
import pytest
from harness.fake_device import FakeNetwork

from mpiddl.errors import TransportError, UsageError
from mpiddl.transport.base import ANY_SOURCE, ANY_TAG
from mpiddl.transport.verbs import operations, registrations
from mpiddl.transport.verbs.messages import HEADER, Messages
from mpiddl.transport.verbs.work_requests import Kind, Memory

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


def go_on(network, made, turns=10):
    for _ in range(turns):
        while network.step():
            pass
        for messages in made:
            messages.progress()


def test_a_dead_peer_is_noticed_while_another_one_sends(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(operations, "now", lambda: clock[0])
    network, made = ranks(3)
    waiting = made[1].receive(np.zeros(10, np.uint8), 0, 0, 0)
    network.gone.add(0)
    while not waiting.done and clock[0] < 10:
        clock[0] += 0.3
        made[1].receive(np.zeros(1, np.uint8), 2, 0, 1)
        made[2].send(np.ones(1, np.uint8), 1, 0, 1)
        go_on(network, made[1:], 4)
    assert waiting.done and clock[0] < 3
    with pytest.raises(TransportError, match="to rank 0 failed: IBV_WC_RETRY_EXC_ERR"):
        waiting.Test()


def test_a_signals_handler_that_raises_loses_one_message_only(monkeypatch):
    network, made = ranks(2, receives=16, sends=16)
    arrays = [np.zeros(3, np.uint8) for _ in range(4)]
    received = [made[1].receive(array, 0, 0, tag) for tag, array in enumerate(arrays)]
    for tag in range(4):
        made[0].send(np.ones(3, np.uint8), 1, 0, tag)
    take = made[1].operations._take

    def interrupted(completion):
        monkeypatch.setattr(made[1].operations, "_take", take)
        raise KeyboardInterrupt

    monkeypatch.setattr(made[1].operations, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go_on(network, made)
    go_on(network, made)
    assert [operation.done for operation in received] == [False, True, True, True]


def test_an_operation_that_fails_during_a_look_at_it_is_not_complete():
    class Fails(operations.Operation):
        @property
        def failure(self):
            self._looked = True
            return self._failure

        @failure.setter
        def failure(self, failure):
            self._failure = failure

        @property
        def done(self):
            if getattr(self, "_looked", False):  # another thread has ended it since
                self._failure, self._done = TransportError("lost"), True
            return self._done

        @done.setter
        def done(self, done):
            self._done = done

    assert not Fails(lambda: None, 1, ("send", 3)).Test()


def test_after_free_nothing_touches_the_device(monkeypatch):
    _, made = ranks(2)
    waiting = made[0].receive(np.zeros(3, np.uint8), 1, 0, 0)
    made[0].close()
    monkeypatch.setattr(made[0].device, "poll", lambda: pytest.fail("a closed queue ends the interpreter"))
    for use in (waiting.Test, waiting.Wait, lambda: made[0].send(np.zeros(1, np.uint8), 1, 0, 0)):
        with pytest.raises(TransportError, match="closed by Free"):
            use()


def test_a_broken_queue_to_oneself_is_an_error_of_the_operation():
    network, made = ranks(2)
    array = np.zeros(8, np.uint8)
    started = made[0].operations.start(0, Kind.READ, made[0].registrations.local(array), Memory(4096, 8, 999_999))
    go_on(network, made)
    with pytest.raises(TransportError, match="read of 8 bytes to rank 0 failed: IBV_WC_REM_ACCESS_ERR"):
        started.Test()


def test_arrays_in_another_order_and_tags_that_do_not_fit():
    network, made = ranks(2)
    sent, got = np.arange(6.0).reshape(2, 3, order="F"), np.zeros((2, 3), order="F")
    started = [made[0].send(sent, 1, 0, 2**31 - 1), made[1].receive(got, 0, 0, 2**31 - 1)]
    settle(network, made, started)
    assert (got == sent).all()
    with pytest.raises(UsageError, match=r"tag: got 2147483648, expected 0 to 2147483647"):
        made[0].send(sent, 1, 0, 2**31)
    for use in (made[0].send, made[1].receive):
        with pytest.raises(UsageError, match="not contiguous"):
            use(np.zeros((4, 4))[:, 1:3], 1, 0, 0)


def test_a_registration_is_dropped_when_nobody_holds_it():
    network, made = ranks(2)
    registrations, device, whole = made[0].registrations, network.devices[0], np.zeros(2000, np.int64)
    before = len(registrations)
    _, second = registrations.hold(whole[:1000]), registrations.hold(whole[1000:])
    registrations.release(whole[:1000])
    device.check(second)
    assert len(registrations) == before + 1
    registrations.release(whole[1000:])
    assert len(registrations) == before


def test_many_parts_of_a_large_array_are_registered_together(monkeypatch):
    monkeypatch.setattr(registrations, "WHOLE_BYTES", 1000)
    network, made = ranks(2)
    large, its = np.zeros(100_000, np.uint8), made[0].registrations
    before = its.made
    for begin in range(0, 100_000, 1000):
        part = large[begin : begin + 1000]
        network.devices[0].check(its.local(part))
    assert its.made - before == registrations.MOST_PIECES + 1


def test_drained_queues_have_nothing_to_come():
    network, made = ranks(2)
    memory = np.zeros(8, np.int64)
    there, mine = made[1].registrations.hold(memory), made[0].operations
    for _ in range(12):  # more than the queue has room for; inline ones are over for the caller at once
        mine.start(1, Kind.WRITE, Memory(memory.ctypes.data, 8, 0), there.part(0, 8))
    reported = made[0].device.poll

    def poll():
        while network.step():
            pass
        return reported()

    made[0].device.poll = poll
    mine.drain()
    assert mine.queues[1].over == mine.queues[1].posted >= 12
    made[1].registrations.release(memory)
    started = made[0].send(np.zeros(3, np.uint8), 1, 0, 0)
    go_on(network, made)
    assert started.Test() and not mine.queues[1].trouble
