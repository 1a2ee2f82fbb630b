"""Ranks of a channel that hang, are deaf to multicast, come late, send for each other, or are done early."""

from __future__ import annotations

import numpy as np
import pytest
from harness.lossy_medium import Busy, Hangs, Network
from harness.multicast_rounds import ALL, LENGTHS, check, exchange, figures, message, put, streams

from mpiddl import kernels
from mpiddl.transport.multicast.medium import Group

pytestmark = pytest.mark.no_mpi

PAYLOAD = 1448
NBYTES = 100 * PAYLOAD
SLOTS = 4


def clocked(network, made, rounds=SLOTS, lengths=(NBYTES,), **instead):
    """Exchange; returns by rank and round, when each was over. ``instead``: other programs, such as ``rank2``."""
    over = {}

    def done(rank):
        return lambda round_: over.setdefault((rank, round_), network.clock)

    programs = [instead.get(f"rank{channel.rank}") or exchange(channel, stream, lengths, rounds, done=done(channel.rank))
                for channel, stream in zip(network.channels, made, strict=True)]
    network.run(programs)
    return over


@pytest.mark.parametrize("loss", [0.0, 0.05])
@pytest.mark.parametrize("senders", [[0], [0, 1]])
def test_a_rank_that_hangs_holds_nobody_up_until_the_slots_are_full(senders, loss):
    network = Network(4, loss=loss)
    made = streams(network, senders, [NBYTES])

    def hanging(channel, stream):
        yield Hangs(3.0)
        yield from exchange(channel, stream, [NBYTES], SLOTS + 2, done=lambda round_: late.append(network.clock))

    late = []
    over = clocked(network, made, SLOTS + 2, rank3=hanging(network.channels[3], made[3]))
    before = [moment for (rank, round_), moment in over.items() if round_ < SLOTS]
    assert len(before) == 3 * SLOTS and max(before) < 0.6
    assert len(late) == SLOTS + 2 and min(late) >= 3.0 and max(late) < 4.5
    after = [moment for (rank, round_), moment in over.items() if rank in senders and round_ >= SLOTS]
    assert min(after) > 3.0  # its slots were not taken by another round


def test_a_rank_that_computes_without_a_thread_for_a_moment():
    """Between its rounds, so that others wait for it again and again."""
    network = Network(3, loss=0.02)
    made = streams(network, range(3))

    def computing(channel, stream):
        for round_ in range(len(LENGTHS)):
            yield Hangs(0.05)
            yield from exchange(channel, stream, LENGTHS, 1, round_)

    network.run([computing(*pair) for pair in zip(network.channels, made, strict=True)], 5.0)


def test_a_rank_that_is_deaf_is_repaired_and_joins_again():
    network = Network(4)
    made = streams(network, [0], [NBYTES], deaf=[2])
    over = clocked(network, made, 8)
    assert network.channels[2].figures()["rejoined"] == 1 and 2 in network.members[0]
    assert over[2, 7] < 1.5
    repaired = figures(network)["repairs"]
    clocked(network, streams(network, [0], [NBYTES]), 8)
    assert figures(network)["repairs"] == repaired


@pytest.mark.filterwarnings("ignore:multicast. rank 2 gets nothing")
@pytest.mark.more
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_a_rank_that_stays_deaf_is_sent_each_message(loss):
    """After a second, it needs twice the time of a link that carries two copies; nobody is asked for repairs any more."""
    network = Network(4, loss=loss)
    made = streams(network, [0], [NBYTES], deaf=[2])
    network.links[2].rejoin = lambda: None
    over = clocked(network, made, 400)
    assert network.channels[0].deaf == {2}
    took = over[2, 399] - over[2, 199]
    assert took < 1.3 * 2 * 200 * NBYTES / network.rate / (1 - 2 * loss)
    network.join(ALL, [2])
    clocked(network, streams(network, [0], [NBYTES]), 8)
    assert network.channels[0].deaf == set()


def test_a_rank_that_goes_deaf_in_the_middle():
    network = Network(4, loss=0.02)
    made = streams(network, [0, 1, 2], [NBYTES])
    network.at(0.01, network.forget, 3)
    clocked(network, made, 20)
    assert network.channels[3].figures()["rejoined"] >= 1 and 3 in network.members[0]


def test_all_are_deaf():
    """The switch has forgotten everybody: an answer by multicast would reach nobody."""
    network = Network(4)
    made = streams(network, [0], [NBYTES], deaf=[1, 2, 3])
    assert clocked(network, made, 40)[3, 39] < 2.0
    assert network.members[0] == {0, 1, 2, 3}


def test_a_rank_that_was_idle_for_long_does_not_join_again_for_a_lost_datagram():
    network = Network(3)
    made = streams(network, [0], [NBYTES])
    clocked(network, made, 1)
    network.clock += 100.0
    lost = iter(range(3))
    network.loses = lambda rank, datagram: datagram.kind == kernels.datagrams.DATA and next(lost, None) is not None
    for channel, stream in zip(network.channels, made, strict=True):
        channel.release(stream, 0)
    pairs = zip(network.channels, made, strict=True)
    network.run([exchange(channel, stream, [NBYTES], 1, 1) for channel, stream in pairs])
    assert figures(network)["repairs"] >= 3 and "rejoined" not in figures(network)


def test_a_rank_that_the_switch_knows_late():
    """It cannot join again by itself: others are not held up."""
    network = Network(4)
    made = streams(network, range(4), [NBYTES], deaf=[3])
    network.links[3].joined.clear()
    network.at(1.0, network.join, ALL, [3])
    over = clocked(network, made, SLOTS)
    assert max(moment for (rank, _), moment in over.items() if rank < 3) < 3.0


def test_a_rank_that_begins_late():
    network = Network(3)
    made = streams(network, range(3), [NBYTES])

    def late(channel, stream):
        yield Busy(1.0)
        yield from exchange(channel, stream, [NBYTES], SLOTS)

    assert max(clocked(network, made, rank1=late(network.channels[1], made[1])).values()) < 1.2


# Transfers in the place of another rank: ranks 0 and 1 hold the same, which 2 and 3 receive, and the other way round.

OUTSIDE = [[2, 3], [2, 3], [0, 1], [0, 1]]
GROUPS = [Group(0), Group(0), Group(1), Group(1)]


def paired(network, slots=SLOTS):
    network.join(Group(0), [2, 3])
    network.join(Group(1), [0, 1])
    return [channel.stream([NBYTES] * 4, OUTSIDE, GROUPS, slots) for channel in network.channels]


def receive(channel, stream, round_):
    senders = stream.senders[channel.rank]
    yield lambda: stream.complete_since(round_, senders)
    check(stream, round_, senders, [NBYTES])
    channel.release(stream, round_)


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_transfer_in_the_place_of_another_rank(loss):
    network = Network(4, loss=loss)
    made = paired(network)

    def program(channel, stream):
        for round_ in range(6):
            yield lambda round_=round_: stream.open_since(round_)
            if channel.rank != 0:
                put(channel, stream, round_, NBYTES)
            if channel.rank == 1:
                put(channel, stream, round_, NBYTES, 0)
            yield from receive(channel, stream, round_)
        yield stream.idle_since

    network.run([program(*pair) for pair in zip(network.channels, made, strict=True)], 10.0)
    assert network.channels[0].figures().get("sent", 0) == 0


@pytest.mark.parametrize("late", [False, True])
def test_both_send_it(late):
    """The one that is late sends nothing."""
    network = Network(4)
    made = paired(network)

    def program(channel, stream):
        if channel.rank == 0 and late:
            yield lambda: (0, 0) in stream.outgoing  # a receiver has said that it has some of it
        put(channel, stream, 0, NBYTES)
        if channel.rank == 1:
            put(channel, stream, 0, NBYTES, 0)
        yield from receive(channel, stream, 0)
        yield stream.idle_since

    network.run([program(*pair) for pair in zip(network.channels, made, strict=True)], 2.0)
    assert network.channels[0].figures().get("sent", 0) == (0 if late else 100)


def test_who_sends_in_the_place_of_another_one_hangs_in_the_middle():
    """The late rank finds that it is being sent, and sees to it that all get the rest."""
    network = Network(4)
    made = paired(network)

    def program(channel, stream):
        if channel.rank == 0:
            yield lambda: (0, 0) in stream.outgoing
        put(channel, stream, 0, NBYTES)
        if channel.rank == 1:
            put(channel, stream, 0, NBYTES, 0)
            yield lambda: (0, 0) in made[0].outgoing
            network.loses = lambda rank, datagram: datagram.source == 1
            yield Hangs(np.inf)
        yield from receive(channel, stream, 0)
        if channel.rank > 1:
            over.append(network.clock)

    over = []
    network.run([program(*pair) for pair in zip(network.channels, made, strict=True)], 25.0)
    assert len(over) == 2 and max(over) < 3.0


# Ranks that are done before others

@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_receiver_that_needs_no_more_is_not_waited_for(loss):
    network = Network(3, loss=loss)
    made = streams(network, [0], [NBYTES])

    def done(channel, stream):
        for round_ in range(6):
            channel.release(stream, round_)
            yield Busy(0.0005)
        yield Hangs(np.inf)

    over = clocked(network, made, 6, rank2=done(network.channels[2], made[2]))
    assert max(over.values()) < (1.5 if loss else 0.1)


def test_a_receiver_that_has_dropped_the_stream_is_not_waited_for():
    """Its last acknowledgement gets lost."""
    network = Network(3)
    made = streams(network, [0], [NBYTES])

    def dropping(channel, stream):
        yield lambda: stream.complete_since(0, [0])
        check(stream, 0, [0], [NBYTES])
        channel.release(stream, 0)
        channel.drop(stream)
        network.loses = lambda rank, datagram: False
        channel.stream([8] * 3, [[]] * 3, [ALL] * 3, 1)  # it has another number

    network.loses = lambda rank, datagram: datagram.source == 1 and datagram.kind == kernels.datagrams.ACK
    assert max(clocked(network, made, 1, rank1=dropping(network.channels[1], made[1])).values()) < 0.5


def test_a_receiver_that_has_not_made_the_stream_is_waited_for():
    network = Network(2)
    sender, receiver = network.channels
    network.join(ALL, [0, 1])
    first = sender.stream([8, 0], [[1], []], [ALL] * 2, 1)
    put(sender, first, 0, 8)
    made = []

    def late():
        yield Busy(1.0)
        made.append(receiver.stream([8, 0], [[1], []], [ALL] * 2, 1))
        yield lambda: made[0].complete_since(0, [0])
        np.testing.assert_array_equal(made[0].view(0, 0), message(0, 0, 8))

    def waiting():
        yield first.idle_since
        assert network.clock > 1.0

    network.run([waiting(), late()])


# Lasting streams: a round stays until all ranks have used it.

@pytest.mark.parametrize("window", [132, 20])
@pytest.mark.parametrize("overheard", [False, True])
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_a_late_rank_fetches_what_it_is_no_receiver_of(loss, overheard, window):
    """Also what it has a part of, because it has joined the address for something else."""
    network = Network(4, loss=loss)
    network.join(Group(0), [0, 1, 2, 3] if overheard else [2, 3])
    network.join(Group(1), [0, 1, 2, 3] if overheard else [0, 1])
    for channel in network.channels:
        channel.limit_window(window)
    made = [channel.stream([NBYTES] * 4, OUTSIDE, GROUPS, 3, lasting=True) for channel in network.channels]

    def program(channel, stream):
        for round_ in range(5):
            channel.want_room(stream, round_)
            yield lambda round_=round_: stream.open_since(round_)
            channel.want_room(stream, round_)
            put(channel, stream, round_, NBYTES)
            if channel.rank == 1:
                put(channel, stream, round_, NBYTES, 0)
            yield from receive(channel, stream, round_)

    def late(channel, stream):
        for round_ in range(5):
            yield Busy(0.1)
            channel.want_room(stream, round_)
            yield lambda round_=round_: stream.open_since(round_)
            channel.want_room(stream, round_)
            for owner in (0, 1):
                channel.fetch(stream, round_, owner)
            yield lambda round_=round_: stream.complete_since(round_, range(4))
            check(stream, round_, range(4), [NBYTES])
            channel.release(stream, round_)

    programs = [(late if channel.rank == 0 else program)(channel, made[channel.rank]) for channel in network.channels]
    assert network.run(programs, 20.0) >= 0.5


def seconds_of_rounds(fetching):
    """Two ranks send to each other in three rounds, while a third one fetches what both send."""
    network, nbytes = Network(3), 5 * NBYTES
    made = [channel.stream([nbytes] * 3, [[1], [0], []], [None] * 3, 3, lasting=True) for channel in network.channels]
    ends = []

    def program(channel, stream):
        for round_ in range(3):
            put(channel, stream, round_, nbytes)
            yield lambda round_=round_: stream.complete_since(round_, [1 - channel.rank])
            channel.release(stream, round_)
        ends.append(network.clock)

    def late(channel, stream):
        for round_ in range(3):
            for owner in (0, 1):
                channel.fetch(stream, round_, owner)
            yield lambda round_=round_: stream.complete_since(round_, [0, 1])
            channel.release(stream, round_)

    programs = [program(channel, stream) for channel, stream in zip(network.channels[:2], made, strict=False)]
    network.run([*programs, late(network.channels[2], made[2]) if fetching else None], 20.0)
    return max(ends)


def test_what_a_late_rank_fetches_goes_out_after_what_others_wait_for():
    assert seconds_of_rounds(True) < 1.2 * seconds_of_rounds(False)
