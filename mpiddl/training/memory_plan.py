"""Which memory crosses between ranks in a step of training, who writes it, where it lies, and which copies that saves.

Two passes. The first looks at the model and the strategy only: the arrays of the model and their shapes, and what the strategy
exchanges, by its attributes. The second traces one mini-batch: who writes the gradient, found by address
(`mpiddl.models.traced_gradient`).

A message through buffers copies an array twice: into the buffer of the sender, and out of that of the receiver. An array that
is computed where others read or write it is not copied. If a model computes its gradient elsewhere, that is one copy.

Source: Xue et al., Fast distributed deep learning over RDMA, EuroSys 2019, arXiv:1805.08430, section 3.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiddl.memory import PRIVATE
from mpiddl.models.traced_gradient import Origin, trace
from mpiddl.strategies import Strategy, describe
from mpiddl.strategies.server.rule import Rule
from mpiddl.training.loop import Gradient
from mpiddl.training.request import Request
from mpiddl.training.session import Session, open_session, starting_state
from mpiddl.transport.comm import Comm

IN_MESSAGES = 2
"""Copies of an array that is sent through buffers."""


class Row(NamedTuple):
    """One array of a model.

    tensor, nbytes : its name and size.
    crosses : what of it other ranks get: gradient, or parameters.
    made, placed : in words, who writes it, and where it lies.
    copies : that the model makes of it in a step.
    saved : copies that are spared against messages through buffers; None where it lies in memory of the rank, and the MPI
        library may or may not copy.
    """

    tensor: str
    nbytes: int
    crosses: str
    made: str
    placed: str
    copies: int
    saved: int | None


class MemoryPlan(NamedTuple):
    """``strategy`` in words, the rows, how many gradients a rank computes in a step, and what a user can do about copies."""

    strategy: str
    rows: list[Row]
    gradients: int
    advice: list[str]


def plan(link: Comm, request: Request) -> MemoryPlan:
    """The plan of a training job, found on the first rank that computes a gradient; the same on all ranks. Collective."""
    control = link.Dup()
    with open_session(link, control, request) as session:
        state, _ = starting_state(link, control, session)
        gradient = Gradient(link, session.model, state.params, session.strategy)
        placed = session.strategy.placed(link, gradient.flat.size, gradient.flat.dtype)
        parts, _ = session.plan.step(0)
        times = control.setup_allgather(len(parts))
        first = next((rank for rank, count in enumerate(times) if count), 0)  # servers compute nothing
        origins = {}
        if link.rank == first and parts:
            origins = trace(lambda views: gradient.compute(state.params, parts[0], views), gradient.buffer)
        served = session.strategy.served_from(link, state.strategy, state.replica)
        session.strategy.finish(link, state.strategy, state.replica)
        found = MemoryPlan(describe(session.strategy), list(_rows(session, origins, placed, served, times[first])),
                           times[first], list(_advice(origins)))
    return control.bcast(found, first)


def crossing(strategy: Strategy) -> tuple[str, ...]:
    """What a strategy exchanges, by its attributes: gradients if it sums them or servers get them, parameters unless all ranks
    have the same.

    Examples
    --------
    >>> from mpiddl.strategies import make_strategy
    >>> crossing(make_strategy("ring")), crossing(make_strategy("gossip")), crossing(make_strategy("alone"))
    (('gradient',), ('parameters',), ())
    """
    members = getattr(strategy, "members", (strategy,))
    gradient = any(member.sums or isinstance(getattr(member, "rule", None), Rule) for member in members)
    parameters = not all(member.replicated for member in members)
    return ("gradient",) * gradient + ("parameters",) * parameters


def _rows(session: Session, origins: dict[str, Origin], placed: str, served: str, times: int) -> Iterator[Row]:
    itemsize = np.dtype(session.job.dtype).itemsize
    crosses = crossing(session.strategy)
    for name, origin in origins.items():
        nbytes = itemsize * int(np.prod(session.model.shapes[name]))
        if "gradient" in crosses:
            copies = -(-origin.copied * times // nbytes) if nbytes else 0
            saved = None if placed == PRIVATE or not origin.written else max(0, IN_MESSAGES - copies)
            yield Row(name, nbytes, "gradient", _made(origin), placed, copies, saved)
        if "parameters" in crosses:
            made = "the rule of the servers" if served else "the update"
            yield Row(name, nbytes, "parameters", made, served or PRIVATE, 0, None)


def _made(origin: Origin) -> str:
    if not origin.written:
        return "not written"
    if origin.copied:
        return f"{', '.join(origin.made) or 'elsewhere'}, copied in {', '.join(origin.copies)}"
    return f"in place by {', '.join(origin.in_place) or 'compiled code'}"


def _advice(origins: dict[str, Origin]) -> Iterator[str]:
    for name, origin in origins.items():
        if origin.copied:
            yield (f"{name}: {', '.join(origin.copies)} copies {origin.copied:,} bytes for each gradient; to avoid that, name "
                   f"the target, such as out=grad[{name!r}]")
        if not origin.written:
            yield f"{name}: the model does not write its gradient, so that other ranks get what was there before"


def text_of(found: MemoryPlan) -> str:
    """The plan as a table."""
    heads = ("tensor", "bytes", "crosses as", "made", "placed in", "copies", "saved")
    numbers = [heads.index(name) for name in ("bytes", "copies", "saved")]
    cells = [heads, *(tuple("" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in row)
                      for row in found.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) if place in numbers else cell.ljust(width)
                       for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    total = sum(row.copies * row.nbytes for row in found.rows)
    several = f", for {found.gradients} gradients of a rank" * (found.gradients > 1)
    lines = [f"strategy: {found.strategy}", "", *lines, "", f"The model copies {total:,} bytes in each step{several}.",
             *found.advice]
    return "\n".join(lines if found.rows else [*lines[:1], "Nothing crosses between ranks."]) + "\n"
