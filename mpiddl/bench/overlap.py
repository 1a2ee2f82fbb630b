"""How much of a step's communication is hidden behind its computing, and how much the dependency graph allows.

The same network, batch, buckets and ranks for all, in turns: a step that exchanges nothing, the exchange of all buckets with
nothing computed, one after the other (no overlap), and both at once as `mpiddl.strategies.synchronous.auto` does it. What a
step that exchanges nothing shows of its timeline (when each bucket was complete), and the seconds of the exchange alone, shared
out by size, make the ideal schedule on one wire (`mpiddl.strategies.synchronous.overlap_schedule`). All figures are medians of
the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpiddl.collectives.buckets import Buckets
from mpiddl.errors import UsageError
from mpiddl.machine.clock import now
from mpiddl.machine.launch_line import more_ranks
from mpiddl.memory import FlatBuffer
from mpiddl.models import MLP
from mpiddl.node.topology import neighbours
from mpiddl.optim import SGD
from mpiddl.progress.thread import Progress
from mpiddl.strategies.synchronous.auto import BUCKET_BYTES
from mpiddl.strategies.synchronous.overlap_schedule import Overlap, ideal, lengths, schedule
from mpiddl.study.interleaved import Contender, quantiles, take_turns
from mpiddl.transport.comm import Comm
from mpiddl.transport.mpi import world

RATE, MOMENTUM = 1e-4, 0.9
COMPUTING, EXCHANGE, AFTER, DURING = "computing alone", "communication alone", "one after the other", "overlapped"


def run(env: Any, hidden: Sequence[int], batch: int, seconds: float, bucket_bytes: int = BUCKET_BYTES) -> dict[str, Any]:
    """What was measured, on rank 0; elsewhere nothing.

    Parameters
    ----------
    hidden : sequence of int
        Widths of the hidden layers between 784 inputs and 10 outputs.
    batch : int
        Rows a rank.
    seconds : float
        How long is measured.
    bucket_bytes : int
        Least size of a bucket.

    Returns
    -------
    dict
        ``rows`` for `mpiddl.study.output`, ``overlap`` (an `Overlap`), ``thread`` (whether one moves messages on),
        and, for a plot, when each bucket was ``ready`` and the seconds of their ``exchanges``.

    Communication
    -------------
    Collective over ``COMM_WORLD``.
    """
    with world(env) as link:
        if link.size == 1:
            raise UsageError(f"bench overlap: got 1 rank, expected 2 or more: {more_ranks(env, 'bench overlap')}")
        found = _measured(link, (784, *hidden, 10), batch, seconds, bucket_bytes)
        return {} if link.rank else found


class Bench:
    """One rank's step in its four forms, with their timelines."""

    def __init__(self, comm: Comm, sizes: tuple[int, ...], batch: int, bucket_bytes: int):
        rng = np.random.default_rng(comm.rank)
        self.model, self.optimiser = MLP(sizes), SGD(momentum=MOMENTUM)
        self.params = FlatBuffer(self.model.shapes, "float32")
        self.model.init(self.params.views, np.random.default_rng(1))
        size = self.params.flat.size
        self.buckets = Buckets(comm, size, self.params.dtype)
        self.grad = FlatBuffer(self.model.shapes, "float32", self.buckets.input)
        self.moments, self.work = self.optimiser.init(size, "float32"), self.model.workspace(batch, "float32")
        self.x, self.y = rng.random((batch, sizes[0]), dtype=np.float32), rng.integers(0, sizes[-1], batch)
        self.comm, self.rows, self.bucket_bytes = comm, batch * comm.size, bucket_bytes
        self.ready: list[list[float]] = []
        self.computed: list[float] = []
        self.edges = self._edges()
        self.thread = Progress(comm)

    def _edges(self) -> list[tuple[int, int]]:
        """The buckets, as the backward pass completes them."""
        parts: list[slice] = []
        self.model.gradient(self.params.views, self.x, self.y, self.grad.views, ready=parts.append, work=self.work)
        edges, end = [], self.grad.flat.size
        for part in parts:
            if (end - part.start) * self.grad.flat.itemsize >= self.bucket_bytes or not part.start:
                edges.append((part.start, end))
                end = part.start
        return edges

    def computing(self) -> None:
        begin, marks = now(), list[float]()
        self._gradient(lambda first, last: marks.append(now() - begin))
        self.computed.append(now() - begin)
        self.ready.append(marks)
        self._update()

    def exchange(self) -> None:
        for edge in self.edges:
            self.buckets.start(*edge)
        self.buckets.wait()

    def after(self) -> None:
        self._gradient(lambda first, last: None)
        for edge in self.edges:
            self.buckets.start(*edge)
        self.buckets.wait()
        self._update()

    def during(self) -> None:
        self._gradient(self._start)
        self.thread.rest()
        self.buckets.wait()
        self._update()

    def _start(self, begin: int, end: int) -> None:
        request = self.buckets.start(begin, end)
        self.thread.on(request)
        if self.thread.trouble:
            request.Test()

    def _gradient(self, complete: Any) -> None:
        left = iter(self.edges)
        edge = next(left)

        def ready(part: slice) -> None:
            nonlocal edge
            if part.start == edge[0]:
                complete(*edge)
                edge = next(left, (-1, -1))

        self.model.gradient(self.params.views, self.x, self.y, self.grad.views, ready=ready, work=self.work)

    def _update(self) -> None:
        self.optimiser.update(self.params.flat, self.buckets.result, self.moments, RATE, 1 / self.rows, 0)

    def free(self) -> None:
        self.thread.Free()
        self.buckets.Free()


def _measured(comm: Comm, sizes: tuple[int, ...], batch: int, seconds: float, bucket_bytes: int) -> dict[str, Any]:
    bench = Bench(comm, sizes, batch, bucket_bytes)
    sent = lambda: comm.meter.bytes  # noqa: E731
    contenders = {
        COMPUTING: Contender(bench.computing),
        EXCHANGE: Contender(bench.exchange, sent),
        AFTER: Contender(bench.after, sent),
        DURING: Contender(bench.during, sent),
    }
    take_turns(comm, contenders, seconds)
    bench.free()
    medians = {name: quantiles(contender.seconds)[1] for name, contender in contenders.items()}
    ready, computed = _slowest(comm, bench.ready).tolist(), float(_slowest(comm, bench.computed))
    exchanges = lengths(medians[EXCHANGE], [end - begin for begin, end in bench.edges])
    best = ideal(ready, exchanges, computed, max(medians[COMPUTING] - computed, 0.0))
    overlap = Overlap(medians[COMPUTING], medians[EXCHANGE], best, medians[DURING])
    case = f"{'-'.join(map(str, sizes))}, batch {batch} a rank, {len(bench.edges)} buckets, {neighbours(comm).topology}"
    return {
        "rows": [_row(case, name, contender, medians[AFTER]) for name, contender in contenders.items()]
        + [_row(case, "ideal", Contender(lambda: None, seconds=[best]), medians[AFTER])],
        "overlap": overlap, "ready": ready, "exchanges": exchanges, "thread": not bench.thread.trouble,
    }


def _slowest(comm: Comm, samples: Sequence[Any]) -> np.ndarray:
    """Medians over the samples but the first, of the rank where they are largest."""
    own = np.median(np.array(samples[1:] or samples), axis=0)
    return np.max(comm.allgather(own), axis=0)


def _row(case: str, name: str, contender: Contender, baseline: float) -> dict[str, Any]:
    low, median, high = quantiles(contender.seconds)
    return {"case": case, "contender": name, "baseline": AFTER, "seconds": median, "baseline_seconds": baseline,
            "ratio": baseline / median, "p10": low, "p90": high, "sent_bytes": contender.sent_bytes or None}


def sentence(overlap: Overlap) -> str:
    """The outcome in one line."""
    computing, communication, best, step = (f"{seconds * 1e3:.1f}" for seconds in overlap)
    return (f"computing {computing} ms + communication {communication} ms; the dependency graph allows {best} ms, "
            f"reached {step} ms: hidden {overlap.reached * 1e3:.1f} of {overlap.allowed * 1e3:.1f} ms, {overlap.share:.0%}")


def draw(path: Path, found: Mapping[str, Any]) -> None:
    """The ideal timeline in two lanes, computing and wire, and where the step really ended; needs matplotlib."""
    from matplotlib.figure import Figure

    overlap, ready = found["overlap"], [0.0, *found["ready"]]
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    parts = [(begin * 1e3, (end - begin) * 1e3) for begin, end in pairwise(ready)]
    spans = [(begin * 1e3, (end - begin) * 1e3) for begin, end in schedule(found["ready"], found["exchanges"])]
    axes.broken_barh(parts, (1.1, 0.8), facecolors=("tab:blue", "lightsteelblue"), edgecolor="white")
    axes.broken_barh(spans, (0.1, 0.8), facecolors=("tab:orange", "moccasin"), edgecolor="white")
    for name, at, style in (("ideal", overlap.ideal, "--"), ("reached", overlap.step, "-")):
        axes.axvline(at * 1e3, color="black", ls=style, label=f"{name} {at * 1e3:.0f} ms")
    axes.set(yticks=(0.5, 1.5), yticklabels=("wire", "computing"), xlabel="milliseconds of a step",
             title=f"{overlap.share:.0%} of the overlap that is possible")
    axes.legend(loc="lower right")
    figure.savefig(path)
