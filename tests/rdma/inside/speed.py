"""Figures of the emulated card, of two ranks, as ratios: against ib_write_bw, a bare loop of pyverbs, and an RPC with copies.

    python tests/rdma/measure.py

runs it in the guest. Contenders take turns; the emulated card shows how much our Python costs beside the device, not how fast a
real card is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from statistics import median

import numpy as np

from mpiddl.machine.clock import now
from mpiddl.remote_memory import allocate
from mpiddl.transport.mpi import connect as world
from mpiddl.transport.verbs.device import VerbsDevice
from mpiddl.transport.verbs.transport import connect

NBYTES, WRITES, DEPTH, RUNS = 16 << 20, 20, 64, 5
ROUNDS = 100


def perftest(comm):
    """MB/s by ib_write_bw; the other rank sleeps."""
    found = None
    if comm.rank == 0:
        words = ["ib_write_bw", "-d", "rxe0", "-x", "1", "-s", str(NBYTES), "-n", str(WRITES), "-t", str(DEPTH), "-F"]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        out = ""
        while "local address" not in out:  # until the server listens
            client = subprocess.run([*words, "10.0.0.1"], capture_output=True, text=True, check=False)
            out = client.stdout
        server.communicate()
        line = next(line for line in out.splitlines() if re.match(rf"\s*{NBYTES}\s", line))
        found = float(line.split()[3]) * 1.048576  # it counts in MiB
    comm.patient_barrier(0.05)
    return found


def ours(comm, memory, array):
    """MB/s of as many writes, all under way together; the other rank sleeps."""
    found = None
    if comm.rank == 0:
        began = now()
        writes = [memory.write(1, 0, array) for _ in range(WRITES)]
        for write in writes:
            write.Wait()
        found = WRITES * NBYTES / (now() - began) / 1e6
    comm.patient_barrier(0.05)
    return found


def bandwidth(comm):
    memory, array = allocate(comm, NBYTES, 0, "verbs"), np.ones(NBYTES, np.uint8)
    memory.register(array)
    copied = memory.messages.copied
    found = {"ib_write_bw": [], "mpiddl": []}
    for _ in range(RUNS):
        found["ib_write_bw"].append(perftest(comm))
        found["mpiddl"].append(ours(comm, memory, array))
    if comm.rank == 0:
        theirs, mine = (median(found[name]) for name in ("ib_write_bw", "mpiddl"))
        print(f"persistent write of 16 MiB: {mine:.1f} MB/s, ib_write_bw {theirs:.1f} MB/s: {mine / theirs:.3f} of it "
              f"(wanted 0.9); copied {memory.messages.copied - copied} bytes; runs {found}")
    comm.Barrier()
    memory.Free()


class Bare:
    """Round trips of 8 bytes, as ib_send_lat makes them: one inline send and one receive that are posted again and again."""

    def __init__(self, comm):
        self.comm, self.device, self.buffer = comm, VerbsDevice(comm), np.zeros(64, np.uint8)
        device, verbs, enums = self.device, self.device._verbs, self.device._enums
        region = device.register(self.buffer)
        place = [verbs.wr.SGE(region.address, 8, region.local_key)]
        flags = enums.IBV_SEND_SIGNALED | enums.IBV_SEND_INLINE
        self.receive = verbs.wr.RecvWR(wr_id=1, num_sge=1, sg=place)
        self.send = verbs.wr.SendWR(wr_id=2, opcode=enums.IBV_WR_SEND, num_sge=1, sg=place, send_flags=flags)
        self.pair, self.queue, self.came = device._pairs[1 - comm.rank], device._queue, {1: 0, 2: 0}
        self.pair.post_recv(self.receive)

    def wait(self, number):
        """Until a completion with this number has come."""
        while self.came[number] == 0:
            count, found = self.queue.poll(1)
            if count:
                self.came[found[0].wr_id] += 1
            else:
                os.sched_yield()  # the emulated card needs a core, too
        self.came[number] -= 1

    def __call__(self, rounds):
        self.comm.Barrier()
        began = now()
        for _ in range(rounds):
            if self.comm.rank == 0:
                self.pair.post_send(self.send)
            self.wait(1)
            self.pair.post_recv(self.receive)
            if self.comm.rank == 1:
                self.pair.post_send(self.send)
            self.wait(2)
        return (now() - began) / rounds


def messages(comm, verbs, rounds):
    out, into = np.zeros(1), np.zeros(1)
    comm.Barrier()
    began = now()
    for _ in range(rounds):
        if comm.rank == 0:
            verbs.Isend(out, 1).Wait()
            verbs.Irecv(into, 1).Wait()
        else:
            verbs.Irecv(into, 0).Wait()
            verbs.Isend(out, 0).Wait()
    return (now() - began) / rounds


def flags(comm, memory, rounds, begin):
    comm.Barrier()
    began = now()
    for number in range(begin + 1, begin + rounds + 1):
        if comm.rank == 0:
            memory.signal(1, 0, number)
            memory.arrived(0, number).Wait()
        else:
            memory.arrived(0, number).Wait()
            memory.signal(0, 0, number)
    return (now() - began) / rounds


def latency(comm):
    bare, verbs, memory = Bare(comm), connect(comm), allocate(comm, 8, 1, "verbs")
    found = {"bare": [], "message": [], "flag": []}
    for run in range(RUNS):
        found["bare"].append(bare(ROUNDS))
        found["message"].append(messages(comm, verbs, ROUNDS))
        found["flag"].append(flags(comm, memory, ROUNDS, run * ROUNDS))
    if comm.rank == 0:
        theirs = median(found["bare"])
        for name in ("message", "flag"):
            mine = median(found[name])
            print(f"inline round trip by {name}: {mine * 1e6:.0f} us, bare pyverbs {theirs * 1e6:.0f} us: {mine / theirs:.2f} "
                  "times (wanted 2)")
    comm.Barrier()
    memory.Free()
    verbs.Free()
    bare.device.close()


if __name__ == "__main__":
    link = world()
    for name in sys.argv[1:] or ("latency", "bandwidth"):
        {"latency": latency, "bandwidth": bandwidth}[name](link)
        sys.stdout.flush()
