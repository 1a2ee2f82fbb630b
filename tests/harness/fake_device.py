"""RDMA devices in this process: queue pairs between ranks, whose packets are carried in any order that reliable ones allow.

Work requests of one queue pair are carried out in order, those of different ones in any order. Completions come later than the
data. What a real device refuses is an error here: a send without a receive, a full queue, memory that is not registered.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque

import numpy as np

from mpiddl.transport.verbs.work_requests import Completion, Device, Kind, Memory, Registered, WorkRequest


def view(address, nbytes):
    """The bytes at an address."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8) if nbytes else np.empty(0, np.uint8)


class FakeNetwork:
    """``size`` devices.

    gone : ranks that have died: they answer nothing.
    """

    def __init__(self, size, seed=0, inline=64, sends=8, receives=8, largest=1 << 20):
        self.draws, self.gone = random.Random(seed), set()
        self.devices = [FakeDevice(self, rank, size, inline, sends, receives, largest) for rank in range(size)]

    def step(self):
        """Carry out one work request, or report one completion, of any queue; returns whether there was one."""
        queues = [(device, peer) for device in self.devices for peer, queue in device.queues.items()
                  if queue and device.rank not in self.gone]
        reports = [device for device in self.devices if device.unreported]
        if not queues and not reports:
            return False
        if reports and (not queues or self.draws.random() < 0.5):
            self.draws.choice(reports).report()
        else:
            device, peer = self.draws.choice(queues)
            device.carry_out(peer)
        return True


class FakeDevice(Device):
    def __init__(self, network, rank, size, inline, sends, receives, largest):
        self.network, self.rank, self.size = network, rank, size
        self.inline, self.sends, self.receives, self.largest = inline, sends, receives, largest
        peers = range(size)
        self.queues = {peer: deque() for peer in peers}
        self.posted = {peer: deque() for peer in peers}
        self.over = dict.fromkeys(peers, 0)
        self.broken = set()
        self.unreported, self.reported = deque(), []
        self.regions, self.keys = {}, 100 * rank

    def register(self, array):
        self.keys += 1
        self.regions[self.keys] = array.ctypes.data, array.nbytes
        return Registered(array.ctypes.data, array.nbytes, self.keys, self.keys)

    def unregister(self, registered):
        del self.regions[registered.local_key]

    def post(self, peer, request):
        assert request.number - self.over[peer] <= self.sends, "the send queue is full"
        assert request.local.nbytes <= self.largest
        if request.inline:
            assert request.local.nbytes <= self.inline
        elif request.local.nbytes:
            self.check(request.local)
        data = view(request.local.address, request.local.nbytes).copy() if request.inline else None
        self.queues[peer].append((request, data))

    def post_receive(self, peer, number, memory):
        assert len(self.posted[peer]) < self.receives
        self.check(memory)
        self.posted[peer].append((number, memory))

    def check(self, memory: Memory):
        address, nbytes = self.regions[memory.key]
        assert address <= memory.address and memory.address + memory.nbytes <= address + nbytes

    def poll(self):
        found, self.reported = self.reported, []
        for completion in found:
            if not completion.received:  # it tells of all before it
                self.over[completion.peer] = completion.number
        return found

    def release(self, prepared):
        pass

    def report(self):
        self.reported.append(self.unreported.popleft())

    def close(self):
        self.closed = True

    def carry_out(self, peer):
        request, data = self.queues[peer].popleft()
        other = self.network.devices[peer]
        trouble = "" if peer not in self.broken else "IBV_WC_WR_FLUSH_ERR"
        if not trouble and peer in self.network.gone:
            trouble = "IBV_WC_RETRY_EXC_ERR"
        if not trouble:
            trouble = self.execute(request, data, other)
        if trouble:
            self.broken.add(peer)
        if request.signalled or trouble:
            self.unreported.append(Completion(peer, request.number, False, trouble))

    def execute(self, request: WorkRequest, data, other):
        local, remote, kind = request.local, request.remote, request.kind
        if data is None:
            data = view(local.address, local.nbytes)
        if kind in (Kind.SEND, Kind.WRITE_IMM) and not other.posted[self.rank]:
            return "IBV_WC_RNR_RETRY_EXC_ERR"
        if remote is not None and remote.nbytes:
            if remote.key not in other.regions:
                return "IBV_WC_REM_ACCESS_ERR"
            other.check(remote)
        if kind is Kind.SEND:
            number, memory = other.posted[self.rank].popleft()
            if memory.nbytes < data.size:
                return "IBV_WC_REM_INV_REQ_ERR"
            view(memory.address, data.size)[:] = data
            other.unreported.append(Completion(self.rank, number, True, "", data.size))
        elif kind in (Kind.WRITE, Kind.WRITE_IMM):
            if data.size:
                view(remote.address, data.size)[:] = data
            if kind is Kind.WRITE_IMM:
                number, _ = other.posted[self.rank].popleft()
                other.unreported.append(Completion(self.rank, number, True, "", data.size, request.immediate))
        elif kind is Kind.READ:
            data[:] = view(remote.address, data.size)
        else:
            word, found = view(remote.address, 8).view(np.uint64), data.view(np.uint64)
            found[0] = word[0]
            if kind is Kind.FETCH_ADD:
                word[0] += np.uint64(request.values[0])
            elif word[0] == request.values[0]:
                word[0] = request.values[1]
        return ""
