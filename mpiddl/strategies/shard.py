"""A part of the parameters in memory that the ranks of a node share: whoever pushes applies the rule himself, under its lock.

A push holds the lock while the rule works on the parameters; a pull takes none: it copies what lies between two changes, and
tries again if one came into the copy (`mpiddl.kernels.lock`). So those that pull hold nobody up, and pull what is there when
their copy is over. Cost: a push, what the rule reads and writes; a pull, one copy of the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddl.memory import ALIGNMENT
from mpiddl.strategies.base import Replica
from mpiddl.strategies.push import Push
from mpiddl.transport.guard import Guard

PARAMS, MOMENT = "params", "moment."


class Shard:
    """One shard, as a rank of its node sees it.

    Parameters
    ----------
    comm : Comm
    rule : ParameterServer
        What becomes of a gradient.
    replica : Replica
        Whose optimiser and learning rate count.
    span : (int, int)
        Where the shard begins and ends in the parameters.
    segment : ndarray of uint8
        The shared memory, `size_bytes` of it, zero at first.

    Attributes
    ----------
    arrays : dict of str to ndarray
        What lies in it: ``params``, the optimiser's moments unless each worker has its own, and what the rule keeps.
    guard : Guard
        Its lock; its changes are the pushes that have been applied.
    """

    def __init__(self, comm: Any, rule: Any, replica: Replica, span: tuple[int, int], segment: np.ndarray):
        self._rule, self._replica, self._workers, self.span = rule, replica, comm.size, span
        self.guard = Guard(comm, segment[: 8 * Guard.WORDS].view(np.int64))
        self.arrays, place = dict[str, np.ndarray](), 8 * Guard.WORDS
        for name, like in _contents(rule, replica, comm.size, span).items():
            self.arrays[name] = segment[place : place + like.nbytes].view(like.dtype).reshape(like.shape)
            place += _whole_lines(like.nbytes)
        self._kept = {name: array for name, array in self.arrays.items() if name != PARAMS and not name.startswith(MOMENT)}
        self._moments = {name.removeprefix(MOMENT): array for name, array in self.arrays.items() if name.startswith(MOMENT)}

    @staticmethod
    def size_bytes(rule: Any, replica: Replica, workers: int, span: tuple[int, int]) -> int:
        """Of a shard's segment."""
        arrays = _contents(rule, replica, workers, span).values()
        return 8 * Guard.WORDS + sum(_whole_lines(array.nbytes) for array in arrays)

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Fill it, by the rank that serves it and before anybody looks: as it was ``saved``, or for the first time."""
        for name, like in (saved or _contents(self._rule, self._replica, self._workers, self.span)).items():
            if name in self.arrays:
                self.arrays[name][...] = like
        self.guard.changes = saved["version"] if saved else 0

    def saved(self) -> dict[str, Any]:
        """What `begin` goes on from; views, of this moment."""
        return {"version": self.guard.changes, **self.arrays}

    def push(self, grad: np.ndarray, before: np.ndarray, worker: int, pulled: int, count: int,
             moments: dict[str, np.ndarray]) -> Callable[[], int]:
        """Apply a gradient of ``worker``, its ``count``-th, that it took at ``before``, after ``pulled`` changes.

        ``moments`` are the worker's own, for rules that give it some. What it returns tells, once it is called, how many
        changes there were before this one: a shard of another node has taken the push when that returns.
        """
        own, params = self._rule.own_moments, self.arrays[PARAMS]
        with self.guard.changing() as version:
            rate = self._replica.rate(version / self._workers)
            push = Push(params, grad, before, worker, self._workers, version - pulled, count, self._replica.params.size, rate)
            factor = self._rule.correct({"version": version, **self._kept}, push)
            self._replica.apply(params, grad, moments if own else self._moments, rate, factor, count if own else version)
        return lambda: version

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        """Copy the parameters as they were after so many changes as are told by what it returns, once that is called."""
        version = self.guard.copy(self.arrays[PARAMS], into)
        return lambda: version


def _contents(rule: Any, replica: Replica, workers: int, span: tuple[int, int]) -> dict[str, np.ndarray]:
    """What lies in a shard, as it is at first."""
    part = slice(*span)
    moments = {} if rule.own_moments else {f"{MOMENT}{name}": moment[part] for name, moment in replica.moments.items()}
    return {PARAMS: replica.params[part], **moments, **rule.arrays(workers, replica.params[part])}


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
