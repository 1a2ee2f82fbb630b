"""Datagrams of multicast: written from memory, and checked and stored in memory, a burst in one call.

A datagram is a header of two words, the payload, padded with zeros to whole words, and the tag of all that
(`mpiddl.kernels.multicast.siphash`). Words are of 64 bits, little-endian::

    word 0    round 40 | sender 12 | stream 12
    word 1    kind 4 | bytes of payload 14 | index 23 | number of datagrams 23
    words     payload
    last      tag

A transfer is what one sender sends in one round of a stream: datagrams 0, 1, ..., all of them full but the last one.
Cost: the tag, about a byte a cycle, and a copy.
"""

from __future__ import annotations

import numpy as np

from mpiddl.kernels.jit import inlined, kernel
from mpiddl.kernels.multicast.siphash import siphash

OVERHEAD = 3
"""Words of a datagram that are not payload."""

SENDER_SHIFT, STREAM_SHIFT = 40, 52
BYTES_SHIFT, INDEX_SHIFT, COUNT_SHIFT = 4, 18, 41

LAST_ROUND, LAST_SENDER, LAST_STREAM, MOST_PAYLOAD, MOST_DATAGRAMS = 2**40 - 1, 2**12 - 1, 2**12 - 1, 2**14 - 1, 2**23 - 1
"""A round of 100 us, again and again, reaches the last one after three years: numbers are not used twice."""

DATA, ACK, NACK, PROBE, HELLO = range(1, 6)
"""Kinds of datagrams."""

PLACED, REPEATED, OWN, LATE, EARLY, FORGED, MALFORMED, COUNTERS = range(8)
"""What is counted: data that was stored; that was there already; that this rank has sent; of a round that is over; of a round
that has no room yet; with a wrong tag; of a wrong length, or with a header that makes no sense."""

END, OTHER = 0, 1
"""Why `store` has stopped: all is done; a datagram that is not data of this stream, whose tag is right."""


@inlined
def pack(kind, nbytes, index, count):
    """Word 1."""
    return (np.uint64(kind) | (np.uint64(nbytes) << np.uint64(BYTES_SHIFT)) | (np.uint64(index) << np.uint64(INDEX_SHIFT))
            | (np.uint64(count) << np.uint64(COUNT_SHIFT)))


@inlined
def address(round_, sender, stream):
    """Word 0."""
    return np.uint64(round_) | (np.uint64(sender) << np.uint64(SENDER_SHIFT)) | (np.uint64(stream) << np.uint64(STREAM_SHIFT))


@kernel
def write(burst, key, round_, sender, stream, data, nbytes, payload, indices):
    """Datagrams ``indices`` of the transfer of ``nbytes`` bytes in ``data``, one behind the other; returns their bytes.

    `data`: words, zero behind the last byte. `payload`: words of a full datagram. The last index may be that of the last
    datagram, which may be shorter.
    """
    count = max((nbytes + 8 * payload - 1) // (8 * payload), 1)
    at = 0
    for index in indices:
        begin = index * payload
        length = min(8 * payload, nbytes - 8 * begin)
        words = (length + 7) // 8
        burst[at] = address(round_, sender, stream)
        burst[at + 1] = pack(DATA, length, index, count)
        burst[at + 2 : at + 2 + words] = data[begin : begin + words]
        burst[at + 2 + words] = siphash(key, burst[at : at + 2 + words], 8 * (2 + words))
        at += words + OVERHEAD
    return 8 * at


@kernel
def seal(datagram, key):
    """Write the tag in the last word."""
    last = datagram.size - 1
    datagram[last] = siphash(key, datagram[:last], 8 * last)


@kernel
def store(burst, nbytes, segment, first, key, own, stream, payload, starts, rooms, data, flags, there, counts, sizes, tops,
          base, counters):
    """Check the datagrams of a burst from number ``first`` on, and store the data of ``stream``.

    Parameters
    ----------
    burst : words, ``nbytes`` bytes of which were received: datagrams of ``segment`` bytes, the last one may be shorter.
    own : this rank.
    starts, rooms : by sender, where its datagrams begin, and most of them.
    data, flags : by slot, the words of the datagrams and whether they are there. Slots take rounds in turns.
    there, counts, sizes, tops : by slot and sender, the datagrams that are there, all of them, the bytes of the transfer, and
        the end of what has been seen; 0: not known.
    base : the first round that has a slot.

    Returns
    -------
    (int, int)
        Where it stopped, and why: END, OTHER.
    """
    number = first
    while number * segment < nbytes:
        begin, length = number * segment // 8, min(segment, nbytes - number * segment)
        words = length // 8
        number += 1
        if length % 8 or segment % 8 or words < OVERHEAD:
            counters[MALFORMED] += 1
            continue
        part = burst[begin : begin + words]
        if siphash(key, part[: words - 1], 8 * (words - 1)) != part[words - 1]:
            counters[FORGED] += 1
            continue
        if (part[1] & np.uint64(15)) != DATA or (part[0] >> np.uint64(STREAM_SHIFT)) != stream:
            return number - 1, OTHER
        round_ = np.int64(part[0] & np.uint64(LAST_ROUND))
        sender = np.int64((part[0] >> np.uint64(SENDER_SHIFT)) & np.uint64(LAST_SENDER))
        size = np.int64((part[1] >> np.uint64(BYTES_SHIFT)) & np.uint64(MOST_PAYLOAD))
        index = np.int64((part[1] >> np.uint64(INDEX_SHIFT)) & np.uint64(MOST_DATAGRAMS))
        count = np.int64(part[1] >> np.uint64(COUNT_SHIFT))
        slot = round_ % len(data)
        if sender >= len(starts) or (size + 7) // 8 != words - OVERHEAD or size > 8 * payload:
            counters[MALFORMED] += 1
        elif round_ < base:
            counters[LATE] += 1
        elif round_ >= base + len(data):
            counters[EARLY] += 1
        elif (index >= count or count > rooms[sender] or (index < count - 1 and size < 8 * payload)
              or (counts[slot, sender] and counts[slot, sender] != count)):
            counters[MALFORMED] += 1
        elif flags[slot, starts[sender] + index]:
            counters[OWN if sender == own else REPEATED] += 1
        else:
            at = (starts[sender] + index) * payload
            data[slot, at : at + words - OVERHEAD] = part[2 : words - 1]
            flags[slot, starts[sender] + index] = 1
            there[slot, sender] += 1
            counts[slot, sender] = count
            if index == count - 1:
                sizes[slot, sender] = 8 * payload * index + size
            tops[slot, sender] = max(tops[slot, sender], index + 1)
            counters[PLACED] += 1
    return number, END


@kernel
def gaps(flags, start, begin, end, found):
    """The runs of datagrams from ``begin`` to ``end`` that are not there, as pairs of first and number; returns how many.

    No more than fit into ``found``, shape (m, 2). Datagram 0 has the flag at ``start``.
    """
    number, index, end = 0, start + begin, start + end
    while index < end and number < len(found):
        if flags[index]:
            index += 1
            continue
        first = index
        while index < end and not flags[index]:
            index += 1
        found[number, 0], found[number, 1] = first - start, index - first
        number += 1
    return number
