"""A reduction that is set up once, and what is done with it: fill ``input``, call it, read ``result``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiddl.collectives.arguments import check_alike, check_alive, plan_dtype
from mpiddl.collectives.wire import VERBS, Wire
from mpiddl.errors import CommError
from mpiddl.layout import pieces
from mpiddl.node.arena import Arena
from mpiddl.node.topology import neighbours
from mpiddl.progress.started import Queue, Steps, run
from mpiddl.transport.agree import agreed
from mpiddl.transport.base import Op
from mpiddl.transport.comm import Comm

STAGED_BYTES = 64 << 20
"""Most of an array that lies elsewhere is copied into shared memory in pieces of this size."""

PAGE_BYTES = 4096


class Plan(Queue, ABC):
    """Base class of `TwoStep` and `TreeSum`. Derived classes set the attributes in their constructor.

    Attributes
    ----------
    input : ndarray, shape (size,)
        This rank's contribution. Free to be written as soon as the call is over.
    result : ndarray, shape (size,)
        The reduction, not to be written, valid until this rank makes the next call.
    """

    input: np.ndarray
    result: np.ndarray
    _result: np.ndarray
    _inputs: list[np.ndarray]

    def __init__(self, comm: Comm, size: Any, dtype: Any, op: Op):
        check_alive(comm)
        comm.patient_barrier(0.0)  # others may still wait for what was started before
        self._comm, self._op = comm, op
        with agreed(comm):
            self._kind = self._checked(size, dtype, op)
        check_alike(comm, type(self).__name__, size=size, dtype=self._kind, op=op.name, **self._settings())
        self._near = neighbours(comm)
        self._arena = Arena(comm)
        self._wire: Wire | None = None

    def _checked(self, size: Any, dtype: Any, op: Op) -> np.dtype:
        """The dtype, if all arguments make sense."""
        return plan_dtype(size, dtype, op)

    def _settings(self) -> dict[str, Any]:
        """Further arguments, which are the same on every rank."""
        return {}

    @property
    def placed(self) -> str:
        """In words, where ``input`` lies."""
        over_verbs = self._wire is not None and self._wire.comm.library() == VERBS
        return "shared memory of the node" + ", registered for verbs" * over_verbs

    @abstractmethod
    def steps(self, size: int) -> Steps:
        """Reduce the first ``size`` elements."""

    def __call__(self) -> np.ndarray:
        """Reduce, and return ``result``."""
        self._check_alive()
        run(self._comm, self.wires, self.steps(self.result.size), True, self)
        return self.result

    @property
    def wires(self) -> tuple[Comm, ...]:
        """Where it sends. Its own: plans under way at the same time come to their messages in different orders on different
        ranks."""
        return (self._wire.comm,) if self._wire else ()

    @contextmanager
    def _made(self) -> Iterator[None]:
        """Where arrays are made: a node alone may have too little room, or fail to load kernels."""
        with self._arena.all_or_nothing(), agreed(self._comm):
            yield
        self.result = self._result[:]
        self.result.flags.writeable = False

    def _check_alive(self) -> None:
        check_alive(self._comm)
        if not self._inputs:
            raise CommError(f"{type(self).__name__}: got an object after Free(), expected an object that was not freed")

    def Free(self) -> None:
        """Give the memory back; collective. The arrays must not be touched afterwards."""
        self.give_up(f"its {type(self).__name__} was freed")
        self._inputs = []
        self._arena.Free()
        for wire in self.wires:
            wire.Free()


def staged_size(nbytes: int, dtype: np.dtype, most_bytes: int = STAGED_BYTES) -> int:
    """Elements of a plan for arrays of ``nbytes`` that lie elsewhere: it is kept for the next one of about that size."""
    return max(1, min(most_bytes, max(PAGE_BYTES, 1 << (nbytes - 1).bit_length())) // dtype.itemsize)


def staged_steps(plan: Plan, source: np.ndarray, result: np.ndarray) -> Steps:
    """``result`` becomes the reduction of all ranks' ``source``, through the plan's memory: two copies more."""
    for piece in pieces(result.size, plan.input.size):
        length = piece.stop - piece.start
        plan.input[:length] = source[piece]
        yield from plan.steps(length)
        result[piece] = plan.result[:length]
