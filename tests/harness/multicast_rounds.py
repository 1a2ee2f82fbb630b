"""Rounds of transfers over a `harness.lossy_medium.Network`, each of which is compared with what was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from harness.lossy_medium import Busy, Network, Program
from mpiddl.transport.multicast.channel import Channel
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.stream import Stream

ALL = Group(0)
LENGTHS = (0, 1, 1447, 1448, 1449, 30_001, 100_000, 64, 7)
"""Bytes of transfers; 1448 are a full datagram."""


def message(round_: int, owner: int, nbytes: int) -> np.ndarray:
    """What a rank sends in a round."""
    return np.random.default_rng([round_, owner]).integers(0, 256, nbytes, np.uint8)


def length_of(lengths: Sequence[int], round_: int, owner: int) -> int:
    """Ranks send transfers of different lengths."""
    return lengths[(round_ + owner) % len(lengths)]


def streams(network: Network, senders: Collection[int], lengths: Sequence[int] = LENGTHS, slots: int = 4,
            deaf: Collection[int] = (), groups: Sequence[Group | None] = ()) -> list[Stream]:
    """One on each rank, from these senders to all others. The switch does not know those that are ``deaf``."""
    size = len(network.channels)
    sizes = [max(lengths) if rank in senders else 0 for rank in range(size)]
    receivers = [[other for other in range(size) if other != rank] if rank in senders else [] for rank in range(size)]
    network.join(ALL, range(size))
    for rank in deaf:
        network.forget(rank)
    return [channel.stream(sizes, receivers, groups or [ALL] * size, slots) for channel in network.channels]


def exchange(channel: Channel, stream: Stream, lengths: Sequence[int] = LENGTHS, rounds: int = 9, first: int = 0,
             pause: Callable[[], float] | None = None, done: Callable[[int], None] = lambda round_: None) -> Program:
    """In each round send, receive, and look at it after a pause: it is still there. ``done(round)`` is called after that."""
    for round_ in range(first, first + rounds):
        yield lambda round_=round_: stream.open_since(round_)
        put(channel, stream, round_, length_of(lengths, round_, channel.rank))
        yield lambda round_=round_: stream.complete_since(round_, stream.senders[channel.rank])
        if pause is not None:
            yield Busy(pause())
        check(stream, round_, stream.senders[channel.rank], lengths)
        channel.release(stream, round_)
        done(round_)
    yield stream.idle_since


def put(channel: Channel, stream: Stream, round_: int, nbytes: int, owner: int | None = None) -> None:
    """Send a message, if anyone receives it."""
    owner = channel.rank if owner is None else owner
    if stream.receivers[owner]:
        stream.view(round_, owner)[:nbytes] = message(round_, owner, nbytes)
        channel.put(stream, round_, nbytes, owner)


def check(stream: Stream, round_: int, senders: Collection[int], lengths: Sequence[int] = LENGTHS) -> None:
    """Compare what has come with what was sent."""
    for sender in senders:
        nbytes = length_of(lengths, round_, sender)
        assert stream.length(round_, sender) == nbytes
        np.testing.assert_array_equal(stream.view(round_, sender)[:nbytes], message(round_, sender, nbytes))


def figures(network: Network) -> dict[str, int]:
    """Of all ranks together."""
    total: dict[str, int] = {}
    for channel in network.channels:
        for name, number in channel.figures().items():
            total[name] = total.get(name, 0) + number
    return total


def contents(thing: Any, seen: set[int] | None = None) -> int:
    """How much is in the containers of a channel, and of what belongs to it: entries, and bytes of arrays."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return len(thing) + sum(contents(part, seen) for part in (*thing.keys(), *thing.values()))
    if isinstance(thing, (list, tuple, set, deque)):
        return len(thing) + sum(contents(part, seen) for part in thing)
    if type(thing).__module__.startswith("mpiddl.transport.multicast"):
        return contents(dict(vars(thing)), seen)
    return thing.nbytes if isinstance(thing, np.ndarray) else 0
