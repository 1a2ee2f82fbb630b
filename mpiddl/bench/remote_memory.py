"""Remote memory against a memory copy, gRPC, and over verbs an RPC that copies: the same array is written and read.

Rank 0 writes an array into memory of rank 1 and sets a flag; rank 1 sees it, and sets a flag of rank 0. Or rank 0 reads an
array of rank 1. gRPC moves the same bytes to and from another process, with the fastest of its settings here: TCP or a Unix
socket, in chunks of 1 MiB or in one message. The RPC sends chunks over the same verbs, through registered buffers: a copy into
them, and one out of them, with the faster of two chunk sizes. All take turns; who has no part in a turn sleeps. Rank 0 writes
the array again before each call.

A row holds, beside what every bench's rows hold: ``memcpy_seconds`` of the same array, ``of_memcpy`` (these over ours), and
``wanted``: over gRPC, 0.75 of what a memory copy would reach.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mpiddl.bench.collectives import size_text
from mpiddl.bench.grpc_bytes import Client
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.machine.clock import now
from mpiddl.memory import aligned_zeros
from mpiddl.remote_memory import RemoteMemory, allocate
from mpiddl.study.interleaved import quantiles
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world
from mpiddl.transport.verbs.transport import connect

SIZES = (1 << 20, 7_454_760, 64 << 20)
"""The second one is a network of 784-1024-1024-10."""

MEMCPY, GRPC, RPC = "memcpy", "gRPC", "RPC with copies"

OF_MEMCPY = 0.75
"""Wanted share of the speed of a memory copy."""

CHUNKS = {"in chunks of 1 MiB": 1 << 20, "in one message": 1 << 40}

RPC_CHUNKS = (64 << 10, 512 << 10)

ROW, SHORT_ROW, SHORT_BYTES, LEAST = 4, 20, 4 << 20, 4
"""Calls one after the other, of which the first quarter does not count: who has slept, and the caches, are slow at first. And
turns."""

Rows = Iterator[dict[str, Any]]


@dataclass
class Move:
    """One way to move the array. ``call`` is rank 0's part, ``serve`` rank 1's, if it has one."""

    call: Callable[[], Any]
    serve: Callable[[], Any] | None = None
    seconds: list[float] = field(default_factory=list)


def run(env: Any, sizes: Sequence[int] = SIZES, seconds: float = 5.0, kind: str = "auto") -> list[dict[str, Any]]:
    """Rows for every size (bytes), on rank 0; elsewhere none. ``kind``: see `mpiddl.remote_memory.allocate`.

    Communication
    -------------
    Collective over ``COMM_WORLD``, of which ranks 0 and 1 move data.
    """
    with world(env) as link:
        if link.size < 2:
            raise UsageError("ranks: got 1, expected 2 or more: mpiexec -n 2 mpiddl bench remote-memory")
        pair, rows = link.Create([0, 1] if link.rank < 2 else range(2, link.size)), list[dict[str, Any]]()
        if link.rank < 2:
            rows = [row for size in sizes for row in _size(pair, size, seconds, kind)]
        link.patient_barrier()
        return rows if link.rank == 0 else []


def _size(comm: Comm, nbytes: int, seconds: float, kind: str) -> Rows:
    memory, array = allocate(comm, nbytes, 1, kind), aligned_zeros(nbytes, np.uint8)
    memory.register(array)
    with ExitStack() as stack:
        for what in ("write", "read"):
            moves = _moves(comm, memory, array, what, stack)
            _check(comm, memory, array, moves, what)
            _take_turns(comm, moves, array, seconds)
            if comm.rank == 0:
                yield from _rows(f"{what} {size_text(nbytes)}, {memory.kind}", what, nbytes, moves)
    comm.Barrier()
    memory.Free()


def _moves(comm: Comm, memory: RemoteMemory, array: np.ndarray, what: str, stack: ExitStack) -> dict[str, Move]:
    other = aligned_zeros(array.size, np.uint8)
    other[:] = 1
    moves = {MEMCPY: Move(partial(np.copyto, other, array) if what == "write" else partial(np.copyto, array, other)),
             what: _ours(memory, array, what)}
    if find_spec("grpc"):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for number, (address, where) in enumerate((("localhost:0", "TCP"), (f"unix:{Path(folder) / what}", "a Unix socket"))):
            for form, chunk in CHUNKS.items():
                client = None
                if comm.rank == 0:
                    client = Client(array.size, f"{address}{number}{len(form)}" if "unix" in address else address, chunk)
                    stack.callback(client.Free)
                moves[f"{GRPC}, {where}, {form}"] = Move(partial(getattr(client, what), array) if client else lambda: None)
    if memory.kind == "verbs":
        for chunk in RPC_CHUNKS:
            verbs = connect(comm, depth=8, eager_bytes=chunk)
            stack.callback(verbs.Free)
            moves[f"{RPC}, {size_text(chunk)}"] = _rpc(verbs, array, chunk, what)
    return moves


def _ours(memory: RemoteMemory, array: np.ndarray, what: str) -> Move:
    if what == "read":
        return Move(lambda: memory.read(1, 0, array).Wait())
    count = [0]

    def call() -> None:
        count[0] += 1
        written = memory.write(1, 0, array)
        memory.signal(1, 0, count[0])
        memory.arrived(0, count[0]).Wait()
        written.Wait()

    def serve() -> None:
        count[0] += 1
        memory.arrived(0, count[0]).Wait()
        memory.signal(0, 0, count[0])

    return Move(call, serve)


def _rpc(verbs: Comm, array: np.ndarray, chunk: int, what: str) -> Move:
    """The caller sends a short message, and gets one; the array goes with the first, or comes with the second."""
    parts, short = [array[at : at + chunk] for at in range(0, array.size, chunk)], np.zeros(1, np.uint8)
    out, back = ([short, *parts], [short]) if what == "write" else ([short], [short, *parts])

    def move(first: int, sent: list[np.ndarray]) -> None:
        requests = [verbs.Isend(part, 1 - verbs.rank, first) for part in sent]
        for request in requests:
            request.Wait()

    def get(tag: int, got: list[np.ndarray]) -> None:
        requests = [verbs.Irecv(part, 1 - verbs.rank, tag) for part in got]
        for request in requests:
            request.Wait()

    def call() -> None:
        move(1, out)
        get(2, back)

    def serve() -> None:
        get(1, out)
        move(2, back)

    return Move(call, serve)


def _check(comm: Comm, memory: RemoteMemory, array: np.ndarray, moves: dict[str, Move], what: str) -> None:
    """Ours moves what it should."""
    array[:], memory.local[:] = comm.rank + 1, 7
    comm.Barrier()
    mine = moves[what].call if comm.rank == 0 else moves[what].serve
    if mine is not None:
        mine()
    comm.Barrier()
    wanted = {("write", 1): memory.local == 1, ("read", 0): array == 7}.get((what, comm.rank))
    if not all(comm.allgather(wanted is None or bool(wanted.all()))):
        raise MpiddlError(f"bench: {what} moved other bytes than it should, so nothing was measured")


def _take_turns(comm: Comm, moves: dict[str, Move], array: np.ndarray, seconds: float) -> None:
    draws, names, until, turns = np.random.default_rng(0), list(moves), now() + seconds, 0
    row = ROW if array.size >= SHORT_BYTES else SHORT_ROW
    while comm.bcast(turns < LEAST or now() < until, 0):
        turns += 1
        for name in map(names.__getitem__, draws.permutation(len(names))):
            comm.patient_barrier()
            for number in range(row):
                if comm.rank == 0:
                    array.fill(number)
                    began = now()
                    moves[name].call()
                    moves[name].seconds += [now() - began] * (number >= row // 4)
                elif (serve := moves[name].serve) is not None:
                    serve()


def _rows(case: str, what: str, nbytes: int, moves: dict[str, Move]) -> Rows:
    low, middle, high = quantiles(moves[what].seconds)
    memcpy = median(moves[MEMCPY].seconds)
    for rival in (MEMCPY, GRPC, RPC):
        theirs = [median(move.seconds) for name, move in moves.items() if name.startswith(rival)]
        if theirs:
            best = min(theirs)
            yield {"case": case, "contender": what, "baseline": rival, "size_bytes": nbytes, "seconds": middle,
                   "baseline_seconds": best, "ratio": best / middle, "p10": low, "p90": high, "memcpy_seconds": memcpy,
                   "of_memcpy": memcpy / middle, "wanted": OF_MEMCPY * best / memcpy if rival == GRPC else None}
