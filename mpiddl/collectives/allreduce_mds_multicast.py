"""All-reduce over multicast of the sum of blocks that several ranks have computed: an MDS code, with any placement of blocks.

Each sender multicasts one vector of V/m, from which all ranks compute the sum of all blocks (`mpiddl.coding.mds_code`). With
m = r, all owners of a block take part. With m < r, up to r - m owners of each block may be late. Then ranks report each block
that they have finished to rank 0. As soon as m owners of each block have reported, rank 0 tells all ranks which owners send
which block. So what a late rank has finished is used, and nobody waits for the rest. A rank that finds the round decided leaves
out what it has not computed (`needs`). No rank can be more than `slots` rounds late; then the others wait for it.

Cost, V = size of an array, n ranks: V/m sent by each sender and (n - 1)/m V received by each rank. With m < r also a short
message from and to rank 0, and memory for the r arrays of a rank's blocks. Memory: ``slots`` times n V/m.
Source: as `mpiddl.coding.mds_code`; that rank 0 decides is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np

from mpiddl.coding.choose_owners import Chosen, senders
from mpiddl.coding.mds_code import MdsCode, computing_order
from mpiddl.collectives.allreduce_replicated_multicast import RATE
from mpiddl.collectives.copies import checked, checksum, compare, watched
from mpiddl.memory import aligned_zeros
from mpiddl.progress.started import Queue, Steps, run
from mpiddl.transport.base import Request
from mpiddl.transport.comm import Comm
from mpiddl.transport.multicast.connect import connect
from mpiddl.transport.multicast.medium import Group
from mpiddl.transport.multicast.stream import Stream

REPORT_BYTES = 8

DECIDER = 0


class MdsMulticast(Queue):
    """The all-reduce of one communicator, for arrays of one size.

    Parameters
    ----------
    comm : Comm
    code : MdsCode
        Of as many workers as ``comm`` has ranks.
    size, dtype :
        Of the arrays.
    slots : int
        Rounds that may be under way, at least 2.
    interface : str
        See `mpiddl.transport.multicast.connect.connect`.

    Attributes
    ----------
    own : list of int
        The blocks of this rank, in the order in which it should compute them.
    result : ndarray, shape (size,)
        The sum, valid until the next call; in the memory that was given for it, if any was.
    late : Counter
        On rank 0: by rank, rounds in which nothing of it was used, because it was late.

    Raises
    ------
    TransportError
        On all ranks: multicast does not work here.

    Communication
    -------------
    Making it is collective.
    """

    def __init__(self, comm: Comm, code: MdsCode, size: int, dtype: np.dtype, slots: int = 4, interface: str = "",
                 result: np.ndarray | None = None):
        everyone, rank = range(comm.size), comm.rank
        self._comm, self._code, self._round = comm, code, 0
        self._blocks = [computing_order(code.placement, worker) for worker in everyone]
        self.own, self.late = self._blocks[rank], Counter[int]()
        self.result = aligned_zeros(size, dtype) if result is None else result
        self._link = connect(comm, [everyone], interface)
        others = [[other for other in everyone if other != worker] for worker in everyone]
        self._vector_bytes = nbytes = code.slice_size(size) * dtype.itemsize
        groups = [Group(0)] * comm.size
        make = self._link.channel.stream
        self._coded = make([nbytes] * comm.size, others, groups, slots, lasting=True, everyone=Group(0))
        to_decider = [[] if worker == DECIDER else [DECIDER] for worker in everyone]
        self._reports = [make([REPORT_BYTES] * comm.size, to_decider, [None] * comm.size, slots)
                         for _ in range(max(map(len, self._blocks)))]
        self._fixed = code.choose() if code.slices == code.placement.redundancy else None
        self._kept: list[np.ndarray] = []
        if self._fixed is None:
            sizes = [len(code.placement.owners) * comm.size if worker == DECIDER else 0 for worker in everyone]
            receivers = [others[worker] if worker == DECIDER else [] for worker in everyone]
            self._choice = make(sizes, receivers, groups, slots)
            self._kept = [aligned_zeros(size, dtype) for _ in self.own]
        self._decided = self._encoded = self._seen = 0
        all_finished = code.choose()
        assert all_finished is not None
        self._fewest, self._rate, self._ready = len(senders(all_finished)), RATE, inf
        self._chose: dict[int, float] = {}
        self._link.channel.watchers.append(self._on_news)
        comm.patient_barrier()
        self._link.begin_thread()

    def needs(self) -> bool:
        """Whether blocks of the coming round that this rank has not brought yet are still of use."""
        if self._fixed is not None:
            return True
        self._link.serve()
        with self._link.channel.lock:
            return self._chosen(self._round) is None

    def bring(self, number: int, array: np.ndarray) -> None:
        """Take the array of block ``own[number]``, in this order. Its memory is free afterwards."""
        run(self._comm, (), self._bring(number, checked(array, self.result)), True, self)

    def __call__(self) -> np.ndarray:
        """The sum of all blocks, when this rank has brought its own, as far as they are needed (`needs`)."""
        run(self._comm, (), self._sum(), True, self)
        return self.result

    def _bring(self, number: int, array: np.ndarray) -> Steps:
        round_, channel, rank = self._round, self._link.channel, self._comm.rank
        yield from self._room(round_)
        if self._fixed is None:
            self._kept[number][:] = array
        with channel.lock:
            if self._fixed is not None:
                self._add(number, array, self._fixed)
            report = self._reports[number]
            report.view(round_, rank).view(np.int64)[0] = checksum(array, round_)
            channel.put(report, round_, REPORT_BYTES)
            channel.pump()

    def _add(self, number: int, array: np.ndarray, chosen: Chosen) -> None:
        """Add a block to the vector of this round, and send it after the last block: nobody has to choose."""
        rank = self._comm.rank
        vector = self._vector(self._round, rank)
        if not number:
            vector[:] = 0
        if rank in chosen[self.own[number]]:
            self._code.add_block(rank, self.own[number], array, chosen, vector)
        if number == len(self.own) - 1 and rank in senders(chosen):
            self._link.channel.put(self._coded, self._round, vector.nbytes)
            self._comm.meter.sent(vector.nbytes)

    def _sum(self) -> Steps:
        round_, channel, rank = self._round, self._link.channel, self._comm.rank
        yield from self._room(round_)
        yield self._request(lambda: 0.0 if self._chosen(round_) is not None else None, "the choice of rank 0")
        with channel.lock:
            chosen = self._chosen(round_)
            channel.pump()
        assert chosen is not None
        sending = senders(chosen)
        others = [worker for worker in sending if worker != rank]
        yield self._request(lambda: self._coded.complete_since(round_, others), "vectors of other ranks")
        self._learn(round_, others)
        self._code.decode({worker: self._vector(round_, worker) for worker in sending}, chosen, self.result)
        self._round += 1
        with channel.lock:
            self._compare(round_)
            for stream in self._streams():
                channel.release(stream, round_)
            channel.pump()

    def _learn(self, round_: int, others: list[int]) -> None:
        """How fast vectors come, on the rank that decides: since it has chosen."""
        with self._link.channel.lock:
            since, chose = self._coded.complete_since(round_, others), self._chose.pop(round_, inf)
            if others and since is not None and since > chose:
                self._rate = max(self._rate, len(others) * self._vector_bytes / (since - chose))

    def _on_news(self) -> None:
        """With the lock of the channel held, by whoever pumps: what has come may let this rank decide, or send."""
        arrived = sum(int(report.there.sum()) for report in self._reports) if self._comm.rank == DECIDER else 0
        if arrived != self._seen or self._link.channel.now() >= self._link.channel.wake:
            self._seen = arrived
            while self._fixed is None and self._choice.is_open(self._decided) and self._decide(self._decided):
                self._decided += 1
        while self._fixed is None and (chosen := self._chosen(self._encoded)) is not None:
            self._send(self._encoded, chosen)
            self._encoded += 1

    def _decide(self, round_: int) -> bool:
        """Choose who sends what in a round, if enough is finished."""
        done = np.array([report.counts[round_ % report.slots] > 0 for report in self._reports])
        blocks = len(self._code.placement.owners)
        least = sum(map(len, self._blocks)) if self._link.timeless else self._code.slices * blocks
        if np.count_nonzero(done) < least:
            return False
        finished = [[block for number, block in enumerate(its) if done[number, worker]]
                    for worker, its in enumerate(self._blocks)]
        chosen = self._code.choose(finished)
        if chosen is None or not self._patient(round_, chosen):
            return False
        table = self._choice.view(round_, DECIDER).reshape(len(chosen), self._comm.size)
        table[:] = 0
        for block, owners in enumerate(chosen):
            table[block, list(owners)] = 1
        self._link.channel.put(self._choice, round_, table.size)
        sending = senders(chosen)
        self.late.update(worker for worker, its in enumerate(self._blocks)
                         if worker not in sending and len(finished[worker]) < len(its))
        return True

    def _patient(self, round_: int, chosen: Chosen) -> bool:
        """Whether rank 0 has waited long enough for a choice with fewer senders: each costs the time to send a vector."""
        channel, more = self._link.channel, len(senders(chosen)) - self._fewest
        if self._link.timeless or self._comm.simulated:
            return True
        now = channel.now()
        self._ready = min(self._ready, now)
        until = self._ready + more * self._vector_bytes / self._rate
        channel.wake = inf if now >= until else until
        if now >= until:
            self._ready, self._chose[round_] = inf, now
        return now >= until

    def _chosen(self, round_: int) -> Chosen | None:
        """Who sends what in a round; None: not known yet."""
        if self._fixed is not None:
            return self._fixed
        if not self._choice.complete(round_, DECIDER):
            return None
        table = self._choice.view(round_, DECIDER).reshape(-1, self._comm.size)
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in table)

    def _send(self, round_: int, chosen: Chosen) -> None:
        """Encode and send what this rank was chosen for. It may be computing another block meanwhile."""
        rank = self._comm.rank
        if rank in senders(chosen):
            vector = self._vector(round_, rank)
            self._code.encode(rank, dict(zip(self.own, self._kept, strict=True)), chosen, vector)
            self._link.channel.put(self._coded, round_, vector.nbytes)
            self._comm.meter.sent(vector.nbytes)

    def _compare(self, round_: int) -> None:
        """The copies of each block, as far as they are reported to this rank."""
        numbers: dict[int, tuple[int, int]] = {}
        for worker, blocks in enumerate(self._blocks):
            for block, report in zip(blocks, self._reports, strict=False):
                if report.complete(round_, worker):
                    found = report.view(round_, worker).view(np.int64).item()
                    other, theirs = numbers.setdefault(block, (worker, found))
                    compare(self._link.channel, worker, found, other, theirs)

    def _vector(self, round_: int, worker: int) -> np.ndarray:
        return self._coded.view(round_, worker).view(self.result.dtype)

    def _streams(self) -> list[Stream]:
        return [self._coded, *self._reports, *([self._choice] if self._fixed is None else [])]

    def _room(self, round_: int) -> Steps:
        for stream in self._streams():
            with self._link.channel.lock:
                self._link.channel.want_room(stream, round_)
            yield self._request(partial(stream.open_since, round_), "ranks that are many rounds late")

    def _request(self, since: Callable[[], float | None], what: str) -> Request:
        return self._link.request(watched(self._link.channel, since), what)

    def Free(self) -> None:
        """Collective: all ranks have what they need."""
        self._link.Free()
