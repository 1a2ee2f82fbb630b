"""The channel over a network that loses, repeats and delays datagrams: exact data, and bounds on memory, queues and time."""

from __future__ import annotations

import numpy as np
import pytest
from harness.lossy_medium import Busy, Network
from harness.multicast_rounds import ALL, LENGTHS, check, contents, exchange, figures, message, put, streams
from harness.tiers import more

from mpiddl import kernels
from mpiddl.errors import TransportError, UsageError
from mpiddl.transport.multicast.channel import Channel

pytestmark = pytest.mark.no_mpi

PAYLOAD = 1448
"""Bytes of a full datagram of 1472."""

TROUBLE = {
    "none": {},
    "loss of 2 %": {"loss": 0.02},
    "loss of 5 %": {"loss": 0.05},
    "loss of 30 %": {"loss": 0.3},
    "repeats": {"repeat": 0.2},
    "reordering": {"reorder": 0.2},
    "all of it": {"loss": 0.1, "repeat": 0.1, "reorder": 0.1},
}


def run(network, made, limit_s=60.0, **options):
    """Exchange on all ranks; returns the simulated seconds."""
    pairs = zip(network.channels, made, strict=True)
    return network.run([exchange(channel, stream, **options) for channel, stream in pairs], limit_s)


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize(("size", "senders"), [(2, [1]), (4, [0]), (3, [0, 1, 2]), more(6, [*range(6)])])
def test_everything_arrives(size, senders, trouble):
    for seed in range(2):
        network, draws = Network(size, seed, **TROUBLE[trouble]), np.random.default_rng(seed)
        run(network, streams(network, senders), pause=lambda draws=draws: draws.exponential(0.002))
        placed = sum((len(LENGTHS) - 5 + (LENGTHS[5] + LENGTHS[6]) // PAYLOAD) for _ in senders)
        assert not any(network.overflowed) and figures(network)["sent"] == 99 * len(senders), placed


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots(slots):
    network = Network(3, loss=0.05)
    run(network, streams(network, range(3), slots=slots))


@pytest.mark.parametrize("datagram_bytes", [544, 1024, 8960])
def test_datagrams_of_other_sizes(datagram_bytes):
    network = Network(3, loss=0.05, reorder=0.05, datagram_bytes=datagram_bytes)
    run(network, streams(network, [0, 2]))


def test_a_copy_for_each_receiver_where_there_is_no_group():
    network = Network(4, loss=0.05)
    run(network, streams(network, range(4), groups=[None, ALL, None, ALL]))
    alone = Network(3)
    run(alone, streams(alone, [0], lengths=[100 * PAYLOAD], groups=[None] * 3), lengths=[100 * PAYLOAD], rounds=3)
    assert 0 <= alone.sent[0] - 2 * 300 * (PAYLOAD + 24) < 1000  # a question or two


def test_each_byte_leaves_its_sender_once():
    network = Network(5)
    run(network, streams(network, [2], lengths=[100 * PAYLOAD]), lengths=[100 * PAYLOAD], rounds=3)
    assert network.sent[2] == 300 * (PAYLOAD + 24)


def test_links_are_busy():
    """Acknowledgements come early enough: a sender does not wait for them."""
    network, nbytes = Network(4), 200 * PAYLOAD
    seconds = run(network, streams(network, [0], lengths=[nbytes]), lengths=[nbytes], rounds=10)
    assert seconds < 1.02 * 10 * 200 * 1472 / network.rate


@pytest.mark.parametrize("size", [2, 4, more(9)])
def test_no_more_than_the_window_is_under_way_to_a_receiver(size):
    """So a switch with little memory, 250 kB for a port, drops nothing when all send to all."""
    network, nbytes = Network(size, queue_bytes=250_000), 150 * PAYLOAD
    seconds = run(network, streams(network, range(size), lengths=[nbytes]), lengths=[nbytes], rounds=4)
    assert not any(network.overflowed)
    assert seconds < 1.25 * 4 * (size - 1) * 150 * 1472 / network.rate


def test_a_small_receive_buffer_loses_nothing():
    network = Network(3, buffer_bytes=40_000)
    run(network, streams(network, range(3)))
    assert not any(network.overflowed)


def is_ack(rank, datagram):
    return datagram.kind == kernels.datagrams.ACK


@pytest.mark.parametrize(("share", "stall_s"), [(0.3, 0.05), (0.6, 0.12)])
def test_lost_acknowledgements_do_not_stall(share, stall_s):
    """A round takes 12 ms without."""
    network, nbytes, draws = Network(4), 200 * PAYLOAD, np.random.default_rng(0)
    network.loses = lambda rank, datagram: is_ack(rank, datagram) and draws.random() < share
    seconds = run(network, streams(network, [0], lengths=[nbytes]), lengths=[nbytes], rounds=10)
    assert seconds < 10 * (0.012 + stall_s)


def test_no_acknowledgement_for_a_while():
    network = Network(3)
    network.loses = lambda rank, datagram: is_ack(rank, datagram) and network.clock < 1.0
    assert run(network, streams(network, range(3))) < 1.6


@pytest.mark.parametrize("nbytes", [0, 1])
@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_a_transfer_of_one_datagram_that_gets_lost(nbytes, times):
    """Of both copies at first, then of the answers."""
    network, lost = Network(3), iter(range(times))
    network.loses = lambda rank, datagram: datagram.kind == kernels.datagrams.DATA and next(lost, None) is not None
    seconds = run(network, streams(network, [0], lengths=[nbytes]), lengths=[nbytes], rounds=1)
    assert sum(network.dropped) == times and seconds < 0.2


def test_a_link_that_takes_nothing_for_a_while():
    """What waits for room is bounded, and goes out in the end."""
    network, queued = Network(3, loss=0.02), []
    made = streams(network, range(3))
    network.refusing = {0, 2}
    network.at(0.2, network.refusing.clear)
    for moment in np.arange(0.01, 0.2, 0.01):
        network.at(moment, lambda: queued.append(max(channel.queued for channel in network.channels)))
    run(network, made)
    assert 0 < max(queued) <= 70


def test_memory_does_not_grow():
    network, lengths = Network(3, loss=0.1, repeat=0.05, reorder=0.1), [5000, 100]
    made = streams(network, range(3), lengths=lengths)
    held = []
    for rounds in (20, 180):
        run(network, made, lengths=lengths, rounds=rounds, first=made[0].base)
        held.append([contents(channel) for channel in network.channels])
    assert min(held[0]) > 3 * 2 * 5000
    assert all(late <= early + 12 for early, late in zip(*held, strict=True)), held


def start_at(made, round_):
    """As if so many rounds were over."""
    for stream in made:
        stream.base = stream.used_to = round_
        stream.bases, stream.used_by, stream.told = [round_] * len(made), [round_] * len(made), (round_, round_)


def test_numbers_of_rounds_are_long():
    network = Network(3, loss=0.05)
    made = streams(network, range(3))
    start_at(made, 2**32 - 4)
    run(network, made, first=2**32 - 4)


def test_the_last_round():
    network, last = Network(2), kernels.datagrams.LAST_ROUND
    made = streams(network, [0])
    start_at(made, last)
    run(network, made, first=last, rounds=1)
    with pytest.raises(TransportError, match="round: got 1099511627776, expected"):
        put(network.channels[0], made[0], last + 1, 3)


def test_numbers_of_streams_are_not_used_twice(monkeypatch):
    monkeypatch.setattr(kernels.datagrams, "LAST_STREAM", 3)
    channel = Network(1).channels[0]
    numbers = []
    for _ in range(3):
        numbers.append(channel.stream([8], [[]], [ALL], 1))
        channel.drop(numbers[-1])
    assert [stream.number for stream in numbers] == [0, 1, 2]
    with pytest.raises(TransportError, match="got 4 streams, expected at most 3"):
        channel.stream([8], [[]], [ALL], 1)


def test_mistakes_are_told():
    network = Network(2)
    stream = streams(network, [0], lengths=[3 * PAYLOAD])[0]
    channel = network.channels[0]
    with pytest.raises(UsageError, match="round: got 4, expected 0 to 3"):
        channel.put(stream, 4, 8)
    with pytest.raises(UsageError, match="nbytes: got 4345, expected at most 4344"):
        channel.put(stream, 0, 4345)
    with pytest.raises(TransportError, match="got 4097 hosts, expected at most 4096"):
        Channel(network.links[0], np.zeros(2, np.uint64), 0, 4097)


def test_two_streams_at_a_time():
    """Each has its share of the window; one that nobody releases does not hold up the other."""
    network = Network(3, loss=0.02, queue_bytes=250_000)
    held, moving = (streams(network, range(3), lengths=[100 * PAYLOAD]) for _ in range(2))
    over = []

    def program(channel):
        kept, own = held[channel.rank], moving[channel.rank]
        for round_ in range(4):
            put(channel, kept, round_, 100 * PAYLOAD)
        yield from exchange(channel, own, [100 * PAYLOAD], 8, done=over.append)
        for round_ in range(4):
            yield lambda round_=round_: kept.complete_since(round_, kept.senders[channel.rank])
            check(kept, round_, kept.senders[channel.rank], [100 * PAYLOAD])
            channel.release(kept, round_)
        yield from exchange(channel, kept, [100 * PAYLOAD], 2, first=4)

    network.run([program(channel) for channel in network.channels], 2.0)
    assert len(over) == 24 and not any(network.overflowed)


def test_a_stream_that_waits_for_a_slot_holds_up_no_other():
    """Its receiver looks at it only when something else has come."""
    network, nbytes = Network(2), 3 * PAYLOAD
    first, second = streams(network, [0], lengths=[nbytes]), streams(network, [0], lengths=[nbytes])

    def sender(channel):
        for round_ in range(5):
            yield lambda round_=round_: first[0].open_since(round_)
            put(channel, first[0], round_, nbytes)
            channel.release(first[0], round_)
        put(channel, second[0], 0, nbytes)
        channel.release(second[0], 0)
        yield first[0].idle_since
        yield second[0].idle_since

    def receiver(channel):
        yield lambda: second[1].complete_since(0, [0])
        for round_ in range(5):
            yield lambda round_=round_: first[1].complete_since(round_, [0])
            np.testing.assert_array_equal(first[1].view(round_, 0), message(round_, 0, nbytes))
            channel.release(first[1], round_)
        yield Busy(0.0)

    network.run([sender(network.channels[0]), receiver(network.channels[1])], 1.0)
