"""Datagrams of multicast: a twin made with struct, round trips, and all that must not be stored."""

from __future__ import annotations

import struct
from itertools import groupby

import numpy as np
import pytest
from harness.kernel_calls import guarded, intact
from hypothesis import given
from hypothesis import strategies as st

from mpiddl.kernels.multicast import datagrams as kernel
from mpiddl.kernels.multicast.siphash import siphash

pytestmark = pytest.mark.no_mpi

KEY = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], np.uint64)
STREAM, OWN = 9, 1
PAYLOAD = 5
FULL = 8 * PAYLOAD
SIZES = [0, 1, 7, 8, FULL - 1, FULL, FULL + 1, 2 * FULL, 3 * FULL + 9, 4 * FULL]
COUNTERS = ("placed", "repeated", "own", "late", "early", "forged", "malformed")


class Receiver:
    """What `store` works on: two slots, and three senders with room for 4, 2 and 5 datagrams. All of it lies between guards."""

    slots, rooms = 2, (4, 2, 5)

    def __init__(self, base=0):
        self.base = base
        total = sum(self.rooms)
        self.starts, self.most = guarded(np.cumsum([0, *self.rooms[:-1]])), guarded(self.rooms)
        self.data = guarded(np.zeros((self.slots, total * PAYLOAD), np.uint64))
        self.flags = guarded(np.zeros((self.slots, total), np.uint8))
        shape = self.slots, len(self.rooms)
        self.there, self.counts, self.lengths, self.tops = (guarded(np.zeros(shape, np.int64)) for _ in range(4))
        self.counters = guarded(np.zeros(kernel.COUNTERS, np.int64))

    @property
    def arrays(self):
        return (self.starts, self.most, self.data, self.flags, self.there, self.counts, self.lengths, self.tops, self.counters)

    def store(self, burst, segment, first=0):
        """Where it stopped, and why."""
        words = np.zeros(len(burst) // 8 + 2, np.uint64)
        words.view(np.uint8)[: len(burst)] = np.frombuffer(burst, np.uint8)
        found = kernel.store(words, len(burst), segment, first, KEY, OWN, STREAM, PAYLOAD, self.starts, self.most, self.data,
                             self.flags, self.there, self.counts, self.lengths, self.tops, self.base, self.counters)
        assert intact(*self.arrays)
        return found

    def counted(self):
        return {name: number for name, number in zip(COUNTERS, self.counters.tolist(), strict=True) if number}

    def transfer(self, round_, sender):
        slot = round_ % self.slots
        begin, length = self.starts[sender] * PAYLOAD, self.lengths[slot, sender]
        return self.data[slot, begin:].view(np.uint8)[:length].tobytes()

    def state(self):
        return b"".join(array.tobytes() for array in self.arrays[:-1])


def sealed(first, second, payload):
    """A datagram: two words, the payload padded with zeros, and the tag."""
    words = np.frombuffer(struct.pack("<QQ", first, second) + payload + bytes(-len(payload) % 8), np.uint64)
    return words.tobytes() + struct.pack("<Q", int(siphash(KEY, words, words.nbytes)))


def datagram(payload=bytes(FULL), *, round_=0, sender=0, stream=STREAM, kind=kernel.DATA, index=0, count=3, length=None):
    """One datagram with any header."""
    length = len(payload) if length is None else length
    return sealed(round_ | sender << 40 | stream << 52, kind | length << 4 | index << 18 | count << 41, payload)


def datagrams(message, **header):
    """All those of a message."""
    count = max(-(-len(message) // FULL), 1)
    return [datagram(message[index * FULL : (index + 1) * FULL], index=index, count=count, **header) for index in range(count)]


def written(message, indices, round_=0, sender=0):
    """The same by the kernel."""
    words = guarded(np.zeros(max(-(-len(message) // 8), 1), np.uint64))
    words.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
    burst = guarded(np.zeros(len(indices) * (PAYLOAD + kernel.OVERHEAD), np.uint64))
    nbytes = kernel.write(burst, KEY, round_, sender, STREAM, words, len(message), PAYLOAD, np.array(indices))
    assert intact(words, burst) and not burst.view(np.uint8)[nbytes:].any()
    return burst.tobytes()[:nbytes]


def message_of(size):
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_what_struct_writes(size):
    message = message_of(size)
    for round_, sender in ((0, 0), (kernel.LAST_ROUND, 2), (2**32, kernel.LAST_SENDER)):
        wanted = datagrams(message, round_=round_, sender=sender)
        assert written(message, range(len(wanted)), round_, sender) == b"".join(wanted)
        assert written(message, [len(wanted) - 1], round_, sender) == wanted[-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sender", [0, 2])
def test_what_is_written_is_stored(size, sender):
    """One by one in any order, and in a burst."""
    message, receiver = message_of(size), Receiver()
    count = max(-(-size // FULL), 1)
    burst = written(message, range(count), 3, sender)
    receiver.base = 2
    assert receiver.store(burst, FULL + 24) == (count, kernel.END)
    assert receiver.counted() == {"placed": count}
    singly = Receiver(base=2)
    for done, index in enumerate(np.random.default_rng(size).permutation(count).tolist(), 1):
        one = written(message, [index], 3, sender)
        assert singly.store(one, len(one)) == (1, kernel.END)
        assert singly.there[1, sender] == done and singly.counts[1, sender] == count and singly.tops[1, sender] > index
    for each in (receiver, singly):
        assert each.transfer(3, sender) == message
        assert each.tops[1, sender] == count and each.flags.sum() == count and not each.flags[0].any()


def test_senders_and_rounds_have_places_of_their_own():
    receiver, messages = Receiver(base=4), {}
    for round_ in (4, 5):
        for sender, room in enumerate(receiver.rooms):
            messages[round_, sender] = message_of(room * FULL - 3 * round_ - sender)
            for one in datagrams(messages[round_, sender], round_=round_, sender=sender):
                receiver.store(one, len(one))
    assert receiver.flags.all()
    assert all(receiver.transfer(*which) == message for which, message in messages.items())


GOOD = datagram(bytes(range(FULL)))

REFUSED = {
    "of a round that is over": ("late", datagram(round_=9)),
    "of the first round": ("late", datagram(round_=0)),
    "of a round without a slot": ("early", datagram(round_=12)),
    "of the last round": ("early", datagram(round_=kernel.LAST_ROUND)),
    "with another tag": ("forged", datagram(round_=10)[:-1] + b"?"),
    "without a tag": ("forged", datagram(round_=10)[:-8]),
    "with the tag of another one": ("forged", datagram(b"2" * FULL, round_=10)[:-8] + datagram(round_=10)[-8:]),
    "of no bytes": ("malformed", b"1234567"),
    "of two words": ("malformed", datagram(round_=10)[:16]),
    "that ends in a word": ("malformed", datagram(round_=10)[:-3]),
    "of a sender that there is not": ("malformed", datagram(round_=10, sender=3)),
    "of the last sender": ("malformed", datagram(round_=10, sender=kernel.LAST_SENDER)),
    "shorter than it says": ("malformed", datagram(bytes(FULL - 8), round_=10, length=FULL)),
    "longer than it says": ("malformed", datagram(round_=10, length=FULL - 8)),
    "longer than a datagram": ("malformed", datagram(bytes(FULL + 8), round_=10)),
    "of no transfer": ("malformed", datagram(round_=10, count=0)),
    "behind the last one": ("malformed", datagram(round_=10, index=3)),
    "far behind the last one": ("malformed", datagram(round_=10, index=kernel.MOST_DATAGRAMS)),
    "of more datagrams than there is room for": ("malformed", datagram(round_=10, count=5)),
    "of far more datagrams": ("malformed", datagram(round_=10, count=kernel.MOST_DATAGRAMS)),
    "short, but not the last one": ("malformed", datagram(bytes(8), round_=10, index=1)),
    "of no bytes, but not the last one": ("malformed", datagram(b"", round_=10, index=0)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    counter, bad = REFUSED[what]
    receiver = Receiver(base=10)
    before = receiver.state()
    assert receiver.store(bad, len(bad)) == (1, kernel.END)
    assert receiver.counted() == {counter: 1}
    assert receiver.state() == before


def test_the_number_of_datagrams_of_a_transfer_does_not_change():
    receiver = Receiver()
    receiver.store(GOOD, len(GOOD))
    before = receiver.state()
    for other in (datagram(index=1, count=2), datagram(bytes(8), index=3, count=4)):
        receiver.store(other, len(other))
    assert receiver.counted() == {"placed": 1, "malformed": 2}
    assert receiver.state() == before


def test_what_is_there_already_is_not_stored_again():
    receiver = Receiver()
    receiver.store(GOOD, len(GOOD))
    before = receiver.state()
    for again in (GOOD, datagram(bytes(FULL))):
        receiver.store(again, len(again))
    assert receiver.counted() == {"placed": 1, "repeated": 2}
    assert receiver.state() == before


def test_what_this_rank_has_sent_itself_is_counted_apart():
    receiver, own = Receiver(), datagram(count=2, sender=OWN)
    receiver.store(own, len(own))
    receiver.store(own, len(own))
    assert receiver.counted() == {"placed": 1, "own": 1}  # the first one: it lacked that


def test_every_flipped_bit_is_noticed():
    receiver = Receiver()
    before = receiver.state()
    for bit in range(8 * len(GOOD)):
        bad = bytearray(GOOD)
        bad[bit // 8] ^= 1 << bit % 8
        assert receiver.store(bytes(bad), len(bad)) == (1, kernel.END)
    assert receiver.counted() == {"forged": 8 * len(GOOD)}
    assert receiver.state() == before


def test_every_truncated_datagram_is_noticed():
    receiver = Receiver()
    before = receiver.state()
    for length in range(1, len(GOOD)):
        receiver.store(GOOD[:length], length)
    assert sum(receiver.counted().values()) == len(GOOD) - 1 and set(receiver.counted()) == {"forged", "malformed"}
    assert receiver.state() == before


def test_a_burst_of_good_and_bad_ones():
    message, receiver = message_of(3 * FULL + 9), Receiver()
    good = datagrams(message)
    burst = [good[0], bytes(len(GOOD)), good[2], datagram(round_=7), good[0], good[1], good[3]]
    assert receiver.store(b"".join(burst), len(GOOD)) == (7, kernel.END)
    assert receiver.counted() == {"placed": 4, "forged": 1, "early": 1, "repeated": 1}
    assert receiver.transfer(0, 0) == message


def test_a_burst_whose_datagrams_end_in_words_is_refused():
    receiver = Receiver()
    assert receiver.store(GOOD * 3, len(GOOD) - 4)[1] == kernel.END
    assert receiver.counted() == {"malformed": 4}


OTHERS = {"another stream": {"stream": STREAM + 1}, "another kind": {"kind": kernel.NACK}, "no kind": {"kind": 0},
          "a kind that there is not": {"kind": 15}}


@pytest.mark.parametrize("what", OTHERS)
def test_it_stops_where_something_else_comes(what):
    """The caller handles that, and goes on behind it."""
    receiver, other = Receiver(), datagram(sender=kernel.LAST_SENDER, index=5, **OTHERS[what])
    burst = b"".join([GOOD, other, datagram(index=1)])
    assert receiver.store(burst, len(GOOD)) == (1, kernel.OTHER)
    assert receiver.counted() == {"placed": 1}
    assert receiver.store(burst, len(GOOD), 1) == (1, kernel.OTHER)
    assert receiver.store(burst, len(GOOD), 2) == (3, kernel.END)
    assert receiver.counted() == {"placed": 2}


def test_a_wrong_tag_is_noticed_before_anything_else():
    receiver = Receiver()
    bad = bytearray(datagram(stream=STREAM + 1, kind=kernel.ACK))
    bad[-1] ^= 1
    assert receiver.store(bytes(bad), len(bad)) == (1, kernel.END)
    assert receiver.counted() == {"forged": 1}


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_gaps(there, data):
    start = data.draw(st.integers(0, len(there)))
    begin = data.draw(st.integers(0, len(there) - start))
    end = data.draw(st.integers(begin, len(there) - start))
    most = data.draw(st.integers(0, 5))
    found, flags = guarded(np.zeros((most, 2), np.int64)), guarded(np.array(there, np.uint8))
    number = kernel.gaps(flags, start, begin, end, found)
    assert intact(found, flags)
    missing = [index for index in range(begin, end) if not there[start + index]]
    runs = [[index for _, index in run] for _, run in groupby(enumerate(missing), lambda pair: pair[1] - pair[0])]
    assert found[:number].tolist() == [[run[0], len(run)] for run in runs][:most]
