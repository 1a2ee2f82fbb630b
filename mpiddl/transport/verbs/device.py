"""Queue pairs on a port of this host, connected to those of other ranks.

Connections are reliable (RC): the device repeats what gets lost, keeps the order, and reports a peer that does not answer. What
a rank needs to know of its peers (the number of the queue pair, the GID and the LID) is exchanged over MPI.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from mpiddl.errors import TransportError
from mpiddl.layout import ceil_div
from mpiddl.transport.agree import agreed
from mpiddl.transport.comm import Comm
from mpiddl.transport.verbs.library import copies_on_fork, load
from mpiddl.transport.verbs.ports import ROCE_V1, ROCE_V2, Port, find_port
from mpiddl.transport.verbs.work_requests import Completion, Device, Kind, Memory, Registered, WorkRequest

INLINE = 220
"""Bytes that are asked for; a device that has less says so, and gets less."""

DEPTH = 64
"""Entries of each queue, unless the device has fewer."""

POLLED = 32
"""Completions taken at a time."""

TIMEOUT, RETRIES = 16, 6
"""Of an answer: 4.096 us * 2^16, or 0.27 s. So a peer that is gone is noticed after 2 to 8 s, as devices differ. To soft-RoCE,
7 retries are infinitely many."""

OPCODES = {Kind.SEND: "IBV_WR_SEND", Kind.WRITE: "IBV_WR_RDMA_WRITE", Kind.WRITE_IMM: "IBV_WR_RDMA_WRITE_WITH_IMM",
           Kind.READ: "IBV_WR_RDMA_READ", Kind.FETCH_ADD: "IBV_WR_ATOMIC_FETCH_AND_ADD",
           Kind.COMPARE_SWAP: "IBV_WR_ATOMIC_CMP_AND_SWP"}

RECEIVE = 1 << 62
"""Added to the numbers of receives: of a request that has failed, the device tells nothing but the number."""

RNR_TIMER = 12
"""0.64 ms; never needed, because messages have credits."""


class VerbsDevice(Device):
    """Queue pairs of one port to all ranks of ``comm``, also to this one.

    Parameters
    ----------
    comm : Comm
        Real ranks.
    wanted : str
        The device, as `mpiddl.transport.verbs.ports.parse` takes it.
    depth : int
        Entries of each queue.

    Raises
    ------
    TransportError
        On all ranks, with the reason of the first one that cannot: no pyverbs, no device or port, GIDs of different kinds.

    Attributes
    ----------
    port : Port

    Communication
    -------------
    Making it is collective: three all-gathers of short messages.
    """

    port: Port

    def __init__(self, comm: Comm, wanted: str = "", depth: int = DEPTH):
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self._pairs: dict[int, Any] = {}
        self._regions: dict[tuple[int, int], Any] = {}
        self._receives: dict[tuple[int, int], tuple[Any, Memory]] = {}  # prepared, and for which memory
        self._opened: list[Any] = []
        _open.add(self)
        try:
            with agreed(comm):
                self.port = find_port(wanted)
                self._open(depth)
            self._connect()
        except BaseException:
            self.close()
            raise
        self._peers = {pair.qp_num: peer for peer, pair in self._pairs.items()}

    def _open(self, depth: int) -> None:
        verbs = self._verbs = load()
        self._enums = enums = verbs.enums
        # As plain numbers: an operation of two enums takes as long as a short message.
        self._inline, self._signalled = int(enums.IBV_SEND_INLINE), int(enums.IBV_SEND_SIGNALED)
        self._success, self._with_immediate = int(enums.IBV_WC_SUCCESS), int(enums.IBV_WC_WITH_IMM)
        self._opcodes = {kind: int(getattr(enums, name)) for kind, name in OPCODES.items()}
        try:
            context = self._keep(verbs.device.Context(name=self.port.device))
            self._copies_on_fork = copies_on_fork()
            limits = context.query_device()
            self.sends = self.receives = max(4, min(depth, limits.max_qp_wr, limits.max_cqe // (2 * self.size)))
            self.largest = min(self.port.largest, 1 << 30)
            self._domain = self._keep(verbs.pd.PD(context))
            self._queue = self._keep(verbs.cq.CQ(context, min(2 * self.sends * self.size + 1, limits.max_cqe)))
            self._access = (enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
                            | enums.IBV_ACCESS_REMOTE_ATOMIC)
            self.inline = INLINE
            for peer in range(self.size):
                self._pairs[peer] = self._pair()
            self._reads = min(16, limits.max_qp_rd_atom)
        except verbs.error as error:
            raise TransportError(f"verbs: {self.port.device}: {error}{_locked_memory(0)}") from None

    def _keep(self, opened: Any) -> Any:
        self._opened.append(opened)
        return opened

    def _pair(self) -> Any:
        """A queue pair with as much inline data as the device has."""
        qp = self._verbs.qp
        while True:
            wants = qp.QPCap(max_send_wr=self.sends, max_recv_wr=self.receives, max_send_sge=1, max_recv_sge=1,
                             max_inline_data=self.inline)
            first = qp.QPInitAttr(qp_type=self._enums.IBV_QPT_RC, cap=wants, scq=self._queue, rcq=self._queue, sq_sig_all=0)
            try:
                return qp.QP(self._domain, first, None)
            except self._verbs.error:
                if not self.inline:
                    raise
                self.inline //= 2

    def _connect(self) -> None:
        """To the queue pairs that the other ranks have for this one."""
        own = {peer: pair.qp_num for peer, pair in self._pairs.items()}
        everyone = self._comm.setup_allgather((own, self.port, self.inline))
        self.inline = min(inline for _, _, inline in everyone)
        with agreed(self._comm):
            kinds = {port.address.kind for _, port, _ in everyone}
            if len(kinds) > 1:
                raise TransportError("verbs: ranks have ports of different kinds: " + "; ".join(
                    f"rank {rank}: {port}" for rank, (_, port, _) in enumerate(everyone)))
            try:
                for peer, pair in self._pairs.items():
                    numbers, port, _ = everyone[peer]
                    self._join(pair, numbers[self.rank], port)
            except self._verbs.error as error:
                raise TransportError(f"verbs: {self.port}: cannot be connected: {error}") from None
        self._comm.Barrier()  # no rank sends before all are ready to receive

    def _join(self, pair: Any, number: int, port: Port) -> None:
        qp = self._verbs.qp
        attributes = qp.QPAttr(port_num=self.port.number)
        attributes.qp_access_flags = self._access
        pair.to_init(attributes)
        attributes = qp.QPAttr(port_num=self.port.number)
        attributes.qp_access_flags = self._access
        mtu = min(self.port.mtu, port.mtu)
        attributes.path_mtu = next(code for code in range(1, 6) if 128 << code == mtu)
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, 0, 0
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = self._reads
        attributes.min_rnr_timer, attributes.timeout = RNR_TIMER, TIMEOUT
        attributes.retry_cnt = attributes.rnr_retry = RETRIES
        attributes.ah_attr = self._path(port)
        pair.to_rts(attributes)

    def _path(self, port: Port) -> Any:
        """To a peer's port: by its GID with RoCE, by its LID with InfiniBand."""
        addr = self._verbs.addr
        if self.port.address.kind in (ROCE_V1, ROCE_V2):
            route = addr.GlobalRoute(dgid=addr.GID(port.address.gid), sgid_index=self.port.address.place, hop_limit=64)
            return addr.AHAttr(port_num=self.port.number, is_global=1, gr=route)
        return addr.AHAttr(port_num=self.port.number, is_global=0, dlid=port.lid)

    def register(self, array: np.ndarray) -> Registered:
        self.check_process()
        try:
            region = self._verbs.mr.MR(self._domain, max(array.nbytes, 1), self._access, address=array.ctypes.data)
        except self._verbs.error as error:
            raise TransportError(f"verbs: memory of {array.nbytes} bytes cannot be registered: {error}"
                                 f"{_locked_memory(array.nbytes)}") from None
        if self._copies_on_fork:
            _keep_in_forks(array)
        found = Registered(array.ctypes.data, array.nbytes, region.lkey, region.rkey)
        self._regions[found.local_key, found.remote_key] = region
        return found

    def unregister(self, registered: Registered) -> None:
        region = self._regions.pop((registered.local_key, registered.remote_key), None)
        if region is not None:
            with suppress(self._verbs.error):
                region.close()

    def post(self, peer: int, request: WorkRequest) -> None:
        with self._made(request) as entry:
            self._hand_over(peer, request.kind, entry)

    def prepare(self, peer: int, request: WorkRequest) -> Any:
        return request.kind, self._made(request)

    def release(self, prepared: Any) -> None:
        _, entry = prepared
        entry.close()

    def post_again(self, peer: int, prepared: Any, number: int, signalled: bool) -> None:
        kind, entry = prepared
        entry.wr_id = number
        entry.send_flags = self._inline + self._signalled * signalled
        self._hand_over(peer, kind, entry)

    def _made(self, request: WorkRequest) -> Any:
        """As pyverbs wants it. What it allocates for this is given back by ``close`` only."""
        wr = self._verbs.wr
        flags = self._signalled * request.signalled + self._inline * request.inline
        with wr.SGE(*request.local) as place:
            entry = wr.SendWR(wr_id=request.number, opcode=self._opcodes[request.kind], num_sge=1, sg=[place],
                              imm_data=request.immediate, send_flags=flags)
        if request.kind in (Kind.FETCH_ADD, Kind.COMPARE_SWAP):
            assert request.remote is not None
            entry.set_wr_atomic(request.remote.key, request.remote.address, *request.values)
        elif request.remote is not None:
            entry.set_wr_rdma(request.remote.key, request.remote.address)
        return entry

    def _hand_over(self, peer: int, kind: Kind, entry: Any) -> None:
        try:
            self._pairs[peer].post_send(entry)
        except self._verbs.error as error:
            raise TransportError(f"verbs: {kind.value} to rank {peer} cannot be posted: {error}") from None

    def post_receive(self, peer: int, number: int, memory: Memory) -> None:
        entry, known = self._receives.get((peer, number), (None, None))
        if known != memory:
            wr = self._verbs.wr
            if entry is not None:
                entry.close()
            with wr.SGE(*memory) as place:
                entry = wr.RecvWR(wr_id=RECEIVE + number, num_sge=1, sg=[place])
            self._receives[peer, number] = entry, memory
        try:
            self._pairs[peer].post_recv(entry)
        except self._verbs.error as error:
            raise TransportError(f"verbs: a receive from rank {peer} cannot be posted: {error}") from None

    def poll(self) -> list[Completion]:
        count, found = self._queue.poll(POLLED)
        return [self._completion(each) for each in found] if count else []

    def _completion(self, found: Any) -> Completion:
        peer, enums, status = self._peers[found.qp_num], self._enums, int(found.status)
        received, number = found.wr_id >= RECEIVE, found.wr_id % RECEIVE
        if status != self._success:
            name = next((name for name in dir(enums) if name.startswith("IBV_WC_") and name.endswith("_ERR")
                         and getattr(enums, name) == status), f"status {status}")
            return Completion(peer, number, received, name)
        immediate = found.imm_data & 0xFFFFFFFF if received and int(found.wc_flags) & self._with_immediate else None
        return Completion(peer, number, received, "", found.byte_len if received else 0, immediate)

    def leave_to_parent(self) -> None:
        """In a forked process: never close what belongs to the parent, not even when Python ends."""
        self.forked = True
        for opened in [*self._regions.values(), *self._pairs.values(), *self._opened]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened))
        self._regions, self._pairs, self._opened = {}, {}, []

    def close(self) -> None:
        """Close the queue pairs and all else. Operations under way never end."""
        self.closed = True
        for entry, _ in self._receives.values():
            entry.close()
        self._receives = {}
        for opened in [*self._regions.values(), *self._pairs.values(), *reversed(self._opened)]:
            with suppress(Exception):  # a queue pair that has failed is closed all the same
                opened.close()
        self._regions, self._pairs, self._opened = {}, {}, []


_open: weakref.WeakSet[VerbsDevice] = weakref.WeakSet()


def _forked() -> None:
    for device in list(_open):
        device.leave_to_parent()


os.register_at_fork(after_in_child=_forked)


def _keep_in_forks(array: np.ndarray) -> None:
    """Let forked processes have these pages, and what else lies on them. Where another library asks for it, libibverbs takes
    registered pages from them, as was necessary before Linux 5.12."""
    begin, page = array.ctypes.data, mmap.PAGESIZE
    end = begin + array.nbytes
    first = begin // page * page
    ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(ceil_div(end - first, page) * page), mmap.MADV_DOFORK)


def _locked_memory(nbytes: int) -> str:
    """Whether the limit of locked memory may be the cause."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or (nbytes and nbytes < limit // 64):
        return ""
    return (f"; this process may lock {limit} bytes: raise the limit with `ulimit -l unlimited`, or in "
            "/etc/security/limits.conf")
