"""Random programs over a fake network of devices: the state machine of messages, with hypothesis.

    MPIDDL_FUZZ_EXAMPLES=50000 pytest tests/transport/test_verbs_fuzz.py

Queues are small. Completions come late, in any order between peers, or not at all where a later one of the same queue comes.
Numbers of transfers wrap around. A rank dies at any moment. Each operation of a rank that lives ends with the right bytes, or
with an error that names a rank that has died.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from harness.fake_device import FakeNetwork
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddl.errors import TransportError
from mpiddl.transport.verbs import operations
from mpiddl.transport.verbs.messages import Messages

pytestmark = pytest.mark.no_mpi

EXAMPLES = int(os.environ.get("MPIDDL_FUZZ_EXAMPLES", "150"))
EAGER, WRAP = 256, 1 << 32
SIZES = [0, 1, 15, 16, 100, 255, 256, 257, 1000]


def lose_completions(device, draws):
    """Some that a later one of the same queue makes needless do not come."""
    whole = device.poll

    def poll():
        found = whole()
        last = {completion.peer: place for place, completion in enumerate(found) if not completion.received}
        return [completion for place, completion in enumerate(found)
                if completion.received or completion.trouble or place == last[completion.peer] or draws.random() < 0.5]

    device.poll = poll


@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 4), writes=st.booleans(), sends=st.integers(4, 9),
       receives=st.integers(4, 9), inline=st.sampled_from([0, 48, 64, 200]), largest=st.sampled_from([320, 1 << 20]),
       count=st.integers(0, 60), first=st.sampled_from([0, WRAP - 3]), dies=st.none() | st.integers(0, 200))
def test_each_operation_ends(seed, size, writes, sends, receives, inline, largest, count, first, dies):
    with pytest.MonkeyPatch.context() as patch:
        clock = [0.0]
        patch.setattr(operations, "now", lambda: clock[0])
        network = FakeNetwork(size, seed, inline=inline, sends=sends, receives=receives, largest=largest)
        Program(network, writes, first, dies).run(count, clock)


class Program:
    """Messages between all ranks of a fake network, of which one may die when so many steps are done."""

    def __init__(self, network, writes, first, dies):
        self.network, self.draws, self.dies, self.steps, self.dead = network, network.draws, dies, 0, set()
        self.made = [Messages(device, EAGER, writes) for device in network.devices]
        self.under_way, self.sent, self.received = [], {}, {}
        for messages in self.made:
            lose_completions(messages.device, self.draws)
            for peer in messages._peers.values():
                peer.numbers = first

    def step(self):
        """Something happens in the network, and some ranks look; returns whether anything has moved."""
        self.steps += 1
        if self.steps == self.dies:
            self.dead.add(self.draws.randrange(len(self.made)))
            self.network.gone.update(self.dead)
        moved = self.network.step()
        for messages in self.draws.sample(self.made, self.draws.randrange(len(self.made) + 1)):
            if messages.device.rank not in self.dead:
                moved = messages.progress() or moved
        return moved

    def start(self, sends, source, dest, nbytes, tag):
        """A send or a receive, unless its rank is dead."""
        key, rank = (source, dest, tag), source if sends else dest
        if rank in self.dead:
            return
        data = np.array([self.draws.randrange(256) for _ in range(nbytes)] if sends else [0] * nbytes, np.uint8)
        if sends:
            self.sent.setdefault(key, []).append(data)
            self.under_way.append((rank, self.made[source].send(data, dest, 0, tag), None, None))
        else:
            number = self.received[key] = self.received.get(key, -1) + 1
            self.under_way.append((rank, self.made[dest].receive(data, source, 0, tag), (key, number), data))

    def run(self, count, clock):
        draws, size = self.draws, len(self.made)
        plan = [(draws.randrange(size), draws.randrange(size), draws.choice(SIZES), draws.randrange(2)) for _ in range(count)]
        queues = {True: list(plan), False: list(plan)}
        while any(queues.values()):
            sends = draws.choice([which for which, queue in queues.items() if queue])
            self.start(sends, *queues[sends].pop(0))
            for _ in range(draws.randrange(4)):
                self.step()
        idle = 0
        while idle < 300 and not all(operation.done or rank in self.dead for rank, operation, _, _ in self.under_way):
            idle = 0 if self.step() else idle + 1
            clock[0] += 0.1
        for rank, operation, key, into in self.under_way:
            if rank not in self.dead:
                self.check(operation, key, into)

    def check(self, operation, key, into):
        assert operation.done, operation.what
        if operation.failure is not None:
            assert isinstance(operation.failure, TransportError)
            assert any(f"rank {gone} " in str(operation.failure) for gone in self.dead), operation.failure
        elif into is not None:
            key, number = key
            assert into.tobytes() == self.sent[key][number].tobytes()
