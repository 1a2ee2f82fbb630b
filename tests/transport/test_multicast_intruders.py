"""What others send to a channel: noise, datagrams with another key, old ones, and those of a member that is wrong or malicious.

The tests with hypothesis draw 100 examples, always the same ones. For more, and others each time::

    MPIDDL_FUZZ_EXAMPLES=200000 pytest tests/transport/test_multicast_intruders.py -k fuzz --hypothesis-show-statistics
"""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from harness.lossy_medium import KEY, Busy, Datagram, Network
from harness.multicast_rounds import ALL, LENGTHS, check, contents, exchange, figures, put, streams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpiddl import kernels
from mpiddl.transport.multicast.control import WINDOW, Control, ReplayWindow, packed, unpacked
from mpiddl.transport.multicast.stream import Stream

EXAMPLES = os.environ.get("MPIDDL_FUZZ_EXAMPLES")
pytestmark = [pytest.mark.no_mpi, pytest.mark.limit(86_400 if EXAMPLES else 300)]
fuzzed = settings(max_examples=int(EXAMPLES or 100), derandomize=not EXAMPLES, deadline=None,
                  suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

DATA, ACK, NACK, PROBE, HELLO = range(1, 6)
ROUNDS = 4


def recorded(key=KEY, seed=0):
    """All datagrams of an exchange of three ranks, with the receivers; some got lost."""
    network = Network(3, seed, loss=0.1, key=key, keeps=True)
    made = streams(network, range(3))
    pairs = zip(network.channels, made, strict=True)
    network.run([exchange(channel, stream, rounds=ROUNDS) for channel, stream in pairs])
    return network.carried


OWN, FOREIGN = recorded(), recorded(KEY[::-1])


def settle(network):
    """Let all come that is on its way."""
    network.run([iter([Busy(1.0)]) for _ in network.channels])


def attacked(intruders, loss=0.0):
    """An exchange during which these datagrams come, to all ranks; returns the figures without and with them."""
    network = Network(3, loss=loss)
    made = streams(network, range(3))
    pairs = list(zip(network.channels, made, strict=True))
    network.run([exchange(*pair, rounds=2) for pair in pairs])
    before = figures(network)
    for number, datagram in enumerate(intruders):
        for rank in range(3):
            network.at(network.clock + 0.0001 * number, network.deliver, rank, datagram)
    network.run([exchange(*pair, first=2) for pair in pairs])
    settle(network)
    return before, figures(network)


def grown(before, after):
    return {name: number - before.get(name, 0) for name, number in after.items() if number != before.get(name, 0)}


def noise(seed=0):
    draws = np.random.default_rng(seed)
    return [draws.bytes(length) for length in [*range(34), 1471, 1472, 1473, 3000, 60_000]]


def cut():
    whole = [datagram.data for _, datagram in OWN[:40]]
    return [data[:length] for data in whole for length in (1, 8, len(data) // 2, len(data) - 8)]


@pytest.mark.parametrize(("what", "counted"), [
    (noise, {"forged", "malformed"}),
    (cut, {"forged", "malformed"}),
    (lambda: [datagram.data for _, datagram in FOREIGN], {"forged"}),
])
@pytest.mark.parametrize("source", [-1, 1])
def test_what_comes_without_the_key_is_counted(what, counted, source):
    intruders = [Datagram(data, source, number % 2 == 0) for number, data in enumerate(what())]
    before, after = attacked(intruders)
    changed = grown(before, after)
    assert sum(changed.get(name, 0) for name in ("forged", "malformed")) == 3 * len(intruders)
    assert {name for name in ("forged", "malformed") if name in changed} == counted
    assert changed["placed"] == 2 * 99 * 3 and not {"unknown", "replayed", "repeated"} & set(changed)


def test_old_datagrams_change_nothing():
    """Those of rounds that are over, and control messages that were obeyed: from the rank that has sent them, or elsewhere."""
    network = Network(3, loss=0.1, keeps=True)
    made = streams(network, range(3))
    pairs = list(zip(network.channels, made, strict=True))
    network.run([exchange(*pair, rounds=ROUNDS) for pair in pairs])
    network.loss, old = 0.0, list(network.carried)
    before, states = figures(network), [stream.data.tobytes() for stream in made]
    for rank, datagram in old:
        network.deliver(rank, datagram)
        network.deliver(rank, datagram._replace(source=-1))
    settle(network)
    changed, datas = grown(before, figures(network)), sum(datagram.kind == DATA for _, datagram in old)
    assert changed == {"late": 2 * datas, "replayed": len(old) - datas, "unknown": len(old) - datas}
    assert [stream.data.tobytes() for stream in made] == states and not any(stream.outgoing for stream in made)
    network.run([exchange(*pair, first=ROUNDS) for pair in pairs])


def test_two_jobs_on_one_network():
    """Each hears all that the other one sends."""
    first, second = Network(3, loss=0.05), Network(3, loss=0.05, key=KEY + np.uint64(1))
    heard = [0, 0]
    for number, (network, other) in enumerate(((first, second), (second, first))):
        def both(rank, datagram, deliver=network.deliver, other=other, number=number):
            deliver(rank, datagram)
            if datagram.source >= 0:
                heard[number] += 1
                other.at(other.clock, Network.deliver, other, rank, datagram._replace(source=-1))

        network.deliver = both
    for network in (first, second, first):
        made = streams(network, range(3))
        network.run([exchange(*pair) for pair in zip(network.channels, made, strict=True)])
    assert figures(first)["forged"] == heard[1] and 0 < figures(second)["forged"] <= heard[0]


@pytest.mark.parametrize("kind", [ACK, NACK, PROBE, HELLO])
def test_a_member_speaks_for_itself_only(kind):
    """Rank 2 says that rank 1 has everything, lacks something, and so on: rank 0 does not believe it."""
    network = Network(3)
    made = streams(network, [0], [5000])
    put(network.channels[0], made[0], 0, 5000)
    before = contents(network.channels[0])
    values = {ACK: (4, 100, 9, 9), NACK: (0, 1, 4 << 32), PROBE: (3, 4), HELLO: (5,)}[kind]
    words = packed(Control(kind, 1, made[0].number, 0, 0, values), 2**40, KEY)
    network.deliver(0, Datagram(words.tobytes(), 2, False))
    network.deliver(0, Datagram(words.tobytes(), -1, False))
    network.channels[0].pump()
    assert network.channels[0].figures()["unknown"] == 2 and contents(network.channels[0]) <= before + 3
    network.run([iter([made[0].idle_since]), None, None])


def test_a_member_cannot_fill_the_memory():
    """Questions and greetings without end."""
    network = Network(3)
    made = streams(network, [0], [300_000])
    channel = network.channels[0]
    put(channel, made[0], 0, 300_000)
    draws, held = np.random.default_rng(0), []
    for number in range(1, 6001):
        runs = [int(run) for run in draws.integers(0, 2**63, 20)]
        values = [(int(draws.integers(2**63)), *[0] * 100), (number, int(draws.integers(3)), *runs, 2**32 * 300)][number % 2]
        words = packed(Control([HELLO, NACK][number % 2], 2, made[0].number, number % 4, number % 3, values), number, KEY)
        network.deliver(0, Datagram(words.tobytes(), 2, False))
        channel.pump()
        if number % 2000 == 0:
            held.append(contents(channel))
    assert held[2] <= held[0] + 300


# Control messages

controls = st.builds(Control, st.integers(1, 15), st.integers(0, kernels.datagrams.LAST_SENDER),
                     st.integers(0, kernels.datagrams.LAST_STREAM), st.integers(0, kernels.datagrams.LAST_ROUND),
                     st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=170).map(tuple))


@given(controls, st.integers(0, 2**46 - 1))
def test_what_is_unpacked_was_packed(message, sequence):
    assert unpacked(packed(message, sequence, KEY)) == (message, sequence)


@given(st.lists(st.one_of(st.integers(1, 60), st.integers(1, 5000), st.integers(1, 2**46)), max_size=100))
def test_the_replay_window_is_a_set_of_the_last_ones(numbers):
    window, had = ReplayWindow(), set()
    for number in numbers:
        new = number not in had and number > max(had, default=0) - WINDOW
        assert window.is_new(number) == new
        had.add(number)


# Fuzzing: rank 0 sends to rank 1 whatever comes.

PADDING = 4096
BYTES = 10_000


class Guarded:
    """Three ranks with a stream from 0 to 1, one that lasts, and one of all to all; its memory is between guards."""

    def __init__(self):
        self.network = Network(3)
        self.network.join(ALL, range(3))
        self.memory, self.made = [], []
        for channel in self.network.channels:
            self.made.append([
                self.stream(channel, [BYTES, 0, 0], [[1], [], []]),
                self.stream(channel, [BYTES] * 3, [[1, 2], [0, 2], [0, 1]], lasting=True),
                self.stream(channel, [BYTES] * 3, [[1, 2], [0, 2], [0, 1]]),
            ])

    def stream(self, channel, sizes, receivers, **options):
        nbytes = Stream.memory_bytes(sizes, 2, channel.payload)
        memory = np.full(nbytes + 2 * PADDING, 0xFF, np.uint8)
        memory[PADDING:-PADDING] = 0
        self.memory.append(memory)
        return channel.stream(sizes, receivers, [ALL] * 3, 2, memory[PADDING:-PADDING], **options)

    def come(self, intruders):
        for rank, datagram in intruders:
            self.network.deliver(rank, datagram)
            self.network.channels[rank].pump()
        for _ in range(3):
            for channel in self.network.channels:
                channel.pump()
        assert all((memory[:PADDING] == 0xFF).all() and (memory[-PADDING:] == 0xFF).all() for memory in self.memory)

    def check(self, which=0):
        """Three rounds of the first stream, or of another one."""
        first, second = self.made[0][which], self.made[1][which]

        def sender(channel):
            for round_ in range(3):
                yield lambda round_=round_: first.open_since(round_)
                put(channel, first, round_, LENGTHS[5 - round_] % BYTES)
                channel.release(first, round_)
            yield first.idle_since

        def receiver(channel):
            for round_ in range(3):
                yield lambda round_=round_: second.complete_since(round_, [0])
                check(second, round_, [0], [LENGTHS[5 - other] % BYTES for other in range(3)])
                channel.release(second, round_)

        self.network.run([sender(self.network.channels[0]), receiver(self.network.channels[1]), None], 5.0)
        assert max(contents(channel) for channel in self.network.channels) < 400_000


@fuzzed
@given(st.lists(st.tuples(st.integers(0, 2), st.builds(Datagram, st.binary(max_size=3000), st.integers(-1, 2), st.booleans()))))
def test_fuzz_random_bytes(intruders):
    guarded = Guarded()
    guarded.come(intruders)
    guarded.check()


flipped = st.tuples(st.sampled_from(OWN), st.lists(st.integers(0, 2**16), min_size=1, max_size=4, unique=True))


def flip(drawn):
    (rank, datagram), bits = drawn
    data = bytearray(datagram.data)
    for bit in {bit % (8 * len(data)) for bit in bits}:
        data[bit // 8] ^= 1 << bit % 8
    return rank, datagram._replace(data=bytes(data))


@fuzzed
@given(st.lists(flipped.map(flip)))
def test_fuzz_flipped_bits(intruders):
    guarded = Guarded()
    guarded.come(intruders)
    guarded.check()
    assert sum(figures(guarded.network)[name] for name in ("forged", "malformed")) == len(intruders)


def any_of(*likely, most):
    return st.one_of(st.sampled_from(likely), st.integers(0, most))


def sealed(first, second, words):
    datagram = np.array([first, second, *words, 0], np.uint64)
    kernels.datagrams.seal(datagram, KEY)
    return datagram.tobytes()


firsts = st.builds(lambda round_, sender, stream: round_ | sender << 40 | stream << 52,
                   any_of(0, 1, 2, 3, most=2**40 - 1), any_of(0, 1, 2, most=2**12 - 1), any_of(0, 1, 2, most=2**12 - 1))
word = any_of(0, 1, 2, 3, 0xFFFF, 2**32, 7 * 2**32 + 1, 2**40, 2**64 - 1, most=2**64 - 1)
words = st.lists(word, max_size=190)
lengths = any_of(None, 0, 8, 1448, most=2**14 - 1)


def control(first, kind, sequence, length, words):
    length = 8 * len(words) if length is None else length
    return sealed(first, kind | length << 4 | sequence << 18, words)


def data(first, kind, length, index, count, words):
    length = 8 * len(words) if length is None else length
    return sealed(first, kind | length << 4 | index << 18 | count << 41, words)


few = any_of(0, 1, 2, 3, 6, 7, most=2**23 - 1)
kinds, sequences = any_of(ACK, NACK, PROBE, HELLO, most=15), any_of(1, 2, 3, most=2**46 - 1)
control_datagrams = st.builds(control, firsts, kinds, sequences, lengths, words)
data_datagrams = st.builds(data, firsts, st.just(DATA), lengths, few, few, words)


def from_member(datagrams):
    """To ranks 0 and 1, from rank 2, and some from nowhere."""
    whole = st.builds(Datagram, datagrams, st.sampled_from([2, 2, 2, -1]), st.booleans())
    return st.lists(st.tuples(st.integers(0, 1), whole), max_size=30)


def is_data_of_the_first_stream(datagram):
    first, second = struct.unpack_from("<QQ", datagram.data)
    return first >> 52 == 0 and second & 15 == DATA


@fuzzed
@given(from_member(st.one_of(control_datagrams, data_datagrams)))
def test_fuzz_a_malicious_member(intruders):
    """Rank 2 can write into streams, which is what members do; but it cannot harm one in which nothing of it is taken."""
    guarded = Guarded()
    guarded.come([(rank, datagram) for rank, datagram in intruders if not is_data_of_the_first_stream(datagram)])
    guarded.check()


@fuzzed
@given(from_member(st.one_of(control_datagrams, data_datagrams)))
def test_fuzz_a_malicious_member_writes_into_all_streams(intruders):
    """Then the data are wrong, but a new stream is not harmed."""
    guarded = Guarded()
    guarded.come(intruders)
    for channel, made in zip(guarded.network.channels, guarded.made, strict=True):
        for stream in made:
            channel.drop(stream)
        made.append(guarded.stream(channel, [BYTES, 0, 0], [[1], [], []]))
    guarded.check(3)
