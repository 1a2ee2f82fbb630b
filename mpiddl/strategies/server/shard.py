"""A shard: a part of the parameters in memory that the ranks of a node share. The pushing rank applies the rule under its lock.

A push holds the lock while the rule changes the parameters. A pull takes no lock: it copies the shard, and copies again if a
change happened during the copy (`mpiddl.kernels.node.lock`). Pulling ranks therefore never delay others. Cost: a push, the
memory traffic of the rule; a pull, one copy of the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiddl.memory import ALIGNMENT
from mpiddl.node.guard import Guard
from mpiddl.strategies.base import Replica
from mpiddl.strategies.server.push import Push, layers_of
from mpiddl.strategies.server.rule import Rule
from mpiddl.transport.comm import Comm

PARAMS, MOMENT = "params", "moment."


class Shard:
    """One shard, as seen by a rank of its node.

    Parameters
    ----------
    comm : Comm
    rule : Rule
        The treatment of a gradient.
    replica : Replica
        Gives the optimiser and the learning rate.
    span : (int, int)
        Begin and end of the shard in the parameters.
    segment : ndarray of uint8
        The shared memory, `size_bytes` long, initially zero.

    Attributes
    ----------
    arrays : dict of str to ndarray
        Contents: ``params``, the optimiser's moments unless each worker has its own, and the arrays of the rule.
    guard : Guard
        Its lock, which counts the applied pushes.
    """

    def __init__(self, comm: Comm, rule: Rule, replica: Replica, span: tuple[int, int], segment: np.ndarray):
        self._rule, self._replica, self._workers, self.span = rule, replica, comm.size, span
        self._layers = layers_of(replica.layers, *span)
        self.guard = Guard(comm, segment[: 8 * Guard.WORDS].view(np.int64))
        self.arrays, place = dict[str, np.ndarray](), 8 * Guard.WORDS
        for name, like in _contents(rule, replica, comm.size, span).items():
            self.arrays[name] = segment[place : place + like.nbytes].view(like.dtype).reshape(like.shape)
            place += _whole_lines(like.nbytes)
        self._kept = {name: array for name, array in self.arrays.items() if name != PARAMS and not name.startswith(MOMENT)}
        self._moments = {name.removeprefix(MOMENT): array for name, array in self.arrays.items() if name.startswith(MOMENT)}

    @staticmethod
    def size_bytes(rule: Rule, replica: Replica, workers: int, span: tuple[int, int]) -> int:
        """Size of a shard's segment."""
        arrays = _contents(rule, replica, workers, span).values()
        return 8 * Guard.WORDS + sum(_whole_lines(array.nbytes) for array in arrays)

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Fill the shard from ``saved`` or with initial values. Called by the serving rank before all other accesses."""
        for name, like in (saved or _contents(self._rule, self._replica, self._workers, self.span)).items():
            if name in self.arrays:
                self.arrays[name][...] = like
        self.guard.changes = saved["version"] if saved else 0

    def saved(self) -> dict[str, Any]:
        """The state for `begin`, as views."""
        return {"version": self.guard.changes, **self.arrays}

    def push(self, grad: np.ndarray, before: np.ndarray, worker: int, pulled: int, count: int,
             moments: dict[str, np.ndarray], sums: np.ndarray) -> Callable[[], int]:
        """Apply a gradient of ``worker``, computed at the parameters ``before``, which were pulled after ``pulled`` changes.

        ``count`` is the number of the worker's pushes so far. ``moments`` are the worker's own, for rules that use them.
        ``sums`` is the result of `Rule.layer_sums` for the whole gradient.
        Returns a function; its result is the number of changes before this one. When it returns, the push has been applied.
        """
        own, params = self._rule.own_moments, self.arrays[PARAMS]
        with self.guard.changing() as version:
            rate = self._replica.rate(version / self._workers)
            push = Push(params, grad, before, worker, self._workers, version - pulled, count, rate,
                        moments if own else self._moments, self._replica.updates + (count if own else version), sums,
                        self._layers, self._replica.proportional)
            self._rule.update({"version": version, **self._kept}, push, self._replica.apply)
        return lambda: version

    def pull(self, into: np.ndarray) -> Callable[[], int]:
        """Copy the parameters. Returns a function; its result is the number of changes that the copy contains."""
        version = self.guard.copy(self.arrays[PARAMS], into)
        return lambda: version


def _contents(rule: Rule, replica: Replica, workers: int, span: tuple[int, int]) -> dict[str, np.ndarray]:
    """Initial contents of a shard."""
    part = slice(*span)
    moments = {} if rule.own_moments else {f"{MOMENT}{name}": moment[part] for name, moment in replica.moments.items()}
    return {PARAMS: replica.params[part], **moments, **rule.arrays(workers, replica.params[part], len(replica.layers))}


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
