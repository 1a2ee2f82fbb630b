"""`mpiddl.Communicator` against the bare library and against each algorithm taken by force, in turns on the same arrays.

The same calls make the table of ``mpiddl tune``: what is measured there is what programs get, mpi4py's and our own Python
included. Inputs are written again before each call, and the seconds end when every rank that has a result has summed it
(`mpiddl.study.interleaved`). The library also takes part in other settings than its defaults (`mpiddl.bench.rivals`).

A row holds, beside what every bench's rows hold: ``p10`` and ``p90`` of our seconds, ``call_seconds`` (without the summing),
``chosen``, ``best`` (the fastest of all contenders but the communicator), ``best_seconds``, ``of_best`` (these over ours),
``slower_us`` (microseconds than the library), ``best_library`` (the fastest setting) and ``best_ratio`` (its seconds
over ours).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpiddl.bench.collectives import best_library, check_memory, size_text
from mpiddl.bench.rivals import rivals
from mpiddl.collectives.multicast import works
from mpiddl.errors import MpiddlError, TransportError
from mpiddl.node.process_memory import readable
from mpiddl.node.topology import neighbours
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Op
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import Intracomm, MpiComm, world
from mpiddl.transport.verbs.transport import DEVICE, LEAST_DEPTH, connect
from mpiddl.tuning import Entry, Place, Table, add_to_table, check_table, chooser
from mpiddl.tuning.place import place_of
from mpiddl.tuning.rule import CANDIDATES, EAGER, LIBRARY, MESSAGE, RENDEZVOUS, UNFUSED, candidates
from mpiddl.tuning.verbs import BUFFERS_BYTES, eager_bytes
from mpiddl.tuning.verbs import works as verbs_work

if TYPE_CHECKING:
    from mpiddl.communicator import Communicator

MESSAGES = tuple(1 << power for power in range(9, 17))
"""Bytes of messages over verbs."""

SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
TUNED = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
OURS = "Communicator"

LONG_ROUNDS = 1 << 20
"""Bytes from which on what takes whole arrays ceil(log2 P) times has lost."""

CALLED = {"reduce_scatter": "reduce_scatter_block"}
"""By a table's names, what the library is called with; elsewhere the same."""


def run(env: Any, calls: Sequence[str], sizes: Sequence[int] = SIZES, seconds: float = 2.0,
        table: Path | None = None, dtype: str = "float32", op: str = "sum", everything: bool = True) -> list[dict[str, Any]]:
    """Rows for every call and size, on rank 0; elsewhere none.

    Parameters
    ----------
    calls : sequence of str
        Of `mpiddl.tuning.rule.CANDIDATES`.
    sizes : sequence of int
        Bytes of the array that is reduced, broadcast or received in all.
    seconds : float
        For each call and size.
    table : path, optional
        Of ``mpiddl tune``; else the communicator takes the user's.
    dtype, op : str
        Of reductions: a dtype of numpy's, and sum, min, max or prod.
    everything : bool
        Whether the library's other settings and all algorithms take part, too.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    with world(env) as link:
        check_memory(link, max(sizes))
        from mpiddl.communicator import Communicator

        comm = Communicator(link.raw, table)
        rows = [row for call in calls for row in _rows(link, comm, call, sizes, seconds, dtype, op, everything)]
        return [] if link.rank else rows


def tune(env: Any, path: Path, calls: Sequence[str], sizes: Sequence[int] = TUNED, seconds: float = 1.0,
         tell: Callable[[str], None] | None = None) -> Table | None:
    """Measure every algorithm of every call here, and put it into the table at ``path``; on rank 0 the table.

    Raises
    ------
    UsageError, DataError
        On every rank: the file cannot be written, or is no table: it is not replaced then.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    with world(env) as link:
        check_memory(link, max(sizes))
        with agreed(link):
            if link.rank == 0:
                check_table(path)
        topology = neighbours(link).topology
        place = link.bcast(place_of(link, topology, env) if link.rank == 0 else None)
        entries = []
        for call in calls:
            messages = call == MESSAGE
            found = _message(link, place, seconds) if messages else _entry(link, place, call, _sizes(call, sizes), seconds)
            entries += [] if found is None else [found]
            if tell is not None and link.rank == 0:
                tell(f"{call}: {_best_of(found)}")
        table = Table()
        with agreed(link):
            if link.rank == 0:
                table = add_to_table(path, entries)
        return None if link.rank else table


def _best_of(entry: Entry | None) -> str:
    """In words, what is the fastest at each size."""
    if entry is None:
        return "not measured, because no RDMA verbs connect these ranks"
    return ", ".join(f"{size_text(size)} {best}" for size, best in zip(entry.sizes, entry.best, strict=True))


def describe(env: Any, path: Path | None, calls: Sequence[str], sizes: Sequence[int]) -> str:
    """What is chosen here for every call and size, and why; on rank 0, elsewhere nothing. Collective over ``COMM_WORLD``."""
    with world(env) as link:
        choice, rank = chooser(link, env, path), link.rank
        copied = eager_bytes(link, env, path)
    lines = [f"{' ' * 8}{field}: {value}" for field, value in choice.place._asdict().items()]
    if MESSAGE in calls:
        lines += [f"messages over verbs, if they work: up to {size_text(copied)} are copied into a registered buffer"]
    for call in filter(CANDIDATES.__contains__, calls):
        lines += [f"{call} {size_text(size)}: {choice.choose(call, size)}" for size in _sizes(call, sizes)]
    return "" if rank else "\n".join(["here", *lines])


def _sizes(call: str, sizes: Sequence[int]) -> tuple[int, ...]:
    return (0,) if call == "barrier" else tuple(sorted(set(sizes)))


def _entry(link: MpiComm, place: Any, call: str, sizes: tuple[int, ...], seconds: float) -> Entry:
    found: dict[str, list[float]] = {}
    for size in sizes:
        contenders = _forced(link, _Arrays(link, call, size))
        take_turns(link, contenders, seconds)
        for name, contender in contenders.items():
            found.setdefault(name, []).append(quantiles(contender.seconds)[1])
    complete = {name: tuple(values) for name, values in found.items() if len(values) == len(sizes)}
    return link.bcast(Entry(place, call, sizes, complete))


def _message(link: MpiComm, place: Place, seconds: float) -> Entry | None:
    """Each rank sends a message to the next one; None if verbs do not work."""
    nodes = neighbours(link)
    if len(nodes.topology.nodes) == 1 or not verbs_work(nodes.ring, aloud=False):
        return None
    library, depth = nodes.ring.Create(range(link.size)), BUFFERS_BYTES // (2 * MESSAGES[-1] * link.size)
    try:
        verbs = connect(library, os.environ.get(DEVICE, ""), max(depth, LEAST_DEPTH), eager_bytes=MESSAGES[-1])
    except TransportError:  # so much memory cannot be locked
        return None
    found: dict[str, list[float]] = {}
    for size in MESSAGES:
        sent, got = np.zeros(size, np.uint8), np.zeros(size, np.uint8)

        def exchange(comm: Comm, copied: int, sent: np.ndarray = sent, got: np.ndarray = got) -> None:
            verbs.messages.eager_bytes = copied
            request = comm.Irecv(got, (comm.rank - 1) % comm.size, 0)
            comm.Isend(sent, (comm.rank + 1) % comm.size, 0).Wait()
            request.Wait()

        ways = {LIBRARY: (library, 0), EAGER: (verbs, MESSAGES[-1]), RENDEZVOUS: (verbs, 0)}
        contenders = {name: Contender(partial(exchange, *way), write=partial(sent.fill, 1), read=got.sum)
                      for name, way in ways.items()}
        take_turns(link, contenders, seconds)
        for name, contender in contenders.items():
            found.setdefault(name, []).append(quantiles(contender.seconds)[1])
    verbs.Free()
    return link.bcast(Entry(place, MESSAGE, MESSAGES, {name: tuple(values) for name, values in found.items()}))


def _rows(link: MpiComm, comm: Communicator, call: str, sizes: Sequence[int], seconds: float, dtype: str, op: str,
          everything: bool) -> Iterator[dict[str, Any]]:
    nothing: AbstractContextManager[dict[str, Any]] = nullcontext({})
    with rivals(link, CALLED.get(call, call)) if everything else nothing as settings:
        for size in _sizes(call, sizes):
            arrays = _Arrays(link, call, size, dtype, op)
            others = (_forced(link, arrays, size < LONG_ROUNDS, settings) if everything
                      else {LIBRARY: arrays.contender(link.raw)})  # fmt: skip
            yield _row(link, comm, arrays, size, seconds, others)


def _row(link: MpiComm, comm: Communicator, arrays: _Arrays, size: int, seconds: float,
         others: dict[str, Contender]) -> dict[str, Any]:
    call, kind = arrays.name, f" {arrays.dtype} {arrays.op}"
    kind = "" if kind == " float32 sum" else kind
    contenders = {OURS: arrays.contender(comm), **others}
    take_turns(link, contenders, seconds)
    medians = {name: quantiles(contender.seconds) for name, contender in contenders.items()}
    best = min((name for name in medians if name != OURS), key=lambda name: medians[name][1])
    low, median, high = medians[OURS]
    library, library_seconds = best_library(contenders)
    return {
        "case": f"{call}{kind} {size_text(size)}, {neighbours(link).topology}", "contender": OURS, "baseline": LIBRARY,
        "size_bytes": size,
        "seconds": median, "baseline_seconds": medians[LIBRARY][1], "ratio": medians[LIBRARY][1] / median,
        "p10": low, "p90": high, "chosen": comm.why(call, size, arrays.dtype, arrays.reduces).algorithm,
        "best": best, "best_seconds": medians[best][1],
        "of_best": medians[best][1] / median, "slower_us": 1e6 * (median - medians[LIBRARY][1]),
        "call_seconds": quantiles(contenders[OURS].call_seconds)[1], "best_library": library,
        "best_ratio": library_seconds / median,
    }


def _forced(link: MpiComm, arrays: _Arrays, all_of_them: bool = True,
            settings: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Contender]:
    """The call by the library, also in other ``settings``, and by each algorithm, results checked against the library's."""
    from mpiddl.communicator.kinds import always

    topology = neighbours(link).topology
    several = len(topology.nodes) > 1
    multicast, verbs = several and works(link), several and verbs_work(neighbours(link).ring, aloud=False)
    names = [name for name in candidates(topology, arrays.name, readable(link) is not None, multicast, verbs)
             if all_of_them or name not in ("doubling", "binomial")]
    if topology.size == 1:
        names = [LIBRARY]
    made = {name: arrays.contender(link.raw if name == LIBRARY else always(link, name)) for name in names}
    made |= {f"{LIBRARY}, {setting}": arrays.contender(raw) for setting, raw in settings.items()}
    wanted = arrays.given_by(made[LIBRARY].call)
    for name, contender in made.items():
        if not all(link.allgather(bool(np.array_equal(arrays.given_by(contender.call), wanted)))):
            raise MpiddlError(f"bench: the result of {arrays.name} with algorithm {name} is wrong, so nothing was measured")
    return made


class _Arrays:
    """What a call works on, the same memory for all: by where arrays lie in pages and caches contenders differ by a fifth."""

    def __init__(self, link: MpiComm, name: str, size: int, dtype: str = "float32", op: str = "sum"):
        ranks, self.rank = link.size, link.rank
        self.name = name.removesuffix("_unfused")
        self.dtype, self.op = np.dtype("int64" if name in UNFUSED.values() else dtype), op
        self.reduces = link.transport.operation(Op(op.upper()))
        width, name = self.dtype.itemsize, self.name
        n = max(1, size // width) if name in ("allreduce", "reduce", "bcast") else max(1, size // width // ranks) * ranks
        # Sums of small integers have no rounding.
        self.source = np.random.default_rng(link.rank).integers(1, 5, n).astype(self.dtype)
        self.result, self.part = np.zeros_like(self.source), np.zeros(n // ranks, self.dtype)
        self.block = self.source[: n // ranks].copy()

        root, nothing = self.rank == 0, self.source[:0]
        sent = self.source if root else self.result
        self.sent, (self._written, self._given) = sent, {
            "allreduce": (self.source, self.result), "reduce": (self.source, self.result if root else nothing),
            "bcast": (sent if root else nothing, sent), "allgather": (self.block, self.result),
            "reduce_scatter": (self.source, self.part), "barrier": (nothing, nothing),
        }[name]  # fmt: skip

    def contender(self, comm: Intracomm) -> Contender:
        """One call on ``comm``: the inputs of this rank are written before it, and its result is read after it."""
        source, result, part, block, sent, op = self.source, self.result, self.part, self.block, self.sent, self.reduces
        ways: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: comm.Allreduce(source, result, op),
            "reduce": lambda: comm.Reduce(source, result, op, root=0),
            "bcast": lambda: comm.Bcast(sent, root=0),
            "allgather": lambda: comm.Allgather(block, result),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, part, op),
            "barrier": comm.Barrier,
        }
        return Contender(ways[self.name], write=partial(self._written.fill, 1), read=self._given.sum)

    def given_by(self, call: Callable[[], Any]) -> Any:
        """A copy of what a call gives, into arrays that hold nothing of the one before."""
        self.result[:], self.part[:] = 0, 0
        call()
        return self._given.copy()
