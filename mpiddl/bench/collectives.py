"""Our collectives against the MPI library's on the same buffers, in turns within one run.

Every call of every contender sees the same arrays; a contender's results are checked against the library's first. Inputs are
written again before each call, and a row's ``seconds`` end when every rank has summed its result (`mpiddl.study.interleaved`).
The library also takes part in other settings than its defaults (`mpiddl.bench.rivals`).

A row holds, beside what every bench's rows hold: ``p10`` and ``p90`` of our seconds, ``call_seconds`` (without the summing),
``best_library`` (the fastest setting) and ``best_ratio`` (its seconds over ours), ``sent_bytes`` (payload of the rank
that sends most, by our own counter), ``link_bytes`` (of the busiest host, by its links' counters, headers included; across
nodes only), ``limit_seconds`` and ``of_limit`` (limit over our ``call_seconds``: 1 is as fast as memory or wire allow).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from mpiddl.bench.rivals import rivals
from mpiddl.collectives import TwoStep, calls
from mpiddl.collectives.arguments import flat
from mpiddl.collectives.multicast import works
from mpiddl.errors import MpiddlError, UsageError
from mpiddl.layout import block_bounds
from mpiddl.node.process_memory import readable
from mpiddl.node.topology import Neighbours, neighbours
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.study.limits import HEADERS, free_memory, memory_limit, wire_limit
from mpiddl.testbed.plan import read_rate
from mpiddl.transport.mpi import MpiComm, world
from mpiddl.tuning.rule import MULTICAST

SIZES = (16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
COPIES = 8  # arrays of a rank at most: inputs, results, those of the limit, the library's own
LIBRARY, LIMIT = "library", "limit"
CALLED = {"allreduce": "allreduce", "bcast": "bcast", "allgather": "allgatherv", "reduce-scatter": "reduce_scatter"}
"""By our names, what the library is called with."""

NAMES = {"allreduce": ("read", "two-step", "ring", "doubling"), "bcast": (*calls.BROADCAST, MULTICAST),
         "allgather": calls.ALLGATHER, "reduce-scatter": ("read", "ring")}
"""The algorithms that can be chosen; those that do not work on a host or for a size are left out."""

Takes = Callable[[str], bool]
"""Whether an algorithm is to be measured."""

Libraries = dict[str, Any]
"""mpi4py's communicators by contender: the library as it comes, and in other settings."""


def run(name: str, env: Any, sizes: Sequence[int] = SIZES, dtype: str = "float32", seconds: float = 4.0,
        rate: str | None = None, algorithms: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows for every size and algorithm of one collective, on rank 0; elsewhere none.

    Parameters
    ----------
    name : str
        ``allreduce``, ``bcast``, ``allgather`` or ``reduce-scatter``.
    sizes : sequence of int
        Bytes of the whole array.
    dtype : str
        Of its elements.
    seconds : float
        How long each size is measured.
    rate : str, optional
        What each link carries, ``200mbit``; else the wire's limit is measured.
    algorithms : sequence of str
        Measure only these, beside the library as it comes; by default all, and the library's settings.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    kind, bits = _dtype(dtype), read_rate(rate)
    if unknown := [algorithm for algorithm in algorithms if algorithm not in NAMES[name]]:
        raise UsageError(f"algorithms: got {unknown[0]!r}, expected some of {', '.join(NAMES[name])}")
    with world(env) as link:
        check_memory(link, max(sizes))
        alone: AbstractContextManager[dict[str, Any]] = nullcontext({})
        with alone if algorithms else rivals(link, CALLED[name]) as settings:
            libraries = {LIBRARY: link.raw} | {f"{LIBRARY}, {setting}": raw for setting, raw in settings.items()}
            takes: Takes = algorithms.__contains__ if algorithms else lambda algorithm: True
            rows = [row for size in sizes for row in _case(link, name, size, kind, seconds, bits, libraries, takes)]
        return [] if link.rank else rows


def _dtype(name: str) -> np.dtype:
    try:
        kind = np.dtype(name)
    except (TypeError, ValueError):
        raise UsageError(f"dtype: got {name!r}, expected a numpy dtype such as float32") from None
    flat("dtype", np.empty(0, kind))
    return kind


def check_memory(comm: MpiComm, size: int) -> None:
    """Refuse sizes that would have the kernel kill somebody."""
    free = free_memory()
    local = neighbours(comm).local.size
    if COPIES * size * local > min(comm.allgather(free)):
        raise UsageError(
            f"sizes: got {size_text(size)}, expected at most {size_text(free // (COPIES * local))}: "
            f"{local} ranks on this node need {COPIES} arrays each, and {free / 1e9:.1f} GB of memory are free"
        )


def _case(comm: MpiComm, name: str, size: int, dtype: np.dtype, seconds: float, rate: float | None,
          libraries: Libraries, takes: Takes) -> Iterator[dict[str, Any]]:
    n = max(1, size // dtype.itemsize)
    source = np.random.default_rng(comm.rank).integers(1, 5, n).astype(dtype)
    plans: list[TwoStep] = []
    contenders = {"allreduce": _allreduce, "bcast": _bcast, "allgather": _allgather,
                  "reduce-scatter": _reduce_scatter}[name](comm, source, plans, libraries, takes)
    near, given = neighbours(comm), None
    if comm.size > 1:
        limit, given = _limit(near, name, n, dtype, rate)
        if limit:
            contenders[LIMIT] = limit
    take_turns(comm, contenders, seconds)
    for plan in plans:
        plan.Free()
    yield from _rows(f"{size_text(size)}, {near.topology}", contenders, n * dtype.itemsize, given,
                     len(near.topology.nodes) > 1)


def _limit(near: Neighbours, name: str, n: int, dtype: np.dtype, rate: float | None) -> tuple[Contender | None, float | None]:
    """The operation that is the limit, or its seconds where the rate is given."""
    nodes = len(near.topology.nodes)
    if nodes == 1:
        return memory_limit(near.local, n, dtype, 3 if "reduce" in name else 2), None
    least = {"allreduce": 2 * (nodes - 1) / nodes, "bcast": 1.0}.get(name, (nodes - 1) / nodes)
    nbytes = int(least * n * dtype.itemsize)
    return (None, nbytes * 8 * HEADERS / rate) if rate else (wire_limit(near, nbytes), None)


def _allreduce(comm: MpiComm, source: np.ndarray, plans: list[TwoStep], libraries: Libraries,
               takes: Takes) -> dict[str, Contender]:
    plan = TwoStep(comm, source.size, source.dtype)
    plans.append(plan)
    plan.input[:] = source
    result = np.zeros_like(source)
    inputs, read = [source, plan.input], result.sum
    found = {name: Contender(partial(raw.Allreduce, plan.input, result), read=read) for name, raw in libraries.items()}
    if takes("two-step, in place"):
        found["two-step, in place"] = _ours(comm, plan, read=plan.result.sum)
    if takes("leader, in place") and len(neighbours(comm).topology.nodes) > 1:
        leader = TwoStep(comm, source.size, source.dtype, leader=True)
        plans.append(leader)
        leader.input[:] = source
        inputs.append(leader.input)
        found["leader, in place"] = _ours(comm, leader, read=leader.result.sum)
    unfit = {"read": readable(comm) is None, "doubling": source.nbytes > 1 << 20}
    for algorithm in (name for name in NAMES["allreduce"] if takes(name) and not unfit.get(name)):
        found[algorithm] = _ours(comm, partial(calls.allreduce, comm, source, result, algorithm=algorithm), read=read)
    comm.raw.Allreduce(source, result)
    wanted = result.copy()
    for name, contender in found.items():
        result[:] = 0
        contender.call()
        _check(comm, name, plan.result if "in place" in name else result, wanted)
    for name, contender in found.items():
        own = inputs[-1] if "leader" in name else inputs[1] if "in place" in name or name in libraries else source
        contender.write = partial(own.fill, 1)
    return found


def _bcast(comm: MpiComm, source: np.ndarray, plans: list[TwoStep], libraries: Libraries,
           takes: Takes) -> dict[str, Contender]:
    buf = source.copy()
    found = {name: Contender(partial(raw.Bcast, buf, 0)) for name, raw in libraries.items()}
    for algorithm in filter(takes, (*calls.BROADCAST, *_multicast(comm))):
        found[algorithm] = _ours(comm, partial(calls.broadcast, comm, buf, 0, algorithm=algorithm))
    wanted = comm.bcast(source, 0)
    for name, contender in found.items():
        buf[:] = source
        contender.call()
        _check(comm, name, buf, wanted)
        contender.write, contender.read = partial(buf[: buf.size * (comm.rank == 0)].fill, 1), buf.sum
    return found


def _allgather(comm: MpiComm, source: np.ndarray, plans: list[TwoStep], libraries: Libraries,
               takes: Takes) -> dict[str, Contender]:
    begin, end = block_bounds(source.size, comm.size, comm.rank)
    wanted, result = comm.bcast(source, 0), np.zeros_like(source)
    block = wanted[begin:end].copy()
    counts = [last - first for first, last in (block_bounds(source.size, comm.size, rank) for rank in range(comm.size))]
    found = {name: Contender(partial(raw.Allgatherv, block, (result, counts))) for name, raw in libraries.items()}
    for algorithm in filter(takes, ("ring", *_multicast(comm))):
        found[algorithm] = _ours(comm, partial(calls.allgather, comm, block, result, algorithm=algorithm))
    for name, contender in found.items():
        result[:] = 0
        contender.call()
        _check(comm, name, result, wanted)
        contender.write, contender.read = partial(block.fill, 1), result.sum
    return found


def _reduce_scatter(comm: MpiComm, source: np.ndarray, plans: list[TwoStep], libraries: Libraries,
                    takes: Takes) -> dict[str, Contender]:
    begin, end = block_bounds(source.size, comm.size, comm.rank)
    result, whole = np.zeros(end - begin, source.dtype), np.zeros_like(source)
    counts = [last - first for first, last in (block_bounds(source.size, comm.size, rank) for rank in range(comm.size))]
    found = {name: Contender(partial(raw.Reduce_scatter, source, result, counts)) for name, raw in libraries.items()}
    for algorithm in filter(takes, ("read", "ring") if readable(comm) is not None else ("ring",)):
        found[algorithm] = _ours(comm, partial(calls.reduce_scatter, comm, source, result, algorithm=algorithm))
    comm.raw.Allreduce(source, whole)
    for name, contender in found.items():
        result[:] = 0
        contender.call()
        _check(comm, name, result, whole[begin:end])
    for contender in found.values():
        contender.write, contender.read = partial(source.fill, 1), result.sum
    return found


def _multicast(comm: MpiComm) -> tuple[str, ...]:
    """Its name, if it works here."""
    return (MULTICAST,) if len(neighbours(comm).topology.nodes) > 1 and works(comm) else ()


def _ours(comm: MpiComm, call: Callable[[], Any], read: Callable[[], Any] = lambda: None) -> Contender:
    return Contender(call, lambda: comm.meter.bytes, read=read)


def _check(comm: MpiComm, name: str, found: np.ndarray, wanted: np.ndarray) -> None:
    """Sums of small integers have no rounding: nothing but equality will do."""
    if not all(comm.allgather(bool(np.array_equal(found, wanted)))):
        raise MpiddlError(f"bench: the results of {name} and of the MPI library differ, so nothing was measured")


def _rows(case: str, contenders: dict[str, Contender], size: int, given: float | None,
          across: bool) -> Iterator[dict[str, Any]]:
    library = quantiles(contenders[LIBRARY].seconds)
    limit = quantiles(contenders[LIMIT].call_seconds)[1] if LIMIT in contenders else given
    best, best_seconds = best_library(contenders)
    for name, contender in contenders.items():
        if name == LIMIT:
            continue
        low, median, high = quantiles(contender.seconds)
        called = quantiles(contender.call_seconds)[1]
        yield {
            "case": case, "contender": name, "baseline": LIBRARY, "size_bytes": size,
            "seconds": median, "baseline_seconds": library[1], "ratio": library[1] / median,
            "p10": low, "p90": high, "baseline_p10": library[0], "baseline_p90": library[2],
            "call_seconds": called, "best_library": best, "best_ratio": best_seconds / median,
            "sent_bytes": None if name.startswith(LIBRARY) else contender.sent_bytes,
            "link_bytes": contender.link_bytes if across else None,
            "limit_seconds": limit, "of_limit": limit / called if limit else None,
        }


def best_library(contenders: dict[str, Contender]) -> tuple[str, float]:
    """The fastest setting of the library, and its seconds."""
    medians = {name: quantiles(each.seconds)[1] for name, each in contenders.items() if name.startswith(LIBRARY)}
    best = min(medians, key=lambda name: medians[name])
    return best, medians[best]


def size_text(size: int) -> str:
    """1048576 as 1 MiB."""
    for unit, word in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {word}"
    return f"{size} B"
